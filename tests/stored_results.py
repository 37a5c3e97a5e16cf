"""One small stored result of each kind, and what a reader gives of it: what the tests of stored results damage."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import ppl_bnn as bnn
from ppl_bnn.core.stored import write_manifest
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.table import COLUMNS
from ppl_bnn.evaluation.grid import cell as cells
from ppl_bnn.evaluation.grid import result as grid_result
from ppl_bnn.evaluation.grid.result import GridResult
from ppl_bnn.inference.checkpoint import Checkpoint
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.sampling.stream import Stream
from ppl_bnn.posterior.approximation import Chains
from ppl_bnn.prediction.prediction import Prediction


@dataclass(frozen=True)
class FromPrior(Method):
    """Draws from the prior as chains."""

    def run(self, problem: Any, progress: Any) -> Outcome:
        u = problem.program.prior_draws(problem.x, problem.y, problem.seed, 6)
        chains = Chains({name: value.reshape(2, 3, *value.shape[1:]) for name, value in u.items()})
        return Outcome(
            chains, statistics={"lp": np.arange(6.0).reshape(2, 3)}, figures={"elbo": float("inf")}
        )


def model(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(noise))


def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(50.0, 20.0, size=(8, 2))
    return x, 3.0 * x[:, 0] + rng.normal(size=8)


def posterior(folder: Path) -> Callable[[], Any]:
    x, y = rows()
    fitted = FromPrior(ppl="pyro").fit(model, x, y, standardise=True, feature_names=("a", "b"))
    fitted.save(folder)

    def read() -> Any:
        found = bnn.load(folder, model)
        prediction = found.predict(x[:2])
        return plain([prediction.parameters, found.statistics, found.info, found.feature_names])

    return read


def comparison(folder: Path) -> Callable[[], Any]:
    import xarray

    table: dict[str, Any] = dict.fromkeys(COLUMNS, float("nan"))
    table |= dict.fromkeys(("reference", "target", "failure"), "")
    table |= {"kind": "iid", "ppl": "pyro", "converged": "yes", "log_score": -0.5}
    values = {"w": (("chain", "draw"), np.arange(6.0).reshape(2, 3))}
    tree = xarray.DataTree.from_dict({"posterior": xarray.Dataset(values, coords={"site": ["u", "v"]})})
    Comparison(
        table=pd.DataFrame.from_dict({"svi": table}, orient="index"),
        posteriors={},
        predictions={"svi": Prediction("Normal", {"loc": np.full((2, 3), 2.7), "scale": np.ones((2, 3))})},
        trees={"svi": tree},
        diagnoses={},
        reference=None,
        notes={("svi", "k_hat"): "None."},
        data={"task": "regression", "target_name": "y", "feature_names": ("a",), "class_names": None},
        test_inputs=np.arange(3.0)[:, None],
        test_targets=np.array([2.0, 3.0, 4.0]),
    ).save(folder)

    def read() -> Any:
        found = Comparison.load(folder)
        trees = {name: each["posterior"].to_dataset().to_dict() for name, each in found.trees.items()}
        parts = {name: [each.family, each.parameters] for name, each in found.predictions.items()}
        rest = [found.table.to_dict(), found.notes, found.data, found.test_inputs, found.test_targets]
        return plain([trees, parts, *rest])

    return read


def cell(number: int) -> tuple[str, bytes]:
    """A key and the content of its file."""
    parts = {
        "number": number,
        "method": {"class": "SVI"},
        "model": {"arguments": {}, "likelihood": "Gaussian"},
    }
    parts |= {"standardise": True, "device": "cpu"}
    words = {"failure": "", "figures": {"log_score": -1.25, "kind": "iid"}, "notes": {}, "warnings": []}
    words |= {"ppl": "pyro", "rows": [20, 3], "task": "regression", "costs": {"seconds": 1.5}}
    arrays = {"log_score": np.array([-1.0, -1.5, -1.25]), "mean": np.full(3, 2.7), "variance": np.ones(3)}
    return cells.key_of(parts), cells.packed(words, json.dumps(parts), arrays)


def grid(folder: Path) -> Callable[[], Any]:
    (folder / grid_result.CELLS).mkdir(parents=True)
    listed = []
    for number in range(2):
        key, content = cell(number)
        cells.Store(folder / grid_result.CELLS).write(key, content)
        listed.append(["m", "d", f"s{number}", "svi", 0, key])
    axes = {"models": ["m"], "data": ["d"], "splits": ["s0", "s1"], "methods": ["svi"], "seeds": [0]}
    content = {"kind": grid_result.KIND, "format": grid_result.FORMAT, "reference": None, "axes": axes}
    content |= {"standardise": True, "left_out": ["m on e: another task"], "data": {}, "cells": listed}
    write_manifest(folder / grid_result.MANIFEST, content | {"files": {}})

    def read() -> Any:
        found = GridResult.load(folder)
        arrays = [found.arrays(key) for key in found.cells["key"]]
        return plain([found.cells.to_dict(), found.axes, found.left_out, found.settings, found.notes, arrays])

    return read


def checkpoint(folder: Path) -> Callable[[], Any]:
    def kept() -> Checkpoint:
        return Checkpoint.of(folder, {"seed": 1, "settings": {"steps": 5}}, "fit")

    kept().keep(lambda: {"u": np.arange(4.0), "step": np.array(3)}, last=True)
    return lambda: plain(kept().load())


def stream(folder: Path) -> Callable[[], Any]:
    def kept() -> Stream:
        return Stream.of(folder, {"seed": 1}, "chain-0")

    for first in (0, 2):
        draws = {"w": first + np.arange(4.0).reshape(1, 2, 2), "lp": np.ones((1, 2))}
        kept().write(first, draws, {"u": np.full(2, 2.5 + first)})
    return lambda: plain(kept().resume())


KINDS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "posterior": posterior,
    "comparison": comparison,
    "grid": grid,
    "checkpoint": checkpoint,
    "stream": stream,
}
# Written for people and other tools, and read by nobody here.
NOT_READ = ("comparison.csv", "figure.png")


def files(folder: Path) -> list[Path]:
    """The files that are read back."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in NOT_READ)


def plain(value: Any) -> Any:
    """A text of a value that is the same for the same bits and types alone."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if isinstance(value, dict):
        return [[repr(name), plain(each)] for name, each in value.items()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return plain(vars(value)) if hasattr(value, "__dataclass_fields__") else repr(value)


def outcome(read: Callable[[], Any]) -> tuple[str, Any]:
    """("same", the value), ("said", it with the warnings), or ("refused", the text of a named error)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = read()
        except bnn.errors.BNNError as error:
            return "refused", str(error)
    said = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    return ("said", said) if said else ("same", found)
