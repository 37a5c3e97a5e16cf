"""Families of distributions against those of torch, NumPyro and SciPy, in all three array libraries.

A family is a row of `DISTRIBUTIONS`: the same distribution at the same parameters, by torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro.distributions
import numpyro.infer.autoguide
import pytest
import safetensors.numpy
import scipy.special
import scipy.stats
import torch
from numpyro.distributions.transforms import ScaledUnitLowerCholeskyTransform

import ppl_bnn as bnn
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.protocol import Site
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.variational.families import blocks as families
from ppl_bnn.inference.variational.families.base import Family
from ppl_bnn.inference.variational.guides import (
    Delta,
    FullRank,
    Guide,
    GuideApproximation,
    LowRank,
    MatrixNormal,
    Mixture,
    Normal,
)
from ppl_bnn.language.transforms import with_prior

WEIGHT = Site("hidden0.weight", (2, 3), (2, 3))
BIAS = Site("hidden0.bias", (3,), (3,))
KERNEL = Site("conv.weight", (1, 2, 2, 3), (1, 2, 2, 3))
OUTPUT = Site("output.weight", (3, 1), (3, 1))
OUTPUT_BIAS = Site("output.bias", (1,), (1,))
NOISE = Site("noise", (), ())
GAIN = Site("gain", (2,), (2,), is_param=True)
SITES = (NOISE, WEIGHT, BIAS, KERNEL, OUTPUT, OUTPUT_BIAS, GAIN)
BACKENDS = ("numpy", "numpyro", "pyro")
LIBRARIES = ("numpyro", "pyro")


@contextlib.contextmanager
def library(name: str, dtype: str = "float64") -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """(NumPy to arrays of the library, and back), under its floating type."""
    if name == "numpy":
        yield np.asarray, np.asarray
        return
    chosen = system(name)
    with chosen.session(dtype, "cpu"):
        yield chosen.asarray, chosen.to_numpy


def evaluated(name: str, function: Callable[..., Any], *arguments: Any, dtype: str = "float64") -> Any:
    """function(*arguments) in the library, from NumPy to NumPy; numbers, arrays, and dicts, lists and tuples of them.

    In JAX the whole is compiled, which is cheaper than to compile each operation.
    """
    with library(name, dtype) as (to, back):
        call = jax.jit(function) if name == "numpyro" else function
        given = jax.tree.map(to, arguments)
        # A copy: torch shares no array of JAX.
        return jax.tree.map(lambda value: np.array(back(value)), call(*given))


def softplus(x: Any) -> torch.Tensor:
    return torch.nn.functional.softplus(torch.as_tensor(x), threshold=60.0)


def unit_lower(below: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(np.tril(below, -1) + np.eye(len(below)))


def matrix_factors(params: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = softplus(params["rows"]), softplus(params["columns"])
    columns = torch.cat([torch.ones(1, dtype=columns.dtype), columns])
    return (
        torch.diag(rows) @ unit_lower(params["rows_lower"]),
        torch.diag(columns) @ unit_lower(params["columns_lower"]),
    )


def by_torch(family: str, params: dict[str, np.ndarray]) -> Any:
    """The family at these parameters as a distribution of torch over the flat vector."""
    d = torch.distributions
    loc = torch.as_tensor(params["loc"])
    if family == "normal":
        return d.Independent(d.Normal(loc, softplus(params["rho"])), 1)
    if family == "lowrank":
        scale = softplus(params["rho"])
        return d.LowRankMultivariateNormal(loc, scale[:, None] * torch.as_tensor(params["factor"]), scale**2)
    if family == "fullrank":
        return d.MultivariateNormal(
            loc, scale_tril=softplus(params["rho"])[:, None] * unit_lower(params["lower"])
        )
    if family == "matrixnormal":
        return d.MultivariateNormal(loc, scale_tril=torch.kron(*matrix_factors(params)))
    components = d.Independent(d.Normal(loc, softplus(params["rho"])), 1)
    return d.MixtureSameFamily(d.Categorical(logits=torch.as_tensor(params["logits"])), components)


# A family and the sites that one block of it is over.
CASES: dict[str, tuple[Family, tuple[Site, ...]]] = {
    "normal": (Normal(), (NOISE, WEIGHT, BIAS)),
    "lowrank": (LowRank(rank=2), (NOISE, WEIGHT, BIAS)),
    "fullrank": (FullRank(), (NOISE, WEIGHT, BIAS)),
    "matrixnormal": (MatrixNormal(), (KERNEL,)),
    "mixture": (Mixture(components=3), (NOISE, WEIGHT, BIAS)),
}
GAUSSIAN = ("normal", "lowrank", "fullrank", "matrixnormal")


def shaken(params: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters away from the start, where no entry is zero or equal to another."""
    rng = np.random.default_rng(seed)
    return {name: value + 0.4 * rng.normal(size=value.shape) for name, value in params.items()}


def bound(family: str, seed: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """(the block of a case, parameters)."""
    (block,) = CASES[family][0].bind(CASES[family][1])
    rng = np.random.default_rng(seed)
    return block, shaken(block.start(rng.normal(size=block.size), 0.6, rng), seed + 1)


def noise(block: Any, lead: tuple[int, ...], seed: int = 3) -> np.ndarray:
    strata = (block.strata,) if block.strata > 1 else ()
    return np.random.default_rng(seed).normal(size=(*lead, *strata, block.noise_size))


# --- a block is the distribution that its docstring says -------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", CASES)
def test_density_moments_and_entropy_are_those_of_torch(family: str, backend: str):
    block, params = bound(family)
    u = np.random.default_rng(2).normal(size=(2, 5, block.size))
    oracle = by_torch(family, params)

    def everything(own: Any, at: Any) -> Any:
        log_q = block.log_prob(own, at), block.log_prob(own, at[0, 0])
        return *log_q, block.mean(own), block.variance(own), block.entropy(own)

    log_q, single, mean, variance, entropy = evaluated(backend, everything, params, u)
    expected = oracle.log_prob(torch.as_tensor(u)).numpy()
    np.testing.assert_allclose(log_q, expected, rtol=1e-10)
    np.testing.assert_allclose(single, expected[0, 0], rtol=1e-10)
    np.testing.assert_allclose(mean, oracle.mean.numpy(), rtol=1e-10)
    np.testing.assert_allclose(variance, oracle.variance.numpy(), rtol=1e-10)
    if family == "mixture":
        assert entropy is None
    else:
        np.testing.assert_allclose(entropy, oracle.entropy().numpy(), rtol=1e-10)


def test_low_rank_and_full_rank_are_those_of_the_guides_of_numpyro():
    def nothing() -> None:
        pass

    autoguide = numpyro.infer.autoguide
    u = np.random.default_rng(2).normal(size=(4, 10))
    with library("numpyro") as (to, _):
        block, params = bound("lowrank")
        given = {
            "auto_loc": to(params["loc"]),
            "auto_cov_factor": to(params["factor"]),
            "auto_scale": jax.nn.softplus(to(params["rho"])),
        }
        q = autoguide.AutoLowRankMultivariateNormal(nothing, rank=2).get_posterior(given)
        np.testing.assert_allclose(block.log_prob(params, u), q.log_prob(to(u)), rtol=1e-10)
        block, params = bound("fullrank")
        packed = np.concatenate([params["lower"][np.tril_indices(10, -1)], params["rho"]])
        given = {
            "auto_loc": to(params["loc"]),
            "auto_scale_tril": ScaledUnitLowerCholeskyTransform()(to(packed)),
        }
        q = autoguide.AutoMultivariateNormal(nothing).get_posterior(given)
        np.testing.assert_allclose(block.log_prob(params, u), q.log_prob(to(u)), rtol=1e-10)


def test_matrix_normal_is_that_of_scipy_and_of_numpyro():
    block, params = bound("matrixnormal")
    assert block.matrix == (4, 3)
    oracle: Any = scipy.stats.matrix_normal
    left, right = (factor.numpy() for factor in matrix_factors(params))
    u = np.random.default_rng(2).normal(size=(4, 12))
    found = block.log_prob(params, u)
    loc = params["loc"].reshape(4, 3)
    expected = [oracle.logpdf(w.reshape(4, 3), loc, left @ left.T, right @ right.T) for w in u]
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    with library("numpyro") as (to, _):
        q = numpyro.distributions.MatrixNormal(to(loc), to(left), to(right))
        np.testing.assert_allclose(found, q.log_prob(to(u.reshape(4, 4, 3))), rtol=1e-10)


def test_a_matrix_normal_of_one_column_is_a_full_rank_normal():
    (block,) = MatrixNormal().bind([OUTPUT])
    rng = np.random.default_rng(0)
    params = shaken(block.start(rng.normal(size=3), 0.5, rng))
    assert params["columns"].shape == (0,)
    (full,) = FullRank().bind([OUTPUT])
    same = {"loc": params["loc"], "rho": params["rows"], "lower": params["rows_lower"]}
    u = rng.normal(size=(5, 3))
    np.testing.assert_allclose(block.log_prob(params, u), full.log_prob(same, u), rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", CASES)
def test_the_density_of_a_draw_is_its_density(family: str, backend: str):
    block, params = bound(family)
    eps = noise(block, (2, 3))
    u0, log_q0 = block.draw(params, eps)
    assert u0.shape == (*eps.shape[:-1], block.size)
    assert log_q0.shape == eps.shape[:-1]

    def everything(own: Any, eps: Any) -> Any:
        u, log_q = block.draw(own, eps)
        return u, log_q, block.log_prob(own, u), *block.draw(own, eps[1, 2])

    u, log_q, again, single, log_single = evaluated(backend, everything, params, eps)
    np.testing.assert_allclose(u, u0, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(log_q, again, rtol=1e-10, atol=1e-10)
    # Leading axes are only a way to ask for many.
    np.testing.assert_allclose(single, u0[1, 2], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(log_single, log_q0[1, 2], rtol=1e-12)


def test_draws_can_be_mapped_over_in_jax():
    for family in CASES:
        block, params = bound(family)
        eps = noise(block, (4,))
        u, log_q = evaluated("numpyro", jax.vmap(block.draw, (None, 0)), params, eps)
        np.testing.assert_allclose(u, block.draw(params, eps)[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(log_q, block.draw(params, eps)[1], rtol=1e-12, atol=1e-12)


def errors_of_moments(draws: np.ndarray, mean: Any, covariance: Any) -> tuple[np.ndarray, np.ndarray]:
    """Deviations of the sample mean and covariance from the truth, in standard errors made of the draws themselves."""
    count = len(draws)
    centred = draws - np.asarray(mean)
    products = centred[:, :, None] * centred[:, None, :]
    return (
        centred.mean(0) / (draws.std(0) / math.sqrt(count)),
        (products.mean(0) - np.asarray(covariance)) / (products.std(0) / math.sqrt(count)),
    )


def covariance_by_torch(family: str, oracle: Any) -> np.ndarray:
    if family == "normal":
        return np.diag(oracle.variance.numpy())
    if family != "mixture":
        return oracle.covariance_matrix.numpy()
    weights, parts = oracle.mixture_distribution.probs.numpy(), oracle.component_distribution
    apart = parts.mean.numpy() - oracle.mean.numpy()
    return np.diag(weights @ parts.variance.numpy()) + (apart * weights[:, None]).T @ apart


@pytest.mark.parametrize("family", CASES)
def test_draws_have_the_mean_and_the_covariance(family: str):
    # Over 20 seeds, the largest deviation among all entries of all families was 3.8 standard errors.
    block, params = bound(family)
    draws = block.sample(params, 20_000, np.random.default_rng(11))
    oracle = by_torch(family, params)
    for deviation in errors_of_moments(draws, oracle.mean, covariance_by_torch(family, oracle)):
        assert np.abs(deviation).max() < 5.0


def test_strata_of_a_mixture_weigh_up_to_its_moments():
    block, params = bound("mixture")
    u, _ = block.draw(params, noise(block, (20_000,), seed=12))
    weights = np.exp(block.log_weights(params))
    np.testing.assert_allclose(weights, by_torch("mixture", params).mixture_distribution.probs, rtol=1e-12)
    for power, expected in ((1, block.mean(params)), (2, block.variance(params) + block.mean(params) ** 2)):
        values = np.einsum("k,skp->sp", weights, u**power)
        error = values.std(0) / math.sqrt(len(values))
        assert np.abs((values.mean(0) - expected) / error).max() < 5.0


def gradients(name: str, block: Any, params: dict[str, np.ndarray], eps: np.ndarray, u: np.ndarray) -> dict:
    """Of a function of everything that is differentiable in a block, by parameter."""

    def value(own: Any, noise: Any, at: Any) -> Any:
        drawn, log_q = block.draw(own, noise)
        total = (drawn**3).sum() + (log_q * log_q).sum() + (block.log_prob(own, at) ** 2).sum()
        total = total + (block.mean(own) * block.variance(own)).sum()
        total = total + (block.log_weights(own) ** 2).sum()
        return total if block.entropy(own) is None else total + block.entropy(own) ** 2

    return evaluated(name, system(name).value_and_grad(value), params, eps, u)[1]


@pytest.mark.parametrize("family", CASES)
def test_gradients_agree_between_the_systems_and_with_differences(family: str):
    block, params = bound(family)
    eps, u = noise(block, (3,)), np.random.default_rng(5).normal(size=(3, block.size))
    by_jax, by_pyro = (gradients(name, block, params, eps, u) for name in LIBRARIES)
    for name, found in by_jax.items():
        bound_on_rounding = 1e-8 * np.abs(found).max(initial=1.0)
        np.testing.assert_allclose(found, by_pyro[name], rtol=1e-8, atol=bound_on_rounding)
    # One direction in all parameters at once, by central differences of log q of the draws in NumPy.
    rng = np.random.default_rng(6)
    direction = {name: rng.normal(size=value.shape) for name, value in params.items()}

    def value(own: Any, eps: Any) -> Any:
        drawn, log_q = block.draw(own, eps)
        return (drawn**2).sum() + log_q.sum()

    def along(step: float) -> float:
        return float(value({name: each + step * direction[name] for name, each in params.items()}, eps))

    slopes = evaluated("pyro", torch.func.grad(value), params, eps)
    slope = sum(float((slopes[name] * direction[name]).sum()) for name in params)
    # Differences err by h^2 and by rounding / h: about 1e-9 of values near a hundred.
    assert (along(1e-5) - along(-1e-5)) / 2e-5 == pytest.approx(slope, rel=1e-6)


def test_a_point_has_no_noise_and_no_density():
    block: Any = Delta().bind([WEIGHT, NOISE])[0]
    params = block.start(np.arange(7.0), 0.1, np.random.default_rng(0))
    assert block.noise_size == 0

    def everything(own: Any, eps: Any) -> Any:
        u, log_q = block.draw(own, eps)
        return u, log_q, block.log_prob(own, u), block.entropy(own), block.variance(own)

    for backend in BACKENDS:
        u, log_q, again, entropy, variance = evaluated(backend, everything, params, np.zeros((4, 2, 0)))
        assert np.array_equal(u, np.broadcast_to(np.arange(7.0), (4, 2, 7)))
        assert np.array_equal(log_q, np.zeros((4, 2)))
        assert np.array_equal(again, np.zeros((4, 2)))
        assert entropy == 0.0
        assert np.array_equal(variance, np.zeros(7))
    assert np.array_equal(block.sample(params, 3, np.random.default_rng(0)), np.tile(np.arange(7.0), (3, 1)))


# --- float32 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIBRARIES)
def test_single_precision_keeps_the_density_of_a_strong_low_rank_part(name: str):
    # Factors a thousand times the diagonal: the difference in Woodbury's formula would lose all digits of the distance.
    block, params = bound("lowrank")
    params = params | {"factor": 1000.0 * params["factor"], "rho": params["rho"] - 8.0}
    eps = noise(block, (50,))
    exact = block.draw(params, eps)[1]
    _, found = evaluated(name, block.draw, params, eps, dtype="float32")
    assert found.dtype == np.float32
    # Rounding of z ~ 1000 leaves some 1e-4 in distances of order one; Woodbury would leave its square.
    np.testing.assert_allclose(found, exact, atol=2e-3)


@pytest.mark.parametrize("name", LIBRARIES)
def test_single_precision_keeps_the_density_of_a_narrow_mixture(name: str):
    block, params = bound("mixture")
    params = params | {"loc": params["loc"] + 10.0, "rho": params["rho"] - 12.0}
    eps = noise(block, (50,))
    exact = block.draw(params, eps)[1]
    found = evaluated(name, block.draw, params, eps, dtype="float32")[1]
    # u itself is rounded to a tenth of a standard deviation here; log q does not go through it.
    np.testing.assert_allclose(found, exact, rtol=1e-5)


# --- where it starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CASES)
def test_a_start_has_the_mean_and_the_scale_asked_for(family: str):
    block: Any = CASES[family][0].bind(CASES[family][1])[0]
    rng = np.random.default_rng(0)
    loc = rng.normal(size=block.size)
    # The offsets of components that are so narrow would be lost in the rounding of their locations.
    scales = [np.asarray(0.3), np.full(block.size, 1e-4 if family == "mixture" else 1e-12)]
    # A matrix normal has scales a_i b_j only.
    scales.append(
        np.outer(rng.gamma(2.0, size=4), rng.gamma(2.0, size=3)).ravel()
        if family == "matrixnormal"
        else rng.gamma(2.0, size=block.size)
    )
    for scale in scales:
        params = block.start(loc, scale, rng)
        np.testing.assert_allclose(block.mean(params), loc, rtol=1e-12)
        np.testing.assert_allclose(
            np.sqrt(block.variance(params)), np.broadcast_to(scale, loc.shape), rtol=1e-10
        )


def test_components_of_a_mixture_start_apart():
    (block,) = Mixture(components=4).bind([WEIGHT])
    params = block.start(np.zeros(6), 1.0, np.random.default_rng(0))
    assert np.abs(params["loc"][:, None] - params["loc"][None])[~np.eye(4, dtype=bool)].min() > 0.0


def test_a_mixture_of_one_is_independent_normals():
    x, y = data()
    fitted = [
        bnn.fit(model, x, y, bnn.SVI(guide=guide, steps=5, elbo_draws=2, ppl="pyro"))
        for guide in (Mixture(components=1), "diagonal")
    ]
    u = fitted[1].unconstrained_draws
    np.testing.assert_array_equal(*(each.approximation.log_prob(u) for each in fitted))


def test_a_start_that_is_not_finite_is_refused_by_name():
    guide = Guide.of("normal", [WEIGHT, BIAS])
    rng = np.random.default_rng(0)
    good = {WEIGHT.name: np.zeros((2, 3)), BIAS.name: np.zeros(3)}
    started = guide.start(good, {WEIGHT.name: np.full((2, 3), 0.5), BIAS.name: 0.5}, rng)
    for name, value in guide.start(good, 0.5, rng).items():
        np.testing.assert_array_equal(value, started[name])
    with pytest.raises(InputError, match=r"location.*hidden0\.bias"):
        guide.start(good | {BIAS.name: np.full(3, np.nan)}, 0.1, rng)


# --- which family for which site ------------------------------------------------------------------------


def test_patterns_are_layers_sites_and_globs_and_the_first_wins():
    guide = Guide.of({"output.bias": "delta", "output": FullRank(), "hid*": "lowrank", "*": "normal"}, SITES)
    assert guide.names == tuple(site.name for site in SITES if not site.is_param)
    assert [block.names for block in guide.blocks] == [
        ("output.bias",),
        ("output.weight",),
        ("hidden0.weight", "hidden0.bias"),
        ("noise", "conv.weight"),
    ]
    assert [type(block).__name__ for block in guide.blocks] == ["Delta", "FullRank", "LowRank", "Normal"]
    assert guide.normal_sites == ("noise", "conv.weight")
    assert guide.block_of["noise"] is guide.blocks[3]
    assert guide.block_of["hidden0.bias"] is guide.blocks[2]
    assert guide.noise_size == 0 + 3 + (3 + 9) + 13
    # The names of layers may stand for layers within layers, and a glob may stop at a layer.
    nested = [Site("a.b.weight", (2,), (2,)), Site("a.c.weight", (2,), (2,))]
    assert [block.names for block in Guide.of({"a.b": "normal", "a.?": "delta"}, nested).blocks] == [
        ("a.b.weight",),
        ("a.c.weight",),
    ]
    # Several are joint, a glob may have a comma of its own, and "*" may be left with nothing.
    for pattern in ("a.b, a.c.weight", "a.[b,c]"):
        assert [block.names for block in Guide.of({pattern: "fullrank", "*": "delta"}, nested).blocks] == [
            ("a.b.weight", "a.c.weight")
        ]


def test_one_family_is_joint_over_all_sites_and_matrix_normals_are_one_per_site():
    assert [block.names for block in Guide.of("fullrank", SITES).blocks] == [
        Guide.of("diagonal", SITES).names
    ]
    guide = Guide.of(MatrixNormal(), SITES)
    assert [(type(block).__name__, block.names) for block in guide.blocks] == [
        ("FullRank", ("noise",)),
        ("MatrixNormal", ("hidden0.weight",)),
        ("FullRank", ("hidden0.bias",)),
        ("MatrixNormal", ("conv.weight",)),
        ("MatrixNormal", ("output.weight",)),
        ("FullRank", ("output.bias",)),
    ]
    assert guide.normal_sites == ()


@pytest.mark.parametrize(
    ("specification", "error", "match"),
    [
        ("fulrank", UnknownNameError, "did you mean 'fullrank'"),
        ({"*": "nomal"}, UnknownNameError, "did you mean 'normal'"),
        (FullRank, InputError, "a family or one of"),
        (3, InputError, "a family or one of"),
        ({3: "normal"}, InputError, "as keys"),
        ({}, InputError, r"none for noise, hidden0\.weight"),
        ({"hidden0": "normal", "output": "normal"}, InputError, r"none for noise, conv\.weight"),
        ({"hiden0": "normal", "*": "normal"}, UnknownNameError, "did you mean 'hidden0"),
        ({"*": "normal", "output": "fullrank"}, InputError, r"'output', whose sites all go to '\*'"),
        ({"gain": "normal", "*": "normal"}, InputError, "parameters without a prior only: gain"),
        ({"hidden0": Mixture(9), "*": Mixture(8)}, InputError, "at most 64 combinations.* 72"),
        ({"noise": LowRank(rank=2), "*": "normal"}, InputError, "at most the 1 coordinates"),
    ],
)
def test_a_specification_that_fits_no_model_is_refused_by_name(
    specification: Any, error: type[Exception], match: str
):
    with pytest.raises(error, match=match):
        Guide.of(specification, SITES)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "3"])
def test_options_of_families_are_whole_numbers(value: Any):
    with pytest.raises(InputError, match="Mixture components"):
        Mixture(components=value)
    with pytest.raises(InputError, match="LowRank rank"):
        LowRank(rank=value)


def test_dense_factors_above_their_size_are_refused():
    wide = Site("hidden0.weight", (3001, 2), (3001, 2))
    with pytest.raises(InputError, match=r"FullRank: expected at most 3000 coordinates.*got 6002.*'lowrank'"):
        Guide.of("fullrank", [wide])
    with pytest.raises(
        InputError, match=r"MatrixNormal: .* 3000 rows and columns in 'hidden0\.weight'.*3001"
    ):
        Guide.of("matrixnormal", [wide])
    guide = Guide.of("lowrank", [wide])
    assert guide.blocks[0].noise_size == 6002 + round(math.sqrt(6002))
    params = guide.start({wide.name: np.zeros(wide.shape)}, 0.1, np.random.default_rng(0))
    with pytest.raises(UnsupportedError, match="at most 3000 coordinates"):
        guide.as_prior(params)


# --- the whole ----------------------------------------------------------------------------------------------


def whole(specification: Any, seed: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    guide = Guide.of(specification, SITES)
    rng = np.random.default_rng(seed)
    u0 = {site.name: rng.normal(size=site.shape) for site in SITES}
    return guide, shaken(guide.start(u0, 0.5, rng), seed)


MIXED = {
    "output": "fullrank",
    "conv": "matrixnormal",
    "noise": "delta",
    "hidden0.bias": LowRank(1),
    "*": "normal",
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_guide_is_the_product_of_its_blocks(backend: str):
    guide, params = whole(MIXED)
    eps = np.random.default_rng(1).normal(size=(2, 4, guide.noise_size))

    def everything(own: Any, eps: Any) -> Any:
        u, log_q = guide.draw(own, eps)
        assert list(u) == list(guide.names)
        moments = guide.mean(own), guide.variance(own), guide.loc_scale(own)
        entropies = [
            block.entropy(guide.parameters_of(own, index)) for index, block in enumerate(guide.blocks)
        ]
        return u, log_q, guide.log_prob(own, u), moments, entropies, guide.log_weights(own)

    u, log_q, log_prob, moments, entropies, log_weights = evaluated(backend, everything, params, eps)
    for site in guide.sites:
        assert u[site.name].shape == (2, 4, *site.shape)
    np.testing.assert_allclose(log_prob, sum(log_q), rtol=1e-10)
    expected = 0.0
    for index, block in enumerate(guide.blocks):
        if index == 2:
            assert entropies[index] == 0.0
            continue
        family = ("fullrank", "matrixnormal", "delta", "lowrank", "normal")[index]
        q = by_torch(family, guide.parameters_of(params, index))
        each = q.log_prob(torch.as_tensor(block.join(u))).numpy()
        np.testing.assert_allclose(log_q[index], each, rtol=1e-10)
        np.testing.assert_allclose(entropies[index], q.entropy().numpy(), rtol=1e-10)
        expected = expected + each
    np.testing.assert_allclose(log_prob, expected, rtol=1e-10)
    mean, variance, (loc, scale) = moments
    assert list(loc) == list(scale) == ["hidden0.weight"] == list(guide.normal_sites)
    oracle = by_torch("normal", guide.parameters_of(params, 4))
    for found in (mean["hidden0.weight"], loc["hidden0.weight"]):
        np.testing.assert_allclose(found, oracle.mean.numpy().reshape(2, 3), rtol=1e-12)
    for found in (variance["hidden0.weight"], scale["hidden0.weight"] ** 2):
        np.testing.assert_allclose(found, oracle.variance.numpy().reshape(2, 3), rtol=1e-12)
    assert variance["noise"] == 0.0
    assert log_weights.tolist() == [0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_mixtures_are_drawn_in_all_combinations(backend: str):
    guide, params = whole({"hidden0": Mixture(2), "conv": "normal", "output": Mixture(3), "*": Mixture(2)})
    assert guide.strata == 12
    eps = np.random.default_rng(1).normal(size=(5, 12, guide.noise_size))
    parts = [guide.parameters_of(params, index) for index in (0, 2, 3)]

    def everything(own: Any, eps: Any) -> Any:
        u, log_q = guide.draw(own, eps)
        return sum(log_q), guide.log_prob(own, u), guide.draw(own, 0.0 * eps[0])[0], guide.log_weights(own)

    log_q, log_prob, still, log_weights = evaluated(backend, everything, params, eps)
    assert log_q.shape == (5, 12)
    np.testing.assert_allclose(log_prob, log_q, rtol=1e-10)
    for stratum, picked in enumerate(np.ndindex(2, 3, 2)):
        probabilities = [
            scipy.special.softmax(part["logits"])[k] for part, k in zip(parts, picked, strict=True)
        ]
        assert np.exp(log_weights[stratum]) == pytest.approx(math.prod(probabilities), rel=1e-12)
        for index, part, k in zip((0, 2, 3), parts, picked, strict=True):
            flat = guide.blocks[index].join({name: value[stratum] for name, value in still.items()})
            assert np.array_equal(flat, part["loc"][k])


def test_a_family_of_another_file_is_known_once_it_is_registered(monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True)
    class Strange(Family):
        name = "strange"
        hidden: tuple[int, ...] = (4, 5)

        def start(self, loc: Any, scale: Any, rng: Any) -> dict[str, np.ndarray]:
            return {"loc": loc}

        def draw(self, params: Any, eps: Any) -> tuple[Any, Any]:
            return params["loc"] + eps, -0.5 * (eps * eps).sum(-1)

        def log_prob(self, params: Any, u: Any) -> Any:
            return -0.5 * ((u - params["loc"]) ** 2).sum(-1)

    with pytest.raises(UnknownNameError, match="strange"):
        Guide.of("strange", SITES)
    monkeypatch.setitem(families.FAMILIES, "strange", Strange)
    guide, params = whole({"output": "normal", "*": Strange(hidden=(7,))})
    assert Guide.from_json(guide.to_json()) == guide
    assert guide.families[1][1] == Strange(hidden=(7,))
    # What is not known is said to be so.
    assert guide.blocks[1].entropy(guide.parameters_of(params, 1)) is None
    assert guide.mean(params)["hidden0.bias"] is None
    assert guide.mean(params)["output.bias"] is not None
    with pytest.raises(UnsupportedError, match="a guide that is Gaussian; got Strange over noise"):
        guide.as_prior(params)
    assert np.array_equal(guide.centre(params)["noise"], params["1:loc"][0])


@pytest.mark.parametrize(
    "specification", [*families.FAMILIES, LowRank(rank=4), Mixture(components=2), MIXED], ids=str
)
def test_specifications_come_back_from_json(specification: Any):
    guide = Guide.of(specification, SITES)
    again = Guide.from_json(guide.to_json())
    assert again == guide
    assert hash(again) == hash(guide)
    assert json.loads(guide.to_json())["sites"][0]["name"] == "noise"


# --- what a fit hands over --------------------------------------------------------------------------------


def model(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    f = bnn.mlp(x, [3, 1])
    bnn.observe(y, f + bnn.param("shift", np.zeros(1)), bnn.likelihoods.Gaussian(noise))


def empirical(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.EmpiricalBayes())
    bnn.observe(y, f, bnn.likelihoods.Gaussian(0.5))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(12, 2))
    return x, x[:, 0] + rng.normal(size=12)


def program_of(given: Any, ppl: str, x: Any, y: Any) -> Program:
    return Program.of(system(ppl), given, x, y, language=True)


@dataclass(frozen=True)
class Planted(Method):
    """A guide somewhere near a draw of the prior."""

    guide: Any = "normal"

    def run(self, problem: Any, progress: Any) -> Outcome:
        program = problem.program
        u = {
            name: value[0]
            for name, value in program.prior_draws(problem.x, problem.y, problem.seed, 1).items()
        }
        guide = Guide.of(_options()[self.guide], program.sites.values())
        params = shaken(guide.start(u, 0.2, np.random.default_rng(0)))
        if self.dtype == "float32":
            params = {name: value.astype(np.float32) for name, value in params.items()}
        values = {site.name: u[site.name] for site in program.sites.values() if site.is_param}
        return Outcome(GuideApproximation(guide, params, values))


def _options() -> dict[str, Any]:
    # By name, because the settings of a fit are plain values.
    mixed = {"output": "fullrank", "hidden0.weight": "matrixnormal", "noise": "delta", "*": Mixture(2)}
    return {name: name for name in families.FAMILIES} | {"mixed": mixed}


@pytest.mark.parametrize("guide", ["lowrank", "fullrank", "matrixnormal", "mixture", "delta", "mixed"])
def test_a_saved_guide_comes_back_to_the_same_bits(guide: str, tmp_path: Path):
    x, y = data()
    posterior: Any = Planted(guide=guide, ppl="pyro", dtype="float32" if guide == "mixed" else "float64").fit(
        model, x, y
    )
    again: Any = bnn.load(posterior.save(tmp_path / "kept"), model)
    kept, got = posterior.approximation, again.approximation
    assert got.guide == kept.guide
    for stored in ("parameters", "values", "prior_scales"):
        before, after = getattr(kept, stored), getattr(got, stored)
        assert list(before) == list(after)
        for name, value in before.items():
            assert after[name].dtype == value.dtype
            assert np.array_equal(after[name], value)
    assert list(again.unconstrained_draws) == list(posterior.unconstrained_draws)
    for name, value in posterior.unconstrained_draws.items():
        assert np.array_equal(again.unconstrained_draws[name], value)
    assert np.array_equal(posterior.predict(x[:3]).mean, again.predict(x[:3]).mean)
    if guide == "delta":
        assert posterior.kind == "point"
        assert posterior.log_q() is None
        assert posterior.shape == (1, 1)
    else:
        assert posterior.kind == "iid"
        assert np.array_equal(posterior.log_q(), again.log_q())
        assert posterior.log_q().shape == posterior.shape


def test_a_flow_comes_back_in_a_process_that_has_not_fitted_one(tmp_path: Path):
    importlib.import_module("ppl_bnn.inference.variational.families.flows")
    guide, params = whole({"output": "iaf", "*": "normal"})
    approximation = GuideApproximation(guide, params)
    safetensors.numpy.save_file(approximation.arrays(), tmp_path / "kept")
    code = (
        "import sys, numpy as np, safetensors.numpy\n"
        "from ppl_bnn.posterior.registered import approximation_class\n"
        "arrays = safetensors.numpy.load_file(sys.argv[1])\n"
        "again = approximation_class('GuideApproximation').from_arrays(arrays)\n"
        "print(again.draw(1, np.random.default_rng(0))['output.weight'].tobytes().hex())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    expected = approximation.draw(1, np.random.default_rng(0))["output.weight"].tobytes().hex()
    assert (result.stdout.strip(), result.returncode) == (expected, 0), result.stderr


def test_parameters_without_a_prior_are_constants_of_a_draw():
    guide, params = whole("normal")
    approximation: Any = GuideApproximation(guide, params, {"gain": np.array([3.0, 4.0])})
    u = approximation.draw(5, np.random.default_rng(0))
    assert list(u) == [*guide.names, "gain"]
    assert np.array_equal(u["gain"], np.tile([3.0, 4.0], (5, 1)))
    oracle = by_torch("normal", guide.parameters_of(params, 0))
    flat = torch.as_tensor(guide.blocks[0].join(u))
    np.testing.assert_allclose(approximation.log_prob(u), oracle.log_prob(flat).numpy(), rtol=1e-10)
    centre = approximation.centre()
    assert np.array_equal(centre["gain"], [3.0, 4.0])
    np.testing.assert_allclose(guide.blocks[0].join(centre), params["0:loc"], rtol=1e-12)


def test_the_centre_of_a_mixture_is_that_of_its_heaviest_component():
    guide, params = whole("mixture")
    params["0:logits"] = np.array([0.0, 2.0, 1.0])
    centre = GuideApproximation(guide, params).centre()
    assert np.array_equal(guide.blocks[0].join(centre), params["0:loc"][1])


@pytest.mark.parametrize("ppl", LIBRARIES)
@pytest.mark.parametrize("specification", [*GAUSSIAN, "mixed"])
def test_as_a_prior_it_has_the_same_density(specification: str, ppl: str):
    x, y = data()
    chosen: Any = specification
    if specification == "mixed":
        chosen = {"noise": "normal", "hidden0": "fullrank", "output": "matrixnormal"}
    with library(ppl) as (to, _):
        sites = program_of(model, ppl, to(x), to(y)).sites
        guide = Guide.of(chosen, sites.values())
        u0 = {site.name: np.zeros(site.unconstrained_shape) for site in guide.sites}
        params = shaken(guide.start(u0, 0.5, np.random.default_rng(0)))
        approximation: Any = GuideApproximation(guide, params, {"shift": np.zeros(1)})
        u = approximation.draw(6, np.random.default_rng(1))
        updated = program_of(with_prior(model, approximation.as_prior()), ppl, to(x), to(y))
        found = updated.log_prior_draws(u, to(x), to(y))
    np.testing.assert_allclose(found, approximation.log_prob(u), rtol=1e-9)


@pytest.mark.parametrize("specification", ["mixture", "delta"])
def test_what_is_not_gaussian_is_no_prior(specification: str):
    guide, params = whole(specification)
    with pytest.raises(UnsupportedError, match="a guide that is Gaussian"):
        GuideApproximation(guide, params).as_prior()


def test_scales_that_the_fit_found_are_part_of_the_program():
    x, y = data()
    with library("numpyro") as (to, _):
        sites = [Site("output.weight", (2, 1), (2, 1)), Site("output.bias", (1,), (1,))]
        guide = Guide.of("normal", sites)
        u0 = {site.name: np.zeros(site.shape) for site in sites}
        params = guide.start(u0, 0.5, np.random.default_rng(0))
        scales = {"output.weight": np.array([[0.7], [2.0]]), "output.bias": np.asarray(1.5)}
        approximation = GuideApproximation(guide, params, prior_scales=scales)
        again = GuideApproximation.from_arrays(approximation.arrays())
        assert {name: value.tolist() for name, value in again.prior_scales.items()} == {
            name: value.tolist() for name, value in scales.items()
        }
        u = approximation.draw(4, np.random.default_rng(0))
        program = program_of(again.program(empirical), "numpyro", to(x), to(y))
        found = program.log_prior_draws(u, to(x), to(y))
    normal = scipy.stats.norm.logpdf
    expected = normal(u["output.weight"], scale=scales["output.weight"]).sum((1, 2))
    np.testing.assert_allclose(found, expected + normal(u["output.bias"], scale=1.5).sum(1), rtol=1e-9)
    assert GuideApproximation(guide, params).program(model) is model
