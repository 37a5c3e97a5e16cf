"""The Laplace approximation: a Gaussian at the mode, with the curvature of the log joint as its precision.

N(u_MAP, A^-1) with A = sum_n J_n' F_n J_n - Hessian of (log prior + log |dw/du|), in unconstrained coordinates (MacKay
1992; Daxberger et al. 2021). Sampled noise is part of the Gaussian: the predictor is (f, log noise), with its Fisher
block. Prediction is linearised by default (Immer et al. 2021): eta(u) = eta(u_MAP) + J (u - u_MAP), because a
Gauss-Newton posterior is the posterior of that linear model and its draws, put through the network itself, fit badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.errors import CurvatureError, InputError, UnsupportedError, message, unknown_name
from ppl_bnn.inference.covariance import Full
from ppl_bnn.inference.curvature import (
    check_smooth,
    flat_latents,
    gauss_newton,
    jacobians,
    latent_names,
    prior_hessian,
)
from ppl_bnn.inference.method import Method, Outcome, Start, Stopwatch
from ppl_bnn.inference.optimise import Mode, check_optimiser, find_mode, starting_point
from ppl_bnn.posterior import Approximation
from ppl_bnn.ppl.protocol import Problem
from ppl_bnn.predictive import Prediction
from ppl_bnn.progress import Progress

NODES = 21


@dataclass
class LaplaceGaussian(Approximation):
    """N(mode, A^-1) over the latent sites; parameters without a prior stay at their values.

    mode: name -> array over the latent sites in the order of the program. held: the parameters.
    """

    mode: dict[str, np.ndarray]
    covariance: Full
    held: dict[str, np.ndarray] = field(default_factory=dict)
    linear: bool = True
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The linearised predictive first, where there are Jacobians."""
        return ("linearised", "sampled") if self.linear else ("sampled",)

    @property
    def _flat_mode(self) -> np.ndarray:
        return np.concatenate([value.reshape(-1) for value in self.mode.values()])

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        flat = self._flat_mode + self.covariance.sample(count, rng)
        return self._unflatten(flat)

    def _unflatten(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        u, start = {}, 0
        for name, value in self.mode.items():
            u[name] = flat[:, start : start + value.size].reshape(len(flat), *value.shape)
            start += value.size
        return u | {name: np.repeat(value[None], len(flat), axis=0) for name, value in self.held.items()}

    def _deviation(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        flat = np.concatenate([np.asarray(u[name]).reshape(len(u[name]), -1) for name in self.mode], axis=1)
        return flat - self._flat_mode

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        return self.covariance.log_prob(self._deviation(u))

    def centre(self) -> dict[str, np.ndarray]:
        return {**self.mode, **self.held}

    def arrays(self) -> dict[str, np.ndarray]:
        mode = {f"mode/{index:04d}/{name}": value for index, (name, value) in enumerate(self.mode.items())}
        held = {f"held/{name}": value for name, value in self.held.items()}
        return {**mode, **held, "cholesky": self.covariance.cholesky, "linear": np.asarray(int(self.linear))}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> LaplaceGaussian:
        mode = {key.split("/", 2)[2]: arrays[key] for key in sorted(arrays) if key.startswith("mode/")}
        held = {key.split("/", 1)[1]: value for key, value in arrays.items() if key.startswith("held/")}
        return cls(mode, Full(np.asarray(arrays["cholesky"])), held, bool(arrays["linear"]))

    # -- prediction

    def predictor_draws(
        self, problem: Problem, u: Mapping[str, np.ndarray], x: Any, kind: str, seed: int, memory: int
    ) -> np.ndarray:
        """eta (S, N, D): linearised, eta(mode) + J (u - mode), or through the network."""
        if kind == "sampled":
            return super().predictor_draws(problem, u, x, kind, seed, memory)
        deviation = self._deviation(u)
        parts = []
        for _, eta, jacobian in jacobians(problem, self.centre(), x, memory):
            parts.append(eta + np.tensordot(deviation, jacobian, axes=(1, 2)))
        return np.concatenate(parts, axis=1)

    def linearised(self, problem: Problem, x: Any, memory: int = 2**28) -> tuple[np.ndarray, np.ndarray]:
        """Mean (N, D) and covariance (N, D, D) of the linearised predictor: eta(mode) and J A^-1 J'."""
        means, covariances = [], []
        for _, eta, jacobian in jacobians(problem, self.centre(), x, memory):
            means.append(eta)
            covariances.append(self.covariance.project(jacobian.astype(np.float64, copy=False)))
        return np.concatenate(means), np.concatenate(covariances)

    def closed_form(self, problem: Problem, x: Any, kind: str, memory: int) -> Prediction | None:
        """The linearised predictive of a single Gaussian output, without draws.

        With known noise it is N(f, J A^-1 J' + noise^2). Where log noise is uncertain too, it is integrated over by
        Gauss-Hermite quadrature, f being Gaussian given log noise. Other likelihoods are averaged over draws of eta.
        """
        if kind != "linearised":
            return None
        eta, covariance = self.linearised(problem, x, memory)
        family, _ = problem.program.likelihood.mixture_parameters(eta[None])
        if family != "Normal" or eta.shape[-1] != 2:
            return None
        f, log_noise = eta[:, 0], eta[:, 1]
        var_f, var_s, cross = covariance[:, 0, 0], covariance[:, 1, 1], covariance[:, 0, 1]
        if var_s.max() < 1e-14:
            noise = np.exp(log_noise)
            scale = np.sqrt(var_f + noise**2)
            return Prediction("Normal", {"loc": f[None], "scale": scale[None]}, epistemic_within=var_f[None])
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        shift = np.sqrt(var_s) * nodes[:, None]
        slope = np.divide(cross, var_s, out=np.zeros_like(cross), where=var_s > 0)
        loc = f + slope * shift
        within = np.maximum(var_f - slope * cross, 0.0)
        scale = np.sqrt(within + np.exp(2.0 * (log_noise + shift)))
        return Prediction(
            "Normal",
            {"loc": loc, "scale": scale},
            log_weights=np.log(weights / weights.sum()),
            epistemic_within=np.broadcast_to(within, loc.shape).copy(),
        )


@dataclass(frozen=True)
class Laplace(Method):
    """A Gaussian at the mode; its precision is the Gauss-Newton matrix plus the prior's own curvature.

    engine: "curvature" (ours, in both systems) or "guide" (the system's AutoLaplaceApproximation, with the exact
    Hessian; its failures become named errors, and its draws go through the network).
    curvature, structure, weights: "ggn", "full", "all" so far.
    repair: None, or "clip": where the prior curves upwards at the mode (Student-t, mixtures), the negative eigenvalues
    of the prior's Hessian are set to zero, which widens the approximation there; reported as a warning.
    start: where the training of the mode starts; optimise=False takes it as the mode.
    The other fields are those of `MAP`: the mode is part of the method, so prior, noise and loss agree by construction.
    """

    structure: str = "full"
    curvature: str = "ggn"
    weights: str = "all"
    engine: str = "curvature"
    repair: str | None = None
    steps: int = 20_000
    learning_rate: float = 0.02
    tolerance: float = 1e-4
    polish: bool = True
    start: Start = None
    optimise: bool = True
    serves_local: ClassVar[bool] = False

    def check(self) -> None:
        for name, value, known in (
            ("structure", self.structure, ("full",)),
            ("curvature", self.curvature, ("ggn",)),
            ("weights", self.weights, ("all",)),
            ("engine", self.engine, ("curvature", "guide")),
        ):
            if value not in known:
                raise unknown_name(f"{name} of Laplace", value, known)
        if self.repair not in (None, "clip"):
            raise unknown_name("repair of Laplace", self.repair, ("clip",))
        check_optimiser(self.name, self.steps, self.learning_rate, self.tolerance)
        if not self.optimise and self.start is None:
            raise InputError(
                "Laplace: "
                + message("start= with optimise=False", "None", "start=a MAP posterior or a dict of arrays")
            )

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        if self.engine == "curvature":
            check_smooth(problem)
            if not problem.program.language:
                problem.program.likelihood.fisher(None)
        mode = self._mode(problem, progress)
        watch = Stopwatch()
        warnings = mode.warnings
        if self.engine == "guide":
            approximation = _GUIDES[problem.system.name](problem, mode.u)
        else:
            approximation, repaired = self._gaussian(problem, mode.u)
            warnings += repaired
        size = approximation.covariance.size
        evidence = (
            mode.log_joint + 0.5 * size * np.log(2.0 * np.pi) + 0.5 * approximation.covariance.log_determinant
        )
        return Outcome(
            approximation=approximation,
            history={"loss": mode.losses},
            compile_seconds=mode.compile_seconds,
            run_seconds=mode.run_seconds + watch(),
            # One gradient per row and output of the network makes the Jacobians; counted in passes over the data.
            gradient_evaluations=mode.evaluations + self._outputs(problem),
            warnings=warnings,
            figures={
                "log_joint": mode.log_joint,
                "gradient_norm": mode.gradient_norm,
                "converged": float(mode.converged),
                "log_evidence": float(evidence),
            },
        )

    def _mode(self, problem: Problem, progress: Progress) -> Mode:
        if self.optimise:
            return find_mode(
                problem,
                start=self.start,
                steps=self.steps,
                learning_rate=self.learning_rate,
                tolerance=self.tolerance,
                polish=self.polish,
                progress=progress,
                title=self.name,
            )
        u = starting_point(problem, self.start, progress)
        system = problem.system
        function = system.value_and_grad(problem.program.log_joint)
        value, gradient = function({n: system.asarray(v) for n, v in u.items()}, problem.x, problem.y)
        norm = np.sqrt(sum(float((system.to_numpy(g) ** 2).sum()) for g in gradient.values()))
        return Mode(u, float(value), float(norm), np.zeros(0), True, 1, 0.0, 0.0)

    def _outputs(self, problem: Problem) -> int:
        return 1 if self.engine == "guide" else 2

    def _gaussian(
        self, problem: Problem, u: Mapping[str, np.ndarray]
    ) -> tuple[LaplaceGaussian, tuple[str, ...]]:
        names = latent_names(problem)
        likelihood_part = gauss_newton(problem, u)
        prior_part = prior_hessian(problem, u)
        warnings: tuple[str, ...] = ()
        try:
            covariance = Full.of(likelihood_part + prior_part)
        except CurvatureError:
            if self.repair is None:
                raise
            values, vectors = np.linalg.eigh(prior_part)
            clipped = int((values < 0).sum())
            prior_part = (vectors * np.maximum(values, 0.0)) @ vectors.T
            covariance = Full.of(likelihood_part + prior_part)
            warnings = (
                f"the prior curves upwards at the mode: {clipped} negative eigenvalues of its Hessian were set to 0",
            )
        shapes = problem.program.sites
        mode = {
            name: np.asarray(u[name], dtype=float).reshape(shapes[name].unconstrained_shape) for name in names
        }
        held = {site.name: np.asarray(u[site.name]) for site in problem.program.params}
        return LaplaceGaussian(mode, covariance, held), warnings


# --- the systems' own guides ----------------------------------------------------------------------


def _guide_numpyro(problem: Problem, u: Mapping[str, np.ndarray]) -> LaplaceGaussian:
    """NumPyro's AutoLaplaceApproximation at the mode."""
    import jax
    from numpyro.handlers import seed
    from numpyro.infer.autoguide import AutoLaplaceApproximation
    from numpyro.infer.initialization import init_to_value

    guide = AutoLaplaceApproximation(
        _native(problem), init_loc_fn=init_to_value(values=_constrained(problem, u))
    )
    seed(guide, jax.random.PRNGKey(0))(problem.x, problem.y)
    flat, order = _flat_in_order_of(problem, u, guide._unpack_latent)

    @jax.jit
    def covariance(loc: Any) -> Any:
        # Compiled, the guide is fast, and cannot hide a failure behind a warning and a zero variance.
        return guide.get_posterior({f"{guide.prefix}_loc": loc}).covariance_matrix

    return _from_guide(problem, u, np.asarray(covariance(flat)), order)


def _guide_pyro(problem: Problem, u: Mapping[str, np.ndarray]) -> LaplaceGaussian:
    """Pyro's AutoLaplaceApproximation at the mode."""
    from pyro.infer.autoguide import AutoLaplaceApproximation
    from pyro.infer.autoguide.initialization import init_to_value

    guide = AutoLaplaceApproximation(
        _native(problem), init_loc_fn=init_to_value(values=_constrained(problem, u))
    )
    guide(problem.x, problem.y)
    size = len(flat_latents(problem, u))

    def unpack(flat: Any) -> dict[str, Any]:
        pairs: Any = guide._unpack_latent(flat)
        return {site["name"]: value for site, value in pairs}

    _, order = _flat_in_order_of(problem, u, unpack)
    try:
        gaussian = guide.laplace_approximation(problem.x, problem.y).get_posterior()
    except Exception as error:
        raise CurvatureError(
            "Pyro's AutoLaplaceApproximation failed: "
            + message(
                "a positive definite Hessian",
                f"{type(error).__name__}: {error}".splitlines()[0],
                "engine='curvature'",
            )
        ) from error
    covariance = problem.system.to_numpy(gaussian.covariance_matrix)
    assert covariance.shape == (size, size)
    return _from_guide(problem, u, covariance, order)


def _native(problem: Problem) -> Any:
    if problem.program.params:
        raise UnsupportedError(
            "Laplace(engine='guide'): "
            + message("priors on all weights", "point estimates (priors.Point)", "engine='curvature'")
        )
    return problem.program.native


def _constrained(problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, Any]:
    values = {name: problem.system.asarray(value) for name, value in u.items()}
    return problem.program.constrain(values, problem.x, problem.y)


def _flat_in_order_of(problem: Problem, u: Mapping[str, np.ndarray], unpack: Any) -> tuple[Any, np.ndarray]:
    """The mode in the order of a guide's flat vector, and for each of our positions the guide's."""
    size = len(flat_latents(problem, u))
    places = unpack(problem.system.asarray(np.arange(size, dtype=float)))
    order = np.concatenate(
        [problem.system.to_numpy(places[name]).reshape(-1) for name in latent_names(problem)]
    ).round()
    order = order.astype(int)
    flat = np.empty(size)
    flat[order] = flat_latents(problem, u)
    return problem.system.asarray(flat), order


def _from_guide(
    problem: Problem, u: Mapping[str, np.ndarray], covariance: np.ndarray, order: np.ndarray
) -> LaplaceGaussian:
    system = problem.system.name
    advice = "engine='curvature', whose Gauss-Newton matrix is never indefinite"
    variances = np.diag(covariance)
    if not np.all(np.isfinite(covariance)) or variances.min() <= 0 or variances.max() < 1e-20:
        raise CurvatureError(
            f"{system}'s AutoLaplaceApproximation failed: "
            + message(
                "a covariance with positive variances",
                f"variances from {variances.min():.3g} to {variances.max():.3g}",
                advice,
            )
        )
    try:
        precision = np.linalg.inv(covariance[np.ix_(order, order)])
        gaussian = Full.of(0.5 * (precision + precision.T))
    except (np.linalg.LinAlgError, CurvatureError) as error:
        raise CurvatureError(
            f"{system}'s AutoLaplaceApproximation failed: "
            + message("an invertible covariance", str(error), advice)
        ) from error
    mode = {name: np.asarray(u[name], dtype=float) for name in latent_names(problem)}
    return replace(LaplaceGaussian(mode, gaussian), linear=False)


_GUIDES: dict[str, Any] = {"numpyro": _guide_numpyro, "pyro": _guide_pyro}
