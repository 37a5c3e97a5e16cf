"""Classes that have an order: a network says how far up a row lies, and cut points say where classes end.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)    h_n = tanh(x_n W1 + b1)           H = width hidden units
    W2_k  ~ N(0, sigma^2 / H)    f_n = h_n W2            p ~ Dirichlet(concentration, ..., concentration)
    P(y_n <= c | x_n) = 1 / (1 + exp(f_n - t_c)),        t_c = logit(p_0 + ... + p_c)       c = 0..C-2

f has no bias: moving all cut points is the same. Where f = 0 the classes have the probabilities p.

Sizes: (F + 2) H + C numbers (124 on its default data); the C probabilities add up to 1.
Default data: diabetes_levels (442 rows, 10 features, 4 classes: the quarters of the progression), standardised.
Source: P. McCullagh, Regression models for ordinal data (1980), cumulative logits; cut points from a Dirichlet
distribution are M. Betancourt, Ordinal regression (2019).

What is hard about its posterior: less than with a logit for each class (see classification_mlp): one function serves
all of them, and no direction is left to its prior. The scale of f is seen through the cut points only: large weights
and cut points far apart say the same as small and close, with one difference, how sharp the borders are, which takes
many rows. A class that hardly occurs draws its two cut points together, or, at an end, its one cut point far out: p
lies near a face of the simplex. The symmetric copies of every mode (see regression_mlp) are there as ever.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "diabetes_levels"


def model(
    x: Any,
    y: Any = None,
    *,
    classes: int = 4,
    width: int = 10,
    sigma: float = 1.0,
    concentration: float = 1.0,
) -> None:
    """One hidden layer of `width` tanh units, one output and `classes` - 1 cut points.

    x: (N, F). y: (N,), labels 0..classes-1 in their order. sigma: prior standard deviation of a weight, times
    sqrt(fan-in). concentration: the larger, the more alike the classes before data.
    """
    cuts = priors.CutPoints(concentration)("cuts", classes)
    f = bnn.mlp(x, [width, 1], "tanh", priors.Normal(0.0, "fan_in", sigma), bias=[True, False])
    bnn.observe(y, f, likelihoods.Ordinal(cuts))
