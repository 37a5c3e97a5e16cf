"""Eigenpairs and spectral sums of a symmetric matrix that is known by its products with vectors.

`largest` is block Lanczos with thick restarts and full reorthogonalisation (Wu and Simon 2000; Musco and Musco 2015). A
randomised sketch with power iterations makes the same products and keeps the last ones alone; the Krylov space has all
of them, so that no other method has smaller errors for a number of products. A block finds eigenvalues that are several
times the same, and shares what products with one vector repeat.

`spectral_quadrature` is stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017) of what these eigenpairs leave out:
for random z and A' = (I - V'V) A (I - V'V), z' f(A') z = sum_k w_k f(t_k) with nodes t_k and weights w_k of a Lanczos
matrix, and its mean is tr f(A') for every f with f(0) = 0. With all eigenpairs taken out, A' and the sums are zero.
NumPy and SciPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

from ppl_bnn.core.arrays import chunks
from ppl_bnn.inference.curvature.structures import Quadrature

# (K, P) -> (K, P), of K vectors as rows, in the floating type of its argument.
Product = Callable[[np.ndarray], np.ndarray]
# Vectors of one product, if memory allows.
BLOCK = 4
# Residual |A v - a v| of an eigenpair (a, v): relative to a, and to the largest eigenvalue in units of rounding.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
ROUNDING = 100.0
# Products after which eigenpairs are given up: so many, and so many more for each pair.
MOST_PRODUCTS = (200, 40)
# Blocks by which eigenpairs that are known already are extended at least.
FEWEST_BLOCKS = 4
# How much larger than the last pair an eigenvalue must be to count as missed.
MISSED = 0.01
# The most steps of a quadrature. It has settled if a step moves it less than this, in standard errors, or in nats.
STEPS = 100
SETTLED = 0.02
UNSEEN = {"float64": 1e-10, "float32": 1e-3}


@dataclass(frozen=True)
class Eigenpairs:
    """The largest eigenvalues (R,), largest first, eigenvectors as rows (R, P), and residuals |A v - a v| (R,)."""

    values: np.ndarray
    vectors: np.ndarray
    residuals: np.ndarray
    converged: bool


def largest(
    product: Product,
    size: int,
    rank: int,
    rng: np.random.Generator,
    dtype: str = "float64",
    known: Eigenpairs | None = None,
) -> Eigenpairs:
    """The `rank` largest eigenpairs of a matrix (size, size), fewer if it has fewer that are not zero.

    About 2 `rank` vectors are held. Without convergence the pairs are those of the Rayleigh-Ritz method, with their
    residuals. Pairs `known` are where the search goes on, in other directions.
    """
    block = min(BLOCK, size)
    width = min(size, max(2 * rank, rank + 5 * block) + block)
    basis, small = np.empty((width, size), dtype), np.zeros((width, width))
    eps, relative = ROUNDING * float(np.finfo(dtype).eps), TOLERANCE[dtype]
    used, blocks, highest = 0, 0, 0.0
    if known is not None:
        used, highest = len(known.values), float(known.values[0])
        basis[:used] = known.vectors
        small[:used, :used] = np.diag(known.values)
    new, fresh = _random(basis[:used], rng, min(block, size - used)), True
    while True:
        count = len(new)
        if used + count > width:
            # Restart from the best vectors of this space: the next products couple them to `new`.
            keep = min(rank + block, width - block)
            values, vectors = np.linalg.eigh(small[:used, :used])
            _combine(basis, vectors[:, : -keep - 1 : -1].T)
            small[:keep, :keep], used = np.diag(values[: -keep - 1 : -1]), keep
        basis[used : used + count] = new
        used += count
        image = product(new)
        blocks += 1
        size_of_image = float(np.linalg.norm(image, axis=1).max())
        rows = _project_out(image, basis[:used])
        small[used - count : used, :used] = rows
        small[:used, used - count : used] = rows.T
        corner = small[used - count : used, used - count : used]
        corner[:] = 0.5 * (corner + corner.T)
        values, vectors = np.linalg.eigh(small[:used, :used])
        highest = max(highest, float(np.abs(values).max()))
        # A random vector that the matrix does not move: it is zero beyond the space so far.
        exhausted = fresh and (used == size or size_of_image <= eps * highest)
        new, root = _orthonormal(image, basis[:used], eps * highest)
        if fresh := not len(new) and not exhausted:
            new = _random(basis[:used], rng, min(block, size - used))
        best = slice(-1, -min(rank, used) - 1, -1)
        residuals = np.linalg.norm(vectors[-count:, best].T @ root, axis=1)
        accepted = np.maximum(relative * np.abs(values[best]), eps * highest)
        settled = used >= rank and not fresh and (known is None or blocks >= FEWEST_BLOCKS)
        converged = exhausted or used == size or (settled and bool(np.all(residuals <= accepted)))
        if converged or blocks * block >= MOST_PRODUCTS[0] + MOST_PRODUCTS[1] * rank:
            break
    _combine(basis, vectors[:, best].T)
    # Eigenvalues below this are rounding.
    some = values[best] > eps * highest if dtype == "float32" else values[best] > 1e-14 * highest
    return Eigenpairs(values[best][some], basis[: len(some)][some], residuals[some], converged)


def spectral_quadrature(
    product: Product,
    vectors: np.ndarray,
    count: int,
    rng: np.random.Generator,
    function: Callable[..., np.ndarray],
) -> Quadrature:
    """The spectrum of a positive semidefinite matrix without its eigenvectors (R, P), by `count` random signs.

    `function` decides how many steps there are: until its sum settles.
    """
    size, dtype = vectors.shape[1], vectors.dtype
    old, now = np.zeros((2, count, size), dtype)
    now[:] = rng.choice(np.array([-1.0, 1.0], dtype), (count, size))
    _project_out(now, vectors)
    length = np.linalg.norm(now, axis=1)
    # Nothing is left where the eigenvectors span everything.
    length[length <= ROUNDING * np.finfo(dtype).eps * np.sqrt(size)] = 0.0
    now /= np.where(length > 0.0, length, 1.0)[:, None]
    diagonal, beside = np.zeros((2, count, 0))
    found, before = Quadrature(diagonal, diagonal), np.inf
    for _ in range(STEPS):
        image = product(now)
        _project_out(image, vectors)
        step = np.einsum("kp,kp->k", now, image)
        diagonal = np.column_stack([diagonal, step])
        found = _gauss(diagonal, beside, length)
        total, error = found.sum(function)
        if abs(total - before) <= SETTLED * error + UNSEEN[str(dtype)]:
            break
        before = total
        image -= step[:, None].astype(dtype) * now
        if beside.shape[1]:
            image -= beside[:, -1:].astype(dtype) * old
        norm = np.linalg.norm(image, axis=1)
        # Exhausted directions go on as zeros, whose weights are zero.
        norm[norm <= np.finfo(dtype).eps * np.abs(diagonal).max()] = 0.0
        beside = np.column_stack([beside, norm])
        old, now = now, image / np.where(norm > 0.0, norm, np.inf)[:, None].astype(dtype)
        if not norm.any():
            break
    return found


def _gauss(diagonal: np.ndarray, beside: np.ndarray, length: np.ndarray) -> Quadrature:
    """Nodes and weights of tridiagonal matrices, for the squared lengths of their first vectors."""
    matrices = np.zeros((*diagonal.shape, diagonal.shape[1]))
    index = np.arange(diagonal.shape[1])
    matrices[:, index, index] = diagonal
    matrices[:, index[1:], index[:-1]] = beside
    nodes, vectors = np.linalg.eigh(matrices)
    # A node below zero is rounding: the matrix has no negative eigenvalues.
    return Quadrature(np.maximum(nodes, 0.0), length[:, None] ** 2 * vectors[:, 0] ** 2)


def _random(basis: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
    """`count` random orthonormal rows that are orthogonal to a basis."""
    rows = rng.standard_normal((count, basis.shape[1])).astype(basis.dtype)
    return _orthonormal(rows, basis, 0.0)[0]


def _project_out(rows: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Remove the components along orthonormal rows, in place, and return them, (K, R). Twice is enough."""
    total = np.zeros((len(rows), len(basis)))
    for _ in range(2):
        along = rows @ basis.T
        total += along
        for start, stop in chunks(rows.shape[1], 2**20):
            rows[:, start:stop] -= along @ basis[:, start:stop]
    return total


def _orthonormal(rows: np.ndarray, basis: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """Orthonormal rows Q, orthogonal to a basis, and root, with rows = root Q but for parts below `floor`."""
    directions, triangle, _ = scipy.linalg.qr(rows.T, mode="economic", pivoting=True, check_finite=False)
    kept = np.abs(np.diag(triangle)) > floor
    new = np.ascontiguousarray(directions[:, kept].T)
    # What is left of a row after a subtraction is enlarged with its rounding error, along the basis too.
    _project_out(new, basis)
    new = np.ascontiguousarray(scipy.linalg.qr(new.T, mode="economic", check_finite=False)[0].T)
    return new, (rows @ new.T).astype(float)


def _combine(basis: np.ndarray, weights: np.ndarray) -> None:
    """Replace the first rows of a basis by combinations of its first rows, in place."""
    count, used = weights.shape
    weights = weights.astype(basis.dtype)
    for start, stop in chunks(basis.shape[1], 2**20):
        basis[:count, start:stop] = weights @ basis[:used, start:stop]


def pairs_and_rest(
    product: Product, size: int, rank: int, probes: int, rng: np.random.Generator, dtype: str = "float64"
) -> tuple[Eigenpairs, Quadrature]:
    """The largest eigenpairs of a positive semidefinite matrix, and the rest of its spectrum for sums of log(1 + t).

    The vectors of the quadrature have parts along all that the search has missed, such as an eigenvalue that is more
    often the same than a block is wide. The search goes on as long as they find one that is larger than the last pair.
    """
    pairs: Eigenpairs | None = None
    while True:
        pairs = largest(product, size, rank, rng, dtype, pairs)
        rest = spectral_quadrature(product, pairs.vectors, probes, rng, np.log1p)
        missed = rest.nodes.max(initial=0.0) > (1.0 + MISSED) * pairs.values.min(initial=np.inf)
        if not missed or not pairs.converged:
            return pairs, rest
