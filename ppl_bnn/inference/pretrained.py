"""Networks that were trained elsewhere, as values of the sites of a program.

A `bnn.module` of the program has its parameters under the names that they have in the framework. It is set against a
network of the same framework by these names and by shapes, and values are taken as they are.

For layers of the language names say nothing. The linear maps and the convolutions of the program, in the order in which
they run, are set against the layers of a torch module, of its `state_dict`, or of the parameters of a Flax module. The
layouts differ, and each is translated:

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

What cannot be seen from weights is not compared: activations and pooling, for bare arrays the stride and padding of a
convolution, and for a module the functions that it is written in. torch, Flax and Equinox are recognised by their types
and are imported by nobody here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import InputError, message, unknown_name
from ppl_bnn.inference.network_layers import (
    ADVICE,
    Layer,
    ProgramMap,
    as_array,
    finite_numbers,
    flax_layers,
    in_order_of,
    is_torch_module,
    leaves,
    state_layers,
    torch_layers,
    without_collection,
)
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import network_output
from ppl_bnn.language.modules.module import framework_of
from ppl_bnn.language.modules.nnx import Nnx
from ppl_bnn.language.modules.protocol import Framework, ModuleUse
from ppl_bnn.language.primitives import Handler, Message

# How many parameters an error message names before it counts them.
NAMED = 6


@dataclass(frozen=True)
class ProgramModule:
    """A `bnn.module` of the program that is not held as a whole. sites: of its parameters, None where there is none."""

    use: ModuleUse
    sites: tuple[str | None, ...]


def is_network(start: Any, problem: Problem) -> bool:
    """Whether `start` is a module, a `state_dict` or the parameters of a module, and no dict of sites.

    A flat dict by the names of the sites holds their values as they are. A dict is a `state_dict` where torch has
    marked it as one, or where it holds tensors of torch under names that are not those of the sites. A dict that has
    networks among its values is one of networks by the names of modules.
    """
    if _is_whole(start):
        return True
    if not isinstance(start, Mapping) or not start:
        return False
    if any(isinstance(value, Mapping) or _is_whole(value) for value in start.values()):
        return True
    tensors = all(type(value).__module__.split(".")[0] == "torch" for value in start.values())
    return tensors and not set(start) <= set(problem.program.sites)


def weights_of(module: Any, problem: Problem) -> dict[str, np.ndarray]:
    """Constrained values (NumPy, float64) of the sites of the program that are weights and biases of its network.

    Sites without a counterpart in a network, such as the noise or the scale of a prior, are not in the dict.

    In a program with a `bnn.module`, module is a module of the same framework (torch, Flax NNX, Equinox) or the
    parameters of one: a `state_dict()` of torch, or nested dicts of arrays. Names and shapes must be those of the
    module in the program, and of several modules in the program those of exactly one. What the program takes from its
    own module must be equal in both: parameters that are held, and buffers and variables where the start has them. A
    dict {name of a module: network} says which module is meant, and may have the values of other sites beside it.

    In a program of layers, module is a `torch.nn.Module` or its `state_dict()`; the parameters of a Flax module as
    nested dicts, with or without the collection "params" around them; an NNX module. The layers of a torch module are
    taken in the order in which they run where it runs on a row of the data, else in that of their registration; those
    of a `state_dict` in its order. Dicts of Flax may have been sorted by name on the way, so layers are found by name
    where all names are those of the program, else by shape, and among equal shapes by the number in their name
    (`Dense_0`, `Dense_1`).

    Raises
    ------
    InputError: a layer, a parameter or a tensor without a counterpart, another stride or padding, a flattening whose
    order cannot be seen, a weight that the program computes from other sites, a held value that differs, modules beside
    layers or several modules without a word which is meant, or a value that is not finite. UnknownNameError: no module
    of that name.
    """
    _refuse_plain(problem)
    modules, has_layers = _modules(problem)
    if isinstance(module, Mapping) and any(map(_is_whole, module.values())):
        return _by_name(module, modules)
    if modules:
        if has_layers:
            name = next(iter(modules))
            raise InputError(
                "start: "
                + message(
                    "a network for all of the program",
                    f"one for modules ({_quoted(modules)}) and other layers",
                    f"start={{{name!r}: network}} for a module alone, or start={{'site': array}}",
                )
            )
        return _parameters_for(_meant(modules, module), module)
    return _of_layers(module, problem)


def _of_layers(module: Any, problem: Problem) -> dict[str, np.ndarray]:
    framework = framework_of(module)
    if framework is not None and framework.library == "jax" and not isinstance(framework, Nnx):
        raise InputError(
            "start: "
            + message(
                "a network of torch or Flax for layers of the language",
                f"{type(module).__name__}, {framework.kind}",
                "bnn.module('net', x, network) in the model, or start={'site': array}",
            )
        )
    wanted = _maps(problem)
    if is_torch_module(module):
        layers = torch_layers(module, problem, convolutional=any(each.kind == "conv" for each in wanted))
    elif framework is not None:
        named = _named(framework, module)
        layers = in_order_of(wanted, flax_layers({tuple(name.split(".")): named[name] for name in named}))
    elif any(isinstance(value, Mapping) for value in module.values()):
        layers = in_order_of(wanted, flax_layers(dict(leaves(without_collection(module)))))
    else:
        layers = state_layers(module)
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
        if msg.kind not in ("linear", "conv") or "module" in msg.arguments:
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
                "a program with linear maps, or with a module that has priors",
                "neither",
                "bnn.dense, bnn.conv2d, bnn.linear or bnn.module in the model",
            )
        )
    computed = [each.name for each in found if each.weight is None or (each.has_bias and each.bias is None)]
    _refuse_computed(computed)
    return found


def _refuse_computed(computed: list[str]) -> None:
    if computed:
        raise InputError(
            "start: "
            + message(
                "weights and biases that are sites of the program",
                f"{computed}, which it computes from other sites",
                "a prior that samples the weights themselves, or start={'site': array}",
            )
        )


def _refuse_plain(problem: Problem) -> None:
    if not problem.program.language:
        raise InputError(
            "start: "
            + message(
                "a model in the language, whose linear maps are known",
                "a plain NumPyro or Pyro model",
                "start={'site': array}",
            )
        )


class _RecordModules(Handler):
    """The modules that have a parameter which is not held, and whether there are linear maps besides."""

    def __init__(self, sites: Iterable[str]):
        self.known = set(sites)
        # Values by identity, which are kept so that no two have one.
        self.names: dict[int, tuple[str, Any]] = {}
        self.found: dict[str, ProgramModule] = {}
        self.has_layers = False

    def process(self, msg: Message) -> None:
        if msg.kind not in ("linear", "conv"):
            return
        use = msg.arguments.get("module")
        if use is None:
            self.has_layers = True
        elif not all(use.held):
            sites = tuple(self.names.get(id(value), (None, None))[0] for value in use.values)
            self.found[use.name] = ProgramModule(use, sites)

    def after(self, msg: Message) -> None:
        if msg.kind in ("sample", "param") and msg.name in self.known:
            self.names[id(msg.value)] = (msg.name, msg.value)


def _modules(problem: Problem) -> tuple[dict[str, ProgramModule], bool]:
    """The modules of the program by name, and whether it has layers of the language: from its shapes alone."""
    program, system = problem.program, problem.system
    record = _RecordModules(program.sites)

    def recorded(x: Any, y: Any = None) -> None:
        with record:
            program.model(x, None)

    # Rows of a latent variable belong to all rows, see `_maps`.
    whole = problem.x if program.has_local or program.coupled else map_data(lambda a: a[:1], problem.x)
    system.describe(system.native(recorded), whole, None)
    return record.found, record.has_layers


# --- a module against a network -----------------------------------------------------------------------


def _by_name(start: Mapping[str, Any], modules: Mapping[str, ProgramModule]) -> dict[str, Any]:
    """Values of sites from a dict that has networks under the names of modules, and the values of other sites."""
    found = {name: value for name, value in start.items() if not _is_whole(value)}
    for name, network in start.items():
        if name in found:
            continue
        if name not in modules:
            raise unknown_name("module of the model in start", name, modules)
        for site, value in _parameters_for(modules[name], network).items():
            if site in found:
                raise InputError(
                    f"start[{site!r}]: "
                    + message("each site once", f"an array, and the network {name!r}", "one of the two")
                )
            found[site] = value
    return found


def _meant(modules: Mapping[str, ProgramModule], start: Any) -> ProgramModule:
    """The only module, or of several the one whose names and shapes are those of the network."""
    if len(modules) == 1:
        return next(iter(modules.values()))
    fitting = []
    for name, each in modules.items():
        if _is_of_its_kind(each, start) and not any(_differences(each, _given(each, start))):
            fitting.append(name)
    if len(fitting) != 1:
        raise InputError(
            "start: "
            + message(
                f"a network with the parameters of exactly one module of {_quoted(modules)}",
                f"one with those of {_quoted(fitting) if fitting else 'none'}",
                f"start={{{(fitting or list(modules))[0]!r}: network, ...}}",
            )
        )
    return modules[fitting[0]]


def _parameters_for(module: ProgramModule, start: Any) -> dict[str, np.ndarray]:
    """Site -> value in the network `start`, for the parameters of one module of the program."""
    use = module.use
    word = f"start: module {use.name!r}"
    if not _is_of_its_kind(module, start):
        kind = framework_of(start)
        came = type(start).__name__ if kind is None else f"{type(start).__name__}, {kind.kind}"
        raise InputError(
            f"{word}: "
            + message(
                f"{use.framework.kind}, as in the model, or the parameters of one in a dict",
                came,
                "the module of the model, or a trained copy of it",
            )
        )
    given = _given(module, start)
    expected, came = _differences(module, given)
    if expected or came:
        raise InputError(
            f"{word}: "
            + message(
                f"its parameters, among them {_some(expected)}"
                if expected
                else f"its {len(use.parameters)} parameters alone",
                _some(came),
                "a trained network of the class and the sizes of the one in the model, or start={'site': array}",
            )
        )
    values: dict[str, np.ndarray] = {}
    computed, moved = [], []
    for parameter, site, held in zip(use.parameters, module.sites, use.held, strict=True):
        value = as_array(parameter.name, given[parameter.name])
        if held:
            if not _same(value, parameter.own):
                moved.append(parameter.name)
        elif site is None:
            computed.append(f"{use.name}.{parameter.name}")
        else:
            values[site] = value
    _refuse_computed(computed)
    further, constants = use.framework.further_names(use.network), use.framework.constants(use.network)
    for name, value in given.items():
        if name in further and not _same(value, given[further[name]]):
            raise InputError(
                f"{word}: "
                + message(
                    f"one value of {further[name]!r}, which the model has as {name!r} again",
                    "two",
                    "a network that shares it",
                )
            )
        if name in constants and not _same(value, constants[name]):
            moved.append(name)
    if moved:
        raise InputError(
            f"{word}: "
            + message(
                "the values that the model holds, which are those of its own module",
                f"others of {_some(map(repr, moved))}",
                f"the trained network itself in bnn.module({use.name!r}, x, network, ...), or for a parameter "
                "a prior or priors.Point(), which begins at the start",
            )
        )
    return values


def _is_of_its_kind(module: ProgramModule, start: Any) -> bool:
    framework = framework_of(start)
    if framework is None:
        return isinstance(start, Mapping)
    return type(framework) is type(module.use.framework)


def _given(module: ProgramModule, start: Any) -> dict[str, Any]:
    if framework_of(start) is not None:
        return _named(module.use.framework, start)
    return {".".join(path): value for path, value in leaves(without_collection(start))}


def _named(framework: Framework, network: Any) -> dict[str, Any]:
    """All arrays of a network by their dotted names, its parameters first; a shared one under each of its names."""
    found = {}
    for parameter in framework.parameters("start", network):
        if parameter.own is None:
            raise InputError(
                "start: "
                + message(
                    f"a value of {parameter.name!r}", "a shape only", "a network that has been initialised"
                )
            )
        found[parameter.name] = parameter.own
    shared = {name: found[listed] for name, listed in framework.further_names(network).items()}
    return found | shared | framework.constants(network)


def _differences(module: ProgramModule, given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The parameters that the network lacks or has in another shape, and what it has in their place or besides."""
    use = module.use
    wanted = {parameter.name: parameter.shape for parameter in use.parameters}
    others = {*use.framework.constants(use.network), *use.framework.further_names(use.network)}
    expected, came = [], []
    for name, shape in wanted.items():
        if name not in given:
            expected.append(f"{name} {shape}")
            came.append(f"no {name}")
        elif tuple(np.shape(given[name])) != shape:
            expected.append(f"{name} {shape}")
            came.append(f"{name} {tuple(np.shape(given[name]))}")
    extra = [name for name in given if name not in wanted and name not in others]
    return expected, came + [f"{name} {tuple(np.shape(given[name]))}" for name in extra]


def _same(first: Any, second: Any) -> bool:
    first, second = finite_numbers(first), finite_numbers(second)
    return np.array_equal(first, second, equal_nan=first.dtype.kind == second.dtype.kind == "f")


def _some(items: Iterable[str]) -> str:
    """The first of many, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(items[:NAMED]) + more


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def is_nnx(value: Any) -> bool:
    """Whether this is a module of Flax NNX, found without importing it."""
    return isinstance(framework_of(value), Nnx)


def _is_whole(value: Any) -> bool:
    """Whether this is a module of a framework, or what torch has marked as the `state_dict` of one."""
    if isinstance(value, Mapping):
        return hasattr(value, "_metadata")
    return framework_of(value) is not None or is_torch_module(value)


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
