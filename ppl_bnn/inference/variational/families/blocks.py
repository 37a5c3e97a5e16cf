"""Families of distributions over blocks of unconstrained coordinates.

A block is one family over some sites, flattened and joined in the order of the program to a flat vector (P,). All
mathematics is written over `ppl_bnn.language.ops`: the same code runs on NumPy, torch and JAX, with any leading axes on
the noise and on u, and is differentiable. Standard deviations are softplus of the optimised parameter, as in NumPyro,
in Pyro and in Blundell et al. (2015). The diagonals of triangular factors are parametrised in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.protocol import Site
from ppl_bnn.core.errors import InputError, UnsupportedError, unknown_name
from ppl_bnn.inference.variational.families.base import (
    DENSE_LIMIT,
    LOG_2PI,
    Array,
    Block,
    Family,
    Parameters,
    inverse_softplus,
    log_normal,
    too_large,
    whole_sites,
)
from ppl_bnn.language import ops
from ppl_bnn.language.transforms import GaussianPrior

# --- independent normals -----------------------------------------------------------------------------


@dataclass(frozen=True)
class NormalBlock(Block):
    """Independent normals, q(u) = prod_j N(u_j; loc_j, softplus(rho_j)^2).

    `params`: loc (P,), rho (P,).
    """

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"loc": np.array(loc), "rho": inverse_softplus(np.broadcast_to(scale, loc.shape))}

    def scale(self, params: Parameters) -> Array:
        """Standard deviations (P,)."""
        return ops.softplus(params["rho"])

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        scale = self.scale(params)
        return params["loc"] + scale * eps, log_normal(eps, ops.sum(ops.log(scale)))

    def log_prob(self, params: Parameters, u: Array) -> Array:
        return log_normal(self.standardised(params, u), ops.sum(ops.log(self.scale(params))))

    def standardised(self, params: Parameters, u: Array) -> Array:
        """The noise eps with u = loc + scale eps."""
        return (u - params["loc"]) / self.scale(params)

    def mean(self, params: Parameters) -> Array:
        return params["loc"]

    def variance(self, params: Parameters) -> Array:
        scale = self.scale(params)
        return scale * scale

    def entropy(self, params: Parameters) -> Array:
        return ops.sum(ops.log(self.scale(params))) + 0.5 * self.size * (1.0 + LOG_2PI)

    def as_prior(self, params: Parameters) -> GaussianPrior:
        return GaussianPrior(self.split(params["loc"]), scale=self.split(self.scale(params)))


@dataclass(frozen=True)
class Normal(Family):
    """Independent normals (mean field): loc + softplus(rho) eps.

    References
    ----------
    Blundell et al. (2015); Kucukelbir et al. (2017).
    """

    name: ClassVar[str] = "normal"

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        return [NormalBlock(tuple(sites))]


# --- Gaussians with dependence -----------------------------------------------------------------------


def _unit_lower(below: Array) -> Array:
    """The lower-triangular matrix with a unit diagonal and the entries of `below` (D, D) below it."""
    return ops.namespace(below).tril(below, -1) + ops.diagonal_matrix(ops.ones_like(below[0]))


def _root_rows(lower: Array) -> Array:
    """Sums of squares of the rows of a matrix: the diagonal of lower lower', (D,)."""
    return ops.sum(lower * lower, -1)


@dataclass(frozen=True)
class LowRankBlock(Block):
    """A normal with covariance S (I + F F') S, S = diag(s): u = loc + s (F e + eps).

    e are R and eps P standard normals. `params`: loc (P,), rho (P,) with s = softplus(rho), factor F (P, R).

    Attributes
    ----------
    rank : int
        R.

    Notes
    -----
    With C = I + F'F, whose eigenvalues are at least one, log det = 2 sum log s + log det C, and the squared distance of
    z = (u - loc) / s is |z - F c|^2 + |c|^2 with c = C^-1 F'z. This is a sum of squares; the difference |z|^2 - z'Fc of
    Woodbury's formula would cancel.
    """

    rank: int

    @property
    def noise_size(self) -> int:
        return self.rank + self.size

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # At F = 0 the expected gradient in F is zero, so F starts small, with a hundredth of the variance.
        factor = 0.1 / math.sqrt(self.rank) * rng.standard_normal((self.size, self.rank))
        own = np.broadcast_to(scale, loc.shape) / np.sqrt(1.0 + _root_rows(factor))
        return {"loc": np.array(loc), "rho": inverse_softplus(own), "factor": factor}

    def _capacitance(self, factor: Array) -> tuple[Array, Array]:
        """(Cholesky factor of C = I + F'F, log det C)."""
        gram = factor.T @ factor + ops.diagonal_matrix(ops.ones_like(factor[0]))
        root = ops.namespace(gram).linalg.cholesky(gram)
        return root, 2.0 * ops.sum(ops.log(ops.einsum("ii->i", root)))

    def _log_density(self, params: Parameters, scale: Array, z: Array) -> Array:
        factor = params["factor"]
        root, log_determinant = self._capacitance(factor)
        inverse = ops.solve_triangular(root, ops.diagonal_matrix(ops.ones_like(factor[0]))).T
        c = (z @ factor) @ inverse.T @ inverse
        rest = z - c @ factor.T
        distance = ops.sum(rest * rest, -1) + ops.sum(c * c, -1)
        return -0.5 * (distance + log_determinant + self.size * LOG_2PI) - ops.sum(ops.log(scale))

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        scale = ops.softplus(params["rho"])
        z = eps[..., : self.rank] @ params["factor"].T + eps[..., self.rank :]
        return params["loc"] + scale * z, self._log_density(params, scale, z)

    def log_prob(self, params: Parameters, u: Array) -> Array:
        scale = ops.softplus(params["rho"])
        return self._log_density(params, scale, (u - params["loc"]) / scale)

    def mean(self, params: Parameters) -> Array:
        return params["loc"]

    def variance(self, params: Parameters) -> Array:
        scale = ops.softplus(params["rho"])
        return scale * scale * (1.0 + _root_rows(params["factor"]))

    def entropy(self, params: Parameters) -> Array:
        log_scale = ops.sum(ops.log(ops.softplus(params["rho"])))
        return log_scale + 0.5 * self._capacitance(params["factor"])[1] + 0.5 * self.size * (1.0 + LOG_2PI)

    def as_prior(self, params: Parameters) -> GaussianPrior:
        if self.size > DENSE_LIMIT:
            raise UnsupportedError.of(
                "with_prior",
                f"at most {DENSE_LIMIT} coordinates in a block, for their precision is dense",
                f"{self.size} of 'lowrank' over {', '.join(self.names)}",
                "guide='normal' or 'matrixnormal'",
            )
        scale, factor = ops.softplus(params["rho"]), params["factor"]
        half = ops.solve_triangular(self._capacitance(factor)[0], factor)
        precision = (np.eye(self.size) - half @ half.T) / np.outer(scale, scale)
        return GaussianPrior(self.split(params["loc"]), joint=((self.names, precision),))


@dataclass(frozen=True)
class LowRank(Family):
    """A normal with covariance of diagonal plus low rank [1]_, S (I + F F') S, one joint distribution over the sites.

    The coordinates are those of AutoLowRankMultivariateNormal of NumPyro and Pyro.

    Parameters
    ----------
    rank : int or None
        Columns of F. None for the square root of the number of coordinates, as in both systems.

    References
    ----------
    .. [1] Ong, Nott and Smith (2018).
    """

    name: ClassVar[str] = "lowrank"
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            whole_sites("LowRank", "rank", self.rank, 1)

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        size = sum(site.size for site in sites)
        rank = max(1, round(math.sqrt(size))) if self.rank is None else int(self.rank)
        if rank > size:
            raise InputError.of(
                "LowRank rank", f"at most the {size} coordinates there are", repr(rank), f"rank={size}"
            )
        return [LowRankBlock(tuple(sites), rank)]


@dataclass(frozen=True)
class FullRankBlock(Block):
    """A normal with covariance L L': u = loc + L eps, L = diag(s) (I + T), T strictly lower triangular.

    `params`: loc (P,), rho (P,) with s = softplus(rho), lower (P, P), of which only the part below the diagonal is
    used. A step in T therefore has the same meaning whatever the scale of its row.
    """

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        spread = np.broadcast_to(scale, loc.shape)
        return {
            "loc": np.array(loc),
            "rho": inverse_softplus(spread),
            "lower": np.zeros((self.size, self.size)),
        }

    def start_from(self, loc: np.ndarray, covariance: Any) -> dict[str, np.ndarray]:
        """Parameters at which q is N(loc, covariance).

        Parameters
        ----------
        loc : ndarray
            Shape (P,).
        covariance : ndarray
            Shape (P, P).

        Returns
        -------
        dict of str to ndarray
            The parameters.

        Raises
        ------
        InputError
            A matrix of another shape, or not symmetric and positive definite.
        """
        matrix = np.asarray(covariance, dtype=float)
        got = f"shape {matrix.shape}"
        if matrix.shape == (self.size, self.size):
            got = "one that is not"
            if np.all(np.isfinite(matrix)) and np.allclose(matrix, matrix.T):
                try:
                    root = np.linalg.cholesky(matrix)
                except np.linalg.LinAlgError:
                    pass
                else:
                    scale = np.diag(root)
                    below = np.tril(root / scale[:, None], -1)
                    return {"loc": np.array(loc), "rho": inverse_softplus(scale), "lower": below}
        raise InputError.of(
            "guide",
            f"a symmetric positive definite covariance {(self.size, self.size)} at the start",
            got,
            "a scale, or more draws than coordinates",
        )

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        scale = ops.softplus(params["rho"])
        z = eps @ _unit_lower(params["lower"]).T
        return params["loc"] + scale * z, log_normal(eps, ops.sum(ops.log(scale)))

    def log_prob(self, params: Parameters, u: Array) -> Array:
        return log_normal(self.standardised(params, u), ops.sum(ops.log(ops.softplus(params["rho"]))))

    def standardised(self, params: Parameters, u: Array) -> Array:
        """The noise eps with u = loc + L eps."""
        scaled = (u - params["loc"]) / ops.softplus(params["rho"])
        return ops.solve_triangular(_unit_lower(params["lower"]), scaled)

    def mean(self, params: Parameters) -> Array:
        return params["loc"]

    def variance(self, params: Parameters) -> Array:
        scale = ops.softplus(params["rho"])
        return scale * scale * _root_rows(_unit_lower(params["lower"]))

    def entropy(self, params: Parameters) -> Array:
        return ops.sum(ops.log(ops.softplus(params["rho"]))) + 0.5 * self.size * (1.0 + LOG_2PI)

    def as_prior(self, params: Parameters) -> GaussianPrior:
        scale = ops.softplus(params["rho"])
        inverse = ops.solve_triangular(_unit_lower(params["lower"]), np.eye(self.size)).T / scale
        return GaussianPrior(self.split(params["loc"]), joint=((self.names, inverse.T @ inverse),))


@dataclass(frozen=True)
class FullRank(Family):
    """A normal with any covariance, jointly over the sites.

    The factor is dense, so the number of coordinates is limited to DENSE_LIMIT.

    References
    ----------
    Titsias and Lazaro-Gredilla (2014); Kucukelbir et al. (2017).
    """

    name: ClassVar[str] = "fullrank"

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        size = sum(site.size for site in sites)
        if size > DENSE_LIMIT:
            raise too_large("FullRank", "coordinates", size)
        return [FullRankBlock(tuple(sites))]


@dataclass(frozen=True)
class MatrixNormalBlock(Block):
    """A matrix normal W = M + A E B' for one site as a matrix (I, O).

    The covariance is A A' over its rows and B B' over its columns.

    A = diag(a) (I + T), B = diag(b) (I + R), with T and R strictly lower triangular. b_0 = 1, because A and B could
    otherwise exchange a factor without a change of q. `params`: loc (I * O,), rows (I,) with a = softplus(rows),
    rows_lower (I, I), columns (O - 1,) with b_1, ... = softplus(columns), columns_lower (O, O).
    """

    @property
    def matrix(self) -> tuple[int, int]:
        """(I, O): the last axis is O, all other axes together are I."""
        return self.size // self.shapes[0][-1], self.shapes[0][-1]

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # The initial standard deviations a_i b_j are the closest to the requested ones, in logarithms.
        logs = np.log(np.broadcast_to(scale, loc.shape).reshape(self.matrix))
        rows, columns = logs.mean(1), logs.mean(0) - logs.mean()
        return {
            "loc": np.array(loc),
            "rows": inverse_softplus(np.exp(rows + columns[0])),
            "rows_lower": np.zeros((self.matrix[0],) * 2),
            "columns": inverse_softplus(np.exp(columns[1:] - columns[0])),
            "columns_lower": np.zeros((self.matrix[1],) * 2),
        }

    def _scales(self, params: Parameters) -> tuple[Array, Array]:
        """(a (I,), b (O,))."""
        rows = ops.softplus(params["rows"])
        return rows, ops.concatenate([ops.ones_like(rows[:1]), ops.softplus(params["columns"])])

    def _log_determinant(self, rows: Array, columns: Array) -> Array:
        return self.matrix[1] * ops.sum(ops.log(rows)) + self.matrix[0] * ops.sum(ops.log(columns))

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        rows, columns = self._scales(params)
        lead = tuple(eps.shape[:-1])
        left, right = _unit_lower(params["rows_lower"]), _unit_lower(params["columns_lower"])
        z = left @ eps.reshape(lead + self.matrix) @ right.T
        deviation = (rows[:, None] * columns * z).reshape((*lead, self.size))
        return params["loc"] + deviation, log_normal(eps, self._log_determinant(rows, columns))

    def log_prob(self, params: Parameters, u: Array) -> Array:
        rows, columns = self._scales(params)
        lead = tuple(u.shape[:-1])
        z = (u - params["loc"]).reshape(lead + self.matrix) / rows[:, None] / columns
        z = ops.solve_triangular(_unit_lower(params["columns_lower"]), z)
        z = ops.namespace(z).swapaxes(z, -1, -2)
        z = ops.solve_triangular(_unit_lower(params["rows_lower"]), z).reshape((*lead, self.size))
        return log_normal(z, self._log_determinant(rows, columns))

    def mean(self, params: Parameters) -> Array:
        return params["loc"]

    def variance(self, params: Parameters) -> Array:
        rows, columns = self._scales(params)
        over_rows = rows * rows * _root_rows(_unit_lower(params["rows_lower"]))
        over_columns = columns * columns * _root_rows(_unit_lower(params["columns_lower"]))
        return (over_rows[:, None] * over_columns).reshape(-1)

    def entropy(self, params: Parameters) -> Array:
        return self._log_determinant(*self._scales(params)) + 0.5 * self.size * (1.0 + LOG_2PI)

    def as_prior(self, params: Parameters) -> GaussianPrior:
        rows, columns = self._scales(params)
        factors = (
            rows[:, None] * _unit_lower(params["rows_lower"]),
            columns[:, None] * _unit_lower(params["columns_lower"]),
        )
        (left, rows, _), (right, columns, _) = map(np.linalg.svd, factors)
        precisions = 1.0 / np.outer(rows, columns) ** 2
        return GaussianPrior(self.split(params["loc"]), kronecker={self.names[0]: (left, right, precisions)})


@dataclass(frozen=True)
class MatrixNormal(Family):
    """A matrix-variate normal for each weight tensor, independent of the others [1]_.

    A site (..., O) is the matrix (I, O) with I all axes but the last: (fan_in, width), or (kh * kw * C, O) for a
    convolution. Each site with fewer than two axes, such as a bias, has a full-rank normal.

    References
    ----------
    .. [1] Louizos and Welling (2016).
    """

    name: ClassVar[str] = "matrixnormal"

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        blocks: list[Block] = []
        for site in sites:
            if len(site.unconstrained_shape) < 2:
                blocks += FullRank().bind([site])
                continue
            block = MatrixNormalBlock((site,))
            if max(block.matrix) > DENSE_LIMIT:
                raise too_large("MatrixNormal", f"rows and columns in {site.name!r}", max(block.matrix))
            blocks.append(block)
        return blocks


# --- mixtures and points -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MixtureBlock(Block):
    """A mixture of independent normals, q(u) = sum_k pi_k prod_j N(u_j; loc_kj, softplus(rho_kj)^2).

    The weights are pi = softmax(logits).

    `params`: loc (K, P), rho (K, P), logits (K,). One sample is a draw of each component, weighted with pi. This is
    differentiable in pi, unlike a component picked at random, and has a lower variance.

    Attributes
    ----------
    components : int
        K > 1.
    """

    components: int

    @property
    def strata(self) -> int:
        return self.components

    @property
    def has_centre(self) -> bool:
        return False

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # Equal components would always move together, so they start apart, by a quarter of the variance per coordinate.
        spread = np.broadcast_to(scale, loc.shape)
        drawn = rng.standard_normal((self.components, self.size))
        apart = 0.5 * (drawn - drawn.mean(0)) / drawn.std(0)
        return {
            "loc": loc + spread * apart,
            "rho": inverse_softplus(np.broadcast_to(math.sqrt(0.75) * spread, apart.shape)),
            "logits": np.zeros(self.components),
        }

    def log_weights(self, params: Parameters) -> Array:
        return ops.log_softmax(params["logits"])

    def _log_density(self, params: Parameters, scale: Array, z: Array) -> Array:
        """log q (...) from z (..., K, P), the standardised distances to each component."""
        each = log_normal(z, ops.sum(ops.log(scale), -1))
        return ops.logsumexp(self.log_weights(params) + each)

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        loc, scale = params["loc"], ops.softplus(params["rho"])
        step = scale * eps
        # Differences of locations first, so that the distance of a draw to its own component is eps without rounding.
        z = (loc[:, None] - loc[None] + step[..., :, None, :]) / scale
        return loc + step, self._log_density(params, scale, z)

    def log_prob(self, params: Parameters, u: Array) -> Array:
        scale = ops.softplus(params["rho"])
        return self._log_density(params, scale, (u[..., None, :] - params["loc"]) / scale)

    def mean(self, params: Parameters) -> Array:
        return ops.softmax(params["logits"]) @ params["loc"]

    def variance(self, params: Parameters) -> Array:
        weights, scale = ops.softmax(params["logits"]), ops.softplus(params["rho"])
        return weights @ (scale * scale + (params["loc"] - self.mean(params)) ** 2)

    def sample(self, params: Parameters, count: int, rng: np.random.Generator) -> np.ndarray:
        picked = rng.choice(self.components, size=count, p=ops.softmax(params["logits"]))
        scale = ops.softplus(params["rho"])
        return params["loc"][picked] + scale[picked] * rng.standard_normal((count, self.size))

    def centre(self, params: Parameters) -> np.ndarray:
        """The mean of the component with the largest weight; the mean of the mixture may have no mass around it."""
        return params["loc"][int(np.argmax(params["logits"]))]


@dataclass(frozen=True)
class Mixture(Family):
    """A mixture of independent normals, one joint distribution over the sites [1]_, with stratified draws [2]_.

    A step costs one pass through the network per component.

    **The components are independent normals, so a few of them cover a correlated posterior only in part** (see Notes).

    Parameters
    ----------
    components : int, default 3
        K; 1 is the same as "diagonal".

    Notes
    -----
    For a normal in four dimensions with condition number 21 and correlations up to 0.73, the member of the family that
    is closest in KL(q || p) has these shares of the variances of the coordinates::

        K                              1           2           3           5          10
        KL in nats                  1.08        0.68        0.53        0.34        0.17
        smallest, largest share  0.21 0.80   0.48 0.80   0.53 0.80   0.68 0.86   0.81 0.90

    SVI at its defaults comes within 0.01 nats of it, so more steps or restarts change nothing
    (`comparisons/performance/badly_scaled.py --only mixtures`). For correlations, "fullrank" is exact.

    References
    ----------
    .. [1] Jaakkola and Jordan (1998).
    .. [2] Morningstar et al. (2021).
    """

    name: ClassVar[str] = "mixture"
    components: int = 3

    def __post_init__(self) -> None:
        whole_sites("Mixture", "components", self.components, 1)

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        if self.components == 1:
            return [NormalBlock(tuple(sites))]
        return [MixtureBlock(tuple(sites), int(self.components))]


@dataclass(frozen=True)
class DeltaBlock(Block):
    """A point, u = loc (P,).

    It has no density. By convention log q and the entropy are 0, so its evidence bound is the log joint, with the
    optimum at a mode. `params`: loc (P,).
    """

    @property
    def noise_size(self) -> int:
        return 0

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"loc": np.array(loc)}

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        # eps (..., 0) only has the number of draws; its empty sum is a zero for each.
        return ops.broadcast_to(params["loc"], (*eps.shape[:-1], self.size)), ops.sum(eps, -1)

    def log_prob(self, params: Parameters, u: Array) -> Array:
        return ops.zeros_like(u[..., 0])

    def mean(self, params: Parameters) -> Array:
        return params["loc"]

    def variance(self, params: Parameters) -> Array:
        return ops.zeros_like(params["loc"])

    def entropy(self, params: Parameters) -> Array:
        return ops.zeros_like(params["loc"][0])


@dataclass(frozen=True)
class Delta(Family):
    """A point: the mode of the sites given the rest of the guide (a MAP estimate in unconstrained coordinates)."""

    name: ClassVar[str] = "delta"

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        return [DeltaBlock(tuple(sites))]


# Names that can be used for a family with default options; a family of another file adds itself.
FAMILIES: dict[str, type[Family]] = {
    "normal": Normal,
    "diagonal": Normal,
    "lowrank": LowRank,
    "fullrank": FullRank,
    "matrixnormal": MatrixNormal,
    "mixture": Mixture,
    "delta": Delta,
}


def family_of(specification: Any) -> Family:
    """The family of a specification.

    Parameters
    ----------
    specification : str, Family or mapping
        A name, a family, or the result of `Family.described`.

    Returns
    -------
    Family
        The family.

    Raises
    ------
    UnknownNameError
        No such family.
    InputError
        Another type of value.
    """
    if isinstance(specification, Family):
        return specification
    if isinstance(specification, str):
        if specification not in FAMILIES:
            raise unknown_name("guide", specification, FAMILIES)
        return FAMILIES[specification]()
    if isinstance(specification, Mapping) and specification.get("family") in FAMILIES:
        options = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in specification.items()
            if name != "family"
        }
        return FAMILIES[specification["family"]](**options)
    raise InputError.of(
        "guide",
        f"a family or one of {', '.join(sorted(FAMILIES))}",
        repr(specification),
        "guide='normal', or {'output': 'fullrank', '*': 'normal'}",
    )
