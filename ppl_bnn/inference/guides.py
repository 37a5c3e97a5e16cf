"""Families of distributions over unconstrained coordinates, and guides made of them.

A guide is a list of blocks; a block is one family over some sites, ravelled and joined in the order of the program to a
flat vector (P,). All mathematics is written over `ppl_bnn.language.ops`: the same lines run on NumPy, torch and JAX,
with any leading axes on the noise and on u, and can be differentiated. Standard deviations are softplus of what is
optimised, as in NumPyro, in Pyro and in Blundell et al. (2015); triangular factors have such a diagonal.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.errors import InputError, UnsupportedError, message, unknown_name
from ppl_bnn.language import ops
from ppl_bnn.language.transforms import GaussianPrior, with_prior_scales
from ppl_bnn.posterior import Approximation
from ppl_bnn.ppl.protocol import Model, Site

Array = Any
Parameters = Mapping[str, Array]
LOG_2PI = math.log(2.0 * math.pi)
# A dense factor of this many coordinates takes 72 MB in float64, and an optimiser keeps four of them.
DENSE_LIMIT = 3000
# Each stratum is one pass through the network per draw.
STRATA_LIMIT = 64


def _inverse_softplus(scale: Any) -> np.ndarray:
    """rho with softplus(rho) = scale."""
    scale = np.asarray(scale, dtype=float)
    return scale + np.log(-np.expm1(-scale))


def _log_normal(z: Array, log_determinant: Array) -> Array:
    """Log density of u = loc + S z for a standard normal z (..., P), log |det S| given: (...)."""
    return -0.5 * ops.sum(z * z, -1) - log_determinant - 0.5 * z.shape[-1] * LOG_2PI


# --- what a block and a family are ------------------------------------------------------------------


@dataclass(frozen=True)
class Block(ABC):
    """One family bound to sites: a distribution over their flat vector (P,), with parameters kept outside.

    `params` is a dict name -> array of NumPy, torch or JAX, unconstrained, as `start` makes them. Leading axes (...)
    are any number of draws.
    """

    sites: tuple[Site, ...]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the sites, in the order of the program."""
        return tuple(site.name for site in self.sites)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Their shapes in unconstrained coordinates."""
        return tuple(site.unconstrained_shape for site in self.sites)

    @functools.cached_property
    def size(self) -> int:
        """P, the number of coordinates."""
        return sum(site.size for site in self.sites)

    @property
    def strata(self) -> int:
        """K: how many stratified draws one sample is made of; more than one for a mixture only."""
        return 1

    @property
    def noise_size(self) -> int:
        """E: standard normals per draw (and per stratum)."""
        return self.size

    @abstractmethod
    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Parameters at which q has the mean `loc` (P,) and, exactly or nearly, the standard deviations `scale`.

        scale: a number or (P,). rng: for families that must break a symmetry.
        """

    @abstractmethod
    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        """(u, log q(u)), a differentiable function of `params`, from standard normals eps.

        eps (..., E) gives u (..., P) and log q (...). With K > 1 strata: eps (..., K, E) gives u (..., K, P) and log q
        (..., K), the k-th out of component k, log q that of the whole mixture.
        """

    @abstractmethod
    def log_prob(self, params: Parameters, u: Array) -> Array:
        """log q(u) of u (..., P): (...)."""

    def log_weights(self, params: Parameters) -> Array:
        """Log probabilities of the strata, (K,): E_q[h] = sum_k exp(log_weights_k) E[h(u_k)]."""
        return ops.zeros_like(next(iter(params.values())).reshape(-1)[:1])

    def mean(self, params: Parameters) -> Array | None:
        """Exact marginal means (P,), or None where they are not known."""
        return None

    def variance(self, params: Parameters) -> Array | None:
        """Exact marginal variances (P,), or None where they are not known."""
        return None

    def entropy(self, params: Parameters) -> Array | None:
        """-E_q[log q(u)] in closed form, or None where there is none."""
        return None

    def sample(self, params: Parameters, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` draws (count, P) in NumPy."""
        return self.draw(params, rng.standard_normal((count, self.noise_size)))[0]

    def centre(self, params: Parameters) -> np.ndarray:
        """One representative point (P,) in NumPy: where no noise leads."""
        return self.draw(params, np.zeros(self.noise_size))[0]

    def as_prior(self, params: Parameters) -> GaussianPrior:
        """This block as a Gaussian, from parameters in NumPy.

        Raises
        ------
        UnsupportedError: a block that is not Gaussian, or has no spread.
        """
        raise UnsupportedError(
            "with_prior: "
            + message(
                "a guide that is Gaussian",
                f"{type(self).__name__} over {', '.join(self.names)}",
                "guide='normal', 'lowrank', 'fullrank' or 'matrixnormal'",
            )
        )

    def split(self, flat: Array) -> dict[str, Array]:
        """(..., P) to site -> (..., *unconstrained shape)."""
        found, start, lead = {}, 0, tuple(flat.shape[:-1])
        for site in self.sites:
            found[site.name] = flat[..., start : start + site.size].reshape(lead + site.unconstrained_shape)
            start += site.size
        return found

    def join(self, u: Mapping[str, Array]) -> Array:
        """The inverse of `split`; other sites in `u` are left aside."""
        parts = []
        for site in self.sites:
            value = u[site.name]
            lead = tuple(value.shape[: len(value.shape) - len(site.unconstrained_shape)])
            parts.append(value.reshape((*lead, site.size)))
        return parts[0] if len(parts) == 1 else ops.concatenate(parts, -1)


@dataclass(frozen=True)
class Family(ABC):
    """The specification of a family: its options, before it knows its sites. Fields are plain numbers, strings, tuples.

    name: what it is called as a string and in files. A family of another file adds itself to `FAMILIES`.
    """

    name: ClassVar[str]

    @abstractmethod
    def bind(self, sites: Sequence[Site]) -> list[Block]:
        """Blocks that cover these sites, given in the order of the program, together.

        Raises
        ------
        InputError: sites that this family is not for.
        """

    def described(self) -> dict[str, Any]:
        """Plain values from which `family_of` makes it again."""
        return {"family": self.name} | {
            entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)
        }


def _whole(family: str, what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(
            f"{family} {what}: "
            + message(f"a whole number of at least {least}", repr(value), f"{what}={max(least, 3)}")
        )


# --- independent normals -----------------------------------------------------------------------------


@dataclass(frozen=True)
class NormalBlock(Block):
    """q(u) = prod_j N(u_j; loc_j, softplus(rho_j)^2). params: loc (P,), rho (P,)."""

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"loc": np.array(loc), "rho": _inverse_softplus(np.broadcast_to(scale, loc.shape))}

    def scale(self, params: Parameters) -> Array:
        """Standard deviations (P,)."""
        return ops.softplus(params["rho"])

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        scale = self.scale(params)
        return params["loc"] + scale * eps, _log_normal(eps, ops.sum(ops.log(scale)))

    def log_prob(self, params: Parameters, u: Array) -> Array:
        scale = self.scale(params)
        return _log_normal((u - params["loc"]) / scale, ops.sum(ops.log(scale)))

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
    """Independent normals, mean field: loc + softplus(rho) eps (Blundell et al. 2015; Kucukelbir et al. 2017)."""

    name: ClassVar[str] = "normal"

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        return [NormalBlock(tuple(sites))]


# --- Gaussians with dependence -----------------------------------------------------------------------


def _unit_lower(below: Array) -> Array:
    """The lower-triangular matrix with ones on its diagonal and what is below that of `below` (D, D)."""
    return ops.namespace(below).tril(below, -1) + ops.diagonal_matrix(ops.ones_like(below[0]))


def _root_rows(lower: Array) -> Array:
    """Sums of squares of the rows of a matrix: the diagonal of lower lower', (D,)."""
    return ops.sum(lower * lower, -1)


def _too_large(family: str, what: str, size: int) -> InputError:
    return InputError(
        f"{family}: "
        + message(
            f"at most {DENSE_LIMIT} {what}, because the factor is dense",
            f"{size}",
            "'lowrank', 'normal', or {'output': 'fullrank', '*': 'normal'} with only some layers in one block",
        )
    )


@dataclass(frozen=True)
class LowRankBlock(Block):
    """u = loc + s (F e + eps), e of R and eps of P standard normals: covariance S (I + F F') S with S = diag(s).

    params: loc (P,), rho (P,) with s = softplus(rho), factor F (P, R). With C = I + F'F, whose eigenvalues are at least
    one, log det = 2 sum log s + log det C, and the squared distance of z = (u - loc) / s is
    |z - F c|^2 + |c|^2 with c = C^-1 F'z: a sum of squares, where Woodbury's difference |z|^2 - z'Fc would cancel.
    """

    rank: int

    @property
    def noise_size(self) -> int:
        return self.rank + self.size

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # At F = 0 the expected gradient in F is zero: it starts small, with a hundredth of the variance.
        factor = 0.1 / math.sqrt(self.rank) * rng.standard_normal((self.size, self.rank))
        own = np.broadcast_to(scale, loc.shape) / np.sqrt(1.0 + _root_rows(factor))
        return {"loc": np.array(loc), "rho": _inverse_softplus(own), "factor": factor}

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
            raise UnsupportedError(
                "with_prior: "
                + message(
                    f"at most {DENSE_LIMIT} coordinates in a block, for their precision is dense",
                    f"{self.size} of 'lowrank' over {', '.join(self.names)}",
                    "guide='normal' or 'matrixnormal'",
                )
            )
        scale, factor = ops.softplus(params["rho"]), params["factor"]
        half = ops.solve_triangular(self._capacitance(factor)[0], factor)
        precision = (np.eye(self.size) - half @ half.T) / np.outer(scale, scale)
        return GaussianPrior(self.split(params["loc"]), joint=((self.names, precision),))


@dataclass(frozen=True)
class LowRank(Family):
    """A normal with covariance of diagonal plus low rank (Ong, Nott and Smith 2018), in the coordinates of
    AutoLowRankMultivariateNormal of NumPyro and Pyro: S (I + F F') S, one joint distribution over the sites.

    rank: columns of F; None is the square root of the number of coordinates, as in both systems.
    """

    name: ClassVar[str] = "lowrank"
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            _whole("LowRank", "rank", self.rank, 1)

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        size = sum(site.size for site in sites)
        rank = max(1, round(math.sqrt(size))) if self.rank is None else int(self.rank)
        if rank > size:
            raise InputError(
                "LowRank rank: "
                + message(f"at most the {size} coordinates there are", repr(rank), f"rank={size}")
            )
        return [LowRankBlock(tuple(sites), rank)]


@dataclass(frozen=True)
class FullRankBlock(Block):
    """u = loc + L eps, L = diag(s) (I + T), T strictly lower triangular: covariance L L'.

    params: loc (P,), rho (P,) with s = softplus(rho), lower (P, P), read only below its diagonal. So
    a step in T means the same whatever the scale of its row.
    """

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        spread = np.broadcast_to(scale, loc.shape)
        return {
            "loc": np.array(loc),
            "rho": _inverse_softplus(spread),
            "lower": np.zeros((self.size, self.size)),
        }

    def start_from(self, loc: np.ndarray, covariance: Any) -> dict[str, np.ndarray]:
        """Parameters at which q is N(loc, covariance), (P,) and (P, P).

        Raises
        ------
        InputError: a matrix of another shape, or not symmetric and positive definite.
        """
        matrix = np.asarray(covariance, dtype=float)
        came = f"shape {matrix.shape}"
        if matrix.shape == (self.size, self.size):
            came = "one that is not"
            if np.all(np.isfinite(matrix)) and np.allclose(matrix, matrix.T):
                try:
                    root = np.linalg.cholesky(matrix)
                except np.linalg.LinAlgError:
                    pass
                else:
                    scale = np.diag(root)
                    below = np.tril(root / scale[:, None], -1)
                    return {"loc": np.array(loc), "rho": _inverse_softplus(scale), "lower": below}
        raise InputError(
            "guide: "
            + message(
                f"a symmetric positive definite covariance {(self.size, self.size)} at the start",
                came,
                "a scale, or more draws than coordinates",
            )
        )

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        scale = ops.softplus(params["rho"])
        z = eps @ _unit_lower(params["lower"]).T
        return params["loc"] + scale * z, _log_normal(eps, ops.sum(ops.log(scale)))

    def log_prob(self, params: Parameters, u: Array) -> Array:
        scale = ops.softplus(params["rho"])
        z = ops.solve_triangular(_unit_lower(params["lower"]), (u - params["loc"]) / scale)
        return _log_normal(z, ops.sum(ops.log(scale)))

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
    """A normal with any covariance, jointly over the sites (Titsias and Lazaro-Gredilla 2014; Kucukelbir et al. 2017).

    Up to DENSE_LIMIT coordinates, since their factor is dense.
    """

    name: ClassVar[str] = "fullrank"

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        size = sum(site.size for site in sites)
        if size > DENSE_LIMIT:
            raise _too_large("FullRank", "coordinates", size)
        return [FullRankBlock(tuple(sites))]


@dataclass(frozen=True)
class MatrixNormalBlock(Block):
    """W = M + A E B' for one site as a matrix (I, O): covariance A A' over its rows, B B' over its columns.

    A = diag(a) (I + T), B = diag(b) (I + R), T and R strictly lower triangular, b_0 = 1: A and B could else exchange a
    factor without q changing. params: loc (I * O,), rows (I,) with a = softplus(rows), rows_lower (I, I), columns
    (O - 1,) with b_1, ... = softplus(columns), columns_lower (O, O).
    """

    @property
    def matrix(self) -> tuple[int, int]:
        """(I, O): the last axis is O, all others together are I."""
        return self.size // self.shapes[0][-1], self.shapes[0][-1]

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # Standard deviations are a_i b_j at the start: the nearest to what is asked for, in logarithms.
        logs = np.log(np.broadcast_to(scale, loc.shape).reshape(self.matrix))
        rows, columns = logs.mean(1), logs.mean(0) - logs.mean()
        return {
            "loc": np.array(loc),
            "rows": _inverse_softplus(np.exp(rows + columns[0])),
            "rows_lower": np.zeros((self.matrix[0],) * 2),
            "columns": _inverse_softplus(np.exp(columns[1:] - columns[0])),
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
        return params["loc"] + deviation, _log_normal(eps, self._log_determinant(rows, columns))

    def log_prob(self, params: Parameters, u: Array) -> Array:
        rows, columns = self._scales(params)
        lead = tuple(u.shape[:-1])
        z = (u - params["loc"]).reshape(lead + self.matrix) / rows[:, None] / columns
        z = ops.solve_triangular(_unit_lower(params["columns_lower"]), z)
        z = ops.namespace(z).swapaxes(z, -1, -2)
        z = ops.solve_triangular(_unit_lower(params["rows_lower"]), z).reshape((*lead, self.size))
        return _log_normal(z, self._log_determinant(rows, columns))

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
    """A matrix-variate normal for each weight tensor, independent of the others (Louizos and Welling 2016).

    A site (..., O) is the matrix (I, O) with I all axes but the last: (fan_in, width), or (kh * kw * C, O) for a
    convolution. Sites with fewer than two axes, such as biases, have a full-rank normal each.
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
                raise _too_large("MatrixNormal", f"rows and columns in {site.name!r}", max(block.matrix))
            blocks.append(block)
        return blocks


# --- mixtures and points -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MixtureBlock(Block):
    """q(u) = sum_k pi_k prod_j N(u_j; loc_kj, softplus(rho_kj)^2), pi = softmax(logits).

    params: loc (K, P), rho (K, P), logits (K,). One sample is a draw of each component, to be weighted with pi: that is
    differentiable in pi, where a component picked at random would not be, and its variance is lower.
    """

    components: int

    @property
    def strata(self) -> int:
        return self.components

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # Equal components would move alike for ever: they start apart, by a quarter of the variance in each coordinate.
        spread = np.broadcast_to(scale, loc.shape)
        apart, within = np.zeros((self.components, self.size)), 1.0
        if self.components > 1:
            drawn = rng.standard_normal((self.components, self.size))
            apart = 0.5 * (drawn - drawn.mean(0)) / drawn.std(0)
            within = math.sqrt(0.75)
        return {
            "loc": loc + spread * apart,
            "rho": _inverse_softplus(np.broadcast_to(within * spread, apart.shape)),
            "logits": np.zeros(self.components),
        }

    def log_weights(self, params: Parameters) -> Array:
        return ops.log_softmax(params["logits"])

    def _log_density(self, params: Parameters, scale: Array, z: Array) -> Array:
        """From z (..., K, P), the standardised distances to each component: (...)."""
        each = _log_normal(z, ops.sum(ops.log(scale), -1))
        return ops.logsumexp(self.log_weights(params) + each)

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        loc, scale = params["loc"], ops.softplus(params["rho"])
        step = scale * eps
        # Differences of locations first: the distance of a draw to its own component is then eps, without rounding.
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
        """The mean of the heaviest component: that of all of them may lie where there is no mass."""
        return params["loc"][int(np.argmax(params["logits"]))]


@dataclass(frozen=True)
class Mixture(Family):
    """A mixture of independent normals, one joint distribution over the sites (Jaakkola and Jordan 1998), drawn by
    strata (Morningstar et al. 2021): a step costs a pass through the network for each component.

    components: K.
    """

    name: ClassVar[str] = "mixture"
    components: int = 3

    def __post_init__(self) -> None:
        _whole("Mixture", "components", self.components, 1)

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        return [MixtureBlock(tuple(sites), int(self.components))]


@dataclass(frozen=True)
class DeltaBlock(Block):
    """A point, u = loc (P,). It has no density: log q and the entropy are 0 by convention, and its evidence bound is
    the log joint, its optimum a mode of that. params: loc (P,)."""

    @property
    def noise_size(self) -> int:
        return 0

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"loc": np.array(loc)}

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        # eps (..., 0) only says how many draws are asked for; its empty sum is a zero for each.
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


# Names usable in place of a family with its default options; a family of another file adds itself.
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
    """The family that a string, a family or what `Family.described` gave stands for.

    Raises
    ------
    UnknownNameError: no such family. InputError: something else.
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
    raise InputError(
        "guide: "
        + message(
            f"a family or one of {', '.join(sorted(FAMILIES))}",
            repr(specification),
            "guide='normal', or {'output': 'fullrank', '*': 'normal'}",
        )
    )


# --- the whole --------------------------------------------------------------------------------------


def _matches(pattern: str, site: str) -> bool:
    """Whether a pattern means a site: its name, the name of a layer it belongs to, or a glob for one of these."""
    parts = site.split(".")
    prefixes = [".".join(parts[: index + 1]) for index in range(len(parts))]
    return any(pattern == prefix or fnmatchcase(prefix, pattern) for prefix in prefixes)


@dataclass(frozen=True)
class Guide:
    """A distribution over all latent sites of a program: a product of blocks. Make one with `Guide.of`.

    Parameters are one dict "<index of the block>:<name>" -> array. Draws are dicts site -> (..., *unconstrained shape),
    in the order of the program.

    sites: the latent sites in that order. families: pairs (pattern, family), as given. blocks: what came of them.
    """

    sites: tuple[Site, ...]
    families: tuple[tuple[str, Family], ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, specification: Any, sites: Iterable[Site]) -> Guide:
        """The guide of a specification over the latent sites among `sites` (parameters without a prior are left out).

        specification: the name of a family or a family, over all sites jointly; or a dict pattern -> family. A pattern
        is the name of a layer ("output"), of a site ("output.bias") or a glob for these ("hidden*"); the first that
        matches a site takes it, and the sites of one pattern are one joint distribution.

        Raises
        ------
        UnknownNameError: no such family, or a pattern that matches no site. InputError: a site that no pattern matches,
        a pattern whose sites earlier ones take, or a family that refuses its sites.
        """
        sites = tuple(sites)
        latent = tuple(site for site in sites if not site.is_param)
        given = specification if isinstance(specification, Mapping) else {"*": specification}
        for pattern in given:
            if not isinstance(pattern, str):
                raise InputError(
                    "guide: "
                    + message("names of layers, names of sites or globs as keys", repr(pattern), "'hidden*'")
                )
        families = tuple((pattern, family_of(each)) for pattern, each in given.items())
        taken: dict[str, str] = {}
        blocks: list[Block] = []
        for pattern, family in families:
            matched = [site for site in latent if _matches(pattern, site.name)]
            chosen = [site for site in matched if site.name not in taken]
            if not chosen:
                raise _idle(pattern, matched, taken, sites)
            taken |= {site.name: pattern for site in chosen}
            blocks += family.bind(chosen)
        missing = [site.name for site in latent if site.name not in taken]
        if missing:
            raise InputError(
                "guide: "
                + message(
                    "a family for every random variable",
                    f"none for {', '.join(missing)}",
                    "'*': 'normal' as the last entry",
                )
            )
        strata = math.prod(block.strata for block in blocks)
        if strata > STRATA_LIMIT:
            raise InputError(
                "guide: "
                + message(
                    f"at most {STRATA_LIMIT} combinations of components of mixtures, each of which is a pass through "
                    "the network",
                    f"{strata}",
                    "one mixture over the sites jointly, or fewer components",
                )
            )
        return cls(latent, families, tuple(blocks))

    # -- what it is made of

    @property
    def names(self) -> tuple[str, ...]:
        """The latent sites in the order of the program."""
        return tuple(site.name for site in self.sites)

    @functools.cached_property
    def size(self) -> int:
        """P, the number of coordinates of all sites."""
        return sum(block.size for block in self.blocks)

    @functools.cached_property
    def noise_size(self) -> int:
        """E, standard normals per draw (and per stratum)."""
        return sum(block.noise_size for block in self.blocks)

    @functools.cached_property
    def strata(self) -> int:
        """S, how many stratified draws one sample is made of: the product over the blocks."""
        return math.prod(block.strata for block in self.blocks)

    @functools.cached_property
    def _place(self) -> dict[str, int]:
        return {name: index for index, block in enumerate(self.blocks) for name in block.names}

    def index_of(self, site: str) -> int:
        """The index of the block that a site is in."""
        if site not in self._place:
            raise unknown_name("random variable", site, self._place)
        return self._place[site]

    def block_of(self, site: str) -> Block:
        """The block that a site is in."""
        return self.blocks[self.index_of(site)]

    def parameters_of(self, params: Parameters, index: int) -> dict[str, Array]:
        """The parameters of one block, by the names that it knows."""
        prefix = f"{index}:"
        return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}

    def _bound(self, params: Parameters) -> list[tuple[Block, dict[str, Array]]]:
        return [(block, self.parameters_of(params, index)) for index, block in enumerate(self.blocks)]

    def _ordered(self, u: Mapping[str, Any]) -> dict[str, Any]:
        return {name: u[name] for name in self.names}

    # -- the distribution

    def start(
        self,
        u0: Mapping[str, Any],
        scale: Any,
        rng: np.random.Generator,
        covariances: Mapping[int, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Parameters at which the guide has the mean u0 and, exactly or nearly, the standard deviations `scale`.

        u0: site -> array. scale: a number, or site -> a number or an array. covariances: index of a full-rank block ->
        its covariance at the start, in place of `scale`.

        Raises
        ------
        InputError: a site without a value, a wrong shape, a scale that is not positive, or a covariance for a block
        that is not full rank.
        """
        covariances = covariances or {}
        found: dict[str, np.ndarray] = {}
        for index, block in enumerate(self.blocks):
            loc = np.concatenate([_start_value(site, u0).reshape(-1) for site in block.sites])
            if index in covariances:
                if not isinstance(block, FullRankBlock):
                    raise InputError(
                        "guide: "
                        + message(
                            "a covariance at the start for full-rank blocks",
                            f"one for {type(block).__name__} over {', '.join(block.names)}",
                            "scale=",
                        )
                    )
                started = block.start_from(loc, covariances[index])
            else:
                spread = np.concatenate([_start_scale(site, scale).reshape(-1) for site in block.sites])
                started = block.start(loc, spread, rng)
            found |= {f"{index}:{name}": value for name, value in started.items()}
        return found

    def draw_blocks(self, params: Parameters, eps: Array) -> tuple[dict[str, Array], list[Array]]:
        """As `draw`, with log q block by block: their sum is log q."""
        u: dict[str, Array] = {}
        each: list[Array] = []
        at, outer = 0, 1
        for block, own in self._bound(params):
            noise = eps[..., at : at + block.noise_size]
            at += block.noise_size
            if block.strata in (1, self.strata):
                flat, log_q = block.draw(own, noise)
            else:
                flat, log_q = self._draw_within(block, own, noise, outer)
            outer *= block.strata
            u |= block.split(flat)
            each.append(log_q)
        return self._ordered(u), each

    def _draw_within(self, block: Block, own: Parameters, noise: Array, outer: int) -> tuple[Array, Array]:
        """Draws of one mixture among several: its component runs along the middle of (outer, K, inner) strata."""
        lead, inner = tuple(noise.shape[:-2]), self.strata // (outer * block.strata)
        xp = ops.namespace(noise)
        split = noise.reshape((*lead, outer, block.strata, inner, block.noise_size))
        flat, log_q = block.draw(own, xp.swapaxes(split, -3, -2))
        return (
            xp.swapaxes(flat, -3, -2).reshape((*lead, self.strata, block.size)),
            xp.swapaxes(log_q, -2, -1).reshape((*lead, self.strata)),
        )

    def draw(self, params: Parameters, eps: Array) -> tuple[dict[str, Array], Array]:
        """(u, log q(u)), differentiable in `params`, from standard normals.

        eps (..., E) gives site -> (..., *shape) and log q (...). With S > 1 strata: eps (..., S, E), site ->
        (..., S, *shape), log q (..., S), to be weighted with exp of `log_weights`.
        """
        u, each = self.draw_blocks(params, eps)
        return u, functools.reduce(lambda a, b: a + b, each)

    def log_weights(self, params: Parameters) -> Array:
        """Log probabilities of the strata, (S,)."""
        weights = [block.log_weights(own) for block, own in self._bound(params) if block.strata > 1]
        if not weights:
            return self.blocks[0].log_weights(self.parameters_of(params, 0))
        return functools.reduce(lambda a, b: (a[:, None] + b).reshape(-1), weights)

    def log_prob(self, params: Parameters, u: Mapping[str, Array]) -> Array:
        """log q(u) of site -> (..., *shape): (...)."""
        return functools.reduce(
            lambda a, b: a + b, [block.log_prob(own, block.join(u)) for block, own in self._bound(params)]
        )

    def _by_site(self, values: Iterable[Array | None]) -> dict[str, Array | None]:
        found: dict[str, Array | None] = {}
        for block, value in zip(self.blocks, values, strict=True):
            found |= dict.fromkeys(block.names) if value is None else block.split(value)
        return self._ordered(found)

    def mean(self, params: Parameters) -> dict[str, Array | None]:
        """Exact marginal means by site; None where they are not known (flows)."""
        return self._by_site(block.mean(own) for block, own in self._bound(params))

    def variance(self, params: Parameters) -> dict[str, Array | None]:
        """Exact marginal variances by site; None where they are not known (flows)."""
        return self._by_site(block.variance(own) for block, own in self._bound(params))

    def entropies(self, params: Parameters) -> list[Array | None]:
        """The entropy of each block; None where it has no closed form (mixtures, flows)."""
        return [block.entropy(own) for block, own in self._bound(params)]

    def entropy(self, params: Parameters) -> Array | None:
        """The entropy of the whole, or None where a block has none in closed form."""
        known = [value for value in self.entropies(params) if value is not None]
        return functools.reduce(lambda a, b: a + b, known) if len(known) == len(self.blocks) else None

    @functools.cached_property
    def normal_sites(self) -> tuple[str, ...]:
        """The sites in blocks of independent normals, in the order of the program."""
        return tuple(name for name in self.names if isinstance(self.block_of(name), NormalBlock))

    def loc_scale(self, params: Parameters) -> tuple[dict[str, Array], dict[str, Array]]:
        """Means and standard deviations of `normal_sites`, in unconstrained shapes."""
        loc: dict[str, Array] = {}
        scale: dict[str, Array] = {}
        for block, own in self._bound(params):
            if isinstance(block, NormalBlock):
                loc |= block.split(own["loc"])
                scale |= block.split(block.scale(own))
        return ({name: loc[name] for name in self.normal_sites}, {n: scale[n] for n in self.normal_sites})

    # -- in NumPy

    def sample(self, params: Parameters, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`count` draws of u in NumPy, each array with one leading axis."""
        u: dict[str, np.ndarray] = {}
        for block, own in self._bound(params):
            u |= block.split(block.sample(own, count, rng))
        return self._ordered(u)

    def centre(self, params: Parameters) -> dict[str, np.ndarray]:
        """One representative point of u in NumPy: the mean of a Gaussian, that of the heaviest part of a mixture."""
        u: dict[str, np.ndarray] = {}
        for block, own in self._bound(params):
            u |= block.split(block.centre(own))
        return self._ordered(u)

    def as_prior(self, params: Parameters) -> GaussianPrior:
        """The guide as a Gaussian, from parameters in NumPy.

        Raises
        ------
        UnsupportedError: a block that is not Gaussian, has no spread, or would need too large a matrix.
        """
        parts = [block.as_prior(own) for block, own in self._bound(params)]
        mode = {name: value for part in parts for name, value in part.mode.items()}
        return GaussianPrior(
            self._ordered(mode),
            scale={name: value for part in parts for name, value in part.scale.items()},
            joint=tuple(itertools.chain.from_iterable(part.joint for part in parts)),
            kronecker={name: value for part in parts for name, value in part.kronecker.items()},
        )

    # -- in files

    def to_json(self) -> str:
        """Sites and families, without parameters."""
        return json.dumps(
            {
                "sites": [
                    {
                        "name": site.name,
                        "shape": site.shape,
                        "unconstrained_shape": site.unconstrained_shape,
                        "local": site.local,
                        "family": site.family,
                    }
                    for site in self.sites
                ],
                "families": [[pattern, family.described()] for pattern, family in self.families],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Guide:
        """The inverse of `to_json`."""
        found = json.loads(text)
        sites = [
            Site(
                each["name"],
                tuple(each["shape"]),
                tuple(each["unconstrained_shape"]),
                local=each["local"],
                family=each["family"],
            )
            for each in found["sites"]
        ]
        return cls.of({pattern: family_of(family) for pattern, family in found["families"]}, sites)


def _idle(
    pattern: str, matched: Sequence[Site], taken: Mapping[str, str], sites: Sequence[Site]
) -> Exception:
    """What to say of a pattern that takes no site."""
    if matched:
        earlier = sorted({taken[site.name] for site in matched})
        return InputError(
            "guide: "
            + message(
                "patterns that each take a site, the first that matches winning",
                f"{pattern!r}, whose sites all go to {', '.join(map(repr, earlier))}",
                f"{pattern!r} earlier in the dict",
            )
        )
    without = [site.name for site in sites if site.is_param and _matches(pattern, site.name)]
    if without:
        return InputError(
            "guide: "
            + message(
                "patterns over random variables",
                f"{pattern!r}, which matches parameters without a prior only: {', '.join(without)}",
                "leaving it out: they are optimised as they are",
            )
        )
    known = {site.name for site in sites if not site.is_param}
    return unknown_name(
        "site or layer in guide", pattern, known | {name.rpartition(".")[0] or name for name in known}
    )


def _start_value(site: Site, u0: Mapping[str, Any]) -> np.ndarray:
    if site.name not in u0:
        raise InputError(
            "guide: " + message(f"a location at the start for {site.name!r}", "none", "a dict over all sites")
        )
    value = np.asarray(u0[site.name], dtype=float)
    if value.shape != site.unconstrained_shape or not np.all(np.isfinite(value)):
        raise InputError(
            "guide: "
            + message(
                f"a finite location of shape {site.unconstrained_shape} at the start for {site.name!r}",
                f"shape {value.shape}" if np.all(np.isfinite(value)) else "NaN or infinity",
                "a point in unconstrained coordinates",
            )
        )
    return value


def _start_scale(site: Site, scale: Any) -> np.ndarray:
    if isinstance(scale, Mapping):
        if site.name not in scale:
            raise InputError(
                "guide: "
                + message(f"a scale at the start for {site.name!r}", "none", "a dict over all sites")
            )
        scale = scale[site.name]
    value = np.asarray(scale, dtype=float)
    if value.shape not in ((), site.unconstrained_shape) or not np.all((value > 0) & np.isfinite(value)):
        came = f"shape {value.shape}, smallest {value.min() if value.size else math.nan:.3g}"
        raise InputError(
            "guide: "
            + message(
                f"positive standard deviations at the start for {site.name!r}, a number or {site.unconstrained_shape}",
                came,
                "0.1",
            )
        )
    return np.broadcast_to(value, site.unconstrained_shape)


# --- what a fit hands over --------------------------------------------------------------------------


@dataclass
class GuideApproximation(Approximation):
    """A guide at its fitted parameters, in NumPy.

    parameters: "<index of the block>:<name>" -> array. values: site -> array of the parameters without a prior,
    constants of the fit that are repeated in draws and absent from log q, as are points of the guide. prior_scales:
    site -> scale of its prior, where the fit found them (`priors.EmpiricalBayes`).

    Everything is computed in float64, whatever the floating type of the fit.
    """

    guide: Guide
    parameters: dict[str, np.ndarray]
    values: dict[str, np.ndarray] = field(default_factory=dict)
    prior_scales: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def kind(self) -> Literal["chains", "iid", "point"]:  # type: ignore[override]
        """ "point" where all of the guide is, else "iid"."""
        points = all(isinstance(block, DeltaBlock) for block in self.guide.blocks)
        return "point" if points else "iid"

    @functools.cached_property
    def _exact(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value, dtype=float) for name, value in self.parameters.items()}

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.guide.sample(self._exact, count, rng) | {
            name: np.repeat(np.asarray(value)[None], count, axis=0) for name, value in self.values.items()
        }

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray | None:
        return None if self.kind == "point" else self.guide.log_prob(self._exact, u)

    def centre(self) -> dict[str, np.ndarray]:
        return self.guide.centre(self._exact) | dict(self.values)

    def program(self, model: Model) -> Model:
        return with_prior_scales(model, self.prior_scales) if self.prior_scales else model

    def as_prior(self) -> GaussianPrior:
        return self.guide.as_prior(self._exact)

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "guide": np.frombuffer(self.guide.to_json().encode(), dtype=np.uint8),
            **{f"parameter/{name}": value for name, value in self.parameters.items()},
            **{f"value/{name}": value for name, value in self.values.items()},
            **{f"prior_scale/{name}": value for name, value in self.prior_scales.items()},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> GuideApproximation:
        def part(prefix: str) -> dict[str, np.ndarray]:
            return {
                key.removeprefix(prefix): np.asarray(value)
                for key, value in arrays.items()
                if key.startswith(prefix)
            }

        guide = Guide.from_json(np.asarray(arrays["guide"]).tobytes().decode())
        return cls(guide, part("parameter/"), part("value/"), part("prior_scale/"))
