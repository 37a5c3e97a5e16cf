"""Figures of a comparison: one function for each, from a `Comparison` to a matplotlib Figure.

They are made of panels (`comparison.panels`). ArviZ's own plots can be drawn from the trees of a comparison, and in
function space from `function_draws`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison.drawing import (
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
    predicted_event,
    single_input,
)
from ppl_bnn.evaluation.comparison.figures import marked_targets
from ppl_bnn.evaluation.comparison.panels import (
    INK,
    Panel,
    Picture,
    cost_drawer,
    draw_coverages,
    frame_of,
    plain_axes,
    short,
    together,
    with_error,
)
from ppl_bnn.evaluation.comparison.summary import duration, seconds_of
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import Event
from ppl_bnn.reporting.diagnostic_figures import (
    MANY,
    Findings,
    behind,
    elpd,
    gap,
    losses,
    pareto_k_picture,
    ranks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.evaluation.comparison.comparison import Comparison


BINS_OF_PIT = 10


# --- accuracy against cost --------------------------------------------------------------------------------


def cost_figure(comparison: Comparison) -> Figure:
    """Distance of each method to the best one against its fitting time, with the Pareto front.

    Parameters
    ----------
    comparison : Comparison
        The comparison.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(cost(Findings(comparison)))


def cost(found: Findings) -> Picture:
    """The picture of `cost_figure`."""
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


# --- predictions beside the reference ---------------------------------------------------------------------


def beside_reference_figure(comparison: Comparison) -> Figure:
    """Predictions of each method beside the reference.

    Bands along a single input, class maps over two inputs, else row by row.

    Parameters
    ----------
    comparison : Comparison
        The comparison.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(beside_reference(Findings(comparison)))


def beside_reference(found: Findings) -> Picture:
    """The picture of `beside_reference_figure`."""
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
    """Draw where the most probable class changes: the line on which each class is level with the best other."""
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
    """For inputs that cannot be drawn: the mean function of each method against that of the reference, row by row."""
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
    """Calibration of each method.

    For classes, reliability diagrams. For numbers, the coverage of central intervals at every level, and histograms of
    the probability integral transform, which is randomised if the numbers are counts.

    Parameters
    ----------
    comparison : Comparison
        The comparison.

    Returns
    -------
    matplotlib.figure.Figure
    """
    return together(calibration(Findings(comparison)))


def calibration(found: Findings) -> Picture:
    """The picture of `calibration_figure`."""
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
    """The name of a method with its status."""
    standing = comparison.table.loc[name, "reference"]
    return f"{name}: {standing}" if standing else name
