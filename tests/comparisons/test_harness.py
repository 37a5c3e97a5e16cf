"""The study of grids that are killed, timed and starved: how it judges, and all of it on sixteen cells."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")


@pytest.fixture
def study() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("harness")


@NEEDS_PROC
def test_sixteen_cells_killed_in_three_ways_end_in_the_undisturbed_table(study: Any, tmp_path: Path) -> None:
    found = study.main(tiny=True, out=tmp_path, kills=3)
    numbers = found.numbers["kills"]
    assert numbers["cells"] == 16
    assert not any(numbers["differing"].values())
    assert numbers["left_for_the_last"] > 0
    rows = found.tables["kills"]
    assert sorted(row["how"] for row in rows) == sorted(set(study.HOWS))
    assert [row["at_start"] for row in rows[1:]] == [row["finished"] for row in rows[:-1]]
    # Cells here are shorter than those that the claim about costs is of.
    assert {each.key: each.verdict for each in found.verdicts if each.key != "costs"} == dict.fromkeys(
        ("same-table", "whole-cells", "in-flight", "processes", "failing-cell", "greedy-cell", "ceiling"),
        REPRODUCED,
    )
    assert len(found.verdicts) == 8
    assert [row["engine"] for row in found.tables["costs"]] == ["sequential"]
    assert all(row["between_mean"] < 1.0 for row in found.tables["costs"])
    for name in ("kills.csv", "costs.csv", "harness.png", "verdicts.txt", "results.json"):
        assert (tmp_path / name).stat().st_size > 0


def test_kills_of_every_kind_are_spread_over_the_undisturbed_run(study: Any) -> None:
    sizes = replace(study.FULL, kills=400)
    found = study.moments(sizes, 5.0, 400.0)
    assert found == study.moments(sizes, 5.0, 400.0) != study.moments(replace(sizes, seed=1), 5.0, 400.0)
    counts = {how: sum(each == how for each, _ in found) for how in study.HOWS}
    assert counts == {study.KILLED: 200, study.ORPHANED: 100, study.INTERRUPTED: 100}
    # Evenly from 0 to twice (5 + 1) s: a mean of 6 with a standard error of 12 / sqrt(12 x 400).
    seconds = [moment for _, moment in found]
    assert abs(sum(seconds) / 400 - 6.0) < 5.0 * 12.0 / (12.0 * 400.0) ** 0.5
    assert 0.0 <= min(seconds) < 5.0 < max(seconds) <= 12.0


def test_what_is_at_work_at_a_kill_is_read_from_the_log(study: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "begun a 1 10.0\nbegun b 2 10.5\nended a 1 12.0\nbegun c 1 12.1\nended b 2 13.0\nbegun d 2 13.1\n"
        "ended d 2 15.0\nbegun e 2 15.5\nended c 1"
    )
    seen = study.events(log)
    assert [(each.what, each.key, each.pid) for each in seen[-2:]] == [("ended", "d", 2), ("begun", "e", 2)]
    # At 14.0 c and d are at work, a is on disk and b is not, since 13.0.
    assert study.at_work(seen, {"a": None}, 14.0) == {
        "computing": 2,
        "unwritten": 1,
        "unwritten_seconds": 1.0,
    }
    assert study.at_work(seen, {"a": None, "b": None}, 11.0) == {
        "computing": 2,
        "unwritten": 0,
        "unwritten_seconds": 0.0,
    }
    assert study.between(seen) == pytest.approx([0.1, 0.1, 0.5])
    # d alone is no process's first and has ended.
    assert study.idle_share(seen) == pytest.approx(0.7 / 1.9)
    assert study.events(tmp_path / "none") == []


def test_tables_differ_by_a_bit_but_not_by_their_costs(study: Any) -> None:
    one = pd.DataFrame(
        {"model": ["a", "b"], "rmse": [0.1, float("nan")], "seconds": [1.0, 2.0], "failure": ["", "x"]}
    )
    assert study.differences(one, one.copy()) == []
    assert study.differences(one, one.assign(seconds=[3.0, 4.0])) == []
    assert study.differences(one, one.assign(rmse=[math.nextafter(0.1, 1.0), float("nan")])) == ["rmse"]
    assert study.differences(one, one.assign(rmse=[0.1, 0.0], failure=["", "y"])) == ["rmse", "failure"]
    assert study.differences(one, one.iloc[:1]) == ["rows"]
    assert study.differences(one, one.drop(columns="rmse")) == ["rows"]


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "how": "SIGINT to all", "at_start": 3, "finished": 5, "computing": 2, "unwritten": 1, "unwritten_seconds": 0.01,
        "computed_again": 0, "changed": 0, "unreadable": 0, "processes_left": 0, "seconds_to_end": 0.3,
        "rows_in_table": 5,
    }  # fmt: skip
    return good | changes


def outcomes(study: Any, *keys: str, evidence: Callable[[Any], None]) -> dict[str, Any]:
    """Key -> verdict of the claims that `evidence` gives evidence on."""
    claims = study.read_claims("harness")
    referee = study.Referee({key: claims[key] for key in keys})
    evidence(referee)
    return {each.key: each for each in referee.verdicts()}


KILLS = ("same-table", "whole-cells", "in-flight", "processes", "failing-cell")


def test_verdicts_on_kills_fail_one_by_one(study: Any) -> None:
    sizes = replace(study.FULL, kills=2)
    same = {"cells": [], "table": [], "arrays": [], "notes": []}
    failures = {"failed": 20, "meant_to_fail": 20, "unplanned_failures": 0, "reasons": ["linear map"]}

    def failed(rows: list[dict[str, Any]], differing: Any = same, missing: int = 0, **more: int) -> list[str]:
        numbers = {"cells": 200, "differing": differing, "missing": missing, "last": more} | failures
        numbers |= {key: value for key, value in more.items() if key in failures}
        found = outcomes(study, *KILLS, evidence=lambda to: study.judge_kills(to, rows, numbers, sizes))
        return [key for key, each in found.items() if each.verdict != REPRODUCED]

    assert failed([row(), row(rows_in_table=None)]) == []
    assert failed([row()]) == ["same-table"]
    assert failed([row(), row()], {**same, "cells": ["rmse"]}) == ["same-table"]
    assert failed([row(), row()], missing=1) == ["same-table"]
    assert failed([row(), row(computed_again=1)]) == ["whole-cells"]
    assert failed([row(), row(changed=1)]) == ["whole-cells"]
    assert failed([row(), row(unreadable=1)]) == ["whole-cells"]
    assert failed([row(), row()], computed_again=1, changed=0) == ["whole-cells"]
    assert failed([row(), row(computing=3)]) == ["in-flight"]
    assert failed([row(), row(unwritten_seconds=2.0)]) == ["in-flight"]
    assert failed([row(), row(processes_left=1)]) == ["processes"]
    assert failed([row(), row(rows_in_table=4)]) == ["processes"]
    assert failed([row(), row()], unplanned_failures=1) == ["failing-cell"]


def test_costs_are_what_lies_between_cells_and_after_them(study: Any) -> None:
    seen = [
        study.Event(what, key, 7, when)
        for what, key, when in (
            ("begun", "a", 105.0), ("ended", "a", 110.0), ("begun", "b", 110.01), ("ended", "b", 112.01),
            ("begun", "c", 112.03), ("ended", "c", 114.03),
        )
    ]  # fmt: skip
    marks = {
        "called": 103.0,
        "returned": 114.05,
        "marks": [[104.0, 1.0], [110.0, 5.0], [112.0, 5.1], [114.04, 5.3]],
    }
    found = study.costs_of(seen, marks, 100.0, [5.0, 2.0, 2.0])
    assert found["import_seconds"] == pytest.approx(3.0)
    assert found["begin_seconds"] == pytest.approx(2.0)
    assert found["between_most"] == pytest.approx(0.02)
    assert found["cpu_per_cell"] == pytest.approx(0.15)
    # 30 ms between and 20 after, over 4 s.
    assert found["share"] == pytest.approx(0.05 / 4.0)
    local = {"engine": "local", "made_for_seconds": 2.0, **found}

    def judged(rows: list[dict[str, Any]], load: float = 0.5) -> Any:
        return outcomes(study, "costs", evidence=lambda to: study.judge_costs(to, rows, load, 2))["costs"]

    assert judged([local]).verdict == REPRODUCED
    assert judged([local, {**local, "share": 0.021}]).verdict == REFUTED
    assert judged([]).verdict == NOT_RUN
    # A machine with other work: as many processes as cores are its own.
    assert judged([local], 6.6).verdict == NOT_RUN
    assert "6.6 on 2 cores" in judged([local], 6.6).numbers
    slow = judged([{**local, "median_cell_seconds": 6.1}])
    assert slow.verdict == NOT_RUN
    assert "2 s that they were made for" in slow.numbers


def test_cells_are_made_as_long_as_they_are_to_take(study: Any) -> None:
    sizes = replace(study.FULL, cell_seconds=2.0, probe_steps=200)
    assert study.steps_for(sizes, 0.5) == 800
    assert study.steps_for(sizes, 0.6) == 667
    assert study.steps_for(sizes, 1e6) == 1


def test_verdicts_on_memory(study: Any) -> None:
    sizes = study.FULL
    numbers = {
        "peak_bytes": 2 * (sizes.ceiling + study.ALLOWANCE),
        "peak_worker_bytes": sizes.ceiling + 2**20,
        "peak_main_bytes": 2**27,
    }
    good, failures = {"cells": 4, "finished": 4, "differing": []}, {"a": "MemoryError: it needed more"}

    def verdicts(numbers: Any = numbers, failures: Any = failures, neighbours: Any = good) -> list[bool]:
        of = numbers | {"greedy": failures, "others": neighbours}
        keys = ("greedy-cell", "ceiling")
        found = outcomes(study, *keys, evidence=lambda to: study.judge_memory(to, of, sizes))
        return [found[key].verdict == REPRODUCED for key in keys]

    assert verdicts() == [True, True]
    assert verdicts(failures={"a": "RuntimeError: nobody stopped it"}) == [False, True]
    assert verdicts(failures={}) == [False, True]
    assert verdicts(neighbours={**good, "finished": 3}) == [False, True]
    assert verdicts(neighbours={**good, "differing": ["rmse"]}) == [False, True]
    assert verdicts(numbers={**numbers, "peak_bytes": 2**33}) == [True, False]
    # One process above its own share, while all together stay below theirs.
    assert verdicts(numbers={**numbers, "peak_worker_bytes": sizes.ceiling + 2**29}) == [True, False]
    assert verdicts(numbers={**numbers, "peak_main_bytes": 2**30}) == [True, False]


@NEEDS_PROC
def test_the_processes_of_a_session_are_seen_until_they_end(study: Any) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        until = time.monotonic() + 30.0
        while len(study.alive(child.pid)) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(study.alive(child.pid)) == 2
        assert os.getpid() not in study.alive(child.pid)
        assert 2**18 < (study.own_memory(child.pid) or 0) < 2**30
        assert study.stop(child, study.KILLED) < 30.0
        assert study.alive(child.pid) == []
        assert study.own_memory(child.pid) is None
    finally:
        child.kill()
        child.wait()


def test_sizes_travel_as_json_and_the_grid_is_of_200_cells(study: Any) -> None:
    sizes = study.FULL
    again = study.Sizes(**json.loads(json.dumps(asdict(sizes))))
    grid = study.killed_grid(again)
    assert len(grid.cells) == 200
    assert [cell.key for cell in grid.cells] == [cell.key for cell in study.killed_grid(sizes).cells]
    assert len(study.killed_grid(study.TINY).cells) == 16
    # Those that are starved are among those that are killed, but for the greedy ones.
    starved = study.starved_grid(sizes).cells
    keys = {cell.key for cell in grid.cells}
    assert {cell.key in keys for cell in starved if cell.model != "greedy"} == {True}
    assert sum(cell.model == "greedy" for cell in starved) == 4
