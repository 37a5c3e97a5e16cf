"""The evidence against closed forms of Bayesian linear regression, SciPy's optimisers and textbook identities."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar, root
from scipy.stats import multivariate_normal

from ppl_bnn.core.errors import CurvatureError, DivergenceError
from ppl_bnn.core.progress import ended_by_callback, resolve
from ppl_bnn.inference.laplace import evidence as evidence_module
from ppl_bnn.inference.laplace.evidence import (
    LIMITS,
    Evidence,
    GaussianNoise,
    alternate,
    fixed_point,
    groups_of,
    maximise,
)
from ppl_bnn.inference.laplace.search import by_validation, marginal_mode


class Dense:
    """log det(scale H + diag(factors[groups] prior)) and gamma, by the definition."""

    def __init__(self, curvature, prior, groups, eigenvalues=None):
        self.curvature, self.prior, self.groups, self.eigenvalues = curvature, prior, groups, eigenvalues
        self.calls = 0

    def __call__(self, factors, scale=1.0):
        self.calls += 1
        diagonal = factors[self.groups] * self.prior
        precision = scale * self.curvature + np.diag(diagonal)
        sign, value = np.linalg.slogdet(precision)
        if sign <= 0:
            raise CurvatureError("not positive definite")
        gamma = 1.0 - diagonal * np.diag(np.linalg.inv(precision))
        return value, np.bincount(self.groups, weights=gamma, minlength=len(factors))


class Linear:
    """y = X w + noise, w_i ~ N(loc_i, 1 / (tau_g(i) prior_i)), noise precision s beta: everything in closed form."""

    def __init__(self, seed=0, rows=30, outputs=1, groups=(0, 0, 1, 1, 2), names=("a", "b", "c")):
        rng = np.random.default_rng(seed)
        self.groups, self.names = np.array(groups), names
        self.inputs = len(groups) // outputs
        self.x = rng.normal(size=(rows, self.inputs)) * np.linspace(0.5, 2.0, self.inputs)
        weights = rng.normal(size=(self.inputs, outputs)) * np.linspace(0.3, 2.0, self.inputs)[:, None]
        self.y = self.x @ weights + 0.4 * rng.normal(size=(rows, outputs))
        self.prior = rng.uniform(0.5, 3.0, size=len(groups))
        self.loc = 0.1 * rng.normal(size=len(groups))
        self.beta = 3.0
        # Columns of the design over the flat vector of weights (inputs, outputs) in C order.
        self.design = np.kron(self.x, np.eye(outputs))

    def mode(self, factors, scale):
        prior = factors[self.groups] * self.prior
        precision = scale * self.beta * self.design.T @ self.design + np.diag(prior)
        right = scale * self.beta * self.design.T @ self.y.reshape(-1) + prior * self.loc
        return np.linalg.solve(precision, right)

    def evidence(self, factors, scale=1.0, held=(), log_prior_held=0.0):
        mode = self.mode(factors, scale)
        residuals = (self.y.reshape(-1) - self.design @ mode).reshape(self.y.shape)
        return Evidence(
            Dense(self.beta * self.design.T @ self.design, self.prior, self.groups),
            groups=self.groups,
            prior=self.prior,
            mode=mode,
            location=self.loc,
            likelihood=GaussianNoise.of(residuals, self.beta),
            names=self.names,
            held=held,
            log_prior_held=log_prior_held,
        )

    def known(self, factors, scale=1.0):
        """The evidence with the noise as it is."""
        evidence = self.evidence(factors, scale)
        assert isinstance(evidence.likelihood, GaussianNoise)
        return replace(evidence, likelihood=evidence.likelihood.log_likelihood(scale))

    def exact(self, factors, scale=1.0):
        """log N(y | X loc, I / (s beta) + X Lambda^-1 X') by SciPy."""
        prior = factors[self.groups] * self.prior
        covariance = np.eye(self.y.size) / (scale * self.beta) + (self.design / prior) @ self.design.T
        return multivariate_normal(self.design @ self.loc, covariance).logpdf(self.y.reshape(-1))


@cache
def optimum(tune_noise=True):
    """A regression and the maximum of its exact evidence by Nelder-Mead, which shares nothing with what is tested."""
    linear = Linear(8, rows=40)

    def negative(z):
        return -linear.exact(np.exp(z[:3]), np.exp(z[3]) if tune_noise else 1.0)

    z = np.zeros(3 + tune_noise)
    for _ in range(3):
        z = minimize(
            negative,
            z,
            method="Nelder-Mead",
            options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 2000, "maxfev": 2000},
        ).x

    def gradient(z):
        """Of the closed form, through the covariance of the targets: exact to rounding where a value is to its root."""
        prior = np.exp(z[:3])[linear.groups] * linear.prior
        noise = np.eye(40) / (linear.beta * (np.exp(z[3]) if tune_noise else 1.0))
        parts = [-(linear.design * (linear.groups == g) / prior) @ linear.design.T for g in range(3)]
        inverse = np.linalg.inv(noise - sum(parts))
        solved = inverse @ (linear.y[:, 0] - linear.design @ linear.loc)
        return [
            0.5 * (solved @ part @ solved - np.sum(inverse * part))
            for part in [*parts, -noise][: 3 + tune_noise]
        ]

    found = root(gradient, z, tol=1e-12)
    assert np.max(np.abs(found.fun)) < 1e-9
    assert np.allclose(found.x, z, atol=1e-4)
    z = found.x
    return linear, np.exp(z[:3]), np.exp(z[3]) if tune_noise else 1.0, -negative(z)


# --- the value and its gradient ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("outputs", [1, 2])
def test_is_the_exact_evidence_of_linear_regression_at_its_mode(seed, outputs):
    groups = (0, 0, 1, 1, 2) if outputs == 1 else (0, 0, 1, 2, 1, 2)
    linear = Linear(seed, outputs=outputs, groups=groups)
    rng = np.random.default_rng(100 + seed)
    for _ in range(5):
        factors, scale = np.exp(rng.normal(scale=3.0, size=3)), np.exp(2.0 * rng.normal())
        value = linear.evidence(factors, scale).at(factors, scale).value
        assert value == pytest.approx(linear.exact(factors, scale), rel=1e-10)


def test_gradient_is_that_of_finite_differences():
    linear = Linear(3)
    evidence = linear.evidence(np.ones(3))
    rng = np.random.default_rng(1)
    for _ in range(5):
        z = rng.normal(size=4)
        for axis, exact in enumerate(evidence.at(np.exp(z[:3]), float(np.exp(z[3]))).gradient):
            step = 1e-4 * np.eye(4)[axis]
            high, low = (
                evidence.at(np.exp(at[:3]), float(np.exp(at[3]))).value for at in (z + step, z - step)
            )
            # Central differences err by step^2 times a third derivative of about the value, plus rounding / step.
            assert (high - low) / 2e-4 == pytest.approx(exact, abs=1e-5)


def test_is_concave_in_the_logarithms():
    evidence = Linear(4).evidence(np.ones(3))
    rng = np.random.default_rng(2)
    for _ in range(50):
        a, b = rng.normal(scale=3.0, size=(2, 4))
        ends = [evidence.at(np.exp(z[:3]), float(np.exp(z[3]))).value for z in (a, b)]
        middle = np.exp((a + b) / 2)
        assert evidence.at(middle[:3], float(middle[3])).value >= np.mean(ends) - 1e-9


def test_noise_may_differ_between_outputs():
    residuals = np.random.default_rng(0).normal(size=(7, 2))
    precision = np.array([2.0, 5.0])
    noise = GaussianNoise.of(residuals, precision)
    expected = multivariate_normal(np.zeros(2), np.diag(1.0 / (3.0 * precision))).logpdf(residuals).sum()
    assert noise.log_likelihood(3.0) == pytest.approx(expected, rel=1e-12)
    same = GaussianNoise.of(residuals, np.broadcast_to(precision, (7, 2)))
    assert same == noise


def test_held_group_keeps_its_factor_and_its_log_density():
    linear = Linear(6)
    factors = np.array([0.5, 2.0, 1.0])
    mode = linear.mode(factors, 1.0)
    log_prior = multivariate_normal(linear.loc[4:], 1.0 / linear.prior[4:]).logpdf(mode[4:])
    evidence = linear.evidence(factors, held=("c",), log_prior_held=log_prior)
    assert evidence.at(factors).value == pytest.approx(linear.exact(factors), rel=1e-10)
    tuned = fixed_point(evidence)
    assert tuned.converged
    assert tuned.factors[2] == 1.0
    assert not np.isclose(tuned.factors[0], 1.0)


def test_gamma_is_that_of_the_eigenvalues():
    """PRML (3.91): gamma = sum lambda_i / (alpha + lambda_i), between 0 and the number of weights."""
    linear = Linear(7, groups=(0,) * 5, names=("all",))
    linear.prior[:] = 1.0
    evidence = linear.evidence(np.ones(1))
    eigenvalues = np.linalg.eigvalsh(linear.beta * linear.design.T @ linear.design)
    for alpha in (1e-6, 0.3, 10.0, 1e9):
        gamma = evidence.at(np.array([alpha])).gamma
        assert gamma[0] == pytest.approx(np.sum(eigenvalues / (alpha + eigenvalues)), abs=1e-9)
        assert 0.0 <= gamma[0] <= 5.0


# --- tuning at one mode -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("start", [1e-4, 1.0, 1e4])
def test_fixed_point_and_maximum_agree_at_one_mode(seed, start):
    evidence = Linear(seed).evidence(np.ones(3))
    begin = np.append(np.full(3, start), 1.0)
    fixed = fixed_point(evidence, start=begin, tolerance=1e-10)
    direct = maximise(evidence, start=begin, tolerance=1e-8)
    assert fixed.converged
    assert direct.converged
    assert np.allclose(fixed.factors, direct.factors, rtol=1e-6)
    assert fixed.scale == pytest.approx(direct.scale, rel=1e-6)
    assert fixed.log_evidence == pytest.approx(direct.log_evidence, rel=1e-12)
    assert fixed.warnings == direct.warnings == ()
    # PRML (3.92) and (3.95) hold at the result.
    assert np.allclose(fixed.factors, fixed.gamma / evidence.quadratics, rtol=1e-8)
    noise = evidence.likelihood
    assert fixed.scale == pytest.approx((30 - fixed.gamma.sum()) / noise.misfit, rel=1e-8)


def test_result_beats_a_grid():
    evidence = Linear(1, groups=(0,) * 5, names=("all",)).evidence(np.ones(1))
    factors, scales = np.logspace(-2, 2, 41), np.logspace(-1, 1, 21)
    surface = np.array([[evidence.at(np.array([f]), float(s)).value for s in scales] for f in factors])
    tuned = fixed_point(evidence)
    assert 0.0 <= tuned.log_evidence - surface.max() < 0.1
    row, column = np.unravel_index(np.argmax(surface), surface.shape)
    assert abs(np.log(tuned.factors[0] / factors[row])) <= np.log(factors[1] / factors[0])
    assert abs(np.log(tuned.scale / scales[column])) <= np.log(scales[1] / scales[0])


def test_log_evidence_rises_at_every_iteration_even_where_the_plain_update_overshoots():
    """Weights that the data barely determine: gamma falls almost as 1 / tau, and the plain update jumps to and fro."""
    curvature, quadratic = 1e-3, 0.9e-3
    evidence = Evidence(
        Dense(np.array([[curvature]]), np.ones(1), np.zeros(1, int)),
        groups=np.zeros(1, int),
        prior=np.ones(1),
        mode=np.full(1, quadratic**0.5),
        likelihood=-3.0,
        names=("w",),
    )
    # gamma = c / (c + tau) = tau q has the positive root of tau^2 + c tau - c / q = 0.
    root = (-curvature + np.sqrt(curvature**2 + 4.0 * curvature / quadratic)) / 2.0
    plain = [1.0]
    for _ in range(20):
        plain.append(curvature / (curvature + plain[-1]) / quadratic)
    assert abs(plain[-1] - root) > 0.5 * abs(plain[0] - root)
    tuned = fixed_point(evidence, tolerance=1e-12)
    assert tuned.converged
    assert len(tuned.history) < 20
    assert tuned.factors[0] == pytest.approx(root, rel=1e-10)
    assert np.all(np.diff(tuned.history) >= -1e-12)
    assert tuned.log_evidence == tuned.history[-1]


@pytest.mark.parametrize("tune", [fixed_point, maximise])
def test_likelihood_without_noise_is_a_constant(tune):
    evidence = Linear(2).known(np.ones(3))
    best = minimize(
        lambda z: -evidence.at(np.exp(z)).value,
        np.zeros(3),
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 2000},
    )
    tuned, other = tune(evidence), tune(replace(evidence, likelihood=-12.5))
    assert tuned.scale == 1.0
    assert np.allclose(tuned.factors, np.exp(best.x), rtol=1e-5)
    assert np.allclose(other.factors, tuned.factors, rtol=1e-6)
    assert other.log_evidence - tuned.log_evidence == pytest.approx(-12.5 - evidence.likelihood)


# --- tuning while the mode follows ------------------------------------------------------------------


@pytest.mark.parametrize("tune", [fixed_point, maximise])
@pytest.mark.parametrize("tune_noise", [True, False])
def test_alternation_reaches_the_maximum_of_the_exact_evidence(tune, tune_noise):
    linear, factors, scale, value = optimum(tune_noise)

    def evidence_at(factors, scale):
        return (linear.evidence if tune_noise else linear.known)(factors, scale).at(factors, scale)

    found = alternate(evidence_at, np.ones(3), tune, tolerance=1e-9, rounds=200)
    assert found.converged
    assert found.warnings == ()
    assert found.log_evidence == pytest.approx(value, rel=1e-10)
    assert np.allclose(found.factors, factors, rtol=1e-6)
    assert found.scale == pytest.approx(scale, rel=1e-6)


def test_single_updates_during_training_reach_the_same_place():
    linear, best, best_scale, _ = optimum()
    factors, scale = np.ones(3), 1.0
    for _ in range(200):
        tuned = fixed_point(linear.evidence(factors, scale), np.append(factors, scale), iterations=1)
        factors, scale = tuned.factors, tuned.scale
    assert np.allclose(factors, best, rtol=1e-6)
    assert scale == pytest.approx(best_scale, rel=1e-6)


def test_marginal_mode_finds_the_maximum_of_the_exact_evidence():
    linear, factors, scale, value = optimum()

    def objective(phi):
        return linear.evidence(np.exp(phi[:3]), np.exp(phi[3])).at(np.exp(phi[:3]), np.exp(phi[3])).value

    found = marginal_mode(objective, np.zeros(4), tolerance=1e-6, evaluations=2000)
    assert found.converged
    assert found.warnings == ()
    assert found.value == pytest.approx(value, abs=1e-6)
    assert np.allclose(found.point, np.log(np.append(factors, scale)), atol=1e-4)


def test_alternation_says_when_the_evidence_fell():
    """Evidences whose curvature jumps with the mode, as that of a network may: the last round is not the best."""
    values = iter([-5.0, -1.0, -3.0])
    base = Linear(1, groups=(0,) * 5, names=("all",)).evidence(np.ones(1))

    def evidence_at(factors, scale):
        return replace(base, likelihood=next(values)).at(factors, scale)

    found = alternate(evidence_at, np.ones(1), rounds=5, tolerance=1e-6)
    assert found.converged
    assert any("fell" in warning and "round 1 of 2" in warning for warning in found.warnings)


def test_parts_of_a_step_stay_within_the_limits():
    """A step back from next to the lower limit, which the evidence at the modes found there asks for."""
    base = Linear(1, groups=(0,) * 5, names=("all",)).evidence(np.ones(1))

    def evidence_at(factors, scale):
        return replace(base, likelihood=-50.0 * float(np.log(factors[0]))).at(factors, scale)

    found = alternate(evidence_at, np.array([2e-8]), monotone=True, rounds=4)
    assert found.factors[0] == LIMITS[0]
    assert found.history[1] > found.history[0]
    plain = alternate(evidence_at, np.array([2e-8]), rounds=4)
    assert plain.factors[0] > 1e-3


# --- relevance --------------------------------------------------------------------------------------


def test_irrelevant_inputs_are_found_one_precision_per_weight():
    rng = np.random.default_rng(11)
    rows, relevant, irrelevant = 400, 3, 12
    x = rng.normal(size=(rows, relevant + irrelevant))
    y = x[:, :relevant] @ np.array([1.0, -2.0, 0.7]) + 0.3 * rng.normal(size=rows)
    groups, names = groups_of([("input.weight", relevant + irrelevant)], per="weight")
    prior = np.ones(relevant + irrelevant)

    def evidence_at(factors, scale):
        precision = scale * x.T @ x + np.diag(factors)
        mode = np.linalg.solve(precision, scale * x.T @ y)
        evidence = Evidence(
            Dense(x.T @ x, prior, groups),
            groups=groups,
            prior=prior,
            mode=mode,
            likelihood=GaussianNoise.of(y - x @ mode, 1.0),
            names=names,
        )
        return evidence.at(factors, scale)

    found = alternate(evidence_at, np.ones(len(groups)), rounds=400, tolerance=1e-5)
    assert np.all(found.factors[:relevant] < 10.0)
    assert found.scale == pytest.approx(1.0 / 0.3**2, rel=4.0 * np.sqrt(2.0 / rows))

    # Tipping and Faul (2003): with the others fixed, the best alpha_i is s_i^2 / (q_i^2 - s_i), or infinite where
    # that is negative.
    def sparsity(i):
        others = np.delete(np.arange(len(groups)), i)
        covariance = np.eye(rows) / found.scale + (x[:, others] / found.factors[others]) @ x[:, others].T
        solved = np.linalg.solve(covariance, np.column_stack([x[:, i], y]))
        return x[:, i] @ solved[:, 0], x[:, i] @ solved[:, 1]

    infinite = 0
    for i in range(len(groups)):
        s, q = sparsity(i)
        # At q^2 = s the updates converge arbitrarily slowly, so inputs close to it say nothing about them.
        if q**2 > 1.2 * s:
            assert found.factors[i] == pytest.approx(s**2 / (q**2 - s), rel=1e-2)
        elif q**2 < s / 1.2:
            infinite += 1
            assert found.factors[i] > 1e4
    # An input without influence has q_i^2 / s_i of about chi-squared with one degree of freedom: below 1 in 68 of 100.
    assert infinite >= 2
    assert any("input.weight[" in name for name in found.at_bounds)
    assert any("upper limit" in warning and "prior mean" in warning for warning in found.warnings)


# --- guards -----------------------------------------------------------------------------------------


def one_group(curvature, mode, likelihood=0.0, eigenvalues=None):
    size = len(curvature)
    groups = np.zeros(size, int)
    return Evidence(
        Dense(np.asarray(curvature, float), np.ones(size), groups, eigenvalues),
        groups=groups,
        prior=np.ones(size),
        mode=np.asarray(mode, float),
        likelihood=likelihood,
        names=("w",),
    )


@pytest.mark.parametrize("tune", [fixed_point, maximise])
def test_mode_at_the_prior_mean_runs_into_the_upper_limit_and_says_so(tune, monkeypatch):
    tuned = tune(one_group(np.eye(2), [0.0, 0.0]))
    assert tuned.factors[0] == 1e8
    assert tuned.at_bounds == ("w",)
    assert any("'w'" in warning and "upper limit, 1e+08" in warning for warning in tuned.warnings)
    # Far along, the evidence rises by less than its own rounding.
    flat = one_group(1e-3 * np.eye(2), [0.0, 0.0])
    tuned = tune(flat, start=np.array([1e4, 1.0]))
    assert tuned.factors[0] == 1e8
    assert np.array_equal(tuned.gamma, flat.at(tuned.factors).gamma)
    # gamma = 1 / (1 + tau) each, so tau^2 + tau = 1 / w^2: the root is about 1e9.
    beyond = one_group(np.eye(2), [1e-9, 1e-9])
    tuned = tune(beyond)
    assert tuned.factors[0] == 1e8
    assert tuned.at_bounds == ("w",)
    assert tuned.log_evidence == beyond.at(tuned.factors).value
    assert np.array_equal(tuned.gamma, beyond.at(tuned.factors).gamma)
    monkeypatch.setattr(evidence_module, "LIMITS", (1e-2, 1e3))
    narrower = tune(one_group(np.eye(2), [0.0, 0.0]))
    assert narrower.factors[0] == pytest.approx(1e3, rel=1e-12)


@pytest.mark.parametrize("tune", [fixed_point, maximise])
def test_weights_without_influence_run_into_the_lower_limit_and_say_so(tune):
    tuned = tune(one_group(np.zeros((2, 2)), [1.0, 1.0]))
    assert tuned.factors[0] == pytest.approx(1e-8, rel=1e-12)
    assert tuned.at_bounds == ("w",)
    assert any("lower limit" in warning for warning in tuned.warnings)


@pytest.mark.parametrize("tune", [fixed_point, maximise])
def test_factor_that_does_not_matter_is_left_alone_and_named(tune):
    tuned = tune(one_group(np.zeros((2, 2)), [0.0, 0.0]), start=np.array([3.0, 1.0]))
    assert tuned.factors[0] == pytest.approx(3.0)
    assert tuned.at_bounds == ()
    assert any("the data are not informative" in warning for warning in tuned.warnings)


@pytest.mark.parametrize("tune", [fixed_point, maximise])
def test_exact_fit_sends_the_noise_to_its_limit_and_says_so(tune):
    evidence = one_group(np.eye(2), [1.0, 1.0], GaussianNoise(10, 0.0, 0.0))
    tuned = tune(evidence)
    assert tuned.scale == pytest.approx(1e8, rel=1e-12)
    assert tuned.at_bounds == ("noise",)
    assert any("residuals are nearly zero" in warning for warning in tuned.warnings)


def test_noise_needs_more_targets_than_effective_parameters(monkeypatch):
    evidence = one_group(1e6 * np.eye(4), np.ones(4), GaussianNoise(3, 5.0, 0.0))
    with pytest.raises(
        CurvatureError, match=r"fewer effective parameters than the 3 targets.*gamma = 4; .*noise='mode'"
    ):
        fixed_point(evidence)
    # The gradient is defined there, and the maximum has N K > gamma.
    tuned = maximise(evidence)
    assert tuned.converged
    assert tuned.gamma.sum() < 3.0
    monkeypatch.setattr(evidence_module, "LIMITS", (0.5, 2.0))
    with pytest.raises(CurvatureError, match="fewer effective parameters"):
        maximise(evidence)


@pytest.mark.parametrize("tune", [fixed_point, maximise])
def test_negative_curvature_is_refused(tune):
    indefinite = np.diag([2.0, -0.5])
    with pytest.raises(CurvatureError, match=r"without negative eigenvalues.*-0\.5"):
        tune(one_group(indefinite, [1.0, 1.0], eigenvalues=np.array([-0.5, 2.0])))
    with pytest.raises(CurvatureError, match=r"without negative eigenvalues.*gamma = -"):
        tune(one_group(np.diag([0.2, -0.5]), [1.0, 1.0]))
    with pytest.raises(CurvatureError, match=r"evidence at factors.*not positive definite"):
        tune(one_group(indefinite, [1.0, 1.0]), start=np.array([0.4, 1.0]))


@pytest.mark.parametrize("tune", [fixed_point, maximise])
def test_too_few_iterations_are_reported(tune):
    tuned = tune(Linear(1).evidence(np.ones(3)), start=np.append(np.full(3, 1e4), 1.0), iterations=1)
    assert not tuned.converged
    assert len(tuned.history) == 1
    assert any("give more iterations" in warning for warning in tuned.warnings)


# --- a held-out score -------------------------------------------------------------------------------


def test_validation_finds_the_maximum_of_a_score_and_counts():
    calls = []

    def score(factors):
        calls.append(factors)
        return -((np.log(factors[0]) - 1.3) ** 2)

    found = by_validation(score, np.array([2.0]), tolerance=1e-3)
    assert found.point[0] == pytest.approx(np.exp(1.3), rel=1e-3)
    assert len(calls) == len(found.history)
    assert found.value == found.history[:, -1].max()
    assert found.converged
    assert found.warnings == ()


def test_validation_takes_groups_one_by_one():
    target = np.array([1.3, -2.1])

    def score(factors):
        z = np.log(factors) - target
        return -float(z @ z + 0.5 * z[0] * z[1])

    found = by_validation(score, np.ones(2), names=("a", "b"), tolerance=0.01, sweeps=20)
    assert found.converged
    # A sweep that moves by less than the tolerance leaves an error of that order, as the coupling is weak.
    assert np.allclose(np.log(found.point), target, atol=0.03)
    short = by_validation(score, np.ones(2), names=("a", "b"), tolerance=0.001, sweeps=1)
    assert not short.converged
    assert any("more sweeps" in warning for warning in short.warnings)


def test_validation_is_never_worse_than_its_start():
    found = by_validation(
        lambda factors: float(abs(np.log(factors[0])) < 0.01), np.ones(1), grid=[0.1, 5.0, 30.0]
    )
    assert found.point[0] == 1.0
    assert found.value == 1.0
    assert found.warnings == ()


def test_validation_agrees_with_ridge_regression_on_held_out_rows():
    linear = Linear(9, rows=20, groups=(0,) * 5, names=("all",))
    new = np.random.default_rng(5).normal(size=(200, 5))
    targets = 0.7 * new @ linear.mode(np.array([1e-3]), 1.0) + 0.4 * np.random.default_rng(6).normal(size=200)

    def score(factors):
        return -float(np.mean((targets - new @ linear.mode(factors, 1.0)) ** 2))

    best = minimize_scalar(
        lambda z: -score(np.exp([z])), bounds=(-9.0, 9.0), method="bounded", options={"xatol": 1e-8}
    )
    assert abs(best.x) < 8.0
    found = by_validation(score, np.ones(1), tolerance=1e-3)
    assert found.value == pytest.approx(-best.fun, rel=1e-6)


def test_validation_names_the_end_of_its_grid_and_a_score_that_is_none():
    found = by_validation(lambda factors: float(np.log(factors[0])), np.ones(1))
    assert found.point[0] == pytest.approx(1e4)
    assert any("upper end of the grid" in warning for warning in found.warnings)
    some = by_validation(lambda factors: -np.inf if factors[0] > 2.0 else float(factors[0]), np.ones(1))
    assert 1.8 < some.point[0] <= 2.0
    with pytest.raises(DivergenceError, match="a score that is a number"):
        by_validation(lambda factors: np.nan, np.ones(1))
    with pytest.raises(DivergenceError, match="-inf everywhere"):
        by_validation(lambda factors: -np.inf, np.ones(1))


# --- an outer maximum -------------------------------------------------------------------------------


def test_outer_search_never_steps_farther_than_a_step_from_its_best_point():
    found = marginal_mode(
        lambda phi: -np.sum((phi - [7.0, -3.0]) ** 2), np.zeros(2), step=0.5, evaluations=1000
    )
    assert found.converged
    assert np.allclose(found.point, [7.0, -3.0], atol=2e-3)
    best, value = found.history[0, :2], found.history[0, 2]
    for row in found.history[1:]:
        assert np.max(np.abs(row[:2] - best)) <= 2 * 0.5 + 1e-12
        if row[2] > value:
            best, value = row[:2], row[2]


@pytest.mark.parametrize("direction", [-1.0, 1.0])
def test_outer_search_stays_within_a_step_until_it_has_settled_there(direction):
    found = marginal_mode(lambda phi: float(direction * phi[0]), [0.0], step=0.5, evaluations=7)
    assert not found.converged
    assert found.point[0] == pytest.approx(0.5 * direction)
    assert np.max(np.abs(found.history[:, 0])) <= 0.5


def test_outer_search_is_exact_on_a_smooth_function_of_one_scale():
    found = marginal_mode(lambda phi: float(3.0 * phi[0] - np.exp(phi[0])), [0.0], tolerance=1e-5)
    assert found.point[0] == pytest.approx(np.log(3.0), abs=1e-4)
    assert found.converged


def test_outer_search_survives_points_without_a_mode():
    found = marginal_mode(lambda phi: -np.inf if phi[0] > 0.4 else -((phi[0] - 0.1) ** 2), [-0.5])
    assert found.point[0] == pytest.approx(0.1, abs=1e-2)


def test_unbounded_evidence_is_named():
    with pytest.raises(DivergenceError, match=r"still rising at log scale = .*proper hyper-prior"):
        marginal_mode(lambda phi: float(phi[0]), [0.0], names=["log scale"], evaluations=2000)
    with pytest.raises(DivergenceError, match="finite log evidence"):
        marginal_mode(lambda phi: np.inf if phi[0] > 0.3 else phi[0], [0.0])
    with pytest.raises(DivergenceError, match="finite log evidence"):
        marginal_mode(lambda phi: np.nan, [0.0])
    with pytest.raises(DivergenceError, match="at the start"):
        marginal_mode(lambda phi: -np.inf, [0.0])


def test_evidence_that_levels_off_is_undetermined():
    found = marginal_mode(lambda phi: float(np.tanh(phi[0])), [0.0], reach=30.0, evaluations=2000)
    assert not found.converged
    assert any("undetermined" in warning and "phi[0]" in warning for warning in found.warnings)


def test_the_budget_of_the_outer_search_is_reported():
    short = marginal_mode(lambda phi: -float(np.sum(phi**4)), np.ones(3), evaluations=7)
    assert not short.converged
    assert len(short.history) == 7
    assert any("7 evaluations" in warning for warning in short.warnings)


def test_searches_report_to_a_progress_and_close_it():
    class Recorder:
        def __init__(self):
            self.closed, self.updates = 0, []

        def task(self, title, total):
            return self

        def update(self, done, **figures):
            self.updates.append((done, figures))

        def close(self):
            self.closed += 1

    recorder = Recorder()
    marginal_mode(lambda phi: -float(phi[0] ** 2), [0.5], progress=recorder)
    assert recorder.closed == 1
    assert [done for done, _ in recorder.updates] == list(range(1, len(recorder.updates) + 1))
    by_validation(lambda factors: 0.0, np.ones(1), progress=recorder)
    linear = Linear(1)
    alternate(lambda *point: linear.evidence(*point).at(*point), np.ones(3), progress=recorder)
    assert recorder.closed == 3
    assert "log_evidence" in recorder.updates[-1][1]
    watched = resolve(None, lambda step: step.done >= 2)
    short = alternate(lambda *point: linear.evidence(*point).at(*point), np.ones(3), progress=watched)
    assert ended_by_callback(watched) == ("evidence was ended by the callback after 2 of 50",)
    assert not short.converged
    assert any("had not settled after 2 rounds" in text for text in short.warnings)


# --- groups -----------------------------------------------------------------------------------------


def test_groups_follow_the_names_of_the_sites():
    sites = [("hidden0.weight", 3), ("hidden0.bias", 2), ("net.output.weight", 2), ("noise", 1)]
    expected = {
        "global": ([0] * 8, ("all",)),
        "layer": ([0] * 5 + [1] * 2 + [2], ("hidden0", "net.output", "noise")),
        "tensor": ([0] * 3 + [1] * 2 + [2] * 2 + [3], tuple(name for name, _ in sites)),
    }
    for per, (groups, names) in expected.items():
        found, found_names = groups_of(sites, per)
        assert found.tolist() == groups
        assert found_names == names
    found, names = groups_of(sites, "weight")
    assert found.tolist() == list(range(8))
    assert names[2] == "hidden0.weight[2]"
    assert names[7] == "noise"
    apart, _ = groups_of([("a.weight", 1), ("b.weight", 2), ("a.bias", 1)], "layer")
    assert apart.tolist() == [0, 1, 1, 0]
