"""Ray clusters, whose client is in a process of its own: Ray may end the process that is connected to it.

It does so with status 1 or by an abort, as when the head ends while a process registers or during a call. Then only the
driver is lost: the call connects again from a new one. A call that hangs is given up by ending the driver.

Functions, tasks and results pass the driver as bytes, so it imports neither torch nor JAX.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cloudpickle

from ppl_bnn.backends.protocol import resolve_device
from ppl_bnn.core.errors import InputError
from ppl_bnn.evaluation.grid import clusters, workers

# Environment variables of the driver, unless they are set already. Without them Ray ends it a minute after the head has
# ended if a call waits, and when connecting retries for many minutes.
_ENVIRONMENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**6), "RAY_gcs_server_port_wait_time_s": "2"}
# Errors of Ray if a process ended during a task, and if the connection ended.
_ENDED = {"WorkerCrashedError", "OutOfMemoryError", "RayActorError", "NodeDiedError"}
_CUT = {"OSError", "RayError", "RpcError", "TimeoutError", "CancelledError"}


@contextlib.contextmanager
def on_ray(address: str, device: str) -> Iterator[clusters.Cluster]:
    """Connect to the Ray cluster at an address; "auto" is the one that Ray finds on this machine."""
    from joblib.externals.loky import ProcessPoolExecutor

    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    executor = ProcessPoolExecutor(1, env=added, initializer=workers.begin, initargs=(os.getpid(), None))
    cluster = _OnRay(executor)
    try:
        cluster.address = cluster.ask(_connect, address, device)
        yield cluster
    finally:
        with contextlib.suppress(Exception):
            if cluster.answers():
                cluster.ask(_disconnect)
        executor.shutdown(kill_workers=True)


class _OnRay(clusters.Cluster):
    """A driver and the address of the head. Handles are numbers."""

    def __init__(self, executor: Any):
        self.executor, self.address, self.silent = executor, "", False

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this module in the driver; raises Disconnected if that has ended or does not answer."""
        if self.silent:
            raise clusters.Disconnected("its client does not answer")
        try:
            return self.executor.submit(_asked, function, arguments).result(clusters.RESTART)
        except (TimeoutError, BrokenProcessPool) as error:
            self.silent = True
            text = f"its client has ended, or not answered for {clusters.RESTART:g} seconds"
            raise clusters.Disconnected(text) from error
        except InputError as error:
            # Its cause is a traceback of the driver.
            raise error from None

    def room(self) -> int:
        return self.ask(_room)

    def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        return self.ask(_submit, cloudpickle.dumps((function, task)))

    def finished(self, handles: list[Any]) -> list[Any]:
        return self.ask(_finished, handles)

    def result(self, handle: Any) -> Any:
        return pickle.loads(self.ask(_result, handle))

    def forget(self, handles: list[Any]) -> None:
        self.ask(_forget, handles)

    def answers(self) -> bool:
        return not self.silent and clusters.not_reached(self.address) is None


def called(payload: bytes) -> bytes:
    """A pickled task and its result, in a process of the cluster."""
    return cloudpickle.dumps(clusters.called(*pickle.loads(payload)))


# --- In the driver ----------------------------------------------------------------------------------------


class _Driver:
    """The connection of this process: Ray, the kind of its resources that bound the tasks, and references by number."""

    ray: Any
    kind: str
    remote: Any
    references: dict[int, Any]


def _asked(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The result of a function; Ray's own errors, which only a process with Ray could read, become ours."""
    try:
        return function(*arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if clusters.is_a(error, _ENDED):
            raise clusters.ProcessEnded(text) from None
        if clusters.is_a(error, _CUT):
            raise clusters.Disconnected(text) from None
        raise


def _connect(address: str, device: str) -> str:
    """Connect this process; returns HOST:PORT of the head."""
    ray = importlib.import_module("ray")
    head: str | None = address
    if address == "auto":
        # HOST:PORT of the cluster that "auto" refers to, if Ray reports it.
        head = None
        with contextlib.suppress(Exception):
            head = importlib.import_module("ray._private.services").canonicalize_bootstrap_address("auto")
    try:
        if head is not None and (error := clusters.not_reached(head)) is not None:
            raise ConnectionError(f"{head}: {error}") from error
        place = address if address == "auto" or "://" in address else f"ray://{address}"
        ray.init(address=place, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        got = f"ray://{address.removeprefix('ray://')}: {error}"
        advice = "GRPC_ENABLE_FORK_SUPPORT=0 ray start --head"
        raise InputError.of("engine", "a cluster that answers", got, advice) from error
    kind = resolve_device(device)[0]
    on_gpus = kind == "cuda" or (kind == "auto" and ray.cluster_resources().get("GPU", 0) >= 1)
    _Driver.ray, _Driver.kind, _Driver.references = ray, "GPU" if on_gpus else "CPU", {}
    # Ray would retry a task that needs too much memory without end, unless its own retries are switched off.
    once = {"max_retries": 0} | ({"num_gpus": 1} if on_gpus else {"num_cpus": 1})
    _Driver.remote = ray.remote(**once)(called)
    return ray.get_runtime_context().gcs_address if address == "auto" else address


def _disconnect() -> None:
    _Driver.ray.shutdown()


def _room() -> int:
    return int(_Driver.ray.cluster_resources().get(_Driver.kind, 0))


def _submit(payload: bytes) -> int:
    number = len(_Driver.references)
    _Driver.references[number] = _Driver.remote.remote(payload)
    return number


def _finished(numbers: list[int]) -> list[int]:
    references = {_Driver.references[number]: number for number in numbers}
    return [references[done] for done in _Driver.ray.wait(list(references), num_returns=1, timeout=1.0)[0]]


def _result(number: int) -> bytes:
    reference, _Driver.references[number] = _Driver.references[number], None
    return _Driver.ray.get(reference, timeout=clusters.PATIENCE)


def _forget(numbers: list[int]) -> None:
    for number in numbers:
        _Driver.ray.cancel(_Driver.references[number], force=True)
