"""Regression by a network whose noise has heavy tails, as heavy as the data say: rows far from all others count little.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)    h_n = tanh(x_n W1 + b1)           H = width hidden units
    W2_k  ~ N(0, sigma^2 / H)    b2   ~ N(0, sigma^2)    f_n = h_n W2 + b2
    s ~ HalfNormal(noise_scale)      e ~ Gamma(2, rate 1/10)      v = 2 + e
    y_n | x_n ~ f_n + s t_v          a standard deviation of s sqrt(v / (v - 2))

Above two degrees of freedom the noise has a variance, and a prediction a mean. With df given, v = df and there is no e.

Sizes: (F + 2) H + 3 numbers, e among them (123 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised. It has no outliers to speak of: v comes out
large, and the model says so. A few targets of the training rows multiplied by ten are what it is made for.
Source: K. L. Lange, R. J. A. Little and J. M. G. Taylor, Robust statistical modeling using the t distribution (1989);
the prior of v, without the 2, is that of M. A. Juarez and M. F. J. Steel, Model-based clustering of non-Gaussian panel
data based on skew-t distributions (2010).

What is hard about its posterior: besides the symmetric copies of every mode (see regression_mlp), a row that lies off
can be an outlier under small v, or the network can bend towards it under large v; with several such rows there is a
mode for each choice of the outliers. -log p(y | f) is not convex, and its Hessian is negative for outliers: the Fisher
information takes its place in Laplace. Large v can hardly be told apart: there the posterior of e is its prior, with a
long tail.
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
    df: float | None = None,
    sigma: float = 1.0,
    noise_scale: float = 1.0,
) -> None:
    """One hidden layer of `width` tanh units under Student-t noise; `df` degrees of freedom, None to infer them.

    x: (N, F). y: (N,). sigma: prior standard deviation of a weight, times sqrt(fan-in). noise_scale: scale of the
    half-normal prior of the scale of the noise, in units of y.
    """
    scale = bnn.sample("scale", dist.HalfNormal(noise_scale))
    freedom = df if df is not None else 2.0 + bnn.sample("excess", dist.Gamma(2.0, 0.1))
    f = bnn.mlp(x, [width, 1], "tanh", priors.Normal(0.0, "fan_in", sigma))
    bnn.observe(y, f, likelihoods.StudentT(freedom, scale))
