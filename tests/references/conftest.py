"""A reference of a distribution that is known, made without a sampler, and the same as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppl_bnn.core.stored import digest
from ppl_bnn.references.folder import CARD, CERTIFICATE, DRAWS, SCHEMA
from ppl_bnn.references.reference import LINKS, REGIONS, Reference

ROWS = {"train": 6, "test": 10, "gap": 4, "far": 4}


def make(
    link: str = "identity", outputs: int = 1, chains: int = 8, draws: int = 500, seed: int = 0
) -> Reference:
    """f = a + b x + c_k at the grid, with standard normal a, b and c_k: independent draws of a known process."""
    rng = np.random.default_rng(seed)
    x = {
        region: np.linspace(-1.0, 1.0, rows)[:, None] + index
        for index, (region, rows) in enumerate(ROWS.items())
    }
    grid = np.concatenate(list(x.values()))[:, 0]
    a, b = rng.standard_normal((2, chains, draws, 1, 1))
    f = a + b * grid[:, None] + rng.standard_normal((chains, draws, 1, outputs))
    g = LINKS[link](f)
    total = len(grid)
    arrays: dict[str, Any] = {
        "f": f.reshape(chains, draws, -1).astype(np.float32),
        "x": x["train"],
        "y": np.zeros(6),
        "pairs": np.array([[k, k + 1] for k in range(total - 1)]) * outputs,
        "ess_mean": np.full((total, outputs), float(chains * draws)),
        "ess_sd": np.full((total, outputs), float(chains * draws)),
        **{f"x_{region}": value for region, value in x.items()},
    }
    for region in ("train", "test", "gap"):
        y = rng.integers(0, 2, ROWS[region]) if link != "identity" else rng.standard_normal(ROWS[region])
        arrays |= {f"y_{region}": y, f"lpd_{region}": np.full(ROWS[region], -1.0)}
        arrays[f"lpd_halves_{region}"] = np.full((2, ROWS[region]), -1.0)
    assert g.shape == (chains, draws, total, outputs)
    card = {
        "schema": SCHEMA,
        "name": "known-line",
        "grade": "certified",
        "model": {"name": "linear_regression", "arguments": {}},
        "data": {"name": "line"},
        "weights": 2 + outputs,
        "rows": 6,
        "outputs": {"columns": list(range(outputs)), "link": link},
        "regions": ROWS,
    }
    return Reference(card, {}, arrays)


@pytest.fixture
def known() -> Callable[..., Reference]:
    return make


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the reference "known-line", which PPL_BNN_REFERENCES names."""
    reference, folder = make(), tmp_path / "library" / "known-line"
    folder.mkdir(parents=True)
    (folder / CARD).write_text(json.dumps(dict(reference.card)))
    np.savez(folder / DRAWS, **reference.arrays)  # pyright: ignore[reportArgumentType]
    checks = [{"name": "f at the grid: R-hat", "value": 1.001, "limit": "< 1.01", "holds": True}]
    certificate = {"from the full runs": checks, "from the stored arrays": []}
    certificate["sha256"] = {name: digest(folder / name) for name in (CARD, DRAWS)}  # pyright: ignore
    (folder / CERTIFICATE).write_text(json.dumps(certificate))
    monkeypatch.setenv("PPL_BNN_REFERENCES", str(folder.parent))
    return folder.parent


assert tuple(ROWS) == REGIONS
