"""MAP against closed forms, SciPy and the other system."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.core.errors import DivergenceError, InputError, UnknownNameError
from tests.problems import Conjugate, regression_data, small_network


def test_mode_of_conjugate_model(ppl):
    problem = Conjugate.make()
    posterior = bnn.fit(problem.model, problem.x, problem.y, bnn.MAP(ppl=ppl))
    assert np.allclose(Conjugate.flat(posterior.draws)[0, 0], problem.mean, rtol=1e-6, atol=1e-8)
    assert posterior.info.figures["gradient_norm"] < 1e-6
    assert posterior.info.figures["converged"] == 1.0
    assert not posterior.info.warnings


def learned_noise(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0)), likelihoods.Gaussian(noise))


@pytest.mark.parametrize("space", ["unconstrained", "constrained"])
def test_mode_depends_on_the_coordinates_that_were_asked_for(ppl, space):
    """SciPy maximises the same density, written out, with and without log |d noise / d log noise| = log noise."""
    problem = Conjugate.make(rows=12)

    def minus_log_joint(v):
        w, log_noise = v[:-1], v[-1]
        noise = np.exp(log_noise)
        residual = problem.y - problem.design @ w
        value = (
            -0.5 * w @ w - 0.5 * residual @ residual / noise**2 - len(residual) * log_noise - 0.5 * noise**2
        )
        return -(value + (log_noise if space == "unconstrained" else 0.0))

    wanted = minimize(minus_log_joint, np.zeros(5), method="BFGS", options={"gtol": 1e-9}).x
    posterior = bnn.fit(learned_noise, problem.x, problem.y, bnn.MAP(ppl=ppl, space=space, steps=500))
    assert np.allclose(Conjugate.flat(posterior.draws)[0, 0], wanted[:-1], rtol=1e-5)
    assert np.isclose(posterior.draws["noise"][0, 0], np.exp(wanted[-1]), rtol=1e-5)


def test_both_systems_climb_the_same_hill():
    x, y = regression_data()
    start = bnn.fit(small_network, x, y, bnn.MAP(steps=100, polish=False))
    found = [bnn.fit(small_network, x, y, bnn.MAP(ppl=ppl, start=start)) for ppl in ("numpyro", "pyro")]
    a, b = (posterior.predict(x).mean for posterior in found)
    assert np.isclose(found[0].info.figures["log_joint"], found[1].info.figures["log_joint"], atol=1e-6)
    assert np.allclose(a, b, atol=1e-4)


def test_loss_curve_falls_and_restarts_at_a_start(ppl):
    x, y = regression_data()
    first = bnn.fit(small_network, x, y, bnn.MAP(ppl=ppl, steps=300, polish=False))
    loss = first.info.history["loss"]
    assert len(loss) == 300
    assert loss[-100:].mean() < loss[:100].mean()
    again = bnn.fit(small_network, x, y, bnn.MAP(ppl=ppl, steps=100, start=first))
    # Adam's first steps have the size of the learning rate, so the start is seen in the first loss.
    assert abs(again.info.history["loss"][0] - loss[-1]) < 1.0


def test_an_unreached_mode_is_reported(ppl):
    x, y = regression_data()
    posterior = bnn.fit(small_network, x, y, bnn.MAP(ppl=ppl, steps=100, learning_rate=1e-3, polish=False))
    assert posterior.info.figures["converged"] == 0.0
    assert any("still falling" in sentence for sentence in posterior.info.warnings)
    assert any("not a mode" in sentence for sentence in posterior.info.warnings)


def test_point_weights_are_fitted_without_a_prior(ppl):
    """With `Point` weights MAP is maximum likelihood: ordinary least squares."""

    def model(x, y=None):
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Point()), likelihoods.Gaussian(0.5))

    problem = Conjugate.make()
    wanted = np.linalg.lstsq(problem.design, problem.y, rcond=None)[0]
    posterior = bnn.fit(model, problem.x, problem.y, bnn.MAP(ppl=ppl))
    assert np.allclose(Conjugate.flat(posterior.draws)[0, 0], wanted, rtol=1e-6)


def test_divergence_is_named(ppl):
    def model(x, y=None):
        f = bnn.ops.exp(bnn.ops.exp(bnn.mlp(x, [1], prior=priors.Normal(0.0, 100.0))))
        bnn.observe(y, f, likelihoods.Gaussian(1e-3))

    x, y = regression_data()
    start = {"output.weight": np.full((2, 1), 5.0), "output.bias": np.array([5.0])}
    with pytest.raises(DivergenceError, match="finite loss"):
        bnn.fit(model, x, y, bnn.MAP(ppl=ppl, start=start))


def test_impossible_settings():
    with pytest.raises(InputError, match="MAP steps: expected a whole number of at least 1; got 0"):
        bnn.MAP(steps=0)
    with pytest.raises(InputError, match=r"MAP learning_rate: expected a positive number; got -1\.0"):
        bnn.MAP(learning_rate=-1.0)
    with pytest.raises(UnknownNameError, match="unconstrained"):
        bnn.MAP(space="unconstraint")


def test_of_several_starts_the_highest_mode_is_kept(ppl):
    x, y = regression_data(rows=30)
    settings = {"ppl": ppl, "steps": 100}
    one, several, again = (
        bnn.fit(small_network, x, y, bnn.MAP(**settings, restarts=count)) for count in (1, 3, 3)
    )
    reached = several.info.history["restart_log_joint"]
    assert len(reached) == 3
    assert np.ptp(reached) > 0.1
    # The first start is the one that a single fit has.
    assert reached[0] == one.info.figures["log_joint"]
    assert several.info.figures["log_joint"] == reached.max()
    from_there = bnn.fit(small_network, x, y, bnn.MAP(**settings, start=several))
    assert np.isclose(from_there.info.figures["log_joint"], reached.max(), atol=1e-6)
    assert several.info.gradient_evaluations > 3 * 100
    for name, value in several.draws.items():
        assert np.array_equal(value, again.draws[name])
    assert np.array_equal(reached, again.info.history["restart_log_joint"])
    assert "restart_log_joint" not in one.info.history


def test_several_starts_are_drawn_not_given():
    with pytest.raises(InputError, match="MAP restarts: expected a whole number of at least 1; got 0"):
        bnn.MAP(restarts=0)
    with pytest.raises(InputError, match="start=None"):
        bnn.MAP(restarts=3, start=bnn.MAP())
