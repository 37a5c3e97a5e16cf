"""The study of the design choices of Laplace at a tiny size: every choice has a row, and figures say what rows say."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import re
from itertools import product
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from scipy import stats

from comparisons.claims import CORRECTED, NOT_RUN, REFUTED, REPRODUCED, UNDECIDED, mean_over_splits

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
    # One split has no interval, and there is no reference.
    by_key = {each.key: each for each in run["verdicts"]}
    assert by_key["classification-overconfident"].verdict == UNDECIDED
    assert by_key["classification-overconfident"].n == 1
    assert by_key["regression-nuts"].verdict == NOT_RUN
    assert by_key["learnt-noise"].rule == by_key["moons"].rule == "exact"
    assert by_key["lost-term"].verdict == by_key["signs"].verdict == CORRECTED
    for name in ("splits", "learnt_noise", "moons", "lost_term"):
        with (run["folder"] / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name


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


def test_differences_are_paired_over_splits(study):
    """By hand: differences 0.1, 0.2, 0.3 have mean 0.2 and standard error 0.1 / sqrt(3)."""
    found = study.Found(
        rows_of(study, {"MAP": [0.0, 1.0, 2.0], "linearised": [0.1, 1.2, 2.3], "sampled": [0.0, 1.0, 2.0]})
    )
    differences = study.contrast(found, "regression", "predictive", "linearised", "sampled")
    assert np.allclose(differences, [[0.1, 0.2, 0.3]])
    mean, error = study.paired(differences[0])
    assert np.allclose([mean, error], [0.2, 0.1 / math.sqrt(3.0)])
    assert study.contrast(found, "regression", "predictive", "linearised", "probit") is None


def test_the_best_choice_is_that_of_the_other_splits(study):
    values = np.array([[9.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    # The first row has the mean 0 in splits 2 and 3, and 4.5 in the two pairs with the first.
    np.testing.assert_array_equal(study.best_elsewhere(values), [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(study.best_elsewhere(values[:, 1:]), [2.0, 3.0])
    np.testing.assert_array_equal(study.best_elsewhere(np.array([[1.0], [4.0]])), [4.0])


def test_noise_alone_has_no_best_choice(study, rng):
    """Beyond 5 standard errors at none of 20 seeds; the best itself would have 0.8 or more."""
    tables = rng.normal(size=(400, 20, 5))
    found = np.array([study.best_elsewhere(each).mean() for each in tables])
    assert abs(found.mean()) < 5.0 * found.std() / math.sqrt(len(found))
    assert tables.mean(axis=2).max(axis=1).mean() > 0.7


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_mean_and_its_standard_error_give_the_interval_of_the_values(study, rng, n):
    values = rng.normal(0.3, 0.1, size=n)
    found = study.from_summary(*study.paired(values), n, 221, 220)
    expected = mean_over_splits(values, 221, 220)
    assert (found.n, found.rule) == (n, expected.rule)
    assert [found.value, found.low, found.high] == pytest.approx(
        [expected.value, expected.low, expected.high], rel=1e-12
    )


# --- verdicts -------------------------------------------------------------------------------------------

SPLITS = 5


def gain(study, choice: tuple[str, ...]) -> float:
    """Over MAP; with these all turns out as claimed."""
    _, structure, _, hyper, kind = choice
    found = 0.05 if kind == "linearised" else -0.05
    found += 0.02 if hyper == study.DURING else 0.0
    return found + (0.005 if structure == "kron" else 0.0)


def tables_of(study, change=lambda row, choice: None, noise: float = 0.002) -> dict:
    """Tables of five splits with noise of this standard deviation; `change` is made to each row before it."""
    rng = np.random.default_rng(0)
    rows = []
    for task, split in product(study.TASKS, range(SPLITS)):
        base = {"task": task, "split": split, "train_rows": 200, "test_rows": 200}
        others = {"accuracy": 0.9, "confidence": 0.93, "ece": 0.05, "coverage_90": 0.85}
        made = {study.MAP_CHOICE: -1.0}
        for fit in product(
            ("all", "last_layer"),
            ("full", "kron"),
            ("ggn",),
            (study.WRITTEN, study.AFTER, study.DURING),
            ("linearised", "sampled"),
        ):
            made[fit] = -1.0 + gain(study, fit)
        for choice, score in made.items():
            row = base | dict(zip(study.AXES, choice, strict=True)) | others
            row["log_score"] = score + 0.1 * split
            if choice != study.MAP_CHOICE:
                row |= {"ece": 0.02, "coverage_90": 0.87}
                if choice[3] == study.WRITTEN and split == 0:
                    near = choice[:2] == ("all", "full") and choice[4] == "linearised"
                    row |= {"gap_mean": 0.1 if near else 0.5, "gap_sd_ratio": 1.0}
            change(row, choice)
            row |= {
                name: row[name] + noise * rng.normal()
                for name in ("log_score", "accuracy", "ece", "coverage_90")
            }
            rows.append(row)
        if split == 0:
            row = base | {"weights": "NUTS", "log_score": -0.9, "rhat": 1.004, "ess_bulk": 800.0}
            rows.append(row | {"gap_mean": 0.04, "gap_sd_ratio": 1.0})
            change(rows[-1], ("NUTS", "", "", "", ""))
    table = study.Found(rows).table()
    # As read back from a file: empty cells are not in their row.
    choices = [{name: value for name, value in row.items() if value is not None} for row in table]
    return {
        "choices": choices,
        "splits": rows,
        "learnt_noise": learnt(study, -0.02),
        "moons": moons(0.9),
        "lost_term": [lost()],
    }


def learnt(study, difference: float) -> list[dict]:
    values = {f"last_layer, {study.AFTER}": -5.4, f"last_layer, {study.DURING}": -5.4 + difference}
    return [
        {"choice": name, "noise": 0.6, "log_score": value, "rmse": 50.0} for name, value in values.items()
    ]


def moons(surest: float) -> list[dict]:
    values = {"MAP": 0.95, "a: sampled": 0.99, "b: linearised": surest, "c: linearised": 0.6}
    return [{"choice": name, "confidence": value} for name, value in values.items()]


def lost(**changed: float) -> dict:
    usual = {"best_right": 1.36, "library": 1.365, "best_printed": 9999.0, "largest": 1e4}
    return usual | {"negative": 27, "weights": 662} | changed


def judged(study, tables: dict, **sizes) -> dict:
    """The verdicts by key."""
    of = dataclasses.replace(study.FULL, splits=SPLITS, **sizes)
    return {each.key: each for each in study.judge(study.Study(of, Path(), tables=tables))}


def test_the_verdicts_are_those_of_the_claims(study):
    found = judged(study, tables_of(study))
    assert list(found) == list(study.read_claims("laplace_design_choices"))
    others = {key: each.verdict for key, each in found.items() if each.verdict != REPRODUCED}
    assert others == {"lost-term": CORRECTED, "signs": CORRECTED}
    assert all("smaller than the source" in each.sizes for each in found.values())
    assert "regression (diabetes)" in found["regression-during"].claim
    named = judged(study, tables_of(study), regression="yacht")
    assert "regression (yacht)" in named["regression-during"].claim


# By claim: what the quantity is in `tables_of`, its bound, and which cells move it one for one, or minus one for one.
OF_EACH_TASK = {
    "linearised": (0.1, 0.0, "log_score", 1, lambda study, choice: choice[4] == "linearised"),
    "during": (0.02, 0.0, "log_score", 1, lambda study, choice: choice[3] == study.DURING),
    "default-better": (0.055, 0.0, "log_score", 1, lambda study, choice: choice == study.DEFAULT),
    "default-half": (0.0175, 0.0, "log_score", 1, lambda study, choice: choice == study.DEFAULT),
    "structure": (0.005, -0.1, "log_score", 1, lambda study, choice: choice[:2] == ("all", "kron")),
}
QUANTITIES = {
    f"{task}-{claim}": (task, *of)
    for task, (claim, of) in product(("regression", "classification"), OF_EACH_TASK.items())
} | {
    f"{task}-{claim}": (task, usual, bound, column, slope, lambda study, choice: choice == study.MAP_CHOICE)
    for task, claim, usual, bound, column, slope in (
        ("classification", "overconfident", 0.03, 0.0, "confidence", 1),
        ("classification", "calibrated", 0.03, 0.0, "ece", 1),
        ("regression", "coverage-nearer", 0.02, 0.0, "coverage_90", -1),
        ("regression", "coverage-low", 0.85, 0.9, "coverage_90", 1),
    )
}


@pytest.mark.parametrize("key", QUANTITIES)
def test_each_verdict_follows_its_quantity(study, key):
    """Near its bound, on both sides and at it."""
    task, usual, bound, column, slope, holds = QUANTITIES[key]
    inside = -0.02 if key == "regression-coverage-low" else 0.02
    for q, expected in ((bound + inside, REPRODUCED), (bound, UNDECIDED), (bound - inside, REFUTED)):

        def change(row, choice, q=q):
            if row["task"] == task and holds(study, choice):
                row[column] += slope * (q - usual)

        found = judged(study, tables_of(study, change))[key]
        assert found.verdict == expected, str(found)
        assert found.estimate == pytest.approx(q, abs=0.005)
        assert (found.n, found.rule) == (SPLITS, "mean over splits")


def test_splits_of_one_table_share_rows(study):
    """By hand, from the scores of single splits and from mean and standard error alike."""
    tables = tables_of(study)
    own = {
        name: np.array(
            [
                row["log_score"]
                for row in tables["splits"]
                if row["task"] == "regression"
                and tuple(str(row.get(axis, "")) for axis in study.AXES) == choice
            ]
        )
        for name, choice in (("default", study.DEFAULT), ("map", study.MAP_CHOICE))
    }
    expected = mean_over_splits(own["default"] - own["map"], 200, 200)
    found = judged(study, tables)["regression-default-better"]
    assert [found.estimate, found.low, found.high] == pytest.approx(
        [expected.value, expected.low, expected.high], rel=1e-9
    )
    # A table that does not say how many rows there are is of halves.
    for row in tables["choices"]:
        del row["train_rows"], row["test_rows"]
    assert judged(study, tables)["regression-default-better"] == found


def test_one_split_has_no_interval(study):
    tables = tables_of(study)
    rows = [row for row in tables["splits"] if row["split"] == 0]
    table = study.Found(rows).table()
    tables |= {
        "splits": rows,
        "choices": [{name: value for name, value in row.items() if value is not None} for row in table],
    }
    of = dataclasses.replace(study.FULL, splits=1)
    found = {each.key: each for each in study.judge(study.Study(of, Path(), tables=tables))}
    assert {found[key].verdict for key in QUANTITIES} == {UNDECIDED}
    assert {found[key].n for key in QUANTITIES} == {1}


def test_without_the_scores_of_splits_a_mean_decides_nothing(study):
    """But for the difference to MAP, whose standard error is in the table."""
    tables = tables_of(study)
    known = judged(study, tables)
    for name in ("splits", "learnt_noise", "moons", "lost_term"):
        tables.pop(name)
    found = judged(study, tables)
    for key in QUANTITIES:
        if key.endswith("default-better"):
            assert found[key].estimate == known[key].estimate
        else:
            assert found[key].verdict == UNDECIDED
            assert found[key].estimate is None
            assert "not stored" in found[key].numbers
    mean = known["regression-linearised"].estimate
    assert f"the mean is {mean:+.3f}" in found["regression-linearised"].numbers
    assert found["learnt-noise"].verdict == found["moons"].verdict == UNDECIDED
    # A proof needs no run.
    assert found["lost-term"].verdict == found["signs"].verdict == CORRECTED


@pytest.mark.parametrize(("most", "decided"), [(0.0099, False), (0.0101, True)])
def test_where_no_choice_gains_there_is_nothing_to_decide(study, most, decided):
    def change(row, choice):
        if row["task"] == "regression" and choice[1]:
            row["log_score"] = -1.0 + 0.1 * row["split"] + (most if choice == study.DEFAULT else -1.0)
        elif row["task"] == "regression" and choice == study.MAP_CHOICE:
            row["log_score"] = -1.0 + 0.1 * row["split"]

    found = judged(study, tables_of(study, change, noise=1e-5))
    for claim in ("better", "half"):
        each = found[f"regression-default-{claim}"]
        assert ("nothing to decide" in each.numbers) == (not decided)
        assert (each.estimate is not None) == decided
        assert decided or each.verdict == UNDECIDED
        assert found[f"classification-default-{claim}"].verdict == REPRODUCED


def test_the_nearest_to_nuts_is_so_in_mean_and_spread(study):
    """Linearised predictions of one mode share the gap of the mean: the spread decides between them."""

    def found(own: tuple[float, float], other: tuple[float, float], **nuts) -> str:
        def change(row, choice):
            if choice[0] == "NUTS":
                row |= {"gap_sd_ratio": 0.99} | nuts
            elif row.get("gap_mean"):
                near = choice[:2] == ("all", "full") and choice[4] == "linearised"
                row["gap_mean"], row["gap_sd_ratio"] = own if near else other

        by_key = judged(study, tables_of(study, change))
        (verdict,) = {by_key[f"{task}-nuts"].verdict for task in study.TASKS}
        return verdict

    assert found((0.25, 0.95), (0.25, 0.44)) == REPRODUCED
    assert found((0.25, 0.44), (0.25, 0.95)) == REFUTED
    assert found((0.25, 0.95), (0.24, 0.99)) == REPRODUCED
    assert found((1.20, 1.41), (0.48, 0.59)) == REFUTED
    # Within the noise of NUTS, 0.041, and beyond it.
    assert found((0.240, 1.0), (0.2, 1.0)) == REPRODUCED
    assert found((0.242, 1.0), (0.2, 1.0)) == REFUTED
    assert found((0.25, 0.95), (0.25, 0.44), rhat=1.0099, ess_bulk=401.0) == REPRODUCED
    # NUTS that has not converged decides nothing, nor does one of which it is not known.
    assert found((0.25, 0.95), (0.25, 0.44), rhat=1.0101) == UNDECIDED
    assert found((0.25, 0.44), (0.25, 0.95), ess_bulk=399.0) == UNDECIDED
    assert found((0.25, 0.95), (0.25, 0.44), rhat=None, ess_bulk=None) == UNDECIDED
    # Without a reference.
    assert found((0.25, 0.95), (0.25, 0.44), gap_mean=None, reason="no reference") == UNDECIDED
    assert found((0.25, 0.95), (0.25, 0.44), log_score=None, reason="not at this size") == NOT_RUN


def test_calibration_is_that_of_the_default_whatever_others_do(study):
    def found(own: float, other: float) -> str:
        def change(row, choice):
            if choice[1]:
                row["ece"] = own if choice == study.DEFAULT else other

        return judged(study, tables_of(study, change))["classification-calibrated"].verdict

    assert found(0.01, 0.1) == REPRODUCED
    assert found(0.1, 0.01) == REFUTED


def test_statements_about_one_fit(study):
    tables = tables_of(study)
    for difference, expected in ((-0.099, REPRODUCED), (-0.101, REFUTED)):
        found = judged(study, tables | {"learnt_noise": learnt(study, difference)})
        assert found["learnt-noise"].verdict == expected
    for surest, expected in ((0.949, REPRODUCED), (0.951, REFUTED)):
        assert judged(study, tables | {"moons": moons(surest)})["moons"].verdict == expected


def test_the_lost_term_is_corrected_only_where_its_numbers_show_it(study):
    tables = tables_of(study)
    for changed, expected in (
        ({}, CORRECTED),
        ({"best_printed": 9901.0}, CORRECTED),
        ({"best_printed": 9899.0}, REPRODUCED),
        ({"library": 1.40}, REPRODUCED),
    ):
        found = judged(study, tables | {"lost_term": [lost(**changed)]})
        assert found["lost-term"].verdict == expected
    assert "27 of 662" in found["signs"].numbers


def test_a_choice_that_failed_in_one_split_is_not_averaged_over_the_others(study):
    rows = rows_of(study, {"MAP": [0.0, 1.0], "linearised": [0.1, 1.2]})
    rows[-1] |= {"log_score": None, "reason": "CurvatureError: expected another"}
    found = study.Found(rows)
    assert found.values("regression", study.DEFAULT) is None
    (row,) = [row for row in found.table() if row["structure"]]
    assert row["splits"] == 1
    assert row["vs_map"] == pytest.approx(0.1)
    assert row["reason"].startswith("CurvatureError")


def test_the_figures_have_the_interval_of_the_verdicts_and_say_what_there_is_not(study, tmp_path):
    stored = study.Study.read(FOLDER / "results" / "laplace_design_choices", study.FULL)
    rows = study.by_choice(stored.tables["choices"], study.CLASSIFICATION)
    row, splits = rows[study.DEFAULT], stored.sizes.splits
    assert row["splits"] == splits
    found = study.gain_over_map(rows, study.DEFAULT, splits)
    assert found.value == pytest.approx(row["vs_map"])
    # The variance of the mean is 1 / splits + test rows / training rows of that of a split.
    correction = 1 / splits + row["test_rows"] / row["train_rows"]
    reach = stats.t.ppf(0.975, splits - 1) * row["vs_map_se"] * math.sqrt(splits * correction)
    assert found.high - found.value == pytest.approx(reach, rel=1e-6)
    none = ("all", "kron", "hessian", study.AFTER, "linearised")
    assert study.gain_over_map(rows, none, splits) is None
    assert study.why_none(rows, none, splits) == "refused by the library"
    stored.out = tmp_path
    study.draw(stored)
    for name in ("regression", "classification", "predictives"):
        assert matplotlib.image.imread(tmp_path / f"{name}.png").std() > 0.01


def test_noise_of_least_squares_is_that_of_scikit_learn(study, rng):
    from sklearn.linear_model import LinearRegression

    x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    residuals = y - LinearRegression().fit(x, y).predict(x)
    expected = math.sqrt((residuals**2).sum() / 26) / y.std()
    assert study.noise_of_least_squares(x, y) == pytest.approx(expected, rel=1e-12)
