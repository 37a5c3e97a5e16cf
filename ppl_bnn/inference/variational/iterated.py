"""What IVON, SVGD and MC dropout share besides their loop: gradients, inputs of the steps, the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.settings import optional, setting, whole
from ppl_bnn.inference.method import Outcome, Stopwatch
from ppl_bnn.inference.optimisation.loops import Iterated, first_half, schedule, settled, unsettled_warning
from ppl_bnn.posterior.approximation import Approximation


def batch_setting() -> Any:
    """The field `batch_size`: rows per step, None for all rows."""
    return setting(None, optional(whole()), advice="128")


def gradients_of(problem: Problem, batch: int | None) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """(points (n, P), x, y) -> minus the log joint (n,), scaled from a batch to all rows, and its gradients (n, P)."""
    program, system = problem.program, problem.system
    scale = 1.0 if batch is None else problem.rows / batch

    def loss(flat: Any, x: Any, y: Any) -> Any:
        return -program.log_joint(program.unravel(flat), x, y, scale)

    return system.vmap(system.value_and_grad(loss), in_axes=(0, None, None))


def averaged_steps(rate: float, steps: int) -> dict[str, np.ndarray]:
    """Inputs of the steps: the learning rate, and whether the iterate counts in the mean over the second half."""
    return {"rate": schedule(rate, steps), "counts": (np.arange(steps) >= first_half(steps)).astype(float)}


def by_site(problem: Problem, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Flat vectors (..., P) as copies by site."""
    return {name: np.array(value) for name, value in problem.program.unravel(flat).items()}


def outcome_of(
    method: Any,
    iterated: Iterated,
    watch: Stopwatch,
    approximation: Approximation,
    *,
    gradients: float,
    figures: Mapping[str, float] | None = None,
    warnings: Sequence[str] = (),
    crossed: bool = True,
    silent: bool = False,
) -> Outcome:
    """The outcome of `iterate`. "converged": the loss has settled, and `crossed` is true.

    `silent` omits the warning about a loss that has not settled.
    """
    flat = settled(iterated.losses, method.steps)
    if not flat and not silent:
        warnings = (unsettled_warning(method.name, method.steps, method.learning_rate), *warnings)
    return Outcome(
        approximation=approximation,
        history={"loss": iterated.losses},
        compile_seconds=iterated.compile_seconds,
        run_seconds=watch() - iterated.compile_seconds,
        gradient_evaluations=gradients,
        warnings=tuple(warnings),
        figures={**(figures or {}), "converged": float(flat and crossed)},
    )
