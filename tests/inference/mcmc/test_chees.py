"""ChEES: the trajectory length of a normal in closed form, densities that are not finite, bits, and bad arguments.

The closed form of a posterior stands in the conformance tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from arviz_stats.base import array_stats
from scipy import optimize, stats

import ppl_bnn as bnn
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.mcmc.chees import ChEES
from ppl_bnn.inference.mcmc.laps import LAPS
from ppl_bnn.inference.mcmc.meads import MEADS
from ppl_bnn.inference.mcmc.superchains import ManyChains
from ppl_bnn.inference.sampling import sampler


@dataclass
class Density:
    """All that these kernels ask of a target."""

    function: Callable[[Any], Any]
    dimension: int = 2

    def log_density(self, flat: Any, data: Any, scale: float = 1.0) -> Any:
        return self.function(flat)


def recorded(method: Any, function: Callable[[Any], Any], flat: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """The record of every transition, warm-up included: name -> (chain, transition, ...)."""
    import jax

    kernel = method.kernel(Density(function, flat.shape[1]))

    def walked(flat: Any, key: Any) -> Any:
        def once(state: Any, _: Any) -> Any:
            state = kernel.step(state, None)
            return state, kernel.record(state)

        begun = kernel.begin(flat, key, None)
        return kernel.usable(begun), jax.lax.scan(once, begun, None, length=method.warmup + method.draws)[1]

    with system("numpyro").session("float64", "cpu"):
        usable, kept = jax.jit(walked)(jax.numpy.asarray(flat), jax.random.PRNGKey(seed))
        assert np.asarray(usable).all()
        return {name: np.moveaxis(np.asarray(value), 0, 1) for name, value in kept.items()}


def drawn(method: Any, kept: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:, method.warmup :] for name, value in kept.items()}


def standard_errors_off(values: np.ndarray, truth: float) -> float:
    error = float(array_stats.mcse(values, method="mean", chain_axis=0, draw_axis=1))
    return abs(values.mean() - truth) / error


def wall(u: Any) -> Any:
    """A normal cut off at 2 in its first coordinate, with NaN behind."""
    import jax.numpy as jnp

    return jnp.where(u[0] < 2.0, -0.5 * jnp.sum(u**2), jnp.nan)


def lattice(u: Any) -> Any:
    """Finite at whole numbers only, so that no proposal ever is."""
    import jax.numpy as jnp

    return jnp.where(jnp.sum(jnp.abs(u - jnp.round(u))) < 1e-12, -0.5 * jnp.sum(u**2), jnp.nan)


MANY = {
    "chees": ChEES(draws=200, warmup=150, chains=32),
    "meads": MEADS(draws=200, warmup=100, chains=32, thinning=5),
    "laps": LAPS(draws=200, warmup=100, chains=32, steps=5),
}


def test_trajectory_length_and_acceptance_on_a_normal():
    """On N(0, s^2 I) the square changes as sin^2(t / s) over a time t, so that T solves E[h T sin(2 h T / s)] = 0 for h
    uniform on (0, 1), that is tan(2T / s) = 2T / s: T = 2.2467 s. A stiff direction adds nothing to the square, but
    makes steps so short that the length has to be learned from a single one of them. Over twelve seeds T was 0.97 of
    that on average, with a standard deviation of 0.034.
    """
    scale, stiff = 3.0, 0.1
    scales = np.array([scale] * 5 + [stiff])
    best = scale * optimize.brentq(lambda t: np.sin(2 * t) - 2 * t * np.cos(2 * t), 2.0, 2.4)
    method = ChEES(draws=40, warmup=200, chains=64, metric="identity", target_accept=0.9)
    flat = scales * np.random.default_rng(0).normal(size=(64, 6))
    kept = drawn(method, recorded(method, lambda u: -0.5 * ((u / scales) ** 2).sum(), flat))
    assert np.ptp(kept["step_size"]) == 0
    assert np.ptp(kept["trajectory_length"]) == 0
    assert abs(kept["trajectory_length"][0, 0] / best - 1) < 0.2
    assert abs(stats.hmean(kept["acceptance_rate"].ravel()) - 0.9) < 0.05
    # One number of steps for all chains, at most as many as T needs.
    steps = kept["n_steps"]
    assert np.ptp(steps, axis=0).max() == 0
    assert 1 <= steps.min() < steps.max() / 10
    assert steps.max() <= np.ceil(kept["trajectory_length"][0, 0] / kept["step_size"][0, 0])
    # Energies of the states that were drawn: -lp plus half a chi-square with 6 degrees of freedom.
    kinetic = kept["energy"] + kept["lp"]
    assert kinetic.min() > 0
    assert abs(kinetic.mean() - 3.0) < 0.15


# 0 of 20 seeds failed for either; the largest |z| was 2.8, and the adaptation was refused 3 times at most.
@pytest.mark.parametrize("name", ["chees", "meads", pytest.param("laps", marks=pytest.mark.slow)])
def test_a_wall_of_nan_is_a_wall(name):
    """The target is a truncated normal: proposals behind the wall are rejected, no chain dies of them."""
    method = MANY[name]
    flat = -np.abs(np.random.default_rng(1).normal(size=(32, 2)))
    kept = drawn(method, recorded(method, wall, flat))
    u = kept["u"]
    assert np.isfinite(u).all()
    assert u[..., 0].max() < 2
    assert kept["diverging"].any()
    late = u[:, -50:]
    assert (np.ptp(late, axis=1) > 0).all(), "a chain that no longer moves"
    cut = stats.truncnorm(-np.inf, 2.0)
    assert standard_errors_off(u[..., 0], cut.mean()) < 4.5
    assert standard_errors_off((u[..., 0] - cut.mean()) ** 2, cut.var()) < 4.5
    assert standard_errors_off(u[..., 1] ** 2, 1.0) < 4.5
    assert np.isfinite(kept["step_size"]).all()
    # The very first steps may be far too long.
    assert kept["adaptation_refused"].max() <= 5


@pytest.mark.parametrize("name", ["chees", "meads", pytest.param("laps", marks=pytest.mark.slow)])
def test_nothing_finite_to_learn_from_is_named(name):
    method = {
        "chees": ChEES(draws=5, warmup=10, chains=8),
        "meads": MEADS(draws=5, warmup=10, chains=8, folds=2, thinning=2),
        "laps": LAPS(draws=5, warmup=10, chains=8, superchains=4, steps=2),
    }[name]
    # MEADS learns from positions: chains that stand at one point have no spread to offer.
    flat = np.ones((8, 2))
    kept = drawn(method, recorded(method, lattice, flat))
    assert (kept["u"] == 1.0).all()
    assert np.isfinite(kept["lp"]).all()
    assert (kept["acceptance_rate"] == 0).all()
    assert kept["diverging"].all()
    assert (kept["adaptation_refused"] == 10).all()
    _, found = method.summarise({name: value for name, value in kept.items() if name != "u"})
    assert "frozen: in 10 of 10" in found[0]
    assert "40 of 40 transitions diverged" in found[1]


def linear(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0)), bnn.likelihoods.Gaussian(0.5))


def table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(20, 2))
    return x, x @ [0.8, -0.4] + 0.5 * rng.normal(size=20)


QUICK = {
    "chees": ChEES(draws=6, warmup=8, chains=8, superchains=4),
    "meads": MEADS(draws=6, warmup=8, chains=8, superchains=4, folds=2, thinning=2),
    "laps": LAPS(draws=6, warmup=8, chains=8, superchains=4, steps=2),
}


@pytest.mark.parametrize(
    "name", ["chees", *(pytest.param(each, marks=pytest.mark.slow) for each in ("meads", "laps"))]
)
def test_extended_chains_are_the_longer_run(name, tmp_path):
    """Also through a folder, which the run that is cut short leaves behind."""
    import dataclasses

    x, y = table()
    method = QUICK[name]
    longer = dataclasses.replace(method, draws=10)
    long = bnn.fit(linear, x, y, longer)
    short = bnn.fit(linear, x, y, dataclasses.replace(method, checkpoint=tmp_path / "kept"))
    resumed = bnn.fit(linear, x, y, dataclasses.replace(longer, checkpoint=tmp_path / "kept"))
    extended = sampler.extend(short, draws=4)
    assert short.shape == (8, 6)
    for other in (resumed, extended):
        assert other.shape == (8, 10)
        for site, value in long.draws.items():
            assert np.array_equal(value, other.draws[site]), site
        assert np.array_equal(long.statistics["acceptance_rate"], other.statistics["acceptance_rate"])
    assert long.approximation.groups == 4
    assert set(long.info.figures) >= {"acceptance_rate", "step_size"}


@pytest.mark.parametrize("name", QUICK)
def test_chains_of_a_superchain_start_at_one_point(name, monkeypatch):
    class Stop(Exception):
        pass

    seen: list[np.ndarray] = []

    def stopped(engine: Any) -> None:
        seen.extend(next(points) for points in engine.starts)
        raise Stop

    monkeypatch.setattr(sampler.Engine, "run", stopped)
    with pytest.raises(Stop):
        bnn.fit(linear, *table(), QUICK[name])
    points = np.array(seen).reshape(4, 2, -1)
    assert np.array_equal(points[:, 0], points[:, 1])
    assert len(np.unique(points[:, 0], axis=0)) == 4


def test_what_is_told_of_statistics():
    shape = (4, 10)
    statistics = {
        "diverging": np.zeros(shape, bool),
        "adaptation_refused": np.zeros(shape, int),
        "acceptance_rate": np.full(shape, 0.7),
        "step_size": np.full(shape, 0.1),
        "trajectory_length": np.full(shape, 2.0),
        "n_steps": np.full(shape, 20),
    }
    method = ChEES(chains=4, superchains=2, max_steps=100)
    figures, found = method.summarise(statistics)
    assert found == ()
    assert figures == pytest.approx({"acceptance_rate": 0.7, "step_size": 0.1, "trajectory_length": 2.0})
    _, found = ChEES(chains=4, superchains=2, max_steps=20).summarise(statistics)
    assert "max_steps=40" in found[0]
    diverging = statistics["diverging"].copy()
    diverging[0, :3] = True
    _, found = method.summarise(statistics | {"diverging": diverging})
    assert found[0].startswith("3 of 40 transitions diverged")
    assert "target_accept=0.826" in found[0]


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"chains": 10}, InputError, "superchains.*divisor"),
        ({"superchains": 1}, InputError, "superchains"),
        ({"superchains": 2.0}, InputError, "superchains"),
        ({"target_accept": 1.0}, InputError, "target_accept"),
        ({"learning_rate": 0}, InputError, "learning_rate"),
        ({"max_steps": 0}, InputError, "max_steps"),
        ({"metric": "diagnal"}, UnknownNameError, "diagonal"),
        ({"chain_method": "threads"}, UnsupportedError, "adapt together"),
        ({"ppl": "pyro"}, UnsupportedError, "numpyro"),
        ({"superchain": 8}, UnknownNameError, "superchains"),
    ],
)
def test_bad_arguments(settings, error, match):
    with pytest.raises(error, match=match):
        ChEES(**settings)


def test_a_sampler_of_many_chains_has_to_say_how_its_steps_become_smaller():
    @dataclass(frozen=True)
    class Silent(ManyChains):
        def kernel(self, target: Any) -> Any: ...

    with pytest.raises(TypeError, match=r"abstract.*_smaller_steps"):
        Silent()
