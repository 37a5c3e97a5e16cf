"""`equinox.Module` and `flax.nnx.Module` in NumPyro."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.modules import protocol
from ppl_bnn.language.modules.protocol import Array, Arrays, Call, Framework, Inputs, Parameter

# The path in a tree, and the array there.
Leaf = tuple[Any, Any]


class Jax(Framework):
    """The common part of NNX and Equinox.

    JAX maps over anything that it can trace, and `concrete` leaves transformations itself. A shared parameter is one
    leaf in NNX, and a separate leaf in each place in Equinox.
    """

    library, system = "jax", "numpyro"
    # The package of the layers; a class of steps of a path that name no part of a module.
    package, unnamed = "", ""

    def leaves(self, network: Any) -> tuple[list[Leaf], list[Leaf]]:
        """(path, leaf) of each parameter, and of everything else but random states."""
        raise NotImplementedError

    def layout(self, kinds: set[str], layer: Any, shape: tuple[int, ...]) -> tuple[int, bool]:
        """The inputs of a weight, and whether its axes are (..., inputs, outputs); `kinds` are classes of its layer."""
        raise NotImplementedError

    def keys(self, path: Sequence[Any]) -> list[Any]:
        """The names, numbers or keys of the steps of a path in a tree."""
        steps = [step for step in path if type(step).__name__ != self.unnamed]
        return [
            next(getattr(step, at) for at in ("name", "idx", "key") if hasattr(step, at)) for step in steps
        ]

    def dotted(self, path: Sequence[Any]) -> str:
        """The dotted name of a path in a tree."""
        return ".".join(map(str, self.keys(path)))

    def parameters(self, word: str, network: Any) -> list[Parameter]:
        found = []
        for path, leaf in self.leaves(network)[0]:
            name, keys, shape = self.dotted(path), self.keys(path), tuple(map(int, leaf.shape))
            got, advice = f"a parameter of {leaf.dtype}", "a variable that is no parameter"
            ModelError.check(protocol.is_float(leaf), word, f"{name!r} in floats", got, advice)
            layer = network
            with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):
                for key in keys[:-1]:
                    named = isinstance(key, str) and hasattr(layer, key)
                    layer = getattr(layer, key) if named else layer[key]
            kinds = protocol.kinds_of(layer, self.package)
            count, inputs_first = self.layout(kinds, layer, shape)
            inputs, gain = protocol.fan_in_of(kinds, str(keys[-1]), shape, count)
            own = leaf if _has_value(leaf) else None
            found.append(Parameter(name, shape, inputs, own, gain, inputs_first))
        return found

    def constants(self, network: Any) -> dict[str, Array]:
        jax, rest = sys.modules["jax"], self.leaves(network)[1]
        arrays = [(path, leaf) for path, leaf in rest if protocol.is_array(leaf) and _has_value(leaf)]
        # Random keys have a type of their own.
        keys = jax.dtypes.prng_key
        return {
            self.dotted(path): leaf for path, leaf in arrays if not jax.numpy.issubdtype(leaf.dtype, keys)
        }

    def start(self, own: Any) -> Array:
        return sys.modules["jax.numpy"].asarray(self.number(own), dtype=float)

    def number(self, own: Any) -> np.ndarray:
        array = np.asarray(own)
        # The short floating types of JAX are opaque to NumPy until they are widened.
        return array.astype(np.float32) if array.dtype.kind == "V" else array

    def native(self, value: Array, like: Array) -> Array:
        dtype = like.dtype if protocol.is_float(value) else None
        return sys.modules["jax.numpy"].asarray(value, dtype=dtype)

    @contextlib.contextmanager
    def concrete(self, dtype: Any) -> Iterator[Array]:
        jax = sys.modules["jax"]
        # Local to this thread and block; in a session it is already in effect.
        with jax.enable_x64(np.dtype(dtype) == np.float64), jax.ensure_compile_time_eval():
            yield jax.numpy.zeros(0, dtype=dtype)

    def count(self, call: Call, values: Arrays, inputs: Inputs, dtype: Any) -> int:
        jax = sys.modules["jax"]
        run = jax.make_jaxpr(lambda values, inputs: self.run(call, values, inputs, values[0]))
        with jax.enable_x64(np.dtype(dtype) == np.float64):
            return _operations(run(list(values), inputs))


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
                advice = "mode='eval'"
                ModelError.check(off, word, expected, f"{got}, with p={node.p}", advice)

    def in_evaluation(self, network: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(sys.modules["equinox"].nn.inference_mode(network))

    def leaves(self, network: Any) -> tuple[list[Leaf], list[Leaf]]:
        every = sys.modules["jax"].tree.leaves_with_path(network)
        parameters = [(path, leaf) for path, leaf in every if _is_parameter(leaf)]
        return parameters, [(path, leaf) for path, leaf in every if not _is_parameter(leaf)]

    def layout(self, kinds: set[str], layer: Any, shape: tuple[int, ...]) -> tuple[int, bool]:
        return math.prod(shape[1:]), len(shape) < 2 or "Embedding" in kinds

    def run(self, call: Call, values: Arrays, inputs: Inputs, like: Array) -> Any:
        jax, rest = sys.modules["jax"], iter(values)
        network = jax.tree.map(lambda leaf: next(rest) if _is_parameter(leaf) else leaf, call.network)
        return network(*inputs) if call.coupled else jax.vmap(network)(*inputs)


def _is_parameter(leaf: Any) -> bool:
    jnp = sys.modules["jax.numpy"]
    return protocol.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _operations(jaxpr: Any) -> int:
    """The total size of the outputs of all operations, including nested ones."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [each for each in sys.modules["jax"].tree.leaves(equation.params) if hasattr(each, "eqns")]
        sizes = (math.prod(getattr(each.aval, "shape", ())) for each in equation.outvars)
        total += sum(map(_operations, inner)) if inner else sum(sizes)
    return total


def _has_value(leaf: Any) -> bool:
    """Whether a leaf is more than a shape."""
    return type(leaf).__name__ != "ShapeDtypeStruct"


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

    def leaves(self, network: Any) -> tuple[list[Leaf], list[Leaf]]:
        nnx, tree = sys.modules["flax.nnx"], sys.modules["jax"].tree
        _, parameters, _, rest = nnx.split(network, nnx.Param, nnx.RngState, ...)
        return tree.leaves_with_path(parameters), tree.leaves_with_path(rest)

    def layout(self, kinds: set[str], layer: Any, shape: tuple[int, ...]) -> tuple[int, bool]:
        if getattr(layer, "transpose_kernel", False) is True and len(shape) > 1:
            return math.prod((*shape[:-2], shape[-1])), False
        several = bool(kinds & {"LinearGeneral", "Einsum"}) and len(shape) > 2
        return math.prod(layer.in_features if "LinearGeneral" in kinds else shape[:-1]), not several

    def in_evaluation(self, network: Any) -> contextlib.AbstractContextManager[Any]:
        found = sys.modules["flax.nnx"].merge(*self._split(network))
        found.eval()
        return contextlib.nullcontext(found)

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
        advice = "mode='eval', which turns dropout off and takes the running statistics"
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

        def converted(path: Any, leaf: Any) -> Any:
            expected, advice = f"a value of {self.dotted(path)!r}", "a module that has been initialised"
            call.check(_has_value(leaf), expected, "a shape only", advice)
            return self.native(leaf, like) if protocol.is_float(leaf) else leaf

        # New variables, because those from `split` belong to the module.
        counts, rest = tree.map(lambda count: count + ahead, counts), tree.map_with_path(converted, rest)
        # The leaves as they are before the run, which changes the variables.
        numbered, others = tree.leaves_with_path(counts), tree.leaves_with_path(rest)
        copy = nnx.merge(graph, tree.unflatten(tree.structure(parameters), list(values)), counts, rest)
        for _, part in nnx.iter_graph(copy):
            # A layer uses this type for its initial values, such as the state of a recurrence.
            if isinstance(part, nnx.Module) and "param_dtype" in vars(part):
                part.param_dtype = like.dtype
        output = copy(*inputs)
        *_, counts, rest = self._split(copy)

        def changed(before: list[Leaf], after: Any) -> list[str]:
            now = dict(tree.leaves_with_path(after))
            return [self.dotted(path) for path, leaf in before if now.get(path) is not leaf]

        return output, changed(others, rest), changed(numbered, counts)

    def _is_random(self, call: Call, inputs: Inputs, dtype: str) -> bool:
        """Whether the output depends on the random numbers: a module of Linen behind the bridge only counts them."""

        def found() -> bool:
            with self.concrete(dtype) as like:
                artificial = call.artificial_values(dtype), call.artificial(inputs, 2, dtype, 1)
                values, rows = protocol.mapped(lambda each: self.native(each, like), artificial)
                old, new = (self._run(call, values, rows, like, ahead)[0] for ahead in (0, 1))
                return not np.array_equal(np.asarray(old), np.asarray(new))

        return call.known("random", inputs, found)
