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
from typing import Any, Protocol

import numpy as np

from ppl_bnn.errors import InputError, message
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.primitives import deterministic, param, sample

Scale = Any


class Prior(Protocol):
    """Anything that makes a weight tensor of `shape` under `name`."""

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any: ...


def _check_scale(prior: str, scale: Scale) -> None:
    if isinstance(scale, str):
        if scale != "fan_in":
            raise InputError(
                f"priors.{prior}: " + message("a scale that is a number or 'fan_in'", repr(scale), "'fan_in'")
            )
    elif isinstance(scale, int | float | np.floating | np.integer) and not (
        scale > 0 and math.isfinite(scale)
    ):
        raise InputError(
            f"priors.{prior}: " + message("a positive scale", repr(scale), "scale=1.0 or scale='fan_in'")
        )


def _check_number(prior: str, value: Any) -> None:
    """Refuse what is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"priors.{prior}: " + message("a positive number", repr(value), "1.0"))


def _check_scales(prior: str, scale: Scale, sigma: float) -> None:
    _check_scale(prior, scale)
    _check_scale(prior, sigma)
    if not isinstance(scale, str) and sigma != 1.0:
        raise InputError(
            f"priors.{prior}: "
            + message("sigma with scale='fan_in' only", f"scale={scale!r} and sigma={sigma!r}", "one of them")
        )


def _resolve_scale(scale: Scale, sigma: float, fan_in: int) -> Any:
    return sigma / math.sqrt(fan_in) if isinstance(scale, str) else scale


@dataclass(frozen=True)
class Normal:
    """w ~ N(loc, scale^2), independently; with scale="fan_in", variance sigma^2 / fan_in."""

    loc: float = 0.0
    scale: Scale = 1.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _check_scales("Normal", self.scale, self.sigma)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = _resolve_scale(self.scale, self.sigma, fan_in)
        return sample(name, dist.distribution("Normal", self.loc, scale).expand(shape).to_event())


@dataclass(frozen=True)
class StudentT:
    """w ~ t_df(loc, scale): heavy tails, a few large weights. `scale` is the family's, not the standard deviation.

    With scale="fan_in" the scale is sigma / sqrt(fan_in).
    """

    df: float = 3.0
    loc: float = 0.0
    scale: Scale = 1.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("StudentT", self.df)
        _check_scales("StudentT", self.scale, self.sigma)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = _resolve_scale(self.scale, self.sigma, fan_in)
        return sample(name, dist.distribution("StudentT", self.df, self.loc, scale).expand(shape).to_event())


@dataclass(frozen=True)
class Laplace:
    """w ~ Laplace(loc, scale), density exp(-|w - loc| / scale) / (2 scale); variance 2 scale^2.

    With scale="fan_in" the variance is sigma^2 / fan_in.
    """

    loc: float = 0.0
    scale: Scale = 1.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _check_scales("Laplace", self.scale, self.sigma)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
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
            _check_scale("ScaleMixture", scale)
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

    Relaxed (relaxed=True), with the spike at zero exactly and a gate z between 0 and 1 in front of each weight, from
    the concrete distribution (Maddison, Mnih and Teh 2017; Jang, Gu and Poole 2017), RelaxedBernoulli in both systems:

        w = slab * z * e,   e ~ N(0, 1),   logit(z) = (logit(probability) + noise) / temperature,

    with noise from the standard logistic distribution. As `temperature` falls (0.5 unless given), gates go to 0 or 1,
    and w to a spike and slab. The latent sites are `name.logit`, logit(z) on the real line, and `name.base`, e; the
    gate `name.gate` and the weight `name` are deterministic sites.

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
                _check_number("SpikeAndSlab", number)
        _check_scale("SpikeAndSlab", self.scale)
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
        scale = _resolve_scale(self.scale, 1.0, fan_in)
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

    scale: the prior of s, a distribution on the positive numbers, for example dist.HalfNormal(1.0). per: which weights
    share s: "tensor" (all), "unit" (those into one output unit or channel), "input" (those out of one input unit:
    automatic relevance determination, MacKay 1994, Neal 1996; the bias of a layer is one group) or "weight" (none;
    then s is a mixing variable, and w has heavy tails). factor: a number or "fan_in", 1 / sqrt(fan_in).

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
        _check_scale("Hierarchical", self.factor)
        given = self.scale
        if not isinstance(given, dist.Distribution):
            came = type(given).__name__
        elif given.family not in dist.ON_POSITIVES or given.family in dist.EVENTS:
            came = given.family
        elif dist.draw_shape(given) != () or given.event_dims:
            came = f"{given.family} with a shape"
        else:
            return
        raise InputError(
            "priors.Hierarchical: "
            + message("a distribution of one positive number as scale", came, "scale=dist.HalfNormal(1.0)")
        )

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        factor = _resolve_scale(self.factor, 1.0, fan_in)
        group = dist.group_shape(self.per, shape)
        scale = factor * sample(f"{name}.scale", self.scale.expand(group).to_event())
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
        _check_scales("Horseshoe", self.scale, self.sigma)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        tau, local = _shrinkage(name, shape, _resolve_scale(self.scale, self.sigma, fan_in), self.per)
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
        _check_scales("RegularisedHorseshoe", self.scale, self.sigma)
        _check_scale("RegularisedHorseshoe", self.slab_scale)
        _check_number("RegularisedHorseshoe", self.slab_df)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        tau, local = _shrinkage(name, shape, _resolve_scale(self.scale, self.sigma, fan_in), self.per)
        width = _resolve_scale(self.slab_scale, 1.0, fan_in)
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


@dataclass(frozen=True)
class Point:
    """No prior: a point estimate, started from N(0, sigma^2 / fan_in) by methods that have an optimiser.

    A partially Bayesian network is a matter of priors: give `Point()` to the layers that shall not be
    Bayesian. Methods without an optimiser take the values from `start=` or refuse.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("Point", self.sigma)

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
        _check_scale("EmpiricalBayes", self.start)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = _resolve_scale(self.start, 1.0, fan_in)
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
        _check_scale("LogUniform", self.start)

    def __call__(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        scale = _resolve_scale(self.start, 1.0, fan_in)
        return sample(name, dist.distribution("ImproperLogUniform", scale).expand(shape).to_event())
