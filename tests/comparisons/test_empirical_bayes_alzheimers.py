"""The study of empirical Bayes: its formulas against other oracles, each verdict both ways, and a tiny run of it."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats
from sklearn.metrics import log_loss, roc_auc_score

from comparisons.claims import CORRECTED, NOT_RUN, OUTCOMES, REFUTED, REPRODUCED, UNDECIDED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
TABLES = (
    *("empirical_bayes", "departures", "classic", "baselines"),
    *("reference", "correlations", "selection"),
)
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
    slopes = script.slopes(found, "auc_test", 1)
    each = [stats.linregress(np.log2([1, 4, 16, 37]), y[seed::3]) for seed in range(3)]
    np.testing.assert_allclose(slopes, [line.slope for line in each], rtol=1e-9)
    above = [stats.linregress(np.log2([4, 16, 37]), y[3 + seed :: 3]).slope for seed in range(3)]
    np.testing.assert_allclose(script.slopes(found, "auc_test", 4), above, rtol=1e-9)
    assert not len(script.slopes(found, "auc_test", 37))
    units = np.stack([x, y], axis=1)
    assert script.coefficient(units, "pearson") == pytest.approx(stats.pearsonr(x, y)[0], rel=1e-9)
    assert script.coefficient(units, "spearman") == pytest.approx(stats.spearmanr(x, y)[0], rel=1e-9)
    assert script.coefficient(np.ones((3, 2)), "pearson") == 0.0


# --- verdicts, each way -----------------------------------------------------------------------------------


def claims(script) -> Any:
    return script.read_claims("empirical_bayes_alzheimers")


def verdict(script, key: str, judge: str, *given: Any) -> Any:
    """The verdict on one claim by one judge, which may give evidence on others, too."""
    referee = script.Referee(claims(script))
    getattr(script, judge)(referee, *given)
    for other in set(claims(script)) - set(referee.evidence):
        referee.not_run(other, "another test")
    return next(each for each in referee.verdicts() if each.key == key)


def outcome(script, key: str, judge: str, *given: Any) -> str:
    return verdict(script, key, judge, *given).verdict


def fits(**columns: Any) -> list[dict[str, Any]]:
    """Twelve fits: three seeds of the widths 1, 4, 16, 37."""
    found = []
    for index in range(12):
        row: dict[str, Any] = {"width": (1, 4, 16, 37)[index // 3], "seed": index % 3, "converged": True}
        found.append(row | {name: float(values[index]) for name, values in columns.items()})
    return found


NOISE = np.random.default_rng(5).normal(size=12)
STEPS = np.repeat([0.0, 2.0, 4.0, math.log2(37.0)], 3)
SEEDS = np.tile([-1.0, 0.0, 1.0], 4)
# Student's t of the 97.5 % quantile on two degrees of freedom, over the root of three units.
REACH = stats.t.ppf(0.975, 2) / math.sqrt(3.0)


@pytest.mark.parametrize("start", ["source", "other"])
@pytest.mark.parametrize(("score", "margin"), [("auc", 0.003), ("log_score", 0.03)])
def test_over_fitting_is_a_fall_by_more_than_the_margin(script, start, score, margin):
    """Slopes of seeds about `middle`, a spread of `wide` apart."""

    def found(middle: float, wide: float) -> str:
        values = -0.4 + (middle + wide * SEEDS) * STEPS
        bayes = fits(auc_test=values, log_score_test=values)
        return outcome(
            script, f"overfitting-{score}-{start}", "judge_overfitting", start, bayes, bayes[:0], 1
        )

    # The two scores are of one family: with the same numbers both must pass half of the level.
    reach = margin * stats.t.ppf(1 - 0.0125, 2) / math.sqrt(3.0)
    assert found(-margin + 1.05 * reach, margin) == REPRODUCED
    assert found(-margin + 0.95 * REACH * margin, margin) == UNDECIDED
    assert found(-margin - 0.95 * REACH * margin, margin) == UNDECIDED
    assert found(-10.0 * margin, 0.1 * margin) == REFUTED
    few = fits(auc_test=NOISE, log_score_test=NOISE)[:2]
    key = f"overfitting-{score}-{start}"
    assert outcome(script, key, "judge_overfitting", start, few, few, 1) == NOT_RUN


def test_over_fitting_at_the_edge_of_its_own_interval_is_lost_in_its_family(script):
    values = -0.4 + (-0.003 + 1.02 * REACH * 0.001 + 0.001 * SEEDS) * STEPS
    bayes = fits(auc_test=values, log_score_test=-0.4 + 0.5 * SEEDS * STEPS)
    found = verdict(script, "overfitting-auc-source", "judge_overfitting", "source", bayes, bayes, 1)
    assert found.verdict == UNDECIDED
    assert "by itself reproduced" in found.numbers
    assert "12 of 12 fits converged" in found.numbers


@pytest.mark.parametrize(
    "key", ["above-classic-source", "above-classic-other", "above-decay-source", "above-decay-other"]
)
def test_above_on_the_whole_range_means_at_the_worst_width_of_each_seed(script, key):
    def found(worst: float) -> Any:
        theirs = fits(auc_test=np.full(12, 0.8))
        ours = fits(auc_test=np.full(12, 0.9))
        for row in ours[3:6]:
            row["auc_test"] = 0.8 + worst + 0.001 * (row["seed"] - 1)
        return verdict(script, key, "judge_range", key, ours, theirs, "; as told")

    assert found(1.05 * REACH * 0.001).verdict == REPRODUCED
    assert found(0.95 * REACH * 0.001).verdict == found(-0.95 * REACH * 0.001).verdict == UNDECIDED
    assert found(-1.05 * REACH * 0.001).verdict == REFUTED
    assert found(0.05).numbers.endswith("16: +0.100, 37: +0.100; as told")
    one = fits(auc_test=np.full(12, 0.9))[:1]
    assert outcome(script, key, "judge_range", key, one, one) == UNDECIDED
    assert outcome(script, key, "judge_range", key, [], one) == NOT_RUN


def test_a_rival_at_the_edge_of_what_was_tried_is_named(script):
    decay = [{"width": 4, "precision": 3.0}, {"width": 10, "precision": 30.0}]
    assert script.at_edge(decay, (0.3, 3.0, 30.0)).endswith("at width 10 (30)")
    assert script.at_edge(decay[:1], (0.3, 3.0, 30.0)) == ""


def test_groups_of_optima_are_those_that_are_apart(script):
    upper = np.array([1, 0, 0] * 4, dtype=bool)
    found = fits(elbo=np.where(upper, -500.0, -700.0) + NOISE)
    assert np.array_equal(script.optima(found), upper)


def test_copies_agree_in_elbo_complexity_and_area(script):
    usual = {"elbo": -500.0, "complexity_cost": 70.0, "auc_test": 0.94, "exp_minus_loss": 0.7}
    for change, groups in (
        ({"elbo": -500.9, "complexity_cost": 70.9, "auc_test": 0.9419, "exp_minus_loss": 0.6}, 1),
        ({"elbo": -501.1}, 2),
        ({"complexity_cost": 71.1}, 2),
        ({"auc_test": 0.9421}, 2),
    ):
        assert len(script.distinct([usual, usual | change])) == groups
    copy = usual | {"exp_minus_loss": 0.6}
    far = usual | {"elbo": -600.0, "exp_minus_loss": 0.5}
    np.testing.assert_allclose(script.of_optima([far, copy, usual], "exp_minus_loss"), [0.65, 0.5])


def correlated(area: np.ndarray, copies: int = 0) -> list[dict[str, Any]]:
    """Optima whose ELBO are 10 nats apart, and as many copies of the first as are asked for."""
    rows = [
        {
            "width": 1 + index % 4,
            "seed": index // 4,
            "elbo": 10.0 * index - 900.0,
            "exp_minus_loss": 0.5 + 0.01 * index,
            "complexity_cost": 50.0,
            "auc_test": float(value),
        }
        for index, value in enumerate(area)
    ]
    return rows + [rows[0] | {"seed": 50 + copy} for copy in range(copies)]


# Forty optima whose coefficients are about 0.89; the same without noise, and with much of it.
LINE = 0.5 + 0.005 * np.arange(40.0)
WAVER = np.random.default_rng(3).permutation(40) - 19.5


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_correlation_is_judged_over_optima(script, kind):
    def found(rows: list[dict[str, Any]]) -> Any:
        return verdict(script, kind, "judge_correlation", rows, rows[:0])

    near = found(correlated(LINE + 0.0025 * WAVER, copies=6))
    assert near.verdict == REPRODUCED, near.numbers
    assert near.n == 40
    assert "the 46 fits are 40 optima, one of them found 7 times" in near.numbers
    assert found(correlated(LINE + 0.02 * WAVER)).verdict == REFUTED
    assert found(correlated(LINE[:7] + 0.0025 * WAVER[:7])).verdict == UNDECIDED
    assert found(correlated(LINE)).verdict == REFUTED
    few = found(correlated(LINE[:4]))
    assert (few.verdict, few.low) == (UNDECIDED, None)
    assert outcome(script, "pearson-label", "judge_correlation", correlated(LINE), []) == UNDECIDED


def selected(picked: float, split: int = 0) -> list[dict[str, Any]]:
    """Five fits with regrets of 0, 0.01, ... 0.04; the largest ELBO is that of `picked`."""
    return [
        {
            "split": split,
            "start": "source",
            "width": index + 1,
            "seed": 0,
            "elbo": -abs(0.01 * index - picked),
        }
        | {"auc_test": 0.9 - 0.01 * index, "log_score_test": -0.01 * index}
        for index in range(5)
    ]


@pytest.mark.parametrize("start", ["source", "other"])
@pytest.mark.parametrize("score", ["auc", "log_score"])
def test_the_elbo_is_held_to_the_best_fit_of_this_split(script, start, score):
    def found(picked: float) -> Any:
        chosen = script.selection(selected(picked), {})
        return verdict(script, f"this-split-{score}-{start}", "judge_this_split", start, chosen)

    # The median fit has a regret of 0.02, so that half of it is that of the second fit.
    assert found(0.0).verdict == REPRODUCED
    assert found(0.02).verdict == REFUTED
    assert found(0.03).estimate == pytest.approx(0.03 - 0.01)
    assert outcome(script, f"this-split-{score}-{start}", "judge_this_split", start, []) == NOT_RUN


def test_the_fit_of_the_largest_elbo_is_told_for_both_starts_together(script):
    first, second = (selected(picked) for picked in (0.03, 0.02))
    told = script.of_both_starts([*first, *({**row, "elbo": row["elbo"] + 9.0} for row in second)])
    assert "of the 10 fits" in told
    assert "AUC 0.8800 (best 0.9000) and log score -0.0200 (best 0.0000)" in told.replace("-0.0000", "0.0000")
    chosen = script.selection(selected(0.0), {})
    for key in ("this-split-auc-source", "this-split-log_score-source"):
        assert verdict(script, key, "judge_this_split", "source", chosen, told).numbers.endswith(told)


def test_a_choice_is_that_of_the_fits_own_split_and_start(script):
    """Stored rows name no split: they are of the source's."""
    first, other = selected(0.02), [row | {"start": "prior"} for row in selected(0.03, 1)]
    checked = {(0, "source", row["width"], 0): float(row["width"] == 1) for row in first}
    for row in first:
        row.pop("split")
    found = {(row["split"], row["start"]): row for row in script.selection([*first, *other], checked)}
    assert {key: row["width_elbo"] for key, row in found.items()} == {(0, "source"): 3, (1, "prior"): 4}
    assert found[0, "source"]["width_validation"] == 1
    assert "width_validation" not in found[1, "prior"]


def shuffled(*excess: float) -> list[dict[str, Any]]:
    """Fits to as many permutations of the labels; a second width is a nat lower."""
    row = {"per": "weight", "labels": "shuffled", "start": "source", "elbo_se": 0.1, "null": -1000.0}
    return [
        row | {"seed": seed, "width": width, "elbo": -1000.0 + value - lower}
        for seed, value in enumerate(excess)
        for width, lower in ((6, 0.0), (28, 1.0))
    ]


def test_the_bound_on_shuffled_labels_is_held_to_the_share_of_ones(script):
    def found(*excess: float) -> str:
        return outcome(script, "shuffled", "judge_shuffled", shuffled(*excess), [])

    assert found(-3.0, -3.5, -2.5) == REPRODUCED
    assert found(3.0, 3.5, 2.5) == REFUTED
    assert found(-1.0, 1.0, 0.5) == found(-3.0) == found(3.0) == UNDECIDED
    assert outcome(script, "shuffled", "judge_shuffled", [], []) == NOT_RUN
    tensor = {"per": "tensor", "labels": "true", "width": 6, "seed": 0, "elbo": -900.0}
    bayes = [{"width": 6, "seed": 0, "elbo": -850.0}, {"width": 7, "seed": 0, "elbo": -1.0}]
    told = verdict(script, "shuffled", "judge_shuffled", [*shuffled(1.0), tensor], bayes).numbers
    assert "50 to 50 nats above" in told
    assert "+1.0 nats at width 6" in told


def test_a_start_is_the_better_one_where_its_bounds_are_larger(script):
    def found(gain: float) -> str:
        bayes = fits(elbo=-500.0 + gain + SEEDS)
        return outcome(script, "start", "judge_start", bayes, fits(elbo=np.full(12, -500.0)))

    assert found(1.05 * REACH) == REPRODUCED
    assert found(0.95 * REACH) == found(-0.95 * REACH) == UNDECIDED
    assert found(-1.05 * REACH) == REFUTED
    assert outcome(script, "start", "judge_start", fits(elbo=NOISE), []) == NOT_RUN


@pytest.mark.parametrize("name", ["two hidden layers", "convolution"])
def test_an_architecture_is_judged_over_splits(script, name):
    def rows(*gains: float) -> list[dict[str, Any]]:
        row = {"architecture": name, "converged": True, "accuracy_test": 0.9}
        return [
            row | {"split": split, "method": method, "log_score_test": score}
            for split, gain in enumerate(gains)
            for method, score in (("empirical Bayes per weight", gain - 0.5), ("no regularisation", -0.5))
        ]

    key = script.ARCHITECTURES[name]

    def found(*gains: float) -> str:
        return outcome(script, key, "judge_architecture", name, rows(*gains), 20, 80)

    assert found(0.2, 0.22, 0.18) == REPRODUCED
    assert found(-0.2, -0.22, -0.18) == REFUTED
    assert found(0.2, -0.1, 0.3) == found(0.2) == found(-0.2) == UNDECIDED
    assert found() == NOT_RUN
    stored = [{key: value for key, value in row.items() if key != "split"} for row in rows(0.2)]
    assert verdict(script, key, "judge_architecture", name, stored, 20, 80).estimate == pytest.approx(0.2)


def departures(change: Any, converged: bool = True, variant: str = "shared noise") -> list[dict[str, Any]]:
    """Fits as derived and with a departure at two widths and three seeds; `change` by seed in test AUC."""
    keys = ("log_score_test", "active_weights", "elbo_of_its_q")
    return [
        {"variant": name, "width": width, "seed": seed, "steps": 10, "converged": converged}
        | dict.fromkeys(keys, 1.0 + seed * factor)
        | {"auc_test": 0.7 + 0.01 * width + factor * float(change[seed])}
        for name, factor in (("as derived", 0.0), (variant, 1.0))
        for width in (2, 8)
        for seed in range(3)
    ]


@pytest.mark.parametrize("variant", ["squared cost", "shared noise", "trained inputs", "all three"])
def test_a_departure_is_compared_once_both_have_converged(script, variant):
    key = script.DEPARTURES[variant]

    def found(middle: float, spread: float = 0.001, converged: bool = True) -> Any:
        table = departures(middle + spread * np.arange(-1.0, 2.0), converged, variant)
        return verdict(script, key, "judge_departure", variant, table)

    assert found(0.0).verdict == REPRODUCED
    assert found(0.01 - 1.05 * REACH * 0.001).verdict == REPRODUCED
    assert (
        found(0.01 - 0.95 * REACH * 0.001).verdict == found(0.01 + 0.95 * REACH * 0.001).verdict == UNDECIDED
    )
    assert found(0.1).verdict == found(-0.1).verdict == REFUTED
    for middle in (0.0, 0.1):
        assert found(middle, converged=False).verdict == UNDECIDED
    assert "loss as derived have not converged" in found(0.1, converged=False).numbers
    # One fit that has not is enough, on either side.
    for at, who in ((0, "loss as derived"), (-1, "departure")):
        table = departures(np.full(3, 0.1), True, variant)
        table[at]["converged"] = False
        one = verdict(script, key, "judge_departure", variant, table)
        assert one.verdict == UNDECIDED
        assert f"the fits of the {who} have not converged" in one.numbers
    only = [row for row in departures(np.zeros(3)) if row["variant"] == "as derived"]
    assert outcome(script, key, "judge_departure", variant, only) == NOT_RUN


def test_a_fit_whose_loss_still_fell_is_hollow(script, tmp_path, monkeypatch):
    table = importlib.import_module("study").read_table(
        FOLDER / "results" / "empirical_bayes_alzheimers" / "departures.csv"
    )
    kept, panels = [], script.panels
    monkeypatch.setattr(script, "panels", lambda *given: kept.append(panels(*given)) or kept[-1])
    script.draw_departures(tmp_path / "departures.png", table)
    assert (tmp_path / "departures.png").read_bytes().startswith(b"\x89PNG")
    left, right = kept[0][1][0]
    marks = [line for line in right.lines if line.get_marker() in ("o", "s")]
    assert len(marks) == len(table)
    hollow = sum(line.get_markerfacecolor() == "white" for line in marks)
    assert hollow == sum(not row["converged"] for row in table)
    lost = sum(row["auc_test"] < script.COLLAPSED for row in table)
    assert any(text.get_text().startswith(f"{lost} of ") for text in left.texts)


def test_what_the_source_ran_is_judged_at_its_settings_alone(script):
    def found(area: float, steps: int = 50_000, rate: float = 0.01) -> Any:
        table = departures(area - 0.75 + 0.001 * np.arange(-1.0, 2.0), variant="all three")
        return verdict(script, "source-auc", "judge_source", table, steps, rate)

    assert found(0.91).verdict == REPRODUCED
    assert found(0.89 + 0.95 * REACH * 0.001).verdict == UNDECIDED
    assert found(0.8).verdict == REFUTED
    assert found(0.8, steps=49_999).verdict == found(0.91, rate=0.0101).verdict == NOT_RUN
    lost = found(0.5, steps=10_000, rate=0.05)
    assert lost.verdict == NOT_RUN
    assert "of 6 runs 6 predict without information" in lost.numbers
    assert outcome(script, "source-auc", "judge_source", [], 50_000, 0.01) == NOT_RUN


def test_printed_formulas_are_corrected(script, monkeypatch):
    assert outcome(script, "printed-cost", "judge_formulas") == CORRECTED
    assert outcome(script, "printed-noise", "judge_formulas") == CORRECTED
    assert "0.805 nats, the printed cost 1.295" in verdict(script, "printed-cost", "judge_formulas").numbers


@pytest.mark.parametrize("width", [0, 1])
def test_chains_are_a_reference_where_they_have_converged_at_the_test_rows(script, width):
    def found(*words: str, **there: float) -> Any:
        chains = [
            {"method": "NUTS, x", "width": width, "note": word, "gap_to_nuts": "0"} | there for word in words
        ]
        near = {"method": "SVI", "width": width, "gap_to_nuts": "0.4", "noise_floor": 0.1, "note": ""}
        return verdict(script, f"reference-{width}", "judge_reference", width, [*chains, near])

    good, bad = "converged: in function space", "not converged: R-hat of f is 1.790"
    assert found(bad, good, rhat_test=1.009, ess_test=401.0).verdict == REPRODUCED
    assert found(good, rhat_test=1.011, ess_test=401.0).verdict == REFUTED
    assert found(good, rhat_test=1.009, ess_test=399.0).verdict == REFUTED
    assert found(bad, "converged per mode only: x").verdict == REFUTED
    assert found(good).verdict == UNDECIDED
    assert "SVI 0.40 (noise floor 0.10)" in found(good).numbers
    assert outcome(script, f"reference-{width}", "judge_reference", width, []) == NOT_RUN


def test_the_stored_results_have_a_verdict_on_each_claim(script):
    found = {each.key: each.verdict for each in script.judge(stored(script))}
    assert list(found) == list(claims(script))
    # Departures on the way to their optimum, and not the source's settings.
    assert {found[key] for key in script.DEPARTURES.values()} == {UNDECIDED}
    assert found["source-auc"] == NOT_RUN


def stored(script) -> Any:
    return script.Study.read(FOLDER / "results" / "empirical_bayes_alzheimers", script.FULL)


# --- all of it --------------------------------------------------------------------------------------------


def test_the_plan_has_every_part_and_every_departure(script):
    tasks = script.plan(script.FULL)
    assert {name for name, _ in tasks} == set(script.PARTS)
    assert {given["variant"] for name, given in tasks if name == "variant"} == set(script.VARIANTS)
    assert len({(name, tuple(sorted(given.items()))) for name, given in tasks}) == len(tasks)
    fits = [given for name, given in tasks if name == "empirical Bayes" and len(given) == 2]
    assert len(fits) == len(script.FULL.widths) * script.FULL.seeds


def test_each_split_repeats_other_architectures(script):
    sizes = dataclasses.replace(script.FULL, splits=3, shuffles=2)
    tasks = script.plan(sizes)
    more = 2 * len(sizes.architectures) + len(sizes.shuffled_widths)
    assert len(tasks) == len(script.plan(script.FULL)) + more
    assert len({(name, tuple(sorted(given.items()))) for name, given in tasks}) == len(tasks)


def test_what_was_kept_is_not_computed_again(script, tmp_path, monkeypatch):
    made = []

    def part(sizes, width):
        made.append(width)
        return [("classic", {"width": width, "auc_test": 0.1 + 0.2})]

    monkeypatch.setitem(script.PARTS, "classic", part)
    for _ in range(2):
        found = script.perform(script.TINY, "classic", {"width": 3}, None, tmp_path)
        assert [tuple(each) for each in found] == [("classic", {"width": 3, "auc_test": 0.1 + 0.2})]
    assert made == [3]
    more = dataclasses.replace(script.TINY, splits=5)
    script.perform(more, "classic", {"width": 3}, None, tmp_path)
    assert made == [3]


def test_a_fit_is_scored_on_its_validation_part_or_with_its_leave_one_out_value(script, monkeypatch):
    seen = []
    site = np.ones((400, 2))

    def fitted(sizes, data, *_):
        seen.append(data)
        info = SimpleNamespace(
            figures=dict.fromkeys(
                ("elbo", "elbo_se", "likelihood_cost", "complexity_cost", "converged"), 1.0
            ),
            gradient_evaluations=1,
        )
        approximation = SimpleNamespace(draw=lambda count, rng: {"output.weight": site})
        return SimpleNamespace(info=info, approximation=approximation)

    monkeypatch.setattr(script, "empirical_bayes", fitted)
    monkeypatch.setattr(
        script,
        "posterior_scores",
        lambda posterior, data, draws: {"auc_test": float(len(data.y_test)), "log_score_test": -1.0},
    )
    found = SimpleNamespace(reason="", elpd=-3.0, share_above=0.25)
    monkeypatch.setattr(script, "leave_one_out", lambda posterior: found)
    sizes = script.TINY
    ((table, row),) = script.run_empirical_bayes(sizes, 3, 1, split=2)
    assert (table, row["split"], row["elpd_loo"], row["share_above_k"]) == ("empirical_bayes", 2, -3.0, 0.25)
    assert row["auc_test"] == 60.0
    ((table, row),) = script.run_empirical_bayes(sizes, 3, 1, split=2, held=True, start="prior")
    assert (table, row["split"], row["start"], row["seed"]) == ("validation", 2, "prior", 1)
    assert (row["auc_validation"], row["log_score_validation"]) == (20.0, -1.0)
    np.testing.assert_array_equal(np.sort(np.concatenate([seen[1].y, seen[1].y_test])), np.sort(seen[0].y))
    found.reason = "not finite"
    ((_, row),) = script.run_empirical_bayes(sizes, 3, 1)
    assert "elpd_loo" not in row
    ((_, row),) = script.run_empirical_bayes(sizes, 3, 1, labels="shuffled")
    assert not np.array_equal(seen[-1].y, script.rows(True).y)
    ((_, row),) = script.run_empirical_bayes(sizes, 3, 2, labels="shuffled")
    assert not np.array_equal(seen[-1].y, seen[-2].y)


def test_splits_are_other_rows_in_parts_of_the_same_size(script):
    first, second, third = (script.rows(True, split) for split in range(3))
    assert len(first.y) == len(second.y) == len(third.y) == 100
    assert not np.allclose(second.x, third.x)
    for data in (second, third):
        np.testing.assert_allclose(data.x.mean(0), 0.0, atol=1e-12)
        assert data.y.sum() + data.y_test.sum() == first.y.sum() + first.y_test.sum()
    one, two = script.images(60), script.images(60, 1)
    assert one.x.shape == two.x.shape == (60, 8, 8, 1)
    assert len(one.y_test) == script.held_images(60) == 60
    assert not np.array_equal(one.y, two.y)


def test_a_tiny_run_writes_tables_figures_and_verdicts(script, tmp_path, capsys):
    script.main(tiny=True, out=tmp_path)
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "results.json").read_text())
    assert [each["key"] for each in content["verdicts"]] == list(claims(script))
    for verdict in content["verdicts"]:
        assert verdict["verdict"] in OUTCOMES
        assert verdict["numbers"]
        assert verdict["claim"] in said
    assert len((tmp_path / "verdicts.txt").read_text().splitlines()) == len(content["verdicts"])
    with (tmp_path / "selection.csv").open() as file:
        chosen = list(csv.DictReader(file))
    assert [row["split"] for row in chosen] == ["0"]
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
    key = script.ARCHITECTURES[name]
    assert outcome(script, key, "judge_architecture", name, [bayes, plain], 60, 100) == UNDECIDED
