"""A report says what the numbers say and no more, and is one file that needs no other."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import arviz_stats
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score, brier_score_loss, mean_squared_error

from ppl_bnn import scores
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.stored import write_manifest
from ppl_bnn.diagnostics.diagnose import Diagnosis
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.record import FitSummary
from ppl_bnn.evaluation.comparison.run import compare
from ppl_bnn.evaluation.comparison.summary import lags_of
from ppl_bnn.evaluation.comparison.table import COLUMNS
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.reliability import Transform
from ppl_bnn.reporting import findings
from ppl_bnn.reporting import page as module
from ppl_bnn.reporting.figures import pictures as figures
from ppl_bnn.reporting.figures.chains import function_draws, rank_curves
from ppl_bnn.reporting.figures.panels import pareto_front
from ppl_bnn.reporting.findings import Findings
from ppl_bnn.reporting.page import all_numbers, page, report
from ppl_bnn.reporting.verdict import BEST, LEVEL, Verdict, standing
from tests.evaluation.comparison.test_comparison import (
    Approximate,
    Exact,
    Fails,
    FromPrior,
    Mode,
    classifier,
    line,
)

HOSTILE = "<b onmouseover=\"alert('x')\">&amp; $a_b$ {{ 7*7 }}</b>"


def verdict(comparison: Comparison) -> Verdict:
    return findings.comparison_verdict(Findings(comparison))


# --- comparisons to report on -----------------------------------------------------------------------------


def told(
    log_scores: dict[str, np.ndarray], reference: str | None = None, **rows: dict[str, Any]
) -> Comparison:
    """A comparison of given log scores: a normal of scale s at its mean has the log score -log(s sqrt(2 pi)).

    rows: method -> columns of its row of the table.
    """
    count = len(next(iter(log_scores.values())))
    predictions, table = {}, {}
    for name, wanted in log_scores.items():
        scale = np.exp(-wanted)[None] / math.sqrt(2.0 * math.pi)
        predictions[name] = Prediction("Normal", {"loc": np.zeros((1, count)), "scale": scale})
        table[name] = dict.fromkeys(COLUMNS, math.nan)
        table[name] |= dict.fromkeys(("reference", "ppl", "target", "failure"), "")
        table[name] |= {"kind": "iid", "converged": "yes", "compile_seconds": 0.0, "run_seconds": 10.0}
        table[name] |= {"log_score": float(np.mean(wanted)), **rows.get(name, {})}
    if reference is not None:
        table[reference]["reference"] = "reference"
    y = np.zeros(count)
    return Comparison(
        table=pd.DataFrame.from_dict(table, orient="index"),
        posteriors={},
        predictions=predictions,
        trees={},
        diagnoses={},
        reference=reference,
        notes={},
        data={"task": "regression", "train_rows": 5, "test_rows": count, "target_name": "y"},
        test_inputs=np.zeros((count, 3)),
        test_targets=y,
    )


def around(rng: np.random.Generator, **means: float) -> dict[str, np.ndarray]:
    """Log scores (50,) that share their rows and differ by noise of 0.1: standard errors of differences are 0.02."""
    shared = rng.normal(size=50)
    found = {}
    for name, mean in means.items():
        noise = rng.normal(size=50)
        found[name] = mean + shared + 0.1 * (noise - noise.mean()) / math.sqrt(2.0)
    return found


@pytest.fixture(scope="module")
def fitted() -> Comparison:
    """Fits in closed form to 40 rows of a line, one of which fails; names and units as hostile as they may be."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(70, 1))
    y = 0.8 * x[:, 0] + 0.5 * rng.normal(size=70)
    methods = {
        "exact": Exact(ppl="pyro"),
        "far apart": Exact(ppl="pyro", apart=3.0, draws=60),
        "wide & $open$": Approximate(ppl="pyro", stretch=1.6),
        "mode": Mode(ppl="pyro"),
        "broken": Fails(ppl="pyro"),
    }
    return compare(
        line,
        (x[:40], y[:40]),
        (x[40:], y[40:]),
        methods,
        reference="exact",
        device="cpu",
        target_name=HOSTILE,
        feature_names=["dose $d$ / 毫克"],
        card={"name": HOSTILE, "licence": None},
    )


@pytest.fixture(scope="module")
def made(fitted: Comparison) -> str:
    return page(fitted)


@pytest.fixture(scope="module")
def classes() -> Comparison:
    """Two classes of one posterior and of a bad one, without posteriors or trees."""
    rng = np.random.default_rng(1)
    probability = rng.uniform(0.05, 0.95, size=200)
    y = (rng.uniform(size=200) < probability).astype(int)
    predictions = {
        "good": Prediction("Bernoulli", {"probs": probability[None]}),
        "flat": Prediction("Bernoulli", {"probs": np.full((1, 200), 0.5)}),
    }
    table = pd.DataFrame.from_dict(
        {
            name: {
                **dict.fromkeys(COLUMNS, math.nan),
                **dict.fromkeys(("reference", "ppl", "target", "failure"), ""),
                "kind": "iid",
                "converged": "yes",
                "compile_seconds": 0.0,
                "run_seconds": seconds,
                **scores.scores_of(predictions[name], y),
            }
            for name, seconds in (("good", 2.0), ("flat", 1.0))
        },
        orient="index",
    )
    data = {"task": "classification", "train_rows": 9, "test_rows": 200, "target_name": "ill"}
    return Comparison(table, {}, predictions, {}, {}, None, {}, data, rng.normal(size=(200, 4)), y)


# --- which values are best --------------------------------------------------------------------------------


def test_a_value_is_best_where_a_paired_test_says_so(rng: np.random.Generator) -> None:
    seen = set()
    for trial in range(60):
        values = {
            name: rng.normal(size=30) + 0.02 * trial * shift
            for name, shift in zip("abc", (0.0, 0.3, 1.0), strict=True)
        }
        best = max(values, key=lambda name: values[name].mean())
        ahead = {
            name: stats.ttest_rel(values[best], values[name]).statistic > 2.0
            for name in values
            if name != best
        }
        found = standing(lags_of(values))
        if all(ahead.values()):
            assert found == {best: BEST}
        elif any(ahead.values()):
            assert found == {best: LEVEL, **{name: LEVEL for name in ahead if not ahead[name]}}
        else:
            assert found == {}
        seen.add(tuple(sorted(found.values())))
    assert len(seen) == 3


def test_what_cannot_be_compared_is_not_marked(rng: np.random.Generator) -> None:
    one = rng.normal(size=20)
    for values in ({}, {"a": one}, {"a": one, "b": one}, {"a": one[:1], "b": one[:1] - 9.0}):
        assert standing(lags_of(values)) == {}
    impossible = one.copy()
    impossible[0] = -np.inf
    assert standing(lags_of({"a": one, "b": impossible})) == {"a": BEST}


def test_rows_are_scored_as_the_columns_are(fitted: Comparison, classes: Comparison) -> None:
    found = Findings(fitted).row_scores
    assert set(found) == {"log_score", "rmse", "crps"}
    for name, prediction in fitted.predictions.items():
        squares = mean_squared_error(fitted.test_targets, prediction.mean)
        assert -found["rmse"][name].mean() == pytest.approx(squares, rel=1e-12)
        assert -found["crps"][name].mean() == pytest.approx(fitted.table.loc[name, "crps"], rel=1e-12)
        assert found["log_score"][name].mean() == pytest.approx(
            fitted.table.loc[name, "log_score"], rel=1e-12
        )
    found, y = Findings(classes).row_scores, classes.test_targets
    for name, prediction in classes.predictions.items():
        one = prediction.probabilities[:, 1]
        assert found["accuracy"][name].mean() == accuracy_score(y, prediction.probabilities.argmax(axis=1))
        assert -found["brier"][name].mean() == pytest.approx(2.0 * brier_score_loss(y, one), rel=1e-12)


# --- the verdict ------------------------------------------------------------------------------------------


def test_a_method_that_is_ahead_of_all_is_the_one_to_use(rng: np.random.Generator) -> None:
    found = verdict(told(around(rng, slow=0.0, quick=-0.1), slow={"run_seconds": 100.0}))
    assert (found.method, found.headline) == ("slow", "Use slow.")
    assert "ahead of every other" in found.because
    assert "no other method was faster" not in found.because
    assert any("quick by 0.100 ± 0.0" in text and "but took 10 s" in text for text in found.why)
    assert "no other method was faster" in verdict(told(around(rng, a=0.0, b=-0.1))).because


def test_among_those_that_are_level_the_quickest_is_named(rng: np.random.Generator) -> None:
    values = around(rng, best=0.01, quick=0.0, bad=-0.3)
    found = verdict(
        told(values, best={"run_seconds": 50.0}, quick={"run_seconds": 5.0}, bad={"run_seconds": 1.0})
    )
    assert found.method == "quick"
    assert "was the fastest (5 s)" in found.because
    difference = values["best"] - values["quick"]
    error = stats.sem(difference)
    most = difference.mean() + 2.0 * error
    assert f"a loss of up to {most:.2g}." in found.why[0]
    assert any("best (50 s; 10 times slower)" in text for text in found.why)
    everything = verdict(told(around(rng, a=0.0, b=0.001)))
    assert "No difference between the methods is established on 50 test rows" in everything.because


def test_a_point_is_for_predictions_alone(rng: np.random.Generator) -> None:
    point = {"kind": "point", "run_seconds": 1.0}
    found = verdict(told(around(rng, map=0.0, nuts=0.005, svi=0.001), map=point, nuts={"run_seconds": 60.0}))
    assert found.headline == "For predictions alone, use map; for uncertainty about the function, svi."
    alone = verdict(told(around(rng, map=0.0, svi=-0.2), map=point))
    assert alone.headline == "For predictions alone, use map."
    assert "no epistemic uncertainty" in alone.because


@pytest.mark.parametrize("converged", ["no", "per mode", "in doubt"])
def test_what_has_not_converged_is_not_recommended(rng: np.random.Generator, converged: str) -> None:
    bad = {"converged": converged, "run_seconds": 1.0}
    found = verdict(told(around(rng, bad=0.0, good=-0.001), bad=bad))
    assert found.method == "good"
    assert "the only one without a known problem" in found.because
    assert any(text.startswith("bad ") for text in found.doubts)
    ahead = verdict(told(around(rng, bad=0.0, good=-0.5, worse=-0.9), bad=bad))
    assert ahead.method is None
    assert ahead.headline.startswith("No method can be recommended yet")
    assert "good predicts best; it is 0.5" in ahead.because
    # Chains that nobody could judge are no better than those that were found wanting.
    unknown = {"kind": "chains", "converged": ""}
    assert verdict(told(around(rng, bad=0.0, good=-0.5), bad=unknown)).method is None


OPEN = "laplace is an approximation, and its diagnostics do not decide whether it is adequate"


@pytest.mark.parametrize(
    ("judged", "figures", "said"),
    [
        ("undecided", {"pareto_k": math.inf}, [f"{OPEN}: Pareto k-hat is inf, above 0.7."]),
        ("undecided", {"pareto_k": 0.5}, [f"{OPEN}; see its diagnosis."]),
        ("undecided", {}, [f"{OPEN}; see its diagnosis."]),
        (
            "inadequate",
            {},
            [
                "laplace is not an adequate approximation of the posterior, however well it predicts; see its "
                "diagnosis."
            ],
        ),
        ("adequate as far as seen", {"pareto_k": 0.5}, []),
    ],
)
def test_what_diagnostics_leave_open_is_said_and_bars_nothing(
    rng: np.random.Generator, judged: str, figures: dict[str, float], said: list[str]
) -> None:
    comparison = told(around(rng, laplace=0.0, svi=-0.5))
    comparison.diagnoses["laplace"] = Diagnosis(judged, ("a reason",), (), figures)
    found = verdict(comparison)
    assert found.method == "laplace"
    assert [text for text in found.doubts if text.startswith("laplace")] == said


def test_a_reference_that_has_not_converged_is_said_first_and_rests_nothing(rng: np.random.Generator) -> None:
    values = around(rng, nuts=0.0, svi=0.1)
    gaps = {"gap_mean": 0.4, "gap_sd_ratio": 0.9, "gap_mean_floor": 0.1, "gap_sd_floor": 1.05}
    chains = {"kind": "chains", "r_hat": 1.0104, "ess_min": 250.0}
    good = verdict(told(values, "nuts", nuts={**chains, "converged": "yes"}, svi=gaps))
    assert good.reference_doubt == ""
    assert any(
        "off by 0.40 epistemic standard deviations (sampling noise alone: 0.10)" in w for w in good.why
    )
    bad = verdict(told(values, "nuts", nuts={**chains, "converged": "no"}, svi=gaps))
    assert bad.reference_doubt.startswith("The reference nuts has not converged (R-hat up to 1.0104 and")
    assert not any("0.40" in text for text in bad.why)
    made = page(told(values, "nuts", nuts={**chains, "converged": "no"}, svi=gaps))
    assert made.index("The reference nuts has not converged") < made.index('class="headline"')
    for row, said in (
        ({"kind": "iid"}, "is itself an approximation"),
        (
            {**chains, "converged": "yes", "target": "tempered"},
            "converged, but not to the posterior (tempered)",
        ),
    ):
        assert said in verdict(told(values, "nuts", nuts=row, svi=gaps)).reference_doubt


def test_gaps_within_sampling_noise_are_called_that(rng: np.random.Generator) -> None:
    gaps = {"gap_mean": 0.08, "gap_sd_ratio": 0.97, "gap_mean_floor": 0.1, "gap_sd_floor": 1.05}
    chains = {"kind": "chains", "converged": "yes"}
    (text,) = [
        w
        for w in verdict(told(around(rng, nuts=0.0, svi=0.1), "nuts", nuts=chains, svi=gaps)).why
        if "nuts, its" in w
    ]
    assert "(within sampling noise: 0.10)" in text
    assert "(within sampling noise)" in text


def test_intervals_are_judged_by_a_binomial_standard_error(rng: np.random.Generator) -> None:
    # 50 rows: the standard error is 4.2 points, so 0.82 is within two of them and 0.80 is not.
    for covered, said in ((0.82, "within two"), (0.80, "too narrow"), (1.0, "too wide")):
        found = verdict(told(around(rng, a=0.0, b=-1.0), a={"coverage_90": covered}))
        assert any("4.2 points each" in text and said in text for text in found.why)


def test_without_methods_there_is_nothing_to_recommend(rng: np.random.Generator) -> None:
    lonely = verdict(told(around(rng, a=0.0)))
    assert lonely.method is None
    assert "Only a has results" in lonely.headline
    empty = told(around(rng, a=0.0))
    empty.predictions.clear()
    empty.failures["a"] = f"ModelError: {HOSTILE}"
    found = verdict(empty)
    assert "No method finished" in found.headline
    assert any(HOSTILE in text for text in found.doubts)
    made = page(empty)
    assert HOSTILE in Read(made).said
    assert HOSTILE not in made
    one = verdict(told({"a": np.zeros(1), "b": np.ones(1)}))
    assert "one test row" in one.limits[0]


# --- the figures ------------------------------------------------------------------------------------------


def test_every_picture_can_be_drawn(made: str, classes: Comparison) -> None:
    assert "could not be drawn" not in made
    for key in set(figures.PICTURES) - {"losses"}:
        assert f'<section id="{key}"' in made
        assert f'<a href="#{key}">' in made
    assert "could not be drawn" not in page(classes)


def test_the_front_is_what_nothing_beats_in_both(rng: np.random.Generator) -> None:
    seconds, gaps = np.exp(rng.normal(size=40)), rng.uniform(size=40)
    front = pareto_front(seconds, gaps)
    beaten = [
        any((seconds < seconds[i]) & (gaps <= gaps[i]) | (seconds <= seconds[i]) & (gaps < gaps[i]))
        for i in range(40)
    ]
    assert sorted(front) == [i for i in range(40) if not beaten[i]]
    assert list(front) == sorted(front, key=lambda i: seconds[i])


def test_differences_of_rmse_are_those_of_the_table(fitted: Comparison) -> None:
    numbers = figures.cost(Findings(fitted)).numbers
    assert numbers is not None
    rmse = numbers[numbers["score"] == "rmse"].set_index("method")["behind_best"]
    expected = fitted.table["rmse"].dropna() - fitted.table["rmse"].min()
    np.testing.assert_allclose(rmse[expected.index], expected, atol=1e-12)


def test_elpd_differences_are_arvizs(fitted: Comparison) -> None:
    findings = Findings(fitted)
    ranking: Any = arviz_stats.compare(
        {name: loo.elpd_data for name, loo in findings.left_out.items()}, round_to="none"
    )
    numbers = figures.PICTURES["elpd"](findings).numbers
    assert numbers is not None
    loo = numbers[numbers["score"] == "elpd_loo"].set_index("method")
    assert set(loo.index) == set(ranking.index)
    for name, row in ranking.iterrows():
        assert abs(loo.loc[name, "difference"]) == pytest.approx(abs(row["elpd_diff"]), abs=1e-9)
        # ArviZ divides by N, and this by N - 1.
        correction = math.sqrt(40 / 39)
        assert loo.loc[name, "standard_error"] == pytest.approx(correction * row["dse"], rel=1e-9, abs=1e-12)


def test_coverages_and_reliability_are_those_of_the_scores(fitted: Comparison, classes: Comparison) -> None:
    numbers = figures.calibration(Findings(fitted)).numbers
    assert numbers is not None
    for name, prediction in fitted.predictions.items():
        transform = numbers[numbers["method"] == name]["pit"].to_numpy()
        found = scores.coverages(prediction, fitted.test_targets, (0.3, 0.8, 0.9))
        for level, share in zip(found["level"], found["coverage"], strict=True):
            assert np.mean(np.abs(transform - 0.5) <= 0.5 * level) == pytest.approx(share)
    drawn = figures.calibration(Findings(classes)).numbers
    assert drawn is not None
    good = drawn[drawn["method"] == "good"]
    assert good["rows"].sum() == 200
    probability = classes.predictions["good"].probabilities[:, 1]
    assert np.average(good["probability"], weights=good["rows"]) == pytest.approx(probability.mean())
    assert np.average(good["share"], weights=good["rows"]) == pytest.approx(classes.test_targets.mean())


@pytest.fixture(scope="module")
def counted() -> Comparison:
    """2000 counts of Poisson(0.5), predicted by that and by a mixture of other rates."""
    rng = np.random.default_rng(2)
    rates = {"true": np.full((1, 2000), 0.5), "mixed": rng.gamma(2.0, 0.6, size=(20, 2000))}
    made = told({name: np.zeros(2000) for name in rates}, "true")
    made.predictions.update({name: Prediction("Poisson", {"rate": rate}) for name, rate in rates.items()})
    made.test_targets, made.table["rmse"] = rng.poisson(0.5, size=2000), 1.0
    return made


def test_of_counts_pit_is_randomised_and_coverage_that_of_the_scores(counted: Comparison) -> None:
    picture = figures.calibration(Findings(counted))
    numbers = picture.numbers
    assert numbers is not None
    transform = numbers[numbers["method"] == "true"]["pit"]
    # The middle of each jump has four values for nine rows in ten, and is far from uniform.
    assert stats.kstest(transform, "uniform").pvalue > 0.01
    levels = (0.02, 0.5, 0.61, 0.8, 0.9, 0.95, 0.98)
    for name, prediction in counted.predictions.items():
        found = scores.coverages(prediction, counted.test_targets, levels)["coverage"]
        made = Transform.of(prediction, counted.test_targets)
        assert [made.covered(level) for level in levels] == list(found)
        said = ", ".join(f"{share:.0%}" for share in found[[1, 3, 4, 5]])
        assert f"{name} {said}" in picture.panels[0].words
    assert "true 9" in picture.panels[0].words
    assert "lines above zero are no fault" in picture.caption
    assert picture.panels[1].title == "Randomised PIT"
    assert "randomised" not in str(figures.calibration(Findings(told({"a": np.zeros(30)}))))


def test_of_counts_intervals_are_not_too_wide_by_their_nature(counted: Comparison) -> None:
    table = counted.table.assign(coverage_90=pd.Series({"true": 0.98, "mixed": 0.8}))
    scored = replace(counted, table=table)
    said = {name: " ".join(Findings(scored).coverage(name)) for name in ("true", "mixed")}
    assert said["true"].endswith("end at whole numbers, and contain more than the nominal level.")
    assert "too narrow" in said["mixed"]


def test_coverage_and_width_at_several_levels_stand_beside_the_pictures(
    counted: Comparison, classes: Comparison
) -> None:
    made = page(counted)
    sheet = made[made.index('id="calibration-table"') :]
    sheet = sheet[: sheet.index("</table>")]
    numbers = all_numbers(counted, {})["intervals"].set_index("method")
    assert sheet.index("50 % cover") < sheet.index("95 % width")
    for name, prediction in counted.predictions.items():
        found = scores.coverages(prediction, counted.test_targets)
        row = sheet[sheet.index(f'data-order="{name}"') :]
        orders = re.findall(r'<td data-heading="[^"]*" data-order="([^"]*)">', row)[:10]
        for place, level in enumerate((50, 80, 90, 95)):
            assert numbers.loc[name, f"coverage_{level}"] == found["coverage"][place]
            assert numbers.loc[name, f"width_{level}"] == found["width"][place]
            assert [float(order) for order in orders[2 * place : 2 * place + 2]] == [
                found["coverage"][place],
                found["width"][place],
            ]
        expected = scores.pit_uniformity(prediction, counted.test_targets)
        assert tuple(numbers.loc[name, ["pit_distance", "pit_p"]]) == expected
        assert [float(order) for order in orders[8:]] == list(expected)
    assert numbers.loc["mixed", "pit_p"] < 0.001
    assert sheet.count("&lt; 0.001") == 1
    assert "calibration-table" not in page(classes)
    assert "intervals" not in all_numbers(classes, {})


def test_ranks_of_chains_that_agree_stay_in_their_band(rng: np.random.Generator) -> None:
    # At 99 % more than 5 of 100 are outside with probability 0.0005; the seed is fixed.
    left = sum(bool(rank_curves(rng.normal(size=(4, 60)), seed=trial).outside) for trial in range(100))
    assert left <= 5
    shifted = rng.normal(size=(4, 200))
    shifted[2] += 0.8
    found = rank_curves(shifted)
    assert 2 in found.outside
    # Against the mean of an ECDF difference: a chain that lies higher has more of the high ranks, so is below zero.
    assert found.curves[2].mean() < -0.1
    np.testing.assert_allclose(found.curves.mean(axis=0), 0.0, atol=0.01)
    few = rank_curves(rng.normal(size=(3, 12)))
    assert few.band is None
    assert few.draws == 12


def test_draws_in_function_space_are_for_arviz(fitted: Comparison) -> None:
    tree = function_draws(fitted, "far apart")
    assert dict(tree["posterior"].dataset.sizes) == {"chain": 4, "draw": 60, "row": 30}
    mean = tree["posterior"]["f"].values.reshape(-1, 30).mean(axis=0)
    np.testing.assert_allclose(mean, fitted.predictions["far apart"].mean, rtol=1e-9)
    rhat: Any = arviz_stats.rhat(tree)
    assert float(rhat["f"].max()) > 1.5
    total = fitted.posteriors["far apart"].log_likelihood().sum(axis=-1)
    np.testing.assert_allclose(tree["posterior"]["log_likelihood"].values, total, rtol=1e-9)
    with pytest.raises(UnsupportedError, match="a method of chains"):
        function_draws(fitted, "mode")
    told_of = figures.ranks_of_draws(Findings(fitted))
    words = {panel.title: panel.words for panel in told_of.panels}
    assert "leave the band" in words["far apart: mean function, worst row"]
    assert "stay inside" in words["exact: mean function, worst row"]


def test_a_picture_that_cannot_be_drawn_says_so_and_the_rest_is_there(
    fitted: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(findings: Findings) -> Any:
        raise ZeroDivisionError(HOSTILE)

    monkeypatch.setattr(module, "PICTURES", {"elpd": broken, "cost": figures.cost})
    made = page(fitted)
    assert "This could not be drawn: ZeroDivisionError" in made
    assert HOSTILE not in made
    assert "Accuracy against cost" in made


# --- the page ---------------------------------------------------------------------------------------------


class Read(HTMLParser):
    """What a test wants to know of a page."""

    VOID = ("meta", "link", "br", "use", "image", "path", "rect", "ellipse", "circle", "line")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.text).split())


def outside(text: str) -> list[str]:
    """Whatever a page would fetch: all that is referred to and is neither in the page nor a `data:` address."""
    found = re.findall(r"(?:src|href|srcset|poster|action)\s*=\s*[\"']?([^\"'\s>]*)", text)
    found += re.findall(r"url\(\s*[\"']?([^)\"']*)", text) + re.findall(r"@import[^;]*", text)
    return [each for each in found if not each.startswith(("#", "data:"))]


def test_nothing_outside_of_the_page_is_asked_for(made: str) -> None:
    assert outside(made) == []
    assert outside('<img src="https://a.b/c.png"><p style="background: url(x.png)">') == [
        "https://a.b/c.png",
        "x.png",
    ]
    assert "http:" not in made
    assert "https:" not in made
    read = Read(made)
    policy = next(a["content"] for t, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    (script,) = read.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert not any(key.startswith("on") for _, attributes in read.tags for key in attributes)


def test_the_page_is_well_formed_and_can_be_read_without_seeing(made: str) -> None:
    read = Read(made)
    assert read.open == []
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in read.tags:
        for key in ("href", "aria-labelledby"):
            value = attributes.get(key, "")
            if key == "href" and not value.startswith("#"):
                continue
            assert value.removeprefix("#") in ids or not value
    for number in re.findall(r"url\(#([^)]*)\)", made):
        assert number in ids
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    drawings = [attributes for tag, attributes in read.tags if tag == "svg"]
    assert len(drawings) > 15
    for attributes in drawings:
        assert attributes.get("aria-hidden") == "true" or (
            attributes["role"] == "img" and len(attributes["aria-label"]) > 40
        )
    for tag, attributes in read.tags:
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
    assert ("html", {"lang": "en"}) in read.tags


def test_what_people_wrote_is_text_and_nothing_else(fitted: Comparison, made: str) -> None:
    assert HOSTILE not in made
    assert HOSTILE in Read(made).said
    assert "wide & $open$" in Read(made).said
    assert "wide & $open$" not in made
    assert "毫克" in made
    assert page(fitted, title="</title><script>1</script>", pictures={}).count("<script") == 1


def test_the_table_has_all_numbers_and_the_download_is_the_table(fitted: Comparison, made: str) -> None:
    read = Read(made)
    said = read.said
    for value in fitted.table["rmse"].dropna():
        assert f"{value:.4g}" in said
    address = next(a["href"] for t, a in read.tags if a.get("download") == "comparison.csv")
    table = pd.read_csv(io.BytesIO(base64.b64decode(address.partition("base64,")[2])), index_col="method")
    numbers = fitted.table.select_dtypes("float").columns
    assert list(table.index) == list(fitted.table.index)
    assert list(table.columns) == list(fitted.table.columns)
    np.testing.assert_allclose(table[numbers].astype(float), fitted.table[numbers], rtol=1e-7)
    for note in set(fitted.notes.values()):
        assert " ".join(note.split()) in said
    assert fitted.failures["broken"] in said


def test_marks_in_the_table_are_those_of_the_paired_differences(fitted: Comparison, made: str) -> None:
    marked = Findings(fitted).row_scores
    cells = re.findall(r"<tr>\s*<th scope=\"row\" data-order=\"([^\"]*)\">.*?</tr>", made, re.DOTALL)
    assert cells[:2] == ["exact", "far apart"]
    body = made[made.index('id="table-1"') : made.index('id="table-2"')]
    rows = re.findall(r"<tr>\s*<th scope=\"row\" data-order=\"([^\"]*)\">(.*?)</tr>", body, re.DOTALL)
    for name, text in rows:
        found = re.findall(r"<td data-order=\"[^\"]*\"( class=\"[a-z ]*\")?>", text)
        for column, given in zip(("log_score", "rmse", "crps"), found, strict=False):
            wanted = standing(lags_of(marked[column])).get(html.unescape(name), "")
            assert (wanted or "none") in (given or "none"), (name, column)


def contrast(first: str, second: str) -> float:
    """Contrast of two colours by WCAG 2."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255.0
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_the_page_in_every_theme(made: str) -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    style = made[made.index("<style>") : made.index("</style>")]
    themes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r"\{([^{}]*--paper: [^{}]*)\}", style)
    ]
    assert len(themes) == 4
    assert themes[1] == themes[2]
    assert contrast(themes[1]["paper"], "#ffffff") > 10.0
    for theme in themes:
        for paper in ("paper", "raised", "good-paper", "alarm-paper"):
            for ink in ("ink", "quiet", "accent", "alarm"):
                assert contrast(theme[ink], theme[paper]) >= 4.5, (ink, paper, theme)
        # Bands are filled with sky: they lie between lines that can be told.
        for mark in ("blue", "orange", "vermilion", "grey", "green", "pink", "yellow"):
            assert contrast(theme[mark], theme["paper"]) >= 3.0, (mark, theme)


def test_every_colour_of_a_picture_is_the_pages(made: str) -> None:
    # What is in no theme would be black on black in one of them.
    drawings = "".join(re.findall(r"<svg.*?</svg>", made, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r"base64,[^\"]*", "", drawings))) == set()
    named = set(re.findall(r"var\(--([a-z-]+)\)", drawings))
    assert {"blue", "grid", "ink", "letters"} <= named
    style = made[made.index("<style>") : made.index("</style>")]
    assert all(f"--{name}:" in style for name in named)


def test_many_rows_do_not_make_a_large_page(rng: np.random.Generator) -> None:
    rows = 5000
    y = rng.normal(size=rows)
    predictions = {
        f"method{index}": Prediction(
            "Normal", {"loc": y + rng.normal(size=(2, rows)), "scale": np.ones((2, rows))}
        )
        for index in range(3)
    }
    made = told({name: np.zeros(rows) for name in predictions}, "method0")
    made.predictions.update(predictions)
    made.test_targets, made.table["rmse"] = y, 1.0
    text = page(made)
    assert len(text) < 1.5e6
    assert "data:image/png;base64" in text
    assert outside(text) == []
    assert "numbers=True" in html.unescape(text)


# --- the file ---------------------------------------------------------------------------------------------


def test_a_report_is_one_file_and_numbers_come_on_demand(
    fitted: Comparison, made: str, classes: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = report(classes, tmp_path / "new" / "report.html")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert len(made.encode()) < 3_000_000
    monkeypatch.setattr(module, "page", lambda *given, **options: made)
    with pytest.raises(InputError, match="numbers: expected True or False; got 'csv'"):
        report(fitted, path, numbers="csv")  # type: ignore[arg-type]
    report(fitted, path, numbers=True)
    assert path.read_text(encoding="utf-8") == made
    names = {file.name for file in path.parent.iterdir()}
    assert {"report.html", "report.csv", "report-rows.csv", "report-cost.csv", "report-elpd.csv"} <= names
    rows = pd.read_csv(tmp_path / "new" / "report-rows.csv")
    for name in fitted.predictions:
        part = rows[rows["method"] == name]
        assert len(part) == 30
        assert math.sqrt(part["squared_error"].mean()) == pytest.approx(fitted.table.loc[name, "rmse"])
        assert part["log_score"].mean() == pytest.approx(fitted.table.loc[name, "log_score"])
        assert part["crps"].mean() == pytest.approx(fitted.table.loc[name, "crps"])
    assert set(all_numbers(fitted)) == {
        name.removeprefix("report-").removesuffix(".csv") if name != "report.csv" else "table"
        for name in names - {"report.html"}
    }


def test_bad_arguments_are_told_before_anything_is_drawn(
    fitted: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_pictures", lambda findings: pytest.fail("something was drawn"))
    with pytest.raises(InputError, match="a Comparison, a GridResult or a Grade; got dict"):
        report({}, tmp_path / "a.html")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"ends in .html; got .*a.pdf"):
        report(fitted, tmp_path / "a.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a folder that can be written"):
        report(fitted, tmp_path / "file" / "a.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InputError, match=r"a file; got .*, a folder"):
        report(fitted, tmp_path / "folder.html")
    assert {file.name for file in tmp_path.iterdir()} == {"file", "folder.html"}


def test_the_same_comparison_gives_the_same_bytes(classes: Comparison) -> None:
    assert page(classes) == page(classes)


# --- a comparison that was kept ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_comparison_that_was_kept_has_the_same_page(fitted: Comparison, made: str, tmp_path: Path) -> None:
    again = Comparison.load(fitted.save(tmp_path / "kept"))
    assert again.posteriors == {}
    assert page(again) == made
    pd.testing.assert_frame_equal(again.table, fitted.table)
    assert (again.notes, again.failures) == (fitted.notes, fitted.failures)
    assert again.markdown() == fitted.markdown()
    for name, prediction in fitted.predictions.items():
        for parameter, value in prediction.parameters.items():
            np.testing.assert_array_equal(again.predictions[name].parameters[parameter], value)
    # And once more, from what was read.
    assert page(Comparison.load(again.save(tmp_path / "twice"))) == made
    assert {file.name for file in (tmp_path / "twice").iterdir()} == {
        file.name for file in (tmp_path / "kept").iterdir()
    }


def test_the_folder_of_a_run_has_all_of_it_at_any_time(rng: np.random.Generator, tmp_path: Path) -> None:
    x = rng.normal(size=(40, 2))
    y = (x[:, 0] + 0.3 * rng.normal(size=40) > 0.0).astype(int)
    (tmp_path / "late.prediction.safetensors").write_text("of an earlier run")
    methods = {
        "prior": FromPrior(ppl="pyro"),
        "broken": Fails(ppl="pyro"),
        "late": Fails(ppl="pyro", error=KeyboardInterrupt()),
    }
    with pytest.raises(KeyboardInterrupt) as caught:
        compare(
            classifier, (x[:30], y[:30]), (x[30:], y[30:]), methods, reference="prior", device="cpu", out=tmp_path,
            feature_names=["a", "b"], class_names=["no", "yes"], card={"odd": {1: Path("x")}, "set": {3.5}},
        )  # fmt: skip
    partial = caught.value.partial  # type: ignore[attr-defined]
    again = Comparison.load(tmp_path)
    assert list(again.table.index) == ["prior", "broken"]
    text = page(again)
    assert text == page(partial)
    # Maps over the two inputs were drawn from what was kept of the posterior.
    assert "Map of the most probable class by prior" in text
    assert not (tmp_path / "late.prediction.safetensors").exists()


def test_every_kind_of_prediction_is_kept_as_it_was(rng: np.random.Generator, tmp_path: Path) -> None:
    weights = np.log([0.25, 0.75])
    within = np.full((2, 6), 0.04)
    given = {
        "weighted": Prediction(
            "Normal", {"loc": rng.normal(size=(2, 6)), "scale": np.ones((2, 6))}, weights, within
        ),
        "heavy": Prediction(
            "StudentT", {name: 1.5 + rng.uniform(size=(3, 6)) for name in ("df", "loc", "scale")}
        ),
    }
    made = told({name: np.zeros(6) for name in given}, "heavy")
    made.predictions.update(given)
    made.test_inputs = {"words": np.arange(12).reshape(6, 2), "size": rng.normal(size=6)}
    made.table.loc["heavy", ["rmse", "crps"]] = [np.inf, -0.0]
    made.notes["heavy", "rmse"] = HOSTILE
    made.table.index.name = "method"
    made.fits["heavy"] = FitSummary(
        FitInfo(
            "SVI", "pyro", 3, "float64", "cpu", 1.0, 2.0, None, {"loss": rng.normal(size=50)},
            {"steps": 50, "guide": ("normal", None), "rates": {"first": 0.1}}, {"torch": "2.0"}, "hash", ("said",),
            {"elbo": math.nan, "elbo_se": 1.0 / 3.0},
        ),
        (1, 3),
    )  # fmt: skip
    again = Comparison.load(made.save(tmp_path))
    pd.testing.assert_frame_equal(again.table, made.table, check_names=False, check_dtype=False)
    assert again.notes == made.notes
    info = again.fits["heavy"].info
    np.testing.assert_array_equal(info.history["loss"], made.fits["heavy"].info.history["loss"])
    assert (info.warnings, info.figures["elbo_se"]) == (("said",), 1.0 / 3.0)
    text = page(again)
    assert text == page(made)
    assert "Loss of heavy over 50 steps" in text
    for name, value in made.test_inputs.items():
        np.testing.assert_array_equal(again.test_inputs[name], value)
        assert again.test_inputs[name].dtype == value.dtype
    for name, prediction in given.items():
        np.testing.assert_array_equal(
            again.predictions[name].log_prob(made.test_targets), prediction.log_prob(made.test_targets)
        )
        np.testing.assert_array_equal(again.predictions[name].epistemic, prediction.epistemic)


def test_a_folder_that_is_no_comparison_or_damaged_is_told(rng: np.random.Generator, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder of a comparison; got .*without comparison\.json"):
        Comparison.load(tmp_path / "nowhere")
    kept = told(around(rng, a=0.0, b=0.1)).save(tmp_path / "kept")
    victim = kept / "b.prediction.safetensors"
    victim.write_bytes(victim.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"a whole comparison; got .*b\.prediction"):
        Comparison.load(kept)
    victim.unlink()
    with pytest.raises(InputError, match="a whole comparison"):
        Comparison.load(kept)
    manifest = kept / "comparison.json"
    words = json.loads(manifest.read_text())
    for changed, error, said in (
        ({**words, "format": 99}, UnsupportedError, "the version of ppl-bnn that wrote it"),
        ({**words, "kind": "recipe"}, InputError, "of something else"),
        ({name: words[name] for name in ("kind", "format", "files")}, InputError, "has no entry 'reference'"),
    ):
        write_manifest(manifest, changed)
        with pytest.raises(error, match=said):
            Comparison.load(kept)
    manifest.write_text("{")
    with pytest.raises(InputError, match=r"comparison\.json, damaged"):
        Comparison.load(kept)


# --- in a browser -----------------------------------------------------------------------------------------

PROBE = """<!doctype html><body><iframe src="PAGE" style="width: WIDTHpx; height: 900px; border: 0"></iframe><script>
document.querySelector("iframe").addEventListener("load", (event) => {
  const view = event.target.contentWindow, page = view.document, found = {};
  const background = () => view.getComputedStyle(page.body).backgroundColor;
  const rows = page.querySelector("table.sortable").tBodies[0].rows;
  const names = () => [...rows].map((row) => row.cells[0].dataset.order);
  found.width = view.innerWidth;
  found.overflow = page.documentElement.scrollWidth - view.innerWidth;
  found.background = background();
  found.flat = [...page.querySelectorAll(".panels svg")].filter((each) => each.clientHeight < 90).length;
  const heading = page.querySelectorAll("table.sortable")[0].tHead.rows[0].cells[2];
  heading.querySelector("button").click();
  found.up = names();
  found.sorted = heading.getAttribute("aria-sort");
  heading.querySelector("button").click();
  found.down = names();
  page.getElementById("theme").click();
  found.light = background();
  page.getElementById("theme").click();
  found.dark = background();
  document.body.dataset.found = JSON.stringify(found);
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    pytest.skip("neither chromium nor google-chrome is installed")


@pytest.fixture(scope="module")
def requested() -> Iterator[tuple[int, list[str]]]:
    """A proxy that has nothing, and what was asked of it (but for what the browser asks for by itself)."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not any(maker in self.path for maker in ("google", "gvt1.com", "gstatic.com")):
                seen.append(self.path)
            self.send_error(404)

        do_CONNECT = do_HEAD = do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, seen
    server.shutdown()
    thread.join()
    server.server_close()


def shown(browser: str, port: int, file: Path, folder: Path, *options: str) -> tuple[str, list[str]]:
    """(what became of a page, what it wrote to the console) in a browser whose only network is the proxy at `port`."""
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--allow-file-access-from-files",
            f"--user-data-dir={folder}",
            f"--proxy-server=http://127.0.0.1:{port}",
            "--window-size=1400,900",
            "--virtual-time-budget=4000",
            "--enable-logging=stderr",
            *options,
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout, [text for text in done.stderr.splitlines() if "CONSOLE" in text]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_at_any_width_light_and_dark_and_asks_for_nothing(
    fitted: Comparison,
    made: str,
    browser: str,
    requested: tuple[int, list[str]],
    tmp_path: Path,
    width: int,
    dark: bool,
) -> None:
    port, asked = requested
    (tmp_path / "report.html").write_text(made, encoding="utf-8")
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.replace("PAGE", "report.html").replace("WIDTH", str(width)), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    became, said = shown(browser, port, probe, tmp_path / "profile", scheme)
    assert said == []
    assert asked == []
    found = json.loads(html.unescape(re.findall(r'data-found="([^"]*)"', became)[0]))
    assert found["width"] == width
    assert found["overflow"] <= 0
    assert found["flat"] == 0
    paper, night = "rgb(255, 255, 255)", "rgb(20, 23, 28)"
    assert found["background"] == (night if dark else paper)
    assert (found["light"], found["dark"]) == (paper, night)
    # The third column is the root mean squared error; the method that failed has none and stays below.
    order = list(fitted.table["rmse"].dropna().sort_values(kind="stable").index)
    assert found["sorted"] == "ascending"
    assert found["up"] == [*order, "broken"]
    assert found["down"][-1] == "broken"
    descending = fitted.table["rmse"][found["down"][:-1]].to_numpy()
    assert (np.diff(descending) <= 0.0).all()


SORTED = """<!doctype html><body><iframe src="PAGE"></iframe><script>
document.querySelector("iframe").addEventListener("load", (event) => {
  const table = event.target.contentWindow.document.querySelector("table.sortable"), found = {};
  const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].dataset.order);
  for (const way of ["up", "down"]) {
    table.tHead.rows[0].cells[1].querySelector("button").click();
    found[way] = names();
  }
  document.body.dataset.found = JSON.stringify(found);
});
</script>"""


@pytest.mark.slow
def test_what_is_infinite_is_sorted_as_what_it_is(
    browser: str, requested: tuple[int, list[str]], tmp_path: Path
) -> None:
    # A density of 0 in one row makes the mean minus infinity, which stood anywhere.
    values = {
        "b": -1.0,
        "worst": -math.inf,
        "c": -3.0,
        "best": math.inf,
        "gone": math.nan,
        "a": 0.5,
        "z": -20.0,
    }
    finite = {name: value if math.isfinite(value) else 0.0 for name, value in values.items()}
    made = told({name: np.full(4, value) for name, value in finite.items()})
    made.table["log_score"] = pd.Series(values)
    (tmp_path / "report.html").write_text(page(made), encoding="utf-8")
    probe = tmp_path / "probe.html"
    probe.write_text(SORTED.replace("PAGE", "report.html"), encoding="utf-8")
    became, said = shown(browser, requested[0], probe, tmp_path / "profile")
    assert said == []
    found = json.loads(html.unescape(re.findall(r'data-found="([^"]*)"', became)[0]))
    assert found["up"] == ["worst", "z", "c", "b", "a", "best", "gone"]
    assert found["down"] == ["best", "a", "b", "c", "z", "worst", "gone"]


@pytest.mark.slow
def test_the_browser_would_have_told(browser: str, requested: tuple[int, list[str]], tmp_path: Path) -> None:
    port, asked = requested
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://example.invalid/a.png'><script>console.error('here')</script>")
    _, said = shown(browser, port, bad, tmp_path / "profile")
    assert "here" in said[0]
    assert "http://example.invalid/a.png" in asked
    asked.clear()
