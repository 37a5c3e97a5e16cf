"""The divergence of a guide from the prior, in closed form term by term.

KL(q || p) = E_q[-log p(w(u)) - log |dw/du|] - H(q) is a sum of one cross entropy per random variable and one entropy
per block of the guide. A term without a closed form has its value at the draw, with the same expectation. Log p and
log q at a draw rise and fall together: if the entropy has no closed form (mixtures, flows), closed cross entropies may
increase the variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import TracedSite
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.flat_vector import first_rows, somewhere, system_values
from ppl_bnn.inference.variational.families.base import LOG_2PI, Family, Parameters
from ppl_bnn.inference.variational.families.blocks import Delta, Gaussian, Normal
from ppl_bnn.inference.variational.guides import Guide
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import SPECIAL, group_shape

Array = Any


# Cross entropies E_q[-log p(u_j)] are sums over the coordinates of one site, in nats.


def normal_cross_entropy(mean: Array, variance: Array, loc: Any, scale: Any) -> Array:
    """Sum of E[-log N(u; loc, scale^2)], for u of any distribution with these marginal means and variances."""
    distance = (mean - loc) ** 2 + variance
    return ops.sum(distance / (2.0 * scale**2) + ops.log(scale)) + 0.5 * LOG_2PI * math.prod(mean.shape)


def laplace_cross_entropy(mean: Array, variance: Array, loc: Any, scale: Any) -> Array:
    """Sum of E[-log Laplace(u; loc, scale)] = log(2 scale) + E|u - loc| / scale for a normal u.

    With d = mean - loc, sigma^2 = variance and z = d / sigma, E|u - loc| = 2 sigma (phi(z) + z Phi(z)) - d (Leone,
    Nelson and Nottingham 1961).
    """
    sigma = ops.sqrt(variance)
    z = (mean - loc) / sigma
    # gelu(z) is z Phi(z).
    density = ops.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    distance = 2.0 * sigma * (density + ops.gelu(z)) - (mean - loc)
    return ops.sum(distance / scale + ops.log(scale)) + math.log(2.0) * math.prod(mean.shape)


def _second_moments(mean: Array, variance: Array, per: str) -> Array:
    """Mean of E[w^2] over each group that shares a scale: flat, one entry per group."""
    second = mean * mean + variance
    if per == "unit":
        return ops.mean(second.reshape((-1, mean.shape[-1])), 0)
    return second.reshape(-1) if per == "weight" else ops.mean(second.reshape((1, -1)), 1)


def empirical_scale(mean: Array, variance: Array, per: str) -> Array:
    """The scale of a normal prior that minimises its cross entropy: (mean of E[w^2] over the group)^(1/2).

    A group of w (..., I, O) is a "weight", "unit" or "tensor" (`per`), with scales of shape (..., I, O), (O,) or ().
    """
    scale = ops.sqrt(_second_moments(mean, variance, per))
    return scale.reshape(group_shape(per, tuple(mean.shape)))


def empirical_cross_entropy(mean: Array, variance: Array, per: str) -> Array:
    """Sum of E[-log N(w; 0, s^2)] = (1 + log(2 pi) + log s^2) / 2 of w (..., I, O), at s of `empirical_scale`."""
    # Derivatives are those at a fixed s, because s is at its optimum.
    moments, size = _second_moments(mean, variance, per), math.prod(mean.shape)
    shared = size / int(moments.shape[0])
    return 0.5 * shared * ops.sum(ops.log(moments)) + 0.5 * size * (1.0 + LOG_2PI)


# Molchanov, Ashukha and Vetrov (2017), equation 14.
_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695


def log_uniform_divergence(mean: Array, variance: Array) -> Array:
    """KL of independent normals from a log-uniform prior p(w) proportional to 1 / |w|, summed over weights.

    The approximation of Molchanov et al. (2017), equation 14, with an error of -0.0044 to 0.0094 per weight:

        KL = k1 (1 - sigmoid(k2 + k3 log alpha)) + 1/2 log(1 + 1 / alpha),   alpha = sigma^2 / mu^2.

    p is improper, and the constant is such that KL goes to 0 as alpha grows.
    """
    ratio = mean * mean / variance
    # 1e-30 keeps the derivative of the logarithm finite at mean 0, far below any ratio that matters.
    step = _K1 * ops.sigmoid(_K3 * ops.log(ratio + 1e-30) - _K2)
    return ops.sum(step + 0.5 * ops.log1p(ratio))


def _log_uniform_cross_entropy(mean: Array, variance: Array) -> Array:
    """The divergence plus the entropy of independent normals."""
    entropy = 0.5 * ops.sum(ops.log(variance)) + 0.5 * math.prod(mean.shape) * (1.0 + LOG_2PI)
    return log_uniform_divergence(mean, variance) + entropy


# Family of the prior -> (mean, variance, distribution) -> cross entropy of a site. A LogNormal is a Normal on u.
_FORMS: dict[str, Callable[[Array, Array, Any], Array]] = {
    "Normal": lambda mean, variance, base: normal_cross_entropy(mean, variance, base.loc, base.scale),
    "LogNormal": lambda mean, variance, base: normal_cross_entropy(mean, variance, base.loc, base.scale),
    "Laplace": lambda mean, variance, base: laplace_cross_entropy(mean, variance, base.loc, base.scale),
    "EmpiricalBayes": lambda mean, variance, base: empirical_cross_entropy(mean, variance, base.per),
    "ImproperLogUniform": lambda mean, variance, _: _log_uniform_cross_entropy(mean, variance),
}


@dataclass(frozen=True)
class Divergence:
    """KL(q || prior) of a guide, with a plan of which terms are in closed form. Create one with `Divergence.of`.

    crosses: the family of the prior of each site with a closed cross entropy; that of other sites is the value at the
    draw. entropies: for each block, whether its entropy is closed. groups: site to "weight", "unit" or "tensor", for
    `priors.EmpiricalBayes`. Closed cross entropies: Normal and LogNormal priors with any block of known means and
    variances; Laplace priors with normal coordinates; `priors.EmpiricalBayes` and `priors.LogUniform` always, with
    independent normals. The location and scale of a prior may depend on draws of other variables if the site is
    independent of them under q; otherwise the value at the draw is used.
    """

    guide: Guide
    crosses: Mapping[str, str]
    entropies: tuple[bool, ...]
    groups: Mapping[str, str]

    @classmethod
    def of(cls, problem: Problem, guide: Guide, analytic: bool = True) -> Divergence:
        """Choose the form of each term from runs of a program at a few rows, within `System.session`, uncompiled.

        Without `analytic` all but the two special priors have the value at the draw. NaN in sites of a block shows
        whether a prior depends on them; operations that absorb NaN, such as a comparison, hide this.
        """
        program, u = problem.program, system_values(problem, somewhere(problem))

        def priors(u: Mapping[str, Array]) -> dict[str, Any]:
            return {
                site.name: _elementary(site.distribution) for site in program.run(u, *first_rows(problem))
            }

        found = priors(u)
        crosses: dict[str, str] = {}
        for name in guide.names:
            family, block = type(found[name]).__name__, guide.block_of[name]
            if family in SPECIAL and not isinstance(block, Normal):
                wanted = f"independent normals over site {name!r}, with which this prior has a meaning"
                advice = f"guide={{{name!r}: 'normal', ...}}, or another prior"
                where = f"prior {SPECIAL[family][0]}"
                raise UnsupportedError.of(where, wanted, type(block).__name__, advice)
            if family in SPECIAL or (analytic and _has_form(family, block)):
                crosses[name] = family
        for block in guide.blocks:
            joint = [name for name in block.names if name in crosses]
            if len(block.names) > 1 and joint and not isinstance(block, Normal | Delta):
                missing = priors({**u, **{name: u[name] * math.nan for name in block.names}})
                for name in joint:
                    given = map(program.system.to_numpy, (missing[name].loc, missing[name].scale))
                    if any(np.isnan(argument).any() for argument in given):
                        del crosses[name]
        closed = tuple(analytic and _overrides(block, "entropy") for block in guide.blocks)
        groups = {name: found[name].per for name, family in crosses.items() if family == "EmpiricalBayes"}
        return cls(guide, crosses, closed, groups)

    def __call__(
        self, traced: Sequence[TracedSite], params: Parameters, log_q: Sequence[Array | None]
    ) -> Array:
        """The cost at one draw in nats; its mean over draws is KL(q || p).

        `traced` are the sites of a run at the draw, and `log_q` has log q of the draw per block, unused for blocks with
        a closed entropy.
        """
        mean, variance = self.guide.mean(params), self.guide.variance(params)
        total: Any = 0.0
        for site in traced:
            if site.kind != "latent":
                continue
            if site.name in self.crosses:
                form, base = _FORMS[self.crosses[site.name]], _elementary(site.distribution)
                cross = form(mean[site.name], variance[site.name], base)
            else:
                cross = -(site.distribution.log_prob(site.value).sum() + site.log_det)
            total = total + site.scale * cross
        for index, block in enumerate(self.guide.blocks):
            if self.entropies[index]:
                total = total - block.entropy(self.guide.parameters_of(params, index))
            else:
                total = total + log_q[index]
        return total

    def prior_scales(self, params: Parameters) -> dict[str, np.ndarray]:
        """The optimal s of each site with `priors.EmpiricalBayes`, in NumPy, for `with_prior_scales`."""
        mean, variance = self.guide.mean(params), self.guide.variance(params)
        return {
            name: np.asarray(empirical_scale(mean[name], variance[name], per))
            for name, per in self.groups.items()
        }


def _elementary(distribution: Any) -> Any:
    """The distribution of one coordinate. A masked distribution, which has no closed form, is unchanged."""
    while type(distribution).__name__ in ("Independent", "ExpandedDistribution"):
        distribution = distribution.base_dist
    return distribution


def _overrides(block: Family, name: str) -> bool:
    """Whether the family of a block overrides a method of `Family`."""
    return getattr(type(block), name) is not getattr(Family, name)


def _has_form(family: str, block: Family) -> bool:
    if family == "Laplace":
        return isinstance(block, Gaussian)
    return family in _FORMS and _overrides(block, "mean") and _overrides(block, "variance")
