"""Processes of this machine: one executor of one process for each task that runs at once.

joblib's `Parallel` ends at the first process that is killed and does not say under which task. Here only that task is
affected and can be tried again. The executor is joblib's own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.processes import THREADS
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.evaluation.grid import clusters

# Seconds between checks of a process of its memory and of the process that started it.
INTERVAL = 0.25
# Arrays of at least so many bytes are written to a file once, which every process maps into its memory.
LARGE = 2**20
# Prefix of the temporary folder of a call; the id of the process that made it follows. The compiled functions are
# in its folder PROGRAMS.
_PREFIX, PROGRAMS = "ppl-bnn-", "programs"


class Share(NamedTuple):
    """Resources of each process of this machine.

    `threads` of each library; `memory` in bytes above which it is ended, or None; `gpus` that the processes share, one
    each, as in CUDA_VISIBLE_DEVICES: () hides all, None changes nothing.
    """

    threads: int
    memory: int | None
    gpus: tuple[str, ...] | None


def own_memory() -> int | None:
    """Bytes of memory that this process alone uses; None if unknown (not Linux)."""
    try:
        _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def on_processes(count: int, share: Share) -> Iterator[clusters.Cluster]:
    """Start `count` processes when they are first needed, and kill them at the end: they hold gigabytes."""
    _sweep()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        pool = _Processes(count, share, Path(folder))
        # loky warns when it replaces a process that has grown, which is on purpose.
        with ignored("A worker stopped while some jobs", everywhere=True):
            try:
                yield pool
            finally:
                for slot in range(count):
                    pool.end(slot)


class _Processes(clusters.Cluster):
    """Processes of this machine."""

    def __init__(self, count: int, share: Share, folder: Path):
        self.share, self.folder = share, folder
        self.executors: list[Any] = [None] * count
        self.running: dict[Any, int] = {}
        # Each array is kept beside its file, so that no other one can have its id.
        self.files: dict[int, tuple[np.ndarray, _Stored]] = {}

    def room(self) -> int:
        return len(self.executors)

    def submit(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        slot = min(set(range(self.room())) - set(self.running.values()))
        arguments = tuple(map(self._stored, task))
        try:
            handle = self._executor(slot).submit(_called, function, arguments)
        except RuntimeError:
            # Its process ended between two tasks.
            self.end(slot)
            handle = self._executor(slot).submit(_called, function, arguments)
        self.running[handle] = slot
        return handle

    def finished(self, handles: list[Any]) -> list[Any]:
        return list(wait(handles, timeout=1.0, return_when=FIRST_COMPLETED).done)

    def result(self, handle: Any) -> Any:
        slot = self.running.pop(handle)
        try:
            return handle.result()
        except Exception:
            # An error of the task itself is a value: the process has ended.
            self.end(slot)
            raise

    def end(self, slot: int) -> None:
        if (executor := self.executors[slot]) is not None:
            executor.shutdown(kill_workers=True)
            self.executors[slot] = None

    def _executor(self, slot: int) -> Any:
        if self.executors[slot] is not None:
            return self.executors[slot]
        from joblib.externals.loky import ProcessPoolExecutor

        environment: dict[str, str] = dict.fromkeys((*THREADS, "NPROC"), str(self.share.threads))
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            # Every fit binds its model again, which is a new program to JAX: without a cache each task would compile
            # everything. The cache of this process, if it has one, serves.
            jax: Any = sys.modules.get("jax")
            kept = jax and jax.config.jax_compilation_cache_dir
            environment["JAX_COMPILATION_CACHE_DIR"] = kept or str(self.folder / PROGRAMS)
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
        gpus = self.share.gpus
        if gpus == ():
            environment["JAX_PLATFORMS"] = "cpu"
        elif gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
            # JAX would allocate most of the GPU's memory at once, and another process may use the same GPU.
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        self.executors[slot] = ProcessPoolExecutor(
            1, env=environment, initializer=begin, initargs=(os.getpid(), self.share.memory)
        )
        return self.executors[slot]

    def _stored(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.nbytes < LARGE or value.dtype.hasobject:
            return value
        if id(value) not in self.files:
            file = self.folder / f"{len(self.files)}.npy"
            try:
                np.save(file, value)
            except OSError as error:
                expected = f"room for {value.nbytes} bytes in {self.folder}"
                raise InputError.of("", expected, str(error), "another folder by TMPDIR") from error
            self.files[id(value)] = value, _Stored(file)
        return self.files[id(value)][1]


class _Stored(NamedTuple):
    """An array in a file."""

    file: Path


def _called(function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    arguments = (np.load(each.file, mmap_mode="r") if isinstance(each, _Stored) else each for each in task)
    return clusters.called(function, tuple(arguments))


def _sweep() -> None:
    """Remove the temporary folders of calls whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not _exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _exists(process: int) -> bool:
    """Whether the process exists; True if that is unknown."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def begin(parent: int, limit: int | None) -> None:
    """Set up a process of this machine: it ignores Ctrl-C, and ends with its parent or above its memory limit."""
    # Ctrl-C reaches every process of a terminal; the main process handles it and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # loky replaces a process that has grown by 300 MB, which any compiler exceeds: here, by half of its limit or never.
    # In versions without this guard the names have no effect.
    guard: Any = importlib.import_module("joblib.externals.loky.process_executor")
    guard._USE_PSUTIL = limit is not None and own_memory() is not None
    if limit is not None:
        guard._get_memory_usage = lambda pid, force_gc=False: own_memory()
        guard._MAX_MEMORY_LEAK_SIZE = limit // 2
    threading.Thread(target=_watch, args=(parent, limit), daemon=True).start()


def _watch(parent: int, limit: int | None) -> None:
    """End this process if its parent has ended or if it exceeds its memory limit."""
    while True:
        if os.getppid() != parent:
            os._exit(1)
        if limit is not None and (own_memory() or 0) > limit:
            os._exit(clusters.OVER_LIMIT)
        time.sleep(INTERVAL)
