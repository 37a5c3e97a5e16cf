"""What a model expects before it has seen a target: its prior as a posterior, with all that a posterior can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppl_bnn.inference.drawn import Drawn
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.stepping import check_whole
from ppl_bnn.posterior import Posterior
from ppl_bnn.ppl.protocol import Model, Problem
from ppl_bnn.progress import Progress


@dataclass(frozen=True)
class Prior(Method):
    """Independent draws w ~ p(w); the targets give their units and nothing else. No gradient is taken.

    draws: how many. A parameter without a prior stays where a fit would start it.
    """

    draws: int = 500

    def check(self) -> None:
        check_whole(self.name, "draws", self.draws, 2, "500")

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        u = problem.program.prior_draws(problem.x, problem.y, problem.seed, self.draws)
        return Outcome(Drawn(u), run_seconds=watch(), target="the prior")


def prior_predictive(
    model: Model,
    x: Any,
    y: Any,
    *,
    draws: int = 500,
    seed: int = 0,
    ppl: str = "numpyro",
    observed: str | None = None,
    standardise: bool = False,
    feature_names: tuple[str, ...] | None = None,
    class_names: Sequence[str] | None = None,
) -> Posterior:
    """The prior of `model` as a `Posterior` of `draws` draws: its `predict(x)` is the prior predictive

        p(y | x) = E_{w ~ p(w)} p(y | x, w).

    x (N, F) (or a dict of arrays) and y (N,) or (N, K) say which shapes the model has and, with `standardise`, in which
    units its prior is meant: predictions come back in those of y. What y is otherwise does not matter.

    Raises
    ------
    InputError, ModelError, UnsupportedError (a prior from which nothing can be drawn): before anything is drawn.
    """
    return Prior(draws=draws, ppl=ppl).fit(
        model,
        x,
        y,
        seed=seed,
        device="cpu",
        observed=observed,
        standardise=standardise,
        feature_names=feature_names,
        class_names=None if class_names is None else tuple(class_names),
    )
