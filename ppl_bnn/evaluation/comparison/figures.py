"""The figure of a comparison, drawn without pyplot: no window, no global state, same bytes without a display."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.figures import BLUE, GREY, SKY, VERMILION, grid_lines, new_figure
from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison import drawing
from ppl_bnn.evaluation.comparison.drawing import ENOUGH, LEVEL
from ppl_bnn.posterior.posterior import DRAWN, Posterior
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import BINS
from ppl_bnn.prediction.scores import coverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ppl_bnn.evaluation.comparison.comparison import Comparison


def predictions_figure(comparison: Comparison) -> Figure:
    """Predictions of the test rows against the truth, one panel per method, in original units on shared axes.

    Numbers: means with 90 % intervals, or curves over a single input. Classes: reliability above the probabilities
    given to the class that occurred. A method that failed has a panel with its reason.
    """
    figure = new_figure()
    if comparison.task == "classification":
        _draw_classes(figure, comparison)
    else:
        _draw_numbers(figure, comparison)
    return figure


def draws_curves(comparison: Comparison) -> bool:
    """Whether predictions of numbers are drawn along a single input."""
    one = comparison.test_targets.ndim == 1 or drawing.any_censored(comparison)
    return drawing.single_input(comparison.test_inputs) and one


def drawn_at(x: Any, y: np.ndarray, prediction: Prediction) -> np.ndarray | None:
    """Inputs for the curves or maps of a comparison of test rows x, y; None if only the rows are drawn."""
    if isinstance(x, Mapping) or x.ndim != 2:
        return None
    if prediction.is_classes:
        return drawing.grid_points(*drawing.drawn_over(x)) if x.shape[1] == 2 else None
    one = drawing.single_input(x) and (y.ndim == 1 or prediction.censored)
    return drawing.drawn_along(x[:, 0])[:, None] if one else None


def drawn(comparison: Comparison, name: str) -> tuple[np.ndarray | None, Prediction | None]:
    """Inputs for the curve or map of a method, and its prediction there: of its posterior, or as it was stored."""
    if (posterior := comparison.posteriors.get(name)) is None:
        return comparison.drawn_at, comparison.drawn.get(name)
    at = drawn_at(comparison.test_inputs, comparison.test_targets, comparison.predictions[name])
    return at, None if at is None else predicted(posterior, at, comparison.data.get("seed", 0))


def predicted(posterior: Posterior, x: np.ndarray, seed: int) -> Prediction:
    """The prediction for a figure, with no more draws than needed; for classes only their probabilities."""
    stored = posterior.approximation.stored_count
    few = posterior.approximation.kinds[0] in DRAWN and stored is not None and stored > ENOUGH
    found = posterior.predict(x, draws=ENOUGH if few else None, seed=seed)
    if not found.is_classes:
        return found
    # A mean of ones may be rounded to slightly more than one.
    probabilities = np.minimum(found.mean, 1.0)[None]
    return Prediction(found.family, {"probs": probabilities}, class_names=found.class_names)


# --- numbers ----------------------------------------------------------------------------------------------


def _draw_numbers(figure: Figure, comparison: Comparison) -> None:
    target, names = for_figure(comparison.data["target_name"]), comparison.data.get("feature_names")
    curves, rows = draws_curves(comparison), len(comparison.test_targets)
    found = None if curves else drawing.Intervals.of(comparison)
    if found is not None and not found.rows:
        figure.suptitle("No test row was observed: for each there is a bound, but no value", fontsize=13)
        return
    panels = _panels(figure, comparison)
    for name, axes in panels.items():
        prediction = comparison.predictions.get(name)
        if prediction is None:
            _write_reason(axes, comparison, name)
            continue
        if found is None:
            x = comparison.test_inputs[:, 0]
            drawing.draw_curve(axes, x, prediction)
            drawing.draw_targets(axes, x, comparison.test_targets, drawing.any_censored(comparison))
        else:
            found.draw(axes, name)
        axes.set_title(_title(comparison, name, prediction), fontsize=10)
        grid_lines(axes)
    if found is None:
        below, beside = for_figure(names[0]) if names else "x", target
        title = f"Predictions of {target}, with bands of 90 %, and {rows} test rows"
    else:
        below, beside = f"{target}: observed", f"{target}: predictive mean and central 90 % interval"
        some = "" if found.shown == found.rows else f" ({found.shown} drawn)"
        which = f"{found.rows} {'test rows' if found.rows == rows else 'observed test rows'}{some}"
        title = f"Predictions of {which}; on the dashed line the mean is right"
    # One label for the whole figure would overlap the legend.
    for axes in panels.values():
        if axes.xaxis.get_tick_params().get("labelbottom", True):
            axes.set_xlabel(below, fontsize=10)
    figure.supylabel(beside, fontsize=11)
    figure.suptitle(title, fontsize=13)
    drawing.add_legend(figure, panels.values())


def _title(comparison: Comparison, name: str, prediction: Prediction) -> str:
    row = comparison.table.loc[name]
    score = f"log score {float(row['log_score']):.3f}"
    if prediction.is_classes:
        words = [f"accuracy {float(row['accuracy']):.3f}", score]
    elif "concordance" in row and not math.isfinite(float(row["rmse"])):
        words = [score, f"concordance {float(row['concordance']):.3f}"]
    else:
        covered = coverage(prediction, comparison.test_targets, LEVEL)
        words = [f"RMSE {float(row['rmse']):.3g}", score, f"coverage {covered:.0%}"]
    standing = row["reference"]
    return f"{for_figure(f'{name}, {standing}' if standing else name)}\n{' · '.join(words)}"


# --- classes ----------------------------------------------------------------------------------------------


def _draw_classes(figure: Figure, comparison: Comparison) -> None:
    names, labels = list(comparison.table.index), np.asarray(comparison.test_targets).astype(int)
    columns = min(len(names), 4) or 1
    blocks = math.ceil(len(names) / columns)
    heights = {"height_ratios": [3.0, 1.4] * blocks}
    grid = figure.subplots(2 * blocks, columns, squeeze=False, sharex="all", gridspec_kw=heights)
    # The two panels of each method, one above the other.
    pairs = grid.reshape(blocks, 2, columns).swapaxes(1, 2).reshape(-1, 2)
    for axes in pairs[len(names) :].flat:
        axes.set_axis_off()
    for index, (name, (upper, lower)) in enumerate(zip(names, pairs, strict=False)):
        prediction = comparison.predictions.get(name)
        if prediction is None:
            _write_reason(upper, comparison, name)
            upper.tick_params(left=False, labelleft=False)
            lower.set_axis_off()
            continue
        upper.set_title(_title(comparison, name, prediction), fontsize=10)
        drawing.draw_reliability(upper, prediction, labels)
        upper.xaxis.label.set_fontsize(9)
        upper.tick_params(labelbottom=True)
        chosen = prediction.probabilities[np.arange(len(labels)), labels]
        lower.hist(chosen, bins=np.linspace(0.0, 1.0, 2 * BINS + 1), color=SKY, edgecolor=BLUE, linewidth=0.6)
        lower.axvline(float(np.mean(chosen)), color=VERMILION, linewidth=1.6, label="mean")
        lower.set_xlabel("probability given to the class\nthat occurred", fontsize=9)
        lower.set_ylabel("test rows")
        grid_lines(lower)
        if index % columns:
            for axes in (upper, lower):
                axes.set_ylabel("")
                axes.tick_params(labelleft=False)
    tallest = max(lower.get_ylim()[1] for _, lower in pairs)
    for _, lower in pairs:
        lower.set_ylim(0.0, tallest)
    grid[0, 0].set_xlim(-0.02, 1.02)
    target = for_figure(comparison.data["target_name"])
    figure.suptitle(f"{target}: probabilities against outcomes, {len(labels)} test rows", fontsize=13)
    drawing.add_legend(figure, grid[:2, 0])


# --- panels -----------------------------------------------------------------------------------------------


def _panels(figure: Figure, comparison: Comparison) -> dict[str, Axes]:
    names = list(comparison.table.index)
    columns = max(len(names) if len(names) < 4 else math.ceil(math.sqrt(len(names))), 1)
    rows = math.ceil(len(names) / columns) or 1
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    # If the last row is not full, the panel above the gap needs its own tick labels.
    for index in range(len(names)):
        if index + columns >= len(names):
            grid[index].tick_params(labelbottom=True)
    return dict(zip(names, grid, strict=False))


def _write_reason(axes: Axes, comparison: Comparison, name: str) -> None:
    reason = comparison.failures.get(name, "no prediction")
    axes.set_title(for_figure(f"{name}: failed"), fontsize=10)
    text = for_figure("\n".join(textwrap.wrap(textwrap.shorten(reason, 400), 44)))
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9, color=GREY)
