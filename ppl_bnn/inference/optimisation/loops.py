"""The loop of SVGD, IVON and Monte-Carlo dropout: many small steps of an update rule that the method defines.

`adam.py` minimises a loss with Adam; here the update rule belongs to the method. A rule is a pure function over `ops`.
JAX runs a stretch of steps as one compiled loop; torch runs them one by one.
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
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.method import Stopwatch
from ppl_bnn.inference.optimisation.adam import STRETCH, batch_indices
from ppl_bnn.language import ops
from ppl_bnn.posterior.approximation import Approximation

FINAL_RATE = 0.1
State = dict[str, Any]
# (state, inputs of this step, x, y, randomness) -> (state, loss)
Rule = Callable[..., tuple[State, Any]]


# --- settings -------------------------------------------------------------------------------------


def check_whole(method: str, field: str, value: object, least: int, advice: str) -> None:
    """Check that a setting is a whole number of at least `least`.

    Parameters
    ----------
    method : str
        Name of the method, for the error message.
    field : str
        Name of the setting.
    value : object
        Its value.
    least : int
        The smallest value allowed.
    advice : str
        What the error message suggests.

    Raises
    ------
    InputError
        The value is not a whole number, or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError.of(
            f"{method} {field}", f"a whole number of at least {least}", repr(value), f"{field}={advice}"
        )


def check_within(method: str, field: str, value: Any, low: float, high: float, advice: str) -> None:
    """Check that a setting is a number strictly between `low` and `high`.

    Parameters
    ----------
    method : str
        Name of the method, for the error message.
    field : str
        Name of the setting.
    value : object
        Its value.
    low, high : float
        The bounds.
    advice : str
        What the error message suggests.

    Raises
    ------
    InputError
        The value is not a number between the bounds.
    """
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not (low < value < high):
        wanted = (
            "a positive number" if (low, high) == (0, math.inf) else f"a number between {low:g} and {high:g}"
        )
        raise InputError.of(f"{method} {field}", wanted, repr(value), f"{field}={advice}")


def rows_per_step(
    method: str,
    problem: Problem,
    batch_size: int | None,
    streamed: bool = False,
    advice: str = "batch_size=None",
) -> int | None:
    """The number of rows per step.

    Parameters
    ----------
    method : str
        Name of the method, for error messages.
    problem : Problem
        The program and its data.
    batch_size : int or None
        The requested number.
    streamed : bool, default False
        Whether rows are streamed; streamed rows always come in batches.
    advice : str
        What the error suggests for a model whose rows cannot be separated.

    Returns
    -------
    int or None
        Rows of a batch; None if every step takes all rows.

    Raises
    ------
    InputError
        A batch with more rows than the data have.
    UnsupportedError
        A model whose rows cannot be separated.
    """
    if batch_size is None or (batch_size == problem.rows and not streamed):
        return None
    if batch_size > problem.rows:
        raise InputError.of(
            f"{method} batch_size",
            f"at most the {problem.rows} rows there are",
            repr(batch_size),
            "batch_size=None",
        )
    program = problem.program
    if program.has_local or program.coupled:
        raise UnsupportedError.of(
            method,
            "a model whose rows can be taken apart, for mini-batches",
            f"{'bnn.rows' if program.has_local else 'bnn.coupled'} in the model",
            advice,
        )
    if not program.language and "population" not in inspect.signature(program.native).parameters:
        raise UnsupportedError.of(
            method,
            (
                "a plain model (x, y=None, *, population=None), which says so that its rows can be taken apart, for "
                "mini-batches"
            ),
            "a model without that argument",
            advice,
        )
    return batch_size


def refuse_free_parameters(method: str, problem: Problem) -> None:
    """Refuse parameters without a prior, which have no posterior to approximate.

    Parameters
    ----------
    method : str
        Name of the method, for the error message.
    problem : Problem
        The program and its data.

    Raises
    ------
    UnsupportedError
        The program has a parameter without a prior.
    """
    names = [site.name for site in problem.program.params]
    if names:
        raise UnsupportedError.of(
            method, "a prior over everything", f"parameters without a prior: {names}", "a prior, or SVI()"
        )


# --- schedules and curves -------------------------------------------------------------------------


def schedule(rate: float, total: int, final: float = FINAL_RATE) -> np.ndarray:
    """The learning rate of each step: constant for the first half, then linear down to a fraction.

    Parameters
    ----------
    rate : float
        The learning rate in the first half.
    total : int
        Number of steps.
    final : float
        The last rate as a fraction of `rate`.

    Returns
    -------
    ndarray
        Learning rates, shape (total,).
    """
    held = first_half(total)
    through = np.clip((np.arange(total) + 1 - held) / max(1, total - held), 0.0, 1.0)
    return rate * (1.0 - (1.0 - final) * through)


def first_half(total: int) -> int:
    """The number of steps at the full learning rate.

    Parameters
    ----------
    total : int
        Number of steps.

    Returns
    -------
    int
        Half of them, rounded up.
    """
    return total - total // 2


def settled(losses: np.ndarray, total: int) -> bool:
    """Whether the loss was on a plateau when the learning rate began to fall; after that, any loss looks flat.

    The means over the last two windows of `total` / 10 steps at the full rate differ by no more than max(2 standard
    errors of the difference, 0.1 nats). The difference may have either sign, because a rule other than descent may
    converge from either side.

    Parameters
    ----------
    losses : ndarray
        One loss per step.
    total : int
        Number of steps.

    Returns
    -------
    bool
        Whether the loss was on a plateau.
    """
    window, held = total // 10, first_half(total)
    if window < 2 or held < 2 * window:
        return False
    before, last = losses[held - 2 * window : held - window], losses[held - window : held]
    error = math.sqrt((before.var(ddof=1) + last.var(ddof=1)) / window)
    return bool(abs(before.mean() - last.mean()) <= max(2.0 * error, 0.1))


def unsettled_warning(method: str, steps: int, learning_rate: float) -> str:
    """The warning for a loss that was not on a plateau.

    Parameters
    ----------
    method : str
        Name of the method.
    steps : int
        Number of steps.
    learning_rate : float
        Learning rate.

    Returns
    -------
    str
        The warning.
    """
    return (
        f"{method} has not converged: of {steps} steps the loss was still falling or rising after the "
        f"{first_half(steps)} at the full learning_rate={learning_rate:g}; try steps={2 * steps} or a larger learning "
        f"rate"
    )


def refuse_divergence(method: str, losses: np.ndarray, advice: str) -> None:
    """Raise an error at the first loss that is not finite.

    Parameters
    ----------
    method : str
        Name of the method, for the error message.
    losses : ndarray
        One loss per step.
    advice : str
        What the error suggests.

    Raises
    ------
    DivergenceError
        A loss is not finite; the message has its step and the loss before.
    """
    wrong = np.flatnonzero(~np.isfinite(losses))
    if not len(wrong):
        return
    step = int(wrong[0])
    so_far = "the first loss"
    if step:
        so_far = (
            f"before: first {losses[0]:.6g}, lowest {losses[:step].min():.6g}, last {losses[step - 1]:.6g}"
        )
    raise DivergenceError.of(method, "a finite loss", f"{losses[step]} at step {step} ({so_far})", advice)


def evidence_bound(
    method: str, problem: Problem, q: Approximation, draws: int, advice: str
) -> tuple[float, float]:
    """The ELBO from new draws: mean and standard error of log p(w(u), D) + log |dw/du| - log q(u).

    Parameters
    ----------
    method : str
        Name of the method, for error messages.
    problem : Problem
        The program and its data.
    q : Approximation
        The approximation.
    draws : int
        Number of draws.
    advice : str
        What an error suggests.

    Returns
    -------
    tuple of float
        The ELBO and its standard error, in nats.
    """
    u = q.draw(draws, np.random.default_rng(site_seed("elbo", problem.seed)))
    log_q = q.log_prob(u)
    assert log_q is not None
    values = problem.program.log_joint_draws(u, problem.x, problem.y).astype(np.float64) - log_q
    if not np.all(np.isfinite(values)):
        got = f"{int((~np.isfinite(values)).sum())} of {len(values)} draws without a finite log joint"
        raise DivergenceError.of(method, "a finite ELBO", got, advice)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def adam(state: Mapping[str, Any], gradient: Any, step: Any) -> tuple[Any, State]:
    """The direction of Adam and its new moments.

    Parameters
    ----------
    state : mapping
        Has the moments "first" and "second".
    gradient : array
        The gradient.
    step : int
        Number of the step, from 1.

    Returns
    -------
    tuple
        The direction, and a dict with the new moments.

    References
    ----------
    Kingma and Ba (2015).
    """
    first = 0.9 * state["first"] + 0.1 * gradient
    second = 0.999 * state["second"] + 0.001 * gradient**2
    size = ops.sqrt(second / (1.0 - 0.999**step)) + 1e-8
    return first / (1.0 - 0.9**step) / size, {"first": first, "second": second}


# --- the loop -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """The result of `walk`.

    Attributes
    ----------
    state : dict of str to ndarray
        The final state (NumPy).
    losses : ndarray
        One loss per step.
    compile_seconds : float
        Seconds of compilation.
    """

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
    """Apply an update rule once for each entry in `told`.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    rule : callable
        (state, told, x, y, randomness) -> (state, loss), a pure function of arrays of the system.
    start : mapping of str to ndarray
        The initial state.
    told : mapping of str to ndarray
        Inputs of the steps, shape (steps,) each; a step receives its own entry.
    batch : int or None
        Rows per step, with every row once per epoch; None for all rows.
    progress : Progress
        Receives reports of progress.
    title : str
        Title of the progress bar and of errors.
    advice : str
        What the error suggests if the loss is not finite.

    Returns
    -------
    Walk
        The final state and the losses.

    Raises
    ------
    DivergenceError
        A loss is not finite. Raised within `STRETCH` steps of it.
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
    """A stretch of steps as one compiled scan; the last, shorter stretch is padded with steps that change nothing."""

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
