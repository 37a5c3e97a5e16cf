"""Rows of which a bound is known and not the value: tails, scores and information, fits, predictions and their scores.

That their densities are SciPy's in both systems is tested with those of all likelihoods.
"""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from scipy.special import digamma, polygamma

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, scores
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.diagnostics.importance import leave_one_out
from ppl_bnn.language.distributions import censored_log_prob
from ppl_bnn.prediction.prediction import Prediction

OBSERVED, RIGHT, LEFT = 1.0, 0.0, -1.0

# --- tails ------------------------------------------------------------------------------------------------

# Family -> arguments, points from one far tail to the other, SciPy's.
FAR: dict[str, tuple[dict[str, float], np.ndarray, Any]] = {
    "Normal": (
        {"loc": 0.3, "scale": 0.5},
        0.3 + 0.5 * np.array([-30.0, -21.0, -5.0, -1.0, 0.1, 1.0, 8.0, 21.0, 40.0]),
        scipy.stats.norm(0.3, 0.5),
    ),
    "Laplace": (
        {"loc": 0.3, "scale": 0.5},
        np.array([-300.0, -3.0, 0.29, 0.31, 4.0, 300.0]),
        scipy.stats.laplace(0.3, 0.5),
    ),
    "Weibull": (
        {"scale": 2.0, "concentration": 1.5},
        np.array([1e-60, 1e-12, 1e-5, 0.3, 2.0, 5.0, 19.0]),
        scipy.stats.weibull_min(1.5, scale=2.0),
    ),
}


def rows_of(values: np.ndarray, event: float) -> np.ndarray:
    return np.column_stack([values, np.full(len(values), event)])


def log_below(family: str, law: Any, value: np.ndarray) -> np.ndarray:
    """SciPy's, but for the Weibull distribution, of which it takes the logarithm of a difference."""
    if family == "Weibull":
        u = (value / 2.0) ** 1.5
        return np.where(u < 0.7, np.log(-np.expm1(-u)), np.log1p(-np.exp(-np.maximum(u, 0.5))))
    return law.logcdf(value)


@pytest.mark.parametrize("family", FAR)
@pytest.mark.parametrize("where", ["numpy", "pyro", "numpyro"])
def test_tails_keep_their_digits_far_out(family: str, where: str) -> None:
    """Log probabilities against SciPy, and their derivatives in the location (of log scale) against its hazards."""
    arguments, value, law = FAR[family]
    name = "scale" if family == "Weibull" else "loc"
    below = log_below(family, law, value)
    y = np.concatenate([rows_of(value, event) for event in (OBSERVED, RIGHT, LEFT)])
    expected = np.concatenate([law.logpdf(value), law.logsf(value), below])
    if where == "numpy":
        np.testing.assert_allclose(censored_log_prob(family, arguments, y), expected, rtol=1e-12)
        return
    chosen = system(where)
    with chosen.session("float64", "cpu"):

        def each(at: Any, ys: Any) -> Any:
            return censored_log_prob(family, {**arguments, name: at}, ys)

        def total(at: Any, ys: Any) -> Any:
            return each(at, ys).sum()

        def everything(at: Any, ys: Any) -> Any:
            _, gradient = chosen.value_and_grad(total)(at, ys)
            return each(at, ys), gradient, chosen.hessian(total)(at, ys)

        at = chosen.asarray(np.full(len(y), arguments[name]))
        found, gradient, second = map(chosen.to_numpy, chosen.compile(everything)(at, chosen.asarray(y)))
    # JAX takes the logarithm of a probability near one, which is known to its last digit.
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-15)
    assert np.isfinite(second).all()
    # A shift of the location moves the bound the other way; a time is shifted in proportion to itself.
    shift = value / 2.0 if family == "Weibull" else 1.0
    right, left = gradient[len(value) :].reshape(2, -1)
    np.testing.assert_allclose(right, shift * np.exp(law.logpdf(value) - law.logsf(value)), rtol=1e-9)
    np.testing.assert_allclose(left, -shift * np.exp(law.logpdf(value) - below), rtol=1e-9)


def test_a_part_that_overflows_leaves_no_trace_in_other_rows() -> None:
    """That a Weibull time is above 1e300 has no probability; that it is below is certain, and has a gradient."""
    y = torch.tensor([[1.0, RIGHT], [1e300, LEFT]], dtype=torch.float64)
    scale = torch.ones(2, dtype=torch.float64, requires_grad=True)
    found = censored_log_prob("Weibull", {"scale": scale, "concentration": 5.0}, y)
    found.sum().backward()
    assert found.tolist() == [-1.0, 0.0]
    assert scale.grad is not None
    assert scale.grad.tolist() == [5.0, 0.0]
    impossible = torch.tensor([[1e300, RIGHT]], dtype=torch.float64)
    arguments = {"scale": scale[:1], "concentration": 5.0}
    assert censored_log_prob("Weibull", arguments, impossible).item() == -math.inf


# --- scores and information -------------------------------------------------------------------------------

ETA = {
    "gaussian": (likelihoods.Gaussian(None), np.array([0.3, -0.4])),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian(), np.array([-0.5, 0.6])),
    "laplace": (likelihoods.Laplace(None), np.array([0.2, 0.3])),
    "weibull": (likelihoods.Weibull(None), np.array([0.4, 0.5])),
    "weibull known": (likelihoods.Weibull(0.8), np.array([0.4])),
}
WITH_INFORMATION = [name for name in ETA if name != "laplace"]


def torch_log_prob(name: str, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of rows (value, event), from torch's own special functions and distributions."""
    value, event = y.T
    if name.startswith("weibull"):
        k = torch.full_like(eta[:, 0], 0.8) if name == "weibull known" else eta[:, 1].exp()
        law: Any = torch.distributions.Weibull(eta[:, 0].exp(), k)
        above = -((value / eta[:, 0].exp()) ** k)
        below = torch.log(-torch.expm1(above))
    elif name == "laplace":
        law = torch.distributions.Laplace(eta[:, 0], eta[:, 1].exp())
        below, above = law.cdf(value).log(), (1.0 - law.cdf(value)).log()
    else:
        law = torch.distributions.Normal(eta[:, 0], eta[:, 1].exp())
        z = (value - eta[:, 0]) / eta[:, 1].exp()
        above, below = torch.special.log_ndtr(-z), torch.special.log_ndtr(z)
    return torch.where(event > 0, law.log_prob(value), torch.where(event == 0, above, below))


def torch_scores(name: str, row: np.ndarray, y: np.ndarray) -> np.ndarray:
    leaf = torch.tensor(np.tile(row, (len(y), 1)), requires_grad=True)
    torch_log_prob(name, leaf, torch.as_tensor(y)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.numpy()


def value_of(name: str, row: np.ndarray, z: np.ndarray) -> np.ndarray:
    if name.startswith("weibull"):
        return np.exp(row[0] + z / (0.8 if name == "weibull known" else math.exp(row[1])))
    return row[0] + math.exp(row[1]) * z


@functools.cache
def legendre() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(200)


def rule(name: str, row: np.ndarray, bound: float, event: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows y and weights for E[g(y)] under p(y | eta), every value beyond the bound (in z) being censored there."""
    if name.startswith("weibull"):
        density, lowest, highest = lambda z: np.exp(z - np.exp(z)), -40.0, 4.5
        below = -math.expm1(-math.exp(bound))
    else:
        density, lowest, highest = scipy.stats.norm.pdf, -12.0, 12.0
        below = float(scipy.stats.norm.cdf(bound))
    low, high = (lowest, bound) if event == RIGHT else (bound, highest)
    nodes, weights = legendre()
    z = low + 0.5 * (high - low) * (nodes + 1.0)
    y = np.concatenate(
        [rows_of(value_of(name, row, z), OBSERVED), rows_of(value_of(name, row, np.array([bound])), event)]
    )
    weights = np.append(0.5 * (high - low) * weights * density(z), 1.0 - below if event == RIGHT else below)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-9)
    return y, weights


@pytest.mark.parametrize("name", ETA)
def test_scores_are_torchs_gradients(name: str) -> None:
    base, row = ETA[name]
    z = np.array([-3.0, -0.7, 0.2, 0.9, 1.6])
    value = value_of(name, row, z)
    y = np.concatenate([rows_of(value, event) for event in (OBSERVED, RIGHT, LEFT)])
    ours = likelihoods.Censored(base).score(np.tile(row, (len(y), 1)), y)
    np.testing.assert_allclose(ours, torch_scores(name, row, y), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", WITH_INFORMATION)
@pytest.mark.parametrize(("bound", "event"), [(-0.8, RIGHT), (0.9, RIGHT), (-0.5, LEFT), (1.1, LEFT)])
def test_information_has_the_mean_that_it_should_have(name: str, bound: float, event: float) -> None:
    """Whatever censors: the mean of what each row tells is the Fisher information of the censored values, the
    covariance of torch's gradients, and that of the values themselves is never less."""
    base, row = ETA[name]
    likelihood = likelihoods.Censored(base)
    y, weights = rule(name, row, bound, event)
    gradients = torch_scores(name, row, y)
    fisher = np.einsum("j,ja,jb->ab", weights, gradients, gradients)
    root = likelihood.information_root(np.tile(row, (len(y), 1)), y)
    found = np.einsum("j,jac,jbc->ab", weights, root, root)
    np.testing.assert_allclose(found, fisher, rtol=1e-8, atol=1e-8 * np.abs(fisher).max())
    whole = likelihood.fisher(row[None])[0]
    np.testing.assert_allclose(whole, base.fisher(row[None])[0], rtol=1e-14)
    hidden = np.linalg.eigvalsh(whole - fisher)
    assert hidden[0] > -1e-8
    # Something is hidden: most of what there was where most values are.
    assert hidden[-1] > 0.01 * np.linalg.eigvalsh(whole)[-1]


@pytest.mark.parametrize("name", WITH_INFORMATION)
def test_information_is_minus_the_second_derivative_in_f(name: str) -> None:
    """Exactly, row by row, as f is one of the coordinates in which the log likelihood is concave; torch's Hessian."""
    base, row = ETA[name]
    y = np.concatenate(
        [
            rows_of(value_of(name, row, np.array([-4.0, -0.3, 0.8, 1.5])), event)
            for event in (OBSERVED, RIGHT, LEFT)
        ]
    )
    root = likelihoods.Censored(base).information_root(np.tile(row, (len(y), 1)), y)
    for index, one in enumerate(y):
        target = torch.as_tensor(one[None])
        hessian = torch.autograd.functional.hessian(
            lambda f, target=target: torch_log_prob(
                name, torch.cat([f, torch.as_tensor(row[1:])])[None], target
            ).sum(),
            torch.as_tensor(row[:1]),
        )
        assert isinstance(hessian, torch.Tensor)
        np.testing.assert_allclose(np.sum(root[index, 0] ** 2), -hessian.item(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", WITH_INFORMATION)
def test_information_far_out_is_finite_and_tends_to_what_a_value_tells(name: str) -> None:
    base, row = ETA[name]
    z = (
        np.array([-700.0, -60.0, -49.0, 49.0, 51.0, 1e4, 1e7])
        if not name.startswith("weibull")
        else np.array([-300.0, 5.0])
    )
    for event in (OBSERVED, RIGHT, LEFT):
        y = rows_of(value_of(name, row, z), event)
        root = likelihoods.Censored(base).information_root(np.tile(row, (len(y), 1)), y)
        assert np.isfinite(root).all()
    if not name.startswith("weibull"):
        # Far beyond f the value, if it is larger still, is just about the bound.
        y = rows_of(value_of(name, row, np.array([49.9, 50.1, 1e7])), RIGHT)
        weight = np.sum(likelihoods.Censored(base).information_root(np.tile(row, (3, 1)), y)[:, 0] ** 2, -1)
        weight = weight * math.exp(2.0 * row[1])
        np.testing.assert_allclose(weight, 1.0 - 1.0 / np.array([49.9, 50.1, 1e7]) ** 2, rtol=1e-5)
        np.testing.assert_allclose(weight[0], weight[1], rtol=1e-5)


def test_score_and_information_are_the_same_in_both_systems(ppl: str) -> None:
    chosen = system(ppl)
    for name in ("gaussian", "weibull"):
        likelihood, row = likelihoods.Censored(ETA[name][0]), ETA[name][1]
        y = np.concatenate(
            [rows_of(value_of(name, row, np.array([-1.0, 0.7])), event) for event in (OBSERVED, RIGHT, LEFT)]
        )
        eta = np.tile(row, (len(y), 1))
        with chosen.session("float64", "cpu"):
            both = chosen.compile(
                lambda eta, y, of=likelihood: (of.information_root(eta, y), of.score(eta, y))
            )
            root, score = map(chosen.to_numpy, both(chosen.asarray(eta), chosen.asarray(y)))
        np.testing.assert_allclose(root, likelihood.information_root(eta, y), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(score, likelihood.score(eta, y), rtol=1e-10, atol=1e-12)


# --- a posterior in closed form ---------------------------------------------------------------------------
# Weibull times with one rate r = exp(-k f) for all rows, k known and r ~ Gamma(A, C): the posterior of r is
# Gamma(A + events, C + sum of t^k), whatever is censored on the right. In u = log r its log density is
# (A + events) u - (C + sum) exp(u).

A, C, SHAPE = 2.0, 3.0, 1.7


def one_rate(x: Any, y: Any = None) -> None:
    rate = bnn.sample("rate", dist.Gamma(A, C))
    f = bnn.ops.log(rate) / -SHAPE * bnn.ops.ones_like(x[:, :1])
    bnn.observe(y, f, likelihoods.Censored(likelihoods.Weibull(SHAPE)))


def times(rows: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Of 40 rows, 27 or so are censored."""
    rng = np.random.default_rng(seed)
    time, bound = 2.0 * rng.weibull(SHAPE, size=rows), rng.exponential(1.2, size=rows)
    y = np.column_stack([np.minimum(time, bound), time <= bound])
    return rng.normal(size=(rows, 1)), y


def gamma_posterior(y: np.ndarray) -> tuple[float, float]:
    return A + float(y[:, 1].sum()), C + float(np.sum(y[:, 0] ** SHAPE))


def test_the_mode_and_its_curvature_are_those_of_a_gamma_distribution() -> None:
    """In u the mode is log(a / c), and minus the second derivative there a: each event tells one, a censored row none
    on the whole. With the information of uncensored rows the variance would be 1 / (A + rows)."""
    x, y = times()
    a, c = gamma_posterior(y)
    assert 5 < y[:, 1].sum() < 25
    for structure in ("full", "diag"):
        posterior = bnn.Laplace(ppl="pyro", structure=structure, steps=200).fit(one_rate, x, y)
        np.testing.assert_allclose(posterior.approximation.centre()["rate"], math.log(a / c), atol=1e-6)
        np.testing.assert_allclose(posterior.approximation.covariance.covariance(), [[1.0 / a]], rtol=1e-6)
    mode = bnn.MAP(ppl="pyro", steps=200).fit(one_rate, x, y)
    np.testing.assert_allclose(mode.draws["rate"], a / c, rtol=1e-6)


def test_the_normal_nearest_to_a_gamma_distribution() -> None:
    """Of all N(m, s^2) over u the bound is greatest at s^2 = 1 / a, m = log(a / c) - s^2 / 2."""
    x, y = times()
    a, c = gamma_posterior(y)
    posterior = bnn.SVI(
        ppl="pyro", steps=600, learning_rate=0.05, elbo_draws=100, start={"rate": np.array(a / c)}
    ).fit(one_rate, x, y)
    u = posterior.approximation.draw(20_000, np.random.default_rng(0))["rate"]
    # What 600 draws can tell of location and scale, five standard errors of it (see SVI), and its bias of half a step:
    # over 20 seeds the largest deviations were 0.16 of the standard deviation and 8 % of it.
    sd, error = 1.0 / math.sqrt(a), 5.0 / math.sqrt(600) + 0.025
    assert abs(u.mean() - (math.log(a / c) - 0.5 / a)) < error * sd
    np.testing.assert_allclose(u.std(), sd, rtol=error)


def test_draws_are_those_of_a_gamma_distribution() -> None:
    """NUTS: mean and variance of u within four Monte-Carlo standard errors."""
    from arviz_stats.base import array_stats

    x, y = times()
    a, c = gamma_posterior(y)
    posterior = bnn.NUTS(chains=2, warmup=200, draws=400).fit(one_rate, x, y, seed=1)
    u = np.log(posterior.draws["rate"])
    for values, expected in (
        (u, digamma(a) - math.log(c)),
        ((u - (digamma(a) - math.log(c))) ** 2, float(polygamma(1, a))),
    ):
        error = values.std() / math.sqrt(array_stats.ess(values, method="mean"))
        assert abs(values.mean() - expected) < 4.0 * error
    # What the mixture over r predicts: P(T > t) = (c / (c + t^k))^a, a Burr distribution.
    t = np.array([0.5, 1.0, 2.0, 4.0])
    prediction = posterior.predict(np.zeros((4, 1)))
    np.testing.assert_allclose(1.0 - prediction.cdf(t), (c / (c + t**SHAPE)) ** a, atol=0.02)
    np.testing.assert_allclose(
        prediction.log_prob(rows_of(t, RIGHT)), np.log1p(-prediction.cdf(t)), rtol=1e-10
    )


# --- regression with censored rows ------------------------------------------------------------------------

NOISE = 0.6


def tobit(x: Any, y: Any = None) -> None:
    w = bnn.sample("w", dist.Normal(0.0, 1.0).expand((2, 1)).to_event())
    bnn.observe(y, bnn.linear("out", x, w), likelihoods.Censored(likelihoods.Gaussian(NOISE)))


def readings(rows: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Readings between two limits of a scale."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, 2))
    value = x @ [1.0, -0.6] + NOISE * rng.normal(size=rows)
    event = np.where(value > 0.8, RIGHT, np.where(value < -0.9, LEFT, OBSERVED))
    return x, np.column_stack([np.clip(value, -0.9, 0.8), event])


def test_the_mode_and_curvature_of_a_censored_regression_are_scipys() -> None:
    """With known noise the information in f is the Hessian itself."""
    x, y = readings()

    def cost(w: np.ndarray) -> float:
        law = scipy.stats.norm(x @ w, NOISE)
        each = np.select(
            [y[:, 1] == OBSERVED, y[:, 1] == RIGHT],
            [law.logpdf(y[:, 0]), law.logsf(y[:, 0])],
            law.logcdf(y[:, 0]),
        )
        return -float(each.sum() + scipy.stats.norm.logpdf(w).sum())

    found = scipy.optimize.minimize(cost, np.zeros(2), method="BFGS", options={"gtol": 1e-6})
    posterior = bnn.Laplace(ppl="pyro", steps=200).fit(tobit, x, y)
    mode = posterior.approximation.centre()["w"][:, 0]
    np.testing.assert_allclose(mode, found.x, atol=1e-5)
    step = 1e-4 * np.eye(2)
    hessian = [
        [
            (cost(mode + a + b) - cost(mode + a - b) - cost(mode - a + b) + cost(mode - a - b)) / 4e-8
            for a in step
        ]
        for b in step
    ]
    np.testing.assert_allclose(posterior.approximation.covariance.precision(), hessian, rtol=1e-5, atol=1e-4)
    # The same by automatic differentiation, and without any: the covariance of what the rows say.
    exact = bnn.Laplace(ppl="pyro", curvature="hessian", steps=200).fit(tobit, x, y)
    np.testing.assert_allclose(
        exact.approximation.covariance.precision(), posterior.approximation.covariance.precision(), rtol=1e-7
    )
    empirical = bnn.Laplace(ppl="pyro", curvature="empirical", steps=200).fit(tobit, x, y)
    eta = np.column_stack([x @ mode, np.full(len(x), math.log(NOISE))])
    gradients = likelihoods.Censored(likelihoods.Gaussian(None)).score(eta, y)[:, :1] * x
    expected = gradients.T @ gradients + np.eye(2)
    np.testing.assert_allclose(empirical.approximation.covariance.precision(), expected, rtol=1e-5)


def test_a_linearised_prediction_is_the_normal_of_the_value() -> None:
    x, y = readings()
    posterior = bnn.Laplace(ppl="pyro", steps=200).fit(tobit, x, y)
    prediction = posterior.predict(x[:5])
    assert (prediction.family, prediction.draws, prediction.censored) == ("Normal", 1, True)
    covariance = posterior.approximation.covariance.covariance()
    variance = np.einsum("ni,ij,nj->n", x[:5], covariance, x[:5])
    np.testing.assert_allclose(prediction.variance, variance + NOISE**2, rtol=1e-8)
    np.testing.assert_allclose(prediction.epistemic, variance, rtol=1e-8)
    law = scipy.stats.norm(prediction.mean, prediction.std)
    np.testing.assert_allclose(prediction.log_prob(rows_of(y[:5, 0], LEFT)), law.logcdf(y[:5, 0]), rtol=1e-10)


def learned_noise(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    f = bnn.mlp(x, [3, 1], activation="tanh")
    bnn.observe(y, f, likelihoods.Censored(likelihoods.Gaussian(noise)))


def test_events_keep_their_units_where_values_are_standardised(tmp_path: Path) -> None:
    """A fit to standardised values is that to values that were standardised by hand, brought back."""
    x, y = readings()
    y[:, 0] = 50.0 + 20.0 * y[:, 0]
    method = bnn.Laplace(ppl="pyro", steps=300)
    posterior = method.fit(learned_noise, x, y, standardise=True)
    mean, scale = y[:, 0].mean(), y[:, 0].std()
    inside = (x - x.mean(axis=0)) / x.std(axis=0)
    np.testing.assert_array_equal(posterior.targets[:, 1], y[:, 1])
    by_hand = method.fit(learned_noise, inside, np.column_stack([(y[:, 0] - mean) / scale, y[:, 1]]))
    ours, theirs = posterior.predict(x), by_hand.predict(inside)
    np.testing.assert_allclose(ours.mean, mean + scale * theirs.mean, rtol=1e-6)
    np.testing.assert_allclose(ours.std, scale * theirs.std, rtol=1e-6)
    # A density has units, the probability of a bound has none.
    offset = np.where(y[:, 1] == OBSERVED, -math.log(scale), 0.0)
    expected = by_hand.log_likelihood() + offset
    np.testing.assert_allclose(posterior.log_likelihood(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(posterior.log_likelihood(x, y), posterior.log_likelihood(), rtol=1e-10)
    joint = posterior.joint(x)
    np.testing.assert_allclose(joint.mean, ours.mean, rtol=1e-6)
    np.testing.assert_allclose(np.diag(joint.function_covariance), ours.epistemic, rtol=1e-5)
    tree = posterior.to_datatree(x[:3], prior=True)
    np.testing.assert_allclose(tree.log_likelihood.y.values, posterior.log_likelihood(), rtol=1e-10)
    np.testing.assert_allclose(tree.observed_data.y.values, y[:, 0], rtol=1e-12)
    np.testing.assert_array_equal(tree.observed_data.event.values, y[:, 1])
    assert tree.posterior_predictive.y.dims == ("chain", "draw", "obs")
    assert tree.predictions.y.shape == (1, 1000, 3)
    assert tree.prior_predictive.y.shape == (1, 500, len(y))
    loo = leave_one_out(tree)
    assert math.isfinite(loo.elpd)
    again = bnn.load(posterior.save(tmp_path / "saved"), learned_noise)
    np.testing.assert_allclose(again.predict(x).mean, ours.mean, rtol=1e-10)


@pytest.mark.parametrize("ppl", ["pyro", pytest.param("numpyro", marks=pytest.mark.slow)])
def test_mini_batches_and_draws_of_targets(ppl: str) -> None:
    """Rows are the plate, and what a model draws was observed: its own values, under the prior."""
    x, y = times(400)
    bnn.SVI(ppl=ppl, steps=3, batch_size=10, elbo_draws=2).fit(one_rate, x, y)
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        xs = chosen.asarray(x)
        rate = chosen.asarray(np.array(0.7))
        sites = chosen.run(
            chosen.native(one_rate), xs, None, values={"rate": rate}, seed=chosen.seeds(0, 1)[0]
        )
        drawn = chosen.to_numpy(next(site for site in sites if site.name == "y").value)
    assert drawn.shape == (400, 2)
    np.testing.assert_array_equal(drawn[:, 1], 1.0)
    law = scipy.stats.weibull_min(SHAPE, scale=0.7 ** (-1.0 / SHAPE))
    assert scipy.stats.kstest(drawn[:, 0], law.cdf).pvalue > 1e-4


def test_methods_are_compared_by_what_censored_rows_can_tell(tmp_path: Path) -> None:
    x, y = readings()
    result = bnn.compare(
        tobit,
        (x[:35], y[:35]),
        (x[35:], y[35:]),
        {"laplace": bnn.Laplace(ppl="pyro", steps=200), "map": bnn.MAP(ppl="pyro", steps=200)},
        reference="laplace",
        out=tmp_path,
    )
    row = result.table.loc["laplace"]
    prediction = result.predictions["laplace"]
    assert row["concordance"] == scores.concordance_index(prediction, y[35:])
    np.testing.assert_allclose(row["log_score"], prediction.log_prob(y[35:]).mean(), rtol=1e-12)
    assert row[["rmse", "crps", "coverage_90"]].isna().all()
    assert np.isfinite(row[["width_90", "elpd_loo"]].astype(float)).all()
    count = int(np.sum(y[35:, 1] != OBSERVED))
    assert result.notes["laplace", "rmse"].startswith(f"Of {count} of 15 test rows")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    whole = bnn.compare(
        tobit, (x[:35], y[:35]), (x[:3], rows_of(y[:3, 0], OBSERVED)), {"map": bnn.MAP(ppl="pyro", steps=200)}
    ).table.loc["map"]
    assert np.isfinite(whole[["rmse", "crps", "coverage_90", "concordance"]].astype(float)).all()


# --- scores -----------------------------------------------------------------------------------------------


def predicted(rows: int, draws: int = 3, censored: bool = True) -> Prediction:
    rng = np.random.default_rng(rows)
    parameters = {
        "concentration": rng.uniform(0.8, 2.0, (draws, rows)),
        "scale": rng.gamma(3.0, 1.0, (draws, rows)),
    }
    return Prediction("CensoredWeibull" if censored else "Weibull", parameters)


def known_order(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the value of a row is certain to be below that of another."""
    (v, d), (w, e) = a, b
    if d == RIGHT or e == LEFT:
        return False
    if d == LEFT or e == RIGHT:
        return bool(v <= w)
    return bool(v < w)


@pytest.mark.parametrize("rows", [2, 30, 700])
def test_concordance_counts_all_pairs_of_known_order(rows: int) -> None:
    """Harrell's C by its definition, pair by pair; times and predictions with ties."""
    rng = np.random.default_rng(rows)
    y = np.column_stack([rng.integers(1, 9, rows), rng.integers(-1, 2, rows)]).astype(float)
    y[:2] = [[1.0, OBSERVED], [2.0, RIGHT]]
    some = predicted(rows)
    parameters = {name: np.round(value, 0) + 1.0 for name, value in some.parameters.items()}
    prediction = Prediction("CensoredWeibull", parameters)
    median = prediction.quantile(0.5)
    pairs = right = 0.0
    for i, j in itertools.permutations(range(min(rows, 120)), 2):
        if known_order(y[i], y[j]):
            pairs += 1
            right += 1.0 if median[j] > median[i] else 0.5 if median[j] == median[i] else 0.0
    some_rows = slice(0, min(rows, 120))
    found = scores.concordance_index(prediction.take(some_rows), y[some_rows])
    np.testing.assert_allclose(found, right / pairs, rtol=1e-12)
    # In blocks of rows: as by Mann and Whitney where all were observed and no two are alike.
    order = rng.permutation(rows).astype(float) + 1.0
    value = scores.concordance_index(some, rows_of(order, OBSERVED))
    tau = scipy.stats.kendalltau(some.quantile(0.5), order).statistic
    np.testing.assert_allclose(value, 0.5 * (tau + 1.0), rtol=1e-12)


def test_concordance_of_values_that_are_not_censored() -> None:
    prediction = Prediction("Normal", {"loc": np.array([[0.0, 1.0, 2.0]]), "scale": np.ones((1, 3))})
    assert scores.concordance_index(prediction, [5.0, 6.0, 7.0]) == 1.0
    assert scores.concordance_index(prediction, [7.0, 6.0, 5.0]) == 0.0
    assert scores.concordance_index(prediction, [6.0, 6.0, 7.0]) == 1.0
    with pytest.raises(UnsupportedError, match="expected two rows of known order; got none among 3"):
        scores.concordance_index(prediction, [1.0, 1.0, 1.0])
    both = Prediction("Normal", {"loc": np.zeros((1, 3, 2)), "scale": np.ones((1, 3, 2))})
    with pytest.raises(UnsupportedError, match="one number per row"):
        scores.concordance_index(both, np.zeros((3, 2)))
    classes = Prediction("Bernoulli", {"probs": np.full((1, 3), 0.5)})
    with pytest.raises(
        UnsupportedError, match="expected a prediction of numbers for concordance_index; got Bernoulli"
    ):
        scores.concordance_index(classes, [0, 1, 1])


def test_scores_of_values_need_values() -> None:
    prediction = predicted(4)
    y = np.array([[1.0, OBSERVED], [2.0, RIGHT], [3.0, LEFT], [2.5, OBSERVED]])
    for score in (scores.rmse, scores.mean_absolute_error, scores.crps, scores.coverage, scores.pit):
        with pytest.raises(
            UnsupportedError, match="2 of 4 rows censored; try log_score or concordance_index"
        ):
            score(prediction, y)
    assert set(scores.scores_of(prediction, y)) == {"log_score", "width_90", "concordance"}
    whole = rows_of(y[:, 0], OBSERVED)
    plain = predicted(4, censored=False)
    for score in (scores.rmse, scores.mean_absolute_error, scores.crps, scores.coverage, scores.log_score):
        np.testing.assert_allclose(score(prediction, whole), score(plain, y[:, 0]), rtol=1e-12)
    np.testing.assert_allclose(scores.pit(prediction, whole), prediction.cdf(y[:, 0]), rtol=1e-14)
    found = scores.scores_of(prediction, whole)
    assert found == scores.scores_of(plain, y[:, 0]) | {"concordance": found["concordance"]}
    # Nothing is known of the order of two bounds from below.
    assert "concordance" not in scores.scores_of(prediction.take([0, 1]), rows_of(y[:2, 0], RIGHT))


# --- predictions ------------------------------------------------------------------------------------------


def test_a_prediction_of_censored_rows_stays_one() -> None:
    prediction = predicted(5)
    assert (prediction.family, prediction.censored, prediction.shape) == ("Weibull", True, (5,))
    assert repr(prediction) == "Prediction(Weibull, draws=3, shape=(5,), censored)"
    for part in (prediction.take([1, 2]), prediction.take_draws([0, 2]), prediction.thin(2)):
        assert part.censored
    y = np.column_stack([np.arange(1.0, 6.0), [OBSERVED, RIGHT, LEFT, RIGHT, OBSERVED]])
    law = scipy.stats.weibull_min(
        prediction.parameters["concentration"], scale=prediction.parameters["scale"]
    )
    each = np.select(
        [y[:, 1] == OBSERVED, y[:, 1] == RIGHT], [law.pdf(y[:, 0]), law.sf(y[:, 0])], law.cdf(y[:, 0])
    )
    np.testing.assert_allclose(prediction.component_log_prob(y), np.log(each), rtol=1e-12)
    np.testing.assert_allclose(prediction.log_prob(y), np.log(each.mean(axis=0)), rtol=1e-12)
    normal = Prediction("CensoredNormal", {"loc": np.zeros((1, 2)), "scale": np.ones((1, 2))})
    scaled = normal.rescale(np.array([3.0, 0.0]), np.array([2.0, 1.0]))
    assert scaled.censored
    np.testing.assert_allclose(scaled.mean, 3.0)
    np.testing.assert_allclose(scaled.std, 2.0)
    np.testing.assert_allclose(normal.rescale(3.0, 2.0).mean, 3.0)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda: likelihoods.Censored(likelihoods.StudentT()),
            UnsupportedError,
            "got StudentT; try Censored",
        ),
        (lambda: likelihoods.Censored(likelihoods.Poisson()), UnsupportedError, "got Poisson"),
        (
            lambda: likelihoods.Censored(likelihoods.Gaussian),
            UnsupportedError,
            r"the class Gaussian; try Gaussian\(",
        ),
        (lambda: likelihoods.Censored(0.3), UnsupportedError, "got float"),
        (
            lambda: likelihoods.Censored(likelihoods.Gaussian(1.0)).check((5, 2), None),
            ModelError,
            "one number per row of Gaussian",
        ),
        (
            lambda: likelihoods.Censored(likelihoods.HeteroscedasticGaussian()).check((5, 4), None),
            ModelError,
            r"f of shape \(N, 2\)",
        ),
        (
            lambda: likelihoods.Censored(likelihoods.Weibull()).check((5, 1), (5,)),
            ModelError,
            r"values and events.*got y of shape \(5,\); try np.column_stack",
        ),
        (
            lambda: likelihoods.Censored(likelihoods.Gaussian(np.ones(3))).check((5, 1), (5, 2)),
            ModelError,
            "one noise",
        ),
        (
            lambda: likelihoods.Censored(likelihoods.Laplace()).fisher(None),
            UnsupportedError,
            "curvature='empirical'",
        ),
        (
            lambda: likelihoods.Censored(likelihoods.Laplace()).information_root(None, None),
            UnsupportedError,
            "a kink",
        ),
        (lambda: dist.Censored(dist.StudentT(3.0)), InputError, "Normal, Laplace, Weibull; got StudentT"),
        (lambda: dist.Censored(1.0), InputError, "got float"),
        (
            lambda: Prediction("CensoredNormal", {"loc": np.zeros((1, 3, 2)), "scale": np.ones((1, 3, 2))}),
            InputError,
            "one number per row",
        ),
        (
            lambda: Prediction("Poisson", {"rate": np.ones((1, 3))}, censored=True),
            InputError,
            "Normal, Laplace, Weibull where rows may be censored; got Poisson",
        ),
        (lambda: predicted(3).log_prob(np.ones(3)), InputError, r"y of shape \(3, 2\), values and events"),
        (lambda: predicted(2).log_prob([[1.0, 2.0], [1.0, 1.0]]), InputError, "got 2 in row 0"),
        (
            lambda: predicted(2).log_prob([[1.0, 1.0], [0.0, 1.0]]),
            InputError,
            "positive times; got 0 in row 1",
        ),
        (lambda: predicted(2).log_prob([[np.nan, 1.0], [1.0, 1.0]]), InputError, "finite y"),
        (
            lambda: Prediction("CensoredNormal", {"loc": np.zeros((1, 2)), "scale": np.ones((1, 2))}).rescale(
                np.array([1.0, 0.5]), np.array([2.0, 0.5])
            ),
            InputError,
            "expected events with location 0 and scale 1; got 0.5 and 0.5",
        ),
        (lambda: predicted(2).rescale(0.0, 2.0), UnsupportedError, "location-scale family"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (np.array([[1.0, 1.0], [2.0, 3.0]]), "events 1 .observed., 0 .right-censored. or -1.*got 3 in row 1"),
        (np.array([[1.0, 1.0], [-2.0, 0.0]]), "positive times; got -2 in row 1"),
        (np.array([1.0, 2.0]), "values and events"),
        (np.array([[1.0, 1.0], [np.nan, 0.0]]), r"NaN at \(1, 0\)"),
    ],
)
def test_targets_that_are_no_values_and_events_are_refused_before_a_fit(
    rng, y: np.ndarray, says: str
) -> None:
    with pytest.raises((InputError, ModelError), match=says):
        bnn.MAP(ppl="pyro", steps=3).fit(one_rate, rng.normal(size=(2, 1)), y)


def test_information_of_unknown_censoring_is_not_sampled() -> None:
    x, y = readings()
    with pytest.raises(UnsupportedError, match="whose censoring is not part of the model"):
        bnn.Laplace(ppl="pyro", fisher="sampled", steps=50).fit(tobit, x, y)

    def kinked(x: Any, y: Any = None) -> None:
        w = bnn.sample("w", dist.Normal(0.0, 1.0).expand((2, 1)).to_event())
        bnn.observe(y, bnn.linear("out", x, w), likelihoods.Censored(likelihoods.Laplace(NOISE)))

    with pytest.raises(UnsupportedError, match="curvature='empirical'"):
        bnn.Laplace(ppl="pyro", steps=50).fit(kinked, x, y)
    found = bnn.Laplace(ppl="pyro", steps=300, curvature="empirical").fit(kinked, x, y)
    assert np.linalg.eigvalsh(found.approximation.covariance.precision())[0] > 1.0


# --- the model of the zoo ---------------------------------------------------------------------------------


def test_the_zoo_model_has_the_density_on_its_card() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(6, 5)), np.column_stack([rng.gamma(2.0, 3.0, 6), [1, 0, 1, -1, 0, 1]])
    chosen, model = system("pyro"), bnn.zoo.load("survival_mlp", width=3)
    with chosen.session("float64", "cpu", threads=1):
        xs, ys = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, model, xs, ys, language=True)
        u = program.unravel(chosen.asarray(rng.normal(size=program.parameter_count)))
        found = float(program.log_joint(u, xs, ys, jacobian=False))
        w = {name: chosen.to_numpy(value) for name, value in program.constrain(u, xs, ys).items()}
    normal = functools.partial(scipy.stats.norm.logpdf, loc=0.0)
    total = normal(w["hidden0.weight"], scale=1.0 / math.sqrt(5)).sum() + normal(w["hidden0.bias"]).sum()
    total += normal(w["output.weight"], scale=1.0 / math.sqrt(3)).sum()
    total += normal(w["output.bias"], scale=3.0).sum() + scipy.stats.lognorm(0.5).logpdf(w["shape"])
    h = np.tanh(x @ w["hidden0.weight"] + w["hidden0.bias"])
    f = (h @ w["output.weight"] + w["output.bias"])[:, 0]
    law = scipy.stats.weibull_min(w["shape"], scale=np.exp(f))
    total += np.select(
        [y[:, 1] == OBSERVED, y[:, 1] == RIGHT],
        [law.logpdf(y[:, 0]), law.logsf(y[:, 0])],
        law.logcdf(y[:, 0]),
    ).sum()
    np.testing.assert_allclose(found, total, rtol=1e-9)
    assert program.parameter_count == (5 + 2) * 3 + 2
