"""Priors over weight tensors.

A prior is called as `prior(name, shape, fan_in)` inside a model and returns the tensor. It is itself a
small generative program: on the way it may sample scales of its own or take a point estimate.

Scales. A number is the standard deviation (or the scale of the family) of each weight. `"fan_in"` means
variance sigma^2 / fan_in, so that pre-activations keep their size whatever the width; the bias of a layer
counts as one input of constant value 1, so its fan_in is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ppl_bnn.errors import InputError, message
from ppl_bnn.language import distributions as dist
from ppl_bnn.language.primitives import param, sample

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

        KL(q || p) = 1/2 sum_k log(s^2 / sigma_k^2),   with a scale for each weight 1/2 sum_k log(1 + mu_k^2 / sigma_k^2),

    and there weights with mu_k = 0 cost nothing. The scales are not paid for: the bound is one on log p(y | s), and
    with a scale for each weight there are as many free parameters in the prior as there are weights.

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
