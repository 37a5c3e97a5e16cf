"""Splits of a table into training and test rows, specified by name.

- "random:5@0.9": five random splits with 90 % of the rows for training, those of `Table.split` for the seeds 0 to 4;
  "random:5-9@0.9" are five others;
- "published": the splits that the literature uses for the table; "published:3" the first three, "published:5-9" five;
- "time@0.9": the first 90 % of the rows for training, the rest for testing, for rows in time order.

The name of a single split is "random@0.9[3]", "published[3]" or "time@0.9".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.datasets.tables import Table

_NAME = re.compile(r"(random|published|time)(?::(\d+)(?:-(\d+))?)?(?:@(0?\.\d+))?", re.ASCII)
# Kind -> the parts that its name may have: whether numbers, and whether a share.
_PARTS = {"random": {(True, True)}, "published": {(True, False), (False, False)}, "time": {(False, True)}}
_EXAMPLE = "'random:5@0.9', 'published', 'published:3' or 'time@0.9'"


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers (0-based) of the training and the test rows; `name` is that of the split, such as "random@0.9[3]"."""

    name: str
    train: np.ndarray
    test: np.ndarray


def check(names: str | Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple, after a check that each can be parsed."""
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found or len(set(found)) < len(found):
        raise InputError.of("splits", "one name or more, each once", repr(names), _EXAMPLE)
    for name in found:
        _parse(name)
    return found


def splits_of(table: Table, names: str | Sequence[str]) -> list[Split]:
    """The splits of a table with these names, in that order.

    Raises InputError for a name that cannot be parsed, published splits that the table does not have, random splits of
    rows in time order, which share values, or one split under two names.
    """
    found = [split for name in check(names) for split in _splits(table, *_parse(name))]
    for name, count in Counter(split.name for split in found).items():
        if count > 1:
            raise InputError.of("splits", "each split once", f"{name} twice", "ranges that do not overlap")
    return found


def _parse(name: str) -> tuple[str, range | None, float]:
    """Kind, numbers of the splits (None for all), and share of training rows (NaN for published splits)."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or (match[2] is not None, match[4] is not None) not in _PARTS[match[1]]:
        raise InputError.of("splits", "the name of splits", repr(name), _EXAMPLE)
    kind, first, last, of_rows = match.groups()
    numbers = None
    if first is not None:
        numbers = range(int(first)) if last is None else range(int(first), int(last) + 1)
    InputError.check(numbers is None or numbers, "splits", "one split or more", repr(name), _EXAMPLE)
    share = float(of_rows or "nan")
    InputError.check(share, "splits", "a share strictly between 0 and 1", repr(name), _EXAMPLE)
    return kind, numbers, share


def _splits(table: Table, kind: str, numbers: range | None, share: float) -> list[Split]:
    if kind == "published":
        there = 0 if table.splits is None else len(table.splits.train)
        chosen = range(max(there, 1)) if numbers is None else numbers
        return [Split(f"published[{k}]", *table.published_split(k)) for k in chosen]
    if kind == "time":
        # The position of the cut does not depend on whether the table is marked as ordered.
        train = min(max(round(share * len(table.y)), 1), len(table.y) - 1)
        rows = np.arange(len(table.y))
        return [Split(f"time@{share:g}", rows[:train], rows[train:])]
    expected = f"a split in time of {table.name!r}, whose rows are in time order and share values"
    InputError.check(not table.ordered, "splits", expected, "random splits", f"'time@{share:g}'")
    return [Split(f"random@{share:g}[{k}]", *table.split(k, 1.0 - share)) for k in numbers or ()]
