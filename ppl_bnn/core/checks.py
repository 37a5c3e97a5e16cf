"""Checks of user input, made before anything is compiled.

Values are never broadcast, dropped, clipped or turned into NaN. The systems do not check this: NumPyro broadcasts y of
shape (5, 1) against (5,) to 25 terms without an error, and NaN in y gives a NaN loss with a warning only.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppl_bnn.core.arrays import chunks, rows_at, wide
from ppl_bnn.core.errors import InputError, ModelError
from ppl_bnn.core.names import clean_lines

# Rows that are looked at together: a copy of them is in memory.
ROWS_AT_ONCE = 16_384


def check_inputs(x: Any, features: Any = None, flat: bool = False, mapped: bool = False) -> Any:
    """Checked inputs: a float array (N, F) (integers stay integers), or a dict of arrays with one common first axis.

    `features` describes the training inputs, as `describe_inputs` returns it. With `flat`, (N,) is allowed too. With
    `mapped`, memory maps are not read into memory; `arrays.rows_at` reads and converts some of their rows.
    """
    checked: Any
    check = InputError.check
    if isinstance(x, Mapping):
        checked = {str(name): _numeric(f"x[{name!r}]", value, mapped) for name, value in x.items()}
        lengths = {name: len(array) for name, array in checked.items() if array.ndim}
        same = len(lengths) == len(checked) and len(set(lengths.values())) < 2
        check(checked, "x", "at least one array", "an empty dict", "{'name': array}")
        check(same, "x", "arrays with a common first axis", f"lengths {lengths}", "one row per observation")
        check(0 not in lengths.values(), "x", "at least one row", "no rows", "data")
    else:
        checked = _numeric("x", x, mapped)
        shape, enough = f"shape {checked.shape}", checked.ndim > (0 if flat else 1)
        check(enough, "x", "an array of shape (N, features)", shape, "x[:, None] for a single feature")
        check(0 not in checked.shape, "x", "at least one row and one column", shape, "data")
    if features is not None:
        described, expected = describe_inputs(checked), f"inputs like those of the training, {features}"
        check(described == features, "x", expected, described, "the same columns")
    return checked


def describe_inputs(x: Any) -> Any:
    """Shapes of the inputs without their rows."""
    if isinstance(x, Mapping):
        return {name: tuple(array.shape[1:]) for name, array in sorted(x.items())}
    return tuple(x.shape[1:])


def check_targets(y: Any, rows: int, column: bool = False) -> np.ndarray:
    """Checked targets, (N,) or (N, K): finite numbers, one row per row of x. With `column`, (N, 1) is allowed too."""
    y = _numeric("y", y)
    check, shape = InputError.check, f"shape {y.shape}"
    single = y.ndim == 2 and y.shape[1] == 1 and not column
    check(not single, "y", "targets of shape (N,)", shape, "y[:, 0]")
    check(y.ndim in (1, 2), "y", "targets of shape (N,) or (N, K)", shape, "one row per row of x")
    check(len(y) == rows, "y", f"{rows} rows, as many as x", len(y), "the same rows in x and y")
    return y


def check_labels(y: np.ndarray, classes: int) -> np.ndarray:
    """Checked class labels 0..classes-1 as integers, of which at least two occur."""
    check, most = InputError.check, classes - 1
    check(y.ndim == 1, "y", "class labels of shape (N,)", f"shape {y.shape}", "labels, not one-hot rows")
    broken = y[np.floor(y) != y]
    got = broken[0] if len(broken) else ""
    check(not len(broken), "y", "whole numbers as class labels", got, "labels 0, 1, ...")
    found = np.unique(y)
    got, advice = f"labels {found[0]:g}..{found[-1]:g}", "labels from 0, or a model with as many classes"
    check(found[0] >= 0 and found[-1] <= most, "y", f"labels 0..{most}", got, advice)
    single = f"the single class {found[0]:g}"
    check(len(found) > 1, "y", "at least two classes", single, "data of both classes")
    return y.astype(np.int64)


def text_labels(y: Any) -> tuple[Any, tuple[str, ...] | None]:
    """Encode targets that are text: codes 0..K-1, and the labels of the codes, sorted; else y unchanged, and None."""
    sequence = isinstance(y, list | tuple | np.ndarray) or hasattr(y, "to_numpy")
    array = np.asarray(y) if sequence else np.empty(0)
    column = array.dtype.kind in "UOT" and array.ndim == 1 and len(array) and not np.ma.isMaskedArray(y)
    if not (column and all(isinstance(value, str) for value in array)):
        return y, None
    labels, codes = np.unique(array.astype(str), return_inverse=True)
    for label in labels:
        # Predictions keep the labels, so they are not changed. Labels that files or terminals cannot show are refused.
        expected = "labels without control characters and half characters"
        InputError.check(clean_lines(label) == label, "y", expected, repr(str(label)), "other labels")
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
    unknown = [value for value in values if value not in known]
    expected = f"labels among {', '.join(map(repr, list(labels)[:10]))}"
    InputError.check(not unknown, "y", expected, repr(unknown[:1])[1:-1], "one of these")
    return np.array([known[value] for value in values], dtype=np.int64).reshape(y.shape)


def warn_of_labels(labels: Sequence[Any]) -> None:
    """Warn which label is which class."""
    listed = ", ".join(repr(label) for label in labels[:10]) + (", ..." if len(labels) > 10 else "")
    text = f"y: the labels {listed} are the classes 0 to {len(labels) - 1}, in this order"
    warnings.warn(f"{text}; predictions keep them", UserWarning, stacklevel=4)


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
    advice = "np.column_stack([y, np.ones(len(y))]) where every row was observed"
    pairs = y.ndim == 2 and y.shape[1] == 2
    InputError.check(pairs, "y", "values and events of shape (N, 2)", f"shape {y.shape}", advice)
    expected = "events 1 (observed), 0 (right-censored) or -1 (left-censored) in column 1"
    advice = "values in column 0, np.column_stack([value, event])"
    _check_rows(y[:, 1], ~np.isin(y[:, 1], (-1.0, 0.0, 1.0)), expected, advice)
    if positive:
        check_times(y[:, 0])


# Error messages of torch, JAX and NumPy about arrays of other frameworks.
_FOREIGN = ("must be Tensor, not", "Can't call numpy() on Tensor", "ndarray conversion method __array__()")


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
                text = f"columns {constant[:10].tolist()} have no variance; they are kept, and tell nothing"
                warnings.warn(f"{name}: {text}", UserWarning, stacklevel=3)


def data_hash(x: Any, y: np.ndarray) -> str:
    """SHA-256 over shapes, types and bytes of the data."""
    digest = hashlib.sha256()
    arrays = {**x, "y": y} if isinstance(x, Mapping) else {"x": x, "y": y}
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}{array.shape}{wide(array[:1]).dtype.str}".encode())
        for start, stop in chunks(len(array), ROWS_AT_ONCE):
            digest.update(np.ascontiguousarray(rows_at(array, slice(start, stop))))
    return digest.hexdigest()


def _numeric(name: str, value: Any, mapped: bool = False) -> np.ndarray:
    """The value as an array of float64 or int64; with `mapped`, a memory map is not converted."""
    check, imputing = InputError.check, "removing or imputing them"
    masked = np.ma.count_masked(value) if np.ma.isMaskedArray(value) else 0
    check(not masked, name, "finite numbers", f"{masked} masked values", imputing)
    tensor: Any = value
    try:
        stays = mapped and isinstance(value, np.memmap)
        array = value if stays else np.asarray(tensor.detach().cpu() if hasattr(value, "detach") else value)
    except ValueError as error:
        expected, advice = "a rectangular array of numbers", "rows of equal length"
        raise InputError.of(name, expected, str(error), advice) from error
    advice = "encoding text columns (ppl_bnn.data.read_csv does)"
    check(array.dtype.kind in "fiub", name, "numbers", f"an array of {array.dtype}", advice)
    if array.dtype.kind == "f":
        _check_finite(name, np.atleast_1d(array), imputing)
    return array if stays else wide(array)


def _check_finite(name: str, array: np.ndarray, advice: str) -> None:
    """Refuse NaN and infinities; rows are read a chunk at a time."""
    first, count = None, 0
    for start, stop in chunks(len(array), ROWS_AT_ONCE):
        bad = np.argwhere(~np.isfinite(array[start:stop]))
        if first is None and len(bad):
            first = (start + int(bad[0][0]), *map(int, bad[0][1:]))
        count += len(bad)
    if first is not None:
        kind = "NaN" if np.isnan(array[first]) else "an infinity"
        raise InputError.of(name, "finite numbers", f"{kind} at {first} and {count - 1} more", advice)
