"""The page of a grid says what the splits say and no more, and is one file that needs no other.

Results are written by hand here: a score for each split, so that what is said of it can be computed from outside.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ppl_bnn.core import stored
from ppl_bnn.core.errors import InputError
from ppl_bnn.datasets.tables import Table
from ppl_bnn.evaluation.comparison import columns
from ppl_bnn.evaluation.grid import cell as cells
from ppl_bnn.evaluation.grid import result as grid_result
from ppl_bnn.evaluation.grid.result import GridResult
from ppl_bnn.reporting import grid_findings
from ppl_bnn.reporting import page as module
from ppl_bnn.reporting.figures import pictures as figures
from ppl_bnn.reporting.grid_findings import GridFindings, mean_ranks, words_of_ranks
from ppl_bnn.reporting.page import all_numbers, page, report
from ppl_bnn.reporting.verdict import BEST, LEVEL, Verdict
from tests.cli.test_cli import GRID, csv, here, invoke
from tests.reporting.test_page import HOSTILE, PROBE, Read, browser, outside, requested, shown

# What other files of tests set up, wanted here, too.
__all__ = ["browser", "csv", "here", "requested"]

TRAIN, TEST = 90, 10


def grid_verdict(result: GridResult) -> Verdict:
    return grid_findings.grid_verdict(GridFindings(result))


def made(
    scores: dict[str, dict[str, Any]],
    *,
    reference: str | None = None,
    seeds: int = 1,
    absent: int = 0,
    classes: bool = False,
    **changes: dict[str, Any],
) -> GridResult:
    """A result of given log scores: data -> method -> one for each split, NaN for a cell that failed.

    changes: method -> columns of all its cells. Seeds differ by a constant with mean 0.
    """
    rows, names = [], list(next(iter(scores.values())))
    splits = max(len(values) for methods in scores.values() for values in methods.values())
    for split in range(splits):
        for seed in range(seeds):
            for data, methods in scores.items():
                for name, values in methods.items():
                    if split >= len(values):
                        continue
                    score = float(values[split]) + 0.01 * (seed - (seeds - 1) / 2.0)
                    row: dict[str, Any] = {
                        "model": "mlp", "data": data, "split": f"random@0.9[{split}]", "method": name, "seed": seed,
                        "key": f"{data}-{split}-{name}-{seed}", "train_rows": TRAIN, "test_rows": TEST,
                        "ppl": "numpyro", "failure": "", "process": "host:17", "device": "cpu",
                        "begun": 1.7e9 + 60.0 * split, "seconds": 12.0, "peak_memory": 900.0,
                    }  # fmt: skip
                    if math.isnan(score):
                        rows.append(row | {"failure": "CurvatureError: not positive"})
                        continue
                    row |= {"kind": "iid", "converged": "yes", "run_seconds": 10.0, "log_score": score}
                    row |= {"accuracy": 0.9} if classes else {"rmse": math.exp(-score), "crps": 1.0 - score}
                    rows.append(
                        row
                        | ({"reference": "reference"} if name == reference else {})
                        | changes.get(name, {})
                    )
    missing = tuple(
        cells.Cell("mlp", "late", "random@0.9[0]", names[0], n, f"late{n}") for n in range(absent)
    )
    axes = {
        "models": ["mlp"],
        "data": list(scores),
        "splits": [f"random@0.9[{split}]" for split in range(splits)],
        "methods": names,
        "seeds": list(range(seeds)),
    }
    settings = {
        "methods": {
            name: {
                "class": "ppl_bnn.inference.variational.svi.SVI",
                "fields": {"steps": 100, "guide": ["normal", None]},
                "versions": {"ppl-bnn": "9.8"},
            }
            for name in names
        },
        "models": {"mlp": {"arguments": {"width": 20}, "likelihood": "Gaussian(...)"}},
        "standardise": True,
        "device": "cpu",
    }
    return GridResult(
        grid_result._frame(rows),
        {rows[0]["key"]: {"k_hat": "The approximation has no density."}} if rows else {},
        axes,
        reference,
        len(rows) + absent,
        ("a model and its data do not go together.",),
        absent=missing,
        settings=settings,
    )


def around(rng: np.random.Generator, splits: int = 10, **means: float) -> dict[str, np.ndarray]:
    """Log scores that share their splits and differ by noise of 0.1, the mean of which is none."""
    shared = rng.normal(size=splits)
    found = {}
    for name, mean in means.items():
        noise = rng.normal(size=splits)
        found[name] = mean + shared + 0.1 * (noise - noise.mean()) / math.sqrt(2.0)
    return found


@pytest.fixture(scope="module")
def whole() -> GridResult:
    """Three data sets, names as hostile as they may be, cells that failed or are missing, a reference in doubt."""
    rng = np.random.default_rng(0)
    scores = {
        data: around(rng, 5, **{"nuts": 0.0, "svi": -0.01 * place, "map": -0.8, HOSTILE: -0.3})
        for place, data in enumerate(("one", "wide & $open$", "毫克"))
    }
    scores["one"]["map"][1] = math.nan
    found = made(
        scores,
        reference="nuts",
        seeds=2,
        absent=3,
        nuts={
            "kind": "chains", "run_seconds": 300.0, "gap_mean_floor": 0.05, "gap_sd_floor": 1.1,
            "gradient_evaluations": 2e5,
        },
        svi={"run_seconds": 4.0, "gap_mean": 0.3, "gap_sd_ratio": 0.8, "gap_mean_floor": 0.05},
        map={"kind": "point", "run_seconds": 0.5, "gap_mean": 0.4, "gap_sd_ratio": 0.0},
    )  # fmt: skip
    first = (found.cells["method"] == "nuts") & (found.cells["data"] == "one")
    bad = found.cells.index[first][:3]
    found.cells.loc[bad, "converged"] = "no"
    found.cells.loc[bad, "reference"] = "reference (not converged)"
    found.cells.loc[found.cells["failure"] != "", "failure"] = f"ModelError: {HOSTILE}"
    return found


@pytest.fixture(scope="module")
def text(whole: GridResult) -> str:
    return page(whole)


def block_of(result: GridResult) -> Any:
    return GridFindings(result).blocks["mlp", "data"]


# --- which values are best --------------------------------------------------------------------------------


def test_a_value_is_best_where_the_corrected_paired_test_says_so(rng: np.random.Generator) -> None:
    seen = set()
    for trial in range(40):
        splits = 2 + trial % 9
        values = around(rng, splits, a=0.0, b=-0.01 * trial, c=-0.03 * trial)
        for name in values:
            values[name] += 0.1 * rng.normal(size=splits)
        best = max(values, key=lambda name: values[name].mean())
        ahead = {}
        for name in values:
            if name == best:
                continue
            difference = values[best] - values[name]
            # Nadeau and Bengio: the variance of the mean is (1 / J + test / train) times that of a difference.
            error = difference.std(ddof=1) * math.sqrt(1.0 / splits + TEST / TRAIN)
            ahead[name] = difference.mean() > 2.0 * error
        found = block_of(made({"data": values})).standing("log_score")
        if all(ahead.values()):
            assert found == {best: BEST}
        elif any(ahead.values()):
            assert found == {best: LEVEL, **{name: LEVEL for name in ahead if not ahead[name]}}
        else:
            assert found == {}
        seen.add(tuple(sorted(found.values())))
    assert len(seen) == 3


def test_of_one_split_or_one_method_nothing_is_best(rng: np.random.Generator) -> None:
    one = block_of(made({"data": around(rng, 1, a=0.0, b=-9.0)}))
    assert one.standing("log_score") == {}
    assert one.standing("rmse") == {}
    assert block_of(made({"data": {"a": [0.0, 1.0]}})).standing("log_score") == {}
    impossible = made({"data": {"a": [0.0, 1.0], "b": [0.0, -math.inf]}})
    assert block_of(impossible).standing("log_score") == {"a": BEST}


def test_of_an_error_less_is_better(rng: np.random.Generator) -> None:
    found = block_of(made({"data": around(rng, 20, a=0.0, b=-0.5)}))
    assert found.standing("rmse") == {"a": BEST}
    assert found.lags("rmse")["b"][0] > 0.0


# --- the verdict ------------------------------------------------------------------------------------------


def test_of_those_that_are_level_and_sound_the_quickest_is_named(rng: np.random.Generator) -> None:
    values = around(rng, best=0.01, quick=0.0, bad=-0.5, stuck=0.005, broken=0.0)
    values["broken"][3] = math.nan
    found = grid_verdict(
        made(
            {"data": values},
            best={"run_seconds": 50.0},
            quick={"run_seconds": 5.0},
            bad={"run_seconds": 0.1},
            stuck={"run_seconds": 1.0, "kind": "chains", "converged": "per mode", "k_hat": math.nan},
            broken={"run_seconds": 1.0, "k_hat": math.inf},
        )
    )
    (pair,) = found.parts
    assert (found.method, found.headline) == ("quick", "Use quick.")
    assert set(pair.level) == {"best", "quick", "stuck", "broken"}
    assert set(pair.sound) == {"best", "quick"}
    assert "of the level methods without a known problem it was the fastest (5 s a fit)" in found.because
    difference = values["best"] - values["quick"]
    error = difference.std(ddof=1) * math.sqrt(1.0 / 10 + TEST / TRAIN)
    assert f"a loss of up to {difference.mean() + 2.0 * error:.2g}." in found.why[0]
    assert any("best (50 s; 10 times slower)" in said for said in found.why)
    assert any("Behind best" in said and "bad by 0.5" in said for said in found.why)
    stuck, open_question = pair.doubts
    assert stuck == "stuck has not verifiably converged in 10 of 10 cells."
    assert open_question.startswith("broken is an approximation, and its diagnostics do not decide")
    assert open_question.endswith("Pareto k-hat is above 0.7 in 9 of 9 cells.")
    assert found.doubts == (
        "broken failed in 1 of 10 cells: CurvatureError: not positive (1).",
        stuck,
        open_question,
    )


def test_ahead_of_all_others(rng: np.random.Generator) -> None:
    found = grid_verdict(made({"data": around(rng, good=0.0, bad=-0.7)}))
    assert (found.method, found.headline) == ("good", "Use good.")
    assert (
        "ahead of every other method's by more than two standard errors and 0.01 nats per test row (10 splits)"
        in found.because
    )
    point = grid_verdict(made({"data": around(rng, good=0.0, bad=-0.7)}, good={"kind": "point"}))
    assert point.headline == "For predictions alone, use good."


def test_a_point_is_for_predictions_alone(rng: np.random.Generator) -> None:
    values = around(rng, map=0.0, svi=0.0, nuts=0.0)
    found = grid_verdict(
        made({"data": values}, map={"kind": "point", "run_seconds": 1.0}, nuts={"run_seconds": 99.0})
    )
    assert found.headline == "For predictions alone, use map; for uncertainty about the function, svi."


def test_what_is_amiss_is_not_recommended(rng: np.random.Generator) -> None:
    found = grid_verdict(made({"data": around(rng, bad=0.0, good=-0.9)}, bad={"converged": "no"}))
    assert found.method is None
    assert found.headline == "No method can be recommended yet."
    assert found.because.startswith(
        "bad has the best log score, but it has not verifiably converged in 10 of 10 cells. Of the methods without a "
        "known problem good predicts best; it is 0.9"
    )


def test_a_grid_without_a_sound_method_has_a_page_with_the_reasons(rng: np.random.Generator) -> None:
    scores = {data: around(rng, 4, a=0.0, b=-0.001) for data in ("one", "two")}
    stuck = {"kind": "chains", "converged": "no"}
    found = made(scores, a=stuck, b=stuck)
    parts = grid_verdict(found).parts
    assert [part.headline for part in parts] == ["No method can be recommended yet."] * 2
    assert page(found).count(parts[0].why[0]) == 2


def test_over_all_the_one_that_is_level_most_often(rng: np.random.Generator) -> None:
    data = {
        "a": around(rng, steady=0.0, quick=0.0, moody=-0.9),
        "b": around(rng, steady=0.0, quick=-0.9, moody=0.0),
        "c": around(rng, steady=-0.9, quick=-0.9, moody=0.0),
        "d": around(rng, steady=0.0, quick=-0.9, moody=-0.9),
    }
    found = grid_verdict(made(data, quick={"run_seconds": 1.0}))
    assert (found.method, found.headline) == ("steady", "Over all, use steady.")
    assert "On 3 of 4 data sets it is level with the best log score" in found.because
    assert "more often than any other (the next: 2)" in found.because
    assert "Exceptions: c." in found.because
    assert (
        "steady: level with the best on 3 of 4, ahead of all others on 1 of them; furthest behind on c, by 0.9"
        in (found.why[0])
    )
    assert [pair.method for pair in found.parts] == ["quick", "steady", "moody", "steady"]
    # As often, the quickest: by the geometric mean, so that one large data set does not decide alone.
    level = grid_verdict(
        made({name: around(rng, slow=0.0, fast=0.0) for name in "ab"}, fast={"run_seconds": 1.0})
    )
    assert level.headline == "Over all, use fast."
    assert "On all 2 data sets" in level.because
    assert "as often as slow; of these it was the fastest" in level.because


def test_a_reference_in_doubt_is_said_first_and_rests_nothing(whole: GridResult, text: str) -> None:
    found = grid_verdict(whole)
    assert found.reference_doubt.startswith(
        "The reference nuts is not valid everywhere: on one, not converged in 3 of 10 cells. The gaps to it there"
    )
    by_name = {pair.title: pair for pair in found.parts}
    assert not any("Measured by" in said for said in by_name["one"].why)
    (gap,) = [said for said in by_name["wide & $open$"].why if "Measured by" in said]
    assert "off by 0.30 epistemic standard deviations (sampling noise alone: 0.05); its spread is 0.80" in gap
    assert text.index("The reference nuts is not valid") < text.index('class="headline"')


def test_what_failed_and_what_is_missing_is_counted(whole: GridResult, text: str) -> None:
    found = grid_verdict(whole)
    assert found.doubts == (
        f"map failed in 2 of 30 cells: ModelError: {HOSTILE} (2).",
        "This grid was interrupted, or is still being computed: 3 of 123 cells have not been computed: nuts 3. "
        "Running it again computes them.",
    )
    said = Read(text).said
    assert "118 of 123 cells have a result, 2 failed, 3 are missing" in said
    assert "mlp on late by nuts: 3 cells" in said
    assert "2 of 120 cells" in said
    assert whole.left_out[0] in said
    assert "--retry-failed" in said


def test_chance_is_that_of_a_t_distribution(rng: np.random.Generator) -> None:
    for splits in (2, 5):
        (first, *_) = grid_verdict(made({"data": around(rng, splits, a=0.0, b=0.0)})).limits
        assert f"{2.0 * stats.t.sf(2.0, splits - 1):.0%} of pairs of methods that do not differ" in first
    assert "There is one split" in grid_verdict(made({"data": around(rng, 1, a=0.0, b=0.0)})).limits[0]


def test_nothing_is_finished_yet() -> None:
    empty = made({"data": {"a": [], "b": []}}, absent=4)
    found = grid_verdict(empty)
    assert (found.method, found.parts) == (None, ())
    assert "No cell is finished" in found.headline
    text = page(empty)
    assert "4 of 4 cells have not been computed" in text
    failed = made({"data": {"a": [math.nan], "b": [math.nan]}})
    assert "No method finished" in grid_verdict(failed).headline
    assert "CurvatureError: not positive" in page(failed)
    lonely = made({"data": {"a": [0.0, 1.0]}})
    assert "Only a has results" in grid_verdict(lonely).headline
    assert outside(page(lonely)) == []


# --- ranks ------------------------------------------------------------------------------------------------


def test_ranks_are_tested_as_by_scipy_and_differ_by_what_is_tabulated(rng: np.random.Generator) -> None:
    # Demsar 2006, table 5: the quantiles of Nemenyi's test at 5 %.
    for methods, quantile in ((3, 2.343), (4, 2.569), (5, 2.728)):
        values = around(rng, 14, **{name: 0.02 * place for place, name in enumerate("abcde"[:methods])})
        found = mean_ranks(GridFindings(made({"data": values})))
        tested = stats.friedmanchisquare(*values.values())
        assert (found.statistic, found.p) == pytest.approx((tested.statistic, tested.pvalue))
        expected = np.mean(
            [stats.rankdata(-np.array(row)) for row in zip(*values.values(), strict=True)], axis=0
        )
        for name, rank in zip(values, expected, strict=True):
            assert found.mean[name] == pytest.approx(rank)
        assert list(found.mean.values()) == sorted(found.mean.values())
        assert found.critical == pytest.approx(quantile * math.sqrt(methods * (methods + 1) / 84.0), rel=1e-3)
        assert (found.unit, found.blocks) == ("splits", 14)
        assert "share rows: p is smaller than it should be" in words_of_ranks(found)


def test_with_enough_data_sets_each_is_a_block(rng: np.random.Generator) -> None:
    data = {f"d{place}": around(rng, 3, a=0.0, b=-0.1, c=-0.2) for place in range(12)}
    found = mean_ranks(GridFindings(made(data)))
    means = [[values[name].mean() for values in data.values()] for name in "abc"]
    assert (found.unit, found.blocks) == ("data sets", 12)
    assert found.p == pytest.approx(stats.friedmanchisquare(*means).pvalue)
    assert "share rows" not in words_of_ranks(found)


def test_ranks_leave_out_what_has_gaps(rng: np.random.Generator) -> None:
    values = around(rng, 12, a=0.0, b=-0.1, c=-0.2, gone=0.0)
    values["gone"][:8] = math.nan
    values["a"][11] = math.nan
    found = mean_ranks(GridFindings(made({"data": values})))
    assert found.left_out == ("gone",)
    assert (found.blocks, found.dropped) == (11, 1)
    assert "Not counted: 1 block in which a method has no result." in words_of_ranks(found)
    few = mean_ranks(GridFindings(made({"data": around(rng, 5, a=0.0, b=-1.0, c=-2.0)})))
    assert math.isnan(few.p)
    assert "a test takes 3 methods and 11 blocks, and there are 3 and 5" in words_of_ranks(few)
    tied = mean_ranks(GridFindings(made({"data": dict.fromkeys("abc", np.zeros(12))})))
    assert "all methods are tied" in words_of_ranks(tied)


# --- the figures ------------------------------------------------------------------------------------------


def test_every_picture_can_be_drawn(text: str, measured: GridResult) -> None:
    both = text + page(measured)
    assert "could not be drawn" not in both
    for key in set(figures.GRID_PICTURES) - {"calibration"}:
        assert f'<section id="{key}"' in both
        assert f'<a href="#{key}">' in both


def test_what_is_drawn_are_the_numbers_of_the_table(whole: GridResult) -> None:
    findings, table = GridFindings(whole), whole.table()
    costs = figures.cost(findings).numbers
    assert costs is not None
    assert len(costs) == 12
    for _, row in costs.iterrows():
        ours = table.loc[row["model"], row["data"], row["method"]]  # type: ignore[index]
        assert (row["seconds"], row["value"]) == (ours["run_seconds"], ours["log_score"])
        behind = 0.0 if math.isnan(ours["log_score_to_best"]) else -ours["log_score_to_best"]
        assert row["behind_best"] == behind
    for picture, word in (
        (figures.differences(findings), "best"),
        (figures.differences(findings, to="reference"), "reference"),
    ):
        drawn = picture.numbers
        assert drawn is not None
        assert len(picture.panels) == 3
        for _, row in drawn.iterrows():
            ours = table.loc[row["model"], row["data"], row["method"]]  # type: ignore[index]
            if row["method"] == row["to"]:
                assert (row["difference"], row["standard_error"]) == (0.0, 0.0)
            else:
                assert row["difference"] == ours[f"log_score_to_{word}"]
                assert row["standard_error"] == ours[f"log_score_to_{word}_se"]
            assert row["units"] == (4 if (row["method"], row["data"]) == ("map", "one") else 5)


@pytest.fixture(scope="module")
def measured() -> GridResult:
    """Two data sets of four splits with gaps, leave-one-out and k-hat in all cells, other numbers in each split."""
    rng = np.random.default_rng(3)
    scores = {data: around(rng, 4, nuts=0.0, svi=-0.02, laplace=-0.05, map=-0.4) for data in ("one", "two")}
    found = made(
        scores,
        reference="nuts",
        nuts={"kind": "chains", "gap_mean_floor": 0.06, "gap_sd_floor": 1.08, "pareto_k_loo": 0.4},
        svi={"gap_mean": 0.3, "gap_sd_ratio": 0.7, "k_hat": 1.1, "pareto_k_loo": 0.5},
        laplace={"gap_mean": 0.15, "gap_sd_ratio": 1.3, "k_hat": 0.5, "pareto_k_loo": 0.95},
        map={"kind": "point", "gap_mean": 0.4, "gap_sd_ratio": 0.0},
    )
    frame = found.cells
    with_elpd = frame["method"] != "map"
    frame.loc[with_elpd, "elpd_loo"] = -90.0 + 40.0 * frame.loc[with_elpd, "log_score"]
    for column in ("gap_mean", "gap_sd_ratio", "k_hat"):
        frame[column] *= np.exp(0.2 * rng.normal(size=len(frame)))
    worst = frame.index[(frame["method"] == "svi") & (frame["data"] == "two")][0]
    frame.loc[worst, "k_hat"] = math.inf
    return found


def test_gaps_elpd_and_k_hat_are_drawn_as_means_over_splits(measured: GridResult) -> None:
    findings, every = GridFindings(measured), measured.cells
    means = every.groupby(["model", "data", "method"])[
        ["gap_mean", "gap_sd_ratio", "k_hat", "elpd_loo"]
    ].mean()

    def ours(row: Any) -> Any:
        return means.loc[row["model"], row["data"], row["method"]]  # type: ignore[index]

    gaps = figures.gap(findings)
    assert gaps.numbers is not None
    assert [panel.title for panel in gaps.panels] == [
        f"{data}: {what}" for data in ("one", "two") for what in ("mean function", "spread")
    ]
    assert set(gaps.numbers["method"]) == {"svi", "laplace", "map"}
    for _, row in gaps.numbers.iterrows():
        assert row["gap_mean"] == pytest.approx(ours(row)["gap_mean"])
        assert row["gap_sd_ratio"] == pytest.approx(ours(row)["gap_sd_ratio"])
        assert f"{row['method']} {row['gap_mean']:.2f}" in gaps.panels[2 * (row["data"] == "two")].words
    assert "Between two halves of nuts: 0.06." in gaps.panels[0].words
    assert "Between two halves of nuts: 1.08." in gaps.panels[1].words

    elpd = figures.GRID_PICTURES["elpd"](findings)
    assert elpd.numbers is not None
    assert len(elpd.numbers) == 2 * 3
    for (data, name), row in elpd.numbers.set_index(["data", "method"]).iterrows():  # type: ignore[misc]
        block = every[every["data"] == data].pivot(index="split", columns="method", values="elpd_loo")
        best = block.mean().idxmax()
        assert row["to"] == best
        assert row["difference"] == pytest.approx((block[name] - block[best]).mean())
    # Pareto k of Laplace is above 0.7, and its ELPD is drawn as what it is.
    assert all(panel.words.count("(not reliable)") == 1 for panel in elpd.panels)
    assert re.search(r"laplace -?[\d.]+ [^;]*\(not reliable\)", elpd.panels[0].words)

    hats = figures.k_hat(findings)
    assert hats.numbers is not None
    assert set(hats.numbers["method"]) == {"svi", "laplace"}
    for _, row in hats.numbers.iterrows():
        block = every[(every["data"] == row["data"]) & (every["method"] == row["method"])]
        assert row["k_hat"] == pytest.approx(ours(row)["k_hat"])
        assert row["largest"] == block["k_hat"].max()
        assert row["splits"] == 4
    assert "svi inf (inf)" in hats.panels[1].words


def test_what_no_cell_has_is_not_drawn(rng: np.random.Generator) -> None:
    bare = GridFindings(made({"d": around(rng, 3, a=0.0, b=-0.1)}, reference="a"))
    for function, said in (
        (figures.gap, "No method has a gap that could be measured."),
        (figures.GRID_PICTURES["elpd"], "There are no two methods with a leave-one-out ELPD to compare."),
        (figures.k_hat, "No method has a density."),
        (figures.calibration, "No cell has stored where its test targets are in its predictions."),
    ):
        picture = function(bare)
        assert (picture.panels, picture.missing) == ((), said)
    lonely = GridFindings(made({"d": around(rng, 3, a=0.0, b=-0.1)}))
    assert figures.gap(lonely).missing == "There is no reference, or it has no posterior."


# --- the page ---------------------------------------------------------------------------------------------


def test_nothing_outside_of_the_page_is_asked_for_and_ids_are_unique(text: str) -> None:
    assert outside(text) == []
    assert "http:" not in text
    assert "https:" not in text
    read = Read(text)
    assert read.open == []
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in read.tags:
        assert not any(key.startswith("on") for key in attributes)
        for key in ("href", "aria-labelledby"):
            value = attributes.get(key, "")
            if key != "href" or value.startswith("#"):
                assert value.removeprefix("#") in ids or not value
    for number in re.findall(r"url\(#([^)]*)\)", text):
        assert number in ids
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(text.encode()) < 2_000_000


def test_what_people_wrote_is_text_and_nothing_else(whole: GridResult, text: str) -> None:
    assert HOSTILE not in text
    said = Read(text).said
    for words in (HOSTILE, "wide & $open$", "毫克"):
        assert words in said
    assert page(whole, title="</title><script>1</script>", pictures={}).count("<script") == 1


def rows_of(text: str, number: int) -> tuple[list[str], dict[str, list[tuple[str, str, str]]]]:
    """Headings of a table, and method -> (what it is sorted by, class, text) of each cell."""
    block = text[text.index(f'<h3 id="table-{number}"') :]
    block = block[: block.index("</table>")]
    headings = [html.unescape(each) for each in re.findall(r'<button type="button">(.*?)</button>', block)]
    body = block[block.index("<tbody>") : block.index("</tbody>")]
    found = {}
    for name, row in re.findall(r'<th scope="row" data-order="([^"]*)">(.*?)</tr>', body, re.DOTALL):
        found[html.unescape(name)] = re.findall(
            r'<td data-heading="[^"]*" data-order="([^"]*)"(?: class="([^"]*)")?><span>(.*?)</span></td>',
            row,
            re.DOTALL,
        )
    return headings, found


def test_tables_are_the_table_and_marks_those_of_the_paired_differences(whole: GridResult, text: str) -> None:
    table, findings = whole.table(), GridFindings(whole)
    sources = {column.in_one_line: column.source for column in columns.GRID}
    marked = set()
    for number, pair in enumerate(findings.blocks, start=1):
        headings, found = rows_of(text, number)
        assert headings[0] == "method"
        assert {"splits", "log score ↑", "minus the best", "RMSE ↓", "CRPS ↓", "mean off by (sd)", "run (s)",
                "gradients", "failed"} <= set(headings)  # fmt: skip
        assert list(found) == ["nuts", "svi", "map", HOSTILE]
        for name, row in found.items():
            ours = table.loc[(*pair, name)]
            for heading, (order, style, shown_text) in zip(headings[1:], row, strict=True):
                source = sources[heading]
                value = ours[source]
                if source == "log_score_to_best" and name == findings.blocks[pair].best("log_score"):
                    assert (order, shown_text) == ("0", "best")
                elif math.isnan(value):
                    assert (order, shown_text) == ("", "–")
                else:
                    assert float(order) == value
                if source in grid_result.LARGER_IS_BETTER:
                    wanted = findings.blocks[pair].standing(source).get(name, "")
                    assert wanted in style
                    assert ("best" in style or "level" in style) is bool(wanted)
                    marked.add(wanted)
        assert ("alarm" in found["map"][-1][1]) is (number == 1)
    assert {LEVEL, ""} <= marked
    # The noise floor stands below the gaps, and nowhere else.
    foot = text[text.index("<tfoot>") : text.index("</tfoot>")]
    assert [each for each in re.findall(r"<td[^>]*><span>(.*?)</span></td>", foot) if each] == [
        "0.05",
        "1.10",
    ]


def test_downloads_are_the_files_that_save_writes(whole: GridResult, text: str, tmp_path: Path) -> None:
    whole.save(tmp_path)
    read = Read(text)
    for name in ("cells.csv", "table.csv"):
        address = next(a["href"] for _, a in read.tags if a.get("download") == name)
        assert base64.b64decode(address.partition("base64,")[2]) == (tmp_path / name).read_bytes()


def test_settings_hosts_and_dates_are_there(text: str) -> None:
    said = Read(text).said
    for words in (
        "width: 20", "Gaussian(...)", "nuts: SVI", "normal, none", "host (120 cells)", "2023-11-14 22:13 UTC",
        "2023-11-14 22:17 UTC", "ppl-bnn 9.8", "standardise True", "The approximation has no density.",
    ):  # fmt: skip
        assert words in said, words


def test_the_data_have_their_cards(whole: GridResult, tmp_path: Path) -> None:
    card = Table(
        "ours", np.zeros((3, 50)), np.zeros(3), [f"f{n}" for n in range(50)], "y", "regression",
        description="Nothing (m).", provenance=HOSTILE, licence="CC0",
    ).card()  # fmt: skip
    # The manifest has them since cards are kept; one from before has none.
    manifest = {
        "kind": grid_result.KIND, "format": grid_result.FORMAT, "reference": None, "axes": whole.axes, "cells": [],
        "files": {}, "left_out": [], "data": {"one": card},
    }  # fmt: skip
    file = tmp_path / grid_result.MANIFEST
    stored.write_manifest(file, manifest)
    assert GridResult.load(tmp_path).settings["data"] == {"one": card}
    stored.write_manifest(file, {key: value for key, value in manifest.items() if key != "data"})
    assert GridResult.load(tmp_path).settings["data"] == {}
    text = page(replace(whole, settings={**whole.settings, "data": {"one": card}}), pictures={})
    said = Read(text).said
    for words in (
        "description Nothing (m).", "rows 3", "features 50", "f38, f39, ... (50 in all)", "target name y",
        f"provenance {HOSTILE}", "licence CC0", f"hash of the rows {card['hash']}",
    ):  # fmt: skip
        assert words in said, words
    assert HOSTILE not in text
    assert said.index("hash of the rows") < said.index("nuts: SVI") < said.index("ppl-bnn 9.8")
    assert "hash of the rows" not in Read(page(whole, pictures={})).said


def test_many_failures_are_counted_and_not_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LISTED", 3)
    found = page(made({"data": {"a": [math.nan] * 5, "b": [0.0] * 5}}))
    listed = found[found.index('id="failed"') :]
    assert listed[: listed.index("</table>")].count("CurvatureError") == 2 * 3
    assert "2 more are in the file of all cells" in found


def test_a_report_of_a_grid_is_one_file_and_numbers_come_on_demand(
    whole: GridResult, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "page", lambda *given, **options: text)
    path = report(whole, tmp_path / "new" / "grid.html", numbers=True)
    assert path.read_text(encoding="utf-8") == text
    assert {file.name for file in path.parent.iterdir()} == {
        "grid.html", "grid.csv", "grid-cells.csv", "grid-cost.csv", "grid-differences.csv", "grid-to_reference.csv",
        "grid-ranks.csv", "grid-gap.csv",
    }  # fmt: skip
    assert set(all_numbers(whole)) == {
        "table",
        "cells",
        "cost",
        "differences",
        "to_reference",
        "ranks",
        "gap",
    }
    assert (
        pd.read_csv(tmp_path / "new" / "grid.csv")["method"].tolist() == ["nuts", "svi", "map", HOSTILE] * 3
    )
    monkeypatch.undo()
    monkeypatch.setattr(module, "_pictures", lambda *given: pytest.fail("something was drawn"))
    with pytest.raises(InputError, match=r"ends in .html; got .*a.pdf"):
        report(whole, tmp_path / "a.pdf")
    assert module.report is report


def test_the_same_result_gives_the_same_bytes(whole: GridResult, text: str) -> None:
    assert page(whole) == text


# --- a real one -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_grid_of_the_command_line_has_its_page(csv: Path) -> None:
    Path("two.toml").write_text(GRID.replace("small.csv", str(csv)))
    code, out, err = invoke("compare", "--grid", "two.toml", "--engine", "sequential", "--report")
    assert code == 0, out + err
    folder = Path("ppl-bnn-results/two")
    text = (folder / "report.html").read_text(encoding="utf-8")
    result = GridResult.load(folder)
    said = Read(text).said
    assert "6 of 6 cells have a result" in said
    for name in ("linear_regression on small", "laplace: Laplace", "map: MAP", "nuts: NUTS", "warmup"):
        assert name in said
    assert "The reference laplace is not valid everywhere" in said
    assert result.settings["methods"]["nuts"]["fields"]["draws"] == 3
    assert outside(text) == []
    code, _, err = invoke("report", folder, "--reference", "nuts", "--out", "nuts.html")
    assert code == 0, err
    assert Path("nuts.html").read_text(encoding="utf-8") == page(GridResult.load(folder, "nuts"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_at_any_width_light_and_dark(
    whole: GridResult,
    text: str,
    browser: str,
    requested: tuple[int, list[str]],
    tmp_path: Path,
    width: int,
    dark: bool,
) -> None:
    port, asked = requested
    (tmp_path / "grid.html").write_text(text, encoding="utf-8")
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.replace("PAGE", "grid.html").replace("WIDTH", str(width)), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    became, said = shown(browser, port, probe, tmp_path / "profile", scheme)
    assert said == []
    assert asked == []
    found = json.loads(html.unescape(re.findall(r'data-found="([^"]*)"', became)[0]))
    assert found["width"] == width
    assert found["overflow"] <= 0
    assert found["flat"] == 0
    # The third column is the log score.
    scores = whole.table().loc[("mlp", "one"), "log_score"]
    assert found["up"] == list(scores.sort_values(kind="stable").index)
    assert (np.diff(scores[found["down"]].to_numpy()) <= 0.0).all()
