"""Survival by a network that stretches time: Weibull times of which some are known by a bound only.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)    h_n = tanh(x_n W1 + b1)           H = width hidden units
    W2_k  ~ N(0, sigma^2 / H)    b2   ~ N(0, level^2)    f_n = h_n W2 + b2
    log k ~ N(0, 1 / 4)          P(T_n > t | x_n) = exp(-(t / exp(f_n))^k)
    y_n = (T_n, 1) where the event was seen; (c_n, 0) where T_n > c_n is all that is known

Of those with a scale exp(f_n), 37 % outlive it. Times are stretched by exp(f_n) (accelerated failure times) and the
hazard k t^(k - 1) is multiplied by exp(-k f_n) (proportional hazards): of all distributions only Weibull's do both.

Sizes: (F + 2) H + 2 numbers (72 on its default data).
Default data: survival_simulated (300 rows, 5 features, about 30 % of the times censored), of this family with k = 1.5.
Features are standardised, times never are: b2 is the logarithm of a typical time, and `level` leaves it room.
Source: J. D. Kalbfleisch and R. L. Prentice, The Statistical Analysis of Failure Time Data (2002), chapters 2 and 3;
a network in the place of the linear predictor as in D. Faraggi and R. Simon, A neural network model for survival data,
Statistics in Medicine 14 (1995).

What is hard about its posterior: besides the symmetric copies of every mode (see regression_mlp), a censored row pushes
f from one side only. Where rows are few or all censored nothing but the prior holds f from above, and the posterior is
skewed, long times being possible and short ones not: a Gaussian at the mode, as of Laplace, is too short on that side.
k and the network explain the same scatter: a network that follows single times leaves little of it, k grows, and the
density of observed times with it, without bound but for the prior. Watch k beside its prior in MAP. What is predicted
beyond the longest observed time is the tail of a Weibull distribution and not of the data.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors

DATA = "survival_simulated"


def model(x: Any, y: Any = None, *, width: int = 10, sigma: float = 1.0, level: float = 3.0) -> None:
    """One hidden layer of `width` tanh units and the log scale of the time; one shape for all rows.

    x: (N, F). y: (N, 2), the time or its bound, and 1 (event), 0 (censored: the time is longer) or -1 (it is shorter).
    sigma: prior standard deviation of a weight, times sqrt(fan-in). level: that of the logarithm of a typical time.
    """
    shape = bnn.sample("shape", dist.LogNormal(0.0, 0.5))
    prior = priors.Normal(0.0, "fan_in", sigma)
    f = bnn.mlp(x, [width, 1], "tanh", prior, bias=[True, priors.Normal(0.0, level)])
    bnn.observe(y, f, likelihoods.Censored(likelihoods.Weibull(shape)))
