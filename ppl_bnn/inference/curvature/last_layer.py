"""A Gaussian over the last layer alone, eta = W' a + b: the Jacobian of a row is its features (x) the identity.

With features a_n (I,) of the rest of the network and the Fisher information F_n (D, D) the curvature of the weight is
sum_n a_n a_n' (x) F_n, and that of the bias sum_n F_n. Kronecker factors, diagonals and products with vectors need
sums of F_n over rows and products with it, never a Jacobian (D, I D) or a matrix (D, D) of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks, map_data, row_count
from ppl_bnn.inference.curvature.jacobian import LinearMap, padded_rows, plan_of
from ppl_bnn.inference.curvature.linear_algebra import check_finite
from ppl_bnn.inference.curvature.products import Products
from ppl_bnn.inference.flat_vector import Values, Where, first_rows, system_values
from ppl_bnn.language.handlers import recorded_linear


class Information(NamedTuple):
    """The Fisher information of some rows, diag(d_n) + sign V_n V_n', with d (B, D) and V (B, D, C)."""

    d: np.ndarray
    v: np.ndarray
    sign: float

    def diagonals(self) -> np.ndarray:
        """The diagonals, (B, D)."""
        return self.d + self.sign * np.sum(self.v**2, axis=-1)

    def total(self) -> np.ndarray:
        """The sum over rows, (D, D)."""
        flat = np.ascontiguousarray(self.v.transpose(0, 2, 1)).reshape(-1, self.v.shape[1])
        found = self.sign * (flat.T @ flat)
        np.fill_diagonal(found, found.diagonal() + self.d.sum(0))
        return found

    def times(self, vectors: np.ndarray) -> np.ndarray:
        """The products of each row's matrix with its vectors, (K, B, D)."""
        along = np.einsum("bdc,kbd->kbc", self.v, vectors)
        return self.d * vectors + self.sign * np.einsum("bdc,kbc->kbd", self.v, along)


# (eta (B, D), the rows) -> the Fisher information, or its estimate
InformationOf = Callable[[np.ndarray, slice], Information]


class Layer(NamedTuple):
    """The places of the weight (I, O), and of the bias, in the flat vector; and where the features come from."""

    map: LinearMap
    weight: slice
    bias: slice | None

    @property
    def shape(self) -> tuple[int, int]:
        """(I, O)."""
        return self.map.shape


def last_layer(problem: Problem, u: Values, where: Where) -> Layer | None:
    """The layer, if the Gaussian is over the whole weight of a map whose output is eta, and its bias at most."""
    plan = plan_of(problem, u, where.sites)
    if plan.last is None or where.kept is not None:
        return None
    linear = plan.maps[plan.last]
    return Layer(linear, plan.slices[plan.last], plan.slices.get(linear.bias or ""))


def features(
    problem: Problem, u: Values, x: Any, layer: Layer, memory: int = 2**28
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Rows, eta (B, D) and features (B, I) in float64, for chunks of the rows of x: one forward pass."""
    program, system, (use,) = problem.program, problem.system, layer.map.uses
    plan = plan_of(problem, u, tuple(name for name in (layer.map.weight, layer.map.bias) if name))
    values, first, rows = system_values(problem, u), first_rows(problem), row_count(x)

    def one(values: Any, row: Any, first: Any) -> tuple[Any, Any]:
        w = program.constrain(values, *first)
        run, inputs = recorded_linear(program.model, w, map_data(lambda a: a[None], row))
        return run.predictor[0], inputs[use[0]][use[1]].reshape(-1)

    def build() -> Callable[..., Any]:
        return system.compile(system.vmap(one, in_axes=(None, 0, None)))

    function = program.cached(("features", layer.map.weight), build)
    size = int(np.clip(memory // (16 * (plan.activations + sum(layer.shape))), 1, rows))
    for start, stop in chunks(rows, size):
        found = function(values, padded_rows(problem, x, start, stop, size), first)
        eta, inputs = (system.to_numpy(each)[: stop - start].astype(float) for each in found)
        yield slice(start, stop), eta, inputs


@dataclass(frozen=True)
class LayerRows:
    """The training rows, a few at a time: rows, features (B, I) and `Information`; `information` is that of eta."""

    problem: Problem
    u: Values
    layer: Layer
    memory: int
    information: InformationOf
    _held: list[tuple[slice, np.ndarray, np.ndarray]] = field(default_factory=list, repr=False)

    def __iter__(self) -> Iterator[tuple[np.ndarray, Information]]:
        wide, high = self.layer.shape
        for rows, eta, inputs in self._features():
            check_finite("a finite predictor", eta, inputs)
            # The information of a row has about three arrays of the size of eta while it is used.
            size = max(1, self.memory // (8 * (8 * high + wide)))
            for start, stop in chunks(len(eta), size):
                part = self.information(eta[start:stop], slice(rows.start + start, rows.start + stop))
                check_finite("a finite curvature", part.d, part.v)
                yield inputs[start:stop], part

    def _features(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Kept after the first pass, if memory allows."""
        if self._held:
            yield from self._held
            return
        keep = 8 * self.problem.rows * sum(self.layer.shape) <= self.memory
        found = []
        for part in features(self.problem, self.u, self.problem.inputs, self.layer, self.memory):
            if keep:
                found.append(part)
            yield part
        self._held.extend(found)

    def diagonal(self) -> np.ndarray:
        """The diagonal of the curvature over the flat vector, (P,)."""
        wide, high = self.layer.shape
        weight, bias = np.zeros((wide, high)), np.zeros(high)
        for inputs, part in self:
            diagonals = part.diagonals()
            weight += (inputs**2).T @ diagonals
            bias += diagonals.sum(0)
        return self._flat(weight, bias)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean of a a' (I, I) and the sum of F (D, D) over rows."""
        wide, high = self.layer.shape
        left, right = np.zeros((wide, wide)), np.zeros((high, high))
        for inputs, part in self:
            left += inputs.T @ inputs / self.problem.rows
            right += part.total()
        return left, right

    def products(self, directions: np.ndarray) -> np.ndarray:
        """The products of the curvature with vectors, (K, P)."""
        layer, (wide, high), count = self.layer, self.layer.shape, len(directions)
        at = directions[:, layer.weight].reshape(count, wide, high)
        offset = 0.0 if layer.bias is None else directions[:, None, layer.bias]
        weight, bias = np.zeros((count, wide, high)), np.zeros((count, high))
        for inputs, part in self:
            along = part.times(inputs @ at + offset)
            weight += inputs.T @ along
            bias += along.sum(1)
        return self._flat(weight, bias)

    def _flat(self, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        """Weights (..., I, O) and biases (..., O) as flat vectors, (..., P)."""
        layer, (wide, high) = self.layer, self.layer.shape
        total = np.empty((*bias.shape[:-1], wide * high + (0 if layer.bias is None else high)))
        total[..., layer.weight] = weight.reshape(*bias.shape[:-1], wide * high)
        if layer.bias is not None:
            total[..., layer.bias] = bias
        return total


@dataclass
class LayerProducts(Products):
    """Products of the curvature of the last layer with vectors, from features."""

    rows: LayerRows

    def __call__(self, directions: np.ndarray) -> np.ndarray:
        found = self.rows.products(directions.astype(float))
        self.passes += len(directions)
        check_finite("a finite curvature", found)
        return found.astype(self.dtype)
