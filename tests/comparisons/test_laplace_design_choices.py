"""The study of the design choices of Laplace at a tiny size: every choice has a row, and figures say what rows say."""

from __future__ import annotations

import csv
import importlib
import json
import math
import re
from itertools import product
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("laplace_design_choices")


@pytest.fixture(scope="module")
def run(study, tmp_path_factory):
    return study.main(tiny=True, out=tmp_path_factory.mktemp("study"))


def test_every_choice_has_a_row(study, run):
    """The whole product: a score, or the name of the error and what it says."""
    rows = {(row["task"], *(row[axis] for axis in study.AXES)): row for row in run["table"]}
    assert len(set(study.choices(study.FULL))) == 3 * 4 * 3 * 4
    for task, fit, kind in product(study.TASKS, study.choices(study.TINY), study.KINDS):
        choice = (task, *fit, kind)
        row = rows.pop(choice)
        named = re.match(r"(\w+Error: |a test label was given)", row["reason"])
        assert row["splits"] > 0 or named, (choice, row["reason"])
    assert {choice[1] for choice in rows} == {"MAP", "NUTS"}


def test_refusals_are_the_librarys(study, run):
    rows = {(row["task"], *(row[axis] for axis in study.AXES)): row for row in run["table"]}
    first = rows["regression", "all", "kron", "hessian", study.WRITTEN, "linearised"]
    assert first["splits"] == 0
    assert first["reason"].startswith("UnsupportedError: Laplace: expected a curvature that is a sum of")
    second = rows["regression", "all", "full", "ggn", study.WRITTEN, "probit"]
    assert second["splits"] == 0
    assert second["reason"].startswith("UnknownNameError")
    assert rows["classification", "all", "full", "ggn", study.WRITTEN, "probit_covariance"]["splits"] == 1


def test_numbers_are_finite_and_files_exist(study, run):
    for row in run["table"]:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
        if row["splits"] and row["structure"]:
            assert row["vs_map"] is not None
    with (run["folder"] / "choices.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(run["table"])
    for name in ("regression", "classification", "predictives", "lost_term", "moons"):
        image = matplotlib.image.imread(run["folder"] / f"{name}.png")
        assert image.std() > 0.01
    assert len((run["folder"] / "verdicts.txt").read_text().splitlines()) == len(run["verdicts"])
    content = json.loads((run["folder"] / "results.json").read_text())
    assert len(content["verdicts"]) == len(run["verdicts"])
    assert content["sizes"]["splits"] == 1


def test_the_lost_term_is_what_makes_gamma_tunable(study):
    """The formula by hand has the optimum of the library; as printed it has its optimum at the bound."""
    lost = study.lost_term(study.TINY)
    assert np.isclose(lost.best_right, lost.library, rtol=1e-3)
    assert np.all(np.diff(lost.printed) > 0.0)
    assert lost.best_printed > 0.99 * lost.gamma[-1]


def test_one_program_for_all_choices_changes_nothing(study):
    """What shares compiled functions is what `bnn.fit` gives."""
    import ppl_bnn as bnn

    split = study.load_split(study.CLASSIFICATION, 0, study.TINY)
    x, y = split.train
    start = bnn.fit(split.model, x, y, bnn.MAP(steps=300, ppl="pyro"), standardise=True)
    for structure, hyper in (("full", study.WRITTEN), ("kron", study.DURING), ("diag", study.AFTER)):
        chosen = study.method("all", structure, "ggn", hyper, start, 1, study.TINY)
        apart = bnn.fit(split.model, x, y, chosen, standardise=True)
        shared = study.refit(start, chosen)
        assert np.isclose(shared.log_evidence, apart.log_evidence, rtol=1e-9)
        expected = apart.predict(split.test[0]).probabilities
        assert np.allclose(shared.predict(split.test[0]).probabilities, expected, rtol=1e-7)


def rows_of(study, values: dict[str, list[float]]) -> list[dict]:
    """Log scores by split of MAP and of the predictives of one choice."""
    rows = []
    for kind, scores in values.items():
        for split, score in enumerate(scores):
            choice = (
                {"weights": "MAP"} if kind == "MAP" else dict(zip(study.AXES, study.DEFAULT, strict=True))
            )
            if kind != "MAP":
                choice["predictive"] = kind
            rows.append({"task": "regression", "split": split, "log_score": score, **choice})
    return rows


def test_verdicts_follow_the_numbers(study):
    """Paired over splits by hand: differences 0.1, 0.2, 0.3 have mean 0.2 and standard error 0.1 / sqrt(3)."""
    found = study.Found(
        rows_of(study, {"MAP": [0.0, 1.0, 2.0], "linearised": [0.1, 1.2, 2.3], "sampled": [0.0, 1.0, 2.0]})
    )
    differences = study.contrast(found, "regression", "predictive", "linearised", "sampled")
    assert np.allclose(differences, [[0.1, 0.2, 0.3]])
    mean, error = study.paired(differences[0])
    assert np.allclose([mean, error], [0.2, 0.1 / math.sqrt(3.0)])
    assert study.judge_contrast("a", differences).verdict == study.REPRODUCED
    assert study.judge_contrast("a", -differences).verdict == study.NOT_REPRODUCED
    assert study.judge_contrast("a", np.array([[0.1, -0.1, 0.1]])).verdict == study.NOT_REPRODUCED
    assert study.judge_contrast("a", None).verdict == study.NOT_RUN
    assert study.judge_default(found, "regression").verdict == study.REPRODUCED


def test_the_nearest_to_nuts_is_so_in_mean_and_spread(study):
    """Linearised predictions of one mode share the gap of the mean: the spread decides between them."""

    def judged(own: tuple[float, float], other: tuple[float, float]) -> str:
        nuts = dict.fromkeys(study.AXES, "") | {"weights": "NUTS", "log_score": -1.0}
        choices = [
            dict(zip(study.AXES, ("all", structure, "ggn", study.WRITTEN, "linearised"), strict=True))
            | {"gap_mean": mean, "gap_sd_ratio": ratio}
            for structure, (mean, ratio) in (("full", own), ("diag", other))
        ]
        rows = [nuts | {"gap_mean": 0.04, "gap_sd_ratio": 0.99}, *choices]
        found = study.Found([{"task": "regression", "split": 0} | row for row in rows])
        return study.judge_reference(found, "regression").verdict

    assert judged((0.25, 0.95), (0.25, 0.44)) == study.REPRODUCED
    assert judged((0.25, 0.44), (0.25, 0.95)) == study.NOT_REPRODUCED
    assert judged((0.25, 0.95), (0.24, 0.99)) == study.REPRODUCED
    assert judged((1.20, 1.41), (0.48, 0.59)) == study.NOT_REPRODUCED


def test_calibration_is_that_of_the_default_whatever_others_do(study):
    def judged(ece: list[float], other: list[float]) -> str:
        rows = []
        for choice, values in (
            (("MAP", "", "", "", ""), [0.05, 0.06, 0.055]),
            (study.DEFAULT, ece),
            (("all", "full", "ggn", study.AFTER, "linearised"), other),
        ):
            for split, value in enumerate(values):
                scores = {"log_score": 0.0, "confidence": 0.95 + 0.001 * split, "accuracy": 0.9, "ece": value}
                named = dict(zip(study.AXES, choice, strict=True))
                rows.append({"task": "classification", "split": split, **named, **scores})
        return study.judge_confidence(study.Found(rows)).verdict

    low, high = [0.01, 0.02, 0.016], [0.05, 0.06, 0.056]
    assert judged(low, high) == study.REPRODUCED
    assert judged(high, low) == study.NOT_REPRODUCED


def test_a_choice_that_failed_in_one_split_is_not_averaged_over_the_others(study):
    rows = rows_of(study, {"MAP": [0.0, 1.0], "linearised": [0.1, 1.2]})
    rows[-1] |= {"log_score": None, "reason": "CurvatureError: expected another"}
    found = study.Found(rows)
    assert found.values("regression", study.DEFAULT) is None
    (row,) = [row for row in found.table() if row["structure"]]
    assert row["splits"] == 1
    assert row["vs_map"] == pytest.approx(0.1)
    assert row["reason"].startswith("CurvatureError")


def test_noise_of_least_squares_is_that_of_scikit_learn(study, rng):
    from sklearn.linear_model import LinearRegression

    x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    residuals = y - LinearRegression().fit(x, y).predict(x)
    expected = math.sqrt((residuals**2).sum() / 26) / y.std()
    assert study.noise_of_least_squares(x, y) == pytest.approx(expected, rel=1e-12)
