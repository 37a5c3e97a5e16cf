"""Maximum a posteriori: the mode, and nothing around it."""

from __future__ import annotations

from dataclasses import dataclass

from ppl_bnn.errors import unknown_name
from ppl_bnn.inference.method import Method, Outcome, Start
from ppl_bnn.inference.optimise import check_optimiser, find_mode
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
    start: a method, a posterior, or a dict of constrained values.
    """

    steps: int = 20_000
    learning_rate: float = 0.02
    tolerance: float = 1e-4
    polish: bool = True
    space: str = "unconstrained"
    start: Start = None

    def check(self) -> None:
        check_optimiser(self.name, self.steps, self.learning_rate, self.tolerance)
        if self.space not in ("unconstrained", "constrained"):
            raise unknown_name("space", self.space, ("unconstrained", "constrained"))

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        mode = find_mode(
            problem,
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
            history={"loss": mode.losses},
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
