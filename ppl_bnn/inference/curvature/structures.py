"""Precision matrices of Laplace approximations: from the curvature of the data to Gaussians and log-determinants.

The precision is A = H + Lambda: H, the curvature of the data, and Lambda, that of the prior. Each class, one per
structure of H, gives the Gaussian N(0, A^-1) (`gaussian`) and log det(s H + diag(tau Lambda)) as a function of factors
s and tau (`determinant`), by which the evidence chooses hyper-parameters (MacKay 1992; Immer et al. 2021).
Decompositions of H are computed when first needed and kept for all hyper-parameters. Several groups under a full matrix
share none, and are factorised again at each step. NumPy and SciPy only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import scipy

from ppl_bnn.core.errors import CurvatureError
from ppl_bnn.inference.curvature import linear_algebra
from ppl_bnn.inference.curvature.gaussians import Diagonal, FlatGaussian, Full, LowRankPrecision

# Relative differences up to this are rounding: within a block's prior, and between priors that are multiples.
ROUNDING = 1e-12
# The Gram matrices of all groups, kept from call to call, may take this many times the memory of the factor B.
MOST_GRAMS = 4


# --- log-determinants -----------------------------------------------------------------------------


# A term of a log-determinant: (factors (G,), scale) -> (value, gamma (G,)).
Term = Callable[[np.ndarray, float], tuple[float, np.ndarray]]


@dataclass(frozen=True)
class LogDeterminant:
    """log det(scale H + diag(factors[groups] prior)) as a function of factors (G,) and scale, all positive.

    A call returns the value and gamma (G,), the effective number of parameters of each group, gamma_g = sum over i in g
    of 1 - factors_g prior_i (A^-1)_ii. So sum(gamma) = tr(scale H A^-1), and P_g - gamma_g is the derivative of the
    value in log factors_g. Raises `CurvatureError` if the matrix is not positive definite.
    """

    terms: tuple[Term, ...]

    def __call__(self, factors: np.ndarray, scale: float = 1.0) -> tuple[float, np.ndarray]:
        values, gammas = zip(*(term(factors, scale) for term in self.terms), strict=True)
        return sum(values, 0.0), sum(gammas, np.zeros(len(factors)))

    @cached_property
    def eigenvalues(self) -> np.ndarray | None:
        """Nonzero eigenvalues of prior^-1/2 H prior^-1/2, if one decomposition serves every call, else None."""
        found = [term.data / term.prior for term in self.terms if isinstance(term, Spectrum)]
        if len(found) < len(self.terms) or any(not np.all(np.isfinite(part)) for part in found):
            return None
        return np.concatenate([np.ravel(part) for part in found])


@dataclass(frozen=True)
class Spectrum:
    """sum_k log(scale data_k + tau prior_k) + unseen log tau + constant, with eigenvalues data_k.

    groups is the group of each k, or one for all. In `unseen` directions of that one group H is zero.
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
        linear_algebra.check_positive(total)
        share = data / total
        if np.ndim(self.groups):
            gamma = np.bincount(np.asarray(self.groups), share, minlength=len(factors))
        else:
            gamma = np.zeros(len(factors))
            gamma[self.groups] = share.sum()
        unseen = self.unseen * float(np.log(tau)) if self.unseen else 0.0
        return float(np.sum(np.log(total))) + unseen + self.constant, gamma


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights (M, K) of sums over a spectrum, for M random vectors; M = 1 if the spectrum itself is known."""

    nodes: np.ndarray
    weights: np.ndarray

    @classmethod
    def exact(cls, values: np.ndarray) -> Quadrature:
        """From all eigenvalues (K,)."""
        return cls(np.maximum(values, 0.0)[None], np.ones((1, len(values))))

    def sum(self, function: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
        """tr f(A) with its standard error, 0 if the spectrum is known."""
        each = np.sum(self.weights * function(self.nodes), 1)
        error = each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else 0.0
        return float(each.mean()), float(error)


def _by_grams(grams: Sequence[np.ndarray], sizes: np.ndarray, log_prior: float) -> Term:
    """The dual for a few groups: K = I + scale sum_g K_g / tau_g, with K_g = B_g diag(prior_g)^-1 B_g' kept for each.

    gamma_g = scale tr(K^-1 K_g) / tau_g, without a difference of large numbers.
    """

    def term(factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
        weights = scale / factors[: len(grams)]
        inner = np.zeros_like(grams[0])
        for weight, gram in zip(weights, grams, strict=True):
            inner += weight * gram
        dual = _dual(inner)
        inverse, gamma = dual.covariance(), np.zeros(len(factors))
        gamma[: len(grams)] = [w * np.vdot(inverse, gram) for w, gram in zip(weights, grams, strict=True)]
        prior = float(sizes @ np.log(factors[: len(sizes)])) + log_prior
        return prior - dual.log_determinant, gamma

    return term


def _by_columns(scaled: np.ndarray, groups: np.ndarray, log_prior: float) -> Term:
    """The dual for many groups: K is computed again from C = B diag(prior)^-1/2 (M, P) at each call.

    gamma_i = |L^-1 c_i|^2 for the columns c_i of the weighted C and K = L L'.
    """

    def term(factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
        tau = factors[groups]
        columns = scaled * np.sqrt(scale / tau)
        dual = _dual(columns @ columns.T)
        half = linear_algebra.solve_lower(dual.cholesky, columns)
        gamma = np.bincount(groups, np.einsum("mp,mp->p", half, half), minlength=len(factors))
        return float(np.sum(np.log(tau))) + log_prior - dual.log_determinant, gamma

    return term


def _dual(inner: np.ndarray) -> Full:
    """The Gaussian of precision I + inner (M, M); overwrites its argument."""
    np.fill_diagonal(inner, inner.diagonal() + 1.0)
    return Full.of(inner)


# --- curvatures of the data -----------------------------------------------------------------------


@dataclass(frozen=True)
class DataCurvature(ABC):
    """Base class of H, the curvature of the data, symmetric (P, P), in one structure: `multiplier` times a matrix."""

    multiplier: float = field(default=1.0, kw_only=True)
    _known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    @abstractmethod
    def matrix(self) -> np.ndarray:
        """The matrix H (P, P), dense."""

    @abstractmethod
    def gaussian(self, prior: np.ndarray) -> FlatGaussian:
        """The Gaussian N(0, A^-1) with A = H + prior, a diagonal (P,) or a matrix (P, P).

        Raises `CurvatureError` if A is not positive definite, or too close to singular.
        """

    @abstractmethod
    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """log det(scale H + diag(factors[groups] prior)), for a prior (P,) and groups (P,) from 0."""

    def scaled(self, factor: float) -> Self:
        """factor H, with factor > 0 (such as a noise precision). Known decompositions are shared."""
        return replace(self, multiplier=self.multiplier * float(factor))


@dataclass(frozen=True)
class FullCurvature(DataCurvature):
    """H = multiplier * values, a dense matrix (P, P) that may be indefinite."""

    values: np.ndarray

    def matrix(self) -> np.ndarray:
        return self.multiplier * self.values

    def gaussian(self, prior: np.ndarray) -> Full:
        """From one Cholesky factor. An improper prior that is the cause of a failure has an error of its own."""
        total = self.multiplier * self.values
        if prior.ndim == 1:
            np.fill_diagonal(total, total.diagonal() + prior)
        else:
            total += prior
        try:
            return Full.of(total)
        except CurvatureError as error:
            flat = int(np.sum((prior if prior.ndim == 1 else np.diag(prior)) == 0.0))
            if flat and np.all(np.isfinite(total)):
                raise improper(flat, len(total)) from error
            raise

    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """By eigenvalues for one group and a positive prior, else a Cholesky factor at each call."""
        group = int(groups[0])
        if np.all(groups == group) and np.all(prior > 0.0):
            known, ratio = kept(self._known, "eigenvalues", prior, self._relative_eigenvalues)
            constant = float(np.sum(np.log(prior)))
            return LogDeterminant((Spectrum(self.multiplier / ratio * known, 1.0, group, constant=constant),))

        def refactorised(factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
            tuned = factors[groups] * prior
            gaussian = self.scaled(scale).gaussian(tuned)
            gamma = np.bincount(groups, 1.0 - tuned * gaussian.variances(), minlength=len(factors))
            return -gaussian.log_determinant, gamma

        return LogDeterminant((refactorised,))

    def _relative_eigenvalues(self, prior: np.ndarray) -> np.ndarray:
        root = np.sqrt(prior)
        scaled = self.values / root
        scaled /= root[:, None]
        return _eigenvalues(scaled)


@dataclass(frozen=True)
class FactorCurvature(DataCurvature):
    """H = multiplier * B' B with factor B (M, P): few rows of data, or few eigenpairs.

    With M < P and a positive diagonal prior all computations are on M x M matrices (Woodbury), else as in
    `FullCurvature`.
    """

    factor: np.ndarray

    @property
    def size(self) -> int:
        return self.factor.shape[1]

    def matrix(self) -> np.ndarray:
        return self._dense.matrix()

    def gaussian(self, prior: np.ndarray) -> Full | LowRankPrecision:
        """`LowRankPrecision` if M < P and the prior is a positive diagonal, else `Full`."""
        if not self._has_dual(prior):
            return self._dense.gaussian(prior)
        gram, ratio = self._gram(prior)
        root = np.sqrt(self.multiplier)
        factor = self.factor if root == 1.0 else root * self.factor
        return LowRankPrecision.of(prior, factor, self.multiplier / ratio * gram)

    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """For one group eigenvalues of the Gram matrix (M, M); for more a Cholesky factor (M, M) at each call."""
        if not self._has_dual(prior):
            return self._dense.determinant(prior, groups)
        count, rows = int(groups.max()) + 1, len(self.factor)
        if rows == 0:
            return DiagonalCurvature(np.zeros(self.size)).determinant(prior, groups)
        log_prior = float(np.sum(np.log(prior)))
        if count == 1:
            known, ratio = kept(self._known, "eigenvalues", prior, self._relative_eigenvalues)
            values = self.multiplier / ratio * known
            term: Term = Spectrum(values, 1.0, 0, unseen=self.size - rows, constant=log_prior)
        elif count * rows <= MOST_GRAMS * self.size:
            grams = tuple(
                self.multiplier * linear_algebra.gram_of(prior[at], self.factor[:, linear_algebra.span(at)])
                for at in (np.flatnonzero(groups == group) for group in range(count))
            )
            term = _by_grams(grams, np.bincount(groups, minlength=count), log_prior)
        else:
            term = _by_columns(np.sqrt(self.multiplier) * self.factor / np.sqrt(prior), groups, log_prior)
        return LogDeterminant((term,))

    @cached_property
    def _dense(self) -> FullCurvature:
        matrix = self.factor.T @ self.factor
        return FullCurvature(matrix, multiplier=self.multiplier, _known=self._known)

    def _has_dual(self, prior: np.ndarray) -> bool:
        return prior.ndim == 1 and len(self.factor) < self.size and bool(np.all(prior > 0.0))

    def _gram(self, prior: np.ndarray) -> tuple[np.ndarray, float]:
        """B diag(d)^-1 B' and c, for a known d with prior = c d."""
        return kept(self._known, "gram", prior, lambda prior: linear_algebra.gram_of(prior, self.factor))

    def _relative_eigenvalues(self, prior: np.ndarray) -> np.ndarray:
        # Negative eigenvalues of a Gram matrix are rounding.
        return np.maximum(_eigenvalues(self._gram(prior)[0].copy()), 0.0)


@dataclass(frozen=True)
class LowRankCurvature(FactorCurvature):
    """The largest eigenpairs of D^-1/2 H D^-1/2 as a factor, and `rest`, sums over the others, for a prior D (P,).

    They are of the positions `inside` (P,) of bool; the factor has all of the others. Gaussians are of the factor
    alone. Log-determinants are of the whole H for priors that are a multiple of D inside, and of the factor for other
    ones. `coupled` is the error (nats) of log det by residuals of the eigenpairs, to first order. `converged` says
    whether the eigenpairs have; `products` were made with vectors.
    """

    prior: np.ndarray
    inside: np.ndarray
    rest: Quadrature
    coupled: float = field(default=0.0, kw_only=True)
    converged: bool = field(default=True, kw_only=True)
    products: int = field(default=0, kw_only=True)

    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        found, ratio, inside = super().determinant(prior, groups), self._ratio(prior), groups[self.inside]
        if ratio is None or np.ptp(inside):
            return found
        group = int(inside[0])

        def term(factors: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
            relative, gamma = scale * self.multiplier / (ratio * factors[group]), np.zeros(len(factors))
            gamma[group] = self.rest.sum(lambda t: relative * t / (1.0 + relative * t))[0]
            return self.rest.sum(lambda t: np.log1p(relative * t))[0], gamma

        return LogDeterminant((*found.terms, term))

    def beyond(self, prior: np.ndarray) -> dict[str, tuple[float, float]] | None:
        """log det, effective parameters and trace beyond the rank, with standard errors; None for other priors."""
        ratio = self._ratio(prior)
        if ratio is None:
            return None
        relative = self.multiplier / ratio
        return {
            "log_determinant": self.rest.sum(lambda t: np.log1p(relative * t)),
            "parameters": self.rest.sum(lambda t: relative * t / (1.0 + relative * t)),
            "trace": self.rest.sum(lambda t: relative * t),
        }

    def _ratio(self, prior: np.ndarray) -> float | None:
        return _ratio_of(prior[self.inside], self.prior[self.inside]) if prior.ndim == 1 else None


@dataclass(frozen=True)
class DiagonalCurvature(DataCurvature):
    """H = multiplier * diag(values), values (P,) of any sign."""

    values: np.ndarray

    def matrix(self) -> np.ndarray:
        return np.diag(self.multiplier * self.values)

    def gaussian(self, prior: np.ndarray) -> Diagonal:
        return Diagonal(self.multiplier * self.values + prior)

    def determinant(self, prior: np.ndarray, groups: np.ndarray) -> LogDeterminant:
        """Entry by entry, for any groups."""
        return LogDeterminant((Spectrum(self.multiplier * self.values, prior, groups),))


# --- shared by the structures ---------------------------------------------------------------------


def kept[T](known: dict[str, Any], name: str, prior: Any, make: Callable[[Any], T]) -> tuple[T, float]:
    """make(d) of a prior d that is `known`, and c with prior = c d; `known` starts anew if there is no such c.

    A prior that is a matrix, or has Kronecker factors, is a multiple of itself only.
    """
    ratio = 1.0 if prior is known.get("prior") else _ratio_of(prior, known.get("prior"))
    if ratio is None:
        known.clear()
        known["prior"], ratio = prior.copy() if np.ndim(prior) == 1 else prior, 1.0
    if name not in known:
        known[name] = make(known["prior"])
    return known[name], ratio


def _ratio_of(prior: Any, known: Any) -> float | None:
    """The factor c with prior = c known, if both are diagonals and there is one."""
    if any(np.ndim(each) != 1 or not np.all(each > 0.0) for each in (prior, known)):
        return None
    ratio = prior / known
    return float(ratio[0]) if np.ptp(ratio) <= ROUNDING * ratio[0] else None


def improper(flat: int, size: int) -> CurvatureError:
    """The `CurvatureError` of a prior without precision in directions that the data do not determine."""
    expected = "a proper prior, or data that determine every weight"
    got = f"an improper prior (no precision on {flat} of {size} weights) and a singular curvature"
    return CurvatureError.of("", expected, got, "a proper prior on every weight")


def _eigenvalues(symmetric: np.ndarray) -> np.ndarray:
    """Eigenvalues alone, in ascending order; overwrites its argument."""
    linear_algebra.check_finite("a finite curvature", symmetric)
    return scipy.linalg.eigh(
        symmetric.T, eigvals_only=True, overwrite_a=True, driver="evd", check_finite=False
    )
