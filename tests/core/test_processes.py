"""Processes of our own: how they begin and end, and that one which is replaced takes nothing with it."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import closing
from typing import Any

import pytest

from ppl_bnn.core import processes


def leaking(_: Any) -> int:
    """Which process this is, whose memory counts as grown by too much whenever it is looked at from now on."""
    from joblib.externals.loky import process_executor

    for name in ("_MEMORY_LEAK_CHECK_DELAY", "_MAX_MEMORY_LEAK_SIZE"):
        assert hasattr(process_executor, name)
        setattr(process_executor, name, float("-inf"))
    return os.getpid()


def surroundings(_: Any) -> tuple[int, Any, list[str | None]]:
    threads = [os.environ.get(name) for name in processes.THREADS]
    return os.getpid(), signal.getsignal(signal.SIGINT), threads


@pytest.mark.timeout(120)
def test_processes_that_are_replaced_hold_nobody_up_where_warnings_are_errors() -> None:
    pytest.importorskip("psutil")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dict(processes.unordered(leaking, [(number,) for number in range(3)], workers=1))
    assert sorted(found) == [0, 1, 2]
    # A process leaves after its second task.
    assert len(set(found.values())) == 2


def test_processes_share_the_cores_leave_interrupts_to_this_one_and_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in processes.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(processes.THREADS[0], "7")
    monkeypatch.setattr("joblib.cpu_count", lambda: 6)
    before, called = list(warnings.filters), []
    found = list(
        processes.unordered(surroundings, [(at,) for at in range(9)], 2, meanwhile=lambda: called.append(1))
    )
    assert warnings.filters == before
    assert called
    assert sorted(number for number, _ in found) == list(range(9))
    for _, (process, handler, threads) in found:
        assert handler == signal.SIG_IGN
        assert threads == ["7", "3", "3", "3"]
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.timeout(120)
def test_what_is_left_before_its_end_kills_what_is_at_work() -> None:
    # More than are handed out at once.
    with closing(processes.unordered(time.sleep, [(0.0,), *[(1000.0,)] * 8], workers=1)) as found:
        assert next(found) == (0, None)


@pytest.mark.timeout(120)
def test_what_a_call_raises_is_raised_here_and_ends_the_others() -> None:
    calls = [("no number",), *[(1000.0,)] * 8]
    with pytest.raises(TypeError, match="str"):
        list(processes.unordered(time.sleep, calls, workers=1))
