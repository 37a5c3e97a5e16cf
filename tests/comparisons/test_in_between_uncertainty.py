"""The study of in-between uncertainty: its splits, its differences against SciPy, its verdicts, and a tiny run."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("in_between_uncertainty")


# --- splits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [9, 10, 11])
def test_the_middle_third_is_tested_on(script: Any, rows: int) -> None:
    x = np.random.default_rng(rows).normal(size=(rows, 3))
    found, tied = script.gaps(x)
    assert found.test.shape == (3, 2 * rows // 3 - rows // 3)
    np.testing.assert_array_equal(tied, 0.0)
    for d in range(3):
        np.testing.assert_array_equal(np.sort(np.r_[found.train[d], found.test[d]]), np.arange(rows))
        low, high = x[found.test[d], d].min(), x[found.test[d], d].max()
        outside = x[found.train[d], d]
        assert np.count_nonzero(outside < low) == rows // 3
        assert np.count_nonzero(outside > high) == rows - 2 * rows // 3


def test_rows_of_equal_value_keep_their_order_and_are_counted(script: Any) -> None:
    x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0], [1.0, 3.0], [0.0, 4.0], [1.0, 5.0]])
    found, tied = script.gaps(x)
    np.testing.assert_array_equal(found.test, [[0, 2], [2, 3]])
    np.testing.assert_array_equal(tied, [1.0, 0.0])


@pytest.mark.skipif(not os.environ.get("PPL_BNN_DATA"), reason="needs the tables of PPL_BNN_DATA")
def test_some_splits_of_the_tables_have_a_gap_and_some_have_none(script: Any) -> None:
    for name, inputs in (("yacht", 6), ("energy", 8), ("concrete", 8)):
        found, tied = script.gaps(script.load(name).x)
        assert len(found.test) == len(tied) == inputs
        assert tied.max() > 0.5, name
    assert tied.min() <= script.MOST_TIED


def test_methods_that_differ_on_a_table_are_said_once_more(script: Any) -> None:
    found = script.settings(script.FULL)
    assert set(found) == {*script.methods(script.FULL), f"{script.NUTS}, on concrete"}
    assert "draws=1000" in found[f"{script.NUTS}, on concrete"]
    stored = json.loads((FOLDER / "results" / "in_between_uncertainty" / "results.json").read_text())
    assert set(stored["numbers"]["methods"]) == set(found)


# --- verdicts -----------------------------------------------------------------------------------------


def cells_of(script: Any, **changed: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Cells of six splits in which everything turns out as the source has it; the third has no gap."""
    figures: dict[str, dict[str, list[float]]] = {
        "MAP": {"log_score": 2 * [-2.0, -2.1, -1.9]},
        "MEAN_FIELD": {"log_score": 2 * [-3.0, -3.4, -2.9], "coverage_90": 2 * [0.5, 0.6, 0.55]},
        "THROUGH": {"log_score": 2 * [-4.0, -4.2, -4.1], "rmse": 2 * [3.0, 3.3, 2.9]},
        "LINEARISED": {"log_score": 2 * [-1.0, -1.1, -0.9], "rmse": 2 * [1.0, 1.2, 0.8]},
        "SAMPLED": {"log_score": 2 * [-0.9, -1.0, -0.9], "r_hat": 6 * [1.005]},
        "NUTS": {"log_score": 2 * [-0.9, -1.0, -0.9]},
    }
    for name, values in changed.items():
        figures[name] = figures[name] | values
    blank = dict.fromkeys(("log_score", "rmse", "coverage_90", "gap_sd_ratio", "r_hat"), "")
    return [
        {
            **blank,
            "data": "yacht",
            "train_rows": 200,
            "test_rows": 100,
            "split": f"published[{split}]",
            "tied": 1.0 if split == 2 else 0.0,
            "method": getattr(script, name),
            "failure": "",
            "converged": "yes",
            **{key: value[split] for key, value in values.items()},
        }
        for name, values in figures.items()
        for split in range(6)
    ]


def outcomes(script: Any, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Key -> verdict of the claims on yacht, each judged alone."""
    referee = script.Referee(yacht_claims(script))
    script.judge_table(referee, cells, "yacht")
    return {each.key.removeprefix("yacht-"): each for each in referee.verdicts()}


def yacht_claims(script: Any) -> dict[str, Any]:
    claims = script.read_claims("in_between_uncertainty")
    return {f"yacht-{name}": claims[f"yacht-{name}"] for name in script.QUANTITIES}


def test_claims_hold_on_splits_that_turn_out_as_the_source_has_it(script: Any) -> None:
    found = outcomes(script, cells_of(script))
    assert {name: each.verdict for name, each in found.items()} == {
        "over-confident": REPRODUCED,
        "under-fits": REPRODUCED,
        "linearised": REPRODUCED,
        "mcmc": REPRODUCED,
    }
    assert "above zero on 6 of 6 splits, +0." in found["over-confident"].numbers


@pytest.mark.parametrize(
    ("claim", "otherwise", "expected"),
    [
        ("over-confident", {"MEAN_FIELD": {"coverage_90": 3 * [0.99, 0.98]}}, REFUTED),
        ("over-confident", {"MEAN_FIELD": {"coverage_90": 3 * [0.5, 0.99]}}, UNDECIDED),
        ("under-fits", {"THROUGH": {"rmse": 6 * [0.5]}}, REFUTED),
        ("under-fits", {"THROUGH": {"rmse": 3 * [0.5, 2.0]}}, UNDECIDED),
        ("linearised", {"LINEARISED": {"log_score": 6 * [-6.0]}}, REFUTED),
        ("linearised", {"LINEARISED": {"log_score": 3 * [-6.0, -1.0]}}, UNDECIDED),
        ("mcmc", {"SAMPLED": {"log_score": 6 * [-6.0]}}, REFUTED),
        ("mcmc", {"SAMPLED": {"r_hat": [*5 * [1.0], 1.02]}}, UNDECIDED),
        ("mcmc", {"SAMPLED": {"r_hat": 6 * [""]}}, UNDECIDED),
    ],
)
def test_each_verdict_can_come_out_otherwise(script: Any, claim: str, otherwise: Any, expected: str) -> None:
    assert outcomes(script, cells_of(script, **otherwise))[claim].verdict == expected


def test_a_table_that_was_not_run_has_no_verdict(script: Any) -> None:
    assert {each.verdict for each in outcomes(script, []).values()} == {NOT_RUN}


def test_differences_are_paired_over_splits_that_both_have(script: Any) -> None:
    cells = cells_of(script)
    found = script.differences(cells, "rmse", script.THROUGH, script.LINEARISED, logarithm=True)
    np.testing.assert_allclose(found, 2 * list(np.log([3.0, 3.3 / 1.2, 2.9 / 0.8])), rtol=1e-12)
    next(each for each in cells if each["method"] == script.THROUGH)["failure"] = "it diverged"
    assert len(script.differences(cells, "rmse", script.THROUGH, script.LINEARISED)) == 5
    assert [each["split"] for each in script.with_gap(cells) if each["method"] == script.MAP] == [
        f"published[{split}]" for split in (0, 1, 3, 4, 5)
    ]


def curves_of(script: Any, in_gap: float, amid: float, verdict: str) -> dict[str, dict[str, Any]]:
    """Curves whose standard deviation is 1 for NUTS; of mean-field SVI `in_gap` between the rows and `amid` there."""
    x = np.linspace(-1.3, 1.3, 131)
    between = (x > script.LEFT[1]) & (x < script.RIGHT[0])
    found = {name: {"x": x, "sd": np.ones(131), "verdict": ""} for name in script.COLOURS}
    found[script.MEAN_FIELD]["sd"] = np.where(between, in_gap, amid)
    found[script.NUTS] |= {"verdict": verdict, "gap_rhat": 1.009, "gap_ess_bulk": 401.0}
    return found


@pytest.mark.parametrize(
    ("in_gap", "amid", "expected"),
    [
        (0.2, 0.9, (REPRODUCED, REPRODUCED)),
        (0.9, 0.2, (REFUTED, REFUTED)),
        (1.2, 1.5, (REFUTED, REPRODUCED)),
        (0.79, 0.79, (REPRODUCED, REFUTED)),
        (0.81, 0.81, (REFUTED, REPRODUCED)),
    ],
)
@pytest.mark.parametrize("verdict", ["converged", "converged per mode only"])
def test_the_curve_tells_the_gap_from_the_rows(
    script: Any, in_gap: float, amid: float, expected: tuple[str, str], verdict: str
) -> None:
    rows = script.curve_rows(curves_of(script, in_gap, amid, verdict))
    claims = script.read_claims("in_between_uncertainty")
    referee = script.Referee({key: claims[key] for key in ("curve-gap", "curve-rows")})
    script.judge_curve(referee, rows)
    found = referee.verdicts()
    if verdict == "converged":
        assert tuple(each.verdict for each in found) == expected
        np.testing.assert_allclose([each.estimate for each in found], [in_gap, amid])
    else:
        assert {each.verdict for each in found} == {UNDECIDED}
        assert "in_gap_to_nuts" not in rows[0]
        assert script.NO_REFERENCE in found[0].numbers


@pytest.mark.parametrize("figures", [{"gap_rhat": 1.011}, {"gap_ess_bulk": 399.0}, None])
def test_a_gap_in_which_chains_disagree_decides_nothing(script: Any, figures: Any) -> None:
    curves = curves_of(script, 0.2, 0.9, "converged")
    curves[script.NUTS] |= figures or {}
    rows = script.curve_rows(curves)
    if figures is None:
        rows = [{key: value for key, value in row.items() if not key.startswith("gap_")} for row in rows]
    claims = script.read_claims("in_between_uncertainty")
    referee = script.Referee({key: claims[key] for key in ("curve-gap", "curve-rows")})
    script.judge_curve(referee, rows)
    assert [each.verdict for each in referee.verdicts()] == [UNDECIDED, REPRODUCED]


def test_the_figure_of_splits_is_drawn_from_the_stored_table(script: Any, tmp_path: Path) -> None:
    stored = script.Study.read(FOLDER / "results" / "in_between_uncertainty", script.FULL)
    stored.out = tmp_path
    script.draw(stored)
    assert (tmp_path / "splits.png").stat().st_size > 5000


# --- all of it ----------------------------------------------------------------------------------------


def test_a_tiny_run_writes_everything_and_goes_on(script: Any, tmp_path: Path) -> None:
    study = script.main(tiny=True, out=tmp_path / "out", checkpoint=tmp_path / "kept")
    for name in ("scores", "cells", "curve"):
        with (tmp_path / "out" / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name
    for name in ("splits", "curves"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(content["verdicts"]) == 17
    assert content["numbers"]["diabetes"]["failures"] == []
    cells = study.tables["cells"]
    assert len(cells) == 2 * len(script.COLOURS)
    assert {each["input"] for each in cells} == {"age", "sex"}
    assert next(each["tied"] for each in cells if each["input"] == "sex") > 0.5
    for each in cells:
        assert math.isfinite(each["log_score"])
    # Finished cells are read and not computed again: seconds differ otherwise.
    again = script.main(tiny=True, out=tmp_path / "again", checkpoint=tmp_path / "kept")
    assert json.dumps(again.tables) == json.dumps(study.tables)
