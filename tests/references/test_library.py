"""Stored references: found, checked by hash, listed, and loaded without any framework."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ppl_bnn.core.errors import DamagedError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.core.stored import digest
from ppl_bnn.datasets.readers import ChecksumError
from ppl_bnn.references import folder as folders
from ppl_bnn.references import library as stored

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name, each in stored.index().items() if each["entry"]["grade"] != "failed"]
HERE = ROOT / "comparisons" / "references"


def test_a_folder_is_listed_and_loaded(library: Path) -> None:
    entry = stored.entries()["known-line"]
    assert (entry.grade, entry.model, entry.data) == ("certified", "linear_regression", "line")
    reference = stored.load("known-line")
    assert reference.draws["test"].shape == (4000, 10, 1)
    assert repr(reference) == "<Reference known-line: certified, 3 weights, 6 rows, 4000 draws>"
    assert stored.load("known-line", library).name == "known-line"


@pytest.mark.parametrize("file", [folders.CARD, folders.DRAWS, folders.CERTIFICATE])
def test_one_altered_byte_is_refused(library: Path, file: str) -> None:
    path = library / "known-line" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if file == folders.CERTIFICATE:
        # Nothing has its hash but the index of the project; what it says of the others is still checked.
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedError, match=file):
        stored.load("known-line")


def test_what_is_missing_or_failed_is_refused(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'known-line'"):
        stored.load("known-lime")
    with pytest.raises(InputError, match="a folder of references"):
        stored.load("known-line", tmp_path / "nowhere")
    folder = library / "known-line"
    certificate = json.loads((folder / folders.CERTIFICATE).read_text())
    with np.load(folder / folders.DRAWS) as archive:
        arrays = {name: archive[name] for name in archive.files if name != "pairs"}
    np.savez(folder / folders.DRAWS, **arrays)
    certificate["sha256"][folders.DRAWS] = digest(folder / folders.DRAWS)
    (folder / folders.CERTIFICATE).write_text(json.dumps(certificate))
    with pytest.raises(DamagedError, match="pairs"):
        stored.load("known-line")
    card = json.loads((folder / folders.CARD).read_text()) | {"grade": "failed"}
    (folder / folders.CARD).write_text(json.dumps(card))
    with pytest.raises(UnsupportedError, match="a record of failure"):
        stored.load("known-line")
    monkeypatch.setenv(stored.FOLDER, str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=stored.FOLDER):
        stored.entries()


def test_a_missing_file_is_named(library: Path) -> None:
    (library / "known-line" / folders.DRAWS).unlink()
    with pytest.raises(DamagedError, match=r"a file reference\.npz"):
        stored.load("known-line")


def test_a_certificate_of_another_schema_is_refused(library: Path) -> None:
    folder = library / "known-line"
    card = json.loads((folder / folders.CARD).read_text()) | {"schema": 99}
    (folder / folders.CARD).write_text(json.dumps(card))
    certificate = json.loads((folder / folders.CERTIFICATE).read_text())
    certificate["sha256"][folders.CARD] = digest(folder / folders.CARD)
    (folder / folders.CERTIFICATE).write_text(json.dumps(certificate))
    with pytest.raises(UnsupportedError, match="schema 1"):
        stored.load("known-line")


def test_neither_a_folder_nor_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    if not NAMES:
        pytest.skip("no reference is stored")
    monkeypatch.delenv(stored.FOLDER, raising=False)
    monkeypatch.delenv(stored.ADDRESS, raising=False)
    monkeypatch.setattr(stored, "_CHECKOUT", ROOT / "nowhere")
    with pytest.raises(InputError, match=f"{stored.FOLDER}.*{stored.ADDRESS}"):
        stored.load(NAMES[0])


def test_without_a_folder_files_are_downloaded_once_and_checked(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = library / "known-line"
    sha256 = {file.name: digest(file) for file in folder.iterdir()}
    entry = {"grade": "certified", "model": "m", "data": "d", "weights": 3, "rows": 6, "outputs": 1}
    monkeypatch.setattr(stored, "index", lambda: {"known-line": {"entry": entry, "sha256": sha256}})
    monkeypatch.delenv(stored.FOLDER)
    monkeypatch.setattr(stored, "_CHECKOUT", tmp_path / "nowhere")
    monkeypatch.setenv("PPL_BNN_CACHE", str(tmp_path / "cache"))
    handler = functools.partial(Quiet, directory=str(library))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(stored.ADDRESS, f"http://127.0.0.1:{server.server_port}/")
        assert stored.load("known-line").name == "known-line"
        assert len(Quiet.asked) == 3
        assert stored.load("known-line").name == "known-line"
        assert len(Quiet.asked) == 3
        kept = tmp_path / "cache" / "references" / "known-line" / folders.CARD
        kept.unlink()
        (folder / folders.CARD).write_text("{}")
        with pytest.raises(ChecksumError, match="SHA-256"):
            stored.load("known-line")
        assert not kept.exists()
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: Any) -> None:
        self.asked.append(self.path)


def test_loading_and_grading_need_numpy_only(library: Path) -> None:
    """In a process in which nothing else can be imported."""
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in KNOWN:
            raise ImportError(f"{name} is not here")
KNOWN = {"jax", "torch", "numpyro", "pyro", "scipy", "pandas", "matplotlib", "arviz", "sklearn", "safetensors", "rich",
         "typer", "jinja2", "pooch", "xarray", "h5netcdf", "h5py", "joblib", "optax", "blackjax", "cloudpickle"}
sys.meta_path.insert(0, Refuse())
import ppl_bnn as bnn
reference = bnn.references.load("known-line")
print(reference.grade(draws=reference.draws))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Against known-line")


# --- the references of the project ------------------------------------------------------------------------


def test_the_index_is_that_of_the_stored_files() -> None:
    if not HERE.is_dir():
        pytest.skip("no checkout")
    here = {card.parent.name: card.parent for card in HERE.glob(f"*/{folders.CARD}")}
    assert set(here) == set(stored.index())
    for name, folder in here.items():
        files = {file.name: digest(file) for file in folder.iterdir()}
        assert files == stored.index()[name]["sha256"], name
        size = sum(file.stat().st_size for file in folder.iterdir())
        assert size < 2_000_000, name


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_reference_has_what_it_promises(name: str) -> None:
    reference = stored.load(name)
    assert reference.card["grade"] in ("certified", "mode-weighted", "bracketed")
    assert reference.card["data"]["licence"]
    assert reference.card["licence"]
    assert len(reference.draws["test"]) >= 2000
    assert sum(len(x) for x in reference.x.values()) * reference.outputs <= 200
    assert all(
        each["holds"]
        for part in ("full runs", "stored arrays")
        for each in reference.certificate[f"from the {part}"]
    )


def spread(g: np.ndarray, weights: np.ndarray, classes: bool) -> float:
    """The geometric mean ratio of standard deviations of weighted and of equal draws g (S, rows, K).

    For classes, variances of a row are added, and rows count by these.
    """
    mean = np.tensordot(weights, g, 1)
    variance, base = np.tensordot(weights, (g - mean) ** 2, 1), g.var(axis=0)
    if classes:
        variance, base = variance.sum(axis=-1), base.sum(axis=-1)
    by_row = base / base.sum() if classes else np.full(base.shape, 1.0 / base.size)
    return float(np.exp(0.5 * np.sum(by_row * np.log(variance / base))))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_posterior_gets_the_grade_it_deserves(name: str) -> None:
    """Too narrow by 0.9, tempered to 0.8, one half of the posterior, and the prior."""
    reference, rng = stored.load(name), np.random.default_rng(0)
    f = reference.arrays["f"].astype(float)
    f = f.reshape(f.shape[0] * f.shape[1], -1, reference.outputs)
    likelihood = reference.arrays["log_likelihood"].astype(float).ravel()

    def figures(draws: np.ndarray) -> dict[str, float]:
        return dict(
            reference.grade(
                draws={region: draws[:, rows] for region, rows in reference.slices.items()}
            ).figures["all"]
        )

    same = figures(f)
    assert same["worth_mean"] == same["limit_mean"]
    assert same["worth_sd"] == same["limit_sd"]
    narrow = figures(f.mean(axis=0) + 0.9 * (f - f.mean(axis=0)))
    assert narrow["sd_ratio"] < 0.97
    assert narrow["worth_sd"] < 200.0
    # p(w) p(D | w)^1.25, by importance weights.
    log_weights = 0.25 * likelihood
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    cold = figures(f[rng.choice(len(f), len(f), p=weights)])
    # What importance weights give without drawing again: of 4000 draws a ratio has a standard error of a hundredth.
    exact = reference.graded(np.arange(f.shape[1]))
    wanted = spread(exact, weights, reference.link != "identity")
    assert cold["sd_ratio"] == pytest.approx(wanted, abs=0.04)
    assert cold["worth_sd"] < 0.5 * cold["limit_sd"]
    # Half of the posterior, by the direction in which it varies most: as of a sampler that misses a mode.
    flat = exact.reshape(len(exact), -1)
    column = (flat - flat.mean(axis=0)) @ np.linalg.eigh(np.cov(flat, rowvar=False))[1][:, -1]
    chosen = column > np.median(column)
    if "mode" in reference.arrays:
        # One mode of those that there are.
        chosen = np.tile(reference.arrays["mode"] == 0, reference.shape[0])
    half = figures(f[chosen])
    assert half["mean_error"] > 3.0 * half["mean_floor"]
    assert half["worth_mean"] < 200.0
    prior = reference.arrays["prior"].astype(float).reshape(-1, *f.shape[1:])
    assert figures(prior)["worth_mean"] < 50.0
