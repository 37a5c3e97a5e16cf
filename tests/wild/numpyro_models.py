"""Models with the structure of those in the documentation of NumPyro, in our own words and at small sizes.

Each function of `CASES` gives a model, its inputs and its targets, made from a seed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro as system
import numpyro.distributions
from numpyro.infer.reparam import LocScaleReparam

# What NumPyro declares of its types does not let arrays be indexed.
numpyro: Any = system
dist: Any = system.distributions

Case = tuple[Any, Any, np.ndarray]


def network(x: Any, y: Any = None, *, hidden: int, outputs: int = 1) -> None:
    """Two hidden layers, targets (N, 1), sizes bound by functools.partial, an assertion about shapes."""
    rows, features = x.shape
    first = numpyro.sample("first", dist.Normal(jnp.zeros((features, hidden)), jnp.ones((features, hidden))))
    second = numpyro.sample("second", dist.Normal(jnp.zeros((hidden, hidden)), jnp.ones((hidden, hidden))))
    third = numpyro.sample("third", dist.Normal(jnp.zeros((hidden, outputs)), jnp.ones((hidden, outputs))))
    f = jnp.tanh(jnp.tanh(x @ first) @ second) @ third
    if y is not None:
        assert f.shape == y.shape, f"f is {f.shape} and y is {y.shape}"
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("data", rows):
        numpyro.sample("y", dist.Normal(f, 1.0 / jnp.sqrt(precision)).to_event(1), obs=y)


def bnn(rng: np.random.Generator) -> Case:
    t = np.linspace(-1.0, 1.0, 20)
    x = np.power(t[:, None], np.arange(3))
    return partial(network, hidden=3), x, (np.sin(3.0 * t) + 0.1 * rng.normal(size=20))[:, None]


def horseshoe_model(x: Any, y: Any = None) -> None:
    """Half-Cauchy scales for each coefficient and for all; a precision; the coefficients are deterministic."""
    features = x.shape[1]
    local = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(features)))
    overall = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
    raw = numpyro.sample("unscaled_betas", dist.Normal(0.0, jnp.ones(features)))
    betas = numpyro.deterministic("betas", overall * local * raw)
    precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
    numpyro.sample("y", dist.Normal(jnp.sum(betas * x, axis=-1), 1.0 / jnp.sqrt(precision)), obs=y)


def horseshoe(rng: np.random.Generator) -> Case:
    x = rng.normal(size=(30, 4))
    return horseshoe_model, x, x[:, 0] - 0.5 * x[:, 1] + 0.2 * rng.normal(size=30)


def partially_pooled(at_bats: Any, hits: Any = None) -> None:
    """Chances of players with a common beta distribution; the only input is a vector of counts."""
    mean = numpyro.sample("m", dist.Uniform(0.0, 1.0))
    size = numpyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with numpyro.plate("num_players", at_bats.shape[0]):
        chance = numpyro.sample("phi", dist.Beta(mean * size, (1.0 - mean) * size))
        numpyro.sample("obs", dist.Binomial(at_bats, probs=chance), obs=hits)


def baseball(rng: np.random.Generator) -> Case:
    at_bats = np.full(12, 45)
    return partially_pooled, at_bats, rng.binomial(at_bats, rng.beta(8.0, 22.0, size=12))


def not_pooled_with_logits(at_bats: Any, league: Any, hits: Any = None) -> None:
    """Two inputs, one of them an index; log odds around a mean for each league, not centred."""
    with numpyro.plate("leagues", 2):
        level = numpyro.sample("loc", dist.Normal(-1.0, 1.0))
    spread = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("num_players", at_bats.shape[0]):
        with numpyro.handlers.reparam(config={"alpha": LocScaleReparam(0)}):
            alpha = numpyro.sample("alpha", dist.Normal(level[league], spread))
        numpyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def baseball_with_leagues(rng: np.random.Generator) -> Case:
    at_bats, league = np.full(12, 45), np.arange(12) % 2
    return not_pooled_with_logits, (at_bats, league), rng.binomial(at_bats, np.where(league == 0, 0.25, 0.35))


def forecast_model(patient: Any, week: Any, capacity: Any = None) -> None:
    """An intercept and a slope for each patient, which share their means and scales; two 1-D inputs."""
    mean_intercept = numpyro.sample("mu_alpha", dist.Normal(0.0, 1.0))
    scale_intercept = numpyro.sample("sigma_alpha", dist.HalfNormal(1.0))
    mean_slope = numpyro.sample("mu_beta", dist.Normal(0.0, 1.0))
    scale_slope = numpyro.sample("sigma_beta", dist.HalfNormal(1.0))
    with numpyro.plate("patients", 4):
        intercept = numpyro.sample("alpha", dist.Normal(mean_intercept, scale_intercept))
        slope = numpyro.sample("beta", dist.Normal(mean_slope, scale_slope))
    noise = numpyro.sample("sigma", dist.HalfNormal(1.0))
    level = intercept[patient] + slope[patient] * week
    with numpyro.plate("data", len(patient)):
        numpyro.sample("obs", dist.Normal(level, noise), obs=capacity)


def hierarchical_forecasting(rng: np.random.Generator) -> Case:
    patient, week = np.repeat(np.arange(4), 6), np.tile(np.linspace(-1.0, 1.0, 6), 4)
    y = rng.normal(size=4)[patient] + 0.5 * week + 0.2 * rng.normal(size=24)
    return forecast_model, (patient, week), y


def divorce_model(marriage: Any = None, age: Any = None, divorce: Any = None) -> None:
    """A regression on named inputs, all with a default."""
    intercept = numpyro.sample("a", dist.Normal(0.0, 0.2))
    on_marriage = numpyro.sample("bM", dist.Normal(0.0, 0.5))
    on_age = numpyro.sample("bA", dist.Normal(0.0, 0.5))
    noise = numpyro.sample("sigma", dist.Exponential(1.0))
    mean = numpyro.deterministic("mu", intercept + on_marriage * marriage + on_age * age)
    numpyro.sample("obs", dist.Normal(mean, noise), obs=divorce)


def bayesian_regression(rng: np.random.Generator) -> Case:
    marriage, age = rng.normal(size=(2, 25))
    inputs = {"marriage": marriage, "age": age}
    return divorce_model, inputs, -0.6 * age + 0.1 * marriage + 0.3 * rng.normal(size=25)


def ordinal_model(x: Any, y: Any = None, *, classes: int = 3) -> None:
    """Cut points from an improper-looking ordered prior, and a coefficient."""
    coefficient = numpyro.sample("b_x", dist.Normal(0.0, 1.0))
    cuts = numpyro.sample(
        "c",
        dist.TransformedDistribution(
            dist.Normal(0.0, 1.5).expand([classes - 1]), dist.transforms.OrderedTransform()
        ),
    )
    with numpyro.plate("obs", x.shape[0]):
        numpyro.sample("Y", dist.OrderedLogistic(coefficient * x, cuts), obs=y)


def ordinal(rng: np.random.Generator) -> Case:
    x = rng.normal(size=40)
    return ordinal_model, x, np.digitize(1.5 * x + rng.logistic(size=40), [-1.0, 1.0])


def mixture_model(x: Any, y: Any = None) -> None:
    """A mixture of two lines, summed out: MixtureSameFamily over the components."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    levels = numpyro.sample(
        "locs",
        dist.TransformedDistribution(dist.Normal(0.0, 2.0).expand([2]), dist.transforms.OrderedTransform()),
    )
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("data", x.shape[0]):
        parts = dist.Normal(levels + slope * x[:, None], scale)
        numpyro.sample("obs", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=y)


def mixture(rng: np.random.Generator) -> Case:
    x = rng.normal(size=40)
    return mixture_model, x, rng.choice([-1.5, 1.5], size=40) + 0.5 * x + 0.2 * rng.normal(size=40)


def subsampled_model(x: Any, y: Any = None) -> None:
    """Logistic regression over a plate that draws a subsample of the rows."""
    w = numpyro.sample("w", dist.Normal(jnp.zeros(x.shape[1]), 1.0).to_event(1))
    with numpyro.plate("N", x.shape[0], subsample_size=10):
        rows = numpyro.subsample(x, event_dim=1)
        labels = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("obs", dist.Bernoulli(logits=rows @ w), obs=labels)


def subsampled(rng: np.random.Generator) -> Case:
    x = rng.normal(size=(40, 2))
    return subsampled_model, x, (rng.random(40) < jax.nn.sigmoid(x @ np.array([1.0, -1.0]))).astype(int)


CASES = (
    bnn,
    horseshoe,
    baseball,
    baseball_with_leagues,
    hierarchical_forecasting,
    bayesian_regression,
    ordinal,
    mixture,
    subsampled,
)
