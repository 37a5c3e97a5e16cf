"""The study of continual learning: tasks, what is forgotten, verdicts, and a tiny run of all of it."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from scipy.ndimage import uniform_filter

import ppl_bnn as bnn
from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED
from ppl_bnn import likelihoods, priors

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("continual_learning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def run(script: Any, folder: Path) -> Any:
    return script.main(tiny=True, out=folder, checkpoint=folder / "kept")


def test_a_tiny_run_writes_everything(script: Any, run: Any, folder: Path) -> None:
    sizes = run.sizes
    found = {(row["method"], row["seed"], row["after"], row["task"]): row for row in run.tables["scores"]}
    wanted = {
        (method, seed, after, task)
        for method in script.METHODS
        for seed in range(sizes.seeds)
        for after in range(1, sizes.tasks + 1)
        for task in range(1, after + 1)
    }
    assert set(found) == wanted
    assert all(math.isfinite(row[score]) for row in found.values() for score in script.SCORES)
    for name in ("summary", "scores", "seconds"):
        with (folder / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name
    assert matplotlib.image.imread(folder / "tasks.png").std() > 0.01
    content = json.loads((folder / "results.json").read_text())
    assert content["stamp"]["date"]
    assert len(content["verdicts"]) == len(run.verdicts) == 8
    assert all("smaller than the source: 2 tasks" in verdict.sizes for verdict in run.verdicts)


def test_the_first_task_knows_nothing_of_continual_learning(script: Any, run: Any) -> None:
    """After one task fine-tuning and joint training are the same fit."""
    first = {
        (row["method"], row["seed"]): [row[score] for score in script.SCORES]
        for row in run.tables["scores"]
        if row["after"] == 1
    }
    for seed in range(run.sizes.seeds):
        assert first[script.FINE_TUNING, seed] == first[script.JOINT, seed]


def test_what_was_kept_is_not_computed_again(
    script: Any, run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(script, "run_learner", refuse)
    again = script.main(tiny=True, out=tmp_path, checkpoint=folder / "kept")
    assert again.tables == run.tables


def test_tasks_are_the_same_images_with_their_pixels_in_another_order(script: Any) -> None:
    sizes = dataclasses.replace(script.TINY, tasks=3)
    first, *others = script.tasks_of(sizes, 0)
    images = script.load_images("digits", sizes.rows, sizes.test, 1, 0)
    np.testing.assert_array_equal(first.x, images.train)
    for task in others:
        np.testing.assert_array_equal(task.y, first.y)
        assert not np.array_equal(task.x, first.x)
        # Training and test images are permuted alike: a pixel goes to the same place in both.
        before = np.concatenate([first.x, first.test_x]).reshape(100, -1)
        after = np.concatenate([task.x, task.test_x]).reshape(100, -1)
        np.testing.assert_array_equal(np.sort(before, axis=1), np.sort(after, axis=1))
        columns = {column.tobytes() for column in before.T}
        assert columns == {column.tobytes() for column in after.T}
    assert not np.array_equal(others[0].x, others[1].x)


def test_pooling_is_the_mean_over_windows(script: Any, rng: np.random.Generator) -> None:
    images = rng.normal(size=(3, 6, 8))
    window: Any = (1, 2, 2)
    # The filter's window of size 2 reaches back, so its value at odd places is the mean over whole windows.
    expected = uniform_filter(images, size=window, mode="nearest")[:, 1::2, 1::2]
    np.testing.assert_allclose(script.pooled(images, 2), expected, atol=1e-12)


@pytest.mark.parametrize("method", ["Laplace, Kronecker", "Laplace, diagonal"])
def test_a_sequence_of_exact_posteriors_is_joint_training(
    script: Any, method: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """One weight and a known noise: the posterior is Gaussian in either structure, and nothing is lost by going on.

    Its mean and variance after both tasks are those of ridge regression on all rows.
    """
    x, noise, gamma = rng.normal(size=(20, 1)), 0.5, 2.0
    y = 0.7 * x[:, 0] + noise * rng.normal(size=20)

    def line(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [1], prior=priors.Normal(0.0, gamma), bias=False)
        bnn.observe(y, f, likelihoods.Gaussian(noise))

    sizes = dataclasses.replace(script.TINY, rows=12, batch=6)
    monkeypatch.setattr(script.Learner, "model", property(lambda self: line))
    # The mode itself, which descent by mini-batches only comes near to.
    monkeypatch.setattr(
        script.Learner, "descent", lambda self, rows, start=None: bnn.MAP(steps=300, start=start, ppl="pyro")
    )
    tasks = [script.Task(x[part], y[part], x, y) for part in (slice(0, 12), slice(12, None))]
    *_, predict = script.Learner(method, sizes, 0).learnt(tasks)
    prediction = predict(np.array([[1.0], [-2.0]]))
    precision = gamma**-2 + (x**2).sum() / noise**2
    mean = (x[:, 0] @ y) / noise**2 / precision
    np.testing.assert_allclose(prediction.mean, [mean, -2.0 * mean], rtol=1e-6)
    np.testing.assert_allclose(prediction.epistemic, [1.0 / precision, 4.0 / precision], rtol=1e-6)


# --- verdicts -----------------------------------------------------------------------------------------


def rows_of(script: Any, spread: float = 0.0, **changed: list[list[float]]) -> Any:
    """Accuracy [after 1 on task 1; after 2 on task 1 and task 2] of each method, three seeds with a little spread.

    spread: of the differences between methods and tasks over seeds.
    """
    wanted = {
        "FINE_TUNING": [[0.9], [0.5, 0.9]],
        "DIAGONAL": [[0.9], [0.7, 0.85]],
        "KRON": [[0.9], [0.85, 0.88]],
        "VI": [[0.9], [0.75, 0.85]],
        "JOINT": [[0.9], [0.89, 0.9]],
    } | changed
    rows = []
    for at, (name, values) in enumerate(wanted.items()):
        for seed in range(3):
            for after, each in enumerate(values, 1):
                for task, value in enumerate(each, 1):
                    accuracy = value + 0.001 * seed * task + spread * seed * (at + after)
                    row = {"method": getattr(script, name), "seed": seed, "after": after, "task": task}
                    rows.append(row | {"accuracy": accuracy, "log_score": math.log(accuracy), "ece": 0.05})
    return script.Found(rows)


def test_what_is_forgotten_is_by_hand(script: Any) -> None:
    found = rows_of(script)
    np.testing.assert_allclose(found.forgotten(script.FINE_TUNING), 0.4)
    np.testing.assert_allclose(found.values(script.KRON, 2), [0.865, 0.8665, 0.868])
    (row,) = [row for row in found.table("a note") if (row["method"], row["after"]) == (script.KRON, 2)]
    assert row["forgotten"] == pytest.approx(0.05)
    assert row["first_task"] == pytest.approx(0.851)
    assert row["accuracy_se"] == pytest.approx(0.0015 / math.sqrt(3.0))


def outcome(script: Any, claim: str, judge: str, found: Any, *more: Any) -> str:
    """The outcome of one claim, judged alone."""
    referee = script.Referee({claim: script.read_claims("continual_learning")[claim]})
    getattr(script, judge)(script.Case(referee, found, script.FULL), *more)
    return referee.verdicts()[0].verdict


@pytest.mark.parametrize(
    ("claim", "judge", "otherwise", "expected"),
    [
        ("forgetting", "judge_forgetting", {"FINE_TUNING": [[0.8], [0.9, 0.9]]}, REFUTED),
        ("joint", "judge_joint", {"KRON": [[0.9], [0.6, 0.85]]}, REFUTED),
        ("joint", "judge_joint", {"JOINT": [[0.9], [0.4, 0.9]]}, UNDECIDED),
        ("structure", "judge_structure", {"DIAGONAL": [[0.9], [0.9, 0.9]]}, REFUTED),
    ],
)
def test_each_verdict_can_come_out_either_way(
    script: Any, claim: str, judge: str, otherwise: Any, expected: str
) -> None:
    assert outcome(script, claim, judge, rows_of(script, 1e-4)) == REPRODUCED
    assert outcome(script, claim, judge, rows_of(script, 1e-4, **otherwise)) == expected


@pytest.mark.parametrize(("more", "expected"), [(0.03, REPRODUCED), (0.07, REFUTED)])
def test_the_calibration_error_is_held_to_that_of_joint_training(
    script: Any, more: float, expected: str
) -> None:
    found = rows_of(script, 1e-4)
    for row in found.rows:
        row["ece"] += (more + 0.001 * row["seed"]) if row["method"] == script.KRON else 0.0
    assert outcome(script, "joint-calibration", "judge_joint_calibration", found) == expected


@pytest.mark.parametrize("name", ["KRON", "DIAGONAL", "VI"])
def test_a_prior_of_yesterday_helps_or_does_not(script: Any, name: str) -> None:
    method = getattr(script, name)
    claim = f"baseline-{script.BASELINES[method]}"
    assert outcome(script, claim, "judge_baseline", rows_of(script, 1e-4), method) == REPRODUCED
    worse = rows_of(script, 1e-4, **{name: [[0.9], [0.4, 0.9]]})
    assert outcome(script, claim, "judge_baseline", worse, method) == REFUTED
    without = script.Found([row for row in rows_of(script, 1e-4).rows if row["method"] != method])
    assert outcome(script, claim, "judge_baseline", without, method) == NOT_RUN
