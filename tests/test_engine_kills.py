"""Processes of a cluster are killed at random moments: every piece of work is computed, or named as lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ppl_bnn import engines
from ppl_bnn.engines import Engine, Lost
from tests.test_engines import dask, port, ray, ray_client  # noqa: F401 - fixtures

# Of each cluster; of Dask and of Ray thirty in all.
KILLS, PIECES = 10, 40
SECONDS = (1.0, 3.0)


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
