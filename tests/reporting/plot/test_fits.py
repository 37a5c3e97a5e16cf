"""Plots of one fit: what is drawn is what the posterior says, on the axes that were asked for."""

from __future__ import annotations

import doctest
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.inspection import partial_dependence

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.core.figures import BLUE, VERMILION
from ppl_bnn.evaluation.comparison.drawing import CURVES
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.posterior.approximation import Chains
from tests.posterior.test_export import Planted

plot = bnn.plot


def regression(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [3, 1], activation="tanh"), likelihoods.Gaussian(noise))


def two_classes(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3, 1], activation="tanh"), likelihoods.Bernoulli())


def three_classes(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3, 3], activation="tanh"), likelihoods.Categorical())


def two_outputs(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3, 2], activation="tanh"), likelihoods.Gaussian(0.5))


@dataclass(frozen=True)
class Independent(Method):
    """Chains of independent draws, of which the last is `apart` from the others."""

    chains: int = 4
    draws: int = 400
    apart: float = 0.0

    def run(self, problem: Any, progress: Any) -> Outcome:
        u = problem.program.prior_draws(problem.x, problem.y, problem.seed, 1)
        rng, shape = np.random.default_rng(problem.seed), (self.chains, self.draws)
        found = {
            name: value[0] + 0.1 * rng.normal(size=(*shape, *value.shape[1:])) for name, value in u.items()
        }
        for name in ("output.bias", "noise"):
            if name in found:
                found[name][-1] += self.apart
        return Outcome(Chains(found), gradient_evaluations=1.0)


def data(features: int = 1, rows: int = 30) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.uniform(-2.0, 2.0, size=(rows, features))
    return x, np.sin(x[:, 0]) + 0.1 * rng.normal(size=rows)


def fitted(method: Method, model: Any = regression, features: int = 1, **options: Any) -> Any:
    x, y = data(features)
    if model is two_classes:
        y = (y > 0.0).astype(int)
    elif model is three_classes:
        y = np.digitize(y, [-0.3, 0.3])
    elif model is two_outputs:
        y = np.column_stack([y, 2.0 * y])
    return method.fit(model, x, y, **options)


IID, POINT = Planted(form="iid", ppl="pyro"), Planted(form="point", ppl="pyro")
SOUND = Independent(ppl="pyro")


def texts(axes: Axes) -> list[str]:
    return [axes.get_title(), *(text.get_text() for text in axes.texts)]


def legend(axes: Axes) -> list[str]:
    figure: Any = axes.figure
    found = axes.get_legend() or (figure.legends or [None])[0]
    return [] if found is None else [text.get_text() for text in found.get_texts()]


def edges(band: Any, at: float) -> tuple[float, float]:
    """The lower and the upper edge of a filled band at a place."""
    vertices = band.get_paths()[0].vertices
    values = vertices[np.isclose(vertices[:, 0], at), 1]
    return values.min(), values.max()


# --- predictions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.9, 0.5])
def test_a_single_input_has_the_bands_of_the_prediction(level: float) -> None:
    posterior = fitted(IID, feature_names=("age",))
    axes = plot.predictive(posterior, level=level)
    mean, points = axes.lines
    grid = np.asarray(mean.get_xdata())
    prediction = posterior.predict(grid[:, None])
    np.testing.assert_allclose(mean.get_ydata(), prediction.mean)
    outer, inner = axes.collections
    lower, upper = prediction.interval(level)
    means = prediction.component_mean()
    for place in (0, 80, 159):
        np.testing.assert_allclose(edges(outer, grid[place]), (lower[place], upper[place]))
        tails = [0.5 - level / 2.0, 0.5 + level / 2.0]
        np.testing.assert_allclose(edges(inner, grid[place]), np.quantile(means[:, place], tails))
    x, y = data()
    np.testing.assert_array_equal(points.get_xdata(), x[:, 0])
    np.testing.assert_allclose(points.get_ydata(), y)
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("age", "y", "Prediction by Planted")
    percent = f"{100 * level:g} %"
    assert legend(axes) == [
        f"{percent} of observations",
        f"{percent} of the mean function",
        "mean",
        "observed",
    ]


def test_other_rows_can_be_drawn_with_or_without_targets() -> None:
    posterior = fitted(IID, standardise=True)
    x = np.array([[5.0], [6.0], [7.0]])
    axes = plot.predictive(posterior, x)
    assert axes.get_xlim()[0] > 4.0
    assert "observed" not in legend(axes)
    axes = plot.predictive(posterior, x, np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), [1.0, 2.0, 3.0])


class Mean(RegressorMixin, BaseEstimator):
    """The predictive mean as scikit-learn's estimator."""

    def __init__(self, posterior: Any = None):
        self.posterior = posterior

    def fit(self, x: Any, y: Any) -> Mean:
        self.fitted_ = True
        return self

    def predict(self, x: Any) -> np.ndarray:
        return self.posterior.predict(x).mean


def test_partial_dependence_is_that_of_scikit_learn() -> None:
    posterior = fitted(IID, features=3, feature_names=("a", "b", "c"))
    x, y = data(3)
    axes = plot.predictive(posterior, feature="b")
    line, rows = axes.lines
    grid = np.asarray(line.get_xdata())
    np.testing.assert_allclose([grid[0], grid[-1]], [x[:, 1].min(), x[:, 1].max()])
    estimator = Mean(posterior).fit(x, y)
    found = partial_dependence(estimator, x, [1], custom_values={1: grid}, kind="average", method="brute")
    np.testing.assert_allclose(line.get_ydata(), found["average"][0], rtol=1e-10)
    # The band is that of the partial dependence of single draws.
    (band,) = axes.collections
    changed = x.copy()
    changed[:, 1] = grid[7]
    draws = posterior.predict(changed).component_mean().mean(axis=1)
    np.testing.assert_allclose(edges(band, grid[7]), np.quantile(draws, [0.05, 0.95]))
    np.testing.assert_array_equal(np.sort(rows.get_xdata()), np.sort(x[:, 1]))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("b", "mean of y, over 30 rows")
    assert axes.get_title() == "Planted: partial dependence on b"


def test_few_rows_are_averaged_over_where_asked_and_counted() -> None:
    posterior = fitted(POINT, features=2)
    x, _ = data(2)
    axes = plot.predictive(posterior, feature=1, rows=3)
    changed = x[[0, 14, 29]]
    changed[:, 1] = np.asarray(axes.lines[0].get_xdata())[5]
    assert axes.lines[0].get_ydata()[5] == pytest.approx(posterior.predict(changed).mean.mean())
    assert axes.get_ylabel() == "mean of y, over 3 rows"


def test_an_input_of_few_values_has_bars_at_these_values_only() -> None:
    posterior = fitted(IID, features=2)
    x = np.column_stack([np.linspace(-1.0, 1.0, 12), np.repeat([1.0, 2.0, 5.0], 4)])
    axes = plot.predictive(posterior, x, feature=1)
    (bars,) = axes.collections
    segments = np.array(bars.get_segments())
    np.testing.assert_array_equal(segments[:, 0, 0], [1.0, 2.0, 5.0])
    changed = x.copy()
    changed[:, 1] = 5.0
    draws = posterior.predict(changed).component_mean().mean(axis=1)
    np.testing.assert_allclose(segments[2, :, 1], np.quantile(draws, [0.05, 0.95]))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "5"]


def test_classes_have_a_curve_each_and_two_classes_one() -> None:
    posterior = fitted(IID, two_classes, features=3, class_names=("no", "yes"))
    axes = plot.predictive(posterior)
    assert axes.get_ylabel() == "probability of yes, over 30 rows"
    assert len(axes.collections) == 1
    x, _ = data(3)
    changed = x.copy()
    changed[:, 0] = axes.lines[0].get_xdata()[3]
    expected = posterior.predict(changed).probabilities[:, 1].mean()
    assert axes.lines[0].get_ydata()[3] == pytest.approx(expected)
    with pytest.raises(InputError, match="'yes' or 1 of two classes"):
        plot.predictive(posterior, output="no")
    posterior = fitted(IID, three_classes, features=3, class_names=("a", "b", "c"))
    axes = plot.predictive(posterior, feature=2)
    assert legend(axes) == ["a", "b", "c", "rows"]
    total = sum(np.asarray(line.get_ydata()) for line in axes.lines[:3])
    np.testing.assert_allclose(total, 1.0)
    # Colours are not the only difference.
    assert len({line.get_linestyle() for line in axes.lines[:3]}) == 3
    axes = plot.predictive(posterior, output="b")
    assert axes.get_ylabel() == "probability of b, over 30 rows"


def test_two_inputs_and_classes_are_a_map() -> None:
    posterior = fitted(IID, three_classes, features=2, feature_names=("p", "q"))
    axes = plot.predictive(posterior)
    (image,) = axes.images
    assert image.get_array().shape == (60, 60, 4)
    assert sum(len(line.get_xdata()) for line in axes.lines) == 30
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("p", "q")
    assert not plot.predictive(posterior, feature=0).images


def test_several_outputs_are_drawn_together_or_one() -> None:
    posterior = fitted(IID, two_outputs)
    assert legend(plot.predictive(posterior))[:2] == ["output 0", "output 1"]
    axes = plot.predictive(posterior, output=1)
    grid = np.asarray(axes.lines[0].get_xdata())
    np.testing.assert_allclose(axes.lines[0].get_ydata(), posterior.predict(grid[:, None]).mean[:, 1])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"feature": "agee"}, UnknownNameError, "did you mean 'age'"),
        ({"feature": 1}, InputError, "a number from 0 to 0"),
        ({"level": 1.0}, InputError, "between 0 and 1"),
        ({"rows": 0}, InputError, "a positive number"),
        ({"y": np.zeros(30)}, InputError, "x with y"),
        ({"x": np.zeros((3, 2))}, InputError, "inputs like those of the training"),
        ({"x": np.zeros((3, 1)), "y": np.zeros(4)}, InputError, "3 rows"),
        ({"ax": "left"}, InputError, "Matplotlib axes"),
    ],
)
def test_arguments_that_fit_nothing_are_refused(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        plot.predictive(fitted(POINT, feature_names=("age",)), **options)


def test_what_has_no_curve_is_refused() -> None:
    x, y = {"a": data(2)[0], "b": data(2)[0]}, data()[1]

    def of_a_dict(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x["a"] + x["b"], [2, 1]), likelihoods.Gaussian(1.0))

    def coupled(x: Any, y: Any = None) -> None:
        bnn.coupled()
        bnn.observe(y, bnn.mlp(x, [2, 1]), likelihoods.Gaussian(1.0))

    with pytest.raises(UnsupportedError, match="got a dict"):
        plot.predictive(POINT.fit(of_a_dict, x, y))
    with pytest.raises(UnsupportedError, match="rows that interact"):
        plot.predictive(fitted(POINT, coupled))
    with pytest.raises(InputError, match="expected a Posterior; got ndarray"):
        plot.predictive(y)


# --- the prior --------------------------------------------------------------------------------------------


def prior_of(model: Any, features: int, **options: Any) -> Any:
    x, y = data(features)
    y = y if model is regression else (y > 0.0).astype(int)
    return bnn.prior_predictive(model, x, y, draws=60, ppl="pyro", **options)


def test_a_prior_is_drawn_by_the_form_of_its_data() -> None:
    prior = prior_of(regression, 1)
    axes = plot.prior_predictive(prior, target_name="height (cm)")
    *curves, points = axes.lines
    assert len(curves) == CURVES
    np.testing.assert_array_equal(points.get_ydata(), data()[1])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "height (cm)")
    axes = plot.prior_predictive(prior_of(regression, 3))
    wide, narrow = (np.array(each.get_segments())[:, :, 1] for each in axes.collections)
    x, y = data(3)
    prior = prior_of(regression, 3)
    order = np.argsort(y)
    np.testing.assert_allclose(wide.T, prior.predict(x[order]).interval(0.9))
    np.testing.assert_allclose(narrow.T, prior.predict(x[order]).interval(0.5))
    axes = plot.prior_predictive(prior_of(two_classes, 3))
    assert sum(patch.get_height() for patch in axes.patches) == pytest.approx(1.0)
    assert legend(axes) == []


def test_a_posterior_is_no_prior() -> None:
    with pytest.raises(InputError, match=r"bnn\.plot\.predictive"):
        plot.prior_predictive(fitted(POINT))
    with pytest.raises(InputError, match="both x and y"):
        plot.prior_predictive(prior_of(regression, 1), np.zeros((3, 1)))


# --- chains -----------------------------------------------------------------------------------------------


def test_traces_are_the_functions_of_each_chain() -> None:
    posterior = fitted(SOUND)
    axes = plot.trace(posterior, row=4)
    means = posterior.predict(posterior.original_inputs).component_mean().reshape(4, 400, 30)
    assert len(axes.lines) == 4
    for line, chain in zip(axes.lines, means[..., 4], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), chain)
    assert axes.get_ylabel() == "mean function of row 4"
    assert legend(axes) == ["chain 1", "chain 2", "chain 3", "chain 4"]
    axes = plot.trace(posterior, of="log likelihood")
    total = posterior.log_likelihood().sum(axis=-1)
    np.testing.assert_array_equal([line.get_ydata() for line in axes.lines], total)
    assert axes.get_ylabel() == "log likelihood, nats"


def test_the_row_that_is_drawn_has_the_largest_r_hat() -> None:
    import arviz_stats

    posterior = fitted(SOUND, features=2)
    row = int(plot.trace(posterior).get_ylabel().rpartition(" ")[2])
    means = posterior.predict(posterior.original_inputs).component_mean().reshape(4, 400, 30)
    rhats = [float(arviz_stats.rhat(means[..., each])) for each in range(30)]
    assert row == np.argmax(rhats)


def test_of_classes_the_probability_of_the_label_is_drawn() -> None:
    posterior = fitted(SOUND, two_classes, features=2)
    axes = plot.trace(posterior, row=3)
    draws = posterior.predict(posterior.original_inputs).component_mean().reshape(4, 400, 30)[..., 3]
    expected = draws if posterior.targets[3] == 1 else 1.0 - draws
    np.testing.assert_allclose([line.get_ydata() for line in axes.lines], expected)
    assert axes.get_ylabel() == "probability of the observed class of row 3"
    label = plot.trace(posterior, posterior.original_inputs[:2], row=1).get_ylabel()
    assert label == "probability of the most probable class of row 1"


def test_many_chains_have_no_names() -> None:
    posterior = fitted(Independent(chains=9, draws=20, ppl="pyro"))
    axes = plot.trace(posterior)
    assert len(axes.lines) == 9
    assert legend(axes) == []


def test_ranks_tell_the_chain_that_is_apart() -> None:
    agree = plot.ranks(fitted(SOUND), of="log likelihood")
    colours = [to_hex(line.get_color()).upper() for line in agree.lines[:4]]
    assert colours == [BLUE] * 4
    posterior = fitted(Independent(apart=0.3, ppl="pyro"))
    axes = plot.ranks(posterior)
    assert to_hex(axes.lines[3].get_color()).upper() == VERMILION
    assert "a chain that leaves the band" in legend(axes)
    assert axes.get_title().startswith("Independent: ranks of mean function of row")


@pytest.mark.parametrize(
    ("draw", "method", "words"),
    [
        (plot.trace, IID, "expected chains; got Planted, of kind 'iid'"),
        (plot.ranks, POINT, "expected chains; got Planted, of kind 'point'"),
        (plot.ranks, Independent(chains=1, draws=9, ppl="pyro"), "expected at least 2 chains; got 1"),
        (plot.loss, SOUND, "expected a fit with a loss curve; got Independent"),
    ],
)
def test_what_is_not_defined_for_a_fit_is_refused(draw: Any, method: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        draw(fitted(method))


def test_choices_and_rows_that_do_not_exist_are_refused() -> None:
    posterior = fitted(SOUND)
    for options, words in (
        ({"of": "weights"}, "unknown choice 'weights'"),
        ({"row": 30}, "a row from 0 to 29"),
    ):
        with pytest.raises((InputError, UnknownNameError), match=words):
            plot.trace(posterior, **options)
    with pytest.raises(InputError, match="no row of the log likelihood"):
        plot.trace(posterior, of="log likelihood", row=1)
    with pytest.raises(InputError, match="method"):
        plot.trace(posterior, method="nuts")


# --- losses -----------------------------------------------------------------------------------------------


def test_a_loss_is_the_history_of_the_fit() -> None:
    posterior = fitted(IID)
    axes = plot.loss(posterior)
    (line,) = axes.lines
    np.testing.assert_allclose(line.get_ydata(), posterior.info.history["loss"])
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 8))
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "Loss of Planted",
        "step",
        "loss, nats",
    )


def test_members_have_a_curve_each() -> None:
    posterior = fitted(IID)
    losses = np.outer(posterior.info.history.pop("loss"), [1.0, 2.0, 3.0])
    posterior.info.history["member_loss"] = losses
    axes = plot.loss(posterior)
    np.testing.assert_allclose([line.get_ydata() for line in axes.lines], losses.T)
    assert axes.get_title() == "Loss of Planted, 3 members"


# --- the picture ------------------------------------------------------------------------------------------


def test_what_has_not_converged_is_said_in_the_picture() -> None:
    sound, apart = fitted(SOUND), fitted(Independent(apart=0.3, ppl="pyro"))
    for draw in (plot.predictive, plot.trace, plot.ranks):
        assert texts(draw(sound))[1:] == []
        _, note = texts(draw(apart))
        assert "onverged" in note
        assert "R-hat" in note
        assert to_hex(draw(apart).texts[0].get_color()).upper() == VERMILION
    short = fitted(IID)
    short.info.figures["converged"] = 0.0
    assert texts(plot.loss(short))[1:] == ["not converged"]


def test_convergence_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ppl_bnn.reporting.plot import subject

    calls: list[Any] = []
    diagnose = subject.diagnose
    monkeypatch.setattr(subject, "diagnose", lambda posterior: calls.append(1) or diagnose(posterior))
    posterior = fitted(SOUND)
    plot.trace(posterior)
    plot.ranks(posterior)
    assert len(calls) == 1


def test_given_axes_are_drawn_on_and_keep_their_figure() -> None:
    posterior = fitted(SOUND)
    figure = Figure(figsize=(8, 4))
    left, right = figure.subplots(1, 2)
    assert plot.predictive(posterior, ax=left) is left
    assert plot.trace(posterior, ax=right) is right
    assert left.get_legend() is not None
    assert figure.legends == []
    assert len(figure.axes) == 2
    assert not hasattr(left, "_repr_png_")


def test_axes_of_their_own_are_shown_by_a_notebook_and_change_no_setting() -> None:
    before = dict(matplotlib.rcParams)
    axes: Any = plot.predictive(fitted(POINT))
    assert dict(matplotlib.rcParams) == before
    picture = axes._repr_png_()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") == 640
    # The legend is below the axes and covers nothing.
    axes.figure.draw_without_rendering()
    (below,) = axes.figure.legends
    assert below.get_window_extent().y1 <= axes.get_tightbbox().y0 + 1.0
    assert axes.figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "long", ["a", "the name of a feature that is far too long for a line of a title, and for two"]
)
def test_no_text_leaves_the_figure_or_covers_another(long: str) -> None:
    posterior = fitted(Independent(apart=0.3, ppl="pyro"), features=2, feature_names=(long, "$b_1$"))
    axes: Any = plot.predictive(posterior)
    figure = axes.figure
    figure.draw_without_rendering()
    shown = [axes.title, *axes.texts, axes.xaxis.label, axes.yaxis.label, *figure.legends]
    boxes = [each.get_window_extent() for each in shown]
    for index, box in enumerate(boxes):
        assert all(not box.overlaps(other) for other in boxes[index + 1 :])
        assert box.x0 >= 0.0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1 + 1.0


def test_pyplot_is_not_imported() -> None:
    code = (
        "import numpy as np, sys, ppl_bnn as bnn\n"
        "assert 'matplotlib' not in sys.modules\n"
        "p = bnn.Prediction('Normal', {'loc': np.zeros((2, 9)), 'scale': np.ones((2, 9))})\n"
        "bnn.plot.pit(p, y=np.arange(9.0)).figure.savefig('/dev/null', format='png')\n"
        "print('matplotlib.pyplot' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout.strip(), ended.stderr) == ("False", "")


@pytest.mark.parametrize("name", plot.__all__)
def test_a_docstring_has_an_example_of_some_lines(name: str) -> None:
    """`test_docstrings.py` runs it."""
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(plot, name), name)
    assert len(example.examples) >= 4
