"""Figures of the result of a grid: one function for each, from a `GridResult` to a matplotlib Figure.

They are made of panels (`comparison.panels`), one for each model and data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ppl_bnn.core.errors import InputError, unknown_name
from ppl_bnn.core.names import for_figure
from ppl_bnn.diagnostics.importance import K_LIMIT
from ppl_bnn.evaluation.comparison.drawing import BLUE, GREY
from ppl_bnn.evaluation.comparison.panels import (
    Panel,
    Picture,
    cost_drawer,
    draw_coverages,
    draw_gaps,
    draw_marks_inside,
    draw_ratios,
    draw_transforms,
    forest_panel,
    frame_of,
    height_for,
    line_of,
    names_below,
    plain_axes,
    together,
    with_error,
)
from ppl_bnn.evaluation.comparison.summary import duration, listed
from ppl_bnn.evaluation.grid.result import LARGER_IS_BETTER, GridResult
from ppl_bnn.prediction.reliability import LEVELS
from ppl_bnn.reporting.grid_verdict import GridFindings, Pair
from ppl_bnn.reporting.ranks import SCORE, Ranks, words_of_ranks

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.prediction.reliability import Transform


# --- accuracy against cost --------------------------------------------------------------------------------


def cost_figure(result: GridResult) -> Figure:
    """Mean log score of each method against the seconds of a fit, with the Pareto front.

    There is a panel for each model and data set.

    Parameters
    ----------
    result : GridResult
        The result of a grid.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(cost(GridFindings(result)))


def cost(found: GridFindings) -> Picture:
    """The picture of `cost_figure`."""
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

    Below zero is always worse.

    Parameters
    ----------
    result : GridResult
        The result of a grid.
    to : {"best", "reference"}
        What the differences are taken to: the method with the best mean there, or the reference of the grid.
    score : str
        A column that is compared (`grid_result.LARGER_IS_BETTER`).

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    InputError
        Another `to`, or a result without a reference.
    UnknownNameError
        Another score.
    """
    if to not in ("best", "reference"):
        raise InputError.of("to", "'best' or 'reference'", repr(to), "to='best'")
    if score not in LARGER_IS_BETTER:
        raise unknown_name("score", score, LARGER_IS_BETTER)
    if to == "reference" and result.reference is None:
        advice = "GridResult.load(folder, reference='nuts')"
        raise InputError.of("to", "a result with a reference", "one without", advice)
    return together(_differences(GridFindings(result), to, score))


def differences(found: GridFindings) -> Picture:
    """The picture of `differences_figure` to the best method."""
    return _differences(found, "best", SCORE)


def differences_to_reference(found: GridFindings) -> Picture:
    """The picture of `differences_figure` to the reference."""
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
        made = _paired(found, pair, str(base), to, score)
        if len(made) < 2:
            continue
        rows += made
        entries = [(row["method"], row["difference"], row["standard_error"], row.pop("few")) for row in made]
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


def _paired(found: GridFindings, pair: Pair, base: str, to: str, score: str) -> list[dict[str, Any]]:
    """Difference of each method to `base` (above zero is better), its standard error and number of splits, best first.

    "few": whether `base` has more splits.
    """
    block, splits = found.blocks[pair], found.splits(pair, score)
    sign = 1.0 if LARGER_IS_BETTER[score] else -1.0
    rows = []
    for name in splits.columns:
        difference, error = 0.0, 0.0
        if name != base:
            difference = sign * float(block.loc[name].get(f"{score}_to_{to}", math.nan))
            error = float(block.loc[name].get(f"{score}_to_{to}_se", math.nan))
        if math.isnan(difference):
            continue
        rows.append(
            {
                **_labels(pair, str(name)),
                "score": score,
                "to": base,
                "difference": difference,
                "standard_error": error,
                "splits": int((splits[name].notna() & splits[base].notna()).sum()),
                "few": bool((splits[name].isna() & splits[base].notna()).any()),
            }
        )
    return sorted(rows, key=lambda row: (-row["difference"], row["method"] != base))


# --- expected log predictive density ----------------------------------------------------------------------


def elpd_figure(result: GridResult) -> Figure:
    """Differences of the leave-one-out ELPD to the best method, paired over splits, with two standard errors.

    There is a forest plot for each model and data set, with hollow marks if Pareto k shows that the value is not
    reliable.

    Parameters
    ----------
    result : GridResult
        The result of a grid.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(elpd(GridFindings(result)))


def elpd(found: GridFindings) -> Picture:
    """The picture of `elpd_figure`."""
    score, panels, rows = "elpd_loo", [], []
    for pair, block in found.blocks.items():
        base = found.best(pair, score)
        made = [] if base is None else _paired(found, pair, base, "best", score)
        if len(made) < 2:
            continue
        for row in made:
            del row["few"]
            row["pareto_k"] = float(block.loc[row["method"]].get("pareto_k_loo", math.nan))
        rows += made
        entries = [
            (row["method"], row["difference"], row["standard_error"], not row["pareto_k"] <= K_LIMIT)
            for row in made
        ]
        label = "ELPD minus that of the best, nats\nover the training rows, mean over splits"
        panels.append(forest_panel(found.name(pair), entries, label, "a Pareto k above 0.7"))
    return Picture(
        "elpd",
        "Expected log predictive density",
        "Mean differences of the leave-one-out ELPD of the training rows (PSIS, summed) to the best method, taken "
        "split by split, with two corrected standard errors; below zero is worse. Hollow: in some cell Pareto k is "
        "above 0.7, and ELPD is not to be relied on.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "There are no two methods with a leave-one-out ELPD on the same split.",
    )


# --- calibration ------------------------------------------------------------------------------------------


def calibration_figure(result: GridResult) -> Figure:
    """Calibration of the methods, for each model and data set.

    For classes, a reliability diagram. For numbers, the coverage of central intervals at every level and the
    distribution of the probability integral transform, minus their values under calibration.

    Parameters
    ----------
    result : GridResult
        The result of a grid.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(calibration(GridFindings(result)))


def calibration(found: GridFindings) -> Picture:
    """The picture of `calibration_figure`."""
    panels, rows = [], []
    for pair in found.blocks:
        transforms, events = found.calibrations(pair)
        if transforms:
            panels += _of_numbers(found.name(pair), transforms)
            rows += [
                {**_labels(pair, name), "rows": len(each.pit)}
                | {f"coverage_{100 * level:.0f}": each.covered(level) for level in LEVELS}
                for name, each in transforms.items()
            ]
        if events:
            binned = {name: each.binned() for name, each in events.items()}
            panels.append(_of_classes(found.name(pair), binned))
            rows += [
                {**_labels(pair, name), "probability": a, "share": b, "rows": int(c)}
                for name, each in binned.items()
                for a, b, c in zip(each["probability"], each["share"], each["rows"], strict=True)
            ]
    return Picture(
        "calibration",
        "Calibration",
        "Of numbers, by how much the share of test targets inside central intervals differs from what the interval "
        "promises (below zero intervals are too narrow; those of counts end at whole numbers, and hold more by right), "
        "and the same for the share of targets below each predicted quantile (PIT), which shows predictions that are "
        "too low or too high. Of classes, how often what was given a probability came true. The test rows of all "
        "splits and seeds together: the grey band holds a calibrated method in 90 % of cases, level by level, if all "
        "of these rows were independent, and is too narrow where splits or seeds share them.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No cell keeps where its test targets fell in its predictions.",
    )


def _of_numbers(name: str, transforms: Mapping[str, Transform]) -> list[Panel]:
    counted = any(each.of_counts for each in transforms.values())
    shares = "; ".join(
        f"{method} {', '.join(f'{each.covered(level):.0%}' for level in LEVELS)}"
        for method, each in transforms.items()
    )
    levels = listed([f"{100 * level:.0f}" for level in LEVELS])
    quarters = "; ".join(
        f"{method} {', '.join(f'{float((each.pit <= level).mean()):.0%}' for level in (0.25, 0.5, 0.75))}"
        for method, each in transforms.items()
    )
    return [
        Panel(
            f"{name}: coverage",
            lambda axes: draw_coverages(axes, transforms, counted),
            f"{name}: share of test targets in central intervals of {levels} %: {shares}.",
        ),
        Panel(
            f"{name}: {'randomised ' if counted else ''}PIT",
            lambda axes: draw_transforms(axes, transforms),
            f"{name}: share of test targets below the predicted quartiles, 25, 50 and 75 %: {quarters}.",
        ),
    ]


def _of_classes(name: str, binned: Mapping[str, Mapping[str, np.ndarray]]) -> Panel:
    def draw(axes: Axes) -> None:
        axes.plot([0.0, 1.0], [0.0, 1.0], "--", color=GREY, linewidth=1.0, label="calibrated", zorder=1)
        for index, (method, each) in enumerate(binned.items()):
            axes.plot(
                each["probability"],
                each["share"],
                marker="o",
                markersize=3.5,
                label=for_figure(method),
                **line_of(index),
            )
        axes.set_xlim(-0.03, 1.03)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("predicted probability of class 1, or of the\nmost probable class of several")
        axes.set_ylabel("share that came true")
        plain_axes(axes)

    said = "; ".join(
        f"{method} "
        + ", ".join(
            f"{a:.2f} to {b:.2f} ({int(c)} rows)"
            for a, b, c in zip(each["probability"], each["share"], each["rows"], strict=True)
        )
        for method, each in binned.items()
    )
    return Panel(
        f"{name}: reliability", draw, f"{name}: predicted probability to share that came true: {said}."
    )


# --- ranks ------------------------------------------------------------------------------------------------


def ranks_figure(result: GridResult) -> Figure:
    """Mean ranks of methods by log score over data sets and splits.

    If a Friedman test can be made, with half of Nemenyi's critical difference on either side
    (`reporting.grid_verdict.mean_ranks`).

    Parameters
    ----------
    result : GridResult
        The result of a grid.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(ranks(GridFindings(result)))


def ranks(found: GridFindings) -> Picture:
    """The picture of `ranks_figure`."""
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


# --- the gap to the reference -----------------------------------------------------------------------------

_GAPS = ("gap_mean", "gap_mean_floor", "gap_sd_ratio", "gap_sd_floor")


def gap_figure(result: GridResult) -> Figure:
    """Distance of the mean function and the spread of each method to the reference, in means over splits.

    It is drawn beside sampling noise alone, in two panels for each model and data set.

    Parameters
    ----------
    result : GridResult
        The result of a grid.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(gap(GridFindings(result)))


def gap(found: GridFindings) -> Picture:
    """The picture of `gap_figure`."""
    reference, heading = found.result.reference, "Gap to the reference, and the noise floor"
    if reference is None:
        return Picture("gap", heading, "", missing="No reference was named.")
    panels, rows = [], []
    for pair, block in found.blocks.items():
        made = [
            {**_labels(pair, str(name)), **{column: _number(block, name, column) for column in _GAPS}}
            for name in block.index
            if name != reference and math.isfinite(_number(block, name, "gap_mean"))
        ]
        if not made:
            continue
        made.sort(key=lambda row: row["gap_mean"])
        # The floor is that of the reference, which every split with a measured gap has.
        owner = reference if reference in block.index else made[0]["method"]
        floor, ratio = (_number(block, owner, column) for column in ("gap_mean_floor", "gap_sd_floor"))
        rows += made
        names = [row["method"] for row in made]
        for title, draw, column, noise, said in (
            ("mean function", draw_gaps, "gap_mean", floor, "Mean function off by (sd of the reference)"),
            (
                "spread",
                draw_ratios,
                "gap_sd_ratio",
                ratio,
                "Epistemic standard deviation over that of the reference",
            ),
        ):
            known = math.isfinite(noise) and noise > 0.0
            values = [row[column] for row in made]
            words = "; ".join(f"{name} {value:.2f}" for name, value in zip(names, values, strict=True))
            panels.append(
                Panel(
                    f"{found.name(pair)}: {title}",
                    partial(_draw_gap, draw, names, values, noise if known else None),
                    f"{found.name(pair)}: {said}, means over splits: {words}."
                    + (f" Between two halves of {reference}: {noise:.2f}." if known else ""),
                    height_for(len(names)),
                )
            )
    return Picture(
        "gap",
        heading,
        f"First, how far the mean function is from that of {reference}, in its epistemic standard deviations. Then, "
        "the epistemic standard deviation divided by its own; 1 is right. Means over splits. Grey is what two halves "
        f"of the draws of {reference} differ by: sampling noise alone. Logarithmic axes; an arrow is a value beyond "
        "the edge.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method has a gap that could be measured.",
    )


def _number(block: Any, name: str, column: str) -> float:
    return float(block.loc[name].get(column, math.nan))


def _draw_gap(
    draw: Callable[..., None], names: Sequence[str], values: Sequence[float], floor: float | None, axes: Axes
) -> None:
    draw(axes, names, values, floor)


# --- k-hat ------------------------------------------------------------------------------------------------


def k_hat_figure(result: GridResult) -> Figure:
    """k-hat of each approximation as an importance proposal: its mean over splits and its largest value in any cell.

    There is a panel for each model and data set.

    Parameters
    ----------
    result : GridResult
        The result of a grid.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(k_hat(GridFindings(result)))


def k_hat(found: GridFindings) -> Picture:
    """The picture of `k_hat_figure`."""
    panels, rows = [], []
    for pair, block in found.blocks.items():
        splits = found.splits(pair, "k_hat")
        made = [
            {
                **_labels(pair, str(name)),
                "k_hat": float(splits[name].dropna().mean()),
                "largest": _number(block, name, "k_hat"),
                "splits": int(splits[name].notna().sum()),
            }
            for name in splits.columns
        ]
        if not made:
            continue
        rows += made
        words = "; ".join(f"{row['method']} {row['k_hat']:.2f} ({row['largest']:.2f})" for row in made)
        panels.append(
            Panel(
                found.name(pair),
                partial(_draw_k_hats, made),
                f"{found.name(pair)}: k-hat of p(w, D) / q(w), good below 0.7, mean over splits (and the largest of "
                f"any cell): {words}.",
                height_for(len(made)),
            )
        )
    return Picture(
        "k_hat",
        "k-hat of the approximations",
        "k-hat of the importance weights p(w, D) / q(w) of each approximation with a density: its mean over splits, "
        "and a line to the largest of any cell. Above 0.7 it is no proposal for importance sampling; over hundreds of "
        "weights that is nearly always so, and says little about its predictions. An arrow stands for an infinite "
        "value.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method has a density.",
    )


def _draw_k_hats(made: Sequence[Mapping[str, Any]], axes: Axes) -> None:
    finite = [value for row in made for value in (row["k_hat"], row["largest"]) if math.isfinite(value)]
    low, high = min([0.0, *finite]) - 0.1, max([1.2, *finite]) + 0.2
    axes.set_xlim(low, high)
    axes.axvline(K_LIMIT, color=GREY, linewidth=1.0, linestyle="--", label="limit 0.7", zorder=1)
    for place, row in enumerate(made):
        if math.isfinite(row["k_hat"]):
            axes.hlines(
                place, row["k_hat"], min(row["largest"], high), color=BLUE, linewidth=1.6, alpha=0.6, zorder=2
            )
    draw_marks_inside(axes, [row["k_hat"] for row in made], low, high)
    names_below(axes, [row["method"] for row in made])
    axes.set_xlabel("k-hat, mean over splits")
    plain_axes(axes)


# --- all of them ------------------------------------------------------------------------------------------

PICTURES: Mapping[str, Callable[[GridFindings], Picture]] = {
    "cost": cost,
    "differences": differences,
    "to_reference": differences_to_reference,
    "elpd": elpd,
    "calibration": calibration,
    "ranks": ranks,
    "gap": gap,
    "k_hat": k_hat,
}
