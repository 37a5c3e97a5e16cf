"""Scores of predictions: proper scores, calibration, use of the uncertainty, distance to a reference.

Most functions take a `Prediction` and the observed y, of the prediction's `shape`, and return a number (or, with
`pointwise=True`, one per row). Larger is better only for log_score, accuracy, concordance_index, and the two areas of
`out_of_distribution`.

Of a censored row only a bound is known: y is then (N, 2), values and events, which log_score and concordance_index
take. Errors, CRPS, PIT and coverage are defined where every row was observed, and refused otherwise: over the observed
rows alone they would favour predictions that are too short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError, unknown_name
from ppl_bnn.prediction.arguments import checked_targets, checked_y
from ppl_bnn.prediction.crps import checked_numbers, row_cdf
from ppl_bnn.prediction.crps import crps as crps
from ppl_bnn.prediction.crps import energy_score as energy_score
from ppl_bnn.prediction.crps import mean_difference as mean_difference
from ppl_bnn.prediction.isotonic import MappedPrediction
from ppl_bnn.prediction.prediction import BLOCK, Prediction

# Measures of the uncertainty of a row (see `uncertainty`).
MEASURES = ("entropy", "mutual_information", "max_probability", "variance", "epistemic_variance")


# --- proper scores ----------------------------------------------------------------------------------------


def log_score(prediction: Prediction, y: Any, pointwise: bool = False) -> float | np.ndarray:
    """Mean over rows of log p(y_n), the log density (or mass) of the mixture. Larger is better.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    y
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
    """
    values = prediction.log_prob(y)
    return values if pointwise else float(values.mean())


def brier(prediction: Prediction, y: Any, pointwise: bool = False) -> float | np.ndarray:
    """Brier score: mean over rows of sum_c (P_c - 1{y = c})^2 over ALL classes. Lower is better.

    Parameters
    ----------
    prediction : Prediction
        A prediction of classes.
    y
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
    """
    probabilities = prediction.probabilities
    indicator = _labels(prediction, y)[:, None] == np.arange(prediction.classes)
    values = np.sum((probabilities - indicator) ** 2, axis=1)
    return values if pointwise else float(values.mean())


# --- errors of point predictions --------------------------------------------------------------------------


def rmse(prediction: Prediction, y: Any) -> float:
    """Root mean square of mean - y over rows and outputs, in units of y.

    The predictive mean is the optimal point prediction for this error.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y
        Observed values.

    Returns
    -------
    float
        Units of y.
    """
    return float(np.sqrt(np.mean((prediction.mean - checked_numbers(prediction, y)) ** 2)))


def mean_absolute_error(prediction: Prediction, y: Any) -> float:
    """Mean of ``|median - y|`` over rows and outputs, in units of y.

    The predictive median, not the mean, is the optimal point prediction for this error.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y
        Observed values.

    Returns
    -------
    float
        Units of y.
    """
    return float(np.mean(np.abs(prediction.quantile(0.5) - checked_numbers(prediction, y))))


def accuracy(prediction: Prediction, y: Any) -> float:
    """Share of rows in which the most probable class (the first, on a tie) is the label.

    Parameters
    ----------
    prediction : Prediction
        A prediction of classes.
    y
        Labels (N,).

    Returns
    -------
    float
        Between 0 and 1.
    """
    return float(np.mean(prediction.probabilities.argmax(axis=1) == _labels(prediction, y)))


def concordance_index(prediction: Prediction, y: Any) -> float:
    """Share of the pairs of rows of known order that the prediction puts in that order.

    The order of two rows is known where one is certain to be the smaller: v_i < v_j where both were observed, and
    v_i <= v_j where i is observed or left-censored, j observed or right-censored, and not both observed. The prediction
    orders rows by their medians. A pair with equal medians counts one half. The cost is O(N^2).

    Parameters
    ----------
    prediction : Prediction
        A prediction of one number per row.
    y
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
    """
    prediction._need_numbers("concordance_index")
    if len(prediction.shape) != 1:
        raise UnsupportedError.of(
            "", "one number per row for concordance_index", repr(prediction), "each output by itself"
        )
    if prediction.censored and np.ndim(y) == 2:
        value, event = checked_targets(prediction, y).T
    else:
        value = checked_y(prediction, y).astype(np.float64)
        event = np.ones(len(value))
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
        raise UnsupportedError.of(
            "",
            "two rows of which one is known to be the smaller",
            f"none among {len(value)}",
            "rows that were observed",
        )
    return float(right / pairs)


# --- calibration ------------------------------------------------------------------------------------------


def coverage(prediction: Prediction, y: Any, level: float = 0.9) -> float:
    """Share of y (over rows and outputs) in the central interval of probability `level`, ends included.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y
        Observed values.
    level : float, default 0.9
        Probability of the interval.

    Returns
    -------
    float
        Between 0 and 1.
    """
    y = checked_numbers(prediction, y)
    return _covered(prediction.interval(level), y)


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
    """
    lower, upper = prediction.interval(level)
    return float(np.mean(upper - lower))


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
    y
        Observed values.
    levels : sequence of float, default (0.5, 0.8, 0.9, 0.95)
        Probabilities of the intervals.

    Returns
    -------
    dict of str to ndarray
        Arrays `level`, `coverage` and `width` of one length.
    """
    y = checked_numbers(prediction, y)
    at = np.asarray(levels, dtype=np.float64)
    if at.ndim != 1 or at.size == 0 or not ((at > 0.0) & (at < 1.0)).all():
        raise InputError.of(
            "", "levels strictly between 0 and 1", f"{at.tolist()}", "levels=(0.5, 0.8, 0.9, 0.95)"
        )
    lower = prediction.quantile(0.5 * (1.0 - at))
    upper = prediction.quantile(0.5 * (1.0 + at))
    return {
        "level": at,
        "coverage": np.array([_covered(ends, y) for ends in zip(lower, upper, strict=True)]),
        "width": np.array([np.mean(above - below) for below, above in zip(lower, upper, strict=True)]),
    }


def pit(prediction: Prediction, y: Any, seed: int | None = None) -> np.ndarray:
    """Probability integral transform F_n(y_n), per output: uniform where predictions are calibrated.

    For counts F jumps at y. Without a seed the result is the mid-point of the step, (F(y - 1) + F(y)) / 2, whose mean
    is 1/2 but which is not uniform. With a seed it is a point drawn from the step, F(y - 1) + v (F(y) - F(y - 1)) with
    v ~ U(0, 1), which is uniform where predictions are calibrated.

    Parameters
    ----------
    prediction : Prediction
        A prediction of numbers.
    y
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
    """
    y = checked_numbers(prediction, y)
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
    y
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
    The test is not exact. All rows were predicted by one posterior and share its error, and outputs of a row are
    dependent. The test rejects a calibrated method too often, the more so the more rows there are relative to those of
    the fit. For a single fit the p value says whether the distance exceeds the noise of these rows. The statistic is
    the distance itself.
    """
    from scipy.stats import kstest

    found: Any = kstest(pit(prediction, y, seed).ravel(), "uniform")
    return float(found.statistic), float(found.pvalue)


def reliability(prediction: Prediction, y: Any, bins: int = 15) -> dict[str, np.ndarray]:
    """Reliability diagram: `confidence`, `accuracy` and `count` of each bin.

    Bins are equal parts (lower, upper] of [0, 1] for the probability of the most probable class. For two classes, too,
    the more probable one is used, so confidences start at 1/2.

    Parameters
    ----------
    prediction : Prediction
        A prediction of classes.
    y
        Labels (N,).
    bins : int, default 15
        Number of bins.

    Returns
    -------
    dict of str to ndarray
        Arrays (bins,): `confidence`, the mean probability over the rows in a bin; `accuracy`, the share of them in
        which that class is the label; `count`, their number. The first two are NaN in a bin without rows.
    """
    if bins < 1:
        raise InputError.of("", "at least 1 bin", f"{bins}", "15, the usual number")
    labels = _labels(prediction, y)
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
    y
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
    """
    found = reliability(prediction, y, bins)
    gaps = found["count"] * np.abs(found["accuracy"] - found["confidence"])
    return float(np.nansum(gaps) / found["count"].sum())


# --- use of the uncertainty ---------------------------------------------------------------------------------


def uncertainty(prediction: Prediction, measure: str | None = None) -> np.ndarray:
    """Uncertainty of each row: larger where the prediction is less certain.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    measure : str, optional
        Classes: "max_probability" (1 - max_c P_c, the default), "entropy" (of the mixture, nats) or
        "mutual_information" (of label and function, nats: the part that more data would remove). Numbers: "variance" of
        y (the default; units of y squared), summed over outputs, which should be of one unit. Both:
        "epistemic_variance", `mean_function_variance` summed over outputs or classes.

    Returns
    -------
    ndarray
        Shape (N,).

    Raises
    ------
    UnsupportedError
        If the prediction does not have the measure, or it is not finite in some row.
    """
    if measure is None:
        measure = "max_probability" if prediction.is_classes else "variance"
    if measure not in MEASURES:
        raise unknown_name("measure", measure, MEASURES)
    if measure == "entropy":
        values = prediction.entropy
    elif measure == "mutual_information":
        prediction._need_classes("mutual_information")
        values = prediction.epistemic
    elif measure == "max_probability":
        values = 1.0 - prediction.probabilities.max(axis=1)
    elif measure == "variance":
        prediction._need_numbers("variance as a measure")
        values = prediction.variance
    else:
        values = prediction.mean_function_variance
    values = values if values.ndim == 1 else values.sum(axis=-1)
    if not np.isfinite(values).all():
        raise UnsupportedError.of(
            "",
            f"a finite {measure} in every row",
            f"{np.count_nonzero(~np.isfinite(values))} rows without",
            "measure='epistemic_variance', which heavy tails of the noise do not enter",
        )
    return values


def out_of_distribution(
    inside: Prediction, outside: Prediction, measure: str | None = None
) -> dict[str, float]:
    """How well `uncertainty` separates out-of-distribution rows from rows like those of the fit.

    A detector marks a row as out-of-distribution if its uncertainty is above a threshold. The scores are over all
    thresholds, with out-of-distribution rows as the positive class, by scikit-learn.

    Parameters
    ----------
    inside : Prediction
        Prediction of rows like those of the fit.
    outside : Prediction
        Prediction of out-of-distribution rows.
    measure : str, optional
        Measure of `uncertainty`.

    Returns
    -------
    dict of str to float
        - `auroc`, area under the ROC curve: the probability that a row from outside is less certain than one from
          inside, ties counting half. 1/2 for a prediction that does not separate them; larger is better.
        - `aupr`, average precision: larger is better. It depends on the share of rows from outside, which is its value
          by chance.
        - `fpr95`, share of rows from inside that are marked at the highest threshold that finds 95 % of the rows from
          outside. Lower is better. (Some authors swap the two sets here.)

    Raises
    ------
    InputError
        If the two are not predictions of the same target.

    References
    ----------
    Hendrycks and Gimpel 2017, ICLR.
    """
    if _outcome(inside) != _outcome(outside):
        raise InputError.of(
            "",
            f"predictions of one target, as {inside!r}",
            f"{outside!r}",
            "the same posterior at both inputs",
        )
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    values = np.concatenate([uncertainty(inside, measure), uncertainty(outside, measure)])
    foreign = np.repeat([0, 1], [inside.rows, outside.rows])
    called, found, _ = roc_curve(foreign, values, drop_intermediate=False)
    return {
        "auroc": float(roc_auc_score(foreign, values)),
        "aupr": float(average_precision_score(foreign, values)),
        "fpr95": float(called[np.argmax(found >= 0.95)]),
    }


def selective(
    prediction: Prediction, y: Any = None, *, measure: str | None = None, losses: Any = None
) -> dict[str, Any]:
    """Risk-coverage curve of selective prediction: the least certain rows are rejected.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    y : optional
        Observed targets. The loss is then the error (0 or 1) of the most probable class, or the squared error of the
        mean, averaged over outputs.
    measure : str, optional
        Measure of `uncertainty`.
    losses : optional
        Other losses (N,) instead of y, such as ``crps(prediction, y, pointwise=True)``.

    Returns
    -------
    dict
        - `coverage`: (N,), k / N for k = 1..N.
        - `risk`: (N,), the mean loss of the k rows with the least uncertainty. Rows of equal uncertainty have no order,
          and the mean over all their orders is taken.
        - `aurc`: the mean of risk, the area under the curve. Lower is better. An uninformative uncertainty has the mean
          loss at every coverage.

    References
    ----------
    Geifman and El-Yaniv 2017, NeurIPS.
    """
    if (y is None) == (losses is None):
        raise InputError.of(
            "selective", "y or losses", "neither" if y is None else "both", "selective(prediction, y)"
        )
    if losses is None:
        if prediction.is_classes:
            losses = prediction.probabilities.argmax(axis=1) != _labels(prediction, y)
        else:
            losses = (prediction.mean - checked_numbers(prediction, y)) ** 2
            losses = losses.reshape(prediction.rows, -1).mean(axis=1)
    losses = np.asarray(losses, dtype=np.float64)
    if losses.shape != (prediction.rows,) or not np.isfinite(losses).all():
        raise InputError.of(
            "losses",
            f"finite numbers of shape ({prediction.rows},)",
            f"shape {losses.shape}, {np.count_nonzero(~np.isfinite(losses))} not finite",
            "one loss per row",
        )
    _, which, size = np.unique(uncertainty(prediction, measure), return_inverse=True, return_counts=True)
    equal = np.bincount(which, weights=losses) / size
    risk = np.cumsum(np.repeat(equal, size)) / np.arange(1, len(losses) + 1)
    return {"coverage": np.arange(1, len(losses) + 1) / len(losses), "risk": risk, "aurc": float(risk.mean())}


# --- several scores, and differences of scores ----------------------------------------------------------------


def paired_difference(first: Any, second: Any, *, test_to_train: float | None = None) -> tuple[float, float]:
    """Mean and standard error of the paired differences d_j = first_j - second_j.

    The standard error of J differences, which are taken as independent, is

        se = sd(d) sqrt(1 / J).

    Effects common to both (an odd row, an easy split) cancel in the differences.

    Parameters
    ----------
    first, second
        Scores (J,) of two predictions on the same rows or splits, in the same order.
    test_to_train : float, optional
        For random splits of one data set into training and test rows: the number of test rows over that of training
        rows. The training rows of splits overlap, so the differences are dependent and the error above is too small. It
        is then sd(d) sqrt(1 / J + test_to_train).

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
    """
    first, second = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if first.ndim != 1 or first.shape != second.shape or first.size == 0:
        raise InputError.of(
            "paired_difference",
            "two arrays of one shape (J,), the same rows or splits in the same order",
            f"{first.shape} and {second.shape}",
            "log_score(prediction, y, pointwise=True), or one score per split",
        )
    if test_to_train is not None and not 0.0 < test_to_train < math.inf:
        raise InputError.of(
            "test_to_train", "a positive number", repr(test_to_train), "len(test) / len(train)"
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        best, worst = float(np.mean(first)), float(np.mean(second))
        return (0.0 if best == worst else best - worst), math.nan
    difference = first - second
    if len(difference) < 2:
        return float(np.mean(difference)), math.nan
    share = 1.0 / len(difference) + (test_to_train or 0.0)
    return float(np.mean(difference)), float(np.std(difference, ddof=1) * math.sqrt(share))


def scores_of(prediction: Prediction, y: Any) -> dict[str, float]:
    """Scores that a comparison reports.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    y
        Targets as in `Prediction.log_prob`.

    Returns
    -------
    dict of str to float
        Numbers: log_score, rmse, crps, coverage_90, width_90. Classes: log_score, accuracy, brier, ece.

        Where rows may be censored there is also concordance, if the order of any pair is known; rmse, crps and
        coverage_90 are given only if no row is censored. There is no crps where E|Y - y| has no closed form here, and
        no log_score after an isotonic recalibration, which has no density.
    """
    if prediction.is_classes:
        return {
            "log_score": float(np.mean(log_score(prediction, y))),
            "accuracy": accuracy(prediction, y),
            "brier": float(np.mean(brier(prediction, y))),
            "ece": expected_calibration_error(prediction, y),
        }
    score: dict[str, float] = {}
    if not isinstance(prediction, MappedPrediction):
        score["log_score"] = float(np.mean(log_score(prediction, y)))
    interval = prediction.interval(0.9)
    width = {"width_90": float(np.mean(interval[1] - interval[0]))}
    extra: dict[str, float] = {}
    if prediction.censored:
        with suppress(UnsupportedError):
            extra["concordance"] = concordance_index(prediction, y)
        if np.any(np.asarray(y)[:, 1] != 1.0):
            return {**score, **width, **extra}
    score["rmse"] = rmse(prediction, y)
    with suppress(UnsupportedError):
        score["crps"] = float(np.mean(crps(prediction, y)))
    return {**score, "coverage_90": _covered(interval, checked_numbers(prediction, y)), **width, **extra}


# --- distance to a reference ------------------------------------------------------------------------------


def fidelity(prediction: Prediction, reference: Prediction) -> dict[str, float]:
    """Distance of a prediction from a reference prediction of the same rows.

    Below, m is the mean of the mean function and v its variance over draws (`mean_function_variance`: the epistemic
    variance for numbers, the variance over draws of the class probabilities for classes). A star marks the reference. A
    row is a row and output; for classes the squares and the variances of a row are summed over its classes.

    Parameters
    ----------
    prediction : Prediction
        The prediction to judge.
    reference : Prediction
        The reference prediction.

    Returns
    -------
    dict of str to float
        - `mean_gap`: ``sqrt(sum_n a_n (m_n - m*_n)^2 / v*_n)``, error of the mean in EPISTEMIC standard deviations of
          the reference.
        - `sd_ratio`, `sd_log_ratio_spread`: exp of the mean, and the standard deviation, with weights a_n, of
          ``log sqrt(v_n / v*_n)``: 1 and 0 where the epistemic standard deviations agree. A point estimate has no
          spread: 0 and infinity.
        - `wasserstein` (numbers): mean over rows of the 1-Wasserstein distance of the two predictive distributions of
          y, the integral of ``|F - F*|``, in PREDICTIVE standard deviations of the reference.
        - `agreement`, `total_variation` (classes): share of rows with the same most probable class; mean over rows of
          ``sum_c |P_c - P*_c| / 2``.

    Raises
    ------
    InputError
        If family of outcome, shape or classes differ, or the reference has no spread.

    Notes
    -----
    The weights a_n are equal for numbers. For classes they are in proportion to ``v*_n``: where the reference is
    certain its standard deviation is nearly zero, and ratios to it would dominate the rows that matter.
    """
    _check_comparable(prediction, reference)
    figures = mean_function_gap(
        prediction.mean,
        prediction.mean_function_variance,
        reference.mean,
        reference.mean_function_variance,
        reference.is_classes,
    )
    if reference.is_classes:
        ours, theirs = prediction.probabilities, reference.probabilities
        figures["agreement"] = float(np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1)))
        figures["total_variation"] = float(np.mean(0.5 * np.abs(ours - theirs).sum(axis=1)))
    else:
        figures["wasserstein"] = float(np.mean(wasserstein(prediction, reference) / reference.std))
    return figures


def mean_function_gap(
    mean: np.ndarray,
    variance: np.ndarray,
    reference_mean: np.ndarray,
    reference_variance: np.ndarray,
    classes: bool,
) -> dict[str, float]:
    """mean_gap, sd_ratio and sd_log_ratio_spread of `fidelity`, from means and variances of two mean functions.

    Parameters
    ----------
    mean, variance, reference_mean, reference_variance : ndarray
        All of one shape, (N,) or (N, K).
    classes : bool
        Whether the outcome is a label. The arrays (N, C) then hold the C classes of a row.

    Returns
    -------
    dict of str to float
        The three entries.

    Raises
    ------
    InputError
        If the reference has no spread.
    """
    difference = (mean - reference_mean) ** 2
    if classes and difference.ndim == 2:
        difference, variance, reference_variance = (
            part.sum(axis=-1) for part in (difference, variance, reference_variance)
        )
    spread = reference_variance > 0.0
    if not (spread.any() if classes else spread.all()):
        raise InputError.of(
            "",
            "a reference with epistemic spread in every row",
            f"one whose draws agree exactly in {np.count_nonzero(~spread)} rows",
            "a reference posterior of several draws",
        )
    weights = reference_variance / reference_variance.sum() if classes else 1.0 / spread.size
    if classes:
        mean_gap = math.sqrt(difference.sum() / reference_variance.sum())
    else:
        mean_gap = math.sqrt(np.mean(difference / reference_variance))
    # Without spread in the reference a row has weight 0 here; it still counts in mean_gap.
    weights = (weights * np.ones(spread.shape))[spread]
    variance, reference_variance = variance[spread], reference_variance[spread]
    if (variance == 0.0).any():
        sd_ratio, ratio_spread = 0.0, math.inf
    else:
        log_ratio = 0.5 * (np.log(variance) - np.log(reference_variance))
        centre = float(np.sum(weights * log_ratio))
        sd_ratio, ratio_spread = math.exp(centre), math.sqrt(np.sum(weights * (log_ratio - centre) ** 2))
    return {"mean_gap": mean_gap, "sd_ratio": sd_ratio, "sd_log_ratio_spread": ratio_spread}


def noise_floor(reference: Prediction, groups: Any = None) -> dict[str, float]:
    """`fidelity` between two halves of the reference's draws: the smallest distance that can be resolved.

    Parameters
    ----------
    reference : Prediction
        The reference prediction.
    groups : optional
        Chain number of each draw, (S,). Whole chains go to either half, so that autocorrelation cannot make the halves
        more alike than two runs. Without it, or with one chain: the first and second half.

    Returns
    -------
    dict of str to float
        As from `fidelity`. Each half has about half of the draws, so the floor of its mean_gap is about sqrt(2) above
        that of two full runs.
    """
    return fidelity(*halves(reference, groups))


def halves(reference: Prediction, groups: Any = None) -> tuple[Prediction, Prediction]:
    """The two halves of the draws that `noise_floor` compares.

    Parameters
    ----------
    reference : Prediction
        A prediction of at least 4 draws.
    groups : optional
        As in `noise_floor`.

    Returns
    -------
    first, second : Prediction
        The mixtures of each half.

    Raises
    ------
    InputError
        If there are fewer than 4 draws, or `groups` has another shape.
    """
    if reference.draws < 4:
        raise InputError.of(
            "", "a reference of at least 4 draws", f"{reference.draws}", "more draws: halves of two or more"
        )
    first = np.arange(reference.draws) < reference.draws // 2
    if groups is not None:
        groups = np.asarray(groups)
        if groups.shape != (reference.draws,):
            raise InputError.of(
                "",
                f"groups of shape ({reference.draws},)",
                f"shape {groups.shape}",
                "one chain number per draw",
            )
        names = np.unique(groups)
        if len(names) > 1:
            first = np.isin(groups, names[: len(names) // 2])
    return reference.take_draws(first), reference.take_draws(~first)


def wasserstein(prediction: Prediction, reference: Prediction) -> np.ndarray:
    """1-Wasserstein distance of the predictive distributions, per row and output.

    ``W_1 = integral |F(t) - G(t)| dt``, by the trapezium rule on 257 nodes between the outermost 1e-6 quantiles of the
    two, dense around the reference's median. For counts it is a sum over the integers.

    Parameters
    ----------
    prediction, reference : Prediction
        Two predictions of the same rows.

    Returns
    -------
    ndarray
        Units of y.
    """
    _check_comparable(prediction, reference)
    prediction._need_numbers("wasserstein")
    ours, theirs = prediction._marginals(), reference._marginals()
    levels = [1e-6, 1.0 - 1e-6]
    (low, high), (low_reference, high_reference) = ours.quantile(levels), theirs.quantile(levels)
    low, high = np.minimum(low, low_reference), np.maximum(high, high_reference)
    if reference.is_counts:
        result = np.array(
            [
                np.sum(np.abs(row_cdf(ours, row, nodes) - row_cdf(theirs, row, nodes)))
                for row, nodes in ((row, np.arange(low[row], high[row] + 1.0)) for row in range(ours.rows))
            ]
        )
    else:
        lower, median, upper = theirs.quantile([0.25, 0.5, 0.75])
        width = upper - lower
        u = np.linspace(np.arcsinh((low - median) / width), np.arcsinh((high - median) / width), 257)
        nodes = median + width * np.sinh(u)
        result = np.trapezoid(np.abs(ours.cdf(nodes) - theirs.cdf(nodes)), nodes, axis=0)
    return result.reshape(reference.shape)


# --- helpers ----------------------------------------------------------------------------------------------


def _labels(prediction: Prediction, y: Any) -> np.ndarray:
    """Checked labels, for scores of classes only."""
    prediction._need_classes("this score")
    return checked_y(prediction, y)


def _covered(interval: tuple[np.ndarray, np.ndarray], y: np.ndarray) -> float:
    return float(np.mean((interval[0] <= y) & (y <= interval[1])))


def _outcome(prediction: Prediction) -> tuple[Any, ...]:
    """Kind and shape of the outcome of a row."""
    kind = (prediction.family, prediction.classes) if prediction.is_classes else prediction.is_counts
    return prediction.shape[1:], kind


def _check_comparable(prediction: Prediction, reference: Prediction) -> None:
    if (prediction.rows, _outcome(prediction)) != (reference.rows, _outcome(reference)):
        raise InputError.of(
            "",
            f"a prediction comparable to the reference {reference!r}",
            f"{prediction!r}",
            "predicting the same rows and the same target with both",
        )
