"""Networks: layers in sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ppl_bnn.language import ops
from ppl_bnn.language.layers import basic
from ppl_bnn.language.layers.attention import transformer_block
from ppl_bnn.language.layers.declarations import Activation, Bias, Layer
from ppl_bnn.language.layers.recurrent import lstm
from ppl_bnn.language.prior_parts import Prior


def mlp(
    x: Any,
    widths: Sequence[int],
    activation: Activation = "relu",
    prior: Prior | Sequence[Prior] | None = None,
    bias: Bias | Sequence[Bias] = True,
) -> Any:
    """A multi-layer perceptron; the last of `widths` is the number of outputs.

    Layers are named `hidden0`, `hidden1`, ..., `output`. With a single width it is the linear model.

    Parameters
    ----------
    x : array
        Inputs, (N, features).
    widths : sequence of int
        Widths of the layers.
    activation : str or callable
        Activation of the hidden layers.
    prior : Prior or sequence of Prior, optional
        One prior for all layers, or a list of one per layer.
    bias : bool, Prior or sequence of these
        Whether there is a bias, or a prior of its own, for all layers or as a list of one per layer.

    Returns
    -------
    array
        Outputs, (N, widths[-1]).

    Raises
    ------
    ModelError
        An argument does not fit.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.mlp(x, [20, 1], activation="tanh", prior=bnn.priors.Normal(0.0, "fan_in"))
    ...     bnn.observe(y, f, bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('hidden0.weight', (4, 20)), ('hidden0.bias', (20,)), ('output.weight', (20, 1)), ('output.bias', (1,))]
    """
    layer = Layer("mlp")
    widths = layer.sizes("width", widths, "[50, 1]")

    def for_each(given: Any, what: str, one: str) -> list[Any]:
        """A list has one per layer, anything else is for all."""
        each = list(given) if isinstance(given, list | tuple) else [given] * len(widths)
        expected = f"{len(widths)} {what}, one per layer"
        layer.check(len(each) == len(widths), expected, len(each), f"{one} for all layers")
        return each

    priors = for_each(prior, "priors", "one prior")
    biases = for_each(bias, "biases", "one of True, False or a prior")
    nonlinearity = ops.activation(activation)
    for index, width in enumerate(widths[:-1]):
        x = nonlinearity(basic.dense(f"hidden{index}", x, width, priors[index], biases[index]))
    return basic.dense("output", x, widths[-1], priors[-1], biases[-1])


def cnn(
    x: Any,
    channels: Sequence[int],
    widths: Sequence[int],
    kernel: ops.Pair = 3,
    activation: Activation = "relu",
    prior: Prior | None = None,
    bias: Bias = True,
    pool: Callable[[Any], Any] | None = None,
) -> Any:
    """Convolutional network: convolutions with pooling, then a multi-layer perceptron.

    Each of `channels` gives a convolution `conv0`, `conv1`, ... with "same" padding, its activation, and `pool`; then
    positions and channels are flattened, and `mlp(x, widths)` follows. The last of `widths` is the number of outputs.

    Parameters
    ----------
    x : array
        Images (N, H, W, C), sequences (N, T, C), or rows of pixels (N, F), see `images`.
    channels : sequence of int
        Channels of the convolutions.
    widths : sequence of int
        Widths of the dense layers.
    kernel : int or tuple of int
        Size of the filters.
    activation : str or callable
        Activation of the hidden layers.
    prior : Prior, optional
        Prior of all layers.
    bias : bool or Prior
        Bias of all layers.
    pool : callable, optional
        Pooling, by default the maximum over windows of 2.

    Returns
    -------
    array
        Outputs, (N, widths[-1]).

    Raises
    ------
    ModelError
        An argument does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.cnn(x, channels=[4, 8], widths=[16, 3]), bnn.likelihoods.Categorical())
    >>> bnn.zoo.sketch(model, np.ones((1, 8, 8, 1))).parameters
    915
    """
    channels, x = Layer("cnn").sizes("number of channels", channels, "[16, 32]"), basic.images(x)
    nonlinearity = ops.activation(activation)
    convolve = basic.convolution(x)
    for layer, width in enumerate(channels):
        x = nonlinearity(convolve(f"conv{layer}", x, width, kernel, prior=prior, bias=bias))
        x = ops.max_pool(x, 2) if pool is None else pool(x)
    return mlp(x.reshape(x.shape[0], -1), widths, activation, prior, bias)


def resnet(
    x: Any,
    channels: Sequence[int],
    outputs: int,
    blocks: int = 1,
    kernel: ops.Pair = 3,
    activation: Activation | None = None,
    prior: Prior | None = None,
    bias: Bias = True,
) -> Any:
    """A residual network with filter response normalisation (He et al. 2016; Singh and Krishnan 2020).

    A convolution `stem` with its normalisation `stem.norm`; for each of `channels`, `blocks` residual blocks
    `stage0.block0`, ..., the first of a later stage with stride 2; the mean over all positions; and the layer `output`.
    A network of 6 b + 2 layers as for CIFAR-10 has channels (16, 32, 64) and b blocks.

    Parameters
    ----------
    x : array
        Images (N, H, W, C), sequences (N, T, C), or rows of pixels (N, F), see `images`.
    channels : sequence of int
        Channels of the stages.
    outputs : int
        Number of outputs.
    blocks : int
        Residual blocks per stage.
    kernel : int or tuple of int
        Size of the filters.
    activation : str or callable, optional
        As in `residual_block`, by default thresholded linear units.
    prior : Prior, optional
        Prior of all weights.
    bias : bool or Prior
        Bias of the last layer.

    Returns
    -------
    array
        Outputs, (N, outputs).

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    He et al. (2016), Deep residual learning for image recognition.

    Singh and Krishnan (2020), Filter response normalization layer.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.resnet(x, channels=[4, 8], outputs=3), bnn.likelihoods.Categorical())
    >>> bnn.zoo.sketch(model, np.ones((1, 8, 8, 1))).parameters
    1331
    """
    layer = Layer("resnet")
    channels, x = layer.sizes("number of channels", channels, "[16, 32]"), basic.images(x)
    blocks = layer.whole("blocks", blocks, 3)
    x = basic.convolution(x)("stem", x, channels[0], kernel, prior=prior, bias=False)
    x = basic.normalised("stem.norm", x, activation)
    for stage, width in enumerate(channels):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            name = f"stage{stage}.block{block}"
            x = basic.residual_block(name, x, width, kernel, stride, activation, prior)
    places = x.reshape(x.shape[0], -1, x.shape[-1])
    return basic.dense("output", ops.mean(places, 1), outputs, prior, bias)


def lstm_classifier(
    x: Any,
    size: int | None,
    width: int,
    outputs: int,
    prior: Prior | None = None,
    bias: Bias = True,
    mask: Any = None,
) -> Any:
    """A long short-term memory over symbols or features, and a layer on its last state.

    For symbols there is an `embedding` (size, width), which has the prior of that layer; `lstm` and `output` have
    `prior`. Without `size` the inputs are features; each row of an image is a step.

    Parameters
    ----------
    x : array
        Integers 0..size-1, (N, T); or, without `size`, features (N, T, C), images (N, H, W, C) or rows of pixels (N,
        F), see `images`.
    size : int or None
        Number of symbols.
    width : int
        Width of the embedding and of the state.
    outputs : int
        Number of outputs.
    prior : Prior, optional
        Prior of `lstm` and `output`.
    bias : bool or Prior
        Bias of `lstm` and `output`.
    mask : array, optional
        (N, T), true where a step is present.

    Returns
    -------
    array
        Outputs, (N, outputs).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.lstm_classifier(x, size=10, width=4, outputs=3), bnn.likelihoods.Categorical())
    >>> bnn.zoo.sketch(model, [[0, 7, 2]]).parameters
    199
    """
    if size is None:
        h = basic.images(x)
        h = h if len(h.shape) == 3 else h.reshape((h.shape[0], h.shape[1], -1))
    else:
        h = basic.embedding("embedding", x, size, width)
    states = lstm("lstm", h, width, prior, bias, mask)
    return basic.dense("output", states[:, -1], outputs, prior, bias)


def transformer(
    x: Any,
    outputs: int,
    width: int,
    heads: int,
    blocks: int = 1,
    size: int | None = None,
    prior: Prior | None = None,
    bias: Bias = True,
    mask: Any = None,
    causal: bool = False,
    patch: ops.Pair | None = None,
) -> Any:
    """A transformer over a sequence, and a layer on the mean of its outputs.

    Vectors of `width` for symbols (an `embedding` with `size` rows) or, without `size`, from features by a dense layer
    of that name; plus `positions`; `block0`, `block1`, ...; a last `norm`; the mean over the positions that are
    present; and `output`. Tables have the priors of their layers, everything else has `prior`.

    Parameters
    ----------
    x : array
        Integers 0..size-1, (N, T), or features (N, T, C); with `patch`, images (N, H, W, C) or rows of pixels (N, F),
        see `images`.
    outputs : int
        Number of outputs.
    width : int
        Number of channels.
    heads : int
        As in `bnn.attention`.
    blocks : int
        Number of blocks.
    size : int, optional
        Number of symbols.
    prior : Prior, optional
        Prior of all layers but the tables.
    bias : bool or Prior
        Bias of all layers.
    mask : array, optional
        As in `bnn.attention`.
    causal : bool
        As in `bnn.attention`.
    patch : int or tuple of int, optional
        Size of the patches into which images are cut: the positions of the sequence, row by row, with the pixels as
        features (Dosovitskiy et al. 2021). The border is padded with zeros.

    Returns
    -------
    array
        Outputs, (N, outputs).

    Raises
    ------
    ModelError
        An argument does not fit.

    References
    ----------
    Dosovitskiy et al. (2021), An image is worth 16x16 words.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     f = bnn.transformer(x, outputs=3, width=4, heads=2, size=10)
    ...     bnn.observe(y, f, bnn.likelihoods.Categorical())
    >>> bnn.zoo.sketch(model, [[0, 7, 2]]).parameters
    319
    """
    layer = Layer("transformer")
    if patch is not None:
        got = f"size={size!r} and patch={patch!r}"
        layer.check(size is None, "either symbols or patches", got, "size=None")
        x = ops.patches(basic.images(x), patch, patch, "same")
        x = x.reshape((x.shape[0], -1, x.shape[-1]))
    if size is None:
        layer.sequence(x)
        h = basic.dense("embedding", x, width, prior, bias)
    else:
        h = basic.embedding("embedding", x, size, width)
    h = basic.learned_positions("positions", h)
    for block in range(layer.whole("blocks", blocks, 2)):
        h = transformer_block(f"block{block}", h, heads, prior=prior, bias=bias, mask=mask, causal=causal)
    h = basic.layer_norm("norm", h)
    present = layer.mask(mask, h)
    if present is None:
        mean = ops.mean(h, 1)
    else:
        there = ops.in_floats(present, like=h)[..., None]
        mean = ops.sum(h * there, 1) / ops.sum(there, 1)
    return basic.dense("output", mean, outputs, prior, bias)
