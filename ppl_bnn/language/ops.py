"""Array functions with the same meaning in NumPy, torch and JAX.

A model calls `ops.tanh(x)` and never names a system: the function is found from the type of its argument. Functions
such as relu, softplus, logsumexp and softmax have other names or other arguments in each system.

Examples
--------
>>> import numpy as np
>>> from ppl_bnn import ops
>>> x = np.array([[-1.0, 0.0, 1.0]])
>>> ops.relu(x)  # a tensor of torch, or an array of JAX, gives one of its own kind
array([[0., 0., 1.]])
>>> ops.mean(x, 0).shape, ops.concatenate([x, x]).shape, ops.stack([x, x], 0).shape
((3,), (1, 6), (2, 1, 3))
>>> ops.matmul(x, ops.diagonal_matrix(ops.exp(x))[0]).round(1)
array([[-0.4,  0. ,  2.7]])
>>> images = np.ones((2, 8, 8, 3))
>>> ops.conv2d(images, np.ones((3, 3, 3, 4)), padding="same").shape, ops.max_pool(images, 2).shape
((2, 8, 8, 4), (2, 4, 4, 3))
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import math
import operator
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ppl_bnn.core.errors import ModelError, check_known
from ppl_bnn.core.settings import whole

__all__ = [
    "abs", "activation", "asarray", "avg_pool", "broadcast_to", "concatenate", "concrete", "conv1d", "conv2d",
    "cos", "cumsum", "diagonal_matrix", "einsum", "exp", "flip", "full_like", "gelu", "in_floats", "log",
    "log1p", "log_softmax", "logsumexp", "lookup", "matmul", "max_pool", "maximum", "mean", "namespace",
    "one_hot", "ones_like", "patches", "relu", "scan", "segment_sum", "sigmoid", "silu", "sin", "softmax",
    "softplus", "solve_triangular", "sqrt", "stack", "stop_gradient", "sum", "take_along", "tanh", "where",
    "zeros_like",
]  # fmt: skip

Array = Any
# An image is (N, H, W, C); a kernel and a stride are one number or (height, width).
Pair = int | tuple[int, int]
Padding = str | int | tuple[tuple[int, int], tuple[int, int]]
# A sequence is (N, T, C); zeros on both sides, or (before, after).
SequencePadding = str | int | tuple[int, int]
AnyPadding = Padding | SequencePadding
Arrays = tuple[Array, ...]
# (state, inputs) -> (new state, output).
Step = Callable[[Arrays, Arrays], tuple[Arrays, Array]]


class Uncertain:
    """An array of random numbers, of which moments stand for the values (`moments.py`).

    `mean` is an array of a system; `operations` has the functions that a module of arrays would have.
    """

    mean: Array
    operations: Any


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def namespace(*arrays: Any) -> Any:
    """Module (`torch`, `jax.numpy` or `numpy`) of these arrays; plain numbers count as NumPy."""
    uncertain = [each for each in arrays if isinstance(each, Uncertain)]
    if uncertain:
        return uncertain[0].operations
    if any(map(_is_torch, arrays)):
        return sys.modules["torch"]
    return sys.modules["jax.numpy"] if any(map(_is_jax, arrays)) else np


def _function(arrays: Sequence[Any], torch: str, jax: str, numpy: str | Callable[..., Any]) -> Any:
    """The function of torch or of JAX, by its path there; for NumPy a function, or the address of one of SciPy."""
    xp = namespace(*arrays)
    if xp is np:
        return pkgutil.resolve_name(numpy) if isinstance(numpy, str) else numpy
    if xp.__name__ in ("torch", "moments"):
        return operator.attrgetter(torch)(xp)
    return operator.attrgetter(jax)(sys.modules["jax"])


def asarray(value: Any, like: Array) -> Array:
    """Convert `value` to an array with the library, floating type and device of `like`."""
    if isinstance(value, Uncertain):
        return value
    like = like.mean if isinstance(like, Uncertain) else like
    xp = namespace(like)
    if xp.__name__ == "torch":
        if _is_torch(value):
            return value
        return xp.as_tensor(value, dtype=like.dtype if like.is_floating_point() else None, device=like.device)
    if xp.__name__ == "jax.numpy" and not _is_jax(value):
        return xp.asarray(value, dtype=like.dtype if xp.issubdtype(like.dtype, xp.floating) else None)
    return xp.asarray(value)


def matmul(a: Array, b: Array) -> Array:
    """Matrix product over the last two axes."""
    return a @ b


def exp(x: Array) -> Array:
    """Elementwise exponential, also of a plain number."""
    return math.exp(x) if isinstance(x, int | float) else namespace(x).exp(x)


def log(x: Array) -> Array:
    """Elementwise natural logarithm, also of a plain number."""
    return math.log(x) if isinstance(x, int | float) else namespace(x).log(x)


def sqrt(x: Array) -> Array:
    """Elementwise square root, also of a plain number."""
    return math.sqrt(x) if isinstance(x, int | float) else namespace(x).sqrt(x)


def sin(x: Array) -> Array:
    """Elementwise sine."""
    return namespace(x).sin(x)


def cos(x: Array) -> Array:
    """Elementwise cosine."""
    return namespace(x).cos(x)


def abs(x: Array) -> Array:
    """Elementwise absolute value."""
    return namespace(x).abs(x)


def tanh(x: Array) -> Array:
    """Elementwise hyperbolic tangent."""
    return namespace(x).tanh(x)


def sigmoid(x: Array) -> Array:
    """Logistic function, 1 / (1 + exp(-x)), without overflow."""
    return _function([x], "sigmoid", "nn.sigmoid", lambda x: np.exp(-np.logaddexp(0.0, -x)))(x)


def relu(x: Array) -> Array:
    """Rectified linear unit, max(x, 0), with derivative 0 at 0 in both systems."""
    return _function([x], "relu", "nn.relu", lambda x: np.maximum(x, 0.0))(x)


def gelu(x: Array) -> Array:
    """Gaussian error linear unit: x times the standard normal distribution function, in the exact form."""
    if isinstance(x, Uncertain):
        return x.operations.gelu(x)
    if _is_jax(x):
        return sys.modules["jax"].nn.gelu(x, approximate=False)
    if _is_torch(x):
        return sys.modules["torch"].nn.functional.gelu(x)
    return x * pkgutil.resolve_name("scipy.special:ndtr")(x)


def erf(x: Array) -> Array:
    """Error function."""
    return _function([x], "erf", "scipy.special.erf", "scipy.special:erf")(x)


def silu(x: Array) -> Array:
    """Sigmoid linear unit, x times sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """Softplus, log(1 + exp(x)), without overflow."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        # torch's own softplus is linear above a threshold; logaddexp is smooth.
        return xp.logaddexp(x, xp.zeros((), dtype=x.dtype, device=x.device))
    return xp.logaddexp(x, 0.0)


def softmax(x: Array) -> Array:
    """Softmax, exp(x) / sum(exp(x)) over the last axis."""
    return exp(log_softmax(x))


def log_softmax(x: Array) -> Array:
    """Logarithm of `softmax`: x - logsumexp(x) over the last axis.

    Notes
    -----
    The largest x is subtracted first. Without that, x of size 100 in float32 would give probabilities whose sum differs
    from 1 by 1e-5.
    """
    return _function([x], "log_softmax", "nn.log_softmax", "scipy.special:log_softmax")(x, -1)


def logsumexp(x: Array) -> Array:
    """Logarithm of the sum of exponentials over the last axis."""
    return _function([x], "logsumexp", "nn.logsumexp", "scipy.special:logsumexp")(x, -1)


def sum(x: Array, axis: int | None = None) -> Array:
    """Sum over one axis, or over all."""
    return x.sum() if axis is None else x.sum(axis)


def mean(x: Array, axis: int | None = None) -> Array:
    """Mean over one axis, or over all."""
    return x.mean() if axis is None else x.mean(axis)


def stack(arrays: list[Array], axis: int = -1) -> Array:
    """Join arrays of one shape along a new axis, by default a new last one."""
    return namespace(*arrays).stack(arrays, axis)


def concatenate(arrays: list[Array], axis: int = -1) -> Array:
    """Join arrays along an axis that they have, by default the last."""
    return namespace(*arrays).concatenate(arrays, axis)


def flip(x: Array) -> Array:
    """Reverse the order of the last axis."""
    return namespace(x).flip(x, (-1,))


def cumsum(x: Array) -> Array:
    """Cumulative sums along the last axis."""
    return namespace(x).cumsum(x, -1)


def take_along(x: Array, index: Array) -> Array:
    """Take the entries of x (..., K) at the integers `index` (..., M) of its last axis: (..., M).

    The other axes of `x` and `index` are equal.
    """
    xp = namespace(x, index)
    return xp.gather(x, -1, index) if xp.__name__ == "torch" else xp.take_along_axis(x, index, -1)


def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeat x to this shape, by the rules of broadcasting."""
    return namespace(x).broadcast_to(x, shape)


def ones_like(x: Array) -> Array:
    """Ones, in the shape and type of x."""
    return namespace(x).ones_like(x)


def zeros_like(x: Array) -> Array:
    """Zeros, in the shape and type of x."""
    return namespace(x).zeros_like(x)


def full_like(x: Array, value: float) -> Array:
    """One value, in the shape and type of x."""
    return namespace(x).full_like(x, value)


def diagonal_matrix(x: Array) -> Array:
    """Diagonal matrices (..., D, D) from their diagonals (..., D)."""
    xp = namespace(x)
    return xp.diag_embed(x) if _is_torch(x) else x[..., None] * xp.eye(x.shape[-1], dtype=x.dtype)


def solve_triangular(matrix: Array, right: Array) -> Array:
    """Solution z of matrix @ z = right, for a lower-triangular matrix (D, D) and right (..., D)."""
    name, columns = "linalg.solve_triangular", right.reshape(-1, right.shape[-1]).T
    solve = _function([matrix, right], name, f"scipy.{name}", f"scipy:{name}")
    side = {"upper": False} if _is_torch(right) else {"lower": True}
    return solve(matrix, columns, **side).T.reshape(right.shape)


def where(condition: Array, x: Array, y: Array) -> Array:
    """Entries of x where the condition is true, else of y."""
    return namespace(condition, x, y).where(condition, x, y)


def maximum(x: Array, y: Array) -> Array:
    """The larger of two values, entry by entry; equal entries share the derivative equally, in both systems."""
    return namespace(x, y).maximum(x, y)


def in_floats(x: Array, like: Array) -> Array:
    """Convert x, numbers or booleans, to the floating type and the device of `like`."""
    like = like.mean if isinstance(like, Uncertain) else like
    xp = namespace(like)
    if xp.__name__ == "torch":
        return xp.as_tensor(x).to(dtype=like.dtype, device=like.device)
    return xp.asarray(x).astype(like.dtype)


def concrete(x: Array) -> Any:
    """Values of x in NumPy, or None where they are not available.

    They are not available inside a compiled or mapped function, nor on devices other than the CPU, where reading them
    would wait for all running operations.
    """
    if _is_torch(x):
        # A wrapper of `torch.func` has no memory of its own.
        with contextlib.suppress(RuntimeError):
            return x.detach().numpy() if x.device.type == "cpu" else None
        return None
    traced = _is_jax(x) and isinstance(x, sys.modules["jax"].core.Tracer)
    return None if traced else np.asarray(x)


def lookup(table: Array, index: Array) -> Array:
    """Rows of a table (K, C) at the integers `index` (...): (..., C).

    An index outside of 0..K-1 gives NaN, because compiled functions cannot raise.
    """
    xp = namespace(table, index)
    index = _on_device_of(table, xp, index)
    inside = (index >= 0) & (index < table.shape[0])
    rows = table[xp.where(inside, index, xp.zeros_like(index))]
    return xp.where(inside[..., None], rows, full_like(rows, math.nan))


def _on_device_of(like: Array, xp: Any, index: Array) -> Array:
    return xp.as_tensor(index, device=like.device) if _is_torch(like) else xp.asarray(index)


def one_hot(index: Array, size: int, like: Array) -> Array:
    """Rows (..., size) that are one at `index` (...) and zero elsewhere, floats of the type of `like`.

    An index outside of 0..size-1 gives NaN, as in `lookup`.
    """
    xp = namespace(like)
    index, numbers = _on_device_of(like, xp, index), _on_device_of(like, xp, xp.arange(size))
    rows = in_floats(index[..., None] == numbers, like)
    inside = (index >= 0) & (index < size)
    return xp.where(inside[..., None], rows, full_like(rows, math.nan))


def segment_sum(x: Array, index: Any, count: int) -> Array:
    """Sums (count, ...) of the rows of x (E, ...) that share a number in `index` (E,), a NumPy array."""
    xp, shape = namespace(x), (count, *x.shape[1:])
    if xp.__name__ == "torch":
        zeros = xp.zeros(shape, dtype=x.dtype, device=x.device)
        return zeros.index_add(0, xp.as_tensor(index, device=x.device), x)
    result = xp.zeros(shape, dtype=x.dtype)
    if xp.__name__ == "jax.numpy":
        return result.at[index].add(x)
    np.add.at(result, index, x)
    return result


def scan(step: Step, state: Arrays, inputs: Arrays, reverse: bool = False, unrolled: bool = False) -> Array:
    """Iterate along the second axis (time) of `inputs`: state, output = step(state, inputs at t).

    Parameters
    ----------
    step : callable
        (state, inputs) -> (new state, output).
    state : tuple of array
        The first state.
    inputs : tuple of array
        Inputs, (N, T, ...).
    reverse : bool
        Whether to iterate from the end to the beginning.
    unrolled : bool
        Whether JAX compiles each step as a separate operation, so that handlers see the values of this run inside a
        step. By default it compiles one step and repeats it. NumPy and torch always run the steps one by one.

    Returns
    -------
    array
        Outputs, (N, T, ...), each at the time of its inputs.
    """
    xp = namespace(*inputs, *state)
    if not unrolled and xp.__name__ == "jax.numpy":
        first = tuple(xp.moveaxis(each, 1, 0) for each in inputs)
        _, outputs = sys.modules["jax"].lax.scan(step, state, first, reverse=reverse)
        return xp.moveaxis(outputs, 0, 1)
    outputs: list[Array] = []
    times = range(int(inputs[0].shape[1]))
    for time in reversed(times) if reverse else times:
        state, output = step(state, tuple(each[:, time] for each in inputs))
        outputs.append(output)
    return stack(outputs[::-1] if reverse else outputs, 1)


def log1p(x: Array) -> Array:
    """Logarithm of 1 + x, accurate for small x."""
    return namespace(x).log1p(x)


def einsum(formula: str, *arrays: Array) -> Array:
    """Einstein summation, with the formulas of NumPy."""
    return namespace(*arrays).einsum(formula, *arrays)


def with_slope(function: Callable[[Array], Array], x: Array) -> tuple[Array, Array]:
    """f(x) and f'(x) of an elementwise function, for arrays of torch and JAX."""
    jvp = _function([x], "func.jvp", "jvp", "")
    return jvp(function, (x,), (ones_like(x),))


def stop_gradient(x: Array) -> Array:
    """Return x as a constant for automatic differentiation."""
    return _function([x], "detach", "lax.stop_gradient", lambda x: x)(x)


# --- images and sequences: channels last in all three -------------------------------------------------

# Number of spatial axes -> what the error messages call the inputs, two sizes, and the paddings.
_IMAGES = "images of shape (N, height, width, channels)"
_WORDS = {
    1: ("sequences of shape (N, time, channels)", "", "(before, after)"),
    2: (_IMAGES, ", or (height, width)", "((top, bottom), (left, right))"),
}


def _margins(sizes: Any, kernel: Any, stride: Any, padding: Any) -> tuple[tuple[int, int], ...] | None:
    """For each axis, the numbers of zeros before and after; None if the padding is invalid."""
    if padding == "same":
        axes = zip(sizes, kernel, stride, strict=True)
        missing = [max((-(-size // step) - 1) * step + width - size, 0) for size, width, step in axes]
        return tuple((each // 2, each - each // 2) for each in missing)
    padding = 0 if padding == "valid" else padding
    if not whole(0)(padding):
        padding = ((padding, padding),) * len(kernel)
    elif len(kernel) == 1:
        padding = (padding,)
    with contextlib.suppress(TypeError, ValueError):
        margins = tuple((before, after) for before, after in padding)
        if len(margins) == len(kernel) and not any(whole(0)(each) for pair in margins for each in pair):
            return tuple((operator.index(before), operator.index(after)) for before, after in margins)
    return None


def windows(word: str, x: Array, kernel: Any, stride: Any, padding: Any, axes: int | None = None) -> Any:
    """Check a kernel, stride and padding against images (N, H, W, C) or sequences (N, T, C).

    `axes` is 2 where only images are allowed, 1 where only sequences are.

    The result is (kernel, stride, (zeros before, zeros after), number of windows), each a tuple with one entry for each
    spatial axis. `word` is the function named in errors.
    """
    shape, check = tuple(x.shape), ModelError.check
    axes = (1 if len(shape) == 3 else 2) if axes is None else axes
    inputs, pair, pairs = _WORDS[axes]
    check(len(shape) == axes + 2, word, inputs, f"shape {shape}", "x[..., None]")
    checked = []
    for what, value in (("kernel", kernel), ("stride", stride)):
        given = (value,) * axes if hasattr(value, "__index__") else value
        good = isinstance(given, tuple | list) and len(given) == axes and not any(map(whole(1), given))
        check(good, word, f"a positive whole number as {what}{pair}", repr(value), f"{what}=2")
        checked.append(tuple(map(operator.index, given)))
    kernel, stride = checked
    sizes, margins = shape[1:-1], _margins(shape[1:-1], kernel, stride, padding)
    expected = f"padding 'valid', 'same', a whole number from 0, or {pairs}"
    check(margins is not None, word, expected, repr(padding), "padding='same'")
    axis_by_axis = zip(sizes, margins or (), kernel, strict=True)
    inside = [n + before + after - k for n, (before, after), k in axis_by_axis]
    expected = f"an input of at least the size {kernel} of the kernel, padding included"
    got = f"size {sizes} with padding {padding!r}"
    check(min(inside) >= 0, word, expected, got, "padding='same' or a smaller kernel")
    return kernel, stride, margins, tuple(n // step + 1 for n, step in zip(inside, stride, strict=True))


def _pad(x: Array, margins: Any, value: float) -> Array:
    """The inputs padded with `value`."""
    if not any(map(any, margins)):
        return x
    xp = namespace(x)
    if xp.__name__ == "torch":
        # From the last axis to the first.
        sides = (side for margin in reversed(((0, 0), *margins, (0, 0))) for side in margin)
        return xp.nn.functional.pad(x, tuple(sides), value=value)
    return xp.pad(x, ((0, 0), *margins, (0, 0)), constant_values=value)


def _slices(x: Array, found: Any, value: float) -> list[Array]:
    """The inputs at each position of the kernel, kh*kw arrays (N, H', W', C) in the order (kh, kw) for images."""
    kernel, stride, margins, count = found
    x = _pad(x, margins, value)
    spans = [step * (number - 1) + 1 for step, number in zip(stride, count, strict=True)]
    slices = []
    for place in itertools.product(*map(range, kernel)):
        ends = [first + span for first, span in zip(place, spans, strict=True)]
        slices.append(x[(slice(None), *map(slice, place, ends, stride))])
    return slices


def patches(x: Array, kernel: Pair, stride: Pair = 1, padding: AnyPadding = "valid") -> Array:
    """The inputs of a convolution at each position of the image: (N, H, W, C) to (N, H', W', kh*kw*C).

    The last axis is in the order (kh, kw, C), so that `patches(x, ...) @ weight.reshape(-1, O)` is `conv2d(x, weight,
    ...)`. Sequences (N, T, C) with an integer as kernel give (N, T', k*C), in the order (k, C), as in `conv1d`.

    Parameters
    ----------
    x : array
        Images or sequences.
    kernel : int or tuple of int
        Size of the kernel.
    stride : int or tuple of int
        As in `conv2d`.
    padding : str, int or tuple
        As in `conv2d`.

    Returns
    -------
    array
        Patches, (N, H', W', kh*kw*C) or (N, T', k*C).
    """
    return concatenate(_slices(x, windows("ops.patches", x, kernel, stride, padding), 0.0))


def conv2d(x: Array, weight: Array, stride: Pair = 1, padding: Padding = "valid") -> Array:
    """The convolution of neural networks (a cross-correlation), computed by the system.

        result[n, i, j, o] = sum over a, b, c of x[n, i*sh + a - top, j*sw + b - left, c] * weight[a, b, c, o]

    with zeros outside the image.

    Parameters
    ----------
    x : array
        Images, (N, H, W, C).
    weight : array
        Weight, (kh, kw, C, O).
    stride : int or tuple of int
        Stride, one number or (height, width).
    padding : str, int or tuple
        "valid" (none), an integer for all sides, ((top, bottom), (left, right)), or "same": with s the stride and k the
        kernel, the zeros that give ceil(H / s) positions, max((ceil(H / s) - 1) * s + k - H, 0), half of them before;
        an odd one goes after. TensorFlow and JAX define "same" in this way; torch has no "same" with a stride.

    Returns
    -------
    array
        Outputs, (N, H', W', O).

    Raises
    ------
    ModelError
        Shapes, stride or padding do not fit.
    """
    return _convolve("ops.conv2d", "(kh, kw, {}, channels) for images", 2, x, weight, stride, padding)


def conv1d(x: Array, weight: Array, stride: int = 1, padding: SequencePadding = "valid") -> Array:
    """The convolution of neural networks along time.

        result[n, t, o] = sum over a, c of x[n, t*s + a - before, c] * weight[a, c, o]

    with zeros outside the sequence, as `conv2d` along height and width.

    Parameters
    ----------
    x : array
        Sequences, (N, T, C).
    weight : array
        Weight, (k, C, O).
    stride : int
        Stride.
    padding : str, int or tuple
        "valid", "same", an integer for both sides, or (before, after): with (k - 1, 0) no output depends on later
        times.

    Returns
    -------
    array
        Outputs, (N, T', O).

    Raises
    ------
    ModelError
        Shapes, stride or padding do not fit.
    """
    return _convolve("ops.conv1d", "(k, {}, channels) for sequences", 1, x, weight, stride, padding)


def _convolve(word: str, shapes: str, axes: int, x: Array, weight: Array, stride: Any, padding: Any) -> Array:
    fits = len(weight.shape) == axes + 2 and (len(x.shape) != axes + 2 or weight.shape[-2] == x.shape[-1])
    expected = f"a weight of shape {shapes.format(x.shape[-1])} {tuple(x.shape)}"
    got, advice = f"shape {tuple(weight.shape)}", f"the channels of the inputs as axis {axes}"
    ModelError.check(fits, word, expected, got, advice)
    found = windows(word, x, tuple(weight.shape[:axes]), stride, padding, axes)
    _, strides, margins, _ = found
    xp = namespace(x, weight)
    if xp is np:
        return concatenate(_slices(x, found, 0.0)) @ weight.reshape(-1, weight.shape[-1])
    common = xp.promote_types(x.dtype, weight.dtype)
    if xp.__name__ == "torch":
        if axes == 1:
            # A sequence is an image of height 1.
            return conv2d(x[:, None], weight[None], (1, *strides), ((0, 0), *margins))[:, 0]
        images = _pad(x, margins, 0.0).to(common).permute(0, 3, 1, 2)
        kernel = weight.to(common).permute(3, 2, 0, 1)
        return xp.nn.functional.conv2d(images, kernel, stride=strides).permute(0, 2, 3, 1)
    layout = ("NTC", "TIO", "NTC") if axes == 1 else ("NHWC", "HWIO", "NHWC")
    convolve = sys.modules["jax"].lax.conv_general_dilated
    return convolve(x.astype(common), weight.astype(common), strides, margins, dimension_numbers=layout)


def _pooling(word: str, x: Array, kernel: Any, stride: Any, padding: Any) -> Any:
    """As `windows`; padding is refused if a window would contain no part of the image."""
    found = windows(word, x, kernel, kernel if stride is None else stride, padding)
    small = all(max(margin) < size for margin, size in zip(found[2], found[0], strict=True))
    expected = f"padding smaller than the kernel {found[0]}, or a window would hold nothing of the image"
    ModelError.check(small, word, expected, repr(padding), "padding='same'")
    return found


def avg_pool(x: Array, kernel: Pair, stride: Pair | None = None, padding: AnyPadding = "valid") -> Array:
    """The mean over each window of each channel, (N, H, W, C) to (N, H', W', C).

    Padding does not count: at the border it is the mean over the part of the window inside the image. Sequences (N, T,
    C) are pooled along time, with an integer as kernel, to (N, T', C).

    Parameters
    ----------
    x : array
        Images or sequences.
    kernel : int or tuple of int
        Size of the window.
    stride : int or tuple of int, optional
        Stride, by default the kernel.
    padding : str, int or tuple
        As in `conv2d`, for sequences as in `conv1d`.

    Returns
    -------
    array
        Means, (N, H', W', C) or (N, T', C).

    Raises
    ------
    ModelError
        Shapes, stride or padding do not fit.
    """
    found = _pooling("ops.avg_pool", x, kernel, stride, padding)
    inside = np.ones((1, *x.shape[1:-1], 1))
    total, count = (builtins.sum(_slices(each, found, 0.0)) for each in (x, inside))
    return total / asarray(count, like=total)


def max_pool(x: Array, kernel: Pair, stride: Pair | None = None, padding: AnyPadding = "valid") -> Array:
    """The maximum over each window of each channel, (N, H, W, C) to (N, H', W', C).

    Padding does not count. Entries that share the maximum share its derivative equally, in both systems.

    Parameters
    ----------
    x : array
        Images, or sequences as in `avg_pool`.
    kernel : int or tuple of int
        Size of the window.
    stride : int or tuple of int, optional
        Stride, by default the kernel.
    padding : str, int or tuple
        As in `conv2d`, for sequences as in `conv1d`.

    Returns
    -------
    array
        Maxima, (N, H', W', C) or (N, T', C).

    Raises
    ------
    ModelError
        Shapes, stride or padding do not fit.
    """
    found = _pooling("ops.max_pool", x, kernel, stride, padding)
    xp = namespace(x)
    floats = x.is_floating_point() if _is_torch(x) else xp.issubdtype(x.dtype, xp.floating)
    lowest = -math.inf if floats else xp.iinfo(x.dtype).min
    slices = stack(_slices(x, found, lowest), 0)
    return slices.amax(0) if _is_torch(slices) else slices.max(0)


ACTIVATIONS = {each.__name__: each for each in (tanh, relu, sigmoid, softplus, gelu, silu, sin)}
ACTIVATIONS["identity"] = lambda x: x


def activation(name: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Activation function of that name, a key of `ACTIVATIONS`; a function is returned unchanged."""
    if callable(name):
        return name
    check_known("activation", [name], ACTIVATIONS)
    return ACTIVATIONS[name]
