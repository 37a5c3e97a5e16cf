"""The one rule by which studies judge claims: intervals over independent units, and five outcomes.

A claim states, before its study runs, a quantity, the set of values for which it holds (its margin included), the unit
of replication, and what must have converged. `claims/<study>.toml` holds the claims of a study. The study measures the
quantity once per unit and calls `judge`:

- REPRODUCED: the confidence interval lies within the set of the claim.
- REFUTED: the confidence interval lies outside of it. The data exclude the claim.
- UNDECIDED: the interval contains values of both kinds, there is no interval (one unit), or what stands for the exact
  posterior has not converged. Where that is true of some units and their values have limits, the interval is the
  widest that values within the limits can give (`worst_case`), so that these units decide nothing.
- CORRECTED: the claim as printed is wrong by a proof or by an exact computation.
- NOT RUN: the claim was not run at the sizes or settings of its source.

Intervals have two sides and level 95 %. A wrong REPRODUCED has a probability of at most 2.5 %, and so has a wrong
REFUTED of a claim with one bound; of a claim with two bounds it is at most 5 %. The claims of one family are judged
with Holm's correction.

References
----------
Manski (2003), Partial identification of probability distributions. Nadeau and Bengio (2003), Inference for the
generalization error. Holm (1979), A simple sequentially rejective multiple test procedure. Clopper and Pearson (1934),
The use of confidence or fiducial limits.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

REPRODUCED, REFUTED, UNDECIDED = "reproduced", "refuted", "undecided"
CORRECTED, NOT_RUN = "corrected", "not run"
OUTCOMES = (REPRODUCED, REFUTED, UNDECIDED, CORRECTED, NOT_RUN)
LEVEL = 0.95
# Relative differences of units up to this one are rounding.
ROUNDING = 1e-9
# What must have converged: draws that stand for the exact posterior, or nothing where the output of an algorithm is
# judged as it was run.
EXACT, AS_RUN = "exact posterior", "as run"


@dataclass(frozen=True)
class Estimate:
    """An estimate with its two-sided interval, and the evidence against values of the quantity.

    Attributes
    ----------
    value, low, high : float
        The estimate and the ends of the interval. Without an interval the ends are infinite.
    n : int
        Number of independent units.
    rule : str
        Name of the rule that gave the interval.
    tail : callable
        `tail(edge, above)`: the one-sided p-value against values at or below `edge` (above=True: how far above it the
        estimate is), or against values at or above it (above=False).
    """

    value: float
    low: float
    high: float
    n: int
    rule: str
    tail: Callable[[float, bool], float] = field(repr=False, compare=False)

    def __str__(self) -> str:
        if self.rule == "exact":
            return f"{self.value:.3g} (exact)"
        if math.isinf(self.low) and math.isinf(self.high):
            return f"{self.value:.3g} (n = {self.n}, no interval)"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}] (n = {self.n}, {self.rule})"


def _t_estimate(values: np.ndarray, factor: float, rule: str) -> Estimate:
    """The mean, whose variance is `factor` times that of one unit. Units that are all alike have no interval: they say
    nothing of the spread that others would have.
    """
    n, value = len(values), float(values.mean())
    if n < 2 or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return Estimate(value, -math.inf, math.inf, n, rule, lambda edge, above: 1.0)
    error = float(values.std(ddof=1)) * math.sqrt(factor)
    reach = stats.t.ppf(0.5 + LEVEL / 2, n - 1) * error

    def tail(edge: float, above: bool) -> float:
        distance = value - edge if above else edge - value
        return float(stats.t.sf(distance / error, n - 1))

    return Estimate(value, value - reach, value + reach, n, rule, tail)


def mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """The mean over independent units, with Student's t on n - 1 degrees of freedom."""
    values = _finite(values)
    return _t_estimate(values, 1.0 / len(values), "Student t")


def mean_over_splits(values: Sequence[float] | np.ndarray, test_rows: float, train_rows: float) -> Estimate:
    """The mean over random splits of one table, whose training rows overlap.

    The variance of the mean is s^2 (1 / n + test_rows / train_rows) (Nadeau and Bengio 2003); the claim is about that
    table.
    """
    values = _finite(values)
    return _t_estimate(values, 1.0 / len(values) + test_rows / train_rows, "Nadeau-Bengio t")


def share(successes: int, n: int) -> Estimate:
    """A probability from `successes` of `n` independent units, with the exact interval of Clopper and Pearson."""
    half = 0.5 - LEVEL / 2
    low = float(stats.beta.ppf(half, successes, n - successes + 1)) if successes else 0.0
    high = float(stats.beta.ppf(1.0 - half, successes + 1, n - successes)) if successes < n else 1.0

    def tail(edge: float, above: bool) -> float:
        edge = min(max(edge, 0.0), 1.0)
        found = stats.binom.sf(successes - 1, n, edge) if above else stats.binom.cdf(successes, n, edge)
        return float(found)

    return Estimate(successes / n, low, high, n, "Clopper-Pearson", tail)


def bootstrap(
    units: np.ndarray, statistic: Callable[[np.ndarray], float], draws: int = 4000, seed: int = 0
) -> Estimate:
    """A statistic of the rows of `units` (n, ...), with the percentile interval of resampled rows.

    With fewer than five units the resamples say too little, and there is no interval.
    """
    n = len(units)
    value = float(statistic(units))
    if n < 5:
        return Estimate(value, -math.inf, math.inf, n, "bootstrap", lambda edge, above: 1.0)
    rng = np.random.default_rng(seed)
    found = np.array([statistic(units[rng.integers(0, n, n)]) for _ in range(draws)], float)
    if not np.isfinite(found).all():
        got = f"{np.count_nonzero(~np.isfinite(found))} others"
        raise ValueError(
            f"statistic: expected a finite number for every resample; got {got}; try another statistic"
        )
    low, high = np.quantile(found, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])

    def tail(edge: float, above: bool) -> float:
        beyond = np.count_nonzero(found <= edge if above else found >= edge)
        return (beyond + 1) / (len(found) + 1)

    return Estimate(value, float(low), float(high), n, "bootstrap", tail)


def worst_case(
    estimate: Callable[[np.ndarray], Estimate],
    values: np.ndarray,
    unknown: np.ndarray,
    low: float,
    high: float,
) -> Estimate:
    """The estimate where the values of some units are not known, but lie between `low` and `high`.

    Its interval and its p-values are the widest that such values can give: an outcome that it supports does not depend
    on them. For a mean and a share these are found where each value is at an end, since an end of the interval is a
    concave or convex function of each; how many are at which end is tried.

    unknown: which of `values` are not known; the value of the estimate is with them as they are.
    """
    known, count = values[~unknown], int(unknown.sum())
    cases = [
        estimate(np.concatenate([known, np.full(count - above, low), np.full(above, high)]))
        for above in range(count + 1)
    ]

    def tail(edge: float, above: bool) -> float:
        return max(case.tail(edge, above) for case in cases)

    lowest, highest = min(case.low for case in cases), max(case.high for case in cases)
    return replace(estimate(values), low=lowest, high=highest, tail=tail)


def exact(value: float) -> Estimate:
    """A quantity that is computed, not sampled."""
    return Estimate(
        value, value, value, 1, "exact", lambda edge, above: float(value < edge if above else value > edge)
    )


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    found = np.asarray(values, float)
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
        raise ValueError(
            f"values: expected one finite number per unit; got {found!r}; try leaving no unit out"
        )
    return found


@dataclass(frozen=True)
class Claim:
    """A claim as it is declared before its study runs.

    Attributes
    ----------
    key : str
        Name of the claim within its study.
    text, source, page : str
        What is claimed, by whom ("ours" for a claim of this project), and where.
    quantity : str
        What is measured once per unit, with its unit of measurement.
    unit : str
        The unit of replication: a seed, a data set, a simulated data set, a split of one table, a table.
    low, high : float
        The claim holds for low <= quantity <= high. The margin is in these bounds.
    margin : str
        The margin in words, with its reason; the same for claims of the source and of this project.
    rule : str
        How the interval is made: "mean", "mean over splits", "share", "bootstrap"; "exact" for a quantity without
        error, such as a statement about one fit; or "proof", which needs no bounds.
    convergence : str
        `EXACT`: draws stand for the exact posterior and must have converged at the rows of the claim; `AS_RUN`: the
        output of an algorithm is judged as it was run.
    family : str
        Claims of one family are judged together, with Holm's correction; "" for a claim by itself.
    declared : str
        "before" the results, or "after" them.
    before : str
        Of a claim that is declared after the results: the outcome under the rule that it replaces, which every verdict
        shows beside the new one; "" if the claim itself is new.
    changed : str
        What was changed after the results existed, and why.
    figure : str
        The figure that shows it, a path within `results/`.
    """

    key: str
    text: str
    source: str
    quantity: str
    unit: str
    rule: str
    margin: str
    page: str = ""
    low: float = -math.inf
    high: float = math.inf
    convergence: str = AS_RUN
    family: str = ""
    declared: str = "before"
    before: str = ""
    changed: str = ""
    figure: str = ""

    def __post_init__(self) -> None:
        if self.declared not in ("before", "after"):
            raise ValueError(
                f"declared of {self.key}: expected 'before' or 'after' the results; got {self.declared!r}"
            )
        if self.declared == "before" and (self.before or self.changed):
            raise ValueError(
                f"before, changed of {self.key}: expected of a claim declared after the results only"
            )
        if self.declared == "after" and not self.changed:
            raise ValueError(
                f"changed of {self.key}: expected what was changed after the results, and why; got ''"
            )
        if self.rule not in RULES:
            raise ValueError(f"rule of {self.key}: expected one of {', '.join(RULES)}; got {self.rule!r}")
        if self.convergence not in (EXACT, AS_RUN):
            raise ValueError(
                f"convergence of {self.key}: expected {EXACT!r} or {AS_RUN!r}; got {self.convergence!r}"
            )
        bounded = self.low > -math.inf or self.high < math.inf
        if not self.low < self.high or bounded == (self.rule == PROOF):
            expected = "none of a proof" if self.rule == PROOF else "low < high, one of them finite"
            raise ValueError(f"bounds of {self.key}: expected {expected}; got {self.low}, {self.high}")


PROOF = "proof"
# The rules by which a claim is judged, and the name that an estimate by each carries.
RULES = {
    "mean": "Student t",
    "mean over splits": "Nadeau-Bengio t",
    "share": "Clopper-Pearson",
    "bootstrap": "bootstrap",
    "exact": "exact",
    PROOF: PROOF,
}


def read_claims(study: str, folder: Path | None = None) -> dict[str, Claim]:
    """The claims of a study by key, from `claims/<study>.toml`; its table `defaults` holds what most claims share."""
    path = (folder or Path(__file__).parent / "claims") / f"{study}.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    common = tables.pop("defaults", {})
    return {key: Claim(key, **common | table) for key, table in tables.items()}


@dataclass(frozen=True)
class Verdict:
    """What became of a claim.

    Attributes
    ----------
    claim : str
        The text of the claim.
    verdict : str
        One of `OUTCOMES`.
    numbers : str
        The numbers behind it: estimate, interval, n and rule first.
    key, source : str
        Key and source of the claim.
    rule : str
        Name of the rule of the interval.
    estimate, low, high : float or None
        The estimate and its interval; None if there is none.
    n : int
        Number of independent units.
    sizes : str
        How the sizes differ from those of the source.
    before : str
        The outcome under the rule that was replaced after the results existed; empty if there was none.
    declared : str
        "before" the results, or "after" them.
    figure : str
        The figure that shows it.
    """

    claim: str
    verdict: str
    numbers: str
    key: str = ""
    source: str = ""
    rule: str = ""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    sizes: str = ""
    before: str = ""
    declared: str = "before"
    figure: str = ""

    def __str__(self) -> str:
        was = f"before: {self.before.upper()}; " if self.before else ""
        late = f" ({was}rule declared after the results)" if self.declared == "after" else ""
        sizes = f" [{self.sizes}]" if self.sizes else ""
        return f"{self.verdict.upper()}{late}: {self.claim}: {self.numbers}{sizes}"


def p_values(claim: Claim, estimate: Estimate) -> tuple[float, float]:
    """One-sided p-values against (the claim is false, the claim is true): a small first one reproduces it."""
    if estimate.low == estimate.high:
        # Known without error: the bounds belong to the set of the claim.
        return (0.0, 1.0) if claim.low <= estimate.value <= claim.high else (1.0, 0.0)
    above, below = estimate.tail(claim.low, True), estimate.tail(claim.high, False)
    false = max(0.0 if claim.low == -math.inf else above, 0.0 if claim.high == math.inf else below)
    true = min(
        1.0 if claim.low == -math.inf else estimate.tail(claim.low, False),
        1.0 if claim.high == math.inf else estimate.tail(claim.high, True),
    )
    return false, true


def outcome(claim: Claim, estimate: Estimate, converged: bool = True, level: float = LEVEL) -> str:
    """REPRODUCED, REFUTED or UNDECIDED: where the interval of this level lies."""
    if claim.convergence == EXACT and not converged:
        return UNDECIDED
    false, true = p_values(claim, estimate)
    if false <= (1.0 - level) / 2:
        return REPRODUCED
    return REFUTED if true <= (1.0 - level) / 2 else UNDECIDED


def judge(
    claim: Claim,
    estimate: Estimate | None,
    numbers: str = "",
    *,
    converged: bool = True,
    why_not: str = "",
    sizes: str = "",
) -> Verdict:
    """The verdict on a claim.

    Parameters
    ----------
    claim : Claim
        The claim.
    estimate : Estimate or None
        The estimate; None if the claim was not run, for the reason `why_not`.
    numbers : str
        Further numbers for the reader.
    converged : bool
        Whether the draws that stand for the exact posterior have converged at the rows of the claim.
    why_not : str
        Why the claim was not run, or what has not converged.
    sizes : str
        How the sizes differ from those of the source.

    Returns
    -------
    Verdict
        The verdict, without the correction of its family (see `judge_family`).
    """
    common = _common(claim, sizes)
    if estimate is None:
        return Verdict(claim.text, NOT_RUN, "; ".join(filter(None, (why_not, numbers))), **common)
    found = outcome(claim, estimate, converged)
    notes = [f"{claim.quantity}: {estimate}"]
    if claim.convergence == EXACT and not converged:
        notes.append(f"not converged{f' ({why_not})' if why_not else ''}, so nothing is decided")
    finite = math.isfinite(estimate.low) and math.isfinite(estimate.high)
    return Verdict(
        claim.text,
        found,
        "; ".join(filter(None, (*notes, numbers))),
        estimate=estimate.value,
        low=estimate.low if finite else None,
        high=estimate.high if finite else None,
        n=estimate.n,
        **common,
    )


def _common(claim: Claim, sizes: str) -> dict[str, Any]:
    """What a verdict repeats of its claim."""
    names = ("key", "source", "rule", "before", "declared", "figure")
    return {name: getattr(claim, name) for name in names} | {"sizes": sizes}


def judge_family(judged: Sequence[tuple[Claim, Estimate | None, Mapping[str, Any]]]) -> list[Verdict]:
    """The verdicts on claims of one family, each decided at the level of Holm's step-down procedure.

    Parameters
    ----------
    judged : sequence of (Claim, Estimate or None, mapping)
        The claims with the arguments of `judge`.

    Returns
    -------
    list of Verdict
        In the order given. A claim that its own interval decides, but not the family, is UNDECIDED and says so.
    """
    verdicts = [judge(claim, estimate, **dict(more)) for claim, estimate, more in judged]
    smallest = {
        at: min(p_values(claim, estimate))
        for at, (claim, estimate, _) in enumerate(judged)
        if estimate is not None and verdicts[at].verdict in (REPRODUCED, REFUTED)
    }
    tested = sum(estimate is not None for _, estimate, _ in judged)
    kept = True
    for rank, at in enumerate(sorted(smallest, key=lambda at: smallest[at])):
        limit = (1.0 - LEVEL) / 2 / (tested - rank)
        kept = kept and smallest[at] <= limit
        if not kept:
            note = f"; by itself {verdicts[at].verdict}, in its family of {tested} not (Holm)"
            verdicts[at] = replace(verdicts[at], verdict=UNDECIDED, numbers=verdicts[at].numbers + note)
    return verdicts


def prove(claim: Claim, wrong: bool, numbers: str, *, sizes: str = "") -> Verdict:
    """The verdict on a printed statement by a proof or an exact computation: CORRECTED where it is wrong."""
    return Verdict(claim.text, CORRECTED if wrong else REPRODUCED, numbers, **_common(claim, sizes))


class Referee:
    """Collects the evidence on the claims of one study, and judges them: families with Holm's correction.

    Parameters
    ----------
    claims : mapping
        The claims by key, as `read_claims` gives them.
    sizes : str
        How the sizes of the run differ from those of the source, for every verdict.
    """

    def __init__(self, claims: Mapping[str, Claim], sizes: str = ""):
        self.claims, self._sizes = claims, sizes
        self._measured: dict[str, tuple[Estimate | None, dict[str, Any]]] = {}
        self._fixed: dict[str, Verdict] = {}

    def measured(self, key: str, estimate: Estimate, numbers: str = "", **more: Any) -> None:
        """The estimate of the quantity of a claim; `numbers` and `more` are arguments of `judge`."""
        claim = self._new(key)
        if estimate.rule != RULES[claim.rule]:
            raise ValueError(f"estimate of {key}: expected the rule {claim.rule!r}; got {estimate.rule!r}")
        self._measured[key] = estimate, {"numbers": numbers, "sizes": self._sizes} | more

    def not_run(self, key: str, why: str, numbers: str = "", **more: Any) -> None:
        """A claim that was not run at the sizes or settings of its source, and why."""
        self._new(key)
        self._measured[key] = None, {"why_not": why, "numbers": numbers, "sizes": self._sizes} | more

    def undecided(self, key: str, why: str, numbers: str = "") -> None:
        """A claim on which the study has no estimate, for a reason other than its sizes: nothing to decide, say."""
        claim = self._new(key)
        words = "; ".join(filter(None, (why, numbers)))
        self._fixed[key] = Verdict(claim.text, UNDECIDED, words, **_common(claim, self._sizes))

    def proved(self, key: str, wrong: bool, numbers: str) -> None:
        """A printed statement that a proof or an exact computation decides."""
        claim = self._new(key)
        if claim.rule != PROOF:
            raise ValueError(
                f"claim {key}: expected the rule {PROOF!r} of what is proved; got {claim.rule!r}"
            )
        self._fixed[key] = prove(claim, wrong, numbers, sizes=self._sizes)

    @property
    def evidence(self) -> frozenset[str]:
        """The keys of the claims on which there is evidence."""
        return frozenset(self._measured) | frozenset(self._fixed)

    def verdicts(self) -> list[Verdict]:
        """A verdict for every claim, in the order in which they are declared.

        Raises
        ------
        ValueError
            There is a claim without evidence: it must be measured, proved, or said to be undecided or not run.
        """
        missing = [key for key in self.claims if key not in self.evidence]
        if missing:
            raise ValueError(f"claims: expected evidence on each of them; got none on {', '.join(missing)}")
        families: dict[str, list[str]] = {}
        for key in self._measured:
            families.setdefault(self.claims[key].family or f"of {key} alone", []).append(key)
        found = dict(self._fixed)
        for keys in families.values():
            judged = [(self.claims[key], *self._measured[key]) for key in keys]
            found |= dict(zip(keys, judge_family(judged), strict=True))
        return [found[key] for key in self.claims]

    def _new(self, key: str) -> Claim:
        if key not in self.claims:
            raise ValueError(f"claim: expected one of {', '.join(self.claims)}; got {key!r}")
        if key in self.evidence:
            raise ValueError(f"claim {key}: expected evidence once; got it twice")
        return self.claims[key]
