"""Runs that are killed at random moments, as in the study of them: four kills here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "comparisons"


@pytest.fixture
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("interrupted_runs")


@pytest.mark.slow
def test_a_run_that_is_killed_four_times_ends_in_the_same_bits(study, tmp_path):
    found = study.main(tiny=True, out=tmp_path, kills=4)
    assert found.numbers["kills"] == 4
    assert found.numbers["same_bits"]
    kills = found.tables["kills"]
    assert [row["at_start"] for row in kills[1:]] == [row["kept"] for row in kills[:-1]]
    assert (tmp_path / "kills.csv").read_text().count("\n") == 5
