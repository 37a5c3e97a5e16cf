"""Stacking: weights of chains, or of members of an ensemble, by what each of them predicts.

A posterior with several modes that chains do not travel between is a collection of parts whose true shares the chains
do not know: a chain stays where it began. Equal weights count a poor mode as much as a good one. Stacking (Yao,
Vehtari, Simpson and Gelman 2018, Bayesian Analysis 13; for chains Yao, Vehtari and Gelman 2022, "Stacking for
non-mixing Bayesian computations", Journal of Machine Learning Research 23) takes the weights of the mixture that
predicts best,

    w = argmax over the simplex of sum_i log sum_k w_k p_k(y_i),

p_k(y_i) being the predictive density of part k for a row that it has not seen: a row left out by importance weights, or
a row of a validation part. What comes of it is chosen for its predictions. It is not the posterior.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.arrays import row_count
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError, message
from ppl_bnn.posterior.approximation import Approximation
from ppl_bnn.posterior.pareto import FEWEST_DRAWS, K_LIMIT
from ppl_bnn.posterior.posterior import Posterior

# Nats of mean log score that are left to gain, at most, when the weights are handed over.
TOLERANCE = 1e-9
STEPS = 500
# Of the distance to where a weight or a multiplier becomes zero; and how much of the complementarity is kept in a step.
TO_BOUNDARY, CENTRING = 0.99, 0.1


def stack(posterior: Posterior, x: Any = None, y: Any = None) -> Posterior:
    """The same posterior with weights of its chains, or of its members, that make the best prediction.

    Without x and y each training row is left out of each part by Pareto-smoothed importance sampling (ArviZ), its draws
    taken at their word. With x (N, F) and y, rows that the fit has not seen, each part predicts them as it is: this is
    how points are stacked, which have no spread to leave a row out of.

    Draws stay as they are: `weights` says what each part counts, and `predict` gives a weighted mixture. Where draws
    are made on demand, more of them come from heavier members. Weights that there were before are replaced.

    info.figures: "stacking_gain", mean over rows of log sum_k w_k p_k(y_i) - log mean_k p_k(y_i), nats, on the very
    rows that chose the weights; "stacking_rows"; "stacking_effective_parts", 1 / sum_k w_k^2; without x and y
    "stacking_pareto_k", the largest over parts and rows, of which a warning speaks above 0.7.

    Raises
    ------
    UnsupportedError: no parts (one chain, a single approximation), or without x and y a part that is a point, that
    stands still or has fewer than 25 draws. InputError: one of x and y alone, rows of the fit itself, a row to which no
    part gives any density.
    """
    if (x is None) != (y is None):
        raise InputError("stack: " + message("both x and y, or neither", "one of them", "stack(posterior)"))
    parts = posterior.approximation.components
    if len(parts) < 2:
        raise UnsupportedError(
            "stack: "
            + message(
                "several chains, or an ensemble with members",
                f"{posterior.info.method} with {len(parts) or 1} of them",
                "NUTS(chains=4), or an ensemble of several members",
            )
        )
    figures: dict[str, float] = {}
    warnings: tuple[str, ...] = ()
    if x is None:
        found = [_left_out(_alone(posterior, part), index) for index, part in enumerate(parts)]
        log_densities = np.stack([density for density, _ in found], axis=1)
        k = np.stack([shape for _, shape in found], axis=1)
        figures["stacking_pareto_k"] = float(k.max())
        if not figures["stacking_pareto_k"] <= K_LIMIT:
            share = float(np.mean(~(k.max(axis=1) <= K_LIMIT)))
            warnings = (
                f"stacking: Pareto k is above {K_LIMIT} for some part in {share:.1%} of the rows, so that weights by "
                "leaving rows out are not to be relied on; stack on rows that were held out, stack(posterior, x, y)",
            )
    else:
        x = checks.check_inputs(x)
        y = checks.check_targets(y, row_count(x))
        if checks.data_hash(x, y) == posterior.info.data_hash:
            raise InputError(
                "stack: "
                + message(
                    "rows that the fit has not seen",
                    "the rows that it was fitted to",
                    "stack(posterior), which leaves each row out, or a validation part",
                )
            )
        log_densities = np.stack([_alone(posterior, part).predict(x).log_prob(y) for part in parts], axis=1)
    weights = stacking_weights(log_densities)
    figures |= {
        "stacking_gain": float(
            np.mean(mixture_log_density(log_densities, weights) - mixture_log_density(log_densities))
        ),
        "stacking_rows": float(len(log_densities)),
        "stacking_effective_parts": float(1.0 / np.sum(weights**2)),
    }
    kept = tuple(warning for warning in posterior.info.warnings if not warning.startswith("stacking: "))
    info = replace(
        posterior.info,
        figures={
            name: value for name, value in posterior.info.figures.items() if not name.startswith("stacking_")
        }
        | figures,
        warnings=(*kept, *warnings),
    )
    return replace(posterior, approximation=posterior.approximation.weighted(weights), info=info)


def stacking_weights(log_densities: np.ndarray) -> np.ndarray:
    """Weights (K,) that maximise sum_i log sum_k w_k exp(log_densities_ik) over the simplex; log_densities is (N, K).

    The problem is convex. With D_k(w) = 1/N sum_i p_ik / (sum_j w_j p_ij), log t <= t - 1 gives, for any weights v,

        mean_i log sum_k v_k p_ik - mean_i log sum_k w_k p_ik <= max_k D_k(w) - 1,

    and Newton's method on the conditions of optimality, w_k (1 - D_k(w)) = 0 and D_k(w) <= 1 (a primal-dual interior
    point method; Boyd and Vandenberghe 2004, section 11.7), goes on until the right-hand side is below 1e-9. Where
    several weights are equally good they are shared: parts that predict alike get the same.

    Raises
    ------
    InputError: another shape, values that are NaN or +inf, a row to which no part gives any density. DivergenceError:
    the bound was not reached.
    """
    values = np.asarray(log_densities, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(
            "log_densities: "
            + message("an array (rows, parts)", f"shape {values.shape}", "one column per part")
        )
    if np.isnan(values).any() or (values == np.inf).any():
        raise InputError(
            "log_densities: "
            + message("numbers below infinity", "NaN or +inf", "parts whose predictions are finite")
        )
    top = values.max(axis=1)
    if not np.isfinite(top).all():
        raise InputError(
            "log_densities: "
            + message(
                "some part that gives each row a density",
                f"row {int(np.argmin(top))}, which has none under any",
                "leaving it out, or parts that are not so sure",
            )
        )
    densities = np.exp(values - top[:, None])
    rows, parts = densities.shape
    weights, multipliers = np.full(parts, 1.0 / parts), np.ones(parts)
    for _ in range(STEPS):
        ratios = densities / (densities @ weights)[:, None]
        slopes = ratios.mean(axis=0)
        # Of the weights divided by their sum, whose slopes are larger by that sum.
        if slopes.max() * weights.sum() - 1.0 <= TOLERANCE:
            return weights / weights.sum()
        centre = CENTRING * float(weights @ multipliers) / parts
        curvature = ratios.T @ ratios / rows
        step = np.linalg.solve(curvature + np.diag(multipliers / weights), slopes - 1.0 + centre / weights)
        turn = centre / weights - multipliers - multipliers / weights * step
        size = min(1.0, _to_boundary(weights, step), _to_boundary(multipliers, turn))
        now = _residual(densities, weights, multipliers, centre)
        while (
            size > 1e-12
            and _residual(densities, weights + size * step, multipliers + size * turn, centre)
            > (1.0 - 0.01 * size) * now
        ):
            size *= 0.5
        weights, multipliers = weights + size * step, multipliers + size * turn
    raise DivergenceError(
        "stacking: "
        + message(
            f"weights within {TOLERANCE} nats of the best",
            f"a bound of {float(slopes.max() * weights.sum() - 1.0):.2g} after {STEPS} steps",
            "fewer parts",
        )
    )


def mixture_log_density(log_densities: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """log sum_k w_k p_ik, (N,), of log densities (N, K); weights (K,), None: equal."""
    parts = log_densities.shape[1]
    with np.errstate(divide="ignore"):  # a part without weight
        logarithms = np.full(parts, -math.log(parts)) if weights is None else np.log(weights)
    return np.logaddexp.reduce(log_densities + logarithms, axis=1)


def _to_boundary(values: np.ndarray, step: np.ndarray) -> float:
    """How much of a step can be taken before a value becomes zero, and a little less."""
    falling = step < 0.0
    return TO_BOUNDARY * float(np.min(-values[falling] / step[falling])) if falling.any() else math.inf


def _residual(densities: np.ndarray, weights: np.ndarray, multipliers: np.ndarray, centre: float) -> float:
    slopes = (densities / (densities @ weights)[:, None]).mean(axis=0)
    return float(np.hypot.reduce([*(1.0 - slopes - multipliers), *(weights * multipliers - centre)]))


def _alone(posterior: Posterior, part: Approximation) -> Posterior:
    """One part as a posterior by itself."""
    model = posterior.model
    same = posterior.approximation.program(model) is model and part.program(model) is model
    return replace(
        posterior, approximation=part, statistics={}, _programs=posterior._programs if same else {}
    )


def _left_out(part: Posterior, index: int) -> tuple[np.ndarray, np.ndarray]:
    """log p(y_i | the other rows) under one part, (N,), and the Pareto k of each row."""
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    if part.kind == "point":
        raise _refused(index, "a point, which has no spread to leave a row out of")
    values = part.log_likelihood()
    if not np.isfinite(values).all():
        raise _refused(index, "a log likelihood that is not finite for some draw")
    low, high = values.min(axis=(0, 1)), values.max(axis=(0, 1))
    varies = low < high
    if not varies.any():
        raise _refused(index, "draws that are all the same, which have no spread to leave a row out of")
    count = values.shape[0] * values.shape[1]
    if count < FEWEST_DRAWS:
        raise _refused(index, f"{count} draws")
    # A row that every draw gives the same density is predicted so without it, too.
    density, k = low.copy(), np.full(len(low), -math.inf)
    moving: Any = np.moveaxis(values[..., varies], -1, 0)
    efficiency = 1.0
    if part.kind == "chains":
        likelihoods = np.exp(moving - moving.max(axis=(1, 2), keepdims=True))
        with np.errstate(all="ignore"):
            relative: Any = array_stats.ess(
                likelihoods, method="mean", relative=True, chain_axis=1, draw_axis=2
            )
        relative = np.asarray(relative)[np.isfinite(relative)]
        efficiency = float(relative.mean()) if len(relative) else 1.0
    try:
        found = array_stats.loo(moving, r_eff=efficiency, chain_axis=1, draw_axis=2)
    except ValueError as error:
        raise _refused(index, f"importance weights that cannot be smoothed ({error})") from error
    density[varies], k[varies] = found[0], found[1]
    return density, np.where(np.isnan(k), math.inf, k)


def _refused(index: int, came: str) -> UnsupportedError:
    return UnsupportedError(
        "stack by leave-one-out: "
        + message(
            f"parts of at least {FEWEST_DRAWS} draws that differ",
            f"part {index} with {came}" if came[0].isdigit() else f"part {index}: {came}",
            "rows that were held out, stack(posterior, x, y) or Stacked(member, by='validation')",
        )
    )
