"""Lanczos against dense decompositions: eigenpairs, what they leave out, and the number of products with vectors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ppl_bnn.inference.curvature import lanczos
from ppl_bnn.inference.curvature.lanczos import largest, pairs_and_rest, spectral_quadrature
from ppl_bnn.inference.curvature.structures import Quadrature


class Counted:
    """A symmetric matrix with these eigenvalues, by its products."""

    def __init__(self, values, dtype="float64", seed=0):
        self.values = np.sort(values)[::-1]
        basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values), len(values))))[0]
        self.matrix = ((basis * self.values) @ basis.T).astype(dtype)
        self.products, self.dtype = 0, dtype

    def __call__(self, rows):
        assert rows.dtype == self.dtype
        self.products += len(rows)
        return rows @ self.matrix

    def pairs(self, rank, probes=8, seed=1):
        rng = np.random.default_rng(seed)
        return pairs_and_rest(self, len(self.matrix), rank, probes, rng, self.dtype)


SPECTRA = {
    "decaying": 1e4 / np.arange(1.0, 401.0) ** 2,
    "exponential": 10.0 ** np.linspace(5.0, -5.0, 60),
    "equal in tens": np.r_[np.repeat([9.0, 5.0, 2.0], 10), np.zeros(20)],
    "of rank three": np.r_[5.0, 3.0, 1e-3, np.zeros(27)],
    "three": np.array([3.0, 2.0, 1.0]),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_pairs_are_those_of_the_dense_matrix(name, dtype):
    # All of 60 eigenvalues and fewer, a part of 400.
    for rank in (1, 3, 12, 60):
        operator = Counted(SPECTRA[name], dtype)
        rank = min(rank, len(operator.values))
        found, _ = operator.pairs(rank)
        count = len(found.values)
        # Fewer where fewer are not zero; in single precision the smallest are rounding.
        smallest = 1e-13 if dtype == "float64" else 2e-5
        assert np.count_nonzero(operator.values[:rank] > smallest * operator.values[0]) <= count <= rank
        tolerance = (1e-11 if dtype == "float64" else 1e-5) * operator.values[0]
        np.testing.assert_allclose(found.values, operator.values[:count], atol=tolerance)
        assert found.converged
        assert found.vectors.dtype == dtype
        close = 1e-12 if dtype == "float64" else 1e-5
        np.testing.assert_allclose(found.vectors @ found.vectors.T, np.eye(count), atol=close)
        # The residuals are what they say.
        moved = found.vectors @ operator.matrix - found.values[:, None] * found.vectors
        np.testing.assert_allclose(np.linalg.norm(moved, axis=1), found.residuals, atol=tolerance)


def test_products_are_few_and_a_sketch_of_as_many_is_worse():
    operator = Counted(SPECTRA["decaying"])
    found = largest(operator, 400, 10, np.random.default_rng(0))
    assert operator.products <= 60
    # Subspace iteration with as many products: 15 vectors, and what is left in powers.
    rows = np.linalg.qr(np.random.default_rng(0).standard_normal((400, 15)))[0]
    for _ in range(operator.products // 15):
        rows = np.linalg.qr(operator.matrix @ rows)[0]
    sketched = np.linalg.eigvalsh(rows.T @ operator.matrix @ rows)[::-1][:10]
    ours, theirs = (np.abs(values - operator.values[:10]).max() for values in (found.values, sketched))
    assert ours < 1e-3 * theirs


def test_a_search_that_is_cut_off_says_so(monkeypatch):
    monkeypatch.setattr(lanczos, "MOST_PRODUCTS", (8, 0))
    operator = Counted(np.linspace(1.0, 2.0, 200))
    found, _ = operator.pairs(5)
    assert not found.converged
    moved = found.vectors @ operator.matrix - found.values[:, None] * found.vectors
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), found.residuals, rtol=1e-8)
    assert found.residuals.max() > 1e-3


def test_what_a_block_misses_is_found_by_the_quadrature():
    """Ten times the same eigenvalue, and four vectors in a block."""
    operator = Counted(SPECTRA["equal in tens"])
    alone = largest(operator, 50, 5, np.random.default_rng(1))
    assert alone.values[-1] < 8.9
    found, _ = operator.pairs(5)
    np.testing.assert_allclose(found.values, 9.0, rtol=1e-10)


@pytest.mark.parametrize("rank", [2, 10])
def test_the_rest_of_the_spectrum_is_estimated_without_bias(rank):
    """The mean over 40 seeds within 5 standard errors, which Student's t with 39 degrees passes once in 80 000."""
    operator = Counted(50.0 / np.arange(1.0, 101.0))
    left = operator.values[rank:]
    sums = {"log det": np.log1p, "trace": lambda t: t, "parameters": lambda t: t / (1.0 + t)}
    found = {name: [] for name in sums}
    for seed in range(40):
        _, rest = operator.pairs(rank, seed=seed)
        for name, function in sums.items():
            found[name].append(rest.sum(function))
    for name, function in sums.items():
        values, errors = np.transpose(found[name])
        wanted = function(left).sum()
        assert abs(values.mean() - wanted) < 5.0 * values.std(ddof=1) / np.sqrt(40) + 1e-3 * wanted, name
        # The standard errors are those of the estimates: their mean square has about 280 degrees of freedom.
        ratio = np.mean(errors**2) / values.var(ddof=1)
        low, high = stats.f.ppf([1e-4, 1.0 - 1e-4], 280, 39)
        assert low < ratio < high, name


@pytest.mark.parametrize("name", ["of rank three", "equal in tens", "three"])
def test_nothing_is_left_beyond_the_whole_rank(name):
    operator = Counted(SPECTRA[name])
    _, rest = operator.pairs(np.count_nonzero(operator.values))
    assert abs(rest.sum(np.log1p)[0]) < 1e-11
    assert rest.sum(np.log1p)[1] < 1e-11


def test_a_zero_matrix_has_no_pairs():
    operator = Counted(np.zeros(40))
    found, rest = operator.pairs(3)
    assert len(found.values) == 0
    assert found.converged
    assert rest.sum(np.log1p) == (0.0, 0.0)
    assert operator.products <= 12


def test_a_spectrum_that_is_known_has_no_error():
    rest = Quadrature.exact(np.array([2.0, 1.0, -1e-17]))
    assert rest.sum(np.log1p) == (pytest.approx(np.log(6.0)), 0.0)


def test_more_probes_have_smaller_errors():
    operator = Counted(50.0 / np.arange(1.0, 101.0))
    none = np.zeros((0, 100))
    few, many = (
        spectral_quadrature(operator, none, count, np.random.default_rng(0), np.log1p).sum(np.log1p)[1]
        for count in (16, 256)
    )
    assert 0.15 < many / few < 0.4
