"""Predictive distributions of estimators with scikit-learn's interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.prediction.prediction import Prediction

# Folds of the training rows, each predicted by a fit to the others, that choose the bandwidth.
FOLDS = 5
# Its limits, in standard deviations of the training targets.
NARROWEST, WIDEST = 1e-4, 10.0
# The argument of `predict` that takes levels.
PREDICT = "quantiles"
# A function of rows (N, F).
Predict = Callable[[Any], Prediction]


def fitted_copy(estimator: Any, x: np.ndarray, y: np.ndarray, seed: int, **settings: Any) -> Any:
    """A fitted copy of an estimator; each `random_state` of None, also of a part, is the seed."""
    from sklearn.base import clone

    copied: Any = clone(estimator, safe=False)
    known = copied.get_params() if hasattr(copied, "get_params") else {}
    unset = (name for name, value in known.items() if value is None and name.endswith("random_state"))
    if settings := dict.fromkeys(unset, seed) | settings:
        copied.set_params(**settings)
    copied.fit(x, y)
    return copied


def normal(mean: Any, std: Any) -> Prediction:
    """One normal distribution per row, of arrays (N,)."""
    return Prediction("Normal", {"loc": np.asarray(mean)[None], "scale": np.asarray(std)[None]})


def of_classes(estimator: Any, x: np.ndarray, y: np.ndarray, seed: int, family: str, classes: int) -> Predict:
    """What `predict_proba` returns, by class; a class that no training row has gets probability zero."""
    fitted = fitted_copy(estimator, x, y, seed)

    def predict(rows: Any) -> Prediction:
        found = np.zeros((1, len(rows), classes))
        found[0, :, np.asarray(fitted.classes_, dtype=int)] = np.asarray(fitted.predict_proba(rows)).T
        return Prediction(family, {"probs": found[..., 1] if family == "Bernoulli" else found})

    return predict


def of_numbers(estimator: Any, x: np.ndarray, y: np.ndarray, seed: int, quantiles: int | None) -> Predict:
    """A distribution of numbers, by the first rule of `Outside` that applies."""
    if quantiles is None and "return_std" in _parameters(estimator.predict):
        fitted = fitted_copy(estimator, x, y, seed)
        return lambda rows: normal(*fitted.predict(rows, return_std=True))
    values = _values(estimator, x, y, seed, quantiles)
    scale = bandwidth(estimator, x, y, seed, quantiles)
    return lambda rows: smoothed(values(rows), scale, quantiles is not None)


def bandwidth(estimator: Any, x: np.ndarray, y: np.ndarray, seed: int, quantiles: int | None) -> float:
    """The bandwidth that maximises the log score of held-out rows; every row is held out once."""
    from scipy.optimize import minimize_scalar

    folds = np.random.default_rng(seed).permutation(len(y)) % FOLDS
    held = [folds == fold for fold in range(FOLDS)]
    expected = f"at least {FOLDS} rows that differ in their targets"
    InputError.check(len(y) >= FOLDS and y.std() > 0.0, "y", expected, f"{len(y)} rows", "more rows")
    parts = [_values(estimator, x[~rows], y[~rows], seed, quantiles)(x[rows]) for rows in held]
    values, targets = np.concatenate(parts, axis=1), np.concatenate([y[rows] for rows in held])
    limits = np.array([NARROWEST, WIDEST]) * y.std()
    # The errors of one value have their optimum in closed form.
    if len(values) == 1:
        return float(np.clip(np.sqrt(np.mean((values[0] - targets) ** 2)), *limits))

    def loss(log_scale: float) -> float:
        scale = float(np.exp(log_scale))
        return -float(smoothed(values, scale, quantiles is not None).log_prob(targets).mean())

    found: Any = minimize_scalar(loss, bounds=tuple(np.log(limits)), method="bounded")
    return float(np.exp(found.x))


def smoothed(values: np.ndarray, scale: float, aleatoric: bool) -> Prediction:
    """(1/M) sum_m N(v_m, scale^2) of values (M, N).

    They are M draws, whose spread is epistemic, or with `aleatoric` one draw, which is this mixture.
    """
    if not aleatoric:
        return Prediction("Normal", {"loc": values, "scale": np.full_like(values, scale)})
    loc = values.T[None]
    same = {"weights": np.full_like(loc, 1.0 / loc.shape[-1]), "scale": np.full_like(loc, scale)}
    return Prediction("NormalMixture", {"loc": loc, **same})


def _values(
    estimator: Any, x: np.ndarray, y: np.ndarray, seed: int, quantiles: int | None
) -> Callable[[Any], np.ndarray]:
    """Rows -> values (M, N) of a new fit."""
    if quantiles is None:
        fitted = fitted_copy(estimator, x, y, seed)
        return lambda rows: _members(fitted, rows)
    by = quantiles_by(estimator)
    if not by or by == PREDICT:
        fitted = fitted_copy(estimator, x, y, seed)
        taken: dict[str, Any] = {by: levels(quantiles).tolist()} if by else {}
        return lambda rows: np.sort(_columns(fitted.predict(rows, **taken), quantiles).T, axis=0)
    each = [fitted_copy(estimator, x, y, seed, **{by: float(level)}) for level in levels(quantiles)]
    return lambda rows: np.sort([one.predict(rows) for one in each], axis=0)


def _columns(values: Any, wanted: int) -> np.ndarray:
    found = np.asarray(values, dtype=float)
    expected, got = f"one column per quantile, {wanted}", f"values of shape {found.shape}"
    InputError.check(
        found.ndim == 2 and found.shape[1] == wanted, "Outside", expected, got, "other quantiles"
    )
    return found


def levels(quantiles: int) -> np.ndarray:
    """The levels (m - 1/2) / M."""
    return (np.arange(quantiles) + 0.5) / quantiles


def quantiles_by(estimator: Any) -> str:
    """How an estimator gets the levels of quantiles: `PREDICT`, a parameter, or "" if `predict` returns columns.

    Raises InputError for one that does not fit quantiles.
    """
    if PREDICT in _parameters(estimator.predict):
        return PREDICT
    given = getattr(estimator, "get_params", dict)()
    if str(given.get("loss_function")).startswith("MultiQuantile"):
        return ""
    losses = {given[name] for name in ("loss", "objective") if name in given}
    names = [name for name in ("quantile", "alpha") if name in given]
    # Of many estimators `alpha` is a penalty, and the loss of some has to be set.
    good = names and losses <= {"quantile"} and (names[0] == "quantile" or losses)
    expected = 'an estimator of quantiles: a parameter `quantile`, or `alpha` with loss="quantile"'
    shown = ", ".join(f"{name}={given[name]!r}" for name in (*names, "loss") if name in given)
    InputError.check(good, "Outside", expected, f"{type(estimator).__name__}({shown})", "quantiles=None")
    return names[0]


def _members(fitted: Any, rows: np.ndarray) -> np.ndarray:
    """The values of the members of an average, or the value of the estimator itself, (M, N)."""
    from sklearn.ensemble import BaggingRegressor, ExtraTreesRegressor, RandomForestRegressor

    if not isinstance(fitted, BaggingRegressor | ExtraTreesRegressor | RandomForestRegressor):
        return np.asarray(fitted.predict(rows), dtype=float).reshape(1, len(rows))
    columns = getattr(fitted, "estimators_features_", [slice(None)] * len(fitted.estimators_))
    return np.stack(
        [one.predict(rows[:, each]) for one, each in zip(fitted.estimators_, columns, strict=True)]
    )


def _parameters(function: Any) -> Mapping[str, Any]:
    return inspect.signature(function).parameters
