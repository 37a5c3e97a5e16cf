"""Standardisation of inputs and targets on the training rows, and its inverse for predictions.

With mean m and population standard deviation d of each column over the training rows,

    x' = (x - m_x) / d_x,      y' = (y - m_y) / d_y,      log p(y) = log p(y') - sum_k log d_yk.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.arrays import arrays_of, fields_in
from ppl_bnn.core.errors import InputError
from ppl_bnn.prediction.prediction import JointPrediction, Prediction

Inputs = np.ndarray | Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Standardisation:
    """Location and scale of the columns of one training set.

    Parameters
    ----------
    x_mean, x_scale : ndarray or mapping of str to ndarray
        Mean and standard deviation of each column, of the shape of one row of x. For a dict of arrays, dicts with the
        entries that are standardised (the floating-point ones).
    y_mean, y_scale : ndarray, optional
        Of the shape of one row of y, () or (K,). None if y keeps its units (labels, counts). A column without units,
        such as the event of a censored value, has mean 0 and scale 1.
    """

    x_mean: Inputs
    x_scale: Inputs
    y_mean: np.ndarray | None = None
    y_scale: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        x: Inputs,
        y: Any,
        task_is_regression: bool,
        y_columns: int | None = None,
        weight: np.ndarray | None = None,
    ) -> Standardisation:
        """Means and population standard deviations over the first axis of the training rows.

        Parameters
        ----------
        x
            An array (N, ...), or a dict of arrays. Integer arrays of a dict (indices) are not changed; a plain integer
            array is a table and is standardised.
        y
            Targets (N,) or (N, K), standardised if `task_is_regression`.
        task_is_regression : bool
            Whether y is standardised.
        y_columns : int, optional
            Number of the first columns of y that have units, all by default.
        weight : ndarray, optional
            How many times each row counts, (N,). It is the entry "weight" of x, which is not changed.

        Raises
        ------
        InputError
            If an array does not hold numbers, or has no rows.

        Warns
        -----
        UserWarning
            If a column does not vary. It gets scale 1.
        """
        if isinstance(x, Mapping):
            unchanged = () if weight is None else ("weight",)
            floating = {
                name: v for name, v in x.items() if np.asarray(v).dtype.kind == "f" and name not in unchanged
            }
            columns = {name: _columns(f"x[{name!r}]", value, weight) for name, value in floating.items()}
            x_mean: Inputs = {name: mean for name, (mean, _) in columns.items()}
            x_scale: Inputs = {name: scale for name, (_, scale) in columns.items()}
        else:
            x_mean, x_scale = _columns("x", x)
        if not task_is_regression:
            return cls(x_mean, x_scale)
        if y_columns is None:
            return cls(x_mean, x_scale, *_columns("y", y, weight))
        marks = np.asarray(y).shape[1] - y_columns
        y_mean, y_scale = _columns("y", np.asarray(y)[:, :y_columns], weight)
        return cls(x_mean, x_scale, np.append(y_mean, np.zeros(marks)), np.append(y_scale, np.ones(marks)))

    def inputs(self, x: Inputs) -> Inputs:
        """x in standard units, floating dtype kept. Raises InputError for columns unlike those of the training rows."""
        mean: Any = self.x_mean
        scale: Any = self.x_scale
        if not isinstance(mean, Mapping):
            one = not isinstance(x, Mapping)
            InputError.check(one, "", "x as one array", "a dict", "the array form of the training inputs")
            return _standardised("x", x, mean, scale)
        if not isinstance(x, Mapping) or not set(mean) <= set(x):
            got = f"a dict with {', '.join(x)}" if isinstance(x, Mapping) else type(x).__name__
            expected = f"x as a dict with {', '.join(mean)}"
            raise InputError.of("", expected, got, "the entries of the training inputs")
        found = {name: _standardised(f"x[{name!r}]", x[name], mean[name], scale[name]) for name in mean}
        return dict(x) | found

    def targets(self, y: Any) -> np.ndarray:
        """y in standard units, or y itself if targets keep their units. Raises InputError for other columns."""
        if self.y_mean is None or self.y_scale is None:
            return np.asarray(y)
        return _standardised("y", y, self.y_mean, self.y_scale)

    def original_inputs(self, x: Inputs) -> Inputs:
        """Inputs in original units, the inverse of `inputs` up to rounding."""
        if isinstance(x, Mapping) and isinstance(self.x_mean, Mapping):
            return dict(x) | {name: x[name] * self.x_scale[name] + mean for name, mean in self.x_mean.items()}
        return np.asarray(x) * np.asarray(self.x_scale) + np.asarray(self.x_mean)

    def original_targets(self, y: Any) -> np.ndarray:
        """Targets in original units, the inverse of `targets`."""
        if self.y_mean is None or self.y_scale is None:
            return np.asarray(y)
        return np.asarray(y) * self.y_scale + self.y_mean

    def prediction[Kind: (Prediction, JointPrediction)](self, prediction: Kind) -> Kind:
        """The prediction in the original units of y, from one in standard units."""
        if self.y_mean is None or self.y_scale is None:
            return prediction
        return prediction.rescale(self.y_mean, self.y_scale)

    def arrays(self) -> dict[str, np.ndarray]:
        """All values as named arrays, for storage. `from_arrays` is the inverse."""
        return arrays_of(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Standardisation:
        """The standardisation with the arrays that `arrays` returns."""
        # A dict of arrays without a floating-point one has none that are standardised.
        found: dict[str, Any] = {"x_mean": {}, "x_scale": {}}
        return cls(**found | fields_in(arrays))


def _columns(name: str, given: Any, weight: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale over the rows, with scale 1 for columns that do not vary."""
    values = np.asarray(given)
    good = values.dtype.kind in "biuf" and values.ndim and len(values)
    got = f"{values.dtype} of shape {values.shape}"
    InputError.check(good, "", f"{name} as numbers, with at least one row", got, "encoding categories")
    values = values.astype(np.float64, copy=False)
    if weight is None:
        mean, scale = np.asarray(values.mean(axis=0)), np.asarray(values.std(axis=0))
    else:
        values, weight = values[weight > 0.0], weight[weight > 0.0]
        mean = np.asarray(np.average(values, axis=0, weights=weight))
        scale = np.asarray(np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight)))
    # In floating point the standard deviation of a constant is seldom exactly 0, but its range is.
    constant = np.asarray((values.max(axis=0) == values.min(axis=0)) | (scale == 0.0))
    if constant.any():
        indices = [tuple(index) for index in np.argwhere(constant).tolist() if index]
        which = ", ".join(str(index[0] if len(index) == 1 else index) for index in indices)
        text = f"zero variance in the training rows: {f'column {which} of ' if which else ''}{name}"
        warnings.warn(f"{text}; kept, with scale 1", UserWarning, stacklevel=4)
        scale = np.where(constant, 1.0, scale)
    return mean, scale


def _standardised(name: str, given: Any, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    values = np.asarray(given)
    good = values.shape[1:] == mean.shape and values.ndim == mean.ndim + 1
    expected = f"{name} of shape {('N', *mean.shape)}".replace("'", "")
    InputError.check(good, "", expected, f"shape {values.shape}", "the columns of the training rows")
    dtype = values.dtype if values.dtype.kind == "f" else np.float64
    return ((values - mean) / scale).astype(dtype, copy=False)
