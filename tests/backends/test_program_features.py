"""Modules that are held run once in a fit: their outputs are further inputs, and the fit is that of a model on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from jax import numpy as jnp

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.backends import program as module
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.posterior.approximation import Point

ROWS = 60
X = np.random.default_rng(7).normal(size=(ROWS, 3))
Y = np.sin(X).sum(1)
HELD = {"*": None}


class Body(torch.nn.Module):
    """A body of torch that counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.runs = 0

    def forward(self, x: Any, scale: Any = 1.0) -> Any:
        self.runs += 1
        return torch.tanh(scale * self.linear(x))


class FlaxBody(nnx.Module):
    """The same in Flax."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: Any, scale: Any = 1.0) -> Any:
        return jnp.tanh(scale * self.linear(x))


def body_of(ppl: str) -> Any:
    torch.manual_seed(0)
    return Body().double() if ppl == "pyro" else FlaxBody()


def with_body(body: Any) -> Any:
    def model(x: Any, y: Any = None) -> None:
        features = bnn.module("body", x, body, HELD)
        bnn.observe(y, bnn.mlp(features, [3, 1]), likelihoods.Gaussian(0.3))

    return model


def on_features(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [3, 1]), likelihoods.Gaussian(0.3))


def features_of(body: Any) -> np.ndarray:
    if isinstance(body, Body):
        return body(torch.tensor(X)).detach().numpy()
    weight, bias = (np.asarray(each[...], float) for each in (body.linear.kernel, body.linear.bias))
    return np.tanh(X @ weight + bias)


def problem_of(model: Any, x: Any = X, **options: Any) -> Any:
    """The problem of a fit in Pyro, and the same with its features."""
    with bnn.MAP(ppl="pyro").prepared(model, x, Y, 0, "cpu", None, False) as (_, problem, *_):
        return problem, problem.with_features()


METHODS = [
    bnn.MAP(steps=20, polish=False),
    bnn.SVI(steps=20, batch_size=16, elbo_draws=2),
    bnn.Laplace(steps=50, structure="kron"),
    bnn.NUTS(draws=5, warmup=5, chains=1, start=bnn.MAP(steps=20, polish=False)),
]


@pytest.mark.parametrize("ppl", ["pyro", "numpyro"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_fit_is_that_of_a_model_on_the_features(method: Any, ppl: str, tmp_path: Path) -> None:
    body, method = body_of(ppl), replace(method, ppl=ppl)
    if isinstance(method, bnn.NUTS):
        method = replace(method, start=replace(method.start, ppl=ppl))
    features = features_of(body)
    whole = bnn.fit(with_body(body), X, Y, method, seed=3, progress=False)
    parts = bnn.fit(on_features, features, Y, method, seed=3, progress=False)
    for name, draws in parts.draws.items():
        np.testing.assert_allclose(whole.draws[name], draws, rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(whole.inputs, X)
    found, expected = whole.predict(X[:7]), parts.predict(features[:7])
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6, atol=1e-8)
    whole.save(tmp_path / "whole")
    again = bnn.load(tmp_path / "whole", with_body(body)).predict(X[:7])
    np.testing.assert_array_equal(again.mean, found.mean)


def runs_of_the_body(steps: int, rows: int) -> int:
    body = body_of("pyro")
    x = np.random.default_rng(rows).normal(size=(rows, 3))
    bnn.fit(with_body(body), x, x[:, 0], bnn.MAP(ppl="pyro", steps=steps, polish=False), progress=False)
    return body.runs


def test_the_body_runs_as_often_in_a_long_fit_as_in_a_short_one() -> None:
    assert runs_of_the_body(5, ROWS) == runs_of_the_body(45, ROWS)
    # Some rows at a time.
    more = runs_of_the_body(5, module.FEATURE_ROWS + 1) - runs_of_the_body(5, module.FEATURE_ROWS)
    assert more == 1


def test_a_body_with_other_inputs_is_not_taken_for_features() -> None:
    body = body_of("pyro")
    gaussian = likelihoods.Gaussian(0.3)

    def after_a_site(x: Any, y: Any = None) -> None:
        shift = bnn.sample("shift", dist.Normal(0.0, 1.0))
        bnn.observe(y, bnn.dense("head", bnn.module("body", x + shift, body, HELD), 1), gaussian)

    def changed(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.dense("head", bnn.module("body", 2.0 * x, body, HELD), 1), gaussian)

    def twice(x: Any, y: Any = None) -> None:
        both = [bnn.module("body", x[name], body, HELD) for name in ("a", "b")]
        bnn.observe(y, bnn.dense("head", both[0] - both[1], 1), gaussian)

    def fitted(x: Any, y: Any = None) -> None:
        h = bnn.module("body", x, body, {"*.bias": priors.Point(), "*": None})
        bnn.observe(y, bnn.dense("head", h, 1), gaussian)

    def coupled(x: Any, y: Any = None) -> None:
        bnn.coupled()
        bnn.observe(y, bnn.dense("head", bnn.module("body", x, body, HELD), 1), gaussian)

    for model in (after_a_site, changed, fitted, coupled):
        problem, same = problem_of(model)
        assert same is problem
    problem, same = problem_of(twice, {"a": X, "b": 2.0 * X})
    assert same is problem


@dataclass(frozen=True)
class AtZero(Method):
    """A method that reports no time of its own."""

    def run(self, problem: Any, progress: Any) -> Outcome:
        sites = problem.program.sites.items()
        return Outcome(Point({name: np.zeros(site.unconstrained_shape) for name, site in sites}))


def test_time_that_outputs_took_is_part_of_the_fit_and_no_other() -> None:
    body = body_of("pyro")
    assert bnn.fit(with_body(body), X, Y, AtZero(ppl="pyro"), progress=False).info.run_seconds > 0.0
    info = bnn.fit(on_features, features_of(body), Y, AtZero(ppl="pyro"), progress=False).info
    assert info.run_seconds == 0.0


@pytest.mark.parametrize(("spare", "kept"), [(0, True), (-1, False)])
def test_outputs_that_take_too_much_memory_are_not_kept(
    spare: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEATURE_ROWS", 20)
    monkeypatch.setattr(module, "FEATURE_BYTES", ROWS * 4 * 8 + spare)
    problem, known = problem_of(with_body(body_of("pyro")))
    assert (known is not problem) == kept


def test_several_bodies_and_several_inputs() -> None:
    """Entries of a dict, a tuple of them, and a body whose inputs are no features beside them."""
    bodies = [body_of("pyro") for _ in range(3)]

    def model(x: Any, y: Any = None) -> None:
        first = bnn.module("first", x["a"], bodies[0], HELD)
        second = bnn.module("second", (x["a"], x["scale"]), bodies[1], HELD)
        third = bnn.module("third", x["a"] + 1.0, bodies[2], HELD)
        bnn.observe(y, bnn.dense("head", first + second + third, 1), likelihoods.Gaussian(0.3))

    x = {"a": X, "scale": np.linspace(0.5, 2.0, ROWS)[:, None]}
    with bnn.MAP(ppl="pyro").prepared(model, x, Y, 0, "cpu", None, False) as (_, problem, *_):
        assert problem.program.features == ("first", "second")
        known = problem.with_features()
        before = [body.runs for body in bodies]
        u = problem.program.prior_draws(problem.x, problem.y, 0, 1)
        found = known.log_joint_draws(u)
        runs = [body.runs - earlier for body, earlier in zip(bodies, before, strict=True)]
        assert runs[0] == runs[1] < runs[2]
        np.testing.assert_allclose(found, problem.log_joint_draws(u), rtol=1e-10)
    assert set(known.inputs) == {"a", "scale", "output of 'first'", "output of 'second'"}
    for name, body, inputs in (("first", bodies[0], [x["a"]]), ("second", bodies[1], [x["a"], x["scale"]])):
        expected = body(*map(torch.tensor, inputs)).detach().numpy()
        np.testing.assert_allclose(known.inputs[f"output of {name!r}"], expected, rtol=1e-12)
