"""Recurrent layers: a state that is updated along a sequence.

The part that does not depend on the state is one linear map over all times, `name.input`. The maps of the state are
called once per step under one name, so that a handler that records linear maps sees their inputs at each time.

Notes
-----
JAX compiles a single step and repeats it, unless a handler reads linear maps (Kronecker-factored curvature, Flipout,
local reparameterisation, dropout). Then every step is compiled separately, which takes time and memory in proportion to
the length: seconds for ten steps and minutes for hundreds. Use shorter sequences, or features of longer intervals as
steps, in that case. torch runs the steps one by one in Python. The numbers are the same in every case.
"""

from __future__ import annotations

from typing import Any

from ppl_bnn.language import ops
from ppl_bnn.language.layers.declarations import Bias, Layer
from ppl_bnn.language.primitives import linear, maps_are_seen
from ppl_bnn.language.prior_parts import Prior

Arrays = tuple[Any, ...]


def gru(
    name: str,
    x: Any,
    width: int,
    prior: Prior | None = None,
    bias: Bias = True,
    mask: Any = None,
    reverse: bool = False,
) -> Any:
    """Gated recurrent units, with the reset gate after the map, as in cuDNN, torch and Flax (Cho et al. 2014).

        r = sigmoid(x_t W_r + b_r + h U_r),   z = sigmoid(x_t W_z + b_z + h U_z),
        n = tanh(x_t W_n + b_n + r * (h V + c)),   h_t = (1 - z) * n + z * h,   h_0 = 0.

    Samples `name.input.weight` (I, 3 width) and `name.input.bias` (3 width,), W and b in the order r, z, n;
    `name.state.weight` (width, 2 width), U in the order r, z; `name.candidate.weight` (width, width) and
    `name.candidate.bias` (width,), V and c.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Sequences, (N, T, I).
    width : int
        Width of the state.
    prior : Prior, optional
        Prior of all weights and biases, by default N(0, 1 / fan_in), biases N(0, 1).
    bias : bool or Prior
        Whether there are biases, or a prior of their own.
    mask : array, optional
        (N, T), true (or not zero) where a time is present. Elsewhere the state does not change, so that the last output
        is that of the last time present.
    reverse : bool
        Whether to run from the end to the beginning.

    Returns
    -------
    array
        The states h_t, (N, T, width).

    Raises
    ------
    ModelError
        An argument does not fit.

    Notes
    -----
    torch has a second bias in r and z, which only adds to the first and is left out.

    References
    ----------
    Cho et al. (2014), Learning phrase representations using RNN encoder-decoder for statistical machine translation.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     states = bnn.gru("gru", x, width=3)  # (N, T, 3)
    ...     bnn.observe(y, states[:, -1], bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, np.ones((1, 5, 2))).sites]
    [('gru.input.weight', (2, 9)), ('gru.input.bias', (9,)), ('gru.state.weight', (3, 6)),
     ('gru.candidate.weight', (3, 3)), ('gru.candidate.bias', (3,))]
    """
    layer = Layer("gru", name, prior, bias)
    width, present = _checked(layer, width, x, mask)
    entering = layer.linear("input", x, 3 * width)
    gates, _ = layer.weights("state", (width, 2 * width), False)
    candidate, shift = layer.weights("candidate", (width, width))

    def step(states: Arrays, now: Any) -> Arrays:
        (h,) = states
        both = ops.sigmoid(now[..., : 2 * width] + linear(f"{name}.state", h, gates))
        reset, update = both[..., :width], both[..., width:]
        recalled = linear(f"{name}.candidate", h, candidate, shift)
        new = ops.tanh(now[..., 2 * width :] + reset * recalled)
        return ((1.0 - update) * new + update * h,)

    return _states(step, 1, width, entering, present, reverse)


def lstm(
    name: str,
    x: Any,
    width: int,
    prior: Prior | None = None,
    bias: Bias = True,
    mask: Any = None,
    reverse: bool = False,
) -> Any:
    """Long short-term memory with forget gates (Hochreiter and Schmidhuber 1997; Gers et al. 2000).

        i, f, o = sigmoid(x_t W + b + h U),   g = tanh(x_t W_g + b_g + h U_g),
        c_t = f * c + i * g,   h_t = o * tanh(c_t),   h_0 = c_0 = 0.

    Samples `name.input.weight` (I, 4 width) and `name.input.bias` (4 width,), and `name.state.weight` (width, 4 width),
    all in the order i, f, g, o.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Sequences, (N, T, I).
    width : int
        Width of the state.
    prior : Prior, optional
        Prior of all weights and biases, by default N(0, 1 / fan_in), biases N(0, 1).
    bias : bool or Prior
        Whether there is a bias, or a prior of its own.
    mask : array, optional
        As in `gru`.
    reverse : bool
        As in `gru`.

    Returns
    -------
    array
        The states h_t, (N, T, width).

    Raises
    ------
    ModelError
        An argument does not fit.

    Notes
    -----
    torch has a second bias, which only adds to the first and is left out.

    References
    ----------
    Hochreiter and Schmidhuber (1997), Long short-term memory.

    Gers et al. (2000), Learning to forget.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     states = bnn.lstm("lstm", x, width=3)  # (N, T, 3)
    ...     bnn.observe(y, states[:, -1], bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, np.ones((1, 5, 2))).sites]
    [('lstm.input.weight', (2, 12)), ('lstm.input.bias', (12,)), ('lstm.state.weight', (3, 12))]
    """
    layer = Layer("lstm", name, prior, bias)
    width, present = _checked(layer, width, x, mask)
    entering = layer.linear("input", x, 4 * width)
    recurrent, _ = layer.weights("state", (width, 4 * width), False)

    def step(states: Arrays, now: Any) -> Arrays:
        h, c = states
        total = now + linear(f"{name}.state", h, recurrent)
        enter, forget, new, leave = (total[..., part * width : (part + 1) * width] for part in range(4))
        c = ops.sigmoid(forget) * c + ops.sigmoid(enter) * ops.tanh(new)
        return ops.sigmoid(leave) * ops.tanh(c), c

    return _states(step, 2, width, entering, present, reverse)


def _checked(layer: Layer, width: Any, x: Any, mask: Any) -> tuple[int, Any]:
    """The width, and which times of x (N, T, I) are present."""
    layer.sequence(x)
    return layer.whole("width", width, 50), layer.mask(mask, x)


def _states(step: Any, count: int, width: int, entering: Any, present: Any, reverse: bool) -> Any:
    """The first of `count` states (N, width) after each time; all start at zero."""
    first = tuple(ops.zeros_like(entering[:, 0, :width]) for _ in range(count))
    inputs = (entering,) if present is None else (entering, present)

    def along(states: Arrays, now: Arrays) -> tuple[Arrays, Any]:
        new = step(states, now[0])
        if present is not None:
            there = now[1][:, None]
            new = tuple(ops.where(there, after, before) for after, before in zip(new, states, strict=True))
        return new, new[0]

    # A compiled loop hides its steps from handlers, so it is used only if none of them reads linear maps.
    return ops.scan(along, first, inputs, reverse, unrolled=maps_are_seen())
