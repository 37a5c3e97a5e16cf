"""Several modes of one program: from several starts, or for the members of an ensemble together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import DivergenceError
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.flat_vector import flat_sites
from ppl_bnn.inference.method import Start, Stopwatch
from ppl_bnn.inference.optimisation.mode import (
    CHUNK,
    WAIT,
    Mode,
    Plateau,
    Refinement,
    diverged,
    find_mode,
    starting_point,
)
from ppl_bnn.language import ops


def find_modes(
    problems: Sequence[Problem],
    *,
    start: Start = None,
    steps: int = 20_000,
    learning_rate: float = 0.02,
    tolerance: float = 1e-4,
    polish: bool = True,
    jacobian: bool = True,
    validation: float | None = None,
    progress: Progress,
    title: str = "MAP",
) -> list[Mode | DivergenceError]:
    """Run `find_mode` for several problems in one loop.

    The problems differ in their seeds and rows. A step of all of them is one vectorised call. Each has its own learning
    rate and stops moving when it has converged. The costs of the loop are shared evenly.

    Parameters
    ----------
    problems : sequence of Problem
        Problems of one program.
    start, steps, learning_rate, tolerance, polish, jacobian, progress, title
        As for `find_mode`.
    validation : float or None
        The share of rows held out of each problem, chosen by its seed. The loss is then that of the other rows. The
        iterate with the largest mean log likelihood of the held-out rows is kept (early stopping). It is not polished,
        because it is not a mode.

    Returns
    -------
    list of Mode or DivergenceError
        One entry per problem; its error if it failed.
    """
    watch = Stopwatch()
    count, first = len(problems), problems[0]
    program = first.program
    splits = [None if validation is None else held_out(problem, validation) for problem in problems]
    found: list[Any] = [None] * count
    begins = np.empty((count, program.parameter_count))
    for index, problem in enumerate(problems):
        try:
            begins[index] = flat_sites(problem, starting_point(problem, start, progress))
        except DivergenceError as error:
            found[index], begins[index] = error, 0.0
    adam = _MEMBERS[first.system.name](problems, splits, begins, jacobian)
    plateaus = [Plateau(learning_rate, tolerance) for _ in problems]
    running = np.array([each is None for each in found])
    ended, arrived = np.zeros(count, dtype=int), np.zeros(count, dtype=bool)
    losses: list[np.ndarray] = []
    done = 0
    task = progress.task(f"{title} x {count} ({first.system.name})", steps)
    try:
        while done < steps and running.any():
            rates = np.array([each.rate for each in plateaus]) * running
            values = adam.advance(rates)
            losses.append(values)
            done += CHUNK
            best_steps = adam.best_steps()
            for index in np.flatnonzero(running):
                mean = float(values[index].mean())
                ended[index] = done
                if not np.isfinite(mean):
                    found[index] = diverged(title, mean, done, learning_rate)
                    running[index] = False
                    continue
                plateaus[index].see(mean)
                waited = validation is not None and done - best_steps[index] >= WAIT
                arrived[index] = plateaus[index].reached or waited
                running[index] = not arrived[index]
            told = values[[each is None for each in found]]
            task.update(
                done if running.any() else steps,
                loss=float(told.mean()) if told.size else float("nan"),
                running=float(running.sum()),
            )
    finally:
        task.close()
    flats, scores, best_steps = adam.values(), adam.scores(), adam.best_steps()
    trails = np.concatenate(losses, axis=1) if losses else np.empty((count, 0))
    for index, problem in enumerate(problems):
        if found[index] is not None:
            continue
        u = {name: np.array(value) for name, value in program.unravel(flats[index]).items()}
        refinement = Refinement(problem, jacobian)
        if polish and validation is None and problem.dtype == "float64":
            u = refinement.mode(u)
        value, norm, rise = refinement.standing(u)
        found[index] = Mode(
            u=u,
            log_joint=value,
            gradient_norm=norm,
            losses=trails[index, : ended[index]],
            converged=bool(arrived[index]),
            evaluations=int(ended[index]) + refinement.evaluations,
            compile_seconds=adam.compile_seconds / count,
            run_seconds=0.0,
            held_score=None if validation is None else float(scores[index]),
            best_step=None if validation is None else int(best_steps[index]),
            rise=rise,
        )
    seconds = max(watch() - adam.compile_seconds, 0.0) / count
    return [replace(each, run_seconds=seconds) if isinstance(each, Mode) else each for each in found]


def held_out(problem: Problem, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Split rows at random, by the seed of the problem; at least one row on each side.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    share : float
        The share of rows to hold out.

    Returns
    -------
    tuple of ndarray
        (remaining rows, held-out rows), both sorted.
    """
    rows = problem.rows
    held = min(max(1, round(share * rows)), rows - 1)
    order = np.random.default_rng(site_seed("held out", problem.seed)).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def best_mode(
    problem: Problem, *, restarts: int, progress: Progress, title: str, **settings: Any
) -> tuple[Mode, np.ndarray]:
    """The highest of the modes from several starts.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    restarts : int
        R, the number of starts.
    progress : Progress
        Receives reports of progress.
    title : str
        Title of the progress bar.
    **settings
        Settings of `find_mode`.

    Returns
    -------
    tuple
        The mode with the costs of all starts, and the log joint of each, shape (R,), -inf for a start that diverged.

    Raises
    ------
    DivergenceError
        All starts diverged.
    """
    best: Mode | None = None
    log_joints, failed = np.full(restarts, -np.inf), []
    evaluations, compile_seconds, run_seconds = 0, 0.0, 0.0
    for restart in range(restarts):
        name = title if restarts == 1 else f"{title} {restart + 1}/{restarts}"
        try:
            mode = find_mode(problem, progress=progress, title=name, restart=restart, **settings)
        except DivergenceError as error:
            failed.append(error)
            continue
        log_joints[restart] = mode.log_joint
        evaluations += mode.evaluations
        compile_seconds += mode.compile_seconds
        run_seconds += mode.run_seconds
        if best is None or mode.log_joint > best.log_joint:
            best = mode
    if best is None:
        raise failed[0]
    spent = {"evaluations": evaluations, "compile_seconds": compile_seconds, "run_seconds": run_seconds}
    return replace(best, failures=failed_restarts(failed, restarts), **spent), log_joints


def failed_restarts(failed: Sequence[Exception], restarts: int) -> tuple[str, ...]:
    """A warning about starts that failed, if there are any.

    Parameters
    ----------
    failed : sequence of Exception
        Their errors.
    restarts : int
        Number of starts.

    Returns
    -------
    tuple of str
        One warning or none.
    """
    return (f"{len(failed)} of {restarts} starts failed, the first with: {failed[0]}",) if failed else ()


def stacked_rows(
    problems: Sequence[Problem], rows: Sequence[np.ndarray] | None = None
) -> tuple[Any, Any, Any]:
    """The data of several problems in arrays of the system.

    Parameters
    ----------
    problems : sequence of Problem
        The problems.
    rows : sequence of ndarray, optional
        Rows to take from each.

    Returns
    -------
    tuple
        (x, y, axis). The arrays have a first axis over problems (axis 0), or no such axis (axis None) if all problems
        share their data and no `rows` are selected.
    """
    first = problems[0]
    if rows is None and all(each.x is first.x and each.y is first.y for each in problems):
        return first.x, first.y, None

    def stacked(choose: Callable[[Problem], Any]) -> Any:
        chosen = [np.asarray(choose(each)) for each in problems]
        if rows is not None:
            chosen = [values[index] for values, index in zip(chosen, rows, strict=True)]
        return first.system.asarray(np.stack(chosen))

    if isinstance(first.inputs, Mapping):
        x: Any = {name: stacked(lambda each, key=name: each.inputs[key]) for name in first.inputs}
    else:
        x = stacked(lambda each: each.inputs)
    return x, stacked(lambda each: each.targets), 0


class _Members(ABC):
    """Adam for several problems at once: the step of one of them, over ops, and the state of all.

    `splits` has (remaining rows, held-out rows) of each problem, or None for each.
    """

    compile_seconds = 0.0

    def __init__(
        self,
        problems: Sequence[Problem],
        splits: Sequence[tuple[np.ndarray, np.ndarray] | None],
        begins: np.ndarray,
        jacobian: bool,
    ):
        first = problems[0]
        self._system, self._program, self._jacobian = first.system, first.program, jacobian
        known = [split for split in splits if split is not None]
        if known:
            self._held = True
            *data, axis = stacked_rows(problems, [left for left, _ in known])
            *held, _ = stacked_rows(problems, [out for _, out in known])
            data += held
        else:
            self._held = False
            *data, axis = stacked_rows(problems)
        self._data, self._axes = tuple(data), (axis,) * len(data)
        count = len(problems)
        zeros = np.zeros_like(begins)
        state = {"flat": begins, "first": zeros, "second": zeros, "step": np.zeros(count)}
        if self._held:
            state |= {"best": begins, "score": np.full(count, -np.inf), "at": np.zeros(count)}
        self._state = {name: first.system.asarray(value) for name, value in state.items()}
        self._build(first)

    @abstractmethod
    def _build(self, problem: Problem) -> None:
        """Set up the step for all problems, compiled if the system compiles."""

    def _step(self) -> Callable[..., Any]:
        """(state, rate, x, y, ...) -> (state, loss before the step) of one problem."""
        program, jacobian, held = self._program, self._jacobian, self._held

        def loss(flat: Any, x: Any, y: Any) -> Any:
            return -program.log_joint(program.unravel(flat), x, y, jacobian=jacobian)

        value_and_grad = self._system.value_and_grad(loss)

        def step(
            state: Mapping[str, Any], rate: Any, x: Any, y: Any, *out: Any
        ) -> tuple[dict[str, Any], Any]:
            value, gradient = value_and_grad(state["flat"], x, y)
            number = state["step"] + 1.0
            first = 0.9 * state["first"] + 0.1 * gradient
            second = 0.999 * state["second"] + 0.001 * gradient**2
            size = ops.sqrt(second / (1.0 - 0.999**number)) + 1e-8
            flat = state["flat"] - rate * (first / (1.0 - 0.9**number) / size)
            new = {"flat": flat, "first": first, "second": second, "step": number}
            if held:
                score = program.log_likelihood(program.unravel(flat), *out).mean()
                better = score > state["score"]
                new["best"] = ops.where(better, flat, state["best"])
                new["score"] = ops.where(better, score, state["score"])
                new["at"] = ops.where(better, number, state["at"])
            return new, value

        return step

    @abstractmethod
    def advance(self, rates: np.ndarray) -> np.ndarray:
        """Run a chunk of steps of each problem at its rate; return the losses, (problems, CHUNK)."""

    def values(self) -> np.ndarray:
        """The current points, or the best ones for problems with held-out rows, (problems, P)."""
        return np.array(
            self._system.to_numpy(self._state["best" if self._held else "flat"]), dtype=np.float64
        )

    def scores(self) -> np.ndarray:
        """The best mean log likelihoods of held-out rows, (problems,); NaN if there are none."""
        if not self._held:
            return np.full(len(self._system.to_numpy(self._state["step"])), np.nan)
        return np.array(self._system.to_numpy(self._state["score"]), dtype=np.float64)

    def best_steps(self) -> np.ndarray:
        """The steps of the best scores, (problems,); 0 if there are none."""
        values = self._state["at"] if self._held else 0.0 * self._state["step"]
        return np.array(self._system.to_numpy(values)).astype(int)


class _MembersNumPyro(_Members):
    def _build(self, problem: Problem) -> None:
        import jax

        step, axes = self._step(), self._axes

        def member(state: Any, rate: Any, *data: Any) -> Any:
            return jax.lax.scan(lambda state, _: step(state, rate, *data), state, None, length=CHUNK)

        watch = Stopwatch()
        arguments = (self._state, problem.system.asarray(np.zeros(len(self._state["step"]))), *self._data)
        shapes = str(jax.tree.map(lambda array: (array.shape, str(array.dtype)), arguments))

        def build() -> Any:
            return jax.jit(jax.vmap(member, in_axes=(0, 0, *axes))).lower(*arguments).compile()

        key = ("adam for several", self._jacobian, self._held, axes, shapes)
        self._chunk = problem.program._cached(key, build)
        self.compile_seconds = watch()

    def advance(self, rates: np.ndarray) -> np.ndarray:
        self._state, values = self._chunk(self._state, self._system.asarray(rates), *self._data)
        return np.asarray(values, dtype=np.float64)


class _MembersPyro(_Members):
    def _build(self, problem: Problem) -> None:
        self._one_step = self._system.vmap(self._step(), in_axes=(0, 0, *self._axes))

    def advance(self, rates: np.ndarray) -> np.ndarray:
        import torch

        values, given = [], self._system.asarray(rates)
        with torch.no_grad():
            for _ in range(CHUNK):
                self._state, value = self._one_step(self._state, given, *self._data)
                values.append(value)
        return np.array(self._system.to_numpy(torch.stack(values, 1)), dtype=np.float64)


_MEMBERS: dict[str, Any] = {"numpyro": _MembersNumPyro, "pyro": _MembersPyro}
