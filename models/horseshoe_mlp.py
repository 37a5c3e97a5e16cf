"""Regression by a network that switches off the hidden units it can do without.

    w_jk = tau l_k e_jk      e_jk ~ N(0, 1)      l_k^2 = c^2 r_k^2 / (c^2 + tau^2 r_k^2)      k = 1..H hidden units
    r_k ~ HalfCauchy(1)      tau ~ HalfCauchy(sigma / sqrt(F))      c^2 ~ InverseGamma(2, 2 / F)
    h_n = tanh(x_n W1 + b1)  f_n = h_n W2 + b2      b1_k, b2 ~ N(0, 1)      W2_k ~ N(0, 1 / H)
    s ~ HalfNormal(noise_scale)                     y_n | x_n ~ N(f_n, s^2)

Sizes: (F + 3) H + 4 numbers (264 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised.
Source: S. Ghosh, J. Yao and F. Doshi-Velez, Structured variational learning of Bayesian neural networks with horseshoe
priors (2018); the slab c is that of J. Piironen and A. Vehtari, Sparsity information and regularization in the
horseshoe and other shrinkage priors (2017).

What is hard about its posterior: a unit's weights are products of three variables, and the data see the product alone.
The half-Cauchy tails of r and tau let scales wander over orders of magnitude, and which units are on is settled anew at
every copy of a mode (see regression_mlp): chains differ in who does the work and agree in what is done. NUTS wants
small steps (target_accept=0.95 or more); a Gaussian in log r is a poor picture of "all or nothing", and its mean-field
version cuts the tie between scale and weights, which is what carries the shrinkage.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors

DATA = "diabetes"


def model(x: Any, y: Any = None, *, width: int = 20, sigma: float = 0.3, noise_scale: float = 1.0) -> None:
    """One hidden layer of `width` tanh units, each with a scale of its own; more units than are needed do no harm.

    x: (N, F). y: (N,). sigma: the global scale, times sqrt(fan-in); the smaller, the fewer units. noise_scale: scale of
    the half-normal prior of the noise, in units of y.
    """
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    units = priors.RegularisedHorseshoe("fan_in", slab_scale="fan_in", per="unit", sigma=sigma)
    each = [units, priors.Normal(0.0, "fan_in")]
    f = bnn.mlp(x, [width, 1], "tanh", each, bias=priors.Normal())
    bnn.observe(y, f, likelihoods.Gaussian(noise))
