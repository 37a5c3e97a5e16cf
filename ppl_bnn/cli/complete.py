"""Shell completion: models, methods, data sets, columns. Nothing here imports a framework or reads a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import typer

from ppl_bnn.cli.plan import card_of
from ppl_bnn.core.errors import BNNError
from ppl_bnn.inference.registry import ROWS


def models(incomplete: str) -> list[str]:
    """Models of the zoo. The shell itself offers files if nothing here matches."""
    from ppl_bnn import zoo

    return _beginning(zoo.names(), incomplete)


def datasets(incomplete: str) -> list[str]:
    """Data sets by name."""
    from ppl_bnn.datasets import tables as data

    return _beginning(data.datasets(), incomplete)


def studies(incomplete: str) -> list[str]:
    """Studies of the project."""
    from ppl_bnn.zoo import studies as listed

    return _beginning(listed.studies(), incomplete)


def method(incomplete: str) -> list[str]:
    """One method."""
    return _beginning(ROWS, incomplete)


def methods(incomplete: str) -> list[str]:
    """The last of several methods; those before it are kept."""
    before, comma, last = incomplete.rpartition(",")
    rest = [name for name in ROWS if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in _beginning(rest, last)]


def systems(incomplete: str) -> list[str]:
    """A system for all methods, or for one of them."""
    from ppl_bnn.backends.protocol import SYSTEMS

    before, comma, last = incomplete.rpartition(",")
    words = [*SYSTEMS, *(f"{name}={system}" for name in ROWS for system in SYSTEMS)]
    return [f"{before}{comma}{word}" for word in _beginning(words, last)]


def tasks(incomplete: str) -> list[str]:
    """Regression or classification."""
    from ppl_bnn.datasets.tables import TASKS

    return _beginning(TASKS, incomplete)


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
