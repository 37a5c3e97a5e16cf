"""The curvature of the data by Kronecker factors, one block for each tensor, and its combination with a prior.

K-FAC (Martens and Grosse 2015) gives a weight (I, O) the curvature L (x) R. With one prior precision delta for the
tensor the sum A = L (x) R + delta I keeps its eigenvectors, and everything is exact (Ritter et al. 2018). Any other
prior (precisions that differ within a tensor, Kronecker factors of an earlier posterior) is refused or, with `nearest`,
A is replaced by

    B = U diag(b) U',   U = Q_l (x) Q_r,   b_i = (U' A U)_ii,

Q_l and Q_r orthogonal. For a given basis U this b minimises KL(N(0, B^-1) || N(0, A^-1)), whose value is
(sum_i log b_i - log det A) / 2. The best basis is chosen among the eigenvectors of the data's factors, of the prior,
and of the partial traces of A, each on either side. Separate eigenvalues in a Kronecker basis are those of George et
al. (2018). The curvature between tensors is ignored, which again minimises that divergence. NumPy and SciPy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any, TypeGuard

import numpy as np
import scipy

from ppl_bnn.core.errors import CurvatureError, UnsupportedError
from ppl_bnn.inference.curvature import linear_algebra, structures
from ppl_bnn.inference.curvature.gaussians import (
    FlatGaussian,
    Full,
    Kronecker,
    LowRankPrecision,
    Part,
    Rotated,
)
from ppl_bnn.inference.curvature.structures import DataCurvature, FullCurvature, LogDeterminant, Term

# The prior of one tensor of p entries: precisions (p,), a matrix (p, p), or a matrix by its Kronecker eigenvectors.
TensorPrior = np.ndarray | Rotated


@dataclass(frozen=True)
class KroneckerBlock:
    """The curvature left (x) right of a weight of shape (I, O), ravelled row by row: index i O + o.

    `left` (I, I) and `right` (O, O) have no negative eigenvalues; `positions` (I O,) are in the flat vector.
    """

    name: str
    shape: tuple[int, int]
    left: np.ndarray
    right: np.ndarray
    positions: np.ndarray
    _known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def matrix(self) -> np.ndarray:
        """left (x) right, (I O, I O), dense."""
        return np.kron(self.left, self.right)

    @property
    def rotations(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvectors of left and of right, as columns."""
        return self._decomposed[1], self._decomposed[3]

    @cached_property
    def eigenvalues(self) -> np.ndarray:
        """The eigenvalues of left (x) right, (I, O)."""
        return np.outer(self._decomposed[0], self._decomposed[2])

    @cached_property
    def _decomposed(self) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for matrix in (self.left, self.right):
            linear_algebra.check_finite("a finite curvature", matrix)
            values, vectors = scipy.linalg.eigh(matrix, driver="evd", check_finite=False)
            # Negative values are within the error of the decomposition of a sum of outer products.
            found += [np.maximum(values, 0.0), vectors]
        return found

    def diagonal_in(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The diagonal of U' (L (x) R) U with U = left (x) right, (I, O)."""
        if left is self.rotations[0] and right is self.rotations[1]:
            return self.eigenvalues
        return np.outer(np.sum(left * (self.left @ left), 0), np.sum(right * (self.right @ right), 0))


@dataclass(frozen=True)
class DenseBlock(FullCurvature):
    """The curvature of a small tensor, a bias or a noise scale: a matrix (p, p) at `positions` (p,)."""

    name: str
    positions: np.ndarray


@dataclass(frozen=True)
class KroneckerCurvature(DataCurvature):
    """H = multiplier * a block-diagonal matrix with one block per tensor, each decomposed once.

    A prior is (P,), (P, P), or a dict, block -> prior of its tensor. One that Kronecker factors cannot represent is
    refused or, with `nearest`, replaced (see the module). The basis of a block is chosen for its first prior, and kept
    for all multiples of that, so that the Gaussian and the log-determinant are of the same matrix.
    """

    blocks: Sequence[KroneckerBlock | DenseBlock]
    nearest: bool = False

    def matrix(self) -> np.ndarray:
        size = sum(len(block.positions) for block in self.blocks)
        total = np.zeros((size, size))
        for block in self.blocks:
            total[np.ix_(block.positions, block.positions)] = self.multiplier * block.matrix()
        return total

    def gaussian(self, prior: np.ndarray | Mapping[str, TensorPrior]) -> Kronecker:
        """See `DataCurvature.gaussian`. A dense block takes any prior of its tensor."""
        if not isinstance(prior, Mapping):
            if not self.nearest:
                check_independent(prior)
            spans = {block.name: linear_algebra.span(block.positions) for block in self.blocks}
            prior = {name: prior[at] if prior.ndim == 1 else prior[at][:, at] for name, at in spans.items()}
        return Kronecker(tuple(self._part(block, prior[block.name]) for block in self.blocks))

    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """The log-determinant as a function of factors and scale; a `KroneckerBlock` is in one group.

        Eigenvalues serve each block that is within one group, a Cholesky factor at each call other dense blocks. With
        `nearest` the data's curvature, too, is reduced to its diagonal in the basis of the block: an upper bound
        (Hadamard), so the evidence is a lower bound.
        """
        terms: list[Term] = []
        for block in self.blocks:
            where = linear_algebra.span(block.positions)
            if isinstance(block, DenseBlock):
                terms += block.scaled(self.multiplier).determinant(prior[where], groups[where]).terms
            else:
                _, data, added = self._aligned(block, prior[where])
                terms.append(structures.Spectrum(data, added, int(groups[where][0])))
        return LogDeterminant(tuple(terms))

    def _part(self, block: KroneckerBlock | DenseBlock, prior: TensorPrior) -> Part:
        try:
            return Part(block.name, block.positions, self._gaussian_of(block, prior))
        except CurvatureError as error:
            raise CurvatureError(f"block {block.name!r}: {error}") from error

    def _gaussian_of(self, block: KroneckerBlock | DenseBlock, prior: TensorPrior) -> Full | Rotated:
        if isinstance(block, DenseBlock):
            dense = prior.precision() if isinstance(prior, Rotated) else prior
            return block.scaled(self.multiplier).gaussian(dense)
        basis, data, added = self._aligned(block, prior)
        values = data + added
        if not np.any(added) and values.min() * linear_algebra.CONDITION**2 < values.max(initial=1e-300):
            raise structures.improper(values.size, values.size)
        linear_algebra.check_positive(values)
        linear_algebra.check_condition(float(np.sqrt(values.min())), float(np.sqrt(values.max())))
        return Rotated(*basis, values)

    def _aligned(
        self, block: KroneckerBlock, prior: TensorPrior
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray | float]:
        """A basis (Q_l, Q_r) of a block, and the diagonals of H and of the prior in it, (I, O) or one number."""
        if is_one_precision(prior):
            return block.rotations, self.multiplier * block.eigenvalues, float(diagonal_of(prior)[0])
        if not self.nearest:
            check_one_precision(block.name, prior)
        if isinstance(prior, Rotated) and prior.values.shape != block.shape:
            prior = prior.precision()
        basis, _ = structures.kept(block._known, "basis", prior, partial(self._nearest_basis, block))
        return basis, self.multiplier * block.diagonal_in(*basis), prior_in(prior, *basis)

    def _nearest_basis(self, block: KroneckerBlock, prior: TensorPrior) -> tuple[np.ndarray, np.ndarray]:
        """The pair of candidates with the smallest sum of log b."""
        (wide, high), data = block.shape, block.rotations
        if isinstance(prior, Rotated):
            of_prior, sums = (prior.left, prior.right), (prior.values.sum(1), prior.values.sum(0))
            traces = tuple((side * each) @ side.T for side, each in zip(of_prior, sums, strict=True))
        elif prior.ndim == 1:
            of_prior, each = (np.eye(wide), np.eye(high)), prior.reshape(block.shape)
            traces = np.diag(each.sum(1)), np.diag(each.sum(0))
        else:
            parted = prior.reshape(wide, high, wide, high)
            traces = np.einsum("iojo->ij", parted), np.einsum("ioip->op", parted)
            of_prior = tuple(np.linalg.eigh(trace)[1] for trace in traces)
        both = (
            np.linalg.eigh(self.multiplier * np.trace(block.right) * block.left + traces[0])[1],
            np.linalg.eigh(self.multiplier * np.trace(block.left) * block.right + traces[1])[1],
        )

        def total(basis: tuple[np.ndarray, np.ndarray]) -> float:
            values = self.multiplier * block.diagonal_in(*basis) + prior_in(prior, *basis)
            return float(np.sum(np.log(values))) if values.min() > 0.0 else np.inf

        left, right = zip(data, of_prior, both, strict=True)
        return min(product(left, right), key=total)


def prior_in(prior: TensorPrior, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The diagonal of U' Lambda U with U = left (x) right, (I, O), of the prior of one tensor."""
    shape = (len(left), len(right))
    if isinstance(prior, Rotated) and prior.values.shape != shape:
        prior = prior.precision()
    if isinstance(prior, Rotated):
        return (left.T @ prior.left) ** 2 @ prior.values @ ((right.T @ prior.right) ** 2).T
    if prior.ndim == 1:
        return (left**2).T @ prior.reshape(shape) @ right**2
    turned = np.tensordot(prior.reshape(*shape, *shape), left, (2, 0))
    turned = np.einsum("ioqj,ij,qp->opj", turned, left, right, optimize=True)
    return np.einsum("opj,op->jp", turned, right)


def prior_share(gaussian: FlatGaussian, prior: TensorPrior | Mapping[str, TensorPrior]) -> float:
    """tr(Lambda A^-1), how many parameters the prior determines; a prior by tensor is one for `Kronecker`."""
    if isinstance(prior, Mapping):
        assert isinstance(gaussian, Kronecker)
        return sum(prior_share(part.gaussian, prior[part.name]) for part in gaussian.parts)
    if isinstance(gaussian, Rotated):
        return float(np.sum(prior_in(prior, gaussian.left, gaussian.right) / gaussian.values))
    if isinstance(prior, Rotated):
        prior = prior.precision()
    if isinstance(gaussian, LowRankPrecision) and np.array_equal(prior, gaussian.diagonal):
        return gaussian.diagonal_share()
    if prior.ndim == 1:
        return float(prior @ gaussian.variances())
    return float(np.sum(prior * gaussian.covariance()))


def is_diagonal(prior: TensorPrior) -> TypeGuard[np.ndarray]:
    """Whether the entries of the tensor are independent under the prior."""
    return isinstance(prior, np.ndarray) and prior.ndim == 1


def is_one_precision(prior: TensorPrior) -> bool:
    """Whether the prior is one number times the identity, as Kronecker factors require, up to rounding."""
    return is_diagonal(prior) and bool(np.ptp(prior) <= structures.ROUNDING * np.abs(prior).max())


def diagonal_of(prior: TensorPrior) -> np.ndarray:
    """The diagonal of the prior of a tensor, (p,)."""
    if isinstance(prior, Rotated):
        return np.ravel(prior.left**2 @ prior.values @ (prior.right**2).T)
    return prior if prior.ndim == 1 else np.diag(prior)


def check_one_precision(name: str, prior: TensorPrior, got: str = "") -> None:
    """Raise `UnsupportedError` if the prior of the tensor `name` is not one precision; `got` describes it."""
    if is_one_precision(prior):
        return
    found = "a prior under which its weights depend on each other"
    if is_diagonal(prior):
        found = f"precisions from {prior.min():.3g} to {prior.max():.3g}"
    elif isinstance(prior, Rotated):
        found = "Kronecker factors of the prior's own"
    expected = "one precision of the prior for the whole tensor, which Kronecker factors need"
    advice = "prior_approximation='kron' or 'mean', or structure='diag' or 'full'"
    raise UnsupportedError.of(f"block {name!r}", expected, got or found, advice)


def check_independent(prior: np.ndarray) -> None:
    """Raise `UnsupportedError` if the curvature of the prior of all sites is dense, (P, P)."""
    expected = "a prior whose sites are independent of each other"
    got = "a prior with a dense curvature, such as one with a sampled scale"
    advice = "prior_approximation='kron', which keeps what is within a tensor, or structure='full'"
    UnsupportedError.check(prior.ndim == 1, "structure='kron'", expected, got, advice)
