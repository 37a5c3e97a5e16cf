"""Layers: compositions of primitives.

Channels are last everywhere: rows (N, C), sequences (N, T, C), images (N, H, W, C). A layer calls its prior as
`prior(name, shape, fan_in)`. Layers with connections in time, across positions or along a graph are in the modules
`recurrent`, `attention` and `graph`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ppl_bnn.core.settings import whole
from ppl_bnn.language import ops
from ppl_bnn.language.layers.declarations import THRESHOLD, Activation, Bias, Layer
from ppl_bnn.language.primitives import conv, linear
from ppl_bnn.language.prior_parts import Prior


def dense(name: str, x: Any, width: int, prior: Prior | None = None, bias: Bias = True) -> Any:
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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     hidden = bnn.ops.tanh(bnn.dense("hidden", x, 3))
    ...     bnn.observe(y, bnn.dense("output", hidden, 1), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('hidden.weight', (4, 3)), ('hidden.bias', (3,)), ('output.weight', (3, 1)), ('output.bias', (1,))]
    """
    layer = Layer("dense", name, prior, bias)
    width = layer.whole("width", width, 50)
    layer.check(len(x.shape) > 1, "inputs of shape (N, features)", f"shape {tuple(x.shape)}", "x[:, None]")
    return layer.linear("", x, width)


# --- convolutions -----------------------------------------------------------------------------------


def images(x: Any) -> Any:
    """Rows of pixels (N, F) as images (N, height, width, 1), row by row.

    The height is the largest divisor of F that is not above sqrt(F), so that 64 pixels are 8 x 8 and 10 are 2 x 5.
    Images (N, H, W, C) and sequences (N, T, C) are returned unchanged.
    """
    if len(x.shape) != 2:
        return x
    rows, pixels = x.shape
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
    bias: Bias = True,
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
    stride : int or tuple of int
        As in `ops.conv2d`.
    padding : str, int or tuple
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

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.conv2d("conv", x, channels=8, kernel=3, stride=2)
    ...     bnn.observe(y, f.mean((1, 2)), bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, np.ones((1, 6, 6, 1))).sites]
    [('conv.weight', (3, 3, 1, 8)), ('conv.bias', (8,))]
    """
    return _convolution(Layer("conv2d", name, prior, bias), 2, x, channels, kernel, stride, padding)


def conv1d(
    name: str,
    x: Any,
    channels: int,
    kernel: int,
    stride: int = 1,
    padding: ops.SequencePadding = "same",
    prior: Prior | None = None,
    bias: Bias = True,
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
    stride : int
        As in `ops.conv1d`.
    padding : str, int or tuple
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

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.conv1d("conv", x, channels=8, kernel=3)
    ...     bnn.observe(y, f.mean(1), bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, np.ones((1, 6, 1))).sites]
    [('conv.weight', (3, 1, 8)), ('conv.bias', (8,))]
    """
    return _convolution(Layer("conv1d", name, prior, bias), 1, x, channels, kernel, stride, padding)


def _convolution(
    layer: Layer, axes: int, x: Any, channels: int, kernel: Any, stride: Any, padding: Any
) -> Any:
    """A convolution along so many axes."""
    channels = layer.whole("channels", channels, 16)
    size, *_ = ops.windows(layer.word, x, kernel, stride, padding, axes)
    weights = layer.weights("", (*size, int(x.shape[-1]), channels))
    return conv(layer.name, x, *weights, stride, padding)


# --- normalisation ----------------------------------------------------------------------------------


def layer_norm(name: str, x: Any, gain: Bias = True, bias: Bias = True, epsilon: float = 1e-5) -> Any:
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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.layer_norm("norm", x), bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('norm.gain', (4,)), ('norm.bias', (4,))]
    """
    layer = Layer("layer_norm", name)
    good = len(x.shape) > 1 and x.shape[-1] > 1
    expected = "inputs (N, ..., C) with at least two channels, over which a variance is taken"
    layer.check(good, expected, f"shape {tuple(x.shape)}", "more channels, or no normalisation")
    layer.check_epsilon(epsilon)
    centred = x - ops.mean(x, -1)[..., None]
    variance = ops.mean(centred * centred, -1)[..., None]
    return layer.scaled(centred / ops.sqrt(variance + epsilon), gain, bias)


def filter_response_norm(
    name: str, x: Any, gain: Bias = True, bias: Bias = True, threshold: Bias = True, epsilon: float = 1e-6
) -> Any:
    """Filter response normalisation with a threshold (Singh and Krishnan 2020).

    Each channel of each row is divided by its root mean square over positions:

        z = x / sqrt(mean of x^2 over positions + epsilon) * gain + bias,   result = max(z, threshold).

    Rows do not interact, unlike in batch normalisation, so a row has one distribution given the weights. The maximum is
    the activation that belongs to this normalisation, because the mean is not subtracted and a relu would cut
    arbitrarily.

    Samples `name.gain` (C,) from N(1, 0.25^2), `name.bias` (C,) from N(0, 1) and `name.threshold` (C,) from N(0,
    0.25^2), close to a relu.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array
        Inputs, (N, H, W, C) or (N, T, C) with at least two positions: over one position the result is the sign of x.
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

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.filter_response_norm("norm", x)
    ...     bnn.observe(y, f.mean((1, 2)), bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, np.ones((1, 4, 4, 3))).sites]
    [('norm.gain', (3,)), ('norm.bias', (3,)), ('norm.threshold', (3,))]
    """
    layer, shape = Layer("filter_response_norm", name), tuple(x.shape)
    good = len(shape) in (3, 4) and math.prod(map(int, shape[1:-1])) > 1
    expected = "(N, H, W, C) or (N, T, C) with at least two places, over which a mean is taken"
    layer.check(good, expected, f"shape {shape}", "bnn.layer_norm, or a smaller stride before it")
    layer.check_epsilon(epsilon)
    square = (x * x).reshape(shape[0], -1, shape[-1])
    size = ops.sqrt(ops.mean(square, 1) + epsilon).reshape(shape[0], *(1,) * (len(shape) - 2), shape[-1])
    result = layer.scaled(x / size, gain, bias)
    cut = layer.draw(layer.site("threshold"), threshold, THRESHOLD, (int(shape[-1]),))
    return result if cut is None else ops.maximum(result, cut)


# --- residual connections ---------------------------------------------------------------------------


def residual(x: Any, branch: Callable[[Any], Any]) -> Any:
    """Residual connection x + branch(x), both of one shape: nothing is broadcast (He et al. 2016).

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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     h = bnn.residual(x, lambda x: bnn.ops.tanh(bnn.dense("hidden", x, 4)))
    ...     bnn.observe(y, bnn.dense("output", h, 1), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('hidden.weight', (4, 4)), ('hidden.bias', (4,)), ('output.weight', (4, 1)), ('output.bias', (1,))]
    """
    added = branch(x)
    wanted, shape = tuple(x.shape), tuple(added.shape)
    advice = "as many channels as enter and stride 1, or bnn.residual_block"
    expected = f"a branch that keeps the shape {wanted}"
    Layer("residual").check(shape == wanted, expected, f"shape {shape}", advice)
    return x + added


def residual_block(
    name: str,
    x: Any,
    channels: int,
    kernel: ops.Pair = 3,
    stride: ops.Pair = 1,
    activation: Activation | None = None,
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

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.residual_block("block", x, channels=2)
    ...     bnn.observe(y, f.mean((1, 2)), bnn.likelihoods.Categorical())
    >>> [site.name for site in bnn.zoo.sketch(model, np.ones((1, 4, 4, 2))).sites]
    ['block.conv0.weight', 'block.norm0.gain', 'block.norm0.bias', 'block.norm0.threshold',
     'block.conv1.weight', 'block.norm1.gain', 'block.norm1.bias', 'block.threshold']
    """
    layer = Layer("residual_block", name)
    shape = tuple(x.shape)
    layer.check(len(shape) in (3, 4), "(N, H, W, C) or (N, T, C)", f"shape {shape}", "bnn.residual")
    convolve = functools.partial(convolution(x), channels=channels, prior=prior, bias=False)
    h = convolve(f"{name}.conv0", x, kernel=kernel, stride=stride)
    h = normalised(f"{name}.norm0", h, activation)
    h = convolve(f"{name}.conv1", h, kernel=kernel)
    h = filter_response_norm(f"{name}.norm1", h, threshold=False)
    if tuple(h.shape) != shape:
        x = convolve(f"{name}.shortcut", x, kernel=1, stride=stride)
    if activation is not None:
        return ops.activation(activation)(h + x)
    return ops.maximum(h + x, layer.draw(layer.site("threshold"), True, THRESHOLD, (int(channels),)))


def convolution(x: Any) -> Callable[..., Any]:
    """The layer for these inputs: `conv1d` for sequences, `conv2d` for images."""
    return conv1d if len(x.shape) == 3 else conv2d


def normalised(name: str, x: Any, activation: Activation | None) -> Any:
    """The filter response normalisation with its thresholds or, where one is given, with an activation after it."""
    if activation is None:
        return filter_response_norm(name, x)
    return ops.activation(activation)(filter_response_norm(name, x, threshold=False))


# --- fixed features ---------------------------------------------------------------------------------


def random_features(x: Any, count: int = 1024, length_scale: Any = 1.0, seed: int = 0) -> Any:
    """Random Fourier features of the Gaussian kernel: a dense layer on them is a Gaussian process.

        phi(x) = sqrt(2 / count) cos(W x / length_scale + b),
        E[phi(x)' phi(x')] = exp(-|x - x'|^2 / (2 length_scale^2)).

    Each row of W is N(0, I), and those of a block of F rows are orthogonal (Yu et al. 2016); b is uniform on 0..2 pi. W
    and b are constants of the model, the same in both systems. With weights N(0, sigma^2) and no bias, a dense layer on
    the features has the prior of a Gaussian process with sigma^2 times that kernel, up to an error of the order of
    1 / sqrt(count). On features of a network that keeps distances, see `priors.SpectralNorm`, it is the last layer of
    SNGP (Liu et al. 2020).

    Parameters
    ----------
    x : array
        Inputs, (N, F).
    count : int
        Number of features.
    length_scale : float or array
        Length scale, in units of x; also one for each input, (F,), or the value of a site.
    seed : int
        Seed of W and b.

    Returns
    -------
    array
        Features, (N, count).

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    - Rahimi and Recht (2007), Random features for large-scale kernel machines.
    - Yu et al. (2016), Orthogonal random features.
    - Liu et al. (2020), Simple and principled uncertainty estimation with deterministic deep learning via distance
      awareness.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     features = bnn.random_features(x, 200, length_scale=0.5)
    ...     f = bnn.dense("output", features, 1, bnn.priors.Normal(0.0, 2.0), bias=False)
    ...     bnn.observe(y, f, bnn.likelihoods.Gaussian(0.1))
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('output.weight', (200, 1))]
    """
    layer = Layer("random_features")
    count = layer.whole("count", count, 1024)
    layer.check(len(x.shape) == 2, "inputs of shape (N, features)", f"shape {tuple(x.shape)}", "x[:, None]")
    layer.check(not whole(0)(seed), "a whole number from 0 as seed", repr(seed), "seed=0")
    if isinstance(length_scale, int | float | list | tuple | np.ndarray):
        given = np.asarray(length_scale, dtype=float)
        good = given.shape in ((), x.shape[1:]) and np.isfinite(given).all() and (given > 0.0).all()
        expected = f"a positive length_scale, or {int(x.shape[1])} of them"
        layer.check(good, expected, repr(length_scale), "length_scale=1.0")
        length_scale = ops.asarray(given, like=x)
    weight, offset = _fourier(int(x.shape[1]), count, seed)
    x, weight, offset = x / length_scale, ops.asarray(weight, like=x), ops.asarray(offset, like=x)
    return math.sqrt(2.0 / count) * ops.cos(ops.matmul(x, weight) + offset)


def _fourier(inputs: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """W' (F, count) and b (count,)."""
    # The only stream that NumPy promises not to change: a stored model has the same features years later.
    rng = np.random.RandomState(seed)
    blocks = []
    for _ in range(math.ceil(count / inputs)):
        q, r = np.linalg.qr(rng.standard_normal((inputs, inputs)))
        # Libraries choose different signs.
        blocks.append(q * np.sign(r.diagonal()) * np.sqrt(rng.chisquare(inputs, inputs)))
    return np.concatenate(blocks, axis=1)[:, :count], rng.uniform(0.0, 2.0 * np.pi, count)


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
        Whether to compute the same numbers as the linear map `name` of one-hot rows, which is visible to
        Kronecker-factored curvature and to the estimators on linear maps. It stores `size` numbers for each symbol of
        the data.

    Returns
    -------
    array
        Vectors, (N, ..., width). An index out of range gives NaN within compiled functions.

    Raises
    ------
    ModelError
        An argument does not fit, or an index is out of range and its value is available.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.embedding("words", x, size=10, width=3)  # (N, T, 3)
    ...     bnn.observe(y, f.mean(1), bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, [[0, 7, 2]]).sites]
    [('words.weight', (10, 3))]
    """
    layer = Layer("embedding", name, prior)
    size, width = layer.whole("size", size, 1000), layer.whole("width", width, 16)
    kind = str(getattr(index, "dtype", type(index).__name__))
    advice = "x.astype(int), or bnn.dense for numbers that measure"
    layer.check("int" in kind, "whole numbers", f"an array of {kind}", advice)
    seen = ops.concrete(index)
    if seen is not None and seen.size:
        least, most = int(seen.min()), int(seen.max())
        good, got = least >= 0 and most < size, f"{least}..{most}"
        layer.check(good, f"numbers 0..{size - 1}", got, f"size={max(most + 1, size)}")
    table = layer.table(size, width)
    if not one_hot:
        return ops.lookup(table, index)
    return linear(name, ops.one_hot(index, size, like=table), table)


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
        Length of the longest sequence, by default the length of x.

    Returns
    -------
    array
        Outputs, of the shape of x.

    Raises
    ------
    ModelError
        An argument does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.learned_positions("positions", x)
    ...     bnn.observe(y, f.mean(1), bnn.likelihoods.Categorical())
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, np.ones((1, 6, 3))).sites]
    [('positions.weight', (6, 3))]
    """
    layer = Layer("learned_positions", name, prior)
    _, positions, channels = layer.sequence(x)
    length = positions if length is None else layer.whole("length", length, positions)
    layer.check(positions <= length, f"at most {length} positions", positions, f"length={positions}")
    return x + layer.table(length, channels)[:positions]
