"""All commands, in the order in which `--help` lists them, and the function that runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ppl_bnn.cli import catalogue, compare, report
from ppl_bnn.cli.console import app

# A module registers its commands when it is imported; help groups them by purpose.
ORDER: list[Callable[..., None] | None] = [
    compare.compare,
    report.report,
    catalogue.advise,
    catalogue.bench,
    catalogue.models,
    catalogue.show,
    catalogue.prior,
    catalogue.data,
]
app.registered_commands.sort(key=lambda command: ORDER.index(command.callback))


def main() -> None:
    """The entry point of `ppl-bnn` and of `python -m ppl_bnn`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a question mark, instead of failing with a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="ppl-bnn")
