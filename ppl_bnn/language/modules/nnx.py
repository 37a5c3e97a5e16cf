"""`flax.nnx.Module` in NumPyro."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from ppl_bnn.language.modules import protocol
from ppl_bnn.language.modules.jax import Jax, has_value, is_constant
from ppl_bnn.language.modules.protocol import Array, Arrays, Call, Inputs


class Nnx(Jax):
    """`flax.nnx.Module`: split into parameters and other state, and merged into a new object for each run.

    `run` detects random parts and parts in training by the state that they change.
    """

    kind, package = "a flax.nnx.Module", "flax"
    # In a path, a variable is an additional step of this class.
    unnamed = "GetAttrKey"

    def _split(self, network: Any) -> Any:
        nnx = sys.modules["flax.nnx"]
        return nnx.split(network, nnx.Param, nnx.RngCount, ...)

    def leaves(self, network: Any) -> list[tuple[Any, Any]]:
        return sys.modules["jax"].tree.leaves_with_path(self._split(network)[1])

    def layout(self, kinds: set[str], layer: Any, shape: tuple[int, ...]) -> tuple[int, bool]:
        if getattr(layer, "transpose_kernel", False) is True and len(shape) > 1:
            return math.prod((*shape[:-2], shape[-1])), False
        several = bool(kinds & {"LinearGeneral", "Einsum"}) and len(shape) > 2
        return math.prod(layer.in_features if "LinearGeneral" in kinds else shape[:-1]), not several

    def constants(self, network: Any) -> dict[str, Array]:
        nnx, tree = sys.modules["flax.nnx"], sys.modules["jax"].tree
        rest = tree.leaves_with_path(nnx.split(network, nnx.Param, nnx.RngState, ...)[3])
        return {self.dotted(path): leaf for path, leaf in rest if is_constant(leaf)}

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
        expected = "a module that is a function: without randomness of its own, and with statistics that stay"
        got = f"changes of {', '.join(map(repr, changed))}"
        advice = "network.eval(), which turns dropout off and takes the running statistics"
        call.check(not changed, expected, got, advice)
        return output

    def _run(
        self, call: Call, values: Arrays, inputs: Inputs, like: Array, ahead: int = 0
    ) -> tuple[Any, list[str], list[str]]:
        """The output, the variables that changed, and the random counts that changed.

        `ahead` is the number of random numbers that are assumed to have been drawn before.
        """
        nnx, tree = sys.modules["flax.nnx"], sys.modules["jax"].tree
        graph, parameters, counts, rest = self._split(call.network)
        numbered = [(path, leaf + ahead) for path, leaf in tree.leaves_with_path(counts)]
        converted = []
        for path, leaf in tree.leaves_with_path(rest):
            expected, advice = f"a value of {self.dotted(path)!r}", "a module that has been initialised"
            call.check(has_value(leaf), expected, "a shape only", advice)
            converted.append((path, self.native(leaf, like) if protocol.is_float(leaf) else leaf))

        def filled(state: Any, leaves: Iterable[Any]) -> Any:
            """New variables, because those from `split` belong to the module."""
            return tree.unflatten(tree.structure(state), list(leaves))

        states = filled(counts, (leaf for _, leaf in numbered)), filled(rest, (leaf for _, leaf in converted))
        copy = nnx.merge(graph, filled(parameters, values), *states)
        for _, part in nnx.iter_graph(copy):
            # A layer uses this type for its initial values, such as the state of a recurrence.
            if isinstance(part, nnx.Module) and "param_dtype" in vars(part):
                part.param_dtype = like.dtype
        output = copy(*inputs)
        *_, counts, rest = self._split(copy)

        def changed(before: Any, after: Any) -> list[str]:
            now = dict(tree.leaves_with_path(after))
            return [self.dotted(path) for path, leaf in before if now.get(path) is not leaf]

        return output, changed(converted, rest), changed(numbered, counts)

    def _is_random(self, call: Call, inputs: Inputs, dtype: str) -> bool:
        """Whether the output depends on the random numbers: a module of Linen behind the bridge only counts them."""

        def found() -> bool:
            with self.concrete(dtype) as like:
                artificial = call.artificial_values(dtype), call.artificial(inputs, 2, dtype, 1)
                values, rows = protocol.mapped(lambda each: self.native(each, like), artificial)
                old, new = (self._run(call, values, rows, like, ahead)[0] for ahead in (0, 1))
                return not np.array_equal(np.asarray(old), np.asarray(new))

        return call.known("random", inputs, found)
