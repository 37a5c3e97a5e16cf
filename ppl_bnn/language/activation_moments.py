"""Mean and variance of an elementwise function of a normal number, in closed form, by quadrature, or linearised.

References
----------
Frey and Hinton (1999), Variational learning in nonlinear Gaussian belief networks (relu).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ppl_bnn.language import ops

Array = Any
Elementwise = Callable[[Any], Any]
# Nodes of the quadrature for elementwise functions without a closed form.
NODES = 7
# Mean and variance of the function, and a function for the mean of its derivative, which few arrays need.
Known = tuple[Array, Array, Callable[[], Array]]


def relu(m: Array, v: Array) -> Known:
    s = ops.sqrt(v)
    # A number without spread is infinitely many standard deviations away from the kink.
    z = m / (s + 1e-20)
    density, above = ops.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi), 0.5 + 0.5 * ops.erf(z * math.sqrt(0.5))
    mean = m * above + s * density
    return mean, ops.relu(v * above + mean * (m - mean)), lambda: above


def _wave(shift: float) -> Callable[[Array, Array], Known]:
    """sin(x + shift)."""

    def moments(m: Array, v: Array) -> Known:
        phase, kept = m + shift, ops.exp(-0.5 * v)
        variance = -0.5 * _expm1(-v) * (1.0 + ops.exp(-v) * ops.cos(2.0 * phase))
        return kept * ops.sin(phase), variance, lambda: kept * ops.cos(phase)

    return moments


def _exp(m: Array, v: Array) -> Known:
    mean = ops.exp(m + 0.5 * v)
    return mean, mean * mean * _expm1(v), lambda: mean


def _expm1(x: Array) -> Array:
    return ops.namespace(x).expm1(x)


CLOSED = {"relu": relu, "sin": _wave(0.0), "cos": _wave(0.5 * math.pi), "exp": _exp}


@functools.cache
def _nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the expectation over a standard normal."""
    at, weights = np.polynomial.hermite_e.hermegauss(count)
    return at, weights / weights.sum()


def quadrature(function: Elementwise, m: Array, v: Array, nodes: int = NODES) -> Known:
    """Gauss-Hermite quadrature with an odd number of nodes."""
    at, weight = _nodes(nodes)
    shape, s = tuple(m.shape), ops.sqrt(v)
    points = ops.asarray(at.reshape(-1, *(1,) * len(shape)), like=m)
    weights = ops.asarray(weight, like=m)
    values = function(m + s * points)
    # Less the value at the mean, which is the node in the middle.
    away, middle = (values - values[nodes // 2]).reshape(nodes, -1), values[nodes // 2]
    shift = (weights @ away).reshape(shape)
    variance = ops.relu((weights @ (away * away)).reshape(shape) - shift * shift)

    def slope() -> Array:
        moment = (ops.asarray(weight * at, like=m) @ away).reshape(shape)
        return moment / ops.where(s > 0, s, ops.ones_like(s))

    return middle + shift, variance, slope


def linearised(function: Elementwise, m: Array, v: Array) -> Known:
    value, slope = ops.with_slope(function, m)
    return value, slope * slope * v, lambda: slope
