"""The loop of SVGD, IVON and Monte-Carlo dropout: many small steps of a rule that a method defines once.

`adam.py` descends a loss with Adam; here the rule is the method's own. A rule is a pure function over `ops`; JAX
runs a stretch of it as one compiled loop, torch runs it step by step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError, message
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.method import Stopwatch
from ppl_bnn.inference.optimisation.adam import STRETCH, batch_indices
from ppl_bnn.language import ops
from ppl_bnn.posterior.approximation import Approximation

FINAL_RATE = 0.1
State = dict[str, Any]
# (state, what this step is told, x, y, randomness) -> (state, loss)
Rule = Callable[..., tuple[State, Any]]


# --- settings -------------------------------------------------------------------------------------


def check_whole(method: str, field: str, value: object, least: int, advice: str) -> None:
    """Raise `InputError` for anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(
            f"{method} {field}: "
            + message(f"a whole number of at least {least}", repr(value), f"{field}={advice}")
        )


def check_within(method: str, field: str, value: Any, low: float, high: float, advice: str) -> None:
    """Raise `InputError` for anything but a number strictly between `low` and `high`."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not (low < value < high):
        wanted = (
            "a positive number" if (low, high) == (0, math.inf) else f"a number between {low:g} and {high:g}"
        )
        raise InputError(f"{method} {field}: " + message(wanted, repr(value), f"{field}={advice}"))


def rows_per_step(
    method: str,
    problem: Problem,
    batch_size: int | None,
    streamed: bool = False,
    advice: str = "batch_size=None",
) -> int | None:
    """The rows of a batch, None where every step takes all rows; streamed rows always come in batches.

    advice: what to try with a model whose rows cannot be taken apart.

    Raises
    ------
    InputError: more rows than there are. UnsupportedError: a model whose rows cannot be taken apart.
    """
    if batch_size is None or (batch_size == problem.rows and not streamed):
        return None
    if batch_size > problem.rows:
        raise InputError(
            f"{method} batch_size: "
            + message(f"at most the {problem.rows} rows there are", repr(batch_size), "batch_size=None")
        )
    program = problem.program
    if program.has_local or program.coupled:
        raise UnsupportedError(
            f"{method}: "
            + message(
                "a model whose rows can be taken apart, for mini-batches",
                f"{'bnn.rows' if program.has_local else 'bnn.coupled'} in the model",
                advice,
            )
        )
    if not program.language and "population" not in inspect.signature(program.native).parameters:
        raise UnsupportedError(
            f"{method}: "
            + message(
                "a plain model (x, y=None, *, population=None), which says so that its rows can be taken apart, for "
                "mini-batches",
                "a model without that argument",
                advice,
            )
        )
    return batch_size


def refuse_free_parameters(method: str, problem: Problem) -> None:
    """Raise `UnsupportedError` where a parameter has no prior, and so no posterior to approximate."""
    names = [site.name for site in problem.program.params]
    if names:
        raise UnsupportedError(
            f"{method}: "
            + message("a prior over everything", f"parameters without a prior: {names}", "a prior, or SVI()")
        )


# --- schedules and curves -------------------------------------------------------------------------


def schedule(rate: float, total: int, final: float = FINAL_RATE) -> np.ndarray:
    """The learning rate of each step (total,): `rate` for the first half, then a line down to `final` of it."""
    held = first_half(total)
    through = np.clip((np.arange(total) + 1 - held) / max(1, total - held), 0.0, 1.0)
    return rate * (1.0 - (1.0 - final) * through)


def first_half(total: int) -> int:
    """The number of steps at the full learning rate."""
    return total - total // 2


def settled(losses: np.ndarray, total: int) -> bool:
    """Whether the loss was on a plateau when the learning rate began to fall; afterwards any loss looks flat.

    The means over the last two windows of `total` / 10 steps at the full rate differ by no more than max(2 standard
    errors of the difference, 0.1 nats). Up or down: a rule other than descent may settle from either side.
    """
    window, held = total // 10, first_half(total)
    if window < 2 or held < 2 * window:
        return False
    before, last = losses[held - 2 * window : held - window], losses[held - window : held]
    error = math.sqrt((before.var(ddof=1) + last.var(ddof=1)) / window)
    return bool(abs(before.mean() - last.mean()) <= max(2.0 * error, 0.1))


def unsettled_warning(method: str, steps: int, learning_rate: float) -> str:
    """What is said of a loss that was not on a plateau."""
    return (
        f"{method} has not converged: of {steps} steps the loss was still falling or rising after the "
        f"{first_half(steps)} at the full learning_rate={learning_rate:g}; try steps={2 * steps} or a larger learning "
        f"rate"
    )


def refuse_divergence(method: str, losses: np.ndarray, advice: str) -> None:
    """Raise `DivergenceError` at the first loss that is not finite, with its step and what the loss was before."""
    wrong = np.flatnonzero(~np.isfinite(losses))
    if not len(wrong):
        return
    step = int(wrong[0])
    so_far = "the first loss"
    if step:
        so_far = (
            f"before: first {losses[0]:.6g}, lowest {losses[:step].min():.6g}, last {losses[step - 1]:.6g}"
        )
    raise DivergenceError(
        f"{method}: " + message("a finite loss", f"{losses[step]} at step {step} ({so_far})", advice)
    )


def evidence_bound(
    method: str, problem: Problem, q: Approximation, draws: int, advice: str
) -> tuple[float, float]:
    """The ELBO, mean and standard error of log p(w(u), D) + log |dw/du| - log q(u) over fresh draws, in nats."""
    u = q.draw(draws, np.random.default_rng(site_seed("elbo", problem.seed)))
    log_q = q.log_prob(u)
    assert log_q is not None
    values = problem.program.log_joint_draws(u, problem.x, problem.y).astype(np.float64) - log_q
    if not np.all(np.isfinite(values)):
        came = f"{int((~np.isfinite(values)).sum())} of {len(values)} draws without a finite log joint"
        raise DivergenceError(f"{method}: " + message("a finite ELBO", came, advice))
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def adam(state: Mapping[str, Any], gradient: Any, step: Any) -> tuple[Any, State]:
    """The direction of Adam (Kingma and Ba 2015) and its new moments, "first" and "second" of `state`; step: from 1."""
    first = 0.9 * state["first"] + 0.1 * gradient
    second = 0.999 * state["second"] + 0.001 * gradient**2
    size = ops.sqrt(second / (1.0 - 0.999**step)) + 1e-8
    return first / (1.0 - 0.9**step) / size, {"first": first, "second": second}


# --- the loop -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """Where a rule arrived. state: NumPy. losses: one per step."""

    state: dict[str, np.ndarray]
    losses: np.ndarray
    compile_seconds: float


def walk(
    problem: Problem,
    rule: Rule,
    start: Mapping[str, np.ndarray],
    told: Mapping[str, np.ndarray],
    *,
    batch: int | None,
    progress: Progress,
    title: str,
    advice: str,
) -> Walk:
    """Apply `rule` as often as there are entries in `told`.

    rule: (state, told, x, y, randomness) -> (state, loss), pure, in arrays of the system. start: the state at first.
    told: name -> (steps,), of which each step sees its own entry. batch: rows per step, every row once per epoch; None
    hands over all rows. advice: what to try where the loss is not finite.

    Raises
    ------
    DivergenceError: a loss that is not finite, within `STRETCH` steps of when it came.
    """
    total = len(next(iter(told.values())))
    batches = None if batch is None else batch_indices(problem.rows, batch, problem.seed)
    state = {name: problem.system.asarray(np.asarray(value, dtype=float)) for name, value in start.items()}
    loop = _LOOPS[problem.system.name](problem, rule, state, list(told), batch)
    losses = np.empty(0)
    task = progress.task(f"{title} ({problem.system.name})", total)
    try:
        for first in range(0, total, STRETCH):
            count = min(STRETCH, total - first)
            part = {
                name: np.asarray(value[first : first + count], dtype=float) for name, value in told.items()
            }
            indices = None if batches is None else np.stack([next(batches) for _ in range(count)])
            latest = loop.advance(part, indices)
            losses = np.concatenate([losses, latest])
            refuse_divergence(title, losses, advice)
            task.update(first + count, loss=float(latest.mean()))
    finally:
        task.close()
    final = {name: np.array(problem.system.to_numpy(value)) for name, value in loop.state.items()}
    return Walk(final, losses, loop.compile_seconds)


class _JaxLoop:
    """A stretch of steps as one compiled scan; the last, shorter one is filled up with steps that change nothing."""

    def __init__(self, problem: Problem, rule: Rule, state: State, names: list[str], batch: int | None):
        import jax
        import jax.numpy as jnp

        system = problem.system

        def stretch(carry: Any, told: Any, taken: Any, indices: Any, x: Any, y: Any) -> Any:
            def step(carry: Any, given: Any) -> Any:
                state, key = carry
                told, taken, index = given
                key, inside = jax.random.split(key)
                rows = (x, y) if index is None else (map_data(lambda a: a[index], x), y[index])
                moved, loss = rule(state, told, *rows, system.randomness(inside))
                state = {name: jnp.where(taken, moved[name], state[name]) for name in state}
                return (state, key), loss

            return jax.lax.scan(step, carry, (told, taken, indices))

        self._problem = problem
        self._carry = state, system.seeds(problem.seed, 1)[0]
        watch = Stopwatch()
        none = None if batch is None else np.zeros((1, batch), dtype=int)
        arguments = self._arguments({name: np.zeros(1) for name in names}, none)
        self._stretch = jax.jit(stretch).lower(*arguments).compile()
        self.compile_seconds = watch()

    @property
    def state(self) -> State:
        return self._carry[0]

    def _arguments(self, told: Mapping[str, np.ndarray], indices: np.ndarray | None) -> tuple[Any, ...]:
        asarray = self._problem.system.asarray
        count = len(next(iter(told.values())))
        missing = STRETCH - count

        def filled(values: np.ndarray) -> Any:
            return asarray(np.concatenate([values, np.repeat(values[-1:], missing, axis=0)]))

        return (
            self._carry,
            {name: filled(values) for name, values in told.items()},
            asarray(np.arange(STRETCH) < count),
            None if indices is None else filled(indices),
            self._problem.x,
            self._problem.y,
        )

    def advance(self, told: Mapping[str, np.ndarray], indices: np.ndarray | None) -> np.ndarray:
        self._carry, losses = self._stretch(*self._arguments(told, indices))
        return np.asarray(losses, dtype=np.float64)[: len(next(iter(told.values())))]


class _TorchLoop:
    """Steps one by one, up to the first loss that is not finite."""

    compile_seconds = 0.0

    def __init__(self, problem: Problem, rule: Rule, state: State, names: list[str], batch: int | None):
        self._problem, self._rule, self.state = problem, rule, state
        self._randomness = problem.system.randomness(problem.system.seeds(problem.seed, 1)[0])

    def advance(self, told: Mapping[str, np.ndarray], indices: np.ndarray | None) -> np.ndarray:
        import torch

        losses = np.full(len(next(iter(told.values()))), np.nan)
        rows = self._problem.x, self._problem.y
        with torch.no_grad():
            for step in range(len(losses)):
                if indices is not None:
                    index = torch.as_tensor(indices[step])
                    rows = map_data(lambda a, i=index: a[i], self._problem.x), self._problem.y[index]
                given = {name: float(values[step]) for name, values in told.items()}
                moved, loss = self._rule(self.state, given, *rows, self._randomness)
                losses[step] = float(loss)
                if not math.isfinite(losses[step]):
                    break
                self.state = moved
        return losses


_LOOPS: dict[str, Any] = {"numpyro": _JaxLoop, "pyro": _TorchLoop}
