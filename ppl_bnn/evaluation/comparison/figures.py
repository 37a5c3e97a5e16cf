"""Figures, drawn without pyplot: no window, no global state, the same bytes with or without a display."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError, message
from ppl_bnn.core.names import for_figure
from ppl_bnn.diagnostics.function_space import ESS_PER_CHAIN, RHAT_LIMIT, Convergence, RunningScore
from ppl_bnn.posterior.convergence import Mixing
from ppl_bnn.posterior.posterior import DRAWN, Posterior
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import BINS, Event
from ppl_bnn.prediction.scores import coverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.evaluation.comparison.comparison import Comparison

# Okabe and Ito's colours, told apart with any kind of colour vision; meaning is never in colour alone.
BLUE, SKY, ORANGE, VERMILION, GREY = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#666666"
LEVEL = 0.9
MOST_POINTS = 300
# Of what is expected before data: functions drawn as curves, functions drawn as maps, places along an axis of a map.
CURVES, MAPS, PLACES = 20, 6, 90
# Of what is drawn of a comparison: places along a curve; places along each side of a map; draws that are enough.
ALONG, SIDE, ENOUGH = 160, 60, 1000
# Contour lines of class probabilities.
LINES = (0.1, 0.3, 0.5, 0.7, 0.9)
CLASS_COLOURS = (BLUE, ORANGE, "#009E73", VERMILION, SKY, "#CC79A7", GREY, "#F0E442")
CLASS_MARKS = "os^DvPX*"
# 1200 x 800 pixels at 100 dots per inch.
SIZE = (12.0, 8.0)


def predictions_figure(comparison: Comparison) -> Figure:
    """Predictions of the test rows with central 90 % intervals against the truth, one panel per method.

    Numbers: predictive mean against truth, with the interval; for a single input the mean and the interval as curves
    over x, and inside it the 90 % band of the mean function alone. Classes: how often what was predicted came true
    (with 90 % Clopper-Pearson intervals), above the probabilities given to the class that occurred. A method
    that failed has a panel with its reason. Axes are in original units and shared.
    """
    figure = _figure()
    if comparison.task == "classification":
        _draw_classes(figure, comparison)
    elif single_input(comparison.test_inputs) and (
        comparison.test_targets.ndim == 1 or _censored(comparison)
    ):
        _draw_curves(figure, comparison)
    else:
        _draw_intervals(figure, comparison)
    return figure


# --- convergence ------------------------------------------------------------------------------------------


def convergence_figure(judged: Convergence, title: str = "Convergence") -> Figure:
    """R-hat and effective sample sizes of each quantity in function space, and of each layer's weights if asked for.

    judged: what `diagnostics.function_space.convergence` found; with its `weights=True` the layers are drawn below a
    line: they do not enter the verdict. The worst component is a filled mark, the median one a hollow mark; limits are
    dashed. R-hat is drawn by its excess over 1, on a logarithmic axis. Where that is infinite, or not above 0, an arrow
    stands at the edge.
    """
    figure = _figure()
    rows = [(name, figures, False) for name, figures in judged.quantities.items() if figures.components]
    rows += [
        (f"weights: {name}", figures, True) for name, figures in judged.layers.items() if figures.components
    ]
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [name for name, _, _ in rows]
    wanted = ESS_PER_CHAIN * (judged.superchains or judged.chains)
    for axes, pairs, limit, what in (
        (left, _EXCESS, RHAT_LIMIT - 1.0, f"limit {RHAT_LIMIT:g}"),
        (right, _SIZES, float(wanted), f"limit {wanted}"),
    ):
        _draw_marks(axes, rows, pairs, limit)
        axes.axvline(limit, color=GREY, linewidth=1.0, linestyle="--", zorder=1, label=what)
        axes.axhline(len(rows) - len(judged.layers) - 0.5, color=GREY, linewidth=0.8, zorder=1)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False, fontsize=9)
        axes.grid(color="0.92", zorder=0)
        axes.set_axisbelow(True)
    left.set_yticks(range(len(labels)), list(map(for_figure, labels)))
    left.set_ylim(len(labels) - 0.5, -0.5)
    nested = "" if judged.superchains is None else "nested "
    left.set_xlabel(f"{nested}R-hat - 1")
    right.set_xlabel("effective sample size")
    figure.suptitle(
        f"{for_figure(title)}: {judged.chains} chains of {judged.draws} draws; R-hat within one chain "
        f"{judged.rhat_within:.3f}, {judged.between_share:.0%} of the variance of f between chains",
        fontsize=13,
    )
    return figure


# Label, how it is read off the figures of a quantity, colour, marker, whether filled.
_EXCESS = (
    ("worst", lambda found: found.rhat - 1.0, VERMILION, "D", True),
    ("median", lambda found: found.rhat_median - 1.0, VERMILION, "D", False),
)
_SIZES = (
    ("bulk, worst", lambda found: found.ess_bulk, BLUE, "o", True),
    ("bulk, median", lambda found: found.ess_bulk_median, BLUE, "o", False),
    ("tail, worst", lambda found: found.ess_tail, ORANGE, "s", True),
    ("tail, median", lambda found: found.ess_tail_median, ORANGE, "s", False),
)


def _draw_marks(axes: Axes, rows: list[tuple[str, Mixing, bool]], pairs: Any, limit: float) -> None:
    """One line of marks per quantity on a logarithmic axis that holds all finite values and the limit."""
    values = [[read(figures) for _, figures, _ in rows] for _, read, _, _, _ in pairs]
    usable = [value for line in values for value in line if math.isfinite(value) and value > 0.0]
    low, high = min([limit, *usable]) / 2.0, max([limit, *usable]) * 2.0
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for (label, _, colour, marker, filled), line in zip(pairs, values, strict=True):
        # What has no place on the axis stands at the edge that it lies beyond.
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


def running_score_figure(running: RunningScore, title: str = "Log score of the first draws") -> Figure:
    """The log score of the mixture over the first n draws, of each chain and of all together, against n.

    running: what `diagnostics.function_space.running_score` found. A curve that still rises says that more draws help;
    chains that have levelled out apart sit in different modes.
    """
    figure = _figure()
    axes = figure.subplots()
    draws = np.arange(1, len(running.together) + 1)
    several = len(running.each) > 1
    for index, curve in enumerate(running.each if several else ()):
        label = f"each of {len(running.each)} chains" if index == 0 else None
        axes.plot(draws, curve, color=SKY, linewidth=1.3, label=label)
    axes.plot(
        draws,
        running.together,
        color=BLUE,
        linewidth=2.4,
        label="all chains together" if several else "all draws",
    )
    axes.set_xscale("log")
    finite = np.isfinite(running.together)
    if finite.any():
        last = running.together[finite][-1]
        axes.axhline(
            last, color=GREY, linewidth=1.0, linestyle="--", zorder=1, label=f"at the end: {last:.3f}"
        )
    axes.set_xlabel("draws of each chain" if several else "draws")
    axes.set_ylabel("mean log score, nats per row")
    axes.set_title(for_figure(title), fontsize=13)
    axes.grid(color="0.92", zorder=0)
    axes.set_axisbelow(True)
    _legend(figure, {"": axes})
    return figure


# --- parts of a figure of one's own ---------------------------------------------------------------------


def draw_curve(axes: Axes, x: np.ndarray, prediction: Prediction) -> None:
    """A prediction of one number along a single input, on given axes: E[y | x] and two bands of 90 %.

    The outer band is the central interval of observations, by quantiles of the mixture. The inner one is that of the
    mean function, which is a mixture, too: of the means of the draws, each a normal of the variance `epistemic_within`
    where a component has one (a linearised prediction). More data would narrow the inner band; what lies between the
    two would stay.

    x: (N,), in any order, the input of each row of the prediction.

    Raises
    ------
    InputError: x of another shape. UnsupportedError: a prediction of classes or of several outputs.
    """
    if prediction.is_classes or len(prediction.shape) != 1:
        raise UnsupportedError(
            "draw_curve: "
            + message(
                "a prediction of one number for each row", repr(prediction), "draw_class_map for classes"
            )
        )
    x = np.asarray(x)
    if x.shape != prediction.shape:
        raise InputError("draw_curve: " + message(f"x of shape {prediction.shape}", f"{x.shape}", "x[:, 0]"))
    order = np.argsort(x, kind="stable")
    lower, upper = prediction.interval(LEVEL)
    mean, (least, most) = prediction.mean, _mean_interval(prediction)
    axes.fill_between(
        x[order],
        lower[order],
        upper[order],
        color=SKY,
        alpha=0.35,
        linewidth=0,
        label="90 % of observations",
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
        # What has no spread of its own is a normal as narrow as digits allow.
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
    """The inputs (A B, 2) that `draw_class_map` wants predictions of: all places, row after row from below."""
    return np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)


def drawn_along(x: np.ndarray) -> np.ndarray:
    """Places of a curve over a single input x (N, 1), a little beyond its rows on either side."""
    margin = 0.15 * float(x[:, 0].max() - x[:, 0].min())
    return np.linspace(x[:, 0].min() - margin, x[:, 0].max() + margin, ALONG)


def drawn_over(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of a map over two inputs x (N, 2): along the first, and along the second."""
    low, high = x.min(axis=0), x.max(axis=0)
    margin = np.where(high > low, 0.15 * (high - low), 1.0)
    across, up = (np.linspace(low[i] - margin[i], high[i] + margin[i], SIDE) for i in (0, 1))
    return across, up


def drawn_at(x: Any, y: np.ndarray, prediction: Prediction) -> np.ndarray | None:
    """Inputs at which curves or maps of a comparison are drawn, beside test rows x, y; None where only rows are."""
    if isinstance(x, Mapping) or x.ndim != 2:
        return None
    if prediction.is_classes:
        return grid_points(*drawn_over(x)) if x.shape[1] == 2 else None
    return drawn_along(x)[:, None] if single_input(x) and (y.ndim == 1 or prediction.censored) else None


def predicted_for_drawing(posterior: Posterior, x: np.ndarray, seed: int) -> Prediction:
    """The prediction of a picture, by no more draws than it needs; of classes only their probabilities, which are all
    that a map shows."""
    held = posterior.approximation.draws_held
    few = posterior.approximation.kinds[0] in DRAWN and held is not None and held > ENOUGH
    found = posterior.predict(x, draws=ENOUGH if few else None, seed=seed)
    if not found.is_classes:
        return found
    # A mean of ones may be rounded to a little more than one.
    probabilities = np.minimum(found.mean, 1.0)[None]
    return Prediction(found.family, {"probs": probabilities}, class_names=found.class_names)


def draw_class_map(
    axes: Axes,
    across: np.ndarray,
    up: np.ndarray,
    prediction: Prediction,
    levels: Sequence[float] | None = None,
) -> None:
    """Class probabilities over a rectangle, on given axes: each place in the colour of its most probable class, paler
    where that is less sure, and contour lines.

    across (A,), up (B,): places along the two inputs, evenly spaced. prediction: of the rows `grid_points(across, up)`.
    levels: of the lines. For two classes they are of the probability of class 1, 0.1, 0.3, 0.5, 0.7 and 0.9 unless
    given, and 0.5 is drawn thick. For more they are of that of the most probable class, 0.7 and 0.9 unless given: along
    a border of two classes that is a half. A level that no place reaches has no line.

    Raises
    ------
    InputError: another number of rows. UnsupportedError: a prediction of numbers.
    """
    from matplotlib.colors import to_rgb

    classes, probabilities = prediction.classes, prediction.probabilities
    if len(prediction) != len(across) * len(up):
        raise InputError(
            "draw_class_map: "
            + message(
                f"a prediction of {len(across)} x {len(up)} places",
                f"{len(prediction)} rows",
                "grid_points(across, up)",
            )
        )
    colours = np.array([to_rgb(_class_colour(label)) for label in range(classes)])
    best = probabilities.argmax(axis=1)
    sure = (probabilities.max(axis=1) - 1.0 / classes) / (1.0 - 1.0 / classes)
    # Opaque where sure, and the colour of whatever lies below where not: of white paper, of a dark page.
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
    # Matplotlib warns of a level that is nowhere reached.
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
    """Rows x (N, 2) on given axes, with a mark and a colour for each of their labels y (N,), named `names` (C,)."""
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


# --- numbers ----------------------------------------------------------------------------------------------


def _draw_intervals(figure: Figure, comparison: Comparison) -> None:
    panels = _panels(figure, comparison)
    targets, rows = comparison.test_targets, "test rows"
    keep = np.arange(len(targets))
    if _censored(comparison):
        # Of a row that was censored there is no truth to compare with.
        keep, rows = np.flatnonzero(targets[:, 1] == 1.0), "test rows that were observed"
        targets = targets[:, 0]
    if not len(keep):
        figure.suptitle("No test row was observed: of each a bound is known, and not the value", fontsize=13)
        return
    shown = keep[evenly(targets[keep])]
    truth = targets[shown]
    target = for_figure(comparison.data["target_name"])
    lowest, highest = float(truth.min()), float(truth.max())
    for name, axes in panels.items():
        prediction = comparison.predictions.get(name)
        if prediction is None:
            _say(axes, comparison, name)
            continue
        part = prediction.take(shown)
        lower, upper = part.interval(LEVEL)
        lowest, highest = min(lowest, float(lower.min())), max(highest, float(upper.max()))
        inside = (lower <= truth) & (truth <= upper)
        for chosen, colour, marker, label in (
            (inside, BLUE, "o", "truth inside the 90 % interval"),
            (~inside, VERMILION, "D", "truth outside"),
        ):
            axes.vlines(
                truth[chosen], lower[chosen], upper[chosen], color=colour, alpha=0.35, linewidth=1.3, zorder=2
            )
            axes.plot(
                truth[chosen],
                part.mean[chosen],
                marker,
                color=colour,
                markersize=4.0,
                markeredgewidth=0.0,
                zorder=3,
                label=label,
            )
        axes.set_title(_title(comparison, name), fontsize=10)
        axes.grid(color="0.92", zorder=0)
    margin = 0.03 * (highest - lowest) or 1.0
    for name, axes in panels.items():
        if name in comparison.predictions:
            axes.axline((0.0, 0.0), slope=1.0, color=GREY, linewidth=1.0, linestyle="--", zorder=1)
    first = next(iter(panels.values()))
    first.set_xlim(float(truth.min()) - margin, float(truth.max()) + margin)
    first.set_ylim(lowest - margin, highest + margin)
    _label_bottom(panels, f"{target}: what was observed")
    figure.supylabel(f"{target}: predictive mean and central 90 % interval", fontsize=11)
    some = "" if len(shown) == len(keep) else f" ({len(shown)} drawn)"
    figure.suptitle(
        f"Predictions of {len(keep)} {rows}{some}; on the dashed line the mean is right", fontsize=13
    )
    _legend(figure, panels)


def _draw_curves(figure: Figure, comparison: Comparison) -> None:
    panels = _panels(figure, comparison)
    x = comparison.test_inputs[:, 0]
    names = comparison.data.get("feature_names")
    target = for_figure(comparison.data["target_name"])
    for name, axes in panels.items():
        prediction = comparison.predictions.get(name)
        if prediction is None:
            _say(axes, comparison, name)
            continue
        draw_curve(axes, x, prediction)
        for y, seen, mark, label in marked_targets(comparison):
            axes.plot(x[seen], y[seen], mark, color="black", markersize=4.0, alpha=0.7, label=label)
        axes.set_title(_title(comparison, name), fontsize=10)
        axes.grid(color="0.92", zorder=0)
    _label_bottom(panels, for_figure(names[0]) if names else "x")
    figure.supylabel(target, fontsize=11)
    figure.suptitle(
        f"Predictions of {target}, with bands of 90 %, and {len(x)} test rows",
        fontsize=13,
    )
    _legend(figure, panels)


def _censored(comparison: Comparison) -> bool:
    return any(prediction.censored for prediction in comparison.predictions.values())


def marked_targets(comparison: Comparison) -> list[tuple[np.ndarray, np.ndarray, str, str]]:
    """(values, which rows, mark, label) of the test rows; a row that was censored points to where its value lies."""
    y = comparison.test_targets
    if not _censored(comparison):
        return [(y, np.full(len(y), True), ".", "test rows")]
    kinds = ((1.0, ".", "observed"), (0.0, "^", "censored: the value is larger"), (-1.0, "v", "smaller"))
    return [
        (y[:, 0], y[:, 1] == event, mark, label) for event, mark, label in kinds if np.any(y[:, 1] == event)
    ]


def _title(comparison: Comparison, name: str) -> str:
    row = comparison.table.loc[name]
    if "concordance" in row and not math.isfinite(float(row["rmse"])):
        return (
            f"{_called(comparison, name)}\n"
            f"log score {float(row['log_score']):.3f} · concordance {float(row['concordance']):.3f}"
        )
    covered = coverage(comparison.predictions[name], comparison.test_targets, LEVEL)
    return (
        f"{_called(comparison, name)}\n"
        f"RMSE {float(row['rmse']):.3g} · log score {float(row['log_score']):.3f} · coverage {covered:.0%}"
    )


# --- classes ----------------------------------------------------------------------------------------------


def _draw_classes(figure: Figure, comparison: Comparison) -> None:
    names = list(comparison.table.index)
    columns = min(len(names), 4) or 1
    blocks = math.ceil(len(names) / columns)
    heights = [3.0, 1.4] * blocks
    grid = figure.subplots(
        2 * blocks, columns, squeeze=False, sharex="all", gridspec_kw={"height_ratios": heights}
    )
    labels = np.asarray(comparison.test_targets).astype(int)
    edges = np.linspace(0.0, 1.0, 2 * BINS + 1)
    tallest = 0.0
    for index in range(blocks * columns):
        upper = grid[2 * (index // columns), index % columns]
        lower = grid[2 * (index // columns) + 1, index % columns]
        if index >= len(names):
            upper.set_axis_off()
            lower.set_axis_off()
            continue
        name = names[index]
        prediction = comparison.predictions.get(name)
        if prediction is None:
            _say(upper, comparison, name)
            upper.tick_params(left=False, labelleft=False)
            lower.set_axis_off()
            continue
        row = comparison.table.loc[name]
        upper.set_title(
            f"{_called(comparison, name)}\n"
            f"accuracy {float(row['accuracy']):.3f} · log score {float(row['log_score']):.3f}",
            fontsize=10,
        )
        draw_reliability(upper, prediction, labels)
        chosen = prediction.probabilities[np.arange(len(labels)), labels]
        counts, _, _ = lower.hist(
            chosen, bins=edges, color=SKY, edgecolor=BLUE, linewidth=0.6, weights=np.full(len(chosen), 1.0)
        )
        tallest = max(tallest, float(np.max(counts)))
        lower.axvline(float(np.mean(chosen)), color=VERMILION, linewidth=1.6, label="mean")
        lower.grid(color="0.92")
        lower.set_axisbelow(True)
        if index % columns == 0:
            upper.set_ylabel("share that came true")
            lower.set_ylabel("test rows")
        else:
            upper.tick_params(labelleft=False)
            lower.tick_params(labelleft=False)
        lower.set_xlabel("probability given to the class\nthat occurred", fontsize=9)
        upper.set_xlabel(for_figure(predicted_event(prediction)), fontsize=9)
        upper.tick_params(labelbottom=True)
    for row in range(1, 2 * blocks, 2):
        for axes in grid[row]:
            if axes.axison:
                axes.set_ylim(0.0, 1.05 * tallest)
    grid[0, 0].set_xlim(-0.02, 1.02)
    figure.suptitle(
        f"{for_figure(comparison.data['target_name'])}: probabilities against what happened, {len(labels)} test rows",
        fontsize=13,
    )
    _legend(figure, {f"{index}": axes for index, axes in enumerate(grid[:2, 0])})


def predicted_event(prediction: Prediction) -> str:
    if prediction.classes > 2:
        return "probability of the most probable class"
    return f"probability of {prediction.class_names[1] if prediction.class_names else 'class 1'}"


def draw_reliability(axes: Axes, prediction: Prediction, labels: np.ndarray) -> None:
    """`reliability.Event` of a prediction in bins on given axes, with 90 % Clopper-Pearson intervals of the shares."""
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


# --- before data ------------------------------------------------------------------------------------------


def prior_figure(
    predict: Callable[[np.ndarray], Prediction],
    x: np.ndarray,
    y: np.ndarray,
    *,
    title: str = "What the prior expects",
    target_name: str = "y",
    feature_names: Sequence[str] | None = None,
) -> Figure:
    """What a model expects before it has seen a target, beside the targets y (N,) at inputs x (N, F).

    predict: inputs (M, F) -> the prior predictive there, a mixture with one component for each draw.

    A single input: the mean functions of some draws as curves, over the 90 % band of observations. Classes of two
    inputs: maps of what some draws call each place, paler where they are less sure. Other numbers: the intervals of the
    rows, and what would be observed beside what was. Other classes: how sure draws are, and the share of rows that they
    give to each class. Axes are in original units.
    """
    figure = _figure()
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
    _legend(figure, {"": axes})


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
    _legend(figure, {"": panels[0]})


def _draw_prior_rows(figure: Figure, prediction: Prediction, y: np.ndarray, target: str) -> None:
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.0, 1.0])
    if prediction.censored:
        # A bound is not what was observed of a row.
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
    # The far tails of a heavy prior would flatten all the rest.
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
    _legend(figure, {"left": left, "right": right})


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
    _legend(figure, {"left": left, "right": right})


# --- pieces -----------------------------------------------------------------------------------------------


def _figure() -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _called(comparison: Comparison, name: str) -> str:
    standing = comparison.table.loc[name, "reference"]
    return for_figure(f"{name}, {standing}" if standing else name)


def _label_bottom(panels: Mapping[str, Axes], text: str) -> None:
    """A label under the lowest panel of each column: one for the whole figure would lie on the legend."""
    for axes in panels.values():
        specification = axes.get_subplotspec()
        if specification is not None and axes.xaxis.get_tick_params().get("labelbottom", True):
            axes.set_xlabel(text, fontsize=10)


def _panels(figure: Figure, comparison: Comparison) -> dict[str, Axes]:
    names = list(comparison.table.index)
    columns = len(names) if len(names) < 4 else math.ceil(math.sqrt(len(names)))
    columns = max(columns, 1)
    rows = math.ceil(len(names) / columns) or 1
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    # With a gap in the last row the panel above it needs its own tick labels.
    for index in range(len(names)):
        if index + columns >= len(names):
            grid[index].tick_params(labelbottom=True)
    return dict(zip(names, grid, strict=False))


def _say(axes: Axes, comparison: Comparison, name: str) -> None:
    reason = comparison.failures.get(name, "no prediction")
    axes.set_title(for_figure(f"{name}: failed"), fontsize=10)
    text = for_figure("\n".join(textwrap.wrap(textwrap.shorten(reason, 400), 44)))
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9, color=GREY)


def _legend(figure: Figure, panels: Mapping[str, Axes]) -> None:
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
    return not isinstance(x, Mapping) and x.ndim == 2 and x.shape[1] == 1 and len(np.unique(x)) > 2


def evenly(y: np.ndarray) -> np.ndarray:
    """At most MOST_POINTS row numbers, evenly spaced in the order of y: more than that is a blot."""
    order = np.argsort(y if y.ndim == 1 else y[:, 0], kind="stable")
    if len(order) <= MOST_POINTS:
        return order
    return order[np.linspace(0, len(order) - 1, MOST_POINTS).round().astype(int)]
