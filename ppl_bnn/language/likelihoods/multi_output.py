"""Several outputs with correlated noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.likelihoods.base import Likelihood, Shape


def _triangle(outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of a lower triangle: first the diagonal, then the entries below it, row by row."""
    rows, columns = np.tril_indices(outputs, -1)
    diagonal = np.arange(outputs)
    return np.concatenate([diagonal, rows]), np.concatenate([diagonal, columns])


@dataclass(frozen=True)
class MultiOutputGaussian(Likelihood):
    """Gaussian noise with one covariance for all rows, y_n ~ N(f_n, L L').

    Outputs are correlated given the weights. f and y are (N, K), K of at least 2.

    eta = (f, log of the diagonal of L, the rest of L row by row), D = K + K (K + 1) / 2. The Fisher information is (L
    L')^-1 in f, and between directions A and B of L, with M = L^-1 A and M~ = L^-1 B (lower triangular),

        2 sum_i M_ii M~_ii + sum_(i > j) M_ij M~_ij.

    A prediction has the family `MultivariateNormal`: log densities are joint over a row; intervals, quantiles and CRPS
    are per output.

    Parameters
    ----------
    scale_tril : array
        L (K, K), lower triangular with a positive diagonal: known, or sampled, as from `priors.CovarianceFactor`.

    Raises
    ------
    InputError
        A NumPy matrix that is not lower triangular with a positive diagonal.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> noise = bnn.likelihoods.MultiOutputGaussian(np.linalg.cholesky([[1.0, 0.8], [0.8, 1.0]]))
    >>> model = lambda x, y=None: bnn.observe(y, bnn.mlp(x, [2]), noise)
    >>> bnn.zoo.sketch(model, 4).task
    'regression'
    """

    scale_tril: Any
    arrays = ("scale_tril",)
    per_output = True

    def __post_init__(self) -> None:
        if isinstance(self.scale_tril, list | tuple):
            object.__setattr__(self, "scale_tril", np.asarray(self.scale_tril, dtype=float))
        dist.check_factor("likelihoods.MultiOutputGaussian", self.scale_tril)

    def check(self, f: Shape, y: Shape | None) -> None:
        shape = tuple(getattr(self.scale_tril, "shape", ()))
        good = f[1] > 1 and shape == (f[1], f[1])
        expected = f"K >= 2 outputs and scale_tril (K, K), here {(f[1], f[1])}"
        got, advice = f"f of shape {f} and scale_tril of shape {shape}", "Gaussian for independent outputs"
        ModelError.check(good, self.family, expected, got, f"likelihoods.{advice}")
        super().check(f, y)

    def distribution(self, f: Any) -> dist.Distribution:
        return dist.distribution("RowNormal", f, ops.asarray(self.scale_tril, like=f))

    def predictor(self, f: Any) -> Any:
        outputs = int(f.shape[-1])
        rows, columns = _triangle(outputs)
        entries = ops.asarray(self.scale_tril, like=f).reshape(-1)[rows * outputs + columns]
        entries = ops.concatenate([ops.log(entries[:outputs]), entries[outputs:]])
        return ops.concatenate([f, ops.broadcast_to(entries, (f.shape[0], int(entries.shape[0])))])

    @staticmethod
    def _parts(eta: Any) -> tuple[Any, Any]:
        """(f, L), (..., K) and (..., K, K)."""
        # D = K (K + 3) / 2
        outputs = (math.isqrt(9 + 8 * int(eta.shape[-1])) - 3) // 2
        rows, columns = _triangle(outputs)
        # For each entry of L its number in the triangle; above the diagonal that of a zero after the others.
        number = np.full((outputs, outputs), len(rows))
        number[rows, columns] = np.arange(len(rows))
        f, logs, below = eta[..., :outputs], eta[..., outputs : 2 * outputs], eta[..., 2 * outputs :]
        return f, ops.concatenate([ops.exp(logs), below, ops.zeros_like(f[..., :1])])[..., number]

    def fisher_root(self, eta: Any) -> Any:
        f, factor = self._parts(eta)
        outputs, count = int(f.shape[-1]), int(f.shape[0])
        rows, columns = _triangle(outputs)
        inverse = ops.namespace(eta).linalg.inv(factor)
        flat = inverse.reshape(count, outputs * outputs)
        # M = L^-1 e_a e_b' for the entry (a, b) of L: M_ij is (L^-1)_ia where j = b.
        which = rows[None, :] * outputs + rows[:, None]
        weight = (columns[:, None] == columns[None, :]) * np.where(rows == columns, math.sqrt(2.0), 1.0)
        of_factor = flat[:, which] * ops.asarray(weight, like=eta)
        diagonal = ops.exp(eta[:, outputs : 2 * outputs])
        # The diagonal of L has logarithms as coordinates.
        unit = ops.concatenate([diagonal, ops.ones_like(eta[:, 2 * outputs :])])
        of_factor = unit[:, :, None] * of_factor
        of_f, none = ops.einsum("nij->nji", inverse), ops.zeros_like(eta[:, :1, None])
        right = ops.broadcast_to(none, (count, outputs, len(rows)))
        left = ops.broadcast_to(none, (count, len(rows), outputs))
        return ops.concatenate([ops.concatenate([of_f, right]), ops.concatenate([left, of_factor])], -2)

    def score(self, eta: Any, y: Any) -> Any:
        f, factor = self._parts(eta)
        outputs = int(f.shape[-1])
        rows, columns = _triangle(outputs)
        inverse = ops.namespace(eta).linalg.inv(factor)
        z = ops.einsum("nij,nj->ni", inverse, y - f)
        of_f = ops.einsum("nji,nj->ni", inverse, z)
        entries = of_f[:, rows] * z[:, columns]
        diagonal = ops.exp(eta[:, outputs : 2 * outputs])
        return ops.concatenate([of_f, diagonal * entries[:, :outputs] - 1.0, entries[:, outputs:]])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        loc, factor = self._parts(eta)
        return "MultivariateNormal", {"loc": loc, "scale_tril": factor}
