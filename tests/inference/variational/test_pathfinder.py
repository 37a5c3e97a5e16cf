"""Pathfinder against Gaussians in closed form, SciPy's densities, ArviZ's k-hat and quadrature."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from arviz_stats.base import array_stats
from scipy.stats import halfnorm, multivariate_normal, norm

import ppl_bnn as bnn
from ppl_bnn import Pathfinder, likelihoods, ops, priors
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError
from ppl_bnn.diagnostics.importance import pareto_k_of
from ppl_bnn.inference.variational.pathfinder import PathMixture
from ppl_bnn.posterior.approximation import Drawn
from ppl_bnn.posterior.pareto import smoothed
from tests.problems import Conjugate, regression_data, small_network

PROBLEM = Conjugate.make()
X = np.linspace(0.4, 1.6, 12)[:, None]
Y = X[:, 0] + 0.25 * np.random.default_rng(2).normal(size=12) + 0.05
GRID = np.linspace(-6.0, 6.0, 60_001)


def bent(x: Any, y: Any = None) -> None:
    """f = w^2 x + w / 10: a mode near w = 1 and another near w = -1; a weight tensor, so that paths begin at both."""
    w = priors.Normal(0.5, 1.0)("w", (1, 1), 1)[0]
    bnn.observe(y, w**2 * x + 0.1 * w, likelihoods.Gaussian(0.3))


def log_joint_bent(w: np.ndarray) -> np.ndarray:
    f = w[:, None] ** 2 * X[:, 0] + 0.1 * w[:, None]
    return norm.logpdf(w, 0.5) + norm.logpdf(Y, f, 0.3).sum(1)


def log_integral(log_values: np.ndarray, grid: np.ndarray) -> float:
    """log of the integral of exp(log_values), by the trapezoidal rule."""
    top = log_values.max()
    return float(top + np.log(np.trapezoid(np.exp(log_values - top), grid)))


@pytest.fixture(scope="module")
def conjugate():
    return bnn.fit(PROBLEM.model, PROBLEM.x, PROBLEM.y, Pathfinder())


@pytest.fixture(scope="module")
def modes():
    """Both ways to hand over the same eight paths to two modes."""
    return {
        importance: bnn.fit(bent, X, Y, Pathfinder(paths=8, importance=importance), seed=1)
        for importance in (True, False)
    }


# --- one path -------------------------------------------------------------------------------------


def flat_of(approximation: PathMixture) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance in the order of `Conjugate`: weights, then the bias, which is the order of the program."""
    assert list(approximation.location) == ["output.weight", "output.bias"]
    return approximation.means[0], approximation.covariance()


def test_a_gaussian_posterior(conjugate):
    """The mean to a hundredth of a standard deviation, the covariance to 0.2 of the variances, and the ELBO.

    What L-BFGS learns of a covariance depends on its path: over 20 seeds the largest error of an entry was 1 to 67 % of
    the variances, of the mean at most 4 %, and KL(q || p) 0.0007 to 0.2; this is one seed. Exact at each is ELBO =
    log p(D) - KL(q || p), with KL between Gaussians in closed form: within 4 standard errors of the estimate from its
    draws (1.6 at most over the seeds).
    """
    mean, covariance = flat_of(conjugate.approximation)
    sd = np.sqrt(np.diag(PROBLEM.covariance))
    assert np.all(np.abs(mean - PROBLEM.mean) < 1e-2 * sd)
    assert np.allclose(covariance / np.outer(sd, sd), PROBLEM.covariance / np.outer(sd, sd), atol=0.2)
    shift = mean - PROBLEM.mean
    divergence = 0.5 * (
        np.trace(PROBLEM.precision @ covariance)
        - len(mean)
        + shift @ PROBLEM.precision @ shift
        - np.linalg.slogdet(PROBLEM.precision @ covariance)[1]
    )
    figures = conjugate.info.figures
    assert 0.0 < divergence < 0.05
    assert abs(figures["elbo"] - (PROBLEM.log_evidence - divergence)) < 4.0 * figures["elbo_se"]
    assert abs(conjugate.log_evidence - PROBLEM.log_evidence) < 4.0 * figures["log_evidence_se"]
    assert figures["elbo"] < PROBLEM.log_evidence + 4.0 * figures["elbo_se"]
    assert figures["converged"] == 1.0
    assert not conjugate.info.warnings


def test_its_density_and_its_draws(conjugate):
    """Log q against SciPy to 1e-9, and 50 000 draws against mean and covariance within 5 standard errors."""
    approximation = conjugate.approximation
    mean, covariance = flat_of(approximation)
    u = approximation.draw(50_000, np.random.default_rng(0))
    flat = np.concatenate([u["output.weight"][..., 0], u["output.bias"]], axis=1)
    wanted = multivariate_normal(mean, covariance)
    assert np.allclose(approximation.log_prob(u), wanted.logpdf(flat), rtol=1e-9, atol=1e-9)
    root = np.linalg.cholesky(np.linalg.inv(covariance))
    z = (flat - mean) @ root
    assert np.all(np.abs(z.mean(0)) < 5.0 / math.sqrt(50_000))
    assert np.all(np.abs(z.T @ z / 50_000 - np.eye(4)) < 5.0 * math.sqrt(2.0 / 50_000))
    assert np.allclose(conjugate.log_q()[0], approximation.log_prob(first(conjugate)))


def first(posterior) -> dict[str, np.ndarray]:
    return {name: value[0] for name, value in posterior.unconstrained_draws.items()}


def test_k_hat_is_that_of_the_diagnostics(conjugate):
    u = first(conjugate)
    log_ratios = conjugate.log_joint() - conjugate.approximation.log_prob(u)
    log_weights, k = smoothed(log_ratios)
    assert k == pareto_k_of(log_ratios).k
    wanted, k_arviz = array_stats.psislw(-log_ratios)
    assert k == k_arviz
    assert np.isclose(np.exp(log_weights).sum(), 1.0)
    assert np.ptp(log_weights - wanted) < 1e-10
    assert conjugate.info.figures["pareto_k"] < 0.7
    assert np.isclose(
        bnn.diagnose(conjugate).figures["importance_log_evidence"], PROBLEM.log_evidence, atol=0.05
    )


def test_nothing_is_claimed_of_weights_that_say_nothing():
    assert smoothed(np.full(50, 3.0))[1] == -math.inf
    lonely = np.r_[0.0, np.full(99, -80.0)]
    for log_ratios in (lonely, np.r_[-np.inf, np.random.default_rng(0).normal(size=99)]):
        log_weights, k = smoothed(log_ratios)
        assert k == math.inf
        assert np.isclose(np.exp(log_weights).sum(), 1.0)
        assert np.allclose(log_weights - log_weights[1], log_ratios - log_ratios[1])


@pytest.mark.slow
def test_the_rank_of_its_covariance_is_that_of_its_history():
    """With a history of one step, S is diagonal but for a rank of two."""
    posterior = bnn.fit(PROBLEM.model, PROBLEM.x, PROBLEM.y, Pathfinder(history=1))
    assert posterior.approximation.basis.shape == (1, 4, 2)
    scaled = posterior.approximation.covariance() / np.outer(
        posterior.approximation.scale[0], posterior.approximation.scale[0]
    )
    values = np.linalg.eigvalsh(scaled)
    assert np.count_nonzero(np.abs(values - 1.0) > 1e-8) <= 2


def test_it_can_be_the_prior_of_more_data(conjugate):
    prior = conjugate.approximation.as_prior()
    (names, precision), *rest = prior.joint
    assert not rest
    assert names == ("output.weight", "output.bias")
    assert np.allclose(np.linalg.inv(precision), conjugate.approximation.covariance())


# --- at a temperature -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cold_posterior():
    """p(w | D)^(1/T) is N(mean, T covariance), with (p(w) p(D | w))^(1/T) integrated in closed form.

    L-BFGS goes the same way at any temperature, so that the covariance is off as at T = 1: see above.
    """
    temperature, size = 0.25, 4
    posterior = bnn.fit(PROBLEM.model, PROBLEM.x, PROBLEM.y, Pathfinder(temperature=temperature))
    mean, covariance = flat_of(posterior.approximation)
    sd = np.sqrt(temperature * np.diag(PROBLEM.covariance))
    assert np.all(np.abs(mean - PROBLEM.mean) < 0.1 * sd)
    scaled = covariance / np.outer(sd, sd)
    assert np.allclose(scaled, temperature * PROBLEM.covariance / np.outer(sd, sd), atol=0.7)
    power, figures = 1.0 / temperature, posterior.info.figures
    wanted = (
        power * PROBLEM.log_evidence
        + 0.5 * (1.0 - power) * (size * math.log(2.0 * math.pi) + np.linalg.slogdet(PROBLEM.covariance)[1])
        + 0.5 * size * math.log(temperature)
    )
    assert abs(figures["log_normaliser"] - wanted) < 4.0 * figures["log_normaliser_se"]


def test_the_power_leaves_the_volume_of_the_coordinates_alone():
    """A scale alone: what the tempered density integrates to, by quadrature over the scale itself."""
    temperature, y = 2.0, 0.7 * np.random.default_rng(5).normal(size=12)

    def noise_only(x: Any, y: Any = None) -> None:
        noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
        bnn.observe(y, 0.0 * x, likelihoods.Gaussian(noise))

    posterior = bnn.fit(noise_only, X, y, Pathfinder(temperature=temperature))
    grid = np.linspace(1e-3, 6.0, 40_001)
    log_joint = halfnorm.logpdf(grid) + norm.logpdf(y, 0.0, grid[:, None]).sum(1)
    wanted = log_integral(log_joint / temperature, grid)
    figures = posterior.info.figures
    assert abs(figures["log_normaliser"] - wanted) < 4.0 * figures["log_normaliser_se"]
    # Were the volume tempered too, it would be another integral.
    other = log_integral(log_joint / temperature + (1.0 / temperature - 1.0) * np.log(grid), grid)
    assert abs(other - wanted) > 10.0 * figures["log_normaliser_se"]
    assert "log_evidence" not in figures
    assert posterior.info.target == "tempered: the posterior to the power 1/T with T=2"
    assert "temperature=2: the fit aimed at another target" in str(bnn.diagnose(posterior))


# --- several paths --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_modes_by_resampling(modes):
    """Quadrature: the evidence, and the weights of the modes, which say nothing of how many paths went to each."""
    posterior = modes[True]
    joint = log_joint_bent(GRID)
    wanted = log_integral(joint, GRID)
    share = math.exp(log_integral(joint[GRID > 0], GRID[GRID > 0]) - wanted)
    assert isinstance(posterior.approximation, Drawn)
    figures = posterior.info.figures
    assert figures["pareto_k"] < 0.7
    assert abs(figures["log_evidence"] - wanted) < 4.0 * figures["log_evidence_se"]
    w = posterior.draws["w"].ravel()
    paths = modes[False].approximation
    assert paths.size == figures["paths"]
    went = np.mean(paths.means > 0)
    assert 0.0 < went < 1.0
    # The draws scatter as many do, about a share that is itself an estimate from weights.
    error = math.sqrt(share * (1.0 - share) / len(w) + figures["log_evidence_se"] ** 2)
    assert abs(np.mean(w > 0) - share) < 4.0 * error
    density = np.exp(joint - wanted)
    for power in (1, 2):
        moment = np.trapezoid(GRID**power * density, GRID)
        spread = math.sqrt(np.trapezoid((GRID**power - moment) ** 2 * density, GRID))
        assert abs(np.mean(w**power) - moment) < 4.0 * math.hypot(
            spread / math.sqrt(len(w)), spread * figures["log_evidence_se"]
        )
    assert 100 < figures["distinct_draws"] <= len(w) == 1000


def test_the_mixture_in_place_of_the_draws(modes):
    posterior = modes[False]
    mixture = posterior.approximation
    u = mixture.draw(500, np.random.default_rng(3))
    w = u["w"].ravel()
    densities = [
        norm.logpdf(w, mixture.means[k, 0], math.sqrt(mixture.covariance(k)[0, 0]))
        for k in range(mixture.size)
    ]
    wanted = np.logaddexp.reduce(densities, axis=0) - math.log(mixture.size)
    assert np.allclose(mixture.log_prob(u), wanted, rtol=1e-9)
    same = ("pareto_k", "elbo", "log_evidence")
    assert all(posterior.info.figures[name] == modes[True].info.figures[name] for name in same)
    assert "distinct_draws" not in posterior.info.figures
    assert np.all(np.diff(posterior.info.history["path_elbo"]) <= 0.0)
    with pytest.raises(UnsupportedError, match="mixture"):
        mixture.as_prior()
    # Weights of the paths, as stacking gives them.
    only = np.eye(mixture.size)[-1]
    weighted = mixture.weighted(only)
    assert np.allclose(weighted.log_prob(u), densities[-1])
    assert np.array_equal(weighted.centre()["w"].ravel(), mixture.means[-1])
    assert np.allclose(weighted.log_prob(u), mixture.components[-1].log_prob(u))
    assert np.all(np.sign(weighted.draw(50, np.random.default_rng(0))["w"]) == np.sign(mixture.means[-1]))


def test_a_posterior_shows_all_the_draws_that_were_kept(modes):
    kept = {name: value[:300] for name, value in modes[True].approximation.u.items()}
    posterior = replace(modes[True], approximation=Drawn(kept))
    assert posterior.shape == (1, 300)
    assert np.array_equal(posterior.unconstrained_draws["w"][0], kept["w"])
    assert posterior.predict(X[:2]).draws == 300
    assert posterior.predict(X[:2], draws=100).draws == 100
    with pytest.raises(InputError, match="at most the 300"):
        posterior.predict(X[:2], draws=301)


@pytest.mark.parametrize("importance", [True, False])
def test_several_paths_are_stored(modes, importance, tmp_path):
    posterior = modes[importance]
    posterior.save(tmp_path / "saved")
    again = bnn.load(tmp_path / "saved", bent)
    assert type(again.approximation) is type(posterior.approximation)
    for name, value in posterior.draws.items():
        assert np.array_equal(again.draws[name], value)
    assert again.info.figures == posterior.info.figures


# --- what goes wrong, by name ---------------------------------------------------------------------


def bounded(x: Any, y: Any = None, *, noise: float = 0.05) -> None:
    """NaN below w = -1/2, where the paths that begin at negative weights find themselves."""
    w = priors.Normal(0.0, 1.0)("w", (1, 1), 1)[0]
    bnn.observe(y, ops.log(w + 0.5) * x, likelihoods.Gaussian(noise))


def test_a_path_that_is_nan_is_dropped_by_name():
    y = np.log(1.5) * X[:, 0] + 0.05 * np.random.default_rng(0).normal(size=12)
    posterior = bnn.fit(bounded, X, y, Pathfinder(paths=8, importance=False))
    dropped = [warning for warning in posterior.info.warnings if "was dropped" in warning]
    assert dropped
    assert all("of 8 was dropped: the log joint at its start is nan" in warning for warning in dropped)
    assert posterior.approximation.size == posterior.info.figures["paths"] == 8 - len(dropped)
    assert np.all(np.isfinite(posterior.draws["w"]))


def test_no_path_left():
    def impossible(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0)), likelihoods.Gaussian(1e-160))

    with pytest.raises(DivergenceError, match=r"none of 2; the first: the log joint at its start is -inf"):
        bnn.fit(impossible, X, Y, Pathfinder(paths=2))


def test_a_start_from_which_nothing_leads():
    """A likelihood that does not depend on the weight, at the mode of its prior: no gradient, and no path."""

    def flat(x, y=None):
        bnn.sample("w", bnn.dist.Normal(0.0, 1.0))
        bnn.observe(y, 0.0 * x, likelihoods.Gaussian(0.3))

    with pytest.raises(DivergenceError, match="no step from its start"):
        bnn.fit(flat, X, Y, Pathfinder(start={"w": np.array(0.0)}))


def test_draws_where_the_model_is_not_defined():
    """A Gaussian reaches beyond the edge of a posterior that ends there, where its log joint is NaN."""
    with pytest.raises(DivergenceError, match=r"of 1000 draws where it is NaN"):
        bnn.fit(partial(bounded, noise=2.0), X, -1.5 * X[:, 0], Pathfinder(start={"w": np.full((1, 1), 1.0)}))


@pytest.mark.slow
def test_a_network_that_it_cannot_follow_warns():
    x, y = regression_data(rows=25)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = bnn.fit(small_network, x, y, Pathfinder(paths=2))
    assert posterior.info.figures["pareto_k"] > 0.7
    assert "log_evidence" not in posterior.info.figures
    assert any("k-hat" in warning and "distinct" in warning for warning in posterior.info.warnings)


def test_a_path_that_is_cut_off_is_named():
    posterior = bnn.fit(PROBLEM.model, PROBLEM.x, PROBLEM.y, Pathfinder(max_iterations=2))
    assert posterior.info.figures["converged"] == 0.0
    assert any("cut off after 2 iterations" in warning for warning in posterior.info.warnings)
    assert len(posterior.info.history["elbo"]) == 2


@pytest.mark.slow
def test_starts_that_coincide_are_set_apart():
    start = {"w": np.full((1, 1), 0.2)}
    posterior = bnn.fit(bent, X, Y, Pathfinder(paths=3, start=start, importance=False, jitter=0.5))
    assert len({value.tobytes() for value in posterior.approximation.scale}) == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"paths": 0}, "Pathfinder paths"),
        ({"max_iterations": 0}, "Pathfinder max_iterations"),
        ({"history": 0}, "Pathfinder history"),
        ({"elbo_draws": 1}, "Pathfinder elbo_draws"),
        ({"draws": 24}, "Pathfinder draws"),
        ({"temperature": 0.0}, "Pathfinder temperature"),
        ({"jitter": 0.0}, "Pathfinder jitter"),
        ({"importance": 1}, "Pathfinder importance"),
    ],
)
def test_impossible_settings(settings, named):
    with pytest.raises(InputError, match=named):
        Pathfinder(**settings)


def test_what_it_is_not_for():
    with pytest.raises(UnsupportedError, match="numpyro"):
        Pathfinder(ppl="pyro")

    def with_point(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Point()), likelihoods.Gaussian(0.3))

    with pytest.raises(UnsupportedError, match="Pathfinder"):
        bnn.fit(with_point, X, Y, Pathfinder())
