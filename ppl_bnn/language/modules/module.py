"""Networks written in a framework as layers of a model: torch modules in Pyro, Flax NNX and Equinox modules in NumPyro.

A module is a function of its parameters and of its inputs. The parameters are sites of the model, each with its own
name and prior; the module itself is read and never written. No framework is imported here.

=============  ======================  ======================  ======================
               torch                   Flax NNX                Equinox
=============  ======================  ======================  ======================
linear         (out, in)               (in, out)               (out, in)
convolution    (out, in, places)       (places, in, out)       (out, in, places)
table          (symbols, width)        (symbols, width)        (symbols, width)
is called on   all rows, x             all rows, x             each row, x[n]
=============  ======================  ======================  ======================
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ppl_bnn.core.errors import ModelError, unknown_name
from ppl_bnn.core.settings import whole
from ppl_bnn.language import ops, primitives
from ppl_bnn.language.layers.declarations import GAIN
from ppl_bnn.language.modules import protocol
from ppl_bnn.language.modules.jax import Equinox, Nnx
from ppl_bnn.language.modules.protocol import Array, Call, Framework
from ppl_bnn.language.modules.torch import Torch
from ppl_bnn.language.prior_parts import Prior
from ppl_bnn.language.priors import CorrelatedConvolution, MatrixNormal, Normal, Point, SpectralNorm

Chosen = Prior | None
Priors = Prior | Mapping[str, Chosen] | Callable[[str, tuple[int, ...]], Chosen] | None
FanIns = Mapping[str, int] | Callable[[str, tuple[int, ...]], int] | None


def module(
    name: str,
    x: Any,
    network: Any,
    prior: Priors = None,
    *,
    fan_in: FanIns = None,
    coupled: bool = False,
    mode: str | None = None,
) -> Array:
    """The output network(x) of a module, with its parameters drawn from priors.

        w_k ~ prior_k for each parameter k of the module,   result = network(x; w).

    Samples `name.<parameter>` for each parameter, in the shape and under the dotted name that it has in the module:
    "0.weight" in a `torch.nn.Sequential`, "layers.0.kernel" in an NNX module, "layers[0].weight" of an Equinox module
    as "layers.0.weight". The module is neither changed nor copied: its state when the model runs is used.

    Parameters
    ----------
    name : str
        Name of the layer.
    x : array, dict or tuple
        An array, or a dict of arrays, with the rows as first axis; a tuple of them is passed as several arguments. The
        module gets the layout of the model, and must convert it if necessary (torch has channels first).
    network : torch.nn.Module, flax.nnx.Module or equinox.Module
        A module of torch (in Pyro), or of Flax NNX or Equinox (in NumPyro). An Equinox module is
        called on each row separately, as its layers expect; the two others on all rows.
    prior : Prior, mapping or callable, optional
        One prior for all parameters, a dict of names and shell patterns ("*.bias"), or a function (name, shape) ->
        prior. In a dict a name takes precedence over patterns, and the first pattern over later ones; each must apply
        to a parameter, and each parameter must have one. None in place of a prior holds a parameter at its value in the
        module, a constant; `priors.Point()` fits it as a point estimate, started from that value. Default: N(0, 1 /
        fan_in), and for the factors of a normalisation N(1, 0.25^2) as in `bnn.layer_norm`.
    fan_in : mapping or callable, optional
        The numbers of inputs for priors with scale="fan_in", given as `prior`; parameters may be left out. By default
        the product of the `in` and `places` of the table at the top of this file, without the groups of a convolution;
        1 for parameters called bias, for vectors and scalars, for normalisations, and for tables of symbols. Other
        weights with several axes count as linear maps of their framework: all axes but the first, in NNX all but the
        last.
    coupled : bool
        Whether the rows interact, as in a graph network (`bnn.coupled`); an Equinox module then gets all rows.

    mode : {None, "eval"}
        "eval" runs the module in evaluation mode and leaves it in the mode that it had: without dropout, and with the
        running statistics of batch normalisation. None runs the module as it is.

    Returns
    -------
    array
        The output (N, ...) of the module.

    Raises
    ------
    UnsupportedError
        A module of the other system.
    ModelError
        Not a module, a module that is not a function of its parameters and inputs (see Notes), inputs or outputs that
        do not fit, or a parameter without a prior.
    UnknownNameError
        A name or a pattern without a parameter.

    Notes
    -----
    Requirements. Dropout, batch normalisation and spectral normalisation are refused in training mode. So are modules
    that write into their buffers or variables, draw random numbers, or mix rows (found by running the module once on
    artificial rows). In evaluation mode the running statistics are constants, which is supported. Buffers and variables
    that are not parameters are converted to the floating type and the device of the fit.

    Features. If all parameters are held and the module is applied to the inputs of the model, unchanged, a fit computes
    its outputs for the training rows before the first step, keeps them in memory, and does not run the module in its
    steps. A network with a head has to be split for this, into a held body and a layer on its output. Streamed rows,
    rows that interact, models with `bnn.rows`, and outputs of more than 1 GiB are excluded: their module runs in every
    step.

    Trained networks. A method with `start=network` starts at its parameters: each site `name.<parameter>` at the value
    of that name in the network, unchanged, also for `Point`. The network is `network` itself, another module of its
    framework with the same names and shapes, or the parameters in a dict (the `state_dict` of a torch module).
    Constants of the model, such as a parameter that is held, a buffer or a variable, must have the same value in the
    start. All other sites, such as the noise, start at a draw from the prior; `bnn.Laplace(optimise=False)` finds their
    mode with the network held. The Laplace approximation of a network trained elsewhere is therefore
    `bnn.Laplace(ppl="pyro", start=network, optimise=False)`, and `prior` should be that of the training (weight decay).
    In a model with several modules or other layers, start={name: network} specifies the module; values of other sites
    may be in the same dict.

    Handlers. To handlers that read linear maps the module is one map under its name, whose weight is not a site.
    Laplace therefore differentiates its parameters directly (`structure="kron"` has an exact block for each of them),
    and local reparameterisation and MC dropout cannot act inside the module. On NumPy arrays (when a model is listed,
    or a prediction is planned) the framework runs on converted numbers, in the wider of their types.

    Examples
    --------
    >>> import torch
    >>> import ppl_bnn as bnn
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.module("net", x, network), bnn.likelihoods.Gaussian(1.0))
    >>> [(site.name, site.shape) for site in bnn.zoo.sketch(model, 4).sites]
    [('net.0.weight', (3, 4)), ('net.0.bias', (3,)), ('net.2.weight', (1, 3)), ('net.2.bias', (1,))]
    """
    word = f"module({name!r})"
    framework = _framework(word, network)
    ModelError.check(mode in (None, "eval"), word, "mode=None or 'eval'", repr(mode), "mode='eval'")
    inputs = x if isinstance(x, tuple) else (x,)
    rows = _row_count(word, inputs, coupled)
    protocol.check_system(word, framework, network, inputs)
    with framework.in_evaluation(network) if mode else contextlib.nullcontext(network) as chosen:
        framework.refuse(word, chosen)
        parameters = framework.parameters(word, chosen)
        advice = "calling it in the model"
        ModelError.check(parameters, word, "a module with parameters", "one without any", advice)
        call = Call(name, framework, chosen, parameters, coupled, network)
        values, sampled = _values(call, prior, fan_in)
        call = dataclasses.replace(call, values=values)
        if coupled:
            primitives.coupled()
        if sampled:
            output = call(sampled, inputs, rows)
        else:
            # A handler may know the output.
            held = {"x": inputs, "output": functools.partial(call, [], inputs, rows)}
            output = primitives.send(primitives.Message("held", name, held))
        if primitives.maps_are_seen():
            # Handlers see a linear map without outputs, on the numbers that the module stores for a row. The message
            # has one more argument, the `Call`.
            numbers = call.numbers_per_row(inputs, rows, protocol.type_name(output))
            zero = ops.zeros_like(output.reshape(-1)[:1])
            x, weight = ops.broadcast_to(zero, (rows, numbers)), ops.broadcast_to(zero, (numbers, 0))
            arguments = {"x": x, "weight": weight, "bias": None, "module": call}
            primitives.send(primitives.Message("linear", name, arguments))
    return output


def _values(call: Call, prior: Priors, fan_in: FanIns) -> tuple[list[Array], list[Array]]:
    """The values of the parameters, in order, and those of them that are sites."""
    chosen = _chosen(call, prior)
    inputs = {} if fan_in is None else _by_name(call, "fan_in", fan_in, every=False)
    values, sampled = [], []
    for parameter in call.parameters:
        given, label, own = chosen[parameter.name], repr(parameter.name), parameter.own
        site = f"{call.name}.{parameter.name}"
        if given is None:
            expected, advice = f"a value of {label} to hold", "a module that has been initialised, or a prior"
            call.check(own is not None, expected, "a module with shapes only", advice)
            values.append(own)
            continue
        if own is not None:
            given = _from_value(given, functools.partial(call.framework.start, own))
        count = inputs.get(parameter.name, parameter.fan_in)
        expected = f"a positive whole number as fan_in of {label}"
        call.check(not whole(1)(count), expected, repr(count), "1")
        value = given(site, parameter.shape, int(count))
        shape, wanted = tuple(getattr(value, "shape", ())), parameter.shape
        expected, advice = f"{label} of shape {wanted} from its prior", "a prior of that shape"
        call.check(shape == wanted, expected, f"shape {shape}", advice)
        values.append(value)
        sampled.append(value)
    return values, sampled


def _from_value(prior: Any, start: Callable[[], Any]) -> Any:
    """The prior, with points that begin at the value that `start` makes."""
    if isinstance(prior, SpectralNorm):
        return dataclasses.replace(prior, prior=_from_value(prior.prior, start))
    return (lambda site, *_: primitives.param(site, start())) if isinstance(prior, Point) else prior


def _chosen(call: Call, prior: Priors) -> dict[str, Chosen]:
    """The prior of each parameter, None for one that is held."""
    if prior is None:
        return {each.name: GAIN if each.gain else Normal(0.0, "fan_in") for each in call.parameters}
    found: dict[str, Any] = dict.fromkeys((each.name for each in call.parameters), prior)
    if isinstance(prior, Mapping) or (not _is_prior(prior) and _accepts(prior, 2)):
        found = _by_name(call, "prior", prior, every=True)
    for parameter in call.parameters:
        given = found[parameter.name]
        if given is not None and not _is_prior(given):
            got = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
            expected = f"a prior of {parameter.name!r}, or None to hold it"
            raise ModelError.of(call.word, expected, got, "bnn.priors.Normal(0.0, 'fan_in')")
        structured = isinstance(given, MatrixNormal | CorrelatedConvolution)
        # Of a matrix it is that of the transpose.
        spectral = isinstance(given, SpectralNorm) and len(parameter.shape) > 2
        by_axis = structured or spectral or getattr(given, "per", None) in ("unit", "input")
        if by_axis and not parameter.inputs_first:
            expected = f"a prior of {parameter.name!r} that treats all its weights alike, since its axes "
            expected += f"{parameter.shape} are not (..., inputs, outputs)"
            advice = "per='tensor' or 'weight', or the layer of this library in its place"
            raise ModelError.of(call.word, expected, repr(given), advice)
    return found


def _is_prior(given: Any) -> bool:
    """Whether it is called as (name, shape, fan_in); the priors of this library are recognised without inspection."""
    return type(given).__module__ == Normal.__module__ or _accepts(given, 3)


def _accepts(given: Any, count: int) -> bool:
    """Whether a function accepts that many positional arguments."""
    if isinstance(given, type) or not callable(given):
        return False
    try:
        inspect.signature(given).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _by_name(call: Call, what: str, given: Any, every: bool) -> dict[str, Any]:
    """Values for each parameter from a dict of names and patterns or a function (name, shape); of all if `every`."""
    if not isinstance(given, Mapping):
        expected = f"{what} as a dict of names and patterns, or as a function (name, shape)"
        call.check(_accepts(given, 2), expected, repr(given), f"{what}={{'*': ...}}")
        return {each.name: given(each.name, each.shape) for each in call.parameters}
    names = [each.name for each in call.parameters]
    matching = {name: [key for key in given if fnmatchcase(name, str(key))] for name in names}
    # A name takes precedence over patterns.
    serves = {name: name if name in given else next(iter(matching[name]), None) for name in names}
    for name in names if every else ():
        if serves[name] is None:
            near = difflib.get_close_matches(name, map(str, given), n=1, cutoff=0.0)
            got = f"none for {name!r}" + (f" (the nearest is {near[0]!r})" if near else "")
            expected = f"a {what} for every parameter: {', '.join(names)}"
            advice = f"{{..., {name!r}: ...}}, or '*' as the last pattern"
            raise ModelError.of(call.word, expected, got, advice)
    for key in given:
        if key in serves.values():
            continue
        matched = next((name for name in names if key in matching[name]), None)
        if matched is None:
            raise unknown_name(f"parameter in {what} of {call.word}", key, names)
        got = f"{key!r}, after {serves[matched]!r} has served {matched!r}"
        expected = f"a pattern in {what} that serves a parameter"
        raise ModelError.of(call.word, expected, got, "the narrower pattern first")
    return {name: given[key] for name, key in serves.items() if key is not None}


def _row_count(word: str, inputs: tuple[Any, ...], coupled: bool) -> int:
    """The number of rows of the inputs."""
    lengths = [int(each.shape[0]) if len(each.shape) else None for each in protocol.arrays_in(inputs)]
    good = lengths and None not in lengths and (coupled or len(set(lengths)) == 1)
    expected = "an array, a dict or a tuple of arrays, with one first axis, that of the rows"
    got = f"lengths {lengths}" if lengths else "no array"
    ModelError.check(good, word, expected, got, "x, or x[:, None]")
    assert lengths[0] is not None
    return lengths[0]


def framework_of(network: Any) -> Framework | None:
    """The framework of a module; None for anything else, including a PyroModule and a module of flax.linen."""
    homes = _homes(network)
    if ("torch", "Module") in homes and ("pyro", "PyroModule") not in homes:
        return Torch()
    if ("equinox", "Module") in homes:
        return Equinox()
    if homes.get(("flax", "Module"), "").startswith("flax.nnx"):
        return Nnx()
    return None


def _framework(word: str, network: Any) -> Framework:
    """The framework of a module, or an error for anything else."""
    found = framework_of(network)
    if found is not None:
        return found
    homes = _homes(network)
    if isinstance(network, type):
        got, advice = f"the class {network.__name__}", f"{network.__name__}(...), made outside of the model"
    elif ("pyro", "PyroModule") in homes:
        got, advice = "a PyroModule", "the plain torch module, whose priors are given here by prior="
    elif ("flax", "Module") in homes:
        got = f"{type(network).__name__}, a module of flax.linen"
        advice = "flax.nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)"
    else:
        got, advice = repr(network), "bnn.dense and bnn.linear for functions written in the model"
    raise ModelError.of(word, "a torch.nn.Module, a flax.nnx.Module or an equinox.Module", got, advice)


def _homes(network: Any) -> dict[tuple[str, str], str]:
    """(package, name) of all classes of an object -> the module that defines them; nothing for a class itself."""
    kinds = () if isinstance(network, type) else type(network).__mro__
    return {(each.__module__.partition(".")[0], each.__name__): each.__module__ for each in kinds}
