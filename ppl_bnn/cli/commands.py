"""The application: all commands, in the order in which `--help` lists them, and how they end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from ppl_bnn import __version__
from ppl_bnn.cli import catalogue, compare, references, report
from ppl_bnn.cli.console import in_options, new_console
from ppl_bnn.core.errors import BNNError
from ppl_bnn.core.names import clean_lines

app = typer.Typer(
    name="ppl-bnn",
    help="Bayesian neural networks: one model, several methods of inference, one comparison.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def register(function: Callable[..., None], **settings: Any) -> None:
    """Register a command that reports the library's errors as one red line (exit code 2; Ctrl-C 130, SIGTERM 143)."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        signals: list[int] = []
        try:
            with _ended_as_by_ctrl_c(signals):
                function(*args, **kwargs)
        except BNNError as error:
            text, status = in_options(str(error)), 2
        except BrokenPipeError:
            raise
        except OSError as error:
            text, status = f"{type(error).__name__}: {error}", 2
        except KeyboardInterrupt as error:
            text, status = str(error) or "interrupted", 128 + (signals or [signal.SIGINT])[0]
        else:
            return
        from rich.text import Text

        line = Text.assemble(("error: ", "bold red"), (clean_lines(text), "red"))
        new_console(error=True).print(line, soft_wrap=True)
        raise typer.Exit(status)

    app.command(**settings)(run)


@contextlib.contextmanager
def _ended_as_by_ctrl_c(signals: list[int]) -> Iterator[None]:
    """Make SIGTERM end a command like Ctrl-C, so that finished results are kept. It is recorded in `signals`."""

    def interrupt(number: int, frame: Any) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    # Python receives signals in its main thread only; an existing handler of SIGTERM is kept.
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ppl-bnn {__version__}")
        raise typer.Exit


_VERSION: Any = typer.Option(
    "--version", callback=_version, is_eager=True, help="Print the version and leave."
)


@app.callback()
def _root(version: Annotated[bool, _VERSION] = False) -> None:
    pass


register(compare.compare)
register(report.report)
register(catalogue.advise)
register(catalogue.bench, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
register(catalogue.models)
register(catalogue.show)
register(catalogue.prior)
register(catalogue.data)
register(references.references)
register(references.grade)


def main() -> None:
    """The entry point of `ppl-bnn` and of `python -m ppl_bnn`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a question mark, instead of failing with a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    # Most objects are those of imported modules, which live as long as the process: the garbage collector looks at them
    # less often, and they are not taken down one by one at the end, which takes seconds.
    gc.set_threshold(20_000, 20, 20)
    try:
        app(prog_name="ppl-bnn")
    except SystemExit as end:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else bool(end.code))
