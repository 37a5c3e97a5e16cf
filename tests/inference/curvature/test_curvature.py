"""Curvature of the data and of the prior against dense Jacobians and Hessians by automatic differentiation."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError
from ppl_bnn.inference.curvature import curvature as curvature_module
from ppl_bnn.inference.curvature.curvature import data_curvature
from ppl_bnn.inference.curvature.gaussians import Rotated
from ppl_bnn.inference.curvature.jacobian import jacobians, linear_factors, linear_maps
from ppl_bnn.inference.curvature.prior import (
    check_bounded,
    parents,
    prior_curvature,
    prior_hessian,
    site_curvatures,
)
from ppl_bnn.inference.flat_vector import flat_latents, latent_names, site_slices
from ppl_bnn.language.primitives import conv
from ppl_bnn.language.transforms import GaussianPrior
from tests.problems import small_classifier, small_network

ROWS = 11
SYSTEMS = ("numpyro", "pyro")
CURVATURES = ("ggn", "empirical", "hessian")


@contextmanager
def problem_of(ppl, model, x, y):
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        xs, ys = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, model, xs, ys, language=True)
        yield Problem(program, xs, ys, x, y, 0, "cpu", "float64")


def point(problem, seed=4):
    rng = np.random.default_rng(seed)
    return {
        name: 0.6 * rng.normal(size=site.unconstrained_shape) for name, site in problem.program.sites.items()
    }


# --- models ---------------------------------------------------------------------------------------


def heteroscedastic(x, y=None):
    f = bnn.mlp(x, [3, 2], activation="tanh", prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.HeteroscedasticGaussian())


def two_outputs(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0).expand((2,)).to_event())
    f = bnn.mlp(x, [3, 2], activation="tanh", prior=priors.StudentT(4.0, 0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def binary(x, y=None):
    f = bnn.mlp(x, [3, 1], activation="tanh", prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Bernoulli())


def used_twice(x, y=None):
    """One weight and bias in two uses of one map, another weight in two maps with two biases."""
    w = priors.Normal()("shared.weight", (2, 2), 2)
    b = priors.Normal()("shared.bias", (2,), 1)
    v = priors.Normal()("tied.weight", (2, 2), 2)
    h = bnn.ops.tanh(bnn.linear("shared", x, w, b))
    h = bnn.ops.tanh(bnn.linear("shared", h, w, b))
    h = bnn.ops.tanh(bnn.linear("first", h, v, priors.Normal()("first.bias", (2,), 1)))
    h = bnn.ops.tanh(bnn.linear("second", h, v, priors.Normal()("second.bias", (2,), 1)))
    bnn.observe(y, bnn.dense("output", h, 1), likelihoods.Gaussian(0.4))


def over_places(x, y=None):
    """A linear map over an extra axis (N, T, I), then a mean over it."""
    h = bnn.ops.tanh(bnn.dense("each", x, 2, priors.Normal()))
    bnn.observe(y, bnn.dense("output", bnn.ops.mean(h, 1), 3, priors.Normal()), likelihoods.Categorical())


def convolution(x, y=None):
    w = priors.Normal()("conv.weight", (2, 2, 1, 2), 4)
    h = bnn.ops.tanh(conv("conv", x, w, priors.Normal()("conv.bias", (2,), 1), 1, "same"))
    bnn.observe(y, bnn.dense("output", h.reshape(len(x), -1), 2, priors.Normal()), likelihoods.Categorical())


def anything_goes(x, y=None):
    """Weights that no linear map serves: computed, transformed, and used in two roles."""
    noise = bnn.sample("noise", dist.LogNormal(0.0, 1.0))
    scale = bnn.sample("scale", dist.HalfNormal(1.0))
    raw = priors.Normal()("raw", (2, 3), 2)
    h = bnn.ops.tanh(bnn.linear("computed", x, scale * raw))
    positive = bnn.sample("positive", dist.LogNormal(0.0, 1.0).expand((3, 3)).to_event())
    h = bnn.ops.tanh(bnn.linear("transformed", h, positive))
    both = priors.Normal()("both", (3, 3), 3)
    h = bnn.ops.tanh(bnn.linear("two roles", h, both)) + both[0]
    offset = priors.Normal()("offset", (3,), 1)
    h = bnn.ops.tanh(bnn.linear("served", h, priors.Normal()("served", (3, 3), 3), offset)) * offset
    bnn.observe(y, bnn.dense("output", h, 1, priors.Normal()), likelihoods.Gaussian(noise))


def one_layer(x, y=None):
    bnn.observe(y, bnn.mlp(x, [3], prior=priors.Normal()), likelihoods.Categorical())


def plain(rng, features=2):
    return rng.normal(size=(ROWS, features))


MODELS = {
    "sampled noise": (small_network, lambda r: plain(r), lambda r: r.normal(size=ROWS)),
    "heteroscedastic": (heteroscedastic, lambda r: plain(r), lambda r: r.normal(size=ROWS)),
    "two outputs": (two_outputs, lambda r: plain(r), lambda r: r.normal(size=(ROWS, 2))),
    "bernoulli": (binary, lambda r: plain(r), lambda r: (r.random(ROWS) < 0.5).astype(float)),
    "categorical": (small_classifier, lambda r: plain(r), lambda r: r.integers(0, 3, ROWS)),
    "used twice": (used_twice, lambda r: plain(r), lambda r: r.normal(size=ROWS)),
    "places": (over_places, lambda r: r.normal(size=(ROWS, 4, 2)), lambda r: r.integers(0, 3, ROWS)),
    "convolution": (convolution, lambda r: r.normal(size=(ROWS, 3, 3, 1)), lambda r: r.integers(0, 2, ROWS)),
    "anything": (anything_goes, lambda r: plain(r), lambda r: r.normal(size=ROWS)),
}


@contextmanager
def untouched(ppl, name):
    """A problem about which nothing is known yet."""
    model, inputs, targets = MODELS[name]
    rng = np.random.default_rng(8)
    with problem_of(ppl, model, inputs(rng), targets(rng)) as problem:
        yield problem, point(problem)


@cache
def shared(ppl, name):
    """One program for all tests of a model: it keeps what it has compiled."""
    with untouched(ppl, name) as found:
        return found


@contextmanager
def prepared(ppl, name):
    found = shared(ppl, name)
    with system(ppl).session("float64", "cpu", 1):
        yield found


@pytest.fixture(params=list(MODELS))
def name(request):
    return request.param


# --- the oracle: everything dense, by automatic differentiation of the whole batch ----------------


def dense_jacobian(problem, u):
    """eta (N, D) and (N, D, P), from the predictor of all rows at once."""
    program, chosen = problem.program, problem.system
    names = latent_names(problem)

    def eta(flat):
        w = program.constrain(program.unravel(flat, names), problem.x, problem.y)
        return program.predictor(w, problem.x)

    flat = chosen.asarray(flat_latents(problem, u))
    return chosen.to_numpy(eta(flat)), chosen.to_numpy(chosen.compile(chosen.transforms.jacrev(eta))(flat))


def dense_hessian(problem, u):
    program, chosen = problem.program, problem.system
    names = latent_names(problem)

    def loss(flat):
        return -program.log_likelihood(program.unravel(flat, names), problem.x, problem.y).sum()

    return chosen.to_numpy(chosen.compile(chosen.hessian(loss))(chosen.asarray(flat_latents(problem, u))))


def row_gradients(problem, u):
    """Gradients (N, P) of log p(y_n | u), by differentiating the log density of the system."""
    program, chosen = problem.program, problem.system
    names = latent_names(problem)

    def density(flat):
        return program.log_likelihood(program.unravel(flat, names), problem.x, problem.y)

    return chosen.to_numpy(
        chosen.compile(chosen.transforms.jacrev(density))(chosen.asarray(flat_latents(problem, u)))
    )


def dense(problem, u, curvature):
    if curvature == "hessian":
        return dense_hessian(problem, u)
    if curvature == "empirical":
        gradients = row_gradients(problem, u)
        return gradients.T @ gradients
    eta, jacobian = dense_jacobian(problem, u)
    return np.einsum("ndp,nde,neq->pq", jacobian, problem.program.likelihood.fisher(eta), jacobian)


@cache
def oracle(name, which) -> Any:
    """By torch, for both systems: the Jacobian with eta, or a curvature."""
    with prepared("pyro", name) as (problem, u):
        return dense_jacobian(problem, u) if which == "jacobian" else dense(problem, u, which)


def close(ours, wanted, tolerance=1e-9):
    assert ours.shape == wanted.shape
    assert np.allclose(ours, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


# --- likelihoods ----------------------------------------------------------------------------------

LIKELIHOODS = {
    "Gaussian": (likelihoods.Gaussian(None), 2, lambda r: r.normal(size=5)),
    "Gaussian, two outputs": (likelihoods.Gaussian(None), 4, lambda r: r.normal(size=(5, 2))),
    "HeteroscedasticGaussian": (likelihoods.HeteroscedasticGaussian(), 2, lambda r: r.normal(size=5)),
    "Bernoulli": (likelihoods.Bernoulli(), 1, lambda r: np.array([0.0, 1.0, 1.0, 0.0, 1.0])),
    "Categorical": (likelihoods.Categorical(), 3, lambda r: np.array([0, 2, 1, 1, 0])),
}


@pytest.mark.parametrize("which", LIKELIHOODS)
def test_score_is_the_gradient_of_the_log_density(which, rng):
    likelihood, outputs, targets = LIKELIHOODS[which]
    eta, y = rng.normal(size=(5, outputs)), targets(rng)
    if isinstance(likelihood, likelihoods.Gaussian):
        eta[:, outputs // 2 :] = eta[0, outputs // 2 :]  # its noise is one for all rows

    def density(eta):
        return bnn.Prediction(*likelihood.mixture_parameters(eta[None])).log_prob(y)

    step = 1e-6
    for column in range(outputs):
        shift = step * np.eye(outputs)[column]
        slope = (density(eta + shift) - density(eta - shift)) / (2 * step)
        # Central differences: rounding 1e-16 / 1e-6 and a truncation of order 1e-12.
        assert np.allclose(
            likelihood.score(eta, y)[:, column], slope.reshape(5, -1).sum(-1), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("which", LIKELIHOODS)
def test_fisher_is_the_product_of_its_root_and_the_covariance_of_the_score(which, rng):
    likelihood, outputs, _ = LIKELIHOODS[which]
    eta = rng.normal(size=(5, outputs))
    fisher, root = likelihood.fisher(eta), likelihood.fisher_root(eta)
    assert np.allclose(root @ root.transpose(0, 2, 1), fisher, rtol=1e-12, atol=1e-15)
    # Expectations in closed form: over classes, or by a Gauss-Hermite rule that is exact for these polynomials.
    if which.endswith(("Bernoulli", "Categorical")):
        parameters = likelihood.mixture_parameters(eta)[1]["probs"]
        p = np.column_stack([1 - parameters, parameters]) if which == "Bernoulli" else parameters
        values = [
            (np.full(5, k, dtype=float if which == "Bernoulli" else int), p[:, k]) for k in range(p.shape[1])
        ]
    else:
        nodes, weights = np.polynomial.hermite_e.hermegauss(8)
        weights = weights / weights.sum()
        loc, scale = eta[:, : outputs // 2], np.exp(eta[:, outputs // 2 :])
        grid = np.array(np.meshgrid(*[np.arange(8)] * (outputs // 2))).reshape(outputs // 2, -1).T
        values = [
            (
                (loc + scale * nodes[k])[:, 0] if outputs == 2 else loc + scale * nodes[k],
                np.full(5, weights[k].prod()),
            )
            for k in grid
        ]
    scores = [(likelihood.score(eta, y), weight) for y, weight in values]
    assert np.allclose(sum(w[:, None] * s for s, w in scores), 0.0, atol=1e-12)
    second = sum(w[:, None, None] * s[:, :, None] * s[:, None, :] for s, w in scores)
    assert np.allclose(second, fisher, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("which", LIKELIHOODS)
def test_scores_and_roots_are_the_same_in_both_systems(which, ppl, rng):
    likelihood, outputs, targets = LIKELIHOODS[which]
    eta, y = rng.normal(size=(5, outputs)), targets(rng)
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        a, b = chosen.asarray(eta), chosen.asarray(y)
        score, root = likelihood.score(a, b), likelihood.fisher_root(a)
        assert chosen.to_numpy(score).dtype == np.float64
        assert np.allclose(chosen.to_numpy(score), likelihood.score(eta, y), rtol=1e-12, atol=1e-14)
        assert np.allclose(chosen.to_numpy(root), likelihood.fisher_root(eta), rtol=1e-12, atol=1e-14)


# --- linear maps and their factors ----------------------------------------------------------------


def test_maps_are_found_with_the_sites_that_they_are_made_of(ppl):
    wanted = {
        "sampled noise": {("hidden0.weight", "hidden0.bias", 1), ("output.weight", "output.bias", 1)},
        "used twice": {
            ("shared.weight", "shared.bias", 2),
            ("tied.weight", None, 2),
            ("output.weight", "output.bias", 1),
        },
        "places": {("each.weight", "each.bias", 4), ("output.weight", "output.bias", 1)},
        "convolution": {("conv.weight", "conv.bias", 9), ("output.weight", "output.bias", 1)},
        "anything": {("served", None, 1), ("output.weight", "output.bias", 1)},
    }
    for name, maps in wanted.items():
        with prepared(ppl, name) as (problem, u):
            found = linear_maps(problem, u)
            assert {(linear.weight, linear.bias, linear.places) for linear in found} == maps


def test_jacobian_of_every_model(ppl, name):
    """Of all positions, of some, and in chunks of one row."""
    eta, wanted = oracle(name, "jacobian")
    with prepared(ppl, name) as (problem, u):
        size = wanted.shape[-1]
        for positions in (None, np.arange(0, size, 3), np.arange(size - 2, size)):
            ((rows, value, jacobian),) = jacobians(problem, u, problem.inputs, 2**28, positions)
            assert rows == slice(0, ROWS)
            close(value, eta, 1e-12)
            close(jacobian, wanted if positions is None else wanted[..., positions], 1e-11)
        found = list(jacobians(problem, u, problem.inputs, 1))
        assert len(found) == ROWS
        close(np.concatenate([part[2] for part in found]), wanted, 1e-11)


def test_factors_make_the_weighted_jacobian(ppl, name, rng):
    """sum_t a_t g_t' and sum_t g_t in their places, under cotangents of any width."""
    eta, jacobian = oracle(name, "jacobian")
    root = rng.normal(size=(ROWS, eta.shape[1], 4))
    wanted = np.einsum("ndp,ndc->ncp", jacobian, root)
    with prepared(ppl, name) as (problem, u):
        at, maps = site_slices(problem), {linear.weight: linear for linear in linear_maps(problem, u)}
        served = {site for linear in maps.values() for site in (linear.weight, linear.bias)}
        others = [site for site in at if site not in served]
        parts = linear_factors(problem, u, problem.inputs, lambda eta, rows: root[rows], 2**14)
        for part in parts:
            rows, rest = part.rows, part.rest
            close(part.eta, eta[rows], 1e-12)
            for key, (inputs, active) in part.maps.items():
                linear, gradients = maps[key], np.zeros((len(active), 4, *active.shape[2:]))
                gradients[:, part.active] = active
                weight = np.einsum("bti,bcto->bcio", inputs, gradients).reshape(*gradients.shape[:2], -1)
                close(weight, wanted[rows][..., at[linear.weight]], 1e-11)
                if linear.bias is not None:
                    close(gradients.sum(2), wanted[rows][..., at[linear.bias]], 1e-11)
            if others:
                close(rest, np.concatenate([wanted[rows][..., at[site]] for site in others], -1), 1e-11)


def test_an_input_that_is_used_by_rows_in_another_order_stays_with_its_row(ppl):
    """Rows folded into another axis, as a model of sequences may do: place by place, not row by row."""

    def model(x, y=None):
        rows = x.shape[0]
        folded = bnn.ops.concatenate([x[:, 0], x[:, 1]], 0)  # first place of all rows, then the second
        h = bnn.ops.tanh(bnn.dense("each", folded, 2, priors.Normal()))
        bnn.observe(y, h[:rows, :1] * h[rows:, 1:], likelihoods.Gaussian(0.3))

    rng = np.random.default_rng(1)
    with problem_of(ppl, model, rng.normal(size=(5, 2, 3)), rng.normal(size=5)) as problem:
        u = point(problem)
        ((_, _, jacobian),) = jacobians(problem, u, problem.inputs, 2**28)
        close(jacobian, dense_jacobian(problem, u)[1], 1e-11)


# --- curvatures -----------------------------------------------------------------------------------


def low_rank(matrix, rank):
    values, vectors = np.linalg.eigh(matrix)
    return vectors[:, -rank:] * np.maximum(values[-rank:], 0.0) @ vectors[:, -rank:].T


# Every model has a Hessian in torch under the default tests; in JAX its products are compiled for seconds each.
HESSIANS = ("sampled noise", "convolution", "anything")


@pytest.mark.parametrize(
    ("ppl", "name", "curvature"),
    [
        pytest.param(ppl, name, curvature, marks=[pytest.mark.slow] if later else [])
        for ppl, name, curvature in product(SYSTEMS, MODELS, CURVATURES)
        for later in [ppl == "numpyro" and curvature == "hessian" and name not in HESSIANS]
    ],
)
def test_every_structure_of_every_model(ppl, name, curvature, monkeypatch):
    """Full, diagonal and low rank; of all positions and of some."""
    eta, wanted = oracle(name, "jacobian")[0], oracle(name, curvature)
    with prepared(ppl, name) as (problem, u):
        full, passes = data_curvature(problem, u, curvature=curvature)
        close(full.matrix(), wanted)
        # Known noise is an output on which nothing depends: no gradient is spent on it.
        outputs = problem.program.likelihood.fisher(eta).shape[-1]
        ggn = outputs - 1 if name == "used twice" else outputs
        assert passes == pytest.approx({"ggn": ggn, "empirical": 1, "hessian": len(wanted)}[curvature])
        for positions in (None, np.arange(0, len(wanted), 2), np.arange(len(wanted) - 3, len(wanted))):
            part = wanted if positions is None else wanted[np.ix_(positions, positions)]
            keywords = {"curvature": curvature, "positions": positions}
            close(data_curvature(problem, u, **keywords)[0].matrix(), part)
            close(
                data_curvature(problem, u, structure="diag", **keywords)[0].matrix(), np.diag(np.diag(part))
            )
            ours = data_curvature(problem, u, structure="lowrank", rank=2, **keywords)[0]
            close(ours.matrix(), low_rank(part, 2))
        monkeypatch.setattr(curvature_module, "DENSE", 0)
        ours = data_curvature(problem, u, curvature=curvature, structure="lowrank", rank=2)[0]
        # By products with vectors: Lanczos to the precision of the machine, relative to the largest.
        close(ours.matrix(), low_rank(wanted, 2), 1e-8)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", ["sampled noise", "places"])
def test_low_rank_leaves_a_site_apart_its_whole_block(ppl, name, curvature, monkeypatch):
    wanted = oracle(name, curvature)
    with prepared(ppl, name) as (problem, u):
        for dense in (curvature_module.DENSE, 0):
            monkeypatch.setattr(curvature_module, "DENSE", dense)
            for site in (latent_names(problem)[0], latent_names(problem)[-1]):
                own = np.zeros(len(wanted), dtype=bool)
                own[site_slices(problem)[site]] = True
                total = low_rank(np.where(own | own[:, None], 0.0, wanted), 2)
                block = wanted[np.ix_(own, own)]
                total[np.ix_(own, own)] = low_rank(block, len(block))
                keywords = {"curvature": curvature, "structure": "lowrank", "rank": 2}
                close(data_curvature(problem, u, apart=(site,), **keywords)[0].matrix(), total, 1e-8)
        with pytest.raises(InputError, match=f"a rank from 1 to {len(wanted) - np.count_nonzero(own)}"):
            data_curvature(problem, u, structure="lowrank", rank=len(wanted), apart=(site,))


# Code that both systems share makes the chunks. NumPyro compiles each size, so it has one model.
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize(
    ("ppl", "name"),
    [("pyro", "sampled noise"), ("pyro", "places"), ("pyro", "anything"), ("numpyro", "places")],
)
def test_chunks_change_nothing(ppl, name, curvature, monkeypatch):
    memories: dict[str, tuple[int, ...]] = dict.fromkeys(("full", "diag", "kron"), (1, 20_000))
    if curvature == "hessian":
        # Both structures are made of the same products.
        memories = {"full": (1, 20_000), "diag": (20_000,)}
    with prepared(ppl, name) as (problem, u):
        for structure in memories:
            keywords = {"curvature": curvature, "structure": structure}
            whole, passes = data_curvature(problem, u, **keywords)
            for memory in memories[structure]:
                ours, again = data_curvature(problem, u, **keywords, memory=memory)
                close(ours.matrix(), whole.matrix(), 1e-12)
                assert again == pytest.approx(passes)
        if curvature == "ggn":
            monkeypatch.setattr(curvature_module, "DENSE", 0)
            keywords = {"structure": "lowrank", "rank": 2}
            whole, made_anew = (data_curvature(problem, u, **keywords, memory=m) for m in (2**28, 2_000))
            close(made_anew[0].matrix(), whole[0].matrix(), 1e-8)
            assert made_anew[1] == whole[1]


@pytest.mark.parametrize("name", ["two outputs", "used twice", "anything"])
def test_both_systems_agree(name):
    found = {}
    for ppl in SYSTEMS:
        with prepared(ppl, name) as (problem, u):
            for curvature in CURVATURES:
                for structure in ("full", "diag", "kron") if curvature != "hessian" else ("full", "diag"):
                    ours = data_curvature(problem, u, curvature=curvature, structure=structure)[0].matrix()
                    close(ours, found.setdefault((curvature, structure), ours), 1e-10)
    assert len(found) == 8


def test_the_gauss_newton_matrix_is_the_hessian_of_a_linear_model_with_its_own_link(ppl):
    rng = np.random.default_rng(2)
    with problem_of(ppl, one_layer, plain(rng), rng.integers(0, 3, ROWS)) as problem:
        u = point(problem)
        ours = data_curvature(problem, u)[0].matrix()
        close(ours, data_curvature(problem, u, curvature="hessian")[0].matrix())


# The targets are drawn in NumPy, for both systems.
@pytest.mark.parametrize(
    ("ppl", "name"),
    [
        *(("pyro", name) for name in ("categorical", "bernoulli", "two outputs", "sampled noise")),
        ("numpyro", "sampled noise"),
    ],
)
def test_sampled_fisher_is_unbiased(ppl, name):
    """The mean over 40 seeds within 6 standard errors, which Student's t with 39 degrees passes once in two million."""
    wanted = oracle(name, "ggn")
    with prepared(ppl, name) as (problem, u):

        def sampled(seed, memory=2**28):
            keywords = {"fisher": "sampled", "samples": 25, "memory": memory}
            return data_curvature(problem, u, seed=seed, **keywords)[0].matrix()

        found = np.array([sampled(seed) for seed in range(40)])
        error = found.std(0, ddof=1) / np.sqrt(len(found))
        assert np.all(np.abs(found.mean(0) - wanted) <= 6 * error + 1e-12)
        assert error.max() < 0.1 * np.abs(wanted).max()
        close(sampled(3, memory=40_000), found[3], 1e-12)


# --- Kronecker factors ----------------------------------------------------------------------------


def test_kronecker_factors_are_those_of_their_definition(ppl, name):
    exact = oracle(name, "ggn")
    with prepared(ppl, name) as (problem, u):
        at = site_slices(problem)
        root = problem.program.likelihood.fisher_root
        (part,) = linear_factors(problem, u, problem.inputs, lambda eta, rows: root(eta))
        for sharing in ("expand", "reduce"):
            ours = data_curvature(problem, u, structure="kron", sharing=sharing)[0].matrix()
            wanted = np.zeros_like(exact)
            for site in at.values():
                wanted[site, site] = exact[site, site]
            for key, (inputs, gradients) in part.maps.items():
                if sharing == "reduce":
                    inputs, gradients = inputs.mean(1, keepdims=True), gradients.sum(2, keepdims=True)
                left = np.einsum("nti,ntj->ij", inputs, inputs) / (ROWS * inputs.shape[1])
                right = np.einsum("ncto,nctp->op", gradients, gradients)
                place = at[key]
                wanted[place, place] = np.kron(left, right)
            close(ours, wanted, 1e-11)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_are_exact_for_one_row(ppl, sharing):
    rng = np.random.default_rng(6)
    with problem_of(ppl, small_classifier, rng.normal(size=(1, 2)), np.array([1])) as problem:
        u = point(problem)
        exact = dense(problem, u, "ggn")
        ours = data_curvature(problem, u, structure="kron", sharing=sharing)[0].matrix()
        for site in site_slices(problem).values():
            close(ours[site, site], exact[site, site])


def test_kronecker_factors_are_exact_for_deep_linear_networks(ppl):
    """Gradients are then the same for all rows, so that the mean of a product is the product of means."""

    def model(x, y=None):
        f = bnn.mlp(x, [3, 2, 2], activation="identity", prior=priors.Normal())
        bnn.observe(y, f, likelihoods.Gaussian(0.4))

    rng = np.random.default_rng(6)
    with problem_of(ppl, model, plain(rng), rng.normal(size=(ROWS, 2))) as problem:
        u = point(problem)
        exact = dense(problem, u, "ggn")
        ours = data_curvature(problem, u, structure="kron")[0].matrix()
        for site in site_slices(problem).values():
            close(ours[site, site], exact[site, site])


# --- parts of the flat vector, and what is refused ------------------------------------------------


def test_kronecker_factors_of_whole_sites_only(ppl):
    with prepared(ppl, "sampled noise") as (problem, u):
        at = site_slices(problem)
        last = np.arange(at["output.weight"].start, at["output.bias"].stop)
        whole = data_curvature(problem, u, structure="kron")[0].matrix()
        ours = data_curvature(problem, u, structure="kron", positions=last)[0].matrix()
        close(ours, whole[np.ix_(last, last)], 1e-12)


def test_impossible_ranks_and_positions_are_refused(ppl):
    with prepared(ppl, "sampled noise") as (problem, u):
        with pytest.raises(InputError, match="rank from 1 to"):
            data_curvature(problem, u, structure="lowrank", rank=1000)
        for positions in ([], [0, 0], [3, 1], [0.5], [10**6], [-1]):
            with pytest.raises(InputError, match="increasing whole numbers"):
                data_curvature(problem, u, positions=np.array(positions))


def test_rows_that_interact_have_no_jacobian_but_a_hessian(ppl):
    def model(x, y=None):
        bnn.coupled()
        f = bnn.mlp(x - bnn.ops.mean(x, 0), [1], prior=priors.Normal())
        bnn.observe(y, f, likelihoods.Gaussian(0.5))

    rng = np.random.default_rng(0)
    with problem_of(ppl, model, plain(rng), rng.normal(size=ROWS)) as problem:
        u = point(problem)
        with pytest.raises(UnsupportedError, match="do not interact"):
            data_curvature(problem, u)
        close(
            data_curvature(problem, u, curvature="hessian", memory=1)[0].matrix(), dense_hessian(problem, u)
        )


def test_a_predictor_that_is_not_finite_is_an_error(ppl):
    with untouched(ppl, "sampled noise") as (problem, u):
        for _ in range(2):
            # Before anything is known about the model, and after.
            for curvature in CURVATURES:
                with pytest.raises(CurvatureError, match="finite"):
                    data_curvature(problem, {**u, "noise": np.array(-2000.0)}, curvature=curvature)
            data_curvature(problem, u)


# --- laplace-torch --------------------------------------------------------------------------------


def torch_network(weights):
    import torch

    layers = []
    for index, (weight, bias) in enumerate(weights):
        layer = torch.nn.Linear(*weight.shape).double()
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(weight.T))
            layer.bias.copy_(torch.tensor(bias))
        layers += [layer] if index == len(weights) - 1 else [layer, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_agrees_with_laplace_torch(ppl, task, curvature, structure):
    import torch

    rng = np.random.default_rng(9)
    x = plain(rng)
    outputs = 1 if task == "regression" else 3
    y = rng.normal(size=ROWS) if task == "regression" else rng.integers(0, 3, ROWS)

    def model(x, y=None):
        f = bnn.mlp(x, [4, 3, outputs], activation="tanh", prior=priors.Normal())
        bnn.observe(y, f, likelihoods.Gaussian(1.0) if task == "regression" else likelihoods.Categorical())

    before = torch.get_default_dtype()
    with problem_of(ppl, model, x, y) as problem, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        u = point(problem)
        ours = data_curvature(problem, u, curvature=curvature, structure=structure)[0].matrix()
        torch.set_default_dtype(torch.float64)
        try:
            from laplace import Laplace
            from laplace.curvature import CurvlinopsEF, CurvlinopsGGN

            layers = ["hidden0", "hidden1", "output"]
            network = torch_network([(u[f"{layer}.weight"], u[f"{layer}.bias"]) for layer in layers])
            targets = torch.tensor(y)[:, None] if task == "regression" else torch.tensor(y)
            data = torch.utils.data.TensorDataset(torch.tensor(x), targets)
            la = Laplace(
                network,
                task,
                subset_of_weights="all",
                hessian_structure=structure,
                backend=CurvlinopsGGN if curvature == "ggn" else CurvlinopsEF,
            )
            la.fit(torch.utils.data.DataLoader(data, batch_size=ROWS))
            if structure == "diag":
                wanted = np.diag(la.H.detach().numpy())
            else:
                wanted = la.H_facs.to_matrix().detach().numpy()
        finally:
            torch.set_default_dtype(before)
    if task == "regression" and curvature == "empirical":
        # It squares the gradient of (y - f)^2, twice that of -log p, and multiplies once with its factor of 1/2.
        wanted = wanted / 2.0
    order, start = [], 0
    for fan_in, fan_out in pairwise([2, 4, 3, outputs]):
        order.extend(np.arange(start, start + fan_in * fan_out).reshape(fan_in, fan_out).T.reshape(-1))
        start += fan_in * fan_out
        order.extend(range(start, start + fan_out))
        start += fan_out
    close(ours[np.ix_(order, order)], wanted, 1e-5)


# --- the prior ------------------------------------------------------------------------------------


def every_prior(x, y=None):
    each = {
        "normal": dist.Normal(0.3, 0.7),
        "student": dist.StudentT(3.0, 0.1, 0.8),
        "cauchy": dist.Cauchy(0.0, 1.0),
        "lognormal": dist.LogNormal(0.2, 0.5),
        "halfnormal": dist.HalfNormal(1.0),
        "halfcauchy": dist.HalfCauchy(1.0),
        "gamma": dist.Gamma(2.0, 1.5),
        "inversegamma": dist.InverseGamma(2.0, 1.5),
        "exponential": dist.Exponential(2.0),
        "beta": dist.Beta(2.0, 3.0),
        "uniform": dist.Uniform(-1.0, 2.0),
        "mixture": dist.NormalMixture((0.3, 0.7), (1.0, 0.2)),
    }
    total = x[:, :1] * 0.0
    for name, distribution in each.items():
        total = total + bnn.ops.sum(bnn.sample(name, distribution.expand((2,)).to_event()))
    bnn.observe(y, total, likelihoods.Gaussian(1.0))


def test_a_prior_without_dependence_has_a_diagonal(ppl):
    rng = np.random.default_rng(0)
    with problem_of(ppl, every_prior, plain(rng), rng.normal(size=ROWS)) as problem:
        u = point(problem)
        ours, wanted = prior_curvature(problem, u), prior_hessian(problem, u)
        assert ours.shape == (len(wanted),)
        close(np.diag(ours), wanted, 1e-10)
        assert not any(parents(problem, u).values())


def hierarchy(x, y=None):
    top = bnn.sample("top", dist.InverseGamma(2.0, 1.0))
    scale = bnn.sample("scale", dist.HalfNormal(top))
    weight = priors.Normal(0.0, scale)("weight", (2, 1), 2)
    bias = priors.Normal()("bias", (1,), 1)
    bnn.observe(y, bnn.linear("output", x, weight, bias), likelihoods.Gaussian(0.5))


def test_a_hierarchy_is_found_and_has_a_dense_curvature(ppl):
    rng = np.random.default_rng(0)
    with problem_of(ppl, hierarchy, plain(rng), rng.normal(size=ROWS)) as problem:
        u = point(problem)
        assert parents(problem, u) == {"top": set(), "scale": {"top"}, "weight": {"scale"}, "bias": set()}
        close(prior_curvature(problem, u), prior_hessian(problem, u), 1e-12)


def simplex(x, y=None):
    p = bnn.sample("p", dist.Dirichlet(np.array([1.0, 2.0, 3.0])))
    bnn.observe(y, x @ p[:2, None], likelihoods.Gaussian(0.5))


def test_elements_that_depend_on_each_other_have_a_dense_curvature(ppl):
    rng = np.random.default_rng(0)
    with problem_of(ppl, simplex, plain(rng), rng.normal(size=ROWS)) as problem:
        assert prior_curvature(problem, point(problem)).shape == (2, 2)


def centred(scale_prior, count):
    def model(x, y=None):
        scale = bnn.sample("scale", scale_prior)
        weight = priors.Normal(0.5, scale)("weight", (2, count), 2)
        bnn.observe(y, bnn.ops.sum(x @ weight, 1)[:, None], likelihoods.Gaussian(0.5))

    return model


@pytest.mark.parametrize(
    ("model", "bounded"),
    [
        (centred(dist.HalfNormal(1.0), 1), False),
        (centred(dist.HalfCauchy(1.0), 3), False),
        (centred(dist.Gamma(1.5, 1.0), 2), False),
        (centred(dist.InverseGamma(1.0, 1.0), 3), True),  # exp(-1/s) outweighs any power of s
        (centred(dist.LogNormal(0.0, 1.0), 3), True),  # so does the square of log s
        (centred(dist.Gamma(5.0, 1.0), 2), True),  # s^5 s^-4
        (hierarchy, False),
        (small_network, True),
    ],
)
def test_a_scale_that_can_vanish_with_what_it_scales_is_refused(ppl, model, bounded):
    """HalfNormal with 2 weights: s^-2 ds = exp(-u) du as u = log s goes to minus infinity."""
    rng = np.random.default_rng(0)
    with problem_of(ppl, model, plain(rng), rng.normal(size=ROWS)) as problem:
        if bounded:
            check_bounded(problem, point(problem))
        else:
            with pytest.raises(UnsupportedError, match=r"without bound.*marginal=.*noncentred"):
                check_bounded(problem, point(problem))


def test_priors_that_know_their_own_curvature_have_it_tensor_by_tensor(ppl):
    """Yesterday's Kronecker factors and a bias with a dense Gaussian, against the Hessian."""
    rng = np.random.default_rng(0)

    def gaussian_prior(model_sites):
        left, right = (np.linalg.qr(rng.normal(size=(size, size)))[0] for size in (2, 3))
        root = rng.normal(size=(3, 3))
        factors = {"output.weight": (left, right, np.exp(rng.normal(size=(2, 3))))}
        joint = ((("output.bias",), root @ root.T + np.eye(3)),)
        return GaussianPrior(model_sites, joint=joint, kronecker=factors)

    def three_outputs(x, y=None):
        spread = bnn.sample("spread", dist.HalfNormal(1.0))
        f = bnn.mlp(x, [3], prior=priors.Normal(0.0, 1.0))
        bnn.observe(y, f * spread, likelihoods.Categorical())

    sites = {"output.weight": np.zeros((2, 3)), "output.bias": np.zeros(3)}
    model = bnn.with_prior(three_outputs, gaussian_prior(sites))
    with problem_of(ppl, model, plain(rng), np.arange(ROWS) % 3) as problem:
        u = point(problem)
        wanted, slices = prior_hessian(problem, u), site_slices(problem)
        found = site_curvatures(problem, u)
        assert found is not None
        assert isinstance(found["output.weight"], Rotated)
        assert found["spread"].shape == (1,)
        total = np.zeros_like(wanted)
        for name, each in found.items():
            dense = each.precision() if isinstance(each, Rotated) else np.atleast_2d(each)
            total[slices[name], slices[name]] = dense
        close(total, wanted, 1e-9)
    for name, other in (("hierarchy", hierarchy), ("simplex", simplex)):
        with problem_of(ppl, other, plain(rng), rng.normal(size=ROWS)) as problem:
            assert site_curvatures(problem, point(problem)) is None, name
