"""Gaussians over the flat vector of latent sites: sample, quadratic form, log-determinant.

One class per structure of the precision matrix. NumPy and SciPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppl_bnn.errors import CurvatureError, message


@dataclass(frozen=True)
class Full:
    """N(0, A^-1) by the Cholesky factor of its precision, A = L L', L lower triangular (P, P)."""

    cholesky: np.ndarray

    @classmethod
    def of(cls, precision: np.ndarray) -> Full:
        """Factorise a precision matrix (P, P).

        Raises
        ------
        CurvatureError: not finite, indefinite, or so close to singular that some direction has no usable variance.
        """
        from scipy.linalg import cholesky

        if not np.all(np.isfinite(precision)):
            raise CurvatureError(
                message(
                    "a finite curvature",
                    "NaN or infinity",
                    "a mode with finite density: other start, or standardise=True",
                )
            )
        try:
            factor = cholesky(precision, lower=True)
        except np.linalg.LinAlgError:
            lowest = float(np.linalg.eigvalsh(precision)[0])
            raise CurvatureError(
                message(
                    "a positive definite curvature at the mode",
                    f"a smallest eigenvalue of {lowest:.3g}",
                    "repair='clip' where the prior curves upwards, more steps if this is no mode, or a tighter prior",
                )
            ) from None
        diagonal = np.diag(factor)
        if diagonal.min() < 1e-7 * diagonal.max():
            raise CurvatureError(
                message(
                    "a well conditioned curvature",
                    f"a condition number above {(diagonal.max() / diagonal.min()) ** 2:.1g}",
                    "a proper prior on every weight",
                )
            )
        return cls(factor)

    @property
    def size(self) -> int:
        return len(self.cholesky)

    @property
    def log_determinant(self) -> float:
        """log det of the covariance A^-1."""
        return -2.0 * float(np.sum(np.log(np.diag(self.cholesky))))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count, P) draws: L'^-1 eps has covariance (L L')^-1."""
        from scipy.linalg import solve_triangular

        eps = rng.standard_normal((self.size, count))
        return solve_triangular(self.cholesky, eps, lower=True, trans=1).T

    def log_prob(self, deviation: np.ndarray) -> np.ndarray:
        """log density of deviations (S, P) from the mean, (S,)."""
        quadratic = np.sum((deviation @ self.cholesky) ** 2, axis=-1)
        return -0.5 * (quadratic + self.size * np.log(2.0 * np.pi) + self.log_determinant)

    def project(self, jacobian: np.ndarray) -> np.ndarray:
        """J A^-1 J' over the last two axes of a Jacobian (N, D, P): (N, D, D)."""
        from scipy.linalg import solve_triangular

        rows, outputs, size = jacobian.shape
        half = solve_triangular(self.cholesky, jacobian.reshape(-1, size).T, lower=True)
        half = half.T.reshape(rows, outputs, size)
        return half @ half.transpose(0, 2, 1)

    def covariance(self) -> np.ndarray:
        """A^-1 (P, P)."""
        from scipy.linalg import cho_solve

        return cho_solve((self.cholesky, True), np.eye(self.size))
