"""Parts of priors: standard variables, location-scale families, shrinkage, and covariances of known eigenvectors."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language.primitives import sample
from ppl_bnn.language.prior_scales import (
    Scale,
    check_fields,
    is_sampled,
    resolve_scale,
    sampled_scale,
    shifted_and_scaled,
)


def independent(shape: tuple[int, ...], family: str, *arguments: Any, **named: Any) -> dist.Distribution:
    """Independent variables of one family, one for each weight, as one event."""
    return dist.distribution(family, *arguments, **named).expand(shape).to_event()


def base_variables(name: str, shape: tuple[int, ...]) -> Any:
    """Sample standard normal variables at `name.base`, one for each weight."""
    return sample(f"{name}.base", independent(shape, "Normal", 0.0, 1.0))


class LocationScale:
    """Independent weights of a location-scale family, whose scale may be a random variable.

    With `scale="fan_in"` the scale is sigma / sqrt(_divisor * fan_in).
    """

    loc: float
    scale: Scale
    sigma: Scale
    _family: ClassVar[str]
    _divisor: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self, sampled=("scale", "sigma"))

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        inputs = self._divisor * fan_in
        if is_sampled(self.scale, self.sigma):
            scale = sampled_scale(name, self.scale, self.sigma, inputs)
            return shifted_and_scaled(name, self.loc, scale, self._weights(shape, 0.0, 1.0))
        return sample(name, self._weights(shape, self.loc, resolve_scale(self.scale, self.sigma, inputs)))

    def _weights(self, shape: tuple[int, ...], loc: Any, scale: Any) -> dist.Distribution:
        return independent(shape, self._family, loc=loc, scale=scale)


def shrinkage(name: str, shape: tuple[int, ...], scale: Any, per: str) -> tuple[Any, Any]:
    """The global scale (), half-Cauchy with scale `scale`, and the local scales, standard half-Cauchy."""
    tau = sample(f"{name}.global", dist.distribution("HalfCauchy", scale))
    group = dist.group_shape(per, shape)
    return tau, sample(f"{name}.local", independent(group, "HalfCauchy", 1.0))


def covariance_eigen(prior: str, given: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvectors and eigenvalues of a covariance: a matrix, a function of the size, or None (identity)."""
    matrix = given(size) if callable(given) else np.eye(size) if given is None else given
    matrix = np.asarray(matrix, dtype=float)
    if matrix.shape != (size, size):
        advice = "one prior per layer, or a function that makes it from the size"
        expected, got = f"a covariance of shape {(size, size)}", f"shape {matrix.shape}"
        raise ModelError.of(f"priors.{prior}", expected, got, advice)
    finite = np.isfinite(matrix).all() and np.allclose(matrix, matrix.T, rtol=1e-10, atol=0.0)
    values, vectors = np.linalg.eigh(matrix) if finite else (np.zeros(1), matrix)
    # Smaller eigenvalues are lost in the rounding of the matrix.
    if not values.min() > 1e-14 * values.max():
        expected = "a covariance, symmetric and positive definite"
        got = f"eigenvalues from {values.min():.3g} to {values.max():.3g}" if finite else "another matrix"
        advice = "a shorter length scale, or something added to the diagonal"
        raise InputError.of(f"priors.{prior}", expected, got, advice)
    return vectors, values


def kronecker_normal(
    name: str,
    shape: tuple[int, ...],
    scale: Any,
    left: tuple[np.ndarray, np.ndarray],
    right: tuple[np.ndarray, np.ndarray],
) -> Any:
    """scale * w with vec(w) ~ N(0, A (x) B), where A and B are given by eigenvectors and eigenvalues."""
    variances = np.outer(left[1], right[1])
    known = isinstance(scale, int | float | np.number)
    precisions = 1.0 / (float(scale) ** 2 * variances) if known else 1.0 / variances
    normal = dist.distribution("KroneckerNormal", np.zeros(shape), left[0], right[0], precisions)
    return sample(name, normal) if known else shifted_and_scaled(name, 0.0, scale, normal)
