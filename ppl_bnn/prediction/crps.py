"""The continuous ranked probability score and the energy score of mixtures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.prediction.arguments import checked_numbers
from ppl_bnn.prediction.families import LOG_2PI
from ppl_bnn.prediction.isotonic import MappedPrediction
from ppl_bnn.prediction.prediction import BLOCK, Prediction

# Component quantiles at this level enclose all of the mixture's probability except a billionth.
_TAIL = 1e-9
# Relative accuracy of the integrals of distribution functions.
_ACCURACY = 1e-5
# Step of the trapezium rule in standard deviations of the narrowest of the normals mixed: the rule's error is
# about exp(-(pi / step)^2), as F (1 - F) has a Fourier transform that falls off as that of a normal.
_STEP = 0.8


def crps(prediction: Prediction, y: Any, pointwise: bool = False) -> float | np.ndarray:
    """Continuous ranked probability score, mean over rows and outputs. Lower is better.

        CRPS = integral (F(t) - 1{y <= t})^2 dt = E|Y - y| - E|Y - Y'| / 2.

    All S components of the mixture are used.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y : array_like
        Observed values, of the shape of the prediction.
    pointwise : bool, default False
        Whether to return one score per row and output.

    Returns
    -------
    float or ndarray
        Units of y; (N,) or (N, K) with `pointwise`.

    Raises
    ------
    UnsupportedError
        For classes, and for StudentT with df <= 1.

    Notes
    -----
    E|Y - y| has a closed form, O(S). E|Y - Y'| = 2 integral F (1 - F) dt is integrated by the trapezium rule to a
    relative change below 1e-5, or summed in closed form over all pairs of normal components where that is cheaper. For
    counts the integral is a sum over the integers.

    References
    ----------
    Gneiting and Raftery 2007, JASA 102, 359-378.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> round(bnn.scores.crps(prediction, [0.0, 2.0]), 3)
    0.418
    """
    deviation = prediction.absolute_deviation(prediction.observed_values(y) if prediction.censored else y)
    values = deviation - 0.5 * mean_difference(prediction)
    return values if pointwise else float(values.mean())


def mean_difference(prediction: Prediction) -> np.ndarray:
    """E|Y - Y'| for independent Y, Y' of the same mixture (Gini's mean difference).

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.

    Returns
    -------
    ndarray
        Shape (N,) or (N, K), units of y.
    """
    if isinstance(prediction, MappedPrediction):
        return prediction.mean_difference
    integral = _count_mean_difference if prediction.is_counts else _continuous_mean_difference
    return integral(prediction.marginals()).reshape(prediction.shape)


def energy_score(
    prediction: Prediction, y: Any, pointwise: bool = False, *, draws: int = 2000, seed: int = 0
) -> float | np.ndarray:
    """Energy score of rows of K outputs, E||Y - y|| - E||Y - Y'|| / 2 in the Euclidean norm. Lower is better.

    CRPS is the case K = 1. The score depends on the dependence between outputs. Outputs count in proportion to their
    size: bring them to one unit first (`prediction.rescale`).

    Parameters
    ----------
    prediction : Prediction
        A prediction of several outputs.
    y : array_like
        Observed values (N, K).
    pointwise : bool, default False
        Whether to return one score per row.
    draws : int, default 2000
        Number of independent draws of the mixture, at least 2.
    seed : int, default 0
        Seed of the draws.

    Returns
    -------
    float or ndarray
        Mean over rows, or (N,) with `pointwise`.

    Raises
    ------
    UnsupportedError
        For one output, where `crps` has no sampling error.
    InputError
        For fewer than 2 draws.

    Notes
    -----
    Computed by scoringrules. E||Y - Y'|| is estimated from pairs of consecutive draws, without bias and with an error
    of order 1 / sqrt(draws).

    References
    ----------
    Gneiting and Raftery 2007, JASA 102, 359-378, section 4.3.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> two = bnn.Prediction("Normal", {"loc": np.zeros((1, 5, 2)), "scale": np.ones((1, 5, 2))})
    >>> bnn.scores.energy_score(two, np.zeros((5, 2)), pointwise=True).shape
    (5,)
    """
    good = not prediction.is_classes and len(prediction.shape) == 2
    advice = "brier" if prediction.is_classes else "crps, which is the energy score of one output"
    UnsupportedError.check(good, "energy_score", "several outputs", repr(prediction), advice)
    InputError.check(draws >= 2, "draws", "at least 2, to have a pair", repr(draws), "draws=2000")
    y = checked_numbers(prediction, y)
    import scoringrules

    rng = np.random.default_rng(seed)
    values = np.empty(prediction.rows)
    step = max(1, 8 * BLOCK // (draws * prediction.shape[1]))
    for begin in range(0, prediction.rows, step):
        rows = slice(begin, begin + step)
        sample = np.swapaxes(prediction.take(rows).sample(draws, rng), 0, 1)
        values[rows] = scoringrules.es_ensemble(y[rows], sample, estimator="akr", backend="numpy")
    return values if pointwise else float(values.mean())


def row_cdf(prediction: Prediction, row: int, nodes: np.ndarray) -> np.ndarray:
    """Distribution function of one row at several nodes."""
    return prediction.take([row]).cdf(nodes[:, None])[:, 0]


def _count_mean_difference(prediction: Prediction) -> np.ndarray:
    low, high = prediction.quantile([_TAIL, 1.0 - _TAIL])
    each = (row_cdf(prediction, row, np.arange(low[row], high[row] + 1.0)) for row in range(prediction.rows))
    return np.array([2.0 * np.sum(distribution * (1.0 - distribution)) for distribution in each])


def _support(prediction: Prediction) -> tuple[np.ndarray, np.ndarray]:
    """Ends, per row, that leave at most a billionth of any component's probability outside."""
    law = prediction.law()
    return law.quantile_range(_TAIL)[0], law.quantile_range(1.0 - _TAIL)[1]


def _continuous_mean_difference(prediction: Prediction) -> np.ndarray:
    low, high = _support(prediction)
    panels = np.ceil((high - low) / (_STEP * np.median(prediction.parameters["scale"], axis=0)))
    # Rows that need about the same number of nodes are integrated together.
    order = np.argsort(panels)
    result = np.empty(prediction.rows)
    for begin in range(0, len(order), 64):
        rows = order[begin : begin + 64]
        result[rows] = _integrated_mean_difference(prediction.take(rows), int(panels[rows].max()))
    return result


def _integrated_mean_difference(prediction: Prediction, panels: int) -> np.ndarray:
    """2 integral F (1 - F) dt; the panels are doubled until the trapezium rule has converged in every row."""
    low, high = _support(prediction)
    scale, centre = prediction.parameters["scale"], prediction.mean
    unit, normal = np.median(scale, axis=0), prediction.family == "Normal"
    # A change of variable: the node at which F is evaluated, and its derivative.
    node, slope, start, end = (lambda t: t), np.ones_like, low, high
    if prediction.family == "StudentT":  # steps that grow with the distance from the centre
        start, end = np.arcsinh((low - centre) / unit), np.arcsinh((high - centre) / unit)
        node, slope = (lambda t: centre + unit * np.sinh(t)), (lambda t: unit * np.cosh(t))
        panels = int(np.ceil((end - start).max() / 0.25))
    elif prediction.family == "Weibull":
        # Steps of the logarithm, on which all Weibull distributions are of one form, 1 / k wide.
        start, end = np.log(np.maximum(low, np.finfo(np.float64).tiny)), np.log(high)
        node, slope = np.exp, np.exp
        concentration = np.median(prediction.parameters["concentration"], axis=0)
        panels = int(np.ceil(((end - start) * concentration).max() / 0.25))
    # At this step the error for the narrowest component of a normal mixture is known to be small.
    enough = ((high - low) / (_STEP * scale.min(axis=0))).max() if normal else math.inf
    limit = 2 * prediction.draws if normal else 1 << 17

    def total(at: np.ndarray) -> np.ndarray:
        t = start + (end - start) * at[:, None]
        distribution = prediction.cdf(node(t))
        return (distribution * (1.0 - distribution) * slope(t)).sum(axis=0)

    if normal and panels >= prediction.draws:
        return _normal_mean_difference(prediction)
    area = (0.5 * total(np.array([0.0, 1.0])) + total(np.arange(1, panels) / panels)) / panels
    converged = np.full(prediction.rows, panels >= enough)
    while not converged.all():
        refined = 0.5 * (area + total((np.arange(panels) + 0.5) / panels) / panels)
        panels *= 2
        converged = (np.abs(refined - area) <= _ACCURACY * refined) | (panels >= enough)
        area = refined
        if panels >= limit and not converged.all():
            expected = "components of similar scales to integrate F (1 - F)"
            UnsupportedError.check(normal, "", expected, f"no convergence at {panels} nodes", "log_score")
            break
    # The parts beyond the ends are E(low - Y)+ and E(Y - high)+, in closed form.
    below = 0.5 * (prediction.absolute_deviation(low) + low - centre)
    above = 0.5 * (prediction.absolute_deviation(high) - high + centre)
    result = 2.0 * (area * (end - start) + below + above)
    if not converged.all():
        result[~converged] = _normal_mean_difference(prediction.take(~converged))
    return result


def _normal_mean_difference(prediction: Prediction) -> np.ndarray:
    """sum_ij w_i w_j E|N(m_i - m_j, s_i^2 + s_j^2)|, each pair of components once."""
    result = np.zeros(prediction.rows)
    step = max(1, BLOCK // prediction.draws)
    for row in range(prediction.rows):
        loc, scale = prediction.parameters["loc"][:, row], prediction.parameters["scale"][:, row]
        weights = prediction.weights[:, row] if prediction.weights.ndim == 2 else prediction.weights
        for begin in range(0, prediction.draws, step):
            block, rest = slice(begin, begin + step), slice(begin, None)
            deviation = np.hypot(scale[block, None], scale[rest])
            z = (loc[block, None] - loc[rest]) / deviation
            density = np.exp(-0.5 * (z * z + LOG_2PI))
            values = deviation * (z * (2.0 * scipy.special.ndtr(z) - 1.0) + 2.0 * density)
            values[:, step:] *= 2.0
            result[row] += weights[block] @ values @ weights[rest]
    return result
