"""The study that grades the field: what its verdicts say of tables with a known answer, and its tiny run."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("grading_the_field")


def made_up(script: Any, out: Path, spread: dict[str, float], k_knows: bool = True) -> Any:
    """Twelve references, four methods: spreads by region for SVI, and a k-hat that knows of the error or not."""
    rng = np.random.default_rng(0)
    study = script.Study(script.FULL, out)
    fits, grades = study.tables.setdefault("fits", []), study.tables.setdefault("grades", [])
    for index in range(12):
        name = f"reference-{index}"
        for method, error in (("svi", 0.6), ("laplace", 0.1), ("ensemble", 0.2), ("nuts", 0.02)):
            k = error if k_knows else rng.uniform()
            fit = {
                "reference": name,
                "method": method,
                "k_hat": math.nan if method == "nuts" else k + 0.01 * rng.normal(),
            }
            fits.append(
                fit | ({"converged_at_training": 1.0, "converged_at_gap": 1.0} if method == "nuts" else {})
            )
            for region in script.REGIONS:
                ratio = spread.get(region, 1.0) if method == "svi" else 0.5 if method == "ensemble" else 1.0
                noise = np.exp(0.02 * rng.normal(size=2))
                figures = {"mean_error": error * noise[0], "sd_ratio": ratio * noise[1]}
                grades.append({"reference": name, "method": method, "region": region, **figures})
    return study


@pytest.mark.parametrize(
    ("spread", "expected"),
    [
        ({"train": 1.3, "gap": 0.8}, ["reproduced", "reproduced"]),
        ({"train": 0.9, "gap": 1.1}, ["refuted", "refuted"]),
        ({"train": 1.05, "gap": 1.0}, ["undecided", "undecided"]),
    ],
)
def test_the_verdicts_on_the_spread(
    script: Any, tmp_path: Path, spread: dict[str, float], expected: list[str]
) -> None:
    found = {each.key: each.verdict for each in script.judge(made_up(script, tmp_path, spread))}
    assert [found["amid-too-wide"], found["away-narrower"]] == expected
    assert found["laplace-mean"] == "reproduced"
    assert found["ensemble-far"] == "reproduced"
    assert found["training-rows"] == "undecided"


def test_a_diagnostic_that_knows_and_one_that_does_not(script: Any, tmp_path: Path) -> None:
    for knows, expected in ((True, "reproduced"), (False, "refuted")):
        study = made_up(script, tmp_path, {}, knows)
        found = {each.key: each for each in script.judge(study)}
        assert found["k-hat"].verdict in (expected, "undecided")
        assert (found["k-hat"].verdict == "reproduced") == knows
    assert script.curve_area(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 1, 0, 1])) == 0.75


def test_the_area_is_that_of_scikit_learn(script: Any, rng: np.random.Generator) -> None:
    from scipy.stats import rankdata
    from sklearn.metrics import roc_auc_score

    for rows in range(2, 80):
        score, miss = np.round(rng.normal(size=rows), rows % 3), np.arange(rows) % 2.0
        score[rng.uniform(size=rows) < 0.1] = math.inf
        miss = rng.permutation(miss)
        # scikit-learn takes no infinity.
        wanted = roc_auc_score(miss > 0, rankdata(score))
        assert script.curve_area(score, miss) == pytest.approx(wanted, rel=1e-14)
    for kind in (0.0, 1.0):
        assert math.isnan(script.curve_area(np.arange(3.0), np.full(3, kind)))


def test_the_league_is_of_geometric_means(script: Any, tmp_path: Path) -> None:
    study = made_up(script, tmp_path, {"train": 1.3})
    rows = {(row["method"], row["region"]): row for row in script.league(study)}
    assert rows["svi", "train"]["sd_ratio"] == pytest.approx(1.3, rel=0.02)
    assert rows["svi", "train"]["sd_ratio_low"] < 1.3 < rows["svi", "train"]["sd_ratio_high"]
    assert rows["laplace", "test"]["mean_error"] == pytest.approx(0.1, rel=0.02)
    assert rows["map", "test"]["references"] == 0


def test_methods_are_ranked_among_those_of_like_cost(script: Any, tmp_path: Path) -> None:
    study = made_up(script, tmp_path, {})
    cost = {"svi": 10_000.0, "laplace": 1000.0, "ensemble": 20_000.0, "nuts": math.nan}
    for fit in study.tables["fits"]:
        fit["gradients"] = cost[fit["method"]]
    # The median counts.
    study.tables["fits"][0]["gradients"] = 1e9
    rows = [row for row in script.matched(study, script.league(study)) if row["region"] == "gap"]
    assert [(row["cost"], row["rank"], row["method"]) for row in rows] == [
        ("not counted", 1, "nuts"),
        ("1e3 to 1e4", 1, "laplace"),
        ("1e4 to 1e5", 1, "ensemble"),
        ("1e4 to 1e5", 2, "svi"),
    ]


def test_other_stored_rows_are_taken_over(script: Any, tmp_path: Path) -> None:
    stored = made_up(script, tmp_path, {})
    stored.tables["fits"][-1]["commit"] = "of its own"
    stored.write()
    commit = json.loads((tmp_path / "results.json").read_text())["stamp"]["commit"]
    study = script.Study(script.FULL, tmp_path)
    left_out = {("reference-0", "svi"), ("reference-5", "svi"), ("reference-5", "nuts")}
    script.take_over(study, left_out)
    for table, rows in (("fits", 1), ("grades", 4)):
        found = [(row["reference"], row["method"]) for row in study.tables[table]]
        assert len(found) == (48 - 3) * rows
        assert not left_out & set(found)
    assert [row["commit"] for row in study.tables["fits"]] == 44 * [commit] + ["of its own"]
    with pytest.raises(bnn.errors.UnknownNameError, match="linear_regression-surface"):
        script.main(references=["linear_regression-surfac"], out=tmp_path)
    with pytest.raises(bnn.errors.InputError, match="a run of others in --out"):
        script.main(references=["linear_regression-surface"], out=tmp_path / "empty")


@pytest.mark.slow
def test_the_tiny_study_runs(script: Any, tmp_path: Path) -> None:
    done = script.main(tiny=True, out=tmp_path / "out", checkpoint=tmp_path / "kept")
    assert {row["method"] for row in done.tables["fits"]} == set(script.TINY.methods)
    assert sum(bool(row["failure"]) for row in done.tables["fits"]) == 1
    for name in ("cost.png", "league.png", "spread.png", "diagnostics.png", "grades.csv", "verdicts.txt"):
        assert (tmp_path / "out" / name).exists()
    assert len(list((tmp_path / "kept").glob("*.json"))) == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regression_mlp-curve", "classification_mlp-two_classes"])
def test_methods_from_outside_can_be_graded(script: Any, name: str) -> None:
    from ppl_bnn.core.errors import UnsupportedError

    if name not in bnn.references.entries():
        pytest.skip(f"{name} is not stored")
    reference = bnn.references.load(name)
    for method, compute in script.OUTSIDE.items():
        try:
            found = compute(reference, 0, True)
            gradients = found.pop("gradients")
            assert gradients > 0.0 or method == "Gaussian process"
            grade = reference.grade(**found)
        except UnsupportedError:
            assert (method, reference.link) == ("Gaussian process", "softmax")
            continue
        assert 0.0 < grade.figures["test"]["mean_error"] < 100.0, method
