"""The study of propagated predictions: its verdicts from made-up cells, and its tiny run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("propagated_predictions")


def cells(study: Any, label: str, propagated: float) -> list[dict[str, Any]]:
    """Three splits with a gain of 1 over MAP, of which propagation keeps `propagated`."""
    rows = []
    for split in range(3):
        row = {"model": "a", "method": label, "split": split, "train_rows": 100, "test_rows": 50}
        row |= {"map": -2.0 - 0.01 * split, "propagated": -2.0 + propagated - 0.001 * split}
        row |= {study.REFERENCES[label]: -1.0, f"coverage_{study.REFERENCES[label]}": 0.9}
        row |= {"coverage_propagated": 0.9 + 0.005 * split, "plain_s_numpyro": 1.0, "plain_s_pyro": 1.0}
        rows.append(row | {"moments_s_numpyro": 1.5, "moments_s_pyro": 3.0})
    return rows


@pytest.mark.parametrize(("kept", "expected"), [(0.99, "reproduced"), (0.9, "refuted")])
def test_the_verdicts_follow_from_the_cells(study: Any, tmp_path: Path, kept: float, expected: str) -> None:
    found = study.Study(study.FULL, tmp_path)
    found.tables = {"models": [study.summary(cells(study, label, kept)) for label in study.REFERENCES]}
    verdicts = {verdict.key: verdict for verdict in study.judge(found)}
    assert verdicts["svi-gain"].verdict == verdicts["laplace-gain"].verdict == expected
    assert verdicts["svi-loss"].verdict == ("refuted" if kept < 0.99 else verdicts["svi-loss"].verdict)
    assert verdicts["svi-time"].verdict == verdicts["svi-coverage"].verdict == "reproduced"


@pytest.mark.slow
def test_the_tiny_study_runs(study: Any, tmp_path: Path) -> None:
    done = study.main(tiny=True, out=tmp_path)
    assert {row["model"] for row in done.tables["models"]} == {"linear_regression"}
    refused = {(row["model"], row["by"]) for row in done.tables["refused"]}
    assert refused == {("graph_convolution", "the prediction"), ("graph_convolution", "the fit")}
    # One layer: the moments are exact.
    assert all(abs(row["share"] - 1.0) < 0.1 for row in done.tables["models"] if row["has_gain"])
