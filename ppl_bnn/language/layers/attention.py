"""Attention: positions of a sequence that depend on each other."""

from __future__ import annotations

import math
from typing import Any

from ppl_bnn.language import ops
from ppl_bnn.language.layers.basic import dense, layer_norm
from ppl_bnn.language.layers.declarations import Activation, Bias, Layer
from ppl_bnn.language.prior_parts import Prior


def attention(
    name: str,
    x: Any,
    heads: int,
    prior: Prior | None = None,
    bias: Bias = True,
    mask: Any = None,
    causal: bool = False,
) -> Any:
    """Multi-head self-attention: each position is a weighted mean over all positions (Vaswani et al. 2017).

    With queries, keys and values q, k, v = x W + b, their C channels split into heads of C / heads,

        a_ts = softmax over s of q_t . k_s / sqrt(C / heads),   result = (a v, heads concatenated) W + b.

    Samples `name.query.weight`, `name.key.weight`, `name.value.weight` and `name.output.weight`, each (C, C), with
    their `.bias` (C,). The four are linear maps of these names over all positions.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Sequences, (N, T, C), C a multiple of `heads`.
    heads : int
        Number of heads.
    prior : Prior, optional
        Prior of weights and biases, by default N(0, 1 / C).
    bias : bool or Prior
        Whether there are biases, or a prior of their own. The bias of the keys has no effect, since it adds the same to
        all scores of a position: its posterior is its prior.
    mask : array, optional
        (N, T), true (or not zero) where a position is present. Other positions are not read, and have arbitrary
        outputs.
    causal : bool
        Whether a position reads no later one.

    Returns
    -------
    array
        Outputs, of the shape of x.

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    Vaswani et al. (2017), Attention is all you need.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.attention("attention", x, heads=2, bias=False)
    ...     bnn.observe(y, f.mean(1), bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, np.ones((1, 5, 4))).sites]
    [('attention.query.weight', (4, 4)), ('attention.key.weight', (4, 4)), ('attention.value.weight',
     (4, 4)), ('attention.output.weight', (4, 4))]
    """
    layer = Layer("attention", name, prior, bias)
    rows, length, channels = layer.sequence(x)
    heads = layer.whole("heads", heads, 4)
    expected, common = f"channels that {heads} heads can share equally", math.gcd(channels, heads)
    layer.check(channels % heads == 0, expected, f"{channels} channels", f"heads={common}")
    present = layer.mask(mask, x)
    each = channels // heads
    parts = (layer.linear(part, x, channels) for part in ("query", "key", "value"))
    query, key, value = (part.reshape(rows, length, heads, each) for part in parts)
    scores = ops.einsum("nthc,nshc->nhts", query, key) / math.sqrt(each)
    unread = ops.full_like(scores, -math.inf)
    if present is not None:
        scores = ops.where(present[:, None, None, :], scores, unread)
    if causal:
        order = ops.in_floats([[float(s <= t) for s in range(length)] for t in range(length)], like=scores)
        scores = ops.where(order[None, None] != 0, scores, unread)
    read = ops.einsum("nhts,nshc->nthc", ops.softmax(scores), value).reshape(rows, length, channels)
    return layer.linear("output", read, channels)


def transformer_block(
    name: str,
    x: Any,
    heads: int,
    width: int | None = None,
    activation: Activation = "gelu",
    prior: Prior | None = None,
    bias: Bias = True,
    mask: Any = None,
    causal: bool = False,
) -> Any:
    """A transformer block with pre-layer normalisation (Xiong et al. 2020).

        h = x + attention(layer_norm(x)),   result = h + dense(activation(dense(layer_norm(h)))).

    The parts are `name.norm0`, `name.attention`, `name.norm1`, `name.hidden` (C, width) and `name.output` (width, C). A
    stack of blocks needs a `layer_norm` after the last.

    Parameters
    ----------
    name : str
        Name of the block.
    x : array
        Sequences, (N, T, C).
    heads : int
        As in `attention`.
    width : int, optional
        Width of the hidden layer, by default 4 C.
    activation : str or callable
        Activation of the hidden layer.
    prior : Prior, optional
        Prior of the attention and of the dense layers; the normalisations have the priors of `layer_norm`.
    bias : bool or Prior
        Bias of the attention and of the dense layers.
    mask : array, optional
        As in `attention`.
    causal : bool
        As in `attention`.

    Returns
    -------
    array
        Outputs, of the shape of x.

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    Xiong et al. (2020), On layer normalization in the transformer architecture.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.transformer_block("block", x, heads=2, bias=False)
    ...     bnn.observe(y, f.mean(1), bnn.likelihoods.Categorical())
    >>> bnn.zoo.sketch(model, np.ones((1, 5, 4))).parameters
    208
    """
    layer = Layer("transformer_block", name)
    channels = layer.sequence(x)[2]
    width = 4 * channels if width is None else layer.whole("width", width, 4 * channels)
    nonlinearity = ops.activation(activation)

    read = layer_norm(f"{name}.norm0", x)
    h = x + attention(f"{name}.attention", read, heads, prior, bias, mask, causal)
    hidden = nonlinearity(dense(f"{name}.hidden", layer_norm(f"{name}.norm1", h), width, prior, bias))
    return h + dense(f"{name}.output", hidden, channels, prior, bias)
