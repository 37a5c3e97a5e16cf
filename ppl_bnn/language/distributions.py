"""Distribution specifications: what a model says, resolved in the system that runs it.

`dist.HalfNormal(1.0)` is a name with arguments and a shape. The running system turns it into its own
distribution of the same name; no framework is needed to write it down. Arguments that are plain numbers
are checked at once, so a negative scale is an error where it is written and not a NaN an hour later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.errors import InputError, message, unknown_name

# Family -> its arguments in order, with a default where the field has one; `...` means required.
FAMILIES: dict[str, dict[str, Any]] = {
    "Normal": {"loc": 0.0, "scale": 1.0},
    "HalfNormal": {"scale": 1.0},
    "LogNormal": {"loc": 0.0, "scale": 1.0},
    "StudentT": {"df": ..., "loc": 0.0, "scale": 1.0},
    "Laplace": {"loc": 0.0, "scale": 1.0},
    "Cauchy": {"loc": 0.0, "scale": 1.0},
    "HalfCauchy": {"scale": 1.0},
    "Gamma": {"concentration": ..., "rate": 1.0},
    "InverseGamma": {"concentration": ..., "rate": 1.0},
    "Exponential": {"rate": 1.0},
    "Beta": {"concentration1": ..., "concentration0": ...},
    "Uniform": {"low": 0.0, "high": 1.0},
    "Dirichlet": {"concentration": ...},
    "Bernoulli": {"logits": ...},
    "Categorical": {"logits": ...},
    "Poisson": {"rate": ...},
    "NormalMixture": {"weights": ..., "scales": ...},
}
POSITIVE = {"scale", "rate", "concentration", "concentration1", "concentration0", "df", "scales", "weights"}


@dataclass(frozen=True)
class Distribution:
    """A family, its arguments and its shape.

    Attributes
    ----------
    family: name of the family, as in both systems.
    arguments: name -> number or array of the running system.
    shape: batch shape to expand to, or None for the shape of the arguments.
    event_dims: how many trailing axes form one event (their log densities are summed).
    """

    family: str
    arguments: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    event_dims: int = 0

    def expand(self, shape: tuple[int, ...]) -> Distribution:
        """The same distribution, independent over `shape`."""
        return Distribution(self.family, self.arguments, tuple(map(int, shape)), self.event_dims)

    def to_event(self, dims: int | None = None) -> Distribution:
        """The last `dims` axes (all of the expanded shape by default) as one event."""
        if dims is None:
            dims = len(self.shape or ())
        return Distribution(self.family, self.arguments, self.shape, dims)


def elementwise_shape(specification: Distribution) -> tuple[int, ...]:
    """The shape of a draw from a family with one distribution per element, outside any plate."""
    if specification.shape is not None:
        return specification.shape
    shapes = (
        np.shape(value) if isinstance(value, list | tuple) else tuple(getattr(value, "shape", ()))
        for value in specification.arguments.values()
    )
    return np.broadcast_shapes(*shapes)


def _check(family: str, name: str, value: Any) -> None:
    """Numbers of Python and of NumPy; what is an array of a system may be traced and has no value yet."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.ravel().tolist()
    values = value if isinstance(value, list | tuple) else [value]
    for number in values:
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if not math.isfinite(number):
            raise InputError(f"{family}: " + message(f"a finite {name}", repr(number), "a number"))
        if name in POSITIVE and number <= 0:
            raise InputError(
                f"{family}: " + message(f"a positive {name}", repr(number), f"{name}={abs(number) or 1.0}")
            )


def distribution(family: str, *args: Any, **kwargs: Any) -> Distribution:
    """The specification of `family` with positional or named arguments, checked."""
    if family not in FAMILIES:
        raise unknown_name("distribution", family, FAMILIES)
    wanted = FAMILIES[family]
    if len(args) > len(wanted):
        raise InputError(
            f"{family}: " + message(f"at most {len(wanted)} arguments", str(len(args)), ", ".join(wanted))
        )
    given = dict(zip(wanted, args, strict=False))
    for name, value in kwargs.items():
        if name not in wanted:
            raise unknown_name(f"argument of {family}", name, wanted)
        if name in given:
            raise InputError(f"{family}: argument {name!r} was given twice")
        given[name] = value
    arguments = {}
    for name, default in wanted.items():
        value = given.get(name, default)
        if value is ...:
            raise InputError(
                f"{family}: " + message(f"an argument {name!r}", "none", f"{family}({name}=...)")
            )
        _check(family, name, value)
        arguments[name] = value
    if family == "NormalMixture":
        _check_mixture(arguments["weights"], arguments["scales"])
    if family == "Uniform":
        low, high = arguments["low"], arguments["high"]
        if isinstance(low, int | float) and isinstance(high, int | float) and not low < high:
            raise InputError(
                "Uniform: " + message("low < high", f"{low!r} and {high!r}", "Uniform(0.0, 1.0)")
            )
    return Distribution(family, arguments)


def _check_mixture(weights: Any, scales: Any) -> None:
    if len(weights) != len(scales):
        raise InputError(
            "NormalMixture: "
            + message("as many weights as scales", f"{len(weights)} and {len(scales)}", "weights=(0.5, 0.5)")
        )
    if isinstance(weights, list | tuple | np.ndarray) and abs(math.fsum(weights) - 1.0) > 1e-9:
        raise InputError(
            "NormalMixture: "
            + message("positive weights with sum 1", str(tuple(weights)), "weights=(0.5, 0.5)")
        )


def __getattr__(family: str) -> Any:
    """`dist.Normal`, `dist.HalfNormal`, ...: one constructor per family."""
    if family.startswith("_"):
        raise AttributeError(family)
    if family not in FAMILIES:
        raise AttributeError(str(unknown_name("distribution", family, FAMILIES)))

    def constructor(*args: Any, **kwargs: Any) -> Distribution:
        return distribution(family, *args, **kwargs)

    constructor.__name__ = constructor.__qualname__ = family
    constructor.__doc__ = (
        f"{family}({', '.join(FAMILIES[family])}), resolved in the system that runs the model."
    )
    return constructor


def __dir__() -> list[str]:
    return [*FAMILIES, "Distribution", "distribution"]
