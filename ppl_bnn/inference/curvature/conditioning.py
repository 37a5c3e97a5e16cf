"""Conditioning of the posterior at a point, a diagnostic for methods that scale each coordinate separately.

Let A be the curvature of -log p(w(u), D) - log |dw/du| at a point, and R = diag(A)^(-1/2) A diag(A)^(-1/2). The
eigenvalues of R give the convergence rate of such a method. 1 / (A_jj (A^-1)_jj) is the share of the variance of
coordinate j that remains if all others are fixed, which is that of the best independent normals.

IVON, SVGD and SWAG do not transform the coordinates. They measure the curvature at the end of the fit, and report "not
converged" if the posterior is too badly scaled for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.inference.curvature.jacobian import hessian_product
from ppl_bnn.inference.flat_vector import minus_log_joint

# The most coordinates for which the curvature is measured: each takes a product of the Hessian with a vector.
LARGEST = 300
# Above this condition number of R no method that scales each coordinate by itself converges: 1e4 relaxation times of
# the stiffest direction.
BAD = 1e4


@dataclass(frozen=True)
class Conditioning:
    """Conditioning of a posterior with the curvature A (P, P) at a point, positive definite."""

    curvature: np.ndarray

    @property
    def scaled(self) -> np.ndarray:
        """Eigenvalues (P,) of R, ascending; their mean is 1."""
        scale = np.sqrt(np.diag(self.curvature))
        return np.linalg.eigvalsh(self.curvature / np.outer(scale, scale))

    @property
    def variances(self) -> np.ndarray:
        """The diagonal of A^-1 (P,): the variances of the normal with this curvature."""
        return np.diag(np.linalg.inv(self.curvature))

    @property
    def number(self) -> float:
        """The condition number of R."""
        values = self.scaled
        return float(values[-1] / values[0])

    def explanation(self) -> str:
        """A description of the problem for a warning, with advice."""
        return (
            f"the posterior is badly scaled: with each coordinate in units of its own curvature there, the condition "
            f"number is {self.number:.2g}, as of collinear inputs: try Laplace(), NUTS(), or inputs that are not "
            "collinear"
        )


def conditioning(problem: Problem, flat: np.ndarray) -> Conditioning | None:
    """The curvature at a flat vector of all sites; None above `LARGEST` coordinates, or if not positive definite.

    It takes P products of the Hessian with a vector, about two gradients each.
    """
    size, program, system = len(flat), problem.program, problem.system
    if size > LARGEST:
        return None

    loss = minus_log_joint(program)

    def product(at: Any, direction: Any, x: Any, y: Any) -> Any:
        return hessian_product(system, loss, at, x, y)(direction)

    compiled = program.cached("Hessian times a vector", lambda: system.compile(product))
    at, x, y = system.asarray(flat), problem.x, problem.y
    columns = (compiled(at, system.asarray(row), x, y) for row in np.eye(size))
    matrix = np.stack([np.asarray(system.to_numpy(column), dtype=np.float64) for column in columns])
    if not np.isfinite(matrix).all():
        return None
    found = Conditioning(0.5 * (matrix + matrix.T))
    # An eigenvalue of R below this is rounding.
    positive = np.diag(matrix).min() > 0.0 and found.scaled[0] >= 1e-12 * size
    return found if positive else None
