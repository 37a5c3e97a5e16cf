"""A thin wrapper of the systems' own AutoLaplaceApproximation: the precision at a mode, or a named error.

Both guides invert the exact Hessian, and both fail on networks: NumPyro's can return draws without variance, Pyro's
raises in Cholesky. Here both cases raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import CurvatureError
from ppl_bnn.inference.curvature.gaussians import Full
from ppl_bnn.inference.flat_vector import Values, flat_latents

# A guide at the mode: unpack(flat vector of the guide) -> values by site, and covariance(flat mode).
Guide = tuple[Callable[[Any], Mapping[str, Any]], Callable[[Any], np.ndarray]]


def guide_gaussian(problem: Problem, u: Values) -> Full:
    """The Gaussian of the system's guide at the mode u; `CurvatureError` if the Hessian is not positive definite."""
    system, mode = problem.system, flat_latents(problem, u)
    failed = f"{system.name}'s AutoLaplaceApproximation failed"
    advice = "engine='curvature', whose Gauss-Newton matrix is never indefinite"
    values = {name: system.asarray(value) for name, value in u.items()}
    guide = _numpyro_guide if system.name == "numpyro" else _pyro_guide
    unpack, covariance_at = guide(problem, problem.program.constrain(values, problem.x, problem.y))
    # For each of our positions that in the flat vector of the guide.
    places = unpack(system.asarray(np.arange(len(mode), dtype=float)))
    order = flat_latents(problem, {name: system.to_numpy(place) for name, place in places.items()})
    order = order.round().astype(int)
    try:
        covariance = covariance_at(system.asarray(mode[np.argsort(order)]))
    except Exception as error:
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CurvatureError.of(failed, "a positive definite Hessian", got, advice) from error
    variances = np.diag(covariance)
    if not np.all(np.isfinite(covariance)) or variances.min() <= 0 or variances.max() < 1e-20:
        got = f"variances from {variances.min():.3g} to {variances.max():.3g}"
        raise CurvatureError.of(failed, "a covariance with positive variances", got, advice)
    try:
        precision = np.linalg.inv(covariance[np.ix_(order, order)])
        return Full.of(0.5 * (precision + precision.T))
    except (np.linalg.LinAlgError, CurvatureError) as error:
        raise CurvatureError.of(failed, "an invertible covariance", str(error), advice) from error


def _numpyro_guide(problem: Problem, values: Mapping[str, Any]) -> Guide:
    import jax
    from numpyro.handlers import seed
    from numpyro.infer.autoguide import AutoLaplaceApproximation
    from numpyro.infer.initialization import init_to_value

    with problem.system.turn:
        guide: Any = AutoLaplaceApproximation(
            problem.program.native, init_loc_fn=init_to_value(values=values)
        )
        seed(guide, jax.random.PRNGKey(0))(problem.x, problem.y)

    @jax.jit
    def covariance(loc: Any) -> Any:
        # A compiled guide is fast, and cannot replace a failure by a warning and a zero variance.
        with problem.system.turn:
            return guide.get_posterior({f"{guide.prefix}_loc": loc}).covariance_matrix

    return guide._unpack_latent, lambda flat: np.asarray(covariance(flat))


def _pyro_guide(problem: Problem, values: Mapping[str, Any]) -> Guide:
    from pyro.infer.autoguide import AutoLaplaceApproximation
    from pyro.infer.autoguide.initialization import init_to_value

    from ppl_bnn.backends.pyro_session import typed

    native = typed(problem.program.native)
    guide: Any = AutoLaplaceApproximation(native, init_loc_fn=init_to_value(values=dict(values)))
    guide(problem.x, problem.y)

    def unpack(flat: Any) -> dict[str, Any]:
        return {site["name"]: value for site, value in guide._unpack_latent(flat)}

    def covariance(flat: Any) -> np.ndarray:
        gaussian = guide.laplace_approximation(problem.x, problem.y).get_posterior()
        return problem.system.to_numpy(gaussian.covariance_matrix)

    return unpack, covariance
