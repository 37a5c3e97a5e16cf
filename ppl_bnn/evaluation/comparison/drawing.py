"""Drawings of one prediction: curves, class maps, reliability; colours and sizes of all figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.names import for_figure
from ppl_bnn.posterior.convergence import Mixing
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours, distinguishable with any kind of colour vision; meaning is never in colour alone.
BLUE, SKY, ORANGE, VERMILION, GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#666666"
LEVEL = 0.9
MOST_POINTS = 300
# Prior predictive figures: functions drawn as curves, functions drawn as maps, points along an axis of a map.
CURVES, MAPS, PLACES = 20, 6, 90
# Figures of a comparison: points along a curve, points along each side of a map, sufficient number of draws.
ALONG, SIDE, ENOUGH = 160, 60, 1000
# Contour lines of class probabilities.
LINES = (0.1, 0.3, 0.5, 0.7, 0.9)
CLASS_COLOURS = (BLUE, ORANGE, "#009E73", VERMILION, SKY, "#CC79A7", GREY, "#F0E442")
CLASS_MARKS = "os^DvPX*"
# 1200 x 800 pixels at 100 dots per inch.
SIZE = (12.0, 8.0)


def draw_marks(axes: Axes, rows: list[tuple[str, Mixing, bool]], pairs: Any, limit: float) -> None:
    """Draw one line of marks per quantity on a logarithmic axis that holds all finite values and the limit.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    rows : sequence of tuple
        The quantities; the second entry of each holds its figures.
    pairs : sequence of tuple
        The marks of each quantity: label, function that reads the value from the figures, colour, marker, whether
        filled.
    limit : float
        The limit of the values.
    """
    values = [[read(figures) for _, figures, _ in rows] for _, read, _, _, _ in pairs]
    usable = [value for line in values for value in line if math.isfinite(value) and value > 0.0]
    low, high = min([limit, *usable]) / 2.0, max([limit, *usable]) * 2.0
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for (label, _, colour, marker, filled), line in zip(pairs, values, strict=True):
        # A value outside the axis is drawn at the edge on its side.
        inside = np.array([min(max(value, low), high) for value in line])
        beyond = np.array([not math.isfinite(value) or value <= 0.0 for value in line])
        at = np.arange(len(line))
        face = colour if filled else "none"
        axes.plot(
            inside[~beyond],
            at[~beyond],
            marker,
            color=colour,
            markerfacecolor=face,
            markersize=8.0 if filled else 9.0,
            zorder=3,
            label=label,
        )
        for value, where in zip(inside[beyond], at[beyond], strict=True):
            axes.plot(
                value,
                where,
                ">" if value == high else "<",
                color=colour,
                markersize=9.0,
                clip_on=False,
                zorder=4,
            )


def draw_curve(axes: Axes, x: np.ndarray, prediction: Prediction) -> None:
    """Draw a prediction of one number along a single input: E[y | x] and two bands of 90 %.

    The outer band is the central interval of observations, by quantiles of the mixture. The inner band is that of the
    mean function, which is also a mixture: of the means of the draws, each a normal with variance `epistemic_within` if
    a component has one (a linearised prediction). More data would narrow the inner band, but not the distance between
    the two.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    x : np.ndarray
        (N,), in any order, the input of each row of the prediction.
    prediction : Prediction
        The prediction.

    Raises
    ------
    InputError
        x of another shape.
    UnsupportedError
        A prediction of classes or of several outputs.
    """
    if prediction.is_classes or len(prediction.shape) != 1:
        raise UnsupportedError.of(
            "draw_curve",
            "a prediction of one number for each row",
            repr(prediction),
            "draw_class_map for classes",
        )
    x = np.asarray(x)
    if x.shape != prediction.shape:
        raise InputError.of("draw_curve", f"x of shape {prediction.shape}", f"{x.shape}", "x[:, 0]")
    order = np.argsort(x, kind="stable")
    lower, upper = prediction.interval(LEVEL)
    mean, (least, most) = prediction.mean, _mean_interval(prediction)
    axes.fill_between(
        x[order], lower[order], upper[order], color=SKY, alpha=0.35, linewidth=0, label="90 % of observations"
    )
    axes.fill_between(
        x[order],
        least[order],
        most[order],
        color=BLUE,
        alpha=0.40,
        linewidth=0,
        label="90 % of the mean function",
    )
    axes.plot(x[order], mean[order], color=BLUE, linewidth=1.6, label="mean")


def _mean_interval(prediction: Prediction) -> tuple[np.ndarray, np.ndarray]:
    """The central interval of the mean function in each row, (N,) and (N,)."""
    means, within = prediction.component_mean(), prediction.epistemic_within
    if within is not None:
        # A component without variance is a normal as narrow as floating point allows.
        spread = np.sqrt(np.maximum(within, 1e-24 * (1.0 + means**2)))
        mixture = Prediction("Normal", {"loc": means, "scale": spread}, prediction.log_weights)
        return mixture.interval(LEVEL)
    tails = [0.5 * (1.0 - LEVEL), 0.5 * (1.0 + LEVEL)]
    if prediction.log_weights is None:
        lower, upper = np.quantile(means, tails, axis=0)
    else:
        weights = np.broadcast_to(prediction.weights.reshape(len(means), -1), means.shape)
        lower, upper = np.quantile(means, tails, axis=0, weights=weights, method="inverted_cdf")
    return lower, upper


def grid_points(across: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The inputs at which `draw_class_map` needs predictions.

    Parameters
    ----------
    across, up : np.ndarray
        (A,) and (B,), points along the two inputs.

    Returns
    -------
    np.ndarray
        (A B, 2), all grid points, row after row from below.
    """
    return np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)


def drawn_along(x: np.ndarray) -> np.ndarray:
    """Points of a curve over a single input, extended slightly beyond its rows on either side.

    Parameters
    ----------
    x : np.ndarray
        Inputs (N, 1).

    Returns
    -------
    np.ndarray
    """
    margin = 0.15 * float(x[:, 0].max() - x[:, 0].min())
    return np.linspace(x[:, 0].min() - margin, x[:, 0].max() + margin, ALONG)


def drawn_over(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of a map over two inputs.

    Parameters
    ----------
    x : np.ndarray
        Inputs (N, 2).

    Returns
    -------
    across, up : np.ndarray
        Points along the first and along the second input.
    """
    low, high = x.min(axis=0), x.max(axis=0)
    margin = np.where(high > low, 0.15 * (high - low), 1.0)
    across, up = (np.linspace(low[i] - margin[i], high[i] + margin[i], SIDE) for i in (0, 1))
    return across, up


def draw_class_map(
    axes: Axes,
    across: np.ndarray,
    up: np.ndarray,
    prediction: Prediction,
    levels: Sequence[float] | None = None,
) -> None:
    """Draw class probabilities over a rectangle.

    Each point has the colour of its most probable class, paler if that class is less probable, and contour lines are
    drawn.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    across, up : np.ndarray
        (A,) and (B,), points along the two inputs, evenly spaced.
    prediction : Prediction
        The prediction of the rows `grid_points(across, up)`.
    levels : sequence of float, optional
        Levels of the contour lines. For two classes they are of the probability of class 1, by default 0.1, 0.3, 0.5,
        0.7 and 0.9, and 0.5 is drawn thick. For more classes they are of the probability of the most probable class, by
        default 0.7 and 0.9: along a border of two classes that is a half. A level that is not reached has no line.

    Raises
    ------
    InputError
        Another number of rows.
    UnsupportedError
        A prediction of numbers.
    """
    from matplotlib.colors import to_rgb

    classes, probabilities = prediction.classes, prediction.probabilities
    if len(prediction) != len(across) * len(up):
        raise InputError.of(
            "draw_class_map",
            f"a prediction of {len(across)} x {len(up)} places",
            f"{len(prediction)} rows",
            "grid_points(across, up)",
        )
    colours = np.array([to_rgb(_class_colour(label)) for label in range(classes)])
    best = probabilities.argmax(axis=1)
    sure = (probabilities.max(axis=1) - 1.0 / classes) / (1.0 - 1.0 / classes)
    # Opaque for certain predictions and transparent for uncertain ones, so the background shows: white or dark.
    image = np.concatenate([colours[best], 0.05 + 0.75 * sure[:, None]], axis=1)
    axes.imshow(
        image.reshape(len(up), len(across), 4),
        origin="lower",
        extent=(across[0], across[-1], up[0], up[-1]),
        aspect="auto",
        interpolation="nearest",
    )
    values = probabilities[:, 1] if classes == 2 else probabilities.max(axis=1)
    if levels is None:
        levels = LINES if classes == 2 else [level for level in LINES if level > 0.5]
    # Matplotlib warns of a level that is not reached anywhere.
    reached = [level for level in sorted(levels) if values.min() < level < values.max()]
    if reached:
        drawn = axes.contour(
            across,
            up,
            values.reshape(len(up), len(across)),
            levels=reached,
            colors="black",
            linestyles="solid",
            linewidths=[2.2 if classes == 2 and level == 0.5 else 0.8 for level in reached],
        )
        axes.clabel(drawn, fmt="%g", fontsize=9)


def draw_classes(axes: Axes, x: np.ndarray, y: np.ndarray, names: Sequence[str], size: float = 4.0) -> None:
    """Draw rows with a mark and a colour for each of their labels.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    x : np.ndarray
        Rows (N, 2).
    y : np.ndarray
        Labels (N,).
    names : sequence of str
        Names of the labels, (C,).
    size : float
        Size of the marks.
    """
    for label, name in enumerate(names):
        rows = y == label
        axes.plot(
            x[rows, 0],
            x[rows, 1],
            CLASS_MARKS[label % len(CLASS_MARKS)],
            color=_class_colour(label),
            markeredgecolor="black",
            markeredgewidth=0.5,
            markersize=size,
            label=for_figure(name),
        )


def _class_colour(label: int) -> str:
    return CLASS_COLOURS[label % len(CLASS_COLOURS)]


def predicted_event(prediction: Prediction) -> str:
    """The event whose probability a reliability diagram shows, in words."""
    if prediction.classes > 2:
        return "probability of the most probable class"
    return f"probability of {prediction.class_names[1] if prediction.class_names else 'class 1'}"


def draw_reliability(axes: Axes, prediction: Prediction, labels: np.ndarray) -> None:
    """Draw `reliability.Event` of a prediction in bins, with 90 % Clopper-Pearson intervals of the shares.

    Parameters
    ----------
    axes : Axes
        The axes to draw on.
    prediction : Prediction
        A prediction of classes.
    labels : np.ndarray
        The true labels, one for each row.
    """
    from scipy.stats import beta

    found = Event.of(prediction, labels).binned()
    centre, share, rows = found["probability"], found["share"], found["rows"]
    hits, tail = np.round(share * rows), 0.5 * (1.0 - LEVEL)
    misses = rows - hits
    low = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), misses + 1), 0.0)
    high = np.where(misses > 0, beta.ppf(1.0 - tail, hits + 1, np.maximum(misses, 1)), 1.0)
    axes.plot(
        [0.0, 1.0], [0.0, 1.0], "--", color=GREY, linewidth=1.0, label="calibrated", scalex=False, zorder=1
    )
    axes.vlines(
        centre, low, high, color=BLUE, linewidth=1.6, alpha=0.6, zorder=2, label="90 % interval of the share"
    )
    axes.scatter(
        centre,
        share,
        s=18.0 + 160.0 * rows / rows.sum(),
        color=BLUE,
        zorder=3,
        label="rows in a bin (area: how many)",
    )
    axes.set_ylim(-0.03, 1.03)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)


def new_figure() -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_bottom(panels: Mapping[str, Axes], text: str) -> None:
    """Put a label under the lowest panel of each column; one label for the whole figure would overlap the legend."""
    for axes in panels.values():
        specification = axes.get_subplotspec()
        if specification is not None and axes.xaxis.get_tick_params().get("labelbottom", True):
            axes.set_xlabel(text, fontsize=10)


def add_legend(figure: Figure, panels: Mapping[str, Axes]) -> None:
    """Add one legend below the figure, with each label of the panels once."""
    found: dict[str, Any] = {}
    for axes in panels.values():
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(
            found.values(),
            found.keys(),
            loc="outside lower center",
            ncols=len(found),
            frameon=False,
            fontsize=10,
        )


def single_input(x: Any) -> bool:
    """Whether x is a table of one column with more than two different values."""
    return not isinstance(x, Mapping) and x.ndim == 2 and x.shape[1] == 1 and len(np.unique(x)) > 2


def evenly(y: np.ndarray) -> np.ndarray:
    """At most MOST_POINTS row numbers, evenly spaced in the order of y; more points would not be distinguishable."""
    order = np.argsort(y if y.ndim == 1 else y[:, 0], kind="stable")
    if len(order) <= MOST_POINTS:
        return order
    return order[np.linspace(0, len(order) - 1, MOST_POINTS).round().astype(int)]
