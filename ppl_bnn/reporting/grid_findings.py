"""The findings of a report on a grid: paired differences over splits, problems of cells, and the verdict.

Seeds are averaged within a split. Differences have the corrected standard error of `GridResult.table`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from textwrap import shorten
from typing import Any

from ppl_bnn.diagnostics.importance import K_LIMIT
from ppl_bnn.evaluation.comparison.summary import STANDARD_ERRORS, Lags, best_first, between, duration, listed
from ppl_bnn.evaluation.grid.result import LARGER_IS_BETTER, GridResult, best_method, doubts_of
from ppl_bnn.prediction.reliability import Event, Transform
from ppl_bnn.reporting import verdict
from ppl_bnn.reporting.verdict import SCORE, UnitBlock, Verdict, judge

Pair = tuple[str, str]
# Largest number of models and data that a sentence names.
MOST_NAMED = 8
# SciPy calls the p value of Friedman's test reliable for more than ten blocks.
FEWEST_BLOCKS, FEWEST_METHODS = 11, 3
SIGNIFICANCE = 0.05


class GridBlock(UnitBlock):
    """The methods of a grid on one model and one data set, compared over splits."""

    fit = " a fit"
    # Cells of one process share the compilation.
    timed = ("run_seconds",)

    def __init__(self, found: GridFindings, pair: Pair, table: Any, title: str):
        self.found, self.pair, self.table, self.title = found, pair, table, title
        cells: Any = found.result.cells
        self.cells = cells[(cells["model"] == pair[0]) & (cells["data"] == pair[1])]
        self.labels = {"model": pair[0], "data": pair[1]}
        self.reference = found.result.reference
        count = len(self.splits(SCORE))
        self.units = f"{count} splits" if count != 1 else "one split"

    def splits(self, score: str) -> Any:
        """Split x method, where a score exists."""
        every = self.found.by_split(score)
        model, data = (every.index.get_level_values(level) for level in ("model", "data"))
        chosen = every[(model == self.pair[0]) & (data == self.pair[1])]
        return chosen.droplevel(["model", "data"]).dropna(axis=1, how="all")

    def best(self, score: str) -> str | None:
        """The method with the best mean, among those with the most splits."""
        splits = self.splits(score)
        return best_method(splits, LARGER_IS_BETTER[score]) if len(splits.columns) else None

    def lags(self, score: str, to: str = "best") -> Lags:
        """See `UnitBlock.lags`; methods that have no split in common with the best one are left out.

        With `to` = "reference" they are behind the reference, which is then the first; none without its score.
        """
        base = self.best(score) if to == "best" else self.reference
        sign, lags = -1.0 if LARGER_IS_BETTER[score] else 1.0, {}
        for name in map(str, self.table.index):
            lag, error = (self.number(name, f"{score}_to_{to}{ending}") for ending in ("", "_se"))
            if name != base and not math.isnan(lag):
                lags[name] = (sign * lag, error)
        return best_first(str(base), lags) if base in self.splits(score).columns else {}

    def paired(self, score: str, first: str, second: str) -> int:
        known = self.splits(score).notna()
        return int((known[first] & known[second]).sum())

    def cells_of(self, name: str) -> tuple[Any, Any]:
        """The cells of a method, and those of them that have a result."""
        cells = self.cells[self.cells["method"] == name]
        return cells, cells[cells["failure"] == ""]

    def problem(self, name: str) -> str:
        return " and ".join(filter(None, (self.failed(name), self.not_converged(name))))

    def failed(self, name: str) -> str:
        """How many fits of a method failed, as the end of a sentence; "" if none did."""
        cells, done = self.cells_of(name)
        count = len(cells) - len(done)
        return f"failed in {count} of {len(cells)} cells" if count else ""

    def not_converged(self, name: str) -> str:
        """How many fits of a method did not converge, as the end of a sentence; "" if all did."""
        _, done = self.cells_of(name)
        bad = (done["kind"] == "chains") & (done["converged"] != "yes") | (done["converged"] == "no")
        return f"has not verifiably converged in {bad.sum()} of {len(done)} cells" if bad.any() else ""

    def doubts(self) -> Iterator[str]:
        # Failures of a single pair are listed in the overall verdict, with their reasons.
        problem = self.problem if len(self.found.blocks) > 1 else self.not_converged
        names = [str(name) for name in self.table.index]
        yield from (f"{name} {text}." for name in names if (text := problem(name)))
        # Undecided diagnostics do not rule out a recommendation: an approximation may predict well and be far from the
        # posterior.
        for name in names if "k_hat" in self.cells else ():
            _, done = self.cells_of(name)
            hats = done.loc[done["kind"] == "iid", "k_hat"].dropna()
            if count := int((hats > K_LIMIT).sum()):
                reason = f"Pareto k-hat is above {K_LIMIT} in {count} of {len(hats)} cells"
                yield f"{name} {verdict.UNDECIDED_FIT}: {reason}."

    @cached_property
    def reference_doubt(self) -> str:
        """Why gaps to the reference are not gaps to the posterior here, as the end of a sentence."""
        if self.reference is None:
            return ""
        cells, done = self.cells_of(self.reference)
        words = [self.failed(self.reference) if len(cells) else "has not been fitted"]
        doubts = doubts_of(done["reference"])
        words += [f"{doubt} in {count} of {len(done)} cells" for doubt, count in doubts.items()]
        words = list(filter(None, words))
        return f"on {self.title}, {' and '.join(words)}" if words else ""

    @cached_property
    def calibrations(self) -> tuple[dict[str, Transform], dict[str, Event]]:
        """Calibration of each method over the test rows of all cells: transforms for numbers, events for classes."""
        transforms, events = {}, {}
        for name in map(str, self.table.index):
            cells, _ = self.cells_of(name)
            arrays = [self.found.result.arrays(key) for key in cells["key"]]
            if of_numbers := [Transform.from_arrays(each) for each in arrays if "pit" in each]:
                transforms[name] = Transform.joined(of_numbers)
            if of_classes := [Event.from_arrays(each) for each in arrays if "event" in each]:
                events[name] = Event.joined(of_classes)
        return transforms, events


class GridFindings:
    """The findings on the result of a grid; `by_split(score)` is that of the result, computed once."""

    pairing = "over the same splits, corrected for the training rows that splits share"
    time = "mean wall time of a fit, without compilation"
    no_calibration = "No cell has stored where its test targets are in its predictions."

    def __init__(self, result: GridResult):
        self.result, self.reference, self.table = result, result.reference, result.table()
        self.by_split: Any = cache(result.by_split)

    @cached_property
    def blocks(self) -> dict[Pair, GridBlock]:
        """(model, data) -> its block, with a title without the part common to all."""
        if not len(self.table):
            return {}
        tables: Any = self.table.groupby(level=["model", "data"], sort=False)
        found = {(str(model), str(data)): part.droplevel(["model", "data"]) for (model, data), part in tables}
        models, data = _several(found)
        titles = {pair: " on ".join(pair) if models is data else pair[0 if models else 1] for pair in found}
        return {pair: GridBlock(self, pair, part, titles[pair]) for pair, part in found.items()}

    @property
    def kind_of_blocks(self) -> str:
        models, data = _several(self.blocks)
        return "pairs of a model and a data set" if models is data else "models" if models else "data sets"


def _several(pairs: Iterable[Pair]) -> Iterator[bool]:
    """Whether there are several models, and whether there are several data sets."""
    return (len(set(labels)) > 1 for labels in zip(*pairs, strict=True))


# --- mean ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods by log score over blocks, 1 being the best, made by `mean_ranks`.

    `mean` is sorted; `unit` names a block; `left_out` are methods with too many missing results, and `dropped` counts
    blocks without a result of another method; `statistic` and `p` are Friedman's, or NaN for the reason `no_test`;
    `critical` is Nemenyi's critical difference at 5 %.
    """

    mean: Mapping[str, float]
    unit: str
    blocks: int
    left_out: tuple[str, ...]
    dropped: int
    statistic: float = math.nan
    p: float = math.nan
    critical: float = math.nan
    no_test: str = ""


def mean_ranks(findings: GridFindings) -> Ranks:
    """Rank methods by log score within each block, and test whether the ranks differ (Demsar 2006, JMLR 7).

    A block is a model on a data set, if there are more than ten, else a split of one; p is then too small, as splits
    share rows. Blocks without a result of some method are dropped. If these are more than half, the methods with the
    most missing results are left out first.

    Friedman's test needs three methods and more than ten blocks. Mean ranks of k methods over n blocks differ at 5 % by
    more than q sqrt(k (k + 1) / (6 n)), q the quantile of the studentised range for k groups over sqrt(2) (Nemenyi).
    """
    frame = findings.by_split(SCORE)
    left_out: list[str] = []
    if frame.empty:
        return Ranks({}, "splits", 0, (), 0, no_test="there are none")
    while len(frame.columns) > 2 and 2 * len(frame.dropna()) < len(frame):
        worst = str(frame.isna().sum().idxmax())
        left_out.append(worst)
        frame = frame.drop(columns=worst)
    whole = frame.dropna()
    means = whole.groupby(level=["model", "data"], sort=False).mean()
    over_pairs = len(means) >= FEWEST_BLOCKS
    values = means if over_pairs else whole
    ranks = values.rank(axis=1, ascending=False)
    mean = {str(name): float(rank) for name, rank in ranks.mean().sort_values(kind="stable").items()}
    unit = findings.kind_of_blocks if over_pairs else "splits"
    found = Ranks(mean, unit, len(values), tuple(left_out), len(frame) - len(whole))
    methods = len(ranks.columns)
    if methods < FEWEST_METHODS or len(values) < FEWEST_BLOCKS:
        takes = f"a test takes {FEWEST_METHODS} methods and {FEWEST_BLOCKS} blocks"
        return replace(found, no_test=f"{takes}, and there are {methods} and {len(values)}")
    if bool((ranks.nunique(axis=1) == 1).all()):
        return replace(found, no_test="all methods are tied in every block")
    from scipy.stats import friedmanchisquare, studentized_range

    tested: Any = friedmanchisquare(*(values[name].to_numpy() for name in values.columns))
    quantile = float(studentized_range.ppf(1.0 - SIGNIFICANCE, methods, math.inf)) / math.sqrt(2.0)
    critical = quantile * math.sqrt(methods * (methods + 1) / (6.0 * len(values)))
    return replace(found, statistic=float(tested.statistic), p=float(tested.pvalue), critical=critical)


def words_of_ranks(ranks: Ranks) -> str:
    """The result of the test and its assumptions, in words."""
    if not ranks.mean:
        return "No method has a log score."
    over = f"{ranks.blocks} {ranks.unit}"
    if ranks.no_test:
        text = f"Mean ranks over {over} are not tested: {ranks.no_test}."
    else:
        p = "p < 0.001" if ranks.p < 0.001 else f"p = {ranks.p:.3f}"
        differ = ranks.p < SIGNIFICANCE
        result = "the methods do not all rank alike" if differ else "no difference is established"
        text = f"Friedman's test of the ranks over {over}: chi-squared {ranks.statistic:.3g}, {p}; {result}."
        if ranks.unit == "splits":
            text += " It assumes independent splits, but splits share rows: p is smaller than it should be."
    if ranks.left_out:
        text += f" Left out, with too few results: {listed(list(ranks.left_out))}."
    if ranks.dropped:
        several = "s" if ranks.dropped > 1 else ""
        text += f" Not counted: {ranks.dropped} block{several} in which a method has no result."
    return text


# --- the verdict ------------------------------------------------------------------------------------------


def grid_verdict(found: GridFindings) -> Verdict:
    """Which method to use for each model and data set (see `verdict.judge`), and overall.

    Overall: the method most often level with the best and without a known problem; of several, the fastest.
    """
    judged = {block: judge(block) for block in found.blocks.values()}
    parts = tuple(judged.values())
    whole = parts[0] if len(parts) == 1 else _over_all(found, judged)
    doubts = (*_failures(found), *_missing(found), *(whole.doubts if len(parts) == 1 else ()))
    where = "; ".join(part.reference_doubt for part in parts if part.reference_doubt)
    reference_doubt = (
        f"The reference {found.reference} is not valid everywhere: {where}. The gaps to it there are not gaps to the "
        "posterior, and no verdict uses them."
    )
    reference_doubt = reference_doubt if where else ""
    whole = replace(whole, parts=parts, doubts=doubts, reference_doubt=reference_doubt)
    return replace(whole, limits=tuple(_limits(found)))


def _over_all(found: GridFindings, judged: Mapping[GridBlock, Verdict]) -> Verdict:
    compared = {block: part for block, part in judged.items() if len(part.lags) > 1}
    if not compared:
        headline = "Two methods never have results on the same data, so there is nothing to compare."
        return Verdict(headline if judged else "No cell is finished, so there is nothing to recommend.")
    often = Counter(method for part in compared.values() for method in part.sound)
    unit = f"{len(compared)} {found.kind_of_blocks}"
    why = (*_counts(found, compared), words_of_ranks(mean_ranks(found)))
    if not often:
        because = f"On none of {unit} is a method without a known problem level with the best."
        return Verdict("No method can be recommended yet.", because, why=why)

    def is_point(method: str) -> bool:
        return all(block.is_point(method) for block, part in compared.items() if method in part.sound)

    def rank(method: str) -> tuple[float, float]:
        return -often[method], _typical_seconds(compared, method)

    methods = [method for method in found.result.axes["methods"] if often[method]]
    chosen, most = min(methods, key=rank), max(often.values())
    leading = [method for method in methods if often[method] == most]
    everywhere = f"all {unit}" if most == len(compared) else f"{most} of {unit}"
    because = f"On {everywhere} it is level with the best log score and has no known problem"
    if len(leading) > 1:
        others = listed([method for method in leading if method != chosen])
        because += f", as often as {others}; of these it was the fastest"
    elif len(often) > 1:
        because += f", more often than any other (the next: {often.most_common(2)[1][1]})"
    because += "."
    if most < len(compared):
        elsewhere = [block.title for block, part in compared.items() if chosen not in part.sound]
        more = [f"{len(elsewhere) - MOST_NAMED} more"] if len(elsewhere) > MOST_NAMED else []
        because += f" Exceptions: {listed([*elsewhere[:MOST_NAMED], *more])}."
    headline = f"Over all, use {chosen}."
    if is_point(chosen):
        second = min((method for method in methods if not is_point(method)), key=rank, default=None)
        spread = f"Of the methods with a spread {second} is level with the best most often, on {often[str(second)]}."
        because += f" {spread if second else verdict.NO_SPREAD}"
        headline = f"Over all, f{verdict.for_predictions(chosen, second)[1:]}"
    return Verdict(headline, because, chosen, why)


def _counts(found: GridFindings, compared: Mapping[GridBlock, Verdict]) -> Iterator[str]:
    """How often each method is level with the best, and by how much at most it is behind otherwise."""
    for name in found.result.axes["methods"]:
        there = {block: part for block, part in compared.items() if name in part.lags}
        if not there:
            continue
        level = sum(name in part.level for part in there.values())
        ahead = sum(part.level == (name,) for part in there.values())
        text = f"{name}: level with the best on {level} of {len(there)}"
        text += f", ahead of all others on {ahead} of them" if ahead else ""
        if lost := {part.title: part.lags[name] for part in there.values() if name not in part.level}:
            where = max(lost, key=lambda title: lost[title][0])
            lag = lost[where]
            far = "it gave no probability to an outcome" if math.isinf(lag[0]) else f"by {between(*lag)}"
            text += f"; furthest behind on {where}, {far}"
        seconds = _typical_seconds(there, name)
        yield text + (f"; {duration(seconds)} a fit (geometric mean)." if math.isfinite(seconds) else ".")


def _typical_seconds(blocks: Iterable[GridBlock], name: str) -> float:
    """The geometric mean over models and data sets, so that the largest data set does not decide alone."""
    there = [block for block in blocks if name in block.table.index]
    found = [seconds for block in there if 0.0 < (seconds := block.seconds(name)) < math.inf]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else math.inf


# --- doubts -----------------------------------------------------------------------------------------------


def _failures(found: GridFindings) -> Iterator[str]:
    """Which methods failed, how often and why, each reason once."""
    every: Any = found.result.cells
    for name in found.result.axes["methods"]:
        cells = every[every["method"] == name]
        reasons = Counter(reason for reason in cells["failure"] if reason)
        if reasons:
            words = [
                f"{shorten(reason.rstrip('.'), 200, placeholder='…')} ({count})"
                for reason, count in reasons.most_common(3)
            ]
            more = f"; and {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
            yield f"{name} failed in {reasons.total()} of {len(cells)} cells: {'; '.join(words)}{more}."


def _missing(found: GridFindings) -> Iterator[str]:
    """How many cells have not been computed, by method."""
    result = found.result
    if result.missing:
        count = Counter(cell.method for cell in result.absent)
        names = [f"{name} {count[name]}" for name in result.axes["methods"] if count[name]]
        yield (
            "This grid was interrupted, or is still being computed: "
            f"{result.missing} of {result.asked} cells have not been computed{': ' if names else ''}{listed(names)}. "
            "Running it again computes them."
        )


def _limits(found: GridFindings) -> Iterator[str]:
    """What the numbers of a grid cannot show."""
    from scipy.stats import t

    counts = [len(block.splits(SCORE)) for block in found.blocks.values()]
    if not counts:
        return
    least, most = min(counts), max(counts)
    if most == 1:
        yield (
            "There is one split, so there is no standard error, and no difference is established. More splits, or a "
            "comparison over test rows (ppl-bnn compare), would show more."
        )
    else:
        number = str(most) if least == most else f"{least} to {most}"
        used = max(least, 2)
        chance = 2.0 * float(t.sf(STANDARD_ERRORS, used - 1))
        yield (
            f"Standard errors are over {number} splits, corrected for the training rows that splits share (Nadeau and "
            f"Bengio 2003). By a t distribution, {chance:.0%} of pairs of methods that do not differ still show a "
            f"difference of more than two standard errors over {used} splits."
        )
        if least == 1:
            yield "Where there is only one split, no difference is established."
    yield verdict.MARGIN_LIMIT
    if len(found.result.axes["seeds"]) > 1:
        yield "Seeds are averaged within a split; their differences are in the cells, not in the errors."
    yield (
        "Times are those of a fit without compilation, as the cells were computed, possibly several at once on a "
        "machine."
    )
