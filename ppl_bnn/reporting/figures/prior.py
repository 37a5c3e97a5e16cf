"""The prior predictive distribution of a model as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppl_bnn.core.figures import BLUE, FILLED, INK, SKY, grid_lines, new_figure
from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison import drawing
from ppl_bnn.evaluation.comparison.drawing import CURVES, LEVEL, MAPS, PLACES
from ppl_bnn.prediction.prediction import Prediction

Predict = Callable[[np.ndarray], Prediction]
DOTS: dict[str, Any] = {"color": INK, "marker": ".", "linestyle": "", "markersize": 4.0}


def prior_figure(
    predict: Predict,
    x: np.ndarray,
    y: np.ndarray,
    *,
    title: str = "What the prior expects",
    target_name: str = "y",
    feature_names: Sequence[str] | None = None,
) -> Figure:
    """Prior predictive distribution at inputs x (N, F) beside the targets y (N,), in original units.

    `predict` maps inputs (M, F) to a mixture with a component per draw. Shown are, for a single input, mean functions
    over the 90 % band of observations; for two inputs and classes, class maps of some draws; for other numbers,
    intervals and the distribution of observations; for other classes, how certain draws are and the share of each
    class.
    """
    figure, first, target = new_figure(), predict(x[:1]), for_figure(target_name)
    names = list(map(for_figure, feature_names or ()))
    if not first.is_classes and drawing.single_input(x):
        axes = figure.subplots()
        draw_prior_curves(axes, predict, x, y, names[0] if names else "x", target)
        drawing.add_legend(figure, [axes])
    elif first.is_classes and x.ndim == 2 and x.shape[1] == 2:
        _draw_maps(figure, predict, x, y, names or ["x[0]", "x[1]"])
    elif first.is_classes:
        _draw_classes(figure, predict(x), y)
    else:
        _draw_rows(figure, predict(x), y, target)
    figure.suptitle(for_figure(title), fontsize=13)
    return figure


def _some_draws(prediction: Prediction, wanted: int) -> list[tuple[int, Prediction]]:
    """At most `wanted` draws, evenly spaced, each as (number, prediction)."""
    count = prediction.draws
    chosen = np.unique(np.linspace(0, count - 1, min(wanted, count)).round().astype(int))
    return [(int(draw), prediction.take_draws([draw])) for draw in chosen]


def draw_prior_curves(axes: Axes, predict: Predict, x: np.ndarray, y: np.ndarray, *labels: str) -> None:
    """Mean functions of some draws over one input, the first column of x, in the 90 % band of observations."""
    grid = drawing.drawn_along(x[:, 0], 0.25, 200)
    prediction = predict(grid[:, None])
    axes.fill_between(grid, *prediction.interval(LEVEL), **FILLED, label="90 % of observations", zorder=1)
    for index, (_, draw) in enumerate(_some_draws(prediction, CURVES)):
        label = "mean functions of draws" if index == 0 else None
        axes.plot(grid, draw.mean, color=BLUE, linewidth=1.0, alpha=0.7, label=label)
    axes.plot(x[:, 0], y, **DOTS, alpha=0.7, label="observed")
    axes.set(xlabel=labels[0], ylabel=labels[1])
    grid_lines(axes)


def _draw_maps(figure: Figure, predict: Predict, x: np.ndarray, y: np.ndarray, names: list[str]) -> None:
    across, up = drawing.drawn_over(x, 0.25, PLACES)
    prediction = predict(drawing.grid_points(across, up))
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    classes = [f"observed: {name}" for name in drawing.class_names(prediction)]
    shown, draws = drawing.evenly(y), _some_draws(prediction, MAPS)
    for axes, (number, draw) in zip(panels.ravel(), draws, strict=False):
        drawing.draw_class_map(axes, across, up, draw, levels=())
        drawing.draw_classes(axes, x[shown], y[shown], classes)
        axes.set_title(f"draw {number + 1}", fontsize=10)
    for axes in panels.ravel()[len(draws) :]:
        axes.set_axis_off()
    for axes in panels[1]:
        axes.set_xlabel(names[0])
    for axes in panels[:, 0]:
        axes.set_ylabel(names[1])
    drawing.add_legend(figure, [panels[0, 0]])


def draw_prior_rows(
    axes: Axes, prediction: Prediction, y: np.ndarray, target: str
) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Intervals of 90 % and 50 % of some rows beside the observed values.

    Returns the limits of the vertical axis, draws of these rows, and their values.
    """
    if prediction.censored:
        # The bound of a censored row is not an observed value.
        seen = np.flatnonzero(y[:, 1] == 1)
        prediction, y = prediction.take(seen), y[seen, 0]
    shown = drawing.evenly(y)
    part, truth = prediction.take(shown), np.ravel(y[shown])
    at = np.arange(len(truth))
    for level, colour in ((LEVEL, SKY), (0.5, BLUE)):
        lower, upper = (np.ravel(end) for end in part.interval(level))
        style: dict[str, Any] = {"color": colour, "alpha": 0.55, "linewidth": 1.6}
        axes.vlines(at, lower, upper, **style, label=f"{level:.0%} of the prior")
    axes.plot(at, truth, **DOTS, label="observed", zorder=3)
    axes.set(xlabel="rows, in the order of their observed values", ylabel=target)
    # The far tails of a heavy-tailed prior would compress everything else.
    values = np.ravel(part.sample(200, 0))
    low, high = np.quantile(values, [0.005, 0.995])
    low, high = min(float(low), float(truth.min())), max(float(high), float(truth.max()))
    axes.set_ylim(low, high)
    grid_lines(axes)
    return low, high, values, truth


def _draw_rows(figure: Figure, prediction: Prediction, y: np.ndarray, target: str) -> None:
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.0, 1.0])
    low, high, values, truth = draw_prior_rows(left, prediction, y, target)
    drawn = {"color": SKY, "label": "drawn from the prior", "histtype": "stepfilled"}
    for data, style in ((values, drawn), (truth, {"color": INK, "label": "observed", "histtype": "step"})):
        inside = data[(data >= low) & (data <= high)]
        weights = np.full(len(inside), 1.0 / len(data))
        right.hist(inside, np.linspace(low, high, 61), weights=weights, orientation="horizontal", **style)
    right.set_xlabel("share of rows")
    grid_lines(right)
    drawing.add_legend(figure, (left, right))


def draw_certainty(axes: Axes, prediction: Prediction) -> np.ndarray:
    """How certain draws are of their most probable class. Returns probabilities (draws, N, C) of some draws."""
    classes = prediction.classes
    probabilities = np.array([draw.probabilities for _, draw in _some_draws(prediction, 100)])
    sure = probabilities.max(axis=2).ravel()
    bins: Any = np.linspace(1.0 / classes, 1.0, 31)
    weights = np.full(sure.size, 1.0 / sure.size)
    style: dict[str, Any] = {"color": SKY, "edgecolor": BLUE, "linewidth": 0.6}
    axes.hist(sure, bins, weights=weights, **style, label="rows, of each draw")
    axes.set(xlabel="probability that a draw gives to its most probable class", ylabel="share of rows")
    grid_lines(axes)
    return probabilities


def _draw_classes(figure: Figure, prediction: Prediction, y: np.ndarray) -> None:
    left, right = figure.subplots(1, 2)
    classes, shares = prediction.classes, draw_certainty(left, prediction).mean(axis=1)
    for label in range(classes):
        beside = label + np.linspace(-0.25, 0.25, len(shares))
        first = label == 0
        right.plot(beside, shares[:, label], ".", color=BLUE, alpha=0.5, label="each draw" if first else None)
        observed = DOTS | {"marker": "D", "markersize": 8.0, "label": "observed" if first else None}
        right.plot(label, float(np.mean(y == label)), **observed)
    names = list(map(for_figure, drawing.class_names(prediction)))
    right.set_xticks(range(classes), names, rotation=0 if classes < 8 else 90)
    right.set(ylabel="share of rows in this class", ylim=(-0.03, 1.03))
    grid_lines(right)
    drawing.add_legend(figure, (left, right))
