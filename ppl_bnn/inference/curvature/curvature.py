"""The curvature of the data at a point, written once over the protocol.

It is H = sum_n J_n' F_n J_n. J_n (D, P) is the Jacobian of the predictor eta_n in the flat vector of latent sites, and
F_n (D, D) the Fisher information of p(y_n | eta_n) in eta. This generalised Gauss-Newton matrix is never indefinite
(Martens 2020); unlike the Hessian of -log p(y | eta), F keeps heteroscedastic noise positive. The alternatives are the
empirical Fisher matrix, sum_n s_n s_n' with s_n the gradient of log p(y_n | eta_n), and the exact Hessian.

All but the Hessian are computed from R_n' J_n with R_n R_n' = F_n (or its estimate), from the factors of `jacobian.py`.
The prior's curvature is in `prior.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks
from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError
from ppl_bnn.core.processes import machine_memory
from ppl_bnn.inference.curvature import jacobian, lanczos, structures
from ppl_bnn.inference.curvature.jacobian import Factors, plan_of
from ppl_bnn.inference.curvature.kronecker import DenseBlock, KroneckerBlock, KroneckerCurvature
from ppl_bnn.inference.curvature.last_layer import Information, LayerProducts, LayerRows, last_layer
from ppl_bnn.inference.curvature.linear_algebra import check_finite
from ppl_bnn.inference.curvature.products import AtPoint, GaussNewtonProducts, HessianProducts, Products
from ppl_bnn.inference.curvature.structures import DataCurvature, LowRankCurvature, Quadrature
from ppl_bnn.inference.flat_vector import Values, Where
from ppl_bnn.language.likelihoods import HasObservedInformation
from ppl_bnn.prediction.prediction import Prediction

CURVATURES = ("ggn", "empirical", "hessian")
# Up to this size eigenpairs are found faster from a dense matrix than from products with vectors.
DENSE = 3000


def data_curvature(
    problem: Problem,
    u: Values,
    *,
    curvature: str = "ggn",
    fisher: str = "exact",
    samples: int = 1,
    structure: str = "full",
    rank: int | None = None,
    prior: np.ndarray | None = None,
    probes: int = 8,
    apart: Sequence[str] = (),
    sharing: str = "expand",
    positions: np.ndarray | None = None,
    seed: int = 0,
    memory: int = 2**28,
) -> tuple[DataCurvature, float]:
    """The curvature (float64) of -sum_n log p(y_n | x_n, u) over the training rows at u, and its gradients, in passes.

    `curvature` is "ggn" (sum_n J_n' F_n J_n), "empirical" (sum_n s_n s_n') or "hessian" (exact, may be indefinite).
    With fisher="sampled" F_n is estimated without bias from `samples` scores at targets drawn from p(y | eta_n).
    `positions` (increasing) restrict the curvature to a sub-network; "kron" takes whole sites only. `memory` bounds the
    bytes besides the result. The structures are

    - "full": `FactorCurvature` B'B if the rows of R' J are fewer than P, else `FullCurvature`;
    - "kron": `KroneckerCurvature`, a block left (x) right for each weight of a linear map, left = mean of a a' over
      rows and places, right = sum of g g' over rows, cotangents and places (sharing="expand"); or, with
      sharing="reduce", left from the mean of a and right from the sum of g over places (Eschenhagen et al. 2023;
      Martens and Grosse 2015). Exact for one row and one place. All other sites have a dense block each;
    - "diag": `DiagonalCurvature`, the exact diagonal;
    - "lowrank": `LowRankCurvature`, the `rank` largest eigenpairs of D^-1/2 H D^-1/2 with the precisions D (Q,) of the
      `prior` (ones by default), and an exact block for the sites of `apart`. The noise needs one: it is one direction
      among many, and would keep its prior spread. A large matrix is known by products with vectors alone
      (`products.py`), and `probes` random vectors find sums over the rest of its spectrum (`lanczos.py`).
      `FactorCurvature`, without the rest, for a Hessian, and for a prior that is no positive diagonal (D is then 1).
    """
    where = Where.of(problem, positions)
    sizes = [problem.program.sites[name].size for name in where.sites]
    own = where.chosen(np.repeat([name in apart for name in where.sites], sizes))
    most = int(np.count_nonzero(~own))
    good = structure != "lowrank" or 1 <= (rank or 0) <= most
    InputError.check(good, "rank", f"a rank from 1 to {most}", repr(rank), "rank=20")
    ones = np.ones(where.count)
    precisions = ones if prior is None else prior
    good = precisions.ndim == 1 and bool(np.all(precisions > 0.0))
    known = probes if good and curvature != "hessian" else None
    pairs = _LowRank(rank or 0, own, precisions if good else ones, known, seed)
    if curvature == "hessian":
        hessian = _Hessian(problem, u, where, memory)
        return hessian.structured(structure, pairs), hessian.passes
    roots = np.sqrt(problem.program.weights(u, problem.x, problem.y))
    of_rows = _cotangents(problem, u, curvature, fisher, samples, seed)

    def cotangents(eta: np.ndarray, rows: slice) -> np.ndarray:
        return roots[rows, None, None] * of_rows(eta, rows)

    parts = problem.program.likelihood.fisher_parts if (curvature, fisher) == ("ggn", "exact") else None
    rows = _Rows(problem, u, where, memory, cotangents, roots, parts)
    structured = {
        "full": rows.full,
        "diag": rows.diagonal,
        "kron": lambda: rows.kronecker(sharing),
        "lowrank": lambda: rows.low_rank(pairs),
    }
    return structured[structure](), rows.passes


def check_blocks_fit(problem: Problem, u: Values, sites: tuple[str, ...]) -> None:
    """Raise `UnsupportedError` if the blocks of structure "kron" over these sites cannot fit into memory.

    A site that is not a weight of a linear map has a dense block, the square of its size. u may be any point.
    """
    plan = plan_of(problem, u, sites)
    sides = {name: (problem.program.sites[name].size,) for name in sites}
    sides |= {weight: linear.shape for weight, linear in plan.maps.items() if weight in sides}
    numbers = {name: sum(side**2 for side in each) for name, each in sides.items()}
    # A sum, the term to be added to it, and later the factor of the precision.
    needed, available = 3 * 8 * sum(numbers.values()), machine_memory() or math.inf
    if needed <= available:
        return
    largest = max(numbers, key=lambda name: numbers[name])
    blocks = " and ".join(f"{side:,} x {side:,}" for side in sides[largest])
    inside = largest not in plan.rest
    expected = f"blocks that fit into the {available / 1e9:,.3g} GB of memory of this machine"
    got = f"{'factors' if inside else 'a dense block'} of {blocks} numbers, and {needed / 1e9:,.3g} GB in all"
    advice = "weights= with the names of smaller layers, or structure='diag' or 'lowrank'"
    if not inside:
        got += "; no linear map of this site is known, as inside of bnn.module"
        advice = f"the layer in the language (bnn.dense, bnn.conv2d), {advice}"
    raise UnsupportedError.of(f"structure='kron', site {largest!r}", expected, got, advice)


def check_matrix_fits(problem: Problem, size: int, curvature: str, fisher: str, samples: int) -> None:
    """Raise `UnsupportedError` if a full curvature over `size` positions cannot fit into memory, nor its dual."""
    outputs = problem.program.outputs or 1
    width = {"empirical": 1, "hessian": size}.get(curvature, outputs if fisher == "exact" else samples)
    terms, available = problem.rows * width, machine_memory() or math.inf
    side = min(size, terms)
    # The matrix, a copy and a factor, and the rows of which it is made where they are fewer.
    needed = 8 * (3 * side**2 + (side * size if terms < size else 0))
    expected = f"a matrix that fits into the {available / 1e9:,.3g} GB of memory of this machine"
    got = f"{size:,} weights, which need {needed / 1e9:,.3g} GB"
    advice = "structure='kron', 'diag' or 'lowrank', or weights= with fewer"
    UnsupportedError.check(needed <= available, "structure='full'", expected, got, advice)


def check_fisher(problem: Problem, fisher: str) -> None:
    """Raise `UnsupportedError` for a likelihood without the Fisher information that "ggn" needs."""
    likelihood = problem.program.likelihood
    if fisher == "exact" and not likelihood.has_fisher:
        likelihood.fisher(None)
    censored = fisher == "sampled" and isinstance(likelihood, HasObservedInformation)
    where, expected = "fisher='sampled'", "targets that can be simulated"
    got = f"{type(likelihood).__name__} ones, whose censoring is not part of the model"
    UnsupportedError.check(not censored, where, expected, got, "fisher='exact', or curvature='empirical'")


def _cotangents(
    problem: Problem, u: Values, curvature: str, fisher: str, samples: int, seed: int
) -> jacobian.Cotangents:
    """R_n (D, C), with R_n R_n' the Fisher information or its estimate."""
    likelihood, targets = problem.program.likelihood, np.asarray(problem.targets)
    if curvature == "empirical":
        return lambda eta, rows: np.asarray(likelihood.score(eta, targets[rows]))[:, :, None]
    if isinstance(likelihood, HasObservedInformation):
        return lambda eta, rows: np.asarray(likelihood.information_root(eta, targets[rows]))
    if fisher == "exact":
        return lambda eta, rows: np.asarray(likelihood.fisher_root(eta))
    # All targets are drawn at once, so that they do not depend on how rows are divided.
    draws = {name: np.asarray(value)[None] for name, value in u.items()}
    w = problem.program.constrain_draws(draws, problem.x, problem.y)
    eta = problem.program.predictor_draws(w, problem.inputs)
    drawn = Prediction(*likelihood.mixture_parameters(eta)).sample(samples, seed)

    def sampled(eta: np.ndarray, rows: slice) -> np.ndarray:
        scores = [np.asarray(likelihood.score(eta, y[rows])) for y in drawn]
        return np.stack(scores, -1) / math.sqrt(samples)

    return sampled


@dataclass
class _Rows(AtPoint):
    """Curvatures that are B'B, B the stacked R_n' J_n: one block of rows at a time, in float64."""

    cotangents: jacobian.Cotangents
    # Square roots of the weights of rows, (N,), which `cotangents` has and `parts` has not.
    roots: np.ndarray
    # The exact information in parts, where it does not depend on targets.
    parts: Callable[..., Any] | None = None

    @property
    def of_layer(self) -> LayerRows | None:
        """The rows by features, if the curvature is that of the last layer."""
        layer = last_layer(self.problem, self.u, self.where)
        return layer and LayerRows(self.problem, self.u, layer, self.memory, self._information)

    def _information(self, eta: np.ndarray, rows: slice) -> Information:
        if self.parts is None or isinstance(self.problem.program.likelihood, HasObservedInformation):
            return Information(np.zeros_like(eta), self.cotangents(eta, rows), 1.0)
        d, v, sign = self.parts(eta)
        root = self.roots[rows, None]
        return Information(root**2 * d, root[:, :, None] * v, sign)

    def chunks(self, extra: int = 0) -> Iterator[Factors]:
        given = (self.problem, self.u, self.problem.inputs, self.cotangents, self.memory, self.where.sites)
        for part in jacobian.linear_factors(*given, extra):
            self.passes += len(part.eta) / self.problem.rows * (len(part.active) + len(part.resting))
            gradients = (gradients for _, gradients in part.maps.values())
            check_finite("finite gradients of the predictor", part.rest, *gradients)
            yield part

    def full(self) -> DataCurvature:
        """B'B, or B if it is smaller."""
        blas: Any = scipy.linalg.blas
        size, count = self.where.size, self.where.count
        every = np.arange(size)
        rest = np.concatenate([every[:0], *(every[self.plan.slices[name]] for name in self.plan.rest)])
        # The places of the rest in the curvature, and in `Factors.rest`.
        _, at, kept = np.intersect1d(self.where.chosen(every), rest, return_indices=True)
        # Rows that affect only the rest are summed separately.
        gram = np.zeros((len(kept), len(kept)))
        stacked: list[np.ndarray] = []
        total: np.ndarray | None = None
        for part in self.chunks(2 * size):
            rows, active = len(part.eta), np.arange(len(part.active))
            own = replace(part, rest=part.rest[:, part.active], active=active)
            block = self.where.chosen(own.jacobian()).reshape(-1, count)
            resting = part.rest[:, part.resting].reshape(rows * len(part.resting), part.rest.shape[-1])
            gram += resting[:, kept].T @ resting[:, kept]
            if stacked or (total is None and len(block) // rows * self.problem.rows + len(kept) < count):
                stacked.append(block)
                continue
            if total is None:
                total = np.zeros((count, count), order="F")
            # One triangle only: half the work of a product of matrices.
            total = blas.dsyrk(1.0, block.T, beta=1.0, c=total, overwrite_c=True, lower=True)
        if total is None:
            values, vectors = np.linalg.eigh(gram)
            some = values > 0
            root = np.zeros((int(some.sum()), count))
            root[:, at] = (vectors[:, some] * np.sqrt(values[some])).T
            return structures.FactorCurvature(np.concatenate([*stacked, root]))
        matrix = np.ascontiguousarray(np.tril(total) + np.tril(total, -1).T)
        matrix[np.ix_(at, at)] += gram
        return structures.FullCurvature(matrix)

    def diagonal(self) -> DataCurvature:
        if (layer := self.of_layer) is not None:
            self.passes += 1.0
            return structures.DiagonalCurvature(layer.diagonal())
        total = np.zeros(self.where.size)
        for part in self.chunks():
            for site, _, inputs, gradients in part.by_site():
                if inputs is None:
                    squares = np.sum(gradients**2, axis=(0, 1))
                else:
                    squares = _squares(inputs, gradients, self.memory).reshape(-1)
                total[self.plan.slices[site]] += squares
        return structures.DiagonalCurvature(self.where.chosen(total))

    def kronecker(self, sharing: str) -> DataCurvature:
        check_blocks_fit(self.problem, self.u, self.where.sites)
        # A site that is no weight of a linear map has a dense block, which is its sum on the right.
        left, right = (defaultdict[str, Any](float) for _ in range(2))
        if (layer := self.of_layer) is not None:
            self.passes += 1.0
            left[layer.layer.map.weight], total = layer.factors()
            right |= dict.fromkeys(self.plan.slices, total)
        for part in () if layer else self.chunks():
            for site, _, a, g in part.by_site():
                if a is not None:
                    if sharing == "reduce":
                        a, g = a.mean(1, keepdims=True), g.sum(2)
                    terms = self.problem.rows * a.shape[1]
                    a = a.reshape(-1, a.shape[-1])
                    left[site] += a.T @ a / terms
                g = g.reshape(-1, g.shape[-1])
                right[site] += g.T @ g
        blocks: list[DenseBlock | KroneckerBlock] = []
        for name, at in self.plan.slices.items():
            place = np.arange(at.start, at.stop)
            if name in left:
                shape = self.plan.maps[name].shape
                blocks.append(KroneckerBlock(name, shape, left[name], right[name], place))
            else:
                blocks.append(DenseBlock(right[name], name, place))
        return KroneckerCurvature(tuple(blocks))

    def low_rank(self, pairs: _LowRank) -> DataCurvature:
        """Eigenpairs from a dense matrix, or its dual, if one is small; else from products with vectors."""
        size = self.where.count
        width = np.asarray(self.cotangents(self.plan.eta, slice(0, 1))).shape[-1]
        terms = self.problem.rows * width
        if size <= DENSE or (terms <= DENSE and 8 * terms * size <= self.memory):
            curvature = self.full()
            if isinstance(curvature, structures.FactorCurvature):
                return pairs.of_factor(curvature.factor)
            return pairs.of_matrix(curvature.matrix())
        given = (self.problem, self.u, self.where, self.memory)
        layer = self.of_layer
        products = LayerProducts(*given, layer) if layer else GaussNewtonProducts(*given, self.cotangents)
        found = pairs.of_products(products)
        self.passes += products.passes
        return found


def _squares(inputs: np.ndarray, gradients: np.ndarray, memory: int) -> np.ndarray:
    """sum_n sum_c (sum_t a_nt g_nct')^2, elementwise, (I, O): of a (B, T, I) and g (B, C, T, O)."""
    rows, width, places, outputs = gradients.shape
    if places == 1:
        return (inputs[:, 0] ** 2).T @ np.sum(gradients[:, :, 0] ** 2, axis=1)
    total = np.zeros((inputs.shape[-1], outputs))
    size = max(1, memory // (16 * width * inputs.shape[-1] * outputs))
    for start, stop in chunks(rows, size):
        each = inputs[start:stop, None].transpose(0, 1, 3, 2) @ gradients[start:stop]
        total += np.einsum("bcio,bcio->io", each, each)
    return total


@dataclass
class _LowRank:
    """The largest eigenpairs of D^-1/2 H D^-1/2, the rest of its spectrum, and a block of H by itself.

    D are the precisions (Q,) of the prior, or ones. `own` (Q,) are the positions with a separate block. `probes` random
    vectors find the rest where it takes products, None leaves it out: for the Hessian, which may be indefinite, and for
    priors that are no positive diagonal.
    """

    rank: int
    own: np.ndarray
    prior: np.ndarray
    probes: int | None
    seed: int

    def of_matrix(self, matrix: np.ndarray) -> DataCurvature:
        root = np.where(self.own, np.inf, np.sqrt(self.prior))
        values, vectors = scipy.linalg.eigh(matrix / root / root[:, None], driver="evd")
        order = np.argsort(values)[::-1]
        kept = order[: self.rank][_positive(values[order[: self.rank]], values)]
        rest = Quadrature.exact(np.delete(values, kept))
        return self._joined(values[kept], vectors[:, kept].T, rest, matrix[np.ix_(self.own, self.own)])

    def of_factor(self, factor: np.ndarray) -> DataCurvature:
        """From B (M, Q) with H = B'B, by its dual (M, M)."""
        scaled = np.where(self.own, 0.0, factor / np.sqrt(self.prior))
        values, vectors = scipy.linalg.eigh(scaled @ scaled.T, driver="evd")
        order = np.argsort(values)[::-1]
        kept = order[: self.rank][_positive(values[order[: self.rank]], values)]
        rows = vectors[:, kept].T @ scaled / np.sqrt(values[kept])[:, None]
        block = factor[:, self.own].T @ factor[:, self.own]
        return self._joined(values[kept], rows, Quadrature.exact(np.delete(values, kept)), block)

    def of_products(self, products: Products) -> DataCurvature:
        size, dtype = len(self.own), products.dtype
        inverse = np.where(self.own, 0.0, 1.0 / np.sqrt(self.prior)).astype(dtype)
        rng = np.random.default_rng(self.seed)

        def whitened(rows: np.ndarray) -> np.ndarray:
            found = products(rows * inverse)
            found *= inverse
            return found

        rest = None
        if self.probes is None:
            pairs = lanczos.largest(whitened, size, self.rank, rng, dtype)
        else:
            pairs, rest = lanczos.pairs_and_rest(whitened, size, self.rank, self.probes, rng, dtype)
        some = pairs.values > 0.0
        units = np.zeros((int(self.own.sum()), size), dtype)
        units[:, self.own] = np.eye(len(units))
        block = products(units)[:, self.own].astype(float)
        found = self._joined(pairs.values[some], pairs.vectors[some], rest, 0.5 * (block + block.T))
        if isinstance(found, LowRankCurvature):
            # Both parts of the spectrum are coupled by residuals, whose effect on log det is of their square.
            coupled = float(np.sum(pairs.residuals**2 / (1.0 + pairs.values)))
            return replace(found, coupled=coupled, converged=pairs.converged, products=round(products.passes))
        expected, got = f"{self.rank} eigenpairs", f"{len(pairs.values)} that have not all converged"
        CurvatureError.check(pairs.converged, "structure='lowrank'", expected, got, "a smaller rank")
        return found

    def _joined(
        self, values: np.ndarray, vectors: np.ndarray, rest: Quadrature | None, block: np.ndarray
    ) -> DataCurvature:
        """The factor with rows sqrt(value_i) v_i' D^1/2, and below them those of the block."""
        of_block, directions = np.linalg.eigh(block)
        some = _positive(of_block, of_block)
        factor = np.zeros((len(values) + int(some.sum()), len(self.own)))
        np.multiply(vectors, np.sqrt(values)[:, None], out=factor[: len(values)])
        factor[: len(values)] *= np.sqrt(self.prior)
        factor[len(values) :, self.own] = (directions[:, some] * np.sqrt(of_block[some])).T
        if rest is None or self.probes is None:
            return structures.FactorCurvature(factor)
        return LowRankCurvature(factor, self.prior, ~self.own, rest)


def _positive(values: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Which eigenvalues are positive, beyond the rounding error of the largest `among` them."""
    return values > float(np.max(np.abs(among), initial=0.0)) * 1e-14


@dataclass
class _Hessian(AtPoint):
    """The Hessian of -sum log p(y_n | x_n, u), by products with vectors."""

    def structured(self, structure: str, pairs: _LowRank) -> DataCurvature:
        size, products = self.where.count, HessianProducts(self.problem, self.u, self.where, self.memory)
        try:
            if structure == "lowrank" and size > DENSE:
                return pairs.of_products(products)
            units = (np.eye(stop - start, size, start) for start, stop in chunks(size, products.directions))
            if structure == "diag":
                diagonal = np.concatenate([products(unit)[unit == 1.0] for unit in units])
                return structures.DiagonalCurvature(diagonal.astype(float))
            matrix = np.concatenate([products(unit) for unit in units]).astype(float)
            matrix = 0.5 * (matrix + matrix.T)
            return pairs.of_matrix(matrix) if structure == "lowrank" else structures.FullCurvature(matrix)
        finally:
            self.passes += products.passes
