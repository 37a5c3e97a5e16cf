"""The noise of a Gaussian likelihood: the sites that it is made of, and the noise that the evidence tunes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference import flat_vector
from ppl_bnn.inference.curvature.jacobian import depends
from ppl_bnn.inference.flat_vector import Values
from ppl_bnn.inference.laplace.evidence import GaussianNoise
from ppl_bnn.language.handlers import network_output
from ppl_bnn.language.likelihoods import Gaussian


def noise_sites(problem: Problem, u: Values) -> tuple[str, ...]:
    """The latent sites of a Gaussian likelihood's noise: those that affect log noise and not f."""
    program, system = problem.program, problem.system
    if not isinstance(program.likelihood, Gaussian):
        return ()
    known: list[str] | None = program.cached("noise sites", dict).get("all")
    if known is not None:
        return tuple(known)
    x, y = flat_vector.first_rows(problem)
    w = program.constrain(flat_vector.system_values(problem, u), x, y)
    whole = program.language and not program.has_local
    noise = network_output(program.model, w, x).likelihood.noise if whole else None
    names = [] if isinstance(noise, int | float) else flat_vector.latent_names(problem)
    reached = {name: np.split(depends(problem, w, x, [name]), 2) for name in names}
    found = [name for name, (f, log_noise) in reached.items() if log_noise.any() and not f.any()]
    # The outputs that a site affects are the same at every u, but not detectable where the network overflows.
    if np.isfinite(system.to_numpy(program.predictor(w, x))[0]).all():
        program.cached("noise sites", dict)["all"] = found
    return tuple(found)


class TunableNoise(NamedTuple):
    """The noise of a Gaussian likelihood: its site (None for a number), value, and the terms of the evidence."""

    site: str | None
    value: np.ndarray
    likelihood: GaussianNoise


def gaussian_noise(problem: Problem, u: Values) -> TunableNoise:
    """The noise of a Gaussian likelihood at the mode u; `UnsupportedError` unless it is one noise for all rows."""
    program, system = problem.program, problem.system
    where, got = "Laplace(noise='evidence')", type(program.likelihood).__name__
    good = isinstance(program.likelihood, Gaussian)
    UnsupportedError.check(good, where, "likelihoods.Gaussian(noise)", got, "noise='gaussian'")
    expected, got = "rows that all count once", "weights of rows"
    UnsupportedError.check(not program.weighted, where, expected, got, "noise='gaussian'")
    x, y = flat_vector.first_rows(problem)
    w = program.constrain(flat_vector.system_values(problem, u), x, y)
    noise = network_output(program.model, w, x).likelihood.noise
    site = next((name for name, value in w.items() if value is noise), None)
    good = site is not None or isinstance(noise, int | float)
    expected = "a noise that is a number or a site of its own"
    advice = "noise='mode', or marginal= with the sites that the noise is made of"
    UnsupportedError.check(good, where, expected, "one that is computed", advice)
    draws = {name: system.to_numpy(value)[None] for name, value in w.items()}
    eta = program.predictor_draws(draws, problem.inputs)[0].astype(float)
    outputs = eta.shape[-1] // 2
    residuals = np.asarray(problem.targets, float).reshape(len(eta), outputs) - eta[:, :outputs]
    value = np.asarray(noise if site is None else system.to_numpy(w[site]), dtype=float)
    return TunableNoise(site, value, GaussianNoise.of(residuals, np.exp(-2.0 * eta[:, outputs:])))
