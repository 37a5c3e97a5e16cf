"""Attention: positions of a sequence that read each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ppl_bnn.core.errors import ModelError, message
from ppl_bnn.language import ops
from ppl_bnn.language.layers.basic import (
    dense,
    layer_norm,
    residual,
    sequence_mask,
    sequence_shape,
    weight_and_bias,
    whole,
)
from ppl_bnn.language.primitives import linear
from ppl_bnn.language.prior_scales import Prior


def attention(
    name: str,
    x: Any,
    heads: int,
    prior: Prior | None = None,
    bias: bool | Prior = True,
    mask: Any = None,
    causal: bool = False,
) -> Any:
    """Multi-head self-attention (Vaswani et al. 2017): each position is a weighted mean over all positions.

    With queries, keys and values q, k, v = x W + b, their C channels cut into heads of C / heads,

        a_ts = softmax over s of q_t . k_s / sqrt(C / heads),   result = (a v, heads side by side) W + b.

    Samples `name.query.weight`, `name.key.weight`, `name.value.weight` and `name.output.weight`, each (C, C), with
    their `.bias` (C,), from `prior` (default N(0, 1 / C)). `bias` is True, False, or a prior of its own. The four are
    linear maps of these names over all positions. A bias of the keys adds the same to all scores of a position and
    changes nothing: its posterior is its prior.

    mask: (N, T), true (or not zero) where a position is there; the others are not read, and what leaves them is of no
    use. causal: a position reads no later one.

    x: (N, T, C), C a multiple of `heads`; the result has its shape.
    """
    word = f"attention({name!r})"
    rows, length, channels = sequence_shape(word, x)
    heads = whole(word, "heads", heads, 4)
    if channels % heads:
        raise ModelError(
            f"{word}: "
            + message(
                f"channels that {heads} heads can share equally",
                f"{channels} channels",
                f"heads={math.gcd(channels, heads)}",
            )
        )
    present = sequence_mask(word, mask, x)
    each = channels // heads

    def mapped(part: str) -> Any:
        weight, offset = weight_and_bias(word, f"{name}.{part}", (channels, channels), channels, prior, bias)
        return linear(f"{name}.{part}", x, weight, offset).reshape(rows, length, heads, each)

    query, key, value = mapped("query"), mapped("key"), mapped("value")
    scores = ops.einsum("nthc,nshc->nhts", query, key) / math.sqrt(each)
    if present is not None:
        scores = _unread(scores, present[:, None, None, :])
    if causal:
        order = ops.in_floats([[float(s <= t) for s in range(length)] for t in range(length)], like=scores)
        scores = _unread(scores, order[None, None] != 0)
    read = ops.einsum("nhts,nshc->nthc", ops.softmax(scores), value).reshape(rows, length, channels)
    weight, offset = weight_and_bias(word, f"{name}.output", (channels, channels), channels, prior, bias)
    return linear(f"{name}.output", read, weight, offset)


def _unread(scores: Any, readable: Any) -> Any:
    """Scores with minus infinity where nothing may be read."""
    return ops.where(readable, scores, ops.full_like(scores, -math.inf))


def transformer_block(
    name: str,
    x: Any,
    heads: int,
    width: int | None = None,
    activation: str | Callable[[Any], Any] = "gelu",
    prior: Prior | None = None,
    bias: bool | Prior = True,
    mask: Any = None,
    causal: bool = False,
) -> Any:
    """A block of a transformer with the normalisation in front (Xiong et al. 2020):

        h = x + attention(layer_norm(x)),   result = h + dense(activation(dense(layer_norm(h)))).

    Names: `name.norm0`, `name.attention`, `name.norm1`, `name.hidden` (C, width) and `name.output` (width, C), with
    width = 4 C by default. `prior` and `bias` are those of the attention and of the dense layers; the normalisations
    have the priors of `layer_norm`. A stack of blocks wants a `layer_norm` after the last.

    x: (N, T, C); the result has its shape. heads, mask, causal: as in `attention`.
    """
    word = f"transformer_block({name!r})"
    channels = sequence_shape(word, x)[2]
    width = 4 * channels if width is None else whole(word, "width", width, 4 * channels)
    nonlinearity = ops.activation(activation)

    def read(h: Any) -> Any:
        h = layer_norm(f"{name}.norm0", h)
        return attention(f"{name}.attention", h, heads, prior, bias, mask, causal)

    def thought(h: Any) -> Any:
        h = layer_norm(f"{name}.norm1", h)
        h = nonlinearity(dense(f"{name}.hidden", h, width, prior, bias))
        return dense(f"{name}.output", h, channels, prior, bias)

    return residual(residual(x, read), thought)
