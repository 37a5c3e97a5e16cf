"""Stochastic variational inference: the member of a family of distributions that is closest to the posterior.

The family is a guide (`guides.py`, or of the system), the objective a bound on the evidence (`objectives.py`, or of the
system), and the optimiser Adam (`optimisation/adam.py`). This module has valid combinations of options, the start of a
fit, convergence, restarts and resuming.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import Model
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import OneOf, between, from_to, is_number, optional, setting, whole
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.inference.checkpoint import Checkpoint, fingerprint
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.flat_vector import constrained
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation import loops
from ppl_bnn.inference.optimisation.adam import Descent, descent
from ppl_bnn.inference.optimisation.mode import starting_point
from ppl_bnn.inference.start import Start, check_start
from ppl_bnn.inference.variational.autoguide import KEPT, SYSTEM_GUIDES, SystemGuide
from ppl_bnn.inference.variational.families.base import Family
from ppl_bnn.inference.variational.families.blocks import Mixture, family_of
from ppl_bnn.inference.variational.guides import Guide
from ppl_bnn.inference.variational.objectives import (
    ESTIMATORS,
    OBJECTIVES,
    Objective,
    evidence_bound,
    last_layer,
)
from ppl_bnn.inference.variational.restarts import Restarts
from ppl_bnn.language.distributions import SPECIAL
from ppl_bnn.posterior.approximation import Approximation
from ppl_bnn.posterior.posterior import Posterior

# Draws times rows of the reported ELBO, if the number of draws is not given.
ELBO_EFFORT = 5_000_000
# The options of a fit by the guide and the ELBO of the system.
PLAIN: dict[str, Any] = {
    "estimator": "plain",
    "divergence": "monte_carlo",
    "sticking_the_landing": False,
    "objective": "elbo",
    "kl_weight": 1.0,
    "kl_warmup": 0.0,
}
# A key of a dict guide: the weight and the bias of the linear map whose output is f.
LAST_LAYER = "last_layer"
# The options that `Objective` has under the same names.
OPTIONS = ("estimator", "sticking_the_landing", "objective", "alpha", "particles", "approximate")


@dataclass(frozen=True)
class SVI(Method):
    """Stochastic variational inference: maximise the ELBO over a family of distributions by stochastic gradients.

        max_q ELBO(q) = E_q[log p(w(u), D) + log |dw/du| - log q(u)] <= log p(D)

    Parameters
    ----------
    guide : str, family, dict or callable, default "normal"
        The family of q, in unconstrained coordinates.

        - "normal": independent normals, by the system's AutoNormal and Trace_ELBO [1]_; if an option below needs more,
          the same family implemented here.
        - "diagonal": the same family, always implemented here.
        - "lowrank", "fullrank", "matrixnormal", "mixture", "iaf", "spline", "delta", or one of these with options
          (`bnn.guides.LowRank(rank=5)`).
        - A dict gives each part its own family: {"output": "fullrank", "*": "normal"}. Keys are layers, sites or
          patterns, several of them separated by commas, or "last_layer": weight and bias of the linear map whose output
          is f. The first match counts, and the sites of one entry are joint.
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
    start : method, posterior, dict or None
        The initial location: a method, a posterior or a dict of constrained values; None for the prior.
    elbo_draws : int or None
        Number of new draws for the reported ELBO. None for 1000, or fewer if there are many rows.
    stop : {None, "plateau"}
        None takes all steps. "plateau" begins to lower the learning rate when the loss has reached a plateau, and
        lowers it over as many steps as it was held.
    estimator : {"plain", "local", "flipout", "closed_form"}
        Estimator of the gradient of the likelihood.

        - "plain": one draw of the weights for all rows (reparameterisation).
        - "local": the output of a linear map is drawn for each row (local reparameterisation [2]_), for weights used
          once per row. For shared weights it is refused unless `approximate`, and is then not the ELBO.
        - "flipout": one draw with random signs per row [3]_; valid for shared weights.
        - "closed_form": the expectation over the last layer, whose family is a normal, in closed form [8]_. Exact for
          Gaussian noise and for Poisson counts, by quadrature for two classes; for several, Jensen's lower bound of the
          ELBO. Other weights are drawn as in "plain", or are points: {"last_layer": "matrixnormal", "*": "delta"} is
          the variational Bayesian last layer ("vbll" by name).

        "local" and "flipout" apply to weights with independent normals; other weights are drawn as in "plain".
    divergence : {"monte_carlo", "analytic"}
        The divergence of q from the prior: at the draw, or in closed form for each term that has one. Both have the
        same expectation.
    sticking_the_landing : bool, default False
        Whether to omit the score of log q, whose mean is zero [4]_. The gradient has no variance at q = posterior.
    objective : {"elbo", "iwelbo", "renyi"}
        "iwelbo": log of the mean over `particles` of p / q [5]_. "renyi": the variational Renyi bound of order `alpha`
        [6]_ (alpha = 0 is "iwelbo", alpha -> 1 the ELBO).
    alpha : float or None
        Order of the Renyi bound.
    kl_weight : float, default 1
        Factor on the divergence. Values other than 1 fit another target, the posterior to the likelihood raised to
        1 / kl_weight, and the fit states this.
    kl_warmup : float, default 0
        Share of the steps, at most 0.3, over which the factor rises from 0. The plateau is checked after it.
    approximate : bool, default False
        Whether to allow "local" for shared weights.
    restarts : int, default 1
        Number of starts. The posterior is the fit with the highest ELBO; `approximation.members` has all, for
        `bnn.diagnose`.
    stream : bool, default False
        Whether the rows stay in host memory, and are moved to the device for a stretch of steps at a time. Inputs that
        are a `numpy.memmap` stay in their file, which may be larger than memory, unless `standardise=True`.
    checkpoint : path or None
        A folder that stores an interrupted fit. The same fit continues from it to the same bits.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    DivergenceError
        The loss became infinite or NaN; raised after at most 100 more steps. Its `last` has the last finite values,
        which can be given as `start`.
    UnsupportedError
        Mini-batches of a model whose rows cannot be separated, a local estimator for shared weights, or a combination
        of options that is not defined.

    Notes
    -----
    Adam holds its learning rate for the first half of the steps and lowers it linearly to a tenth over the second. The
    iterates of the second half are averaged (Polyak-Ruppert; for variational inference see [7]_). On a Gaussian
    posterior, mean-field variances then scatter by a relative 2 (steps * particles)^(-1/2) around a bias of about
    -learning_rate / 2.

    Plateau: of the steps at the full learning rate, the mean loss over the last window (a tenth of `steps`) is no more
    than max(2 standard errors of the difference, 0.1 nats) below that of the window before.

    History: "loss", minus the objective over all rows, one estimate per step; "likelihood_cost", -E log p(D | w), and
    "complexity_cost", the divergence, if the objective is implemented here; "restart_elbo", the best first.

    Figures, estimated after the fit: "elbo" with its standard error "elbo_se" in nats; "likelihood_cost" and
    "complexity_cost" (minus their sum is the ELBO); "converged", 1 if the loss was on a plateau when the learning rate
    began to fall (after that, any loss looks flat), otherwise 0.

    References
    ----------
    .. [1] Kucukelbir et al. (2017).
    .. [2] Kingma et al. (2015).
    .. [3] Wen et al. (2018).
    .. [4] Roeder et al. (2017).
    .. [5] Burda et al. (2016).
    .. [6] Li and Turner (2016).
    .. [7] Dhaka et al. (2020).
    .. [8] Harrison, Willes and Snoek (2024).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.SVI(guide="fullrank", steps=200, elbo_draws=20)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.info.history["loss"].shape, posterior.predict(table.x[:5], draws=50).mean.shape
    ((200,), (5,))
    """

    guide: Any = "normal"
    steps: int = setting(10_000, whole())
    learning_rate: float = setting(0.01, between())
    batch_size: int | None = setting(None, optional(whole()), advice="128")
    particles: int = setting(1, whole())
    init_scale: float | str = setting(0.1, lambda value: None if value == "start" else between()(value))
    start: Start = None
    elbo_draws: int | None = setting(None, optional(whole(2)), advice="1000")
    stop: str | None = setting(None, OneOf((None, "plateau")))
    estimator: str = setting("plain", OneOf(ESTIMATORS))
    divergence: str = setting("monte_carlo", OneOf(("monte_carlo", "analytic")))
    sticking_the_landing: bool = False
    objective: str = setting("elbo", OneOf(OBJECTIVES))
    alpha: float | None = None
    kl_weight: float = setting(1.0, between())
    kl_warmup: float = setting(0.0, from_to(0, 0.3), advice="0.2")
    approximate: bool = False
    restarts: int = setting(1, whole())
    stream: bool = False
    checkpoint: Any = None
    serves_priors: ClassVar[frozenset[str]] = frozenset(SPECIAL)

    def check(self) -> None:
        if not callable(self.guide) and not isinstance(self.guide, str | Family | Mapping):
            wanted = "a name, a family, a dict or a function"
            raise InputError.of("SVI guide", wanted, repr(self.guide), "guide='normal'")
        if not self._written:
            for each in self.guide.values() if isinstance(self.guide, Mapping) else (self.guide,):
                family_of(each)
        if self.init_scale == "start" and not isinstance(self.start, Posterior):
            wanted = "a posterior as start, for init_scale='start'"
            raise InputError.of("SVI init_scale", wanted, repr(self.start), "init_scale=0.1")
        self._check_objective()
        if self.stream and self.batch_size is None:
            wanted = "a batch_size, with stream=True"
            raise InputError.of("SVI stream", wanted, "batch_size=None", "batch_size=500")
        if self._written and self._options:
            got = f"{', '.join(self._options)} as well"
            wanted = "a guide written by hand with the system's own ELBO"
            raise UnsupportedError.of("SVI", wanted, got, "a guide by name, or leaving these out")
        if self._written and self.elbo_draws is not None and self.elbo_draws > KEPT:
            wanted = f"at most the {KEPT} draws that are kept of a guide written by hand"
            raise InputError.of("SVI elbo_draws", wanted, str(self.elbo_draws), "elbo_draws=1000")

    def _check_objective(self) -> None:
        if self.objective == "renyi":
            if not is_number(self.alpha) or not math.isfinite(self.alpha or 0.0) or self.alpha == 1.0:
                raise InputError.of("SVI alpha", "an order other than 1", repr(self.alpha), "alpha=0.5")
        elif self.alpha is not None:
            wanted = "objective='renyi', with alpha"
            raise InputError.of("SVI alpha", wanted, repr(self.objective), "alpha=None")
        if self.objective == "elbo":
            return
        for name in (name for name in self._options if name != "objective"):
            wanted = f"{name}={PLAIN[name]!r} for objective={self.objective!r}, whose weights are p / q of one draw"
            raise UnsupportedError.of("SVI", wanted, repr(getattr(self, name)), f"{name}={PLAIN[name]!r}")
        if self.particles < 2:
            wanted = f"at least 2 for objective={self.objective!r}, which with one is the ELBO"
            raise InputError.of("SVI particles", wanted, str(self.particles), "particles=10")

    streams = property(attrgetter("stream"))  # type: ignore[override]

    @property
    def _written(self) -> bool:
        """Whether the guide is a function of the system."""
        return callable(self.guide) and not isinstance(self.guide, Family)

    @property
    def _options(self) -> list[str]:
        """The options in use that the system's guide and ELBO do not provide."""
        # A hand-written guide determines its own start.
        plain = PLAIN | ({"start": None, "init_scale": 0.1} if self._written else {})
        given = {name: getattr(self, name) for name in plain}
        # A start may hold arrays, which have no truth value.
        return [name for name, value in plain.items() if given[name] is not value and given[name] != value]

    @property
    def limitations(self) -> str:  # type: ignore[override]
        narrow = (
            "It puts no mass where the posterior has none, rather than some wherever it has: variances are too small, "
            "and of several modes it has one."
        )
        more = ""
        if self.guide == "normal":
            more = " Its weights are independent, which costs uncertainty between the data above all."
        elif isinstance(self.guide, Mapping) and "delta" in self.guide.values():
            more = " Sites with the family 'delta' have no spread at all."
        elif self.guide == "mixture" or isinstance(self.guide, Mixture):
            more = (
                " A mixture of few independent normals holds correlations in part: of a correlated normal in four "
                "dimensions three components show 0.53 to 0.80 of the variances, ten 0.81 to 0.90."
            )
        return narrow + more

    def effort(self, size: Size) -> Effort:
        steps = self.steps * self.particles * self.restarts * getattr(self.guide, "components", 1)
        fewest = steps / 10 if self.stop else steps
        share = size.share(self.batch_size)
        # A full-rank guide needs its factor, the gradient, and Adam's two moments.
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
        batch = loops.rows_per_step("SVI", problem, self.batch_size, self.stream)
        fit = _Fit(self, problem, batch, progress)
        found = [fit.run(index) for index in range(self.restarts)]
        found.sort(key=lambda each: -each.figures["elbo"])
        best = found[0]
        approximation, history = best.approximation, best.history
        if len(found) > 1:
            approximation = Restarts(tuple(each.approximation for each in found))
            history = history | {"restart_elbo": np.array([each.figures["elbo"] for each in found])}
        share = (batch or problem.rows) / problem.rows
        steps = sum(len(each.history["loss"]) for each in found)
        target, warnings = self._departures(fit)
        return replace(
            best,
            approximation=approximation,
            history=history,
            compile_seconds=fit.descent.compile_seconds,
            run_seconds=watch() - fit.descent.compile_seconds,
            gradient_evaluations=steps * self.particles * fit.objective.strata * share,
            warnings=(*best.warnings, *warnings),
            target=target,
        )

    def _departures(self, fit: _Fit) -> tuple[str, list[str]]:
        """The target, if it is not the posterior, and the warnings about it."""
        targets, warnings = [], []
        if self.kl_weight != 1.0:
            targets.append(f"tempered: divergence x {self.kl_weight:g}")
            warnings.append(
                f"tempered: the divergence counts {self.kl_weight:g} times, so the target is not the posterior"
            )
        if fit.objective.shared:
            targets.append("approximate: local reparameterisation of shared weights")
            warnings.append(
                "approximate estimator: local reparameterisation treats the uses of "
                f"{', '.join(fit.objective.shared)} within a row as independent, so the objective is not the ELBO"
            )
        improper = [s.name for s in fit.problem.program.latents if s.family == "ImproperLogUniform"]
        if improper:
            warnings.append(
                f"the prior of {', '.join(improper)} is improper: the ELBO is known up to a constant only"
            )
        return "; ".join(targets), warnings


class _Fit:
    """An SVI on a problem: the objective and the loop, created once for all restarts."""

    def __init__(self, method: SVI, problem: Problem, batch: int | None, progress: Progress):
        self.method, self.problem, self.batch, self.progress = method, problem, batch, progress
        program = problem.program
        special = any(site.family in SPECIAL for site in program.latents)
        plain = method.guide == "normal" and not method._options and not special
        self.objective: SystemGuide | Objective
        if method._written or plain:
            make = SYSTEM_GUIDES[problem.system.name, method._written]
            model = batched_model(problem, batch)
            self.objective = make(problem, model, method.guide, method.particles, batch)
        else:
            guide = Guide.of(self._specification(), program.sites.values())
            options = {name: getattr(method, name) for name in OPTIONS}
            options |= {"analytic": method.divergence == "analytic", "population": batch and problem.rows}
            self.objective = Objective(problem, guide, **options)
        shapes = self._beginning(0, None)
        self.descent: Descent = descent(problem, self.objective, shapes, method.stream)

    def _specification(self) -> Any:
        """The guide as given, with the sites of the last layer in place of "last_layer"."""
        given = self.method.guide
        if not isinstance(given, Mapping) or LAST_LAYER not in given:
            return given
        layer = ", ".join(filter(None, last_layer(self.problem)[:2]))
        return {layer if key == LAST_LAYER else key: value for key, value in given.items()}

    def _seed(self, index: int) -> int:
        return self.problem.seed if index == 0 else site_seed(f"restart {index}", self.problem.seed) % 2**31

    def _beginning(self, index: int, progress: Progress | None) -> dict[str, np.ndarray]:
        """Initial parameters of a restart; without `progress`, parameters of the right shapes."""
        method, program = self.method, self.problem.program
        scale: dict[str, np.ndarray] = {}
        if progress is None:
            u0 = {site.name: np.zeros(site.unconstrained_shape) for site in program.sites.values()}
        else:
            if isinstance(method.start, Posterior):
                check_start(self.problem, method.start)
                u0 = method.start.approximation.centre()
            else:
                u0 = starting_point(replace(self.problem, seed=self._seed(index)), method.start, progress)
            if method.init_scale == "start":
                scale = self._spread(method.start)
        width = 0.1 if isinstance(method.init_scale, str) else float(method.init_scale)
        scale = {site.name: np.full(site.unconstrained_shape, width) for site in program.latents} | scale
        return self.objective.start(u0, scale, self._seed(index))

    def _spread(self, start: Posterior) -> dict[str, np.ndarray]:
        """Standard deviations of the draws of the posterior given as start."""
        u = start.approximation.draw(1000, np.random.default_rng(self.problem.seed))
        found = {}
        for site in self.problem.program.latents:
            draws = np.asarray(u[site.name], float)
            # For equal numbers the standard deviation is rounding error, but the range is exactly zero.
            if not np.all(np.ptp(draws, axis=0) > 0):
                wanted = "a start with a spread at every site, for init_scale='start'"
                got = f"{start.info.method} without one at {site.name!r}"
                raise InputError.of("SVI init_scale", wanted, got, "init_scale=0.1")
            found[site.name] = draws.std(0)
        return found

    # -- one fit

    def run(self, index: int) -> Outcome:
        """The fit from one start, without its seconds and gradients."""
        method = self.method
        losses, constant = self._descend(index)
        approximation = self.objective.approximation(self.descent.average())
        figures, warnings = self._figures(approximation, self._seed(index))
        converged = loops.plateau(losses[:constant, 0], method.steps // 10)
        figures["converged"] = float(converged)
        if not converged:
            warnings += (
                f"SVI has not converged: of {len(losses)} steps the loss was still falling after the {constant} at the "
                f"full learning_rate={method.learning_rate:g}; try steps={2 * method.steps} or a larger learning rate",
            )
        history = {"loss": losses[:, 0]}
        if np.all(np.isfinite(losses[:, 1:])):
            history |= {"likelihood_cost": losses[:, 1], "complexity_cost": losses[:, 2]}
        return Outcome(approximation, history=history, figures=figures, warnings=warnings)

    def _descend(self, index: int) -> tuple[np.ndarray, int]:
        """(loss, likelihood cost, complexity cost) of all steps, and the number of steps at the full learning rate."""
        method, problem, loop = self.method, self.problem, self.descent
        seed = self._seed(index)
        constant, total = loops.first_half(method.steps), method.steps
        losses = np.empty((0, 3))
        warm = max(1.0, method.kl_warmup * method.steps)
        settings = {} if method.checkpoint is None else fingerprint(problem, method, guide=method.guide)
        checkpoint = Checkpoint.of(method.checkpoint, settings, f"restart{index}")
        kept = checkpoint.load()
        if kept is None:
            loop.begin(self._beginning(index, self.progress), seed)
        else:
            losses = kept.pop("losses")
            constant, total = map(int, kept.pop("held_total"))
            loop.restore(kept)
        batches = None
        if self.batch is not None:
            batches = islice(loops.batch_indices(problem.rows, self.batch, seed), len(losses), None)

        def state() -> dict[str, Any]:
            return loop.state() | {"losses": losses, "held_total": np.array([constant, total])}

        name = "SVI" if method.restarts == 1 else f"SVI {index + 1} of {method.restarts}"
        with closing(self.progress.task(f"{name} ({problem.system.name})", method.steps)) as task:
            while (done := len(losses)) < total:
                count = min(loops.STRETCH, total - done)
                steps = done + np.arange(count)
                latest = loop.advance(
                    rates=loops.falling(method.learning_rate, steps, constant, total),
                    averaged=steps >= constant,
                    weights=method.kl_weight * np.minimum(1.0, (steps + 1.0) / warm),
                    rows=None if batches is None else np.stack(list(islice(batches, count))),
                )
                losses = np.concatenate([losses, latest])
                self._refuse_divergence(losses)
                done += count
                # Losses before the divergence has its full weight belong to other targets.
                judged = losses[math.ceil(warm) - 1 :, 0]
                looks = method.stop == "plateau" and done < constant
                if looks and loops.plateau(judged, method.steps // 10):
                    constant, total = done, 2 * done
                checkpoint.keep(state, last=done == total)
                shown = method.steps if done == total else done
                if task.update(shown, elbo=-float(latest[:, 0].mean())):
                    checkpoint.keep(state, last=True)
                    break
        return losses, min(constant, len(losses))

    def _refuse_divergence(self, losses: np.ndarray) -> None:
        if math.isfinite(losses[-1, 0]):
            return
        approximation = self.objective.approximation(self.descent.latest())
        failed, blamed = self.descent.failed, approximation
        if all(np.all(np.isfinite(value)) for value in failed.values()):
            blamed = self.objective.approximation(failed)
        slower = f"learning_rate={self.method.learning_rate / 10:g}"
        advice = f"{slower}, a smaller init_scale, or standardise=True"
        error = loops.divergence("SVI", losses[:, 0], advice, self._blamed(blamed))
        assert error is not None
        error.last = constrained(self.problem, approximation.centre())
        raise error

    def _blamed(self, approximation: Approximation) -> str:
        """The site that causes a loss that is not finite, as far as draws at these parameters show."""
        program, system, x, y = self.problem.program, self.problem.system, self.problem.x, self.problem.y
        u = approximation.draw(20, np.random.default_rng(self.problem.seed))
        # NumPy warns of values outside of a support, which this function looks for.
        with ignored("Out-of-support"):
            for index in range(20):
                values = {name: system.asarray(value[index]) for name, value in u.items()}
                for site in program.run(values, x, y):
                    if site.distribution is None:
                        continue
                    value = y if site.name == program.observed else site.value
                    if not np.all(np.isfinite(system.to_numpy(site.distribution.log_prob(value)))):
                        return f", from site {site.name!r}"
        largest = max(u, key=lambda name: float(np.max(np.abs(u[name]))))
        return f"; the largest values are at site {largest!r}"

    def _figures(self, q: Approximation, seed: int) -> tuple[dict[str, float], tuple[str, ...]]:
        """The ELBO of a fit and its two costs from new draws, with standard errors, and warnings."""
        problem, program = self.problem, self.problem.program
        model = q.program(program.model)
        if model is not program.model:
            program = replace(program, model=model).rebound(problem.x, problem.y)
        judged = replace(problem, program=program)
        if q.kind == "point":
            # All draws are equal.
            u = q.draw(1, np.random.default_rng(seed))
            log_joint = float(judged.log_joint_draws(u).astype(np.float64)[0])
            warning = "the guide is a point: its ELBO is the log joint there, and no bound on the evidence"
            return {"log_joint": log_joint, "elbo": log_joint, "elbo_se": 0.0}, (warning,)
        count = self.method.elbo_draws or int(np.clip(ELBO_EFFORT // problem.rows, 20, 1000))
        advice = f"learning_rate={self.method.learning_rate / 10:g} or standardise=True"
        figures, u, log_joint, log_q = evidence_bound("SVI", judged, q, count, seed, advice)
        log_prior = judged.log_prior_draws(u).astype(np.float64)
        costs = {
            "likelihood_cost": float((log_prior - log_joint).mean()),
            "complexity_cost": float((log_q - log_prior).mean()),
        }
        return figures | costs, ()


def batched_model(problem: Problem, batch: int | None) -> Model:
    """The native model for a batch of rows, scaled to all rows; for all rows if `batch` is None."""
    program = problem.program
    if batch is None:
        return program.native
    if program.language:
        return problem.system.native(program.model, population=problem.rows, record=False)
    return functools.partial(program.native, population=problem.rows)
