"""Regression under a mixture of a wide and a narrow normal as the prior of every weight, with known noise.

    w ~ share N(0, wide^2) + (1 - share) N(0, narrow^2), each weight and bias by itself
    h1_n = relu(x_n W1 + b1)      h2_n = relu(h1_n W2 + b2)      f_n = h2_n W3 + b3          H = width units in each
    y_n | x_n ~ N(f_n, noise^2)

Sizes: with the two hidden layers of the default (F + 1) H + (H + 1) H + H + 1 numbers (661 on its default data).
Default data: diabetes (442 rows, 10 features, one target), standardised: a linear fit leaves a noise of about 0.7.
Source: C. Blundell, J. Cornebise, K. Kavukcuoglu and D. Wierstra, Weight uncertainty in neural networks (2015), whose
method is `SVI(guide="normal")`. Widths and scales are those of a well-known exercise on a sine curve; its noise is 1.

What is hard about its posterior: the mixture has a sharp peak at zero with broad shoulders, so each weight is asked
whether it is in use, and there are as many answers as subsets. The divergence from it has no closed form. A mean-field
guide leaves most weights at the prior, and more of them the more there are: on a wide network the fit is then flatter
than the posterior predictive. Relu makes kinks, and a scale that can be moved from one layer to the next.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "diabetes"


def model(
    x: Any,
    y: Any = None,
    *,
    width: int = 20,
    depth: int = 2,
    share: float = 0.5,
    wide: float = 1.5,
    narrow: float = 0.1,
    noise: float = 0.7,
) -> None:
    """A network of `depth` hidden layers of `width` relu units under the scale mixture; `noise` in units of y.

    x: (N, F). y: (N,). share: of the wide component; wide, narrow: standard deviations.
    """
    prior = priors.ScaleMixture((share, 1.0 - share), (wide, narrow))
    f = bnn.mlp(x, [width] * depth + [1], "relu", prior)
    bnn.observe(y, f, likelihoods.Gaussian(noise))
