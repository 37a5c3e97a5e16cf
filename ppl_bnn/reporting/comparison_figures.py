"""Figures of a comparison: one function for each, from a `Comparison` to a matplotlib Figure.

They are made of panels (`reporting.panels`). What ArviZ draws itself it draws from the trees of a comparison, and from
`function_draws` in function space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError, message
from ppl_bnn.core.names import for_figure
from ppl_bnn.diagnostics.importance import K_LIMIT, LeaveOneOut, leave_one_out
from ppl_bnn.evaluation.comparison.figures import (
    BLUE,
    GREY,
    LEVEL,
    SKY,
    VERMILION,
    draw_class_map,
    draw_classes,
    draw_curve,
    draw_reliability,
    drawn_along,
    drawn_over,
    evenly,
    grid_points,
    marked_targets,
    predicted_event,
    predicted_for_drawing,
    single_input,
)
from ppl_bnn.evaluation.comparison.panels import (
    INK,
    Panel,
    Picture,
    cost_drawer,
    draw_coverages,
    draw_gaps,
    draw_marks_inside,
    draw_ratios,
    forest_panel,
    frame_of,
    height_for,
    names_below,
    plain_axes,
    short,
    together,
    with_error,
)
from ppl_bnn.evaluation.comparison.summary import duration, seconds_of
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import LEVELS, Event, Transform
from ppl_bnn.prediction.scores import coverages, paired_difference, pit_uniformity
from ppl_bnn.reporting.verdict import row_scores

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.evaluation.comparison.comparison import Comparison

# More marks than these are drawn as pixels.
MANY = 400
# Rows whose mean function is looked at for the worst R-hat; simulated runs behind the band of ranks.
ROWS_RANKED, SIMULATIONS = 100, 1000
# Of ranks: fewest draws of a chain for a band, and its level. An alarm by chance should be rare.
FEWEST_RANKS, BAND = 20, 0.99
BINS_OF_PIT = 10
STEPS_DRAWN = 200


class Findings:
    """What several figures read off a comparison, computed when it is first wanted."""

    def __init__(self, comparison: Comparison):
        self.comparison = comparison

    @property
    def names(self) -> list[str]:
        """The methods that gave predictions, in the order of the table."""
        return [str(name) for name in self.comparison.table.index if name in self.comparison.predictions]

    @property
    def reference(self) -> str | None:
        """The reference, if it gave predictions."""
        name = self.comparison.reference
        return name if name in self.comparison.predictions else None

    @cached_property
    def row_scores(self) -> dict[str, dict[str, np.ndarray]]:
        return row_scores(self.comparison)

    @cached_property
    def left_out(self) -> dict[str, LeaveOneOut]:
        """PSIS-LOO of each tree of which rows can be left out."""
        found = {name: leave_one_out(tree) for name, tree in self.comparison.trees.items()}
        return {name: loo for name, loo in found.items() if not loo.reason}

    @cached_property
    def transforms(self) -> tuple[dict[str, Transform], str]:
        """Where the test targets fell in the predictions of each method that are numbers; and why not, for the rest."""
        made, refused = {}, ""
        for name in self.names:
            try:
                made[name] = Transform.of(self.comparison.predictions[name], self.comparison.test_targets)
            except (UnsupportedError, InputError) as error:
                refused = str(error)
        return made, refused

    @cached_property
    def intervals(self) -> pd.DataFrame:
        """A row for each method whose predictions are numbers: `coverage_50`, `width_50` and so on, of central
        intervals at `LEVELS`, and the `pit_distance` and `pit_p` of `scores.pit_uniformity`."""
        rows = []
        for name in self.transforms[0]:
            prediction, y = self.comparison.predictions[name], self.comparison.test_targets
            try:
                found = coverages(prediction, y, LEVELS)
            except UnsupportedError:
                continue
            row: dict[str, Any] = {"method": name}
            for level, share, width in zip(found["level"], found["coverage"], found["width"], strict=True):
                row |= {f"coverage_{100 * level:.0f}": share, f"width_{100 * level:.0f}": width}
            row["pit_distance"], row["pit_p"] = pit_uniformity(prediction, y)
            rows.append(row)
        return frame_of(rows)

    def at(self, name: str, x: np.ndarray) -> Prediction | None:
        """The prediction of a method at the inputs of a picture; None if it has no posterior, and none was kept."""
        posterior = self.comparison.posteriors.get(name)
        if posterior is not None:
            return predicted_for_drawing(posterior, x, self.comparison.data.get("seed", 0))
        kept = self.comparison.drawn_at
        return self.comparison.drawn.get(name) if kept is not None and np.array_equal(kept, x) else None


# --- accuracy against cost --------------------------------------------------------------------------------


def cost_figure(comparison: Comparison) -> Figure:
    """How far each method is behind the best one, against the seconds that it took, with the Pareto front."""
    return together(cost(Findings(comparison)))


def cost(found: Findings) -> Picture:
    comparison, scored = found.comparison, found.row_scores
    columns = [("log_score", "log score", "nats per row")]
    if comparison.task == "classification":
        columns.append(("accuracy", "accuracy", "share of rows"))
    elif len(scored.get("rmse", {})) > 1:
        columns.append(("rmse", "RMSE", "units of the target"))
    panels, rows = [], []
    for column, label, unit in columns:
        points = [
            (name, seconds_of(comparison, name), *behind(scored[column], name, column))
            for name in scored[column]
        ]
        usable = [p for p in points if p[1] > 0.0 and math.isfinite(p[1]) and math.isfinite(p[2])]
        rows += [
            {"score": column, "method": name, "seconds": seconds, "behind_best": gap, "standard_error": error}
            for name, seconds, gap, error in points
        ]
        if not usable:
            continue
        lost = [p[0] for p in points if p not in usable]
        words = f"{label} behind the best, in {unit}, against seconds: " + "; ".join(
            f"{name} {duration(seconds)}, {with_error(gap, error)}" for name, seconds, gap, error in usable
        )
        if lost:
            words += f". Without a place on these axes: {', '.join(lost)}"
        title = f"{label[0].upper()}{label[1:]} against time"
        heading = f"{label} behind the best\n({unit}; better is up)"
        panels.append(Panel(title, cost_drawer(usable, heading, smaller=True), words + "."))
    return Picture(
        "cost",
        "Accuracy against cost",
        "How far each method falls short of the nominally best one on the same test rows (0 is best, bars are two "
        "standard errors of the paired difference), against the wall time of its fit, compilation included, on a "
        "logarithmic axis. The line joins those that no other method beats in both; where bars reach the line, the "
        "order is not established.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method has both a finite score and a time.",
    )


def behind(values: Mapping[str, np.ndarray], name: str, column: str) -> tuple[float, float]:
    """By how much the best method is ahead of `name`, and its standard error, in the units of the column."""
    best = max(values, key=lambda other: float(np.mean(values[other])))
    gap, error = paired_difference(values[best], values[name])
    if name == best:
        error = 0.0
    if column == "rmse":
        # sqrt(a) - sqrt(b) = (a - b) / (sqrt(a) + sqrt(b)); the values are squared errors with the sign changed.
        both = sum(math.sqrt(max(-float(np.mean(values[each])), 0.0)) for each in (best, name))
        gap, error = (gap / both, error / both) if both > 0.0 else (0.0, 0.0)
    return gap, error


# --- predictions beside the reference ---------------------------------------------------------------------


def beside_reference_figure(comparison: Comparison) -> Figure:
    """Predictions of each method beside the reference: bands along a single input, maps of classes over two inputs,
    else row by row.
    """
    return together(beside_reference(Findings(comparison)))


def beside_reference(found: Findings) -> Picture:
    comparison = found.comparison
    x, y = comparison.test_inputs, comparison.test_targets
    classes = comparison.task == "classification"
    censored = any(prediction.censored for prediction in comparison.predictions.values())
    if not found.names:
        return Picture("predictions", "Predictions", "", missing="No method gave predictions.")
    if not classes and single_input(x) and (y.ndim == 1 or censored):
        return _curves(found)
    kept = comparison.posteriors or comparison.drawn
    if classes and not isinstance(x, Mapping) and x.ndim == 2 and x.shape[1] == 2 and kept:
        return _maps(found)
    if found.reference is not None and len(found.names) > 1:
        return _against_reference(found)
    if classes:
        return Picture(
            "predictions",
            "Predictions",
            "",
            missing="Without a reference, predictions of classes are drawn over two inputs only; for others there is "
            "their reliability, below.",
        )
    return _intervals(found)


def _curves(found: Findings) -> Picture:
    comparison, reference = found.comparison, found.reference
    inputs = comparison.test_inputs[:, 0]
    names = comparison.data.get("feature_names")
    grid = drawn_along(comparison.test_inputs)
    drawn: dict[str, tuple[np.ndarray, Prediction]] = {}
    for name in found.names:
        at_grid = found.at(name, grid[:, None])
        drawn[name] = (inputs, comparison.predictions[name]) if at_grid is None else (grid, at_grid)
    if any(prediction.is_counts or len(prediction.shape) != 1 for _, prediction in drawn.values()):
        drawn = {name: (inputs, comparison.predictions[name]) for name in found.names}
    edges = {
        name: (places, prediction.mean, *prediction.interval(LEVEL))
        for name, (places, prediction) in drawn.items()
    }
    values = [y[seen] for y, seen, _, _ in marked_targets(comparison)]
    low = min(float(np.min(v)) for v in [*(e[2] for e in edges.values()), *values])
    high = max(float(np.max(v)) for v in [*(e[3] for e in edges.values()), *values])
    pad = 0.04 * (high - low) or 1.0

    def drawer(name: str) -> Any:
        def draw(axes: Axes) -> None:
            draw_curve(axes, *drawn[name])
            if reference is not None and name != reference:
                _draw_reference(axes, edges[reference])
            many = len(inputs) > MANY
            for y, seen, mark, label in marked_targets(comparison):
                axes.plot(
                    inputs[seen],
                    y[seen],
                    mark,
                    color=GREY if many else INK,
                    markersize=3.5,
                    alpha=0.75,
                    label=label,
                    rasterized=many,
                )
            axes.set_ylim(low - pad, high + pad)
            axes.set_xlabel(for_figure(names[0] if names else "x"))
            axes.set_ylabel(for_figure(comparison.data["target_name"]))
            plain_axes(axes)

        return draw

    def words(name: str) -> str:
        _, mean, lower, upper = edges[name]
        width = upper - lower
        text = (
            f"Mean and 90 % bands of {name}: the mean goes from {mean.min():.3g} to {mean.max():.3g}, the band of "
            f"observations is {width.min():.3g} to {width.max():.3g} wide"
        )
        if reference is not None and name != reference and len(width) == len(edges[reference][2]):
            theirs = edges[reference][3] - edges[reference][2]
            text += f", in the median {np.median(width / theirs):.2f} times that of {reference}"
        return text + "."

    frame = frame_of(
        {"method": name, "x": at, "mean": m, "lower_90": a, "upper_90": b}
        for name, columns in edges.items()
        for at, m, a, b in zip(*columns, strict=True)
    )
    beside = (
        "" if reference is None else f"Dashed: the mean and the 90 % band of observations of {reference}. "
    )
    return Picture(
        "predictions",
        "Predictions beside the reference" if reference else "Predictions",
        "The mean of each method with two bands of 90 %: of the mean function (inner) and of observations (outer). "
        f"{beside}More data would narrow the inner band only. Beyond the test rows on either side the curves are "
        "extrapolated.",
        tuple(Panel(title(comparison, name), drawer(name), words(name)) for name in found.names),
        frame,
    )


def _draw_reference(axes: Axes, edges: tuple[np.ndarray, ...]) -> None:
    places, mean, lower, upper = edges
    order = np.argsort(places, kind="stable")
    for index, (values, width) in enumerate(((mean, 1.3), (lower, 0.9), (upper, 0.9))):
        label = "reference: mean and 90 % of observations" if index == 0 else None
        axes.plot(places[order], values[order], "--", color=VERMILION, linewidth=width, label=label, zorder=4)


def _maps(found: Findings) -> Picture:
    comparison, reference = found.comparison, found.reference
    x, y = comparison.test_inputs, np.asarray(comparison.test_targets).astype(int)
    names = comparison.data.get("feature_names")
    across, up = drawn_over(x)
    points = grid_points(across, up)
    drawn = {name: prediction for name in found.names if (prediction := found.at(name, points)) is not None}
    some = evenly(np.arange(len(y), dtype=np.float64))

    def drawer(name: str) -> Any:
        def draw(axes: Axes) -> None:
            prediction = drawn[name]
            draw_class_map(axes, across, up, prediction)
            called = prediction.class_names or [f"class {label}" for label in range(prediction.classes)]
            draw_classes(axes, x[some], y[some], called, size=3.2)
            if reference in drawn and name != reference:
                _draw_borders(axes, across, up, drawn[reference])
            axes.set_xlabel(for_figure(names[0] if names else "x[0]"))
            axes.set_ylabel(for_figure(names[1] if names else "x[1]"))

        return draw

    def words(name: str) -> str:
        best = drawn[name].probabilities.max(axis=1)
        text = f"Map of the most probable class by {name}: more than 90 % sure on {np.mean(best > 0.9):.0%} of the area"
        if reference in drawn and name != reference:
            same = drawn[name].probabilities.argmax(axis=1) == drawn[reference].probabilities.argmax(axis=1)
            text += f", and of the same class as {reference} on {np.mean(same):.0%} of it"
        return text + "."

    frame = frame_of(
        {"method": name, "x_0": a, "x_1": b, **{f"probability_{c}": p for c, p in enumerate(row)}}
        for name, prediction in drawn.items()
        for (a, b), row in zip(points, prediction.probabilities, strict=True)
    )
    beside = f"Dashed: where the most probable class changes by {reference}. " if reference in drawn else ""
    return Picture(
        "predictions",
        "Boundaries beside the reference" if reference in drawn else "Boundaries",
        f"Each place in the colour of its most probable class, paler where the method is less sure. Lines are of equal "
        f"probability. {beside}Marks are test rows in the colour of their label.",
        tuple(Panel(title(comparison, name), drawer(name), words(name), 3.0) for name in drawn),
        frame,
    )


def _draw_borders(axes: Axes, across: np.ndarray, up: np.ndarray, prediction: Prediction) -> None:
    """Where the most probable class changes: for each class the line on which it is level with the best other."""
    probabilities = prediction.probabilities
    classes = range(1, 2) if prediction.classes == 2 else range(prediction.classes)
    for index in classes:
        lead = probabilities[:, index] - np.delete(probabilities, index, axis=1).max(axis=1)
        if lead.min() < 0.0 < lead.max():
            axes.contour(
                across,
                up,
                lead.reshape(len(up), len(across)),
                levels=[0.0],
                colors=VERMILION,
                linestyles="--",
                linewidths=1.8,
            )
    axes.plot([], [], "--", color=VERMILION, linewidth=1.8, label="border by the reference")


def _against_reference(found: Findings) -> Picture:
    """Where inputs cannot be drawn: the mean function of each method against that of the reference, row by row."""
    comparison, reference = found.comparison, found.reference
    assert reference is not None
    theirs = comparison.predictions[reference]
    classes = theirs.is_classes
    label = np.asarray(comparison.test_targets).astype(int) if classes else None

    def of(prediction: Prediction) -> np.ndarray:
        if label is not None:
            return prediction.probabilities[np.arange(len(label)), label]
        return np.ravel(prediction.mean)

    expected, sds = of(theirs), {}
    for name in found.names:
        prediction = comparison.predictions[name]
        try:
            sds[name] = np.ravel(np.sqrt(prediction.mean_function_variance))
        except UnsupportedError:
            sds[name] = None
    what = "probability of what occurred" if classes else "predictive mean"
    panels, rows = [], []
    for name in found.names:
        if name == reference:
            continue
        ours = of(comparison.predictions[name])
        rows += [{"method": name, "reference": a, "value": b} for a, b in zip(expected, ours, strict=True)]
        correlation = _correlation(expected, ours)
        panels.append(
            Panel(
                f"{name}: {what}",
                _agreement_drawer(expected, ours, reference, name, what, sds[reference], classes),
                f"{what.capitalize()} by {name} against {reference} in {len(ours)} places: correlation "
                f"{correlation:.3f}, median distance {np.median(np.abs(ours - expected)):.3g}.",
            )
        )
    return Picture(
        "predictions",
        "Predictions beside the reference",
        f"Each test row: what a method predicts against what {reference} predicts, with the standard deviation of "
        f"the mean function of {reference} as a bar across. On the dashed line they agree.",
        tuple(panels),
        frame_of(rows),
    )


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    if len(first) < 2 or np.ptp(first) == 0.0 or np.ptp(second) == 0.0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _agreement_drawer(
    expected: np.ndarray,
    ours: np.ndarray,
    reference: str,
    name: str,
    what: str,
    spread: np.ndarray | None,
    classes: bool,
) -> Any:
    def draw(axes: Axes) -> None:
        ends = np.concatenate([expected, ours])
        low, high = (0.0, 1.0) if classes else (float(ends.min()), float(ends.max()))
        pad = 0.04 * (high - low) or 1.0
        many = len(ours) > MANY
        if spread is not None and spread.shape == expected.shape:
            axes.hlines(
                ours,
                expected - spread,
                expected + spread,
                color=SKY,
                linewidth=1.0,
                alpha=0.6,
                label="standard deviation of the reference's mean function",
                rasterized=many,
            )
        axes.plot(
            expected, ours, "o", color=BLUE, markersize=3.0, alpha=0.8, label="a test row", rasterized=many
        )
        axes.axline((0.0, 0.0), slope=1.0, color=GREY, linewidth=1.0, linestyle="--", label="agreement")
        axes.set_xlim(low - pad, high + pad)
        axes.set_ylim(low - pad, high + pad)
        axes.set_xlabel(short(reference))
        axes.set_ylabel(short(name))
        plain_axes(axes)

    return draw


def _intervals(found: Findings) -> Picture:
    comparison = found.comparison
    targets = comparison.test_targets
    keep = np.arange(len(targets))
    if any(prediction.censored for prediction in comparison.predictions.values()):
        keep, targets = np.flatnonzero(targets[:, 1] == 1.0), targets[:, 0]
    if not len(keep):
        return Picture("predictions", "Predictions", "", missing="No test row was observed.")
    shown = keep[evenly(targets[keep])]
    truth = np.ravel(targets[shown])
    parts = {}
    for name in found.names:
        part = comparison.predictions[name].take(shown)
        parts[name] = (np.ravel(part.mean), *(np.ravel(end) for end in part.interval(LEVEL)))

    def drawer(name: str) -> Any:
        def draw(axes: Axes) -> None:
            mean, lower, upper = parts[name]
            inside = (lower <= truth) & (truth <= upper)
            many = len(truth) > MANY
            for rows, colour, mark, label in (
                (inside, BLUE, "o", "truth inside the 90 % interval"),
                (~inside, VERMILION, "D", "truth outside"),
            ):
                axes.vlines(
                    truth[rows], lower[rows], upper[rows], color=colour, alpha=0.35, linewidth=1.0,
                    rasterized=many,
                )  # fmt: skip
                axes.plot(truth[rows], mean[rows], mark, color=colour, markersize=3.0, label=label)
            axes.axline((0.0, 0.0), slope=1.0, color=GREY, linewidth=1.0, linestyle="--")
            ends = np.concatenate([np.concatenate(part[1:]) for part in parts.values()])
            pad = 0.03 * float(np.ptp(truth)) or 1.0
            axes.set_xlim(truth.min() - pad, truth.max() + pad)
            axes.set_ylim(min(ends.min(), truth.min()) - pad, max(ends.max(), truth.max()) + pad)
            axes.set_xlabel(f"observed {for_figure(comparison.data['target_name'])}")
            axes.set_ylabel("predicted, with 90 % interval")
            plain_axes(axes)

        return draw

    def words(name: str) -> str:
        _, lower, upper = parts[name]
        inside = np.mean((lower <= truth) & (truth <= upper))
        return f"90 % intervals of {name} against what was observed in {len(truth)} places: {inside:.0%} hold it."

    return Picture(
        "predictions",
        "Predictions",
        "Predictive means with central 90 % intervals of observations against what was observed; on the dashed line "
        "the mean is right.",
        tuple(Panel(title(comparison, name), drawer(name), words(name)) for name in found.names),
        frame_of(
            {"method": name, "observed": t, "mean": m, "lower_90": a, "upper_90": b}
            for name, columns in parts.items()
            for t, m, a, b in zip(truth, *columns, strict=True)
        ),
    )


# --- calibration ------------------------------------------------------------------------------------------


def calibration_figure(comparison: Comparison) -> Figure:
    """Reliability diagrams of classes; of numbers the coverage of central intervals at every level, and histograms of
    the probability integral transform, which is randomised where the numbers are counts.
    """
    return together(calibration(Findings(comparison)))


def calibration(found: Findings) -> Picture:
    return _reliability(found) if found.comparison.task == "classification" else _pit(found)


def _reliability(found: Findings) -> Picture:
    comparison = found.comparison
    labels = np.asarray(comparison.test_targets).astype(int)
    panels, rows = [], []
    for name in found.names:
        prediction = comparison.predictions[name]

        def draw(axes: Axes, prediction: Prediction = prediction) -> None:
            draw_reliability(axes, prediction, labels)
            axes.set_xlabel(for_figure(predicted_event(prediction)))
            axes.set_ylabel("share that came true")
            axes.set_xlim(-0.03, 1.03)
            plain_axes(axes)

        made = Event.of(prediction, labels).binned()
        rows += [
            {"method": name, "probability": a, "share": b, "rows": c}
            for a, b, c in zip(made["probability"], made["share"], made["rows"], strict=True)
        ]
        words = f"Reliability of {name}, predicted probability to share that came true: " + ", ".join(
            f"{a:.2f} to {b:.2f} ({int(c)} rows)"
            for a, b, c in zip(made["probability"], made["share"], made["rows"], strict=True)
        )
        panels.append(Panel(title(comparison, name), draw, words + "."))
    return Picture(
        "calibration",
        "Reliability",
        "How often what was given a probability came true, in ten bins of that probability, with 90 % Clopper-Pearson "
        "intervals. Calibrated probabilities lie on the dashed line. A probability integral transform is not defined "
        "for classes.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method gave predictions.",
    )


def _pit(found: Findings) -> Picture:
    values, refused = found.transforms
    heading = "Reliability and probability integral transform"
    if not values:
        return Picture("calibration", heading, "", missing=refused or "No method gave predictions.")
    counted = any(found.comparison.predictions[name].is_counts for name in values)
    panels = [
        Panel(
            "Coverage of central intervals",
            lambda axes: draw_coverages(axes, values, counted),
            "Share of test targets in central intervals of 50, 80 and 95 %: "
            + "; ".join(
                f"{name} {', '.join(f'{v.covered(level):.0%}' for level in (0.5, 0.8, 0.95))}"
                for name, v in values.items()
            )
            + ".",
        )
    ]
    rows = len(next(iter(values.values())).pit)
    bins = min(BINS_OF_PIT, max(2, rows // 8))
    counts = {name: np.histogram(v.pit, np.linspace(0.0, 1.0, bins + 1))[0] for name, v in values.items()}
    from scipy.stats import binom

    band = binom.ppf([0.05, 0.95], rows, 1.0 / bins) / rows * bins
    tallest = max(1.3 * band[1], *(float(c.max()) / rows * bins for c in counts.values())) * 1.05
    called = "randomised PIT" if counted else "PIT"

    def drawer(name: str) -> Any:
        def draw(axes: Axes) -> None:
            edges = np.linspace(0.0, 1.0, bins + 1)
            axes.stairs(
                counts[name] / rows * bins,
                edges,
                fill=True,
                color=SKY,
                alpha=0.6,
                label=f"density of {called}",
            )
            axes.stairs(counts[name] / rows * bins, edges, color=BLUE, linewidth=1.0)
            axes.axhspan(band[0], band[1], color=GREY, alpha=0.18, linewidth=0, label="90 % where calibrated")
            axes.axhline(1.0, color=GREY, linewidth=1.0, linestyle="--")
            axes.set_xlim(0.0, 1.0)
            axes.set_ylim(0.0, tallest)
            axes.set_xlabel(f"{called}: predicted probability of less\nthan what was observed")
            axes.set_ylabel("density")
            plain_axes(axes)

        return draw

    transform = "randomised probability integral transform" if counted else "probability integral transform"
    panels += [
        Panel(
            f"{name}: {called}",
            drawer(name),
            f"Histogram of the {transform} of {name}, {bins} bins from 0 to 1 in rows: "
            f"{', '.join(str(int(c)) for c in counts[name])}; {rows / bins:.1f} expected in each.",
            2.1,
        )
        for name in values
    ]
    whole = (
        "Intervals of counts end at whole numbers and hold more than they promise even where a method is calibrated: "
        "lines above zero are no fault. "
        if counted
        else "below zero intervals are too narrow. "
    )
    drawn = (
        "The distribution function jumps at a count, and the transform is a point drawn at random within the jump. "
        if counted
        else ""
    )
    return Picture(
        "calibration",
        heading,
        "First, by how much the share of test targets inside central intervals differs from what the interval "
        f"promises{'. ' if counted else '; '}{whole}Then, for each method, where in its predictive distribution the "
        "observations fell: flat if calibrated, high at both ends if the distribution is too narrow, a hump if it is "
        f"too wide. {drawn}The grey band holds a bin of a calibrated method in 90 % of cases, each bin by itself.",
        tuple(panels),
        frame_of(
            {"method": name, "row": index, "pit": value}
            for name, v in values.items()
            for index, value in enumerate(v.pit)
        ),
    )


# --- expected log predictive density ----------------------------------------------------------------------


def elpd_figure(comparison: Comparison) -> Figure:
    """Differences of log score to the best method, on test rows and by leave-one-out over training rows."""
    return together(elpd(Findings(comparison)))


def elpd(found: Findings) -> Picture:
    scored = found.row_scores["log_score"]
    panels, rows = [], []
    entries = []
    for name in scored:
        gap, error = behind(scored, name, "log_score")
        entries.append((name, -gap, error, False))
    entries.sort(key=lambda entry: -entry[1])
    if len(entries) > 1:
        rows += [_difference("test rows, mean", *entry) for entry in entries]
        panels.append(
            forest_panel(
                f"On {len(found.comparison.test_targets)} test rows",
                entries,
                "log score minus the best,\nnats per test row",
            )
        )
    found_loo = {
        name: np.asarray(loo.elpd_data.elpd_i.values).ravel() for name, loo in found.left_out.items()
    }
    if len(found_loo) > 1:
        best = max(found_loo, key=lambda name: float(found_loo[name].sum()))
        entries = []
        for name, values in found_loo.items():
            gap, error = paired_difference(found_loo[best], values)
            count = len(values)
            doubtful = not found.left_out[name].worst_k <= K_LIMIT
            entries.append((name, -gap * count, 0.0 if name == best else error * count, doubtful))
        entries.sort(key=lambda entry: -entry[1])
        rows += [_difference("leave-one-out, sum", *entry) for entry in entries]
        panels.append(
            forest_panel(
                f"By leave-one-out over {len(found_loo[best])} training rows",
                entries,
                "ELPD minus the best,\nnats in all",
                "Pareto k above 0.7: not to be relied on",
            )
        )
    return Picture(
        "elpd",
        "Expected log predictive density",
        "Differences to the nominally best method, with two standard errors of the paired difference. A bar that "
        "reaches the dashed line is no difference that these rows establish. Leave-one-out is by Pareto-smoothed "
        "importance sampling (ArviZ); draws of an approximation are taken at their word there, and hollow marks have "
        "rows for which it fails.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "There are no two methods to compare.",
    )


def _difference(where: str, name: str, value: float, error: float, doubtful: bool) -> dict[str, Any]:
    return {
        "where": where,
        "method": name,
        "difference": value,
        "standard_error": error,
        "pareto_k_above_limit": doubtful,
    }


# --- ranks in function space ------------------------------------------------------------------------------


def ranks_figure(comparison: Comparison) -> Figure:
    """Ranks of the draws of each chain among those of all, in function space, as differences of distributions."""
    return together(ranks(Findings(comparison)))


def function_draws(comparison: Comparison, name: str) -> Any:
    """What a network computes, draw by draw, as a DataTree for ArviZ: `arviz_plots.plot_rank(function_draws(...))`.

    `f` (chain, draw, row): the mean of each draw at up to 100 test rows (for classes the probability of what occurred);
    `log_likelihood` (chain, draw): the sum over training rows.

    Raises UnsupportedError for a method that is not of chains, or whose predictions are not those of its draws.
    """
    fit, tree = comparison.fits.get(name), comparison.trees.get(name)
    if fit is None or comparison.table.loc[name, "kind"] != "chains":
        raise UnsupportedError(
            "function_draws: "
            + message("a method of chains", f"{name!r}, which is none", "NUTS or another sampler")
        )
    from xarray import Dataset, DataTree

    prediction = comparison.predictions[name]
    chains, draws = fit.shape
    found: dict[str, Any] = {}
    if prediction.draws == chains * draws:
        means = prediction.component_mean()
        if prediction.is_classes:
            labels = np.asarray(comparison.test_targets).astype(int)
            means = (
                np.where(labels == 1, means, 1.0 - means)
                if means.ndim == 2
                else means[:, np.arange(len(labels)), labels]
            )
        means = means.reshape(chains, draws, -1)
        rows = np.unique(np.linspace(0, means.shape[-1] - 1, ROWS_RANKED).round().astype(int))
        found["f"] = (("chain", "draw", "row"), means[..., rows])
    if tree is not None and "log_likelihood" in tree.children:
        total = tree["log_likelihood"]["y"].values
        found["log_likelihood"] = (("chain", "draw"), total.reshape(*total.shape[:2], -1).sum(axis=-1))
    if not found:
        raise UnsupportedError(
            "function_draws: "
            + message("predictions of each draw, or a tree", repr(prediction), "a prediction of all draws")
        )
    sets = {key: Dataset({key: value}) for key, value in found.items()}
    if len({value[1].shape[:2] for value in found.values()}) == 1:
        return DataTree.from_dict({"posterior": Dataset(found)})
    # A tree that was thinned has fewer draws than the prediction.
    return DataTree.from_dict({"posterior": sets["f"], "log_likelihood": sets["log_likelihood"]})


def ranks(found: Findings) -> Picture:
    comparison = found.comparison
    panels, rows = [], []
    for name in found.names:
        if comparison.table.loc[name, "kind"] != "chains":
            continue
        try:
            tree = function_draws(comparison, name)
        except UnsupportedError:
            continue
        for label, values in _ranked_quantities(tree):
            if values.shape[0] < 2 or not np.isfinite(values).all():
                continue
            made = rank_curves(values)
            outside = made.outside
            told = (
                "too few independent draws of each for a band"
                if made.band is None
                else "all chains stay inside the band of chains that agree"
                if not outside
                else f"{len(outside)} of {len(made.curves)} chains leave the band of chains that agree"
            )
            panels.append(
                Panel(
                    f"{name}: {label}",
                    _ranks_drawer(made),
                    f"Ranks of {label} of {name}, {len(made.curves)} chains, {made.draws} draws of each: {told}.",
                )
            )
            rows += [
                {"method": name, "quantity": label, "chain": chain, "at": at, "difference": value}
                for chain, curve in enumerate(made.curves)
                for at, value in zip(made.at, curve, strict=True)
            ]
    return Picture(
        "ranks",
        "Ranks in function space",
        "Draws of all chains are ranked together; for each chain the distribution of its ranks minus the uniform "
        "one. Chains that agree wander around zero inside the band, which holds all of them together in 99 % of "
        "cases. Draws are thinned until they are nearly independent. Shown are the log likelihood of the training "
        "rows and, of the mean function at the test rows, that with the largest R-hat: weights themselves can be "
        "exchanged without any change to the function, and are not ranked.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method has several chains.",
    )


def _ranked_quantities(tree: Any) -> Iterable[tuple[str, np.ndarray]]:
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    groups = [tree[name].dataset for name in tree.children]
    for each in groups:
        if "f" in each:
            values = each["f"].values
            varies = np.flatnonzero(values.max(axis=(0, 1)) > values.min(axis=(0, 1)))
            if len(varies) and values.shape[0] > 1 and values.shape[1] > 3:
                with np.errstate(all="ignore"):
                    rhat: Any = array_stats.rhat(
                        values[..., varies], method="rank", chain_axis=0, draw_axis=1
                    )
                worst = varies[int(np.argmax(np.nan_to_num(rhat, nan=np.inf)))]
                yield "mean function, worst row", values[..., worst]
    for each in groups:
        if "log_likelihood" in each:
            yield "log likelihood", each["log_likelihood"].values


@dataclass(frozen=True)
class RankCurves:
    """ECDF of ranks minus uniform: `at` (n,), `curves` (chain, n), half-width of the `band` (n,) or None."""

    at: np.ndarray
    curves: np.ndarray
    band: np.ndarray | None
    draws: int

    @property
    def outside(self) -> list[int]:
        """The chains that leave the band anywhere."""
        if self.band is None:
            return []
        return [index for index, curve in enumerate(self.curves) if np.any(np.abs(curve) > self.band)]


def rank_curves(values: np.ndarray, seed: int = 0) -> RankCurves:
    """Fractional ranks of draws (chain, draw) among all, as differences of distributions (Säilynoja, Bürkner and
    Vehtari 2022, Statistics and Computing 32).

    Draws are thinned to about the effective sample size of single chains (ArviZ's bulk ESS, the median over chains:
    that of all together is small just where they disagree). The band is simultaneous: ranks of chains that agree are a
    random division of all ranks, of which 1000 are simulated; in 99 % of them no chain leaves the band anywhere. Its
    width is in proportion to the pointwise standard deviation sqrt(u (1 - u) (1 - 1 / m) / n). Where fewer than 20
    draws of a chain are left there is no band, and nothing is thinned.
    """
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]
    from scipy.stats import rankdata

    chains, draws = values.shape
    with np.errstate(all="ignore"):
        sizes = [
            np.ravel(array_stats.ess(chain[None, :, None], method="bulk", chain_axis=0, draw_axis=1))[0]
            for chain in values.astype(np.float64)
        ]
    size = max(float(np.median(np.nan_to_num(sizes, nan=1.0))), 1.0)
    factor = math.ceil(draws / size)
    known = draws // factor >= FEWEST_RANKS
    thin = values[:, factor - 1 :: factor] if known else values
    count = thin.shape[1]
    steps = min(count, STEPS_DRAWN)
    places = np.arange(1, steps) / steps
    shares = rankdata(thin).reshape(thin.shape) / thin.size
    found = np.stack([np.mean(shares <= place, axis=1) for place in places], axis=1) - places
    band = None
    if known:
        deviation = np.sqrt(places * (1.0 - places) * (1.0 - 1.0 / chains) / count)
        upto = np.floor(places * thin.size + 1e-9).astype(int) - 1
        labels = np.tile(np.repeat(np.arange(chains, dtype=np.int32), count), (SIMULATIONS, 1))
        labels = np.random.default_rng(seed).permuted(labels, axis=1)
        largest = np.zeros(SIMULATIONS)
        for chain in range(chains):
            inside = np.cumsum(labels == chain, axis=1)[:, upto] / count
            np.maximum(largest, np.max(np.abs(inside - places) / deviation, axis=1), out=largest)
        band = np.quantile(largest, BAND) * deviation
    return RankCurves(places, found, band, count)


def _ranks_drawer(made: RankCurves) -> Any:
    def draw(axes: Axes) -> None:
        at = np.concatenate([[0.0], made.at, [1.0]])
        closed = np.pad(made.curves, ((0, 0), (1, 1)))
        if made.band is not None:
            band = np.pad(made.band, 1)
            axes.fill_between(
                at, -band, band, color=GREY, alpha=0.18, linewidth=0, label="99 % where chains agree"
            )
        for chain, curve in enumerate(closed):
            off = chain in made.outside
            axes.plot(
                at,
                curve,
                color=VERMILION if off else BLUE,
                linewidth=1.6 if off else 1.0,
                linestyle="--" if off else "-",
                label="a chain that leaves the band" if off else "a chain",
            )
        axes.axhline(0.0, color=GREY, linewidth=0.8)
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("rank among all draws (share)")
        axes.set_ylabel("distribution minus uniform")
        plain_axes(axes)

    return draw


# --- loss curves ------------------------------------------------------------------------------------------


def losses_figure(comparison: Comparison) -> Figure:
    """The loss curve of each method that has one."""
    return together(losses(Findings(comparison)))


def losses(found: Findings) -> Picture:
    panels, rows = [], []
    for name in found.names:
        fit = found.comparison.fits.get(name)
        history = {} if fit is None else fit.info.history
        curves = np.asarray(history.get("loss", history.get("member_loss", ())), dtype=np.float64)
        if curves.ndim == 1:
            curves = curves[:, None]
        if curves.ndim != 2 or len(curves) < 2 or not np.isfinite(curves).any():
            continue
        made = [_binned(curves[:, column]) for column in range(curves.shape[1])]
        rows += [
            {"method": name, "curve": column, "step": step, "mean": mean, "lowest": low, "highest": high}
            for column, (steps, means, lows, highs) in enumerate(made)
            for step, mean, low, high in zip(steps, means, lows, highs, strict=True)
        ]
        several = f", {len(made)} members" if len(made) > 1 else ""
        first, last = np.nanmean([each[1][0] for each in made]), np.nanmean([each[1][-1] for each in made])
        panels.append(
            Panel(
                f"{name}{several}",
                _losses_drawer(made),
                f"Loss of {name} over {len(curves)} steps{several}: from {first:.4g} in the first to {last:.4g} in "
                "the last hundredth or so.",
            )
        )
    return Picture(
        "losses",
        "Loss curves",
        "The loss over the steps of the optimiser: means over short stretches, with the lowest and highest value in "
        "each as a band. The axis shows what comes after the first tenth of the steps in full; earlier losses may "
        "lie above it. Losses of different methods are different quantities.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method keeps a loss curve.",
    )


def _binned(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(last step of each stretch, mean, lowest, highest) of finite losses, in at most STEPS_DRAWN stretches."""
    steps = np.flatnonzero(np.isfinite(curve))
    parts = np.array_split(steps, min(STEPS_DRAWN, len(steps))) if len(steps) else []
    columns = [(part[-1] + 1, curve[part].mean(), curve[part].min(), curve[part].max()) for part in parts]
    at, mean, low, high = (np.array(column, dtype=np.float64) for column in zip(*columns, strict=True))
    return at, mean, low, high


def _losses_drawer(made: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]) -> Any:
    def draw(axes: Axes) -> None:
        lowest, highest = math.inf, -math.inf
        for steps, mean, low, high in made:
            single = len(made) == 1
            if single:
                axes.fill_between(
                    steps, low, high, color=SKY, alpha=0.35, linewidth=0, label="lowest to highest"
                )
            axes.plot(
                steps,
                mean,
                color=BLUE,
                linewidth=1.2,
                alpha=1.0 if single else 0.6,
                label="mean of a stretch",
            )
            late = steps > 0.1 * steps[-1]
            lowest = min(lowest, float((low if single else mean)[late].min()))
            highest = max(highest, float((high if single else mean)[late].max()))
        pad = 0.05 * (highest - lowest) or 1.0
        axes.set_ylim(lowest - pad, highest + pad)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats")
        plain_axes(axes)

    return draw


# --- the gap to the reference -----------------------------------------------------------------------------


def gap_figure(comparison: Comparison) -> Figure:
    """How far the mean function and the spread of each method are from the reference, beside sampling noise alone."""
    return together(gap(Findings(comparison)))


def gap(found: Findings) -> Picture:
    comparison, reference = found.comparison, found.reference
    heading = "Gap to the reference, and the noise floor"
    if reference is None:
        return Picture(
            "gap", heading, "", missing="There is no reference to measure a gap by, or it gave no posterior."
        )
    table = comparison.table
    rows = [
        {
            "method": name,
            **{
                column: float(table.loc[name, column])  # type: ignore[arg-type]
                for column in ("gap_mean", "gap_mean_floor", "gap_sd_ratio", "gap_sd_floor")
            },
        }
        for name in found.names
        if name != reference and math.isfinite(float(table.loc[name, "gap_mean"]))  # type: ignore[arg-type]
    ]
    if not rows:
        return Picture("gap", heading, "", missing="No other method has a gap that could be measured.")
    rows.sort(key=lambda row: row["gap_mean"])
    names = [row["method"] for row in rows]
    floor, floor_ratio = rows[0]["gap_mean_floor"], rows[0]["gap_sd_floor"]
    known = math.isfinite(floor) and math.isfinite(floor_ratio) and floor_ratio > 0.0
    noise = f" Between two halves of {reference}: {floor:.2f}." if known else ""
    noise_ratio = f" Between two halves of {reference}: {floor_ratio:.2f}." if known else ""
    panels = (
        Panel(
            "Mean function",
            lambda axes: draw_gaps(axes, names, [row["gap_mean"] for row in rows], floor if known else None),
            f"Distance of the mean function from that of {reference} in its epistemic standard deviations: "
            + "; ".join(f"{row['method']} {row['gap_mean']:.2f}" for row in rows)
            + f".{noise}",
            height_for(len(names)),
        ),
        Panel(
            "Spread",
            lambda axes: draw_ratios(
                axes, names, [row["gap_sd_ratio"] for row in rows], floor_ratio if known else None
            ),
            f"Epistemic standard deviation over that of {reference}: "
            + "; ".join(f"{row['method']} {row['gap_sd_ratio']:.2f}" for row in rows)
            + f".{noise_ratio}",
            height_for(len(names)),
        ),
    )
    return Picture(
        "gap",
        heading,
        f"First, how far the mean function is from that of {reference}, in its epistemic standard deviations. Then, "
        "the epistemic standard deviation divided by its own; 1 is right. Grey is what two halves of the draws of "
        f"{reference} differ by: sampling noise alone. Logarithmic axes; an arrow is a value beyond the edge.",
        panels,
        frame_of(rows),
    )


# --- Pareto k ---------------------------------------------------------------------------------------------


def pareto_k_figure(comparison: Comparison) -> Figure:
    """k-hat of each approximation as an importance proposal, and Pareto k of leaving out each training row."""
    return together(pareto_k_picture(Findings(comparison)))


def pareto_k_picture(found: Findings) -> Picture:
    table, panels, rows = found.comparison.table, [], []
    hats = [
        (name, float(table.loc[name, "k_hat"]))  # type: ignore[arg-type]
        for name in found.names
        if not math.isnan(float(table.loc[name, "k_hat"]))  # type: ignore[arg-type]
    ]
    rows += [{"method": name, "what": "p / q", "row": -1, "pareto_k": k} for name, k in hats]
    if hats:
        panels.append(
            Panel(
                "k-hat of the approximation",
                lambda axes: _draw_k_hats(axes, hats),
                "k-hat of p(w, D) / q(w), good below 0.7: "
                + "; ".join(f"{name} {k:.2f}" for name, k in hats)
                + ".",
                height_for(len(hats)),
            )
        )
    per_row = {name: np.ravel(loo.elpd_data.pareto_k.values) for name, loo in found.left_out.items()}
    rows += [
        {"method": name, "what": "leave-one-out", "row": row, "pareto_k": float(k)}
        for name, ks in per_row.items()
        for row, k in enumerate(ks)
    ]
    if per_row:
        panels.append(
            Panel(
                "Pareto k of training rows",
                lambda axes: _draw_row_ks(axes, per_row),
                "Pareto k of leaving out each training row; largest, and share above 0.7: "
                + "; ".join(
                    f"{name} {np.max(ks):.2f}, {np.mean(~(ks <= K_LIMIT)):.1%}"
                    for name, ks in per_row.items()
                )
                + ".",
                height_for(len(per_row)),
            )
        )
    return Picture(
        "pareto_k",
        "Pareto k",
        "First, k-hat of the importance weights p(w, D) / q(w) of each approximation with a density. Above 0.7 it is "
        "no proposal for importance sampling; over hundreds of weights that is nearly always so, and says little "
        "about its predictions. Then, k of leaving out one training row after the other; above 0.7 leave-one-out "
        "cannot be relied on for that row. Arrows stand for infinite values.",
        tuple(panels),
        frame_of(rows),
        "" if panels else "No method has a density, or rows that can be left out.",
    )


def _draw_k_hats(axes: Axes, hats: Sequence[tuple[str, float]]) -> None:
    finite = [k for _, k in hats if math.isfinite(k)]
    low, high = min([0.0, *finite]) - 0.1, max([1.2, *finite]) + 0.2
    axes.set_xlim(low, high)
    axes.axvline(K_LIMIT, color=GREY, linewidth=1.0, linestyle="--", label="limit 0.7", zorder=1)
    draw_marks_inside(axes, [k for _, k in hats], low, high)
    names_below(axes, [name for name, _ in hats])
    axes.set_xlabel("k-hat")
    plain_axes(axes)


def _draw_row_ks(axes: Axes, per_row: Mapping[str, np.ndarray]) -> None:
    finite = np.concatenate([ks[np.isfinite(ks)] for ks in per_row.values()] or [np.zeros(1)])
    low = min(-0.1, float(finite.min(initial=0.0))) - 0.05
    high = max(1.0, float(finite.max(initial=0.0))) + 0.1
    axes.set_xlim(low, high)
    axes.axvline(K_LIMIT, color=GREY, linewidth=1.0, linestyle="--", label="limit 0.7", zorder=1)
    for place, ks in enumerate(per_row.values()):
        # Rows of equal k side by side: a fixed zigzag, so that the same comparison is the same picture.
        beside = place + 0.3 * (np.arange(len(ks)) * 0.618034 % 1.0 - 0.5)
        bad = ~(ks <= K_LIMIT)
        at = np.clip(np.nan_to_num(ks, nan=high, posinf=high), low, high)
        many = len(ks) > MANY
        for rows, colour, mark, label in (
            (~bad, BLUE, ".", "a training row"),
            (bad, VERMILION, "D", "a row above the limit"),
        ):
            axes.plot(
                at[rows],
                beside[rows],
                mark,
                color=colour,
                markersize=4.0 if mark == "." else 3.5,
                alpha=0.8,
                markeredgewidth=0.0,
                label=label,
                rasterized=many,
                zorder=3,
            )
    names_below(axes, list(per_row))
    axes.set_xlabel("Pareto k")
    plain_axes(axes)


# --- all of them ------------------------------------------------------------------------------------------

PICTURES: dict[str, Callable[[Findings], Picture]] = {
    "cost": cost,
    "predictions": beside_reference,
    "calibration": calibration,
    "elpd": elpd,
    "ranks": ranks,
    "losses": losses,
    "gap": gap,
    "pareto_k": pareto_k_picture,
}


def title(comparison: Comparison, name: str) -> str:
    """A method with its standing."""
    standing = comparison.table.loc[name, "reference"]
    return f"{name}: {standing}" if standing else name
