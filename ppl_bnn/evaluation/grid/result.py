"""The result of a grid: a row for each cell, and a row for each model, data set and method.

Seeds are averaged within a split, and methods are compared split by split, so that common effects of a split cancel.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core import stored
from ppl_bnn.core.errors import InputError, check_known
from ppl_bnn.core.files import writable, write_whole
from ppl_bnn.core.names import for_spreadsheet
from ppl_bnn.core.notebook.html import card
from ppl_bnn.core.plain_values import shown
from ppl_bnn.evaluation.comparison import columns
from ppl_bnn.evaluation.comparison.table import COLUMNS, WORDS, measure_gaps, typed
from ppl_bnn.evaluation.grid import cell as cells
from ppl_bnn.prediction import scores

if TYPE_CHECKING:
    import pandas as pd

# Version 2 added a checksum.
KIND, FORMAT = "ppl_bnn grid", 2
MANIFEST, CELLS = "grid.json", "cells"
AXES = {"models": [str], "data": [str], "splits": [str], "methods": [str], "seeds": [int]}
_SCHEMA = {
    "reference": (str, None),
    "standardise?": bool,
    "axes": AXES,
    "left_out": [str],
    "data?": {str: {str: object}},
    "cells": [[(str, int)]],
}
_READER = stored.Reader(
    "folder", "the manifest of a grid", "running the grid again, which writes it again and keeps its cells"
)
# File names are made from keys, so a key must not be able to point to another folder.
_KEY = re.compile(r"[\w-]{1,100}")
LABELS = ("model", "data", "split", "method", "seed")
# Scores that are compared, and whether larger is better.
_SCORES = ("log_score", "rmse", "crps", "accuracy", "brier", "ece", "concordance", "elpd_loo")
LARGER_IS_BETTER = {name: name not in ("rmse", "crps", "brier", "ece") for name in _SCORES}
# Further columns of a table: the mean over splits, or the worst of all cells.
_MEANS = (
    "coverage_90", "width_90", "gap_mean", "gap_sd_ratio", "gap_mean_floor", "gap_sd_floor", "parameters",
    "compile_seconds", "run_seconds", "predict_seconds", "gradient_evaluations", "peak_memory", "seconds",
)  # fmt: skip
_LARGEST = ("k_hat", "r_hat", "r_hat_test", "pareto_k_loo", "pareto_k_corrected")
_SMALLEST = ("ess_min", "ess_min_test")
# Columns of both tables that differ between two runs of one grid.
COSTS = (
    "compile_seconds", "run_seconds", "predict_seconds", "peak_memory", "seconds", "begun", "process",
)  # fmt: skip
_WORDS = (*LABELS[:-1], "key", *WORDS, "process", "device")
# They rank methods of one comparison; a grid has its own ranking.
_NOT_HERE = ("loo_rank", "loo_weight")


@dataclass(eq=False)
class GridResult:
    """The finished cells of a grid.

    Parameters
    ----------
    cells : pd.DataFrame
        One row per cell that finished or failed, in the order of the grid: the labels model, data, split, method, seed;
        the columns of a comparison (`COLUMNS`) without ranks; those of `cells.COLUMNS`; `key`. A blank is NaN or "".
        `log_score_se` is over test rows here.
    notes : dict
        Key -> column -> one sentence on a blank or a number; the warnings of a fit are under "warnings".
    axes : dict of str to list
        Name of the axis -> labels, in the order of the grid.
    reference : str, optional
        Label of the reference method.
    asked : int
        Number of cells of the grid.
    left_out : tuple of str
        Pairs of models and data that cannot be combined, each with the reason.
    folder : Path, optional
        The folder of the grid.
    absent : tuple of Cell
        The cells that have not been computed.
    settings : dict
        "methods", "models" and "data": label -> settings, bound arguments or `Table.card`; "standardise", "device".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> grid = bnn.Grid(["linear_regression"], ["diabetes"], ["map"], "random:1@0.9")
    >>> result = grid.run("grid", engine="sequential")
    >>> len(result.cells), result.missing, result.failures
    (1, 0, 0)
    """

    cells: pd.DataFrame
    notes: dict[str, dict[str, str]]
    axes: dict[str, list[Any]]
    reference: str | None
    asked: int
    left_out: tuple[str, ...] = ()
    folder: Path | None = None
    absent: tuple[cells.Cell, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"GridResult({len(self.cells)} of {self.asked} cells, {self.failures} failed; {self.folder})"

    def _repr_html_(self) -> str:
        """The tables of the terminal: one for each model and data set."""
        table: Any = self.table()
        listings = []
        for (model, data), block in table.groupby(level=["model", "data"], sort=False) if len(table) else ():
            methods = block.droplevel(["model", "data"])
            listings.append(columns.listing(methods, f"{model} on {data}", columns.of_grid(methods)))
        return card(repr(self), *listings, self.left_out)

    @property
    def missing(self) -> int:
        """Number of cells that have not been computed."""
        return self.asked - len(self.cells)

    @property
    def failures(self) -> int:
        """Number of cells that have failed; the column `failure` gives the reason."""
        return int(np.count_nonzero(self.cells["failure"] != ""))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], reference: str | None = None) -> GridResult:
        """Load the folder of a grid, also while it is being computed.

        A damaged cell gives a warning and counts as missing.

        Parameters
        ----------
        folder : str or PathLike
            Folder of a grid.
        reference : str, optional
            Another method than the grid's to measure gaps against.

        Returns
        -------
        GridResult
            What the folder holds.

        Raises
        ------
        InputError, DamagedError, UnknownNameError
            Not a folder of a grid; a damaged manifest; a reference that is not a method of the grid.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            got = f"{folder}, without {MANIFEST}"
            raise InputError.of("folder", "the folder of a grid", got, "the folder given to `run`")
        axes = manifest["axes"]
        check_known("reference", [] if reference is None else [reference], axes["methods"])
        reference = reference or manifest["reference"]
        store = cells.Store(Path(folder) / CELLS)
        planned = [cells.Cell(*entry) for entry in manifest["cells"]]
        found = {cell.key: words for cell in planned if (words := store.words(cell.key)) is not None}
        store.warn_of_damaged("are left out; running the grid again computes them")
        finished = [cell for cell in planned if cell.key in found]
        rows = {cell: _row(cell, found[cell.key]) for cell in finished}
        notes = {key: _notes(words) for key, words in found.items()}
        if reference is not None:
            _measure_gaps(finished, reference, found, store, rows, notes)
        frame, left_out = _frame(list(rows.values())), tuple(manifest["left_out"])
        notes = {key: columns for key, columns in notes.items() if columns}
        absent = tuple(cell for cell in planned if cell.key not in found)
        settings = _settings(finished, store, manifest)
        return cls(frame, notes, axes, reference, len(planned), left_out, Path(folder), absent, settings)

    def arrays(self, key: str) -> dict[str, np.ndarray]:
        """The stored arrays of a cell (`cells.ARRAYS`); empty for a failed cell.

        Parameters
        ----------
        key : str
            Key of the cell.

        Returns
        -------
        dict of str to np.ndarray
            Name -> array.
        """
        return {} if self.folder is None else cells.Store(self.folder / CELLS).arrays(key)

    def by_split(self, score: str = "log_score") -> pd.DataFrame:
        """The mean of a column over seeds: one row for each model, data set and split, one column for each method.

        Parameters
        ----------
        score : str
            Name of the column.

        Returns
        -------
        pd.DataFrame
            NaN if a method has no result. Methods and splits without any result are left out.
        """
        found = _by_split(self.cells, score, ["model", "data", "split"])
        return found[[name for name in self.axes["methods"] if name in found.columns]]

    def table(self, *, corrected: bool = True) -> pd.DataFrame:
        """One row for each model, data set and method, which are its index.

        Parameters
        ----------
        corrected : bool
            Whether to allow for training rows that splits share: errors over J splits are sd sqrt(1 / J + test rows /
            training rows) (Nadeau and Bengio 2003) instead of sd / sqrt(J). With one split there is no error.

        Returns
        -------
        pd.DataFrame
            Columns:

            splits, cells, failures
                Number of splits and cells with a result, and of failed cells. Means are over available results.
            reference
                "reference" for the reference method, with the reasons why it may not be a valid one.
            log_score, rmse, crps, accuracy, brier, ece, concordance, elpd_loo
                Mean over splits. `<score>_se` is its standard error. `<score>_to_best` and `<score>_to_best_se` are the
                mean and standard error of paired differences, over common splits, of this method minus the one with the
                best mean among those with the most splits. `<score>_to_reference` is the same for the reference.
            converged
                Share of the chains' cells that converged.
            the rest
                Means over splits; the largest R-hat, k-hat and Pareto k of all cells, and the smallest ESS.

        References
        ----------
        Nadeau and Bengio (2003), Machine Learning 52, 239-281.
        """
        import pandas as pd

        every: Any = self.cells
        rows: dict[Any, dict[str, Any]] = {}
        for (model, data), block in every.groupby(["model", "data"], sort=False):
            methods = [name for name in self.axes["methods"] if name in set(block["method"])]
            share = float(np.mean(block["test_rows"] / block["train_rows"])) if corrected else math.nan
            ratio = share if share > 0.0 else None
            by_split = {column: _by_split(block, column) for column in (*_SCORES, *_MEANS)}
            for name in methods:
                row = rows[model, data, name] = self._of_method(block[block["method"] == name], name)
                known = [column for column, values in by_split.items() if name in values.columns]
                for score in [each for each in _SCORES if each in known]:
                    row |= _compared(by_split[score], name, score, self.reference, ratio)
                for column in [each for each in _MEANS if each in known]:
                    row[column] = float(np.mean(by_split[column][name].dropna()))
        columns = [name for name in _table_columns() if any(name in row for row in rows.values())]
        names = ["model", "data", "method"]
        index = pd.MultiIndex.from_tuples(list(rows), names=names) if rows else None
        return pd.DataFrame(list(rows.values()), index=index, columns=columns)

    def _of_method(self, block: Any, name: str) -> dict[str, Any]:
        done = block[block["failure"] == ""]
        row: dict[str, Any] = {
            "splits": len(set(done["split"])),
            "cells": len(done),
            "failures": len(block) - len(done),
            "reference": "",
            "ppl": ", ".join(dict.fromkeys(done["ppl"])),
            "kind": ", ".join(dict.fromkeys(done["kind"])),
        }
        converged = done["converged"][done["kind"] == "chains"]
        if len(converged):
            row["converged"] = float(np.mean(converged == "yes"))
        if name == self.reference and len(done):
            words = [
                f"{doubt}: {n} of {len(done)} cells" for doubt, n in doubts_of(done["reference"]).items()
            ]
            row["reference"] = "reference" + (f" ({'; '.join(words)})" if words else "")
        worst = done[[*_LARGEST]].max().to_dict() | done[[*_SMALLEST]].min().to_dict()
        return row | {column: value for column, value in worst.items() if not math.isnan(value)}

    def save(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Write `cells.csv` and `table.csv`, and `cells.parquet` if pyarrow is installed, each whole or not at all.

        Parameters
        ----------
        folder : str or PathLike, optional
            The folder; by default that of the grid.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        InputError
            The folder cannot be written.
        """
        folder = self.folder if folder is None else folder
        if folder is None:
            raise InputError.of("folder", "a folder", "none, for a result that has none", "save(folder)")
        place = writable(folder)
        write_whole(place / "cells.csv", lambda path: for_spreadsheet(self.cells).to_csv(path, index=False))
        write_whole(place / "table.csv", lambda path: for_spreadsheet(self.table()).to_csv(path))
        if importlib.util.find_spec("pyarrow") is not None:
            write_whole(place / "cells.parquet", lambda path: self.cells.to_parquet(path, index=False))
        return place


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a grid's folder, or None. Raises DamagedError, and UnsupportedError for another format."""
    file = Path(folder) / MANIFEST
    words = _READER.manifest(file, KIND, FORMAT, _SCHEMA)
    for index, entry in enumerate([] if words is None else words["cells"]):
        kinds = [type(each) for each in entry]
        if kinds != [str, str, str, str, int, str] or not _KEY.fullmatch(entry[-1]):
            raise _READER.damaged(file, f"cells[{index}] is {shown(entry)}, which is no cell")
    return words


# --- rows -----------------------------------------------------------------------------------------------------


def _row(cell: cells.Cell, words: Mapping[str, Any]) -> dict[str, Any]:
    figures = {name: value for name, value in words.get("figures", {}).items() if value is not None}
    row = asdict(cell) | figures | words.get("costs", {})
    row |= {"ppl": words.get("ppl", ""), "failure": words["failure"]}
    return row | dict(zip(("train_rows", "test_rows"), words.get("rows", ()), strict=False))


def _notes(words: Mapping[str, Any]) -> dict[str, str]:
    warned = {"warnings": " ".join(words["warnings"])} if words.get("warnings") else {}
    return words.get("notes", {}) | warned


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    measured = [name for name in (*COLUMNS, *cells.COLUMNS) if name not in (*_NOT_HERE, "failure")]
    columns = [*LABELS, "train_rows", "test_rows", *measured, "failure", "key"]
    frame = typed(pd.DataFrame(rows, columns=columns), _WORDS)
    return frame.astype({"seed": np.int64})


def _measure_gaps(
    finished: list[cells.Cell],
    reference: str,
    found: Mapping[str, Mapping[str, Any]],
    store: cells.Store,
    rows: dict[cells.Cell, dict[str, Any]],
    notes: dict[str, dict[str, str]],
) -> None:
    """Measure each cell against the reference of the same model, data, split and seed, one such group at a time."""
    groups: dict[tuple[Any, ...], list[cells.Cell]] = {}
    for cell in finished:
        groups.setdefault((cell.model, cell.data, cell.split, cell.seed), []).append(cell)
    for group in groups.values():
        keys = {cell.method: cell.key for cell in group}
        of_rows = {cell.method: rows[cell] for cell in group}
        of_notes = {method: notes[key] for method, key in keys.items()}
        classes = any(found[key].get("task") == "classification" for key in keys.values())
        measure_gaps(
            reference, of_rows, of_notes, lambda method, keys=keys: store.arrays(keys[method]), classes
        )


def _settings(finished: list[cells.Cell], store: cells.Store, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of methods and models from the first cell of each, and the cards of the data, if they were kept."""
    found: dict[str, Any] = {"methods": {}, "models": {}, "data": dict(manifest.get("data", {}))}
    for cell in finished:
        if cell.method in found["methods"] and cell.model in found["models"]:
            continue
        parts = store.parts(cell.key)
        if parts is None or "method" not in parts:
            continue
        found["methods"].setdefault(cell.method, parts["method"])
        model = {name: parts["model"][name] for name in ("arguments", "likelihood")}
        found["models"].setdefault(cell.model, model)
        found |= {name: parts[name] for name in ("standardise", "device")}
    return found


# --- tables ---------------------------------------------------------------------------------------------------


def _by_split(block: Any, column: str, index: str | list[str] = "split") -> Any:
    """Split x method: the mean over seeds of the available results."""
    done = block[(block["failure"] == "") & block[column].notna()]
    return done.pivot_table(index=index, columns="method", values=column, aggfunc="mean", sort=False)


def best_method(by_split: Any, larger: bool) -> str:
    """The method with the best mean, among those with results on the most splits. Rows of `by_split` are splits."""
    counts = by_split.notna().sum()
    means = by_split.loc[:, counts == counts.max()].mean()
    return str(means.idxmax() if larger else means.idxmin())


def doubts_of(standings: Any) -> Counter[str]:
    """How many cells have each reason why the reference may not be a valid one (`summary.standing`)."""
    doubts = (word.removeprefix("reference").strip(" ()") for word in standings)
    return Counter(filter(None, doubts))


def _compared(
    by_split: Any, name: str, score: str, reference: str | None, ratio: float | None
) -> dict[str, float]:
    best = best_method(by_split, LARGER_IS_BETTER[score])
    values = by_split[name].dropna().to_numpy()
    mean = scores.paired_difference(values, np.zeros(len(values)), test_to_train=ratio)
    row = {score: mean[0], f"{score}_se": mean[1]}
    for word, other in (("best", best), ("reference", reference)):
        if other is None or other not in by_split.columns:
            continue
        both = by_split[[name]].assign(other=by_split[other]).dropna()
        if name == other or both.empty:
            continue
        pair = both[name].to_numpy(), both["other"].to_numpy()
        difference = scores.paired_difference(*pair, test_to_train=ratio)
        row |= {f"{score}_to_{word}": difference[0], f"{score}_to_{word}_se": difference[1]}
    return row


def _table_columns() -> Iterator[str]:
    yield from ("splits", "cells", "failures", "reference", "ppl", "kind", "converged")
    for score in LARGER_IS_BETTER:
        yield from (score, f"{score}_se")
        for word in ("best", "reference"):
            yield from (f"{score}_to_{word}", f"{score}_to_{word}_se")
    yield from (*_MEANS[:2], *_LARGEST, *_SMALLEST, *_MEANS[2:])
