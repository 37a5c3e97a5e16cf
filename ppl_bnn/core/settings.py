"""Declared checks of the fields of a dataclass: a setting states what it accepts beside its default.

A check is called with the value. It returns None if the value is accepted, otherwise what was expected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, unknown_name

Check = Callable[[Any], str | None]


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A value among `known`; another value raises `UnknownNameError` with the nearest name."""

    known: Sequence[Any]

    def __call__(self, value: Any) -> str | None:
        # By type first: 1 equals True, and an array has no truth value. A string of NumPy is a string.
        found = any(value is each or (isinstance(value, str) and value == each) for each in self.known)
        return None if found else f"one of {', '.join(map(repr, self.known))}"


def whole(least: int = 1, most: float = math.inf, note: str = "") -> Check:
    """A whole number from `least` to `most`; `note` says what the bound means."""
    bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"

    def check(value: Any) -> str | None:
        good = isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= value <= most
        return None if good else f"a whole number {bounds}{note}"

    return check


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or NumPy, and not a bool."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool | complex)


def between(low: float = 0.0, high: float = math.inf) -> Check:
    """A number strictly between `low` and `high`."""
    wanted = "a positive number" if (low, high) == (0, math.inf) else f"a number between {low:g} and {high:g}"
    return lambda value: None if is_number(value) and low < value < high else wanted


def from_to(low: float, high: float) -> Check:
    """A number from `low` to `high`, both included."""
    wanted = f"a number from {low:g} to {high:g}"
    return lambda value: None if is_number(value) and low <= value <= high else wanted


def flag(value: Any) -> str | None:
    """True or False."""
    return None if isinstance(value, bool) else "True or False"


def optional(check: Check) -> Check:
    """None, or what `check` accepts."""
    return lambda value: None if value is None else check(value)


def setting(default: Any, check: Check, *, advice: str | None = None, kw_only: bool = False) -> Any:
    """A field of a dataclass with a default and a check (None for an accepted value, otherwise what was expected).

    `advice` is a value that an error suggests, by default the default. A subclass that declares another default keeps
    the check.
    """
    metadata = {"check": check, "advice": repr(default) if advice is None else advice}
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


def check_value(value: Any, check: Check, where: str, advice: str) -> None:
    """Raise InputError for a value that the check refuses."""
    wanted = check(value)
    InputError.check(wanted is None, where, str(wanted), repr(value), advice)


def check_settings(settings: Any, name: str) -> None:
    """Check the fields of a dataclass that were declared with `setting`; `name` is that of the object in errors.

    InputError is raised for a value that is not accepted, UnknownNameError for an unknown name.
    """
    for field in dataclasses.fields(settings):
        fields = (vars(base).get("__dataclass_fields__", {}) for base in type(settings).__mro__)
        metadata = (each[field.name].metadata for each in fields if field.name in each)
        declared = next((each for each in metadata if "check" in each), None)
        if declared is None:
            continue
        value, check = getattr(settings, field.name), declared["check"]
        wanted = check(value)
        if wanted is None:
            continue
        if isinstance(check, OneOf):
            raise unknown_name(field.name, value, map(str, check.known))
        raise InputError.of(f"{name} {field.name}", wanted, repr(value), f"{field.name}={declared['advice']}")
