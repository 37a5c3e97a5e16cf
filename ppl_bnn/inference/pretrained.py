"""Networks that were trained elsewhere, as values of the sites of a program.

The parameters of a `bnn.module` are matched with a network of the same framework by name and shape. For layers of the
language names are not comparable: the linear maps and convolutions of the program, in the order in which they run, are
matched with the layers of a torch module, a `state_dict`, or Flax parameters. The layouts differ:

=============  =================  ==================  ============================
layer          here               torch               Flax
=============  =================  ==================  ============================
linear         weight (I, O)      weight (O, I)       kernel (I, O)
convolution    (kh, kw, C, O)     (O, C, kh, kw)      kernel (kh, kw, C, O)
along time     (k, C, O)          (O, C, k)           kernel (k, C, O)
flattening     (H, W, C)          (C, H, W)           (H, W, C)
=============  =================  ==================  ============================

So the rows of the first linear map after a torch convolution are reordered. The order of the program is found by a run
with a different value in each channel of each convolution. Activations, pooling, and stride and padding of bare arrays
are not compared. Frameworks are recognised by their types and are not imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.native import is_torch_module
from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import InputError, unknown_name
from ppl_bnn.inference import network_layers
from ppl_bnn.inference.flat_vector import first_rows
from ppl_bnn.inference.network_layers import NetworkLayer, ProgramMap, as_array, by_path
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import NetworkFunction, RecordMessages
from ppl_bnn.language.modules.jax import Nnx
from ppl_bnn.language.modules.module import framework_of
from ppl_bnn.language.modules.protocol import Call, Framework
from ppl_bnn.language.primitives import Handler, Message

# An error message names at most this many parameters and counts the others.
NAMED = 6


@dataclass(frozen=True)
class ProgramModule:
    """A `bnn.module` of the program that has free parameters; `sites` has the site of each parameter, or None."""

    use: Call
    sites: tuple[str | None, ...]


def is_network(start: Any, problem: Problem) -> bool:
    """Whether a start is a module, a `state_dict` or parameters of a module, and not a dict of sites.

    A dict is a `state_dict` if torch has marked it as one, or if it has torch tensors under names other than those of
    the sites. A dict that contains networks maps names of modules to networks.
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
    """The values of the sites of the program that are weights and biases of its network: constrained, float64, by site.

    A `bnn.module` takes a network of its framework with the same names and shapes; values that the program does not
    sample must be equal in both. A dict {name of a module: network} selects the module, and may have values of other
    sites. Layers are matched in the order in which they run (see `torch_layers`, `in_order_of`). Sites without a
    counterpart in a network, such as the noise, are not in the dict.
    """
    if not problem.program.language:
        wanted = "a model in the language, whose linear maps are known"
        raise InputError.of("start", wanted, "a plain NumPyro or Pyro model", "start={'site': array}")
    modules, has_layers = _modules(problem)
    if isinstance(module, Mapping) and any(map(_is_whole, module.values())):
        return _by_name(module, modules)
    if not modules:
        return _of_layers(module, problem)
    if has_layers:
        advice = f"start={{{next(iter(modules))!r}: network}} for a module alone, or start={{'site': array}}"
        got = f"one for modules ({_quoted(modules)}) and other layers"
        raise InputError.of("start", "a network for all of the program", got, advice)
    return _parameters_for(_meant(modules, module), module)


def _of_layers(module: Any, problem: Problem) -> dict[str, np.ndarray]:
    framework = framework_of(module)
    if framework is not None and framework.library == "jax" and not isinstance(framework, Nnx):
        wanted, got = "a network of torch or Flax for layers of the language", type(module).__name__
        advice = "bnn.module('net', x, network) in the model, or start={'site': array}"
        raise InputError.of("start", wanted, f"{got}, {framework.kind}", advice)
    wanted = _maps(problem)
    if is_torch_module(module):
        images = any(each.kind == "conv" for each in wanted)
        layers = network_layers.torch_layers(module, problem, convolutional=images)
    elif framework is None and not any(isinstance(value, Mapping) for value in module.values()):
        layers = network_layers.dict_layers(module, "weight", ".", network_layers.from_torch)
    else:
        if framework is None:
            paths = by_path(module, "/")
        else:
            paths = {name.replace(".", "/"): value for name, value in _named(framework, module).items()}
        layers = network_layers.dict_layers(paths, "kernel", "/", network_layers.from_flax)
        layers = network_layers.in_order_of(wanted, layers)
    _check(wanted, layers)
    pairs = list(zip(wanted, layers, strict=True))
    values = {each.weight: _reordered(each, layer) for each, layer in pairs}
    values |= {each.bias: layer.bias for each, layer in pairs if layer.bias is not None}
    return {name: values[name] for name in problem.program.sites if name in values}


# --- linear maps and modules of the program -----------------------------------------------------------


class _RecordCalls(Handler):
    """Records the linear maps and convolutions in the order in which they first run.

    Each channel of a convolution outputs its own constant. Activations and pooling keep this, so the input of a linear
    map shows in which order the image was flattened.
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
        site, offset = (self.names.get(id(value)) for value in (weight, bias))
        geometry = channels_first = None
        if msg.kind == "conv":
            around = (arguments["stride"], arguments["padding"])
            axes = len(weight.shape) - 2
            _, stride, margins, _ = ops.windows(msg.name, x, tuple(weight.shape[:axes]), *around, axes)
            geometry = (stride, margins)
        elif self.channels is not None:
            channels_first = _channels_first(np.asarray(x).reshape(-1, x.shape[-1])[0], self.channels)
        image = geometry, self.channels if msg.kind == "linear" else None, channels_first
        shape = tuple(weight.shape)
        found = ProgramMap(msg.name, msg.kind, shape, site, offset, bias is not None, *image)
        self.found.setdefault(site or msg.name, found)

    def after(self, msg: Message) -> None:
        if msg.kind == "conv":
            channels = self.channels = int(msg.value.shape[-1])
            # Small and positive, so that no activation maps two of them to the same value.
            msg.value = np.broadcast_to(np.linspace(0.1, 0.5, channels), msg.value.shape)
        elif msg.kind == "linear":
            self.channels = None


def _channels_first(features: np.ndarray, channels: int) -> bool | None:
    """Whether the places of one channel are adjacent in a flattened image; None if this cannot be determined."""
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
    program, data = problem.program, (problem.x, problem.y)
    drawn = program.constrain_draws(program.prior_draws(*data, problem.seed, 1), *data)
    values = {name: value[0] for name, value in drawn.items()}
    with NetworkFunction(values), _RecordCalls(values) as record:
        program.model(map_data(problem.system.to_numpy, first_rows(problem)[0]), None)
    found = list(record.found.values())
    if not found:
        wanted = "a program with linear maps, or with a module that has priors"
        advice = "bnn.dense, bnn.conv2d, bnn.linear or bnn.module in the model"
        raise InputError.of("start", wanted, "neither", advice)
    _refuse_computed(
        [each.name for each in found if each.weight is None or (each.has_bias and each.bias is None)]
    )
    return found


def _refuse_computed(computed: list[str]) -> None:
    if computed:
        got = f"{computed}, which it computes from other sites"
        advice = "a prior that samples the weights themselves, or start={'site': array}"
        raise InputError.of("start", "weights and biases that are sites of the program", got, advice)


def _modules(problem: Problem) -> tuple[dict[str, ProgramModule], bool]:
    """The modules of the program with free parameters, by name, and whether it has layers of the language besides.

    Computed from shapes only.
    """
    program, system = problem.program, problem.system
    record = RecordMessages()
    record.sees_maps = True
    system.describe(system.native(record.around(program.model)), first_rows(problem)[0], None)
    values = [msg for msg in record.messages if msg.kind in ("sample", "param") and msg.name in program.sites]
    names = {id(msg.value): msg.name for msg in values}
    uses = [msg.arguments.get("module") for msg in record.messages if msg.kind in ("linear", "conv")]
    found = {
        use.name: ProgramModule(use, tuple(names.get(id(value)) for value in use.values))
        for use in uses
        if use is not None and not all(use.held)
    }
    return found, None in uses


# --- matching a module with a network -----------------------------------------------------------------


def _by_name(start: Mapping[str, Any], modules: Mapping[str, ProgramModule]) -> dict[str, Any]:
    """Values of sites from a dict that maps names of modules to networks, with the values of other sites."""
    found = {name: value for name, value in start.items() if not _is_whole(value)}
    for name, network in start.items():
        if name in found:
            continue
        if name not in modules:
            raise unknown_name("module of the model in start", name, modules)
        for site, value in _parameters_for(modules[name], network).items():
            if site in found:
                got = f"an array, and the network {name!r}"
                raise InputError.of(f"start[{site!r}]", "each site once", got, "one of the two")
            found[site] = value
    return found


def _meant(modules: Mapping[str, ProgramModule], start: Any) -> ProgramModule:
    """The only module, or the one of several whose names and shapes match the network."""
    if len(modules) == 1:
        return next(iter(modules.values()))
    fitting = [
        name
        for name, each in modules.items()
        if (given := _given(each, start)) is not None and not any(_differences(each, given))
    ]
    if len(fitting) != 1:
        wanted = f"a network with the parameters of exactly one module of {_quoted(modules)}"
        got = f"one with those of {_quoted(fitting) if fitting else 'none'}"
        advice = f"start={{{(fitting or list(modules))[0]!r}: network, ...}}"
        raise InputError.of("start", wanted, got, advice)
    return modules[fitting[0]]


def _parameters_for(module: ProgramModule, start: Any) -> dict[str, np.ndarray]:
    """Values from the network for the sites of one module of the program."""
    use = module.use
    word = f"start: module {use.name!r}"
    given = _given(module, start)
    if given is None:
        kind = framework_of(start)
        got = type(start).__name__ if kind is None else f"{type(start).__name__}, {kind.kind}"
        wanted = f"{use.framework.kind}, as in the model, or the parameters of one in a dict"
        raise InputError.of(word, wanted, got, "the module of the model, or a trained copy of it")
    expected, got = _differences(module, given)
    if expected or got:
        wanted = f"its {len(use.parameters)} parameters alone"
        if expected:
            wanted = f"its parameters, among them {_some(expected)}"
        advice = (
            "a trained network of the class and the sizes of the one in the model, or start={'site': array}"
        )
        raise InputError.of(word, wanted, _some(got), advice)
    values = {each.name: as_array(each.name, given[each.name]) for each in use.parameters}
    rows = list(zip(use.parameters, module.sites, use.held, strict=True))
    moved = [each.name for each, _, held in rows if held and not _same(values[each.name], each.own)]
    _refuse_computed([f"{use.name}.{each.name}" for each, site, held in rows if site is None and not held])
    further, constants = use.framework.further_names(use.network), use.framework.constants(use.network)
    for name, value in given.items():
        if name in further and not _same(value, given[further[name]]):
            wanted = f"one value of {further[name]!r}, which the model has as {name!r} again"
            raise InputError.of(word, wanted, "two", "a network that shares it")
        if name in constants and not _same(value, constants[name]):
            moved.append(name)
    if moved:
        wanted = "the values that the model holds, which are those of its own module"
        advice = (
            f"the trained network itself in bnn.module({use.name!r}, x, network, ...), or for a parameter a prior or "
            "priors.Point(), which begins at the start"
        )
        raise InputError.of(word, wanted, f"others of {_some(map(repr, moved))}", advice)
    return {site: values[each.name] for each, site, held in rows if site is not None and not held}


def _given(module: ProgramModule, start: Any) -> dict[str, Any] | None:
    """All arrays of a network by dotted name; None if it is not of the framework of the module."""
    framework = framework_of(start)
    if framework is None:
        return by_path(start, ".") if isinstance(start, Mapping) else None
    return _named(framework, start) if type(framework) is type(module.use.framework) else None


def _named(framework: Framework, network: Any) -> dict[str, Any]:
    """All arrays of a network by dotted name, parameters first. A shared array appears under each of its names."""
    found = {}
    for parameter in framework.parameters("start", network):
        if parameter.own is None:
            wanted, advice = f"a value of {parameter.name!r}", "a network that has been initialised"
            raise InputError.of("start", wanted, "a shape only", advice)
        found[parameter.name] = parameter.own
    shared = {name: found[listed] for name, listed in framework.further_names(network).items()}
    return found | shared | framework.constants(network)


def _differences(module: ProgramModule, given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The parameters that the network lacks or has in another shape, and what it has instead or in addition."""
    use = module.use
    wanted = {parameter.name: parameter.shape for parameter in use.parameters}
    others = {*use.framework.constants(use.network), *use.framework.further_names(use.network)}
    found = {name: tuple(np.shape(value)) for name, value in given.items()}
    wrong = [name for name, shape in wanted.items() if found.get(name) != shape]
    extra = [name for name in given if name not in wanted and name not in others]
    got = [f"{name} {found[name]}" if name in found else f"no {name}" for name in wrong]
    return [f"{name} {wanted[name]}" for name in wrong], got + [f"{name} {found[name]}" for name in extra]


def _same(first: Any, second: Any) -> bool:
    first, second = network_layers.finite_numbers(first), network_layers.finite_numbers(second)
    return np.array_equal(first, second, equal_nan=first.dtype.kind == second.dtype.kind == "f")


def _some(items: Iterable[str]) -> str:
    """The first few items, and the number of the others."""
    items = list(items)
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(items[:NAMED]) + more


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def is_nnx(value: Any) -> bool:
    """Whether the value is a module of Flax NNX; Flax is not imported."""
    return isinstance(framework_of(value), Nnx)


def _is_whole(value: Any) -> bool:
    """Whether the value is a module of a framework, or a dict that torch has marked as a `state_dict`."""
    if isinstance(value, Mapping):
        return hasattr(value, "_metadata")
    return framework_of(value) is not None or is_torch_module(value)


def _check(wanted: list[ProgramMap], layers: list[NetworkLayer]) -> None:
    """Raise an error that lists both sides unless the layers match the maps in order."""

    def fits(each: ProgramMap, layer: NetworkLayer) -> bool:
        shapes = (each.shape, each.shape[-1:] if each.has_bias else None)
        given = (layer.weight.shape, None if layer.bias is None else layer.bias.shape)
        return each.kind == layer.kind and shapes == given and layer.geometry in (None, each.geometry)

    if len(wanted) == len(layers) and all(map(fits, wanted, layers)):
        return
    wanted_text = f"the layers of the program in order, [{'; '.join(map(str, wanted))}]"
    raise InputError.of("start", wanted_text, f"[{'; '.join(map(str, layers))}]", network_layers.ADVICE)


def _reordered(each: ProgramMap, layer: NetworkLayer) -> np.ndarray:
    """The weight with its rows in the order in which the program flattens an image."""
    if not layer.flattens_channels_first or each.after_channels is None or each.channels_first:
        return np.ascontiguousarray(layer.weight)
    if each.channels_first is None:
        wanted = (
            f"a program that flattens an image of {each.after_channels} channels before {each.name!r}, so that the "
            "order of the rows of its weight is known"
        )
        got = f"inputs of shape ({each.shape[0]},) that are no flattened image"
        advice = f"start={{{each.weight!r}: array}} with rows in the order of the program"
        raise InputError.of(f"start: {layer.name}", wanted, got, advice)
    places = each.shape[0] // each.after_channels
    rows = np.arange(each.after_channels * places).reshape(each.after_channels, places).T
    return layer.weight[rows.reshape(-1)]
