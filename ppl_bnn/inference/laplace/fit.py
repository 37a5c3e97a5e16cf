"""The steps of a Laplace approximation: the mode, the coordinates of the Gaussian, curvature and prior there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError, unknown_name
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.curvature.curvature import data_curvature, refuse_large_blocks
from ppl_bnn.inference.curvature.gaussians import Rotated
from ppl_bnn.inference.curvature.jacobian import linear_maps
from ppl_bnn.inference.curvature.kronecker import (
    KroneckerBlock,
    KroneckerCurvature,
    TensorPrior,
    check_independent,
    check_one_precision,
    diagonal_of,
    is_diagonal,
    is_one_precision,
    prior_share,
)
from ppl_bnn.inference.curvature.prior import prior_curvature, site_curvatures
from ppl_bnn.inference.curvature.structures import DiagonalCurvature, FullCurvature
from ppl_bnn.inference.flat_vector import flat_latents, flat_sites, latent_names, latent_places, site_slices
from ppl_bnn.inference.laplace.approximation import predictor_columns
from ppl_bnn.inference.laplace.hyperparameters import Tuning, gaussian_noise, noise_sites
from ppl_bnn.inference.laplace.linearised import kinds_of
from ppl_bnn.inference.laplace.search import marginal_mode
from ppl_bnn.inference.method import Method
from ppl_bnn.inference.optimisation.mode import RISE, Mode, Refinement, find_mode, kinks, starting_point
from ppl_bnn.inference.start import Start, central_start, fitted_start, missing_sites
from ppl_bnn.posterior.posterior import Posterior

if TYPE_CHECKING:
    from ppl_bnn.inference.laplace.laplace import Laplace

# Nats that a Newton step may gain from a point that is taken as the mode. This is the error of the log evidence.
NO_MODE = 0.1


class GaussianFit:
    """The state of one fit: the mode, the coordinates of the Gaussian, curvature and prior at the mode."""

    def __init__(self, method: Laplace, problem: Problem, progress: Progress, restart: int = 0):
        self.method, self.problem, self.progress, self.restart = method, problem, progress, restart
        self.refinement = Refinement(problem)
        self.warnings: tuple[str, ...] = ()
        self.figures: dict[str, float] = {}
        self.passes = 0.0
        # The score that compares several starts: the log evidence plus the log prior of the held sites.
        self.standing = -np.inf

    def _refuse_kinks(self) -> None:
        """Refuse an exact Hessian for a likelihood whose log density is piecewise linear."""
        found = kinks(self.problem)
        if found:
            raise UnsupportedError.of(
                "Laplace",
                "a log joint with a Hessian at its mode",
                f"{found}, whose log density is straight on both sides of a kink",
                "curvature='ggn', which has the Fisher information of the likelihood, or NUTS or SVI",
            )

    def _mode(self) -> Mode:
        method, problem = self.method, self.problem
        if method.optimise:
            return self._found(method.start)
        start = method.start
        if isinstance(start, Method):
            start = fitted_start(problem, start, self.progress)
        taken = isinstance(start, Posterior)
        u = central_start(problem, start) if taken else starting_point(problem, start, self.progress)
        missing = missing_sites(problem, start)
        if missing:
            held = [name for name in problem.program.sites if name not in missing]
            u = self.refinement.mode(u, held=held)
        value, norm, rise = self.refinement.standing(u)
        return Mode(u, value, norm, np.zeros(0), rise is None or rise <= RISE, 0, 0.0, 0.0, rise=rise)

    def _judged(self, mode: Mode, covariance: Any, positions: np.ndarray) -> Mode:
        """A point that was taken as the mode, with the gain of a Newton step, g' A^-1 g / 2 in nats.

        If the log joint is quadratic, the gain is the distance to its maximum, and so the error of the log evidence.
        """
        if mode.rise is not None:
            return mode
        _, gradient = self.refinement.value_and_grad(flat_sites(self.problem, mode.u))
        gain = self._gain(gradient[latent_places(self.problem)][positions], covariance)
        self.figures["newton_gain"] = gain
        failures = mode.failures
        if gain > NO_MODE:
            failures += (
                f"not a mode: a Newton step from the start that was taken as the mode would gain {gain:.3g} nats, by "
                "which the log evidence is off; optimise=True finds the mode",
            )
        return replace(mode, converged=gain <= NO_MODE, failures=failures, gain=gain)

    @staticmethod
    def _gain(gradient: np.ndarray, covariance: Any) -> float:
        """The gain of a Newton step, g' A^-1 g / 2."""
        return 0.5 * float(np.sum(covariance.whiten(gradient[None]) ** 2))

    def _found(self, start: Start, held: Sequence[str] = ()) -> Mode:
        method = self.method
        return find_mode(
            self.problem,
            start=start,
            steps=method.steps,
            learning_rate=method.learning_rate,
            tolerance=method.tolerance,
            polish=method.polish,
            held=held,
            progress=self.progress,
            title=method.name,
            restart=self.restart,
        )

    def _check_settings(self, u: Mapping[str, np.ndarray]) -> None:
        """Refuse impossible combinations of model and settings before the mode is trained; u may be any point."""
        method, problem = self.method, self.problem
        positions = self._positions(u, any_largest=True)
        slices = site_slices(problem)
        noise = [
            position
            for name in noise_sites(problem, u)
            for position in range(*slices[name].indices(self._size))
        ]
        weights = int(np.count_nonzero(~np.isin(positions, noise)))
        if method.rank is not None and method.rank > weights:
            raise InputError.of(
                "Laplace: rank",
                f"at most the {weights} weights there are",
                repr(method.rank),
                "structure='full'",
            )
        if method.noise == "evidence":
            gaussian_noise(problem, u)
        tuned = None
        if method.tune != "none" or method.noise == "evidence":
            tuning = Tuning.of(
                problem, u, positions, method.tune, method.noise == "evidence", lambda at: None
            )
            tuned = tuning.prior(u)
        if method.objective == "validation":
            self._held_out()
        if method.structure == "kron":
            refuse_large_blocks(problem, u, positions)
            # A given mode is checked with the prior at that point and before anything else: there is nothing to train.
            if method.prior_approximation is None and method.optimise:
                prior = self._tensor_priors(u, positions) if tuned is None else tuned
                self._check_kronecker_prior(u, positions, prior)

    def _check_kronecker_prior(
        self, u: Mapping[str, np.ndarray], positions: np.ndarray, prior: np.ndarray | dict[str, TensorPrior]
    ) -> None:
        """Refuse a prior of a weight that is not one precision, at a point where no two elements are equal."""
        problem, slices = self.problem, site_slices(self.problem)
        if isinstance(prior, np.ndarray):
            check_independent(prior)
        for linear in linear_maps(problem, u).values():
            at, family = slices[linear.weight], problem.program.sites[linear.weight].family
            if at.start not in positions:
                continue
            if isinstance(prior, np.ndarray):
                start = int(np.searchsorted(positions, at.start))
                part: TensorPrior = prior[start : start + at.stop - at.start]
            else:
                part = prior[linear.weight]
            changing = is_diagonal(part) and family != "Normal"
            words = f"a {family} prior, whose curvature changes with the value of a weight"
            check_one_precision(linear.weight, part, words if changing else "")

    def _held_out(self) -> int:
        """The number of rows that validation holds out."""
        share, rows = self.method.validation, self.problem.rows
        count = round(share * rows)
        if not 0 < count < rows:
            raise InputError.of(
                "Laplace: validation",
                "a share that leaves rows on both sides",
                f"{count} of {rows}",
                "more rows",
            )
        return count

    def _marginal_mode(self) -> Mode:
        """Set the sites of `marginal` to the maximum of evidence times hyper-prior, and all else to its mode."""
        problem, held = self.problem, tuple(self.method.marginal)
        slices = site_slices(problem)
        where = np.concatenate([np.arange(slices[name].start, slices[name].stop) for name in held])
        names = [f"{name}[{i}]" for name in held for i in range(slices[name].stop - slices[name].start)]
        mode = self._found(self.method.start, held)
        best, highest = dict(mode.u), -np.inf

        def at(phi: np.ndarray) -> dict[str, np.ndarray]:
            flat = flat_latents(problem, best)
            flat[where] = phi
            moved = dict(best)
            for name in held:
                moved[name] = flat[slices[name]].reshape(np.shape(best[name]))
            return self.refinement.mode(moved, held=held)

        def objective(phi: np.ndarray) -> float:
            # Start from the best so far: far out hidden units merge, and a search from there would end at a saddle.
            nonlocal best, highest
            u = at(phi)
            try:
                covariance = self._gaussian(u, self._positions(u))
            except CurvatureError:
                if not np.isfinite(highest):
                    raise
                return -np.inf
            value, _ = self.refinement.value_and_grad(flat_sites(problem, u))
            evidence = -value + 0.5 * (covariance.size * np.log(2.0 * np.pi) + covariance.log_determinant)
            if evidence > highest:
                best, highest = u, evidence
            return evidence

        outer = marginal_mode(
            objective, flat_latents(problem, mode.u)[where], names=names, progress=self.progress
        )
        self.warnings += outer.warnings
        u = at(outer.phi)
        value, gradient = self.refinement.value_and_grad(flat_sites(problem, u))
        free = np.concatenate(
            [np.full(site.size, site.name not in held) for site in problem.program.sites.values()]
        )
        return replace(
            mode,
            u=u,
            log_joint=-value,
            gradient_norm=float(np.linalg.norm(gradient[free])),
            converged=mode.converged and outer.converged,
        )

    @property
    def _size(self) -> int:
        return max(at.stop for at in site_slices(self.problem).values())

    def _latents(self, u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        sites = self.problem.program.sites
        return {
            name: np.asarray(u[name], dtype=float).reshape(sites[name].unconstrained_shape)
            for name in latent_names(self.problem)
        }

    def _kinds(self) -> tuple[str, ...]:
        """The available kinds of prediction, the default first."""
        program, wanted = self.problem.program, self.method.predictive
        kinds = ("sampled",)
        if program.language:
            kinds = (*kinds_of(program.likelihood, predictor_columns(self.problem)), "sampled")
        if wanted is None:
            return kinds
        if wanted not in kinds:
            raise UnsupportedError.of(
                "Laplace: predictive",
                f"{', '.join(map(repr, kinds))} for {type(program.likelihood).__name__}"
                + ("" if program.language else " in a plain model"),
                repr(wanted),
                f"predictive={kinds[0]!r}",
            )
        return (wanted, *(kind for kind in kinds if kind != wanted))

    def _check_names(self) -> None:
        names = latent_names(self.problem)
        for name in self.method.marginal:
            if name not in names:
                raise unknown_name("site of marginal", name, names)
        if not isinstance(self.method.weights, str):
            layers = [name.rpartition(".")[0] for name in names if "." in name]
            for name in self.method.weights:
                if name not in names and name not in layers:
                    raise unknown_name("layer or site of weights", name, [*dict.fromkeys(layers), *names])

    def _positions(self, u: Mapping[str, np.ndarray], any_largest: bool = False) -> np.ndarray:
        """(Q,) positions of the flat vector, increasing; any_largest: any choice of the requested number."""
        method, problem, slices = self.method, self.problem, site_slices(self.problem)
        noise = noise_sites(problem, u)
        aside = {*method.marginal, *(noise if method.noise != "gaussian" else ())}
        chosen = np.zeros(self._size, dtype=bool)
        for name in self._chosen_sites(u, noise):
            chosen[slices[name]] = True
        for name in aside:
            chosen[slices[name]] = False
        if str(method.weights).startswith("largest"):
            kept = np.zeros_like(chosen)
            for name in noise:
                kept[slices[name]] = chosen[slices[name]]
            candidates = np.flatnonzero(chosen & ~kept)
            kept[self._largest(u, candidates, any_largest)] = True
            chosen = kept
        if not chosen.any():
            raise UnsupportedError.of(
                "Laplace", "at least one weight to be uncertain about", "none", "weights='all'"
            )
        return np.flatnonzero(chosen)

    def _chosen_sites(self, u: Mapping[str, np.ndarray], noise: Sequence[str]) -> list[str]:
        weights, names = self.method.weights, latent_names(self.problem)
        if isinstance(weights, str) and weights != "last_layer":
            return names
        if isinstance(weights, str):
            maps = list(linear_maps(self.problem, u).values())
            if not maps:
                raise UnsupportedError.of(
                    "Laplace(weights='last_layer')",
                    "a linear map whose weight is a site",
                    "none",
                    "names of sites",
                )
            weights = [site for site in (maps[-1].weight, maps[-1].bias) if site is not None]
        named = [name for name in names if name in weights or name.rpartition(".")[0] in weights]
        return [*named, *(name for name in noise if name not in named)]

    def _largest(self, u: Mapping[str, np.ndarray], candidates: np.ndarray, whichever: bool) -> np.ndarray:
        """The positions with the largest marginal variance under a diagonal approximation, or magnitude."""
        count = self.method.subnetwork
        assert count is not None
        if count > len(candidates):
            raise InputError.of(
                "Laplace: subnetwork",
                f"at most the {len(candidates)} weights there are",
                repr(count),
                "weights='all'",
            )
        if whichever:
            return candidates[:count]
        if self.method.weights == "largest_magnitude":
            size = np.abs(flat_latents(self.problem, u)[candidates])
        else:
            curvature = self._data_curvature(u, candidates, "diag")
            size = curvature.gaussian(self._prior(u, candidates, dense=False)).variances()
        # Ties go to the first, so that the choice is reproducible.
        return candidates[np.sort(np.argsort(-size, kind="stable")[:count])]

    def _data_curvature(
        self, u: Mapping[str, np.ndarray], positions: np.ndarray, structure: str | None = None
    ) -> Any:
        method = self.method
        structure = structure or method.structure
        curvature, passes = data_curvature(
            self.problem,
            u,
            curvature=method.curvature,
            fisher=method.fisher,
            samples=method.samples,
            structure=structure,
            rank=method.rank if structure == "lowrank" else None,
            apart=noise_sites(self.problem, u) if structure == "lowrank" else (),
            sharing=method.sharing,
            positions=None if len(positions) == self._size else positions,
            seed=self.problem.seed,
            memory=method.memory,
        )
        self.passes += passes
        if isinstance(curvature, KroneckerCurvature) and method.prior_approximation == "kron":
            curvature = replace(curvature, nearest=True)
        return curvature

    def _prior(self, u: Mapping[str, np.ndarray], positions: np.ndarray, dense: bool = True) -> np.ndarray:
        """The prior's curvature over the positions: (Q,), or (Q, Q) if sites depend on each other."""
        prior = prior_curvature(self.problem, u)
        if prior.ndim == 1:
            return prior[positions]
        prior = prior[np.ix_(positions, positions)]
        off = prior - np.diag(np.diag(prior))
        # A scale that is held at a value causes no dependence between the sites that it scales.
        if not dense or np.abs(off).max(initial=0.0) <= 1e-10 * np.abs(prior).max():
            return np.diag(prior).copy()
        return prior

    def _tensor_priors(
        self, u: Mapping[str, np.ndarray], positions: np.ndarray
    ) -> np.ndarray | dict[str, TensorPrior]:
        """The prior's curvature tensor by tensor, or (Q,) if it is diagonal, for positions of whole sites."""
        inside = {name: at for name, at in site_slices(self.problem).items() if at.start in positions}
        known = site_curvatures(self.problem, u)
        if known is not None and not all(is_diagonal(known[name]) for name in inside):
            return {name: known[name] for name in inside}
        prior = self._prior(u, positions)
        if prior.ndim == 1 or self.method.prior_approximation is None:
            return prior
        parts: dict[str, TensorPrior] = {}
        left_out, start = prior.copy(), 0
        for name, at in inside.items():
            here = slice(start, start + at.stop - at.start)
            parts[name], left_out[here, here], start = prior[here, here], 0.0, here.stop
        if np.abs(left_out).max(initial=0.0) > 1e-10 * np.abs(prior).max():
            self._say("what the prior says of several tensors together was left out of a Kronecker structure")
        return parts

    def _gaussian(self, u: Mapping[str, np.ndarray], positions: np.ndarray) -> Any:
        curvature = self._data_curvature(u, positions)
        if isinstance(curvature, KroneckerCurvature):
            prior = self._for_kronecker(curvature, self._tensor_priors(u, positions))
        else:
            prior = self._prior(u, positions, dense=self.method.structure != "diag")
        gaussian = self._repaired(curvature, prior)
        self.figures["effective_parameters"] = _effective_parameters(gaussian, prior)
        return gaussian

    def _for_kronecker(self, curvature: KroneckerCurvature, prior: Any) -> Any:
        """The prior in the form that `prior_approximation` requires, with a warning.

        For "mean" this is one precision for each weight matrix.
        """
        weights = [block for block in curvature.blocks if isinstance(block, KroneckerBlock)]
        if self.method.prior_approximation == "mean":
            prior, averaged = (dict(prior) if isinstance(prior, Mapping) else prior.copy()), prior
            widest, dependent = 0.0, False
            for block in weights:
                part = averaged[block.name] if isinstance(averaged, Mapping) else averaged[block.positions]
                dependent |= not is_diagonal(part)
                part = diagonal_of(part)
                widest = max(widest, float(np.ptp(part) / max(abs(part.mean()), 1e-300)))
                where = block.name if isinstance(averaged, Mapping) else block.positions
                prior[where] = np.full(part.size, part.mean())
            if widest > 1e-9 or dependent:
                self._say(
                    f"prior precisions were averaged over each weight matrix; within one they differ by up to "
                    f"{widest:.3g} times their mean"
                    + (", and what ties weights to each other was left out" if dependent else "")
                )
        elif self.method.prior_approximation == "kron":
            parts = {
                block.name: prior[block.name] if isinstance(prior, Mapping) else prior[block.positions]
                for block in weights
            }
            uneven = [name for name, part in parts.items() if not is_one_precision(part)]
            if uneven:
                self._say(
                    "data and prior together were replaced by the nearest precision with Kronecker eigenvectors in "
                    + ", ".join(uneven)
                )
        return prior

    def _repaired(self, curvature: Any, prior: Any) -> Any:
        try:
            return curvature.gaussian(prior)
        except CurvatureError:
            if self.method.repair is None:
                raise
        if isinstance(prior, Mapping):
            each = {name: _without_upward(part) for name, part in prior.items()}
            prior, clipped = (
                {name: part for name, (part, _) in each.items()},
                sum(n for _, n in each.values()),
            )
        else:
            prior, clipped = _without_upward(prior)
        sentences = []
        if clipped:
            sentences.append(
                f"the prior curves upwards at the mode: {clipped} negative eigenvalues of its Hessian were set to 0"
            )
        if self.method.curvature == "hessian":
            curvature, negative = _without_negative(curvature)
            if negative:
                sentences.append(
                    f"the Hessian of the data is indefinite: {negative} negative eigenvalues were set to 0"
                )
        gaussian = curvature.gaussian(prior)
        self.warnings += tuple(sentences)
        return gaussian

    def _say(self, sentence: str) -> None:
        """Add a warning, once."""
        if sentence not in self.warnings:
            self.warnings += (sentence,)


def _effective_parameters(gaussian: Any, prior: np.ndarray | Mapping[str, TensorPrior]) -> float:
    """gamma = tr(H A^-1) = Q - tr(Lambda A^-1)."""
    if isinstance(prior, Mapping):
        return gaussian.size - prior_share(gaussian, prior)
    if prior.ndim == 1:
        return float(gaussian.size - prior @ gaussian.variances())
    return float(gaussian.size - np.sum(prior * gaussian.covariance()))


def _without_upward(prior: Any) -> tuple[Any, int]:
    """The nearest curvature of a prior without negative eigenvalues, and the number of those removed."""
    if isinstance(prior, Rotated):
        return prior, 0
    if prior.ndim == 1:
        return np.maximum(prior, 0.0), int((prior < 0).sum())
    values, vectors = np.linalg.eigh(prior)
    return (vectors * np.maximum(values, 0.0)) @ vectors.T, int((values < 0).sum())


def _without_negative(curvature: Any) -> tuple[Any, int]:
    """The nearest curvature of the same structure without negative eigenvalues, and the number of those removed."""
    if isinstance(curvature, DiagonalCurvature):
        values = curvature.multiplier * curvature.values
        return DiagonalCurvature(np.maximum(values, 0.0)), int((values < 0.0).sum())
    values, vectors = np.linalg.eigh(curvature.matrix())
    return FullCurvature((vectors * np.maximum(values, 0.0)) @ vectors.T), int((values < 0.0).sum())
