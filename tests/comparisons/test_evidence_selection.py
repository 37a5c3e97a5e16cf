"""The study of selection by the evidence: formulas against other oracles, verdicts, and a tiny run of all of it."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from scipy import stats

from comparisons.claims import CORRECTED, NOT_RUN, REFUTED, REPRODUCED, UNDECIDED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("evidence_selection")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def run(script: Any, folder: Path) -> Any:
    return script.main(tiny=True, out=folder, checkpoint=folder / "kept")


def test_a_tiny_run_writes_everything(script: Any, run: Any, folder: Path) -> None:
    sizes, rows = run.sizes, run.tables["grid"]
    # Two architectures, one gamma and the two meanings of a weight decay.
    assert len(rows) == sizes.seeds * 2 * 2 * 3
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
        assert 0.0 < row["effective"] <= row["weights"]
    with (folder / "grid.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert matplotlib.image.imread(folder / "grid.png").std() > 0.01
    content = json.loads((folder / "results.json").read_text())
    assert content["stamp"]["versions"]["numpy"] == np.__version__
    assert len(content["verdicts"]) == len(run.verdicts) == 23
    assert all("smaller than the source: 40 and 40 training rows" in each.sizes for each in run.verdicts)
    # One seed has no interval.
    assert {each.verdict for each in run.verdicts} <= {"undecided", "corrected", "not run"}


def test_what_was_kept_is_not_computed_again(
    script: Any, run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(script, "run_architecture", refuse)
    assert script.main(tiny=True, out=tmp_path, checkpoint=folder / "kept").tables == run.tables


def test_the_evidence_of_a_linear_model_is_exact(script: Any) -> None:
    """log N(y; 0, noise^2 I + gamma^2 (X X' + 1)), for each gamma of the grid, and without its term as printed."""
    sizes = dataclasses.replace(script.TINY, polish=True)
    split = script.split_of(script.DIABETES, 40, 40, 0)
    for gamma in script.gammas_of(sizes, 40):
        row = script.run_pair(script.DIABETES, split, (), gamma, 0, sizes)
        covariance: Any = script.NOISE**2 * np.eye(40) + row["gamma"] ** 2 * (split.x @ split.x.T + 1.0)
        exact = stats.multivariate_normal.logpdf(split.y, np.zeros(40), covariance)
        assert row["log_evidence"] == pytest.approx(float(exact), rel=1e-6)
        assert row["weights"] == 11
        assert row["printed"] == pytest.approx(float(exact) + 11 * math.log(row["gamma"]), rel=1e-6)


@pytest.mark.parametrize("hidden", [(), (3,), (2, 3)])
def test_copies_of_a_mode_are_counted_as_enumeration_counts_them(
    script: Any, hidden: tuple[int, ...]
) -> None:
    count = 1
    for units in hidden:
        count *= sum(1 for _ in product(permutations(range(units)), product((1, -1), repeat=units)))
    assert script.log_copies(hidden) == pytest.approx(math.log(count))


def test_a_weight_decay_on_the_mean_loss_is_a_prior(script: Any) -> None:
    """lambda / 2 w^2 + loss / N, times N, is w^2 / (2 gamma^2) + loss."""
    right, wrong = script.meanings(300)
    np.testing.assert_allclose([right**-2, wrong**-2], [script.WEIGHT_DECAY * 300, script.WEIGHT_DECAY])


def test_rows_are_standardised_on_the_training_rows(script: Any) -> None:
    split = script.split_of(script.DIABETES, 221, 1000, 3)
    assert len(split.test_y) == 442 - 221
    np.testing.assert_allclose(split.x.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(split.x.std(axis=0), 1.0, rtol=1e-12)
    np.testing.assert_allclose([split.y.mean(), split.y.std()], [0.0, 1.0], atol=1e-12)


# --- verdicts -----------------------------------------------------------------------------------------

GAMMAS = (0.1, 1.0, 3.0, 40.0)


SEEDS = 6
# Of scores, in nats: enough that the seeds differ.
NOISE = 0.004


def grid_of(
    script: Any,
    score: np.ndarray | None = None,
    evidence: np.ndarray | None = None,
    seeds: int = SEEDS,
    noise: float = 0.0,
) -> Any:
    """Three architectures: evidence and test score peak together, at gamma = 1 and the second architecture.

    score, evidence: (3, 4), of all seeds but for a little spread. noise: of the scores, in nats.
    """
    rng = np.random.default_rng(0)
    along, across = np.array([-0.5, 0.0, -0.2, -2.0]), np.array([-0.4, 0.0, -0.1])
    usual = along + across[:, None]
    rows = []
    for seed in range(seeds):
        for a, name in enumerate(("linear", "5", "20")):
            for g, gamma in enumerate(GAMMAS):
                value = (usual if score is None else score)[a, g] + noise * rng.normal()
                log_evidence = 100.0 * usual[a, g] if evidence is None else evidence[a, g]
                rows.append(
                    {
                        "task": "digits",
                        "seed": seed,
                        "architecture": name,
                        "gamma": gamma,
                        "log_evidence": log_evidence,
                        "log_copies": 0.0,
                        "printed": script.printed(log_evidence, 1000, gamma),
                        "log_score": value + 0.001 * seed * (a + g),
                        "log_score_mode": 2.0 * value + 0.001 * seed,
                        "log_score_training": gamma,
                        "effective": 50.0,
                        "weights": 1000.0,
                    }
                )
    return script.Grid.of("digits", rows, 3.0)


def outcome(script: Any, judge: str, grid: Any, *more: Any) -> str:
    """What the referee makes of the evidence that `judge` gives: a claim of digits, on 300 and 1000 rows."""
    referee = script.Referee(script.read_claims("evidence_selection"))
    getattr(script, judge)(script.Case(referee, grid, 300, 1000), *more)
    for key in set(script.read_claims("evidence_selection")) - set(referee.evidence):
        referee.not_run(key, "another test")
    (found,) = (each.verdict for each in referee.verdicts() if each.verdict != NOT_RUN)
    return found


USUAL = np.array([-0.5, 0.0, -0.2, -2.0]) + np.array([-0.4, 0.0, -0.1])[:, None]


def test_the_grid_chooses_what_its_numbers_say(script: Any) -> None:
    grid = grid_of(script, seeds=2)
    np.testing.assert_allclose(grid.by(grid.evidence), [[-0.4, 0.0, -0.1], [-0.399, 0.002, -0.097]])
    chosen, score = grid.architecture_by()
    np.testing.assert_array_equal(chosen, [1, 1])
    np.testing.assert_allclose(score, [0.0, 0.002])
    copies = np.zeros(grid.evidence.shape)
    copies[:, 2] = 11.0
    chosen, score = grid.architecture_by(copies)
    np.testing.assert_array_equal(chosen, [2, 2])
    np.testing.assert_allclose(score, [-0.1, -0.097])
    np.testing.assert_allclose(grid.correlations()[0], 1.0)
    # The mode has twice the score, in every seed.
    np.testing.assert_allclose(grid.by(grid.evidence, "log_score_mode")[0], [-0.8, 0.0, -0.2])
    np.testing.assert_allclose(grid.architecture_by(copies, "log_score_mode")[1], [-0.2, -0.199])


@pytest.mark.parametrize(
    ("judge", "otherwise"),
    [
        ("judge_prior", {"score": -USUAL}),
        ("judge_architecture", {"score": USUAL + np.array([[1.0], [-1.0], [0.0]])}),
        ("judge_correlation", {"evidence": -USUAL}),
        ("judge_training", {"score": -USUAL}),
    ],
)
@pytest.mark.parametrize("score", ["log_score", "log_score_mode"])
def test_each_verdict_can_come_out_either_way(script: Any, judge: str, otherwise: Any, score: str) -> None:
    # Ranks differ between the seeds only if the scores do by more.
    noise = 20.0 * NOISE if judge == "judge_correlation" else NOISE
    assert outcome(script, judge, grid_of(script, noise=noise), score) == REPRODUCED
    assert outcome(script, judge, grid_of(script, noise=noise, **otherwise), score) == REFUTED
    assert outcome(script, judge, grid_of(script, seeds=1), score) == UNDECIDED


def test_the_posterior_is_held_to_its_mode(script: Any) -> None:
    """A nat more than the mode is seen, and so is one less."""
    grid = grid_of(script, noise=NOISE)
    for more, expected in ((1.0, REPRODUCED), (-1.0, REFUTED)):
        columns = dict(grid.columns) | {"log_score": 1.1 * grid.columns["log_score_mode"] + more}
        assert outcome(script, "judge_posterior", dataclasses.replace(grid, columns=columns)) == expected


def test_laplace_is_held_to_nuts_only_where_that_has_converged(script: Any) -> None:
    def found(of_laplace: float, rhat: float, ess: float = 900.0) -> str:
        scored = {"gamma": 1.0, "ece": 0.1}
        rows = [
            scored | {"method": "Laplace, full", "log_score": of_laplace},
            scored | {"method": "NUTS", "log_score": -0.3, "rhat": rhat, "ess_bulk": ess},
        ]
        claims = script.read_claims("evidence_selection")
        referee = script.Referee({"digits-reference": claims["digits-reference"]})
        script.judge_reference(referee, rows)
        return referee.verdicts()[0].verdict

    assert found(-0.305, 1.009) == REPRODUCED
    assert found(-0.5, 1.009) == REFUTED
    assert found(-0.305, 1.011) == found(-0.5, 1.0, 399.0) == UNDECIDED
    referee = script.Referee(
        {"digits-reference": script.read_claims("evidence_selection")["digits-reference"]}
    )
    script.judge_reference(referee, [])
    assert referee.verdicts()[0].verdict == NOT_RUN


def test_architectures_that_predict_alike_leave_nothing_to_select(script: Any) -> None:
    """Within 0.01 nats, close by on both sides."""
    alike = np.array([-0.5, 0.0, -0.2, -2.0]) + np.array([-0.4, 0.0, 0.0])[:, None]
    for gap, expected in ((0.004, UNDECIDED), (0.006, REPRODUCED)):
        score = alike + np.array([0.0, gap, 0.0])[:, None]
        assert (
            outcome(script, "judge_architecture", grid_of(script, score, noise=1e-4), "log_score_mode")
            == expected
        )


def test_gammas_that_predict_nothing_do_not_make_a_choice_good(script: Any) -> None:
    """The evidence takes the worst of three gammas that predict something, beside one that is far below them all."""
    score = np.array([0.0, -0.1, -0.2, -50.0]) + np.zeros((3, 1))
    evidence = np.array([0.0, 0.0, 1.0, 0.0]) + np.zeros((3, 1))
    grid = grid_of(script, score, evidence)
    assert float(grid.by(grid.evidence).mean()) > float(grid.columns["log_score"].mean())
    assert outcome(script, "judge_prior", grid) == REFUTED


def test_slips_are_corrected_only_where_they_show(script: Any) -> None:
    assert outcome(script, "judge_printed", grid_of(script)) == CORRECTED
    last = np.zeros((3, 4))
    last[:, 3] = 1e6
    assert outcome(script, "judge_printed", grid_of(script, evidence=last)) == REPRODUCED
    assert outcome(script, "judge_mean_loss", grid_of(script)) == CORRECTED
