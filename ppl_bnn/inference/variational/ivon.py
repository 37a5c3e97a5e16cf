"""IVON, the improved variational online Newton method: mean-field variational inference by natural gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import between, setting, whole
from ppl_bnn.inference.curvature.conditioning import conditioning
from ppl_bnn.inference.flat_vector import by_site, flat_sites
from ppl_bnn.inference.method import Outcome
from ppl_bnn.inference.optimisation.loops import State, first_half
from ppl_bnn.inference.optimisation.mode import starting_point
from ppl_bnn.inference.start import Start
from ppl_bnn.inference.variational import iterated
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.inference.variational.objectives import evidence_bound
from ppl_bnn.language import ops

EXCESS_LIMIT = 0.1
# The least relaxation times of the flattest direction for which the steps at the full rate must last.
RELAXED = 3.0
EARLY_DECAY = 0.1


@dataclass(frozen=True)
class IVON(iterated.IteratedMethod):
    """Improved variational online Newton: mean-field variational inference by natural gradients [1]_.

    It maximises the ELBO over q(u) = prod_j N(u_j; m_j, 1 / s_j). One step, elementwise, with eps ~ N(0, 1),
    u = m + eps s^(-1/2) and l(u) = -log p(w(u), D) - log |dw/du|, is

        g = grad l(u)                           e = g eps s^(1/2), which has the mean diag(hessian l) under q
        v <- b1 v + (1 - b1) g                  d = (1 - b2) (e - s)
        s <- s + d + d^2 / (2 s)                m <- m - rate v / (1 - b1^t) / s

    Parameters
    ----------
    steps : int, default 10000
        Number of steps.
    learning_rate : float, default 0.1
        Dimensionless; 1 is a Newton step. It is held for half of the steps and falls linearly to a tenth over the rest.
    momentum : float, default 0.9
        Decay rate b1 of the average of gradients.
    curvature_momentum : float, default 0.995
        Decay rate b2 of the average of curvatures. With mini-batches, whose gradients are noisy, it should be closer
        to 1.
    batch_size : int or None
        Rows per step, with the likelihood scaled by N / batch_size; None for all rows.
    particles : int, default 1
        Draws per step, over which g and e are averaged.
    init_scale : float, default 0.1
        Initial value of s^(-1/2).
    start : method, posterior, dict or None
        Initial value of m: a method, a posterior or a dict of constrained values; None for the prior.
    elbo_draws : int, default 1000
        Number of new draws for the reported ELBO.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    DivergenceError
        The loss became infinite or NaN.
    UnsupportedError
        A parameter without a prior, or mini-batches of a model whose rows cannot be separated.

    Notes
    -----
    The update is that of the paper with the whole log joint in the loss and no weight decay. Its term d^2 / (2 s) [2]_
    keeps s above half of its previous value. At first 1 - b2 is 2 / (t + 1), at most a tenth, to forget the initial
    scale. One learning rate works for coordinates of very different curvature, because the geometry is that of q.
    Iterates are averaged over the second half. On a Gaussian posterior, m scatters by (steps particles / 2)^(-1/2)
    posterior standard deviations, and s is too large by the share (1 - b2) E[(e - s)^2] / (2 s^2).

    History: "loss", one estimate of -ELBO per step. Figures: "elbo" and its standard error "elbo_se";
    "precision_excess", the mean of that share of s, with a warning above a tenth; "converged", 1 if the loss was on a
    plateau when the rate began to fall and, for up to 300 coordinates, the steps were enough to cross the flattest
    direction of the curvature at m.

    References
    ----------
    .. [1] Shen et al. (2024). Variational learning is effective for large deep networks.
    .. [2] Lin, Schmidt and Khan (2020).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.IVON(steps=200, elbo_draws=20), standardise=True)
    >>> posterior.predict(table.x[:5], draws=50).std.shape
    (5,)
    """

    steps: int = setting(10_000, whole())
    learning_rate: float = setting(0.1, between())
    momentum: float = setting(0.9, between(0, 1))
    curvature_momentum: float = setting(0.995, between(0, 1))
    batch_size: int | None = iterated.batch_setting()
    particles: int = setting(1, whole())
    init_scale: float = setting(0.1, between())
    start: Start = None
    elbo_draws: int = setting(1000, whole(2))
    averaged: ClassVar[tuple[str, ...]] = ("mean", "precision", "excess")
    remedy: ClassVar[str] = "a smaller init_scale"
    explains: ClassVar[bool] = True
    limitations: ClassVar[str] = (
        "Its weights are independent, and it covers one of several modes: variances are too small, most of all "
        "between the data."
    )

    def plan(self, problem: Problem, progress: Progress) -> iterated.Plan:
        mean = flat_sites(problem, starting_point(problem, self.start, progress))
        zeros, number = np.zeros_like(mean), np.arange(self.steps)
        start = {"mean": mean, "precision": zeros + self.init_scale**-2, "momentum": zeros}
        # 1 - b2 is larger at first, so that the initial scale is forgotten.
        early = np.minimum(EARLY_DECAY, 2.0 / (2.0 + number))
        inputs = {
            "correction": 1.0 - self.momentum ** (1.0 + number),
            "decay": np.maximum(1.0 - self.curvature_momentum, early),
        }
        finish = functools.partial(self._finish, problem)
        return iterated.Plan(self._rule(problem), start | {"excess": np.zeros(())}, finish, inputs)

    def _finish(self, problem: Problem, state: Mapping[str, np.ndarray]) -> Outcome:
        mean, precision, excess = (state[name] for name in self.averaged)
        parts = (by_site(problem, flat) for flat in (mean, precision**-0.5))
        approximation = MeanField(*parts)
        draws, seed = self.elbo_draws, problem.seed
        figures, *_ = evidence_bound(self.name, problem, approximation, draws, seed, self.advice)
        figures["precision_excess"] = float(excess)
        warnings = []
        if excess > EXCESS_LIMIT:
            closer = 1.0 - (1.0 - self.curvature_momentum) / 10.0
            warnings.append(
                f"IVON: the noise of the curvature makes the precisions {excess:.0%} too large on average; try "
                f"curvature_momentum={closer:g}, more particles or larger batches"
            )
        found = conditioning(problem, mean)
        if found is not None:
            # Along the smallest eigenvalue r of the scaled curvature, the error of m falls as exp(-r rate steps).
            lasted = self.learning_rate * first_half(self.steps) * float(found.scaled[0])
            if lasted < RELAXED:
                figures["converged"] = 0.0
                share = float(np.median(1.0 / (np.diag(found.curvature) * found.variances)))
                warnings.append(
                    f"IVON has not converged: its steps last for {lasted:.2g} relaxation times of the flattest "
                    f"direction. {found.explanation()}; independent normals show {share:.2g} of the variances there"
                )
        return Outcome(approximation, figures=figures, warnings=tuple(warnings))

    def _rule(self, problem: Problem) -> Any:
        evaluated, slow = self.gradients(problem), self.momentum

        def rule(state: State, now: State, x: Any, y: Any, randomness: Any) -> tuple[State, Any]:
            mean, precision = state["mean"], state["precision"]
            eps = randomness.normal((self.particles, mean.shape[0]), mean)
            root = ops.sqrt(precision)
            values, gradients = evaluated(mean + eps / root, x, y)
            momentum = slow * state["momentum"] + (1.0 - slow) * gradients.mean(0)
            change = now["decay"] * ((gradients * eps).mean(0) * root - precision)
            excess = change**2 / (2.0 * precision)
            log_q = (ops.log(root) - 0.5 * math.log(2.0 * math.pi)).sum() - 0.5 * (eps**2).sum(1)
            precision = precision + change + excess
            mean = mean - now["rate"] * momentum / now["correction"] / precision
            # Of a single step, which does not count, there is none.
            share = now["counts"] * (excess / precision).mean() / now["decay"]
            state = {"mean": mean, "precision": precision, "momentum": momentum, "excess": share}
            return state, (values + log_q).mean()

        return rule
