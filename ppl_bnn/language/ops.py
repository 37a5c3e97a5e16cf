"""Array functions with the same meaning in NumPy, torch and JAX.

A model calls `ops.tanh(x)` and never names a system: the function is found from the type of its argument. `torch` and
`jax.numpy` alone are not enough as array namespaces, because relu, softplus, logsumexp and softmax have other names or
other arguments in each; the differences are handled here.
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

from ppl_bnn.core.errors import ModelError, unknown_name

Array = Any
# An image is (N, H, W, C); a kernel and a stride are one number or (height, width).
Pair = int | tuple[int, int]
Padding = str | int | tuple[tuple[int, int], tuple[int, int]]
# A sequence is (N, T, C); zeros on both sides, or (before, after).
SequencePadding = str | int | tuple[int, int]


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def namespace(*arrays: Any) -> Any:
    """The module (`torch`, `jax.numpy` or `numpy`) of these arrays; plain numbers count as NumPy."""
    for array in arrays:
        if _is_torch(array):
            return sys.modules["torch"]
    for array in arrays:
        if _is_jax(array):
            return sys.modules["jax.numpy"]
    return _numpy()


def _numpy() -> Any:
    import numpy

    return numpy


def asarray(value: Any, like: Array) -> Array:
    """`value` as an array with the library, floating type and device of `like`."""
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
    return namespace(x).sin(x)


def cos(x: Array) -> Array:
    return namespace(x).cos(x)


def abs(x: Array) -> Array:
    return namespace(x).abs(x)


def tanh(x: Array) -> Array:
    return namespace(x).tanh(x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.sigmoid(x)
    if xp.__name__ == "jax.numpy":
        return sys.modules["jax"].nn.sigmoid(x)
    return xp.exp(-xp.logaddexp(0.0, -x))


def relu(x: Array) -> Array:
    """max(x, 0), with derivative 0 at 0 in both systems."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.relu(x)
    if xp.__name__ == "jax.numpy":
        return sys.modules["jax"].nn.relu(x)
    return xp.maximum(x, 0.0)


def gelu(x: Array) -> Array:
    """x times the standard normal distribution function at x (the exact form, not the tanh approximation)."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.nn.functional.gelu(x)
    if xp.__name__ == "jax.numpy":
        return sys.modules["jax"].nn.gelu(x, approximate=False)
    from scipy.special import ndtr

    return x * ndtr(x)


def silu(x: Array) -> Array:
    """x times sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        # torch's own softplus is linear above a threshold; logaddexp is smooth.
        return xp.logaddexp(x, xp.zeros((), dtype=x.dtype, device=x.device))
    return xp.logaddexp(x, 0.0)


def softmax(x: Array) -> Array:
    """exp(x) / sum(exp(x)) over the last axis."""
    return exp(log_softmax(x))


def log_softmax(x: Array) -> Array:
    """x - logsumexp(x) over the last axis.

    Notes
    -----
    The largest x is subtracted first. Without that, x of size 100 in float32 would give probabilities whose sum differs
    from 1 by 1e-5.
    """
    return _over_last_axis("log_softmax", x)


def logsumexp(x: Array) -> Array:
    """Logarithm of the sum of exponentials over the last axis."""
    return _over_last_axis("logsumexp", x)


def _over_last_axis(name: str, x: Array) -> Array:
    """Call a function that has the same name in torch, JAX and SciPy."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return getattr(xp, name)(x, dim=-1)
    if xp.__name__ == "jax.numpy":
        return getattr(sys.modules["jax"].nn, name)(x, axis=-1)
    import scipy.special

    return getattr(scipy.special, name)(x, axis=-1)


def sum(x: Array, axis: int | None = None) -> Array:
    return x.sum() if axis is None else x.sum(axis)


def mean(x: Array, axis: int | None = None) -> Array:
    return x.mean() if axis is None else x.mean(axis)


def stack(arrays: list[Array], axis: int = -1) -> Array:
    xp = namespace(*arrays)
    return xp.stack(arrays, axis) if xp.__name__ != "torch" else xp.stack(arrays, dim=axis)


def concatenate(arrays: list[Array], axis: int = -1) -> Array:
    xp = namespace(*arrays)
    return xp.cat(arrays, dim=axis) if xp.__name__ == "torch" else xp.concatenate(arrays, axis)


def flip(x: Array) -> Array:
    """x with its last axis in reverse order."""
    xp = namespace(x)
    return xp.flip(x, (-1,)) if xp.__name__ == "torch" else xp.flip(x, -1)


def cumsum(x: Array) -> Array:
    """Cumulative sums along the last axis."""
    xp = namespace(x)
    return xp.cumsum(x, -1)


def take_along(x: Array, index: Array) -> Array:
    """Take the entries of x (..., K) at the integers `index` (..., M) of its last axis: (..., M).

    The other axes of `x` and `index` are equal.
    """
    xp = namespace(x, index)
    return xp.gather(x, -1, index) if xp.__name__ == "torch" else xp.take_along_axis(x, index, -1)


def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    return namespace(x).broadcast_to(x, shape)


def ones_like(x: Array) -> Array:
    return namespace(x).ones_like(x)


def zeros_like(x: Array) -> Array:
    return namespace(x).zeros_like(x)


def full_like(x: Array, value: float) -> Array:
    return namespace(x).full_like(x, value)


def diagonal_matrix(x: Array) -> Array:
    """Diagonal matrices (..., D, D) from their diagonals (..., D)."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.diag_embed(x)
    return x[..., None] * xp.eye(x.shape[-1], dtype=x.dtype)


def lower_triangle(x: Array) -> Array:
    """x (..., D, D) with zeros above the diagonal."""
    return namespace(x).tril(x)


def solve_triangular(matrix: Array, right: Array) -> Array:
    """The solution z of matrix @ z = right, for a lower-triangular matrix (D, D) and right (..., D)."""
    xp = namespace(matrix, right)
    columns = right.reshape(-1, right.shape[-1]).T
    if xp.__name__ == "torch":
        solved = xp.linalg.solve_triangular(matrix, columns, upper=False)
    elif xp.__name__ == "jax.numpy":
        solved = sys.modules["jax"].scipy.linalg.solve_triangular(matrix, columns, lower=True)
    else:
        from scipy.linalg import solve_triangular as reference

        solved = reference(matrix, columns, lower=True)
    return solved.T.reshape(right.shape)


def where(condition: Array, x: Array, y: Array) -> Array:
    return namespace(condition, x, y).where(condition, x, y)


def maximum(x: Array, y: Array) -> Array:
    """The larger of two values, entry by entry; equal entries share the derivative equally, in both systems."""
    return namespace(x, y).maximum(x, y)


def in_floats(x: Array, like: Array) -> Array:
    """x, numbers or booleans, in the floating type and on the device of `like`."""
    xp = namespace(like)
    if xp.__name__ == "torch":
        return xp.as_tensor(x).to(dtype=like.dtype, device=like.device)
    return xp.asarray(x).astype(like.dtype)


def concrete(x: Array) -> Any:
    """x in NumPy, or None where its values are not available.

    Values are not available inside a compiled or mapped function. None is also returned on devices other than the CPU,
    where reading the values would wait for all running operations.
    """
    if _is_torch(x):
        if x.device.type != "cpu":
            return None
        try:
            return x.detach().numpy()
        except RuntimeError:
            # A wrapper of `torch.func` has no memory of its own.
            return None
    if _is_jax(x):
        return None if isinstance(x, sys.modules["jax"].core.Tracer) else _numpy().asarray(x)
    return _numpy().asarray(x)


def lookup(table: Array, index: Array) -> Array:
    """Rows of a table (K, C) at the integers `index` (...): (..., C).

    An index outside of 0..K-1 gives NaN, because compiled functions cannot raise.
    """
    xp = namespace(table, index)
    if xp.__name__ == "torch":
        index = xp.as_tensor(index, device=table.device)
    else:
        index = xp.asarray(index)
    inside = (index >= 0) & (index < table.shape[0])
    rows = table[xp.where(inside, index, xp.zeros_like(index))]
    return xp.where(inside[..., None], rows, full_like(rows, math.nan))


def one_hot(index: Array, size: int, like: Array) -> Array:
    """Rows (..., size) that are one at `index` (...) and zero elsewhere, floats of the type of `like`.

    An index outside of 0..size-1 gives NaN, as in `lookup`.
    """
    xp = namespace(like)
    numbers = xp.arange(size, device=like.device) if xp.__name__ == "torch" else xp.arange(size)
    index = xp.as_tensor(index, device=like.device) if xp.__name__ == "torch" else xp.asarray(index)
    rows = in_floats(index[..., None] == numbers, like)
    inside = (index >= 0) & (index < size)
    return xp.where(inside[..., None], rows, full_like(rows, math.nan))


def segment_sum(x: Array, index: Any, count: int) -> Array:
    """Sums (count, ...) of the rows of x (E, ...) that share a number in `index` (E,), a NumPy array."""
    xp = namespace(x)
    shape = (count, *x.shape[1:])
    if xp.__name__ == "torch":
        whole = xp.as_tensor(index, device=x.device)
        return xp.zeros(shape, dtype=x.dtype, device=x.device).index_add(0, whole, x)
    result = xp.zeros(shape, dtype=x.dtype)
    if xp.__name__ == "numpy":
        xp.add.at(result, index, x)
        return result
    return result.at[index].add(x)


def scan(
    step: Callable[[tuple[Array, ...], tuple[Array, ...]], tuple[tuple[Array, ...], Array]],
    state: tuple[Array, ...],
    inputs: tuple[Array, ...],
    reverse: bool = False,
    unrolled: bool = False,
) -> Array:
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
        JAX compiles one step and repeats it. With True each step is a separate operation, as it always is in NumPy and
        torch: a handler sees the values of this run inside a step, and compilation takes longer with each step.

    Returns
    -------
    array
        Outputs, (N, T, ...), each at the time of its inputs.
    """
    length = int(inputs[0].shape[1])
    if not unrolled and namespace(*inputs, *state).__name__ == "jax.numpy":
        xp = namespace(*inputs, *state)
        first = tuple(xp.moveaxis(each, 1, 0) for each in inputs)
        _, outputs = sys.modules["jax"].lax.scan(step, state, first, reverse=reverse)
        return xp.moveaxis(outputs, 0, 1)
    outputs: list[Array] = []
    for time in reversed(range(length)) if reverse else range(length):
        state, output = step(state, tuple(each[:, time] for each in inputs))
        outputs.append(output)
    return stack(outputs[::-1] if reverse else outputs, 1)


def log1p(x: Array) -> Array:
    """log(1 + x), accurate for small x."""
    return namespace(x).log1p(x)


def einsum(formula: str, *arrays: Array) -> Array:
    return namespace(*arrays).einsum(formula, *arrays)


def stop_gradient(x: Array) -> Array:
    """x as a constant for automatic differentiation."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return x.detach()
    return sys.modules["jax"].lax.stop_gradient(x) if xp.__name__ == "jax.numpy" else x


# --- images: channels last in all three --------------------------------------------------------------


def _whole_pair(word: str, what: str, value: Any) -> tuple[int, int]:
    """A positive integer, or two, as (height, width)."""
    pair = (value, value) if hasattr(value, "__index__") else value
    if (
        not isinstance(pair, tuple | list)
        or len(pair) != 2
        or not all(hasattr(each, "__index__") and not isinstance(each, bool) and each > 0 for each in pair)
    ):
        raise ModelError.of(
            f"{word}", f"a positive whole number as {what}, or (height, width)", repr(value), f"{what}=2"
        )
    return operator.index(pair[0]), operator.index(pair[1])


def _margins(
    word: str, image: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], padding: Any
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((top, bottom), (left, right)): the numbers of zeros around the image."""
    if padding == "valid":
        return (0, 0), (0, 0)
    if padding == "same":
        sides = []
        for size, width, step in zip(image, kernel, stride, strict=True):
            missing = max((-(-size // step) - 1) * step + width - size, 0)
            sides.append((missing // 2, missing - missing // 2))
        return sides[0], sides[1]
    given = padding
    if hasattr(padding, "__index__") and not isinstance(padding, bool):
        given = ((padding, padding), (padding, padding))
    whole: list[int] = []
    try:
        (top, bottom), (left, right) = given
        whole = [operator.index(each) for each in (top, bottom, left, right) if not isinstance(each, bool)]
    except (TypeError, ValueError):
        whole = []
    if len(whole) != 4 or min(whole) < 0:
        raise ModelError.of(
            f"{word}",
            "padding 'valid', 'same', a whole number from 0, or ((top, bottom), (left, right))",
            repr(padding),
            "padding='same'",
        )
    return (whole[0], whole[1]), (whole[2], whole[3])


def windows(
    word: str, x: Array, kernel: Any, stride: Any, padding: Any
) -> tuple[tuple[int, int], tuple[int, int], tuple[tuple[int, int], tuple[int, int]], tuple[int, int]]:
    """Check a kernel, stride and padding against images.

    Parameters
    ----------
    word : str
        The function named in errors.
    x : array
        Images, (N, H, W, C).
    kernel, stride, padding
        As in `conv2d`.

    Returns
    -------
    tuple
        (kernel, stride, ((top, bottom), (left, right)) of zeros, numbers of windows down and across).

    Raises
    ------
    ModelError
        The arguments do not fit.
    """
    shape = tuple(x.shape)
    if len(shape) != 4:
        raise ModelError.of(
            f"{word}", "images of shape (N, height, width, channels)", f"shape {shape}", "x[..., None]"
        )
    kernel, stride = _whole_pair(word, "kernel", kernel), _whole_pair(word, "stride", stride)
    margins = _margins(word, (shape[1], shape[2]), kernel, stride, padding)
    inside = [shape[axis + 1] + builtins.sum(margins[axis]) - kernel[axis] for axis in (0, 1)]
    if min(inside) < 0:
        raise ModelError.of(
            f"{word}",
            f"an image of at least the size {kernel} of the kernel, padding included",
            f"height and width {shape[1:3]} with padding {padding!r}",
            "padding='same' or a smaller kernel",
        )
    return kernel, stride, margins, (inside[0] // stride[0] + 1, inside[1] // stride[1] + 1)


def _surrounded(x: Array, margins: tuple[tuple[int, int], tuple[int, int]], value: float) -> Array:
    """The image padded with `value`."""
    if margins == ((0, 0), (0, 0)):
        return x
    xp = namespace(x)
    if xp.__name__ == "torch":
        return xp.nn.functional.pad(x, (0, 0, *margins[1], *margins[0]), value=value)
    return xp.pad(x, ((0, 0), *margins, (0, 0)), constant_values=value)


def _slices(word: str, x: Array, kernel: Any, stride: Any, padding: Any, value: float) -> list[Array]:
    """The inputs at each position of the kernel: kh*kw arrays (N, H', W', C) in the order (kh, kw)."""
    kernel, stride, margins, count = windows(word, x, kernel, stride, padding)
    x = _surrounded(x, margins, value)
    down, across = stride[0] * (count[0] - 1) + 1, stride[1] * (count[1] - 1) + 1
    return [
        x[:, row : row + down : stride[0], column : column + across : stride[1]]
        for row in range(kernel[0])
        for column in range(kernel[1])
    ]


def sequence_as_image(
    word: str, x: Array, kernel: Any, stride: Any, padding: Any
) -> tuple[Array, tuple[int, int], tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]:
    """A sequence (N, T, C) as an image (N, 1, T, C), with checked kernel, stride and padding.

    Parameters
    ----------
    word : str
        The function named in errors.
    x : array
        Sequences, (N, T, C).
    kernel, stride
        Positive integers.
    padding
        "valid", "same", an integer for both sides, or (before, after).

    Returns
    -------
    tuple
        (image, kernel, stride, numbers of zeros around the image).

    Raises
    ------
    ModelError
        The arguments do not fit.
    """
    shape = tuple(x.shape)
    if len(shape) != 3:
        raise ModelError.of(
            f"{word}", "sequences of shape (N, time, channels)", f"shape {shape}", "x[..., None]"
        )
    sizes = []
    for what, value in (("kernel", kernel), ("stride", stride)):
        number: Any = value[0] if isinstance(value, tuple | list) and len(value) == 1 else value
        if not hasattr(number, "__index__") or isinstance(number, bool) or number < 1:
            raise ModelError.of(f"{word}", f"a positive whole number as {what}", repr(value), f"{what}=2")
        sizes.append(operator.index(number))
    width, step = sizes
    around: Any = padding
    if not isinstance(padding, str):
        sides = (padding, padding) if hasattr(padding, "__index__") else padding
        if (
            not isinstance(sides, tuple | list)
            or len(sides) != 2
            or not all(
                hasattr(each, "__index__") and not isinstance(each, bool) and each >= 0 for each in sides
            )
        ):
            around = None
        else:
            around = ((0, 0), (operator.index(sides[0]), operator.index(sides[1])))
    elif padding not in ("valid", "same"):
        around = None
    if around is None:
        raise ModelError.of(
            f"{word}",
            "padding 'valid', 'same', a whole number from 0, or (before, after)",
            repr(padding),
            "padding='same'",
        )
    margins = _margins(word, (1, shape[1]), (1, width), (1, step), around)
    if shape[1] + builtins.sum(margins[1]) < width:
        raise ModelError.of(
            f"{word}",
            f"a sequence of at least the length {width} of the kernel, padding included",
            f"length {shape[1]} with padding {padding!r}",
            "padding='same' or a smaller kernel",
        )
    return x[:, None], (1, width), (1, step), margins


def patches(x: Array, kernel: Pair, stride: Pair = 1, padding: Padding | SequencePadding = "valid") -> Array:
    """The inputs of a convolution at each position of the image: (N, H, W, C) to (N, H', W', kh*kw*C).

    The last axis is in the order (kh, kw, C), that of `weight.reshape(-1, O)` for a weight (kh, kw, C, O), so that
    `patches(x, ...) @ weight.reshape(-1, O)` is `conv2d(x, weight, ...)`. Sequences (N, T, C) with an integer as kernel
    give (N, T', k*C), in the order (k, C), as in `conv1d`.

    Parameters
    ----------
    x : array
        Images or sequences.
    kernel : int or tuple of int
        Size of the kernel.
    stride, padding
        As in `conv2d`.

    Returns
    -------
    array
        Patches, (N, H', W', kh*kw*C) or (N, T', k*C).
    """
    if len(x.shape) == 3:
        image, kernel, stride, margins = sequence_as_image("ops.patches", x, kernel, stride, padding)
        return concatenate(_slices("ops.patches", image, kernel, stride, margins, 0.0))[:, 0]
    return concatenate(_slices("ops.patches", x, kernel, stride, padding, 0.0))


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
    if len(weight.shape) != 4 or (len(x.shape) == 4 and weight.shape[2] != x.shape[3]):
        raise ModelError.of(
            "ops.conv2d",
            f"a weight of shape (kh, kw, {x.shape[-1]}, channels) for images {tuple(x.shape)}",
            f"shape {tuple(weight.shape)}",
            "the channels of the images as third axis",
        )
    kernel, stride, margins, _ = windows("ops.conv2d", x, tuple(weight.shape[:2]), stride, padding)
    xp = namespace(x, weight)
    if xp.__name__ == "numpy":
        return patches(x, kernel, stride, margins) @ weight.reshape(-1, weight.shape[-1])
    common = xp.promote_types(x.dtype, weight.dtype)
    if xp.__name__ == "torch":
        images = _surrounded(x, margins, 0.0).to(common).permute(0, 3, 1, 2)
        result = xp.nn.functional.conv2d(images, weight.to(common).permute(3, 2, 0, 1), stride=stride)
        return result.permute(0, 2, 3, 1)
    return sys.modules["jax"].lax.conv_general_dilated(
        x.astype(common), weight.astype(common), stride, margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


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
    if len(weight.shape) != 3 or (len(x.shape) == 3 and weight.shape[1] != x.shape[2]):
        raise ModelError.of(
            "ops.conv1d",
            f"a weight of shape (k, {x.shape[-1]}, channels) for sequences {tuple(x.shape)}",
            f"shape {tuple(weight.shape)}",
            "the channels of the sequences as second axis",
        )
    image, _, steps, margins = sequence_as_image("ops.conv1d", x, int(weight.shape[0]), stride, padding)
    return conv2d(image, weight[None], steps, margins)[:, 0]


def convolution(x: Array, weight: Array, stride: Any = 1, padding: Any = "valid") -> Array:
    """`conv1d` for a weight (k, C, O), `conv2d` for a weight (kh, kw, C, O)."""
    return (conv1d if len(weight.shape) == 3 else conv2d)(x, weight, stride, padding)


def _check_pooling(word: str, x: Array, kernel: Any, stride: Any, padding: Any) -> None:
    """Refuse padding with which a window would contain no part of the image."""
    kernel, _, margins, _ = windows(word, x, kernel, stride, padding)
    if any(max(margins[axis]) >= kernel[axis] for axis in (0, 1)):
        raise ModelError.of(
            f"{word}",
            f"padding smaller than the kernel {kernel}, or a window would hold nothing of the image",
            repr(padding),
            "padding='same'",
        )


def avg_pool(
    x: Array, kernel: Pair, stride: Pair | None = None, padding: Padding | SequencePadding = "valid"
) -> Array:
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
    padding
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
    stride = kernel if stride is None else stride
    if len(x.shape) == 3:
        return avg_pool(*sequence_as_image("ops.avg_pool", x, kernel, stride, padding))[:, 0]
    _check_pooling("ops.avg_pool", x, kernel, stride, padding)
    total = builtins.sum(_slices("ops.avg_pool", x, kernel, stride, padding, 0.0))
    inside = _numpy().ones((1, *x.shape[1:3], 1))
    count = builtins.sum(_slices("ops.avg_pool", inside, kernel, stride, padding, 0.0))
    return total / asarray(count, like=total)


def max_pool(
    x: Array, kernel: Pair, stride: Pair | None = None, padding: Padding | SequencePadding = "valid"
) -> Array:
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
    padding
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
    stride = kernel if stride is None else stride
    if len(x.shape) == 3:
        return max_pool(*sequence_as_image("ops.max_pool", x, kernel, stride, padding))[:, 0]
    _check_pooling("ops.max_pool", x, kernel, stride, padding)
    xp = namespace(x)
    whole = not (x.is_floating_point() if _is_torch(x) else xp.issubdtype(x.dtype, xp.floating))
    lowest = xp.iinfo(x.dtype).min if whole else -math.inf
    seen = stack(_slices("ops.max_pool", x, kernel, stride, padding, lowest), 0)
    return seen.amax(0) if _is_torch(seen) else seen.max(0)


ACTIVATIONS = {
    "tanh": tanh,
    "relu": relu,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "gelu": gelu,
    "silu": silu,
    "sin": sin,
    "identity": lambda x: x,
}


def activation(name: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The activation function of that name; a function is returned unchanged."""
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise unknown_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]
