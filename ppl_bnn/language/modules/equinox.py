"""`equinox.Module` in NumPyro."""

from __future__ import annotations

import math
import sys
from typing import Any

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.modules import protocol
from ppl_bnn.language.modules.jax import Jax, is_constant
from ppl_bnn.language.modules.protocol import Array, Arrays, Call, Inputs


class Equinox(Jax):
    """`equinox.Module`: a tree whose floating leaves are the parameters, rebuilt for each run and mapped over rows."""

    kind, package, sees_all_rows = "an equinox.Module", "equinox", False

    def refuse(self, word: str, network: Any) -> None:
        def special(node: Any) -> bool:
            return bool(protocol.kinds_of(node, "equinox") & {"Dropout", "StateIndex"})

        for path, node in sys.modules["jax"].tree.leaves_with_path(network, is_leaf=special):
            kinds, name = protocol.kinds_of(node, "equinox"), self.dotted(path)
            got = f"a StateIndex at {name!r}, as batch normalisation and spectral normalisation have"
            advice = "equinox.nn.LayerNorm or GroupNorm"
            ModelError.check("StateIndex" not in kinds, word, "a module without state", got, advice)
            if "Dropout" in kinds:
                off = node.inference or (isinstance(node.p, int | float) and node.p == 0)
                expected, got = "a module without randomness of its own", f"Dropout {name!r} in training"
                advice = "equinox.nn.inference_mode(network)"
                ModelError.check(off, word, expected, f"{got}, with p={node.p}", advice)

    def leaves(self, network: Any) -> list[tuple[Any, Any]]:
        every = sys.modules["jax"].tree.leaves_with_path(network)
        return [(path, leaf) for path, leaf in every if _is_parameter(leaf)]

    def layout(self, kinds: set[str], layer: Any, shape: tuple[int, ...]) -> tuple[int, bool]:
        return math.prod(shape[1:]), len(shape) < 2 or "Embedding" in kinds

    def constants(self, network: Any) -> dict[str, Array]:
        every = sys.modules["jax"].tree.leaves_with_path(network)
        rest = ((path, leaf) for path, leaf in every if is_constant(leaf) and not _is_parameter(leaf))
        return {self.dotted(path): leaf for path, leaf in rest}

    def run(self, call: Call, values: Arrays, inputs: Inputs, like: Array) -> Any:
        jax, rest = sys.modules["jax"], iter(values)
        network = jax.tree.map(lambda leaf: next(rest) if _is_parameter(leaf) else leaf, call.network)
        return network(*inputs) if call.coupled else jax.vmap(network)(*inputs)


def _is_parameter(leaf: Any) -> bool:
    jnp = sys.modules["jax.numpy"]
    return protocol.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
