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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks
from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError
from ppl_bnn.core.processes import machine_memory
from ppl_bnn.inference.curvature import jacobian, structures
from ppl_bnn.inference.curvature.gaussians import check_finite
from ppl_bnn.inference.curvature.jacobian import Factors, JacobianPlan, padded_rows, plan_of
from ppl_bnn.inference.curvature.kronecker import DenseBlock, KroneckerBlock, KroneckerCurvature
from ppl_bnn.inference.curvature.structures import DataCurvature
from ppl_bnn.inference.flat_vector import Values, Where, system_values
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
    - "lowrank": `FactorCurvature` with sqrt(lambda_i) v_i', the `rank` largest positive eigenpairs, and an exact block
      for the sites of `apart`. The noise needs one: it is one direction among many, and would keep its prior spread.
    """
    where = Where.of(problem, positions)
    sizes = [problem.program.sites[name].size for name in where.sites]
    own = where.chosen(np.repeat([name in apart for name in where.sites], sizes))
    most = int(np.count_nonzero(~own))
    good = structure != "lowrank" or 1 <= (rank or 0) <= most
    InputError.check(good, "rank", f"a rank from 1 to {most}", repr(rank), "rank=20")
    if curvature == "hessian":
        hessian = _Hessian(problem, u, where, memory)
        return hessian.structured(structure, rank or 0, own, seed), hessian.passes
    rows = _Rows(problem, u, where, memory, _cotangents(problem, u, curvature, fisher, samples, seed))
    structured = {
        "full": rows.full,
        "diag": rows.diagonal,
        "kron": lambda: rows.kronecker(sharing),
        "lowrank": lambda: rows.low_rank(rank or 0, own, seed),
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
class _Curvature:
    """A curvature at one point. `passes`: gradients so far, in passes over the data."""

    problem: Problem
    u: Values
    where: Where
    memory: int
    passes: float = field(default=0.0, kw_only=True)

    @property
    def plan(self) -> JacobianPlan:
        return plan_of(self.problem, self.u, self.where.sites)


@dataclass
class _Rows(_Curvature):
    """Curvatures that are B'B, B the stacked R_n' J_n: one block of rows at a time, in float64."""

    cotangents: jacobian.Cotangents

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
        for part in self.chunks():
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

    def low_rank(self, rank: int, own: np.ndarray, seed: int) -> DataCurvature:
        """Eigenpairs from a dense matrix, or its dual, if one is small; else from products with vectors.

        `own` (Q,) are the positions with a separate block.
        """
        size = self.where.count
        width = np.asarray(self.cotangents(self.plan.eta, slice(0, 1))).shape[-1]
        terms = self.problem.rows * width
        if size <= DENSE or (terms <= DENSE and 8 * terms * size <= self.memory):
            curvature = self.full()
            if not isinstance(curvature, structures.FactorCurvature):
                return _low_rank(curvature.matrix(), rank, own)
            factor = np.where(own, 0.0, curvature.factor)
            values, vectors = _largest(factor @ factor.T, rank)
            block = curvature.factor[:, own].T @ curvature.factor[:, own]
            return _with_block(_positive(values, vectors.T @ factor, dual=True), block, own)
        # The factors fit into memory between two products, or are computed again for each.
        bytes_of_factors = 8 * self.problem.rows * self.plan.floats(width)
        stored = list(self.chunks()) if bytes_of_factors <= self.memory else None

        def product(flat: np.ndarray) -> np.ndarray:
            v, total = _spread(self.where, np.ravel(flat)), np.zeros(self.where.size)
            for part in self.chunks() if stored is None else stored:
                _add_product(total, v, part)
            return self.where.chosen(total)

        return _low_rank_of_products(product, rank, own, seed)


def _spread(where: Where, chosen: np.ndarray) -> np.ndarray:
    """The inverse of `Where.chosen`, with zeros at the other positions."""
    whole = np.zeros((*chosen.shape[:-1], where.size))
    whole[..., slice(None) if where.kept is None else where.kept] = chosen
    return whole


def _add_product(total: np.ndarray, v: np.ndarray, part: Factors) -> None:
    """total += B'(B v) for the rows of a chunk, from factors, without a gradient of a weight for any row."""
    z, sites = np.zeros(part.rest.shape[:2]), list(part.by_site())
    for site, columns, inputs, gradients in sites:
        along = v[part.plan.slices[site]]
        if inputs is None:
            z[:, columns] += gradients @ along
        else:
            moved = inputs @ along.reshape(inputs.shape[-1], -1)
            z[:, columns] += np.einsum("bto,bato->ba", moved, gradients)
    for site, columns, inputs, gradients in sites:
        if inputs is None:
            pulled = np.einsum("ba,bap->p", z[:, columns], gradients)
        else:
            outer = np.einsum("ba,bato->bto", z[:, columns], gradients)
            pulled = np.tensordot(inputs, outer, ([0, 1], [0, 1])).reshape(-1)
        total[part.plan.slices[site]] += pulled


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


def _low_rank(matrix: np.ndarray, rank: int, own: np.ndarray) -> structures.FactorCurvature:
    """The largest eigenpairs of the positions without a separate block, and the block of the others."""
    values, vectors = _largest(np.where(own | own[:, None], 0.0, matrix), rank)
    return _with_block(_positive(values, vectors.T), matrix[np.ix_(own, own)], own)


def _low_rank_of_products(
    product: Callable[[np.ndarray], np.ndarray], rank: int, own: np.ndarray, seed: int
) -> structures.FactorCurvature:
    """`_low_rank` of a matrix that is given by its products with vectors (Q,), by implicitly restarted Lanczos."""

    def outside(v: np.ndarray) -> np.ndarray:
        return np.where(own, 0.0, product(np.where(own, 0.0, np.ravel(v))))

    size = len(own)
    start = np.random.default_rng(seed).standard_normal(size)
    lanczos: Any = scipy.sparse.linalg
    operator = lanczos.LinearOperator((size, size), matvec=outside, dtype=np.float64)
    try:
        values, vectors = lanczos.eigsh(operator, k=rank, which="LA", v0=start)
    except lanczos.ArpackNoConvergence as error:
        got = f"{len(error.eigenvalues)} that converged"
        raise CurvatureError.of("structure='lowrank'", f"{rank} eigenpairs", got, "a smaller rank") from error
    order = np.argsort(values)[::-1]
    units = np.eye(size)[own]
    block = np.array([product(unit)[own] for unit in units]).reshape(len(units), len(units))
    return _with_block(_positive(values[order], vectors[:, order].T), 0.5 * (block + block.T), own)


def _with_block(rows: np.ndarray, block: np.ndarray, own: np.ndarray) -> structures.FactorCurvature:
    """Rows of a factor, and below them those of a block over the positions `own`."""
    if not own.any():
        return structures.FactorCurvature(rows)
    values, vectors = np.linalg.eigh(block)
    below = np.zeros((len(values), len(own)))
    below[:, own] = vectors.T
    return structures.FactorCurvature(np.concatenate([rows, _positive(values, below)]))


def _largest(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues, largest first, and their eigenvectors as columns."""
    size = len(matrix)
    values, vectors = scipy.linalg.eigh(matrix, subset_by_index=(max(0, size - rank), size - 1))
    return values[::-1], vectors[:, ::-1]


def _positive(values: np.ndarray, rows: np.ndarray, dual: bool = False) -> np.ndarray:
    """sqrt(lambda_i) v_i' of the positive eigenvalues; rows are v_i', or already u_i' B of the dual B B'."""
    some = values > max(float(np.max(np.abs(values), initial=0.0)) * 1e-14, 0.0)
    return rows[some] if dual else rows[some] * np.sqrt(values[some])[:, None]


@dataclass
class _Hessian(_Curvature):
    """The Hessian of -sum log p(y_n | x_n, u), by products with vectors: the pullback of the gradient.

    It is a sum over chunks of rows, for as many directions at a time as memory allows.
    """

    def structured(self, structure: str, rank: int, own: np.ndarray, seed: int) -> DataCurvature:
        size = self.where.count
        if structure == "lowrank" and size > DENSE:
            return _low_rank_of_products(lambda v: self.products(v[None])[0], rank, own, seed)
        units = (np.eye(stop - start, size, start) for start, stop in chunks(size, self._sizes[1]))
        if structure == "diag":
            diagonal = np.concatenate([self.products(unit)[unit == 1.0] for unit in units])
            return structures.DiagonalCurvature(diagonal)
        matrix = np.concatenate([self.products(unit) for unit in units])
        matrix = 0.5 * (matrix + matrix.T)
        return _low_rank(matrix, rank, own) if structure == "lowrank" else structures.FullCurvature(matrix)

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Rows and directions per call."""
        program, rows = self.problem.program, self.problem.rows
        per_row = 8 * 4 * program.parameter_count
        if not program.coupled:
            per_row = 8 * 4 * self.plan.activations
            rows = int(np.clip(self.memory // (4 * per_row), 1, rows))
        per_direction = per_row * rows + 8 * 4 * self.where.size
        return rows, int(np.clip(self.memory // per_direction, 1, self.where.count))

    def products(self, directions: np.ndarray) -> np.ndarray:
        """The products H v (K, P) for directions (K, P), no more than `_sizes` allows."""
        problem, system = self.problem, self.problem.system
        function = problem.program.cached(("hessian", self.where.sites), self._build)
        size, _ = self._sizes
        values, whole = system_values(problem, self.u), system.asarray(_spread(self.where, directions))
        total = np.zeros_like(directions)
        for start, stop in chunks(problem.rows, size):
            x = padded_rows(problem, problem.inputs, start, stop, size)
            y = padded_rows(problem, problem.targets, start, stop, size)
            counted = system.asarray((np.arange(size) < stop - start).astype(float))
            result = system.to_numpy(function(values, x, y, counted, whole))
            total += self.where.chosen(result.astype(np.float64))
            self.passes += len(directions) * (stop - start) / problem.rows
        check_finite("a finite Hessian", total)
        return total

    def _build(self) -> Callable[..., Any]:
        program, system = self.problem.program, self.problem.system
        sites = self.where.sites

        def loss(flat: Any, values: Any, x: Any, y: Any, counted: Any) -> Any:
            u = {**values, **program.unravel(flat, sites)}
            return -(counted * program.log_likelihood(u, x, y)).sum()

        def products(values: Any, x: Any, y: Any, counted: Any, directions: Any) -> Any:
            flat = program.ravel(values, sites)
            product = jacobian.hessian_product(system, loss, flat, values, x, y, counted)
            return system.vmap(product)(directions)

        return system.compile(products)
