"""The curvature of the data at a point, written once over the protocol.

It is H = sum_n J_n' F_n J_n. J_n (D, P) is the Jacobian of the predictor eta_n in the flat vector of latent sites, and
F_n (D, D) the Fisher information of p(y_n | eta_n) in eta. This generalised Gauss-Newton matrix is never indefinite,
and for canonical links it uses the Hessian of -log p(y | f) itself (Martens 2020). The Fisher information in place of
that Hessian keeps heteroscedastic noise positive. The alternatives are the empirical Fisher matrix, sum_n s_n s_n' with
s_n the gradient of log p(y_n | eta_n), and the exact Hessian.

All but the Hessian are computed from R_n' J_n with R_n R_n' = F_n (or its estimate), from the factors of `jacobian.py`.
The prior's curvature is in `prior.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks, map_data, padded
from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError, unknown_name
from ppl_bnn.inference.curvature.gaussians import check_finite
from ppl_bnn.inference.curvature.jacobian import (
    Cotangents,
    Factors,
    Plan,
    compiled,
    factors_of,
    fill,
    plan_of,
)
from ppl_bnn.inference.curvature.kronecker import DenseBlock, KroneckerBlock, KroneckerCurvature
from ppl_bnn.inference.curvature.structures import (
    DataCurvature,
    DiagonalCurvature,
    FactorCurvature,
    FullCurvature,
)
from ppl_bnn.inference.flat_vector import Where, latent_names, site_slices, system_values
from ppl_bnn.language.likelihoods import HasObservedInformation
from ppl_bnn.prediction.prediction import Prediction

CURVATURES = ("ggn", "empirical", "hessian")
STRUCTURES = ("full", "kron", "diag", "lowrank")
# Up to this size eigenpairs are found faster from a dense matrix than from products with vectors.
DENSE = 3000


def gauss_newton(problem: Problem, u: Mapping[str, np.ndarray], memory: int = 2**28) -> np.ndarray:
    """The Gauss-Newton matrix sum_n J_n' F_n J_n over the training rows, (P, P), NumPy float64.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    memory : int
        Bytes that may be held besides the result.
    """
    return data_curvature(problem, u, memory=memory)[0].matrix()


def data_curvature(
    problem: Problem,
    u: Mapping[str, np.ndarray],
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
    """The curvature of -sum_n log p(y_n | x_n, u) over the training rows at u, and its cost.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Unconstrained values by site.
    curvature : {"ggn", "empirical", "hessian"}
        "ggn" is sum_n J_n' F_n J_n, "empirical" sum_n s_n s_n' with the gradients s_n of log p(y_n | u), "hessian" the
        exact Hessian, which may be indefinite.
    fisher : {"exact", "sampled"}
        "sampled": F_n estimated without bias from `samples` scores at targets drawn from p(y | eta_n).
    samples : int
        Targets per row with fisher="sampled".
    structure : {"full", "kron", "diag", "lowrank"}
        See Notes.
    rank : int or None
        Number of eigenpairs of structure "lowrank".
    apart : sequence of str
        Sites with a separate block under structure "lowrank".
    sharing : {"expand", "reduce"}
        Treatment of several places under structure "kron".
    positions : ndarray or None
        Positions of the flat vector to restrict the curvature to, in increasing order (a sub-network). For "kron",
        whole sites only.
    seed : int
        Seed of sampled targets and of iterative eigenvalue solvers.
    memory : int
        Bytes that may be held besides the result.

    Returns
    -------
    curvature : DataCurvature
        The curvature, float64.
    passes : float
        The number of gradients in passes over the data.

    Raises
    ------
    UnknownNameError
        Unknown names of settings.
    InputError
        Impossible settings.
    UnsupportedError
        Structure "kron" of a Hessian or of parts of sites; rows that interact; a plain model, other than by its
        Hessian.
    CurvatureError
        Values that are not finite, or no convergence.

    Notes
    -----
    The structures are

    - "full": `FactorCurvature` B'B if the rows of R' J are fewer than P, else `FullCurvature`;
    - "kron": `KroneckerCurvature`, a block left (x) right for each weight of a linear map, left = mean of a a' over
      rows and places, right = sum of g g' over rows, cotangents and places (sharing="expand"); or, with
      sharing="reduce", left from the mean of a and right from the sum of g over places (Eschenhagen et al. 2023;
      Martens and Grosse 2015). Exact for one row and one place. Biases and all other sites have a dense block each,
      exact within it;
    - "diag": `DiagonalCurvature`, the exact diagonal;
    - "lowrank": `FactorCurvature` with sqrt(lambda_i) v_i', the `rank` largest eigenpairs, without those that are not
      positive. The sites of `apart` have a separate block, exact within it. The parameters of the likelihood (its
      noise) are one direction among many, and without a block they would have the spread of their prior.
    """
    for name, value, known in (
        ("curvature", curvature, CURVATURES),
        ("fisher", fisher, ("exact", "sampled")),
        ("structure", structure, STRUCTURES),
        ("sharing", sharing, ("expand", "reduce")),
    ):
        if value not in known:
            raise unknown_name(f"{name} of a curvature", value, known)
    where = Where.of(problem, positions)
    own = _of_sites(problem, where, apart if structure == "lowrank" else ())
    most = int(np.count_nonzero(~own))
    if structure == "lowrank" and (rank is None or not 1 <= rank <= most):
        raise InputError.of("rank", f"a rank from 1 to {most}", repr(rank), "rank=20")
    if fisher == "sampled" and samples < 1:
        raise InputError.of("samples", "at least one sample", repr(samples), "samples=1")
    if curvature == "hessian":
        if structure == "kron":
            raise UnsupportedError.of(
                "curvature='hessian' with structure='kron'",
                "a curvature that is a sum over rows of products of gradients",
                "a Hessian, which has no Kronecker factors",
                "curvature='ggn', or structure='full', 'diag' or 'lowrank'",
            )
        return _Hessian(problem, u, where, memory).structured(structure, rank, own, seed)
    rows = _Rows(problem, u, where, _cotangents(problem, u, curvature, fisher, samples, seed), memory)
    if structure == "full":
        return rows.full()
    if structure == "diag":
        return rows.diagonal()
    if structure == "kron":
        return rows.kronecker(sharing)
    assert rank is not None
    return rows.low_rank(rank, own, seed)


def _of_sites(problem: Problem, where: Where, names: Sequence[str]) -> np.ndarray:
    """(Q,) whether a position belongs to one of these sites."""
    local = site_slices(problem, where.sites)
    found = np.zeros(where.size, dtype=bool)
    for name in names:
        if name in local:
            found[local[name]] = True
    return where.chosen(found)


def refuse_large_blocks(problem: Problem, u: Mapping[str, np.ndarray], positions: np.ndarray) -> None:
    """Refuse structure "kron" over these positions if its blocks cannot fit into memory.

    A site that is not a weight of a linear map has a dense block, the square of its size. All sites of a `bnn.module`
    have one, and sites from which weights are computed.

    Parameters
    ----------
    problem : Problem
        The model and its data.
    u : mapping
        Any point, so that the check is possible before there is a mode.
    positions : ndarray
        Positions of the flat vector.

    Raises
    ------
    UnsupportedError
        The blocks do not fit.
    """
    where = Where.of(problem, positions)
    sizes = {name: problem.program.sites[name].size for name in where.sites}
    _refuse_large(plan_of(problem, u, where.sites), sizes)


def _refuse_large(plan: Plan, sizes: Mapping[str, int]) -> None:
    shapes = {linear.weight: linear.shape for linear in plan.maps.values()}
    sides = {name: shapes.get(name, (size,)) for name, size in sizes.items()}
    numbers = {name: sum(side**2 for side in each) for name, each in sides.items()}
    # A sum, the term to be added to it, and later the factor of the precision.
    needed, held = 3 * 8 * sum(numbers.values()), _machine_memory()
    if needed <= held:
        return
    largest = max(numbers, key=lambda name: numbers[name])
    blocks = " and ".join(f"{side:,} x {side:,}" for side in sides[largest])
    inside = largest in shapes or largest not in plan.rest
    raise UnsupportedError.of(
        f"structure='kron', site {largest!r}",
        f"blocks that fit into the {held / 1e9:,.3g} GB of memory of this machine",
        f"{'factors' if inside else 'a dense block'} of {blocks} numbers, and {needed / 1e9:,.3g} GB in all"
        + ("" if inside else "; no linear map of this site is seen, as inside of bnn.module"),
        ("" if inside else "the layer in the language (bnn.dense, bnn.conv2d), ")
        + "weights= with the names of smaller layers, or structure='diag' or 'lowrank'",
    )


def _machine_memory() -> float:
    """Bytes of memory of this machine, infinity if the system does not report it."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def _cotangents(
    problem: Problem, u: Mapping[str, np.ndarray], curvature: str, fisher: str, samples: int, seed: int
) -> Cotangents:
    """R_n (D, C), with R_n R_n' the Fisher information or its estimate."""
    likelihood = problem.program.likelihood
    if not problem.program.language:
        likelihood.fisher(None)
    if curvature == "empirical":
        targets = np.asarray(problem.targets)
        return lambda eta, rows: np.asarray(likelihood.score(eta, targets[rows]))[:, :, None]
    observed = isinstance(likelihood, HasObservedInformation)
    if observed and fisher == "sampled":
        raise UnsupportedError.of(
            "fisher='sampled'",
            "targets that can be drawn as they came about",
            f"{type(likelihood).__name__} ones, of which what censors them is not known",
            "fisher='exact', or curvature='empirical'",
        )
    if observed:
        targets = np.asarray(problem.targets)
        return lambda eta, rows: np.asarray(likelihood.information_root(eta, targets[rows]))
    if fisher == "exact":
        return lambda eta, rows: np.asarray(likelihood.fisher_root(eta))
    # All targets are drawn at once, so that they do not depend on how rows are divided.
    eta = np.concatenate([part for _, part in _predictors(problem, u)])
    drawn = Prediction(*likelihood.mixture_parameters(eta[None])).sample(samples, seed)

    def sampled(eta: np.ndarray, rows: slice) -> np.ndarray:
        scores = [np.asarray(likelihood.score(eta, y[rows])) for y in drawn]
        return np.stack(scores, -1) / math.sqrt(samples)

    return sampled


def _predictors(problem: Problem, u: Mapping[str, np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """eta (B, D) for chunks of the training rows."""
    system = problem.system
    plan = plan_of(problem, u, tuple(latent_names(problem)))
    chunk = int(np.clip(2**26 // (16 * plan.activations), 1, problem.rows))
    for start, stop in chunks(problem.rows, chunk):
        part = map_data(
            lambda a, i=start, j=stop: system.asarray(padded(np.asarray(a[i:j]), chunk)), problem.inputs
        )
        value = compiled(problem, plan, "predictor")(system_values(problem, u), part)
        yield slice(start, stop), system.to_numpy(value)[: stop - start]


@dataclass
class _Rows:
    """Curvatures that are B'B, B the stacked R_n' J_n: one block of rows at a time, in float64.

    passes: gradients so far, in passes over the data.
    """

    problem: Problem
    u: Mapping[str, np.ndarray]
    where: Where
    cotangents: Cotangents
    memory: int
    passes: float = 0.0

    @property
    def plan(self) -> Plan:
        return plan_of(self.problem, self.u, self.where.sites)

    def chunks(self, extra: Callable[[int], int] = lambda width: 0) -> Iterator[Factors]:
        arguments = (
            self.problem,
            self.u,
            self.problem.inputs,
            self.cotangents,
            self.memory,
            self.where.sites,
            extra,
        )
        for part in factors_of(*arguments):
            self.passes += len(part.eta) / self.problem.rows * (len(part.active) + len(part.resting))
            maps = {
                name: (inputs.astype(np.float64, copy=False), gradients.astype(np.float64, copy=False))
                for name, (inputs, gradients) in part.maps.items()
            }
            rest = part.rest.astype(np.float64, copy=False)
            gradients = (gradients for _, gradients in maps.values())
            check_finite("finite gradients of the predictor", rest, *gradients)
            yield Factors(part.rows, part.eta, maps, rest, part.active, part.resting)

    def blocks(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Number of rows, rows of B with gradients of weights (M, P), and rows that affect only the rest (M', R)."""
        for part in self.chunks(lambda width: 2 * width * self.where.size):
            rows = len(part.eta)
            jacobian = np.zeros((rows, len(part.active), self.where.size))
            own = replace(part, rest=part.rest[:, part.active])
            fill(jacobian, np.arange(len(part.active)), True, self.problem, self.plan, own)
            resting = part.rest[:, part.resting].reshape(rows * len(part.resting), part.rest.shape[-1])
            yield rows, self.where.chosen(jacobian).reshape(-1, self.where.count), resting

    @cached_property
    def _places(self) -> dict[str, np.ndarray]:
        """For each site, the indices of its coordinates among those that are kept, -1 for the others."""
        place = np.full(self.where.size, -1)
        kept = np.arange(self.where.size) if self.where.kept is None else self.where.kept
        place[kept] = np.arange(len(kept))
        return {name: place[at] for name, at in site_slices(self.problem, self.where.sites).items()}

    def full(self) -> tuple[DataCurvature, float]:
        """B'B, or B if it is smaller."""
        from scipy.linalg.blas import dsyrk  # pyright: ignore[reportAttributeAccessIssue]

        size = self.where.count
        at = np.concatenate([self._places[name] for name in self.plan.rest] or [np.zeros(0, dtype=int)])
        kept = np.flatnonzero(at >= 0)
        gram = np.zeros((len(kept), len(kept)))
        stacked: list[np.ndarray] = []
        total: np.ndarray | None = None
        for rows, block, resting in self.blocks():
            gram += resting[:, kept].T @ resting[:, kept]
            if stacked or (total is None and len(block) // rows * self.problem.rows + len(kept) < size):
                stacked.append(block)
                continue
            if total is None:
                total = np.zeros((size, size), order="F")
            # One triangle only: half the work of a product of matrices.
            total = dsyrk(1.0, block.T, beta=1.0, c=total, overwrite_c=True, lower=True)
        if total is None:
            values, vectors = np.linalg.eigh(gram)
            some = values > 0
            root = np.zeros((int(some.sum()), size))
            root[:, at[kept]] = (vectors[:, some] * np.sqrt(values[some])).T
            return FactorCurvature(np.concatenate([*stacked, root])), self.passes
        matrix = np.ascontiguousarray(np.tril(total) + np.tril(total, -1).T)
        matrix[np.ix_(at[kept], at[kept])] += gram
        return FullCurvature(matrix), self.passes

    def diagonal(self) -> tuple[DataCurvature, float]:
        total = np.zeros(self.where.size)
        local = site_slices(self.problem, self.where.sites)
        for part in self.chunks():
            for name, linear in self.plan.maps.items():
                inputs, gradients = part.maps[name]
                if linear.weight in local:
                    total[local[linear.weight]] += _squares(inputs, gradients, self.memory).reshape(-1)
                if linear.bias in local:
                    total[local[linear.bias]] += np.sum(gradients.sum(2) ** 2, axis=(0, 1))
            for name, at in site_slices(self.problem, self.plan.rest).items() if self.plan.rest else ():
                total[local[name]] += np.sum(part.rest[:, :, at] ** 2, axis=(0, 1))
        return DiagonalCurvature(self.where.chosen(total)), self.passes

    def kronecker(self, sharing: str) -> tuple[DataCurvature, float]:
        parted = [name for name, place in self._places.items() if np.any(place < 0)]
        if parted:
            raise UnsupportedError.of(
                "structure='kron'",
                "positions that make up whole sites",
                f"a part of {parted[0]!r}",
                "structure='full' or 'diag'",
            )
        _refuse_large(self.plan, {name: len(place) for name, place in self._places.items()})
        left: dict[str, Any] = {}
        right: dict[str, Any] = {}
        dense: dict[str, Any] = {}
        local = self._places
        for part in self.chunks():
            for name, linear in self.plan.maps.items():
                inputs, gradients = part.maps[name]
                summed = gradients.sum(2).reshape(-1, linear.shape[1])
                if linear.weight in local:
                    a = inputs.mean(1) if sharing == "reduce" else inputs.reshape(-1, linear.shape[0])
                    g = summed if sharing == "reduce" else gradients.reshape(-1, linear.shape[1])
                    terms = self.problem.rows * (1 if sharing == "reduce" else linear.places)
                    left[linear.weight] = left.get(linear.weight, 0.0) + a.T @ a / terms
                    right[linear.weight] = right.get(linear.weight, 0.0) + g.T @ g
                if linear.bias is not None and linear.bias in local:
                    dense[linear.bias] = dense.get(linear.bias, 0.0) + summed.T @ summed
            for name, at in site_slices(self.problem, self.plan.rest).items() if self.plan.rest else ():
                rows = part.rest[:, :, at].reshape(-1, at.stop - at.start)
                dense[name] = dense.get(name, 0.0) + rows.T @ rows
        shapes = {linear.weight: linear.shape for linear in self.plan.maps.values()}
        blocks = [
            KroneckerBlock(name, shapes[name], left[name], right[name], place)
            if name in left
            else DenseBlock(name, dense[name], place)
            for name, place in local.items()
        ]
        return KroneckerCurvature(blocks), self.passes

    def low_rank(self, rank: int, own: np.ndarray, seed: int) -> tuple[DataCurvature, float]:
        """Eigenpairs from a dense matrix, or its dual, if one is small; else from products with vectors.

        own: (Q,) the positions with a separate block.
        """
        size = self.where.count
        width = np.asarray(self.cotangents(self.plan.eta, slice(0, 1))).shape[-1]
        terms = self.problem.rows * width
        if size <= DENSE or (terms <= DENSE and 8 * terms * size <= self.memory):
            curvature, passes = self.full()
            if not isinstance(curvature, FactorCurvature):
                return _low_rank(curvature.matrix(), rank, own), passes
            factor = np.where(own, 0.0, curvature.factor)
            values, vectors = _largest(factor @ factor.T, rank)
            block = curvature.factor[:, own].T @ curvature.factor[:, own]
            return _with_block(_positive(values, vectors.T @ factor, dual=True), block, own), passes
        # The factors fit into memory between two products, or are computed again for each.
        held = 8 * self.problem.rows * self.plan.floats(self.problem, width)
        kept = list(self.chunks()) if held <= self.memory else None

        def product(flat: np.ndarray) -> np.ndarray:
            v = np.zeros(self.where.size)
            v[slice(None) if self.where.kept is None else self.where.kept] = np.ravel(flat)
            total = np.zeros(self.where.size)
            for part in self.chunks() if kept is None else kept:
                self._add_product(total, v, part)
            return self.where.chosen(total)

        return _low_rank_of_products(product, rank, own, seed), self.passes

    def _add_product(self, total: np.ndarray, v: np.ndarray, part: Factors) -> None:
        """total += B'(B v) for the rows of a chunk, from factors, without a gradient of a weight for any row."""
        local = site_slices(self.problem, self.where.sites)
        rest = np.concatenate([v[local[name]] for name in self.plan.rest] or [np.zeros(0)])
        z = part.rest @ rest
        for name, linear in self.plan.maps.items():
            inputs, gradients = part.maps[name]
            moved = np.zeros((*inputs.shape[:2], linear.shape[1]))
            if linear.weight in local:
                moved = inputs @ v[local[linear.weight]].reshape(linear.shape)
            if linear.bias in local:
                moved = moved + v[local[linear.bias]]
            z[:, part.active] += np.einsum("bto,bato->ba", moved, gradients)
        for name, linear in self.plan.maps.items():
            inputs, gradients = part.maps[name]
            pulled = np.einsum("ba,bato->bto", z[:, part.active], gradients).reshape(-1, linear.shape[1])
            if linear.weight in local:
                total[local[linear.weight]] += (inputs.reshape(-1, linear.shape[0]).T @ pulled).reshape(-1)
            if linear.bias in local:
                total[local[linear.bias]] += pulled.sum(0)
        for name, at in site_slices(self.problem, self.plan.rest).items() if self.plan.rest else ():
            total[local[name]] += np.einsum("bc,bcr->r", z, part.rest[:, :, at])


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


def _low_rank(matrix: np.ndarray, rank: int, own: np.ndarray) -> FactorCurvature:
    """The largest eigenpairs of the positions without a separate block, and the block of the others."""
    rest = np.where(own | own[:, None], 0.0, matrix)
    values, vectors = _largest(rest, rank)
    return _with_block(_positive(values, vectors.T), matrix[np.ix_(own, own)], own)


def _low_rank_of_products(
    product: Callable[[np.ndarray], np.ndarray], rank: int, own: np.ndarray, seed: int
) -> FactorCurvature:
    """`_low_rank` of a matrix that is given by its products with vectors (Q,)."""
    values, vectors = _arnoldi(
        lambda v: np.where(own, 0.0, product(np.where(own, 0.0, np.ravel(v)))), len(own), rank, seed
    )
    units = np.eye(len(own))[own] if own.any() else np.zeros((0, len(own)))
    block = np.array([product(unit)[own] for unit in units]).reshape(len(units), len(units))
    return _with_block(_positive(values, vectors.T), 0.5 * (block + block.T), own)


def _with_block(rows: np.ndarray, block: np.ndarray, own: np.ndarray) -> FactorCurvature:
    """Rows of a factor, and below them those of a block over the positions `own`.

    The noise is one direction of the curvature among many. Without a block it would seldom be among the largest
    eigenpairs, and would have the curvature of its prior alone.
    """
    if not own.any():
        return FactorCurvature(rows)
    values, vectors = np.linalg.eigh(block)
    below = np.zeros((len(values), len(own)))
    below[:, own] = vectors.T
    return FactorCurvature(np.concatenate([rows, _positive(values, below)]))


def _largest(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues, largest first, and their eigenvectors as columns."""
    from scipy.linalg import eigh

    size = len(matrix)
    values, vectors = eigh(matrix, subset_by_index=(max(0, size - rank), size - 1))
    return values[::-1], vectors[:, ::-1]


def _arnoldi(
    product: Callable[[np.ndarray], np.ndarray], size: int, rank: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues of a symmetric operator and their eigenvectors, by implicitly restarted Lanczos."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    start = np.random.default_rng(seed).standard_normal(size)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    try:
        values, vectors = eigsh(operator, k=rank, which="LA", v0=start)
    except ArpackNoConvergence as error:
        raise CurvatureError.of(
            "structure='lowrank'",
            f"{rank} eigenpairs",
            f"{len(error.eigenvalues)} that converged",
            "a smaller rank",
        ) from error
    order = np.argsort(values)[::-1]
    return values[order], vectors[:, order]


def _positive(values: np.ndarray, rows: np.ndarray, dual: bool = False) -> np.ndarray:
    """sqrt(lambda_i) v_i' of the positive eigenvalues; rows are v_i', or already u_i' B of the dual B B'."""
    some = values > max(float(np.max(np.abs(values), initial=0.0)) * 1e-14, 0.0)
    return rows[some] if dual else rows[some] * np.sqrt(values[some])[:, None]


@dataclass
class _Hessian:
    """The Hessian of -sum log p(y_n | x_n, u), by products with vectors: the pullback of the gradient.

    It is a sum over chunks of rows. Directions are taken as many at a time as memory allows.
    """

    problem: Problem
    u: Mapping[str, np.ndarray]
    where: Where
    memory: int
    passes: float = 0.0

    def structured(
        self, structure: str, rank: int | None, own: np.ndarray, seed: int
    ) -> tuple[DataCurvature, float]:
        size = self.where.count
        if structure == "lowrank" and size > DENSE:
            assert rank is not None
            return _low_rank_of_products(lambda v: self.products(v[None])[0], rank, own, seed), self.passes
        matrix = None if structure == "diag" else np.empty((size, size))
        diagonal = np.empty(size)
        step = self._sizes[1]
        for start, stop in chunks(size, step):
            directions = np.zeros((stop - start, size))
            directions[np.arange(stop - start), np.arange(start, stop)] = 1.0
            products = self.products(directions)
            diagonal[start:stop] = products[np.arange(stop - start), np.arange(start, stop)]
            if matrix is not None:
                matrix[start:stop] = products
        if matrix is None:
            return DiagonalCurvature(diagonal), self.passes
        matrix = 0.5 * (matrix + matrix.T)
        if structure == "lowrank":
            assert rank is not None
            return _low_rank(matrix, rank, own), self.passes
        return FullCurvature(matrix), self.passes

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Rows and directions per call."""
        program = self.problem.program
        rows = self.problem.rows
        if program.coupled:
            per_row = 8 * 4 * program.parameter_count
        else:
            per_row = 8 * 4 * plan_of(self.problem, self.u, self.where.sites).activations
            rows = int(np.clip(self.memory // (4 * per_row), 1, rows))
        per_direction = per_row * rows + 8 * 4 * self.where.size
        return rows, int(np.clip(self.memory // per_direction, 1, self.where.count))

    def products(self, directions: np.ndarray) -> np.ndarray:
        """The products H v for directions (K, P), (K, P)."""
        problem, system = self.problem, self.problem.system
        function = problem.program.cached(("hessian", self.where.sites), self._build)
        rows, step = self._sizes
        step = min(step, len(directions))
        values = system_values(problem, self.u)
        total = np.zeros_like(directions)
        for start, stop in chunks(problem.rows, rows):
            x, y = (
                map_data(lambda a, i=start, j=stop: system.asarray(padded(np.asarray(a[i:j]), rows)), data)
                for data in (problem.inputs, problem.targets)
            )
            counted = system.asarray((np.arange(rows) < stop - start).astype(float))
            for first, last in chunks(len(directions), step):
                whole = np.zeros((step, self.where.size))
                kept = slice(None) if self.where.kept is None else self.where.kept
                whole[: last - first, kept] = directions[first:last]
                result = system.to_numpy(function(values, x, y, counted, system.asarray(whole)))
                total[first:last] += self.where.chosen(result.astype(np.float64)[: last - first])
                self.passes += (last - first) * (stop - start) / problem.rows
        check_finite("a finite Hessian", total)
        return total

    def _build(self) -> Callable[..., Any]:
        program, system = self.problem.program, self.problem.system
        sites = self.where.sites

        def loss(flat: Any, values: Any, x: Any, y: Any, counted: Any) -> Any:
            u = {**values, **program.unravel(flat, sites)}
            return -(counted * program.log_likelihood(u, x, y)).sum()

        def products(values: Any, x: Any, y: Any, counted: Any, directions: Any) -> Any:
            def gradient(flat: Any) -> tuple[Any, Any]:
                value, gradient = system.value_and_grad(loss)(flat, values, x, y, counted)
                return gradient, value

            # The Hessian is symmetric: its product with a vector from the left is that from the right.
            _, pullback, _ = system.vjp(gradient, program.ravel(values, sites))
            return system.vmap(pullback)(directions)

        return system.compile(products)
