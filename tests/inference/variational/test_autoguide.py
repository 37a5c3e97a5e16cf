"""Guides written by hand in Pyro: their draws are made at once, and are those of the guide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch

import ppl_bnn as bnn
from ppl_bnn import SVI
from ppl_bnn.inference.variational import autoguide
from tests.problems import Conjugate

PROBLEM = Conjugate.make(rows=12, features=2)
KEPT = 400
LOC, SCALE = -1.0, 0.3
TRIL = np.array([[0.5, 0.0], [0.4, 0.2]])


def model(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0)), bnn.likelihoods.Gaussian(noise))


def written(calls: list[int], noise: Callable[[], Any], looks: bool = False) -> Callable[..., None]:
    """A guide that counts how often it is run; looks: at what it has drawn, so that its course may depend on it."""

    def guide(x: Any, y: Any = None) -> None:
        calls.append(1)
        loc = pyro.param("loc", torch.zeros(2, 1))
        weight = pyro.sample("output.weight", dist.Normal(loc, 0.5).to_event(2))
        if looks and float(weight.detach().sum()) > 1e9:
            raise AssertionError
        pyro.sample("output.bias", dist.Normal(torch.ones(1), 0.1).to_event(1))
        pyro.sample("noise", noise())

    return guide


def kept(noise: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, looks: bool = False) -> tuple[Any, int]:
    """The draws of a guide whose parameter stays at zero, and how often it was run for them."""
    monkeypatch.setattr(autoguide, "KEPT", KEPT)
    calls: list[int] = []
    steps = 5
    method = SVI(
        ppl="pyro", guide=written(calls, noise, looks), steps=steps, learning_rate=1e-12, elbo_draws=50
    )
    posterior = bnn.fit(model, PROBLEM.x, PROBLEM.y, method)
    return posterior, len(calls) - steps


def log_normal() -> Any:
    return dist.LogNormal(torch.tensor(LOC), torch.tensor(SCALE))


@pytest.mark.parametrize("looks", [False, True], ids=["at once", "one by one"])
def test_draws_and_their_density_are_those_of_the_guide(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """log q against SciPy, in unconstrained coordinates, where a log-normal is a normal; moments in 4.5 errors."""
    posterior, runs = kept(log_normal, monkeypatch, looks)
    # A handful before the first step, and one for the draws, unless they have to be made one by one.
    assert (runs > KEPT) if looks else (runs < 10)
    assert posterior.shape == (1, KEPT)
    u = {name: value[0] for name, value in posterior.unconstrained_draws.items()}
    wanted = (
        scipy.stats.norm.logpdf(u["output.weight"], 0.0, 0.5).sum((1, 2))
        + scipy.stats.norm.logpdf(u["output.bias"], 1.0, 0.1).sum(1)
        + scipy.stats.norm.logpdf(u["noise"], LOC, SCALE)
    )
    np.testing.assert_allclose(posterior.log_q()[0], wanted, rtol=1e-8)
    z = np.column_stack(
        [u["output.weight"][..., 0] / 0.5, (u["output.bias"] - 1.0) / 0.1, (u["noise"] - LOC) / SCALE]
    )
    assert len(np.unique(z[:, 0])) == KEPT
    assert np.abs(z.mean(0)).max() < 4.5 / math.sqrt(KEPT)
    assert np.abs(z.T @ z / KEPT - np.eye(4)).max() < 4.5 * math.sqrt(2.0 / KEPT)
    np.testing.assert_array_equal(kept(log_normal, monkeypatch, looks)[0].log_q(), posterior.log_q())


def test_a_family_with_a_sampler_of_its_own_is_drawn_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, _ = kept(lambda: dist.Gamma(torch.tensor(5.0), torch.tensor(10.0)), monkeypatch)
    noise = posterior.draws["noise"][0]
    assert len(np.unique(noise)) == KEPT
    assert scipy.stats.kstest(noise, scipy.stats.gamma(5.0, scale=0.1).cdf).pvalue > 1e-4


def test_a_draw_out_of_place_is_that_of_the_distribution() -> None:
    """20 000 draws, means and covariances in 4.5 standard errors, of a correlated normal and of what is made of it."""
    loc, tril = torch.tensor([0.3, -2.0], dtype=torch.float64), torch.tensor(TRIL)
    correlated = dist.MultivariateNormal(loc, scale_tril=tril).expand((20_000,))
    stretched = dist.TransformedDistribution(
        dist.Normal(torch.zeros(20_000, dtype=torch.float64), 1.0),
        [dist.transforms.AffineTransform(1.0, 2.0), dist.transforms.ExpTransform()],
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        z = np.linalg.solve(TRIL, (autoguide._functional_draw(correlated) - loc).numpy().T).T
        logarithms = np.log(autoguide._functional_draw(stretched.to_event(1)).numpy())
    z = np.column_stack([z, (logarithms - 1.0) / 2.0])
    assert np.abs(z.mean(0)).max() < 4.5 / math.sqrt(20_000)
    assert np.abs(z.T @ z / 20_000 - np.eye(3)).max() < 4.5 * math.sqrt(2.0 / 20_000)
    assert autoguide._functional_draw(dist.Gamma(1.0, 1.0)) is None


# --- the losses of the systems, against their own ------------------------------------------------------


def test_pyros_loss_and_its_derivative_are_those_of_trace_elbo() -> None:
    """Also of a site without a reparameterised draw, whose derivative has the score function."""
    import pyro
    import pyro.distributions as pd
    import torch
    from pyro.infer import Trace_ELBO

    from ppl_bnn.inference.variational.autoguide import _surrogate

    def model() -> None:
        rate = pyro.sample("rate", pd.LogNormal(0.0, 1.0))
        count = pyro.sample("count", pd.Poisson(rate))
        with pyro.plate("rows", 3):
            pyro.sample("y", pd.Normal(count, 1.0), obs=torch.tensor([1.0, 2.0, 4.0]))

    def guide() -> None:
        pyro.sample("rate", pd.LogNormal(pyro.param("loc", torch.tensor(0.3)), 0.5))
        pyro.sample("count", pd.Poisson(pyro.param("mean", torch.tensor(2.0))))

    elbo, found = Trace_ELBO(), []
    with pyro.get_param_store().scope(), torch.random.fork_rng(devices=[]):
        guide()
        leaves = [pyro.get_param_store()._params[name] for name in ("loc", "mean")]
        for loss in (
            lambda: elbo.differentiable_loss(model, guide),
            lambda: _surrogate(*next(iter(elbo._get_traces(model, guide, (), {})))),
        ):
            torch.manual_seed(1)
            value = loss()
            found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    assert all(float(each) != 0.0 for each in found[0])
    torch.testing.assert_close(found[1], found[0])


def test_numpyros_loss_and_its_derivative_are_those_of_trace_elbo() -> None:
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as nd
    from numpyro.infer import Trace_ELBO

    from ppl_bnn.inference.variational.autoguide import _minus_elbo

    def model(x: Any, y: Any) -> None:
        slope = numpyro.sample("slope", nd.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", nd.Normal(slope * x, 0.5), obs=y)

    def guide(x: Any, y: Any) -> None:
        scale = numpyro.param("scale", 0.3, constraint=nd.constraints.positive)
        numpyro.sample("slope", nd.Normal(numpyro.param("loc", 0.1), scale))

    x, key = jnp.arange(4.0), jax.random.PRNGKey(3)
    params = {"loc": jnp.array(0.2), "scale": jnp.array(0.4)}
    ours = jax.value_and_grad(lambda params: _minus_elbo(key, params, model, guide, (x, 2.0 * x)))(params)
    theirs = jax.value_and_grad(lambda params: Trace_ELBO().loss(key, params, model, guide, x, 2.0 * x))(
        params
    )
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
