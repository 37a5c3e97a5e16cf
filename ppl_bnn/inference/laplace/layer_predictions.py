"""Predictions of a Gaussian over the last layer, from features that are kept for inputs that come again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import chunks
from ppl_bnn.inference.curvature import last_layer
from ppl_bnn.inference.curvature.gaussians import Diagonal, FlatGaussian, Kronecker, LowRankPrecision, Rotated
from ppl_bnn.inference.curvature.last_layer import Layer
from ppl_bnn.inference.flat_vector import Values
from ppl_bnn.inference.laplace.row_covariances import (
    Common,
    IndependentRows,
    RotatedRows,
    RowCovariances,
    UpdatedRows,
)

# Bytes of features that are kept.
KEPT = 2**26
# Beyond so many outputs no covariance (D, D) of a row is made if there is another way.
MANY = 200


class KeptFeatures:
    """eta (N, D) and features (N, I) of inputs, found again by the content of the inputs while they fit into `most`."""

    def __init__(self, most: int = KEPT):
        self.most = most
        self._known: OrderedDict[str, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._turn = threading.Lock()

    def __call__(
        self, problem: Problem, u: Values, x: Any, layer: Layer, memory: int
    ) -> tuple[np.ndarray, np.ndarray]:
        key = f"{problem.dtype} {problem.device} {checks.data_hash(x, np.empty(0))}"
        with self._turn:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        _, *parts = zip(*last_layer.features(problem, u, x, layer, memory), strict=True)
        eta, inputs = (np.concatenate(part) for part in parts)
        with self._turn:
            self._known[key] = eta, inputs
            # The oldest go first, and what is too large by itself is not kept.
            while sum(a.nbytes + b.nbytes for a, b in self._known.values()) > self.most:
                self._known.popitem(last=False)
        return eta, inputs


@dataclass
class LayerPredictions:
    """The predictor of a Gaussian about the `centre` (values of all sites) over the places of the layer."""

    layer: Layer
    gaussian: FlatGaussian
    centre: Values
    features: KeptFeatures = field(default_factory=KeptFeatures)

    @cached_property
    def covariances(self) -> Callable[[np.ndarray], RowCovariances] | None:
        """Covariances as a function of features (N, I); None for a structure without one."""
        return layer_covariances(self.gaussian, self.layer)

    def moments(
        self, problem: Problem, x: Any, size: int, memory: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray | RowCovariances]]:
        """Mean (B, D) and covariances (B, D, D), or those of many outputs, for `size` rows at a time."""
        assert self.covariances is not None
        eta, inputs = self._predictor_and_features(problem, x, memory)
        for start, stop in chunks(len(eta), size):
            found = self.covariances(inputs[start:stop])
            yield eta[start:stop], found if eta.shape[1] > MANY else found.dense()

    def _predictor_and_features(self, problem: Problem, x: Any, memory: int) -> tuple[np.ndarray, np.ndarray]:
        eta, inputs = self.features(problem, self.centre, x, self.layer, memory)
        # Zero times infinity is a warning of NumPy; a product with NaN is NaN, which predictions refuse by name.
        return eta, np.where(np.isfinite(inputs), inputs, np.nan)

    def moved_alone(self, u: Values) -> bool:
        """Whether draws of u differ from the centre in the layer only."""
        own = {self.layer.map.weight, None if self.layer.bias is None else self.layer.map.bias}
        rest = (name for name in self.centre if name not in own and name in u)
        return all(bool(np.all(np.asarray(u[name]) == self.centre[name])) for name in rest)

    def draws(self, problem: Problem, u: Values, x: Any, memory: int) -> np.ndarray:
        """eta (S, N, D) of draws that move the layer alone, of which it is a linear function."""
        (weight, bias), shape = (self.layer.map.weight, self.layer.map.bias), self.layer.shape
        eta, inputs = self._predictor_and_features(problem, x, memory)
        count = len(u[weight])
        found = np.empty((count, *eta.shape), problem.dtype)
        size = int(np.clip(memory // (8 * (eta.size + 2 * shape[0] * shape[1])), 1, count))
        for start, stop in chunks(count, size):
            change = np.asarray(u[weight][start:stop], float) - self.centre[weight]
            part = eta + inputs @ change.reshape(-1, *shape)
            if bias is not None and self.layer.bias is not None:
                change = np.asarray(u[bias][start:stop], float) - self.centre[bias]
                part += change.reshape(stop - start, 1, -1)
            found[start:stop] = part
        return found


def layer_covariances(gaussian: FlatGaussian, layer: Layer) -> Callable[[np.ndarray], RowCovariances] | None:
    """The function of features (N, I) that gives the covariances of a last layer; None for a structure without one."""
    wide, high = layer.shape
    bias = None if layer.bias is None else np.arange(layer.bias.start, layer.bias.stop)
    if isinstance(gaussian, Diagonal):
        spread = 1.0 / gaussian.values
        weight, offset = spread[layer.weight].reshape(wide, high), 0.0 if bias is None else spread[bias]
        return lambda inputs: IndependentRows(inputs**2 @ weight + offset)
    if isinstance(gaussian, Kronecker):
        part: Any = gaussian.part(np.arange(layer.weight.start, layer.weight.stop))
        if not isinstance(part, Rotated):
            return None
        left, right, inverse = part.left, part.right, 1.0 / part.values
        common, sums = None if bias is None else Common(gaussian.part(bias)), right.sum(0)
        return lambda inputs: RotatedRows(right, (inputs @ left) ** 2 @ inverse, sums, common)
    if isinstance(gaussian, LowRankPrecision):
        return _updated(gaussian, layer)
    return None


def _updated(gaussian: LowRankPrecision, layer: Layer) -> Callable[[np.ndarray], RowCovariances]:
    """As in `LowRankPrecision.project_products`, with the Jacobian of a last layer."""
    (wide, high), inverse = layer.shape, 1.0 / gaussian.diagonal
    values, vectors = np.linalg.eigh(gaussian.cholesky @ gaussian.cholesky.T)
    some = values > 1.0 + 1e-12 * values.max(initial=1.0)
    values, vectors = values[some], vectors[:, some]

    def of_rows(inputs: np.ndarray) -> RowCovariances:
        spread = inputs**2 @ inverse[layer.weight].reshape(wide, high)
        if layer.bias is not None:
            spread = spread + inverse[layer.bias]
        slopes = np.empty((*spread.shape, len(gaussian.factor)))
        for number, row in enumerate(gaussian.factor):
            each = row * inverse
            slopes[:, :, number] = inputs @ each[layer.weight].reshape(wide, high)
            if layer.bias is not None:
                slopes[:, :, number] += each[layer.bias]
        half = slopes @ vectors / np.sqrt(values - 1.0)
        root = np.sqrt(spread)[:, :, None]
        # A row without features, as after a dead layer and without a bias, has no spread.
        inside = np.divide(half, root, out=np.zeros_like(half), where=root > 0.0)
        return UpdatedRows(spread, inside, half / np.sqrt(values))

    return of_rows
