"""Normals N(0, S) over the flat vector, one class per structure: draws, densities, variances, projections, storage.

A root W of the covariance, W W' = S, is applied and never formed: draws are W eps, and projected variances J S J' =
(J W)(J W)' cannot be negative. No array has size (P, P) except in `Full`, `covariance()` and `precision()`. All but
`LowRankCovariance` come from a precision A = S^-1, see `structures.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import scipy

from ppl_bnn.core.errors import CurvatureError
from ppl_bnn.inference.curvature.linear_algebra import (
    check_condition,
    check_finite,
    check_positive,
    check_regular,
    gram_of,
    project_linear,
    solve_lower,
    span,
)


class FlatGaussian(ABC):
    """Base class of N(0, S). Shapes: P entries of the flat vector, N rows, D outputs per row, M or S points."""

    # The name of the structure, and those of the fields in storage.
    structure: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, structure: str = "", keys: tuple[str, ...] = ()) -> None:
        cls.structure, cls.keys = structure, keys

    def __post_init__(self) -> None:
        # One order in memory, so that arrays read from a file round in the same way as those written.
        for name, value in tuple(vars(self).items()):
            if isinstance(value, np.ndarray):
                array = np.asarray(value, dtype=float, order="F" if name == "cholesky" else "C")
                object.__setattr__(self, name, array)

    @property
    def size(self) -> int:
        """P, the length of the flat vector, which is that of the first field."""
        return len(next(iter(vars(self).values())))

    @property
    @abstractmethod
    def log_determinant(self) -> float:
        """log det of the covariance."""

    def colour(self, eps: np.ndarray) -> np.ndarray:
        """W eps for each row eps of (S, P); not for `Kronecker`, whose parts draw for themselves."""
        raise NotImplementedError

    @abstractmethod
    def whiten(self, rows: np.ndarray) -> np.ndarray:
        """J W of rows J (M, P), (M, K): (J W)(J W)' = J S J'."""

    @abstractmethod
    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        """The quadratic form x' S^-1 x of each row of (S, P), (S,)."""

    def variances(self) -> np.ndarray:
        """The diagonal of S, (P,)."""
        return np.diag(self.covariance())

    def covariance(self) -> np.ndarray:
        """S (P, P), dense."""
        return self.joint(np.eye(self.size)[None])

    def precision(self) -> np.ndarray:
        """A = S^-1 (P, P), dense."""
        return np.linalg.inv(self.covariance())

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Independent draws, (count, P)."""
        return self.colour(rng.standard_normal((count, self.size)))

    def log_prob(self, deviation: np.ndarray) -> np.ndarray:
        """Log density of deviations (S, P) from the mean, (S,)."""
        quadratic = self.quadratic(np.asarray(deviation, dtype=float))
        return -0.5 * (quadratic + self.size * np.log(2.0 * np.pi) + self.log_determinant)

    @property
    def log_volume(self) -> float:
        """log of the integral of exp(-x' A x / 2)."""
        return -float(self.log_prob(np.zeros((1, self.size)))[0])

    def newton_gain(self, gradient: np.ndarray) -> float:
        """The gain of a Newton step in nats, g' S g / 2, for a gradient (P,)."""
        return 0.5 * float(np.sum(self.whiten(gradient[None]) ** 2))

    def project(self, jacobian: np.ndarray) -> np.ndarray:
        """J S J' over the last two axes of a Jacobian (N, D, P), row by row: (N, D, D)."""
        half = self.whiten(jacobian.reshape(-1, self.size)).reshape(*jacobian.shape[:2], -1)
        return half @ half.transpose(0, 2, 1)

    def project_linear(self, inputs: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """J S J', (N, D, D), if the flat vector is the weight (I, O) of a linear map.

        inputs (N, T, I) of the map at its T positions, gradients (N, D, T, O) with respect to its output. The Jacobian
        is sum_t a_nt (x) g_ndt.
        """
        jacobian = np.einsum("nti,ndto->ndio", inputs, gradients)
        return self.project(jacobian.reshape(*jacobian.shape[:2], -1))

    def joint(self, jacobian: np.ndarray) -> np.ndarray:
        """J S J' of a Jacobian (N, D, P) across rows too: (N D, N D), with the outputs of a row adjacent."""
        half = self.whiten(jacobian.reshape(-1, self.size))
        return half @ half.T

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays from which `from_arrays` makes the same object, to the bit."""
        return dict(zip(self.keys, vars(self).values(), strict=True))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The object with these `arrays()`."""
        return cls(*(arrays[key] for key in cls.keys))


@dataclass(frozen=True)
class Full(FlatGaussian, structure="full", keys=("cholesky",)):
    """A = L L' by its Cholesky factor L, lower triangular (P, P)."""

    cholesky: np.ndarray

    @classmethod
    def of(cls, precision: np.ndarray) -> Full:
        """Factorise a precision (P, P).

        Raises `CurvatureError` if it is not finite, indefinite, or too close to singular.
        """
        check_finite("a finite curvature", precision)
        try:
            # The transpose of a symmetric matrix in C order is the same matrix in LAPACK's.
            factor = scipy.linalg.cholesky(precision.T, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            lowest = float(np.linalg.eigvalsh(precision)[0])
            expected = "a positive definite curvature at the mode"
            got = f"a smallest eigenvalue of {lowest:.3g}"
            advice = "repair='clip' where the prior curves upwards, more steps if this is no mode, or a tighter prior"
            raise CurvatureError.of("", expected, got, advice) from None
        diagonal = np.diag(factor)
        check_condition(float(diagonal.min(initial=np.inf)), float(diagonal.max(initial=0.0)))
        check_regular(precision, factor)
        return cls(factor)

    @property
    def log_determinant(self) -> float:
        return -2.0 * float(np.sum(np.log(np.diag(self.cholesky))))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return self.colour(rng.standard_normal((self.size, count)).T)

    def colour(self, eps: np.ndarray) -> np.ndarray:
        """L'^-1 eps has covariance (L L')^-1."""
        return solve_lower(self.cholesky, eps.T, trans=1).T

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        return solve_lower(self.cholesky, rows.T).T

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

    def _inverse(self) -> np.ndarray:
        lapack: Any = scipy.linalg.lapack
        return lapack.dtrtri(self.cholesky, lower=1)[0]


@dataclass(frozen=True)
class Diagonal(FlatGaussian, structure="diag", keys=("precision",)):
    """Independent entries: A = diag(a), with a (P,). Raises `CurvatureError` unless all are positive and finite."""

    values: np.ndarray

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("a finite curvature", self.values)
        check_positive(self.values)

    @property
    def log_determinant(self) -> float:
        return -float(np.sum(np.log(self.values)))

    def colour(self, eps: np.ndarray) -> np.ndarray:
        return eps / np.sqrt(self.values)

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        return rows / np.sqrt(self.values)

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        return deviation**2 @ self.values

    def variances(self) -> np.ndarray:
        return 1.0 / self.values

    def project_linear(self, inputs: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """The Jacobian is formed for T > 1 only, a few rows at a time."""
        variances = 1.0 / self.values
        return project_linear(inputs, gradients, variances.reshape(inputs.shape[-1], gradients.shape[-1]))

    def part(self, where: np.ndarray) -> Diagonal:
        """The Gaussian of the entries at positions `where` (p,)."""
        return Diagonal(self.values[where])


@dataclass(frozen=True)
class LowRankPrecision(FlatGaussian, structure="lowrank", keys=("diagonal", "factor", "cholesky")):
    """A = diag(d) + B' B, with d (P,) positive, B (R, P) and L (R, R): a dense matrix of R rows instead of P.

    With C = B diag(d)^-1/2 and K = I + C C' = L L', (R, R), the determinant is that of K times d, and W = diag(d)^-1/2
    (I - C' L'^-1 (L + I)^-1 C) is a root of A^-1, as in a Kalman filter's update (Andrews 1968). A draw and a projected
    row cost O(R P). A variance that data make k times smaller than the prior's has a relative error of about
    eps sqrt(k) + eps |K|; subtraction by Woodbury's identity, which `variances` uses, has eps k.
    """

    diagonal: np.ndarray
    factor: np.ndarray
    cholesky: np.ndarray

    @classmethod
    def of(cls, diagonal: np.ndarray, factor: np.ndarray, gram: np.ndarray | None = None) -> LowRankPrecision:
        """From d and B, and C C' (R, R) if it is known already.

        Raises `CurvatureError` if d is lost in the rounding of B' B, or the matrix is not positive definite.
        """
        check_finite("a finite curvature", diagonal)
        check_positive(diagonal)
        inner = np.array(gram_of(diagonal, factor) if gram is None else gram)
        check_finite("a finite curvature", inner)
        np.fill_diagonal(inner, inner.diagonal() + 1.0)
        # No eigenvalue of K is below 1, and none is above R times its largest diagonal entry.
        advice = "a prior with larger precision; with structure='lowrank', a larger rank=, tune='global' or "
        largest = float(np.sqrt(inner.diagonal().max(initial=1.0)))
        check_condition(1.0, largest, advice + "structure='full'")
        root = scipy.linalg.cholesky(inner.T, lower=True, overwrite_a=True, check_finite=False)
        return cls(diagonal, factor, root)

    @property
    def log_determinant(self) -> float:
        inner = 2.0 * float(np.sum(np.log(np.diag(self.cholesky))))
        return -float(np.sum(np.log(self.diagonal))) - inner

    def colour(self, eps: np.ndarray) -> np.ndarray:
        return self._update(eps, transposed=True) / np.sqrt(self.diagonal)

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        return self._update(rows / np.sqrt(self.diagonal), transposed=False)

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        return deviation**2 @ self.diagonal + np.sum((deviation @ self.factor.T) ** 2, axis=-1)

    def variances(self) -> np.ndarray:
        """(1 - sum over rows of (L^-1 C)^2) / d; `CurvatureError` if that is below the rounding error of 1."""
        scaled = solve_lower(self.cholesky, self.factor / np.sqrt(self.diagonal))
        left = 1.0 - np.einsum("rp,rp->p", scaled, scaled)
        if left.min(initial=1.0) <= 0.0:
            check_condition(0.0, 1.0)
        return left / self.diagonal

    def precision(self) -> np.ndarray:
        return self.factor.T @ self.factor + np.diag(self.diagonal)

    def diagonal_share(self) -> float:
        """tr(diag(d) A^-1) = P - R + tr(K^-1)."""
        inverse = solve_lower(self.cholesky, np.eye(len(self.cholesky)))
        return float(self.size - len(inverse) + np.sum(inverse**2))

    def project_products(self, spread: np.ndarray, along: np.ndarray) -> np.ndarray:
        """J S J' (N, D, D) from J diag(d)^-1 J' (N, D, D) and J diag(d)^-1 B' (N, D, R), without J.

        In an orthonormal basis U (R, P) of the rows of C, K = Z diag(k) Z', it is (J D U')(k^-1)(J D U')' with D =
        diag(d)^-1/2, and what U leaves out of J D (J D)', whose negative eigenvalues are rounding and set to 0.
        """
        values, vectors = np.linalg.eigh(self.cholesky @ self.cholesky.T)
        some = values > 1.0 + 1e-12 * values.max(initial=1.0)
        half = along @ vectors[:, some] / np.sqrt(values[some] - 1.0)
        outside, rotation = np.linalg.eigh(spread - half @ half.transpose(0, 2, 1))
        rotation *= np.sqrt(np.maximum(outside, 0.0))[:, None]
        half /= np.sqrt(values[some])
        return rotation @ rotation.transpose(0, 2, 1) + half @ half.transpose(0, 2, 1)

    def _update(self, rows: np.ndarray, transposed: bool) -> np.ndarray:
        """Rows times I - C' X C or its transpose, X = L'^-1 (L + I)^-1."""
        shifted = self.cholesky.copy(order="F")
        np.fill_diagonal(shifted, shifted.diagonal() + 1.0)
        scale = np.sqrt(self.diagonal)
        # X' = (L + I)'^-1 L^-1 for the root, X for its transpose.
        first, second = (shifted, self.cholesky) if transposed else (self.cholesky, shifted)
        inner = solve_lower(first, ((rows / scale) @ self.factor.T).T)
        inner = solve_lower(second, inner, trans=1)
        return rows - (inner.T @ self.factor) / scale


@dataclass(frozen=True)
class LowRankCovariance(FlatGaussian):
    """S = D (I + Q (L L' - I) Q') D, D = diag(scale), scale (P,), Q (P, R) with Q' Q = I, L (R, R) lower triangular.

    The root is W = D (I + Q (L - I) Q'). The quadratic form of z = D^-1 x is |z - Q Q' z|^2 + |L^-1 Q' z|^2, a sum of
    squares, where Woodbury's difference would cancel.
    """

    scale: np.ndarray
    basis: np.ndarray
    factor: np.ndarray

    @classmethod
    def of(cls, scale: np.ndarray, factor: np.ndarray, middle: np.ndarray | None = None) -> LowRankCovariance:
        """From S = diag(scale^2) + F' G F with F (K, P) and G = `middle`, by default the identity.

        Raises `LinAlgError` if S is not positive definite.
        """
        basis, upper = np.linalg.qr((factor / scale).T)
        inner = upper @ upper.T if middle is None else upper @ middle @ upper.T
        return cls(scale, basis, np.linalg.cholesky(np.eye(len(upper)) + 0.5 * (inner + inner.T)))

    @property
    def log_determinant(self) -> float:
        return 2.0 * float(np.sum(np.log(self.scale)) + np.sum(np.log(np.diag(self.factor))))

    def colour(self, eps: np.ndarray) -> np.ndarray:
        inside = (eps @ self.basis) @ (self.factor - np.eye(len(self.factor))).T
        return self.scale * (eps + inside @ self.basis.T)

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        rows = rows * self.scale
        return rows + (rows @ self.basis) @ (self.factor - np.eye(len(self.factor))) @ self.basis.T

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        z = deviation / self.scale
        inside = z @ self.basis
        outside = z - inside @ self.basis.T
        return np.sum(outside**2, axis=1) + np.sum(solve_lower(self.factor, inside.T) ** 2, axis=0)


@dataclass(frozen=True)
class Rotated(FlatGaussian, structure="rotated", keys=("left", "right", "precision")):
    """A weight (I, O), ravelled row by row, with independent entries after a rotation of its rows and its columns.

    A = (Q_l (x) Q_r) diag(a) (Q_l (x) Q_r)', with Q_l (I, I) and Q_r (O, O) orthogonal and a (I, O) positive. So W eps
    is Q_l (eps / sqrt(a)) Q_r' for a matrix eps (I, O).
    """

    left: np.ndarray
    right: np.ndarray
    values: np.ndarray

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def log_determinant(self) -> float:
        return -float(np.sum(np.log(self.values)))

    def colour(self, eps: np.ndarray) -> np.ndarray:
        scaled = eps.reshape(-1, *self.values.shape) / np.sqrt(self.values)
        return (self.left @ scaled @ self.right.T).reshape(len(eps), self.size)

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        """J (Q_l (x) Q_r) / sqrt(a), (M, I O)."""
        rotated = self._rotate(rows)
        rotated /= np.sqrt(self.values)
        return rotated.reshape(len(rows), self.size)

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        rotated = self._rotate(deviation)
        return np.einsum("sio,sio,io->s", rotated, rotated, self.values)

    def variances(self) -> np.ndarray:
        return (self.left**2 @ (1.0 / self.values) @ (self.right**2).T).reshape(self.size)

    def precision(self) -> np.ndarray:
        rotation = np.kron(self.left, self.right)
        return (rotation * self.values.reshape(-1)) @ rotation.T

    def project_linear(self, inputs: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """As in `Diagonal`, after a rotation of inputs and gradients."""
        return project_linear(inputs @ self.left, gradients @ self.right, 1.0 / self.values)

    def _rotate(self, rows: np.ndarray) -> np.ndarray:
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
class Kronecker(FlatGaussian, structure="kron"):
    """Independent parts, one per tensor: a weight by Kronecker factors (`Rotated`), small tensors dense (`Full`).

    The positions of the parts make up the flat vector. No array is larger than one factor or the flat vector.
    """

    parts: tuple[Part, ...]

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        return sum(part.gaussian.size for part in self.parts)

    @property
    def log_determinant(self) -> float:
        return sum(part.gaussian.log_determinant for part in self.parts)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return self._by_part(lambda part: part.gaussian.sample(count, rng), (count, self.size))

    def whiten(self, rows: np.ndarray) -> np.ndarray:
        return self._by_part(lambda part: part.gaussian.whiten(rows[:, part.where]), rows.shape)

    def quadratic(self, deviation: np.ndarray) -> np.ndarray:
        each = (part.gaussian.quadratic(deviation[:, part.where]) for part in self.parts)
        return sum(each, start=np.zeros(len(deviation)))

    def variances(self) -> np.ndarray:
        return self._by_part(lambda part: part.gaussian.variances(), (self.size,))

    def _by_part(self, function: Callable[[Part], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        total = np.empty(shape)
        for part in self.parts:
            total[..., part.where] = function(part)
        return total

    def part(self, where: np.ndarray) -> Full | Rotated:
        """The Gaussian of the tensor at positions `where`."""
        return next(part.gaussian for part in self.parts if np.array_equal(part.positions, where))

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays with keys index/structure/array/name. A name may contain further slashes."""
        return {
            f"{index:04d}/{part.gaussian.structure}/{key}/{part.name}": value
            for index, part in enumerate(self.parts)
            for key, value in (part.gaussian.arrays() | {"positions": part.positions}).items()
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Kronecker:
        parts: dict[tuple[int, str, str], dict[str, np.ndarray]] = {}
        for path, value in arrays.items():
            index, structure, key, name = path.split("/", 3)
            parts.setdefault((int(index), structure, name), {})[key] = value
        kinds = {kind.structure: kind for kind in (Full, Rotated)}
        found = []
        for (_, structure, name), values in sorted(parts.items(), key=lambda item: item[0]):
            found.append(Part(name, values["positions"], kinds[structure].from_arrays(values)))
        return cls(tuple(found))


STRUCTURES = {kind.structure: kind for kind in (Full, Diagonal, LowRankPrecision, Kronecker)}
