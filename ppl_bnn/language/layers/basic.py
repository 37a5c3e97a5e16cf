"""Layers: compositions of primitives.

Channels are last everywhere: rows (N, C), sequences (N, T, C), images (N, H, W, C). A layer calls its prior as
`prior(name, shape, fan_in)`. Layers with connections in time, across positions or along a graph are in the modules
`recurrent`, `attention` and `graph`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from ppl_bnn.core.errors import ModelError
from ppl_bnn.language import ops
from ppl_bnn.language.primitives import conv, linear
from ppl_bnn.language.prior_scales import Prior
from ppl_bnn.language.priors import Normal

# 1 within a factor of about two, and positive: a gain of the other sign would only reverse a unit.
GAIN = Normal(1.0, 0.25)
OFFSET = Normal(0.0, 1.0)


def dense(name: str, x: Any, width: int, prior: Prior | None = None, bias: bool | Prior = True) -> Any:
    """The fully connected layer `x @ W + b`.

    Samples `name.weight` (fan_in, width) and `name.bias` (width,), then calls `linear(name, x, W, b)`.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Inputs, (..., fan_in).
    width : int
        Number of outputs.
    prior : Prior, optional
        Prior of the weight and the bias, by default N(0, 1 / fan_in).
    bias : bool or Prior
        Whether there is a bias, or a prior of its own.

    Returns
    -------
    array
        Outputs, (..., width).

    Raises
    ------
    ModelError
        An argument does not fit.
    """
    width = whole(f"dense({name!r})", "width", width, 50)
    if len(x.shape) < 2:
        raise ModelError.of(
            f"dense({name!r})", "inputs of shape (N, features)", f"shape {tuple(x.shape)}", "x[:, None]"
        )
    fan_in = int(x.shape[-1])
    weight, offset = weight_and_bias(f"dense({name!r})", name, (fan_in, width), fan_in, prior, bias)
    return linear(name, x, weight, offset)


# --- convolutions -----------------------------------------------------------------------------------


def images(x: Any) -> Any:
    """Rows of pixels (N, F) as images (N, height, width, 1), row by row.

    The images are as nearly square as F allows: the height is the largest divisor of F that is not above sqrt(F), so
    that 64 pixels are 8 x 8 and 10 are 2 x 5. Images (N, H, W, C) and sequences (N, T, C) are returned unchanged.
    """
    if len(x.shape) != 2:
        return x
    rows, pixels = (int(size) for size in x.shape)
    height = next(side for side in range(math.isqrt(pixels), 0, -1) if pixels % side == 0)
    return x.reshape((rows, height, pixels // height, 1))


def conv2d(
    name: str,
    x: Any,
    channels: int,
    kernel: ops.Pair,
    stride: ops.Pair = 1,
    padding: ops.Padding = "same",
    prior: Prior | None = None,
    bias: bool | Prior = True,
) -> Any:
    """The convolutional layer: `channels` filters of size `kernel`.

    Samples `name.weight` (kh, kw, C, channels) and `name.bias` (channels,), then calls `conv(name, x, weight, bias,
    stride, padding)`.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Images, (N, H, W, C), channels last in both systems.
    channels : int
        Number of filters.
    kernel : int or tuple of int
        Size of the filters.
    stride, padding
        As in `ops.conv2d`.
    prior : Prior, optional
        Prior of the weight and the bias, by default N(0, 1 / fan_in) with fan_in = kh * kw * C.
    bias : bool or Prior
        Whether there is a bias, or a prior of its own.

    Returns
    -------
    array
        Outputs, (N, H', W', channels).

    Raises
    ------
    ModelError
        An argument does not fit.
    """
    word = f"conv2d({name!r})"
    channels = whole(word, "channels", channels, 16)
    size, *_ = ops.windows(word, x, kernel, stride, padding)
    shape = (*size, int(x.shape[-1]), channels)
    weight, offset = weight_and_bias(word, name, shape, size[0] * size[1] * shape[2], prior, bias)
    return conv(name, x, weight, offset, stride, padding)


def conv1d(
    name: str,
    x: Any,
    channels: int,
    kernel: int,
    stride: int = 1,
    padding: ops.SequencePadding = "same",
    prior: Prior | None = None,
    bias: bool | Prior = True,
) -> Any:
    """The convolutional layer along time.

    Samples `name.weight` (kernel, C, channels) and `name.bias` (channels,), then calls `conv(name, x, weight, bias,
    stride, padding)`.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Sequences, (N, T, C).
    channels : int
        Number of filters.
    kernel : int
        Size of the filters.
    stride, padding
        As in `ops.conv1d`.
    prior : Prior, optional
        Prior of the weight and the bias, by default N(0, 1 / fan_in) with fan_in = kernel * C.
    bias : bool or Prior
        Whether there is a bias, or a prior of its own.

    Returns
    -------
    array
        Outputs, (N, T', channels).

    Raises
    ------
    ModelError
        An argument does not fit.
    """
    word = f"conv1d({name!r})"
    channels = whole(word, "channels", channels, 16)
    _, (_, size), *_ = ops.sequence_as_image(word, x, kernel, stride, padding)
    shape = (size, int(x.shape[-1]), channels)
    weight, offset = weight_and_bias(word, name, shape, size * shape[1], prior, bias)
    return conv(name, x, weight, offset, stride, padding)


# --- normalisation ----------------------------------------------------------------------------------


def layer_norm(
    name: str, x: Any, gain: bool | Prior = True, bias: bool | Prior = True, epsilon: float = 1e-5
) -> Any:
    """Layer normalisation: mean 0 and variance 1 over the channels of each position (Ba et al. 2016).

        result = (x - m) / sqrt(v + epsilon) * gain + bias,   m, v the mean and the variance (over C, not C - 1) of x.

    Samples `name.gain` (C,) from N(1, 0.25^2) and `name.bias` (C,) from N(0, 1).

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Inputs, (..., C) with C at least 2.
    gain : bool or Prior
        Whether there is a gain, or a prior of its own. That prior has its mass around 1, not 0: around 0 the layer
        would be switched off.
    bias : bool or Prior
        Whether there is a bias, or a prior of its own.
    epsilon : float
        Added to the variance.

    Returns
    -------
    array
        Outputs, of the shape of x.

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    Ba et al. (2016), Layer normalization.
    """
    word = f"layer_norm({name!r})"
    if len(x.shape) < 2 or x.shape[-1] < 2:
        raise ModelError.of(
            f"{word}",
            "inputs (N, ..., C) with at least two channels, over which a variance is taken",
            f"shape {tuple(x.shape)}",
            "more channels, or no normalisation",
        )
    _check_epsilon(word, epsilon)
    centred = x - ops.mean(x, -1)[..., None]
    variance = ops.mean(centred * centred, -1)[..., None]
    return _scaled(word, name, centred / ops.sqrt(variance + epsilon), gain, bias)


def filter_response_norm(
    name: str,
    x: Any,
    gain: bool | Prior = True,
    bias: bool | Prior = True,
    threshold: bool | Prior = True,
    epsilon: float = 1e-6,
) -> Any:
    """Filter response normalisation with a threshold (Singh and Krishnan 2020).

    Each channel of each row is divided by its root mean square over positions:

        z = x / sqrt(mean of x^2 over positions + epsilon) * gain + bias,   result = max(z, threshold).

    Rows do not interact, as they do in batch normalisation, so a row has one distribution given the weights. The
    maximum is the thresholded linear unit, the activation that belongs to this normalisation: the mean is not
    subtracted, and a plain relu would cut at an arbitrary value.

    Samples `name.gain` (C,) from N(1, 0.25^2), `name.bias` (C,) from N(0, 1) and `name.threshold` (C,) from N(0,
    0.25^2), close to a relu.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Inputs, (N, H, W, C) or (N, T, C) with at least two positions, because over one position the result is the sign
        of x.
    gain : bool or Prior
        Whether there is a gain, or a prior of its own.
    bias : bool or Prior
        Whether there is a bias, or a prior of its own.
    threshold : bool or Prior
        Whether there is a threshold, or a prior of its own; without a threshold there is no activation.
    epsilon : float
        Added to the mean square.

    Returns
    -------
    array
        Outputs, of the shape of x.

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    Singh and Krishnan (2020), Filter response normalization layer.
    """
    word = f"filter_response_norm({name!r})"
    shape = tuple(x.shape)
    if len(shape) not in (3, 4) or math.prod(map(int, shape[1:-1])) < 2:
        raise ModelError.of(
            f"{word}",
            "(N, H, W, C) or (N, T, C) with at least two places, over which a mean is taken",
            f"shape {shape}",
            "bnn.layer_norm, or a smaller stride before it",
        )
    _check_epsilon(word, epsilon)
    square = (x * x).reshape(shape[0], -1, shape[-1])
    size = ops.sqrt(ops.mean(square, 1) + epsilon).reshape(shape[0], *(1,) * (len(shape) - 2), shape[-1])
    result = _scaled(word, name, x / size, gain, bias)
    cut = _parameter(word, f"{name}.threshold", shape[-1:], threshold, Normal(0.0, 0.25))
    return result if cut is None else ops.maximum(result, cut)


def _scaled(word: str, name: str, x: Any, gain: bool | Prior, bias: bool | Prior) -> Any:
    """x * gain + bias, channel by channel."""
    channels = (int(x.shape[-1]),)
    factor = _parameter(word, f"{name}.gain", channels, gain, GAIN)
    offset = _parameter(word, f"{name}.bias", channels, bias, OFFSET)
    x = x if factor is None else x * factor
    return x if offset is None else x + offset


def _parameter(
    word: str, name: str, shape: tuple[int, ...], given: bool | Prior | None, default: Prior
) -> Any:
    """A parameter for each channel, or None. It is a unit of its own, so its fan_in is 1."""
    _check_prior(word, given)
    if given is False:
        return None
    return (default if given is None or given is True else given)(name, tuple(map(int, shape)), 1)


def _check_epsilon(word: str, epsilon: Any) -> None:
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < float("inf"):
        raise ModelError.of(f"{word}", "a small positive epsilon", repr(epsilon), "epsilon=1e-6")


# --- residual connections ---------------------------------------------------------------------------


def residual(x: Any, branch: Callable[[Any], Any]) -> Any:
    """x + branch(x), both of one shape: nothing is broadcast (He et al. 2016).

    Parameters
    ----------
    x : array
        Inputs.
    branch : callable
        A function that keeps the shape of x.

    Returns
    -------
    array
        Outputs, of the shape of x.

    Raises
    ------
    ModelError
        The branch changes the shape.

    References
    ----------
    He et al. (2016), Deep residual learning for image recognition.
    """
    added = branch(x)
    if tuple(added.shape) != tuple(x.shape):
        raise ModelError.of(
            "residual",
            f"a branch that keeps the shape {tuple(x.shape)}",
            f"shape {tuple(added.shape)}",
            "as many channels as enter and stride 1, or bnn.residual_block",
        )
    return x + added


def residual_block(
    name: str,
    x: Any,
    channels: int,
    kernel: ops.Pair = 3,
    stride: ops.Pair = 1,
    activation: str | Callable[[Any], Any] | None = None,
    prior: Prior | None = None,
) -> Any:
    """Two convolutions with filter response normalisation, and a shortcut (He et al. 2016).

        h = a(FRN(conv0(x))),   result = a(FRN(conv1(h)) + shortcut(x)).

    The shortcut is x itself or, where channels or positions change, a convolution `name.shortcut` with a kernel of 1
    and the same stride. The convolutions have no bias; the normalisations have.

    Samples `name.conv0.weight`, `name.conv1.weight` and, where there is one, `name.shortcut.weight` from `prior`;
    `name.norm0` and `name.norm1` have the priors of `filter_response_norm`.

    Parameters
    ----------
    name : str
        Name of the block.
    x : array
        Inputs, (N, H, W, C) or (N, T, C).
    channels : int
        Number of output channels.
    kernel : int or tuple of int
        Size of the filters.
    stride : int or tuple of int
        Stride of the first convolution.
    activation : str or callable, optional
        The activation a. By default the thresholded linear unit, max(z, threshold), with the thresholds
        `name.norm0.threshold` and `name.threshold`; a given activation replaces both.
    prior : Prior, optional
        Prior of the weights, by default N(0, 1 / fan_in).

    Returns
    -------
    array
        Outputs, (N, H', W', channels) or (N, T', channels) with H' = ceil(H / stride).

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    He et al. (2016), Deep residual learning for image recognition.
    """
    word = f"residual_block({name!r})"
    if len(x.shape) not in (3, 4):
        raise ModelError.of(f"{word}", "(N, H, W, C) or (N, T, C)", f"shape {tuple(x.shape)}", "bnn.residual")
    convolve: Any = conv1d if len(x.shape) == 3 else conv2d
    nonlinearity = None if activation is None else ops.activation(activation)
    h = convolve(f"{name}.conv0", x, channels, kernel, stride, prior=prior, bias=False)
    h = filter_response_norm(f"{name}.norm0", h, threshold=nonlinearity is None)
    h = h if nonlinearity is None else nonlinearity(h)
    h = convolve(f"{name}.conv1", h, channels, kernel, prior=prior, bias=False)
    h = filter_response_norm(f"{name}.norm1", h, threshold=False)
    if tuple(h.shape) != tuple(x.shape):
        x = convolve(f"{name}.shortcut", x, channels, 1, stride, prior=prior, bias=False)
    h = h + x
    if nonlinearity is not None:
        return nonlinearity(h)
    cut = _parameter(word, f"{name}.threshold", (channels,), True, Normal(0.0, 0.25))
    return ops.maximum(h, cut)


# --- tables -----------------------------------------------------------------------------------------


def embedding(
    name: str, index: Any, size: int, width: int, prior: Prior | None = None, one_hot: bool = False
) -> Any:
    """A vector for each of `size` symbols: row `index` of a table.

    Samples the table `name.weight` (size, width).

    Parameters
    ----------
    name : str
        Name of the layer.
    index : array
        Integers 0..size-1 of any shape (N, ...).
    size : int
        Number of symbols.
    width : int
        Length of the vectors.
    prior : Prior, optional
        Prior of the table, by default N(0, 1); one symbol enters at a time, so fan_in is 1.
    one_hot : bool
        With True the same numbers are computed as the linear map `name` of one-hot rows, which is visible to
        Kronecker-factored curvature and to the estimators on linear maps. It stores `size` numbers for each symbol of
        the data; otherwise only the table is differentiated.

    Returns
    -------
    array
        Vectors, (N, ..., width). An index out of range gives NaN within compiled functions.

    Raises
    ------
    ModelError
        An argument does not fit, or an index is out of range and its value is available.
    """
    word = f"embedding({name!r})"
    size, width = whole(word, "size", size, 1000), whole(word, "width", width, 16)
    _check_symbols(word, index, size)
    _check_prior(word, prior)
    table = (Normal(0.0, 1.0) if prior is None else prior)(f"{name}.weight", (size, width), 1)
    if not one_hot:
        return ops.lookup(table, index)
    return linear(name, ops.one_hot(index, size, like=table), table)


def _check_symbols(word: str, index: Any, size: int) -> None:
    seen = ops.concrete(index)
    kind = str(getattr(index, "dtype", type(index).__name__))
    if "int" not in kind:
        raise ModelError.of(
            f"{word}",
            "whole numbers",
            f"an array of {kind}",
            "x.astype(int), or bnn.dense for numbers that measure",
        )
    if seen is not None and seen.size and (seen.min() < 0 or seen.max() >= size):
        raise ModelError.of(
            f"{word}",
            f"numbers 0..{size - 1}",
            f"{seen.min()}..{seen.max()}",
            f"size={max(int(seen.max()) + 1, size)}",
        )


def learned_positions(name: str, x: Any, prior: Prior | None = None, length: int | None = None) -> Any:
    """Add a learned vector to each position, the same in all rows.

    Samples `name.weight` (length, C).

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Sequences, (N, T, C) with T at most `length`.
    prior : Prior, optional
        Prior of the vectors, by default N(0, 1), as for an embedding.
    length : int, optional
        The longest sequence that the model is for, by default the length of x.

    Returns
    -------
    array
        Outputs, of the shape of x.

    Raises
    ------
    ModelError
        An argument does not fit.
    """
    word = f"learned_positions({name!r})"
    shape = sequence_shape(word, x)
    length = shape[1] if length is None else whole(word, "length", length, shape[1])
    if shape[1] > length:
        raise ModelError.of(f"{word}", f"at most {length} positions", str(shape[1]), f"length={shape[1]}")
    _check_prior(word, prior)
    table = (Normal(0.0, 1.0) if prior is None else prior)(f"{name}.weight", (length, shape[2]), 1)
    return x + table[: shape[1]]


# --- helpers shared by layers -----------------------------------------------------------------------


def whole(word: str, what: str, value: Any, advice: int) -> int:
    """A positive integer, checked; `word` is the layer named in errors."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ModelError.of(f"{word}", f"a positive whole number as {what}", repr(value), f"{what}={advice}")
    return operator.index(value)


def sequence_shape(word: str, x: Any) -> tuple[int, int, int]:
    """(N, T, C) of a sequence; raises ModelError for any other shape."""
    shape = tuple(int(size) for size in x.shape)
    if len(shape) != 3 or shape[1] < 1:
        raise ModelError.of(
            f"{word}", "sequences of shape (N, time, channels)", f"shape {shape}", "x[..., None]"
        )
    return shape[0], shape[1], shape[2]


def sequence_mask(word: str, mask: Any, x: Any) -> Any:
    """Booleans (N, T): which positions of x (N, T, C) are present; None if all are.

    A row without any position is refused where the values are available.
    """
    if mask is None:
        return None
    if tuple(getattr(mask, "shape", ())) != tuple(x.shape[:2]):
        raise ModelError.of(
            f"{word}",
            f"a mask of shape {tuple(x.shape[:2])}, one value for each position",
            f"shape {tuple(getattr(mask, 'shape', ()))}",
            "mask=tokens != 0",
        )
    seen = ops.concrete(mask)
    if seen is not None and not (seen != 0).any(-1).all():
        empty = int((~(seen != 0).any(-1)).argmax())
        raise ModelError.of(
            f"{word}", "a position in every row", f"none in row {empty}", "leaving empty rows out"
        )
    return ops.in_floats(mask, like=x) != 0


def _check_prior(word: str, given: Any) -> None:
    if given is not None and not isinstance(given, bool) and not callable(given):
        raise ModelError.of(f"{word}", "a prior", repr(given), "bnn.priors.Normal(0.0, 'fan_in')")


def weight_and_bias(
    word: str, name: str, shape: tuple[int, ...], fan_in: int, prior: Prior | None, bias: bool | Prior
) -> tuple[Any, Any]:
    """`name.weight` of that shape and `name.bias` (or None); `word` is the layer named in errors."""
    for given in (prior, bias):
        _check_prior(word, given)
    prior = prior if prior is not None else Normal(0.0, "fan_in")
    weight = prior(f"{name}.weight", shape, fan_in)
    if bias is False:
        return weight, None
    return weight, (prior if bias is True else bias)(f"{name}.bias", shape[-1:], 1)
