"""The log joint of `ordinal_mlp` in NumPy, from its formulas.

p ~ Dirichlet(concentration)     c_k = logit(p_0 + ... + p_k)
W_l ~ N(0, sigma^2 / fan-in)     b_1 ~ N(0, sigma^2)     f = tanh(x W_1 + b_1) W_2
P(y_n <= k) = 1 / (1 + exp(f_n - c_k))
"""

import math

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def log_joint(w, x, y, classes=4, width=10, sigma=1.0, concentration=1.0):
    """log p(w, y | x) for x (N, F), labels y (N,) and w: "cuts.probabilities", "hidden0.weight", "hidden0.bias",
    "output.weight".

    The density of the probabilities is over the first `classes` - 1 of them.
    """
    p, hidden, output = w["cuts.probabilities"], w["hidden0.weight"], w["output.weight"]
    total = math.lgamma(classes * concentration) - classes * math.lgamma(concentration)
    total += (concentration - 1.0) * np.sum(np.log(p))
    total += normal(hidden, sigma / np.sqrt(len(hidden))) + normal(output, sigma / np.sqrt(len(output)))
    total += normal(w["hidden0.bias"], sigma)
    below = np.cumsum(p)[:-1]
    cuts = np.log(below) - np.log(np.cumsum(p[::-1])[::-1][1:])
    f = np.tanh(x @ hidden + w["hidden0.bias"]) @ output
    cumulative = 1.0 / (1.0 + np.exp(f - cuts))
    ends = np.concatenate([np.zeros_like(f), cumulative, np.ones_like(f)], axis=1)
    each = np.diff(ends, axis=1)
    return total + np.sum(np.log(np.take_along_axis(each, np.asarray(y)[:, None], axis=1)))
