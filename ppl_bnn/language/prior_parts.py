"""Parts of priors: scales, checks of fields, standard variables, shrinkage, covariances, cut points, norms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError, check_known
from ppl_bnn.core.settings import Check, between, check_settings, optional, setting, whole
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.primitives import deterministic, sample

HALF_NORMAL = dist.distribution("HalfNormal", 1.0)
Scale = Any
# Eigenvectors and eigenvalues.
Eigen = tuple[np.ndarray, np.ndarray]


class Prior(Protocol):
    """A callable that makes a weight tensor of `shape` under `name`."""

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any: ...


def check_scale(value: Any) -> str | None:
    """A positive number, or "fan_in". Arrays are values of a model, and not checked."""
    if isinstance(value, dist.Distribution):
        return "a number here, not a distribution, which is for priors.Hierarchical"
    if isinstance(value, str):
        return None if value == "fan_in" else "a scale that is a number or 'fan_in'"
    known = isinstance(value, int | float | np.floating | np.integer)
    return None if not known or 0 < value < math.inf else "a positive scale"


def sampled(check: Check) -> Check:
    """A distribution of one positive number, or what `check` accepts."""
    return lambda value: None if isinstance(value, dist.Distribution) else check(value)


def hyper_prior(value: Any) -> str | None:
    """A distribution; `Checked` checks which."""
    return None if isinstance(value, dist.Distribution) else "a distribution of one positive number as scale"


def covariance(value: Any) -> str | None:
    """A covariance, known or not."""
    good = value is None or callable(value) or np.ndim(value) == 2
    return None if good else "a square matrix, a function of its size, a CovarianceFactor or None"


def among(what: str, known: tuple[str, ...]) -> Check:
    """One of the known names; `what` is the field in errors."""

    def check(value: Any) -> None:
        check_known(what, [value], known)

    return check


class Checked:
    """The checks of a prior: what its settings declare, and what they must be together."""

    def __post_init__(self) -> None:
        where = f"priors.{type(self).__name__}"
        check_settings(self, where)
        for name in ("scale", "sigma", "length_scale"):
            value = getattr(self, name, None)
            if isinstance(value, dist.Distribution):
                check_hyper_prior(where, value)
        scale, sigma = getattr(self, "scale", "fan_in"), getattr(self, "sigma", 1.0)
        InputError.check(not isinstance(sigma, str), where, "a number as sigma", repr(sigma), "sigma=1.0")
        # The text is made on failure only: the representation of a sampled scale waits for its device.
        if not isinstance(scale, str) and sigma != 1.0:
            got = f"scale={scale!r} and sigma={sigma!r}"
            raise InputError.of(where, "sigma with scale='fan_in' only", got, "one of them")


def check_hyper_prior(where: str, given: dist.Distribution, positive: bool = True) -> None:
    """Check that a distribution is one of one number, which has to be positive by default.

    Its arguments that are distributions are checked too. `where` begins the error message.
    """
    families = dist.ON_POSITIVES if positive else dist.ON_POSITIVES | dist.ON_REALS
    known = given.family in families and given.family not in (*dist.EVENTS, *dist.SPECIAL)
    single = known and dist.draw_shape(given) == () and not given.event_dims
    expected = f"a distribution of one {'positive number as scale' if positive else 'number'}"
    got = f"{given.family} with a shape" if known else given.family
    InputError.check(single, where, expected, got, "scale=dist.HalfNormal(1.0)")
    for name, value in given.arguments.items():
        if isinstance(value, dist.Distribution):
            check_hyper_prior(f"{where}, {name} of {given.family}", value, name in dist.POSITIVE)


def draw(name: str, specification: dist.Distribution) -> Any:
    """Sample from a distribution after its arguments that are distributions, which are the sites `name.argument`."""
    arguments = {
        argument: draw(f"{name}.{argument}", value) if isinstance(value, dist.Distribution) else value
        for argument, value in specification.arguments.items()
    }
    return sample(name, replace(specification, arguments=arguments))


def resolve_scale(name: str, scale: Scale, sigma: Scale, fan_in: int) -> Any:
    """The scale of a tensor: sigma / sqrt(fan_in) for "fan_in". A random variable is sampled at `name.scale`."""
    given = sigma if isinstance(scale, str) else scale
    value = draw(f"{name}.scale", given) if isinstance(given, dist.Distribution) else given
    return value / math.sqrt(fan_in) if isinstance(scale, str) else value


# --- standard variables, shrinkage, covariances, cut points, norms ------------------------------------


def independent(shape: tuple[int, ...], family: str, *arguments: Any, **named: Any) -> dist.Distribution:
    """Independent variables of one family, one for each weight, as one event."""
    return dist.distribution(family, *arguments, **named).expand(shape).to_event()


def base_variables(name: str, shape: tuple[int, ...]) -> Any:
    """Sample standard normal variables at `name.base`, one for each weight."""
    return sample(f"{name}.base", independent(shape, "Normal", 0.0, 1.0))


class LocationScale(Checked):
    """Independent weights of a location-scale family, whose scale may be a random variable.

    With `scale="fan_in"` the scale is sigma / sqrt(_divisor * fan_in).
    """

    loc: float
    scale: Scale
    sigma: Scale
    _family: ClassVar[str]
    _divisor: ClassVar[int] = 1

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = resolve_scale(name, self.scale, self.sigma, self._divisor * fan_in)
        if any(isinstance(each, dist.Distribution) for each in (self.scale, self.sigma)):
            base = sample(f"{name}.base", self._weights(shape, 0.0, 1.0))
            return deterministic(name, self.loc + scale * base)
        return sample(name, self._weights(shape, self.loc, scale))

    def _weights(self, shape: tuple[int, ...], loc: Any, scale: Any) -> dist.Distribution:
        return independent(shape, self._family, loc=loc, scale=scale)


def shrinkage(prior: Any, name: str, shape: tuple[int, ...], fan_in: int) -> tuple[Any, Any]:
    """The global scale (), half-Cauchy with the scale of a horseshoe, and the local scales, standard half-Cauchy."""
    scale = resolve_scale(name, prior.scale, prior.sigma, fan_in)
    tau = sample(f"{name}.global", dist.distribution("HalfCauchy", scale))
    local = independent(dist.group_shape(prior.per, shape), "HalfCauchy", 1.0)
    return tau, sample(f"{name}.local", local)


def covariance_eigen(prior: str, given: Any, size: int) -> Eigen:
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


def kronecker_normal(name: str, shape: tuple[int, ...], scale: Any, left: Eigen, right: Eigen) -> Any:
    """scale * w with vec(w) ~ N(0, A (x) B), where A and B are given by eigenvectors and eigenvalues."""
    variances = np.outer(left[1], right[1])
    known = isinstance(scale, int | float | np.number)
    precisions = 1.0 / (float(scale) ** 2 * variances) if known else 1.0 / variances
    normal = dist.distribution("KroneckerNormal", np.zeros(shape), left[0], right[0], precisions)
    return sample(name, normal) if known else deterministic(name, scale * sample(f"{name}.base", normal))


@dataclass(frozen=True)
class CovarianceFactor(Checked):
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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> between = bnn.priors.CovarianceFactor(scale=None)  # correlations between the three outputs
    >>> def model(x, y=None, prior=bnn.priors.MatrixNormal(columns=between)):
    ...     bnn.observe(y, bnn.dense("out", x, 3, prior, bias=False), bnn.likelihoods.Categorical())
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites][1]
    ('out.weight.columns.correlation', 'LKJCholesky(3, 1)', (3, 3))
    """

    scale: dist.Distribution | None = setting(HALF_NORMAL, optional(hyper_prior))
    concentration: float = setting(1.0, between())

    def __call__(self, name: str, size: int) -> Any:
        good, expected = self.scale is not None or size > 1, "a scale for a single number"
        where, advice = "priors.CovarianceFactor", "scale=dist.HalfNormal(1.0)"
        ModelError.check(good, where, expected, "scale=None", advice)
        factor: Any = 1.0
        if self.scale is not None:
            factor = draw(f"{name}.scale", self.scale.expand((size,)).to_event())[:, None]
        if size > 1:
            correlation = dist.distribution("LKJCholesky", size, self.concentration)
            factor = factor * sample(f"{name}.correlation", correlation)
        return deterministic(name, factor)


@dataclass(frozen=True)
class CutPoints(Checked):
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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     cuts = bnn.priors.CutPoints()("cuts", 4)
    ...     bnn.observe(y, bnn.mlp(x, [1], bias=False), bnn.likelihoods.Ordinal(cuts))
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites][0]
    ('cuts.probabilities', 'Dirichlet((1, 1, 1, 1))', (4,))
    """

    concentration: float = setting(1.0, between())

    def __call__(self, name: str, classes: int) -> Any:
        good, advice = not whole(2)(classes), "the number of labels"
        InputError.check(good, "priors.CutPoints", "at least 2 classes", repr(classes), advice)
        concentration = (float(self.concentration),) * classes
        p = sample(f"{name}.probabilities", dist.distribution("Dirichlet", concentration))
        below, above = ops.cumsum(p)[:-1], ops.flip(ops.cumsum(ops.flip(p)))[1:]
        return deterministic(name, ops.log(below) - ops.log(above))


@dataclass(frozen=True)
class SpectralNorm(Checked):
    """Weights of another prior, divided by a number where their spectral norm is larger than a bound.

        w = v / max(1, |v| / bound),   v ~ prior,

    where |v| is the largest singular value of v (fan_in, outputs), computed exactly. The outputs of a layer with such
    weights are at most `bound` times as far apart as its inputs. A residual block x + g(x), with L such layers in g and
    activations with slopes of at most 1, keeps distances up to factors of 1 - bound^L and 1 + bound^L. With a bound
    below 1 no two inputs become one, and the uncertainty of a last layer can grow with the distance from the data (Liu
    et al. 2020).

    The latent site is `name.base`, v, and `name` is a deterministic site. A vector, such as a bias, has the other prior
    itself. The kernel of a convolution is a matrix (kh kw C, outputs) here, whose norm is at least that of the
    convolution divided by sqrt(kh kw).

    Parameters
    ----------
    prior : Prior
        Prior of v, for example `priors.Point()`, which is optimised.
    bound : float
        Largest spectral norm of w.

    References
    ----------
    - Miyato et al. (2018), Spectral normalization for generative adversarial networks.
    - Liu et al. (2020), Simple and principled uncertainty estimation with deterministic deep learning via distance
      awareness.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None, prior=bnn.priors.SpectralNorm(bnn.priors.Normal(0.0, "fan_in"), 0.9)):
    ...     bnn.observe(y, bnn.dense("out", x, 2, prior), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('out.weight.base', 'Normal(0, 0.5)', (4, 2)), ('out.bias', 'Normal(0, 1)', (2,))]
    """

    prior: Prior = setting(
        None, lambda given: None if callable(given) else "a prior", advice="priors.Point()"
    )
    bound: float = setting(0.95, between())

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        if len(shape) < 2:
            return self.prior(name, shape, fan_in)
        v = self.prior(f"{name}.base", shape, fan_in)
        norm = ops.namespace(v).linalg.matrix_norm(v.reshape((-1, shape[-1])), ord=2)
        return deterministic(name, v / ops.maximum(norm / self.bound, ops.ones_like(norm)))
