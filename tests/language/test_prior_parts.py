"""Weights of bounded spectral norm, against SVDs of NumPy and the distances that a network keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError
from tests.layer_oracles import Substitute

BOUND = 0.9


def weight_of(v: Any, prior: Any = None) -> Any:
    prior = prior or priors.SpectralNorm(priors.Point(), BOUND)
    with Substitute({"w.base": v}):
        return prior("w", tuple(v.shape), v.shape[0])


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (1, 5), (2, 3, 4, 5)])
def test_a_large_weight_is_divided_and_a_small_one_is_left(shape: tuple[int, ...]) -> None:
    v = np.random.default_rng(0).normal(size=shape)
    largest = np.linalg.svd(v.reshape(-1, shape[-1]), compute_uv=False)[0]
    for factor in (0.999, 1.001, 10.0):
        scaled = v * (factor * BOUND / largest)
        np.testing.assert_allclose(weight_of(scaled), scaled / max(1.0, factor), rtol=1e-12)
        for ppl in ("numpyro", "pyro"):
            chosen = system(ppl)
            with chosen.session("float64", "cpu"):
                found = chosen.to_numpy(weight_of(chosen.asarray(scaled)))
            np.testing.assert_allclose(found, weight_of(scaled), rtol=1e-12)


def test_a_weight_of_norm_one_is_that_of_torch() -> None:
    linear = spectral_norm(torch.nn.Linear(5, 4).double(), n_power_iterations=200)
    original: Any = linear.parametrizations["weight"]
    v = 3.0 * original.original.detach()
    with torch.no_grad():
        original.original.mul_(3.0)
    found = weight_of(v.T, priors.SpectralNorm(priors.Point(), 1.0))
    np.testing.assert_allclose(found, linear.weight.detach().T, rtol=1e-8)


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
@pytest.mark.parametrize("factor", [0.0, 1e-9, 0.5, 2.0])
def test_the_derivative_is_that_of_differences(ppl: str, factor: float) -> None:
    """Also at zero, where all singular values are the same."""
    chosen, step = system(ppl), 1e-6
    direction = np.random.default_rng(1).normal(size=(3, 3))
    with chosen.session("float64", "cpu"):
        toward = chosen.asarray(direction)
        at = factor * np.diag([1.0, 1.0 - 1e-3, 0.5]) if factor else np.zeros((3, 3))

        def function(v: Any) -> Any:
            return (weight_of(v) * toward).sum()

        _, pullback, _ = chosen.vjp(lambda v: (function(v), v), chosen.asarray(at))
        found = chosen.to_numpy(pullback(chosen.asarray(np.ones(()))))
        ends = [
            float(chosen.to_numpy(function(chosen.asarray(at + sign * step * direction)))) for sign in (-1, 1)
        ]
    assert np.sum(found * direction) == pytest.approx((ends[1] - ends[0]) / (2 * step), rel=1e-5)


def test_a_bias_has_the_other_prior_itself() -> None:
    def model(x: Any, y: Any = None) -> None:
        prior = priors.SpectralNorm(priors.Normal(0.0, "fan_in"))
        bnn.observe(y, bnn.mlp(x, [3, 1], prior=prior), likelihoods.Gaussian(1.0))

    names = [site.name for site in bnn.zoo.sketch(model, 2).sites]
    assert names == ["hidden0.weight.base", "hidden0.bias", "output.weight.base", "output.bias"]


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_residual_blocks_keep_distances(ppl: str) -> None:
    """No block changes a distance by more than a factor 1 +- 0.9, whatever the fit makes of its weights."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, 3))
    y = np.sin(3.0 * x).sum(1)

    def network(x: Any, prior: Any) -> Any:
        return bnn.residual(x, lambda h: bnn.ops.tanh(bnn.dense("block", h, 3, prior)))

    def change(prior: Any, **options: Any) -> float:
        def model(x: Any, y: Any = None) -> None:
            f = bnn.dense("output", network(x, prior), 1, priors.Point())
            bnn.observe(y, f, likelihoods.Gaussian(0.1))

        posterior = bnn.fit(model, x, y, bnn.MAP(ppl=ppl, steps=1000, **options), progress=False)
        values = {name: value[0, 0] for name, value in posterior.draws.items()}
        with Substitute(values):
            h = network(x, prior)
        moved, apart = ((each[:, None] - each)[np.triu_indices(40, 1)] for each in (h, x))
        return float(np.abs(np.linalg.norm(moved, axis=1) / np.linalg.norm(apart, axis=1) - 1.0).max())

    assert 0.5 < change(priors.SpectralNorm(priors.Point(), 0.9)) <= 0.9
    assert change(priors.Point()) > 1.0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match=r"priors\.SpectralNorm bound: expected a positive number"):
        priors.SpectralNorm(priors.Point(), 0.0)
    with pytest.raises(InputError, match=r"expected a prior; got 0.9.*priors.Point\(\)"):
        priors.SpectralNorm(0.9)
