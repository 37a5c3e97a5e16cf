"""Linear algebra of covariances and precisions, with the checks that refuse what only rounding would make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from ppl_bnn.core.errors import CurvatureError

# Largest ratio of two entries on the diagonal of a Cholesky factor: the condition number is about its square.
CONDITION = 1e7
# Pivot relative to its diagonal entry. No matrix that is singular up to rounding was seen with a larger one.
SUSPICIOUS = 1e-3
# Floats that a projection of linear maps with several positions may hold at once.
MOST_FLOATS = 2**24


def solve_lower(triangle: np.ndarray, right: np.ndarray, trans: int = 0) -> np.ndarray:
    """L^-1 B, or L'^-1 B with trans=1, for a lower triangular L."""
    return scipy.linalg.solve_triangular(triangle, right, lower=True, trans=trans, check_finite=False)


def gram_of(diagonal: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """B diag(d)^-1 B', (R, R), of d (P,) and B (R, P)."""
    scaled = factor / np.sqrt(diagonal)
    # A product of an array with its own transpose is computed as one triangle.
    return scaled @ scaled.T


def span(positions: np.ndarray) -> Any:
    """Positions as a slice if they are consecutive."""
    if len(positions) and np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))):
        return slice(int(positions[0]), int(positions[0]) + len(positions))
    return positions


def check_finite(expected: str, *arrays: np.ndarray) -> None:
    """Raise `CurvatureError` if any value is NaN or infinite."""
    finite = all(np.all(np.isfinite(array)) for array in arrays)
    advice = "a mode with finite density: other start, or standardise=True"
    CurvatureError.check(finite, "", expected, "NaN or infinity", advice)


def check_positive(values: np.ndarray) -> None:
    """Raise `CurvatureError` if an entry of a diagonal precision is zero or negative."""
    if values.min(initial=np.inf) <= 0.0:
        got = f"{values.min():.3g}, and {int(np.sum(values <= 0.0))} of {values.size} that are not positive"
        advice = "a proper prior on every weight; repair='clip' where the prior curves upwards"
        raise CurvatureError.of("", "a positive precision in every direction", got, advice)


def check_condition(smallest: float, largest: float, advice: str = "a proper prior on every weight") -> None:
    """Raise `CurvatureError` if entries of a Cholesky factor differ so much that only rounding is left."""
    if smallest * CONDITION < largest:
        condition = (largest / smallest) ** 2 if smallest > 0.0 else np.inf
        got = f"a condition number above {condition:.1g}"
        raise CurvatureError.of("", "a well conditioned curvature", got, advice)


def check_regular(precision: np.ndarray, factor: np.ndarray) -> None:
    """Raise `CurvatureError` for a matrix that has a Cholesky factor by rounding alone.

    Its pivots may be 1e-4 of their diagonal entries, so the condition number is checked (an estimate in the 1-norm, of
    the matrix with its diagonal scaled to ones).
    """
    scale = np.sqrt(np.diag(precision))
    if (np.diag(factor) / scale).min(initial=1.0) > SUSPICIOUS:
        return
    norm = float(((np.abs(precision) @ (1.0 / scale)) / scale).max())
    lapack: Any = scipy.linalg.lapack
    reciprocal, _ = lapack.dpocon(np.asfortranarray(factor / scale[:, None]), norm, uplo="L")
    if reciprocal < np.finfo(float).eps:
        check_condition(float(np.sqrt(reciprocal)), 1.0)


def project_linear(inputs: np.ndarray, gradients: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """J diag(v) J' with J_nd = sum_t a_nt (x) g_ndt, for inputs (N, T, I), gradients (N, D, T, O) and v (I, O)."""
    rows, outputs, places, _ = gradients.shape
    if places == 1:
        # J is an outer product, so that the sum over inputs comes first and leaves one variance per column.
        columns = inputs[:, 0] ** 2 @ variances
        half = gradients[:, :, 0] * np.sqrt(columns)[:, None]
        return half @ half.transpose(0, 2, 1)
    spread = np.sqrt(variances)
    total = np.empty((rows, outputs, outputs))
    step = max(1, MOST_FLOATS // (outputs * variances.size))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        jacobian = inputs[part, None].transpose(0, 1, 3, 2) @ gradients[part]
        jacobian *= spread
        half = jacobian.reshape(len(jacobian), outputs, -1)
        total[part] = half @ half.transpose(0, 2, 1)
    return total
