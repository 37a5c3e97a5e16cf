"""The prior predictive distribution of a model as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison.drawing import (
    BLUE,
    CURVES,
    LEVEL,
    MAPS,
    PLACES,
    SKY,
    add_legend,
    draw_class_map,
    draw_classes,
    evenly,
    grid_points,
    new_figure,
    single_input,
)
from ppl_bnn.prediction.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def prior_figure(
    predict: Callable[[np.ndarray], Prediction],
    x: np.ndarray,
    y: np.ndarray,
    *,
    title: str = "What the prior expects",
    target_name: str = "y",
    feature_names: Sequence[str] | None = None,
) -> Figure:
    """Prior predictive distribution of a model beside the targets y at inputs x.

    For a single input: the mean functions of some draws as curves, over the 90 % band of observations. For classes of
    two inputs: class maps of some draws, paler where they are less certain. For other numbers: the intervals of the
    rows, and the predicted distribution of observations beside the observed one. For other classes: how certain draws
    are, and the share of rows that they give to each class. Axes are in original units.

    Parameters
    ----------
    predict : callable
        Inputs (M, F) -> the prior predictive there, a mixture with one component for each draw.
    x : np.ndarray
        Inputs (N, F).
    y : np.ndarray
        Targets (N,).
    title : str
        Title of the figure.
    target_name : str
        Name of the target.
    feature_names : sequence of str, optional
        Names of the inputs.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = new_figure()
    first = predict(x[:1])
    if not first.is_classes and single_input(x):
        _draw_prior_curves(figure, predict, x, y, target_name, feature_names)
    elif first.is_classes and x.ndim == 2 and x.shape[1] == 2:
        _draw_prior_maps(figure, predict, x, y, feature_names)
    elif first.is_classes:
        _draw_prior_classes(figure, predict(x), y)
    else:
        _draw_prior_rows(figure, predict(x), y, target_name)
    figure.suptitle(for_figure(title), fontsize=13)
    return figure


def _spread(count: int, wanted: int) -> np.ndarray:
    """`wanted` of `count` draws, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(wanted, count)).round().astype(int))


def _draw_prior_curves(
    figure: Figure,
    predict: Callable[[np.ndarray], Prediction],
    x: np.ndarray,
    y: np.ndarray,
    target: str,
    names: Sequence[str] | None,
) -> None:
    axes = figure.subplots()
    low, high = float(x.min()), float(x.max())
    margin = 0.25 * (high - low)
    grid = np.linspace(low - margin, high + margin, 200)
    prediction = predict(grid[:, None])
    lower, upper = prediction.interval(LEVEL)
    axes.fill_between(
        grid, lower, upper, color=SKY, alpha=0.35, linewidth=0, label="90 % of observations", zorder=1
    )
    for index, draw in enumerate(_spread(prediction.draws, CURVES)):
        label = "mean functions of draws" if index == 0 else None
        axes.plot(grid, prediction.take_draws([draw]).mean, color=BLUE, linewidth=1.0, alpha=0.7, label=label)
    axes.plot(x[:, 0], y, ".", color="black", markersize=4.0, alpha=0.7, label="what was observed")
    axes.set_xlabel(for_figure(names[0]) if names else "x")
    axes.set_ylabel(for_figure(target))
    axes.grid(color="0.92", zorder=0)
    add_legend(figure, {"": axes})


def _draw_prior_maps(
    figure: Figure,
    predict: Callable[[np.ndarray], Prediction],
    x: np.ndarray,
    y: np.ndarray,
    names: Sequence[str] | None,
) -> None:
    low, high = x.min(axis=0), x.max(axis=0)
    margin = np.where(high > low, 0.25 * (high - low), 1.0)
    across, up = (np.linspace(low[i] - margin[i], high[i] + margin[i], PLACES) for i in (0, 1))
    prediction = predict(grid_points(across, up))
    chosen = _spread(prediction.draws, MAPS)
    panels = figure.subplots(2, 3, sharex=True, sharey=True, squeeze=False).ravel()
    called = prediction.class_names or [f"class {label}" for label in range(prediction.classes)]
    shown = evenly(y)
    for axes, draw in zip(panels, chosen, strict=False):
        draw_class_map(axes, across, up, prediction.take_draws([draw]), levels=())
        draw_classes(axes, x[shown], y[shown], [f"observed: {name}" for name in called])
        axes.set_title(f"draw {draw + 1}", fontsize=10)
    for axes in panels[len(chosen) :]:
        axes.set_axis_off()
    for index, axes in enumerate(panels):
        if index >= 3:
            axes.set_xlabel(for_figure(names[0]) if names else "x[0]")
        if index % 3 == 0:
            axes.set_ylabel(for_figure(names[1]) if names else "x[1]")
    add_legend(figure, {"": panels[0]})


def _draw_prior_rows(figure: Figure, prediction: Prediction, y: np.ndarray, target: str) -> None:
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.0, 1.0])
    if prediction.censored:
        # The bound of a censored row is not an observed value.
        seen = np.flatnonzero(y[:, 1] == 1)
        prediction, y = prediction.take(seen), y[seen, 0]
    shown = evenly(y)
    part, truth = prediction.take(shown), np.ravel(y[shown])
    at = np.arange(len(truth))
    for level, colour, alpha in ((LEVEL, SKY, 0.55), (0.5, BLUE, 0.55)):
        lower, upper = (np.ravel(end) for end in part.interval(level))
        left.vlines(
            at, lower, upper, color=colour, alpha=alpha, linewidth=1.6, label=f"{level:.0%} of the prior"
        )
    left.plot(at, truth, ".", color="black", markersize=4.0, label="what was observed", zorder=3)
    left.set_xlabel("rows, in the order of what was observed")
    left.set_ylabel(for_figure(target))
    # The far tails of a heavy-tailed prior would compress everything else.
    values = np.ravel(part.sample(200, 0))
    low, high = np.quantile(values, [0.005, 0.995])
    low, high = min(float(low), float(truth.min())), max(float(high), float(truth.max()))
    bins = np.linspace(low, high, 61)
    for data, colour, label in ((values, SKY, "drawn from the prior"), (truth, "black", "observed")):
        kept = data[(data >= low) & (data <= high)]
        weights = np.full(len(kept), 1.0 / len(data))
        right.hist(
            kept,
            bins=bins,
            weights=weights,
            orientation="horizontal",
            histtype="stepfilled" if colour == SKY else "step",
            color=colour,
            label=label,
        )
    left.set_ylim(low, high)
    right.set_xlabel("share of rows")
    for axes in (left, right):
        axes.grid(color="0.92", zorder=0)
        axes.set_axisbelow(True)
    add_legend(figure, {"left": left, "right": right})


def _draw_prior_classes(figure: Figure, prediction: Prediction, y: np.ndarray) -> None:
    left, right = figure.subplots(1, 2)
    classes = prediction.classes
    called = prediction.class_names or [f"class {label}" for label in range(classes)]
    draws = _spread(prediction.draws, 100)
    sure, shares = [], []
    for draw in draws:
        probabilities = prediction.take_draws([draw]).probabilities
        sure.append(probabilities.max(axis=1))
        shares.append(probabilities.mean(axis=0))
    left.hist(
        np.concatenate(sure),
        bins=np.linspace(1.0 / classes, 1.0, 31),
        weights=np.full(len(draws) * prediction.rows, 1.0 / (len(draws) * prediction.rows)),
        color=SKY,
        edgecolor=BLUE,
        linewidth=0.6,
        label="rows, of each draw",
    )
    left.set_xlabel("probability that a draw gives to its most probable class")
    left.set_ylabel("share of rows")
    for label in range(classes):
        right.plot(
            np.full(len(draws), label) + np.linspace(-0.25, 0.25, len(draws)),
            np.array(shares)[:, label],
            ".",
            color=BLUE,
            alpha=0.5,
            label="each draw" if label == 0 else None,
        )
        right.plot(
            label,
            float(np.mean(y == label)),
            "D",
            color="black",
            markersize=8.0,
            label="observed" if label == 0 else None,
        )
    right.set_xticks(range(classes), list(map(for_figure, called)), rotation=0 if classes < 8 else 90)
    right.set_ylabel("share of rows in this class")
    right.set_ylim(-0.03, 1.03)
    for axes in (left, right):
        axes.grid(color="0.92", zorder=0)
        axes.set_axisbelow(True)
    add_legend(figure, {"left": left, "right": right})
