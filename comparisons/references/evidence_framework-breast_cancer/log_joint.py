"""The log joint of `evidence_framework` in NumPy, from its formulas.

W_l, b_l ~ N(0, 1 / precision)     a = tanh(x W_1 + b_1) W_2 + b_2     p(y_n = 1) = 1 / (1 + exp(-a_n))
"""

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def log_joint(w, x, y, width=8, precision=1.0):
    """log p(w, y | x) for x (N, F), labels y (N,) and w: "<layer>.weight" (inputs, units), "<layer>.bias"."""
    hidden = np.tanh(x @ w["hidden0.weight"] + w["hidden0.bias"])
    logit = (hidden @ w["output.weight"] + w["output.bias"])[:, 0]
    names = ("hidden0.weight", "hidden0.bias", "output.weight", "output.bias")
    prior = sum(normal(w[name], precision**-0.5) for name in names)
    return prior - np.sum(np.logaddexp(0.0, np.where(y > 0, -logit, logit)))
