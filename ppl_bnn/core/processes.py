"""Worker processes: starting and ending them, serialising data for them; memory of the machine and of this process.

A model file loaded by its location cannot be imported by name in another process, so its module is sent by value.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.warning_filters import ignored

# Seconds after which an idle process ends, so that none outlives a killed program.
IDLE = 300.0
# Environment variables that set the number of threads of linear algebra libraries when these are loaded.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def allowed() -> bool:
    """Whether this process may start others. Daemonic processes, such as the workers of Dask, may not."""
    return not multiprocessing.current_process().daemon


def unordered(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    workers: int,
    meanwhile: Callable[[], None] | None = None,
) -> Generator[tuple[int, Any]]:
    """Pairs ``(n, function(*calls[n]))`` in the order in which the calls finish, from worker processes.

    The processes live as long as the generator, share the cores of this process, and ignore Ctrl-C. They are killed if
    a call raises, which is raised here, or if the generator is closed early. One that has grown by 300 MB since its
    first call is replaced (if psutil is installed), so a call must not rely on state of an earlier one. `meanwhile` is
    called ten times a second while waiting.
    """
    import joblib
    from joblib.externals.loky import ProcessPoolExecutor

    threads = str(max(1, joblib.cpu_count() // workers))
    # loky warns that it replaces a process in the thread that distributes the calls. If warnings are errors, that
    # thread would end, and this one would wait for a result without end.
    with ignored("A worker stopped while some jobs were given", UserWarning, everywhere=True):
        executor = ProcessPoolExecutor(
            workers,
            timeout=IDLE,
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
            env={name: threads for name in THREADS if name not in os.environ},
        )
        left, numbers, finished = iter(enumerate(calls)), {}, False

        def submit(count: int) -> None:
            for number, arguments in itertools.islice(left, count):
                numbers[executor.submit(function, *arguments)] = number

        try:
            # As many calls as loky holds in its queue: further calls cause errors when it kills the processes.
            submit(2 * workers)
            while numbers:
                done = wait(numbers, None if meanwhile is None else 0.1, FIRST_COMPLETED).done
                if meanwhile is not None:
                    meanwhile()
                for future in done:
                    number = numbers.pop(future)
                    submit(1)
                    yield number, future.result()
            finished = True
        finally:
            while not finished and not all(future.running() or future.done() for future in numbers):
                time.sleep(0.001)
            executor.shutdown(wait=True, kill_workers=not finished)


def written(payload: Any, model: Any) -> bytes:
    """Serialise an object that holds a model, for `read` in another process; any error of pickling is raised."""
    import cloudpickle

    function = model
    while isinstance(function, partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    known = ("__main__", *cloudpickle.list_registry_pickle_by_value())
    if module is None or module.__name__ in known or module.__name__.split(".")[0] == __name__.split(".")[0]:
        return cloudpickle.dumps(payload)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(payload)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def read(blob: bytes) -> Any:
    """The object that `written` serialised. Only for bytes from another process of the same program."""
    return pickle.loads(blob)


# Id of the process in which a session was first opened. A forked child inherits the id of its parent.
_first: list[int] = []


def refuse_forked() -> None:
    """Record that this process computes, or refuse if it was forked from a process that had computed."""
    if not _first:
        _first.append(os.getpid())
    elif _first[0] != os.getpid():
        forked = f"process {os.getpid()}, which was forked from {_first[0]} after a fit there"
        got = f"{forked}: the threads of JAX and torch do not survive a fork"
        advice = "multiprocessing.get_context('spawn'), joblib, or forking before the first fit"
        raise UnsupportedError.of("", "a process that was started afresh", got, advice)


def machine_memory() -> int | None:
    """Bytes of memory of this machine, or of the container of this process; None if unknown."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            total = min(total, int(Path(file).read_text()))
    return total


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """Measure the peak memory since the start of the block, by a function that returns MB (10^6 bytes) or NaN.

    Only Linux can reset the peak; other systems have that of the whole life of the process. A nested block resets the
    peak of the outer one.
    """
    before = _high_water()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        before = 0.0
    yield lambda: found if (found := _high_water()) > before else math.nan


def _high_water() -> float:
    with suppress(OSError, TypeError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 / 1e6  # type: ignore[index]
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return math.nan
