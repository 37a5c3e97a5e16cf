"""NUTS in both systems: the closed form of a linear model, statistics, starts, bits, interrupts and bad arguments."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import DivergenceError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.mcmc.nuts import NUTS
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.sampling import chains
from ppl_bnn.posterior.approximation import Chains, Point

NOISE = 0.5


def linear(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))


def network(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    f = bnn.mlp(x, [3, 1], activation="tanh", prior=bnn.priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(noise))


def partly_bayesian(x: Any, y: Any = None) -> None:
    f = bnn.dense("output", x, 1, prior=bnn.priors.Point(), bias=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))


def table(rows: int = 25, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    return x, x @ [0.8, -0.4] + 0.3 + NOISE * rng.normal(size=rows)


def closed_form(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of (weights, bias) of `linear`."""
    design = np.column_stack([x, np.ones(len(x))])
    covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(design.shape[1]))
    return covariance @ design.T @ y / NOISE**2, covariance


def standard_errors_off(draws: np.ndarray, truth: float) -> float:
    """|mean - truth| in Monte-Carlo standard errors, for draws (chain, draw) of one quantity."""
    from arviz_stats.base import array_stats

    error = float(array_stats.mcse(draws, chain_axis=0, draw_axis=1, method="mean"))
    return abs(draws.mean() - truth) / error


def worst_error(posterior: Any, x: np.ndarray, y: np.ndarray) -> float:
    """The largest deviation of means, variances and one covariance from the closed form, in standard errors."""
    mean, covariance = closed_form(x, y)
    weight, bias = posterior.draws["output.weight"][..., 0], posterior.draws["output.bias"]
    centred = np.concatenate([weight, bias], axis=-1) - mean
    found = [standard_errors_off(centred[..., i], 0.0) for i in range(3)]
    # The mean is known, so that a mean of squares estimates the variance and its standard error is that of a mean.
    found += [standard_errors_off(centred[..., i] ** 2, covariance[i, i]) for i in range(3)]
    found.append(standard_errors_off(centred[..., 0] * centred[..., 2], covariance[0, 2]))
    return max(found)


def fit(method: Method, model: Any = linear, *, seed: int = 0, progress: Any = None) -> Any:
    x, y = table()
    return method.fit(model, x, y, seed=seed, device="cpu", progress=progress)


CONJUGATE = {
    "numpyro": NUTS(draws=400, warmup=300, chains=4),
    "pyro": NUTS(draws=600, warmup=200, chains=1, ppl="pyro"),
}
SMALL = {
    "numpyro": NUTS(draws=12, warmup=15, chains=2),
    "pyro": NUTS(draws=6, warmup=8, chains=2, ppl="pyro", chain_method="sequential"),
}


class Listener:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def task(self, title: str, total: int) -> Listener:
        self.total = total
        return self

    def update(self, done: int, **figures: float) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.told.append((done, figures))

    def close(self) -> None:
        self.closed = True


@functools.cache
def small_fit(ppl: str) -> tuple[Any, Listener]:
    """One short fit of the network, looked at from several sides; most of a short fit is compilation."""
    listener = Listener()
    return fit(SMALL[ppl], network, seed=4, progress=listener), listener


# --- the answer -----------------------------------------------------------------------------------


def test_the_posterior_of_a_linear_model_is_the_closed_form(ppl: str) -> None:
    # 4 standard errors, 7 figures. Over 20 seeds NumPyro never fails (worst 2.9). Pyro with half as many draws failed
    # once (5.3, the others below 3.2); at this length it has yet to be measured.
    assert worst_error(fit(CONJUGATE[ppl]), *table()) < 4.0


@pytest.mark.slow
def test_vectorised_chains_and_a_dense_mass_matrix_leave_the_posterior_as_it_is() -> None:
    method = NUTS(draws=400, warmup=300, chains=4, chain_method="vectorised", mass_matrix="dense")
    assert worst_error(fit(method), *table()) < 4.0


@pytest.mark.slow
def test_a_dense_mass_matrix_in_pyro_leaves_the_posterior_as_it_is() -> None:
    # One chain, as two would be fitted in processes of their own, which begin by importing torch.
    method = dataclasses.replace(CONJUGATE["pyro"], mass_matrix="dense")
    assert worst_error(fit(method), *table()) < 4.0


@pytest.mark.slow
def test_both_systems_agree_on_a_network_in_function_space() -> None:
    from arviz_stats.base import array_stats

    x, _ = table(rows=5, seed=9)
    found = {}
    # In one process, as others would begin by importing torch. Pyro's 600 draws decide what is seen: were they
    # independent, a difference of 16 % of a standard deviation of f.
    settings: dict[str, Any] = {"target_accept": 0.9, "chain_method": "sequential"}
    for method in (
        NUTS(draws=2000, warmup=500, chains=4, **settings),
        NUTS(draws=300, warmup=150, chains=2, ppl="pyro", **settings),
    ):
        posterior = fit(method, network)
        f = posterior.predictor(x)
        squared = (f[..., 0] - 0.3) ** 2
        parts = [*np.moveaxis(f[..., 0], -1, 0), *np.moveaxis(f[..., 1], -1, 0), *np.moveaxis(squared, -1, 0)]
        found[method.ppl] = [
            (part.mean(), float(array_stats.mcse(part, chain_axis=0, draw_axis=1, method="mean")))
            for part in parts
        ]
    for (one, error), (other, other_error) in zip(found["numpyro"], found["pyro"], strict=True):
        assert abs(one - other) < 4.0 * np.hypot(error, other_error)


# --- what comes with it ---------------------------------------------------------------------------


def test_statistics_have_the_names_and_meaning_of_arviz(ppl: str) -> None:
    method, (posterior, _) = SMALL[ppl], small_fit(ppl)
    expected = {
        "lp",
        "acceptance_rate",
        "mean_accept_prob",
        "step_size",
        "n_steps",
        "tree_depth",
        "reached_max_tree_depth",
        "diverging",
    }
    statistics = posterior.statistics
    assert set(statistics) == expected | ({"energy"} if ppl == "numpyro" else set())
    for value in statistics.values():
        assert value.shape == (method.chains, method.draws)
        assert np.isfinite(value).all()
    assert statistics["diverging"].dtype == statistics["reached_max_tree_depth"].dtype == bool
    np.testing.assert_allclose(statistics["lp"].ravel(), posterior.log_joint(), rtol=1e-9)
    acceptance = statistics["acceptance_rate"]
    assert (acceptance >= 0).all()
    assert (acceptance <= 1 + 1e-9).all()
    running = np.cumsum(acceptance, axis=1) / np.arange(1, method.draws + 1)
    np.testing.assert_allclose(statistics["mean_accept_prob"], running, rtol=1e-6)
    # d doublings make 2**d - 1 steps.
    assert (statistics["n_steps"] < 2.0 ** statistics["tree_depth"]).all()
    assert (statistics["n_steps"] >= 2.0 ** (statistics["tree_depth"] - 1)).all()
    # The step size is fixed after the warm-up, chain by chain.
    assert (statistics["step_size"] == statistics["step_size"][:, :1]).all()
    if ppl == "numpyro":
        assert (statistics["energy"] > -statistics["lp"]).all()


def test_what_is_reported_about_the_fit(ppl: str) -> None:
    method, (posterior, _) = SMALL[ppl], small_fit(ppl)
    info = posterior.info
    assert posterior.kind == "chains"
    assert posterior.shape == (method.chains, method.draws)
    assert posterior.draws["hidden0.weight"].shape == (method.chains, method.draws, 2, 3)
    least = posterior.statistics["n_steps"].sum() + method.chains * (1 + method.warmup)
    assert info.gradient_evaluations >= least
    assert info.run_seconds > 0
    assert info.compile_seconds > 0.0


def test_gradient_evaluations_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyro.ops.integrator

    calls = []
    grad = pyro.ops.integrator.grad
    monkeypatch.setattr(pyro.ops.integrator, "grad", lambda *a: calls.append(1) or grad(*a))
    assert fit(SMALL["pyro"]).info.gradient_evaluations == len(calls)


def test_a_tree_of_depth_one_is_reported_and_warned_of(ppl: str) -> None:
    posterior = fit(dataclasses.replace(SMALL[ppl], max_tree_depth=1))
    assert (posterior.statistics["n_steps"] == 1).all()
    assert posterior.statistics["reached_max_tree_depth"].all()
    assert any("max_tree_depth=1" in warning for warning in posterior.info.warnings)


def test_divergences_are_reported_and_warned_of() -> None:
    def funnel(x: Any, y: Any = None) -> None:
        log_scale = bnn.sample("log_scale", bnn.dist.Normal(0.0, 3.0))
        f = bnn.dense("output", x, 1, prior=bnn.priors.Normal(0.0, 1.0), bias=False)
        scale = bnn.ops.exp(log_scale / 2)
        w = bnn.sample("w", bnn.dist.distribution("Normal", 0.0, scale).expand((9,)).to_event())
        bnn.observe(y, f + 0.0 * w[0], bnn.likelihoods.Gaussian(NOISE))

    posterior = fit(NUTS(draws=300, warmup=200, chains=2, target_accept=0.6), funnel)
    assert posterior.statistics["diverging"].any()
    count = int(posterior.statistics["diverging"].sum())
    assert any(w.startswith(f"{count} of 600 transitions diverged") for w in posterior.info.warnings)


def test_progress_goes_from_nought_to_all(ppl: str) -> None:
    method, (_, listener) = SMALL[ppl], small_fit(ppl)
    done = [count for count, _ in listener.told]
    assert done == sorted(done)
    assert done[-1] == listener.total == method.chains * (method.warmup + method.draws)
    # A run of some seconds also tells the effective sample size so far.
    assert set(listener.told[-1][1]) - {"ess_of_lp"} == {"accept_prob", "divergences", "step_size"}
    assert listener.closed


# --- bits and globals -----------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    u, v = one.unconstrained_draws, other.unconstrained_draws
    return all(np.array_equal(u[name], v[name]) for name in u) and all(
        np.array_equal(one.statistics[name], other.statistics[name]) for name in one.statistics
    )


def test_one_seed_gives_the_same_bits_however_chains_are_run(
    ppl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = small_fit(ppl)
    method = dataclasses.replace(SMALL[ppl], chain_method="sequential")
    # Nor does it matter how transitions are cut into calls.
    monkeypatch.setattr(chains, "CHUNK", 4)
    assert same(first, fit(method, network, seed=4))


def test_chains_and_seeds_have_randomness_of_their_own(ppl: str) -> None:
    start = {"output.weight": np.ones((2, 1)), "output.bias": np.ones(1)}
    method = dataclasses.replace(SMALL[ppl], start=start, jitter=0.0)
    last = [fit(method, seed=seed).unconstrained_draws["output.bias"][:, -1, 0] for seed in (4, 5)]
    assert len(np.unique(last)) == 4


@pytest.mark.slow
def test_processes_give_the_bits_of_one_chain_after_another() -> None:
    one = fit(dataclasses.replace(SMALL["pyro"], chain_method="processes"))
    assert one.info.warnings == ()
    assert same(one, fit(SMALL["pyro"]))


def test_a_model_that_cannot_go_to_other_processes_is_fitted_here_with_a_warning() -> None:
    lock = threading.Lock()

    def model(x: Any, y: Any = None) -> None:
        with lock:
            linear(x, y)

    posterior = fit(NUTS(draws=3, warmup=3, chains=2, ppl="pyro"), model)
    assert posterior.shape == (2, 3)
    assert any("one after another" in warning for warning in posterior.info.warnings)


def test_a_process_that_may_start_no_others_fits_chains_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = NUTS(draws=3, warmup=3, chains=2, ppl="pyro")
    # Processes give these bits too, as the test of processes shows.
    apart = fit(dataclasses.replace(method, chain_method="sequential"))
    # What Dask makes of its workers; joblib's processes are not to be had there.
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    here = fit(method)
    assert here.info.warnings == apart.info.warnings
    assert same(here, apart)
    asked = fit(dataclasses.replace(method, chain_method="processes"))
    assert any("may start no others" in warning for warning in asked.info.warnings)
    assert same(asked, apart)


def test_chains_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "cores", lambda: 3)
    barrier = threading.Barrier(3)
    told = []

    def work(chain: int, tell: Any, stopped: Any) -> None:
        # Passes only when all three are here at once.
        barrier.wait(timeout=20)
        tell(chain)

    chains.in_threads([0, 1, 2], work, told.append)
    assert sorted(told) == [0, 1, 2]


def test_an_error_in_one_chain_stops_the_others_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "cores", lambda: 2)

    def work(chain: int, tell: Any, stopped: Any) -> None:
        if chain == 1:
            raise ZeroDivisionError("chain 1")
        while not stopped():
            time.sleep(0.01)

    with pytest.raises(ZeroDivisionError, match="chain 1"):
        chains.in_threads([0, 1], work, lambda *report: None)


def test_globals_are_as_they_were(ppl: str) -> None:
    import random

    import jax
    import pyro
    import torch

    def state() -> list[Any]:
        return [
            jax.config.jax_enable_x64,
            jax.config.jax_default_device,
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.random.get_rng_state().numpy().tobytes(),
            np.random.get_state()[1].tobytes(),  # noqa: NPY002 - the global generator is what must not move
            random.getstate(),
            sorted(pyro.get_param_store().keys()),
            threading.active_count(),
        ]

    before = state()
    fit(SMALL[ppl])
    assert state() == before


class Interrupts:
    """A progress that a person interrupts at the second thing they hear."""

    def __init__(self) -> None:
        self.heard = 0
        self.closed = False

    def task(self, title: str, total: int) -> Interrupts:
        return self

    def update(self, done: int, **figures: float) -> None:
        self.heard += 1
        if self.heard == 2:
            raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


ENDLESS = {
    "threads": NUTS(draws=10_000_000, warmup=1_000, chains=2),
    "numpyro, sequential": NUTS(draws=10_000_000, warmup=1_000, chains=2, chain_method="sequential"),
    "pyro, sequential": NUTS(draws=1_000_000, chains=2, ppl="pyro", chain_method="sequential"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_interrupt_stops_all_chains_at_once(name: str) -> None:
    progress = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        fit(ENDLESS[name], progress=progress)
    assert progress.closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("chain")]


@pytest.mark.slow
def test_an_interrupt_stops_processes() -> None:
    progress = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        fit(NUTS(draws=1_000_000, chains=2, ppl="pyro"), progress=progress)


# --- where chains start ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed(Method):
    """A method that finds `value` for every coordinate, plus its seed times `spread`."""

    value: float = 0.25
    spread: float = 0.0
    seeds: list[int] = field(default_factory=list)

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        self.seeds.append(problem.seed)
        value = self.value + self.spread * problem.seed
        sites = problem.program.sites.values()
        return Outcome(Point({site.name: np.full(site.unconstrained_shape, value) for site in sites}))


@dataclass(frozen=True)
class OnlyStarts(NUTS):
    """NUTS that stops at its starting points and hands them over as draws."""

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        self.check_support(problem)
        (started,) = self.started([problem], progress)
        names = [site.name for site in problem.program.latents]
        u = problem.program.unravel(np.stack(started.flat)[:, None], names)
        u |= {
            name: np.broadcast_to(value, (self.chains, 1, *value.shape))
            for name, value in started.fixed.items()
        }
        return Outcome(Chains(u))


def test_chains_that_would_start_at_one_point_are_set_apart() -> None:
    start = fit(Fixed())
    bias = fit(OnlyStarts(chains=3, start=start)).unconstrained_draws["output.bias"].ravel()
    assert bias[0] == 0.25
    assert len(set(bias)) == 3
    assert np.abs(bias - 0.25).max() < 0.06
    still = fit(OnlyStarts(chains=3, start=start, jitter=0.0)).unconstrained_draws["output.bias"]
    assert (still == 0.25).all()


def test_a_method_as_start_is_fitted_once_per_chain(ppl: str) -> None:
    start = Fixed(spread=0.5, ppl=ppl)
    found = fit(OnlyStarts(chains=3, start=start, ppl=ppl)).unconstrained_draws["output.bias"]
    np.testing.assert_allclose(found.ravel(), [0.25, 0.75, 1.25])
    assert start.seeds == [0, 1, 2]


def test_without_a_start_each_chain_has_a_prior_draw_of_its_own(ppl: str) -> None:
    found = fit(OnlyStarts(chains=4, ppl=ppl)).unconstrained_draws["output.weight"]
    assert len(np.unique(found)) == found.size


def test_parameters_without_a_prior_are_refused_without_a_start(ppl: str) -> None:
    with pytest.raises(UnsupportedError, match=r"no optimiser.*output\.weight.*start="):
        fit(SMALL[ppl], partly_bayesian)
    with pytest.raises(UnsupportedError, match=r"output\.weight"):
        fit(NUTS(ppl=ppl, start={"output.bias": np.zeros(1)}), partly_bayesian)


def test_parameters_without_a_prior_keep_the_values_of_start(ppl: str) -> None:
    x, y = table()
    weight = np.array([[0.7], [-0.2]])
    size = {"draws": 200, "warmup": 100, "chains": 1}
    method = NUTS(ppl=ppl, start={"output.weight": weight}, **size)
    posterior = method.fit(partly_bayesian, x, y, device="cpu")
    assert (posterior.draws["output.weight"] == weight).all()
    # Given the weights, the bias is a normal mean with a normal prior.
    precision = 1.0 + len(x) / NOISE**2
    mean = (y - x @ weight[:, 0]).sum() / NOISE**2 / precision
    bias = posterior.draws["output.bias"][..., 0]
    assert standard_errors_off(bias, mean) < 4.0
    assert standard_errors_off((bias - mean) ** 2, 1.0 / precision) < 4.0


def test_parameters_of_the_first_start_serve_all_chains() -> None:
    start = Fixed(spread=0.5)
    posterior = fit(OnlyStarts(chains=3, start=start), partly_bayesian)
    np.testing.assert_allclose(posterior.draws["output.bias"].ravel(), [0.25, 0.75, 1.25])
    assert (posterior.draws["output.weight"] == 0.25).all()


def half_defined(x: Any, y: Any = None) -> None:
    half = bnn.sample("half", bnn.dist.Normal(0.0, 1.0))
    f = bnn.dense("output", x, 1, prior=bnn.priors.Normal(0.0, 1.0))
    # Squares of what lies below zero are beyond the largest float.
    bnn.observe(y, f + 1e200 * bnn.ops.relu(-half), bnn.likelihoods.Gaussian(NOISE))


def test_prior_draws_without_a_finite_log_joint_are_drawn_again(ppl: str) -> None:
    starts = fit(OnlyStarts(chains=4, ppl=ppl), half_defined, seed=1)
    assert (starts.draws["half"] < 0).any()
    posterior = fit(dataclasses.replace(SMALL[ppl], chains=4), half_defined, seed=1)
    assert (posterior.draws["half"] > 0).all()


def test_a_start_without_a_finite_log_joint_is_an_error(ppl: str) -> None:
    bad = dataclasses.replace(SMALL[ppl], start={"output.weight": np.full((2, 1), 1e200)})
    with pytest.raises(DivergenceError, match=r"finite log joint.*chain 0.*at the start given"):
        fit(bad)


def test_single_precision_and_inputs_by_name() -> None:
    def model(x: Any, y: Any = None) -> None:
        f = bnn.dense("a", x["a"], 1, prior=bnn.priors.Normal(0.0, 1.0))
        bnn.observe(y, f + bnn.dense("b", x["b"], 1), bnn.likelihoods.Gaussian(NOISE))

    x, y = table()
    method = NUTS(draws=5, warmup=5, chains=2, dtype="float32")
    posterior = method.fit(model, {"a": x[:, :1], "b": x[:, 1:]}, y, device="cpu")
    assert posterior.unconstrained_draws["a.weight"].dtype == np.float32
    assert np.isfinite(posterior.statistics["lp"]).all()


# --- bad arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"draws": 0}, InputError, "draws.*whole number of at least 1.*0"),
        ({"draws": 10.5}, InputError, "draws"),
        ({"warmup": 0}, InputError, "warmup"),
        ({"warmup": -1}, InputError, "warmup"),
        ({"chains": 0}, InputError, "chains"),
        ({"chains": True}, InputError, "chains"),
        ({"max_tree_depth": 0}, InputError, "max_tree_depth"),
        ({"max_tree_depth": 40}, InputError, "max_tree_depth"),
        ({"target_accept": 1.0}, InputError, "target_accept"),
        ({"target_accept": float("nan")}, InputError, "target_accept"),
        ({"target_accept": "0.8"}, InputError, "target_accept"),
        ({"jitter": -0.1}, InputError, "jitter"),
        ({"mass_matrix": "full"}, UnknownNameError, "mass_matrix.*dense"),
        ({"dense_mass": True}, UnknownNameError, "dense_mass"),
        ({"adapt_mass_matrix": 1}, InputError, "adapt_mass_matrix"),
        ({"step_size": 0.0}, InputError, "step_size"),
        ({"start": 3}, InputError, "start"),
        ({"chain_method": "parallel"}, UnknownNameError, "chain_method"),
        ({"chain_method": "processes"}, UnsupportedError, "numpyro.*processes"),
        ({"chain_method": "vectorised", "ppl": "pyro"}, UnsupportedError, "pyro.*vectorised"),
        ({"chain_method": "threads", "ppl": "pyro"}, UnsupportedError, "pyro.*threads"),
    ],
)
def test_impossible_arguments_are_named(options: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        NUTS(**options)
