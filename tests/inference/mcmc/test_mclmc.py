"""MCLMC: closed forms, the bias and its allowance, tuning that meets NaN, what is counted and what is refused.

The statistical ones (moments at two energy variances, adjusted, tempered, the bias that falls, scales, the region
without a density, the collapsed tunings) failed at none of 20 seeds.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arviz_stats.base import array_stats

import ppl_bnn as bnn
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import DivergenceError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.mcmc import mclmc
from ppl_bnn.inference.mcmc.mclmc import MCLMC, bias_allowance
from ppl_bnn.inference.sampling import chains as engine
from tests.problems import Conjugate, regression_data, small_network

PROBLEM = Conjugate.make()


@functools.cache
def conjugate(seed: int = 0, **settings: Any) -> Any:
    return bnn.fit(PROBLEM.model, PROBLEM.x, PROBLEM.y, MCLMC(**settings), seed=seed)


def moments(posterior: Any, covariance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Errors of 4 means and of 4 variances, in standard deviations and variances, and their Monte-Carlo errors."""
    sd = np.sqrt(np.diag(PROBLEM.covariance if covariance is None else covariance))
    z = (Conjugate.flat(posterior.draws) - PROBLEM.mean) / sd
    off, errors = [], []
    for values, truth in ((z, 0.0), (z**2, 1.0)):
        for j in range(values.shape[-1]):
            off.append(values[..., j].mean() - truth)
            errors.append(float(array_stats.mcse(values[..., j], chain_axis=0, draw_axis=1, method="mean")))
    return np.array(off).reshape(2, -1), np.array(errors).reshape(2, -1)


# --- the direction --------------------------------------------------------------------------------


@pytest.mark.parametrize("decoherence", [1.0, 2.5])
def test_a_direction_forgets_itself_over_a_path_of_length_l(decoherence: float) -> None:
    """Where nothing pulls refreshments alone turn it: v . v' is exp(-e / L) after a step of e, L = decoherence sqrt(P).

    In P = 4000 dimensions a product has the standard deviation sqrt((1 - k^2) / P); the mean of 40 products within four
    standard errors of that, 0.006 at most, where a path of half the length would be 0.1 and more away. No seed of 20
    failed.
    """
    import jax
    import jax.numpy as jnp

    dimension, count = 4000, 40
    length = decoherence * np.sqrt(dimension)
    with system("numpyro").session("float64", "cpu"):
        # A slope without which the integrator has no direction to turn to, and of no weight.
        target = target_of(lambda u: 1e-9 * jnp.sum(u), dimension)
        chain = MCLMC(decoherence=decoherence, warmup=10, thinning=1).kernel(target)
        state = chain.begin(jnp.zeros(dimension), jax.random.PRNGKey(0), None)
        for share in (0.2, 0.7):
            step = jnp.asarray(np.log(share * length))
            state = state._replace(count=jnp.int32(20), tuner=state.tuner._replace(mean=step, log_step=step))
            products, walk = [], jax.jit(lambda state: chain.step(state, None))
            for _ in range(count):
                moved = walk(state)
                products.append(float(moved.here.momentum @ state.here.momentum))
                state = moved
            kept = np.exp(-share)
            error = np.sqrt((1.0 - kept**2) / (dimension * count))
            assert abs(np.mean(products) - kept) < 4.0 * error


def test_a_refreshed_direction_is_a_unit_vector_that_keeps_what_it_is_told() -> None:
    import jax
    import jax.numpy as jnp

    with system("numpyro").session("float64", "cpu"):
        v = jnp.full(10_000, 0.01)
        np.testing.assert_allclose(mclmc._refreshed(v, 1.0, jax.random.PRNGKey(2)), v, atol=1e-12)
        for kept in (0.0, 0.5, 0.95):
            new = mclmc._refreshed(v, kept, jax.random.PRNGKey(3))
            assert float(jnp.linalg.norm(new)) == pytest.approx(1.0, abs=1e-12)
            assert float(new @ v) == pytest.approx(kept, abs=4.0 * np.sqrt((1.0 - kept**2) / 10_000))


# --- the answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", [5e-4, pytest.param(5e-2, marks=pytest.mark.slow)])
def test_unadjusted_moments_are_within_the_allowance(knob: float) -> None:
    posterior = conjugate(draws=1500, warmup=300, chains=4, energy_variance=knob)
    off, errors = moments(posterior)
    achieved, allowance = (posterior.info.figures[name] for name in ("energy_variance", "bias_allowance"))
    assert 0.2 * knob < achieved < 2.0 * knob
    assert allowance == bias_allowance(achieved)
    assert (np.abs(off) < 4.0 * errors + allowance).all(), (off, errors, allowance)


def test_adjusted_moments_are_exact_at_any_acceptance() -> None:
    """8 figures within 4 standard errors, at steps so large that draws without the test would be far off."""
    posterior = conjugate(draws=1000, warmup=300, chains=4, adjusted=True, target_accept=0.6)
    assert abs(posterior.info.figures["acceptance_rate"] - 0.6) < 0.1
    off, errors = moments(posterior)
    assert (np.abs(off) < 4.0 * errors).all(), np.abs(off / errors).max()


@pytest.mark.slow
def test_a_tempered_target_is_the_tempered_posterior() -> None:
    posterior = conjugate(draws=1000, warmup=300, chains=4, adjusted=True, temperature=4.0)
    off, errors = moments(posterior, 4.0 * PROBLEM.covariance)
    assert (np.abs(off) < 4.0 * errors).all(), np.abs(off / errors).max()
    assert "T=4" in posterior.info.target


# --- one chain, on densities of our own -----------------------------------------------------------


def chain(method: MCLMC, density: Any, start: np.ndarray, draws: int, seed: int = 0) -> dict[str, np.ndarray]:
    """What one chain records after its warm-up, (draw, ...), and `v`, on a log density over arrays of that length."""
    import jax

    functions = method.kernel(target_of(density, len(start)))
    with system("numpyro").session("float64", "cpu"):
        state = functions.begin(jax.numpy.asarray(start), jax.random.PRNGKey(seed), None)

        def once(state: Any, _: Any) -> Any:
            state = functions.step(state, None)
            return state, functions.record(state) | {"v": state.variances}

        _, kept = jax.jit(lambda state: jax.lax.scan(once, state, None, length=method.warmup + draws))(state)
        return {name: np.asarray(value)[method.warmup :] for name, value in kept.items()}


def target_of(density: Any, dimension: int) -> Any:
    return types.SimpleNamespace(
        problem=None, approximation=None, dimension=dimension, log_density=lambda u, data: density(u)
    )


def judged(method: MCLMC, kept: dict[str, np.ndarray]) -> Any:
    return method.summarise({name: value[None] for name, value in kept.items() if name not in ("u", "v")})


SCALES = np.logspace(-2, 2, 30)


def scaled(u: Any) -> Any:
    return -0.5 * (u**2 / SCALES**2).sum()


@functools.cache
def of_scales(knob: float) -> dict[str, np.ndarray]:
    return chain(MCLMC(warmup=600, energy_variance=knob), scaled, SCALES, 4000)


def test_the_bias_falls_with_the_knob() -> None:
    """The mean bias of 30 variances: far outside its error where the knob is large, half of that where it is small."""
    found = {}
    for knob in (5e-3, 5e-4):
        z = of_scales(knob)["u"] / SCALES
        found[knob] = (z**2).mean() - 1.0
        achieved = of_scales(knob)["energy_variance"].mean()
        assert abs(found[knob]) < bias_allowance(achieved) + 4.0 * np.sqrt(2.0 / (30 * 1000))
    # 4000 draws are worth 1000 or more, of 30 coordinates.
    assert found[5e-3] < -4.0 * np.sqrt(2.0 / (30 * 1000))
    assert abs(found[5e-4]) < abs(found[5e-3]) / 2.0


def test_the_warm_up_finds_the_scales_and_the_energy_variance() -> None:
    kept = of_scales(5e-4)
    # The relative error of a variance from about a thousand effective draws, sqrt(2 / 1000), 5 of them for 30 figures.
    assert np.allclose(kept["v"][-1], SCALES**2, rtol=0.25)
    assert 0.3 < kept["energy_variance"].mean() / 5e-4 < 2.0
    assert np.allclose(kept["decoherence_length"], 2.0 * np.sqrt(30), rtol=0.2)
    figures, warnings = judged(MCLMC(), kept)
    assert figures["L"] == pytest.approx(kept["decoherence_length"][-1])
    assert figures["step_size"] == pytest.approx(kept["step_size"][-1])
    assert not warnings


def test_tuning_survives_a_region_without_a_density() -> None:
    """NaN beyond a wall: steps shrink and go on; the wall is said; the step size is not driven to zero by it."""
    import jax.numpy as jnp

    def walled(u: Any) -> Any:
        return jnp.where(u[0] > 1.0, jnp.nan, -0.5 * (u**2).sum())

    method = MCLMC(warmup=300)
    kept = chain(method, walled, np.zeros(10), 1000)
    assert np.isfinite(kept["u"]).all()
    assert (kept["u"][:, 0] <= 1.0).all()
    assert 0.02 < kept["diverging"].mean() < 0.5
    free = chain(method, lambda u: -0.5 * (u**2).sum(), np.zeros(10), 1000)
    assert free["step_size"][-1] / 4.0 < kept["step_size"][-1] <= 1.2 * free["step_size"][-1]
    assert "diverged" in " ".join(judged(method, kept)[1])


@pytest.mark.parametrize("adjusted", [False, True])
def test_a_collapsed_tuning_is_an_error(adjusted: bool) -> None:
    """Half of all places have no density, however near: no step size helps, and what is drawn is no sample."""
    import jax.numpy as jnp

    def perforated(u: Any) -> Any:
        return jnp.where(jnp.sin(1e13 * u[0]) > 0.5, jnp.nan, -0.5 * (u**2).sum())

    method = MCLMC(warmup=300, adjusted=adjusted)
    kept = chain(method, perforated, np.full(10, 1e-14), 50)
    with pytest.raises(DivergenceError, match="collapsed"):
        judged(method, kept)


def test_gradients_are_counted_one_by_one() -> None:
    import jax

    calls = []

    def counted(u: Any) -> Any:
        calls.append(u)
        return -0.5 * (u**2).sum()

    for method in (MCLMC(thinning=3), MCLMC(adjusted=True)):
        functions = method.kernel(target_of(counted, 4))
        with system("numpyro").session("float64", "cpu"), jax.disable_jit():
            state = functions.begin(jax.numpy.ones(4), jax.random.PRNGKey(0), None)
            for _ in range(3):
                calls.clear()
                state = functions.step(state, None)
                assert len(calls) == int(functions.record(state)["n_steps"]) > 0


# --- as a method ----------------------------------------------------------------------------------


def fit(method: Any, seed: int = 0) -> Any:
    x, y = regression_data(rows=25)
    return bnn.fit(small_network, x, y, method, seed=seed)


@pytest.mark.parametrize("adjusted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_statistics_and_going_on(adjusted: bool) -> None:
    """10 draws and 10 more are the 20 of a run that had been as long from the beginning, bit for bit."""
    method = MCLMC(draws=20, warmup=30, chains=2, adjusted=adjusted)
    posterior = fit(method)
    statistics = posterior.statistics
    names = {"lp", "n_steps", "energy_error", "step_size", "decoherence_length", "diverging"}
    assert set(statistics) == names | {"acceptance_rate" if adjusted else "energy_variance"}
    assert all(value.shape == (2, 20) and np.isfinite(value).all() for value in statistics.values())
    np.testing.assert_allclose(statistics["lp"].ravel(), posterior.log_joint(), rtol=1e-9)
    assert (statistics["step_size"] == statistics["step_size"][:, :1]).all()
    assert (statistics["n_steps"] % 2 == 0).all()
    assert posterior.info.gradient_evaluations >= statistics["n_steps"].sum() + 2 * 30 * 2
    longer = bnn.extend(fit(MCLMC(draws=10, warmup=30, chains=2, adjusted=adjusted)), 10)
    for name, value in posterior.draws.items():
        assert np.array_equal(value, longer.draws[name]), name


def test_thinning_is_the_steps_of_a_draw() -> None:
    posterior = fit(MCLMC(draws=5, warmup=20, chains=2, thinning=7))
    assert (posterior.statistics["n_steps"] == 14).all()
    # Two gradients for each of 7 steps of 25 transitions, and one to begin with.
    assert posterior.info.gradient_evaluations == 2 * (25 * 14 + 1)


def test_an_approximation_is_the_first_preconditioner(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(*arguments: Any, **keywords: Any) -> Any:
        seen.append(spread(*arguments, **keywords))
        return seen[-1]

    spread = mclmc.spread
    monkeypatch.setattr(mclmc, "spread", watched)
    laplace = bnn.fit(PROBLEM.model, PROBLEM.x, PROBLEM.y, bnn.Laplace(steps=300))
    bnn.fit(PROBLEM.model, PROBLEM.x, PROBLEM.y, MCLMC(start=laplace, draws=5, warmup=10, chains=1))
    np.testing.assert_allclose(seen[-1], np.diag(PROBLEM.covariance), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"energy_variance": 0.0}, "energy_variance"),
        ({"energy_variance": True}, "energy_variance"),
        ({"target_accept": 1.0}, "target_accept"),
        ({"thinning": 0}, "thinning"),
        ({"thinning": 5, "adjusted": True}, "thinning"),
        ({"adjusted": 1}, "adjusted"),
        ({"preconditioning": "diagonal"}, "preconditioning"),
        ({"decoherence": -1.0}, "decoherence"),
        ({"warmup": 9}, "warmup"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        MCLMC(**settings)


def test_what_it_cannot_do() -> None:
    def constant(x: Any, y: Any = None) -> None:
        level = bnn.sample("level", bnn.dist.Normal(0.0, 1.0))
        bnn.observe(y, level + 0.0 * x[:, :1], bnn.likelihoods.Gaussian(1.0))

    with pytest.raises(UnsupportedError, match="two coordinates"):
        bnn.fit(constant, *regression_data(rows=5), MCLMC())
    with pytest.raises(UnsupportedError, match="numpyro"):
        MCLMC(ppl="pyro")
    with pytest.raises(UnknownNameError, match="energy_variance"):
        MCLMC(energy_variances=1e-3)


# --- going on -------------------------------------------------------------------------------------


def test_going_on_compiles_no_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    functions = engine.Engine._functions

    def watched(self: Any) -> Any:
        found = functions(self)
        return found._replace(begin=lambda: wanted.append(1) or found.begin())

    monkeypatch.setattr(engine.Engine, "_functions", watched)
    short = fit(MCLMC(draws=3, warmup=10, chains=1))
    assert wanted
    wanted.clear()
    bnn.extend(short, 3)
    assert not wanted


# --- what is said ---------------------------------------------------------------------------------


def statistics_of(**changed: np.ndarray | float) -> dict[str, np.ndarray]:
    """Those of a good run of 3 chains of 8 draws, with some replaced."""
    good = {"step_size": 1.0, "decoherence_length": 5.0, "diverging": False, "energy_variance": 5e-4}
    return {
        name: np.broadcast_to(np.asarray(value), (3, 8))
        for name, value in (good | {"n_steps": 20} | changed).items()
    }


def test_what_is_said_of_a_tuning() -> None:
    method = MCLMC()
    figures, warnings = method.summarise(statistics_of())
    assert figures == {
        "L": 5.0,
        "step_size": 1.0,
        "energy_variance": 5e-4,
        "bias_allowance": bias_allowance(5e-4),
    }
    assert warnings == ()
    one = np.array([[1.0], [1.0], [1e-5]])
    assert "chain 2" in method.summarise(statistics_of(energy_variance=5e-4 * one))[1][0]
    assert "above" in method.summarise(statistics_of(energy_variance=5e-3))[1][0]
    assert "24 of 24" in method.summarise(statistics_of(diverging=True))[1][0]
    for name, value in (
        ("step_size", np.nan),
        ("step_size", 0.0),
        ("step_size", 4e-5),
        ("decoherence_length", np.inf),
        ("energy_variance", 5e-4 * one**2),
        ("energy_variance", np.nan),
    ):
        with pytest.raises(DivergenceError, match="collapsed"):
            method.summarise(statistics_of(**{name: value}))
    adjusted = MCLMC(adjusted=True)
    assert adjusted.summarise(statistics_of(acceptance_rate=0.9))[0]["acceptance_rate"] == pytest.approx(0.9)
    assert "cut off" in adjusted.summarise(statistics_of(acceptance_rate=0.9, n_steps=2048))[1][0]
    with pytest.raises(DivergenceError, match="chain 1"):
        adjusted.summarise(statistics_of(acceptance_rate=np.array([[0.9], [0.01], [0.9]])))


def free(method: Any, size: int, step_size: float, width: float) -> tuple[Any, Any]:
    """(the kernel of a method past its warm-up, a state of it) on a normal so wide that nothing bends a path."""
    target: Any = types.SimpleNamespace(
        dimension=size,
        problem=types.SimpleNamespace(),
        names=["w"],
        approximation=None,
        log_density=lambda flat, data, scale=1.0: -0.5e-20 * flat @ flat,
    )
    kernel = method.kernel(target)
    state = kernel.begin(jnp.ones(size), jax.random.PRNGKey(1), ())
    log_step = jnp.asarray(math.log(step_size))
    tuner = state.tuner._replace(log_step=log_step, mean=log_step)
    return kernel, state._replace(
        count=jnp.int32(method.warmup), tuner=tuner, width=jnp.asarray(width), steps=jnp.int32(1)
    )


def test_trajectories_of_adjusted_chains_are_one_and_a_half_widths_long():
    """Mean 15 steps of 1 at a width of 10, uniform over 1 .. 29: within 4.5 standard errors over 400 trajectories."""
    with jax.enable_x64(True):
        kernel, state = free(MCLMC(adjusted=True), 5, step_size=1.0, width=10.0)

        def once(state: Any, _: Any) -> Any:
            state = kernel.step(state, ())
            return state, state.taken

        _, taken = jax.lax.scan(once, state, None, 400)
        assert float(kernel.record(state)["decoherence_length"]) == 15.0
    assert abs(float(taken.mean()) - 15.0) < 4.5 * math.sqrt((29**2 - 1) / 12 / 400)
    assert int(taken.max()) <= 29
