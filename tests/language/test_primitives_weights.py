"""Weights of rows: one that counts k times is the same as k rows, for every likelihood, curvature and system."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Ridge

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError

ROWS = 24
COUNTS = np.arange(ROWS) % 4
REPEATED = np.repeat(np.arange(ROWS), COUNTS)
X = np.random.default_rng(4).normal(size=(ROWS, 2))
Y = np.sin(X[:, 0]) + 0.2 * np.random.default_rng(5).normal(size=ROWS)
NOISE = 0.5


def model_of(likelihood: Any, outputs: int = 1) -> Any:
    def model(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x["x"], [3, outputs], "tanh", priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihood, weight=x["weight"])

    return model


def linear(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x["x"], [1], "tanh", priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(NOISE), weight=x["weight"])


def weighted() -> dict[str, np.ndarray]:
    return {"x": X, "weight": COUNTS.astype(float)}


def repeated() -> dict[str, np.ndarray]:
    return {"x": X[REPEATED], "weight": np.ones(len(REPEATED))}


# Likelihood, outputs, targets. Every class is among the rows that count.
KINDS: dict[str, tuple[Any, int, np.ndarray]] = {
    "gaussian": (likelihoods.Gaussian(NOISE), 1, Y),
    "gaussian of two outputs": (likelihoods.Gaussian(NOISE), 2, np.column_stack([Y, -Y])),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian(), 2, Y),
    "student": (likelihoods.StudentT(4.0, NOISE), 1, Y),
    "mixture": (likelihoods.MixtureDensity(), 6, Y),
    "bernoulli": (likelihoods.Bernoulli(), 1, (Y > 0.0).astype(float)),
    "categorical": (likelihoods.Categorical(), 3, np.digitize(Y, [-0.3, 0.4])),
    "poisson": (likelihoods.Poisson(), 1, np.round(np.exp(Y))),
    "censored": (likelihoods.Censored(likelihoods.Gaussian(NOISE)), 1, np.column_stack([Y, Y < 0.5])),
}


def same_at_one_point(model: Any, y: np.ndarray, ppl: str, predict: bool = True, **settings: Any) -> None:
    """Log joint, curvature and predictions of both data sets at one point, which need not be a mode."""
    start = bnn.fit(model, weighted(), y, bnn.MAP(ppl=ppl, steps=50, polish=False), seed=1)
    method = bnn.Laplace(ppl=ppl, start=start, optimise=False, **settings)
    one, many = bnn.fit(model, weighted(), y, method), bnn.fit(model, repeated(), y[REPEATED], method)
    if predict:
        test = {"x": X, "weight": np.ones(ROWS)}
        first, second = one.predict(test, draws=50), many.predict(test, draws=50)
        np.testing.assert_allclose(first.mean, second.mean, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(first.std, second.std, rtol=1e-6)
    figures = [posterior.info.figures["log_evidence"] for posterior in (one, many)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-8)


def rows_of_kinds(ppl: str, quick: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(kind, ppl, marks=() if kind in quick else pytest.mark.slow, id=f"{kind}, {ppl}")
        for kind in KINDS
    ]


@pytest.mark.parametrize(
    ("kind", "ppl"), [*rows_of_kinds("pyro", tuple(KINDS)), *rows_of_kinds("numpyro", ("categorical",))]
)
def test_a_row_that_counts_k_times_is_k_rows(kind: str, ppl: str) -> None:
    likelihood, outputs, y = KINDS[kind]
    # The predictive of a mixture takes draws, which the order of rows changes.
    of_draws = kind == "mixture"
    curvature = "empirical" if of_draws else "ggn"
    same_at_one_point(model_of(likelihood, outputs), y, ppl, predict=not of_draws, curvature=curvature)


@pytest.mark.parametrize("settings", [
    {"structure": "diag"}, {"structure": "lowrank", "rank": 4}, {"curvature": "empirical"}, {"weights": "last_layer"},
    {"weights": "last_layer", "structure": "diag"}, {"tune": "global"},
], ids=str)  # fmt: skip
def test_every_curvature_has_the_weights(settings: dict[str, Any]) -> None:
    same_at_one_point(model_of(likelihoods.Gaussian(NOISE)), Y, "pyro", **settings)


@pytest.mark.parametrize("settings", [{"curvature": "hessian"}, {"engine": "guide"}], ids=str)
def test_the_hessian_at_a_mode_has_the_weights(settings: dict[str, Any]) -> None:
    method = bnn.Laplace(ppl="pyro", steps=400, **settings)
    one, many = bnn.fit(linear, weighted(), Y, method), bnn.fit(linear, repeated(), Y[REPEATED], method)
    test = {"x": X, "weight": np.ones(ROWS)}
    np.testing.assert_allclose(one.predict(test, draws=50).std, many.predict(test, draws=50).std, rtol=1e-5)


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_the_posterior_mean_is_that_of_weighted_ridge_regression(ppl: str) -> None:
    """Fractions of a row, too; scikit-learn's intercept has no prior, so the constant is a column here."""
    weight = np.random.default_rng(6).uniform(size=ROWS)
    design = np.column_stack([X, np.ones(ROWS)])
    ridge = Ridge(alpha=NOISE**2, fit_intercept=False).fit(design, Y, sample_weight=weight)
    posterior = bnn.fit(linear, {"x": X, "weight": weight}, Y, bnn.MAP(ppl=ppl))
    found = posterior.predict({"x": X, "weight": weight}).mean
    np.testing.assert_allclose(found, design @ ridge.coef_, atol=1e-6)


def test_chains_have_the_weights() -> None:
    """Against the closed form, in standard errors of the mean of the draws."""
    method = bnn.NUTS(warmup=200, draws=500, chains=2)
    posterior = bnn.fit(linear, weighted(), Y, method, seed=1)
    design = np.column_stack([X, np.ones(ROWS)])
    precision = np.eye(3) + design.T @ (COUNTS[:, None] * design) / NOISE**2
    mean = np.linalg.solve(precision, design.T @ (COUNTS * Y)) / NOISE**2
    found = posterior.predict({"x": X, "weight": np.ones(ROWS)})
    spread = np.sqrt(np.einsum("ni,ij,nj->n", design, np.linalg.inv(precision), design))
    # Of 1000 draws of chains that mix well at least 400 are effective: four standard errors.
    np.testing.assert_array_less(np.abs(found.mean - design @ mean) / spread, 4.0 / np.sqrt(400.0))
    np.testing.assert_allclose(np.sqrt(found.mean_function_variance), spread, rtol=4.0 / np.sqrt(800.0))


def test_rows_are_standardised_by_their_weights() -> None:
    for posterior in (
        bnn.fit(linear, weighted(), Y, bnn.MAP(ppl="pyro"), standardise=True),
        bnn.fit(linear, repeated(), Y[REPEATED], bnn.MAP(ppl="pyro"), standardise=True),
    ):
        units: Any = posterior.standardisation
        np.testing.assert_allclose(units.x_mean["x"], X[REPEATED].mean(0), rtol=1e-12)
        np.testing.assert_allclose(units.x_scale["x"], X[REPEATED].std(0), rtol=1e-12)
        np.testing.assert_allclose((units.y_mean, units.y_scale), (Y[REPEATED].mean(), Y[REPEATED].std()))
        assert "weight" not in units.x_mean


def test_mini_batches_take_the_weights_of_their_rows() -> None:
    method = bnn.SVI(steps=3000, batch_size=8, ppl="pyro", elbo_draws=4000)
    one = bnn.fit(linear, weighted(), Y, method)
    many = bnn.fit(linear, repeated(), Y[REPEATED], bnn.SVI(steps=3000, ppl="pyro", elbo_draws=4000))
    figures = [posterior.info.figures for posterior in (one, many)]
    error = np.hypot(*(each["elbo_se"] for each in figures))
    # Steps of batches are noisier, which cost less than 0.02 nats with twenty seeds.
    assert abs(figures[0]["elbo"] - figures[1]["elbo"]) < 4.0 * error + 0.02


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (np.full(ROWS, -1.0), "numbers from 0"),
        (np.zeros(ROWS), "positive number"),
        (np.full(ROWS, np.nan), "finite"),
    ],
)
@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_values_that_count_nothing_are_refused(weight: np.ndarray, text: str, ppl: str) -> None:
    with pytest.raises(InputError, match=text):
        bnn.fit(linear, {"x": X, "weight": weight}, Y, bnn.MAP(ppl=ppl))


def test_a_weight_has_one_number_per_row() -> None:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(1.0), weight=x)

    with pytest.raises(ModelError, match=r"weight of shape \(24,\)"):
        bnn.fit(model, X, Y, bnn.MAP(ppl="pyro"))


def test_rows_with_variables_of_their_own_have_no_weights() -> None:
    def model(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x["x"], [1])
        with bnn.rows(f.shape[0]):
            shift = bnn.sample("shift", dist.Normal(0.0, 1.0))
        bnn.observe(y, f + shift[:, None], likelihoods.Gaussian(1.0), weight=x["weight"])

    with pytest.raises(ModelError, match=r"bnn\.rows"):
        bnn.fit(model, weighted(), Y, bnn.NUTS(warmup=5, draws=5))


def test_streamed_rows_have_no_weights() -> None:
    method = bnn.SVI(batch_size=8, stream=True, ppl="pyro")
    with pytest.raises(UnsupportedError, match="rows in memory, whose weights are checked"):
        bnn.fit(linear, weighted(), Y, method)


def test_standardised_weights_are_named() -> None:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x["x"], [1]), likelihoods.Gaussian(1.0), weight=x["count"])

    x = {"x": X, "count": COUNTS.astype(float)}
    # A column of that name that is no weight of the model would weight the means.
    for given in (x, x | {"weight": np.arange(1.0, ROWS + 1.0)}):
        with pytest.raises(InputError, match="entry 'weight'"):
            bnn.fit(model, given, Y, bnn.MAP(ppl="pyro"), standardise=True)
    assert bnn.fit(model, x, Y, bnn.MAP(ppl="pyro", steps=10)).kind == "point"


@pytest.mark.parametrize(
    "method",
    [
        bnn.Laplace(structure="kron", ppl="pyro"),
        bnn.Laplace(noise="evidence", ppl="pyro"),
        bnn.SVI(guide={"last_layer": "fullrank", "*": "delta"}, estimator="closed_form", ppl="pyro"),
    ],
    ids=["kron", "evidence", "closed form"],
)
def test_formulas_for_rows_that_count_once_are_refused(method: Any) -> None:
    with pytest.raises(UnsupportedError, match="rows that all count once"):
        bnn.fit(model_of(likelihoods.Gaussian(NOISE)), weighted(), Y, method)
