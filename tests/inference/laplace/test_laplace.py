"""Laplace against closed forms, laplace-torch at the same weights, and its own definition."""

from __future__ import annotations

import warnings
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.core.errors import CurvatureError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.curvature.gaussians import Full
from tests.problems import Conjugate, regression_data, small_classifier, small_network


def classification_data(rows=50, classes=3, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    scores = np.column_stack([x[:, 0], x[:, 1], -x[:, 0] * x[:, 1]])[:, :classes]
    return x, np.argmax(scores + rng.gumbel(size=scores.shape) * 0.3, axis=1)


# --- closed form ----------------------------------------------------------------------------------


@cache
def conjugate(ppl, engine="curvature"):
    """What Adam leaves to go, L-BFGS goes: few steps of Adam find the same mode."""
    problem = Conjugate.make()
    laplace = bnn.Laplace(ppl=ppl, engine=engine, steps=100)
    return problem, bnn.fit(problem.model, problem.x, problem.y, laplace)


@pytest.mark.parametrize("engine", ["curvature", "guide"])
def test_is_exact_on_the_conjugate_model(ppl, engine):
    problem, posterior = conjugate(ppl, engine)
    covariance = posterior.approximation.covariance.covariance()
    assert np.allclose(covariance, problem.covariance, rtol=1e-6)
    assert np.isclose(posterior.info.figures["log_evidence"], problem.log_evidence, rtol=1e-8)


def test_linearised_prediction_is_exact_on_the_conjugate_model(ppl):
    problem, posterior = conjugate(ppl)
    new = np.random.default_rng(0).normal(size=(7, 3))
    mean, variance = problem.predictive(new)
    prediction = posterior.predict(new)
    assert np.allclose(prediction.mean, mean, rtol=1e-6)
    assert np.allclose(prediction.epistemic, variance, rtol=1e-6)
    assert np.allclose(prediction.aleatoric, problem.noise**2)


# --- laplace-torch at the same weights ------------------------------------------------------------


def torch_twin(posterior, sizes):
    """The network of a posterior by MAP as a torch module, float64."""
    import torch

    layers = []
    names = [f"hidden{i}" for i in range(len(sizes) - 1)] + ["output"]
    for index, name in enumerate(names):
        weight, bias = posterior.draws[f"{name}.weight"][0, 0], posterior.draws[f"{name}.bias"][0, 0]
        layer = torch.nn.Linear(*weight.shape).double()
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(weight.T))
            layer.bias.copy_(torch.tensor(bias))
        layers.append(layer)
        if index < len(names) - 1:
            layers.append(torch.nn.Tanh())
    return torch.nn.Sequential(*layers)


def reference_laplace(network, likelihood, x, y, **keywords):
    """laplace-torch 0.3, full Gauss-Newton over all weights, in float64."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace
        from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN  # noqa: F401

        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
        la = Laplace(
            network,
            likelihood,
            subset_of_weights="all",
            hessian_structure="full",
            backend=CurvlinopsGGN,
            **keywords,
        )
        la.fit(loader)
        la.H = la.H.double()
    return la


def in_torch_order(sizes):
    """Positions of torch's flat parameters (weight transposed, layer by layer) in ours."""
    order, start = [], 0
    for fan_in, fan_out in pairwise(sizes):
        block = np.arange(start, start + fan_in * fan_out).reshape(fan_in, fan_out)
        order.extend(block.T.reshape(-1))
        start += fan_in * fan_out
        order.extend(range(start, start + fan_out))
        start += fan_out
    return np.array(order)


def regression_network(x, y=None):
    f = bnn.mlp(x, [4, 1], activation="tanh", prior=priors.Normal(0.0, 0.7))
    bnn.observe(y, f, likelihoods.Gaussian(0.3))


# test_laplace_torch compares both systems.
def test_regression_agrees_with_laplace_torch():
    import torch

    x, y = regression_data(rows=30)
    mode = bnn.fit(regression_network, x, y, bnn.MAP(ppl="pyro", steps=200))
    posterior = bnn.fit(regression_network, x, y, bnn.Laplace(ppl="pyro", start=mode, optimise=False))
    sizes = [2, 4, 1]
    network = torch_twin(mode, sizes[1:])
    with default_double():
        la = reference_laplace(
            network,
            "regression",
            torch.tensor(x),
            torch.tensor(y)[:, None],
            sigma_noise=0.3,
            prior_precision=1 / 0.7**2,
        )
        new = np.random.default_rng(1).normal(size=(9, 2))
        f_mean, f_var = la(torch.tensor(new), pred_type="glm")
        wanted = la.posterior_precision.detach().numpy()
        evidence = float(la.log_marginal_likelihood())
    order = in_torch_order(sizes)
    cholesky = posterior.approximation.covariance.cholesky
    ours = (cholesky @ cholesky.T)[np.ix_(order, order)]
    assert np.allclose(ours, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    prediction = posterior.predict(new)
    assert np.allclose(prediction.mean, f_mean.detach().numpy()[:, 0], rtol=1e-5, atol=1e-7)
    assert np.allclose(prediction.epistemic, f_var.detach().numpy()[:, 0, 0], rtol=1e-5)
    assert np.isclose(evidence, posterior.info.figures["log_evidence"], rtol=1e-5)


def test_classification_agrees_with_laplace_torch():
    import torch

    x, y = classification_data()

    def network_model(x, y=None):
        f = bnn.mlp(x, [4, 3], activation="tanh", prior=priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Categorical())

    mode = bnn.fit(network_model, x, y, bnn.MAP(ppl="pyro", steps=200))
    posterior = bnn.fit(network_model, x, y, bnn.Laplace(ppl="pyro", start=mode, optimise=False))
    sizes = [2, 4, 3]
    with default_double():
        la = reference_laplace(
            torch_twin(mode, sizes[1:]),
            "classification",
            torch.tensor(x),
            torch.tensor(y),
            prior_precision=1.0,
        )
        wanted = la.posterior_precision.detach().numpy()
        new = np.random.default_rng(2).normal(size=(6, 2))
        f_mean, f_var = la._glm_predictive_distribution(torch.tensor(new))
        evidence = float(la.log_marginal_likelihood())
    order = in_torch_order(sizes)
    cholesky = posterior.approximation.covariance.cholesky
    assert np.allclose(
        (cholesky @ cholesky.T)[np.ix_(order, order)], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max()
    )
    mean, covariance = posterior.with_problem(
        lambda problem: posterior.approximation.linearised(problem, new)
    )
    assert np.allclose(mean, f_mean.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert np.allclose(covariance, f_var.detach().numpy(), rtol=1e-5, atol=1e-8)
    assert np.isclose(evidence, posterior.info.figures["log_evidence"], rtol=1e-5)


class default_double:
    """laplace-torch makes tensors of torch's default type."""

    def __enter__(self):
        import torch

        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *exception):
        import torch

        torch.set_default_dtype(self.before)


# --- its own definition ---------------------------------------------------------------------------


def test_both_systems_agree_at_the_same_weights():
    x, y = regression_data(rows=25)
    mode = bnn.fit(small_network, x, y, bnn.MAP())
    found = [
        bnn.fit(small_network, x, y, bnn.Laplace(ppl=ppl, start=mode, optimise=False))
        for ppl in ("numpyro", "pyro")
    ]
    a, b = (posterior.approximation.covariance.cholesky for posterior in found)
    assert np.allclose(a, b, rtol=1e-8, atol=1e-10)
    assert np.allclose(found[0].predict(x).std, found[1].predict(x).std, rtol=1e-8)


def test_quadrature_over_log_noise_equals_draws():
    """The closed form with uncertain noise against the average over draws of the same linearised predictor."""
    x, y = regression_data(rows=15)
    posterior = bnn.fit(small_network, x, y, bnn.Laplace())
    closed, drawn = posterior.predict(x), posterior.predict(x, draws=40_000)
    means = drawn.parameters["loc"]
    error = means.std(0) / np.sqrt(len(means))
    assert np.all(np.abs(closed.mean - drawn.mean) < 4.5 * error)
    assert np.allclose(closed.std, drawn.std, rtol=0.03)
    assert np.allclose(closed.aleatoric, drawn.aleatoric, rtol=0.03)
    grid = np.linspace(-3, 3, 15)
    assert np.allclose(
        closed.log_prob(grid), drawn.log_prob(grid), atol=0.05 * (1 + np.abs(drawn.log_prob(grid)))
    )


def test_linearised_draws_have_the_closed_form_covariance():
    x, y = classification_data()
    posterior = bnn.fit(small_classifier, x, y, bnn.Laplace(ppl="pyro", steps=300))
    mean, covariance = posterior.with_problem(
        lambda problem: posterior.approximation.linearised(problem, x[:4])
    )
    eta = posterior.predictor(x[:4], draws=20_000)[0]
    assert np.allclose(eta.mean(0), mean, atol=5 * np.sqrt(covariance.max() / 20_000))
    sample = np.einsum("sni,snj->nij", eta - eta.mean(0), eta - eta.mean(0)) / len(eta)
    scale = np.sqrt(np.einsum("nii,njj->nij", covariance, covariance))
    assert np.all(np.abs(sample - covariance) < 6 * scale * np.sqrt(2 / 20_000))


def test_kinds_of_prediction_differ_and_are_named():
    x, y = regression_data(rows=25)
    posterior = bnn.fit(small_network, x, y, bnn.Laplace())
    assert posterior.approximation.kinds == ("linearised", "sampled")
    assert not np.allclose(posterior.predict(x).std, posterior.predict(x, kind="sampled").std, rtol=0.01)
    with pytest.raises(UnknownNameError, match="linearised"):
        posterior.predict(x, kind="linearized")


def test_gauss_newton_is_never_indefinite_for_heteroscedastic_noise():
    def model(x, y=None):
        f = bnn.mlp(x, [3, 2], activation="tanh", prior=priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.HeteroscedasticGaussian())

    x, y = regression_data()
    posterior = bnn.fit(model, x, y, bnn.Laplace(ppl="pyro", steps=300))
    assert np.all(posterior.predict(x).epistemic > 0)


def test_a_prior_that_curves_upwards_is_an_error_or_a_documented_repair(ppl):
    """Five rows leave a Student-t prior with few degrees of freedom in its concave tail."""

    def model(x, y=None):
        f = bnn.mlp(x, [1], prior=priors.StudentT(df=1.0, scale=0.01), bias=False)
        bnn.observe(y, f, likelihoods.Gaussian(20.0))

    x, y = np.array([[1.0], [1.0], [2.0], [2.0], [1.5]]), np.array([50.0, 51.0, 100.0, 99.0, 76.0])
    start = {"output.weight": np.array([[20.0]])}
    with pytest.raises(CurvatureError, match="repair='clip'"):
        bnn.fit(model, x * 0.1, y * 0.001, bnn.Laplace(ppl=ppl, start=start, optimise=False))
    posterior = bnn.fit(
        model, x * 0.1, y * 0.001, bnn.Laplace(ppl=ppl, start=start, optimise=False, repair="clip")
    )
    assert any("set to 0" in sentence for sentence in posterior.info.warnings)
    assert np.isfinite(posterior.predict(x).std).all()


def test_a_prior_with_a_kink_is_refused_by_name(ppl):
    def model(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Laplace(0.0, 1.0)), likelihoods.Gaussian(1.0))

    x, y = regression_data()
    with pytest.raises(UnsupportedError, match="kink"):
        bnn.fit(model, x, y, bnn.Laplace(ppl=ppl))


def test_guide_that_cannot_factorise_is_a_named_error(ppl):
    """At a point that is no mode the exact Hessian of a network is indefinite; neither guide may hand that on."""
    x, y = regression_data(rows=10)
    rng = np.random.default_rng(0)
    start = {
        "noise": np.array(0.05),
        "hidden0.weight": rng.normal(size=(2, 3)),
        "hidden0.bias": rng.normal(size=3),
        "output.weight": rng.normal(size=(3, 1)),
        "output.bias": rng.normal(size=1),
    }
    with pytest.raises(CurvatureError, match="AutoLaplaceApproximation failed"):
        bnn.fit(small_network, x, y, bnn.Laplace(ppl=ppl, engine="guide", start=start, optimise=False))


def test_partially_bayesian_network(ppl):
    """Point weights stay where training put them; only the last layer has a spread."""

    def model(x, y=None):
        hidden = bnn.ops.tanh(bnn.dense("hidden0", x, 3, priors.Point()))
        f = bnn.dense("output", hidden, 1, priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Gaussian(0.2))

    x, y = regression_data()
    posterior = bnn.fit(model, x, y, bnn.Laplace(ppl=ppl, steps=300))
    assert np.ptp(posterior.draws["hidden0.weight"], axis=1).max() == 0
    assert np.ptp(posterior.draws["output.weight"], axis=1).min() > 0
    assert np.all(posterior.predict(x).epistemic > 0)


# --- the Gaussian itself --------------------------------------------------------------------------


def test_full_gaussian_against_scipy(rng: np.random.Generator):
    from scipy.stats import multivariate_normal

    root = rng.normal(size=(5, 5))
    precision = root @ root.T + np.eye(5)
    gaussian = Full.of(precision)
    covariance = np.linalg.inv(precision)
    assert np.allclose(gaussian.covariance(), covariance)
    points = rng.normal(size=(4, 5))
    assert np.allclose(gaussian.log_prob(points), multivariate_normal(np.zeros(5), covariance).logpdf(points))
    jacobian = rng.normal(size=(3, 2, 5))
    assert np.allclose(gaussian.project(jacobian), jacobian @ covariance @ jacobian.transpose(0, 2, 1))
    sample = gaussian.sample(100_000, rng)
    scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    assert np.all(np.abs(np.cov(sample.T) - covariance) < 6 * scale * np.sqrt(2 / 100_000))


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (np.diag([1.0, -0.1]), "positive definite"),
        (np.diag([1.0, 0.0]), "positive definite"),
        (np.diag([1.0, np.nan]), "finite"),
        (np.diag([1.0, 1e-16]), "well conditioned"),
    ],
)
def test_no_gaussian_without_spread_or_shape(precision, words):
    with pytest.raises(CurvatureError, match=words):
        Full.of(precision)


def test_settings_that_do_not_exist_yet_are_named():
    with pytest.raises(UnknownNameError, match="full"):
        bnn.Laplace(structure="fulll")
    with pytest.raises(InputError, match="start="):
        bnn.Laplace(optimise=False)


def test_hierarchical_scale_curvature_is_the_full_hessian(ppl):
    """A sampled prior scale couples the weights: the prior's Hessian is not diagonal and must not be taken as such."""

    def model(x, y=None):
        scale = bnn.sample("scale", dist.LogNormal(0.0, 0.3))
        weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((x.shape[1], 1)).to_event())
        bnn.observe(y, bnn.linear("output", x, scale * weight), likelihoods.Gaussian(0.5))

    problem = Conjugate.make()
    posterior = bnn.fit(model, problem.x, problem.y, bnn.Laplace(ppl=ppl))
    mode = posterior.approximation.centre()
    s, w = np.exp(float(mode["scale"])), mode["weight"][:, 0]
    jacobian = np.column_stack([problem.x @ w * s, problem.x * s])
    wanted = jacobian.T @ jacobian / 0.25 + np.diag([1 / 0.09, 1, 1, 1])
    cholesky = posterior.approximation.covariance.cholesky
    assert np.allclose(cholesky @ cholesky.T, wanted, rtol=1e-6)
