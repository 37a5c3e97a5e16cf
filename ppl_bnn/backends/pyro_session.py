"""A session of torch and Pyro: their global state, which all threads share, and exclusive access to it.

The thread of a session holds `TURN`, and has torch's generator, Pyro's parameters and handlers, the validation flags
and the number of threads in the state of its own fit. It gives them up between two eager computations if another thread
has waited for a while (`rest`), and where a user's function is called (`outside`). The default floating type is never
changed: the library passes a type to every new tensor, and third-party code runs under `torch_defaults.defaults`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Imported first by `pyro.py`, which silences the warnings of the import.
import pyro
import pyro.distributions
import pyro.infer
import pyro.poutine
import torch

from ppl_bnn.backends.turns import Turn
from ppl_bnn.language.modules.torch_defaults import defaults, floating, set_floating

TURN = Turn()
# The transform of torch.func that this thread is in, or None.
_peek: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


# The validation flags of Pyro and torch: how each is read and set.
_VALIDATION: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (pyro.infer.is_validation_enabled, pyro.infer.enable_validation),
    (pyro.poutine.is_validation_enabled, pyro.poutine.enable_validation),
    (pyro.distributions.is_validation_enabled, pyro.distributions.enable_validation),
    (
        lambda: torch.distributions.Distribution._validate_args,
        torch.distributions.Distribution.set_default_validate_args,
    ),
)


@dataclass(frozen=True)
class Globals:
    """A snapshot of the global state that all threads share in torch and Pyro.

    States of torch's generators, Pyro's parameters, its stack of `handlers` with allocated dimensions, the number of
    threads, and environment variables of torch.
    """

    generator: torch.Tensor
    cuda: dict[int, torch.Tensor]
    store: tuple[dict[Any, Any], ...]
    validation: tuple[Any, ...]
    handlers: tuple[list[Any], list[Any]]
    threads: int
    environment: dict[str, str]

    @classmethod
    def now(cls, devices: Iterable[int]) -> Globals:
        """A snapshot of the current state, with the generators of these CUDA devices."""
        store = pyro.get_param_store()
        return cls(
            torch.default_generator.get_state(),
            {index: torch.cuda.get_rng_state(index) for index in devices},
            (store._params, store._constraints, store._param_to_name),
            tuple(enabled() for enabled, _ in _VALIDATION),
            (list(pyro.poutine.runtime._PYRO_STACK), list(pyro.poutine.runtime._DIM_ALLOCATOR._stack)),
            torch.get_num_threads(),
            # torch's compiler, which the first optimiser loads, writes its cache folder there.
            {name: value for name, value in os.environ.items() if name.startswith("TORCH")},
        )

    def put(self) -> None:
        """Restore the state of this snapshot."""
        torch.default_generator.set_state(self.generator)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        # `ParamStoreDict.scope` would separate parameters from the tensors that an optimiser has.
        store: Any = pyro.get_param_store()
        store._params, store._constraints, store._param_to_name = self.store
        for (_, enable), flag in zip(_VALIDATION, self.validation, strict=True):
            enable(flag)
        pyro.poutine.runtime._PYRO_STACK[:], pyro.poutine.runtime._DIM_ALLOCATOR._stack[:] = self.handlers
        torch.set_num_threads(self.threads)
        for name in [name for name in os.environ if name.startswith("TORCH")]:
            if name not in self.environment:
                del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@dataclass
class Recordings:
    """How functions are recorded in a session, the seconds that this has taken, and notes about it for the user.

    `compiled`: by torch's compiler, which needs one of C++. `steps` are those of the loop that runs.
    """

    compiled: bool = False
    steps: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class _Local(threading.local):
    def __init__(self) -> None:
        # The global state before each session of this thread, and the recordings of each.
        self.sessions: list[Globals] = []
        self.recordings: list[Recordings] = []


_LOCAL = _Local()


@contextlib.contextmanager
def opened(dtype: str, device: torch.device, threads: int | None, compiled: bool = False) -> Iterator[None]:
    """A session: inside, this thread has exclusive access to the global state, which is restored at the end."""
    devices = () if device.type == "cpu" else (device.index,)
    with TURN, contextlib.ExitStack() as stack:
        before = Globals.now(devices)
        _LOCAL.sessions.append(before)
        _LOCAL.recordings.append(Recordings(compiled))
        around = set_floating(getattr(torch, dtype))
        try:
            count = before.threads if threads is None else threads
            dataclasses.replace(before, store=({}, {}, {}), validation=(False,) * 4, threads=count).put()
            if torch.get_default_device() != device:
                # A default device makes torch call Python on every operation; on the CPU it is not needed.
                stack.enter_context(torch.device(device))
            yield
        finally:
            set_floating(around)
            _LOCAL.recordings.pop()
            _LOCAL.sessions.pop().put()


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """A context in which other threads may have their turn, and the global state is that before the session."""
    sessions = _LOCAL.sessions
    if not sessions:
        yield
        return
    own = Globals.now({index for before in sessions for index in before.cuda})
    sessions[0].put()
    _LOCAL.sessions, dtype = [], set_floating(None)
    depth = TURN.release_all()
    try:
        yield
    finally:
        # The global state is restored also if the user interrupts while this thread waits for its turn.
        interrupt = None
        while True:
            try:
                TURN.acquire(depth)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        _LOCAL.sessions = sessions
        set_floating(dtype)
        # Changes that the user made inside are kept.
        sessions[0] = Globals.now(sessions[0].cuda)
        own.put()
        if interrupt is not None:
            raise interrupt


def recordings() -> Recordings:
    """Those of the present session; outside of one, some that nobody reads."""
    return _LOCAL.recordings[-1] if _LOCAL.recordings else Recordings()


def transformed() -> bool:
    """Whether this thread is inside a transform of torch.func."""
    return _peek() is not None


def rest() -> None:
    """Let a thread that has waited for a while have its turn.

    Not inside a transform of torch.func, whose levels of derivatives are shared by all threads.
    """
    if TURN.wanted and _LOCAL.sessions and not transformed():
        with outside():
            pass


def resting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `rest()` before each call."""

    @functools.wraps(function)
    def rested(*arguments: Any) -> Any:
        rest()
        return function(*arguments)

    return rested


def typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function of torch or Pyro, whose tensors have the session's type if it does not specify one."""
    if getattr(function, "sets_types", False) or floating() is torch.get_default_dtype():
        return function

    def in_session(*arguments: Any, **keywords: Any) -> Any:
        with defaults()(floating()):
            return function(*arguments, **keywords)

    return in_session
