"""Hyper-parameters of a Laplace approximation, chosen by the evidence or by held-out rows.

Factors on the precisions of Normal priors, by groups of weights, and on the precision of Gaussian noise are tuned. The
evidence is log p(D | held sites): it does not include the prior density of sites that are held at a value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference import flat_vector
from ppl_bnn.inference.curvature.gaussians import FlatGaussian
from ppl_bnn.inference.curvature.prior import parents, prior_curvature, traced_latents
from ppl_bnn.inference.curvature.structures import DataCurvature, LowRankCurvature
from ppl_bnn.inference.flat_vector import Values
from ppl_bnn.inference.laplace.evidence import SEARCHES, Evidence, EvidenceState, Tuned, alternate, groups_of
from ppl_bnn.inference.laplace.noise import gaussian_noise
from ppl_bnn.inference.laplace.search import by_validation
from ppl_bnn.inference.optimisation.mode import Changes, kinks

if TYPE_CHECKING:
    from ppl_bnn.inference.laplace.fit import LaplaceFit

# Nats of log evidence that the alternation may lose from its best round: it ignores how a new mode changes H.
RUNAWAY = 1.0


class _RanAwayError(Exception):
    """The alternation has lost more evidence than its approximation explains."""


class TunedFit:
    """Which weights of a fit share a factor, and how a mode and an evidence follow from factors (G,) and a scale.

    `positions` (Q,) of the Gaussian have `groups` (Q,), named `names` (G,). Those in `held`, which are not `tuned`
    (G,), have no Normal prior and stay unchanged. `location` and `precision` (Q,) are those of the Normal priors.
    `noise` is the one that the evidence tunes, if any.
    """

    def __init__(self, fit: LaplaceFit, u: Values, positions: np.ndarray):
        """Groups over the sites with Normal priors, by the method's `tune`; "none" leaves all priors unchanged.

        `UnsupportedError` if there is no Normal prior to tune, priors depend on other sites, or noise cannot be tuned.
        """
        problem, per = fit.problem, fit.method.tune
        self.fit, self.method, self.problem, self.positions = fit, fit.method, problem, positions
        self.noise = gaussian_noise(problem, u) if fit.method.noise == "evidence" else None
        sites, above = problem.program.sites, parents(problem, u)
        sizes = {name: int(chosen.sum()) for name, chosen in fit.by_site(positions).items() if chosen.any()}
        normal = [name for name in sizes if sites[name].family == "Normal" and not above[name]]
        dependent = [name for name in sizes if above[name]]
        where, got = f"Laplace(tune={per!r})", f"scales of their own for {', '.join(dependent)}"
        advice = f"marginal={sorted(set().union(*(above[name] for name in dependent)))}"
        expected = "priors that depend on no other site"
        UnsupportedError.check(per == "none" or not dependent, where, expected, got, advice)
        families = ", ".join(sorted({sites[name].family for name in sizes}))
        expected, advice = "a Normal prior, whose precision can be tuned", "priors.Normal, or tune='none'"
        UnsupportedError.check(per == "none" or normal, where, expected, families, advice)
        normal = [] if per == "none" else normal
        held = {name: size for name, size in sizes.items() if name not in normal}
        index, names = groups_of([(name, sizes[name]) for name in normal], per) if normal else (0, ())
        self.held = tuple(f"{name} (as written)" for name in held)
        self.names = (*names, *self.held)
        self.tuned = np.arange(len(self.names)) < len(names)
        tunable = fit.mask(normal)[positions]
        self.groups = np.empty(len(positions), dtype=int)
        self.groups[tunable] = index
        self.groups[~tunable] = len(names) + np.repeat(np.arange(len(held)), list(held.values()))
        location, precision = np.zeros((2, fit.size))
        values, to_numpy = flat_vector.system_values(problem, u), problem.system.to_numpy
        traced = traced_latents(problem, values, *flat_vector.first_rows(problem))
        for name in normal:
            distribution, shape = traced[name].distribution, sites[name].shape
            mean, variance = to_numpy(distribution.mean), to_numpy(distribution.variance).astype(float)
            location[fit.slices[name]] = np.broadcast_to(mean, shape).reshape(-1)
            precision[fit.slices[name]] = 1.0 / np.broadcast_to(variance, shape).reshape(-1)
        self.location, self.precision = location[positions], precision[positions]
        # The positions in the flat vector of all sites, parameters without a prior included.
        self.places = flat_vector.latent_places(problem)[positions]

    # -- what follows from factors

    def prior(self, u: Values) -> np.ndarray:
        """The prior's curvature at u over the positions, at factors of 1: (Q,)."""
        prior = prior_curvature(self.problem, u)
        expected = "priors that are independent over elements, to tune them or the noise"
        got, advice = "a prior with dependence between sites", "marginal=, or bnn.noncentred(model)"
        UnsupportedError.check(prior.ndim == 1, "Laplace", expected, got, advice)
        return prior[self.positions]

    def evidence_at(self, u: Values) -> tuple[Evidence, DataCurvature, np.ndarray]:
        """The evidence at the mode u as a function of factors, and curvature and prior (Q,) there, at factors of 1."""
        fit, problem, tuned = self.fit, self.problem, self.tuned[self.groups]
        prior = self.prior(u)
        curvature = fit.data_curvature(u, self.positions, prior=prior)
        prior = fit.independent_prior(curvature, prior)
        evidence = Evidence(
            curvature.determinant(prior, self.groups),
            self.groups,
            prior=np.where(tuned, self.precision, prior),
            mode=flat_vector.flat_latents(problem, u)[self.positions],
            likelihood=fit.log_likelihood(u) if self.noise is None else gaussian_noise(problem, u).likelihood,
            names=self.names,
            location=self.location,
            held=self.held,
            log_prior_held=fit.log_prior(u, self.positions[~tuned]),
        )
        return evidence, curvature, prior

    def changes(self, factors: np.ndarray, scale: float) -> Changes:
        """The changes of the log joint by the factors, over the flat vector of all sites."""
        penalty, location = np.zeros((2, self.problem.program.parameter_count))
        penalty[self.places] = (factors[self.groups] - 1.0) * self.precision
        location[self.places] = self.location
        return Changes(penalty, location, scale)

    def mode(self, u: Values, factors: np.ndarray, scale: float) -> dict[str, np.ndarray]:
        """The mode for these factors that is near u; a noise that is tuned stays."""
        held = () if self.noise is None or self.noise.site is None else (self.noise.site,)
        return self.fit.refinement.mode(u, held=held, changes=self.changes(factors, scale))

    def site_factors(self, factors: np.ndarray) -> dict[str, np.ndarray]:
        """Site -> factor on its prior's precision: a number if it is the same for the whole site, else an array."""
        each, sites = np.ones(self.fit.size), self.problem.program.sites
        each[self.positions] = factors[self.groups]
        parts = {name: each[at] for name, at in self.fit.slices.items() if not np.all(each[at] == 1.0)}
        return {
            name: np.asarray(part[0]) if np.all(part == part[0]) else part.reshape(sites[name].shape)
            for name, part in parts.items()
        }

    # -- tuning

    def tune(self, u: dict[str, np.ndarray]) -> tuple[Values, FlatGaussian, dict[str, Any]]:
        """The mode, the Gaussian, and the tuned `factors` by site and `noise`, from the mode u of the model."""
        fit, noise, training = self.fit, self.noise, self.method.during_training
        factors, scale = np.ones(len(self.names)), 1.0
        if self.method.objective == "validation":
            factors = self._validated()
            if training:
                u = self.mode(u, factors, scale)
        elif training:
            found, u = self._alternated(u)
            factors, scale = found.factors, found.scale
        evidence, curvature, prior = self.evidence_at(u)
        if self.method.objective == "evidence" and not training:
            found = SEARCHES[self.method.search](evidence)
            factors, scale = found.factors, found.scale
            fit.warnings += found.warnings
        state = evidence.at(factors, scale)
        fit.figures |= {"log_evidence": state.value, "effective_parameters": float(state.gamma.sum())}
        curvature, prior = curvature.scaled(scale), factors[self.groups] * prior
        gaussian = curvature.gaussian(prior)
        # With factors of several groups the evidence is that of the Gaussian itself.
        apart = np.ptp(self.groups[curvature.inside]) if isinstance(curvature, LowRankCurvature) else 0
        beyond, _ = (0.0, 0.0) if apart else fit.beyond_rank(curvature, prior)
        self._check_mode(u, gaussian, self.changes(factors, scale))
        if len(factors) <= 50:
            shown = np.flatnonzero(self.tuned)
            fit.figures |= {f"prior_factor/{self.names[group]}": float(factors[group]) for group in shown}
        known: float | None = None
        if noise is not None:
            value = noise.value / np.sqrt(scale)
            fit.figures["noise"] = float(np.mean(value))
            if noise.site is None:
                known = float(value)
            else:
                u = flat_vector.with_values(self.problem, u, {noise.site: value})
        # The log joint under the tuned hyper-parameters: the evidence without the volume, and the held sites.
        density = fit.figures["log_evidence"] - gaussian.log_volume - beyond
        fit.figures["log_joint"] = float(density + fit.log_prior(u, fit.outside(self.positions)))
        return u, gaussian, {"factors": self.site_factors(factors), "noise": known}

    def _alternated(self, start: Values) -> tuple[Tuned, dict[str, np.ndarray]]:
        """MacKay's alternation of modes and factors; if it diverges, only as far as the evidence rises."""
        fit, ones, search = self.fit, np.ones(len(self.names)), SEARCHES[self.method.search]
        best, highest, patience = start, -np.inf, RUNAWAY

        def evidence_at(factors: np.ndarray, scale: float) -> EvidenceState:
            # Start from the best mode so far, so that a step that was too long does not affect the next.
            nonlocal best, highest
            u = self.mode(best, factors, scale)
            state = self.evidence_at(u)[0].at(factors, scale)
            if state.value < highest - patience:
                raise _RanAwayError
            if state.value > highest:
                best, highest = u, state.value
            return state

        try:
            found = alternate(evidence_at, ones, search, progress=fit.progress)
        except _RanAwayError:
            fit.warnings += (
                "alternating modes and hyper-parameters lost evidence, as it may in a network: steps were taken only "
                "as far as they raise it",
            )
            best, highest, patience = start, -np.inf, np.inf
            found = alternate(evidence_at, ones, search, monotone=True, progress=fit.progress)
        fit.warnings += found.warnings
        return found, self.mode(best, found.factors, found.scale)

    def _check_mode(self, u: Values, gaussian: FlatGaussian, changes: Changes) -> None:
        """Warn if the tuned hyper-parameters have moved the mode: a Newton step gains g' A^-1 g / 2 nats."""
        _, gradient = self.fit.refinement.value_and_grad(flat_vector.flat_sites(self.problem, u), changes)
        if kinks(self.problem):
            return
        latent = gradient[self.places]
        self.fit.figures["gradient_norm"] = float(np.linalg.norm(latent))
        gain = gaussian.newton_gain(latent)
        if gain > 1.0:
            self.fit.warnings += (
                f"the mode is not that of the tuned hyper-parameters: a Newton step would gain {gain:.3g} nats; "
                "during_training=True finds the mode again",
            )

    def _validated(self) -> np.ndarray:
        """Factors (G,) by the log score of rows that neither the mode nor the curvature used."""
        fit, problem, positions = self.fit, self.problem, self.positions
        rng = np.random.default_rng(site_seed("validation", problem.seed))
        out, rows = map(np.sort, np.split(rng.permutation(problem.rows), [fit.validation_rows()]))
        (new, new_targets), (inputs, targets) = (_rows_of(problem, each) for each in (out, rows))
        x, y = map_data(problem.system.asarray, inputs), problem.system.asarray(targets)
        program = problem.program.rebound(x, y)
        part = replace(problem, program=program, x=x, y=y, inputs=inputs, targets=targets)
        # A given mode was trained on the held-out rows too, so it is used only as the start of training.
        alone = replace(self.method, tune="none", objective="evidence", optimise=True, restarts=1)
        training = type(fit)(alone, part, fit.progress, fit.restart)
        u = training.mode().u
        prior = training.prior(u, positions)
        curvature = training.data_curvature(u, positions, prior=prior)
        prior = training.independent_prior(curvature, prior)

        def every(chosen: np.ndarray) -> np.ndarray:
            factors = np.ones(len(self.names))
            factors[self.tuned] = chosen
            return factors

        def score(chosen: np.ndarray) -> float:
            gaussian = curvature.gaussian(every(chosen)[self.groups] * prior)
            approximation = training.approximation(u, gaussian, positions)
            prediction = approximation.closed_form(part, new, fit.kinds()[0], self.method.memory)
            assert prediction is not None
            return float(np.mean(prediction.log_prob(new_targets)))

        names = self.names[: int(self.tuned.sum())]
        found = by_validation(score, np.ones(len(names)), names=names, progress=fit.progress)
        fit.warnings += found.warnings
        fit.passes += training.passes + training.refinement.evaluations
        return every(found.point)


def _rows_of(problem: Problem, rows: np.ndarray) -> tuple[Any, np.ndarray]:
    """Inputs and targets of some rows, in NumPy."""
    return map_data(lambda a: np.asarray(a)[rows], problem.inputs), np.asarray(problem.targets)[rows]
