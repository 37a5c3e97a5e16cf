"""Mean ranks of methods over blocks, with the tests of Friedman and Nemenyi."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ppl_bnn.evaluation.comparison.summary import listed
from ppl_bnn.reporting.verdict import SCORE

if TYPE_CHECKING:
    from ppl_bnn.reporting.grid_findings import GridFindings


# SciPy calls the p value of Friedman's test reliable for more than ten blocks.
FEWEST_BLOCKS, FEWEST_METHODS = 11, 3
SIGNIFICANCE = 0.05


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
    several = len({model for model, _ in findings.blocks}) > 1
    pairs = "pairs of a model and a data set" if several else "data sets"
    ranks = values.rank(axis=1, ascending=False)
    mean = {str(name): float(rank) for name, rank in ranks.mean().sort_values(kind="stable").items()}
    unit = pairs if over_pairs else "splits"
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
