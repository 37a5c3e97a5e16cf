"""Recurrent layers: a state that goes along a sequence.

The part that does not depend on the state is one linear map over all times, `name.input`. The maps of the state are
called once a step under one name, so that whoever records linear maps sees what entered them at each time.

Compilation. JAX compiles a single step and repeats it, unless a handler looks at linear maps: compilation takes as long
for 1000 steps as for 10, and the loop also runs faster than single steps do. Under such a handler (curvature by
factors, Flipout, local reparameterisation, dropout) every step is compiled by itself, which takes time and memory in
proportion to the length, seconds for ten steps and minutes for hundreds; shorter sequences, or features of whole
stretches of time as steps, are the way out. torch compiles nothing and takes the steps one by one in Python. The
numbers are the same in every case.
"""

from __future__ import annotations

from typing import Any

from ppl_bnn.language import ops
from ppl_bnn.language.layers.basic import sequence_mask, sequence_shape, weight_and_bias, whole
from ppl_bnn.language.primitives import linear, maps_are_seen
from ppl_bnn.language.prior_scales import Prior

Arrays = tuple[Any, ...]


def gru(
    name: str,
    x: Any,
    width: int,
    prior: Prior | None = None,
    bias: bool | Prior = True,
    mask: Any = None,
    reverse: bool = False,
) -> Any:
    """Gated recurrent units (Cho et al. 2014, with the reset gate after the map, as cuDNN, torch and Flax have it).

        r = sigmoid(x_t W_r + b_r + h U_r),   z = sigmoid(x_t W_z + b_z + h U_z),
        n = tanh(x_t W_n + b_n + r * (h V + c)),   h_t = (1 - z) * n + z * h,   h_0 = 0.

    Samples from `prior` (default N(0, 1 / fan_in), biases N(0, 1)): `name.input.weight` (I, 3 width) and
    `name.input.bias` (3 width,), W and b in the order r, z, n; `name.state.weight` (width, 2 width), U in the order
    r, z; `name.candidate.weight` (width, width) and `name.candidate.bias` (width,), V and c. torch has a second bias in
    r and z, which only adds to the first and is left out. `bias` is True, False, or a prior of its own.

    mask: (N, T), true (or not zero) where a time is there; elsewhere the state stays as it was, so that the last output
    is that of the last time that is there. reverse: from the end to the beginning.

    x: (N, T, I); result (N, T, width), the states h_t.
    """
    word = f"gru({name!r})"
    width = whole(word, "width", width, 50)
    features = sequence_shape(word, x)[2]
    present = sequence_mask(word, mask, x)
    weight, offset = weight_and_bias(word, f"{name}.input", (features, 3 * width), features, prior, bias)
    gates, _ = weight_and_bias(word, f"{name}.state", (width, 2 * width), width, prior, False)
    candidate, shift = weight_and_bias(word, f"{name}.candidate", (width, width), width, prior, bias)

    def step(states: Arrays, entering: Any) -> Arrays:
        (h,) = states
        both = ops.sigmoid(entering[..., : 2 * width] + linear(f"{name}.state", h, gates))
        reset, update = both[..., :width], both[..., width:]
        recalled = linear(f"{name}.candidate", h, candidate, shift)
        new = ops.tanh(entering[..., 2 * width :] + reset * recalled)
        return ((1.0 - update) * new + update * h,)

    entering = linear(f"{name}.input", x, weight, offset)
    return _states(step, 1, width, entering, present, reverse)


def lstm(
    name: str,
    x: Any,
    width: int,
    prior: Prior | None = None,
    bias: bool | Prior = True,
    mask: Any = None,
    reverse: bool = False,
) -> Any:
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

        i, f, o = sigmoid(x_t W + b + h U),   g = tanh(x_t W_g + b_g + h U_g),
        c_t = f * c + i * g,   h_t = o * tanh(c_t),   h_0 = c_0 = 0.

    Samples from `prior` (default N(0, 1 / fan_in), biases N(0, 1)): `name.input.weight` (I, 4 width) and
    `name.input.bias` (4 width,), and `name.state.weight` (width, 4 width), all in the order i, f, g, o. torch has a
    second bias, which only adds to the first and is left out. `bias` is True, False, or a prior of its own.

    x: (N, T, I); result (N, T, width), the states h_t. mask, reverse: as in `gru`.
    """
    word = f"lstm({name!r})"
    width = whole(word, "width", width, 50)
    features = sequence_shape(word, x)[2]
    present = sequence_mask(word, mask, x)
    weight, offset = weight_and_bias(word, f"{name}.input", (features, 4 * width), features, prior, bias)
    recurrent, _ = weight_and_bias(word, f"{name}.state", (width, 4 * width), width, prior, False)

    def step(states: Arrays, entering: Any) -> Arrays:
        h, c = states
        total = entering + linear(f"{name}.state", h, recurrent)
        enter, forget, new, leave = (total[..., part * width : (part + 1) * width] for part in range(4))
        c = ops.sigmoid(forget) * c + ops.sigmoid(enter) * ops.tanh(new)
        return ops.sigmoid(leave) * ops.tanh(c), c

    entering = linear(f"{name}.input", x, weight, offset)
    return _states(step, 2, width, entering, present, reverse)


def _states(step: Any, count: int, width: int, entering: Any, present: Any, reverse: bool) -> Any:
    """The first of `count` states (N, width) after each time; all begin at zero."""
    first = tuple(ops.zeros_like(entering[:, 0, :width]) for _ in range(count))
    inputs = (entering,) if present is None else (entering, present)

    def along(states: Arrays, now: Arrays) -> tuple[Arrays, Any]:
        new = step(states, now[0])
        if present is not None:
            there = now[1][:, None]
            new = tuple(ops.where(there, after, before) for after, before in zip(new, states, strict=True))
        return new, new[0]

    # A loop hides its steps, which is of no matter where nobody looks at them.
    return ops.scan(along, first, inputs, reverse, unrolled=maps_are_seen())
