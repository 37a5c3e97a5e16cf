"""SWAG against SGD written out in NumPy, SciPy's normal density, and the stationary distribution of SGD."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import ppl_bnn as bnn
from ppl_bnn import MAP, SWAG, Ensemble, likelihoods, priors
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import DivergenceError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.curvature.conditioning import Conditioning
from ppl_bnn.inference.optimisation import swag
from ppl_bnn.inference.optimisation.swag import SWAGGaussian
from tests.problems import Conjugate, regression_data, small_network

X, Y = regression_data(rows=25)


def flat(u) -> np.ndarray:
    return np.concatenate([u["output.weight"][..., 0], u["output.bias"]], axis=-1)


def start_of(problem: Conjugate, at) -> dict[str, np.ndarray]:
    at = np.asarray(at, dtype=float)
    return {"output.weight": at[:-1, None], "output.bias": at[-1:]}


def iterates(problem: Conjugate, at, rate, batch: int, steps: int, seed: int) -> np.ndarray:
    """SGD on the conjugate model, written out: (steps, P)."""
    rng = np.random.default_rng(site_seed("batches with replacement", seed))
    design, y, rows = problem.design, problem.y, len(problem.y)
    rates = np.broadcast_to(rate, (steps,))
    u, found = np.array(at, dtype=float), []
    for step in range(steps):
        index = rng.integers(rows, size=batch)
        residual = design[index] @ u - y[index]
        gradient = rows / batch * design[index].T @ residual / problem.noise**2 + u
        u = u - rates[step] / rows * gradient
        found.append(u)
    return np.array(found)


@pytest.mark.parametrize("schedule", ["constant", "cyclical"])
def test_moments_are_those_of_the_iterates(ppl, schedule, monkeypatch):
    # Calls of two steps, so that a pass of three is cut and filled up.
    monkeypatch.setattr(swag, "LONGEST", 2)
    problem = Conjugate.make(rows=12)
    at, rate = np.array([0.5, -0.2, 0.1, 0.3]), 0.05
    method = SWAG(
        ppl=ppl,
        collections=6,
        rank=3,
        every=3,
        burn_in=2,
        batch_size=4,
        learning_rate=rate,
        schedule=schedule,
        start=start_of(problem, at),
    )
    posterior = bnn.fit(problem.model, problem.x, problem.y, method, seed=5)
    cycle = rate * (1.0 - 0.99 * np.arange(1, 4) / 3) if schedule == "cyclical" else np.full(3, rate)
    collected = iterates(problem, at, np.tile(cycle, 8), 4, 24, 5)[2 * 3 + 2 :: 3]
    assert len(collected) == 6
    running = np.cumsum(collected, axis=0) / np.arange(1, 7)[:, None]
    q = posterior.approximation
    assert np.allclose(flat(q.mean), collected.mean(0), rtol=1e-9)
    assert np.allclose(flat(q.variance), (collected**2).mean(0) - collected.mean(0) ** 2, rtol=1e-7)
    deviations = np.concatenate([q.deviations["output.weight"][..., 0], q.deviations["output.bias"]], -1)
    assert np.allclose(deviations, (collected - running)[-3:], rtol=1e-7, atol=1e-12)
    wanted = 0.5 * np.diag(collected.var(0)) + deviations.T @ deviations / (2 * 2)
    assert np.allclose(q.covariance(), wanted, rtol=1e-7, atol=1e-14)
    assert posterior.info.figures["learning_rate"] == rate
    assert posterior.info.gradient_evaluations == 24 * 4 / 12
    assert "not the posterior" in posterior.info.target


def some_gaussian(rank: int = 3) -> SWAGGaussian:
    rng = np.random.default_rng(2)
    shapes = {"b": (2, 2), "a": (), "c": (3,)}
    return SWAGGaussian(
        {name: rng.normal(size=shape) for name, shape in shapes.items()},
        {name: rng.uniform(0.1, 2.0, size=shape) for name, shape in shapes.items()},
        {name: rng.normal(size=(rank, *shape)) for name, shape in shapes.items()},
    )


def test_density_is_that_of_scipy_and_draws_have_the_covariance():
    q = some_gaussian()
    draws = q.draw(20_000, np.random.default_rng(0))
    rows = np.concatenate([draws[name].reshape(20_000, -1) for name in q.mean], axis=1)
    mean = np.concatenate([np.ravel(value) for value in q.mean.values()])
    wanted = multivariate_normal(mean, q.covariance())
    few = {name: value[:5] for name, value in draws.items()}
    assert np.allclose(q.log_prob(few), wanted.logpdf(rows[:5]), rtol=1e-10)
    sd = np.sqrt(np.diag(q.covariance()))
    spread = np.cov(rows, rowvar=False) / np.outer(sd, sd)
    # Correlations of n draws scatter by at most sqrt(2 / n).
    assert np.all(np.abs(spread - q.covariance() / np.outer(sd, sd)) < 5 * np.sqrt(2 / 20_000))
    assert np.all(np.abs(rows.mean(0) - mean) < 5 * sd / np.sqrt(20_000))
    again = SWAGGaussian.from_arrays(q.arrays())
    assert np.array_equal(again.log_prob(few), q.log_prob(few))


def stationary(problem: Conjugate, rate: float, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """(E u_{t+1} - m given u_t - m, as a matrix; the covariance S) of SGD at rest.

    Row i alone moves u by -rate (a_i u - b_i), with a_i = x_i x_i' / sigma^2 + I / N and b_i = x_i y_i / sigma^2. With
    independent batches of B rows S = S - rate (a S + S a) + rate^2 (mean_i(a_i S a_i) / B + (1 - 1/B) a S a + C / B),
    a = mean_i a_i, C the covariance of a_i m - b_i: linear in S.
    """
    design, rows = problem.design, len(problem.y)
    size = design.shape[1]
    each = design[:, :, None] * design[:, None, :] / problem.noise**2 + np.eye(size) / rows
    forces = each @ problem.mean - design * problem.y[:, None] / problem.noise**2
    mean, noise = each.mean(0), forces.T @ forces / rows
    identity = np.eye(size)
    system = rate * (np.kron(mean, identity) + np.kron(identity, mean))
    system -= rate**2 * (
        np.mean([np.kron(a, a) for a in each], axis=0) / batch + (1 - 1 / batch) * np.kron(mean, mean)
    )
    covariance = np.linalg.solve(system, (rate**2 * noise / batch).ravel()).reshape(size, size)
    return identity - rate * mean, covariance


@pytest.mark.slow
def test_the_stationary_distribution_of_sgd_in_closed_form():
    """Mean and variances of 4000 collected iterates, within 4.5 standard errors that count how they are correlated."""
    problem = Conjugate.make(rows=20, features=1)
    batch, rate, every, count = 2, 0.06, 5, 4000
    method = SWAG(
        collections=count,
        rank=count,
        every=every,
        burn_in=50,
        batch_size=batch,
        learning_rate=rate,
        start=start_of(problem, problem.mean),
    )
    q = bnn.fit(problem.model, problem.x, problem.y, method).approximation
    onward, covariance = stationary(problem, rate, batch)
    small = solve_discrete_lyapunov(onward, covariance - onward @ covariance @ onward.T)
    assert np.allclose(small, covariance)
    lags = [np.linalg.matrix_power(onward, every * lag) @ covariance for lag in range(1, 400)]
    correlations = np.array([np.diag(lag) / np.diag(covariance) for lag in lags])
    variance = np.diag(covariance)
    of_mean = np.sqrt(variance * (1 + 2 * correlations.sum(0)) / count)
    assert np.all(np.abs(flat(q.mean) - problem.mean) < 4.5 * of_mean)
    # Of a Gaussian: Var(u^2) = 2 variance^2, and squares are correlated as the squares of correlations.
    of_variance = variance * np.sqrt(2 * (1 + 2 * (correlations**2).sum(0)) / count)
    assert np.all(np.abs(flat(q.variance) - variance) < 4.5 * of_variance)
    # Far from the posterior's: what is told apart is told apart.
    assert np.all(np.abs(variance - np.diag(problem.covariance)) > 5 * of_variance)


def test_the_rate_by_default_is_that_closest_to_the_posterior():
    problem = Conjugate.make(rows=200, features=2)
    method = SWAG(
        collections=4, rank=2, every=1, burn_in=0, batch_size=2, start=start_of(problem, problem.mean)
    )
    rate = bnn.fit(problem.model, problem.x, problem.y, method).info.figures["learning_rate"]
    residual = problem.y - problem.design @ problem.mean
    gradients = problem.design * residual[:, None] / problem.noise**2
    assert np.isclose(rate, 2 * 3 * 2 / (200 * np.trace(np.cov(gradients, rowvar=False))), rtol=1e-9)

    def gap(rate: float) -> float:
        """KL(stationary || posterior), of Gaussians about one mean."""
        covariance = stationary(problem, rate, 2)[1]
        return 0.5 * (
            np.trace(problem.precision @ covariance)
            - 3
            - np.linalg.slogdet(problem.precision @ covariance)[1]
        )

    assert gap(rate) < min(gap(rate / 1.5), gap(rate * 1.5))
    # The shape is not the posterior's, whatever the rate: it is about the same in all directions.
    spread, wanted = (
        np.linalg.eigvalsh(each) for each in (stationary(problem, rate, 2)[1], problem.covariance)
    )
    assert spread[-1] / spread[0] < 1.5 < 5.0 < wanted[-1] / wanted[0]


@pytest.mark.parametrize(("share", "narrow"), [(0.098, True), (0.102, False)])
def test_iterates_that_do_not_spread_as_the_curvature_says_have_not_converged(share, narrow, monkeypatch):
    problem = Conjugate.make()
    method = SWAG(ppl="pyro", collections=150, every=5, start=start_of(problem, problem.mean))
    found = bnn.fit(problem.model, problem.x, problem.y, method)
    assert found.info.figures["converged"] == 1.0
    variance = flat(found.approximation.variance)
    wide = Conditioning(np.diag(share / variance))
    monkeypatch.setattr(swag, "conditioning", lambda problem, mean: wide)
    again = bnn.fit(problem.model, problem.x, problem.y, method)
    assert again.info.figures["converged"] == float(not narrow)
    assert any("spread over 0.098 of the variances" in text for text in again.info.warnings) == narrow


def test_a_badly_scaled_posterior_is_named():
    """Two features of correlation 0.99999: SGD at the rate that the stiff direction bears does not move the other."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(60, 1))
    x = 30.0 * (common + 0.003 * rng.normal(size=(60, 2)))
    problem = Conjugate(x, x.sum(1) + 0.5 * rng.normal(size=60), 0.5)
    at = start_of(problem, problem.mean)
    posterior = bnn.fit(problem.model, x, problem.y, SWAG(ppl="pyro", start=at), standardise=False)
    shown = flat(posterior.approximation.variance)[:2] / np.diag(problem.covariance)[:2]
    assert np.all(np.sqrt(shown) < 0.17)
    assert posterior.info.figures["converged"] == 0.0
    assert any("condition number" in text for text in posterior.info.warnings)


@pytest.mark.slow
def test_a_rate_that_would_overshoot_is_held_back():
    """More weights than rows, large batches: SGD still stays where it is."""

    def wide(x, y=None):
        f = bnn.mlp(x, [30, 1], activation="tanh", prior=priors.Normal(0.0, "fan_in"))
        bnn.observe(y, f, likelihoods.Gaussian(0.2))

    method = SWAG(collections=10, rank=5, burn_in=2, batch_size=20, steps=500)
    posterior = bnn.fit(wide, X, Y, method)
    losses = posterior.info.history["loss"]
    assert len(losses) == 12
    assert losses[-1] < losses[0] + 50.0


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_multiswag_is_an_ensemble_of_swag(ppl):
    method = SWAG(ppl=ppl, collections=5, rank=3, every=2, burn_in=1, batch_size=5, steps=100)
    posterior = bnn.fit(small_network, X, Y, Ensemble(method, 2))
    assert all(isinstance(member, SWAGGaussian) for member in posterior.approximation.members)
    u = {name: value[0, :20] for name, value in posterior.unconstrained_draws.items()}
    densities = [member.log_prob(u) for member in posterior.approximation.members]
    assert np.allclose(posterior.approximation.log_prob(u), logsumexp(densities, axis=0) - np.log(2))
    assert posterior.predict(X[:3]).draws == 1000
    assert posterior.info.figures["members"] == 2
    assert len(posterior.info.history["member_learning_rate"]) == 2


def test_bootstrapped_members_walk_on_their_own_rows(ppl):
    problem = Conjugate.make(rows=12)
    at = np.zeros(4)
    method = SWAG(
        ppl=ppl,
        collections=4,
        rank=2,
        every=2,
        burn_in=0,
        batch_size=3,
        learning_rate=0.05,
        start=start_of(problem, at),
    )
    posterior = bnn.fit(problem.model, problem.x, problem.y, Ensemble(method, 2, bootstrap=True))
    for index, member in enumerate(posterior.approximation.members):
        seed = 0 if index == 0 else site_seed("member 1", 0) % 2**31
        rows = np.random.default_rng(site_seed("bootstrap", seed)).integers(12, size=12)
        drawn = Conjugate(problem.x[rows], problem.y[rows], problem.noise)
        collected = iterates(drawn, at, 0.05, 3, 8, seed)[1::2]
        assert np.allclose(flat(member.mean), collected.mean(0), rtol=1e-9)


def test_a_coordinate_that_does_not_move_has_no_spread():
    problem = Conjugate.make(rows=12)
    x = problem.x.copy()
    x[:, 1] = 0.0
    method = SWAG(
        collections=5,
        rank=2,
        every=2,
        batch_size=3,
        learning_rate=0.05,
        start=start_of(problem, np.array([0.5, 0.0, 0.1, 0.2])),
    )
    with pytest.warns(UserWarning, match="no variance"):
        posterior = bnn.fit(problem.model, x, problem.y, method)
    assert any("1 of 4 coordinates did not move" in text for text in posterior.info.warnings)
    draws = posterior.unconstrained_draws["output.weight"][0]
    assert np.ptp(draws[:, 1]) == 0.0
    moving = np.array([0, 2, 3])
    u = {name: value[0, :5] for name, value in posterior.unconstrained_draws.items()}
    q = posterior.approximation
    wanted = multivariate_normal(flat(q.mean)[moving], q.covariance()[np.ix_(moving, moving)])
    assert np.allclose(q.log_prob(u), wanted.logpdf(flat(u)[:, moving]), rtol=1e-8)


def test_divergence_is_named(ppl):
    method = SWAG(
        ppl=ppl,
        collections=3,
        rank=2,
        burn_in=200,
        batch_size=5,
        learning_rate=1e3,
        start=MAP(ppl=ppl, steps=100),
    )
    with pytest.raises(DivergenceError, match=r"finite losses.*learning_rate=1e\+02"):
        bnn.fit(small_network, X, Y, method)


def test_impossible_settings():
    with pytest.raises(InputError, match="at least 2"):
        SWAG(rank=1)
    with pytest.raises(InputError, match="at most as many deviations"):
        SWAG(collections=10)
    with pytest.raises(UnknownNameError, match="cyclical"):
        SWAG(schedule="cyclic")
    with pytest.raises(InputError, match="at most the 25 rows"):
        bnn.fit(small_network, X, Y, SWAG(batch_size=26, steps=100))


def test_what_has_no_prior_or_no_rows_is_refused():
    def pointed(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Point()), likelihoods.Gaussian(0.5))

    def coupled(x, y=None):
        bnn.coupled()
        bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(0.5))

    with pytest.raises(UnsupportedError, match="without a prior"):
        bnn.fit(pointed, X, Y, SWAG())
    # By default, and with as many rows as there are, since they are drawn with replacement: no size would serve.
    for method in (SWAG(), SWAG(batch_size=25)):
        with pytest.raises(UnsupportedError, match=r"taken apart.*; try NUTS or SVI$"):
            bnn.fit(coupled, X, Y, method)
