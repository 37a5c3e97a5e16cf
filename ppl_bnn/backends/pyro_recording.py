"""Recorded functions of torch: their operations, replayed without the Python code that gave them.

A step of Pyro is some hundreds of small operations on arrays. Handlers, distributions and torch.func, which are Python,
take most of its time. A record has these operations alone, derivatives and random numbers included, as a program of
torch's C++ interpreter. It draws from the same generator in the same order, so a replay gives the numbers of the
function itself, to rounding.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ppl_bnn.backends.pyro_session import recordings, rest, transformed
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.warning_filters import ignored

# Number of calls with arguments of the same shapes after which a function is recorded, if more are not expected:
# recording takes as long as some hundred calls.
CALLS = 50
# Number of shapes of arguments for which a function keeps records.
MOST_RECORDED = 16
# The note of a session that could not record a function.
EAGER = (
    "the steps ran several times slower than recorded ones, as operations of the model depend on the values of its "
    "arrays: torch.where in place of if, and no .item() or .numpy(), let them be recorded"
)
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Unrecordable(Exception):
    """The operations of a function depend on the values of arrays."""


@dataclass
class Record:
    """The operations of a function for arguments of some shapes.

    `module` has the graph. Its arguments are the arrays among the leaves of the arguments, which are at `places`, and
    then `held`, all other arrays that the function reads. Its result has the structure `results`.
    """

    module: torch.fx.GraphModule
    places: list[int]
    held: list[torch.Tensor]
    results: Any

    def replay(self, leaves: list[Any], compiled: bool = False) -> Callable[[list[Any]], Any]:
        """The function of leaves like these, run by torch's C++ interpreter on a CPU, or compiled.

        torch deprecates this interpreter in favour of its compiler, which takes up to half a minute for a step;
        Pyro needs it, too.
        """
        places, held, results = self.places, self.held, self.results
        arrays = tuple(array.detach() for array in (*(leaves[place] for place in places), *held))
        # A number that is read from an array would be a constant of the interpreter.
        numbers = any(isinstance(node.meta.get("val"), _NUMBERS) for node in self.module.graph.nodes)
        run: Any = self.module.forward
        # The operations run once here, and must not advance the generator.
        with torch.random.fork_rng(devices=[]), ignored():
            if compiled:
                # Random numbers are those of the other operations, so that a seed gives the same fit.
                from torch import _inductor

                # Without the checks of `torch.compile` at each call, which take as long as the operations.
                run = _inductor.compile(self.module, list(arrays), options={"fallback_random": True})
            elif not numbers and all(array.device.type == "cpu" for array in arrays):
                # The interpreter has no lists of truth values, as derivatives of convolutions have.
                with suppress(RuntimeError):
                    # `torch.jit.trace` would keep the function as long as the process lives, megabytes for each fit.
                    graph, _ = torch._C._create_graph_by_tracing(
                        lambda *values: self.module.forward(*values), arrays, lambda _: "", True, False
                    )
                    run = torch._C._create_function_from_graph("replay", graph)

        def replay(leaves: list[Any]) -> Any:
            return tree_unflatten(list(run(*(leaves[place] for place in places), *held)), results)

        return replay


def record(function: Callable[..., Any], leaves: list[Any], structure: Any) -> Record:
    """The operations of a function, whose arguments have these leaves and this structure.

    `Unrecordable` is raised if they depend on the values of arrays. The arrays of a record are fake and have no values,
    so that none can become part of it.
    """
    # The first use of make_fx imports torch's compiler, which takes over a CPU second.
    from torch.fx.experimental.proxy_tensor import make_fx

    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    results: list[Any] = []

    def of_arrays(*arrays: Any) -> Any:
        values = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            values[place] = array
        found, spec = tree_flatten(function(*tree_unflatten(values, structure)))
        results.append(spec)
        return tuple(found)

    try:
        recorded = make_fx(of_arrays, tracing_mode="fake", _allow_non_fake_inputs=True)
        module = recorded(*(leaves[place] for place in places))
    except Exception as error:
        # Code that reads values raises errors of many kinds. Those of the function itself occur without a record, too.
        text = str(error).partition("\n")[0]
        raise Unrecordable(f"{type(error).__name__}: {text}") from error
    _remove_copies(module)
    return Record(module, places, _lift_held(module), results[-1])


def _remove_copies(module: torch.fx.GraphModule) -> None:
    """Remove operations whose result is their argument, bit for bit: a sum of one number, a power of one.

    Derivatives have many of them.
    """
    nodes = [node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    for node in nodes:
        written: Any = node.args[0] if node.target._schema.is_mutable else None
        # Where an array is written in place, its copies are not the array itself. New arrays of noise have none.
        if written is not None and not str(written.target).startswith("aten.empty"):
            return
    for node in nodes:
        source = _copied(node)
        if source is not None:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)


def _copied(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument that the result of an operation is equal to, if there is one."""
    first, second = (*node.args, None, None)[:2]
    if not isinstance(first, torch.fx.Node):
        return None
    before, after = (each.meta.get("val") for each in (first, node))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    if (before.shape, before.dtype, before.stride()) != (after.shape, after.dtype, after.stride()):
        return None
    # Rounding is a keyword.
    name, number = str(node.target).split(".")[1], isinstance(second, int | float) and not node.kwargs
    same = (
        name in _VIEWS
        or (name == "sum" and before.ndim == 0)
        or (name in ("pow", "mul", "div") and number and second == 1)
    )
    return first if same else None


def _lift_held(module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Make the arrays that the graph holds its last arguments, so that changes of their values are seen; return them.

    Detached, they share the memory to which an optimiser writes.
    """
    graph = module.graph
    nodes = [node for node in graph.nodes if node.op == "get_attr"]
    held = {str(node.target): getattr(module, str(node.target)) for node in nodes}
    if not all(isinstance(array, torch.Tensor) for array in held.values()):
        raise Unrecordable("an operation holds more than arrays")
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        arguments = {name: graph.placeholder(f"held{name}") for name in held}
    for name, argument in arguments.items():
        argument.meta["val"] = held[name]
    for node in nodes:
        node.replace_all_uses_with(arguments[str(node.target)])
        graph.erase_node(node)
    module.recompile()
    return [array.detach() for array in held.values()]


def check_compiler() -> None:
    """Refuse to compile where there is no C++ compiler; torch takes that of the environment variable CXX, or g++."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    wanted, advice = "a C++ compiler for torch", "to install g++ or clang++, CXX=its path, or compile=False"
    UnsupportedError.check(shutil.which(name) is not None, "compile=True", wanted, f"no {name!r}", advice)


@contextmanager
def expected(steps: int) -> Iterator[None]:
    """A context for a loop of so many steps."""
    session = recordings()
    session.steps, before = steps, session.steps
    try:
        yield
    finally:
        session.steps = before


class Replayed:
    """A function of arrays without side effects, recorded after `CALLS` calls with arguments of the same shapes.

    It is recorded at its first call in a loop of more steps. If it cannot be recorded, it is called itself, and a note
    of the session has the reason.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._seen: dict[Any, int] = {}
        self._replays: dict[Any, Callable[[list[Any]], Any]] = {}
        self._refused = False

    def __call__(self, *arguments: Any) -> Any:
        rest()
        leaves, structure = tree_flatten(arguments)
        shapes = [(a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in leaves]
        key = (structure, *shapes)
        replay = self._replays.get(key)
        if replay is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            session, begun = recordings(), time.perf_counter()
            # Inside a transform of torch.func the arrays are those of the transform.
            if self._refused or max(self._seen[key], session.steps) <= CALLS or transformed():
                return self._function(*arguments)
            try:
                replay = record(self._function, leaves, structure).replay(leaves, session.compiled)
            except Unrecordable as error:
                self._refused = True
                session.notes.append(f"{EAGER} ({error})")
                return self._function(*arguments)
            session.seconds += time.perf_counter() - begun
            if len(self._replays) >= MOST_RECORDED:
                self._replays.clear()
            self._replays[key] = replay
        return replay(leaves)


# Operations that give the same array where its shape does not change.
_VIEWS = {"expand", "view", "_unsafe_view", "alias", "detach"}
# Operations whose result does not share memory with an argument: matrix products, and elementwise operations.
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}
_RESHAPES = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def overwrite(module: torch.fx.GraphModule) -> None:
    """Replace f(a, ...) by an in-place operation, if no other operation reads a and the result has its shape and type.

    The memory is then already in the cache. torch's own `reinplace` pass compares numbers of elements, not shapes.
    """
    own: set[torch.fx.Node] = set()
    for node in module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            continue
        if any(returned.alias_info for returned in target._schema.returns) and target not in _RESHAPES:
            continue
        pointwise = torch.Tag.pointwise in target.tags
        first: Any = node.args[0] if node.args else None
        alone = first in own and len(first.users) == 1
        if pointwise or target in _PRODUCTS or (target in _RESHAPES and alone):
            own.add(node)
        if not (pointwise and alone and node.args.count(first) == 1):
            continue
        before, after = first.meta["val"], node.meta["val"]
        in_place = getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None)
        if before.shape == after.shape and before.dtype == after.dtype and in_place is not None:
            node.target = getattr(in_place, target._overloadname, target)
    module.recompile()
