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


def check_inputs(x: Any, features: Any = None, flat: bool = False) -> Any:
    """Checked inputs.

    Parameters
    ----------
    x
        An array, or a dict of arrays.
    features : optional
        Description of the training inputs, as `describe_inputs` returns it.
    flat : bool, default False
        Whether (N,) is allowed too.

    Returns
    -------
    ndarray or dict of str to ndarray
        A float array (N, F) (integer arrays stay integers), or a dict of arrays with one common first axis.

    Raises
    ------
    InputError
        For invalid inputs.
    """
    if isinstance(x, Mapping):
        if not x:
            raise InputError.of("x", "at least one array", "an empty dict", "{'name': array}")
        arrays = {str(name): _numeric(f"x[{name!r}]", value) for name, value in x.items()}
        lengths = {name: len(array) for name, array in arrays.items() if array.ndim}
        if len(lengths) < len(arrays) or len(set(lengths.values())) != 1:
            raise InputError.of(
                "x", "arrays with a common first axis", f"lengths {lengths}", "one row per observation"
            )
        if next(iter(lengths.values())) == 0:
            raise InputError.of("x", "at least one row", "no rows", "data")
        checked: Any = arrays
    else:
        checked = _numeric("x", x)
        if checked.ndim < (1 if flat else 2):
            raise InputError.of(
                "x",
                "an array of shape (N, features)",
                f"shape {checked.shape}",
                "x[:, None] for a single feature",
            )
        if len(checked) == 0 or 0 in checked.shape:
            raise InputError.of("x", "at least one row and one column", f"shape {checked.shape}", "data")
    if features is not None and describe_inputs(checked) != features:
        raise InputError.of(
            "x",
            f"inputs like those of the training, {features}",
            str(describe_inputs(checked)),
            "the same columns",
        )
    return checked


def describe_inputs(x: Any) -> Any:
    """Shapes of the inputs without their rows."""
    if isinstance(x, Mapping):
        return {name: tuple(array.shape[1:]) for name, array in sorted(x.items())}
    return tuple(x.shape[1:])


def check_targets(y: Any, rows: int, column: bool = False) -> np.ndarray:
    """Checked targets: finite numbers, one row per row of x.

    Parameters
    ----------
    y
        The targets.
    rows : int
        Number of rows of x.
    column : bool, default False
        Whether (N, 1) is allowed too.

    Returns
    -------
    ndarray
        Shape (N,) or (N, K).

    Raises
    ------
    InputError
        For invalid targets.
    """
    y = _numeric("y", y)
    if y.ndim == 2 and y.shape[1] == 1 and not column:
        raise InputError.of("y", "targets of shape (N,)", f"shape {y.shape}", "y[:, 0]")
    if y.ndim not in (1, 2):
        raise InputError.of(
            "y", "targets of shape (N,) or (N, K)", f"shape {y.shape}", "one row per row of x"
        )
    if len(y) != rows:
        raise InputError.of("y", f"{rows} rows, as many as x", f"{len(y)}", "the same rows in x and y")
    return y


def check_labels(y: np.ndarray, classes: int) -> np.ndarray:
    """Checked class labels 0..classes-1 as integers, of which at least two occur.

    Parameters
    ----------
    y : ndarray
        The labels.
    classes : int
        Number of classes.

    Returns
    -------
    ndarray
        Integers.

    Raises
    ------
    InputError
        For invalid labels.
    """
    if y.ndim != 1:
        raise InputError.of("y", "class labels of shape (N,)", f"shape {y.shape}", "labels, not one-hot rows")
    broken = y[np.floor(y) != y]
    if len(broken):
        raise InputError.of("y", "whole numbers as class labels", f"{broken[0]}", "labels 0, 1, ...")
    found = np.unique(y)
    if found[0] < 0 or found[-1] >= classes:
        raise InputError.of(
            "y",
            f"labels 0..{classes - 1}",
            f"labels {found[0]:g}..{found[-1]:g}",
            "labels from 0, or a model with as many classes",
        )
    if len(found) < 2:
        raise InputError.of(
            "y", "at least two classes", f"the single class {found[0]:g}", "data of both classes"
        )
    return y.astype(np.int64)


def text_labels(y: Any) -> tuple[Any, tuple[str, ...] | None]:
    """Encode targets that are text.

    Parameters
    ----------
    y
        Targets.

    Returns
    -------
    codes
        Codes 0..K-1 for text, else y unchanged.
    labels : tuple of str, or None
        The labels of the codes, sorted. None if y is not text.

    Raises
    ------
    InputError
        For a label with characters that files or terminals cannot show.
    """
    array = np.asarray(y) if isinstance(y, list | tuple | np.ndarray) or hasattr(y, "to_numpy") else None
    if array is None or array.dtype.kind not in "UOT" or array.ndim != 1 or np.ma.isMaskedArray(y):
        return y, None
    if not len(array) or not all(isinstance(value, str) for value in array):
        return y, None
    labels, codes = np.unique(array.astype(str), return_inverse=True)
    for label in labels:
        # Predictions keep the labels, so they are not changed. Labels that files or terminals cannot show are refused.
        if clean_lines(label) != label:
            raise InputError.of(
                "y", "labels without control characters and half characters", repr(str(label)), "other labels"
            )
    return codes.astype(np.int64), tuple(str(label) for label in labels)


def labels_from_one(y: np.ndarray, classes: int) -> tuple[np.ndarray, tuple[int, ...] | None]:
    """Encode labels 1..K for a model of K classes.

    Parameters
    ----------
    y : ndarray
        Labels.
    classes : int
        Number of classes, K.

    Returns
    -------
    codes : ndarray
        Codes 0..K-1 for labels 1..K, else y unchanged.
    labels : tuple of int, or None
        The labels of the codes. None if y is unchanged.
    """
    if y.size and y.min() == 1 and y.max() == classes and np.array_equal(np.floor(y), y):
        return y - 1, tuple(range(1, classes + 1))
    return y, None


def label_codes(y: np.ndarray, labels: Sequence[Any]) -> np.ndarray:
    """The class 0..K-1 of each target, given as one of `labels`.

    Parameters
    ----------
    y : ndarray
        Targets.
    labels : sequence
        The labels, in the order of the classes.

    Returns
    -------
    ndarray
        Codes 0..K-1.

    Raises
    ------
    InputError
        If a target is not one of the labels.
    """
    known = {label: code for code, label in enumerate(labels)}
    values = y.tolist() if y.ndim == 1 else y.reshape(-1).tolist()
    unknown = [value for value in values if value not in known]
    if unknown:
        raise InputError.of(
            "y", f"labels among {', '.join(map(repr, list(labels)[:10]))}", repr(unknown[0]), "one of these"
        )
    return np.array([known[value] for value in values], dtype=np.int64).reshape(y.shape)


def warn_of_labels(labels: Sequence[Any]) -> None:
    """Warn which label is which class."""
    said = ", ".join(repr(label) for label in labels[:10]) + (", ..." if len(labels) > 10 else "")
    warnings.warn(
        f"y: the labels {said} are the classes 0 to {len(labels) - 1}, in this order; predictions keep them",
        UserWarning,
        stacklevel=4,
    )


def check_times(y: np.ndarray) -> None:
    """Check that times are positive.

    Parameters
    ----------
    y : ndarray
        Times.

    Raises
    ------
    InputError
        If a time is not positive.
    """
    wrong = np.flatnonzero(~(y > 0))
    if len(wrong):
        raise InputError.of(
            "y",
            "positive times",
            f"{y[wrong[0]]:g} in row {wrong[0]} and {len(wrong) - 1} more",
            "the time since what starts the clock, or Censored(Gaussian(noise)) of values of any sign",
        )


def check_censored(y: np.ndarray, positive: bool = False) -> None:
    """Check values and events (N, 2): an event is 1 (observed), 0 (the true value is larger) or -1 (it is smaller).

    Parameters
    ----------
    y : ndarray
        Values and events, (N, 2).
    positive : bool, default False
        Whether values are times, above 0.

    Raises
    ------
    InputError
        For invalid values or events.
    """
    if y.ndim != 2 or y.shape[1] != 2:
        raise InputError.of(
            "y",
            "values and events of shape (N, 2)",
            f"shape {y.shape}",
            "np.column_stack([y, np.ones(len(y))]) where every row was observed",
        )
    wrong = np.flatnonzero(~np.isin(y[:, 1], (-1.0, 0.0, 1.0)))
    if len(wrong):
        raise InputError.of(
            "y",
            "events 1 (observed), 0 (right-censored) or -1 (left-censored) in column 1",
            f"{y[wrong[0], 1]:g} in row {wrong[0]} and {len(wrong) - 1} more",
            "values in column 0, np.column_stack([value, event])",
        )
    if positive:
        check_times(y[:, 0])


# Error messages of torch, JAX and NumPy about arrays of other frameworks.
_FOREIGN = (
    "must be Tensor, not",
    "Can't call numpy() on Tensor",
    "numpy.ndarray conversion method __array__()",
)


def foreign_function(error: BaseException) -> ModelError | None:
    """The error for a model that called a function of one framework on arrays of another.

    Parameters
    ----------
    error : BaseException
        The error that the model raised.

    Returns
    -------
    ModelError or None
        None for other errors.
    """
    said = str(error)
    jax_on_torch = "Error interpreting argument to" in said and "torch" in said
    if not jax_on_torch and not any(words in said for words in _FOREIGN):
        return None
    return ModelError.of(
        "",
        "functions that take the arrays of both systems",
        f"a function of torch, JAX or NumPy on arrays of another: {type(error).__name__}: {said.splitlines()[0]}",
        "bnn.ops (bnn.ops.tanh, bnn.ops.where, ...) in the model",
    )


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
    """SHA-256 over shapes, types and bytes of the data.

    Parameters
    ----------
    x
        Inputs, an array or a dict of arrays.
    y : ndarray
        Targets.

    Returns
    -------
    str
        The hash.
    """
    digest = hashlib.sha256()
    arrays = {**x, "y": y} if isinstance(x, Mapping) else {"x": x, "y": y}
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.shape}{array.dtype.str}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _numeric(name: str, value: Any) -> np.ndarray:
    if np.ma.isMaskedArray(value) and np.ma.is_masked(value):
        raise InputError.of(
            name, "finite numbers", f"{np.ma.count_masked(value)} masked values", "removing or imputing them"
        )
    tensor: Any = value
    try:
        array = np.asarray(tensor.detach().cpu() if hasattr(value, "detach") else value)
    except ValueError as error:
        raise InputError.of(
            name, "a rectangular array of numbers", str(error), "rows of equal length"
        ) from error
    if array.dtype.kind not in "fiub":
        raise InputError.of(
            name,
            "numbers",
            f"an array of {array.dtype}",
            "encoding text columns (ppl_bnn.data.read_csv does)",
        )
    if array.dtype.kind in "f":
        bad = ~np.isfinite(array)
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            kind = "NaN" if np.isnan(array[first]) else "an infinity"
            raise InputError.of(
                name,
                "finite numbers",
                f"{kind} at {first} and {int(bad.sum()) - 1} more",
                "removing or imputing them",
            )
        return array.astype(np.float64) if array.dtype != np.float64 else array
    return array.astype(np.int64)
