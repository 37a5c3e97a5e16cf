"""Regression where one input has several answers: a network gives a mixture of normals for each row.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)    h_n = tanh(x_n W1 + b1)           H = width hidden units
    W2_ko ~ N(0, sigma^2 / H)    b2_o ~ N(0, sigma^2)    (a_n, m_n, r_n) = h_n W2 + b2     3 M outputs, M = components
    p(y_n | x_n) = sum_i w_ni N(y_n; m_ni, s_ni^2)       w_n = softmax(a_n)                s_n = softplus(r_n)

Sizes: (F + 3 M + 1) H + 3 M numbers (119 on its default data).
Default data: inverse_sine (300 rows, one feature, one target), standardised: for inputs in the middle there are three
targets, and the mean of them is none of them.
Source: C. M. Bishop, Mixture density networks (1994), for network and data; Pattern Recognition and Machine Learning
(2006), section 5.6.

What is hard about its posterior: M! orders of the components for each of the H! 2^H copies of a mode (see
regression_mlp), and modes that are no copies: which branch a component follows, and where it hands over to another. Two
components on one branch fit nearly as well as one. A component on a single row has a density without bound as its s
goes to zero, held back by the prior alone: look at the smallest s in MAP. The Fisher information has no closed form, so
Laplace wants fisher="sampled", or curvature="empirical" or "hessian". Predictions of different modes are compared as
whole densities, never by their means.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "inverse_sine"


def model(
    x: Any,
    y: Any = None,
    *,
    components: int = 3,
    width: int = 10,
    depth: int = 1,
    activation: str = "tanh",
    sigma: float = 1.0,
) -> None:
    """A network of `depth` hidden layers of `width` units: weights, means and scales of `components` normals.

    x: (N, F). y: (N,). components: two or more. sigma: prior standard deviation of a weight, times sqrt(fan-in).
    """
    widths = [width] * depth + [3 * components]
    f = bnn.mlp(x, widths, activation, priors.Normal(0.0, "fan_in", sigma))
    bnn.observe(y, f, likelihoods.MixtureDensity())
