"""Shell completion: models, methods, data sets, columns. Nothing here imports a framework or reads a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from ppl_bnn.cli.plan import card_of
from ppl_bnn.core.errors import BNNError
from ppl_bnn.inference.registry import ROWS


def _words(names: Callable[[], Iterable[str]], several: bool = False) -> Callable[[str], list[str]]:
    """Completion of one name, or of the last of several; those before it are kept, and not offered again."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        rest = [name for name in names() if name not in before.split(",")]
        return [f"{before}{comma}{name}" for name in _beginning(rest, last)]

    return complete


def _models() -> Iterable[str]:
    from ppl_bnn import zoo

    return zoo.names()


def _datasets() -> Iterable[str]:
    from ppl_bnn.datasets import tables

    return tables.datasets()


def _studies() -> Iterable[str]:
    from ppl_bnn.zoo import studies

    return studies.studies()


def _tasks() -> Iterable[str]:
    from ppl_bnn.datasets.tables import TASKS

    return TASKS


def _systems() -> list[str]:
    from ppl_bnn.backends.protocol import SYSTEMS

    return [*SYSTEMS, *(f"{name}={system}" for name in ROWS for system in SYSTEMS)]


# The shell itself offers files if no model matches.
models = _words(_models)
datasets = _words(_datasets)
studies = _words(_studies)
tasks = _words(_tasks)
method = _words(lambda: ROWS)
methods = _words(lambda: ROWS, several=True)
# A system for all methods, or for one of them.
systems = _words(_systems, several=True)


def columns(context: typer.Context, incomplete: str) -> list[str]:
    """The columns of the CSV file named on the command line."""
    from ppl_bnn.datasets.columns import header_of

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
