"""The study of variational networks: its formulas against other oracles, verdicts both ways, and a tiny run of it."""

from __future__ import annotations

import csv
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

import ppl_bnn as bnn
from comparisons.claims import CORRECTED, NOT_RUN, OUTCOMES, REFUTED, REPRODUCED, UNDECIDED
from ppl_bnn.inference.variational.mean_field import MeanField

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
TABLES = (
    "averages",
    "batch_gradients",
    "batches",
    "beside",
    "dropout",
    "elbo",
    "estimators",
    "noise",
    "priors",
    "references",
    "roots",
    "rows",
)
FIGURES = ("averages", "batches", "beside", "dropout", "estimators", "noise", "priors", "rows")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("variational_overview")


def study_of(script, tmp_path, **sizes: Any) -> Any:
    from dataclasses import replace

    return script.Study(replace(script.TINY, **sizes), tmp_path)


# --- formulas -------------------------------------------------------------------------------------------


def test_moments_of_the_curve_are_integrals_over_its_noise(script):
    x = np.array([0.0, 0.13, 0.31, 0.5])
    mean, sd = script.curve_moments(x)
    for at, one, spread in zip(x, mean, sd, strict=True):

        def moment(power: int, at: float = at) -> float:
            return integrate.quad(
                lambda e: script.curve_at(at, e) ** power * stats.norm.pdf(e, scale=0.02), -0.2, 0.2
            )[0]

        assert one == pytest.approx(moment(1), abs=1e-9)
        assert spread == pytest.approx(math.sqrt(moment(2) - moment(1) ** 2), abs=1e-8)
    # The noise differs between rows, which is what the study of the two kinds stands on.
    assert sd.max() > 2.0 * sd.min()


def test_friedman_depends_on_five_inputs_only(script):
    x, y = script.friedman(4000, 0)
    correlation = np.array([np.corrcoef(x[:, index], y)[0, 1] for index in range(script.FRIEDMAN_INPUTS)])
    # 5 standard errors of a correlation of nothing; the third input acts through a square, which has none.
    assert np.all(np.abs(correlation[script.FRIEDMAN_RELEVANT :]) < 5.0 / math.sqrt(len(x)))
    assert np.all(correlation[[0, 1, 3, 4]] > 0.2)
    assert np.corrcoef((x[:, 2] - 0.5) ** 2, y)[0, 1] > 0.2


def test_pruning_takes_weights_above_the_threshold_and_no_others(script):
    loc = {"hidden0.weight": np.array([[1.0, 0.1]]), "hidden0.bias": np.array([0.001])}
    scale = {"hidden0.weight": np.array([[0.5, 1.0]]), "hidden0.bias": np.array([1.0])}
    q = MeanField(loc, scale)
    ratio = script.log_alpha(q)
    assert list(ratio) == ["hidden0.weight"]
    assert np.allclose(ratio["hidden0.weight"], np.log([[0.25, 100.0]]))
    thin = script.pruned(q)
    assert np.array_equal(thin.loc["hidden0.weight"], [[1.0, 0.0]])
    assert np.array_equal(thin.scale["hidden0.weight"], [[0.5, 0.0]])
    assert np.array_equal(thin.loc["hidden0.bias"], loc["hidden0.bias"])
    assert np.array_equal(script.pruned(q, threshold=math.inf).loc["hidden0.weight"], loc["hidden0.weight"])


def test_an_ensemble_is_the_mixture_of_its_members(script):
    y = np.array([0.3])
    members = [
        bnn.Prediction("Normal", {"loc": np.array([[loc]]), "scale": np.array([[scale]])})
        for loc, scale in ((0.0, 1.0), (2.0, 0.5))
    ]
    found = script.pooled(members)
    density = 0.5 * (stats.norm.pdf(0.3, 0.0, 1.0) + stats.norm.pdf(0.3, 2.0, 0.5))
    assert found.log_prob(y)[0] == pytest.approx(math.log(density), rel=1e-12)
    epistemic, aleatoric = script.spread(found, y)
    assert epistemic == pytest.approx(1.0)
    assert aleatoric == pytest.approx(math.sqrt((1.0 + 0.25) / 2.0))
    assert script.spread(members[0], y)[0] == 0.0


def test_slopes_and_variances_are_those_of_their_definitions(script, rng):
    counts = np.array([10.0, 100.0, 1000.0])
    assert script.slope(counts, 3.0 * counts**-0.5) == pytest.approx(-0.5)
    noisy = 3.0 * counts**-0.5 * np.array([1.0, 1.2, 0.9])
    fitted = stats.linregress(np.log(counts), np.log(noisy)).slope  # pyright: ignore[reportAttributeAccessIssue]
    assert script.slope(counts, noisy) == pytest.approx(fitted)
    values = rng.normal(size=(500, 3)) * np.array([1.0, 2.0, 3.0])
    assert script.total_variance(values) == pytest.approx(np.trace(np.cov(values, rowvar=False)))
    shifted = values + np.array([0.0, 1.0, 0.0])
    expected = np.asarray(stats.ttest_ind(values, shifted, equal_var=False)[0])
    assert script.largest_z(values, shifted) == pytest.approx(np.abs(expected).max())


def test_the_root_is_outside_of_the_sum(script, tmp_path):
    study = study_of(script, tmp_path, gradient_draws=200)
    rows = script.roots(study)
    assert judged(script, "judge_root", tmp_path, roots=rows)["root"].verdict == CORRECTED
    assert rows[0]["sd_root_inside"] == pytest.approx(rows[0]["sd_root_outside"])
    assert rows[-1]["sd_root_inside"] > 5.0 * rows[-1]["sd_root_outside"]
    for row in rows:
        for name in ("sd_by_weights", "sd_by_library"):
            # 4.5 standard errors of a standard deviation.
            assert abs(row[name] / row["sd_root_outside"] - 1.0) < 4.5 * row["relative_error"]


def test_the_mixture_prior_is_a_product_of_sums(script, tmp_path):
    found = script.mixture_density(study_of(script, tmp_path))
    assert found["off_with_brackets"] < 1e-9
    assert found["off_without"] > 0.1
    # The weight of the mixture is a number, not a random variable of the program.
    assert found["sites_for_the_weight"] == 0.0


def test_gradients_at_fixed_parameters_are_repeatable_and_local_ones_have_the_same_mean(script):
    x, y = script.standardised(*script.friedman(16, 0))
    with script.opened(script.homoscedastic, x, y) as problem:
        u = {site.name: np.full(site.unconstrained_shape, 0.2) for site in problem.program.latents}
        guide, parameters = script.guide_at(problem, u, 0.2)
        rows = np.tile(np.arange(16), (300, 1))
        found = {}
        for index, estimator in enumerate(("plain", "local")):
            run = script.compiled_gradient(problem, script.objective_of(problem, guide, estimator=estimator))
            found[estimator] = script.gradients(problem, run, parameters, rows, seed=index)
            again = script.gradients(problem, run, parameters, rows, seed=index)
            assert all(np.array_equal(found[estimator][kind], again[kind]) for kind in again)
    for kind in ("loc", "scale"):
        # 5 standard errors, over some 250 coordinates.
        assert script.largest_z(found["local"][kind], found["plain"][kind]) < 5.0
    # Over 20 seeds the factor was 1.3 to 2.2 for means, and for rho 0.8 to 5.5: 300 draws do not tell it.
    assert script.total_variance(found["local"]["loc"]) < script.total_variance(found["plain"]["loc"])


# --- verdicts -----------------------------------------------------------------------------------------------

SEEDS = 10


def judged(script: Any, judge: str, tmp_path: Path, numbers: Any = None, **tables: Any) -> dict[str, Any]:
    """The verdicts by key that one function of the study gives on these tables."""
    from dataclasses import replace

    sizes = replace(script.FULL, rows=80, units=10)
    study = script.Study(sizes, tmp_path, tables=tables, numbers=numbers or {})
    declared = script.read_claims("variational_overview")
    referee = script.Referee(declared)
    getattr(script, judge)(referee, study)
    for key in set(declared) - referee.evidence:
        referee.not_run(key, "another test")
    return {each.key: each for each in referee.verdicts() if "another test" not in each.numbers}


def references(*cases: str, rhat: float = 1.005, ess: float = 500.0, **change: Any) -> list[dict[str, Any]]:
    row = {"verdict": "converged", "reason": "because"}
    row |= {f"rhat_{part}": rhat for part in ("inside", "away")} | {
        f"ess_{part}": ess for part in ("inside", "away")
    }
    return [
        {"seed": seed, "case": case}
        | {key: value for key, value in (row | change).items() if value is not None}
        for case in cases
        for seed in range(SEEDS)
    ]


def test_units_are_the_data_sets_that_have_every_case(script):
    rows = [{"seed": seed, "method": name, "value": seed} for seed in range(3) for name in ("a", "b")][:-1]
    first, second = (script.data_sets(rows, method=name) for name in ("a", "b"))
    assert [list(first), list(second)] == [[0, 1, 2], [0, 1]]
    estimate = script.over_data_sets(lambda a, b: a["value"] + b["value"], first, second)
    assert (estimate.value, estimate.n, estimate.rule) == (1.0, 2, "Student t")
    # A stored table of one data set has no seeds, and no interval.
    alone = script.over_data_sets(lambda row: row["value"], script.data_sets([{"value": 4.0}]))
    assert (alone.value, alone.n, alone.low) == (4.0, 1, -math.inf)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"rhat": 1.009, "ess": 401.0}, True),
        ({"rhat": 1.011}, False),
        ({"ess": 399.0}, False),
        ({"rhat_away": 1.011}, False),
        ({"ess_inside": 399.0}, False),
        ({"rhat_away": None}, False),
    ],
)
def test_chains_have_converged_at_the_inputs_of_the_claim_or_it_is_not_known(
    script, tmp_path, change, expected
):
    study = study_of(script, tmp_path)
    study.tables["references"] = references("one", **change) + references("two", rhat=2.0)
    found = script.chains(study, ["one"], ["inside", "away"])
    assert found["converged"] is expected
    assert ("were not stored" in found["why_not"]) is (change == {"rhat_away": None})
    assert not script.chains(study, ["one", "two"], ["inside"])["converged"]
    assert not script.chains(study, ["none"], ["inside"])["converged"]


# --- verdicts by proof: what is computed exactly, against other oracles, and both ways ------------------------


def test_shares_of_a_normal(script):
    assert script.share_outside(0.0, 1.0) == pytest.approx(1.0 - integrate.quad(stats.norm.pdf, 0.0, 1.0)[0])
    assert script.share_outside(-math.inf, math.inf) == 0.0


def test_the_kl_of_normals_in_both_ways_is_that_of_quadrature(script):
    q, p = stats.norm(0.3, 0.2), stats.norm(0.0, 1.5)
    value = integrate.quad(lambda w: q.pdf(w) * (q.logpdf(w) - p.logpdf(w)), -1.7, 2.3)[0]
    assert script.kl_two_ways(0.3, 0.2, 1.5) == pytest.approx((value, value), rel=1e-8)


def test_the_bound_of_one_row_is_right_either_way_and_of_more_rows_with_the_kl_once(script):
    found = script.bounds_of_a_mean(np.array([0.7]))
    assert found["once"] == pytest.approx(found["by row"]) == pytest.approx(found["evidence"])
    assert found["evidence"] == pytest.approx(stats.norm.logpdf(0.7, 0.0, math.sqrt(2.0)))
    found = script.bounds_of_a_mean(np.array([0.7, -0.2, 1.1]))
    assert found["once"] == pytest.approx(found["evidence"])
    assert found["by row"] < found["evidence"] - 0.5


def test_the_gradient_holds_the_terms_of_q_and_p(script):
    step = 1e-6

    def value(w: float) -> float:
        return stats.norm.logpdf(w, 0.2, 0.4) - stats.norm.logpdf(w)

    slope = (value(0.9 + step) - value(0.9 - step)) / (2.0 * step)
    assert script.terms_beside_the_likelihood(0.9, 0.2, 0.4) == pytest.approx(slope, rel=1e-6)
    # Where q is p there is nothing beside the likelihood.
    assert script.terms_beside_the_likelihood(0.9, 0.0, 1.0) == 0.0


def test_batches_of_any_size_are_right_in_the_mean(script):
    values = [1.0, -2.0, 5.0, 0.5]
    for batch in (1, 2, 3, 4):
        assert script.mean_over_batches(values, batch) == pytest.approx(sum(values))


def test_a_row_has_the_same_likelihood_over_weights_and_pre_activations(script):
    mu, sigma, a = np.array([0.3, -0.2]), np.array([0.2, 0.4]), np.array([1.0, 0.7])
    by_weights, by_o = script.likelihood_two_ways(mu, sigma, a, 0.5)
    assert by_weights == pytest.approx(by_o, rel=1e-9)
    o = stats.norm(mu @ a, math.sqrt(0.2**2 + 0.4**2 * 0.7**2))
    value = integrate.quad(lambda at: o.pdf(at) * stats.norm.logpdf(0.5, math.tanh(at)), -4.0, 4.0)[0]
    assert by_o == pytest.approx(value, rel=1e-8)


def test_moments_of_shared_weights_and_of_mixtures(script, rng):
    w = rng.normal(size=(200_000, 2)) * np.array([0.5, 1.0])
    a, b = np.array([1.0, 2.0]), np.array([2.0, 1.0])
    # 5 standard errors, of a product of two normals with this correlation.
    expected = script.shared_covariance(np.array([0.5, 1.0]), a, b)
    products = (w @ a) * (w @ b)
    assert abs(products.mean() - expected) < 5.0 * products.std() / math.sqrt(len(products))
    assert script.shared_covariance(np.array([0.5, 1.0]), np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0
    assert script.mixture_mass(1, 0.3) == pytest.approx(1.0)
    assert script.mixture_mass(2, 0.5) == pytest.approx(0.5)
    pi = rng.uniform(size=(400_000, 1))
    scale = np.where(rng.uniform(size=(400_000, 2)) < pi, 1.5, 0.1)
    squares = (scale * rng.normal(size=scale.shape)) ** 2
    products = np.prod(squares - squares.mean(0), axis=1)
    error = products.std() / math.sqrt(len(products))
    assert abs(products.mean() - script.covariance_of_squares(1.5, 0.1, 1.0 / 12.0)) < 5.0 * error
    assert script.covariance_of_squares(1.5, 0.1, 0.0) == 0.0
    assert script.gain_of_averaging([0.3, 0.3]) == pytest.approx(0.0, abs=1e-12)
    assert script.gain_of_averaging([0.0, math.log(3.0)]) == pytest.approx(
        math.log(2.0) - 0.5 * math.log(3.0)
    )


def elbo_row(prior: str, drawn: str = "", z: float = 1.0) -> dict[str, Any]:
    return {"prior": prior, "guide": "diagonal", "z": z} | (
        {"sites_without_closed_form": drawn} if drawn else {}
    )


def test_verdicts_on_the_bound(script, tmp_path):
    rows = [elbo_row("Gaussian, sd 2"), elbo_row("Gaussian, sd 0.5"), elbo_row("scale mixture", "w")]
    found = judged(script, "judge_bound", tmp_path, elbo=rows)
    assert found["bound-two-ways"].verdict == REPRODUCED
    assert (found["bound-closed-form"].verdict, found["bound-closed-form"].estimate) == (REFUTED, 0.5)
    assert judged(script, "judge_bound", tmp_path, elbo=rows[:2])["bound-closed-form"].verdict == REPRODUCED


def batch_rows(loss: float, seeds: int = SEEDS) -> list[dict[str, Any]]:
    """Fits whose ELBO is less by `loss` nats per row, of 80, in batches of one row."""
    fit = {
        "complexity_cost": 30.0,
        "error_of_mean": 0.05,
        "epistemic_sd_inside": 0.04,
        "gradients": 100,
        "elbo_se": 0.2,
    }
    spread = np.tile([-0.05, 0.05], SEEDS // 2)
    return [
        fit | {"seed": seed, "fit": name, "elbo": -50.0 - drop * (80.0 * loss + spread[seed])}
        for seed in range(seeds)
        for name, drop in (
            ("batches of 80", 0.0),
            ("batches of 1", 1.0),
            ("KL counted once per row", 3.0),
            ("no gradient of log q and log p", 3.0),
        )
    ]


def test_verdicts_on_batches_and_slips(script, tmp_path):
    gradients = [{"largest_z": 3.0, "coordinates": 10, "variance_over_full": 7.0}]

    def found(loss: float, seeds: int = SEEDS) -> dict[str, Any]:
        return judged(
            script, "judge_batches", tmp_path, batches=batch_rows(loss, seeds), batch_gradients=gradients
        )

    assert found(0.05)["batch-gradient"].verdict == REPRODUCED
    for loss, expected in ((0.05, REPRODUCED), (0.098, REPRODUCED), (0.1, UNDECIDED), (0.102, REFUTED)):
        assert found(loss)["batch-fit"].verdict == expected
    assert found(0.05, seeds=1)["batch-fit"].verdict == UNDECIDED
    slips = {"batches": batch_rows(0.05)}
    assert judged(script, "judge_bound_by_row", tmp_path, **slips)["bound-by-row"].verdict == CORRECTED
    assert judged(script, "judge_weight_gradient", tmp_path, **slips)["weight-gradient"].verdict == CORRECTED


def test_verdicts_on_the_root_follow_the_standard_deviations(script, tmp_path):
    row = {"inputs": 4, "sd_by_weights": 1.2, "sd_by_library": 1.2, "sd_root_outside": 1.2}
    for inside, expected in ((1.9, CORRECTED), (1.2, REPRODUCED)):
        found = judged(script, "judge_root", tmp_path, roots=[row | {"sd_root_inside": inside}])
        assert found["root"].verdict == expected
        assert found["pre-activation"].verdict == CORRECTED


def estimator_rows(
    factor: float = 5.0, parameters: int = 20, needed: int = 40, ratio: float = 2.0, seeds: int = SEEDS
) -> list[dict[str, Any]]:
    spread = np.exp(np.tile([-0.01, 0.01], SEEDS // 2))
    return [
        {
            "seed": seed,
            "place": place,
            "batch": batch,
            "estimator": estimator,
            "factor_loc": 1.0 if estimator == "plain" or batch == 1 else factor * spread[seed],
            "factor_scale": 1.0 if estimator == "plain" or batch == 1 else factor * spread[seed],
            "random_numbers_needed": 10 if estimator == "plain" else needed,
            "random_numbers_one_draw_per_row": 100,
            "parameters": parameters if estimator == "local" else 20,
            "milliseconds": ratio * spread[seed] if estimator == "plain" else 1.0,
        }
        | ({} if estimator == "plain" else {"largest_z_loc": 3.0, "largest_z_scale": 2.0})
        for seed in range(seeds)
        for place in ("start", "fitted")
        for batch in (1, 16)
        for estimator in ("plain", "local")
    ]


def test_verdicts_on_parameters(script, tmp_path):
    found = judged(script, "judge_parameters", tmp_path, estimators=estimator_rows())
    assert found["parameters"].verdict == REPRODUCED
    assert found["fewer-parameters"].verdict == CORRECTED
    fewer = judged(script, "judge_parameters", tmp_path, estimators=estimator_rows(parameters=10))
    assert fewer["fewer-parameters"].verdict == REPRODUCED
    wrong = [row | {"parameters": 30} for row in estimator_rows()]
    assert judged(script, "judge_parameters", tmp_path, estimators=wrong)["parameters"].verdict == CORRECTED
    assert judged(script, "judge_normals", tmp_path)["normals"].verdict == CORRECTED


def test_verdicts_on_local_reparameterisation(script, tmp_path):
    def found(**change: Any) -> dict[str, Any]:
        return judged(script, "judge_local", tmp_path, estimators=estimator_rows(**change))

    usual = found()
    assert usual["same-objective"].verdict == REPRODUCED
    assert (usual["random-numbers"].verdict, found(needed=100)["random-numbers"].verdict) == (
        REPRODUCED,
        CORRECTED,
    )
    for factor, expected in ((1.02, REPRODUCED), (1.0, UNDECIDED), (0.98, REFUTED)):
        by_factor, by_time = found(factor=factor), found(ratio=factor)
        assert by_factor["variance-means"].verdict == by_factor["variance-rho"].verdict == expected
        assert by_time["computation"].verdict == expected
    alone = found(seeds=1)
    assert {alone[key].verdict for key in ("variance-means", "variance-rho", "computation")} == {UNDECIDED}
    # Batches of one row have no part in it.
    assert usual["variance-means"].estimate == pytest.approx(math.log(5.0))


def test_verdicts_on_shared_weights(script, tmp_path):
    said = {"plain": "ELBO 1", "local": "refused (shared)", "flipout": "ELBO 2"}

    def found(said: dict[str, str]) -> dict[str, Any]:
        return judged(script, "judge_shared", tmp_path, numbers={"shared": said})

    assert found(said)["shared-weights"].verdict == REPRODUCED
    assert (found(said)["shared-general"].verdict, found(said)["shared-general"].estimate) == (REFUTED, 2.0)
    none = said | {"plain": "refused", "flipout": "refused"}
    assert found(none)["shared-general"].verdict == REPRODUCED
    assert found(none | {"plain": "ELBO 1"})["shared-general"].verdict == REFUTED


def test_verdicts_on_dropout(script, tmp_path):
    def found(share: float = 0.9, cost: float = 1.0, gap: float = 0.3, seeds: int = SEEDS) -> dict[str, Any]:
        spread = np.tile([-0.005, 0.005], SEEDS // 2)
        rows = [
            {
                "seed": seed,
                "prior": prior,
                "weights": 1000,
                "pruned": 1000 * (share + spread[seed]),
                "pruned_share_irrelevant_inputs": 0.5 + gap + spread[seed],
                "pruned_share_relevant_inputs": 0.5,
                "rmse": 1.2,
                "rmse_pruned": 1.2 * cost * (1.0 + spread[seed]),
                "live_units": 5,
            }
            for seed in range(seeds)
            for prior in ("log-uniform", "Gaussian, sd 1")
        ]
        return judged(script, "judge_dropout", tmp_path, dropout=rows)

    for key, name, values in (
        ("dropout-many", "share", (0.51, 0.5, 0.49)),
        ("dropout-cost", "cost", (1.04, 1.05, 1.06)),
        ("dropout-inputs", "gap", (0.01, 0.0, -0.01)),
    ):
        outcomes = [found(**{name: value})[key].verdict for value in values]
        assert outcomes == [REPRODUCED, UNDECIDED, REFUTED], key
        assert found(seeds=1)[key].verdict == UNDECIDED


def noise_rows(
    better: float = 0.02, gain: float = 0.1, off: float = 0.05, loss: float = 0.0, seeds: int = SEEDS
) -> list[dict[str, Any]]:
    """better, gain: error of the noise and score where it differs; off, loss: the same where it is level."""
    spread = np.tile([-0.001, 0.001], SEEDS // 2)
    rows = []
    for seed in range(seeds):
        usual = {"seed": seed, "method": "VI", "true_noise_sd": 0.06, "noise_sd_correlation": 0.9}
        for data, error, score in (("curve", 0.05 - better, 1.0 + gain), ("level", 0.06 * off, 1.0 - loss)):
            one = {"noise_sd_error": 0.05, "log_score": 1.0}
            own = {"noise_sd_error": error + 0.1 * spread[seed], "log_score": score + spread[seed]}
            rows += [usual | {"data": data, "model": "homoscedastic"} | one]
            rows += [usual | {"data": data, "model": "heteroscedastic"} | own]
            # Another method has no part in it.
            rows += [usual | {"data": data, "model": "heteroscedastic", "method": "NUTS"} | one]
    return rows


def test_verdicts_on_noise_where_it_differs_and_where_it_is_level(script, tmp_path):
    def found(**change: Any) -> dict[str, Any]:
        return judged(script, "judge_noise", tmp_path, noise=noise_rows(**change))

    for key, name, values in (
        ("noise-differs", "better", (0.0005, 0.0, -0.0005)),
        ("noise-differs-score", "gain", (0.005, 0.0, -0.005)),
        ("noise-level", "off", (0.09, 0.1, 0.11)),
        ("noise-level-score", "loss", (0.095, 0.1, 0.105)),
    ):
        outcomes = [found(**{name: value})[key].verdict for value in values]
        assert outcomes == [REPRODUCED, UNDECIDED, REFUTED], key
        assert found(seeds=1)[key].verdict == UNDECIDED


def beside_rows(script: Any, seeds: int = SEEDS, **grown: float) -> list[dict[str, Any]]:
    """grown: by how much each method's epistemic spread, or the band of a plain network, is wider away."""
    given = {"plain network": 1.0, "VI": 4.0, "VI, full rank": 4.0, "NUTS": 4.0}
    given |= {script.ensemble_of(script.FULL.networks): 1.0} | grown
    spread = np.exp(np.tile([-0.01, 0.01], SEEDS // 2))
    return [
        {
            "seed": seed,
            "model": kind,
            "method": name,
            "epistemic_sd_inside": 0.1,
            "epistemic_sd_away": 0.1 * factor * spread[seed],
            "iqr_inside": 0.1,
            "iqr_away": 0.1 if kind == "homoscedastic" else 0.1 * factor * spread[seed],
        }
        for seed in range(seeds)
        for kind in ("homoscedastic", "heteroscedastic")
        for name, factor in given.items()
    ]


CURVES = ("curve, homoscedastic", "curve, heteroscedastic")


def test_verdicts_on_spread_away_from_the_data(script, tmp_path):
    def found(rows: list[dict[str, Any]], **change: Any) -> dict[str, Any]:
        tables = {"beside": rows, "references": references(*CURVES, **change)}
        return judged(script, "judge_away", tmp_path, **tables)

    for method, key in script.METHODS.items():
        for factor, expected in ((2.05, REPRODUCED), (2.0, UNDECIDED), (1.95, REFUTED)):
            verdicts = found(beside_rows(script, **{method: factor}))
            assert verdicts[f"away-{key}-one-noise"].verdict == expected
            assert verdicts[f"away-{key}-noise-output"].verdict == expected
        assert found(beside_rows(script, seeds=1))[f"away-{key}-one-noise"].verdict == UNDECIDED
    ensemble = script.ensemble_of(script.FULL.networks)
    for factor, expected in ((1.95, REPRODUCED), (2.0, UNDECIDED), (2.05, REFUTED)):
        verdicts = found(beside_rows(script, **{ensemble: factor}))
        assert verdicts["ensemble-one-noise"].verdict == expected
        assert verdicts["ensemble-noise-output"].verdict == expected
    # What has not converged away from the data decides nothing about NUTS, and nothing is asked of the others.
    for change in ({"rhat_away": 1.011}, {"ess_inside": 399.0}, {"rhat_away": None}):
        verdicts = found(beside_rows(script), **change)
        assert verdicts["away-nuts-one-noise"].verdict == UNDECIDED
        assert verdicts["away-mean-field-one-noise"].verdict == REPRODUCED


def test_verdicts_on_the_band_of_a_plain_network(script, tmp_path):
    def found(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return judged(script, "judge_plain", tmp_path, beside=rows)

    for factor, expected in ((0.49, REPRODUCED), (0.5, UNDECIDED), (0.51, REFUTED)):
        rows = beside_rows(script, **{"plain network": factor})
        assert found(rows)["plain-noise-output"].verdict == expected
        assert found(rows)["plain-one-noise"].verdict == CORRECTED
    assert found(beside_rows(script, seeds=1))["plain-noise-output"].verdict == UNDECIDED
    narrow = [row | {"iqr_away": 0.01} for row in beside_rows(script)]
    assert found(narrow)["plain-one-noise"].verdict == REPRODUCED


def test_verdicts_on_averages(script, tmp_path):
    def found(gain: float, seeds: int = SEEDS) -> dict[str, Any]:
        spread = np.tile([-0.001, 0.001], SEEDS // 2)
        rows = [
            {"seed": seed, "method": name, "networks": count, "log_score": score}
            for seed in range(seeds)
            for name, count, score in (
                *((name, 1, 0.5) for name in script.METHODS),
                *((name, 1000, 0.6 + gain + spread[seed]) for name in script.METHODS),
                (script.CENTRE, 1, 0.6),
            )
        ]
        return judged(script, "judge_averages", tmp_path, averages=rows)

    for gain, expected in ((0.012, REPRODUCED), (0.01, UNDECIDED), (0.008, REFUTED)):
        assert found(gain)["average-centre"].verdict == expected
        # Jensen's inequality holds whatever the networks are.
        assert found(gain)["average-own"].verdict == REPRODUCED
    assert found(0.05, seeds=1)["average-centre"].verdict == UNDECIDED


def test_priors_differ_away_by_more_than_a_factor_and_by_more_than_among_the_data(script):
    def rows(away: float, inside: float) -> list[dict[str, float]]:
        return [
            {
                "epistemic_sd_inside": 0.1 * (inside if wide else 1.0),
                "epistemic_sd_away": away if wide else 1.0,
            }
            for wide in (False, True)
        ]

    assert script.dependence(rows(3.0, 1.0)) == pytest.approx(math.log(2.0))
    assert script.dependence(rows(3.0, 2.0)) == pytest.approx(math.log(1.5))
    assert script.dependence(rows(2.0, 3.0)) < 0.0


def test_verdicts_on_priors(script, tmp_path):
    names = script.FULL.priors

    def found(factor: float, seeds: int = SEEDS, **change: Any) -> dict[str, Any]:
        spread = np.exp(np.tile([-0.01, 0.01], SEEDS // 2))
        rows = [
            {
                "seed": seed,
                "prior": name,
                "method": method,
                "epistemic_sd_inside": 0.05,
                "epistemic_sd_away": 0.1 * (factor * spread[seed] if name == "scale mixture" else 1.0),
            }
            for seed in range(seeds)
            for method in ("VI", "NUTS")
            for name in names
        ]
        # Chains under a horseshoe do not converge, and it is left out of the claim on NUTS.
        sampled = references(*(f"prior: {name}" for name in names[:-1]), **change)
        sampled += references("prior: horseshoe", rhat=1.5)
        return judged(script, "judge_priors", tmp_path, priors=rows, references=sampled)

    for factor, expected in ((1.55, REPRODUCED), (1.5, UNDECIDED), (1.45, REFUTED)):
        assert found(factor)["priors-nuts"].verdict == found(factor)["priors-mean-field"].verdict == expected
    assert found(3.0, seeds=1)["priors-mean-field"].verdict == UNDECIDED
    lost = found(3.0, rhat=1.011)
    assert (lost["priors-nuts"].verdict, lost["priors-mean-field"].verdict) == (UNDECIDED, REPRODUCED)


def test_verdicts_on_the_mixture(script, tmp_path):
    found = judged(script, "judge_mixture", tmp_path)
    assert found["mixture-product"].verdict == found["mixture-weight"].verdict == CORRECTED


def growing(seeds: int = SEEDS, **change: float) -> list[dict[str, Any]]:
    """Costs and uncertainties are powers of the number of rows; times: of seconds of NUTS over VI at the fewest."""
    given = {"VI": 0.0, "NUTS": 1.0, "epistemic": -0.5, "aleatoric": 0.0, "times": 10.0} | change
    spread = np.tile([-0.002, 0.002], SEEDS // 2)
    return [
        {
            "seed": seed,
            "rows": count,
            "method": method,
            "row_gradients": 1e3 * count,
            "seconds": (0.1 if method == "VI" else 0.1 * given["times"])
            * (count / 32.0) ** (given[method] + (spread[seed] if method == "NUTS" else -spread[seed])),
            "epistemic_sd": count ** (given["epistemic"] + spread[seed]),
            "aleatoric_sd": 0.06 * (count / 512.0) ** (given["aleatoric"] + spread[seed]),
        }
        for seed in range(seeds)
        for count in (32, 128, 512)
        for method in ("VI", "NUTS")
    ]


def test_verdicts_on_more_rows(script, tmp_path):
    cases = [f"{count} rows" for count in (32, 128, 512)]

    def found(rows: list[dict[str, Any]], **change: Any) -> dict[str, Any]:
        return judged(script, "judge_rows", tmp_path, rows=rows, references=references(*cases, **change))

    # In 16 times as many rows 10 % is a power of 0.034.
    edge = math.log(1.1) / math.log(16.0)
    for keys, name, values in (
        (["cost-rows"], "VI", (0.49, 0.5, 0.51)),
        (["chains-rows"], "NUTS", (0.81, 0.8, 0.79)),
        (["epistemic-mean-field", "epistemic-nuts"], "epistemic", (-0.26, -0.25, -0.24)),
        (["aleatoric-mean-field", "aleatoric-nuts"], "aleatoric", (edge - 0.004, edge, edge + 0.004)),
        (["aleatoric-mean-field", "aleatoric-nuts"], "aleatoric", (0.004 - edge, -edge, -edge - 0.004)),
    ):
        for key in keys:
            outcomes = [found(growing(**{name: value}))[key].verdict for value in values]
            assert outcomes == [REPRODUCED, UNDECIDED, REFUTED], key
            assert found(growing(seeds=1))[key].verdict == UNDECIDED
    # In the mean over numbers of rows, at the second of three of them.
    for times, expected in ((2.05, REPRODUCED), (2.0, UNDECIDED), (1.95, REFUTED)):
        assert found(growing(times=times / 4.0))["cost"].verdict == expected
    for change in ({"rhat_inside": 1.011}, {"ess_inside": 399.0}, {"rhat_inside": None}):
        lost = found(growing(), **change)
        assert {lost[key].verdict for key in ("cost", "epistemic-nuts", "aleatoric-nuts")} == {UNDECIDED}
        assert lost["epistemic-mean-field"].verdict == lost["chains-rows"].verdict == REPRODUCED


def test_one_number_of_rows_has_no_growth(script, tmp_path):
    rows = [row for row in growing() if row["method"] == "VI" or row["rows"] == 32]
    found = judged(script, "judge_rows", tmp_path, rows=rows, references=references("32 rows"))
    assert {found[key].verdict for key in ("chains-rows", "epistemic-nuts", "aleatoric-nuts")} == {NOT_RUN}


def test_every_claim_is_judged_from_what_is_stored(script):
    study = script.Study.read(FOLDER / "results" / "variational_overview", script.FULL)
    declared = script.read_claims("variational_overview")
    assert [each.key for each in script.judge(study)] == list(declared)
    for claim in declared.values():
        assert not claim.figure or (FOLDER / "results" / claim.figure).exists()


def test_a_reference_that_did_not_converge_is_none(script, tmp_path, monkeypatch):
    study = study_of(script, tmp_path)
    posterior = SimpleNamespace(info=SimpleNamespace(gradient_evaluations=10, run_seconds=0.1))
    for verdict, expected in (("converged", posterior), ("not converged", None)):
        found = SimpleNamespace(verdict=verdict, reasons=("because",))
        monkeypatch.setattr(script.bnn, "diagnose", lambda _, found=found: found)
        monkeypatch.setattr(
            script,
            "convergence",
            lambda _, at: SimpleNamespace(rhat=float(at.min()), ess_bulk=float(at.max())),
        )
        reference = script.referenced(study, "case", 3, posterior)
        assert (None if reference is None else reference.posterior) is expected
    assert [row["verdict"] for row in study.tables["references"]] == ["converged", "not converged"]
    # Judged at the inputs of the claims: among the data, and away from them.
    names = ("seed", "rhat_inside", "ess_inside", "rhat_away", "ess_away")
    assert [study.tables["references"][0][name] for name in names] == [3, *script.INSIDE, *script.OUTSIDE]
    assert set(script.gap(None, None, np.zeros((1, 1))).values()) == {script.NO_REFERENCE}


def test_a_tiny_run_writes_tables_figures_and_verdicts(script, tmp_path, capsys):
    study = script.main(tiny=True, out=tmp_path)
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "results.json").read_text())
    assert [each["key"] for each in content["verdicts"]] == list(script.read_claims("variational_overview"))
    for verdict in content["verdicts"]:
        assert verdict["verdict"] in OUTCOMES
        # One data set has no interval.
        assert verdict["rule"] != "mean" or verdict["verdict"] in (UNDECIDED, NOT_RUN)
        assert verdict["numbers"]
        assert verdict["claim"] in said
    assert len((tmp_path / "verdicts.txt").read_text().splitlines()) == len(content["verdicts"])
    numbers = 0
    for name in TABLES:
        with (tmp_path / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                for column, value in row.items():
                    # Of so few draws R-hat may be infinite.
                    if column.startswith(("rhat", "ess")):
                        continue
                    try:
                        number = float(value)
                    except ValueError:
                        continue
                    assert math.isfinite(number), (name, row)
                    numbers += 1
    assert numbers > 300
    for name in FIGURES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    # What the study stands on: closed forms and draws agree, and so do the means of the estimators and of batches.
    assert max(abs(row["z"]) for row in study.tables["elbo"]) < 4.5
    assert max(row["largest_z"] for row in study.tables["batch_gradients"]) < 4.5
    estimated = [row for row in study.tables["estimators"] if row["estimator"] != "plain"]
    assert max(max(row["largest_z_loc"], row["largest_z_scale"]) for row in estimated) < 5.0
    assert study.numbers["softplus_off"] < 1e-12
    share = script.share_outside(0.0, 1.0)
    error = math.sqrt(share * (1.0 - share) / script.NORMALS)
    assert abs(study.numbers["normals_outside"] - share) < 4.5 * error
    assert study.numbers["mixture"]["off_with_brackets"] < 1e-9
    assert [name for name, said in study.numbers["shared"].items() if said.startswith("refused")] == ["local"]
    for name in TABLES:
        if name not in ("batch_gradients", "elbo", "roots"):
            assert {row["seed"] for row in study.tables[name]} == {0}, name
