"""The common part of Flax NNX and Equinox modules."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.modules.protocol import (
    Array,
    Arrays,
    Call,
    Framework,
    Inputs,
    is_array,
    kinds_of,
    mapped,
)


class Jax(Framework):
    """The common part of NNX and Equinox.

    JAX maps over anything that it can trace, and `on_numbers` leaves transformations itself. A shared parameter is one
    leaf in NNX, and a separate leaf in each place in Equinox.
    """

    library, system = "jax", "numpyro"

    def start(self, own: Any) -> Array:
        return sys.modules["jax.numpy"].asarray(self.number(own), dtype=float)

    def number(self, own: Any) -> np.ndarray:
        array = np.asarray(own)
        # The short floating types of JAX are opaque to NumPy until they are widened.
        return array.astype(np.float32) if array.dtype.kind == "V" else array

    def native(self, value: Array, like: Array) -> Array:
        jnp = sys.modules["jax.numpy"]
        return jnp.asarray(value, dtype=like.dtype if jnp.issubdtype(value.dtype, jnp.floating) else None)

    def on_numbers(self, call: Call, values: Arrays, inputs: Inputs, dtype: Any) -> np.ndarray:
        jax = sys.modules["jax"]
        # Local to this thread and block; in a session it is already in effect.
        with jax.enable_x64(np.dtype(dtype) == np.float64), jax.ensure_compile_time_eval():
            like = jax.numpy.zeros(0, dtype=dtype)
            values, inputs = mapped(lambda each: self.native(each, like), (list(values), inputs))
            output = self.run(call, values, inputs, like)
            return np.asarray(output) if isinstance(output, jax.Array) else output

    def count(self, call: Call, values: Arrays, inputs: Inputs, dtype: Any) -> int:
        jax = sys.modules["jax"]
        run = jax.make_jaxpr(lambda values, inputs: self.run(call, values, inputs, values[0]))
        with jax.enable_x64(np.dtype(dtype) == np.float64):
            return _operations(run(list(values), inputs).jaxpr)

    def _parameter(
        self, word: str, network: Any, keys: Sequence[Any], leaf: Any, root: str
    ) -> tuple[str, tuple[int, ...], set[str], Any, Any]:
        """(name, shape, the classes of its layer, that layer, the module's value) of a leaf."""
        jnp = sys.modules["jax.numpy"]
        name = ".".join(map(str, keys))
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            got, advice = f"a parameter of {leaf.dtype}", "a variable that is no parameter"
            raise ModelError.of(word, f"{name!r} in floats", got, advice)
        owner = network
        with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):
            for key in keys[:-1]:
                owner = getattr(owner, key) if isinstance(key, str) and hasattr(owner, key) else owner[key]
        return (
            name,
            tuple(map(int, leaf.shape)),
            kinds_of(owner, root),
            owner,
            leaf if _has_value(leaf) else None,
        )


def _operations(jaxpr: Any) -> int:
    """The total size of the outputs of all operations, including nested ones."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [
            each
            for value in equation.params.values()
            for each in (value if isinstance(value, list | tuple) else (value,))
            if hasattr(each, "eqns") or hasattr(each, "jaxpr")
        ]
        if inner:
            total += sum(_operations(getattr(each, "jaxpr", each)) for each in inner)
        else:
            total += sum(math.prod(getattr(each.aval, "shape", ())) for each in equation.outvars)
    return total


def _has_value(leaf: Any) -> bool:
    return type(leaf).__name__ != "ShapeDtypeStruct"


def is_constant(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers; random keys have a type of their own."""
    jax = sys.modules["jax"]
    return is_array(leaf) and _has_value(leaf) and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def keys_of(path: Sequence[Any], left_out: str = "") -> list[Any]:
    """The names, numbers or keys of the steps of a path in a tree, without steps of the class `left_out`."""
    steps = [step for step in path if type(step).__name__ != left_out]
    return [
        next(getattr(step, what) for what in ("name", "idx", "key") if hasattr(step, what)) for step in steps
    ]


def dotted(path: Sequence[Any], left_out: str = "") -> str:
    """The dotted name of a path in a tree."""
    return ".".join(map(str, keys_of(path, left_out)))
