"""Stacking: weights of chains, or of members of an ensemble, by their predictions.

If chains do not move between the modes of a posterior, their draws do not show the shares of the modes, and equal
weights count a poor mode as much as a good one. Stacking (Yao, Vehtari, Simpson and Gelman 2018, Bayesian Analysis 13;
for chains Yao, Vehtari and Gelman 2022, Journal of Machine Learning Research 23) takes the mixture that predicts best,

    w = argmax over the simplex of sum_i log sum_k w_k p_k(y_i),

where p_k(y_i) is the predictive density of part k for a row left out by importance weights, or a row of a validation
set. The result is chosen for its predictions. It is not the posterior.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import scipy

from ppl_bnn.core import checks
from ppl_bnn.core.arrays import row_count
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError
from ppl_bnn.posterior.approximation import Approximation
from ppl_bnn.posterior.convergence import by_arviz
from ppl_bnn.posterior.pareto import FEWEST_DRAWS, K_LIMIT
from ppl_bnn.posterior.posterior import Posterior

# Largest gain of mean log score, in nats, that may remain when the weights are returned.
TOLERANCE = 1e-9
STEPS = 20_000


def stack(posterior: Posterior, x: Any = None, y: Any = None) -> Posterior:
    """The posterior with stacking weights of its chains, or of its members.

    Without x and y each training row is left out of each part by Pareto-smoothed importance sampling (ArviZ), which
    assumes that the draws represent the part. With x and y each part predicts these rows directly. Points have no
    spread and need x and y.

    Draws do not change; `predict` gives a mixture with the new `weights`. Draws on demand follow the weights.

    Parameters
    ----------
    posterior : Posterior
        A posterior with several chains or members.
    x, y : optional
        Held-out rows, x (N, F). Both or neither.

    Returns
    -------
    Posterior
        The posterior with weights. Its `info.figures` holds

        - "stacking_gain": mean over rows of log sum_k w_k p_k(y_i) - log mean_k p_k(y_i), nats, on the same rows that
          determined the weights;
        - "stacking_rows" and "stacking_effective_parts": number of rows, and 1 / sum_k w_k^2;
        - "stacking_pareto_k", without x and y: the largest Pareto k over parts and rows. Above 0.7 there is a warning.

    Raises
    ------
    UnsupportedError
        If there are no parts; without x and y if a part is a point, does not move or has fewer than 25 draws.
    InputError
        If only one of x and y is given, for rows of the fit itself, or for a row to which no part gives any density.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x[:300], table.y[:300], bnn.Ensemble(bnn.MAP(), size=2), standardise=True)
    >>> bnn.stack(posterior, table.x[300:], table.y[300:]).weights.shape
    (2,)
    """
    both, parts, info = (x is None) == (y is None), posterior.approximation.components, posterior.info
    InputError.check(both, "stack", "both x and y, or neither", "one of them", "stack(posterior)")
    expected, got = "several chains, or an ensemble with members", f"{info.method} with 1"
    UnsupportedError.check(len(parts) > 1, "stack", expected, got, "NUTS(chains=4)")
    # What an earlier stacking has left is replaced.
    figures = {name: value for name, value in info.figures.items() if not name.startswith("stacking_")}
    warnings = [warning for warning in info.warnings if not warning.startswith("stacking: ")]
    if x is None:
        found = [_left_out(_alone(posterior, part), index) for index, part in enumerate(parts)]
        log_densities = np.stack([density for density, _ in found], axis=1)
        k = np.stack([shape for _, shape in found], axis=1)
        figures["stacking_pareto_k"] = float(k.max())
        if not figures["stacking_pareto_k"] <= K_LIMIT:
            share = float(np.mean(~(k.max(axis=1) <= K_LIMIT)))
            above = f"Pareto k is above {K_LIMIT} for some part in {share:.1%} of the rows"
            advice = "stack on rows that were held out, stack(posterior, x, y)"
            warnings.append(
                f"stacking: {above}, so that weights by leaving rows out are not reliable; {advice}"
            )
    else:
        x = checks.check_inputs(x)
        y = checks.check_targets(y, row_count(x))
        new = checks.data_hash(x, y) != info.data_hash
        InputError.check(new, "stack", "rows that the fit has not seen", "those of the fit", "other rows")
        log_densities = np.stack([_alone(posterior, part).predict(x).log_prob(y) for part in parts], axis=1)
    weights = stacking_weights(log_densities)
    gain = np.mean(mixture_log_density(log_densities, weights) - mixture_log_density(log_densities))
    figures["stacking_gain"] = float(gain)
    figures["stacking_rows"] = float(len(log_densities))
    figures["stacking_effective_parts"] = float(1.0 / np.sum(weights**2))
    info = replace(info, figures=figures, warnings=tuple(warnings))
    return replace(posterior, approximation=posterior.approximation.weighted(weights), info=info)


def stacking_weights(log_densities: np.ndarray) -> np.ndarray:
    """Weights (K,) that maximise sum_i log sum_k w_k exp(log_densities_ik) over the simplex, for log_densities (N, K).

    The problem is convex. With D_k(w) = 1/N sum_i p_ik / (sum_j w_j p_ij), log t <= t - 1 gives, for any weights v,

        mean_i log sum_k v_k p_ik - mean_i log sum_k w_k p_ik <= max_k D_k(w) - 1.

    SciPy's L-BFGS-B comes near to the optimum. Then weight moves from the part with the smallest D_k to that with the
    largest, as much as is best, until the right-hand side is below 1e-9. Unlike steps of EM, these are not short where
    parts have nearly equal predictions. Parts with equal predictions get equal weights. Raises InputError for invalid
    values or a row to which no part gives any density, and DivergenceError if the bound was not reached.
    """
    values = np.asarray(log_densities, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise InputError.of("log_densities", "an array (rows, parts)", f"shape {values.shape}", "(N, K)")
    top, check = values.max(axis=1), InputError.check
    below, expected = (values < np.inf).all(), "a part that gives each row a density"
    check(below, "log_densities", "numbers below infinity", "NaN or +inf", "finite predictions")
    got = f"none for row {int(np.argmin(top))}"
    check(np.isfinite(top).all(), "log_densities", expected, got, "leaving it out")
    densities = np.exp(values - top[:, None])
    different, group, alike = np.unique(densities, axis=1, return_inverse=True, return_counts=True)
    return (_optimum(different) / alike)[group]


def _optimum(densities: np.ndarray) -> np.ndarray:
    """The weights (K,) of parts with different densities (N, K)."""
    weights, slopes = _near_optimum(densities), np.full(densities.shape[1], np.inf)
    for _ in range(STEPS):
        mixture = _positive(densities @ weights)
        slopes = (densities / mixture[:, None]).mean(axis=0)
        if slopes.max() - 1.0 <= TOLERANCE:
            return weights / weights.sum()
        gains, loses = int(slopes.argmax()), int(np.where(weights > 0.0, slopes, np.inf).argmin())
        moved = _best_move(mixture, densities[:, gains] - densities[:, loses], weights[loses])
        weights[gains] += moved
        weights[loses] = max(weights[loses] - moved, 0.0)
    expected, got = f"weights within {TOLERANCE} nats of the best", f"a bound of {slopes.max() - 1.0:.2g}"
    raise DivergenceError.of("stacking", expected, f"{got} after {STEPS} steps", "fewer parts")


def _best_move(mixture: np.ndarray, way: np.ndarray, most: float) -> float:
    """The t from 0 to `most` with the largest mean log(mixture + t way), which is concave and grows at 0."""

    def slope(t: float) -> float:
        return float((way / _positive(mixture + t * way)).mean())

    return most if slope(most) >= 0.0 else scipy.optimize.brentq(slope, 0.0, most, xtol=1e-18, rtol=1e-15)


def _positive(mixture: np.ndarray) -> np.ndarray:
    """The densities of a mixture, by which one may divide."""
    return np.maximum(mixture, np.finfo(np.float64).tiny)


def _near_optimum(densities: np.ndarray) -> np.ndarray:
    """Weights (K,) near the maximum of mean log(densities @ weights), by L-BFGS-B.

    Subtracting the sum of the weights makes the constraint on it redundant: its multiplier is 1.
    """

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        mixture = _positive(densities @ weights)
        gradient = 1.0 - (densities / mixture[:, None]).mean(axis=0)
        return float(weights.sum() - np.log(mixture).mean()), gradient

    parts = densities.shape[1]
    options = {"ftol": 0.0, "gtol": 1e-10, "maxiter": 1000}
    start, bounds = np.full(parts, 1.0 / parts), [(0.0, 1.0)] * parts
    settings: Any = {"jac": True, "method": "L-BFGS-B", "bounds": bounds, "options": options}
    weights = scipy.optimize.minimize(loss, start, **settings).x
    return weights / weights.sum()


def mixture_log_density(log_densities: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """log sum_k w_k p_ik, (N,), from log_densities (N, K); weights (K,) are equal by default."""
    parts = log_densities.shape[1]
    with np.errstate(divide="ignore"):  # a part without weight
        logarithms = np.full(parts, -math.log(parts)) if weights is None else np.log(weights)
    return np.logaddexp.reduce(log_densities + logarithms, axis=1)


def _alone(posterior: Posterior, part: Approximation) -> Posterior:
    """One part as a posterior by itself."""
    model = posterior.model
    same = posterior.approximation.program(model) is model and part.program(model) is model
    return replace(posterior, approximation=part, statistics={}, programs=posterior.programs if same else {})


def _left_out(part: Posterior, index: int) -> tuple[np.ndarray, np.ndarray]:
    """log p(y_i | the other rows) under one part, (N,), and the Pareto k of each row."""
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    def check(good: object, got: str) -> None:
        expected = f"parts of at least {FEWEST_DRAWS} draws that differ"
        got = f"part {index}{' with' if got[0].isdigit() else ':'} {got}"
        advice = "held-out rows, stack(posterior, x, y) or Stacked(member, by='validation')"
        UnsupportedError.check(good, "stack by leave-one-out", expected, got, advice)

    check(part.kind != "point", "a point, which has no spread to leave a row out of")
    values = part.log_likelihood()
    check(np.isfinite(values).all(), "a log likelihood that is not finite for some draw")
    low, high = values.min(axis=(0, 1)), values.max(axis=(0, 1))
    varies, count = low < high, math.prod(part.shape)
    check(varies.any(), "draws that are all the same, which have no spread")
    check(count >= FEWEST_DRAWS, f"{count} draws")
    # If every draw gives a row the same density, so does the posterior without the row.
    density, k = low.copy(), np.full(len(low), -math.inf)
    moving, efficiency = values[..., varies], 1.0
    if part.kind == "chains":
        likelihoods = np.exp(moving - moving.max(axis=(0, 1)))
        relative = by_arviz("ess", likelihoods, math.nan, method="mean", relative=True)
        relative = relative[np.isfinite(relative)]
        efficiency = float(relative.mean()) if len(relative) else 1.0
    try:
        found = array_stats.loo(moving, r_eff=efficiency, chain_axis=0, draw_axis=1)
    except ValueError as error:
        # This raises the error that says so; that of ArviZ is its context.
        check(False, f"importance weights that cannot be smoothed ({error})")
        raise
    density[varies], k[varies] = found[0], found[1]
    return density, np.where(np.isnan(k), math.inf, k)
