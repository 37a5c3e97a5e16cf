"""The study of networks that the ELBO chooses: verdicts on made-up fits, parts that are kept, and a tiny run."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
STARTS = [("source", "source"), ("prior", "other")]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("empirical_bayes_selection")


def tables(
    start: str, picked: float = 0.0, splits: int = 20, validation: int | None = None, loo: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Five fits a split, with regrets of about 0, 0.01, ... 0.04; the largest ELBO is that of `picked`.

    validation, loo: the fit that has the best value by that rule.
    """
    found: dict[str, list[dict[str, Any]]] = {"fits": [], "validation": []}
    for split in range(splits):
        for index in range(5):
            loss = 0.01 * index + 0.0002 * index * (split - 0.5 * (splits - 1))
            where = {"split": split, "start": start, "width": index + 1, "seed": 0}
            row = where | {"elbo": -abs(0.01 * index - picked) - 1e-6 * index, "converged": index > 0}
            row |= {"auc_test": 0.9 - loss, "log_score_test": -loss}
            found["fits"].append(row if loo is None else row | {"elpd_loo": -abs(index - loo)})
            if validation is not None:
                found["validation"].append(where | {"log_score_validation": -abs(index - validation)})
    return found


def judged(script: Any, tmp_path: Path, made: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    study = script.Study(script.FULL, tmp_path, tables=made, numbers={"train_rows": 1719, "test_rows": 430})
    return {each.key: each for each in script.judge(study)}


@pytest.mark.parametrize(("start", "key"), STARTS)
@pytest.mark.parametrize("score", ["auc", "log_score"])
def test_the_elbo_is_held_to_the_best_fit_by_its_regret(
    script: Any, tmp_path: Path, start: str, key: str, score: str
) -> None:
    def found(picked: float, splits: int = 20) -> Any:
        return judged(script, tmp_path, tables(start, picked, splits))[f"selection-{score}-{key}"]

    # The median fit has a regret of 0.02, so that half of it is between the second and the third fit.
    assert found(0.0).verdict == REPRODUCED
    assert found(0.02).verdict == REFUTED
    assert found(0.03).estimate == pytest.approx(0.03 - 0.01)
    assert "80 of 100 fits had reached a plateau" in found(0.0).numbers
    assert found(0.0, splits=19).verdict == NOT_RUN
    other = "other" if key == "source" else "source"
    assert judged(script, tmp_path, tables(start))[f"selection-{score}-{other}"].verdict == NOT_RUN


def test_a_choice_that_differs_between_splits_is_undecided(script: Any, tmp_path: Path) -> None:
    good, bad = (tables("source", picked) for picked in (0.0, 0.03))
    made = [good["fits"][row] if row < 65 else bad["fits"][row] for row in range(100)]
    found = judged(script, tmp_path, {"fits": made, "validation": []})
    assert found["selection-log_score-source"].verdict == UNDECIDED


@pytest.mark.parametrize(("start", "key"), STARTS)
@pytest.mark.parametrize("rule", ["validation", "loo"])
def test_the_elbo_is_held_to_what_validation_and_leave_one_out_choose(
    script: Any, tmp_path: Path, start: str, key: str, rule: str
) -> None:
    def found(picked: float, best: int | None, splits: int = 20) -> str:
        made = tables(start, picked, splits, **{rule: best})
        return judged(script, tmp_path, made)[f"{rule}-{key}"].verdict

    assert found(0.0, 3) == REPRODUCED
    assert found(0.03, 0) == REFUTED
    # A hundredth of a nat is the margin.
    assert found(0.01, 0) == UNDECIDED
    assert found(0.0, 3, splits=19) == NOT_RUN
    assert found(0.0, None) == UNDECIDED


def test_a_tiny_run_keeps_each_split_and_goes_on(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    first = script.main(tiny=True, out=tmp_path / "first", checkpoint=tmp_path / "kept", splits=1)
    monkeypatch.setattr(script, "part", lambda sizes, split: first_but(script, first, split))
    second = script.main(tiny=True, out=tmp_path / "second", checkpoint=tmp_path / "kept", splits=2)
    assert [row for row in second.tables["fits"] if row["split"] == 0] == first.tables["fits"]
    assert [(row["split"], row["start"]) for row in second.tables["choices"]] == [
        *((split, start) for split in range(2) for start in script.STARTS)
    ]
    assert all(np.isfinite(row["log_score_validation"]) for row in second.tables["choices"])
    stored = json.loads((tmp_path / "second" / "results.json").read_text())
    assert {each["verdict"] for each in stored["verdicts"]} == {NOT_RUN}
    assert matplotlib.image.imread(tmp_path / "second" / "choices.png").std() > 0.0


def first_but(script: Any, study: Any, split: int) -> dict[str, Any]:
    """The parts of a run of one split, as those of another split."""
    assert split == 1
    return {name: [row | {"split": split} for row in study.tables[name]] for name in ("fits", "validation")}


def test_fits_are_those_of_the_other_study(script: Any) -> None:
    sizes = script.FULL.of_fits
    assert sizes == script.one_split.FULL
    assert dataclasses.replace(script.FULL, steps=3).of_fits.steps == 3
