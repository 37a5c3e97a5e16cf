"""Interpretations of a model besides running it in a system.

`network_function` is f(w, x): differentiable and vmappable over w in both systems, because it is the
program itself with its random variables replaced by given values. `RecordLinear` keeps the inputs of each
linear map and can add to its output, which is what Kronecker-factored curvature needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ppl_bnn.errors import ModelError, message
from ppl_bnn.language.primitives import Handler, Interpretation, Message


class Substitute(Handler):
    """Random variables and parameters named in `values` take those values."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def process(self, msg: Message) -> None:
        if msg.kind in ("sample", "param") and msg.name in self.values:
            msg.answer(self.values[msg.name])


class NetworkFunction(Interpretation):
    """The bottom of a run with all values given: captures f and the likelihood at `observe`."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__()
        self.values = values
        self.f: Any = None
        self.likelihood: Any = None

    def process(self, msg: Message) -> None:
        super().process(msg)
        if msg.kind in ("sample", "param"):
            if msg.arguments.get("obs") is not None:
                msg.answer(msg.arguments["obs"])
                return
            if msg.name not in self.values:
                raise ModelError(
                    "network function: "
                    + message(
                        f"a value for site {msg.name!r}",
                        f"values for {sorted(self.values)}",
                        "all latent sites",
                    )
                )
            msg.answer(self.values[msg.name])
        elif msg.kind == "observe":
            self.f = msg.arguments["f"]
            self.likelihood = msg.arguments["likelihood"]
            msg.answer(None)


@dataclass(frozen=True)
class NetworkOutput:
    """What the network says about rows: `f` (N, K) and the likelihood with its values filled in."""

    f: Any
    likelihood: Any

    @property
    def predictor(self) -> Any:
        """eta (N, D): all that the likelihood needs to know about each row."""
        return self.likelihood.predictor(self.f)


def network_output(model: Callable[..., Any], values: Mapping[str, Any], x: Any) -> NetworkOutput:
    """Run `model` on `x` with every latent site at its value."""
    with NetworkFunction(values) as run:
        model(x, None)
    assert isinstance(run, NetworkFunction)
    return NetworkOutput(run.f, run.likelihood)


def network_function(model: Callable[..., Any]) -> Callable[[Mapping[str, Any], Any], Any]:
    """f(w, x) of shape (N, K): a pure function of the values `w` of all latent sites and the inputs."""

    def f(w: Mapping[str, Any], x: Any) -> Any:
        return network_output(model, w, x).f

    return f


class RecordLinear(Handler):
    """Record what enters each linear map, and add `perturbations[name]` to what leaves it.

    `inputs[name]` is a list with one entry per use of the map. The gradient of a loss with respect to a
    perturbation at zero is the gradient with respect to the output of the map.
    """

    def __init__(self, perturbations: Mapping[str, Any] | None = None):
        self.perturbations = perturbations or {}
        self.inputs: dict[str, list[Any]] = {}
        self.has_bias: dict[str, bool] = {}

    def process(self, msg: Message) -> None:
        if msg.kind == "linear":
            self.inputs.setdefault(msg.name, []).append(msg.arguments["x"])
            self.has_bias[msg.name] = msg.arguments["bias"] is not None

    def after(self, msg: Message) -> None:
        if msg.kind == "linear" and msg.name in self.perturbations:
            use = len(self.inputs[msg.name]) - 1
            added = self.perturbations[msg.name]
            msg.value = msg.value + (added[use] if isinstance(added, list | tuple) else added)


def recorded_linear(
    model: Callable[..., Any],
    values: Mapping[str, Any],
    x: Any,
    perturbations: Mapping[str, Any] | None = None,
) -> tuple[NetworkOutput, dict[str, list[Any]]]:
    """The network output under `perturbations`, and the inputs of each linear map."""
    with NetworkFunction(values) as run, RecordLinear(perturbations) as record:
        model(x, None)
    assert isinstance(run, NetworkFunction)
    assert isinstance(record, RecordLinear)
    return NetworkOutput(run.f, run.likelihood), record.inputs
