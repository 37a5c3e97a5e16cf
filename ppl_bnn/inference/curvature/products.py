"""Products of curvatures and Jacobians with vectors, by forward and reverse derivatives: neither is ever held.

A product of the Gauss-Newton matrix, sum_n J_n' R_n R_n' J_n v, takes one forward derivative (J v) and one reverse one
(J' of the rest) for a chunk of rows, whose activations are all the memory besides a few vectors (Schraudolph 2002).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks, padded, row_count
from ppl_bnn.inference.curvature.gaussians import LowRankPrecision
from ppl_bnn.inference.curvature.jacobian import (
    Cotangents,
    JacobianPlan,
    hessian_product,
    padded_rows,
    plan_of,
    predictor_by_row,
    predictor_of,
)
from ppl_bnn.inference.curvature.lanczos import BLOCK
from ppl_bnn.inference.curvature.linear_algebra import check_finite
from ppl_bnn.inference.flat_vector import Values, Where, first_rows, system_values


@dataclass
class AtPoint:
    """A curvature at one point. `passes`: gradients or products so far, in passes over the data."""

    problem: Problem
    u: Values
    where: Where
    memory: int
    passes: float = field(default=0.0, kw_only=True)

    @cached_property
    def plan(self) -> JacobianPlan:
        return plan_of(self.problem, self.u, self.where.sites)


class Products(AtPoint, ABC):
    """The products H v of a curvature at one point."""

    @property
    def dtype(self) -> str:
        """The floating type of the products."""
        return self.problem.dtype

    @cached_property
    def _values(self) -> dict[str, Any]:
        return system_values(self.problem, self.u)

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Rows and directions per call."""
        program, rows = self.problem.program, self.problem.rows
        per_row = 8 * 4 * program.parameter_count
        if not program.coupled:
            per_row = self.plan.row_memory
            rows = int(np.clip(self.memory // (4 * per_row), 1, rows))
        per_direction = per_row * rows + 8 * 4 * self.where.size
        return rows, int(np.clip(self.memory // per_direction, 1, self.where.count))

    @property
    def directions(self) -> int:
        """The number of directions that memory allows at once."""
        return self._sizes[1]

    @abstractmethod
    def __call__(self, directions: np.ndarray) -> np.ndarray:
        """The products (K, Q) for directions (K, Q)."""


class DerivedProducts(Products):
    """Products by automatic differentiation, for some rows at a time."""

    @abstractmethod
    def _build(self) -> Callable[..., Any]:
        """(values, directions, x, arguments of the rows) -> products (K, size), compiled."""

    @abstractmethod
    def _of_rows(self, start: int, stop: int, x: Any) -> tuple[Any, ...]:
        """What the function needs of the rows besides x; rows from `stop` on do not count."""

    def __call__(self, directions: np.ndarray) -> np.ndarray:
        # Of a common size, so that nothing is compiled a second time.
        size = self.directions if len(directions) >= self.directions else min(BLOCK, self.directions)
        found = np.empty(directions.shape, self.dtype)
        for start, stop in chunks(len(directions), size):
            found[start:stop] = self._some(padded(directions[start:stop], size))[: stop - start]
            self.passes += stop - start
        check_finite("a finite curvature", found)
        return found

    def _some(self, directions: np.ndarray) -> np.ndarray:
        problem, size = self.problem, self._sizes[0]
        function = problem.program.cached((type(self).__name__, self.where.sites), self._build)
        whole, total = (
            problem.system.asarray(self.where.spread(directions)),
            np.zeros(directions.shape, self.dtype),
        )
        for start, stop in chunks(problem.rows, size):
            x = padded_rows(problem, problem.inputs, start, stop, size)
            result = function(self._values, whole, x, *self._of_rows(start, stop, x), first_rows(problem))
            total += self.where.chosen(problem.system.to_numpy(result))
        return total


@dataclass
class HessianProducts(DerivedProducts):
    """Of the Hessian of -sum log p(y_n | x_n, u): the pullback of the gradient."""

    def _of_rows(self, start: int, stop: int, x: Any) -> tuple[Any, ...]:
        problem, size = self.problem, self._sizes[0]
        counted = (np.arange(size) < stop - start).astype(float)
        return padded_rows(problem, problem.targets, start, stop, size), problem.system.asarray(counted)

    def _build(self) -> Callable[..., Any]:
        program, system, sites = self.problem.program, self.problem.system, self.where.sites

        def loss(flat: Any, values: Any, x: Any, y: Any, counted: Any) -> Any:
            u = {**values, **program.unravel(flat, sites)}
            return -(counted * program.log_likelihood(u, x, y)).sum()

        def products(values: Any, directions: Any, x: Any, y: Any, counted: Any, first: Any) -> Any:
            flat = program.ravel(values, sites)
            return system.vmap(hessian_product(system, loss, flat, values, x, y, counted))(directions)

        return system.compile(products)


@dataclass
class GaussNewtonProducts(DerivedProducts):
    """Of sum_n J_n' R_n R_n' J_n, with `cotangents` R_n; they are kept as far as `memory` allows."""

    cotangents: Cotangents
    _roots: dict[int, Any] = field(default_factory=dict, repr=False)

    def _of_rows(self, start: int, stop: int, x: Any) -> tuple[Any, ...]:
        problem, size = self.problem, self._sizes[0]
        if start in self._roots:
            return (self._roots[start],)
        eta = problem.system.to_numpy(predictor_by_row(problem)(self._values, x))[: stop - start]
        check_finite("a finite predictor", eta)
        root = np.zeros((size, *(known := np.asarray(self.cotangents(eta, slice(start, stop)))).shape[1:]))
        root[: stop - start] = known
        found = problem.system.asarray(root)
        if 8 * root.size * (len(self._roots) + 1) <= self.memory:
            self._roots[start] = found
        return (found,)

    def _build(self) -> Callable[..., Any]:
        program, system, sites = self.problem.program, self.problem.system, self.where.sites

        def products(values: Any, directions: Any, x: Any, root: Any, first: Any) -> Any:
            eta = predictor_of(program, values, sites, x, first)
            flat = program.ravel(values, sites)
            _, pullback, _ = system.vjp(lambda at: (eta(at), ()), flat)

            def one(direction: Any) -> Any:
                _, along = system.jvp(eta, flat, direction)
                # R (R' J v), row by row, with columns of one.
                along = root.swapaxes(1, 2) @ along[:, :, None]
                return pullback((root @ along)[:, :, 0])

            return system.vmap(one)(directions)

        return system.compile(products)


def projected(
    problem: Problem, u: Values, x: Any, gaussian: LowRankPrecision, where: Where, memory: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """eta (B, D) and J S J' (B, D, D) for chunks of the rows of x, by products: no Jacobian of a row is held.

    It takes a forward derivative of all rows for each row of the factor, and for each row and output a reverse and a
    forward one.
    """
    program, system, sites = problem.program, problem.system, where.sites
    plan, values, first = plan_of(problem, u, sites), system_values(problem, u), first_rows(problem)

    def both() -> Callable[..., Any]:
        def column(values: Any, output: Any, inverse: Any, x: Any, first: Any) -> Any:
            eta, flat = predictor_of(program, values, sites, x, first), program.ravel(values, sites)
            _, pullback, _ = system.vjp(lambda at: (eta(at), ()), flat)
            return system.jvp(eta, flat, inverse * pullback(output[None]))[1][0]

        return system.compile(column)

    along = _forward(problem, sites)
    column = program.cached(("J d J' e", sites), both)
    count, outputs = row_count(x), plan.eta.shape[-1]
    size = int(np.clip(memory // (2 * plan.row_memory), 1, count))
    inverse = 1.0 / gaussian.diagonal
    spread_inverse = system.asarray(where.spread(inverse))
    units = np.eye(outputs)
    for start, stop in chunks(count, size):
        part = padded_rows(problem, x, start, stop, size)
        eta = system.to_numpy(predictor_by_row(problem)(values, part))[: stop - start]
        slopes = np.zeros((stop - start, outputs, len(gaussian.factor)))
        for number, row in enumerate(gaussian.factor):
            direction = system.asarray(where.spread(row * inverse))
            slopes[:, :, number] = system.to_numpy(along(values, direction, part, first)[1])[: stop - start]
        spread = np.zeros((stop - start, outputs, outputs))
        for row in range(start, stop):
            one = padded_rows(problem, x, row, row + 1, 1)
            for output in np.flatnonzero(plan.moved):
                found = column(values, system.asarray(units[output]), spread_inverse, one, first)
                spread[row - start, :, output] = system.to_numpy(found)
        yield eta, gaussian.project_products(0.5 * (spread + spread.transpose(0, 2, 1)), slopes)


def jointly_projected(
    problem: Problem, u: Values, x: Any, gaussian: LowRankPrecision, where: Where, memory: int
) -> tuple[np.ndarray, np.ndarray]:
    """eta (N, D) and J S J' (N D, N D) over all rows of x together, by products; the outputs of a row are adjacent.

    It takes a forward derivative of all rows for each row of the factor, and for each row and output a reverse one of
    the row and a forward one of all rows. The result is all that is held besides some vectors.
    """
    program, system, sites = problem.program, problem.system, where.sites
    plan, values, first = plan_of(problem, u, sites), system_values(problem, u), first_rows(problem)

    def reverse() -> Callable[..., Any]:
        def pulled(values: Any, output: Any, inverse: Any, x: Any, first: Any) -> Any:
            eta, flat = predictor_of(program, values, sites, x, first), program.ravel(values, sites)
            _, pullback, _ = system.vjp(lambda at: (eta(at), ()), flat)
            return inverse * pullback(output[None])

        return system.compile(pulled)

    along, pulled = _forward(problem, sites), program.cached(("d J' e", sites), reverse)
    count, outputs = row_count(x), plan.eta.shape[-1]
    size = int(np.clip(memory // (2 * plan.row_memory), 1, count))
    inverse = 1.0 / gaussian.diagonal
    spread_inverse, units = system.asarray(where.spread(inverse)), np.eye(outputs)
    eta = np.empty((count, outputs))

    def forward(direction: Any) -> np.ndarray:
        """J v (N, D) of all rows."""
        found = np.empty((count, outputs))
        for start, stop in chunks(count, size):
            part = along(values, direction, padded_rows(problem, x, start, stop, size), first)
            eta[start:stop], found[start:stop] = (system.to_numpy(each)[: stop - start] for each in part)
        return found

    directions = (system.asarray(where.spread(row * inverse)) for row in gaussian.factor)
    slopes = np.stack([forward(direction) for direction in directions], -1)
    spread = np.zeros((count, outputs, count, outputs))
    for row in range(count):
        one = padded_rows(problem, x, row, row + 1, 1)
        for output in np.flatnonzero(plan.moved):
            direction = pulled(values, system.asarray(units[output]), spread_inverse, one, first)
            spread[:, :, row, output] = forward(direction)
    spread = spread.reshape(1, count * outputs, -1)
    spread = 0.5 * (spread + spread.transpose(0, 2, 1))
    return eta, gaussian.project_products(spread, slopes.reshape(1, count * outputs, -1))[0]


def _forward(problem: Problem, sites: tuple[str, ...]) -> Callable[..., Any]:
    """The function (values, v, x, first) -> eta (B, D) and J v (B, D), compiled once for each program and sites."""
    program, system = problem.program, problem.system

    def build() -> Callable[..., Any]:
        def along(values: Any, direction: Any, x: Any, first: Any) -> Any:
            eta = predictor_of(program, values, sites, x, first)
            return system.jvp(eta, program.ravel(values, sites), direction)

        return system.compile(along)

    return program.cached(("J v", sites), build)
