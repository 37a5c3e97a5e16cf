"""Tasks sent to the processes of a cluster, which retry if a process or the connection ends.

A task returns its own error as a value, so an error raised in between comes from the cluster. joblib's back ends for
Dask and Ray lose which task such an error concerns and what is finished, so the clients of Dask and Ray are used;
that of Ray is in `ray_driver.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ppl_bnn.core.errors import ClusterError, InputError, message

# Seconds within which a cluster has to answer.
PATIENCE = 10.0
# Seconds within which an ended process has to be replaced; after that the cluster counts as having none.
RESTART = 60.0
# Number of times that a task is started if its process ends each time. Dask uses the same number.
TRIES = 4
# The exit status of a process of this machine that exceeded its memory limit.
OVER_LIMIT = 77
# Seconds between polls for finished tasks, and between checks of the cluster itself.
LOOK, CHECK = 0.05, 1.0
# Errors raised if a process ended during a task, and if the connection ended; by name, since a class may be in an
# optional package.
_ENDED = {"KilledWorker", "BrokenProcessPool", "ProcessEnded"}
_CUT = {"OSError", "CancelledError", "TimeoutError"}


@dataclass(frozen=True)
class Lost:
    """Result of a task whose process ended each time that it was tried; `reason` is one sentence."""

    reason: str


class ProcessEnded(Exception):
    """The process of a task ended under it; the message says how."""


class Disconnected(Exception):
    """The connection to a cluster ended; the cluster may still be running."""


class Cluster(Protocol):
    """A connection to a cluster."""

    def room(self) -> int:
        """Number of tasks that are computed at once."""
        ...

    def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        """Start a task, and return its handle."""

    def finished(self, handles: list[Any]) -> list[Any]:
        """The handles that are finished, after a short wait."""
        ...

    def result(self, handle: Any) -> Any:
        """The result of a finished task; raises the error if its process ended."""

    def forget(self, handles: list[Any]) -> None:
        """Where tasks outlive the connection, cancel those whose results are no longer needed."""

    def answers(self) -> bool:
        """Whether the head of the cluster can be reached."""
        return True


def is_a(error: BaseException, names: set[str]) -> bool:
    return any(cls.__name__ in names for cls in type(error).__mro__)


def _why_ended(error: BaseException) -> str:
    """Why a process ended during a task, in one sentence."""
    text = " ".join(str(error).split())
    if f"EXIT({OVER_LIMIT})" in text:
        return "MemoryError: it needed more memory than a process may have, and its process was ended"
    codes = re.search(r"exit codes of the workers are \{(.*?)\}", text)
    kind = "" if isinstance(error, ProcessEnded) else f"{type(error).__name__}: "
    detail = codes[1] if codes else kind + text.partition(". ")[0][:200]
    return f"its process ended under it ({detail}), as by a crash of a library or for want of memory"


class _Raised(NamedTuple):
    """Result of a task that raised an error."""

    error: Exception


def called(function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    """The result of a task, in the process that computes it; an error that it raises is a value."""
    # Dask and Ray limit the threads of all libraries but XLA, which reads NPROC when it is first loaded. The process
    # may be the caller's own, as in a Dask cluster of threads, so the variable is removed again.
    added = "NPROC" not in os.environ
    os.environ.setdefault("NPROC", os.environ.get("OMP_NUM_THREADS", "1"))
    try:
        return function(*task)
    except Exception as error:
        return _Raised(error)
    finally:
        if added:
            os.environ.pop("NPROC", None)


def computed(
    connect: Callable[[], contextlib.AbstractContextManager[Cluster]],
    name: str,
    function: Callable[..., Any],
    tasks: Mapping[int, tuple[Any, ...]],
    jobs: int | None,
    tries: int = TRIES,
) -> Generator[tuple[int, Any], None, None]:
    """Yield (number, `function(*task)`) for each of the tasks number -> arguments, as they finish; `jobs` run at once.

    `connect` opens a connection to the cluster called `name`; a lost one is opened again. A task whose process ended is
    tried again; after `tries` its result is `Lost`. An error of the function is raised here and ends everything. Raises
    ClusterError if the cluster ended or had no process for a minute, InputError if it does not answer or has none at
    first.
    """
    waiting = dict(tasks)
    count: Counter[int] = Counter()
    losses = 0
    while waiting:
        before = len(waiting)
        try:
            with contextlib.ExitStack() as stack:
                with _disconnections():
                    try:
                        cluster = stack.enter_context(connect())
                    except InputError as error:
                        if not losses:
                            raise
                        raise _gone(name, error.__cause__ or error) from error
                    room = cluster.room()
                if room < 1 and not losses:
                    raise InputError.of("engine", "a cluster with processes", f"{name}, without", "some")
                for number, result in _rounds(cluster, room, jobs, function, waiting, count, tries):
                    del waiting[number]
                    if isinstance(result, _Raised):
                        raise result.error
                    yield number, result
        except Disconnected as error:
            # A lost connection is re-established as long as there is progress.
            losses = losses + 1 if len(waiting) == before else 1
            if losses >= TRIES:
                raise _gone(name, error) from error


def _gone(name: str, error: BaseException) -> ClusterError:
    got = f"the end of it ({' '.join(str(error).split())[:200]})"
    return ClusterError(message(f"{name} to go on", got, "starting it again, and then the same call"))


def _rounds(
    cluster: Cluster,
    room: int,
    jobs: int | None,
    function: Callable[..., Any],
    waiting: Mapping[int, tuple[Any, ...]],
    count: Counter[int],
    tries: int,
) -> Iterator[tuple[int, Any]]:
    running: dict[Any, int] = {}
    # The last of them is next. The last try of a task comes after all others, and nothing runs beside it.
    left = sorted(waiting, key=lambda number: (count[number] < tries - 1, -number))
    seen = looked = time.monotonic()
    with _disconnections():
        try:
            while left or running:
                while left and len(running) < min(max(room, 1), jobs or room or 1):
                    if running and count[left[-1]] == tries - 1:
                        break
                    number = left.pop()
                    running[cluster.submit(function, waiting[number])] = number
                done = cluster.finished(list(running))
                if time.monotonic() - looked > CHECK:
                    if not cluster.answers():
                        raise Disconnected("it does not answer")
                    room, looked = cluster.room(), time.monotonic()
                    seen = looked if room else seen
                    if looked - seen > RESTART:
                        raise _gone("the cluster", Disconnected("it has no process left"))
                for handle in done:
                    number = running.pop(handle)
                    try:
                        result = cluster.result(handle)
                    except Exception as error:
                        if not is_a(error, _ENDED):
                            raise
                        count[number] += 1
                        # Dask has already retried it as often.
                        if count[number] < tries and not is_a(error, {"KilledWorker"}):
                            left.insert(0 if count[number] == tries - 1 else len(left), number)
                            continue
                        result = Lost(_why_ended(error))
                    yield number, result
        finally:
            with contextlib.suppress(Exception):
                if running and cluster.answers():
                    cluster.forget(list(running))


@contextlib.contextmanager
def _disconnections() -> Iterator[None]:
    """Convert an error of the cluster to our own class if the connection has ended."""
    try:
        yield
    except Exception as error:
        if is_a(error, _ENDED) or not is_a(error, _CUT) or isinstance(error, ClusterError):
            raise
        raise Disconnected(f"{type(error).__name__}: {error}") from error


def not_reached(address: str) -> OSError | None:
    """None if a server listens at HOST:PORT, else the error."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except OSError as error:
        return error
    return None


# --- Dask -------------------------------------------------------------------------------------------------


@dataclass
class _OnDask(Cluster):
    client: Any
    address: str

    def room(self) -> int:
        most = max((threads := self.client.nthreads()).values(), default=1)
        expected = "processes of one thread each, as a fit sets globals of torch and JAX"
        got = f"dask://{self.address}, with up to {most} threads in one"
        InputError.check(most == 1, "engine", expected, got, "dask worker --nthreads 1 --nworkers N")
        return len(threads)

    def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        return self.client.submit(called, function, task, pure=False)

    def finished(self, handles: list[Any]) -> list[Any]:
        done = [each for each in handles if each.done()]
        if not done:
            time.sleep(LOOK)
        return done

    def result(self, handle: Any) -> Any:
        return handle.result(timeout=PATIENCE)

    def forget(self, handles: list[Any]) -> None:
        self.client.cancel(handles, force=True)

    def answers(self) -> bool:
        return self.client.status == "running"


@contextlib.contextmanager
def on_dask(address: str, device: str) -> Iterator[Cluster]:
    """Connect to the Dask cluster at an address."""
    distributed: Any = importlib.import_module("distributed")
    try:
        client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except OSError as error:
        got = f"dask://{address}: {error}"
        raise InputError.of("engine", "a cluster that answers", got, "its scheduler's address") from error
    try:
        with contextlib.suppress(TimeoutError):
            client.wait_for_workers(1, timeout=PATIENCE)
        yield _OnDask(client, address)
    finally:
        with contextlib.suppress(Exception):
            client.close(timeout=PATIENCE)
