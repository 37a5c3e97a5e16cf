"""Maximum a posteriori: the mode, and nothing around it."""

from __future__ import annotations

from dataclasses import dataclass

from ppl_bnn.errors import unknown_name
from ppl_bnn.inference.method import Method, Outcome, Start
from ppl_bnn.inference.optimise import best_mode, check_optimiser, check_restarts
from ppl_bnn.posterior import Point
from ppl_bnn.ppl.protocol import Problem
from ppl_bnn.progress import Progress


@dataclass(frozen=True)
class MAP(Method):
    """argmax_u log p(w(u), D) + log |dw/du|: the mode in unconstrained coordinates, the same in both systems.

    A mode depends on coordinates. `space="constrained"` leaves out the second term: the mode of the density of w
    itself; weights are unconstrained and the two differ only in scales such as the noise.

    steps: at most so many of Adam. learning_rate: at the start; it halves on each plateau. tolerance: nats by which a
    hundred steps must lower the loss not to count as a plateau. polish: finish with L-BFGS (float64 only).
    start: a method, a posterior, or a dict of constrained values. restarts: so many starts from draws of the prior, of
    which the highest mode is kept; history["restart_log_joint"] has what each came to, in this order, and the costs are
    those of all.
    """

    steps: int = 20_000
    learning_rate: float = 0.02
    tolerance: float = 1e-4
    polish: bool = True
    space: str = "unconstrained"
    start: Start = None
    restarts: int = 1

    def check(self) -> None:
        check_optimiser(self.name, self.steps, self.learning_rate, self.tolerance)
        check_restarts(self.name, self.restarts, self.start)
        if self.space not in ("unconstrained", "constrained"):
            raise unknown_name("space", self.space, ("unconstrained", "constrained"))

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        mode, log_joints = best_mode(
            problem,
            restarts=self.restarts,
            start=self.start,
            steps=self.steps,
            learning_rate=self.learning_rate,
            tolerance=self.tolerance,
            polish=self.polish,
            jacobian=self.space == "unconstrained",
            progress=progress,
            title=self.name,
        )
        return Outcome(
            approximation=Point(mode.u),
            history={"loss": mode.losses} | ({"restart_log_joint": log_joints} if self.restarts > 1 else {}),
            compile_seconds=mode.compile_seconds,
            run_seconds=mode.run_seconds,
            gradient_evaluations=mode.evaluations,
            warnings=mode.warnings,
            figures={
                "log_joint": mode.log_joint,
                "gradient_norm": mode.gradient_norm,
                "converged": float(mode.converged),
            },
        )
