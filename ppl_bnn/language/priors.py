"""Priors over weight tensors.

A prior is called as `prior(name, shape, fan_in)` inside a model and returns the tensor. It is itself a small generative
program: it may sample scales of its own or take a point estimate.

Notes
-----
Scales. A number is the standard deviation (or the scale of the family) of each weight. `"fan_in"` means variance
sigma^2 / fan_in, which keeps the size of the pre-activations independent of the width. The bias of a layer counts as
one input of constant value 1, so its fan_in is 1.

Computed weights. `Hierarchical`, `Horseshoe`, `RegularisedHorseshoe` and the relaxed `SpikeAndSlab` multiply standard
variables by scales: the latent sites are `<name>.base` and those of the scales, and `<name>` is a deterministic site.
In these coordinates the prior has no funnel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.settings import between, check_value, optional, setting
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language import prior_parts as parts
from ppl_bnn.language.primitives import deterministic, param, sample
from ppl_bnn.language.prior_parts import Checked, Scale, among, check_scale, sampled
from ppl_bnn.language.prior_parts import CovarianceFactor as CovarianceFactor
from ppl_bnn.language.prior_parts import CutPoints as CutPoints
from ppl_bnn.language.prior_parts import SpectralNorm as SpectralNorm

__all__ = [
    "CorrelatedConvolution", "CovarianceFactor", "CutPoints", "EmpiricalBayes", "Hierarchical", "Horseshoe",
    "Laplace", "LogUniform", "MatrixNormal", "Normal", "Point", "RegularisedHorseshoe", "ScaleMixture",
    "SpectralNorm", "SpikeAndSlab", "StudentT",
]  # fmt: skip


@dataclass(frozen=True)
class Normal(parts.LocationScale):
    """Independent normal weights, w ~ N(loc, scale^2).

    Parameters
    ----------
    loc : float
        Mean.
    scale : float, "fan_in" or Distribution
        Standard deviation; "fan_in" is sigma / sqrt(fan_in). A distribution on the positive numbers, whose own scale
        may be a distribution too, gives one scale for the tensor, sampled at the site `name.scale`. The latent site of
        the weights is then `name.base`, e ~ N(0, 1), and w = loc + scale * e.
    sigma : float or Distribution
        Factor of the standard deviation with `scale="fan_in"`. A distribution is treated as for `scale`.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None, prior=bnn.priors.Normal(0.0, "fan_in")):
    ...     bnn.observe(y, bnn.dense("out", x, 2, prior, bias=False), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('out.weight', 'Normal(0, 0.5)', (4, 2))]
    """

    loc: float = 0.0
    scale: Scale = setting(1.0, sampled(check_scale))
    sigma: Scale = setting(1.0, sampled(check_scale))

    _family: ClassVar[str] = "Normal"


@dataclass(frozen=True)
class StudentT(parts.LocationScale):
    """Independent Student-t weights, w ~ t_df(loc, scale).

    The tails are heavy: a few weights may be large. `scale` is the scale of the family, not the standard deviation.
    With `scale="fan_in"` the scale is sigma / sqrt(fan_in).

    Parameters
    ----------
    df : float
        Degrees of freedom.
    loc : float
        Location.
    scale : float, "fan_in" or Distribution
        Scale; a distribution as for `Normal`.
    sigma : float or Distribution
        Factor of the scale with `scale="fan_in"`; a distribution as for `Normal`.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.priors.StudentT(df=4.0, scale="fan_in")
    StudentT(df=4.0, loc=0.0, scale='fan_in', sigma=1.0)
    """

    df: float = setting(3.0, check_scale)
    loc: float = 0.0
    scale: Scale = setting(1.0, sampled(check_scale))
    sigma: Scale = setting(1.0, sampled(check_scale))

    _family: ClassVar[str] = "StudentT"

    def _weights(self, shape: tuple[int, ...], loc: Any, scale: Any) -> dist.Distribution:
        return parts.independent(shape, self._family, self.df, loc, scale)


@dataclass(frozen=True)
class Laplace(parts.LocationScale):
    """Independent Laplace weights, w ~ Laplace(loc, scale).

    The density is exp(-|w - loc| / scale) / (2 scale) and the variance 2 scale^2. With `scale="fan_in"` the variance is
    sigma^2 / fan_in.

    Parameters
    ----------
    loc : float
        Location.
    scale : float, "fan_in" or Distribution
        Scale; a distribution as for `Normal`.
    sigma : float or Distribution
        Factor of the standard deviation with `scale="fan_in"`; a distribution as for `Normal`.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.priors.Laplace(scale="fan_in")
    Laplace(loc=0.0, scale='fan_in', sigma=1.0)
    """

    loc: float = 0.0
    scale: Scale = setting(1.0, sampled(check_scale))
    sigma: Scale = setting(1.0, sampled(check_scale))

    _family: ClassVar[str] = "Laplace"
    # The variance, sigma^2 / fan_in, is twice the square of the family's scale.
    _divisor: ClassVar[int] = 2


@dataclass(frozen=True)
class ScaleMixture:
    """Scale mixture of normals, w ~ sum_k weights_k N(0, scales_k^2), independently for each weight.

    Each weight has its own mixture: the joint density is the product over weights of the mixture densities.

    Parameters
    ----------
    weights : tuple of float
        Mixture weights, positive with sum 1.
    scales : tuple of float
        Standard deviations of the components, as many as `weights`.

    Raises
    ------
    InputError
        Different numbers of weights and scales, a scale that is not positive, or weights that are not positive with sum
        1.

    References
    ----------
    Blundell et al. (2015), Weight uncertainty in neural networks.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.priors.ScaleMixture((0.25, 0.75), (1.0, 0.01))
    ScaleMixture(weights=(0.25, 0.75), scales=(1.0, 0.01))
    """

    weights: tuple[float, ...] = (0.5, 0.5)
    scales: tuple[float, ...] = (1.5, 0.1)

    def __post_init__(self) -> None:
        where = "priors.ScaleMixture"
        InputError.check(self.scales, where, "at least one scale", "none", "scales=(1.5, 0.1)")
        for scale in self.scales:
            check_value(scale, check_scale, where, "scales=(1.5, 0.1)")
        dist.distribution("NormalMixture", self.weights, self.scales)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        weights, widths = tuple(self.weights), tuple(self.scales)
        return sample(name, parts.independent(shape, "NormalMixture", weights, widths))


@dataclass(frozen=True)
class SpikeAndSlab(Checked):
    """Spike and slab: each weight comes from the slab with `probability`, else from the spike at zero.

    Marginalised (the default), with a narrow normal as the spike (George and McCulloch 1993):

        w ~ probability N(0, slab^2) + (1 - probability) N(0, spike^2).

    Relaxed (`relaxed=True`), each weight is multiplied by a gate z between 0 and 1 from the concrete distribution
    (Maddison, Mnih and Teh 2017; Jang, Gu and Poole 2017), which is RelaxedBernoulli in both systems:

        w = slab * z * e,   e ~ N(0, 1),   logit(z) = (logit(probability) + noise) / temperature,

    with noise from the standard logistic distribution. The gates near 0 form the spike: no w is exactly zero. As
    `temperature` falls, gates go to 0 or 1, and w to a slab and an atom at zero. The latent sites are `name.logit`,
    logit(z) on the real line, and `name.base`, e; the gate `name.gate` and the weight `name` are deterministic sites.

    Parameters
    ----------
    probability : float
        Probability of the slab, between 0 and 1.
    slab : float
        Standard deviation of the slab.
    spike : float, optional
        Standard deviation of the spike, by default slab / 100. Only with `relaxed=False`. The narrower it is, the
        harder it is for any method to leave the mode of the density at zero.
    relaxed : bool
        Whether to use the relaxed form.
    temperature : float, optional
        Temperature of the gates, by default 0.5. Only with `relaxed=True`.
    scale : float or "fan_in"
        A number multiplies both standard deviations; "fan_in" divides both by sqrt(fan_in).

    Raises
    ------
    InputError
        A probability that is not between 0 and 1, `spike` with `relaxed=True` or `temperature` without it, a value that
        is not positive, or a spike that is not narrower than the slab.

    References
    ----------
    - George and McCulloch (1993), Variable selection via Gibbs sampling.
    - Maddison, Mnih and Teh (2017), The concrete distribution.
    - Jang, Gu and Poole (2017), Categorical reparameterization with Gumbel-softmax.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None, prior=bnn.priors.SpikeAndSlab(relaxed=True)):
    ...     bnn.observe(y, bnn.dense("out", x, 2, prior, bias=False), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('out.weight.logit', 'Logistic(0, 2)', (4, 2)), ('out.weight.base', 'Normal(0, 1)', (4, 2))]
    """

    probability: float = 0.5
    slab: float = setting(1.0, between())
    spike: float | None = setting(None, optional(between()), advice="0.01 * slab")
    relaxed: bool = False
    temperature: float | None = setting(None, optional(between()), advice="0.5")
    scale: Scale = setting(1.0, check_scale)

    def __post_init__(self) -> None:
        super().__post_init__()
        check, where, relaxed = InputError.check, "priors.SpikeAndSlab", self.relaxed
        good, got = 0.0 < self.probability < 1.0, repr(self.probability)
        check(good, where, "a probability between 0 and 1", got, "probability=0.5")
        unused = "spike" if relaxed else "temperature"
        got, advice = f"{unused}={getattr(self, unused)!r}", f"relaxed={not relaxed}, or leaving {unused} out"
        check(getattr(self, unused) is None, where, f"no {unused} with relaxed={relaxed}", got, advice)
        good = self.spike is None or self.spike < self.slab
        got = f"spike={self.spike!r} and slab={self.slab!r}"
        check(good, where, "a spike narrower than the slab", got, "spike=0.01 * slab")

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = parts.resolve_scale(name, self.scale, 1.0, fan_in)
        if not self.relaxed:
            spike = 0.01 * self.slab if self.spike is None else self.spike
            weights = (self.probability, 1.0 - self.probability)
            widths = (scale * self.slab, scale * spike)
            return sample(name, parts.independent(shape, "NormalMixture", weights, widths))
        temperature = 0.5 if self.temperature is None else self.temperature
        loc = (math.log(self.probability) - math.log1p(-self.probability)) / temperature
        logit = sample(f"{name}.logit", parts.independent(shape, "Logistic", loc, 1.0 / temperature))
        gate = deterministic(f"{name}.gate", ops.sigmoid(logit))
        return deterministic(name, scale * self.slab * gate * parts.base_variables(name, shape))


@dataclass(frozen=True)
class Hierarchical(Checked):
    """Normal weights with sampled scales, w ~ N(0, (factor * s)^2).

    Non-centred by default: the latent sites are `name.scale` and `name.base`, e ~ N(0, 1), and w = factor * s * e is
    the deterministic site `name`. The density is bounded at s = 0, and there is no funnel where the data say little
    about w (Papaspiliopoulos, Roberts and Skold 2007).

    Parameters
    ----------
    scale : Distribution
        Prior of s, a distribution on the positive numbers, for example `dist.HalfNormal(1.0)`. Its arguments may be
        distributions too, to any depth, with one number each for the tensor: `dist.HalfNormal(dist.HalfCauchy(1.0))`
        adds the site `name.scale.scale`. To share a scale among several tensors, sample it in the model and pass it to
        the prior of each, as in `priors.Normal(0.0, bnn.sample("scale", dist.HalfNormal(1.0)))`.
    per : {"tensor", "unit", "input", "weight"}
        Which weights share s: "tensor", all; "unit", those into one output unit or channel; "input", those out of one
        input unit (automatic relevance determination, MacKay 1994, Neal 1996; the bias of a layer is one group);
        "weight", none: s is then a mixing variable, and w has heavy tails.
    factor : float or "fan_in"
        A number, or "fan_in" for 1 / sqrt(fan_in).
    centred : bool
        Whether w is a latent site itself, which samples better where the data say much about w. The joint density
        then has no mode, so MAP and Laplace do not apply.

    References
    ----------
    - MacKay (1994), automatic relevance determination.
    - Neal (1996), Bayesian learning for neural networks.
    - Papaspiliopoulos, Roberts and Skold (2007), A general framework for the parametrization of hierarchical models.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None, prior=bnn.priors.Hierarchical(per="unit")):
    ...     bnn.observe(y, bnn.dense("out", x, 2, prior, bias=False), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('out.weight.scale', 'HalfNormal(1)', (2,)), ('out.weight.base', 'Normal(0, 1)', (4, 2))]
    """

    scale: dist.Distribution = setting(parts.HALF_NORMAL, parts.hyper_prior)
    per: str = setting("tensor", among("per of priors.Hierarchical", dist.GROUPS))
    factor: Scale = setting(1.0, check_scale)
    centred: bool = False

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        factor = parts.resolve_scale(name, self.factor, 1.0, fan_in)
        group = dist.group_shape(self.per, shape)
        scale = factor * parts.draw(f"{name}.scale", self.scale.expand(group).to_event())
        if self.centred:
            return sample(name, parts.independent(shape, "Normal", 0.0, scale))
        return deterministic(name, scale * parts.base_variables(name, shape))


# Not "tensor": a single local scale for all weights would repeat the global one.
_LOCAL = ("weight", "unit", "input")


@dataclass(frozen=True)
class Horseshoe(Checked):
    """Horseshoe prior, w = tau * lambda * e with e ~ N(0, 1).

    It shrinks nearly all weights to zero and leaves a few almost unchanged:

        tau ~ HalfCauchy(scale), one for the tensor;   lambda ~ HalfCauchy(1), one for each group.

    Given tau = 1, the shrinkage of a weight, 1 / (1 + lambda^2), is Beta(1/2, 1/2): nearly complete or nearly none. The
    variance of a weight does not exist. The form is non-centred: the latent sites are `name.global`, `name.local` and
    `name.base`, and `name` is a deterministic site.

    Parameters
    ----------
    scale : float or "fan_in"
        Scale of tau: a number, or "fan_in" for sigma / sqrt(fan_in). It controls how many weights differ from zero
        (Piironen and Vehtari 2017).
    per : {"weight", "unit", "input"}
        Which weights share lambda: "weight", none; "unit", those into one output unit or channel, so that whole units
        are switched off (Ghosh, Yao and Doshi-Velez 2018); "input", those out of one input unit.
    sigma : float
        Factor of the scale with `scale="fan_in"`.

    References
    ----------
    - Carvalho et al. (2010), The horseshoe estimator for sparse signals.
    - Piironen and Vehtari (2017), Sparsity information and regularization in the horseshoe and other shrinkage priors.
    - Ghosh, Yao and Doshi-Velez (2018), Structured variational learning of Bayesian neural networks with horseshoe
      priors.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None, prior=bnn.priors.Horseshoe(0.1)):
    ...     bnn.observe(y, bnn.dense("out", x, 2, prior, bias=False), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('out.weight.global', 'HalfCauchy(0.1)', ()), ('out.weight.local', 'HalfCauchy(1)', (4, 2)),
     ('out.weight.base', 'Normal(0, 1)', (4, 2))]
    """

    scale: Scale = setting(1.0, check_scale)
    per: str = setting("weight", among("per of priors.Horseshoe", _LOCAL))
    sigma: float = setting(1.0, check_scale)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        tau, local = parts.shrinkage(self, name, shape, fan_in)
        return deterministic(name, tau * local * parts.base_variables(name, shape))


@dataclass(frozen=True)
class RegularisedHorseshoe(Checked):
    """Horseshoe prior whose large weights are bounded by a slab of finite width (Piironen and Vehtari 2017).

        w = tau * lambda_ * e,   lambda_^2 = c^2 lambda^2 / (c^2 + tau^2 lambda^2),   e ~ N(0, 1),
        c^2 ~ InverseGamma(slab_df / 2, slab_df slab_scale^2 / 2), one for the tensor;

    tau and lambda as for `Horseshoe`. Where tau lambda is much below c it is the horseshoe. Where it is much above, w
    is nearly N(0, c^2), and after integration over c a Student-t with slab_df degrees of freedom and scale slab_scale.

    The form is non-centred: the latent sites are `name.global`, `name.local`, `name.slab` (c^2) and `name.base`, and
    `name` is a deterministic site.

    Parameters
    ----------
    scale : float or "fan_in"
        As for `Horseshoe`. With p weights of which about q matter, and noise of standard deviation s in N rows,
        Piironen and Vehtari propose scale = q / (p - q) * s / sqrt(N).
    slab_scale : float or "fan_in"
        Scale of the slab: a number, or "fan_in" for 1 / sqrt(fan_in).
    slab_df : float
        Degrees of freedom of the slab.
    per : {"weight", "unit", "input"}
        As for `Horseshoe`.
    sigma : float
        As for `Horseshoe`.

    References
    ----------
    Piironen and Vehtari (2017), Sparsity information and regularization in the horseshoe and other shrinkage priors.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None, prior=bnn.priors.RegularisedHorseshoe(0.1)):
    ...     bnn.observe(y, bnn.dense("out", x, 2, prior, bias=False), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('out.weight.global', 'HalfCauchy(0.1)', ()), ('out.weight.local', 'HalfCauchy(1)', (4, 2)),
     ('out.weight.slab', 'InverseGamma(2, 8)', ()), ('out.weight.base', 'Normal(0, 1)', (4, 2))]
    """

    scale: Scale = setting(1.0, check_scale)
    slab_scale: Scale = setting(2.0, check_scale)
    slab_df: float = setting(4.0, between())
    per: str = setting("weight", among("per of priors.RegularisedHorseshoe", _LOCAL))
    sigma: float = setting(1.0, check_scale)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        tau, local = parts.shrinkage(self, name, shape, fan_in)
        width = parts.resolve_scale(name, self.slab_scale, 1.0, fan_in)
        half = 0.5 * self.slab_df
        slab = sample(f"{name}.slab", dist.distribution("InverseGamma", half, half * width**2))
        # tau lambda_ = r / sqrt(1 + r^2 / c^2) with r = tau lambda, by logarithms, because r has very heavy tails.
        log_r = ops.log(tau) + ops.log(local)
        scale = ops.exp(log_r - 0.5 * ops.softplus(2.0 * log_r - ops.log(slab)))
        return deterministic(name, scale * parts.base_variables(name, shape))


@dataclass(frozen=True)
class MatrixNormal(Checked):
    """Matrix normal weights, vec(W) ~ N(0, scale^2 rows (x) columns).

    The covariance is Cov(w_io, w_jp) = scale^2 rows_ij columns_op (Dawid 1981). A kernel (kh, kw, C, O) is treated as
    the matrix (kh kw C, O), and a bias (O,) uses `columns` alone.

    If the matrices and the scale are known, the latent site is `name` itself. Otherwise it is `name.base`, which is
    multiplied by the scale and by the unknown factors A = `name.rows` and B = `name.columns`: W = scale A E B', E
    standard normal.

    Parameters
    ----------
    rows : ndarray, callable, CovarianceFactor or None
        Covariance (I, I) between the weights out of different inputs (those of one output unit): a symmetric, positive
        definite matrix; a function of the size that returns one, for layers of any width; a `CovarianceFactor`, with
        which it is unknown; or None, the identity.
    columns : ndarray, callable, CovarianceFactor or None
        Covariance (O, O) between the weights into different output units, given as for `rows`.
    scale : float, "fan_in" or Distribution
        As for `Normal`.
    sigma : float or Distribution
        As for `Normal`.

    Raises
    ------
    InputError
        `rows` or `columns` is not a square matrix, a function, a `CovarianceFactor` or None; or, when the model runs,
        it is not symmetric and positive definite.
    ModelError
        When the model runs: a covariance that does not have the size of the weights.

    Notes
    -----
    A scale, and one in each unknown covariance, are not identified separately: keep all but one fixed
    (`CovarianceFactor(scale=None)`).

    References
    ----------
    Dawid (1981), Some matrix-variate distribution theory.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None, prior=bnn.priors.MatrixNormal(columns=bnn.priors.CovarianceFactor())):
    ...     bnn.observe(y, bnn.dense("out", x, 2, prior, bias=False), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('out.weight.base', 'Normal(0, 1)', (4, 2)), ('out.weight.columns.scale', 'HalfNormal(1)', (2,)),
     ('out.weight.columns.correlation', 'LKJCholesky(2, 1)', (2, 2))]
    """

    rows: Any = setting(None, parts.covariance)
    columns: Any = setting(None, parts.covariance)
    scale: Scale = setting(1.0, sampled(check_scale))
    sigma: Scale = setting(1.0, sampled(check_scale))

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        inputs, outputs = math.prod(shape[:-1]), shape[-1]
        sides = {"rows": (self.rows if len(shape) > 1 else None, inputs), "columns": (self.columns, outputs)}
        scale = parts.resolve_scale(name, self.scale, self.sigma, fan_in)
        known = {
            side: parts.covariance_eigen("MatrixNormal", given, size)
            for side, (given, size) in sides.items()
            if not isinstance(given, CovarianceFactor)
        }
        if len(known) == 2:
            return parts.kronecker_normal(name, shape, scale, known["rows"], known["columns"])
        base = parts.base_variables(name, (inputs, outputs))

        def factor(side: str) -> Any:
            given, size = sides[side]
            if side not in known:
                return given(f"{name}.{side}", size)
            vectors, values = known[side]
            return ops.asarray(vectors * np.sqrt(values), like=base)

        w = ops.einsum("ij,jk,lk->il", factor("rows"), base, factor("columns"))
        return deterministic(name, scale * w.reshape(shape))


_KERNELS = ("exponential", "squared_exponential")


@dataclass(frozen=True)
class CorrelatedConvolution(Checked):
    """Convolution kernels whose weights are correlated between neighbouring positions.

        Cov(w_aco, w_bco) = scale^2 exp(-(|a - b| / length_scale)^p),

    where a and b are positions in the kernel, at distance |a - b| in pixels, and c and o its channels; other pairs of
    channels are independent. Trained networks have such kernels (Fortuin et al. 2022). As `length_scale` goes to zero
    the prior becomes `Normal`.

    It is for kernels (kh, kw, C, O), or (k, C, O) in one dimension; weights without positions, (I, O) and (O,), are
    independent. The latent site is `name`, or `name.base` where the scale is sampled.

    Parameters
    ----------
    length_scale : float or Distribution
        Length scale in pixels. A distribution on the positive numbers is sampled at `name.length_scale`; `name.base`
        then holds standard normal variables.
    kernel : {"exponential", "squared_exponential"}
        p = 1, as in Fortuin et al., or p = 2, which is smoother.
    scale : float, "fan_in" or Distribution
        As for `Normal`.
    sigma : float or Distribution
        As for `Normal`.

    References
    ----------
    Fortuin et al. (2022), Bayesian neural network priors revisited.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> layer = lambda x: bnn.conv2d("conv", x, 8, 3, prior=bnn.priors.CorrelatedConvolution(2.0))
    >>> model = lambda x, y=None: bnn.observe(y, layer(x).mean((1, 2)), bnn.likelihoods.Categorical())
    >>> [(site.name, site.prior, site.shape) for site in bnn.zoo.sketch(model, [[[[0.5]] * 5] * 5]).sites]
    [('conv.weight', 'KroneckerNormal(..., ..., ..., ...)', (3, 3, 1, 8)), ('conv.bias', 'Normal(0, 1)', (8,))]
    """

    length_scale: Any = setting(1.0, sampled(between()))
    kernel: str = setting("exponential", among("kernel of priors.CorrelatedConvolution", _KERNELS))
    scale: Scale = setting(1.0, sampled(check_scale))
    sigma: Scale = setting(1.0, sampled(check_scale))

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        if len(shape) < 3:
            return Normal(0.0, self.scale, self.sigma)(name, shape, fan_in)
        scale = parts.resolve_scale(name, self.scale, self.sigma, fan_in)
        axes = np.meshgrid(*map(np.arange, shape[:-2]), indexing="ij")
        places = np.stack(axes, -1).reshape(-1, len(axes))
        distances = np.sqrt(np.sum((places[:, None] - places[None]) ** 2, axis=-1))
        power = 1 if self.kernel == "exponential" else 2
        if isinstance(self.length_scale, dist.Distribution):
            base = parts.base_variables(name, shape)
            length = parts.draw(f"{name}.length_scale", self.length_scale)
            correlation = ops.exp(-((ops.asarray(distances, like=base) / length) ** power))
            factor = ops.namespace(base).linalg.cholesky(correlation)
            flat = ops.matmul(factor, base.reshape(len(places), -1))
            return deterministic(name, scale * flat.reshape(shape))
        correlation = np.exp(-((distances / self.length_scale) ** power))
        vectors, values = parts.covariance_eigen("CorrelatedConvolution", correlation, len(places))
        channels = np.eye(shape[-2])
        left = np.kron(vectors, channels), np.repeat(values, shape[-2])
        return parts.kronecker_normal(name, shape, scale, left, (np.eye(shape[-1]), np.ones(shape[-1])))


@dataclass(frozen=True)
class Point(Checked):
    """Point estimate without a prior, for layers that should not be Bayesian.

    Methods that have an optimiser start it from N(0, sigma^2 / fan_in). Methods without an optimiser take the values
    from `start=` or refuse the model.

    Parameters
    ----------
    sigma : float
        Factor of the standard deviation of the starts, sigma / sqrt(fan_in).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.priors.Point()
    Point(sigma=1.0)
    """

    sigma: float = setting(1.0, check_scale)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        return param(name, parts.independent(shape, "Normal", 0.0, self.sigma / math.sqrt(fan_in)))


@dataclass(frozen=True)
class EmpiricalBayes(Checked):
    """Normal weights, w ~ N(0, s^2), with s optimised during the fit (type-II likelihood).

    E_q[-log N(w; 0, s^2)] is smallest at s^2 = mean of E_q[w_k^2] over the group that shares s, which is the mean of
    mu_k^2 + sigma_k^2 for a factorised normal approximation q. The complexity cost then has a closed form,

        KL(q || p) = 1/2 sum_k log(s^2 / sigma_k^2),   and 1/2 sum_k log(1 + mu_k^2 / sigma_k^2) with s for each weight,

    where weights with mu_k = 0 cost nothing.

    Parameters
    ----------
    per : {"weight", "unit", "tensor"}
        Which weights share s: "weight", none; "unit", those into one output unit or channel; "tensor", all.
    start : float or "fan_in"
        Standard deviation from which starts are drawn, "fan_in" for 1 / sqrt(fan_in). It has no part in the posterior;
        a tool that does not know this prior uses N(0, start^2).

    Notes
    -----
    The scales have no prior of their own: the bound is one on log p(y | s), and with a scale for each weight the prior
    has as many free parameters as there are weights.

    Only methods that support this prior accept it; all others refuse it by name. `transforms.with_prior_scales` returns
    the model at the scales found.

    References
    ----------
    - Basov, Bayesian neural networks (a scale per weight).
    - Wu et al. (2019) (a scale per tensor).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.priors.EmpiricalBayes(per="tensor")
    EmpiricalBayes(per='tensor', start='fan_in')
    """

    per: str = setting("weight", among("per of priors.EmpiricalBayes", ("weight", "unit", "tensor")))
    start: Scale = setting("fan_in", check_scale)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = parts.resolve_scale(name, self.start, 1.0, fan_in)
        return sample(name, parts.independent(shape, "EmpiricalBayes", scale, self.per))


@dataclass(frozen=True)
class LogUniform(Checked):
    """Log-uniform weights, p(w) proportional to 1 / |w|.

    log |w| is uniform on the whole line, so no scale is preferred. With a factorised normal q = N(mu, alpha mu^2) it
    gives variational dropout: the cost depends on the noise-to-signal ratio alpha alone and falls as alpha grows, and
    weights with large alpha can be pruned (Kingma, Salimans and Welling 2015; Molchanov, Ashukha and Vetrov 2017).

    Parameters
    ----------
    start : float or "fan_in"
        Standard deviation from which starts are drawn, "fan_in" for 1 / sqrt(fan_in).

    Notes
    -----
    The density is improper, and a posterior need not exist (Hron, Matthews and Ghahramani 2018): it defines an
    objective rather than a model. Only methods that support this prior accept it; all others refuse it by name.

    References
    ----------
    - Kingma, Salimans and Welling (2015), Variational dropout and the local reparameterization trick.
    - Molchanov, Ashukha and Vetrov (2017), Variational dropout sparsifies deep neural networks.
    - Hron, Matthews and Ghahramani (2018), Variational Bayesian dropout: pitfalls and fixes.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.priors.LogUniform()
    LogUniform(start='fan_in')
    """

    start: Scale = setting("fan_in", check_scale)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = parts.resolve_scale(name, self.start, 1.0, fan_in)
        return sample(name, parts.independent(shape, "ImproperLogUniform", scale))
