"""Use of the uncertainty of a prediction: detection of out-of-distribution rows, selective prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError, check_known
from ppl_bnn.prediction.arguments import check_classes, check_numbers, checked_labels, checked_numbers
from ppl_bnn.prediction.fidelity import target_of
from ppl_bnn.prediction.prediction import Prediction


def _variance(prediction: Prediction) -> np.ndarray:
    check_numbers(prediction, "variance as a measure")
    return prediction.variance


def _mutual_information(prediction: Prediction) -> np.ndarray:
    check_classes(prediction, "mutual_information")
    return prediction.epistemic


# Measures of the uncertainty of a row (see `uncertainty`).
MEASURES: dict[str, Callable[[Prediction], np.ndarray]] = {
    "entropy": lambda prediction: prediction.entropy,
    "mutual_information": _mutual_information,
    "max_probability": lambda prediction: 1.0 - prediction.probabilities.max(axis=1),
    "variance": _variance,
    "epistemic_variance": lambda prediction: prediction.mean_function_variance,
}


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

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Bernoulli", {"probs": np.array([[0.2, 0.9, 0.6]])})
    >>> bnn.scores.uncertainty(prediction, "entropy").round(4)
    array([0.5004, 0.3251, 0.673 ])
    """
    measure = measure or ("max_probability" if prediction.is_classes else "variance")
    check_known("measure", [measure], MEASURES)
    values = MEASURES[measure](prediction)
    values = values if values.ndim == 1 else values.sum(axis=-1)
    finite, expected = np.isfinite(values).all(), f"a finite {measure} in every row"
    UnsupportedError.check(finite, "", expected, "infinite ones", "measure='epistemic_variance'")
    return values


def out_of_distribution(
    inside: Prediction | np.ndarray, outside: Prediction | np.ndarray, measure: str | None = None
) -> dict[str, float]:
    """How well an uncertainty separates out-of-distribution rows from rows like those of the fit.

    A detector marks a row as out-of-distribution if its uncertainty is above a threshold. The scores are over all
    thresholds, with out-of-distribution rows as the positive class, by scikit-learn.

    Parameters
    ----------
    inside : Prediction or array
        Prediction of rows like those of the fit; or uncertainties of them, (N,), larger where less certain, for example
        `-bnn.feature_density(posterior).log_density(x)`.
    outside : Prediction or array
        The same of out-of-distribution rows.
    measure : str, optional
        Measure of `uncertainty`, for predictions.

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
        If the two are not predictions of the same target, nor both uncertainties, finite and one for each row.

    References
    ----------
    Hendrycks and Gimpel 2017, ICLR.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> inside = bnn.Prediction("Bernoulli", {"probs": np.array([[0.1, 0.9, 0.8]])})
    >>> outside = bnn.Prediction("Bernoulli", {"probs": np.array([[0.5, 0.6]])})
    >>> float(bnn.scores.out_of_distribution(inside, outside)["auroc"])
    1.0
    """
    if isinstance(inside, Prediction) and isinstance(outside, Prediction):
        same, got = target_of(inside) == target_of(outside), f"{inside!r} and {outside!r}"
        InputError.check(same, "", "predictions of one target", got, "the same posterior at both inputs")
        both = [uncertainty(each, measure) for each in (inside, outside)]
    else:
        both = [np.asarray(each) for each in (inside, outside)]
        good = all(each.ndim == 1 and each.dtype.kind in "fiu" and np.isfinite(each).all() for each in both)
        got = " and ".join(f"{each.dtype} of shape {each.shape}" for each in both)
        expected = "two predictions, or two arrays of finite uncertainties, one for each row"
        InputError.check(
            good and measure is None, "", expected, got, "scores.uncertainty(prediction, measure)"
        )
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    values = np.concatenate(both)
    foreign = np.repeat([0, 1], [len(each) for each in both])
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
        - `risk`: (N,), the mean loss of the k rows with the least uncertainty, averaged over all orders of rows of
          equal uncertainty.
        - `aurc`: the mean of risk, the area under the curve. Lower is better. An uninformative uncertainty has the mean
          loss at every coverage.

    References
    ----------
    Geifman and El-Yaniv 2017, NeurIPS.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Bernoulli", {"probs": np.array([[0.2, 0.9, 0.6]])})
    >>> bnn.scores.selective(prediction, [0, 1, 0])["risk"].round(4)  # most certain rows first
    array([0.    , 0.    , 0.3333])
    """
    one, got = (y is None) != (losses is None), "neither" if y is None else "both"
    InputError.check(one, "selective", "y or losses", got, "selective(prediction, y)")
    if losses is None and prediction.is_classes:
        losses = prediction.probabilities.argmax(axis=1) != checked_labels(prediction, y)
    elif losses is None:
        squares = (prediction.mean - checked_numbers(prediction, y)) ** 2
        losses = squares.reshape(prediction.rows, -1).mean(axis=1)
    losses, rows = np.asarray(losses, dtype=np.float64), np.arange(1, prediction.rows + 1)
    finite = np.isfinite(losses)
    good, got = finite.all(), f"shape {losses.shape}, {np.count_nonzero(~finite)} not finite"
    expected = f"finite numbers of shape {rows.shape}"
    InputError.check(good and losses.shape == rows.shape, "losses", expected, got, "one per row")
    _, which, size = np.unique(uncertainty(prediction, measure), return_inverse=True, return_counts=True)
    equal = np.bincount(which, weights=losses) / size
    risk = np.cumsum(np.repeat(equal, size)) / rows
    return {"coverage": rows / len(rows), "risk": risk, "aurc": float(risk.mean())}
