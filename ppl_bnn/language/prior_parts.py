"""Parts of priors: standard variables, location-scale families, shrinkage, covariances, cut points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError
from ppl_bnn.core.settings import whole
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language import prior_scales as scales
from ppl_bnn.language.primitives import deterministic, sample
from ppl_bnn.language.prior_scales import Scale


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
        scales.check_fields(self, sampled=("scale", "sigma"))

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        inputs = self._divisor * fan_in
        if scales.is_sampled(self.scale, self.sigma):
            scale = scales.sampled_scale(name, self.scale, self.sigma, inputs)
            return scales.shifted_and_scaled(name, self.loc, scale, self._weights(shape, 0.0, 1.0))
        scale = scales.resolve_scale(self.scale, self.sigma, inputs)
        return sample(name, self._weights(shape, self.loc, scale))

    def _weights(self, shape: tuple[int, ...], loc: Any, scale: Any) -> dist.Distribution:
        return independent(shape, self._family, loc=loc, scale=scale)


def shrinkage(prior: Any, name: str, shape: tuple[int, ...], fan_in: int) -> tuple[Any, Any]:
    """The global scale (), half-Cauchy with the scale of a horseshoe, and the local scales, standard half-Cauchy."""
    scale = scales.resolve_scale(prior.scale, prior.sigma, fan_in)
    tau = sample(f"{name}.global", dist.distribution("HalfCauchy", scale))
    local = independent(dist.group_shape(prior.per, shape), "HalfCauchy", 1.0)
    return tau, sample(f"{name}.local", local)


def covariance_eigen(prior: str, given: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvectors and eigenvalues of a covariance: a matrix, a function of the size, or None (identity)."""
    matrix = given(size) if callable(given) else np.eye(size) if given is None else given
    matrix = np.asarray(matrix, dtype=float)
    where, wanted, shape = f"priors.{prior}", (size, size), matrix.shape
    advice = "a function that makes it from the size"
    ModelError.check(shape == wanted, where, f"a covariance of shape {wanted}", f"shape {shape}", advice)
    finite = np.isfinite(matrix).all() and np.allclose(matrix, matrix.T, rtol=1e-10, atol=0.0)
    values, vectors = np.linalg.eigh(matrix) if finite else (np.zeros(1), matrix)
    # Smaller eigenvalues are lost in the rounding of the matrix.
    good, expected = values.min() > 1e-14 * values.max(), "a covariance, symmetric and positive definite"
    got = f"eigenvalues from {values.min():.3g} to {values.max():.3g}" if finite else "another matrix"
    InputError.check(good, where, expected, got, "a shorter length scale, or more on the diagonal")
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
    return sample(name, normal) if known else scales.shifted_and_scaled(name, 0.0, scale, normal)


@dataclass(frozen=True)
class CovarianceFactor:
    """Factor L (K, K) of an unknown covariance L L' = diag(s) C C' diag(s), s_k ~ scale, C C' a correlation matrix.

    It is called as `prior(name, size)`, for example `likelihoods.MultiOutputGaussian(priors.CovarianceFactor()("noise",
    2))`. The latent sites are `name.scale` (K,) and `name.correlation`, from LKJCholesky(concentration): the density of
    a correlation matrix R is proportional to det(R)^(concentration - 1), uniform for 1, closer to independence above
    (Lewandowski, Kurowicka and Joe 2009). `name` is a deterministic site. With K = 1 there is no correlation.

    Parameters
    ----------
    scale : Distribution or None
        Prior of s_k, a distribution on the positive numbers; None for a correlation matrix.
    concentration : float
        Concentration of the correlation matrix.

    Raises
    ------
    ModelError
        When the model runs: `scale=None` with K = 1.

    References
    ----------
    Lewandowski, Kurowicka and Joe (2009), Generating random correlation matrices based on vines and extended onion
    method.
    """

    scale: dist.Distribution | None = field(default_factory=lambda: dist.distribution("HalfNormal", 1.0))
    concentration: float = 1.0

    def __post_init__(self) -> None:
        scales.check_fields(self, numbers=("concentration",))
        if self.scale is not None:
            scales.check_hyper_prior("priors.CovarianceFactor", self.scale)

    def __call__(self, name: str, size: int) -> Any:
        good, expected = self.scale is not None or size > 1, "a scale for a single number"
        where, advice = "priors.CovarianceFactor", "scale=dist.HalfNormal(1.0)"
        ModelError.check(good, where, expected, "scale=None", advice)
        factor: Any = 1.0
        if self.scale is not None:
            factor = scales.draw(f"{name}.scale", self.scale.expand((size,)).to_event())[:, None]
        if size > 1:
            correlation = dist.distribution("LKJCholesky", size, self.concentration)
            factor = factor * sample(f"{name}.correlation", correlation)
        return deterministic(name, factor)


@dataclass(frozen=True)
class CutPoints:
    """Increasing cut points (C - 1,) of C ordered classes, for `likelihoods.Ordinal`.

        c_k = logit(p_0 + ... + p_k),   p ~ Dirichlet(concentration, ..., concentration):

    where f = 0 the classes have the probabilities p, and all C of them are treated alike (Betancourt 2019). It is
    called as `prior(name, classes)`. The latent site is `name.probabilities`; `name` is a deterministic site.

    Parameters
    ----------
    concentration : float
        Concentration of the Dirichlet distribution, the same for all classes.

    Raises
    ------
    InputError
        Fewer than 2 classes.

    References
    ----------
    Betancourt (2019), Ordinal regression.
    """

    concentration: float = 1.0

    def __post_init__(self) -> None:
        scales.check_fields(self, numbers=("concentration",))

    def __call__(self, name: str, classes: int) -> Any:
        good, advice = not whole(2)(classes), "the number of labels"
        InputError.check(good, "priors.CutPoints", "at least 2 classes", repr(classes), advice)
        concentration = (float(self.concentration),) * classes
        p = sample(f"{name}.probabilities", dist.distribution("Dirichlet", concentration))
        below, above = ops.cumsum(p)[:-1], ops.flip(ops.cumsum(ops.flip(p)))[1:]
        return deterministic(name, ops.log(below) - ops.log(above))
