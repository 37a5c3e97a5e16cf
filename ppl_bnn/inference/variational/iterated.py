"""What IVON, SVGD and MC dropout share: their loop, gradients, cost and outcome; and starting points that differ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import optional, setting, whole
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.flat_vector import flat_sites
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation import loops
from ppl_bnn.inference.start import Start


def batch_setting() -> Any:
    """The field `batch_size`: rows per step, None for all rows."""
    return setting(None, optional(whole()), advice="128")


class Plan(NamedTuple):
    """The steps of a fit.

    rule: as in `loops.iterate`. start: the state before the first step. finish: the final state -> the approximation,
    with figures and warnings; its figure "converged" of 0 says that a settled loss is not enough here. inputs: further
    inputs of the steps, (steps,) each.
    """

    rule: loops.Rule
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
        program, system, scale = problem.program, problem.system, self.scale(problem)

        def loss(flat: Any, x: Any, y: Any) -> Any:
            return -program.log_joint(program.unravel(flat), x, y, scale)

        return system.vmap(system.value_and_grad(loss), in_axes=(0, None, None))

    @final
    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        plan, number = self.plan(problem, progress), np.arange(self.steps)
        half = loops.first_half(self.steps)

        def averaging(state: loops.State, now: Mapping[str, Any], *given: Any) -> tuple[loops.State, Any]:
            moved, loss = plan.rule(state, now, *given)
            totals = {f"total {part}": now["counts"] * moved[part] for part in self.averaged}
            return moved | {name: state[name] + total for name, total in totals.items()}, loss

        found = loops.iterate(
            problem,
            averaging,
            plan.start | {f"total {part}": np.zeros_like(plan.start[part]) for part in self.averaged},
            {
                "rate": loops.schedule(self.learning_rate, self.steps, self.last),
                "step": 1.0 + number,
                "counts": (number >= half).astype(float),
                **plan.inputs,
            },
            batch=loops.rows_per_step(self.name, problem, self.batch_size),
            progress=progress,
            title=self.name,
            advice=self.advice,
        )
        # A single step has no second half.
        for part in self.averaged if self.steps > 1 else ():
            found.state[part] = found.state[f"total {part}"] / (self.steps - half)
        ended, flat = plan.finish(found.state), loops.settled(found.losses, self.steps)
        enough, warnings = ended.figures.get("converged", 1.0), ended.warnings
        if not flat and (enough or not self.explains):
            unsettled = loops.unsettled_warning(self.name, self.steps, self.learning_rate)
            warnings = (unsettled, *warnings)
        return replace(
            ended,
            history={"loss": found.losses},
            compile_seconds=found.compile_seconds,
            run_seconds=watch() - found.compile_seconds,
            gradient_evaluations=self.steps
            * self.count(problem.program.parameter_count)
            / self.scale(problem),
            warnings=warnings,
            figures=ended.figures | {"converged": float(flat and enough)},
        )


def by_site(problem: Problem, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Flat vectors (..., P) as copies by site."""
    return {name: np.array(value) for name, value in problem.program.unravel(flat).items()}


def separated(
    problem: Problem, points: Sequence[Mapping[str, np.ndarray]], jitter: float, purpose: str
) -> np.ndarray:
    """The points as flat vectors (n, P), with normal noise on those that repeat an earlier one."""
    flat = np.stack([flat_sites(problem, point) for point in points])
    repeated = np.setdiff1d(np.arange(len(flat)), np.unique(flat, axis=0, return_index=True)[1])
    rng = np.random.default_rng(site_seed(purpose, problem.seed))
    flat[repeated] += jitter * rng.standard_normal((len(repeated), flat.shape[1]))
    return flat
