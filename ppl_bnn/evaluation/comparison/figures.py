"""Figures of a comparison, drawn without pyplot.

There is no window and no global state, and the bytes are the same with or without a display.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.names import for_figure
from ppl_bnn.diagnostics.function_space import ESS_PER_CHAIN, RHAT_LIMIT, Convergence, RunningScore
from ppl_bnn.evaluation.comparison.drawing import (
    BLUE,
    ENOUGH,
    GREY,
    LEVEL,
    ORANGE,
    SKY,
    VERMILION,
    add_legend,
    draw_curve,
    draw_marks,
    draw_reliability,
    drawn_along,
    drawn_over,
    evenly,
    grid_points,
    label_bottom,
    new_figure,
    predicted_event,
    single_input,
)
from ppl_bnn.posterior.posterior import DRAWN, Posterior
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import BINS
from ppl_bnn.prediction.scores import coverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.evaluation.comparison.comparison import Comparison


def predictions_figure(comparison: Comparison) -> Figure:
    """Predictions of the test rows with central 90 % intervals against the truth, one panel per method.

    Numbers: predictive mean against truth, with the interval; for a single input the mean and the interval as curves
    over x, and inside it the 90 % band of the mean function alone. Classes: how often the predicted class was correct
    (with 90 % Clopper-Pearson intervals), above the probabilities given to the class that occurred. A method that
    failed has a panel with its reason. Axes are in original units and shared.

    Parameters
    ----------
    comparison : Comparison
        The comparison.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = new_figure()
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
    """R-hat and effective sample sizes of each quantity in function space, and of each layer's weights if requested.

    The worst component is a filled mark, the median one a hollow mark; limits are dashed. R-hat is drawn by its excess
    over 1, on a logarithmic axis. If the excess is infinite, or not above 0, an arrow is drawn at the edge.

    Parameters
    ----------
    judged : Convergence
        The result of `diagnostics.function_space.convergence`. With `weights=True` the layers are drawn below a line:
        they do not enter the verdict.
    title : str
        Title of the figure.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = new_figure()
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
        draw_marks(axes, rows, pairs, limit)
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


# Label, function that reads it from the figures of a quantity, colour, marker, whether filled.
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


def running_score_figure(running: RunningScore, title: str = "Log score of the first draws") -> Figure:
    """The log score of the mixture over the first n draws, of each chain and of all together, against n.

    A curve that still rises means that more draws help; chains that have levelled out at different values are in
    different modes.

    Parameters
    ----------
    running : RunningScore
        The result of `diagnostics.function_space.running_score`.
    title : str
        Title of the figure.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = new_figure()
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
    add_legend(figure, {"": axes})
    return figure


def drawn_at(x: Any, y: np.ndarray, prediction: Prediction) -> np.ndarray | None:
    """Inputs for the curves or maps of a comparison.

    Parameters
    ----------
    x, y
        Test rows and their targets.
    prediction : Prediction
        A prediction of the test rows.

    Returns
    -------
    np.ndarray or None
        None if only the rows are drawn.
    """
    if isinstance(x, Mapping) or x.ndim != 2:
        return None
    if prediction.is_classes:
        return grid_points(*drawn_over(x)) if x.shape[1] == 2 else None
    return drawn_along(x)[:, None] if single_input(x) and (y.ndim == 1 or prediction.censored) else None


def predicted_for_drawing(posterior: Posterior, x: np.ndarray, seed: int) -> Prediction:
    """The prediction for a figure, with no more draws than needed; for classes only their probabilities.

    Parameters
    ----------
    posterior : Posterior
        The posterior.
    x : np.ndarray
        Inputs.
    seed : int
        Seed of the prediction.

    Returns
    -------
    Prediction
    """
    held = posterior.approximation.stored_count
    few = posterior.approximation.kinds[0] in DRAWN and held is not None and held > ENOUGH
    found = posterior.predict(x, draws=ENOUGH if few else None, seed=seed)
    if not found.is_classes:
        return found
    # A mean of ones may be rounded to slightly more than one.
    probabilities = np.minimum(found.mean, 1.0)[None]
    return Prediction(found.family, {"probs": probabilities}, class_names=found.class_names)


# --- numbers ----------------------------------------------------------------------------------------------


def _draw_intervals(figure: Figure, comparison: Comparison) -> None:
    panels = _panels(figure, comparison)
    targets, rows = comparison.test_targets, "test rows"
    keep = np.arange(len(targets))
    if _censored(comparison):
        # A censored row has no true value to compare with.
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
    label_bottom(panels, f"{target}: what was observed")
    figure.supylabel(f"{target}: predictive mean and central 90 % interval", fontsize=11)
    some = "" if len(shown) == len(keep) else f" ({len(shown)} drawn)"
    figure.suptitle(
        f"Predictions of {len(keep)} {rows}{some}; on the dashed line the mean is right", fontsize=13
    )
    add_legend(figure, panels)


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
    label_bottom(panels, for_figure(names[0]) if names else "x")
    figure.supylabel(target, fontsize=11)
    figure.suptitle(f"Predictions of {target}, with bands of 90 %, and {len(x)} test rows", fontsize=13)
    add_legend(figure, panels)


def _censored(comparison: Comparison) -> bool:
    return any(prediction.censored for prediction in comparison.predictions.values())


def marked_targets(comparison: Comparison) -> list[tuple[np.ndarray, np.ndarray, str, str]]:
    """(values, which rows, mark, label) of the test rows; the mark of a censored row points to where its value lies."""
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
    add_legend(figure, {f"{index}": axes for index, axes in enumerate(grid[:2, 0])})


def _called(comparison: Comparison, name: str) -> str:
    standing = comparison.table.loc[name, "reference"]
    return for_figure(f"{name}, {standing}" if standing else name)


def _panels(figure: Figure, comparison: Comparison) -> dict[str, Axes]:
    names = list(comparison.table.index)
    columns = len(names) if len(names) < 4 else math.ceil(math.sqrt(len(names)))
    columns = max(columns, 1)
    rows = math.ceil(len(names) / columns) or 1
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    # If the last row is not full, the panel above the gap needs its own tick labels.
    for index in range(len(names)):
        if index + columns >= len(names):
            grid[index].tick_params(labelbottom=True)
    return dict(zip(names, grid, strict=False))


def _say(axes: Axes, comparison: Comparison, name: str) -> None:
    reason = comparison.failures.get(name, "no prediction")
    axes.set_title(for_figure(f"{name}: failed"), fontsize=10)
    text = for_figure("\n".join(textwrap.wrap(textwrap.shorten(reason, 400), 44)))
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9, color=GREY)
