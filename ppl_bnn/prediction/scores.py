"""Scores of predictions: proper scores, calibration, use of the uncertainty, distance to a reference.

Most functions take a `Prediction` and the observed y, of the prediction's `shape`, and return a number (or, with
`pointwise=True`, one per row). Larger is better only for log_score, accuracy, concordance_index, and the two areas of
`out_of_distribution`.

Where rows may be censored y is (N, 2), values and events, which log_score and concordance_index take. Errors, CRPS,
PIT and coverage are refused if any row is censored: over the observed rows alone they favour short predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import scipy

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.prediction import arguments
from ppl_bnn.prediction.crps import crps as crps
from ppl_bnn.prediction.crps import energy_score as energy_score
from ppl_bnn.prediction.crps import mean_difference as mean_difference
from ppl_bnn.prediction.fidelity import fidelity as fidelity
from ppl_bnn.prediction.fidelity import halves as halves
from ppl_bnn.prediction.fidelity import mean_function_gap as mean_function_gap
from ppl_bnn.prediction.fidelity import noise_floor as noise_floor
from ppl_bnn.prediction.fidelity import wasserstein as wasserstein
from ppl_bnn.prediction.isotonic import MappedPrediction
from ppl_bnn.prediction.prediction import BLOCK, Prediction
from ppl_bnn.prediction.uncertainty import MEASURES as MEASURES
from ppl_bnn.prediction.uncertainty import out_of_distribution as out_of_distribution
from ppl_bnn.prediction.uncertainty import selective as selective
from ppl_bnn.prediction.uncertainty import uncertainty as uncertainty

__all__ = [
    "accuracy", "brier", "concordance_index", "coverage", "coverages", "crps", "energy_score",
    "expected_calibration_error", "fidelity", "interval_width", "log_score", "mean_absolute_error",
    "noise_floor", "out_of_distribution", "paired_difference", "pit", "pit_uniformity", "reliability", "rmse",
    "scores_of", "selective", "uncertainty", "wasserstein",
]  # fmt: skip

# --- proper scores ----------------------------------------------------------------------------------------


def log_score(prediction: Prediction, y: Any, pointwise: bool = False) -> float | np.ndarray:
    """Mean over rows of log p(y_n), the log density (or mass) of the mixture. Larger is better.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    y : array_like
        Targets as in `Prediction.log_prob`.
    pointwise : bool, default False
        Whether to return one score per row.

    Returns
    -------
    float or ndarray
        Nats per row, or (N,) with `pointwise`. K outputs are scored jointly.

    References
    ----------
    Good 1952, JRSS B 14, 107-114.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> round(bnn.scores.log_score(prediction, [0.0, 2.0]), 4)
    -1.1689
    """
    values = prediction.log_prob(y)
    return values if pointwise else _mean(values)


def brier(prediction: Prediction, y: Any, pointwise: bool = False) -> float | np.ndarray:
    """Brier score: mean over rows of sum_c (P_c - 1{y = c})^2 over ALL classes. Lower is better.

    Parameters
    ----------
    prediction : Prediction
        A prediction of classes.
    y : array_like
        Labels (N,).
    pointwise : bool, default False
        Whether to return one score per row.

    Returns
    -------
    float or ndarray
        From 0 to 2, or (N,) with `pointwise`.

    Notes
    -----
    With two classes this is twice (P_1 - y)^2, the form that some libraries give for binary labels.

    References
    ----------
    Brier 1950.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Bernoulli", {"probs": np.array([[0.2, 0.9, 0.6]])})
    >>> round(bnn.scores.brier(prediction, [0, 1, 0]), 4)
    0.2733
    """
    probabilities = prediction.probabilities
    indicator = arguments.checked_labels(prediction, y)[:, None] == np.arange(prediction.classes)
    values = np.sum((probabilities - indicator) ** 2, axis=1)
    return values if pointwise else _mean(values)


# --- errors of point predictions --------------------------------------------------------------------------


def rmse(prediction: Prediction, y: Any) -> float:
    """Root mean square of mean - y over rows and outputs, in units of y.

    The predictive mean is the optimal point prediction for this error.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y : array_like
        Observed values.

    Returns
    -------
    float
        Units of y.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> round(bnn.scores.rmse(prediction, [0.0, 2.0]), 4)
    0.7071
    """
    return float(np.sqrt(np.mean((prediction.mean - arguments.checked_numbers(prediction, y)) ** 2)))


def mean_absolute_error(prediction: Prediction, y: Any) -> float:
    """Mean of ``|median - y|`` over rows and outputs, in units of y.

    The predictive median, not the mean, is the optimal point prediction for this error.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y : array_like
        Observed values.

    Returns
    -------
    float
        Units of y.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> round(bnn.scores.mean_absolute_error(prediction, [0.0, 2.0]), 4)
    0.5
    """
    return float(np.mean(np.abs(prediction.quantile(0.5) - arguments.checked_numbers(prediction, y))))


def accuracy(prediction: Prediction, y: Any) -> float:
    """Share of rows in which the most probable class (the first, on a tie) is the label.

    Parameters
    ----------
    prediction : Prediction
        A prediction of classes.
    y : array_like
        Labels (N,).

    Returns
    -------
    float
        Between 0 and 1.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Bernoulli", {"probs": np.array([[0.2, 0.9, 0.6]])})
    >>> round(bnn.scores.accuracy(prediction, [0, 1, 0]), 4)
    0.6667
    """
    return float(np.mean(prediction.probabilities.argmax(axis=1) == arguments.checked_labels(prediction, y)))


def concordance_index(prediction: Prediction, y: Any) -> float:
    """Share of the pairs of rows of known order that the prediction puts in that order.

    The order of two rows is known where one is certain to be the smaller: v_i < v_j where both were observed, and
    v_i <= v_j where i is observed or left-censored, j observed or right-censored, and not both observed. The prediction
    orders rows by their medians. A pair with equal medians counts one half. The cost is O(N^2).

    Parameters
    ----------
    prediction : Prediction
        A prediction of one number per row.
    y : array_like
        (N, 2), values and events, where rows may be censored, else (N,).

    Returns
    -------
    float
        1/2 for a prediction without information, 1 if all pairs are in order.

    Raises
    ------
    UnsupportedError
        For classes, for several outputs, and if no pair has a known order.

    Notes
    -----
    The index looks only at the order, and at the pairs of known order, which depend on the censoring. `log_score` is
    the proper score.

    References
    ----------
    Harrell et al. 1982, JAMA 247, 2543-2546.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> bnn.scores.concordance_index(prediction, [0.0, 2.0])
    1.0
    """
    arguments.check_numbers(prediction, "concordance_index")
    if len(prediction.shape) != 1:
        raise UnsupportedError.of("concordance_index", "one number per row", repr(prediction), "one output")
    if prediction.censored and np.ndim(y) == 2:
        value, event = arguments.checked_targets(prediction, y).T
    else:
        value, event = arguments.checked_y(prediction, y).astype(np.float64), np.ones(prediction.rows)
    earliest = np.where(event < 0.0, -np.inf, value)
    latest = np.where(event == 0.0, np.inf, value)
    seen = event == 1.0
    median = prediction.quantile(0.5)
    pairs, right = 0, 0.0
    step = max(1, BLOCK // len(value))
    for begin in range(0, len(value), step):
        rows = slice(begin, begin + step)
        last, of_both = latest[rows, None], seen[rows, None] & seen
        known = (last < earliest) | ((last == earliest) & ~of_both)
        gap = (median - median[rows, None])[known]
        pairs += gap.size
        right += np.count_nonzero(gap > 0.0) + 0.5 * np.count_nonzero(gap == 0.0)
    if pairs == 0:
        raise UnsupportedError.of("", "two rows of known order", f"none among {len(value)}", "observed rows")
    return float(right / pairs)


# --- calibration ------------------------------------------------------------------------------------------


def coverage(prediction: Prediction, y: Any, level: float = 0.9) -> float:
    """Share of y (over rows and outputs) in the central interval of probability `level`, ends included.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y : array_like
        Observed values.
    level : float, default 0.9
        Probability of the interval.

    Returns
    -------
    float
        Between 0 and 1.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> bnn.scores.coverage(prediction, [0.0, 4.0], level=0.9)
    0.5
    """
    lower, upper = prediction.interval(level)
    return _covered(lower, upper, arguments.checked_numbers(prediction, y))


def _covered(lower: np.ndarray, upper: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean((lower <= y) & (y <= upper)))


def interval_width(prediction: Prediction, level: float = 0.9) -> float:
    """Mean width of the central interval of probability `level`, in units of y.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    level : float, default 0.9
        Probability of the interval.

    Returns
    -------
    float
        Units of y.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> round(bnn.scores.interval_width(prediction, level=0.9), 4)
    3.2897
    """
    lower, upper = prediction.interval(level)
    return _mean(upper - lower)


def coverages(
    prediction: Prediction, y: Any, levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95)
) -> dict[str, np.ndarray]:
    """`coverage` and `interval_width` at several levels.

    Calibrated predictions have coverages near the levels. Of two calibrated predictions, the one with smaller widths is
    more informative.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y : array_like
        Observed values.
    levels : sequence of float, default (0.5, 0.8, 0.9, 0.95)
        Probabilities of the intervals.

    Returns
    -------
    dict of str to ndarray
        Arrays `level`, `coverage` and `width` of one length.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> bnn.scores.coverages(prediction, [0.0, 2.5])["coverage"]  # at 50, 80, 90 and 95 %
    array([0.5, 0.5, 1. , 1. ])
    """
    y = arguments.checked_numbers(prediction, y)
    at = arguments.checked_levels("levels", levels, "levels=(0.5, 0.8, 0.9, 0.95)", several=True)
    lower, upper = prediction.quantile(0.5 * (1.0 - at)), prediction.quantile(0.5 * (1.0 + at))
    covered = np.array([_covered(*ends, y) for ends in zip(lower, upper, strict=True)])
    return {"level": at, "coverage": covered, "width": (upper - lower).reshape(len(at), -1).mean(axis=1)}


def pit(prediction: Prediction, y: Any, seed: int | None = None) -> np.ndarray:
    """Probability integral transform F_n(y_n), per output: uniform where predictions are calibrated.

    For counts F jumps at y. Without a seed the result is the mid-point of the step, (F(y - 1) + F(y)) / 2, whose mean
    is 1/2 but which is not uniform. With a seed it is a point drawn from the step, F(y - 1) + v (F(y) - F(y - 1)) with
    v ~ U(0, 1), which is uniform where predictions are calibrated.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y : array_like
        Observed values.
    seed : int, optional
        Seed of the random points for counts.

    Returns
    -------
    ndarray
        Values between 0 and 1, one per row and output.

    References
    ----------
    Dawid 1984. Smith 1985. Czado, Gneiting and Held 2009, Biometrics 65, 1254-1261.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> bnn.scores.pit(prediction, [0.0, 2.0]).round(4)
    array([0.5   , 0.8413])
    """
    y = arguments.checked_numbers(prediction, y)
    values = prediction.cdf(y)
    if prediction.is_counts:
        below = prediction.cdf(np.asarray(y, dtype=np.float64) - 1.0)
        within = 0.5 if seed is None else np.random.default_rng(seed).random(values.shape)
        values = below + within * (values - below)
    return values


def pit_uniformity(prediction: Prediction, y: Any, seed: int = 0) -> tuple[float, float]:
    """Kolmogorov-Smirnov test of `pit` against the uniform distribution, by SciPy.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y : array_like
        Observed values.
    seed : int, default 0
        Seed of `pit` for counts.

    Returns
    -------
    statistic : float
        The largest absolute difference of u and the share of rows with PIT <= u, over u, from 0 to 1.
    p_value : float
        The p value, which assumes that rows (and outputs) are independent.

    Notes
    -----
    The test rejects a calibrated method too often, the more so the more rows there are, because all rows
    share the error of one posterior and the outputs of a row are dependent. For a single fit the p value says whether
    the distance exceeds the noise of these rows. The statistic is the distance itself.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> statistic, p_value = bnn.scores.pit_uniformity(prediction, [0.0, 2.0])
    >>> round(statistic, 4)
    0.5
    """
    found: Any = scipy.stats.kstest(pit(prediction, y, seed).ravel(), "uniform")
    return float(found.statistic), float(found.pvalue)


def reliability(prediction: Prediction, y: Any, bins: int = 15) -> dict[str, np.ndarray]:
    """Reliability diagram: `confidence`, `accuracy` and `count` of each bin.

    Bins are equal parts (lower, upper] of [0, 1] for the probability of the most probable class. With two classes
    confidences therefore start at 1/2.

    Parameters
    ----------
    prediction : Prediction
        A prediction of classes.
    y : array_like
        Labels (N,).
    bins : int, default 15
        Number of bins.

    Returns
    -------
    dict of str to ndarray
        Arrays (bins,): `confidence`, the mean probability over the rows in a bin; `accuracy`, the share of them in
        which that class is the label; `count`, their number. The first two are NaN in a bin without rows.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Bernoulli", {"probs": np.array([[0.2, 0.9, 0.6]])})
    >>> bnn.scores.reliability(prediction, [0, 1, 0], bins=2)["accuracy"].round(4)
    array([   nan, 0.6667])
    """
    InputError.check(bins >= 1, "", "at least 1 bin", f"{bins}", "15, the usual number")
    labels = arguments.checked_labels(prediction, y)
    confidence = prediction.probabilities.max(axis=1)
    correct = prediction.probabilities.argmax(axis=1) == labels
    edges = np.linspace(0.0, 1.0, bins + 1)
    which = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    count = np.bincount(which, minlength=bins)
    rows = np.where(count > 0, count, np.nan)
    return {
        "confidence": np.bincount(which, weights=confidence, minlength=bins) / rows,
        "accuracy": np.bincount(which, weights=correct, minlength=bins) / rows,
        "count": count,
    }


def expected_calibration_error(prediction: Prediction, y: Any, bins: int = 15) -> float:
    """Expected calibration error, ``sum_b (n_b / N) |accuracy_b - confidence_b|``. Lower is better.

    Biased upwards where bins hold few rows.

    Parameters
    ----------
    prediction : Prediction
        A prediction of classes.
    y : array_like
        Labels (N,).
    bins : int, default 15
        Number of bins of `reliability`.

    Returns
    -------
    float
        Between 0 and 1.

    References
    ----------
    Guo et al. 2017, ICML, after Naeini et al. 2015.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Bernoulli", {"probs": np.array([[0.2, 0.9, 0.6]])})
    >>> round(bnn.scores.expected_calibration_error(prediction, [0, 1, 0], bins=2), 4)
    0.1
    """
    found = reliability(prediction, y, bins)
    gaps = found["count"] * np.abs(found["accuracy"] - found["confidence"])
    return float(np.nansum(gaps) / found["count"].sum())


# --- several scores, and differences of scores ----------------------------------------------------------------


def paired_difference(first: Any, second: Any, *, test_to_train: float | None = None) -> tuple[float, float]:
    """Mean and standard error of the paired differences d_j = first_j - second_j, j = 1..J.

    The differences are taken as independent: se = sd(d) sqrt(1 / J). Effects common to both (an odd row, an easy split)
    cancel in the differences.

    Parameters
    ----------
    first, second : array_like
        Scores (J,) of two predictions on the same rows or splits, in the same order.
    test_to_train : float, optional
        For random splits of one data set: the number of test rows over that of training rows. Differences are dependent
        because training rows overlap, and the standard error is sd(d) sqrt(1 / J + test_to_train).

    Returns
    -------
    mean : float
        Mean difference. A score of minus infinity (an outcome of probability zero) makes it infinite, or 0 if both
        means are the same infinity.
    standard_error : float
        NaN for a single difference, and for scores that are not finite.

    References
    ----------
    Nadeau and Bengio 2003, Machine Learning 52, 239-281.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> mean, error = bnn.scores.paired_difference([1.0, 2.0, 3.0], [0.5, 2.0, 2.0])
    >>> round(mean, 4), round(error, 4)
    (0.5, 0.2887)
    """
    first, second = (np.asarray(values, dtype=np.float64) for values in (first, second))
    good, got = first.ndim == 1 and first.shape == second.shape, f"{first.shape} and {second.shape}"
    check, expected = InputError.check, "two arrays of one shape (J,)"
    check(good and first.size, "paired_difference", expected, got, "pointwise=True")
    positive = test_to_train is None or 0.0 < test_to_train < math.inf
    check(positive, "test_to_train", "a positive number", repr(test_to_train), "0.25")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        best, worst = float(np.mean(first)), float(np.mean(second))
        return (0.0 if best == worst else best - worst), math.nan
    difference = first - second
    share = 1.0 / len(difference) + (test_to_train or 0.0)
    spread = np.std(difference, ddof=1) if len(difference) > 1 else math.nan
    return float(np.mean(difference)), float(spread * math.sqrt(share))


def scores_of(prediction: Prediction, y: Any) -> dict[str, float]:
    """Scores that a comparison reports.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    y : array_like
        Targets as in `Prediction.log_prob`.

    Returns
    -------
    dict of str to float
        Numbers: log_score, rmse, crps, coverage_90, width_90. Classes: log_score, accuracy, brier, ece.

        Where rows may be censored there is also concordance, if the order of any pair is known; rmse, crps and
        coverage_90 are given only if no row is censored. crps is absent where E|Y - y| has no closed form, and
        log_score after an isotonic recalibration, which has no density.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0, 1.0]]), "scale": np.ones((1, 2))})
    >>> sorted(bnn.scores.scores_of(prediction, [0.0, 2.0]))
    ['coverage_90', 'crps', 'log_score', 'rmse', 'width_90']
    """
    found = {} if isinstance(prediction, MappedPrediction) else {"log_score": _mean(log_score(prediction, y))}
    if prediction.is_classes:
        found |= {"accuracy": accuracy(prediction, y), "brier": _mean(brier(prediction, y))}
        return found | {"ece": expected_calibration_error(prediction, y)}
    lower, upper = prediction.interval(0.9)
    if not (prediction.censored and np.any(np.asarray(y)[:, 1] != 1.0)):
        found["rmse"] = rmse(prediction, y)
        with suppress(UnsupportedError):
            found["crps"] = _mean(crps(prediction, y))
        found["coverage_90"] = _covered(lower, upper, arguments.checked_numbers(prediction, y))
    found["width_90"] = _mean(upper - lower)
    if prediction.censored:
        with suppress(UnsupportedError):
            found["concordance"] = concordance_index(prediction, y)
    return found


def _mean(values: float | np.ndarray) -> float:
    return float(np.mean(values))
