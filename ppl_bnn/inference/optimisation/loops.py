"""The training loop of all methods that take many small steps, with schedules, batches and plateaus.

A step is a pure function over arrays of a system. JAX runs a stretch of steps as one compiled loop, torch one by one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.method import Stopwatch
from ppl_bnn.language import ops
from ppl_bnn.posterior.approximation import Approximation

# Steps between two checks of the losses.
STRETCH = 100
FINAL_RATE = 0.1
# What errors about batches advise.
ALL_ROWS = "batch_size=None"
State = dict[str, Any]
# (state, inputs of this step, x, y, randomness) -> (state, loss)
Rule = Callable[..., tuple[State, Any]]


# --- settings -------------------------------------------------------------------------------------


def rows_per_step(
    method: str, problem: Problem, batch_size: int | None, streamed: bool = False, advice: str = ALL_ROWS
) -> int | None:
    """The rows of a batch, None if each step takes all rows; refuses a model whose rows cannot be separated.

    Streamed rows always come in batches. `advice` is part of the error.
    """
    if batch_size is None or (batch_size == problem.rows and not streamed):
        return None
    if batch_size > problem.rows:
        where, wanted = f"{method} batch_size", f"at most the {problem.rows} rows there are"
        raise InputError.of(where, wanted, repr(batch_size), ALL_ROWS)
    program = problem.program
    if program.has_local or program.coupled:
        wanted = "a model whose rows can be taken apart, for mini-batches"
        got = f"{'bnn.rows' if program.has_local else 'bnn.coupled'} in the model"
        raise UnsupportedError.of(method, wanted, got, advice)
    if not program.language and "population" not in inspect.signature(program.native).parameters:
        wanted = (
            "a plain model (x, y=None, *, population=None), which declares independent rows, for mini-batches"
        )
        raise UnsupportedError.of(method, wanted, "a model without that argument", advice)
    return batch_size


def refuse_free_parameters(method: str, problem: Problem) -> None:
    """Refuse parameters without a prior, which have no posterior to approximate."""
    names = [site.name for site in problem.program.params]
    if names:
        got = f"parameters without a prior: {names}"
        raise UnsupportedError.of(method, "a prior over everything", got, "a prior, or SVI()")


# --- schedules and curves -------------------------------------------------------------------------


def schedule(rate: float, total: int, final: float = FINAL_RATE) -> np.ndarray:
    """The learning rate of each step, (total,): constant for the first half, then linear down to `final * rate`."""
    return falling(rate, np.arange(total), first_half(total), total, final)


def falling(
    rate: float, steps: np.ndarray, constant: int, total: int, final: float = FINAL_RATE
) -> np.ndarray:
    """The learning rates at `steps`: `rate` for `constant` of the `total` steps, then linear down to `final * rate`."""
    through = np.clip((steps + 1 - constant) / max(1, total - constant), 0.0, 1.0)
    return rate * (1.0 - (1.0 - final) * through)


def first_half(total: int) -> int:
    """The number of steps at the full learning rate: half of them, rounded up."""
    return total - total // 2


def settled(losses: np.ndarray, total: int) -> bool:
    """Whether the loss was on a plateau when the learning rate began to fall; after that, any loss looks flat.

    The loss may neither rise nor fall, because a rule other than descent may converge from either side.
    """
    window, constant = total // 10, first_half(total)
    return plateau(losses[:constant], window, rising=False)


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


def unsettled_warning(method: str, steps: int, learning_rate: float) -> str:
    """The warning for a loss that was not on a plateau."""
    return (
        f"{method} has not converged: of {steps} steps the loss was still falling or rising after the "
        f"{first_half(steps)} at the full learning_rate={learning_rate:g}; try steps={2 * steps} or a larger learning "
        f"rate"
    )


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


def evidence_bound(
    method: str, problem: Problem, q: Approximation, draws: int, advice: str
) -> tuple[float, float]:
    """The ELBO from new draws: mean and standard error of log p(w(u), D) + log |dw/du| - log q(u), in nats."""
    u = q.draw(draws, np.random.default_rng(site_seed("elbo", problem.seed)))
    log_q = q.log_prob(u)
    assert log_q is not None
    values = problem.program.log_joint_draws(u, problem.x, problem.y).astype(np.float64) - log_q
    if not np.all(np.isfinite(values)):
        got = f"{int((~np.isfinite(values)).sum())} of {len(values)} draws without a finite log joint"
        raise DivergenceError.of(method, "a finite ELBO", got, advice)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


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


@dataclass(frozen=True)
class Iterated:
    """The result of `iterate`: the final state (NumPy), one loss per step, and the seconds of compilation."""

    state: dict[str, np.ndarray]
    losses: np.ndarray
    compile_seconds: float


def iterate(
    problem: Problem,
    rule: Rule,
    start: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    *,
    batch: int | None,
    progress: Progress,
    title: str,
    advice: str,
) -> Iterated:
    """Apply `rule`, (state, inputs of the step, x, y, randomness) -> (state, loss), once per entry of `inputs`.

    `inputs` have shape (steps,) each. `batch` is the rows per step, with every row once per epoch; None for all rows.
    `title` is that of the progress bar and of errors, `advice` what the error for a loss that is not finite suggests.
    """
    system = problem.system
    total = len(next(iter(inputs.values())))
    batches = None if batch is None else batch_indices(problem.rows, batch, problem.seed)

    def step(state: State, given: Mapping[str, Any], key: Any, x: Any, y: Any) -> tuple[State, Any]:
        moved, loss = rule(state, given, *chosen_rows(given, x, y), system.randomness(key))
        return {name: moved[name] for name in state}, loss

    def inputs_of(first: int, count: int) -> dict[str, np.ndarray]:
        part = {name: np.asarray(value[first : first + count], dtype=float) for name, value in inputs.items()}
        if batches is not None:
            part["rows"] = np.stack([next(batches) for _ in range(count)])
        return part

    state = {name: system.asarray(np.asarray(value, dtype=float)) for name, value in start.items()}
    example: dict[str, np.ndarray] = {name: np.zeros(1) for name in inputs}
    if batch is not None:
        example["rows"] = np.zeros((1, batch), dtype=int)
    loop = loop_of(problem, step, state, example, (problem.x, problem.y), seed=problem.seed, stops=True)
    losses = np.empty(0)
    with closing(progress.task(f"{title} ({system.name})", total)) as task:
        for first in range(0, total, STRETCH):
            count = min(STRETCH, total - first)
            latest = loop.advance(inputs_of(first, count))
            losses = np.concatenate([losses, latest])
            if error := divergence(title, losses, advice):
                raise error
            task.update(first + count, loss=float(latest.mean()))
    final = {name: np.array(system.to_numpy(value)) for name, value in loop.state.items()}
    return Iterated(final, losses, loop.compile_seconds)


@dataclass
class Loop:
    """The loop of a step in one system (see `loop_of`).

    Attributes
    ----------
    step : callable
        (state, inputs of the step, key, *data) -> (state, record), a pure function of arrays of the system. `key` is a
        key of JAX if there is a `seed`; torch has one generator, which is seeded.
    state : object
        The initial state, then the latest: arrays of the system.
    example : mapping of str to ndarray
        Inputs of at least one step, in the shapes of all later ones: (steps, ...).
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
    """

    problem: Problem
    step: Callable[..., tuple[Any, Any]]
    state: Any
    example: Mapping[str, Any]
    data: tuple[Any, ...]
    length: int = STRETCH
    seed: int | None = None
    axes: tuple[int | None, ...] | None = None
    stops: bool = False
    key: Any = None
    compile_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.axes is not None:
            self.step = self.problem.system.vmap(self.step, in_axes=(0, 0, None, *self.axes))

    def advance(self, given: Mapping[str, Any]) -> np.ndarray:
        """Take the steps with the inputs `given`; return their records."""
        raise NotImplementedError


def loop_of(problem: Problem, *arguments: Any, **options: Any) -> Any:
    """The `Loop` of the system of a problem."""
    return _LOOPS[problem.system.name](problem, *arguments, **options)


class _JaxLoop(Loop):
    """A stretch of any number of steps up to `length` as one compiled loop."""

    def __post_init__(self) -> None:
        import jax
        import jax.numpy as jnp

        super().__post_init__()
        step, length, stops, system = self.step, self.length, self.stops, self.problem.system

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

        self.random = None if self.seed is None else system.seeds(self.seed, 1)[0]
        watch = Stopwatch()
        arguments = self._arguments(self.example)
        shapes = str(jax.tree.map(lambda array: (array.shape, str(array.dtype)), arguments))

        def build() -> Any:
            return jax.jit(stretch).lower(*arguments).compile()

        key = (self.key, self.axes, shapes)
        self._stretch = build() if self.key is None else self.problem.program.cached(key, build)
        self.compile_seconds = watch()

    def _arguments(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        asarray, count = self.problem.system.asarray, len(next(iter(given.values())))

        def padded(values: np.ndarray) -> Any:
            return asarray(np.concatenate([values, np.repeat(values[-1:], self.length - count, 0)]))

        filled = {name: map_data(padded, values) for name, values in given.items()}
        return (self.state, self.random), np.asarray(count), filled, *self.data

    def advance(self, given: Mapping[str, Any]) -> np.ndarray:
        done, (self.state, self.random), records = self._stretch(*self._arguments(given))
        return np.array(records[: int(done)], dtype=np.float64)


class _TorchLoop(Loop):
    """Steps one by one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            self.problem.system.randomness(self.problem.system.seeds(self.seed, 1)[0])

    def advance(self, given: Mapping[str, Any]) -> np.ndarray:
        import torch

        system = self.problem.system
        columns = {
            name: value.tolist() if value.ndim == 1 else system.asarray(value)
            for name, value in given.items()
        }
        records = []
        with torch.no_grad():
            for index in range(len(next(iter(given.values())))):
                now = {name: column[index] for name, column in columns.items()}
                state, record = self.step(self.state, now, None, *self.data)
                records.append(record)
                if self.stops and not math.isfinite(float(record)):
                    break
                self.state = state
        return np.array(system.to_numpy(torch.stack(records)), dtype=np.float64)


_LOOPS: dict[str, type[Loop]] = {"numpyro": _JaxLoop, "pyro": _TorchLoop}
