"""The reference posteriors: their problems, the checks of a certificate on draws with a known answer, and one made."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from comparisons import reference_certificate as certificate
from comparisons import reference_problems as problems
from ppl_bnn.core.errors import InputError, UnknownNameError
from ppl_bnn.core.stored import digest

ENTRIES = problems.Entry.read()
PAIRS = np.array([[0, 1], [1, 2], [0, 3]])
COVARIANCE = np.array(
    [[1.0, 0.5, 0.2, 0.0], [0.5, 2.0, 0.3, 0.1], [0.2, 0.3, 0.5, 0.0], [0.0, 0.1, 0.0, 1.0]]
)


@pytest.fixture(scope="module")
def references() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(certificate.__file__).parent))
        yield importlib.import_module("references")


def normal(seed: int, chains: int = 16, draws: int = 250) -> np.ndarray:
    """Independent draws (chain, draw, 4) of a normal distribution with mean 1."""
    rng = np.random.default_rng(seed)
    return 1.0 + rng.multivariate_normal(np.zeros(4), COVARIANCE, size=(chains, draws))


def stored(seed: int = 0) -> dict[str, np.ndarray]:
    """What a reference would store of exact draws of a standard normal in three dimensions, f among them."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((16, 250, 3))
    f = np.concatenate([u, u[..., :1] + u[..., 1:2]], axis=-1)
    energy = rng.standard_normal((16, 1000))
    flat = f.reshape(-1, 4)
    halves = [certificate.moments(each, PAIRS) for each in (flat[:2000], flat[2000:])]
    second = {name: np.stack([each[name] for each in halves]) for name in halves[0]}
    evidences = -3.0 + 0.05 * rng.standard_normal((2, 6))
    return {
        "f": f.astype(np.float32),
        "pairs": PAIRS,
        "log_likelihood": -0.5 * u[..., 0] ** 2,
        "log_prior": -0.5 * u[..., 1] ** 2,
        "scales": u[..., 2:],
        "virial": np.stack([u[..., 0] ** 2, (u[..., 1:] ** 2).sum(-1)], axis=-1),
        "sites": np.array(["one", "two"]),
        "dimensions": np.array([1, 2]),
        "energy": energy,
        "diverging": np.zeros((16, 1000), dtype=bool),
        "reached_max_tree_depth": np.zeros((16, 1000), dtype=bool),
        **{f"second_{name}": value for name, value in second.items()},
        "second": np.array("SMC"),
        "log_evidence": evidences,
        "integral": np.array([-3.0, -3.0]),
        "integral_error": np.array([0.02, 0.02]),
    }


def failing(arrays: dict[str, np.ndarray]) -> set[str]:
    return {check.name for check in certificate.recompute(arrays) if not check.holds}


# --- problems -----------------------------------------------------------------------------------------


# A network is fitted for their features. Wherever its fit ends, the regions are the same rows.
FITTED = ("digits_lenet", "digits_transformer")


def entries() -> list[Any]:
    """The names; those of downloaded tables are skipped without the tables."""
    cards, found = bnn.data.datasets(), []
    without = pytest.mark.skipif(
        not os.environ.get("PPL_BNN_DATA"), reason="needs the tables of PPL_BNN_DATA"
    )
    for name, entry in ENTRIES.items():
        downloaded = entry.data in cards and cards[entry.data].where == "downloaded"
        slow = pytest.mark.slow if entry.data in FITTED else ()
        found.append(pytest.param(name, marks=without if downloaded else slow))
    return found


@pytest.mark.parametrize("name", entries())
def test_a_problem_is_frozen_and_its_regions_do_not_meet_the_training_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "FEATURE_STEPS", 30)
    entry = ENTRIES[name]
    found = problems.problem(entry)
    if entry.data not in FITTED:
        np.testing.assert_array_equal(found.inputs, problems.problem(entry).inputs)
    assert len(found.x) == len(found.y) == entry.rows
    assert set(found.grid) == set(problems.REGIONS)
    assert 40 <= len(found.inputs) * entry.outputs <= 200
    rows = {row.tobytes() for row in found.x}
    assert all(row.tobytes() in rows for row in found.grid["train"])
    assert not any(row.tobytes() in rows for region in ("test", "gap", "far") for row in found.grid[region])
    for region, y in found.targets.items():
        assert len(y) == len(found.grid[region])
    pairs = found.pairs()
    assert len({tuple(pair) for pair in pairs.tolist()}) == len(pairs)
    assert pairs.max() < len(found.inputs)


def test_the_gap_of_a_table_is_the_middle_of_its_feature() -> None:
    found = problems.problem(ENTRIES["linear_regression-diabetes"])
    feature = ENTRIES["linear_regression-diabetes"].feature
    gap, train = found.grid["gap"][:, feature], found.x[:, feature]
    assert not np.any((train >= gap.min()) & (train <= gap.max()))
    assert np.mean(train < gap.min()) == pytest.approx(0.5, abs=0.1)
    np.testing.assert_allclose(found.x.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(found.y.std(), 1.0)
    np.testing.assert_array_equal(
        found.grid["far"], problems.FAR * found.grid["test"][: len(found.grid["far"])]
    )


def test_what_cannot_be_a_problem_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="diabetes"):
        problems.problem(problems.Entry("a", "linear_regression", "diabetis"))
    with pytest.raises(InputError, match="rows=442"):
        problems.problem(problems.Entry("a", "linear_regression", "diabetes", rows=442))
    with pytest.raises(InputError, match="chains"):
        problems.Entry("a", "linear_regression", "diabetes", chains=4)


# --- the certificate ----------------------------------------------------------------------------------


def test_exact_draws_are_certified_and_each_fault_is_found() -> None:
    assert failing(stored()) == set()
    faults: dict[str, Any] = {
        "f at the grid: R-hat": lambda a: a["f"][0].__iadd__(1.0),
        "divergences": lambda a: a["diverging"][3].__setitem__(7, True),
        "saturated trees": lambda a: a["reached_max_tree_depth"][9].__setitem__(0, True),
        "E-BFMI": lambda a: a["energy"][2].__setitem__(slice(None), np.linspace(0.0, 50.0, 1000)),
        "run a against run b: difference in mean": lambda a: a["f"][8:].__iadd__(0.15),
        "run a against run b: difference in sd": lambda a: a["f"][8:].__imul__(1.15),
        "of two": lambda a: a["virial"].__imul__(1.1),
        "SMC, run b: difference in mean": lambda a: a["second_mean"][1].__iadd__(0.15),
        "SMC, run a: difference in covariance": lambda a: a["second_covariance"][0].__iadd__(0.3),
        "standard error, in nats, run a": lambda a: a["log_evidence"][0].__imul__(np.linspace(0.8, 1.2, 6)),
        "thermodynamic integration, in nats, run b": lambda a: a["integral"].__setitem__(1, -3.4),
    }
    for name, fault in faults.items():
        arrays = {key: value.copy() for key, value in stored().items()}
        fault(arrays)
        assert any(name in each for each in failing(arrays)), name


def test_false_alarms_are_rare() -> None:
    """Of 20 seeds of exact draws; of 200 there was none."""
    assert sum(bool(failing(stored(seed))) for seed in range(1, 21)) <= 1


def test_differences_are_in_units_of_the_reference() -> None:
    f = normal(0).reshape(-1, 4)
    scale = f.std(axis=0)
    one, other = certificate.moments(f, PAIRS), certificate.moments(2.0 * f + scale, PAIRS)
    found = certificate.differences(one, other, PAIRS, scale)
    assert found["sd"] == pytest.approx(np.log(2.0))
    wanted = np.sqrt(np.mean(((f.mean(axis=0) + scale) / scale) ** 2))
    assert found["mean"] == pytest.approx(wanted)
    correlations = one["covariance"] / (scale[PAIRS[:, 0]] * scale[PAIRS[:, 1]])
    assert found["covariance"] == pytest.approx(3.0 * np.sqrt(np.mean(correlations**2)))


def test_total_variation_of_normals_is_the_known_one() -> None:
    from scipy.stats import norm

    f = np.random.default_rng(0).standard_normal((200_000, 1))
    # On intervals it is at most the exact one.
    exact = 2.0 * norm.cdf(0.5) - 1.0
    assert certificate.total_variation(f, f[::-1] + 1.0) == pytest.approx(exact, abs=0.01)


# --- one that is made ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_a_reference_is_made_resumed_and_checked(
    references: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = importlib.import_module("reference_parts")
    monkeypatch.setattr(parts, "NODE_DRAWS", 300)
    monkeypatch.setattr(parts, "NODE_WARMUP", 200)
    monkeypatch.setattr(parts, "POINTS", 100)
    entry = problems.Entry("small", "linear_regression", "curve_with_a_gap", rows=20, draws=1000, warmup=300)
    assert references.make(entry, tmp_path / "work", tmp_path / "out") == "certified"
    folder = tmp_path / "out" / "small"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000
    card = json.loads((folder / "card.json").read_text())
    assert (card["weights"], card["rows"]) == (3, 20)
    assert references.check("small", folder)
    # Closed form: given the noise, f is normal; its mean over the noise is that of ridge regression at each draw.
    with np.load(folder / "reference.npz") as arrays:
        x = np.concatenate([arrays["x"], np.ones((20, 1))], axis=1)
        grid = np.concatenate([arrays[f"x_{region}"] for region in problems.REGIONS])
        grid = np.concatenate([grid, np.ones((len(grid), 1))], axis=1)
        noise = arrays["scales"].astype(float).ravel()
        exact = [
            grid @ np.linalg.solve(x.T @ x / each**2 + np.eye(2), x.T @ arrays["y"] / each**2)
            for each in noise
        ]
        np.testing.assert_allclose(
            arrays["mean"], np.mean(exact, axis=0), atol=4.0 * (arrays["sd"] / 50.0).max()
        )
        changed = {name: arrays[name] for name in arrays.files}
    # One altered number is found by its hash, and by the checks where it matters.
    changed["f"] = changed["f"].copy()
    changed["f"][0, 0, 0] += 1.0
    np.savez_compressed(folder / "reference.npz", **changed)
    assert not references.check("small", folder)
    # Parts of another entry are not taken for those of this one.
    other = replace(entry, rows=30)
    with pytest.raises(ValueError, match="another size"):
        references.make(other, tmp_path / "work", tmp_path / "out")
    # What had finished is read, not computed again.
    monkeypatch.setattr(references, "nuts", lambda *_: pytest.fail("it was computed again"))
    assert references.make(entry, tmp_path / "work", tmp_path / "out") == "certified"
    assert references.check("small", folder)


STORED = sorted(file.parent.name for file in problems.FOLDER.glob("*/certificate.json"))


@pytest.mark.parametrize("name", STORED)
def test_a_stored_certificate_is_computed_again(references: Any, name: str) -> None:
    assert name in ENTRIES
    assert references.check(name, problems.FOLDER / name)


def test_an_altered_number_breaks_a_certificate(references: Any, tmp_path: Path) -> None:
    """Also if the certificate has the hash of the altered file."""
    name = "linear_regression-surface"
    folder = shutil.copytree(problems.FOLDER / name, tmp_path / name)
    with np.load(folder / "reference.npz") as archive:
        arrays = {each: archive[each] for each in archive.files}
    arrays["f"][3, 5, 7] += 0.5
    np.savez(folder / "reference.npz", **arrays)  # pyright: ignore[reportArgumentType]
    assert not references.check(name, folder)
    certificate = json.loads((folder / "certificate.json").read_text())
    certificate["sha256"]["reference.npz"] = digest(folder / "reference.npz")
    (folder / "certificate.json").write_text(json.dumps(certificate))
    assert not references.check(name, folder)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_a_stored_reference_is_calibrated(
    references: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "linear_regression-surface"
    folder = shutil.copytree(problems.FOLDER / name, tmp_path / name)
    before = json.loads((folder / "certificate.json").read_text())
    with np.load(folder / "reference.npz") as archive:
        draws = archive["f"]
    few = replace(ENTRIES[name], simulations=20, draws=200, warmup=200)
    # Where chains of short runs do not mix, those of long ones have the entry's own settings.
    monkeypatch.setattr(references, "MIXED", 0.0)
    assert references.calibrate(few, tmp_path / "work", tmp_path) == "certified"
    after = json.loads((folder / "certificate.json").read_text())
    long = problems.problem(few), tmp_path / "work" / name
    assert after["cost"]["calibration"]["seed"] == references.calibrated(few, *long)[1]["seed"]
    assert after["cost"]["calibration"]["seed"] != before["cost"]["calibration"]["seed"]
    assert after["from the full runs"] == before["from the full runs"]
    with np.load(folder / "reference.npz") as archive:
        np.testing.assert_array_equal(archive["f"], draws)
        assert archive["ranks"].shape[0] == archive["calibration_rhat"].shape[0] == 20
    assert references.check(name, folder)
    # A posterior that the truth is never inside of fails.
    monkeypatch.setattr(references, "calibrated", lambda *_: ({"ranks": np.zeros((20, 6), int)}, {}))
    assert references.calibrate(few, tmp_path / "work", tmp_path) == "failed"
    assert not (folder / "reference.npz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(file.stem for file in (problems.FOLDER / "programs").glob("*.py")))
def test_the_log_joint_by_hand_is_that_of_both_systems(
    references: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fifty draws from the prior and fifty points about a mode, at each of which all three have to agree.
    monkeypatch.setattr(importlib.import_module("reference_parts"), "POINTS", 100)
    data = {
        "classification_mlp": "two_classes",
        "evidence_framework": "two_classes",
        "logistic_regression": "two_classes",
        "count_mlp": "counts_simulated",
        "ordinal_mlp": "diabetes_levels",
        "survival_mlp": "survival_simulated",
        "neal_hierarchical": "wine",
        "multitask_hierarchical": "diabetes",
    }
    # Not the defaults, so that no argument is left out.
    known = inspect.signature(references.numpy_program(model).log_joint).parameters
    given = {"sigma": 1.3, "scale": 0.8, "noise_scale": 0.7, "precision": 2.0, "level": 2.0, "width": 4}
    arguments = {name: value for name, value in given.items() if name in known}
    source = data.get(model, "curve_with_a_gap")
    entry = problems.Entry(model, model, source, arguments, rows=20, scale_targets=source in ("diabetes",))
    found = references.log_joints(entry, problems.problem(entry))
    assert set(found) == {"numpyro", "pyro", "numpy"}
    checks = references.joint_checks(found)
    assert all(check.holds for check in checks), list(map(str, checks))
