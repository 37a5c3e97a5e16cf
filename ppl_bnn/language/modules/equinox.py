"""`equinox.Module` in NumPyro."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.modules.jax import Jax, is_constant, key_of
from ppl_bnn.language.modules.protocol import Array, Call, Parameter, fan_in_of, kinds_of


class Equinox(Jax):
    """`equinox.Module`: a tree whose floating leaves are the parameters, rebuilt for each run and mapped over rows."""

    kind, sees_all_rows = "an equinox.Module", False

    def refuse(self, word: str, network: Any) -> None:
        tree = sys.modules["jax"].tree_util

        def special(node: Any) -> bool:
            return bool(kinds_of(node, "equinox") & {"Dropout", "StateIndex"})

        for path, node in tree.tree_flatten_with_path(network, is_leaf=special)[0]:
            kinds = kinds_of(node, "equinox")
            shown = ".".join(str(key_of(each)) for each in path)
            if "StateIndex" in kinds:
                raise ModelError.of(
                    f"{word}",
                    "a module without state",
                    f"a StateIndex at {shown!r}, as batch normalisation and spectral normalisation have",
                    "equinox.nn.LayerNorm or GroupNorm",
                )
            if (
                "Dropout" in kinds
                and not node.inference
                and not (isinstance(node.p, int | float) and node.p == 0)
            ):
                raise ModelError.of(
                    f"{word}",
                    "a module without randomness of its own",
                    f"Dropout {shown!r} in training, with p={node.p}",
                    "equinox.nn.inference_mode(network)",
                )

    def _leaves(self, network: Any) -> list[tuple[Any, Any, bool]]:
        """(path, leaf, whether it is a parameter)."""
        jnp = sys.modules["jax.numpy"]
        leaves = sys.modules["jax"].tree_util.tree_flatten_with_path(network)[0]
        return [
            (
                path,
                leaf,
                hasattr(leaf, "shape") and hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact),
            )
            for path, leaf in leaves
        ]

    def parameters(self, word: str, network: Any) -> list[Parameter]:
        found = []
        for path, leaf, is_parameter in self._leaves(network):
            if not is_parameter:
                continue
            keys = [key_of(each) for each in path]
            name, shape, kinds, _, own = self._parameter(word, network, keys, leaf, "equinox")
            inputs, gain = fan_in_of(kinds, str(keys[-1]), shape, math.prod(shape[1:]))
            found.append(Parameter(name, shape, inputs, own, gain, len(shape) < 2 or "Embedding" in kinds))
        return found

    def constants(self, network: Any) -> dict[str, Array]:
        return {
            ".".join(str(key_of(each)) for each in path): leaf
            for path, leaf, is_parameter in self._leaves(network)
            if not is_parameter and is_constant(leaf)
        }

    def mode(self, network: Any) -> Any:
        return None

    def run(
        self, call: Call, names: Sequence[str], values: Sequence[Array], inputs: tuple[Any, ...], like: Array
    ) -> Any:
        jax = sys.modules["jax"]
        rest = iter(values)
        leaves = [
            next(rest) if is_parameter else leaf for _, leaf, is_parameter in self._leaves(call.network)
        ]
        network = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(call.network), leaves)
        return network(*inputs) if call.coupled else jax.vmap(network)(*inputs)
