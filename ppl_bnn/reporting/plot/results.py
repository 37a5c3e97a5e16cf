"""Plots of predictions against what was observed, and of several methods: calibration, gaps, differences."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ppl_bnn.core.arrays import row_count
from ppl_bnn.core.errors import InputError, UnsupportedError, check_known
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.drawing import MOST_POINTS
from ppl_bnn.evaluation.grid.result import GridResult
from ppl_bnn.posterior.convergence import evenly_spaced
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction.reliability import Event, Transform
from ppl_bnn.references.figure import draw_means, draw_spreads
from ppl_bnn.references.grade import Grade
from ppl_bnn.reporting.figures import pictures
from ppl_bnn.reporting.figures.panels import finish
from ppl_bnn.reporting.figures.predictions import draw_against
from ppl_bnn.reporting.plot.subject import Canvas, block_of, chosen, doubt_of, panel_of, place_of, predicted
from ppl_bnn.reporting.verdict import ELPD, SCORE

# --- calibration ------------------------------------------------------------------------------------------


def calibration(
    result: Any, x: Any = None, y: Any = None, *, block: str | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the coverage of central intervals at every level, minus that level.

    Below zero intervals are too narrow. The grey band contains a calibrated method in 90 % of cases, level by level, if
    the rows are independent.

    Parameters
    ----------
    result : Posterior, Prediction, Comparison, GridResult, or dict of posteriors or predictions
        What is judged; names in a dict are those of the legend.
    x : array, optional
        Inputs of rows that were held out, (N, F), for posteriors.
    y : array, optional
        Their targets, (N,) or (N, K). A comparison has its own test rows, a grid those of all its cells.
    block : str, optional
        "MODEL on DATA" in the result of a grid that has several.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    UnsupportedError
        Predictions of classes, or targets without a distribution function.
    InputError, UnknownNameError
        Another type, missing rows, a block that does not exist.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> train, test = table.split(seed=0)
    >>> model = bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x[train], table.y[train], bnn.Laplace(), standardise=True)
    >>> bnn.plot.calibration(posterior, table.x[test], table.y[test]).get_title()
    'Coverage of central intervals, 88 rows'
    """
    return _of_numbers(result, x, y, block, ax, "calibration", 0, "Coverage of central intervals")


def pit(
    result: Any, x: Any = None, y: Any = None, *, block: str | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the distribution of the probability integral transform (PIT), minus the uniform one.

    That is the share of targets below each predicted quantile, minus its level: it shows predictions that are too low
    or too high. Of counts PIT is randomised within the jump of the distribution function.

    Parameters
    ----------
    result : Posterior, Prediction, Comparison, GridResult, or dict of posteriors or predictions
        As for `calibration`.
    x, y, block : optional
        As for `calibration`.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    UnsupportedError
        Predictions of classes, or targets without a distribution function.
    InputError, UnknownNameError
        Another type, missing rows, a block that does not exist.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> train, test = table.split(seed=0)
    >>> model = bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x[train], table.y[train], bnn.Laplace(), standardise=True)
    >>> prediction = posterior.predict(table.x[test])
    >>> bnn.plot.pit(prediction, y=table.y[test]).get_ylabel()
    'share below, minus that'
    """
    return _of_numbers(result, x, y, block, ax, "pit", 1, "Probability integral transform")


def _of_numbers(
    result: Any, x: Any, y: Any, block: str | None, ax: Any, where: str, place: int, title: str
) -> Axes:
    transforms, _, doubts = _calibrations(result, x, y, block, where)
    expected, advice = "predictions of numbers", "bnn.plot.reliability"
    UnsupportedError.check(transforms, where, expected, "classes, or no calibration that was stored", advice)
    panel = list(pictures.panels_of_numbers(transforms))[place]
    canvas = Canvas.of(ax)
    panel.draw(canvas.axes)
    return canvas.finished(f"{title}, {_rows_of(transforms)}", doubts)


def reliability(
    result: Any,
    x: Any = None,
    y: Any = None,
    *,
    method: str | None = None,
    block: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot how often an event occurred against its predicted probability, in ten bins.

    The event is class 1 of two classes, or the most probable one of several. Of a single prediction bars are 90 %
    intervals of the shares (Clopper and Pearson), and the area of a mark is the number of its rows.

    Parameters
    ----------
    result : Posterior, Prediction, Comparison, GridResult, or dict of posteriors or predictions
        As for `calibration`.
    x, y : array, optional
        As for `calibration`.
    method : str, optional
        One method of a comparison; by default all of them.
    block : str, optional
        As for `calibration`.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    UnsupportedError
        Predictions of numbers.
    InputError, UnknownNameError
        Another type, missing rows, a method or a block that does not exist.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("breast_cancer")
    >>> train, test = table.split(seed=0)
    >>> model = bnn.zoo.load("logistic_regression")
    >>> posterior = bnn.fit(model, table.x[train], table.y[train], bnn.Laplace(), standardise=True)
    >>> bnn.plot.reliability(posterior, table.x[test], table.y[test]).get_ylabel()
    'share that occurred'
    """
    _, events, doubts = _calibrations(result, x, y, block, "reliability")
    expected, advice = "predictions of classes", "bnn.plot.calibration or bnn.plot.pit"
    UnsupportedError.check(
        events, "reliability", expected, "numbers, or no calibration that was stored", advice
    )
    several = isinstance(result, Comparison | dict)
    InputError.check(
        several or method is None, "method", "None but for a comparison", repr(method), "no method="
    )
    if method is not None:
        check_known("method", [method], events)
        events, doubts = {method: events[method]}, {n: w for n, w in doubts.items() if n == method}
    canvas, name = Canvas.of(ax), next(iter(events))
    title = f"Reliability, {_rows_of(events)}"
    if len(events) == 1 and not isinstance(result, GridResult):
        judged = predicted(result, x, y, "reliability")
        pictures.draw_reliability(canvas.axes, judged.predictions[name], judged.y.astype(int))
        title = f"{name}: reliability, {_rows_of(events)}"
    else:
        pictures.draw_reliabilities(canvas.axes, pictures.bins_of(events))
    return canvas.finished(title, doubts)


def _rows_of(parts: Any) -> str:
    counts = sorted({len(next(iter(vars(each).values()))) for each in parts.values()})
    return f"{counts[0]} rows" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} rows"


def _calibrations(
    result: Any, x: Any, y: Any, block: str | None, where: str
) -> tuple[dict[str, Transform], dict[str, Event], dict[str, str]]:
    """Transforms of numbers, events of classes, and doubts, by name."""
    if isinstance(result, Comparison | GridResult):
        InputError.check(x is None and y is None, where, "no x and y", "some", "the result's own test rows")
        found, doubts = block_of(result, block, where)
        (one,) = found.blocks.values()
        return *one.calibrations, doubts
    InputError.check(block is None, "block", "None but for a grid", repr(block), "no block=")
    judged = predicted(result, x, y, where)
    classes = {name: each for name, each in judged.predictions.items() if each.is_classes}
    numbers = {name: each for name, each in judged.predictions.items() if not each.is_classes}
    events = {name: Event.of(each, judged.y) for name, each in classes.items()}
    transforms = {name: Transform.of(each, judged.y) for name, each in numbers.items()}
    return transforms, events, judged.doubts


# --- gaps and differences ---------------------------------------------------------------------------------


def gap(
    result: Any,
    x: Any = None,
    *,
    reference: Posterior | None = None,
    of: str = "mean",
    block: str | None = None,
    region: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot how far approximations are from a reference.

    - Of a comparison or a grid: the distance of each method's mean function, or the ratio of its epistemic standard
      deviation, beside the noise between two halves of the reference.
    - Of a posterior and another as `reference`: its predictive means, or its epistemic standard deviations, against
      those of the reference, row by row.
    - Of a grade: errors of the mean, or ratios of standard deviations, along the grid of a region.

    Parameters
    ----------
    result : Comparison, GridResult, Grade or Posterior
        What is compared with a reference.
    x : array, optional
        Rows (N, F) for two posteriors, in the units of the data. By default up to 300 training rows.
    reference : Posterior, optional
        The reference of a posterior, for the same model and data.
    of : str
        "mean" or "spread".
    block : str, optional
        "MODEL on DATA" in the result of a grid that has several.
    region : str, optional
        A region of a grade that has several; by default the first.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    UnsupportedError
        A result without a reference, or without a spread.
    InputError, UnknownNameError
        Another type, a missing reference, a reference for other data, a choice that does not exist.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> data, model = (table.x, table.y), bnn.zoo.load("linear_regression")
    >>> laplace = bnn.fit(model, *data, bnn.Laplace(), standardise=True)
    >>> mode = bnn.fit(model, *data, bnn.MAP(), standardise=True)
    >>> bnn.plot.gap(mode, reference=laplace).get_title()
    'MAP against Laplace: predictive mean, 300 rows'
    """
    place = place_of(of, ("mean", "spread"))
    if isinstance(result, Posterior):
        return _of_posteriors(result, reference, x, place, ax)
    odd = x is not None or reference is not None
    InputError.check(not odd, "gap", "no x and no reference but for a posterior", "some", "gap(result)")
    if isinstance(result, Grade):
        regions = list(result.errors)
        name = chosen("region", regions[0] if region is None else region, regions)
        canvas, draw = Canvas.of(ax), (draw_means, draw_spreads)[place]
        draw(canvas.axes, result, name)
        label = ("error of the mean (reference sd)", "sd / reference sd")[place]
        finish(canvas.axes, "first input", label)
        return canvas.finished(f"Against {result.reference}: {name}", {})
    found, doubts = block_of(result, block, "gap")
    panel = panel_of(pictures.gap(found), place, "gap")
    canvas = Canvas.of(ax, panel.height + 1.5)
    panel.draw(canvas.axes)
    what = ("mean function", "spread")[place]
    return canvas.finished(f"Gap to {found.reference}: {what}", doubts)


def _of_posteriors(posterior: Posterior, reference: Any, x: Any, place: int, ax: Any) -> Axes:
    expected, advice = "another Posterior as reference", "reference=bnn.fit(model, x, y, bnn.NUTS())"
    InputError.check(
        isinstance(reference, Posterior), "reference", expected, type(reference).__name__, advice
    )
    same = posterior.info.data_hash == reference.info.data_hash
    InputError.check(
        same, "reference", "a reference fitted to the same data", "other data", "the same x and y"
    )
    if x is None:
        x = posterior.original_inputs
        rows = evenly_spaced(row_count(x), MOST_POINTS)
        if not posterior.with_problem(lambda problem: problem.program.coupled):
            x = {k: v[rows] for k, v in x.items()} if isinstance(x, dict) else x[rows]
    ours, theirs = (each.predict(x) for each in (posterior, reference))
    rows = theirs.rows
    names = [each.info.method for each in (posterior, reference)]
    label = ("predictive mean", "epistemic standard deviation")[place]
    if place:
        UnsupportedError.check(
            reference.kind != "point", "gap", "a reference with a spread", names[1], "of='mean'"
        )
        values = [np.ravel(np.sqrt(each.mean_function_variance)) for each in (theirs, ours)]
        spread = np.zeros(0)
    else:
        values = [np.ravel(each.mean) for each in (theirs, ours)]
        # A mutual information within components has no variance.
        known = theirs.epistemic_within is None or not theirs.is_classes
        spread = np.ravel(np.sqrt(theirs.mean_function_variance)) if known else np.zeros(0)
        label = "probability" if theirs.is_classes else label
    canvas, probabilities = Canvas.of(ax), theirs.is_classes and not place
    draw_against(canvas.axes, values[0], values[1], spread, probabilities, "a row")
    finish(canvas.axes, f"{label}, {names[1]}", f"{label}, {names[0]}")
    doubts = {name: doubt_of(each) for name, each in zip(names, (posterior, reference), strict=True)}
    return canvas.finished(f"{names[0]} against {names[1]}: {label}, {rows} rows", doubts)


def compare(
    result: Comparison | GridResult, score: str = SCORE, *, block: str | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the differences of methods to the best one, paired over test rows or splits, with two standard errors.

    Parameters
    ----------
    result : Comparison or GridResult
        The methods.
    score : str
        "log_score", per test row, or "elpd_loo", leave-one-out over the training rows; in nats. Below zero is worse.
    block : str, optional
        "MODEL on DATA" in the result of a grid that has several.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    UnsupportedError
        Fewer than two methods with the score.
    InputError, UnknownNameError
        Another type, or a score or a block that does not exist.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> train, test = table.split(seed=0)
    >>> rows = [(table.x[part], table.y[part]) for part in (train, test)]
    >>> model, methods = bnn.zoo.load("linear_regression"), {"laplace": bnn.Laplace(), "map": bnn.MAP()}
    >>> result = bnn.compare(model, *rows, methods, reference="laplace", standardise=True)
    >>> bnn.plot.compare(result).get_title()
    'Difference to the best: log score'
    """
    check_known("score", [score], (SCORE, ELPD))
    found, doubts = block_of(result, block, "compare")
    panel = panel_of(pictures.differences(found, (score,)), 0, "compare")
    canvas = Canvas.of(ax, panel.height + 1.5)
    panel.draw(canvas.axes)
    what = "log score" if score == SCORE else "leave-one-out"
    return canvas.finished(f"Difference to the best: {what}", doubts)
