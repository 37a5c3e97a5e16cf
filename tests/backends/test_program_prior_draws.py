"""Draws from the prior: those that the system's own handlers give, one by one, compiled once for any count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import iterate_seeds

X = np.random.default_rng(11).normal(size=(6, 2))
Y = np.random.default_rng(1101).normal(size=6)


def of_every_kind(x: Any, y: Any = None) -> None:
    """Positive numbers, a simplex, variables of rows, parameters that start at a number and at a draw."""
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    shares = bnn.sample("shares", dist.Dirichlet((1.0, 2.0, 3.0)))
    slope = bnn.param("slope", np.array([0.5, -0.5]))
    with bnn.rows(x.shape[0]):
        shift = bnn.sample("shift", dist.Normal(0.0, noise))
    each = [priors.Hierarchical(dist.HalfCauchy(1.0)), priors.Point()]
    f = bnn.mlp(x * slope, [3, 1], "tanh", each) + shares[0] * shift[:, None]
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def by_numpyro(program: Program, seeds: Any, x: Any, y: Any) -> list[dict[str, np.ndarray]]:
    import numpyro
    from numpyro.distributions import biject_to

    found = []
    for key in iterate_seeds(seeds):
        trace = numpyro.handlers.trace(numpyro.handlers.seed(program.native, key)).get_trace(x, y)
        found.append(
            {
                name: np.asarray(
                    site["value"]
                    if site["type"] == "param"
                    else biject_to(site["fn"].support).inv(site["value"])
                )
                for name, site in trace.items()
                if name in program.sites
            }
        )
    return found


def by_pyro(program: Program, seeds: Any, x: Any, y: Any) -> list[dict[str, np.ndarray]]:
    import pyro
    import torch
    from torch.distributions import biject_to

    found = []
    for seed in seeds:
        pyro.clear_param_store()
        torch.manual_seed(int(seed))
        trace = pyro.poutine.trace(program.native).get_trace(x, y)
        found.append(
            {
                name: (
                    site["value"]
                    if site["type"] == "param"
                    else biject_to(site["fn"].support).inv(site["value"])
                )
                .detach()
                .numpy()
                for name, site in trace.nodes.items()
                if name in program.sites
            }
        )
    return found


def bound(ppl: str, model: Any) -> tuple[Any, Program, Any, Any]:
    chosen = system(ppl)
    x, y = chosen.asarray(X), chosen.asarray(Y)
    return chosen, Program.of(chosen, model, x, y, language=True), x, y


@pytest.mark.parametrize("count", [1, 4])
def test_draws_are_those_of_the_systems_own_handlers(ppl: str, count: int) -> None:
    """The same random numbers; a compiler may round what is made of them otherwise."""
    with system(ppl).session("float64", "cpu"):
        chosen, program, x, y = bound(ppl, of_every_kind)
        drawn = program.prior_draws(x, y, seed=5, count=count)
        by_handlers = {"numpyro": by_numpyro, "pyro": by_pyro}[ppl]
        expected = by_handlers(program, chosen.seeds(5, count), x, y)
    assert list(drawn) == list(program.sites)
    for name, site in program.sites.items():
        assert drawn[name].shape == (count, *site.unconstrained_shape)
        assert drawn[name].dtype == np.float64
        for index in range(count):
            np.testing.assert_allclose(
                drawn[name][index], expected[index][name], rtol=1e-11, atol=1e-13, err_msg=name
            )
    np.testing.assert_array_equal(drawn["slope"], np.broadcast_to([0.5, -0.5], (count, 2)))


def test_any_count_and_any_seed_are_served_by_one_compilation() -> None:
    runs = []

    def counted(x: Any, y: Any = None) -> None:
        runs.append(1)
        of_every_kind(x, y)

    with system("numpyro").session("float64", "cpu"):
        _, program, x, y = bound("numpyro", counted)
        program.prior_draws(x, y, seed=0, count=1)
        before = len(runs)
        found = program.prior_draws(x, y, seed=1, count=7)
    assert len(runs) == before
    assert len(np.unique(found["noise"])) == 7


def test_programs_that_differ_in_a_constant_only_are_told_apart() -> None:
    """What was compiled for one binding of a model serves the next one, and no other model."""

    def around(centre: np.ndarray) -> Any:
        def model(x: Any, y: Any = None) -> None:
            w = bnn.sample("w", dist.Normal(centre, 1e-3).to_event())
            bnn.observe(y, x @ w[:2, None] + w[2], likelihoods.Gaussian(1.0))

        return model

    centres = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0])
    with system("numpyro").session("float64", "cpu"):
        found = [bound("numpyro", around(centre)) for centre in centres]
        drawn = [program.prior_draws(x, y, seed=0, count=2)["w"] for _, program, x, y in found]
        compiled = [next(iter(program._compiled.values())) for _, program, _, _ in found]
    np.testing.assert_allclose(drawn[1] - drawn[0], [[0.0, 0.0, 1.0]] * 2, atol=1e-12)
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert compiled[0] is compiled[2]
    assert compiled[0] is not compiled[1]


def test_single_precision_stays_so(ppl: str) -> None:
    with system(ppl).session("float32", "cpu"):
        _, program, x, y = bound(ppl, of_every_kind)
        drawn = program.prior_draws(x, y, seed=0, count=2)
    assert {value.dtype for value in drawn.values()} == {np.dtype(np.float32)}
