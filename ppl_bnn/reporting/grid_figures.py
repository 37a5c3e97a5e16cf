"""Figures of the result of a grid: one function for each, from a `GridResult` to a matplotlib Figure.

They are made of panels (`reporting.panels`), one for each model and data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ppl_bnn.errors import InputError, message, unknown_name
from ppl_bnn.grid_result import LARGER_IS_BETTER, GridResult
from ppl_bnn.reporting.figures import BLUE, GREY
from ppl_bnn.reporting.grid_verdict import SCORE, GridFindings, Pair, Ranks, words_of_ranks
from ppl_bnn.reporting.panels import (
    Panel,
    Picture,
    cost_drawer,
    forest_panel,
    frame_of,
    height_for,
    names_below,
    plain_axes,
    together,
    with_error,
)
from ppl_bnn.reporting.summary import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# --- accuracy against cost --------------------------------------------------------------------------------


def cost_figure(result: GridResult) -> Figure:
    """The mean log score of each method against the seconds of a fit, with the Pareto front: a panel for each model and
    data set."""
    return together(cost(GridFindings(result)))


def cost(found: GridFindings) -> Picture:
    panels, rows = [], []
    for pair, block in found.blocks.items():
        lags, best = found.behind(pair, SCORE), found.best(pair, SCORE)
        if best is None:
            continue
        highest = float(block.loc[best, SCORE])
        points = []
        for name, (loss, error) in lags.items():
            seconds = found.seconds(pair, name)
            points.append((name, seconds, highest - loss, error))
            mean, its_error = float(block.loc[name, SCORE]), float(block.loc[name, f"{SCORE}_se"])
            rows.append(
                {
                    **_labels(pair, name),
                    "seconds": seconds,
                    "log_score": mean,
                    "standard_error": its_error,
                    "behind_best": loss,
                    "standard_error_of_difference": error,
                }
            )
        usable = [each for each in points if 0.0 < each[1] < math.inf and math.isfinite(each[2])]
        if not usable:
            continue
        words = f"{found.name(pair)}: mean log score in nats per row, against seconds of a fit: " + "; ".join(
            f"{name} {duration(seconds)}, {value:.3f}"
            + (f" (behind {best} by {with_error(highest - value, error)})" if name != best else "")
            for name, seconds, value, error in usable
        )
        lost = [each[0] for each in points if each not in usable]
        lost += [str(name) for name in block.index if name not in lags]
        if lost:
            words += f". Without a place on these axes: {', '.join(lost)}"
        heading = "mean log score\n(nats per row; better is up)"
        draw = cost_drawer(usable, heading, smaller=False, time="run time of a fit, mean")
        panels.append(Panel(found.name(pair), draw, words + "."))
    return Picture(
        "cost",
        "Accuracy against cost",
        "The mean log score over splits against the mean wall time of a fit without compilation, on a logarithmic "
        "axis. Bars are two standard errors of the paired difference to the best, corrected for shared training rows; "
        "a method that lacks splits is drawn as far below the best as it is on those that both have. The line joins "
        "those that no other method beats in both; where bars reach it, the order is not established.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method has both a finite score and a time.",
    )


def _labels(pair: Pair, name: str) -> dict[str, str]:
    return {"model": pair[0], "data": pair[1], "method": name}


# --- paired differences -----------------------------------------------------------------------------------


def differences_figure(result: GridResult, to: str = "best", score: str = SCORE) -> Figure:
    """Differences of a score, paired over splits, with two standard errors: a forest plot for each model and data set.

    to: "best", the method with the best mean there, or "reference", that of the grid. score: a column that is compared
    (`grid_result.LARGER_IS_BETTER`); below zero is always worse.

    Raises
    ------
    InputError: another `to`, or a result without a reference. UnknownNameError: another score.
    """
    if to not in ("best", "reference"):
        raise InputError("to: " + message("'best' or 'reference'", repr(to), "to='best'"))
    if score not in LARGER_IS_BETTER:
        raise unknown_name("score", score, LARGER_IS_BETTER)
    if to == "reference" and result.reference is None:
        advice = "GridResult.load(folder, reference='nuts')"
        raise InputError("to: " + message("a result with a reference", "one without", advice))
    return together(_differences(GridFindings(result), to, score))


def differences(found: GridFindings) -> Picture:
    return _differences(found, "best", SCORE)


def differences_to_reference(found: GridFindings) -> Picture:
    return _differences(found, "reference", SCORE)


def _differences(found: GridFindings, to: str, score: str) -> Picture:
    reference = found.result.reference
    key = "differences" if to == "best" else "to_reference"
    other = "the best method" if to == "best" else f"{reference}"
    title = f"Differences to {'the best' if to == 'best' else 'the reference'}"
    if to == "reference" and reference is None:
        return Picture(key, title, "", missing="No reference was named.")
    sign = 1.0 if LARGER_IS_BETTER[score] else -1.0
    called = score.replace("_", " ")
    panels, rows = [], []
    for pair, block in found.blocks.items():
        base = found.best(pair, score) if to == "best" else reference
        if base not in block.index or score not in block or math.isnan(float(block.loc[base, score])):
            continue
        entries = [(str(base), 0.0, 0.0, False)]
        splits = found.splits(pair, score)
        for name in splits.columns:
            difference = sign * float(block.loc[name].get(f"{score}_to_{to}", math.nan))
            if name == base or math.isnan(difference):
                continue
            few = bool((splits[name].isna() & splits[base].notna()).any())
            error = float(block.loc[name, f"{score}_to_{to}_se"])
            entries.append((str(name), difference, error, few))
        if len(entries) < 2:
            continue
        entries.sort(key=lambda entry: -entry[1])
        rows += [
            {
                **_labels(pair, name),
                "score": score,
                "to": str(base),
                "difference": difference,
                "standard_error": error,
                "splits": int((splits[name].notna() & splits[base].notna()).sum()),
            }
            for name, difference, error, _ in entries
        ]
        theirs = f"that of {base if to == 'reference' else 'the best'}"
        label = f"{called} minus {theirs}" if sign > 0.0 else f"{theirs} minus {called}"
        label += ",\nmean over splits"
        hollow = f"not on all splits of {'the best' if to == 'best' else base}"
        panels.append(forest_panel(found.name(pair), entries, label, hollow))
    return Picture(
        key,
        title,
        f"Mean differences of {called} to {other}, taken split by split, with two standard errors that are corrected "
        "for shared training rows; below zero is worse. A bar that reaches the dashed line is no difference that these "
        "splits establish. With one split there are no bars.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "There are no two methods with results on the same split.",
    )


# --- ranks ------------------------------------------------------------------------------------------------


def ranks_figure(result: GridResult) -> Figure:
    """Mean ranks of methods by log score over data sets and splits, with half of Nemenyi's critical difference on
    either side where a Friedman test can be made (`reporting.grid_verdict.mean_ranks`)."""
    return together(ranks(GridFindings(result)))


def ranks(found: GridFindings) -> Picture:
    made = found.ranks
    missing = "" if len(made.mean) > 1 and made.blocks else "There are no two methods to rank in one block."
    known = math.isfinite(made.critical)
    said = words_of_ranks(made)
    means = "; ".join(f"{name} {rank:.2f}" for name, rank in made.mean.items())
    bars = f" Two bars that do not meet are {made.critical:.2f} ranks apart or more, which is a difference at 5 %."
    title = f"Over {made.blocks} {made.unit}"
    panel = Panel(
        title,
        lambda axes: _draw_ranks(axes, made),
        f"Mean ranks by log score, 1 is best, over {made.blocks} {made.unit}: {means}.{bars if known else ''}",
        height_for(len(made.mean)),
    )
    return Picture(
        "ranks",
        "Mean ranks",
        "Methods ranked by log score within each block, 1 being the best, and averaged. "
        + (
            "Bars are half of the critical difference (Nemenyi, 5 %) on either side: methods whose bars meet are not "
            "told apart. "
            if known
            else ""
        )
        + said
        + " Ranks say who wins how often, and nothing of by how much.",
        () if missing else (panel,),
        frame_of({"method": name, "mean_rank": rank} for name, rank in made.mean.items()),
        missing,
    )


def _draw_ranks(axes: Axes, made: Ranks) -> None:
    half = made.critical / 2.0 if math.isfinite(made.critical) else 0.0
    if half:
        for place, rank in enumerate(made.mean.values()):
            axes.hlines(place, rank - half, rank + half, color=BLUE, linewidth=1.6, alpha=0.6, zorder=2)
        first = next(iter(made.mean.values())) + half
        axes.axvline(
            first, color=GREY, linewidth=1.0, linestyle="--", zorder=1, label="end of the bar of the first"
        )
    axes.plot(list(made.mean.values()), range(len(made.mean)), "o", color=BLUE, markersize=6.0, zorder=3)
    axes.plot(
        [], [], "o-" if half else "o", color=BLUE, markersize=6.0,
        label="mean rank, half the critical difference" if half else "mean rank",
    )  # fmt: skip
    low, high = 1.0 - max(half, 0.2), len(made.mean) + max(half, 0.2)
    axes.set_xlim(low, high)
    axes.set_xticks(range(1, len(made.mean) + 1))
    names_below(axes, list(made.mean))
    axes.set_xlabel("mean rank (1 is best)")
    plain_axes(axes)


# --- all of them ------------------------------------------------------------------------------------------

PICTURES: Mapping[str, Callable[[GridFindings], Picture]] = {
    "cost": cost,
    "differences": differences,
    "to_reference": differences_to_reference,
    "ranks": ranks,
}
