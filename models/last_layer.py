"""Regression with a Bayesian last layer on a body of features that is learned without a prior.

    W1, b1 are parameters: no prior, one value        h_n = tanh(x_n W1 + b1)             H = width features
    w_k ~ N(0, sigma^2 / H)    b ~ N(0, sigma^2)      s ~ HalfNormal(noise_scale)
    y_n | x_n ~ N(h_n . w + b, s^2)

Sizes: (F + 2) H + 2 numbers, of which (F + 1) H without a prior (602 and 550 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised.
Source: M. Lazaro-Gredilla and A. R. Figueiras-Vidal, Marginalized neural network mixtures for large-scale regression
(2010); J. Snoek et al., Scalable Bayesian optimization using deep neural networks (2015).

What is hard about its posterior: nothing. Given body and noise it is that of linear regression, in closed form. What is
hard is the body: it is chosen by what the data and one guess at the last layer say, nothing holds it back, and it may
fit the noise; more width is more of that. Uncertainty is in the span of the features only: far away, where all units
saturate, it stops growing. The body found is part of the model: two fits have two bodies and two different posteriors,
which cannot be compared weight by weight. Samplers have no optimiser and take the body from `start=`.
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
    width: int = 50,
    depth: int = 1,
    activation: str = "tanh",
    sigma: float = 1.0,
    noise_scale: float = 1.0,
) -> None:
    """A body of `depth` layers of `width` units as point estimates; a prior over the last layer and the noise.

    x: (N, F). y: (N,). sigma: prior standard deviation of a weight of the last layer, times sqrt(fan-in). noise_scale:
    scale of the half-normal prior of the noise, in units of y.
    """
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    each = [*[priors.Point()] * depth, priors.Normal(0.0, "fan_in", sigma)]
    f = bnn.mlp(x, [width] * depth + [1], activation, each)
    bnn.observe(y, f, likelihoods.Gaussian(noise))
