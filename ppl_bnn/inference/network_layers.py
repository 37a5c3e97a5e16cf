"""The layers of a trained torch or Flax network, in the order and the layout of a program."""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.warning_filters import ignored

# The stride, and the zeros (before, after), along each axis of a convolution.
Geometry = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
ADVICE = "a network of the same layers, or start={'site': array} in the shapes of the sites"


@dataclass(frozen=True)
class ProgramMap:
    """A linear map or a convolution of the program.

    `kind` is "linear" or "conv"; `weight` and `bias` are sites, None if the program computes the values from other
    sites (or has no bias). `after_channels`: channels of the convolution before a linear map. `channels_first`: their
    order in the flattened image that enters it, None if unknown or not an image.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    weight: str | None
    bias: str | None
    has_bias: bool
    geometry: Geometry | None = None
    after_channels: int | None = None
    channels_first: bool | None = None

    def __str__(self) -> str:
        return described(self.name, self.kind, self.shape, self.has_bias, self.geometry)


@dataclass(frozen=True)
class NetworkLayer:
    """A layer of the network in the layout of the program; its `kind` is "linear" or "conv".

    `flattens_channels_first`: the network flattens images with channels first, as torch does.
    """

    name: str
    kind: str
    weight: np.ndarray
    bias: np.ndarray | None
    geometry: Geometry | None = None
    flattens_channels_first: bool = False

    def __str__(self) -> str:
        return described(self.name, self.kind, self.weight.shape, self.bias is not None, self.geometry)


def described(name: str, kind: str, shape: tuple[int, ...], has_bias: bool, geometry: Geometry | None) -> str:
    """A layer in words, for error messages."""
    words = f"{name}: {kind} {tuple(shape)} {'with' if has_bias else 'without'} bias"
    return words if geometry is None else f"{words}, stride {geometry[0]}, padding {geometry[1]}"


def as_array(name: str, value: Any) -> np.ndarray:
    """A copy in float64, unaffected by later changes of the network; values that are not finite are refused."""
    array = finite_numbers(value)
    if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        got = "NaN or an infinity" if array.dtype.kind in "fiu" else f"an array of {array.dtype}"
        raise InputError.of(f"start: {name}", "finite numbers", got, "a trained network")
    return np.array(array, dtype=np.float64)


def finite_numbers(value: Any) -> np.ndarray:
    """The array of any framework as NumPy; floating types that NumPy does not know become float64."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return (value if value.is_complex() else value.double()).numpy()
    array = np.asarray(value)
    # NumPy does not know JAX's short floating types until they are widened.
    return np.asarray(value, dtype=np.float64) if array.dtype.kind == "V" else array


def _unknown(tensors: Mapping[str, Any]) -> InputError:
    listed = ", ".join(f"{name} {tuple(np.shape(value))}" for name, value in tensors.items())
    wanted = "linear layers and convolutions in one or two dimensions only"
    return InputError.of("start", wanted, f"{listed}, which is the weight or the bias of neither", ADVICE)


def from_torch(name: str, weight: Any, bias: Any, geometry: Geometry | None = None) -> NetworkLayer:
    """The layer of a weight and a bias of torch."""
    array = as_array(f"{name}.weight", weight)
    offset = None if bias is None else as_array(f"{name}.bias", bias)
    if array.ndim == 2:
        return NetworkLayer(name, "linear", array.T, offset, None, True)
    # (O, C, places of the kernel) to (places, C, O), along time as in images.
    places = tuple(range(2, array.ndim))
    return NetworkLayer(name, "conv", array.transpose(*places, 1, 0), offset, geometry)


def from_flax(name: str, weight: Any, bias: Any) -> NetworkLayer:
    """The layer of a kernel and a bias of Flax."""
    array = as_array(name, weight)
    offset = None if bias is None else as_array(f"{name}/bias", bias)
    return NetworkLayer(name, "linear" if array.ndim == 2 else "conv", array, offset)


def torch_layers(module: Any, problem: Problem, convolutional: bool) -> list[NetworkLayer]:
    """The layers of a torch module in the order in which they run on a row, or of registration if none runs.

    If the program is `convolutional`, a row is an image. Only linear layers and plain convolutions in one or two
    dimensions are supported.
    """
    torch = sys.modules["torch"]
    layers = {}
    for name, part in module.named_modules():
        tensors = dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
        if not tensors:
            continue
        shown = name or type(part).__name__
        known = isinstance(part, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d)
        if not known or not set(tensors) <= {"weight", "bias"}:
            word = type(part).__name__
            raise _unknown({f"{shown}.{key} ({word})": value for key, value in tensors.items()})
        geometry = None if isinstance(part, torch.nn.Linear) else _torch_geometry(shown, part)
        layers[name] = from_torch(shown, part.weight, part.bias, geometry)
    order = _torch_order(module, set(layers), problem, convolutional)
    return [layers[name] for name in [*order, *(name for name in layers if name not in order)]]


def _torch_geometry(name: str, part: Any) -> Geometry:
    for what, plain in (("groups", 1), ("dilation", (1,) * len(part.kernel_size)), ("padding_mode", "zeros")):
        if getattr(part, what) != plain:
            wanted, got = f"a convolution with {what}={plain!r}", repr(getattr(part, what))
            raise InputError.of(f"start: {name}", wanted, got, ADVICE)
    if isinstance(part.padding, str):
        total = [size - 1 if part.padding == "same" else 0 for size in part.kernel_size]
        sides = [(each // 2, each - each // 2) for each in total]
    else:
        sides = [(each, each) for each in part.padding]
    return tuple(part.stride), tuple(sides)


def _torch_order(module: Any, names: set[str], problem: Problem, convolutional: bool) -> list[str]:
    """The names of layers in the order in which they run on one row; empty if the module does not run on it."""
    torch = sys.modules["torch"]
    first = next(module.parameters(), None)
    if isinstance(problem.inputs, Mapping) or first is None:
        return []
    row = torch.tensor(np.asarray(problem.inputs[:1])).to(first)
    if convolutional:
        row = row.movedim(-1, 1)
    order: list[str] = []
    try:
        # A copy, because running a module may change it.
        trial = copy.deepcopy(module).eval()
        for name, part in trial.named_modules():
            if name in names:
                part.register_forward_hook(lambda *_, name=name: order.append(name))
        # Warnings of torch about the layers concern users of the module's output.
        with torch.no_grad(), ignored():
            trial(row)
    except Exception:
        # The module needs other inputs than the program; the order of registration is used.
        return []
    return list(dict.fromkeys(order))


def dict_layers(
    parameters: Mapping[str, Any], weight: str, separator: str, layer: Callable[..., NetworkLayer]
) -> list[NetworkLayer]:
    """The layers in parameters by path, in their order, each `layer(name, weight, bias)`; `weight` is the last name."""
    left, layers = dict(parameters), []
    for path in parameters:
        name, _, last = path.rpartition(separator)
        if last == weight and np.ndim(left[path]) in (2, 3, 4):
            value, bias = left.pop(path), left.pop(f"{path.removesuffix(weight)}bias", None)
            layers.append(layer(name or "module", value, bias))
    if left:
        raise _unknown(left)
    return layers


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of nested dicts, as pairs (path, value)."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from leaves(value, (*path, str(name)))
    else:
        yield path, tree


def by_path(parameters: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """The leaves of nested parameters by their path in one string, without the collection "params" of Flax."""
    inner = parameters.get("params")
    whole = inner if set(parameters) == {"params"} and isinstance(inner, Mapping) else parameters
    return {separator.join(path): value for path, value in leaves(whole)}


def in_order_of(wanted: list[ProgramMap], layers: list[NetworkLayer]) -> list[NetworkLayer]:
    """Layers from a dict without a meaningful order, in the order of the program.

    They are matched by name if all names agree, else by shape and the number in their name; else the order is kept.
    """
    by_name = {layer.name: layer for layer in layers}
    if set(by_name) == {each.name for each in wanted}:
        return [by_name[each.name] for each in wanted]
    groups: dict[Any, list[NetworkLayer]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, layer.weight.shape), []).append(layer)
    sizes = {key: len(group) for key, group in groups.items()}
    if Counter((each.kind, each.shape) for each in wanted) != sizes:
        return layers
    for group in groups.values():
        if len(group) > 1:
            group.sort(key=_number_in(group))
    return [groups[each.kind, each.shape].pop(0) for each in wanted]


def _number_in(group: list[NetworkLayer]) -> Any:
    """A sort key: the numbers in the names of layers of one shape, which must be all that distinguishes the names."""
    stems = {re.sub(r"\d+", "#", layer.name) for layer in group}
    numbers = {layer.name: tuple(map(int, re.findall(r"\d+", layer.name))) for layer in group}
    if len(stems) > 1 or len(set(numbers.values())) < len(group):
        wanted = (
            "names that tell the order of layers of one shape, such as Dense_0 and Dense_1, since dicts of parameters "
            "are sorted on their way"
        )
        advice = "the names of the program's layers, or start={'site': array}"
        raise InputError.of("start", wanted, ", ".join(map(str, group)), advice)
    return lambda layer: numbers[layer.name]
