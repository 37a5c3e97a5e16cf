"""The log joint of `logistic_regression` in NumPy, from its formulas.

w, b ~ N(0, scale^2)     p(y_n = 1) = 1 / (1 + exp(-x_n w - b))
"""

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def log_joint(w, x, y, scale=1.0):
    """log p(w, y | x) for x (N, F), labels y (N,) and w: "output.weight" (F, 1), "output.bias" (1,)."""
    weight, bias = w["output.weight"], w["output.bias"]
    logit = (x @ weight + bias)[:, 0]
    return (
        normal(weight, scale)
        + normal(bias, scale)
        - np.sum(np.logaddexp(0.0, np.where(y > 0, -logit, logit)))
    )
