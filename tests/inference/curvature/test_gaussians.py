"""Gaussians and curvatures of every structure against dense algebra by NumPy and SciPy.

A structure is a row of `CASES`: how to make one, and its dense matrix, made without the class.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from ppl_bnn.core.errors import CurvatureError, UnsupportedError
from ppl_bnn.inference.curvature import gaussians as covariance
from ppl_bnn.inference.curvature import linear_algebra
from ppl_bnn.inference.curvature import structures as precision
from ppl_bnn.inference.curvature.gaussians import (
    STRUCTURES,
    Diagonal,
    Full,
    Kronecker,
    LowRankCovariance,
    LowRankPrecision,
    Rotated,
)
from ppl_bnn.inference.curvature.kronecker import (
    DenseBlock,
    KroneckerBlock,
    KroneckerCurvature,
    prior_in,
    prior_share,
)
from ppl_bnn.inference.curvature.structures import DiagonalCurvature, FactorCurvature, FullCurvature

SIZE = 14
# The flat vector of the cases: three tensors in shuffled positions, so that nothing depends on their order.
SHUFFLED = np.random.default_rng(3).permutation(SIZE)
TENSORS = (SHUFFLED[:6], SHUFFLED[6:10], SHUFFLED[10:])


def gram(rng, size, rank=None):
    rows = rng.normal(size=(size if rank is None else rank, size))
    return rows.T @ rows


def full(rng):
    matrix = gram(rng, SIZE)
    return FullCurvature(matrix), matrix


def singular(rng):
    matrix = gram(rng, SIZE, rank=3)
    return FullCurvature(matrix), matrix


def indefinite(rng):
    """A Hessian that curves downwards in one direction, by less than the prior curves upwards."""
    turn = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
    matrix = (turn * np.append(rng.gamma(2.0, size=SIZE - 1), -0.05)) @ turn.T
    return FullCurvature(0.5 * (matrix + matrix.T)), 0.5 * (matrix + matrix.T)


def wide(rng):
    factor = rng.normal(size=(5, SIZE))
    return FactorCurvature(factor), factor.T @ factor


def tall(rng):
    factor = rng.normal(size=(SIZE + 6, SIZE))
    return FactorCurvature(factor), factor.T @ factor


def eigenpairs(rng):
    matrix = gram(rng, SIZE)
    values, vectors = np.linalg.eigh(matrix)
    values, vectors = values[-2:], vectors[:, -2:]
    return FactorCurvature(np.sqrt(values)[:, None] * vectors.T), vectors @ np.diag(values) @ vectors.T


def nothing(rng):
    return FactorCurvature(np.zeros((0, SIZE))), np.zeros((SIZE, SIZE))


def diagonal(rng):
    values = rng.gamma(1.0, size=SIZE)
    return DiagonalCurvature(values), np.diag(values)


def kronecker(rng):
    left, right, bias, other = gram(rng, 3), gram(rng, 2, rank=1), gram(rng, 4, rank=2), gram(rng, 4)
    blocks = [
        KroneckerBlock("a/weight", (3, 2), left, right, TENSORS[0]),
        DenseBlock(bias, "a.bias", TENSORS[1]),
        KroneckerBlock("b.weight", (1, 4), np.array([[1.7]]), other, TENSORS[2]),
    ]
    dense = np.zeros((SIZE, SIZE))
    for where, matrix in zip(TENSORS, (np.kron(left, right), bias, 1.7 * other), strict=True):
        dense[np.ix_(where, where)] = matrix
    return KroneckerCurvature(blocks), dense


@dataclass(frozen=True)
class Case:
    """varied: whether the prior may differ from weight to weight; kind: the Gaussian that a diagonal prior gives."""

    make: Callable[[np.random.Generator], tuple[precision.DataCurvature, np.ndarray]]
    kind: type[covariance.FlatGaussian]
    varied: bool = True

    def prior(self, rng):
        each = np.exp(rng.normal(size=SIZE))
        for where in () if self.varied else TENSORS:
            each[where] = each[where[0]]
        return each

    @property
    def groupings(self):
        per_tensor = np.empty(SIZE, dtype=int)
        for group, where in enumerate(TENSORS):
            per_tensor[where] = group
        some = {"global": np.zeros(SIZE, dtype=int), "tensor": per_tensor}
        return some | ({"weight": np.arange(SIZE), "halves": np.arange(SIZE) % 2} if self.varied else {})


CASES = {
    "full": Case(full, Full),
    "singular": Case(singular, Full),
    "indefinite": Case(indefinite, Full),
    "wide": Case(wide, LowRankPrecision),
    "tall": Case(tall, Full),
    "eigenpairs": Case(eigenpairs, LowRankPrecision),
    "nothing": Case(nothing, LowRankPrecision),
    "diagonal": Case(diagonal, Diagonal),
    "kronecker": Case(kronecker, Kronecker, varied=False),
}
GROUPED = [(name, grouping) for name, case in CASES.items() for grouping in case.groupings]
each_case = pytest.mark.parametrize("name", CASES)


def made(name, rng):
    """A curvature, times 1.7 by `scaled`, a prior, their Gaussian, and A and A^-1 as dense matrices."""
    case = CASES[name]
    curvature, dense = case.make(rng)
    prior = case.prior(rng)
    precision_matrix = 1.7 * dense + np.diag(prior)
    return curvature.scaled(1.7), prior, precision_matrix, np.linalg.inv(precision_matrix)


def close(found, wanted):
    """Rounding only: condition numbers here are below 1e4."""
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10 * np.abs(wanted).max(initial=1e-300))


# --- Gaussians ------------------------------------------------------------------------------------


@each_case
def test_gaussian_against_dense_algebra(name, rng):
    curvature, prior, a, inverse = made(name, rng)
    gaussian = curvature.gaussian(prior)
    assert type(gaussian) is CASES[name].kind
    assert STRUCTURES[gaussian.structure] is type(gaussian)
    assert gaussian.size == SIZE
    close(curvature.matrix(), a - np.diag(prior))
    close(gaussian.precision(), a)
    close(gaussian.covariance(), inverse)
    close(gaussian.variances(), np.diag(inverse))
    assert np.isclose(gaussian.log_determinant, -np.linalg.slogdet(a)[1], rtol=1e-10)


@each_case
def test_densities_and_projections_against_scipy(name, rng):
    curvature, prior, a, inverse = made(name, rng)
    gaussian = curvature.gaussian(prior)
    points = rng.normal(size=(4, SIZE))
    close(gaussian.log_prob(points), multivariate_normal(np.zeros(SIZE), inverse).logpdf(points))
    close(gaussian.quadratic(points), np.einsum("si,ij,sj->s", points, a, points))
    jacobian = rng.normal(size=(5, 3, SIZE))
    flat = jacobian.reshape(15, SIZE)
    close(gaussian.project(jacobian), jacobian @ inverse @ jacobian.transpose(0, 2, 1))
    close(gaussian.joint(jacobian), flat @ inverse @ flat.T)
    half = gaussian.whiten(flat)
    close(half @ half.T, flat @ inverse @ flat.T)


def deviation_of_draws(name, seed, count=40_000):
    """The largest error of a sample's mean and covariance, in its own standard errors."""
    curvature, prior, _, wanted = made(name, np.random.default_rng(seed))
    draws = curvature.gaussian(prior).sample(count, np.random.default_rng(seed + 1000))
    assert draws.shape == (count, SIZE)
    variances = np.diag(wanted)
    mean = np.abs(draws.mean(0)) / np.sqrt(variances / count)
    spread = np.sqrt((np.outer(variances, variances) + wanted**2) / count)
    return max(mean.max(), (np.abs(draws.T @ draws / count - wanted) / spread).max())


@each_case
def test_draws_have_the_covariance(name):
    """119 comparisons, each normal: below 5.5 but for 5e-6."""
    assert deviation_of_draws(name, seed=1) < 5.5


@each_case
def test_arrays_give_the_same_gaussian_to_the_bit(name, rng, tmp_path):
    from safetensors.numpy import load_file, save_file

    curvature, prior, _, _ = made(name, rng)
    gaussian = curvature.gaussian(prior)
    arrays = gaussian.arrays()
    assert all(isinstance(key, str) and value.dtype != object for key, value in arrays.items())
    save_file({key: np.asarray(value, order="C") for key, value in arrays.items()}, tmp_path / "gaussian")
    # What a file gives back has lost its order in memory and that of its keys.
    again = STRUCTURES[gaussian.structure].from_arrays(load_file(tmp_path / "gaussian"))
    assert type(again) is type(gaussian)
    assert {key: value.tobytes() for key, value in again.arrays().items()} == {
        key: value.tobytes() for key, value in arrays.items()
    }
    jacobian = rng.normal(size=(2, 3, SIZE))
    for a, b in (
        (gaussian.sample(3, np.random.default_rng(5)), again.sample(3, np.random.default_rng(5))),
        (gaussian.project(jacobian), again.project(jacobian)),
        (gaussian.log_prob(jacobian[0]), again.log_prob(jacobian[0])),
        (gaussian.variances(), again.variances()),
        (gaussian.log_determinant, again.log_determinant),
    ):
        assert np.array_equal(a, b)


def test_a_large_gaussian_does_not_depend_on_the_order_in_memory(rng: np.random.Generator):
    """Triangular products of 60 rows round differently in C order and in Fortran order."""
    curvature = FactorCurvature(rng.normal(size=(60, 100)))
    points = rng.normal(size=(5, 100))
    for gaussian in (
        FullCurvature(curvature.matrix()).gaussian(np.ones(100)),
        curvature.gaussian(np.ones(100)),
    ):
        for order in ("C", "F"):
            arrays = {key: np.asarray(value, order=order) for key, value in gaussian.arrays().items()}
            again = type(gaussian).from_arrays(arrays)
            assert np.array_equal(again.log_prob(points), gaussian.log_prob(points))
            assert np.array_equal(again.whiten(points), gaussian.whiten(points))


def test_names_shapes_and_positions_of_parts_survive(rng: np.random.Generator):
    curvature, _ = kronecker(rng)
    gaussian = curvature.gaussian(np.ones(SIZE))
    # A mapping that was read from a file may have another order.
    again = Kronecker.from_arrays(dict(reversed(gaussian.arrays().items())))
    assert [part.name for part in again.parts] == ["a/weight", "a.bias", "b.weight"]
    assert all(
        np.array_equal(part.positions, where) for part, where in zip(again.parts, TENSORS, strict=True)
    )
    assert again.parts[0].gaussian.values.shape == (3, 2)


@given(st.integers(1, 8), st.integers(0, 12), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_factors_of_any_shape(size, rows, seed):
    rng = np.random.default_rng(seed)
    factor, prior = rng.normal(size=(rows, size)), np.exp(rng.normal(size=size))
    curvature = FactorCurvature(factor)
    a = factor.T @ factor + np.diag(prior)
    gaussian = curvature.gaussian(prior)
    assert isinstance(gaussian, LowRankPrecision if rows < size else Full)
    np.testing.assert_allclose(gaussian.covariance(), np.linalg.inv(a), rtol=1e-8, atol=1e-10)
    groups = rng.integers(0, size, size=size)
    factors = np.exp(rng.normal(size=size))
    a = factor.T @ factor + np.diag(factors[groups] * prior)
    value, gamma = curvature.determinant(prior, groups)(factors)
    assert np.isclose(value, np.linalg.slogdet(a)[1], atol=1e-10)
    each = 1.0 - factors[groups] * prior * np.diag(np.linalg.inv(a))
    np.testing.assert_allclose(gamma, np.bincount(groups, each, minlength=size), rtol=1e-8, atol=1e-10)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25, deadline=None)
def test_kronecker_blocks_of_any_shape(shapes, seed):
    rng = np.random.default_rng(seed)
    size = sum(inputs * outputs for inputs, outputs in shapes)
    places = np.split(rng.permutation(size), np.cumsum([i * o for i, o in shapes])[:-1])
    dense, prior, blocks = np.zeros((size, size)), np.empty(size), []
    for index, ((inputs, outputs), where) in enumerate(zip(shapes, places, strict=True)):
        left, right = gram(rng, inputs), gram(rng, outputs)
        dense[np.ix_(where, where)] = np.kron(left, right)
        prior[where] = np.exp(rng.normal())
        blocks.append(KroneckerBlock(str(index), (inputs, outputs), left, right, where))
    curvature = KroneckerCurvature(blocks)
    gaussian = curvature.gaussian(prior)
    close(curvature.matrix(), dense)
    np.testing.assert_allclose(
        gaussian.covariance(), np.linalg.inv(dense + np.diag(prior)), rtol=1e-7, atol=1e-9
    )


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_low_rank_covariances_of_any_shape(size, rows, seed):
    rng = np.random.default_rng(seed)
    scale, factor = np.exp(rng.normal(size=size)), rng.normal(size=(rows, size))
    gaussian = LowRankCovariance.of(scale, factor)
    wanted = np.diag(scale**2) + factor.T @ factor
    close(gaussian.covariance(), wanted)
    # The root applied to the unit vectors: W, one column each.
    root = gaussian.colour(np.eye(size)).T
    close(root @ root.T, wanted)
    points = rng.normal(size=(3, size))
    close(
        gaussian.log_prob(points), np.atleast_1d(multivariate_normal(np.zeros(size), wanted).logpdf(points))
    )


# --- how low rank behaves -------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1e3, 1e5, 1e6])
def test_low_rank_keeps_variances_that_data_reduce_a_lot(rng: np.random.Generator, ratio):
    """B = s V' with orthonormal columns V: variance 1/(1 + s^2) along V, where a subtraction would leave eps s^2."""
    vectors = np.linalg.qr(rng.normal(size=(40, 3)))[0]
    gaussian = FactorCurvature(ratio * vectors.T).gaussian(np.ones(40))
    found = np.diag(gaussian.joint(vectors.T[None]))
    assert np.allclose(found * (1.0 + ratio**2), 1.0, rtol=20 * np.finfo(float).eps * ratio)
    draws = gaussian.sample(2000, rng) @ vectors
    # chi-square with 6000 degrees of freedom: relative standard error sqrt(2 / 6000).
    assert abs(np.mean(draws**2) * (1.0 + ratio**2) - 1.0) < 5 * np.sqrt(2 / 6000)


def test_low_rank_makes_nothing_as_large_as_a_matrix_over_weights(rng: np.random.Generator):
    size, rows = 20_000, 30
    factor, prior = rng.normal(size=(rows, size)), np.exp(rng.normal(size=size))
    groups = np.arange(size) % 3
    tracemalloc.start()
    try:
        curvature = FactorCurvature(factor)
        gaussian = curvature.gaussian(prior)
        gaussian.sample(10, rng)
        gaussian.variances()
        gaussian.project(rng.normal(size=(10, 1, size)))
        assert isinstance(gaussian, LowRankPrecision)
        assert gaussian.quadratic(np.ones((1, size))).shape == (1,)
        for by in (np.zeros(size, dtype=int), groups, np.arange(size)):
            curvature.determinant(prior, by)(np.ones(by.max() + 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * 8 * rows * size


def test_a_dense_gaussian_takes_few_matrices(rng: np.random.Generator):
    size = 500
    curvature = FullCurvature(gram(rng, size))
    prior = np.ones(size)
    tracemalloc.start()
    try:
        curvature.gaussian(prior).variances()
        curvature.determinant(prior, np.zeros(size, dtype=int))(np.ones(1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3.3 * 8 * size**2


# --- log-determinants -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "grouping"), GROUPED)
def test_determinant_against_dense_algebra(name, grouping, rng):
    case = CASES[name]
    curvature, prior, a, _ = made(name, rng)
    dense, groups = a - np.diag(prior), case.groupings[grouping]
    determinant = curvature.determinant(prior, groups)
    for _ in range(3):
        factors, scale = (
            np.exp(0.5 * rng.normal(size=groups.max() + 1)) + 0.5,
            float(np.exp(rng.normal()) + 0.2),
        )
        at = scale * dense + np.diag(factors[groups] * prior)
        if np.linalg.eigvalsh(at)[0] <= 0.0:
            with pytest.raises(CurvatureError):
                determinant(factors, scale)
            continue
        value, gamma = determinant(factors, scale)
        assert np.isclose(value, np.linalg.slogdet(at)[1], rtol=1e-10)
        inverse = np.linalg.inv(at)
        wanted = np.bincount(groups, 1.0 - factors[groups] * prior * np.diag(inverse))
        assert np.allclose(gamma, wanted, rtol=1e-10, atol=1e-10)
        assert np.isclose(gamma.sum(), np.trace(scale * dense @ inverse), atol=1e-9)


@pytest.mark.parametrize(("name", "grouping"), GROUPED)
def test_gamma_is_a_derivative(name, grouping, rng):
    """d value / d log tau_g = P_g - gamma_g and d value / d log scale = sum of gamma, by central differences."""
    curvature, prior, _, _ = made(name, rng)
    groups = CASES[name].groupings[grouping]
    sizes = np.bincount(groups)
    determinant = curvature.determinant(prior, groups)
    at = 0.3 * rng.normal(size=len(sizes)) + 0.5
    gamma = determinant(np.exp(at), 1.2)[1]
    step = 1e-4

    def slope(function):
        return (function(step) - function(-step)) / (2 * step)

    for group in range(len(sizes)):
        along = np.eye(len(sizes))[group]
        found = slope(lambda h, along=along: determinant(np.exp(at + h * along), 1.2)[0])
        # step^2 / 6 times a third derivative of at most a few per weight.
        assert np.isclose(found, sizes[group] - gamma[group], atol=1e-6)
    found = slope(lambda h: determinant(np.exp(at), 1.2 * np.exp(h))[0])
    assert np.isclose(found, gamma.sum(), atol=1e-6)


@each_case
def test_eigenvalues_are_those_relative_to_the_prior(name, rng):
    case = CASES[name]
    curvature, prior, a, _ = made(name, rng)
    grouping = "tensor" if name == "kronecker" else "global"
    found = curvature.determinant(prior, case.groupings[grouping]).eigenvalues
    assert found is not None
    wanted = scipy.linalg.eigh(a - np.diag(prior), np.diag(prior), eigvals_only=True)
    # Zeros of a dual are left out.
    found = np.sort(np.concatenate([found, np.zeros(SIZE - len(found))]))
    assert np.allclose(found, wanted, atol=1e-10 * np.abs(wanted).max(initial=1.0))


def test_eigenvalues_are_none_where_each_call_factorises(rng: np.random.Generator):
    for name in ("full", "wide", "tall"):
        curvature, prior, _, _ = made(name, rng)
        assert curvature.determinant(prior, np.arange(SIZE) % 2).eigenvalues is None


def test_groups_that_are_empty_have_no_parameters(rng: np.random.Generator):
    for name in CASES:
        curvature, prior, _, _ = made(name, rng)
        groups = CASES[name].groupings["tensor"]
        one = curvature.determinant(prior, groups)
        value, gamma = one(np.ones(5) * 1.5)
        assert gamma.shape == (5,)
        assert np.all(gamma[3:] == 0.0)
        assert np.isclose(value, one(np.ones(3) * 1.5)[0])


@pytest.mark.parametrize("name", ["full", "wide", "tall", "kronecker"])
def test_a_decomposition_serves_all_multiples_of_a_prior(name, rng, monkeypatch):
    """Nothing is decomposed again, and what comes out is what a fresh curvature gives."""
    case = CASES[name]
    curvature, _ = case.make(np.random.default_rng(8))
    prior, groups = case.prior(rng), np.zeros(SIZE, dtype=int)
    curvature.determinant(prior, groups)(np.ones(1))
    curvature.gaussian(prior)
    calls = []
    for module, where in ((precision, "_eigenvalues"), (covariance, "gram_of")):
        original = getattr(module, where)
        monkeypatch.setattr(
            module, where, lambda *given, _to=original, _name=where: (calls.append(_name), _to(*given))[1]
        )
    original_eigh = scipy.linalg.eigh
    monkeypatch.setattr(
        scipy.linalg, "eigh", lambda *a, **k: (calls.append("eigh"), original_eigh(*a, **k))[1]
    )
    served = (
        curvature.scaled(2.0).determinant(0.3 * prior, groups),
        curvature.scaled(2.0).gaussian(0.3 * prior),
    )
    assert calls == []
    fresh, _ = case.make(np.random.default_rng(8))
    fresh = fresh.scaled(2.0)
    wanted = fresh.determinant(0.3 * prior, groups), fresh.gaussian(0.3 * prior)
    assert calls
    for a, b in zip(served[0](np.array([1.4]), 0.7), wanted[0](np.array([1.4]), 0.7), strict=True):
        assert np.allclose(a, b, rtol=1e-12)
    close(served[1].covariance(), wanted[1].covariance())
    # Another prior is not served by what is known.
    other = prior * (1.0 + 0.5 * (case.groupings["tensor"] == 1))
    close(curvature.gaussian(other).precision(), curvature.matrix() + np.diag(other))
    found = curvature.determinant(other, groups)(np.ones(1))[0]
    assert np.isclose(found, np.linalg.slogdet(curvature.matrix() + np.diag(other))[1], rtol=1e-10)


# --- priors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "singular", "wide", "tall", "eigenpairs"])
def test_a_dense_prior_gives_a_dense_gaussian(name, rng):
    curvature, dense = CASES[name].make(rng)
    prior = gram(rng, SIZE) + np.eye(SIZE)
    gaussian = curvature.gaussian(prior)
    assert type(gaussian) is Full
    close(gaussian.precision(), dense + prior)


def test_a_dense_prior_is_refused_where_it_cannot_be_held(rng: np.random.Generator):
    curvature, _ = kronecker(rng)
    with pytest.raises(UnsupportedError, match="structure='full'"):
        curvature.gaussian(np.eye(SIZE))


def test_a_prior_without_precision_somewhere_needs_data_there(rng: np.random.Generator):
    factor = rng.normal(size=(5, SIZE))
    prior = np.ones(SIZE)
    prior[:3] = 0.0
    gaussian = FactorCurvature(factor).gaussian(prior)
    assert type(gaussian) is Full
    close(gaussian.precision(), factor.T @ factor + np.diag(prior))
    groups = np.zeros(SIZE, dtype=int)
    value, gamma = FactorCurvature(factor).determinant(prior, groups)(np.ones(1))
    assert np.isclose(value, -gaussian.log_determinant, rtol=1e-10)
    assert np.isclose(gamma[0], SIZE - prior @ gaussian.variances())
    prior[:6] = 0.0
    for curvature in (FactorCurvature(factor), FullCurvature(factor.T @ factor)):
        with pytest.raises(CurvatureError, match=r"improper prior .* 6 of 14 .* singular curvature"):
            curvature.gaussian(prior)
        with pytest.raises(CurvatureError, match="improper prior"):
            curvature.determinant(prior, groups)(np.ones(1))


def test_a_regular_curvature_needs_no_prior(rng: np.random.Generator):
    for name in ("full", "tall"):
        curvature, dense = CASES[name].make(rng)
        close(curvature.gaussian(np.zeros(SIZE)).precision(), dense)
    regular = KroneckerCurvature([KroneckerBlock("w", (2, 3), gram(rng, 2), gram(rng, 3), np.arange(6))])
    close(regular.gaussian(np.zeros(6)).precision(), regular.matrix())


def test_a_prior_that_curves_upwards_may_be_outweighed_by_data(rng: np.random.Generator):
    for name in ("full", "tall", "diagonal"):
        curvature, dense = CASES[name].make(rng)
        prior = np.full(SIZE, 1.0)
        prior[2] = -0.3 * np.linalg.eigvalsh(dense)[0]
        close(curvature.gaussian(prior).precision(), dense + np.diag(prior))
        found, gamma = curvature.determinant(prior, np.arange(SIZE))(np.ones(SIZE))
        assert np.isclose(found, np.linalg.slogdet(dense + np.diag(prior))[1], rtol=1e-10)
        assert gamma[2] > 1.0
    with pytest.raises(CurvatureError, match="repair='clip'"):
        FactorCurvature(rng.normal(size=(2, SIZE))).gaussian(np.full(SIZE, -0.1))


def test_kronecker_factors_need_one_precision_per_tensor(rng: np.random.Generator):
    curvature, _ = kronecker(rng)
    prior = np.ones(SIZE)
    prior[TENSORS[1]] = np.exp(rng.normal(size=4))
    close(curvature.gaussian(prior).precision(), curvature.matrix() + np.diag(prior))
    groups = np.zeros(SIZE, dtype=int)
    groups[TENSORS[1]] = np.arange(4)
    a = curvature.matrix() + np.diag(prior)
    value, gamma = curvature.determinant(prior, groups)(np.ones(4))
    assert np.isclose(value, np.linalg.slogdet(a)[1])
    close(gamma, np.bincount(groups, 1.0 - prior * np.diag(np.linalg.inv(a))))
    prior[TENSORS[0][0]] = 2.0
    for attempt in (lambda: curvature.gaussian(prior), lambda: curvature.determinant(prior, groups)):
        with pytest.raises(UnsupportedError, match=r"block 'a/weight'.*prior_approximation='kron' or 'mean'"):
            attempt()


def eigenvectors(rng, size):
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def weight_block(rng, shape=(3, 4)):
    return KroneckerBlock(
        "w", shape, gram(rng, shape[0]), gram(rng, shape[1]), np.arange(shape[0] * shape[1])
    )


TENSOR_PRIORS = {
    "differing": lambda rng: np.exp(rng.normal(size=12)),
    "dense": lambda rng: gram(rng, 12) + np.eye(12),
    "factors": lambda rng: Rotated(
        eigenvectors(rng, 3), eigenvectors(rng, 4), np.exp(1.5 * rng.normal(size=(3, 4)))
    ),
}


def dense_prior(prior):
    if isinstance(prior, Rotated):
        return prior.precision()
    return np.diag(prior) if prior.ndim == 1 else prior


def divergence(approximate, exact):
    """KL(N(0, B^-1) || N(0, A^-1)) of precisions B and A, by its formula."""
    ratio = np.linalg.solve(approximate, exact)
    return 0.5 * (np.trace(ratio) - len(exact) - np.linalg.slogdet(ratio)[1])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", TENSOR_PRIORS)
def test_the_nearest_kronecker_form_is_nearer_than_an_average(name, seed):
    """It has the diagonal of A in its basis, which nothing else over that basis beats, nor an averaged prior."""
    rng = np.random.default_rng(seed)
    block, prior = weight_block(rng), TENSOR_PRIORS[name](rng)
    curvature, a = KroneckerCurvature([block], multiplier=1.3, nearest=True), dense_prior(prior)
    exact = 1.3 * block.matrix() + a
    gaussian = curvature.gaussian({"w": prior})
    (part,) = gaussian.parts
    basis = np.kron(part.gaussian.left, part.gaussian.right)
    close(basis.T @ basis, np.eye(12))
    close(part.gaussian.values.reshape(-1), np.diag(basis.T @ exact @ basis))
    close(prior_in(prior, part.gaussian.left, part.gaussian.right).reshape(-1), np.diag(basis.T @ a @ basis))
    share = prior_share(gaussian, {"w": prior})
    assert np.isclose(share, np.trace(np.linalg.solve(gaussian.precision(), a)), rtol=1e-10)
    ours = divergence(gaussian.precision(), exact)
    assert np.isclose(
        ours, 0.5 * (np.log(part.gaussian.values).sum() - np.linalg.slogdet(exact)[1]), rtol=1e-8
    )
    averaged = divergence(1.3 * block.matrix() + np.diag(a).mean() * np.eye(12), exact)
    diagonal_alone = divergence(np.diag(np.diag(exact)), exact)
    assert ours < 0.9 * averaged
    assert name != "differing" or ours <= diagonal_alone + 1e-12
    for _ in range(20):
        other = (basis * (part.gaussian.values.reshape(-1) * np.exp(0.3 * rng.normal(size=12)))) @ basis.T
        assert divergence(other, exact) > ours
    # The blocks of a matrix over all entries are those of its tensors.
    if name != "factors":
        close(curvature.gaussian(prior).precision(), gaussian.precision())


def test_the_nearest_kronecker_form_is_exact_where_eigenvectors_are_shared(rng: np.random.Generator):
    left, right = eigenvectors(rng, 3), eigenvectors(rng, 4)
    data = np.exp(rng.normal(size=3)), np.exp(rng.normal(size=4))
    block = KroneckerBlock("w", (3, 4), (left * data[0]) @ left.T, (right * data[1]) @ right.T, np.arange(12))
    curvature = KroneckerCurvature([block], nearest=True)
    same = Rotated(left, right, np.exp(rng.normal(size=(3, 4))))
    even = KroneckerBlock("w", (3, 4), np.diag(data[0]), np.diag(data[1]), np.arange(12))
    diagonal = np.exp(rng.normal(size=12))
    close(curvature.gaussian({"w": same}).precision(), block.matrix() + same.precision())
    close(
        KroneckerCurvature([even], nearest=True).gaussian(diagonal).precision(),
        even.matrix() + np.diag(diagonal),
    )
    # One precision for the tensor is what it is without asking for the nearest, to the bit.
    one = np.full(12, 0.7)
    kept, asked = (KroneckerCurvature([block], nearest=near).gaussian(one) for near in (False, True))
    assert np.array_equal(kept.parts[0].gaussian.values, asked.parts[0].gaussian.values)
    assert np.array_equal(kept.parts[0].gaussian.left, asked.parts[0].gaussian.left)


def test_the_determinant_of_the_nearest_form_is_that_of_its_gaussians(rng: np.random.Generator):
    """For all factors on prior and data, with the basis of the first prior; an upper bound of the exact one."""
    block, prior = weight_block(rng), np.exp(rng.normal(size=12))
    curvature = KroneckerCurvature([block], nearest=True)
    determinant = curvature.determinant(prior, np.zeros(12, dtype=int))
    for factor, scale in ((1.0, 1.0), (0.01, 1.0), (30.0, 0.2)):
        value, gamma = determinant(np.array([factor]), scale)
        gaussian = curvature.scaled(scale).gaussian(factor * prior)
        assert np.isclose(value, -gaussian.log_determinant, rtol=1e-12)
        assert value >= np.linalg.slogdet(scale * block.matrix() + factor * np.diag(prior))[1]
        assert np.isclose(gamma[0], 12 - prior_share(gaussian, {"w": factor * prior}), rtol=1e-10)
        up, down = (determinant(np.array([factor * np.exp(step)]), scale)[0] for step in (1e-5, -1e-5))
        assert np.isclose(12 - gamma[0], (up - down) / 2e-5, rtol=1e-6)


def test_a_prior_that_kronecker_factors_cannot_hold_is_refused_with_the_ways_out(rng: np.random.Generator):
    block = weight_block(rng)
    refusing = KroneckerCurvature([block])
    for make in TENSOR_PRIORS.values():
        with pytest.raises(UnsupportedError, match="prior_approximation='kron'"):
            refusing.gaussian({"w": make(rng)})
    # A dense block holds any prior of its tensor.
    bias, prior = gram(rng, 4), gram(rng, 4) + np.eye(4)
    dense = KroneckerCurvature([DenseBlock(bias, "b", np.arange(4))]).gaussian({"b": prior})
    close(dense.precision(), bias + prior)
    assert np.isclose(prior_share(dense, {"b": prior}), np.trace(np.linalg.solve(bias + prior, prior)))


# --- one linear map, without its Jacobian ---------------------------------------------------------


@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("held", [1, 2**24])
def test_projection_of_a_linear_map_needs_no_jacobian(places, held, rng, monkeypatch):
    monkeypatch.setattr(linear_algebra, "MOST_FLOATS", held)
    curvature, _ = kronecker(rng)
    weight, bias, other = TENSORS
    inputs, gradients = rng.normal(size=(5, places, 3)), rng.normal(size=(5, 4, places, 2))
    rest = rng.normal(size=(5, 4, 4))
    jacobian = np.zeros((5, 4, SIZE))
    jacobian[:, :, weight] = np.einsum("nti,ndto->ndio", inputs, gradients).reshape(5, 4, 6)
    jacobian[:, :, bias] = rest
    kron = curvature.gaussian(np.ones(SIZE))
    found = kron.part(weight).project_linear(inputs, gradients) + kron.part(bias).project(rest)
    close(found, kron.project(jacobian))
    diag = DiagonalCurvature(rng.gamma(1.0, size=SIZE)).gaussian(np.ones(SIZE))
    close(
        diag.part(weight).project_linear(inputs, gradients) + diag.part(bias).project(rest),
        diag.project(jacobian),
    )
    # A weight that is kept dense, and one with a single input.
    dense = KroneckerCurvature([DenseBlock(gram(rng, 6), "w", np.arange(6))]).gaussian(np.ones(6))
    close(dense.part(np.arange(6)).project_linear(inputs, gradients), dense.project(jacobian[:, :, weight]))
    single = rng.normal(size=(5, places, 1)), rng.normal(size=(5, 4, places, 4))
    jacobian[:] = 0.0
    jacobian[:, :, other] = np.einsum("nti,ndto->ndio", *single).reshape(5, 4, 4)
    close(kron.part(other).project_linear(*single), kron.project(jacobian))


def test_projection_of_a_linear_map_with_many_places_holds_a_few_rows_at_a_time(
    rng: np.random.Generator, monkeypatch
):
    rows, outputs, inputs, width = 100, 5, 40, 40
    monkeypatch.setattr(linear_algebra, "MOST_FLOATS", outputs * inputs * width)
    gaussian = Diagonal(np.ones(inputs * width))
    a, g = rng.normal(size=(rows, 2, inputs)), rng.normal(size=(rows, outputs, 2, width))
    tracemalloc.start()
    try:
        gaussian.project_linear(a, g)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.1 * 8 * rows * outputs * inputs * width


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_last_layer_of_two_million_weights(structure, rng):
    """2048 features x 1000 classes and a bias: P = 2,049,000, where one (P, P) matrix would take 30 TiB."""
    inputs, classes = 2048, 1000
    size = (inputs + 1) * classes
    features, scores = rng.normal(size=(3000, inputs)), rng.normal(size=(1500, classes))
    places = np.split(np.arange(size), [inputs * classes])
    groups = np.repeat([0, 1], [inputs * classes, classes])
    tracemalloc.start()
    try:
        if structure == "kron":
            right = scores.T @ scores
            curvature = KroneckerCurvature(
                [
                    KroneckerBlock("w", (inputs, classes), features.T @ features / 3000, right, places[0]),
                    DenseBlock(right, "b", places[1]),
                ]
            )
        else:
            curvature = DiagonalCurvature(rng.gamma(1.0, size=size))
        determinant = curvature.determinant(np.ones(size), groups)
        value, gamma = determinant(np.array([2.0, 3.0]), 0.5)
        prior = np.array([2.0, 3.0])[groups]
        gaussian = curvature.scaled(0.5).gaussian(prior)
        draws = gaussian.sample(4, rng)
        log_prob = gaussian.log_prob(draws)
        variances = gaussian.variances()
        a, g = rng.normal(size=(2, 1, inputs)), rng.normal(size=(2, 5, 1, classes))
        projected = gaussian.part(places[0]).project_linear(a, g) + gaussian.part(places[1]).project(
            g[:, :, 0]
        )
        again = type(gaussian).from_arrays(gaussian.arrays())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**31
    assert np.isclose(value, -gaussian.log_determinant, rtol=1e-12)
    assert np.allclose(gamma, np.bincount(groups, 1.0 - prior * variances), rtol=1e-9)
    # A quadratic form of a draw is chi-square with P degrees of freedom.
    quadratic = -2.0 * log_prob - size * np.log(2.0 * np.pi) - gaussian.log_determinant
    assert np.all(np.abs(quadratic - size) < 5 * np.sqrt(2.0 * size))
    jacobian = np.concatenate([(a[0, 0][None, :, None] * g[0, :, 0][:, None]).reshape(5, -1), g[0, :, 0]], 1)
    assert np.allclose(projected[0], gaussian.project(jacobian[None])[0], rtol=1e-9)
    assert np.array_equal(again.log_prob(draws), log_prob)


# --- errors by name -------------------------------------------------------------------------------


def test_full_gaussian_against_scipy(rng: np.random.Generator):
    root = rng.normal(size=(5, 5))
    matrix = root @ root.T + np.eye(5)
    gaussian = Full.of(matrix)
    inverse = np.linalg.inv(matrix)
    assert np.allclose(gaussian.covariance(), inverse)
    points = rng.normal(size=(4, 5))
    assert np.allclose(gaussian.log_prob(points), multivariate_normal(np.zeros(5), inverse).logpdf(points))


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (np.diag([1.0, -0.1]), "positive definite"),
        (np.diag([1.0, 0.0]), "positive definite"),
        (np.diag([1.0, np.nan]), "finite"),
        (np.diag([1.0, 1e-16]), "well conditioned"),
    ],
)
def test_no_gaussian_without_spread_or_shape(matrix, words):
    with pytest.raises(CurvatureError, match=words):
        Full.of(matrix)
    with pytest.raises(CurvatureError, match=words):
        FullCurvature(matrix - 0.5 * np.eye(2)).gaussian(np.full(2, 0.5))
    with pytest.raises(CurvatureError, match=words):
        FullCurvature(matrix - 0.5 * np.eye(2)).gaussian(0.5 * np.eye(2))


@pytest.mark.parametrize("rank", [2, 7, 30])
def test_singular_matrices_are_never_taken_for_regular_ones(rank):
    """Rank one too few, so that half of them have a Cholesky factor by rounding, with pivots that look harmless."""
    refused = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        factor = rng.normal(size=(rank, rank + 4)) * np.exp(2.0 * rng.normal(size=rank + 4))
        prior = np.append(np.zeros(rank + 1), np.ones(3))
        with pytest.raises(CurvatureError, match="improper prior") as caught:
            FactorCurvature(factor).gaussian(prior)
        refused.append(str(caught.value.__cause__).split(";")[0])
        # One more row of data makes it regular.
        regular = np.concatenate([factor, rng.normal(size=(1, rank + 4))])
        assert FactorCurvature(regular).gaussian(prior).size == rank + 4
    assert len(set(refused)) == 2


def block(left, right, name="w"):
    shape = (len(left), len(right))
    return KroneckerBlock(name, shape, left, right, np.arange(shape[0] * shape[1]))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Diagonal(np.array([1.0, 0.0])), CurvatureError, "1 of 2 that are not positive"),
        (lambda: Diagonal(np.array([1.0, np.inf])), CurvatureError, "finite"),
        (lambda: DiagonalCurvature(np.zeros(2)).gaussian(np.zeros(2)), CurvatureError, "proper prior"),
        (lambda: DiagonalCurvature(np.array([-2.0])).gaussian(np.ones(1)), CurvatureError, "repair='clip'"),
        (
            lambda: LowRankPrecision.of(np.array([1.0, -1.0]), np.ones((1, 2))),
            CurvatureError,
            "positive precision",
        ),
        (lambda: LowRankPrecision.of(np.ones(2), np.array([[1.0, np.nan]])), CurvatureError, "finite"),
        (lambda: LowRankPrecision.of(np.ones(2), np.array([[1e8, 0.0]])), CurvatureError, "well conditioned"),
        (lambda: FactorCurvature(np.array([[1e8, 1.0]])).gaussian(np.ones(2)), CurvatureError, "well condit"),
        (lambda: FullCurvature(np.eye(2)).gaussian(np.array([1.0, np.nan])), CurvatureError, "finite"),
        (lambda: block(np.diag([1.0, np.nan]), np.eye(1)).eigenvalues, CurvatureError, "finite"),
        (
            lambda: KroneckerCurvature([block(np.diag([1.0, 0.0]), np.eye(2))]).gaussian(np.zeros(4)),
            CurvatureError,
            "block 'w': .*improper prior .* singular curvature",
        ),
        (
            lambda: KroneckerCurvature([block(np.diag([1e10, 0.0]), np.eye(2))]).gaussian(np.full(4, 1e-6)),
            CurvatureError,
            "block 'w': .*well conditioned",
        ),
        (
            lambda: KroneckerCurvature([DenseBlock(np.zeros((2, 2)), "b", np.arange(2))]).gaussian(
                np.zeros(2)
            ),
            CurvatureError,
            "block 'b': .*improper prior",
        ),
    ],
)
def test_errors_say_what_is_wrong(make, error, words):
    with pytest.raises(error, match=words):
        make()
