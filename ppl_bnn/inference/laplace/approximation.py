"""The Gaussian N(u_MAP, A^-1) of a Laplace approximation, and its predictions.

Prediction is linearised by default (Immer et al. 2021): eta(u) = eta(u_MAP) + J (u - u_MAP). A Gauss-Newton posterior
is the posterior of that linear model, and its draws fit badly if they go through the network itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import Model
from ppl_bnn.core.arrays import chunks, map_data, ravel, row_count, unravel
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.curvature.gaussians import STRUCTURES, Diagonal, Kronecker, Rotated
from ppl_bnn.inference.curvature.jacobian import jacobians, linear_factors, linear_maps
from ppl_bnn.inference.flat_vector import first_rows, site_slices, somewhere, system_values
from ppl_bnn.inference.laplace.computed_weights import computed_names, given, linearised_weights
from ppl_bnn.inference.laplace.linearised import KINDS, joint_predictive, predictive
from ppl_bnn.language.transforms import GaussianPrior, with_precision_factors
from ppl_bnn.posterior.approximation import Approximation
from ppl_bnn.prediction.prediction import JointPrediction, Prediction

# This order is part of the storage format: predictives are stored as numbers.
_KINDS = (*KINDS, "sampled")


@dataclass
class LaplaceGaussian(Approximation):
    """N(mode, A^-1) over some or all positions of the latent sites. Everything else stays at its value.

    Parameters
    ----------
    mode : dict of ndarray
        Name -> array over the latent sites, in the order of the program.
    covariance
        A Gaussian of `gaussians.py`.
    held : dict of ndarray
        The parameters without a prior.
    positions : ndarray or None
        The positions (Q,) that the Gaussian is over; None for the whole flat vector.
    factors : dict of ndarray
        Site -> factor on the precision of its prior, if the fit tuned it.
    noise : float or None
        The known noise, if the fit tuned it.
    predictives : tuple of str
        Kinds of prediction, the default first.
    """

    mode: dict[str, np.ndarray]
    covariance: Any
    held: dict[str, np.ndarray] = field(default_factory=dict)
    positions: np.ndarray | None = None
    factors: dict[str, np.ndarray] = field(default_factory=dict)
    noise: float | None = None
    predictives: tuple[str, ...] = ("linearised", "sampled")
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.predictives

    @property
    def flat_mode(self) -> np.ndarray:
        """The mode as a flat vector of the latent sites, (P,)."""
        return ravel(self.mode)

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        deviations = self.covariance.sample(count, rng)
        flat = np.tile(self.flat_mode, (count, 1))
        flat[:, slice(None) if self.positions is None else self.positions] += deviations
        return self._unflatten(flat) | {
            name: np.repeat(value[None], count, axis=0) for name, value in self.held.items()
        }

    def _unflatten(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        return unravel(flat, {name: value.shape for name, value in self.mode.items()})

    def _deviation(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        return ravel(u, self.mode, lead=1) - self.flat_mode

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        """Log density of the positions that the Gaussian is over; draws differ from the mode only there."""
        deviation = self._deviation(u)
        return self.covariance.log_prob(deviation if self.positions is None else deviation[:, self.positions])

    def centre(self) -> dict[str, np.ndarray]:
        return {**self.mode, **self.held}

    @property
    def has_centre(self) -> bool:
        return True

    def program(self, model: Model) -> Model:
        if not self.factors and self.noise is None:
            return model
        return with_precision_factors(model, self.factors, self.noise)

    def as_prior(self) -> GaussianPrior:
        """The Gaussian over all latent sites.

        Raises
        ------
        UnsupportedError
            The Gaussian is over some of the weights only, and does not cover the others.
        """
        if self.positions is not None:
            raise UnsupportedError.of(
                "with_prior", "a Gaussian over all weights", "one over some of them", "Laplace(weights='all')"
            )
        return _as_prior(self)

    def arrays(self) -> dict[str, np.ndarray]:
        mode = {f"mode/{index:04d}/{name}": value for index, (name, value) in enumerate(self.mode.items())}
        held = {f"held/{name}": value for name, value in self.held.items()}
        factors = {f"factor/{name}": value for name, value in self.factors.items()}
        structure = self.covariance.structure
        gaussian = {f"gaussian/{structure}/{key}": value for key, value in self.covariance.arrays().items()}
        found = {**mode, **held, **factors, **gaussian}
        found["predictives"] = np.array([_KINDS.index(kind) for kind in self.predictives])
        if self.positions is not None:
            found["positions"] = self.positions
        if self.noise is not None:
            found["noise"] = np.asarray(self.noise)
        return found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> LaplaceGaussian:
        def part(prefix: str, depth: int) -> dict[str, np.ndarray]:
            keys = sorted(key for key in arrays if key.startswith(prefix + "/"))
            return {key.split("/", depth)[depth]: np.asarray(arrays[key]) for key in keys}

        structure = next(key for key in arrays if key.startswith("gaussian/")).split("/", 2)[1]
        return cls(
            mode=part("mode", 2),
            covariance=STRUCTURES[structure].from_arrays(part("gaussian", 2)),
            held=part("held", 1),
            positions=np.asarray(arrays["positions"]) if "positions" in arrays else None,
            factors=part("factor", 1),
            noise=float(arrays["noise"]) if "noise" in arrays else None,
            predictives=tuple(_KINDS[int(index)] for index in arrays["predictives"]),
        )

    # -- prediction

    def predictor_draws(
        self, problem: Problem, u: Mapping[str, np.ndarray], x: Any, kind: str, seed: int, memory: int
    ) -> np.ndarray:
        """eta (S, N, D): linearised, eta(mode) + J (u - mode), or through the network, at `weight_draws`."""
        if kind == "sampled":
            w = problem.program.constrain_draws(u, problem.x, problem.y)
            w |= given(self.weight_draws(problem, u))
            return problem.program.predictor_draws(w, x, seed=seed, memory=memory)
        deviations = {name: np.asarray(u[name]) - value for name, value in self.mode.items()}
        data = map_data(lambda a: a[:1], problem.x), problem.y[:1]
        return problem.program.linearised_draws(self.centre(), deviations, x, data, memory)

    def computes_weights(self, problem: Problem) -> bool:
        return bool(computed_names(problem))

    def weight_draws(self, problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Weights that the program computes from latent sites, linearised about the mode (see `computed_weights`)."""
        return linearised_weights(problem, self.centre(), u) if self.computes_weights(problem) else {}

    def linearised(self, problem: Problem, x: Any, memory: int = 2**28) -> tuple[np.ndarray, np.ndarray]:
        """Mean (N, D) and covariance (N, D, D) of the linearised predictor: eta(mode) and J A^-1 J'."""
        parts = list(self._projected(problem, x, memory))
        return np.concatenate([mean for mean, _ in parts]), np.concatenate([part for _, part in parts])

    def _projected(self, problem: Problem, x: Any, memory: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """eta (B, D) and J A^-1 J' (B, D, D), without a Jacobian of weights if the structure needs none."""
        slices = site_slices(problem)
        sites = self._whole_sites(slices)
        if sites is None or not isinstance(self.covariance, Diagonal | Kronecker):
            for _, eta, jacobian in jacobians(problem, self.centre(), x, memory, self.positions):
                yield eta, self.covariance.project(jacobian.astype(np.float64, copy=False))
            return
        where = self._where(slices, sites)
        maps = linear_maps(problem, self.centre())
        for _, eta, factors, rest in linear_factors(problem, self.centre(), x, None, memory, sites):
            total = np.zeros((*eta.shape, eta.shape[1]))
            for name, (inputs, gradients) in factors.items():
                inputs, gradients = inputs.astype(float, copy=False), gradients.astype(float, copy=False)
                weight, bias = maps[name].weight, maps[name].bias
                if weight in where:
                    total += self.covariance.project_linear(where[weight], inputs, gradients)
                if bias in where:
                    total += self.covariance.project_part(where[bias], gradients.sum(2))
            start = 0
            mapped = {site for name in factors for site in (maps[name].weight, maps[name].bias)}
            for name in sites:
                if name not in mapped:
                    size = slices[name].stop - slices[name].start
                    jacobian = rest[:, :, start : start + size].astype(np.float64, copy=False)
                    total += self.covariance.project_part(where[name], jacobian)
                    start += size
            yield eta, total

    def _whole_sites(self, slices: Mapping[str, slice]) -> tuple[str, ...] | None:
        """The sites that the Gaussian is over; None if it is over parts of sites."""
        if self.positions is None:
            return tuple(slices)
        inside = np.zeros(max(at.stop for at in slices.values()), dtype=bool)
        inside[self.positions] = True
        if any(inside[at].any() and not inside[at].all() for at in slices.values()):
            return None
        return tuple(name for name, at in slices.items() if inside[at].all())

    def _where(self, slices: Mapping[str, slice], sites: Sequence[str]) -> dict[str | None, np.ndarray]:
        """The positions of each site within the Gaussian."""
        sizes = [slices[name].stop - slices[name].start for name in sites]
        return dict(zip(sites, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), strict=True))

    def closed_form(self, problem: Problem, x: Any, kind: str, memory: int) -> Prediction | None:
        """The prediction of the linearised predictor, without draws of weights. See `linearised.py` for the kinds."""
        if kind == "sampled":
            return None
        likelihood = problem.program.likelihood
        outputs, rows = problem.program.outputs or 1, row_count(x)
        # Class means can be computed a few rows at a time. Otherwise the nodes of a rule are chosen for all rows.
        separable = likelihood.task == "classification" and outputs > 1
        chunk = max(1, memory // (64 * outputs**2)) if separable else rows
        found = []
        for start, stop in chunks(rows, min(rows, chunk)):
            part = map_data(lambda a, i=start, j=stop: a[i:j], x)
            found.append(predictive(likelihood, *self.linearised(problem, part, memory), kind))
        return found[0] if len(found) == 1 else _joined(found)

    def joint(self, problem: Problem, x: Any, memory: int) -> JointPrediction | None:
        """The joint prediction of the linearised predictor, in closed form."""
        if "linearised" not in self.predictives:
            return None
        parts = list(jacobians(problem, self.centre(), x, memory, self.positions))
        eta = np.concatenate([eta for _, eta, _ in parts])
        jacobian = np.concatenate([jacobian for *_, jacobian in parts]).astype(np.float64)
        return joint_predictive(problem.program.likelihood, eta, self.covariance.joint(jacobian))


def _joined(parts: Sequence[Prediction]) -> Prediction:
    """Concatenate predictions of pieces of the rows."""
    within = [part.epistemic_within for part in parts if part.epistemic_within is not None]
    return replace(
        parts[0],
        parameters={
            name: np.concatenate([part.parameters[name] for part in parts], axis=1)
            for name in parts[0].parameters
        },
        epistemic_within=None if parts[0].epistemic_within is None else np.concatenate(within, axis=1),
    )


def _as_prior(approximation: LaplaceGaussian) -> GaussianPrior:
    mode, covariance = approximation.mode, approximation.covariance
    if isinstance(covariance, Diagonal):
        flat, start, scale = 1.0 / np.sqrt(covariance.values), 0, {}
        for name, value in mode.items():
            scale[name] = flat[start : start + value.size].reshape(value.shape)
            start += value.size
        return GaussianPrior(mode, scale=scale)
    if isinstance(covariance, Kronecker):
        rotated = {
            part.name: part.gaussian for part in covariance.parts if isinstance(part.gaussian, Rotated)
        }
        dense = [part for part in covariance.parts if part.name not in rotated]
        return GaussianPrior(
            mode,
            joint=tuple(((part.name,), part.gaussian.precision()) for part in dense),
            kronecker={name: (each.left, each.right, each.values) for name, each in rotated.items()},
        )
    return GaussianPrior(mode, joint=((tuple(mode), covariance.precision()),))


def predictor_columns(problem: Problem) -> int:
    """D, the number of columns of the predictor."""
    program = problem.program

    def count() -> int:
        x, y = first_rows(problem)
        u = system_values(problem, somewhere(problem))
        return int(program.predictor(program.constrain(u, x, y), x).shape[-1])

    return program.cached("predictor columns", count)
