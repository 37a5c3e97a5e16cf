"""The log joint of `count_mlp` in NumPy, from its formulas.

W_l ~ N(0, sigma^2 / fan-in)     b_1 ~ N(0, sigma^2)     b_2 ~ N(0, level^2)     f = tanh(x W_1 + b_1) W_2 + b_2
concentration ~ LogNormal(1, 1)     y_n ~ NegativeBinomial(mean exp(f_n), variance m + m^2 / concentration)
or, where not overdispersed, y_n ~ Poisson(exp(f_n))
"""

import math

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def log_joint(w, x, y, width=10, overdispersed=True, sigma=1.0, level=3.0):
    """log p(w, y | x) for x (N, F), counts y (N,) and w: "concentration" (), "<layer>.weight", "<layer>.bias"."""
    hidden = np.tanh(x @ w["hidden0.weight"] + w["hidden0.bias"])
    f = (hidden @ w["output.weight"] + w["output.bias"])[:, 0]
    total = normal(w["hidden0.bias"], sigma) + normal(w["output.bias"], level)
    for layer in ("hidden0", "output"):
        weight = w[f"{layer}.weight"]
        total += normal(weight, sigma / np.sqrt(len(weight)))
    factorials = np.array([math.lgamma(count + 1.0) for count in y])
    if not overdispersed:
        return total + np.sum(y * f - np.exp(f) - factorials)
    r = w["concentration"]
    total += normal(np.log(r) - 1.0, 1.0) - np.log(r)
    gammas = np.array([math.lgamma(count + r) for count in y]) - math.lgamma(r) - factorials
    both = np.logaddexp(np.log(r), f)
    return total + np.sum(gammas + r * (np.log(r) - both) + y * (f - both))
