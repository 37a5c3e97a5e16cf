"""The log joint of `neal_hierarchical` in NumPy, from its formulas.

precision_g ~ Gamma(degrees / 2, degrees scale^2 / 2)     w_g = base_g / sqrt(fan-in precision_g), base_g ~ N(0, 1)
for the groups g of hidden weights, hidden biases (fan-in 1) and output weights; output biases ~ N(0, 1)
p(y_n = c) = softmax(tanh(x W_1 + b_1) W_2 + b_2)_c
"""

import math

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def log_joint(w, x, y, classes=3, width=10, degrees=4.0, scale=1.0):
    """log p(w, y | x) for x (N, F), labels y (N,) and w: "<tensor>.precision" (), "<tensor>.base", "output.bias"."""
    shape, rate = 0.5 * degrees, 0.5 * degrees * scale**2
    total, values = normal(w["output.bias"], 1.0), {}
    for name in ("hidden0.weight", "hidden0.bias", "output.weight"):
        precision, base = w[f"{name}.precision"], w[f"{name}.base"]
        total += (
            shape * np.log(rate) - math.lgamma(shape) + (shape - 1.0) * np.log(precision) - rate * precision
        )
        total += normal(base, 1.0)
        fan_in = len(base) if base.ndim > 1 else 1
        values[name] = base / np.sqrt(fan_in * precision)
    f = (
        np.tanh(x @ values["hidden0.weight"] + values["hidden0.bias"]) @ values["output.weight"]
        + w["output.bias"]
    )
    chosen = np.take_along_axis(f, np.asarray(y)[:, None], axis=1)[:, 0]
    return total + np.sum(chosen - np.logaddexp.reduce(f, axis=1))
