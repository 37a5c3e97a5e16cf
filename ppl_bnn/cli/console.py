"""Parts shared by all commands: the console, what is shown on it, and lists."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ppl_bnn.core.errors import BNNError, InputError
from ppl_bnn.core.names import clean
from ppl_bnn.core.progress import Bars, Task

if TYPE_CHECKING:
    from rich.console import Console

    from ppl_bnn.cli.plan import Plan
    from ppl_bnn.datasets.tables import Table

NOTES, REPORT = "comparison.md", "report.html"
WIDTH = 100


def new_console(error: bool = False) -> Console:
    """A console for standard output or errors, of 100 columns if it is no terminal and COLUMNS is not set."""
    from rich.console import Console

    console = Console(stderr=error, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is: neither wrapped nor read as markup."""
    console.print(text, markup=False, style=style, soft_wrap=True)


@contextlib.contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """On Ctrl-C, name the folder with the finished results, if there are any and the error does not name it itself."""
    try:
        yield
    except KeyboardInterrupt as error:
        if str(error) or not (folder.is_dir() and any(entry.name[0] != "." for entry in folder.iterdir())):
            raise
        raise KeyboardInterrupt(f"interrupted; finished results are in {folder}") from None


def in_options(text: str) -> str:
    """The library's advice, which is written for Python, in terms of command line options."""
    text = re.sub(r"""\b(task|device)=["'](\w+)["']""", r"--\1 \2", text)
    return re.sub(r"""\bdrop=\[(["'].*?["'])\]""", r"--drop \1", text)


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise InputError.of("--seed", "a whole number from 0 to 2**31 - 1", str(seed), "--seed 0")


def show_reading(console: Console, table: Table) -> None:
    """Print one line on how each column of a file was read."""
    if table.reading:
        say(console, f"read: {in_options(table.reading)}", "dim")


def show_prior_problems(console: Console, plan: Plan) -> None:
    """Print one line for each problem of the prior; other errors are reported by the fit."""
    if plan.parameters is None:
        # A plain model of a system would have to be compiled for this.
        return
    from ppl_bnn.diagnostics.prior_check import check_prior

    x, y = plan.table.x[plan.train], plan.table.y[plan.train]
    with contextlib.suppress(BNNError):
        for line in check_prior(plan.model, x, y, standardise=True).warnings:
            say(console, f"warning: {line}", "yellow")


# --- progress and warnings --------------------------------------------------------------------------------


def remember_compilations() -> None:
    """Keep JAX's compiled programs on disk; without JAX or disk space nothing happens."""
    with contextlib.suppress(ImportError, OSError):
        from ppl_bnn.backends.numpyro import enable_compilation_cache

        enable_compilation_cache()


@contextlib.contextmanager
def warnings_shown(console: Console) -> Iterator[None]:
    """Show warnings meant for the user, each once and in one line; internal warnings of libraries are left out."""
    shown: set[str] = set()

    def show(text: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        words = clean(text)
        if issubclass(category, UserWarning) and words not in shown:
            shown.add(words)
            say(console, f"warning: {words}", "yellow")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def write_report(console: Console, result: Any, file: Path, title: str | None = None) -> Path:
    """Write the page of a comparison or of a grid, with its warnings on the console; returns its path."""
    from ppl_bnn.reporting.page import report

    with warnings_shown(console):
        return report(result, file, title=title)


class StatusBars(Bars):
    """Progress bars, and between two of them a status text while predictions and diagnoses are computed."""

    def __init__(self, console: Console):
        self._console, self._status = console, contextlib.ExitStack()

    def task(self, title: str, total: int) -> Task:
        self.rest()
        bar = super().task(title, total)

        def close() -> None:
            bar.close()
            self.rest()
            if self._console.is_terminal:
                words = f"{title}: prediction, diagnosis, scores"
                self._status.enter_context(self._console.status(words))

        shown: Any = SimpleNamespace(update=bar.update, close=close)
        return shown

    def rest(self) -> None:
        """Clear the status text."""
        self._status.close()


# --- lists ------------------------------------------------------------------------------------------------


def digits(number: int) -> str:
    """A number with separated thousands."""
    return f"{number:,}".replace(",", " ")


def listing(headings: Sequence[str], rows: Iterable[Sequence[Any]], right: Container[int] = ()) -> Any:
    """A table of texts, which are not read as markup; `right` has the numbers of the columns of numbers."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if index in right else "left", no_wrap=index == 0)
    for row in rows:
        grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return grid
