"""Scores against scoringrules, scikit-learn, torchmetrics and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import scoringrules
from scipy import special, stats
from sklearn import metrics

from ppl_bnn import scores
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.prediction.prediction import Prediction


def _normals(draws, rows, seed=0, spread=1.0, ratio=0.3, weights=None):
    rng = np.random.default_rng(seed)
    loc, scale = spread * rng.normal(size=(draws, rows)), np.exp(ratio * rng.normal(size=(draws, rows)))
    if weights is not None:
        raw = rng.normal(size=weights)
        weights = raw - special.logsumexp(raw, axis=0)
    return Prediction("Normal", {"loc": loc, "scale": scale}, weights), rng.normal(size=rows)


def _classes(rows=400, classes=4, draws=5, seed=0):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(classes, 0.6), (draws, rows))
    return Prediction("Categorical", {"probs": probs}), rng.integers(0, classes, rows)


def _binary(rows=400, draws=5, seed=0):
    rng = np.random.default_rng(seed)
    return Prediction("Bernoulli", {"probs": rng.beta(0.7, 0.7, (draws, rows))}), rng.integers(0, 2, rows)


# --- CRPS -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draws", "spread", "ratio"),
    [
        (1, 1.0, 0.3),
        (7, 1.0, 0.3),
        (7, 1e3, 0.3),  # narrow components far apart: pairs
        (600, 1e5, 0.3),  # the same, in more than one block
        (300, 1.0, 0.0),  # one scale: a single trapezium rule
        (300, 0.01, 0.5),
        (300, 1.0, 1.2),  # scales over three orders of magnitude: refinement
    ],
)
@pytest.mark.parametrize("per_row", [None, False, True])
def test_crps_of_normal_mixtures(draws, spread, ratio, per_row):
    rows = 6
    weights = None if per_row is None else (draws, rows) if per_row else (draws,)
    p, y = _normals(draws, rows, spread=spread, ratio=ratio, weights=weights)
    y[0] = 1e3
    w = np.broadcast_to(p.weights.reshape(draws, -1), (draws, rows))
    expected = scoringrules.crps_mixnorm(y, p.parameters["loc"].T, p.parameters["scale"].T, w.T)
    np.testing.assert_allclose(scores.crps(p, y, pointwise=True), expected, rtol=1e-5)
    np.testing.assert_allclose(scores.crps(p, y), np.mean(expected), rtol=1e-5)


def test_crps_of_many_draws_is_exact():
    p, y = _normals(4000, 100)
    values = scores.crps(p, y, pointwise=True)
    expected = scoringrules.crps_mixnorm(y[:1], p.parameters["loc"][:, :1].T, p.parameters["scale"][:, :1].T)
    np.testing.assert_allclose(values[:1], expected, rtol=1e-6)


@pytest.mark.parametrize("df", [1.5, 3.0, 30.0])
def test_crps_of_student_t(df):
    rng = np.random.default_rng(0)
    loc, scale, y = rng.normal(size=(1, 8)), rng.gamma(3.0, 0.3, (1, 8)), rng.normal(size=8)
    p = Prediction("StudentT", {"df": np.full((1, 8), df), "loc": loc, "scale": scale})
    np.testing.assert_allclose(
        scores.crps(p, y, pointwise=True), scoringrules.crps_t(y, df, loc[0], scale[0]), rtol=5e-5
    )


def test_crps_of_laplace_and_poisson():
    rng = np.random.default_rng(0)
    loc, scale, y = rng.normal(size=(1, 8)), rng.gamma(3.0, 0.3, (1, 8)), rng.normal(size=8)
    p = Prediction("Laplace", {"loc": loc, "scale": scale})
    np.testing.assert_allclose(
        scores.crps(p, y, pointwise=True), scoringrules.crps_laplace(y, loc[0], scale[0]), rtol=5e-5
    )
    rate, counts = rng.gamma(2.0, 4.0, (1, 8)), rng.integers(0, 20, 8)
    p = Prediction("Poisson", {"rate": rate})
    np.testing.assert_allclose(
        scores.crps(p, counts, pointwise=True), scoringrules.crps_poisson(counts, rate[0]), rtol=1e-7
    )


@pytest.mark.parametrize("family", ["StudentT", "Laplace", "Poisson"])
def test_crps_of_mixtures_is_that_of_their_samples(family):
    rng = np.random.default_rng(0)
    shape = (6, 4)
    if family == "Poisson":
        p, y = Prediction(family, {"rate": rng.gamma(2.0, 4.0, shape)}), np.array([0, 3, 7, 20])
    else:
        parameters = {"loc": rng.normal(0.0, 2.0, shape), "scale": rng.gamma(3.0, 0.3, shape)}
        parameters |= {"df": rng.uniform(3.0, 9.0, shape)} if family == "StudentT" else {}
        p, y = Prediction(family, parameters), rng.normal(size=4)
    batches = [scoringrules.crps_ensemble(y, p.sample(4000, seed).T, estimator="pwm") for seed in range(20)]
    error = np.std(batches, axis=0, ddof=1) / np.sqrt(len(batches))
    assert (np.abs(scores.crps(p, y, pointwise=True) - np.mean(batches, axis=0)) < 5.0 * error).all()


def test_crps_per_output_is_that_of_the_margins():
    rng = np.random.default_rng(0)
    parameters = {"loc": rng.normal(size=(30, 4, 2)), "scale": rng.gamma(3.0, 0.3, (30, 4, 2))}
    p, y = Prediction("Normal", parameters), rng.normal(size=(4, 2))
    expected = scoringrules.crps_mixnorm(
        y, *(np.moveaxis(parameters[name], 0, -1) for name in ("loc", "scale"))
    )
    np.testing.assert_allclose(scores.crps(p, y, pointwise=True), expected, rtol=1e-6)


# --- the others -------------------------------------------------------------------------------------------


def test_scores_of_numbers():
    p, _ = _normals(50, 300)
    y = p.sample(1, 7)[0]
    assert scores.log_score(p, y) == pytest.approx(np.mean(p.log_prob(y)), rel=1e-12)
    assert scores.rmse(p, y) == pytest.approx(metrics.root_mean_squared_error(y, p.mean), rel=1e-12)
    median = metrics.mean_absolute_error(y, p.quantile(0.5))
    assert scores.mean_absolute_error(p, y) == pytest.approx(median, rel=1e-12)
    lower, upper = p.interval(0.8)
    assert scores.coverage(p, y, 0.8) == np.mean((y >= lower) & (y <= upper))
    assert scores.interval_width(p, 0.8) == pytest.approx(np.mean(upper - lower), rel=1e-12)
    # y was drawn from the prediction itself, draw by draw: rows are exchangeable, so this one is calibrated.
    assert abs(scores.coverage(p, y, 0.8) - 0.8) < 4.0 * np.sqrt(0.8 * 0.2 / 300)
    assert stats.kstest(scores.pit(p, y), "uniform").pvalue > 1e-3
    together = scores.scores_of(p, y)
    assert list(together) == ["log_score", "rmse", "crps", "coverage_90", "width_90"]
    assert together["crps"] == scores.crps(p, y)
    assert together["coverage_90"] == scores.coverage(p, y, 0.9)
    assert together["width_90"] == pytest.approx(scores.interval_width(p, 0.9), rel=1e-12)


def test_pit_of_counts_is_the_middle_of_the_step():
    p = Prediction("Poisson", {"rate": np.full((1, 3), 2.5)})
    y = np.array([0, 2, 9])
    oracle = stats.poisson(2.5)
    np.testing.assert_allclose(scores.pit(p, y), 0.5 * (oracle.cdf(y) + oracle.cdf(y - 1)), rtol=1e-12)


def test_scores_of_classes():
    p, y = _classes()
    assert -scores.log_score(p, y) == pytest.approx(metrics.log_loss(y, p.probabilities), rel=1e-9)
    assert scores.accuracy(p, y) == metrics.accuracy_score(y, p.probabilities.argmax(axis=1))
    whole = metrics.brier_score_loss(y, p.probabilities, scale_by_half=False, labels=range(4))
    assert scores.brier(p, y) == pytest.approx(whole, rel=1e-12)
    together = scores.scores_of(p, y)
    assert list(together) == ["log_score", "accuracy", "brier", "ece"]
    assert together["brier"] == scores.brier(p, y)


def test_scores_of_two_classes():
    p, y = _binary()
    assert -scores.log_score(p, y) == pytest.approx(metrics.log_loss(y, p.mean), rel=1e-9)
    assert scores.brier(p, y) == pytest.approx(2.0 * metrics.brier_score_loss(y, p.mean), rel=1e-12)
    assert scores.accuracy(p, y) == metrics.accuracy_score(y, p.mean > 0.5)
    assert list(scores.scores_of(p, y)) == ["log_score", "accuracy", "brier", "ece"]


@pytest.mark.parametrize("make", [_classes, _binary])
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_is_that_of_torchmetrics(make, bins):
    functional = pytest.importorskip("torchmetrics.functional.classification")
    torch = pytest.importorskip("torch")
    p, y = make(draws=2)
    # The surest rows are right and the others guesses, so that gaps of both signs meet: only then do the bins matter.
    top = p.probabilities
    y = np.where(top.max(axis=1) > 14 / 15, top.argmax(axis=1), y)
    expected = functional.multiclass_calibration_error(
        torch.tensor(p.probabilities), torch.tensor(y), num_classes=p.classes, n_bins=bins, norm="l1"
    )
    assert scores.expected_calibration_error(p, y, bins) == pytest.approx(float(expected), abs=1e-6)


def test_scores_that_do_not_apply_are_refused():
    numbers, y = _normals(5, 4)
    classes, labels = _classes(rows=4)
    for score in (scores.accuracy, scores.brier, scores.expected_calibration_error):
        with pytest.raises(UnsupportedError):
            score(numbers, y)
    for score in (scores.rmse, scores.mean_absolute_error, scores.crps, scores.coverage, scores.pit):
        with pytest.raises(UnsupportedError):
            score(classes, labels)
    for score in (
        scores.log_score,
        scores.rmse,
        scores.mean_absolute_error,
        scores.crps,
        scores.coverage,
        scores.pit,
    ):
        with pytest.raises(InputError, match="shape"):
            score(numbers, y[:, None])
    for score in (scores.accuracy, scores.brier, scores.expected_calibration_error, scores.log_score):
        with pytest.raises(InputError, match="shape"):
            score(classes, labels[:, None])


# --- fidelity ---------------------------------------------------------------------------------------------


def test_fidelity_of_a_known_change():
    """loc -> mean + 2 (loc - mean) + 3 sd: error 3 in epistemic sd, sd ratio 2, wherever the rows lie."""
    reference, _ = _normals(200, 9)
    loc = reference.parameters["loc"]
    sd = np.sqrt(reference.epistemic)
    changed = reference.mean + 2.0 * (loc - reference.mean) + 3.0 * sd
    p = Prediction("Normal", {"loc": changed, "scale": reference.parameters["scale"]})
    figures = scores.fidelity(p, reference)
    assert figures["mean_gap"] == pytest.approx(3.0, rel=1e-12)
    assert figures["sd_ratio"] == pytest.approx(2.0, rel=1e-12)
    assert figures["sd_log_ratio_spread"] == pytest.approx(0.0, abs=1e-7)
    itself = scores.fidelity(reference, reference)
    assert itself["mean_gap"] == itself["wasserstein"] == 0.0
    assert itself["sd_ratio"] == 1.0


def test_sd_ratio_is_a_geometric_mean():
    reference, _ = _normals(200, 2)
    factor = np.array([2.0, 0.125])
    loc = reference.mean + factor * (reference.parameters["loc"] - reference.mean)
    figures = scores.fidelity(Prediction("Normal", {**reference.parameters, "loc": loc}), reference)
    assert figures["sd_ratio"] == pytest.approx(0.5, rel=1e-12)
    assert figures["sd_log_ratio_spread"] == pytest.approx(np.log(4.0), rel=1e-12)


@pytest.mark.parametrize("df", [None, 4.0])
def test_wasserstein_of_location_and_scale(df):
    """For one family W_1 = E|(m - m') + (s - s') Z|."""

    def one(loc, scale):
        shape = {} if df is None else {"df": np.full((1, 1), df)}
        parameters = shape | {"loc": np.full((1, 1), loc), "scale": np.full((1, 1), scale)}
        return Prediction("Normal" if df is None else "StudentT", parameters)

    oracle = stats.norm() if df is None else stats.t(df)
    for loc, scale in ((0.3, 1.0), (0.0, 1.5), (5.0, 0.1)):
        expected = oracle.expect(lambda z, a=loc, b=scale - 1.0: np.abs(a + b * z), epsabs=1e-9, limit=200)
        np.testing.assert_allclose(scores.wasserstein(one(loc, scale), one(0.0, 1.0))[0], expected, rtol=2e-3)


def test_wasserstein_of_counts():
    p, q = (Prediction("Poisson", {"rate": np.array([[rate]])}) for rate in (4.0, 7.0))
    k = np.arange(60)
    expected = stats.wasserstein_distance(k, k, stats.poisson(4.0).pmf(k), stats.poisson(7.0).pmf(k))
    np.testing.assert_allclose(scores.wasserstein(p, q)[0], expected, rtol=1e-4)


def test_fidelity_of_classes():
    reference, _ = _classes(rows=50, draws=40)
    other, _ = _classes(rows=50, draws=30, seed=1)
    figures = scores.fidelity(other, reference)
    ours, theirs = other.probabilities, reference.probabilities
    variance, reference_variance = (
        q.parameters["probs"].var(axis=0).sum(axis=-1) for q in (other, reference)
    )
    gap = np.sqrt(np.sum((ours - theirs) ** 2) / reference_variance.sum())
    assert figures["mean_gap"] == pytest.approx(gap, rel=1e-10)
    ratio = np.exp(np.average(0.5 * np.log(variance / reference_variance), weights=reference_variance))
    assert figures["sd_ratio"] == pytest.approx(ratio, rel=1e-10)
    assert figures["agreement"] == metrics.accuracy_score(theirs.argmax(axis=1), ours.argmax(axis=1))
    assert figures["total_variation"] == pytest.approx(
        0.5 * np.abs(ours - theirs).sum(axis=1).mean(), rel=1e-12
    )


def test_classes_of_which_the_reference_is_certain_do_not_count():
    reference, _ = _binary(rows=20, draws=30)
    sure = reference.parameters["probs"].copy()
    sure[:, 0] = 1.0
    figures = scores.fidelity(reference, Prediction("Bernoulli", {"probs": sure}))
    assert np.isfinite(figures["mean_gap"])
    assert figures["sd_ratio"] == pytest.approx(1.0, rel=1e-10)


def test_a_point_estimate_has_no_spread():
    reference, _ = _normals(20, 5)
    figures = scores.fidelity(reference.take_draws([0]), reference)
    assert figures["sd_ratio"] == 0.0
    assert figures["sd_log_ratio_spread"] == np.inf
    with pytest.raises(InputError, match="several draws"):
        scores.fidelity(reference, reference.take_draws([0]))


def test_predictions_of_other_rows_or_targets_do_not_compare():
    numbers, _ = _normals(5, 4)
    for other in (_normals(5, 3)[0], _binary(rows=4)[0], Prediction("Poisson", {"rate": np.ones((5, 4))})):
        with pytest.raises(InputError, match="same rows"):
            scores.fidelity(other, numbers)


def test_noise_floor_splits_whole_chains():
    rng = np.random.default_rng(0)
    offset = np.repeat([-1.0, 1.0, -1.0, 1.0], 50)[:, None]
    loc = np.sqrt(0.5) * rng.normal(size=(200, 30)) + offset
    p = Prediction("Normal", {"loc": loc, "scale": np.ones((200, 30))})
    balanced = scores.noise_floor(p, groups=np.repeat([0, 1, 2, 3], 50))
    apart = scores.noise_floor(p, groups=np.repeat([0, 2, 1, 3], 50))
    assert balanced["mean_gap"] < 0.5
    assert apart["mean_gap"] > 2.0
    assert scores.noise_floor(p) == balanced
    with pytest.raises(InputError, match="groups"):
        scores.noise_floor(p, groups=np.zeros(3))
    with pytest.raises(InputError, match="at least 4"):
        scores.noise_floor(p.take_draws(slice(0, 3)))


def test_noise_floor_of_independent_draws():
    """Halves of S/2 independent draws differ in mean by sd * sqrt(4 / S)."""
    rng = np.random.default_rng(1)
    p = Prediction("Normal", {"loc": rng.normal(size=(1000, 200)), "scale": np.ones((1000, 200))})
    floor = scores.noise_floor(p)
    assert floor["mean_gap"] == pytest.approx(np.sqrt(4.0 / 1000.0), rel=4.0 / np.sqrt(2.0 * 200.0))
    assert abs(np.log(floor["sd_ratio"])) < 4.0 * np.sqrt(2.0 / 1000.0 / 200.0)


# --- counts that vary more, several parts, correlated outputs ----------------------------------------------


def test_crps_of_the_other_families():
    rng = np.random.default_rng(0)
    rate, r, counts = rng.gamma(2.0, 4.0, (1, 8)), rng.gamma(2.0, 1.0, (1, 8)), rng.integers(0, 20, 8)
    p = Prediction("NegativeBinomial", {"rate": rate, "concentration": r})
    expected = scoringrules.crps_negbinom(counts, r[0], (r / (r + rate))[0])
    np.testing.assert_allclose(scores.crps(p, counts, pointwise=True), expected, rtol=1e-6)
    shape = (5, 8, 3)
    weights, loc, scale = (
        rng.dirichlet(np.ones(3), shape[:2]),
        rng.normal(size=shape),
        rng.gamma(3.0, 0.3, shape),
    )
    p, y = Prediction("NormalMixture", {"weights": weights, "loc": loc, "scale": scale}), rng.normal(size=8)
    flat = [np.moveaxis(a, 1, 0).reshape(8, -1) for a in (loc, scale, weights / 5)]
    np.testing.assert_allclose(
        scores.crps(p, y, pointwise=True), scoringrules.crps_mixnorm(y, *flat), rtol=1e-6
    )
    factor = np.tril(rng.normal(size=(5, 8, 2, 2))) + 2.0 * np.eye(2)
    factor[..., [0, 1], [0, 1]] = np.abs(factor[..., [0, 1], [0, 1]])
    p, y = (
        Prediction("MultivariateNormal", {"loc": loc[..., :2], "scale_tril": factor}),
        rng.normal(size=(8, 2)),
    )
    expected = scoringrules.crps_mixnorm(
        y, np.moveaxis(loc[..., :2], 0, -1), np.moveaxis(np.linalg.norm(factor, axis=-1), 0, -1)
    )
    np.testing.assert_allclose(scores.crps(p, y, pointwise=True), expected, rtol=1e-6)


def test_counts_of_two_families_compare():
    rate = np.random.default_rng(0).gamma(2.0, 4.0, (6, 5))
    reference = Prediction("Poisson", {"rate": rate})
    near = Prediction("NegativeBinomial", {"rate": rate, "concentration": np.full((6, 5), 1e9)})
    assert scores.fidelity(near, reference)["mean_gap"] == 0.0
    np.testing.assert_allclose(scores.wasserstein(near, reference), 0.0, atol=1e-6)
    y = np.arange(5)
    np.testing.assert_allclose(scores.pit(near, y), scores.pit(reference, y), atol=1e-6)
    figures = scores.scores_of(near, y)
    for name, value in scores.scores_of(reference, y).items():
        np.testing.assert_allclose(figures[name], value, rtol=1e-6, err_msg=name)


# --- several outputs together -------------------------------------------------------------------------------


def _plane(rows, draws=1, seed=0):
    rng = np.random.default_rng(seed)
    loc = rng.normal(size=(draws, rows, 2))
    return Prediction("Normal", {"loc": loc, "scale": np.ones(loc.shape)}), rng.normal(size=(rows, 2))


def _plane_energy(p, y):
    """For one component N(m, I) in the plane: distances are Rice and Rayleigh distributed."""
    distance = np.linalg.norm(y - p.parameters["loc"][0], axis=1)
    return stats.rice.mean(distance) - 0.5 * np.sqrt(np.pi)


def test_energy_score_is_that_of_the_plane(monkeypatch):
    monkeypatch.setattr(scores, "BLOCK", 15_000)  # 30 rows at a time
    p, y = _plane(70)
    found = [scores.energy_score(p, y, pointwise=True, seed=seed) for seed in range(1, 21)]
    error = np.std(found, axis=0, ddof=1) / np.sqrt(20.0)
    z = (np.mean(found, axis=0) - _plane_energy(p, y)) / error
    # t with 19 degrees of freedom; by chance beyond 6 in one of 1600 runs.
    assert np.abs(z).max() < 6.0
    assert abs(z.mean()) < 4.0 * np.sqrt(19.0 / 17.0 / 70.0)
    assert scores.energy_score(p, y, seed=3) == np.mean(found[2])


def test_energy_score_of_two_draws_has_no_bias():
    p, y = _plane(4000)
    two = scores.energy_score(p, y, pointwise=True, draws=2, seed=1) - _plane_energy(p, y)
    assert abs(two.mean()) < 4.0 * two.std() / np.sqrt(4000.0)


def test_energy_score_of_a_mixture_sees_how_outputs_go_together():
    rng = np.random.default_rng(0)
    half = rng.normal(size=(4000, 1))
    factor = np.array([[1.0, 0.0], [0.95, np.sqrt(1.0 - 0.95**2)]])
    y = np.concatenate([half, rng.normal(size=half.shape)], axis=1) @ factor.T
    together = Prediction(
        "MultivariateNormal",
        {"loc": np.zeros((1, 4000, 2)), "scale_tril": np.broadcast_to(factor, (1, 4000, 2, 2))},
    )
    apart = Prediction("Normal", {"loc": np.zeros((1, 4000, 2)), "scale": np.ones((1, 4000, 2))})
    np.testing.assert_allclose(scores.crps(together, y), scores.crps(apart, y), rtol=1e-6)
    first, second = (scores.energy_score(p, y, pointwise=True, draws=50, seed=1) for p in (together, apart))
    mean, error = scores.paired_difference(second, first)
    assert mean > 4.0 * error


def test_energy_score_is_refused_where_it_is_something_else():
    p, y = _normals(5, 4)
    with pytest.raises(UnsupportedError, match="crps"):
        scores.energy_score(p, y)
    with pytest.raises(UnsupportedError, match="brier"):
        scores.energy_score(*_classes(rows=4))
    with pytest.raises(InputError, match="draws"):
        scores.energy_score(*_plane(3), draws=1)


# --- calibration --------------------------------------------------------------------------------------------


def test_coverages_are_those_of_single_levels():
    p, y = _normals(20, 100)
    found = scores.coverages(p, y)
    assert found["level"].tolist() == [0.5, 0.8, 0.9, 0.95]
    for index, level in enumerate(found["level"]):
        assert found["coverage"][index] == scores.coverage(p, y, level)
        assert found["width"][index] == pytest.approx(scores.interval_width(p, level), rel=1e-12)
    for levels in ((), (0.5, 1.0), 0.9):
        with pytest.raises(InputError, match="levels"):
            scores.coverages(p, y, levels)  # type: ignore[arg-type]


def test_randomised_pit_of_counts_is_uniform_where_the_middle_is_not():
    rate = np.random.default_rng(0).gamma(2.0, 0.3, (1, 4000))
    p = Prediction("Poisson", {"rate": rate})
    y = p.sample(1, 1)[0]
    oracle = stats.poisson(rate[0])
    below, above = oracle.cdf(y - 1), oracle.cdf(y)
    values = scores.pit(p, y, seed=2)
    assert ((below <= values) & (values <= above)).all()
    assert np.std((values - below) / (above - below)) == pytest.approx(np.sqrt(1.0 / 12.0), rel=0.05)
    assert scores.pit_uniformity(p, y)[1] > 1e-3
    assert stats.kstest(scores.pit(p, y), "uniform").pvalue < 1e-6


def test_uniformity_of_the_pit_is_told():
    p, _ = _normals(1, 500)
    y = p.sample(1, 3)[0]
    expected = stats.kstest(scores.pit(p, y), stats.uniform.cdf)
    assert scores.pit_uniformity(p, y) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-12)
    assert scores.pit_uniformity(p, y)[1] > 1e-3
    narrow = Prediction("Normal", {**p.parameters, "scale": 0.5 * p.parameters["scale"]})
    assert scores.pit_uniformity(narrow, y)[1] < 1e-6
    both = Prediction("Normal", {name: value.reshape(1, 250, 2) for name, value in p.parameters.items()})
    assert scores.pit_uniformity(both, y.reshape(250, 2))[0] == scores.pit_uniformity(p, y)[0]


@pytest.mark.parametrize("make", [_classes, _binary])
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_reliability_is_that_of_scikit_learn(make, bins):
    from sklearn.calibration import calibration_curve

    p, y = make(draws=2)
    found = scores.reliability(p, y, bins)
    confidence, right = p.probabilities.max(axis=1), p.probabilities.argmax(axis=1) == y
    share, mean = calibration_curve(right, confidence, n_bins=bins, strategy="uniform")
    used = found["count"] > 0
    np.testing.assert_allclose(found["accuracy"][used], share, rtol=1e-12)
    np.testing.assert_allclose(found["confidence"][used], mean, rtol=1e-12)
    assert np.isnan(found["accuracy"][~used]).all()
    assert {values.shape for values in found.values()} == {(bins,)}
    assert found["count"].sum() == len(y)
    assert bins == 1 or not used.all()  # a most probable class of two has at least a half
    with pytest.raises(InputError, match="bin"):
        scores.reliability(p, y, 0)


# --- what the uncertainty is good for -----------------------------------------------------------------------


def test_out_of_distribution_by_counting():
    """Every figure from its definition, over all pairs and all thresholds; there are ties."""
    rng = np.random.default_rng(0)
    inside, outside = (
        Prediction("Bernoulli", {"probs": np.round(rng.beta(a, a, (1, rows)), 2)})
        for a, rows in ((0.5, 70), (3.0, 50))
    )
    found = scores.out_of_distribution(inside, outside, "max_probability")
    low, high = (scores.uncertainty(p, "max_probability") for p in (inside, outside))
    pairs = np.mean((high[:, None] > low) + 0.5 * (high[:, None] == low))
    assert found["auroc"] == pytest.approx(pairs, rel=1e-12)
    thresholds = np.unique(np.concatenate([low, high]))[::-1]
    recall = np.array([np.mean(high >= t) for t in thresholds])
    precision = np.array([np.sum(high >= t) / np.sum(np.concatenate([low, high]) >= t) for t in thresholds])
    assert found["aupr"] == pytest.approx(np.sum(np.diff(recall, prepend=0.0) * precision), rel=1e-12)
    enough = thresholds[recall >= 0.95].max()
    assert found["fpr95"] == np.mean(low >= enough)
    turned = scores.out_of_distribution(outside, inside, "max_probability")
    assert turned["auroc"] == pytest.approx(1.0 - found["auroc"], rel=1e-12)
    same = scores.out_of_distribution(inside, inside)
    assert (same["auroc"], same["aupr"]) == pytest.approx((0.5, 0.5), rel=1e-12)


def test_each_measure_sees_its_own_uncertainty():
    """Draws that disagree, and draws that agree on a coin: mutual information tells one from the other."""
    disagree, coin = np.array([[0.95, 0.5], [0.05, 0.5]])[:, :1], np.full((2, 1), 0.5)
    sure = np.array([[0.99], [0.99]])
    p = Prediction("Bernoulli", {"probs": np.concatenate([sure, coin, disagree], axis=1)})
    for measure in ("entropy", "max_probability"):
        first, second, third = scores.uncertainty(p, measure)
        assert first < second
        assert second == pytest.approx(third, rel=1e-12)
    assert scores.uncertainty(p).tolist() == scores.uncertainty(p, "max_probability").tolist()
    for measure in ("mutual_information", "epistemic_variance"):
        first, second, third = scores.uncertainty(p, measure)
        assert first == pytest.approx(second, abs=1e-12)
        assert third > 0.1
    parameters = {"loc": np.array([[0.0, 2.0], [0.0, -2.0]]), "scale": np.array([[3.0, 1.0], [3.0, 1.0]])}
    p = Prediction("Normal", parameters)
    np.testing.assert_allclose(scores.uncertainty(p), [9.0, 5.0])
    np.testing.assert_allclose(scores.uncertainty(p, "epistemic_variance"), [0.0, 4.0])
    both = Prediction("Normal", {name: value[:, None] for name, value in parameters.items()})
    np.testing.assert_allclose(scores.uncertainty(both), [14.0])


def test_measures_that_are_not_there_are_refused():
    numbers, classes = _normals(5, 4)[0], _classes(rows=4)[0]
    for measure in ("entropy", "mutual_information", "max_probability"):
        with pytest.raises(UnsupportedError):
            scores.uncertainty(numbers, measure)
    with pytest.raises(UnsupportedError):
        scores.uncertainty(classes, "variance")
    with pytest.raises(UnknownNameError, match="did you mean 'entropy'"):
        scores.uncertainty(classes, "entrop")
    heavy = Prediction("StudentT", {"df": np.full((1, 4), 1.5), **_normals(1, 4)[0].parameters})
    with pytest.raises(UnsupportedError, match="finite variance"):
        scores.out_of_distribution(heavy, heavy)
    for other in (classes, _classes(rows=4, classes=3)[0]):
        with pytest.raises(InputError, match="one target"):
            scores.out_of_distribution(other, _binary(rows=4)[0])
    assert scores.out_of_distribution(_normals(5, 4)[0], _normals(3, 9)[0])["auroc"] >= 0.0


def test_out_of_distribution_by_given_uncertainties() -> None:
    inside, outside = _binary(rows=9)[0], _binary(rows=4)[0]
    both = [scores.uncertainty(each, "entropy") for each in (inside, outside)]
    found = scores.out_of_distribution(*both)
    assert found == scores.out_of_distribution(inside, outside, "entropy")
    for wrong in ([both[0], outside], [both[0], np.array([np.nan])], [both[0], both[1][:, None]]):
        with pytest.raises(InputError, match="two predictions, or two arrays of finite uncertainties"):
            scores.out_of_distribution(*wrong)
    with pytest.raises(InputError, match="two predictions, or two arrays"):
        scores.out_of_distribution(*both, "entropy")


def test_selective_risk_over_all_orders_of_equal_rows():
    from itertools import pairwise, permutations

    # The ends of equal confidences: two, one and three rows.
    probs = np.array([[0.9, 0.9, 0.8, 0.6, 0.6, 0.6]])
    p, y = Prediction("Bernoulli", {"probs": probs}), np.array([1, 0, 0, 1, 1, 0])
    wrong = (y != 1).astype(float)
    risks = []
    for order in permutations(range(6)):
        if all(probs[0, i] >= probs[0, j] for i, j in pairwise(order)):
            risks.append(np.cumsum(wrong[list(order)]) / np.arange(1, 7))
    found = scores.selective(p, y)
    np.testing.assert_allclose(found["risk"], np.mean(risks, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["coverage"], np.arange(1, 7) / 6.0)
    assert found["aurc"] == pytest.approx(np.mean(risks), rel=1e-12)
    assert found["risk"][-1] == pytest.approx(1.0 - scores.accuracy(p, y), rel=1e-12)


def test_selective_prediction_of_numbers():
    rng = np.random.default_rng(0)
    scale = rng.gamma(2.0, 0.5, (1, 3000))
    p = Prediction("Normal", {"loc": np.zeros((1, 3000)), "scale": scale})
    y = p.sample(1, 4)[0]
    found = scores.selective(p, y)
    order = np.argsort(scale[0])
    np.testing.assert_allclose(found["risk"], np.cumsum(y[order] ** 2) / np.arange(1, 3001), rtol=1e-10)
    assert np.sqrt(found["risk"][-1]) == pytest.approx(scores.rmse(p, y), rel=1e-12)
    # Where uncertainty says nothing every coverage has the mean loss.
    blind = Prediction("Normal", {"loc": np.zeros((1, 3000)), "scale": np.ones((1, 3000))})
    np.testing.assert_allclose(scores.selective(blind, y)["risk"], np.mean(y**2), rtol=1e-12)
    assert found["aurc"] < 0.5 * np.mean(y**2)
    own = scores.selective(p, losses=scores.crps(p, y, pointwise=True))
    assert own["risk"][-1] == pytest.approx(scores.crps(p, y), rel=1e-12)
    for wrong in ({}, {"y": y, "losses": y}, {"losses": y[:3]}, {"losses": np.full(3000, np.nan)}):
        with pytest.raises(InputError, match="loss"):
            scores.selective(p, **wrong)


# --- differences --------------------------------------------------------------------------------------------


def test_paired_difference_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 12))
    mean, error = scores.paired_difference(first, second)
    assert mean == pytest.approx(np.mean(first) - np.mean(second), rel=1e-12)
    assert mean / error == pytest.approx(stats.ttest_rel(first, second).statistic, rel=1e-12)
    assert np.isnan(scores.paired_difference(first[:1], second[:1])[1])
    lost = np.append(first[:-1], -np.inf)
    assert scores.paired_difference(first, lost)[0] == np.inf
    assert scores.paired_difference(lost, lost)[0] == 0.0
    for wrong in ((first, second[:3]), (first[None], second[None]), ([], [])):
        with pytest.raises(InputError, match="one shape"):
            scores.paired_difference(*wrong)
    with pytest.raises(InputError, match="test_to_train"):
        scores.paired_difference(first, second, test_to_train=0.0)


def test_splits_that_share_rows_have_a_larger_error():
    """Where a score is the mean of the test rows two random splits correlate by the share of these, t / n, and the
    correction, which takes that for the correlation, gives the variance of the mean over splits exactly.
    """
    rng = np.random.default_rng(0)
    rows, tested, splits, data_sets = 50, 10, 10, 1600
    found = []
    for _ in range(data_sets):
        data = rng.normal(size=rows)
        scored = [data[rng.permutation(rows)[:tested]].mean() for _ in range(splits)]
        mean, plain = scores.paired_difference(scored, np.zeros(splits))
        _, corrected = scores.paired_difference(
            scored, np.zeros(splits), test_to_train=tested / (rows - tested)
        )
        found.append((mean**2, plain**2, corrected**2))
    true, plain, corrected = np.mean(found, axis=0)
    error = np.std([first - last for first, _, last in found]) / np.sqrt(data_sets)
    assert abs(corrected - true) < 4.0 * error
    assert plain < true - 8.0 * error


def test_equal_medians_are_half_a_pair_and_two_events_at_one_time_are_none():
    p = Prediction("Normal", {"loc": np.array([[0.0, 0.0, 1.0, 2.0]]), "scale": np.ones((1, 4))})
    # Five pairs of known order: one of equal medians, four in the right order; rows 1 and 2 have the same time.
    assert scores.concordance_index(p, np.array([1.0, 2.0, 2.0, 3.0])) == pytest.approx(4.5 / 5.0, rel=1e-12)


def test_a_bin_of_reliability_has_its_upper_edge_and_an_interval_both_of_its_ends():
    even = Prediction("Categorical", {"probs": np.full((1, 3, 2), 0.5)})
    assert scores.reliability(even, np.array([0, 1, 1]), 2)["count"].tolist() == [3, 0]
    p, _ = _normals(3, 50)
    for end in p.interval(0.9):
        assert scores.coverage(p, end, 0.9) == 1.0
