"""The log joint of `multitask_hierarchical` in NumPy, from its formulas.

noise ~ HalfNormal(noise_scale)     W ~ N(0, 1 / F), b ~ N(0, 1)     h = tanh(x W + b)
V_g = (mean + spread base_g) / sqrt(fan-in), mean ~ N(0, 1), spread ~ HalfNormal(1), base ~ N(0, 1), for weights and
biases (fan-in 1) of the heads g     y_n ~ N(h V_g + a_g, noise^2) with g the group of row n
"""

import numpy as np


def normal(value, scale):
    """The log density of independent N(0, scale^2)."""
    return np.sum(-0.5 * (value / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi))


def half_normal(value, scale):
    return 0.5 * np.log(2.0 / np.pi) - np.log(scale) - 0.5 * (value / scale) ** 2


def log_joint(w, x, y, column=1, cuts=(0.0,), width=8, noise_scale=1.0):
    """log p(w, y | x) for x (N, F), y (N,) and w: "noise" (), "shared.weight", "shared.bias", and of "heads.weight" and
    "heads.bias" the "mean", "spread" and "base".
    """
    total = half_normal(w["noise"], noise_scale) + normal(w["shared.weight"], len(w["shared.weight"]) ** -0.5)
    total += normal(w["shared.bias"], 1.0)
    heads = {}
    for name in ("heads.weight", "heads.bias"):
        mean, spread, base = (w[f"{name}.{part}"] for part in ("mean", "spread", "base"))
        total += normal(mean, 1.0) + half_normal(spread, 1.0) + normal(base, 1.0)
        fan_in = len(base) if base.ndim > 1 else 1
        heads[name] = (mean + spread * base) / np.sqrt(fan_in)
    every = np.tanh(x @ w["shared.weight"] + w["shared.bias"]) @ heads["heads.weight"] + heads["heads.bias"]
    group = np.sum(x[:, column : column + 1] > np.sort(cuts), axis=1)
    return total + normal(y - every[np.arange(len(y)), group], w["noise"])
