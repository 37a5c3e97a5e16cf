"""Writing a comparison to a folder, as each method ends; `reading.py` reads it again."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core import stored
from ppl_bnn.core.errors import BNNError, UnsupportedError
from ppl_bnn.core.figures import save
from ppl_bnn.core.files import write_arrays, write_tree, write_whole
from ppl_bnn.core.names import for_spreadsheet
from ppl_bnn.core.plain_values import encoded
from ppl_bnn.evaluation.comparison import figures
from ppl_bnn.evaluation.comparison.record import reason
from ppl_bnn.prediction.prediction import Prediction

if TYPE_CHECKING:
    from ppl_bnn.evaluation.comparison.comparison import Comparison


# Further files of a comparison, besides its trees, its table and its figure, which are needed to read it again.
# Version 2 added checksums.
KIND, FORMAT = "ppl_bnn comparison", 2
FIGURE = "figure.png"
MANIFEST, TEST_ROWS, PREDICTION = "comparison.json", "comparison.safetensors", ".prediction.safetensors"
# The arrays of a prediction that it may lack.
OF_DRAWS = ("log_weights", "epistemic_within")


class ComparisonNotWrittenError(BNNError, OSError):
    """The folder of `compare` can no longer be written, for example because the disk is full.

    `partial` is the `Comparison` of all that had finished, which can be saved elsewhere.
    """

    def __init__(self, text: str, partial: Comparison):
        super().__init__(text)
        self.partial = partial


def write_parts(folder: stored.Folder, comparison: Comparison) -> None:
    """Write the arrays and trees that the folder has not, then the table and the manifest, which lists all of them."""
    if TEST_ROWS not in folder.files:
        write_test_rows(folder, comparison.test_inputs, comparison.test_targets)
    for name, tree in comparison.trees.items():
        if f"{name}.nc" not in folder.files:
            folder.write(f"{name}.nc", lambda path, tree=tree: write_tree(path, tree))
    for name in comparison.predictions:
        if f"{name}{PREDICTION}" not in folder.files:
            write_prediction(folder, comparison, name)
    write_whole(folder.path / "comparison.csv", for_spreadsheet(comparison.table).to_csv)
    write_words(folder, comparison)


def write_figure(folder: Path, comparison: Comparison) -> None:
    """Write figure.png; if it cannot be drawn, warn and keep everything else."""
    try:
        figure = comparison.figure()
        save(figure, folder / FIGURE)
    except (Warning, OSError):
        # A caller who has turned warnings into errors wants to see them; a full disk is not an error of the figure.
        raise
    except Exception as error:
        warnings.warn(f"{FIGURE} was not drawn: {reason(error)}", UserWarning, stacklevel=3)


def write_words(folder: stored.Folder, comparison: Comparison) -> None:
    """Write everything that is neither an array nor a tree, and the checksums of all files."""
    table = comparison.table
    content = {
        "kind": KIND,
        "format": FORMAT,
        "reference": comparison.reference,
        "data": _storable(comparison.data),
        "columns": list(table.columns),
        "rows": [[str(name), *row] for name, row in zip(table.index, table.to_numpy().tolist(), strict=True)],
        "notes": [[name, column, note] for (name, column), note in comparison.notes.items()],
        "failures": comparison.failures,
        "missing": list(comparison.missing),
        "fits": {
            # The loss curves are arrays, and written with the prediction.
            name: {
                "info": {key: _storable(value) for key, value in vars(fit.info).items() if key != "history"},
                "shape": list(fit.shape),
            }
            for name, fit in comparison.fits.items()
        },
        "diagnoses": {name: dataclasses.asdict(found) for name, found in comparison.diagnoses.items()},
        "trees": list(comparison.trees),
        "predictions": list(comparison.predictions),
    }
    folder.write_manifest(MANIFEST, content)


def _storable(value: Any) -> Any:
    """Plain values for a file; any other value, such as a description given by the user, becomes its text."""
    if isinstance(value, Mapping):
        return {str(name): _storable(each) for name, each in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_storable(each) for each in value]
    try:
        return encoded(value)
    except UnsupportedError:
        return str(value)


def write_test_rows(folder: stored.Folder, x: Any, y: np.ndarray) -> None:
    """Write the test rows."""
    inputs = {f"inputs/{name}": value for name, value in x.items()} if isinstance(x, Mapping) else {"x": x}
    _write_arrays(folder, TEST_ROWS, {**inputs, "targets": y})


def write_prediction(folder: stored.Folder, comparison: Comparison, name: str) -> None:
    """Write a prediction of the test rows, the loss curves of its fit, and its predictions for figures."""
    test, arrays = _parts_of_prediction(comparison.predictions[name], "test/")
    words = {"test": test}
    if name in comparison.fits:
        history = comparison.fits[name].info.history
        arrays |= {f"history/{key}": np.asarray(value) for key, value in history.items()}
    try:
        at, drawn = figures.drawn(comparison, name)
    except Warning:
        raise
    except Exception:
        # A model that refuses such inputs has no curve; its row of the table is not affected.
        at, drawn = None, None
    if at is not None and drawn is not None:
        words["drawn"], more = _parts_of_prediction(drawn, "drawn/")
        arrays |= {**more, "drawn_at": at}
    _write_arrays(folder, f"{name}{PREDICTION}", arrays, **words)


def _parts_of_prediction(prediction: Prediction, where: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    names = None if prediction.class_names is None else list(prediction.class_names)
    words = {"family": prediction.family, "class_names": names, "censored": prediction.censored}
    arrays = {f"{where}parameters/{name}": value for name, value in prediction.parameters.items()}
    for name in OF_DRAWS:
        if (value := getattr(prediction, name)) is not None:
            arrays[f"{where}{name}"] = value
    return words, arrays


def _write_arrays(folder: stored.Folder, name: str, arrays: Mapping[str, Any], **words: Any) -> None:
    folder.write(name, lambda path: write_arrays(path, arrays, {"words": json.dumps(words)}))
