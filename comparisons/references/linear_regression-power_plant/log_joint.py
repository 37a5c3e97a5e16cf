"""The log joint of `linear_regression` in NumPy, from its formulas.

noise ~ HalfNormal(noise_scale)     w, b ~ N(0, scale^2)     y_n ~ N(x_n w + b, noise^2)
"""

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def half_normal(value, scale):
    return 0.5 * np.log(2.0 / np.pi) - np.log(scale) - 0.5 * (value / scale) ** 2


def log_joint(w, x, y, scale=1.0, noise_scale=1.0):
    """log p(w, y | x) for x (N, F), y (N,) and w: "noise" (), "output.weight" (F, 1), "output.bias" (1,)."""
    weight, bias = w["output.weight"], w["output.bias"]
    prior = half_normal(w["noise"], noise_scale) + normal(weight, scale) + normal(bias, scale)
    return prior + normal(y - (x @ weight + bias)[:, 0], w["noise"])
