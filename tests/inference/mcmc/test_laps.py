"""LAPS: a correlated normal in closed form, BlackJAX's own loop, the change of phases, warnings, bad arguments.

Walls, frozen adaptation, starts and bits are tested with those of ChEES, single transitions by Geweke's test; the
closed form of a posterior is among the conformance tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.mcmc.laps import LAPS, gradients_per_step
from tests.inference.mcmc.test_chees import drawn, linear, recorded, standard_errors_off, table
from tests.inference.mcmc.test_meads import CORRELATION, SCALES, correlated


# 0 of 20 seeds failed; moments were off by at most 3.0 standard errors. The acceptance was 0.59 to 0.83: BlackJAX's
# bisection ends where it is first within 0.03 of its aim, and the chains may still be on their way in.
@pytest.mark.slow
def test_moments_of_a_correlated_normal_from_far_out():
    """Starts three times too wide: the unadjusted steps bring the chains in, and the adjusted ones are exact."""
    method = LAPS(draws=40, warmup=40, chains=512)
    rng = np.random.default_rng(1)
    kept = recorded(method, correlated, 3.0 * SCALES * rng.normal(size=(512, 2)), seed=1)
    late = drawn(method, kept)
    z = late["u"] / SCALES
    for j in range(2):
        assert standard_errors_off(z[..., j], 0.0) < 4.5
        assert standard_errors_off(z[..., j] ** 2, 1.0) < 4.5
    assert standard_errors_off(z[..., 0] * z[..., 1], CORRELATION) < 4.5
    # One step size for all, found in the warm-up, for the acceptance that is aimed at.
    assert np.ptp(late["step_size"]) == 0.0
    assert abs(late["acceptance_rate"].mean() - 0.7) < 0.2
    # Gradients: fifteen unadjusted steps of one, then as many of two.
    early = kept["burn_in"][0, -1]
    assert 0 < early < 30
    assert (kept["n_steps"][:, :early] == 15).all()
    assert (kept["n_steps"][:, early:] == 30).all()


@pytest.mark.slow
def test_the_unadjusted_steps_are_those_of_blackjax():
    """Step size and decoherence length after 300 steps on a scaled normal, by BlackJAX's loop over the same density."""
    import jax
    from blackjax.adaptation import laps

    scales, chains = np.array([1.0, 2.0, 3.0, 4.0]), 512
    method = LAPS(draws=1, warmup=41, chains=chains, steps=10, unadjusted=0.75, fluctuation=1e-12)

    def density(u: Any) -> Any:
        return -0.5 * ((u / scales) ** 2).sum()

    flat = 2.0 * scales * np.random.default_rng(0).normal(size=(chains, 4))
    kept = recorded(method, density, flat)
    # No fluctuation will do: the change comes at its share of the warm-up at the latest.
    assert (kept["burn_in"][:, -1] == 31).all()
    ours = kept["step_size"][0, 20:31]
    with system("numpyro").session("float64", "cpu"):
        info, *_ = laps.laps(
            density,
            lambda key: 2.0 * scales * jax.random.normal(key, (4,)),
            4,
            310,
            1,
            chains,
            jax.sharding.Mesh(jax.devices()[:1], "chains"),
            jax.random.PRNGKey(0),
            early_stop=False,
            r_end=1e-12,
        )
    theirs = np.asarray(info["phase_1"]["step_size"])
    # Ours is in the coordinates of unit variance.
    assert np.isclose(
        np.log(ours).mean(), np.log(theirs[210:] / np.sqrt((scales**2).mean())).mean(), atol=0.1
    )


def test_the_change_comes_when_chains_are_still():
    """At once where any fluctuation will do, but not before the window of 0.2 x 30 transitions is full."""
    method = LAPS(draws=2, warmup=40, chains=64, fluctuation=1e6, unadjusted=0.75, steps=2)
    flat = np.random.default_rng(0).normal(size=(64, 2))
    kept = recorded(method, lambda u: -0.5 * (u**2).sum(), flat)
    assert (kept["burn_in"][:, -1] == 6).all()


@pytest.mark.slow
def test_a_wide_target_takes_the_integrator_of_five_gradients_a_step():
    assert [gradients_per_step(size) for size in (200, 201)] == [2, 5]
    method = LAPS(draws=1, warmup=4, chains=8, superchains=2, steps=3)
    assert method.gradients_per_draw(Size(10, 201, 1)) == (3.0, 15.0, 15.0)
    flat = np.random.default_rng(0).normal(size=(8, 201))
    kept = recorded(method, lambda u: -0.5 * (u**2).sum(), flat)
    assert kept["n_steps"][0, -1] == 15


@pytest.mark.slow
def test_gradients_are_counted_and_foretold_and_nested_rhat_judges():
    method = LAPS(draws=6, warmup=8, chains=16, superchains=4, steps=2)
    posterior = bnn.fit(linear, *table(), method)
    counted = posterior.info.gradient_evaluations
    steps = np.asarray(posterior.statistics["burn_in"])[0, 0]
    # One for each start, two for each of the unadjusted transitions, four for each other.
    assert counted == 16 * (1 + 2 * steps + 4 * (14 - steps))
    effort = method.effort(Size(20, 3, 1))
    assert effort.fewest <= counted <= effort.most
    assert posterior.approximation.groups == 4
    assert set(posterior.info.figures) == {"acceptance_rate", "step_size", "burn_in"}


def test_what_is_told_of_few_acceptances():
    shape = (8, 10)
    statistics = {
        "diverging": np.zeros(shape, bool),
        "adaptation_refused": np.zeros(shape, int),
        "acceptance_rate": np.full(shape, 0.49),
        "step_size": np.full(shape, 0.1),
        "burn_in": np.full(shape, 7),
    }
    method = LAPS(chains=8, superchains=2)
    figures, found = method.summarise(statistics)
    assert figures["burn_in"] == 7.0
    assert found[0].startswith("49% of the trajectories were accepted")
    assert "warmup=240" in found[0]
    assert method.summarise(statistics | {"acceptance_rate": np.full(shape, 0.5)})[1] == ()
    some = {"acceptance_rate": np.full(shape, 0.7), "diverging": np.ones(shape, bool)}
    _, found = method.summarise(statistics | some)
    assert "target_accept=0.95" in found[0]


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"steps": 0}, InputError, "steps"),
        ({"target_accept": 1.0}, InputError, "target_accept"),
        ({"unadjusted": 0.999}, InputError, "leaves adjusted transitions"),
        ({"unadjusted": 0.0}, InputError, "unadjusted"),
        ({"fluctuation": 0.0}, InputError, "fluctuation"),
        ({"warmup": 3}, InputError, "warmup"),
        ({"superchains": 5}, InputError, "superchains"),
        ({"chain_method": "threads"}, UnsupportedError, "adapt together"),
        ({"ppl": "pyro"}, UnsupportedError, "numpyro"),
        ({"until": "rhat<1.01"}, InputError, "budget"),
        ({"step": 4}, UnknownNameError, "steps"),
    ],
)
def test_bad_arguments(settings, error, match):
    with pytest.raises(error, match=match):
        LAPS(**settings)


def test_one_coordinate_has_no_direction_to_turn():
    def one(x: Any, y: Any = None) -> None:
        w = bnn.sample("w", bnn.dist.Normal(0.0, 1.0))
        bnn.observe(y, w * x, bnn.likelihoods.Gaussian(0.5))

    with pytest.raises(UnsupportedError, match="at least two coordinates"):
        bnn.fit(one, np.arange(5.0)[:, None], np.ones(5), LAPS(chains=8, superchains=2))
