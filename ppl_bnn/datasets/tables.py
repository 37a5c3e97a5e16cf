"""Tables: scikit-learn's bundled ones, simulated ones, downloaded ones with SHA-256, or any CSV file.

`load(name)` and `read_csv(path, target)` return a `Table` in the units of its source: values are not standardised,
shuffled or subsampled here. `datasets()` lists the data sets without loading them. `SOURCES`
has the files of each, `TASKS` the names of the tasks.

The files of a table come from one of two places, and are checked against their SHA-256:

- the folder that the environment variable `PPL_BNN_DATA` names, if it is set. It holds `uci/<name>/data.csv`
  (one header line, target last), `alzheimers/alzheimers_disease_data.csv`, `mnist/*-ubyte.gz`,
  `kmnist/kmnist-test-{imgs,labels}.npz`, `toy/snelson_{train,test_inputs}.csv`;
- otherwise the public repository named on its card, at one commit, downloaded once into pooch's cache folder for
  `ppl-bnn` (or the folder in `PPL_BNN_CACHE`). `PPL_BNN_DATA_URL` names a mirror of
  `https://raw.githubusercontent.com` with the same layout `owner/name/commit/path`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.errors import InputError, check_known
from ppl_bnn.core.names import clean, clean_all, clean_lines
from ppl_bnn.datasets.columns import TASKS, check_different, read_columns
from ppl_bnn.datasets.readers import ChecksumError, DownloadError, Splits, read
from ppl_bnn.datasets.sources import SOURCES, DatasetCard

__all__ = [
    "SOURCES", "TASKS", "ChecksumError", "DatasetCard", "DownloadError", "Splits", "Table", "datasets", "load",
    "name_of", "read_csv",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Table:
    """One data set, in the units of its source.

    Parameters
    ----------
    name : str
        Name of the data set.
    x : ndarray
        Inputs (N, F), float64.
    y : ndarray
        Targets (N,). Regression: float64, (N, K) where a row has several numbers; for survival data the time, and 1 for
        an event or 0 for censoring. Classification: int64 labels 0..K-1, whose meanings are `class_names`.
    feature_names : list of str
        Names of the features, cleaned (`names.clean`).
    target_name : str
        Name of the target, cleaned.
    task : str
        "regression" or "classification".
    class_names : tuple of str, optional
        Meanings of the labels, cleaned.
    description, provenance, licence : str
        Description, origin and licence.
    splits : Splits, optional
        The published splits.
    test_inputs : ndarray, optional
        Inputs (M, F) without targets at which the source asks for predictions.
    ordered : bool, default False
        Whether the rows are in time order and share values, like lags of one series, so that only a split in time is
        valid.
    reading : str
        For a file, one line that states how each column was read.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table = bnn.data.load("diabetes")
    >>> table.x.shape, table.feature_names[:3], table.target_name
    ((442, 10), ['age', 'sex', 'bmi'], 'disease_progression')
    >>> train, test = table.split(seed=0)
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    feature_names: list[str]
    target_name: str
    task: str
    class_names: tuple[str, ...] | None = None
    description: str = ""
    provenance: str = ""
    licence: str = ""
    splits: Splits | None = None
    test_inputs: np.ndarray | None = None
    ordered: bool = False
    reading: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "target_name"):
            object.__setattr__(self, name, clean(getattr(self, name)))
        for name in ("description", "provenance", "licence", "reading"):
            object.__setattr__(self, name, clean_lines(getattr(self, name)))
        object.__setattr__(self, "feature_names", [clean(name) for name in self.feature_names])
        object.__setattr__(self, "class_names", clean_all(self.class_names))
        check_known("task", [self.task], TASKS)
        several = self.task == "regression" and self.y.ndim == 2 and self.y.shape[1] > 1
        good = self.x.shape == (len(self.y), len(self.feature_names)) and (self.y.ndim == 1 or several)
        usual = "x of shape (N, F), y of shape (N,) and F feature names"
        expected = f"{usual}, or for regression y of shape (N, K)"
        got = f"x {self.x.shape}, y {self.y.shape} and {len(self.feature_names)} names"
        InputError.check(good, "", expected, got, "x[:, None] or y.ravel() for a single column")
        check_different(self.feature_names, f"table {self.name!r}")

    def __repr__(self) -> str:
        rows, columns = self.x.shape
        more = f" and {columns - 8} more" if columns > 8 else ""
        classes = "" if self.class_names is None else f" ({len(self.class_names)} classes)"
        return (
            f"Table({self.name!r}, {self.task}, {rows} rows, {columns} features)\n"
            f"  target: {self.target_name}{classes}\n"
            f"  features: {', '.join(self.feature_names[:8])}{more}"
        )

    def card(self) -> dict[str, Any]:
        """Description of the table in plain values. Unknown entries are absent.

        Returns
        -------
        dict
            `name`, `task`, `description` (with the units, where the source gives them), `rows`, `features` (their
            number), `feature_names`, `target_name`, `class_names`, `published_splits` (their number), `ordered`,
            `provenance`, `licence`, and `hash`, the SHA-256 of x and y.
        """
        known = {
            "name": self.name,
            "task": self.task,
            "description": self.description,
            "rows": len(self.y),
            "features": len(self.feature_names),
            "feature_names": list(self.feature_names),
            "target_name": self.target_name,
            "class_names": list(self.class_names or ()),
            "published_splits": 0 if self.splits is None else len(self.splits.train),
            "ordered": self.ordered,
            "provenance": self.provenance,
            "licence": self.licence,
            "hash": checks.data_hash(self.x, self.y),
        }
        return {name: value for name, value in known.items() if value}

    def split(self, seed: int = 0, test_fraction: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers of one random split, the same for the same seed.

        A permutation is drawn from ``numpy.random.default_rng(seed)``. Its first ``round(test_fraction N)`` rows are
        the test rows, at least one on either side. Classes are not stratified. For rows in time order (`ordered`) the
        last rows are the test rows, for any seed.

        Parameters
        ----------
        seed : int, default 0
            Seed of the permutation.
        test_fraction : float, default 0.2
            Share of the test rows.

        Returns
        -------
        train, test : ndarray
            Row numbers.
        """
        rows = len(self.y)
        good = 0.0 < test_fraction < 1.0 and rows > 1
        expected = "a test fraction strictly between 0 and 1 and at least two rows"
        got = f"test_fraction={test_fraction!r} and {rows} rows"
        InputError.check(good, "", expected, got, "test_fraction=0.2")
        test = min(max(round(test_fraction * rows), 1), rows - 1)
        if self.ordered:
            return np.arange(rows - test), np.arange(rows - test, rows)
        order = np.random.default_rng(seed).permutation(rows)
        return order[test:], order[:test]

    def published_split(self, k: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers of the k-th split that the literature uses for this table.

        Parameters
        ----------
        k : int, default 0
            Number of the split, 0-based.

        Returns
        -------
        train, test : ndarray
            Row numbers.

        Raises
        ------
        InputError
            If there is no such split.
        """
        if self.splits is None:
            got = f"{self.name!r}, which has none"
            raise InputError.of("", "a table with published splits", got, "table.split(seed)")
        count = len(self.splits.train)
        expected = f"a split from 0 to {count - 1} of {self.name!r}"
        InputError.check(0 <= k < count, "", expected, repr(k), "k=0")
        return self.splits.train[k], self.splits.test[k]


def datasets() -> dict[str, DatasetCard]:
    """The cards of all data sets by name. No data is loaded.

    Returns
    -------
    dict of str to DatasetCard
        Name -> card.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> sorted(bnn.data.datasets())[:2]
    ['airfoil', 'alzheimers']
    """
    return {name: source.card for name, source in SOURCES.items()}


def load(name: str, **options: Any) -> Table:
    """The data set of that name.

    Parameters
    ----------
    name : str
        Name of a data set (see `datasets`).
    **options
        ``load("mnist", part="all" | "train" | "test")`` (all: 70 000 rows whose one published split is 60 000 / 10 000;
        "test" downloads only the test files). ``load("bikesharing", instant=True)`` keeps the running record number,
        which is left out by default.

    Returns
    -------
    Table
        The data set.

    Raises
    ------
    UnknownNameError
        For a name or option that does not exist.
    ChecksumError
        If a file differs from the known one.
    DownloadError
        If a file cannot be obtained.
    InputError
        If the folder in PPL_BNN_DATA lacks the data set.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.data.load("iris").class_names
    ('setosa', 'versicolor', 'virginica')
    """
    check_known("data set", [name], SOURCES)
    source = SOURCES[name]
    if options and not source.options:
        got = repr(next(iter(options)))
        raise InputError.of("", f"no option for data set {name!r}", got, f"load({name!r})")
    check_known(f"option of data set {name!r}", options, source.options)
    keys = ("task", "description", "licence", "ordered")
    known: dict[str, Any] = {key: getattr(source, key) for key in keys}
    return Table(name, **read(source, **options), **known, provenance=source.card.source)


def read_csv(
    path: str | os.PathLike[str], target: str, *, drop: Sequence[str] = (), task: str | None = None
) -> Table:
    r"""A table from a comma-separated file (UTF-8) with one header line.

    Blanks around a cell and empty lines are ignored. Names of columns and words are cleaned (`names.clean`). Features
    keep the order of the file. A column of words (`yes`, `True`, ...) becomes one 0/1 column for each of its values,
    named `column=value`, in sorted order, in its place.

    A target of words makes a classification, with labels 0..K-1 in the sorted order of the words. So does a target of
    two different whole numbers, such as 0 and 1, labelled in increasing order. Any other numerical target makes a
    regression.

    Parameters
    ----------
    path : str or path-like
        The file. The name of a table from a file data.csv is that of its folder.
    target : str
        Name of the target column.
    drop : sequence of str
        Columns to leave out.
    task : {"regression", "classification"}, optional
        Overrides the rule above. For "classification" numbers must be integers.

    Returns
    -------
    Table
        The table. `class_names` holds the meanings of the labels, and `reading` states in one line how each column was
        read.

    Raises
    ------
    InputError
        For a missing value (an empty cell, NA, N/A, NaN, null), an infinite one, words among numbers, a column of more
        than 50 different words, two columns of one name, one class only, or no rows; and for cells that look like a
        number or a date but were not read, such as 3.1%, 3,1, $3 or 31.12.2024. The message names the column.
    UnknownNameError
        For an absent target, an absent dropped column or an unknown task, with the nearest name.

    Examples
    --------
    >>> from pathlib import Path
    >>> import ppl_bnn as bnn
    >>> written = Path("patients.csv").write_text("age,smoker,outcome\n40,yes,1.5\n55,no,2.0\n61,no,2.5\n")
    >>> table = bnn.data.read_csv("patients.csv", target="outcome")
    >>> table.feature_names, table.y
    (['age', 'smoker=no', 'smoker=yes'], array([1.5, 2. , 2.5]))
    """
    parts = read_columns(path, target, drop, task)
    parts["task"] = "regression" if parts["class_names"] is None else "classification"
    description = f"column {parts['target_name']!r} of {Path(path).name}"
    return Table(name_of(path), **parts, description=description, provenance=str(path))


def name_of(path: str | os.PathLike[str]) -> str:
    """Name of a table from a file: its name without the extension, or the name of the folder of a data.csv.

    Parameters
    ----------
    path : str or path-like
        The file.

    Returns
    -------
    str
        The name.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.data.name_of("tables/patients.csv"), bnn.data.name_of("patients/data.csv")
    ('patients', 'patients')
    """
    file = Path(path)
    folder = file.resolve().parent.name
    return clean(folder if file.stem.lower() == "data" and folder else file.stem)
