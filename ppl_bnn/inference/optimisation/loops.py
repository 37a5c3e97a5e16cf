"""The training loop of all methods that take many small steps, with schedules, batches and plateaus.

A step is a pure function over arrays of a system. JAX runs a stretch of steps as one compiled loop, torch one by one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError
from ppl_bnn.inference.method import Stopwatch
from ppl_bnn.language import ops

# Steps between two checks of the losses.
STRETCH = 100
FINAL_RATE = 0.1
# What errors about batches advise.
ALL_ROWS = "batch_size=None"
State = dict[str, Any]


# --- settings -------------------------------------------------------------------------------------


def rows_per_step(
    method: str, problem: Problem, batch_size: int | None, streamed: bool = False, advice: str = ALL_ROWS
) -> int | None:
    """The rows of a batch, None if each step takes all rows; refuses a model whose rows cannot be separated.

    Streamed rows always come in batches. `advice` is part of the error.
    """
    if batch_size is None or (batch_size == problem.rows and not streamed):
        return None
    where, wanted = f"{method} batch_size", f"at most the {problem.rows} rows there are"
    InputError.check(batch_size <= problem.rows, where, wanted, batch_size, ALL_ROWS)
    program = problem.program
    together = program.has_local or program.coupled
    wanted = "a model whose rows can be taken apart, for mini-batches"
    got = f"{'bnn.rows' if program.has_local else 'bnn.coupled'} in the model"
    UnsupportedError.check(not together, method, wanted, got, advice)
    declared = program.language or "population" in inspect.signature(program.native).parameters
    wanted = (
        "a plain model (x, y=None, *, population=None), which declares independent rows, for mini-batches"
    )
    UnsupportedError.check(declared, method, wanted, "a model without that argument", advice)
    return batch_size


def refuse_free_parameters(method: str, problem: Problem) -> None:
    """Refuse parameters without a prior, which have no posterior to approximate."""
    names = [site.name for site in problem.program.params]
    got = f"parameters without a prior: {names}"
    UnsupportedError.check(not names, method, "a prior over everything", got, "a prior, or SVI()")


# --- schedules and curves -------------------------------------------------------------------------


def falling(
    rate: float, steps: np.ndarray, constant: int, total: int, final: float = FINAL_RATE
) -> np.ndarray:
    """The learning rates at `steps`: `rate` for `constant` of the `total` steps, then linear down to `final * rate`."""
    through = np.clip((steps + 1 - constant) / max(1, total - constant), 0.0, 1.0)
    return rate * (1.0 - (1.0 - final) * through)


def first_half(total: int) -> int:
    """The number of steps at the full learning rate: half of them, rounded up."""
    return total - total // 2


def plateau(losses: np.ndarray, window: int, rising: bool = True) -> bool:
    """Whether the mean of the last `window` losses is not below that of the window before, within noise.

    That is max(2 standard errors of the difference, 0.1 nats). Without `rising` it may not be above it either.
    """
    if window < 2 or len(losses) < 2 * window:
        return False
    return level(losses[-2 * window : -window], losses[-window:], 2.0, rising)


def level(before: np.ndarray, last: np.ndarray, errors: float, rising: bool = False) -> bool:
    """Whether two means agree within max(`errors` standard errors, 0.1 nats); if `rising`, the last may be larger."""
    error = math.sqrt(before.var(ddof=1) / len(before) + last.var(ddof=1) / len(last))
    fall = before.mean() - last.mean()
    return bool((fall if rising else abs(fall)) <= max(errors * error, 0.1))


def divergence(method: str, losses: np.ndarray, advice: str, found: str = "") -> DivergenceError | None:
    """The error for the first loss that is not finite, or None; `found` is appended to what was got."""
    wrong = np.flatnonzero(~np.isfinite(losses))
    if not len(wrong):
        return None
    step = int(wrong[0])
    before, so_far = losses[:step], "the first loss"
    if step:
        so_far = f"before: first {before[0]:.6g}, lowest {before.min():.6g}, last {before[-1]:.6g}"
    got = f"{losses[step]} at step {step} ({so_far}){found}"
    return DivergenceError.of(method, "a finite loss", got, advice)


def adam(state: Mapping[str, Any], gradient: Any, step: Any) -> tuple[Any, State]:
    """The direction of Adam (Kingma and Ba, 2015) at step 1, 2, ..., and the new moments "first" and "second".

    Over `ops`, for steps mapped over problems, where torch's optimiser cannot be used.
    """
    first = 0.9 * state["first"] + 0.1 * gradient
    second = 0.999 * state["second"] + 0.001 * gradient**2
    size = ops.sqrt(second / (1.0 - 0.999**step)) + 1e-8
    return first / (1.0 - 0.9**step) / size, {"first": first, "second": second}


def batch_indices(rows: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Row numbers (size,) of one batch after another, without end: permutations of all rows, cut into batches.

    Every row occurs once per epoch, also if `size` does not divide the number of rows.
    """
    rng = np.random.default_rng(site_seed("batches", seed))
    waiting = np.empty(0, dtype=np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, rng.permutation(rows)])
        yield waiting[:size]
        waiting = waiting[size:]


def chosen_rows(given: Mapping[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
    """The rows of a step: those in `given["x"]` and `given["y"]`, those numbered by `given["rows"]`, or all."""
    if "y" in given:
        return given["x"], given["y"]
    index = given.get("rows")
    return (x, y) if index is None else (map_data(lambda a: a[index], x), y[index])


# --- the loop -------------------------------------------------------------------------------------


@dataclass
class Loop:
    """The loop of a step in one system (see `loop_of`).

    Attributes
    ----------
    step : callable
        (state, inputs of the step, key, *data) -> (state, record), a function of arrays of the system, pure in JAX.
        `key` is a key of JAX if there is a `seed`; torch has one generator, which is seeded.
    state : object
        The initial state, then the latest: arrays of the system.
    data : tuple
        Further arguments of the step, the same for all.
    length : int
        Maximum number of steps of an `advance`.
    axes : tuple, optional
        Map the step over several problems: the axis of each part of `data`, None for shared data. State, inputs of a
        step and records then have a first axis over problems.
    stops : bool
        Whether the loop ends at a step whose record (its first element) is not finite. In torch its state is that
        before this step.
    key : object, optional
        Compile once for all loops of the program with this key and these shapes.
    recorded : bool
        Whether torch records the step, which is then pure there, too.
    compile_seconds : float
        Seconds of compilation, which is at the first `advance`.
    """

    problem: Problem
    step: Callable[..., tuple[Any, Any]]
    state: Any
    data: tuple[Any, ...]
    length: int = STRETCH
    seed: int | None = None
    axes: tuple[int | None, ...] | None = None
    stops: bool = False
    key: Any = None
    recorded: bool = True
    compile_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.axes is not None:
            self.step = self.problem.system.vmap(self.step, in_axes=(0, 0, None, *self.axes))

    def advance(self, given: Mapping[str, Any]) -> np.ndarray:
        """Take the steps with the inputs `given`, each (steps, ...); return their records."""
        raise NotImplementedError


def loop_of(problem: Problem, *arguments: Any, **options: Any) -> Any:
    """The `Loop` of the system of a problem."""
    return _LOOPS[problem.system.name](problem, *arguments, **options)


class _JaxLoop(Loop):
    """A stretch of any number of steps up to `length` as one compiled loop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.random = None if self.seed is None else self.problem.system.seeds(self.seed, 1)[0]
        self._compiled: Any = None

    def _arguments(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        asarray, count = self.problem.system.asarray, len(next(iter(given.values())))

        def padded(values: np.ndarray) -> Any:
            return asarray(np.concatenate([values, np.repeat(values[-1:], self.length - count, 0)]))

        filled = {name: map_data(padded, values) for name, values in given.items()}
        return (self.state, self.random), np.asarray(count), filled, *self.data

    def advance(self, given: Mapping[str, Any]) -> np.ndarray:
        arguments = self._arguments(given)
        if self._compiled is None:
            watch = Stopwatch()
            self._compiled = self._stretch(arguments)
            self.compile_seconds = watch()
        done, (self.state, self.random), records = self._compiled(*arguments)
        return np.array(records[: int(done)], dtype=np.float64)

    def _stretch(self, arguments: tuple[Any, ...]) -> Any:
        """The compiled loop, for arguments of these shapes."""
        import jax
        import jax.numpy as jnp

        step, length, stops = self.step, self.length, self.stops

        # Traced once for the shape of a record and for the loop: the step may hold many runs of the model.
        @functools.partial(jax.jit, inline=True)
        def once(index: Any, carry: Any, given: Any, data: Any) -> Any:
            state, key = carry
            inside = None
            if key is not None:
                key, inside = jax.random.split(key)
            state, record = step(state, jax.tree.map(lambda a: a[index], given), inside, *data)
            return (state, key), record

        def stretch(carry: Any, count: Any, given: Any, *data: Any) -> Any:
            def body(at: Any) -> Any:
                index, carry, records, going = at
                carry, record = once(index, carry, given, data)
                going = jnp.isfinite(jnp.ravel(record)[0]) if stops else going
                return index + 1, carry, records.at[index].set(record), going

            _, record = jax.eval_shape(once, 0, carry, given, data)
            records = jnp.full((length, *record.shape), jnp.nan, record.dtype)
            return jax.lax.while_loop(lambda at: (at[0] < count) & at[3], body, (0, carry, records, True))[:3]

        def build() -> Any:
            return self.problem.system.compile_for(stretch, arguments)

        if self.key is None:
            return build()
        shapes = str(jax.tree.map(lambda array: (array.shape, str(array.dtype)), arguments))
        return self.problem.program.cached((self.key, self.axes, shapes), build)


class _TorchLoop(Loop):
    """Steps one by one, recorded by the system."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._step = self.problem.system.compile(self.step) if self.recorded else self.step
        if self.seed is not None:
            self.problem.system.randomness(self.problem.system.seeds(self.seed, 1)[0])

    def advance(self, given: Mapping[str, Any]) -> np.ndarray:
        import torch

        from ppl_bnn.backends.pyro_recording import expected

        system = self.problem.system
        columns = {
            name: map_data(lambda values: system.asarray(values).unbind(), each)
            for name, each in given.items()
        }
        records, steps = [], len(next(iter(given.values())))
        with torch.no_grad(), expected(steps):
            for index in range(steps):
                now = {
                    name: map_data(lambda column, i=index: column[i], each) for name, each in columns.items()
                }
                state, record = self._step(self.state, now, None, *self.data)
                records.append(record)
                if self.stops and not math.isfinite(float(record.ravel()[0])):
                    break
                self.state = state
        return np.array(system.to_numpy(torch.stack(records)), dtype=np.float64)


_LOOPS: dict[str, type[Loop]] = {"numpyro": _JaxLoop, "pyro": _TorchLoop}
