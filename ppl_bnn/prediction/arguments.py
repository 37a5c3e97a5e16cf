"""Checks of the arrays of a prediction and of the targets given to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.prediction.families import FAMILIES, LOCATION_SCALE, base

if TYPE_CHECKING:
    from ppl_bnn.prediction.prediction import Prediction


def frozen_array(name: str, given: Any, finite: bool = True) -> np.ndarray:
    """A read-only float64 view, so that a prediction does not change after its checks."""
    array = np.asarray(given)
    if array.dtype.kind not in "biuf":
        raise InputError.of("", f"{name} as an array of numbers", f"{array.dtype}", "a NumPy array of floats")
    array = array.astype(np.float64, copy=False).view()
    if finite and not np.isfinite(array).all():
        raise InputError.of("", f"finite {name}", "NaN or infinity", "a fit that does not diverge")
    array.flags.writeable = False
    return array


def checked_log_weights(given: Any, draws: int, rows: int) -> np.ndarray:
    """Normalised log weights of shape (S,) or (S, N), read-only."""
    log_weights = frozen_array("log_weights", given, finite=False)
    good, shape = log_weights.shape in ((draws,), (draws, rows)), f"shape {log_weights.shape}"
    expected = f"log_weights of shape ({draws},) or ({draws}, {rows})"
    InputError.check(good, "", expected, shape, "np.broadcast_to")
    if not (log_weights < np.inf).all():
        raise InputError.of("", "log_weights below infinity", "NaN or +inf", "-inf for a draw without weight")
    total = np.ravel(np.logaddexp.reduce(log_weights))
    worst = float(total[np.argmax(np.abs(total))])
    advice = "subtracting scipy.special.logsumexp(log_weights, axis=0)"
    InputError.check(abs(worst) < 1e-5, "", "normalised log_weights", f"a log sum of {worst:.6g}", advice)
    return log_weights


def checked_within(prediction: Prediction, given: Any) -> np.ndarray:
    """`epistemic_within`, read-only, from 0 to the variance or, for classes, the entropy of each component."""
    classes, family = prediction.is_classes, prediction.family
    expected = "a location-scale family or classes for epistemic_within"
    UnsupportedError.check(classes or family in LOCATION_SCALE, "", expected, family, "several draws")
    within, highest = frozen_array("epistemic_within", given), prediction.law().uncertainty()
    expected = f"epistemic_within of the shape of {'(draws, rows)' if classes else 'loc'}, {highest.shape}"
    InputError.check(within.shape == highest.shape, "", expected, f"{within.shape}", "np.broadcast_to")
    # The total may have been computed as the sum of the two parts, with a rounding error.
    if (within < 0.0).any() or (within > highest * (1.0 + 1e-6)).any():
        expected = f"epistemic_within between 0 and the component's {'entropy' if classes else 'variance'}"
        got = f"values from {within.min():.6g} to {within.max():.6g}"
        raise InputError.of("", expected, got, "the part that is due to not knowing f")
    return within


def check_classes(prediction: Prediction, what: str) -> None:
    """Check that the prediction is one of classes."""
    expected = f"a prediction of classes for {what}"
    UnsupportedError.check(prediction.is_classes, "", expected, prediction.family, "mean or std")


def check_numbers(prediction: Prediction, what: str) -> None:
    """Check that the prediction is not one of classes."""
    expected = f"a prediction of numbers for {what}"
    UnsupportedError.check(not prediction.is_classes, "", expected, prediction.family, "probabilities")


def checked_y(prediction: Prediction, given: Any, leading: bool = False) -> np.ndarray:
    """Targets of the prediction's shape, in float64, or int64 for labels.

    With `leading` there may be one more axis in front, and values of counts and classes are not checked.
    """
    y = np.asarray(given)
    if prediction.labels is not None:
        y = checks.label_codes(y, prediction.labels)
    if y.dtype.kind not in "biuf":
        raise InputError.of("", "y as an array of numbers", f"{y.dtype}", "encoding it as numbers or labels")
    good = y.shape == prediction.shape or (leading and y.shape[1:] == prediction.shape)
    expected = f"y of shape {prediction.shape}, one {'label' if prediction.is_classes else 'value'} per row"
    advice = "y.ravel()" if y.size == math.prod(prediction.shape) else "the y of the predicted rows"
    InputError.check(good, "", expected, f"shape {y.shape}", advice)
    if not np.isfinite(y).all():
        raise InputError.of("", "finite y", "NaN or infinity", "removing or imputing these rows")
    if leading or not (prediction.is_counts or prediction.is_classes):
        return y.astype(np.float64, copy=False)
    least = FAMILIES[base(prediction.family)].least
    highest = math.inf if prediction.is_counts else prediction.classes - 1
    counts = "counts 0, 1, 2, ..." if least == 0.0 else "whole numbers"
    kind = counts if prediction.is_counts else f"labels 0..{highest}"
    good = ((y == np.floor(y)) & (y >= least) & (y <= highest)).all()
    InputError.check(good, "", f"y of {kind}", f"values from {y.min()} to {y.max()}", "encoding y as these")
    return y.astype(np.float64 if prediction.is_counts else np.int64, copy=False)


def checked_targets(prediction: Prediction, given: Any) -> np.ndarray:
    """Targets as `log_prob` takes them: values and events (N, 2) where rows may be censored."""
    if not prediction.censored:
        return checked_y(prediction, given)
    y, wanted = np.asarray(given), (prediction.rows, 2)
    expected, advice = "values and events (1, 0 or -1)", "np.column_stack([y, np.ones(len(y))])"
    InputError.check(y.shape == wanted, "", f"y of shape {wanted}, {expected}", f"shape {y.shape}", advice)
    checked_y(prediction, y[:, 0])
    y = y.astype(np.float64, copy=False)
    checks.check_censored(y, positive=prediction.family == "Weibull")
    return y


def checked_numbers(prediction: Prediction, y: Any) -> np.ndarray:
    """Observed values, for scores of numbers only."""
    check_numbers(prediction, "this score")
    return prediction.observed_values(y)


def checked_labels(prediction: Prediction, y: Any) -> np.ndarray:
    """Labels, for scores of classes only."""
    check_classes(prediction, "this score")
    return checked_y(prediction, y)


def checked_levels(name: str, given: Any, example: str, several: bool = False) -> np.ndarray:
    """A sequence of numbers strictly between 0 and 1, or, unless `several`, one number."""
    levels = np.asarray(given, dtype=np.float64)
    good = several <= levels.ndim <= 1 and levels.size and ((levels > 0.0) & (levels < 1.0)).all()
    InputError.check(good, "", f"{name} strictly between 0 and 1", f"{given!r}", example)
    return levels


def checked_units(prediction: Prediction, location: Any, scale: Any) -> tuple[np.ndarray, np.ndarray]:
    """Location and scale for `Prediction.rescale`: numbers or (K,); with censored rows also (2,), (m, 0) and (d, 1)."""
    location = np.asarray(location, dtype=np.float64)
    scale = np.asarray(scale, dtype=np.float64)
    check, outputs = InputError.check, prediction.shape[1:]
    if prediction.censored and location.shape == scale.shape == (2,):
        got, neutral = f"{location[1]:.6g} and {scale[1]:.6g}", (location[1], scale[1]) == (0.0, 1.0)
        check(neutral, "", "events with location 0 and scale 1", got, "those of the values alone")
        location, scale = location[0], scale[0]
    for name, value in (("location", location), ("scale", scale)):
        expected = f"{name} as a number{f' or of shape {outputs}' if outputs else ''}"
        check(value.shape in ((), outputs), "", expected, f"shape {value.shape}", "one per output")
    good = np.isfinite(location).all() and np.isfinite(scale).all() and (scale > 0.0).all()
    check(good, "", "finite location and positive scale", f"{location}, {scale}", "the mean and sd")
    return location, scale
