"""The study of distillation: what is made of its rows, and a tiny run."""

from __future__ import annotations

import importlib
import json
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
        yield importlib.import_module("distillation")


def rows(
    models: int = 8, kept: float = 1.0, covered: float = 0.0, ratio: float = 1.5
) -> list[dict[str, Any]]:
    """Teachers that are 0.1 above their mode on each of three splits; students that keep a share of it."""
    found = []
    for model in range(models):
        for split in range(3):
            small = 1e-4 * (model - split)
            row = {"model": f"m{model}", "split": split, "teacher": "nuts", "mode_log_score": -1.0 + small}
            row |= {"teacher_log_score": -0.9 + small, "student_log_score": -1.0 + 0.1 * kept + 1.5 * small}
            row |= {"teacher_coverage": 0.9, "student_coverage": 0.9 + covered + 0.01 * small}
            found.append(row | {"divergence": 0.001, "time_ratio": ratio + small})
    return found


def outcomes(script: Any, found: list[dict[str, Any]]) -> dict[str, str]:
    study = script.Study(script.FULL, Path("."), {"scores": found})
    return {each.key: each.verdict for each in script.judge(study)}


def test_each_claim_is_decided_on_both_sides_of_its_bound(script: Any) -> None:
    assert set(outcomes(script, rows()).values()) == {REPRODUCED}
    # 0.95 of the gain, less 0.002 of a gain of 0.1: the bound is at a share of 0.93.
    for share, expected in ((0.935, REPRODUCED), (0.92, REFUTED)):
        found = outcomes(script, rows(kept=share))
        assert [found["kept"], found["kept-everywhere"]] == [expected] * 2
    for covered, expected in ((0.009, REPRODUCED), (-0.009, REPRODUCED), (0.011, REFUTED), (-0.011, REFUTED)):
        found = outcomes(script, rows(covered=covered))
        assert [found["coverage"], found["coverage-everywhere"]] == [expected] * 2
    assert outcomes(script, rows(ratio=1.99))["cost"] == REPRODUCED
    assert outcomes(script, rows(ratio=2.01))["cost"] == REFUTED


def test_one_model_is_named_and_does_not_decide_the_mean(script: Any) -> None:
    found = rows()
    for row in found[:3]:
        row["student_log_score"] = row["mode_log_score"]
    study = script.Study(script.FULL, Path("."), {"scores": found})
    each = {verdict.key: verdict for verdict in script.judge(study)}
    assert each["kept-everywhere"].verdict == REFUTED
    assert "of 8 models: m0" in each["kept-everywhere"].numbers
    assert each["kept"].verdict == UNDECIDED
    assert set(outcomes(script, []).values()) == {NOT_RUN}


def test_a_tiny_run_writes_everything(script: Any, tmp_path: Path) -> None:
    study = script.main(tiny=True, out=tmp_path, checkpoint=tmp_path / "kept")
    assert [row["model"] for row in study.tables["refused"]] == ["graph_convolution"]
    assert "rows that interact" in study.tables["refused"][0]["words"]
    assert {row["model"] for row in study.tables["models"]} == {"linear_regression", "logistic_regression"}
    assert len(study.tables["scores"]) == 2
    for row in study.tables["scores"]:
        assert np.isfinite([row["student_log_score"], row["divergence"], row["time_ratio"]]).all()
    for name in ("scores", "models", "refused"):
        assert (tmp_path / f"{name}.csv").is_file()
    assert (tmp_path / "gains.png").stat().st_size > 5000
    assert len(json.loads((tmp_path / "results.json").read_text())["verdicts"]) == 5
    again = script.main(tiny=True, out=tmp_path / "again", checkpoint=tmp_path / "kept")
    assert json.dumps(again.tables["scores"]) == json.dumps(study.tables["scores"])
