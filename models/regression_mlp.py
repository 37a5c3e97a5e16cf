"""Regression by a small network of tanh units with one noise level for all rows.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)    h_n = tanh(x_n W1 + b1)           H = width hidden units
    W2_k  ~ N(0, sigma^2 / H)    b2   ~ N(0, sigma^2)    f_n = h_n W2 + b2
    s ~ HalfNormal(noise_scale)                          y_n | x_n ~ N(f_n, s^2)

Sizes: (F + 2) H + 2 numbers (122 on its default data). The variance 1 / fan-in keeps f of the size of a
standardised target whatever the width; as H grows, the prior over f tends to a Gaussian process.
Default data: diabetes (442 rows, 10 features, one target), standardised, for which sigma = 1 is meant.
Source: R. M. Neal, Bayesian Learning for Neural Networks (1996), chapter 2, with fixed instead of hierarchical scales.

What is hard about its posterior: permuting the hidden units, or turning the signs of one unit's ingoing and
outgoing weights, changes no prediction, so there are H! 2^H copies of every mode. Weights of different chains need
not agree where predictions do: judge convergence by f at inputs, never by R-hat of weights. On noisy data like these
(a linear fit explains half of the variance) most units are hardly determined: the posterior is wide,
close to the prior in many directions, and skewed where W1 and W2 trade scales. A Gaussian around one mode
(Laplace, mean-field SVI) sees one copy and no skewness; the mode itself (MAP) sees no width at all.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors

DATA = "diabetes"


def model(
    x: Any,
    y: Any = None,
    *,
    width: int = 10,
    depth: int = 1,
    activation: str = "tanh",
    sigma: float = 1.0,
    noise_scale: float = 1.0,
) -> None:
    """A network of `depth` hidden layers of `width` units; homoscedastic Gaussian noise of sampled size.

    x: (N, F). y: (N,). sigma: prior standard deviation of a weight, times sqrt(fan-in). noise_scale: scale of the
    half-normal prior of the noise, in units of y.
    """
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    f = bnn.mlp(x, [width] * depth + [1], activation, priors.Normal(0.0, "fan_in", sigma))
    bnn.observe(y, f, likelihoods.Gaussian(noise))
