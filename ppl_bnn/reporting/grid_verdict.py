"""Verdict on the result of a grid in words: one for each model and data set, and one over all.

Methods are compared on the same splits: seeds are averaged within a split, and a comparison of two methods uses the
mean over splits of their differences and its corrected standard error (`GridResult.table`). A method is behind the best
one if that mean exceeds both twice its standard error and a practical margin, 0.01 nats per row for log scores
(`summary.is_difference`); those that are not behind are level with it. If the fastest of these is far from a reference
that is itself level, converged and cheap (`verdict.is_far`), the reference is recommended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

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
)
from ppl_bnn.evaluation.grid.result import LARGER_IS_BETTER, GridResult, best_method
from ppl_bnn.prediction.reliability import Event, Transform
from ppl_bnn.reporting.ranks import SCORE, Ranks, mean_ranks, words_of_ranks
from ppl_bnn.reporting.verdict import BEST, CHEAP, LEVEL, is_far

if TYPE_CHECKING:
    import pandas as pd


Pair = tuple[str, str]


@dataclass(frozen=True)
class PairVerdict:
    """Verdict on one model and one data set.

    Parameters
    ----------
    pair : tuple
        Model and data set.
    name : str
        Their name in the text.
    method : str or None
        The recommended method, None if none can be named.
    headline, because : str
        The recommendation in one sentence, and its reason.
    why, doubts : tuple of str
        What it is based on, and what speaks against it.
    best : str
        The method with the best mean log score.
    level : tuple of str
        The methods that are level with the best log score, including itself.
    sound : tuple of str
        Those of `level` without known problems.
    behind : mapping
        Method -> by how much it is behind the best, and the standard error.
    """

    pair: Pair
    name: str
    method: str | None
    headline: str
    because: str
    why: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    best: str = ""
    level: tuple[str, ...] = ()
    sound: tuple[str, ...] = ()
    behind: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class GridVerdict:
    """Verdict on the result of a grid, in sentences (see `grid_verdict`).

    Parameters
    ----------
    method : str or None
        The recommended method over all, None if none can be named.
    headline, because : str
        The recommendation in one sentence, and its reason.
    why : tuple of str
        What it is based on.
    pairs : tuple of PairVerdict
        One verdict for each model and data set.
    reference_doubt : str
        Where gaps to the reference are not gaps to the posterior, or "".
    failures, missing : tuple of str
        What has no result.
    limits : tuple of str
        What these numbers cannot show.
    """

    method: str | None
    headline: str
    because: str
    why: tuple[str, ...]
    pairs: tuple[PairVerdict, ...]
    reference_doubt: str
    failures: tuple[str, ...]
    missing: tuple[str, ...]
    limits: tuple[str, ...]


class GridFindings:
    """Figures computed from a result and shared by verdict, tables and pictures; each is computed on first use."""

    def __init__(self, result: GridResult):
        self.result = result
        self._splits: dict[str, Any] = {}

    @cached_property
    def table(self) -> pd.DataFrame:
        """The table of the result."""
        return self.result.table()

    @cached_property
    def blocks(self) -> dict[Pair, Any]:
        """(model, data) -> the rows of the table, by method."""
        if not len(self.table):
            return {}
        grouped: Any = self.table.groupby(level=["model", "data"], sort=False)
        return {
            (str(model), str(data)): block.droplevel(["model", "data"]) for (model, data), block in grouped
        }

    @cached_property
    def cells(self) -> dict[Pair, Any]:
        """(model, data) -> its rows of `GridResult.cells`."""
        every: Any = self.result.cells
        grouped = every.groupby(["model", "data"], sort=False)
        return {(str(model), str(data)): block for (model, data), block in grouped}

    def name(self, pair: Pair) -> str:
        """Name of a model and its data set, without the part common to all."""
        several = [len({each[place] for each in self.blocks}) > 1 for place in (0, 1)]
        if several[0] is several[1]:
            return f"{pair[0]} on {pair[1]}"
        return pair[0] if several[0] else pair[1]

    def by_split(self, score: str) -> Any:
        """`GridResult.by_split` of a score."""
        if score not in self._splits:
            self._splits[score] = self.result.by_split(score)
        return self._splits[score]

    def splits(self, pair: Pair, score: str) -> Any:
        """Split x method of one model and data set, where a score exists."""
        every = self.by_split(score)
        of_pair = every[
            (every.index.get_level_values("model") == pair[0])
            & (every.index.get_level_values("data") == pair[1])
        ]
        return of_pair.droplevel(["model", "data"]).dropna(axis=1, how="all")

    def best(self, pair: Pair, score: str) -> str | None:
        """The method with the best mean, among those with the most splits."""
        found = self.splits(pair, score)
        return best_method(found, LARGER_IS_BETTER[score]) if len(found.columns) else None

    def behind(self, pair: Pair, score: str) -> dict[str, tuple[float, float]]:
        """Method -> (by how much it is behind the best, standard error), the best first with (0, 0).

        Methods that have no split in common with the best one are left out.
        """
        best, block = self.best(pair, score), self.blocks[pair]
        if best is None:
            return {}
        found = {best: (0.0, 0.0)}
        sign = -1.0 if LARGER_IS_BETTER[score] else 1.0
        for name in block.index:
            difference = float(block.loc[name].get(f"{score}_to_best", math.nan))
            if name != best and not math.isnan(difference):
                found[str(name)] = (sign * difference, float(block.loc[name, f"{score}_to_best_se"]))
        return found

    def standing(self, pair: Pair, score: str) -> dict[str, str]:
        """Method -> BEST if it is ahead of all others, LEVEL if it is level with the best and another is behind.

        Nothing is marked if no difference exceeds both twice its standard error and the practical margin (1 % of the
        best value for scores other than the log score), or if there is nothing to compare.
        """
        found = self.behind(pair, score)
        margin = MARGIN
        if found and score != SCORE:
            margin *= abs(float(self.blocks[pair].loc[next(iter(found)), score]))
        level = [name for name, lag in found.items() if not is_difference(*lag, margin)]
        if len(found) < 2 or len(level) == len(found):
            return {}
        return {level[0]: BEST} if len(level) == 1 else dict.fromkeys(level, LEVEL)

    def seconds(self, pair: Pair, name: str) -> float:
        """Mean wall time of a fit without compilation, which cells of one process share."""
        value = float(self.blocks[pair].loc[name].get("run_seconds", math.nan))
        return math.inf if math.isnan(value) else value

    def amiss(self, pair: Pair, name: str) -> str:
        """Known problems of the fits of a method, as the end of a sentence; "" if there are none."""
        return " and ".join(filter(None, (self.failed(pair, name), self.not_converged(pair, name))))

    def failed(self, pair: Pair, name: str) -> str:
        """How many fits of a method failed, as the end of a sentence; "" if none did."""
        block = self._cells_of(pair, name)
        count = int((block["failure"] != "").sum())
        return f"failed in {count} of {len(block)} cells" if count else ""

    def not_converged(self, pair: Pair, name: str) -> str:
        """How many fits of a method did not converge, as the end of a sentence; "" if all did."""
        block = self._cells_of(pair, name)
        done = block[block["failure"] == ""]
        bad = (done["kind"] == "chains") & (done["converged"] != "yes") | (done["converged"] == "no")
        count = int(bad.sum())
        return f"cannot be said to have converged in {count} of {len(done)} cells" if count else ""

    def unsettled(self, pair: Pair, name: str) -> str:
        """In how many cells the diagnostics of an approximation are undecided, in a sentence; "" if in none.

        This does not rule out a recommendation: an approximation may predict well and be far from the posterior.
        """
        block = self._cells_of(pair, name)
        if "k_hat" not in block:
            return ""
        judged = block[(block["failure"] == "") & (block["kind"] == "iid") & block["k_hat"].notna()]
        count = int((judged["k_hat"] > K_LIMIT).sum())
        return (
            f"{name} is an approximation of which its own diagnostics do not decide whether it is adequate: Pareto "
            f"k-hat is above {K_LIMIT} in {count} of {len(judged)} cells."
            if count
            else ""
        )

    def calibrations(self, pair: Pair) -> tuple[dict[str, Transform], dict[str, Event]]:
        """Calibration of each method over the test rows of all cells: transforms for numbers, events for classes."""
        transforms, events = {}, {}
        for name in self.blocks[pair].index:
            kept = [self.result.arrays(key) for key in self._cells_of(pair, name)["key"]]
            if of_numbers := [Transform.from_arrays(each) for each in kept if "pit" in each]:
                transforms[str(name)] = Transform.joined(of_numbers)
            if of_classes := [Event.from_arrays(each) for each in kept if "event" in each]:
                events[str(name)] = Event.joined(of_classes)
        return transforms, events

    def _cells_of(self, pair: Pair, name: str) -> Any:
        return self.cells[pair][self.cells[pair]["method"] == name]

    @cached_property
    def ranks(self) -> Ranks:
        """Mean ranks of the methods."""
        return mean_ranks(self)


# --- the verdict ------------------------------------------------------------------------------------------


def grid_verdict(result: GridResult | GridFindings) -> GridVerdict:
    """Which method to use, for each model and data set and over all, why, and what speaks against it.

    Among the methods that are level with the best log score and have no known problems, the one with the fastest fits
    is recommended. Over all it is the method that is most often among these; if there are several, the fastest.

    Parameters
    ----------
    result : GridResult or GridFindings
        The result of a grid.

    Returns
    -------
    GridVerdict
    """
    findings = result if isinstance(result, GridFindings) else GridFindings(result)
    doubts = _reference_doubts(findings)
    pairs = tuple(_of_pair(findings, pair, doubts) for pair in findings.blocks)
    method, headline, because, why = _over_all(findings, pairs)
    return GridVerdict(
        method,
        headline,
        because,
        why,
        pairs,
        _reference_doubt(findings, doubts),
        _failures(findings),
        _missing(findings),
        _limits(findings),
    )


def _of_pair(findings: GridFindings, pair: Pair, reference_doubts: Mapping[Any, str]) -> PairVerdict:
    name, block = findings.name(pair), findings.blocks[pair]
    lags = findings.behind(pair, SCORE)
    # Failures of a single pair are listed in the overall verdict, with their reasons.
    told = findings.amiss if len(findings.blocks) > 1 else findings.not_converged
    methods = [str(method) for method in block.index]
    doubts = tuple(f"{method} {amiss}." for method in methods if (amiss := told(pair, method)))
    doubts += tuple(text for method in methods if (text := findings.unsettled(pair, method)))
    if not lags:
        return PairVerdict(
            pair, name, None, "No method finished, so there is nothing to recommend.", "", (), doubts
        )
    best, *_ = lags
    if len(lags) == 1:
        only = f"Only {best} has results, so there is nothing to compare it with."
        return PairVerdict(pair, name, None, only, "", (), doubts, best, (best,))
    level = tuple(method for method, lag in lags.items() if not is_difference(*lag))
    sound = tuple(method for method in level if not findings.amiss(pair, method))
    behind = {method: lag for method, lag in lags.items() if method not in level}
    splits = len(findings.splits(pair, SCORE))
    if sound:
        chosen: str | None = min(sound, key=lambda method: findings.seconds(pair, method))
        exact = None if pair in reference_doubts else _exact_instead(findings, pair, sound, chosen)
        if exact is None:
            headline, because = _choice(findings, pair, lags, level, sound, splits)
        else:
            chosen, headline, because = exact
        why = (
            *_against_best(findings, pair, lags, chosen),
            *_others(findings, pair, level, behind, best, chosen),
            *_gap(findings, pair, chosen, reference_doubts),
        )
    else:
        chosen = None
        headline = "None can be recommended without reserve."
        quickest = min(level, key=lambda method: findings.seconds(pair, method))
        because = (
            f"Of {best}, which alone has the best log score, something is amiss"
            if len(level) == 1
            else f"Of all that are level with the best log score ({listed(list(level))}) something is amiss; "
            f"{quickest} took least time ({duration(findings.seconds(pair, quickest))})"
        ) + ": see what stands against them."
        why = _others(findings, pair, level, behind, best, None)
    return PairVerdict(pair, name, chosen, headline, because, why, doubts, best, level, sound, behind)


def _choice(
    findings: GridFindings,
    pair: Pair,
    lags: Mapping[str, tuple[float, float]],
    level: tuple[str, ...],
    sound: tuple[str, ...],
    splits: int,
) -> tuple[str, str]:
    """The recommended method and the reason."""
    chosen = min(sound, key=lambda method: findings.seconds(pair, method))
    point = findings.blocks[pair].loc[chosen, "kind"] == "point"
    alone = "As a point it has no epistemic uncertainty."
    use = f"For predictions alone, use {chosen}." if point else f"Use {chosen}."
    if len(level) == 1:
        because = f"Its log score is ahead of every other method's by over {IN_WORDS} ({splits} splits)."
        return use, f"{because} {alone}" if point else because
    because = (
        "One split does not tell the methods apart"
        if splits == 1
        else f"These {splits} splits do not tell the methods apart"
        if len(level) == len(lags) and not any(is_difference(*lag, 0.0) for lag in lags.values())
        else f"Over {splits} splits no method predicts better by more than {IN_WORDS}"
    )
    if len(sound) == 1:
        because += (
            "; of those that are level with the best it is the only one of which nothing is known to be amiss"
        )
    else:
        nothing = "" if len(sound) == len(level) else ", and of which nothing is known to be amiss,"
        took = duration(findings.seconds(pair, chosen))
        because += f"; of those that are level{nothing} it took least time ({took} a fit)"
    if not point:
        return use, because + "."
    spread = [method for method in sound if findings.blocks[pair].loc[method, "kind"] != "point"]
    if not spread:
        return use, f"{because}. {alone}"
    second = min(spread, key=lambda method: findings.seconds(pair, method))
    return (
        f"For predictions alone, use {chosen}; for uncertainty about the function, {second}.",
        f"{because}, and {second} ({duration(findings.seconds(pair, second))}) is the quickest of them that has a "
        "spread.",
    )


def _exact_instead(
    findings: GridFindings, pair: Pair, sound: tuple[str, ...], chosen: str
) -> tuple[str, str, str] | None:
    """(reference, headline, because) if the reference is level and cheap and `chosen` is far from it; else None."""
    reference = findings.result.reference
    if reference is None or reference not in sound or reference == chosen:
        return None
    row, took = findings.blocks[pair].loc[chosen], findings.seconds(pair, reference)
    gap, floor, ratio = (
        float(row.get(name, math.nan)) for name in ("gap_mean", "gap_mean_floor", "gap_sd_ratio")
    )
    far = is_far(gap, floor, ratio)
    if not far or took > CHEAP:
        return None
    return (
        reference,
        f"Use {reference}.",
        f"It is the exact reference, it converged, and it took no more than {duration(took)} a fit. {chosen} "
        f"({duration(findings.seconds(pair, chosen))}) is level with the best log score and serves for predictions "
        f"alone, but not for uncertainty about the function: {far}.",
    )


def _against_best(
    findings: GridFindings, pair: Pair, lags: Mapping[str, tuple[float, float]], chosen: str
) -> tuple[str, ...]:
    best, row = next(iter(lags)), findings.blocks[pair].loc[chosen]
    if chosen == best:
        error = float(row[f"{SCORE}_se"])
        with_error = f"{float(row[SCORE]):.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")
        return (f"Its mean log score, {with_error} nats per test row, is the highest.",)
    loss, error = lags[chosen]
    if math.isnan(error):
        return (f"{best} is nominally first, {loss:.3g} nats per test row ahead, of unknown standard error.",)
    return (
        f"{best} is nominally first, by {between(loss, error)} nats per test row; two standard errors allow for a loss "
        f"of up to {loss + STANDARD_ERRORS * error:.2g}.",
    )


def _others(
    findings: GridFindings,
    pair: Pair,
    level: tuple[str, ...],
    behind: Mapping[str, tuple[float, float]],
    best: str,
    chosen: str | None,
) -> tuple[str, ...]:
    found = []
    price = math.nan if chosen is None else findings.seconds(pair, chosen)
    same = []
    for name in level:
        if name == chosen:
            continue
        seconds = findings.seconds(pair, name)
        words = [duration(seconds)] if math.isfinite(seconds) else []
        if math.isfinite(price) and math.isfinite(seconds):
            words.append(relative(seconds, price))
        if amiss := findings.amiss(pair, name):
            words.append(amiss)
        same.append(f"{name} ({'; '.join(words)})" if words else name)
    if same:
        found.append(f"Level with the best{' besides' if chosen else ''}: {listed(same)}.")
    if behind:
        words = [
            f"{name}, which gave no probability to some outcome that occurred"
            if math.isinf(loss)
            else f"{name} by {between(loss, error)}"
            for name, (loss, error) in behind.items()
        ]
        found.append(f"Behind {best} in log score by more than {IN_WORDS}: {listed(words)}.")
    return tuple(found)


def _gap(
    findings: GridFindings, pair: Pair, chosen: str, reference_doubts: Mapping[Any, str]
) -> tuple[str, ...]:
    """How close the method is to the posterior, if there is a reference to measure it by."""
    reference = findings.result.reference
    row = findings.blocks[pair].loc[chosen]
    gap, ratio = (float(row.get(name, math.nan)) for name in ("gap_mean", "gap_sd_ratio"))
    if reference is None or chosen == reference or math.isnan(gap) or pair in reference_doubts:
        return ()
    floor = float(row.get("gap_mean_floor", math.nan))
    noise = "" if math.isnan(floor) else f" (sampling noise alone: {floor:.2f})"
    spread = "it has no spread" if ratio == 0.0 else f"its spread is {ratio:.2f} times that of the posterior"
    return (
        f"Measured by {reference}, its mean function is off by {gap:.2f} epistemic standard deviations{noise}; "
        f"{spread}.",
    )


def _over_all(
    findings: GridFindings, pairs: tuple[PairVerdict, ...]
) -> tuple[str | None, str, str, tuple[str, ...]]:
    compared = [verdict for verdict in pairs if len(verdict.level) + len(verdict.behind) > 1]
    if not pairs:
        return None, "No cell is finished, so there is nothing to recommend.", "", ()
    if len(pairs) == 1:
        (only,) = pairs
        return only.method, only.headline, only.because, only.why
    if not compared:
        return None, "Nowhere have two methods results, so there is nothing to compare.", "", ()
    often = Counter(method for verdict in compared for method in verdict.sound)
    unit = f"{len(compared)} {_pairs_in_words(findings)}"
    why = (*_counts(findings, compared), words_of_ranks(findings.ranks))
    if not often:
        return (
            None,
            "None can be recommended without reserve.",
            f"On none of {unit} is any method level with the best of which nothing is known to be amiss.",
            why,
        )
    most = max(often.values())
    leading = [method for method in findings.result.axes["methods"] if often[method] == most]
    chosen = min(leading, key=lambda method: _typical_seconds(findings, compared, method))
    point = all(
        findings.blocks[verdict.pair].loc[chosen, "kind"] == "point"
        for verdict in compared
        if chosen in verdict.sound
    )
    everywhere = f"all {unit}" if most == len(compared) else f"{most} of {unit}"
    because = f"On {everywhere} it is level with the best log score, and nothing is known to be amiss with it"
    if len(leading) > 1:
        others = listed([method for method in leading if method != chosen])
        because += f", as often as {others}; of these it took least time"
    elif len(often) > 1:
        second = max(count for method, count in often.items() if method != chosen)
        because += f", more often than any other (the next: {second})"
    because += "."
    if most < len(compared):
        elsewhere = [verdict.name for verdict in compared if chosen not in verdict.sound]
        more = [f"{len(elsewhere) - 8} more"] if len(elsewhere) > 8 else []
        because += f" Not so on {listed([*elsewhere[:8], *more])}."
    if not point:
        return chosen, f"Over all, use {chosen}.", because, why
    spread = [
        method
        for method in findings.result.axes["methods"]
        if often[method]
        and any(
            findings.blocks[verdict.pair].loc[method, "kind"] != "point"
            for verdict in compared
            if method in verdict.sound
        )
    ]
    if not spread:
        alone = " As a point it has no epistemic uncertainty."
        return chosen, f"Over all, for predictions alone, use {chosen}.", because + alone, why
    second = min(spread, key=lambda method: (-often[method], _typical_seconds(findings, compared, method)))
    return (
        chosen,
        f"Over all, for predictions alone, use {chosen}; for uncertainty about the function, {second}.",
        f"{because} Of the methods with a spread {second} is level with the best most often, on {often[second]}.",
        why,
    )


def _pairs_in_words(findings: GridFindings) -> str:
    several = [len({pair[place] for pair in findings.blocks}) > 1 for place in (0, 1)]
    return {(False, True): "data sets", (True, False): "models"}.get(
        (several[0], several[1]), "pairs of a model and a data set"
    )


def _counts(findings: GridFindings, compared: Iterable[PairVerdict]) -> tuple[str, ...]:
    """How often each method is level with the best, and by how much at most it is behind otherwise."""
    compared, found = list(compared), []
    for name in findings.result.axes["methods"]:
        there = [verdict for verdict in compared if name in verdict.level or name in verdict.behind]
        if not there:
            continue
        level = sum(name in verdict.level for verdict in there)
        ahead = sum(verdict.level == (name,) for verdict in there)
        text = f"{name}: level with the best on {level} of {len(there)}"
        if ahead:
            text += f", ahead of all others on {ahead} of them"
        lost = {verdict.name: verdict.behind[name] for verdict in there if name in verdict.behind}
        if lost:
            where = max(lost, key=lambda each: lost[each][0])
            loss, error = lost[where]
            far = "it gave no probability to an outcome" if math.isinf(loss) else f"by {between(loss, error)}"
            text += f"; furthest behind on {where}, {far}"
        seconds = _typical_seconds(findings, there, name)
        if math.isfinite(seconds):
            text += f"; {duration(seconds)} a fit (geometric mean)"
        found.append(text + ".")
    return tuple(found)


def _typical_seconds(findings: GridFindings, verdicts: Iterable[PairVerdict], name: str) -> float:
    """The geometric mean over models and data sets, so that the largest data set does not decide alone."""
    found = [
        seconds
        for verdict in verdicts
        if name in findings.blocks[verdict.pair].index
        and 0.0 < (seconds := findings.seconds(verdict.pair, name)) < math.inf
    ]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else math.inf


# --- doubts -----------------------------------------------------------------------------------------------


def _reference_doubts(findings: GridFindings) -> dict[Pair, str]:
    """(model, data) -> why gaps to the reference are not gaps to the posterior there."""
    reference, found = findings.result.reference, {}
    if reference is None:
        return {}
    for pair, block in findings.cells.items():
        ours = block[block["method"] == reference]
        done = ours[ours["failure"] == ""]
        words = []
        if not len(ours):
            words.append("has not been fitted")
        elif len(done) < len(ours):
            words.append(f"failed in {len(ours) - len(done)} of {len(ours)} cells")
        doubts = Counter(word.removeprefix("reference").strip(" ()") for word in done["reference"])
        words += [f"{doubt} in {count} of {len(done)} cells" for doubt, count in doubts.items() if doubt]
        if words:
            found[pair] = f"on {findings.name(pair)}, {' and '.join(words)}"
    return found


def _reference_doubt(findings: GridFindings, doubts: Mapping[Pair, str]) -> str:
    if not doubts:
        return ""
    return (
        f"The reference {findings.result.reference} is not one throughout: {'; '.join(doubts.values())}. The gaps "
        "to it there are not gaps to the posterior, and no verdict rests on them."
    )


def _failures(findings: GridFindings) -> tuple[str, ...]:
    """Which methods failed, how often and why, each reason once."""
    every: Any = findings.result.cells
    found = []
    for name in findings.result.axes["methods"]:
        ours = every[every["method"] == name]
        reasons = Counter(reason for reason in ours["failure"] if reason)
        if not reasons:
            continue
        words = [f"{_short(reason)} ({count})" for reason, count in reasons.most_common(3)]
        more = f"; and {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
        found.append(
            f"{name} failed in {sum(reasons.values())} of {len(ours)} cells: {'; '.join(words)}{more}."
        )
    return tuple(found)


def _short(reason: str, most: int = 200) -> str:
    reason = reason.rstrip(".")
    return reason if len(reason) <= most else f"{reason[: most - 1]}…"


def _missing(findings: GridFindings) -> tuple[str, ...]:
    """What was requested and is missing, by method."""
    result = findings.result
    if not result.missing:
        return ()
    count = Counter(cell.method for cell in result.absent)
    of = (
        f": {listed([f'{name} {count[name]}' for name in result.axes['methods'] if count[name]])}"
        if count
        else ""
    )
    return (
        "This grid was interrupted, or is still being computed: "
        f"{result.missing} of {result.asked} cells have not been computed{of}. The same run goes on with them.",
    )


def _limits(findings: GridFindings) -> tuple[str, ...]:
    from scipy.stats import t

    counts = [len(findings.splits(pair, SCORE)) for pair in findings.blocks]
    if not counts:
        return ()
    found = []
    least, most = min(counts), max(counts)
    if most == 1:
        found.append(
            "There is one split, which has no standard error: nothing is claimed of any difference. More splits, or a "
            "comparison of single rows (ppl-bnn compare), would tell."
        )
    else:
        number = str(most) if least == most else f"{least} to {most}"
        used = max(least, 2)
        chance = 2.0 * float(t.sf(STANDARD_ERRORS, used - 1))
        found.append(
            f"Standard errors are over {number} splits, corrected for the training rows that splits share (Nadeau and "
            f"Bengio 2003). By a t distribution, of pairs of methods that do not differ {chance:.0%} still show a "
            f"difference of more than two of them over {used} splits."
        )
        if least == 1:
            found.append("Where there is one split only, nothing is claimed of any difference.")
    found.append(
        f"Below {MARGIN:g} nats per test row, which is {MARGIN:.0%} of a predictive density, methods are called level, "
        "however certain the difference is."
    )
    if len(findings.result.axes["seeds"]) > 1:
        found.append(
            "Seeds are averaged within a split; how much they differ is in the cells, not in the errors."
        )
    found.append(
        "Seconds are those of a fit without compilation, as the cells were computed, where several at once may have "
        "shared a machine."
    )
    return tuple(found)
