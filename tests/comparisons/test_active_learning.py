"""The study of active learning: what rows are held to be worth, what is made of its curves, and tiny runs."""

from __future__ import annotations

import csv
import importlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import mutual_info_score

import ppl_bnn as bnn
from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED
from ppl_bnn.prediction.prediction import Prediction

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """The study, with networks of three units for digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        study = importlib.import_module("active_learning")
        tasks = study.tasks

        def narrow(sizes: Any) -> Any:
            found = tasks(sizes)
            model = bnn.zoo.load("classification_mlp", classes=10, width=3, sigma=3.0)
            return found | {"digits": replace(found["digits"], model=model)}

        patch.setattr(study, "tasks", narrow)
        yield study


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where finished parts of a tiny run are kept, of small pools for two tests."""
    return tmp_path_factory.mktemp("kept")


# --- what a label is worth ----------------------------------------------------------------------------


def test_information_is_that_of_label_and_network(study: Any, rng: np.random.Generator) -> None:
    """With K equally probable networks, the mutual information of their number and the label, by scikit-learn."""
    counts = rng.integers(1, 30, size=(4, 5, 3))
    counts[:, 0] = counts[0, 0]
    # Every network with the same number of labels in all, or they would not be equally probable.
    counts[..., 2] = 100 - counts[..., :2].sum(axis=-1)
    prediction = Prediction("Categorical", {"probs": counts / 100.0})
    expected = []
    for row in range(5):
        network, label = np.indices((4, 3))
        times = counts[:, row].ravel()
        expected.append(mutual_info_score(np.repeat(network.ravel(), times), np.repeat(label.ravel(), times)))
    found = study.worth(study.INFORMATION, prediction, rng)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert found[0] == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(
        study.worth(study.ENTROPY, prediction, rng), stats.entropy(counts.mean(axis=0), axis=1), rtol=1e-12
    )


def test_of_numbers_the_variance_of_the_function_is_asked_for(study: Any, rng: np.random.Generator) -> None:
    loc = rng.normal(size=(50, 6)) * np.arange(1, 7)
    prediction = Prediction("Normal", {"loc": loc, "scale": np.full(loc.shape, 0.5)})
    values = study.worth(study.INFORMATION, prediction, rng)
    gains = 0.5 * np.log1p(loc.var(axis=0) / 0.25)
    np.testing.assert_array_equal(np.argsort(values), np.argsort(gains))


def test_random_choice_looks_at_nothing(study: Any) -> None:
    prediction = Prediction("Bernoulli", {"probs": np.array([[0.1, 0.5, 0.9]])})
    first, again = (study.worth(study.RANDOM, prediction, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first)) == 3


def test_first_labels_are_of_two_kinds(study: Any) -> None:
    y = np.zeros(60, int)
    y[:3] = 1
    for seed in range(20):
        chosen = study.known_first(y, 4, seed)
        assert len(set(chosen)) == 4
        assert set(y[chosen]) == {0, 1}


def test_coins_fall_where_they_are_said_to(study: Any) -> None:
    x, y = study.in_plane(20_000, 0)
    right = x[:, 0] > study.COIN
    assert right.mean() == pytest.approx((2.0 - study.COIN) / 4.0, abs=5.0 * math.sqrt(0.25 / 20_000))
    above = (x[:, 1] > study.boundary(x[:, 0])).astype(int)
    np.testing.assert_array_equal(y[~right], above[~right])
    # A coin knows nothing of the wave: 4000 tosses, five standard errors.
    assert abs(np.mean(y[right] == above[right]) - 0.5) < 5.0 * 0.5 / math.sqrt(right.sum())


# --- what is made of the curves -----------------------------------------------------------------------


def test_labels_for_a_level_lie_on_the_line_between_counts(study: Any) -> None:
    labels, curve = np.array([10, 20, 40]), np.array([-1.0, -0.5, -0.1])
    assert study.labels_for(labels, curve, -0.5) == 20.0
    assert study.labels_for(labels, curve, -0.3) == pytest.approx(30.0)
    assert study.labels_for(labels, curve, -2.0) == 10.0
    assert study.labels_for(labels, curve, 0.0) == math.inf


def test_saved_labels_are_those_between_two_straight_lines(study: Any, rng: np.random.Generator) -> None:
    labels = np.arange(10, 60, 10)
    random = -1.0 + 0.01 * labels + np.zeros((6, 1))
    ours = -1.0 + 0.02 * labels + np.zeros((6, 1))
    assert study.saved(labels, ours, random) == pytest.approx((25.0, 0.0))
    # Where seeds differ by a shift of ours, the level is reached that much later: the jackknife of a mean is its s.e.
    shifts = 0.01 * rng.normal(size=(6, 1))
    fewer, error = study.saved(labels, ours + shifts, random)
    assert fewer == pytest.approx(25.0 + shifts.mean() / 0.02)
    assert error == pytest.approx(stats.sem(shifts[:, 0]) / 0.02)
    never, unknown = study.saved(labels, random - 1.0, random)
    assert (never, unknown) == (-math.inf, math.inf)
    # Two seeds of which one alone never gets there: together they do, and nothing is known of the error.
    two = random[:2] + np.array([[0.3], [-0.2]])
    fewer, unknown = study.saved(labels, two, random[:2])
    assert fewer > 0.0
    assert unknown == math.inf


def rows(gain: float, noise: float, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Curves of five seeds that rise by 0.01 a label, and by `gain` more from the second count on."""
    found = []
    for seed in range(5):
        for strategy, more in (("information", gain), ("random", 0.0)):
            for place, labels in enumerate((10, 20, 30)):
                score = -1.0 + 0.01 * labels + (more if place else 0.0) + noise * rng.normal()
                found.append({"strategy": strategy, "seed": seed, "labels": labels, "log_score": score})
    return found


def judged(study: Any, key: str, evidence: Callable[[Any], None]) -> Any:
    """The verdict on one claim, when `evidence` has been given to a referee of that claim alone."""
    referee = study.Referee({key: study.read_claims("active_learning")[key]})
    evidence(referee)
    return referee.verdicts()[0]


def test_verdicts_follow_the_curves(study: Any, rng: np.random.Generator) -> None:
    task, sizes = study.tasks(study.TINY)["plane"], study.TINY

    def found(gain: float, noise: float) -> Any:
        own = rows(gain, noise, rng)
        return judged(
            study, "plane-information", lambda to: study.judge_choice(to, task, sizes, own, "information")
        )

    better = found(0.2, 0.001)
    assert better.verdict == REPRODUCED
    assert better.estimate == pytest.approx(0.2, abs=0.005)
    # From -0.9 at 10 to -0.6 at 20: -0.7 is reached two thirds of the way.
    assert "13 fewer" in better.numbers
    worse = found(-0.5, 0.001)
    assert worse.verdict == REFUTED
    assert "it does not reach" in worse.numbers
    assert found(0.0, 0.1).verdict == UNDECIDED


def test_pools_of_one_table_overlap(study: Any, rng: np.random.Generator) -> None:
    """The same curves: of a simulated plane, and of a table whose interval is wider by sqrt(1 + n test / pool)."""
    own, sizes = rows(0.2, 0.01, rng), study.FULL
    widths = []
    for name in ("plane", "digits"):
        verdict = judged(
            study,
            f"{name}-information",
            lambda to, name=name: study.judge_choice(to, study.tasks(sizes)[name], sizes, own, "information"),
        )
        widths.append(verdict.high - verdict.low)
    assert widths[1] / widths[0] == pytest.approx(math.sqrt(1.0 + 5 * sizes.test_rows / sizes.pool))


def test_verdict_on_coins_follows_the_shares(study: Any) -> None:
    def found(information: Sequence[float]) -> str:
        shares = {"information": information, "entropy": [0.4, 0.5, 0.45], "random": [0.2, 0.2, 0.2]}
        coins = [{"strategy": name, "share": share} for name, of in shares.items() for share in of]
        return judged(study, "coins", lambda to: study.judge_coins(to, coins)).verdict

    assert found([0.05, 0.1, 0.0]) == REPRODUCED
    assert found([0.75, 0.8, 0.9]) == REFUTED
    assert found([0.45, 0.4, 0.5]) == UNDECIDED


# --- small pools --------------------------------------------------------------------------------------


def small_tables(study: Any, gain: dict[tuple[str, str], float], rng: np.random.Generator) -> dict[str, Any]:
    """Tables of six pools with converged fits: log scores of -0.5 and `gain` by (choice, posterior)."""
    tables: dict[str, list[dict[str, Any]]] = {"small_scores": [], "small_fits": [], "small_coins": []}
    for seed in range(6):
        for choice in study.CHOICES:
            named = {"seed": seed, "choice": choice}
            for labels in (10, 14):
                at = named | {"labels": labels}
                tables["small_fits"].append(at | {"rhat": 1.002, "ess_bulk": 900.0})
                for posterior in (study.NUTS, study.LAPLACE):
                    score = -0.5 + gain.get((choice, posterior), 0.0) + 0.001 * rng.normal()
                    tables["small_scores"].append(at | {"posterior": posterior, "log_score": score})
            share = 0.05 + 0.01 * rng.normal()
            tables["small_coins"].append(named | {"share": share, "share_of_pool": 0.2})
    return tables


def small_verdicts(study: Any, tables: dict[str, Any]) -> dict[str, Any]:
    claims = {key: each for key, each in study.read_claims("active_learning").items() if "small" in key}
    referee = study.Referee(claims)
    study.judge_small(referee, tables)
    return {each.key: each for each in referee.verdicts()}


def test_claims_on_small_pools_follow_their_scores(study: Any, rng: np.random.Generator) -> None:
    """Each claim has a gain of its own, so that none can be told from the scores of another."""
    gain = {
        (study.BY_NUTS, study.NUTS): 0.3,
        (study.BY_LAPLACE, study.NUTS): 0.1,
        (study.BY_LAPLACE, study.LAPLACE): -0.2,
        (study.AT_RANDOM, study.LAPLACE): -0.05,
    }
    found = small_verdicts(study, small_tables(study, gain, rng))
    expected = {
        "small-nuts": 0.3,
        "small-laplace": -0.15,
        "small-laplace-by-nuts": 0.1,
        "small-choices": 0.2,
        "small-predictions": 0.05,
        "small-coins": 0.15,
    }
    for key, value in expected.items():
        assert found[key].estimate == pytest.approx(value, abs=0.02), key
        assert found[key].verdict == (REPRODUCED if value > 0 else REFUTED), key
        assert found[key].n == 6


def test_one_fit_that_has_not_converged_decides_nothing_where_it_is_used(
    study: Any, rng: np.random.Generator
) -> None:
    gain = {(study.BY_NUTS, study.NUTS): 0.3, (study.BY_LAPLACE, study.LAPLACE): 0.2}
    tables = small_tables(study, gain, rng)
    bad = next(fit for fit in tables["small_fits"] if fit["choice"] == study.BY_NUTS)
    bad["rhat"] = 1.02
    found = small_verdicts(study, tables)
    for key in ("small-nuts", "small-choices", "small-coins"):
        assert found[key].verdict == UNDECIDED, key
        assert "1 of" in found[key].numbers
    assert found["small-laplace"].verdict == REPRODUCED
    assert small_verdicts(study, {})["small-nuts"].verdict == NOT_RUN


def test_the_figure_of_small_pools_marks_what_has_not_converged(
    study: Any, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = small_tables(study, {}, rng)
    marked: list[Any] = []
    monkeypatch.setattr(study, "mark_unconverged", lambda panel, x, y: marked.append(x))
    study.draw_small(tmp_path / "one.png", tables["small_scores"], tables["small_fits"])
    assert not marked
    for fit in tables["small_fits"]:
        if fit["choice"] == study.BY_NUTS and fit["labels"] == 14:
            fit["ess_bulk"] = 100.0
    study.draw_small(tmp_path / "two.png", tables["small_scores"], tables["small_fits"])
    assert [len(x) for x in marked] == [1]
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_small_pools_join_stored_results_and_leave_the_others(study: Any, tmp_path: Path, kept: Path) -> None:
    folder = tmp_path / "results"
    shutil.copytree(FOLDER / "results" / "active_learning", folder)
    before = json.loads((folder / "results.json").read_text())
    curves = (folder / "curves.csv").read_bytes()
    study.main(tiny=True, out=folder, task="small", checkpoint=kept)
    after = json.loads((folder / "results.json").read_text())
    assert (folder / "curves.csv").read_bytes() == curves
    assert after["stamp"] == before["stamp"]
    assert after["sizes"] == before["sizes"]
    assert {"commit", "date"} <= set(after["numbers"]["small pools"]["stamp"])
    fits = study.Study.read(folder, study.FULL).tables["small_fits"]
    # Every fit has its convergence: at 6, 7 and 8 labels where NUTS chooses, and where others are scored.
    assert [fit["labels"] for fit in fits if fit["choice"] == study.BY_NUTS] == [6, 7, 8]
    assert [fit["labels"] for fit in fits if fit["choice"] == study.AT_RANDOM] == [8]
    assert all(math.isfinite(fit["rhat"]) for fit in fits)


# --- runs ---------------------------------------------------------------------------------------------


def test_a_run_asks_for_each_row_once_and_the_first_round_is_shared(study: Any) -> None:
    sizes = study.Sizes(seeds=1, plane_labels=8, pool=40, test_rows=30, steps=60)
    task = study.tasks(sizes)["plane"]
    data = task.data(sizes, 0)
    firsts = []
    for strategy in task.strategies:
        table, known, posterior = study.rounds(task, strategy, 0, sizes)
        assert [row["labels"] for row in table] == [6, 7, 8]
        assert len(set(known)) == len(known) == 8
        np.testing.assert_array_equal(known[:6], data.first)
        firsts.append(table[0]["log_score"])
        # The score of the last row is that of the posterior that is handed over.
        again = posterior.predict(data.x_test).log_prob(data.y_test).mean()
        assert table[-1]["log_score"] == pytest.approx(again, rel=1e-12)
    assert firsts == [firsts[0]] * 3


def test_a_tiny_run_writes_tables_figures_and_verdicts(
    study: Any, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = study.main(tiny=True, out=tmp_path, checkpoint=kept)
    content = json.loads((tmp_path / "results.json").read_text())
    # Two choices for each task of classes, one for numbers, the coins; and six on small pools.
    assert len(content["verdicts"]) == 6 + 6
    for name in ("curves", "small_pools"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert content["numbers"]["small pools"]["sizes"]["pool"] == study.TINY_SMALL.pool
    with (tmp_path / "curves.csv").open() as file:
        stored = list(csv.DictReader(file))
    assert {(row["task"], row["strategy"]) for row in stored} == {
        (task.name, strategy) for task in study.tasks(study.TINY).values() for strategy in task.strategies
    }
    assert all(math.isfinite(float(row["log_score"])) for row in stored)
    own = [row for row in found.tables["curves"] if row["task"] == "digits"]
    labels, values = study.curves(own, study.RANDOM, "log_score")
    assert labels.tolist() == [20, 30]
    assert values.shape == (1, 2)
    # What has finished is not computed again.
    monkeypatch.setattr(study, "run_of", None)
    monkeypatch.setattr(study, "small_run", None)
    again = study.main(tiny=True, out=tmp_path / "again", checkpoint=kept)
    assert again.tables == found.tables
    # The stamp has the seconds of each run.
    assert again.numbers["small pools"]["sizes"] == found.numbers["small pools"]["sizes"]
    with pytest.raises(SystemExit, match="no task 'chess'"):
        study.main(tiny=True, out=tmp_path, task="chess")
