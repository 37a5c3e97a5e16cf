"""Tempered sequential Monte Carlo against evidences in closed form and by quadrature, and posteriors with two modes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blackjax.smc.ess import ess as blackjax_ess
from scipy.stats import halfnorm, norm

import ppl_bnn as bnn
from ppl_bnn import NUTS, SMC, likelihoods, ops, priors
from ppl_bnn.core.errors import BudgetError, DivergenceError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.diagnostics.function_space import convergence
from ppl_bnn.inference.mcmc import smc
from ppl_bnn.inference.mcmc.smc import increment, systematic
from tests.problems import Conjugate

LINE = Conjugate.make(rows=20, features=1)
X = np.linspace(0.4, 1.6, 12)[:, None]
Y = X[:, 0] + 0.25 * np.random.default_rng(2).normal(size=12) + 0.05
GRID = np.linspace(-6.0, 6.0, 60_001)


def bent(x: Any, y: Any = None) -> None:
    """f = w^2 x + w / 10: a mode near w = 1, another near w = -1, and nothing between them."""
    w = bnn.sample("w", bnn.dist.Normal(0.5, 1.0))
    bnn.observe(y, w**2 * x + 0.1 * w, likelihoods.Gaussian(0.3))


def noise_only(x: Any, y: Any = None) -> None:
    """A scale and nothing else: all of the evidence is in log |dw/du|'s hands."""
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    bnn.observe(y, 0.0 * x, likelihoods.Gaussian(noise))


def two_units(x: Any, y: Any = None) -> None:
    """One tanh unit without biases: (v, w) and (-v, -w) are the same function."""
    hidden = ops.tanh(bnn.dense("hidden", x, 1, prior=priors.Normal(0.0, 1.0), bias=False))
    f = bnn.dense("output", hidden, 1, prior=priors.Normal(0.0, 1.0), bias=False)
    bnn.observe(y, f, likelihoods.Gaussian(0.1))


def log_integral(log_values: np.ndarray, grid: np.ndarray) -> float:
    """log of the integral of exp(log_values), by the trapezoidal rule."""
    top = log_values.max()
    return float(top + np.log(np.trapezoid(np.exp(log_values - top), grid)))


def log_joint_bent(w: np.ndarray) -> np.ndarray:
    f = w[:, None] ** 2 * X[:, 0] + 0.1 * w[:, None]
    return norm.logpdf(w, 0.5) + norm.logpdf(Y, f, 0.3).sum(1)


# --- against closed forms and quadrature ----------------------------------------------------------


@pytest.fixture(scope="module")
def line():
    method = SMC(particles=200, runs=16, moves=4)
    return bnn.fit(LINE.model, LINE.x, LINE.y, method)


def test_evidence_of_the_conjugate_model(line):
    """Within 4 standard errors over 16 runs."""
    figures = line.info.figures
    assert abs(line.log_evidence - LINE.log_evidence) < 4.0 * figures["log_evidence_se"]
    assert 0.0 < figures["log_evidence_se"] < 0.1
    each = line.info.history["log_normaliser"][line.info.history["inverse_temperature"] == 1.0]
    assert len(each) == 16
    assert np.isclose(line.log_evidence, np.log(np.mean(np.exp(each))))
    assert np.isclose(figures["log_evidence_se"], each.std(ddof=1) / 4.0)


def test_moments_of_the_conjugate_model(line):
    """Means and second moments of runs within 4 standard errors, over 16 runs and so as large as runs show them."""
    draws = Conjugate.flat(line.draws)
    deviation = draws - LINE.mean
    products = deviation[..., :, None] * deviation[..., None, :]
    for values, wanted in ((deviation, np.zeros(2)), (products, LINE.covariance)):
        runs = values.mean(1)
        error = runs.std(0, ddof=1) / 4.0
        assert np.all(np.abs(runs.mean(0) - wanted) < 4.0 * error)


def test_what_a_run_says_of_itself(line):
    figures, history = line.info.figures, line.info.history
    assert line.kind == "chains"
    assert line.shape == (16, 200)
    assert line.info.target == ""
    assert figures["acceptance"] > 0.5
    assert 2 <= figures["ancestors"] <= 200
    assert abs(figures["final_correlation"]) < 0.5
    lengths = np.bincount(history["run"])
    assert figures["temperatures"] == lengths.max()
    for run in range(16):
        own = history["run"] == run
        rises = history["inverse_temperature"][own]
        assert np.all(np.diff(rises) > 0.0)
        assert rises[-1] == 1.0
        # All but the last go down to the target, to the precision of the search for it.
        assert np.allclose(history["ess"][own][:-1], 0.5, atol=1e-4)
        assert history["ess"][own][-1] >= 0.5 - 1e-4
    joint = line.log_joint().reshape(line.shape)
    assert np.allclose(line.statistics["lp"], joint, rtol=1e-9, atol=1e-9)
    assert "R-hat" in str(bnn.diagnose(line))


@pytest.mark.slow
def test_a_cold_posterior():
    """p(w | D)^(1/T) is N(mean, T covariance), with (p(w) p(D | w))^(1/T) integrated in closed form."""
    temperature, size = 0.25, 2
    method = SMC(particles=200, runs=16, moves=4, temperature=temperature)
    posterior = bnn.fit(LINE.model, LINE.x, LINE.y, method)
    figures = posterior.info.figures
    power = 1.0 / temperature
    wanted = (
        power * LINE.log_evidence
        + 0.5 * (1.0 - power) * (size * math.log(2.0 * math.pi) + np.linalg.slogdet(LINE.covariance)[1])
        + 0.5 * size * math.log(temperature)
    )
    assert abs(figures["log_normaliser"] - wanted) < 4.0 * figures["log_normaliser_se"]
    assert "log_evidence" not in figures
    assert "T=0.25" in posterior.info.target
    with pytest.raises(UnsupportedError, match="log_evidence"):
        _ = posterior.log_evidence
    squares = ((Conjugate.flat(posterior.draws) - LINE.mean) ** 2).mean(1)
    error = squares.std(0, ddof=1) / 4.0
    assert np.all(np.abs(squares.mean(0) - temperature * np.diag(LINE.covariance)) < 4.0 * error)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
def test_the_volume_of_the_coordinates_belongs_to_the_prior(temperature):
    """A scale alone: the evidence, or what a tempered density integrates to, by quadrature over the scale itself."""
    y = 0.7 * np.random.default_rng(5).normal(size=12)
    grid = np.linspace(1e-3, 6.0, 40_001)
    log_joint = halfnorm.logpdf(grid) + norm.logpdf(y, 0.0, grid[:, None]).sum(1)
    wanted = log_integral(log_joint / temperature, grid)
    posterior = bnn.fit(noise_only, X, y, SMC(particles=200, runs=16, temperature=temperature))
    name = "log_evidence" if temperature == 1.0 else "log_normaliser"
    assert abs(posterior.info.figures[name] - wanted) < 4.0 * posterior.info.figures[f"{name}_se"]
    density = np.exp(log_joint / temperature - wanted)
    runs = posterior.draws["noise"].mean(1)
    assert abs(runs.mean() - np.trapezoid(grid * density, grid)) < 4.0 * runs.std(ddof=1) / 4.0


# --- several modes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_modes_of_different_weight():
    """Quadrature over the weight: the evidence, and the weights of the modes. NUTS stays in the one it begins in."""
    joint = log_joint_bent(GRID)
    wanted = log_integral(joint, GRID)
    share = np.exp(log_integral(joint[GRID > 0], GRID[GRID > 0]) - wanted)
    assert 0.6 < share < 0.9
    barrier = joint.max() - joint[np.abs(GRID) < 0.2].max()
    assert barrier > 20.0
    posterior = bnn.fit(bent, X, Y, SMC(particles=400, runs=16))
    figures = posterior.info.figures
    assert abs(posterior.log_evidence - wanted) < 4.0 * figures["log_evidence_se"]
    runs = (posterior.draws["w"] > 0).mean(1)
    assert np.all((runs > 0.2) & (runs < 1.0))
    assert abs(runs.mean() - share) < 4.0 * runs.std(ddof=1) / 4.0
    assert figures["final_correlation"] > 0.9
    # From the lesser mode.
    chain = bnn.fit(bent, X, Y, NUTS(chains=1, draws=100, warmup=100, start={"w": np.array(-1.0)}))
    assert np.all(chain.draws["w"] < 0.0)


@pytest.mark.slow
def test_both_signs_of_a_network():
    """A tanh unit with its two mirror images: half of the particles in each, within 4 standard errors over runs."""
    x = np.linspace(-2.0, 2.0, 20)[:, None]
    y = np.tanh(1.5 * x[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=20)
    posterior = bnn.fit(two_units, x, y, SMC(particles=300, runs=16))
    v, w = posterior.draws["output.weight"], posterior.draws["hidden.weight"]
    assert np.all(v * w > 0)
    runs = (w > 0).mean((1, 2, 3))
    assert abs(runs.mean() - 0.5) < 4.0 * runs.std(ddof=1) / 4.0
    assert np.all(np.abs(runs - 0.5) < 0.4)


# --- between temperatures -------------------------------------------------------------------------


def test_the_next_temperature_has_the_effective_size_that_was_asked_for():
    change = -np.random.default_rng(0).gamma(2.0, 1e4, size=500)
    for target in (0.3, 0.5, 0.95):
        rise = increment(change, target, 1.0)
        with jax.enable_x64(True):
            found = float(blackjax_ess(jnp.asarray(rise * change))) / 500
        assert 0.0 < rise < 1.0
        assert np.isclose(found, target, rtol=1e-4)
    assert increment(change, 0.5, 1e-9) == 1e-9
    # Of the particles that have a likelihood.
    half = np.where(np.arange(500) < 250, change, -np.inf)
    assert np.isclose(increment(half, 0.5, 1.0), increment(change[:250], 0.5, 1.0))
    assert increment(np.zeros(9), 0.5, 0.25) == 0.25


def test_resampling_takes_each_particle_as_often_as_it_weighs():
    weights = np.random.default_rng(0).dirichlet(np.full(50, 0.3))
    weights[7] = 0.0
    weights /= weights.sum()
    grid = (np.arange(4000) + 0.5) / 4000
    counts = np.stack([np.bincount(systematic(weights, at), minlength=50) for at in grid])
    assert counts.shape == (4000, 50)
    assert np.all(counts >= np.floor(50 * weights - 1e-9))
    assert np.all(counts <= np.ceil(50 * weights + 1e-9))
    assert np.all(counts[:, 7] == 0)
    assert np.allclose(counts.mean(0), 50 * weights, atol=1e-3)
    for at in (0.0, np.nextafter(1.0, 0.0)):
        assert systematic(weights, at).max() < 50
        assert 7 not in systematic(weights, at)


# --- interrupted ----------------------------------------------------------------------------------


class _Interrupting:
    """A progress whose task raises on an update, and keeps what it was told."""

    def __init__(self, after: int):
        self.after, self.told = after, []

    def task(self, title: str, total: int) -> _Interrupting:
        return self

    def update(self, done: int, **figures: float) -> None:
        self.told.append((done, figures))
        if len(self.told) == self.after:
            raise KeyboardInterrupt

    def close(self) -> None:
        pass


def test_an_interrupted_fit_goes_on_to_the_same_bits(tmp_path):
    method = SMC(particles=50, runs=2, moves=2)
    whole = bnn.fit(LINE.model, LINE.x, LINE.y, method, seed=3)
    kept = replace(method, checkpoint=tmp_path / "fit")
    # After the first temperature of the second run.
    first, second = np.bincount(whole.info.history["run"])
    assert second > 2
    with pytest.raises(KeyboardInterrupt):
        bnn.fit(LINE.model, LINE.x, LINE.y, kept, seed=3, progress=_Interrupting(int(first) + 2))
    told = _Interrupting(-1)
    again = bnn.fit(LINE.model, LINE.x, LINE.y, kept, seed=3, progress=told)
    assert len(told.told) == 1 + (second - 1) + 1
    assert told.told[-1][0] == 200
    # The first run was there, and what is told of the second goes on from where it was interrupted.
    assert told.told[0] == (100, {})
    at = [figures["inverse_temperature"] for _, figures in told.told[1:-1]]
    assert at == sorted(at)
    assert at[-1] == 1.0
    assert set(told.told[1][1]) == {"run", "inverse_temperature", "acceptance", "ess"}
    for name, value in whole.draws.items():
        assert np.array_equal(value, again.draws[name])
    assert again.info.figures == whole.info.figures
    assert again.info.gradient_evaluations == whole.info.gradient_evaluations
    with pytest.raises(InputError, match="differs in seed"):
        bnn.fit(LINE.model, LINE.x, LINE.y, kept, seed=4)


@pytest.mark.slow
def test_more_runs_find_the_earlier_ones(tmp_path):
    kept = SMC(particles=50, runs=2, moves=2, checkpoint=tmp_path / "fit")
    two = bnn.fit(LINE.model, LINE.x, LINE.y, kept, seed=3)
    told = _Interrupting(-1)
    three = bnn.fit(LINE.model, LINE.x, LINE.y, replace(kept, runs=3), seed=3, progress=told)
    assert told.told[1][0] == 200
    assert np.array_equal(three.draws["output.bias"][:2], two.draws["output.bias"])


# --- until a rule holds, or a budget is spent -----------------------------------------------------

SMALL = SMC(particles=50, runs=2, moves=2)


def test_runs_go_on_until_a_rule_holds_and_are_those_of_a_longer_fit():
    ruled = replace(SMALL, until="log_evidence_se<0.1, ess>100", budget=600.0)
    found = bnn.fit(LINE.model, LINE.x, LINE.y, ruled, seed=3)
    runs = found.shape[0]
    figures, history = found.info.figures, found.info.history
    assert (figures["rule_held"], figures["stopped_by_budget"]) == (1.0, 0.0)
    assert figures["log_evidence_se"] < 0.1
    assert runs > 2
    assert np.array_equal(history["look_runs"], np.arange(2, runs + 1))
    # The rule held at the last look and at no other.
    smallest = np.minimum(history["look_ess_bulk"], history["look_ess_tail"])
    held = (history["look_log_evidence_se"] < 0.1) & (smallest > 100)
    assert held.tolist() == [False] * (len(held) - 1) + [True]
    whole = bnn.fit(LINE.model, LINE.x, LINE.y, replace(SMALL, runs=runs), seed=3)
    for name, value in whole.draws.items():
        assert np.array_equal(value, found.draws[name])
    assert whole.info.figures.items() <= figures.items()
    # What was seen at the last look is what a diagnosis of the result sees.
    judged = convergence(found)
    assert judged.ess_bulk == pytest.approx(history["look_ess_bulk"][-1], rel=1e-9)
    assert judged.ess_tail == pytest.approx(history["look_ess_tail"][-1], rel=1e-9)


def test_a_spent_budget_leaves_whole_runs_and_says_so(tmp_path, monkeypatch):
    """The clock is stopped, and goes over the budget in the third run."""
    whole = bnn.fit(LINE.model, LINE.x, LINE.y, replace(SMALL, runs=3), seed=3)
    first, second, _ = np.bincount(whole.info.history["run"])
    asked = []

    class Clock(smc.Stopwatch):
        def __call__(self) -> float:
            asked.append(1)
            return 1e6 if len(asked) > first + second + 2 else 0.0

    method = replace(SMALL, runs=3, budget=1000.0, checkpoint=tmp_path / "fit")
    with monkeypatch.context() as patched:
        patched.setattr(smc, "Stopwatch", Clock)
        found = bnn.fit(LINE.model, LINE.x, LINE.y, method, seed=3)
    assert found.shape == (2, 50)
    assert found.info.figures["stopped_by_budget"] == 1.0
    assert "rule_held" not in found.info.figures
    assert "the budget of 1000 s was spent after 2 runs, before all 3 were made" in found.info.warnings
    again = bnn.fit(LINE.model, LINE.x, LINE.y, method, seed=3)
    for name, value in whole.draws.items():
        assert np.array_equal(value[:2], found.draws[name])
        assert np.array_equal(value, again.draws[name])
    with pytest.raises(BudgetError, match="seconds enough for one run"):
        bnn.fit(LINE.model, LINE.x, LINE.y, replace(SMALL, budget=1e-6), seed=3)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        (
            {"until": "rhat<1.01", "budget": 9.0},
            UnsupportedError,
            "rhat, which compares runs.*more particles",
        ),
        ({"until": "ess>400"}, InputError, "a budget beside it"),
        ({"until": "log_evidence_se>0.1", "budget": 9.0}, InputError, "log_evidence_se<limit"),
        (
            {"until": "log_evidence_se<0.1", "budget": 9.0, "temperature": 2.0},
            UnknownNameError,
            "log_normaliser_se",
        ),
        ({"budget": -1.0}, InputError, "SMC budget"),
    ],
)
def test_rules_that_more_runs_do_not_serve_are_refused(settings, error, match):
    with pytest.raises(error, match=match):
        SMC(**settings)


# --- what cannot be done --------------------------------------------------------------------------


def test_a_likelihood_without_support_is_named():
    def impossible(x, y=None):
        f = bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Gaussian(1e-160))

    with pytest.raises(DivergenceError, match="a likelihood of zero at all 20"):
        bnn.fit(impossible, X, Y, SMC(particles=20))


def test_a_log_joint_that_is_nan_is_named():
    def undefined(x, y=None):
        w = bnn.sample("w", bnn.dist.Normal(0.0, 1.0))
        bnn.observe(y, ops.log(w) * x, likelihoods.Gaussian(0.3))

    with pytest.raises(DivergenceError, match=r"of 20 from the prior at which it is NaN"):
        bnn.fit(undefined, X, Y, SMC(particles=20))


@pytest.mark.slow
def test_particles_without_support_carry_no_weight_and_are_named():
    """sqrt(1 - w^2) has the value 0 outside of the unit interval, and the likelihood of what is observed none."""

    def half(x, y=None):
        w = bnn.sample("w", bnn.dist.Normal(0.0, 1.0))
        noise = ops.where(w > 0.0, 0.3, 1e-160)
        bnn.observe(y, w * x, likelihoods.Gaussian(noise))

    posterior = bnn.fit(half, X, Y, SMC(particles=200, runs=16))
    assert np.all(posterior.draws["w"] > 0)
    assert any("zero at" in warning for warning in posterior.info.warnings)
    grid = GRID[GRID > 0]
    joint = norm.logpdf(grid) + norm.logpdf(Y, grid[:, None] * X[:, 0], 0.3).sum(1)
    wanted = log_integral(joint, grid)
    assert abs(posterior.log_evidence - wanted) < 4.0 * posterior.info.figures["log_evidence_se"]


def test_particles_that_do_not_move_are_named():
    def stuck(x, y=None):
        w = bnn.sample("w", bnn.dist.Normal(0.0, 1.0))
        bnn.observe(y, w * x + ops.sqrt(0.0 * w), likelihoods.Gaussian(0.3))

    with pytest.raises(DivergenceError, match="particles that move"):
        bnn.fit(stuck, X, Y, SMC(particles=20))


@pytest.mark.slow
def test_runs_that_disagree_are_named():
    posterior = bnn.fit(bent, X, Y / 0.03, SMC(particles=4, runs=6, moves=1))
    assert any("differ in log p(D)" in warning for warning in posterior.info.warnings)
    assert "log_evidence_se" not in bnn.fit(bent, X, Y, SMC(particles=20, runs=1)).info.figures


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"particles": 1}, "SMC particles"),
        ({"runs": 0}, "SMC runs"),
        ({"moves": 0}, "SMC moves"),
        ({"target_ess": 1.0}, "SMC target_ess"),
        ({"target_accept": 0.0}, "SMC target_accept"),
        ({"max_leapfrog": 0}, "SMC max_leapfrog"),
        ({"temperature": 0.0}, "SMC temperature"),
        ({"checkpoint": 3}, "SMC checkpoint"),
    ],
)
def test_impossible_settings(settings, named):
    with pytest.raises(InputError, match=named):
        SMC(**settings)


def test_what_it_is_not_for():
    with pytest.raises(UnsupportedError, match="numpyro"):
        SMC(ppl="pyro")
    with pytest.raises(UnknownNameError, match="start"):
        SMC(start=None)

    def with_point(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Point()), likelihoods.Gaussian(0.3))

    with pytest.raises(UnsupportedError, match="SMC"):
        bnn.fit(with_point, X, Y, SMC(particles=20))
