"""Progress reports of long computations.

A method reports to a `Progress`. The caller decides whether reports are shown, stored or ignored. Every method receives
a `Progress`, so no method prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from ppl_bnn.core.errors import InputError


class Task(Protocol):
    """One progress bar.

    Call ``update(done, **figures)`` any number of times, with the number of finished units and current figures, and
    `close` once.
    """

    def update(self, done: int, **figures: float) -> None: ...

    def close(self) -> None: ...


class Progress(Protocol):
    """A source of tasks."""

    def task(self, title: str, total: int) -> Task: ...


class SilentTask:
    """A task without output."""

    def update(self, done: int, **figures: float) -> None:
        pass

    def close(self) -> None:
        pass


class Silent:
    """A progress without output, the default of the library."""

    def task(self, title: str, total: int) -> Task:
        return SilentTask()


class _BarTask:
    def __init__(self, title: str, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            transient=False,
        )
        self._total = total
        self._terminal = self._bar.console.is_terminal
        self._title = title
        self._said = time.monotonic()
        self._latest = ""
        self._done = 0
        if self._terminal:
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, figures="")

    def update(self, done: int, **figures: float) -> None:
        self._done = done
        self._latest = "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
        if self._terminal:
            self._bar.update(self._task, completed=done, figures=self._latest)
        elif time.monotonic() - self._said > 15.0:
            # A log file gets an occasional line instead of a bar that is redrawn ten times a second.
            print(f"{self._title}: {done}/{self._total}  {self._latest}", file=sys.stderr, flush=True)
            self._said = time.monotonic()

    def close(self) -> None:
        if self._terminal:
            self._bar.stop()
        else:
            how = "done" if self._done >= self._total else f"stopped at {self._done}/{self._total}"
            print(f"{self._title}: {how}  {self._latest}", file=sys.stderr, flush=True)


class Bars:
    """Progress bars on the error stream; plain lines if it is not a terminal."""

    def task(self, title: str, total: int) -> Task:
        return _BarTask(title, total)


class _Told:
    """A progress that calls a function."""

    def __init__(self, call: Callable[[str, int, int, dict[str, float]], Any]):
        self._call = call

    def task(self, title: str, total: int) -> Task:
        return _ToldTask(self._call, title, total)


class _ToldTask(SilentTask):
    def __init__(self, call: Callable[[str, int, int, dict[str, float]], Any], title: str, total: int):
        self._call, self._title, self._total = call, title, total

    def update(self, done: int, **figures: float) -> None:
        self._call(self._title, done, self._total, figures)


def resolve(progress: Any) -> Progress:
    """The `Progress` for a caller's argument.

    Parameters
    ----------
    progress
        True for bars, False or None for no output. A function is called as ``progress(title, done, total, figures)``,
        with figures a dict of floats, at every update. An object with `task` is used as a progress itself.

    Returns
    -------
    Progress
        The progress.

    Raises
    ------
    InputError
        For anything else.
    """
    if progress is None or progress is False:
        return Silent()
    if progress is True:
        return Bars()
    if hasattr(progress, "task") and not isinstance(progress, type):
        return progress
    if callable(progress) and not isinstance(progress, type):
        return _Told(progress)
    raise InputError.of(
        "progress",
        "True, False, a function (title, done, total, figures) or a Progress",
        repr(progress),
        "progress=True",
    )
