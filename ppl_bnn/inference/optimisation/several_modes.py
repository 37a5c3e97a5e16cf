"""Several modes of one program: from several starts, or for the members of an ensemble together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import DivergenceError
from ppl_bnn.inference.flat_vector import by_site, flat_sites, minus_log_joint
from ppl_bnn.inference.method import Stopwatch
from ppl_bnn.inference.optimisation.loops import STRETCH, adam, loop_of
from ppl_bnn.inference.optimisation.mode import WAIT, Mode, Plateau, Refinement, Search, find_mode
from ppl_bnn.language import ops

# (remaining rows, held-out rows)
Split = tuple[np.ndarray, np.ndarray]


def find_modes(
    problems: Sequence[Problem], *, validation: float | None = None, **settings: Any
) -> list[Mode | DivergenceError]:
    """Run `find_mode` for several problems in one loop; returns a mode, or the error, of each.

    The problems share a program and differ in seeds and rows. Each has its own learning rate and stops when converged.
    With `validation`, a share of the rows is held out, and the iterate that they score highest is kept, without polish.
    `settings` are those of a `Search`.
    """
    search = Search(**settings)
    jacobian, steps = search.jacobian, search.steps
    watch = Stopwatch()
    count, first = len(problems), problems[0]
    program = first.program
    splits = None if validation is None else [held_out(problem, validation) for problem in problems]
    found: list[Any] = [None] * count
    begins = np.zeros((count, program.parameter_count))
    for index, problem in enumerate(problems):
        try:
            begins[index] = flat_sites(problem, search.begin(problem))
        except DivergenceError as error:
            found[index] = error
    loop = _adam_of_each(problems, splits, begins, jacobian)

    def read(name: str) -> np.ndarray:
        return np.array(first.system.to_numpy(loop.state[name]), dtype=np.float64)

    plateaus = [Plateau(search.learning_rate, search.tolerance) for _ in problems]
    running = np.array([each is None for each in found])
    ended, best_steps = np.zeros((2, count), dtype=int)
    trails = np.empty((0, count))
    done, halted = 0, False
    title = f"{search.title} x {count} ({first.system.name})"
    with closing(search.progress.task(title, steps)) as task:
        while done < steps and running.any() and not halted:
            rates = np.array([each.rate for each in plateaus]) * running
            losses = loop.advance({"rate": np.tile(rates, (STRETCH, 1))})
            trails = np.concatenate([trails, losses])
            done += STRETCH
            if validation is not None:
                best_steps = read("at").astype(int)
            for index in np.flatnonzero(running):
                plateau, mean = plateaus[index], float(losses[:, index].mean())
                ended[index] = done
                if np.isfinite(mean):
                    plateau.see(mean)
                    plateau.reached |= validation is not None and bool(done - best_steps[index] >= WAIT)
                else:
                    found[index] = search.diverged(mean, done)
                running[index] = found[index] is None and not plateau.reached
            good = losses[:, [each is None for each in found]]
            loss = float(good.mean()) if good.size else float("nan")
            now = done if running.any() else steps
            halted = bool(task.update(now, loss=loss, running=float(running.sum())))
    flats = read("flat" if validation is None else "best")
    scores = None if validation is None else read("score")
    for index, problem in enumerate(problems):
        if found[index] is not None:
            continue
        found[index] = Refinement(problem, jacobian).found(
            by_site(problem, flats[index]),
            trails[: ended[index], index],
            search.polish and validation is None and not halted,
            converged=plateaus[index].reached,
            compile_seconds=loop.compile_seconds / count,
            held_score=None if scores is None else float(scores[index]),
            best_step=None if scores is None else int(best_steps[index]),
        )
    seconds = max(watch() - loop.compile_seconds, 0.0) / count
    return [replace(each, run_seconds=seconds) if isinstance(each, Mode) else each for each in found]


def _adam_of_each(
    problems: Sequence[Problem], splits: Sequence[Split] | None, begins: np.ndarray, jacobian: bool
) -> Any:
    """The loop of Adam over several problems at once, from the flat vectors `begins`, (problems, P).

    With `splits`, (remaining, held-out rows) of each, the state has the best point, its score and step.
    """
    first = problems[0]
    system, program, count = first.system, first.program, len(problems)
    zeros = np.zeros_like(begins)
    state = {"flat": begins, "first": zeros, "second": zeros, "step": np.zeros(count)}
    if splits is None:
        *data, axis = stacked_rows(problems)
    else:
        *data, axis = stacked_rows(problems, [left for left, _ in splits])
        data += stacked_rows(problems, [out for _, out in splits])[:2]
        state |= {"best": begins, "score": np.full(count, -np.inf), "at": np.zeros(count)}
    value_and_grad = system.value_and_grad(minus_log_joint(program, jacobian=jacobian))

    def step(state: Mapping[str, Any], given: Mapping[str, Any], key: Any, x: Any, y: Any, *out: Any) -> Any:
        value, gradient = value_and_grad(state["flat"], x, y)
        number = state["step"] + 1.0
        direction, moments = adam(state, gradient, number)
        flat = state["flat"] - given["rate"] * direction
        new = {"flat": flat, "step": number, **moments}
        if out:
            score = program.log_likelihood(program.unravel(flat), *out).mean()
            better = score > state["score"]
            now = {"best": flat, "score": score, "at": number}
            new |= {name: ops.where(better, value, state[name]) for name, value in now.items()}
        return new, value

    begin = {name: system.asarray(value) for name, value in state.items()}
    axes, key = (axis,) * len(data), ("adam of each", jacobian)
    return loop_of(first, step, begin, tuple(data), axes=axes, key=key)


def held_out(problem: Problem, share: float) -> Split:
    """(remaining rows, held-out rows), both sorted and not empty: a random split by the seed of the problem."""
    rows = problem.rows
    held = min(max(1, round(share * rows)), rows - 1)
    order = np.random.default_rng(site_seed("held out", problem.seed)).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def best_mode(problem: Problem, *, restarts: int, title: str, **settings: Any) -> tuple[Mode, np.ndarray]:
    """The highest of the modes from `restarts` starts, with the costs of all, and the log joint of each, (restarts,).

    A start that diverged has -inf; if all did, the first error is raised.
    """
    best: Mode | None = None
    log_joints, failed = np.full(restarts, -np.inf), []
    spent = {"evaluations": 0, "compile_seconds": 0.0, "run_seconds": 0.0}
    for restart in range(restarts):
        name = title if restarts == 1 else f"{title} {restart + 1}/{restarts}"
        try:
            mode = find_mode(problem, title=name, restart=restart, **settings)
        except DivergenceError as error:
            failed.append(error)
            continue
        log_joints[restart] = mode.log_joint
        spent = {name: value + getattr(mode, name) for name, value in spent.items()}
        if best is None or mode.log_joint > best.log_joint:
            best = mode
    if best is None:
        raise failed[0]
    return replace(best, failures=failed_restarts(failed, restarts), **spent), log_joints


def failed_restarts(failed: Sequence[Exception], restarts: int) -> tuple[str, ...]:
    """A warning about starts that failed, if there are any."""
    return (f"{len(failed)} of {restarts} starts failed, the first with: {failed[0]}",) if failed else ()


def stacked_rows(
    problems: Sequence[Problem], rows: Sequence[np.ndarray] | None = None
) -> tuple[Any, Any, int | None]:
    """(x, y, axis): the data of several problems, or of the given `rows` of each, in arrays of the system.

    The axis over problems is 0, or None if all share their data and no `rows` are selected.
    """
    first = problems[0]
    if rows is None and all(each.x is first.x and each.y is first.y for each in problems):
        return first.x, first.y, None

    def stacked(data: list[Any]) -> Any:
        if isinstance(data[0], Mapping):
            return {name: stacked([each[name] for each in data]) for name in data[0]}
        indices = [slice(None)] * len(data) if rows is None else rows
        return first.system.asarray(
            np.stack([np.asarray(each)[index] for each, index in zip(data, indices, strict=True)])
        )

    return stacked([each.inputs for each in problems]), stacked([each.targets for each in problems]), 0
