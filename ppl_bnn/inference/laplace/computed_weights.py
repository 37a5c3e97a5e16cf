"""Weights that a program computes from latent sites, linearised about a mode.

`priors.Hierarchical`, `Horseshoe`, the relaxed `SpikeAndSlab`, every prior whose scale is sampled, and `noncentred`
draw a standard variable e, the site `<name>.base`, and multiply it by scales s: the weight w = s e is the deterministic
site `<name>`. A Gaussian over (e, log s) approximates the linearisation

    w(u) = w(u*) + J_w (u - u*)

but not w: where the data determine w, e and s move along the hyperbola s e = w, and the Gaussian along its tangent.
Draws through the product would be far too wide, so weights are linearised (the delta method), as the predictor is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.inference.flat_vector import Values, first_rows, somewhere, system_values
from ppl_bnn.language.handlers import COMPUTED, recorded_values

BASE = ".base"
# Number of draws that measure the difference between weights and their linearisation.
REMAINDER_DRAWS = 200


def computed_names(problem: Problem) -> tuple[str, ...]:
    """The deterministic sites `<name>` of a program whose latent site is `<name>.base`."""
    program = problem.program
    if not program.language or not any(site.name.endswith(BASE) for site in program.latents):
        return ()
    u = system_values(problem, somewhere(problem))
    return program.cached("computed weights", lambda: tuple(_weights(problem, u)))


def _weights(problem: Problem, u: Mapping[str, Any]) -> dict[str, Any]:
    """The computed weights at u (arrays of the system), as the program computes them."""
    program, (x, y) = problem.program, first_rows(problem)
    recorded = recorded_values(program.model, program.constrain(u, x, y), x)
    latents = {site.name for site in program.latents}
    return {name: value for name, value in recorded.items() if name + BASE in latents}


def computed_weights(problem: Problem, u: Values) -> dict[str, np.ndarray]:
    """The computed weights at draws u with one leading axis, name -> (S, *shape), as the program computes them."""
    system = problem.system
    function = problem.program.cached(
        "computed", lambda: system.compile(system.vmap(lambda u: _weights(problem, u)))
    )
    values = function({name: system.asarray(np.asarray(value)) for name, value in u.items()})
    return {name: system.to_numpy(value) for name, value in values.items()}


def linearised_weights(problem: Problem, centre: Values, u: Values) -> dict[str, np.ndarray]:
    """w(centre) + J_w (u - centre) at draws u with one leading axis, name -> (S, *shape)."""
    program, system = problem.program, problem.system
    moving = [site.name for site in program.latents]

    def one(change: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
        def weights(part: Mapping[str, Any]) -> dict[str, Any]:
            return _weights(problem, {**at, **part})

        value, tangent = system.jvp(weights, {name: at[name] for name in moving}, dict(change))
        return {name: value[name] + tangent[name] for name in value}

    function = program.cached(
        "linearised weights", lambda: system.compile(system.vmap(one, in_axes=(0, None)))
    )
    change = {name: system.asarray(np.asarray(u[name]) - centre[name]) for name in moving}
    values = function(change, system_values(problem, centre))
    return {name: system.to_numpy(value) for name, value in values.items()}


def given(weights: Values) -> dict[str, np.ndarray]:
    """Computed weights as values for a program, which then uses them instead of computing them."""
    return {COMPUTED + name: value for name, value in weights.items()}


def linearisation_error(problem: Problem, centre: Values, u: Values) -> tuple[float, float]:
    """How far computed weights are from their linearisation at draws u, the worst over all tensors.

    Root mean squares of w(u) minus its linearisation and of w(u) - w(centre), over that of the linearisation -
    w(centre).
    """
    exact, linear = computed_weights(problem, u), linearised_weights(problem, centre, u)
    at = computed_weights(problem, {name: np.asarray(value)[None] for name, value in centre.items()})

    def size(deviation: np.ndarray) -> float:
        return float(np.sqrt(np.mean(np.asarray(deviation, dtype=np.float64) ** 2)))

    remainder, width = 0.0, 1.0
    for name in exact:
        spread = size(linear[name] - at[name])
        if spread > 0.0:
            remainder = max(remainder, size(exact[name] - linear[name]) / spread)
            width = max(width, size(exact[name] - at[name]) / spread)
    return remainder, width
