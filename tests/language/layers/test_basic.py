"""Layers and what they are made of, against those of torch and JAX, in NumPy, torch and JAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn import likelihoods, ops, priors
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.handlers import NetworkFunction, network_function
from ppl_bnn.language.layers.basic import (
    conv1d,
    conv2d,
    embedding,
    filter_response_norm,
    layer_norm,
    learned_positions,
    residual,
    residual_block,
)
from ppl_bnn.language.primitives import Handler, Message, conv
from ppl_bnn.language.stochastic_layers import Flipout
from tests.layer_oracles import Substitute, asked, check, of_torch, set_parameters, through_maps, values_of

KERNELS = [(2, 3), (5, 4)]
STRIDES = [1, (2, 3)]
PADDINGS: list[Any] = ["valid", "same", 1, ((0, 1), (2, 0))]
# Odd and even, so that "same" with a stride leaves an odd number of zeros on one side, then on the other.
SIZES = [(7, 6), (8, 5)]


def in_jax(array: np.ndarray) -> Any:
    """An array of the session's system; only inside a session of NumPyro is it float64."""
    return system("numpyro").asarray(array)


def each_case() -> list[Any]:
    """(size, kernel, stride, padding), the sizes in turn."""
    cases = itertools.product(KERNELS, STRIDES, range(len(PADDINGS)))
    return [
        (SIZES[(index // len(PADDINGS) + which) % 2], kernel, stride, PADDINGS[which])
        for index, (kernel, stride, which) in enumerate(cases)
    ]


# --- against the systems --------------------------------------------------------------------------------


def test_a_convolution_is_the_same_in_all_three_and_a_product_with_patches(rng: np.random.Generator) -> None:
    with system("numpyro").session("float64", "cpu"):
        for size, kernel, stride, padding in each_case():
            x, weight = rng.normal(size=(2, *size, 3)), rng.normal(size=(*kernel, 3, 4))
            product = ops.patches(x, kernel, stride, padding) @ weight.reshape(-1, 4)
            for name, convert in (("numpy", np.asarray), ("torch", torch.tensor), ("jax", in_jax)):
                patches = np.asarray(ops.patches(convert(x), kernel, stride, padding))
                np.testing.assert_array_equal(patches, ops.patches(x, kernel, stride, padding))
                result = np.asarray(ops.conv2d(convert(x), convert(weight), stride, padding))
                case = f"{name} {size} {kernel} {stride} {padding}"
                np.testing.assert_allclose(result, product, rtol=0, atol=1e-10, err_msg=case)


def test_a_convolution_is_that_of_jax(rng: np.random.Generator) -> None:
    import jax

    with system("numpyro").session("float64", "cpu"):
        for size, kernel, stride, padding in each_case():
            x, weight = rng.normal(size=(2, *size, 3)), rng.normal(size=(*kernel, 3, 4))
            theirs = {"valid": "VALID", "same": "SAME", 1: ((1, 1), (1, 1))}.get(padding, padding)
            expected = jax.lax.conv_general_dilated(
                in_jax(x),
                in_jax(weight),
                (stride, stride) if isinstance(stride, int) else stride,
                theirs,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            # Of torch's arrays, so that the padding is ours and the convolution the other system's.
            result = ops.conv2d(torch.tensor(x), torch.tensor(weight), stride, padding)
            np.testing.assert_allclose(result.numpy(), np.asarray(expected), rtol=0, atol=1e-10)


# torch's own "same", not ours, says that it may copy the image.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_a_convolution_is_that_of_torch(rng: np.random.Generator) -> None:
    with system("numpyro").session("float64", "cpu"):
        for size, kernel, stride, padding in each_case():
            if padding == "same" and stride != 1:
                continue  # torch has none
            x, weight = rng.normal(size=(2, *size, 3)), rng.normal(size=(*kernel, 3, 4))
            images = torch.tensor(x.transpose(0, 3, 1, 2))
            if isinstance(padding, tuple):
                (top, bottom), (left, right) = padding
                images = torch.nn.functional.pad(images, (left, right, top, bottom))
            expected = torch.nn.functional.conv2d(
                images,
                torch.tensor(weight.transpose(3, 2, 0, 1)),
                stride=stride,
                padding=0 if isinstance(padding, tuple) else padding,
            )
            result = np.asarray(ops.conv2d(in_jax(x), in_jax(weight), stride, padding))
            np.testing.assert_allclose(
                result,
                expected.numpy().transpose(0, 2, 3, 1),
                rtol=0,
                atol=1e-10,
                err_msg=f"{stride} {padding}",
            )


def test_same_with_a_stride_pads_after_the_image_first() -> None:
    # 4 pixels, kernel 3, stride 2: two places, one zero, after the image. Places see (0, 1, 2) and (2, 3, zero).
    x = np.arange(1.0, 5.0).reshape(1, 4, 1, 1)
    np.testing.assert_array_equal(
        ops.patches(x, (3, 1), (2, 1), "same").reshape(2, 3), [[1.0, 2.0, 3.0], [3.0, 4.0, 0.0]]
    )


def test_pooling_is_that_of_torch_and_of_jax(rng: np.random.Generator) -> None:
    import jax

    with system("numpyro").session("float64", "cpu"):
        for size, kernel, stride, padding in itertools.product(
            SIZES, [(2, 2), (3, 2)], [None, 1, (2, 3)], ["valid", 1]
        ):
            x = rng.normal(size=(2, *size, 3))
            images = torch.tensor(x.transpose(0, 3, 1, 2))
            margin = 0 if padding == "valid" else 1
            largest = torch.nn.functional.max_pool2d(images, kernel, stride, padding=margin)
            mean = torch.nn.functional.avg_pool2d(
                images, kernel, stride, padding=margin, count_include_pad=False
            )
            for convert in (np.asarray, torch.tensor, in_jax):
                for pool, expected in ((ops.max_pool, largest), (ops.avg_pool, mean)):
                    result = np.asarray(pool(convert(x), kernel, stride, padding))
                    np.testing.assert_allclose(
                        result, expected.numpy().transpose(0, 2, 3, 1), rtol=0, atol=1e-10
                    )
        for size, stride in itertools.product(SIZES, (1, 2)):
            x = rng.normal(size=(2, *size, 3))
            window, steps = (1, 3, 2, 1), (1, stride, stride, 1)
            sums = [
                jax.lax.reduce_window(each, 0.0, jax.lax.add, window, steps, "SAME")
                for each in (in_jax(x), in_jax(np.ones_like(x)))
            ]
            largest = jax.lax.reduce_window(in_jax(x), -np.inf, jax.lax.max, window, steps, "SAME")
            result = ops.avg_pool(torch.tensor(x), (3, 2), stride, "same").numpy()
            np.testing.assert_allclose(result, np.asarray(sums[0] / sums[1]), rtol=0, atol=1e-10)
            result = ops.max_pool(torch.tensor(x), (3, 2), stride, "same").numpy()
            np.testing.assert_allclose(result, np.asarray(largest), rtol=0, atol=1e-10)


def test_whole_numbers_are_pooled_and_convolved_too(rng: np.random.Generator) -> None:
    x, weight = rng.integers(-9, -1, size=(1, 5, 5, 2)), rng.normal(size=(3, 3, 2, 2))
    with system("numpyro").session("float64", "cpu"):
        for convert in (np.asarray, torch.tensor, in_jax):
            for pool in (ops.max_pool, ops.avg_pool):
                np.testing.assert_allclose(
                    np.asarray(pool(convert(x), 3, 2, "same")),
                    pool(x.astype(float), 3, 2, "same"),
                    rtol=1e-12,
                )
            np.testing.assert_allclose(
                np.asarray(ops.conv2d(convert(x), convert(weight))),
                ops.conv2d(x.astype(float), weight),
                rtol=1e-10,
            )


def test_gradients_agree_where_entries_share_the_maximum() -> None:
    import jax

    # Two of four entries are the largest: each gets half of the derivative.
    x = np.array([[1.0, 3.0], [3.0, 0.0]]).reshape(1, 2, 2, 1)
    expected = np.array([[0.0, 0.5], [0.5, 0.0]]).reshape(1, 2, 2, 1)
    tensor = torch.tensor(x, requires_grad=True)
    ops.max_pool(tensor, 2).sum().backward()
    assert tensor.grad is not None
    np.testing.assert_array_equal(tensor.grad.numpy(), expected)
    with system("numpyro").session("float64", "cpu"):
        gradient = jax.grad(lambda a: ops.max_pool(a, 2).sum())(in_jax(x))
        np.testing.assert_array_equal(np.asarray(gradient), expected)


# --- the word -------------------------------------------------------------------------------------------


class Heard(Handler):
    def __init__(self, change: float = 0.0):
        self.change, self.messages = change, list[Message]()

    def process(self, msg: Message) -> None:
        self.messages.append(msg)

    def after(self, msg: Message) -> None:
        msg.value = msg.value + self.change


def test_conv_is_visible_to_handlers(rng: np.random.Generator) -> None:
    x, weight, bias = rng.normal(size=(2, 5, 4, 3)), rng.normal(size=(3, 2, 3, 4)), rng.normal(size=4)
    with Heard(change=1.0) as heard:
        result = conv("a", x, weight, bias, stride=2, padding="same")
        plain = conv("b", x, weight)
    assert isinstance(heard, Heard)
    first, second = heard.messages
    assert (first.kind, first.name, second.name) == ("conv", "a", "b")
    assert first.arguments["x"] is x
    assert first.arguments["weight"] is weight
    assert first.arguments["bias"] is bias
    assert (first.arguments["stride"], first.arguments["padding"]) == (2, "same")
    assert (second.arguments["bias"], second.arguments["stride"], second.arguments["padding"]) == (
        None,
        1,
        "valid",
    )
    np.testing.assert_allclose(result, ops.conv2d(x, weight, 2, "same") + bias + 1.0)
    np.testing.assert_allclose(plain, ops.conv2d(x, weight) + 1.0)


# --- the layer ------------------------------------------------------------------------------------------


class Describe(Handler):
    """Answers samples with ones and keeps what was asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def process(self, msg: Message) -> None:
        if msg.kind in ("sample", "param"):
            self.asked[msg.name] = msg.arguments.get("distribution", msg.arguments.get("init"))
            msg.answer(np.ones(self.asked[msg.name].shape))


def test_a_layer_samples_its_weight_and_its_bias(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 6, 6, 3))
    with Describe() as described:
        result = conv2d("c", x, 4, (3, 2), stride=2)
    assert isinstance(described, Describe)
    assert list(described.asked) == ["c.weight", "c.bias"]
    assert described.asked["c.weight"].shape == (3, 2, 3, 4)
    # Variance 1 / (kh * kw * C).
    assert described.asked["c.weight"].arguments["scale"] == pytest.approx((3 * 2 * 3) ** -0.5)
    assert described.asked["c.bias"].shape == (4,)
    assert described.asked["c.bias"].arguments["scale"] == 1.0
    np.testing.assert_allclose(result, ops.conv2d(x, np.ones((3, 2, 3, 4)), 2, "same") + 1.0)


def test_priors_of_a_layer(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 6, 6, 3))
    with Describe() as described:
        assert conv2d("c", x, 4, 3, padding="valid", bias=False).shape == (2, 4, 4, 4)
        conv2d("d", x, 4, 3, prior=priors.Normal(0.0, 0.3), bias=priors.Laplace(0.0, 0.2))
        conv2d("e", x, 4, 3, prior=priors.Point())
    assert isinstance(described, Describe)
    scales = {name: asked.arguments["scale"] for name, asked in described.asked.items()}
    assert scales["d.weight"] == 0.3
    assert scales["d.bias"] == 0.2
    assert described.asked["d.bias"].family == "Laplace"
    assert scales["e.weight"] == pytest.approx(27**-0.5)
    assert set(scales) == {"c.weight", "d.weight", "d.bias", "e.weight", "e.bias"}


X = np.zeros((2, 6, 5, 3))
W = np.zeros((3, 3, 3, 4))


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: conv2d("c", X, 0, 3), r"conv2d\('c'\): expected a positive whole number as channels; got 0"),
        (lambda: conv2d("c", X, 2.5, 3), "got 2.5"),  # pyright: ignore
        (lambda: conv2d("c", X, True, 3), "got True"),
        (lambda: conv2d("c", X, 4, 0), r"conv2d\('c'\): expected a positive whole number as kernel"),
        (lambda: conv2d("c", X, 4, (3, 3, 3)), r"kernel, or \(height, width\); got \(3, 3, 3\)"),  # pyright: ignore
        (lambda: conv2d("c", X, 4, 3, stride=(1, 0)), r"as stride.*got \(1, 0\)"),
        (lambda: conv2d("c", X, 4, 3, padding="full"), r"padding 'valid', 'same'.*got 'full'"),
        (lambda: conv2d("c", X, 4, 3, padding=-1), "got -1"),
        (lambda: conv2d("c", X, 4, 3, padding=True), "got True"),
        (lambda: conv2d("c", X, 4, 3, padding=(1, 1)), r"got \(1, 1\)"),  # pyright: ignore
        (lambda: conv2d("c", X, 4, 3, padding=((0, 1), (0.5, 0))), "got .*0.5"),  # pyright: ignore
        (lambda: conv2d("c", X[0], 4, 3), r"\(N, height, width, channels\); got shape \(6, 5, 3\)"),
        (lambda: conv2d("c", X, 4, 6, padding="valid"), r"size \(6, 6\) of the kernel.*got size \(6, 5\)"),
        (lambda: conv2d("c", X, 4, 3, prior="normal"), "a prior; got 'normal'"),  # pyright: ignore
        (lambda: conv2d("c", X, 4, 3, bias="yes"), "a prior; got 'yes'"),  # pyright: ignore
        (lambda: ops.conv2d(X, W[:, :, :2]), r"\(kh, kw, 3, channels\).*got shape \(3, 3, 2, 4\)"),
        (lambda: ops.conv2d(X, W[0]), r"got shape \(3, 3, 4\)"),
        (lambda: ops.conv2d(X[0], W), r"\(N, height, width, channels\)"),
        (lambda: ops.patches(X, 7), r"ops\.patches"),
        (
            lambda: ops.max_pool(X, 2, 1, 2),
            r"ops\.max_pool: expected padding smaller than the kernel \(2, 2\)",
        ),
        (lambda: ops.avg_pool(X, 2, 1, ((0, 2), (0, 0))), r"ops\.avg_pool: expected padding smaller"),
    ],
)
def test_impossible_convolutions_are_refused(action: Callable[[], Any], says: str) -> None:
    with Describe(), pytest.raises(ModelError, match=says):
        action()


# --- sequences ------------------------------------------------------------------------------------------


def each_sequence() -> list[Any]:
    """(length, kernel, stride, padding); torch has no "same" with a stride."""
    paddings: list[Any] = ["valid", "same", 1, (2, 0)]
    cases = itertools.product((1, 3), (1, 2), range(len(paddings)))
    # Odd and even lengths in turn, each with every padding.
    return [
        ((7, 8)[(index // len(paddings) + which) % 2], kernel, stride, paddings[which])
        for index, (kernel, stride, which) in enumerate(cases)
    ]


def test_a_convolution_along_time_is_that_of_torch_and_of_jax(rng: np.random.Generator) -> None:
    import jax

    with system("numpyro").session("float64", "cpu"):
        for length, kernel, stride, padding in each_sequence():
            x, weight = rng.normal(size=(2, length, 3)), rng.normal(size=(kernel, 3, 4))
            case = f"{length} {kernel} {stride} {padding}"
            if padding == "same":
                wanted = jax.lax.conv_general_dilated(
                    in_jax(x), in_jax(weight), (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
                )
                wanted = np.asarray(wanted)
            else:
                before, after = {"valid": (0, 0), 1: (1, 1)}.get(padding, padding)
                sequences = torch.nn.functional.pad(torch.tensor(x.transpose(0, 2, 1)), (before, after))
                kernels = torch.tensor(weight.transpose(2, 1, 0))
                wanted = torch.nn.functional.conv1d(sequences, kernels, stride=stride)
                wanted = wanted.numpy().transpose(0, 2, 1)
            for convert in (np.asarray, torch.tensor, in_jax):
                result = np.asarray(ops.conv1d(convert(x), convert(weight), stride, padding))
                np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-10, err_msg=case)
            product = ops.patches(x, kernel, stride, padding) @ weight.reshape(-1, 4)
            np.testing.assert_allclose(product, wanted, rtol=0, atol=1e-10, err_msg=case)


def test_pooling_along_time_is_that_of_torch(rng: np.random.Generator) -> None:
    with system("numpyro").session("float64", "cpu"):
        for length, kernel, stride, margin in ((7, 2, None, 0), (8, 3, 1, 1), (7, 3, 2, 1)):
            x = rng.normal(size=(2, length, 3))
            sequences = torch.tensor(x.transpose(0, 2, 1))
            largest = torch.nn.functional.max_pool1d(sequences, kernel, stride, padding=margin)
            mean = torch.nn.functional.avg_pool1d(
                sequences, kernel, stride, padding=margin, count_include_pad=False
            )
            for convert in (np.asarray, torch.tensor, in_jax):
                for pool, wanted in ((ops.max_pool, largest), (ops.avg_pool, mean)):
                    result = np.asarray(pool(convert(x), kernel, stride, margin))
                    np.testing.assert_allclose(result, wanted.numpy().transpose(0, 2, 1), rtol=0, atol=1e-10)


def test_the_layer_along_time_is_that_of_torch(rng: np.random.Generator) -> None:
    values = values_of({"c.weight": (3, 2, 4), "c.bias": (4,)})
    x, pull = rng.normal(size=(2, 7, 2)), rng.normal(size=(2, 4, 4))
    module = torch.nn.Conv1d(2, 4, 3, stride=2, padding=1, dtype=torch.float64)
    set_parameters(module, {"weight": values["c.weight"].transpose(2, 1, 0), "bias": values["c.bias"]})
    tensor = torch.tensor(x, requires_grad=True)
    output = module(tensor.transpose(1, 2)).transpose(1, 2)
    found = of_torch(output, pull, {**dict(module.named_parameters()), "x": tensor})
    wanted = {
        "output": found["output"],
        "x": found["x"],
        "c.weight": found["weight"].transpose(2, 1, 0),
        "c.bias": found["bias"],
    }
    check(lambda x: conv1d("c", x, 4, 3, stride=2, padding=1), values, x, pull, wanted)
    sites = asked(lambda: conv1d("c", x, 4, 3))
    assert {name: site.shape for name, site in sites.items()} == {"c.weight": (3, 2, 4), "c.bias": (4,)}
    assert sites["c.weight"].arguments["scale"] == pytest.approx(6**-0.5)


def of_sequences(x: Any, y: Any = None) -> None:
    h = ops.tanh(conv1d("c", x, 2, 2, stride=2, prior=priors.Normal()))
    bnn.observe(y, bnn.dense("output", ops.mean(h, 1), 2, priors.Normal()), likelihoods.Categorical())


def test_curvature_sees_a_convolution_along_time(rng: np.random.Generator, ppl: str) -> None:
    served, ours, wanted = through_maps(ppl, of_sequences, rng.normal(size=(4, 5, 2)), np.array([0, 1, 1, 0]))
    assert served == {"c.weight", "c.bias", "output.weight", "output.bias"}
    np.testing.assert_allclose(ours, wanted, rtol=1e-10, atol=1e-11)


def test_flipout_gives_each_sequence_one_draw_at_all_times(rng: np.random.Generator) -> None:
    shapes = {"c.weight": (2, 2, 2), "c.bias": (2,), "output.weight": (2, 2), "output.bias": (2,)}
    loc, values = values_of(shapes), values_of(shapes, 8)
    rng = np.random.default_rng(2)
    handler = Flipout(loc, lambda shape, like: rng.choice([-1.0, 1.0], size=shape))
    x = rng.normal(size=(3, 5, 2))

    def flipped(x: Any, y: Any = None) -> None:
        with handler:
            of_sequences(x, y)

    found = network_function(flipped)(values, x)
    for row in range(3):
        own = {}
        for name, value in values.items():
            signs = handler.outer[name][row]
            signs = signs if value.ndim == 1 else handler.inner[name][row][:, None] * signs
            own[name] = loc[name] + (value - loc[name]) * signs
        single = network_function(of_sequences)(own, x[row : row + 1])
        np.testing.assert_allclose(found[row], single[0], rtol=0, atol=1e-12)


# --- normalisation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_layer_norm_is_that_of_torch(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    values = values_of({"n.gain": (4,), "n.bias": (4,)})
    x, pull = rng.normal(size=shape), rng.normal(size=shape)
    module = torch.nn.LayerNorm(4, eps=1e-3, dtype=torch.float64)
    set_parameters(module, {"weight": values["n.gain"], "bias": values["n.bias"]})
    tensor = torch.tensor(x, requires_grad=True)
    found = of_torch(module(tensor), pull, {**dict(module.named_parameters()), "x": tensor})
    wanted = {"output": found["output"], "x": found["x"], "n.gain": found["weight"], "n.bias": found["bias"]}
    check(lambda x: layer_norm("n", x, epsilon=1e-3), values, x, pull, wanted)


@pytest.mark.parametrize("shape", [(2, 3, 2, 4), (2, 5, 4)])
def test_filter_response_norm_is_a_root_mean_square_of_torch_over_places(
    rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    values = values_of({"n.gain": (4,), "n.bias": (4,), "n.threshold": (4,)})
    x, pull = rng.normal(size=shape), rng.normal(size=shape)
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in {**values, "x": x}.items()}
    places = torch.movedim(leaves["x"], -1, 1)
    scaled = torch.nn.functional.rms_norm(places, places.shape[2:], eps=1e-3)
    z = torch.movedim(scaled, 1, -1) * leaves["n.gain"] + leaves["n.bias"]
    # max(z, t) = relu(z - t) + t
    output = torch.nn.functional.relu(z - leaves["n.threshold"]) + leaves["n.threshold"]
    wanted = of_torch(output, pull, leaves)
    check(lambda x: filter_response_norm("n", x, epsilon=1e-3), values, x, pull, wanted)


def test_parameters_of_normalisation(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 3, 3, 4))
    sites = asked(lambda: filter_response_norm("n", x))
    described = {name: (site.arguments["loc"], site.arguments["scale"]) for name, site in sites.items()}
    assert described == {"n.gain": (1.0, 0.25), "n.bias": (0.0, 1.0), "n.threshold": (0.0, 0.25)}
    assert {site.shape for site in sites.values()} == {(4,)}
    assert asked(lambda: layer_norm("n", x, gain=False, bias=False)) == {}
    assert list(asked(lambda: filter_response_norm("n", x, bias=False, threshold=False))) == ["n.gain"]
    assert asked(lambda: layer_norm("n", x, gain=priors.Laplace(1.0, 0.1)))["n.gain"].family == "Laplace"


# --- residual connections -------------------------------------------------------------------------------


def of_torch_functions(
    x: torch.Tensor, w: dict[str, torch.Tensor], stride: int, tlu: bool, way: bool
) -> torch.Tensor:
    """The block from torch's convolutions and norms, channels first, on images of odd height and width."""
    functional = torch.nn.functional

    def weight(name: str) -> torch.Tensor:
        return w[name].permute(3, 2, 0, 1)

    def normed(h: torch.Tensor, name: str) -> torch.Tensor:
        h = functional.rms_norm(h, h.shape[2:], eps=1e-6)
        return h * w[f"{name}.gain"][:, None, None] + w[f"{name}.bias"][:, None, None]

    def active(h: torch.Tensor, name: str) -> torch.Tensor:
        if not tlu:
            return functional.silu(h)
        cut = w[f"{name}.threshold"][:, None, None]
        return functional.relu(h - cut) + cut

    images = x.permute(0, 3, 1, 2)
    # With odd sizes, "same" is one pixel on every side for a kernel of 3, whatever the stride.
    h = active(
        normed(functional.conv2d(images, weight("r.conv0.weight"), None, stride, 1), "r.norm0"), "r.norm0"
    )
    h = normed(functional.conv2d(h, weight("r.conv1.weight"), None, 1, 1), "r.norm1")
    around = functional.conv2d(images, weight("r.shortcut.weight"), None, stride) if way else images
    return active(h + around, "r").permute(0, 2, 3, 1)


@pytest.mark.parametrize(("channels", "stride", "activation"), [(3, 1, None), (4, 2, "silu")])
def test_a_residual_block_is_made_of_what_torch_has(
    rng, channels: int, stride: int, activation: str | None
) -> None:
    way, tlu = (channels, stride) != (3, 1), activation is None
    shapes: dict[str, tuple[int, ...]] = {
        "r.conv0.weight": (3, 3, 3, channels),
        "r.conv1.weight": (3, 3, channels, channels),
        **{f"r.norm{which}.{part}": (channels,) for which in (0, 1) for part in ("gain", "bias")},
        **({"r.norm0.threshold": (channels,), "r.threshold": (channels,)} if tlu else {}),
        **({"r.shortcut.weight": (1, 1, 3, channels)} if way else {}),
    }
    values, x = values_of(shapes), rng.normal(size=(2, 5, 3, 3))
    pull = rng.normal(size=(2, -(-5 // stride), -(-3 // stride), channels))
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in {**values, "x": x}.items()}
    wanted = of_torch(of_torch_functions(leaves["x"], leaves, stride, tlu, way), pull, leaves)
    check(lambda x: residual_block("r", x, channels, 3, stride, activation), values, x, pull, wanted)
    sites = asked(lambda: residual_block("r", x, channels, 3, stride, activation))
    assert {name: site.shape for name, site in sites.items()} == shapes


def test_a_branch_is_added_and_never_broadcast(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 3))
    np.testing.assert_array_equal(residual(x, lambda h: 2 * h), 3 * x)
    with pytest.raises(ModelError, match=r"keeps the shape \(2, 3\); got shape \(2, 1\)"):
        residual(x, lambda h: h[:, :1])


# --- tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_hot", [False, True])
def test_an_embedding_is_that_of_torch(rng: np.random.Generator, one_hot: bool) -> None:
    values, index = values_of({"e.weight": (5, 3)}), np.array([[0, 4, 4], [2, 0, 1]])
    pull = rng.normal(size=(2, 3, 3))
    module = torch.nn.Embedding(5, 3, dtype=torch.float64)
    set_parameters(module, {"weight": values["e.weight"]})
    found = of_torch(module(torch.tensor(index)), pull, dict(module.named_parameters()))
    wanted = {"output": found["output"], "e.weight": found["weight"]}
    check(lambda index: embedding("e", index, 5, 3, one_hot=one_hot), values, index, pull, wanted)


def of_symbols(x: Any, y: Any = None, *, one_hot: bool = False) -> None:
    h = learned_positions("p", embedding("e", x, 4, 2, one_hot=one_hot))
    bnn.observe(y, bnn.dense("output", ops.tanh(h)[:, 0] * h[:, 1], 2), likelihoods.Categorical())


@pytest.mark.parametrize("one_hot", [False, True])
def test_curvature_of_a_table(ppl: str, one_hot: bool) -> None:
    x, y = np.array([[0, 1], [3, 3], [2, 1]]), np.array([0, 1, 1])
    model = lambda x, y=None: of_symbols(x, y, one_hot=one_hot)
    served, ours, wanted = through_maps(ppl, model, x, y)
    assert ("e.weight" in served) == one_hot
    np.testing.assert_allclose(ours, wanted, rtol=1e-10, atol=1e-11)


def test_a_symbol_outside_of_the_table_is_no_number(ppl: str) -> None:
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        table, index = chosen.asarray(np.ones((3, 2))), chosen.asarray(np.array([0, 3, -1]))
        for function in (ops.lookup, lambda table, index: ops.one_hot(index, 3, like=table)):
            found = chosen.to_numpy(chosen.compile(function)(table, index))
            np.testing.assert_array_equal(np.isnan(found).all(-1), [False, True, True])


def test_positions_are_added_in_their_order(rng: np.random.Generator) -> None:
    values, x = values_of({"p.weight": (6, 2)}), rng.normal(size=(3, 4, 2))
    with Substitute(values):
        result = learned_positions("p", x, length=6)
    np.testing.assert_allclose(result - x, np.stack([values["p.weight"][:4]] * 3), rtol=0, atol=1e-14)
    assert asked(lambda: learned_positions("p", x))["p.weight"].shape == (4, 2)


S = np.zeros((2, 5, 3))


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: conv1d("c", S, 0, 3), r"conv1d\('c'\): expected a positive whole number as channels; got 0"),
        (lambda: conv1d("c", S, 4, (3, 3)), r"whole number as kernel; got \(3, 3\)"),  # pyright: ignore
        (lambda: conv1d("c", S, 4, 3, stride=0), "as stride; got 0"),
        (lambda: conv1d("c", S, 4, 3, padding="full"), r"'same', a whole number.*got 'full'"),
        (lambda: conv1d("c", S, 4, 3, padding=(1, -1)), r"got \(1, -1\)"),
        (lambda: conv1d("c", S, 4, 3, padding=True), "got True"),
        (lambda: conv1d("c", X, 4, 3), r"\(N, time, channels\); got shape \(2, 6, 5, 3\)"),
        (lambda: conv1d("c", S, 4, 6, padding="valid"), r"size \(6,\) of the kernel.*got size \(5,\)"),
        (lambda: ops.conv1d(S, np.zeros((3, 2, 4))), r"\(k, 3, channels\).*got shape \(3, 2, 4\)"),
        (lambda: ops.conv1d(S, W), r"got shape \(3, 3, 3, 4\)"),
        (lambda: ops.max_pool(S, 2, 1, 2), r"ops\.max_pool: expected padding smaller"),
        (lambda: ops.avg_pool(S, (2, 2)), r"whole number as kernel; got \(2, 2\)"),
        (lambda: layer_norm("n", S[..., :1]), r"layer_norm\('n'\): expected.*two channels"),
        (lambda: layer_norm("n", S, epsilon=0.0), "a small positive epsilon; got 0.0"),
        (lambda: layer_norm("n", S, gain="one"), "a prior; got 'one'"),  # pyright: ignore
        (lambda: filter_response_norm("n", S[:, :1]), "at least two places"),
        (lambda: filter_response_norm("n", S[0]), r"got shape \(5, 3\)"),
        (lambda: residual_block("r", S[0], 3), r"residual_block\('r'\)"),
        (
            lambda: embedding("e", S, 4, 2),
            r"embedding\('e'\): expected whole numbers; got an array of float64",
        ),
        (lambda: embedding("e", np.array([[0, 4]]), 4, 2), r"numbers 0\.\.3; got 0\.\.4; try size=5"),
        (lambda: embedding("e", np.array([[-1]]), 4, 2), r"got -1\.\.-1"),
        (lambda: embedding("e", np.array([[1]]), 0, 2), "whole number as size"),
        (lambda: learned_positions("p", S, length=4), "at most 4 positions; got 5"),
        (lambda: learned_positions("p", S[0]), r"learned_positions\('p'\): expected sequences"),
    ],
)
def test_impossible_layers_are_refused(action: Callable[[], Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        asked(action)


# --- in a program ---------------------------------------------------------------------------------------

IMAGES, LABELS = np.random.default_rng(31).normal(size=(12, 9, 8, 1)), np.arange(12) % 3


def lenet(x: Any, y: Any = None) -> None:
    h = ops.max_pool(ops.tanh(conv2d("conv0", x, 2, 3)), 2)
    h = ops.avg_pool(ops.relu(conv2d("conv1", h, 3, 3, stride=2)), 2)
    h = ops.tanh(bnn.dense("hidden", h.reshape(h.shape[0], -1), 4))
    bnn.observe(y, bnn.dense("output", h, 3), likelihoods.Categorical())


def test_log_joint_and_gradient_agree_across_systems() -> None:
    found = {}
    for ppl in ("numpyro", "pyro"):
        chosen = system(ppl)
        with chosen.session("float64", "cpu"):
            x, y = chosen.asarray(IMAGES), chosen.asarray(LABELS)
            program = Program.of(chosen, lenet, x, y, language=True)
            rng = np.random.default_rng(5)
            w = {name: rng.normal(size=site.shape) for name, site in program.sites.items()}
            u = {name: chosen.asarray(value) for name, value in w.items()}
            value, gradient = chosen.value_and_grad(lambda u, p=program, x=x, y=y: p.log_joint(u, x, y))(u)
            draws = {name: np.stack([array, 2 * array]) for name, array in w.items()}
            found[ppl] = (
                float(value),
                {name: chosen.to_numpy(each) for name, each in gradient.items()},
                program.predictor_draws(draws, IMAGES),
            )
    ours, theirs = found["numpyro"], found["pyro"]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-10)
    for name in ours[1]:
        np.testing.assert_allclose(ours[1][name], theirs[1][name], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(ours[2], theirs[2], rtol=0, atol=1e-10)
    # The network function on NumPy arrays, which nothing compiles, is the third witness.
    np.testing.assert_allclose(ours[2][0], network_function(lenet)(w, IMAGES), rtol=0, atol=1e-10)


def test_a_convolutional_classifier_is_fitted(ppl: str) -> None:
    posterior = bnn.fit(lenet, IMAGES, LABELS, bnn.MAP(ppl=ppl, steps=1, polish=False))
    assert posterior.draws["conv1.weight"].shape == (1, 1, 3, 3, 2, 3)
    probabilities = posterior.predict(IMAGES).probabilities
    np.testing.assert_allclose(probabilities.sum(-1), 1.0)
    with NetworkFunction({name: value[0, 0] for name, value in posterior.draws.items()}) as run:
        lenet(IMAGES)
    assert isinstance(run, NetworkFunction)
    exponentials = np.exp(run.f - run.f.max(-1, keepdims=True))
    np.testing.assert_allclose(
        probabilities, exponentials / exponentials.sum(-1, keepdims=True), rtol=0, atol=1e-10
    )
