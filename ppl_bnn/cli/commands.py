"""All commands, in the order in which `--help` lists them, and the function that runs them."""

from __future__ import annotations

import sys

from ppl_bnn.cli import catalogue, compare, report
from ppl_bnn.cli.console import app, register

register(compare.compare)
register(report.report)
register(catalogue.advise)
register(catalogue.bench, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
register(catalogue.models)
register(catalogue.show)
register(catalogue.prior)
register(catalogue.data)


def main() -> None:
    """The entry point of `ppl-bnn` and of `python -m ppl_bnn`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a question mark, instead of failing with a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="ppl-bnn")
