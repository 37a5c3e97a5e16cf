"""Plots of one fit: its predictions, its prior, its chains, its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ppl_bnn.core.arrays import row_count
from ppl_bnn.core.checks import check_targets, label_codes
from ppl_bnn.core.errors import InputError, UnsupportedError, check_known
from ppl_bnn.core.names import for_figure
from ppl_bnn.evaluation.comparison import drawing, figures
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.posterior.convergence import evenly_spaced
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction.arguments import checked_levels
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.reporting.figures import chains
from ppl_bnn.reporting.figures import prior as prior_figures
from ppl_bnn.reporting.figures.dependence import (
    Dependence,
    dependence,
    draw_dependence,
    draw_rug,
    places_along,
)
from ppl_bnn.reporting.figures.panels import finish
from ppl_bnn.reporting.plot.subject import Canvas, doubt_of, fit_of, one_note, place_of

FUNCTION, LOG_LIKELIHOOD = "function", "log likelihood"
# Chains up to which each has a name in the legend.
NAMED_CHAINS = 8


# --- predictions ------------------------------------------------------------------------------------------


def predictive(
    posterior: Posterior,
    x: Any = None,
    y: Any = None,
    *,
    feature: int | str | None = None,
    output: int | str | None = None,
    level: float = 0.9,
    rows: int = 100,
    ax: Axes | None = None,
) -> Axes:
    """Plot the posterior predictive over an input.

    With a single input and one number as target: the mean, a band of the mean function (inner) and one of observations
    (outer). With several inputs: partial dependence, the mean function over one input, averaged over the others as they
    occur in the rows,

        g_s(v) = 1 / N sum_n E[y | x_n with x_nj = v, w_s],

    its mean over draws s and its band, which has no observation noise. With two inputs and classes, unless `feature` is
    given: a map of class probabilities.

    Parameters
    ----------
    posterior : Posterior
        The fit.
    x : array, optional
        Rows (N, F), in the units of the data. By default those of the training.
    y : array, optional
        Observed targets of these rows, drawn as points over a single input and in a map.
    feature : int or str, optional
        Number or name of the input. By default the first.
    output : int or str, optional
        Number of an output, or number or name of a class. By default all; of two classes the second.
    level : float
        Probability of the bands.
    rows : int
        Largest number of rows that partial dependence averages over.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    InputError, UnknownNameError
        Another type, inputs of another shape, an unknown feature or output.
    UnsupportedError
        Inputs that are no table, or rows that interact.

    References
    ----------
    Friedman (2001), Greedy function approximation: a gradient boosting machine, Annals of Statistics 29, section 8.2.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> model = bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.Laplace(), standardise=True)
    >>> bnn.plot.predictive(posterior, feature=2).get_xlabel()
    'x[2]'
    """
    _check_posterior(posterior, "predictive")
    checked_levels("level", level, "level=0.9")
    InputError.check(rows >= 1, "rows", "a positive number", repr(rows), "rows=100")
    x, y = _rows(posterior, x, y)
    table = isinstance(x, np.ndarray) and x.ndim == 2
    got = f"shape {x.shape}" if isinstance(x, np.ndarray) else "a dict"
    UnsupportedError.check(table, "predictive", "inputs of shape (N, features)", got, "posterior.predict(x)")
    coupled = posterior.with_problem(lambda problem: problem.program.coupled)
    expected, advice = "rows that do not depend on each other", "posterior.predict(x)"
    UnsupportedError.check(not coupled, "predictive", expected, "rows that interact", advice)
    unnamed = [f"x[{j}]" for j in range(x.shape[1])] if x.shape[1] > 1 else ["x"]
    names = list(posterior.feature_names or unnamed)
    column = _number_of("feature", 0 if feature is None else feature, names)
    one = figures.predicted(posterior, x[:1], 0)
    name = posterior.info.method
    canvas, single = Canvas.of(ax), x.shape[1] == 1
    if feature is None and one.is_classes and x.shape[1] == 2:
        _draw_map(canvas.axes, posterior, x, y, names)
        return canvas.finished(f"{name}: most probable class", one_note(name, doubt_of(posterior)))
    if single and not one.is_classes and len(one.shape) == 1 and output is None:
        grid = drawing.drawn_along(x[:, 0])
        made = figures.predicted(posterior, grid[:, None], 0)
        drawing.draw_curve(canvas.axes, grid, made, level)
        title, label = f"Prediction by {name}", _target_of(posterior)
    else:
        at = drawing.drawn_along(x[:, 0]) if single and x.dtype.kind == "f" else places_along(x[:, column])
        found = dependence(posterior, x, column, at, rows)
        outputs = _outputs_of(one, found, output)
        draw_dependence(canvas.axes, found, outputs, level)
        title = f"Prediction by {name}" if single else f"{name}: partial dependence on {names[column]}"
        label = _label_of(posterior, one, outputs) + ("" if single else f", over {found.rows} rows")
    of_one = np.ndim(y) == 1 + one.censored and (not one.is_classes or one.classes == 2)
    if single and y is not None and of_one:
        drawing.draw_targets(canvas.axes, x[:, 0], np.asarray(y), one.censored, "observed")
    else:
        draw_rug(canvas.axes, x[:, column])
    finish(canvas.axes, for_figure(names[column]), for_figure(label))
    return canvas.finished(title, one_note(name, doubt_of(posterior)))


def _draw_map(axes: Axes, posterior: Posterior, x: np.ndarray, y: Any, names: list[str]) -> None:
    across, up = drawing.drawn_over(x)
    made = figures.predicted(posterior, drawing.grid_points(across, up), 0)
    drawing.draw_class_map(axes, across, up, made)
    if y is not None:
        shown = drawing.evenly(np.arange(len(y), dtype=np.float64))
        drawing.draw_classes(axes, x[shown], y[shown], drawing.class_names(made), size=3.2)
    axes.set_xlabel(for_figure(names[0]), fontsize=8.5)
    axes.set_ylabel(for_figure(names[1]), fontsize=8.5)
    axes.tick_params(labelsize=8)


def _outputs_of(one: Prediction, found: Dependence, output: int | str | None) -> dict[str, int]:
    """Label -> number of the outputs to draw among those of the means."""
    count = found.means.shape[2]
    if one.is_classes and count == 1:
        # Of two classes there is one probability, that of the second.
        names = list(drawing.class_names(one))
        which = 1 if output is None else _number_of("output", output, names)
        InputError.check(which == 1, "output", f"{names[1]!r} or 1 of two classes", repr(output), "output=1")
        return {names[1]: 0}
    names = list(drawing.class_names(one)) if one.is_classes else [f"output {k}" for k in range(count)]
    every = range(count) if output is None else [_number_of("output", output, names)]
    return {names[k]: k for k in every}


def _label_of(posterior: Posterior, one: Prediction, outputs: Mapping[str, int]) -> str:
    only = next(iter(outputs)) if len(outputs) == 1 else ""
    if one.is_classes:
        return f"probability of {only}" if only else "probability"
    several = f", {only}" if only and len(one.shape) == 2 else ""
    return f"mean of {_target_of(posterior)}{several}"


def _number_of(what: str, given: int | str, names: list[str]) -> int:
    """The number of a feature or an output that is given by its number or its name."""
    if isinstance(given, str):
        check_known(what, [given], names)
        return names.index(given)
    good = isinstance(given, int | np.integer) and not isinstance(given, bool) and 0 <= given < len(names)
    InputError.check(good, what, f"a number from 0 to {len(names) - 1}, or a name", repr(given), f"{what}=0")
    return int(given)


def _target_of(posterior: Posterior) -> str:
    return posterior.observed or "y"


def _rows(posterior: Posterior, x: Any, y: Any) -> tuple[Any, Any]:
    """Rows and their targets, by default those of the training; labels as numbers of classes."""
    if x is None:
        InputError.check(y is None, "y", "x with y", "y alone", "both x and y, or neither")
        return posterior.original_inputs, posterior.original_targets
    checked = posterior.fit_inputs(x)
    if y is not None:
        y = np.asarray(y) if posterior.labels is None else label_codes(np.asarray(y), posterior.labels)
        y = check_targets(y, row_count(checked), column=posterior.targets.ndim == 2)
    return (x if isinstance(x, Mapping) else np.asarray(x)), y


def _check_posterior(posterior: Any, where: str) -> None:
    got = type(posterior).__name__
    advice = (
        f"bnn.plot.{where}(result.posteriors[name])" if isinstance(posterior, Comparison) else "bnn.fit(...)"
    )
    InputError.check(isinstance(posterior, Posterior), where, "a Posterior", got, advice)


def prior_predictive(
    prior: Posterior, x: Any = None, y: Any = None, *, target_name: str = "y", ax: Axes | None = None
) -> Axes:
    """Plot what a prior expects beside the observed targets.

    With a single input and numbers: mean functions of some draws in the 90 % band of observations. With other inputs
    and numbers: central intervals of 90 % and 50 % of each row. Of classes: how certain single draws are, which shows
    a prior that has decided before it has seen a label.

    Parameters
    ----------
    prior : Posterior
        The result of `bnn.prior_predictive`.
    x, y : array, optional
        Rows and their observed targets, in the units of the data. By default those that the prior was drawn for.
    target_name : str
        Name of the target, with its unit.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    InputError
        A posterior, which is no prior; x without y.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> prior = bnn.prior_predictive(bnn.zoo.load("linear_regression"), table.x, table.y, standardise=True)
    >>> bnn.plot.prior_predictive(prior, target_name="progression").get_ylabel()
    'progression'
    """
    _check_posterior(prior, "prior_predictive")
    expected, advice = "the result of bnn.prior_predictive", "bnn.plot.predictive(posterior)"
    InputError.check(prior.info.target == "the prior", "prior_predictive", expected, repr(prior), advice)
    both = (x is None) == (y is None)
    InputError.check(both, "prior_predictive", "both x and y, or neither", "one of them", "x=x, y=y")
    x, y = _rows(prior, x, y)
    canvas, target, first = Canvas.of(ax), for_figure(target_name), prior.predict(x)
    if first.is_classes:
        prior_figures.draw_certainty(canvas.axes, first)
    elif drawing.single_input(x) and len(first.shape) == 1 and not first.censored:
        name = (prior.feature_names or ("x",))[0]
        prior_figures.draw_prior_curves(canvas.axes, prior.predict, x, y, for_figure(name), target)
    else:
        prior_figures.draw_prior_rows(canvas.axes, first, y, target)
    axes = canvas.axes
    finish(axes, axes.get_xlabel(), axes.get_ylabel())
    return canvas.finished("What the prior expects", {})


# --- chains -----------------------------------------------------------------------------------------------


def trace(
    result: Posterior | Comparison,
    x: Any = None,
    *,
    of: str = FUNCTION,
    row: int | None = None,
    method: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot chains over their draws in function space, where exchanged or mirrored units make no difference.

    Parameters
    ----------
    result : Posterior or Comparison
        Chains; of a comparison those of `method`, at its test rows.
    x : array, optional
        Rows, in the units of the data. By default up to 100 training rows.
    of : str
        "function": the mean of a row, draw by draw, in the units of the data, or the probability of its class (of the
        most probable one where no labels are known). "log likelihood": that of all training rows, in nats.
    row : int, optional
        Number of the row. By default the one with the largest R-hat among up to 100 of the rows.
    method : str, optional
        A method of a comparison.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    UnsupportedError
        No chains, whose draws follow each other; functions that do not vary.
    InputError, UnknownNameError
        Another type, or a row or a choice that does not exist.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> nuts = bnn.NUTS(chains=2, warmup=100, draws=100)
    >>> posterior = bnn.fit(bnn.zoo.load("linear_regression"), table.x, table.y, nuts, standardise=True)
    >>> len(bnn.plot.trace(posterior, of="log likelihood").lines)
    2
    """
    fit, values, label = _chains_of(result, x, of, row, method, "trace", 1)
    canvas = Canvas.of(ax)
    chains.draw_traces(canvas.axes, values, label)
    if len(values) > NAMED_CHAINS:
        for line in canvas.axes.lines:
            line.set_label("_")
    return canvas.finished(f"{fit.name}: trace of the {of}", one_note(fit.name, fit.doubt))


def ranks(
    result: Posterior | Comparison,
    x: Any = None,
    *,
    of: str = FUNCTION,
    row: int | None = None,
    method: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the distribution of the ranks of each chain among the draws of all, minus the uniform one.

    Draws are thinned until they are nearly independent. Chains that agree stay inside the band in 99 % of cases.

    Parameters
    ----------
    result : Posterior or Comparison
        As for `trace`.
    x, of, row, method : optional
        As for `trace`.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    UnsupportedError
        Fewer than two chains, or functions that do not vary.
    InputError, UnknownNameError
        Another type, or a row or a choice that does not exist.

    References
    ----------
    Säilynoja, Bürkner and Vehtari (2022), Graphical test for discrete uniformity and its applications in goodness of
    fit evaluation and multiple sample comparison, Statistics and Computing 32.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> nuts = bnn.NUTS(chains=2, warmup=100, draws=100)
    >>> posterior = bnn.fit(bnn.zoo.load("linear_regression"), table.x, table.y, nuts, standardise=True)
    >>> bnn.plot.ranks(posterior, of="log likelihood").get_title()
    'NUTS: ranks of the log likelihood'
    """
    fit, values, label = _chains_of(result, x, of, row, method, "ranks", 2)
    canvas = Canvas.of(ax)
    chains.draw_ranks(canvas.axes, chains.rank_curves(values))
    what = label.partition(",")[0] if of == FUNCTION else f"the {of}"
    return canvas.finished(f"{fit.name}: ranks of {what}", one_note(fit.name, fit.doubt))


def _chains_of(
    result: Any, x: Any, of: str, row: int | None, method: str | None, where: str, fewest: int
) -> tuple[Any, np.ndarray, str]:
    """A fit, the values (chain, draw) of what is drawn, and its label."""
    place_of(of, (FUNCTION, LOG_LIKELIHOOD))
    fit = fit_of(result, method, where)
    got = f"{fit.name}, of kind {fit.kind!r}"
    UnsupportedError.check(fit.kind == "chains", where, "chains", got, "bnn.NUTS() or another sampler")
    expected = f"at least {fewest} chains"
    UnsupportedError.check(fit.shape[0] >= fewest, where, expected, fit.shape[0], "bnn.NUTS(chains=4)")
    if of == LOG_LIKELIHOOD:
        InputError.check(
            x is None and row is None, where, f"no x and no row of the {of}", "some", "of='function'"
        )
        if isinstance(result, Posterior):
            return fit, result.log_likelihood().sum(axis=-1), "log likelihood, nats"
        found = chains.variables(chains.function_draws(result, fit.name))
        UnsupportedError.check(of in found, where, "draws of the log likelihood", "none", "of='function'")
        return fit, found["log_likelihood"], "log likelihood, nats"
    values, at, label = _functions_of(result, fit, x, row)
    if row is None:
        place = chains.worst_row(values)
        place = int(np.argmax(np.ptp(values, axis=(0, 1)))) if place is None else place
        row = int(at[place])
    good = isinstance(row, int | np.integer) and row in at
    InputError.check(good, "row", f"a row from 0 to {at[-1]}", repr(row), "row=None")
    drawn = values[..., int(np.flatnonzero(at == row)[0])]
    varies = drawn.max() > drawn.min()
    UnsupportedError.check(varies, where, "a function that varies", f"one value at row {row}", "another row")
    return fit, drawn, f"{label} of row {row}"


def _functions_of(result: Any, fit: Any, x: Any, row: int | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Mean functions (chain, draw, n), the numbers of their rows, and what they are."""
    y = None
    if isinstance(result, Comparison):
        InputError.check(x is None, "x", "None: the test rows of the comparison", "rows", "a Posterior")
        prediction, y = result.predictions[fit.name], result.test_targets
    else:
        if x is None:
            x, y = result.original_inputs, result.targets
        prediction = result.predict(x)
    every, draws = np.arange(prediction.rows), math.prod(fit.shape)
    whole = prediction.draws == draws
    InputError.check(
        whole, "trace", f"a prediction by {draws} draws", repr(prediction), "of='log likelihood'"
    )
    classes = prediction.is_classes
    labels = prediction.probabilities.argmax(axis=1) if classes and y is None else y
    values = chains.functions_of(prediction, labels, fit.shape)
    outputs = values.shape[-1] // len(every)
    at = evenly_spaced(len(every), chains.ROWS_RANKED) if row is None else every
    # Of several outputs the first is drawn.
    chosen = values[..., at * outputs]
    what = (
        f"probability of the {'most probable' if y is None else 'observed'} class"
        if classes
        else "mean function"
    )
    return chosen, at, what


# --- losses -----------------------------------------------------------------------------------------------


def loss(result: Posterior | Comparison, *, method: str | None = None, ax: Axes | None = None) -> Axes:
    """Plot the loss over the steps of an optimiser, in nats: means over short stretches with their range.

    The axis shows all losses after the first tenth of the steps; earlier ones may be above it.

    Parameters
    ----------
    result : Posterior or Comparison
        A fit by optimisation; of a comparison that by `method`.
    method : str, optional
        A method of a comparison.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, drawn on.

    Raises
    ------
    UnsupportedError
        A fit without a loss curve, such as chains.
    InputError, UnknownNameError
        Another type, or a method that the comparison does not have.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> model = bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.SVI(steps=300), standardise=True)
    >>> bnn.plot.loss(posterior).get_ylabel()
    'loss, nats'
    """
    fit = fit_of(result, method, "loss")
    curves = chains.loss_curves(fit.info.history)
    expected, advice = "a fit with a loss curve", "SVI() or MAP()"
    UnsupportedError.check(curves.size, "loss", expected, f"{fit.name}, which has none", advice)
    canvas = Canvas.of(ax)
    chains.draw_losses(canvas.axes, chains.binned_losses(curves))
    members = f", {curves.shape[1]} members" if curves.shape[1] > 1 else ""
    return canvas.finished(f"Loss of {fit.name}{members}", one_note(fit.name, fit.doubt))
