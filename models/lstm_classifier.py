"""Classification of sequences by a long short-term memory: an image is read row of pixels by row of pixels.

    x_nt, t = 1..T: the steps of a sequence, here the rows of an image         c_0 = h_0 = 0        H = width
    (i, r, o, g)_t = x_t W + h_(t-1) U + b,         W ~ N(0, sigma^2 / I), U ~ N(0, sigma^2 / H), b ~ N(0, sigma^2)
    c_t = s(r) * c_(t-1) + s(i) * tanh(g)      h_t = s(o) * tanh(c_t)      s(a) = 1 / (1 + exp(-a))
    f_n = h_T V + d                            P(y_n = c | x_n) = exp(f_nc) / sum_c' exp(f_nc')         c = 1..C

V ~ N(0, sigma^2 / H) and d ~ N(0, sigma^2); I is the number of features of a step.

Sizes: 4 H (I + H + 1) + (H + 1) C numbers (870 on its default data, 8 steps of 8 pixels).
Default data: digits (1797 images of 8 x 8 pixels, 10 classes), standardised.
Source: S. Hochreiter and J. Schmidhuber, Long short-term memory (1997), with the forget gate r of F. A. Gers, J.
Schmidhuber and F. Cummins, Learning to forget (2000); images line by line are Q. V. Le, N. Jaitly and G. E. Hinton, A
simple way to initialize recurrent networks of rectified linear units (2015), pixel by pixel there.

What is hard about its posterior: one set of weights acts at every step, so a small change adds up over T of them, and
directions that matter much lie beside some that hardly matter: NUTS takes small steps and many of them. Units of the
memory can be exchanged, and the signs of c and g, V and U turned with them. The prior does not favour remembering: an
open forget gate (a bias of r about 1) is one standard deviation away. Weights are used several times in a row, so local
reparameterisation is refused, and curvature by factors compiles every step by itself:
`ppl_bnn.language.layers.recurrent` says what that takes.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "digits"


def model(x: Any, y: Any = None, *, classes: int = 10, width: int = 10, sigma: float = 1.0) -> None:
    """A memory of `width` units over the steps of a sequence, and `classes` logits from its last state.

    x: (N, F), the pixels of an image row by row, or (N, T, I). y: (N,), labels 0..classes-1. sigma: prior standard
    deviation of a weight, times sqrt(fan-in).
    """
    f = bnn.lstm_classifier(x, None, width, classes, priors.Normal(0.0, "fan_in", sigma))
    bnn.observe(y, f, likelihoods.Categorical())
