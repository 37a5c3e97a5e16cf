"""Reading a comparison from the folder that `folder.py` wrote; what is read is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core import stored
from ppl_bnn.core.arrays import unprefixed
from ppl_bnn.evaluation.comparison.folder import FORMAT, KIND, MANIFEST, OF_DRAWS, PREDICTION, TEST_ROWS
from ppl_bnn.evaluation.comparison.record import FitSummary
from ppl_bnn.evaluation.comparison.table import WORDS, typed
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.posterior.storage import INFO
from ppl_bnn.prediction.prediction import Prediction

_SCHEMA = {
    "reference": (str, None),
    "data": {str: object},
    "columns": [str],
    "rows": [[(str, float)]],
    "notes": [[str]],
    "failures": {str: str},
    "missing?": [str],
    "fits": {str: {"info": INFO, "shape": [int]}},
    "diagnoses": {
        str: {"verdict": str, "reasons": [str], "advice": [str], "figures": {str: object}, "subject": str}
    },
    "trees": [str],
    "predictions": [str],
}
_OF_PREDICTION = {"family": str, "class_names": ([(str, float, bool)], None), "censored": bool}
READER = stored.Reader("folder", "a whole comparison", "computing it once more")


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The content of `comparison.json`, or None. Raises DamagedError, and UnsupportedError for another format."""
    return READER.manifest(Path(folder) / MANIFEST, KIND, FORMAT, _SCHEMA)


def read_folder(folder: Path, words: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the `Comparison` whose manifest is `words`."""
    import pandas as pd

    from ppl_bnn.diagnostics.diagnose import Diagnosis

    index = pd.Index([name for name, *_ in words["rows"]], name="method")
    table = pd.DataFrame([row for _, *row in words["rows"]], index, words["columns"])
    files = words["files"]

    def read(name: str, schema: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        file = READER.listed(folder, name, files)
        arrays, texts = READER.arrays(file, ("words",))
        return arrays, READER.json(file, texts["words"], schema)

    rows = read(TEST_ROWS, {})[0]
    predictions, drawn, histories = {}, {}, {}
    drawn_at: np.ndarray | None = None
    for name in words["predictions"]:
        both = {"test": _OF_PREDICTION, "drawn?": _OF_PREDICTION}
        arrays, parts = read(f"{name}{PREDICTION}", both)
        predictions[name] = _prediction_of(parts["test"], unprefixed(arrays, "test"))
        histories[name] = unprefixed(arrays, "history")
        if "drawn" in parts:
            drawn[name] = _prediction_of(parts["drawn"], unprefixed(arrays, "drawn"))
            drawn_at = arrays["drawn_at"]
    fits = {}
    for name, fit in words["fits"].items():
        info = FitInfo(history=histories.get(name, {}), **_with_tuples(fit["info"], "warnings"))
        fits[name] = FitSummary(info, tuple(fit["shape"]))
    return {
        "table": typed(table, WORDS),
        "posteriors": {},
        "predictions": predictions,
        "trees": {name: READER.tree(READER.listed(folder, f"{name}.nc", files)) for name in words["trees"]},
        "diagnoses": {
            name: Diagnosis(**_with_tuples(found, "reasons", "advice"))
            for name, found in words["diagnoses"].items()
        },
        "reference": words["reference"],
        "notes": {(name, column): note for name, column, note in words["notes"]},
        "data": _with_tuples(words["data"], "feature_names", "class_names"),
        "test_inputs": unprefixed(rows, "inputs") or rows["x"],
        "test_targets": rows["targets"],
        "failures": dict(words["failures"]),
        "missing": tuple(words.get("missing", ())),
        "fits": fits,
        "drawn": drawn,
        "drawn_at": drawn_at,
    }


def _prediction_of(words: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Prediction:
    for name, value in arrays.items():
        if value.dtype.kind != "f":
            raise ValueError(f"{name} of a prediction is {value.dtype}, not floating-point numbers")
    found: dict[str, Any] = {name: arrays.get(name) for name in OF_DRAWS}
    return Prediction(parameters=unprefixed(arrays, "parameters"), **found, **words)


def _with_tuples(words: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The words with tuples in place of the lists of these names, where there is one."""
    return {**words, **{name: tuple(words[name]) for name in names if words.get(name) is not None}}
