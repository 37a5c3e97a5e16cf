"""Stored verdicts: each is what its rule makes of the stored tables."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "comparisons"
STUDIES = sorted(path.parent.name for path in (FOLDER / "results").glob("*/results.json"))
STUDIES = [name for name in STUDIES if (FOLDER / "claims" / f"{name}.toml").is_file()]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("verdicts")


@pytest.mark.parametrize("study", STUDIES)
def test_stored_verdicts_are_those_of_the_rule(script: Any, study: str) -> None:
    found, stored = script.judge_again(study), script.stored(study)
    assert [str(each) for each in found] == [str(each) for each in stored]
    for now, then in zip(found, stored, strict=True):
        # Rounding in a fit of a line differs between processors.
        for name, value in vars(then).items():
            wanted = pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
            assert getattr(now, name) == wanted, (then.claim, name)
    assert (FOLDER / "results" / study / "verdicts.txt").read_text() == "".join(f"{each}\n" for each in found)


@pytest.mark.parametrize("study", STUDIES)
def test_a_verdict_has_a_source_sizes_and_a_figure_that_exist(script: Any, study: str) -> None:
    for each in script.stored(study):
        assert each.source
        assert each.numbers or each.estimate is not None
        assert not each.figure or (FOLDER / "results" / each.figure).is_file(), each.figure
        assert each.estimate is None or each.n >= 1


@pytest.mark.parametrize("study", STUDIES)
def test_results_say_where_they_came_from(study: str) -> None:
    content = json.loads((FOLDER / "results" / study / "results.json").read_text())
    assert {"date", "cores", "versions", "commit", "seconds"} <= set(content["stamp"])
    assert content["sizes"]


def test_the_table_of_the_readme_is_that_of_the_stored_verdicts(script: Any) -> None:
    text = (FOLDER / "README.md").read_text()
    made = script.table({study: script.stored(study) for study in script.judged_studies()})
    assert script.with_table(text, made) == text


def test_a_stored_table_that_is_changed_is_noticed(script: Any, tmp_path: Path) -> None:
    """The log score of one architecture, a nat higher: other verdicts."""
    shutil.copytree(FOLDER / "results" / "evidence_selection", tmp_path / "evidence_selection")
    table = tmp_path / "evidence_selection" / "grid.csv"
    lines = table.read_text().splitlines()
    column = lines[0].split(",").index("log_score")
    cells = lines[4].split(",")
    cells[column] = str(float(cells[column]) + 1.0)
    table.write_text("\n".join([*lines[:4], ",".join(cells), *lines[5:]]) + "\n")
    assert script.judge_again("evidence_selection", tmp_path) != script.stored("evidence_selection")
