"""Interpretations of a model besides running it in a system.

`network_function` is f(w, x), differentiable and vmappable over w in both systems: the program itself with its random
variables replaced by values. `RecordLinear` records the inputs of each linear map and the sites of its weight and bias,
and can add to its output; curvature computes gradients of weights from input times gradient at the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language import ops
from ppl_bnn.language.primitives import Handler, Interpretation, Message

# Site -> its value.
Values = Mapping[str, Any]
# Map -> the number of one of its uses -> what is added to its output.
Perturbations = Mapping[str, Mapping[int, Any]]


# Prefix of the name of a deterministic site among values: the value replaces what the program computes.
COMPUTED = "computed: "


class NetworkFunction(Interpretation):
    """The bottom of a run with all values of latent sites given."""

    def __init__(self, values: Values):
        super().__init__()
        self.values = values

    def process(self, msg: Message) -> None:
        super().process(msg)
        if msg.kind in ("sample", "param"):
            given = msg.arguments.get("obs")
            if given is None and msg.name not in self.values:
                expected, got = f"a value for site {msg.name!r}", f"values for {sorted(self.values)}"
                raise ModelError.of("network function", expected, got, "all latent sites")
            msg.answer(self.values[msg.name] if given is None else given)
        elif msg.kind == "deterministic" and COMPUTED + msg.name in self.values:
            msg.answer(self.values[COMPUTED + msg.name])


def network_output(model: Callable[..., Any], values: Values, x: Any) -> NetworkFunction:
    """Run `model` on `x` with every latent site at its value; the result has `f`, `likelihood` and `predictor`."""
    with NetworkFunction(values) as run:
        model(x, None)
    return run


def network_function(model: Callable[..., Any]) -> Callable[[Values, Any], Any]:
    """Network output f(w, x), (N, K): a pure function of the values of all latent sites and of the inputs.

    Parameters
    ----------
    model : callable
        A model in the language.

    Returns
    -------
    callable
        A function of w, a dict site -> array, and of x.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> f = bnn.network_function(bnn.zoo.load("linear_regression"))
    >>> w = {"noise": 1.0, "output.weight": np.array([[2.0], [3.0]]), "output.bias": np.array([0.5])}
    >>> f(w, np.array([[1.0, 1.0]]))
    array([[5.5]])
    """

    def f(w: Values, x: Any) -> Any:
        return network_output(model, w, x).f

    return f


@dataclass(frozen=True)
class LinearUse:
    """One use of a linear map (or of a convolution) in a run.

    `kind` is "linear" or "conv". `weight` and `bias` are the sites whose arrays are used; None for anything else
    (computed from sites, a constant, absent). `matrix_shape` is (I, O), the weight as a matrix on the recorded inputs.
    """

    name: str
    kind: str
    weight: str | None
    bias: str | None
    matrix_shape: tuple[int, int]


class RecordLinear(Handler):
    """Record the input of each linear map, and add `perturbations[name][use]` to its output.

    `inputs[name]` is a list with one entry per use of the map; `uses` lists all uses in order, as `LinearUse`, and
    `outputs` the arrays that they gave. The gradient of a loss with respect to a perturbation at zero is the gradient
    with respect to the output of the map.

    A convolution is a linear map on patches: its recorded input is (N, H', W', kh * kw * C) in the order (kh, kw, C),
    so that its output is patches @ weight.reshape(-1, O) + bias; along time it is (N, T', k * C).

    `perturbations[name]` is a dict from the numbers of uses of the map, from 0, to arrays. `values` are the values
    passed to the model; a weight or bias is a site if it is the very object there.
    """

    def __init__(self, perturbations: Perturbations | None = None, values: Values | None = None):
        self.perturbations = perturbations or {}
        self.sites = {id(value): name for name, value in (values or {}).items()}
        self.inputs: dict[str, list[Any]] = {}
        self.uses: list[LinearUse] = []
        self.outputs: list[Any] = []

    def process(self, msg: Message) -> None:
        if msg.kind not in ("linear", "conv"):
            return
        x, weight, bias = (msg.arguments[name] for name in ("x", "weight", "bias"))
        if msg.kind == "conv":
            x = ops.patches(x, tuple(weight.shape[:-2]), msg.arguments["stride"], msg.arguments["padding"])
        self.inputs.setdefault(msg.name, []).append(x)
        sites = self.sites.get(id(weight)), None if bias is None else self.sites.get(id(bias))
        self.uses.append(LinearUse(msg.name, msg.kind, *sites, (int(x.shape[-1]), int(weight.shape[-1]))))

    def after(self, msg: Message) -> None:
        if msg.kind in ("linear", "conv") and msg.name in self.perturbations:
            use, added = len(self.inputs[msg.name]) - 1, self.perturbations[msg.name]
            msg.value = msg.value + added[use] if use in added else msg.value
        if msg.kind in ("linear", "conv"):
            self.outputs.append(msg.value)


class _Replaced(Handler):
    """Linear maps with other arrays as weight and bias: id of an array -> the array in its place."""

    def __init__(self, others: Mapping[int, Any]):
        self.others = others

    def process(self, msg: Message) -> None:
        if msg.kind in ("linear", "conv"):
            for argument in ("weight", "bias"):
                given = msg.arguments[argument]
                msg.arguments[argument] = self.others.get(id(given), given)


def used_elsewhere(model: Callable[..., Any], values: Values, x: Any, sites: Collection[str]) -> bool:
    """Whether sites have a use outside of linear maps: NaN in their place, except in the maps, reaches the predictor.

    A weight is recognised as in `RecordLinear`. An operation that removes NaN, such as a comparison, hides its use.
    """
    missing = {**values, **{name: values[name] * math.nan for name in sites}}
    with _Replaced({id(missing[name]): values[name] for name in sites}):
        eta = network_output(model, missing, x).predictor
    return bool((eta != eta).any())


def recorded_linear(
    model: Callable[..., Any], values: Values, x: Any, perturbations: Perturbations | None = None
) -> tuple[NetworkFunction, dict[str, list[Any]]]:
    """The run of `network_output` under `perturbations`, and the inputs of each linear map."""
    with RecordLinear(perturbations, values) as record:
        run = network_output(model, values, x)
    return run, record.inputs


class RecordMessages(Handler):
    """Record the messages of a run, in order; with `kinds`, only those of these kinds."""

    sees_maps = False

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.messages: list[Message] = []
        self.inputs: Any = None

    def process(self, msg: Message) -> None:
        if not self.kinds or msg.kind in self.kinds:
            self.messages.append(msg)

    def around(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """The model `(x, y=None)`; each run replaces the recorded messages."""

        def watched(x: Any, y: Any = None) -> None:
            self.messages.clear()
            self.inputs = x
            with self:
                model(x, y)

        return watched


def recorded_values(model: Callable[..., Any], values: Values, x: Any) -> dict[str, Any]:
    """All deterministic sites of a run with every latent site at its value, in the order of the program."""
    with NetworkFunction(values), RecordMessages("deterministic") as record:
        model(x, None)
    return {msg.name: msg.value for msg in record.messages}
