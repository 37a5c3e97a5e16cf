"""What IVON, SVGD and MC dropout share: their loop, gradients, cost and outcome; and starting points that differ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks, site_seed
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import optional, setting, whole
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.flat_vector import flat_sites, minus_log_joint
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation import loops
from ppl_bnn.inference.start import Start


def batch_setting() -> Any:
    """The field `batch_size`: rows per step, None for all rows."""
    return setting(None, optional(whole()), advice="128")


class Plan(NamedTuple):
    """The steps of a fit.

    rule: (state, inputs of the step, x, y, randomness) -> (state, loss). start: the state before the first step.
    finish: the final state -> the approximation, with figures and warnings; its figure "converged" of 0 says that a
    settled loss is not enough here. inputs: further inputs of the steps, (steps,) each.
    """

    rule: Callable[..., tuple[loops.State, Any]]
    start: dict[str, np.ndarray]
    finish: Callable[[dict[str, np.ndarray]], Outcome]
    inputs: Mapping[str, np.ndarray] = {}


class IteratedMethod(Method):
    """A method of many small steps by one rule. A subclass declares the fields below, and writes `plan`.

    Inputs of a step are its number "step" from 1, its learning rate "rate", which falls to `last` of the first over the
    second half of the steps, and "counts", whether it is in that half. Over these steps the parts `averaged` of the
    state are averaged. `remedy` is what may help, besides a lower learning rate, if the loss is not finite. If
    `explains`, a loss that has not settled has no warning where `finish` says why.
    """

    steps: int
    learning_rate: float
    batch_size: int | None
    start: Start
    averaged: ClassVar[tuple[str, ...]] = ()
    last: ClassVar[float] = loops.FINAL_RATE
    remedy: ClassVar[str]
    explains: ClassVar[bool] = False

    @abstractmethod
    def plan(self, problem: Problem, progress: Progress) -> Plan:
        """The steps of a fit."""

    def count(self, size: int) -> int:
        """Gradients per step, for `size` coordinates."""
        return getattr(self, "particles", 1)

    def effort(self, size: Size) -> Effort:
        share = size.share(self.batch_size)
        found = Effort.exactly(self.steps * self.count(size.parameters) * share)
        return found.after(effort_of_start(self.start, size))

    def check_support(self, problem: Problem) -> None:
        loops.refuse_free_parameters(self.name, problem)
        self.scale(problem)

    def scale(self, problem: Problem) -> float:
        """The factor on the likelihood of a batch."""
        return problem.rows / (loops.rows_per_step(self.name, problem, self.batch_size) or problem.rows)

    @property
    def advice(self) -> str:
        """What to try if the loss is not finite."""
        return f"learning_rate={self.learning_rate / 10:g}, {self.remedy}, or standardise=True"

    def gradients(self, problem: Problem) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        """(points (n, P), x, y) -> minus the log joint (n,), scaled from a batch to all rows, and its gradients."""
        system, loss = problem.system, minus_log_joint(problem.program, self.scale(problem))
        gradient = system.value_and_grad(loss)
        if self.count(problem.program.parameter_count) > 1:
            return system.vmap(gradient, in_axes=(0, None, None))

        # Operations that are not mapped may be fused.
        def of_one(points: Any, x: Any, y: Any) -> tuple[Any, Any]:
            value, found = gradient(points[0], x, y)
            return value[None], found[None]

        return of_one

    @final
    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        plan, system = self.plan(problem, progress), problem.system
        number, half = np.arange(self.steps), loops.first_half(self.steps)
        inputs = {
            "rate": loops.falling(self.learning_rate, number, half, self.steps, self.last),
            "step": 1.0 + number,
            "counts": (number >= half).astype(float),
            **plan.inputs,
        }
        batch = loops.rows_per_step(self.name, problem, self.batch_size)
        batches = None if batch is None else loops.batch_indices(problem.rows, batch, problem.seed)

        def step(state: loops.State, now: Mapping[str, Any], key: Any, x: Any, y: Any) -> tuple[Any, Any]:
            rows = loops.chosen_rows(now, x, y)
            moved, loss = plan.rule(state, now, *rows, system.randomness(key))
            totals = {f"total {part}": now["counts"] * moved[part] for part in self.averaged}
            moved = moved | {name: state[name] + total for name, total in totals.items()}
            return {name: moved[name] for name in state}, loss

        start = plan.start | {f"total {part}": np.zeros_like(plan.start[part]) for part in self.averaged}
        begin = {name: system.asarray(np.asarray(value, dtype=float)) for name, value in start.items()}
        data = (problem.x, problem.y)
        loop = loops.loop_of(problem, step, begin, data, seed=problem.seed, stops=True)
        losses, steps = np.empty(0), self.steps
        with closing(progress.task(f"{self.name} ({system.name})", self.steps)) as task:
            for done, end in chunks(self.steps, loops.STRETCH):
                given = {name: np.asarray(value[done:end], dtype=float) for name, value in inputs.items()}
                if batches is not None:
                    given["rows"] = np.stack(list(islice(batches, end - done)))
                latest = loop.advance(given)
                losses = np.concatenate([losses, latest])
                if error := loops.divergence(self.name, losses, self.advice):
                    raise error
                if task.update(end, loss=float(latest.mean())):
                    steps = end
                    break
        state = {name: np.array(system.to_numpy(value)) for name, value in loop.state.items()}
        # A single step has no second half, nor has a fit that is ended before.
        for part in self.averaged if steps > half else ():
            state[part] = state[f"total {part}"] / (steps - half)
        ended = plan.finish(state)
        # A rule other than descent may converge from either side. After the first half, any loss looks flat.
        flat = loops.plateau(losses[:half], self.steps // 10, rising=False)
        enough, warnings = ended.figures.get("converged", 1.0), ended.warnings
        if not flat and (enough or not self.explains):
            unsettled = (
                f"{self.name} has not converged: of {steps} steps the loss was still falling or rising after the "
                f"{min(steps, half)} at the full learning_rate={self.learning_rate:g}; try steps={2 * self.steps} or a "
                "larger learning rate"
            )
            warnings = (unsettled, *warnings)
        return replace(
            ended,
            history={"loss": losses},
            compile_seconds=loop.compile_seconds,
            run_seconds=watch() - loop.compile_seconds,
            gradient_evaluations=steps * self.count(problem.program.parameter_count) / self.scale(problem),
            warnings=warnings,
            figures=ended.figures | {"converged": float(flat and enough)},
        )


def separated(
    problem: Problem, points: Sequence[Mapping[str, np.ndarray]], jitter: float, purpose: str
) -> np.ndarray:
    """The points as flat vectors (n, P), with normal noise on those that repeat an earlier one."""
    flat = np.stack([flat_sites(problem, point) for point in points])
    repeated = np.setdiff1d(np.arange(len(flat)), np.unique(flat, axis=0, return_index=True)[1])
    rng = np.random.default_rng(site_seed(purpose, problem.seed))
    flat[repeated] += jitter * rng.standard_normal((len(repeated), flat.shape[1]))
    return flat
