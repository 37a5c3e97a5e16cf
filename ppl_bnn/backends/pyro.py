"""Pyro on torch, as an implementation of the protocol `System`."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# `pyro.distributions` has no `biject_to`.
from torch.distributions import biject_to, constraints
from torch.utils._pytree import tree_flatten, tree_leaves

from ppl_bnn.core.warning_filters import ignored

with ignored(category=FutureWarning), ignored(category=DeprecationWarning):
    # Pyro 1.9 compiles helpers with torch.jit.script, which torch 2.15 deprecates; users cannot change that.
    import pyro
    import pyro.distributions
    import pyro.poutine
    from pyro.poutine.messenger import Messenger
from ppl_bnn.backends import protocol
from ppl_bnn.backends.interpretation import SystemInterpretation, interpreted
from ppl_bnn.backends.native import Model
from ppl_bnn.backends.protocol import Function, Given, Site, TracedSite
from ppl_bnn.backends.pyro_distributions import Weighted, current_settings, resolve
from ppl_bnn.backends.pyro_recording import (
    MOST_RECORDED,
    Replayed,
    Unrecordable,
    check_compiler,
    overwrite,
    record,
)
from ppl_bnn.backends.pyro_session import TURN, opened, outside, recordings, rest, resting, transformed, typed
from ppl_bnn.core.arrays import whole
from ppl_bnn.core.errors import BNNError, ModelError, UnsupportedError
from ppl_bnn.core.processes import refuse_forked
from ppl_bnn.language.distributions import Distribution
from ppl_bnn.language.modules.torch_defaults import floating

# Number of blocks of draws from which recording the operations is faster, and bytes of the widest array in a block.
RECORDED_BLOCKS, BLOCK = 64, 2**20


class PyroInterpretation(SystemInterpretation):
    """Every primitive of the language as a primitive of Pyro."""

    primitives, scale = pyro, staticmethod(pyro.poutine.scale)
    weighted = Weighted

    def __init__(self, population: int | None, record: bool):
        super().__init__(population, record)
        self.plates: dict[str, Any] = {}
        self.settings = current_settings()

    def resolve(self, specification: Distribution) -> Any:
        return resolve(specification, self.settings)

    def start(self, init: Any) -> Any:
        return torch.as_tensor(init, dtype=floating())

    def record_output(self, f: Any) -> None:
        pyro.deterministic("f", f, event_dim=f.dim())

    def plate(self, name: str, rows: int) -> Any:
        # A plate is a site in Pyro, so all uses of `rows` in a run share one.
        if name not in self.plates:
            self.plates[name] = pyro.plate(name, rows)
        return self.plates[name]


def as_pyro(model: Model, population: int | None = None, record: bool = True) -> Model:
    """The model as an ordinary Pyro callable `(x, y=None)`.

    Parameters
    ----------
    model : callable
        A model in the language.
    population : int, optional
        Number of rows to which the likelihood is scaled.
    record : bool
        Whether to record f as a deterministic site.

    Returns
    -------
    callable
        A Pyro model.

    Examples
    --------
    >>> import torch
    >>> import ppl_bnn as bnn
    >>> from pyro.infer import Predictive
    >>> table, model = bnn.data.load("diabetes"), bnn.as_pyro(bnn.zoo.load("linear_regression"))
    >>> draws = Predictive(model, num_samples=5)(torch.as_tensor(table.x, dtype=torch.float32))
    >>> draws["y"].shape
    torch.Size([5, 442])
    """
    native: Any = interpreted(model, lambda: PyroInterpretation(population, record))
    native.sets_types = True
    return native


class _Assign(Messenger):
    """Latent sites and parameters take given values."""

    def __init__(self, given: Given):
        super().__init__()
        self.given = given

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.given.values:
            msg["value"] = self.given.latent(msg["name"], msg["fn"])
            msg["done"] = True

    def _pyro_param(self, msg: Any) -> None:
        name: Any
        name, init, constraint = (*msg["args"], None)[:3]
        protocol.check_unconstrained(name, msg["kwargs"].get("constraint", constraint), constraints.real)
        # The store would always return the start of the first run, for any seed.
        if name in self.given.values:
            msg["value"] = self.given.values[name]
        else:
            msg["value"] = init() if callable(init) else init
        msg["done"] = True


class _InSession(Messenger):
    """Every distribution has the type and device of the session, and every plate is over all rows."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows = rows
        self.dtype, self.device = floating(), torch.get_default_device()

    def _pyro_sample(self, msg: Any) -> None:
        if type(msg["fn"]).__name__ == "_Subsample":
            name, size, rows = msg["name"], msg["fn"].size, msg["fn"].subsample_size
            # A plate with as many rows as the data scales a mini-batch to a population.
            if rows not in (None, size, self.rows):
                plate, got = f"pyro.plate({name!r}, {size})", f"subsample_size={rows} of {size}"
                batches = (
                    f"mini-batches by SVI(batch_size={rows}) with a parameter population=None of the model"
                )
                advice = f"{plate}, and {batches}"
                raise UnsupportedError.of(f"plate {name!r}", "a plate over all rows in Pyro", got, advice)
        elif not msg["is_observed"]:
            msg["fn"] = _moved(msg["fn"], self.dtype, self.device)


def _moved(value: Any, dtype: Any, device: Any) -> Any:
    """Convert a tensor, distribution, transform or list of them to that type; unchanged if it has it already."""
    if isinstance(value, torch.Tensor):
        wanted = dtype if value.is_floating_point() else value.dtype
        return value if value.dtype == wanted and value.device == device else value.to(device, wanted)
    if type(value) in (list, tuple):
        parts = [_moved(each, dtype, device) for each in value]
        same = all(part is each for part, each in zip(parts, value, strict=True))
        return value if same else type(value)(parts)
    if not isinstance(value, torch.distributions.Distribution | torch.distributions.Transform):
        return value
    parts = {name: _moved(part, dtype, device) for name, part in vars(value).items()}
    changed = {name: part for name, part in parts.items() if part is not vars(value)[name]}
    if not changed:
        return value
    result = copy.copy(value)
    result.__dict__.update(changed)
    return result


def _in_session(model: Model) -> Model:
    """The model itself if it is a function; a copy in the type of the session if it is a module or bound to one.

    A `PyroModule` that was made before the fit is mostly in single precision, and the fit must not change it.
    `ModelError` is raised for a module that cannot be copied.
    """
    if isinstance(model, torch.nn.Module):
        return _copied(model)
    if isinstance(model, functools.partial) and isinstance(model.func, torch.nn.Module):
        return functools.partial(_copied(model.func), *model.args, **model.keywords)
    owner = getattr(model, "__self__", None)
    if isinstance(owner, torch.nn.Module) and isinstance(model, types.MethodType):
        return types.MethodType(model.__func__, _copied(owner))
    return model


def _copied(module: Any) -> Any:
    try:
        copied = copy.deepcopy(module)
    except Exception as error:
        expected = "a module that copy.deepcopy can copy, since a fit does not change the user's own"
        got, advice = f"{type(error).__name__}: {error}", "a module whose tensors are parameters or buffers"
        raise ModelError.of("", expected, got, advice) from error
    return copied.to(dtype=floating(), device=torch.get_default_device())


class _Generator:
    """`Randomness` from torch's generator, continuing from its state."""

    def normal(self, shape: tuple[int, ...], like: Any) -> Any:
        return torch.randn(shape, dtype=like.dtype, device=like.device)

    def sign(self, shape: tuple[int, ...], like: Any) -> Any:
        return 2.0 * self.keep(shape, like, 0.5) - 1.0

    def keep(self, shape: tuple[int, ...], like: Any, probability: float) -> Any:
        return (torch.rand(shape, dtype=like.dtype, device=like.device) < probability).to(like.dtype)


class Pyro(protocol.System):
    """The system `ppl="pyro"`."""

    name = "pyro"
    static_shapes = False
    maps_randomness = False  # its samplers write in place, which torch.func.vmap refuses
    turn = TURN
    transforms = torch.func
    biject_to = staticmethod(biject_to)
    all_rows = _InSession
    native: Any = staticmethod(as_pyro)
    in_session: Any = staticmethod(_in_session)
    outside: Any = staticmethod(outside)

    @contextmanager
    def session(
        self, dtype: str, device: str, threads: int | None = None, compiled: bool = False
    ) -> Iterator[str]:
        refuse_forked()
        if compiled:
            check_compiler()
        index = protocol.cuda_index(device, _cuda_devices, "torch")
        chosen = torch.device("cpu") if index is None else torch.device("cuda", index)
        with opened(dtype, chosen, threads, compiled):
            yield str(chosen)

    def recorded(self) -> tuple[float, tuple[str, ...]]:
        found = recordings()
        return found.seconds, tuple(found.notes)

    def asarray(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        array = whole(np.array(value, order="C"))
        dtype = floating() if np.issubdtype(array.dtype, np.floating) else None
        # tensor() copies: a posterior must not change when the caller's array does.
        return torch.tensor(array, dtype=dtype)

    def to_numpy(self, array: Any) -> np.ndarray:
        return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)

    def trace(self, native: Any, x: Any, y: Any, given: Given, seed: Any) -> Mapping[str, Any]:
        _set_seed(seed)
        rest()
        with TURN, _Assign(given):
            try:
                return pyro.poutine.trace(typed(native)).get_trace(x, y).nodes
            except BNNError as error:
                # Pyro raises a copy with the shapes of all sites after the message; raise the original.
                raise error.__cause__ if isinstance(error.__cause__, BNNError) else error from None

    def describe(self, native: Model, x: Any, y: Any) -> tuple[list[Site], list[TracedSite]]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            traced = self.run(native, x, y, seed=0)
        return protocol.described(traced, biject_to)

    @contextmanager
    def counted(self) -> Iterator[Callable[[], int]]:
        # It imports what optimisers and records need, too.
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            yield counter.get_total_flops

    def seeds(self, seed: int, count: int) -> Any:
        _set_seed(seed)
        return torch.tensor(np.random.default_rng(seed).integers(0, 2**31 - 1, size=count))

    def split(self, seed: Any, count: int) -> Any:
        # torch has one generator, from which each mapped function takes its own numbers.
        return torch.zeros(count, dtype=floating())

    def randomness(self, seed: Any) -> _Generator:
        _set_seed(seed)
        return _Generator()

    def value_and_grad(self, function: Function) -> Callable[..., tuple[Any, Any]]:
        both: Any = torch.func.grad_and_value(function)

        # torch returns (gradient, value), JAX (value, gradient).
        def swapped(*arguments: Any) -> tuple[Any, Any]:
            return both(*arguments)[::-1]

        return swapped

    def hessian(self, function: Function) -> Function:
        # At the first forward-mode derivative of a process torch scripts its own code, which it deprecates.
        quiet, quieter = ignored(category=FutureWarning), ignored(category=DeprecationWarning)
        return quiet(quieter(super().hessian(function)))

    def jvp(self, function: Function, at: Any, direction: Any) -> tuple[Any, Any]:
        # As in `hessian`.
        with ignored(category=FutureWarning), ignored(category=DeprecationWarning):
            return super().jvp(function, at, direction)

    def vmap(self, function: Function, in_axes: Any = 0) -> Function:
        # Without randomness="different" torch.func.vmap refuses a program that draws random numbers, as Pyro's do.
        return resting(torch.func.vmap(function, in_dims=in_axes, randomness="different"))

    def batched(self, function: Function, size: int) -> Callable[..., None]:
        inner = torch.no_grad()(self.vmap(function, in_axes=(0, None)))
        recorded: dict[Any, tuple[int, Callable[..., Any]] | None] = {}

        def filled(w: Mapping[str, Any], x: Any, into: np.ndarray) -> None:
            # Results are written in place: pieces between the temporaries of later ones would fragment the memory, and
            # new memory costs more than the network.
            target = torch.from_numpy(into)
            kept = tuple(slice(length) for length in into.shape[1:])
            done = 0
            if len(into) >= RECORDED_BLOCKS * size and target.device == next(iter(w.values())).device:
                shapes = tuple((a.shape, a.dtype) for a in tree_leaves((dict(w), x)) if a is not None)
                if shapes not in recorded:
                    if len(recorded) >= MOST_RECORDED:
                        recorded.clear()
                    recorded[shapes] = self._recorded(function, w, x, size)
                if found := recorded[shapes]:
                    done = _run_recorded(*found, w, x, target, kept)
            for start in range(done, len(into), size):
                piece = inner({name: value[start : start + size] for name, value in w.items()}, x)
                target[start : start + size] = piece[: len(into) - start, *kept]

        return filled

    def _recorded(
        self, function: Function, w: Mapping[str, Any], x: Any, size: int
    ) -> tuple[int, Callable[..., Any]] | None:
        """(draws, the operations of `function` on so many draws); None if they depend on the values of arrays.

        The record avoids the overhead of Python and torch.func for each block.
        """

        def recorded(draws: int) -> Any:
            mapped = function if draws == 1 else self.vmap(function, in_axes=(0, None))
            few = {name: value[0] if draws == 1 else value[:draws] for name, value in w.items()}
            with torch.no_grad():
                return record(mapped, *tree_flatten((few, x)))

        try:
            found = recorded(1)
            arrays = (node.meta.get("val") for node in found.module.graph.nodes if node.op == "call_function")
            widest = max((a.nbytes for a in arrays if isinstance(a, torch.Tensor)), default=1)
            draws = max(1, min(size, BLOCK // max(1, widest)))
            if draws > 1:
                found = recorded(draws)
        except Unrecordable:
            return None
        overwrite(found.module)

        def block(*arrays: Any) -> Any:
            return found.module.forward(*arrays, *found.held)[0]

        return draws, block

    def compile(self, function: Function) -> Function:
        return Replayed(torch.no_grad()(function))

    def compile_for(self, function: Function, arguments: tuple[Any, ...], quick: bool = False) -> Function:
        return resting(torch.no_grad()(function))


def _run_recorded(
    draws: int, record: Callable[..., Any], w: Mapping[str, Any], x: Any, target: Any, kept: Any
) -> int:
    """Fill whole blocks of `draws` from the front, and return the number of finished draws."""
    done = len(target) // draws * draws
    leaves = [leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)]
    blocks = (a[:done].unbind() if draws == 1 else a[:done].split(draws) for a in (target, *w.values()))
    with torch.inference_mode():
        for into, *values in zip(*blocks, strict=True):
            piece = record(*values, *leaves)
            into.copy_(piece[kept] if draws == 1 else piece[:, *kept])
    return done


def _cuda_devices() -> int:
    # `device_count` asks the driver's library alone; `is_available` asks whether the runtime can use a device.
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _set_seed(seed: Any) -> None:
    """Seed the generators that the session saves: torch.manual_seed would change those of all devices.

    None keeps their state. Under vmap a seed has no single value; each draw then takes random numbers from the
    generator that `seeds` set. A function that seeds cannot be recorded, as a fake seed has no value.
    """
    if seed is None or transformed():
        return
    number = int(seed)
    torch.default_generator.manual_seed(number)
    if torch.get_default_device().type == "cuda":
        torch.cuda.manual_seed(number)


SYSTEM = Pyro()
