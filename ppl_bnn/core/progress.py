"""Progress reports of long computations. Every method receives a `Progress`, so no method prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.notebook.bars import NotebookTask, in_notebook


class Task(Protocol):
    """One progress bar: any number of calls of `update`, with finished units and current figures, then `close`."""

    def update(self, done: int, **figures: float) -> None: ...

    def close(self) -> None: ...


class Progress(Protocol):
    """A source of tasks."""

    def task(self, title: str, total: int) -> Task: ...


class Silent:
    """A progress without output, the default of the library. It is also its own task."""

    def task(self, title: str, total: int) -> Task:
        return self

    def update(self, done: int, **figures: float) -> None:
        pass

    def close(self) -> None:
        pass


class _BarTask:
    """A bar in a terminal; a line every 15 seconds elsewhere, such as in a log file."""

    def __init__(self, title: str, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = ("{task.description:<26}", "{task.percentage:>3.0f}%", "{task.fields[figures]}")
        name, share, figures = map(TextColumn, columns)
        console = Console(stderr=True)
        self._bar = Progress(
            name, BarColumn(bar_width=24), share, TimeElapsedColumn(), figures, console=console
        )
        self._title, self._total, self._done, self._figures = title, total, 0, ""
        self._printed = time.monotonic()
        self._terminal = console.is_terminal
        if self._terminal:
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, figures="")

    def update(self, done: int, **figures: float) -> None:
        self._done = done
        self._figures = "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
        if self._terminal:
            self._bar.update(self._task, completed=done, figures=self._figures)
        elif time.monotonic() - self._printed > 15.0:
            self._print(f"{done}/{self._total}")
            self._printed = time.monotonic()

    def close(self) -> None:
        if self._terminal:
            self._bar.stop()
        else:
            self._print("done" if self._done >= self._total else f"stopped at {self._done}/{self._total}")

    def _print(self, state: str) -> None:
        print(f"{self._title}: {state}  {self._figures}", file=sys.stderr, flush=True)


class Bars:
    """Progress bars: in the output of a notebook's cell, or on the error stream; plain lines if it is no terminal."""

    def task(self, title: str, total: int) -> Task:
        return NotebookTask(title, total) if in_notebook() else _BarTask(title, total)


@dataclass
class _Calls:
    """A progress that calls a function at every update of a task."""

    call: Callable[[str, int, int, dict[str, float]], Any]

    def task(self, title: str, total: int) -> Task:
        def update(done: int, **figures: float) -> None:
            self.call(title, done, total, figures)

        calling: Any = SimpleNamespace(update=update, close=Silent().close)
        return calling


def resolve(progress: Any) -> Progress:
    """The `Progress` for a caller's argument: True gives bars, False or None no output.

    A function is called as ``progress(title, done, total, figures)``, with figures a dict of floats, at every update.
    An object with `task` is a progress itself.
    """
    if progress is None or progress is False:
        return Silent()
    if progress is True:
        return Bars()
    if hasattr(progress, "task") and not isinstance(progress, type):
        return progress
    if callable(progress) and not isinstance(progress, type):
        return _Calls(progress)
    expected = "True, False, a function (title, done, total, figures) or a Progress"
    raise InputError.of("progress", expected, repr(progress), "progress=True")
