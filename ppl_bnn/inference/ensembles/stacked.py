"""Stacking as a method: any method whose posterior has several chains or members, with weights for these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import InputError, unknown_name
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.posterior.stacking import stack

WAYS = ("loo", "validation")


@dataclass(frozen=True)
class Stacked(Method):
    """Weight the chains or members of a posterior by their predictions (see `ppl_bnn.posterior.stacking`).

    The weights are [1]_ (for chains that do not mix see [2]_)

        w = argmax over the simplex of sum_i log sum_k w_k p_k(y_i).

    With equal weights, a chain that is stuck in a poor mode counts as much as any other. The result is the mixture that
    predicts best. It is not the posterior and cannot serve as a reference for it.

    Parameters
    ----------
    member : Method
        The method, such as `NUTS(chains=8)` or an ensemble.
    by : {"loo", "validation"}
        "loo": each training row is left out of each chain by importance weights (draws only). "validation": some rows
        are held out, `member` is fitted to the others, and the weights are chosen on the held-out rows. Use it for
        members that are points, and if Pareto k is too large for "loo".
    validation : float, default 0.2
        The share of rows held out, drawn at random without replacement from the seed of the fit.
    ppl, dtype : str
        Those of the member unless given.

    Raises
    ------
    InputError
        A share of rows that leaves none on either side.
    UnsupportedError
        A posterior without parts, or "loo" with points.

    Notes
    -----
    Errors of `member` are raised unchanged. Figures and warnings are those of `member` and of `stack`.
    `gradient_evaluations` is that of `member`; a gradient over the rows that it was fitted to counts as their share of
    all rows.

    References
    ----------
    .. [1] Yao, Vehtari, Simpson and Gelman (2018).
    .. [2] Yao, Vehtari and Gelman (2022).
    """

    member: Method
    by: str = "loo"
    validation: float = 0.2
    ppl: str = dataclasses.field(default="", kw_only=True)
    dtype: str = dataclasses.field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.member, Method):
            raise InputError.of(
                f"{self.name}, member",
                "an instance of a method",
                repr(self.member),
                "Stacked(NUTS(chains=8))",
            )
        given = {name: getattr(self, name) for name in ("ppl", "dtype") if getattr(self, name)}
        if given:
            object.__setattr__(self, "member", dataclasses.replace(self.member, **given))
        for name in ("ppl", "dtype"):
            object.__setattr__(self, name, getattr(self.member, name))
        super().__post_init__()

    @property
    def serves_priors(self) -> frozenset[str]:  # type: ignore[override]
        """Those of `member`."""
        return self.member.serves_priors

    @property
    def serves_local(self) -> bool:  # type: ignore[override]
        """Latent variables per row exist for the fitted rows only, so there are none for held-out rows."""
        return self.by == "loo" and self.member.serves_local

    finds_centre: ClassVar[bool] = False

    def check(self) -> None:
        if self.by not in WAYS:
            raise unknown_name(f"{self.name}, way", self.by, WAYS)
        share = self.validation
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share < 1.0:
            raise InputError.of(
                f"{self.name}, validation", "a share of rows between 0 and 1", repr(share), "validation=0.2"
            )

    @property
    def limitations(self) -> str:
        return f"Weights are those that predict best, which is not what the posterior says. {self.member.limitations}"

    def effort(self, size: Size) -> Effort | None:
        share = 1.0 - self.validation if self.by == "validation" else 1.0
        kept = dataclasses.replace(size, rows=max(1, round(size.rows * share)))
        found = self.member.effort(kept)
        return None if found is None else found.times(share)

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        x, y = problem.inputs, problem.targets
        held: tuple[Any, ...] = ()
        target, share = "", 1.0
        if self.by == "validation":
            kept, out = self._split(problem)
            held = (map_data(lambda array: array[out], x), y[out])
            x, y = map_data(lambda array: array[kept], x), y[kept]
            share = len(kept) / problem.rows
            target = f"the posterior of {len(kept)} of {problem.rows} rows"
        program = problem.program
        posterior = dataclasses.replace(self.member, dtype=problem.dtype).fit(
            program.model,
            x,
            y,
            seed=problem.seed,
            device=problem.device,
            progress=progress,
            observed=None if program.language else program.observed,
        )
        posterior = stack(posterior, *held)
        info = posterior.info
        evaluations = info.gradient_evaluations
        return Outcome(
            approximation=posterior.approximation,
            statistics=posterior.statistics,
            history=info.history,
            compile_seconds=info.compile_seconds,
            run_seconds=watch() - info.compile_seconds,
            gradient_evaluations=None if evaluations is None else evaluations * share,
            warnings=info.warnings,
            figures=info.figures,
            target="; ".join(text for text in (info.target, target) if text),
        )

    def _split(self, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the fitted rows and of the held-out rows, each in order."""
        out = round(self.validation * problem.rows)
        if not 0 < out < problem.rows:
            raise InputError.of(
                f"{self.name}, validation",
                "a share that leaves rows on either side",
                f"{self.validation} of {problem.rows} rows",
                "more rows, or another share",
            )
        order = np.random.default_rng(site_seed("stacking", problem.seed)).permutation(problem.rows)
        return np.sort(order[out:]), np.sort(order[:out])
