"""The study of digits, turned digits and no digits: its parts against other oracles, its verdicts, and a tiny run."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn.prediction.prediction import Prediction

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"
TABLES = ("summary", "scores", "costs")
FIGURES = ("shift_lenet", "shift_transformer", "elsewhere")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("out_of_distribution")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def run(script: Any, folder: Path) -> Any:
    return script.main(tiny=True, out=folder, checkpoint=folder / "kept")


# --- a tiny run of all of it --------------------------------------------------------------------------


def test_every_method_has_scores_on_every_set_or_a_reason(script: Any, run: Any) -> None:
    sizes = run.sizes
    sets = [script.TEST, *(f"{script.SHIFT} {angle}" for angle in sizes.angles), script.ELSEWHERE]
    found = {
        (row["architecture"], row["method"], row["seed"], row["set"]): row for row in run.tables["scores"]
    }
    reasons = {
        (row["architecture"], row["method"], row["seed"]): row["reason"]
        for row in run.tables["costs"]
        if "processor_seconds" not in row
    }
    # At this size neither is run: both compile for seconds.
    assert {method for _, method, _ in reasons} == {script.NUTS, script.SGHMC}
    assert all(reasons.values())
    for fit in itertools.product(sizes.architectures, script.METHODS, range(sizes.seeds)):
        if fit in reasons:
            continue
        for name in sets:
            row = found.pop((*fit, name))
            wanted = ("confidence", "auroc") if name == script.ELSEWHERE else script.LABELLED
            assert all(math.isfinite(row[score]) for score in wanted), row
            assert 0.1 <= row["confidence"] <= 1.0
    assert not found


def test_files_say_how_small_the_study_is(script: Any, run: Any, folder: Path) -> None:
    for name in TABLES:
        with (folder / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name
    for name in FIGURES:
        assert matplotlib.image.imread(folder / f"{name}.png").std() > 0.01
    content = json.loads((folder / "results.json").read_text())
    assert content["numbers"]["date"]
    assert content["numbers"]["versions"]["numpy"] == np.__version__
    assert len((folder / "verdicts.txt").read_text().splitlines()) == len(run.verdicts)
    for verdict in run.verdicts:
        assert verdict.verdict == script.NOT_RUN or "smaller than the source: 80 of 60000" in verdict.numbers
    assert all("smaller than the source" in row["note"] for row in run.tables["summary"])


def test_what_was_kept_is_not_computed_again(
    script: Any, run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("computed again")

    for name in ("fit", "ensemble", "laplace", "swag", "variational", "sghmc", "nuts"):
        monkeypatch.setattr(script.Task, name, refuse)
    again = script.main(tiny=True, out=tmp_path, checkpoint=folder / "kept")
    assert again.tables == run.tables
    monkeypatch.setattr(script, "TINY", dataclasses.replace(script.TINY, epochs=4))
    with pytest.raises(ValueError, match="of another size"):
        script.main(tiny=True, out=tmp_path, checkpoint=folder / "kept")


def test_map_is_the_first_member(script: Any, run: Any, folder: Path) -> None:
    sizes = script.TINY
    task = script.Task.of(script.LENET, 0, sizes)
    alone = task.fit(task.descent())
    with np.load(folder / "kept" / "lenet-0-ensemble.npz") as weights:
        assert set(weights.files) == set(alone.draws)
        for name, value in alone.draws.items():
            np.testing.assert_array_equal(weights[name], value[0, 0])
    expected = script.evaluated(task.predict(alone), task.images, sizes)
    own = [
        row
        for row in run.tables["scores"]
        if (row["architecture"], row["method"], row["seed"]) == (script.LENET, script.MAP, 0)
    ]
    for row, other in zip(own, expected, strict=True):
        assert {key: row[key] for key in other} == other


# --- its parts ----------------------------------------------------------------------------------------


def test_images_are_turned_as_numpy_turns_them(script: Any, rng: np.random.Generator) -> None:
    images = rng.uniform(size=(3, 8, 8))
    for quarters in (0, 1, 2):
        expected = np.rot90(images, quarters, axes=(1, 2))
        np.testing.assert_allclose(script.rotated(images, 90 * quarters), expected, atol=1e-12)


def test_detection_is_the_share_of_pairs_in_order(script: Any, rng: np.random.Generator) -> None:
    known, unknown = rng.integers(0, 5, 30) / 5.0, rng.integers(0, 4, 20) / 5.0
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in known for b in unknown]
    assert script.detection(known, unknown) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_scores_of_a_prediction_that_is_known(script: Any) -> None:
    """Probabilities 0.7 for the right class of each digit, and 0.4 at most where there is none."""
    sizes = dataclasses.replace(script.TINY, rows=20, test=10, turned=5, elsewhere=7)
    images = script.load_images("digits", 20, 10, 7, 0)
    whole = {1: images.test_labels, 2: images.test_labels[:5]}
    calls: list[int] = []

    def predict(x: np.ndarray) -> Prediction:
        calls.append(len(x))
        labels = whole.get(len(calls), np.zeros(len(x), dtype=int))
        sure = 0.7 if len(calls) in whole else 0.4
        probs = np.full((1, len(x), 10), (1.0 - sure) / 9.0)
        probs[0, np.arange(len(x)), labels] = sure
        return Prediction("Categorical", {"probs": probs})

    first, second, third = script.evaluated(predict, images, sizes)
    assert calls == [10, 5, 7]
    assert [row["set"] for row in (first, second, third)] == ["test", "turned 90", "elsewhere"]
    for row in (first, second):
        assert row["accuracy"] == 1.0
        assert row["log_score"] == pytest.approx(math.log(0.7))
        assert row["ece"] == pytest.approx(0.3)
    assert third["confidence"] == pytest.approx(0.4)
    assert third["auroc"] == 1.0


@pytest.mark.parametrize("architecture", ["LeNet", "transformer"])
def test_a_network_is_its_features_and_its_last_layer(
    script: Any, architecture: str, rng: np.random.Generator
) -> None:
    task = script.Task.of(architecture, 0, script.TINY)
    posterior = task.fit(bnn.MAP(steps=1, polish=False, ppl="pyro"))
    weights = {
        name: value[0, 0] + 0.1 * rng.normal(size=value.shape[2:]) for name, value in posterior.draws.items()
    }
    phi = script.features(task.model, weights, task.x, chunk=33)
    logits = bnn.network_function(task.model)(weights, task.x)
    np.testing.assert_allclose(phi @ weights["output.weight"] + weights["output.bias"], logits, atol=1e-12)


def test_the_prior_of_lenet_is_that_of_the_weight_decay(script: Any, rng: np.random.Generator) -> None:
    """gamma^-2 = lambda N for each weight and bias, where the zoo's has the fan-in of each layer."""
    task = script.Task.of(script.LENET, 0, script.TINY)
    posterior = task.fit(bnn.MAP(steps=1, polish=False, ppl="pyro"))
    u = {name: rng.normal(size=(3, *value.shape[2:])) for name, value in posterior.draws.items()}
    prior: Any = stats.norm(0.0, (5e-4 * 80) ** -0.5)
    expected = sum(prior.logpdf(value).reshape(3, -1).sum(axis=1) for value in u.values())
    np.testing.assert_allclose(posterior.log_prior(u), expected, rtol=1e-10)


def test_rows_of_a_seed_are_its_own(script: Any) -> None:
    first, second = (script.load_images("digits", 80, 40, 30, seed) for seed in (0, 1))
    assert np.mean(first.train**2) == pytest.approx(1.0)
    assert not np.array_equal(first.train, second.train)
    train = {image.tobytes() for image in (first.train / first.train.max()).round(9)}
    assert len(train) == 80
    assert not train & {image.tobytes() for image in (first.test / first.train.max()).round(9)}


# --- verdicts -----------------------------------------------------------------------------------------


def rows_of(script: Any, changed: dict[tuple[str, str, str], list[float]] | None = None) -> Any:
    """Scores of LeNet over three seeds in which everything turns out as the source has it."""
    wanted = {
        script.MAP: {"accuracy": 0.95, "confidence": 0.97, "ece": 0.03, "log_score": -0.2, "auroc": 0.96},
        script.ENSEMBLE: {
            "accuracy": 0.96,
            "confidence": 0.95,
            "ece": 0.02,
            "log_score": -0.15,
            "auroc": 0.98,
        },
        script.VI: {"accuracy": 0.94, "confidence": 0.93, "ece": 0.02, "log_score": -0.2, "auroc": 0.95},
        script.SWAG: {"accuracy": 0.95, "confidence": 0.98, "ece": 0.03, "log_score": -0.2, "auroc": 0.95},
        script.SGHMC: {"accuracy": 0.95, "confidence": 0.94, "ece": 0.02, "log_score": -0.2, "auroc": 0.95},
        script.LAST: {"accuracy": 0.95, "confidence": 0.94, "ece": 0.015, "log_score": -0.15, "auroc": 0.96},
        script.ALL: {"accuracy": 0.95, "confidence": 0.90, "ece": 0.02, "log_score": -0.2, "auroc": 0.97},
    }
    rows = []
    for method, values in wanted.items():
        for seed in range(3):
            for name in (script.TEST, "turned 30", "turned 60", script.ELSEWHERE):
                row = {"architecture": script.LENET, "method": method, "seed": seed, "set": name}
                of = script.SHIFT if name.startswith(script.SHIFT) else name
                for score, value in values.items():
                    other = (changed or {}).get((method, of, score))
                    row[score] = value + 0.001 * seed if other is None else other[seed]
                rows.append(row)
    return script.Found(rows)


CASES: list[tuple[str, tuple[Any, ...], tuple[str, str, str], list[float]]] = [
    ("judge_overconfident", ("test",), ("MAP", "test", "confidence"), [0.94, 0.95, 0.96]),
    ("judge_overconfident", ("turned",), ("MAP", "turned", "confidence"), [0.7, 0.99, 0.99]),
    ("judge_accuracy", (), ("Laplace, last layer", "test", "accuracy"), [0.93, 0.931, 0.932]),
    ("judge_more_weights", (), ("Laplace, all weights", "elsewhere", "confidence"), [0.95, 0.95, 0.95]),
    ("judge_more_weights", (), ("Laplace, all weights", "elsewhere", "auroc"), [0.9, 0.901, 0.902]),
    ("judge_signs", (), ("SWAG", "elsewhere", "confidence"), [0.9, 0.9, 0.9]),
    # Surer in the mean, as there, but not by two standard errors.
    ("judge_signs", (), ("SWAG", "elsewhere", "confidence"), [0.93, 0.96, 1.06]),
    # Noise makes no method as accurate as another.
    ("judge_accuracy", (), ("Laplace, last layer", "test", "accuracy"), [0.88, 0.94, 0.99]),
    ("judge_detection", (), ("deep ensemble", "elsewhere", "auroc"), [0.96, 0.99, 0.96]),
    ("judge_detection", (), ("Laplace, all weights", "elsewhere", "auroc"), [0.99, 0.99, 0.99]),
]


@pytest.mark.parametrize(("judge", "arguments", "of", "otherwise"), CASES)
def test_each_verdict_can_come_out_either_way(
    script: Any, judge: str, arguments: tuple[Any, ...], of: tuple[str, str, str], otherwise: list[float]
) -> None:
    judged = getattr(script, judge)
    assert judged(rows_of(script), script.LENET, *arguments).verdict == script.REPRODUCED
    changed = rows_of(script, {of: otherwise})
    assert judged(changed, script.LENET, *arguments).verdict == script.NOT_REPRODUCED


def test_calibration_is_paired_over_seeds(script: Any) -> None:
    """Differences 0.01, 0.02, 0.03 have mean 0.02 and standard error 0.01 / sqrt(3)."""
    changed = {
        (script.MAP, script.TEST, "ece"): [0.03, 0.05, 0.06],
        (script.LAST, script.TEST, "ece"): [0.02, 0.03, 0.03],
    }
    found = rows_of(script, changed)
    difference = found.difference(script.LENET, script.MAP, script.LAST, script.TEST, "ece")
    np.testing.assert_allclose(difference, [0.02, 0.01 / math.sqrt(3.0)])
    arguments = (script.LENET, script.LAST, script.TEST, "ece", "claim")
    assert script.judge_lower(found, *arguments).verdict == script.REPRODUCED
    changed[script.LAST, script.TEST, "ece"] = [0.02, 0.06, 0.06]
    assert script.judge_lower(rows_of(script, changed), *arguments).verdict == script.NOT_REPRODUCED
    absent = (script.LENET, script.WRITTEN, script.TEST, "ece", "claim")
    assert script.judge_lower(found, *absent).verdict == script.NOT_RUN


def test_cost_counts_the_network_too(script: Any) -> None:
    costs = [
        {"architecture": script.LENET, "method": name, "seed": 0, "processor_seconds": seconds}
        for name, seconds in ((script.MAP, 10.0), (script.LAST, 5.0), (script.ENSEMBLE, 50.0))
    ]
    good = script.judge_cost(rows_of(script), costs, script.LENET)
    assert good.verdict == script.REPRODUCED
    assert good.numbers.startswith("0.30 of the processor time")
    costs[1]["processor_seconds"] = 20.0
    assert script.judge_cost(rows_of(script), costs, script.LENET).verdict == script.NOT_REPRODUCED
    worse = rows_of(script, {(script.LAST, script.SHIFT, "log_score"): [-0.3, -0.3, -0.3]})
    costs[1]["processor_seconds"] = 5.0
    assert script.judge_cost(worse, costs, script.LENET).verdict == script.NOT_REPRODUCED
    # Above MAP, and with less than half of what the ensemble gains.
    some = rows_of(script, {(script.LAST, script.TEST, "log_score"): [-0.18, -0.179, -0.178]})
    assert script.judge_cost(some, costs, script.LENET).verdict == script.NOT_REPRODUCED


def test_a_reference_is_one_only_where_there_are_gaps(script: Any) -> None:
    gaps = [
        {
            "architecture": script.LENET,
            "seed": seed,
            "method": script.AT_MODE,
            "mean_gap": 0.2,
            "sd_ratio": 1.1,
        }
        for seed in range(2)
    ]
    assert script.judge_reference(gaps, {}, script.LENET).verdict == script.REPRODUCED
    gaps[1]["sd_ratio"] = 0.6
    assert script.judge_reference(gaps, {}, script.LENET).verdict == script.NOT_REPRODUCED
    of_both = {
        script.LENET: ["seed 0 not converged: R-hat is 2"],
        script.TRANSFORMER: ["seed 1 not converged: R-hat is 3"],
    }
    nothing = script.judge_reference([], of_both, script.LENET)
    assert nothing.verdict == script.NOT_RUN
    assert "R-hat is 2" in nothing.numbers
    assert "R-hat is 3" not in nothing.numbers


# --- what compiles ------------------------------------------------------------------------------------


def test_samplers_run_and_are_judged(script: Any) -> None:
    """The last layer by NUTS, with its gaps where it has converged, and all weights by cyclical SGHMC."""
    sizes = dataclasses.replace(
        script.TINY,
        rows=200,
        seeds=1,
        cycles=2,
        cycle_length=4,
        thinning=3,
        warmup=4,
        nuts=(4, 300, 1500),
        epochs=20,
    )
    task = script.Task.of(script.LENET, 0, sizes)
    weights = {name: np.asarray(value[0, 0]) for name, value in task.fit(task.descent()).draws.items()}
    part = task.nuts(weights)
    assert part["verdict"] == "converged", part["reasons"]
    gaps = {row["method"]: row for row in part["gaps"]}
    assert gaps[script.NUTS]["mean_gap"] < 0.2
    # A Gaussian at the mode of the same log-concave posterior; the others are at weights that are not quite there.
    assert gaps[script.AT_MODE]["mean_gap"] < 0.5
    assert 0.7 < gaps[script.AT_MODE]["sd_ratio"] < 1.4
    assert all(math.isfinite(row["mean_gap"]) and row["sd_ratio"] > 0.0 for row in gaps.values())
    sampled = task.sghmc(weights)
    assert all(math.isfinite(row["confidence"]) for row in sampled["scores"])
