"""Progress reports of long computations, and callbacks, which may end them.

Every method receives a `Progress`, so no method prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ppl_bnn.core.errors import BudgetError, InputError
from ppl_bnn.core.notebook.bars import NotebookTask, in_notebook


class Task(Protocol):
    """One progress bar: any number of calls of `update`, with finished units and current figures, then `close`.

    `update` returns True if a callback asks for the end.
    """

    def update(self, done: int, **figures: Any) -> bool | None: ...

    def close(self) -> None: ...


class Progress(Protocol):
    """A source of tasks."""

    def task(self, title: str, total: int) -> Task: ...


class Silent:
    """A progress without output, the default of the library. It is also its own task."""

    def task(self, title: str, total: int) -> Task:
        return self

    def update(self, done: int, **figures: Any) -> None:
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


@dataclass(frozen=True)
class Step:
    """What a callback of `fit` is called with.

    Parameters
    ----------
    title : str
        The part of the fit that reports, such as "SVI (numpyro)". An ensemble has one for each member, and a start by
        another method has its own.
    done, total : int
        Finished steps, and all. A sampler counts the transitions of all chains, with the warm-up.
    figures : dict of str to float
        Current figures, such as "loss", "elbo" or "divergences".
    draws : callable
        Returns the draws so far, of which every chain has the same number: a dict of the name of a site to an array
        (chains, draws, ...) in the units of the fit. It is empty during the warm-up, for methods that do not sample,
        for chains of Pyro, and for those of several fits at once.

    Attributes
    ----------
    loss : float or None
        The mean loss of the latest steps, in nats; minus the ELBO of a variational fit. None for a sampler.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> model = bnn.zoo.load("linear_regression")
    >>> method = bnn.SVI(steps=20_000)
    >>> def enough(step):
    ...     return step.done >= 400
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True, callback=enough)
    >>> len(posterior.info.history["loss"]) < method.steps
    True
    """

    title: str
    done: int
    total: int
    figures: Mapping[str, float]
    draws: Callable[[], Mapping[str, np.ndarray]] = field(default_factory=lambda: dict, repr=False)

    @property
    def loss(self) -> float | None:
        """The mean loss of the latest steps; minus the ELBO of a variational fit; None for a sampler."""
        bound = self.figures.get("elbo")
        return self.figures.get("loss") if bound is None else -bound


class Recording:
    """A progress whose `ended` lists which of its tasks a callback has ended, and where."""


@dataclass
class Watched(Recording):
    """A progress that also calls `callback` with a `Step`, and records in `ended` which tasks it ended, and where."""

    inner: Progress
    callback: Callable[[Step], bool | None]
    ended: list[str] = field(default_factory=list)

    def task(self, title: str, total: int) -> Task:
        return WatchedTask(self, self.inner.task(title, total), title, total)


@dataclass
class WatchedTask:
    """A task of `Watched`; a sampler sets `draws`, from which a `Step` has the draws so far."""

    progress: Watched
    inner: Task
    title: str
    total: int
    draws: Callable[[], Mapping[str, np.ndarray]] = dict
    asked: bool = False

    def update(self, done: int, **figures: Any) -> bool:
        self.inner.update(done, **figures)
        if self.asked:
            return True
        answer = self.progress.callback(Step(self.title, done, self.total, figures, self.draws))
        good = answer is None or isinstance(answer, bool | np.bool)
        InputError.check(good, "callback", "True to end, or None", repr(answer), "return bool(...)")
        self.asked = bool(answer)
        # The last step is an end by itself.
        if self.asked and done < self.total:
            self.progress.ended.append(f"{self.title} was ended by the callback after {done} of {self.total}")
        return self.asked

    def close(self) -> None:
        self.inner.close()


def ended_by_callback(progress: Progress) -> tuple[str, ...]:
    """Where a callback ended parts of a fit, in words."""
    # An object of a caller may have an attribute of this name.
    record: Any = progress
    return tuple(record.ended) if isinstance(progress, Recording) else ()


def ended_early(name: str, done: str, first: str = "the first draw of every chain") -> BudgetError:
    """The error for a callback that ends a fit before there is anything to keep."""
    return BudgetError.of(f"{name} callback", f"True after {first}", f"True after {done}", "a later end")


def resolve(progress: Any, callback: Callable[[Step], bool | None] | None = None) -> Progress:
    """The `Progress` for a caller's arguments: True gives bars, False or None no output.

    An object with `task` is a progress itself. A callback makes it `Watched`.
    """
    if callback is not None:
        good = callable(callback) and not isinstance(callback, type)
        InputError.check(good, "callback", "a function of one step", repr(callback), "callback=print")
        return Watched(resolve(progress), callback)
    if progress is None or progress is False:
        return Silent()
    if progress is True:
        return Bars()
    if hasattr(progress, "task") and not isinstance(progress, type):
        return progress
    advice = "progress=True, or callback= for a function"
    raise InputError.of("progress", "True, False or a Progress", repr(progress), advice)
