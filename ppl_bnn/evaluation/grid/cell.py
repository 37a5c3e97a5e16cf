"""A cell of a grid: one fit with its scores. What it is (its key), how it is computed, what is kept of it in a file.

The key is a hash of all that a result depends on and that can be known before it is computed: the source of the model,
its bound arguments and the sites it has; the class and the fields of the method; data and rows; the seed; the versions
of this library and of the system that runs the method. A cell with the same key is the same cell.

A file `KEY.safetensors` holds a finished cell: small arrays at the test rows (`ARRAYS`), and everything else as JSON in
its header, where its checksum is, too (`ppl_bnn.core.stored`). It appears whole or not at all; one that is damaged is
computed again. A cell keeps numbers of its test rows (log scores, mean function, where each target falls in its
prediction) and not its posterior. The page of a grid is drawn from these; bands, ranks of draws and loss curves need
more and are pictures of a single comparison (`bnn.compare`) only.
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

from ppl_bnn.backends.protocol import resolve_device
from ppl_bnn.core import checks, processes, stored
from ppl_bnn.core.errors import BNNError, DamagedError, InputError, UnsupportedError, message
from ppl_bnn.core.plain_values import encoded
from ppl_bnn.core.warning_filters import ignored, recorded
from ppl_bnn.datasets.splits import Split
from ppl_bnn.datasets.tables import Table
from ppl_bnn.evaluation.comparison.record import Record, chain_of_draws, fitted, reason
from ppl_bnn.evaluation.grid.engines import gpus
from ppl_bnn.inference.fingerprint import identity, source
from ppl_bnn.inference.method import Method, versions
from ppl_bnn.prediction import reliability, scores
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.zoo import Sketch

FORMAT = 1
SUFFIX = ".safetensors"
# What is kept of a fit that no column of a comparison has.
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
# What the header holds beside the parts of the key.
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
# Which packages a result of a system depends on.
_ENGINES = {"numpyro": ("numpyro", "jax"), "pyro": ("pyro-ppl", "torch")}


@dataclass(frozen=True)
class Cell:
    """One fit of a grid, by the labels of what goes into it. key: what it is, and the name of its file."""

    model: str
    data: str
    split: str
    method: str
    seed: int
    key: str

    @property
    def labels(self) -> tuple[str, str, str, str, int]:
        return self.model, self.data, self.split, self.method, self.seed

    def __str__(self) -> str:
        return f"{self.model} on {self.data}, {self.split}, by {self.method}, seed {self.seed}"


# --- what a cell is -----------------------------------------------------------------------------------------


def key_of(parts: Mapping[str, Any]) -> str:
    """A hash of plain values, 24 hexadecimal digits."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def of_model(model: Callable[..., Any], sketch: Sketch | None) -> dict[str, Any]:
    """What a model is: the source of its file, what is bound to it, the sites that a run of it met.

    Comments and layout do not count. Of a model in a script (`__main__`), which also says what is to be computed, or in
    a notebook the parts of its module that it reaches count in place of the file. What other modules it imports counts
    as far as it shows in the sites.
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


def of_method(method: Method, ppl: str) -> dict[str, Any]:
    """What a method is, and the versions that its results depend on in the system that runs it."""
    known = versions()
    return {
        "class": f"{type(method).__module__}.{type(method).__qualname__}",
        "fields": {each.name: identity(getattr(method, each.name)) for each in dataclasses.fields(method)},
        "versions": {name: known[name] for name in ("ppl-bnn", *_ENGINES[ppl])},
    }


def of_data(table: Table) -> str:
    """What a table is: a hash of its numbers."""
    return checks.data_hash(table.x, table.y)


def of_split(split: Split) -> str:
    """What a split is: a hash of its row numbers, in their order."""
    return checks.data_hash({"train": split.train, "test": split.test}, np.empty(0))


def of_device(device: str) -> str:
    """The kind of a device: which of several GPUs computed a number does not change it.

    "auto" is what it comes to where the cells are planned.
    """
    kind = resolve_device(device)[0]
    return ("cuda" if gpus() else "cpu") if kind == "auto" else kind


# --- how it is computed ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What all cells of a model, a data set and a method have in common, as it is sent to other processes."""

    model: Callable[..., Any]
    method: Method
    standardise: bool
    device: str
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...] | None

    def written(self) -> bytes:
        """For `computed`. Errors: whatever pickling raises where something in it cannot be sent."""
        return processes.written(self, self.model)


# A process that computes several cells of one model has one function for all, with what is compiled for it.
_read = functools.lru_cache(maxsize=4)(processes.read)


def computed(
    work: bytes, parts: str, x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int
) -> bytes:
    """The content of the file of a cell.

    work: what `Work.written` gives. parts: what its key is made of, as JSON. x, y: the whole table, original units.
    """
    begun, clock = time.time(), time.perf_counter()
    # Another process was writing what this one read: it compiled it itself.
    with recorded() as caught, ignored("Error (reading|writing) persistent compilation cache"):
        try:
            record = _fitted(_read(work), x, y, train, test, seed)
            arrays = _kept(record, y[test])
        except Exception as error:
            record, arrays = Record("", failure=reason(error)), {}
    said = dict.fromkeys(
        " ".join(str(each.message).split()) for each in caught if issubclass(each.category, UserWarning)
    )
    words = {
        "figures": record.figures,
        "notes": record.notes,
        "failure": record.failure,
        "warnings": list(said),
        "ppl": record.ppl,
        "rows": [len(train), len(test)],
        "task": None if record.prediction is None else _task(record.prediction),
        "costs": {
            "seconds": time.perf_counter() - clock,
            "begun": begun,
            "process": f"{socket.gethostname()}:{os.getpid()}",
            "device": "" if record.posterior is None else record.posterior.info.device,
        },
    }
    return packed(words, parts, arrays)


def lost(reason: str, parts: str) -> bytes:
    """The content of the file of a cell that ended its process."""
    return packed({"failure": reason}, parts, {})


def packed(words: Mapping[str, Any], parts: str, arrays: Mapping[str, np.ndarray]) -> bytes:
    """A file: words in the header, beside what the key is made of, and arrays."""
    said = json.dumps(encoded({"format": FORMAT, **words}), allow_nan=False)
    return stored.sealed(arrays, {"cell": said, "parts": parts})


def _fitted(
    work: Work, x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int
) -> Record:
    return fitted(
        "",
        lambda: work.method.fit(
            work.model,
            x[train],
            y[train],
            seed=seed,
            device=work.device,
            standardise=work.standardise,
            feature_names=work.feature_names,
            class_names=work.class_names,
        ),
        x[test],
        y[test],
        seed,
        work.device,
    )


def _kept(record: Record, y: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a finished fit; what there is none of is a note. y: the test targets."""
    posterior, prediction = record.posterior, record.prediction
    if posterior is None or prediction is None:
        return {}
    arrays = {} if record.pointwise is None else {"log_score": record.pointwise}
    with suppress(UnsupportedError, InputError):
        # Of what has a distribution function of its targets.
        of = reliability.Event if prediction.is_classes else reliability.Transform
        arrays |= of.of(prediction, y).arrays()
    try:
        arrays |= {"mean": prediction.mean, "variance": prediction.mean_function_variance}
    except BNNError as error:
        record.notes["gap_mean"] = reason(error)
        return arrays
    try:
        halves = scores.halves(prediction, chain_of_draws(posterior, prediction))
        arrays |= {
            "half_means": np.stack([half.mean for half in halves]),
            "half_variances": np.stack([half.mean_function_variance for half in halves]),
        }
    except BNNError as error:
        record.notes["gap_mean_floor"] = reason(error)
    return arrays


def _task(prediction: Prediction) -> str:
    return "classification" if prediction.is_classes else "regression"


# --- how far from another -------------------------------------------------------------------------------------


def gap(arrays: Mapping[str, np.ndarray], of: Mapping[str, np.ndarray], classes: bool) -> tuple[float, float]:
    """(mean_gap, sd_ratio) of `scores.fidelity`, from "mean" and "variance" of two mean functions at the same rows.

    of: those of the reference. classes: whether the outcome is a label; (N, C) are then the C classes of a row.

    Raises
    ------
    InputError: no such arrays, other shapes, or a reference without spread.
    """
    if "mean" not in arrays or "mean" not in of:
        raise InputError(
            message("two mean functions with their variances", "one at most", "a prediction of draws")
        )
    if arrays["mean"].shape != of["mean"].shape:
        raise InputError(
            message(
                f"a mean function of shape {of['mean'].shape}", f"{arrays['mean'].shape}", "the same rows"
            )
        )
    found = scores.mean_function_gap(arrays["mean"], arrays["variance"], of["mean"], of["variance"], classes)
    return found["mean_gap"], found["sd_ratio"]


# --- what is kept ---------------------------------------------------------------------------------------------


class Store:
    """The finished cells in a folder, one file each. Only one process writes to it.

    damaged: key -> what is wrong with the file of a cell; it counts as a cell that is not there. unsealed: the keys of
    cells that an older version wrote, without a checksum.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.damaged: dict[str, str] = {}
        self.unsealed: set[str] = set()

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def write(self, key: str, content: bytes) -> None:
        """A file that is there whole or not at all, and stays if the machine ends."""
        part = self.folder / f".{key}.part"
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path(key))

    def words(self, key: str) -> dict[str, Any] | None:
        """Everything but the arrays of a finished cell; None where there is no whole file of it."""
        found = self._read(key)
        return None if found is None else found[0]

    def parts(self, key: str) -> dict[str, Any] | None:
        """What the key of a finished cell is made of."""
        found = self._read(key)
        return None if found is None else found[1]

    def arrays(self, key: str) -> dict[str, np.ndarray]:
        """The arrays of a finished cell (see `ARRAYS`), as far as it has them."""
        found = self._read(key)
        return {} if found is None else found[2]

    def tell_damaged(self, what_then: str) -> None:
        """Warn of the damaged cells, in one line."""
        if self.damaged:
            key, why = next(iter(self.damaged.items()))
            more = f" and {len(self.damaged) - 1} more" if len(self.damaged) > 1 else ""
            warnings.warn(f"damaged cells {what_then}: {key}{more} ({why})", UserWarning, stacklevel=3)

    def tell_unsealed(self) -> None:
        """Warn, in one line, of cells without a checksum."""
        if self.unsealed:
            text = f"{len(self.unsealed)} cells in {self.folder} were written by an older version and have no checksum"
            warnings.warn(f"{text}: damage to them would not be seen", UserWarning, stacklevel=3)

    def _read(self, key: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]] | None:
        """Words, parts of the key, and arrays."""
        file = self.path(key)
        if not os.path.lexists(file):
            return None
        try:
            found = _READER.sealed(file, ("cell", "parts"))
            if found is None:
                self.unsealed.add(key)
                found = _READER.arrays(file, ("cell", "parts"))
            arrays, said = found
            words = _READER.json(file, said["cell"], _SCHEMA)
            if words["format"] > FORMAT:
                raise _READER.damaged(file, f"it is of format {words['format']}")
            parts = _READER.json(file, said["parts"], {str: object})
            if _KEY.fullmatch(key) and key_of(parts) != key:
                raise _READER.damaged(file, "it is another cell, under this name")
        except DamagedError as error:
            self.damaged[key] = str(error)
            return None
        self.damaged.pop(key, None)
        return words, parts, arrays
