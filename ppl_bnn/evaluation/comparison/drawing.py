"""Drawings of one prediction: curves, intervals, class maps, reliability; sizes of all figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.figures import BAR, BLUE, FILLED, GREY, GUIDE, INK, ORANGE, SKY, VERMILION, grid_lines
from ppl_bnn.core.names import for_figure
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.evaluation.comparison.comparison import Comparison


LEVEL = 0.9
# Above MANY, marks are drawn as pixels; above MOST_POINTS, they would not be distinguishable.
MANY, MOST_POINTS = 400, 300
# Prior predictive figures: functions drawn as curves, functions drawn as maps, points along an axis of a map.
CURVES, MAPS, PLACES = 20, 6, 90
# Figures of a comparison: points along a curve, points along each side of a map, sufficient number of draws.
ALONG, SIDE, ENOUGH = 160, 60, 1000
# Contour lines of class probabilities.
LINES = (0.1, 0.3, 0.5, 0.7, 0.9)
CLASS_COLOURS = (BLUE, ORANGE, "#009E73", VERMILION, SKY, "#CC79A7", GREY, "#F0E442")
CLASS_MARKS = "os^DvPX*"


# --- numbers ----------------------------------------------------------------------------------------------


def draw_curve(axes: Axes, x: np.ndarray, prediction: Prediction, level: float = LEVEL) -> None:
    """Draw a prediction of one number at x (N,), in any order: E[y | x] and two central bands, by default of 90 %.

    The outer band is that of observations. The inner band is that of the mean function, a mixture over draws, each a
    normal with variance `epistemic_within` if the prediction is linearised. Raises InputError for x of another shape,
    UnsupportedError for classes or several outputs.
    """
    if prediction.is_classes or len(prediction.shape) != 1:
        wanted, advice = "a prediction of one number for each row", "draw_class_map for classes"
        raise UnsupportedError.of("draw_curve", wanted, repr(prediction), advice)
    x, shape = np.asarray(x), prediction.shape
    InputError.check(x.shape == shape, "draw_curve", f"x of shape {shape}", x.shape, "x[:, 0]")
    order = np.argsort(x, kind="stable")
    lower, upper = (end[order] for end in prediction.interval(level))
    least, most = (end[order] for end in _mean_interval(prediction, level))
    percent = f"{100.0 * level:g} %"
    axes.fill_between(x[order], lower, upper, **FILLED, label=f"{percent} of observations")
    inner = FILLED | {"color": BLUE, "alpha": 0.4}
    axes.fill_between(x[order], least, most, **inner, label=f"{percent} of the mean function")
    axes.plot(x[order], prediction.mean[order], color=BLUE, linewidth=1.6, label="mean")


def _mean_interval(prediction: Prediction, level: float) -> tuple[np.ndarray, np.ndarray]:
    """The central interval of the mean function in each row, (N,) and (N,)."""
    means, within = prediction.component_mean(), prediction.epistemic_within
    if within is not None:
        # A component without variance is a normal as narrow as floating point allows.
        spread = np.sqrt(np.maximum(within, 1e-24 * (1.0 + means**2)))
        mixture = Prediction("Normal", {"loc": means, "scale": spread}, prediction.log_weights)
        return mixture.interval(level)
    tails = [0.5 * (1.0 - level), 0.5 * (1.0 + level)]
    if prediction.log_weights is None:
        lower, upper = np.quantile(means, tails, axis=0)
    else:
        weights = np.broadcast_to(prediction.weights.reshape(len(means), -1), means.shape)
        lower, upper = np.quantile(means, tails, axis=0, weights=weights, method="inverted_cdf")
    return lower, upper


def drawn_along(x: np.ndarray, beyond: float = 0.15, points: int = ALONG) -> np.ndarray:
    """Points of a curve over an input, (N,), extended slightly beyond its rows on either side."""
    low, high = x.min(), x.max()
    margin = beyond * (high - low) or 1.0
    return np.linspace(low - margin, high + margin, points)


def any_censored(comparison: Comparison) -> bool:
    return any(prediction.censored for prediction in comparison.predictions.values())


def draw_targets(
    axes: Axes, x: np.ndarray, y: np.ndarray, censored: bool = False, called: str = "test rows"
) -> None:
    """Draw rows at x, (N,); the mark of a censored row points to where its value is."""
    many = len(x) > MANY
    style: dict[str, Any] = {"color": GREY if many else INK, "markersize": 3.5, "alpha": 0.75}
    style["rasterized"] = many
    for values, rows, mark, label in marked_targets(y, censored, called):
        axes.plot(x[rows], values[rows], mark, **style, label=label)


def marked_targets(
    y: np.ndarray, censored: bool = False, called: str = "test rows"
) -> list[tuple[np.ndarray, np.ndarray, str, str]]:
    """(values, which rows, mark, label) of rows, `called` so, or by whether they are censored, y (N, 2)."""
    if not censored:
        return [(y, np.full(len(y), True), ".", called)]
    kinds = ((1.0, ".", "observed"), (0.0, "^", "censored: the value is larger"), (-1.0, "v", "smaller"))
    found = [(y[:, 0], y[:, 1] == event, mark, label) for event, mark, label in kinds]
    return [each for each in found if each[1].any()]


@dataclass(frozen=True)
class Intervals:
    """Predictive means and central 90 % intervals of observed test rows, flattened.

    `rows` and `shown` count the rows that are observed and drawn; `truth` is (n,); `ends` is method -> mean, lower,
    upper.
    """

    rows: int
    shown: int
    truth: np.ndarray
    ends: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, comparison: Comparison) -> Intervals:
        """Those of a comparison. A censored row has no true value to compare with, and is left out."""
        targets, rows = comparison.test_targets, np.arange(len(comparison.test_targets))
        if any_censored(comparison):
            rows, targets = np.flatnonzero(targets[:, 1] == 1.0), targets[:, 0]
        if not len(rows):
            return cls(0, 0, np.zeros(0), {})
        shown = rows[evenly(targets[rows])]
        ends = {}
        for name, prediction in comparison.predictions.items():
            part = prediction.take(shown)
            lower, upper = part.interval(LEVEL)
            ends[name] = (np.ravel(part.mean), np.ravel(lower), np.ravel(upper))
        return cls(len(rows), len(shown), np.ravel(targets[shown]), ends)

    def inside(self, name: str) -> np.ndarray:
        """Whether the intervals of a method contain the observed values."""
        _, lower, upper = self.ends[name]
        return (lower <= self.truth) & (self.truth <= upper)

    def draw(self, axes: Axes, name: str) -> None:
        """Draw the intervals of a method against the observed values, with the same limits for each method."""
        truth, (mean, lower, upper), inside = self.truth, self.ends[name], self.inside(name)
        right, wrong = "truth inside the 90 % interval", "truth outside"
        for rows, colour, mark, label in ((inside, BLUE, "o", right), (~inside, VERMILION, "D", wrong)):
            bar = {"color": colour, "alpha": 0.35, "linewidth": 1.2, "rasterized": len(truth) > MANY}
            axes.vlines(truth[rows], lower[rows], upper[rows], **bar, zorder=2)
            dot: dict[str, Any] = {"color": colour, "markersize": 3.5, "markeredgewidth": 0.0, "zorder": 3}
            axes.plot(truth[rows], mean[rows], mark, **dot, label=label)
        axes.axline((0.0, 0.0), slope=1.0, **GUIDE, zorder=1)
        ends = np.concatenate([truth, *(end for _, *both in self.ends.values() for end in both)])
        for values, limits in ((truth, axes.set_xlim), (ends, axes.set_ylim)):
            margin = 0.03 * float(np.ptp(values)) or 1.0
            limits(float(values.min()) - margin, float(values.max()) + margin)


# --- classes ----------------------------------------------------------------------------------------------


def grid_points(across: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Inputs (A B, 2) for `draw_class_map` from points across (A,) and up (B,), row after row from below."""
    return np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)


def drawn_over(x: np.ndarray, beyond: float = 0.15, side: int = SIDE) -> tuple[np.ndarray, np.ndarray]:
    """Points of a map along the first and along the second of two inputs, (N, 2), slightly beyond its rows."""
    return drawn_along(x[:, 0], beyond, side), drawn_along(x[:, 1], beyond, side)


def draw_class_map(
    axes: Axes,
    across: np.ndarray,
    up: np.ndarray,
    prediction: Prediction,
    levels: Sequence[float] | None = None,
) -> None:
    """Draw class probabilities over the rectangle of across (A,) and up (B,), predicted at `grid_points(across, up)`.

    The colour is that of the most probable class, paler if it is less probable. Contour `levels` of two classes are of
    the probability of class 1, and 0.5 is drawn thick; of more classes, of that of the most probable class. Raises
    InputError for another number of rows, UnsupportedError for numbers.
    """
    from matplotlib.colors import to_rgb

    classes, probabilities = prediction.classes, prediction.probabilities
    if len(prediction) != len(across) * len(up):
        wanted = f"a prediction of {len(across)} x {len(up)} places"
        raise InputError.of("draw_class_map", wanted, f"{len(prediction)} rows", "grid_points(across, up)")
    colours = np.array([to_rgb(_class_colour(label)) for label in range(classes)])
    best = probabilities.argmax(axis=1)
    sure = (probabilities.max(axis=1) - 1.0 / classes) / (1.0 - 1.0 / classes)
    # Opaque for certain predictions and transparent for uncertain ones, so the background shows: white or dark.
    image = np.concatenate([colours[best], 0.05 + 0.75 * sure[:, None]], axis=1)
    image = image.reshape(len(up), len(across), 4)
    extent = (across[0], across[-1], up[0], up[-1])
    axes.imshow(image, origin="lower", extent=extent, aspect="auto", interpolation="nearest")
    values = probabilities[:, 1] if classes == 2 else probabilities.max(axis=1)
    if levels is None:
        levels = LINES if classes == 2 else [level for level in LINES if level > 0.5]
    # Matplotlib warns of a level that is not reached anywhere.
    reached = [level for level in sorted(levels) if values.min() < level < values.max()]
    if reached:
        widths = [2.2 if classes == 2 and level == 0.5 else 0.8 for level in reached]
        lines: dict[str, Any] = {"colors": "black", "linestyles": "solid", "linewidths": widths}
        drawn = axes.contour(across, up, values.reshape(len(up), len(across)), levels=reached, **lines)
        axes.clabel(drawn, fmt="%g", fontsize=9)


def draw_classes(axes: Axes, x: np.ndarray, y: np.ndarray, names: Sequence[str], size: float = 4.0) -> None:
    """Draw rows x (N, 2) with a mark and a colour for each label y (N,)."""
    for label, name in enumerate(names):
        rows, mark = y == label, CLASS_MARKS[label % len(CLASS_MARKS)]
        edge = {"markeredgecolor": "black", "markeredgewidth": 0.5, "markersize": size}
        axes.plot(x[rows, 0], x[rows, 1], mark, color=_class_colour(label), **edge, label=for_figure(name))


def _class_colour(label: int) -> str:
    return CLASS_COLOURS[label % len(CLASS_COLOURS)]


def class_names(prediction: Prediction) -> Sequence[str]:
    """The names of the classes; "class 0" and so on without names."""
    return prediction.class_names or [f"class {label}" for label in range(prediction.classes)]


def draw_reliability(axes: Axes, prediction: Prediction, labels: np.ndarray) -> None:
    """Draw `reliability.Event` of a prediction in bins, with 90 % Clopper-Pearson intervals of the shares."""
    from scipy.stats import binomtest

    found = Event.of(prediction, labels).binned()
    centre, share, rows = found["probability"], found["share"], found["rows"]
    counts = zip(np.round(share * rows).astype(int), rows, strict=True)
    low, high = zip(*(binomtest(hits, of).proportion_ci(LEVEL) for hits, of in counts), strict=True)
    axes.plot([0.0, 1.0], [0.0, 1.0], **GUIDE, label="calibrated", scalex=False, zorder=1)
    axes.vlines(centre, low, high, **BAR, label="90 % interval of the share")
    area = 18.0 + 160.0 * rows / rows.sum()
    axes.scatter(centre, share, s=area, color=BLUE, zorder=3, label="rows in a bin (area: how many)")
    event = "the most probable class" if prediction.classes > 2 else class_names(prediction)[1]
    axes.set_xlabel(for_figure(f"probability of {event}"))
    axes.set_ylabel("share that occurred")
    axes.set_ylim(-0.03, 1.03)
    grid_lines(axes)


# --- figures ----------------------------------------------------------------------------------------------


def legend_entries(panels: Iterable[Axes]) -> dict[str, Any]:
    """Label -> handle, each label once, over several axes."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def add_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Add one legend below the figure, with each label of the panels once."""
    if found := legend_entries(panels):
        style: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 10}
        figure.legend(found.values(), found.keys(), ncols=len(found), **style)


def single_input(x: Any) -> bool:
    """Whether x is a table of one column with more than two different values."""
    return not isinstance(x, Mapping) and x.ndim == 2 and x.shape[1] == 1 and len(np.unique(x)) > 2


def evenly(y: np.ndarray) -> np.ndarray:
    """At most MOST_POINTS row numbers, evenly spaced in the order of y."""
    order = np.argsort(y if y.ndim == 1 else y[:, 0], kind="stable")
    if len(order) <= MOST_POINTS:
        return order
    return order[np.linspace(0, len(order) - 1, MOST_POINTS).round().astype(int)]
