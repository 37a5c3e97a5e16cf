"""Searches for hyper-parameters by values alone; `evidence.py` has derivatives at a fixed mode.

The objective is a held-out score (`by_validation`), or the evidence at the mode for scales that have a hyper-prior
(`marginal_mode`). NumPy and SciPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cache
from typing import NamedTuple

import numpy as np
import scipy

from ppl_bnn.core.errors import DivergenceError
from ppl_bnn.core.progress import Progress, Silent
from ppl_bnn.inference.laplace.evidence import listed

# An outer search stops if one step gains fewer nats than this.
FLAT = 1e-6
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0


class _Ended(Exception):
    """A callback asks for the end of a search."""


class SearchResult(NamedTuple):
    """The point (n,) with the best value; history (evaluations, n + 1) has every point with its value."""

    point: np.ndarray
    value: float
    converged: bool
    warnings: tuple[str, ...]
    history: np.ndarray


def by_validation(
    score: Callable[[np.ndarray], float],
    start: np.ndarray,
    *,
    grid: Sequence[float] = tuple(np.logspace(-4, 4, 17)),
    tolerance: float = 0.05,
    sweeps: int = 3,
    names: Sequence[str] = ("all",),
    progress: Progress | None = None,
) -> SearchResult:
    """Choose factors (G,) by a held-out score (larger is better, -inf is never chosen) instead of the evidence.

    The search is a grid of multiples of `start`, then golden sections between the neighbours of its best point until
    the bracket of the log factor is shorter than `tolerance`. Several groups are searched one after another, for at
    most `sweeps` sweeps or until a sweep moves no log factor by more than the tolerance. `DivergenceError` is raised
    for a score of NaN or +inf, or if every score is -inf.
    """
    ratios = np.log(np.asarray(grid, float))
    axes = np.eye(start.size, dtype=bool)
    rounds = 1 if start.size == 1 else sweeps
    width = float(np.max(np.diff(ratios))) * 2.0
    sections = max(0, int(np.ceil(np.log(tolerance / width) / np.log(_GOLDEN)))) + 2
    history: list[tuple[float, ...]] = []
    total = rounds * len(axes) * (ratios.size + sections)

    @cache
    def value(*factors: float) -> float:
        found = float(score(np.array(factors)))
        if np.isnan(found) or found == np.inf:
            got = f"{found} at factors {np.array(factors)}"
            raise _diverged("validation", "a score that is a number", got)
        history.append((*factors, found))
        if task.update(len(history), score=found, best=max(row[-1] for row in history)):
            raise _Ended
        return found

    best, moved, edges, ended = np.log(start), np.inf, dict[str, str](), True
    with suppress(_Ended), closing((progress or Silent()).task("validation", total)) as task:
        for _ in range(rounds):
            before = best
            for label, axis in zip(names, axes, strict=True):
                centre = np.where(axis, np.log(start), best)

                def along(offset: float, centre: np.ndarray = centre, axis: np.ndarray = axis) -> float:
                    return value(*np.exp(centre + offset * axis))

                offset, edge = _grid_then_golden(along, ratios, tolerance)
                candidate = centre + offset * axis
                # An earlier sweep may have found a better point between the points of the grid.
                if value(*np.exp(candidate)) >= value(*np.exp(best)):
                    best, edges[label] = candidate, edge
            moved = float(np.max(np.abs(best - before)))
            if moved <= tolerance:
                break
        ended = False
    if ended:
        *found, winner = max(history, key=lambda row: row[-1])
        point = np.array(found)
    else:
        point = np.exp(best)
        winner = value(*point)
    if winner == -np.inf:
        raise _diverged("validation", "a finite score somewhere on the grid", "-inf everywhere")
    text = "the best score of {!r} is at the {} end of the grid: widen the grid"
    warnings = [text.format(label, edge) for label, edge in edges.items() if edge]
    converged = not ended and (len(axes) == 1 or moved <= tolerance)
    if not converged and not ended:
        text = f"the factors still moved by {moved:.3g} in the last of {rounds} sweeps: give more sweeps"
        warnings.append(text)
    return SearchResult(point, winner, converged, tuple(warnings), np.array(history))


def marginal_mode(
    objective: Callable[[np.ndarray], float],
    start: np.ndarray | Sequence[float],
    *,
    step: float = 1.0,
    reach: float = 12.0,
    tolerance: float = 1e-3,
    evaluations: int = 200,
    names: Sequence[str] = (),
    progress: Progress | None = None,
) -> SearchResult:
    """Maximise a log evidence over a few hyper-parameters phi (n,), usually log scales: type-II maximum likelihood.

    `objective` finds the inner mode for phi and returns its log evidence plus log hyper-prior, -inf without a mode.
    COBYQA (Ragonneau 2022), a trust-region method without derivatives, maximises it in a box of half-width `step`
    around the best point, so that no inner mode is far from a known one. A best point on a face is the centre of the
    next box. After `evaluations` the best point is returned with converged=False. `DivergenceError` is raised for NaN,
    +inf, or a best point farther than `reach` from the start: the evidence rises without bound.
    """
    centre = np.array(start, float)
    labels = tuple(names) or tuple(f"phi[{i}]" for i in range(centre.size))
    history: list[np.ndarray] = []

    def negative(phi: np.ndarray) -> float:
        value = float(objective(phi.copy()))
        if np.isnan(value) or value == np.inf:
            at = dict(zip(labels, phi.tolist(), strict=True))
            raise _diverged("marginal", "a finite log evidence", f"{value} at {at}")
        history.append(np.append(phi, value))
        if task.update(len(history), log_evidence=value, best=max(row[-1] for row in history)):
            raise _Ended
        return -value

    begin, best = centre.copy(), -np.inf
    settled, flat, rising, ended = False, False, np.zeros(centre.size, bool), True
    with suppress(_Ended), closing((progress or Silent()).task("evidence", evaluations)) as task:
        best = -negative(centre)
        while best > -np.inf and (not settled or rising.any()) and not flat and len(history) < evaluations:
            low, high = centre - step, centre + step
            options = {"initial_tr_radius": step / 2.0, "final_tr_radius": tolerance / 2.0}
            options["maxfev"] = evaluations - len(history)
            bounds = list(zip(low, high, strict=True))
            result = scipy.optimize.minimize(
                negative, centre, method="COBYQA", bounds=bounds, options=options
            )
            row = max(history, key=lambda row: row[-1])
            gained, best, centre = row[-1] - best, row[-1], row[:-1].copy()
            settled = result.status == 0
            rising = (centre <= low + tolerance) | (centre >= high - tolerance)
            flat = bool(settled and rising.any() and gained <= FLAT)
            distance = np.where(rising, np.abs(centre - begin), 0.0)
            if not flat and distance.max() > reach:
                worst = int(np.argmax(distance))
                got = f"one still rising at {labels[worst]} = {centre[worst]:.4g}, {distance[worst]:.3g} from start"
                raise _diverged("marginal", "a log evidence with a maximum", got)
        ended = False
    if ended:
        row = max(history, key=lambda row: row[-1])
        best, centre = row[-1], row[:-1]
    if best == -np.inf:
        raise _diverged("marginal", "a finite log evidence at the start", "-inf")
    converged = settled and not rising.any() and not ended
    text = f"the budget of {evaluations} evaluations was spent before the maximum was reached: give more evaluations"
    if flat:
        named = listed([label for label, there in zip(labels, rising, strict=True) if there])
        text = f"the log evidence rises by less than {FLAT:g} nats over a step in {named}: undetermined"
    return SearchResult(
        centre, float(best), converged, () if converged or ended else (text,), np.array(history)
    )


def _diverged(what: str, expected: str, got: str) -> DivergenceError:
    advice = "objective='evidence'" if what == "validation" else "a proper hyper-prior or another start="
    return DivergenceError.of(f"Laplace {what}", expected, got, advice)


def _grid_then_golden(
    function: Callable[[float], float], grid: np.ndarray, tolerance: float
) -> tuple[float, str]:
    """The best point of a grid, refined between its neighbours, and the end of the grid that it is at, if any."""
    values = {float(point): function(float(point)) for point in grid}
    top = int(np.argmax(list(values.values())))
    if top in (0, len(grid) - 1):
        return float(grid[top]), "lower" if top == 0 else "upper"
    low, high = float(grid[top - 1]), float(grid[top + 1])
    inner = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    found = [function(point) for point in inner]
    values |= dict(zip(inner, found, strict=True))
    while high - low > tolerance:
        side = int(found[1] > found[0])
        if side:
            low, inner[0], found[0] = inner[0], inner[1], found[1]
            inner[1] = low + _GOLDEN * (high - low)
        else:
            high, inner[1], found[1] = inner[1], inner[0], found[0]
            inner[0] = high - _GOLDEN * (high - low)
        values[inner[side]] = found[side] = function(inner[side])
    return max(values, key=lambda point: values[point]), ""
