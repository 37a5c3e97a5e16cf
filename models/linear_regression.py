"""Bayesian linear regression: a network without a hidden layer.

    w_j ~ N(0, scale^2), j = 1..F        b ~ N(0, scale^2)        s ~ HalfNormal(noise_scale)
    y_n | x_n, w, b, s ~ N(x_n . w + b, s^2)

Sizes: F + 2 numbers (12 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised, for which scales of 1 are meant.
Source: C. M. Bishop, Pattern Recognition and Machine Learning (2006), section 3.3. Given s, the posterior of (w, b)
is Gaussian in closed form; with s sampled, only the one-dimensional integral over s is left.

What is hard about its posterior: nothing, and that is its use. It has one mode and is close to Gaussian, so every
method should agree with NUTS here; a method that does not is wrong, or was stopped too early. Correlated features
make correlated weights: mean-field SVI gets their means right and their standard deviations too small, by about the
factor sqrt(1 - R_j^2) where R_j^2 is how well feature j is predicted by the others.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors

DATA = "diabetes"


def model(x: Any, y: Any = None, *, scale: float = 1.0, noise_scale: float = 1.0) -> None:
    """Linear regression with a standard deviation `scale` of weights and intercept.

    x: (N, F). y: (N,). noise_scale: scale of the half-normal prior of the noise, in units of y.
    """
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    f = bnn.mlp(x, [1], prior=priors.Normal(0.0, scale))
    bnn.observe(y, f, likelihoods.Gaussian(noise))
