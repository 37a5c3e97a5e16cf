"""Functions drawn from a posterior: the predictor of their draws, jointly over rows, and gradients in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.posterior.function_draws import FunctionDraws
from tests.problems import regression_data

X, Y = regression_data(rows=25)
NEW = np.random.default_rng(1).normal(size=(6, 2))
METHODS = {
    "laplace": bnn.Laplace(steps=300),
    "laplace-pyro": bnn.Laplace(ppl="pyro", steps=300),
    "sampled": bnn.SVI(steps=200, elbo_draws=20),
    "pyro": bnn.SVI(ppl="pyro", steps=200, elbo_draws=20),
    "members": bnn.Ensemble(bnn.MAP(steps=200), size=3),
    "chains": bnn.NUTS(warmup=20, draws=20, chains=2),
}


def network(x, y=None):
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    # A scale of its own, so that a linearised weight is not the derivative in one coordinate.
    f = bnn.mlp(x, [4, 1], activation="tanh", prior=bnn.priors.Hierarchical())
    bnn.observe(y, f, bnn.likelihoods.Gaussian(noise))


def of_two(x, y=None):
    bnn.observe(y, bnn.mlp(x, [3, 2], activation="tanh"), bnn.likelihoods.Gaussian(0.1))


@pytest.fixture(scope="module")
def posteriors():
    cache: dict[str, bnn.Posterior] = {}

    def get(name: str) -> bnn.Posterior:
        if name not in cache:
            cache[name] = bnn.fit(network, X, 5.0 + 3.0 * Y, METHODS[name], standardise=True)
        return cache[name]

    return get


@pytest.mark.parametrize("name", METHODS)
def test_values_in_torch_are_those_in_numpy(name: str, posteriors: Any) -> None:
    f = posteriors(name).function_draws(3)
    found = f(NEW)
    assert len(f) == 3
    assert found.shape == (3, 6)
    np.testing.assert_allclose(f(torch.tensor(NEW)).numpy(), found, rtol=1e-9, atol=1e-12)
    # Any leading axes, and single precision.
    np.testing.assert_array_equal(f(torch.tensor(NEW).reshape(2, 3, 2)).reshape(3, 6), f(torch.tensor(NEW)))
    single = f(torch.tensor(NEW, dtype=torch.float32))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["laplace", "sampled"])
def test_gradients_are_those_of_differences(name: str, posteriors: Any) -> None:
    f = posteriors(name).function_draws(2)
    x = torch.tensor(NEW, requires_grad=True)
    (gradient,) = torch.autograd.grad(f(x)[1].sum(), x)
    step = 1e-5
    for column in range(2):
        change = step * np.eye(2)[column]
        difference = (f(NEW + change)[1] - f(NEW - change)[1]) / (2 * step)
        np.testing.assert_allclose(gradient[:, column].numpy(), difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["laplace", "chains"])
def test_functions_have_the_moments_of_predictions(name: str, posteriors: Any) -> None:
    """Of all draws of the chains exactly; of a Gaussian within 5 standard errors of 4000 draws."""
    posterior = posteriors(name)
    exact, count = (True, 40) if name == "chains" else (False, 4000)
    values, prediction = posterior.function_draws(count)(NEW), posterior.predict(NEW)
    sd = np.sqrt(prediction.epistemic)
    error = np.abs(values.mean(0) - prediction.mean)
    assert np.all(error <= (1e-9 if exact else 5.0 * sd / np.sqrt(count)))
    ratio = values.var(axis=0) / prediction.epistemic
    np.testing.assert_allclose(ratio, 1.0, atol=1e-6 if exact else 5.0 * np.sqrt(2.0 / count))


def test_values_at_several_rows_are_joint(posteriors: Any) -> None:
    posterior = posteriors("laplace")
    values, joint = posterior.function_draws(4000)(NEW), posterior.joint(NEW)
    covariance = joint.function_covariance
    sd = np.sqrt(np.diag(covariance))
    error = np.abs(np.cov(values.T) - covariance)
    assert np.all(error <= 5.0 * np.sqrt(2.0 / 4000) * np.outer(sd, sd))


def test_seeds_and_kinds(posteriors: Any) -> None:
    posterior = posteriors("laplace")
    first = posterior.function_draws(3, seed=1)(NEW)
    np.testing.assert_array_equal(first, posterior.function_draws(3, seed=1)(NEW))
    assert np.all(first != posterior.function_draws(3, seed=2)(NEW))
    sampled = posterior.function_draws(3, seed=1, kind="sampled")
    assert np.all(first != sampled(NEW))
    np.testing.assert_allclose(sampled(torch.tensor(NEW)).numpy(), sampled(NEW), rtol=1e-9)


def test_chains_have_each_draw_once(posteriors: Any) -> None:
    posterior = posteriors("chains")
    values = posterior.function_draws(40)(NEW)
    np.testing.assert_allclose(
        np.sort(values[:, 0]), np.sort(posterior.function_draws(40, seed=3)(NEW)[:, 0])
    )
    assert len(np.unique(values[:, 0])) == len(np.unique(posterior.draws["noise"]))
    with pytest.raises(InputError, match="function_draws count: expected at most the 40 there are"):
        posterior.function_draws(41)
    with pytest.raises(InputError, match="a positive number"):
        posterior.function_draws(0)


def test_parts_are_drawn_by_their_weights(posteriors: Any) -> None:
    posterior = posteriors("members")
    weighted = bnn.stack(posterior, NEW, 5.0 + 3.0 * NEW[:, 0])
    weights = weighted.draw_weights
    assert weights is not None
    # Members may be one function up to rounding, with other weights.
    (each,) = posterior.unconstrained_draws["output.weight.base"]
    drawn = weighted.function_draws(3000).u["output.weight.base"]
    shares = [np.mean([np.array_equal(one, member) for one in drawn]) for member in each]
    assert sum(shares) == pytest.approx(1.0)
    assert np.all(np.abs(shares - weights / weights.sum()) <= 5.0 * np.sqrt(0.25 / 3000))


def test_several_outputs() -> None:
    y = np.stack([Y, 2.0 * Y - 1.0], axis=1)
    posterior = bnn.fit(of_two, X, y, bnn.MAP(ppl="pyro", steps=200), standardise=True)
    f = posterior.function_draws(1)
    assert f(NEW).shape == (1, 6, 2)
    np.testing.assert_allclose(f(NEW)[0], posterior.predict(NEW).mean, rtol=1e-9)
    found = f(torch.tensor(NEW).reshape(2, 3, 2))
    assert found.shape == (1, 2, 3, 2)
    np.testing.assert_allclose(found.reshape(1, 6, 2).numpy(), f(NEW), rtol=1e-9)


def test_what_is_refused(posteriors: Any) -> None:
    f = posteriors("sampled").function_draws(2)
    with pytest.raises(InputError, match=r"x: expected a tensor \(..., 2\); got \(6, 3\)"):
        f(torch.zeros(6, 3))
    with pytest.raises(InputError, match="same columns"):
        f(np.zeros((6, 3)))
    classes = bnn.zoo.load("classification_mlp", width=3)
    of_classes = bnn.fit(classes, X, (Y > 0).astype(int), bnn.MAP(ppl="pyro", steps=50))
    with pytest.raises(UnsupportedError, match="function_draws: expected a likelihood predicted as Normal"):
        of_classes.function_draws(1)


def test_a_mixture_of_gaussians_is_linearised_in_numpy_only() -> None:
    posterior = bnn.fit(
        of_two, X, np.stack([Y, Y], 1), bnn.Ensemble(bnn.Laplace(ppl="pyro", steps=50), size=2)
    )
    f = posterior.function_draws(4)
    assert isinstance(f, FunctionDraws)
    assert f(NEW).shape == (4, 6, 2)
    with pytest.raises(UnsupportedError, match="expected one Gaussian; got Members; try kind='sampled'"):
        f(torch.tensor(NEW))
    assert posterior.function_draws(4, kind="sampled")(torch.tensor(NEW)).shape == (4, 6, 2)
