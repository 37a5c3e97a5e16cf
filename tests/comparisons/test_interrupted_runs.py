"""Runs that are killed at random moments, as in the study of them: two kills here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("interrupted_runs")


def test_what_a_kill_lost_is_known_only_of_a_process_that_had_told_of_its_beginning(study):
    assert study.lost(0, 610, 454) == 156
    assert study.lost(1228, 1444, 1444) == 0
    assert study.lost(878, 504, 1036) == ""


def test_the_verdict_asks_for_every_bit_and_every_kill(study, tmp_path):
    def found(equal: float, kills: int):
        run = study.Study(study.Sizes(kills=2), tmp_path)
        run.tables = {"kills": [{"lost": 156}, {}][:kills]}
        run.numbers = {"same_bits": equal == 1.0, "equal_arrays": equal, "transitions": 6600}
        return study.judge(run)[0]

    assert found(1.0, 2).verdict == "reproduced"
    assert "at most 156 transitions drawn again after a kill, from 1 kills that tell it: 1 came" in (
        found(1.0, 2).numbers
    )
    assert found(13 / 14, 2).verdict == "refuted"
    assert found(1.0, 1).verdict == "not run"


def test_a_run_that_is_killed_twice_ends_in_the_same_bits(study, tmp_path):
    found = study.main(tiny=True, out=tmp_path, kills=2)
    assert found.numbers["kills"] == 2
    assert found.numbers["same_bits"]
    kills = found.tables["kills"]
    assert [row["at_start"] for row in kills[1:]] == [row["kept"] for row in kills[:-1]]
    assert (tmp_path / "kills.csv").read_text().count("\n") == 3
