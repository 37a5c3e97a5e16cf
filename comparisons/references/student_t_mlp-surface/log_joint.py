"""The log joint of `student_t_mlp` in NumPy, from its formulas.

scale ~ HalfNormal(noise_scale)     excess ~ Gamma(2, 0.1)     df = 2 + excess, or as given
W_l ~ N(0, sigma^2 / fan-in)     b_l ~ N(0, sigma^2)     f = tanh(x W_1 + b_1) W_2 + b_2
y_n ~ f_n + scale t_df
"""

import math

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def half_normal(value, scale):
    return 0.5 * np.log(2.0 / np.pi) - np.log(scale) - 0.5 * (value / scale) ** 2


def log_joint(w, x, y, width=10, df=None, sigma=1.0, noise_scale=1.0):
    """log p(w, y | x) for x (N, F), y (N,) and w: "scale", "excess" (), "<layer>.weight", "<layer>.bias"."""
    scale, total = w["scale"], half_normal(w["scale"], noise_scale)
    if df is None:
        df = 2.0 + w["excess"]
        total += np.log(w["excess"]) - 0.1 * w["excess"] + 2.0 * np.log(0.1)
    h = x
    for layer in ("hidden0", "output"):
        weight, bias = w[f"{layer}.weight"], w[f"{layer}.bias"]
        total += normal(weight, sigma / np.sqrt(len(weight))) + normal(bias, sigma)
        h = h @ weight + bias
        if layer == "hidden0":
            h = np.tanh(h)
    z = (y - h[:, 0]) / scale
    constant = (
        math.lgamma(0.5 * (df + 1.0)) - math.lgamma(0.5 * df) - 0.5 * np.log(df * np.pi) - np.log(scale)
    )
    return total + np.sum(constant - 0.5 * (df + 1.0) * np.log1p(z**2 / df))
