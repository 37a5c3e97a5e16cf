"""Dask and Ray clusters to which tasks are sent.

A `Cluster` sends one task to one process and reports when it is finished; errors are handled in `computed`. An error
raised by a task itself is returned as a value, so any error raised in between comes from the cluster: a process that
ended during a task, or a lost connection.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ppl_bnn.backends.protocol import resolve_device
from ppl_bnn.core.errors import ClusterError, InputError, message

# Seconds within which a cluster has to answer.
PATIENCE = 10.0
# Seconds within which an ended process has to be replaced; after that the cluster counts as having none.
RESTART = 60.0
# Number of times that a task is started if its process ends each time. Dask uses the same number.
TRIES = 4
# Environment variables that Ray reads, some on import and some when it connects. Without them Ray ends this process a
# minute after its head has ended, if a call waits for the head then, and when connecting it retries a head that has
# ended for many minutes.
_OF_RAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**6), "RAY_gcs_server_port_wait_time_s": "2"}
# Seconds between polls for finished tasks, and between checks of the cluster itself.
LOOK, CHECK = 0.05, 1.0
# Errors raised if a process ended during a task, and if the connection ended; by name, since each class is in an
# optional package.
_ENDED = frozenset(
    {"KilledWorker", "WorkerCrashedError", "OutOfMemoryError", "RayActorError", "NodeDiedError"}
)
_CUT = frozenset({"OSError", "CancelledError", "RayError", "GetTimeoutError", "RpcError", "TimeoutError"})


@dataclass(frozen=True)
class Lost:
    """Result of a task whose process ended each time that it was tried.

    Parameters
    ----------
    reason : str
        One sentence.
    """

    reason: str


class Disconnected(Exception):
    """The connection to a cluster ended; the cluster may still be running."""


class Cluster(Protocol):
    """A connection to a cluster."""

    def room(self) -> int:
        """Number of tasks that are computed at once."""
        ...

    def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        """Start a task, and return its handle."""
        ...

    def finished(self, handles: list[Any]) -> list[Any]:
        """The handles that are finished, after a short wait."""
        ...

    def result(self, handle: Any) -> Any:
        """The result of a finished task; raises the error if its process ended."""
        ...

    def forget(self, handles: list[Any]) -> None:
        """Cancel tasks whose results are no longer needed."""
        ...

    def answers(self) -> bool:
        """Whether the head of the cluster can be reached."""
        ...


def process_ended(error: BaseException) -> bool:
    """Whether an error means that the process of a task ended."""
    return _is(error, _ENDED)


def _is(error: BaseException, names: frozenset[str]) -> bool:
    return any(cls.__name__ in names for cls in type(error).__mro__)


def why_ended(error: BaseException, detail: str | None = None) -> str:
    """Why a process ended during a task, in one sentence.

    Parameters
    ----------
    error : BaseException
        The error.
    detail : str, optional
        What is known of the reason; else the text of the error is used.

    Returns
    -------
    str
    """
    text = " ".join(str(error).split())
    detail = detail or f"{type(error).__name__}: {text.partition('. ')[0][:200]}"
    return f"its process ended under it ({detail}), as by a crash of a library or for want of memory"


@dataclass(frozen=True)
class _Raised:
    """Result of a task that raised an error."""

    error: Exception


def _called(function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    # Dask and Ray limit the threads of all libraries but XLA, which reads NPROC when it is first loaded. The process
    # may be the caller's own, as in a Dask cluster of threads, so the variable is removed again.
    limited = "NPROC" in os.environ
    os.environ.setdefault("NPROC", os.environ.get("OMP_NUM_THREADS", "1"))
    try:
        return function(*task)
    except Exception as error:
        return _Raised(error)
    finally:
        if not limited:
            os.environ.pop("NPROC", None)


def computed(
    connect: Callable[[], contextlib.AbstractContextManager[Cluster]],
    name: str,
    function: Callable[..., Any],
    tasks: Mapping[int, tuple[Any, ...]],
    jobs: int | None,
) -> Generator[tuple[int, Any], None, None]:
    """Yield (number, `function(*task)`) for each of the tasks, as they finish.

    A task whose process ended is tried again; after `TRIES` its result is `Lost`. A lost connection is re-established.
    An error raised by the function is raised here and ends everything.

    Parameters
    ----------
    connect : callable
        Opens a connection to the cluster.
    name : str
        Name of the cluster in messages.
    function : callable
        The function.
    tasks : mapping of int to tuple
        Number -> arguments.
    jobs : int, optional
        Number of tasks at once.

    Raises
    ------
    ClusterError
        The cluster has ended, or has had no process for a minute.
    InputError
        The cluster does not answer at first, or has no process.
    """
    waiting = dict(tasks)
    tries: Counter[int] = Counter()
    losses = 0
    while True:
        before = len(waiting)
        try:
            with _connected(connect, name, again=losses > 0) as cluster:
                with _named():
                    room = cluster.room()
                if room < 1 and not losses:
                    raise InputError.of("engine", "a cluster with processes", f"{name}, without", "some")
                for number, result in _rounds(cluster, jobs, function, waiting, tries):
                    del waiting[number]
                    if isinstance(result, _Raised):
                        raise result.error
                    yield number, result
            return
        except Disconnected as error:
            # A lost connection is re-established as long as there is progress.
            losses = losses + 1 if len(waiting) == before else 1
            if losses >= TRIES:
                raise ClusterError(_gone(name, error)) from error


def _gone(name: str, error: BaseException) -> str:
    detail = " ".join(str(error).split())[:200]
    return message(
        f"{name} to go on", f"the end of it ({detail})", "starting it again, and then the same call"
    )


@contextlib.contextmanager
def _connected(
    connect: Callable[[], contextlib.AbstractContextManager[Cluster]], name: str, again: bool
) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        try:
            with _named():
                cluster = stack.enter_context(connect())
        except InputError as error:
            if not again:
                raise
            raise ClusterError(_gone(name, error.__cause__ or error)) from error
        yield cluster


def _rounds(
    cluster: Cluster,
    jobs: int | None,
    function: Callable[..., Any],
    waiting: Mapping[int, tuple[Any, ...]],
    tries: Counter[int],
) -> Iterator[tuple[int, Any]]:
    running: dict[Any, int] = {}
    left = list(waiting)[::-1]
    seen = looked = time.monotonic()
    with _named():
        room = cluster.room()
    try:
        while left or running:
            with _named():
                while left and len(running) < min(max(room, 1), jobs or room or 1):
                    number = left.pop()
                    running[cluster.submit(function, waiting[number])] = number
                done = cluster.finished(list(running))
            if time.monotonic() - looked > CHECK:
                if not cluster.answers():
                    raise Disconnected("it does not answer")
                with _named():
                    room = cluster.room()
                looked = time.monotonic()
                seen = looked if room else seen
                if looked - seen > RESTART:
                    raise ClusterError(_gone("the cluster", Disconnected("it has no process left")))
            for handle in done:
                number = running.pop(handle)
                try:
                    with _named():
                        result = cluster.result(handle)
                except Exception as error:
                    if not process_ended(error):
                        raise
                    tries[number] += 1
                    # Dask has already retried it as often.
                    if tries[number] < TRIES and type(error).__name__ != "KilledWorker":
                        left.append(number)
                        continue
                    result = Lost(why_ended(error))
                yield number, result
    finally:
        with contextlib.suppress(Exception):
            cluster.forget(list(running))


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Convert an error of the cluster to our own class if the connection has ended."""
    try:
        yield
    except Exception as error:
        if process_ended(error) or not _is(error, _CUT):
            raise
        raise Disconnected(f"{type(error).__name__}: {error}") from error


def reached(host: str, port: int) -> OSError | None:
    """None if a server listens at the address, else the error."""
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        return error
    return None


def _not_reached(address: str) -> OSError | None:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return reached(host, int(port))


# --- Dask -------------------------------------------------------------------------------------------------


@dataclass
class _OnDask:
    client: Any
    address: str

    def room(self) -> int:
        threads = self.client.nthreads()
        if any(count != 1 for count in threads.values()):
            raise InputError.of(
                "engine",
                "processes of one thread each, as a fit sets globals of torch and JAX",
                f"dask://{self.address}, with up to {max(threads.values())} threads in one",
                "dask worker --nthreads 1 --nworkers N",
            )
        return len(threads)

    def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        return self.client.submit(_called, function, task, pure=False)

    def finished(self, handles: list[Any]) -> list[Any]:
        done = [each for each in handles if each.done()]
        if not done:
            time.sleep(LOOK)
        return done

    def result(self, handle: Any) -> Any:
        return handle.result(timeout=PATIENCE)

    def forget(self, handles: list[Any]) -> None:
        if handles and self.answers():
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
        raise InputError.of(
            "engine", "a cluster that answers", f"dask://{address}: {error}", "its scheduler's address"
        ) from error
    try:
        with contextlib.suppress(TimeoutError):
            client.wait_for_workers(1, timeout=PATIENCE)
        yield _OnDask(client, address)
    finally:
        with contextlib.suppress(Exception):
            client.close(timeout=PATIENCE)


# --- Ray --------------------------------------------------------------------------------------------------


@dataclass
class _OnRay:
    ray: Any
    address: str
    kind: str
    direct: bool = False

    def __post_init__(self) -> None:
        # Ray would retry a task that needs too much memory without end, unless its own retries are switched off.
        once = {"max_retries": 0} | ({"num_gpus": 1} if self.kind == "GPU" else {"num_cpus": 1})
        self._remote = self.ray.remote(**once)(_called)

    def room(self) -> int:
        return int(self._in_time(self.ray.cluster_resources).get(self.kind, 0))

    def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        return self._in_time(lambda: self._remote.remote(function, task))

    def _in_time(self, call: Callable[[], Any]) -> Any:
        """The result of a call that needs the head; a Ray client times out by itself."""
        return _answered(call) if self.direct else call()

    def finished(self, handles: list[Any]) -> list[Any]:
        return self.ray.wait(handles, num_returns=1, timeout=1.0)[0]

    def result(self, handle: Any) -> Any:
        return self.ray.get(handle, timeout=PATIENCE)

    def forget(self, handles: list[Any]) -> None:
        if handles and self.answers():
            for handle in handles:
                self.ray.cancel(handle, force=True)

    def answers(self) -> bool:
        return _not_reached(self.address) is None


@contextlib.contextmanager
def on_ray(address: str, device: str) -> Iterator[Cluster]:
    """Connect to the Ray cluster at an address."""
    with _environment(_OF_RAY):
        ray: Any = importlib.import_module("ray")
    mine = not ray.is_initialized()
    if not mine and address != "auto":
        got = f"ray://{address}, while this process is connected to another already"
        raise InputError.of("engine", "the cluster of this process", got, "'ray://auto', or ray.shutdown()")
    try:
        if mine:
            _connect(ray, address)
        head = ray.get_runtime_context().gcs_address if address == "auto" else address
        kind = resolve_device(device)[0]
        on_gpus = kind == "cuda" or (kind == "auto" and _answered(ray.cluster_resources).get("GPU", 0) >= 1)
        yield _OnRay(ray, head, "GPU" if on_gpus else "CPU", direct=address == "auto")
    finally:
        # Also if the connection failed: Ray stays a refused client, which breaks later connections.
        if mine:
            with contextlib.suppress(Exception):
                ray.shutdown()


def _answered(call: Callable[[], Any]) -> Any:
    """The result of a call that may never return if the head of the cluster has ended.

    Raises TimeoutError after a minute. The thread then keeps waiting: it cannot be ended.
    """
    got: list[tuple[Any, BaseException | None]] = []

    def ask() -> None:
        try:
            got.append((call(), None))
        except BaseException as error:
            got.append((None, error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(RESTART)
    if not got:
        raise TimeoutError(f"its head has not answered for {RESTART:g} seconds")
    result, error = got[0]
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily, unless they are set already."""
    mine = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


def _noted_head() -> str | None:
    """HOST:PORT of the cluster that "auto" refers to; None if Ray does not report it."""
    with contextlib.suppress(Exception):
        return importlib.import_module("ray._private.services").canonicalize_bootstrap_address("auto")
    return None


def _connect(ray: Any, address: str) -> None:
    where = address if address == "auto" or "://" in address else f"ray://{address}"
    try:
        head = _noted_head() if address == "auto" else address
        if head is not None and (error := _not_reached(head)) is not None:
            raise ConnectionError(f"{head}: {error}") from error
        with _environment(_OF_RAY):
            ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise InputError.of(
            "engine",
            "a cluster that answers",
            f"ray://{address.removeprefix('ray://')}: {error}",
            "GRPC_ENABLE_FORK_SUPPORT=0 ray start --head",
        ) from error
