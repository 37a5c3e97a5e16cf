"""Tables: scikit-learn's bundled ones, simulated ones, downloaded ones with SHA-256, or any CSV file.

`load(name)` and `read_csv(path, target)` return a `Table` in the units of its source: values are not standardised,
shuffled or subsampled here. `datasets()` lists the data sets without loading them.

A downloaded table is looked up in one of two places, and every file is checked against its SHA-256 first:

- the folder that the environment variable `PPL_BNN_DATA` names, if it is set. It holds `uci/<name>/data.csv`
  (one header line, target last), `alzheimers/alzheimers_disease_data.csv`, `mnist/*-ubyte.gz`,
  `kmnist/kmnist-test-{imgs,labels}.npz`, `toy/snelson_{train,test_inputs}.csv`;
- otherwise the public repository named on its card, at one commit, downloaded once into pooch's cache folder for
  `ppl-bnn` (or the folder in `PPL_BNN_CACHE`). `PPL_BNN_DATA_URL` names a mirror of
  `https://raw.githubusercontent.com` with the same layout `owner/name/commit/path`.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.errors import BNNError, InputError, message, unknown_name
from ppl_bnn.core.names import clean, clean_all, clean_lines
from ppl_bnn.datasets import columns
from ppl_bnn.datasets.sources import SOURCES, DatasetCard, Source

TASKS = ("regression", "classification")


class DownloadError(BNNError, OSError):
    """A data file that could not be downloaded, or not be written to the cache."""


class ChecksumError(InputError):
    """A data file whose SHA-256 differs from the known one."""


@dataclass(frozen=True)
class Splits:
    """Row numbers (0-based) of S published splits.

    Parameters
    ----------
    train : ndarray
        Shape (S, n_train), int64.
    test : ndarray
        Shape (S, n_test), int64.
    """

    train: np.ndarray
    test: np.ndarray


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
        Targets (N,). For regression float64, (N, K) where a row has several numbers: the time and 1 for an event or 0
        for censoring in survival data. For classification int64 labels 0..K-1, whose meanings are `class_names`.
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
        The splits of the literature, if there are any.
    test_inputs : ndarray, optional
        Inputs (M, F) without targets at which the source asks for predictions.
    ordered : bool, default False
        Whether the rows are in time order and share values, like lags of one series. Only a split in time then leaves
        the test rows unseen.
    reading : str
        For a file, one line that states how each column was read.
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
        if self.task not in TASKS:
            raise unknown_name("task", self.task, TASKS)
        several = self.task == "regression" and self.y.ndim == 2 and self.y.shape[1] > 1
        if self.x.shape != (len(self.y), len(self.feature_names)) or not (self.y.ndim == 1 or several):
            raise columns.refusal(
                "x of shape (N, F), y of shape (N,) and F feature names, or for regression y of shape (N, K)",
                f"x {self.x.shape}, y {self.y.shape} and {len(self.feature_names)} names",
                "x[:, None] for a single feature, y.ravel() for a column of targets",
            )
        columns.refuse_duplicates(self.feature_names, f"table {self.name!r}")

    def __repr__(self) -> str:
        rows, columns = self.x.shape
        names = list(self.feature_names[:8])
        more = f" and {columns - 8} more" if columns > 8 else ""
        target = self.target_name + (
            "" if self.class_names is None else f" ({len(self.class_names)} classes)"
        )
        return (
            f"Table({self.name!r}, {self.task}, {rows} rows, {columns} features)\n"
            f"  target: {target}\n"
            f"  features: {', '.join(names)}{more}"
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
        the test rows, at least one on either side. Classes are not stratified. Rows in time order (`ordered`) are split
        in time for any seed: the same number of rows, the last ones, are the test rows.

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
        if not 0.0 < test_fraction < 1.0 or rows < 2:
            raise columns.refusal(
                "a test fraction strictly between 0 and 1 and at least two rows",
                f"test_fraction={test_fraction!r} and {rows} rows",
                "test_fraction=0.2",
            )
        held_out = min(max(round(test_fraction * rows), 1), rows - 1)
        if self.ordered:
            return np.arange(rows - held_out), np.arange(rows - held_out, rows)
        order = np.random.default_rng(seed).permutation(rows)
        return order[held_out:], order[:held_out]

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
            raise columns.refusal(
                "a table with published splits", f"{self.name!r}, which has none", "table.split(seed)"
            )
        count = len(self.splits.train)
        if not 0 <= k < count:
            raise columns.refusal(f"a split from 0 to {count - 1} of {self.name!r}", repr(k), "k=0")
        return self.splits.train[k], self.splits.test[k]


def datasets() -> dict[str, DatasetCard]:
    """The cards of all data sets by name. No data is loaded.

    Returns
    -------
    dict of str to DatasetCard
        Name -> card.
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
    """
    if name not in SOURCES:
        raise unknown_name("data set", name, SOURCES)
    source = SOURCES[name]
    for option in options:
        if not source.options:
            raise columns.refusal(f"no option for data set {name!r}", repr(option), f"load({name!r})")
        if option not in source.options:
            raise unknown_name(f"option of data set {name!r}", option, source.options)
    words: dict[str, Any] = {
        "name": name,
        "task": source.task,
        "description": source.description,
        "provenance": source.card.source,
        "licence": source.licence,
    }
    return _READERS[source.layout](words, source, **{**source.options, **options})


# --- any CSV file --------------------------------------------------------------------------------------------


def read_csv(
    path: str | os.PathLike[str], target: str, *, drop: Sequence[str] = (), task: str | None = None
) -> Table:
    """A table from a comma-separated file (UTF-8) with one header line.

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
    """
    if task is not None and task not in TASKS:
        raise unknown_name("task", task, TASKS)
    cells = columns.read_cells(Path(path))
    target = clean(target)
    dropped = [clean(name) for name in ([drop] if isinstance(drop, str) else drop)]
    for name in [target, *dropped]:
        if name not in cells:
            raise unknown_name(f"column of {path}", name, cells)
    if target in dropped:
        raise columns.refusal("a target that is kept", f"{target!r} in drop", "another target or drop")

    features: dict[str, np.ndarray] = {}
    found: dict[str, tuple[str, ...]] = {}
    for name, column in cells.items():
        if name == target or name in dropped:
            continue
        values = columns.parse(name, column)
        if values.dtype == np.float64:
            features[name], found[name] = values, ()
            continue
        categories = found[name] = tuple(sorted(set(values)))
        if len(categories) > columns.MOST_CATEGORIES:
            raise columns.refusal(
                f"numbers or at most {columns.MOST_CATEGORIES} different words in column {name!r}",
                f"{len(categories)} different words in {len(values)} rows, as in an identifier",
                f"drop=[{name!r}]",
            )
        for category in categories:
            encoded = f"{name}={category}"
            if encoded in features or encoded in cells:
                raise columns.refusal("column names that differ", f"{encoded!r} twice", "another name")
            features[encoded] = (values == category).astype(np.float64)
    if not features:
        raise columns.refusal("at least one feature column", f"none beside {target!r}", "a wider table")

    y, class_names, words = columns.parse_target(target, columns.parse(target, cells[target]), task)
    return Table(
        name=name_of(path),
        x=np.column_stack(list(features.values())),
        y=y,
        feature_names=list(features),
        target_name=target,
        task="regression" if class_names is None else "classification",
        class_names=class_names,
        description=f"column {target!r} of {Path(path).name}",
        provenance=str(path),
        reading=columns.in_one_line(target, words, found, len(set(dropped))),
    )


def name_of(path: str | os.PathLike[str]) -> str:
    """Name of a table from a file.

    Parameters
    ----------
    path : str or path-like
        The file.

    Returns
    -------
    str
        The file's name without its extension, or its folder's name for a data.csv.
    """
    file = Path(path)
    folder = file.resolve().parent.name
    return clean(folder if file.stem.lower() == "data" and folder else file.stem)


# --- getting files -------------------------------------------------------------------------------------------


def _files(source: Source, part: str = "") -> list[Path]:
    """The checked files of a data set whose path contains `part`: from PPL_BNN_DATA, else downloaded."""
    folder = os.environ.get("PPL_BNN_DATA")
    if folder:
        return [_local_file(Path(folder), path, source.local[path]) for path in source.local if part in path]
    return [
        _download(source.name, f"{source.repository}/{source.commit}/{path}", sha256)
        for path, sha256, _ in source.upstream
        if part in path
    ]


def _local_file(folder: Path, path: str, accepted: tuple[str, ...]) -> Path:
    file = folder / path
    try:
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as problem:
        advice = "laying the folder out as ppl_bnn.data describes, or unsetting PPL_BNN_DATA to download"
        raise columns.refusal(
            f"a file {path} in the folder PPL_BNN_DATA={folder}", str(problem), advice
        ) from problem
    if digest not in accepted:
        raise ChecksumError(
            message(
                f"{file} with SHA-256 {' or '.join(accepted)}",
                digest,
                "a fresh copy, or unsetting PPL_BNN_DATA",
            )
        )
    return file


def _download(name: str, path: str, sha256: str) -> Path:
    import pooch
    import requests

    base = os.environ.get("PPL_BNN_DATA_URL") or "https://raw.githubusercontent.com"
    url = f"{base.rstrip('/')}/{path}"
    cache = Path(os.environ.get("PPL_BNN_CACHE") or pooch.os_cache("ppl-bnn")) / name
    try:
        file = pooch.retrieve(
            url,
            known_hash=f"sha256:{sha256}",
            fname=path.rpartition("/")[2],
            path=cache,
            downloader=pooch.HTTPDownloader(timeout=(5, 60)),  # type: ignore[arg-type]
        )
    except requests.RequestException as problem:
        advice = (
            "again with a network, a mirror in PPL_BNN_DATA_URL, or a folder with the files in PPL_BNN_DATA"
        )
        raise DownloadError(message(f"to download {url}", str(problem), advice)) from problem
    except ValueError as problem:  # how pooch reports a hash that does not match; it did not keep the file
        raise ChecksumError(
            message(
                f"{url} with SHA-256 {sha256}", f"{problem}", "again; if it persists, do not trust the source"
            )
        ) from problem
    except OSError as problem:
        advice = "another folder in PPL_BNN_CACHE"
        raise DownloadError(message(f"a cache folder {cache} to write to", str(problem), advice)) from problem
    return Path(file)


# --- reading files -------------------------------------------------------------------------------------------


def _read_bundled(words: dict[str, Any], source: Source) -> Table:
    import sklearn.datasets as bundled

    # scaled=False: ages in years, not columns divided by N times their standard deviation on all rows.
    options = {"scaled": False} if words["name"] == "diabetes" else {}
    bunch: Any = getattr(bundled, f"load_{words['name']}")(as_frame=False, **options)
    classes = None if words["task"] == "regression" else tuple(str(name) for name in bunch.target_names)
    return Table(
        x=np.asarray(bunch.data, dtype=np.float64),
        y=np.asarray(bunch.target, dtype=np.float64 if classes is None else np.int64),
        feature_names=[str(name) for name in bunch.feature_names],
        target_name="disease_progression" if classes is None else "class",
        class_names=classes,
        **words,
    )


def _read_uci(words: dict[str, Any], source: Source, instant: bool = True) -> Table:
    """Numbers only, target last. Upstream: blanks between, no header; in PPL_BNN_DATA: commas and a header."""
    if not isinstance(instant, bool):
        raise columns.refusal("instant=True or instant=False", repr(instant), "instant=False")
    names = source.columns
    (file,) = _files(source)
    header = file.suffix == ".csv"
    values = np.loadtxt(file, delimiter="," if header else None, skiprows=int(header), ndmin=2)
    kept = [k for k, column in enumerate(names[:-1]) if instant or column != "instant"]
    return Table(
        x=np.ascontiguousarray(values[:, kept]),
        y=values[:, -1].copy(),
        feature_names=[names[k] for k in kept],
        target_name=names[-1],
        splits=_standard_splits(len(values), 5 if words["name"] == "protein" else 20),
        **words,
    )


def _standard_splits(rows: int, count: int) -> Splits:
    """The splits of Hernandez-Lobato and Adams (2015): 90 % train, one legacy generator of seed 1 per table."""
    rng = np.random.RandomState(1)
    orders = np.stack([rng.choice(rows, rows, replace=False) for _ in range(count)])
    return Splits(train=orders[:, : round(0.9 * rows)], test=orders[:, round(0.9 * rows) :])


def _read_alzheimers(words: dict[str, Any], source: Source) -> Table:
    (file,) = _files(source)
    table = read_csv(file, "Diagnosis", drop=("PatientID", "DoctorInCharge"), task="classification")
    # The rows that train_test_split(test_size=0.2, random_state=seed) of scikit-learn selects for these seeds.
    rows, held_out = len(table.y), math.ceil(0.2 * len(table.y))
    orders = np.stack([np.random.RandomState(seed).permutation(rows) for seed in (42, *range(14))])
    return Table(
        x=table.x,
        y=table.y,
        feature_names=table.feature_names,
        target_name=table.target_name,
        class_names=("no", "yes"),
        splits=Splits(train=orders[:, held_out:], test=orders[:, :held_out]),
        **words,
    )


def _read_images(words: dict[str, Any], source: Source, part: str = "all") -> Table:
    """Intensities divided by 255, images of 28 x 28 pixels flattened row by row."""
    if part not in ("all", "train", "test"):
        raise unknown_name("part", part, ("all", "train", "test"))
    pieces = {"all": ("train-", "t10k-"), "train": ("train-",), "test": ("t10k-",)}[part]
    images, labels = [], []
    for piece in pieces if words["name"] == "mnist" else ("",):
        image_file, label_file = _files(source, piece)
        images.append(_read_array(image_file).reshape(-1, 784))
        labels.append(_read_array(label_file))
    rows = np.arange(70_000)[None]
    both = part == "all" and words["name"] == "mnist"
    return Table(
        x=np.concatenate(images) / 255.0,
        y=np.concatenate(labels).astype(np.int64),
        feature_names=[f"pixel_{row}_{column}" for row in range(28) for column in range(28)],
        target_name="class",
        class_names=tuple("0123456789" if words["name"] == "mnist" else "おきすつなはまやれを"),
        splits=Splits(train=rows[:, :60_000], test=rows[:, 60_000:]) if both else None,
        **words,
    )


def _read_array(file: Path) -> np.ndarray:
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            return archive["arr_0"]
    # idx: two zero bytes, the type (8: unsigned byte), the number of axes, their lengths (big-endian), the data
    content = gzip.decompress(file.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">u4", count=axes, offset=4).astype(int)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _read_snelson(words: dict[str, Any], source: Source) -> Table:
    files = _files(source)
    if files[0].suffix == ".csv":
        train, test = (np.loadtxt(file, delimiter=",", skiprows=1) for file in files)
        x, y = train.T
    else:
        x, y, test = (np.loadtxt(file) for file in files)
    return Table(
        x=x[:, None].copy(),
        y=y.copy(),
        feature_names=["x"],
        target_name="y",
        test_inputs=test[:, None],
        **words,
    )


def _read_levels(words: dict[str, Any], source: Source) -> Table:
    """Quarters of a table's targets as ordered classes. A target on a border belongs to the class below it."""
    table = load(source.origin)
    borders = np.quantile(table.y, (0.25, 0.5, 0.75))
    return Table(
        x=table.x,
        y=np.searchsorted(borders, table.y, side="left").astype(np.int64),
        feature_names=table.feature_names,
        target_name=f"quarter_of_{table.target_name}",
        class_names=("first quarter", "second quarter", "third quarter", "last quarter"),
        **words,
    )


# --- simulated tables ----------------------------------------------------------------------------------------

# Each function returns x and y, with NumPy's legacy generator, whose numbers are the same in every version.


def survival_simulated() -> tuple[np.ndarray, np.ndarray]:
    """Censored event times under proportional hazards.

        x_j ~ N(0, 1),     g(x) = 0.8 x_1 - 0.6 x_2 + 0.5 (x_3^2 - 1),     hazard h(t | x) = 0.05 1.5 t^0.5 exp(g(x)),
        T = (-log U / (0.05 exp(g(x))))^(1 / 1.5),    U uniform on (0, 1),    C exponential with mean 20, in years;
        y = (min(T, C), 1 if T <= C else 0).

    T has a Weibull distribution of shape 1.5, by inversion. x_4 and x_5 have no effect, and x_3 has no linear effect. C
    is independent of T given x.

    Returns
    -------
    x : ndarray
        Shape (300, 5).
    y : ndarray
        Shape (300, 2).

    References
    ----------
    R. Bender, T. Augustin and M. Blettner, Generating survival times to simulate Cox proportional hazards models,
    Statistics in Medicine 24, 2005.
    """
    rng = np.random.RandomState(2005)
    x = rng.normal(size=(300, 5))
    risk = 0.8 * x[:, 0] - 0.6 * x[:, 1] + 0.5 * (x[:, 2] ** 2 - 1.0)
    time = (-np.log(rng.uniform(size=300)) / (0.05 * np.exp(risk))) ** (1.0 / 1.5)
    censored = rng.exponential(20.0, size=300)
    return x, np.column_stack([np.minimum(time, censored), time <= censored])


def inverse_sine() -> tuple[np.ndarray, np.ndarray]:
    """The inverse of a function, so that one input has several outputs.

        y uniform on (0, 1),     x = y + 0.3 sin(2 pi y) + e,     e uniform on (-0.1, 0.1).

    Returns
    -------
    x : ndarray
        Shape (300, 1).
    y : ndarray
        Shape (300,).

    References
    ----------
    C. M. Bishop, Mixture density networks (1994).
    """
    rng = np.random.RandomState(1994)
    y = rng.uniform(size=300)
    x = y + 0.3 * np.sin(2.0 * np.pi * y) + rng.uniform(-0.1, 0.1, size=300)
    return x[:, None], y


def counts_simulated() -> tuple[np.ndarray, np.ndarray]:
    """Overdispersed counts about a smooth rate.

        x_j uniform on (-2, 2),     m(x) = exp(1.2 + sin(2 x_1) + 0.5 x_2),     y ~ Poisson(m(x) G),

    G of a Gamma distribution with shape 3 and mean 1: y is negative binomial with mean m and variance m + m^2 / 3. x_3
    has no effect.

    Returns
    -------
    x : ndarray
        Shape (300, 3).
    y : ndarray
        Shape (300,).
    """
    rng = np.random.RandomState(1949)
    x = rng.uniform(-2.0, 2.0, size=(300, 3))
    mean = np.exp(1.2 + np.sin(2.0 * x[:, 0]) + 0.5 * x[:, 1])
    return x, rng.poisson(mean * rng.gamma(3.0, 1.0 / 3.0, size=300)).astype(np.float64)


def mackey_glass() -> tuple[np.ndarray, np.ndarray]:
    """The next value of a chaotic series from its last eight values, in time order.

        dz/dt = 0.2 z(t - 17) / (1 + z(t - 17)^10) - 0.1 z(t),     z(t) = 1.2 for t <= 0,

    by the Runge-Kutta rule of order 4 with steps of 0.1, measured at t = 600, 606, 612, ... with errors ~ N(0, 0.05^2).

    Returns
    -------
    x : ndarray
        Shape (400, 8), the oldest value first.
    y : ndarray
        Shape (400,).

    Notes
    -----
    Rows overlap: the target of one row is a lag of the next eight, and neighbours of a test row in a random split
    contain its target. `Table.split` splits this table in time.

    References
    ----------
    M. C. Mackey and L. Glass, Oscillation and chaos in physiological control systems, Science 197 (1977).
    """
    z = _mackey_glass_series(600.0 + 6.0 * np.arange(408))
    measured = z + 0.05 * np.random.RandomState(1977).normal(size=len(z))
    windows = np.lib.stride_tricks.sliding_window_view(measured, 9)
    return windows[:, :8].copy(), windows[:, 8].copy()


def _mackey_glass_series(times: np.ndarray) -> np.ndarray:
    """z at multiples of 0.1, starting at 0."""
    step, delay = 0.1, 170

    def growth(past: float) -> float:
        # Products are the same on every machine, powers are not, and chaos amplifies the difference.
        square = past * past
        fourth = square * square
        return 0.2 * past / (1.0 + fourth * fourth * square)

    last = round(float(times[-1]) / step)
    # z[k] is the value at (k - delay) steps, between[k] the value half a step later, by Hermite's cubic.
    z, between = [1.2] * (delay + 1), [1.2] * delay
    for k in range(last):
        first, second, third = growth(z[k]), growth(between[k]), growth(z[k + 1])
        now = z[-1]
        slope = first - 0.1 * now
        slope2 = second - 0.1 * (now + 0.5 * step * slope)
        slope3 = second - 0.1 * (now + 0.5 * step * slope2)
        slope4 = third - 0.1 * (now + step * slope3)
        after = now + step * (slope + 2.0 * slope2 + 2.0 * slope3 + slope4) / 6.0
        between.append(0.5 * (now + after) + 0.125 * step * (slope - (third - 0.1 * after)))
        z.append(after)
    return np.array(z)[delay + np.round(times / step).astype(int)]


def _read_simulated(words: dict[str, Any], source: Source) -> Table:
    x, y = _SIMULATED[words["name"]]()
    return Table(
        x=x,
        y=y,
        feature_names=list(source.columns[:-1]),
        target_name=source.columns[-1],
        ordered=source.ordered,
        **words,
    )


_SIMULATED: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "survival_simulated": survival_simulated,
    "inverse_sine": inverse_sine,
    "counts_simulated": counts_simulated,
    "mackey_glass": mackey_glass,
}

_READERS: dict[str, Callable[..., Table]] = {
    "bundled": _read_bundled,
    "levels": _read_levels,
    "simulated": _read_simulated,
    "numbers": _read_uci,
    "alzheimers": _read_alzheimers,
    "images": _read_images,
    "snelson": _read_snelson,
}
