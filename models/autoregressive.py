"""The next value of a series from the last ones: linear autoregression, and a small network for what is not linear.

    x_n = (z_n, ..., z_(n+F-1)), y_n = z_(n+F): F lags, the oldest first
    a_j ~ N(0, sigma^2 / F)      W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)          H = width hidden units
    W2_k ~ N(0, sigma^2 / H)     b2 ~ N(0, sigma^2)           f_n = x_n . a + tanh(x_n W1 + b1) W2 + b2
    s ~ HalfNormal(noise_scale)  y_n | x_n ~ N(f_n, s^2)

Given the weights, the density of the series after its first F values is the product over rows of p(y_n | x_n).

Sizes: (F + 2) H + F + 2 numbers (60 on its default data).
Default data: mackey_glass (400 rows, 8 lags of a chaotic series with measurement noise), standardised. Its rows are
in time order and overlap: it is split in time, as a random split would show test targets as lags of training rows.
Source: M. C. Medeiros, T. Terasvirta and G. Rech, Building neural network models for time series: a statistical
approach (2006); the series is M. C. Mackey and L. Glass, Oscillation and chaos in physiological control systems (1977).

What is hard about its posterior: lags repeat each other, so a and W1 are known in few directions and have their prior
in the others, with strong correlations between. A nearly linear hidden unit does what a does: ridges between a, W1 and
W2, besides the symmetric copies of every mode (see regression_mlp). Prediction is of one step, from lags as they were
measured: for several steps draw a value, append it, and go on within the same draw of the weights.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors

DATA = "mackey_glass"


def model(x: Any, y: Any = None, *, width: int = 5, sigma: float = 1.0, noise_scale: float = 1.0) -> None:
    """A linear map of the lags plus one hidden layer of `width` tanh units; homoscedastic Gaussian noise.

    x: (N, F), a column for each lag. y: (N,), the values that followed. sigma: prior standard deviation of a weight,
    times sqrt(fan-in). noise_scale: scale of the half-normal prior of the noise, in units of y.
    """
    prior = priors.Normal(0.0, "fan_in", sigma)
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    f = bnn.dense("lags", x, 1, prior, bias=False) + bnn.mlp(x, [width, 1], "tanh", prior)
    bnn.observe(y, f, likelihoods.Gaussian(noise))
