"""`equinox.Module` in NumPyro."""

from __future__ import annotations

import math
import sys
from typing import Any

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.modules import protocol
from ppl_bnn.language.modules.jax import Jax, dotted, is_constant, keys_of
from ppl_bnn.language.modules.protocol import Array, Arrays, Call, Inputs, Parameter


class Equinox(Jax):
    """`equinox.Module`: a tree whose floating leaves are the parameters, rebuilt for each run and mapped over rows."""

    kind, sees_all_rows = "an equinox.Module", False

    def refuse(self, word: str, network: Any) -> None:
        def special(node: Any) -> bool:
            return bool(protocol.kinds_of(node, "equinox") & {"Dropout", "StateIndex"})

        flatten = sys.modules["jax"].tree_util.tree_flatten_with_path
        for path, node in flatten(network, is_leaf=special)[0]:
            kinds, name = protocol.kinds_of(node, "equinox"), dotted(path)
            if "StateIndex" in kinds:
                got = f"a StateIndex at {name!r}, as batch normalisation and spectral normalisation have"
                raise ModelError.of(word, "a module without state", got, "equinox.nn.LayerNorm or GroupNorm")
            never = "Dropout" in kinds and isinstance(node.p, int | float) and node.p == 0
            if "Dropout" in kinds and not node.inference and not never:
                got = f"Dropout {name!r} in training, with p={node.p}"
                advice = "equinox.nn.inference_mode(network)"
                raise ModelError.of(word, "a module without randomness of its own", got, advice)

    def _leaves(self, network: Any) -> list[tuple[Any, Any, bool]]:
        """(path, leaf, whether it is a parameter)."""
        jax = sys.modules["jax"]
        return [
            (path, leaf, protocol.is_array(leaf) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact))
            for path, leaf in jax.tree_util.tree_flatten_with_path(network)[0]
        ]

    def parameters(self, word: str, network: Any) -> list[Parameter]:
        found = []
        for path, leaf, is_parameter in self._leaves(network):
            if not is_parameter:
                continue
            keys = keys_of(path)
            name, shape, kinds, _, own = self._parameter(word, network, keys, leaf, "equinox")
            inputs, gain = protocol.fan_in_of(kinds, str(keys[-1]), shape, math.prod(shape[1:]))
            found.append(Parameter(name, shape, inputs, own, gain, len(shape) < 2 or "Embedding" in kinds))
        return found

    def constants(self, network: Any) -> dict[str, Array]:
        leaves = self._leaves(network)
        return {dotted(path): leaf for path, leaf, parameter in leaves if not parameter and is_constant(leaf)}

    def run(self, call: Call, values: Arrays, inputs: Inputs, like: Array) -> Any:
        jax = sys.modules["jax"]
        rest = iter(values)
        leaves = [next(rest) if parameter else leaf for _, leaf, parameter in self._leaves(call.network)]
        network = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(call.network), leaves)
        return network(*inputs) if call.coupled else jax.vmap(network)(*inputs)
