"""Regression by a network most of whose weights are zero: a spike and a slab for each.

    w ~ probability N(0, slab^2 / n) + (1 - probability) N(0, (slab / 100)^2 / n)
    h_n = tanh(x_n W1 + b1)      f_n = h_n W2 + b2      s ~ HalfNormal(noise_scale)      y_n | x_n ~ N(f_n, s^2)

n is the fan-in of its layer, 1 for a bias. With relaxed=True a gate z between 0 and 1 stands before each weight, and
the spike is what gates near 0 leave (an atom at zero only as the temperature goes to 0): w = slab z e / sqrt(n) with
e ~ N(0, 1) and z from the concrete distribution at temperature 1/2.

Sizes: with H hidden units (F + 2) H + 2 numbers (122 on its default data), nearly twice that where relaxed.
Default data: diabetes (442 rows, 10 features, one target), standardised: a few features carry most of what is known.
Source: E. I. George and R. E. McCulloch, Variable selection via Gibbs sampling (1993); for networks N. G. Polson and
V. Rockova, Posterior concentration for sparse deep learning (2018); gates C. J. Maddison, A. Mnih and Y. W. Teh, The
concrete distribution (2017).

What is hard about its posterior: 2^P subsets of weights, a mode for each that fits, and wells a hundred times narrower
than the ways between them. A gradient sees a well when it is inside. Samplers stay in the subset where they began
unless their steps are as small as the spike; a mean-field guide picks one subset; chains that agree in one run are no
proof. Relaxed, the wells become slopes: easier to move on, further from a spike. Judge by predictions and by how often
each weight is in use, from several starts.
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
    probability: float = 0.25,
    slab: float = 1.5,
    relaxed: bool = False,
    noise_scale: float = 1.0,
) -> None:
    """One hidden layer of `width` tanh units; each weight is in use with `probability` under the prior.

    x: (N, F). y: (N,). slab: standard deviation of a weight in use, times sqrt(fan-in). noise_scale: scale of the
    half-normal prior of the noise, in units of y.
    """
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    prior = priors.SpikeAndSlab(probability, slab, relaxed=relaxed, scale="fan_in")
    bnn.observe(y, bnn.mlp(x, [width, 1], "tanh", prior), likelihoods.Gaussian(noise))
