"""The study of UCI regression: its errors against SciPy, its verdicts, what is run where, and a tiny run."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED
from ppl_bnn.core.errors import InputError, UnknownNameError
from ppl_bnn.datasets.tables import Splits, Table
from ppl_bnn.evaluation.grid.result import GridResult, _frame

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
needs_tables = pytest.mark.skipif(
    not os.environ.get("PPL_BNN_DATA"), reason="needs the tables of PPL_BNN_DATA"
)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("uci_regression")


def cell(data: str, method: str, split: int, **more: Any) -> dict[str, Any]:
    """A cell as a grid has it."""
    row = {
        "model": "network",
        "data": data,
        "split": f"published[{split}]",
        "method": method,
        "seed": 0,
        "train_rows": 90.0,
        "test_rows": 10.0,
        "kind": "chains" if method == "NUTS" else "iid",
        "ppl": "numpyro",
        "converged": "yes",
        "failure": "",
        "key": f"{method}{split}",
        "process": "somewhere:1",
        "seconds": 3.0,
    }
    return row | more


def result_of(cells: list[dict[str, Any]], reference: str | None = None) -> GridResult:
    names = list(dict.fromkeys(each["method"] for each in cells))
    return GridResult(_frame(cells), {}, {"methods": names}, reference, len(cells))


# --- tables -------------------------------------------------------------------------------------------


def test_errors_over_splits_are_those_of_scipy(script: Any) -> None:
    rng = np.random.default_rng(0)
    scores, rmse = rng.normal(size=5), rng.uniform(1.0, 2.0, size=5)
    result = result_of(
        [cell("yacht", script.MAP, k, log_score=scores[k], rmse=rmse[k]) for k in range(5)]
        + [cell("yacht", script.SWAG, k, log_score=scores[k] - 1.0, rmse=rmse[k]) for k in range(5)]
    )
    rows = script.score_rows(result, script.cell_rows(result, False), "yacht", False)
    assert [row["method"] for row in rows] == [script.MAP, script.SWAG]
    first = rows[0]
    assert first["log_score"] == pytest.approx(scores.mean(), rel=1e-12)
    assert first["log_score_se"] == pytest.approx(stats.sem(scores), rel=1e-12)
    assert first["rmse_se"] == pytest.approx(stats.sem(rmse), rel=1e-12)
    wider = scores.std(ddof=1) * math.sqrt(1 / 5 + 10 / 90)
    assert first["log_score_se_corrected"] == pytest.approx(wider, rel=1e-12)
    assert rows[1]["log_score_to_best"] == pytest.approx(-1.0, rel=1e-12)
    assert first["reference"] == script.NO_REFERENCE
    assert first["converged"] == "yes: 5"


def test_what_tells_of_the_machine_is_left_out(script: Any) -> None:
    result = result_of([cell("yacht", script.MAP, k, log_score=1.0) for k in range(2)])
    alone, shared = (script.cell_rows(result, way) for way in (False, True))
    assert alone[0]["seconds"] == 3.0
    assert "process" not in alone[0]
    assert "seconds" not in shared[0]
    assert "seconds" not in script.score_rows(result, shared, "yacht", True)[0]


def test_gaps_are_those_of_splits_on_which_nuts_converged(script: Any) -> None:
    cells = [
        cell("yacht", script.NUTS, k, log_score=0.0, converged=word)
        for k, word in enumerate(("yes", "per mode", "yes"))
    ]
    cells += [
        cell("yacht", script.MEAN_FIELD, k, log_score=0.0, gap_mean=k + 1.0, gap_sd_ratio=0.5)
        for k in range(3)
    ]
    result = result_of(cells, script.NUTS)
    rows = script.cell_rows(result, False)
    assert [row["gap_mean"] for row in rows if row["method"] == script.MEAN_FIELD] == [1.0, "", 3.0]
    of_nuts, of_svi = script.score_rows(result, rows, "yacht", False)
    assert of_svi["gap_mean"] == pytest.approx(2.0)
    assert of_svi["reference"] == of_nuts["reference"] == "NUTS on 2 of 3 splits"
    assert of_nuts["converged"] == "yes: 2, per mode: 1"
    none = script.gap_of([row | {"converged": "no"} for row in rows], "yacht", script.MEAN_FIELD)
    assert none == {"reference": script.NO_REFERENCE}


def test_published_numbers_say_where_they_are_from(script: Any) -> None:
    rows = script.published_rows(tuple(script.WIDTHS))
    assert {row["status"] for row in rows} == {script.READ, script.RECALLED}
    assert sum(row["status"] == script.READ for row in rows) == 5
    assert script.published_rows(["diabetes"]) == []


# --- what is run where ----------------------------------------------------------------------------------


def table(rows: int, splits: Splits | None = None) -> Table:
    rng = np.random.default_rng(1)
    return Table(
        "made",
        rng.normal(size=(rows, 2)),
        rng.normal(size=rows),
        ["a", "b"],
        "y",
        "regression",
        splits=splits,
    )


def test_large_tables_have_fewer_methods_and_splits(script: Any) -> None:
    small = script.methods(script.STORED, 300)
    assert set(small) == set(script.ORDER)
    assert list(script.methods(script.STORED, 9000)) == list(script.CHEAP)
    everything = script.methods(script.FULL, 9000)
    assert list(everything) == [name for name in small if name != script.NUTS]
    assert everything[script.MEAN_FIELD].batch_size == script.FULL.batch
    assert small[script.MEAN_FIELD].batch_size is None
    five = Splits(np.zeros((5, 9), int), np.zeros((5, 1), int))
    assert script.splits_of(script.FULL, table(10, five)) == "published:5"
    assert script.splits_of(script.STORED, table(2001, five)) == f"published:{script.STORED.large_splits}"
    assert script.splits_of(script.TINY, table(10)) == "random:2@0.9"


def test_the_network_is_that_of_the_protocol(script: Any) -> None:
    import ppl_bnn as bnn

    sketch = bnn.zoo.sketch(script.network(50), 6)
    assert {site.name: site.shape for site in sketch.sites} == {
        "noise": (),
        "hidden0.weight": (6, 50),
        "hidden0.bias": (50,),
        "output.weight": (50, 1),
        "output.bias": (1,),
    }


@needs_tables
def test_all_tables_have_the_splits_of_the_protocol(script: Any) -> None:
    for name in script.WIDTHS:
        count = 5 if name == "protein" else 20
        assert script.splits_of(script.FULL, script.load(name)) == f"published:{count}"


def test_what_cannot_be_run_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two at least"):
        script.main(tiny=True, out=tmp_path, splits=1)
    with pytest.raises(UnknownNameError, match="yacht"):
        script.main(out=tmp_path, tables=["yacth"])


# --- verdicts -------------------------------------------------------------------------------------------


def judged(script: Any, key: str, evidence: Callable[[Any], None]) -> Any:
    """The verdict on one claim from what `evidence` tells a referee of all claims."""
    claims = script.read_claims("uci_regression")
    referee = script.Referee(claims)
    evidence(referee)
    for other in set(claims) - referee.evidence:
        referee.not_run(other, "another test")
    return next(each for each in referee.verdicts() if each.key == key)


def against_dropout(
    script: Any, in_log: float, in_rmse: float, spread: float = 0.001
) -> list[dict[str, Any]]:
    """Cells of yacht: a method that differs from the published MC dropout by so much on each split, and a worse one."""
    cells = []
    for row in script.published_dropout():
        if row["data"] != "yacht" or row["split"] >= 5:
            continue
        k, noise = row["split"], spread * (-1.0) ** row["split"]
        log_score, rmse = row["log_likelihood"] + in_log + noise, row["rmse"] * (1.0 - in_rmse - noise)
        cells.append(cell("yacht", script.ENSEMBLE, k, log_score=log_score, rmse=rmse))
        cells.append(cell("yacht", script.MEAN_FIELD, k, log_score=log_score - 1.0, rmse=2.0 * rmse))
    return cells


@pytest.mark.parametrize(
    ("in_log", "in_rmse", "expected"),
    [
        (0.2, 0.3, (REPRODUCED, REPRODUCED)),
        (-0.09, -0.09, (REPRODUCED, REPRODUCED)),
        (-0.11, -0.11, (REFUTED, REFUTED)),
        (-0.2, 0.3, (REFUTED, REPRODUCED)),
        (0.2, -0.3, (REPRODUCED, REFUTED)),
    ],
)
def test_mc_dropout_is_met_in_each_score_or_not(
    script: Any, in_log: float, in_rmse: float, expected: tuple[str, str]
) -> None:
    cells = against_dropout(script, in_log, in_rmse)
    found = [
        judged(script, f"yacht-dropout-{score}", lambda to: script.judge_dropout(to, cells, "yacht"))
        for score in ("log_score", "rmse")
    ]
    assert tuple(each.verdict for each in found) == expected
    assert found[0].estimate == pytest.approx(in_log, abs=0.001)
    assert found[1].estimate == pytest.approx(in_rmse, abs=0.001)
    assert all(script.ENSEMBLE in each.numbers for each in found)


def test_mc_dropout_cannot_be_told_from_wide_differences(script: Any) -> None:
    cells = against_dropout(script, 0.1, 0.1, spread=1.0)
    found = judged(script, "yacht-dropout-log_score", lambda to: script.judge_dropout(to, cells, "yacht"))
    assert found.verdict == UNDECIDED


def test_published_splits_have_the_published_means(script: Any) -> None:
    for data, (rmse, _, log_score, _) in script.READ_DROPOUT.items():
        rows = [row for row in script.published_dropout() if row["data"] == data]
        assert [row["split"] for row in rows] == list(range(5 if data == "protein" else 20))
        assert np.mean([row["rmse"] for row in rows]) == pytest.approx(rmse, abs=6e-4)
        assert np.mean([row["log_likelihood"] for row in rows]) == pytest.approx(log_score, abs=6e-4)


def test_a_split_does_not_choose_for_itself(script: Any) -> None:
    """A method that is best on one split by far, and the better one on the others."""
    scores = {"a": {0: 9.0, 1: 0.0, 2: 0.0}, "b": {0: 1.0, 1: 1.0, 2: 1.0}}
    assert [script.best_elsewhere(scores, split) for split in range(3)] == ["b", "a", "a"]


def test_a_table_that_was_not_run_has_no_verdict(script: Any) -> None:
    cells = against_dropout(script, 0.0, 0.0)
    assert judged(
        script, "protein-dropout-rmse", lambda to: script.judge_dropout(to, cells, "protein")
    ).verdict == (NOT_RUN)
    # A method that failed on a split is not among those to choose from.
    failed = [
        row for row in cells if not (row["method"] == script.ENSEMBLE and row["split"] == "published[1]")
    ]
    found = judged(script, "yacht-dropout-log_score", lambda to: script.judge_dropout(to, failed, "yacht"))
    assert script.ENSEMBLE not in found.numbers
    assert judged(
        script,
        "yacht-mean-field",
        lambda to: script.judge_recalled(to, [], script.MEAN_FIELD, script.PBP, "mean-field"),
    ).verdict == (NOT_RUN)


@pytest.mark.parametrize(("gap", "expected"), [(0.3, REPRODUCED), (-0.3, REFUTED), (-0.1, UNDECIDED)])
def test_recalled_scores_are_met_or_not_or_cannot_be_told(script: Any, gap: float, expected: str) -> None:
    cells = [
        cell(data, script.ENSEMBLE, k, log_score=wanted + gap + 0.01 * (-1.0) ** k, rmse=1.0)
        for data, wanted in script.RECALLED_LOG_SCORES[script.THEIR_ENSEMBLE].items()
        for k in range(6)
    ]
    found = judged(
        script,
        "yacht-ensemble",
        lambda to: script.judge_recalled(to, cells, script.ENSEMBLE, script.THEIR_ENSEMBLE, "ensemble"),
    )
    assert found.verdict == expected
    assert found.estimate == pytest.approx(gap)


def test_nuts_is_a_reference_only_where_it_converged(script: Any) -> None:
    def found(*words: str) -> Any:
        cells = [cell("yacht", script.NUTS, k, converged=word, r_hat=1.0) for k, word in enumerate(words)]
        return judged(script, "yacht-reference", lambda to: script.judge_reference(to, cells, "yacht"))

    assert found("yes", "yes").verdict == REPRODUCED
    assert found("yes", "no").verdict == REFUTED
    assert "1 of 2 splits; R-hat of f at most 1.000" in found("yes", "per mode").numbers
    assert found().verdict == NOT_RUN


def test_the_spread_of_mean_field_is_measured_and_not_decided(script: Any) -> None:
    """Convergence is known at training rows, and the claim is about test rows."""

    def found(ratios: list[float], word: str = "yes") -> Any:
        cells = [cell("concrete", script.MEAN_FIELD, k, gap_sd_ratio=ratio) for k, ratio in enumerate(ratios)]
        cells += [cell("concrete", script.NUTS, k, converged=word) for k in range(len(ratios))]
        return judged(script, "narrow", lambda to: script.judge_narrow(to, cells))

    narrow = found([0.5, 0.6, 0.55])
    assert narrow.estimate == pytest.approx(np.log([0.5, 0.6, 0.55]).mean())
    assert narrow.verdict == found([1.5, 1.6, 1.55]).verdict == UNDECIDED
    assert "training rows only" in narrow.numbers
    assert found([0.5, 0.6, 0.55], "per mode").estimate is None


# --- figures ------------------------------------------------------------------------------------------


def test_a_cross_is_on_chains_that_have_not_converged_and_on_nothing_else(script: Any) -> None:
    cells: list[dict[str, Any]] = [
        {"r_hat": 1.005, "ess_min": 500.0},
        {"r_hat": 1.02, "ess_min": 500.0},
        {"r_hat": 1.005, "ess_min": 399.0},
        {"r_hat": "", "ess_min": ""},
        {"converged": "no"},
    ]
    _, ((panel,),) = script.panels(3.0, 3.0)
    script.draw_strip(panel, 2.0, cells, [0.0, 1.0, 2.0, 3.0, 4.0], [False] * 5)
    crosses = [line for line in panel.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[1.0, 2.0]]
    points = [line for line in panel.lines if line.get_marker() == "o"]
    assert sorted(value for line in points for value in line.get_xdata()) == [0.0, 1.0, 2.0, 3.0, 4.0]
    (bar,) = [line for line in panel.lines if line.get_marker() == "None"]
    assert list(bar.get_xdata()) == [2.0, 2.0]


def test_the_figure_is_drawn_from_stored_tables(script: Any, tmp_path: Path) -> None:
    stored = script.Study.read(FOLDER / "results" / "uci_regression", script.STORED)
    stored.out = tmp_path
    script.draw(stored)
    assert (tmp_path / "scores.png").stat().st_size > 5000


# --- all of it ------------------------------------------------------------------------------------------


def test_a_tiny_run_writes_everything_and_goes_on(script: Any, tmp_path: Path) -> None:
    study = script.main(tiny=True, out=tmp_path / "out", checkpoint=tmp_path / "kept")
    for name in ("scores", "cells"):
        with (tmp_path / "out" / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name
    assert (tmp_path / "out" / "scores.png").stat().st_size > 5000
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["numbers"]["diabetes"]["failures"] == []
    # None of the tables of the claims is in it.
    assert {each["verdict"] for each in content["verdicts"]} == {NOT_RUN, UNDECIDED}
    rows = study.tables["scores"]
    assert [row["method"] for row in rows] == list(script.methods(script.TINY, 50))
    for row in rows:
        assert row["splits"] == 2
        assert math.isfinite(row["log_score"])
        assert math.isfinite(row["rmse_se"])
    # Finished cells are read and not computed again: seconds differ otherwise.
    again = script.main(tiny=True, out=tmp_path / "again", checkpoint=tmp_path / "kept")
    assert json.dumps(again.tables) == json.dumps(study.tables)
