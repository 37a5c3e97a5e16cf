"""A thin wrapper of the systems' own AutoLaplaceApproximation: the precision at a mode, or a named error.

Both guides invert the exact Hessian of the log joint, and both fail on networks: NumPyro's can return draws without
variance (equal to the MAP), Pyro's raises in Cholesky. Here both cases raise an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import CurvatureError, UnsupportedError
from ppl_bnn.inference.curvature.gaussians import Full
from ppl_bnn.inference.flat_vector import flat_latents, latent_names


def guide_gaussian(problem: Problem, u: Mapping[str, np.ndarray]) -> Full:
    """The Gaussian over the flat vector that the system's own guide has at the mode u.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        The mode.

    Raises
    ------
    UnsupportedError
        Point estimates in the model.
    CurvatureError
        The Hessian is not positive definite.
    """
    return _GUIDES[problem.system.name](problem, u)


def _guide_numpyro(problem: Problem, u: Mapping[str, np.ndarray]) -> Full:
    """NumPyro's AutoLaplaceApproximation at the mode."""
    import jax
    from numpyro.handlers import seed
    from numpyro.infer.autoguide import AutoLaplaceApproximation
    from numpyro.infer.initialization import init_to_value

    values = _constrained(problem, u)
    with problem.system.turn:
        guide = AutoLaplaceApproximation(_native(problem), init_loc_fn=init_to_value(values=values))
        seed(guide, jax.random.PRNGKey(0))(problem.x, problem.y)
    flat, order = _flat_in_order_of(problem, u, guide._unpack_latent)

    @jax.jit
    def covariance(loc: Any) -> Any:
        # A compiled guide is fast, and cannot replace a failure by a warning and a zero variance.
        with problem.system.turn:
            return guide.get_posterior({f"{guide.prefix}_loc": loc}).covariance_matrix

    return _checked(problem, np.asarray(covariance(flat)), order)


def _guide_pyro(problem: Problem, u: Mapping[str, np.ndarray]) -> Full:
    """Pyro's AutoLaplaceApproximation at the mode."""
    from pyro.infer.autoguide import AutoLaplaceApproximation
    from pyro.infer.autoguide.initialization import init_to_value

    from ppl_bnn.backends.pyro_session import typed

    guide = AutoLaplaceApproximation(
        typed(_native(problem)), init_loc_fn=init_to_value(values=_constrained(problem, u))
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
        raise CurvatureError.of(
            "Pyro's AutoLaplaceApproximation failed",
            "a positive definite Hessian",
            f"{type(error).__name__}: {error}".splitlines()[0],
            "engine='curvature'",
        ) from error
    covariance = problem.system.to_numpy(gaussian.covariance_matrix)
    assert covariance.shape == (size, size)
    return _checked(problem, covariance, order)


def refuse_point_estimates(problem: Problem) -> None:
    """Raise `UnsupportedError` if a parameter has no prior: the guides support random variables only."""
    if problem.program.params:
        raise UnsupportedError.of(
            "Laplace(engine='guide')",
            "priors on all weights",
            "point estimates (priors.Point)",
            "engine='curvature'",
        )


def _native(problem: Problem) -> Any:
    refuse_point_estimates(problem)
    return problem.program.native


def _constrained(problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, Any]:
    values = {name: problem.system.asarray(value) for name, value in u.items()}
    return problem.program.constrain(values, problem.x, problem.y)


def _flat_in_order_of(problem: Problem, u: Mapping[str, np.ndarray], unpack: Any) -> tuple[Any, np.ndarray]:
    """The mode in the order of a guide's flat vector, and for each of our positions the guide's position."""
    size = len(flat_latents(problem, u))
    places = unpack(problem.system.asarray(np.arange(size, dtype=float)))
    order = np.concatenate(
        [problem.system.to_numpy(places[name]).reshape(-1) for name in latent_names(problem)]
    ).round()
    order = order.astype(int)
    flat = np.empty(size)
    flat[order] = flat_latents(problem, u)
    return problem.system.asarray(flat), order


def _checked(problem: Problem, covariance: np.ndarray, order: np.ndarray) -> Full:
    system = problem.system.name
    advice = "engine='curvature', whose Gauss-Newton matrix is never indefinite"
    variances = np.diag(covariance)
    if not np.all(np.isfinite(covariance)) or variances.min() <= 0 or variances.max() < 1e-20:
        raise CurvatureError.of(
            f"{system}'s AutoLaplaceApproximation failed",
            "a covariance with positive variances",
            f"variances from {variances.min():.3g} to {variances.max():.3g}",
            advice,
        )
    try:
        precision = np.linalg.inv(covariance[np.ix_(order, order)])
        gaussian = Full.of(0.5 * (precision + precision.T))
    except (np.linalg.LinAlgError, CurvatureError) as error:
        raise CurvatureError.of(
            f"{system}'s AutoLaplaceApproximation failed", "an invertible covariance", str(error), advice
        ) from error
    return gaussian


_GUIDES: dict[str, Any] = {"numpyro": _guide_numpyro, "pyro": _guide_pyro}
