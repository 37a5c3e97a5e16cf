"""Regression by a network that learns how much each input matters: automatic relevance determination.

    r_j ~ HalfCauchy(1), j = 1..F      W1_jk ~ N(0, r_j^2 / F)      b1_k ~ N(0, 1)      h_n = tanh(x_n W1 + b1)
    W2_k ~ N(0, 1 / H)                 b2 ~ N(0, 1)                 f_n = h_n W2 + b2   H = width hidden units
    s ~ HalfNormal(noise_scale)        y_n | x_n ~ N(f_n, s^2)

Sizes: (F + 2) H + F + 2 numbers (132 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised: inputs compete on one scale.
Source: D. J. C. MacKay, Bayesian non-linear modelling for the prediction competition (1994); R. M. Neal, Bayesian
Learning for Neural Networks (1996), chapters 1 and 4.

What is hard about its posterior: r_j and the weights out of input j are known as a product only. The latent variables
are r_j and e_jk = sqrt(F) W1_jk / r_j, so an input that does nothing makes no funnel, but one that does makes a curved
ridge. Of several inputs that say the same, any may be the relevant one: modes that the sampler has to cross. The
posterior of r_j for an idle input is its prior cut off from above, never a spike at zero: read r_j beside its prior.
MAP and Laplace fit one point of the ridge, and a poor one: at the mode sum_k e_jk^2 is about 1 for an input in use,
where draws have about H, so that r_j is too large for its weights by about sqrt(H), and these cost next to nothing: the
mode overfits, and the more hidden units, the more. Rank inputs by draws.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors

DATA = "diabetes"


def model(
    x: Any, y: Any = None, *, width: int = 10, relevance: float = 1.0, noise_scale: float = 1.0
) -> None:
    """One hidden layer of `width` tanh units; `hidden0.weight.scale` (F, 1) is the relevance of each input.

    x: (N, F). y: (N,). relevance: scale of the half-Cauchy prior of r. noise_scale: scale of the half-normal prior of
    the noise, in units of y.
    """
    noise = bnn.sample("noise", dist.HalfNormal(noise_scale))
    inputs = priors.Hierarchical(dist.HalfCauchy(relevance), per="input", factor="fan_in")
    f = bnn.mlp(x, [width, 1], "tanh", [inputs, priors.Normal(0.0, "fan_in")], bias=priors.Normal())
    bnn.observe(y, f, likelihoods.Gaussian(noise))
