"""What becomes of work on a cluster whose processes, connections or head end: with a cluster that dies on request."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import ClusterError, InputError
from ppl_bnn.evaluation.grid import clusters, engines, ray_driver
from ppl_bnn.evaluation.grid.clusters import TRIES, Lost
from ppl_bnn.evaluation.grid.grid import Grid


class WorkerCrashedError(Exception):
    """As Ray's is called."""


class KilledWorker(Exception):
    pass


@dataclass(eq=False)
class _Handle:
    function: Callable[..., Any]
    task: tuple[Any, ...]
    number: int
    count: int


class _Cluster:
    """Two processes. `dies(number, try)` raises what becomes of a piece that is begun for the n-th time."""

    def __init__(self, dies: Callable[[int, int], None], begun: dict[int, int], size: int = 2):
        self.dies, self.begun, self.size = dies, begun, size
        self.forgotten: list[Any] = []

    def room(self) -> int:
        return self.size

    def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        number = task[0]
        self.begun[number] = self.begun.get(number, 0) + 1
        return _Handle(function, task, number, self.begun[number])

    def finished(self, handles: list[Any]) -> list[Any]:
        assert len(handles) <= max(self.size, 1)
        return handles[:1]

    def result(self, handle: Any) -> Any:
        self.dies(handle.number, handle.count)
        return clusters.called(handle.function, handle.task)

    def forget(self, handles: list[Any]) -> None:
        self.forgotten += handles

    def answers(self) -> bool:
        return True


def square(number: int) -> int:
    if number == 99:
        raise ConnectionError("of the piece itself")
    return number * number


def computed(
    dies: Callable[[int, int], None], numbers: list[int], size: int = 2
) -> tuple[dict[int, Any], list[int]]:
    """What got of the pieces, and of which a connection was made."""
    begun: dict[int, int] = {}
    connections: list[int] = []

    @contextlib.contextmanager
    def connect() -> Iterator[Any]:
        connections.append(len(begun))
        yield _Cluster(dies, begun, size)

    tasks = {number: (number,) for number in numbers}
    return dict(clusters.computed(connect, "dask://h:1", square, tasks, None)), connections


def never(number: int, count: int) -> None:
    pass


def test_a_piece_whose_process_ends_is_tried_again_and_then_lost() -> None:
    def dies(number: int, count: int) -> None:
        if (number == 1 and count < TRIES) or number == 2:
            raise clusters.ProcessEnded("WorkerCrashedError: SIGKILL. More")

    found, connections = computed(dies, [0, 1, 2, 3])
    assert isinstance(lost := found.pop(2), Lost)
    assert lost.reason.startswith("its process ended under it (WorkerCrashedError: SIGKILL)")
    assert found == {0: 0, 1: 1, 3: 9}
    assert len(connections) == 1


def test_what_dask_has_given_up_is_lost_at_once() -> None:
    def dies(number: int, count: int) -> None:
        assert number != 2 or count == 1
        if number == 2:
            raise KilledWorker("4 workers died")

    found, _ = computed(dies, [1, 2])
    assert found[1] == 1
    assert isinstance(found[2], Lost)


@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, OSError])
def test_a_connection_that_ends_is_made_anew_and_nothing_finished_is_computed_twice(
    error: type[Exception],
) -> None:
    seen: list[int] = []

    def dies(number: int, count: int) -> None:
        if number in (1, 3) and count == 1:
            raise error("cut")
        seen.append(number)

    found, connections = computed(dies, list(range(6)))
    assert found == {number: number**2 for number in range(6)}
    assert sorted(seen) == list(range(6))
    assert len(connections) == 3


def test_a_cluster_that_goes_on_ending_is_named() -> None:
    def dies(number: int, count: int) -> None:
        if number == 1:
            raise ConnectionError("cut")

    with pytest.raises(ClusterError, match=r"dask://h:1 to go on; got the end of it .*cut"):
        computed(dies, [0, 1, 2])


def test_a_head_that_is_gone_is_named_after_the_first_connection_only() -> None:
    calls: list[int] = []

    @contextlib.contextmanager
    def connect() -> Iterator[Any]:
        calls.append(1)
        if len(calls) > 1:
            raise InputError("engine: nobody answers")
        yield _Cluster(lambda number, count: (_ for _ in ()).throw(ConnectionError("cut")), {})

    with pytest.raises(ClusterError, match="nobody answers"):
        dict(clusters.computed(connect, "ray://auto", square, {0: (0,)}, None))
    calls.append(1)
    with pytest.raises(InputError, match="nobody answers"):
        dict(clusters.computed(connect, "ray://auto", square, {0: (0,)}, None))


@pytest.mark.parametrize("at", [1, 2])
def test_a_head_that_does_not_answer_for_its_size_is_a_connection_that_ended(at: int) -> None:
    asked: list[int] = []

    class Silent(_Cluster):
        def room(self) -> int:
            asked.append(1)
            if len(asked) == at:
                raise TimeoutError("no answer")
            return super().room()

    cluster = Silent(never, {})
    tasks = {number: (number,) for number in range(3)}
    found = clusters.computed(lambda: contextlib.nullcontext(cluster), "ray://auto", square, tasks, None)
    assert dict(found) == {0: 0, 1: 1, 2: 4}


def test_what_is_refused_while_connecting_has_a_name() -> None:
    def refused() -> Any:
        raise ConnectionRefusedError("nobody is there")

    with pytest.raises(ClusterError, match=r"ray://auto to go on; got .*nobody is there"):
        dict(clusters.computed(refused, "ray://auto", square, {0: (0,)}, None))


class _Executor:
    """In place of the process that is connected to Ray: it waits, has ended, or calls the function itself."""

    def __init__(self, ends: Exception | None = None, waits: bool = False):
        self.ends, self.waits = ends, waits

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.ends is not None:
            future.set_exception(self.ends)
        elif not self.waits:
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
        return future


@pytest.mark.parametrize("call", ["submit", "room", "forget", "finished", "result"])
def test_a_driver_of_ray_that_ends_or_does_not_answer_ends_the_connection(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "RESTART", 0.01)
    arguments = {"submit": (square, (0,)), "room": (), "result": (1,)}.get(call, ([1, 2],))
    for executor in (_Executor(waits=True), _Executor(ends=BrokenProcessPool("exit code 1"))):
        cluster = ray_driver._OnRay(executor)
        with pytest.raises(clusters.Disconnected, match=r"has ended, or not answered for 0\.01 seconds"):
            getattr(cluster, call)(*arguments)
        # What it waits for is not waited for again.
        with pytest.raises(clusters.Disconnected, match="its client does not answer"):
            cluster.forget([1])
        assert not cluster.answers()


class RayError(Exception):
    """As Ray's is called."""


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (WorkerCrashedError("killed"), clusters.ProcessEnded),
        (RayError("gone"), clusters.Disconnected),
        (ConnectionError("gone"), clusters.Disconnected),
        (ZeroDivisionError("by zero"), ZeroDivisionError),
    ],
)
def test_an_error_of_ray_is_read_without_ray(error: Exception, ours: type[Exception]) -> None:
    class Ray:
        def cluster_resources(self) -> dict[str, float]:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_driver._Driver, "ray", Ray(), raising=False)
        with pytest.raises(ours, match=str(error)) as raised:
            ray_driver._OnRay(_Executor()).room()
    assert pickle.loads(pickle.dumps(raised.value)).args == raised.value.args


def test_what_a_piece_raises_is_not_the_end_of_a_connection() -> None:
    with pytest.raises(ConnectionError, match="of the piece itself") as raised:
        computed(never, [99])
    assert not isinstance(raised.value, ClusterError)


def test_a_cluster_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="a cluster with processes"):
        computed(never, [0], size=0)

    # It loses its last process while a piece is at work.
    monkeypatch.setattr(clusters, "CHECK", 0.0)
    monkeypatch.setattr(clusters, "RESTART", 0.0)
    cluster = _Cluster(never, {})

    def finished(handles: list[Any]) -> list[Any]:
        cluster.size = 0
        return []

    monkeypatch.setattr(cluster, "finished", finished)
    with pytest.raises(ClusterError, match="it has no process left"):
        dict(
            clusters.computed(
                lambda: contextlib.nullcontext(cluster), "dask://h:1", square, {0: (0,), 1: (1,)}, None
            )
        )
    assert len(cluster.forgotten) == 2


def test_a_grid_whose_cluster_ends_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[int, int] = {}

    class Ends(_Cluster):
        def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
            begun[len(begun)] = 1
            return _Handle(function, task, len(begun) - 1, 1)

        def result(self, handle: Any) -> Any:
            if alive and handle.number >= 1:
                raise ConnectionError("the head has ended")
            return super().result(handle)

    def connect(address: str, device: str) -> Any:
        return contextlib.nullcontext(Ends(never, begun))

    monkeypatch.setitem(engines._CLUSTERS, "dask", ("distributed", "", 8786, connect))
    monkeypatch.setattr("ppl_bnn.evaluation.grid.engines.check", lambda *_, **__: None)
    monkeypatch.setattr(
        "ppl_bnn.evaluation.grid.engines.Engine.of", lambda word: engines.Engine("dask", "127.0.0.1:1")
    )
    grid = Grid(
        models=["linear_regression"],
        data=["diabetes"],
        methods={"map": bnn.MAP(ppl="pyro", steps=5)},
        splits="random:3@0.9",
        device="cpu",
    )
    alive = [True]
    with pytest.raises(ClusterError, match="1 of 3 cells are finished and kept in"):
        grid.run(tmp_path / "grid", engine="dask://127.0.0.1:1")
    alive.clear()
    result = grid.run(tmp_path / "grid", engine="dask://127.0.0.1:1")
    assert (result.missing, result.failures, len(result.cells)) == (0, 0, 3)


def test_the_limit_on_threads_ends_with_the_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cluster of threads computes pieces in the caller's own process.
    monkeypatch.delenv("NPROC", raising=False)
    assert clusters.called(os.environ.get, ("NPROC",)) == os.environ.get("OMP_NUM_THREADS", "1")
    assert "NPROC" not in os.environ
    monkeypatch.setenv("NPROC", "3")
    assert clusters.called(os.environ.get, ("NPROC",)) == "3"
    assert os.environ["NPROC"] == "3"
