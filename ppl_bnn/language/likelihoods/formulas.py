"""Formulas shared by several likelihoods."""

from __future__ import annotations

import sys
from typing import Any

from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution


def normal_parameters(eta: Any, scale: Any) -> tuple[str, dict[str, Any]]:
    """Family and parameters of a prediction by normal distributions, with `scale` and the means in eta."""
    outputs = eta.shape[-1] // 2
    loc = eta[..., :outputs]
    if outputs == 1:
        loc, scale = loc[..., 0], scale[..., 0]
    return "Normal", {"loc": loc, "scale": scale}


def log_columns(value: Any, f: Any) -> Any:
    """log of one number, or of one per output, as columns (N, K)."""
    return ops.broadcast_to(ops.asarray(ops.log(value), like=f), tuple(f.shape))


def for_one_output(value: Any) -> Any:
    """The value of the only output, without its axis."""
    return value if isinstance(value, int | float) or len(value.shape) == 0 else value[0]


def location_scale(family: str, f: Any, shapes: tuple[Any, ...], scale: Any) -> Distribution:
    """A location-scale distribution around f, for one output or several."""
    if f.shape[-1] == 1:
        shapes = tuple(map(for_one_output, shapes))
        return dist.distribution(family, *shapes, f[:, 0], for_one_output(scale))
    return dist.distribution(family, *shapes, f, scale).to_event(1)


def special(name: str, x: Any) -> Any:
    """digamma or trigamma in the system of x. The trigamma function of torch is accurate to nine digits only."""
    xp = ops.namespace(x)
    if xp.__name__ == "torch":
        return xp.digamma(x) if name == "digamma" else xp.polygamma(1, x)
    if xp.__name__ == "jax.numpy":
        special = sys.modules["jax"].scipy.special
    else:
        import scipy.special as special
    return special.digamma(x) if name == "digamma" else special.polygamma(1, x)


def one_minus_exp(x: Any) -> Any:
    """1 - exp(-x) for x >= 0, accurate for small x."""
    t = ops.tanh(0.5 * x)
    return 2.0 * t / (1.0 + t)


def not_negative(x: Any) -> Any:
    """Replace by zero values that are negative only by rounding."""
    return ops.relu(x)


def diagonal_blocks(blocks: list[list[Any]]) -> Any:
    """The matrices (N, B K, B K) made of B x B diagonal blocks, each given as (N, K)."""
    rows = [ops.concatenate([ops.diagonal_matrix(block) for block in row]) for row in blocks]
    return ops.concatenate(rows, -2)
