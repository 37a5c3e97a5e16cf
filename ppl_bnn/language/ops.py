"""Array functions that mean the same in NumPy, torch and JAX.

A model calls `ops.tanh(x)` and never names a system: the function is found from the type of its argument.
Bare `torch` and `jax.numpy` are not enough as array namespaces, because relu, softplus, logsumexp and
softmax have other names or other arguments in each; the list of differences is written once, here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

Array = Any


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def namespace(*arrays: Any) -> Any:
    """The module (`torch`, `jax.numpy` or `numpy`) whose arrays these are; plain numbers count as NumPy."""
    for array in arrays:
        if _is_torch(array):
            return sys.modules["torch"]
    for array in arrays:
        if _is_jax(array):
            return sys.modules["jax.numpy"]
    return _numpy()


def _numpy() -> Any:
    import numpy

    return numpy


def asarray(value: Any, like: Array) -> Array:
    """`value` as an array of the kind, floating type and device of `like`."""
    xp = namespace(like)
    if xp.__name__ == "torch":
        if _is_torch(value):
            return value
        return xp.as_tensor(value, dtype=like.dtype if like.is_floating_point() else None, device=like.device)
    if xp.__name__ == "jax.numpy" and not _is_jax(value):
        return xp.asarray(value, dtype=like.dtype if xp.issubdtype(like.dtype, xp.floating) else None)
    return xp.asarray(value)


def matmul(a: Array, b: Array) -> Array:
    """Matrix product over the last two axes."""
    return a @ b


def exp(x: Array) -> Array:
    return math.exp(x) if isinstance(x, int | float) else namespace(x).exp(x)


def log(x: Array) -> Array:
    return math.log(x) if isinstance(x, int | float) else namespace(x).log(x)


def sqrt(x: Array) -> Array:
    return math.sqrt(x) if isinstance(x, int | float) else namespace(x).sqrt(x)


def sin(x: Array) -> Array:
    return namespace(x).sin(x)


def cos(x: Array) -> Array:
    return namespace(x).cos(x)


def abs(x: Array) -> Array:
    return namespace(x).abs(x)


def tanh(x: Array) -> Array:
    return namespace(x).tanh(x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.sigmoid(x)
    if xp.__name__ == "jax.numpy":
        return sys.modules["jax"].nn.sigmoid(x)
    return xp.exp(-xp.logaddexp(0.0, -x))


def relu(x: Array) -> Array:
    """max(x, 0), with derivative 0 at 0 in both systems."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.relu(x)
    if xp.__name__ == "jax.numpy":
        return sys.modules["jax"].nn.relu(x)
    return xp.maximum(x, 0.0)


def gelu(x: Array) -> Array:
    """x times the standard normal distribution function at x (the exact form, not the tanh approximation)."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.nn.functional.gelu(x)
    if xp.__name__ == "jax.numpy":
        return sys.modules["jax"].nn.gelu(x, approximate=False)
    from scipy.special import ndtr

    return x * ndtr(x)


def silu(x: Array) -> Array:
    """x times sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        # torch's own softplus turns linear above a threshold; logaddexp has no such seam.
        return xp.logaddexp(x, xp.zeros((), dtype=x.dtype, device=x.device))
    return xp.logaddexp(x, 0.0)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    return exp(log_softmax(x))


def log_softmax(x: Array) -> Array:
    """x - logsumexp(x) over the last axis."""
    return x - logsumexp(x)[..., None]


def logsumexp(x: Array) -> Array:
    """log of the sum of exponentials over the last axis."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.logsumexp(x, dim=-1)
    if xp.__name__ == "jax.numpy":
        return sys.modules["jax"].nn.logsumexp(x, axis=-1)
    from scipy.special import logsumexp as reference

    return reference(x, axis=-1)


def sum(x: Array, axis: int | None = None) -> Array:
    return x.sum() if axis is None else x.sum(axis)


def mean(x: Array, axis: int | None = None) -> Array:
    return x.mean() if axis is None else x.mean(axis)


def stack(arrays: list[Array], axis: int = -1) -> Array:
    xp = namespace(*arrays)
    return xp.stack(arrays, axis) if xp.__name__ != "torch" else xp.stack(arrays, dim=axis)


def concatenate(arrays: list[Array], axis: int = -1) -> Array:
    xp = namespace(*arrays)
    return xp.cat(arrays, dim=axis) if xp.__name__ == "torch" else xp.concatenate(arrays, axis)


def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    return namespace(x).broadcast_to(x, shape)


def ones_like(x: Array) -> Array:
    return namespace(x).ones_like(x)


def zeros_like(x: Array) -> Array:
    return namespace(x).zeros_like(x)


def diagonal_matrix(x: Array) -> Array:
    """(..., D) to (..., D, D), with x on the diagonal."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.diag_embed(x)
    return x[..., None] * xp.eye(x.shape[-1], dtype=x.dtype)


ACTIVATIONS = {
    "tanh": tanh,
    "relu": relu,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "gelu": gelu,
    "silu": silu,
    "sin": sin,
    "identity": lambda x: x,
}


def activation(name: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The activation function of that name; a function is its own name."""
    from ppl_bnn.errors import unknown_name

    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise unknown_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]
