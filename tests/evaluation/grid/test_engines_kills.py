"""Processes of a cluster, and its head, are killed at random moments: nothing that was finished is lost.

Every piece of work is computed, or named as lost; where the head is killed the run ends in an error that says so.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import BNNError
from ppl_bnn.evaluation.grid import clusters, engines
from ppl_bnn.evaluation.grid.engines import Engine, Lost
from ppl_bnn.evaluation.grid.grid import Grid
from tests.evaluation.grid.test_engines import dask, free_port, ray, ray_client, ray_head  # noqa: F401 - fixtures

# Of each cluster; of all three fifteen.
KILLS, PIECES = 5, 20
SECONDS = (1.0, 3.0)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def head(port: int) -> Iterator[tuple[str, int]]:
    """One for each test, which may kill it."""
    pytest.importorskip("ray")
    with ray_head(port) as found:
        yield found


def noted(number: int, folder: str) -> tuple[int, int]:
    """A piece that says which process computes it."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(0.4)
    return number, number * number


class _Killer:
    """Kills a process that computes pieces, at random moments: at each once it has begun to compute."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.killed, self.going = folder, 0, True
        self.random = random.Random(seed)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.going and self.killed < KILLS:
            time.sleep(self.random.uniform(*SECONDS))
            pids = sorted(int(file.name) for file in self.folder.iterdir())
            if pids:
                pid = self.random.choice(pids)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.killed += 1
                (self.folder / str(pid)).unlink(missing_ok=True)

    def end(self) -> None:
        self.going = False
        self.thread.join()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["dask", "ray", "ray_client"])
def test_kills_lose_nothing(place: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    engine = Engine.of(request.getfixturevalue(place))
    tasks: list[tuple[Any, ...]] = [(number, str(tmp_path)) for number in range(PIECES)]
    killer = _Killer(tmp_path, 7)
    found: dict[int, Any] = {}
    try:
        for number, result in engines.outcomes(engine, noted, tasks):
            assert number not in found
            found[number] = result
            print(time.monotonic(), number, result, killer.killed, flush=True)
    finally:
        killer.end()
    assert sorted(found) == list(range(PIECES))
    computed = {number: each for number, each in found.items() if not isinstance(each, Lost)}
    assert computed == {number: (number, number * number) for number in computed}
    print(killer.killed, len(computed))


# --- the head ---------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
# Seconds in which a run has to end once its head is killed; a Ray client tries for half a minute to get back.
ENDS = 200.0


def small_grid() -> Grid:
    return Grid(
        models=["linear_regression"],
        data=["diabetes"],
        methods={"map": bnn.MAP(ppl="pyro", steps=50)},
        splits="random:12@0.9",
        seeds=2,
        device="cpu",
    )


def run_grid(engine: str, folder: str) -> None:
    """In a process of its own, which has to live on: the grid on a cluster, then what is missing of it here."""
    told: dict[str, Any] = {"error": None}
    try:
        small_grid().run(folder, engine=engine)
    except BNNError as error:
        told = {"error": type(error).__name__, "text": str(error)}
    told["kept"] = len(list((Path(folder) / "cells").glob("[!.]*")))
    result = small_grid().run(folder, engine="sequential")
    told |= {"missing": result.missing, "failures": result.failures, "cells": len(result.cells)}
    print("told:", json.dumps(told), flush=True)


@pytest.fixture
def dask_scheduler(port: int) -> Iterator[str]:
    """A scheduler and a process that computes, as on a real cluster."""
    pytest.importorskip("distributed")
    address = f"127.0.0.1:{port}"
    folders = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": folders}
    silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1"]
    worker = [
        sys.executable,
        "-m",
        "distributed.cli.dask_worker",
        address,
        "--nworkers",
        "1",
        "--nthreads",
        "1",
    ]
    head = subprocess.Popen([*scheduler, "--port", str(port), "--no-dashboard"], **silent)
    computes = subprocess.Popen([*worker, "--no-dashboard", "--death-timeout", "10"], **silent)
    try:
        while clusters.not_reached(f"127.0.0.1:{port}") is not None:
            assert head.poll() is None
            time.sleep(0.1)
        yield f"dask://{address}"
    finally:
        for process in (head, computes):
            process.terminate()
            process.wait(timeout=60)


def kill_head(at: int) -> None:
    """Kill what serves at a port and all that it has begun, at once."""
    psutil: Any = importlib.import_module("psutil")
    heads = []
    for process in psutil.Process().children():
        words = process.cmdline()
        if words[1:2] == ["-m"] and "worker" not in words[2] and any(str(at) in word for word in words):
            heads.append(process)
    assert len(heads) == 1
    for process in [*heads[0].children(recursive=True), *heads]:
        with contextlib.suppress(psutil.Error):
            process.kill()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["dask_scheduler", "ray", "ray_client"])
def test_a_head_that_is_killed_ends_the_run_in_an_error_and_keeps_what_is_finished(
    place: str, port: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("psutil")
    engine = request.getfixturevalue(place)
    moment = random.Random(1)
    folder, said = tmp_path / "grid", tmp_path / "said"
    call = (
        "import sys; from tests.evaluation.grid.test_engines_kills import run_grid; run_grid(*sys.argv[1:])"
    )
    with said.open("w") as file:
        caller = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", call, engine, str(folder)],
            stdout=file,
            stderr=file,
            cwd=ROOT,
        )
    try:
        # The head ends during the call: a call that finds none is refused.
        wanted = moment.randint(1, 8)
        while len(finished := list((folder / "cells").glob("[!.]*"))) < wanted:
            assert caller.poll() is None, said.read_text()
            time.sleep(0.02)
        time.sleep(moment.uniform(0.0, 1.0))
        before = {path: path.read_bytes() for path in finished}
        kill_head(port)
        assert caller.wait(timeout=ENDS) == 0, said.read_text()
    finally:
        caller.kill()
    assert {path: path.read_bytes() for path in before} == before
    told = json.loads(said.read_text().rpartition("told: ")[2])
    assert (told["missing"], told["failures"], told["cells"]) == (0, 0, 24)
    if told["error"] is None:
        assert told["kept"] == 24
    else:
        assert told["error"] == "ClusterError"
        assert f"{engine} to go on" in told["text"]
        assert f"{told['kept']} of 24 cells are finished and kept in" in told["text"]
