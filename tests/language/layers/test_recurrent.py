"""Recurrent layers against torch's own, and what handlers see of their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn import likelihoods, ops, priors
from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.handlers import network_function, recorded_linear
from ppl_bnn.language.layers.recurrent import gru, lstm
from ppl_bnn.language.primitives import Handler
from ppl_bnn.language.stochastic_layers import Flipout, shared_weights
from tests.layer_oracles import (
    Substitute,
    asked,
    check,
    of_torch,
    outcome,
    set_parameters,
    through_maps,
    values_of,
)

ROWS, FEATURES, WIDTH = 3, 2, 4
LENGTH = 5


def shapes(cell: str) -> dict[str, tuple[int, ...]]:
    if cell == "lstm":
        return {
            "a.input.weight": (FEATURES, 4 * WIDTH),
            "a.input.bias": (4 * WIDTH,),
            "a.state.weight": (WIDTH, 4 * WIDTH),
        }
    return {
        "a.input.weight": (FEATURES, 3 * WIDTH),
        "a.input.bias": (3 * WIDTH,),
        "a.state.weight": (WIDTH, 2 * WIDTH),
        "a.candidate.weight": (WIDTH, WIDTH),
        "a.candidate.bias": (WIDTH,),
    }


def module_of(cell: str, values: dict[str, np.ndarray]) -> torch.nn.Module:
    """torch's layer at these values; the biases that are left out here are zero there."""
    if cell == "lstm":
        state, second = values["a.state.weight"], np.zeros(4 * WIDTH)
        module: torch.nn.Module = torch.nn.LSTM(FEATURES, WIDTH, batch_first=True, dtype=torch.float64)
    else:
        state = np.concatenate([values["a.state.weight"], values["a.candidate.weight"]], 1)
        second = np.concatenate([np.zeros(2 * WIDTH), values["a.candidate.bias"]])
        module = torch.nn.GRU(FEATURES, WIDTH, batch_first=True, dtype=torch.float64)
    set_parameters(
        module,
        {
            "weight_ih_l0": values["a.input.weight"].T,
            "bias_ih_l0": values["a.input.bias"],
            "weight_hh_l0": state.T,
            "bias_hh_l0": second,
        },
    )
    return module


def expected(
    cell: str, module: Any, output: torch.Tensor, pull: np.ndarray, x: torch.Tensor
) -> dict[str, np.ndarray]:
    """torch's output and gradients in the layout and under the names of this library."""
    found = of_torch(output, pull, {**dict(module.named_parameters()), "x": x})
    state = found["weight_hh_l0"].T
    ours = {
        "output": found["output"],
        "x": found["x"],
        "a.input.weight": found["weight_ih_l0"].T,
        "a.input.bias": found["bias_ih_l0"],
        "a.state.weight": state if cell == "lstm" else state[:, : 2 * WIDTH],
    }
    if cell == "gru":
        ours["a.candidate.weight"] = state[:, 2 * WIDTH :]
        ours["a.candidate.bias"] = found["bias_hh_l0"][2 * WIDTH :]
    return ours


LAYERS: dict[str, Any] = {"gru": gru, "lstm": lstm}


@pytest.mark.parametrize("cell", LAYERS)
def test_a_recurrent_layer_is_that_of_torch(rng: np.random.Generator, cell: str) -> None:
    values = values_of(shapes(cell))
    x, pull = rng.normal(size=(ROWS, LENGTH, FEATURES)), rng.normal(size=(ROWS, LENGTH, WIDTH))
    module, tensor = module_of(cell, values), torch.tensor(x, requires_grad=True)
    wanted = expected(cell, module, module(tensor)[0], pull, tensor)
    check(lambda x: LAYERS[cell]("a", x, WIDTH), values, x, pull, wanted)


@pytest.mark.parametrize("cell", LAYERS)
def test_from_the_end_to_the_beginning(rng: np.random.Generator, cell: str) -> None:
    values = values_of(shapes(cell))
    x, pull = rng.normal(size=(ROWS, LENGTH, FEATURES)), rng.normal(size=(ROWS, LENGTH, WIDTH))
    module, tensor = module_of(cell, values), torch.tensor(x, requires_grad=True)
    output = torch.flip(module(torch.flip(tensor, (1,)))[0], (1,))
    wanted = expected(cell, module, output, pull, tensor)
    check(lambda x: LAYERS[cell]("a", x, WIDTH, reverse=True), values, x, pull, wanted)


@pytest.mark.parametrize("cell", LAYERS)
def test_a_state_stays_where_the_mask_has_no_time(rng: np.random.Generator, cell: str) -> None:
    values = values_of(shapes(cell))
    lengths = [5, 2, 4]
    mask = np.arange(5) < np.array(lengths)[:, None]
    x = rng.normal(size=(ROWS, 5, FEATURES))
    pull = rng.normal(size=(ROWS, 5, WIDTH)) * mask[..., None]
    module, tensor = module_of(cell, values), torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(tensor, lengths, batch_first=True, enforce_sorted=False)
    states, last = module(packed)
    output, _ = torch.nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
    wanted = expected(cell, module, output, pull, tensor)
    # torch has zeros where no time is; here the last state stays.
    last = (last if cell == "gru" else last[0])[0].detach().numpy()
    wanted["output"] = np.where(mask[..., None], wanted["output"], last[:, None])
    check(lambda x: LAYERS[cell]("a", x, WIDTH, mask=mask), values, x, pull, wanted)


@pytest.mark.parametrize("cell", LAYERS)
def test_a_loop_and_single_steps_give_the_same_numbers(rng: np.random.Generator, cell: str) -> None:
    values = values_of(shapes(cell))
    x, pull = rng.normal(size=(ROWS, 3, FEATURES)), rng.normal(size=(ROWS, 3, WIDTH))
    mask = np.arange(3) < np.array([3, 1, 2])[:, None]

    def loop(x: Any) -> Any:
        return LAYERS[cell]("a", x, WIDTH, mask=ops.asarray(mask, like=x), reverse=True)

    def steps(x: Any) -> Any:
        # A handler of which nothing is known may look at every map.
        with Handler():
            return loop(x)

    found = [outcome("numpyro", layer, values, x, pull) for layer in (loop, steps)]
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-12, atol=1e-12)


# --- sites and priors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", LAYERS)
def test_sites_and_priors(rng: np.random.Generator, cell: str) -> None:
    x = rng.normal(size=(ROWS, 3, FEATURES))
    sites = asked(lambda: LAYERS[cell]("a", x, WIDTH))
    assert {name: site.shape for name, site in sites.items()} == shapes(cell)
    scales = {name: site.arguments["scale"] for name, site in sites.items()}
    assert scales["a.input.weight"] == pytest.approx(FEATURES**-0.5)
    assert scales["a.state.weight"] == pytest.approx(WIDTH**-0.5)
    assert scales["a.input.bias"] == 1.0
    bare = asked(lambda: LAYERS[cell]("a", x, WIDTH, prior=priors.Laplace(), bias=False))
    assert [name for name in bare if name.endswith("bias")] == []
    assert {site.family for site in bare.values()} == {"Laplace"}


X = np.zeros((2, 4, 3))


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: gru("a", X, 0), r"gru\('a'\): expected a positive whole number as width; got 0"),
        (lambda: lstm("a", X[0], 2), r"lstm\('a'\): expected sequences of shape \(N, time, channels\)"),
        (lambda: gru("a", X, 2, prior="normal"), "a prior; got 'normal'"),  # pyright: ignore
        (lambda: gru("a", X, 2, mask=np.ones((2, 3))), r"a mask of shape \(2, 4\).*got shape \(2, 3\)"),
        (
            lambda: lstm("a", X, 2, mask=np.arange(8).reshape(2, 4) > 3),
            "a position in every row; got none in row 0",
        ),
    ],
)
def test_impossible_recurrent_layers_are_refused(action: Callable[[], Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        asked(action)


# --- what handlers see --------------------------------------------------------------------------------


def classifier(x: Any, y: Any = None, *, cell: str = "gru") -> None:
    states = LAYERS[cell]("a", x, 2, priors.Normal())
    bnn.observe(y, bnn.dense("output", states[:, -1], 2, priors.Normal()), likelihoods.Categorical())


def of_classifier(cell: str) -> dict[str, np.ndarray]:
    wide = 3 if cell == "gru" else 4
    sites: dict[str, tuple[int, ...]] = {
        "a.input.weight": (3, wide * 2),
        "a.input.bias": (wide * 2,),
        "a.state.weight": (2, 4 if cell == "gru" else 8),
        "output.weight": (2, 2),
        "output.bias": (2,),
    }
    if cell == "gru":
        sites |= {"a.candidate.weight": (2, 2), "a.candidate.bias": (2,)}
    return values_of(sites, 3)


@pytest.mark.parametrize("cell", LAYERS)
def test_each_step_is_recorded(rng: np.random.Generator, cell: str) -> None:
    values, x = of_classifier(cell), rng.normal(size=(ROWS, LENGTH, 3))
    model = lambda x, y=None: classifier(x, y, cell=cell)
    _, inputs = recorded_linear(model, values, x)
    with Substitute(values):
        states = LAYERS[cell]("a", x, 2)
    np.testing.assert_array_equal(inputs["a.input"][0], x)
    before = np.concatenate([np.zeros((ROWS, 1, 2)), states[:, :-1]], 1)
    for name in ("a.state", "a.candidate") if cell == "gru" else ("a.state",):
        np.testing.assert_allclose(np.stack(inputs[name], 1), before, rtol=0, atol=1e-14)
    np.testing.assert_allclose(inputs["output"][0], states[:, -1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("cell", LAYERS)
def test_each_step_is_recorded_in_jax(rng: np.random.Generator, cell: str) -> None:
    # There a loop would hide its steps: the handler makes the layer take them one by one.
    from ppl_bnn.backends.systems import system

    values, x = of_classifier(cell), rng.normal(size=(ROWS, LENGTH, 3))
    model = lambda x, y=None: classifier(x, y, cell=cell)
    _, wanted = recorded_linear(model, values, x)
    chosen = system("numpyro")
    with chosen.session("float64", "cpu", 1):
        given = {name: chosen.asarray(value) for name, value in values.items()}
        found = chosen.compile(lambda given, x: recorded_linear(model, given, x)[1])(given, chosen.asarray(x))
        for name, parts in wanted.items():
            assert len(found[name]) == len(parts)
            for ours, part in zip(found[name], parts, strict=True):
                np.testing.assert_allclose(chosen.to_numpy(ours), part, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", LAYERS)
def test_the_jacobian_through_recorded_maps_is_that_of_automatic_differentiation(
    rng, cell: str, ppl: str
) -> None:
    model = lambda x, y=None: classifier(x, y, cell=cell)
    served, ours, wanted = through_maps(ppl, model, rng.normal(size=(4, 2, 3)), np.array([0, 1, 1, 0]))
    assert served == set(of_classifier(cell))
    np.testing.assert_allclose(ours, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("cell", LAYERS)
def test_flipout_gives_each_row_one_draw_at_all_times(rng: np.random.Generator, cell: str) -> None:
    """Row n is the network at mu + (w - mu) r_n s_n', with the signs that the handler drew."""
    loc, values = of_classifier(cell), values_of({k: v.shape for k, v in of_classifier(cell).items()}, 8)
    rng = np.random.default_rng(2)
    handler = Flipout(loc, lambda shape, like: rng.choice([-1.0, 1.0], size=shape))
    x = rng.normal(size=(ROWS, 4, 3))

    def flipped(x: Any, y: Any = None) -> None:
        with handler:
            classifier(x, y, cell=cell)

    found = network_function(flipped)(values, x)
    for row in range(ROWS):
        own = {}
        for name, value in values.items():
            signs = handler.outer[name][row]
            signs = signs if value.ndim == 1 else np.outer(handler.inner[name][row], signs)
            own[name] = loc[name] + (value - loc[name]) * signs
        single = network_function(lambda x, y=None: classifier(x, y, cell=cell))(own, x[row : row + 1])
        np.testing.assert_allclose(found[row], single[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", LAYERS)
def test_weights_of_a_state_are_known_to_be_shared(rng: np.random.Generator, cell: str, ppl: str) -> None:
    from ppl_bnn.backends.systems import system

    chosen = system(ppl)
    with chosen.session("float64", "cpu", 1):
        values = {name: chosen.asarray(value) for name, value in of_classifier(cell).items()}
        x = chosen.asarray(rng.normal(size=(ROWS, 3, 3)))
        found = shared_weights(lambda x, y=None: classifier(x, y, cell=cell), values, x)
    kinds = {"a.input.weight": "positions", "a.state.weight": "maps"}
    if cell == "gru":
        kinds |= {"a.candidate.weight": "maps", "a.candidate.bias": "maps"}
    assert {site: use.kind for site, use in found.items()} == kinds
