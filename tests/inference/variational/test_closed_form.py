"""The last layer in closed form: exact posteriors, quadrature, the package of its authors, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.backends.protocol import Site
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.variational.guides import Guide
from ppl_bnn.language.likelihoods.base import Likelihood
from tests.problems import Conjugate

TRUTH = Conjugate.make(rows=24)
VBLL: dict[str, Any] = {
    "guide": {"last_layer": "fullrank", "*": "delta"},
    "estimator": "closed_form",
    "divergence": "analytic",
}


def rows(count: int = 30, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2))
    return x, np.sin(2.0 * x[:, 0]) + 0.3 * rng.normal(size=count)


def network(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [4, 1], activation="tanh"), likelihoods.Gaussian(0.3))


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
@pytest.mark.parametrize(
    "guide", ["fullrank", {"last_layer": "fullrank"}, {"output.bias, output.weight": "fullrank"}]
)
def test_linear_regression_has_its_exact_posterior_and_evidence(ppl: str, guide: Any) -> None:
    """Nothing is drawn in the objective, so the loss at the end is minus the log evidence, to rounding."""
    method = bnn.SVI(**VBLL | {"guide": guide}, steps=3000, learning_rate=0.02, ppl=ppl)
    posterior = bnn.fit(TRUTH.model, TRUTH.x, TRUTH.y, method)
    np.testing.assert_allclose(posterior.info.history["loss"][-1], -TRUTH.log_evidence, rtol=1e-9)
    assert posterior.info.figures["elbo_se"] < 1e-6
    q = posterior.approximation
    (block,), params = q.guide.blocks, q.guide.parameters_of(q.parameters, 0)
    np.testing.assert_allclose(block.mean(params), TRUTH.mean, atol=1e-4)
    np.testing.assert_allclose(block.variance(params), np.diag(TRUTH.covariance), rtol=1e-3)


@pytest.mark.parametrize("family", ["normal", "lowrank", "fullrank", "matrixnormal"])
@pytest.mark.parametrize("together", [True, False])
def test_the_variance_of_an_output_is_that_of_what_is_drawn(family: str, together: bool) -> None:
    """Draws are linear in the noise, so the outputs of unit noises have its square root."""
    rng = np.random.default_rng(4)
    sites = [Site("output.weight", (3, 2), (3, 2)), Site("output.bias", (2,), (2,))]
    guide = Guide.of(
        {"output": family} if together else {"output.weight": family, "output.bias": "delta"}, sites
    )
    start = guide.start({site.name: rng.normal(size=site.shape) for site in sites}, 0.3, rng)
    params = {name: value + 0.3 * rng.normal(size=value.shape) for name, value in start.items()}
    x = rng.normal(size=(5, 3))

    def outputs(eps: np.ndarray) -> np.ndarray:
        u, _ = guide.draw(params, eps)
        return x @ u["output.weight"] + u["output.bias"][..., None, :]

    each = outputs(np.eye(guide.noise_size)) - outputs(np.zeros((1, guide.noise_size)))
    found = guide.output_variance(params, x, "output.weight", "output.bias")
    np.testing.assert_allclose(found, np.sum(each**2, axis=0), rtol=1e-10)


# --- expected log densities -----------------------------------------------------------------------------


@pytest.mark.parametrize("variance", [0.0, 0.01, 0.5, 4.0])
@pytest.mark.parametrize("mean", [-1.5, 0.3])
@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (likelihoods.Gaussian(0.7), 0.4),
        (likelihoods.Poisson(), 3.0),
        (likelihoods.Bernoulli(), 1.0),
        (likelihoods.Bernoulli(), 0.0),
    ],
)
def test_the_gap_is_that_of_the_expectation(
    likelihood: Likelihood, y: float, mean: float, variance: float
) -> None:
    def log_prob(f: float) -> float:
        # In NumPy, of constants apart: what depends on f.
        if isinstance(likelihood, likelihoods.Gaussian):
            return -0.5 * ((y - f) / likelihood.noise) ** 2
        return y * f - (np.exp(f) if isinstance(likelihood, likelihoods.Poisson) else np.logaddexp(0.0, f))

    sd = np.sqrt(variance) if variance else 1e-6
    expected = quad(lambda f: norm.pdf(f, mean, sd) * log_prob(f), mean - 12 * sd, mean + 12 * sd)[0]
    found = log_prob(mean) + likelihood.jensen_gap(np.array([[mean]]), np.array([[variance]]))
    assert found == pytest.approx(expected, rel=1e-7)


def test_the_gap_of_classes_bounds_the_expectation_and_sums_over_rows() -> None:
    rng = np.random.default_rng(1)
    mean, variance = rng.normal(size=(6, 3)), rng.uniform(0.01, 1.0, (6, 3))
    f = mean + np.sqrt(variance) * rng.normal(size=(200_000, 6, 3))
    drop = np.log(np.exp(mean).sum(-1)) - np.log(np.exp(f).sum(-1)).mean(0)
    by_row = [likelihoods.Categorical().jensen_gap(mean[[n]], variance[[n]]) for n in range(6)]
    assert np.all(by_row < drop)
    assert np.all(by_row > drop - 0.5 * variance.max(-1))
    assert likelihoods.Categorical().jensen_gap(mean, variance) == pytest.approx(np.sum(by_row))
    # The bound is below the expectation where it is known.
    two = [np.stack([0.0 * each[:, 0], each[:, 0]], axis=1) for each in (mean, variance)]
    exact = likelihoods.Bernoulli().jensen_gap(mean[:, :1], variance[:, :1])
    assert exact - 0.5 * variance[:, 0].sum() < likelihoods.Categorical().jensen_gap(*two) < exact


# --- the package of the authors -------------------------------------------------------------------------


def _costs(model: Any, x: np.ndarray, y: np.ndarray, guide: Any, parameters: Any) -> tuple[float, float]:
    """(likelihood cost, complexity cost) at parameters of the guide, in Pyro."""
    from tests.inference.variational.test_objectives import Fixed

    fixed = Fixed("pyro", model, x, y, guide, estimator="closed_form", analytic=True)
    assert list(fixed.parameters) == list(parameters)
    with fixed.system.session("float64", "cpu", threads=1):
        fixed.params = {name: fixed.system.asarray(value) for name, value in parameters.items()}
    values, _ = fixed.sample(1)
    return values[0, 1], values[0, 2]


def test_regression_has_the_loss_of_vbll() -> None:
    torch, vbll = pytest.importorskip("torch"), pytest.importorskip("vbll")
    rng = np.random.default_rng(2)
    x, y, noise = rng.normal(size=(20, 4)), rng.normal(size=20), 0.6

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(
            y, bnn.dense("output", x, 1, priors.Normal(0.0, 0.5), bias=False), likelihoods.Gaussian(noise)
        )

    with torch.no_grad():
        theirs = vbll.Regression(4, 1, regularization_weight=0.05, prior_scale=1.0).double()
        assert theirs.prior_scale == 0.5**2
        theirs.noise_logdiag[:] = np.log(noise)
        q = theirs.W()
        mean, root = q.mean[0].numpy(), q.scale_tril[0].numpy()
        expected = float(theirs(torch.as_tensor(x)).train_loss_fn(torch.as_tensor(y[:, None])))
        noise_of = theirs.noise()
        wishart = float(
            theirs.dof * noise_of.logdet_precision - 0.5 * theirs.wishart_scale * noise_of.trace_precision
        )
    scale = np.diag(root)
    parameters = {
        "0:loc": mean,
        "0:rho": np.log(np.expm1(scale)),
        "0:lower": root / scale[:, None] - np.eye(4),
    }
    likelihood, complexity = _costs(model, x, y, "fullrank", parameters)
    # Theirs is per row, leaves a constant out of the divergence, and has a prior of the noise.
    ours = likelihood / 20 + 0.05 * (complexity + 0.5 * 4) - 0.05 * wishart
    assert ours == pytest.approx(expected, rel=1e-6)


def test_classification_has_the_loss_of_vbll() -> None:
    torch, vbll = pytest.importorskip("torch"), pytest.importorskip("vbll")
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(20, 4)), rng.integers(0, 3, 20)

    def model(x: Any, y: Any = None) -> None:
        prior = priors.Normal(0.0, np.sqrt(0.5))
        bnn.observe(y, bnn.dense("output", x, 3, prior, bias=False), likelihoods.Categorical())

    with torch.no_grad():
        theirs = vbll.DiscClassification(4, 3, 0.05, "diagonal", prior_scale=1.0).double()
        # Ours has no noise on the logits.
        theirs.noise_logdiag[:] = -50.0
        q = theirs.W()
        mean, scale = q.mean.numpy(), q.scale.numpy()
        bound = float(theirs.jensen_bound(torch.as_tensor(x), torch.as_tensor(y)).mean())
        divergence = float(vbll.layers.classification.gaussian_kl(q, theirs.prior_scale))
    parameters = {"0:loc": mean.T.ravel(), "0:rho": np.log(np.expm1(scale)).T.ravel()}
    likelihood, complexity = _costs(model, x, y, "normal", parameters)
    assert likelihood / 20 == pytest.approx(-bound, rel=1e-6)
    assert complexity == pytest.approx(divergence - 0.5 * 12, rel=1e-6)


# --- fits, files and refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_a_network_by_name_is_fitted_and_saved(ppl: str, tmp_path: Any) -> None:
    x, y = rows()
    method = bnn.SVI(**VBLL, steps=300, elbo_draws=20, ppl=ppl)
    posterior = bnn.fit(network, x, y, method)
    draws = posterior.draws
    assert np.ptp(draws["hidden0.weight"], axis=(0, 1)).max() == 0.0
    assert np.ptp(draws["output.weight"], axis=(0, 1)).min() > 0.0
    posterior.save(tmp_path / "kept")
    again = bnn.load(tmp_path / "kept", network)
    np.testing.assert_array_equal(again.predict(x).mean, posterior.predict(x).mean)


def squashed(x: Any, y: Any = None) -> None:
    bnn.observe(y, 2.0 * bnn.mlp(x, [4, 1]), likelihoods.Gaussian(0.3))


def student(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [4, 1]), likelihoods.StudentT(0.3, 4.0))


def tied(x: Any, y: Any = None) -> None:
    weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((2, 2)).to_event())
    h = bnn.linear("first", x, weight, None)
    bnn.observe(y, bnn.linear("second", h, weight, None), likelihoods.Gaussian(0.3))


@pytest.mark.parametrize(
    ("model", "guide", "words"),
    [
        (squashed, VBLL["guide"], "ends with something else"),
        (squashed, "normal", "ends with something else"),
        (student, VBLL["guide"], "expectation has a closed form"),
        (network, {"last_layer": "delta", "*": "normal"}, "a normal over 'output.weight'"),
        (network, {"last_layer": "iaf", "*": "normal"}, "a normal over 'output.weight'"),
        (network, "fullrank", "independent of all but the last layer"),
        (network, {"*.bias": "lowrank", "*": "normal"}, "'output.bias' that leaves it independent"),
        (network, "mixture", "with a mixture"),
        (tied, {"weight": "normal"}, "one use per row of 'weight'"),
    ],
)
def test_what_has_no_closed_form_is_refused(model: Any, guide: Any, words: str) -> None:
    x, y = rows()
    targets = np.stack([y, y], axis=1) if model is tied else y
    with pytest.raises(UnsupportedError, match=words):
        bnn.fit(model, x, targets, bnn.SVI(guide=guide, estimator="closed_form", steps=10, ppl="pyro"))
