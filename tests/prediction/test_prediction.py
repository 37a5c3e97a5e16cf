"""Predictions against SciPy, and against their own samples."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import special, stats

from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.prediction.prediction import BLOCK, Prediction
from ppl_bnn.prediction.standardisation import Standardisation

S, N, K, C = 6, 5, 2, 3


def _parameters(family, seed=0, shape=(S, N)):
    rng = np.random.default_rng(seed)
    if family == "Bernoulli":
        return {"probs": rng.uniform(0.05, 0.95, shape)}
    if family == "Categorical":
        return {"probs": rng.dirichlet(np.ones(C), shape)}
    if family == "Poisson":
        return {"rate": rng.gamma(3.0, 2.0, shape)}
    if family == "NegativeBinomial":
        return {"rate": rng.gamma(3.0, 2.0, shape), "concentration": rng.gamma(2.0, 1.0, shape)}
    parameters = {"loc": rng.normal(0.0, 2.0, shape), "scale": rng.gamma(3.0, 0.3, shape)}
    return parameters | ({"df": rng.uniform(4.5, 9.0, shape)} if family == "StudentT" else {})


def _frozen(family, parameters):
    if family == "Normal":
        return stats.norm(parameters["loc"], parameters["scale"])
    if family == "StudentT":
        return stats.t(parameters["df"], parameters["loc"], parameters["scale"])
    if family == "Laplace":
        return stats.laplace(parameters["loc"], parameters["scale"])
    if family == "Poisson":
        return stats.poisson(parameters["rate"])
    if family == "NegativeBinomial":
        r = parameters["concentration"]
        return stats.nbinom(r, r / (r + parameters["rate"]))
    return stats.bernoulli(parameters["probs"])


def _log_weights(shape, seed=5):
    raw = np.random.default_rng(seed).normal(size=shape)
    return raw - special.logsumexp(raw, axis=0)


CONTINUOUS = ["Normal", "StudentT", "Laplace"]
COUNTS = ["Poisson", "NegativeBinomial"]
NUMBERS = [*CONTINUOUS, *COUNTS]
WEIGHTS = [None, (S,), (S, N)]


@pytest.mark.parametrize("family", [*NUMBERS, "Bernoulli"])
def test_one_component_is_the_distribution(family):
    parameters = _parameters(family, shape=(1, N))
    p, oracle = Prediction(family, parameters), _frozen(family, {k: v[0] for k, v in parameters.items()})
    y = np.array([0, 1, 1, 0, 1]) if family == "Bernoulli" else np.array([0.0, 1.0, 2.0, 5.0, 9.0])
    log_density = oracle.logpdf if family in CONTINUOUS else oracle.logpmf
    np.testing.assert_allclose(p.log_prob(y), log_density(y), rtol=1e-12)
    np.testing.assert_allclose(p.mean, oracle.mean(), rtol=1e-12)
    np.testing.assert_allclose(p.variance, oracle.var(), rtol=1e-12)
    if family == "Bernoulli":
        np.testing.assert_allclose(p.entropy, oracle.entropy(), rtol=1e-12)
        return
    np.testing.assert_allclose(p.cdf(y), oracle.cdf(y), rtol=1e-12)
    np.testing.assert_allclose(
        p.quantile([0.01, 0.3, 0.97]), [oracle.ppf(q) for q in (0.01, 0.3, 0.97)], rtol=1e-10
    )
    np.testing.assert_allclose(p.epistemic, 0.0, atol=1e-14)
    expected = [
        _expected_deviation(family, {k: v[0, n] for k, v in parameters.items()}, y[n]) for n in range(N)
    ]
    np.testing.assert_allclose(p.absolute_deviation(y), expected, rtol=1e-7)


def _expected_deviation(family, parameters, y):
    """E|Y - y| by numerical integration of both tails of the distribution function."""
    oracle = _frozen(family, parameters)
    if family in COUNTS:
        k = np.arange(20_000)
        return np.sum(np.abs(k - y) * oracle.pmf(k))
    from scipy.integrate import quad

    return quad(oracle.cdf, -np.inf, y, epsabs=1e-11)[0] + quad(oracle.sf, y, np.inf, epsabs=1e-11)[0]


@pytest.mark.parametrize("family", [*NUMBERS, "Bernoulli"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_mixture_is_averaged_before_the_logarithm(family, weights):
    parameters = _parameters(family)
    log_weights = None if weights is None else _log_weights(weights)
    p, oracle = Prediction(family, parameters, log_weights), _frozen(family, parameters)
    y = np.array([0, 1, 1, 0, 1]) if family == "Bernoulli" else np.array([0.0, 1.0, 2.0, 5.0, 9.0])
    components = oracle.logpdf(y) if family in CONTINUOUS else oracle.logpmf(y)
    w = np.full((S, 1), 1.0 / S) if log_weights is None else np.exp(log_weights).reshape(S, -1)
    np.testing.assert_allclose(p.component_log_prob(y), components, rtol=1e-12)
    np.testing.assert_allclose(p.log_prob(y), special.logsumexp(components, axis=0, b=w), rtol=1e-12)
    mean = np.sum(w * oracle.mean(), axis=0)
    np.testing.assert_allclose(p.mean, mean, rtol=1e-12)
    second = np.sum(w * (oracle.var() + oracle.mean() ** 2), axis=0)
    np.testing.assert_allclose(p.variance, second - mean**2, rtol=1e-10)
    if family != "Bernoulli":
        np.testing.assert_allclose(p.cdf(y), np.sum(w * oracle.cdf(y), axis=0), rtol=1e-12)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_categorical(weights):
    parameters, log_weights = _parameters("Categorical"), None if weights is None else _log_weights(weights)
    p = Prediction("Categorical", parameters, log_weights, class_names=["a", "b", "c"])
    w = np.full((S, 1), 1.0 / S) if log_weights is None else np.exp(log_weights).reshape(S, -1)
    expected = np.sum(w[..., None] * parameters["probs"], axis=0)
    y = np.array([0, 1, 2, 0, 1])
    np.testing.assert_allclose(p.probabilities, expected, rtol=1e-12)
    np.testing.assert_allclose(p.log_prob(y), np.log(expected[np.arange(N), y]), rtol=1e-12)
    np.testing.assert_allclose(p.entropy, stats.entropy(expected, axis=-1), rtol=1e-12)
    np.testing.assert_allclose(
        p.aleatoric, np.sum(w * stats.entropy(parameters["probs"], axis=-1), axis=0), rtol=1e-12
    )
    # Mutual information as the expected divergence of the draws from their mixture: another formula for it.
    divergence = np.sum(w * special.rel_entr(parameters["probs"], expected).sum(axis=-1), axis=0)
    np.testing.assert_allclose(p.epistemic, divergence, rtol=1e-9)


def test_bernoulli_is_two_classes():
    parameters = _parameters("Bernoulli")
    two = np.stack([1.0 - parameters["probs"], parameters["probs"]], axis=-1)
    p, q = Prediction("Bernoulli", parameters), Prediction("Categorical", {"probs": two})
    for name in ("probabilities", "entropy", "aleatoric", "epistemic"):
        np.testing.assert_allclose(getattr(p, name), getattr(q, name), rtol=1e-12, atol=1e-15)
    y = np.array([0, 1, 1, 0, 1])
    np.testing.assert_allclose(p.log_prob(y), q.log_prob(y), rtol=1e-12)
    assert p.probabilities.shape == (N, 2)


def test_outputs_are_independent_given_the_draw():
    parameters = _parameters("Normal", shape=(S, N, K))
    p = Prediction("Normal", parameters)
    y = np.random.default_rng(1).normal(size=(N, K))
    joint = stats.norm(parameters["loc"], parameters["scale"]).logpdf(y).sum(axis=-1)
    np.testing.assert_allclose(p.log_prob(y), special.logsumexp(joint, axis=0) - np.log(S), rtol=1e-12)
    for k in range(K):
        one = Prediction("Normal", {name: value[..., k] for name, value in parameters.items()})
        for name in ("mean", "std", "epistemic", "aleatoric"):
            np.testing.assert_allclose(getattr(p, name)[:, k], getattr(one, name), rtol=1e-12)
        np.testing.assert_allclose(p.cdf(y)[:, k], one.cdf(y[:, k]), rtol=1e-12)
        np.testing.assert_allclose(p.quantile([0.1, 0.5])[..., k], one.quantile([0.1, 0.5]), rtol=1e-10)
    assert p.shape == (N, K)
    assert len(p) == N


@pytest.mark.parametrize("family", CONTINUOUS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_quantiles_invert_the_distribution_function(family, weights):
    p = Prediction(family, _parameters(family), None if weights is None else _log_weights(weights))
    levels = np.array([1e-6, 0.05, 0.5, 0.9, 1.0 - 1e-6])
    y = p.quantile(levels)
    np.testing.assert_allclose(p.cdf(y), np.broadcast_to(levels[:, None], (5, N)), rtol=0, atol=1e-8)
    np.testing.assert_allclose(p.cdf(y)[0], 1e-6, rtol=1e-6)
    np.testing.assert_allclose(p.interval(0.9)[0], p.quantile(0.05), rtol=1e-12)
    assert p.quantile(0.05).shape == (N,)
    assert p.quantile([0.05]).shape == (1, N)


def test_quantiles_of_narrow_components_far_apart():
    loc = np.array([-100.0, 0.0, 3.0, 1e4])[:, None]
    p = Prediction("Normal", {"loc": loc, "scale": np.full((4, 1), 1e-3)})
    levels = np.array([0.1, 0.2501, 0.4, 0.7, 0.99])
    np.testing.assert_allclose(p.cdf(p.quantile(levels))[:, 0], levels, atol=1e-8)


@pytest.mark.parametrize("family", COUNTS)
@pytest.mark.parametrize("draws", [1, 4])
def test_quantiles_of_counts_are_the_smallest_integers(draws, family):
    parameters = {"rate": np.random.default_rng(2).gamma(0.5, 40.0, (draws, 20))}
    if family == "NegativeBinomial":
        parameters["concentration"] = np.random.default_rng(3).gamma(0.5, 4.0, (draws, 20)) + 0.05
    p = Prediction(family, parameters)
    for level in (0.01, 0.5, 0.999):
        y = p.quantile(level)
        assert (y == np.floor(y)).all()
        assert (p.cdf(y) >= level).all()
        assert (p.cdf(y - 1.0) < level).all()


@pytest.mark.parametrize("family", [*NUMBERS, "Bernoulli"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_samples_agree_with_the_moments(family, weights):
    p = Prediction(family, _parameters(family), None if weights is None else _log_weights(weights))
    n = 40_000
    y = p.sample(n, seed=3)
    assert y.shape == (n, N)
    standard_error = p.std / np.sqrt(n)
    assert (np.abs(y.mean(axis=0) - p.mean) < 5.0 * standard_error).all()
    squares = (y - p.mean) ** 2
    assert (np.abs(squares.mean(axis=0) - p.variance) < 5.0 * squares.std(axis=0) / np.sqrt(n)).all()
    np.testing.assert_array_equal(y, p.sample(n, seed=3))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_categorical_samples(weights):
    p = Prediction(
        "Categorical", _parameters("Categorical"), None if weights is None else _log_weights(weights)
    )
    y = p.sample(40_000, seed=3)
    share = (y[..., None] == np.arange(C)).mean(axis=0)
    error = np.sqrt(p.probabilities * (1.0 - p.probabilities) / 40_000)
    assert (np.abs(share - p.probabilities) < 5.0 * error).all()


def test_a_sample_is_one_network_unless_weights_differ_between_rows():
    loc = np.repeat([[-100.0], [100.0]], N, axis=1)
    parameters = {"loc": loc, "scale": np.ones((2, N))}
    coherent = np.sign(Prediction("Normal", parameters).sample(50, 0))
    assert (coherent == coherent[:, :1]).all()
    apart = np.sign(Prediction("Normal", parameters, np.full((2, N), -np.log(2.0))).sample(50, 0))
    assert not (apart == apart[:, :1]).all()


def test_variance_within_a_component_moves_from_aleatoric_to_epistemic():
    parameters = _parameters("Normal")
    within = 0.25 * parameters["scale"] ** 2
    plain, p = Prediction("Normal", parameters), Prediction("Normal", parameters, epistemic_within=within)
    np.testing.assert_allclose(p.variance, plain.variance, rtol=1e-12)
    np.testing.assert_allclose(p.epistemic, parameters["loc"].var(axis=0) + within.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(p.aleatoric, 0.75 * plain.aleatoric, rtol=1e-12)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", ["Bernoulli", "Categorical"])
def test_mixtures_gathered_into_components_keep_their_entropies(family, weights):
    """Pairs of draws put together, with the mutual information within each pair: the whole is what it was."""
    fine = Prediction(
        family,
        _parameters(family, shape=(2 * S, N)),
        None if weights is None else _log_weights((2 * S, *weights[1:])),
    )
    w = np.broadcast_to(fine.weights.reshape(2 * S, -1), (2 * S, N)).reshape(2, S, N)
    total = w.sum(axis=0)
    probs = fine.parameters["probs"].reshape(2, S, N, -1)
    mean = np.sum((w / total)[..., None] * probs, axis=0)
    rows = [np.concatenate([1.0 - a, a], axis=-1) if family == "Bernoulli" else a for a in (probs, mean)]
    divergence = special.rel_entr(rows[0], rows[1]).sum(axis=-1)
    within = np.sum(w / total * divergence, axis=0)
    coarse = Prediction(
        family,
        {"probs": mean[..., 0] if family == "Bernoulli" else mean},
        np.log(total),
        epistemic_within=within,
    )
    for name in ("probabilities", "entropy", "aleatoric", "epistemic", "variance"):
        np.testing.assert_allclose(getattr(coarse, name), getattr(fine, name), rtol=1e-10)
    assert (coarse.epistemic > Prediction(family, coarse.parameters, coarse.log_weights).epistemic).all()
    np.testing.assert_allclose(coarse.take([0, 2]).epistemic, fine.epistemic[[0, 2]], rtol=1e-10)
    with pytest.raises(UnsupportedError, match="variance"):
        _ = coarse.mean_function_variance


def test_all_of_an_entropy_may_be_epistemic_and_no_more():
    probs = np.array([[0.5, 0.1, 1.0]])
    entropy = stats.bernoulli(probs).entropy()
    p = Prediction("Bernoulli", {"probs": probs}, epistemic_within=entropy)
    np.testing.assert_allclose(p.aleatoric, 0.0, atol=1e-15)
    np.testing.assert_allclose(p.epistemic, entropy[0], rtol=1e-14)
    for wrong, says in ((entropy + 0.01, "entropy"), (-entropy, "entropy"), (entropy[0], "shape")):
        with pytest.raises(InputError, match=says):
            Prediction("Bernoulli", {"probs": probs}, epistemic_within=wrong)
    three = np.full((1, 2, 3), 1.0 / 3.0)
    with pytest.raises(InputError, match=r"\(draws, rows\), \(1, 2\)"):
        Prediction("Categorical", {"probs": three}, epistemic_within=np.zeros((1, 2, 3)))


@pytest.mark.parametrize("family", CONTINUOUS)
@pytest.mark.parametrize("outputs", [(), (K,)])
def test_rescaling_changes_units_only(family, outputs):
    parameters = _parameters(family, shape=(S, N, *outputs))
    variance = Prediction(family, parameters).law().variance()
    p = Prediction(family, parameters, epistemic_within=0.1 * variance)
    location, scale = (3.0, 7.0) if not outputs else (np.array([3.0, -1.0]), np.array([7.0, 0.2]))
    changed = p.rescale(location, scale)
    y = np.random.default_rng(1).normal(size=(N, *outputs))
    jacobian = np.sum(np.log(np.broadcast_to(scale, outputs))) if outputs else np.log(scale)
    np.testing.assert_allclose(changed.log_prob(y * scale + location), p.log_prob(y) - jacobian, rtol=1e-11)
    np.testing.assert_allclose(changed.mean, p.mean * scale + location, rtol=1e-11)
    np.testing.assert_allclose(changed.epistemic, p.epistemic * np.square(scale), rtol=1e-11)
    np.testing.assert_allclose(changed.aleatoric, p.aleatoric * np.square(scale), rtol=1e-11)
    np.testing.assert_allclose(changed.quantile(0.2), p.quantile(0.2) * scale + location, rtol=1e-9)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_taking_rows_and_draws(weights):
    log_weights = None if weights is None else _log_weights(weights)
    p = Prediction("Normal", _parameters("Normal"), log_weights)
    y = np.random.default_rng(1).normal(size=N)
    keep = np.array([True, False, True, True, False])
    np.testing.assert_allclose(p.take(keep).log_prob(y[keep]), p.log_prob(y)[keep], rtol=1e-13)
    half = p.take_draws(slice(0, 3))
    components = p.component_log_prob(y)[:3]
    w = np.broadcast_to(p.weights.reshape(S, -1), (S, N))[:3]
    np.testing.assert_allclose(
        half.log_prob(y), special.logsumexp(components, axis=0, b=w / w.sum(axis=0)), rtol=1e-12
    )


def test_thinning_is_even_in_weight():
    loc = np.arange(100.0)[:, None]
    p = Prediction("Normal", {"loc": loc, "scale": np.ones_like(loc)})
    np.testing.assert_array_equal(p.thin(10).parameters["loc"][:, 0], np.arange(5.0, 100.0, 10.0))
    assert p.thin(1000) is p
    heavy = np.full(100, 1e-3)
    heavy[7] = 1.0 - 99e-3
    thinned = Prediction("Normal", p.parameters, np.log(heavy)).thin(20)
    assert np.mean(thinned.parameters["loc"] == 7.0) >= 0.85


def test_a_draw_without_weight_counts_for_nothing():
    parameters = _parameters("StudentT")
    parameters["df"][0] = 1.5  # infinite variance, weight zero
    log_weights = np.log(np.r_[1e-300, np.full(S - 1, 1.0 / (S - 1))])
    log_weights[0] = -np.inf
    p = Prediction("StudentT", parameters, log_weights)
    rest = Prediction("StudentT", {name: value[1:] for name, value in parameters.items()})
    y = np.zeros(N)
    for name in ("mean", "variance", "aleatoric"):
        np.testing.assert_allclose(getattr(p, name), getattr(rest, name), rtol=1e-12)
    np.testing.assert_allclose(p.log_prob(y), rest.log_prob(y), rtol=1e-12)


def test_blocks_of_rows_do_not_show():
    rng = np.random.default_rng(0)
    parameters = {"loc": rng.normal(size=(700, 1000)), "scale": rng.gamma(3.0, 0.3, (700, 1000))}
    p, y = Prediction("Normal", parameters), rng.normal(size=1000)
    rows = [0, 373, 374, 375, 999]
    np.testing.assert_allclose(p.log_prob(y)[rows], p.take(rows).log_prob(y[rows]), rtol=1e-12)
    np.testing.assert_allclose(p.quantile(0.9)[rows], p.take(rows).quantile(0.9), rtol=1e-10)


def _ones(*shape):
    return np.ones(shape)


@pytest.mark.parametrize(
    ("family", "parameters", "keywords", "says"),
    [
        ("Normal", {"loc": _ones(S, N)}, {}, "loc, scale"),
        ("Normal", {"loc": _ones(S, N), "scale": _ones(S, 1)}, {}, "one shape"),
        ("Normal", {"loc": _ones(N), "scale": _ones(N)}, {}, r"\(draws, rows\)"),
        ("Normal", {"loc": _ones(0, N), "scale": _ones(0, N)}, {}, "at least one draw"),
        ("Normal", {"loc": _ones(S, N) * np.nan, "scale": _ones(S, N)}, {}, "finite loc"),
        ("Normal", {"loc": _ones(S, N), "scale": 0.0 * _ones(S, N)}, {}, "positive scale"),
        ("Normal", {"loc": np.full((S, N), "a"), "scale": _ones(S, N)}, {}, "array of numbers"),
        ("Poisson", {"rate": -_ones(S, N)}, {}, "rate"),
        ("Bernoulli", {"probs": 1.5 * _ones(S, N)}, {}, "between 0 and 1"),
        ("Categorical", {"probs": 0.4 * _ones(S, N, 2)}, {}, "sum to 1"),
        ("Normal", {"loc": _ones(S, N), "scale": _ones(S, N)}, {"log_weights": np.zeros(S)}, "normalised"),
        ("Normal", {"loc": _ones(S, N), "scale": _ones(S, N)}, {"log_weights": np.zeros(N)}, "shape"),
        ("Normal", {"loc": _ones(S, N), "scale": _ones(S, N)}, {"log_weights": _ones(S) * np.nan}, "NaN"),
        (
            "Normal",
            {"loc": _ones(S, N), "scale": _ones(S, N)},
            {"epistemic_within": 2.0 * _ones(S, N)},
            "variance",
        ),
        (
            "Normal",
            {"loc": _ones(S, N), "scale": _ones(S, N)},
            {"epistemic_within": _ones(N)},
            "shape of loc",
        ),
        ("Bernoulli", {"probs": 0.5 * _ones(S, N)}, {"class_names": ["a"]}, "2 class_names"),
    ],
)
def test_what_is_no_prediction_is_refused(family, parameters, keywords, says):
    with pytest.raises(InputError, match=says):
        Prediction(family, parameters, **keywords)


def test_an_unknown_family_is_named():
    with pytest.raises(UnknownNameError, match="Normal"):
        Prediction("Norml", {"loc": np.ones((1, 1)), "scale": np.ones((1, 1))})


@pytest.mark.parametrize(
    ("family", "y", "says"),
    [
        ("Normal", np.zeros((N, 1)), r"ravel"),
        ("Normal", np.zeros(N + 1), "shape"),
        ("Normal", np.full(N, np.nan), "finite"),
        ("Normal", np.full(N, "a"), "numbers"),
        ("Poisson", np.full(N, -1), "counts"),
        ("Poisson", np.full(N, 0.5), "counts"),
        ("Bernoulli", np.full(N, 2), r"labels 0\.\.1"),
        ("Categorical", np.full(N, 3), r"labels 0\.\.2"),
        ("Categorical", np.zeros((N, C)), "one label per row"),
    ],
)
def test_y_that_does_not_fit_is_refused(family, y, says):
    with pytest.raises(InputError, match=says):
        Prediction(family, _parameters(family)).log_prob(y)


def test_what_is_not_defined_says_so():
    classes, numbers = (
        Prediction("Bernoulli", _parameters("Bernoulli")),
        Prediction("Normal", _parameters("Normal")),
    )
    for undefined in (
        lambda: classes.quantile(0.5),
        lambda: classes.cdf(np.zeros(N)),
        lambda: classes.interval(0.9),
    ):
        with pytest.raises(UnsupportedError, match="probabilities"):
            undefined()
    for name in ("probabilities", "entropy", "classes"):
        with pytest.raises(UnsupportedError, match="Normal"):
            getattr(numbers, name)
    with pytest.raises(UnsupportedError, match="location-scale"):
        classes.rescale(0.0, 1.0)
    with pytest.raises(UnsupportedError, match="location-scale"):
        Prediction("Poisson", _parameters("Poisson"), epistemic_within=np.ones((S, N)))
    cauchy = Prediction("StudentT", _parameters("StudentT") | {"df": np.ones((S, N))})
    with pytest.raises(UnsupportedError, match="quantile"):
        _ = cauchy.mean
    for q in (0.0, 1.0, -1.0, [[0.5]], []):
        with pytest.raises(InputError, match="between 0 and 1"):
            numbers.quantile(q)
    with pytest.raises(InputError, match="scale"):
        numbers.rescale(0.0, -1.0)
    with pytest.raises(InputError, match="shape"):
        numbers.rescale(0.0, np.ones(2))
    with pytest.raises(UnsupportedError, match="per row"):
        Prediction("Normal", numbers.parameters, np.full((S, N), -np.log(S))).thin(2)


def test_a_prediction_does_not_change_after_its_checks():
    loc = np.zeros((S, N))
    p = Prediction("Normal", {"loc": loc, "scale": np.ones((S, N))})
    with pytest.raises(ValueError, match="read-only"):
        p.parameters["loc"][0, 0] = 1.0
    loc[0, 0] = 0.0  # the caller's own array stays the caller's


def test_importing_is_light():
    modules = "ppl_bnn.prediction.scores, ppl_bnn.prediction.standardisation"
    heavy = "scipy.stats", "scipy.special", "scipy.optimize", "sklearn", "scoringrules"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# --- units ------------------------------------------------------------------------------------------------


def test_standardisation_is_that_of_scikit_learn():
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    x, y = rng.normal(5.0, 3.0, (40, 3)), rng.normal(-2.0, 10.0, 40)
    units = Standardisation.of(x, y, task_is_regression=True)
    np.testing.assert_allclose(units.inputs(x), StandardScaler().fit_transform(x), rtol=1e-12)
    np.testing.assert_allclose(units.targets(y), stats.zscore(y), rtol=1e-12)
    p = Prediction("Normal", {"loc": np.zeros((1, 40)), "scale": np.ones((1, 40))})
    original = stats.norm(y.mean(), y.std()).logpdf(y)
    np.testing.assert_allclose(units.prediction(p).log_prob(y), original, rtol=1e-12)
    np.testing.assert_allclose(p.log_prob(units.targets(y)) - np.log(units.y_scale), original, rtol=1e-12)


@pytest.mark.parametrize("regression", [True, False])
@pytest.mark.parametrize("as_dict", [True, False])
def test_standardisation_survives_storage(regression, as_dict):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 2)).astype(np.float32)
    inputs = {"a.b": x, "index": np.arange(10)} if as_dict else x
    y = rng.normal(size=(10, 2)) if regression else np.arange(10) % 2
    units = Standardisation.of(inputs, y, regression)
    again = Standardisation.from_arrays(units.arrays())
    ours, theirs = units.inputs(inputs), again.inputs(inputs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        np.testing.assert_array_equal(ours["index"], np.arange(10))
        ours, theirs = ours["a.b"], theirs["a.b"]
    assert isinstance(ours, np.ndarray)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(units.targets(y), again.targets(y))
    assert np.array_equal(units.y_scale, again.y_scale) if regression else again.y_scale is None
    if not regression:
        np.testing.assert_array_equal(units.targets(y), y)
        p = Prediction("Bernoulli", {"probs": np.full((1, 10), 0.5)})
        assert units.prediction(p) is p


def test_a_column_that_does_not_vary_is_kept_with_a_warning():
    x = np.column_stack([np.arange(7.0), np.full(7, 0.1), np.arange(7.0) ** 2])
    with pytest.warns(UserWarning, match="column 1 of x; kept"):
        units = Standardisation.of(x, np.arange(7.0), task_is_regression=True)
    np.testing.assert_allclose(units.inputs(x)[:, 1], 0.0, atol=1e-15)
    with pytest.raises(InputError, match="columns of the training rows"):
        units.inputs(x[:, :2])
    with pytest.raises(InputError, match="numbers"):
        Standardisation.of(np.full((3, 1), "a"), np.arange(3.0), True)
    with pytest.raises(InputError, match="dict"):
        units.inputs({"x": x})


# --- several parts, and outputs that are correlated ---------------------------------------------------------


def _mixture(seed=0, draws=S):
    rng = np.random.default_rng(seed)
    shape = (draws, N, C)
    return {
        "weights": rng.dirichlet(np.ones(C), shape[:2]),
        "loc": rng.normal(0.0, 2.0, shape),
        "scale": rng.gamma(3.0, 0.3, shape),
    }


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_mixture_of_mixtures_is_averaged_part_by_part(weights):
    parameters, log_weights = _mixture(), None if weights is None else _log_weights(weights)
    p = Prediction("NormalMixture", parameters, log_weights)
    w = np.full((S, 1), 1.0 / S) if log_weights is None else np.exp(log_weights).reshape(S, -1)
    both = w[..., None] * parameters["weights"]
    parts = stats.norm(parameters["loc"], parameters["scale"])
    y = np.random.default_rng(1).normal(size=N)
    np.testing.assert_allclose(
        p.log_prob(y), np.log(np.sum(both * parts.pdf(y[:, None]), (0, 2))), rtol=1e-12
    )
    np.testing.assert_allclose(p.cdf(y), np.sum(both * parts.cdf(y[:, None]), (0, 2)), rtol=1e-12)
    mean = np.sum(both * parts.mean(), (0, 2))
    np.testing.assert_allclose(p.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(
        p.variance, np.sum(both * (parts.var() + (parts.mean() - mean[:, None]) ** 2), (0, 2))
    )
    # What the parts of one draw disagree about is known: it is aleatoric.
    of_draws = np.sum(parameters["weights"] * parameters["loc"], -1)
    np.testing.assert_allclose(p.epistemic, np.sum(w * (of_draws - mean) ** 2, 0), rtol=1e-12)
    levels = [0.05, 0.5, 0.9]
    np.testing.assert_allclose(p.cdf(p.quantile(levels)), np.repeat([levels], N, 0).T, atol=1e-9)
    sample = p.sample(40_000, 0)
    assert sample.shape == (40_000, N)
    assert (np.abs(sample.mean(0) - p.mean) < 5.0 * p.std / 200.0).all()
    share = (sample < y).mean(0)
    assert (np.abs(share - p.cdf(y)) < 5.0 * np.sqrt(p.cdf(y) * (1 - p.cdf(y)) / 40_000)).all()


def test_parts_without_weight_count_for_nothing():
    parameters = _mixture()
    more = {
        name: np.concatenate(
            [value, {"weights": 0.0, "loc": 50.0, "scale": 1.0}[name] * np.ones((S, N, 1))], -1
        )
        for name, value in parameters.items()
    }
    p, q = Prediction("NormalMixture", parameters), Prediction("NormalMixture", more)
    for ask in (
        lambda a: a.mean,
        lambda a: a.std,
        lambda a: a.log_prob(np.ones(N)),
        lambda a: a.quantile(0.3),
    ):
        np.testing.assert_allclose(ask(p), ask(q), rtol=1e-10)


def _correlated(seed=0, outputs=3):
    rng = np.random.default_rng(seed)
    factor = np.tril(rng.normal(size=(S, N, outputs, outputs)))
    diagonal = np.arange(outputs)
    factor[..., diagonal, diagonal] = rng.gamma(3.0, 0.3, (S, N, outputs))
    return {"loc": rng.normal(size=(S, N, outputs)), "scale_tril": factor}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_correlated_outputs(weights):
    parameters, log_weights = _correlated(), None if weights is None else _log_weights(weights)
    p = Prediction("MultivariateNormal", parameters, log_weights)
    w = np.broadcast_to(p.weights.reshape(S, -1), (S, N))
    loc, covariance = (
        parameters["loc"],
        parameters["scale_tril"] @ np.swapaxes(parameters["scale_tril"], -1, -2),
    )
    y = np.random.default_rng(1).normal(size=(N, 3))
    each = np.array(
        [
            [stats.multivariate_normal(loc[s, n], covariance[s, n]).logpdf(y[n]) for n in range(N)]
            for s in range(S)
        ]
    )
    np.testing.assert_allclose(p.log_prob(y), special.logsumexp(each, axis=0, b=w), rtol=1e-10)
    # Output by output it is a mixture of normals.
    scale = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    simple = Prediction("Normal", {"loc": loc, "scale": scale}, log_weights)
    for name in ("mean", "std", "epistemic", "aleatoric"):
        np.testing.assert_allclose(getattr(p, name), getattr(simple, name), rtol=1e-12)
    np.testing.assert_allclose(p.cdf(y), simple.cdf(y), rtol=1e-12)
    np.testing.assert_allclose(p.quantile([0.1, 0.8]), simple.quantile([0.1, 0.8]), rtol=1e-10)
    np.testing.assert_allclose(p.absolute_deviation(y), simple.absolute_deviation(y), rtol=1e-12)
    second = covariance + loc[..., :, None] * loc[..., None, :]
    mean = np.sum(w[..., None] * loc, 0)
    expected = np.sum(w[..., None, None] * second, 0) - mean[:, :, None] * mean[:, None, :]
    np.testing.assert_allclose(p.covariance, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.diagonal(p.covariance, axis1=1, axis2=2), p.variance, rtol=1e-10)
    sample = p.sample(40_000, 0)
    deviation = sample - p.mean
    products = deviation[..., :, None] * deviation[..., None, :]
    error = products.std(0) / 200.0
    assert (np.abs(products.mean(0) - p.covariance) < 5.0 * error).all()


def test_other_units_of_mixtures_and_of_correlated_outputs():
    p = Prediction("NormalMixture", _mixture())
    y = np.random.default_rng(1).normal(size=N)
    q = p.rescale(3.0, 2.0)
    np.testing.assert_allclose(q.log_prob(3.0 + 2.0 * y), p.log_prob(y) - np.log(2.0), rtol=1e-12)
    np.testing.assert_allclose(q.quantile(0.3), 3.0 + 2.0 * p.quantile(0.3), rtol=1e-9)
    p = Prediction("MultivariateNormal", _correlated())
    y, location, scale = (
        np.random.default_rng(1).normal(size=(N, 3)),
        np.arange(3.0),
        np.array([0.5, 2.0, 7.0]),
    )
    q = p.rescale(location, scale)
    np.testing.assert_allclose(q.log_prob(location + scale * y), p.log_prob(y) - np.log(7.0), rtol=1e-12)
    np.testing.assert_allclose(q.covariance, np.outer(scale, scale) * p.covariance, rtol=1e-12)
    np.testing.assert_allclose(p.rescale(1.0, 2.0).std, 2.0 * p.std, rtol=1e-12)
    with pytest.raises(UnsupportedError, match="counts and labels"):
        Prediction("NegativeBinomial", _parameters("NegativeBinomial")).rescale(0.0, 1.0)


def test_covariance_of_outputs_that_are_independent_given_the_draw():
    parameters = _parameters("Laplace", shape=(S, N, K))
    p = Prediction("Laplace", parameters)
    loc = parameters["loc"]
    for n in range(N):
        between = np.cov(loc[:, n], rowvar=False, ddof=0)
        np.testing.assert_allclose(
            p.covariance[n], between + np.diag(2.0 * np.mean(parameters["scale"][:, n] ** 2, 0)), rtol=1e-10
        )
    with pytest.raises(UnsupportedError, match="several outputs"):
        _ = Prediction("Laplace", _parameters("Laplace")).covariance


@pytest.mark.parametrize(
    ("family", "parameters", "says"),
    [
        ("NegativeBinomial", {"rate": np.ones((S, N)), "concentration": np.zeros((S, N))}, "concentration"),
        ("NegativeBinomial", {"rate": -np.ones((S, N)), "concentration": np.ones((S, N))}, "rate"),
        ("NormalMixture", _mixture() | {"weights": np.ones((S, N, C))}, "sum to 1 over the parts"),
        ("NormalMixture", {name: value[..., 0] for name, value in _mixture().items()}, "parts"),
        (
            "MultivariateNormal",
            {"loc": np.ones((S, N, 2)), "scale_tril": np.ones((S, N, 2))},
            "one more axis",
        ),
        (
            "MultivariateNormal",
            {"loc": np.ones((S, N, 2)), "scale_tril": np.ones((S, N, 2, 2))},
            "triangular",
        ),
    ],
)
def test_what_is_no_such_prediction_is_refused(family, parameters, says):
    with pytest.raises(InputError, match=says):
        Prediction(family, parameters)


# --- times ------------------------------------------------------------------------------------------------


def _times(shape=(S, N), seed=3):
    rng = np.random.default_rng(seed)
    parameters = {"concentration": rng.uniform(0.6, 4.0, shape), "scale": rng.gamma(4.0, 0.5, shape)}
    return parameters, stats.weibull_min(parameters["concentration"], scale=parameters["scale"])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_times_of_weibull_distributions(weights):
    parameters, oracle = _times()
    log_weights = None if weights is None else _log_weights(weights)
    p = Prediction("Weibull", parameters, log_weights)
    w = np.full((S, 1), 1.0 / S) if log_weights is None else np.exp(log_weights).reshape(S, -1)
    y = np.array([0.01, 0.7, 2.0, 5.0, 9.0])
    np.testing.assert_allclose(p.component_log_prob(y), oracle.logpdf(y), rtol=1e-11)
    np.testing.assert_allclose(p.cdf(y), np.sum(w * oracle.cdf(y), axis=0), rtol=1e-12)
    mean = np.sum(w * oracle.mean(), axis=0)
    np.testing.assert_allclose(p.mean, mean, rtol=1e-12)
    second = np.sum(w * (oracle.var() + oracle.mean() ** 2), axis=0)
    np.testing.assert_allclose(p.variance, second - mean**2, rtol=1e-10)
    np.testing.assert_allclose(p.aleatoric, np.sum(w * oracle.var(), axis=0), rtol=1e-10)
    q = p.quantile([0.02, 0.5, 0.98])
    np.testing.assert_allclose(p.cdf(q), np.repeat([[0.02], [0.5], [0.98]], N, axis=1), rtol=1e-9)
    draws = p.sample(4000, seed=1)
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 5.0 * np.sqrt(p.variance / 4000))
    # Before the clock starts nothing happens.
    np.testing.assert_array_equal(p.log_prob(-y), -np.inf)
    np.testing.assert_array_equal(p.cdf(-y), 0.0)
    np.testing.assert_allclose(p.absolute_deviation(-y), p.mean + y, rtol=1e-12)


@pytest.mark.parametrize("draws", [1, 4])
def test_mean_distances_of_times(draws):
    """E|T - y| and CRPS, by integrals of distribution functions."""
    from scipy.integrate import quad

    from ppl_bnn.prediction.crps import crps

    parameters, oracle = _times((draws, N))
    p = Prediction("Weibull", parameters)
    y = np.array([0.01, 0.7, 2.0, 5.0, 9.0])
    value = crps(p, y, pointwise=True)
    for n in range(N):

        def upto(t, n=n):
            return float(np.mean(oracle.cdf(np.full(N, t)), axis=0)[n])

        low = quad(lambda t, of=upto: of(t), 0.0, y[n], epsabs=1e-10)[0]
        high = quad(lambda t, of=upto: 1.0 - of(t), y[n], np.inf, epsabs=1e-10, limit=200)[0]
        np.testing.assert_allclose(p.absolute_deviation(y)[n], low + high, rtol=1e-7)
        below = quad(lambda t, of=upto: of(t) ** 2, 0.0, y[n], epsabs=1e-10)[0]
        above = quad(lambda t, of=upto: (1.0 - of(t)) ** 2, y[n], np.inf, epsabs=1e-10, limit=200)[0]
        np.testing.assert_allclose(value[n], below + above, rtol=2e-5, atol=1e-8)


def test_weights_of_rows_belong_to_their_rows_in_every_block():
    # Weights that differ between rows, over more rows than one block has.
    rng = np.random.default_rng(1)
    draws, count = 700, 1000
    assert draws * count > 2 * BLOCK
    parameters = {"loc": rng.normal(size=(draws, count)), "scale": rng.gamma(3.0, 0.3, (draws, count))}
    logits = 3.0 * rng.normal(size=(draws, count))
    log_weights = logits - special.logsumexp(logits, axis=0)
    p, y = Prediction("Normal", parameters, log_weights=log_weights), rng.normal(size=count)
    density = stats.norm(parameters["loc"], parameters["scale"])
    np.testing.assert_allclose(
        p.log_prob(y), special.logsumexp(log_weights + density.logpdf(y), axis=0), rtol=1e-10
    )
    np.testing.assert_allclose(p.cdf(y), (np.exp(log_weights) * density.cdf(y)).sum(axis=0), rtol=1e-10)
    np.testing.assert_allclose(p.cdf(p.quantile(0.3)), 0.3, rtol=1e-8)
    np.testing.assert_allclose(p.mean, (np.exp(log_weights) * parameters["loc"]).sum(axis=0), rtol=1e-10)


def test_an_input_that_is_called_like_a_field_is_read_back() -> None:
    x = {"y_mean": np.arange(6.0).reshape(3, 2), "x": np.arange(3.0)[:, None]}
    found = Standardisation.of(x, np.arange(3.0), True)
    again = Standardisation.from_arrays(found.arrays())
    assert isinstance(again.x_mean, dict)
    assert set(again.x_mean) == set(x)
    np.testing.assert_array_equal(again.inputs(x)["y_mean"], found.inputs(x)["y_mean"])
