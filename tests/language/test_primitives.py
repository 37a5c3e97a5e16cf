"""The language: the effect stack, array functions, layers, and the interpretations of a model besides running it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from scipy.stats import norm

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import ModelError, UnknownNameError
from ppl_bnn.language.handlers import NetworkFunction, network_function, network_output, recorded_linear
from ppl_bnn.language.primitives import Handler, Message, maps_are_seen
from tests.layer_oracles import Substitute

ROWS, FEATURES, WIDTH = 5, 3, 4
X = np.random.default_rng(4).normal(size=(ROWS, FEATURES))
W = {
    "hidden0.weight": np.random.default_rng(401).normal(size=(FEATURES, WIDTH)),
    "hidden0.bias": np.random.default_rng(402).normal(size=WIDTH),
    "hidden1.weight": np.random.default_rng(403).normal(size=(WIDTH, WIDTH)),
    "hidden1.bias": np.random.default_rng(404).normal(size=WIDTH),
    "output.weight": np.random.default_rng(405).normal(size=(WIDTH, 2)),
    "output.bias": np.random.default_rng(406).normal(size=2),
    "noise": np.array(0.3),
}


def model(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [WIDTH, WIDTH, 2], "tanh"), likelihoods.Gaussian(noise))


def forward(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The network of `model`, written by hand."""
    h = np.tanh(x @ w["hidden0.weight"] + w["hidden0.bias"])
    h = np.tanh(h @ w["hidden1.weight"] + w["hidden1.bias"])
    return h @ w["output.weight"] + w["output.bias"]


def in_system(chosen: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: chosen.asarray(value) for name, value in arrays.items()}


# --- the effect stack -------------------------------------------------------------------------------


class Log(Handler):
    """Writes down what passes, and may answer or change it."""

    def __init__(
        self, name: str, log: list[str], answer: Any = None, change: Callable[[Any], Any] | None = None
    ):
        self.name, self.log, self.reply, self.change = name, log, answer, change

    def process(self, msg: Message) -> None:
        self.log.append(f"{self.name} down")
        if self.reply is not None:
            msg.answer(self.reply)

    def after(self, msg: Message) -> None:
        self.log.append(f"{self.name} up")
        if self.change is not None:
            msg.value = self.change(msg.value)


def test_a_message_goes_down_innermost_first_and_up_again() -> None:
    log: list[str] = []
    with Log("outer", log, answer=2.0), Log("inner", log):
        assert bnn.sample("a", dist.Normal()) == 2.0
    assert log == ["inner down", "outer down", "outer up", "inner up"]


def test_an_answer_stops_the_message() -> None:
    log: list[str] = []
    with Log("outer", log, answer=2.0), Log("inner", log, answer=1.0):
        assert bnn.sample("a", dist.Normal()) == 1.0
    assert log == ["inner down", "inner up"]


def test_values_change_on_the_way_up_from_the_outermost() -> None:
    log: list[str] = []
    with (
        Log("answers", log, answer=3.0),
        Log("adds", log, change=lambda v: v + 1),
        Log("doubles", log, change=lambda v: 2 * v),
    ):
        assert bnn.sample("a", dist.Normal()) == 8.0


def test_words_without_a_handler_have_their_plain_meaning() -> None:
    with Handler():
        assert bnn.deterministic("a", 3.0) == 3.0
        np.testing.assert_allclose(bnn.linear("l", X, W["hidden0.weight"]), X @ W["hidden0.weight"])
        with bnn.rows(ROWS):
            pass
        bnn.coupled()
        with pytest.raises(ModelError, match="no handler gives sample 'a'"):
            bnn.sample("a", dist.Normal())


def test_a_model_called_as_a_function_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"bare function; try bnn\.fit, bnn\.as_numpyro\(model\)"):
        model(X)


def test_the_stack_belongs_to_a_thread_and_is_left_as_it_was() -> None:
    seen: list[bool] = []
    with Handler():
        thread = threading.Thread(target=lambda: seen.append(maps_are_seen()))
        thread.start()
        thread.join()
        assert maps_are_seen()
    assert seen == [False]
    with pytest.raises(KeyError), Handler(), NetworkFunction({}):
        raise KeyError
    assert not maps_are_seen()


def test_what_is_no_distribution_is_refused() -> None:
    with Handler(), pytest.raises(ModelError, match=r"dist\.Normal"):
        bnn.sample("a", 3.0)  # type: ignore[arg-type]


# --- f(w, x) ----------------------------------------------------------------------------------------


def test_the_network_function_is_the_network(ppl: str) -> None:
    chosen = system(ppl)
    np.testing.assert_allclose(network_function(model)(W, X), forward(W, X), rtol=1e-13)
    with chosen.session("float64", "cpu"):
        f = chosen.compile(network_function(model))(in_system(chosen, W), chosen.asarray(X))
        np.testing.assert_allclose(chosen.to_numpy(f), forward(W, X), rtol=1e-12)
        output = network_output(model, in_system(chosen, W), chosen.asarray(X))
        eta = np.concatenate([forward(W, X), np.full((ROWS, 2), np.log(0.3))], axis=1)
        np.testing.assert_allclose(chosen.to_numpy(output.predictor), eta, rtol=1e-12)


def test_the_network_function_maps_over_draws(ppl: str) -> None:
    chosen = system(ppl)
    many = {name: np.stack([value, 0.5 * value, -value]) for name, value in W.items()}
    expected = np.stack([forward({n: v[i] for n, v in many.items()}, X) for i in range(3)])
    with chosen.session("float64", "cpu"):
        mapped = chosen.compile(chosen.vmap(network_function(model), in_axes=(0, None)))
        f = mapped(in_system(chosen, many), chosen.asarray(X))
        np.testing.assert_allclose(chosen.to_numpy(f), expected, rtol=1e-12)


def test_jacobians_are_equal_between_the_systems_and_to_differences() -> None:
    jacobians = {}
    for ppl in ("numpyro", "pyro"):
        chosen = system(ppl)
        with chosen.session("float64", "cpu"):
            x = chosen.asarray(X)
            function = chosen.transforms.jacrev(lambda w, x=x: network_function(model)(w, x))
            result = function(in_system(chosen, W))
            jacobians[ppl] = {name: chosen.to_numpy(value) for name, value in result.items()}
    for name, value in W.items():
        a, b = jacobians["numpyro"][name], jacobians["pyro"][name]
        assert a.shape == (ROWS, 2, *value.shape)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    step = 1e-6
    for index in np.ndindex(2, 2):
        plus, minus = W["hidden1.weight"].copy(), W["hidden1.weight"].copy()
        plus[index] += step
        minus[index] -= step
        difference = forward(W | {"hidden1.weight": plus}, X) - forward(W | {"hidden1.weight": minus}, X)
        np.testing.assert_allclose(
            jacobians["pyro"]["hidden1.weight"][(slice(None), slice(None), *index)],
            difference / (2 * step),
            atol=1e-8,
        )


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ModelError, match=r"site 'output\.bias'"):
        network_function(model)({name: value for name, value in W.items() if name != "output.bias"}, X)


def test_substitute_fixes_some_sites() -> None:
    def half(x: Any, y: Any = None) -> None:
        with Substitute({"noise": 7.0}):
            model(x, y)

    assert network_output(half, W, X).likelihood.noise == 7.0


# --- inputs and perturbations of linear maps --------------------------------------------------------


def test_inputs_of_linear_maps_are_recorded() -> None:
    output, inputs = recorded_linear(model, W, X)
    h0 = np.tanh(X @ W["hidden0.weight"] + W["hidden0.bias"])
    h1 = np.tanh(h0 @ W["hidden1.weight"] + W["hidden1.bias"])
    assert list(inputs) == ["hidden0", "hidden1", "output"]
    for name, expected in (("hidden0", X), ("hidden1", h0), ("output", h1)):
        assert len(inputs[name]) == 1
        np.testing.assert_allclose(inputs[name][0], expected, rtol=1e-13)
    np.testing.assert_allclose(output.f, forward(W, X), rtol=1e-13)


def test_a_perturbation_is_added_to_what_leaves_a_map(rng: np.random.Generator) -> None:
    added = rng.normal(size=(ROWS, WIDTH))
    output, inputs = recorded_linear(model, W, X, {"hidden0": {0: added}})
    h0 = np.tanh(X @ W["hidden0.weight"] + W["hidden0.bias"] + added)
    np.testing.assert_allclose(inputs["hidden1"][0], h0, rtol=1e-13)
    assert not np.allclose(output.f, forward(W, X))


def test_each_use_of_a_map_has_its_own_perturbation(rng: np.random.Generator) -> None:
    def twice(x: Any, y: Any = None) -> None:
        weight = bnn.sample("w", dist.Normal().expand((FEATURES, FEATURES)).to_event())
        h = bnn.linear("map", bnn.linear("map", x, weight), weight)
        bnn.observe(y, h, likelihoods.Gaussian(1.0))

    w = rng.normal(size=(FEATURES, FEATURES))
    first, second = rng.normal(size=(2, ROWS, FEATURES))
    output, inputs = recorded_linear(twice, {"w": w}, X, {"map": {0: first, 1: second}})
    np.testing.assert_allclose(inputs["map"][1], X @ w + first)
    np.testing.assert_allclose(output.f, (X @ w + first) @ w + second)


def backward(f_bar: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients in the pre-activations of all three layers, by hand, from the gradient in f."""
    h0 = np.tanh(X @ W["hidden0.weight"] + W["hidden0.bias"])
    h1 = np.tanh(h0 @ W["hidden1.weight"] + W["hidden1.bias"])
    s1 = (f_bar @ W["output.weight"].T) * (1 - h1**2)
    s0 = (s1 @ W["hidden1.weight"].T) * (1 - h0**2)
    return {"hidden0": s0, "hidden1": s1, "output": f_bar}


def zeros(chosen: Any) -> dict[str, Any]:
    shapes = {"hidden0": WIDTH, "hidden1": WIDTH, "output": 2}
    return {name: {0: chosen.asarray(np.zeros((ROWS, size)))} for name, size in shapes.items()}


def test_the_gradient_in_a_perturbation_is_that_in_the_pre_activation(ppl: str) -> None:
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        x, w = chosen.asarray(X), in_system(chosen, W)

        def loss(perturbations: Any) -> Any:
            return 0.5 * ops.sum(recorded_linear(model, w, x, perturbations)[0].f ** 2)

        _, gradient = chosen.compile(chosen.value_and_grad(loss))(zeros(chosen))
        gradient = {name: chosen.to_numpy(value[0]) for name, value in gradient.items()}
    for name, expected in backward(forward(W, X)).items():
        np.testing.assert_allclose(gradient[name], expected, rtol=1e-11, atol=1e-13, err_msg=name)


def test_factors_of_one_row_give_the_block_of_its_gauss_newton_matrix(ppl: str) -> None:
    """For one row the Kronecker product of input and output factors is exact: J'FJ = (a a') x (S'FS)."""
    chosen = system(ppl)
    one = X[:1]
    with chosen.session("float64", "cpu"):
        w = in_system(chosen, W)

        def eta_of_perturbations(perturbations: Any, x: Any) -> Any:
            return recorded_linear(model, w, x[None], perturbations)[0].predictor[0]

        def eta_of_weight(weight: Any, x: Any) -> Any:
            return network_output(model, {**w, "hidden1.weight": weight}, x[None]).predictor[0]

        def inputs(x: Any) -> Any:
            return recorded_linear(model, w, x[None])[1]["hidden1"][0][0]

        x = chosen.asarray(X)
        zero = {name: {0: value[0][:1]} for name, value in zeros(chosen).items()}
        slopes = chosen.compile(
            chosen.vmap(chosen.transforms.jacrev(eta_of_perturbations), in_axes=(None, 0))
        )(zero, x)
        full = chosen.compile(chosen.vmap(chosen.transforms.jacrev(eta_of_weight), in_axes=(None, 0)))(
            w["hidden1.weight"], x
        )
        entering = chosen.to_numpy(chosen.compile(chosen.vmap(inputs))(x))
        s = chosen.to_numpy(slopes["hidden1"][0])[:, :, 0]
        j = chosen.to_numpy(full)
    eta = np.concatenate([forward(W, one), np.full((1, 2), np.log(0.3))], axis=1)
    fisher = likelihoods.Gaussian(None).fisher(eta)[0]
    for row in range(ROWS):
        block = j[row].reshape(4, -1).T @ fisher @ j[row].reshape(4, -1)
        kronecker = np.kron(np.outer(entering[row], entering[row]), s[row].T @ fisher @ s[row])
        np.testing.assert_allclose(block, kronecker, rtol=1e-10, atol=1e-12)


# --- array functions --------------------------------------------------------------------------------

EXTREME = np.concatenate(
    [
        np.array([-800.0, -40.0, -20.0, -1e-9, 0.0, 1e-9, 20.0, 40.0, 800.0]),
        np.random.default_rng(407).normal(size=15),
    ]
)
ELEMENTWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "tanh": np.tanh,
    "sigmoid": scipy.special.expit,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * norm.cdf(x),
    "silu": lambda x: x * scipy.special.expit(x),
    "softplus": lambda x: np.where(x > 30, x, np.log1p(np.exp(np.minimum(x, 30)))),
    "exp": lambda x: np.exp(np.minimum(x, 700)),
}
ROWWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": lambda x: scipy.special.softmax(x, axis=-1),
    "log_softmax": lambda x: scipy.special.log_softmax(x, axis=-1),
    "logsumexp": lambda x: scipy.special.logsumexp(x, axis=-1),
    "sum": np.sum,
    "mean": np.mean,
    "ones_like": np.ones_like,
    "zeros_like": np.zeros_like,
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *ROWWISE])
def test_array_functions_mean_the_same_everywhere(name: str) -> None:
    function = getattr(ops, name)
    x = np.minimum(EXTREME, 700) if name == "exp" else EXTREME
    expected = ELEMENTWISE[name](x) if name in ELEMENTWISE else ROWWISE[name](x.reshape(4, 6))
    x = x if name in ELEMENTWISE else x.reshape(4, 6)
    np.testing.assert_allclose(function(x), expected, rtol=1e-12, atol=1e-16)
    for ppl in ("numpyro", "pyro"):
        chosen = system(ppl)
        with chosen.session("float64", "cpu"):
            value = chosen.to_numpy(function(chosen.asarray(x)))
            assert value.dtype == np.float64
            np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-16)
            _, slope = chosen.value_and_grad(lambda a: ops.sum(function(a)))(chosen.asarray(x))
            assert np.isfinite(chosen.to_numpy(slope)).all()
        with chosen.session("float32", "cpu"):
            assert chosen.to_numpy(function(chosen.asarray(x))).dtype == np.float32


def test_probabilities_sum_to_one_in_single_precision() -> None:
    """Also where logits are large and near each other, as those of a network that was sampled under wide priors."""
    rng = np.random.default_rng(0)
    x = (300.0 + rng.normal(size=(200, 1)) * 50.0 + rng.normal(size=(200, 10))).astype(np.float32)
    wanted = scipy.special.softmax(x.astype(np.float64), axis=-1)
    values = [ops.softmax(x)]
    for ppl in ("numpyro", "pyro"):
        chosen = system(ppl)
        with chosen.session("float32", "cpu"):
            values.append(chosen.to_numpy(ops.softmax(chosen.asarray(x))))
    for found in values:
        assert found.dtype == np.float32
        np.testing.assert_allclose(found.astype(np.float64).sum(-1), 1.0, rtol=0.0, atol=2e-6)
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-12)


def test_slopes_of_activations_are_equal_between_the_systems() -> None:
    for name, function in ops.ACTIVATIONS.items():
        slopes = []
        for ppl in ("numpyro", "pyro"):
            chosen = system(ppl)
            with chosen.session("float64", "cpu"):
                _, slope = chosen.value_and_grad(lambda a, f=function: ops.sum(f(a)))(chosen.asarray(EXTREME))
                slopes.append(chosen.to_numpy(slope))
        np.testing.assert_allclose(slopes[0], slopes[1], rtol=1e-11, atol=1e-14, err_msg=name)


def test_functions_of_several_arrays(rng: np.random.Generator, ppl: str) -> None:
    chosen = system(ppl)
    a, b = rng.normal(size=(2, 3, 4))
    with chosen.session("float64", "cpu"):
        s, t = chosen.asarray(a), chosen.asarray(b)
        for value, expected in (
            (ops.matmul(s, t.T), a @ b.T),
            (ops.stack([s, t]), np.stack([a, b], -1)),
            (ops.stack([s, t], 0), np.stack([a, b])),
            (ops.concatenate([s, t], 0), np.concatenate([a, b])),
            (ops.concatenate([s, t]), np.concatenate([a, b], -1)),
            (ops.broadcast_to(s, (2, 3, 4)), np.broadcast_to(a, (2, 3, 4))),
            (ops.diagonal_matrix(s), np.stack([np.diag(row) for row in a])),
            (ops.sum(s, 1), a.sum(1)),
            (ops.mean(s, 0), a.mean(0)),
            (ops.asarray(2.5, like=s), np.array(2.5)),
            (ops.asarray(b, like=s), b),
            (ops.log(ops.exp(s)), a),
            (ops.sqrt(s**2), np.abs(a)),
            (ops.maximum(s, t), np.maximum(a, b)),
            (ops.full_like(s, 2.0), np.full_like(a, 2.0)),
            (ops.in_floats(a > 0, like=s), (a > 0).astype(float)),
            (ops.segment_sum(s, np.array([2, 0, 2]), 4), np.stack([a[1], 0 * a[0], a[0] + a[2], 0 * a[0]])),
        ):
            np.testing.assert_allclose(chosen.to_numpy(value), expected, rtol=1e-13)
    assert ops.exp(0.0) == 1.0
    assert ops.log(1) == 0.0
    assert ops.sqrt(4) == 2.0


def test_equal_entries_share_the_derivative_of_their_maximum(ppl: str) -> None:
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        x = chosen.asarray(np.array([1.0, 2.0, 3.0]))
        _, slope = chosen.value_and_grad(lambda a: ops.sum(ops.maximum(a, ops.full_like(x, 2.0))))(x)
        np.testing.assert_array_equal(chosen.to_numpy(slope), [0.0, 0.5, 1.0])


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_goes_along_time(rng: np.random.Generator, ppl: str, reverse: bool, unrolled: bool) -> None:
    chosen = system(ppl)
    a = rng.normal(size=(2, 5, 3))
    wanted = np.cumsum(a[:, ::-1], 1)[:, ::-1] if reverse else np.cumsum(a, 1)

    def step(state: Any, now: Any) -> Any:
        total = state[0] + now[0]
        return (total,), total

    with chosen.session("float64", "cpu"):
        x = chosen.asarray(a)
        found = ops.scan(step, (ops.zeros_like(x[:, 0]),), (x,), reverse, unrolled)
        np.testing.assert_allclose(chosen.to_numpy(found), wanted, rtol=1e-13, atol=1e-14)
    plain = ops.scan(step, (np.zeros((2, 3)),), (a,), reverse, unrolled)
    np.testing.assert_allclose(plain, wanted, rtol=1e-13, atol=1e-14)


def test_numbers_are_looked_at_where_they_are_there(ppl: str) -> None:
    chosen = system(ppl)
    seen = []
    with chosen.session("float64", "cpu"):
        x = chosen.asarray(np.arange(3.0))
        chosen.compile(chosen.vmap(lambda a: seen.append(ops.concrete(a)) or a))(x)
        np.testing.assert_array_equal(ops.concrete(x), np.arange(3.0))
    assert seen == [None]


def test_a_handler_says_whether_it_sees_maps() -> None:
    with NetworkFunction({}) as run:
        assert isinstance(run, NetworkFunction)
        assert not maps_are_seen()
        with Substitute({}):
            assert not maps_are_seen()
            # One that nobody knows may look at anything.
            with Handler():
                assert maps_are_seen()
        run.likelihood = likelihoods.Gaussian()


# --- layers -----------------------------------------------------------------------------------------


class Describe(Handler):
    """Answers each sample with ones and keeps what was asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def process(self, msg: Message) -> None:
        if msg.kind in ("sample", "param"):
            given = msg.arguments.get("distribution", msg.arguments.get("init"))
            self.asked[msg.name] = given
            msg.answer(np.ones(given.shape))


def asked(action: Callable[[], Any]) -> dict[str, Any]:
    with Describe() as describe:
        action()
    assert isinstance(describe, Describe)
    return describe.asked


def test_layers_have_their_names_shapes_and_scales() -> None:
    sites = asked(lambda: bnn.mlp(X, [WIDTH, 2]))
    assert {name: site.shape for name, site in sites.items()} == {
        "hidden0.weight": (FEATURES, WIDTH),
        "hidden0.bias": (WIDTH,),
        "output.weight": (WIDTH, 2),
        "output.bias": (2,),
    }
    scales = {name: site.arguments["scale"] for name, site in sites.items()}
    assert scales["hidden0.weight"] == pytest.approx(FEATURES**-0.5)
    assert scales["output.weight"] == pytest.approx(WIDTH**-0.5)
    assert scales["hidden0.bias"] == scales["output.bias"] == 1.0
    assert all(site.event_dims == len(site.shape) for site in sites.values())


def test_priors_may_differ_between_layers_and_for_biases() -> None:
    each = [priors.Laplace(), priors.Point()]
    sites = asked(lambda: bnn.mlp(X, [WIDTH, 2], prior=each, bias=priors.Normal(0.0, 3.0)))
    assert [site.family for site in sites.values()] == ["Laplace", "Normal", "Normal", "Normal"]
    assert sites["hidden0.bias"].arguments["scale"] == 3.0
    assert list(asked(lambda: bnn.mlp(X, [WIDTH, 2], bias=False))) == ["hidden0.weight", "output.weight"]
    sites = asked(
        lambda: bnn.mlp(X, [WIDTH, 3, 2], prior=priors.Laplace(), bias=[True, False, priors.Normal()])
    )
    assert {name: site.family for name, site in sites.items() if name.endswith("bias")} == {
        "hidden0.bias": "Laplace",
        "output.bias": "Normal",
    }
    assert asked(lambda: bnn.dense("a", X, np.int64(2)))["a.weight"].shape == (FEATURES, 2)


@pytest.mark.parametrize(
    ("action", "error", "says"),
    [
        (lambda: bnn.mlp(X, []), ModelError, "at least one width"),
        (lambda: bnn.mlp(X, 5), ModelError, "a list of at least one width; got 5"),
        (lambda: bnn.mlp(X, [3, 1], prior=[priors.Normal()]), ModelError, "2 priors, one per layer; got 1"),
        (
            lambda: bnn.mlp(X, [3, 1], bias=[True]),
            ModelError,
            "2 biases, one per layer; got 1; try one of True",
        ),
        (lambda: bnn.mlp(X, [3, 1], "rellu"), UnknownNameError, "did you mean 'relu'"),
        (lambda: bnn.mlp(X, [3, 1], prior="normal"), ModelError, "a prior; got 'normal'"),
        (lambda: bnn.dense("a", X, 0), ModelError, "positive whole number as width; got 0"),
        (lambda: bnn.dense("a", X, 2.5), ModelError, "got 2.5"),
        (lambda: bnn.dense("a", X, True), ModelError, "got True"),
        (lambda: bnn.dense("a", X[:, 0], 2), ModelError, r"\(N, features\)"),
    ],
)
def test_impossible_layers_are_refused(action: Callable[[], Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        asked(action)


def test_a_function_of_ones_own_is_an_activation() -> None:
    with Describe():
        f = bnn.mlp(X, [2, 1], lambda h: h**2)
    np.testing.assert_allclose(f, 2 * (X.sum(1, keepdims=True) + 1) ** 2 + 1)


# --- likelihoods: shapes are checked, never broadcast -----------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "says"),
    [
        (likelihoods.Gaussian(), (5, 1), (5, 1), r"y of shape \(5,\).*try y\[:, 0\]"),
        (likelihoods.Gaussian(), (5, 1), (4,), r"y of shape \(4,\)"),
        (likelihoods.Gaussian(), (5, 2), (5,), r"y of shape \(5, 2\)"),
        (likelihoods.Gaussian(), (5,), (5,), r"f\[:, None\]"),
        (likelihoods.Gaussian(), (5, 1, 1), (5,), r"\(N, K\)"),
        (likelihoods.Gaussian(np.ones(5)), (5, 1), (5,), "one noise, or one per output"),
        (likelihoods.Gaussian(np.ones((5, 1))), (5, 1), (5,), "one noise, or one per output"),
        (likelihoods.Gaussian(np.ones(3)), (5, 2), (5, 2), "one noise, or one per output"),
        (likelihoods.HeteroscedasticGaussian(), (5, 3), (5,), "even number"),
        (likelihoods.HeteroscedasticGaussian(), (5, 2), (5, 1), r"y\[:, 0\]"),
        (likelihoods.HeteroscedasticGaussian(), (5, 4), (5,), r"y of shape \(5, 2\)"),
        (likelihoods.Bernoulli(), (5, 2), (5,), r"likelihoods\.Categorical\(\)"),
        (likelihoods.Bernoulli(), (5, 1), (5, 1), r"y\[:, 0\]"),
        (likelihoods.Categorical(), (5, 1), (5,), r"likelihoods\.Bernoulli\(\)"),
        (likelihoods.Categorical(), (5, 3), (5, 3), r"y of shape \(5,\)"),
        (likelihoods.Gaussian, (5, 1), (5,), "an instance of a likelihood; got the class Gaussian"),
        ("gaussian", (5, 1), (5,), "an instance of a likelihood; got 'gaussian'"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(likelihood: Any, f: Any, y: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says), NetworkFunction({}):
        bnn.observe(np.zeros(y), np.zeros(f), likelihood)


# --- words in the systems ---------------------------------------------------------------------------


def every_word(x: Any, y: Any = None) -> None:
    slope = bnn.param("slope", 0.5)
    start = bnn.param("start", dist.Normal(0.0, 1.0).expand((2,)).to_event())
    level = bnn.sample("level", dist.Normal(0.0, 1.0))
    with bnn.rows(x.shape[0]):
        first = bnn.sample("first", dist.Normal(0.0, 1.0))
    with bnn.rows(x.shape[0]):
        second = bnn.sample("second", dist.Normal(0.0, 1.0).expand((x.shape[0],)))
    total = bnn.deterministic("total", slope * first + second + level)
    f = bnn.mlp(x, [1], prior=priors.Point()) + total[:, None] + start[0]
    bnn.observe(y, f, likelihoods.Gaussian(1.0))


def test_every_word_has_its_site_in_both_systems(ppl: str) -> None:
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        x, y = chosen.asarray(X), chosen.asarray(X[:, 0])
        program = Program.of(chosen, every_word, x, y, language=True)
        assert {s.name: (s.shape, s.is_param, s.local) for s in program.sites.values()} == {
            "slope": ((), True, False),
            "start": ((2,), True, False),
            "level": ((), False, False),
            "first": ((ROWS,), False, True),
            "second": ((ROWS,), False, True),
            "output.weight": ((FEATURES, 1), True, False),
            "output.bias": ((1,), True, False),
        }
        values = {site.name: 0.5 + np.zeros(site.shape) for site in program.sites.values()}
        sites = {
            site.name: site
            for site in chosen.run(chosen.native(every_word), x, y, values=in_system(chosen, values))
        }
        assert sites["total"].kind == sites["f"].kind == "deterministic"
        np.testing.assert_allclose(chosen.to_numpy(sites["total"].value), np.full(ROWS, 1.25))
        np.testing.assert_allclose(
            chosen.to_numpy(sites["f"].value), 0.5 * X.sum(1, keepdims=True) + 0.5 + 1.25 + 0.5
        )
        drawn = [program.prior_draws(x, y, seed, 3) for seed in (1, 1, 2)]
    for name in program.sites:
        np.testing.assert_array_equal(drawn[0][name], drawn[1][name])
    # A start that is a distribution is drawn each time; a number stays.
    assert len(np.unique(np.concatenate([drawn[0]["start"], drawn[2]["start"]]))) == 12
    np.testing.assert_array_equal(drawn[0]["slope"], 0.5)


def test_a_partial_keeps_its_name_and_signature() -> None:
    import inspect

    native = bnn.as_numpyro(functools.partial(every_word))
    assert native.__name__ == "every_word"
    assert list(inspect.signature(native).parameters)[:2] == ["x", "y"]
