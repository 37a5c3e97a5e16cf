"""Checks of user input, made before anything is compiled.

Each error states what was expected, what was given and what to try. Values are never broadcast, dropped, clipped or
turned into NaN. The systems do not check this: NumPyro broadcasts y of shape (5, 1) against (5,) to 25 terms without an
error, and NaN in y gives a NaN loss with a warning only.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError
from ppl_bnn.core.names import clean_lines


def _refuse(name: str, *cases: tuple[Any, str, str, str]) -> None:
    """Raise an InputError for the first case (wrong, expected, got, advice) that is wrong."""
    for wrong, *parts in cases:
        if wrong:
            raise InputError.of(name, *parts)


def check_inputs(x: Any, features: Any = None, flat: bool = False) -> Any:
    """Checked inputs: a float array (N, F) (integers stay integers), or a dict of arrays with one common first axis.

    `features` describes the training inputs, as `describe_inputs` returns it. With `flat`, (N,) is allowed too.
    """
    checked: Any
    if isinstance(x, Mapping):
        checked = {str(name): _numeric(f"x[{name!r}]", value) for name, value in x.items()}
        lengths = {name: len(array) for name, array in checked.items() if array.ndim}
        differ = len(lengths) < len(checked) or len(set(lengths.values())) > 1
        _refuse(
            "x",
            (not checked, "at least one array", "an empty dict", "{'name': array}"),
            (differ, "arrays with a common first axis", f"lengths {lengths}", "one row per observation"),
            (0 in lengths.values(), "at least one row", "no rows", "data"),
        )
    else:
        checked = _numeric("x", x)
        few, got, advice = (
            checked.ndim < (1 if flat else 2),
            f"shape {checked.shape}",
            "x[:, None] for a single feature",
        )
        _refuse(
            "x",
            (few, "an array of shape (N, features)", got, advice),
            (0 in checked.shape, "at least one row and one column", got, "data"),
        )
    described = describe_inputs(checked)
    if features is not None and described != features:
        expected = f"inputs like those of the training, {features}"
        raise InputError.of("x", expected, str(described), "the same columns")
    return checked


def describe_inputs(x: Any) -> Any:
    """Shapes of the inputs without their rows."""
    if isinstance(x, Mapping):
        return {name: tuple(array.shape[1:]) for name, array in sorted(x.items())}
    return tuple(x.shape[1:])


def check_targets(y: Any, rows: int, column: bool = False) -> np.ndarray:
    """Checked targets, (N,) or (N, K): finite numbers, one row per row of x. With `column`, (N, 1) is allowed too."""
    y = _numeric("y", y)
    shape = f"shape {y.shape}"
    single = y.ndim == 2 and y.shape[1] == 1 and not column
    _refuse(
        "y",
        (single, "targets of shape (N,)", shape, "y[:, 0]"),
        (y.ndim not in (1, 2), "targets of shape (N,) or (N, K)", shape, "one row per row of x"),
    )
    if len(y) != rows:
        raise InputError.of("y", f"{rows} rows, as many as x", f"{len(y)}", "the same rows in x and y")
    return y


def check_labels(y: np.ndarray, classes: int) -> np.ndarray:
    """Checked class labels 0..classes-1 as integers, of which at least two occur."""
    if y.ndim != 1:
        raise InputError.of("y", "class labels of shape (N,)", f"shape {y.shape}", "labels, not one-hot rows")
    broken = y[np.floor(y) != y]
    if len(broken):
        raise InputError.of("y", "whole numbers as class labels", f"{broken[0]}", "labels 0, 1, ...")
    found = np.unique(y)
    low, high, wanted = found[0], found[-1], f"labels 0..{classes - 1}"
    advice = "labels from 0, or a model with as many classes"
    _refuse(
        "y",
        (low < 0 or high >= classes, wanted, f"labels {low:g}..{high:g}", advice),
        (len(found) < 2, "at least two classes", f"the single class {low:g}", "data of both classes"),
    )
    return y.astype(np.int64)


def text_labels(y: Any) -> tuple[Any, tuple[str, ...] | None]:
    """Encode targets that are text: codes 0..K-1, and the labels of the codes, sorted; else y unchanged, and None."""
    array = np.asarray(y) if isinstance(y, list | tuple | np.ndarray) or hasattr(y, "to_numpy") else None
    if array is None or array.dtype.kind not in "UOT" or array.ndim != 1 or np.ma.isMaskedArray(y):
        return y, None
    if not len(array) or not all(isinstance(value, str) for value in array):
        return y, None
    labels, codes = np.unique(array.astype(str), return_inverse=True)
    for label in labels:
        # Predictions keep the labels, so they are not changed. Labels that files or terminals cannot show are refused.
        if clean_lines(label) != label:
            expected = "labels without control characters and half characters"
            raise InputError.of("y", expected, repr(str(label)), "other labels")
    return codes.astype(np.int64), tuple(str(label) for label in labels)


def labels_from_one(y: np.ndarray, classes: int) -> tuple[np.ndarray, tuple[int, ...] | None]:
    """Encode labels 1..K for a model of K classes: codes 0..K-1, and the labels; else y unchanged, and None."""
    if y.size and y.min() == 1 and y.max() == classes and np.array_equal(np.floor(y), y):
        return y - 1, tuple(range(1, classes + 1))
    return y, None


def label_codes(y: np.ndarray, labels: Sequence[Any]) -> np.ndarray:
    """The class 0..K-1 of each target, given as one of `labels`, which are in the order of the classes."""
    known = {label: code for code, label in enumerate(labels)}
    values = y.reshape(-1).tolist()
    for value in values:
        if value not in known:
            expected = f"labels among {', '.join(map(repr, list(labels)[:10]))}"
            raise InputError.of("y", expected, repr(value), "one of these")
    return np.array([known[value] for value in values], dtype=np.int64).reshape(y.shape)


def warn_of_labels(labels: Sequence[Any]) -> None:
    """Warn which label is which class."""
    listed = ", ".join(repr(label) for label in labels[:10]) + (", ..." if len(labels) > 10 else "")
    warnings.warn(
        f"y: the labels {listed} are the classes 0 to {len(labels) - 1}, in this order; predictions keep them",
        UserWarning,
        stacklevel=4,
    )


def _check_rows(values: np.ndarray, wrong: np.ndarray, expected: str, advice: str) -> None:
    rows = np.flatnonzero(wrong)
    if len(rows):
        got = f"{values[rows[0]]:g} in row {rows[0]} and {len(rows) - 1} more"
        raise InputError.of("y", expected, got, advice)


def check_times(y: np.ndarray) -> None:
    """Check that times are positive."""
    advice = "the time since what starts the clock, or Censored(Gaussian(noise)) of values of any sign"
    _check_rows(y, ~(y > 0), "positive times", advice)


def check_censored(y: np.ndarray, positive: bool = False) -> None:
    """Check values and events (N, 2): an event is 1 (observed), 0 (the true value is larger) or -1 (it is smaller).

    With `positive`, values are times, above 0.
    """
    if y.ndim != 2 or y.shape[1] != 2:
        advice = "np.column_stack([y, np.ones(len(y))]) where every row was observed"
        raise InputError.of("y", "values and events of shape (N, 2)", f"shape {y.shape}", advice)
    expected = "events 1 (observed), 0 (right-censored) or -1 (left-censored) in column 1"
    advice = "values in column 0, np.column_stack([value, event])"
    _check_rows(y[:, 1], ~np.isin(y[:, 1], (-1.0, 0.0, 1.0)), expected, advice)
    if positive:
        check_times(y[:, 0])


# Error messages of torch, JAX and NumPy about arrays of other frameworks.
_FOREIGN = (
    "must be Tensor, not",
    "Can't call numpy() on Tensor",
    "numpy.ndarray conversion method __array__()",
)


def foreign_function(error: BaseException) -> ModelError | None:
    """The error for a model that called a function of one framework on arrays of another; None for other errors."""
    text = str(error)
    jax_on_torch = "Error interpreting argument to" in text and "torch" in text
    if not jax_on_torch and not any(words in text for words in _FOREIGN):
        return None
    first = f"{type(error).__name__}: {text.splitlines()[0]}"
    got = f"a function of torch, JAX or NumPy on arrays of another: {first}"
    advice = "bnn.ops (bnn.ops.tanh, bnn.ops.where, ...) in the model"
    return ModelError.of("", "functions that take the arrays of both systems", got, advice)


def warn_constant_columns(x: Any) -> None:
    """Warn about columns without variance, which are kept."""
    arrays = x if isinstance(x, Mapping) else {"x": x}
    for name, array in arrays.items():
        if array.ndim == 2 and len(array) > 1 and np.issubdtype(array.dtype, np.floating):
            constant = np.flatnonzero(np.ptp(array, axis=0) == 0)
            if len(constant):
                warnings.warn(
                    f"{name}: columns {constant[:10].tolist()} have no variance; they are kept, and tell nothing",
                    UserWarning,
                    stacklevel=3,
                )


def data_hash(x: Any, y: np.ndarray) -> str:
    """SHA-256 over shapes, types and bytes of the data."""
    digest = hashlib.sha256()
    arrays = {**x, "y": y} if isinstance(x, Mapping) else {"x": x, "y": y}
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.shape}{array.dtype.str}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _numeric(name: str, value: Any) -> np.ndarray:
    """The value as an array of float64 or int64."""
    imputing = "removing or imputing them"
    if np.ma.isMaskedArray(value) and np.ma.is_masked(value):
        got = f"{np.ma.count_masked(value)} masked values"
        raise InputError.of(name, "finite numbers", got, imputing)
    tensor: Any = value
    try:
        array = np.asarray(tensor.detach().cpu() if hasattr(value, "detach") else value)
    except ValueError as error:
        expected, advice = "a rectangular array of numbers", "rows of equal length"
        raise InputError.of(name, expected, str(error), advice) from error
    if array.dtype.kind not in "fiub":
        advice = "encoding text columns (ppl_bnn.data.read_csv does)"
        raise InputError.of(name, "numbers", f"an array of {array.dtype}", advice)
    if array.dtype.kind != "f":
        return array.astype(np.int64)
    if len(bad := np.argwhere(~np.isfinite(array))):
        first = tuple(map(int, bad[0]))
        kind = "NaN" if np.isnan(array[first]) else "an infinity"
        raise InputError.of(name, "finite numbers", f"{kind} at {first} and {len(bad) - 1} more", imputing)
    return array.astype(np.float64, copy=False)
