"""Regression by a network with inputs that nobody measured: latent variables for each row.

    z_nl ~ N(0, 1), l = 1..L, for each row n anew
    W1_jk ~ N(0, sigma^2 / (F + L))    b1_k ~ N(0, sigma^2)    h_n = tanh((x_n, z_n) W1 + b1)   H = width hidden units
    W2_k  ~ N(0, sigma^2 / H)          b2   ~ N(0, sigma^2)    f_n = h_n W2 + b2
    s ~ HalfNormal(noise_scale)        y_n | x_n, z_n ~ N(f_n, s^2)

The noise of y given x alone is what z makes of it: it may grow with x, be skewed or have two humps.

Sizes: (F + L + 2) H + 2 numbers (132 on its default data) and L for each row.
Default data: diabetes (442 rows, 10 features, one target), standardised. Its noise grows with the prediction.
Source: S. Depeweg, J. M. Hernandez-Lobato, F. Doshi-Velez and S. Udluft, Learning and policy search in stochastic
dynamical systems with Bayesian neural networks (2017).

What is hard about its posterior: z_n is seen once, through one target, and the weights out of z must make something of
442 guesses: z without use and much noise s, or z in use and little, are separate modes, and the second can explain each
row exactly. Turning the sign of z and of its weights changes nothing. z and the row's features can stand in for each
other. More rows mean more coordinates, so mini-batches and methods that take a posterior to be narrow do not apply:
Laplace, SWAG and dropout refuse; NUTS and SVI serve. A prediction draws z anew, so it is never that of a row seen.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors

DATA = "diabetes"


def model(
    x: Any, y: Any = None, *, latents: int = 1, width: int = 10, sigma: float = 1.0, noise_scale: float = 0.5
) -> None:
    """One hidden layer of `width` tanh units over the features and `latents` numbers of each row's own.

    x: (N, F). y: (N,). sigma: prior standard deviation of a weight, times sqrt(fan-in). noise_scale: scale of the
    half-normal prior of the noise that z does not explain, in units of y.
    """
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    with bnn.rows(x.shape[0]):
        z = bnn.sample("z", dist.Normal(0.0, 1.0).expand((latents,)).to_event())
    inputs = ops.concatenate([x, ops.broadcast_to(z, (x.shape[0], latents))])
    f = bnn.mlp(inputs, [width, 1], "tanh", priors.Normal(0.0, "fan_in", sigma))
    bnn.observe(y, f, likelihoods.Gaussian(noise))
