"""Regression of counts: a network gives the logarithm of the rate, and counts scatter more than Poisson's do.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)    h_n = tanh(x_n W1 + b1)           H = width hidden units
    W2_k  ~ N(0, sigma^2 / H)    b2   ~ N(0, level^2)    m_n = exp(h_n W2 + b2)
    log r ~ N(1, 1)              y_n | x_n ~ NegativeBinomial, mean m_n and variance m_n + m_n^2 / r

With overdispersed=False there is no r, and y_n | x_n ~ Poisson(m_n), whose variance is m_n.

Sizes: (F + 2) H + 2 numbers (52 on its default data), one less without r.
Default data: counts_simulated (300 rows, 3 features, counts from a known rate with r = 3). Features are standardised,
counts never are: b2 is the logarithm of a typical count, and `level` leaves it room. `bikesharing` is larger and real.
Source: J. M. Hilbe, Negative Binomial Regression (2011); the network in place of the linear predictor is P. McCullagh
and J. A. Nelder, Generalized Linear Models (1989), chapter 6, with h W2 for x beta.

What is hard about its posterior: besides the symmetric copies of every mode (see regression_mlp), what the network does
not explain r must, and the other way round: a network that follows single counts needs no r, and few rows leave both
open. Large counts weigh with their logarithm only where r is small; under Poisson each weighs with all its digits, so
that posteriors are narrow, curved, and wrong wherever counts scatter more. exp makes steep slopes far out: a sampler
that begins at a draw of the prior can meet rates of many thousands, and does well to begin at a mode.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors

DATA = "counts_simulated"


def model(
    x: Any,
    y: Any = None,
    *,
    width: int = 10,
    overdispersed: bool = True,
    sigma: float = 1.0,
    level: float = 3.0,
) -> None:
    """One hidden layer of `width` tanh units and the log rate; negative binomial counts, or Poisson's.

    x: (N, F). y: (N,), whole numbers from 0. sigma: prior standard deviation of a weight, times sqrt(fan-in). level:
    that of the logarithm of a typical count.
    """
    prior = priors.Normal(0.0, "fan_in", sigma)
    f = bnn.mlp(x, [width, 1], "tanh", prior, bias=[True, priors.Normal(0.0, level)])
    if overdispersed:
        likelihood = likelihoods.NegativeBinomial(bnn.sample("concentration", dist.LogNormal(1.0, 1.0)))
    else:
        likelihood = likelihoods.Poisson()
    bnn.observe(y, f, likelihood)
