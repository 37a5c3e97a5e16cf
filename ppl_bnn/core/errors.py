"""The errors that this library raises, by name.

Each message says three things in one order: what was expected, what came, what to try. Every class
derives from `BNNError`, and from the built-in class that a caller would otherwise expect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class BNNError(Exception):
    """The root of every error raised on purpose by ppl_bnn."""


class InputError(BNNError, ValueError):
    """Data or an argument that cannot be used as it is."""


class DamagedError(InputError):
    """A stored file that is not as it was written: another checksum, a part missing, or another kind of content."""


class UnknownNameError(BNNError, LookupError, ValueError):
    """A model, data set, method or argument that does not exist."""


class ModelError(BNNError, ValueError):
    """A program that is not a model: no `observe`, two sites with one name, a shape that does not fit."""


class UnsupportedError(BNNError, NotImplementedError):
    """A combination of model, method and system that is not defined, with the reason."""


class CurvatureError(BNNError, ArithmeticError):
    """A curvature that gives no Gaussian: singular, indefinite or not finite."""


class DivergenceError(BNNError, ArithmeticError):
    """An optimisation or a chain that left the finite numbers.

    last: the last values at which all was finite (constrained, by site), where the method keeps them.
    """

    last: Mapping[str, Any] | None = None


class BudgetError(BNNError, TimeoutError):
    """Time that ran out before there was anything to hand over."""


class DeviceError(BNNError, RuntimeError):
    """A device that is not there."""


class ClusterError(BNNError, ConnectionError):
    """A cluster that ended while it computed. What was handed over before is not affected."""


class MissingFrameworkError(BNNError, ImportError):
    """A system (NumPyro with JAX, or Pyro with torch) that cannot be imported."""


def message(expected: str, came: str, advice: str) -> str:
    """The one shape of an error message: expected, came, try."""
    return f"expected {expected}; came {came}; try {advice}"


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """An `UnknownNameError` that names the nearest thing that does exist."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UnknownNameError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")
