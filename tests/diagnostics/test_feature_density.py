"""Densities of features, against normal distributions of SciPy and discriminant analysis of scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.metrics import roc_auc_score

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors, scores
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.diagnostics import feature_density as module

WIDTH = 4


def table(rows: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Three classes of different sizes about three centres."""
    rng = np.random.default_rng(0)
    y = rng.choice(3, rows, p=[0.5, 0.3, 0.2])
    return rng.normal(size=(rows, 3)) + 2.0 * np.eye(3)[y], y


def network(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [WIDTH, 3], activation="tanh"), likelihoods.Categorical())


def fitted(ppl: str = "numpyro", model: Any = network, method: Any = None, **options: Any) -> Any:
    x, y = table()
    method = method or bnn.MAP(ppl=ppl, steps=300)
    return bnn.fit(model, 5.0 + 2.0 * x, y, method, progress=False, standardise=True, **options)


def features(posterior: Any, x: np.ndarray) -> np.ndarray:
    w = {name: value[0, 0] for name, value in posterior.draws.items()}
    return np.tanh(posterior.standardisation.inputs(x) @ w["hidden0.weight"] + w["hidden0.bias"])


@pytest.fixture(scope="module")
def posterior() -> Any:
    return fitted()


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_the_density_is_that_of_normal_distributions_of_scipy(
    ppl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In parts that do not divide the rows.
    monkeypatch.setattr(module, "ROWS", 40)
    posterior, (x, y) = fitted(ppl), table()
    z, new = features(posterior, 5.0 + 2.0 * x), 5.0 + 3.0 * x[:30]
    expected = np.zeros(30)
    for label in range(3):
        own = z[y == label]
        normal = multivariate_normal(own.mean(0), np.cov(own.T))
        expected += np.mean(y == label) * normal.pdf(features(posterior, new))
    found = bnn.feature_density(posterior)
    assert found.jitter == 0.0
    np.testing.assert_allclose(found.log_density(new), np.log(expected), rtol=1e-6)


def test_the_classes_are_those_of_discriminant_analysis(posterior: Any) -> None:
    x, y = table()
    z = features(posterior, 5.0 + 2.0 * x)
    theirs = QuadraticDiscriminantAnalysis(store_covariance=True).fit(z, y)
    found = bnn.feature_density(posterior)
    for label, count in enumerate(np.bincount(y)):
        np.testing.assert_allclose(found.means[label], theirs.means_[label], rtol=1e-6)
        spread = found.factors[label] @ found.factors[label].T
        # Theirs divides by the number of rows.
        np.testing.assert_allclose(spread * (count - 1) / count, theirs.covariance_[label], rtol=1e-6)
    np.testing.assert_allclose(found.weights, theirs.priors_)


def test_numbers_have_one_distribution() -> None:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [WIDTH, 1], activation="tanh"), likelihoods.Gaussian(0.5))

    x, _ = table()
    posterior = bnn.fit(model, x, x.sum(1), bnn.MAP(steps=300), progress=False, standardise=True)
    z = features(posterior, x)
    found = bnn.feature_density(posterior, jitter=0.01)
    assert found.weights.tolist() == [1.0]
    normal = multivariate_normal(z.mean(0), np.cov(z.T) + 0.01 * np.eye(WIDTH))
    expected = normal.logpdf(features(posterior, 2.0 * x))
    np.testing.assert_allclose(found.log_density(2.0 * x), expected, rtol=1e-6)


def test_a_posterior_with_a_spread_has_the_features_of_its_centre(posterior: Any, tmp_path: Path) -> None:
    """Laplace's centre is the mode; a stored posterior has the same density."""
    laplace = fitted(method=bnn.Laplace(steps=300))
    x = 5.0 + 3.0 * table()[0]
    near = bnn.feature_density(laplace).log_density(x)
    np.testing.assert_allclose(near, bnn.feature_density(posterior).log_density(x), rtol=0.05, atol=0.5)
    laplace.save(tmp_path / "it")
    again = bnn.feature_density(bnn.load(tmp_path / "it", network)).log_density(x)
    np.testing.assert_array_equal(again, near)


def test_a_network_of_torch_has_features() -> None:
    import torch

    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(3, WIDTH), torch.nn.Tanh()).double()

    def model(x: Any, y: Any = None) -> None:
        h = bnn.module("body", x, body, {"*": None})
        bnn.observe(y, bnn.dense("head", h, 3), likelihoods.Categorical())

    x, y = table()
    posterior = bnn.fit(model, x, y, bnn.MAP(ppl="pyro", steps=50, polish=False), progress=False)
    with torch.no_grad():
        z = body(torch.as_tensor(x)).numpy()
    np.testing.assert_allclose(bnn.feature_density(posterior).means[0], z[y == 0].mean(0), rtol=1e-6)


def test_rows_far_away_are_found(posterior: Any) -> None:
    x, _ = table()
    inside, outside = 5.0 + 2.0 * x, 5.0 + 2.0 * np.random.default_rng(1).normal(-4.0, 1.0, x.shape)
    density = bnn.feature_density(posterior)
    both = [-density.log_density(each) for each in (inside, outside)]
    found = scores.out_of_distribution(*both)
    expected = roc_auc_score(np.repeat([0, 1], [len(inside), len(outside)]), np.concatenate(both))
    assert found["auroc"] == pytest.approx(expected)
    assert found["auroc"] > 0.9


# --- covariances that have no inverse ----------------------------------------------------------------------


def repeated(x: Any, y: Any = None) -> None:
    """The first feature occurs twice, so that covariances have an eigenvalue 0."""
    h = bnn.ops.tanh(bnn.dense("hidden", x, WIDTH))
    h = bnn.ops.concatenate([h, h[:, :1]])
    bnn.observe(y, bnn.dense("output", h, 3), likelihoods.Categorical())


def test_a_singular_covariance_gets_the_least_jitter_that_is_enough() -> None:
    posterior = fitted(model=repeated)
    found = bnn.feature_density(posterior)
    spreads = found.factors @ np.swapaxes(found.factors, 1, 2)
    assert found.jitter > 0.0
    assert np.linalg.cond(spreads).max() == pytest.approx(module.CONDITION, rel=0.01)
    given = bnn.feature_density(posterior, jitter=0.01)
    assert given.jitter == 0.01
    difference = given.factors @ np.swapaxes(given.factors, 1, 2) - spreads
    np.testing.assert_allclose(difference, np.tile(0.01 * np.eye(WIDTH + 1), (3, 1, 1)), atol=1e-9)


def test_classes_without_spread_are_refused(posterior: Any) -> None:
    _, y = table()
    single = np.where(y == 2, 1, y)
    single[0] = 2
    with pytest.raises(InputError, match="two rows of each class; got one row of class 2"):
        bnn.feature_density(replace(posterior, targets=single))
    same = np.tile(posterior.inputs[:1], (len(y), 1))
    with pytest.raises(InputError, match="features that vary in each class; got the same in all rows"):
        bnn.feature_density(replace(posterior, inputs=same))
    with pytest.raises(InputError, match="jitter of feature_density: expected a positive number; got 0"):
        bnn.feature_density(posterior, jitter=0.0)


# --- what has no features ---------------------------------------------------------------------------------


def bent(x: Any, y: Any = None) -> None:
    bnn.observe(y, 2.0 * bnn.mlp(x, [WIDTH, 3]), likelihoods.Categorical())


def of_positions(x: Any, y: Any = None) -> None:
    f = bnn.dense("output", x[:, :, None], 3)
    bnn.observe(y, f.mean(1), likelihoods.Categorical())


def coupled(x: Any, y: Any = None) -> None:
    bnn.coupled()
    network(x, y)


@pytest.mark.parametrize("model", [bent, of_positions, coupled])
def test_other_models_are_refused(model: Any) -> None:
    posterior = fitted(model=model, method=bnn.MAP(steps=5, polish=False))
    with pytest.raises(UnsupportedError, match="feature_density: expected a"):
        bnn.feature_density(posterior)


def test_several_networks_are_refused() -> None:
    chains = fitted(method=bnn.Ensemble(bnn.MAP(steps=5, polish=False), size=2))
    with pytest.raises(UnsupportedError, match=r"a posterior at one network; got .*bnn.MAP\(\)"):
        bnn.feature_density(chains)


def test_inputs_without_finite_features_are_refused() -> None:
    def model(x: Any, y: Any = None) -> None:
        noise = bnn.sample("noise", dist.HalfNormal(1.0))
        h = bnn.ops.exp(bnn.dense("hidden", x, 2, priors.Normal(0.0, 1.0)))
        bnn.observe(y, bnn.dense("output", h, 1), likelihoods.Gaussian(noise))

    x, _ = table()
    posterior = bnn.fit(model, x, x.sum(1), bnn.MAP(steps=100), progress=False)
    with np.errstate(over="ignore"), pytest.raises(InputError, match="finite features"):
        bnn.feature_density(posterior).log_density(1e6 * np.sign(x))
