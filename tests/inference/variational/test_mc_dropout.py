"""Monte-Carlo dropout on linear regression, where it is ridge regression with a known penalty (Wager et al. 2013).

The statistical ones (the optimum, with mini-batches too, the moments of the predictive, the share of units that are
dropped, draws) failed at none of 20 seeds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import MCDropout, dist, likelihoods, priors
from ppl_bnn.core.errors import DivergenceError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.variational.mc_dropout import Dropped
from tests.problems import Conjugate, regression_data, small_network

OUTPUT = ("output",)


def ridge(problem: Conjugate, rate: float) -> np.ndarray:
    """The weights and the bias that maximise E_z log p(y | x, w) + log p(M) in closed form.

    Dropped inputs z x / (1 - r) have the mean x and the variance r / (1 - r) x^2, so squared errors grow by
    r / (1 - r) sum_j M_j^2 sum_n x_nj^2: a ridge penalty on each weight by the size of its input. The bias has none.
    """
    penalty = np.r_[rate / (1.0 - rate) * (problem.x**2).sum(0) / problem.noise**2, 0.0]
    right = problem.design.T @ problem.y / problem.noise**2
    return np.linalg.solve(problem.precision + np.diag(penalty), right)


def scatter(
    problem: Conjugate, rate: float, optimum: np.ndarray, count: float, batch: int | None = None
) -> np.ndarray:
    """Standard errors of the mean of `count` iterates: A^-1 G A^-1 / count, with G the covariance of the gradient."""
    rng = np.random.default_rng(0)
    gradients = []
    for _ in range(4000):
        rows = slice(None) if batch is None else rng.choice(len(problem.y), batch, replace=False)
        x, y = problem.x[rows], problem.y[rows]
        design = np.column_stack([x * (rng.random(x.shape) >= rate) / (1.0 - rate), np.ones(len(x))])
        scale = len(problem.y) / len(y)
        gradients.append(scale * design.T @ (design @ optimum - y) / problem.noise**2)
    penalty = np.r_[rate / (1.0 - rate) * (problem.x**2).sum(0) / problem.noise**2, 0.0]
    inverse = np.linalg.inv(problem.precision + np.diag(penalty))
    return np.sqrt(np.diag(inverse @ np.cov(np.array(gradients), rowvar=False) @ inverse) / count)


def fitted(posterior) -> np.ndarray:
    return np.r_[posterior.approximation.u["output.weight"][:, 0], posterior.approximation.u["output.bias"]]


# --- the optimum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_optimum_is_a_ridge_regression(ppl, rate):
    problem = Conjugate.make()
    steps = {"numpyro": 20_000, "pyro": 800}[ppl]
    # Begun close by: Adam needs as many steps as there are, divided by its rate, and the scatter forgets the start.
    near = bnn.fit(problem.model, problem.x, problem.y, bnn.MAP(ppl=ppl, steps=100))
    method = MCDropout(rate=rate, layers=OUTPUT, steps=steps, start=near, ppl=ppl)
    posterior = bnn.fit(problem.model, problem.x, problem.y, method)
    wanted = ridge(problem, rate)
    error = scatter(problem, rate, wanted, steps / 2)
    assert np.all(np.abs(fitted(posterior) - wanted) < 5.0 * error)
    # The penalty is seen: without it the weights would be elsewhere.
    assert np.any(np.abs(problem.mean - wanted) > 6.0 * error)
    assert posterior.info.figures["converged"] == 1.0
    assert posterior.info.gradient_evaluations == steps


def test_mini_batches_have_the_same_optimum():
    problem = Conjugate.make(rows=80)
    method = MCDropout(rate=0.2, layers=OUTPUT, steps=20_000, batch_size=20)
    posterior = bnn.fit(problem.model, problem.x, problem.y, method)
    wanted = ridge(problem, 0.2)
    assert np.all(np.abs(fitted(posterior) - wanted) < 5.0 * scatter(problem, 0.2, wanted, 10_000, 20))
    assert posterior.info.gradient_evaluations == 5_000


def test_predictive_moments_are_those_of_the_masks(ppl):
    """f = sum_j z_j x_j M_j / (1 - r) + b: mean x M + b, variance r / (1 - r) sum_j (x_j M_j)^2."""
    problem, rate, count = Conjugate.make(), 0.3, 4000
    method = MCDropout(rate=rate, layers=OUTPUT, steps=300, ppl=ppl)
    posterior = bnn.fit(problem.model, problem.x, problem.y, method)
    x = np.random.default_rng(0).normal(size=(6, 3))
    m = fitted(posterior)
    f = posterior.predictor(x, draws=count)[0, :, :, 0]
    mean, variance = x @ m[:-1] + m[-1], rate / (1.0 - rate) * (x * m[:-1]) ** 2 @ np.ones(3)
    assert np.all(np.abs(f.mean(0) - mean) < 4.5 * np.sqrt(variance / count))
    fourth = ((f - mean) ** 4).mean(0) / variance**2
    assert np.all(np.abs(((f - mean) ** 2).mean(0) / variance - 1.0) < 4.5 * np.sqrt((fourth - 1.0) / count))
    # One mask for all rows: a draw is a linear function of x, whatever the row.
    design = np.column_stack([x, np.ones(6)])
    residual = f.T - design @ np.linalg.lstsq(design, f.T, rcond=None)[0]
    assert np.abs(residual).max() < 1e-9


def test_all_but_the_first_map_are_dropped():
    x, y = regression_data(rows=25)

    def deep(x, y=None):
        f = bnn.mlp(x, [4, 3, 1], activation="tanh")
        bnn.observe(y, f, likelihoods.Gaussian(0.3))

    posterior = bnn.fit(deep, x, y, MCDropout(rate=0.5, steps=20))
    assert posterior.approximation.rates == {"hidden1.weight": 0.5, "output.weight": 0.5}
    draws, m = posterior.draws, posterior.approximation.u
    for name in ("hidden1.weight", "output.weight"):
        kept = draws[name][0] != 0.0
        assert np.array_equal(kept, np.broadcast_to(kept[:, :, :1], kept.shape)), name
        assert 0.45 < kept[:, :, 0].mean() < 0.55
        assert np.allclose(draws[name][0], np.where(kept, 2.0 * m[name], 0.0))
    assert np.all(draws["hidden0.weight"] == m["hidden0.weight"])
    assert np.all(draws["hidden1.bias"] == m["hidden1.bias"])
    only = bnn.fit(deep, x, y, MCDropout(layers=("hidden0",), steps=20))
    assert list(only.approximation.rates) == ["hidden0.weight"]


@pytest.mark.slow
def test_a_convolution_drops_whole_channels(ppl):
    def model(x, y=None):
        h = bnn.ops.tanh(bnn.conv2d("only", x, 2, 3))
        f = bnn.dense("output", h.reshape(h.shape[0], -1), 1)
        bnn.observe(y, f, likelihoods.Gaussian(0.3))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 5, 5, 3)), rng.normal(size=6)
    posterior = bnn.fit(model, x, y, MCDropout(rate=0.4, layers=("only",), steps=10, ppl=ppl))
    weight = posterior.draws["only.weight"][0]
    kept = weight != 0.0
    assert np.array_equal(kept, np.broadcast_to(kept[:, :1, :1, :, :1], kept.shape))
    assert 0.55 < kept[:, 0, 0, :, 0].mean() < 0.65
    # Training drops the same units as a draw does.
    losses = posterior.info.history["loss"]
    assert np.isfinite(losses).all()


def test_point_weights_and_sampled_noise_are_served(ppl):
    """Weights without a prior: dropout alone regularises. The noise is a site, fitted with them."""

    def model(x, y=None):
        noise = bnn.sample("noise", dist.HalfNormal(1.0))
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Point()), likelihoods.Gaussian(noise))

    problem = Conjugate.make()
    posterior = bnn.fit(model, problem.x, problem.y, MCDropout(layers=OUTPUT, steps=300, ppl=ppl))
    assert np.all(posterior.draws["noise"] == posterior.draws["noise"][0, 0])
    assert len(np.unique(posterior.draws["output.weight"][0, :, 0, 0])) == 2


def test_storage_and_draws():
    m = {"a.weight": np.ones((3, 2)), "a.bias": np.zeros(2), "noise": np.asarray(0.5)}
    q = Dropped(m, {"a.weight": 0.25})
    again = Dropped.from_arrays(dict(reversed(q.arrays().items())))
    first, second = (one.draw(2000, np.random.default_rng(1)) for one in (q, again))
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name
    assert set(np.unique(first["a.weight"])) == {0.0, 1.0 / 0.75}
    assert np.all(np.abs(first["a.weight"].mean(0) - 1.0) < 4.5 * math.sqrt(0.25 / 0.75 / 2000))
    assert q.log_prob(first) is None
    assert q.centre()["a.weight"] is m["a.weight"]


# --- what is refused ------------------------------------------------------------------------------


def noncentred(x, y=None):
    scale = bnn.sample("scale", dist.HalfNormal(1.0))
    raw = bnn.sample("raw", dist.Normal(0.0, 1.0).expand((2, 1)).to_event())
    bnn.observe(y, bnn.linear("output", x, scale * raw), likelihoods.Gaussian(0.3))


def twice(x, y=None):
    weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((2, 2)).to_event())
    f = bnn.linear("second", bnn.ops.tanh(bnn.linear("first", x, weight)), weight)
    bnn.observe(y, f[:, :1], likelihoods.Gaussian(0.3))


def elsewhere(x, y=None):
    weight = bnn.sample("weight", dist.Normal(0.0, 1.0).expand((2, 1)).to_event())
    bnn.observe(y, bnn.linear("output", x, weight) + (weight**2).sum(), likelihoods.Gaussian(0.3))


def positive(x, y=None):
    weight = bnn.sample("weight", dist.HalfNormal(1.0).expand((2, 1)).to_event())
    bnn.observe(y, bnn.linear("output", x, weight), likelihoods.Gaussian(0.3))


@pytest.mark.parametrize(
    ("model", "layer", "got"),
    [
        (noncentred, "output", "computed"),
        (twice, "second", "'weight', used more than once"),
        (elsewhere, "output", "another use outside of linear maps"),
        (positive, "output", "constraint"),
    ],
)
def test_weights_that_cannot_be_dropped_are_refused_by_name(ppl, model, layer, got):
    x, y = regression_data(rows=10)
    with pytest.raises(UnsupportedError, match=f"layer '{layer}'.*a site by itself.*{got}"):
        bnn.fit(model, x, y, MCDropout(layers=(layer,), ppl=ppl))


def test_layers_that_are_not_there():
    x, y = regression_data(rows=10)
    problem = Conjugate.make()
    with pytest.raises(UnknownNameError, match=r"unknown layer 'outputs': did you mean 'output'"):
        bnn.fit(small_network, x, y, MCDropout(layers=("outputs",)))
    with pytest.raises(UnsupportedError, match=r"after the first.*\['output'\].*layers=\('output',\)"):
        bnn.fit(problem.model, problem.x, problem.y, MCDropout())


def test_divergence_names_step_and_history(ppl):
    def model(x, y=None):
        f = bnn.ops.exp(bnn.ops.exp(bnn.mlp(x, [1], prior=priors.Normal(0.0, 100.0))))
        bnn.observe(y, f, likelihoods.Gaussian(1e-3))

    x, y = regression_data()
    start = {"output.weight": np.full((2, 1), 5.0), "output.bias": np.array([5.0])}
    with pytest.raises(DivergenceError, match=r"MCDropout.*finite loss.*at step 0 \(the first loss\)"):
        bnn.fit(model, x, y, MCDropout(layers=OUTPUT, start=start, ppl=ppl))


def test_impossible_settings():
    for wrong, words in (
        ({"rate": 0.0}, "rate.*between 0 and 1"),
        ({"rate": 1.0}, "rate.*between 0 and 1"),
        ({"steps": 0}, "steps.*at least 1"),
        ({"learning_rate": "fast"}, "learning_rate.*positive number"),
        ({"batch_size": 0}, "batch_size.*at least 1"),
        ({"layers": "output"}, "names of layers"),
        ({"layers": ()}, "names of layers"),
    ):
        with pytest.raises(InputError, match=words):
            MCDropout(**wrong)


def test_models_that_cannot_be_served(ppl):
    def local(x, y=None):
        with bnn.rows(x.shape[0]):
            shift = bnn.sample("shift", dist.Normal(0.0, 1.0))
        f = bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0))
        bnn.observe(y, f + shift[:, None], likelihoods.Gaussian(0.5))

    problem = Conjugate.make()
    with pytest.raises(UnsupportedError, match=r"MCDropout.*per-row latent"):
        bnn.fit(local, problem.x, problem.y, MCDropout(layers=OUTPUT, ppl=ppl))
    with pytest.raises(InputError, match="at most the 40 rows"):
        bnn.fit(problem.model, problem.x, problem.y, MCDropout(layers=OUTPUT, batch_size=41, ppl=ppl))


def test_a_plain_model_is_refused():
    import numpyro
    import numpyro.distributions

    def plain(x, y=None):
        w = numpyro.sample("w", numpyro.distributions.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("obs", numpyro.distributions.Normal(x @ w, 0.5), obs=y)

    x, y = regression_data(rows=10)
    with pytest.raises(UnsupportedError, match=r"MCDropout.*model in the language.*plain numpyro model"):
        bnn.fit(plain, x, y, MCDropout())
