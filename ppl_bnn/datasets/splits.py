"""Splits of a table into training and test rows, specified by name.

- "random:5@0.9": five random splits with 90 % of the rows for training, those of `Table.split` for the seeds 0 to 4;
  "random:5-9@0.9" are five others;
- "published": the splits that the literature uses for the table; "published:3" the first three, "published:5-9" five;
- "time@0.9": the first 90 % of the rows for training, the rest for testing, for rows in time order.

The name of a single split is "random@0.9[3]", "published[3]" or "time@0.9".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.datasets.tables import Table

_NAME = re.compile(
    r"(?P<kind>random|published|time)(:(?P<first>\d+)(-(?P<last>\d+))?)?(@(?P<share>0?\.\d+))?", re.ASCII
)
_EXAMPLE = "'random:5@0.9', 'published', 'published:3' or 'time@0.9'"


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers (0-based) of the training and the test rows.

    Parameters
    ----------
    name : str
        Name of the split, such as "random@0.9[3]".
    train, test : ndarray
        Row numbers.
    """

    name: str
    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class _Wanted:
    """A parsed name: numbers of the splits (None for all), and share of the training rows."""

    kind: str
    numbers: range | None
    share: float | None


def check(names: str | Sequence[str]) -> tuple[str, ...]:
    """Check names of splits.

    Parameters
    ----------
    names : str or sequence of str
        The names.

    Returns
    -------
    tuple of str
        The names.

    Raises
    ------
    InputError
        If a name cannot be parsed.
    """
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found or len(set(found)) < len(found):
        raise InputError.of("splits", "one name or more, each once", repr(names), _EXAMPLE)
    for name in found:
        _read(name)
    return found


def splits_of(table: Table, names: str | Sequence[str]) -> list[Split]:
    """The splits with these names, in that order.

    Parameters
    ----------
    table : Table
        The table.
    names : str or sequence of str
        The names.

    Returns
    -------
    list of Split
        The splits.

    Raises
    ------
    InputError
        For a name that cannot be parsed, published splits that the table does not have, random splits of rows in time
        order, which share values, or one split under two names.
    """
    found = [split for name in check(names) for split in _splits(table, _read(name))]
    called = [split.name for split in found]
    for name in called:
        if called.count(name) > 1:
            raise InputError.of("splits", "each split once", f"{name} twice", "ranges that do not overlap")
    return found


def _read(name: str) -> _Wanted:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise InputError.of("splits", "the name of splits", repr(name), _EXAMPLE)
    kind, first, last, share = match["kind"], match["first"], match["last"], match["share"]
    numbers = None
    if first is not None:
        numbers = range(int(first)) if last is None else range(int(first), int(last) + 1)
    needs = {"random": (True, True), "published": (None, False), "time": (False, True)}
    for needed, given in zip(needs[kind], (numbers is not None, share is not None), strict=True):
        if needed is not None and needed != given:
            raise InputError.of("splits", "the name of splits", repr(name), _EXAMPLE)
    if numbers is not None and len(numbers) == 0:
        raise InputError.of("splits", "one split or more", repr(name), _EXAMPLE)
    if share is not None and not 0.0 < float(share) < 1.0:
        raise InputError.of("splits", "a share strictly between 0 and 1", repr(name), _EXAMPLE)
    return _Wanted(kind, numbers, None if share is None else float(share))


def _splits(table: Table, wanted: _Wanted) -> list[Split]:
    if wanted.kind == "published":
        there = 0 if table.splits is None else len(table.splits.train)
        numbers = range(max(there, 1)) if wanted.numbers is None else wanted.numbers
        return [Split(f"published[{k}]", *table.published_split(k)) for k in numbers]
    assert wanted.share is not None
    if wanted.kind == "time":
        # The position of the cut does not depend on whether the table is marked as ordered.
        train = min(max(round(wanted.share * len(table.y)), 1), len(table.y) - 1)
        rows = np.arange(len(table.y))
        return [Split(f"time@{wanted.share:g}", rows[:train], rows[train:])]
    if table.ordered:
        raise InputError.of(
            "splits",
            f"a split in time of {table.name!r}, whose rows are in time order and share values",
            "random splits",
            f"'time@{wanted.share:g}'",
        )
    assert wanted.numbers is not None
    return [
        Split(f"random@{wanted.share:g}[{k}]", *table.split(k, 1.0 - wanted.share)) for k in wanted.numbers
    ]
