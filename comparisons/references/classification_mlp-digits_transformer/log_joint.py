"""The log joint of `classification_mlp` in NumPy, from its formulas.

W_l ~ N(0, sigma^2 / fan-in)     b_l ~ N(0, sigma^2)     f = logits of act(... act(x W_1 + b_1) ...) W + b
p(y_n = c) = exp(f_nc) / sum_k exp(f_nk)
"""

import numpy as np

ACTIVATIONS = {"tanh": np.tanh, "relu": lambda a: np.maximum(a, 0.0)}


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def log_joint(w, x, y, classes=2, width=10, depth=1, activation="tanh", sigma=1.0):
    """log p(w, y | x) for x (N, F), labels y (N,) and w: "<layer>.weight" (inputs, units), "<layer>.bias"."""
    h, total = x, 0.0
    for layer in [*(f"hidden{index}" for index in range(depth)), "output"]:
        weight, bias = w[f"{layer}.weight"], w[f"{layer}.bias"]
        total += normal(weight, sigma / np.sqrt(len(weight))) + normal(bias, sigma)
        h = h @ weight + bias
        if layer != "output":
            h = ACTIVATIONS[activation](h)
    chosen = np.take_along_axis(h, np.asarray(y)[:, None], axis=1)[:, 0]
    return total + np.sum(chosen - np.logaddexp.reduce(h, axis=1))
