"""Regression in groups of rows that share a hidden layer and pool their output weights in part.

    g(n) is the group of row n: the interval between `cuts` in which its feature `column` lies        g = 1..G
    W1_jk ~ N(0, 1 / F)    b1_k ~ N(0, 1)    h_n = tanh(x_n W1 + b1)                          H = width hidden units
    m_k ~ N(0, 1)          t ~ HalfNormal(1)    e_kg ~ N(0, 1)          v_kg = (m_k + t e_kg) / sqrt(H)
    c ~ N(0, 1)            u ~ HalfNormal(1)    d_g ~ N(0, 1)           b_g = c + u d_g
    f_n = sum_k h_nk v_k,g(n) + b_g(n)          s ~ HalfNormal(noise_scale)          y_n | x_n ~ N(f_n, s^2)

Where t and u are 0 all groups have one head, and differ by what the hidden layer makes of `column` alone; where they
are large each head is fitted by itself.

Sizes: (F + G + 2) H + G + 4 numbers (118 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised; its groups are the two sexes (column 1).
Groups 0, 1, 2, ... in a column as it comes are cuts=(0.5, 1.5, ...).
Source: B. Bakker and T. Heskes, Task clustering and gating for Bayesian multitask learning (2003); A. Gelman and
J. Hill, Data Analysis Using Regression and Multilevel/Hierarchical Models (2007), chapter 12, on partial pooling.

What is hard about its posterior: u is known from G groups only, t from H (G - 1) differences, of which the data see
few. Two groups bound both from above and hardly from below: report them beside their prior. Differences e are in units
of t, so that t near 0 makes no funnel; with many groups of many rows the centred form would mix better. The copies of
each mode (see regression_mlp) turn all heads at once.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops

DATA = "diabetes"


def pooled(name: str, shape: tuple[int, ...], fan_in: int) -> Any:
    """Columns that scatter around a common mean, by a scale that is learned: a prior over weights (..., G)."""
    mean = bnn.sample(f"{name}.mean", dist.Normal(0.0, 1.0).expand((*shape[:-1], 1)).to_event())
    spread = bnn.sample(f"{name}.spread", dist.HalfNormal(1.0))
    base = bnn.sample(f"{name}.base", dist.Normal(0.0, 1.0).expand(shape).to_event())
    return bnn.deterministic(name, (mean + spread * base) * fan_in**-0.5)


def model(
    x: Any,
    y: Any = None,
    *,
    column: int = 1,
    cuts: tuple[float, ...] = (0.0,),
    width: int = 8,
    noise_scale: float = 1.0,
) -> None:
    """A head for each group over one hidden layer of `width` tanh units; a value on a cut is below it.

    x: (N, F), the column of the groups among them. y: (N,). cuts: in the units in which the model sees that column.
    """
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    heads = bnn.dense("heads", ops.tanh(bnn.dense("shared", x, width)), len(cuts) + 1, pooled)
    value = x[:, column : column + 1]
    above = [ops.ones_like(value), *(ops.ones_like(value) * (value > cut) for cut in sorted(cuts))]
    member = ops.concatenate(above) - ops.concatenate([*above[1:], ops.zeros_like(value)])
    bnn.observe(y, ops.sum(member * heads, -1)[:, None], likelihoods.Gaussian(noise))
