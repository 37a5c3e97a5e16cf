"""What the tests of layers have in common: a layer at given values in each system, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.inference.curvature.jacobian import jacobians, linear_maps
from ppl_bnn.inference.flat_vector import flat_latents, latent_names
from ppl_bnn.language.primitives import Handler, Message

Values = Mapping[str, np.ndarray]
Layer = Callable[[Any], Any]


class Substitute(Handler):
    """Random variables and parameters named in `values` take those values."""

    sees_maps = False

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def process(self, msg: Message) -> None:
        if msg.kind in ("sample", "param") and msg.name in self.values:
            msg.answer(self.values[msg.name])


def values_of(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: 0.7 * rng.normal(size=shape) for name, shape in shapes.items()}


def outcome(ppl: str, layer: Layer, values: Values, x: np.ndarray, pull: np.ndarray) -> dict[str, np.ndarray]:
    """The "output" of a layer, and the gradients of sum(output * pull) in each value and, if it is real, in "x"."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        inputs, cotangent = chosen.asarray(x), chosen.asarray(pull)
        leaves = {name: chosen.asarray(value) for name, value in values.items()}
        if x.dtype.kind == "f":
            leaves["x"] = inputs

        def both(leaves: Any) -> Any:
            def run(given: Any) -> Any:
                with Substitute(given):
                    output = layer(given.get("x", inputs))
                return output, output

            _, pullback, output = chosen.vjp(run, leaves)
            return {**pullback(cotangent), "output": output}

        return {name: chosen.to_numpy(each) for name, each in chosen.compile(both)(leaves).items()}


def check(layer: Layer, values: Values, x: np.ndarray, pull: np.ndarray, expected: Values) -> None:
    """Output and gradients in both systems are those expected and those of each other; NumPy has the output too."""
    found = {ppl: outcome(ppl, layer, values, x, pull) for ppl in ("numpyro", "pyro")}
    with Substitute(values):
        plain = layer(x)
    np.testing.assert_allclose(plain, expected["output"], rtol=0, atol=1e-10)
    assert set(found["pyro"]) == set(expected)
    for name, wanted in expected.items():
        # Sums of some hundred products of numbers about 1: rounding is below 1e-13.
        for ppl, ours in found.items():
            np.testing.assert_allclose(ours[name], wanted, rtol=1e-10, atol=1e-10, err_msg=f"{name} in {ppl}")
        np.testing.assert_allclose(found["numpyro"][name], found["pyro"][name], rtol=1e-10, atol=1e-10)


def of_torch(
    output: torch.Tensor, pull: np.ndarray, leaves: Mapping[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """The output, and the gradients of sum(output * pull) in the leaves, as torch has them."""
    gradients = torch.autograd.grad((output * torch.tensor(pull)).sum(), list(leaves.values()))
    found = {name: gradient.numpy() for name, gradient in zip(leaves, gradients, strict=True)}
    return {**found, "output": output.detach().numpy()}


def set_parameters(module: torch.nn.Module, values: Mapping[str, np.ndarray]) -> None:
    """All parameters of a module, by name."""
    assert {name for name, _ in module.named_parameters()} == set(values)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.tensor(np.ascontiguousarray(values[name])))


def through_maps(
    ppl: str, model: Any, x: np.ndarray, y: np.ndarray
) -> tuple[set[str], np.ndarray, np.ndarray]:
    """The weights and biases that linear maps serve; the Jacobian through the maps, and that of the whole model."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        xs, ys = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, model, xs, ys, language=True)
        problem = Problem(program, xs, ys, x, y, 0, "cpu", "float64")
        rng = np.random.default_rng(4)
        u = {name: 0.6 * rng.normal(size=site.unconstrained_shape) for name, site in program.sites.items()}
        maps = linear_maps(problem, u)
        served = {site for linear in maps for site in (linear.weight, linear.bias) if site is not None}
        ((_, _, ours),) = jacobians(problem, u, x, 2**28)
        names = latent_names(problem)

        def eta(flat: Any) -> Any:
            return program.predictor(program.constrain(program.unravel(flat, names), xs, ys), xs)

        flat = chosen.asarray(flat_latents(problem, u))
        return served, ours, chosen.to_numpy(chosen.compile(chosen.transforms.jacrev(eta))(flat))


def log_joint_and_predictor(ppl: str, model: Any, x: Any, y: np.ndarray) -> tuple[Any, dict[str, Any], Any]:
    """Log joint, its gradient by site and the predictor, at one point that is the same in both systems."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        xs = (
            {name: chosen.asarray(each) for name, each in x.items()}
            if isinstance(x, dict)
            else chosen.asarray(x)
        )
        ys = chosen.asarray(y)
        program = Program.of(chosen, model, xs, ys, language=True)
        rng = np.random.default_rng(5)
        w = {name: 0.5 * rng.normal(size=site.unconstrained_shape) for name, site in program.sites.items()}
        u = {name: chosen.asarray(value) for name, value in w.items()}
        density = chosen.compile(chosen.value_and_grad(lambda u: program.log_joint(u, xs, ys)))
        value, gradient = density(u)
        eta = program.predictor(program.constrain(u, xs, ys), xs)
        return (
            float(value),
            {name: chosen.to_numpy(each) for name, each in gradient.items()},
            chosen.to_numpy(eta),
        )


class Describe(Handler):
    """Answers samples with ones and keeps what was asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def process(self, msg: Message) -> None:
        if msg.kind in ("sample", "param"):
            self.asked[msg.name] = msg.arguments.get("distribution", msg.arguments.get("init"))
            msg.answer(np.ones(self.asked[msg.name].shape))


def asked(action: Callable[[], Any]) -> dict[str, Any]:
    """The distributions of the sites that a layer asks for, by name."""
    with Describe() as described:
        action()
    assert isinstance(described, Describe)
    return described.asked
