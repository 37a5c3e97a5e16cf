"""Recalibration against closed forms, SciPy and scikit-learn; mapped predictions against truncated distributions."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

from ppl_bnn import scores
from ppl_bnn.core import checks
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.prediction.isotonic import STRAIGHT, MappedPrediction
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.recalibration import recalibrate

LEVELS = np.array([0.0, 0.1, 0.15, 0.7, 0.9999, 1.0])
AFTER = np.array([0.0, 0.02, 0.5, 0.6, 0.9, 1.0])
KNOTS = np.stack([LEVELS, 1.0 - LEVELS, AFTER])


def _normal(loc, scale):
    return Prediction("Normal", {"loc": np.atleast_2d(loc), "scale": np.atleast_2d(scale)})


def _mixture(family, draws=5, rows=4, seed=0):
    rng = np.random.default_rng(seed)
    shape = (draws, rows, 3) if family == "NormalMixture" else (draws, rows)
    if family == "Weibull":
        return Prediction(
            family, {"concentration": rng.uniform(0.9, 3.0, shape), "scale": rng.gamma(3, 1, shape)}
        )
    parameters = {"loc": rng.normal(size=shape), "scale": rng.gamma(3.0, 0.3, shape)}
    if family == "StudentT":
        parameters["df"] = rng.uniform(4.0, 9.0, shape)
    if family == "NormalMixture":
        parameters["weights"] = rng.dirichlet(np.ones(3), (draws, rows))
    raw = rng.normal(size=(draws, rows))
    return Prediction(family, parameters, raw - special.logsumexp(raw, axis=0))


def _mapped(p, knots):
    return MappedPrediction(p.family, p.parameters, p.log_weights, knots=knots)


# --- mapped predictions -------------------------------------------------------------------------------------


def test_a_mapped_normal_is_pieces_of_a_truncated_one():
    """Between two knots G has the shape of F: a mixture of truncated normals, whose moments SciPy knows."""
    loc, scale = np.array([0.0, 3.0]), np.array([1.0, 0.2])
    g = _mapped(_normal(loc, scale), KNOTS)
    ends = stats.norm.ppf(LEVELS)
    pieces, shares = stats.truncnorm(ends[:-1], ends[1:]), np.diff(AFTER)
    mean = np.sum(shares * pieces.mean())
    sd = np.sqrt(np.sum(shares * (pieces.var() + pieces.mean() ** 2)) - mean**2)
    np.testing.assert_allclose((g.mean - loc) / scale, mean, atol=1e-4)
    np.testing.assert_allclose(g.std / scale, sd, rtol=1e-4)
    for z in (-4.0, -1.2, 0.1, 0.53, 3.0, 9.0):

        def loss(t, z=z):
            return (np.interp(stats.norm.cdf(t), LEVELS, AFTER) - (z <= t)) ** 2

        # The kinks, and y itself.
        cuts = sorted([-9.0, 9.5, z, *ends[1:-1]])
        crps = sum(integrate.quad(loss, a, b, epsabs=1e-10)[0] for a, b in pairwise(cuts) if a < b)
        found = scores.crps(g, loc + z * scale, pointwise=True) / scale
        np.testing.assert_allclose(found, crps, atol=2e-4)
    y = loc + scale * np.array([0.3, -1.0])
    np.testing.assert_allclose(g.cdf(y), np.interp(stats.norm.cdf([0.3, -1.0]), LEVELS, AFTER), rtol=1e-12)
    q = np.array([1e-6, 0.02, 0.3, 0.55, 0.9, 0.99, 0.999])
    expected = loc + scale * stats.norm.ppf(np.interp(q, AFTER, LEVELS))[:, None]
    np.testing.assert_allclose(g.quantile(q), expected, rtol=1e-9)
    np.testing.assert_allclose(scores.pit(g, y), g.cdf(y))
    lower, upper = g.interval(0.8)
    np.testing.assert_allclose([lower, upper], g.quantile([0.1, 0.9]), rtol=1e-12)


@pytest.mark.parametrize("family", ["Normal", "StudentT", "Laplace", "Weibull", "NormalMixture"])
def test_the_straight_map_changes_nothing(family):
    p = _mixture(family)
    g = _mapped(p, STRAIGHT)
    y = p.sample(1, 3)[0]
    np.testing.assert_allclose(g.quantile([0.01, 0.4, 0.99]), p.quantile([0.01, 0.4, 0.99]), rtol=1e-9)
    np.testing.assert_allclose(g.cdf(y), p.cdf(y), rtol=1e-12)
    np.testing.assert_allclose(g.mean, p.mean, atol=1e-4 * p.std.max())
    np.testing.assert_allclose(g.std, p.std, rtol=1e-3)
    np.testing.assert_allclose(scores.crps(g, y), scores.crps(p, y), rtol=1e-4)
    levels = np.array([y, y - 50.0, y + 50.0])
    np.testing.assert_allclose(
        g.absolute_deviation(levels), p.absolute_deviation(levels), rtol=1e-3 if family == "Weibull" else 2e-4
    )
    np.testing.assert_allclose(scores.wasserstein(g, p), 0.0, atol=1e-9)
    expected = scores.scores_of(p, y)
    del expected["log_score"]
    assert scores.scores_of(g, y) == pytest.approx(expected, rel=1e-3)
    half = g.take([1, 3])
    np.testing.assert_allclose(half.quantile(0.3), g.quantile(0.3)[[1, 3]], rtol=1e-9)
    if family != "Weibull":
        moved = g.rescale(2.0, 3.0)
        np.testing.assert_allclose(moved.quantile(0.3), 2.0 + 3.0 * g.quantile(0.3), rtol=1e-9)
        np.testing.assert_allclose(moved.std, 3.0 * g.std, rtol=1e-9)


def test_draws_of_a_mapped_mixture_have_its_distribution():
    g = _mapped(_mixture("Normal"), KNOTS)
    draws = g.sample(3000, 5)
    assert draws.shape == (3000, 4)
    for row in range(4):
        assert stats.kstest(g.cdf(draws)[:, row], "uniform").pvalue > 1e-4


def test_what_a_map_takes_away_is_refused_by_name():
    p = _mixture("Normal")
    g, y = _mapped(p, KNOTS), np.zeros(4)
    for refused in (lambda: g.log_prob(y), lambda: scores.log_score(g, y), lambda: g.component_log_prob(y)):
        with pytest.raises(UnsupportedError, match="density"):
            refused()
    for name in ("epistemic", "aleatoric", "mean_function_variance"):
        with pytest.raises(UnsupportedError, match=name):
            getattr(g, name)
    with pytest.raises(UnsupportedError, match="components"):
        scores.fidelity(g, p)
    for q in (0.0, 1.0, 1.5, np.nan):
        with pytest.raises(InputError, match="strictly"):
            g.quantile(q)
    level = np.array([[0, 0.5, 1], [1, 0.5, 0], [0, 0, 1]])
    apart = np.array([[0, 0.5, 1], [1, 0.6, 0], [0, 0.4, 1]])
    for wrong in (KNOTS[:, :-1], KNOTS[:, ::-1], KNOTS[[0, 2]], KNOTS[0], level, apart):
        with pytest.raises(InputError, match="knots"):
            _mapped(p, wrong)
    for other in (
        Prediction("Poisson", {"rate": np.ones((2, 3))}),
        Prediction("Bernoulli", {"probs": np.full((2, 3), 0.5)}),
        Prediction("Normal", {"loc": np.zeros((2, 3, 2)), "scale": np.ones((2, 3, 2))}),
    ):
        with pytest.raises(UnsupportedError):
            _mapped(other, KNOTS)
    heavy = {"df": np.full((1, 2), 0.9), "loc": np.zeros((1, 2)), "scale": np.ones((1, 2))}
    with pytest.raises(UnsupportedError, match="a mean"):
        _ = _mapped(Prediction("StudentT", heavy), KNOTS).mean
    heavy["df"] = np.full((1, 2), 1.9)
    assert (_mapped(Prediction("StudentT", heavy), KNOTS).variance == np.inf).all()


# --- isotonic -----------------------------------------------------------------------------------------------


def test_the_isotonic_map_is_that_of_scikit_learn():
    from sklearn.isotonic import IsotonicRegression

    rng = np.random.default_rng(0)
    p = _normal(np.zeros(60), np.ones(60))
    y = np.repeat(0.5 + 2.0 * rng.normal(size=30), 2)  # each twice
    found = recalibrate(p, None, y, "isotonic")
    u = stats.norm.cdf(y)
    share = np.argsort(np.argsort(u, kind="stable"), kind="stable") + 1.0
    oracle = IsotonicRegression(out_of_bounds="clip").fit(u, share / 61.0)
    inside = np.linspace(u.min(), u.max(), 200)
    np.testing.assert_allclose(
        np.interp(inside, found.value[0], found.value[2]), oracle.predict(inside), rtol=1e-10
    )
    np.testing.assert_allclose(
        found.predict(p).cdf(y), np.interp(u, u[::2][np.argsort(u[::2])], (np.arange(30) + 0.75) * 2 / 61)
    )
    assert isinstance(recalibrate(p, None, y).predict(p), MappedPrediction)  # what it is by default
    assert "isotonic map, by 60 rows" in repr(found)


def test_quantiles_of_an_isotonic_map_are_exact_at_every_sample_size():
    """P(y <= quantile i / (n + 1)) = i / (n + 1), over held-out rows and new ones, for a prediction that is wrong."""
    rng = np.random.default_rng(0)
    runs, rows, new = 400, 19, 40
    levels = np.array([1, 5, 10, 18]) / 20.0
    covered = np.empty((runs, len(levels)))
    for run in range(runs):
        loc = rng.normal(size=rows + new)
        y = loc + 0.7 + 2.0 * rng.laplace(size=rows + new)
        found = recalibrate(_normal(loc[:rows], np.full(rows, 1.0)), None, y[:rows])
        after = found.predict(_normal(loc[rows:], np.full(new, 1.0)))
        covered[run] = np.mean(after.cdf(y[rows:]) <= levels[:, None], axis=1)
    error = covered.std(axis=0) / np.sqrt(runs)
    assert (np.abs(covered.mean(axis=0) - levels) < 4.0 * error).all()


def test_a_target_beyond_the_numbers_is_no_knot():
    p = _normal(np.zeros(3), np.ones(3))
    for lost in (40.0, -40.0):
        y = np.array([0.0, 1.0, lost])
        with pytest.raises(InputError, match="infinity"):
            recalibrate(p, None, y)
        wide = recalibrate(p, None, y, "spread").predict(p)
        assert recalibrate(wide, None, y).rows == 3


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_prediction_that_is_much_too_sure_is_recalibrated_in_its_tails(side):
    """Standard deviations that are 8 times too small, and a shift: most targets lie where F or 1 - F is 1e-20."""
    rng = np.random.default_rng(0)
    y = side * rng.normal(6.0, 8.0, size=400)
    p = _normal(np.zeros(400), np.ones(400))
    found = recalibrate(p, None, y)
    g = found.predict(p)
    order = np.argsort(y)
    ranks = np.empty(400)
    ranks[order] = np.arange(1, 401) / 401
    np.testing.assert_allclose(g.cdf(y), ranks, rtol=1e-9)
    each = g.take([0])
    levels = np.arange(1, 401, 7) / 401
    np.testing.assert_allclose(each.quantile(levels)[:, 0], y[order][::7], rtol=1e-7)
    assert each.mean[0] == pytest.approx(y.mean(), abs=0.1)
    assert each.std[0] == pytest.approx(y.std(), rel=0.03)


# --- spread -------------------------------------------------------------------------------------------------


def test_the_spread_of_a_normal_is_the_root_mean_square():
    rng = np.random.default_rng(0)
    loc, scale, y = rng.normal(size=80), rng.gamma(3.0, 0.3, 80), rng.normal(size=80)
    p = _normal(loc, scale)
    found = recalibrate(p, None, y, "spread")
    factor = np.sqrt(np.mean(((y - loc) / scale) ** 2))
    np.testing.assert_allclose(found.value, [factor], rtol=1e-6)
    after = found.predict(p)
    np.testing.assert_allclose(after.mean, p.mean, rtol=1e-12)
    np.testing.assert_allclose(after.log_prob(y), stats.norm.logpdf(y, loc, factor * scale), rtol=1e-5)
    laplace = Prediction("Laplace", {"loc": loc[None], "scale": scale[None]})
    found = recalibrate(laplace, None, y, "spread")
    np.testing.assert_allclose(found.value, [np.mean(np.abs(y - loc) / scale)], rtol=1e-6)


def test_the_spread_of_several_outputs_is_one_factor_each():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(60, 2)) * [0.3, 5.0]
    factor = np.broadcast_to(np.array([[1.0, 0.0], [0.6, 0.8]]), (1, 60, 2, 2))
    expected = np.sqrt(np.mean(y**2, axis=0))
    for p in (
        Prediction("Normal", {"loc": np.zeros((1, 60, 2)), "scale": np.ones((1, 60, 2))}),
        Prediction("MultivariateNormal", {"loc": np.zeros((1, 60, 2)), "scale_tril": factor}),
    ):
        found = recalibrate(p, None, y, "spread")
        np.testing.assert_allclose(found.value, expected, rtol=1e-6)
        scaled = np.outer(expected, expected) * p.covariance
        np.testing.assert_allclose(found.predict(p).covariance, scaled, rtol=1e-5)


@pytest.mark.parametrize("family", ["Normal", "StudentT", "NormalMixture"])
def test_a_mixture_keeps_its_form_under_a_spread(family):
    """m + c (y - m) of the whole mixture, weights and what is epistemic included; c beats its neighbours."""
    p = _mixture(family, rows=50)
    y = p.mean + 3.0 * (p.sample(1, 2)[0] - p.mean)
    found = recalibrate(p, None, y, "spread")
    (c,) = np.ravel(found.value)
    after = found.predict(p)
    np.testing.assert_allclose(
        after.log_prob(y), p.log_prob(p.mean + (y - p.mean) / c) - np.log(c), rtol=1e-9
    )
    np.testing.assert_allclose(after.epistemic, c**2 * p.epistemic, rtol=1e-9)
    np.testing.assert_allclose(after.quantile(0.1), p.mean + c * (p.quantile(0.1) - p.mean), rtol=1e-8)

    def loss(log_c):
        return np.mean(log_c - p.log_prob(p.mean + (y - p.mean) * np.exp(-log_c)))

    assert loss(np.log(c)) <= min(loss(at) for at in np.linspace(-2.0, 3.0, 301)) + 1e-12


def test_the_spread_of_censored_rows():
    rng = np.random.default_rng(0)
    time, bound = rng.normal(0.0, 2.0, 200), rng.normal(0.5, 1.0, 200)
    seen = time <= bound
    y = np.column_stack([np.minimum(time, bound), seen])
    p = Prediction("CensoredNormal", {"loc": np.zeros((1, 200)), "scale": np.ones((1, 200))})
    found = recalibrate(p, None, y, "spread")

    def loss(c):
        known = stats.norm.logpdf(y[:, 0], 0.0, c)
        return -np.mean(np.where(seen, known, stats.norm.logsf(y[:, 0], 0.0, c)))

    expected = optimize.minimize_scalar(loss, bounds=(0.1, 10.0), method="bounded", options={"xatol": 1e-9})
    np.testing.assert_allclose(found.value, [expected.x], rtol=1e-5)
    with pytest.raises(UnsupportedError, match="censored"):
        recalibrate(p, None, y, "isotonic")


def test_what_a_linearised_prediction_does_not_know_is_scaled_too():
    p = Prediction("Normal", {"loc": np.zeros((1, 5)), "scale": np.ones((1, 5))}, None, np.full((1, 5), 0.3))
    after = recalibrate(p, None, np.array([2.0, -2.0, 2.0, -2.0, 2.0]), "spread").predict(p)
    np.testing.assert_allclose(after.epistemic, 1.2, rtol=1e-6)
    np.testing.assert_allclose(after.aleatoric, 2.8, rtol=1e-6)


# --- temperature --------------------------------------------------------------------------------------------


def _overconfident(classes, rows=400, draws=1, seed=0, sharp=3.0, spread=0.0):
    """Logits of which labels were drawn, and a prediction that has them too large."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, classes))
    labels = np.array([rng.choice(classes, p=each) for each in special.softmax(logits, axis=1)])
    each = sharp * (logits + spread * rng.normal(size=(draws, rows, classes)))
    return each, labels


def test_temperature_is_that_of_scikit_learn():
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4))
    y = np.argmax(x[:, :3] + rng.gumbel(size=(300, 3)), axis=1)
    model = LogisticRegression(C=1e4).fit(x[:30], y[:30])  # few rows and no prior: too sure
    oracle = CalibratedClassifierCV(FrozenEstimator(model), method="temperature").fit(x[30:], y[30:])
    p = Prediction("Categorical", {"probs": model.predict_proba(x)[None]})
    for pooled in (False, True):
        found = recalibrate(p.take(slice(30, None)), None, y[30:], pooled=pooled)
        assert float(found.value) > 1.2
        np.testing.assert_allclose(
            found.predict(p).probabilities, oracle.predict_proba(x), rtol=1e-3, atol=1e-5
        )
    assert found.kind == "temperature"
    assert "temperature" in repr(found)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("pooled", [False, True])
def test_temperature_makes_the_mixture_most_likely(classes, pooled):
    logits, labels = _overconfident(classes, draws=6, spread=0.3)
    probs = special.softmax(logits, axis=-1)
    p = Prediction("Categorical", {"probs": probs})
    if classes == 2:
        p = Prediction("Bernoulli", {"probs": probs[..., 1]}, class_names=["no", "yes"])
    found = recalibrate(p, None, labels, pooled=pooled)
    rows = np.arange(len(labels))

    def loss(log_t):
        if pooled:
            after = special.softmax(np.log(probs.mean(axis=0)) / np.exp(log_t), axis=-1)
        else:
            after = special.softmax(logits / np.exp(log_t), axis=-1).mean(axis=0)
        return -np.mean(np.log(after[rows, labels]))

    expected = optimize.minimize_scalar(loss, bounds=(-2.0, 4.0), method="bounded", options={"xatol": 1e-9})
    assert float(found.value) == pytest.approx(np.exp(expected.x), rel=1e-5)
    after = found.predict(p)
    assert -scores.log_score(after, labels) == pytest.approx(expected.fun, rel=1e-9)
    assert scores.expected_calibration_error(after, labels) < scores.expected_calibration_error(p, labels)
    assert after.class_names == p.class_names
    if pooled:
        assert scores.accuracy(after, labels) == scores.accuracy(p, labels)
        assert after.draws == 1
    else:
        assert after.draws == 6
        assert (after.epistemic > 0.0).all()


def test_certain_draws_stay_certain():
    probs = np.array([[[1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.6, 0.2, 0.2]]])
    p = Prediction("Categorical", {"probs": probs})
    after = recalibrate(p, None, np.array([0, 1, 0])).predict(p)
    np.testing.assert_array_equal(after.probabilities[0], [1.0, 0.0, 0.0])
    p = Prediction("Bernoulli", {"probs": np.array([[1.0, 0.4, 0.7, 0.0]])})
    after = recalibrate(p, None, np.array([1, 1, 1, 0])).predict(p)
    assert after.mean[[0, 3]].tolist() == [1.0, 0.0]


# --- what is refused ----------------------------------------------------------------------------------------


def test_no_maximum_is_no_temperature():
    right = Prediction("Bernoulli", {"probs": np.array([[0.9, 0.2, 0.7]])})
    with pytest.raises(InputError, match="most likely"):
        recalibrate(right, None, np.array([1, 0, 1]))
    with pytest.raises(InputError, match="most likely"):
        recalibrate(right, None, np.array([0, 1, 0]))
    with pytest.raises(InputError, match="some probability"):
        recalibrate(Prediction("Bernoulli", {"probs": np.array([[0.0, 0.5]])}), None, np.array([1, 0]))


def test_kinds_that_a_prediction_does_not_have():
    numbers, y = _normal(np.zeros(4), np.ones(4)), np.arange(4.0)
    classes, labels = Prediction("Bernoulli", {"probs": np.full((1, 4), 0.4)}), np.array([0, 1, 0, 1])
    counts = Prediction("Poisson", {"rate": np.ones((1, 4))})
    with pytest.raises(UnsupportedError, match="classes"):
        recalibrate(numbers, None, y, "temperature")
    for kind in ("spread", "isotonic"):
        with pytest.raises(UnsupportedError, match="temperature"):
            recalibrate(classes, None, labels, kind)
        with pytest.raises(UnsupportedError):
            recalibrate(counts, None, y, kind)
    with pytest.raises(UnsupportedError, match="not mapped"):
        recalibrate(recalibrate(numbers, None, y).predict(numbers), None, y)
    with pytest.raises(UnknownNameError, match="did you mean 'isotonic'"):
        recalibrate(numbers, None, y, "isotone")
    with pytest.raises(InputError, match="pooled"):
        recalibrate(numbers, None, y, "spread", pooled=True)
    averaged = Prediction("Bernoulli", {"probs": np.full((1, 4), 0.4)}, epistemic_within=np.full((1, 4), 0.1))
    with pytest.raises(UnsupportedError, match="pooled=True"):
        recalibrate(averaged, None, labels)
    with pytest.raises(InputError, match="shape"):
        recalibrate(numbers, None, y[:2])
    with pytest.raises(InputError, match="x=None"):
        recalibrate(numbers, np.zeros((4, 1)), y)
    with pytest.raises(InputError, match="a posterior or a prediction"):
        recalibrate(3, None, y)


def test_a_source_predicts_for_itself():
    """What stands for a posterior is asked with the same arguments each time, and not about the rows of its fit."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 2)), rng.normal(size=50)
    asked = []

    def predict(x, **keywords):
        asked.append(keywords)
        return _normal(x[:, 0], np.ones(len(x)))

    source = SimpleNamespace(
        predict=predict, info=SimpleNamespace(data_hash=checks.data_hash(x[:20], y[:20]))
    )
    found = recalibrate(source, x[20:], y[20:], "spread", draws=7)
    np.testing.assert_allclose(found.predict(x).mean, x[:, 0])
    found.predict(x, seed=3)
    assert asked == [{"draws": 7}, {"draws": 7}, {"draws": 7, "seed": 3}]
    again = recalibrate(found, x[30:], y[30:])
    assert isinstance(again.predict(x), MappedPrediction)
    for each in (source, found):
        with pytest.raises(InputError, match="has not seen"):
            recalibrate(each, x[:20], y[:20])
    with pytest.raises(InputError, match="shape"):
        recalibrate(source, x[:, 0], y)
    plain = recalibrate(_normal(np.zeros(4), np.ones(4)), None, np.arange(4.0))
    with pytest.raises(InputError, match="without a posterior"):
        plain.predict(x)
    with pytest.raises(InputError, match="no arguments"):
        found.predict(_normal(np.zeros(4), np.ones(4)))
