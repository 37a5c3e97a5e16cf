"""Predictions of the methods of a comparison beside those of its reference: curves, class maps, or row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.figures import BLUE, GUIDE, SKY, VERMILION
from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison import drawing, figures
from ppl_bnn.evaluation.comparison.drawing import LEVEL, MANY
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.reporting.figures.panels import HEIGHT, Panel, Picture, finish, rows_of, short
from ppl_bnn.reporting.findings import Findings

ENDS = ("mean", "lower_90", "upper_90")


def with_standing(found: Findings, name: str) -> str:
    """The name of a method, and that it is the reference."""
    standing = found.table.loc[name, "reference"]
    return f"{name}: {standing}" if standing else name


def predictions(found: Findings) -> Picture:
    """Predictions of each method beside the reference: curves over one input, class maps over two, or row by row."""
    comparison, x = found.comparison, found.comparison.test_inputs
    missing = partial(Picture, "Predictions")
    if not found.names:
        return missing(missing="No method gave predictions.")
    classes = comparison.task == "classification"
    if not classes and figures.draws_curves(comparison):
        return _curves(found)
    known = comparison.posteriors or comparison.drawn
    if classes and not isinstance(x, Mapping) and x.ndim == 2 and x.shape[1] == 2 and known:
        return _maps(found)
    if found.reference is not None and len(found.names) > 1:
        return _against_reference(found, found.reference)
    if classes:
        only = "Without a reference, predictions of classes are drawn over two inputs only; see their calibration."
        return missing(missing=only)
    return _intervals(found)


def _panels(
    found: Findings, names: Iterable[str], draw: Any, words: Any, height: float = HEIGHT
) -> list[Panel]:
    """A panel for each method; `draw` draws it on axes, and `words` describes it."""
    called = {name: with_standing(found, name) for name in names}
    return [Panel(title, partial(draw, name=name), words(name), height) for name, title in called.items()]


# --- curves and maps --------------------------------------------------------------------------------------


def _made(found: Findings) -> dict[str, tuple[np.ndarray, Prediction]]:
    """Method -> inputs of its curve or map, and its prediction there, of those that have one."""
    made = {name: figures.drawn(found.comparison, name) for name in found.names}
    return {name: (at, each) for name, (at, each) in made.items() if at is not None and each is not None}


def _curves(found: Findings) -> Picture:
    comparison, reference = found.comparison, found.reference
    inputs, names = comparison.test_inputs[:, 0], comparison.data.get("feature_names")
    at_rows = {name: (inputs, comparison.predictions[name]) for name in found.names}
    drawn = at_rows | {name: (at[:, 0], made) for name, (at, made) in _made(found).items()}
    if any(prediction.is_counts or len(prediction.shape) != 1 for _, prediction in drawn.values()):
        drawn = at_rows
    edges = {name: (x, made.mean, *made.interval(LEVEL)) for name, (x, made) in drawn.items()}
    targets = comparison.test_targets, drawing.any_censored(comparison)
    values = np.concatenate([y[rows] for y, rows, _, _ in drawing.marked_targets(*targets)])
    low = float(min(values.min(), *(lower.min() for _, _, lower, _ in edges.values())))
    high = float(max(values.max(), *(upper.max() for *_, upper in edges.values())))
    pad = 0.04 * (high - low) or 1.0

    def draw(axes: Axes, name: str) -> None:
        drawing.draw_curve(axes, *drawn[name])
        if reference is not None and name != reference:
            at, mean, *ends = edges[reference]
            order, style = np.argsort(at, kind="stable"), {"color": VERMILION, "zorder": 4}
            label = "reference: mean and 90 % band"
            axes.plot(at[order], mean[order], "--", **style, linewidth=1.3, label=label)
            for end in ends:
                axes.plot(at[order], end[order], "--", **style, linewidth=0.9)
        drawing.draw_targets(axes, inputs, *targets)
        axes.set_ylim(low - pad, high + pad)
        finish(axes, for_figure(names[0] if names else "x"), for_figure(comparison.data["target_name"]))

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

    rows = rows_of(("x", *ENDS), {name: zip(*columns, strict=True) for name, columns in edges.items()})
    beside = f"Dashed: the mean and the 90 % band of observations of {reference}. " if reference else ""
    caption = (
        "The mean of each method with two bands of 90 %: of the mean function (inner) and of observations (outer). "
        f"{beside}More data would narrow the inner band only. Beyond the test rows the curves are extrapolated."
    )
    title = "Predictions beside the reference" if reference else "Predictions"
    return Picture(title, caption, _panels(found, found.names, draw, words), rows)


def _maps(found: Findings) -> Picture:
    comparison, reference = found.comparison, found.reference
    x, y = comparison.test_inputs, np.asarray(comparison.test_targets).astype(int)
    names = comparison.data.get("feature_names") or ("x[0]", "x[1]")
    across, up = drawing.drawn_over(x)
    points = drawing.grid_points(across, up)
    drawn = {name: made for name, (at, made) in _made(found).items() if np.array_equal(at, points)}
    if not drawn:
        return Picture("Boundaries", missing="No prediction over the two inputs is stored.")
    some = drawing.evenly(np.arange(len(y), dtype=np.float64))

    def draw(axes: Axes, name: str) -> None:
        drawing.draw_class_map(axes, across, up, drawn[name])
        drawing.draw_classes(axes, x[some], y[some], drawing.class_names(drawn[name]), size=3.2)
        if reference in drawn and name != reference:
            _draw_borders(axes, across, up, drawn[reference])
        axes.set_xlabel(for_figure(names[0]))
        axes.set_ylabel(for_figure(names[1]))

    def words(name: str) -> str:
        best = drawn[name].probabilities
        sure = np.mean(best.max(axis=1) > 0.9)
        text = f"Map of the most probable class by {name}: its probability is above 90 % on {sure:.0%} of the area"
        if reference in drawn and name != reference:
            same = best.argmax(axis=1) == drawn[reference].probabilities.argmax(axis=1)
            text += f", and it is the class of {reference} on {np.mean(same):.0%} of it"
        return text + "."

    columns = ("x_0", "x_1", *(f"probability_{index}" for index in range(next(iter(drawn.values())).classes)))
    rows = rows_of(columns, {name: np.hstack([points, made.probabilities]) for name, made in drawn.items()})
    beside = f"Dashed: where the most probable class changes by {reference}. " if reference in drawn else ""
    caption = (
        "Each place has the colour of its most probable class, paler where that is less probable. Lines are of equal "
        f"probability. {beside}Marks are test rows in the colour of their label."
    )
    title = "Boundaries beside the reference" if reference in drawn else "Boundaries"
    return Picture(title, caption, _panels(found, drawn, draw, words, 3.0), rows)


def _draw_borders(axes: Axes, across: np.ndarray, up: np.ndarray, prediction: Prediction) -> None:
    """Draw where the most probable class changes: the line on which each class is level with the best other."""
    probabilities = prediction.probabilities
    style: dict[str, Any] = {"colors": VERMILION, "linestyles": "--", "linewidths": 1.8}
    for index in range(1, 2) if prediction.classes == 2 else range(prediction.classes):
        lead = probabilities[:, index] - np.delete(probabilities, index, axis=1).max(axis=1)
        if lead.min() < 0.0 < lead.max():
            axes.contour(across, up, lead.reshape(len(up), len(across)), levels=[0.0], **style)
    axes.plot([], [], "--", color=VERMILION, linewidth=1.8, label="border by the reference")


# --- row by row -------------------------------------------------------------------------------------------


def draw_against(
    axes: Axes,
    expected: np.ndarray,
    ours: np.ndarray,
    spread: np.ndarray,
    probabilities: bool,
    row: str = "a test row",
) -> None:
    """Draw values (n,) against those of a reference, with its standard deviations (n,) if they are known, else (0,)."""
    many, ends = len(expected) > MANY, np.concatenate([expected, ours])
    low, high = (0.0, 1.0) if probabilities else (float(ends.min()), float(ends.max()))
    pad = 0.04 * (high - low) or 1.0
    if spread.shape == expected.shape:
        label = "standard deviation of the reference's mean function"
        style: dict[str, Any] = {"color": SKY, "linewidth": 1.0, "alpha": 0.6, "rasterized": many}
        axes.hlines(ours, expected - spread, expected + spread, **style, label=label)
    dots: dict[str, Any] = {"color": BLUE, "markersize": 3.0, "alpha": 0.8, "rasterized": many}
    axes.plot(expected, ours, "o", **dots, label=row)
    axes.axline((0.0, 0.0), slope=1.0, **GUIDE, label="agreement")
    axes.set(xlim=(low - pad, high + pad), ylim=(low - pad, high + pad))


def _against_reference(found: Findings, reference: str) -> Picture:
    """For inputs that cannot be drawn: the mean function of each method against that of the reference, row by row."""
    comparison = found.comparison
    theirs = comparison.predictions[reference]
    classes, labels = theirs.is_classes, np.asarray(comparison.test_targets)
    what = "probability of the observed class" if classes else "predictive mean"
    try:
        spread = np.ravel(np.sqrt(theirs.mean_function_variance))
    except UnsupportedError:
        spread = np.zeros(0)

    def values(prediction: Prediction) -> np.ndarray:
        if classes:
            return prediction.probabilities[np.arange(len(labels)), labels.astype(int)]
        return np.ravel(prediction.mean)

    expected, ours = values(theirs), {name: values(comparison.predictions[name]) for name in found.names}
    del ours[reference]

    def draw(axes: Axes, name: str) -> None:
        draw_against(axes, expected, ours[name], spread, classes)
        finish(axes, short(reference), short(name))

    def words(name: str) -> str:
        varies = len(expected) > 1 and np.ptp(expected) > 0.0 and np.ptp(ours[name]) > 0.0
        correlation = float(np.corrcoef(expected, ours[name])[0, 1]) if varies else math.nan
        return (
            f"{what.capitalize()} by {name} against {reference} in {len(expected)} places: correlation "
            f"{correlation:.3f}, median distance {np.median(np.abs(ours[name] - expected)):.3g}."
        )

    pairs = {name: zip(expected, each, strict=True) for name, each in ours.items()}
    rows = rows_of(("reference", "value"), pairs)
    caption = (
        f"For each test row the {what} of a method against that of {reference}, with the standard deviation of the "
        f"mean function of {reference} as a horizontal bar. On the dashed line they agree."
    )
    panels = _panels(found, ours, draw, words)
    return Picture("Predictions beside the reference", caption, panels, rows)


def _intervals(found: Findings) -> Picture:
    made, target = drawing.Intervals.of(found.comparison), for_figure(found.comparison.data["target_name"])
    if not made.rows:
        return Picture("Predictions", missing="No test row was observed.")

    def draw(axes: Axes, name: str) -> None:
        made.draw(axes, name)
        finish(axes, f"observed {target}", "predicted, with 90 % interval")

    def words(name: str) -> str:
        inside = f"{np.mean(made.inside(name)):.0%} contain them"
        return f"90 % intervals of {name} against {len(made.truth)} observed values: {inside}."

    values = {name: zip(made.truth, *columns, strict=True) for name, columns in made.ends.items()}
    rows = rows_of(("observed", *ENDS), values)
    caption = (
        "Predictive means with central 90 % intervals of observations against the observed values; on the dashed line "
        "the mean is right."
    )
    return Picture("Predictions", caption, _panels(found, found.names, draw, words), rows)
