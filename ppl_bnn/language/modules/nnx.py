"""`flax.nnx.Module` in NumPyro."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np

from ppl_bnn.language.modules import protocol
from ppl_bnn.language.modules.jax import Jax, dotted, is_constant, keys_of
from ppl_bnn.language.modules.protocol import Array, Arrays, Call, Inputs, Parameter

# In a path, a variable is an additional step of this class.
_name = functools.partial(dotted, left_out="GetAttrKey")


class Nnx(Jax):
    """`flax.nnx.Module`: split into parameters and other state, and merged into a new object for each run.

    `run` detects random parts and parts in training by the state that they change.
    """

    kind = "a flax.nnx.Module"

    def _split(self, network: Any) -> Any:
        nnx = sys.modules["flax.nnx"]
        return nnx.split(network, nnx.Param, nnx.RngCount, ...)

    def parameters(self, word: str, network: Any) -> list[Parameter]:
        found = []
        for path, leaf in _leaves(self._split(network)[1]):
            keys = keys_of(path, "GetAttrKey")
            name, shape, kinds, owner, own = self._parameter(word, network, keys, leaf, "flax")
            transposed = getattr(owner, "transpose_kernel", False) is True and len(shape) > 1
            several = bool(kinds & {"LinearGeneral", "Einsum"}) and len(shape) > 2
            if "LinearGeneral" in kinds:
                count = math.prod(owner.in_features)
            elif transposed:
                count = math.prod((*shape[:-2], *shape[-1:]))
            else:
                count = math.prod(shape[:-1])
            inputs, gain = protocol.fan_in_of(kinds, str(keys[-1]), shape, count)
            found.append(Parameter(name, shape, inputs, own, gain, not (transposed or several)))
        return found

    def constants(self, network: Any) -> dict[str, Array]:
        nnx = sys.modules["flax.nnx"]
        rest = nnx.split(network, nnx.Param, nnx.RngState, ...)[3]
        return {_name(path): leaf for path, leaf in _leaves(rest) if is_constant(leaf)}

    def mode(self, network: Any) -> Any:
        graph = self._split(network)[0]
        try:
            hash(graph)
        except TypeError:
            return None
        return graph

    def run(self, call: Call, values: Arrays, inputs: Inputs, like: Array) -> Any:
        output, changed, counted = self._run(call, values, inputs, like)
        if counted and self._is_random(call, inputs, protocol.type_name(like)):
            changed = [*changed, *counted]
        if changed:
            expected = (
                "a module that is a function: without randomness of its own, and with statistics that stay"
            )
            advice = "network.eval(), which turns dropout off and takes the running statistics"
            raise call.error(expected, f"changes of {', '.join(map(repr, changed))}", advice)
        return output

    def _run(
        self, call: Call, values: Arrays, inputs: Inputs, like: Array, ahead: int = 0
    ) -> tuple[Any, list[str], list[str]]:
        """The output, the variables that changed, and the random counts that changed.

        `ahead` is the number of random numbers that are assumed to have been drawn before.
        """
        nnx, tree = sys.modules["flax.nnx"], sys.modules["jax"].tree_util
        graph, parameters, counts, rest = self._split(call.network)
        numbered = [(path, leaf + ahead) for path, leaf in _leaves(counts)]
        converted = []
        for path, leaf in _leaves(rest):
            if type(leaf).__name__ == "ShapeDtypeStruct":
                advice = "a module that has been initialised"
                raise call.error(f"a value of {_name(path)!r}", "a shape only", advice)
            converted.append((path, self.native(leaf, like) if _may_be_cast(leaf) else leaf))
        # New variables, because those from `split` belong to the module.
        states = (
            (parameters, values),
            (counts, [leaf for _, leaf in numbered]),
            (rest, [leaf for _, leaf in converted]),
        )
        copy = nnx.merge(
            graph,
            *(tree.tree_unflatten(tree.tree_structure(state), list(leaves)) for state, leaves in states),
        )
        for _, part in nnx.iter_graph(copy):
            # A layer uses this type for its initial values, such as the state of a recurrence.
            if isinstance(part, nnx.Module) and "param_dtype" in vars(part):
                part.param_dtype = like.dtype
        output = copy(*inputs)
        *_, counts, rest = self._split(copy)

        def changed(before: Any, after: Any) -> list[str]:
            now = dict(_leaves(after))
            return [_name(path) for path, leaf in before if now.get(path) is not leaf]

        return output, changed(converted, rest), changed(numbered, counts)

    def _is_random(self, call: Call, inputs: Inputs, dtype: str) -> bool:
        """Whether the output depends on the random numbers: a module of Linen behind the bridge only counts them."""
        notes, key = call.known("random", inputs)
        if key not in notes:
            jax = sys.modules["jax"]
            with jax.enable_x64(dtype == "float64"), jax.ensure_compile_time_eval():
                like = jax.numpy.zeros(0, dtype=dtype)
                artificial = call.artificial_values(dtype), call.artificial(inputs, 2, dtype, 1)
                values, rows = protocol.mapped(lambda each: self.native(each, like), artificial)
                old, new = (self._run(call, values, rows, like, ahead)[0] for ahead in (0, 1))
                notes[key] = not np.array_equal(np.asarray(old), np.asarray(new))
        return notes[key]


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    """(path, leaf) of a tree."""
    return sys.modules["jax"].tree_util.tree_flatten_with_path(tree)[0]


def _may_be_cast(leaf: Any) -> bool:
    """Whether it is an array of floats; random keys have a type of their own."""
    jnp = sys.modules["jax.numpy"]
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
