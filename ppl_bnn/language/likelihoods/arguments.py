"""Checks of the arguments of a likelihood (parameters, f and y) before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError


def check_targets(
    likelihood: str, f: tuple[int, ...], y: tuple[int, ...] | None, wanted: tuple[int, ...]
) -> None:
    """Refuse targets that do not have the shape `wanted`."""
    if y is None or y == wanted:
        return
    advice = "y[:, 0]" if len(y) == 2 and y[1] == 1 and len(wanted) == 1 else f"targets of shape {wanted}"
    raise ModelError.of(f"{likelihood}", f"y of shape {wanted} for f of shape {f}", f"y of shape {y}", advice)


def check_positive(likelihood: str, name: str, value: Any) -> None:
    """Refuse plain numbers that are not positive; sampled values are arrays, and a form has no value."""
    if isinstance(value, int | float) and not 0 < value < math.inf:
        raise InputError.of(f"likelihoods.{likelihood}", f"a positive {name}", repr(value), f"{name}=1.0")


def is_known(value: Any) -> bool:
    """Whether a value is a plain number. A draw of a sampled scalar is an `np.float64`: a `float`, but not known."""
    return isinstance(value, int | float) and not isinstance(value, np.generic)


def check_one_or_each(likelihood: str, name: str, value: Any, f: tuple[int, ...]) -> None:
    """Refuse a parameter that is neither a scalar nor one per output."""
    shape = tuple(getattr(value, "shape", ()))
    if shape not in ((), f[1:]):
        raise ModelError.of(
            f"{likelihood}",
            f"one {name}, or one per output, {f[1:]}",
            f"{name} of shape {shape}",
            f"a number as {name}",
        )


def check_counts(likelihood: str, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
    """Check the shapes of f and y of a likelihood of counts."""
    if f[1] != 1:
        raise ModelError.of(
            f"{likelihood}",
            "one network output, the log rate",
            f"f of shape {f}",
            "f[:, :1], one count per row",
        )
    check_targets(likelihood, f, y, f[:1])


def check_count_values(likelihood: str, y: np.ndarray) -> None:
    """Refuse targets that are not counts."""
    wrong = y[(y < 0) | (np.floor(y) != y)]
    if len(wrong):
        raise InputError.of(
            "y", f"counts 0, 1, 2, ... for likelihoods.{likelihood}", f"{wrong[0]:g}", "whole numbers from 0"
        )
