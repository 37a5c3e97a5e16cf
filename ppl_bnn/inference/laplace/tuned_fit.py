"""Hyper-parameters of a Laplace approximation, chosen by the evidence or by held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.inference.curvature.gaussians import FlatGaussian
from ppl_bnn.inference.flat_vector import Values, flat_sites
from ppl_bnn.inference.laplace.evidence import Evidence
from ppl_bnn.inference.laplace.hyperparameters import Tuning, log_prior
from ppl_bnn.inference.laplace.maximisation import Tuned, alternate, fixed_point, maximise
from ppl_bnn.inference.laplace.noise import gaussian_noise
from ppl_bnn.inference.laplace.search import by_validation
from ppl_bnn.inference.optimisation.mode import kinks

if TYPE_CHECKING:
    from ppl_bnn.inference.laplace.fit import LaplaceFit

# Nats of log evidence that the alternation may lose from its best round: it ignores how a new mode changes H.
RUNAWAY = 1.0
SEARCHES = {"fixed_point": fixed_point, "maximise": maximise}


class _RanAwayError(Exception):
    """The alternation has lost more evidence than its approximation explains."""


def tune(
    fit: LaplaceFit, u: dict[str, np.ndarray], positions: np.ndarray
) -> tuple[Values, FlatGaussian, dict[str, Any]]:
    """The mode, the Gaussian, and the tuned `factors` by site and `noise`, from the mode u of the model as written."""
    method, problem = fit.method, fit.problem
    with_noise = method.noise == "evidence"
    noise = gaussian_noise(problem, u) if with_noise else None
    held = () if noise is None or noise.site is None else (noise.site,)
    tuning = Tuning.of(problem, u, positions, method.tune)
    latest: Any = (None,)

    def evidence_at(at: Any) -> tuple[Evidence, Any, np.ndarray]:
        # Evidence, curvature and prior of the same mode are needed several times.
        nonlocal latest
        if latest[0] is not at:
            curvature = fit.data_curvature(at, positions)
            prior = fit.independent_prior(curvature, at, positions, tuning.prior(at))
            latest = at, tuning.evidence(at, curvature, prior, with_noise), curvature, prior
        return latest[1:]

    if method.objective == "validation":
        factors, scale = _validated(fit, tuning, positions), 1.0
        if method.during_training:
            u = fit.refinement.mode(u, held=held, changes=tuning.changes(factors, scale))
    else:
        if method.during_training:
            found, u = _alternated(fit, tuning, u, held, lambda at: evidence_at(at)[0])
        else:
            found = SEARCHES[method.search](evidence_at(u)[0])
        factors, scale = found.factors, found.scale
        fit.warnings += found.warnings
    evidence, curvature, prior = evidence_at(u)
    state = evidence.at(factors, scale)
    fit.figures |= {"log_evidence": state.value, "effective_parameters": float(state.gamma.sum())}
    gaussian = curvature.scaled(scale).gaussian(factors[tuning.groups] * prior)
    _check_mode(fit, u, gaussian, tuning, factors, scale)
    if len(factors) <= 50:
        shown = np.flatnonzero(tuning.tuned)
        fit.figures |= {f"prior_factor/{tuning.names[group]}": float(factors[group]) for group in shown}
    known: float | None = None
    if noise is not None:
        value = noise.value / np.sqrt(scale)
        fit.figures["noise"] = float(np.mean(value))
        if noise.site is None:
            known = float(value)
        else:
            u = _with_value(problem, u, noise.site, value)
    # The log joint under the tuned hyper-parameters: the evidence without the volume, and the held sites.
    outside = np.setdiff1d(np.arange(fit.size), positions)
    density = fit.figures["log_evidence"] - gaussian.log_volume
    fit.figures["log_joint"] = float(density + log_prior(problem, u, outside))
    return u, gaussian, {"factors": tuning.site_factors(factors), "noise": known}


def _alternated(
    fit: LaplaceFit, tuning: Tuning, start: Values, held: Sequence[str], at_mode: Callable[[Values], Evidence]
) -> tuple[Tuned, dict[str, np.ndarray]]:
    """MacKay's alternation of modes and factors; if it diverges, only as far as the evidence rises."""
    best, highest, patience = start, -np.inf, RUNAWAY

    def evidence_at(factors: np.ndarray, scale: float) -> Evidence:
        # Start from the best mode so far, so that a step that was too long does not affect the next.
        nonlocal best, highest
        u = fit.refinement.mode(best, held=held, changes=tuning.changes(factors, scale))
        evidence = at_mode(u)
        value = evidence.log_evidence(factors, scale)
        if value < highest - patience:
            raise _RanAwayError
        if value > highest:
            best, highest = u, value
        return evidence

    search = SEARCHES[fit.method.search]
    try:
        found = alternate(evidence_at, tuning.ones, search, progress=fit.progress)
    except _RanAwayError:
        fit.warnings += (
            "alternating modes and hyper-parameters lost evidence, as it may in a network: steps were taken only as "
            "far as they raise it",
        )
        best, highest, patience = start, -np.inf, np.inf
        found = alternate(evidence_at, tuning.ones, search, monotone=True, progress=fit.progress)
    return found, fit.refinement.mode(best, held=held, changes=tuning.changes(found.factors, found.scale))


def _check_mode(
    fit: LaplaceFit, u: Values, gaussian: FlatGaussian, tuning: Tuning, factors: np.ndarray, scale: float
) -> None:
    """Warn if the tuned hyper-parameters have moved the mode: a Newton step gains g' A^-1 g / 2 nats."""
    changes = tuning.changes(factors, scale)
    _, gradient = fit.refinement.value_and_grad(flat_sites(fit.problem, u), changes)
    if kinks(fit.problem):
        return
    latent = gradient[tuning.places]
    fit.figures["gradient_norm"] = float(np.linalg.norm(latent))
    gain = gaussian.newton_gain(latent)
    if gain > 1.0:
        fit.warnings += (
            f"the mode is not that of the tuned hyper-parameters: a Newton step would gain {gain:.3g} nats; "
            "during_training=True finds the mode again",
        )


def _with_value(
    problem: Problem, u: dict[str, np.ndarray], site: str, value: np.ndarray
) -> dict[str, np.ndarray]:
    """u with one site at a constrained value."""
    draws = {name: np.asarray(each)[None] for name, each in u.items()}
    w = problem.program.constrain_draws(draws, problem.x, problem.y)
    w = {name: each[0] for name, each in w.items()} | {site: value}
    return problem.program.unconstrain(w, problem.x, problem.y)


def _validated(fit: LaplaceFit, tuning: Tuning, positions: np.ndarray) -> np.ndarray:
    """Factors (G,) by the log score of rows that neither the mode nor the curvature used."""
    method, problem = fit.method, fit.problem
    rng = np.random.default_rng(site_seed("validation", problem.seed))
    order = rng.permutation(problem.rows)
    count = fit.validation_rows()
    out, rows = np.sort(order[:count]), np.sort(order[count:])
    part = _rows_of(problem, rows)
    # A given mode was trained on the held-out rows too, so it is used only as the start of training.
    alone = replace(method, tune="none", objective="evidence", optimise=True, restarts=1)
    training = type(fit)(alone, part, fit.progress, fit.restart)
    u = training.mode().u
    curvature = training.data_curvature(u, positions)
    prior = training.independent_prior(curvature, u, positions, training.prior(u, positions))
    inputs = map_data(lambda a: np.asarray(a)[out], problem.inputs)
    targets = np.asarray(problem.targets)[out]

    def score(free: np.ndarray) -> float:
        gaussian = curvature.gaussian(_factors(tuning, free)[tuning.groups] * prior)
        approximation = training.approximation(u, gaussian, positions)
        prediction = approximation.closed_form(part, inputs, fit.kinds()[0], method.memory)
        assert prediction is not None
        return float(np.mean(prediction.log_prob(targets)))

    names = [name for name in tuning.names if name not in tuning.held]
    found = by_validation(score, np.ones(len(names)), names=names, progress=fit.progress)
    fit.warnings += found.warnings
    fit.passes += training.passes + training.refinement.evaluations
    return _factors(tuning, found.point)


def _factors(tuning: Tuning, free: np.ndarray) -> np.ndarray:
    """Factors (G,) from those of the tuned groups."""
    factors = tuning.ones
    factors[tuning.tuned] = free
    return factors


def _rows_of(problem: Problem, rows: np.ndarray) -> Problem:
    """The same problem with some of its rows."""
    asarray = problem.system.asarray
    inputs = map_data(lambda a: np.asarray(a)[rows], problem.inputs)
    targets = np.asarray(problem.targets)[rows]
    x, y = map_data(asarray, inputs), asarray(targets)
    return replace(problem, program=problem.program.rebound(x, y), x=x, y=y, inputs=inputs, targets=targets)
