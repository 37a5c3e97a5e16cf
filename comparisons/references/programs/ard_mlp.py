"""The log joint of `ard_mlp` in NumPy, from its formulas.

noise ~ HalfNormal(noise_scale)     r_i ~ HalfCauchy(relevance), one for each input
W_1 = r_i base / sqrt(F), base ~ N(0, 1)     W_2 ~ N(0, 1 / width)     b_l ~ N(0, 1)
f = tanh(x W_1 + b_1) W_2 + b_2     y_n ~ N(f_n, noise^2)
"""

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def half_normal(value, scale):
    return 0.5 * np.log(2.0 / np.pi) - np.log(scale) - 0.5 * (value / scale) ** 2


def log_joint(w, x, y, width=10, relevance=1.0, noise_scale=1.0):
    """log p(w, y | x) for x (N, F), y (N,) and w: "noise" (), "hidden0.weight.scale" (F, 1), "hidden0.weight.base"
    (F, width), "output.weight" (width, 1), "hidden0.bias", "output.bias".
    """
    scale, base, weight = w["hidden0.weight.scale"], w["hidden0.weight.base"], w["output.weight"]
    total = half_normal(w["noise"], noise_scale) + normal(base, 1.0) + normal(weight, len(weight) ** -0.5)
    total += np.sum(np.log(2.0 / np.pi) - np.log(relevance) - np.log1p((scale / relevance) ** 2))
    total += normal(w["hidden0.bias"], 1.0) + normal(w["output.bias"], 1.0)
    hidden = np.tanh(x @ (scale * base / np.sqrt(len(base))) + w["hidden0.bias"])
    f = (hidden @ weight + w["output.bias"])[:, 0]
    return total + normal(y - f, w["noise"])
