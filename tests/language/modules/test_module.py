"""Modules of torch, Flax NNX and Equinox as layers: the same networks in the language, and what must be refused."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_flatten

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors, zoo
from ppl_bnn.backends import pyro_recording
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import BNNError, ModelError, UnknownNameError, UnsupportedError
from ppl_bnn.inference.curvature import curvature
from ppl_bnn.inference.curvature.curvature import data_curvature
from ppl_bnn.inference.laplace import fit
from ppl_bnn.language.handlers import network_function, recorded_linear
from ppl_bnn.language.modules import module as modules
from ppl_bnn.language.modules import protocol as calls
from tests.layer_oracles import Substitute, asked, log_joint_and_predictor, values_of
from tests.problems import Conjugate, regression_data

ROWS, FEATURES, WIDTH = 6, 3, 4
X = np.random.default_rng(3).normal(size=(ROWS, FEATURES))
Y = np.random.default_rng(4).normal(size=ROWS)
FAN_IN = priors.Normal(0.0, "fan_in")


def torch_mlp(seed: int = 0, dtype: Any = torch.float32) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, WIDTH, dtype=dtype),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, 1, dtype=dtype),
        )


def nnx_mlp() -> Any:
    nnx = pytest.importorskip("flax.nnx")
    jax = pytest.importorskip("jax")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(FEATURES, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)])

        def __call__(self, x: Any) -> Any:
            return self.layers[1](jax.numpy.tanh(self.layers[0](x)))

    return Net(nnx.Rngs(0))


def equinox_mlp() -> Any:
    eqx = pytest.importorskip("equinox")
    jax = pytest.importorskip("jax")
    return eqx.nn.MLP(FEATURES, 1, WIDTH, 1, activation=jax.numpy.tanh, key=jax.random.PRNGKey(0))


# Framework -> (its system, the network, the names of the two layers, the leaf that is a weight, whether it is turned).
FRAMEWORKS: dict[str, tuple[str, Callable[[], Any], tuple[str, str], str, bool]] = {
    "torch": ("pyro", torch_mlp, ("0", "2"), "weight", True),
    "nnx": ("numpyro", nnx_mlp, ("layers.0", "layers.1"), "kernel", False),
    "equinox": ("numpyro", equinox_mlp, ("layers.0", "layers.1"), "weight", True),
}


def with_noise(network: Callable[[Any], Any]) -> Callable[..., None]:
    """A regression on what a network gives."""

    def model(x: Any, y: Any = None) -> None:
        noise = bnn.sample("noise", dist.HalfNormal(1.0))
        bnn.observe(y, network(x), likelihoods.Gaussian(noise))

    return model


def module_model(network: Any, prior: Any = FAN_IN, **keywords: Any) -> Callable[..., None]:
    return with_noise(lambda x: bnn.module("net", x, network, prior, **keywords))


def in_the_language(x: Any) -> Any:
    """The same network, layer by layer."""
    return bnn.mlp(x, [WIDTH, 1], activation="tanh", prior=FAN_IN)


def renamed(framework: str) -> dict[str, tuple[str, bool]]:
    """Site of the module -> (site in the language, whether the matrix is transposed)."""
    _, _, layers, leaf, turned = FRAMEWORKS[framework]
    found = {}
    for theirs, ours in zip(layers, ("hidden0", "output"), strict=True):
        found[f"net.{theirs}.{leaf}"] = (f"{ours}.weight", turned)
        found[f"net.{theirs}.bias"] = (f"{ours}.bias", False)
    return found


def point(model: Any, ppl: str, x: np.ndarray, y: np.ndarray, values: Mapping[str, np.ndarray]) -> Any:
    """Log joint, its gradient by site, and the predictor, at unconstrained values."""
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        xs, ys = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, model, xs, ys, language=True)
        assert set(program.sites) == set(values)
        u = {name: chosen.asarray(values[name]) for name in program.sites}
        value, gradient = chosen.compile(chosen.value_and_grad(lambda u: program.log_joint(u, xs, ys)))(u)
        eta = program.predictor(program.constrain(u, xs, ys), xs)
        return float(value), {n: chosen.to_numpy(g) for n, g in gradient.items()}, chosen.to_numpy(eta)


# --- the same network in the language ---------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_is_the_network_written_in_the_language(framework: str) -> None:
    ppl, build, *_ = FRAMEWORKS[framework]
    theirs = renamed(framework)
    shapes = {
        "hidden0.weight": (FEATURES, WIDTH),
        "hidden0.bias": (WIDTH,),
        "output.weight": (WIDTH, 1),
        "output.bias": (1,),
        "noise": (),
    }
    values = values_of(shapes)
    same = {site: values[ours].T if turned else values[ours] for site, (ours, turned) in theirs.items()}
    # Modules in float32, a fit in float64: all digits are there.
    expected = point(with_noise(in_the_language), "pyro", X, Y, values)
    found = point(module_model(build()), ppl, X, Y, {**same, "noise": values["noise"]})
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-10)
    np.testing.assert_allclose(found[1]["noise"], expected[1]["noise"], rtol=1e-10)
    for site, (ours, turned) in theirs.items():
        gradient = expected[1][ours]
        np.testing.assert_allclose(
            found[1][site], gradient.T if turned else gradient, rtol=1e-10, atol=1e-12, err_msg=site
        )


def test_the_forward_pass_is_that_of_torch_on_numbers_too() -> None:
    class Conv(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 4, 3, groups=2, padding=1)
            self.norm = torch.nn.GroupNorm(2, 4)
            self.head = torch.nn.Linear(4 * 4 * 4, 3)

        def forward(self, x: Any) -> Any:
            h = torch.relu(self.norm(self.conv(x.movedim(-1, 1))))
            return self.head(h.flatten(1))

    network = Conv().double()
    x = np.random.default_rng(0).normal(size=(ROWS, 4, 4, 2))

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.module("net", x, network), likelihoods.Categorical())

    w = {f"net.{name}": value.detach() for name, value in network.named_parameters()}
    expected = network(torch.tensor(x)).detach().numpy()
    native = network_function(model)(w, torch.tensor(x))
    np.testing.assert_allclose(native.detach().numpy(), expected, rtol=0, atol=1e-14)
    numbers = network_function(model)({name: value.numpy() for name, value in w.items()}, x)
    assert isinstance(numbers, np.ndarray)
    np.testing.assert_allclose(numbers, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_numbers_go_through_jax_in_their_own_type(framework: str) -> None:
    jax = pytest.importorskip("jax")
    _, build, layers, leaf, turned = FRAMEWORKS[framework]
    model = module_model(build())
    values = values_of(
        {
            f"net.{layers[0]}.{leaf}": (WIDTH, FEATURES) if turned else (FEATURES, WIDTH),
            f"net.{layers[0]}.bias": (WIDTH,),
            f"net.{layers[1]}.{leaf}": (1, WIDTH) if turned else (WIDTH, 1),
            f"net.{layers[1]}.bias": (1,),
            "noise": (),
        }
    )
    first, second = (values[f"net.{layer}.{leaf}"] for layer in layers)
    first, second = (first.T, second.T) if turned else (first, second)
    expected = np.tanh(X @ first + values[f"net.{layers[0]}.bias"]) @ second + values[f"net.{layers[1]}.bias"]
    before = jax.config.jax_enable_x64
    found = network_function(model)(values, X)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    narrow = network_function(model)({n: np.float32(v) for n, v in values.items()}, X.astype(np.float32))
    assert narrow.dtype == np.float32
    assert jax.config.jax_enable_x64 == before


def test_linear_regression_in_closed_form() -> None:
    problem = Conjugate.make()
    network = torch.nn.Linear(problem.x.shape[1], 1)

    def model(x: Any, y: Any = None) -> None:
        f = bnn.module("line", x, network, priors.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Gaussian(problem.noise))

    posterior = bnn.fit(model, problem.x, problem.y, bnn.Laplace(ppl="pyro", steps=300), seed=0)
    new = problem.x[:5] + 0.3
    mean, variance = problem.predictive(new)
    predicted = posterior.predict(new)
    np.testing.assert_allclose(predicted.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(predicted.epistemic, variance, rtol=1e-6)
    assert posterior.log_evidence == pytest.approx(problem.log_evidence, abs=1e-6)


# --- the random modules of the systems --------------------------------------------------------------


def test_the_log_joint_is_that_of_a_pyro_module() -> None:
    pyro = pytest.importorskip("pyro")
    from pyro.nn import PyroSample
    from pyro.nn.module import to_pyro_module_

    network = torch_mlp(dtype=torch.float64)
    theirs = copy.deepcopy(network)
    to_pyro_module_(theirs)
    for part in list(theirs.modules()):
        for name, value in list(part.named_parameters(recurse=False)):
            scale = value.shape[1] ** -0.5 if value.dim() > 1 else 1.0
            prior = pyro.distributions.Normal(torch.tensor(0.0).double(), scale)
            setattr(part, name, PyroSample(prior.expand(value.shape).to_event(value.dim())))

    def reference(x: Any, y: Any) -> None:
        f = theirs(x)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", pyro.distributions.Normal(f[:, 0], 0.3), obs=y)

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.module("net", x, network, FAN_IN), likelihoods.Gaussian(0.3))

    x, y = torch.tensor(X), torch.tensor(Y)
    values = values_of({name: tuple(each.shape) for name, each in network.named_parameters()})
    wanted = pyro.condition(reference, {name: torch.tensor(each) for name, each in values.items()})
    expected = pyro.poutine.trace(wanted).get_trace(x, y).log_prob_sum()
    found = log_density_at(model, "pyro", {f"net.{name}": each for name, each in values.items()})
    assert found == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_the_log_joint_is_that_of_a_random_module_of_numpyro(framework: str) -> None:
    numpyro = pytest.importorskip("numpyro")
    jax = pytest.importorskip("jax")
    from numpyro.contrib.module import random_eqx_module, random_nnx_module
    from numpyro.infer.util import log_density

    _, build, layers, leaf, turned = FRAMEWORKS[framework]
    network = build()
    shapes = {
        f"{layers[0]}.{leaf}": (WIDTH, FEATURES) if turned else (FEATURES, WIDTH),
        f"{layers[0]}.bias": (WIDTH,),
        f"{layers[1]}.{leaf}": (1, WIDTH) if turned else (WIDTH, 1),
        f"{layers[1]}.bias": (1,),
    }
    values = values_of(shapes)

    def prior(name: str, shape: tuple[int, ...]) -> Any:
        return numpyro.distributions.StudentT(3.0, 0.0, 0.5 if name.endswith("bias") else 1.5)

    def reference(x: Any, y: Any) -> None:
        random = random_nnx_module if framework == "nnx" else random_eqx_module
        net = random("net", network, prior)
        f = net(x) if framework == "nnx" else jax.vmap(net)(x)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", numpyro.distributions.Normal(f[:, 0], 0.3), obs=y)

    def model(x: Any, y: Any = None) -> None:
        drawn = {"*.bias": priors.StudentT(3.0, 0.0, 0.5), "*": priors.StudentT(3.0, 0.0, 1.5)}
        bnn.observe(y, bnn.module("net", x, network, drawn), likelihoods.Gaussian(0.3))

    found = log_density_at(model, "numpyro", {f"net.{name}": each for name, each in values.items()})
    with jax.enable_x64(True):
        named = {}
        for name, value in values.items():
            path = name.replace("layers.0", "layers[0]").replace("layers.1", "layers[1]")
            named[f"net/{name if framework == 'nnx' else path}"] = jax.numpy.asarray(value)
        started = numpyro.handlers.seed(reference, 0)
        expected, trace = log_density(started, (jax.numpy.asarray(X), jax.numpy.asarray(Y)), {}, named)
    assert {name for name, site in trace.items() if site["type"] == "sample"} - {"y"} == set(named)
    assert found == pytest.approx(float(expected), rel=1e-10)


def log_density_at(model: Any, ppl: str, values: Mapping[str, np.ndarray]) -> float:
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        xs, ys = chosen.asarray(X), chosen.asarray(Y)
        program = Program.of(chosen, model, xs, ys, language=True)
        assert set(program.sites) == set(values)
        u = {name: chosen.asarray(values[name]) for name in program.sites}
        return float(program.log_joint(u, xs, ys))


# --- priors -----------------------------------------------------------------------------------------


def scales(network: Any, x: np.ndarray = X, **keywords: Any) -> dict[str, Any]:
    """(family, scale) that each parameter is asked from; params as they start."""
    found = asked(lambda: bnn.module("net", x, network, **keywords))
    return {
        name.removeprefix("net."): (each.family, each.arguments["scale"]) if hasattr(each, "family") else each
        for name, each in found.items()
    }


class TorchLayers(torch.nn.Module):
    """One of each kind; its output is of no interest."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 6, (3, 5), groups=2)
        self.back = torch.nn.ConvTranspose1d(4, 6, 5, groups=2)
        self.table = torch.nn.Embedding(7, 2)
        self.norm = torch.nn.LayerNorm((2, 3))
        self.look = torch.nn.MultiheadAttention(6, 2)
        self.memory = torch.nn.GRU(3, 5)
        self.pair = torch.nn.Bilinear(2, 3, 4)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return x


TORCH_FAN_IN = {
    "conv.weight": 2 * 15,
    "conv.bias": 1,
    "back.weight": 2 * 5,
    "back.bias": 1,
    "table.weight": 1,
    "norm.bias": 1,
    "look.in_proj_weight": 6,
    "look.in_proj_bias": 1,
    "look.out_proj.weight": 6,
    "look.out_proj.bias": 1,
    "memory.weight_ih_l0": 3,
    "memory.weight_hh_l0": 5,
    "memory.bias_ih_l0": 1,
    "memory.bias_hh_l0": 1,
    "pair.weight": 6,
    "pair.bias": 1,
    "scale": 1,
}


def test_fan_in_of_torch() -> None:
    found = scales(TorchLayers())
    # The factors of a normalisation have their mass about 1.
    assert found.pop("norm.weight") == ("Normal", 0.25)
    assert set(found) == set(TORCH_FAN_IN)
    for name, (family, scale) in found.items():
        assert (family, scale) == ("Normal", pytest.approx(TORCH_FAN_IN[name] ** -0.5)), name


def test_fan_in_of_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Layers(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.conv = nnx.Conv(4, 6, (3, 5), feature_group_count=2, rngs=rngs)
            self.back = nnx.ConvTranspose(4, 6, (5,), rngs=rngs)
            self.turned = nnx.ConvTranspose(4, 6, (5,), transpose_kernel=True, rngs=rngs)
            self.table = nnx.Embed(7, 2, rngs=rngs)
            self.norm = nnx.LayerNorm(6, rngs=rngs)
            self.look = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
            self.own = nnx.Param(np.ones((2, 3, 4), np.float32))

        def __call__(self, x: Any) -> Any:
            return x

    # Shapes are enough, where nothing is held.
    found = scales(nnx.eval_shape(lambda: Layers(nnx.Rngs(0))))
    assert found.pop("norm.scale") == ("Normal", 0.25)
    wanted = {
        "conv.kernel": 2 * 15,
        "back.kernel": 4 * 5,
        "turned.kernel": 4 * 5,
        "table.embedding": 1,
        "own": 6,
    }
    wanted |= {f"look.{part}.kernel": 6 for part in ("query", "key", "value", "out")}
    wanted |= {name: 1 for name in found if name.endswith("bias")}
    assert set(found) == set(wanted)
    for name, (_, scale) in found.items():
        assert scale == pytest.approx(wanted[name] ** -0.5), name


def test_fan_in_of_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    jax = pytest.importorskip("jax")
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 9))

    class Layers(eqx.Module):
        conv: Any
        back: Any
        table: Any
        norm: Any
        memory: Any
        both: tuple[Any, ...]

        def __init__(self) -> None:
            self.conv = eqx.nn.Conv2d(4, 6, (3, 5), groups=2, key=next(keys))
            self.back = eqx.nn.ConvTranspose1d(4, 6, 5, groups=2, key=next(keys))
            self.table = eqx.nn.Embedding(7, 2, key=next(keys))
            self.norm = eqx.nn.LayerNorm((2, 3))
            self.memory = eqx.nn.GRUCell(3, 5, key=next(keys))
            self.both = (eqx.nn.Linear(3, 2, key=next(keys)), jax.nn.relu)

        def __call__(self, x: Any) -> Any:
            return x

    found = scales(eqx.filter_eval_shape(Layers))
    assert found.pop("norm.weight") == ("Normal", 0.25)
    wanted = {"conv.weight": 2 * 15, "back.weight": 2 * 5, "table.weight": 1, "both.0.weight": 3}
    wanted |= {"memory.weight_ih": 3, "memory.weight_hh": 5, "memory.bias_n": 1}
    wanted |= {name: 1 for name in found if name.endswith("bias")}
    assert set(found) == set(wanted)
    for name, (_, scale) in found.items():
        assert scale == pytest.approx(wanted[name] ** -0.5), name


def test_priors_by_name_by_pattern_and_by_function() -> None:
    network = torch_mlp()
    one = scales(network, prior=priors.Laplace(0.0, 2.0))
    assert list(one) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert set(one.values()) == {("Laplace", 2.0)}
    # A name goes before patterns wherever it stands, and the first pattern that fits serves.
    given = {"*.bias": priors.Normal(0.0, 3.0), "2.*": priors.Normal(0.0, 4.0), "*": FAN_IN}
    named = scales(network, prior={**given, "2.bias": priors.StudentT(scale=5.0)})
    assert named == {
        "0.weight": ("Normal", pytest.approx(FEATURES**-0.5)),
        "0.bias": ("Normal", 3.0),
        "2.weight": ("Normal", 4.0),
        "2.bias": ("StudentT", 5.0),
    }
    met = []

    def by_function(name: str, shape: tuple[int, ...]) -> Any:
        met.append((name, shape))
        return priors.Normal(0.0, float(len(shape)))

    assert set(scales(network, prior=by_function).values()) == {("Normal", 1.0), ("Normal", 2.0)}
    assert met == [("0.weight", (4, 3)), ("0.bias", (4,)), ("2.weight", (1, 4)), ("2.bias", (1,))]
    # A function of three arguments is a prior itself.
    own = scales(network, prior=lambda name, shape, fan_in: priors.Normal(0.0, 0.1 * fan_in)(name, shape, 1))
    assert own["0.weight"] == ("Normal", pytest.approx(0.3))
    assert scales(network, prior=FAN_IN, fan_in={"0.*": 16})["0.weight"] == ("Normal", 0.25)
    assert scales(network, prior=FAN_IN, fan_in={"0.*": 16})["2.weight"] == ("Normal", 0.5)
    by_shape = scales(network, prior=FAN_IN, fan_in=lambda name, shape: shape[0])
    assert by_shape["0.weight"] == ("Normal", 0.5)


def test_a_scale_of_its_own_for_a_parameter() -> None:
    found = asked(lambda: bnn.module("net", X, torch_mlp(), {"*.weight": priors.Hierarchical(), "*": FAN_IN}))
    assert list(found) == [
        "net.0.weight.scale",
        "net.0.weight.base",
        "net.0.bias",
        "net.2.weight.scale",
        "net.2.weight.base",
        "net.2.bias",
    ]


@pytest.mark.parametrize(
    ("prior", "error", "says"),
    [
        (
            {"0.wieght": FAN_IN, "*": FAN_IN},
            UnknownNameError,
            "'0.wieght': did you mean '0.weight'.*known: 0.bias",
        ),
        ({"3.*": FAN_IN, "*": FAN_IN}, UnknownNameError, r"parameter in prior of module\('net'\) '3.\*'"),
        (
            {"*.weight": FAN_IN},
            ModelError,
            r"0.weight, 0.bias.*got none for '0.bias' \(the nearest is '\*.weight'",
        ),
        ({}, ModelError, "got none for '0.weight';"),
        (
            {"*": FAN_IN, "*.bias": FAN_IN},
            ModelError,
            r"'\*.bias', after '\*' has served '0.bias'; try the narrower",
        ),
        (
            {"*": dist.Normal(0.0, 1.0)},
            ModelError,
            "a prior of '0.weight', or None to hold it; got Distribution",
        ),
        ({"*": priors.Normal}, ModelError, "got the class Normal; try bnn.priors.Normal"),
        (priors.Normal, ModelError, "got the class Normal; try bnn.priors.Normal"),
        ("fan_in", ModelError, "a prior of '0.weight', or None to hold it; got 'fan_in'"),
        (lambda name, shape: 1.0, ModelError, "got 1.0"),
        (
            priors.Hierarchical(per="unit"),
            ModelError,
            r"axes \(4, 3\) are not \(..., inputs, outputs\).*per='tensor'",
        ),
        (priors.MatrixNormal(), ModelError, "a prior of '0.weight' that treats all its weights alike"),
        (
            lambda name, shape, fan_in: np.zeros(2),
            ModelError,
            r"'0.weight' of shape \(4, 3\).*got shape \(2,\)",
        ),
    ],
)
def test_priors_that_do_not_fit(prior: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        asked(lambda: bnn.module("net", X, torch_mlp(), prior))


def test_a_fan_in_that_does_not_fit() -> None:
    for fan_in, says in (
        ({"0.weight": 0}, "positive whole number as fan_in of '0.weight'"),
        (3, "a dict of names"),
    ):
        with pytest.raises(ModelError, match=says):
            asked(lambda given=fan_in: bnn.module("net", X, torch_mlp(), FAN_IN, fan_in=given))
    with pytest.raises(UnknownNameError, match=r"did you mean '0\.weight'"):
        asked(lambda: bnn.module("net", X, torch_mlp(), FAN_IN, fan_in={"0.weights": 1}))


def test_priors_by_unit_serve_the_layout_of_flax() -> None:
    found = asked(lambda: bnn.module("net", X, nnx_mlp(), priors.Hierarchical(per="unit")))
    assert found["net.layers.0.kernel.scale"].shape == (WIDTH,)


# --- points and constants ---------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_points_begin_at_the_values_of_the_module(framework: str) -> None:
    ppl, build, layers, leaf, _ = FRAMEWORKS[framework]
    network = build()
    model = module_model(network, {f"{layers[0]}.*": priors.Point(), "*": FAN_IN})
    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        xs, ys = chosen.asarray(X), chosen.asarray(Y)
        program = Program.of(chosen, model, xs, ys, language=True)
        assert [site.name for site in program.params] == [
            name for name in program.sites if name.startswith(f"net.{layers[0]}.")
        ]
        draws = program.prior_draws(xs, ys, 0, 2)
    own = own_values(network)
    for name in (f"{layers[0]}.{leaf}", f"{layers[0]}.bias"):
        for draw in draws[f"net.{name}"]:
            np.testing.assert_array_equal(draw, own[name])


def own_values(network: Any) -> dict[str, np.ndarray]:
    """The parameters of a module by name, in float64."""
    framework = modules._framework("test", network)
    return {
        each.name: np.array(framework.number(each.own), np.float64)
        for each in framework.parameters("test", network)
    }


def test_a_network_that_is_bayesian_in_part_is_fitted_and_left_as_it_was() -> None:
    x, y = regression_data(40, FEATURES)
    # In the type of the fit already, so that nothing is converted on the way.
    network = torch_mlp(dtype=torch.float64)
    before = copy.deepcopy(network.state_dict())
    prior = {"0.weight": priors.Point(), "0.bias": None, "*": FAN_IN}
    posterior = bnn.fit(
        module_model(network, prior), x, y, bnn.SVI(ppl="pyro", steps=150, elbo_draws=10), seed=0
    )
    predicted = posterior.predict(x[:4], draws=30)
    assert np.isfinite(predicted.mean).all()
    draws = posterior.draws
    assert set(draws) == {"noise", "net.0.weight", "net.2.weight", "net.2.bias"}
    # A point in every draw, which the fit has moved; the others spread.
    assert np.ptp(draws["net.0.weight"], axis=(0, 1)).max() == 0
    assert np.abs(draws["net.0.weight"][0, 0] - before["0.weight"].numpy()).max() > 1e-3
    assert np.ptp(draws["net.2.weight"], axis=(0, 1)).min() > 0
    after = network.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert network.training


def test_a_weight_of_bounded_norm_starts_at_the_value_of_the_module() -> None:
    network = torch_mlp(dtype=torch.float64)
    with torch.no_grad():
        network[0].weight.mul_(5.0)
    prior = {"*.weight": priors.SpectralNorm(priors.Point(), 0.9), "*.bias": priors.Point()}
    model = module_model(network, prior)
    method = bnn.MAP(ppl="pyro", steps=1, learning_rate=1e-9, polish=False)
    posterior = bnn.fit(model, X, Y, method, progress=False)
    start = network[0].weight.detach().numpy()
    np.testing.assert_allclose(posterior.draws["net.0.weight.base"][0, 0], start, atol=1e-6)
    divided = copy.deepcopy(network)
    with torch.no_grad():
        for layer in (divided[0], divided[2]):
            layer.weight.div_(max(1.0, np.linalg.norm(layer.weight, 2) / 0.9))
        expected = divided(torch.as_tensor(X))[:, 0]
    np.testing.assert_allclose(posterior.predict(X).mean, expected, atol=1e-6)


def test_a_kernel_of_torch_has_no_spectral_norm_here() -> None:
    """Its axes would make another matrix."""

    def model(x: Any, y: Any = None) -> None:
        f = bnn.module("conv", x[:, None], torch.nn.Conv1d(1, 2, 3), priors.SpectralNorm(FAN_IN))
        bnn.observe(y, f.mean((1, 2))[:, None], likelihoods.Gaussian(1.0))

    with pytest.raises(ModelError, match=r"treats all its weights alike.*got SpectralNorm"):
        bnn.fit(model, X, Y, bnn.MAP(ppl="pyro"), progress=False)


def test_many_draws_are_as_many_passes_of_torch() -> None:
    x, y = regression_data(30, FEATURES)
    network = torch_mlp(dtype=torch.float64)
    posterior = bnn.fit(module_model(network), x, y, bnn.SVI(ppl="pyro", steps=60, elbo_draws=10), seed=0)
    w = {name: value[0, :20] for name, value in posterior.draws.items() if name != "noise"}
    passes = []
    for index in range(20):
        given = {name.removeprefix("net."): torch.tensor(value[index]) for name, value in w.items()}
        passes.append(torch.func.functional_call(network, given, torch.tensor(x[:5])).detach().numpy())
    chosen = system("pyro")
    with chosen.session("float64", "cpu", 1):
        mapped = chosen.vmap(network_function(module_model(network)), in_axes=(0, None))
        tensors = {name: torch.tensor(value) for name, value in w.items()}
        found = mapped({**tensors, "noise": torch.ones(20)}, torch.tensor(x[:5]))
    np.testing.assert_allclose(found.detach().numpy(), np.stack(passes), rtol=0, atol=1e-13)


# --- state ------------------------------------------------------------------------------------------


class Mixing(torch.nn.Module):
    """A row minus the mean of all: rows meet, and nothing shows it but the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, 1)

    def forward(self, x: Any) -> Any:
        h = self.linear(x)
        return h - h.mean(0)


class Sequences(torch.nn.Module):
    """torch's default: the first axis is time."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.look = torch.nn.MultiheadAttention(2, 1, batch_first=batch_first)

    def forward(self, x: Any) -> Any:
        both = torch.stack([x, x**2], -1)
        return self.look(both, both, both, need_weights=False)[0].flatten(1)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.nn.GRU(1, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.memory(x[..., None])[0][:, -1]


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x)


class Replacing(Counting):
    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return self.linear(x)


class Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, 1)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.dropout(self.linear(x), 0.2, self.training)


class Pair(torch.nn.Module):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        return tuple(layer(x) for layer in self.layers)


def linear(*after: torch.nn.Module) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, WIDTH), *after)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: linear(torch.nn.Dropout(0.3)),
            "randomness of its own; got Dropout '1' in training, with p=0.3",
        ),
        (lambda: linear(torch.nn.AlphaDropout(0.3)), r"AlphaDropout '1'.*mode='eval'"),
        (Noisy, "draws random numbers"),
        (lambda: linear(torch.nn.BatchNorm1d(WIDTH)), r"BatchNorm1d '1' in training.*mode='eval'"),
        (
            lambda: linear(torch.nn.BatchNorm1d(WIDTH, track_running_stats=False)).eval(),
            "BatchNorm1d '1' without running statistics",
        ),
        (
            lambda: linear(spectral_norm(torch.nn.Linear(WIDTH, 1))),
            r"_SpectralNorm '1.* in training, which moves its vectors.*mode='eval'",
        ),
        (
            lambda: linear(torch.nn.utils.spectral_norm(torch.nn.Linear(WIDTH, 1))),
            r"Linear '1' with a spectral norm in training, which moves its vectors.*mode='eval'",
        ),
        (Mixing, "rows that do not interact; got Mixing, in which the output of a row depends on other rows"),
        (lambda: Sequences(False), "got Sequences, in which.*batch_first=True"),
        (
            Recurrent,
            "maps over draws; got Batching rule not implemented for aten::gru.*try bnn.gru or bnn.lstm",
        ),
        # In the type of the fit already, so that nothing is converted on the way.
        (lambda: Counting().double(), "leaves its buffers as they are; got changes of 'calls'"),
        (Replacing, "changes of 'calls'"),
        (lambda: torch.nn.LazyLinear(1), "'weight' with a shape; got a lazy layer"),
        (lambda: Pair(torch.nn.Linear(FEATURES, 1)), "one array from the module; got tuple"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(FEATURES, 1), torch.nn.Flatten(0)), None),
        (
            lambda: torch.nn.Sequential(linear(), torch.nn.Flatten(0)),
            r"an output with 6 rows.*got shape \(24,\)",
        ),
        (
            lambda: torch.nn.Linear(FEATURES + 1, 1),
            r"runs on inputs of shape \(6, 3\); got RuntimeError: .*mat1",
        ),
        (lambda: torch.nn.ModuleList([torch.nn.Linear(FEATURES, 1)]), "got NotImplementedError"),
        (lambda: torch.nn.Tanh(), "a module with parameters; got one without any"),
    ],
)
def test_what_is_no_function_of_rows_is_refused(build: Callable[[], Any], says: str | None) -> None:
    network = build()
    values = asked_values(network)
    state = copy.deepcopy(network.state_dict()) if says != "'weight' with a shape; got a lazy layer" else {}

    def run() -> Any:
        with system("pyro").session("float64", "cpu", 1), Substitute(values):
            return bnn.module("net", torch.tensor(X), network)

    if says is None:
        # One number for each row, with no second axis, is an output; `observe` asks for the axis.
        assert tuple(run().shape) == (ROWS,)
        return
    with pytest.raises((ModelError, UnsupportedError), match=says):
        run()
    assert all(torch.equal(network.state_dict()[name], value) for name, value in state.items())


def asked_values(network: Any) -> dict[str, Any]:
    return {
        f"net.{name}": torch.ones(tuple(value.shape), dtype=torch.float64) * 0.3
        for name, value in network.named_parameters()
        if type(value).__name__ != "UninitializedParameter"
    }


def test_evaluation_is_the_forward_pass_of_torch() -> None:
    network = linear(torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.5), Sequences(True), Noisy2())
    with torch.no_grad():
        for _ in range(3):
            network(torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(0)))
    network = network.eval()
    x = torch.tensor(X)
    expected = copy.deepcopy(network).double()(x).detach()
    with system("pyro").session("float64", "cpu", 1):
        w = {f"net.{name}": value.detach().double() for name, value in network.named_parameters()}
        with Substitute(w):
            found = bnn.module("net", x, network)
        # Mapped over draws, with derivatives: the running statistics are constants there too.
        several = {name: torch.stack([value, 2 * value]) for name, value in w.items()}

        def of(w: Any) -> Any:
            with Substitute(w):
                return bnn.module("net", x, network)

        mapped = torch.func.vmap(of)(several)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.detach(), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(mapped[0].detach(), expected, rtol=0, atol=1e-12)
    assert network[1].running_mean.dtype == torch.float32


class Noisy2(torch.nn.Module):
    """Dropout by function, of the last two numbers."""

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.2, self.training)


def test_attention_of_torch_is_mapped_and_has_derivatives_both_ways() -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    network = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.tensor(np.random.default_rng(0).normal(size=(ROWS, 5, 4)))
    rng = np.random.default_rng(1)
    with system("pyro").session("float64", "cpu", 1):
        w = {f"net.{name}": value.detach().double() for name, value in network.named_parameters()}
        way = {name: torch.tensor(rng.normal(size=value.shape)) for name, value in w.items()}

        def of(w: Any) -> Any:
            with Substitute(w):
                return bnn.module("net", x, network)

        mapped = torch.func.vmap(of)({name: torch.stack([value, 2 * value]) for name, value in w.items()})
        value, tangent = torch.func.jvp(of, (w,), (way,))
        _, pullback = torch.func.vjp(of, w)
        gradient = pullback(torch.ones_like(value))[0]
    # With its fused operations, which it has for itself.
    expected = copy.deepcopy(network).double()(x)
    np.testing.assert_allclose(value.detach(), expected.detach(), rtol=0, atol=1e-13)
    np.testing.assert_allclose(mapped[0].detach(), expected.detach(), rtol=0, atol=1e-13)
    product = sum(float((gradient[name] * way[name]).sum()) for name in w)
    assert float(tangent.sum()) == pytest.approx(product, rel=1e-9)


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.LayerNorm(WIDTH),
        torch.nn.LayerNorm(WIDTH, bias=False),
        torch.nn.GroupNorm(2, WIDTH),
        torch.nn.BatchNorm1d(WIDTH),
    ],
    ids=["layer", "no bias", "group", "batch"],
)
def test_a_normalisation_that_is_held_is_recorded_with_its_forward_derivative(norm: Any) -> None:
    """torch has no record of that derivative where the weights are constants."""
    network = linear(copy.deepcopy(norm), torch.nn.Tanh()).double().eval()
    with torch.no_grad():
        for name, own in network.named_parameters():
            own.copy_(torch.tensor(values_of({name: tuple(own.shape)})[name]))
    chosen = system("pyro")
    with chosen.session("float64", "cpu", 1):
        w = {f"net.0.{name}": value.detach().clone() for name, value in network[0].named_parameters()}
        way = {name: torch.ones_like(value) for name, value in w.items()}

        def tangent(w: Any, way: Any) -> Any:
            def run(w: Any) -> Any:
                with Substitute(w):
                    return bnn.module("net", torch.tensor(X), network, {"0.*": FAN_IN, "*": None})

            return chosen.jvp(run, w, way)

        value, found = tangent(w, way)
        record = pyro_recording.record(tangent, *tree_flatten((w, way)))
        leaves = [*w.values(), *way.values()]
        again = record.module.forward(*leaves, *record.held)
        expected = network(torch.tensor(X))
        step = 1e-6
        with torch.no_grad():
            for own in network[0].parameters():
                own += step
        difference = (network(torch.tensor(X)) - expected) / step
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found, difference.detach(), rtol=1e-4, atol=1e-4)
    for one, two in zip((value, found), again, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-12)


def test_evaluation_on_request_leaves_the_module_in_training() -> None:
    """What is trained on, loaded or exchanged is seen, and what is known of the module goes away with it."""
    network = linear(torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.5))
    number = id(network)

    def agree(network: Any) -> None:
        expected = copy.deepcopy(network).double().eval()(torch.tensor(X)).detach()
        w = {f"net.{name}": value.detach().double() for name, value in network.named_parameters()}
        with system("pyro").session("float64", "cpu", 1), Substitute(w):
            found = bnn.module("net", torch.tensor(X), network, mode="eval")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)

    agree(network)
    with torch.no_grad():
        network(torch.randn(20, FEATURES))
        network[0].weight *= 2.0
    agree(network)
    network[0].weight = torch.nn.Parameter(torch.ones_like(network[0].weight))
    agree(network)
    # Parts that have no arrays are seen as well.
    network[-1] = torch.nn.Tanh()
    agree(network)
    assert all(part.training for part in network.modules())
    with pytest.raises(ModelError, match="mode=None or 'eval'"):
        bnn.module("net", X, network, mode="train")
    assert calls._NOTES[number]
    del network
    gc.collect()
    assert number not in calls._NOTES


def in_evaluation(network: Any, x: np.ndarray = X) -> Any:
    with Substitute({f"net.{name}": value for name, value in own_values(network).items()}):
        return bnn.module("net", x, network, mode="eval")


class Merging(torch.nn.Linear):
    """A layer that changes its weights when its mode is set, as layers with merged adapters do."""

    def train(self, mode: bool = True) -> Any:
        self.weight.data *= 2.0
        return super().train(mode)


def test_evaluation_on_request_changes_no_weights_and_ends_with_an_error() -> None:
    layer = Merging(FEATURES, WIDTH)
    network = torch.nn.Sequential(layer, torch.nn.Dropout(0.5))
    before = layer.weight.detach().clone()
    in_evaluation(network)
    assert torch.equal(layer.weight, before)
    with pytest.raises(ModelError, match="runs on inputs of shape"):
        in_evaluation(network, X[:, :1])
    assert all(part.training for part in network.modules())


def test_evaluation_on_request_in_two_threads_ends_in_training() -> None:
    """Without a lock, the first thread would end, and turn training on again, while the second is in the module."""
    first_is_in, second_is_in, first_ends = threading.Event(), threading.Event(), threading.Event()

    class Slow(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            if first_is_in.is_set():
                second_is_in.set()
                first_ends.wait(0.5)
            else:
                first_is_in.set()
                second_is_in.wait(0.5)
            assert not self.training
            return super().forward(x)

    network = Slow(FEATURES, WIDTH)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(in_evaluation, network)
        first.add_done_callback(lambda _: first_ends.set())
        assert first_is_in.wait(5.0)
        second = pool.submit(in_evaluation, network)
        np.testing.assert_array_equal(first.result(), second.result())
    assert network.training


class Attention(torch.nn.Module):
    """Three positions of two numbers each; `kind` names the mask, whose arguments are given by name or by place."""

    def __init__(self, kind: str = "none", by_name: bool = True) -> None:
        super().__init__()
        self.key, self.kind, self.by_name = torch.nn.Linear(2, 2), kind, by_name

    def forward(self, x: Any) -> Any:
        h = x.reshape(ROWS, 3, 2)
        seen = torch.ones(ROWS, 3, 3, dtype=torch.bool)
        seen[:, 0, 1:], seen[:, 2] = False, False
        mask = {"booleans": seen, "numbers": seen.double().to(x.dtype)}.get(self.kind)
        causal, attend = self.kind == "causal", torch.nn.functional.scaled_dot_product_attention
        named = {"attn_mask": mask, "is_causal": causal}
        given = (h, self.key(h), h)
        found = attend(*given, **named) if self.by_name else attend(*given, mask, 0.0, causal)
        return found.reshape(ROWS, 6)


@pytest.mark.parametrize("kind", ["none", "booleans", "numbers", "causal"])
@pytest.mark.parametrize("by_name", [True, False])
def test_attention_has_the_masks_of_torch(kind: str, by_name: bool) -> None:
    """A mask of booleans says which keys are seen; a row that sees none is zero."""
    network, x = Attention(kind, by_name).double(), np.random.default_rng(1).normal(size=(ROWS, 6))
    expected = network(torch.tensor(x)).detach()
    w = {f"net.{name}": value.detach() for name, value in network.named_parameters()}

    def of(w: Any) -> Any:
        with Substitute(w):
            return bnn.module("net", torch.tensor(x), network)

    with system("pyro").session("float64", "cpu", 1):
        mapped = torch.func.vmap(of)({name: value[None] for name, value in w.items()})[0]
        for found in (of(w).numpy(), mapped.numpy()):
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)
            assert (kind == "booleans") == bool(np.all(found[:, 4:] == 0.0))


def test_attention_is_fused_where_it_has_its_derivatives() -> None:
    """Values and gradients take torch's fused attention, other derivatives its plain operations, with equal results."""

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        """The names of the operations that torch computes."""

        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(str(function))
            return function(*args, **(kwargs or {}))

        @property
        def fused(self) -> bool:
            return any("flash_attention" in name for name in self.names)

    network, x = Attention().double(), np.random.default_rng(1).normal(size=(ROWS, 6))
    w = {f"net.{name}": value.detach() for name, value in network.named_parameters()}

    def loss(w: Any) -> Any:
        with Substitute(w):
            return (bnn.module("net", torch.tensor(x), network) ** 2).sum()

    def of_autograd() -> dict[str, Any]:
        leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
        return dict(zip(w, torch.autograd.grad(loss(leaves), leaves.values()), strict=True))

    def of_mapped() -> dict[str, Any]:
        found = torch.func.vmap(torch.func.grad(loss))({name: value[None] for name, value in w.items()})
        return {name: value[0] for name, value in found.items()}

    cases = {
        "autograd": (of_autograd, True),
        "torch.func": (lambda: torch.func.grad(loss)(w), True),
        "mapped": (of_mapped, False),
        "forward": (lambda: torch.func.jacfwd(loss)(w), False),
    }
    gradients = {}
    with system("pyro").session("float64", "cpu", 1):
        for name, (gradient, fused) in cases.items():
            with Seen() as seen:
                gradients[name] = gradient()
            assert seen.fused == fused, name
        hessian = torch.func.jacfwd(torch.func.grad(loss))(w)["net.key.weight"]["net.key.weight"]
        twice = torch.func.grad(lambda w: (torch.func.grad(loss)(w)["net.key.weight"] ** 2).sum())(w)
    for found in gradients.values():
        for name, value in gradients["autograd"].items():
            np.testing.assert_allclose(found[name].numpy(), value.numpy(), rtol=1e-10, atol=1e-13)
    product = 2.0 * (hessian * gradients["autograd"]["net.key.weight"][..., None, None]).sum((0, 1))
    np.testing.assert_allclose(twice["net.key.weight"].numpy(), product.numpy(), rtol=1e-9, atol=1e-12)


def test_a_module_in_training_again_is_looked_at_again() -> None:
    network = Noisy().eval()
    values = asked_values(network)
    with system("pyro").session("float64", "cpu", 1), Substitute(values):
        bnn.module("net", torch.tensor(X), network)
        network.train()
        with pytest.raises(ModelError, match="draws random numbers"):
            bnn.module("net", torch.tensor(X), network)


def test_a_module_whose_mode_changed_after_the_fit_still_predicts() -> None:
    """It is looked at again, in the middle of what torch differentiates and maps."""
    network = torch_mlp()
    posterior = bnn.fit(module_model(network), X, Y, bnn.Laplace(ppl="pyro", steps=20, polish=False))
    assert network.training
    before = posterior.predict(X)
    network.eval()
    after = posterior.predict(X)
    np.testing.assert_array_equal(after.mean, before.mean)
    np.testing.assert_array_equal(after.std, before.std)


def test_what_is_known_of_a_module_is_forgotten_with_it() -> None:
    network = torch_mlp()
    number = id(network)
    with system("pyro").session("float64", "cpu", 1), Substitute(asked_values(network)):
        bnn.module("net", torch.tensor(X), network)
    assert number in calls._NOTES
    del network
    gc.collect()
    assert number not in calls._NOTES


def nnx_with(part: Callable[[Any, Any], Any]) -> Any:
    """A linear layer, and something after it."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.linear = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
            self.after = part(nnx, rngs)

        def __call__(self, x: Any) -> Any:
            return self.after(self.linear(x))

    return Net(nnx.Rngs(0))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (lambda nnx, rngs: nnx.Dropout(0.3, rngs=rngs), r"changes of 'after.rngs.count'; try mode='eval'"),
        (lambda nnx, rngs: nnx.BatchNorm(WIDTH, rngs=rngs), "changes of 'after.mean', 'after.var'"),
        (
            lambda nnx, rngs: lambda h: h - h.mean(0),
            "got Net, in which the output of a row depends on other rows",
        ),
        (
            lambda nnx, rngs: nnx.Linear(WIDTH, 1, dtype=np.float32, rngs=rngs),
            "in the floating type of its parameters, float64; got an output in float32",
        ),
        (lambda nnx, rngs: nnx.Linear(WIDTH + 1, 1, rngs=rngs), r"inputs of shape \(6, 3\); got TypeError"),
        (lambda nnx, rngs: lambda h: (h, h), "one array from the module; got tuple"),
    ],
)
def test_what_is_no_function_of_rows_is_refused_in_nnx(part: Any, says: str) -> None:
    jax = pytest.importorskip("jax")
    network = nnx_with(part)
    before = own_values(network)
    chosen = system("numpyro")
    with chosen.session("float64", "cpu", 1):
        values = {f"net.{name}": chosen.asarray(value) for name, value in before.items()}

        def run(values: Any, x: Any) -> Any:
            with Substitute(values):
                return bnn.module("net", x, network)

        with pytest.raises(ModelError, match=says):
            jax.eval_shape(run, values, chosen.asarray(X))
    for name, value in own_values(network).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("mode", [None, "eval"])
@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_evaluation_passes_in_jax(framework: str, mode: str | None) -> None:
    jax = pytest.importorskip("jax")
    chosen = system("numpyro")
    if framework == "nnx":
        nnx = pytest.importorskip("flax.nnx")
        network = nnx_with(
            lambda nnx, rngs: nnx.Sequential(nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        )
        network(np.random.default_rng(0).normal(size=(30, FEATURES)).astype(np.float32))
        if mode is None:
            network.eval()
        mean, variance = (
            np.asarray(network.after.layers[0].mean[...], np.float64),
            np.asarray(network.after.layers[0].var[...], np.float64),
        )
        kernel, bias = "linear.kernel", "linear.bias"
        assert isinstance(network, nnx.Module)
    else:
        eqx = pytest.importorskip("equinox")
        parts = [eqx.nn.Linear(FEATURES, WIDTH, key=jax.random.PRNGKey(0)), eqx.nn.Dropout(0.5)]
        network = eqx.nn.Sequential(parts)
        if mode is None:
            network = eqx.nn.inference_mode(network)
        mean, variance = np.zeros(WIDTH), np.ones(WIDTH) - 1e-5
        kernel, bias = "layers.0.weight", "layers.0.bias"
    own = own_values(network)
    with chosen.session("float64", "cpu", 1):
        values = {f"net.{name}": chosen.asarray(value) for name, value in own.items()}

        def run(values: Any, x: Any) -> Any:
            with Substitute(values):
                return bnn.module("net", x, network, mode=mode)

        found = chosen.to_numpy(chosen.compile(run)(values, chosen.asarray(X)))
    matrix = own[kernel] if framework == "nnx" else own[kernel].T
    np.testing.assert_allclose(found, (X @ matrix + own[bias] - mean) / np.sqrt(variance + 1e-5), rtol=1e-10)
    assert calls._NOTES[id(network)]


def test_a_recurrence_of_nnx_begins_in_the_type_of_the_fit() -> None:
    nnx = pytest.importorskip("flax.nnx")
    jax = pytest.importorskip("jax")

    class Net(nnx.Module):
        def __init__(self, kind: Any) -> None:
            rngs = nnx.Rngs(0)
            self.table = nnx.Embed(3, 2, param_dtype=kind, rngs=rngs)
            self.memory = nnx.RNN(nnx.GRUCell(2, 2, param_dtype=kind, rngs=rngs), rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.memory(self.table(x))[:, -1]

    network, tokens = Net(np.float32), np.arange(8).reshape(2, 4) % 3
    own = own_values(network)
    chosen = system("numpyro")
    with chosen.session("float64", "cpu", 1):
        reference = Net(np.float64)
        wide = jax.tree_util.tree_map(
            lambda leaf: jax.numpy.asarray(leaf, float), nnx.state(network, nnx.Param)
        )
        nnx.update(reference, wide)
        expected = np.asarray(reference(tokens))
        with Substitute({f"net.{name}": chosen.asarray(value) for name, value in own.items()}):
            found = bnn.module("net", chosen.asarray(tokens), network)
    assert network.memory.cell.param_dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def test_what_is_random_or_has_a_state_is_refused_in_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    jax = pytest.importorskip("jax")
    line = eqx.nn.Linear(FEATURES, WIDTH, key=jax.random.PRNGKey(0))
    for part, says in (
        (eqx.nn.Dropout(0.5), "Dropout 'layers.1' in training, with p=0.5; try mode='eval'"),
        (eqx.nn.BatchNorm(WIDTH, "batch", mode="batch"), "a module without state.*StateIndex at 'layers.1."),
    ):
        with pytest.raises(ModelError, match=says):
            asked(lambda part=part: bnn.module("net", X, eqx.nn.Sequential([line, part])))


# --- the other system, and what is no module --------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_other_system_is_refused_before_anything_is_compiled(framework: str) -> None:
    ppl, build, *_ = FRAMEWORKS[framework]
    other = "numpyro" if ppl == "pyro" else "pyro"
    network = build()
    says = rf"module\('net'\): expected ppl='{ppl}', the system of .*{type(network).__name__} in a model that runs on"

    def first(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.module("net", x, network), likelihoods.Gaussian(0.5))

    for model in (module_model(network), first):
        with pytest.raises(UnsupportedError, match=says):
            bnn.fit(model, X, Y, bnn.MAP(ppl=other))
    # Inputs that are constants of the model: the drawn parameters tell.
    constant = with_noise(lambda x: bnn.module("net", X, network))
    with pytest.raises(UnsupportedError, match=says):
        bnn.fit(constant, X, Y, bnn.MAP(ppl=other))


def test_what_is_no_module() -> None:
    linen = pytest.importorskip("flax.linen")
    from pyro.nn import PyroModule

    for network, says in (
        (torch.nn.Linear, r"got the class Linear; try Linear\(...\), made outside of the model"),
        (np.tanh, "a torch.nn.Module, a flax.nnx.Module or an equinox.Module; got <ufunc 'tanh'>"),
        (PyroModule[torch.nn.Linear](2, 1), "got a PyroModule; try the plain torch module"),
        (linen.Dense(1), "got Dense, a module of flax.linen; try flax.nnx.bridge.ToNNX"),
    ):
        with pytest.raises(ModelError, match=says):
            asked(lambda network=network: bnn.module("net", X, network))


def test_a_linen_module_through_the_bridge() -> None:
    nnx = pytest.importorskip("flax.nnx")
    linen = pytest.importorskip("flax.linen")
    network = nnx.bridge.ToNNX(linen.Dense(2), rngs=nnx.Rngs(0)).lazy_init(X[:1].astype(np.float32))
    found = scales(network)
    assert {name: round(scale**-2) for name, (_, scale) in found.items()} == {"kernel": FEATURES, "bias": 1}


def test_inputs_that_do_not_fit() -> None:
    network = torch_mlp()
    for x, says in (
        (np.float64(1.0), r"one first axis, that of the rows; got lengths \[None\]"),
        ({"a": X, "b": X[:2]}, r"got lengths \[6, 2\]"),
        (None, "got no array"),
    ):
        with pytest.raises(ModelError, match=says):
            asked(lambda x=x: bnn.module("net", x, network))


class Several(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 2)
        self.linear = torch.nn.Linear(FEATURES + 2, 1)

    def forward(self, kinds: Any, more: Any) -> Any:
        return self.linear(torch.cat([self.table(kinds), more["x"]], -1))


def test_several_inputs_and_whole_numbers() -> None:
    network = Several().double()
    kinds = np.arange(ROWS) % 3

    def model(x: Any, y: Any = None) -> None:
        f = bnn.module("net", (x["kind"], {"x": x["x"]}), network)
        bnn.observe(y, f, likelihoods.Gaussian(0.5))

    expected = network(torch.tensor(kinds), {"x": torch.tensor(X)}).detach().numpy()
    w = {f"net.{name}": value.detach().numpy() for name, value in network.named_parameters()}
    np.testing.assert_allclose(network_function(model)(w, {"kind": kinds, "x": X}), expected, rtol=1e-12)
    value, *_ = log_joint_and_predictor("pyro", model, {"kind": kinds, "x": X}, Y)
    assert np.isfinite(value)
    # All of it held, on whole numbers alone: the floating type is that of the session.
    with system("pyro").session("float64", "cpu", 1):
        held = bnn_module_alone(torch.nn.Embedding(3, 2), torch.tensor(kinds))
    assert held.dtype == torch.float64


def bnn_module_alone(network: Any, x: Any) -> Any:
    """Without any site, but in an interpretation."""
    with Substitute({}):
        return bnn.module("net", x, network, {"*": None})


def test_rows_that_interact_say_so() -> None:
    model = module_model(Mixing(), coupled=True)
    chosen = system("pyro")
    with chosen.session("float64", "cpu", 1):
        program = Program.of(chosen, model, chosen.asarray(X), chosen.asarray(Y), language=True)
    assert program.coupled
    posterior = bnn.fit(model, X, Y, bnn.MAP(ppl="pyro", steps=20), seed=0)
    assert abs(posterior.predict(X).mean.mean()) < 1e-10
    with pytest.raises(UnsupportedError, match="rows that do not interact"):
        bnn.fit(model, X, Y, bnn.Laplace(ppl="pyro", steps=20))


def test_rows_that_interact_come_together_to_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    jnp = pytest.importorskip("jax.numpy")

    class Averaged(eqx.Module):
        weight: Any

        def __call__(self, x: Any) -> Any:
            return (x - x.mean(0)) @ self.weight

    network = Averaged(jnp.ones((FEATURES, 1)))
    with Substitute({"net.weight": np.ones((FEATURES, 1))}):
        together = bnn.module("net", X, network, coupled=True)
        apart = bnn.module("net", X, network)
    np.testing.assert_allclose(together, (X - X.mean(0)) @ np.ones((FEATURES, 1)), rtol=1e-12, atol=1e-12)
    # A row by itself loses the mean of its own features.
    np.testing.assert_allclose(apart, np.zeros((ROWS, 1)), rtol=0, atol=1e-12)


# --- what the interpretations see -------------------------------------------------------------------


def problem_of(model: Any, ppl: str, x: np.ndarray, y: np.ndarray, chosen: Any) -> Problem:
    xs, ys = chosen.asarray(x), chosen.asarray(y)
    return Problem(Program.of(chosen, model, xs, ys, language=True), xs, ys, x, y, 0, "cpu", "float64")


def test_curvatures_are_exact_in_every_structure() -> None:
    network = torch_mlp(dtype=torch.float64)
    theirs = renamed("torch")
    chosen = system("pyro")
    rng = np.random.default_rng(1)
    with chosen.session("float64", "cpu", 1):
        ours = problem_of(with_noise(in_the_language), "pyro", X, Y, chosen)
        u = {n: 0.5 * rng.normal(size=s.unconstrained_shape) for n, s in ours.program.sites.items()}
        module = problem_of(module_model(network), "pyro", X, Y, chosen)
        same = {"noise": u["noise"]} | {
            site: u[name].T if turned else u[name] for site, (name, turned) in theirs.items()
        }
        expected = data_curvature(ours, u)[0].matrix()
        found = data_curvature(module, same)[0].matrix()
        order = permutation(ours.program, module.program, theirs)
        np.testing.assert_allclose(found, expected[np.ix_(order, order)], rtol=1e-9, atol=1e-12)
        diagonal = data_curvature(module, same, structure="diag")[0].matrix()
        np.testing.assert_allclose(diagonal, np.diag(np.diag(found)), rtol=1e-9, atol=1e-12)
        # Kronecker factors are of maps: what no map is seen of has its exact block.
        blocks = data_curvature(module, same, structure="kron")[0].matrix()
        start = 0
        wanted = np.zeros_like(found)
        for site in module.program.sites.values():
            at = slice(start, start + site.size)
            wanted[at, at] = found[at, at]
            start += site.size
        np.testing.assert_allclose(blocks, wanted, rtol=1e-9, atol=1e-12)


def permutation(ours: Program, module: Program, theirs: dict[str, tuple[str, bool]]) -> np.ndarray:
    """For each coordinate of the module its place among those of the network in the language."""
    places, start = {}, 0
    for site in ours.sites.values():
        places[site.name] = np.arange(start, start + site.size).reshape(site.shape)
        start += site.size
    found = []
    for name in module.sites:
        ours_name, turned = theirs.get(name, (name, False))
        found.append((places[ours_name].T if turned else places[ours_name]).ravel())
    return np.concatenate(found)


def test_what_cannot_look_inside_says_so() -> None:
    x, y = regression_data(20, FEATURES)
    network = torch_mlp()
    alone = module_model(network)
    before = with_noise(lambda x: bnn.module("net", bnn.dense("first", x, FEATURES), network))
    for model, method, error, says in (
        (
            alone,
            bnn.SVI(ppl="pyro", estimator="local", guide="normal"),
            UnsupportedError,
            "none that can be seen: a module.*estimator='plain'",
        ),
        (alone, bnn.SVI(ppl="pyro", estimator="flipout"), UnsupportedError, "weights of linear maps"),
        (before, bnn.MCDropout(ppl="pyro"), UnsupportedError, "layer 'net'.*got one that is computed"),
        (
            alone,
            bnn.Laplace(ppl="pyro", weights="last_layer", steps=5),
            BNNError,
            "a linear map whose weight is a site",
        ),
    ):
        with pytest.raises(error, match=says):
            bnn.fit(model, x, y, method, seed=0)


def test_blocks_that_do_not_fit_into_memory_are_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a memory that holds three copies of the largest block of the module, and so all of those of linear maps."""
    x, y = regression_data(20, FEATURES)
    size = FEATURES * WIDTH
    monkeypatch.setattr(curvature, "machine_memory", lambda: 3 * 8 * size**2)
    method = bnn.Laplace(ppl="pyro", structure="kron", steps=30, polish=False)
    assert bnn.fit(with_noise(in_the_language), x, y, method, seed=0).info.figures["log_evidence"] < 0.0

    def trained(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("it was trained")

    monkeypatch.setattr(fit, "find_mode", trained)
    says = (
        rf"'net\.0\.weight'.*dense block of {size} x {size} numbers.*GB in all.*structure='diag' or 'lowrank'"
    )
    with pytest.raises(UnsupportedError, match=says):
        bnn.fit(module_model(torch_mlp()), x, y, method, seed=0)
    # What is left out of the Gaussian has no block.
    some = bnn.Laplace(ppl="pyro", structure="kron", weights=("net.2",))
    with pytest.raises(AssertionError, match="it was trained"):
        bnn.fit(module_model(torch_mlp()), x, y, some, seed=0)
    # By the function alone, too, at a mode that somebody has.
    chosen = system("pyro")
    with chosen.session("float64", "cpu", 1):
        module = problem_of(module_model(torch_mlp()), "pyro", X, Y, chosen)
        u = {name: np.zeros(site.unconstrained_shape) for name, site in module.program.sites.items()}
        with pytest.raises(UnsupportedError, match=says):
            data_curvature(module, u, structure="kron")


def test_local_reparameterisation_beside_a_module() -> None:
    x, y = regression_data(20, FEATURES)
    network = torch_mlp()
    head = with_noise(lambda x: bnn.dense("head", ops.tanh(bnn.module("net", x, network)), 1))
    method = bnn.SVI(ppl="pyro", estimator="local", steps=20, elbo_draws=5)
    assert np.isfinite(bnn.fit(head, x, y, method, seed=0).info.figures["elbo"])


def test_the_sites_of_a_module_are_a_start() -> None:
    network = torch_mlp(seed=3)
    start = {f"net.{name}": value.detach().numpy() for name, value in network.named_parameters()}
    posterior = bnn.fit(
        module_model(network), X, Y, bnn.Laplace(ppl="pyro", start={**start, "noise": 0.5}, optimise=False)
    )
    mode = posterior.approximation.centre()
    for name, value in start.items():
        np.testing.assert_allclose(mode[name], value)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_model_is_listed_on_plain_numbers(framework: str) -> None:
    _, build, layers, leaf, _ = FRAMEWORKS[framework]
    sketch = zoo.sketch(module_model(build()), FEATURES)
    assert sketch.parameters == FEATURES * WIDTH + WIDTH + WIDTH + 1 + 1
    assert {f"net.{layers[0]}.{leaf}", f"net.{layers[1]}.bias"} < {site.name for site in sketch.sites}
    assert sketch.task == "regression"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_row_holds_is_known_to_who_plans_memory(framework: str) -> None:
    _, build, *_ = FRAMEWORKS[framework]
    model = module_model(build())
    values = {site.name: np.ones(site.shape) for site in zoo.sketch(model, FEATURES).sites}
    # In the language it is what enters the maps, 3 and 4 numbers. A framework may copy one or the other on the way.
    for rows in (1, 2):
        _, inputs = recorded_linear(model, values, X[:rows])
        ((held,),) = (inputs["net"],)
        assert held.shape[0] == rows
        assert WIDTH <= held.shape[1] <= 2 * (FEATURES + WIDTH)


# --- fits -------------------------------------------------------------------------------------------


def test_names_go_through_a_guide_and_a_file(tmp_path: Any) -> None:
    x, y = regression_data(30, FEATURES)
    model = module_model(torch_mlp())
    posterior = bnn.fit(model, x, y, bnn.SVI(ppl="pyro", steps=60, elbo_draws=10), seed=0)
    posterior.save(tmp_path / "kept")
    again = bnn.load(tmp_path / "kept", model)
    np.testing.assert_array_equal(again.predict(x[:3]).mean, posterior.predict(x[:3]).mean)
    assert "net.0.weight" in posterior.draws


def by_hand(framework: str) -> Callable[[Any], Any]:
    """The network in the language, its sites with the names, shapes and order of the module's.

    All randomness of a fit follows from these, so that a method draws the same numbers for both.
    """
    _, build, layers, leaf, turned = FRAMEWORKS[framework]
    sites = asked(lambda: bnn.module("net", X, build(), FAN_IN))

    def network(x: Any) -> Any:
        w = {name: bnn.sample(name, distribution) for name, distribution in sites.items()}
        first, last = (w[f"net.{layer}.{leaf}"].T if turned else w[f"net.{layer}.{leaf}"] for layer in layers)
        return ops.tanh(x @ first + w[f"net.{layers[0]}.bias"]) @ last + w[f"net.{layers[1]}.bias"]

    return network


# Every method with modules of torch, which compiles nothing; of JAX a method for each framework, one with batches and
# one with Jacobians.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "framework"),
    [("nuts", "torch"), ("svi", "torch"), ("laplace", "torch"), ("laplace", "equinox"), ("svi", "nnx")],
)
def test_methods_fit_modules_as_they_fit_the_language(framework: str, method: str) -> None:
    """The same draws but for rounding, from one seed."""
    ppl, build, *_ = FRAMEWORKS[framework]
    x, y = regression_data(40, FEATURES)
    chosen = {
        "nuts": bnn.NUTS(ppl=ppl, draws=10, warmup=30, chains=1, max_tree_depth=5),
        "svi": bnn.SVI(ppl=ppl, steps=300, learning_rate=0.03, elbo_draws=10, batch_size=20),
        "laplace": bnn.Laplace(ppl=ppl, steps=500),
    }[method]
    network = build()
    before = own_values(network)
    posterior = bnn.fit(module_model(network), x, y, chosen, seed=0)
    written = bnn.fit(with_noise(by_hand(framework)), x, y, chosen, seed=0)
    assert set(posterior.draws) == set(written.draws)
    for name, draws in posterior.draws.items():
        assert draws.std() > 0.0
        np.testing.assert_allclose(draws, written.draws[name], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(posterior.predict(x).mean, written.predict(x).mean, rtol=1e-6, atol=1e-8)
    for name, value in own_values(network).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_a_function_of_one_framework_in_a_model_is_answered_by_ops(ppl: str, framework: str) -> None:
    """torch on arrays of JAX, JAX on those of torch, and NumPy on either; at home the function is a function."""
    import jax.numpy as jnp
    import torch

    tanh: Any = {"torch": torch.tanh, "jax": jnp.tanh, "numpy": np.tanh}[framework]

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, tanh(bnn.dense("f", x, 1)), bnn.likelihoods.Gaussian(1.0))

    x = np.random.default_rng(3).normal(size=(10, 2))
    method = bnn.MAP(ppl=ppl, steps=3, polish=False)
    if framework == {"numpyro": "jax", "pyro": "torch"}[ppl]:
        assert method.fit(model, x, x[:, 0], progress=False).kind == "point"
        return
    with pytest.raises(ModelError, match=r"function of torch, JAX or NumPy.*bnn\.ops"):
        method.fit(model, x, x[:, 0], progress=False)
