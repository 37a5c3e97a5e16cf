"""What is drawn is what was predicted, and nothing global is touched."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from typing import Any

import matplotlib.colors
import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy import stats
from scipy.special import expit
from sklearn.calibration import calibration_curve

from ppl_bnn import scores
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.figures import BLUE, ORANGE, VERMILION
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.drawing import (
    CURVES,
    draw_class_map,
    draw_classes,
    draw_curve,
    grid_points,
)
from ppl_bnn.evaluation.comparison.figures import predictions_figure
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.reporting.figures.prior import prior_figure


def comparison(
    predictions: dict[str, Prediction], x: np.ndarray, y: np.ndarray, failed: tuple[str, ...] = ()
) -> Comparison:
    classes = next(iter(predictions.values())).is_classes
    rows = {name: scores.scores_of(prediction, y) for name, prediction in predictions.items()}
    table = pd.DataFrame.from_dict(rows, orient="index").reindex([*rows, *failed])
    table["reference"] = ""
    table.loc[table.index[0], "reference"] = "reference"
    return Comparison(
        table=table,
        posteriors={},
        predictions=predictions,
        trees={},
        diagnoses={},
        reference=str(table.index[0]),
        notes={},
        data={
            "task": "classification" if classes else "regression",
            "target_name": "height / cm",
            "feature_names": ("age / years",),
        },
        test_inputs=x,
        test_targets=y,
        failures=dict.fromkeys(failed, "CurvatureError: " + "expected a curvature " * 40),
    )


def numbers(rng: np.random.Generator, rows: int, draws: int = 20) -> Prediction:
    return Prediction("Normal", {"loc": rng.normal(size=(draws, rows)), "scale": np.full((draws, rows), 0.5)})


def texts(figure: Figure) -> str:
    return " | ".join(text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text")))  # type: ignore[attr-defined]


def on_white(axes: Any) -> np.ndarray:
    """The colours (A, B, 3) of the map on axes, as they are seen on white paper."""
    image = np.asarray(axes.images[0].get_array())
    return 1.0 - image[..., 3:] * (1.0 - image[..., :3])


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_one_panel_per_method_at_a_readable_size(rng: np.random.Generator, count: int) -> None:
    predictions = {f"method{index}": numbers(rng, 30) for index in range(count)}
    figure = predictions_figure(comparison(predictions, rng.normal(size=(30, 3)), rng.normal(size=30)))
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title().split("\n")[0] for axes in shown] == [
        "method0, reference",
        *(f"method{index}" for index in range(1, count)),
    ]
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in shown}) == 1
    image = matplotlib.image.imread(io.BytesIO(png(figure)))
    assert image.shape[:2] == (800, 1200)


def test_intervals_are_drawn_where_they_are_and_coloured_by_whether_they_hold(
    rng: np.random.Generator,
) -> None:
    prediction, y = numbers(rng, 40), 1.5 * rng.normal(size=40)
    figure = predictions_figure(comparison({"svi": prediction}, rng.normal(size=(40, 2)), y))
    axes = figure.axes[0]
    lower, upper = prediction.interval(0.9)
    drawn = {}
    for collection, colour in zip(axes.collections, (BLUE, VERMILION), strict=True):
        for segment in collection.get_segments():  # type: ignore[attr-defined]
            drawn[segment[0, 0]] = (segment[0, 1], segment[1, 1], colour)
    assert len(drawn) == 40
    for truth, low, high in zip(y, lower, upper, strict=True):
        inside = low <= truth <= high
        assert drawn[truth][:2] == pytest.approx((low, high), rel=1e-12)
        assert drawn[truth][2] == (BLUE if inside else VERMILION)
    points = {
        x: m
        for line in axes.lines
        if line.get_marker() in "oD"
        for x, m in zip(*line.get_data(), strict=True)
    }
    assert points == pytest.approx(dict(zip(y, prediction.mean, strict=True)), rel=1e-9)
    title = axes.get_title()
    assert f"coverage {np.mean((lower <= y) & (y <= upper)):.0%}" in title
    assert f"RMSE {np.sqrt(np.mean((prediction.mean - y) ** 2)):.3g}" in title
    assert f"log score {scores.log_score(prediction, y):.3f}" in title
    assert "height / cm" in texts(figure)


def test_many_rows_are_thinned_in_the_drawing_but_not_in_the_figures(rng: np.random.Generator) -> None:
    prediction, y = numbers(rng, 1000, 3), rng.normal(size=1000)
    figure = predictions_figure(comparison({"svi": prediction}, rng.normal(size=(1000, 2)), y))
    drawn = sum(len(c.get_segments()) for c in figure.axes[0].collections)  # type: ignore[attr-defined]
    assert drawn == 300
    assert "1000 test rows (300 drawn)" in texts(figure)
    assert f"RMSE {scores.rmse(prediction, y):.3g}" in figure.axes[0].get_title()


def test_a_single_input_is_drawn_as_a_curve_with_both_bands(rng: np.random.Generator) -> None:
    x = rng.normal(size=(25, 1))
    prediction = numbers(rng, 25, 200)
    figure = predictions_figure(comparison({"nuts": prediction}, x, rng.normal(size=25)))
    axes = figure.axes[0]
    order = np.argsort(x[:, 0])
    mean = axes.lines[0]
    np.testing.assert_array_equal(mean.get_xdata(), x[order, 0])
    np.testing.assert_array_equal(mean.get_ydata(), prediction.mean[order])
    outer, inner = (c.get_paths()[0].vertices for c in axes.collections)
    assert outer[:, 1].max() == pytest.approx(prediction.interval(0.9)[1].max())
    assert inner[:, 1].max() == pytest.approx(np.quantile(prediction.parameters["loc"], 0.95, axis=0).max())
    assert axes.get_xlabel() == "age / years"


def test_several_outputs_are_all_drawn(rng: np.random.Generator) -> None:
    prediction = Prediction("Normal", {"loc": rng.normal(size=(5, 12, 2)), "scale": np.ones((5, 12, 2))})
    for features in (1, 3):
        figure = predictions_figure(
            comparison({"nuts": prediction}, rng.normal(size=(12, features)), rng.normal(size=(12, 2)))
        )
        assert sum(len(c.get_segments()) for c in figure.axes[0].collections) == 24  # type: ignore[attr-defined]


def test_reliability_is_that_of_scikit_learn(rng: np.random.Generator) -> None:
    probability = rng.uniform(size=400)
    y = (rng.uniform(size=400) < probability**2).astype(int)
    prediction = Prediction("Bernoulli", {"probs": probability[None]}, class_names=("benign", "malignant"))
    figure = predictions_figure(comparison({"map": prediction}, rng.normal(size=(400, 2)), y))
    share, mean = calibration_curve(y, probability, n_bins=10)
    drawn = figure.axes[0].collections[1].get_offsets()
    np.testing.assert_allclose(drawn, np.column_stack([mean, share]), rtol=1e-12)
    for segment, hits, rows in zip(
        figure.axes[0].collections[0].get_segments(),  # type: ignore[attr-defined]
        np.bincount((probability * 10).astype(int), weights=y),
        np.bincount((probability * 10).astype(int)),
        strict=True,
    ):
        interval = stats.binomtest(int(hits), int(rows)).proportion_ci(0.9, method="exact")
        np.testing.assert_allclose(segment[:, 1], [interval.low, interval.high], rtol=1e-9)
    assert figure.axes[0].get_xlabel() == "probability of malignant"
    chosen = np.where(y == 1, probability, 1 - probability)
    heights = [patch.get_height() for patch in figure.axes[1].patches]
    np.testing.assert_array_equal(heights, np.histogram(chosen, np.linspace(0, 1, 21))[0])


def test_several_classes_are_judged_by_the_most_probable_one(rng: np.random.Generator) -> None:
    probabilities = rng.dirichlet(np.ones(3), size=(4, 50))
    prediction = Prediction("Categorical", {"probs": probabilities})
    y = rng.integers(0, 3, size=50)
    figure = predictions_figure(comparison({"map": prediction}, rng.normal(size=(50, 2)), y, ("laplace",)))
    mean = probabilities.mean(axis=0)
    hit = mean.argmax(axis=1) == y
    used = np.unique((mean.max(axis=1) * 10).astype(int))
    shares = [hit[(mean.max(axis=1) * 10).astype(int) == b].mean() for b in used]
    np.testing.assert_allclose(figure.axes[0].collections[1].get_offsets()[:, 1], shares)
    assert f"accuracy {hit.mean():.3f}" in figure.axes[0].get_title()


@pytest.mark.parametrize("features", [1, 3])
def test_a_failed_method_has_a_panel_with_its_reason(rng: np.random.Generator, features: int) -> None:
    made = comparison(
        {"map": numbers(rng, 20)}, rng.normal(size=(20, features)), rng.normal(size=20), ("laplace",)
    )
    figure = predictions_figure(made)
    assert figure.axes[1].get_title() == "laplace: failed"
    reason = figure.axes[1].texts[0].get_text()
    assert reason.startswith("CurvatureError: expected")
    assert len(reason) < 450
    png(figure)


def test_the_same_bytes_again_and_no_global_state(rng: np.random.Generator) -> None:
    made = comparison({"map": numbers(rng, 20)}, rng.normal(size=(20, 2)), rng.normal(size=20))
    assert png(predictions_figure(made)) == png(predictions_figure(made))


def test_pyplot_is_never_imported() -> None:
    code = """
import sys
import numpy as np
import pandas as pd
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.prediction.prediction import Prediction
p = Prediction("Normal", {"loc": np.zeros((2, 9)), "scale": np.ones((2, 9))})
table = pd.DataFrame({"reference": "", "rmse": 1.0, "log_score": 1.0}, index=["m"])
data = {"task": "regression", "target_name": "y"}
c = Comparison(table, {}, {"m": p}, {}, {}, None, {}, data, np.zeros((9, 2)), np.arange(9.0))
c.figure().canvas.draw()
print("matplotlib.pyplot" in sys.modules, "torch" in sys.modules, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


def test_one_row_and_equal_truths_can_be_drawn(rng: np.random.Generator) -> None:
    for rows in (1, 3):
        made: Any = comparison({"map": numbers(rng, rows)}, rng.normal(size=(rows, 2)), np.zeros(rows))
        png(predictions_figure(made))
        assert math.isfinite(sum(predictions_figure(made).axes[0].get_ylim()))


# --- before data ------------------------------------------------------------------------------------------

SLOPES = np.random.default_rng(8).normal(size=50)


def lines(x: np.ndarray) -> Prediction:
    """y = s x_1 + N(0, 0.5^2), a slope s for each draw from the prior."""
    loc = SLOPES[:, None] * x[:, 0]
    return Prediction("Normal", {"loc": loc, "scale": np.full_like(loc, 0.5)})


def halves(x: np.ndarray) -> Prediction:
    """Class 1 right of 0, class 0 left of it: certainly, in half of the draws the other way round, and not at all."""
    right = (x[:, 0] > 0).astype(float)
    return Prediction("Bernoulli", {"probs": np.stack([right, 1.0 - right, np.full(len(x), 0.5)])})


def test_the_prior_of_a_curve_is_its_draws_over_their_band(rng: np.random.Generator) -> None:
    x, y = rng.uniform(-2.0, 2.0, size=(30, 1)), rng.normal(size=30)
    figure = prior_figure(lines, x, y, title="before", target_name="height / cm", feature_names=("age",))
    (axes,) = figure.axes
    *curves, points = axes.lines
    assert len(curves) == CURVES
    drawn = {round(float(curve.get_ydata()[-1] / curve.get_xdata()[-1]), 9) for curve in curves}
    assert drawn <= set(SLOPES.round(9))
    assert len(drawn) == CURVES
    grid = curves[0].get_xdata()
    width = np.ptp(x)
    np.testing.assert_allclose([grid[0], grid[-1]], [x.min() - 0.25 * width, x.max() + 0.25 * width])
    np.testing.assert_array_equal(points.get_xdata(), x[:, 0])
    np.testing.assert_array_equal(points.get_ydata(), y)
    # The band at the last place holds 90 % of the mixture, by its own distribution function from SciPy.
    (band,) = axes.collections
    edge = band.get_paths()[0].vertices
    low, high = np.sort(edge[np.isclose(edge[:, 0], grid[-1]), 1])[[0, -1]]
    inside = stats.norm(SLOPES * grid[-1], 0.5)
    assert (inside.cdf(high) - inside.cdf(low)).mean() == pytest.approx(0.9, abs=1e-6)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("age", "height / cm")
    assert "before" in texts(figure)


def test_the_prior_of_classes_in_a_plane_is_a_map_for_each_draw(rng: np.random.Generator) -> None:
    x = rng.uniform(-1.0, 1.0, size=(20, 2))
    x[0], x[1] = -1.0, 1.0
    y = (rng.random(20) < 0.5).astype(int)
    figure = prior_figure(halves, x, y)
    shown = [axes for axes in figure.axes if axes.axison]
    assert len(shown) == 3
    first, second, unsure = (on_white(axes) for axes in shown)
    blue, orange = (np.array(matplotlib.colors.to_rgb(colour)) for colour in (BLUE, ORANGE))
    for picture, left, right in ((first, blue, orange), (second, orange, blue)):
        np.testing.assert_allclose(1.0 - picture[:, 0], np.tile(0.8 * (1.0 - left), (len(picture), 1)))
        np.testing.assert_allclose(1.0 - picture[:, -1], np.tile(0.8 * (1.0 - right), (len(picture), 1)))
    assert unsure.min() > 0.9
    np.testing.assert_allclose(shown[0].images[0].get_extent(), [-1.5, 1.5, -1.5, 1.5])
    assert sum(len(line.get_xdata()) for line in shown[0].lines) == 20
    assert "observed: class 1" in texts(figure)


def test_the_prior_of_other_data_is_shown_row_by_row(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(25, 3)), rng.normal(size=25)
    figure = prior_figure(lines, x, y)
    left, right = figure.axes
    wide = np.array(left.collections[0].get_segments())[:, :, 1]
    order = np.argsort(y)
    np.testing.assert_allclose(wide.T, lines(x[order]).interval(0.9))
    np.testing.assert_array_equal(left.lines[0].get_ydata(), y[order])
    assert right.get_xlabel() == "share of rows"
    figure = prior_figure(halves, rng.normal(size=(40, 3)), np.repeat([0, 1], [10, 30]))
    left, right = figure.axes
    assert [line.get_ydata()[0] for line in right.lines if line.get_marker() == "D"] == [0.25, 0.75]
    # Two draws are certain, one knows nothing.
    heights = [patch.get_height() for patch in left.patches]
    np.testing.assert_allclose([heights[0], heights[-1], sum(heights)], [1 / 3, 2 / 3, 1.0])
    assert png(figure).startswith(b"\x89PNG")


# --- parts of a figure of one's own -----------------------------------------------------------------------


def bare_axes() -> Any:
    return Figure().subplots()


def test_a_curve_has_both_bands_whatever_the_order_of_its_rows(rng: np.random.Generator) -> None:
    x = rng.permutation(np.linspace(-1.0, 1.0, 9))
    within = np.full((1, 9), 0.16)
    prediction = Prediction("Normal", {"loc": x[None] ** 2, "scale": np.full((1, 9), 0.5)}, None, within)
    axes = bare_axes()
    draw_curve(axes, x, prediction)
    order = np.argsort(x)
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), np.column_stack([x, x**2])[order])
    # At x = 1 a normal of standard deviation 0.5, of which 0.4 is about the mean.
    for band, spread in zip(axes.collections, (0.5, 0.4), strict=True):
        edge = band.get_paths()[0].vertices
        assert edge[:, 1].max() == pytest.approx(1.0 + stats.norm.ppf(0.95) * spread, rel=1e-9)


def test_the_band_of_the_mean_is_that_of_the_draws_that_count(rng: np.random.Generator) -> None:
    x, loc = np.arange(5.0), rng.normal(size=(40, 5))
    parameters = {"loc": loc, "scale": np.full((40, 5), 0.1)}
    with np.errstate(divide="ignore"):
        log_weights = np.log(np.arange(40) % 2 / 20.0)
    edges = []
    for prediction in (
        Prediction("Normal", parameters, log_weights),
        Prediction("Normal", parameters, np.repeat(log_weights[:, None], 5, axis=1)),
    ):
        axes = bare_axes()
        draw_curve(axes, x, prediction)
        edges.append(axes.collections[1].get_paths()[0].vertices)
    # Every other draw counts for nothing: of the twenty others the smallest and the second largest.
    ranked = np.sort(loc[1::2], axis=0)
    found = np.sort(np.unique(edges[0][np.isclose(edges[0][:, 0], 2.0), 1]))
    np.testing.assert_allclose(found, [ranked[0, 2], ranked[18, 2]])
    np.testing.assert_array_equal(edges[0], edges[1])


def test_a_curve_of_something_else_is_refused(rng: np.random.Generator) -> None:
    with pytest.raises(InputError, match=r"x of shape \(9,\); got \(9, 1\)"):
        draw_curve(bare_axes(), rng.normal(size=(9, 1)), numbers(rng, 9))
    several = Prediction("Normal", {"loc": np.zeros((2, 9, 2)), "scale": np.ones((2, 9, 2))})
    for prediction in (several, halves(rng.normal(size=(9, 2)))):
        with pytest.raises(UnsupportedError, match="one number for each row"):
            draw_curve(bare_axes(), np.arange(9.0), prediction)


def test_contour_lines_of_two_classes_lie_where_the_probability_is(rng: np.random.Generator) -> None:
    across, up = np.linspace(-2.0, 2.0, 81), np.linspace(0.0, 1.0, 7)
    points = grid_points(across, up)
    assert points.shape == (567, 2)
    np.testing.assert_array_equal(points[80:82], [[2.0, 0.0], [-2.0, 1.0 / 6.0]])
    prediction = Prediction("Bernoulli", {"probs": expit(points[None, :, 0])})
    axes = bare_axes()
    draw_class_map(axes, across, up, prediction, levels=(0.5, 0.3, 0.7, 0.99))
    (lines,) = axes.collections
    # 0.99 is beyond the map. A line through cells of 0.05 is off by less than their curvature.
    assert list(lines.levels) == [0.3, 0.5, 0.7]
    for level, path in zip(lines.levels, lines.get_paths(), strict=True):
        np.testing.assert_allclose(path.vertices[:, 0], np.log(level / (1.0 - level)), atol=1e-3)
    assert [float(width) for width in lines.get_linewidths()] == [0.8, 2.2, 0.8]
    (image,) = axes.images
    np.testing.assert_allclose(image.get_extent(), [-2.0, 2.0, 0.0, 1.0])
    picture = on_white(axes)
    assert picture.shape == (7, 81, 3)
    blue, orange = (np.array(matplotlib.colors.to_rgb(colour)) for colour in (BLUE, ORANGE))
    for column, colour in ((0, blue), (-1, orange)):
        sure = 2.0 * expit(2.0) - 1.0
        np.testing.assert_allclose(1.0 - picture[3, column], (1.0 - colour) * (0.05 + 0.75 * sure))


def test_lines_of_several_classes_are_of_the_most_probable_one() -> None:
    across, up = np.linspace(-1.0, 1.0, 41), np.linspace(-1.0, 1.0, 5)
    first = np.abs(grid_points(across, up)[:, 0])
    probs = np.stack([first, 1.0 - first, np.zeros(len(first))], axis=-1)[None]
    axes = bare_axes()
    draw_class_map(axes, across, up, Prediction("Categorical", {"probs": probs}), levels=(0.75,))
    (lines,) = axes.collections
    # max(|x|, 1 - |x|) is 0.75 at 1/4 and at 3/4, on either side.
    found = np.unique(np.concatenate([path.vertices[:, 0] for path in lines.get_paths()]).round(9))
    np.testing.assert_allclose(found, [-0.75, -0.25, 0.25, 0.75])
    without = bare_axes()
    draw_class_map(without, across, up, Prediction("Categorical", {"probs": probs}), levels=())
    assert len(without.collections) == 0
    usual = bare_axes()
    draw_class_map(usual, across, up, Prediction("Categorical", {"probs": probs}))
    assert list(usual.collections[0].levels) == [0.7, 0.9]


def test_a_map_of_something_else_is_refused(rng: np.random.Generator) -> None:
    across = np.linspace(0.0, 1.0, 4)
    with pytest.raises(InputError, match="4 x 4 places; got 9 rows"):
        draw_class_map(bare_axes(), across, across, halves(rng.normal(size=(9, 2))))
    with pytest.raises(UnsupportedError):
        draw_class_map(bare_axes(), across, across, numbers(rng, 16))


def test_rows_of_classes_have_marks_of_their_own(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(12, 2)), np.arange(12) % 3
    axes = bare_axes()
    draw_classes(axes, x, y, ["a", "b", "c"], size=7.0)
    assert len({line.get_marker() for line in axes.lines}) == 3
    for label, line in enumerate(axes.lines):
        np.testing.assert_array_equal(line.get_xydata(), x[y == label])
        assert line.get_label() == "abc"[label]
        assert line.get_markersize() == 7.0
