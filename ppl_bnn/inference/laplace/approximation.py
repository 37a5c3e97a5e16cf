"""The Gaussian N(u_MAP, A^-1) of a Laplace approximation, and its predictions, linearised by default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import Model
from ppl_bnn.core.arrays import arrays_of, chunks, fields_in, map_data, ravel, row_count, unprefixed, unravel
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.curvature.gaussians import STRUCTURES, Diagonal, Kronecker, LowRankPrecision, Rotated
from ppl_bnn.inference.curvature.jacobian import jacobians, linear_factors, row_bytes
from ppl_bnn.inference.curvature.last_layer import last_layer
from ppl_bnn.inference.curvature.products import jointly_projected, projected
from ppl_bnn.inference.flat_vector import Values, Where, site_slices
from ppl_bnn.inference.laplace.computed_weights import computed_names, given, linearised_weights
from ppl_bnn.inference.laplace.layer_predictions import MANY, LayerPredictions
from ppl_bnn.inference.laplace.linearised import DRAWS, FEW_DRAWS, KINDS, joint_predictive, predictive
from ppl_bnn.inference.propagated import propagated, propagated_moments
from ppl_bnn.language.transforms import GaussianPrior, with_precision_factors
from ppl_bnn.posterior.approximation import Approximation, Point
from ppl_bnn.prediction.prediction import JointPrediction, Prediction

# This order is part of the storage format: predictives are stored as numbers.
_KINDS = (*KINDS, "sampled", "propagated")


@dataclass
class LaplaceGaussian(Approximation):
    """N(mode, A^-1) over some or all positions of the latent sites. Everything else stays at its value.

    `held`: parameters without a prior. `positions` (Q,): None for the whole flat vector. `factors` of the precisions of
    priors by site and the known `noise`, if tuned. `kinds` of prediction, the default first.
    """

    mode: dict[str, np.ndarray]
    covariance: Any
    held: dict[str, np.ndarray] = field(default_factory=dict)
    positions: np.ndarray | None = None
    factors: dict[str, np.ndarray] = field(default_factory=dict)
    noise: float | None = None
    kinds: tuple[str, ...] = ("linearised", "sampled")  # type: ignore[misc]
    # Predictions of a last layer by its features, which are no part of what is stored.
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"
    has_centre: ClassVar[bool] = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}

    @property
    def flat_mode(self) -> np.ndarray:
        """The mode as a flat vector of the latent sites, (P,)."""
        return ravel(self.mode)

    @property
    def _where(self) -> Any:
        return slice(None) if self.positions is None else self.positions

    def _unravel(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        return unravel(flat, {name: value.shape for name, value in self.mode.items()})

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        flat = np.tile(self.flat_mode, (count, 1))
        flat[:, self._where] += self.covariance.sample(count, rng)
        return self._unravel(flat) | Point(self.held).draw(count, rng)

    def log_prob(self, u: Values) -> np.ndarray:
        """Log density of the positions that the Gaussian is over."""
        deviation = ravel(u, self.mode, lead=1) - self.flat_mode
        return self.covariance.log_prob(deviation[:, self._where])

    def centre(self) -> dict[str, np.ndarray]:
        return {**self.mode, **self.held}

    def program(self, model: Model) -> Model:
        tuned = self.factors or self.noise is not None
        return with_precision_factors(model, self.factors, self.noise) if tuned else model

    def as_prior(self) -> GaussianPrior:
        """The Gaussian over all latent sites; `UnsupportedError` if it does not cover all of them."""
        if self.positions is not None:
            expected, got = "a Gaussian over all weights", "one over some of them"
            raise UnsupportedError.of("with_prior", expected, got, "Laplace(weights='all')")
        gaussian = self.covariance
        if isinstance(gaussian, Diagonal):
            return GaussianPrior(self.mode, scale=self._unravel(1.0 / np.sqrt(gaussian.values)))
        if not isinstance(gaussian, Kronecker):
            return GaussianPrior(self.mode, joint=((tuple(self.mode), gaussian.precision()),))
        parts = {part.name: part.gaussian for part in gaussian.parts}
        rotated = {name: part for name, part in parts.items() if isinstance(part, Rotated)}
        dense = (((name,), part.precision()) for name, part in parts.items() if name not in rotated)
        factors = {name: (part.left, part.right, part.values) for name, part in rotated.items()}
        return GaussianPrior(self.mode, joint=tuple(dense), kronecker=factors)

    def arrays(self) -> dict[str, np.ndarray]:
        found, structure = (
            arrays_of(self, ("covariance", "noise", "kinds", "_kept")),
            self.covariance.structure,
        )
        found |= {f"covariance/{structure}/{key}": value for key, value in self.covariance.arrays().items()}
        found["kinds"] = np.array([_KINDS.index(kind) for kind in self.kinds])
        return found if self.noise is None else found | {"noise": np.asarray(self.noise)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        found, gaussian = fields_in(arrays), unprefixed(arrays, "covariance")
        structure = next(iter(gaussian)).split("/")[0]
        found["covariance"] = STRUCTURES[structure].from_arrays(unprefixed(gaussian, structure))
        found["kinds"] = tuple(_KINDS[int(index)] for index in found["kinds"])
        if "noise" in found:
            found["noise"] = float(found["noise"])
        return cls(**found)

    # -- prediction

    def propagated_moments(self, problem: Problem, x: Any, memory: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean (N, D) and covariance (N, D, D) of the linearised predictor, layer by layer."""
        flat = np.zeros(len(self.flat_mode))
        flat[self._where] = self.covariance.variances()
        return propagated_moments(problem, self.centre(), self._unravel(flat), x, memory, first_order=True)

    def predictor_draws(
        self, problem: Problem, u: Values, x: Any, kind: str, seed: int, memory: int
    ) -> np.ndarray:
        """eta (S, N, D): linearised, eta(mode) + J (u - mode), or through the network, at `weight_draws`.

        Both are the same for a last layer, and need its features alone.
        """
        layer = self._of_layer(problem)
        if layer is not None and layer.moved_alone(u):
            return layer.draws(problem, u, x, memory)
        if kind == "sampled":
            w = problem.program.constrain_draws(u, problem.x, problem.y)
            w |= given(self.weight_draws(problem, u))
            return problem.program.predictor_draws(w, x, seed=seed, memory=memory)
        deviations = {name: np.asarray(u[name]) - value for name, value in self.mode.items()}
        data = map_data(lambda a: a[:1], problem.x), problem.y[:1]
        return problem.program.linearised_draws(self.centre(), deviations, x, data, memory)

    def _of_layer(self, problem: Problem) -> LayerPredictions | None:
        """Predictions by features, if the Gaussian is over a last layer and nothing else."""
        if not problem.program.language or self.computes_weights(problem):
            return None
        if "layer" not in self._kept:
            layer = last_layer(problem, self.centre(), Where.of(problem, self.positions))
            self._kept["layer"] = layer and LayerPredictions(layer, self.covariance, self.centre())
        return self._kept["layer"]

    def computes_weights(self, problem: Problem) -> bool:
        return bool(computed_names(problem))

    def weight_draws(self, problem: Problem, u: Values) -> dict[str, np.ndarray]:
        """Weights that the program computes from latent sites, linearised about the mode."""
        return linearised_weights(problem, self.centre(), u) if self.computes_weights(problem) else {}

    def linearised(self, problem: Problem, x: Any, memory: int = 2**28) -> tuple[np.ndarray, np.ndarray]:
        """Mean (N, D) and covariance (N, D, D) of the linearised predictor: eta(mode) and J A^-1 J'."""
        parts = list(self._projected(problem, x, memory))
        return np.concatenate([mean for mean, _ in parts]), np.concatenate([part for _, part in parts])

    def _moments(self, problem: Problem, x: Any, size: int, memory: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Mean (B, D) and covariances of the linearised predictor: (B, D, D), or `RowCovariances` of many outputs."""
        layer = self._of_layer(problem)
        if layer is not None and layer.covariances is not None:
            yield from layer.moments(problem, x, size, memory)
            return
        for start, stop in chunks(row_count(x), size):
            yield self.linearised(problem, map_data(lambda a, i=start, j=stop: a[i:j], x), memory)

    def _projected(self, problem: Problem, x: Any, memory: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """eta (B, D) and J A^-1 J' (B, D, D), without a Jacobian of weights if the structure needs none."""
        gaussian, centre = self.covariance, self.centre()
        where = Where.of(problem, self.positions)
        if isinstance(gaussian, LowRankPrecision) and row_bytes(problem, centre, where) > memory:
            yield from projected(problem, centre, x, gaussian, where, memory)
            return
        # Parts of sites have no factors of their own.
        if where.kept is not None or not isinstance(gaussian, Diagonal | Kronecker):
            for _, eta, jacobian in jacobians(problem, centre, x, memory, self.positions):
                yield eta, gaussian.project(jacobian)
            return
        slices = site_slices(problem, where.sites)
        parts = {name: gaussian.part(np.arange(at.start, at.stop)) for name, at in slices.items()}
        for part in linear_factors(problem, centre, x, None, memory, where.sites):
            total = np.zeros((*part.eta.shape, part.eta.shape[1]))
            for site, columns, inputs, each in part.by_site():
                gradients = np.zeros((len(each), total.shape[1], *each.shape[2:]))
                gradients[:, columns] = each
                if inputs is None:
                    total += parts[site].project(gradients)
                else:
                    total += parts[site].project_linear(inputs, gradients)
            yield part.eta, total

    def closed_form(self, problem: Problem, x: Any, kind: str, memory: int) -> Prediction | None:
        """The prediction without draws of weights. See `linearised.py` for the kinds."""
        if kind == "sampled":
            return None
        if kind == "propagated" and self._of_layer(problem) is not None:
            # Nothing lies between the random layer and the predictor.
            kind = "linearised"
        if kind == "propagated":
            return propagated(problem, *self.propagated_moments(problem, x, memory))
        likelihood = problem.program.likelihood
        outputs, rows = problem.program.outputs or 1, row_count(x)
        # Class means can be computed a few rows at a time. Otherwise the nodes of a rule are chosen for all rows.
        separable = likelihood.task == "classification" and outputs > 1
        numbers = 64 * outputs**2
        if outputs > MANY and kind != "probit_covariance":
            numbers = 32 * outputs * (DRAWS if kind == "linearised" else FEW_DRAWS)
        chunk = max(1, memory // numbers) if separable else rows
        moments = self._moments(problem, x, min(rows, chunk), memory)
        found = [predictive(likelihood, mean, covariance, kind) for mean, covariance in moments]
        if len(found) == 1:
            return found[0]
        within = [part.epistemic_within for part in found if part.epistemic_within is not None]
        names = found[0].parameters
        parameters = {name: np.concatenate([part.parameters[name] for part in found], 1) for name in names}
        joined = np.concatenate(within, 1) if within else None
        return replace(found[0], parameters=parameters, epistemic_within=joined)

    def joint(self, problem: Problem, x: Any, memory: int) -> JointPrediction | None:
        """The joint prediction of the linearised predictor, in closed form.

        By products with vectors for a structure of low rank whose Jacobian of all rows has more bytes than `memory`.
        """
        if "linearised" not in self.kinds:
            return None
        likelihood, gaussian, centre = problem.program.likelihood, self.covariance, self.centre()
        where = Where.of(problem, self.positions)
        if (
            isinstance(gaussian, LowRankPrecision)
            and row_count(x) * row_bytes(problem, centre, where) > memory
        ):
            found = jointly_projected(problem, centre, x, gaussian, where, memory)
            return joint_predictive(likelihood, *found)
        _, etas, parts = zip(*jacobians(problem, centre, x, memory, self.positions), strict=True)
        covariance = gaussian.joint(np.concatenate(parts))
        return joint_predictive(likelihood, np.concatenate(etas), covariance)
