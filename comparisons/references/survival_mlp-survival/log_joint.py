"""The log joint of `survival_mlp` in NumPy, from its formulas.

shape ~ LogNormal(0, 0.5)     W_l ~ N(0, sigma^2 / fan-in)     b_1 ~ N(0, sigma^2)     b_2 ~ N(0, level^2)
f = tanh(x W_1 + b_1) W_2 + b_2     T_n ~ Weibull(shape, scale exp(f_n)), known, or known to be longer or shorter
"""

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def log_joint(w, x, y, width=10, sigma=1.0, level=3.0):
    """log p(w, y | x) for x (N, F), y (N, 2), a time and 1, 0 or -1; w: "shape", "<layer>.weight", "<layer>.bias"."""
    k, hidden, output = w["shape"], w["hidden0.weight"], w["output.weight"]
    total = (
        normal(np.log(k), 0.5)
        - np.log(k)
        + normal(w["hidden0.bias"], sigma)
        + normal(w["output.bias"], level)
    )
    total += normal(hidden, sigma / np.sqrt(len(hidden))) + normal(output, sigma / np.sqrt(len(output)))
    f = (np.tanh(x @ hidden + w["hidden0.bias"]) @ output + w["output.bias"])[:, 0]
    log_time = np.log(y[:, 0])
    hazard = np.exp(k * (log_time - f))
    density = np.log(k) + (k - 1.0) * log_time - k * f - hazard
    shorter = np.log(-np.expm1(-hazard))
    return total + np.sum(np.where(y[:, 1] > 0, density, np.where(y[:, 1] < 0, shorter, -hazard)))
