"""The log joint of `regression_mlp` in NumPy, from its formulas.

noise ~ HalfNormal(noise_scale)     W_l ~ N(0, sigma^2 / fan-in)     b_l ~ N(0, sigma^2)
h_0 = x     h_l = act(h_(l-1) W_l + b_l)     f = h W + b     y_n ~ N(f_n, noise^2)
"""

import numpy as np

ACTIVATIONS = {"tanh": np.tanh, "relu": lambda a: np.maximum(a, 0.0)}


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def half_normal(value, scale):
    return 0.5 * np.log(2.0 / np.pi) - np.log(scale) - 0.5 * (value / scale) ** 2


def log_joint(w, x, y, width=10, depth=1, activation="tanh", sigma=1.0, noise_scale=1.0):
    """log p(w, y | x) for x (N, F), y (N,) and w: "noise" (), "<layer>.weight" (inputs, units), "<layer>.bias"."""
    h, total = x, half_normal(w["noise"], noise_scale)
    for layer in [*(f"hidden{index}" for index in range(depth)), "output"]:
        weight, bias = w[f"{layer}.weight"], w[f"{layer}.bias"]
        total += normal(weight, sigma / np.sqrt(len(weight))) + normal(bias, sigma)
        h = h @ weight + bias
        if layer != "output":
            h = ACTIVATIONS[activation](h)
    return total + normal(y - h[:, 0], w["noise"])
