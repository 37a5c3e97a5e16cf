"""Checks of the parts of a prediction and of the targets given to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.prediction import scipy_families as families
from ppl_bnn.prediction.families import LOCATION_SCALE, entropy_of, frozen_array, log_sum_exp

if TYPE_CHECKING:
    from ppl_bnn.prediction.prediction import Prediction


def checked_log_weights(prediction: Prediction, given: Any) -> np.ndarray:
    """Checked log weights.

    Parameters
    ----------
    prediction : Prediction
        The prediction that they belong to.
    given
        Logarithms of weights, (S,) or (S, N).

    Returns
    -------
    ndarray
        The log weights, read-only.

    Raises
    ------
    InputError
        For another shape, NaN or infinity, or weights that do not sum to one.
    """
    log_weights = frozen_array("log_weights", given, finite=False)
    if log_weights.shape not in ((prediction.draws,), (prediction.draws, prediction.rows)):
        raise InputError.of(
            "",
            f"log_weights of shape ({prediction.draws},) or ({prediction.draws}, {prediction.rows})",
            f"shape {log_weights.shape}",
            "one weight per draw, or one per draw and row",
        )
    if np.isnan(log_weights).any() or (log_weights == np.inf).any():
        raise InputError.of("", "log_weights below infinity", "NaN or +inf", "-inf for a draw without weight")
    total = log_sum_exp(log_weights)
    if not np.all(np.abs(total) < 1e-5):
        raise InputError.of(
            "",
            "normalised log_weights, the logarithm of their sum being 0",
            f"{float(np.ravel(total)[np.argmax(np.abs(np.ravel(total)))]):.6g}",
            "subtracting scipy.special.logsumexp(log_weights, axis=0)",
        )
    return log_weights


def checked_within(prediction: Prediction, given: Any) -> np.ndarray:
    """Checked `epistemic_within`.

    Parameters
    ----------
    prediction : Prediction
        The prediction that it belongs to.
    given
        Values of the shape of `loc`, or (S, N) for classes.

    Returns
    -------
    ndarray
        The values, read-only.

    Raises
    ------
    UnsupportedError
        For a family that is neither a location-scale family nor one of classes.
    InputError
        For another shape, or values outside the range from 0 to the component's variance or entropy.
    """
    if not prediction.is_classes and prediction.family not in LOCATION_SCALE:
        raise UnsupportedError.of(
            "",
            "epistemic_within with a location-scale family or with classes",
            prediction.family,
            "several draws instead: their spread is the epistemic part",
        )
    within = frozen_array("epistemic_within", given)
    if prediction.is_classes:
        shape, whole = (prediction.draws, prediction.rows), "entropy"
        highest = entropy_of(prediction._component_probabilities())
        advice = "the mutual information of label and function, H(E[p]) - E[H(p)], in nats"
    else:
        shape, whole = prediction._event_array.shape, "variance"
        highest = prediction._component_variance()
        advice = "the part of scale**2 that comes from not knowing f, in squared units of y"
    if within.shape != shape:
        raise InputError.of(
            "",
            f"epistemic_within of the shape of {'(draws, rows)' if prediction.is_classes else 'loc'}, {shape}",
            f"{within.shape}",
            "np.broadcast_to, if one value is meant for all",
        )
    # The total may have been computed as the sum of the two parts, with a rounding error.
    if (within < 0.0).any() or (within > highest * (1.0 + 1e-6)).any():
        raise InputError.of(
            "",
            f"epistemic_within between 0 and the component's {whole}",
            f"values from {within.min():.6g} to {within.max():.6g}",
            advice,
        )
    return within


def checked_class_names(prediction: Prediction, given: Sequence[str]) -> tuple[str, ...]:
    """Checked class names, as strings.

    Parameters
    ----------
    prediction : Prediction
        A prediction of classes.
    given : sequence of str
        The names.

    Returns
    -------
    tuple of str
        The names.

    Raises
    ------
    InputError
        If there is not one name per class.
    UnsupportedError
        For a prediction of numbers.
    """
    prediction._need_classes("class_names")
    names = tuple(str(name) for name in given)
    if len(names) != prediction.classes:
        raise InputError.of("", f"{prediction.classes} class_names", f"{len(names)}", "one name per class")
    return names


def checked_y(prediction: Prediction, given: Any, leading: bool = False) -> np.ndarray:
    """Checked targets of the prediction's shape.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    given
        Targets, or labels of the prediction.
    leading : bool, default False
        Whether one more axis in front is allowed. Values of counts and classes are then not checked.

    Returns
    -------
    ndarray
        Float64, or int64 for labels.

    Raises
    ------
    InputError
        For another shape or type, values that are not finite, or invalid counts or labels.
    """
    y = np.asarray(given)
    if prediction.labels is not None:
        y = checks.label_codes(y, prediction.labels)
    if y.dtype.kind not in "biuf":
        raise InputError.of("", "y as an array of numbers", f"{y.dtype}", "encoding it as numbers or labels")
    if y.shape != prediction.shape and not (leading and y.shape[1:] == prediction.shape):
        raise InputError.of(
            "",
            f"y of shape {prediction.shape}, one {'label' if prediction.is_classes else 'value'} per row"
            + (" and output" if len(prediction.shape) == 2 else ""),
            f"shape {y.shape}",
            "y.ravel()" if y.size == math.prod(prediction.shape) else "the y of the rows that were predicted",
        )
    if not np.isfinite(y).all():
        raise InputError.of("", "finite y", "NaN or infinity", "removing or imputing these rows")
    if leading or not (prediction.is_counts or prediction.is_classes):
        return y.astype(np.float64, copy=False)
    highest = math.inf if prediction.is_counts else prediction.classes - 1
    least = families.least(prediction.family) if prediction.is_counts else 0.0
    if (y != np.floor(y)).any() or (y < least).any() or (y > highest).any():
        counts = "counts 0, 1, 2, ..." if least == 0.0 else "whole numbers"
        kind = counts if prediction.is_counts else f"labels 0..{highest}"
        raise InputError.of(
            "", f"y of {kind}", f"values from {y.min()} to {y.max()}", "encoding y so that it holds these"
        )
    return y.astype(np.float64 if prediction.is_counts else np.int64, copy=False)


def checked_targets(prediction: Prediction, given: Any) -> np.ndarray:
    """Checked targets as `log_prob` takes them.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    given
        Targets; values and events (N, 2) where rows may be censored.

    Returns
    -------
    ndarray
        The targets.

    Raises
    ------
    InputError
        For invalid targets.
    """
    if not prediction.censored:
        return checked_y(prediction, given)
    y = np.asarray(given)
    if y.shape != (prediction.rows, 2):
        raise InputError.of(
            "",
            f"y of shape {(prediction.rows, 2)}, values and events (1, 0 or -1)",
            f"shape {y.shape}",
            "np.column_stack([y, np.ones(len(y))]) where every row was observed",
        )
    checked_y(prediction, y[:, 0])
    y = y.astype(np.float64, copy=False)
    checks.check_censored(y, positive=prediction.family == "Weibull")
    return y


def checked_units(prediction: Prediction, location: Any, scale: Any) -> tuple[np.ndarray, np.ndarray]:
    """Checked location and scale for `Prediction.rescale`.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    location, scale
        Numbers or of shape (K,). Where rows may be censored also (2,), of which the second is 0 and 1.

    Returns
    -------
    location, scale : ndarray
        Those of the values.

    Raises
    ------
    InputError
        For another shape, values that are not finite, or a scale that is not positive.
    """
    location = np.asarray(location, dtype=np.float64)
    scale = np.asarray(scale, dtype=np.float64)
    if prediction.censored and location.shape == scale.shape == (2,):
        if location[1] != 0.0 or scale[1] != 1.0:
            raise InputError.of(
                "",
                "events in their own units, location 0 and scale 1",
                f"{location[1]:.6g} and {scale[1]:.6g}",
                "the location and scale of the values alone",
            )
        location, scale = location[0], scale[0]
    for name, value in (("location", location), ("scale", scale)):
        if value.shape not in ((), prediction.shape[1:]):
            raise InputError.of(
                "",
                f"{name} as a number"
                + (f" or of shape {prediction.shape[1:]}" if prediction.shape[1:] else ""),
                f"shape {value.shape}",
                "one value per output",
            )
    if not (np.isfinite(location).all() and np.isfinite(scale).all() and (scale > 0.0).all()):
        raise InputError.of(
            "", "finite location and positive scale", f"{location}, {scale}", "the mean and sd of the targets"
        )
    return location, scale
