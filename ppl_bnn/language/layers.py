"""Layers: compositions of primitives."""

from __future__ import annotations

import operator
from typing import Any

from ppl_bnn.errors import ModelError, message
from ppl_bnn.language import ops
from ppl_bnn.language.primitives import conv, linear
from ppl_bnn.language.priors import Normal, Prior


def dense(name: str, x: Any, width: int, prior: Prior | None = None, bias: bool | Prior = True) -> Any:
    """The fully connected layer `x @ W + b`.

    Samples `name.weight` (fan_in, width) and `name.bias` (width,) from `prior` (default N(0, 1 / fan_in)), then
    calls `linear(name, x, W, b)`. `bias` is True, False, or a prior of its own.

    x: (..., fan_in); result (..., width).
    """
    if isinstance(width, bool) or not hasattr(width, "__index__") or width < 1:
        raise ModelError(
            f"dense({name!r}): " + message("a positive whole number as width", repr(width), "width=50")
        )
    if len(x.shape) < 2:
        raise ModelError(
            f"dense({name!r}): "
            + message("inputs of shape (N, features)", f"shape {tuple(x.shape)}", "x[:, None]")
        )
    width = operator.index(width)
    fan_in = int(x.shape[-1])
    weight, offset = _parameters(f"dense({name!r})", name, (fan_in, width), fan_in, prior, bias)
    return linear(name, x, weight, offset)


def conv2d(
    name: str,
    x: Any,
    channels: int,
    kernel: ops.Pair,
    stride: ops.Pair = 1,
    padding: ops.Padding = "same",
    prior: Prior | None = None,
    bias: bool | Prior = True,
) -> Any:
    """The convolutional layer: `channels` filters of size `kernel`, with `stride` and `padding` as in `ops.conv2d`.

    Samples `name.weight` (kh, kw, C, channels) and `name.bias` (channels,) from `prior` (default N(0, 1 / fan_in) with
    fan_in = kh * kw * C), then calls `conv(name, x, weight, bias, stride, padding)`. `bias` is True, False, or a prior
    of its own.

    x: (N, H, W, C), channels last in both systems; result (N, H', W', channels).
    """
    word = f"conv2d({name!r})"
    if isinstance(channels, bool) or not hasattr(channels, "__index__") or channels < 1:
        raise ModelError(
            f"{word}: " + message("a positive whole number as channels", repr(channels), "channels=16")
        )
    size, *_ = ops.windows(word, x, kernel, stride, padding)
    shape = (*size, int(x.shape[-1]), operator.index(channels))
    weight, offset = _parameters(word, name, shape, size[0] * size[1] * shape[2], prior, bias)
    return conv(name, x, weight, offset, stride, padding)


def _parameters(
    word: str, name: str, shape: tuple[int, ...], fan_in: int, prior: Prior | None, bias: bool | Prior
) -> tuple[Any, Any]:
    """`name.weight` of that shape and `name.bias` (or None); `word` is the layer that errors name."""
    for given in (prior, bias):
        if given is not None and not isinstance(given, bool) and not callable(given):
            raise ModelError(
                f"{word}: " + message("a prior", repr(given), "bnn.priors.Normal(0.0, 'fan_in')")
            )
    prior = prior if prior is not None else Normal(0.0, "fan_in")
    weight = prior(f"{name}.weight", shape, fan_in)
    if bias is False:
        return weight, None
    return weight, (prior if bias is True else bias)(f"{name}.bias", shape[-1:], 1)
