"""A lock that threads get in the order in which they ask.

Pyro and NumPyro each keep one stack of effect handlers for all threads. The thread that uses it holds a `Turn`, and
releases it while a user's function is called.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ppl_bnn.core.progress import Progress, Recording, Silent, Task, ended_by_callback

# Seconds for which a thread keeps its turn while others wait: a change of threads costs some microseconds.
SLICE = 0.005


class Turn:
    """A reentrant lock that goes to the thread that has waited longest.

    A `threading.RLock` that is released and acquired again at once stays with its thread, and waiting threads starve.
    """

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            # The threads that held it or waited for it do not exist in a forked process.
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._since = 0.0
        # The threads that wait, in the order in which they asked.
        self._waiting: list[int] = []

    @property
    def held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    @property
    def wanted(self) -> bool:
        """Whether another thread waits, and the time slice of this one is over."""
        return bool(self._waiting) and time.perf_counter() - self._since > SLICE

    def acquire(self, depth: int = 1) -> None:
        """Acquire the lock `depth` times; returns when this thread holds it.

        KeyboardInterrupt: this thread was interrupted while it waited, and does not hold the lock.
        """
        me = threading.get_ident()
        if self._owner != me:
            with self._changed:
                self._waiting.append(me)
                try:
                    self._changed.wait_for(lambda: self._owner is None and self._waiting[0] == me)
                    self._owner, self._since = me, time.perf_counter()
                finally:
                    self._waiting.remove(me)
                    # After an interrupt the next thread may be the first that waits.
                    self._changed.notify_all()
        self._depth += depth

    def release(self) -> None:
        """Undo one acquisition."""
        self._depth -= 1
        if self._depth == 0:
            self._free()

    def release_all(self) -> int:
        """Undo all acquisitions; returns their number, for `acquire`."""
        depth, self._depth = self._depth, 0
        self._free()
        return depth

    def _free(self) -> None:
        with self._changed:
            self._owner = None
            self._changed.notify_all()

    def __enter__(self) -> Turn:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def progress_outside(progress: Progress, outside: Callable[[], AbstractContextManager[None]]) -> Progress:
    """Wrap a progress so that each of its calls runs in `outside()`: it may be a user's own object and run any code."""
    harmless = outside is nullcontext or isinstance(progress, Silent | _ProgressOutside)
    return progress if harmless else _ProgressOutside(progress, outside)


class _ProgressOutside(Recording):
    """A progress, or one of its tasks."""

    def __init__(self, inner: Any, outside: Callable[[], AbstractContextManager[None]]):
        self._inner, self._outside = inner, outside

    @property
    def ended(self) -> tuple[str, ...]:
        return ended_by_callback(self._inner)

    def task(self, title: str, total: int) -> Task:
        with self._outside():
            return _ProgressOutside(self._inner.task(title, total), self._outside)

    def update(self, done: int, **figures: Any) -> bool | None:
        with self._outside():
            return self._inner.update(done, **figures)

    def close(self) -> None:
        with self._outside():
            self._inner.close()
