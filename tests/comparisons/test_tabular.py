"""The study of small tables: which pairs are judged, and a tiny run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED, read_claims

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("tabular")


def stored(script: Any, tmp_path: Path, scores: dict[str, Any], cost: dict[str, float], table: str) -> Any:
    """A study with these log scores by method on four splits of a table."""
    cells = [
        {
            "data": table,
            "method": name,
            "split": f"random:4@0.9[{k}]",
            "log_score": float(value),
            "coverage_90": 0.9 + 0.01 * (-1) ** k,
            "train_rows": 90,
            "test_rows": 10,
        }
        for name, values in scores.items()
        for k, value in enumerate(np.broadcast_to(values, 4))
    ]
    costs = [{"data": table, "method": name, "seconds": cost.get(name, 1.0)} for name in scores]
    study = script.Study(script.FULL, tmp_path)
    study.tables = {"cells": cells, "costs": costs}
    return study


def verdicts(script: Any, study: Any) -> dict[str, Any]:
    return {each.key: each for each in script.judge(study)}


# Ours and theirs, with a difference of about 0.2 in the first pair.
SCORES = {
    "Laplace, Kronecker": [-1.0, -1.1, -1.2, -1.05],
    "deep ensemble": [-0.8, -0.9, -1.01, -0.85],
    "Gaussian process": [-1.0, -1.1, -1.21, -1.04],
    "ensemble of MLPs": [-1.3, -1.4, -1.52, -1.33],
}


def test_the_best_are_chosen_on_the_other_splits_and_compared(script: Any, tmp_path: Path) -> None:
    found = verdicts(script, stored(script, tmp_path, SCORES, {}, "yacht"))
    best = found["best-yacht"]
    wanted = np.subtract(SCORES["deep ensemble"], SCORES["Gaussian process"]).mean()
    assert best.estimate == pytest.approx(wanted)
    assert best.verdict == REPRODUCED
    assert "ours: deep ensemble (4); theirs: Gaussian process (4)" in best.numbers
    assert found["ensemble-yacht"].estimate == pytest.approx(0.4975)
    assert found["laplace-yacht"].estimate == pytest.approx(0.0, abs=1e-9)
    assert found["intervals-yacht"].estimate == pytest.approx(0.0, abs=1e-9)
    assert found["intervals-yacht"].verdict == REPRODUCED
    assert found["best-energy"].verdict == NOT_RUN
    assert (found["wins"].verdict, found["wins"].estimate, found["wins"].n) == (UNDECIDED, 1.0, 1)
    # A method that wins on one split does not choose itself there.
    lucky = SCORES | {"Laplace, Kronecker": [5.0, -2.0, -2.0, -2.0]}
    best = verdicts(script, stored(script, tmp_path, lucky, {}, "yacht"))["best-yacht"]
    assert "deep ensemble (1), Laplace, Kronecker (3)" in best.numbers or best.estimate < wanted


def test_a_worse_method_is_refuted(script: Any, tmp_path: Path) -> None:
    worse = SCORES | {"deep ensemble": [-1.9, -2.0, -2.11, -1.95]}
    found = verdicts(script, stored(script, tmp_path, worse, {}, "yacht"))
    assert found["ensemble-yacht"].verdict == REFUTED
    assert found["best-yacht"].verdict in (REPRODUCED, UNDECIDED)


@pytest.mark.parametrize(("seconds", "matched"), [(5.0, True), (5.1, False), (29.9, True), (30.1, False)])
def test_pairs_are_matched_by_cost(script: Any, tmp_path: Path, seconds: float, matched: bool) -> None:
    theirs = 1.0 if seconds < 10.0 else 10.0
    cost = {"Laplace, Kronecker": seconds, "Gaussian process": theirs}
    found = verdicts(script, stored(script, tmp_path, SCORES, cost, "yacht"))["laplace-yacht"]
    assert (found.estimate is not None) == matched
    assert ("not matched: ours costs" in found.numbers) == (not matched)


def test_what_is_missing_decides_nothing(script: Any, tmp_path: Path) -> None:
    study = stored(script, tmp_path, SCORES, {}, "yacht")
    del study.tables["costs"]
    found = verdicts(script, study)
    assert {found[f"{key}-yacht"].verdict for key in ("best", "ensemble", "laplace", "intervals")} == {
        UNDECIDED
    }
    assert "costs were not measured" in found["best-yacht"].numbers
    certain = SCORES | {"Gaussian process": [-1.0, -np.inf, -np.inf, -1.0]}
    found = verdicts(script, stored(script, tmp_path, certain, {}, "yacht"))
    assert "gave no probability to an outcome that occurred" in found["laplace-yacht"].numbers
    # The best from outside is another one then.
    assert "theirs: ensemble of MLPs" in found["best-yacht"].numbers


def test_every_table_has_its_claims(script: Any) -> None:
    claims = read_claims("tabular")
    for table in script.TABLES:
        assert {f"{key}-{table}" for key in ("best", *script.PAIRS)} <= set(claims)
    assert sum(key.startswith("intervals") for key in claims) == 6
    assert all(claim.declared == "before" for claim in claims.values())


def test_a_tiny_run_and_its_checkpoint(script: Any, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    first = script.main(tiny=True, out=tmp_path / "first", checkpoint=folder, shared=True)
    assert "costs" not in first.tables
    assert not any(cell["failure"] for cell in first.tables["cells"])
    assert {cell["method"] for cell in first.tables["cells"]} == {*script.OURS, *script.THEIRS}
    assert (tmp_path / "first" / "differences.png").stat().st_size > 5_000
    second = script.main(tiny=True, out=tmp_path / "second", checkpoint=folder)
    scores = [[cell["log_score"] for cell in each.tables["cells"]] for each in (first, second)]
    assert scores[0] == scores[1]
    costs = {row["method"]: row["seconds"] for row in second.tables["costs"]}
    assert set(costs) == {*script.OURS, *script.THEIRS}
    assert min(costs.values()) > 0.0
    again = script.judge(script.Study.read(tmp_path / "second", script.FULL))
    assert list(map(str, again)) == list(map(str, second.verdicts))
