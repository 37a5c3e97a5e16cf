"""Gaussians N(0, A^-1) over the flat vector of latent sites: sample, quadratic form, log-determinant.

There is one class per structure of the precision matrix A; `STRUCTURES` names them. Each has a root W with W W' = A^-1
that is applied and never formed, so that draws are W eps and projected variances J A^-1 J' = (J W)(J W)' cannot be
negative. No array has size (P, P) except in `Full` and in `covariance()` and `precision()`. NumPy and SciPy only. The
precisions are made in `structures.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import CurvatureError, InputError, unknown_name

# Largest ratio of two entries on the diagonal of a Cholesky factor: the condition number is about its square.
CONDITION = 1e7
# Pivot relative to its diagonal entry. No matrix that is singular up to rounding was seen with a larger one.
SUSPICIOUS = 1e-3
# Floats that a projection of linear maps with several positions may hold at once.
HELD = 2**24


class Gaussian(ABC):
    """Base class of N(0, A^-1). Shapes: P entries of the flat vector, N rows, D outputs per row, S points."""

    structure: ClassVar[str]

    @property
    @abstractmethod
    def size(self) -> int:
        """P, the length of the flat vector."""

    @property
    @abstractmethod
    def log_determinant(self) -> float:
        """log det of the covariance A^-1."""

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Independent draws, (count, P)."""

    @abstractmethod
    def whiten(self, rows: np.ndarray) -> np.ndarray:
        """J W of rows J (M, P), (M, K), with a root W of the covariance: (J W)(J W)' = J A^-1 J'."""

    @abstractmethod
    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        """The quadratic form x' A x of each row of (S, P), (S,)."""

    @abstractmethod
    def variances(self) -> np.ndarray:
        """The diagonal of A^-1, (P,)."""

    @abstractmethod
    def precision(self) -> np.ndarray:
        """The precision A (P, P), dense."""

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays from which `from_arrays` makes the same object, to the bit."""

    @classmethod
    @abstractmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Gaussian:
        """The object with these `arrays()`."""

    def log_prob(self, deviation: np.ndarray) -> np.ndarray:
        """Log density of deviations (S, P) from the mean, (S,)."""
        quadratic = self.quadratic(self._checked(deviation))
        return -0.5 * (quadratic + self.size * np.log(2.0 * np.pi) + self.log_determinant)

    def project(self, jacobian: np.ndarray) -> np.ndarray:
        """J A^-1 J' over the last two axes of a Jacobian (N, D, P), row by row: (N, D, D)."""
        half = self._half(jacobian)
        return half @ half.transpose(0, 2, 1)

    def joint(self, jacobian: np.ndarray) -> np.ndarray:
        """J A^-1 J' of a Jacobian (N, D, P) across rows too: (N D, N D), with the outputs of a row adjacent."""
        half = self._half(jacobian)
        half = half.reshape(-1, half.shape[-1])
        return half @ half.T

    def covariance(self) -> np.ndarray:
        """The covariance A^-1 (P, P), dense."""
        half = self.whiten(np.eye(self.size))
        return half @ half.T

    def _half(self, jacobian: np.ndarray) -> np.ndarray:
        if np.ndim(jacobian) != 3:
            raise InputError.of(
                "jacobian",
                "three axes (N, D, P)",
                f"shape {np.shape(jacobian)}",
                "jacobian[None] for one row",
            )
        rows, outputs, size = jacobian.shape
        half = self.whiten(self._checked(jacobian.reshape(rows * outputs, size)))
        return half.reshape(rows, outputs, half.shape[-1])

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.size:
            raise InputError.of(
                "",
                f"rows over {self.size} entries of the flat vector",
                f"shape {rows.shape}",
                "the latent sites that this Gaussian is about, ravelled in the order of the program",
            )
        return rows


@dataclass(frozen=True)
class Full(Gaussian):
    """N(0, A^-1) by the Cholesky factor of its precision.

    Parameters
    ----------
    cholesky : ndarray
        L, lower triangular (P, P), with A = L L'.
    """

    cholesky: np.ndarray
    structure: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        # Use one order in memory, so that arrays read from a file round in the same way as those written.
        object.__setattr__(self, "cholesky", np.asarray(self.cholesky, dtype=np.float64, order="F"))

    @classmethod
    def of(cls, precision: np.ndarray) -> Full:
        """Factorise a precision matrix (P, P).

        Raises
        ------
        CurvatureError
            The matrix is not finite, indefinite, or so close to singular that some direction has no usable variance.
        """
        from scipy.linalg import cholesky

        refuse_infinite(precision)
        try:
            # The transpose of a symmetric matrix in C order is the same matrix in LAPACK's.
            factor = cholesky(precision.T, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            lowest = float(np.linalg.eigvalsh(precision)[0])
            raise CurvatureError.of(
                "",
                "a positive definite curvature at the mode",
                f"a smallest eigenvalue of {lowest:.3g}",
                "repair='clip' where the prior curves upwards, more steps if this is no mode, or a tighter prior",
            ) from None
        diagonal = np.diag(factor)
        refuse_ill_conditioned(float(diagonal.min(initial=np.inf)), float(diagonal.max(initial=0.0)))
        _refuse_singular(precision, factor)
        return cls(factor)

    @property
    def size(self) -> int:
        return len(self.cholesky)

    @property
    def log_determinant(self) -> float:
        return -2.0 * float(np.sum(np.log(np.diag(self.cholesky))))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count, P) draws: L'^-1 eps has covariance (L L')^-1."""
        from scipy.linalg import solve_triangular

        eps = rng.standard_normal((self.size, count))
        return solve_triangular(self.cholesky, eps, lower=True, trans=1, check_finite=False).T

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        """J L'^-1, (M, P)."""
        from scipy.linalg import solve_triangular

        return solve_triangular(self.cholesky, rows.T, lower=True, check_finite=False).T

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        return np.sum((deviation @ self.cholesky) ** 2, axis=-1)

    def variances(self) -> np.ndarray:
        """Squared norms of the columns of L^-1."""
        inverse = self._inverse()
        return np.einsum("ij,ij->j", inverse, inverse)

    def covariance(self) -> np.ndarray:
        inverse = self._inverse()
        return inverse.T @ inverse

    def precision(self) -> np.ndarray:
        return self.cholesky @ self.cholesky.T

    def arrays(self) -> dict[str, np.ndarray]:
        return {"cholesky": self.cholesky}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Full:
        return cls(arrays["cholesky"])

    def _inverse(self) -> np.ndarray:
        from scipy.linalg import get_lapack_funcs

        invert: Any = get_lapack_funcs("trtri", (self.cholesky,))
        inverse, _ = invert(self.cholesky, lower=1)
        return inverse


@dataclass(frozen=True)
class Diagonal(Gaussian):
    """Independent entries: A = diag(a).

    Parameters
    ----------
    values : ndarray
        a, (P,).

    Raises
    ------
    CurvatureError
        An entry is not positive, or not finite.
    """

    values: np.ndarray
    structure: ClassVar[str] = "diag"

    def __post_init__(self) -> None:
        values = np.asarray(self.values, dtype=np.float64)
        refuse_infinite(values)
        refuse_not_positive(values)
        object.__setattr__(self, "values", values)

    @property
    def size(self) -> int:
        return len(self.values)

    @property
    def log_determinant(self) -> float:
        return -float(np.sum(np.log(self.values)))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        draws = rng.standard_normal((count, self.size))
        draws /= np.sqrt(self.values)
        return draws

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        return rows / np.sqrt(self.values)

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        return deviation**2 @ self.values

    def variances(self) -> np.ndarray:
        return 1.0 / self.values

    def precision(self) -> np.ndarray:
        return np.diag(self.values)

    def project_linear(self, where: np.ndarray, inputs: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """The contribution of the weight (I, O) of a linear map to J A^-1 J', (N, D, D).

        The Jacobian sum_t a_nt (x) g_ndt is formed for T > 1 only, a few rows at a time.

        Parameters
        ----------
        where : ndarray
            The positions of the weight, (I O,).
        inputs : ndarray
            (N, T, I), the input of the map at each of its T positions.
        gradients : ndarray
            (N, D, T, O), of the outputs with respect to the output of the map.
        """
        inputs, gradients = _checked_linear(len(where), inputs, gradients)
        shape = (inputs.shape[-1], gradients.shape[-1])
        return _project_linear(inputs, gradients, 1.0 / self.values[where].reshape(shape))

    def project_part(self, where: np.ndarray, jacobian: np.ndarray) -> np.ndarray:
        """The contribution of entries at positions `where` (p,), with Jacobian (N, D, p), to J A^-1 J', (N, D, D)."""
        return Diagonal(self.values[where]).project(jacobian)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"precision": self.values}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Diagonal:
        return cls(arrays["precision"])


@dataclass(frozen=True)
class LowRank(Gaussian):
    """A = diag(d) + B' B: a dense matrix of R rows instead of P.

    With C = B diag(d)^-1/2 and K = I + C C' = L L', (R, R), the determinant is that of K times d, and W = diag(d)^-1/2
    (I - C' L'^-1 (L + I)^-1 C) is a root of A^-1: the square root of a Kalman filter's update (Andrews 1968). A draw
    and a projected row cost O(R P) each. A variance that data make k times smaller than the prior's has a relative
    error of about eps sqrt(k), while subtraction by Woodbury's identity would have eps k. The rounding of K itself adds
    up to eps |K|, as in a Cholesky factor of A. `variances` uses that subtraction.

    Parameters
    ----------
    diagonal : ndarray
        d (P,), positive.
    factor : ndarray
        B (R, P).
    cholesky : ndarray
        L (R, R).
    """

    diagonal: np.ndarray
    factor: np.ndarray
    cholesky: np.ndarray
    structure: ClassVar[str] = "lowrank"

    def __post_init__(self) -> None:
        for name in ("diagonal", "factor"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64, order="C"))
        object.__setattr__(self, "cholesky", np.asarray(self.cholesky, dtype=np.float64, order="F"))

    @classmethod
    def of(cls, diagonal: np.ndarray, factor: np.ndarray, gram: np.ndarray | None = None) -> LowRank:
        """From d (P,) and B (R, P).

        Parameters
        ----------
        diagonal : ndarray
            d (P,).
        factor : ndarray
            B (R, P).
        gram : ndarray or None
            C C' (R, R), if it is known already.

        Raises
        ------
        CurvatureError
            Values are not finite, d is not positive, or B' B is so much larger than d that d is lost in rounding.
        """
        from scipy.linalg import cholesky

        diagonal = np.asarray(diagonal, dtype=np.float64)
        factor = np.asarray(factor, dtype=np.float64)
        refuse_infinite(diagonal)
        refuse_not_positive(diagonal)
        inner = np.array(gram_of(diagonal, factor) if gram is None else gram)
        refuse_infinite(inner)
        np.fill_diagonal(inner, inner.diagonal() + 1.0)
        # No eigenvalue of K is below 1, and none is above R times its largest diagonal entry.
        refuse_ill_conditioned(
            1.0,
            float(np.sqrt(inner.diagonal().max(initial=1.0))),
            "a prior with larger precision; with structure='lowrank', whose other directions have the prior alone, a "
            "larger rank=, tune='global' or structure='full'",
        )
        return cls(diagonal, factor, cholesky(inner.T, lower=True, overwrite_a=True, check_finite=False))

    @property
    def size(self) -> int:
        return len(self.diagonal)

    @property
    def log_determinant(self) -> float:
        inner = 2.0 * float(np.sum(np.log(np.diag(self.cholesky))))
        return -float(np.sum(np.log(self.diagonal))) - inner

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count, P) draws W eps, from P normal numbers each."""
        return self._turned(rng.standard_normal((count, self.size)), transposed=True) / np.sqrt(self.diagonal)

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        """J W, (M, P)."""
        return self._turned(rows / np.sqrt(self.diagonal), transposed=False)

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        return deviation**2 @ self.diagonal + np.sum((deviation @ self.factor.T) ** 2, axis=-1)

    def variances(self) -> np.ndarray:
        """(1 - sum over rows of (L^-1 C)^2) / d.

        Raises
        ------
        CurvatureError
            The posterior variance is smaller than the rounding error of the prior variance.
        """
        from scipy.linalg import solve_triangular

        scaled = solve_triangular(
            self.cholesky, self.factor / np.sqrt(self.diagonal), lower=True, check_finite=False
        )
        left = 1.0 - np.einsum("rp,rp->p", scaled, scaled)
        if left.min(initial=1.0) <= 0.0:
            refuse_ill_conditioned(0.0, 1.0)
        return left / self.diagonal

    def precision(self) -> np.ndarray:
        return self.factor.T @ self.factor + np.diag(self.diagonal)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"diagonal": self.diagonal, "factor": self.factor, "cholesky": self.cholesky}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> LowRank:
        return cls(arrays["diagonal"], arrays["factor"], arrays["cholesky"])

    def _turned(self, rows: np.ndarray, transposed: bool) -> np.ndarray:
        """Rows times I - C' X C or its transpose, X = L'^-1 (L + I)^-1."""
        from scipy.linalg import solve_triangular

        shifted = self.cholesky.copy(order="F")
        np.fill_diagonal(shifted, shifted.diagonal() + 1.0)
        scale = np.sqrt(self.diagonal)
        inner = ((rows / scale) @ self.factor.T).T
        for triangle in (shifted, self.cholesky) if transposed else (self.cholesky, shifted):
            # L^-1 and (L + I)'^-1 for the root, (L + I)^-1 and L'^-1 for its transpose.
            trans = int((triangle is shifted) != transposed)
            inner = solve_triangular(triangle, inner, lower=True, trans=trans, check_finite=False)
        return rows - (inner.T @ self.factor) / scale


@dataclass(frozen=True)
class Rotated(Gaussian):
    """A weight (I, O), ravelled row by row, with independent entries after a rotation of its rows and its columns.

    A = (Q_l (x) Q_r) diag(a) (Q_l (x) Q_r)'. So W eps is Q_l (eps / sqrt(a)) Q_r' for a matrix eps (I, O).

    Parameters
    ----------
    left : ndarray
        Q_l (I, I), orthogonal.
    right : ndarray
        Q_r (O, O), orthogonal.
    values : ndarray
        a (I, O), positive.
    """

    left: np.ndarray
    right: np.ndarray
    values: np.ndarray
    structure: ClassVar[str] = "rotated"

    def __post_init__(self) -> None:
        for name in ("left", "right", "values"):
            value = np.asarray(getattr(self, name), dtype=np.float64, order="C")
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def log_determinant(self) -> float:
        return -float(np.sum(np.log(self.values)))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        eps = rng.standard_normal((count, *self.values.shape))
        eps /= np.sqrt(self.values)
        return (self.left @ eps @ self.right.T).reshape(count, self.size)

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        """J (Q_l (x) Q_r) / sqrt(a), (M, I O)."""
        turned = self._turned(rows)
        turned /= np.sqrt(self.values)
        return turned.reshape(len(rows), self.size)

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        turned = self._turned(deviation)
        return np.einsum("sio,sio,io->s", turned, turned, self.values)

    def variances(self) -> np.ndarray:
        return (self.left**2 @ (1.0 / self.values) @ (self.right**2).T).reshape(self.size)

    def precision(self) -> np.ndarray:
        rotation = np.kron(self.left, self.right)
        return (rotation * self.values.reshape(-1)) @ rotation.T

    def project_linear(self, inputs: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """`Diagonal.project_linear` after a rotation of inputs and gradients."""
        inputs, gradients = _checked_linear(self.size, inputs, gradients)
        return _project_linear(inputs @ self.left, gradients @ self.right, 1.0 / self.values)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"left": self.left, "right": self.right, "precision": self.values}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Rotated:
        return cls(arrays["left"], arrays["right"], arrays["precision"])

    def _turned(self, rows: np.ndarray) -> np.ndarray:
        return self.left.T @ rows.reshape(len(rows), *self.values.shape) @ self.right


@dataclass(frozen=True)
class Part:
    """A Gaussian over the entries at `positions` (p,) of the flat vector, independent of all others."""

    name: str
    positions: np.ndarray
    gaussian: Full | Rotated

    @cached_property
    def where(self) -> Any:
        """The positions, as a slice if they are consecutive: a view instead of a copy."""
        return span(self.positions)


@dataclass(frozen=True)
class Kronecker(Gaussian):
    """Independent parts, one per tensor: a weight by Kronecker factors (`Rotated`), small tensors dense (`Full`).

    The positions of the parts make up the flat vector. No array is larger than one factor or the flat vector.
    """

    parts: tuple[Part, ...]
    structure: ClassVar[str] = "kron"

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        return sum(part.gaussian.size for part in self.parts)

    @property
    def log_determinant(self) -> float:
        return sum(part.gaussian.log_determinant for part in self.parts)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        draws = np.empty((count, self.size))
        for part in self.parts:
            draws[:, part.where] = part.gaussian.sample(count, rng)
        return draws

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        half = np.empty((len(rows), self.size))
        for part in self.parts:
            half[:, part.where] = part.gaussian.whiten(rows[:, part.where])
        return half

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        total = np.zeros(len(deviation))
        for part in self.parts:
            total += part.gaussian.quadratic(deviation[:, part.where])
        return total

    def variances(self) -> np.ndarray:
        total = np.empty(self.size)
        for part in self.parts:
            total[part.where] = part.gaussian.variances()
        return total

    def precision(self) -> np.ndarray:
        total = np.zeros((self.size, self.size))
        for part in self.parts:
            total[np.ix_(part.positions, part.positions)] = part.gaussian.precision()
        return total

    def project_linear(
        self, where: str | np.ndarray, inputs: np.ndarray, gradients: np.ndarray
    ) -> np.ndarray:
        """The contribution of one linear map's weight to J A^-1 J', see `Diagonal.project_linear`.

        Parameters
        ----------
        where : str or ndarray
            The name of the part, or its positions.
        inputs, gradients : ndarray
            As in `Diagonal.project_linear`.
        """
        gaussian = self.part(where).gaussian
        if isinstance(gaussian, Rotated):
            return gaussian.project_linear(inputs, gradients)
        inputs, gradients = _checked_linear(gaussian.size, inputs, gradients)
        jacobian = np.einsum("nti,ndto->ndio", inputs, gradients)
        return gaussian.project(jacobian.reshape(*jacobian.shape[:2], -1))

    def project_part(self, where: str | np.ndarray, jacobian: np.ndarray) -> np.ndarray:
        """The contribution of one part (its name, or its positions) with Jacobian (N, D, p) to J A^-1 J', (N, D, D)."""
        return self.part(where).gaussian.project(jacobian)

    def part(self, where: str | np.ndarray) -> Part:
        """The part with a name, or with positions.

        Raises
        ------
        UnknownNameError
            No part has that name.
        InputError
            No part has these positions.
        """
        for part in self.parts:
            if part.name == where if isinstance(where, str) else np.array_equal(part.positions, where):
                return part
        if isinstance(where, str):
            raise unknown_name("part", where, [part.name for part in self.parts])
        raise InputError.of(
            "",
            "the positions of one part",
            f"{np.size(where)} positions that are no part's",
            ", ".join(part.name for part in self.parts),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays with keys index/structure/array/name. A name may contain further slashes."""
        found = {}
        for index, part in enumerate(self.parts):
            for key, value in (part.gaussian.arrays() | {"positions": part.positions}).items():
                found[f"{index:04d}/{part.gaussian.structure}/{key}/{part.name}"] = value
        return found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Kronecker:
        parts: dict[tuple[int, str, str], dict[str, np.ndarray]] = {}
        for path, value in arrays.items():
            index, structure, key, name = path.split("/", 3)
            parts.setdefault((int(index), structure, name), {})[key] = value
        kinds = {kind.structure: kind for kind in (Full, Rotated)}
        return cls(
            tuple(
                Part(name, values["positions"], kinds[structure].from_arrays(values))
                for (_, structure, name), values in sorted(parts.items(), key=lambda item: item[0][0])
            )
        )


STRUCTURES: dict[str, type[Gaussian]] = {
    kind.structure: kind for kind in (Full, Diagonal, LowRank, Kronecker)
}


def gram_of(diagonal: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """B diag(d)^-1 B', (R, R), of d (P,) and B (R, P).

    Parameters
    ----------
    diagonal : ndarray
        d (P,).
    factor : ndarray
        B (R, P).
    """
    scaled = factor / np.sqrt(diagonal)
    # A product of an array with its own transpose is computed as one triangle.
    return scaled @ scaled.T


def span(positions: np.ndarray) -> Any:
    """Positions as a slice if they are consecutive."""
    if len(positions) and np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))):
        return slice(int(positions[0]), int(positions[0]) + len(positions))
    return positions


def refuse_infinite(values: np.ndarray) -> None:
    """Raise `CurvatureError` if any value is NaN or infinite."""
    if not np.all(np.isfinite(values)):
        raise CurvatureError.of(
            "",
            "a finite curvature",
            "NaN or infinity",
            "a mode with finite density: other start, or standardise=True",
        )


def refuse_not_positive(values: np.ndarray) -> None:
    """Raise `CurvatureError` if an entry of a diagonal precision is zero or negative."""
    if values.min(initial=np.inf) <= 0.0:
        raise CurvatureError.of(
            "",
            "a positive precision in every direction",
            f"{values.min():.3g}, and {int(np.sum(values <= 0.0))} of {values.size} that are not positive",
            "a proper prior on every weight; repair='clip' where the prior curves upwards",
        )


def refuse_ill_conditioned(
    smallest: float, largest: float, advice: str = "a proper prior on every weight"
) -> None:
    """Raise `CurvatureError` if entries of a Cholesky factor differ so much that only rounding is left.

    Parameters
    ----------
    smallest, largest : float
        The smallest and the largest entry.
    advice : str
        The advice of the error message.
    """
    if smallest * CONDITION < largest:
        condition = (largest / smallest) ** 2 if smallest > 0.0 else np.inf
        raise CurvatureError.of(
            "", "a well conditioned curvature", f"a condition number above {condition:.1g}", advice
        )


def _refuse_singular(precision: np.ndarray, factor: np.ndarray) -> None:
    """Raise `CurvatureError` for a matrix that has a Cholesky factor by rounding alone.

    The pivots of a singular matrix may be as large as 1e-4 of their diagonal entries, so they do not show it. The
    condition number does (an estimate in the 1-norm, of the matrix with its diagonal scaled to ones).
    """
    from scipy.linalg import get_lapack_funcs

    scale = np.sqrt(np.diag(precision))
    if (np.diag(factor) / scale).min(initial=1.0) > SUSPICIOUS:
        return
    norm = float(((np.abs(precision) @ (1.0 / scale)) / scale).max())
    estimate: Any = get_lapack_funcs("pocon", (factor,))
    reciprocal, _ = estimate(np.asfortranarray(factor / scale[:, None]), norm, uplo="L")
    if reciprocal < np.finfo(float).eps:
        refuse_ill_conditioned(float(np.sqrt(reciprocal)), 1.0)


def _checked_linear(size: int, inputs: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Check that inputs (N, T, I) and gradients (N, D, T, O) fit each other and I O = size."""
    inputs, gradients = np.asarray(inputs, dtype=np.float64), np.asarray(gradients, dtype=np.float64)
    fits = (
        inputs.ndim == 3
        and gradients.ndim == 4
        and inputs.shape[:2] == (gradients.shape[0], gradients.shape[2])
        and inputs.shape[2] * gradients.shape[3] == size
    )
    if not fits:
        raise InputError.of(
            "",
            f"inputs (N, T, I) and gradients (N, D, T, O) with I x O = {size}",
            f"{inputs.shape} and {gradients.shape}",
            "an axis of length 1 for T where the map is used once per row",
        )
    return inputs, gradients


def _project_linear(inputs: np.ndarray, gradients: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """J diag(v) J' with J_nd = sum_t a_nt (x) g_ndt, for inputs (N, T, I), gradients (N, D, T, O) and v (I, O)."""
    rows, outputs, places, _ = gradients.shape
    if places == 1:
        # J is an outer product, so that the sum over inputs comes first and leaves one variance per column.
        columns = inputs[:, 0] ** 2 @ variances
        half = gradients[:, :, 0] * np.sqrt(columns)[:, None]
        return half @ half.transpose(0, 2, 1)
    spread = np.sqrt(variances)
    total = np.empty((rows, outputs, outputs))
    step = max(1, HELD // (outputs * variances.size))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        jacobian = inputs[part, None].transpose(0, 1, 3, 2) @ gradients[part]
        jacobian *= spread
        half = jacobian.reshape(len(jacobian), outputs, -1)
        total[part] = half @ half.transpose(0, 2, 1)
    return total
