"""Precision matrices of Laplace approximations: from the curvature of the data to Gaussians and log-determinants.

The precision of a Laplace approximation is A = H + Lambda: H, the curvature of the data (a Gauss-Newton matrix, a
Fisher matrix, a Hessian), and Lambda, that of the prior. There is one class per structure of H. Each gives the Gaussian
N(0, A^-1) (`gaussian`) and log det(s H + diag(tau Lambda)) as a function of factors s and tau (`determinant`), by which
the evidence chooses hyper-parameters (MacKay 1992; Immer et al. 2021). Data and prior are combined only there, so that
one decomposition of H serves all hyper-parameters. Decompositions are computed when first needed and kept:
eigenvalues once for all factors, Gram matrices for all priors that are multiples of each other. Several groups under a
full matrix share no decomposition and are factorised again at each step. NumPy and SciPy only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, Self

import numpy as np

from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError
from ppl_bnn.inference.curvature.gaussians import (
    Diagonal,
    Full,
    Gaussian,
    LowRank,
    gram_of,
    refuse_infinite,
    refuse_not_positive,
    span,
)

# Relative differences up to this are rounding: within a block's prior, and between priors that are multiples.
ROUNDING = 1e-12
# The Gram matrices of all groups, kept from call to call, may take this many times the memory of the factor B.
KEPT = 4


# --- log-determinants -----------------------------------------------------------------------------


class Term(Protocol):
    """A term of a log-determinant: (factors (G,), scale) -> (value, gamma (G,))."""

    def __call__(self, factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]: ...


@dataclass(frozen=True)
class LogDeterminant:
    """log det(scale H + diag(factors[groups] prior)) as a function of factors (G,) and scale, all positive.

    A call returns the value and gamma (G,), the effective number of parameters of each group:
    gamma_g = sum over i in g of 1 - factors_g prior_i (A^-1)_ii, so that the sum of gamma is tr(scale H A^-1) and
    P_g - gamma_g is the derivative of the value in log factors_g. Groups above the largest one are empty.

    Raises
    ------
    InputError
        Factors that are too few or not positive.
    CurvatureError
        The matrix is not positive definite.
    """

    terms: tuple[Term, ...]
    groups: int

    def __call__(self, factors: np.ndarray, scale: float = 1.0) -> tuple[float, np.ndarray]:
        factors = np.asarray(factors, dtype=np.float64)
        if factors.ndim != 1 or len(factors) < self.groups:
            raise InputError.of(
                "factors",
                f"one factor for each of {self.groups} groups",
                f"shape {factors.shape}",
                "np.ones(groups)",
            )
        if not (np.all((factors > 0.0) & np.isfinite(factors)) and 0.0 < scale < np.inf):
            raise InputError.of(
                "factors and scale",
                "positive finite numbers",
                f"{factors} and {scale}",
                "np.exp of their logarithms",
            )
        value, gamma = 0.0, np.zeros(len(factors))
        for term in self.terms:
            part, share = term(factors, scale)
            value += part
            gamma += share
        return value, gamma

    @cached_property
    def eigenvalues(self) -> np.ndarray | None:
        """Eigenvalues of prior^-1/2 H prior^-1/2 if one decomposition serves every call, else None.

        For `FactorCurvature` these are the eigenvalues of the dual; the others are zero.
        """
        found = [term.data / term.prior for term in self.terms if isinstance(term, Spectrum)]
        if len(found) < len(self.terms) or any(not np.all(np.isfinite(part)) for part in found):
            return None
        return np.concatenate([np.ravel(part) for part in found])


@dataclass(frozen=True)
class Spectrum:
    """sum_k log(scale data_k + tau prior_k) + unseen log tau + constant.

    Parameters
    ----------
    data : ndarray
        The eigenvalues data_k.
    prior : ndarray or float
        prior_k.
    groups : ndarray or int
        The group of each k, or one for all.
    unseen : int
        The number of directions of that one group in which H is zero.
    constant : float
        The constant.
    """

    data: np.ndarray
    prior: np.ndarray | float
    groups: np.ndarray | int
    unseen: int = 0
    constant: float = 0.0

    def __call__(self, factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
        tau = factors[self.groups]
        data = scale * self.data
        total = data + tau * self.prior
        refuse_not_positive(total)
        share = data / total
        if np.ndim(self.groups):
            gamma = np.bincount(np.asarray(self.groups), share, minlength=len(factors))
        else:
            gamma = np.zeros(len(factors))
            gamma[self.groups] = share.sum()
        unseen = self.unseen * float(np.log(tau)) if self.unseen else 0.0
        return float(np.sum(np.log(total))) + unseen + self.constant, gamma


@dataclass(frozen=True)
class _Refactorised:
    """A Cholesky factor of multiplier * matrix (p, p), dense, at each call, for groups that share no decomposition."""

    matrix: np.ndarray
    multiplier: float
    prior: np.ndarray
    groups: np.ndarray

    def __call__(self, factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
        prior = factors[self.groups] * self.prior
        gaussian = full_gaussian(self.matrix, scale * self.multiplier, prior)
        gamma = np.bincount(self.groups, 1.0 - prior * gaussian.variances(), minlength=len(factors))
        return -gaussian.log_determinant, gamma


@dataclass(frozen=True)
class _Grams:
    """The dual for a few groups: K = I + scale sum_g K_g / tau_g, with K_g = B_g diag(prior_g)^-1 B_g' kept for each.

    gamma_g = scale tr(K^-1 K_g) / tau_g, without a difference of large numbers.
    """

    grams: tuple[np.ndarray, ...]
    sizes: np.ndarray
    log_prior: float

    def __call__(self, factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
        weights = scale / factors[: len(self.grams)]
        inner = np.zeros_like(self.grams[0])
        for weight, gram in zip(weights, self.grams, strict=True):
            inner += weight * gram
        np.fill_diagonal(inner, inner.diagonal() + 1.0)
        dual = Full.of(inner)
        inverse = dual.covariance()
        gamma = np.zeros(len(factors))
        gamma[: len(weights)] = [
            weight * np.vdot(inverse, gram) for weight, gram in zip(weights, self.grams, strict=True)
        ]
        prior = float(self.sizes @ np.log(factors[: len(self.sizes)])) + self.log_prior
        return prior - dual.log_determinant, gamma


@dataclass(frozen=True)
class _Columns:
    """The dual for many groups: K is computed again from C = B diag(prior)^-1/2 (M, P) at each call.

    gamma_i = |L^-1 c_i|^2 for the columns c_i of the weighted C and K = L L'.
    """

    scaled: np.ndarray
    groups: np.ndarray
    log_prior: float

    def __call__(self, factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
        from scipy.linalg import solve_triangular

        tau = factors[self.groups]
        columns = self.scaled * np.sqrt(scale / tau)
        inner = columns @ columns.T
        np.fill_diagonal(inner, inner.diagonal() + 1.0)
        dual = Full.of(inner)
        half = solve_triangular(dual.cholesky, columns, lower=True, check_finite=False)
        gamma = np.bincount(self.groups, np.einsum("mp,mp->p", half, half), minlength=len(factors))
        return float(np.sum(np.log(tau))) + self.log_prior - dual.log_determinant, gamma


# --- curvatures of the data -----------------------------------------------------------------------


class DataCurvature(ABC):
    """Base class of H, the curvature of the data, symmetric (P, P), in one structure."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P, the length of the flat vector."""

    @abstractmethod
    def diagonal(self) -> np.ndarray:
        """The diagonal of H, (P,)."""

    @abstractmethod
    def matrix(self) -> np.ndarray:
        """The matrix H (P, P), dense."""

    @abstractmethod
    def gaussian(self, prior: np.ndarray) -> Gaussian:
        """The Gaussian N(0, A^-1) with A = H + prior.

        Parameters
        ----------
        prior : ndarray
            (P,) is a diagonal, (P, P) a matrix.

        Raises
        ------
        CurvatureError
            A is not positive definite, or too close to singular.
        UnsupportedError
            A prior that this structure cannot represent.
        InputError
            A prior of another shape.
        """

    @abstractmethod
    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """log det(scale H + diag(factors[groups] prior)) as a function of factors and scale.

        Parameters
        ----------
        prior : ndarray
            (P,).
        groups : ndarray of int
            The group of each entry, from 0, (P,).
        """

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """factor H, with factor > 0 (such as a noise precision). Known decompositions are shared."""

    def _prior(self, prior: np.ndarray, dense: bool) -> np.ndarray:
        prior = np.asarray(prior, dtype=np.float64)
        if prior.shape != (self.size,) and (prior.ndim != 2 or prior.shape != (self.size, self.size)):
            raise InputError.of(
                "prior",
                f"a diagonal ({self.size},) or a matrix ({self.size}, {self.size})",
                f"shape {prior.shape}",
                "the curvature of the prior over the same flat vector",
            )
        if prior.ndim == 2 and not dense:
            raise UnsupportedError.of(
                f"{type(self).__name__}",
                "a prior whose sites are independent of each other",
                "a prior with a dense curvature, such as one with a sampled scale",
                "structure='full', or the diagonal of the prior's curvature",
            )
        refuse_infinite(prior)
        return prior

    def _groups(self, groups: np.ndarray) -> np.ndarray:
        groups = np.asarray(groups)
        if groups.shape != (self.size,) or groups.dtype.kind not in "iu" or groups.min(initial=0) < 0:
            raise InputError.of(
                "groups",
                f"{self.size} integers from 0",
                f"shape {groups.shape} of {groups.dtype}",
                "np.zeros(size, dtype=int) for one factor",
            )
        return groups


@dataclass(frozen=True)
class FullCurvature(DataCurvature):
    """H = multiplier * values, a dense matrix (P, P) that may be indefinite."""

    values: np.ndarray
    multiplier: float = 1.0
    _known: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.values)

    def diagonal(self) -> np.ndarray:
        return self.multiplier * np.diag(self.values)

    def matrix(self) -> np.ndarray:
        return self.multiplier * self.values

    def gaussian(self, prior: np.ndarray) -> Full:
        """From one Cholesky factor, which is much cheaper than eigenvectors."""
        return full_gaussian(self.values, self.multiplier, self._prior(prior, dense=True))

    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """Eigenvalues for one group and a positive prior; else a Cholesky factor at each call."""
        prior, groups = self._prior(prior, dense=False), self._groups(groups)
        return dense_determinant(self.values, self.multiplier, prior, groups, self._known)

    def scaled(self, factor: float) -> FullCurvature:
        return replace(self, multiplier=self.multiplier * positive_factor(factor))


@dataclass(frozen=True)
class FactorCurvature(DataCurvature):
    """H = multiplier * B' B with factor B (M, P): few rows of data, or few eigenpairs.

    With M < P and a positive diagonal prior all computations are on M x M matrices (Woodbury); otherwise they are those
    of `FullCurvature`.
    """

    factor: np.ndarray
    multiplier: float = 1.0
    _known: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_eigenpairs(cls, values: np.ndarray, vectors: np.ndarray) -> FactorCurvature:
        """H = V diag(values) V' with values (R,) and orthonormal columns V (P, R).

        Raises
        ------
        CurvatureError
            A negative eigenvalue.
        InputError
            Shapes that do not fit.
        """
        values, vectors = np.asarray(values, dtype=np.float64), np.asarray(vectors, dtype=np.float64)
        if values.ndim != 1 or vectors.ndim != 2 or vectors.shape[1] != len(values):
            raise InputError.of(
                "eigenpairs",
                "values (R,) and vectors (P, R)",
                f"{values.shape} and {vectors.shape}",
                "one column per eigenvalue",
            )
        if values.min(initial=0.0) < 0.0:
            raise CurvatureError.of(
                "eigenpairs",
                "eigenvalues that are not negative",
                f"{values.min():.3g}",
                "a Gauss-Newton matrix, or the positive eigenvalues only",
            )
        return cls(np.sqrt(values)[:, None] * vectors.T)

    @property
    def size(self) -> int:
        return self.factor.shape[1]

    def diagonal(self) -> np.ndarray:
        return self.multiplier * np.einsum("mp,mp->p", self.factor, self.factor)

    def matrix(self) -> np.ndarray:
        return self.multiplier * self._dense

    def gaussian(self, prior: np.ndarray) -> Full | LowRank:
        """`LowRank` if M < P and the prior is a positive diagonal, else `Full`."""
        prior = self._prior(prior, dense=True)
        if not self._has_dual(prior):
            return full_gaussian(self._dense, self.multiplier, prior)
        gram, ratio = self._gram(prior)
        root = np.sqrt(self.multiplier)
        factor = self.factor if root == 1.0 else root * self.factor
        return LowRank.of(prior, factor, self.multiplier / ratio * gram)

    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """For one group eigenvalues of the Gram matrix (M, M); for more a Cholesky factor (M, M) at each call."""
        prior, groups = self._prior(prior, dense=False), self._groups(groups)
        if not self._has_dual(prior):
            return dense_determinant(self._dense, self.multiplier, prior, groups, self._known)
        count = int(groups.max()) + 1
        rows = len(self.factor)
        if rows == 0:
            return DiagonalCurvature(np.zeros(self.size)).determinant(prior, groups)
        log_prior = float(np.sum(np.log(prior)))
        root = np.sqrt(self.multiplier)
        if count == 1:
            gram, ratio = self._gram(prior)
            if "eigenvalues" not in self._known:
                # Negative eigenvalues of a Gram matrix are rounding.
                self._known["eigenvalues"] = np.maximum(_eigenvalues(gram.copy()), 0.0)
            values = self.multiplier / ratio * self._known["eigenvalues"]
            term: Term = Spectrum(values, 1.0, 0, unseen=self.size - rows, constant=log_prior)
        elif count * rows <= KEPT * self.size:
            sizes = np.bincount(groups, minlength=count)
            grams = tuple(
                self.multiplier * gram_of(prior[at], self.factor[:, span(at)])
                for at in (np.flatnonzero(groups == group) for group in range(count))
            )
            term = _Grams(grams, sizes, log_prior)
        else:
            term = _Columns(root * self.factor / np.sqrt(prior), groups, log_prior)
        return LogDeterminant((term,), count)

    def scaled(self, factor: float) -> FactorCurvature:
        return replace(self, multiplier=self.multiplier * positive_factor(factor))

    @property
    def _dense(self) -> np.ndarray:
        """B' B."""
        if "dense" not in self._known:
            self._known["dense"] = self.factor.T @ self.factor
        return self._known["dense"]

    def _has_dual(self, prior: np.ndarray) -> bool:
        return prior.ndim == 1 and len(self.factor) < self.size and bool(np.all(prior > 0.0))

    def _gram(self, prior: np.ndarray) -> tuple[np.ndarray, float]:
        """B diag(d)^-1 B' and c, for a known d with prior = c d."""
        ratio = ratio_of(prior, self._known.get("prior"))
        if ratio is None:
            self._known.pop("eigenvalues", None)
            self._known["prior"], ratio = prior.copy(), 1.0
            self._known["gram"] = gram_of(prior, self.factor)
        return self._known["gram"], ratio


@dataclass(frozen=True)
class DiagonalCurvature(DataCurvature):
    """H = multiplier * diag(values), values (P,) of any sign."""

    values: np.ndarray
    multiplier: float = 1.0

    @property
    def size(self) -> int:
        return len(self.values)

    def diagonal(self) -> np.ndarray:
        return self.multiplier * self.values

    def matrix(self) -> np.ndarray:
        return np.diag(self.diagonal())

    def gaussian(self, prior: np.ndarray) -> Diagonal:
        return Diagonal(self.diagonal() + self._prior(prior, dense=False))

    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """Entry by entry, for any groups."""
        prior, groups = self._prior(prior, dense=False), self._groups(groups)
        return LogDeterminant((Spectrum(self.diagonal(), prior, groups),), int(groups.max()) + 1)

    def scaled(self, factor: float) -> DiagonalCurvature:
        return replace(self, multiplier=self.multiplier * positive_factor(factor))


# --- shared by the structures ---------------------------------------------------------------------


def positive_factor(factor: float) -> float:
    """The factor itself, or an `InputError`."""
    if not 0.0 < factor < np.inf:
        raise InputError.of("scaled", "a positive finite factor", repr(factor), "a noise precision")
    return float(factor)


def ratio_of(prior: np.ndarray, known: np.ndarray | None) -> float | None:
    """The factor c with prior = c known, if there is one.

    Parameters
    ----------
    prior : ndarray
        A prior.
    known : ndarray or None
        Another prior.

    Returns
    -------
    float or None
        c if prior = c known, else None.
    """
    if known is None:
        return None
    ratio = prior / known
    return float(ratio[0]) if np.ptp(ratio) <= ROUNDING * ratio[0] else None


def full_gaussian(matrix: np.ndarray, multiplier: float, prior: np.ndarray) -> Full:
    """`Full` of multiplier * matrix + prior, with a separate error if an improper prior is the cause.

    Parameters
    ----------
    matrix : ndarray
        (P, P).
    multiplier : float
        The multiplier of the matrix.
    prior : ndarray
        (P,) or (P, P).
    """
    total = multiplier * matrix
    diagonal = prior if prior.ndim == 1 else np.diag(prior)
    if prior.ndim == 1:
        np.fill_diagonal(total, total.diagonal() + prior)
    else:
        total += prior
    try:
        return Full.of(total)
    except CurvatureError as error:
        flat = int(np.sum(diagonal == 0.0))
        if not flat or not np.all(np.isfinite(total)):
            raise
        raise improper(flat, len(diagonal)) from error


def improper(flat: int, size: int) -> CurvatureError:
    """The `CurvatureError` of a prior without precision in directions that the data do not determine."""
    return CurvatureError.of(
        "",
        "a proper prior, or data that determine every weight",
        f"an improper prior (no precision on {flat} of {size} weights) and a singular curvature",
        "a proper prior on every weight",
    )


def _eigenvalues(symmetric: np.ndarray) -> np.ndarray:
    """Eigenvalues alone, in ascending order; overwrites its argument."""
    from scipy.linalg import eigh

    refuse_infinite(symmetric)
    return eigh(symmetric.T, eigvals_only=True, overwrite_a=True, driver="evd", check_finite=False)


def dense_determinant(
    matrix: np.ndarray, multiplier: float, prior: np.ndarray, groups: np.ndarray, known: dict[str, np.ndarray]
) -> LogDeterminant:
    """The log-determinant for multiplier * matrix.

    Parameters
    ----------
    matrix : ndarray
        (P, P).
    multiplier : float
        The multiplier of the matrix.
    prior : ndarray
        (P,).
    groups : ndarray of int
        The group of each entry, (P,).
    known : dict of ndarray
        Keeps the eigenvalues (of the matrix itself) and their prior between calls.
    """
    group = int(groups[0])
    if not (np.all(groups == group) and np.all(prior > 0.0)):
        return LogDeterminant((_Refactorised(matrix, multiplier, prior, groups),), int(groups.max()) + 1)
    ratio = ratio_of(prior, known.get("prior"))
    if ratio is None:
        root = np.sqrt(prior)
        scaled = matrix / root
        scaled /= root[:, None]
        known["eigenvalues"] = _eigenvalues(scaled)
        known["prior"], ratio = prior.copy(), 1.0
    values = multiplier / ratio * known["eigenvalues"]
    return LogDeterminant((Spectrum(values, 1.0, group, constant=float(np.sum(np.log(prior)))),), group + 1)
