"""Networks: layers in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ppl_bnn.errors import ModelError, message
from ppl_bnn.language import ops
from ppl_bnn.language.layers import dense
from ppl_bnn.language.priors import Prior


def mlp(
    x: Any,
    widths: Sequence[int],
    activation: str | Callable[[Any], Any] = "relu",
    prior: Prior | Sequence[Prior] | None = None,
    bias: bool | Prior = True,
) -> Any:
    """A multi-layer perceptron; the last of `widths` is the number of outputs.

    Layers are named `hidden0`, `hidden1`, ..., `output`. `prior` is one prior for all layers or one per layer.
    With a single width it is the linear model. x: (N, features); result (N, widths[-1]).
    """
    if not isinstance(widths, Iterable) or not (widths := list(widths)):
        raise ModelError("mlp: " + message("a list of at least one width", repr(widths), "[50, 1]"))
    each: list[Any] = list(prior) if isinstance(prior, list | tuple) else [prior] * len(widths)
    if len(each) != len(widths):
        raise ModelError(
            "mlp: "
            + message(f"{len(widths)} priors, one per layer", str(len(each)), "one prior for all layers")
        )
    nonlinearity = ops.activation(activation)
    for layer, width in enumerate(widths[:-1]):
        x = nonlinearity(dense(f"hidden{layer}", x, width, each[layer], bias))
    return dense("output", x, widths[-1], each[-1], bias)
