"""Shell completion: models, methods, data sets, columns. Nothing here imports a framework or reads a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from ppl_bnn import zoo
from ppl_bnn.backends.protocol import SYSTEMS
from ppl_bnn.cli.plan import card_of
from ppl_bnn.core.errors import BNNError
from ppl_bnn.datasets import tables
from ppl_bnn.datasets.columns import header_of
from ppl_bnn.evaluation.outside.known import ESTIMATORS
from ppl_bnn.inference.registry import ROWS
from ppl_bnn.references import library
from ppl_bnn.zoo.studies import studies as known_studies


def _words(names: Callable[[], Iterable[str]], several: bool = False) -> Callable[[str], list[str]]:
    """Completion of one name, or of the last of several; those before it are kept, and not offered again."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        rest = [name for name in names() if name not in before.split(",")]
        return [f"{before}{comma}{name}" for name in _beginning(rest, last)]

    return complete


# The shell itself offers files if no model matches.
models = _words(zoo.names)
datasets = _words(tables.datasets)
studies = _words(known_studies)
references = _words(library.entries)
tasks = _words(lambda: tables.TASKS)
method = _words(lambda: ROWS)
methods = _words(lambda: [*ROWS, *ESTIMATORS], several=True)
# A system for all methods, or for one of them.
systems = _words(lambda: [*SYSTEMS, *(f"{name}={each}" for name in ROWS for each in SYSTEMS)], several=True)


def columns(context: typer.Context, incomplete: str) -> list[str]:
    """The columns of the CSV file named on the command line."""
    source = context.params.get("data")
    with contextlib.suppress(OSError, BNNError):
        if source and Path(source).is_file():
            return _beginning(header_of(Path(source)), incomplete)
    return []


def settings(context: typer.Context, incomplete: str) -> list[str]:
    """NAME= for each argument of the model named on the command line."""
    with contextlib.suppress(BNNError, OSError):
        card, _ = card_of(str(context.params.get("model") or "regression_mlp"), "show")
        return _beginning([f"{name}=" for name in card.arguments], incomplete)
    return []


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
