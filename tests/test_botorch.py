"""A posterior as a model of BoTorch: what BoTorch asks of a model, and that its own pieces work with it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Normal

import ppl_bnn as bnn
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.warning_filters import ignored

# BoTorch has no types for some of what it imports, and scripts functions at its import, of which torch warns.
with ignored("`torch.jit", FutureWarning, everywhere=True):
    pytest.importorskip("botorch", reason="the extra botorch is not installed")

from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement, qUpperConfidenceBound
from botorch.generation import MaxPosteriorSampling
from botorch.models import ModelList
from botorch.optim import optimize_acqf
from botorch.posteriors.ensemble import EnsemblePosterior
from botorch.sampling.get_sampler import get_sampler

from ppl_bnn.botorch import BNNModel

RNG_SEED = 0
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
BEST = (0.3, 0.6)


def quadratic(x: np.ndarray) -> np.ndarray:
    return -np.sum((x - np.array(BEST)) ** 2, axis=1)


def two_outputs(x, y=None):
    noise = bnn.sample("noise", bnn.dist.HalfNormal(0.3))
    bnn.observe(y, bnn.mlp(x, [8, 2], activation="tanh"), bnn.likelihoods.Gaussian(noise))


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(RNG_SEED).uniform(size=(30, 2))
    return x, quadratic(x)


@pytest.fixture(scope="module")
def posterior(rows: tuple[np.ndarray, np.ndarray]) -> bnn.Posterior:
    return bnn.fit(bnn.zoo.load("regression_mlp", width=8), *rows, bnn.Laplace(steps=3000), standardise=True)


@pytest.fixture(scope="module")
def model(posterior: bnn.Posterior) -> BNNModel:
    return BNNModel(posterior, draws=64)


@pytest.fixture(scope="module")
def several(rows: tuple[np.ndarray, np.ndarray]) -> BNNModel:
    x, y = rows
    fitted = bnn.fit(two_outputs, x, np.stack([y, -y], 1), bnn.SVI(ppl="pyro", steps=300, elbo_draws=20))
    return BNNModel(fitted, draws=16)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_types(
    model: BNNModel, several: BNNModel, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    X = torch.rand(*batch, 4, 2, dtype=dtype)
    for each, outputs, draws in ((model, 1, 64), (several, 2, 16)):
        assert each.num_outputs == outputs
        found = each.posterior(X)
        assert isinstance(found, EnsemblePosterior)
        assert found.values.shape == (*batch, draws, 4, outputs)
        assert found.dtype == dtype
        assert found.mean.shape == found.variance.shape == (*batch, 4, outputs)
        assert found.rsample(torch.Size([5])).shape == (5, *batch, 4, outputs)


def test_the_posterior_is_that_of_predictions(model: BNNModel, posterior: bnn.Posterior) -> None:
    """Within 5 standard errors of the 64 functions."""
    x = np.random.default_rng(1).uniform(size=(5, 2))
    prediction, found = posterior.predict(x), model.posterior(torch.tensor(x))
    sd = np.sqrt(prediction.epistemic)
    assert np.all(np.abs(found.mean[:, 0].numpy() - prediction.mean) < 5.0 * sd / np.sqrt(64))
    assert np.all(np.abs(found.variance[:, 0].numpy() / sd**2 - 1.0) < 5.0 * np.sqrt(2.0 / 64))


def test_outputs_transforms_and_subsets(several: BNNModel) -> None:
    X = torch.rand(4, 2, dtype=torch.float64)
    whole = several.posterior(X)
    second = several.posterior(X, output_indices=[1])
    torch.testing.assert_close(second.values, whole.values[..., 1:])
    transform: Any = lambda posterior, X: EnsemblePosterior(3.0 * posterior.values)
    torch.testing.assert_close(several.posterior(X, posterior_transform=transform).values, 3.0 * whole.values)
    # A flag is passed by, as by every ensemble; noise that is given is refused.
    torch.testing.assert_close(several.posterior(X, observation_noise=True).values, whole.values)
    with pytest.raises(Exception, match="observation noise"):
        several.posterior(X, observation_noise=torch.ones(4, 2))


def test_models_side_by_side(model: BNNModel) -> None:
    both = ModelList(model, model)
    X = torch.rand(3, 4, 2, dtype=torch.float64)
    assert both.num_outputs == 2
    assert both.posterior(X).mean.shape == (3, 4, 2)


@pytest.mark.parametrize("acquisition", [qLogExpectedImprovement, qUpperConfidenceBound])
def test_acquisition_functions_have_gradients(model: BNNModel, acquisition: Any) -> None:
    options = {"beta": 0.2} if acquisition is qUpperConfidenceBound else {"best_f": -0.05}
    sampler = get_sampler(model.posterior(BOUNDS), torch.Size([32]), seed=0)
    function = acquisition(model, sampler=sampler, **options)
    X = torch.rand(2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    (gradient,) = torch.autograd.grad(function(X).sum(), X)
    step = torch.zeros_like(X)
    step[1, 2, 0] = 1e-6
    with torch.no_grad():
        difference = (function(X + step).sum() - function(X - step).sum()) / 2e-6
    torch.testing.assert_close(gradient[1, 2, 0], difference, rtol=1e-4, atol=1e-8)


def test_candidates_are_near_the_best_point(model: BNNModel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    """The mean of 30 rows of a quadratic finds its maximum, and so do improvements on the best row."""
    best = float(rows[1].max())
    for function in (LogExpectedImprovement(model, best_f=best), qUpperConfidenceBound(model, beta=0.01)):
        found, _ = optimize_acqf(function, BOUNDS, q=1, num_restarts=4, raw_samples=64, options={"seed": 0})
        assert np.all(np.abs(found[0].numpy() - np.array(BEST)) < 0.15)


def test_thompson_sampling(model: BNNModel) -> None:
    """By BoTorch, and by the functions themselves: the same choice among the same points."""
    X = torch.rand(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen = MaxPosteriorSampling(model, replacement=True)(X, num_samples=5)
    assert chosen.shape == (5, 2)
    assert torch.all((chosen - torch.tensor(BEST)).norm(dim=1) < 0.35)
    values = model.functions(X)
    assert values.shape == (64, 200)
    tops = X[values.argmax(dim=1)]
    assert all(any(torch.equal(row, top) for top in tops) for row in chosen)


def test_new_rows_need_a_new_fit(model: BNNModel) -> None:
    X = torch.rand(2, 2, dtype=torch.float64)
    with pytest.raises(NotImplementedError):
        model.condition_on_observations(X, X[:, :1])


def test_a_posterior_without_a_location_is_refused(rows: tuple[np.ndarray, np.ndarray]) -> None:
    classes = bnn.zoo.load("classification_mlp", width=3)
    fitted = bnn.fit(classes, rows[0], (rows[1] > -0.1).astype(int), bnn.MAP(ppl="pyro", steps=50))
    with pytest.raises(UnsupportedError, match="function_draws: expected a likelihood predicted as"):
        BNNModel(fitted)


def test_what_has_no_functions_of_tensors_is_refused_before_it_is_used(
    rows: tuple[np.ndarray, np.ndarray],
) -> None:
    def written_in_pyro(x: Any, y: Any = None) -> None:
        slope = pyro.sample("slope", Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", Normal(x @ slope, 0.1), obs=y)

    of_pyro = bnn.fit(written_in_pyro, *rows, bnn.MAP(ppl="pyro", steps=50))
    with pytest.raises(UnsupportedError, match="expected a model in the language"):
        BNNModel(of_pyro, draws=1)
    two = bnn.Ensemble(bnn.Laplace(ppl="pyro", steps=50), size=2)
    mixture = bnn.fit(bnn.zoo.load("linear_regression"), *rows, two)
    with pytest.raises(UnsupportedError, match="expected one Gaussian; got Members; try kind='sampled'"):
        BNNModel(mixture)
    assert BNNModel(mixture, draws=4, kind="sampled").posterior(BOUNDS).mean.shape == (2, 1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botorch", None)
    monkeypatch.delitem(sys.modules, "ppl_bnn.botorch")
    with pytest.raises(UnsupportedError, match=r"BNNModel: expected the package botorch.*pip install"):
        __import__("ppl_bnn.botorch")
