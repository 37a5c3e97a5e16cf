"""Which of several methods to use on one model and one data set, in words.

A method is behind another if the mean paired difference over units (test rows or splits) exceeds both twice its
standard error and a practical margin (`summary.is_difference`). Methods that are not behind the nominally best one are
level with it. If an approximation that is level is far from the reference (`is_far`), and the reference converged in no
more than a minute, the reference is recommended.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ppl_bnn.evaluation.comparison import summary
from ppl_bnn.evaluation.comparison.summary import IN_WORDS, MARGIN, Lags, between, is_difference, listed

# The score by which methods are recommended.
SCORE = "log_score"
ELPD = "elpd_loo"
BEST, LEVEL = "best", "level"
# Costs that differ by less than this factor are not distinguishable by wall time.
ABOUT_AS_LONG = 1.25
# Thresholds of a gap to the reference of practical size: the mean function in epistemic standard deviations of the
# reference, and the factor between the spreads.
GAP_IN_SD, GAP_IN_SPREAD = 0.25, 1.25
# Seconds up to which a reference is so cheap that no approximation of it is needed.
CHEAP = 60.0
NO_SPREAD = "A point estimate has no epistemic uncertainty."
UNDECIDED_FIT = "is an approximation, and its diagnostics do not decide whether it is adequate"
MARGIN_LIMIT = (
    f"Differences below {MARGIN:g} nats per test row, {MARGIN:.0%} of a predictive density, do not count, however "
    "certain they are."
)


@dataclass(frozen=True)
class Verdict:
    """A recommendation in sentences.

    `headline` and `because` recommend `method` (None if none) and give the reason; `why`, `doubts` and `limits` say
    what it is based on, what is wrong with fits, and what the numbers cannot show. `reference_doubt` is why gaps to the
    reference are not gaps to the posterior, or "". `lags` are method -> distance behind the best and its standard
    error, best first; `level` methods are level with the best, `sound` ones also without a known problem; `parts` are
    verdicts on blocks.
    """

    headline: str = ""
    because: str = ""
    method: str | None = None
    why: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    reference_doubt: str = ""
    lags: Lags = field(default_factory=dict)
    level: tuple[str, ...] = ()
    sound: tuple[str, ...] = ()
    title: str = ""
    parts: tuple[Verdict, ...] = ()


class UnitBlock(ABC):
    """Several methods on one model and one data set, compared over paired units: test rows, or splits.

    `table` has a row per method, `units` counts units in words, `labels` name the block, `fit` follows a duration.
    `reference_doubt` is why gaps to the reference are not gaps to the posterior; "" if they are, or without one.
    """

    table: Any
    reference: str | None
    reference_doubt: Any = ""
    title, units, fit = "", "", ""
    labels: Mapping[str, str] = {}
    timed: tuple[str, ...] = ("compile_seconds", "run_seconds")

    @abstractmethod
    def lags(self, score: str) -> Lags:
        """Method -> how far it is behind the best method and the standard error, best first, the best with (0, 0)."""

    @abstractmethod
    def paired(self, score: str, first: str, second: str) -> int:
        """Number of units on which both methods have a score."""

    def seconds(self, name: str) -> float:
        """Wall time of a fit, the sum of the columns `timed` of the table; infinite if it is not known."""
        seconds = sum(self.number(name, column) for column in self.timed)
        return math.inf if math.isnan(seconds) else seconds

    @abstractmethod
    def problem(self, name: str) -> str:
        """The known problems of a fit, which rule out a recommendation, as the end of a sentence; "" for none."""

    @abstractmethod
    def doubts(self) -> Iterator[str]:
        """What has failed, has not converged, or has another target, in sentences."""

    def coverage(self, name: str) -> tuple[str, ...]:
        """Whether intervals have their nominal coverage, in a sentence, where that can be judged."""
        return ()

    def number(self, name: str, column: str) -> float:
        """A number of the table; NaN if the table has no such column."""
        return float(self.table.loc[name].get(column, math.nan))

    def is_point(self, name: str) -> bool:
        return self.table.loc[name, "kind"] == "point"

    def took(self, name: str) -> str:
        """The time of a fit in words."""
        seconds = self.seconds(name)
        return summary.duration(seconds) if math.isfinite(seconds) else "unknown time"

    def standing(self, score: str) -> dict[str, str]:
        """Method -> BEST or LEVEL, by the function `standing`."""
        lags = self.lags(score)
        return standing(lags, margin_of(score, self.number(next(iter(lags)), score))) if lags else {}


# --- best values ------------------------------------------------------------------------------------------


def standing(lags: Lags, margin: float = MARGIN) -> dict[str, str]:
    """Method -> BEST if it is ahead of all others, LEVEL if it is level with the best and another is behind.

    Methods that are behind are not in the result; it is empty if no difference counts.
    """
    level = [name for name, lag in lags.items() if not is_difference(*lag, margin)]
    if len(lags) < 2 or len(level) == len(lags):
        return {}
    return {level[0]: BEST} if len(level) == 1 else dict.fromkeys(level, LEVEL)


def margin_of(score: str, best: float) -> float:
    """The practical margin of a score: 0.01 nats for log scores, 1 % of the best value for any other."""
    return MARGIN if score in (SCORE, ELPD) else MARGIN * abs(best)


# --- the verdict ------------------------------------------------------------------------------------------


def judge(block: UnitBlock) -> Verdict:
    """Which method to use, why, and the doubts about it.

    It is the fastest of the methods that are level with the best log score and have no known problem. Beside a point,
    the fastest method with a spread is named. If it is an approximation far from a reference that is level, converged
    and cheap, the reference is recommended.
    """
    lags = block.lags(SCORE)
    level = tuple(name for name, lag in lags.items() if not is_difference(*lag))
    sound = tuple(name for name in level if not block.problem(name))
    found = Verdict(doubts=tuple(block.doubts()), reference_doubt=block.reference_doubt, title=block.title)
    found = replace(found, lags=lags, level=level, sound=sound)
    if not lags:
        return replace(found, headline="No method finished, so there is nothing to recommend.")
    best = level[0]
    if len(lags) == 1:
        headline = f"Only {best} has results, so there is nothing to compare it with."
        return replace(found, headline=headline, why=block.coverage(best))
    if not sound:
        headline, because = "No method can be recommended yet.", _unsound(block, found)
        return replace(found, headline=headline, because=because, why=tuple(_others(block, found)))
    method, headline, because = _choice(block, found)
    found = replace(found, method=method, headline=headline, because=because)
    why = (_against_best(block, found), *_others(block, found), *_gap(block, found), *block.coverage(method))
    return replace(found, why=why)


def _choice(block: UnitBlock, found: Verdict) -> tuple[str, str, str]:
    """The recommended method, the recommendation and the reason."""
    level, sound = found.level, found.sound
    chosen = min(sound, key=block.seconds)
    reference, far = str(block.reference), ""
    usable = reference in sound and reference != chosen and not found.reference_doubt
    if usable and block.seconds(reference) <= CHEAP:
        far = is_far(*(block.number(chosen, name) for name in ("gap_mean", "gap_mean_floor", "gap_sd_ratio")))
    if far:
        because = (
            f"It is the exact reference, it converged, and it took {block.took(reference)}{block.fit}. {chosen} "
            f"({block.took(chosen)}) is level with the best log score and serves for predictions alone, not for "
            f"uncertainty about the function: {far}."
        )
        return reference, f"Use {reference}.", because
    if len(level) == 1:
        because = f"Its log score is ahead of every other method's by more than {IN_WORDS} ({block.units})"
        if block.seconds(chosen) <= min(map(block.seconds, found.lags)) < math.inf:
            because += ", and no other method was faster"
    elif len(level) == len(found.lags) and not any(is_difference(*lag, 0.0) for lag in found.lags.values()):
        because = f"No difference between the methods is established on {block.units}"
    else:
        because = f"On {block.units} no method predicts better by more than {IN_WORDS}"
    if len(level) > 1 and len(sound) == 1:
        because += "; among the methods level with the best, it is the only one without a known problem"
    elif len(level) > 1:
        without = " without a known problem" if len(sound) < len(level) else ""
        because += f"; of the level methods{without} it was the fastest ({block.took(chosen)}{block.fit})"
    if not block.is_point(chosen):
        return chosen, f"Use {chosen}.", f"{because}."
    second = min((name for name in sound if not block.is_point(name)), key=block.seconds, default=None)
    spread = f", and {second} ({block.took(second)}) is the fastest of them with a spread." if second else ""
    return chosen, for_predictions(chosen, second), because + (spread or f". {NO_SPREAD}")


def for_predictions(point: str, second: str | None) -> str:
    """The recommendation of a point estimate, and of a second method for what it does not have."""
    return f"For predictions alone, use {point}{f'; for uncertainty about the function, {second}' if second else ''}."


def is_far(gap: float, floor: float, ratio: float) -> str:
    """In what respect an approximation is far from the reference, in words; "" if the gap is not of practical size.

    It is if means are off by 1/4 epistemic standard deviation and more than the noise `floor`, or spreads by a factor
    1.25.
    """
    # The floor may be NaN, for which every comparison is False.
    mean = _mean_in_words(gap) if gap > GAP_IN_SD and not gap <= floor else ""
    far = ratio == 0.0 or (ratio > 0.0 and abs(math.log(ratio)) > math.log(GAP_IN_SPREAD))
    return " and ".join(filter(None, (mean, _spread_in_words(ratio) if far else "")))


def _mean_in_words(gap: float) -> str:
    return f"its mean function is off by {gap:.2f} epistemic standard deviations"


def _spread_in_words(ratio: float) -> str:
    return f"its spread is {ratio:.2f} times that of the posterior" if ratio > 0.0 else "it has no spread"


def _unsound(block: UnitBlock, found: Verdict) -> str:
    """Why none of the methods that are level with the best is recommended, and which other one predicts best."""
    best = found.level[0]
    because = f"{best} has the best log score, but it {block.problem(best)}."
    if len(found.level) > 1:
        level = listed(list(found.level))
        because = f"{level} are level with the best log score, and each of them has a known problem."
    others = (name for name in found.lags if name not in found.level and not block.problem(name))
    if (second := next(others, None)) is None:
        return because
    difference, error = found.lags[second]
    if math.isinf(difference):
        lost = "gave no probability to an outcome that occurred"
    else:
        lost = f"is {between(difference, error)} nats per test row behind {best}"
    return f"{because} Of the methods without a known problem {second} predicts best; it {lost}."


def _against_best(block: UnitBlock, found: Verdict) -> str:
    best, chosen = found.level[0], str(found.method)
    difference, error = found.lags[chosen]
    if chosen == best:
        error = block.number(best, f"{SCORE}_se")
        score = f"{block.number(best, SCORE):.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")
        return f"Its mean log score, {score} nats per test row, is the highest."
    if math.isnan(error):
        return f"{best} is nominally first, by {difference:.3g} nats per test row, of unknown standard error."
    return (
        f"{best} is nominally first, by {between(difference, error)} nats per test row; two standard errors allow for "
        f"a loss of up to {difference + summary.STANDARD_ERRORS * error:.2g}."
    )


def _others(block: UnitBlock, found: Verdict) -> Iterable[str]:
    """Which methods are level with the best besides the recommended one, and which are behind, with their times."""
    best, chosen = found.level[0], found.method
    price = math.inf if chosen is None else block.seconds(chosen)
    same, behind = [], []
    for name, lag in found.lags.items():
        seconds, words = block.seconds(name), []
        if name in found.level and name != chosen:
            if math.isfinite(seconds):
                words.append(block.took(name))
                words += [summary.relative(seconds, price)] if math.isfinite(price) else []
            words += filter(None, [block.problem(name)])
            same.append(f"{name} ({'; '.join(words)})" if words else name)
        elif name not in found.level:
            less = f" (but took {block.took(name)})" if seconds * ABOUT_AS_LONG < price < math.inf else ""
            behind.append(summary.by_how_much(name, *lag) + less)
    if same:
        yield f"Level with the best{' besides' if chosen else ''}: {listed(same)}."
    if behind:
        yield f"Behind {best} in log score by more than {IN_WORDS}: {listed(behind)}."


def _gap(block: UnitBlock, found: Verdict) -> Iterable[str]:
    """How close the method is to the posterior, if there is a reference to measure it by."""
    chosen, reference = str(found.method), block.reference
    columns = ("gap_mean", "gap_mean_floor", "gap_sd_ratio", "gap_sd_floor")
    gap, floor, ratio, ratio_floor = (block.number(chosen, column) for column in columns)
    if reference is None or chosen == reference or math.isnan(gap) or found.reference_doubt:
        return
    within = "within sampling noise" if gap <= floor else "sampling noise alone"
    noise = "" if math.isnan(floor) else f" ({within}: {floor:.2f})"
    known = ratio > 0.0 and 0.0 < ratio_floor < math.inf
    noisy = " (within sampling noise)" if known and abs(math.log(ratio)) <= abs(math.log(ratio_floor)) else ""
    yield f"Measured by {reference}, {_mean_in_words(gap)}{noise}; {_spread_in_words(ratio)}{noisy}."
