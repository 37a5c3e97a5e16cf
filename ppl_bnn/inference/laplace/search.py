"""Searches for hyper-parameters by values alone: by a held-out score, or by an evidence.

`evidence.py` has derivatives at a fixed mode. Here the objective is a function to be called: a held-out score of
factors on prior precisions (`by_validation`), or the Laplace approximation of the log evidence, at the mode for these
hyper-parameters, of scales that have a hyper-prior (`marginal_mode`). NumPy and SciPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ppl_bnn.core.errors import DivergenceError, InputError, unknown_name
from ppl_bnn.core.progress import Progress, Silent
from ppl_bnn.inference.laplace.evidence import listed
from ppl_bnn.inference.laplace.maximisation import check_effort

# An outer search stops if one step gains fewer nats than this.
FLAT = 1e-6
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, eq=False)
class Validated:
    """Factors (G,) with the best held-out score, and details of the search.

    Parameters
    ----------
    factors : ndarray
        The best factors, (G,).
    score : float
        Their score.
    evaluations : int
        How often the score was computed.
    converged : bool
        Whether the search converged.
    at_bounds : tuple of str
        Names of factors at a limit.
    warnings : tuple of str
        Warnings.
    tried : tuple
        Every pair of factors and score that was tried.
    """

    factors: np.ndarray
    score: float
    evaluations: int
    converged: bool
    at_bounds: tuple[str, ...]
    warnings: tuple[str, ...]
    tried: tuple[tuple[np.ndarray, float], ...]


def by_validation(
    score: Callable[[np.ndarray], float],
    start: np.ndarray,
    *,
    grid: np.ndarray | Sequence[float] = tuple(np.logspace(-4, 4, 17)),
    per: Literal["global", "group"] = "global",
    tolerance: float = 0.05,
    sweeps: int = 3,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Validated:
    """Choose factors by a held-out score instead of the evidence.

    The search is a grid, then golden sections between the neighbours of its best point until the bracket of the log
    factor is shorter than `tolerance`. The result is never worse than the best point tried.

    Parameters
    ----------
    score : callable
        Factors (G,) -> score, larger is better, such as a mean log score. -inf is allowed (never chosen).
    start : ndarray
        Initial factors, (G,).
    grid : ndarray or sequence of float
        Multiples of the factors.
    per : {"global", "group"}
        "global" multiplies all of `start` by one number. "group" does the same to one group after another, for at most
        `sweeps` sweeps or until a sweep moves no log factor by more than the tolerance.
    tolerance : float
        Tolerance of the log factors.
    sweeps : int
        The most sweeps.
    names : sequence of str or None
        Names of the groups.
    progress : Progress or None
        The progress display.

    Returns
    -------
    Validated
        The factors.

    Raises
    ------
    InputError
        Impossible factors or grid.
    DivergenceError
        A score of NaN or +inf, or a grid where every score is -inf.
    """
    start = np.array(start, float)
    ratios = np.unique(np.asarray(grid, float))
    if start.ndim != 1 or not start.size or not np.all(np.isfinite(start) & (start > 0.0)):
        raise InputError.of("by_validation", "positive factors (G,)", f"{start!r}"[:200], "np.ones(groups)")
    if ratios.size < 3 or not np.all(np.isfinite(ratios) & (ratios > 0.0)):
        raise InputError.of(
            "by_validation", "at least three positive values", f"{ratios!r}"[:200], "np.logspace(-4, 4, 17)"
        )
    if per not in ("global", "group"):
        raise unknown_name("search", per, ("global", "group"))
    check_effort("by_validation", tolerance, sweeps)
    labels = tuple(names) if names is not None else tuple(f"group {g}" for g in range(start.size))
    everything = np.ones(start.size, bool)
    axes = (
        [("all", everything)]
        if per == "global"
        else list(zip(labels, np.eye(start.size, dtype=bool), strict=True))
    )
    rounds = 1 if len(axes) == 1 else sweeps
    width = float(np.max(np.diff(np.log(ratios), n=1))) * 2.0
    sections = max(0, int(np.ceil(np.log(tolerance / width) / np.log(_GOLDEN)))) + 2
    tried: dict[tuple[float, ...], float] = {}
    task = (progress or Silent()).task("validation", rounds * len(axes) * (ratios.size + sections))

    def value(log_factors: np.ndarray) -> float:
        factors = np.exp(log_factors)
        key = tuple(factors)
        if key not in tried:
            found = float(score(factors.copy()))
            if np.isnan(found) or found == np.inf:
                raise DivergenceError.of(
                    "by_validation",
                    "a score that is a number",
                    f"{found} at factors {factors}",
                    "a narrower grid=",
                )
            tried[key] = found
            task.update(len(tried), score=found, best=max(tried.values()))
        return tried[key]

    best = np.log(start)
    edges: dict[str, str] = {}
    moved = np.inf
    try:
        for _ in range(rounds):
            before = best
            for label, axis in axes:
                centre = np.where(axis, np.log(start), best)
                offset, edge = _grid_then_golden(
                    lambda offset, centre=centre, axis=axis: value(centre + offset * axis),
                    np.log(ratios),
                    tolerance,
                )
                candidate = centre + offset * axis
                # An earlier sweep may have found a better point between the points of the grid.
                if value(candidate) >= value(best):
                    best, edges[label] = candidate, edge
            moved = float(np.max(np.abs(best - before)))
            if moved <= tolerance:
                break
    finally:
        task.close()
    winner = value(best)
    if winner == -np.inf:
        raise DivergenceError.of(
            "by_validation",
            "a finite score somewhere on the grid",
            "-inf everywhere",
            "another grid= or start=",
        )
    at_bounds = tuple(label for label, edge in edges.items() if edge)
    warnings = tuple(
        f"the best score of {label!r} is at the {edges[label]} end of the grid: widen the grid"
        for label in at_bounds
    )
    converged = len(axes) == 1 or moved <= tolerance
    if not converged:
        warnings += (
            f"the factors still moved by {moved:.3g} in the last of {rounds} sweeps: give more sweeps",
        )
    pairs = tuple((np.array(key), found) for key, found in tried.items())
    return Validated(np.exp(best), winner, len(tried), converged, at_bounds, warnings, pairs)


@dataclass(frozen=True, eq=False)
class OuterMode:
    """The phi (n,) that maximises a log evidence with an inner mode for each phi, and details of the search.

    Parameters
    ----------
    phi : ndarray
        (n,).
    log_evidence : float
        The value at phi.
    evaluations : int
        Number of evaluations.
    converged : bool
        Whether the search converged.
    at_bounds : tuple of str
        Names of coordinates at a bound of `bounds`.
    warnings : tuple of str
        Warnings.
    history : ndarray
        (evaluations, n + 1), every phi with its value.
    """

    phi: np.ndarray
    log_evidence: float
    evaluations: int
    converged: bool
    at_bounds: tuple[str, ...]
    warnings: tuple[str, ...]
    history: np.ndarray


def marginal_mode(
    objective: Callable[[np.ndarray], float],
    start: np.ndarray | Sequence[float],
    *,
    step: float = 1.0,
    reach: float = 12.0,
    bounds: Sequence[tuple[float, float]] | None = None,
    tolerance: float = 1e-3,
    evaluations: int = 200,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> OuterMode:
    """Maximise a log evidence over a few hyper-parameters phi (n,), usually log scales: type-II maximum likelihood.

    No derivatives are needed: COBYQA (Ragonneau 2022), a trust-region method with quadratic models, in a box of
    half-width `step` around the best point, so that no inner mode is far from one already found. If the best point is
    on a face of the box, it becomes the centre of the next box. Unlike the fixed point this ignores no derivative.

    Parameters
    ----------
    objective : callable
        Finds the inner mode for phi and returns the Laplace approximation of the log evidence there, plus a log
        hyper-prior if there is one. -inf marks a phi without a mode.
    start : ndarray or sequence of float
        Initial phi.
    step : float
        Half-width of the box.
    reach : float
        The largest distance from the start in a coordinate without a bound on that side.
    bounds : sequence of (float, float) or None
        Bounds of phi.
    tolerance : float
        Tolerance of phi.
    evaluations : int
        The budget. When it is spent the best point is returned with converged=False and a warning.
    names : sequence of str or None
        Names of the coordinates.
    progress : Progress or None
        The progress display.

    Returns
    -------
    OuterMode
        The maximum.

    Raises
    ------
    DivergenceError
        A value of NaN or +inf, or a best point farther than `reach` from the start: the evidence rises without bound.
    """
    from scipy.optimize import Bounds, minimize

    centre = np.array(start, float)
    if centre.ndim != 1 or not centre.size or not np.all(np.isfinite(centre)):
        raise InputError.of(
            "marginal_mode", "a finite start (n,)", f"{centre!r}"[:200], "log scales of the model"
        )
    check_effort("marginal_mode", tolerance, evaluations)
    if not (step > tolerance and reach > step):
        raise InputError.of(
            "marginal_mode",
            "tolerance < step < reach",
            f"{tolerance:g}, {step:g}, {reach:g}",
            "step=1.0, reach=12.0",
        )
    limits = np.array(bounds if bounds is not None else [(-np.inf, np.inf)] * centre.size, float)
    if limits.shape != (centre.size, 2) or not np.all((limits[:, 0] <= centre) & (centre <= limits[:, 1])):
        raise InputError.of(
            "marginal_mode",
            f"bounds ({centre.size}, 2) around the start",
            f"{limits.tolist()}"[:200],
            "(low, high) for each phi",
        )
    labels = tuple(names) if names is not None else tuple(f"phi[{i}]" for i in range(centre.size))
    history: list[np.ndarray] = []
    task = (progress or Silent()).task("evidence", evaluations)

    def negative(phi: np.ndarray) -> float:
        value = float(objective(phi.copy()))
        if np.isnan(value) or value == np.inf:
            raise DivergenceError.of(
                "marginal_mode",
                "a finite log evidence",
                f"{value} at {dict(zip(labels, phi.tolist(), strict=True))}",
                "a proper hyper-prior or bounds=",
            )
        history.append(np.append(phi, value))
        task.update(len(history), log_evidence=value, best=max(row[-1] for row in history))
        return -value

    begin, best = centre.copy(), -np.inf
    settled, flat, rising = False, False, np.zeros(centre.size, bool)
    try:
        best = -negative(centre)
        if best == -np.inf:
            raise DivergenceError.of(
                "marginal_mode", "a finite log evidence at the start", "-inf", "a start with an inner mode"
            )
        while (not settled or rising.any()) and not flat and len(history) < evaluations:
            low, high = np.maximum(centre - step, limits[:, 0]), np.minimum(centre + step, limits[:, 1])
            result = minimize(
                negative,
                centre,
                method="COBYQA",
                bounds=Bounds(low, high),  # type: ignore[arg-type]
                options={
                    "initial_tr_radius": step / 2.0,
                    "final_tr_radius": tolerance / 2.0,
                    "maxfev": evaluations - len(history),
                },
            )
            row = max(history, key=lambda row: row[-1])
            gained, best, centre = row[-1] - best, row[-1], row[:-1].copy()
            settled = result.status == 0
            down = (centre <= low + tolerance) & (low > limits[:, 0])
            up = (centre >= high - tolerance) & (high < limits[:, 1])
            rising = down | up
            flat = bool(settled and rising.any() and gained <= FLAT)
            endless = (down & np.isinf(limits[:, 0])) | (up & np.isinf(limits[:, 1]))
            distance = np.where(endless, np.abs(centre - begin), 0.0)
            if not flat and distance.max() > reach:
                worst = int(np.argmax(distance))
                raise DivergenceError.of(
                    "marginal_mode",
                    "a log evidence with a maximum",
                    f"one still rising at {labels[worst]} = {centre[worst]:.4g}, {distance[worst]:.3g} from start",
                    "a proper hyper-prior, bounds=, or a larger reach=",
                )
    finally:
        task.close()
    converged = settled and not rising.any()
    warnings: tuple[str, ...] = ()
    if flat:
        named = [label for label, there in zip(labels, rising, strict=True) if there]
        warnings = (
            f"the log evidence rises by less than {FLAT:g} nats over a step in {listed(named)}: undetermined",
        )
    elif not converged:
        warnings = (
            f"the budget of {evaluations} evaluations was spent before the maximum was reached: give more evaluations",
        )
    at_limit = (centre <= limits[:, 0] + tolerance) | (centre >= limits[:, 1] - tolerance)
    at_bounds = tuple(label for label, there in zip(labels, at_limit, strict=True) if there)
    if at_bounds:
        warnings += (f"the best value of {listed(at_bounds)} is at a bound",)
    return OuterMode(centre, float(best), len(history), converged, at_bounds, warnings, np.array(history))


def _grid_then_golden(
    function: Callable[[float], float], grid: np.ndarray, tolerance: float
) -> tuple[float, str]:
    """The best point of a grid, refined between its neighbours, and the end of the grid that it is at, if any."""
    values = [function(point) for point in grid]
    top = int(np.argmax(values))
    best, at = values[top], float(grid[top])
    if top in (0, len(grid) - 1):
        return at, "lower" if top == 0 else "upper"
    low, high = float(grid[top - 1]), float(grid[top + 1])
    inner = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    found = [function(point) for point in inner]
    while high - low > tolerance:
        side = int(found[1] > found[0])
        if side:
            low, inner[0], found[0] = inner[0], inner[1], found[1]
            inner[1] = low + _GOLDEN * (high - low)
        else:
            high, inner[1], found[1] = inner[1], inner[0], found[0]
            inner[0] = high - _GOLDEN * (high - low)
        found[side] = function(inner[side])
        for point, value in zip(inner, found, strict=True):
            if value > best:
                best, at = value, point
    return at, ""
