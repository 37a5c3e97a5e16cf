"""Random Fourier features: the kernel, a Gaussian process of scikit-learn, the last layer of SNGP by its authors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.layers import basic
from tests.layer_oracles import Substitute

STORED = json.loads((Path(__file__).parents[2] / "sngp_edward2.json").read_text("utf-8"))


def arrays(of: Any, *names: str) -> list[np.ndarray]:
    return [np.asarray(of[name]) for name in names]


def layer_of(x: Any, count: int, length_scale: Any, scale: float = 1.0) -> Any:
    features = bnn.random_features(x, count, length_scale)
    return bnn.dense("output", features, 1, priors.Normal(0.0, scale), bias=False)


# --- the features ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_scale", [0.7, [0.5, 2.0, 1.0]])
def test_products_of_features_are_the_gaussian_kernel(length_scale: Any) -> None:
    x, seeds = np.random.default_rng(0).normal(size=(6, 3)), 300
    kernels = np.stack([z @ z.T for z in (bnn.random_features(x, 8, length_scale, s) for s in range(seeds))])
    error = kernels.std(0, ddof=1) / np.sqrt(seeds)
    assert np.all(np.abs(kernels.mean(0) - RBF(length_scale)(x)) < 4.5 * error)


def test_orthogonal_rows_have_less_error_than_independent_ones() -> None:
    """By the phases alone the variances would be equal; scikit-learn's RBFSampler has independent rows."""
    from sklearn.kernel_approximation import RBFSampler

    x = 0.4 * np.random.default_rng(1).normal(size=(8, 6))
    exact = RBF(1.0)(x)

    def error(features: Callable[[int], np.ndarray]) -> float:
        return float(np.mean([np.mean((z @ z.T - exact) ** 2) for z in map(features, range(300))]))

    ours = error(lambda seed: basic.random_features(x, 12, 1.0, seed))
    theirs = error(lambda seed: RBFSampler(gamma=0.5, n_components=12, random_state=seed).fit_transform(x))
    assert ours < 0.97 * theirs


def test_features_are_the_same_in_both_systems_and_of_the_type_of_the_inputs() -> None:
    x = np.random.default_rng(2).normal(size=(4, 3))
    expected = bnn.random_features(x, 7, 0.8, 5)
    for ppl in ("numpyro", "pyro"):
        for dtype, error in (("float64", 1e-14), ("float32", 1e-5)):
            chosen = system(ppl)
            with chosen.session(dtype, "cpu"):
                found = chosen.to_numpy(bnn.random_features(chosen.asarray(x), 7, 0.8, 5))
            assert found.dtype == dtype
            np.testing.assert_allclose(found, expected, rtol=0.0, atol=error)
    assert np.abs(bnn.random_features(x, 7, 0.8, 6) - expected).max() > 0.1


def test_the_constants_are_what_they_were() -> None:
    """A stored model has the same features with every later version of NumPy and of this library."""
    weight, offset = basic._fourier(2, 3, 0)
    expected = [[0.91798244, -0.6990793, 1.76101935], [0.50931838, 1.26000267, -0.19131945]]
    np.testing.assert_allclose(weight, expected, rtol=0.0, atol=1e-8)
    np.testing.assert_allclose(offset, [3.56912924, 5.8156952, 0.44633272], rtol=0.0, atol=1e-8)


def test_the_length_scale_may_be_a_site() -> None:
    def model(x: Any, y: Any = None) -> None:
        length_scale = bnn.sample("length_scale", dist.LogNormal(0.0, 1.0))
        bnn.observe(y, layer_of(x, 20, length_scale), likelihoods.Gaussian(0.3))

    x = np.random.default_rng(3).normal(size=(30, 2))
    posterior = bnn.fit(model, x, np.sin(x).sum(1), bnn.MAP(steps=500), progress=False)
    assert 0.5 < float(posterior.draws["length_scale"].squeeze()) < 10.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"count": 0}, "random_features: expected a positive whole number as count; got 0"),
        ({"seed": -1}, "a whole number from 0 as seed; got -1"),
        ({"length_scale": 0.0}, "a positive length_scale, or 3 of them; got 0.0"),
        ({"length_scale": [1.0, 2.0]}, r"a positive length_scale, or 3 of them; got \[1.0, 2.0\]"),
        ({"length_scale": float("inf")}, "a positive length_scale, or 3 of them; got inf"),
    ],
)
def test_bad_arguments_are_refused(options: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        bnn.random_features(np.ones((2, 3)), **options)
    with pytest.raises(ModelError, match=r"inputs of shape \(N, features\); got shape \(2, 3, 4\)"):
        bnn.random_features(np.ones((2, 3, 4)))


# --- a dense layer on them ------------------------------------------------------------------------------


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_many_features_are_the_gaussian_process_of_scikit_learn(ppl: str) -> None:
    rng, scale, noise = np.random.default_rng(4), 1.5, 0.4
    x, x_new = rng.normal(size=(25, 2)), rng.normal(size=(9, 2))
    y = np.sin(2.0 * x).sum(1) + noise * rng.normal(size=25)
    count = 2000

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, layer_of(x, count, 1.2, scale), likelihoods.Gaussian(noise))

    kernel = scale**2 * RBF(1.2)
    theirs = GaussianProcessRegressor(kernel, alpha=noise**2, optimizer=None).fit(x, y)
    mean, spread = theirs.predict(x_new, return_std=True)
    found = bnn.fit(model, x, y, bnn.Laplace(ppl=ppl), progress=False).predict(x_new)
    # A kernel of `count` features is off by about 1 / sqrt(count).
    error = 3.0 * scale / np.sqrt(count)
    np.testing.assert_allclose(found.mean, mean, rtol=0.0, atol=error)
    np.testing.assert_allclose(np.sqrt(found.epistemic), spread, rtol=0.0, atol=error)


def in_place_of_ours(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basic, "_fourier", lambda *_: tuple(arrays(part, "weight", "offset")))


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_numbers_have_the_moments_of_edward2(ppl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = STORED["gaussian"]
    in_place_of_ours(stored, monkeypatch)

    def model(x: Any, y: Any = None) -> None:
        f = layer_of(x, STORED["features"], STORED["length_scale"])
        bnn.observe(y, f, likelihoods.Gaussian(STORED["noise"]))

    x, y, x_new = arrays(STORED, "x", "numbers", "x_new")
    mean, covariance = arrays(stored, "mean", "covariance")
    found = bnn.fit(model, x, y, bnn.Laplace(ppl=ppl), progress=False).joint(x_new)
    # Theirs are in float32.
    np.testing.assert_allclose(found.mean, mean, rtol=0.0, atol=1e-4)
    np.testing.assert_allclose(found.function_covariance, covariance, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_classes_have_the_probabilities_of_edward2(ppl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = STORED["binary_logistic"]
    in_place_of_ours(stored, monkeypatch)

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, layer_of(x, STORED["features"], STORED["length_scale"]), likelihoods.Bernoulli())

    x, y, x_new = arrays(STORED, "x", "classes", "x_new")
    mean, covariance, probability = arrays(stored, "mean", "covariance", "probability")
    posterior = bnn.fit(model, x, y, bnn.Laplace(ppl=ppl), progress=False)
    np.testing.assert_allclose(posterior.joint(x_new).function_covariance, covariance, rtol=0.0, atol=1e-4)
    found = posterior.predict(x_new, kind="probit")
    np.testing.assert_allclose(found.probabilities[:, 1], probability, rtol=0.0, atol=1e-4)
    # The mode alone is more certain.
    assert np.abs(expit(mean) - 0.5).min() < np.abs(probability - 0.5).max()
    assert np.all(np.abs(expit(mean) - 0.5) >= np.abs(probability - 0.5) - 1e-6)


def test_the_layer_has_one_site() -> None:
    x = np.random.default_rng(5).normal(size=(3, 2))
    weights = {"output.weight": np.arange(4.0)[:, None]}
    with Substitute(weights):
        found = layer_of(x, 4, 1.0)
    np.testing.assert_allclose(found, bnn.random_features(x, 4) @ weights["output.weight"])
