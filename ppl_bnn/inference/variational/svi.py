"""Stochastic variational inference: the member of a family of distributions that is closest to the posterior.

The family is a guide (`guides.py`, or that of the system), the objective a bound on the evidence (`objectives.py`, or
that of the system), and the optimiser Adam on its noisy gradient (`optimisation/adam.py`). This module combines them:
valid combinations of options, the start of a fit, convergence, restarts and resuming.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.protocol import Model
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError, unknown_name
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.inference.checkpoint import Checkpoint, fingerprint
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation.adam import Descent, Stretch, descent
from ppl_bnn.inference.optimisation.loops import (
    STRETCH,
    batch_indices,
    check_whole,
    check_within,
    rows_per_step,
)
from ppl_bnn.inference.optimisation.mode import starting_point
from ppl_bnn.inference.start import Start
from ppl_bnn.inference.variational.autoguide import KEPT, system_guide
from ppl_bnn.inference.variational.families.base import Family
from ppl_bnn.inference.variational.families.blocks import Mixture, family_of
from ppl_bnn.inference.variational.guides import Guide
from ppl_bnn.inference.variational.objectives import ESTIMATORS, OBJECTIVES, Objective
from ppl_bnn.inference.variational.restarts import Restarts
from ppl_bnn.language.distributions import SPECIAL
from ppl_bnn.posterior.approximation import Approximation
from ppl_bnn.posterior.posterior import Posterior

FINAL_RATE = 0.1
# Draws times rows of the reported ELBO, if the number of draws is not given.
ELBO_EFFORT = 5_000_000


@dataclass(frozen=True)
class SVI(Method):
    """Stochastic variational inference: maximise the ELBO over a family of distributions by stochastic gradients.

        max_q ELBO(q) = E_q[log p(w(u), D) + log |dw/du| - log q(u)] <= log p(D)

    Parameters
    ----------
    guide : str, family, dict or callable, default "normal"
        The family of q, in unconstrained coordinates.

        - "normal": independent normals. This is the AutoNormal of the system under its own Trace_ELBO [1]_; if an
          option below needs more than these provide, it is the same family implemented here.
        - "diagonal": the same family, always implemented here.
        - "lowrank", "fullrank", "matrixnormal", "mixture", "iaf", "spline", "delta", or one of these with options
          (`bnn.guides.LowRank(rank=5)`).
        - A dict gives each part its own family: {"output": "fullrank", "*": "normal"}. Keys are names of layers, names
          of sites, or patterns. The first match counts, and the sites of one entry are joint.
        - A function (x, y=None) written in the system `ppl`, with the latent sites of the model.
    steps : int, default 10000
        Number of steps.
    learning_rate : float, default 0.01
        Learning rate in the first half of the steps.
    batch_size : int or None
        Rows per step; None for all rows. The likelihood is scaled by N / batch_size and the divergence counted once.
    particles : int, default 1
        Draws per step.
    init_scale : float or "start", default 0.1
        Initial standard deviation of the guide, in unconstrained coordinates. "start" takes it from the posterior given
        as `start`.
    start : Start
        The initial location: a method, a posterior or a dict of constrained values; None for the prior.
    elbo_draws : int or None
        Number of new draws for the reported ELBO. None for 1000, or fewer if there are many rows.
    stop : {None, "plateau"}
        None takes all steps. "plateau" begins to lower the learning rate when the loss has reached a plateau, and
        lowers it over as many steps as it was held.
    estimator : {"plain", "local", "flipout"}
        Estimator of the gradient of the likelihood.

        - "plain": one draw of the weights for all rows (reparameterisation).
        - "local": the output of a linear map is drawn for each row (local reparameterisation [2]_). For weights that
          are used once per row; refused for shared weights unless `approximate`, in which case the objective is not
          the ELBO.
        - "flipout": one draw with random signs per row [3]_; valid for shared weights.

        "local" and "flipout" need independent normals on the weights that they apply to; other weights are drawn as in
        "plain".
    divergence : {"monte_carlo", "analytic"}
        The divergence of q from the prior: at the draw, or in closed form for each term that has one. Both have the
        same expectation.
    sticking_the_landing : bool, default False
        Whether to omit the score of log q, whose mean is zero [4]_. The gradient then has no variance if q is the
        posterior.
    objective : {"elbo", "iwelbo", "renyi"}
        "iwelbo": log of the mean over `particles` of p / q [5]_. "renyi": the variational Renyi bound of order `alpha`
        [6]_ (alpha = 0 is "iwelbo", alpha -> 1 the ELBO).
    alpha : float or None
        Order of the Renyi bound.
    kl_weight : float, default 1
        Factor on the divergence. 1 is Bayesian inference. Any other value fits another target, the posterior to the
        likelihood raised to 1 / kl_weight, and the fit states this.
    kl_warmup : float, default 0
        Share of the steps, at most 0.3, over which the factor rises from 0. The plateau is checked after it.
    approximate : bool, default False
        Whether to allow "local" for shared weights.
    restarts : int, default 1
        Number of starts. The posterior is the fit with the highest ELBO. The others are in `approximation.members`, so
        that `bnn.diagnose` can compare them.
    stream : bool, default False
        Whether the rows stay in host memory (arrays may be memory maps), so that only the rows of a stretch of steps
        are moved to the device.
    checkpoint : path or None
        A folder that stores an interrupted fit. The same fit continues from it to the same bits.

    Raises
    ------
    DivergenceError
        The loss became infinite or NaN; raised after at most 100 more steps. Its `last` has the last finite values,
        which can be given as `start`.
    UnsupportedError
        Mini-batches of a model whose rows cannot be separated, a local estimator for shared weights, or a combination
        of options that is not defined; the message names it.

    Notes
    -----
    Adam holds its learning rate for the first half of the steps and lowers it linearly to a tenth over the second. The
    fit is the mean of the iterates of the second half (Polyak-Ruppert averaging; for variational inference see [7]_).
    On a Gaussian posterior, mean-field variances then scatter, relative to the optimum, by 2 (steps *
    particles)^(-1/2), which is the accuracy of that many draws, around a bias of the order of -learning_rate / 2.

    Plateau: of the steps at the full learning rate, the mean loss over the last window (a tenth of `steps`) is no more
    than max(2 standard errors of the difference, 0.1 nats) below that of the window before. The figure "converged"
    states whether the loss was on a plateau when the learning rate began to fall; after that, any loss looks flat.

    History: "loss", minus the objective over all rows, one estimate per step. "likelihood_cost", -E log p(D | w), and
    "complexity_cost", the divergence, if the objective is implemented here. "restart_elbo", the best first.

    Figures: "elbo" with its standard error "elbo_se" in nats; "likelihood_cost" and "complexity_cost" (minus their sum
    is the ELBO). All are estimated after the fit. "converged": 0 or 1.

    References
    ----------
    .. [1] Kucukelbir et al. (2017).
    .. [2] Kingma et al. (2015).
    .. [3] Wen et al. (2018).
    .. [4] Roeder et al. (2017).
    .. [5] Burda et al. (2016).
    .. [6] Li and Turner (2016).
    .. [7] Dhaka et al. (2020).
    """

    guide: Any = "normal"
    steps: int = 10_000
    learning_rate: float = 0.01
    batch_size: int | None = None
    particles: int = 1
    init_scale: float | str = 0.1
    start: Start = None
    elbo_draws: int | None = None
    stop: str | None = None
    estimator: str = "plain"
    divergence: str = "monte_carlo"
    sticking_the_landing: bool = False
    objective: str = "elbo"
    alpha: float | None = None
    kl_weight: float = 1.0
    kl_warmup: float = 0.0
    approximate: bool = False
    restarts: int = 1
    stream: bool = False
    checkpoint: Any = None
    serves_priors: ClassVar[frozenset[str]] = frozenset(SPECIAL)

    def check(self) -> None:
        if not callable(self.guide) and not isinstance(self.guide, str | Family | Mapping):
            raise InputError.of(
                "SVI guide", "a name, a family, a dict or a function", repr(self.guide), "guide='normal'"
            )
        if not self._written:
            for each in self.guide.values() if isinstance(self.guide, Mapping) else (self.guide,):
                family_of(each)
        check_whole("SVI", "steps", self.steps, 1, "10_000")
        check_whole("SVI", "particles", self.particles, 1, "1")
        check_whole("SVI", "restarts", self.restarts, 1, "1")
        if self.elbo_draws is not None:
            check_whole("SVI", "elbo_draws", self.elbo_draws, 2, "1000")
        if self.batch_size is not None:
            check_whole("SVI", "batch_size", self.batch_size, 1, "128, or None for all rows")
        check_within("SVI", "learning_rate", self.learning_rate, 0, math.inf, "0.01")
        if self.init_scale != "start":
            check_within("SVI", "init_scale", self.init_scale, 0, math.inf, "0.1")
        elif not isinstance(self.start, Posterior):
            raise InputError.of(
                "SVI init_scale",
                "a posterior as start, for init_scale='start'",
                repr(self.start),
                "init_scale=0.1",
            )
        check_within("SVI", "kl_weight", self.kl_weight, 0, math.inf, "1.0")
        for field, known in (
            ("stop", (None, "plateau")),
            ("estimator", ESTIMATORS),
            ("divergence", ("monte_carlo", "analytic")),
            ("objective", OBJECTIVES),
        ):
            if getattr(self, field) not in known:
                raise unknown_name(field, getattr(self, field), map(str, known))
        warmup = self.kl_warmup
        if isinstance(warmup, bool) or not isinstance(warmup, int | float) or not 0.0 <= warmup <= 0.3:
            raise InputError.of(
                "SVI kl_warmup", "a share of the steps from 0 to 0.3", repr(warmup), "kl_warmup=0.2"
            )
        self._check_objective()
        if self.stream and self.batch_size is None:
            raise InputError.of(
                "SVI stream", "a batch_size, with stream=True", "batch_size=None", "batch_size=500"
            )
        if self._written and self._asked:
            raise UnsupportedError.of(
                "SVI",
                "a guide written by hand with the system's own ELBO",
                f"{', '.join(self._asked)} as well",
                "a guide by name, or leaving these out",
            )
        if self._written and self.elbo_draws is not None and self.elbo_draws > KEPT:
            raise InputError.of(
                "SVI elbo_draws",
                f"at most the {KEPT} draws that are kept of a guide written by hand",
                str(self.elbo_draws),
                "elbo_draws=1000",
            )

    def _check_objective(self) -> None:
        if self.objective == "renyi":
            wrong = isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float)
            if wrong or not math.isfinite(self.alpha or 0.0) or self.alpha == 1.0:
                raise InputError.of("SVI alpha", "an order other than 1", repr(self.alpha), "alpha=0.5")
        elif self.alpha is not None:
            raise InputError.of(
                "SVI alpha", "objective='renyi', with alpha", f"{self.objective!r}", "alpha=None"
            )
        if self.objective == "elbo":
            return
        for field, wanted in (("estimator", "plain"), ("divergence", "monte_carlo"), ("kl_weight", 1.0)):
            if getattr(self, field) != wanted:
                raise UnsupportedError.of(
                    "SVI",
                    f"{field}={wanted!r} for objective={self.objective!r}, whose weights are p / q of one draw",
                    repr(getattr(self, field)),
                    f"{field}={wanted!r}",
                )
        for field, wanted in (("kl_warmup", 0.0), ("sticking_the_landing", False)):
            if getattr(self, field) != wanted:
                raise UnsupportedError.of(
                    "SVI", f"objective='elbo' for {field}", f"{self.objective!r}", f"{field}={wanted!r}"
                )
        if self.particles < 2:
            raise InputError.of(
                "SVI particles",
                f"at least 2 for objective={self.objective!r}, which with one is the ELBO",
                str(self.particles),
                "particles=10",
            )

    @property
    def streams(self) -> bool:
        return self.stream

    @property
    def _written(self) -> bool:
        return callable(self.guide) and not isinstance(self.guide, Family)

    @property
    def _asked(self) -> list[str]:
        """The options in use that the guide and ELBO of the system do not provide."""
        unasked: dict[str, Any] = {
            "estimator": "plain",
            "divergence": "monte_carlo",
            "sticking_the_landing": False,
            "objective": "elbo",
            "kl_weight": 1.0,
            "kl_warmup": 0.0,
        }
        if self._written:
            # A hand-written guide determines its own start.
            unasked |= {"start": None, "init_scale": 0.1}
        given = {field: getattr(self, field) for field in unasked}
        # A start may hold arrays, which have no truth value of their own.
        return [name for name, value in unasked.items() if given[name] is not value and given[name] != value]

    @property
    def limitations(self) -> str:
        narrow = (
            "It puts no mass where the posterior has none, rather than some wherever it has: variances are too small, "
            "and of several modes it has one."
        )
        if self.guide == "normal":
            return (
                f"{narrow} Its weights are independent, which costs uncertainty between the data above all."
            )
        if self.guide == "mixture" or isinstance(self.guide, Mixture):
            return (
                f"{narrow} A mixture of few independent normals holds correlations in part: of a correlated normal in "
                "four dimensions three components show 0.53 to 0.80 of the variances, ten 0.81 to 0.90."
            )
        return narrow

    def effort(self, size: Size) -> Effort:
        steps = self.steps * self.particles * self.restarts * getattr(self.guide, "components", 1)
        fewest = steps / 10 if self.stop else steps
        share = size.share(self.batch_size)
        # A full-rank guide holds its factor, the gradient of the factor, and Adam's two moments.
        dense = self.guide == "fullrank"
        found = Effort(
            fewest * share,
            0.5 * (fewest + steps) * share,
            steps * share,
            numbers=4.0 * size.parameters**2 * dense,
            operations=6.0 * steps * size.parameters**2 * dense,
        )
        return found.after(effort_of_start(self.start, size, self.restarts))

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        batch = rows_per_step("SVI", problem, self.batch_size, self.stream)
        fit = _Fit(self, problem, batch, progress)
        found = [fit.run(index, progress) for index in range(self.restarts)]
        best = max(found, key=lambda each: each.elbo)
        ranked = sorted(found, key=lambda each: -each.elbo)
        approximation = best.approximation
        history = dict(best.history)
        if self.restarts > 1:
            approximation = Restarts(tuple(each.approximation for each in ranked))
            history["restart_elbo"] = np.array([each.elbo for each in ranked])
        share = 1.0 if batch is None else batch / problem.rows
        steps = sum(len(each.history["loss"]) for each in found)
        return Outcome(
            approximation=approximation,
            history=history,
            compile_seconds=fit.descent.compile_seconds,
            run_seconds=watch() - fit.descent.compile_seconds,
            gradient_evaluations=steps * self.particles * fit.strata * share,
            warnings=(*best.warnings, *self._cautions(fit)),
            figures=best.figures,
            target=self._target(fit),
        )

    def _target(self, fit: _Fit) -> str:
        """What is fitted, if it is not the posterior."""
        found = []
        if self.kl_weight != 1.0:
            found.append(f"tempered: divergence x {self.kl_weight:g}")
        if fit.shared:
            found.append("approximate: local reparameterisation of shared weights")
        return "; ".join(found)

    def _cautions(self, fit: _Fit) -> list[str]:
        found = []
        if self.kl_weight != 1.0:
            found.append(
                f"tempered: the divergence counts {self.kl_weight:g} times, so the target is not the posterior"
            )
        if fit.shared:
            found.append(
                "approximate estimator: local reparameterisation treats the uses of "
                f"{', '.join(fit.shared)} within a row as independent, so the objective is not the ELBO"
            )
        if fit.improper:
            found.append(
                f"the prior of {', '.join(fit.improper)} is improper: the ELBO is known up to a constant only"
            )
        return found


@dataclass(frozen=True)
class _Found:
    """The result of one fit."""

    approximation: Approximation
    elbo: float
    history: dict[str, np.ndarray]
    figures: dict[str, float]
    warnings: tuple[str, ...]


class _Fit:
    """An SVI on a problem: the objective and the loop, created once for all restarts."""

    def __init__(self, method: SVI, problem: Problem, batch: int | None, progress: Progress):
        self.method, self.problem, self.batch = method, problem, batch
        program = problem.program
        special = [site.name for site in program.latents if site.family in SPECIAL]
        self.improper = [site.name for site in program.latents if site.family == "ImproperLogUniform"]
        self.strata = 1
        own = method.guide == "normal" and not method._asked and not special
        self.guide: Guide | None = None
        self.objective: Any
        if method._written or own:
            written: Any = method.guide if method._written else None
            self.objective = system_guide(
                problem, batched_model(problem, batch), written, method.particles, batch
            )
        else:
            self.guide = Guide.of(method.guide, program.sites.values())
            self.strata = self.guide.strata
            self.objective = Objective(
                problem,
                self.guide,
                estimator=method.estimator,
                analytic=method.divergence == "analytic",
                sticking_the_landing=method.sticking_the_landing,
                objective=method.objective,
                alpha=method.alpha,
                particles=method.particles,
                approximate=method.approximate,
                population=None if batch is None else problem.rows,
            )
        # Shared weights that a local estimator treats as if each row used them once.
        self.shared: tuple[str, ...] = getattr(self.objective, "shared", ())
        # Invalid starting values are refused before anything is compiled. A method would be fitted here.
        given = method.start is not None and not isinstance(method.start, Method)
        shapes = self._beginning(0, progress if given else None)
        self.descent: Descent = descent(problem, self.objective, shapes, batch, method.stream)

    def _seed(self, index: int) -> int:
        return self.problem.seed if index == 0 else site_seed(f"restart {index}", self.problem.seed) % 2**31

    def _beginning(self, index: int, progress: Progress | None) -> dict[str, np.ndarray]:
        """Initial parameters of a restart; without `progress`, parameters of the right shapes."""
        method, problem = self.method, self.problem
        latents = problem.program.latents
        scale: dict[str, np.ndarray] = {}
        if progress is None:
            u0 = {site.name: np.zeros(site.unconstrained_shape) for site in problem.program.sites.values()}
        else:
            seeded = replace(problem, seed=self._seed(index))
            if isinstance(method.start, Posterior):
                u0 = self._centre(method.start)
            else:
                u0 = starting_point(seeded, method.start, progress)
            if method.init_scale == "start":
                scale = self._spread(method.start)
        width = 0.1 if isinstance(method.init_scale, str) else float(method.init_scale)
        for site in latents:
            scale.setdefault(site.name, np.full(site.unconstrained_shape, width))
        if self.guide is None:
            return self.objective.start(u0, scale)
        rng = np.random.default_rng(site_seed("guide", self._seed(index)))
        held = {f"param:{site.name}": np.asarray(u0[site.name], float) for site in problem.program.params}
        return self.guide.start(u0, scale, rng) | held

    def _centre(self, start: Posterior) -> dict[str, np.ndarray]:
        centre = start.approximation.centre()
        wanted = {name: site.unconstrained_shape for name, site in self.problem.program.sites.items()}
        got = {name: np.shape(value) for name, value in centre.items()}
        if wanted != got:
            raise InputError.of(
                "start", f"a posterior over {wanted}", f"one over {got}", "a posterior of the same model"
            )
        return {name: np.asarray(centre[name], float) for name in wanted}

    def _spread(self, start: Posterior) -> dict[str, np.ndarray]:
        """Standard deviations of the draws of the posterior given as start."""
        u = start.approximation.draw(1000, np.random.default_rng(self.problem.seed))
        found = {}
        for site in self.problem.program.latents:
            draws = np.asarray(u[site.name], float)
            sd = draws.std(0)
            # For equal numbers the standard deviation is rounding error, but the range is exactly zero.
            if not np.all(np.ptp(draws, axis=0) > 0):
                raise InputError.of(
                    "SVI init_scale",
                    "a start with a spread at every site, for init_scale='start'",
                    f"{start.info.method} without one at {site.name!r}",
                    "init_scale=0.1",
                )
            found[site.name] = sd
        return found

    # -- one fit

    def run(self, index: int, progress: Progress) -> _Found:
        method = self.method
        losses, held = self._descend(index, progress)
        approximation = self.objective.approximation(self.descent.average())
        figures, warnings = self._figures(approximation, self._seed(index))
        converged = plateau(losses[:held, 0], self._window)
        figures["converged"] = float(converged)
        if not converged:
            warnings += (
                f"SVI has not converged: of {len(losses)} steps the loss was still falling after the {held} at the "
                f"full learning_rate={method.learning_rate:g}; try steps={2 * method.steps} or a larger learning rate",
            )
        history = {"loss": losses[:, 0]}
        if np.all(np.isfinite(losses[:, 1:])):
            history |= {"likelihood_cost": losses[:, 1], "complexity_cost": losses[:, 2]}
        return _Found(approximation, figures["elbo"], history, figures, warnings)

    @property
    def _window(self) -> int:
        return self.method.steps // 10

    @property
    def _warm(self) -> int:
        """The first step at which the divergence has its full weight; earlier losses belong to other targets."""
        return max(0, math.ceil(self.method.kl_warmup * self.method.steps) - 1)

    def _descend(self, index: int, progress: Progress) -> tuple[np.ndarray, int]:
        """(loss, likelihood cost, complexity cost) of all steps, and the number of steps at the full learning rate."""
        method, problem, loop = self.method, self.problem, self.descent
        seed = self._seed(index)
        held, total = method.steps - method.steps // 2, method.steps
        losses = np.empty((0, 3))
        warm = max(1.0, method.kl_warmup * method.steps)
        batches = None if self.batch is None else batch_indices(problem.rows, self.batch, seed)
        belongs = {} if method.checkpoint is None else fingerprint(problem, method, guide=method.guide)
        checkpoint = Checkpoint.of(method.checkpoint, belongs, f"restart{index}")
        kept = checkpoint.load()
        if kept is None:
            loop.begin(self._beginning(index, progress), seed)
        else:
            losses = kept.pop("losses")
            held, total = (int(value) for value in kept.pop("held_total"))
            loop.restore(kept)
            for _ in range(len(losses) if batches is not None else 0):
                next(batches)  # pyright: ignore[reportArgumentType]
        name = "SVI" if method.restarts == 1 else f"SVI {index + 1} of {method.restarts}"
        task = progress.task(f"{name} ({problem.system.name})", method.steps)
        try:
            while len(losses) < total:
                done = len(losses)
                count = min(STRETCH, total - done)
                steps = done + np.arange(count)
                stretch = Stretch(
                    rates=schedule(method.learning_rate, steps, held, total),
                    averaged=steps >= held,
                    weights=method.kl_weight * np.minimum(1.0, (steps + 1.0) / warm),
                    indices=None if batches is None else np.stack([next(batches) for _ in range(count)]),
                )
                latest = loop.advance(stretch)
                losses = np.concatenate([losses, latest])
                self._refuse_divergence(losses)
                done += count
                if (
                    method.stop == "plateau"
                    and done < held
                    and plateau(losses[self._warm :, 0], self._window)
                ):
                    held, total = done, 2 * done
                checkpoint.keep(
                    lambda: loop.state() | {"losses": losses, "held_total": np.array([held, total])},  # noqa: B023
                    last=done == total,
                )
                task.update(method.steps if done == total else done, elbo=-float(latest[:, 0].mean()))
        finally:
            task.close()
        return losses, held

    def _refuse_divergence(self, losses: np.ndarray) -> None:
        if math.isfinite(losses[-1, 0]):
            return
        step, method = len(losses) - 1, self.method
        so_far = "the first loss"
        if step:
            so_far = (
                f"before: first {losses[0, 0]:.6g}, lowest {losses[:step, 0].min():.6g}, "
                f"last {losses[step - 1, 0]:.6g}"
            )
        approximation = self.objective.approximation(self.descent.latest())
        failed, blamed = self.descent.failed(), approximation
        if all(np.all(np.isfinite(value)) for value in failed.values()):
            blamed = self.objective.approximation(failed)
        error = DivergenceError.of(
            "SVI",
            "a finite loss",
            f"{losses[-1, 0]} at step {step} ({so_far}){self._blamed(blamed)}",
            f"learning_rate={method.learning_rate / 10:g}, a smaller init_scale, or standardise=True",
        )
        centre = {name: value[None] for name, value in approximation.centre().items()}
        w = self.problem.program.constrain_draws(centre, self.problem.x, self.problem.y)
        error.last = {name: value[0] for name, value in w.items()}
        raise error

    def _blamed(self, approximation: Approximation) -> str:
        """The site that causes a loss that is not finite, as far as draws at the parameters of that loss show."""
        program, system = self.problem.program, self.problem.system
        u = approximation.draw(20, np.random.default_rng(self.problem.seed))
        # NumPyro warns of values outside of a support, which are what this function looks for.
        with ignored("Out-of-support"):
            for index in range(20):
                values = {name: system.asarray(value[index]) for name, value in u.items()}
                sites = system.run(
                    program.native, self.problem.x, self.problem.y, values=values, unconstrained=True
                )
                for site in sites:
                    if site.distribution is None:
                        continue
                    value = self.problem.y if site.name == program.observed else site.value
                    if not np.all(np.isfinite(system.to_numpy(site.distribution.log_prob(value)))):
                        return f", from site {site.name!r}"
        largest = max(u, key=lambda name: float(np.max(np.abs(u[name]))))
        return f"; the largest values are at site {largest!r}"

    def _figures(self, q: Approximation, seed: int) -> tuple[dict[str, float], tuple[str, ...]]:
        """The ELBO of a fit and its two costs from new draws, with standard errors."""
        problem = self.problem
        program = problem.program
        if q.program(program.model) is not program.model:
            program = Program.of(
                problem.system,
                q.program(program.model),
                problem.x,
                problem.y,
                language=program.language,
                observed=program.observed,
            )
        count = self.method.elbo_draws or int(np.clip(ELBO_EFFORT // problem.rows, 20, 1000))
        if q.kind == "point":
            # All draws are equal.
            count = 1
        u = q.draw(count, np.random.default_rng(site_seed("elbo", seed)))
        judged = replace(problem, program=program)
        log_joint = judged.log_joint_draws(u).astype(np.float64)
        if q.kind == "point":
            return {"log_joint": float(log_joint[0]), "elbo": float(log_joint[0]), "elbo_se": 0.0}, (
                "the guide is a point: its ELBO is the log joint there, and no bound on the evidence",
            )
        log_prior, log_q = judged.log_prior_draws(u).astype(np.float64), q.log_prob(u)
        assert log_q is not None
        values = log_joint - log_q
        if not np.all(np.isfinite(values)):
            raise DivergenceError.of(
                "SVI",
                "a finite ELBO",
                f"{int((~np.isfinite(values)).sum())} of {len(values)} draws without a finite log joint",
                f"learning_rate={self.method.learning_rate / 10:g} or standardise=True",
            )
        return {
            "elbo": float(values.mean()),
            "elbo_se": float(values.std(ddof=1) / math.sqrt(count)),
            "likelihood_cost": float((log_prior - log_joint).mean()),
            "complexity_cost": float((log_q - log_prior).mean()),
        }, ()


def batched_model(problem: Problem, batch: int | None) -> Model:
    """The native model for a batch of rows, scaled to all rows.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    batch : int or None
        Rows of a batch; None gives the program's own model for all rows.

    Returns
    -------
    Model
        The native model.
    """
    program = problem.program
    if batch is None:
        return program.native
    if program.language:
        return problem.system.native(program.model, population=problem.rows, record=False)
    return functools.partial(program.native, population=problem.rows)


def schedule(rate: float, step: np.ndarray, held: int, total: int) -> np.ndarray:
    """The learning rate at each step: constant, then linear down to a fraction FINAL_RATE.

    Parameters
    ----------
    rate : float
        The learning rate while it is held.
    step : ndarray
        Numbers of steps.
    held : int
        Steps at the full rate.
    total : int
        Number of steps.

    Returns
    -------
    ndarray
        Learning rates.
    """
    through = np.clip((step + 1 - held) / max(1, total - held), 0.0, 1.0)
    return rate * (1.0 - (1.0 - FINAL_RATE) * through)


def plateau(losses: np.ndarray, window: int) -> bool:
    """Whether the mean of the last `window` losses is not below that of the window before, within noise.

    Within noise means by no more than max(2 standard errors of the difference, 0.1 nats). Losses of different steps use
    different draws, so their standard error is that of independent numbers.

    Parameters
    ----------
    losses : ndarray
        One loss per step.
    window : int
        Number of steps in a window.

    Returns
    -------
    bool
        Whether the loss is on a plateau.
    """
    if window < 2 or len(losses) < 2 * window:
        return False
    before, last = losses[-2 * window : -window], losses[-window:]
    error = math.sqrt((before.var(ddof=1) + last.var(ddof=1)) / window)
    return bool(before.mean() - last.mean() <= max(2.0 * error, 0.1))
