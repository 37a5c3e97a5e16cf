"""The study of Bayes by Backprop: formulas against other oracles, verdicts both ways, and a tiny run of all of it."""

from __future__ import annotations

import csv
import importlib
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

REPRODUCED, REFUTED, UNDECIDED, CORRECTED = "reproduced", "refuted", "undecided", "corrected"

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


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("bayes_by_backprop")


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


def test_the_mean_of_one_unit_is_that_of_quadrature(script):
    for loc, scale in ((0.0, 1.0), (0.7, 0.4), (-1.2, 2.0)):
        q = stats.norm(loc, scale)
        exact, _ = integrate.quad(lambda w, q=q: w * q.pdf(w), 0.0, loc + 12.0 * scale)
        assert script.mean_of_relu(loc, scale) == pytest.approx(exact, rel=1e-6)


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


# --- verdicts -----------------------------------------------------------------------------------------


def outcomes(script: Any, judge: Callable[[Any], None], *keys: str) -> list[str]:
    """What the referee makes of the evidence that `judge` gives on these claims alone."""
    claims = script.read_claims("bayes_by_backprop")
    referee = script.Referee({key: claims[key] for key in keys})
    judge(referee)
    return [each.verdict for each in referee.verdicts()]


def rows_of(**columns: Any) -> list[dict[str, Any]]:
    """Rows of a table by its columns; a number is that of every row."""
    count = max(len(value) for value in columns.values() if isinstance(value, list))
    given = {name: value if isinstance(value, list) else [value] * count for name, value in columns.items()}
    return [{name: value[at] for name, value in given.items()} for at in range(count)]


def about(value: float) -> list[float]:
    """Eight values of this mean, with an interval of about 0.01 to either side."""
    return [value + 0.01 * sign for sign in (-1.0, 1.0) * 4]


def test_verdicts_on_the_band_close_by_both_edges(script):
    names = ("sd_inside", "sd_away", "sd_far")
    rest = {f"epistemic_{name}": 1.0 for name in names}
    rest |= {"truth_in_band_inside": 0.9, "truth_in_band_away": 0.2}

    def found(ratio: list[float]) -> list[str]:
        rows = rows_of(epistemic_ratio=ratio, **rest)
        return outcomes(script, lambda referee: script.judge_band(referee, rows), "higher", "much-higher")

    assert found(about(3.02)) == [REPRODUCED, REPRODUCED]
    assert found(about(3.0)) == [REPRODUCED, UNDECIDED]
    assert found(about(2.98)) == found(about(1.02)) == [REPRODUCED, REFUTED]
    assert found(about(1.0)) == [UNDECIDED, REFUTED]
    assert found(about(0.98)) == [REFUTED, REFUTED]
    assert found([9.0]) == [UNDECIDED, UNDECIDED]


def test_verdict_on_the_loss_of_the_last_steps_close_by_both_edges(script):
    rest = {"elbo": -50.0, "likelihood_cost": 30.0, "complexity_cost": 20.0}

    def found(difference: float) -> str:
        rows = rows_of(loss_of_steps=[50.0 + each for each in about(difference)], **rest)
        return outcomes(script, lambda referee: script.judge_costs(referee, rows), "loss-of-steps")[0]

    assert found(0.98) == found(-0.98) == REPRODUCED
    assert found(1.0) == found(-1.0) == UNDECIDED
    assert found(1.02) == found(-1.02) == REFUTED


def test_the_pass_at_the_means_is_corrected_by_one_unit_and_its_size_is_measured(script):
    names = ("gap_of_mean_inside", "gap_of_mean_away", "rmse_to_truth", "pass_to_truth")
    rest = dict.fromkeys((*names, "gap_in_standard_errors"), 1.0)

    def found(inside: float, away: float) -> list[str]:
        rows = rows_of(gap_in_epistemic_sd_inside=about(inside), gap_in_epistemic_sd_away=about(away), **rest)
        keys = ("pass-at-means", "gap-inside", "gap-away")
        return outcomes(script, lambda referee: script.judge_pass_at_means(referee, rows), *keys)

    assert found(0.08, 0.12) == [CORRECTED, REPRODUCED, REFUTED]
    assert found(0.12, 0.1) == [CORRECTED, REFUTED, UNDECIDED]


def test_verdict_on_new_weights_needs_a_torn_curve_and_a_whole_one(script):
    rest = {"step_elsewhere": 1.0, "band_sd_away": 1.0, "sd_of_mean_over_right_side": 1.0}

    def found(right: float, patched: float) -> str:
        rows = rows_of(step_at_boundaries=[right, patched], **rest)
        return outcomes(script, lambda referee: script.judge_new_weights(referee, rows), "one-network")[0]

    assert found(1.1, 20.0) == found(2.9, 3.1) == CORRECTED
    assert found(1.1, 1.1) == found(1.1, 2.9) == found(20.0, 20.0) == REPRODUCED


def test_verdict_on_underflow_is_of_each_prior_and_needs_a_first_step_that_meets_it(script):
    rows = rows_of(
        no_value_beyond=2.0,
        first_losses_infinite_as_written=[0.0, 0.01, 0.9, 0.9],
        first_losses_finite_by_logaddexp=[1.0, 1.0, 1.0, 0.99],
    )
    keys = ("underflow-source", "underflow-0-6", "underflow-1-7", "underflow-2-8")
    assert outcomes(script, lambda referee: script.judge_underflow(referee, rows, 5.0, 0.0), *keys) == [
        REPRODUCED,
        CORRECTED,
        CORRECTED,
        REPRODUCED,
    ]


def test_verdicts_on_point_estimates_follow_paired_differences(script):
    keys = ("overfit-residuals", "overfit-score", "regularised-residuals", "regularised-score", "averaging")

    def found(residual: float, lost: float, wider: float, gain: float, averaged: float) -> list[str]:
        # All vary alike, so that differences of two columns vary by what is added to one of them.
        common = [0.1 * at for at in range(8)]

        def plus(values: list[float]) -> list[float]:
            return [a + b for a, b in zip(common, values, strict=True)]

        rows = rows_of(
            rmse_train_ml=about(residual),
            rmse_train_map=[a + b for a, b in zip(about(residual), about(wider), strict=True)],
            log_score_ml=common,
            log_score_train_ml=plus(about(lost)),
            log_score_map=plus(about(gain)),
            log_score_source=[a + b for a, b in zip(plus(about(gain)), about(averaged), strict=True)],
            rmse_to_truth_ml=1.0,
            rmse_to_truth_map=1.0,
        )
        return outcomes(script, lambda referee: script.judge_points(referee, rows), *keys)

    assert found(0.98, 0.12, 0.02, 0.02, 0.02) == [REPRODUCED] * 5
    assert found(1.0, 0.1, 0.0, 0.0, 0.0) == [UNDECIDED] * 5
    assert found(1.02, 0.08, -0.02, -0.02, -0.02) == [REFUTED] * 5


def test_verdict_on_estimators_is_of_each_place(script):
    rows = rows_of(
        estimator=["plain", "plain", "local", "local"],
        place=["start", "end", "start", "end"],
        variance_loc=[2.0, 2.0, 1.0, 2.01],
        variance_scale=1.0,
    )
    keys = ("local-start", "local-end")
    assert outcomes(script, lambda referee: script.judge_estimators(referee, rows, 400), *keys) == [
        REPRODUCED,
        REFUTED,
    ]
    rows[3]["variance_loc"] = 1.99
    assert outcomes(script, lambda referee: script.judge_estimators(referee, rows, 400), *keys) == [
        REPRODUCED,
        REPRODUCED,
    ]


def test_verdicts_on_minibatches(script):
    def found(wrong: float, off: float = 1e-15) -> list[str]:
        rows = rows_of(elbo=[-50.0, -50.0, wrong], elbo_se=0.1, epistemic_sd_inside=0.5, rmse_to_truth=0.5)
        return outcomes(
            script, lambda referee: script.judge_minibatches(referee, rows, off), "epoch", "whole-cost"
        )

    assert found(-55.1) == [REPRODUCED, REPRODUCED]
    assert found(-54.9) == [REPRODUCED, REFUTED]
    assert found(-55.1, 1e-11) == found(-55.1, math.nan) == [CORRECTED, REPRODUCED]


def test_verdict_on_the_bound_and_the_steps(script):
    evidence = {"error": 0.1, "least_divergence_from_prior": 9.0}

    def bound(elbo: float) -> str:
        rows = rows_of(method=["a", "b"], elbo=[-100.0, elbo], elbo_se=0.5)
        given = evidence | {"log_evidence": -60.0}
        return outcomes(script, lambda referee: script.judge_bound(referee, rows, given), "bound")[0]

    assert bound(-61.0) == bound(-59.1) == REPRODUCED
    assert bound(-58.9) == REFUTED

    def steps(best: float, method: str = "from the mode") -> str:
        rows = rows_of(method=[script.SOURCE, method], elbo=[-100.0, best], elbo_se=0.5)
        return outcomes(script, lambda referee: script.judge_steps(referee, rows), "enough-steps")[0]

    assert steps(-95.1) == steps(-110.0) == REPRODUCED
    assert steps(-94.9) == REFUTED
    # A guide of another family is no rival.
    assert steps(-50.0, "from the mode, rank 10 besides the diagonal") == REPRODUCED


def test_the_elbos_of_other_models_are_not_compared(script):
    methods = [script.SOURCE, *script.LEARNED, script.OF_INPUT, script.SAMPLED_NOISE]
    rows = rows_of(method=methods, elbo=-1.0)
    rows.append({"method": "tempered Monte Carlo", "elbo": ""})
    rows.append({"method": script.SAMPLED})
    assert [row["method"] for row in script.bounded(rows)] == [script.SOURCE]


def reference(script: Any, inside: tuple[float, float], away: tuple[float, float]) -> Any:
    figures = [inside, away]
    return script.Reference(
        [{"rhat": rhat, "ess_bulk": ess, "reason": "the chains disagree"} for rhat, ess in figures]
    )


GOOD = (1.009, 401.0)
BAD = ((1.011, 900.0), (1.0, 399.0), (math.nan, 900.0))


def test_verdicts_against_the_reference_need_one(script):
    keys = ("band-sd-inside", "band-mean-inside", "band-sd-away", "band-mean-away")

    def found(ratio: Any, gap: Any, inside: Any = GOOD, away: Any = GOOD) -> list[str]:
        row = {f"{place}_sd_ratio": ratio for place in ("inside", "away")}
        row |= {f"{place}_mean_gap": gap for place in ("inside", "away")}
        row |= {
            f"{place}_{name}_floor": 1.0 for place in ("inside", "away") for name in ("sd_ratio", "mean_gap")
        }
        of = reference(script, inside, away)
        return outcomes(script, lambda referee: script.judge_reference(referee, row, of), *keys)

    # Cells are text where another row of the table has no reference.
    assert found("1.49", "0.49") == found(0.67, 0.1) == [REPRODUCED] * 4
    assert found(1.51, 0.51) == found(0.66, 2.0) == [REFUTED] * 4
    for bad in BAD:
        assert found(1.0, 2.0, away=bad) == [REPRODUCED, REFUTED, UNDECIDED, UNDECIDED]
        assert found(1.0, 2.0, inside=bad) == [UNDECIDED] * 4
    assert found(script.NO_REFERENCE, script.NO_REFERENCE) == [UNDECIDED] * 4


def test_verdict_on_the_band_of_the_posterior_needs_a_reference_in_both_regions(script):
    def found(ratio: float, inside: Any = GOOD, away: Any = GOOD) -> str:
        row = {"epistemic_ratio": ratio, "truth_in_band_inside": 0.9, "truth_in_band_away": 0.2}
        of = reference(script, inside, away)
        return outcomes(
            script, lambda referee: script.judge_posterior_band(referee, row, of), "posterior-much-higher"
        )[0]

    assert found(3.01) == REPRODUCED
    assert found(2.99) == REFUTED
    for bad in BAD:
        assert found(9.0, inside=bad) == found(1.0, away=bad) == UNDECIDED


def test_verdicts_on_both_kinds_of_uncertainty(script):
    keys = [f"{what}-{of}" for of in ("one", "of-input", "posterior") for what in ("noise", "grows")]

    def found(noise: float, ratio: float, more: tuple[Any, ...] = (), away: Any = GOOD) -> list[str]:
        rows = rows_of(
            method=[script.LEARNED[0], script.OF_INPUT, script.SAMPLED_NOISE],
            aleatoric_sd_inside=noise,
            aleatoric_sd_away=1.0,
            rmse_to_truth=0.5,
            elbo=-20.0,
            epistemic_ratio=ratio,
            coverage_95=0.95,
            noise_mean=1.1,
            noise_sd=0.1,
        )
        rows += [rows[0] | {"method": script.LEARNED[1]} | each for each in more]
        of = reference(script, GOOD, away)
        return outcomes(script, lambda referee: script.judge_noise(referee, rows, of), *keys)

    assert found(1.24, 3.1) == found(0.76, 9.0) == [REPRODUCED] * 6
    assert found(1.26, 2.9) == found(0.74, 1.0) == [REFUTED] * 6
    for bad in BAD:
        assert found(1.0, 9.0, away=bad) == [REPRODUCED] * 4 + [UNDECIDED] * 2
    # Of two starts the higher ELBO counts.
    assert found(1.0, 9.0, ({"elbo": -10.0, "aleatoric_sd_inside": 2.0},))[0] == REFUTED
    assert found(1.0, 9.0, ({"elbo": -30.0, "aleatoric_sd_inside": 2.0},))[0] == REPRODUCED


def test_sizes_of_a_full_run_are_those_of_the_source(script):
    assert script.compared(script.FULL) == ""
    assert script.compared(script.TINY)


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
    assert [each["key"] for each in content["verdicts"]] == list(script.read_claims("bayes_by_backprop"))
    for verdict in content["verdicts"]:
        assert verdict["verdict"] in (REPRODUCED, REFUTED, UNDECIDED, CORRECTED)
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
