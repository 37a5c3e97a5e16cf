"""The log joint of `bayes_by_backprop` in NumPy, from its formulas.

each weight and bias ~ share N(0, wide^2) + (1 - share) N(0, narrow^2)
h_0 = x     h_l = max(h_(l-1) W_l + b_l, 0)     f = h W + b     y_n ~ N(f_n, noise^2)
"""

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def mixture(value, share, wide, narrow):
    """The log density of independent weights under the scale mixture."""
    each = [
        np.log(part) - 0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi)
        for part, scale in ((share, wide), (1.0 - share, narrow))
    ]
    return np.sum(np.logaddexp(*each))


def log_joint(w, x, y, width=20, depth=2, share=0.5, wide=1.5, narrow=0.1, noise=0.7):
    """log p(w, y | x) for x (N, F), y (N,) and w: "<layer>.weight" (inputs, units), "<layer>.bias"."""
    h, total = x, 0.0
    for layer in [*(f"hidden{index}" for index in range(depth)), "output"]:
        weight, bias = w[f"{layer}.weight"], w[f"{layer}.bias"]
        total += mixture(weight, share, wide, narrow) + mixture(bias, share, wide, narrow)
        h = h @ weight + bias
        if layer != "output":
            h = np.maximum(h, 0.0)
    return total + normal(y - h[:, 0], noise)
