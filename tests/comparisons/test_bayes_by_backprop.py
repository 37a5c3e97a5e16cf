"""The study of Bayes by Backprop: formulas against other oracles, verdicts both ways, and a tiny run of all of it."""

from __future__ import annotations

import csv
import importlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
TABLES = (
    "protocol",
    "new_weights",
    "underflow",
    "points",
    "estimators",
    "minibatches",
    "references",
    "methods",
)
FIGURES = ("prediction", "costs", "slips", "noise", "evidence")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("bayes_by_backprop")


def test_the_setting_is_that_of_the_source(script):
    x, y = script.curve(32, 0)
    assert x.shape == (32, 1)
    assert y.shape == (32,)
    assert np.allclose(np.diff(x[:, 0]), 1.0 / 31.0)
    assert (x[0, 0], x[-1, 0]) == (-0.5, 0.5)
    residuals = np.concatenate([script.curve(32, seed)[1] - script.truth(x[:, 0]) for seed in range(200)])
    assert abs(residuals.std() - 1.0) < 5.0 / math.sqrt(2.0 * len(residuals))
    assert script.FULL.units == (20, 20)
    assert script.FULL.steps == 1500
    assert script.FULL.draws == 500
    assert script.Source().learning_rate == 0.08
    assert math.isclose(script.MEANS, 1.063, abs_tol=1e-3)
    assert math.isclose(script.SPREAD, 0.693, abs_tol=1e-3)


def test_mixture_by_hand_is_that_of_its_densities(script):
    w = np.linspace(-6.0, 6.0, 101)
    density = 0.5 * stats.norm.pdf(w, 0.0, 1.5) + 0.5 * stats.norm.pdf(w, 0.0, 0.1)
    assert np.allclose(script.log_mixture(w), np.log(density), rtol=1e-12, atol=1e-12)
    assert np.allclose(script.log_mixture_as_written(w), np.log(density), rtol=1e-12, atol=1e-12)


def test_a_sum_of_densities_has_no_value_where_both_underflow(script):
    far = np.array([25.0], dtype=np.float32)
    assert script.log_mixture(far).dtype == np.float32
    assert script.log_mixture_as_written(far)[0] == -np.inf
    exact = math.log(0.5) + stats.norm.logpdf(25.0, 0.0, 1.5)
    assert math.isclose(float(script.log_mixture(far)[0]), exact, rel_tol=1e-6)


def test_least_divergence_is_that_of_the_nearest_normal(script):
    assert abs(script.least_divergence((1.0, 1.0))) < 1e-4
    found = []
    for s in np.geomspace(0.05, 2.0, 40):
        w = s * np.random.default_rng(0).normal(size=20_000)
        found.append(float(np.mean(stats.norm.logpdf(w, 0.0, s) - script.log_mixture(w))))
    # The smallest of 40 means, of a standard error of 0.01 at most.
    assert abs(script.least_divergence() - min(found)) < 0.05


def test_draws_of_the_prior_have_its_distribution(script):
    draws = script.draw_mixture(np.random.default_rng(0), (20_000,))

    def cdf(w: Any) -> Any:
        return 0.5 * stats.norm.cdf(w, 0.0, 1.5) + 0.5 * stats.norm.cdf(w, 0.0, 0.1)

    assert stats.kstest(draws, cdf).pvalue > 1e-4


def linear(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 0.7)), likelihoods.Gaussian(0.5))


def test_tempered_monte_carlo_finds_the_evidence_of_linear_regression(script):
    """log N(y; 0, noise^2 I + s^2 (X X' + 1)), to 5 standard errors, and the exact posterior mean of the weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2))
    y = x @ [1.0, -0.5] + 0.3 + 0.5 * rng.normal(size=12)
    found = script.tempered_smc(
        linear,
        x,
        y,
        lambda rng, shape: 0.7 * rng.normal(size=shape),
        particles=200,
        moves=4,
        leaps=5,
        runs=16,
        seed=1,
    )
    wide: Any = np.column_stack([x, np.ones(12)])
    covariance: Any = 0.25 * np.eye(12) + 0.49 * wide @ wide.T
    exact = float(stats.multivariate_normal.logpdf(y, np.zeros(12), covariance))
    assert 0.0 < found.error < 0.2
    assert abs(found.log_evidence - exact) < 5.0 * found.error
    assert found.ladder[0] == 0.0
    assert found.ladder[-1] == 1.0
    assert math.isclose(np.exp(found.log_weights).sum(), 1.0, rel_tol=1e-12)
    posterior = np.linalg.inv(wide.T @ wide / 0.25 + np.eye(3) / 0.49)
    mean = posterior @ wide.T @ y / 0.25
    weighted = np.exp(found.log_weights) @ found.particles
    error = np.sqrt(np.diag(posterior) / (found.particles.shape[0] / 10.0))
    assert np.all(np.abs(weighted - mean) < 5.0 * error)


def test_the_source_method_steps_at_one_rate_from_the_start_of_the_source(script):
    """After one step: the first step of Adam is the rate itself, whatever the gradient, so that rho is 0 +- 0.08."""
    x, y = script.curve(8, 0)
    model = partial(script.known_noise, units=(20, 20))
    posterior = bnn.fit(model, x, y, script.Source(steps=1), seed=3)
    q = posterior.approximation
    rho = np.concatenate([np.log(np.expm1(value)).ravel() for value in q.scale.values()])
    assert len(rho) == 481
    assert np.allclose(np.abs(rho), 0.08, atol=1e-4)
    means = np.concatenate([value.ravel() for value in q.loc.values()])
    assert abs(means.std() / script.MEANS - 1.0) < 5.0 / math.sqrt(2.0 * 481)
    costs = posterior.info.history
    assert np.allclose(costs["likelihood_cost"] + costs["complexity_cost"], costs["loss"])
    weights = {name: value[0] for name, value in posterior.draws.items()}
    assert np.allclose(script.forward(weights, x), posterior.predictor(x)[0, ..., 0], rtol=1e-9, atol=1e-9)


def row(**columns: Any) -> dict[str, Any]:
    return columns


def test_verdict_on_the_band_asks_for_three_times_on_all_data_sets(script):
    held = {"truth_in_band_inside": 0.9, "truth_in_band_away": 0.2}
    rows = [row(epistemic_ratio=ratio, **held) for ratio in (3.5, 9.0)]
    assert script.judge_band(rows).verdict == script.REPRODUCED
    assert script.judge_band([*rows, row(epistemic_ratio=2.9, **held)]).verdict == script.NOT_REPRODUCED
    sd = {"epistemic_sd_inside": 1.0, "epistemic_sd_away": 2.0, "epistemic_sd_far": 3.0}
    rows = [row(epistemic_ratio=ratio, method="NUTS", **held, **sd) for ratio in (1.5, 2.0)]
    assert script.judge_higher(rows).verdict == script.REPRODUCED
    assert script.judge_higher([*rows, rows[0] | {"epistemic_ratio": 0.9}]).verdict == script.NOT_REPRODUCED
    good = [row(verdict="converged", reason="R-hat is good")] * 2
    assert script.judge_posterior_band(rows[:1], good).verdict == script.NOT_REPRODUCED
    assert (
        script.judge_posterior_band([rows[0] | {"epistemic_ratio": 9.0}], good).verdict == script.REPRODUCED
    )
    bad = [good[0], row(verdict="not converged", reason="the chains disagree")]
    assert script.judge_posterior_band(rows[:1], bad).verdict == script.NOT_RUN


def test_verdict_on_the_pass_at_the_means_is_corrected_only_beyond_the_noise(script):
    names = (
        "gap_of_mean_inside",
        "gap_of_mean_away",
        "gap_in_epistemic_sd_inside",
        "gap_in_epistemic_sd_away",
    )
    rest = dict.fromkeys((*names, "rmse_to_truth", "pass_to_truth"), 1.0)
    far, near = (row(gap_in_standard_errors=z, **rest) for z in (9.0, 1.1))
    assert script.judge_pass_at_means([far, far]).verdict == script.CORRECTED
    assert script.judge_pass_at_means([far, near]).verdict == script.REPRODUCED


def test_verdict_on_new_weights_needs_a_torn_curve_and_a_whole_one(script):
    rest = {"step_elsewhere": 1.0, "band_sd_away": 1.0, "sd_of_mean_over_right_side": 1.0}
    whole = row(prediction="one", step_at_boundaries=1.1, **rest)
    torn = row(prediction="many", step_at_boundaries=20.0, **rest)
    assert script.judge_new_weights([whole, torn]).verdict == script.CORRECTED
    assert script.judge_new_weights([whole, whole | {"prediction": "many"}]).verdict == script.REPRODUCED


def test_verdict_on_underflow_needs_a_first_step_that_meets_it(script):
    met = row(
        prior="p",
        no_value_beyond=2.0,
        first_losses_infinite_as_written=0.1,
        first_losses_finite_by_logaddexp=1.0,
    )
    assert script.judge_underflow([met], 5.0, 0.0).verdict == script.CORRECTED
    unmet = met | {"first_losses_infinite_as_written": 0.0}
    assert script.judge_underflow([unmet], 5.0, 0.0).verdict == script.REPRODUCED


def test_verdicts_on_point_estimates_follow_paired_differences(script):
    def rows(gains: tuple[float, ...], residual: float, train: float = -1.0) -> list[dict[str, Any]]:
        rest = {"rmse_train_ml": residual, "rmse_to_truth_ml": 1.0, "rmse_to_truth_map": 0.5}
        rest |= {"log_score_train_ml": train, "rmse_train_map": 0.9}
        return [
            row(log_score_ml=-2.0, log_score_map=-2.0 + gain, log_score_source=-2.0 + 2.0 * gain, **rest)
            for gain in gains
        ]

    assert script.judge_overfit(rows((0.5, 0.6), 0.5)).verdict == script.REPRODUCED
    assert script.judge_overfit(rows((0.5, 0.6), 1.5)).verdict == script.NOT_REPRODUCED
    assert script.judge_overfit(rows((0.5, 0.6), 0.5, train=-2.1)).verdict == script.NOT_REPRODUCED
    assert script.judge_regularised(rows((0.5, 0.6), 0.5)).verdict == script.REPRODUCED
    assert script.judge_regularised(rows((0.5, -0.6), 0.5)).verdict == script.NOT_REPRODUCED
    assert script.judge_regularised(rows((0.5, 0.6), 0.95)).verdict == script.NOT_REPRODUCED
    assert script.judge_averaging(rows((0.5, 0.6), 0.5)).verdict == script.REPRODUCED
    assert script.judge_averaging(rows((-0.5, -0.6), 0.5)).verdict == script.NOT_REPRODUCED


def test_verdict_on_the_bound_allows_for_noise_and_no_more(script):
    source = row(method="the source's run", elbo=-100.0, elbo_se=0.5)
    assert script.judge_bound([source], -100.5, 0.5, 9.0).verdict == script.REPRODUCED
    assert script.judge_bound([source], -102.0, 0.5, 9.0).verdict == script.NOT_REPRODUCED
    better = row(method="from the mode", elbo=-90.0, elbo_se=0.5)
    assert script.judge_steps([source, better]).verdict == script.NOT_REPRODUCED
    assert script.judge_steps([source, better | {"elbo": -97.0}]).verdict == script.REPRODUCED


def test_verdict_against_the_reference_is_not_run_without_one(script):
    references = [row(reason="the chains disagree")] * 2
    without = row(
        method="the source's run", inside_mean_gap=script.NO_REFERENCE, away_mean_gap=script.NO_REFERENCE
    )
    assert script.judge_reference(references, [without]).verdict == script.NOT_RUN
    there = {"inside_sd_ratio": 1.1, "inside_sd_ratio_floor": 1.0, "inside_mean_gap_floor": 0.02}
    close = without | there | {"inside_mean_gap": 0.2}
    assert script.judge_reference(references, [close]).verdict == script.REPRODUCED
    assert (
        script.judge_reference(references, [close | {"inside_sd_ratio": 1.7}]).verdict
        == script.NOT_REPRODUCED
    )


def test_other_verdicts_follow_their_numbers(script):
    settled = row(loss_of_steps=50.0, elbo=-50.1, likelihood_cost=30.0, complexity_cost=20.1)
    moving = settled | {"loss_of_steps": 60.0}
    assert script.judge_costs([settled, settled]).verdict == script.REPRODUCED
    assert script.judge_costs([moving, moving]).verdict == script.NOT_REPRODUCED
    kinds = [
        row(
            method=name,
            aleatoric_sd_inside=1.1,
            aleatoric_sd_away=1.0,
            rmse_to_truth=0.5,
            elbo=-20.0,
            epistemic_ratio=5.0,
            coverage_95=0.95,
            noise_mean=1.1,
            noise_sd=0.1,
        )
        for name in ("learned noise", "noise of the input", "learned noise, NUTS")
    ]
    begun = kinds[0] | {
        "method": "learned noise, begun at the truth",
        "elbo": -10.0,
        "aleatoric_sd_inside": 2.0,
    }
    assert script.judge_both(kinds).verdict == script.REPRODUCED
    assert script.judge_both([*kinds, begun]).verdict == script.NOT_REPRODUCED
    assert script.judge_both([*kinds, begun | {"elbo": -30.0}]).verdict == script.REPRODUCED
    assert (
        script.judge_both([kinds[0], kinds[1] | {"aleatoric_sd_inside": 1.4}]).verdict
        == script.NOT_REPRODUCED
    )
    assert script.judge_both([kinds[0] | {"epistemic_ratio": 2.0}, kinds[1]]).verdict == script.NOT_REPRODUCED
    good = [row(verdict="converged", reason="R-hat is good")] * 2
    bad = [good[0], row(verdict="not converged", reason="the chains disagree")]
    assert script.judge_learned(kinds, good).verdict == script.REPRODUCED
    assert script.judge_learned([kinds[2] | {"epistemic_ratio": 2.0}], good).verdict == script.NOT_REPRODUCED
    assert script.judge_learned(kinds, bad).verdict == script.NOT_RUN
    measured = [
        row(estimator=estimator, place=place, variance_loc=variance, variance_scale=variance)
        for estimator, variance in (("plain", 2.0), ("local", 1.0))
        for place in ("start", "end")
    ]
    assert script.judge_estimators(measured).verdict == script.REPRODUCED
    measured[3]["variance_loc"] = 4.0
    assert script.judge_estimators(measured).verdict == script.NOT_REPRODUCED
    fit = row(elbo=-50.0, elbo_se=0.1, epistemic_sd_inside=0.5, rmse_to_truth=0.5)
    assert script.judge_minibatches([fit, fit, fit | {"elbo": -60.0}], 1e-15).verdict == script.REPRODUCED
    assert script.judge_minibatches([fit, fit, fit], 1e-15).verdict == script.NOT_REPRODUCED
    assert script.judge_minibatches([fit, fit, fit | {"elbo": -60.0}], 0.1).verdict == script.NOT_REPRODUCED


def test_variances_are_of_both_parameters_of_the_guide(script):
    rng = np.random.default_rng(0)
    gradients = {"w.loc": rng.normal(size=(50, 2)), "w.rho": 3.0 * rng.normal(size=(50, 2))}
    found = script.variances(gradients)
    for column, name in (("variance_loc", "w.loc"), ("variance_scale", "w.rho")):
        assert found[column] == pytest.approx(np.trace(np.cov(gradients[name], rowvar=False)))
    with pytest.raises(KeyError, match="rho"):
        script.variances({"w.loc": gradients["w.loc"], "w.scale": gradients["w.rho"]})


def test_a_tiny_run_writes_tables_figures_and_verdicts(script, tmp_path, capsys):
    study = script.main(tiny=True, out=tmp_path)
    assert all(row["variance_scale"] > 0.0 for row in study.tables["estimators"])
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "results.json").read_text())
    assert len(content["verdicts"]) >= 13
    for verdict in content["verdicts"]:
        assert verdict["verdict"] in ("reproduced", "not reproduced", "corrected", "not run")
        assert verdict["numbers"]
        assert verdict["claim"] in said
    assert len((tmp_path / "verdicts.txt").read_text().splitlines()) == len(content["verdicts"])
    numbers = 0
    for name in TABLES:
        with (tmp_path / f"{name}.csv").open() as file:
            for line in csv.DictReader(file):
                for column, value in line.items():
                    try:
                        number = float(value)
                    except ValueError:
                        continue
                    assert math.isfinite(number) or column == "pareto_k", (name, column, line)
                    numbers += 1
    assert numbers > 200
    for name in FIGURES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    # The library's network and its prior are the ones by hand, and the mini-batches of an epoch sum to F.
    assert content["numbers"]["pass_by_hand_off"] < 1e-10
    assert content["numbers"]["log_prior_by_hand_off"] < 1e-10
    assert content["numbers"]["epoch_with_1/M_off"] < 1e-12
    assert script.judge_band(study.tables["protocol"]) in study.verdicts
    assert script.judge_new_weights(study.tables["new_weights"]) in study.verdicts
