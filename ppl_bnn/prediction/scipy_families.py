"""Families of predictive distributions whose density, distribution function and quantiles come from SciPy.

The families of the language's likelihoods are implemented in `families.py`. Models written in NumPyro or Pyro may
observe other distributions; those listed here are predicted with SciPy's functions. A family name may have a prefix:
"Mixture of Gamma" is a finite mixture, "Zero-inflated Poisson" has extra zeros.

A parameter has the shape (S, N) or (S, N, K), S draws, N rows, K independent outputs. Parameters of the parts of a
mixture have one more axis, (S, N, M). The families of `VECTORS` have one vector per row, (S, N, K).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MIXTURE, ZEROS = "Mixture of ", "Zero-inflated "
Parameters = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Family:
    """A family of distributions in SciPy.

    Parameters
    ----------
    names : tuple of str
        Names of the parameters.
    frozen : callable
        Function of `scipy.stats` and the parameters that returns SciPy's frozen distribution.
    counts : bool, default False
        Whether y is a whole number.
    least : float, default 0.0
        The smallest such number, whatever the parameters are.
    """

    names: tuple[str, ...]
    frozen: Callable[[Any, Parameters], Any]
    counts: bool = False
    least: float = 0.0


FAMILIES: dict[str, Family] = {
    "Normal": Family(("loc", "scale"), lambda s, p: s.norm(p["loc"], p["scale"])),
    "StudentT": Family(("df", "loc", "scale"), lambda s, p: s.t(p["df"], p["loc"], p["scale"])),
    "Laplace": Family(("loc", "scale"), lambda s, p: s.laplace(p["loc"], p["scale"])),
    "AsymmetricLaplace": Family(
        ("asymmetry", "loc", "scale"), lambda s, p: s.laplace_asymmetric(p["asymmetry"], p["loc"], p["scale"])
    ),
    "SoftLaplace": Family(("loc", "scale"), lambda s, p: s.hypsecant(p["loc"], p["scale"])),
    "Cauchy": Family(("loc", "scale"), lambda s, p: s.cauchy(p["loc"], p["scale"])),
    "Logistic": Family(("loc", "scale"), lambda s, p: s.logistic(p["loc"], p["scale"])),
    "Gumbel": Family(("loc", "scale"), lambda s, p: s.gumbel_r(p["loc"], p["scale"])),
    "TruncatedNormal": Family(
        ("low", "high", "loc", "scale"),
        lambda s, p: s.truncnorm(
            (p["low"] - p["loc"]) / p["scale"], (p["high"] - p["loc"]) / p["scale"], p["loc"], p["scale"]
        ),
    ),
    "Uniform": Family(("low", "high"), lambda s, p: s.uniform(p["low"], p["high"] - p["low"])),
    "Beta": Family(
        ("concentration1", "concentration0"), lambda s, p: s.beta(p["concentration1"], p["concentration0"])
    ),
    "Gamma": Family(
        ("concentration", "rate"), lambda s, p: s.gamma(p["concentration"], scale=1.0 / p["rate"])
    ),
    "InverseGamma": Family(
        ("concentration", "rate"), lambda s, p: s.invgamma(p["concentration"], scale=p["rate"])
    ),
    "Chi2": Family(("df",), lambda s, p: s.chi2(p["df"])),
    "Exponential": Family(("rate",), lambda s, p: s.expon(scale=1.0 / p["rate"])),
    "LogNormal": Family(("loc", "scale"), lambda s, p: s.lognorm(p["scale"], scale=np.exp(p["loc"]))),
    "LogUniform": Family(("low", "high"), lambda s, p: s.loguniform(p["low"], p["high"])),
    "HalfNormal": Family(("scale",), lambda s, p: s.halfnorm(scale=p["scale"])),
    "HalfCauchy": Family(("scale",), lambda s, p: s.halfcauchy(scale=p["scale"])),
    "Pareto": Family(("alpha", "scale"), lambda s, p: s.pareto(p["alpha"], scale=p["scale"])),
    "Weibull": Family(
        ("concentration", "scale"), lambda s, p: s.weibull_min(p["concentration"], scale=p["scale"])
    ),
    "Poisson": Family(("rate",), lambda s, p: s.poisson(p["rate"]), True),
    "NegativeBinomial": Family(
        ("concentration", "rate"),
        lambda s, p: s.nbinom(p["concentration"], p["concentration"] / (p["concentration"] + p["rate"])),
        True,
    ),
    "Binomial": Family(("total_count", "probs"), lambda s, p: s.binom(p["total_count"], p["probs"]), True),
    "BetaBinomial": Family(
        ("total_count", "concentration1", "concentration0"),
        lambda s, p: s.betabinom(p["total_count"], p["concentration1"], p["concentration0"]),
        True,
    ),
    # The number of failures before the first success, from 0.
    "Geometric": Family(("probs",), lambda s, p: s.geom(p["probs"], loc=-1), True),
    "DiscreteUniform": Family(
        ("low", "high"), lambda s, p: s.randint(p["low"], p["high"] + 1.0), True, -math.inf
    ),
}
_POSITIVE = ("concentration1", "concentration0", "alpha", "asymmetry")
# One vector per row: shares that sum to 1, or counts that sum to a total.
VECTORS = {"Dirichlet": ("concentration",), "Multinomial": ("total_count", "probs")}


def base(family: str) -> str:
    """The family without its prefix."""
    return family.removeprefix(MIXTURE).removeprefix(ZEROS)


def known(family: str) -> bool:
    """Whether the family is in this module, with at most one prefix. Zero inflation is for counts only."""
    if family.startswith(ZEROS):
        name = family.removeprefix(ZEROS)
        return name in FAMILIES and FAMILIES[name].counts
    return family in VECTORS or family.removeprefix(MIXTURE) in FAMILIES


def names(family: str) -> tuple[str, ...]:
    """Names of the parameters of a family. The last one has the shape of the prediction."""
    if family in VECTORS:
        return VECTORS[family]
    extra = ("weights",) if family.startswith(MIXTURE) else ("gate",) if family.startswith(ZEROS) else ()
    return (*extra, *FAMILIES[base(family)].names)


def counts(family: str) -> bool:
    """Whether y is a whole number (or a vector of counts)."""
    return family == "Multinomial" or (family not in VECTORS and FAMILIES[base(family)].counts)


def least(family: str) -> float:
    """The smallest value of a family of whole numbers."""
    return 0.0 if family in VECTORS else FAMILIES[base(family)].least


def faulty(family: str, parameters: Parameters) -> tuple[str, str] | None:
    """Find a parameter that is outside its range.

    Parameters
    ----------
    family : str
        The family.
    parameters : mapping of str to ndarray
        Its parameters by name.

    Returns
    -------
    tuple of str, or None
        Name of the parameter and a description of valid values. None if all are valid.
    """
    for name, value in parameters.items():
        if name in _POSITIVE and not (value > 0.0).all():
            return name, f"positive {name}"
        if name == "rate" and not ((value >= 0.0) if counts(family) else (value > 0.0)).all():
            return name, "a rate that is not negative" if counts(family) else "a positive rate"
        if name == "total_count" and ((value < 0.0) | (value != np.floor(value))).any():
            return name, "whole numbers from 0 for total_count"
    if base(family) == "Geometric" and not (parameters["probs"] > 0.0).all():
        return "probs", "positive probs"
    if "low" in parameters:
        low, high = parameters["low"], parameters["high"]
        if not ((low <= high) if counts(family) else (low < high)).all():
            return "high", "high above low"
        if counts(family) and ((low != np.floor(low)) | (high != np.floor(high))).any():
            return "low", "whole numbers for low and high"
        if base(family) == "LogUniform" and not (low > 0.0).all():
            return "low", "positive low"
    return None


def law(family: str, parameters: Parameters) -> Law:
    """The distribution of each draw and row.

    Parameters
    ----------
    family : str
        The family.
    parameters : mapping of str to ndarray
        Its parameters by name.

    Returns
    -------
    Law
        The distribution.
    """
    if family == "Dirichlet":
        return _Dirichlet(parameters)
    if family == "Multinomial":
        return _Multinomial(parameters)
    from scipy import stats

    found = Law(FAMILIES[base(family)], FAMILIES[base(family)].frozen(stats, parameters))
    if family.startswith(MIXTURE):
        return _Mixed(found, parameters["weights"])
    return _ZeroInflated(found, parameters["gate"]) if family.startswith(ZEROS) else found


def marginal(family: str, parameters: Parameters) -> tuple[str, dict[str, np.ndarray]]:
    """The distribution of a single output of a family of `VECTORS`.

    Parameters
    ----------
    family : str
        The family.
    parameters : mapping of str to ndarray
        Its parameters by name.

    Returns
    -------
    family : str
        Family of the marginal distribution.
    parameters : dict of str to ndarray
        Its parameters by name.
    """
    if family == "Dirichlet":
        shares = parameters["concentration"]
        return "Beta", {"concentration1": shares, "concentration0": shares.sum(-1, keepdims=True) - shares}
    return "Binomial", dict(parameters)


class Law:
    """A distribution with parameters (S, N, ...), by SciPy. Values broadcast against the parameters."""

    def __init__(self, family: Family, frozen: Any):
        self.family, self.frozen = family, frozen

    def log_density(self, y: np.ndarray) -> np.ndarray:
        """log p(y), -inf outside the support."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.frozen.logpmf(y) if self.family.counts else self.frozen.logpdf(y)

    def distribution(self, y: np.ndarray) -> np.ndarray:
        """P(Y <= y)."""
        return self.frozen.cdf(y)

    def inverse(self, q: float) -> np.ndarray:
        """The quantile at q. For a mixture, the quantile of each part along the last axis."""
        return self.frozen.ppf(q)

    def mean(self) -> np.ndarray:
        """Mean for each set of parameters."""
        return self.frozen.mean()

    def variance(self) -> np.ndarray:
        """Variance for each set of parameters."""
        return self.frozen.var()

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """One draw for each set of parameters."""
        shape = np.broadcast_shapes(*(np.shape(value) for value in self.frozen.args), *self._keywords())
        return self.frozen.rvs(size=shape, random_state=rng)

    def _keywords(self) -> list[tuple[int, ...]]:
        return [np.shape(value) for value in self.frozen.kwds.values()]


class _Mixed(Law):
    """sum_m w_m p_m, over the last axis."""

    def __init__(self, parts: Law, weights: np.ndarray):
        super().__init__(parts.family, parts.frozen)
        self.parts, self.weights = parts, weights

    def log_density(self, y: np.ndarray) -> np.ndarray:
        from scipy.special import logsumexp

        with np.errstate(divide="ignore"):
            each: Any = self.parts.log_density(y[..., None]) + np.log(self.weights)
            return np.asarray(logsumexp(each, axis=-1))

    def distribution(self, y: np.ndarray) -> np.ndarray:
        return np.sum(self.weights * self.parts.distribution(y[..., None]), axis=-1)

    def mean(self) -> np.ndarray:
        return np.sum(self.weights * self.parts.mean(), axis=-1)

    def variance(self) -> np.ndarray:
        deviation = self.parts.mean() - self.mean()[..., None]
        return np.sum(self.weights * (self.parts.variance() + deviation**2), axis=-1)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        upto = np.cumsum(self.weights, axis=-1)
        part = np.sum(rng.random((*upto.shape[:-1], 1)) * upto[..., -1:] >= upto, axis=-1)
        return np.take_along_axis(self.parts.draw(rng), part[..., None], axis=-1)[..., 0]


class _ZeroInflated(Law):
    """gate 1(y = 0) + (1 - gate) p(y)."""

    def __init__(self, rest: Law, gate: np.ndarray):
        super().__init__(rest.family, rest.frozen)
        self.rest, self.gate = rest, gate

    def log_density(self, y: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            rest = np.log1p(-self.gate) + self.rest.log_density(y)
            return np.where(y == 0.0, np.logaddexp(np.log(self.gate), rest), rest)

    def distribution(self, y: np.ndarray) -> np.ndarray:
        return self.gate * (y >= 0.0) + (1.0 - self.gate) * self.rest.distribution(y)

    def inverse(self, q: float) -> np.ndarray:
        # With a gate of 1 all values are zero, and the results of the division by 0 are not used.
        with np.errstate(divide="ignore", invalid="ignore"):
            below, above = (np.clip((q - zeros) / (1.0 - self.gate), 0.0, 1.0) for zeros in (0.0, self.gate))
            least = self.distribution(np.full(self.gate.shape, -1.0))
            beyond = np.where(q <= least, self.rest.frozen.ppf(below), self.rest.frozen.ppf(above))
        zero = (q > least) & (q <= self.distribution(np.zeros(self.gate.shape)))
        return np.where(zero, 0.0, beyond)

    def mean(self) -> np.ndarray:
        return (1.0 - self.gate) * self.rest.mean()

    def variance(self) -> np.ndarray:
        second = self.rest.variance() + self.rest.mean() ** 2
        return (1.0 - self.gate) * second - self.mean() ** 2

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(self.gate.shape) < self.gate, 0, self.rest.draw(rng))


class _Dirichlet(Law):
    def __init__(self, parameters: Parameters):
        self.shares = parameters["concentration"]

    def log_density(self, y: np.ndarray) -> np.ndarray:
        from scipy.special import gammaln, xlogy

        a = self.shares
        inside = np.all(y >= 0.0, axis=-1) & (np.abs(np.sum(y, axis=-1) - 1.0) < 1e-6)
        kernel = xlogy(a - 1.0, np.maximum(y, 0.0)).sum(-1)
        value = kernel + gammaln(a.sum(-1)) - gammaln(a).sum(-1)
        return np.where(inside, value, -np.inf)

    def mean(self) -> np.ndarray:
        return self.shares / self.shares.sum(-1, keepdims=True)

    def variance(self) -> np.ndarray:
        return self.mean() * (1.0 - self.mean()) / (self.shares.sum(-1, keepdims=True) + 1.0)

    def covariance(self) -> np.ndarray:
        """Covariance between the outputs of each row, (S, N, K, K)."""
        return _of_shares(self.mean()) / (self.shares.sum(-1)[..., None, None] + 1.0)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        # Gamma(a) is Gamma(a + 1) U^(1/a): its logarithm is finite even if a is so small that all draws are 0.
        each = (
            np.log(rng.standard_gamma(self.shares + 1.0))
            - rng.standard_exponential(self.shares.shape) / self.shares
        )
        each = np.exp(each - each.max(-1, keepdims=True))
        return each / each.sum(-1, keepdims=True)


class _Multinomial(Law):
    def __init__(self, parameters: Parameters):
        self.total, self.probs = parameters["total_count"], parameters["probs"]

    def log_density(self, y: np.ndarray) -> np.ndarray:
        from scipy.special import gammaln, xlogy

        total = self.total[..., 0]
        value = gammaln(total + 1.0) + (xlogy(y, self.probs) - gammaln(y + 1.0)).sum(-1)
        return np.where(y.sum(-1) == total, value, -np.inf)

    def mean(self) -> np.ndarray:
        return self.total * self.probs

    def variance(self) -> np.ndarray:
        return self.total * self.probs * (1.0 - self.probs)

    def covariance(self) -> np.ndarray:
        """Covariance between the outputs of each row, (S, N, K, K)."""
        return self.total[..., None] * _of_shares(self.probs)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        # NumPy refuses a sum above 1, which rounding in single precision can produce.
        shares = self.probs / self.probs.sum(-1, keepdims=True)
        return rng.multinomial(self.total[..., 0].astype(np.int64), shares)


def _of_shares(shares: np.ndarray) -> np.ndarray:
    """diag(p) - p p' over the last axis."""
    return shares[..., None] * (np.eye(shares.shape[-1]) - shares[..., None, :])
