"""Maximum a posteriori estimation: the mode of the posterior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import DivergenceError, InputError
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import OneOf, between, optional, setting, whole
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.optimisation.loops import rows_per_step
from ppl_bnn.inference.optimisation.mode import WAIT, Mode, effort_of_mode, refuse_restarts_from_a_start
from ppl_bnn.inference.optimisation.several_modes import best_mode, find_modes, held_out
from ppl_bnn.inference.start import Start
from ppl_bnn.posterior.approximation import Point


@dataclass(frozen=True)
class MAP(Method):
    """Maximum a posteriori: the mode of the posterior in unconstrained coordinates, the same in both systems.

        argmax_u log p(w(u), D) + log |dw/du|

    `space="constrained"` omits the second term, which gives the mode of the density of w. Weights are unconstrained, so
    the two differ only in scales such as the noise.

    Parameters
    ----------
    steps : int, default 20000
        Maximum number of Adam steps.
    learning_rate : float, default 0.02
        Initial learning rate. It halves on each plateau.
    tolerance : float, default 1e-4
        In nats. A hundred steps that lower the loss by less are a plateau.
    polish : bool, default True
        Whether to finish with L-BFGS (float64 only).
    space : {"unconstrained", "constrained"}
        The coordinates of the mode.
    start : method, posterior, dict or None
        A method, a posterior, or a dict of constrained values; None starts from the prior.
    restarts : int, default 1
        Number of starts from draws of the prior. The highest mode is kept; `history["restart_log_joint"]` has the log
        joint of each. The costs are those of all starts.
    validation : float or None
        The share of rows held out for early stopping, or None. Adam then maximises the log joint of the other rows,
        keeps the iterate with the largest mean log likelihood of the held-out rows, and stops 1000 steps after it.
        There is no polish.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    DivergenceError
        The loss became infinite or NaN.
    UnsupportedError
        Rows are held out of a model whose rows cannot be separated.

    Notes
    -----
    With `validation`, the result is a point on the path to a mode, as its `target` states. Figures:
    "validation_score", the mean log likelihood of the held-out rows in nats, and "best_step".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.MAP(), standardise=True)
    >>> posterior.kind, posterior.predict(table.x).mean.shape
    ('point', (442,))
    """

    steps: int = setting(20_000, whole())
    learning_rate: float = setting(0.02, between())
    tolerance: float = setting(1e-4, between())
    polish: bool = True
    space: str = setting("unconstrained", OneOf(("unconstrained", "constrained")))
    start: Start = None
    restarts: int = setting(1, whole(), advice="5")
    validation: float | None = setting(None, optional(between(0, 1)), advice="0.1, or None for the mode")
    # A fit finds one point, so chains that start from it need one fit each.
    finds_points: ClassVar[bool] = True
    limitations: ClassVar[str] = (
        "It is a point: no epistemic uncertainty, so too sure of itself, most of all away from the data."
    )

    def check(self) -> None:
        refuse_restarts_from_a_start(self.name, self.restarts, self.start)
        if self.validation is not None and self.restarts > 1:
            wanted = "one start with validation=, as highest modes are not what is looked for"
            advice = "Ensemble(MAP(validation=0.1), size=5)"
            raise InputError.of(f"{self.name} restarts", wanted, f"restarts={self.restarts}", advice)

    def effort(self, size: Size) -> Effort:
        if self.validation is not None:
            least = min(self.steps, WAIT)
            return Effort(least, min(self.steps, 3000), self.steps + 100)
        found = effort_of_mode(self.steps, self.polish).times(self.restarts)
        return found.after(effort_of_start(self.start, size))

    def check_support(self, problem: Problem) -> None:
        if self.validation is None:
            return
        where = f"{self.name} validation"
        if problem.rows < 2:
            wanted = "at least 2 rows, one to hold out and one to fit"
            raise InputError.of(where, wanted, str(problem.rows), "validation=None")
        rows = len(held_out(problem, self.validation)[0])
        rows_per_step(where, problem, rows, advice="validation=None")

    def _settings(self, progress: Progress) -> dict[str, Any]:
        names = ("start", "steps", "learning_rate", "tolerance", "polish")
        found = {"jacobian": self.space == "unconstrained", "progress": progress, "title": self.name}
        return found | {name: getattr(self, name) for name in names}

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        if self.validation is not None:
            (outcome,) = self._together([problem], progress)
            if isinstance(outcome, DivergenceError):
                raise outcome
            return outcome
        mode, log_joints = best_mode(problem, restarts=self.restarts, **self._settings(progress))
        outcome = self._outcome(mode)
        if self.restarts > 1:
            outcome.history["restart_log_joint"] = log_joints
        return outcome

    def run_together(
        self, problems: Sequence[Problem], progress: Progress
    ) -> list[Outcome | DivergenceError] | None:
        """Fit several problems of one program in one vectorised loop; a problem that failed has its error.

        None if these settings do not allow a joint loop.
        """
        return None if self.restarts > 1 else self._together(problems, progress)

    def _together(self, problems: Sequence[Problem], progress: Progress) -> list[Outcome | DivergenceError]:
        found = find_modes(problems, validation=self.validation, **self._settings(progress))
        return [each if isinstance(each, DivergenceError) else self._outcome(each) for each in found]

    def _outcome(self, mode: Mode) -> Outcome:
        figures = {"log_joint": mode.log_joint, "converged": float(mode.converged)}
        target = ""
        if mode.held_score is None:
            figures |= mode.figures
        else:
            figures |= {"validation_score": mode.held_score, "best_step": float(mode.best_step or 0)}
            target = f"early stopping on {self.validation:.0%} of the rows, held out"
        found = {name: getattr(mode, name) for name in ("compile_seconds", "run_seconds", "warnings")}
        found |= {"gradient_evaluations": mode.evaluations, "history": {"loss": mode.losses}}
        return Outcome(Point(mode.u), figures=figures, target=target, **found)
