"""Predictions of kind "propagated": closed forms, the linearised network, units, storage, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from tests.problems import Conjugate, regression_data, small_classifier, small_network

STEPS = 60


def relu_network(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [4, 1], "relu", priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(0.3))


def test_linear_regression_is_in_closed_form(ppl: str) -> None:
    problem = Conjugate.make()
    method = bnn.SVI(steps=STEPS, ppl=ppl, dtype="float64")
    posterior = bnn.fit(problem.model, problem.x, problem.y, method)
    approximation: Any = posterior.approximation
    loc, scale = approximation.loc, approximation.scale
    prediction = posterior.predict(problem.x, kind="propagated")
    mean = problem.x @ loc["output.weight"][:, 0] + loc["output.bias"]
    variance = problem.x**2 @ scale["output.weight"][:, 0] ** 2 + scale["output.bias"] ** 2
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(prediction.mean_function_variance, variance, rtol=1e-10)
    np.testing.assert_allclose(prediction.variance, variance + problem.noise**2, rtol=1e-10)


# NumPy computes both predictions, so NumPyro has one model.
@pytest.mark.parametrize(
    ("ppl", "model"),
    [("pyro", small_network), ("pyro", small_classifier), ("pyro", relu_network), ("numpyro", small_network)],
)
def test_a_diagonal_laplace_of_one_hidden_layer_is_the_linearised_one(ppl: str, model: Any) -> None:
    x, y = regression_data()
    y = np.digitize(y, [-0.5, 0.5]) if model is small_classifier else y
    posterior = bnn.fit(model, x, y, bnn.Laplace(structure="diag", steps=200, ppl=ppl, dtype="float64"))
    one, other = (posterior.predict(x, kind=kind) for kind in ("propagated", "linearised"))
    np.testing.assert_allclose(one.log_prob(y), other.log_prob(y), rtol=1e-8)


def test_a_part_of_the_weights_is_the_linearised_one() -> None:
    x, y = regression_data()
    method = bnn.Laplace(structure="diag", weights="last_layer", steps=200, ppl="pyro", dtype="float64")
    posterior = bnn.fit(small_network, x, y, method)
    one, other = (posterior.predict(x, kind=kind) for kind in ("propagated", "linearised"))
    np.testing.assert_allclose(one.log_prob(y), other.log_prob(y), rtol=1e-8)


@pytest.fixture(scope="module")
def posterior() -> Any:
    x, y = regression_data()
    method = bnn.SVI(steps=STEPS, ppl="pyro", dtype="float64")
    return bnn.fit(small_network, x, 100.0 * y + 7.0, method, seed=1, standardise=True)


def test_it_is_near_the_sampled_one_in_original_units(posterior: Any) -> None:
    x, y = regression_data()
    y = 100.0 * y + 7.0
    prediction = posterior.predict(x, kind="propagated")
    sampled = posterior.predict(x, kind="sampled", draws=4000)
    error = np.sqrt(sampled.mean_function_variance / 4000)
    np.testing.assert_array_less(np.abs(prediction.mean - sampled.mean), 5.0 * error)
    np.testing.assert_allclose(prediction.mean_function_variance, sampled.mean_function_variance, rtol=0.15)
    np.testing.assert_allclose(prediction.log_prob(y).mean(), sampled.log_prob(y).mean(), atol=0.02)
    low, high = prediction.interval(0.9)
    assert (low < prediction.mean).all()
    assert (prediction.mean < high).all()
    assert abs(bnn.scores.coverage(prediction, y, 0.9) - bnn.scores.coverage(sampled, y, 0.9)) < 0.05


def test_a_stored_posterior_predicts_the_same(posterior: Any, tmp_path: Path) -> None:
    x, _ = regression_data()
    loaded = bnn.load(posterior.save(tmp_path / "fit"), small_network)
    for kind in ("propagated", "sampled"):
        one, other = posterior.predict(x, kind=kind), loaded.predict(x, kind=kind)
        np.testing.assert_array_equal(one.mean, other.mean)


def test_a_stored_laplace_keeps_its_kinds(tmp_path: Path) -> None:
    x, y = regression_data()
    posterior = bnn.fit(small_network, x, y, bnn.Laplace(structure="diag", steps=50, ppl="pyro"))
    assert posterior.approximation.kinds == ("linearised", "sampled", "propagated")
    loaded = bnn.load(posterior.save(tmp_path / "fit"), small_network)
    assert loaded.approximation.kinds == posterior.approximation.kinds


def test_rows_in_chunks_are_the_rows_at_once(posterior: Any) -> None:
    x = np.random.default_rng(0).normal(size=(1500, 2))
    whole = posterior.predict(x, kind="propagated")
    parts = [posterior.predict(x[i : i + 500], kind="propagated").mean for i in (0, 500, 1000)]
    np.testing.assert_allclose(whole.mean, np.concatenate(parts), rtol=1e-12)


def test_an_ensemble_is_the_mixture_of_its_members() -> None:
    x, y = regression_data()
    member = bnn.SVI(steps=STEPS, ppl="pyro", dtype="float64")
    posterior = bnn.fit(small_network, x, y, bnn.Ensemble(member=member, size=2))
    whole = posterior.predict(x, kind="propagated")
    assert np.isfinite(whole.log_prob(y)).all()
    sampled = posterior.predict(x, kind="sampled", draws=4000)
    np.testing.assert_allclose(whole.log_prob(y).mean(), sampled.log_prob(y).mean(), atol=0.02)


def test_the_default_kind_and_the_joint_prediction_stay(posterior: Any) -> None:
    x, _ = regression_data()
    np.testing.assert_array_equal(posterior.predict(x).mean, posterior.predict(x, kind="sampled").mean)
    joint = posterior.joint(x[:3], draws=200)
    assert joint.covariance is not None
    assert joint.covariance.shape == (3, 3)


# --- what is refused ------------------------------------------------------------------------------------


def test_what_needs_draws_is_refused(posterior: Any) -> None:
    x, y = regression_data()
    with pytest.raises(InputError, match="kind='propagated'"):
        posterior.predict(x, kind="propagated", draws=10)
    with pytest.raises(UnsupportedError, match="linearised or sampled"):
        posterior.predictor(x, kind="propagated")
    with pytest.raises(UnsupportedError, match="linearised or sampled"):
        posterior.log_likelihood(x, y, kind="propagated")


def test_approximations_without_independent_weights_do_not_list_it() -> None:
    x, y = regression_data()
    for method in (bnn.Laplace(steps=50, ppl="pyro"), bnn.MAP(steps=50, ppl="pyro")):
        posterior = bnn.fit(small_network, x, y, method)
        with pytest.raises(UnknownNameError, match="kind of prediction 'propagated'"):
            posterior.predict(x, kind="propagated")


def test_a_model_of_a_system_is_refused() -> None:
    import pyro
    import pyro.distributions
    import torch

    def model(x: Any, y: Any = None) -> None:
        w = pyro.sample("w", pyro.distributions.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", pyro.distributions.Normal(x @ w, 1.0), obs=y)

    x, y = regression_data()
    posterior = bnn.fit(model, x, y, bnn.SVI(steps=5, ppl="pyro", dtype="float64"))
    with pytest.raises(UnsupportedError, match="a model of pyro"):
        posterior.predict(x, kind="propagated")


def test_variables_of_rows_are_refused() -> None:
    x, y = regression_data()
    posterior = bnn.fit(bnn.zoo.load("latent_inputs"), x, y, bnn.SVI(steps=5, ppl="pyro"))
    with pytest.raises(UnsupportedError, match="latent variables of rows, 'z'"):
        posterior.predict(x, kind="propagated")
