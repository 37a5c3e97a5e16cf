"""A Laplace approximation with its evidence, and with hyper-parameters chosen by the evidence or by held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.inference.curvature.jacobian import refuse_interacting_rows
from ppl_bnn.inference.curvature.kronecker import KroneckerCurvature
from ppl_bnn.inference.curvature.prior import check_bounded, check_smooth
from ppl_bnn.inference.flat_vector import flat_sites, site_slices, somewhere
from ppl_bnn.inference.laplace.approximation import LaplaceGaussian
from ppl_bnn.inference.laplace.autolaplace import guide_gaussian, refuse_point_estimates
from ppl_bnn.inference.laplace.computed_weights import JUDGED, bent, computed_names
from ppl_bnn.inference.laplace.evidence import Evidence, Tuned
from ppl_bnn.inference.laplace.fit import GaussianFit
from ppl_bnn.inference.laplace.hyperparameters import (
    Tuning,
    gaussian_noise,
    log_likelihood,
    log_prior,
    noise_sites,
)
from ppl_bnn.inference.laplace.maximisation import alternate, fixed_point, maximise
from ppl_bnn.inference.laplace.search import by_validation
from ppl_bnn.inference.method import Outcome, Stopwatch
from ppl_bnn.inference.optimisation.mode import Mode, kinks

# Nats of log evidence that the alternation may lose from its best round: it ignores how a new mode changes H.
RUNAWAY = 1.0
# The largest accepted distance of computed weights from their linearisation, in its standard deviations.
BENT = 0.1


class _RanAwayError(Exception):
    """The alternation has lost more evidence than its approximation explains."""


class Fit(GaussianFit):
    """A fit from the mode to its outcome: evidence, tuned hyper-parameters, warnings."""

    def outcome(self) -> Outcome:
        return self.by_guide() if self.method.engine == "guide" else self.by_curvature()

    def by_guide(self) -> Outcome:
        refuse_point_estimates(self.problem)
        self._refuse_kinks()
        mode = self._mode()
        watch = Stopwatch()
        gaussian = guide_gaussian(self.problem, mode.u)
        approximation = LaplaceGaussian(self._latents(mode.u), gaussian, predictives=("sampled",))
        self.passes = 1.0
        return self._outcome(mode, mode.u, approximation, watch)

    def by_curvature(self) -> Outcome:
        method, problem = self.method, self.problem
        check_smooth(problem)
        if method.curvature == "hessian":
            self._refuse_kinks()
        if method.curvature != "hessian":
            refuse_interacting_rows(problem)
        if not problem.program.language and method.curvature != "hessian":
            problem.program.likelihood.fisher(None)
        exact = method.curvature == "ggn" and method.fisher == "exact"
        if exact and not problem.program.likelihood.has_fisher:
            problem.program.likelihood.fisher(None)
        self._check_names()
        self._kinds()
        if problem.program.language:
            anywhere = somewhere(problem)
            check_bounded(problem, anywhere, method.marginal)
            self._check_settings(anywhere)
        if method.marginal:
            mode = self._marginal_mode()
        else:
            mode = self._mode()
        watch = Stopwatch()
        u = mode.u
        positions = self._positions(u)
        factors: dict[str, np.ndarray] = {}
        noise: float | None = None
        if method.tune != "none" or method.noise == "evidence":
            u, covariance, factors, noise = self._tuned(u, positions)
        else:
            covariance = self._gaussian(u, positions)
            if not method.optimise and not method.marginal:
                mode = self._judged(mode, covariance, positions)
        everything = len(positions) == self._size
        approximation = LaplaceGaussian(
            mode=self._latents(u),
            covariance=covariance,
            held={site.name: np.asarray(u[site.name]) for site in problem.program.params},
            positions=None if everything else positions,
            factors=factors,
            noise=noise,
            predictives=self._kinds(),
        )
        return self._outcome(mode, u, approximation, watch, positions)

    def _outcome(
        self,
        mode: Mode,
        u: Mapping[str, np.ndarray],
        approximation: LaplaceGaussian,
        watch: Stopwatch,
        positions: np.ndarray | None = None,
    ) -> Outcome:
        covariance = approximation.covariance
        self._judge_weights(approximation)
        if "log_evidence" not in self.figures:
            prior = log_prior(self.problem, u, np.arange(self._size) if positions is None else positions)
            volume = 0.5 * (covariance.size * np.log(2.0 * np.pi) + covariance.log_determinant)
            self.figures["log_evidence"] = float(log_likelihood(self.problem, u) + prior + volume)
        if self.method.restarts > 1:
            self.standing = self.figures["log_evidence"] + self._log_prior_held(u, positions)
        return Outcome(
            approximation=approximation,
            history={"loss": mode.losses},
            compile_seconds=mode.compile_seconds,
            run_seconds=mode.run_seconds + watch(),
            gradient_evaluations=mode.evaluations + self.refinement.evaluations + self.passes,
            warnings=mode.warnings + self.warnings,
            figures={
                "log_joint": mode.log_joint,
                **mode.figures,
                "converged": float(mode.converged),
                **self.figures,
            },
        )

    def _judge_weights(self, approximation: LaplaceGaussian) -> None:
        """Warn if weights that the program computes are far from their linearisation."""
        names = computed_names(self.problem)
        if not names:
            return
        draws = approximation.draw(JUDGED, np.random.default_rng(site_seed("computed", self.problem.seed)))
        remainder, width = bent(self.problem, approximation.centre(), draws)
        self.figures["computed_weights_remainder"] = remainder
        if not remainder <= BENT:
            self._say(
                f"weights that are computed from other sites ({', '.join(names)}) are linearised about the mode, in "
                "sampled predictions and in draws; multiplied out from draws of these sites they would be up to "
                f"{width:.2g} times as wide. The log evidence takes the log joint as quadratic in these sites, which "
                "it is not, and may be off by several nats: compare it with SMC()"
            )

    def _log_prior_held(self, u: Mapping[str, np.ndarray], positions: np.ndarray | None) -> float:
        """Log prior density of the sites outside the Gaussian; a noise that the evidence chose has none."""
        if positions is None:
            return 0.0
        outside = np.ones(self._size, dtype=bool)
        outside[positions] = False
        if self.method.noise == "evidence":
            for name in noise_sites(self.problem, u):
                outside[site_slices(self.problem)[name]] = False
        return log_prior(self.problem, u, np.flatnonzero(outside))

    def _tuned(
        self, u: dict[str, np.ndarray], positions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], Any, dict[str, np.ndarray], float | None]:
        """The mode, the Gaussian, factors by site and the noise, after tuning."""
        method, problem = self.method, self.problem
        with_noise = method.noise == "evidence"
        noise = gaussian_noise(problem, u) if with_noise else None
        held = () if noise is None or noise.site is None else (noise.site,)
        latest: tuple[dict[str, np.ndarray], Any] | None = None

        def curvature_at(at: Any) -> Any:
            # The same mode is needed several times: for the evidence, and at the end for the Gaussian.
            nonlocal latest
            if latest is None or latest[0] is not at:
                latest = at, self._data_curvature(at, positions)
            return latest[1]

        tuning = Tuning.of(problem, u, positions, method.tune, with_noise, curvature_at)
        search: Any = method.search
        scale = 1.0
        prior: Any = None
        evidence: Evidence | None = None
        if method.objective == "validation":
            factors = self._validated(tuning, positions)
        else:
            if method.during_training:
                found, u = self._alternated(tuning, u, held)
            else:
                prior = self._tuned_prior(tuning, u)
                evidence = tuning.evidence(u, prior)
                maximiser = {"fixed_point": fixed_point, "maximise": maximise}[search]
                found = maximiser(evidence, tune_noise=with_noise)
            factors, scale = found.factors, found.scale
            self.warnings += found.warnings
        if method.objective == "validation" and method.during_training:
            u = self.refinement.mode(u, held=held, changes=tuning.changes(factors, scale))
        if evidence is None:
            prior = self._tuned_prior(tuning, u)
            evidence = tuning.evidence(u, prior)
        self.figures["log_evidence"] = evidence.log_evidence(factors, scale)
        self.figures["effective_parameters"] = float(evidence.effective_parameters(factors, scale).sum())
        curvature = curvature_at(u)
        covariance = (curvature if scale == 1.0 else curvature.scaled(scale)).gaussian(
            factors[tuning.groups] * prior
        )
        self._check_mode(u, covariance, tuning, factors, scale)
        if len(factors) <= 50:
            for name, factor in zip(tuning.names, factors, strict=True):
                if name not in tuning.held:
                    self.figures[f"prior_factor/{name}"] = float(factor)
        known: float | None = None
        if noise is not None:
            value = noise.value / np.sqrt(scale)
            self.figures["noise"] = float(np.mean(value))
            if noise.site is None:
                known = float(value)
            else:
                u = self._with_value(u, noise.site, value)
        self.figures["log_joint"] = self._log_joint(u, positions, covariance)
        return u, covariance, tuning.site_factors(factors), known

    def _alternated(
        self, tuning: Tuning, start: dict[str, np.ndarray], held: Sequence[str]
    ) -> tuple[Tuned, dict[str, np.ndarray]]:
        """MacKay's alternation of modes and factors; if it diverges, only as far as the evidence rises."""
        best, highest, patience = start, -np.inf, RUNAWAY

        def evidence_at(factors: np.ndarray, scale: float) -> Evidence:
            # Start from the best mode so far, so that a step that was too long does not affect the next.
            nonlocal best, highest
            u = self.refinement.mode(best, held=held, changes=tuning.changes(factors, scale))
            evidence = tuning.evidence(u, self._tuned_prior(tuning, u))
            value = evidence.log_evidence(factors, scale)
            if value < highest - patience:
                raise _RanAwayError
            if value > highest:
                best, highest = u, value
            return evidence

        def search(monotone: bool) -> Tuned:
            method: Any = self.method.search
            return alternate(
                evidence_at,
                tuning.ones,
                method=method,
                tune_noise=tuning.noise,
                monotone=monotone,
                progress=self.progress,
            )

        try:
            found = search(monotone=False)
        except _RanAwayError:
            self.warnings += (
                "alternating modes and hyper-parameters lost evidence, as it may in a network: steps were taken only "
                "as far as they raise it",
            )
            best, highest, patience = start, -np.inf, np.inf
            found = search(monotone=True)
        u = self.refinement.mode(best, held=held, changes=tuning.changes(found.factors, found.scale))
        return found, u

    def _log_joint(self, u: Mapping[str, np.ndarray], positions: np.ndarray, covariance: Any) -> float:
        """The log joint at u under the tuned hyper-parameters: the evidence without the volume, and the held sites."""
        outside = np.setdiff1d(np.arange(self._size), positions)
        volume = 0.5 * (covariance.size * np.log(2.0 * np.pi) + covariance.log_determinant)
        return float(self.figures["log_evidence"] - volume + log_prior(self.problem, u, outside))

    def _check_mode(
        self, u: Mapping[str, np.ndarray], covariance: Any, tuning: Tuning, factors: Any, scale: float
    ) -> None:
        """Warn if the tuned hyper-parameters have moved the mode: a Newton step gains g' A^-1 g / 2 nats."""
        size = flat_sites(self.problem, u)
        _, gradient = self.refinement.value_and_grad(size, tuning.changes(factors, scale))
        if kinks(self.problem):
            return
        latent = gradient[tuning.places]
        self.figures["gradient_norm"] = float(np.linalg.norm(latent))
        gain = self._gain(latent, covariance)
        if gain > 1.0:
            self.warnings += (
                f"the mode is not that of the tuned hyper-parameters: a Newton step would gain {gain:.3g} nats; "
                "during_training=True finds the mode again",
            )

    def _tuned_prior(self, tuning: Tuning, u: Mapping[str, np.ndarray]) -> np.ndarray:
        prior = tuning.prior(u)
        if self.method.structure == "kron":
            return self._for_kronecker(tuning.curvature_at(u), prior)
        return prior

    def _with_value(self, u: dict[str, np.ndarray], site: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """u with one site at a constrained value."""
        problem = self.problem
        w = problem.program.constrain_draws(
            {n: np.asarray(v)[None] for n, v in u.items()}, problem.x, problem.y
        )
        w = {name: each[0] for name, each in w.items()} | {site: value}
        return problem.program.unconstrain(w, problem.x, problem.y)

    def _validated(self, tuning: Tuning, positions: np.ndarray) -> np.ndarray:
        """Factors (G,) by the log score of rows that neither the mode nor the curvature used."""
        method, problem = self.method, self.problem
        rng = np.random.default_rng(site_seed("validation", problem.seed))
        order = rng.permutation(problem.rows)
        count = self._held_out()
        out, rows = np.sort(order[:count]), np.sort(order[count:])
        part = _rows_of(problem, rows)
        # A given mode was trained on the held-out rows too, so it is used only as the start of training.
        alone = replace(method, tune="none", objective="evidence", optimise=True, restarts=1)
        fit = GaussianFit(alone, part, self.progress, self.restart)
        u = fit._mode().u
        curvature = fit._data_curvature(u, positions)
        prior = fit._prior(u, positions)
        if isinstance(curvature, KroneckerCurvature):
            prior = fit._for_kronecker(curvature, prior)
        inputs = map_data(lambda a: np.asarray(a)[out], problem.inputs)
        targets = np.asarray(problem.targets)[out]
        tuned = np.array([name not in tuning.held for name in tuning.names])
        kind = self._kinds()[0]

        def score(free: np.ndarray) -> float:
            factors = tuning.ones
            factors[tuned] = free
            covariance = curvature.gaussian(factors[tuning.groups] * prior)
            held = {site.name: np.asarray(u[site.name]) for site in part.program.params}
            where = None if len(positions) == self._size else positions
            approximation = LaplaceGaussian(fit._latents(u), covariance, held, where)
            prediction = approximation.closed_form(part, inputs, kind, method.memory)
            assert prediction is not None
            return float(np.mean(prediction.log_prob(targets)))

        names = [name for name, free in zip(tuning.names, tuned, strict=True) if free]
        found = by_validation(
            score,
            np.ones(len(names)),
            per="global" if len(names) == 1 else "group",
            names=names,
            progress=self.progress,
        )
        self.warnings += found.warnings
        self.passes += fit.passes + fit.refinement.evaluations
        factors = tuning.ones
        factors[tuned] = found.factors
        return factors


def _rows_of(problem: Problem, rows: np.ndarray) -> Problem:
    """The same problem with some of its rows."""
    program, system = problem.program, problem.system
    inputs = map_data(lambda a: np.asarray(a)[rows], problem.inputs)
    targets = np.asarray(problem.targets)[rows]
    x, y = map_data(system.asarray, inputs), system.asarray(targets)
    part = Program.of(
        system,
        program.model,
        x,
        y,
        language=program.language,
        observed=None if program.language else program.observed,
    )
    return replace(problem, program=part, x=x, y=y, inputs=inputs, targets=targets)
