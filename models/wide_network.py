"""Regression by a wide relu network with known noise, the prior of which is nearly a Gaussian process.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, offset^2)    h_n = relu(x_n W1 + b1)            H = width hidden units
    W2_k  ~ N(0, sigma^2 / H)    b2   ~ N(0, offset^2)    f_n = h_n W2 + b2                  y_n | x_n ~ N(f_n, noise^2)

As H grows, f tends to a Gaussian process of mean 0 and covariance (arc-cosine kernel; for one hidden layer it is the
covariance of f at every H)

    K(x, x') = offset^2 + sigma^2 / (2 pi) sqrt(A(x, x) A(x', x')) (sin t + (pi - t) cos t),
    A(x, x') = offset^2 + sigma^2 x . x' / F,        cos t = A(x, x') / sqrt(A(x, x) A(x', x')),

so that Gaussian-process regression with K says in closed form what the posterior of a wide network predicts.

Sizes: (F + 2) H + 1 numbers (2401 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised: a linear fit leaves a noise of about 0.7.
Source: R. M. Neal, Bayesian Learning for Neural Networks (1996), chapter 2; Y. Cho and L. K. Saul, Kernel methods for
deep learning (2009), for K; J. Lee et al., Deep neural networks as Gaussian processes (2018), for several layers.

What is hard about its posterior: in function space nothing is left to know, in weight space each weight hardly leaves
its prior. Mean field then stays with the prior, and the wider the network the flatter its fit (B. Coker et al., Wide
mean-field Bayesian neural networks ignore the data, 2022, for odd activations): an approximation that fails where exact
answers are easy. A linearised Laplace approximation has another kernel, that of the tangents. For NUTS there are no
narrow valleys, only many coordinates.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "diabetes"


def model(
    x: Any,
    y: Any = None,
    *,
    width: int = 200,
    depth: int = 1,
    activation: str = "relu",
    sigma: float = 1.4,
    offset: float = 0.5,
    noise: float = 0.7,
) -> None:
    """A network of `depth` hidden layers of `width` units with a noise that is given, in units of y.

    x: (N, F). y: (N,). sigma: prior standard deviation of a weight, times sqrt(fan-in). offset: that of a bias.
    """
    widths, weights = [width] * depth + [1], priors.Normal(0.0, "fan_in", sigma)
    f = bnn.mlp(x, widths, activation, weights, bias=priors.Normal(0.0, offset))
    bnn.observe(y, f, likelihoods.Gaussian(noise))
