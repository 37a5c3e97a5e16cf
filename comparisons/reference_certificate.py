"""What certifies a reference posterior: checks with limits that were set before the first reference was made.

A reference has the grade that was sought if all checks hold, and is "failed" otherwise. Checks of the stored arrays can
be computed again by anyone (`recompute`). Checks that need more than these arrays are recorded as numbers. Grades:

- "certified": NUTS from prior draws, twice, and a second sampler agree;
- "mode-weighted": chains stay in modes. Each mode is certified by itself, and its mass comes from tempered SMC, twice;
- "bracketed": the targets were drawn from the prior of the model. Annealing forwards, and backwards from the exact
  draw, bounds the log evidence on both sides, and the draws are the weighted particles that went forwards, twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ppl_bnn.diagnostics.calibration import uniformity
from ppl_bnn.posterior.convergence import by_arviz

# Convergence of every grid function, the log likelihood, the log prior and every scale.
RHAT, BULK, TAIL = 1.01, 2500.0, 1000.0
BFMI = 0.3
# Monte-Carlo error of a mean, in posterior standard deviations: 1 / sqrt(2500).
ERROR = 0.02
# The floor of a difference is the largest between the halves of so many random splits of all draws, which is noise
# alone. The second run, and a second sampler, may be this many times as far away.
SPLITS, FLOOR = 100, 1.5
# Of identities, in Monte-Carlo standard errors; with at most 30 tensors a true one exceeds 4 in 0.2 % of cases.
STANDARD_ERRORS = 4.0
# Standard error of a log evidence, in nats.
EVIDENCE = 0.1
# Two estimates of one, in nats.
APART = 0.3
LOG_JOINT = 1e-10
# Least p-value of all tests of the ranks together, in simulation-based calibration.
CALIBRATION = 0.01
# Distance of the bounds of a log evidence, in nats, and the least effective number of weighted particles of a run.
BRACKET, PARTICLES = 0.5, 1000.0
# Standard error of the mass of a mode.
MASS = 0.02
BINS = 20


@dataclass(frozen=True)
class Check:
    """One condition of a certificate: a value, its limit, and whether it holds."""

    name: str
    value: float
    limit: str
    holds: bool

    @classmethod
    def below(cls, name: str, value: float, limit: float) -> Check:
        return cls(name, float(value), f"< {limit:g}", bool(value < limit))

    @classmethod
    def above(cls, name: str, value: float, limit: float) -> Check:
        return cls(name, float(value), f"> {limit:g}", bool(value > limit))

    def __str__(self) -> str:
        return f"{'holds ' if self.holds else 'FAILS '} {self.name:<58} {self.value:12.5g}  {self.limit}"


def plain(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The checks as plain values, for JSON."""
    return [asdict(check) for check in checks]


# --- convergence --------------------------------------------------------------------------------------


def mixing(values: np.ndarray) -> tuple[float, float, float]:
    """The largest R-hat and the smallest bulk and tail ESS of values (chain, draw, components)."""
    values = np.asarray(values, dtype=np.float64)
    rhat = by_arviz("rhat", values, np.inf, method="rank")
    bulk = by_arviz("ess", values, 0.0, method="bulk")
    tail = by_arviz("ess", values, 0.0, method="tail", prob=(0.05, 0.95))
    return float(np.max(rhat)), float(np.min(bulk)), float(np.min(tail))


def convergence(name: str, values: np.ndarray, bulk: float = BULK, tail: float = TAIL) -> list[Check]:
    """R-hat and ESS of values (chain, draw, components)."""
    rhat, least, least_tail = mixing(values)
    return [
        Check.below(f"{name}: R-hat", rhat, RHAT),
        Check.above(f"{name}: bulk ESS", least, bulk),
        Check.above(f"{name}: tail ESS", least_tail, tail),
    ]


def trajectories(name: str, statistics: Mapping[str, np.ndarray]) -> list[Check]:
    """No divergence, no saturated tree, and the energy of every chain moves (E-BFMI)."""
    energy = np.asarray(statistics["energy"], dtype=np.float64)
    bfmi = np.square(np.diff(energy, axis=1)).mean(axis=1) / energy.var(axis=1)
    return [
        Check.below(f"{name}: divergences", int(np.sum(statistics["diverging"])), 1),
        Check.below(f"{name}: saturated trees", int(np.sum(statistics["reached_max_tree_depth"])), 1),
        Check.above(f"{name}: E-BFMI of the worst chain", float(bfmi.min()), BFMI),
    ]


# --- agreement of two sets of draws -------------------------------------------------------------------


def moments(f: np.ndarray, pairs: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and standard deviation (G,) of draws (S, G), and covariances (P,) of pairs of columns."""
    f = np.asarray(f, dtype=np.float64)
    mean, a, b = f.mean(axis=0), *pairs.T
    centred = f - mean
    return {"mean": mean, "sd": f.std(axis=0), "covariance": np.mean(centred[:, a] * centred[:, b], axis=0)}


def differences(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], pairs: np.ndarray, scale: np.ndarray
) -> dict[str, float]:
    """Root mean square differences of two sets of `moments`: of means in units of `scale` (G,), of log standard
    deviations, and of covariances in products of units.
    """
    a, b = pairs.T
    apart = {
        "mean": (one["mean"] - other["mean"]) / scale,
        "sd": np.log(one["sd"] / other["sd"]),
        "covariance": (one["covariance"] - other["covariance"]) / (scale[a] * scale[b]),
    }
    return {name: float(np.sqrt(np.mean(np.square(value)))) for name, value in apart.items()}


def total_variation(f: np.ndarray, g: np.ndarray) -> float:
    """The mean total variation distance between marginals of two sets of draws (S, G), on `BINS` intervals of equal
    mass of both together.
    """
    edges = np.quantile(np.concatenate([f, g]), np.linspace(0.0, 1.0, BINS + 1)[1:-1], axis=0)
    found = []
    for column in range(f.shape[1]):
        one, other = (
            np.bincount(np.searchsorted(edges[:, column], each[:, column]), minlength=BINS) / len(each)
            for each in (f, g)
        )
        found.append(0.5 * np.abs(one - other).sum())
    return float(np.mean(found))


def split_at_random(pool: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The halves of `SPLITS` random splits of draws (S, G), the same at every call."""
    rng = np.random.default_rng(0)
    for _ in range(SPLITS):
        order = rng.permutation(len(pool))
        yield pool[order[::2]], pool[order[1::2]]


def floor_of(pool: np.ndarray, pairs: np.ndarray) -> dict[str, float]:
    """The largest `differences` between halves of random splits."""
    scale = moments(pool, pairs)["sd"]
    each = [
        differences(moments(one, pairs), moments(other, pairs), pairs, scale)
        for one, other in split_at_random(pool)
    ]
    return {name: max(found[name] for found in each) for name in each[0]}


def agreement(
    name: str,
    one: Mapping[str, np.ndarray],
    other: Mapping[str, np.ndarray],
    floor: Mapping[str, float],
    pairs: np.ndarray,
    scale: np.ndarray,
) -> list[Check]:
    """Whether two sets of `moments` differ by at most `FLOOR` times the floor."""
    return [
        Check.below(f"{name}: difference in {what}, in floors", value / floor[what], FLOOR)
        for what, value in differences(one, other, pairs, scale).items()
    ]


def agreement_of_marginals(name: str, pool: np.ndarray, draws: np.ndarray) -> list[Check]:
    """Whether marginals are as near as those of halves of the reference, by total variation."""
    size = min(len(pool) // 2, len(draws))
    chosen = draws[np.linspace(0, len(draws) - 1, size).round().astype(int)]
    floor = max(total_variation(one[:size], other[:size]) for one, other in split_at_random(pool))
    value = total_variation(pool[::2][:size], chosen) / floor
    return [Check.below(f"{name}: total variation of marginals, in floors", value, FLOOR)]


# --- identities ---------------------------------------------------------------------------------------


def virials(values: np.ndarray, dimensions: Mapping[str, int]) -> list[Check]:
    """E[u . grad U] = D for each tensor and for all; `values` (chain, draw, tensors) in the order of `dimensions`.

    U is minus the log density in unconstrained coordinates u. The identity follows from integration by parts, and
    no sampler is tuned to it.
    """
    values = np.asarray(values, dtype=np.float64)
    columns = np.concatenate([values, values.sum(axis=-1, keepdims=True)], axis=-1)
    wanted = [*dimensions.values(), sum(dimensions.values())]
    names = [*dimensions, "all coordinates"]
    errors = by_arviz("mcse", columns, np.inf, method="mean")
    means = columns.mean(axis=(0, 1))
    return [
        Check.below(
            f"E[u . grad U] = {count} of {name}, in standard errors",
            abs(mean - count) / error,
            STANDARD_ERRORS,
        )
        for name, count, mean, error in zip(names, wanted, means, errors, strict=True)
    ]


def log_mean(estimates: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The logarithm of the mean of estimates of an evidence, given by their logarithms, and its standard error."""
    each = np.asarray(estimates, dtype=np.float64)
    top = each.max()
    weights = np.exp(each - top)
    spread = float(weights.std(ddof=1) / weights.mean() / math.sqrt(len(each)))
    return top + math.log(weights.mean()), spread


def evidence(estimates: Sequence[float], integral: float, error: float) -> list[Check]:
    """The log evidence by runs of SMC, as the log of their mean, against thermodynamic integration."""
    found, spread = log_mean(estimates)
    both = math.hypot(spread, error)
    return [
        Check.below("log evidence by SMC: standard error, in nats", spread, EVIDENCE),
        Check.below(
            "log evidence, SMC against thermodynamic integration, in standard errors",
            abs(found - integral) / both,
            STANDARD_ERRORS,
        ),
        Check.below(
            "log evidence, SMC against thermodynamic integration, in nats",
            abs(found - integral),
            3.0 * EVIDENCE,
        ),
    ]


def bounds(forwards: np.ndarray, backwards: np.ndarray) -> tuple[float, float]:
    """Lower and upper bound of a log evidence from the log weights of annealing in both directions."""
    return log_mean(forwards)[0], -log_mean(-np.asarray(backwards, dtype=np.float64))[0]


def bracket(name: str, forwards: np.ndarray, backwards: np.ndarray) -> list[Check]:
    """Whether the bounds are close together, and in order but for Monte-Carlo error, and many particles have weight."""
    lower, upper = bounds(forwards, backwards)
    weights = np.exp(np.asarray(forwards, dtype=np.float64) - np.max(forwards))
    effective = weights.sum() ** 2 / np.square(weights).sum()
    return [
        Check.below(f"{name}: upper less lower bound of the log evidence, in nats", upper - lower, BRACKET),
        Check.above(f"{name}: upper less lower bound of the log evidence, in nats", upper - lower, -APART),
        Check.above(f"{name}: effective number of particles", effective, PARTICLES),
    ]


def masses_of(log_evidence: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The masses of modes (M,) and their covariance, from runs of SMC: log evidence (R,), shares of particles (R, M).

    A run counts by its evidence: mass = sum_r Z_r p_r / sum_r Z_r. The covariance is that of a ratio of means.
    """
    z = np.exp(np.asarray(log_evidence, dtype=np.float64) - np.max(log_evidence))
    mass = z @ shares / z.sum()
    residuals = z[:, None] * (shares - mass) / z.mean()
    return mass, residuals.T @ residuals / (len(z) * (len(z) - 1))


def masses(log_evidence: np.ndarray, shares: np.ndarray) -> list[Check]:
    """Whether the masses of modes are known, and two sets of runs agree on them; arrays (2, R) and (2, R, M)."""
    pairs = [masses_of(*each) for each in zip(log_evidence, shares, strict=True)]
    (one, spread), (other, spread_other) = (
        (mass, np.sqrt(np.diag(covariance))) for mass, covariance in pairs
    )
    both = np.hypot(spread, spread_other)
    apart = np.abs(one - other) / np.maximum(both, 1e-12)
    evidences = [log_mean(each) for each in log_evidence]
    error = math.hypot(*(each[1] for each in evidences))
    checks = [
        Check.below(f"SMC, run {run}: standard error of the log evidence, in nats", each[1], EVIDENCE)
        for run, each in zip("ab", evidences, strict=True)
    ]
    difference = abs(evidences[0][0] - evidences[1][0])
    return [
        *checks,
        Check.below(
            "log evidence, two sets of runs, in standard errors", difference / error, STANDARD_ERRORS
        ),
        Check.below("largest standard error of the mass of a mode", float(0.5 * both.max()), MASS),
        Check.below("masses of modes, two sets of runs, in standard errors", apart.max(), STANDARD_ERRORS),
    ]


def calibration(ranks: np.ndarray, draws: int) -> Check:
    """Whether ranks (simulations, functions) of truths among `draws` posterior draws are uniform, by all their tests.

    The limit is for the smallest p-value times the number of tests (Bonferroni).
    """
    tests = [uniformity(column, draws) for column in ranks.T]
    name = f"calibration, {len(ranks)} simulations: smallest p-value times {3 * len(tests)} tests"
    return Check.above(name, min(1.0, 3 * len(tests) * min(test.least for test in tests)), CALIBRATION)


# --- all that the stored arrays say -------------------------------------------------------------------


def recompute(stored: Mapping[str, np.ndarray]) -> list[Check]:
    """The checks that follow from the arrays of a reference alone; chains of both runs have one axis."""
    sought = str(stored["sought"]) if "sought" in stored else "certified"
    checks = {"certified": _certified, "mode-weighted": _by_mode, "bracketed": _bracketed}[sought](stored)
    if "ranks" in stored:
        checks.append(calibration(np.asarray(stored["ranks"]), int(stored["ranked_draws"])))
    return checks


def pooled(f: np.ndarray) -> np.ndarray:
    """All draws (S, G) of f (chain, draw, G)."""
    return np.asarray(f, dtype=np.float64).reshape(-1, f.shape[-1])


def _pool(stored: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, float]]:
    """All draws of f (S, G), their moments, and the floor of differences between halves of them."""
    pool = pooled(stored["f"])
    return pool, moments(pool, stored["pairs"]), floor_of(pool, stored["pairs"])


def scalars_of(stored: Mapping[str, np.ndarray]) -> np.ndarray:
    """Log likelihood, log prior and scales of all draws (chain, draw, K)."""
    parts = [stored["log_likelihood"][..., None], stored["log_prior"][..., None], stored["scales"]]
    return np.concatenate(parts, axis=-1)


def _runs_agree(
    name: str, stored: Mapping[str, np.ndarray], floor: Mapping[str, float], scale: np.ndarray
) -> list[Check]:
    """Whether the chains of one run and those of the other agree."""
    f, pairs, half = stored["f"], stored["pairs"], stored["f"].shape[0] // 2
    halves = [moments(pooled(each), pairs) for each in (f[:half], f[half:])]
    return agreement(name, *halves, floor, pairs, scale)


def _identities(stored: Mapping[str, np.ndarray], at: Any = slice(None)) -> list[Check]:
    dimensions = dict(zip(stored["sites"].tolist(), stored["dimensions"].tolist(), strict=True))
    return virials(stored["virial"][:, at], dimensions)


def _of_runs(stored: Mapping[str, np.ndarray]) -> list[Check]:
    """Trajectories of the chains of either run."""
    checks, half = [], stored["energy"].shape[0] // 2
    for run, at in (("a", slice(0, half)), ("b", slice(half, None))):
        names = ("energy", "diverging", "reached_max_tree_depth")
        checks += trajectories(f"NUTS {run}", {name: stored[name][at] for name in names})
    return checks


def _certified(stored: Mapping[str, np.ndarray]) -> list[Check]:
    f, pairs = stored["f"], stored["pairs"]
    _, whole, floor = _pool(stored)
    checks = convergence("stored draws, f at the grid", f)
    checks += convergence("stored draws, log likelihood, log prior and scales", scalars_of(stored))
    checks += _runs_agree("NUTS, run a against run b", stored, floor, whole["sd"])
    error = 1.0 / np.sqrt(by_arviz("ess", np.asarray(f, dtype=np.float64), 0.0, method="bulk").min())
    checks.append(Check.below("Monte-Carlo error of the worst mean, in standard deviations", error, ERROR))
    checks += _identities(stored) + _of_runs(stored)
    for index, run in enumerate(("a", "b")):
        other = {name: stored[f"second_{name}"][index] for name in whole}
        checks += agreement(f"{stored['second']}, run {run}", whole, other, floor, pairs, whole["sd"])
        if "log_evidence" in stored:
            integral, spread = stored["integral"][index], stored["integral_error"][index]
            checks += [
                Check(f"{check.name}, run {run}", check.value, check.limit, check.holds)
                for check in evidence(stored["log_evidence"][index], float(integral), float(spread))
            ]
    return checks


def _by_mode(stored: Mapping[str, np.ndarray]) -> list[Check]:
    """Each mode by itself, with limits on effective sizes in proportion to its mass; masses; and SMC as a whole."""
    f, pairs, mode = stored["f"], stored["pairs"], stored["mode"]
    _, whole, floor = _pool(stored)
    checks, scalars = masses(stored["log_evidence"], stored["mode_shares"]), scalars_of(stored)
    for index in np.unique(mode):
        at, share = np.flatnonzero(mode == index), float(np.mean(mode == index))
        limits = {"bulk": BULK * share, "tail": TAIL * share}
        checks += convergence(f"stored draws of mode {index}, f at the grid", f[:, at], **limits)
        checks += convergence(
            f"stored draws of mode {index}, log densities and scales", scalars[:, at], **limits
        )
        checks += [
            Check(f"mode {index}, {each.name}", each.value, each.limit, each.holds)
            for each in _identities(stored, at)
        ]
    checks += _runs_agree("run a against run b", stored, floor, whole["sd"]) + _of_runs(stored)
    for index, run in enumerate(("a", "b")):
        other = {name: stored[f"second_{name}"][index] for name in whole}
        checks += agreement(f"SMC, run {run}", whole, other, floor, pairs, whole["sd"])
    return checks


def _bracketed(stored: Mapping[str, np.ndarray]) -> list[Check]:
    _, whole, floor = _pool(stored)
    checks = _runs_agree("annealing, run a against run b", stored, floor, whole["sd"]) + _identities(stored)
    for index, run in enumerate(("a", "b")):
        checks += bracket(f"annealing {run}", stored["forwards"][index], stored["backwards"][index])
    return checks
