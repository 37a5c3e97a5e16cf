"""Families of distributions over blocks of unconstrained coordinates.

A block is one family over some sites, joined in the order of the program to a flat vector (P,). It is written over
`ppl_bnn.language.ops` for NumPy, torch and JAX, differentiable, with any leading axes on the noise and on u. Standard
deviations, and diagonals of triangular factors, are softplus of the optimised parameter (Blundell et al. 2015).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.protocol import Site
from ppl_bnn.core.errors import InputError, UnsupportedError, unknown_name
from ppl_bnn.core.settings import optional, setting, whole
from ppl_bnn.inference.variational.families.base import (
    LOG_2PI,
    Array,
    Family,
    Parameters,
    inverse_softplus,
    log_normal,
)
from ppl_bnn.language import ops
from ppl_bnn.language.transforms import GaussianPrior

# A dense factor of this many coordinates takes 72 MB in float64, and an optimiser keeps four of them.
DENSE_LIMIT = 3000


# --- Gaussians ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gaussian(Family):
    """A normal. `params`: loc (P,), rho (P,) with s = softplus(rho) for most families, and others."""

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"loc": np.array(loc), "rho": inverse_softplus(np.broadcast_to(scale, loc.shape))}

    def scale(self, params: Parameters) -> Any:
        """s, computed once and passed to the methods below."""
        return ops.softplus(params["rho"])

    def log_determinant(self, params: Parameters, scale: Any) -> Array:
        """Half the logarithm of the determinant of the covariance."""
        return ops.sum(ops.log(scale))

    @abstractmethod
    def deviation(self, params: Parameters, scale: Any, eps: Array) -> Array:
        """u - loc (..., P), which is linear in the noise eps (..., E)."""

    def output_variance(self, params: Parameters, x: Array, weight: str, bias: str | None) -> Array:
        """The variance (N, O) of x W + b, x (N, I), of which the block has the weight, the bias or both."""
        each = ops.diagonal_matrix(ops.ones_like(ops.broadcast_to(params["loc"][:1], (self.noise_size,))))
        output = self._output(self.deviation(params, self.scale(params), each), x, weight, bias)
        return ops.sum(output * output, 0)

    def _output(self, flat: Array, x: Array, weight: str, bias: str | None) -> Array:
        """x W + b (..., N, O) for the sites in a flat vector (..., P); a bias alone has one row."""
        parts = self.split(flat)
        found = x @ parts[weight] if weight in parts else 0.0
        return found + parts[bias][..., None, :] if bias in parts else found

    def mean(self, params: Parameters) -> Array:
        return params["loc"]

    def entropy(self, params: Parameters) -> Array:
        return self.log_determinant(params, self.scale(params)) + 0.5 * self.size * (1.0 + LOG_2PI)


@dataclass(frozen=True)
class Affine(Gaussian):
    """A normal u = loc + S eps with an invertible S; `deviation` is S eps."""

    @abstractmethod
    def noise(self, params: Parameters, scale: Any, deviation: Array) -> Array:
        """The noise eps with S eps = deviation."""

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        scale = self.scale(params)
        u = params["loc"] + self.deviation(params, scale, eps)
        return u, log_normal(eps, self.log_determinant(params, scale))

    def log_prob(self, params: Parameters, u: Array) -> Array:
        scale = self.scale(params)
        eps = self.noise(params, scale, u - params["loc"])
        return log_normal(eps, self.log_determinant(params, scale))


@dataclass(frozen=True)
class Normal(Affine):
    """Independent normals (mean field), q(u) = prod_j N(u_j; loc_j, s_j^2): loc + softplus(rho) eps.

    References
    ----------
    Blundell et al. (2015); Kucukelbir et al. (2017).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(guide=bnn.guides.Normal()).guide
    Normal()
    """

    name: ClassVar[str] = "normal"

    def deviation(self, params: Parameters, scale: Any, eps: Array) -> Array:
        return scale * eps

    def noise(self, params: Parameters, scale: Any, deviation: Array) -> Array:
        return deviation / scale

    def variance(self, params: Parameters) -> Array:
        scale = self.scale(params)
        return scale * scale

    def output_variance(self, params: Parameters, x: Array, weight: str, bias: str | None) -> Array:
        return self._output(self.variance(params), x * x, weight, bias)

    def as_prior(self, params: Parameters) -> GaussianPrior:
        return GaussianPrior(self.split(params["loc"]), scale=self.split(self.scale(params)))


def _unit_lower(below: Array) -> Array:
    """The lower-triangular matrix with a unit diagonal and the entries of `below` (D, D) below it."""
    return ops.namespace(below).tril(below, -1) + ops.diagonal_matrix(ops.ones_like(below[0]))


def _root_rows(lower: Array) -> Array:
    """Sums of squares of the rows of a matrix, (D,): the diagonal of lower lower'."""
    return ops.sum(lower * lower, -1)


@dataclass(frozen=True)
class LowRank(Gaussian):
    """A normal with covariance of diagonal plus low rank [1]_, S (I + F F') S, one joint distribution over the sites.

    The coordinates are those of AutoLowRankMultivariateNormal of NumPyro and Pyro.

    Parameters
    ----------
    rank : int or None
        Columns of F. None for the square root of the number of coordinates, as in both systems.

    Notes
    -----
    u = loc + s (F e + eps), with standard normals e and eps and S = diag(s). `params`: loc (P,), rho (P,), factor
    F (P, R). With C = I + F'F, log det = 2 sum log s + log det C, and the squared distance of z = (u - loc) / s is
    |z - F c|^2 + |c|^2 with c = C^-1 F'z. Woodbury's |z|^2 - z'Fc would cancel.

    References
    ----------
    .. [1] Ong, Nott and Smith (2018).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(guide=bnn.guides.LowRank(rank=5)).guide
    LowRank(rank=5)
    """

    rank: int | None = setting(None, optional(whole()), advice="3")
    name: ClassVar[str] = "lowrank"

    @property
    def columns(self) -> int:
        """R, the number of columns of F."""
        return max(1, round(math.sqrt(self.size))) if self.rank is None else int(self.rank)

    def check_size(self) -> None:
        wanted = f"at most the {self.size} coordinates there are"
        good, got = self.columns <= self.size, repr(self.columns)
        InputError.check(good, "LowRank rank", wanted, got, f"rank={self.size}")

    @property
    def noise_size(self) -> int:
        return self.columns + self.size

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # At F = 0 the expected gradient in F is zero, so F starts small, with a hundredth of the variance.
        factor = 0.1 / math.sqrt(self.columns) * rng.standard_normal((self.size, self.columns))
        own = np.broadcast_to(scale, loc.shape) / np.sqrt(1.0 + _root_rows(factor))
        return super().start(loc, own, rng) | {"factor": factor}

    def _capacitance(self, factor: Array) -> tuple[Array, Array]:
        """(Cholesky factor of C = I + F'F, log det C)."""
        gram = factor.T @ factor + ops.diagonal_matrix(ops.ones_like(factor[0]))
        root = ops.namespace(gram).linalg.cholesky(gram)
        return root, 2.0 * ops.sum(ops.log(ops.einsum("ii->i", root)))

    def log_determinant(self, params: Parameters, scale: Any) -> Array:
        log_scale = ops.sum(ops.log(scale))
        return log_scale + 0.5 * self._capacitance(params["factor"])[1]

    def _log_density(self, params: Parameters, scale: Array, z: Array) -> Array:
        factor = params["factor"]
        root, log_determinant = self._capacitance(factor)
        inverse = ops.solve_triangular(root, ops.diagonal_matrix(ops.ones_like(factor[0]))).T
        c = (z @ factor) @ inverse.T @ inverse
        rest = z - c @ factor.T
        distance = ops.sum(rest * rest, -1) + ops.sum(c * c, -1)
        return -0.5 * (distance + log_determinant + self.size * LOG_2PI) - ops.sum(ops.log(scale))

    def _correlated(self, params: Parameters, eps: Array) -> Array:
        return eps[..., : self.columns] @ params["factor"].T + eps[..., self.columns :]

    def deviation(self, params: Parameters, scale: Any, eps: Array) -> Array:
        return scale * self._correlated(params, eps)

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        scale, z = self.scale(params), self._correlated(params, eps)
        return params["loc"] + scale * z, self._log_density(params, scale, z)

    def log_prob(self, params: Parameters, u: Array) -> Array:
        scale = self.scale(params)
        return self._log_density(params, scale, (u - params["loc"]) / scale)

    def variance(self, params: Parameters) -> Array:
        scale = self.scale(params)
        return scale * scale * (1.0 + _root_rows(params["factor"]))

    def as_prior(self, params: Parameters) -> GaussianPrior:
        if self.size > DENSE_LIMIT:
            wanted = f"at most {DENSE_LIMIT} coordinates in a block, for their precision is dense"
            got = f"{self.size} of 'lowrank' over {', '.join(self.names)}"
            raise UnsupportedError.of("with_prior", wanted, got, "guide='normal' or 'matrixnormal'")
        scale, factor = self.scale(params), params["factor"]
        half = ops.solve_triangular(self._capacitance(factor)[0], factor)
        precision = (np.eye(self.size) - half @ half.T) / np.outer(scale, scale)
        return GaussianPrior(self.split(params["loc"]), joint=((self.names, precision),))


def _check_dense(family: str, what: str, size: int) -> None:
    wanted = f"at most {DENSE_LIMIT} {what}, because the factor is dense"
    advice = (
        "'lowrank', 'normal', or {'output': 'fullrank', '*': 'normal'} with only some layers in one block"
    )
    InputError.check(size <= DENSE_LIMIT, family, wanted, size, advice)


@dataclass(frozen=True)
class FullRank(Affine):
    """A normal with any covariance, jointly over the sites, up to DENSE_LIMIT coordinates.

    Notes
    -----
    The covariance is L L': u = loc + L eps, L = diag(s) (I + T), T strictly lower triangular. `params`: loc (P,), rho
    (P,), lower (P, P), used below the diagonal only. A step in T has the same meaning whatever the scale of its row.

    References
    ----------
    Titsias and Lazaro-Gredilla (2014); Kucukelbir et al. (2017).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(guide=bnn.guides.FullRank()).guide
    FullRank()
    """

    name: ClassVar[str] = "fullrank"

    def check_size(self) -> None:
        _check_dense("FullRank", "coordinates", self.size)

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return super().start(loc, scale, rng) | {"lower": np.zeros((self.size, self.size))}

    def deviation(self, params: Parameters, scale: Any, eps: Array) -> Array:
        return scale * (eps @ _unit_lower(params["lower"]).T)

    def noise(self, params: Parameters, scale: Any, deviation: Array) -> Array:
        return ops.solve_triangular(_unit_lower(params["lower"]), deviation / scale)

    def variance(self, params: Parameters) -> Array:
        scale = self.scale(params)
        return scale * scale * _root_rows(_unit_lower(params["lower"]))

    def as_prior(self, params: Parameters) -> GaussianPrior:
        inverse = ops.solve_triangular(_unit_lower(params["lower"]), np.eye(self.size)).T / self.scale(params)
        return GaussianPrior(self.split(params["loc"]), joint=((self.names, inverse.T @ inverse),))


@dataclass(frozen=True)
class MatrixNormal(Affine):
    """A matrix-variate normal for each weight tensor, independent of the others [1]_.

    A site (..., O) is the matrix (I, O) with I all axes but the last: (fan_in, width), or (kh * kw * C, O) for a
    convolution. Each site with fewer than two axes, such as a bias, has a full-rank normal.

    Notes
    -----
    A block is one site, W = M + A E B' with row covariance A A' and column covariance B B'. A = diag(a) (I + T),
    B = diag(b) (I + R), T and R strictly lower triangular. b_0 = 1, because A and B could otherwise exchange a factor.
    `params`: loc (I * O,), rows (I,) with a = softplus(rows), rows_lower (I, I), columns (O - 1,) with
    b_1, ... = softplus(columns), columns_lower (O, O). The scales are (a, b).

    References
    ----------
    .. [1] Louizos and Welling (2016).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(guide=bnn.guides.MatrixNormal()).guide
    MatrixNormal()
    """

    name: ClassVar[str] = "matrixnormal"

    def bind(self, sites: Sequence[Site]) -> list[Family]:
        blocks: list[Family] = []
        for site in sites:
            if len(site.unconstrained_shape) < 2:
                blocks += FullRank().bind([site])
                continue
            block = self.over([site])
            _check_dense("MatrixNormal", f"rows and columns in {site.name!r}", max(block.matrix))
            blocks.append(block)
        return blocks

    @property
    def matrix(self) -> tuple[int, int]:
        """(I, O): O is the last axis, I all others."""
        columns = self.sites[0].unconstrained_shape[-1]
        return self.size // columns, columns

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

    def scale(self, params: Parameters) -> tuple[Array, Array]:
        rows = ops.softplus(params["rows"])
        return rows, ops.concatenate([ops.ones_like(rows[:1]), ops.softplus(params["columns"])])

    def log_determinant(self, params: Parameters, scale: Any) -> Array:
        rows, columns = scale
        return self.matrix[1] * ops.sum(ops.log(rows)) + self.matrix[0] * ops.sum(ops.log(columns))

    def _lower(self, params: Parameters) -> tuple[Array, Array]:
        return _unit_lower(params["rows_lower"]), _unit_lower(params["columns_lower"])

    def deviation(self, params: Parameters, scale: Any, eps: Array) -> Array:
        (rows, columns), (left, right), lead = scale, self._lower(params), tuple(eps.shape[:-1])
        z = left @ eps.reshape(lead + self.matrix) @ right.T
        return (rows[:, None] * columns * z).reshape((*lead, self.size))

    def output_variance(self, params: Parameters, x: Array, weight: str, bias: str | None) -> Array:
        (rows, columns), (left, right) = self.scale(params), self._lower(params)
        along = (x * rows) @ left
        return ops.sum(along * along, -1)[:, None] * (columns * columns * _root_rows(right))

    def noise(self, params: Parameters, scale: Any, deviation: Array) -> Array:
        (rows, columns), (left, right), lead = scale, self._lower(params), tuple(deviation.shape[:-1])
        z = ops.solve_triangular(right, deviation.reshape(lead + self.matrix) / rows[:, None] / columns)
        z = ops.namespace(z).swapaxes(z, -1, -2)
        return ops.solve_triangular(left, z).reshape((*lead, self.size))

    def variance(self, params: Parameters) -> Array:
        (rows, columns), (left, right) = self.scale(params), self._lower(params)
        over_rows = rows * rows * _root_rows(left)
        over_columns = columns * columns * _root_rows(right)
        return (over_rows[:, None] * over_columns).reshape(-1)

    def as_prior(self, params: Parameters) -> GaussianPrior:
        (a, b), (lower, other) = self.scale(params), self._lower(params)
        left, rows, _ = np.linalg.svd(a[:, None] * lower)
        right, columns, _ = np.linalg.svd(b[:, None] * other)
        precisions = 1.0 / np.outer(rows, columns) ** 2
        return GaussianPrior(self.split(params["loc"]), kronecker={self.names[0]: (left, right, precisions)})


# --- mixtures and points -----------------------------------------------------------------------------


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
    q(u) = sum_k pi_k prod_j N(u_j; loc_kj, softplus(rho_kj)^2). `params`: loc (K, P), rho (K, P), logits (K,) with
    pi = softmax(logits). One sample is a draw of each component, weighted with pi: differentiable in pi, unlike a
    random component, and of lower variance.

    For a normal in four dimensions with condition number 21 and correlations up to 0.73, the closest member of the
    family in KL(q || p) has these shares of the variances of the coordinates::

        K                              1           2           3           5          10
        KL in nats                  1.08        0.68        0.53        0.34        0.17
        smallest, largest share  0.21 0.80   0.48 0.80   0.53 0.80   0.68 0.86   0.81 0.90

    SVI reaches it within 0.01 nats (`comparisons/performance/badly_scaled.py --only mixtures`). For correlations,
    "fullrank" is exact.

    References
    ----------
    .. [1] Jaakkola and Jordan (1998).
    .. [2] Morningstar et al. (2021).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(guide=bnn.guides.Mixture(components=5)).guide
    Mixture(components=5)
    """

    name: ClassVar[str] = "mixture"
    components: int = setting(3, whole())
    has_centre: ClassVar[bool] = False

    def bind(self, sites: Sequence[Site]) -> list[Family]:
        return [(Normal() if self.components == 1 else self).over(sites)]

    @property
    def strata(self) -> int:
        return self.components

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
class Delta(Family):
    """A point: the mode of the sites given the rest of the guide (a MAP estimate in unconstrained coordinates).

    u = loc (P,), without a density. By convention log q and the entropy are 0, so its evidence bound is the log joint,
    with the optimum at a mode.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(guide=bnn.guides.Delta()).guide
    Delta()
    """

    name: ClassVar[str] = "delta"

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


# Names of families with default options; a family of another file adds itself.
FAMILIES: dict[str, type[Family]] = {"diagonal": Normal}
FAMILIES |= {each.name: each for each in (Normal, LowRank, FullRank, MatrixNormal, Mixture, Delta)}


def family_of(specification: Any) -> Family:
    """The family of a specification: a name, a family, or the result of `Family.described`."""
    if isinstance(specification, Family):
        return specification
    if isinstance(specification, str):
        if specification not in FAMILIES:
            raise unknown_name("guide", specification, FAMILIES)
        specification = {"family": specification}
    if isinstance(specification, Mapping) and specification.get("family") in FAMILIES:
        plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in specification.items()}
        return FAMILIES[plain.pop("family")](**plain)
    wanted = f"a family or one of {', '.join(sorted(FAMILIES))}"
    advice = "guide='normal', or {'output': 'fullrank', '*': 'normal'}"
    raise InputError.of("guide", wanted, repr(specification), advice)
