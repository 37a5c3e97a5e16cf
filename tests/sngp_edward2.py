"""Write `sngp_edward2.json`: what the last layer of SNGP is in the package of its authors, edward2.

Edward2 needs TensorFlow, and neither is installed with this project. So the numbers are stored, and made again in an
environment of its own:

    pip install edward2 tensorflow tf-keras tensorflow-probability scipy
    python tests/sngp_edward2.py
"""

from __future__ import annotations

import json
import os
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".json")
FEATURES, LENGTH_SCALE, NOISE = 30, 0.8, 0.3
PACKAGES = ("edward2", "tensorflow", "tf-keras", "tensorflow-probability", "numpy")


def mode(phi: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Weights N(0, 1) of greatest posterior density of a logistic regression on phi, by Newton's method."""
    w = np.zeros(phi.shape[1])
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-phi @ w))
        hessian = (phi * (p * (1.0 - p))[:, None]).T @ phi + np.eye(len(w))
        w += np.linalg.solve(hessian, phi.T @ (y - p) - w)
    return w


def main() -> None:
    """Compute and write."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    # Edward2's half for NumPy does not load with a recent SciPy, and is not needed.
    sys.modules["edward2.numpy"] = types.ModuleType("edward2.numpy")
    import tensorflow as tf
    from edward2.tensorflow.layers import random_feature, utils

    tf.random.set_seed(0)
    rng = np.random.default_rng(0)
    x, x_new = rng.normal(size=(40, 3)), 2.0 * rng.normal(size=(12, 3))
    f = np.sin(x).sum(1)
    numbers, classes = f + NOISE * rng.normal(size=40), (f + rng.logistic(size=40) > 0).astype(float)
    found: dict[str, Any] = {"x": x, "x_new": x_new, "numbers": numbers, "classes": classes}
    for task, ridge in (("gaussian", NOISE**2), ("binary_logistic", 1.0)):
        layer = random_feature.RandomFeatureGaussianProcess(
            1,
            num_inducing=FEATURES,
            gp_kernel_scale=LENGTH_SCALE**2,
            normalize_input=False,
            gp_cov_momentum=-1,
            gp_cov_ridge_penalty=ridge,
            gp_cov_likelihood=task,
            return_random_features=True,
        )
        inputs, new = tf.constant(x, tf.float32), tf.constant(x_new, tf.float32)
        phi = np.asarray(layer(inputs, training=False)[2], float)
        if task == "gaussian":
            w = np.linalg.solve(phi.T @ phi + ridge * np.eye(FEATURES), phi.T @ numbers)
        else:
            w = mode(phi, classes)
        layer._gp_output_layer.set_weights([w[:, None].astype(np.float32)])
        layer(inputs, training=True)
        mean, covariance, _ = layer(new, training=False)
        weight, offset = layer._random_feature.get_weights()
        found[task] = {"weight": weight, "offset": offset, "mean": mean[:, 0], "covariance": covariance}
        if task != "gaussian":
            logits = utils.mean_field_logits(mean, covariance, mean_field_factor=np.pi / 8.0)
            found[task]["probability"] = tf.sigmoid(logits)[:, 0]

    def listed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: listed(each) for name, each in value.items()}
        return np.asarray(value, float).tolist()

    sizes = {"features": FEATURES, "length_scale": LENGTH_SCALE, "noise": NOISE}
    stored = {"versions": {name: version(name) for name in PACKAGES}, **sizes, **listed(found)}
    FILE.write_text(json.dumps(stored) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
