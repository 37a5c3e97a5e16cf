"""From a Gaussian over the predictor to y: against SciPy's integration, laplace-torch and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from ppl_bnn.core.errors import CurvatureError, InputError
from ppl_bnn.inference.laplace.linearised import joint_predictive, kinds_of, predictive
from ppl_bnn.language import likelihoods

BERNOULLI, CATEGORICAL = likelihoods.Bernoulli(), likelihoods.Categorical()
GAUSSIAN = likelihoods.Gaussian(None)
# Standard errors in the comparisons with brute force: of some 300 of them one in a thousand suites fails at 5.
ERRORS = 5.0


def gaussian(rows, size, seed=0, scale=1.0):
    """Means (N, D) and full covariances (N, D, D) of moderate size."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(rows, size, size)) * scale / np.sqrt(size)
    return 1.5 * rng.normal(size=(rows, size)), root @ np.swapaxes(root, 1, 2)


def brute_force(mean, covariance, count=200_000, seed=99):
    rng = np.random.default_rng(seed)
    return np.stack(
        [rng.multivariate_normal(m, c, count, method="eigh") for m, c in zip(mean, covariance, strict=True)],
        axis=1,
    )


def agrees(value, draws, replicates=None):
    """Whether a value is the mean of draws (axis 0) up to Monte-Carlo error (and its own, given replicates)."""
    variance = draws.var(axis=0) / len(draws)
    if replicates is not None:
        value, variance = replicates.mean(axis=0), variance + replicates.var(axis=0, ddof=1) / len(replicates)
    return (np.abs(value - draws.mean(axis=0)) <= ERRORS * np.sqrt(variance) + 1e-12).all()


def over_z(function):
    """E[function(z)] for a standard normal z, by adaptive integration."""
    edges, height = np.linspace(-10.0, 10.0, 21), 1.0 / math.sqrt(2.0 * math.pi)
    return integrate.quad(
        lambda z: function(z) * height * math.exp(-0.5 * z * z),
        -10.0,
        10.0,
        points=edges[1:-1],
        limit=2000,
        epsabs=1e-13,
        epsrel=1e-11,
    )[0]


# --- one logit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sd", [0.0, 0.01, 0.5, 1.0, 1.7, 3.0, 8.0, 20.0])
def test_one_logit_is_integrated_to_eight_digits(sd):
    f = np.array([0.0, 0.3, -1.0, 4.0, -15.0])
    p = predictive(BERNOULLI, f[:, None], np.full((5, 1, 1), sd**2), "linearised")
    wanted = [over_z(lambda z, m=m: special.expit(m + sd * z)) for m in f]
    np.testing.assert_allclose(p.mean, wanted, rtol=0, atol=1e-9)

    def entropy(logit):
        return special.entr(special.expit(logit)) + special.entr(special.expit(-logit))

    expected = [over_z(lambda z, m=m: entropy(m + sd * z)) for m in f]
    np.testing.assert_allclose(p.aleatoric, expected, rtol=0, atol=2e-9)
    probit = predictive(BERNOULLI, f[:, None], np.full((5, 1, 1), sd**2), "probit")
    assert np.abs(probit.mean - wanted).max() < 0.02
    # The probit's own probability, with the expected entropy of the Gaussian.
    kept = np.minimum(expected, probit.entropy)
    np.testing.assert_allclose(probit.aleatoric, kept, rtol=0, atol=2e-9)


def test_a_row_does_not_suffer_from_a_wide_one_beside_it():
    mean, variance = np.array([[0.4], [0.4]]), np.array([[[0.09]], [[900.0]]])
    together = predictive(BERNOULLI, mean, variance, "linearised")
    alone = predictive(BERNOULLI, mean[:1], variance[:1], "linearised")
    np.testing.assert_allclose(together.mean[0], alone.mean[0], rtol=0, atol=1e-9)
    np.testing.assert_allclose(together.epistemic[0], alone.epistemic[0], rtol=0, atol=2e-9)


def test_the_probit_formula_and_its_contour():
    f, variance = np.linspace(-4.0, 4.0, 17), np.random.default_rng(0).gamma(1.0, 4.0, 17)
    p = predictive(BERNOULLI, f[:, None], variance[:, None, None], "probit")
    np.testing.assert_allclose(p.mean, special.expit(f / np.sqrt(1.0 + np.pi * variance / 8.0)), rtol=1e-13)
    assert (np.sign(p.mean - 0.5) == np.sign(f)).all()
    assert p.draws == 1


# --- normal outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sd", [0.05, 0.25, 0.4, 1.0, 3.0])
@pytest.mark.parametrize("correlation", [0.0, -0.8])
def test_uncertain_noise_is_integrated_to_eight_digits(sd, correlation):
    f, log_noise, sd_f = 0.7, -1.0, 0.3
    cross = correlation * sd * sd_f
    covariance = np.array([[[sd_f**2, cross], [cross, sd**2]]])
    p = predictive(GAUSSIAN, [[f, log_noise]], covariance, "linearised")

    def standardised(z, y):
        scale = math.sqrt(sd_f**2 * (1.0 - correlation**2) + math.exp(2.0 * (log_noise + sd * z)))
        return (y - f - correlation * sd_f * z) / scale, scale

    def density(z, y):
        deviation, scale = standardised(z, y)
        return math.exp(-0.5 * deviation**2) / (scale * math.sqrt(2.0 * math.pi))

    for y in (0.7, 0.75, 1.5, -4.0):
        at = np.array([y])
        wanted = over_z(lambda z, y=y: special.ndtr(standardised(z, y)[0]))
        np.testing.assert_allclose(p.cdf(at)[0], wanted, rtol=0, atol=1e-8)
        wanted = over_z(lambda z, y=y: density(z, y))
        np.testing.assert_allclose(np.exp(p.log_prob(at)[0]), wanted, rtol=0, atol=1e-8)
    np.testing.assert_allclose(p.mean, f, rtol=1e-8)
    np.testing.assert_allclose(p.epistemic, sd_f**2, rtol=1e-7)
    np.testing.assert_allclose(p.aleatoric, np.exp(2.0 * log_noise + 2.0 * sd**2), rtol=1e-7)


@pytest.mark.parametrize("outputs", [1, 3])
def test_known_noise_is_one_normal(outputs):
    f, cov_f = gaussian(6, outputs)
    log_noise = np.log(np.linspace(0.2, 0.6, outputs))
    mean = np.concatenate([f, np.tile(log_noise, (6, 1))], axis=1)
    covariance = np.zeros((6, 2 * outputs, 2 * outputs))
    covariance[:, :outputs, :outputs] = cov_f
    for likelihood in (GAUSSIAN, likelihoods.HeteroscedasticGaussian()):
        p = predictive(likelihood, mean, covariance, "linearised")
        variance = np.diagonal(cov_f, axis1=1, axis2=2)
        wanted = f, variance, np.tile(np.exp(2.0 * log_noise), (6, 1))
        for ours, theirs in zip((p.mean, p.epistemic, p.aleatoric), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs[:, 0] if outputs == 1 else theirs, rtol=1e-12)
        oracle = stats.norm(f, np.sqrt(variance + np.exp(2.0 * log_noise)))
        y = np.random.default_rng(1).normal(size=p.shape)
        assert p.draws == 1
        np.testing.assert_allclose(p.cdf(y), oracle.cdf(y.reshape(6, outputs)).reshape(p.shape), rtol=1e-12)


def several_outputs(shared):
    """Two outputs whose f and log noises are all correlated; one log noise for both, or one each."""
    rng = np.random.default_rng(3)
    root = rng.normal(size=(4, 4, 4)) * 0.3
    if shared:
        root[:, 3] = root[:, 2]
    mean = np.concatenate([rng.normal(size=(4, 2)), np.full((4, 2), -0.7)], axis=1)
    return mean, root @ np.swapaxes(root, 1, 2)


@pytest.mark.parametrize("shared", [True, False])
def test_several_outputs_with_uncertain_noise_against_brute_force(shared):
    mean, covariance = several_outputs(shared)
    if shared:  # by quadrature
        predictions = [predictive(GAUSSIAN, mean, covariance, "linearised")]
        assert predictions[0].draws < 200
    else:
        predictions = [predictive(GAUSSIAN, mean, covariance, "linearised", seed=seed) for seed in range(16)]
        assert predictions[0].draws == 1024
    eta = brute_force(mean, covariance)
    loc, scale = eta[..., :2], np.exp(eta[..., 2:])

    def check(quantity, draws):
        values = np.stack([quantity(p) for p in predictions])
        assert agrees(values[0], draws, None if shared else values)

    for level in (-0.5, 0.0, 1.0):
        at = np.full((4, 2), level)
        check(lambda p, at=at: p.cdf(at), stats.norm.cdf((at - loc) / scale))
    check(lambda p: p.mean, loc)
    check(lambda p: p.epistemic, (loc - mean[:, :2]) ** 2)
    check(lambda p: p.aleatoric, scale**2)
    if not shared:
        at = np.ones((4, 2))
        check(lambda p: np.exp(p.log_prob(at)), stats.norm.pdf(at, loc, scale).prod(axis=-1))


def test_noise_that_leaves_the_variance_of_y_infinite_is_named():
    for function in (
        lambda: predictive(GAUSSIAN, [[0.0, 0.0]], [np.diag([1.0, 30.0**2])], "linearised"),
        lambda: joint_predictive(GAUSSIAN, [[0.0, 0.0]], np.diag([1.0, 30.0**2])),
    ):
        with pytest.raises(CurvatureError, match="standard deviation of log noise up to 30"):
            function()


# --- several logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 8])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_several_logits_against_brute_force(classes, scale):
    mean, covariance = gaussian(5, classes, seed=classes, scale=scale)
    probs = special.softmax(brute_force(mean, covariance, 100_000), axis=-1)
    predictions = [predictive(CATEGORICAL, mean, covariance, "linearised", seed=seed) for seed in range(16)]
    for name, draws in (("probabilities", probs), ("aleatoric", special.entr(probs).sum(axis=-1))):
        ours = np.stack([getattr(p, name) for p in predictions])
        assert agrees(None, draws, ours)
        # What the points are for: less error than as many independent draws have.
        assert np.mean(ours.var(axis=0, ddof=1)) < 0.5 * np.mean(draws.var(axis=0)) / 1024


def test_expected_entropies_of_the_probit_kinds_against_brute_force():
    mean, covariance = gaussian(5, 3, seed=8)
    probs = special.softmax(brute_force(mean, covariance), axis=-1)
    for kind in ("probit", "probit_covariance"):
        p = predictive(CATEGORICAL, mean, covariance, kind, draws=2**15)
        assert agrees(p.aleatoric, special.entr(probs).sum(axis=-1))
        np.testing.assert_allclose(p.epistemic, p.entropy - p.aleatoric, rtol=1e-12)
        assert p.draws == 1
    one, variance = gaussian(5, 1, seed=9)
    p = special.expit(brute_force(one, variance)[..., 0])
    aleatoric = predictive(BERNOULLI, one, variance, "probit").aleatoric
    assert agrees(aleatoric, special.entr(p) + special.entr(1.0 - p))


def test_an_entropy_below_the_expected_one_is_all_aleatoric():
    """A known logit far above two unknown ones: the probit of the variances alone shrinks only the latter."""
    given = CATEGORICAL, [[6.0, 0.0, 0.0]], [np.diag([0.0, 9.0, 9.0])]
    expected = predictive(*given, "linearised").aleatoric
    too_sure, with_covariance = predictive(*given, "probit"), predictive(*given, "probit_covariance")
    assert too_sure.entropy < 0.5 * expected
    np.testing.assert_allclose(too_sure.aleatoric, too_sure.entropy, rtol=1e-14)
    np.testing.assert_array_equal(too_sure.epistemic, 0.0)
    np.testing.assert_allclose(with_covariance.aleatoric, expected, rtol=1e-12)


def test_covariances_matter_to_the_probit_that_has_them():
    mean, covariance = gaussian(6, 4, seed=2)
    shared = covariance + 25.0
    for kind, invariant in (("probit_covariance", True), ("linearised", True), ("probit", False)):
        near, far = (
            predictive(CATEGORICAL, mean, c, kind, draws=2**14).probabilities for c in (covariance, shared)
        )
        assert (np.abs(near - far).max() < 2e-3) == invariant
    exact = predictive(CATEGORICAL, mean, shared, "linearised", draws=2**14).probabilities
    errors = [
        np.abs(predictive(CATEGORICAL, mean, shared, kind).probabilities - exact).max()
        for kind in ("probit_covariance", "probit")
    ]
    assert errors[0] < 0.3 * errors[1]


def test_the_probit_with_covariances_is_its_formula():
    mean, covariance = gaussian(4, 3, seed=4)
    p = predictive(CATEGORICAL, mean, covariance, "probit_covariance").probabilities
    for n in range(4):
        raw = np.zeros(3)
        for c in range(3):
            for j in range(3):
                spread = covariance[n, c, c] + covariance[n, j, j] - 2.0 * covariance[n, c, j]
                raw[c] += np.exp(-(mean[n, c] - mean[n, j]) / np.sqrt(1.0 + np.pi / 8.0 * spread))
        np.testing.assert_allclose(p[n], (1.0 / raw) / (1.0 / raw).sum(), rtol=1e-12)


def test_two_logits_are_one():
    """Their difference decides; the kinds that know covariances say the same in both descriptions."""
    mean, covariance = gaussian(5, 2, seed=6)
    f = mean[:, 1:] - mean[:, :1]
    variance = (covariance[:, 0, 0] + covariance[:, 1, 1] - 2.0 * covariance[:, 0, 1])[:, None, None]
    one, two = (
        predictive(BERNOULLI, f, variance, "probit"),
        predictive(CATEGORICAL, mean, covariance, "probit_covariance"),
    )
    np.testing.assert_allclose(two.probabilities, one.probabilities, rtol=1e-12)
    halves = np.array([[1.0, -1.0], [-1.0, 1.0]]) * variance / 4.0
    for kind in ("bridge", "bridge_norm"):
        one = predictive(BERNOULLI, f, variance, kind)
        two = predictive(CATEGORICAL, np.concatenate([-f, f], axis=1) / 2.0, halves, kind)
        np.testing.assert_allclose(two.probabilities, one.probabilities, rtol=1e-10)
        np.testing.assert_allclose(two.epistemic, one.epistemic, rtol=1e-8)


# --- laplace-torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("kind", ["probit", "bridge", "bridge_norm"])
def test_laplace_torch_says_the_same(classes, kind):
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import FullLaplace

    mean, covariance = gaussian(20, classes, seed=classes)

    class GivenLogits(FullLaplace):
        """laplace-torch's predictive from logits that are given instead of computed by a network."""

        _device, _dtype = torch.device("cpu"), torch.float64

        def __init__(self):
            self.likelihood = "classification"

        def _glm_predictive_distribution(self, X, joint=False, diagonal_output=False):
            return torch.tensor(mean), torch.tensor(covariance)

    theirs = GivenLogits()(torch.zeros(20, 1), pred_type="glm", link_approx=kind)
    assert isinstance(theirs, torch.Tensor)
    ours = predictive(CATEGORICAL, mean, covariance, kind).probabilities
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5)


# --- the Laplace bridge -----------------------------------------------------------------------------------


def dirichlet(mean, covariance, normalise):
    """alpha of the bridge for one row, as it stands in the paper."""
    ones = np.ones(len(mean))
    total = covariance.sum()
    m = mean - covariance @ ones * mean.sum() / total
    v = np.diag(covariance - np.outer(covariance @ ones, ones @ covariance) / total)
    size = len(mean)
    if normalise:
        factor = v.mean() / np.sqrt(size / 2.0)
        m, v = m / np.sqrt(factor), v / factor
    return (1.0 - 2.0 / size + np.exp(m) * np.exp(-m).sum() / size**2) / v


@pytest.mark.parametrize("normalise", [False, True])
def test_entropies_of_the_bridge_are_those_of_its_dirichlet(normalise):
    mean, covariance = gaussian(5, 4, seed=5, scale=1.5)
    p = predictive(CATEGORICAL, mean, covariance, "bridge_norm" if normalise else "bridge")
    rng = np.random.default_rng(0)
    for n in range(5):
        probs = rng.dirichlet(dirichlet(mean[n], covariance[n], normalise), 100_000)
        assert agrees(p.probabilities[n], probs)
        assert agrees(p.aleatoric[n], special.entr(probs).sum(axis=-1))
    assert (p.epistemic > 0.0).all()


def test_one_logit_has_the_beta_with_its_mode_and_curvature():
    f, s = np.array([-1.2, 0.0, 2.5]), np.array([0.3, 1.0, 2.0])
    p = predictive(BERNOULLI, f[:, None], (s**2)[:, None, None], "bridge")
    np.testing.assert_allclose(p.mean, special.expit(f), rtol=1e-12)
    a, b = (1.0 + np.exp(f)) / s**2, (1.0 + np.exp(-f)) / s**2
    # In the logit basis the density of Beta(a, b) is exp(a t - (a + b) log(1 + exp(t))).
    np.testing.assert_allclose(a - (a + b) * special.expit(f), 0.0, atol=1e-12)
    np.testing.assert_allclose((a + b) * special.expit(f) * special.expit(-f), 1.0 / s**2, rtol=1e-12)
    for n in range(3):
        wanted = integrate.quad(
            lambda q, n=n: (special.entr(q) + special.entr(1.0 - q)) * stats.beta.pdf(q, a[n], b[n]),
            0.0,
            1.0,
            epsabs=1e-12,
        )[0]
        np.testing.assert_allclose(p.aleatoric[n], wanted, rtol=1e-8)


def test_a_bridge_without_a_variance_to_stand_on_is_refused():
    with pytest.raises(CurvatureError, match="1 of 2 rows, the first being 1"):
        predictive(BERNOULLI, [[0.0], [1.0]], [[[1.0]], [[0.0]]], "bridge")
    # Given that the logits sum to zero, a covariance of rank one leaves them no freedom.
    with pytest.raises(CurvatureError, match="bridge"):
        predictive(CATEGORICAL, [[0.0, 1.0, 2.0]], [np.diag([1.0, 0.0, 0.0])], "bridge_norm")


# --- limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linearised", "probit", "probit_covariance"])
def test_without_covariance_there_is_the_plain_link(kind):
    mean, _ = gaussian(6, 3)
    p = predictive(CATEGORICAL, mean, np.zeros((6, 3, 3)), kind)
    np.testing.assert_allclose(p.probabilities, special.softmax(mean, axis=-1), rtol=1e-12)
    np.testing.assert_allclose(p.epistemic, 0.0, atol=1e-12)
    if kind != "probit_covariance":
        p = predictive(BERNOULLI, mean[:, :1], np.zeros((6, 1, 1)), kind)
        np.testing.assert_allclose(p.mean, special.expit(mean[:, 0]), rtol=1e-12)
        np.testing.assert_allclose(p.epistemic, 0.0, atol=1e-12)


def test_two_classes_of_the_bridge_go_to_the_plain_link():
    mean, covariance = gaussian(6, 2)
    p = predictive(CATEGORICAL, mean, 1e-9 * covariance, "bridge")
    shift = covariance.sum(axis=-1) / covariance.sum(axis=(1, 2))[:, None] * mean.sum(axis=-1)[:, None]
    np.testing.assert_allclose(p.probabilities, special.softmax(mean - shift, axis=-1), rtol=1e-9)
    np.testing.assert_allclose(p.epistemic, 0.0, atol=1e-7)


@pytest.mark.parametrize("kind", ["linearised", "probit", "probit_covariance", "bridge", "bridge_norm"])
def test_logits_far_apart_stay_finite(kind):
    mean = np.array([[900.0, -900.0, 0.0], [0.0, 0.0, 0.0]])
    covariance = np.stack([np.diag([1.0, 2.0, 3.0]), np.diag([1e-12, 1e-12, 1e-12])])
    p = predictive(CATEGORICAL, mean, covariance, kind)
    np.testing.assert_allclose(p.probabilities, [[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], atol=1e-9)
    assert np.isfinite(p.epistemic).all()


def test_singular_covariances_are_drawn_from_as_they_are():
    direction = np.array([1.0, -2.0, 1.0])
    covariance = np.stack([np.outer(direction, direction), np.zeros((3, 3)), np.eye(3)])
    mean = np.zeros((3, 3))
    p = predictive(CATEGORICAL, mean, covariance, "linearised", draws=4096)
    wanted = [over_z(lambda z, c=c: special.softmax(direction * z)[c]) for c in range(3)]
    np.testing.assert_allclose(p.probabilities[0], wanted, atol=1e-3)
    np.testing.assert_allclose(p.parameters["probs"][:, 1], 1.0 / 3.0, rtol=1e-12)
    logits = np.log(p.parameters["probs"][:, 0])
    np.testing.assert_allclose(logits[:, 0], logits[:, 2], atol=1e-6)
    with pytest.raises(CurvatureError, match="semidefinite"):
        predictive(CATEGORICAL, [[0.0, 0.0]], [[[1.0, 2.0], [2.0, 1.0]]], "linearised")


# --- draws ------------------------------------------------------------------------------------------------


class Counts:
    """A likelihood that this library's quadratures do not know."""

    def mixture_parameters(self, eta):
        return "Poisson", {"rate": np.exp(eta[..., 0])}


def test_any_likelihood_is_averaged_over_draws():
    p = predictive(Counts(), [[0.5], [1.0]], [[[0.2]], [[0.0]]], "linearised", draws=2**14)
    assert kinds_of(Counts()) == ("linearised",)
    np.testing.assert_allclose(p.mean, np.exp([0.5 + 0.1, 1.0]), rtol=1e-4)
    np.testing.assert_allclose(p.epistemic[0], np.exp(1.2) * np.expm1(0.2), rtol=5e-3)
    assert predictive(Counts(), [[0.5]], [[[0.2]]], "linearised").draws == 1024


def test_seeds_and_rows():
    mean, covariance = gaussian(6, 3)
    covariance[4] = 0.0
    first, again, other = (
        predictive(CATEGORICAL, mean, covariance, "linearised", seed=seed).parameters["probs"]
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
    some = predictive(CATEGORICAL, mean[:3], covariance[:3], "linearised", seed=1).parameters["probs"]
    np.testing.assert_allclose(first[:, :3], some, rtol=1e-12)


# --- several rows together --------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_joint_moments_against_brute_force(known):
    rows, outputs = 3, 2
    rng = np.random.default_rng(1)
    size = rows * 2 * outputs
    root = 0.35 * rng.normal(size=(size, size)) / np.sqrt(size)
    if known:
        root.reshape(rows, 2 * outputs, size)[:, outputs:] = 0.0
    mean, covariance = rng.normal(size=(rows, 2 * outputs)), root @ root.T
    joint = joint_predictive(GAUSSIAN, mean, covariance)
    eta = (mean.reshape(-1) + rng.normal(size=(200_000, size)) @ root.T).reshape(-1, rows, 2 * outputs)
    f = eta[..., :outputs].reshape(len(eta), -1)
    y = f + np.exp(eta[..., outputs:]).reshape(f.shape) * rng.normal(size=f.shape)
    assert agrees(joint.mean, y)
    for draws, matrix in ((f, joint.function_covariance), (y, joint.covariance)):
        centred = draws - joint.mean
        assert agrees(matrix, centred[:, :, None] * centred[:, None, :])
    blocks = np.stack([covariance.reshape(rows, 4, rows, 4)[n, :, n] for n in range(rows)])
    marginal = predictive(GAUSSIAN, mean, blocks, "linearised", draws=2**15)
    assert joint.covariance is not None
    np.testing.assert_allclose(
        np.diag(joint.covariance), marginal.variance.reshape(-1), rtol=1e-10 if known else 3e-3
    )


def test_joint_covariances_of_logits_are_those_of_f():
    covariance = np.diag(np.arange(1.0, 7.0))
    joint = joint_predictive(CATEGORICAL, np.arange(6.0).reshape(2, 3), covariance)
    np.testing.assert_array_equal(joint.mean, np.arange(6.0))
    np.testing.assert_array_equal(joint.function_covariance, covariance)
    assert joint.covariance is None


# --- kinds, and what is refused ----------------------------------------------------------------------------


def test_kinds():
    assert kinds_of(GAUSSIAN) == ("linearised",)
    assert kinds_of(BERNOULLI) == ("linearised", "probit", "bridge", "bridge_norm")
    assert kinds_of(CATEGORICAL)[:2] == ("linearised", "probit")


def test_a_predictor_that_is_not_finite_is_refused():
    with pytest.raises(InputError, match="NaN"):
        predictive(CATEGORICAL, np.full((1, 2), np.nan), np.zeros((1, 2, 2)), "linearised")
