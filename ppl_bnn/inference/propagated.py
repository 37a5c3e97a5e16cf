"""Predictions whose moments are propagated through the network in one pass (`language/moments.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppl_bnn.backends.many_draws import chunked_draws
from ppl_bnn.backends.program import Problem
from ppl_bnn.inference.flat_vector import Values, first_rows, system_values
from ppl_bnn.inference.laplace.linearised import predictive
from ppl_bnn.language import ops
from ppl_bnn.language.moments import predictor_moments, refuse
from ppl_bnn.prediction.prediction import Prediction

Array = Any


def propagated_moments(
    problem: Problem, loc: Values, variance: Values, x: Any, memory: int, first_order: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """NumPy: mean (N, D) and covariance (N, D, D) of the predictor under independent normals over u.

    Sites without a variance are at `loc`. `UnsupportedError`: a program whose moments cannot be propagated.
    """
    program, system = problem.program, problem.system
    if not program.language:
        refuse("a model in the language of ppl_bnn", f"a model of {system.name}")
    if program.has_local:
        local = ", ".join(repr(site.name) for site in program.latents if site.local)
        refuse("weights that all rows share", f"latent variables of rows, {local}")
    values = program.constrain(system_values(problem, loc), *first_rows(problem))

    def moments(normal: Mapping[str, Array], x: Any, values: Mapping[str, Array]) -> Array:
        means = {name: normal[f"mean {name}"] for name in variance}
        variances = {name: normal[f"variance {name}"] for name in variance}
        mean, covariance = predictor_moments(program.model, values, means, variances, x, first_order)
        rows, columns = mean.shape
        return ops.concatenate([mean, covariance.reshape(rows, columns**2)])

    normal = {f"mean {name}": np.asarray(loc[name])[None] for name in variance}
    normal |= {f"variance {name}": np.asarray(value)[None] for name, value in variance.items()}
    one = {name: system.to_numpy(value) for name, value in values.items()}
    key = "propagated", first_order
    found = chunked_draws(
        program, key, moments, normal, x, values, one, memory, lambda columns: columns + columns**2
    )[0]
    columns = (math.isqrt(1 + 4 * found.shape[1]) - 1) // 2
    return found[:, :columns], found[:, columns:].reshape(-1, columns, columns)


def propagated(problem: Problem, mean: np.ndarray, covariance: np.ndarray) -> Prediction:
    """The prediction of y from the normal with these moments of the predictor, in the units of the fit."""
    return predictive(problem.program.likelihood, mean, covariance, "linearised")
