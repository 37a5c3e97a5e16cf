"""Sources of the data sets: origin, licence, size and SHA-256 of every file. No data is loaded here.

They are in `sources.toml`. Upstream is a file of a public GitHub repository at one commit. Local is the copy in the
folder `PPL_BNN_DATA`; the regression tables of UCI have commas and a header line there. `readers.py` reads both.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DatasetCard:
    """Description of a data set, available before it is loaded.

    Parameters
    ----------
    name : str
        Name of the data set.
    task : str
        "regression" or "classification".
    rows, features : int
        Numbers of rows and features.
    source, licence : str
        Where it comes from, and its licence.
    bytes : int
        Size of its download, 0 if there is none.
    where : str
        Location of the files.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> card = bnn.data.datasets()["diabetes"]
    >>> card.task, card.rows, card.features
    ('regression', 442, 10)
    """

    name: str
    task: str
    rows: int
    features: int
    source: str
    licence: str
    bytes: int
    where: str


@dataclass(frozen=True)
class Source:
    """One data set: its card, and the layout and location of its files.

    Parameters
    ----------
    name, task, licence, description : str
        Entries of the card.
    rows, features : int
        Numbers of rows and features.
    layout : str
        Layout of the files.
    repository, commit : str
        The public repository, and the commit.
    upstream : tuple
        Entries (path in `repository`, SHA-256, bytes).
    local : mapping of str to tuple of str
        Path below PPL_BNN_DATA -> the SHA-256 values that it may have.
    columns : tuple of str
        Names of the columns of a file without a header line or of a simulated table, the target last.
    options : mapping
        Arguments of `load`, with their defaults.
    origin : str
        Origin of a data set without files of its own: the source of a simulation, or the name of another data set.
    ordered : bool
        Whether the rows are in time order and overlap.
    """

    name: str
    task: str
    rows: int
    features: int
    licence: str
    description: str
    layout: str = "bundled"
    repository: str = ""
    commit: str = ""
    upstream: tuple[tuple[str, str, int], ...] = ()
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    ordered: bool = False

    @property
    def card(self) -> DatasetCard:
        """The card of the data set."""
        origin, where = "scikit-learn", "bundled with scikit-learn"
        if self.layout == "simulated":
            origin, where = f"simulated: {self.origin}", "simulated"
        elif self.origin:
            origin = f"scikit-learn, its {self.origin}"
        if self.upstream:
            paths = ", ".join(path for path, _, _ in self.upstream)
            origin, where = f"github.com/{self.repository} at {self.commit[:7]}: {paths}", "downloaded"
        size = sum(count for _, _, count in self.upstream)
        return DatasetCard(self.name, self.task, self.rows, self.features, origin, self.licence, size, where)


def _read_sources() -> dict[str, Source]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for table in tables.values():
        table["columns"] = tuple(table.get("columns", "").split())
        table["upstream"] = tuple(map(tuple, table.get("upstream", ())))
        table["local"] = {path: tuple(digests) for path, digests in table.get("local", {}).items()}
    return {name: Source(name, **table) for name, table in tables.items()}


SOURCES = _read_sources()
