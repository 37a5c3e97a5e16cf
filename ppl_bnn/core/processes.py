"""Worker processes: starting and ending them, and serialising what is sent to them.

A model file that was loaded by its location has no name by which another process could import it, so the module of
the model travels by value. Everything else is found there as it is here, for a process begins with the places where
this one finds its modules.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import Any

from ppl_bnn.core.errors import UnsupportedError, message
from ppl_bnn.core.warning_filters import ignored

# Seconds after which a process that has nothing to do ends, so that none outlives a program that was killed.
IDLE = 300.0
# What libraries of linear algebra read, before they are loaded, about their threads.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def allowed() -> bool:
    """Whether this process may start others, which daemonic ones, as the workers of Dask are, may not."""
    return not multiprocessing.current_process().daemon


def unordered(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    workers: int,
    meanwhile: Callable[[], None] | None = None,
) -> Generator[tuple[int, Any]]:
    """(n, function(*calls[n])) as they finish, from so many processes, which are started for it and end with it.

    They share the cores of this one and do not hear Ctrl-C, which reaches every process of a terminal. They are killed
    where a call raises, which is raised here, and where the generator is closed before its end. meanwhile: is called
    ten times a second while this waits.

    A process that has 300 MB more after a later call than after its first is replaced (where psutil is installed), so
    a call must not rely on what an earlier one left behind. No process is kept for the next use: what was compiled for
    this one would be taken for a leak then.
    """
    import joblib
    from joblib.externals.loky import ProcessPoolExecutor

    threads = str(max(1, joblib.cpu_count() // workers))
    # loky says that it replaces a process from the thread that hands out all calls. Where warnings are errors that
    # thread would end, and what waits for a result would wait for ever.
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
            # As many as loky takes into its queue at once: it stumbles over others where it is to kill.
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
    """`payload`, which holds `model`, as bytes for `read` in another process.

    Errors: whatever pickling raises where something in it cannot be sent (an open file, a lock, a generator).
    """
    cloudpickle = _cloudpickle()
    function = model
    while isinstance(function, partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    ours = module is not None and module.__name__.split(".")[0] == __name__.split(".")[0]
    if module is None or ours or module.__name__ == "__main__":
        return cloudpickle.dumps(payload)
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return cloudpickle.dumps(payload)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(payload)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def read(blob: bytes) -> Any:
    """What `written` was given. Only for bytes that another process of the same program wrote."""
    return pickle.loads(blob)


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        # joblib before 1.6 carries its own.
        cloudpickle = importlib.import_module("joblib.externals.cloudpickle")
    return cloudpickle


# The process in which a session was first opened. A child that was forked after it has this number from its parent.
_first: list[int] = []


def refuse_forked() -> None:
    """Note that this process computes, or refuse where it is the child of one that had computed before the fork.

    Raises
    ------
    UnsupportedError: a forked child.
    """
    if not _first:
        _first.append(os.getpid())
    elif _first[0] != os.getpid():
        raise UnsupportedError(
            message(
                "a process that was started afresh",
                f"process {os.getpid()}, which was forked from {_first[0]} after a fit there: the threads of JAX and "
                "torch do not survive a fork",
                "multiprocessing.get_context('spawn'), joblib, or forking before the first fit",
            )
        )
