"""What NUTS and HMC share: mass matrices, warm starts, temperature, and what Pyro's chains refuse."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import DivergenceError, UnsupportedError
from ppl_bnn.core.progress import Progress, Silent
from ppl_bnn.inference.mcmc.hamiltonian import layer_of, mass_blocks
from ppl_bnn.inference.mcmc.nuts import NUTS
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.sampling import initialisation as warm_start
from ppl_bnn.inference.sampling.initialisation import shrunk_covariance, spread, within_reach
from ppl_bnn.inference.sampling.sampler import Target, extend
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.posterior.approximation import Approximation, Chains, Point
from tests.inference.mcmc.test_nuts import (
    OnlyStarts,
    closed_form,
    fit,
    linear,
    network,
    standard_errors_off,
    table,
    worst_error,
)

# In the flat vector: noise, then weights (2 x 3 and 3 x 1), each before its bias.
SIZES = {"noise": 1, "hidden0": 9, "output": 4}
TINY = {"draws": 3, "warmup": 3, "chains": 1}
SLOW_IN_PYRO = ["numpyro", pytest.param("pyro", marks=pytest.mark.slow)]


def problem_of(model: Any, ppl: str = "numpyro") -> Any:
    """A context in which there is a problem; leave it to end the session."""
    x, y = table()
    chosen = system(ppl)
    arrays = chosen.asarray(x), chosen.asarray(y)
    program = Program.of(chosen, model, *arrays, language=True)
    return Problem(program, *arrays, x, y, 0, "cpu", "float64")


@functools.cache
def laplace_of(model: Any = network, **options: Any) -> Any:
    """A fit that several tests start from, made once; nobody changes it."""
    return fit(bnn.Laplace(steps=500, **options), model)


def matrices(structure: str) -> Counter[tuple[int, ...]]:
    """Shapes of the matrices in the state of a chain on the network, which need no fit."""
    import jax

    with system("numpyro").session("float64", "cpu"):
        problem = problem_of(network)
        kernel = NUTS(mass_matrix=structure).kernel(Target(problem))
        data = (problem.x, problem.y, {})
        flat = problem.system.asarray(np.zeros(14))
        state = jax.eval_shape(lambda flat: kernel.begin(flat, jax.random.PRNGKey(0), data), flat)
    return Counter(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim == 2)


# --- mass matrices --------------------------------------------------------------------------------


@pytest.mark.parametrize(("structure", "sizes"), [("diagonal", []), ("dense", [14]), ("block", [9, 4])])
def test_the_mass_matrix_in_the_state_has_the_structure_asked_for(structure: str, sizes: list[int]) -> None:
    # The inverse, two roots, and the sums that the next estimate is made of.
    assert matrices(structure) == {(size, size): 4 for size in sizes}


@pytest.mark.parametrize("structure", ["diagonal", "block"])
def test_a_chain_begins_where_it_is_told_however_its_state_is_laid_out(structure: str) -> None:
    import jax

    flat = np.random.default_rng(2).normal(size=14)
    with system("numpyro").session("float64", "cpu"):
        problem = problem_of(network)
        names = [site.name for site in problem.program.latents]
        kernel = NUTS(mass_matrix=structure).kernel(Target(problem))
        data = (problem.x, problem.y, {})
        found = kernel.record(kernel.begin(problem.system.asarray(flat), jax.random.PRNGKey(0), data))
        np.testing.assert_array_equal(found["u"], flat)
        u = problem.program.unravel(flat[None], names)
        np.testing.assert_allclose(found["lp"], problem.log_joint_draws(u)[0], rtol=1e-9)


def test_blocks_are_layers_with_the_rest_on_a_diagonal() -> None:
    def model(x: Any, y: Any = None) -> None:
        noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
        level = bnn.sample("level", bnn.dist.Normal(0.0, 1.0))
        prior = bnn.priors.Hierarchical(bnn.dist.HalfNormal(1.0))
        f = bnn.dense("output", bnn.ops.tanh(bnn.dense("hidden", x, 2, prior=prior)), 1)
        bnn.observe(y, f + level, bnn.likelihoods.Gaussian(noise))

    with system("numpyro").session("float64", "cpu"):
        program = problem_of(model).program
        names = [site.name for site in program.latents]
        hidden, output, rest = mass_blocks(program, "block")
        assert mass_blocks(program, "dense")[0].sites == tuple(names)
    assert hidden.dense
    assert output.dense
    assert not rest.dense
    assert set(hidden.sites) == {name for name in names if name.startswith("hidden.")}
    assert set(output.sites) == {"output.weight", "output.bias"}
    assert set(rest.sites) == {"noise", "level"}
    positions = np.concatenate([hidden.positions, output.positions, rest.positions])
    assert sorted(positions) == list(range(program.parameter_count))


def test_the_layer_of_a_site_is_what_stands_before_its_weight() -> None:
    names = ("a.weight", "a.bias", "a.weight.scale", "a.0.weight.base", "b", "c.d", "weight")
    assert [layer_of(name) for name in names] == ["a", "a", "a", "a.0", "b", "c", "weight"]


@pytest.mark.parametrize("ppl", SLOW_IN_PYRO)
def test_layers_in_blocks_leave_the_posterior_as_it_is(ppl: str) -> None:
    small = {"draws": 400, "warmup": 200, "chains": 1} if ppl == "pyro" else {"draws": 400, "warmup": 300}
    assert worst_error(fit(NUTS(mass_matrix="block", ppl=ppl, **small)), *table()) < 4.0


# --- what a start knows of the posterior's width ------------------------------------------------------


def test_a_laplace_start_gives_its_covariance_as_the_inverse_mass_matrix() -> None:
    """In blocks, which are dense for a layer and a diagonal for the rest; Pyro's test below has all structures."""
    start = laplace_of()
    covariance = 2.0 * start.approximation.covariance.covariance()
    method = NUTS(**TINY, start=start, mass_matrix="block", adapt_mass_matrix=False, temperature=2.0)
    leaves = list(fit(method, network).approximation.state.values())
    # The order of sites in the program: noise, hidden0, output.
    for part in (covariance[1:10, 1:10], covariance[10:, 10:], covariance[:1, 0]):
        assert any(leaf.shape == part.shape and np.allclose(leaf, part, rtol=1e-6) for leaf in leaves)


@pytest.mark.parametrize("structure", ["diagonal", "dense", "block"])
def test_in_pyro_too(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyro.infer

    kernels = []

    class Seen(pyro.infer.NUTS):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            kernels.append(self)

    monkeypatch.setattr(pyro.infer, "NUTS", Seen)
    start = laplace_of()
    covariance = start.approximation.covariance.covariance()
    method = NUTS(
        **TINY, ppl="pyro", start=start, mass_matrix=structure, adapt_mass_matrix=False, max_tree_depth=2
    )
    fit(method, network)
    found = kernels[0].inverse_mass_matrix
    # Layers in blocks, and the noise apart.
    wanted = {
        "diagonal": [np.diag(covariance)],
        "dense": [covariance],
        "block": [covariance[1:10, 1:10], covariance[10:, 10:], covariance[0, :1]],
    }[structure]
    for (_, matrix), each in zip(sorted(found.items()), wanted, strict=True):
        np.testing.assert_allclose(matrix, each, rtol=1e-6)


def test_the_shrunk_covariance_is_that_of_ledoit_and_wolf(rng: np.random.Generator) -> None:
    from sklearn.covariance import ledoit_wolf

    draws = rng.normal(size=(40, 6)) @ rng.normal(size=(6, 6)) * np.array([1, 10, 0.1, 1, 2, 3])
    scale = np.sqrt(np.mean(draws**2, axis=0))
    wanted, amount = ledoit_wolf(draws / scale, assume_centered=True)
    assert 0.0 < amount < 1.0
    np.testing.assert_allclose(shrunk_covariance(draws), wanted * np.outer(scale, scale), rtol=1e-10)


def test_what_draws_say_of_a_normal_comes_near_to_what_it_is(rng: np.random.Generator) -> None:
    """Draws of the same approximation, made once: 400 of 3 coordinates, variances scatter by sqrt(2 / 400) = 7 %."""
    posterior = laplace_of(linear)
    exact = posterior.approximation.covariance.covariance()
    u = posterior.approximation.draw(800, rng)
    chains = Chains({name: value.reshape(2, 400, *value.shape[1:]) for name, value in u.items()})
    with system("numpyro").session("float64", "cpu"):
        problem = problem_of(linear)
        found = spread(problem, chains, True)
        # Chains that are far apart are as wide as each of them is.
        chains.u["output.bias"][1] += 100.0
        np.testing.assert_allclose(spread(problem, chains, True), found, rtol=1e-6)
        np.testing.assert_allclose(spread(problem, chains, False), np.diag(found), rtol=1e-9)
        assert spread(problem, Point({}), True) is None
    scale = np.sqrt(np.diag(exact))
    assert np.abs((found - exact) / np.outer(scale, scale)).max() < 5 * np.sqrt(2 / 800)


def test_what_does_not_vary_has_the_variance_of_what_is_unknown() -> None:
    with system("numpyro").session("float64", "cpu"):
        problem = problem_of(linear)
        scale = {"output.weight": np.array([[0.5], [0.0]]), "output.bias": np.array([0.2])}
        loc = {name: np.zeros_like(value) for name, value in scale.items()}
        np.testing.assert_allclose(spread(problem, MeanField(loc, scale), False), [0.25, 1.0, 0.04])
        np.testing.assert_allclose(spread(problem, MeanField(loc, scale), True), np.diag([0.25, 1.0, 0.04]))


def test_a_laplace_approximation_of_some_weights_knows_nothing_of_the_others() -> None:
    posterior = laplace_of(weights="last_layer")
    with system("numpyro").session("float64", "cpu"):
        problem = problem_of(network)
        variances = spread(problem, posterior.approximation, False)
    at = posterior.approximation.positions
    assert at is not None
    rest = np.setdiff1d(np.arange(14), at)
    assert (variances[rest] == 1.0).all()
    np.testing.assert_allclose(variances[at], posterior.approximation.covariance.variances())


# --- where chains begin ---------------------------------------------------------------------------


def test_draws_of_a_good_approximation_are_where_chains_begin() -> None:
    start = laplace_of(linear)
    found = fit(OnlyStarts(chains=3, start=start), linear).unconstrained_draws
    drawn = start.approximation.draw(3, np.random.default_rng(0))
    for name, value in drawn.items():
        np.testing.assert_array_equal(found[name][:, 0], value)


def test_draws_far_from_the_posterior_are_pulled_towards_the_centre_until_they_are_not() -> None:
    start = laplace_of()
    wide = dataclasses.replace(start.approximation)
    with system("numpyro").session("float64", "cpu"):
        problem = problem_of(network)
        u = {
            name: start.approximation.mode[name] + 30.0 * (value - start.approximation.mode[name])
            for name, value in wide.draw(6, np.random.default_rng(1)).items()
        }
        pulled = within_reach(problem, wide, u)
        mode = {name: value[None] for name, value in wide.mode.items()}
        top = problem.log_joint_draws(mode)[0]
        lost = top - problem.log_joint_draws(pulled)
        before = top - problem.log_joint_draws(u)
    allowed = 7.0 + 4.0 * np.sqrt(7.0)
    assert (before > allowed).all()
    assert (lost <= allowed).all()
    # On the way from the draw to the mode, by a power of two, and no nearer than needed.
    share = {
        name: (pulled[name] - wide.mode[name]).reshape(6, -1) / (u[name] - wide.mode[name]).reshape(6, -1)
        for name in u
    }
    powers = -np.log2(np.concatenate(list(share.values()), axis=1))
    np.testing.assert_allclose(powers, np.broadcast_to(np.round(powers[:, :1]), powers.shape), atol=1e-6)
    assert (powers >= 1 - 1e-6).all()


@dataclass(frozen=True)
class Wide(Method):
    """A method that hands over independent normals, and remembers the seeds it was fitted with."""

    seeds: list[int] = field(default_factory=list)

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        self.seeds.append(problem.seed)
        shapes = {site.name: site.unconstrained_shape for site in problem.program.sites.values()}
        q = MeanField(
            {name: np.zeros(shape) for name, shape in shapes.items()},
            {name: np.full(shape, 0.1) for name, shape in shapes.items()},
        )
        return Outcome(q, gradient_evaluations=7.0, compile_seconds=1000.0, warnings=("it was hard",))


def test_a_method_that_finds_a_distribution_is_fitted_once() -> None:
    start = Wide()
    found = fit(OnlyStarts(chains=3, start=start)).unconstrained_draws["output.bias"]
    assert start.seeds == [0]
    assert len(np.unique(found)) == 3


def test_what_a_start_costs_and_says_is_part_of_the_fit() -> None:
    alone = fit(NUTS(**TINY), seed=2)
    posterior = fit(NUTS(**TINY, start=Wide()), seed=2)
    assert posterior.info.compile_seconds > 1000.0
    steps = posterior.statistics["n_steps"].sum()
    assert posterior.info.gradient_evaluations > 7.0 + steps
    assert "start: it was hard" in posterior.info.warnings
    assert not any("hard" in warning for warning in alone.info.warnings)


class Members(Approximation):
    """A mixture of parts, as an ensemble hands over."""

    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    def __init__(self, parts: tuple[Approximation, ...]):
        self.parts = parts

    @property
    def components(self) -> tuple[Approximation, ...]:
        return self.parts

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.parts[0].draw(count, rng)

    def log_prob(self, u: Mapping[str, np.ndarray]) -> None:
        return None

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Members:
        raise NotImplementedError


def test_chains_begin_in_the_members_of_an_ensemble_in_turn() -> None:
    shapes = {"output.weight": (2, 1), "output.bias": (1,)}

    def member(value: float) -> Point:
        return Point({name: np.full(shape, value) for name, shape in shapes.items()})

    start = dataclasses.replace(fit(Wide()), approximation=Members((member(0.1), member(0.2), member(0.3))))
    found = fit(OnlyStarts(chains=5, start=start, jitter=1e-9)).unconstrained_draws["output.bias"]
    np.testing.assert_allclose(found.ravel(), [0.1, 0.2, 0.3, 0.1, 0.2], atol=1e-6)


def test_an_ensemble_is_as_wide_as_its_members_are() -> None:
    def member(loc: float, scale: float) -> MeanField:
        shapes = {"output.weight": (2, 1), "output.bias": (1,)}
        return MeanField(
            {name: np.full(shape, loc) for name, shape in shapes.items()},
            {name: np.full(shape, scale) for name, shape in shapes.items()},
        )

    with system("numpyro").session("float64", "cpu"):
        problem = problem_of(linear)
        both = Members((member(-50.0, 1.0), member(50.0, 2.0)))
        np.testing.assert_allclose(spread(problem, both, False), 2.5)
        points = Members((Point({}), Point({})))
        assert spread(problem, points, False) is None
        assert warm_start.beginnings([problem], None, Silent(), 2)[0].approximation is None


def test_a_start_that_knows_the_posteriors_width_saves_leapfrog_steps() -> None:
    """Standard deviations 100 times apart, and a warm-up too short to find that out.

    Without a start the trajectories of a draw are then many times as long, in the warm-up and after it.
    """
    x, y = table()
    x = x * np.array([1.0, 100.0])
    method = NUTS(draws=30, warmup=15, chains=2, mass_matrix="dense")
    cold = method.fit(linear, x, y, device="cpu")
    start = bnn.Laplace(steps=500).fit(linear, x, y, device="cpu")
    warm = dataclasses.replace(method, start=start).fit(linear, x, y, device="cpu")
    assert warm.statistics["n_steps"].mean() < 0.2 * cold.statistics["n_steps"].mean()
    assert warm.info.gradient_evaluations < 0.2 * cold.info.gradient_evaluations


# --- temperature ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ppl", SLOW_IN_PYRO)
def test_a_tempered_normal_posterior_has_its_covariance_times_the_temperature(ppl: str) -> None:
    temperature = 0.25
    x, y = table()
    mean, covariance = closed_form(x, y)
    size = {"draws": 400, "warmup": 300} if ppl == "numpyro" else {"draws": 400, "warmup": 150, "chains": 1}
    posterior = fit(NUTS(**size, temperature=temperature, ppl=ppl))
    draws = np.concatenate([posterior.draws["output.weight"][..., 0], posterior.draws["output.bias"]], -1)
    for j in range(3):
        assert standard_errors_off(draws[..., j], mean[j]) < 4.0
        variance = temperature * covariance[j, j]
        assert standard_errors_off((draws[..., j] - mean[j]) ** 2, variance) < 4.0
    assert "T=" in posterior.info.target


def test_the_power_is_of_the_density_and_not_of_the_volume_of_coordinates(ppl: str) -> None:
    """noise = exp(u), so that log |dw/du| is log noise."""
    size = {"draws": 5, "warmup": 5, "chains": 1, "max_tree_depth": 4}
    posterior = fit(NUTS(**size, temperature=3.0, ppl=ppl), network)
    volume = np.log(posterior.draws["noise"])
    wanted = (posterior.log_joint().reshape(1, 5) - volume) / 3.0 + volume
    np.testing.assert_allclose(posterior.statistics["lp"], wanted, rtol=1e-9)


# --- what is refused, and what goes wrong -------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"checkpoint": "there"}, {"budget": 5.0}, {"budget": 5.0, "until": "rhat<1.01"}]
)
def test_what_chains_in_pyro_cannot_do_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"NUTS (checkpoint|budget|until).*Pyro"):
        NUTS(ppl="pyro", **options)


def test_chains_of_pyro_cannot_be_extended() -> None:
    posterior = fit(NUTS(**TINY, ppl="pyro", max_tree_depth=2))
    with pytest.raises(UnsupportedError, match=r"extend.*NUTS in pyro"):
        extend(posterior, 5)


def never_finite(x: Any, y: Any = None) -> None:
    f = bnn.dense("output", x, 1, prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f + bnn.ops.log(-1.0 - f * f), bnn.likelihoods.Gaussian(0.5))


def test_a_log_density_that_is_not_a_number_is_an_error(ppl: str) -> None:
    with pytest.raises(DivergenceError, match=r"finite log joint.*chain 0.*in 10 draws from the prior"):
        fit(NUTS(**TINY, ppl=ppl), never_finite)
