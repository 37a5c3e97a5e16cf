"""Stacking as a method: any method whose posterior has several chains or members, with weights for these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import OneOf, between, setting
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.ensembles.of_member import OfMember
from ppl_bnn.inference.method import Outcome, Stopwatch
from ppl_bnn.inference.start import fitted_start
from ppl_bnn.posterior.stacking import stack

WAYS = ("loo", "validation")


@dataclass(frozen=True)
class Stacked(OfMember):
    """Weight the chains or members of a posterior by their predictions (see `ppl_bnn.posterior.stacking`).

    The weights are w = argmax over the simplex of sum_i log sum_k w_k p_k(y_i) [1]_ (for chains that do not mix see
    [2]_). With equal weights, a chain stuck in a poor mode counts as much as any other. The result predicts best; it is
    not the posterior and cannot serve as a reference for it.

    Parameters
    ----------
    member : Method
        The method, such as `NUTS(chains=8)` or an ensemble.
    by : {"loo", "validation"}
        "loo": training rows are left out by importance weights (draws only). "validation": `member` is fitted without
        some rows, which then determine the weights. Use it for points, and if Pareto k is too large for "loo".
    validation : float, default 0.2
        The share of rows held out, drawn without replacement from the seed of the fit.
    ppl, dtype, compile : str, str, bool
        As for `Method`; system and floating type are those of the member unless given.

    Raises
    ------
    InputError
        A share of rows that leaves none on either side.
    UnsupportedError
        A posterior without parts, or "loo" with points.

    Notes
    -----
    Errors of `member` are raised unchanged. Figures and warnings are those of `member` and of `stack`.
    `gradient_evaluations` is that of `member`, in gradients over all rows.

    References
    ----------
    .. [1] Yao, Vehtari, Simpson and Gelman (2018).
    .. [2] Yao, Vehtari and Gelman (2022).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.Stacked(bnn.Ensemble(bnn.MAP(), size=3), by="validation")
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.weights.shape  # of the three members
    (3,)
    """

    by: str = setting("loo", OneOf(WAYS))
    validation: float = setting(0.2, between(0, 1))

    @property
    def serves_local(self) -> bool:  # type: ignore[override]
        """Latent variables per row exist for the fitted rows only, not for held-out rows."""
        return self.by == "loo" and self.member.serves_local

    @property
    def limitations(self) -> str:  # type: ignore[override]
        return f"Weights are those that predict best, which is not what the posterior says. {self.member.limitations}"

    def effort(self, size: Size) -> Effort | None:
        share = 1.0 - self.validation if self.by == "validation" else 1.0
        kept = dataclasses.replace(size, rows=max(1, round(size.rows * share)))
        found = self.member.effort(kept)
        return None if found is None else found.times(share)

    def check_support(self, problem: Problem) -> None:
        # The member makes its own checks, on the rows that it is fitted to, before it begins.
        if self.by == "validation":
            self._split(problem)

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        member = dataclasses.replace(self.member, dtype=problem.dtype)
        target, share, held_out = "", 1.0, ()
        if self.by == "validation":
            kept, out = self._split(problem)
            share = len(kept) / problem.rows
            target = f"the posterior of {len(kept)} of {problem.rows} rows"
            inputs, targets = problem.inputs, problem.targets
            held_out = (map_data(lambda a: a[out], inputs), targets[out])
            # In host memory, for another fit.
            fitted = {"inputs": map_data(lambda a: a[kept], inputs), "targets": targets[kept]}
            problem = dataclasses.replace(problem, **fitted)
        posterior = stack(fitted_start(problem, member, progress), *held_out)
        info = posterior.info
        evaluations = info.gradient_evaluations
        same = ("history", "compile_seconds", "warnings", "figures")
        return Outcome(
            approximation=posterior.approximation,
            statistics=posterior.statistics,
            run_seconds=watch() - info.compile_seconds,
            gradient_evaluations=None if evaluations is None else evaluations * share,
            target="; ".join(text for text in (info.target, target) if text),
            **{name: getattr(info, name) for name in same},
        )

    def _split(self, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the fitted rows and of the held-out rows, each in order."""
        out = round(self.validation * problem.rows)
        wanted, advice = "a share that leaves rows on either side", "more rows, or another share"
        got = f"{self.validation} of {problem.rows} rows"
        InputError.check(0 < out < problem.rows, f"{self.name} validation", wanted, got, advice)
        order = np.random.default_rng(site_seed("stacking", problem.seed)).permutation(problem.rows)
        return np.sort(order[out:]), np.sort(order[:out])
