"""HMC in both systems: the closed form of a linear model, lengths of trajectories, statistics and bad arguments."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.mcmc.hmc import HMC
from tests.inference.mcmc.test_nuts import closed_form, fit, network, table, worst_error

CONJUGATE = {
    "numpyro": HMC(draws=500, warmup=300, chains=4),
    "pyro": HMC(draws=500, warmup=200, chains=1, ppl="pyro", num_steps=4),
}
SMALL = {
    "numpyro": {"draws": 12, "warmup": 15, "chains": 2},
    "pyro": {"draws": 6, "warmup": 8, "chains": 2, "ppl": "pyro", "chain_method": "sequential"},
}


@functools.cache
def small_fit(ppl: str) -> Any:
    return fit(HMC(**SMALL[ppl], num_steps=5), network, seed=4)


def test_the_posterior_of_a_linear_model_is_the_closed_form(ppl: str) -> None:
    assert worst_error(fit(CONJUGATE[ppl]), *table()) < 4.0


def test_statistics_have_the_names_and_meaning_of_arviz(ppl: str) -> None:
    posterior = small_fit(ppl)
    names = {"lp", "acceptance_rate", "mean_accept_prob", "step_size", "n_steps", "diverging"}
    statistics = posterior.statistics
    assert set(statistics) == names | ({"energy"} if ppl == "numpyro" else set())
    for value in statistics.values():
        assert value.shape == (2, SMALL[ppl]["draws"])
        assert np.isfinite(value).all()
    assert statistics["diverging"].dtype == bool
    np.testing.assert_allclose(statistics["lp"].ravel(), posterior.log_joint(), rtol=1e-9)
    acceptance = statistics["acceptance_rate"]
    running = np.cumsum(acceptance, axis=1) / np.arange(1, acceptance.shape[1] + 1)
    np.testing.assert_allclose(statistics["mean_accept_prob"], running, rtol=1e-6)
    assert (statistics["step_size"] == statistics["step_size"][:, :1]).all()


def test_a_number_of_steps_is_that_number(ppl: str) -> None:
    posterior = small_fit(ppl)
    assert (posterior.statistics["n_steps"] == 5).all()
    # As many in the warm-up, and what the systems spend on starting.
    method = SMALL[ppl]
    least = method["chains"] * 5 * (method["draws"] + method["warmup"])
    assert least < posterior.info.gradient_evaluations < least + 100


def test_a_length_is_kept_by_whole_steps(ppl: str) -> None:
    posterior = fit(HMC(**SMALL[ppl], trajectory_length=0.7), seed=4)
    steps, size = posterior.statistics["n_steps"], posterior.statistics["step_size"]
    whole = np.ceil(0.7 / size) if ppl == "numpyro" else np.maximum(np.floor(0.7 / size), 1)
    np.testing.assert_array_equal(steps, whole)


def test_a_trajectory_has_a_bound(ppl: str) -> None:
    method = HMC(**SMALL[ppl], trajectory_length=1e6, max_steps=7)
    posterior = fit(method, seed=4)
    assert (posterior.statistics["n_steps"] == 7).all()
    assert any("100% of trajectories were cut short by max_steps=7" in w for w in posterior.info.warnings)
    assert not any("cut short" in warning for warning in small_fit(ppl).info.warnings)


def test_a_quarter_of_a_period_forgets_and_a_whole_one_comes_back() -> None:
    """With the exact covariance as the inverse mass matrix, a normal posterior swings with period 2 pi."""
    x, y = table()
    start = bnn.Laplace().fit(bnn_linear, x, y, device="cpu")
    mean, covariance = closed_form(x, y)
    lag = {}
    for part in (0.25, 1.0):
        method = HMC(
            draws=300,
            warmup=50,
            chains=1,
            start=start,
            mass_matrix="dense",
            adapt_mass_matrix=False,
            trajectory_length=2.0 * math.pi * part,
            target_accept=0.99,
        )
        draws = method.fit(bnn_linear, x, y, device="cpu").draws
        flat = np.concatenate([draws["output.weight"][0, ..., 0], draws["output.bias"][0]], axis=-1)
        z = (flat - mean) / np.sqrt(np.diag(covariance))
        lag[part] = np.mean(z[1:] * z[:-1]) / np.mean(z**2)
    # 900 products: a standard error of 1/30 where successive draws are independent.
    assert abs(lag[0.25]) < 0.2
    assert lag[1.0] > 0.9


def bnn_linear(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(0.5))


def test_a_chain_that_never_moves_is_told() -> None:
    posterior = fit(HMC(draws=12, warmup=1, chains=2, num_steps=1, step_size=1e9))
    for chain in (0, 1):
        assert f"chain {chain} never moved: all its 12 draws are the same" in posterior.info.warnings
    assert (posterior.statistics["lp"] == posterior.statistics["lp"][:, :1]).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_steps": 0}, InputError, "num_steps.*at least 1"),
        ({"num_steps": 2.5}, InputError, "num_steps"),
        ({"trajectory_length": 0.0}, InputError, "trajectory_length.*positive"),
        ({"trajectory_length": float("inf")}, InputError, "trajectory_length"),
        ({"trajectory_length": 1.0, "num_steps": 5}, InputError, "one of them"),
        ({"max_steps": 0}, InputError, "max_steps"),
        ({"max_tree_depth": 5}, UnknownNameError, "max_tree_depth"),
        ({"target_accept": 1.5}, InputError, "HMC target_accept"),
        ({"chain_method": "vectorised", "ppl": "pyro"}, UnsupportedError, "HMC.*pyro.*vectorised"),
        ({"checkpoint": "here", "ppl": "pyro"}, UnsupportedError, "HMC checkpoint.*Pyro"),
    ],
)
def test_impossible_arguments_are_named(options: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        HMC(**options)
