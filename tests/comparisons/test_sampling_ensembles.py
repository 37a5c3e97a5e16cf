"""The study of sampling ensembles: its scores against SciPy, its verdicts, and a tiny run of all of it."""

from __future__ import annotations

import csv
import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED
from ppl_bnn.datasets.tables import Table
from ppl_bnn.prediction.prediction import Prediction

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
TABLES = ("scores", "weights", "tuning", "published")
FIGURES = ("scores", "coverage", "members", "weights")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The study, over a table that is made up: the real one is downloaded."""
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module("sampling_ensembles")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 5))
    y = 120.0 + 5.0 * np.sin(x[:, 0]) + x[:, 1] + rng.normal(size=100)
    table = Table("airfoil", x, y, [f"x{index}" for index in range(5)], "y", "regression")
    monkeypatch.setattr(found.bnn.data, "load", lambda name: table)
    return found


def test_scores_are_those_of_scipy(script: Any) -> None:
    rng = np.random.default_rng(1)
    loc, scale = rng.normal(size=(7, 40)), rng.uniform(0.5, 2.0, size=(7, 40))
    y = rng.normal(size=40)
    found = script.scored(Prediction("Normal", {"loc": loc, "scale": scale}), y)
    mean = loc.mean(axis=0)
    variance = (scale**2).mean(axis=0) + loc.var(axis=0)
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)), rel=1e-12)
    assert found["nll"] == pytest.approx(-stats.norm(mean, np.sqrt(variance)).logpdf(y).mean(), rel=1e-12)
    density = np.log(stats.norm(loc, scale).pdf(y).mean(axis=0))
    assert found["log_score"] == pytest.approx(density.mean(), rel=1e-12)
    probability = stats.norm(loc, scale).cdf(y).mean(axis=0)
    for level in (0.5, 0.8, 0.9, 0.95):
        inside = np.mean(np.abs(probability - 0.5) <= level / 2)
        assert found[f"coverage_{level * 100:.0f}"] == pytest.approx(inside, abs=1e-12)


def test_a_split_is_standardised_on_its_training_rows(script: Any) -> None:
    first, second = script.split(0), script.split(1)
    assert len(first.y) == 80
    assert len(first.test_y) == 20
    np.testing.assert_allclose(first.x.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(first.x.std(axis=0), 1.0, rtol=1e-12)
    np.testing.assert_allclose([first.y.mean(), first.y.std()], [0.0, 1.0], atol=1e-12)
    assert abs(first.test_y.mean()) > 1e-6
    assert not np.array_equal(first.test_x, second.test_x)


def test_what_is_held_out_is_of_the_training_rows(script: Any) -> None:
    data = script.split(0)
    part, x, y = script.held_out(data, 0.2, 3)
    assert len(part.y) == 64
    assert len(y) == 16
    assert part.test_y is data.test_y
    together = np.concatenate([part.x, x])
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(data.x, axis=0))
    at = [int(np.flatnonzero((data.x == row).all(axis=1))[0]) for row in x]
    np.testing.assert_array_equal(data.y[at], y)


def table(script: Any, **changed: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A table of six splits, like two by turns, in which everything turns out as the source has it."""
    figures: dict[str, dict[str, list[float]]] = {
        script.SAMPLED: {
            "rmse": [0.12, 0.13],
            "nll": [-0.92, -0.9],
            "log_score": [0.95, 0.97],
            "rhat_median": [1.9, 2.0],
            "between_members": [0.5, 0.6],
            "seconds": [40.0, 42.0],
            "coverage_50": [0.60, 0.61],
            "coverage_80": [0.88, 0.87],
            "coverage_90": [0.95, 0.94],
            "coverage_95": [0.97, 0.97],
        },
        script.STACKED: {
            "rmse": [0.12, 0.13],
            "nll": [-0.93, -0.91],
            "log_score": [0.96, 0.985],
            "pareto_k": [1, 2],
        },
        script.HELD_EQUAL: {"rmse": [0.13, 0.14], "nll": [-0.85, -0.84], "log_score": [0.90, 0.91]},
        script.HELD_STACKED: {"rmse": [0.13, 0.14], "nll": [-0.84, -0.832], "log_score": [0.92, 0.932]},
        script.TUNED: {"rmse": [0.15, 0.16], "nll": [-0.6, -0.7], "log_score": [0.7, 0.71]},
        script.BDE: {
            "rmse": [0.12, 0.1301],
            "nll": [-0.92, -0.901],
            "log_score": [0.94, 0.961],
            "rhat_median": [1.9, 2.0],
            "seconds": [100.0, 104.0],
        },
    }
    for name, values in changed.items():
        figures[getattr(script, name)] |= values
    return [
        {"split": split, "method": name, **{key: value[split % 2] for key, value in values.items()}}
        for name, values in figures.items()
        for split in range(6)
    ]


def judged(
    script: Any, judge: str, rows: list[dict[str, Any]], *more: Any, tuning: Any = (), tried: int = 2
) -> dict[str, Any]:
    """Key -> verdict of the claims that one function judges, each alone."""
    claims = script.read_claims("sampling_ensembles")
    referee = script.Referee(claims)
    getattr(script, judge)(script.Case(referee, rows, tuning, tried, (300, 1200)), *more)
    found = referee.evidence
    for key in set(claims) - found:
        referee.not_run(key, "another test")
    return {each.key: each for each in referee.verdicts() if each.key in found}


@pytest.mark.parametrize(
    ("judge", "claim", "otherwise", "expected"),
    [
        ("judge_published", "published-rmse", {"SAMPLED": {"rmse": [0.13, 0.12]}}, REFUTED),
        ("judge_published", "published-nll", {"SAMPLED": {"nll": [-0.80, -0.95]}}, REFUTED),
        ("judge_mixing", "mixing", {"SAMPLED": {"rhat_median": [1.02, 1.05]}}, REFUTED),
        ("judge_mixing", "mixing", {"SAMPLED": {"rhat_median": [1.9, 0.95]}}, UNDECIDED),
        ("judge_tuned", "tuned", {"TUNED": {"log_score": [0.98, 0.99]}}, REFUTED),
        ("judge_tuned", "tuned", {"TUNED": {"log_score": [0.7, 1.2]}}, UNDECIDED),
        ("judge_stacking", "stacking", {"HELD_STACKED": {"log_score": [0.85, 0.865]}}, REFUTED),
        ("judge_stacking", "stacking", {"HELD_STACKED": {"log_score": [0.93, 0.9]}}, UNDECIDED),
        ("judge_stacking_loo", "stacking-loo", {"STACKED": {"log_score": [0.94, 0.98]}}, UNDECIDED),
        ("judge_order", "order", {"HELD_STACKED": {"nll": [-0.86, -0.85]}}, UNDECIDED),
        # In the mean alone: one of the two splits has it the other way round.
        ("judge_order", "order", {"HELD_STACKED": {"nll": [-0.86, -0.80]}}, UNDECIDED),
        ("judge_coverage", "coverage-50", {"SAMPLED": {"coverage_50": [0.4, 0.41]}}, REFUTED),
        ("judge_coverage", "coverage-50", {"SAMPLED": {"coverage_50": [0.45, 0.6]}}, UNDECIDED),
    ],
)
def test_each_verdict_can_come_out_either_way(
    script: Any, judge: str, claim: str, otherwise: Any, expected: str
) -> None:
    assert judged(script, judge, table(script))[claim].verdict == REPRODUCED
    assert judged(script, judge, table(script, **otherwise))[claim].verdict == expected


def test_a_tuned_deep_ensemble_is_held_to_the_published_one(script: Any) -> None:
    def found(rmse: float) -> str:
        rows = table(script, TUNED={"rmse": [rmse, 0.1], "nll": [0.18, -1.0]})
        return judged(script, "judge_deep_ensemble", rows)["deep-ensemble"].verdict

    assert found(0.37) == REPRODUCED
    assert [found(rmse) for rmse in (0.35, 0.345, 0.38, 0.385)] == [REPRODUCED, REFUTED, REPRODUCED, REFUTED]


def test_a_choice_at_the_edge_of_what_was_tried_is_named(script: Any) -> None:
    def tuning(best: float) -> list[dict[str, Any]]:
        return [
            {"split": 0, "sigma": sigma, "rate": 0.01, "held_out_log_score": -abs(sigma - best)}
            for sigma in (0.3, 1.0, 3.0)
        ]

    def said(judge: str, claim: str, best: float) -> str:
        return judged(script, judge, table(script), tuning=tuning(best))[claim].numbers

    inside, edge = (said("judge_tuned", "tuned", best) for best in (1.0, 0.3))
    assert inside.endswith("it chose sigma 1 on 1 of 1 splits, rate 0.01 on 1 of 1 splits")
    assert "at the edge of what was tried (sigma 0.3, 1, 3)" in edge
    assert "edge" in said("judge_deep_ensemble", "deep-ensemble", 0.3)


def test_splits_that_chose_the_settings_decide_nothing(script: Any) -> None:
    rows = table(script)
    for row in rows:
        if row["split"] < 2 and row["method"] == script.SAMPLED:
            row |= {"log_score": 9.0, "coverage_50": 0.9}
    found = judged(script, "judge_tuned", rows)["tuned"]
    assert (found.n, found.estimate) == (4, pytest.approx(0.255))
    assert judged(script, "judge_coverage", rows)["coverage-50"].estimate == pytest.approx(0.105)
    none = judged(script, "judge_tuned", [row for row in rows if row["split"] < 2])["tuned"]
    assert none.verdict == NOT_RUN


def test_methods_are_ordered_on_the_splits_that_they_share(script: Any) -> None:
    """A split of one method alone would make it the better one by the NLL and the worse one by the log score."""
    rows = table(script, SAMPLED={"nll": [-0.99, -0.98]})
    hard = [row | {"split": 9, "nll": 5.0, "log_score": 9.0} for row in rows[:1]]
    for found in (judged(script, "judge_order", each)["order"] for each in (rows, [*rows, *hard])):
        assert f"{script.SAMPLED} minus {script.BDE}" not in found.numbers


def test_the_package_of_the_source_is_met_or_not(script: Any) -> None:
    def found(rows: list[dict[str, Any]], first: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return judged(script, "judge_bde", rows, first or [], "1.0.2")

    def outcomes(**changed: Any) -> dict[str, str]:
        return {key: each.verdict for key, each in found(table(script, **changed)).items()}

    assert outcomes() == {"bde-first": NOT_RUN} | dict.fromkeys(
        ("bde", "bde-time", "bde-nll", "bde-rmse"), REPRODUCED
    )
    without = [row for row in table(script) if row["method"] != script.BDE]
    assert {each.verdict for each in found(without).values()} == {NOT_RUN}
    assert outcomes(SAMPLED={"seconds": [60.0, 60.0]})["bde-time"] == REFUTED
    assert outcomes(SAMPLED={"seconds": [math.nan, math.nan]})["bde-time"] == NOT_RUN
    for gap, expected in ((0.09, REPRODUCED), (0.11, REFUTED)):
        worse = {"log_score": [0.94 - gap, 0.96 - gap], "nll": [-0.92 + gap, -0.9 + gap]}
        assert [outcomes(SAMPLED=worse)[key] for key in ("bde", "bde-nll")] == [expected] * 2
    for ratio, expected in ((1.04, REPRODUCED), (1.06, REFUTED)):
        assert outcomes(SAMPLED={"rmse": [0.12 * ratio, 0.13 * ratio]})["bde-rmse"] == expected
    # Too wide an interval shows nothing, either way.
    wide = outcomes(SAMPLED={"nll": [-0.62, -1.18], "log_score": [0.64, 1.24], "rmse": [0.10, 0.16]})
    assert {wide[key] for key in ("bde", "bde-nll", "bde-rmse")} == {UNDECIDED}
    # Splits on which the package did not run count for neither.
    more = [*table(script), {**table(script, SAMPLED={"log_score": [0.0, 0.0]})[0], "split": 9, "nll": 9.0}]
    assert found(more)["bde"].numbers == found(table(script))["bde"].numbers
    assert found(table(script), table(script))["bde-first"].verdict == REPRODUCED


def test_nuts_is_a_reference_only_where_it_converged(script: Any) -> None:
    rows = [{"split": 0, "method": script.NUTS, "seconds": 90.0, "gradients": 1e5}]
    for verdict, expected in (("converged", REPRODUCED), ("converged per mode only", REFUTED)):
        found = {"verdict": verdict, "reasons": ["R-hat is 2"], "shape": [2, 100]}
        assert judged(script, "judge_nuts", rows, found)["reference"].verdict == expected
    nothing = {"verdict": "no draws", "reasons": ["budget: 1 s"], "shape": [0, 0]}
    assert judged(script, "judge_nuts", [], nothing)["reference"].verdict == REFUTED


def test_rhat_of_rows_is_that_of_members_apart(script: Any) -> None:
    rng = np.random.default_rng(0)
    f = rng.normal(size=(4, 200, 2))
    f[:, :, 1] += 3.0 * np.arange(4)[:, None]
    alike, apart = script.rhat_of_rows(f)
    assert alike < 1.02
    assert apart > 2.0


def test_a_tiny_run_writes_everything(script: Any, tmp_path: Path, optimised: None) -> None:
    # Warm-ups of a few steps tune chains that the rounding of other programs makes collapse.
    study = script.main(tiny=True, out=tmp_path, checkpoint=tmp_path / "kept")
    for name in TABLES:
        with (tmp_path / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name
    for name in FIGURES:
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    content = json.loads((tmp_path / "results.json").read_text())
    assert len(content["verdicts"]) == len(study.verdicts) == 16
    assert content["verdicts"][-1]["verdict"] == NOT_RUN
    methods = {row["method"] for row in study.tables["scores"]}
    assert methods == set(script.COLOURS) - {script.BDE}
    for row in study.tables["scores"]:
        assert math.isfinite(row["rmse"])
        assert math.isfinite(row["log_score"])
    weights = [row["weight"] for row in study.tables["weights"]]
    assert len(weights) == 2
    assert sum(weights) == pytest.approx(1.0)
    # Finished parts are read and not computed again: seconds differ otherwise.
    again = script.main(tiny=True, out=tmp_path / "again", checkpoint=tmp_path / "kept")
    assert json.dumps(again.tables) == json.dumps(study.tables)
