"""The log joint of `horseshoe_mlp` in NumPy, from its formulas.

noise ~ HalfNormal(noise_scale)     tau ~ HalfCauchy(sigma / sqrt(F))     lambda_j ~ HalfCauchy(1), one for each unit
c^2 ~ InverseGamma(2, 2 / F)     lambda~_j^2 = c^2 lambda_j^2 / (c^2 + tau^2 lambda_j^2)
W_1 = tau lambda~ base, base ~ N(0, 1)     W_2 ~ N(0, 1 / width)     b_l ~ N(0, 1)
f = tanh(x W_1 + b_1) W_2 + b_2     y_n ~ N(f_n, noise^2)
"""

import math

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def half_cauchy(value, scale):
    return np.sum(np.log(2.0 / np.pi) - np.log(scale) - np.log1p((value / scale) ** 2))


def log_joint(w, x, y, width=20, sigma=0.3, noise_scale=1.0):
    """log p(w, y | x) for x (N, F), y (N,) and w: "noise" (), "hidden0.weight.global", "hidden0.weight.slab" (),
    "hidden0.weight.local" (width,), "hidden0.weight.base" (F, width), "output.weight", "<layer>.bias".
    """
    name = "hidden0.weight"
    tau, local, slab, base = (w[f"{name}.{part}"] for part in ("global", "local", "slab", "base"))
    features, output = len(base), w["output.weight"]
    total = 0.5 * np.log(2.0 / np.pi) - np.log(noise_scale) - 0.5 * (w["noise"] / noise_scale) ** 2
    total += half_cauchy(tau, sigma / np.sqrt(features)) + half_cauchy(local, 1.0)
    rate = 2.0 / features
    total += 2.0 * np.log(rate) - math.lgamma(2.0) - 3.0 * np.log(slab) - rate / slab
    total += normal(base, 1.0) + normal(output, len(output) ** -0.5)
    total += normal(w["hidden0.bias"], 1.0) + normal(w["output.bias"], 1.0)
    weight = base * tau * local * np.sqrt(slab / (slab + (tau * local) ** 2))
    f = (np.tanh(x @ weight + w["hidden0.bias"]) @ output + w["output.bias"])[:, 0]
    return total + normal(y - f, w["noise"])
