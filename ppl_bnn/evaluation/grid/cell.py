"""A cell of a grid: one fit with its scores. Its key, its computation and its file.

The key hashes everything that a result depends on: the model's source, bound arguments and sites; the method's class
and fields; data and rows; the seed; the versions of this library and of the system. Equal keys are the same cell.

A file `KEY.safetensors` holds small arrays at the test rows (`ARRAYS`), and everything else as JSON in its header with
a checksum (`ppl_bnn.core.stored`). It appears whole or not at all; a damaged one is computed again. The posterior is
not kept.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import socket
import time
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core import processes, stored
from ppl_bnn.core.errors import DamagedError, InputError, UnsupportedError
from ppl_bnn.core.plain_values import encoded
from ppl_bnn.core.warning_filters import ignored, recorded
from ppl_bnn.evaluation.comparison.record import Record, fitted, reason
from ppl_bnn.evaluation.outside.outside import Outside
from ppl_bnn.inference.fingerprint import identity, source
from ppl_bnn.inference.method import Method, versions
from ppl_bnn.prediction import reliability
from ppl_bnn.zoo import Sketch

FORMAT = 1
SUFFIX = ".safetensors"
# Figures kept of a fit that are not columns of a comparison.
COLUMNS: dict[str, str] = {
    "seconds": "wall time of the cell: fit, prediction, scores, diagnosis",
    "begun": "when it was begun, seconds since 1970",
    "process": "the host and the number of the process that computed it",
    "device": "where it was fitted",
}
ARRAYS: dict[str, str] = {
    "log_score": "(N,), log p(y_n) of each test row; nats, original units",
    "mean": "mean of the mean function, of the shape of `Prediction.mean`",
    "variance": "its variance over draws, of the same shape",
    "half_means": "(2, ...), the same of the two halves of the draws (`scores.noise_floor`)",
    "half_variances": "(2, ...)",
    **reliability.ARRAYS,
}
# Entries of the header, besides the parts of the key.
_SCHEMA = {
    "format": int,
    "failure": str,
    "figures?": {str: (float, str, bool, None)},
    "notes?": {str: str},
    "warnings?": [str],
    "ppl?": str,
    "rows?": [int],
    "task?": ("regression", "classification", None),
    "costs?": {str: (float, str)},
}
_KEY = re.compile("[0-9a-f]{24}")
_READER = stored.Reader("folder", "a whole cell", "running the grid again")
# Packages that a result depends on, by system.
_ENGINES = {"numpyro": ("numpyro", "jax"), "pyro": ("pyro-ppl", "torch")}


@dataclass(frozen=True)
class Cell:
    """One fit of a grid: the labels of its axes, and the hash of what the result depends on, which names its file."""

    model: str
    data: str
    split: str
    method: str
    seed: int
    key: str

    def __str__(self) -> str:
        return f"{self.model} on {self.data}, {self.split}, by {self.method}, seed {self.seed}"


# --- the key ------------------------------------------------------------------------------------------------


def key_of(parts: Mapping[str, Any]) -> str:
    """A hash of plain values, 24 hexadecimal digits."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def of_model(model: Callable[..., Any], sketch: Sketch | None) -> dict[str, Any]:
    """Part of the key that identifies a model: the source of its file without comments, bound arguments and sites.

    In a notebook or a script (`__main__`), only the parts of the module that the model uses count, because the grid is
    defined there too. Other imported modules count only as far as they affect the sites.
    """
    function, arguments = model, {}
    while isinstance(function, functools.partial):
        given = dict(zip(inspect.signature(function.func).parameters, function.args, strict=False))
        function, arguments = function.func, given | function.keywords | arguments
    function = inspect.unwrap(function)
    code = function if isinstance(function, types.FunctionType) else type(function)
    return {
        "source": hashlib.sha256(source(code).encode()).hexdigest(),
        "function": identity(function),
        "arguments": identity(arguments),
        "sites": None if sketch is None else [[site.name, site.prior, *site.shape] for site in sketch.sites],
        "likelihood": None if sketch is None else sketch.likelihood,
    }


def of_method(method: Method | Outside, ppl: str) -> dict[str, Any]:
    """Part of the key that identifies a method, and the versions that its results depend on in the system `ppl`."""
    engines = method.packages if isinstance(method, Outside) else _ENGINES[ppl]
    known = versions(*engines)
    return {
        "class": f"{type(method).__module__}.{type(method).__qualname__}",
        "fields": {each.name: identity(getattr(method, each.name)) for each in dataclasses.fields(method)},
        "versions": {name: known[name] for name in ("ppl-bnn", *engines)},
    }


# --- computation ----------------------------------------------------------------------------------------------


# A process that computes several cells of one model uses one function for all, so that it is compiled once.
_read = functools.lru_cache(maxsize=4)(processes.read)


def computed(
    work: bytes, parts: str, x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int
) -> bytes:
    """The content of the file of a cell.

    `work` is the fit of a method to a model, a `functools.partial` that `processes.written` has pickled, `parts` the
    key's parts as JSON, `x` and `y` the whole table in original units, `train` and `test` the row numbers of the split.
    """
    begun, clock = time.time(), time.perf_counter()
    # Another process was writing the entry that this one read, so this one compiled it itself.
    with recorded() as caught, ignored("Error (reading|writing) persistent compilation cache"):
        try:
            fit = _read(work)
            of_rows = functools.partial(fit, x[train], y[train], seed=seed)
            record = fitted(of_rows, x[test], y[test], seed, fit.keywords["device"])
            arrays = _kept(record, y[test])
        except Exception as error:
            record, arrays = Record(failure=reason(error)), {}
    texts = [" ".join(str(each.message).split()) for each in caught if issubclass(each.category, UserWarning)]
    prediction = record.prediction
    of_fit = record.fit if record.posterior is None else record.posterior
    words = {
        **{name: getattr(record, name) for name in ("figures", "notes", "failure", "ppl")},
        "warnings": list(dict.fromkeys(texts)),
        "rows": [len(train), len(test)],
        "task": None if prediction is None else "classification" if prediction.is_classes else "regression",
        "costs": {
            "seconds": time.perf_counter() - clock,
            "begun": begun,
            "process": f"{socket.gethostname()}:{os.getpid()}",
            "device": "" if of_fit is None else of_fit.info.device,
        },
    }
    return packed(words, parts, arrays)


def packed(words: Mapping[str, Any], parts: str, arrays: Mapping[str, np.ndarray]) -> bytes:
    """The content of a file: plain values and the parts of the key (JSON) in the header, and arrays."""
    header = json.dumps(encoded({"format": FORMAT, **words}), allow_nan=False)
    return stored.sealed(arrays, {"cell": header, "parts": parts})


def _kept(record: Record, y: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a finished fit, those that it has. y: the test targets."""
    prediction = record.prediction
    if prediction is None or record.pointwise is None:
        return {}
    arrays = {"log_score": record.pointwise, **record.moments}
    with suppress(UnsupportedError, InputError):
        # Only for predictions that have a distribution function.
        of = reliability.Event if prediction.is_classes else reliability.Transform
        arrays |= of.of(prediction, y).arrays()
    return arrays


# --- storage --------------------------------------------------------------------------------------------------


class Store:
    """The finished cells in a folder, one file each. Only one process writes to it.

    `damaged` is key -> reason, of cells that count as missing.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.damaged: dict[str, str] = {}

    def path(self, key: str) -> Path:
        """Path of the file of a cell."""
        return self.folder / f"{key}{SUFFIX}"

    def write(self, key: str, content: bytes) -> None:
        """Write the file of a cell atomically, and durably if the machine crashes."""
        part = self.folder / f".{key}.part"
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path(key))

    def words(self, key: str) -> dict[str, Any] | None:
        """Everything but the arrays of a finished cell; None if there is no complete file of it."""
        return self._read(key)[0]

    def parts(self, key: str) -> dict[str, Any] | None:
        """The parts of the key of a finished cell."""
        return self._read(key)[1]

    def arrays(self, key: str) -> dict[str, np.ndarray]:
        """The arrays of a finished cell (see `ARRAYS`), those that it has."""
        return self._read(key)[2]

    def warn_of_damaged(self, what_then: str) -> None:
        """Warn of the damaged cells, in one line. what_then: the consequence, as part of the message."""
        if self.damaged:
            key, why = next(iter(self.damaged.items()))
            more = f" and {len(self.damaged) - 1} more" if len(self.damaged) > 1 else ""
            warnings.warn(f"damaged cells {what_then}: {key}{more} ({why})", UserWarning, stacklevel=3)

    def _read(self, key: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, np.ndarray]]:
        """The words, the parts of the key, and the arrays; none where there is no whole file."""
        file = self.path(key)
        if not os.path.lexists(file):
            return None, None, {}
        try:
            arrays, header = _READER.sealed(file, ("cell", "parts"))
            words = _READER.json(file, header["cell"], _SCHEMA)
            if words["format"] > FORMAT:
                raise _READER.damaged(file, f"it is of format {words['format']}")
            parts = _READER.json(file, header["parts"], {str: object})
            if _KEY.fullmatch(key) and key_of(parts) != key:
                raise _READER.damaged(file, "it is another cell, under this name")
        except DamagedError as error:
            self.damaged[key] = str(error)
            return None, None, {}
        self.damaged.pop(key, None)
        return words, parts, arrays
