"""Plots of results: the numbers of the scores, drawn by the code of the report's panels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.run import compare
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.reporting.figures import pictures
from ppl_bnn.reporting.findings import Findings
from tests.evaluation.comparison.test_comparison import Approximate, Exact, Fails, Mode, classifier, line
from tests.references.conftest import make as reference_of
from tests.references.test_grade import outputs
from tests.reporting.plot.test_fits import (
    IID,
    POINT,
    SOUND,
    data,
    fitted,
    legend,
    texts,
    three_classes,
    two_classes,
)
from tests.reporting.test_grid_page import made as grid_of

plot = bnn.plot


def numbers(rng: np.random.Generator, rows: int = 60) -> tuple[Prediction, np.ndarray]:
    loc = rng.normal(size=(5, rows))
    return Prediction("Normal", {"loc": loc, "scale": np.full_like(loc, 0.8)}), rng.normal(size=rows)


def labels(rng: np.random.Generator, rows: int = 200) -> tuple[Prediction, np.ndarray]:
    probability = rng.uniform(0.02, 0.98, size=rows)
    return Prediction("Bernoulli", {"probs": probability[None]}), (rng.random(rows) < probability).astype(int)


@pytest.fixture(scope="module")
def compared() -> Comparison:
    """Fits in closed form to a line, one of chains that are apart and one that fails."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 1))
    y = 0.8 * x[:, 0] + 0.5 * rng.normal(size=60)
    methods = {
        "exact": Exact(ppl="pyro"),
        "apart": Exact(ppl="pyro", apart=3.0, draws=60),
        "wide": Approximate(ppl="pyro", stretch=1.6),
        "mode": Mode(ppl="pyro"),
        "broken": Fails(ppl="pyro"),
    }
    return compare(line, (x[:40], y[:40]), (x[40:], y[40:]), methods, reference="exact", device="cpu")


def arrays(axes: Axes) -> list[Any]:
    """Everything that is drawn, in numbers: lines, bands and bars."""
    shown = [np.asarray(each.get_xydata()) for each in axes.lines]
    shown += [np.concatenate([path.vertices for path in each.get_paths()]) for each in axes.collections]
    return [*shown, np.array([*axes.get_xlim(), *axes.get_ylim()])]


# --- the panels of the report -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "picture", "place"),
    [
        (lambda c, ax: plot.calibration(c, ax=ax), pictures.calibration, 0),
        (lambda c, ax: plot.pit(c, ax=ax), pictures.calibration, 1),
        (lambda c, ax: plot.gap(c, ax=ax), pictures.gap, 0),
        (lambda c, ax: plot.gap(c, of="spread", ax=ax), pictures.gap, 1),
        (lambda c, ax: plot.compare(c, ax=ax), pictures.differences, 0),
        (lambda c, ax: plot.ranks(c, method="exact", ax=ax), pictures.ranks_of_draws, 0),
    ],
)
def test_a_plot_of_a_comparison_is_the_panel_of_its_report(
    draw: Any, picture: Any, place: int, compared: Comparison
) -> None:
    ours, theirs = Figure().subplots(), Figure().subplots()
    assert draw(compared, ours) is ours
    picture(Findings(compared)).panels[place].draw(theirs)
    for one, other in zip(arrays(ours), arrays(theirs), strict=True):
        np.testing.assert_array_equal(one, other)
    assert ours.get_xlabel() == theirs.get_xlabel()
    assert ours.get_ylabel() == theirs.get_ylabel()


def test_methods_that_have_not_converged_are_named(compared: Comparison) -> None:
    assert compared.table.loc["apart", "converged"] != "yes"
    for axes in (plot.compare(compared), plot.calibration(compared), plot.gap(compared)):
        (note,) = axes.texts
        assert note.get_text().startswith("apart: ")
        assert "exact" not in note.get_text()
    assert "onverged" in texts(plot.trace(compared, method="apart"))[1]


def test_trace_and_ranks_of_a_comparison_need_a_method_of_chains(compared: Comparison) -> None:
    axes = plot.trace(compared, method="exact", row=2)
    shape = compared.fits["exact"].shape
    means = compared.predictions["exact"].component_mean().reshape(*shape, -1)[..., 2]
    np.testing.assert_array_equal([line.get_ydata() for line in axes.lines], means)
    with pytest.raises(UnsupportedError, match="got wide, of kind 'iid'"):
        plot.ranks(compared, method="wide")
    with pytest.raises(UnknownNameError, match="did you mean 'exact'"):
        plot.trace(compared, method="exakt")
    with pytest.raises(InputError, match="one of exact, apart, wide, mode; got None"):
        plot.trace(compared)
    with pytest.raises(InputError, match=r"bnn\.plot\.predictive\(result\.posteriors"):
        plot.predictive(compared)


# --- calibration ------------------------------------------------------------------------------------------


def test_coverage_and_pit_are_those_of_the_scores(rng: np.random.Generator) -> None:
    prediction, y = numbers(rng)
    axes = plot.calibration(prediction, y=y)
    _, curve = axes.lines
    at = np.asarray(curve.get_xdata())
    found = bnn.scores.coverages(prediction, y, at[[9, 49, 89]])
    np.testing.assert_allclose(curve.get_ydata()[[9, 49, 89]], np.array(found["coverage"]) - at[[9, 49, 89]])
    assert axes.get_title() == "Coverage of central intervals, 60 rows"
    axes = plot.pit(prediction, y=y)
    values = bnn.scores.pit(prediction, y)
    share = np.mean(values[:, None] <= at, axis=0) - at
    np.testing.assert_allclose(axes.lines[1].get_ydata(), share)


def test_posteriors_predict_the_rows_that_were_held_out() -> None:
    posterior, (x, y) = fitted(SOUND, features=2), data(2)
    with pytest.raises(InputError, match="rows that the fit has not seen"):
        plot.calibration(posterior, x, y)
    x, y = x[:20], y[:20] + 0.1
    shown = np.asarray(plot.calibration(posterior, x, y).lines[1].get_ydata())
    again = plot.calibration(posterior.predict(x), y=y).lines[1]
    np.testing.assert_array_equal(shown, again.get_ydata())
    several = plot.calibration({"one": posterior, "the other": fitted(POINT, features=2)}, x, y)
    assert legend(several) == ["90 % if calibrated", "one", "the other"]
    corrected = bnn.recalibrate(posterior, x, y)
    expected = np.asarray(plot.pit(corrected.predict(x), y=y).lines[1].get_ydata())
    np.testing.assert_array_equal(plot.pit(corrected, x, y).lines[1].get_ydata(), expected)


def test_reliability_is_the_share_in_each_bin(rng: np.random.Generator) -> None:
    prediction, y = labels(rng)
    axes = plot.reliability(prediction, y=y)
    bars, marks = axes.collections
    probability = prediction.probabilities[:, 1]
    centres = np.asarray(marks.get_offsets())
    assert len(bars.get_segments()) == len(centres) == 10
    inside = (probability >= 0.3) & (probability < 0.4)
    np.testing.assert_allclose(centres[3], [probability[inside].mean(), y[inside].mean()])
    several = plot.reliability({"a": prediction, "b": prediction}, y=y)
    np.testing.assert_allclose(several.lines[1].get_xydata(), centres)
    assert legend(several) == ["calibrated", "a", "b"]


def test_reliability_of_a_comparison_is_of_all_methods_or_of_one(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(60, 2)), (rng.random(60) < 0.4).astype(int)
    methods = {"chains": replace(SOUND, draws=30), "iid": IID}
    result = compare(classifier, (x[:30], y[:30]), (x[30:], y[30:]), methods, device="cpu")
    assert legend(plot.reliability(result))[1:] == ["chains", "iid"]
    axes = plot.reliability(result, method="iid")
    assert axes.get_title() == "iid: reliability, 30 rows"
    theirs = Figure().subplots()
    panels = {panel.title: panel for panel in pictures.calibration(Findings(result)).panels}
    panels["iid"].draw(theirs)
    for one, other in zip(arrays(axes), arrays(theirs), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(UnsupportedError, match=r"bnn\.plot\.reliability"):
        plot.calibration(result)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p, q, y: plot.reliability(p, y=y), UnsupportedError, "expected predictions of classes"),
        (
            lambda p, q, y: plot.pit(q, y=(y > 0).astype(int)),
            UnsupportedError,
            "expected predictions of numbers",
        ),
        (lambda p, q, y: plot.calibration(p), InputError, "the targets of rows that were held out; got none"),
        (lambda p, q, y: plot.calibration(p, y, y), InputError, "x=None beside a prediction"),
        (lambda p, q, y: plot.calibration(p, y=y[:5]), InputError, "y of shape"),
        (lambda p, q, y: plot.calibration(p, y=y, block="a on b"), InputError, "None but for a grid"),
        (lambda p, q, y: plot.calibration("p", y=y), InputError, "a Posterior, a Prediction"),
        (
            lambda p, q, y: plot.reliability(q, y=(y > 0).astype(int), method="a"),
            InputError,
            "None but for a",
        ),
        (lambda p, q, y: plot.compare(p), InputError, "a Comparison or a GridResult; got Prediction"),
        (lambda p, q, y: plot.gap(p), InputError, "a Comparison or a GridResult; got Prediction"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    call: Any, error: Any, words: str, rng: np.random.Generator
) -> None:
    prediction, y = numbers(rng)
    classes, _ = labels(rng, 60)
    with pytest.raises(error, match=words):
        call(prediction, classes, y)


def test_a_posterior_needs_inputs_and_a_comparison_has_its_own(compared: Comparison) -> None:
    with pytest.raises(InputError, match="expected x and y; got y alone"):
        plot.calibration(fitted(POINT), y=data()[1])
    with pytest.raises(InputError, match="no x and y"):
        plot.calibration(compared, y=compared.test_targets)


# --- gaps and differences ---------------------------------------------------------------------------------


def test_a_posterior_is_drawn_against_another_row_by_row() -> None:
    reference, posterior = fitted(SOUND, features=2), fitted(IID, features=2)
    x, _ = data(2)
    theirs, ours = reference.predict(x), posterior.predict(x)
    axes = plot.gap(posterior, reference=reference)
    np.testing.assert_allclose(axes.lines[0].get_xydata(), np.column_stack([theirs.mean, ours.mean]))
    (bars,) = axes.collections
    widths = np.ptp(np.array(bars.get_segments())[..., 0], axis=1)
    np.testing.assert_allclose(widths, 2.0 * np.sqrt(theirs.epistemic))
    assert axes.get_title() == "Planted against Independent: predictive mean, 30 rows"
    axes = plot.gap(posterior, x[:5], reference=reference, of="spread")
    some = [np.sqrt(each.predict(x[:5]).epistemic) for each in (reference, posterior)]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), np.column_stack(some))
    classes = [fitted(method, three_classes, features=2) for method in (IID, SOUND)]
    axes = plot.gap(classes[0], reference=classes[1])
    assert len(axes.lines[0].get_xydata()) == 90
    assert axes.get_xlabel() == "probability, Independent"


def test_a_reference_that_is_none_is_refused(compared: Comparison) -> None:
    posterior = fitted(IID)
    with pytest.raises(InputError, match="another Posterior as reference; got NoneType"):
        plot.gap(posterior)
    with pytest.raises(InputError, match="fitted to the same data"):
        plot.gap(posterior, reference=fitted(SOUND, two_classes))
    with pytest.raises(UnsupportedError, match="a reference with a spread"):
        plot.gap(posterior, reference=fitted(POINT), of="spread")
    with pytest.raises(UnsupportedError, match="There is no reference"):
        plot.gap(replace(compared, reference=None))
    with pytest.raises(UnknownNameError, match="did you mean 'mean'"):
        plot.gap(compared, of="means")
    with pytest.raises(InputError, match="no x and no reference"):
        plot.gap(compared, reference=posterior)


def test_a_grade_is_drawn_along_its_grid() -> None:
    reference = reference_of()
    grade = reference.grade(draws={region: rows[::50] for region, rows in outputs(reference).items()})
    axes = plot.gap(grade)
    region = next(iter(grade.errors))
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), grade.errors[region]["mean"].ravel())
    assert axes.get_title() == f"Against known-line: {region}"
    axes = plot.gap(grade, of="spread", region="far")
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), grade.errors["far"]["sd"].ravel())
    with pytest.raises(UnknownNameError, match="unknown region"):
        plot.gap(grade, region="near")


def test_differences_are_those_of_the_scores(compared: Comparison) -> None:
    axes = plot.compare(compared)
    names = [text.get_text() for text in axes.get_yticklabels()]
    scores = compared.pointwise_log_scores()
    best = names[0]
    marks = [
        float(each.get_xdata()[0])
        for each in axes.lines
        if each.get_marker() == "o" and len(each.get_xdata())
    ]
    expected = [float(np.mean(scores[name] - scores[best])) for name in names]
    np.testing.assert_allclose(marks, expected, atol=1e-12)
    assert set(names) == {"exact", "apart", "wide", "mode"}
    axes = plot.compare(compared, "elpd_loo")
    assert axes.get_title() == "Difference to the best: leave-one-out"
    with pytest.raises(UnknownNameError, match="unknown score"):
        plot.compare(compared, "rmse")


def test_a_grid_is_drawn_block_by_block() -> None:
    scores = {
        "one": {"map": [-1.0, -1.1, -1.2], "svi": [-1.3, -1.2, -1.6]},
        "two": {"map": [-2.0], "svi": [-1.5]},
    }
    unsure = {"gap_mean": 0.3, "gap_sd_ratio": 0.8, "gap_mean_floor": 0.1, "converged": "no"}
    result = grid_of(scores, reference="map", svi=unsure)
    with pytest.raises(InputError, match="one of mlp on one, mlp on two; got None"):
        plot.compare(result)
    with pytest.raises(UnknownNameError, match="unknown block"):
        plot.compare(result, block="mlp on three")
    axes = plot.compare(result, block="mlp on one")
    marks = [
        float(each.get_xdata()[0])
        for each in axes.lines
        if each.get_marker() == "o" and len(each.get_xdata())
    ]
    np.testing.assert_allclose(marks, [0.0, np.mean([-0.3, -0.1, -0.4])])
    (note,) = axes.texts
    assert note.get_text() == "svi: not verifiably converged in 3 of 3 cells"
    assert axes.get_title() == "Difference to the best: log score"
    assert float(plot.gap(result, block="mlp on two").lines[0].get_xdata()[0]) == pytest.approx(0.3)
    with pytest.raises(UnsupportedError, match="no calibration that was stored"):
        plot.calibration(result, block="mlp on one")
    # The result itself is as it was: another plot has its other block.
    assert plot.compare(result, block="mlp on two").get_yticklabels()[0].get_text() == "svi"
