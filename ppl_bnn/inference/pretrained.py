"""Networks that were trained elsewhere, as values of the sites of a program.

The linear maps and the convolutions of the program, in the order in which they run, are set against the layers of a
torch module, of its `state_dict`, or of the parameters of a Flax module. The layouts differ, and each is translated:

=============  =================  ==================  ============================
layer          here               torch               Flax
=============  =================  ==================  ============================
linear         weight (I, O)      weight (O, I)       kernel (I, O)
convolution    (kh, kw, C, O)     (O, C, kh, kw)      kernel (kh, kw, C, O)
along time     (k, C, O)          (O, C, k)           kernel (k, C, O)
flattening     (H, W, C)          (C, H, W)           (H, W, C)
=============  =================  ==================  ============================

So the rows of the first linear map after a convolution of torch are put in the order in which the program flattens,
which is found by running the program with each channel of each convolution at a value of its own.

What cannot be seen from weights is not compared: activations and pooling, and for bare arrays the stride and
padding of a convolution. torch and Flax are recognised by their types and are imported by nobody here.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.errors import InputError, message
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import network_output
from ppl_bnn.language.primitives import Handler, Message
from ppl_bnn.ppl.protocol import Problem, map_data
from ppl_bnn.quiet import ignored

# ((stride down, across), ((top, bottom), (left, right))) of a convolution.
Geometry = tuple[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]
ADVICE = "a network of the same layers, or start={'site': array} in the shapes of the sites"


@dataclass(frozen=True)
class ProgramMap:
    """A linear map or a convolution of the program.

    weight, bias: the sites whose values they are; None where the program computes them from others, or has no bias.
    flattened: how many places a flattened image has, and whether channels come first in it; None where it is no
    image, or none whose order could be seen.
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
        return _described(self.name, self.kind, self.shape, self.has_bias, self.geometry)


@dataclass(frozen=True)
class Layer:
    """A layer of the network, in the layout of the program. flattens_channels_first: as torch does."""

    name: str
    kind: str
    weight: np.ndarray
    bias: np.ndarray | None
    geometry: Geometry | None = None
    flattens_channels_first: bool = False

    def __str__(self) -> str:
        return _described(self.name, self.kind, self.weight.shape, self.bias is not None, self.geometry)


def _described(
    name: str, kind: str, shape: tuple[int, ...], has_bias: bool, geometry: Geometry | None
) -> str:
    words = f"{name}: {kind} {tuple(shape)} {'with' if has_bias else 'without'} bias"
    return words if geometry is None else f"{words}, stride {geometry[0]}, padding {geometry[1]}"


def is_network(start: Any, problem: Problem) -> bool:
    """Whether `start` is a module, a `state_dict` or the parameters of a module, and no dict of sites.

    A flat dict by the names of the sites holds their values as they are. A dict is a `state_dict` where torch has
    marked it as one, or where it holds tensors of torch under names that are not those of the sites.
    """
    if _is_torch_module(start) or is_nnx(start):
        return True
    if not isinstance(start, Mapping) or not start:
        return False
    if any(isinstance(value, Mapping) for value in start.values()) or hasattr(start, "_metadata"):
        return True
    tensors = all(type(value).__module__.split(".")[0] == "torch" for value in start.values())
    return tensors and not set(start) <= set(problem.program.sites)


def weights_of(module: Any, problem: Problem) -> dict[str, np.ndarray]:
    """Constrained values (NumPy, float64) of the sites of the program that are weights and biases of its linear maps.

    Sites without a counterpart in a network, such as the noise or the scale of a prior, are not in the dict.

    module: a `torch.nn.Module` or its `state_dict()`; the parameters of a Flax module as nested dicts, with or without
    the collection "params" around them; an NNX module. The layers of a torch module are taken in the order in which
    they run where it runs on a row of the data, else in that of their registration; those of a `state_dict` in its
    order. Dicts of Flax may have been sorted by name on the way, so layers are found by name where all names are those
    of the program, else by shape, and among equal shapes by the number in their name (`Dense_0`, `Dense_1`).

    Raises
    ------
    InputError: a layer, a bias or a tensor without a counterpart, another stride or padding, a flattening whose order
    cannot be seen, a weight that the program computes from other sites, or a value that is not finite.
    """
    wanted = _maps(problem)
    if _is_torch_module(module):
        layers = _torch_layers(module, problem, convolutional=any(each.kind == "conv" for each in wanted))
    elif isinstance(module, Mapping) and not any(isinstance(value, Mapping) for value in module.values()):
        layers = _state_layers(module)
    else:
        layers = _in_order_of(wanted, _flax_layers(_nnx_parameters(module) if is_nnx(module) else module))
    _check(wanted, layers)
    values = {}
    for each, layer in zip(wanted, layers, strict=True):
        assert each.weight is not None
        values[each.weight] = _reordered(each, layer)
        if layer.bias is not None:
            assert each.bias is not None
            values[each.bias] = layer.bias
    return {name: values[name] for name in problem.program.sites if name in values}


# --- what the program has -----------------------------------------------------------------------------


class _Record(Handler):
    """The linear maps and convolutions in the order in which they first run.

    Each channel of a convolution leaves it with a value of its own, the same at every place: activations and pooling
    leave it so, and what enters a linear map shows in which order the image was flattened.
    """

    def __init__(self, values: Mapping[str, np.ndarray]):
        self.names = {id(value): name for name, value in values.items()}
        self.found: dict[str, ProgramMap] = {}
        self.channels: int | None = None

    def process(self, msg: Message) -> None:
        if msg.kind not in ("linear", "conv"):
            return
        arguments = msg.arguments
        x, weight, bias = (arguments[name] for name in ("x", "weight", "bias"))
        site = self.names.get(id(weight))
        geometry = channels_first = None
        if msg.kind == "conv":
            around = (arguments["stride"], arguments["padding"])
            if len(weight.shape) == 3:
                _, _, stride, margins = ops.sequence_as_image(msg.name, x, weight.shape[0], *around)
            else:
                _, stride, margins, _ = ops.windows(msg.name, x, weight.shape[:2], *around)
            geometry = (stride, margins)
        elif self.channels is not None:
            channels_first = _channels_first(np.asarray(x).reshape(-1, x.shape[-1])[0], self.channels)
        self.found.setdefault(
            site or msg.name,
            ProgramMap(
                msg.name,
                msg.kind,
                tuple(weight.shape),
                site,
                None if bias is None else self.names.get(id(bias)),
                bias is not None,
                geometry,
                self.channels if msg.kind == "linear" else None,
                channels_first,
            ),
        )

    def after(self, msg: Message) -> None:
        if msg.kind == "conv":
            channels = self.channels = int(msg.value.shape[-1])
            # Small and positive, so that no activation makes two of them equal.
            msg.value = np.broadcast_to(np.linspace(0.1, 0.5, channels), msg.value.shape)
        elif msg.kind == "linear":
            self.channels = None


def _channels_first(features: np.ndarray, channels: int) -> bool | None:
    """Whether a flattened image has the places of one channel beside each other; None if that cannot be seen."""
    if len(features) % channels:
        return None
    if len(features) == channels:
        return False
    for first, image in ((False, features.reshape(-1, channels)), (True, features.reshape(channels, -1).T)):
        marks = np.sort(image[0])
        same = np.allclose(image, image[:1], rtol=1e-9, atol=0.0)
        if same and np.all(np.diff(marks) > 1e-9 * np.abs(marks).max()):
            return first
    return None


def _maps(problem: Problem) -> list[ProgramMap]:
    program = problem.program
    if not program.language:
        raise InputError(
            "start: "
            + message(
                "a model in the language, whose linear maps are known",
                "a plain NumPyro or Pyro model",
                "start={'site': array}",
            )
        )
    drawn = program.constrain_draws(
        program.prior_draws(problem.x, problem.y, problem.seed, 1), problem.x, problem.y
    )
    values = {name: value[0] for name, value in drawn.items()}
    # A latent variable per row belongs to all rows of the training; nothing else needs more than one.
    x = problem.inputs if program.has_local or program.coupled else map_data(lambda a: a[:1], problem.inputs)
    record = _Record(values)

    def recorded(x: Any, y: Any = None) -> None:
        with record:
            program.model(x, y)

    network_output(recorded, values, x)
    found = list(record.found.values())
    if not found:
        raise InputError(
            "start: "
            + message(
                "a program with linear maps", "none", "bnn.dense, bnn.conv2d or bnn.linear in the model"
            )
        )
    computed = [each.name for each in found if each.weight is None or (each.has_bias and each.bias is None)]
    if computed:
        raise InputError(
            "start: "
            + message(
                "weights and biases that are sites of the program",
                f"{computed}, which it computes from other sites",
                "a prior that samples the weights themselves, or start={'site': array}",
            )
        )
    return found


# --- what the network has -----------------------------------------------------------------------------


def _is_torch_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_nnx(value: Any) -> bool:
    """Whether this is a module of Flax NNX, found without importing it."""
    return any(
        kind.__module__.startswith("flax.nnx") and kind.__name__ == "Module" for kind in type(value).__mro__
    )


def _array(name: str, value: Any) -> np.ndarray:
    """A copy in float64, so that the network may change afterwards."""
    if hasattr(value, "detach"):
        array = value.detach().cpu().double().numpy()
    else:
        array = np.asarray(value)
        # The short floating types of JAX are opaque to NumPy until they are widened.
        array = np.asarray(value, dtype=np.float64) if array.dtype.kind == "V" else array
    if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise InputError(f"start: {name}: " + message("finite numbers", _unfit(array), "a trained network"))
    return np.array(array, dtype=np.float64)


def _unfit(array: np.ndarray) -> str:
    return "NaN or an infinity" if array.dtype.kind in "fiu" else f"an array of {array.dtype}"


def _unknown(tensors: Mapping[str, Any]) -> InputError:
    listed = ", ".join(f"{name} {tuple(np.shape(value))}" for name, value in tensors.items())
    return InputError(
        "start: "
        + message(
            "linear layers and convolutions in one or two dimensions only",
            f"{listed}, which is the weight or the bias of neither",
            ADVICE,
        )
    )


def _from_torch(name: str, weight: Any, bias: Any, geometry: Geometry | None = None) -> Layer:
    array = _array(f"{name}.weight", weight)
    offset = None if bias is None else _array(f"{name}.bias", bias)
    if array.ndim == 2:
        return Layer(name, "linear", array.T, offset, None, True)
    # (O, C, places of the kernel) to (places, C, O), along time as in images.
    places = tuple(range(2, array.ndim))
    return Layer(name, "conv", array.transpose(*places, 1, 0), offset, geometry)


def _torch_layers(module: Any, problem: Problem, convolutional: bool) -> list[Layer]:
    torch = sys.modules["torch"]
    layers = {}
    for name, part in module.named_modules():
        tensors = dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
        if not tensors:
            continue
        shown = name or type(part).__name__
        if not isinstance(part, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d) or not set(tensors) <= {
            "weight",
            "bias",
        }:
            raise _unknown(
                {f"{shown}.{key} ({type(part).__name__})": value for key, value in tensors.items()}
            )
        geometry = None if isinstance(part, torch.nn.Linear) else _torch_geometry(shown, part)
        layers[name] = _from_torch(shown, part.weight, part.bias, geometry)
    order = _torch_order(module, set(layers), problem, convolutional)
    return [layers[name] for name in [*order, *(name for name in layers if name not in order)]]


def _torch_geometry(name: str, part: Any) -> Geometry:
    for what, plain in (("groups", 1), ("dilation", (1,) * len(part.kernel_size)), ("padding_mode", "zeros")):
        if getattr(part, what) != plain:
            raise InputError(
                f"start: {name}: "
                + message(f"a convolution with {what}={plain!r}", repr(getattr(part, what)), ADVICE)
            )
    if isinstance(part.padding, str):
        total = [size - 1 if part.padding == "same" else 0 for size in part.kernel_size]
        sides = [(each // 2, each - each // 2) for each in total]
    else:
        sides = [(each, each) for each in part.padding]
    if len(part.kernel_size) == 1:
        # As the program has it: an image of height 1.
        return (1, *part.stride), ((0, 0), sides[0])
    return tuple(part.stride), (sides[0], sides[1])


def _torch_order(module: Any, names: set[str], problem: Problem, convolutional: bool) -> list[str]:
    """The names of layers in the order in which they run on one row; none if the module does not run on it."""
    torch = sys.modules["torch"]
    first = next(module.parameters(), None)
    if isinstance(problem.inputs, Mapping) or first is None:
        return []
    row = torch.tensor(np.asarray(problem.inputs[:1])).to(first)
    if convolutional:
        row = row.movedim(-1, 1)
    order: list[str] = []
    try:
        # A copy: running a module may change it, and evaluation mode is not ours to set.
        trial = copy.deepcopy(module).eval()
        for name, part in trial.named_modules():
            if name in names:
                part.register_forward_hook(lambda *_, name=name: order.append(name))
        # What torch says of the module's layers is for whoever runs it for its output.
        with torch.no_grad(), ignored():
            trial(row)
    except Exception:
        # It wants other inputs than those of the program; the order of registration remains.
        return []
    return list(dict.fromkeys(order))


def _state_layers(state: Mapping[str, Any]) -> list[Layer]:
    left = dict(state)
    layers = []
    for key in state:
        name, _, last = key.rpartition(".")
        if last == "weight" and np.ndim(left[key]) in (2, 3, 4):
            weight, bias = left.pop(key), left.pop(f"{key[: -len('weight')]}bias", None)
            layers.append(_from_torch(name or "module", weight, bias))
    if left:
        raise _unknown(left)
    return layers


def _nnx_parameters(module: Any) -> Any:
    """Nested dicts of all variables of an NNX module but the states of its random number generators."""
    nnx = sys.modules["flax.nnx"]
    _, state, _ = nnx.split(module, nnx.Not(nnx.RngState), ...)
    return nnx.to_pure_dict(state)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, (*path, str(name)))
    else:
        yield path, tree


def _flax_layers(parameters: Mapping[str, Any]) -> list[Layer]:
    # The collection of parameters is no layer; other collections are shown with their names.
    inner = parameters["params"] if set(parameters) == {"params"} else parameters
    left = dict(_leaves(inner))
    layers = []
    for path in list(left):
        if path[-1] == "kernel" and np.ndim(left[path]) in (2, 3, 4):
            name = "/".join(path[:-1]) or "module"
            weight, bias = _array(name, left.pop(path)), left.pop((*path[:-1], "bias"), None)
            kind = "linear" if weight.ndim == 2 else "conv"
            layers.append(Layer(name, kind, weight, None if bias is None else _array(f"{name}/bias", bias)))
    if left:
        raise _unknown({"/".join(path): value for path, value in left.items()})
    return layers


# --- setting one against the other --------------------------------------------------------------------


def _in_order_of(wanted: list[ProgramMap], layers: list[Layer]) -> list[Layer]:
    """Layers of a dict whose order says nothing, in that of the program; as they came if the two do not fit."""
    by_name = {layer.name: layer for layer in layers}
    if set(by_name) == {each.name for each in wanted}:
        return [by_name[each.name] for each in wanted]
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, layer.weight.shape), []).append(layer)
    if sorted(map(str, [(each.kind, each.shape) for each in wanted])) != sorted(
        str((layer.kind, layer.weight.shape)) for layer in layers
    ):
        return layers
    for group in groups.values():
        if len(group) > 1:
            group.sort(key=_number_in(group))
    return [groups[each.kind, each.shape].pop(0) for each in wanted]


def _number_in(group: list[Layer]) -> Any:
    """The numbers in the names of layers of one shape, if those are all that tells the names apart."""
    stems = {re.sub(r"\d+", "#", layer.name) for layer in group}
    numbers = {layer.name: tuple(map(int, re.findall(r"\d+", layer.name))) for layer in group}
    if len(stems) > 1 or len(set(numbers.values())) < len(group):
        raise InputError(
            "start: "
            + message(
                "names that tell the order of layers of one shape, such as Dense_0 and Dense_1, since dicts of "
                "parameters are sorted on their way",
                ", ".join(map(str, group)),
                "the names of the program's layers, or start={'site': array}",
            )
        )
    return lambda layer: numbers[layer.name]


def _check(wanted: list[ProgramMap], layers: list[Layer]) -> None:
    """The same maps in the same order, or an error that lists both sides."""

    def fits(each: ProgramMap, layer: Layer) -> bool:
        return (
            (each.kind, each.shape, each.has_bias) == (layer.kind, layer.weight.shape, layer.bias is not None)
            and (layer.bias is None or layer.bias.shape == each.shape[-1:])
            and (layer.geometry is None or layer.geometry == each.geometry)
        )

    if len(wanted) == len(layers) and all(map(fits, wanted, layers)):
        return
    raise InputError(
        "start: "
        + message(
            f"the layers of the program in order, [{'; '.join(map(str, wanted))}]",
            f"[{'; '.join(map(str, layers))}]",
            ADVICE,
        )
    )


def _reordered(each: ProgramMap, layer: Layer) -> np.ndarray:
    """The weight with its rows in the order in which the program flattens an image."""
    if not layer.flattens_channels_first or each.after_channels is None:
        return np.ascontiguousarray(layer.weight)
    if each.channels_first is None:
        raise InputError(
            f"start: {layer.name}: "
            + message(
                f"a program that flattens an image of {each.after_channels} channels before {each.name!r}, so that "
                "the order of the rows of its weight is known",
                f"inputs of shape ({each.shape[0]},) that are no flattened image",
                f"start={{{each.weight!r}: array}} with rows in the order of the program",
            )
        )
    if each.channels_first:
        return np.ascontiguousarray(layer.weight)
    places = each.shape[0] // each.after_channels
    rows = np.arange(math.prod((each.after_channels, places))).reshape(each.after_channels, places).T
    return layer.weight[rows.reshape(-1)]
