"""Networks trained elsewhere as values of the sites of a program: they predict the same, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError, ModelError, UnknownNameError
from ppl_bnn.core.progress import Silent
from ppl_bnn.inference.checkpoint import fingerprint
from ppl_bnn.inference.laplace.approximation import LaplaceGaussian
from ppl_bnn.inference.pretrained import is_network, weights_of
from ppl_bnn.inference.start import resolve_start
from ppl_bnn.language.handlers import network_function
from ppl_bnn.language.layers.basic import conv2d
from tests.inference.laplace.test_laplace_torch import default_double
from tests.language.modules.test_module import FRAMEWORKS, module_model, with_noise
from tests.language.modules.test_module import torch_mlp as sequential

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
    module: Any, model: Callable[..., Any], x: np.ndarray = X, y: np.ndarray = Y, ppl: str = "numpyro"
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
    ("pool", "activation"),
    [
        ((ops.max_pool, torch.nn.MaxPool2d), ("tanh", torch.nn.Tanh)),
        ((ops.max_pool, torch.nn.MaxPool2d), ("relu", torch.nn.ReLU)),
        ((ops.avg_pool, torch.nn.AvgPool2d), ("silu", torch.nn.SiLU)),
    ],
)
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
        (torch.nn.Conv2d(2, 3, (3, 2), padding=1, dilation=2), r"dilation=\(1, 1\); got \(2, 2\)"),
        (
            torch.nn.Conv2d(2, 3, (3, 2), padding=1, padding_mode="reflect"),
            "padding_mode='zeros'; got 'reflect'",
        ),
        (torch.nn.Conv2d(3, 3, (3, 2), padding=1, groups=3), "groups=1; got 3"),
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


# --- modules of a framework ---------------------------------------------------------------------------


def moved(network: Any, by: float = 0.25) -> Any:
    """A copy of a module whose every number is another one."""
    import jax

    if isinstance(network, torch.nn.Module):
        other = copy.deepcopy(network)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += by
        return other
    nnx = pytest.importorskip("flax.nnx")
    if isinstance(network, nnx.Module):
        graph, state = nnx.split(network)
        return nnx.merge(graph, jax.tree_util.tree_map(lambda leaf: leaf + by, state))
    return jax.tree_util.tree_map(lambda leaf: leaf + by if hasattr(leaf, "dtype") else leaf, network)


def sites_of(framework: str, network: Any) -> dict[str, np.ndarray]:
    """The parameters under the names of the sites of module "net", each read off its layer by hand."""
    _, _, layers, leaf, _ = FRAMEWORKS[framework]
    found = {}
    for index, name in enumerate(layers):
        layer = network[2 * index] if framework == "torch" else network.layers[index]
        for each in (leaf, "bias"):
            value = getattr(layer, each)
            numbers = value.detach().numpy() if framework == "torch" else value
            found[f"net.{name}.{each}"] = np.array(numbers, float)
    return found


def parameters_in_dicts(framework: str, network: Any) -> Mapping[str, Any]:
    if framework == "torch":
        return network.state_dict()
    if framework == "nnx":
        nnx = pytest.importorskip("flax.nnx")
        return nnx.state(network, nnx.Param)
    return {
        "layers": {
            str(index): {"weight": layer.weight, "bias": layer.bias}
            for index, layer in enumerate(network.layers)
        }
    }


def same_values(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("form", ["itself", "copy", "dict", "by name"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_sites_of_a_module_begin_at_a_network(framework: str, form: str) -> None:
    ppl, build, *_ = FRAMEWORKS[framework]
    network = build()
    trained = network if form == "itself" else moved(network)
    start = trained
    if form == "dict":
        start = parameters_in_dicts(framework, trained)
    elif form == "by name":
        start = {"net": trained, "noise": 0.5}
    wanted = sites_of(framework, trained)
    with system(ppl).session("float64", "cpu"):
        problem = problem_of(module_model(network), X, Y, ppl)
        assert is_network(start, problem)
        points = resolve_start(problem, start, Silent(), count=2)
    for u in points:
        # Normal priors: unconstrained coordinates are the values.
        same_values({name: value for name, value in u.items() if name != "noise"}, wanted)
    if form == "by name":
        assert all(u["noise"] == pytest.approx(np.log(0.5)) for u in points)
    else:
        assert points[0]["noise"] != points[1]["noise"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_module_begins_in_unconstrained_coordinates(framework: str) -> None:
    ppl, build, *_ = FRAMEWORKS[framework]

    def positive(name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        return bnn.sample(name, dist.HalfNormal(1.0).expand(shape).to_event())

    network = build()
    # All weights are above -1.
    trained = moved(network, by=2.0)
    with system(ppl).session("float64", "cpu"):
        problem = problem_of(module_model(network, positive), X, Y, ppl)
        (u,) = resolve_start(problem, trained, Silent())
    for name, value in sites_of(framework, trained).items():
        np.testing.assert_allclose(u[name], np.log(value), rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_chains_begin_at_a_network(framework: str) -> None:
    ppl, build, *_ = FRAMEWORKS[framework]
    network = build()
    trained = moved(network)
    with system(ppl).session("float64", "cpu"):
        problem = problem_of(module_model(network), X, Y, ppl)
        (started,) = bnn.NUTS(ppl=ppl, chains=2, start=trained).started([problem], Silent())
        for flat in started.flat:
            u = problem.program.unravel(flat)
            same_values({name: u[name] for name in u if name != "noise"}, sites_of(framework, trained))


# Every framework for one method, and another method for one framework.
@pytest.mark.parametrize(("framework", "method"), [*((each, "map") for each in FRAMEWORKS), ("torch", "svi")])
def test_a_fit_of_a_module_starts_from_a_network(framework: str, method: str) -> None:
    ppl, build, *_ = FRAMEWORKS[framework]
    network = build()
    trained = moved(network)
    chosen = {
        "map": bnn.MAP(ppl=ppl, start=trained, steps=1, learning_rate=1e-12, polish=False),
        "svi": bnn.SVI(ppl=ppl, start=trained, steps=1, learning_rate=1e-12, elbo_draws=2),
    }[method]
    before = sites_of(framework, network)
    centre = bnn.fit(module_model(network), X, Y, chosen).approximation.centre()
    # Steps of Adam are as long as the learning rate.
    for name, value in sites_of(framework, trained).items():
        np.testing.assert_allclose(centre[name], value, rtol=0, atol=1e-9, err_msg=name)
    same_values(sites_of(framework, network), before)


def test_points_of_a_module_begin_at_a_network() -> None:
    network = sequential()
    trained = moved(network)

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.module("net", x, network, priors.Point()), likelihoods.Gaussian(0.1))

    y = said_by(trained.double(), X)[:, 0]
    posterior = bnn.fit(model, X, y, bnn.MAP(ppl="pyro", start=trained, steps=1))
    # The targets are what the trained network says: nothing is lost but the constant of the likelihood.
    loss = posterior.info.history["loss"][0]
    assert loss == pytest.approx(-6 * np.log(1 / (0.1 * np.sqrt(2 * np.pi))), rel=1e-9)


def test_laplace_of_a_network_trained_in_torch_is_that_of_laplace_torch() -> None:
    """Written with bnn.module: posterior precision, log evidence, and mean and variance of the linearised network."""
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    noise, scale = 0.3, 0.7
    rng = np.random.default_rng(5)
    x, new = rng.normal(size=(30, 3)), rng.normal(size=(7, 3))
    y = np.sin(x[:, :1]) + noise * rng.normal(size=(30, 1))
    network = sequential(dtype=torch.float64)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    for _ in range(100):
        optimiser.zero_grad()
        penalty = sum((parameter**2).sum() for parameter in network.parameters()) / (2 * scale**2)
        loss = ((network(torch.tensor(x)) - torch.tensor(y)) ** 2).sum() / (2 * noise**2) + penalty
        loss.backward()
        optimiser.step()

    def model(x: Any, y: Any = None) -> None:
        f = bnn.module("net", x, network, priors.Normal(0.0, scale))
        bnn.observe(y, f, likelihoods.Gaussian(noise))

    def fitted(start: Any) -> tuple[bnn.Posterior, LaplaceGaussian]:
        posterior = bnn.fit(model, x, y[:, 0], bnn.Laplace(ppl="pyro", start=start, optimise=False))
        assert isinstance(posterior.approximation, LaplaceGaussian)
        return posterior, posterior.approximation

    posterior, gaussian = fitted(network)
    by_site, same = fitted(sites_of("torch", network))
    assert posterior.info.figures == by_site.info.figures
    np.testing.assert_array_equal(gaussian.covariance.precision(), same.covariance.precision())
    np.testing.assert_array_equal(posterior.predict(new).mean, by_site.predict(new).mean)

    with default_double():
        theirs: Any = Laplace(
            network,
            "regression",
            subset_of_weights="all",
            hessian_structure="full",
            backend=CurvlinopsGGN,
            prior_precision=1.0 / scale**2,
            sigma_noise=noise,
        )
        theirs.fit(torch.utils.data.DataLoader(data, batch_size=30))
        mean, variance = theirs(torch.tensor(new))
        precision = theirs.posterior_precision.detach().numpy()
        evidence = float(theirs.log_marginal_likelihood())
    # Parameters have one order in both, so that the matrices can be compared as they are.
    found = gaussian.covariance.precision()
    np.testing.assert_allclose(found, precision, rtol=1e-8, atol=1e-8 * np.abs(precision).max())
    assert posterior.info.figures["log_evidence"] == pytest.approx(evidence, rel=1e-8)
    predicted = posterior.predict(new)
    np.testing.assert_allclose(predicted.mean, mean[:, 0].detach().numpy(), rtol=1e-8)
    np.testing.assert_allclose(predicted.epistemic, variance[:, 0, 0].detach().numpy(), rtol=1e-7)


def test_laplace_finds_the_noise_that_a_network_does_not_have() -> None:
    network = sequential()
    trained = moved(network)
    posteriors = [
        bnn.fit(module_model(network), X, Y, bnn.Laplace(ppl="pyro", start=start, optimise=False))
        for start in (trained, sites_of("torch", trained))
    ]
    modes = [posterior.approximation.centre() for posterior in posteriors]
    same_values(modes[0], modes[1])
    wanted = sites_of("torch", trained)
    same_values({name: modes[0][name] for name in wanted}, wanted)
    # At the mode of the noise s given the weights: N - sum r^2 / s^2 + s^2 - 1 = 0, with the volume of u = log s.
    s, r = np.exp(modes[0]["noise"]), Y - said_by(trained.double(), X)[:, 0]
    assert -len(Y) + np.sum(r**2) / s**2 - s**2 + 1 == pytest.approx(0.0, abs=1e-4)


def test_a_network_for_one_of_two_modules() -> None:
    first, second = sequential(), torch.nn.Linear(3, 1)
    model = with_noise(lambda x: bnn.module("a", x, first) + bnn.module("b", x, second))
    for start in (moved(second), {"b": moved(second)}, {"b": moved(second).state_dict()}):
        found = imported(start, model, ppl="pyro")
        assert set(found) == {"b.weight", "b.bias"}
        np.testing.assert_allclose(found["b.bias"], second.bias.detach().numpy() + 0.25, rtol=1e-6)
    both = imported({"a": first, "b": second}, model, ppl="pyro")
    assert len(both) == 6
    with pytest.raises(InputError, match=r"exactly one module of 'a', 'b'; got one with those of none"):
        imported(torch.nn.Linear(2, 1), model, ppl="pyro")
    twins = with_noise(lambda x: bnn.module("a", x, first) + bnn.module("b", x, first))
    with pytest.raises(InputError, match=r"got one with those of 'a', 'b'; try start=\{'a': network"):
        imported(first, twins, ppl="pyro")
    with pytest.raises(UnknownNameError, match=r"unknown module.*'c'.*known: a, b"):
        imported({"c": first}, twins, ppl="pyro")
    with pytest.raises(InputError, match=r"start\['b\.bias'\]: expected each site once"):
        imported({"b": second, "b.bias": np.zeros(1)}, model, ppl="pyro")


def test_a_module_beside_layers_needs_its_name() -> None:
    network = sequential()
    model = with_noise(lambda x: bnn.dense("head", ops.tanh(bnn.module("net", x, network)), 1))
    with pytest.raises(InputError, match=r"modules \('net'\) and other layers; try start=\{'net': network\}"):
        imported(network, model, ppl="pyro")
    same_values(imported({"net": network}, model, ppl="pyro"), sites_of("torch", network))
    # One that is held as a whole has no sites: what is left are the layers.
    held = with_noise(lambda x: bnn.dense("head", bnn.module("net", x, network, {"*": None}), 1))
    head = torch.nn.Linear(1, 1)
    np.testing.assert_array_equal(
        imported(head, held, ppl="pyro")["head.weight"], head.weight.detach().double()
    )


def test_what_the_model_holds_must_be_the_same_in_the_start() -> None:
    network = sequential()
    model = module_model(network, {"0.weight": None, "0.bias": priors.Point(), "*": priors.Normal()})
    found = imported(network, model, ppl="pyro")
    wanted = sites_of("torch", network)
    same_values(found, {name: wanted[name] for name in wanted if name != "net.0.weight"})
    with pytest.raises(
        InputError, match=r"module 'net': expected the values that the model holds.*'0\.weight'"
    ):
        imported(moved(network), model, ppl="pyro")
    other = moved(network)
    with torch.no_grad():
        other[0].weight.copy_(network[0].weight)
    assert imported(other, model, ppl="pyro")["net.0.bias"] == pytest.approx(
        wanted["net.0.bias"] + 0.25, rel=1e-6
    )


class Shared(torch.nn.Module):
    """One matrix in two places, running statistics, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: Any) -> Any:
        return self.norm(self.second(torch.tanh(self.first(x)))) * self.mask


def test_buffers_and_shared_parameters_of_a_start() -> None:
    network = Shared().eval()
    model = with_noise(lambda x: bnn.module("net", x, network)[:, :1])
    trained = moved(network)
    for start in (trained, trained.state_dict()):
        found = imported(start, model, ppl="pyro")
        wanted = {f"net.{name}": value.detach().double() for name, value in trained.named_parameters()}
        assert "net.second.weight" not in wanted
        same_values(found, wanted)
    untied = trained.state_dict()
    untied["second.weight"] = untied["second.weight"] + 1.0
    with pytest.raises(InputError, match=r"one value of 'first\.weight'.*as 'second\.weight' again; got two"):
        imported(untied, model, ppl="pyro")
    # The other way round: two matrices in the model begin at one.
    apart = Shared().eval()
    apart.second.weight = torch.nn.Parameter(apart.first.weight.detach() + 1.0)
    both = imported(trained, with_noise(lambda x: bnn.module("net", x, apart)[:, :1]), ppl="pyro")
    np.testing.assert_array_equal(both["net.second.weight"], both["net.first.weight"])
    trained.norm.running_mean += 1.0
    for start in (trained, trained.state_dict()):
        with pytest.raises(InputError, match=r"got others of 'norm\.running_mean'"):
            imported(start, model, ppl="pyro")


def test_variables_of_nnx_and_arrays_of_equinox_must_be_the_same_in_the_start() -> None:
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    import jax

    class Normed(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dropout(self.norm(x))[:, :1]

    class Permuted(eqx.Module):
        inner: Any
        order: Any

        def __call__(self, x: Any) -> Any:
            return self.inner(x[self.order])

    first, second = Normed(), Normed()
    first.eval()
    model = module_model(first, priors.Normal())
    assert set(imported(second, model)) == {"net.norm.scale", "net.norm.bias"}
    second.norm.mean[...] = second.norm.mean[...] + 1.0
    with pytest.raises(InputError, match=r"got others of 'norm\.mean'"):
        imported(second, model)
    inner = eqx.nn.Linear(3, 1, key=jax.random.PRNGKey(0))
    model = module_model(Permuted(inner, jax.numpy.arange(3)))
    assert set(imported(Permuted(inner, jax.numpy.arange(3)), model)) == {
        "net.inner.weight",
        "net.inner.bias",
    }
    with pytest.raises(InputError, match="got others of 'order'"):
        imported(Permuted(inner, jax.numpy.arange(3)[::-1]), model)


def lacking(framework: str) -> Any:
    """One layer of the framework, with other names than those of the networks."""
    if framework == "torch":
        return torch.nn.Linear(3, 1)
    import jax

    if framework == "nnx":
        nnx = pytest.importorskip("flax.nnx")
        return nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    return pytest.importorskip("equinox").nn.Linear(3, 1, key=jax.random.PRNGKey(0))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_network_is_refused_before_anything_is_drawn_or_compiled(framework: str) -> None:
    ppl, build, layers, leaf, _ = FRAMEWORKS[framework]
    model = module_model(build())
    says = (
        rf"module 'net': expected its parameters, among them .*{layers[0]}\.{leaf} \(.*got .*no {layers[0]}"
    )
    other = lacking(framework)
    for method in (
        bnn.MAP(ppl=ppl, start=other),
        bnn.NUTS(ppl=ppl, start=other),
        bnn.Laplace(ppl=ppl, start=other, optimise=False),
        bnn.SVI(ppl=ppl, start=other),
    ):
        error = method.refusal(model, X, Y)
        assert isinstance(error, InputError)
        with pytest.raises(InputError, match=says):
            raise error


def test_networks_that_do_not_fit_a_module_are_refused() -> None:
    network = sequential()
    model = module_model(network)
    wider = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    longer = torch.nn.Sequential(*sequential(), torch.nn.Linear(1, 1))
    broken = moved(network, by=float("nan"))
    linear = with_noise(lambda x: bnn.dense("output", x, 1))
    for given, program, error, says in (
        (wider, model, InputError, r"0\.weight \(4, 3\), 0\.bias \(4,\).*got 0\.weight \(5, 3\)"),
        (longer, model, InputError, r"its 4 parameters alone; got 3\.weight \(1, 1\), 3\.bias \(1,\)"),
        (broken, model, InputError, r"0\.weight: expected finite numbers"),
        (sequential().to("meta"), model, InputError, r"a value of '0\.weight'; got a shape only"),
        (torch.nn.LazyLinear(1), model, ModelError, "got a lazy layer"),
        (lacking("nnx"), model, InputError, r"a torch\.nn\.Module, as in the model.*a flax\.nnx\.Module"),
        (lacking("equinox"), linear, InputError, r"got Linear, an equinox\.Module; try bnn\.module"),
        (network, module_model(network, {"*": None}), InputError, "a module that has priors; got neither"),
    ):
        with pytest.raises(error, match=says):
            imported(given, program, ppl="pyro")
    for prior in (priors.Horseshoe(), priors.Hierarchical()):
        computed = module_model(network, {"0.weight": prior, "*": priors.Normal()})
        with pytest.raises(InputError, match=r"\['net\.0\.weight'\], which it computes from other sites"):
            imported(network, computed, ppl="pyro")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_checkpoint_tells_networks_apart(framework: str) -> None:
    ppl, build, *_ = FRAMEWORKS[framework]
    network = build()
    with system(ppl).session("float64", "cpu"):
        problem = problem_of(module_model(network), X, Y, ppl)
        told = [
            fingerprint(problem, bnn.SVI(ppl=ppl, start=start))["settings"]["start"]
            for start in (network, network, moved(network), {"net": network, "noise": 0.5})
        ]
    assert told[0] == told[1]
    assert told[0] != told[2]
    assert told[0] != told[3]
