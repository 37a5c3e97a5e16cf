"""Families of predictions by SciPy, against the distributions of NumPyro and of Pyro, and how these become families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ppl_bnn.backends.native import native_eta, native_likelihood
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.language import ops
from ppl_bnn.prediction import families
from ppl_bnn.prediction.prediction import Prediction

Parameters = dict[str, np.ndarray]
PPLS = ("numpyro", "pyro")
ROWS, PARTS, OUTPUTS = 40, 3, 4


# --- the families, and what they are called in the systems ------------------------------------------------


@dataclass(frozen=True)
class Case:
    """made: (distributions of a system, parameters) -> its distribution. low, high: of each parameter.

    support: the parameters that say where the density is zero. moments: how many finite moments it has.
    """

    made: Callable[[Any, Mapping[str, Any]], Any]
    ranges: Mapping[str, tuple[float, float]]
    support: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    moments: int = 4
    pyro: bool = True


LOCATION = {"loc": (-3.0, 3.0), "scale": (0.3, 3.0)}
CASES: dict[str, Case] = {
    "Normal": Case(lambda d, p: d.Normal(p["loc"], p["scale"]), LOCATION),
    "StudentT": Case(lambda d, p: d.StudentT(p["df"], p["loc"], p["scale"]), {"df": (4.5, 9.0), **LOCATION}),
    "Laplace": Case(lambda d, p: d.Laplace(p["loc"], p["scale"]), LOCATION),
    "AsymmetricLaplace": Case(
        lambda d, p: d.AsymmetricLaplace(p["loc"], p["scale"], p["asymmetry"]),
        {"asymmetry": (0.4, 3.0), **LOCATION},
    ),
    "SoftLaplace": Case(lambda d, p: d.SoftLaplace(p["loc"], p["scale"]), LOCATION),
    "Cauchy": Case(lambda d, p: d.Cauchy(p["loc"], p["scale"]), LOCATION, moments=0),
    "Logistic": Case(lambda d, p: d.Logistic(p["loc"], p["scale"]), LOCATION),
    "Gumbel": Case(lambda d, p: d.Gumbel(p["loc"], p["scale"]), LOCATION),
    "TruncatedNormal": Case(
        lambda d, p: d.TruncatedNormal(p["loc"], p["scale"], low=p["low"], high=p["high"]),
        {"low": (-3.0, -1.0), "high": (0.5, 4.0), **LOCATION},
        support=("low", "high"),
        pyro=False,
    ),
    "Uniform": Case(
        lambda d, p: d.Uniform(p["low"], p["high"]),
        {"low": (-3.0, -1.0), "high": (0.5, 4.0)},
        support=("low", "high"),
    ),
    "Beta": Case(
        lambda d, p: d.Beta(p["concentration1"], p["concentration0"]),
        {"concentration1": (0.6, 5.0), "concentration0": (0.6, 5.0)},
    ),
    "Gamma": Case(
        lambda d, p: d.Gamma(p["concentration"], p["rate"]), {"concentration": (0.6, 5.0), "rate": (0.3, 3.0)}
    ),
    "InverseGamma": Case(
        lambda d, p: d.InverseGamma(p["concentration"], p["rate"]),
        {"concentration": (4.5, 9.0), "rate": (0.3, 3.0)},
    ),
    "Chi2": Case(lambda d, p: d.Chi2(p["df"]), {"df": (1.5, 9.0)}),
    "Exponential": Case(lambda d, p: d.Exponential(p["rate"]), {"rate": (0.3, 3.0)}),
    "LogNormal": Case(
        lambda d, p: d.LogNormal(p["loc"], p["scale"]), {"loc": (-1.0, 1.0), "scale": (0.2, 0.7)}
    ),
    "LogUniform": Case(
        lambda d, p: d.LogUniform(p["low"], p["high"]),
        {"low": (0.2, 1.0), "high": (2.0, 5.0)},
        support=("low", "high"),
        pyro=False,
    ),
    "HalfNormal": Case(lambda d, p: d.HalfNormal(p["scale"]), {"scale": (0.3, 3.0)}),
    "HalfCauchy": Case(lambda d, p: d.HalfCauchy(p["scale"]), {"scale": (0.3, 3.0)}, moments=0),
    "Pareto": Case(
        lambda d, p: d.Pareto(p["scale"], p["alpha"]),
        {"alpha": (4.5, 9.0), "scale": (0.3, 3.0)},
        support=("scale",),
    ),
    "Weibull": Case(
        lambda d, p: d.Weibull(p["scale"], p["concentration"]),
        {"concentration": (0.7, 4.0), "scale": (0.3, 3.0)},
    ),
    "Poisson": Case(lambda d, p: d.Poisson(p["rate"]), {"rate": (0.3, 9.0)}),
    "NegativeBinomial": Case(
        lambda d, p: d.GammaPoisson(p["concentration"], p["concentration"] / p["rate"]),
        {"concentration": (0.6, 5.0), "rate": (0.3, 9.0)},
    ),
    "Binomial": Case(
        lambda d, p: d.Binomial(p["total_count"], p["probs"]),
        {"total_count": (1, 12), "probs": (0.05, 0.95)},
        support=("total_count",),
        whole=("total_count",),
    ),
    "BetaBinomial": Case(
        lambda d, p: d.BetaBinomial(p["concentration1"], p["concentration0"], p["total_count"]),
        {"total_count": (1, 12), "concentration1": (0.6, 5.0), "concentration0": (0.6, 5.0)},
        support=("total_count",),
        whole=("total_count",),
    ),
    "Geometric": Case(lambda d, p: d.Geometric(p["probs"]), {"probs": (0.1, 0.9)}),
    "DiscreteUniform": Case(
        lambda d, p: d.DiscreteUniform(p["low"], p["high"]),
        {"low": (0, 3), "high": (4, 9)},
        support=("low", "high"),
        whole=("low", "high"),
        pyro=False,
    ),
}
COUNTS = [name for name in CASES if families.counts(name)]
CONTINUOUS = [name for name in CASES if name not in COUNTS]
ALONE = list(CASES)
MIXTURES = [families.MIXTURE + name for name in CASES]
INFLATED = [families.ZEROS + name for name in COUNTS]
VECTORS = ["Dirichlet", "Multinomial"]
# Those that a prediction writes out itself, but for their mixtures and with extra zeros: `test_prediction.py`.
OWN = ("Normal", "StudentT", "Laplace", "Weibull", "Poisson", "NegativeBinomial")


def test_every_family_is_tested() -> None:
    elsewhere = {"Bernoulli", "Categorical", "MultivariateNormal"}  # test_prediction
    assert set(CASES) | {"Dirichlet", "Multinomial"} == set(families.FAMILIES) - elsewhere


def parameters_of(family: str, rng: np.random.Generator, draws: int = 1, rows: int = ROWS) -> Parameters:
    """Parameters of a prediction, (S, N, ...)."""
    if family == "Dirichlet":
        return {"concentration": rng.uniform(0.6, 4.0, (draws, rows, OUTPUTS))}
    if family == "Multinomial":
        total = rng.integers(1, 12, (1, rows, 1)).astype(float)
        return {
            "total_count": np.broadcast_to(total, (draws, rows, OUTPUTS)).copy(),
            "probs": rng.dirichlet(np.ones(OUTPUTS), (draws, rows)),
        }
    case = CASES[families.base(family)]
    mixture = family.startswith(families.MIXTURE)
    shape = (draws, rows, PARTS) if mixture else (draws, rows)
    found: Parameters = {}
    if mixture:
        found["weights"] = rng.dirichlet(np.ones(PARTS), (draws, rows))
    if family.startswith(families.ZEROS):
        found["gate"] = rng.uniform(0.05, 0.8, shape)
    for name, (low, high) in case.ranges.items():
        # All of a row have one support: outside of theirs the densities of the systems are what they are.
        size = (1, rows, 1)[: len(shape)] if name in case.support else shape
        value = (
            rng.integers(int(low), int(high) + 1, size)
            if name in case.whole
            else rng.uniform(low, high, size)
        )
        if name == "low" and family.startswith(families.ZEROS):
            value = np.zeros(size)
        found[name] = np.broadcast_to(value, shape).astype(float)
    return found


@contextmanager
def session(ppl: str) -> Iterator[tuple[Any, Any, Callable[[Any], Any]]]:
    """(the distributions of a system, in float64; its arrays; a NumPy array of one of its arrays)."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        if ppl == "numpyro":
            import numpyro.distributions as found
        else:
            import pyro.distributions as found
        yield found, chosen.asarray, chosen.to_numpy


@dataclass
class _Parts:
    """A mixture of distributions of NumPyro whose support depends on their parameters, which it refuses itself."""

    parts: Any
    weights: Any

    def log_prob(self, y: Any) -> Any:
        from jax.scipy.special import logsumexp

        return logsumexp(self.parts.log_prob(y[..., None]), b=self.weights, axis=-1)

    def cdf(self, y: Any) -> Any:
        return (self.weights * self.parts.cdf(y[..., None])).sum(-1)

    def icdf(self, q: Any) -> Any:
        raise NotImplementedError

    @property
    def mean(self) -> Any:
        return (self.weights * self.parts.mean).sum(-1)

    @property
    def variance(self) -> Any:
        return (self.weights * (self.parts.variance + self.parts.mean**2)).sum(-1) - self.mean**2


def by_parts(ppl: str, family: str) -> bool:
    """Whether NumPyro refuses such a mixture itself."""
    mixture = family.startswith(families.MIXTURE)
    return ppl == "numpyro" and mixture and bool(CASES[families.base(family)].support)


def made(family: str, d: Any, p: Mapping[str, Any]) -> Any:
    """The distribution of a system that the family is one of."""
    if family == "Dirichlet":
        return d.Dirichlet(p["concentration"])
    if family == "Multinomial":
        return d.Multinomial(p["total_count"][..., 0], p["probs"])
    parts = CASES[families.base(family)].made(d, p)
    if family.startswith(families.MIXTURE):
        if by_parts(d.__name__.partition(".")[0], family):
            return _Parts(parts, p["weights"])
        return d.MixtureSameFamily(d.Categorical(probs=p["weights"]), parts)
    return d.ZeroInflatedDistribution(parts, gate=p["gate"]) if family.startswith(families.ZEROS) else parts


def has(ppl: str, family: str) -> bool:
    """Whether a system has it: Pyro's multinomial has one total for all rows."""
    if ppl == "numpyro":
        return True
    return family == "Dirichlet" or (family not in VECTORS and CASES[families.base(family)].pyro)


def targets_of(family: str, p: Parameters, rng: np.random.Generator) -> np.ndarray:
    """Values that the first draw of the parameters makes likely: (N,) or (N, K)."""
    return families.law(family, {name: value[0] for name, value in p.items()}).draw(rng).astype(float)


def asked(what: Callable[[], Any], to_numpy: Callable[[Any], Any]) -> np.ndarray | None:
    """What a system says, or None where it does not know, or where NumPyro would ask a package that is not here."""
    try:
        return np.asarray(to_numpy(what()), dtype=float)
    except (NotImplementedError, ImportError):
        return None


# --- density, distribution function, moments, quantiles ---------------------------------------------------


def systems(*names: str) -> Iterator[tuple[str, str]]:
    """(system, family)."""
    yield from ((ppl, family) for ppl in PPLS for family in names if has(ppl, family))


SYSTEMS = list(systems(*ALONE, *MIXTURES, *INFLATED, *VECTORS))
# A mixture is one and the same code for all families, and JAX compiles each for a second: those that Pyro has are
# compared with Pyro alone, and what they are of with both.
COMPARED = [
    (ppl, family)
    for ppl, family in SYSTEMS
    if ppl == "pyro" or not (family.startswith(families.MIXTURE) and has("pyro", family))
]


def accuracy(ppl: str, family: str) -> float:
    """Of a density in a system: the function betaln of JAX has six digits."""
    return (
        3e-6 if ppl == "numpyro" and families.base(family) in ("NegativeBinomial", "BetaBinomial") else 1e-10
    )


@pytest.mark.parametrize(("ppl", "family"), COMPARED)
def test_densities_moments_and_distribution_functions_are_those_of_the_system(
    ppl: str, family: str, rng: np.random.Generator
) -> None:
    p = parameters_of(family, rng)
    y = targets_of(family, p, rng)
    prediction, tolerance = Prediction(family, p), accuracy(ppl, family)
    with session(ppl) as (d, asarray, to_numpy):
        theirs = made(family, d, {name: asarray(value) for name, value in p.items()})

        def density(value: np.ndarray) -> np.ndarray:
            return np.exp(to_numpy(theirs.log_prob(asarray(value))))

        expected = to_numpy(theirs.log_prob(asarray(y)))
        mean, variance = asked(lambda: theirs.mean, to_numpy), asked(lambda: theirs.variance, to_numpy)
        below = None if family in VECTORS else asked(lambda: theirs.cdf(asarray(y)), to_numpy)
        quantile = None if family in VECTORS else asked(lambda: theirs.icdf(asarray(0.3)), to_numpy)
        if below is None and families.counts(family) and family not in VECTORS:
            below = probability_below(density, y)
        elif below is None and family not in VECTORS:
            between = probability_between(density, *prediction.quantile([0.2, 0.7]))
    np.testing.assert_allclose(prediction.component_log_prob(y), expected, rtol=tolerance, atol=tolerance)
    if family not in VECTORS and below is None:
        if families.base(family) not in KINKED:
            np.testing.assert_allclose(between, 0.5, rtol=1e-9)
    elif below is not None:
        np.testing.assert_allclose(prediction.cdf(y), below.reshape(y.shape), rtol=tolerance, atol=tolerance)
    if quantile is not None and not families.counts(family):
        np.testing.assert_allclose(prediction.quantile(0.3), quantile[0], rtol=1e-9, atol=1e-12)
    if family not in VECTORS and CASES[families.base(family)].moments == 0:
        with pytest.raises(UnsupportedError, match="a mean"):
            _ = prediction.mean
    else:
        assert mean is not None
        assert variance is not None
        np.testing.assert_allclose(prediction.component_mean(), mean, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(prediction.variance, variance[0], rtol=1e-9, atol=1e-11)


# Where a density has a kink no rule of quadrature is exact; NumPyro has the distribution function of this one.
KINKED = ("AsymmetricLaplace",)


def probability_between(
    density: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """The integral of a smooth density, by Gauss-Legendre quadrature; values have one more axis in front."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    half = 0.5 * (high - low)
    values = density(low + np.multiply.outer(nodes + 1.0, half))
    return half * np.tensordot(weights, values.reshape(60, *half.shape), 1)


def probability_below(density: Callable[[np.ndarray], np.ndarray], y: np.ndarray) -> np.ndarray:
    """The sum of the probabilities of 0, 1, ..., y; values have one more axis in front."""
    # JAX compiles for each size anew.
    upto = np.arange(max(80.0, y.max() + 1.0)).reshape(-1, *(1,) * y.ndim)
    # No count beyond y is asked for: it may be more than there are.
    mass = density(np.minimum(upto, y)).reshape(-1, *y.shape)
    return np.sum(mass * (upto <= y), axis=0)


@pytest.mark.parametrize("family", [*ALONE, *INFLATED])
def test_there_is_no_density_outside_of_the_support(family: str, rng: np.random.Generator) -> None:
    p = parameters_of(family, rng)
    values = [0.0, 1.0, 5.0, 14.0] if families.counts(family) else [-7.3, -0.4, 0.3, 0.7, 2.5, 40.0]
    with session("numpyro") as (d, asarray, to_numpy):
        theirs = made(family, d, {name: asarray(value) for name, value in p.items()})
        inside = [to_numpy(theirs.support(np.full((1, ROWS), value)))[0] for value in values]
    if family.startswith(families.ZEROS):
        inside[0] = np.ones(ROWS, dtype=bool)
    prediction = Prediction(family, p)
    for value, expected in zip(values, inside, strict=True):
        y = np.full(ROWS, value)
        np.testing.assert_array_equal(np.isfinite(prediction.log_prob(y)), np.broadcast_to(expected, ROWS))
        # Below everything, or above: the distribution function does not change on either side of it.
        outside = prediction.cdf(y)[~np.broadcast_to(expected, ROWS)]
        assert np.isin(outside, (0.0, 1.0)).all()


@pytest.mark.parametrize("family", [*ALONE, *MIXTURES, *INFLATED])
@pytest.mark.parametrize("draws", [1, 3])
def test_quantiles_invert_the_distribution_function(
    family: str, draws: int, rng: np.random.Generator
) -> None:
    prediction = Prediction(
        family, parameters_of(family, rng, draws, rows=6), np.log(rng.dirichlet(np.ones(draws)))
    )
    levels = np.array([0.01, 0.3, 0.5, 0.93])
    found = prediction.quantile(levels)
    if not families.counts(family):
        np.testing.assert_allclose(prediction.cdf(found), levels[:, None] * np.ones(6), rtol=1e-10)
        return
    # The least whole number; rounding may be on either side where the level is reached exactly.
    assert (found == np.floor(found)).all()
    assert (prediction.cdf(found) >= levels[:, None] - 1e-12).all()
    assert (prediction.cdf(found - 1.0) < levels[:, None]).all()


def test_single_outputs_of_vectors(rng: np.random.Generator) -> None:
    """A share of a Dirichlet distribution is one of a Beta distribution, a multinomial count a binomial one."""
    p, a = parameters_of("Multinomial", rng), parameters_of("Dirichlet", rng)["concentration"]
    y, of_shares = targets_of("Multinomial", p, rng), Prediction("Dirichlet", {"concentration": a})
    with session("pyro") as (d, asarray, to_numpy):
        binomial = d.Binomial(asarray(p["total_count"][0]), asarray(p["probs"][0]))
        beta = d.Beta(asarray(a[0]), asarray(a[0].sum(-1, keepdims=True) - a[0]))
        below = probability_below(lambda value: np.exp(to_numpy(binomial.log_prob(asarray(value)))), y)
        between = probability_between(
            lambda value: np.exp(to_numpy(beta.log_prob(asarray(value)))), *of_shares.quantile([0.2, 0.7])
        )
    np.testing.assert_allclose(Prediction("Multinomial", p).cdf(y), below, rtol=1e-10)
    np.testing.assert_allclose(between, 0.5, rtol=1e-9)


@pytest.mark.parametrize("family", VECTORS)
def test_covariance_of_vectors(family: str, rng: np.random.Generator) -> None:
    p = parameters_of(family, rng, draws=2, rows=3)
    means, covariances = np.empty((2, 3, OUTPUTS)), np.empty((2, 3, OUTPUTS, OUTPUTS))
    for place in np.ndindex(2, 3):
        if family == "Dirichlet":
            theirs = stats.dirichlet(p["concentration"][place])
            covariances[place] = theirs.cov()
        else:
            theirs = stats.multinomial(int(p["total_count"][place][0]), p["probs"][place])
            covariances[place] = theirs.cov()
        means[place] = theirs.mean()
    # Of two draws: the mean of the covariances, and that of what is between.
    deviation = 0.5 * (means[0] - means[1])
    expected = covariances.mean(axis=0) + deviation[..., :, None] * deviation[..., None, :]
    found = Prediction(family, p)
    np.testing.assert_allclose(found.covariance, expected, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(found.variance, np.diagonal(expected, axis1=-2, axis2=-1), rtol=1e-10)


# --- draws ------------------------------------------------------------------------------------------------

# In standard errors. Over 20 seeds the largest of all, of about 20 000, was 3.8, and none was above the bound.
BOUND = 5.5


@pytest.mark.parametrize("family", [*ALONE, *MIXTURES, *INFLATED, *VECTORS])
def test_draws_have_the_moments_and_the_distribution_function(family: str) -> None:
    assert deviations(family, 20) < BOUND


def deviations(family: str, seed: int) -> float:
    """The largest deviation of means, and of shares below a value, from what they should be."""
    rng = np.random.default_rng(seed)
    n, prediction = 4000, Prediction(family, parameters_of(family, rng, 2, rows=4), np.log([0.3, 0.7]))
    y = prediction.sample(n, rng)
    assert y.shape == (n, *prediction.shape)
    found: list[np.ndarray] = []
    for value in prediction.quantile([0.2, 0.5, 0.9]):
        share = prediction.cdf(value)
        # A count may be below a value for sure.
        spread = np.sqrt(np.maximum(share * (1.0 - share), 1e-12) / n)
        found.append((np.mean(y <= value, axis=0) - share) / spread)
    if family in VECTORS or CASES[families.base(family)].moments >= 4:
        found.append((y.mean(axis=0) - prediction.mean) / (prediction.std / np.sqrt(n)))
    return float(np.max(np.abs(found)))


# --- from a distribution that a model observes to a family -------------------------------------------------

NAMES = {families.MIXTURE + "Normal": "NormalMixture"}


def read(ppl: str, of: Callable[[Any, Mapping[str, Any]], Any], p: Parameters, shape: tuple[int, ...]) -> Any:
    """The prediction that a model is read as which observes `of(distributions, parameters)` with y of that shape."""
    with session(ppl) as (d, asarray, to_numpy):
        observed = of(d, {name: asarray(value) for name, value in p.items()})
        likelihood = native_likelihood(observed, shape)
        eta = to_numpy(native_eta(asarray(np.zeros(())), likelihood, observed, shape))
    assert likelihood.task == "regression"
    return Prediction(*likelihood.mixture_parameters(eta[None]))


def is_read_as(found: Prediction, family: str, p: Parameters) -> None:
    """p: of a single draw, in the shapes of the rows."""
    assert found.family == NAMES.get(family, family)
    assert set(found.parameters) == set(p)
    for name, value in found.parameters.items():
        np.testing.assert_allclose(value[0], p[name], rtol=1e-12, err_msg=name)


def first(p: Parameters) -> Parameters:
    return {name: value[0] for name, value in p.items()}


@pytest.mark.parametrize(("ppl", "family"), [each for each in SYSTEMS if not by_parts(*each)])
def test_an_observed_distribution_is_read_as_its_family(
    ppl: str, family: str, rng: np.random.Generator
) -> None:
    p = first(parameters_of(family, rng))
    shape = (ROWS, OUTPUTS) if family in VECTORS else (ROWS,)
    is_read_as(read(ppl, lambda d, p: made(family, d, p), p, shape), family, p)
    # One for all rows.
    single = {name: value[:1] for name, value in p.items()}
    whole = {name: np.broadcast_to(value, p[name].shape) for name, value in single.items()}
    is_read_as(read(ppl, lambda d, p: made(family, d, p), single, shape), family, whole)
    # Expanded, and masked.
    wrapped = read(ppl, lambda d, p: made(family, d, p).expand([ROWS]).mask(True), single, shape)
    is_read_as(wrapped, family, whole)


@pytest.mark.parametrize(("ppl", "family"), list(systems(*ALONE, *INFLATED)))
def test_outputs_that_are_independent(ppl: str, family: str, rng: np.random.Generator) -> None:
    p = {
        name: np.stack([value[0, :5], value[0, 5:10]], axis=-1)
        for name, value in parameters_of(family, rng).items()
    }
    is_read_as(read(ppl, lambda d, p: made(family, d, p).to_event(1), p, (5, 2)), family, p)


def logits(probs: Any) -> Any:
    return ops.log(probs) - ops.log1p(-probs)


# What else a family may be called: (label, system or None for both, family, distribution).
OTHERS: list[tuple[str, str | None, str, Callable[[Any, Any], Any]]] = [
    (
        "BinomialLogits",
        None,
        "Binomial",
        lambda d, p: d.Binomial(p["total_count"], logits=logits(p["probs"])),
    ),
    ("GeometricLogits", None, "Geometric", lambda d, p: d.Geometric(logits=logits(p["probs"]))),
    (
        "NegativeBinomialProbs",
        None,
        "NegativeBinomial",
        lambda d, p: d.NegativeBinomial(
            p["concentration"], probs=p["rate"] / (p["rate"] + p["concentration"])
        ),
    ),
    (
        "NegativeBinomialLogits",
        None,
        "NegativeBinomial",
        lambda d, p: d.NegativeBinomial(p["concentration"], logits=ops.log(p["rate"] / p["concentration"])),
    ),
    (
        "NegativeBinomial2",
        "numpyro",
        "NegativeBinomial",
        lambda d, p: d.NegativeBinomial2(p["rate"], p["concentration"]),
    ),
    (
        "BetaProportion",
        "numpyro",
        "Beta",
        lambda d, p: d.BetaProportion(
            p["concentration1"] / (p["concentration1"] + p["concentration0"]),
            p["concentration1"] + p["concentration0"],
        ),
    ),
    (
        "gate_logits",
        None,
        "Zero-inflated Poisson",
        lambda d, p: d.ZeroInflatedDistribution(d.Poisson(p["rate"]), gate_logits=logits(p["gate"])),
    ),
    (
        "ZeroInflatedPoisson",
        None,
        "Zero-inflated Poisson",
        lambda d, p: d.ZeroInflatedPoisson(rate=p["rate"], gate=p["gate"]),
    ),
    (
        "ZeroInflatedNegativeBinomial2",
        "numpyro",
        "Zero-inflated NegativeBinomial",
        lambda d, p: d.ZeroInflatedNegativeBinomial2(p["rate"], p["concentration"], gate=p["gate"]),
    ),
    (
        "ZeroInflatedNegativeBinomial",
        "pyro",
        "Zero-inflated NegativeBinomial",
        lambda d, p: d.ZeroInflatedNegativeBinomial(
            p["concentration"], probs=p["rate"] / (p["rate"] + p["concentration"]), gate=p["gate"]
        ),
    ),
    (
        "MultinomialLogits",
        "numpyro",
        "Multinomial",
        lambda d, p: d.Multinomial(p["total_count"][..., 0], logits=ops.log(p["probs"])),
    ),
    (
        "logits of a mixture",
        None,
        "Mixture of Gamma",
        lambda d, p: d.MixtureSameFamily(
            d.Categorical(logits=ops.log(p["weights"])), d.Gamma(p["concentration"], p["rate"])
        ),
    ),
]


@pytest.mark.parametrize(
    ("ppl", "label"), [(ppl, label) for label, only, _, _ in OTHERS for ppl in PPLS if only in (None, ppl)]
)
def test_other_names_of_a_family(ppl: str, label: str, rng: np.random.Generator) -> None:
    family, of = next((family, of) for each, _, family, of in OTHERS if each == label)
    p = first(parameters_of(family, rng))
    is_read_as(read(ppl, of, p, (ROWS, OUTPUTS) if family in VECTORS else (ROWS,)), family, p)


def test_multinomial_counts_of_pyro_have_one_total(rng: np.random.Generator) -> None:
    total = 7
    p = first(parameters_of("Multinomial", rng)) | {"total_count": np.full((ROWS, OUTPUTS), float(total))}
    found = read("pyro", lambda d, p: d.Multinomial(total, p["probs"]), p, (ROWS, OUTPUTS))
    is_read_as(found, "Multinomial", p)


@pytest.mark.parametrize("end", ["low", "high"])
def test_normal_distributions_that_are_truncated_at_one_end(end: str, rng: np.random.Generator) -> None:
    p = first(parameters_of("TruncatedNormal", rng))
    ours = read("numpyro", lambda d, p: d.TruncatedNormal(p["loc"], p["scale"], **{end: p[end]}), p, (ROWS,))
    y = p[end] + (0.3 if end == "low" else -0.3)
    with session("numpyro") as (d, asarray, to_numpy):
        theirs = d.TruncatedNormal(asarray(p["loc"]), asarray(p["scale"]), **{end: asarray(p[end])})
        expected = [to_numpy(each) for each in (theirs.log_prob(asarray(y)), theirs.cdf(asarray(y)))]
        moments = [to_numpy(each) for each in (theirs.mean, theirs.variance)]
    np.testing.assert_allclose(ours.log_prob(y), expected[0], rtol=1e-9)
    np.testing.assert_allclose(ours.cdf(y), expected[1], rtol=1e-9)
    np.testing.assert_allclose(ours.mean, moments[0], rtol=1e-9)
    np.testing.assert_allclose(ours.variance, moments[1], rtol=1e-7)
    np.testing.assert_allclose(ours.cdf(ours.quantile(0.4)), 0.4, rtol=1e-10)


@pytest.mark.parametrize("ppl", PPLS)
def test_what_is_no_family_is_refused_by_name(ppl: str) -> None:
    ones = np.ones((ROWS, PARTS))

    def of_zeros(d: Any, p: Any) -> Any:
        parts = d.ZeroInflatedDistribution(d.Poisson(p["rate"]), gate=p["gate"])
        return d.MixtureSameFamily(d.Categorical(probs=p["weights"]), parts)

    # Its gate would be left out.
    with pytest.raises(UnsupportedError, match="MixtureSameFamily"):
        read(ppl, of_zeros, {"weights": ones / PARTS, "gate": 0.1 * ones, "rate": ones}, (ROWS,))
    with pytest.raises(UnsupportedError, match="VonMises"):
        read(ppl, lambda d, p: d.VonMises(p["loc"], p["loc"]), {"loc": ones[:, 0]}, (ROWS,))


# --- the edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        "Zero-inflated Gamma",
        "Mixture of Zero-inflated Poisson",
        "Zero-inflated Mixture of Poisson",
        "Mixture of Mixture of Gamma",
        "Zero-inflated Dirichlet",
    ],
)
def test_a_family_has_one_prefix(family: str) -> None:
    assert not families.known(family)
    with pytest.raises(UnknownNameError, match="family"):
        Prediction(family, {"rate": np.ones((1, 1))})


@pytest.mark.parametrize(
    ("family", "name", "value", "says"),
    [
        ("Gamma", "rate", 0.0, "a positive rate"),
        ("Gamma", "concentration", -1.0, "positive concentration"),
        ("Poisson", "rate", -1.0, "not negative"),
        ("Mixture of Poisson", "rate", -1.0, "not negative"),
        ("Beta", "concentration0", 0.0, "positive concentration0"),
        ("Pareto", "alpha", 0.0, "positive alpha"),
        ("AsymmetricLaplace", "asymmetry", -1.0, "positive asymmetry"),
        ("Uniform", "high", -4.0, "high above low"),
        ("TruncatedNormal", "high", -4.0, "high above low"),
        ("LogUniform", "low", 0.0, "positive low"),
        ("DiscreteUniform", "high", 4.5, "whole numbers for low and high"),
        ("Binomial", "total_count", 2.5, "whole numbers from 0"),
        ("Zero-inflated Binomial", "total_count", -1.0, "whole numbers from 0"),
        ("Geometric", "probs", 0.0, "positive probs"),
        ("Multinomial", "total_count", 0.5, "whole numbers from 0"),
        ("Dirichlet", "concentration", 0.0, "positive concentration"),
    ],
)
def test_parameters_that_are_none_are_refused(
    family: str, name: str, value: float, says: str, rng: np.random.Generator
) -> None:
    # SciPy answers NaN.
    p = parameters_of(family, rng)
    p[name] = np.where(np.arange(p[name].size).reshape(p[name].shape) == 3, value, p[name])
    with pytest.raises(InputError, match=says):
        Prediction(family, p)


def test_whole_numbers_may_be_negative_where_the_family_says_so(rng: np.random.Generator) -> None:
    low, high = np.full((1, 5), -4.0), np.full((1, 5), 3.0)
    y = np.array([-4.0, -1.0, 0.0, 2.0, 3.0])
    plain = Prediction("DiscreteUniform", {"low": low, "high": high})
    theirs: Any = stats.randint(-4, 4)
    np.testing.assert_allclose(plain.log_prob(y), theirs.logpmf(y))
    np.testing.assert_allclose(plain.cdf(y), theirs.cdf(y))
    np.testing.assert_array_equal(plain.quantile([0.2, 0.9]), theirs.ppf([[0.2], [0.9]]) * np.ones(5))
    inflated = Prediction(
        "Zero-inflated DiscreteUniform", {"gate": np.full((1, 5), 0.3), "low": low, "high": high}
    )
    mass = np.where(np.arange(-4, 4) == 0, 0.3, 0.0) + 0.7 / 8.0
    np.testing.assert_allclose(np.exp(inflated.log_prob(y)), mass[y.astype(int) + 4])
    np.testing.assert_allclose(inflated.cdf(y), np.cumsum(mass)[y.astype(int) + 4])
    levels = np.array([0.05, 0.3, 0.5, 0.6, 0.7, 0.72, 0.99])
    expected = np.arange(-4, 4)[np.searchsorted(np.cumsum(mass), levels)]
    np.testing.assert_array_equal(inflated.quantile(levels), expected[:, None] * np.ones(5))
    with pytest.raises(InputError, match=r"counts 0, 1, 2"):
        Prediction("Poisson", {"rate": np.ones((1, 5))}).log_prob(y)
    with pytest.raises(InputError, match="y of whole numbers"):
        plain.log_prob(y + 0.5)


def test_nothing_but_zeros() -> None:
    found = Prediction("Zero-inflated Poisson", {"gate": np.ones((1, 2)), "rate": np.full((1, 2), 3.0)})
    np.testing.assert_array_equal(found.log_prob(np.array([0, 2])), [0.0, -np.inf])
    np.testing.assert_array_equal(found.quantile([0.01, 0.99]), np.zeros((2, 2)))
    np.testing.assert_array_equal(found.sample(9, 0), np.zeros((9, 2)))


def test_draws_of_vectors_at_the_edge(rng: np.random.Generator) -> None:
    # All of the gamma variables would be 0, and a share 0 / 0.
    shares = Prediction("Dirichlet", {"concentration": np.full((1, 3, 4), 1e-4)}).sample(500, 0)
    np.testing.assert_allclose(shares.sum(axis=-1), 1.0, rtol=1e-12)
    assert shares.max(axis=-1).mean() > 0.8
    # Probabilities of single precision sum to 1 within seven digits.
    probs = rng.dirichlet(np.ones(5), (1, 400)).astype(np.float32)
    probs[..., -1] = 0.0
    probs /= probs.sum(axis=-1, keepdims=True)
    assert (probs[..., :-1].astype(float).sum(axis=-1) > 1.0 + 1e-8).any()
    total = np.full((1, 400, 5), 6.0)
    drawn = Prediction("Multinomial", {"total_count": total, "probs": probs}).sample(20, 0)
    np.testing.assert_array_equal(drawn.sum(axis=-1), 6)


def prediction_of(family: str, **parameters: float | list[float]) -> Prediction:
    """A prediction of one row with a draw for each value."""
    return Prediction(
        family, {name: np.atleast_1d(value).reshape(-1, 1) for name, value in parameters.items()}
    )


def test_values_at_the_ends_of_a_distribution() -> None:
    # A time of zero has no density, whatever the shape.
    for concentration in (0.5, 1.0, 2.0):
        found = prediction_of("Weibull", concentration=concentration, scale=1.0)
        assert found.log_prob([0.0]) == -np.inf
        assert found.cdf([0.0]) == 0.0
    # Large concentrations: the variance tends to (pi scale / k)^2 / 6, which a difference of moments loses.
    for k in (1e4, 1e6):
        found = prediction_of("Weibull", concentration=k, scale=2.0)
        np.testing.assert_allclose(found.std**2, (2.0 * np.pi / k) ** 2 / 6.0, rtol=1e-3)
    assert prediction_of("Weibull", concentration=1e8, scale=2.0).std > 0.0
    # Without a mean the variance is infinite, not unknown.
    assert np.isinf(
        families.FAMILIES["StudentT"]
        .law(families.FAMILIES["StudentT"], {name: np.full((1, 1), 1.0) for name in ("df", "loc", "scale")})
        .variance()
    ).all()


@pytest.mark.parametrize(("family", "more"), [("Poisson", {}), ("NegativeBinomial", {"concentration": 3.0})])
def test_quantiles_of_counts_of_any_size(family: str, more: dict[str, float]) -> None:
    for rates in ([2.0, 5.0], [0.01, 300.0], [1.0, 1e12]):
        found = prediction_of(family, rate=rates, **{name: [value, value] for name, value in more.items()})
        for level in (0.001, 0.25, 0.5, 0.9):
            quantile = found.quantile(level)
            assert np.isfinite(quantile).all()
            assert found.cdf(quantile) >= level
            assert found.cdf(quantile - 1.0) < level
    np.testing.assert_array_equal(
        prediction_of("Poisson", rate=7.3).quantile(0.3), stats.poisson(7.3).ppf(0.3)
    )
