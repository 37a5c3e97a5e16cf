"""Families of predictive distributions, by SciPy: one table, and the distribution of each component.

A parameter has the shape (S, N) or (S, N, K), S draws, N rows, K independent outputs. Parameters of the parts of a
mixture have one more axis, (S, N, M). The families of `VECTORS` have one vector per row, (S, N, K). A family name may
have a prefix: "Mixture of Gamma" is a finite mixture, "Zero-inflated Poisson" has extra zeros. "NormalMixture" is the
mixture of "Normal".
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import scipy

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.language.distributions import CENSORED

MIXTURE, ZEROS = "Mixture of ", "Zero-inflated "
LOG_2PI = math.log(2.0 * math.pi)
Parameters = Mapping[str, np.ndarray]
# (y, numbers of the rows) -> F(y).
Distribution = Callable[[np.ndarray, np.ndarray], np.ndarray]


# --- distributions ------------------------------------------------------------------------------------------


class Law:
    """A distribution for each set of parameters (S, N, ...), by SciPy. Values broadcast against the parameters."""

    def __init__(self, family: Family, parameters: Parameters):
        self.family, self.parameters, self.p = family, parameters, SimpleNamespace(**parameters)

    @cached_property
    def frozen(self) -> Any:
        """The distribution of `scipy.stats`."""
        assert self.family.frozen is not None
        return self.family.frozen(scipy.stats, **self.parameters)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        """log p(y), -inf outside the support. Outputs that are independent have one value each."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.frozen.logpmf(y) if self.family.kind == "count" else self.frozen.logpdf(y)

    def distribution(self, y: np.ndarray) -> np.ndarray:
        """P(Y <= y)."""
        return self.frozen.cdf(y)

    def quantile_range(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest quantile of the components of each row, which enclose that of their mixture."""
        values = self.inverse(level)
        axes = (0, 2)[: values.ndim - 1]
        return values.min(axis=axes), values.max(axis=axes)

    def inverse(self, level: float) -> np.ndarray:
        """The quantile. For a mixture, the quantile of each part along the last axis."""
        return self.frozen.ppf(level)

    def mean(self) -> np.ndarray:
        """Mean for each set of parameters."""
        return self.frozen.mean()

    def variance(self) -> np.ndarray:
        """Variance for each set of parameters."""
        return self.frozen.var()

    def uncertainty(self) -> np.ndarray:
        """What is split into the epistemic and the aleatoric part: the variance, or for classes the entropy."""
        return self.variance()

    def absolute_deviation(self, y: np.ndarray) -> np.ndarray:
        """E|Y - y| = (y - m) (2 F(y) - 1) + 2 (m F(y) - E[Y; Y <= y])."""
        return (y - self.mean()) * (2.0 * self.distribution(y) - 1.0) + 2.0 * self.shortfall(y)

    def shortfall(self, y: np.ndarray) -> np.ndarray:
        """m F(y) - E[Y; Y <= y] in closed form."""
        with_form = (name for name, family in FAMILIES.items() if family.law.shortfall is not Law.shortfall)
        expected = f"a family with a closed form of E|Y - y|: {', '.join(with_form)}"
        name = next(name for name, family in FAMILIES.items() if family is self.family)
        raise UnsupportedError.of("", expected, name, "log_prob, or sample(n, seed)")

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """One draw for each set of parameters."""
        shape = np.broadcast_shapes(*(value.shape for value in self.parameters.values()))
        return self.frozen.rvs(size=shape, random_state=rng)

    def z(self, y: np.ndarray) -> np.ndarray:
        """(y - loc) / scale."""
        return (y - self.parameters.get("loc", 0.0)) / self.p.scale


class _Normal(Law):
    """Written out, since most predictions are normal and SciPy checks its arguments in every call."""

    def log_density(self, y: np.ndarray) -> np.ndarray:
        z = self.z(y)
        return -0.5 * (z * z + LOG_2PI) - np.log(self.p.scale)

    def distribution(self, y: np.ndarray) -> np.ndarray:
        return scipy.special.ndtr(self.z(y))

    def mean(self) -> np.ndarray:
        return self.p.loc

    def variance(self) -> np.ndarray:
        return self.p.scale**2

    def shortfall(self, y: np.ndarray) -> np.ndarray:
        return self.p.scale * np.exp(-0.5 * (self.z(y) ** 2 + LOG_2PI))


class _StudentT(Law):
    def variance(self) -> np.ndarray:
        # Infinite also where there is no mean, for which SciPy has NaN.
        return np.where(self.p.df > 1.0, super().variance(), np.inf)

    def shortfall(self, y: np.ndarray) -> np.ndarray:
        spread = (self.p.df + self.z(y) ** 2) / (self.p.df - 1.0)
        return self.frozen.pdf(y) * self.p.scale * spread * self.p.scale


class _Laplace(Law):
    def log_density(self, y: np.ndarray) -> np.ndarray:
        # SciPy takes the logarithm of the density, which is 0 far from the centre.
        return -np.abs(self.z(y)) - np.log(2.0 * self.p.scale)

    def distribution(self, y: np.ndarray) -> np.ndarray:
        z = self.z(y)
        half = 0.5 * np.exp(-np.abs(z))
        return np.where(z < 0.0, half, 1.0 - half)

    def shortfall(self, y: np.ndarray) -> np.ndarray:
        distance = np.abs(self.z(y))
        return 0.5 * self.p.scale * (1.0 + distance) * np.exp(-distance)


class _Weibull(Law):
    def _exponent(self, y: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            return np.maximum(self.z(y), 0.0) ** self.p.concentration

    def log_density(self, y: np.ndarray) -> np.ndarray:
        # A time of zero is no time; SciPy has the limit there, which may be infinite.
        return np.where(y > 0.0, super().log_density(y), -np.inf)

    def distribution(self, y: np.ndarray) -> np.ndarray:
        return -np.expm1(-self._exponent(y))

    def variance(self) -> np.ndarray:
        # The difference of moments loses all digits for large concentrations.
        first, second = (scipy.special.gammaln(1.0 + power / self.p.concentration) for power in (1.0, 2.0))
        with np.errstate(over="ignore"):
            return self.p.scale**2 * np.exp(second) * -np.expm1(2.0 * first - second)

    def shortfall(self, y: np.ndarray) -> np.ndarray:
        # E[Y; Y <= y] = E[Y] times an incomplete gamma function.
        below = scipy.special.gammainc(1.0 + 1.0 / self.p.concentration, self._exponent(y))
        return self.mean() * (self.distribution(y) - below)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return self.p.scale * rng.weibull(self.p.concentration)


class _Count(Law):
    def quantile_range(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        # Cantelli's bounds: SciPy's quantiles are slow, and NaN for large rates.
        mean, sd = self.mean(), np.sqrt(self.variance())
        low = np.floor(np.maximum(mean - sd * math.sqrt((1.0 - level) / level), 0.0))
        return low.min(axis=0), np.ceil(mean + sd * math.sqrt(level / (1.0 - level))).max(axis=0)


class _Poisson(_Count):
    def distribution(self, y: np.ndarray) -> np.ndarray:
        count = np.floor(np.maximum(y, 0.0))
        return np.where(y < 0.0, 0.0, scipy.special.pdtr(count, self.p.rate))

    def shortfall(self, y: np.ndarray) -> np.ndarray:
        return self.p.rate * self.frozen.pmf(np.floor(y))


class _NegativeBinomial(_Count):
    def distribution(self, y: np.ndarray) -> np.ndarray:
        count, r = np.floor(np.maximum(y, 0.0)), self.p.concentration
        return np.where(y < 0.0, 0.0, scipy.special.betainc(r, count + 1.0, r / (r + self.p.rate)))

    def log_density(self, y: np.ndarray) -> np.ndarray:
        rate, r = self.p.rate, self.p.concentration
        # Gamma(y + r) / (Gamma(r) y!) = 1 / (y B(y, r)) is accurate for large r.
        some = np.where(y > 0.0, y, 1.0)
        ways = np.where(y > 0.0, -np.log(some) - scipy.special.betaln(some, r), 0.0)
        return ways + scipy.special.xlogy(y, rate / (rate + r)) - scipy.special.xlog1py(r, rate / r)

    def mean(self) -> np.ndarray:
        return self.p.rate

    def variance(self) -> np.ndarray:
        return self.p.rate * (1.0 + self.p.rate / self.p.concentration)

    def shortfall(self, y: np.ndarray) -> np.ndarray:
        count = np.floor(y)
        return self.p.rate * self.frozen.pmf(count) * (1.0 + count / self.p.concentration)


class _Bernoulli(Law):
    def log_density(self, y: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):  # a component may give a label probability zero
            return np.log(self.probabilities()[:, np.arange(len(y)), y])

    def mean(self) -> np.ndarray:
        return self.p.probs

    def uncertainty(self) -> np.ndarray:
        return entropy_of(self.probabilities())

    def probabilities(self) -> np.ndarray:
        """Probabilities of the classes, (S, N, C)."""
        return np.stack([1.0 - self.p.probs, self.p.probs], axis=-1)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return (rng.random(self.p.probs.shape) < self.p.probs).astype(np.int64)


class _Categorical(_Bernoulli):
    def probabilities(self) -> np.ndarray:
        return self.p.probs

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return _drawn_index(self.p.probs, rng)


class _Vector(Law):
    """One vector of dependent outputs per row."""

    # Covariance between the outputs of each row, (S, N, K, K); family and parameters of the single outputs.
    covariance: Callable[[], np.ndarray]
    marginal: Callable[[], tuple[str, Parameters]]

    def variance(self) -> np.ndarray:
        return np.diagonal(self.covariance(), axis1=-2, axis2=-1)


class _MultivariateNormal(_Vector):
    def log_density(self, y: np.ndarray) -> np.ndarray:
        z = np.linalg.solve(self.p.scale_tril, (y - self.p.loc)[..., None])[..., 0]
        log_diagonal = np.log(np.diagonal(self.p.scale_tril, axis1=-2, axis2=-1))
        return -0.5 * np.sum(z * z + LOG_2PI, axis=-1) - log_diagonal.sum(axis=-1)

    def mean(self) -> np.ndarray:
        return self.p.loc

    def variance(self) -> np.ndarray:
        return np.sum(self.p.scale_tril**2, axis=-1)

    def covariance(self) -> np.ndarray:
        return self.p.scale_tril @ np.swapaxes(self.p.scale_tril, -1, -2)

    def marginal(self) -> tuple[str, Parameters]:
        return "Normal", {"loc": self.p.loc, "scale": np.sqrt(self.variance())}

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        z = rng.standard_normal(self.p.loc.shape)
        return self.p.loc + np.einsum("...ij,...j->...i", self.p.scale_tril, z)


class _Dirichlet(_Vector):
    def log_density(self, y: np.ndarray) -> np.ndarray:
        a = self.p.concentration
        inside = np.all(y >= 0.0, axis=-1) & (np.abs(np.sum(y, axis=-1) - 1.0) < 1e-6)
        kernel = scipy.special.xlogy(a - 1.0, np.maximum(y, 0.0)).sum(-1)
        values = kernel + scipy.special.gammaln(a.sum(-1)) - scipy.special.gammaln(a).sum(-1)
        return np.where(inside, values, -np.inf)

    def mean(self) -> np.ndarray:
        return self.p.concentration / self.p.concentration.sum(-1, keepdims=True)

    def covariance(self) -> np.ndarray:
        total = self.p.concentration.sum(-1)[..., None, None]
        return _covariance_of_shares(self.mean()) / (total + 1.0)

    def marginal(self) -> tuple[str, Parameters]:
        shares = self.p.concentration
        return "Beta", {"concentration1": shares, "concentration0": shares.sum(-1, keepdims=True) - shares}

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        # Gamma(a) is Gamma(a + 1) U^(1/a): its logarithm is finite even if a is so small that all draws are 0.
        a = self.p.concentration
        each = np.log(rng.standard_gamma(a + 1.0)) - rng.standard_exponential(a.shape) / a
        each = np.exp(each - each.max(-1, keepdims=True))
        return each / each.sum(-1, keepdims=True)


class _Multinomial(_Vector):
    # SciPy's own gives NaN where the shares sum to 1 in single precision only.
    def log_density(self, y: np.ndarray) -> np.ndarray:
        total = self.p.total_count[..., 0]
        each = scipy.special.xlogy(y, self.p.probs) - scipy.special.gammaln(y + 1.0)
        return np.where(y.sum(-1) == total, scipy.special.gammaln(total + 1.0) + each.sum(-1), -np.inf)

    def mean(self) -> np.ndarray:
        return self.p.total_count * self.p.probs

    def covariance(self) -> np.ndarray:
        return self.p.total_count[..., None] * _covariance_of_shares(self.p.probs)

    def marginal(self) -> tuple[str, Parameters]:
        return "Binomial", self.parameters

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        # NumPy refuses a sum above 1, which rounding in single precision can produce.
        shares = self.p.probs / self.p.probs.sum(-1, keepdims=True)
        return rng.multinomial(self.p.total_count[..., 0].astype(np.int64), shares)


class _Mixed(Law):
    """sum_m w_m p_m, over the last axis."""

    def __init__(self, family: Family, parameters: Parameters):
        super().__init__(family, {name: value for name, value in parameters.items() if name != "weights"})
        self.weights, self.parts = parameters["weights"], family.law(family, self.parameters)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):  # a part may have no weight
            each = self.parts.log_density(y[..., None]) + np.log(self.weights)
        return np.logaddexp.reduce(each, axis=-1)

    def distribution(self, y: np.ndarray) -> np.ndarray:
        return np.sum(self.weights * self.parts.distribution(y[..., None]), axis=-1)

    def mean(self) -> np.ndarray:
        return np.sum(self.weights * self.parts.mean(), axis=-1)

    def variance(self) -> np.ndarray:
        deviation = self.parts.mean() - self.mean()[..., None]
        return np.sum(self.weights * (self.parts.variance() + deviation**2), axis=-1)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        part, each = _drawn_index(self.weights, rng)[..., None], self.parameters.items()
        chosen = {name: np.take_along_axis(value, part, axis=-1)[..., 0] for name, value in each}
        return self.family.law(self.family, chosen).draw(rng)


class _ZeroInflated(Law):
    """gate 1(y = 0) + (1 - gate) p(y)."""

    def __init__(self, family: Family, parameters: Parameters):
        super().__init__(family, {name: value for name, value in parameters.items() if name != "gate"})
        self.gate, self.rest = parameters["gate"], family.law(family, self.parameters)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            rest = np.log1p(-self.gate) + self.rest.log_density(y)
            return np.where(y == 0.0, np.logaddexp(np.log(self.gate), rest), rest)

    def distribution(self, y: np.ndarray) -> np.ndarray:
        return self.gate * (y >= 0.0) + (1.0 - self.gate) * self.rest.distribution(y)

    def inverse(self, level: float) -> np.ndarray:
        # With a gate of 1 all values are zero: the quotients by 0 are not used.
        with np.errstate(divide="ignore", invalid="ignore"):
            least = self.distribution(np.full(self.gate.shape, -1.0))
            rest = (level - np.where(level <= least, 0.0, self.gate)) / (1.0 - self.gate)
            beyond = self.frozen.ppf(np.clip(rest, 0.0, 1.0))
        zero = (level > least) & (level <= self.distribution(np.zeros(self.gate.shape)))
        return np.where(zero, 0.0, beyond)

    def mean(self) -> np.ndarray:
        return (1.0 - self.gate) * self.rest.mean()

    def variance(self) -> np.ndarray:
        second = self.rest.variance() + self.rest.mean() ** 2
        return (1.0 - self.gate) * second - self.mean() ** 2

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(self.gate.shape) < self.gate, 0, self.rest.draw(rng))


def _covariance_of_shares(shares: np.ndarray) -> np.ndarray:
    """diag(p) - p p' over the last axis."""
    return shares[..., None] * (np.eye(shares.shape[-1]) - shares[..., None, :])


def _drawn_index(shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random index of the last axis, int64, with these probabilities."""
    upto = np.cumsum(shares, axis=-1)
    position = rng.random((*upto.shape[:-1], 1)) * upto[..., -1:]
    return np.sum(position >= upto, axis=-1).astype(np.int64)


# --- the table ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A family of distributions.

    Parameters
    ----------
    frozen : callable, optional
        Function of `scipy.stats` and the parameters by name that returns SciPy's frozen distribution.
    law : type
        The class of its distributions.
    kind : {"number", "count", "class"}
        What y is.
    least : float
        The smallest count, whatever the parameters are.
    own_names : tuple of str
        Names of the parameters without `frozen`. The last parameter has the shape of the prediction.
    axes : tuple of str
        The axes that may follow (draws, rows) in the shape of a parameter, separated by "or".
    """

    frozen: Callable[..., Any] | None = None
    law: type[Law] = Law
    kind: Literal["number", "count", "class"] = "number"
    least: float = 0.0
    own_names: tuple[str, ...] = ()
    axes: tuple[str, ...] = ("", "outputs")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(inspect.signature(self.frozen).parameters)[1:] if self.frozen else self.own_names


FAMILIES: dict[str, Family] = {
    "Normal": Family(lambda s, loc, scale: s.norm(loc, scale), _Normal),
    "StudentT": Family(lambda s, df, loc, scale: s.t(df, loc, scale), _StudentT),
    "Laplace": Family(lambda s, loc, scale: s.laplace(loc, scale), _Laplace),
    "AsymmetricLaplace": Family(lambda s, asymmetry, loc, scale: s.laplace_asymmetric(asymmetry, loc, scale)),
    "SoftLaplace": Family(lambda s, loc, scale: s.hypsecant(loc, scale)),
    "Cauchy": Family(lambda s, loc, scale: s.cauchy(loc, scale)),
    "Logistic": Family(lambda s, loc, scale: s.logistic(loc, scale)),
    "Gumbel": Family(lambda s, loc, scale: s.gumbel_r(loc, scale)),
    "TruncatedNormal": Family(
        lambda s, low, high, loc, scale: s.truncnorm((low - loc) / scale, (high - loc) / scale, loc, scale)
    ),
    "Uniform": Family(lambda s, low, high: s.uniform(low, high - low)),
    "Beta": Family(lambda s, concentration1, concentration0: s.beta(concentration1, concentration0)),
    "Gamma": Family(lambda s, concentration, rate: s.gamma(concentration, scale=1.0 / rate)),
    "InverseGamma": Family(lambda s, concentration, rate: s.invgamma(concentration, scale=rate)),
    "Chi2": Family(lambda s, df: s.chi2(df)),
    "Exponential": Family(lambda s, rate: s.expon(scale=1.0 / rate)),
    "LogNormal": Family(lambda s, loc, scale: s.lognorm(scale, scale=np.exp(loc))),
    "LogUniform": Family(lambda s, low, high: s.loguniform(low, high)),
    "HalfNormal": Family(lambda s, scale: s.halfnorm(scale=scale)),
    "HalfCauchy": Family(lambda s, scale: s.halfcauchy(scale=scale)),
    "Pareto": Family(lambda s, alpha, scale: s.pareto(alpha, scale=scale)),
    "Weibull": Family(lambda s, concentration, scale: s.weibull_min(concentration, scale=scale), _Weibull),
    "Poisson": Family(lambda s, rate: s.poisson(rate), _Poisson, "count"),
    # The rate of a negative binomial distribution is its mean.
    "NegativeBinomial": Family(
        lambda s, concentration, rate: s.nbinom(concentration, concentration / (concentration + rate)),
        _NegativeBinomial,
        "count",
    ),
    "Binomial": Family(lambda s, total_count, probs: s.binom(total_count, probs), kind="count"),
    "BetaBinomial": Family(
        lambda s, total_count, concentration1, concentration0: s.betabinom(
            total_count, concentration1, concentration0
        ),
        kind="count",
    ),
    # The number of failures before the first success, from 0.
    "Geometric": Family(lambda s, probs: s.geom(probs, loc=-1), kind="count"),
    "DiscreteUniform": Family(lambda s, low, high: s.randint(low, high + 1.0), kind="count", least=-math.inf),
    "Bernoulli": Family(law=_Bernoulli, kind="class", own_names=("probs",), axes=("",)),
    "Categorical": Family(law=_Categorical, kind="class", own_names=("probs",), axes=("classes",)),
    "MultivariateNormal": Family(law=_MultivariateNormal, own_names=("scale_tril", "loc"), axes=("outputs",)),
    # Shares that sum to 1, and counts that sum to a total.
    "Dirichlet": Family(law=_Dirichlet, own_names=("concentration",), axes=("parts",)),
    "Multinomial": Family(
        law=_Multinomial, kind="count", own_names=("total_count", "probs"), axes=("parts",)
    ),
}
# Families of one vector per row.
VECTORS = tuple(name for name, family in FAMILIES.items() if issubclass(family.law, _Vector))
LOCATION_SCALE = ("Normal", "StudentT", "Laplace", "Weibull")
# Families whose units can be changed; those of positive numbers have a zero.
FAMILIES_WITH_UNITS = ("Normal", "StudentT", "Laplace", "NormalMixture", "MultivariateNormal")
# Names of the families in likelihoods of censored rows.
CENSORED_FAMILIES = {f"Censored{family}": family for family in CENSORED}


def split(family: str) -> tuple[str, str]:
    """Prefix and name of a family."""
    if family == "NormalMixture":
        return MIXTURE, "Normal"
    prefix = next((each for each in (MIXTURE, ZEROS) if family.startswith(each)), "")
    return prefix, family.removeprefix(prefix)


def base(family: str) -> str:
    """The family without its prefix."""
    return split(family)[1]


def is_mixture(family: str) -> bool:
    """Whether the parameters have one more axis, of parts."""
    return split(family)[0] == MIXTURE


def known(family: str) -> bool:
    """Whether the family is in the table. Only families of SciPy have a prefix, zero inflation only those of counts."""
    prefix, name = split(family)
    row = FAMILIES.get(name)
    if row is None or not prefix:
        return row is not None
    return row.frozen is not None and (prefix == MIXTURE or row.kind == "count")


def names(family: str) -> tuple[str, ...]:
    """Names of the parameters of a family. The last one has the shape of the mean."""
    prefix, name = split(family)
    return ({MIXTURE: ("weights",), ZEROS: ("gate",)}.get(prefix) or ()) + FAMILIES[name].names


def counts(family: str) -> bool:
    """Whether y is a whole number (or a vector of counts)."""
    return FAMILIES[base(family)].kind == "count"


def law(family: str, parameters: Parameters) -> Any:
    """The distribution of each draw and row, a `Law`."""
    prefix, name = split(family)
    return {MIXTURE: _Mixed, ZEROS: _ZeroInflated}.get(prefix, FAMILIES[name].law)(FAMILIES[name], parameters)


def check_parameters(family: str, parameters: Parameters) -> None:
    """Check shapes and values of the parameters of a family."""
    shapes = {name: value.shape for name, value in parameters.items()}
    first = shapes[names(family)[-1]]
    axes = ("parts",) if is_mixture(family) else FAMILIES[base(family)].axes
    wanted = {name: first + first[-1:] if name == "scale_tril" else first for name in shapes}
    if len(first) not in {2 + bool(axis) for axis in axes} or shapes != wanted:
        layout = " or ".join(f"(draws, rows{', ' if axis else ''}{axis})" for axis in axes)
        if "scale_tril" in shapes:
            layout += ", scale_tril with one more axis of outputs"
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        expected = f"parameters of {family} that all have one shape {layout}"
        raise InputError.of("", expected, got, "the axis of the draws in front, or np.broadcast_to")
    InputError.check(0 not in first, "", "at least one draw and one row", f"shape {first}", "rows to predict")
    for expected, values, good in _requirements(family, parameters):
        if not good.all():
            got = f"values from {values.min():.6g} to {values.max():.6g}"
            raise InputError.of("", expected, got, "an exponential, a sigmoid or a softmax of the output")


def _requirements(family: str, p: Parameters) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(what is expected, the values, whether each is valid) for each parameter with a range."""
    whole = counts(family)
    for name in ("df", "scale", "concentration", "concentration1", "concentration0", "alpha", "asymmetry"):
        if name in p:
            yield f"positive {name}", p[name], p[name] > 0.0
    if "rate" in p:
        expected = "a rate that is not negative" if whole else "a positive rate"
        yield expected, p["rate"], p["rate"] >= 0.0 if whole else p["rate"] > 0.0
    if "total_count" in p:
        total = p["total_count"]
        yield "whole numbers from 0 for total_count", total, (total >= 0.0) & (total == np.floor(total))
    if "low" in p:
        low, high = p["low"], p["high"]
        yield "high above low", high, low <= high if whole else low < high
        if whole:
            yield "whole numbers for low and high", low, (low == np.floor(low)) & (high == np.floor(high))
        if base(family) == "LogUniform":
            yield "positive low", low, low > 0.0
    if "scale_tril" in p:
        diagonal = np.diagonal(p["scale_tril"], axis1=-2, axis2=-1)
        good = (diagonal > 0.0) & ~np.triu(p["scale_tril"], 1).any()
        yield "scale_tril lower triangular, its diagonal positive", diagonal, good
    for name in ("probs", "weights", "gate"):
        if name in p:
            yield f"{name} between 0 and 1", p[name], (p[name] >= 0.0) & (p[name] <= 1.0)
        if name in p and (name == "weights" or family in ("Categorical", "Multinomial")):
            total = p[name].sum(axis=-1)
            over = f"{name} that sum to 1 over the {'classes' if family == 'Categorical' else 'parts'}"
            yield over, total, np.abs(total - 1.0) <= 1e-5
    if base(family) == "Geometric":
        yield "positive probs", p["probs"], p["probs"] > 0.0


# --- numerics of mixtures -----------------------------------------------------------------------------------


def entropy_of(probabilities: np.ndarray) -> np.ndarray:
    """Entropy over the last axis, nats."""
    return scipy.special.entr(probabilities).sum(axis=-1)


def continuous_quantile(cdf: Distribution, level: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The root of F(y) = level in each [low, high], where `cdf` is a function of y and of the numbers of the rows."""
    # SciPy 1.15 does not load it by itself.
    from scipy.optimize import elementwise

    # On the probit scale the distribution function is close to a straight line, so interpolation is fast.
    def excess(y: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return scipy.special.ndtri(np.clip(cdf(y, rows), 1e-300, 1.0 - 1e-16)) - scipy.special.ndtri(level)

    tolerances = {"xatol": 0.0, "xrtol": 8.0 * np.finfo(np.float64).eps, "fatol": 1e-13, "frtol": 0.0}
    rows = np.arange(len(low))
    found = elementwise.find_root(excess, (low, high), args=(rows,), tolerances=tolerances, maxiter=200)
    # Rounding can put an end of the bracket on the wrong side by one unit; that end is then the root.
    at_low, at_high = (np.asarray(value) for value in found.f_bracket)
    end = np.where(at_low >= 0.0, low, high)
    return np.where((at_low < 0.0) & (at_high > 0.0) | np.asarray(found.success), found.x, end)


def integer_quantile(cdf: Distribution, level: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The least whole number with F(y) >= level, between the quantiles of the components."""
    rows = np.arange(len(low))
    low, high = low - 2.0, high + 1.0
    while True:
        middle = np.floor(0.5 * (low + high))
        # Beyond 2**53 whole numbers are further apart than 1.
        if not ((middle > low) & (middle < high)).any():
            break
        enough = cdf(middle, rows) >= level
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high
