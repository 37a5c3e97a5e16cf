"""Regression by a network that says, row by row, how noisy it expects the target to be.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)    h_n = tanh(x_n W1 + b1)           H = width hidden units
    W2_ko ~ N(0, sigma^2 / H)    b2_o ~ N(0, sigma^2)    f_n = h_n W2 + b2                 o = 1, 2
    y_n | x_n ~ N(f_n1, softplus(f_n2)^2)

Sizes: (F + 3) H + 2 numbers (132 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised. Its noise grows with the prediction: a
homoscedastic model is too wide for patients with little progression and too narrow for the others.
Source: D. A. Nix and A. S. Weigend, Estimating the mean and variance of the target probability distribution (1994);
as a Bayesian network A. Kendall and Y. Gal, What uncertainties do we need ... (2017), section 3.

What is hard about its posterior: besides the symmetric copies of every mode (see regression_mlp), mean and noise
explain the same residuals. A row fitted badly can be called noisy instead, which takes away the gradient that would
have fitted it: modes where the noise does the work of the mean are real, and optimisers started with small noise
find them. Where rows can be interpolated, the density rises without bound as their noise goes to zero, held back by
the prior alone: watch the noise of training rows in MAP and Laplace.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "diabetes"


def model(
    x: Any, y: Any = None, *, width: int = 10, depth: int = 1, activation: str = "tanh", sigma: float = 1.0
) -> None:
    """A network of `depth` hidden layers of `width` units with two outputs: the mean and the noise before softplus.

    x: (N, F). y: (N,). sigma: prior standard deviation of a weight, times sqrt(fan-in).
    """
    f = bnn.mlp(x, [width] * depth + [2], activation, priors.Normal(0.0, "fan_in", sigma))
    bnn.observe(y, f, likelihoods.HeteroscedasticGaussian())
