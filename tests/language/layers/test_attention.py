"""Attention and transformer blocks against torch's own, and what handlers see of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.handlers import network_function, recorded_linear
from ppl_bnn.language.layers.attention import attention, transformer_block
from ppl_bnn.language.stochastic_layers import Flipout
from tests.layer_oracles import asked, check, of_torch, set_parameters, through_maps, values_of

ROWS, LENGTH, CHANNELS, HEADS, HIDDEN = 3, 5, 6, 2, 7
PARTS = ("query", "key", "value", "output")
MASK = np.arange(LENGTH) < np.array([5, 2, 4])[:, None]


def attention_shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}.weight": (CHANNELS, CHANNELS) for part in PARTS} | {
        f"{name}.{part}.bias": (CHANNELS,) for part in PARTS
    }


BLOCK: dict[str, tuple[int, ...]] = {
    **{f"b.norm{which}.{part}": (CHANNELS,) for which in (0, 1) for part in ("gain", "bias")},
    **attention_shapes("b.attention"),
    "b.hidden.weight": (CHANNELS, HIDDEN),
    "b.hidden.bias": (HIDDEN,),
    "b.output.weight": (HIDDEN, CHANNELS),
    "b.output.bias": (CHANNELS,),
}


def as_torch(name: str, values: dict[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """The weights of attention under torch's names: queries, keys and values in one matrix (3 C, C)."""
    three = [f"{name}.{part}" for part in PARTS[:3]]
    return {
        f"{prefix}in_proj_weight": np.concatenate([values[f"{each}.weight"].T for each in three]),
        f"{prefix}in_proj_bias": np.concatenate([values[f"{each}.bias"] for each in three]),
        f"{prefix}out_proj.weight": values[f"{name}.output.weight"].T,
        f"{prefix}out_proj.bias": values[f"{name}.output.bias"],
    }


def from_torch(name: str, found: dict[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """The reverse."""
    ours = {
        f"{name}.output.weight": found[f"{prefix}out_proj.weight"].T,
        f"{name}.output.bias": found[f"{prefix}out_proj.bias"],
    }
    for which, part in enumerate(PARTS[:3]):
        at = slice(which * CHANNELS, (which + 1) * CHANNELS)
        ours[f"{name}.{part}.weight"] = found[f"{prefix}in_proj_weight"][at].T
        ours[f"{name}.{part}.bias"] = found[f"{prefix}in_proj_bias"][at]
    return ours


def data(mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and what the output is multiplied by: nothing where the mask has no position."""
    rng = np.random.default_rng(43)
    pull = rng.normal(size=(ROWS, LENGTH, CHANNELS))
    return rng.normal(size=pull.shape), pull if mask is None else pull * mask[..., None]


def masks(mask: np.ndarray | None, causal: bool) -> tuple[Any, Any]:
    """torch's: true where nothing is read."""
    padding = None if mask is None else torch.tensor(~mask)
    return padding, torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if causal else None


@pytest.mark.parametrize(("mask", "causal"), [(None, False), (MASK, False), (MASK, True)])
def test_attention_is_that_of_torch(mask: np.ndarray | None, causal: bool) -> None:
    values = values_of(attention_shapes("a"))
    x, pull = data(mask)
    module = torch.nn.MultiheadAttention(CHANNELS, HEADS, batch_first=True, dtype=torch.float64)
    set_parameters(module, as_torch("a", values))
    tensor = torch.tensor(x, requires_grad=True)
    padding, later = masks(mask, causal)
    output, _ = module(tensor, tensor, tensor, key_padding_mask=padding, attn_mask=later, need_weights=False)
    found = of_torch(output, pull, {**dict(module.named_parameters()), "x": tensor})
    wanted = from_torch("a", found) | {"x": found["x"], "output": found["output"]}
    check(lambda x: attention("a", x, HEADS, mask=mask, causal=causal), values, x, pull, wanted)


@pytest.mark.parametrize(("mask", "causal"), [(None, False), (MASK, True)])
def test_a_transformer_block_is_that_of_torch(mask: np.ndarray | None, causal: bool) -> None:
    values = values_of(BLOCK)
    x, pull = data(mask)
    module = torch.nn.TransformerEncoderLayer(
        CHANNELS,
        HEADS,
        HIDDEN,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    names = {
        "linear1.weight": "b.hidden.weight",
        "linear1.bias": "b.hidden.bias",
        "linear2.weight": "b.output.weight",
        "linear2.bias": "b.output.bias",
        "norm1.weight": "b.norm0.gain",
        "norm1.bias": "b.norm0.bias",
        "norm2.weight": "b.norm1.gain",
        "norm2.bias": "b.norm1.bias",
    }
    plain = {theirs: values[ours].T for theirs, ours in names.items()}
    set_parameters(module, plain | as_torch("b.attention", values, "self_attn."))
    tensor = torch.tensor(x, requires_grad=True)
    padding, later = masks(mask, causal)
    output = module(tensor, src_mask=later, src_key_padding_mask=padding)
    found = of_torch(output, pull, {**dict(module.named_parameters()), "x": tensor})
    wanted = from_torch("b.attention", found, "self_attn.") | {"x": found["x"], "output": found["output"]}
    wanted |= {ours: found[theirs].T for theirs, ours in names.items()}
    check(
        lambda x: transformer_block("b", x, HEADS, HIDDEN, mask=mask, causal=causal), values, x, pull, wanted
    )


def test_sites_and_priors(rng: np.random.Generator) -> None:
    x = rng.normal(size=(ROWS, LENGTH, CHANNELS))
    sites = asked(lambda: transformer_block("b", x, HEADS, HIDDEN))
    assert {name: site.shape for name, site in sites.items()} == BLOCK
    for name, site in sites.items():
        fan_in = {"b.output.weight": HIDDEN}.get(name, CHANNELS)
        wanted = fan_in**-0.5 if name.endswith("weight") else 0.25 if name.endswith("gain") else 1.0
        assert site.arguments["scale"] == pytest.approx(wanted), name
        assert site.arguments["loc"] == (1.0 if name.endswith("gain") else 0.0)
    assert asked(lambda: transformer_block("b", x, HEADS))["b.hidden.weight"].shape == (
        CHANNELS,
        4 * CHANNELS,
    )
    bare = asked(lambda: attention("a", x, HEADS, prior=priors.Laplace(), bias=False))
    assert list(bare) == [f"a.{part}.weight" for part in PARTS]
    assert {site.family for site in bare.values()} == {"Laplace"}


X = np.zeros((2, 4, 6))


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: attention("a", X, 4), r"attention\('a'\): expected channels that 4 heads.*got 6.*heads=2"),
        (lambda: attention("a", X, 0), "a positive whole number as heads; got 0"),
        (lambda: attention("a", X[0], 2), r"sequences of shape \(N, time, channels\); got shape \(4, 6\)"),
        (lambda: attention("a", X, 2, mask=np.ones((2, 3))), r"a mask of shape \(2, 4\)"),
        (lambda: attention("a", X, 2, mask=np.zeros((2, 4))), "a position in every row; got none in row 0"),
        (lambda: attention("a", X, 2, prior="normal"), "a prior; got 'normal'"),  # pyright: ignore
        (
            lambda: transformer_block("b", X, 2, 0),
            r"transformer_block\('b'\): expected a positive whole number",
        ),
        (lambda: transformer_block("b", X[0], 2), r"transformer_block\('b'\): expected sequences"),
    ],
)
def test_impossible_attention_is_refused(action: Callable[[], Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        asked(action)


# --- what handlers see --------------------------------------------------------------------------------


def classifier(x: Any, y: Any = None) -> None:
    h = attention("a", x, 2, priors.Normal(), causal=True)
    bnn.observe(y, bnn.dense("output", bnn.ops.mean(h, 1), 2, priors.Normal()), likelihoods.Categorical())


SITES: dict[str, tuple[int, ...]] = {
    **{f"a.{part}.weight": (4, 4) for part in PARTS},
    **{f"a.{part}.bias": (4,) for part in PARTS},
    "output.weight": (4, 2),
    "output.bias": (2,),
}


def test_all_maps_of_attention_are_recorded(rng: np.random.Generator) -> None:
    values, x = values_of(SITES), rng.normal(size=(ROWS, 3, 4))
    output, inputs = recorded_linear(classifier, values, x)
    assert list(inputs) == [*(f"a.{part}" for part in PARTS), "output"]
    for part in PARTS[:3]:
        np.testing.assert_array_equal(inputs[f"a.{part}"][0], x)
    # What leaves the heads, mapped and averaged, is what enters the last layer.
    left = inputs["a.output"][0] @ values["a.output.weight"] + values["a.output.bias"]
    np.testing.assert_allclose(left.mean(1), inputs["output"][0], rtol=0, atol=1e-14)
    # The first position reads itself alone.
    first = x[:, 0] @ values["a.value.weight"] + values["a.value.bias"]
    np.testing.assert_allclose(inputs["a.output"][0][:, 0], first, rtol=0, atol=1e-14)
    assert output.f.shape == (ROWS, 2)


def test_the_jacobian_through_recorded_maps_is_that_of_automatic_differentiation(
    rng: np.random.Generator, ppl: str
) -> None:
    x, y = rng.normal(size=(4, 3, 4)), np.array([0, 1, 1, 0])
    served, ours, wanted = through_maps(ppl, classifier, x, y)
    assert served == set(SITES)
    np.testing.assert_allclose(ours, wanted, rtol=1e-10, atol=1e-11)


def test_flipout_gives_each_row_one_draw_at_all_positions(rng: np.random.Generator) -> None:
    """Row n is the network at mu + (w - mu) r_n s_n', with the signs that the handler drew."""
    loc, values = values_of(SITES), values_of(SITES, 8)
    rng = np.random.default_rng(2)
    handler = Flipout(loc, lambda shape, like: rng.choice([-1.0, 1.0], size=shape))
    x = rng.normal(size=(ROWS, 3, 4))

    def flipped(x: Any, y: Any = None) -> None:
        with handler:
            classifier(x, y)

    found = network_function(flipped)(values, x)
    for row in range(ROWS):
        own = {}
        for name, value in values.items():
            signs = handler.outer[name][row]
            signs = signs if value.ndim == 1 else np.outer(handler.inner[name][row], signs)
            own[name] = loc[name] + (value - loc[name]) * signs
        single = network_function(classifier)(own, x[row : row + 1])
        np.testing.assert_allclose(found[row], single[0], rtol=0, atol=1e-12)
