"""Classification by a small network of tanh units with one logit per class.

    W1_jk ~ N(0, sigma^2 / F)    b1_k ~ N(0, sigma^2)    h_n = tanh(x_n W1 + b1)           H = width hidden units
    W2_kc ~ N(0, sigma^2 / H)    b2_c ~ N(0, sigma^2)    f_n = h_n W2 + b2                 c = 1..C
    P(y_n = c | x_n) = exp(f_nc) / sum_c' exp(f_nc')

Sizes: (F + C + 1) H + C numbers (332 on its default data).
Default data: breast_cancer (569 rows, 30 features, 2 classes), standardised. On other data `compare` and the
command line set `classes` to the number of labels.
Source: D. J. C. MacKay, The evidence framework applied to classification networks (1992); R. M. Neal, Bayesian
Learning for Neural Networks (1996). A logit for every class, rather than C - 1 of them, keeps the prior the same for
all classes.

What is hard about its posterior: adding one number to all logits of a row changes nothing, so H + 1 directions of the
last layer, one for each hidden unit and one for the biases, have their prior for a posterior; with the symmetric copies
of every mode (see regression_mlp) convergence is to be judged by probabilities and the log likelihood. Where classes
can be separated the likelihood rises with the size of the weights and only the prior bounds it: the posterior is
strongly skewed towards large weights, the mode is far from the mean, and a Gaussian around the mode has much of its
mass where the fit is bad. Laplace is usable because it linearises; draws of the network itself from the same Gaussian
are not.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "breast_cancer"


def model(
    x: Any,
    y: Any = None,
    *,
    classes: int = 2,
    width: int = 10,
    depth: int = 1,
    activation: str = "tanh",
    sigma: float = 1.0,
) -> None:
    """A network of `depth` hidden layers of `width` units with one logit for each of `classes`.

    x: (N, F). y: (N,), labels 0..classes-1. sigma: prior standard deviation of a weight, times sqrt(fan-in).
    """
    f = bnn.mlp(x, [width] * depth + [classes], activation, priors.Normal(0.0, "fan_in", sigma))
    bnn.observe(y, f, likelihoods.Categorical())
