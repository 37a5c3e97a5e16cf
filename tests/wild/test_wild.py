"""Models as the documentation of NumPyro and of Pyro has them, against the systems run directly."""

from __future__ import annotations

import copy
import functools
from typing import Any

import arviz as az
import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.backends.native import named_inputs
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import ModelError, UnsupportedError
from ppl_bnn.prediction.prediction import Prediction

from . import numpyro_models, pyro_models

RNG = functools.partial(np.random.default_rng, 77)
CASES = [(case, "numpyro") for case in numpyro_models.CASES] + [(case, "pyro") for case in pyro_models.CASES]
NAMES = [f"{ppl}-{case.__name__}" for case, ppl in CASES]
every = pytest.mark.parametrize(("case", "ppl"), CASES, ids=NAMES)


def arguments(model: Any, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a user calls the model: with positional inputs, or with those of a dict by name."""
    if isinstance(x, dict):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def every_row(x: Any, y: Any = None) -> None:
    """The model with a plate that draws a subsample, over all rows."""
    import jax.numpy as jnp
    import numpyro

    w = numpyro.sample("w", numpyro.distributions.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.sample("obs", numpyro.distributions.Bernoulli(logits=x @ w), obs=y)


def called_with(model: Any, x: Any, y: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model of NumPyro over all rows, and what it is called with."""
    inputs, named = arguments(model, map_data_of(np.asarray, x))
    if named:
        named["divorce"] = y
    else:
        inputs = (*inputs, y)
    return (every_row if model is numpyro_models.subsampled_model else model), inputs, named


def rows_of_numpyro(model: Any, x: Any, y: Any, w: dict[str, Any]) -> Any:
    """NumPyro's own log likelihood of each row at each draw of w."""
    import jax
    from numpyro.infer.util import log_likelihood

    model, inputs, named = called_with(model, x, y)
    with jax.enable_x64(True):
        rows = next(iter(log_likelihood(model, w, *inputs, **named).values()))
    return np.asarray(rows).reshape(-1, len(y))


def of_numpyro(model: Any, x: Any, y: Any, u: dict[str, Any], w: dict[str, Any]) -> tuple[Any, Any, Any]:
    """NumPyro's own: log joint of u, log likelihood and mean of each row at w."""
    import jax
    import numpyro
    from numpyro.infer.util import potential_energy

    rows = rows_of_numpyro(model, x, y, w)
    model, inputs, named = called_with(model, x, y)
    with jax.enable_x64(True):
        joint = [-potential_energy(model, inputs, named, {n: v[i] for n, v in u.items()}) for i in range(2)]

        def mean(values: dict[str, Any]) -> Any:
            traced = numpyro.handlers.trace(numpyro.handlers.substitute(model, values))
            trace = traced.get_trace(*inputs, **named)
            return next(s["fn"].mean for s in trace.values() if s["type"] == "sample" and s["is_observed"])

        means = [np.asarray(mean({n: v[i] for n, v in w.items()})) for i in range(2)]
    return np.asarray(joint), rows, means


def of_pyro(model: Any, x: Any, y: Any, w: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Pyro's own: log joint, log likelihood and mean of each row at each draw of w."""
    import pyro
    import torch

    default = torch.get_default_dtype()
    joint, rows, means = [], [], []
    try:
        torch.set_default_dtype(torch.float64)
        if isinstance(model, torch.nn.Module):
            model = copy.deepcopy(model).double()
        inputs, _ = arguments(model, map_data_of(torch.tensor, x))
        for i in range(len(next(iter(w.values())))):
            values = {name: torch.tensor(value[i]) for name, value in w.items()}
            trace = pyro.poutine.trace(pyro.poutine.condition(model, data=values)).get_trace(
                *inputs, torch.tensor(y)
            )
            nodes: dict[str, Any] = dict(trace.nodes)
            site = next(
                s
                for n, s in nodes.items()
                if s["type"] == "sample"
                and s["is_observed"]
                and n not in w
                and not s["infer"].get("_deterministic")
            )
            joint.append(float(trace.log_prob_sum()))
            rows.append(site["fn"].log_prob(site["value"]).numpy())
            means.append(site["fn"].mean.numpy())
    finally:
        torch.set_default_dtype(default)
    return np.array(joint), np.array(rows), means


def map_data_of(function: Any, x: Any) -> Any:
    return tuple(map(function, x)) if isinstance(x, tuple) else map_data(function, x)


@every
def test_densities_and_predictions_are_those_of_the_system(case: Any, ppl: str) -> None:
    """Log joint, log likelihood of each row and mean; 1e-5 where priors of single precision are in the oracle."""
    model, x, y = case(RNG())
    rng, chosen = np.random.default_rng(78), system(ppl)
    inputs = named_inputs(model, x)
    with chosen.session("float64", "cpu"):
        data = map_data(lambda a: chosen.asarray(np.asarray(a)), inputs), chosen.asarray(y)
        program = Program.of(chosen, model, *data, language=False)
        u = {
            name: 0.5 * rng.normal(size=(2, *site.unconstrained_shape))
            for name, site in program.sites.items()
        }
        w = program.constrain_draws(u, *data)
        one = [{name: chosen.asarray(value[i]) for name, value in u.items()} for i in range(2)]
        joint = [
            float(chosen.to_numpy(program.log_joint(each, *data, jacobian=ppl == "numpyro"))) for each in one
        ]
        eta = program.predictor_draws(w, map_data(np.asarray, inputs))
        prediction = Prediction(*program.likelihood.mixture_parameters(eta))
    expected, rows, means = of_numpyro(model, x, y, u, w) if ppl == "numpyro" else of_pyro(model, x, y, w)
    np.testing.assert_allclose(joint, expected, rtol=1e-9 if ppl == "numpyro" else 1e-5)
    np.testing.assert_allclose(prediction.component_log_prob(y), rows, rtol=1e-8, atol=1e-10)
    if prediction.family != "Categorical":
        np.testing.assert_allclose(prediction.component_mean(), means, rtol=1e-8, atol=1e-10)


def test_a_module_of_single_precision_is_fitted_in_the_type_of_the_fit_and_left_as_it_was() -> None:
    """The mode of the noise and of a linear map: least squares with a wide prior, in both types."""
    import torch

    model, x, y = pyro_models.bayesian_regression(RNG())
    posterior = bnn.fit(model, x, y, bnn.MAP(), progress=False)
    assert (posterior.info.ppl, posterior.info.dtype) == ("pyro", "float64")
    assert posterior.draws["linear.weight"].dtype == np.float64
    noise = posterior.draws["sigma"].item()
    design = np.column_stack([x, np.ones(len(x))])
    precision = np.diag([1.0, 1.0, 1.0, 0.01])
    ridge = np.linalg.solve(design.T @ design / noise**2 + precision, design.T @ y / noise**2)
    np.testing.assert_allclose(posterior.draws["linear.weight"].ravel(), ridge[:3], atol=1e-4)
    single = bnn.fit(model, x, y, bnn.MAP(dtype="float32", steps=200), progress=False)
    assert single.draws["linear.weight"].dtype == np.float32
    np.testing.assert_allclose(single.draws["linear.weight"].ravel(), ridge[:3], atol=0.02)
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert model.linear.__dict__["_pyro_samples"]["weight"].sample().dtype == torch.float32


@pytest.mark.filterwarnings("ignore:x. columns .0. have no variance:UserWarning")
def test_targets_in_a_column_stay_in_a_column_and_deterministic_sites_are_drawn() -> None:
    model, x, y = numpyro_models.bnn(RNG())
    posterior = bnn.fit(model, x, y, bnn.MAP(steps=30, polish=False), progress=False)
    assert posterior.predict(x).mean.shape == posterior.predict(x).log_prob(y).shape + (1,)
    assert dict(posterior.to_datatree().observed_data.sizes) == {"obs": 20, "output": 1}
    model, x, y = numpyro_models.horseshoe(RNG())
    posterior = bnn.fit(model, x, y, bnn.MAP(steps=30, polish=False), progress=False)
    draws = posterior.draws
    np.testing.assert_allclose(
        draws["betas"], draws["tau"] * draws["lambdas"] * draws["unscaled_betas"], rtol=1e-12
    )
    np.testing.assert_array_equal(posterior.to_datatree()["posterior"]["betas"], draws["betas"])


@pytest.mark.parametrize("model", pyro_models.REFUSED, ids=lambda model: model.__name__)
def test_what_cannot_be_fitted_is_refused_by_name(model: Any) -> None:
    x = np.random.default_rng(1).normal(size=(12, 1))
    with pytest.raises(UnsupportedError) as caught:
        bnn.fit(model, x, x[:, 0], bnn.SVI(steps=10), progress=False)
    assert all(part in str(caught.value) for part in pyro_models.REFUSED[model]), caught.value


def test_a_module_without_priors_is_refused_by_name() -> None:
    import torch

    x = np.random.default_rng(1).normal(size=(12, 2))
    with pytest.raises(ModelError, match=r"torch module Linear, whose weights have no priors.*bnn.module"):
        bnn.fit(torch.nn.Linear(2, 1), x, x[:, 0], bnn.MAP(), progress=False)


SVI = bnn.SVI(steps=200)
# A mode is what Laplace starts from: some steps, and the polish.
LAPLACE = bnn.Laplace(curvature="hessian", start=bnn.MAP(steps=300))
# The joint density of scales and of what they scale has no mode, as Laplace says: there the mode is on its own.
NO_MODE = ("horseshoe", "baseball", "baseball_with_leagues", "hierarchical_forecasting", "hierarchical")
MODE = bnn.MAP(steps=100, polish=False)
# Transitions are few and short: draws need not be of the posterior. JAX compiles NUTS for seconds, and so in NumPyro it
# fits a model with a site that is set apart from its scale and one with a simplex, and below one with ordered sites.
NUTS = bnn.NUTS(warmup=5, draws=5, chains=1, max_tree_depth=3)
WITH_NUTS = (*pyro_models.CASES, numpyro_models.baseball_with_leagues, numpyro_models.mixture)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@every
def test_every_method_fits_it(case: Any, ppl: str) -> None:
    """Draws of each method have the log likelihood that the system gives them."""
    model, x, y = case(RNG())
    drawn: list[dict[str, Any]] = []
    found: list[Any] = []
    second = MODE if case.__name__ in NO_MODE else LAPLACE
    for method in (SVI, second, NUTS) if case in WITH_NUTS else (SVI, second):
        posterior = bnn.fit(model, x, y, method, progress=False)
        assert posterior.info.ppl == ppl
        index = [0, posterior.shape[1] - 1]
        drawn.append({site: np.asarray(value)[0, index] for site, value in posterior.draws.items()})
        found.append(posterior.log_likelihood(kind="sampled")[0, index])
    # In one call for all methods, as NumPyro compiles it.
    w = {site: np.concatenate([each[site] for each in drawn]) for site in drawn[0]}
    rows = rows_of_numpyro(model, x, y, w) if ppl == "numpyro" else of_pyro(model, x, y, w)[1]
    np.testing.assert_allclose(np.concatenate(found), rows, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_nuts_agrees_with_nuts_of_numpyro() -> None:
    """The mean log likelihood of all rows, within four standard errors of both runs.

    Of one model, whose cut points are transformed together: the densities that both runs follow are the same in every
    model, as the test of densities shows.
    """
    import jax
    from numpyro.infer import MCMC, NUTS

    model, x, y = numpyro_models.ordinal(RNG())
    posterior = bnn.fit(model, x, y, bnn.NUTS(warmup=500, draws=1000, chains=2), progress=False)
    ours = posterior.log_likelihood().sum(-1)
    with jax.enable_x64(True):
        chains = MCMC(
            NUTS(model),
            num_warmup=500,
            num_samples=1000,
            num_chains=2,
            progress_bar=False,
            chain_method="vectorized",
        )
        chains.run(jax.random.PRNGKey(5), x, y)
        drawn = chains.get_samples()
    theirs = rows_of_numpyro(model, x, y, drawn).sum(-1).reshape(2, 1000)
    error = np.hypot(*(value.std() / np.sqrt(float(az.ess(value))) for value in (ours, theirs)))
    assert abs(ours.mean() - theirs.mean()) < 4.0 * error
