"""Bayesian logistic regression: one logit, linear in the features.

    w_j ~ N(0, scale^2), j = 1..F        b ~ N(0, scale^2)
    P(y_n = 1 | x_n, w, b) = 1 / (1 + exp(-(x_n . w + b)))

Sizes: F + 1 numbers (31 on its default data).
Default data: breast_cancer (569 rows, 30 features, 2 classes), standardised, for which a scale of 1 is meant.
Source: D. J. Spiegelhalter and S. L. Lauritzen, Sequential updating of conditional probabilities on directed
graphical structures (1990); C. M. Bishop, Pattern Recognition and Machine Learning (2006), section 4.5.

What is hard about its posterior: little, for its density is log-concave: one mode, and MAP is scikit-learn's penalised
fit with C = scale^2 and the intercept penalised too (a column of ones, fit_intercept=False). Where a plane separates
the classes, and with 30 features one does here, the likelihood has no maximum: it rises with the length of w, the prior
alone holds it back, and the posterior leans towards long w. Then the mode is shorter than the mean, and a Gaussian
around it is too sure in one direction and not sure enough in the other.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "breast_cancer"


def model(x: Any, y: Any = None, *, scale: float = 1.0) -> None:
    """Logistic regression with a standard deviation `scale` of weights and intercept.

    x: (N, F). y: (N,), labels 0 and 1.
    """
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, scale)), likelihoods.Bernoulli())
