"""Layers: compositions of primitives."""

from __future__ import annotations

import operator
from typing import Any

from ppl_bnn.errors import ModelError, message
from ppl_bnn.language.primitives import linear
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
    for given in (prior, bias):
        if given is not None and not isinstance(given, bool) and not callable(given):
            raise ModelError(
                f"dense({name!r}): " + message("a prior", repr(given), "bnn.priors.Normal(0.0, 'fan_in')")
            )
    prior = prior if prior is not None else Normal(0.0, "fan_in")
    fan_in = int(x.shape[-1])
    weight = prior(f"{name}.weight", (fan_in, width), fan_in)
    offset = None
    if bias is not False:
        offset = (prior if bias is True else bias)(f"{name}.bias", (width,), 1)
    return linear(name, x, weight, offset)
