"""Conclusions of a comparison in three sentences: the best prediction, distances to the reference, its reliability.

A difference of log scores is claimed if the mean over test rows of d_n = log p_a(y_n) - log p_b(y_n) exceeds both
2 sd(d_n) / sqrt(N) and a practical margin of 0.01 nats per row. Pairing removes effects of unusual rows that both
methods share. The margin matters because with many rows a difference can be certain and irrelevant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.evaluation.comparison.record import NOT_AT_TEST_ROWS
from ppl_bnn.evaluation.outside.outside import Outside
from ppl_bnn.prediction.scores import paired_difference

if TYPE_CHECKING:
    from ppl_bnn.evaluation.comparison.comparison import Comparison

# Number of standard errors that a difference must exceed to be claimed.
STANDARD_ERRORS = 2.0
# Practical margin that it must also exceed: nats per row for log scores, a share of the best value for others.
MARGIN = 0.01
# Method -> how far it is behind the best method, and the standard error.
Lags = Mapping[str, tuple[float, float]]
IN_WORDS = f"two standard errors and {MARGIN:g} nats per test row"
# The table's word on convergence -> the doubt about a reference in a cell, and the problem as the end of a sentence.
_PROBLEMS = {
    "yes": ("", ""),
    "no": ("not converged", "has not converged"),
    NOT_AT_TEST_ROWS: ("not converged at the test rows", "has not converged at the test rows"),
    "per mode": (
        "converged per mode only",
        "has converged per mode only: its chains are in different modes, whose weights are not known",
    ),
    "in doubt": ("in doubt", "may have converged, but its sampler reported problems"),
}
NO_TRUE_GAPS = "the gaps to it cannot be taken for gaps to the posterior"
_UNKNOWN = ("convergence not known", "could not be checked for convergence")


def standing(row: Mapping[str, Any]) -> str:
    """Status of the reference by its row: "reference", with the reason why it may not be a valid one."""
    if row["kind"] != "chains":
        return "reference (an approximation)"
    if row.get("converged") == "yes":
        return "reference (of another target)" if row.get("target") else "reference"
    return f"reference ({doubt_in_words(row)})"


def doubt_in_words(row: Mapping[str, Any]) -> str:
    """What is wrong with the convergence of a fit by its row, in a few words; "" for nothing."""
    unknown = _UNKNOWN if row["kind"] == "chains" else ("", "")
    return _PROBLEMS.get(row.get("converged", ""), unknown)[0]


def problem_of(row: Mapping[str, Any]) -> str:
    """What is wrong with the convergence of a fit by its row, as the end of a sentence; "" for nothing."""
    unknown = _UNKNOWN if row["kind"] == "chains" else ("", "")
    return _PROBLEMS.get(row["converged"], unknown)[1]


def doubt_of(row: Mapping[str, Any]) -> str:
    """Why gaps to a reference of this row are not gaps to the posterior, as the end of a sentence; "" if they are."""
    problem = problem_of(row)
    if row["kind"] != "chains":
        return " and ".join(filter(None, (problem, "is itself an approximation")))
    other_target = f"converged, but not to the posterior ({row['target']})" if row["target"] else ""
    return problem or other_target


def no_reference(reference: str | None, failed: bool) -> str:
    """Why there is no reference to measure gaps by, as the beginning of a sentence."""
    if reference is None:
        return "No reference was named"
    return f"The reference {reference} {'failed' if failed else 'was not fitted'}"


def is_difference(difference: float, error: float, margin: float = MARGIN) -> bool:
    """Whether a mean paired difference is claimed: it exceeds two standard errors and the practical margin.

    An infinite difference is always claimed, and one of unknown standard error (NaN) never.
    """
    return difference == math.inf or (difference > STANDARD_ERRORS * error and difference > margin)


def sentences(comparison: Comparison) -> str:
    """Conclusions of a comparison: the best prediction, distance to the reference and cost, status of the reference."""
    return " ".join((_best(comparison), _distance(comparison), _standing(comparison)))


# --- best prediction --------------------------------------------------------------------------------------


def _best(comparison: Comparison) -> str:
    pointwise = comparison.pointwise_log_scores()
    rows = len(comparison.test_targets)
    on = f"On {rows} test row{'s' if rows != 1 else ''}"
    if not pointwise:
        return "No method finished, so there is nothing to compare."
    lags = lags_of(pointwise)
    best = next(iter(lags))
    score = f"mean log score {np.mean(pointwise[best]):.3f}"
    if math.isfinite(error := float(comparison.table.loc[best, "log_score_se"])):  # type: ignore[arg-type]
        score += f", standard error {error:.3f}"
    if len(pointwise) == 1:
        return f"{on} {best} alone gave predictions ({score})."
    behind = [by_how_much(name, *lag) for name, lag in lags.items() if is_difference(*lag)]
    level = [name for name, lag in lags.items() if name != best and not is_difference(*lag)]
    if not behind:
        none = f"no difference in log score is larger than {IN_WORDS}"
        return f"{on} {none}: {best} is nominally first ({score}) and level with {listed(level)}."
    if level:
        return f"{on} {best} is ahead of {listed(behind)}, and level with {listed(level)} ({score})."
    return f"{on} {best} predicts best ({score}), ahead of {listed(behind)}."


def lags_of(values: Mapping[str, np.ndarray]) -> Lags:
    """Method -> how far its mean is behind the best and the standard error over paired rows, best first.

    `values` is method -> (N,), larger being better.
    """
    if not values:
        return {}
    best = max(values, key=lambda name: float(np.mean(values[name])))
    pairs = {name: (values[best], each) for name, each in values.items() if name != best}
    return best_first(best, {name: paired_difference(*pair) for name, pair in pairs.items()})


def best_first(best: str, lags: Lags) -> Lags:
    """The lags of the best method, (0, 0), and those of the others, the smallest first."""
    return {best: (0.0, 0.0), **dict(sorted(lags.items(), key=lambda item: item[1][0]))}


def by_how_much(name: str, difference: float, error: float) -> str:
    """A method and how far it is behind the best."""
    if math.isinf(difference):
        return f"{name}, which gave no probability to an outcome that occurred"
    return f"{name} by {between(difference, error)}"


def between(difference: float, error: float) -> str:
    """A difference with its standard error, rounded to the digits that the error supports."""
    digits = max(2, 1 - math.floor(math.log10(error))) if error > 0.0 else 3
    return f"{difference:.{digits}f} ± {error:.{digits}f}"


# --- distance to the reference, and cost ------------------------------------------------------------------


def _distance(comparison: Comparison) -> str:
    table, reference = comparison.table, comparison.reference
    both: Any = table["compile_seconds"] + table["run_seconds"]
    seconds = {name: float(both[name]) for name in comparison.predictions}
    if reference is None or reference not in seconds:
        price = listed([f"{name} {duration(value)}" for name, value in seconds.items()])
        took = f"; the fits took: {price}." if price else "."
        why = no_reference(reference, reference in comparison.failures)
        return f"{why}, so how far any method is from the posterior is not known{took}"
    own, parts, others = seconds[reference], [], []
    floors: Any = table["gap_mean_floor"]
    for name in [each for each in seconds if each != reference]:
        row: Any = table.loc[name]
        gap, ratio = float(row["gap_mean"]), float(row["gap_sd_ratio"])
        price = f"{duration(seconds[name])} ({relative(seconds[name], own)})"
        if row.get("ppl") == Outside.ppl:
            others.append(f"{name} in {price}")
            continue
        if math.isnan(gap):
            parts.append(f"{name} could not be measured and took {price}")
            continue
        place = f"{gap:.2f} sd off in the mean" + (" (within sampling noise)" if gap <= floors[name] else "")
        spread = "without any spread" if ratio == 0.0 else f"with {ratio:.2f} times its spread"
        parts.append(f"{name} is {place} and {spread}, in {price}")
    if others:
        parts.append(f"from outside, so not approximations of it: {', '.join(others)}")
    if not parts:
        return f"Only the reference {reference} finished, in {duration(own)}."
    floor = float(floors[reference])
    noise = "" if math.isnan(floor) else f" (sampling noise alone: {floor:.2f} sd)"
    against = f"Against {reference} ({duration(own)}), in standard deviations of its mean function{noise}"
    return f"{against}: {'; '.join(parts)}."


def duration(seconds: float) -> str:
    """Seconds in words: "12 ms", "8.2 s", "3.5 min", "2.4 h", "3 days"."""
    if seconds == math.inf:
        return "without end"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    units = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))
    size, unit = next((each for each in units if seconds >= 1.66 * each[0]), (1.0, "s"))
    return f"{seconds / size:.1f} {unit}".replace(".0 ", " ")


def relative(seconds: float, reference: float) -> str:
    """One time relative to another, in words."""
    if seconds <= 0.0 or reference <= 0.0:
        return "its time cannot be put in proportion"
    ratio = reference / seconds
    if 0.8 <= ratio <= 1.25:
        return "about as long"
    return f"{ratio:.2g} times faster" if ratio > 1.0 else f"{1.0 / ratio:.2g} times slower"


# --- reliability of the reference -------------------------------------------------------------------------


def _standing(comparison: Comparison) -> str:
    table: Any = comparison.table
    reference = comparison.reference
    failures = listed(list(comparison.failures))
    failed = f"; {failures} failed (the table says why)." if failures else "."
    if reference is None or reference not in comparison.predictions:
        chains = [name for name in comparison.predictions if table.loc[name, "kind"] == "chains"]
        bad = [name for name in chains if table.loc[name, "converged"] != "yes"]
        if not chains:
            return f"No chains were run whose convergence could be judged{failed}"
        result = "cannot be said to have converged" if bad else "converged"
        return f"The chains of {listed(bad or chains)} {result}{failed}"
    row = table.loc[reference]
    doubt = doubt_of(row)
    gaps = f", so {NO_TRUE_GAPS}" if doubt else ""
    longer = ": run it longer" if row["converged"] in ("no", NOT_AT_TEST_ROWS) else ""
    return f"The reference {reference} {doubt or 'converged'}{measured(row)}{gaps}{longer}{failed}"


def measured(row: Mapping[str, Any], digits: int = 3) -> str:
    """R-hat and effective sample size of chains in brackets, as far as the row of the table has them.

    Those at the test rows, where the chains have not converged there.
    """
    where = "_test" if row["converged"] == NOT_AT_TEST_ROWS else ""
    r_hat, size = float(row[f"r_hat{where}"]), float(row[f"ess_min{where}"])
    figures = [] if math.isnan(r_hat) else [f"R-hat up to {r_hat:.{digits}f}"]
    figures += [] if math.isnan(size) else [f"effective sample size at least {size:.0f}"]
    return f" ({' and '.join(figures)} in function space)" if figures else ""


def listed(names: list[str]) -> str:
    """ "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]
