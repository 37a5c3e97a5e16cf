"""Priors over weight tensors.

A prior is called as `prior(name, shape, fan_in)` inside a model and returns the tensor. It is itself a
small generative program: on the way it may sample scales of its own or take a point estimate.

Scales. A number is the standard deviation (or the scale of the family) of each weight. `"fan_in"` means
variance sigma^2 / fan_in, so that pre-activations keep their size whatever the width; the bias of a layer
counts as one input of constant value 1, so its fan_in is 1.

Computed weights. `Hierarchical`, `Horseshoe`, `RegularisedHorseshoe` and the relaxed `SpikeAndSlab` draw standard
variables and multiply them by scales: the latent sites are `<name>.base` and those of the scales, and `<name>` is a
deterministic site. So methods work in coordinates in which the prior has no funnel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError, message, unknown_name
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.primitives import deterministic, param, sample
from ppl_bnn.language.prior_scales import (
    Scale,
    check_hyper_prior,
    check_number,
    check_scale,
    check_scales,
    draw,
    is_sampled,
    resolve_scale,
    sampled_scale,
    shifted_and_scaled,
)


@dataclass(frozen=True)
class Normal:
    """w ~ N(loc, scale^2), independently; with scale="fan_in", variance sigma^2 / fan_in.

    scale or sigma may be a distribution on the positive numbers, its own scale too: then there is one scale for the
    tensor, the site `name.scale`, and the latent site of the weights is `name.base`, e ~ N(0, 1), w = loc + scale * e.
    """

    loc: float = 0.0
    scale: Scale = 1.0
    sigma: Scale = 1.0

    def __post_init__(self) -> None:
        check_scales("Normal", self.scale, self.sigma, sampled=True)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        if is_sampled(self.scale, self.sigma):
            base = dist.distribution("Normal", 0.0, 1.0).expand(shape).to_event()
            return shifted_and_scaled(
                name, self.loc, sampled_scale(name, self.scale, self.sigma, fan_in), base
            )
        scale = resolve_scale(self.scale, self.sigma, fan_in)
        return sample(name, dist.distribution("Normal", self.loc, scale).expand(shape).to_event())


@dataclass(frozen=True)
class StudentT:
    """w ~ t_df(loc, scale): heavy tails, a few large weights. `scale` is the family's, not the standard deviation.

    With scale="fan_in" the scale is sigma / sqrt(fan_in). scale or sigma may be a distribution, as for `Normal`.
    """

    df: float = 3.0
    loc: float = 0.0
    scale: Scale = 1.0
    sigma: Scale = 1.0

    def __post_init__(self) -> None:
        check_scale("StudentT", self.df)
        check_scales("StudentT", self.scale, self.sigma, sampled=True)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        if is_sampled(self.scale, self.sigma):
            base = dist.distribution("StudentT", self.df, 0.0, 1.0).expand(shape).to_event()
            return shifted_and_scaled(
                name, self.loc, sampled_scale(name, self.scale, self.sigma, fan_in), base
            )
        scale = resolve_scale(self.scale, self.sigma, fan_in)
        return sample(name, dist.distribution("StudentT", self.df, self.loc, scale).expand(shape).to_event())


@dataclass(frozen=True)
class Laplace:
    """w ~ Laplace(loc, scale), density exp(-|w - loc| / scale) / (2 scale); variance 2 scale^2.

    With scale="fan_in" the variance is sigma^2 / fan_in. scale or sigma may be a distribution, as for `Normal`.
    """

    loc: float = 0.0
    scale: Scale = 1.0
    sigma: Scale = 1.0

    def __post_init__(self) -> None:
        check_scales("Laplace", self.scale, self.sigma, sampled=True)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        if is_sampled(self.scale, self.sigma):
            base = dist.distribution("Laplace", 0.0, 1.0).expand(shape).to_event()
            # A variance of sigma^2 / fan_in is twice the square of the family's scale.
            inputs = 2 * fan_in if isinstance(self.scale, str) else fan_in
            return shifted_and_scaled(
                name, self.loc, sampled_scale(name, self.scale, self.sigma, inputs), base
            )
        scale = self.sigma / math.sqrt(2.0 * fan_in) if isinstance(self.scale, str) else self.scale
        return sample(name, dist.distribution("Laplace", self.loc, scale).expand(shape).to_event())


@dataclass(frozen=True)
class ScaleMixture:
    """w ~ sum_k weights_k N(0, scales_k^2), one factor per weight (Blundell et al. 2015).

    Each weight has its own mixture: the joint density is a product over weights of the sums in brackets.
    """

    weights: tuple[float, ...] = (0.5, 0.5)
    scales: tuple[float, ...] = (1.5, 0.1)

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.scales) or len(self.weights) < 1:
            raise InputError(
                "priors.ScaleMixture: "
                + message(
                    "as many weights as scales",
                    f"{len(self.weights)} and {len(self.scales)}",
                    "weights=(0.5, 0.5)",
                )
            )
        for scale in self.scales:
            check_scale("ScaleMixture", scale)
        if min(self.weights) <= 0 or abs(sum(self.weights) - 1.0) > 1e-9:
            raise InputError(
                "priors.ScaleMixture: "
                + message("positive weights with sum 1", str(self.weights), "weights=(0.5, 0.5)")
            )

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        mixture = dist.distribution("NormalMixture", tuple(self.weights), tuple(self.scales))
        return sample(name, mixture.expand(shape).to_event())


@dataclass(frozen=True)
class SpikeAndSlab:
    """Each weight from the slab with `probability`, else from the spike at zero: a network with few weights.

    Marginalised (the default), with a narrow normal as the spike (George and McCulloch 1993):

        w ~ probability N(0, slab^2) + (1 - probability) N(0, spike^2).

    `slab` and `spike` are standard deviations; spike is slab / 100 unless given. The narrower it is, the deeper the
    well at zero, and the harder it is for any method to leave it.

    Relaxed (relaxed=True), with a gate z between 0 and 1 in front of each weight, from the concrete distribution
    (Maddison, Mnih and Teh 2017; Jang, Gu and Poole 2017), RelaxedBernoulli in both systems:

        w = slab * z * e,   e ~ N(0, 1),   logit(z) = (logit(probability) + noise) / temperature,

    with noise from the standard logistic distribution. The spike is what gates near 0 leave: no w is zero exactly. As
    `temperature` falls (0.5 unless given), gates go to 0 or 1, and w to a slab and an atom at zero. The latent sites
    are `name.logit`, logit(z) on the real line, and `name.base`, e; the gate `name.gate` and the weight `name` are
    deterministic sites.

    With scale="fan_in" both standard deviations are divided by sqrt(fan_in); a number multiplies both.
    """

    probability: float = 0.5
    slab: float = 1.0
    spike: float | None = None
    relaxed: bool = False
    temperature: float | None = None
    scale: Scale = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.probability < 1.0:
            raise InputError(
                "priors.SpikeAndSlab: "
                + message("a probability between 0 and 1", repr(self.probability), "probability=0.5")
            )
        unused, value = ("spike", self.spike) if self.relaxed else ("temperature", self.temperature)
        if value is not None:
            raise InputError(
                "priors.SpikeAndSlab: "
                + message(
                    f"no {unused} with relaxed={self.relaxed}",
                    f"{unused}={value!r}",
                    f"relaxed={not self.relaxed}, or leaving {unused} out",
                )
            )
        for number in (self.slab, self.spike, self.temperature):
            if number is not None:
                check_number("SpikeAndSlab", number)
        check_scale("SpikeAndSlab", self.scale)
        if self.spike is not None and self.spike >= self.slab:
            raise InputError(
                "priors.SpikeAndSlab: "
                + message(
                    "a spike narrower than the slab",
                    f"spike={self.spike!r} and slab={self.slab!r}",
                    "spike=0.01 * slab",
                )
            )

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = resolve_scale(self.scale, 1.0, fan_in)
        if not self.relaxed:
            spike = 0.01 * self.slab if self.spike is None else self.spike
            weights = (self.probability, 1.0 - self.probability)
            mixture = dist.distribution("NormalMixture", weights, (scale * self.slab, scale * spike))
            return sample(name, mixture.expand(shape).to_event())
        temperature = 0.5 if self.temperature is None else self.temperature
        loc = (math.log(self.probability) - math.log1p(-self.probability)) / temperature
        logit = sample(
            f"{name}.logit", dist.distribution("Logistic", loc, 1.0 / temperature).expand(shape).to_event()
        )
        gate = deterministic(f"{name}.gate", ops.sigmoid(logit))
        return deterministic(name, scale * self.slab * gate * _base(name, shape))


@dataclass(frozen=True)
class Hierarchical:
    """w ~ N(0, (factor * s)^2) with scales s of their own prior, learned from the data with all else.

    scale: the prior of s, a distribution on the positive numbers, for example dist.HalfNormal(1.0). Its arguments may
    be distributions themselves, and theirs too, one number each for the tensor: dist.HalfNormal(dist.HalfCauchy(1.0))
    adds the site `name.scale.scale`. What several tensors share the model samples and gives to the prior of each, as in
    priors.Normal(0.0, bnn.sample("scale", dist.HalfNormal(1.0))). per: which weights share s: "tensor" (all), "unit"
    (those into one output unit or channel), "input" (those out of one input unit: automatic relevance determination,
    MacKay 1994, Neal 1996; the bias of a layer is one group) or "weight" (none; then s is a mixing variable, and w has
    heavy tails). factor: a number or "fan_in", 1 / sqrt(fan_in).

    Non-centred by default: the latent sites are `name.scale` and `name.base`, e ~ N(0, 1), and w = factor * s * e is
    the deterministic site `name`. So the density is bounded at s = 0 and there is no funnel where the data say little
    about w (Papaspiliopoulos, Roberts and Skold 2007). With centred=True w is a latent site itself, which samples
    better where the data say much; then the joint density has no mode, and MAP and Laplace have nothing to find.
    """

    scale: dist.Distribution = field(default_factory=lambda: dist.distribution("HalfNormal", 1.0))
    per: str = "tensor"
    factor: Scale = 1.0
    centred: bool = False

    def __post_init__(self) -> None:
        dist.check_group("priors.Hierarchical", self.per)
        check_scale("Hierarchical", self.factor)
        check_hyper_prior("Hierarchical", self.scale)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        factor = resolve_scale(self.factor, 1.0, fan_in)
        group = dist.group_shape(self.per, shape)
        scale = factor * draw(f"{name}.scale", self.scale.expand(group).to_event())
        if self.centred:
            return sample(name, dist.distribution("Normal", 0.0, scale).expand(shape).to_event())
        return deterministic(name, scale * _base(name, shape))


# Local scales are of no use where there is one for all weights: that is the global one.
_LOCAL = ("weight", "unit", "input")


@dataclass(frozen=True)
class Horseshoe:
    """w = tau * lambda * e with e ~ N(0, 1): nearly all weights at zero, a few left alone (Carvalho et al. 2010).

        tau ~ HalfCauchy(scale), one for the tensor;   lambda ~ HalfCauchy(1), one for each group.

    Given tau = 1, the share of a weight that is taken away, 1 / (1 + lambda^2), is Beta(1/2, 1/2): all or nothing. A
    weight has no variance. scale: a number, or "fan_in" for sigma / sqrt(fan_in); it says how few weights there are
    (Piironen and Vehtari 2017). per: which weights share lambda: "weight" (none), "unit" (those into one output unit or
    channel: whole units are switched off, Ghosh, Yao and Doshi-Velez 2018) or "input" (those out of one input unit).

    Non-centred: the latent sites are `name.global`, `name.local` and `name.base`, and `name` is a deterministic site.
    """

    scale: Scale = 1.0
    per: str = "weight"
    sigma: float = 1.0

    def __post_init__(self) -> None:
        dist.check_group("priors.Horseshoe", self.per, _LOCAL)
        check_scales("Horseshoe", self.scale, self.sigma)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        tau, local = _shrinkage(name, shape, resolve_scale(self.scale, self.sigma, fan_in), self.per)
        return deterministic(name, tau * local * _base(name, shape))


@dataclass(frozen=True)
class RegularisedHorseshoe:
    """A horseshoe whose large weights are held by a slab of finite width (Piironen and Vehtari 2017).

        w = tau * lambda_ * e,   lambda_^2 = c^2 lambda^2 / (c^2 + tau^2 lambda^2),   e ~ N(0, 1),
        c^2 ~ InverseGamma(slab_df / 2, slab_df slab_scale^2 / 2), one for the tensor;

    tau and lambda as for `Horseshoe`. Where tau lambda is much below c it is the horseshoe; where it is much above, w
    is nearly N(0, c^2), and over c a Student-t with slab_df degrees of freedom and scale slab_scale. So a weight that
    the data do not pin down cannot run away, and a sampler meets lighter tails.

    scale, per, sigma: as for `Horseshoe`. With p weights of which about q matter, and noise of standard deviation s in
    N rows, the source proposes scale = q / (p - q) * s / sqrt(N). slab_scale: a number, or "fan_in", 1 / sqrt(fan_in).

    Non-centred: the latent sites are `name.global`, `name.local`, `name.slab` (c^2) and `name.base`, and `name` is a
    deterministic site.
    """

    scale: Scale = 1.0
    slab_scale: Scale = 2.0
    slab_df: float = 4.0
    per: str = "weight"
    sigma: float = 1.0

    def __post_init__(self) -> None:
        dist.check_group("priors.RegularisedHorseshoe", self.per, _LOCAL)
        check_scales("RegularisedHorseshoe", self.scale, self.sigma)
        check_scale("RegularisedHorseshoe", self.slab_scale)
        check_number("RegularisedHorseshoe", self.slab_df)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        tau, local = _shrinkage(name, shape, resolve_scale(self.scale, self.sigma, fan_in), self.per)
        width = resolve_scale(self.slab_scale, 1.0, fan_in)
        half = 0.5 * self.slab_df
        slab = sample(f"{name}.slab", dist.distribution("InverseGamma", half, half * width**2))
        # tau lambda_ = r / sqrt(1 + r^2 / c^2) with r = tau lambda, by logarithms: the tails of r reach far.
        log_r = ops.log(tau) + ops.log(local)
        scale = ops.exp(log_r - 0.5 * ops.softplus(2.0 * log_r - ops.log(slab)))
        return deterministic(name, scale * _base(name, shape))


def _shrinkage(name: str, shape: tuple[int, ...], scale: Any, per: str) -> tuple[Any, Any]:
    """The global scale (), half-Cauchy of that scale, and the local ones, standard half-Cauchy."""
    tau = sample(f"{name}.global", dist.distribution("HalfCauchy", scale))
    group = dist.group_shape(per, shape)
    return tau, sample(f"{name}.local", dist.distribution("HalfCauchy", 1.0).expand(group).to_event())


def _base(name: str, shape: tuple[int, ...]) -> Any:
    """Standard normal variables, one for each weight."""
    return sample(f"{name}.base", dist.distribution("Normal", 0.0, 1.0).expand(shape).to_event())


def _covariance_eigen(prior: str, given: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvectors and eigenvalues of a covariance: a matrix (size, size), a function of the size, None: identity."""
    matrix = given(size) if callable(given) else np.eye(size) if given is None else given
    matrix = np.asarray(matrix, dtype=float)
    if matrix.shape != (size, size):
        raise ModelError(
            f"priors.{prior}: "
            + message(
                f"a covariance of shape {(size, size)}",
                f"shape {matrix.shape}",
                "one prior per layer, or a function that makes it from the size",
            )
        )
    finite = np.isfinite(matrix).all() and np.allclose(matrix, matrix.T, rtol=1e-10, atol=0.0)
    values, vectors = np.linalg.eigh(matrix) if finite else (np.zeros(1), matrix)
    # What is smaller than this is lost in the rounding of the matrix.
    if not values.min() > 1e-14 * values.max():
        raise InputError(
            f"priors.{prior}: "
            + message(
                "a covariance, symmetric and positive definite",
                f"eigenvalues from {values.min():.3g} to {values.max():.3g}" if finite else "another matrix",
                "a shorter length scale, or something added to the diagonal",
            )
        )
    return vectors, values


def _kronecker_normal(
    name: str,
    shape: tuple[int, ...],
    scale: Any,
    left: tuple[np.ndarray, np.ndarray],
    right: tuple[np.ndarray, np.ndarray],
) -> Any:
    """scale * w, vec(w) ~ N(0, A (x) B) with A and B by eigenvectors and eigenvalues."""
    variances = np.outer(left[1], right[1])
    known = isinstance(scale, int | float | np.number)
    precisions = 1.0 / (float(scale) ** 2 * variances) if known else 1.0 / variances
    normal = dist.distribution("KroneckerNormal", np.zeros(shape), left[0], right[0], precisions)
    return sample(name, normal) if known else shifted_and_scaled(name, 0.0, scale, normal)


@dataclass(frozen=True)
class MatrixNormal:
    """vec(W) ~ N(0, scale^2 rows (x) columns): Cov(w_io, w_jp) = scale^2 rows_ij columns_op (Dawid 1981).

    rows (I, I): covariance between the weights out of different inputs, those of one output unit. columns (O, O):
    between those into different output units. Each is a symmetric, positive definite matrix, a function of the size
    that makes one (for layers of any width), a `CovarianceFactor`, under which it is unknown, or None, the identity. A
    kernel (kh, kw, C, O) is the matrix (kh kw C, O), and a bias (O,) has `columns` alone.

    scale and sigma: as for `Normal`, distributions too. With matrices that are known, and so the scale, the latent site
    is `name` itself. Otherwise it is `name.base`, which is multiplied by the scale and by what is unknown: factors
    A = `name.rows` and B = `name.columns`, W = scale A E B', E standard normal. A scale, and one in each unknown
    covariance, cannot be told apart: leave all but one at fixed sizes (`CovarianceFactor(scale=None)`).
    """

    rows: Any = None
    columns: Any = None
    scale: Scale = 1.0
    sigma: Scale = 1.0

    def __post_init__(self) -> None:
        check_scales("MatrixNormal", self.scale, self.sigma, sampled=True)
        for given in (self.rows, self.columns):
            if given is not None and not callable(given) and len(np.shape(given)) != 2:
                raise InputError(
                    "priors.MatrixNormal: "
                    + message(
                        "a square matrix, a function of its size, a CovarianceFactor or None",
                        f"shape {np.shape(given)}",
                        "rows=None for independent inputs",
                    )
                )

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        inputs, outputs = math.prod(shape[:-1]), shape[-1]
        given = {"rows": self.rows if len(shape) > 1 else None, "columns": self.columns}
        sizes = {"rows": inputs, "columns": outputs}
        scale = sampled_scale(name, self.scale, self.sigma, fan_in)
        if not any(isinstance(side, CovarianceFactor) for side in given.values()):
            left, right = (_covariance_eigen("MatrixNormal", given[side], sizes[side]) for side in given)
            return _kronecker_normal(name, shape, scale, left, right)
        base = _base(name, (inputs, outputs))
        factors = {}
        for side, what in given.items():
            if isinstance(what, CovarianceFactor):
                factors[side] = what(f"{name}.{side}", sizes[side])
            else:
                vectors, values = _covariance_eigen("MatrixNormal", what, sizes[side])
                factors[side] = ops.asarray(vectors * np.sqrt(values), like=base)
        w = ops.einsum("ij,jk,lk->il", factors["rows"], base, factors["columns"])
        return deterministic(name, scale * w.reshape(shape))


@dataclass(frozen=True)
class CorrelatedConvolution:
    """Kernels whose weights are alike at neighbouring places, as those of trained networks are (Fortuin et al. 2022).

        Cov(w_aco, w_bco) = scale^2 exp(-(|a - b| / length_scale)^p),

    a and b being places of the kernel, at distance |a - b| in pixels, and c and o its channels; other pairs of channels
    are independent. kernel: "exponential" (p = 1, as in the source) or "squared_exponential" (p = 2, smoother). As
    length_scale goes to zero it is `Normal`. scale and sigma: as for `Normal`, distributions too.

    For kernels (kh, kw, C, O), or (k, C, O) in one dimension; weights without places, (I, O) and (O,), are independent.
    The latent site is `name`; where the scale is sampled it is `name.base`. length_scale may be a distribution on the
    positive numbers, as scales may: the site `name.length_scale`, and `name.base` then holds standard normal variables.
    """

    length_scale: Any = 1.0
    kernel: str = "exponential"
    scale: Scale = 1.0
    sigma: Scale = 1.0

    def __post_init__(self) -> None:
        if self.kernel not in ("exponential", "squared_exponential"):
            raise unknown_name(
                "kernel of priors.CorrelatedConvolution", self.kernel, ("exponential", "squared_exponential")
            )
        if isinstance(self.length_scale, dist.Distribution):
            check_hyper_prior("CorrelatedConvolution", self.length_scale)
        else:
            check_number("CorrelatedConvolution", self.length_scale)
        check_scales("CorrelatedConvolution", self.scale, self.sigma, sampled=True)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        if len(shape) < 3:
            return Normal(0.0, self.scale, self.sigma)(name, shape, fan_in)
        scale = sampled_scale(name, self.scale, self.sigma, fan_in)
        places = np.stack(np.meshgrid(*map(np.arange, shape[:-2]), indexing="ij"), -1).reshape(
            -1, len(shape) - 2
        )
        distances = np.sqrt(np.sum((places[:, None] - places[None]) ** 2, axis=-1))
        power = 1 if self.kernel == "exponential" else 2
        if isinstance(self.length_scale, dist.Distribution):
            base = _base(name, shape)
            length = draw(f"{name}.length_scale", self.length_scale)
            correlation = ops.exp(-((ops.asarray(distances, like=base) / length) ** power))
            factor = ops.namespace(base).linalg.cholesky(correlation)
            flat = ops.matmul(factor, base.reshape(len(places), -1))
            return deterministic(name, scale * flat.reshape(shape))
        correlation = np.exp(-((distances / self.length_scale) ** power))
        vectors, values = _covariance_eigen("CorrelatedConvolution", correlation, len(places))
        channels = np.eye(shape[-2])
        left = np.kron(vectors, channels), np.repeat(values, shape[-2])
        return _kronecker_normal(name, shape, scale, left, (np.eye(shape[-1]), np.ones(shape[-1])))


# --- what likelihoods and other priors are made of ----------------------------------------------------


@dataclass(frozen=True)
class CovarianceFactor:
    """L (K, K) with L L' an unknown covariance: L = diag(s) C, s_k ~ scale, C C' a correlation matrix.

    Called as `prior(name, size)`: `likelihoods.MultiOutputGaussian(priors.CovarianceFactor()("noise", 2))`. The latent
    sites are `name.scale` (K,) and `name.correlation`, from LKJCholesky(concentration): the density of a correlation
    matrix R is proportional to det(R)^(concentration - 1), uniform for 1, nearer to independence above (Lewandowski,
    Kurowicka and Joe 2009). scale: a distribution on the positive numbers, or None for a correlation matrix. `name` is
    a deterministic site. With K = 1 there is no correlation.
    """

    scale: dist.Distribution | None = field(default_factory=lambda: dist.distribution("HalfNormal", 1.0))
    concentration: float = 1.0

    def __post_init__(self) -> None:
        check_number("CovarianceFactor", self.concentration)
        if self.scale is not None:
            check_hyper_prior("CovarianceFactor", self.scale)

    def __call__(self, name: str, size: int) -> Any:
        if self.scale is None:
            if size < 2:
                raise ModelError(
                    "priors.CovarianceFactor: "
                    + message("a scale for a single number", "scale=None", "scale=dist.HalfNormal(1.0)")
                )
            return deterministic(name, self._correlation(name, size))
        scale = draw(f"{name}.scale", self.scale.expand((size,)).to_event())
        return deterministic(name, scale[:, None] * (self._correlation(name, size) if size > 1 else 1.0))

    def _correlation(self, name: str, size: int) -> Any:
        return sample(f"{name}.correlation", dist.distribution("LKJCholesky", size, self.concentration))


@dataclass(frozen=True)
class CutPoints:
    """Increasing cut points (C - 1,) of C ordered classes, for `likelihoods.Ordinal`.

        c_k = logit(p_0 + ... + p_k),   p ~ Dirichlet(concentration, ..., concentration):

    where f = 0 the classes have the probabilities p, all C of them treated alike (Betancourt 2019). Called as
    `prior(name, classes)`. The latent site is `name.probabilities`, `name` is a deterministic site.
    """

    concentration: float = 1.0

    def __post_init__(self) -> None:
        check_number("CutPoints", self.concentration)

    def __call__(self, name: str, classes: int) -> Any:
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
            raise InputError(
                "priors.CutPoints: " + message("at least 2 classes", repr(classes), "the number of labels")
            )
        concentration = (float(self.concentration),) * classes
        p = sample(f"{name}.probabilities", dist.distribution("Dirichlet", concentration))
        below, above = ops.cumsum(p)[:-1], ops.flip(ops.cumsum(ops.flip(p)))[1:]
        return deterministic(name, ops.log(below) - ops.log(above))


@dataclass(frozen=True)
class Point:
    """No prior: a point estimate, started from N(0, sigma^2 / fan_in) by methods that have an optimiser.

    A partially Bayesian network is a matter of priors: give `Point()` to the layers that shall not be
    Bayesian. Methods without an optimiser take the values from `start=` or refuse.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        check_scale("Point", self.sigma)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        return param(
            name, dist.distribution("Normal", 0.0, self.sigma / math.sqrt(fan_in)).expand(shape).to_event()
        )


@dataclass(frozen=True)
class EmpiricalBayes:
    """w ~ N(0, s^2) with s at its optimum under the approximation q, found as the fit goes on (type-II likelihood).

    E_q[-log N(w; 0, s^2)] is smallest at s^2 = mean of E_q[w_k^2] over the group that shares s, which is the mean of
    mu_k^2 + sigma_k^2 for a factorised normal q. The complexity cost is then in closed form,

        KL(q || p) = 1/2 sum_k log(s^2 / sigma_k^2),   and 1/2 sum_k log(1 + mu_k^2 / sigma_k^2) with s for each weight,

    where weights with mu_k = 0 cost nothing. The scales are not paid for: the bound is one on log p(y | s), and with a
    scale for each weight there are as many free parameters in the prior as there are weights.

    per: which weights share s: "weight" (none), "unit" (those into one output unit or channel) or "tensor" (all).
    start: the standard deviation with which starts are drawn, a number or "fan_in" for 1 / sqrt(fan_in). It has no part
    in the posterior; a tool that does not know this prior sees N(0, start^2).

    Only methods that know it serve it, and all others refuse it by name. `transforms.with_prior_scales` is the model at
    the scales found. Sources: Basov, "Bayesian neural networks", for a scale per weight; Wu et al. (2019) per tensor.
    """

    per: str = "weight"
    start: Scale = "fan_in"

    def __post_init__(self) -> None:
        dist.check_group("priors.EmpiricalBayes", self.per, ("weight", "unit", "tensor"))
        check_scale("EmpiricalBayes", self.start)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = resolve_scale(self.start, 1.0, fan_in)
        return sample(name, dist.distribution("EmpiricalBayes", scale, self.per).expand(shape).to_event())


@dataclass(frozen=True)
class LogUniform:
    """p(w) proportional to 1 / |w|: log |w| is uniform on the whole line, so that no scale is preferred.

    With a factorised normal q = N(mu, alpha mu^2) it gives variational dropout: the cost depends on the noise-to-signal
    ratio alpha alone, falls as alpha grows, and weights with large alpha can be pruned (Kingma, Salimans and Welling
    2015; Molchanov, Ashukha and Vetrov 2017). The density has no integral, and no posterior need exist (Hron, Matthews
    and Ghahramani 2018): it defines an objective rather than a model.

    start: the standard deviation with which starts are drawn, a number or "fan_in" for 1 / sqrt(fan_in).

    Only methods that know it serve it, and all others refuse it by name.
    """

    start: Scale = "fan_in"

    def __post_init__(self) -> None:
        check_scale("LogUniform", self.start)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = resolve_scale(self.start, 1.0, fan_in)
        return sample(name, dist.distribution("ImproperLogUniform", scale).expand(shape).to_event())
