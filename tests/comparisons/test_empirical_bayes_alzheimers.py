"""The study of empirical Bayes: its formulas against other oracles, each verdict both ways, and a tiny run of it."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats
from sklearn.metrics import log_loss, roc_auc_score

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
TABLES = ("empirical_bayes", "departures", "classic", "baselines", "reference", "correlations")
FIGURES = ("loss", "roc_auc", "correlation", "departures")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("empirical_bayes_alzheimers")


# --- formulas ---------------------------------------------------------------------------------------------


def test_area_is_that_of_scikit_learn_ties_too(script):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    for score in (rng.normal(size=200), rng.integers(0, 5, 200) / 4.0, np.zeros(200)):
        assert script.auc(score, y) == pytest.approx(roc_auc_score(y, score), abs=1e-12)


def test_error_of_an_area_without_information_is_that_of_the_rank_test(script):
    ones, zeros = 37, 55
    exact = math.sqrt((ones + zeros + 1) / (12.0 * ones * zeros))
    assert script.auc_error(0.5, ones, zeros) == pytest.approx(exact, rel=1e-12)


def test_derived_cost_is_the_divergence_at_the_best_prior_scale_and_the_printed_one_is_not(script):
    gamma, sigma = np.array([0.0, 0.3, -2.0, 7.0]), np.array([1.0, 0.2, 3.0, 0.01])

    def divergence(log_s: float, mu: float, sd: float) -> float:
        s = math.exp(log_s)
        return math.log(s / sd) + (sd**2 + mu**2) / (2.0 * s**2) - 0.5

    best = []
    for g, s in zip(gamma, sigma, strict=True):
        found: Any = optimize.minimize_scalar(divergence, bracket=(-5.0, 3.0), args=(g * s, s), tol=1e-12)
        best.append(found.fun)
    import jax.numpy as jnp

    parts = {"a": jnp.asarray(gamma[:2]), "b": jnp.asarray(gamma[2:])}
    assert float(script.complexity(parts, "derived")) == pytest.approx(sum(best), rel=1e-5)
    printed = 0.5 * (np.log1p(gamma**2) ** 2).sum()
    assert float(script.complexity(parts, "squared")) == pytest.approx(printed, rel=1e-5)


def test_noise_of_a_layer_has_the_law_of_independent_weights_and_the_shared_one_has_not(script):
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(1, 3)))
    gamma = {"l.weight": jnp.asarray(rng.normal(size=(3, 2))), "l.bias": jnp.asarray(rng.normal(size=2))}
    rho = {"l.weight": jnp.asarray(rng.normal(size=(3, 2))), "l.bias": jnp.asarray(rng.normal(size=2))}
    sigma = {name: np.logaddexp(0.0, np.asarray(value)) for name, value in rho.items()}
    row, count = np.asarray(x)[0], 4000
    mean = (
        row @ (np.asarray(gamma["l.weight"]) * sigma["l.weight"])
        + np.asarray(gamma["l.bias"]) * sigma["l.bias"]
    )
    drawn = np.stack(
        [
            row @ (sigma["l.weight"] * (np.asarray(gamma["l.weight"]) + rng.normal(size=(3, 2))))
            + sigma["l.bias"] * (np.asarray(gamma["l.bias"]) + rng.normal(size=2))
            for _ in range(count)
        ]
    )
    keys = jax.random.split(jax.random.key(2), count)
    found = {
        noise: np.asarray(jax.vmap(lambda k, n=noise: script.noisy_layer(x, "l", gamma, rho, k, n)[0])(keys))
        for noise in ("independent", "shared")
    }
    exact = {
        "independent": np.sqrt(row**2 @ sigma["l.weight"] ** 2 + sigma["l.bias"] ** 2),
        "shared": np.abs(row @ sigma["l.weight"] + sigma["l.bias"]),
    }
    # A standard deviation from so many normals has a relative error of (2 count)^(-1/2); five of them, for 4 numbers.
    bound = 5.0 / math.sqrt(2.0 * count)
    for noise, values in found.items():
        assert np.allclose(values.std(0) / exact[noise], 1.0, atol=bound), noise
        assert np.all(np.abs(values.mean(0) - mean) < 5.0 * exact[noise] / math.sqrt(count))
    assert np.allclose(drawn.std(0) / exact["independent"], 1.0, atol=bound)
    assert not np.allclose(exact["shared"], exact["independent"], rtol=2.0 * bound)


def test_descent_reaches_the_minimum_of_each_fit_and_keeps_checkpoints(script):
    import jax.numpy as jnp

    target = np.array([1.0, -2.0, 0.5])
    found = script.descend(
        lambda p, key, own: jnp.sum((p["a"] - own) ** 2),
        {"a": np.zeros((3, 2))},
        target,
        steps=600,
        rate=0.05,
        seed=0,
        checkpoints=(50, 600),
    )
    assert np.allclose(found.average["a"], np.repeat(target[:, None], 2, axis=1), atol=1e-4)
    assert sorted(found.kept) == [50, 600]
    assert found.losses.shape == (3, 600)
    assert np.allclose(found.losses[:, 0], 2.0 * target**2, rtol=1e-6)
    # The checkpoint is where the losses stood: the loss that was computed next.
    assert np.allclose(((found.kept[50]["a"] - target[:, None]) ** 2).sum(1), found.losses[:, 50], rtol=1e-4)


def test_decayed_weights_are_stationary_under_the_penalty(script):
    from jax import grad
    from jax import numpy as jnp

    data = script.rows(True)
    starts = script.uniform_start(6, 2, 2, 0)
    precisions = np.array([1.0, 30.0])
    found = script.decayed(data.x, data.y, starts, precisions, 1500)
    for index, precision in enumerate(precisions):
        w = {name: jnp.asarray(value[index]) for name, value in found.items()}

        def loss(w: Any, precision: float = precision) -> Any:
            square = sum(jnp.sum(value**2) for value in w.values())
            return script.bernoulli_cost(script.logits(w, data.x), data.y) + 0.5 * precision * square

        # A gradient in nats per unit of weight; the smooth part of a mode has none, a kink at a row leaves some.
        bias = np.asarray(grad(loss)(w)["output.bias"])
        assert np.all(np.abs(bias) < 0.05), bias
    first, second = (sum(float((value[k] ** 2).sum()) for value in found.values()) for k in (0, 1))
    assert second < 0.2 * first


def test_scores_are_those_of_the_mixture(script):
    rng = np.random.default_rng(3)
    f, y = rng.normal(size=(5, 40)), rng.integers(0, 2, 40)
    p = (1.0 / (1.0 + np.exp(-f))).mean(0)
    found = script.judged(f, y)
    assert found["log_score"] == pytest.approx(-log_loss(y, p), rel=1e-12)
    assert found["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-12)
    wild = script.judged(np.full((1, 2), 900.0), np.array([1, 0]))
    assert wild["log_score"] == pytest.approx(-450.0)


def test_what_labels_alone_are_worth(script):
    data = script.rows(True)
    share = data.y.mean()
    assert data.null == pytest.approx(stats.bernoulli.logpmf(data.y, share).sum(), rel=1e-12)
    assert np.allclose(data.x.mean(0), 0.0, atol=1e-12)
    assert not np.allclose(data.x_test.mean(0), 0.0, atol=1e-6)


@pytest.mark.skipif(not os.environ.get("PPL_BNN_DATA"), reason="needs the tables of PPL_BNN_DATA")
def test_rows_are_the_split_of_the_source(script):
    from sklearn.model_selection import train_test_split

    import ppl_bnn as bnn

    data, table = script.rows(False), bnn.data.load("alzheimers")
    train, test = train_test_split(np.arange(len(table.y)), test_size=0.2, random_state=42)
    assert np.array_equal(data.y, table.y[train])
    assert np.array_equal(data.y_test, table.y[test])
    assert data.x.shape == (1719, 32)


def test_correlation_and_slope_are_those_of_scipy_and_numpy(script):
    rng = np.random.default_rng(4)
    x = rng.normal(size=12)
    y = x + rng.normal(size=12)
    r, low, high = script.correlation(x, y, "pearson")
    interval = stats.pearsonr(x, y).confidence_interval(0.95)
    assert (r, low, high) == pytest.approx((stats.pearsonr(x, y)[0], interval.low, interval.high), abs=1e-4)
    assert script.correlation(x, y, "spearman")[0] == pytest.approx(stats.spearmanr(x, y)[0])
    assert script.correlation(x[:3], y[:3], "pearson") is None
    found = fits(auc_test=y)
    width = np.log2([row["width"] for row in found])
    value, error = script.slope(found, "auc_test", 1)
    line, covariance = np.polyfit(width, y, 1, cov=True)
    assert (value, error) == pytest.approx((line[0], math.sqrt(covariance[0, 0])), rel=1e-9)


# --- verdicts, either way ---------------------------------------------------------------------------------


def fits(**columns: Any) -> list[dict[str, Any]]:
    """Twelve fits: three seeds of the widths 1, 4, 16, 37."""
    found = []
    for index in range(12):
        row: dict[str, Any] = {"width": (1, 4, 16, 37)[index // 3], "seed": index % 3}
        found.append(row | {name: float(values[index]) for name, values in columns.items()})
    return found


NOISE = np.random.default_rng(5).normal(size=12)
STEPS = np.repeat([0.0, 2.0, 4.0, math.log2(37.0)], 3)


# Residuals that no slope explains, and the standard error of a slope beside them.
FLAT = 1e-3 * np.tile([1.0, -1.0, 0.0], 4)
ERROR = math.sqrt((FLAT**2).sum() / 10.0 / ((STEPS - STEPS.mean()) ** 2).sum())


@pytest.mark.parametrize(
    ("errors", "verdict"), [(4.0, "reproduced"), (-1.0, "reproduced"), (-4.0, "not reproduced")]
)
def test_over_fitting_is_a_fall_by_two_errors_of_area_or_log_score(script, errors, verdict):
    flat = fits(auc_test=0.9 + FLAT, log_score_test=-0.4 + FLAT)
    moved = errors * ERROR * STEPS
    for bayes in (
        fits(auc_test=0.9 + FLAT + moved, log_score_test=-0.4 + FLAT),
        fits(auc_test=0.9 + FLAT, log_score_test=-0.4 + FLAT + moved),
    ):
        assert script.judge_overfitting("claim", bayes, flat, 1).verdict == verdict
        # What the other network does is told and has no say.
        assert script.judge_overfitting("claim", flat, bayes, 1).verdict == "reproduced"
    assert script.judge_overfitting("claim", flat[:2], flat[:2], 1).verdict == "not run"


def test_above_on_the_whole_range_means_at_every_width(script):
    ours, theirs = fits(auc_test=0.9 + 1e-3 * NOISE), fits(auc_test=0.8 + 1e-3 * NOISE)
    good = script.judge_range("claim", ours, theirs)
    assert good.verdict == "reproduced"
    assert "at 4 of 4 widths" in good.numbers
    for row in theirs[3:6]:
        row["auc_test"] = 0.95
    bad = script.judge_range("claim", ours, theirs)
    assert bad.verdict == "not reproduced"
    assert bad.numbers.endswith("not higher at 4")


def test_groups_of_optima_are_those_that_are_apart(script):
    upper = np.array([1, 0, 0] * 4, dtype=bool)
    found = fits(elbo=np.where(upper, -500.0, -700.0) + NOISE)
    assert np.array_equal(script.optima(found), upper)


@pytest.mark.parametrize(
    ("swapped", "r", "verdict"),
    [(4, 0.888, "reproduced"), (8, 0.552, "not reproduced"), (0, 1.0, "not reproduced")],
)
def test_correlation_is_judged_by_the_interval_of_spearmans(script, swapped, r, verdict):
    rank = np.arange(12.0)
    rank[[0, swapped]] = rank[[swapped, 0]]
    # Pearson's is far above 0.89 in each case: one fit is far from all others in both.
    far = np.where(np.arange(12) == 11, 1000.0, 0.0)
    found = fits(elbo=np.arange(12.0) + far, auc_test=0.5 + 1e-4 * (rank + far))
    table = script.correlations(found)
    assert table[0]["spearman"] == pytest.approx(r, abs=1e-3)
    assert table[0]["pearson"] > 0.99
    assert script.judge_correlation(found, table).verdict == verdict
    down = fits(elbo=np.arange(12.0), auc_test=0.5 - 1e-4 * rank)
    assert script.judge_correlation(down, script.correlations(down)).verdict == "not reproduced"
    few = found[:3]
    assert script.judge_correlation(few, script.correlations(few)).verdict == "not run"


def relatives(excess: float) -> list[dict[str, Any]]:
    row = {"width": 6, "seed": 0, "per": "weight", "labels": "shuffled", "start": "source", "elbo_se": 0.1}
    return [row | {"elbo": -1000.0 + excess, "null": -1000.0}]


def test_selection_needs_a_ranking_and_a_bound_that_noise_does_not_pass(script):
    near = np.arange(12) >= 4
    elbo = np.where(near, -500.0, -900.0) + 10.0 * np.arange(12) / 12.0
    ranked = fits(elbo=elbo, auc_test=0.9 + 1e-4 * elbo + 1e-6 * NOISE)
    same = fits(elbo=elbo, auc_test=np.where(near, 0.93, 0.9) + 1e-3 * np.tile([1.0, -1.0, -1.0, 1.0], 3))
    for found, excess, verdict in (
        (ranked, -3.0, "reproduced"),
        (ranked, 0.1, "reproduced"),
        (ranked, 3.0, "not reproduced"),
        (same, -3.0, "not reproduced"),
    ):
        table = script.correlations(found)
        assert script.judge_selection(found, table, relatives(excess)).verdict == verdict
        assert script.judge_selection(found, table, []).verdict == "not run"


def test_a_start_is_the_better_one_where_its_bounds_are_larger(script):
    found = fits(elbo=-500.0 + NOISE, auc_test=0.9 + 0.0 * NOISE)
    other = [row | {"start": "prior", "elbo": -510.0} for row in found[:6]]
    assert script.judge_start(found, other).verdict == "reproduced"
    other[0]["elbo"] = -300.0
    assert script.judge_start(found, other).verdict == "not reproduced"
    assert script.judge_start(found, relatives(0.0)).verdict == "not run"


def test_architectures_and_reference_are_judged_from_numbers(script):
    rows = [
        {"architecture": "a", "log_score_test": -0.3, "accuracy_test": 0.9, "converged": True},
        {"architecture": "a", "log_score_test": -0.5, "accuracy_test": 0.8, "converged": True},
    ]
    assert script.judge_architectures(rows).verdict == "reproduced"
    assert script.judge_architectures(rows[::-1]).verdict == "not reproduced"
    assert script.judge_architectures([]).verdict == "not run"
    chains = [{"method": "NUTS, x", "width": 0, "note": "converged", "gap_to_nuts": 0.0}]
    one = {"method": "SVI", "width": 0, "gap_to_nuts": 0.4, "noise_floor": 0.1}
    assert script.judge_reference([*chains, one]).verdict == "reproduced"
    assert (
        script.judge_reference([*chains, one | {"gap_to_nuts": script.NO_REFERENCE}]).verdict
        == "not reproduced"
    )


def departures(**auc: float) -> list[dict[str, Any]]:
    """Fits of variants at two widths and seeds, each with its mean test AUC."""
    keys = ("log_score_test", "active_weights", "elbo_of_its_q", "objective")
    return [
        {
            "variant": variant.replace("_", " "),
            "width": width,
            "seed": seed,
            "steps": 10,
            "converged": seed == 0,
        }
        | dict.fromkeys(keys, 1.0)
        | {"auc_test": mean + 0.001 * (seed - 0.5) * (1.0 if variant == "as_derived" else -1.0)}
        for variant, mean in auc.items()
        for width in (2, 8)
        for seed in (0, 1)
    ]


def test_a_departure_is_compared_with_the_same_width_and_seed(script):
    found = script.judge_departure("shared noise", departures(as_derived=0.9, shared_noise=0.8))
    assert found.verdict == "corrected"
    assert "(paired -0.1 +- 0.00058)" in found.numbers
    assert "Beyond two errors: test AUC." in found.numbers
    assert "steps: 2 of 4, as derived 2 of 4" in found.numbers
    same = script.judge_departure("shared noise", departures(as_derived=0.9, shared_noise=0.9002))
    assert same.verdict == "not reproduced"
    assert script.judge_departure("shared noise", departures(as_derived=0.9)).verdict == "not run"


def test_what_the_source_ran_is_held_to_its_own_area(script):
    near = departures(as_derived=0.9, all_three=0.915)
    assert script.judge_source(near, 150, 280).verdict == "reproduced"
    assert (
        script.judge_source(departures(as_derived=0.9, all_three=0.8), 150, 280).verdict == "not reproduced"
    )
    # One run without information is enough, however wide it makes the interval.
    near[-1]["auc_test"] = 0.51
    lost = script.judge_source(near, 150, 280)
    assert lost.verdict == "not reproduced"
    assert "of which 1 collapsed" in lost.numbers
    assert script.judge_source(departures(as_derived=0.9), 150, 280).verdict == "not run"


def test_a_rival_at_the_edge_of_what_was_tried_is_named(script):
    decay = [{"width": 4, "precision": 3.0}, {"width": 10, "precision": 30.0}]
    assert script.at_edge(decay, (0.3, 3.0, 30.0)).endswith("at width 10 (30)")
    assert script.at_edge(decay[:1], (0.3, 3.0, 30.0)) == ""
    ours, theirs = fits(auc_test=0.9 + 1e-3 * NOISE), fits(auc_test=0.8 + 1e-3 * NOISE)
    assert script.judge_range("claim", ours, theirs, "; as told").numbers.endswith("; as told")


# --- all of it --------------------------------------------------------------------------------------------


def test_the_plan_has_every_part_and_every_departure(script):
    tasks = script.plan(script.FULL)
    assert {name for name, _ in tasks} == set(script.PARTS)
    assert {given["variant"] for name, given in tasks if name == "variant"} == set(script.VARIANTS)
    assert len({(name, tuple(sorted(given.items()))) for name, given in tasks}) == len(tasks)
    fits = [given for name, given in tasks if name == "empirical Bayes" and len(given) == 2]
    assert len(fits) == len(script.FULL.widths) * script.FULL.seeds


def test_a_tiny_run_writes_tables_figures_and_verdicts(script, tmp_path, capsys):
    script.main(tiny=True, out=tmp_path)
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "results.json").read_text())
    assert len(content["verdicts"]) >= 9
    for verdict in content["verdicts"]:
        assert verdict["verdict"] in ("reproduced", "not reproduced", "corrected", "not run")
        assert verdict["numbers"]
        assert verdict["claim"] in said
    assert len((tmp_path / "verdicts.txt").read_text().splitlines()) == len(content["verdicts"])
    numbers = 0
    for name in TABLES:
        with (tmp_path / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                for value in row.values():
                    try:
                        number = float(value)
                    except ValueError:
                        continue
                    assert math.isfinite(number), (name, row)
                    numbers += 1
    assert numbers > 100
    for name in FIGURES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["two hidden layers", "convolution"])
def test_other_architectures_are_fitted_beside_themselves_without_regularisation(script, name):
    found = script.run_architecture(script.TINY, name)
    assert [table for table, _ in found] == ["architectures"] * 2
    bayes, plain = (row for _, row in found)
    assert (bayes["architecture"], plain["method"]) == (name, "no regularisation")
    assert math.isfinite(bayes["elbo"])
    assert script.judge_architectures([bayes, plain]).verdict in ("reproduced", "not reproduced")
