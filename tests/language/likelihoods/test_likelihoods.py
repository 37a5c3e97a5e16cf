"""Likelihoods beyond the first four: densities against SciPy, Fisher information against torch and quadrature."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.special import expit, logsumexp

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.prediction.prediction import Prediction

ROWS = 6
Sites = Mapping[str, np.ndarray]
FACTOR = np.array([[0.8, 0.0], [-0.5, 1.3]])
CUTS = (-0.7, 0.1, 1.4)


@dataclass(frozen=True)
class Case:
    """outputs: of the network. likelihood: made inside a model. y: targets. density: by SciPy, from f and the sites."""

    outputs: int
    likelihood: Callable[[], Any]
    y: np.ndarray
    density: Callable[[np.ndarray, np.ndarray, Sites], np.ndarray]


def halfnormal(name: str, outputs: int | None = None) -> Any:
    prior = dist.HalfNormal(1.5)
    return bnn.sample(name, prior if outputs is None else prior.expand((outputs,)).to_event())


def ordinal(f: np.ndarray, y: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    upto = np.column_stack([np.zeros(len(f)), expit(np.asarray(cuts) - f), np.ones(len(f))])
    return np.log(np.diff(upto, axis=1)[np.arange(len(f)), y])


def mixture(f: np.ndarray, y: np.ndarray, sites: Sites) -> np.ndarray:
    weights = f[:, :2] - logsumexp(f[:, :2], axis=1, keepdims=True)
    scale = np.logaddexp(0.0, f[:, 4:])
    return logsumexp(weights + scipy.stats.norm(f[:, 2:4], scale).logpdf(y[:, None]), axis=1)


def negative_binomial(f: np.ndarray, y: np.ndarray, r: Any) -> np.ndarray:
    return scipy.stats.nbinom(r, r / (r + np.exp(f[:, 0]))).logpmf(y)


def rows_of_normals(f: np.ndarray, y: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return scipy.stats.multivariate_normal(np.zeros(len(factor)), factor @ factor.T).logpdf(y - f)


def censored(law: Any, y: np.ndarray) -> np.ndarray:
    """Of rows that were observed, right-censored or left-censored."""
    value, event = y.T
    return np.select([event == 1, event == 0], [law.logpdf(value), law.logsf(value)], law.logcdf(value))


TIMES = np.array([0.4, 1.7, 0.9, 3.2, 0.05, 2.1])
BOUNDS = np.column_stack([TIMES, [1.0, 0, 1, -1, 0, -1]])
COUNTS = np.array([0.0, 1, 3, 0, 7, 2])
LABELS = np.array([0, 1, 2, 3, 1, 0])
NUMBERS = np.random.default_rng(11).normal(size=ROWS)
PAIRS = np.random.default_rng(1101).normal(size=(ROWS, 2))
CASES: dict[str, Case] = {
    "student": Case(
        1,
        lambda: likelihoods.StudentT(4.0, 0.7),
        NUMBERS,
        lambda f, y, w: scipy.stats.t(4.0, f[:, 0], 0.7).logpdf(y),
    ),
    "student sampled": Case(
        2,
        lambda: likelihoods.StudentT(halfnormal("df"), halfnormal("scale", 2)),
        PAIRS,
        lambda f, y, w: scipy.stats.t(w["df"], f, w["scale"]).logpdf(y).sum(axis=1),
    ),
    "laplace": Case(
        1,
        lambda: likelihoods.Laplace(halfnormal("scale")),
        NUMBERS,
        lambda f, y, w: scipy.stats.laplace(f[:, 0], w["scale"]).logpdf(y),
    ),
    "laplace of two outputs": Case(
        2,
        lambda: likelihoods.Laplace(0.6),
        PAIRS,
        lambda f, y, w: scipy.stats.laplace(f, 0.6).logpdf(y).sum(axis=1),
    ),
    "poisson": Case(
        1, likelihoods.Poisson, COUNTS, lambda f, y, w: scipy.stats.poisson(np.exp(f[:, 0])).logpmf(y)
    ),
    "negative binomial": Case(
        1, lambda: likelihoods.NegativeBinomial(2.5), COUNTS, lambda f, y, w: negative_binomial(f, y, 2.5)
    ),
    "negative binomial sampled": Case(
        1,
        lambda: likelihoods.NegativeBinomial(halfnormal("r")),
        COUNTS,
        lambda f, y, w: negative_binomial(f, y, w["r"]),
    ),
    "ordinal": Case(
        1, lambda: likelihoods.Ordinal(CUTS), LABELS, lambda f, y, w: ordinal(f, y, np.array(CUTS))
    ),
    "ordinal sampled": Case(
        1,
        lambda: likelihoods.Ordinal(priors.CutPoints()("cuts", 4)),
        LABELS,
        lambda f, y, w: ordinal(
            f,
            y,
            np.log(np.cumsum(w["cuts.probabilities"])[:3] / (1 - np.cumsum(w["cuts.probabilities"])[:3])),
        ),
    ),
    "ordinal of two classes": Case(
        1,
        lambda: likelihoods.Ordinal([0.3]),
        np.array([0, 1, 1, 0, 1, 0]),
        lambda f, y, w: scipy.stats.bernoulli(expit(f[:, 0] - 0.3)).logpmf(y),
    ),
    "covariance": Case(
        2,
        lambda: likelihoods.MultiOutputGaussian(FACTOR),
        PAIRS,
        lambda f, y, w: rows_of_normals(f, y, FACTOR),
    ),
    "covariance sampled": Case(
        2,
        lambda: likelihoods.MultiOutputGaussian(priors.CovarianceFactor()("noise", 2)),
        PAIRS,
        lambda f, y, w: rows_of_normals(f, y, w["noise.scale"][:, None] * w["noise.correlation"]),
    ),
    "mixture density": Case(6, likelihoods.MixtureDensity, NUMBERS, mixture),
    "weibull": Case(
        1,
        lambda: likelihoods.Weibull(1.7),
        TIMES,
        lambda f, y, w: scipy.stats.weibull_min(1.7, scale=np.exp(f[:, 0])).logpdf(y),
    ),
    "weibull sampled": Case(
        1,
        lambda: likelihoods.Weibull(halfnormal("shape")),
        TIMES,
        lambda f, y, w: scipy.stats.weibull_min(w["shape"], scale=np.exp(f[:, 0])).logpdf(y),
    ),
    "censored weibull": Case(
        1,
        lambda: likelihoods.Censored(likelihoods.Weibull(halfnormal("shape"))),
        BOUNDS,
        lambda f, y, w: censored(scipy.stats.weibull_min(w["shape"], scale=np.exp(f[:, 0])), y),
    ),
    "censored gaussian": Case(
        1,
        lambda: likelihoods.Censored(likelihoods.Gaussian(halfnormal("noise"))),
        BOUNDS,
        lambda f, y, w: censored(scipy.stats.norm(f[:, 0], w["noise"]), y),
    ),
    "censored noise of each row": Case(
        2,
        lambda: likelihoods.Censored(likelihoods.HeteroscedasticGaussian()),
        BOUNDS,
        lambda f, y, w: censored(scipy.stats.norm(f[:, 0], np.logaddexp(0.0, f[:, 1])), y),
    ),
    "censored laplace": Case(
        1,
        lambda: likelihoods.Censored(likelihoods.Laplace(0.6)),
        BOUNDS,
        lambda f, y, w: censored(scipy.stats.laplace(f[:, 0], 0.6), y),
    ),
}


def model_of(name: str) -> Any:
    """f = x + shift, with the values of the likelihood sampled: all that is not the network."""

    def model(x: Any, y: Any = None) -> None:
        shift = bnn.sample("shift", dist.Normal(0.0, 1.0))
        bnn.observe(y, x + shift, CASES[name].likelihood())

    return model


def inputs(name: str) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(ROWS, CASES[name].outputs))


# --- one density ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_density_is_that_of_scipy_and_the_same_in_both_systems(name: str) -> None:
    """Log likelihood to 1e-9 of SciPy's, log joint and its gradient to 1e-10 between the systems."""
    case, x, found = CASES[name], inputs(name), {}
    for ppl in ("pyro", "numpyro"):
        chosen = system(ppl)
        with chosen.session("float64", "cpu"):
            xs, ys = chosen.asarray(x), chosen.asarray(case.y)
            program = Program.of(chosen, model_of(name), xs, ys, language=True)
            flat = 0.6 * np.random.default_rng(2).normal(size=program.parameter_count)

            def both(flat: Any, program: Any = program, xs: Any = xs, ys: Any = ys) -> Any:
                return program.log_joint(program.unravel(flat), xs, ys)

            value, gradient = chosen.compile(chosen.value_and_grad(both))(chosen.asarray(flat))
            found[ppl] = float(value), chosen.to_numpy(gradient)
            if ppl == "pyro":
                u = program.unravel(chosen.asarray(flat))
                prior = float(program.log_prior(u, xs, ys))
                w = {site: chosen.to_numpy(v) for site, v in program.constrain(u, xs, ys).items()}
                density = case.density(x + w["shift"], case.y, w).sum()
                np.testing.assert_allclose(found[ppl][0] - prior, density, rtol=1e-9)
    np.testing.assert_allclose(found["numpyro"][0], found["pyro"][0], rtol=1e-10)
    largest = np.abs(found["pyro"][1]).max()
    np.testing.assert_allclose(found["numpyro"][1], found["pyro"][1], rtol=1e-10, atol=1e-10 * largest)


def sampled_values(name: str) -> tuple[Any, Sites]:
    """The likelihood with values in NumPy, and these values."""
    values = {
        "student sampled": {"df": np.array(3.5), "scale": np.array([0.7, 1.9])},
        "laplace": {"scale": np.array(0.4)},
        "negative binomial sampled": {"r": np.array(1.7)},
        "ordinal sampled": {"cuts.probabilities": np.array([0.1, 0.3, 0.4, 0.2])},
        "covariance sampled": {
            "noise.scale": np.array([0.5, 2.0]),
            "noise.correlation": np.array([[1.0, 0.0], [0.6, 0.8]]),
        },
        "weibull sampled": {"shape": np.array(1.4)},
        "censored weibull": {"shape": np.array(0.8)},
        "censored gaussian": {"noise": np.array(0.7)},
    }.get(name, {})
    likelihood = CASES[name].likelihood
    if name == "student sampled":
        return likelihoods.StudentT(values["df"], values["scale"]), values
    if name == "laplace":
        return likelihoods.Laplace(values["scale"]), values
    if name == "negative binomial sampled":
        return likelihoods.NegativeBinomial(values["r"]), values
    if name == "weibull sampled":
        return likelihoods.Weibull(values["shape"]), values
    if name == "censored weibull":
        return likelihoods.Censored(likelihoods.Weibull(values["shape"])), values
    if name == "censored gaussian":
        return likelihoods.Censored(likelihoods.Gaussian(values["noise"])), values
    if name == "ordinal sampled":
        below = np.cumsum(values["cuts.probabilities"])[:3]
        return likelihoods.Ordinal(np.log(below / (1 - below))), values
    if name == "covariance sampled":
        return likelihoods.MultiOutputGaussian(
            values["noise.scale"][:, None] * values["noise.correlation"]
        ), values
    return likelihood(), values


@pytest.mark.parametrize("name", CASES)
def test_a_prediction_has_the_density_of_the_likelihood(name: str) -> None:
    """Through eta and the likelihood's form, for two draws at once; and f is where the predictor says."""
    case, f = CASES[name], inputs(name)
    likelihood, values = sampled_values(name)
    likelihood.check(f.shape, case.y.shape)
    eta = np.stack([likelihood.predictor(f), likelihood.predictor(f - 0.3)])
    family, parameters = likelihood.form.mixture_parameters(eta)
    prediction = Prediction(family, parameters)
    expected = np.stack([case.density(f, case.y, values), case.density(f - 0.3, case.y, values)])
    np.testing.assert_allclose(prediction.component_log_prob(case.y), expected, rtol=1e-10)


# --- Fisher information -----------------------------------------------------------------------------------
# The oracle: torch's densities as functions of eta, differentiated by torch at nodes of y, and an exact or
# exponentially convergent rule over y.


def torch_density(name: str, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    d = torch.distributions
    if name.startswith("student"):
        df = eta[:, 2].exp() if name == "student sampled" else torch.tensor(4.0, dtype=eta.dtype)
        return d.StudentT(df, eta[:, 0], eta[:, 1].exp()).log_prob(y)
    if name == "laplace":
        return d.Laplace(eta[:, 0], eta[:, 1].exp()).log_prob(y)
    if name.startswith("weibull"):
        k = eta[:, 1].exp() if name.endswith("sampled") else torch.full_like(eta[:, 0], 1.7)
        return d.Weibull(eta[:, 0].exp(), k).log_prob(y)
    if name == "poisson":
        return d.Poisson(eta[:, 0].exp()).log_prob(y)
    if name.startswith("negative"):
        log_r = eta[:, 1] if name.endswith("sampled") else torch.full_like(eta[:, 0], math.log(2.5))
        return d.NegativeBinomial(log_r.exp(), logits=eta[:, 0] - log_r).log_prob(y)
    if name.startswith("ordinal"):
        cuts = torch.cumsum(torch.cat([eta[:, 1:2], eta[:, 2:].exp()], dim=1), dim=1)
        upto = torch.sigmoid(cuts - eta[:, :1])
        none, all_ = torch.zeros_like(upto[:, :1]), torch.ones_like(upto[:, :1])
        shares = torch.diff(torch.cat([none, upto, all_], dim=1), dim=1)
        return shares.gather(1, y.long()[:, None])[:, 0].log()
    if name.startswith("covariance"):
        k = 2
        factor = torch.diag_embed(eta[:, k : 2 * k].exp())
        factor[:, 1, 0] = eta[:, 2 * k]
        return d.MultivariateNormal(eta[:, :k], scale_tril=factor).log_prob(y)
    parts = d.Normal(eta[:, 2:4], eta[:, 4:].exp())
    return d.MixtureSameFamily(d.Categorical(logits=eta[:, :2]), parts).log_prob(y)


def rule(name: str, eta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes y and weights with sum_j w_j g(y_j) = E[g(y)] under p(y | eta), for one row eta."""
    if name.startswith("ordinal"):
        labels = np.arange(len(eta))
        cuts = np.cumsum([eta[1], *np.exp(eta[2:])])
        return labels, np.exp(ordinal(np.full((len(eta), 1), eta[0]), labels, cuts))
    if name == "poisson" or name.startswith("negative"):
        counts = np.arange(0.0, 3000.0)
        if name == "poisson":
            return counts, scipy.stats.poisson(math.exp(eta[0])).pmf(counts)
        r = math.exp(eta[1]) if name.endswith("sampled") else 2.5
        return counts, scipy.stats.nbinom(r, r / (r + math.exp(eta[0]))).pmf(counts)
    if name.startswith("covariance"):
        z, w = np.polynomial.hermite_e.hermegauss(6)
        factor = np.array([[math.exp(eta[2]), 0.0], [eta[4], math.exp(eta[3])]])
        grid = np.stack(np.meshgrid(z, z, indexing="ij"), -1).reshape(-1, 2)
        return eta[:2] + grid @ factor.T, np.outer(w, w).ravel() / (2 * math.pi)
    if name == "laplace":
        z, w = np.polynomial.laguerre.laggauss(12)
        return eta[0] + math.exp(eta[1]) * np.concatenate([z, -z]), 0.5 * np.concatenate([w, w])
    if name.startswith("weibull"):
        # With k (log y - f) = z the density of z is exp(z - exp(z)).
        z = np.arange(-40.0, 4.5, 0.02)
        k = math.exp(eta[1]) if name.endswith("sampled") else 1.7
        return np.exp(eta[0] + z / k), np.exp(z - np.exp(z)) * 0.02
    # Trapezium in t with y = sinh t: exponentially convergent for smooth densities with algebraic tails too.
    t = np.arange(-25.0, 25.0, 0.01)
    y = np.sinh(t)
    if name == "mixture density":
        return y, np.exp(mixture_of_eta(eta, y)) * np.cosh(t) * 0.01
    df = math.exp(eta[2]) if name == "student sampled" else 4.0
    y = eta[0] + math.exp(eta[1]) * y
    return y, scipy.stats.t(df, eta[0], math.exp(eta[1])).pdf(y) * math.exp(eta[1]) * np.cosh(t) * 0.01


def mixture_of_eta(eta: np.ndarray, y: np.ndarray) -> np.ndarray:
    weights = eta[:2] - logsumexp(eta[:2])
    return logsumexp(weights + scipy.stats.norm(eta[2:4], np.exp(eta[4:])).logpdf(y[:, None]), axis=1)


ETA: dict[str, np.ndarray] = {
    "student": np.array([[0.3, -0.7], [-1.0, 0.4]]),
    "student sampled": np.array([[0.3, -0.7, 1.2], [-1.0, 0.4, 2.5]]),
    "laplace": np.array([[0.3, -0.7], [-1.0, 0.4]]),
    "poisson": np.array([[-2.0], [1.5]]),
    "negative binomial": np.array([[-2.0], [1.5]]),
    "negative binomial sampled": np.array([[-2.0, 0.3], [1.5, -1.0], [3.0, 2.0]]),
    "ordinal": np.array([[0.4, -0.7, -0.2, 0.3], [-2.0, -0.7, -0.2, 0.3]]),
    "ordinal sampled": np.array([[0.4, -0.5, -2.3, 1.2], [5.0, -1.0, 0.0, 0.7]]),
    "ordinal of two classes": np.array([[0.4, 0.3]]),
    "weibull": np.array([[0.3], [-1.0]]),
    "weibull sampled": np.array([[0.3, 0.6], [-1.0, -0.5]]),
    "covariance": np.array([[0.3, -1.0, -0.2, 0.4, 0.9]]),
    "mixture density": np.array([[0.3, -0.4, -1.0, 1.5, -0.3, 0.2]]),
}


@pytest.mark.parametrize("name", ETA)
def test_scores_are_torchs_gradients_and_fisher_is_their_covariance(name: str) -> None:
    likelihood, _ = sampled_values(name)
    form, eta = likelihood.form, ETA[name]
    for row in eta:
        y, weights = rule(name, row)
        np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-10)
        leaf = torch.tensor(np.tile(row, (len(y), 1)), requires_grad=True)
        torch_density(name, leaf, torch.as_tensor(y)).sum().backward()
        assert leaf.grad is not None
        scores = leaf.grad.numpy()
        ours = form.score(np.tile(row, (len(y), 1)), y)
        np.testing.assert_allclose(ours, scores, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(weights @ ours, 0.0, atol=1e-9)
        if name == "mixture density":
            continue
        expected = np.einsum("j,ja,jb->ab", weights, scores, scores)
        # Nine digits: those that quadrature and differentiation leave.
        fisher = form.fisher(row[None])[0]
        np.testing.assert_allclose(fisher, expected, rtol=1e-8, atol=1e-9 * np.abs(expected).max())
        root = form.fisher_root(row[None])[0]
        np.testing.assert_allclose(root @ root.T, fisher, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mean", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("r", [1e-2, 1.0, 30.0])
def test_information_about_a_concentration(mean: float, r: float) -> None:
    """Against r^2 sum_j P(y > j) / (r + j)^2 - r m / (r + m), the same expectation as a sum over counts."""
    j = np.arange(0.0, 200_000.0)
    tail = scipy.stats.nbinom(r, r / (r + mean)).sf(j)
    expected = r**2 * np.sum(tail / (r + j) ** 2) - r * mean / (r + mean)
    eta = np.array([[math.log(mean), math.log(r)]])
    found = likelihoods.NegativeBinomial(None).fisher(eta)[0, 1, 1]
    # The sum loses digits where it is a small difference.
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-13 * r)


def test_what_is_hardly_known_is_nothing_but_never_negative() -> None:
    eta = np.array([[0.0, 25.0], [-30.0, 10.0]])
    assert np.isfinite(likelihoods.NegativeBinomial(None).fisher_root(eta)).all()
    assert np.isfinite(likelihoods.StudentT(None, None).fisher_root(np.array([[0.0, 0.0, 25.0]]))).all()
    far = np.array([[800.0, -1.0, 0.0, 1.0], [-800.0, -1.0, 0.0, 1.0]])
    assert np.isfinite(likelihoods.Ordinal(None, 4).fisher(far)).all()
    assert np.isfinite(likelihoods.Ordinal(None, 4).score(far, np.array([3, 0]))).all()


@pytest.mark.parametrize(
    "name", ["student sampled", "negative binomial sampled", "ordinal", "covariance", "weibull sampled"]
)
def test_fisher_and_score_are_the_same_in_both_systems(ppl: str, name: str) -> None:
    form, eta = sampled_values(name)[0].form, ETA[name][:1]
    y = np.array([[0.2, 0.7]]) if name == "covariance" else np.array([1.0])
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        both = chosen.compile(lambda eta, y: (form.fisher_root(eta), form.score(eta, y)))
        root, score = map(chosen.to_numpy, both(chosen.asarray(eta), chosen.asarray(y)))
    # torch's trigamma function has nine digits.
    np.testing.assert_allclose(root, form.fisher_root(eta), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(score, form.score(eta, y), rtol=1e-10, atol=1e-12)


# --- under a method ---------------------------------------------------------------------------------------


def poisson_regression(x: Any, y: Any = None) -> None:
    w = bnn.sample("w", dist.Normal(0.0, 0.8).expand((2, 1)).to_event())
    bnn.observe(y, bnn.linear("out", x, w), likelihoods.Poisson())


def test_poisson_regression_is_that_of_scikit_learn() -> None:
    """Its mode is a ridge estimate with penalty 1 / 0.8^2, and the Laplace precision X' diag(rate) X + 1 / 0.8^2."""
    from sklearn.linear_model import PoissonRegressor

    x = np.random.default_rng(0).normal(size=(60, 2))
    y = np.random.default_rng(1).poisson(np.exp(x @ [0.7, -0.4]))
    posterior = bnn.Laplace(ppl="pyro", steps=300).fit(poisson_regression, x, y, progress=False)
    reference = PoissonRegressor(alpha=1 / (60 * 0.8**2), fit_intercept=False, tol=1e-10, max_iter=1000).fit(
        x, y
    )
    mode = posterior.approximation.centre()["w"][:, 0]
    np.testing.assert_allclose(mode, reference.coef_, rtol=1e-5)
    precision = x.T @ (np.exp(x @ mode)[:, None] * x) + np.eye(2) / 0.8**2
    np.testing.assert_allclose(posterior.approximation.covariance.precision(), precision, rtol=1e-6)
    prediction = posterior.predict(x[:3])
    assert prediction.family == "Poisson"


@pytest.mark.parametrize("name", ["ordinal", "ordinal sampled"])
def test_ordered_classes_are_fitted(name: str) -> None:
    posterior = bnn.Laplace(ppl="pyro", steps=50).fit(
        model_of(name), inputs(name), CASES[name].y, progress=False
    )
    prediction = posterior.predict(inputs(name))
    assert prediction.probabilities.shape == (ROWS, len(CUTS) + 1)
    np.testing.assert_allclose(prediction.probabilities.sum(axis=1), 1.0, rtol=1e-12)


def test_counts_keep_their_units() -> None:
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(20, 2))
    y = np.random.default_rng(1).poisson(4.0, size=20)
    posterior = bnn.fit(
        poisson_regression, x, y, bnn.MAP(ppl="pyro", steps=3, polish=False), standardise=True
    )
    assert posterior.standardisation is not None
    assert posterior.standardisation.y_mean is None
    assert posterior.predict(x).is_counts
    for wrong in (y - 10, y + 0.5):
        with pytest.raises(InputError, match="0, 1, 2"):
            bnn.fit(poisson_regression, x, wrong, bnn.MAP(ppl="pyro", steps=3))


def test_a_mixture_density_has_no_exact_fisher_information() -> None:
    case = CASES["mixture density"]
    with pytest.raises(UnsupportedError, match="sampled"):
        bnn.fit(model_of("mixture density"), inputs("mixture density"), case.y, bnn.Laplace(ppl="pyro"))


def test_outputs_of_one_row_stay_correlated_in_a_joint_prediction() -> None:
    """The noise over all rows is the block L L' for each of them, on the diagonal."""
    case, x = CASES["covariance"], inputs("covariance")
    posterior = bnn.fit(model_of("covariance"), x, case.y, bnn.SVI(ppl="pyro", steps=5, elbo_draws=2))
    joint = posterior.joint(x, draws=200)
    prediction = posterior.predict(x, draws=200)
    functions = np.cov(prediction.component_mean().reshape(200, -1), rowvar=False)
    noise = np.kron(np.eye(ROWS), FACTOR @ FACTOR.T)
    np.testing.assert_allclose(joint.covariance - functions, noise, atol=1e-10)


# --- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: likelihoods.StudentT(df=-1.0), InputError, "a positive df"),
        (lambda: likelihoods.StudentT(scale=0.0), InputError, "a positive scale"),
        (lambda: likelihoods.Laplace(math.nan), InputError, "a positive scale"),
        (lambda: likelihoods.NegativeBinomial(-2.0), InputError, "a positive concentration"),
        (lambda: likelihoods.Ordinal([0.0, 0.0]), InputError, "cut points that increase"),
        (lambda: likelihoods.Ordinal(np.zeros((2, 2))), InputError, r"shape \(C - 1,\)"),
        (lambda: likelihoods.Ordinal([0.0, 1.0], classes=2), InputError, "3 classes"),
        (lambda: likelihoods.MultiOutputGaussian(np.ones((2, 2))), InputError, "lower triangular"),
        (lambda: likelihoods.MultiOutputGaussian(np.eye(3)).check((5, 2), None), ModelError, r"\(2, 2\)"),
        (lambda: likelihoods.MultiOutputGaussian(np.eye(1)).check((5, 1), None), ModelError, "K >= 2"),
        (
            lambda: likelihoods.StudentT(np.ones(3)).check((5, 2), None),
            ModelError,
            "one df, or one per output",
        ),
        (lambda: likelihoods.Poisson().check((5, 2), None), ModelError, "the log rate"),
        (lambda: likelihoods.Poisson().check((5, 1), (5, 1)), ModelError, r"y\[:, 0\]"),
        (lambda: likelihoods.Ordinal([0.0]).check((5, 2), None), ModelError, "one network output"),
        (lambda: likelihoods.MixtureDensity().check((5, 4), None), ModelError, "3 M network outputs"),
        (lambda: likelihoods.MixtureDensity().check((5, 3), None), ModelError, "HeteroscedasticGaussian"),
        (lambda: likelihoods.MixtureDensity().fisher(np.zeros((1, 6))), UnsupportedError, "fisher='sampled'"),
        (lambda: likelihoods.Poisson().check_values(np.array([0.0, -1.0])), InputError, "counts 0, 1, 2"),
        (lambda: likelihoods.NegativeBinomial().check_values(np.array([0.5])), InputError, "0.5"),
        (lambda: likelihoods.Weibull(-1.0), InputError, "a positive shape"),
        (lambda: likelihoods.Weibull().check((5, 2), None), ModelError, "the log scale"),
        (lambda: likelihoods.Weibull(np.ones(3)).check((5, 1), None), ModelError, "one shape"),
        (lambda: likelihoods.Weibull().check_values(np.array([1.0, 0.0])), InputError, "0 in row 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_bound_form_knows_all_that_a_prediction_needs() -> None:
    """Forms hold no value of a run, and plain numbers that are known."""
    assert likelihoods.StudentT(5.0, np.ones(2)).form == likelihoods.StudentT(5.0, None)
    assert likelihoods.StudentT(np.array(5.0), 1.0).form == likelihoods.StudentT(None, None)
    assert likelihoods.NegativeBinomial(3.0).form.concentration == 3.0
    assert likelihoods.Weibull(3.0).form == likelihoods.Weibull(3.0)
    assert likelihoods.Weibull(np.float64(3.0)).form.shape is None
    assert likelihoods.Censored(likelihoods.Gaussian(0.3)).form == likelihoods.Censored(
        likelihoods.Gaussian(None)
    )
    # A single draw of a scalar is a number of NumPy, and sampled all the same.
    assert likelihoods.NegativeBinomial(np.float64(3.0)).form.concentration is None
    assert likelihoods.StudentT(np.float64(3.0)).predictor(np.zeros((2, 1))).shape == (2, 3)
    assert likelihoods.Ordinal([0.0, 1.0]).form == likelihoods.Ordinal(None, 3)
    bound = functools.partial(likelihoods.Laplace, 0.3)
    assert bound().form.scale is None


@pytest.mark.parametrize(
    "name", ["ordinal sampled", "covariance", "student sampled", "mixture density", "weibull sampled"]
)
def test_every_predictor_is_one_of_a_distribution(name: str) -> None:
    """A linearised network is a Gaussian over eta: cut points stay in order and factors factors, wherever it is."""
    eta = np.random.default_rng(0).normal(scale=3.0, size=(50, 4, ETA[name].shape[1]))
    form = sampled_values(name)[0].form
    prediction = Prediction(*form.mixture_parameters(eta))
    assert np.isfinite(prediction.parameters[next(iter(prediction.parameters))]).all()


def derivative(log_density: Any, eta: np.ndarray) -> np.ndarray:
    """Central differences of a log density (N,) along each column of eta (N, D)."""
    step = 1e-6
    moves = step * np.eye(eta.shape[1])
    return np.stack(
        [(log_density(eta + move) - log_density(eta - move)) / (2 * step) for move in moves], axis=1
    )


def test_scores_of_the_plain_likelihoods_are_derivatives_of_scipys_densities(
    rng: np.random.Generator,
) -> None:
    label, number = np.array([0, 1, 1, 0, 1]), rng.normal(size=5)
    logit, both, logits = rng.normal(size=(5, 1)), rng.normal(size=(5, 2)), rng.normal(size=(5, 3))
    classes = np.array([0, 2, 1, 1, 0])
    for score, log_density, eta in (
        (
            likelihoods.Bernoulli().score(logit, label),
            lambda eta: scipy.stats.bernoulli(expit(eta[:, 0])).logpmf(label),
            logit,
        ),
        (
            likelihoods.Gaussian(None).score(both, number),
            lambda eta: scipy.stats.norm(eta[:, 0], np.exp(eta[:, 1])).logpdf(number),
            both,
        ),
        (
            likelihoods.Categorical().score(logits, classes),
            lambda eta: (eta - logsumexp(eta, axis=1, keepdims=True))[np.arange(5), classes],
            logits,
        ),
    ):
        # Central differences leave eight digits.
        np.testing.assert_allclose(score, derivative(log_density, eta), rtol=1e-7, atol=1e-8)
