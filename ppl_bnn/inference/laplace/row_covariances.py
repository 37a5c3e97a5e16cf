"""Covariances (D, D) of the predictor, one for each row, as far as possible without the matrices themselves.

A prediction needs variances, row sums, and draws, which are points times a root. A last layer has them from its
features. With A^-1 diagonal the logits are independent; with Kronecker factors they are so after a rotation, the same
for all rows, and the bias adds one covariance to every row; with A = diag(d) + B'B they are so but for R directions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ppl_bnn.core.arrays import chunks
from ppl_bnn.core.errors import CurvatureError
from ppl_bnn.inference.curvature.gaussians import FlatGaussian

# Columns of a rotation that are squared at once.
COLUMNS = 256


class RowCovariances(ABC):
    """Base class. S_n (D, D), positive semidefinite, for N rows."""

    # The numbers of a point.
    dimension: int

    @abstractmethod
    def variances(self) -> np.ndarray:
        """The diagonals, (N, D), not negative."""

    @abstractmethod
    def sums(self) -> np.ndarray:
        """S_n 1, (N, D)."""

    @abstractmethod
    def colour(self, points: np.ndarray) -> np.ndarray:
        """W_n z with W_n W_n' = S_n for each point z of (S, dimension): (S, N, D)."""

    @abstractmethod
    def dense(self) -> np.ndarray:
        """The matrices, (N, D, D)."""


@dataclass(frozen=True)
class DenseRows(RowCovariances):
    """The matrices themselves, (N, D, D)."""

    values: np.ndarray

    @property
    def dimension(self) -> int:  # type: ignore[override]
        return self.values.shape[-1]

    def variances(self) -> np.ndarray:
        return variances_of(self.values)

    def sums(self) -> np.ndarray:
        return self.values.sum(axis=-1)

    def colour(self, points: np.ndarray) -> np.ndarray:
        return np.einsum("nij,sj->sni", _roots(self.values), points, optimize=True)

    def dense(self) -> np.ndarray:
        return self.values


@dataclass(frozen=True)
class IndependentRows(RowCovariances):
    """diag(spread_n), (N, D)."""

    spread: np.ndarray

    @property
    def dimension(self) -> int:  # type: ignore[override]
        return self.spread.shape[-1]

    def variances(self) -> np.ndarray:
        return self.spread

    def sums(self) -> np.ndarray:
        return self.spread

    def colour(self, points: np.ndarray) -> np.ndarray:
        return points[:, None] * np.sqrt(self.spread)

    def dense(self) -> np.ndarray:
        return self.spread[:, :, None] * np.eye(self.dimension)


@dataclass(frozen=True)
class Common:
    """What a bias adds to every row: its own covariance. Each part is computed once."""

    gaussian: FlatGaussian
    _coloured: list[np.ndarray] = field(default_factory=list, repr=False)

    @cached_property
    def variances(self) -> np.ndarray:
        return self.gaussian.variances()

    @cached_property
    def sums(self) -> np.ndarray:
        return self.gaussian.colour(self.gaussian.whiten(np.ones((1, self.gaussian.size))))[0]

    def colour(self, points: np.ndarray) -> np.ndarray:
        """(S, D), kept for the points that were given last."""
        if not self._coloured or not np.array_equal(self._coloured[0], points):
            self._coloured[:] = points, self.gaussian.colour(points)
        return self._coloured[1]


@dataclass(frozen=True)
class RotatedRows(RowCovariances):
    """Q diag(spread_n) Q' plus what is common, with Q (D, D) orthogonal and `sums_of` (D,) = Q' 1."""

    basis: np.ndarray
    spread: np.ndarray
    sums_of: np.ndarray
    common: Common | None

    @property
    def dimension(self) -> int:  # type: ignore[override]
        return len(self.basis) * (1 if self.common is None else 2)

    def variances(self) -> np.ndarray:
        found = np.empty_like(self.spread)
        for start, stop in chunks(len(self.basis), COLUMNS):
            found[:, start:stop] = self.spread @ (self.basis[start:stop] ** 2).T
        return found if self.common is None else found + self.common.variances

    def sums(self) -> np.ndarray:
        found = (self.spread * self.sums_of) @ self.basis.T
        return found if self.common is None else found + self.common.sums

    def colour(self, points: np.ndarray) -> np.ndarray:
        size = len(self.basis)
        scaled = points[:, None, :size] * np.sqrt(self.spread)
        # One product of two matrices, which is many times as fast as one for each point.
        found = (scaled.reshape(-1, size) @ self.basis.T).reshape(scaled.shape)
        return found if self.common is None else found + self.common.colour(points[:, size:])[:, None]

    def dense(self) -> np.ndarray:
        half = self.basis * np.sqrt(self.spread)[:, None]
        found = half @ half.transpose(0, 2, 1)
        return found if self.common is None else found + self.common.gaussian.covariance()


@dataclass(frozen=True)
class UpdatedRows(RowCovariances):
    """E (I - T T') E + H H', E = diag(sqrt(spread)), |T| <= 1: what R directions leave of others, and their own spread.

    For each row T = `inside` and H = `along` are (D, R).
    """

    spread: np.ndarray
    inside: np.ndarray
    along: np.ndarray

    @property
    def dimension(self) -> int:  # type: ignore[override]
        return self.spread.shape[-1] + self.along.shape[-1]

    def variances(self) -> np.ndarray:
        # What is left is not negative but for rounding.
        left = np.maximum(1.0 - np.sum(self.inside**2, axis=-1), 0.0)
        return self.spread * left + np.sum(self.along**2, axis=-1)

    def sums(self) -> np.ndarray:
        root = np.sqrt(self.spread)
        each = np.einsum("ndr,nd->nr", self.inside, root)
        left = root * (root - np.einsum("ndr,nr->nd", self.inside, each))
        return left + np.einsum("ndr,nr->nd", self.along, self.along.sum(1))

    def colour(self, points: np.ndarray) -> np.ndarray:
        size, found = self.spread.shape[-1], []
        eps, own = points[:, :size], points[:, size:]
        for spread, inside, along in zip(self.spread, self.inside, self.along, strict=True):
            basis, shrink = _root_beside(inside)
            found.append(np.sqrt(spread) * (eps - (eps @ basis * shrink) @ basis.T) + own @ along.T)
        return np.stack(found, 1)

    def dense(self) -> np.ndarray:
        basis, shrink = _root_beside(self.inside)
        left = np.eye(self.spread.shape[-1]) - (basis * shrink[:, None]) @ basis.transpose(0, 2, 1)
        half = np.sqrt(self.spread)[:, :, None] * left
        return half @ half.transpose(0, 2, 1) + self.along @ self.along.transpose(0, 2, 1)


def _root_beside(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """U (..., D, K) and s (..., K) with (I - T T')^(1/2) = I - U diag(s) U' for T = `inside` (..., D, R), |T| <= 1."""
    # By the smaller of T T' (D, D) and T' T (R, R), whose eigenvalues are t^2.
    transposed, few = np.swapaxes(inside, -1, -2), inside.shape[-2] <= inside.shape[-1]
    squares, turned = np.linalg.eigh(inside @ transposed if few else transposed @ inside)
    shrink = 1.0 / (1.0 + np.sqrt(np.clip(1.0 - squares, 0.0, 1.0)))
    # The eigenvectors of T T', or T times those of T' T, whose lengths are t.
    return (turned, np.clip(squares, 0.0, 1.0) * shrink) if few else (inside @ turned, shrink)


def variances_of(covariance: np.ndarray) -> np.ndarray:
    """The diagonals (N, D). Rounding may leave a variance of -1e-17 instead of 0."""
    return np.maximum(np.diagonal(covariance, axis1=-2, axis2=-1), 0.0)


def _roots(covariance: np.ndarray) -> np.ndarray:
    """L (N, D, D) with L L' = covariance, by Cholesky, or by eigenvalues in rows with a singular matrix."""
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        if len(covariance) > 1:
            return np.concatenate([_roots(matrix[None]) for matrix in covariance])
        values, vectors = np.linalg.eigh(covariance[0])
    semidefinite = values[0] >= -1e-8 * max(values[-1], 0.0) and values[-1] >= 0.0
    expected = "positive semidefinite covariances of the predictor"
    got = f"eigenvalues from {values[0]:.3g} to {values[-1]:.3g}"
    advice = "a curvature that is positive definite, such as Gauss-Newton"
    CurvatureError.check(semidefinite, "", expected, got, advice)
    return (vectors * np.sqrt(np.maximum(values, 0.0)))[None]
