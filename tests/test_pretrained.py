"""Networks trained elsewhere as values of the sites of a program: they predict the same, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.errors import InputError
from ppl_bnn.inference.method import resolve_start
from ppl_bnn.inference.pretrained import is_network, weights_of
from ppl_bnn.language.handlers import network_function
from ppl_bnn.language.layers import conv2d
from ppl_bnn.ppl.protocol import Problem, Program, system
from ppl_bnn.progress import Silent

X = np.random.default_rng(12).normal(size=(6, 3))
IMAGES = np.random.default_rng(1201).normal(size=(4, 8, 6, 2))
Y, LABELS = np.random.default_rng(1202).normal(size=6), np.array([0, 1, 2, 1])


@pytest.fixture(autouse=True)
def seeded_torch() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


def problem_of(model: Callable[..., Any], x: np.ndarray, y: np.ndarray, ppl: str = "numpyro") -> Problem:
    """What a method would see; outside a session it serves for shapes and names."""
    chosen = system(ppl)
    data, targets = chosen.asarray(x), chosen.asarray(y)
    program = Program.of(chosen, model, data, targets, language=True)
    return Problem(program, data, targets, x, y, 0, "cpu", "float64")


def imported(
    module: Any, model: Callable[..., Any], x: np.ndarray, y: np.ndarray, ppl: str = "numpyro"
) -> dict[str, np.ndarray]:
    with system(ppl).session("float64", "cpu"):
        problem = problem_of(model, x, y, ppl)
        assert is_network(module, problem)
        return weights_of(module, problem)


def mlp(
    widths: list[int], activation: str = "tanh", bias: bool = True, noise: bool = True
) -> Callable[..., Any]:
    def model(x: Any, y: Any = None) -> None:
        scale = bnn.sample("noise", dist.HalfNormal(1.0)) if noise else 1.0
        bnn.observe(y, bnn.mlp(x, widths, activation, bias=bias), likelihoods.Gaussian(scale))

    return model


def torch_mlp(widths: list[int], activation: type, bias: bool = True) -> torch.nn.Sequential:
    parts: list[torch.nn.Module] = []
    for before, after in zip([3, *widths[:-1]], widths, strict=True):
        parts += [torch.nn.Linear(before, after, bias=bias, dtype=torch.float64), activation()]
    return torch.nn.Sequential(*parts[:-1])


def predicted(model: Callable[..., Any], w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    return network_function(model)({**w, "noise": np.array(1.0)}, x)


def said_by(module: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    return module(torch.tensor(x)).detach().numpy()


# --- the same predictions -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("activation", "kind"), [("tanh", torch.nn.Tanh), ("relu", torch.nn.ReLU)])
def test_an_mlp_of_torch_predicts_the_same(activation: str, kind: type, bias: bool, ppl: str) -> None:
    # Square hidden weights: a forgotten transposition would not show in their shapes.
    module, model = torch_mlp([4, 4, 1], kind, bias), mlp([4, 4, 1], activation, bias)
    w = imported(module, model, X, Y, ppl)
    assert "noise" not in w
    np.testing.assert_allclose(predicted(model, w, X), said_by(module, X), rtol=0, atol=1e-10)
    assert all(value.dtype == np.float64 for value in w.values())


def test_a_state_dict_predicts_the_same() -> None:
    module, model = torch_mlp([4, 4, 1], torch.nn.Tanh), mlp([4, 4, 1])
    for state in (module.state_dict(), dict(module.state_dict())):
        w = imported(state, model, X, Y)
        np.testing.assert_allclose(predicted(model, w, X), said_by(module, X), rtol=0, atol=1e-10)


def test_a_state_dict_under_the_names_of_the_sites_is_still_transposed(rng: np.random.Generator) -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden0 = torch.nn.Linear(3, 3, dtype=torch.float64)
            self.output = torch.nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: Any) -> Any:
            return self.output(torch.tanh(self.hidden0(x)))

    module, model = Named(), mlp([3, 3])
    targets = rng.normal(size=(6, 3))
    w = imported(module.state_dict(), model, X, targets)
    np.testing.assert_allclose(predicted(model, w, X), said_by(module, X), rtol=0, atol=1e-10)


def test_an_imported_network_does_not_change_with_its_source() -> None:
    module = torch_mlp([4, 1], torch.nn.Tanh)
    w = imported(module, mlp([4, 1]), X, Y)
    kept = {name: value.copy() for name, value in w.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1.0
    for name, value in kept.items():
        np.testing.assert_array_equal(w[name], value)


def test_layers_are_taken_in_the_order_in_which_they_run(rng: np.random.Generator) -> None:
    class Backwards(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(3, 3, dtype=torch.float64)
            self.first = torch.nn.Linear(3, 3, dtype=torch.float64)
            self.dropout = torch.nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.last(self.dropout(torch.tanh(self.first(x))))

    module, model = Backwards(), mlp([3, 3])
    w = imported(module, model, X, rng.normal(size=(6, 3)))
    assert module.training
    np.testing.assert_allclose(predicted(model, w, X), said_by(module.eval(), X), rtol=0, atol=1e-10)


def lenet(x: Any, y: Any = None, *, pool: Any = ops.max_pool, activation: Any = ops.tanh) -> None:
    h = activation(conv2d("conv0", x, 3, (3, 2), padding=1))
    h = pool(h, 2)
    h = activation(conv2d("conv1", h, 5, 2, stride=(2, 1), padding="valid"))
    h = activation(bnn.dense("hidden", h.reshape(h.shape[0], -1), 7))
    bnn.observe(y, bnn.dense("output", h, 3), likelihoods.Categorical())


def torch_lenet(pool: type = torch.nn.MaxPool2d, activation: type = torch.nn.Tanh) -> torch.nn.Sequential:
    # 8 x 6 pixels, 8 x 7 after the first convolution, 4 x 3 after pooling, 2 x 2 after the second: 5 * 4 features.
    module = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, (3, 2), padding=1),
        activation(),
        pool(2),
        torch.nn.Conv2d(3, 5, 2, stride=(2, 1)),
        activation(),
        torch.nn.Flatten(),
        torch.nn.Linear(20, 7),
        activation(),
        torch.nn.Linear(7, 3),
    )
    return module.double()


@pytest.mark.parametrize(
    "activation", [("tanh", torch.nn.Tanh), ("relu", torch.nn.ReLU), ("silu", torch.nn.SiLU)]
)
@pytest.mark.parametrize("pool", [(ops.max_pool, torch.nn.MaxPool2d), (ops.avg_pool, torch.nn.AvgPool2d)])
def test_a_convolutional_network_predicts_the_same(pool: Any, activation: Any, ppl: str) -> None:
    module = torch_lenet(pool[1], activation[1])

    def model(x: Any, y: Any = None) -> None:
        lenet(x, y, pool=pool[0], activation=ops.ACTIVATIONS[activation[0]])

    for given in (module, module.state_dict()):
        w = imported(given, model, IMAGES, LABELS, ppl)
        assert w["conv0.weight"].shape == (3, 2, 2, 3)
        expected = said_by(module, IMAGES.transpose(0, 3, 1, 2))
        np.testing.assert_allclose(predicted(model, w, IMAGES), expected, rtol=0, atol=1e-10)


def test_a_convolution_along_time_predicts_the_same(ppl: str) -> None:
    def model(x: Any, y: Any = None) -> None:
        h = ops.tanh(bnn.conv1d("conv", x, 4, 3, stride=2, padding="valid"))
        bnn.observe(y, bnn.dense("output", h.reshape(h.shape[0], -1), 3), likelihoods.Categorical())

    module = torch.nn.Sequential(
        torch.nn.Conv1d(2, 4, 3, stride=2), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    ).double()
    series = np.random.default_rng(3).normal(size=(4, 8, 2))
    for given in (module, module.state_dict()):
        w = imported(given, model, series, LABELS, ppl)
        expected = said_by(module, series.transpose(0, 2, 1))
        np.testing.assert_allclose(predicted(model, w, series), expected, rtol=0, atol=1e-10)


def test_a_program_that_flattens_as_torch_does_keeps_the_order() -> None:
    def model(x: Any, y: Any = None) -> None:
        h = ops.tanh(conv2d("conv", x, 3, 3))
        h = ops.stack([h[..., channel] for channel in range(3)], 1)
        bnn.observe(y, bnn.dense("output", h.reshape(h.shape[0], -1), 3), likelihoods.Categorical())

    module = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding="same"), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(144, 3)
    ).double()
    w = imported(module, model, IMAGES, LABELS)
    expected = said_by(module, IMAGES.transpose(0, 3, 1, 2))
    np.testing.assert_allclose(predicted(model, w, IMAGES), expected, rtol=0, atol=1e-10)


def test_global_pooling_leaves_channels_alone() -> None:
    def model(x: Any, y: Any = None) -> None:
        h = ops.mean(ops.mean(ops.relu(conv2d("conv", x, 4, 3)), 1), 1)
        bnn.observe(y, bnn.dense("output", h, 3), likelihoods.Categorical())

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 4, 3, padding=1, dtype=torch.float64)
            self.output = torch.nn.Linear(4, 3, dtype=torch.float64)

        def forward(self, x: Any) -> Any:
            return self.output(torch.relu(self.conv(x)).mean((2, 3)))

    module = Pooled()
    w = imported(module, model, IMAGES, LABELS)
    expected = said_by(module, IMAGES.transpose(0, 3, 1, 2))
    np.testing.assert_allclose(predicted(model, w, IMAGES), expected, rtol=0, atol=1e-10)


def flax_forward(parameters: dict[str, Any], names: list[str], x: np.ndarray) -> np.ndarray:
    """What a Flax MLP of these parameters computes, written by hand."""
    for index, name in enumerate(names):
        x = x @ parameters[name]["kernel"] + parameters[name]["bias"]
        x = np.tanh(x) if index < len(names) - 1 else x
    return x


def flax_parameters(names: list[str], widths: list[int]) -> dict[str, Any]:
    rng = np.random.default_rng(13)
    sizes = zip([3, *widths[:-1]], widths, strict=True)
    return {
        name: {"kernel": rng.normal(size=size), "bias": rng.normal(size=size[1])}
        for name, size in zip(names, sizes, strict=True)
    }


@pytest.mark.parametrize("wrapped", [True, False])
def test_flax_parameters_are_put_in_order_whatever_their_dict_is_sorted_by(wrapped: bool) -> None:
    widths = [3] * 11 + [1]
    names = [f"Dense_{index}" for index in range(12)]
    parameters = flax_parameters(names, widths)
    # As a dict comes back from a map over its leaves: Dense_10 before Dense_2.
    alphabetical = dict(sorted(parameters.items()))
    assert list(alphabetical) != names
    model = mlp(widths)
    w = imported({"params": alphabetical} if wrapped else alphabetical, model, X, Y)
    np.testing.assert_allclose(predicted(model, w, X), flax_forward(parameters, names, X), rtol=0, atol=1e-10)


def test_flax_layers_named_as_in_the_program_are_found_by_name(rng: np.random.Generator) -> None:
    parameters = flax_parameters(["hidden0", "hidden1", "output"], [3, 3, 3])
    model, targets = mlp([3, 3, 3]), rng.normal(size=(6, 3))
    w = imported({name: parameters[name] for name in ("output", "hidden1", "hidden0")}, model, X, targets)
    for name in parameters:
        np.testing.assert_array_equal(w[f"{name}.weight"], parameters[name]["kernel"])
        np.testing.assert_array_equal(w[f"{name}.bias"], parameters[name]["bias"])


def test_flax_convolutions_need_no_translation(rng: np.random.Generator) -> None:
    shapes = {"Conv_0": (3, 2, 2, 3), "Conv_1": (2, 2, 3, 5), "Dense_0": (20, 7), "Dense_1": (7, 3)}
    parameters = {
        name: {"kernel": rng.normal(size=shape), "bias": rng.normal(size=shape[-1])}
        for name, shape in shapes.items()
    }
    w = imported({"params": parameters}, lenet, IMAGES, LABELS)
    for ours, theirs in zip(("conv0", "conv1", "hidden", "output"), shapes, strict=True):
        np.testing.assert_array_equal(w[f"{ours}.weight"], parameters[theirs]["kernel"])
        np.testing.assert_array_equal(w[f"{ours}.bias"], parameters[theirs]["bias"])


# --- in the methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["module", "state_dict", "flax"])
def test_a_method_starts_from_a_network(form: str, ppl: str) -> None:
    module = torch_mlp([4, 1], torch.nn.Tanh)
    given: Any = module if form == "module" else module.state_dict()
    if form == "flax":
        given = {
            f"Dense_{index}": {
                "kernel": module[2 * index].weight.detach().numpy().T,  # pyright: ignore
                "bias": module[2 * index].bias.detach().numpy(),  # pyright: ignore
            }
            for index in (0, 1)
        }

    model = mlp([4, 1])
    with system(ppl).session("float64", "cpu"):
        problem = problem_of(model, X, Y, ppl)
        points = resolve_start(problem, given, Silent(), count=2)
    for u in points:
        np.testing.assert_allclose(predicted(model, u, X), said_by(module, X), rtol=0, atol=1e-10)
        assert set(u) == set(problem.program.sites)
    # What a network does not have comes from the prior, as for a dict that names some sites only.
    assert points[0]["noise"] != points[1]["noise"]


def test_a_fit_starts_from_a_network(ppl: str) -> None:
    module = torch_mlp([4, 1], torch.nn.Tanh)

    def model(x: Any, y: Any = None) -> None:
        # A network without a prior has nothing but the data to train on, and the targets are what it already says.
        bnn.observe(y, bnn.mlp(x, [4, 1], "tanh", prior=priors.Point()), likelihoods.Gaussian(0.1))

    y = said_by(module, X)[:, 0]
    posterior = bnn.fit(model, X, y, bnn.MAP(ppl=ppl, start=module, steps=1))
    np.testing.assert_allclose(posterior.predict(X).mean, y, rtol=0, atol=1e-6)
    history = posterior.info.history["loss"]
    assert history[0] == pytest.approx(-6 * np.log(1 / (0.1 * np.sqrt(2 * np.pi))), rel=1e-9)


def test_dicts_of_sites_stay_as_they_are() -> None:
    with system("numpyro").session("float64", "cpu"):
        problem = problem_of(mlp([4, 1]), X, Y)
        for start in ({}, {"noise": 0.3}, {"noise": torch.tensor(0.3)}, {"other": np.zeros(3)}, None, 3.0):
            assert not is_network(start, problem)


# --- refused by name ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            lambda: torch_mlp([5, 1], torch.nn.Tanh),
            r"hidden0: linear \(3, 4\) with bias; output.*0: linear \(3, 5\)",
        ),
        (lambda: torch_mlp([4, 4, 1], torch.nn.Tanh), r"2: linear \(4, 4\) with bias; 4: linear"),
        (lambda: torch_mlp([4, 1], torch.nn.Tanh, bias=False), "without bias"),
        (lambda: torch.nn.Linear(3, 1), r"\[Linear: linear \(3, 1\) with bias\]"),
        (lambda: torch.nn.Sequential(torch_mlp([4, 1], torch.nn.Tanh), torch.nn.PReLU()), "PReLU"),
        (
            lambda: torch.nn.Sequential(
                torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
            ),
            r"1\.running_mean \(BatchNorm1d\) \(4,\)",
        ),
        (lambda: torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 1)), "Embedding"),
        (lambda: torch_mlp([4, 1], torch.nn.Tanh).state_dict() | {"scale": torch.ones(2)}, r"scale \(2,\)"),
        (lambda: flax_parameters(["Dense_0"], [1]), r"Dense_0: linear \(3, 1\)"),
        (
            lambda: {"params": flax_parameters(["a", "b"], [4, 1]), "batch_stats": {"mean": np.zeros(4)}},
            r"batch_stats/mean \(4,\)",
        ),
        (lambda: {"params": {"Embed_0": {"embedding": np.zeros((3, 4))}}}, r"Embed_0/embedding \(3, 4\)"),
        (lambda: {"Dense_0": {"bias": np.zeros(4)}}, r"Dense_0/bias \(4,\)"),
    ],
)
def test_layers_without_a_counterpart_are_refused(module: Callable[[], Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        imported(module(), mlp([4, 1]), X, Y)


def test_what_is_not_finite_is_refused() -> None:
    module = torch_mlp([4, 1], torch.nn.Tanh)
    with torch.no_grad():
        module[2].bias[0] = float("nan")  # pyright: ignore
    with pytest.raises(InputError, match=r"2\.bias: expected finite numbers"):
        imported(module, mlp([4, 1]), X, Y)


def test_flax_layers_that_only_their_order_could_tell_apart_are_refused(rng: np.random.Generator) -> None:
    parameters = flax_parameters(["first", "middle", "last"], [3, 3, 3])
    with pytest.raises(InputError, match=r"names that tell the order.*middle: linear \(3, 3\)"):
        imported(parameters, mlp([3, 3, 3]), X, rng.normal(size=(6, 3)))


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (torch.nn.Conv2d(2, 3, (3, 2), padding=1, stride=2), r"stride \(2, 2\)"),
        (torch.nn.Conv2d(2, 3, (3, 2), padding=(1, 0)), r"padding \(\(1, 1\), \(0, 0\)\)"),
        (torch.nn.Conv2d(2, 3, (3, 2), padding="same"), r"padding \(\(1, 1\), \(0, 1\)\)"),
        (torch.nn.Conv2d(2, 3, (3, 2), padding=1, dilation=2), r"dilation=\(1, 1\); came \(2, 2\)"),
        (
            torch.nn.Conv2d(2, 3, (3, 2), padding=1, padding_mode="reflect"),
            "padding_mode='zeros'; came 'reflect'",
        ),
        (torch.nn.Conv2d(3, 3, (3, 2), padding=1, groups=3), "groups=1; came 3"),
        (torch.nn.ConvTranspose2d(2, 3, (3, 2), padding=1), "ConvTranspose2d"),
    ],
)
def test_another_convolution_is_refused(first: torch.nn.Module, says: str) -> None:
    module = torch_lenet()
    module[0] = first.double()
    with pytest.raises(InputError, match=says):
        imported(module, lenet, IMAGES, LABELS)


def test_a_flattening_whose_order_cannot_be_seen_is_refused() -> None:
    def mixed(x: Any, y: Any = None) -> None:
        h = ops.tanh(conv2d("conv", x, 3, 3)).reshape(x.shape[0], -1)
        extra = x.reshape(x.shape[0], -1)
        bnn.observe(y, bnn.dense("output", ops.concatenate([h, extra]), 3), likelihoods.Categorical())

    module = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(240, 3)
    )
    with pytest.raises(InputError, match=r"flattens an image of 3 channels before 'output'"):
        imported(module.double(), mixed, IMAGES, LABELS)
    # Flax flattens as the program does, so there is nothing to know.
    parameters = {
        "Conv_0": {"kernel": np.ones((3, 3, 2, 3)), "bias": np.ones(3)},
        "Dense_0": {"kernel": np.ones((240, 3)), "bias": np.ones(3)},
    }
    assert set(imported(parameters, mixed, IMAGES, LABELS)) == {
        "conv.weight",
        "conv.bias",
        "output.weight",
        "output.bias",
    }


def test_weights_that_the_program_computes_cannot_be_imported() -> None:
    def model(x: Any, y: Any = None) -> None:
        weight = bnn.sample("scale", dist.HalfNormal(1.0)) * bnn.sample(
            "raw", dist.Normal(0.0, 1.0).expand((3, 1)).to_event()
        )
        bnn.observe(y, bnn.linear("output", x, weight), likelihoods.Gaussian(1.0))

    with pytest.raises(InputError, match=r"\['output'\], which it computes from other sites"):
        imported(torch.nn.Linear(3, 1, bias=False), model, X, Y)


def test_a_program_without_linear_maps_is_refused() -> None:
    def model(x: Any, y: Any = None) -> None:
        weight = bnn.sample("w", dist.Normal(0.0, 1.0).expand((3, 1)).to_event())
        bnn.observe(y, x @ weight, likelihoods.Gaussian(1.0))

    with pytest.raises(InputError, match=r"a program with linear maps.*bnn\.dense"):
        imported(torch.nn.Linear(3, 1, bias=False), model, X, Y)


def test_a_plain_model_of_a_system_is_refused() -> None:
    problem: Any = SimpleNamespace(program=SimpleNamespace(language=False))
    with pytest.raises(InputError, match="a model in the language"):
        weights_of(torch.nn.Linear(3, 1), problem)
