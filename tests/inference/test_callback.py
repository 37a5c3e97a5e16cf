"""A callback ends a fit, in each kind of loop. What it leaves is held against fits that are that long by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import BudgetError, InputError
from ppl_bnn.core.progress import ended_by_callback, resolve
from ppl_bnn.inference.laplace.search import by_validation, marginal_mode
from tests.problems import regression_data

X, Y = regression_data(rows=25)
NUTS = bnn.NUTS(warmup=20, draws=60, chains=2)


def linear(x, y=None):
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0)), bnn.likelihoods.Gaussian(noise))


def after(done: int) -> Callable[[bnn.Step], bool]:
    """A callback that ends each part of a fit after so many steps."""
    return lambda step: step.done >= done


def ended(method: bnn.Method, callback: Any, **keywords: Any) -> bnn.Posterior:
    """A fit that the callback ends, which its warnings say."""
    posterior = bnn.fit(linear, X, Y, method, callback=callback, **keywords)
    assert any("was ended by the callback after" in text for text in posterior.info.warnings)
    return posterior


def assert_same(found: Any, expected: Any) -> None:
    """Equal arrays, or equal draws by site."""
    if not isinstance(expected, dict):
        found, expected = {"": found}, {"": expected}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_an_exception_of_a_callback_is_raised() -> None:
    def fails(step: bnn.Step) -> None:
        raise ZeroDivisionError(step.title)

    with pytest.raises(ZeroDivisionError, match=r"MAP \(numpyro\)"):
        bnn.fit(linear, X, Y, bnn.MAP(), callback=fails)


def test_a_refusal_fits_nothing_and_checks_the_callback() -> None:
    calls: list[bnn.Step] = []
    assert bnn.MAP().refusal(linear, X, Y, callback=calls.append) is None
    assert not calls
    assert isinstance(bnn.MAP().refusal(linear, X, Y, callback=3), InputError)


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_a_mode(ppl: str) -> None:
    whole = bnn.fit(linear, X, Y, bnn.MAP(ppl=ppl))
    short = ended(bnn.MAP(ppl=ppl), after(200))
    assert_same(short.info.history["loss"], whole.info.history["loss"][:200])
    assert short.info.figures["converged"] == 0.0
    # No L-BFGS follows: the end is that of Adam.
    assert short.info.gradient_evaluations == 201
    assert short.info.figures["log_joint"] == pytest.approx(-whole.info.history["loss"][200], abs=1e-8)


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
@pytest.mark.parametrize("steps", [200, 700])
def test_variational_inference(ppl: str, steps: int) -> None:
    """Before the rate falls the end is the latest iterate, afterwards the average; a checkpoint goes on from there."""
    method = bnn.SVI(ppl=ppl, steps=1000, learning_rate=0.02, elbo_draws=20)
    whole = bnn.fit(linear, X, Y, method)
    short = ended(method, after(steps))
    assert_same(short.info.history["loss"], whole.info.history["loss"][:steps])
    assert short.info.gradient_evaluations == steps
    if steps < 500:
        assert short.info.figures["converged"] == 0.0


def test_variational_inference_goes_on_from_its_checkpoint(tmp_path) -> None:
    method = bnn.SVI(steps=1000, learning_rate=0.02, elbo_draws=20, checkpoint=str(tmp_path))
    ended(method, after(300))
    whole = bnn.fit(linear, X, Y, replace(method, checkpoint=None))
    assert_same(bnn.fit(linear, X, Y, method).draws, whole.draws)


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_averages_are_over_the_steps_that_were_made(ppl: str) -> None:
    """IVON is at its optimum long before its end, so an average over other counts would be far from it."""
    method = bnn.IVON(ppl=ppl, steps=1600, elbo_draws=20)
    whole = bnn.fit(linear, X, Y, method)
    for steps in (800, 1000):
        short = ended(method, after(steps))
        assert_same(short.info.history["loss"], whole.info.history["loss"][:steps])
        assert short.info.gradient_evaluations == steps
        error = np.abs(short.draws["output.weight"].mean() - whole.draws["output.weight"].mean())
        assert error < 0.3 * whole.draws["output.weight"].std()


@pytest.mark.parametrize("chain_method", ["threads", "vectorised", "sequential"])
def test_chains(chain_method: str) -> None:
    """Draws are those of the whole run, a callback sees them, and the chains can go on."""
    method = replace(NUTS, chain_method=chain_method)
    whole, seen = bnn.fit(linear, X, Y, method), []

    def enough(step: bnn.Step) -> bool:
        assert step.loss is None
        seen.append(step.draws())
        return bool(seen[-1])

    short = ended(method, enough)
    draws = short.shape[1]
    assert 1 <= draws < 60
    for name, value in seen[-1].items():
        assert_same(short.draws[name], whole.draws[name][:, :draws])
        count = value.shape[1]
        np.testing.assert_allclose(value, whole.draws[name][:, :count], rtol=1e-10)
    assert_same(bnn.extend(short, 60 - draws).draws, whole.draws)


def test_an_extension() -> None:
    posterior = bnn.fit(linear, X, Y, NUTS)
    longer = bnn.extend(posterior, 100_000, callback=lambda step: len(step.draws()["noise"][0]) > 60)
    assert 60 < longer.shape[1] < 100_000
    assert_same(longer.draws["noise"][:, :60], posterior.draws["noise"])
    assert any("NUTS was ended by the callback" in text for text in longer.info.warnings)


@pytest.mark.parametrize("chain_method", ["sequential", pytest.param("processes", marks=pytest.mark.slow)])
def test_chains_of_pyro(chain_method: str) -> None:
    method = bnn.NUTS(ppl="pyro", warmup=20, draws=400, chains=2, chain_method=chain_method)
    # Of both chains; one after another, the second is in its draws then. Processes wait for their first draws.
    short = ended(method, after(500 if chain_method == "sequential" else 1))
    assert 1 <= short.shape[1] < 400
    whole = bnn.fit(linear, X, Y, replace(method, draws=short.shape[1], chain_method="sequential"))
    assert_same(short.draws, whole.draws)


@pytest.mark.parametrize("method", [NUTS, replace(NUTS, ppl="pyro", chain_method="sequential")])
def test_chains_have_a_draw_each_before_they_end(method: bnn.NUTS) -> None:
    with pytest.raises(BudgetError, match="NUTS callback: expected True after the first draw of every chain"):
        bnn.fit(linear, X, Y, method, callback=lambda step: True)


def test_runs_of_particles() -> None:
    method = bnn.SMC(particles=20, runs=3, moves=2)
    short = ended(method, after(100))
    assert_same(short.draws, bnn.fit(linear, X, Y, replace(method, runs=1)).draws)
    with pytest.raises(BudgetError, match="SMC callback: expected True after a run; got True after a part"):
        bnn.fit(linear, X, Y, method, callback=after(1))


def test_collections() -> None:
    method = bnn.SWAG(collections=10, rank=2, every=5, burn_in=3, learning_rate=0.01, start=bnn.MAP())

    def callback(steps: int) -> Callable[[bnn.Step], bool]:
        return lambda step: step.title.startswith("SWAG") and step.done >= steps

    short = ended(method, callback(40))
    assert_same(short.draws, bnn.fit(linear, X, Y, replace(method, collections=5)).draws)
    assert short.info.figures["collections"] == 5
    ended(method, callback(25))
    with pytest.raises(
        BudgetError, match="SWAG callback: expected True after 25 steps; got True after 20 steps"
    ):
        bnn.fit(linear, X, Y, method, callback=callback(20))


@pytest.mark.slow
def test_paths() -> None:
    method = bnn.Pathfinder(paths=3, importance=False, draws=50)
    short = ended(method, after(2))
    assert_same(short.draws, bnn.fit(linear, X, Y, replace(method, paths=2)).draws)


def test_members_fitted_together() -> None:
    method = bnn.Ensemble(bnn.MAP(), size=3)
    short, whole = ended(method, after(200)), bnn.fit(linear, X, Y, method)
    assert_same(short.info.history["member_loss"], whole.info.history["member_loss"][:200])


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_members_that_a_callback_ends_are_not_stored(ppl: str, tmp_path) -> None:
    method = bnn.Ensemble(bnn.MAP(ppl=ppl, steps=600), size=2, ppl=ppl, checkpoint=str(tmp_path))
    ended(method, after(200))
    assert_same(
        bnn.fit(linear, X, Y, method).draws, bnn.fit(linear, X, Y, replace(method, checkpoint=None)).draws
    )


def test_a_start_is_a_part_of_its_own() -> None:
    seen = set()

    def ends_the_start(step: bnn.Step) -> bool:
        seen.add(step.title)
        return step.title.startswith("MAP")

    posterior = ended(replace(NUTS, start=bnn.MAP()), ends_the_start)
    assert len(seen) == 2
    assert posterior.shape == (2, 60)


def test_searches_of_hyper_parameters() -> None:
    """The best of what was tried is kept."""
    watched = resolve(None, after(4))
    # Its grid rises from 1e-4, so the first point is the best.
    found = by_validation(lambda factors: -float(np.log(factors).sum()), np.ones(2), progress=watched)
    assert len(found.history) == 4
    assert not found.converged
    assert_same(np.append(found.point, found.value), found.history[0])
    watched = resolve(None, after(3))
    found = marginal_mode(lambda phi: -float((phi[0] - 1.0) ** 2), [0.0], progress=watched)
    assert len(found.history) == 3
    assert not found.converged
    assert found.value == found.history[:, -1].max()
    assert ended_by_callback(watched) == ("evidence was ended by the callback after 3 of 200",)
