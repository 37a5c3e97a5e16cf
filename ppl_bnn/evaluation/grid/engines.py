"""Engines that run independent tasks: processes of this machine, or a Dask or Ray cluster.

`Engine.of("local")` is joblib's processes; "sequential" is this process, one task after the other; "dask://HOST:PORT"
is the cluster of that scheduler and "ray://HOST:PORT" (or "ray://auto", the one that runs on this machine) a Ray
cluster (`clusters.py`). `outcomes` computes tasks on an engine and returns results as they finish.

Processes of this machine are started for each call and never forked, since neither the threads of XLA nor those of
torch survive a fork. Each has its share of the cores for all its libraries, ends when the process that started it does,
and has a memory limit; if there are GPUs each sees one of them. Functions that one of them compiles with JAX are read
by the others, from a folder that is removed at the end (or one of the user's own, JAX_COMPILATION_CACHE_DIR). Resources
of a cluster's own processes are managed by the cluster.

Ray's server for clients, to which "ray://HOST:PORT" leads, forks while its threads are at work in gRPC. If gRPC's fork
handlers are enabled, the child is sometimes aborted, and the client reports that it could not connect: start the head
with GRPC_ENABLE_FORK_SUPPORT=0 in its environment.

If the head of a cluster ends (Dask's scheduler, or the head of Ray), the call ends in a `ClusterError`, after returning
what was finished: within seconds if connections are refused, after half a minute through Ray's server for clients,
after some minutes at most if Ray does not answer. In two situations Ray itself ends the process with exit status 1:
while it registers a process that joins by "ray://auto", which takes a fraction of a second; and, if `ray` was imported
before this engine was first used, during a call to the head. The folder of a grid then still has all that was finished.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppl_bnn.backends.protocol import resolve_device
from ppl_bnn.core.errors import DeviceError, InputError, MissingFrameworkError, unknown_name
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.evaluation.grid import clusters
from ppl_bnn.evaluation.grid.clusters import Lost

KINDS = ("local", "sequential", "dask", "ray")
# Memory of a process with a system, its compiler and a small model.
USUAL_MEMORY = 2 * 2**30
# The share of the machine's memory that all processes together may use.
SHARE = 0.9
# Seconds between checks of a process of its memory and of the process that started it.
INTERVAL = 0.25
# Prefix of the folder of a call in which the processes of this machine keep compiled functions; the id of the process
# that made it follows.
_FOLDER, PROGRAMS = "ppl-bnn-", "programs"
# The exit status of a process that exceeded its memory limit.
OVER_CEILING = 77
# Errors that joblib raises if a process ended during a task, by name: they come from joblib's copy of loky.
_ENDED = frozenset({"TerminatedWorkerError", "BrokenProcessPool"})
_EXTRAS = {"dask": ("distributed", "ppl-bnn[dask]"), "ray": ("ray", "ppl-bnn[ray]")}


@dataclass(frozen=True)
class Engine:
    """Where tasks are computed.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    address : str
        Address of a cluster, in the form that its client expects.
    """

    kind: str
    address: str = ""

    @classmethod
    def of(cls, word: str) -> Engine:
        """The engine of that name.

        Parameters
        ----------
        word : str
            "local", "sequential", "dask://HOST:PORT", "ray://HOST:PORT" or "ray://auto".

        Returns
        -------
        Engine

        Raises
        ------
        UnknownNameError
            An engine that does not exist.
        InputError
            A cluster without an address.
        MissingFrameworkError
            An engine whose package is not installed.
        """
        kind, mark, address = str(word).partition("://")
        if kind not in KINDS:
            raise unknown_name("engine", word, ("local", "sequential", "dask://HOST:PORT", "ray://HOST:PORT"))
        if kind not in _EXTRAS:
            if mark:
                raise InputError.of("engine", kind, repr(word), f"engine={kind!r}")
            return cls(kind)
        if not re.fullmatch(r"(\w+://)?[^/:\s]+:\d+" + ("|auto" if kind == "ray" else ""), address):
            got = repr(word)
            raise InputError.of(
                "engine", f"{kind}://HOST:PORT", got, f"engine='{kind}://127.0.0.1:{_PORTS[kind]}'"
            )
        package, extra = _EXTRAS[kind]
        if importlib.util.find_spec(package) is None:
            raise MissingFrameworkError.of(
                "engine",
                f"the package {package} for {word}",
                "none",
                f"pip install '{extra}', or engine='local'",
            )
        return cls(kind, address)

    def __str__(self) -> str:
        return f"{self.kind}://{self.address}" if self.address else self.kind


_PORTS = {"dask": 8786, "ray": 10001}


@dataclass(frozen=True)
class Share:
    """Resources of each process of this machine.

    Parameters
    ----------
    threads : int
        Number of threads of each library.
    memory : int or None
        Bytes above which a process is ended, or None for no limit.
    gpus : tuple of str or None
        The GPUs that the processes share, one each, as in CUDA_VISIBLE_DEVICES; () hides all, None changes nothing.
    """

    threads: int
    memory: int | None
    gpus: tuple[str, ...] | None


def share(jobs: int | None = None, device: str = "auto", memory: int | None = None) -> tuple[int, Share]:
    """The number of processes on this machine, and the resources of each.

    The cores are divided evenly, and each process has its own GPU as far as there are enough.

    Parameters
    ----------
    jobs : int, optional
        Number of processes. None: one per GPU if the work goes to GPUs, else as many as cores and memory allow.
    device : str
        "auto", "cpu" or "cuda[:i]".
    memory : int, optional
        Bytes of each process. None: its part of 90 % of the memory of the machine (or of its container).

    Returns
    -------
    jobs : int
    share : Share

    Raises
    ------
    InputError
        Impossible numbers.
    DeviceError
        A GPU that does not exist.
    """
    import joblib

    for name, value, least in (("jobs", jobs, 1), ("memory", memory, 2**20)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InputError.of(name, f"a whole number of at least {least}", repr(value), f"{name}=None")
    cores, whole = joblib.cpu_count(), machine_memory()
    there = gpus()
    kind, index = resolve_device(device)
    if kind == "cuda" and (index or 0) >= len(there):
        raise DeviceError.of(
            "", f"a CUDA device for device={device!r}", f"{len(there)} of them", "device='cpu' or 'auto'"
        )
    if index is not None:
        there = (there[index],)
    placed = () if kind == "cpu" else there or None
    if jobs is None:
        room = cores if whole is None else int(SHARE * whole // USUAL_MEMORY)
        jobs = len(placed) if placed else max(1, min(cores, room))
    if memory is None and whole is not None:
        memory = int(SHARE * whole / jobs)
    return jobs, Share(max(1, cores // jobs), memory, placed)


def gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that this process may see, as in CUDA_VISIBLE_DEVICES, found without importing a framework."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        found = [word.strip() for word in named.split(",") if word.strip()]
        # CUDA reads the list up to the first invalid entry.
        return tuple(found[: found.index("-1")] if "-1" in found else found)
    folder = Path("/proc/driver/nvidia/gpus")
    return tuple(str(index) for index in range(len(list(folder.iterdir())))) if folder.is_dir() else ()


def device_inside(engine: Engine, device: str) -> str:
    """Name of `device` inside the process that does the work: another process sees only its own GPU, as the first.

    Parameters
    ----------
    engine : Engine
        Where the work is done.
    device : str
        "auto", "cpu" or "cuda[:i]".

    Returns
    -------
    str
    """
    kind, _ = resolve_device(device)
    return device if engine.kind == "sequential" or kind != "cuda" else kind


def machine_memory() -> int | None:
    """Bytes of memory of this machine, or of the container of this process; None if unknown."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            whole = min(whole, int(Path(file).read_text()))
    return whole


def own_memory() -> int | None:
    """Bytes of memory that this process alone uses; None if unknown (not Linux)."""
    try:
        _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


# --- tasks --------------------------------------------------------------------------------------------------


def check(engine: Engine, jobs: int | None = None, device: str = "auto", memory: int | None = None) -> None:
    """Raise at once the errors that `outcomes` would raise: invalid numbers or GPUs, a cluster that does not answer.

    Parameters
    ----------
    engine : Engine
        Where the work is done.
    jobs, device, memory
        As for `outcomes`.
    """
    if engine.kind == "local":
        share(jobs, device, memory)
        return
    resolve_device(device)
    share(jobs)
    if engine.kind == "sequential" and jobs not in (None, 1):
        raise InputError.of("jobs", "one at a time in this process", repr(jobs), "engine='local'")
    if memory is not None:
        raise InputError.of(
            "memory", f"no ceiling on {engine.kind}, which has its own", repr(memory), "memory=None"
        )
    if engine.address and engine.address != "auto":
        host, _, port = engine.address.rpartition("://")[2].partition(":")
        if (error := clusters.reached(host, int(port))) is not None:
            raise InputError.of(
                "engine", "a cluster that answers", f"{engine}: {error}", "its scheduler's address"
            ) from error


def outcomes(
    engine: Engine,
    function: Callable[..., Any],
    tasks: Sequence[tuple[Any, ...]],
    *,
    jobs: int | None = None,
    device: str = "auto",
    memory: int | None = None,
) -> Generator[tuple[int, Any], None, None]:
    """Yield (number of the task, `function(*task)`) for each of the tasks, as they finish.

    If a process of this machine ends during a task, the tasks of other processes are lost, too. All tasks that were
    running are then tried again, one at a time, and a task that ends its process again has the result `Lost`. On a
    cluster it is tried again up to three times. An error raised by `function` ends everything and is raised here.

    Parameters
    ----------
    engine : Engine
        Where to compute.
    function, tasks
        The function and its arguments for each task, which must be picklable. Large arrays among the arguments are
        shared between processes of this machine.
    jobs : int, optional
        Number of tasks at once. None: as `share` decides, or what the cluster has room for.
    device : str
        Device of the work, which determines the GPUs that a process sees.
    memory : int, optional
        Bytes of a process of this machine (see `share`).

    Raises
    ------
    InputError
        A cluster that does not answer, that has no process, or whose processes have several threads each (a fit sets
        globals of torch and JAX).
    ClusterError
        A cluster that ended during the call.
    """
    check(engine, jobs, device, memory)
    waiting = dict(enumerate(tasks))
    if engine.kind in _CLUSTERS:
        with ignored("Sending large graph", everywhere=True):
            yield from clusters.computed(
                lambda: _CLUSTERS[engine.kind](engine.address, device), str(engine), function, waiting, jobs
            )
        return
    # joblib warns of both: processes that have grown are replaced on purpose, and Ctrl-C stops early.
    on_purpose = "A worker stopped while some jobs|.*tasks (have been successfully|which were still being)"
    with _place(engine, jobs, device, memory) as (backend, room), ignored(on_purpose, everywhere=True):
        while waiting:
            begun: list[int] = []
            try:
                for number, result in _computed(backend, room, function, waiting, list(waiting), begun):
                    del waiting[number]
                    yield number, result
            except Exception as error:
                if not _process_ended(error):
                    raise
                for number in [each for each in begun if each in waiting]:
                    result = _alone(backend, function, waiting, number)
                    del waiting[number]
                    yield number, result


def _computed(
    backend: Any,
    room: int,
    function: Callable[..., Any],
    tasks: dict[int, tuple[Any, ...]],
    numbers: Sequence[int],
    begun: list[int],
) -> Iterator[tuple[int, Any]]:
    from joblib import Parallel, delayed

    def calls() -> Iterator[Any]:
        for number in numbers:
            begun.append(number)
            yield delayed(_call)(number, function, tasks[number])

    one_by_one: dict[str, Any] = {"batch_size": 1, "pre_dispatch": room, "return_as": "generator_unordered"}
    results: Any = Parallel(n_jobs=room, backend=backend, **one_by_one)(calls())
    try:
        yield from results
    finally:
        results.close()


def _alone(backend: Any, function: Callable[..., Any], tasks: dict[int, tuple[Any, ...]], number: int) -> Any:
    try:
        ((_, result),) = _computed(backend, 1, function, tasks, [number], [])
    except Exception as error:
        if not _process_ended(error):
            raise
        return Lost(_why_ended(error))
    return result


def _process_ended(error: BaseException) -> bool:
    return any(cls.__name__ in _ENDED for cls in type(error).__mro__)


def _why_ended(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if f"({OVER_CEILING})" in text:
        return "MemoryError: it needed more memory than a process may have, and its process was ended"
    codes = re.search(r"exit codes of the workers are \{(.*?)\}", text)
    return clusters.why_ended(error, codes[1] if codes else None)


def _call(number: int, function: Callable[..., Any], task: tuple[Any, ...]) -> tuple[int, Any]:
    return number, function(*task)


# --- backends -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _place(engine: Engine, jobs: int | None, device: str, memory: int | None) -> Iterator[tuple[Any, int]]:
    """A joblib backend and the number of tasks computed at once."""
    if engine.kind == "sequential":
        yield "sequential", 1
    else:
        count, allowed = share(jobs, device, memory)
        _sweep()
        with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-") as folder:
            yield _processes(allowed, folder), count


def _sweep() -> None:
    """Remove the cache folders of calls whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _lives(process: int) -> bool:
    """Whether the process exists; True if that is unknown."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _processes(allowed: Share, folder: str) -> Any:
    """joblib's processes, newly started for this call, also if only one is needed."""
    from joblib._parallel_backends import LokyBackend

    # Processes that joblib keeps from an earlier call have other settings and are not reused.
    told = _Told(os.getpid(), folder, uuid.uuid4().hex, allowed)

    class Processes(LokyBackend):
        def effective_n_jobs(self, n_jobs: Any) -> int:
            # For a single job joblib would use this process, which would then end if a task ends its process.
            return max(2, int(n_jobs))

        def configure(self, n_jobs: Any = 1, parallel: Any = None, **settings: Any) -> int:
            settings |= {"idle_worker_timeout": 3600, "initializer": _settle, "initargs": (told,)}
            room = super().configure(n_jobs=n_jobs, parallel=parallel, **settings)
            workers: Any = self._workers
            workers._max_workers = n_jobs
            return room

        def terminate(self) -> None:
            # They hold gigabytes and are not used again.
            if self._workers is not None:
                self._workers.terminate(kill_workers=True)
                self._workers = None
            super().terminate()

    backend = Processes()
    backend.inner_max_num_threads = allowed.threads
    return backend


@dataclass(frozen=True)
class _Told:
    """Settings of a process of this machine when it starts; `token` distinguishes the processes of different calls."""

    parent: int
    folder: str
    token: str
    share: Share


# Files that a process keeps open until it ends.
_HELD: list[Any] = []


def _settle(told: _Told) -> None:
    """Set up a process of this machine, before any library is loaded."""
    # Ctrl-C reaches every process of a terminal; the main process handles it and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["NPROC"] = str(told.share.threads)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # Every fit binds its model again, which is a new program to JAX: without a cache each task would compile
        # everything.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(told.folder) / PROGRAMS)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    if told.share.gpus == ():
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif told.share.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = told.share.gpus[_slot(told.folder) % len(told.share.gpus)]
        # JAX would allocate most of the GPU's memory at once, and another process may use the same GPU.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    _replace_when_grown(told.share.memory)
    threading.Thread(target=_watch, args=(told.parent, told.share.memory), daemon=True).start()


def _slot(folder: str) -> int:
    """The smallest number from 0 up that no other living process holds."""
    import fcntl

    number = 0
    while True:
        file = open(Path(folder) / str(number), "w")  # noqa: SIM115 - locked until this process ends
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            number += 1
        else:
            _HELD.append(file)
            return number


def _replace_when_grown(ceiling: int | None) -> None:
    """Make joblib replace a process only after it has grown by half of its memory limit.

    joblib's own threshold is 300 MB between two tasks, which any compiler exceeds. In versions of joblib without this
    guard the names set here have no effect.
    """
    if ceiling is None or own_memory() is None:
        return
    guard: Any = importlib.import_module("joblib.externals.loky.process_executor")
    guard._USE_PSUTIL = True
    guard._get_memory_usage = lambda pid, force_gc=False: own_memory()
    guard._MAX_MEMORY_LEAK_SIZE = ceiling // 2


def _watch(parent: int, ceiling: int | None) -> None:
    """End this process if its parent has ended or if it exceeds its memory limit."""
    while True:
        if os.getppid() != parent:
            os._exit(1)
        if ceiling is not None and (own_memory() or 0) > ceiling:
            os._exit(OVER_CEILING)
        time.sleep(INTERVAL)


_CLUSTERS: dict[str, Callable[[str, str], Any]] = {"dask": clusters.on_dask, "ray": clusters.on_ray}
