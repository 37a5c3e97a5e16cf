"""Verdict on a comparison in words, and which values of its table may be called best.

Two methods are compared on the same test rows, by the mean of the paired differences and its standard error
(`scores.paired_difference`). A method is behind another if that mean exceeds both twice its standard error and a
practical margin, 0.01 nats per row for log scores (`summary.is_difference`); those that are not behind the nominally
best one are level with it.

An approximation that is level in log score may still be far from the posterior. Its gap to the reference is of
practical size if the mean function is off by more than a quarter of the reference's epistemic standard deviation (and
by more than sampling noise), or its spread by more than a factor of 1.25. If so, and if the reference converged in no
more than a minute, the reference is recommended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppl_bnn.diagnostics.diagnose import INADEQUATE, UNDECIDED
from ppl_bnn.diagnostics.importance import K_LIMIT
from ppl_bnn.evaluation.comparison.summary import (
    IN_WORDS,
    MARGIN,
    STANDARD_ERRORS,
    between,
    duration,
    is_difference,
    listed,
    relative,
    seconds_of,
)
from ppl_bnn.prediction import scores
from ppl_bnn.prediction.scores import paired_difference

if TYPE_CHECKING:
    from ppl_bnn.evaluation.comparison.comparison import Comparison

BEST, LEVEL = "best", "level"
# Costs that differ by less than this factor are not distinguishable by wall time.
ABOUT_AS_LONG = 1.25
# Thresholds of a gap to the reference of practical size: the mean function in epistemic standard deviations of the
# reference, and the factor between the spreads.
GAP_IN_SD, GAP_IN_SPREAD = 0.25, 1.25
# Seconds up to which a reference is so cheap that no approximation of it is needed.
CHEAP = 60.0


@dataclass(frozen=True)
class Verdict:
    """Verdict on a comparison, in sentences (see `verdict`).

    Parameters
    ----------
    method : str or None
        The recommended method, None if none can be named.
    headline : str
        The recommendation in one sentence.
    because : str
        Why it is this one.
    why : tuple of str
        What it is based on.
    doubts : tuple of str
        What has not converged, failed, or has another target, the reference first.
    reference_doubt : str
        Why the gaps to the reference are not reliable; "" if they are or there is no reference.
    limits : tuple of str
        What these numbers cannot show.
    """

    method: str | None
    headline: str
    because: str
    why: tuple[str, ...]
    doubts: tuple[str, ...]
    reference_doubt: str
    limits: tuple[str, ...]


# --- best values ------------------------------------------------------------------------------------------


def row_scores(comparison: Comparison) -> dict[str, dict[str, np.ndarray]]:
    """Scores of each test row: column of the table -> method -> (N,), larger being better.

    Each column of the table is the mean of these: log_score; for numbers rmse (by squared errors, which have the same
    order) and crps; for classes accuracy and brier. Columns that are not means over test rows (ece, coverage, widths)
    and those of censored rows are left out.

    Parameters
    ----------
    comparison : Comparison
        The comparison.

    Returns
    -------
    dict
    """
    y = comparison.test_targets
    found: dict[str, dict[str, np.ndarray]] = {"log_score": comparison.pointwise_log_scores()}
    for name, prediction in comparison.predictions.items():
        if prediction.is_classes:
            hit = prediction.probabilities.argmax(axis=1) == np.asarray(y)
            found.setdefault("accuracy", {})[name] = hit.astype(np.float64)
            found.setdefault("brier", {})[name] = -np.asarray(scores.brier(prediction, y, pointwise=True))
        elif _has(comparison, name, "rmse"):
            truth = prediction.observed_values(y)
            found.setdefault("rmse", {})[name] = -_of_rows((prediction.mean - truth) ** 2)
            if _has(comparison, name, "crps"):
                found.setdefault("crps", {})[name] = -_of_rows(scores.crps(prediction, y, pointwise=True))
    return found


def _has(comparison: Comparison, name: str, column: str) -> bool:
    table = comparison.table
    return column in table.columns and math.isfinite(float(table.loc[name, column]))  # type: ignore[arg-type]


def _of_rows(values: float | np.ndarray) -> np.ndarray:
    """Means over the outputs of each row."""
    values = np.asarray(values)
    return values.reshape(len(values), -1).mean(axis=1)


def standing(values: Mapping[str, np.ndarray], margin: float = MARGIN) -> dict[str, str]:
    """Method -> BEST if it is ahead of all others, LEVEL if it is level with the best and another is behind.

    Methods that may not be marked are not in the result: those that are behind, and all of them if no difference
    exceeds both twice its standard error and the margin.

    Parameters
    ----------
    values : mapping of str to np.ndarray
        Method -> (N,), larger is better, the same rows.
    margin : float
        The practical margin, in the units of the values.

    Returns
    -------
    dict of str to str
    """
    if len(values) < 2:
        return {}
    best, level = _level(values, margin)
    if len(level) == 1:
        return {best: BEST}
    return dict.fromkeys(level, LEVEL) if len(level) < len(values) else {}


def margin_of(column: str, values: Mapping[str, np.ndarray]) -> float:
    """The practical margin of a column: 0.01 nats per row for log scores, 1 % of the best mean for any other."""
    if column in ("log_score", "elpd_loo") or not values:
        return MARGIN
    return MARGIN * abs(max(float(np.mean(each)) for each in values.values()))


def _level(values: Mapping[str, np.ndarray], margin: float = MARGIN) -> tuple[str, list[str]]:
    """The nominally best method, and those that are not behind it (including itself)."""
    best = max(values, key=lambda name: float(np.mean(values[name])))
    level = [
        name
        for name in values
        if name == best or not is_difference(*paired_difference(values[best], values[name]), margin)
    ]
    return best, level


# --- the verdict ------------------------------------------------------------------------------------------


def verdict(comparison: Comparison) -> Verdict:
    """Which method to use on these data, why, and what speaks against it.

    Among the methods that are level with the best log score and have no known problems, the fastest is recommended. If
    that is a point, the cheapest method with a spread is named beside it. If that is an approximation far from a
    reference that is itself level, converged and cheap, the reference is recommended.

    Parameters
    ----------
    comparison : Comparison
        The comparison.

    Returns
    -------
    Verdict
    """
    doubt = _reference_doubt(comparison)
    doubts = _doubts(comparison, doubt)
    values = comparison.pointwise_log_scores()
    if not values:
        return Verdict(
            None, "No method finished, so there is nothing to recommend.", "", (), doubts, doubt, ()
        )
    limits = _limits(comparison)
    if len(values) == 1:
        (only,) = values
        return Verdict(
            None,
            f"Only {only} gave predictions, so there is nothing to compare it with.",
            "",
            _coverage(comparison, only),
            doubts,
            doubt,
            limits,
        )
    best, level = _level(values)
    sound = [name for name in level if not _amiss(comparison, name)]
    if not sound:
        return Verdict(None, *_unsound(comparison, values, best, level), (), doubts, doubt, limits)
    chosen = min(sound, key=lambda name: _price(comparison, name))
    if not doubt and (exact := _exact_instead(comparison, sound, chosen)):
        chosen, headline, because = exact
    else:
        headline, because = _choice(comparison, values, level, sound, chosen)
    why = (
        *_against_best(values, best, chosen),
        *_others(comparison, values, best, level, chosen),
        *_gap(comparison, chosen, doubt),
        *_coverage(comparison, chosen),
    )
    return Verdict(chosen, headline, because, why, doubts, doubt, limits)


def _choice(
    comparison: Comparison,
    values: Mapping[str, np.ndarray],
    level: Sequence[str],
    sound: Sequence[str],
    chosen: str,
) -> tuple[str, str]:
    """The recommended method and the reason."""
    point = comparison.table.loc[chosen, "kind"] == "point"
    if len(level) == 1:
        because = f"Its log score is ahead of every other method's by more than {IN_WORDS}"
        because += ", and no other took less time." if _is_quickest(comparison, chosen) else "."
        if point:
            return (
                f"For predictions alone, use {chosen}.",
                f"{because} As a point it has no epistemic uncertainty.",
            )
        return f"Use {chosen}.", because
    because = (
        "These test rows do not tell the methods apart"
        if len(level) == len(values) and not _certain(values)
        else f"No method predicts better by more than {IN_WORDS}"
    )
    took = duration(seconds_of(comparison, chosen))
    if len(sound) == 1:
        because += (
            "; of those that are level with the best it is the only one of which nothing is known to be amiss"
        )
    elif len(sound) < len(level):
        because += f"; of those that are level, and of which nothing is known to be amiss, it took least time ({took})"
    else:
        because += f"; of those that are level it took least time ({took})"
    if not point:
        return f"Use {chosen}.", because + "."
    spread = [name for name in sound if comparison.table.loc[name, "kind"] != "point"]
    if not spread:
        return (
            f"For predictions alone, use {chosen}.",
            because + ". As a point it has no epistemic uncertainty.",
        )
    second = min(spread, key=lambda name: _price(comparison, name))
    return (
        f"For predictions alone, use {chosen}; for uncertainty about the function, {second}.",
        f"{because}, and {second} ({duration(seconds_of(comparison, second))}) is the quickest of them that has a "
        "spread.",
    )


def _certain(values: Mapping[str, np.ndarray]) -> bool:
    """Whether some difference to the best is more than two standard errors, however small it is."""
    best = max(values, key=lambda name: float(np.mean(values[name])))
    return any(
        is_difference(*paired_difference(values[best], values[name]), 0.0) for name in values if name != best
    )


def _exact_instead(comparison: Comparison, sound: Sequence[str], chosen: str) -> tuple[str, str, str] | None:
    """(reference, headline, because) if the reference is level and cheap and `chosen` is far from it; else None."""
    reference = comparison.reference
    if reference is None or reference not in sound or reference == chosen:
        return None
    row, took = comparison.table.loc[chosen], _price(comparison, reference)
    gap, floor, ratio = (float(row[name]) for name in ("gap_mean", "gap_mean_floor", "gap_sd_ratio"))
    far = is_far(gap, floor, ratio)
    if not far or took > CHEAP:
        return None
    return (
        reference,
        f"Use {reference}.",
        f"It is the exact reference, it converged, and it took no more than {duration(took)}. {chosen} "
        f"({duration(seconds_of(comparison, chosen))}) is level with the best log score and serves for predictions "
        f"alone, but not for uncertainty about the function: {far}.",
    )


def is_far(gap: float, floor: float, ratio: float) -> str:
    """In what respect an approximation is far from the reference, in words; "" if the gap is not of practical size.

    Parameters
    ----------
    gap : float
        `gap_mean` of the table.
    floor : float
        `gap_mean_floor` of the table, the size of sampling noise.
    ratio : float
        `gap_sd_ratio` of the table.

    Returns
    -------
    str
    """
    words = []
    # The floor may be NaN, for which every comparison is False.
    if gap > GAP_IN_SD and not gap <= floor:
        words.append(f"its mean function is off by {gap:.2f} epistemic standard deviations")
    if ratio == 0.0:
        words.append("it has no spread")
    elif ratio > 0.0 and abs(math.log(ratio)) > math.log(GAP_IN_SPREAD):
        words.append(f"its spread is {ratio:.2f} times that of the posterior")
    return " and ".join(words)


def _unsound(
    comparison: Comparison, values: Mapping[str, np.ndarray], best: str, level: Sequence[str]
) -> tuple[str, str]:
    """If no method that is level with the best is sound: that, and the alternative."""
    headline = "None can be recommended yet: run longer first."
    because = (
        f"Of {best}, which has the best log score, it cannot be said that it has converged."
        if len(level) == 1
        else f"Of {listed(list(level))}, which are level with the best log score, it cannot be said that they have "
        "converged."
    )
    others = [name for name in values if name not in level and not _amiss(comparison, name)]
    if not others:
        return headline, because
    second = max(others, key=lambda name: float(np.mean(values[name])))
    difference, error = paired_difference(values[best], values[second])
    lost = (
        "gave no probability to some outcome that occurred"
        if math.isinf(difference)
        else f"is {between(difference, error)} nats per test row behind {best}"
    )
    return headline, (
        f"{because} Of the methods of which nothing is known to be amiss {second} predicts best; it {lost}."
    )


def _against_best(values: Mapping[str, np.ndarray], best: str, chosen: str) -> tuple[str, ...]:
    if chosen == best:
        return (f"Its mean log score, {float(np.mean(values[best])):.3f} nats per test row, is the highest.",)
    difference, error = paired_difference(values[best], values[chosen])
    if math.isnan(error):
        return (
            f"{best} is nominally first, {difference:.3g} nats per test row ahead, of unknown standard error.",
        )
    most = difference + STANDARD_ERRORS * error
    return (
        f"{best} is nominally first, by {between(difference, error)} nats per test row; two standard errors "
        f"allow for a loss of up to {most:.2g}.",
    )


def _others(
    comparison: Comparison, values: Mapping[str, np.ndarray], best: str, level: Sequence[str], chosen: str
) -> tuple[str, ...]:
    found = []
    price = _price(comparison, chosen)
    same = [
        f"{name} ({duration(seconds_of(comparison, name))}, {relative(seconds_of(comparison, name), price)}"
        f"{'; not known to have converged' if _amiss(comparison, name) else ''})"
        for name in level
        if name != chosen
    ]
    if same:
        found.append(f"Level with the best besides: {listed(same)}.")
    behind = []
    for name in values:
        if name in level:
            continue
        difference, error = paired_difference(values[best], values[name])
        quick = seconds_of(comparison, name)
        less = f" (but took {duration(quick)})" if quick * ABOUT_AS_LONG < price else ""
        behind.append(
            f"{name}, which gave no probability to some outcome that occurred{less}"
            if math.isinf(difference)
            else f"{name} by {between(difference, error)}{less}"
        )
    if behind:
        found.append(f"Behind {best} in log score by more than {IN_WORDS}: {listed(behind)}.")
    return tuple(found)


def _gap(comparison: Comparison, chosen: str, doubt: str) -> tuple[str, ...]:
    """How close the method is to the posterior, if there is a reference to measure it by."""
    reference, row = comparison.reference, comparison.table.loc[chosen]
    if reference is None or reference not in comparison.predictions or chosen == reference or doubt:
        return ()
    gap, floor = float(row["gap_mean"]), float(row["gap_mean_floor"])
    ratio, ratio_floor = float(row["gap_sd_ratio"]), float(row["gap_sd_floor"])
    if math.isnan(gap):
        return ()
    noise = ""
    if math.isfinite(floor):
        within = "which is no more than" if gap <= floor else "where"
        noise = f", {within} sampling noise alone {'makes' if gap <= floor else f'makes {floor:.2f}'}"
    spread = "it has no spread"
    if ratio > 0.0:
        spread = f"its spread is {ratio:.2f} times that of the posterior"
        if 0.0 < ratio_floor < math.inf and abs(math.log(ratio)) <= abs(math.log(ratio_floor)):
            spread += " (within sampling noise)"
    return (
        f"Measured by {reference}, its mean function is off by {gap:.2f} epistemic standard deviations{noise}; "
        f"{spread}.",
    )


def _coverage(comparison: Comparison, name: str) -> tuple[str, ...]:
    """Whether the 90 % intervals have their nominal coverage, by a binomial standard error."""
    if not _has(comparison, name, "coverage_90"):
        return ()
    covered = float(comparison.table.loc[name, "coverage_90"])  # type: ignore[arg-type]
    rows = len(comparison.test_targets)
    error = math.sqrt(0.9 * 0.1 / rows)
    text = f"The 90 % intervals of {name} hold {covered:.0%} of the test targets"
    if abs(covered - 0.9) <= STANDARD_ERRORS * error:
        return (f"{text}, within two standard errors ({100 * error:.1f} points each) of what they promise.",)
    if covered > 0.9 and comparison.predictions[name].is_counts:
        return (f"{text}: those of counts end at whole numbers, and hold more than they promise by right.",)
    return (
        f"{text}, more than two standard errors ({100 * error:.1f} points each) from what they promise: they are too "
        f"{'narrow' if covered < 0.9 else 'wide'}.",
    )


# --- doubts -----------------------------------------------------------------------------------------------


def _amiss(comparison: Comparison, name: str) -> str:
    """Known problems of a fit, as the end of a sentence that begins with its name; "" if there are none."""
    row = comparison.table.loc[name]
    converged, chains = row["converged"], row["kind"] == "chains"
    if converged == "no":
        return "has not converged"
    if converged == "per mode":
        return "has converged per mode only: its chains sit in modes of their own, whose shares are not known"
    if converged == "in doubt":
        return "may have converged, but its sampler complained"
    if chains and converged != "yes":
        return "could not be judged as to convergence"
    return ""


def _reference_doubt(comparison: Comparison) -> str:
    """Why gaps to the reference are not gaps to the posterior, in a sentence; "" if they are, or if there is none."""
    reference = comparison.reference
    if reference is None or reference not in comparison.predictions:
        return ""
    row = comparison.table.loc[reference]
    amiss = _amiss(comparison, reference)
    if row["kind"] != "chains":
        amiss = f"{amiss} and is itself an approximation" if amiss else "is itself an approximation"
    elif not amiss and row["target"]:
        amiss = f"converged, but not to the posterior ({row['target']})"
    if not amiss:
        return ""
    figures = []
    if math.isfinite(float(row["r_hat"])):
        figures.append(f"R-hat up to {float(row['r_hat']):.4f}")
    if math.isfinite(float(row["ess_min"])):
        figures.append(f"effective sample size down to {float(row['ess_min']):.0f}")
    measured = f" ({' and '.join(figures)} in function space)" if figures else ""
    return (
        f"The reference {reference} {amiss}{measured}. The gaps to it are not gaps to the posterior, and the verdict "
        "does not rest on them."
    )


def _doubts(comparison: Comparison, reference_doubt: str) -> tuple[str, ...]:
    found, reference = [], comparison.reference
    if reference is None:
        found.append("No reference was named, so how far any method is from the posterior is not known.")
    elif reference not in comparison.predictions:
        why = "failed" if reference in comparison.failures else "was not fitted"
        found.append(
            f"The reference {reference} {why}, so how far any method is from the posterior is not known."
        )
    for name in comparison.table.index:
        amiss = _amiss(comparison, name) if name in comparison.predictions else ""
        if amiss and not (reference_doubt and name == reference):
            reasons = _reasons(comparison, name)
            found.append(f"{name} {amiss}{': ' if reasons else ''}{reasons}.")
        if not amiss and (unsettled := _unsettled(comparison, name)):
            found.append(f"{name} {unsettled}.")
        target = comparison.table.loc[name, "target"]
        if target and name != reference:
            found.append(f"{name} aimed at something else than the posterior: {target}.")
    found += [f"{name} gave no posterior: {reason}" for name, reason in comparison.failures.items()]
    return tuple(found)


def _unsettled(comparison: Comparison, name: str) -> str:
    """What the diagnosis of an approximation leaves open or finds wrong, as the end of a sentence; "" for neither.

    This does not rule out a recommendation: an approximation may predict well and be far from the posterior.
    """
    diagnosis = comparison.diagnoses.get(name)
    if diagnosis is None or diagnosis.verdict not in (UNDECIDED, INADEQUATE):
        return ""
    if diagnosis.verdict == INADEQUATE:
        return "is not adequate as an approximation of the posterior, whatever it predicts; its diagnosis says in what"
    text = "is an approximation of which its own diagnostics do not decide whether it is adequate"
    k = float(diagnosis.figures.get("pareto_k", math.nan))
    return (
        f"{text}: Pareto k-hat is {k:.2f}, above {K_LIMIT}"
        if k > K_LIMIT
        else f"{text}; its diagnosis says why"
    )


def _reasons(comparison: Comparison, name: str, most: int = 2) -> str:
    """The first reasons of a diagnosis; the page lists all of them below its fits."""
    diagnosis = comparison.diagnoses.get(name)
    reasons = [] if diagnosis is None else [str(reason).rstrip(".") for reason in diagnosis.reasons]
    more = f"; and {len(reasons) - most} more, in its diagnosis" if len(reasons) > most else ""
    return "; ".join(reasons[:most]) + more


def _limits(comparison: Comparison) -> tuple[str, ...]:
    rows, methods = len(comparison.test_targets), len(comparison.predictions)
    if rows == 1:
        first = "There is one test row, which has no standard error: nothing is claimed of any difference."
    else:
        first = (
            f"Standard errors are over {rows} test rows of one split, fitted under one seed, and take rows to be "
            "independent. Another split or seed would add to them, and rows that belong together, too."
        )
    found = [first]
    if methods > 2:
        found.append(
            "Of pairs of methods that do not differ at all, about one in twenty still shows a difference of more than "
            "two standard errors, by chance."
        )
    found.append(
        f"Below {MARGIN:g} nats per test row, which is {MARGIN:.0%} of a predictive density, methods are called level, "
        "however certain the difference is."
    )
    found.append("Seconds are of one run on one machine, compilation included.")
    return tuple(found)


# --- cost -------------------------------------------------------------------------------------------------


def _price(comparison: Comparison, name: str) -> float:
    seconds = seconds_of(comparison, name)
    return math.inf if math.isnan(seconds) else seconds


def _is_quickest(comparison: Comparison, name: str) -> bool:
    mine = _price(comparison, name)
    return math.isfinite(mine) and all(_price(comparison, other) >= mine for other in comparison.predictions)
