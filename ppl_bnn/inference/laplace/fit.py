"""One fit of a Laplace approximation: the mode, the coordinates of the Gaussian, curvature and prior there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import ravel, site_seed
from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError, check_known
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference import flat_vector
from ppl_bnn.inference.curvature import kronecker
from ppl_bnn.inference.curvature import prior as priors
from ppl_bnn.inference.curvature.curvature import (
    check_blocks_fit,
    check_fisher,
    check_matrix_fits,
    data_curvature,
)
from ppl_bnn.inference.curvature.gaussians import FlatGaussian, Rotated
from ppl_bnn.inference.curvature.jacobian import check_separable_rows, linear_maps
from ppl_bnn.inference.curvature.kronecker import KroneckerBlock, KroneckerCurvature, TensorPrior
from ppl_bnn.inference.curvature.structures import (
    DataCurvature,
    DiagonalCurvature,
    FullCurvature,
    LowRankCurvature,
)
from ppl_bnn.inference.flat_vector import Values, Where
from ppl_bnn.inference.laplace.approximation import LaplaceGaussian
from ppl_bnn.inference.laplace.autolaplace import guide_gaussian
from ppl_bnn.inference.laplace.computed_weights import REMAINDER_DRAWS, computed_names, linearisation_error
from ppl_bnn.inference.laplace.linearised import kinds_of
from ppl_bnn.inference.laplace.noise import noise_sites
from ppl_bnn.inference.laplace.search import marginal_mode
from ppl_bnn.inference.laplace.tuned_fit import TunedFit
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation.mode import RISE, Mode, Refinement, find_mode, kinks, starting_point
from ppl_bnn.inference.start import fitted_start, missing_sites, refuse_without_centre

if TYPE_CHECKING:
    from ppl_bnn.inference.laplace.laplace import Laplace

# Nats that a Newton step may gain from a point that is taken as the mode. This is the error of the log evidence.
NO_MODE = 0.1
# The largest accepted distance of computed weights from their linearisation, in its standard deviations.
LARGEST_REMAINDER = 0.1
# The largest accepted share of the effective parameters beyond the rank.
LARGEST_SHARE = 0.1
# An entry of a prior's curvature below this share of the largest is no dependence.
INDEPENDENT = 1e-10


class LaplaceFit:
    """The state of one fit, from one start."""

    def __init__(self, method: Laplace, problem: Problem, progress: Progress, restart: int = 0):
        self.method, self.problem, self.progress, self.restart = method, problem, progress, restart
        self.refinement = Refinement(problem)
        self.warnings: tuple[str, ...] = ()
        self.figures: dict[str, float] = {}
        self.passes = 0.0
        # The criterion for the best of several starts: the log evidence plus the log prior of the held sites.
        self.score = -np.inf

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of each latent site in the flat vector."""
        return flat_vector.site_slices(self.problem)

    @property
    def size(self) -> int:
        """P, the length of the flat vector."""
        return sum(site.size for site in self.problem.program.latents)

    def warn(self, sentence: str) -> None:
        """Add a warning, once."""
        if sentence not in self.warnings:
            self.warnings += (sentence,)

    def mask(self, names: Collection[str]) -> np.ndarray:
        """Which positions of the flat vector are of these sites, (P,)."""
        latents = self.problem.program.latents
        return np.concatenate([np.full(site.size, site.name in names) for site in latents])

    def by_site(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """For each latent site, which of its elements are among the positions of the flat vector."""
        inside = np.zeros(self.size, dtype=bool)
        inside[positions] = True
        return {name: inside[at] for name, at in self.slices.items()}

    # -- what is not supported

    def check(self) -> None:
        """Refuse what is not supported, before the mode is trained."""
        method, problem = self.method, self.problem
        if method.engine == "guide":
            where, got = "Laplace(engine='guide')", "point estimates (priors.Point)"
            good, expected = not problem.program.params, "priors on all weights"
            UnsupportedError.check(good, where, expected, got, "engine='curvature'")
            self._check_kinks()
            return
        priors.check_smooth(problem)
        if method.curvature == "hessian":
            self._check_kinks()
        else:
            check_separable_rows(problem)
            if not problem.program.language:
                problem.program.likelihood.fisher(None)
            if method.curvature == "ggn":
                check_fisher(problem, method.fisher)
        names = flat_vector.latent_names(problem)
        check_known("site of marginal", method.marginal, names)
        if not isinstance(method.weights, str):
            layers = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
            check_known("layer or site of weights", method.weights, [*layers, *names])
        self.kinds()
        if problem.program.language:
            anywhere = flat_vector.somewhere(problem)
            priors.check_bounded(problem, anywhere, method.marginal)
            self._check_at(anywhere)

    def _check_kinks(self) -> None:
        """Refuse an exact Hessian for a likelihood whose log density is piecewise linear."""
        found, expected = kinks(self.problem), "a log joint with a Hessian at its mode"
        got = f"{found}, whose log density is straight on both sides of a kink"
        advice = "curvature='ggn', which has the Fisher information of the likelihood, or NUTS or SVI"
        UnsupportedError.check(not found, "Laplace", expected, got, advice)

    def _check_at(self, u: Values) -> None:
        """Refuse impossible combinations of model and settings; u may be any point where no two elements are equal."""
        method, problem = self.method, self.problem
        positions = self.positions(u, any_largest=True)
        weights = int(np.count_nonzero(~self.mask(noise_sites(problem, u))[positions]))
        good, expected = (method.rank or 0) <= weights, f"at most the {weights} weights there are"
        InputError.check(good, "Laplace rank", expected, method.rank, "structure='full'")
        if method.tunes:
            TunedFit(self, u, positions).prior(u)
        if method.objective == "validation":
            self.validation_rows()
        if method.structure == "full":
            check_matrix_fits(problem, len(positions), method.curvature, method.fisher, method.samples)
        if method.structure != "kron":
            priors.check_prior_fits(problem, u)
        else:
            expected, got = "rows that all count once, for a mean over rows", "weights of rows"
            advice = "structure='full', 'lowrank' or 'diag'"
            UnsupportedError.check(not problem.program.weighted, "structure='kron'", expected, got, advice)
            check_blocks_fit(problem, u, Where.of(problem, positions).sites)
            # A given mode is checked with the prior at that point and before anything else: there is nothing to train.
            if method.prior_approximation is None and method.optimise:
                prior = self._tensor_priors(u, positions)
                for weight in (linear.weight for linear in linear_maps(problem, u) if linear.weight in prior):
                    family = problem.program.sites[weight].family
                    changing = kronecker.is_diagonal(prior[weight]) and family != "Normal"
                    words = f"a {family} prior, whose curvature changes with the value of a weight"
                    kronecker.check_one_precision(weight, prior[weight], words if changing else "")

    def validation_rows(self) -> int:
        """The number of rows that validation holds out."""
        rows = self.problem.rows
        count = round(self.method.validation * rows)
        expected, got = "a share that leaves rows on both sides", f"{count} of {rows}"
        InputError.check(0 < count < rows, "Laplace validation", expected, got, "more rows")
        return count

    def kinds(self) -> tuple[str, ...]:
        """The available kinds of prediction, the default first."""
        program, wanted = self.problem.program, self.method.predictive
        kinds = ("sampled",)
        if program.language and self.method.engine == "curvature":
            kinds = (*kinds_of(program.likelihood), "sampled")
            kinds += ("propagated",) if self.method.structure == "diag" else ()
        if wanted is None:
            return kinds
        if wanted not in kinds:
            model = type(program.likelihood).__name__ + ("" if program.language else " in a plain model")
            expected, advice = f"{', '.join(map(repr, kinds))} for {model}", f"predictive={kinds[0]!r}"
            raise UnsupportedError.of("Laplace predictive", expected, repr(wanted), advice)
        return (wanted, *(kind for kind in kinds if kind != wanted))

    # -- the fit

    def outcome(self) -> Outcome:
        """Fit, with the evidence, tuned hyper-parameters and warnings."""
        method, problem = self.method, self.problem
        mode = self._marginal_mode() if method.marginal else self.mode()
        watch, u = Stopwatch(), mode.u
        positions, tuned = np.arange(self.size), {}
        if method.engine == "guide":
            gaussian: FlatGaussian = guide_gaussian(problem, u)
            self.passes = 1.0
            joint = self.log_likelihood(u) + self.log_prior(u, positions)
            self.figures["log_evidence"] = float(joint + gaussian.log_volume)
        else:
            positions = self.positions(u)
            if method.tunes:
                u, gaussian, tuned = TunedFit(self, u, positions).tune(u)
            else:
                gaussian, volume = self._gaussian(u, positions)
                joint = self.log_likelihood(u) + self.log_prior(u, positions)
                self.figures["log_evidence"] = float(joint + volume)
                if not method.optimise and not method.marginal:
                    mode = self._check_start(mode, gaussian, positions)
        approximation = self.approximation(u, gaussian, positions, kinds=self.kinds(), **tuned)
        self._check_weights(approximation)
        self._check_rank()
        if method.restarts > 1:
            outside = self.outside(positions)
            if method.noise == "evidence":
                # A noise that the evidence chose has no prior.
                outside = outside[~self.mask(noise_sites(problem, u))[outside]]
            self.score = self.figures["log_evidence"] + self.log_prior(u, outside)
        figures = {"log_joint": mode.log_joint, **mode.figures, "converged": float(mode.converged)}
        return Outcome(
            approximation=approximation,
            history={"loss": mode.losses},
            compile_seconds=mode.compile_seconds,
            run_seconds=mode.run_seconds + watch(),
            gradient_evaluations=mode.evaluations + self.refinement.evaluations + self.passes,
            warnings=mode.warnings + self.warnings,
            figures=figures | self.figures,
        )

    def approximation(
        self, u: Values, gaussian: FlatGaussian, positions: Any, **tuned: Any
    ) -> LaplaceGaussian:
        """The approximation at a mode."""
        program, names = self.problem.program, flat_vector.latent_names(self.problem)
        mode = program.unravel(flat_vector.flat_latents(self.problem, u), names)
        held = {site.name: np.asarray(u[site.name]) for site in program.params}
        where = None if len(positions) == self.size else positions
        return LaplaceGaussian(mode, gaussian, held, where, **tuned)

    def _check_weights(self, approximation: LaplaceGaussian) -> None:
        """Warn if weights that the program computes are far from their linearisation."""
        names = computed_names(self.problem)
        if not names:
            return
        rng = np.random.default_rng(site_seed("computed", self.problem.seed))
        draws = approximation.draw(REMAINDER_DRAWS, rng)
        remainder, width = linearisation_error(self.problem, approximation.centre(), draws)
        self.figures["computed_weights_remainder"] = remainder
        if not remainder <= LARGEST_REMAINDER:
            self.warn(
                f"weights that are computed from other sites ({', '.join(names)}) are linearised about the mode, in "
                "sampled predictions and in draws; multiplied out from draws of these sites they would be up to "
                f"{width:.2g} times as wide. The log evidence takes the log joint as quadratic in these sites, which "
                "it is not, and may be off by several nats: compare it with SMC()"
            )

    def _check_rank(self) -> None:
        """Warn if the data determine much that is beyond the rank."""
        left, every = (
            self.figures.get(name, 0.0) for name in ("parameters_beyond_rank", "effective_parameters")
        )
        if left > LARGEST_SHARE * every:
            self.warn(
                f"rank={self.method.rank} leaves out {left:.3g} of {every:.3g} effective parameters: along these "
                "directions the Gaussian keeps the spread of the prior, and predictions are too wide; the log evidence "
                "has them all. Give a larger rank="
            )

    def outside(self, positions: np.ndarray) -> np.ndarray:
        """The other positions of the flat vector."""
        return np.setdiff1d(np.arange(self.size), positions)

    def log_likelihood(self, u: Values) -> float:
        """The log likelihood log p(y | x, w(u)), over all rows."""
        problem, program = self.problem, self.problem.program

        def total_of(u: Any, x: Any, y: Any) -> Any:
            return program.log_likelihood(u, x, y).sum()

        total = program.cached("log likelihood", lambda: problem.system.compile(total_of))
        return float(total(flat_vector.system_values(problem, u), problem.x, problem.y))

    def log_prior(self, u: Values, positions: np.ndarray) -> float:
        """The log prior density (with log |dw/du|) of the positions of the flat vector, at u.

        `UnsupportedError` if the positions are part of a site whose elements depend on each other.
        """
        if not len(positions):
            return 0.0
        total, densities = 0.0, priors.site_densities(self.problem, u)
        for name, chosen in self.by_site(positions).items():
            elements, volume = densities[name]
            if chosen.all():
                total += float(elements.sum() + volume)
            elif chosen.any():
                where, expected = f"site {name!r}", "a prior that is independent over elements"
                good = len(elements) == len(chosen)
                UnsupportedError.check(good, where, expected, "one that is not", "whole layers")
                total += float(elements[chosen].sum())
        return total

    # -- the mode

    def mode(self) -> Mode:
        """The mode: found, or the start itself."""
        method, problem = self.method, self.problem
        if method.optimise:
            return self._find_mode()
        start = method.start
        if isinstance(start, Method):
            start = fitted_start(problem, start, self.progress)  # type: ignore[arg-type]
            refuse_without_centre(start)
        u = starting_point(problem, start, self.progress)
        missing = missing_sites(problem, start)
        if missing:
            u = self.refinement.mode(u, held=[name for name in problem.program.sites if name not in missing])
        value, norm, rise = self.refinement.standing(u)
        return Mode(u, value, norm, np.zeros(0), rise is None or rise <= RISE, 0, 0.0, 0.0, rise=rise)

    def _find_mode(self, held: Sequence[str] = ()) -> Mode:
        names = ("start", "steps", "learning_rate", "tolerance", "polish")
        settings: dict[str, Any] = {name: getattr(self.method, name) for name in names}
        settings |= {"held": held, "title": self.method.name, "restart": self.restart}
        return find_mode(self.problem, progress=self.progress, **settings)

    def _check_start(self, mode: Mode, gaussian: FlatGaussian, positions: np.ndarray) -> Mode:
        """A point taken as the mode, with the gain of a Newton step: the error of a quadratic log evidence."""
        if mode.rise is not None:
            return mode
        _, gradient = self.refinement.value_and_grad(flat_vector.flat_sites(self.problem, mode.u))
        gain = gaussian.newton_gain(gradient[flat_vector.latent_places(self.problem)][positions])
        self.figures["newton_gain"] = gain
        text = (
            f"not a mode: a Newton step from the start that was taken as the mode would gain {gain:.3g} nats, by "
            "which the log evidence is off; optimise=True finds the mode"
        )
        failures = mode.failures + ((text,) if gain > NO_MODE else ())
        return replace(mode, converged=gain <= NO_MODE, failures=failures, gain=gain)

    def _marginal_mode(self) -> Mode:
        """Set the sites of `marginal` to the maximum of evidence times hyper-prior, and all else to its mode."""
        problem, held = self.problem, tuple(self.method.marginal)
        names = [f"{name}[{i}]" for name in held for i in range(problem.program.sites[name].size)]
        mode = self._find_mode(held)
        best, highest = dict(mode.u), -np.inf

        def at(phi: np.ndarray) -> dict[str, np.ndarray]:
            return self.refinement.mode({**best, **problem.program.unravel(phi, held)}, held=held)

        def objective(phi: np.ndarray) -> float:
            # Start from the best so far: far out hidden units merge, and a search from there would end at a saddle.
            nonlocal best, highest
            u = at(phi)
            try:
                _, volume = self._gaussian(u, self.positions(u))
            except CurvatureError:
                if not np.isfinite(highest):
                    raise
                return -np.inf
            value, _ = self.refinement.value_and_grad(flat_vector.flat_sites(problem, u))
            evidence = -value + volume
            if evidence > highest:
                best, highest = u, evidence
            return evidence

        outer = marginal_mode(objective, ravel(mode.u, held), names=names, progress=self.progress)
        self.warnings += outer.warnings
        u = at(outer.point)
        value, gradient = self.refinement.value_and_grad(flat_vector.flat_sites(problem, u))
        norm = float(np.linalg.norm(gradient[self.refinement._free(held)]))
        converged = mode.converged and outer.converged
        return replace(mode, u=u, log_joint=-value, gradient_norm=norm, converged=converged)

    # -- the coordinates of the Gaussian

    def positions(self, u: Values, any_largest: bool = False) -> np.ndarray:
        """(Q,) positions of the flat vector, increasing; any_largest: any choice of the requested number."""
        method, noise = self.method, noise_sites(self.problem, u)
        chosen = self.mask(self._chosen_sites(u, noise))
        chosen &= ~self.mask({*method.marginal, *(noise if method.noise != "gaussian" else ())})
        if str(method.weights).startswith("largest"):
            kept = chosen & self.mask(noise)
            kept[self._largest(u, np.flatnonzero(chosen & ~kept), any_largest)] = True
            chosen = kept
        expected = "at least one weight in the Gaussian"
        UnsupportedError.check(chosen.any(), "Laplace", expected, "none", "weights='all'")
        return np.flatnonzero(chosen)

    def _chosen_sites(self, u: Values, noise: Sequence[str]) -> list[str]:
        weights, names = self.method.weights, flat_vector.latent_names(self.problem)
        if isinstance(weights, str):
            if weights != "last_layer":
                return names
            maps = linear_maps(self.problem, u)
            where, expected = "Laplace(weights='last_layer')", "a linear map whose weight is a site"
            UnsupportedError.check(maps, where, expected, "none", "names of sites")
            weights = [maps[-1].weight, maps[-1].bias]
        named = [name for name in names if name in weights or name.rpartition(".")[0] in weights]
        return [*named, *(name for name in noise if name not in named)]

    def _largest(self, u: Values, candidates: np.ndarray, whichever: bool) -> np.ndarray:
        """The positions with the largest marginal variance under a diagonal approximation, or magnitude."""
        count = self.method.subnetwork
        assert count is not None
        expected = f"at most the {len(candidates)} weights there are"
        InputError.check(count <= len(candidates), "Laplace subnetwork", expected, count, "weights='all'")
        if whichever:
            return candidates[:count]
        if self.method.weights == "largest_magnitude":
            size = np.abs(flat_vector.flat_latents(self.problem, u)[candidates])
        else:
            curvature = self.data_curvature(u, candidates, "diag")
            size = curvature.gaussian(self.prior(u, candidates, dense=False)).variances()
        # Ties go to the first, so that the choice is reproducible.
        return candidates[np.sort(np.argsort(-size, kind="stable")[:count])]

    # -- curvature and prior

    def data_curvature(
        self, u: Values, positions: np.ndarray, structure: str | None = None, prior: np.ndarray | None = None
    ) -> DataCurvature:
        """The curvature of the data over the positions, in the coordinates of a prior if it is of low rank."""
        names = ("curvature", "fisher", "samples", "rank", "probes", "sharing", "memory")
        settings: dict[str, Any] = {name: getattr(self.method, name) for name in names}
        settings |= {
            "structure": structure or self.method.structure,
            "seed": self.problem.seed,
            "prior": prior,
        }
        settings |= {"positions": positions, "apart": noise_sites(self.problem, u)}
        found, passes = data_curvature(self.problem, u, **settings)
        self.passes += passes
        nearest = isinstance(found, KroneckerCurvature) and self.method.prior_approximation == "kron"
        return replace(found, nearest=True) if nearest else found

    def prior(self, u: Values, positions: np.ndarray, dense: bool = True) -> np.ndarray:
        """The prior's curvature over the positions: (Q,), or (Q, Q) if sites depend on each other."""
        prior = priors.prior_curvature(self.problem, u)
        if prior.ndim == 1:
            return prior[positions]
        prior = prior[np.ix_(positions, positions)]
        off = prior - np.diag(np.diag(prior))
        # A scale that is held at a value causes no dependence between the sites that it scales.
        independent = np.abs(off).max(initial=0.0) <= INDEPENDENT * np.abs(prior).max()
        return np.diag(prior).copy() if independent or not dense else prior

    def _tensor_priors(self, u: Values, positions: np.ndarray) -> dict[str, TensorPrior]:
        """The prior's curvature tensor by tensor, for positions of whole sites."""
        sites = Where.of(self.problem, positions).sites
        known = priors.site_curvatures(self.problem, u)
        if known is not None and not all(kronecker.is_diagonal(known[name]) for name in sites):
            return {name: known[name] for name in sites}
        prior = self.prior(u, positions)
        slices = flat_vector.site_slices(self.problem, sites)
        if prior.ndim == 1:
            return {name: prior[at] for name, at in slices.items()}
        if self.method.prior_approximation is None:
            kronecker.check_independent(prior)
        left_out = prior.copy()
        for at in slices.values():
            left_out[at, at] = 0.0
        if np.abs(left_out).max(initial=0.0) > INDEPENDENT * np.abs(prior).max():
            self.warn("the dependence between tensors under the prior was left out of a Kronecker structure")
        return {name: prior[at, at] for name, at in slices.items()}

    def _gaussian(self, u: Values, positions: np.ndarray) -> tuple[FlatGaussian, float]:
        """The Gaussian at u, and log of the integral of exp(-x' A x / 2) with the whole curvature."""
        kron = self.method.structure == "kron"
        prior: Any = None if kron else self.prior(u, positions, dense=self.method.structure != "diag")
        curvature = self.data_curvature(u, positions, prior=prior)
        if isinstance(curvature, KroneckerCurvature):
            prior = self._kronecker_prior(curvature, self._tensor_priors(u, positions))
        gaussian = self._repaired(curvature, prior)
        beyond, left = self.beyond_rank(curvature, prior)
        share = kronecker.prior_share(gaussian, prior)
        self.figures["effective_parameters"] = float(gaussian.size - share + left)
        return gaussian, gaussian.log_volume + beyond

    def beyond_rank(self, curvature: DataCurvature, prior: np.ndarray) -> tuple[float, float]:
        """What the Gaussian of a low-rank curvature leaves out of the log volume and of the effective parameters."""
        if not isinstance(curvature, LowRankCurvature) or (found := curvature.beyond(prior)) is None:
            return 0.0, 0.0
        (change, error), (left, _), (trace, of_trace) = found.values()
        if not curvature.converged:
            self.warn(
                f"{self.method.rank} eigenpairs of the curvature had not all converged after {curvature.products} "
                "products with vectors: give a smaller rank="
            )
        self.figures |= {
            "log_evidence_beyond_rank": -0.5 * change,
            "log_evidence_error": 0.5 * float(np.hypot(error, curvature.coupled)),
            "parameters_beyond_rank": left,
            "trace_beyond_rank": trace,
            "trace_beyond_rank_error": of_trace,
            "curvature_products": float(curvature.products),
        }
        return -0.5 * change, left

    def _kronecker_prior(
        self, curvature: KroneckerCurvature, prior: Mapping[str, TensorPrior]
    ) -> Mapping[str, TensorPrior]:
        """The prior as `prior_approximation` requires it ("mean": one precision per weight), with a warning."""
        kind, blocks = self.method.prior_approximation, curvature.blocks
        names = [block.name for block in blocks if isinstance(block, KroneckerBlock)]
        uneven = [name for name in names if not kronecker.is_one_precision(prior[name])]
        if kind == "kron" and uneven:
            text = "data and prior together were replaced by the nearest precision with Kronecker eigenvectors in"
            self.warn(f"{text} {', '.join(uneven)}")
        if kind != "mean":
            return prior
        diagonals = {name: kronecker.diagonal_of(prior[name]) for name in names}
        spreads = (float(np.ptp(part) / max(abs(part.mean()), 1e-300)) for part in diagonals.values())
        widest = max(spreads, default=0.0)
        dependent = not all(kronecker.is_diagonal(prior[name]) for name in names)
        if widest > 1e-9 or dependent:
            text = "prior precisions were averaged over each weight matrix; within one they differ by up to"
            rest = ", and the dependence between weights was left out" if dependent else ""
            self.warn(f"{text} {widest:.3g} times their mean{rest}")
        return {**prior, **{name: np.full(part.size, part.mean()) for name, part in diagonals.items()}}

    def independent_prior(self, curvature: DataCurvature, prior: np.ndarray) -> np.ndarray:
        """A diagonal prior (Q,) as the structure of the curvature requires it."""
        if not isinstance(curvature, KroneckerCurvature):
            return prior
        by_block = {block.name: prior[block.positions] for block in curvature.blocks}
        parts: Mapping[str, Any] = self._kronecker_prior(curvature, by_block)
        return np.concatenate(list(parts.values()))

    def _repaired(self, curvature: Any, prior: Any) -> FlatGaussian:
        try:
            return curvature.gaussian(prior)
        except CurvatureError:
            if self.method.repair is None:
                raise
        negative, text = 0, "{}: {} negative eigenvalues were set to 0"
        prior, clipped = _without_negative(prior)
        if self.method.curvature == "hessian":
            diagonal = isinstance(curvature, DiagonalCurvature)
            values, negative = _without_negative(curvature.values if diagonal else curvature.matrix())
            curvature = (DiagonalCurvature if diagonal else FullCurvature)(values)
        gaussian = curvature.gaussian(prior)
        if clipped:
            self.warnings += (text.format("the prior curves upwards at the mode", clipped),)
        if negative:
            self.warnings += (text.format("the Hessian of the data is indefinite", negative),)
        return gaussian


def _without_negative(curvature: Any) -> tuple[Any, int]:
    """The nearest diagonal or matrix without negative eigenvalues, each of several, and the number of those removed."""
    if isinstance(curvature, Mapping):
        each = {name: _without_negative(part) for name, part in curvature.items()}
        return {name: part for name, (part, _) in each.items()}, sum(count for _, count in each.values())
    if isinstance(curvature, Rotated):
        return curvature, 0
    if curvature.ndim == 1:
        return np.maximum(curvature, 0.0), int((curvature < 0).sum())
    values, vectors = np.linalg.eigh(curvature)
    return (vectors * np.maximum(values, 0.0)) @ vectors.T, int((values < 0).sum())
