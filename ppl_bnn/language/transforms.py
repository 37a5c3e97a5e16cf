"""Functions from model to model: the same program under an effect handler, for any method in either system.

A model that comes out is a model like any other: it keeps the name, the documentation and the bound arguments of the
one that went in, it can be sent to another process, and it can be transformed again.

- `with_precision_factors`: the model whose hyper-parameters were tuned, as a program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ppl_bnn.errors import InputError, ModelError, UnsupportedError, message, unknown_name
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution, elementwise_shape
from ppl_bnn.language.likelihoods import Gaussian
from ppl_bnn.language.primitives import Handler, Message

Model = Callable[..., Any]


def _transformed(model: Model, handler: Callable[[], Handler]) -> Model:
    """`model`, each run of it under a handler of its own; bound arguments stay bound to the outside."""
    if isinstance(model, functools.partial):
        return functools.partial(_transformed(model.func, handler), *model.args, **model.keywords)

    @functools.wraps(model)
    def transformed(*arguments: Any, **keywords: Any) -> Any:
        with handler():
            return model(*arguments, **keywords)

    if not hasattr(model, "__name__"):
        transformed.__name__ = transformed.__qualname__ = type(model).__name__
    return transformed


class _NamedSites(Handler):
    """A handler that changes the sites it is given by name, and says so where a run had no such site."""

    transform = ""

    def __init__(self, names: Mapping[str, Any] | frozenset[str]):
        self.names = names
        self.met: list[str] = []

    def process(self, msg: Message) -> None:
        if msg.kind not in ("sample", "param"):
            return
        self.met.append(msg.name)
        if msg.name not in self.names:
            return
        if msg.kind == "param" or msg.arguments["obs"] is not None:
            came = "a parameter without a prior" if msg.kind == "param" else "an observation"
            raise ModelError(
                f"{self.transform}: "
                + message(f"a random variable at site {msg.name!r}", came, "leaving that site out")
            )
        self.change(msg, msg.arguments["distribution"])

    def change(self, msg: Message, specification: Distribution) -> None:
        """Change the message of a named site."""

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            for name in self.names:
                if name not in self.met:
                    raise unknown_name(f"site of {self.transform}", name, self.met)


# --- tuned hyper-parameters -----------------------------------------------------------------------


class _PrecisionFactors(_NamedSites):
    transform = "with_precision_factors"

    def __init__(self, roots: Mapping[str, Any], likelihood: Gaussian | None):
        super().__init__(roots)
        self.roots = roots
        self.likelihood = likelihood

    def process(self, msg: Message) -> None:
        super().process(msg)
        if msg.kind == "observe" and self.likelihood is not None:
            came = msg.arguments["likelihood"]
            if not isinstance(came, Gaussian) or not isinstance(came.noise, int | float):
                described = type(came).__name__
                if isinstance(came, Gaussian):
                    described = "Gaussian with a noise that is a random variable or an array"
                raise UnsupportedError(
                    "with_precision_factors: "
                    + message(
                        "the likelihood Gaussian(noise) with a plain number as noise, where noise= is given",
                        described,
                        "noise=None",
                    )
                )
            msg.arguments["likelihood"] = self.likelihood

    def change(self, msg: Message, specification: Distribution) -> None:
        if specification.family != "Normal":
            raise UnsupportedError(
                "with_precision_factors: "
                + message(
                    f"a Normal prior at site {msg.name!r}, which has a precision",
                    specification.family,
                    "factors for sites with Normal priors only",
                )
            )
        root, scale = self.roots[msg.name], specification.arguments["scale"]
        if isinstance(root, np.ndarray):
            shape = elementwise_shape(specification)
            if root.shape != shape:
                raise InputError(
                    f"with_precision_factors, site {msg.name!r}: "
                    + message(
                        f"one factor, or factors of shape {shape}",
                        f"shape {root.shape}",
                        "the shape of the site",
                    )
                )
        if isinstance(scale, list | tuple):
            scale = np.asarray(scale, dtype=float)
        if not isinstance(scale, int | float):
            root = ops.asarray(root, like=scale)
        arguments = {**specification.arguments, "scale": scale / root}
        msg.arguments["distribution"] = replace(specification, arguments=arguments)


def with_precision_factors(
    model: Model, factors: Mapping[str, float | np.ndarray], noise: float | None = None
) -> Model:
    """The model whose Normal priors have their precisions multiplied: w ~ N(loc, scale^2 / factor) at each named site.

    This is the program that a Laplace approximation approximates once its hyper-parameters were tuned: log joint,
    draws from the prior and importance weights then speak of the same posterior.

    factors: site -> a positive number, or an array of the shape of the site. noise: where given, it takes the place of
    the known noise of the likelihood `Gaussian(number)`.

    Raises
    ------
    InputError: a factor or a noise that is not positive, or an array of another shape than its site.
    UnknownNameError, ModelError, UnsupportedError: when the model runs: no such random variable, a prior other than
    Normal, or a likelihood without a known noise.
    """
    roots: dict[str, Any] = {}
    for name, factor in factors.items():
        array = np.asarray(factor)
        real = np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)
        if not real or not array.size or not np.all(np.isfinite(array) & (array > 0)):
            raise InputError(
                f"with_precision_factors, site {name!r}: "
                + message("positive factors", repr(factor), "a factor of 1.0")
            )
        # A number stays a number, so that the system can keep the distribution from run to run.
        roots[name] = math.sqrt(array) if array.ndim == 0 else np.sqrt(array.astype(float))
    if noise is not None and (isinstance(noise, bool) or not isinstance(noise, int | float)):
        raise InputError("with_precision_factors: " + message("a number as noise", repr(noise), "noise=1.0"))
    likelihood = None if noise is None else Gaussian(float(noise))
    return _transformed(model, functools.partial(_PrecisionFactors, roots, likelihood))
