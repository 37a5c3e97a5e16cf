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
from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED
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
    assert content["stamp"]["versions"]["numpy"] == np.__version__
    assert len(content["verdicts"]) == len((folder / "verdicts.txt").read_text().splitlines())
    assert [each.key for each in run.verdicts] == list(script.read_claims("out_of_distribution"))
    assert all("smaller than the source: 80 of 60000" in each.sizes for each in run.verdicts)
    # One seed has no interval.
    assert {each.verdict for each in run.verdicts} == {UNDECIDED, NOT_RUN}
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


def test_convergence_is_the_worst_of_functions_that_are_fixed(script: Any, rng: np.random.Generator) -> None:
    """Four chains of independent draws, one of which is apart at one image of the turned ones."""
    sizes = dataclasses.replace(script.TINY, rows=20, test=100, turned=30, elsewhere=7)
    images = script.load_images("digits", 20, 100, 7, 0)
    asked: list[np.ndarray] = []

    def predictor(x: np.ndarray) -> np.ndarray:
        asked.append(x)
        f = rng.normal(size=(4, 500, len(x), 10))
        if len(asked) % 3 == 2:
            f[3, :, 4, 7] += 2.0
        return f

    found = script.convergence(predictor, script.sets_of(images, sizes))
    assert [row["set"] for row in found] == ["test", "turned 90", "elsewhere"]
    assert [row["functions"] for row in found] == [200, 200, 70]
    assert [script.converged(row["rhat"], row["ess_bulk"]) for row in found] == [True, False, True]
    assert found[1]["rhat"] > 1.1
    assert found[1]["ess_bulk"] < 100
    first = [*asked]
    script.convergence(predictor, script.sets_of(images, sizes))
    for one, other in zip(first, asked[3:], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(script.probes(7), range(7))
    assert script.probes(1000)[[0, -1]].tolist() == [0, 999]


def test_each_variant_of_the_source_is_a_method(script: Any) -> None:
    for name, expected in (
        (script.LAST, ("last_layer", "kron", "ggn")),
        (script.STAR, ("last_layer", "full", "empirical")),
        (script.ALL, ("all", "kron", "ggn")),
    ):
        method = bnn.Laplace(**script.CHOICES[name])
        assert (method.weights, method.structure, method.curvature) == expected
    assert script.STAR in script.METHODS
    assert script.STAR in script.PUBLISHED
    assert script.ALL not in script.PUBLISHED


# --- verdicts -----------------------------------------------------------------------------------------

SEEDS = 6
USUAL: dict[str, dict[str, float]] = {
    "MAP": {"accuracy": 0.95, "confidence": 0.97, "ece": 0.03, "log_score": -0.2, "auroc": 0.96},
    "deep ensemble": {"accuracy": 0.96, "confidence": 0.95, "ece": 0.02, "log_score": -0.15, "auroc": 0.98},
    "VI, mean field": {"confidence": 0.93, "auroc": 0.95},
    "SWAG": {"confidence": 0.98, "auroc": 0.95},
    "cyclical SGHMC": {"confidence": 0.94, "auroc": 0.95},
    "Laplace, last layer": {
        "accuracy": 0.95,
        "confidence": 0.94,
        "ece": 0.015,
        "log_score": -0.15,
        "auroc": 0.955,
    },
    "Laplace, last layer, full empirical Fisher": {"confidence": 0.91, "ece": 0.02, "auroc": 0.97},
    "Laplace, all weights": {"confidence": 0.90, "ece": 0.02, "auroc": 0.97},
    "NUTS, last layer": {"confidence": 0.935, "ece": 0.016, "log_score": -0.16},
    "MAP, last layer at its own mode": {"confidence": 0.97, "ece": 0.03, "log_score": -0.2},
}
SETS = ("test", "turned 30", "turned 60", "elsewhere")


def study_of(
    script: Any,
    changed: dict[tuple[str, str, str], Any] | None = None,
    without: tuple[str, ...] = (),
    seeds: int = SEEDS,
    rhat: float = 1.009,
    ess: float = 401.0,
) -> Any:
    """LeNet in which every claim holds, with the values of some (method, set, score) in place of the usual ones.

    The sets "costs" and "gaps" are those tables. A value of a seed is off by 1e-6.
    """
    changed = changed or {}
    rng = np.random.default_rng(0)

    def value(method: str, of: str, score: str, usual: float, seed: int) -> float:
        found = np.broadcast_to(changed.get((method, of, score), usual), seeds)[seed]
        return float(found) + 1e-6 * float(rng.normal())

    base = {"architecture": script.LENET}
    tables: dict[str, list[dict[str, Any]]] = {"scores": [], "costs": [], "gaps": [], "convergence": []}
    for seed in range(seeds):
        for method, of in itertools.product([name for name in USUAL if name not in without], SETS):
            short = script.SHIFT if of.startswith(script.SHIFT) else of
            row = base | {"method": method, "seed": seed, "set": of}
            row |= {score: value(method, short, score, each, seed) for score, each in USUAL[method].items()}
            tables["scores"].append(row)
        for method, seconds in ((script.MAP, 10.0), (script.LAST, 5.0), (script.ENSEMBLE, 50.0)):
            spent = value(method, "costs", "processor_seconds", seconds, seed)
            tables["costs"].append(base | {"method": method, "seed": seed, "processor_seconds": spent})
        for method in (script.LAST, script.AT_MODE, script.NUTS):
            found = {
                key: value(method, "gaps", key, usual, seed)
                for key, usual in (("mean_gap", 0.2), ("sd_ratio", 1.1))
            }
            tables["gaps"].append(base | {"method": method, "seed": seed} | found)
        worst = seed == seeds - 1
        tables["convergence"] += [
            base
            | {"seed": seed, "set": of, "rhat": rhat if worst else 1.0, "ess_bulk": ess if worst else 2000.0}
            for of in SETS
        ]
    study = script.Study(dataclasses.replace(script.FULL, seeds=seeds), Path("nowhere"))
    study.tables = {name: rows for name, rows in tables.items() if name not in without}
    return study


def verdict_of(script: Any, claim: str, *arguments: Any, **options: Any) -> Any:
    found = {each.key: each for each in script.judge(study_of(script, *arguments, **options))}
    return found[f"lenet-{claim}"]


MAP, ENSEMBLE, LAST, NUTS = "MAP", "deep ensemble", "Laplace, last layer", "NUTS, last layer"
STAR, ALL = "Laplace, last layer, full empirical Fisher", "Laplace, all weights"
AT_MODE = "Laplace, last layer, at its own mode"
# (claim, what is changed, a value with which it holds, and one with which it does not), close by on both sides.
CASES: list[tuple[str, tuple[str, str, str], float, float]] = [
    ("overconfident-test", (MAP, "test", "confidence"), 0.951, 0.949),
    ("overconfident-turned", (MAP, "turned", "confidence"), 0.951, 0.949),
    ("calibration-last-test", (LAST, "test", "ece"), 0.0295, 0.0305),
    ("calibration-last-turned", (LAST, "turned", "ece"), 0.0295, 0.0305),
    ("calibration-star-test", (STAR, "test", "ece"), 0.0295, 0.0305),
    ("calibration-star-turned", (STAR, "turned", "ece"), 0.0295, 0.0305),
    ("calibration-all-test", (ALL, "test", "ece"), 0.0295, 0.0305),
    ("calibration-all-turned", (ALL, "turned", "ece"), 0.0295, 0.0305),
    ("accuracy", (LAST, "test", "accuracy"), 0.9451, 0.9449),
    ("accuracy", (LAST, "test", "accuracy"), 0.9549, 0.9551),
    ("direction-ensemble", (ENSEMBLE, "elsewhere", "confidence"), 0.9695, 0.9705),
    ("direction-vi", ("VI, mean field", "elsewhere", "confidence"), 0.9695, 0.9705),
    ("direction-sghmc", ("cyclical SGHMC", "elsewhere", "confidence"), 0.9695, 0.9705),
    ("direction-swag", ("SWAG", "elsewhere", "confidence"), 0.9705, 0.9695),
    ("direction-last", (LAST, "elsewhere", "confidence"), 0.9695, 0.9705),
    ("direction-star", (STAR, "elsewhere", "confidence"), 0.9695, 0.9705),
    ("direction-all", (ALL, "elsewhere", "confidence"), 0.9695, 0.9705),
    ("least-sure-star", (STAR, "elsewhere", "confidence"), 0.9295, 0.9305),
    ("least-sure-all", (ALL, "elsewhere", "confidence"), 0.9295, 0.9305),
    ("detects-star", (STAR, "elsewhere", "auroc"), 0.9551, 0.9549),
    ("detects-all", (ALL, "elsewhere", "auroc"), 0.9551, 0.9549),
    ("ensemble-rivals", (ENSEMBLE, "elsewhere", "auroc"), 0.9605, 0.9595),
    ("ensemble-star", (ENSEMBLE, "elsewhere", "auroc"), 0.9705, 0.9695),
    ("ensemble-all", (ENSEMBLE, "elsewhere", "auroc"), 0.9705, 0.9695),
    ("keeps-up-test", (LAST, "test", "log_score"), -0.1745, -0.1755),
    ("keeps-up-turned", (LAST, "turned", "log_score"), -0.1745, -0.1755),
    ("cost", (LAST, "costs", "processor_seconds"), 14.9, 15.1),
]
# Those in which NUTS stands for the exact posterior.
OF_NUTS: list[tuple[str, tuple[str, str, str], float, float]] = [
    ("near-mean-last", (LAST, "gaps", "mean_gap"), 0.499, 0.501),
    ("near-spread-last", (LAST, "gaps", "sd_ratio"), 1.249, 1.251),
    ("near-spread-last", (LAST, "gaps", "sd_ratio"), 0.801, 0.799),
    ("near-mean-mode", (AT_MODE, "gaps", "mean_gap"), 0.499, 0.501),
    ("near-spread-mode", (AT_MODE, "gaps", "sd_ratio"), 1.249, 1.251),
    ("posterior-log_score", (NUTS, "turned", "log_score"), -0.199, -0.201),
    ("posterior-ece", (NUTS, "turned", "ece"), 0.0295, 0.0305),
    ("posterior-elsewhere", (NUTS, "elsewhere", "confidence"), 0.9695, 0.9705),
    ("posterior-mode-log_score", (NUTS, "turned", "log_score"), -0.199, -0.201),
    ("posterior-mode-ece", (NUTS, "turned", "ece"), 0.0295, 0.0305),
    ("posterior-mode-elsewhere", (NUTS, "elsewhere", "confidence"), 0.9695, 0.9705),
    # NUTS is 0.04 above MAP, and Laplace may be as far above NUTS.
    ("nearer-log_score", (LAST, "turned", "log_score"), -0.121, -0.119),
    ("nearer-ece", (LAST, "turned", "ece"), 0.0295, 0.0305),
    ("nearer-elsewhere", (LAST, "elsewhere", "confidence"), 0.9695, 0.9705),
]


def test_every_claim_has_a_case(script: Any) -> None:
    keys = {f"{name}-{claim}" for name in ("lenet", "transformer") for claim, *_ in CASES + OF_NUTS}
    assert keys | {"cifar"} == set(script.read_claims("out_of_distribution"))


@pytest.mark.parametrize(("claim", "of", "good", "bad"), CASES + OF_NUTS)
def test_each_verdict_can_come_out_either_way(
    script: Any, claim: str, of: tuple[str, str, str], good: float, bad: float
) -> None:
    assert verdict_of(script, claim, {of: good}).verdict == REPRODUCED
    assert verdict_of(script, claim, {of: bad}).verdict == REFUTED
    # The mean of the two over seeds that disagree by far more than they differ.
    wide = (good + bad) / 2.0 + 20.0 * abs(good - bad) * np.array([1.0, -1.0] * (SEEDS // 2))
    assert verdict_of(script, claim, {of: wide}).verdict == UNDECIDED
    one = verdict_of(script, claim, {of: good}, seeds=1)
    assert (one.verdict, one.n, one.low) == (UNDECIDED, 1, None)


@pytest.mark.parametrize(("claim", "of", "good", "bad"), OF_NUTS)
def test_draws_that_have_not_converged_there_decide_nothing(
    script: Any, claim: str, of: tuple[str, str, str], good: float, bad: float
) -> None:
    for value, options in itertools.product(
        (good, bad), ({"rhat": 1.01}, {"ess": 400.0}, {"rhat": math.nan}, {"without": ("convergence",)})
    ):
        found = verdict_of(script, claim, {of: value}, **options)
        assert found.verdict == UNDECIDED
        assert found.n == SEEDS
        expected = "were not stored" if "without" in options else "R-hat"
        assert expected in found.numbers


def test_convergence_is_asked_for_where_the_claim_is_made(script: Any) -> None:
    """Chains that are apart at one angle in one seed decide nothing about turned digits, and the rest as ever."""
    study = study_of(script)
    (row,) = (
        row for row in study.tables["convergence"] if (row["seed"], row["set"]) == (2, f"{script.SHIFT} 60")
    )
    row["rhat"] = 1.5
    found = {each.key: each for each in script.judge(study)}
    assert found["lenet-posterior-log_score"].verdict == UNDECIDED
    assert "R-hat 1.500" in found["lenet-posterior-log_score"].numbers
    assert found["lenet-posterior-elsewhere"].verdict == REPRODUCED
    assert found["lenet-near-mean-last"].verdict == REPRODUCED
    # A seed whose chains were not looked at has not converged either.
    study.tables["convergence"].remove(row)
    found = {each.key: each for each in script.judge(study)}
    assert "were not stored" in found["lenet-posterior-log_score"].numbers


def test_what_was_not_run_is_said(script: Any) -> None:
    """Without the source's second variant, and with nothing of the transformer."""
    found = {each.key: each for each in script.judge(study_of(script, without=(STAR,)))}
    for claim in (
        "calibration-star-test",
        "direction-star",
        "least-sure-star",
        "detects-star",
        "ensemble-star",
    ):
        verdict = found[f"lenet-{claim}"]
        assert verdict.verdict == NOT_RUN
        assert f"{STAR}: not run with LeNet" in verdict.numbers
        assert "56.1 %" in verdict.numbers
    assert found["lenet-ensemble-rivals"].verdict == found["lenet-direction-all"].verdict == REPRODUCED
    assert {each.verdict for key, each in found.items() if key.startswith("transformer")} == {NOT_RUN}
    assert found["cifar"].verdict == NOT_RUN
    alone = {each.key: each for each in script.judge(study_of(script, without=(NUTS, "gaps")))}
    assert "NUTS, last layer: not run" in alone["lenet-posterior-ece"].numbers
    assert alone["lenet-near-mean-last"].verdict == NOT_RUN
    assert alone["lenet-calibration-last-turned"].verdict == REPRODUCED


def test_calibration_is_paired_over_seeds_that_share_a_table(script: Any) -> None:
    """Differences 0.01, 0.02, 0.03 of 200 turned images, three trainings on 3000 rows each."""
    changed = {(MAP, "turned", "ece"): [0.03, 0.05, 0.06], (LAST, "turned", "ece"): [0.02, 0.03, 0.03]}
    found = verdict_of(script, "calibration-last-turned", changed, seeds=3)
    reach = stats.t.ppf(0.975, 2) * 0.01 * math.sqrt(1.0 / 3.0 + 200 / 3000)
    np.testing.assert_allclose(
        [found.estimate, found.low, found.high], [0.02, 0.02 - reach, 0.02 + reach], atol=1e-4
    )
    assert found.verdict == UNDECIDED
    assert (found.n, found.rule) == (3, "mean over splits")


def test_seeds_that_lack_a_method_are_left_out_of_both(script: Any) -> None:
    study = study_of(script)
    rows = study.tables["scores"]
    study.tables["scores"] = [row for row in rows if (row["method"], row["seed"]) != (LAST, 0)]
    found = {each.key: each for each in script.judge(study)}
    assert found["lenet-accuracy"].n == SEEDS - 1
    assert found["lenet-calibration-all-test"].n == SEEDS


def test_the_directions_of_the_table_are_one_family(script: Any) -> None:
    """What an interval by itself decides and seven together do not."""
    values = 0.9684 + 0.001 * np.array([1.0, -1.0, 0.5, -0.5, 0.2, -0.2])
    found = verdict_of(script, "direction-vi", {("VI, mean field", "elsewhere", "confidence"): values})
    assert found.high < 0.0
    assert found.verdict == REPRODUCED
    everywhere = {(name, "elsewhere", "confidence"): values for name in USUAL if name != MAP}
    found = verdict_of(script, "direction-vi", everywhere)
    assert found.verdict == UNDECIDED
    assert "in its family of 7 not (Holm)" in found.numbers


# --- what compiles ------------------------------------------------------------------------------------


def test_samplers_run_and_are_judged(script: Any) -> None:
    """The last layer by NUTS, with its gaps and its convergence on each set, and all weights by cyclical SGHMC."""
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
    sets = ["test", "turned 90", "elsewhere"]
    assert [row["set"] for row in part["convergence"]] == sets
    for row in part["convergence"]:
        assert 0 < row["functions"] <= script.FUNCTIONS
        assert script.converged(row["rhat"], row["ess_bulk"]), row
    for name in (script.OWN_MODE, script.AT_MODE):
        assert [row["set"] for row in part["beside"][name]] == sets
    # A mode and the normal about it are as accurate, near enough; the normal is the less sure.
    point, normal = (part["beside"][name][0] for name in (script.OWN_MODE, script.AT_MODE))
    assert normal["confidence"] < point["confidence"]
    sampled = task.sghmc(weights)
    assert all(math.isfinite(row["confidence"]) for row in sampled["scores"])
