"""Two classes by a network of tanh units whose one prior precision the evidence is to choose.

    w ~ N(0, 1 / precision), all weights and biases alike
    a_n = tanh(x_n W1 + b1) W2 + b2          P(y_n = 1 | x_n) = 1 / (1 + exp(-a_n))          H = width hidden units

Sizes: (F + 2) H + 1 numbers (257 on its default data).
Default data: breast_cancer (569 rows, 30 features, 2 classes), standardised.
Source: D. J. C. MacKay, The evidence framework applied to classification networks (1992); C. M. Bishop, Pattern
Recognition and Machine Learning (2006), section 5.7.3. Their precision is tuned between rounds of training, which is
`Laplace(tune="global", during_training=True)` with this model; the value given is where that begins. A precision for
each tensor is `tune="tensor"`; `neal_hierarchical` samples its scales instead.

What is hard about its posterior: at a fixed precision, what is hard about any network of tanh units, H! 2^H copies of
each mode and the rest (see regression_mlp). The evidence is that of one mode: it lacks ln(H! 2^H) where the copies are
well apart, and it differs between modes, so restarts are part of the method. At a small precision separable classes
drive the weights far out, where the Gaussian is poor; at a large one units fall idle and the evidence has a flat side.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "breast_cancer"


def model(x: Any, y: Any = None, *, width: int = 8, precision: float = 1.0) -> None:
    """One hidden layer of `width` tanh units and one logit; `precision` is 1 / variance of every weight.

    x: (N, F). y: (N,), labels 0 and 1.
    """
    a = bnn.mlp(x, [width, 1], "tanh", priors.Normal(0.0, precision**-0.5))
    bnn.observe(y, a, likelihoods.Bernoulli())
