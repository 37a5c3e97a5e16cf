"""Pictures of a comparison (one block) and of a grid (a block for each model and data set).

`PICTURES` and `GRID_PICTURES` list them in the order of the page. ArviZ's own plots can be drawn from the trees of a
comparison, and in function space from `chains.function_draws`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ppl_bnn.core.figures import BAR, BLUE, GUIDE, VERMILION
from ppl_bnn.core.names import for_figure
from ppl_bnn.diagnostics.importance import K_LIMIT
from ppl_bnn.evaluation.comparison import drawing
from ppl_bnn.evaluation.comparison.drawing import MANY
from ppl_bnn.evaluation.comparison.summary import duration, listed
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import LEVELS, Event, Transform
from ppl_bnn.reporting.figures import panels as parts
from ppl_bnn.reporting.figures.chains import losses, ranks_of_draws
from ppl_bnn.reporting.figures.panels import Panel, Picture, finish, height_for, listed_values, rows_of
from ppl_bnn.reporting.figures.predictions import predictions, with_standing
from ppl_bnn.reporting.findings import Findings
from ppl_bnn.reporting.grid_findings import GridBlock, GridFindings, Ranks, mean_ranks, words_of_ranks
from ppl_bnn.reporting.verdict import ELPD, SCORE, UnitBlock

Blocks = Findings | GridFindings


def _title(block: UnitBlock, what: str) -> str:
    """What a panel shows, after the title of its block if there are several."""
    return f"{block.title}: {what}" if block.title else _begun(what)


def _begun(what: str) -> str:
    """Words as the beginning of a title."""
    return f"{what[0].upper()}{what[1:]}"


# --- accuracy against cost --------------------------------------------------------------------------------


def cost(found: Blocks) -> Picture:
    """Distance of each method to the best one against the time of a fit, with the Pareto front."""
    panels, rows = [], []
    columns = ("seconds", "value", "standard_error_of_value", "behind_best", "standard_error")
    for block in found.blocks.values():
        for score, label, unit in _scores_of_costs(block):
            lags = block.lags(score)
            points = {name: (block.seconds(name), *lag) for name, lag in lags.items()}
            means = {name: (block.number(name, score), block.number(name, f"{score}_se")) for name in lags}
            values = {name: [(point[0], *means[name], *point[1:])] for name, point in points.items()}
            rows += rows_of(columns, values, **block.labels, score=score)
            usable = {n: p for n, p in points.items() if 0.0 < p[0] < math.inf and math.isfinite(p[1])}
            if not usable:
                continue
            words = [f"{n} {duration(s)}, {parts.with_error(*lag)}" for n, (s, *lag) in usable.items()]
            lost = [str(name) for name in block.table.index if name in lags and name not in usable]
            described = "; ".join(words) + (f". Cannot be drawn: {', '.join(lost)}" if lost else "")
            heading, time = f"{label} behind the best\n({unit}; better is up)", found.time.partition(",")[0]
            draw = partial(parts.draw_costs, points=usable, heading=heading, time=time)
            title = _title(block, f"{label} against time")
            panels.append(Panel(title, draw, f"{title}: behind the best, in {unit}; {described}."))
    caption = (
        f"The distance of each method to the nominally best one {found.pairing} (bars are two standard errors of the "
        f"paired difference), against the {found.time}, on a logarithmic axis. The line joins the methods that no "
        "other method beats in both; where bars reach the line, the order is not established."
    )
    missing = "No method has both a finite score and a time."
    return Picture("Accuracy against cost", caption, panels, rows, missing)


def _scores_of_costs(block: UnitBlock) -> Iterator[tuple[str, str, str]]:
    yield SCORE, "log score", "nats per row"
    if isinstance(block, Findings):
        if block.comparison.task == "classification":
            yield "accuracy", "accuracy", "share of rows"
        elif len(block.row_scores.get("rmse", {})) > 1:
            yield "rmse", "RMSE", "units of the target"


# --- differences ------------------------------------------------------------------------------------------


_CALLED = {SCORE: "log score", ELPD: "leave-one-out ELPD"}
_OF_ELPD = (
    "ELPD is the sum over training rows, each left out in turn by Pareto-smoothed importance sampling, which treats "
    "draws of an approximation as draws of the posterior. It is not reliable with a Pareto k above 0.7 (hollow marks)."
)


def differences(found: Blocks, scores: Sequence[str] = (SCORE,), to: str = "best") -> Picture:
    """Differences of scores to the method with the best mean, or to the reference, over paired units.

    Hollow marks: leave-one-out with a Pareto k above the limit, or a method that lacks some units of the other.
    """
    heading = "Expected log predictive density" if ELPD in scores else f"Differences to the {to}"
    if to == "reference" and found.reference is None:
        return Picture(heading, missing="No reference was named.")
    other = found.reference if to == "reference" else "the best"
    over = ", mean over splits" if isinstance(found, GridFindings) else ""
    panels, rows = [], []
    for block, score in product(found.blocks.values(), scores):
        lags = block.lags(score, to) if isinstance(block, GridBlock) else block.lags(score)
        loo, called = score == ELPD, _CALLED[score]
        if len(lags) < 2:
            continue
        base, entries = next(iter(lags)), {}
        for name, (lag, error) in sorted(lags.items(), key=lambda item: item[1][0]):
            # Not -lag, which is -0.0 of the best and would be shown with its sign.
            difference, units = 0.0 - lag, block.paired(score, name, base)
            row = {**block.labels, "method": name, "score": score, "to": base, "difference": difference}
            row |= {"standard_error": error, "units": units}
            hollow = units < block.paired(score, base, base)
            if loo:
                row["pareto_k"] = block.number(name, "pareto_k_loo")
                hollow = not row["pareto_k"] <= K_LIMIT
            rows.append(row)
            entries[name] = (difference, error, hollow)
        unit = "nats over the training rows" if loo else "nats per test row"
        label = f"{called} minus that of {other},\n{unit}{over}"
        meaning = "a Pareto k above 0.7" if loo else f"not on all splits of {other}"
        panels.append(parts.forest_panel(_title(block, called), entries, label, meaning))
    caption = (
        f"Differences to {other}, {found.pairing}, with two standard errors where they are known; below zero is worse. "
        f"If a bar reaches the dashed line, no difference is established. {_OF_ELPD if ELPD in scores else ''}"
    )
    what = " or a ".join(_CALLED[score] for score in scores)
    return Picture(heading, caption, panels, rows, f"There are no two methods with a {what} to compare.")


# --- calibration ------------------------------------------------------------------------------------------


def calibration(found: Blocks) -> Picture:
    """Calibration: reliability diagrams of classes; for numbers, coverage of central intervals at every level and PIT.

    Coverage and PIT are shown minus their values under calibration.
    """
    panels, rows, captions = [], [], {}
    for block in found.blocks.values():
        transforms, events = block.calibrations
        if transforms:
            counts = any(each.of_counts for each in transforms.values())
            panels += panels_of_numbers(transforms, partial(_title, block))
            rows += _rows_of_numbers(block, transforms)
            captions |= dict.fromkeys((_OF_NUMBERS, _OF_COUNTS) if counts else (_OF_NUMBERS,))
        if events:
            columns = ("probability", "share", "rows")
            bins = bins_of(events)
            texts = {n: [f"{a:.2f} to {b:.2f} ({c} rows)" for a, b, c in each] for n, each in bins.items()}
            words = {name: ", ".join(each) for name, each in texts.items()}
            panels += _panels_of_classes(block, bins, words)
            rows += rows_of(columns, bins, **block.labels)
            captions[_OF_CLASSES] = None
    return Picture("Calibration", " ".join(captions), panels, rows, found.no_calibration)


_OF_NUMBERS = (
    "First, the share of test targets inside central intervals minus the nominal level: below zero, intervals are too "
    "narrow. Then, the share of targets below each predicted quantile (probability integral transform, PIT) minus its "
    "level: it shows predictions that are too low or too high. The grey band contains a calibrated method in 90 % of "
    "cases, level by level, if all rows are independent, and is too narrow if splits or seeds share them."
)
_OF_COUNTS = (
    "Intervals of counts end at whole numbers and contain more than the nominal level even if a method is calibrated: "
    "lines above zero are no fault. The distribution function jumps at a count, and PIT is randomised within the jump."
)
_OF_CLASSES = (
    "How often an event occurred, against its predicted probability, in ten bins. Calibrated probabilities are on the "
    "dashed line. A probability integral transform is not defined for classes."
)


def bins_of(events: Mapping[str, Event]) -> dict[str, list[tuple[Any, ...]]]:
    """Name -> (probability, share, rows) of each bin of a reliability diagram."""
    binned = {name: each.binned().values() for name, each in events.items()}
    return {name: list(zip(*columns, strict=True)) for name, columns in binned.items()}


def _rows_of_numbers(block: UnitBlock, transforms: Mapping[str, Transform]) -> Iterator[dict[str, Any]]:
    if isinstance(block, Findings):
        return rows_of(("row", "pit"), {name: enumerate(each.pit) for name, each in transforms.items()})
    columns = ("rows", *(f"coverage_{100 * level:.0f}" for level in LEVELS))
    values = {name: [(len(each.pit), *map(each.covered, LEVELS))] for name, each in transforms.items()}
    return rows_of(columns, values, **block.labels)


def panels_of_numbers(
    transforms: Mapping[str, Transform], title_of: Callable[[str], str] = _begun
) -> Iterator[Panel]:
    """Coverage at all levels, then PIT; `title_of` makes the title of a panel from what it shows."""
    counts = any(each.of_counts for each in transforms.values())
    rows = min(len(each.pit) for each in transforms.values())
    inside = {name: each.covered for name, each in transforms.items()}
    below = {name: lambda level, pit=each.pit: np.mean(pit <= level) for name, each in transforms.items()}
    pit = "randomised PIT" if counts else "PIT"
    pit_label = "predicted probability of less\nthan the observed value (PIT)"
    for what, shares, levels, where, label in (
        ("coverage", inside, LEVELS, "in central intervals of", "probability of the interval"),
        (pit, below, (0.25, 0.5, 0.75), "below the predicted quartiles,", pit_label),
    ):
        # Central intervals of counts contain more than their level.
        side, band = ("below", rows) if shares is below else ("inside", 0 if counts else rows)
        title, percent = title_of(what), listed([f"{100 * level:.0f}" for level in levels])
        shown = {name: [f"{share(level):.0%}" for level in levels] for name, share in shares.items()}
        words = [f"{name} {', '.join(each)}" for name, each in shown.items()]
        labels = (label, f"share {side}, minus that")
        draw = partial(parts.draw_shares, shares=shares, rows=band, labels=labels)
        yield Panel(title, draw, f"{title}: share of test targets {where} {percent} %: {'; '.join(words)}.")


def _panels_of_classes(
    block: UnitBlock, bins: Mapping[str, Any], words: Mapping[str, str]
) -> Iterator[Panel]:
    """A panel for each method of a comparison, with intervals; one panel for all methods of a grid."""
    meaning = "predicted probability to share that occurred"
    if isinstance(block, Findings):
        comparison = block.comparison
        labels = np.asarray(comparison.test_targets).astype(int)

        for name, text in words.items():
            described = f"Reliability of {name}, {meaning}: {text}."
            draw = partial(draw_reliability, prediction=comparison.predictions[name], labels=labels)
            yield Panel(with_standing(block, name), draw, described)
        return

    title, methods = _title(block, "reliability"), "; ".join(f"{name} {text}" for name, text in words.items())
    draw = partial(draw_reliabilities, bins=bins)
    yield Panel(title, draw, f"{title}: {meaning}: {methods}.")


def draw_reliability(axes: Axes, prediction: Prediction, labels: np.ndarray) -> None:
    """Reliability of one prediction, with intervals of the shares."""
    drawing.draw_reliability(axes, prediction, labels)
    axes.set_xlim(-0.03, 1.03)
    finish(axes, axes.get_xlabel(), axes.get_ylabel())


def draw_reliabilities(axes: Axes, bins: Mapping[str, Any]) -> None:
    """Reliability of several methods, name -> (probability, share, rows) of each bin."""
    axes.plot([0.0, 1.0], [0.0, 1.0], **GUIDE, label="calibrated", zorder=1)
    for index, (name, each) in enumerate(bins.items()):
        probability, share, _ = zip(*each, strict=True)
        style = {"marker": "o", "markersize": 3.5, "label": for_figure(name), **parts.line_of(index)}
        axes.plot(probability, share, **style)
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    label = "predicted probability of class 1, or of the\nmost probable class of several"
    finish(axes, label, "share that occurred")


# --- the gap to the reference -----------------------------------------------------------------------------

_GAPS = ("gap_mean", "gap_mean_floor", "gap_sd_ratio", "gap_sd_floor")


def gap(found: Blocks) -> Picture:
    """Distance of the mean function and the spread of each method to the reference, beside sampling noise alone."""
    heading, reference = "Gap to the reference, and the noise floor", found.reference
    if reference is None:
        return Picture(heading, missing="There is no reference, or it has no posterior.")
    panels, rows, of_reference = [], [], "epistemic sd over that of the reference"
    for block in found.blocks.values():
        gaps = {str(name): [block.number(name, column) for column in _GAPS] for name in block.table.index}
        floors = gaps.pop(reference, None)
        gaps = {name: each for name, each in gaps.items() if math.isfinite(each[0])}
        gaps = dict(sorted(gaps.items(), key=lambda item: item[1][0]))
        rows += rows_of(_GAPS, {name: [each] for name, each in gaps.items()}, **block.labels)
        for what, draw, column, described in (
            ("mean function", parts.draw_gaps, 0, "off by (sd of the reference)"),
            ("spread", parts.draw_ratios, 2, of_reference),
        ):
            # The floor is that of the reference, which every split with a measured gap has.
            known = (each[column + 1] for each in (floors, *gaps.values()) if each is not None)
            floor = next((value for value in known if math.isfinite(value) and value > 0.0), None)
            values = {name: each[column] for name, each in gaps.items()}
            between = "" if floor is None else f" Between two halves of {reference}: {floor:.2f}."
            title, drawn = _title(block, what), partial(draw, values=values, floor=floor)
            words = f"{title}, {described}: {listed_values(values)}.{between}"
            panels += [Panel(title, drawn, words, height_for(len(values)))] if values else []
    means = " Means over splits." if isinstance(found, GridFindings) else ""
    caption = (
        f"First, the distance of the mean function to that of {reference}, in its epistemic standard deviations. Then, "
        f"the epistemic standard deviation divided by its own; 1 is right.{means} Grey is the difference between two "
        f"halves of the draws of {reference}: sampling noise alone. Axes are logarithmic; arrows are beyond the edge."
    )
    return Picture(heading, caption, panels, rows, "No method has a gap that could be measured.")


# --- Pareto k ---------------------------------------------------------------------------------------------

_K_HAT = (
    "k-hat of the importance weights p(w, D) / q(w) of each approximation with a density. Above 0.7 it is no proposal "
    "for importance sampling; with hundreds of weights that is nearly always so, and says little about its predictions."
)


def pareto_k(found: Findings) -> Picture:
    """k-hat of each approximation as an importance proposal, and Pareto k of leaving out each training row."""
    hats = {name: found.number(name, "k_hat") for name in found.names}
    hats = {name: (k, k) for name, k in hats.items() if not math.isnan(k)}
    per_row = {name: np.ravel(loo.elpd_data.pareto_k.values) for name, loo in found.left_out.items()}
    columns = ("what", "row", "pareto_k")
    rows = list(rows_of(columns, {name: [("p / q", -1, k)] for name, (k, _) in hats.items()}))
    values = {name: [("leave-one-out", row, k) for row, k in enumerate(ks)] for name, ks in per_row.items()}
    rows += rows_of(columns, values)
    panels = [_k_hat_panel("k-hat of the approximation", hats, "")] if hats else []
    if per_row:
        worst = {name: (np.max(ks), np.mean(~(ks <= K_LIMIT))) for name, ks in per_row.items()}
        words = "; ".join(f"{name} {largest:.2f}, {share:.1%}" for name, (largest, share) in worst.items())
        described = f"Pareto k of leaving out each training row; largest, and share above 0.7: {words}."
        draw = partial(_draw_row_ks, per_row=per_row)
        panels.append(Panel("Pareto k of training rows", draw, described, height_for(len(per_row))))
    caption = (
        f"First, {_K_HAT} Then, k of leaving out one training row after the other; above 0.7 leave-one-out is not "
        "reliable for that row. Arrows are infinite values."
    )
    missing = "No method has a density, or rows that can be left out."
    return Picture("Pareto k", caption, panels, rows, missing)


def k_hat(found: GridFindings) -> Picture:
    """k-hat of each approximation as an importance proposal: its mean over splits and its largest value in any cell."""
    panels, rows = [], []
    for block in found.blocks.values():
        splits = block.splits("k_hat")
        means = {str(name): float(splits[name].dropna().mean()) for name in splits.columns}
        hats = {name: (mean, block.number(name, "k_hat")) for name, mean in means.items()}
        values = {name: [(*both, int(splits[name].count()))] for name, both in hats.items()}
        rows += rows_of(("k_hat", "largest", "splits"), values, **block.labels)
        panels += [_k_hat_panel(_title(block, "k-hat"), hats, ", mean over splits")] if hats else []
    caption = (
        f"{_K_HAT[0].upper()}{_K_HAT[1:]} Marks are means over splits, with a line to the largest value of any cell. "
        "Arrows are infinite values."
    )
    return Picture("k-hat of the approximations", caption, panels, rows, "No method has a density.")


def _k_hat_panel(title: str, hats: Mapping[str, tuple[float, float]], over: str) -> Panel:
    """hats: method -> k-hat, in the mean over splits, and the largest; over: what the mean is over."""

    def draw(axes: Axes) -> None:
        finite = [k for both in hats.values() for k in both if math.isfinite(k)]
        low, high = min([0.0, *finite]) - 0.1, max([1.2, *finite]) + 0.2
        axes.axvline(K_LIMIT, **GUIDE, label="limit 0.7", zorder=1)
        for place, (mean, largest) in enumerate(hats.values()):
            if math.isfinite(mean) and largest > mean:
                axes.hlines(place, mean, min(largest, high), **BAR)
        parts.draw_values(axes, {name: mean for name, (mean, _) in hats.items()}, f"k-hat{over}", low, high)

    words = "; ".join(f"{name} {k:.2f}{f' ({most:.2f})' if over else ''}" for name, (k, most) in hats.items())
    largest = " (and the largest)" if over else ""
    described = f"{title} of p(w, D) / q(w), good below 0.7{over}{largest}: {words}."
    return Panel(title, draw, described, height_for(len(hats)))


def _draw_row_ks(axes: Axes, per_row: Mapping[str, np.ndarray]) -> None:
    finite = np.concatenate([ks[np.isfinite(ks)] for ks in per_row.values()])
    low = min(-0.1, float(finite.min(initial=0.0))) - 0.05
    high = max(1.0, float(finite.max(initial=0.0))) + 0.1
    axes.set_xlim(low, high)
    axes.axvline(K_LIMIT, **GUIDE, label="limit 0.7", zorder=1)
    for place, ks in enumerate(per_row.values()):
        # Rows of equal k are drawn side by side in a fixed zigzag, so that the picture is reproducible.
        beside = place + 0.3 * (np.arange(len(ks)) * 0.618034 % 1.0 - 0.5)
        at, bad = np.clip(np.nan_to_num(ks, nan=high, posinf=high), low, high), ~(ks <= K_LIMIT)
        good, above = (~bad, BLUE, "o", "a training row"), (bad, VERMILION, "D", "a row above the limit")
        for rows, colour, mark, label in (good, above):
            style: dict[str, Any] = {"color": colour, "markersize": 2.5, "alpha": 0.8, "markeredgewidth": 0.0}
            style |= {"rasterized": len(ks) > MANY, "zorder": 3}
            axes.plot(at[rows], beside[rows], mark, **style, label=label)
    parts.names_below(axes, list(per_row))
    finish(axes, "Pareto k")


# --- mean ranks -------------------------------------------------------------------------------------------


def ranks_of_methods(found: GridFindings) -> Picture:
    """Mean ranks of methods by log score over data sets and splits, with Nemenyi's critical difference."""
    ranks = mean_ranks(found)
    over = f"over {ranks.blocks} {ranks.unit}"
    words, bars = f"Mean ranks by log score, 1 is best, {over}: {listed_values(ranks.mean)}.", ""
    if math.isfinite(ranks.critical):
        words += f" Bars that do not meet are at least {ranks.critical:.2f} ranks apart, a difference at 5 %."
        bars = " Bars are half of the critical difference (Nemenyi, 5 %): methods whose bars meet are not told apart."
    enough = len(ranks.mean) > 1 and ranks.blocks
    panel = Panel(over.capitalize(), partial(_draw_ranks, ranks=ranks), words, height_for(len(ranks.mean)))
    caption = (
        f"Methods ranked by log score within each block, 1 being the best, and averaged.{bars} {words_of_ranks(ranks)} "
        "Ranks show how often a method is better, not by how much."
    )
    rows = ({"method": name, "mean_rank": rank} for name, rank in ranks.mean.items())
    missing = "There are no two methods to rank in one block."
    return Picture("Mean ranks", caption, [panel] if enough else [], rows, missing)


def _draw_ranks(axes: Axes, ranks: Ranks) -> None:
    half = ranks.critical / 2.0 if math.isfinite(ranks.critical) else 0.0
    values, label = list(ranks.mean.values()), "mean rank"
    if half:
        axes.hlines(range(len(values)), [v - half for v in values], [v + half for v in values], **BAR)
        axes.axvline(values[0] + half, **GUIDE, zorder=1, label="end of the bar of the first")
        label += ", half the critical difference"
    axes.plot(values, range(len(values)), **parts.DOT, label=label, zorder=3)
    margin = max(half, 0.2)
    axes.set_xlim(1.0 - margin, len(values) + margin)
    axes.set_xticks(range(1, len(values) + 1))
    parts.names_below(axes, list(ranks.mean))
    finish(axes, "mean rank (1 is best)")


# --- all of them ------------------------------------------------------------------------------------------

PICTURES: dict[str, Callable[[Findings], Picture]] = {
    "cost": cost,
    "predictions": predictions,
    "calibration": calibration,
    "elpd": partial(differences, scores=(SCORE, ELPD)),
    "ranks": ranks_of_draws,
    "losses": losses,
    "gap": gap,
    "pareto_k": pareto_k,
}
GRID_PICTURES: dict[str, Callable[[GridFindings], Picture]] = {
    "cost": cost,
    "differences": differences,
    "to_reference": partial(differences, to="reference"),
    "elpd": partial(differences, scores=(ELPD,)),
    "calibration": calibration,
    "ranks": ranks_of_methods,
    "gap": gap,
    "k_hat": k_hat,
}
