"""Readers of bundled, simulated and downloaded data sets; each returns the parts of a `Table` that the source lacks."""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core.errors import BNNError, InputError, check_known
from ppl_bnn.core.stored import digest
from ppl_bnn.datasets.columns import read_columns
from ppl_bnn.datasets.simulated import SIMULATED
from ppl_bnn.datasets.sources import SOURCES, Source

Parts = dict[str, Any]


class DownloadError(BNNError, OSError):
    """A data file that could not be downloaded, or not be written to the cache.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> issubclass(bnn.data.DownloadError, OSError)
    True
    """


class ChecksumError(InputError):
    """A data file whose SHA-256 differs from the known one.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> issubclass(bnn.data.ChecksumError, bnn.errors.InputError)
    True
    """


@dataclass(frozen=True)
class Splits:
    """Row numbers (0-based) of S published splits.

    Parameters
    ----------
    train, test : ndarray
        Shapes (S, n_train) and (S, n_test), int64.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> splits = bnn.data.Splits(train=np.array([[0, 1], [1, 2]]), test=np.array([[2], [0]]))
    >>> splits.train.shape
    (2, 2)
    """

    train: np.ndarray
    test: np.ndarray


# --- getting files -------------------------------------------------------------------------------------------


def _files(source: Source, part: str = "") -> list[Path]:
    """The checked files of a data set whose path contains `part`: from PPL_BNN_DATA, else downloaded."""
    if folder := os.environ.get("PPL_BNN_DATA"):
        return [_local_file(Path(folder), path, source.local[path]) for path in source.local if part in path]
    prefix = f"{source.repository}/{source.commit}"
    files = [(path, sha256) for path, sha256, _ in source.upstream if part in path]
    return [_download(source.name, f"{prefix}/{path}", sha256) for path, sha256 in files]


def _local_file(folder: Path, path: str, accepted: tuple[str, ...]) -> Path:
    file = folder / path
    try:
        found = digest(file)
    except OSError as problem:
        expected = f"a file {path} in the folder PPL_BNN_DATA={folder}"
        advice = "laying the folder out as ppl_bnn.data describes, or unsetting PPL_BNN_DATA to download"
        raise InputError.of("", expected, str(problem), advice) from problem
    expected = f"{file} with SHA-256 {' or '.join(accepted)}"
    ChecksumError.check(found in accepted, "", expected, found, "a fresh copy, or unsetting PPL_BNN_DATA")
    return file


def _download(name: str, path: str, sha256: str) -> Path:
    base = os.environ.get("PPL_BNN_DATA_URL") or "https://raw.githubusercontent.com"
    advice = "a mirror in PPL_BNN_DATA_URL, or a folder of files in PPL_BNN_DATA"
    return downloaded(f"{base.rstrip('/')}/{path}", sha256, name, advice)


def downloaded(url: str, sha256: str, name: str, advice: str) -> Path:
    """A file, kept in the folder `name` of the cache. Raises `DownloadError` with the advice, or `ChecksumError`."""
    import pooch
    import requests

    cache = Path(os.environ.get("PPL_BNN_CACHE") or pooch.os_cache("ppl-bnn")) / name
    downloader: Any = pooch.HTTPDownloader(timeout=(5, 60))
    file_name = url.rpartition("/")[2]
    try:
        return Path(pooch.retrieve(url, f"sha256:{sha256}", file_name, cache, downloader=downloader))
    except requests.RequestException as problem:
        advice = f"again with a network, {advice}"
        raise DownloadError.of("", f"to download {url}", str(problem), advice) from problem
    except ValueError as problem:  # how pooch reports a hash that does not match; it did not keep the file
        advice = "again; if it persists, do not trust the source"
        raise ChecksumError.of("", f"{url} with SHA-256 {sha256}", str(problem), advice) from problem
    except OSError as problem:
        expected = f"a cache folder {cache} to write to"
        raise DownloadError.of("", expected, str(problem), "another folder in PPL_BNN_CACHE") from problem


def read(source: Source, **options: Any) -> Parts:
    """The parts of the table of a source."""
    return _READERS[source.layout](source, **{**source.options, **options})


def _read_bundled(source: Source) -> Parts:
    import sklearn.datasets as bundled

    # scaled=False: ages in years, not columns divided by N times their standard deviation on all rows.
    options = {"scaled": False} if source.name == "diabetes" else {}
    bunch: Any = getattr(bundled, f"load_{source.name}")(as_frame=False, **options)
    classes = None if source.task == "regression" else tuple(map(str, bunch.target_names))
    return {
        "x": np.asarray(bunch.data, dtype=np.float64),
        "y": np.asarray(bunch.target, dtype=np.float64 if classes is None else np.int64),
        "feature_names": list(map(str, bunch.feature_names)),
        "target_name": "disease_progression" if classes is None else "class",
        "class_names": classes,
    }


def _read_numbers(source: Source, instant: bool = True) -> Parts:
    """Numbers only, target last. Upstream: blanks between, no header; in PPL_BNN_DATA: commas and a header."""
    if not isinstance(instant, bool):
        raise InputError.of("", "instant=True or instant=False", repr(instant), "instant=False")
    *names, target = source.columns
    (file,) = _files(source)
    header = file.suffix == ".csv"
    values = np.loadtxt(file, delimiter="," if header else None, skiprows=int(header), ndmin=2)
    kept = [k for k, column in enumerate(names) if instant or column != "instant"]
    return {
        "x": np.ascontiguousarray(values[:, kept]),
        "y": values[:, -1].copy(),
        "feature_names": [names[k] for k in kept],
        "target_name": target,
        "splits": standard_splits(len(values), 5 if source.name == "protein" else 20),
    }


def standard_splits(rows: int, count: int) -> Splits:
    """The splits of Hernandez-Lobato and Adams (2015): 90 % train, from NumPy's legacy generator with seed 1."""
    rng = np.random.RandomState(1)
    orders = np.stack([rng.choice(rows, rows, replace=False) for _ in range(count)])
    return Splits(train=orders[:, : round(0.9 * rows)], test=orders[:, round(0.9 * rows) :])


def _read_alzheimers(source: Source) -> Parts:
    (file,) = _files(source)
    parts = read_columns(file, "Diagnosis", ("PatientID", "DoctorInCharge"), "classification")
    # The rows that train_test_split(test_size=0.2, random_state=seed) of scikit-learn selects for these seeds.
    rows, test = len(parts["y"]), math.ceil(0.2 * len(parts["y"]))
    orders = np.stack([np.random.RandomState(seed).permutation(rows) for seed in (42, *range(14))])
    splits = Splits(train=orders[:, test:], test=orders[:, :test])
    return parts | {"class_names": ("no", "yes"), "splits": splits, "reading": ""}


def _read_images(source: Source, part: str = "all") -> Parts:
    """Intensities divided by 255, images of 28 x 28 pixels flattened row by row."""
    names = {"all": ("train-", "t10k-"), "train": ("train-",), "test": ("t10k-",)}
    check_known("part", [part], names)
    mnist = source.name == "mnist"
    files = [_files(source, piece) for piece in (names[part] if mnist else ("",))]
    rows = np.arange(70_000)[None]
    return {
        "x": np.concatenate([_read_array(images).reshape(-1, 784) for images, _ in files]) / 255.0,
        "y": np.concatenate([_read_array(labels) for _, labels in files]).astype(np.int64),
        "feature_names": [f"pixel_{row}_{column}" for row in range(28) for column in range(28)],
        "target_name": "class",
        "class_names": tuple("0123456789" if mnist else "おきすつなはまやれを"),
        "splits": Splits(rows[:, :60_000], rows[:, 60_000:]) if part == "all" and mnist else None,
    }


def _read_array(file: Path) -> np.ndarray:
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            return archive["arr_0"]
    # idx: two zero bytes, the type (8: unsigned byte), the number of axes, their lengths (big-endian), the data
    content = gzip.decompress(file.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">u4", count=axes, offset=4).astype(int)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _read_snelson(source: Source) -> Parts:
    files = _files(source)
    if files[0].suffix == ".csv":
        train, test = (np.loadtxt(file, delimiter=",", skiprows=1) for file in files)
        x, y = train.T
    else:
        x, y, test = map(np.loadtxt, files)
    names = {"feature_names": ["x"], "target_name": "y"}
    return {"x": x[:, None].copy(), "y": y.copy(), "test_inputs": test[:, None], **names}


def _read_levels(source: Source) -> Parts:
    """Quarters of a table's targets as ordered classes. A target on a border belongs to the class below it."""
    parts = read(SOURCES[source.origin])
    borders = np.quantile(parts["y"], (0.25, 0.5, 0.75))
    return parts | {
        "y": np.searchsorted(borders, parts["y"], side="left").astype(np.int64),
        "target_name": f"quarter_of_{parts['target_name']}",
        "class_names": ("first quarter", "second quarter", "third quarter", "last quarter"),
    }


def _read_simulated(source: Source) -> Parts:
    x, y = SIMULATED[source.name]()
    *names, target = source.columns
    return {"x": x, "y": y, "feature_names": names, "target_name": target}


_READERS: dict[str, Callable[..., Parts]] = {
    "bundled": _read_bundled,
    "levels": _read_levels,
    "simulated": _read_simulated,
    "numbers": _read_numbers,
    "alzheimers": _read_alzheimers,
    "images": _read_images,
    "snelson": _read_snelson,
}
