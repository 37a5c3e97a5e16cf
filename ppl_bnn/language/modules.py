"""Networks written in a framework, as layers of a model: torch modules in Pyro, Flax NNX and Equinox in NumPyro.

A module is a function of its parameters and of its inputs. Here the parameters are sites of the model, each under its
own name and prior, and the module itself is read and never written. Nobody here imports a framework: whoever has a
module has loaded it.

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
import difflib
import functools
import inspect
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np

from ppl_bnn.errors import BNNError, ModelError, UnsupportedError, message, unknown_name
from ppl_bnn.language import ops, primitives
from ppl_bnn.language.layers import GAIN
from ppl_bnn.language.priors import CorrelatedConvolution, MatrixNormal, Normal, Point, Prior

Array = Any
Chosen = Prior | None
Priors = Prior | Mapping[str, Chosen] | Callable[[str, tuple[int, ...]], Chosen] | None
FanIns = Mapping[str, int] | Callable[[str, tuple[int, ...]], int] | None


def module(
    name: str, x: Any, network: Any, prior: Priors = None, *, fan_in: FanIns = None, coupled: bool = False
) -> Array:
    """network(x), with the parameters of the module `network` drawn from priors.

        w_k ~ prior_k for each parameter k of the module,   result = network(x; w).

    Samples `name.<parameter>` for each parameter, in the shape and under the dotted name that it has in the module:
    "0.weight" in a `torch.nn.Sequential`, "layers.0.kernel" in an NNX module, "layers[0].weight" of an Equinox module
    as "layers.0.weight". The module is not changed, and no copy of it is kept: what it is when the model runs counts.

    network: a `torch.nn.Module` (in Pyro), a `flax.nnx.Module` or an `equinox.Module` (in NumPyro). An Equinox module
    is called on each row by itself, as its layers are written; the two others on all rows. Images and sequences come to
    it as they come to the model, so a layout of its own (torch has channels first) is arranged inside the module.

    x: an array, or a dict of arrays, whose first axis are the rows; a tuple of them is handed over as several
    arguments. Result: the array (N, ...) that the module gives.

    prior: one prior for all parameters, a dict of names and patterns ("*.bias", as in the shell), or a function
    (name, shape) -> prior. In a dict a name goes before patterns, and of several patterns the first serves; each must
    serve a parameter and each parameter must be served. In place of a prior, None holds a parameter at the value it has
    in the module, a constant; `priors.Point()` fits it by itself, from that value, so that a network is Bayesian in
    part. Default: N(0, 1 / fan_in), and for the factors of a normalisation N(1, 0.25^2) as in `bnn.layer_norm`. Whether
    a tensor of torch requires a gradient plays no part.

    fan_in: the numbers of inputs that priors with scale="fan_in" are told, where they are not these: the product of the
    `in` and `places` of the table above, with the groups of a convolution taken off; 1 for what is called a bias, for
    vectors and scalars, for normalisations, and for tables of symbols. Other weights with several axes count as linear
    maps of their framework: all axes but the first, in NNX all but the last. A dict or a function, as for `prior`, but
    parameters may be left out.

    coupled: whether the rows interact, as in a graph network (`bnn.coupled`); an Equinox module then gets all rows.

    What it must be. A density has no randomness and one row has no part in another: dropout and batch normalisation
    that are training are refused, as are modules that write into their buffers or variables, draw random numbers, or
    mix rows (found by running the module once on made-up rows). In evaluation mode the running statistics are
    constants, and all is well. Buffers and variables that are no parameters follow the floating type and the device of
    the fit, whatever type the module was made in.

    What others see of it. To handlers that look at linear maps the module is one map under its name, whose weight is no
    site. So Laplace differentiates its parameters directly (`structure="kron"` has an exact block for each of them),
    and local reparameterisation, MC dropout and `start=network` cannot look inside. On arrays of NumPy (when a model is
    listed, or a prediction is planned) the framework runs on converted numbers, in the wider of their types.

    Raises
    ------
    UnsupportedError: a module of the other system. ModelError: no module, one that is not a function as above, inputs
    or outputs that do not fit, a parameter without a prior. UnknownNameError: a name or a pattern without a parameter.
    """
    word = f"module({name!r})"
    framework = _framework(word, network)
    inputs = x if isinstance(x, tuple) else (x,)
    rows = _row_count(word, inputs, coupled)
    _check_system(word, framework, network, inputs)
    framework.refuse(word, network)
    parameters = framework.parameters(word, network)
    if not parameters:
        raise ModelError(
            f"{word}: " + message("a module with parameters", "one without any", "calling it in the model")
        )
    values, sampled = _values(word, name, framework, parameters, prior, fan_in)
    if coupled:
        primitives.coupled()
    call = _Call(word, framework, network, parameters, coupled)
    output = call(values, sampled, inputs, rows)
    if primitives.maps_are_seen():
        _show(name, output, rows, call.held(inputs, rows, _type_name(output)))
    return output


def _show(name: str, output: Array, rows: int, held: int) -> None:
    """The module as handlers see it: a linear map without outputs, on as many numbers as it holds for a row."""
    zero = ops.zeros_like(output.reshape(-1)[:1])
    primitives.linear(name, ops.broadcast_to(zero, (rows, held)), ops.broadcast_to(zero, (held, 0)))


# --- parameters, and what they are drawn from -------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter of a module.

    own: the module's value, in its framework; None where it has a shape only. gain: whether it multiplies what has been
    normalised. inputs_first: whether its axes are (..., inputs, outputs), as in the layers of this library.
    """

    name: str
    shape: tuple[int, ...]
    fan_in: int
    own: Any
    gain: bool
    inputs_first: bool


def _values(
    word: str,
    name: str,
    framework: _Framework,
    parameters: Sequence[Parameter],
    prior: Priors,
    fan_in: FanIns,
) -> tuple[list[Array], list[Array]]:
    """The values of the parameters, in order, and those of them that are sites."""
    chosen = _chosen(word, prior, parameters)
    inputs = {} if fan_in is None else _by_name(word, "fan_in", fan_in, parameters, every=False)
    values, sampled = [], []
    for parameter in parameters:
        given = chosen[parameter.name]
        site = f"{name}.{parameter.name}"
        if given is None:
            if parameter.own is None:
                raise ModelError(
                    f"{word}: "
                    + message(
                        f"a value of {parameter.name!r} to hold",
                        "a module with shapes only",
                        "a module that has been initialised, or a prior",
                    )
                )
            values.append(parameter.own)
            continue
        if isinstance(given, Point) and parameter.own is not None:
            value = primitives.param(site, framework.start(parameter.own))
        else:
            count = inputs.get(parameter.name, parameter.fan_in)
            if isinstance(count, bool) or not hasattr(count, "__index__") or count < 1:
                raise ModelError(
                    f"{word}: "
                    + message(f"a positive whole number as fan_in of {parameter.name!r}", repr(count), "1")
                )
            value = given(site, parameter.shape, int(count))
        if tuple(getattr(value, "shape", ())) != parameter.shape:
            raise ModelError(
                f"{word}: "
                + message(
                    f"{parameter.name!r} of shape {parameter.shape} from its prior",
                    f"shape {tuple(getattr(value, 'shape', ()))}",
                    "a prior that draws the shape it is given",
                )
            )
        values.append(value)
        sampled.append(value)
    return values, sampled


def _chosen(word: str, prior: Priors, parameters: Sequence[Parameter]) -> dict[str, Chosen]:
    """The prior of each parameter, None for one that is held."""
    if prior is None:
        return {each.name: GAIN if each.gain else Normal(0.0, "fan_in") for each in parameters}
    found: dict[str, Any] = dict.fromkeys((each.name for each in parameters), prior)
    if isinstance(prior, Mapping) or (not _is_prior(prior) and _accepts(prior, 2)):
        found = _by_name(word, "prior", prior, parameters, every=True)
    checked = []
    for parameter in parameters:
        given = found[parameter.name]
        if given is None or any(given is other for other in checked):
            continue
        if not _is_prior(given):
            came = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
            raise ModelError(
                f"{word}: "
                + message(
                    f"a prior of {parameter.name!r}, or None to hold it",
                    came,
                    "bnn.priors.Normal(0.0, 'fan_in')",
                )
            )
        checked.append(given)
    for parameter in parameters:
        if not parameter.inputs_first and _by_axis(found[parameter.name]):
            raise ModelError(
                f"{word}: "
                + message(
                    f"a prior of {parameter.name!r} that treats all its weights alike, since its axes "
                    f"{parameter.shape} are not (..., inputs, outputs)",
                    repr(found[parameter.name]),
                    "per='tensor' or 'weight', or the layer of this library in its place",
                )
            )
    return found


def _is_prior(given: Any) -> bool:
    """Whether it is called as (name, shape, fan_in); the priors of this library are known without a look."""
    if isinstance(given, type) or not callable(given):
        return False
    return type(given).__module__ == Normal.__module__ or _accepts(given, 3)


def _accepts(given: Any, count: int) -> bool:
    """Whether a function takes so many positional arguments."""
    if isinstance(given, type) or not callable(given):
        return False
    try:
        inspect.signature(given).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _by_axis(prior: Any) -> bool:
    """Whether a prior tells the axes of a weight apart."""
    return isinstance(prior, MatrixNormal | CorrelatedConvolution) or getattr(prior, "per", None) in (
        "unit",
        "input",
    )


def _by_name(
    word: str, what: str, given: Any, parameters: Sequence[Parameter], every: bool
) -> dict[str, Any]:
    """What a dict of names and patterns, or a function (name, shape), gives each parameter.

    every: whether each parameter must be served.
    """
    if not isinstance(given, Mapping):
        if not _accepts(given, 2):
            raise ModelError(
                f"{word}: "
                + message(
                    f"{what} as a dict of names and patterns, or as a function (name, shape)",
                    repr(given),
                    f"{what}={{'*': ...}}",
                )
            )
        return {each.name: given(each.name, each.shape) for each in parameters}
    names = [each.name for each in parameters]
    serves: dict[str, str] = {}
    for name in names:
        patterns = [key for key in given if name == key] or [
            key for key in given if fnmatchcase(name, str(key))
        ]
        if patterns:
            serves[name] = patterns[0]
        elif every:
            near = difflib.get_close_matches(name, map(str, given), n=1, cutoff=0.0)
            nearest = f" (the nearest is {near[0]!r})" if near else ""
            raise ModelError(
                f"{word}: "
                + message(
                    f"a {what} for every parameter: {', '.join(names)}",
                    f"none for {name!r}{nearest}",
                    f"{{..., {name!r}: ...}}, or '*' as the last pattern",
                )
            )
    for key in given:
        if key in serves.values():
            continue
        matched = [name for name in names if fnmatchcase(name, str(key))]
        if not matched:
            raise unknown_name(f"parameter in {what} of {word}", key, names)
        raise ModelError(
            f"{word}: "
            + message(
                f"a pattern in {what} that serves a parameter",
                f"{key!r}, after {serves[matched[0]]!r} has served {matched[0]!r}",
                "the narrower pattern first",
            )
        )
    return {name: given[key] for name, key in serves.items()}


# --- what a module is given -------------------------------------------------------------------------


def _arrays(value: Any) -> Iterator[Array]:
    """The arrays of an argument: itself, or those of a dict or of a list."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _arrays(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _arrays(each)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield value


def _mapped(function: Callable[[Array], Array], value: Any) -> Any:
    """The argument with `function` applied to its arrays."""
    if isinstance(value, Mapping):
        return {name: _mapped(function, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, each) for each in value)
    return function(value) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def _row_count(word: str, inputs: tuple[Any, ...], coupled: bool) -> int:
    lengths = [int(each.shape[0]) if len(each.shape) else None for each in _arrays(inputs)]
    if not lengths or None in lengths or (len(set(lengths)) > 1 and not coupled):
        raise ModelError(
            f"{word}: "
            + message(
                "an array, a dict or a tuple of arrays, with one first axis, that of the rows",
                f"lengths {lengths}" if lengths else "no array",
                "x, or x[:, None]",
            )
        )
    assert lengths[0] is not None
    return lengths[0]


def _library(array: Array) -> str:
    """ "torch", "jax" or "numpy"."""
    return ops.namespace(array).__name__.partition(".")[0]


def _check_system(word: str, framework: _Framework, network: Any, arrays: Any) -> None:
    """Refuse a module of one system on arrays of the other, before anything is drawn or compiled."""
    for array in _arrays(arrays):
        if _library(array) not in ("numpy", framework.library):
            other = "a Flax NNX or an Equinox module" if framework.library == "torch" else "a torch.nn.Module"
            raise UnsupportedError(
                f"{word}: "
                + message(
                    f"ppl={framework.system!r}, the system of {framework.kind}",
                    f"{type(network).__name__} in a model that runs on arrays of {_library(array)}",
                    f"ppl={framework.system!r}, or {other}",
                )
            )


def _is_float(array: Array) -> bool:
    return "float" in str(array.dtype)


def _type_name(array: Array) -> str:
    """The type of the numbers of an array of any library, by its name in NumPy."""
    return str(array.dtype).rpartition(".")[2]


# --- running a module -------------------------------------------------------------------------------


class _Framework(Protocol):
    """What is asked of a framework. Values come in the order of the parameters."""

    library: str
    system: str
    kind: str
    # Whether a module is handed all rows at once, so that it could join them.
    sees_all_rows: bool

    def refuse(self, word: str, network: Any) -> None:
        """Refuse what is seen without running it: parts that are random, or that join rows."""
        ...

    def parameters(self, word: str, network: Any) -> list[Parameter]: ...

    def start(self, own: Any) -> Array:
        """A copy of the module's own value, in the floating type of the session."""
        ...

    def number(self, own: Any) -> np.ndarray:
        """The same in NumPy."""
        ...

    def mode(self, network: Any) -> Any:
        """Something that differs where the module may behave otherwise than before."""
        ...

    def check_mapped(self, call: _Call, inputs: tuple[Any, ...], dtype: str) -> None:
        """Refuse what cannot be mapped over draws of the parameters, as predictions are."""
        ...

    def run(
        self, call: _Call, names: Sequence[str], values: Sequence[Array], inputs: tuple[Any, ...], like: Array
    ) -> Any:
        """The output; floats that are no parameters come in the type and on the device of `like`."""
        ...

    def native(self, value: Array, like: Array) -> Array:
        """An array of NumPy or of the framework as one of the framework, floats in the type of `like`."""
        ...

    def on_numbers(
        self, call: _Call, values: Sequence[np.ndarray], inputs: tuple[Any, ...], dtype: Any
    ) -> np.ndarray:
        """Arrays of NumPy in and out."""
        ...

    def count(self, call: _Call, values: Sequence[np.ndarray], inputs: tuple[Any, ...], dtype: Any) -> int:
        """How many numbers all the operations of a run give."""
        ...


@dataclass(frozen=True)
class _Call:
    """A module, ready to be run."""

    word: str
    framework: _Framework
    network: Any
    parameters: Sequence[Parameter]
    coupled: bool

    def __call__(
        self, values: Sequence[Array], sampled: Sequence[Array], inputs: tuple[Any, ...], rows: int
    ) -> Array:
        framework = self.framework
        _check_system(self.word, framework, self.network, sampled)
        given = [*sampled, *_arrays(inputs)]
        native = [each for each in given if _library(each) == framework.library]
        if not native:
            numbers = [framework.number(each) for each in values]
            fallback = [] if any(map(_is_float, given)) else [numbers[0].dtype]
            dtype = np.result_type(*(each.dtype for each in given if _is_float(each)), *fallback)
            with self.judged(inputs):
                output = framework.on_numbers(self, numbers, inputs, dtype)
            return self._checked(output, np.empty(0, dtype), rows)
        floats = filter(_is_float, native)
        # Where all is held and the inputs are whole numbers, the session says.
        like = next(floats, None)
        like = framework.start(values[0]) if like is None else like
        self._look(inputs, _type_name(like))
        values = [framework.native(each, like) for each in values]
        inputs = _mapped(lambda each: framework.native(each, like), inputs)
        with self.judged(inputs):
            output = framework.run(self, [each.name for each in self.parameters], values, inputs, like)
        return self._checked(output, like, rows)

    @contextlib.contextmanager
    def judged(self, inputs: tuple[Any, ...]) -> Iterator[None]:
        """What goes wrong inside the module is told as an error of the model."""
        try:
            yield
        except BNNError:
            raise
        except Exception as error:
            if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
                raise
            shapes = ", ".join(str(tuple(each.shape)) for each in _arrays(inputs))
            raise ModelError(
                f"{self.word}: "
                + message(
                    f"a module that runs on inputs of shape {shapes}",
                    f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                    "it by itself on a few rows; of its tensors, those that are neither parameters nor registered "
                    "as buffers or variables do not follow the floating type and the device of a fit",
                )
            ) from error

    def _checked(self, output: Any, like: Array, rows: int) -> Array:
        if not hasattr(output, "shape") or not hasattr(output, "dtype"):
            raise ModelError(
                f"{self.word}: "
                + message(
                    "one array from the module", type(output).__name__, "a module that gives its f alone"
                )
            )
        shape = tuple(output.shape)
        if not shape or int(shape[0]) != rows:
            raise ModelError(
                f"{self.word}: "
                + message(
                    f"an output with {rows} rows, as many as x",
                    f"shape {shape}",
                    "the rows as its first axis",
                )
            )
        if _is_float(output) and _type_name(output) != _type_name(like):
            raise ModelError(
                f"{self.word}: "
                + message(
                    f"a module that computes in the floating type of its parameters, {_type_name(like)}",
                    f"an output in {_type_name(output)}",
                    "leaving dtype= and conversions out of its layers",
                )
            )
        return output

    # -- what is known of a module once it has been looked at

    def made_up(self, inputs: tuple[Any, ...], rows: int, dtype: Any, seed: int) -> tuple[Any, ...]:
        """Rows of the shapes and kinds of the inputs: normal numbers, and whole numbers 0 and 1."""
        rng = np.random.default_rng(seed)

        def array(each: Array) -> np.ndarray:
            shape = (rows, *map(int, each.shape[1:]))
            if _is_float(each):
                return rng.normal(size=shape).astype(dtype)
            return rng.integers(0, 2, size=shape).astype(_type_name(each))

        return _mapped(array, inputs)

    def made_up_values(self, dtype: Any) -> list[np.ndarray]:
        """The module's own values, moved: a last layer that begins at zero would hide what comes before it."""
        rng = np.random.default_rng(0)
        found = []
        for each in self.parameters:
            own = 0.0 if each.own is None else self.framework.number(each.own)
            found.append((own + 0.5 * rng.normal(size=each.shape) / math.sqrt(each.fan_in)).astype(dtype))
        return found

    def known(self, what: str, inputs: tuple[Any, ...]) -> tuple[dict[Any, Any], Any]:
        shapes = tuple((tuple(map(int, each.shape[1:])), str(each.dtype)) for each in _arrays(inputs))
        return _notes_on(self.network), (what, self.framework.mode(self.network), shapes, self.coupled)

    def _look(self, inputs: tuple[Any, ...], dtype: str) -> None:
        """Refuse a module that cannot be mapped over draws, or in which rows meet; found out once for each shape."""
        notes, key = self.known("fits", inputs)
        if key in notes:
            return
        self.framework.check_mapped(self, inputs, dtype)
        if not self.coupled and self.framework.sees_all_rows and self._rows_meet(inputs, dtype):
            raise ModelError(
                f"{self.word}: "
                + message(
                    "rows that do not interact",
                    f"{type(self.network).__name__}, in which the output of a row depends on other rows",
                    "batch_first=True in layers of torch that look along sequences, network.eval(), or "
                    "coupled=True for a graph",
                )
            )
        notes[key] = True

    def _rows_meet(self, inputs: tuple[Any, ...], dtype: str) -> bool:
        """Whether the output of the middle one of three made-up rows changes when the two others do.

        False where the module does not run on such rows: then nothing is known.
        """
        before, after = (self.made_up(inputs, 3, dtype, seed) for seed in (1, 2))
        for old, new in zip(_arrays(before), _arrays(after), strict=True):
            new[1] = old[1]
        values = self.made_up_values(dtype)
        try:
            old, new = (self.framework.on_numbers(self, values, rows, dtype) for rows in (before, after))
        except BNNError:
            raise
        except Exception:
            return False
        if not (isinstance(old, np.ndarray) and isinstance(new, np.ndarray)):
            return False
        if old.shape != new.shape or old.shape[:1] != (3,):
            return False
        finite = np.isfinite(old) & np.isfinite(new)
        with np.errstate(invalid="ignore"):
            moved = np.max(np.abs(old[1] - new[1]), where=finite[1], initial=0.0)
        # Far above rounding, and far below what rows that meet do to each other.
        return bool(moved > 1e-4 * np.max(np.abs(old), where=finite, initial=0.0))

    def held(self, inputs: tuple[Any, ...], rows: int, dtype: Any) -> int:
        """Numbers that a run holds for a row, counted as those that enter linear maps are: without the operation after.

        The difference between runs on three and on two made-up rows, in which what belongs to no row is left out.
        """
        notes, key = self.known("held", inputs)
        if key in notes:
            return notes[key]
        dtype = dtype if "float" in dtype else "float32"
        values = self.made_up_values(dtype)
        try:
            if self.coupled:
                whole = _mapped(lambda each: np.ones(tuple(map(int, each.shape)), _type_name(each)), inputs)
                total = self.framework.count(self, values, whole, dtype) / rows
            else:
                two, three = (self.made_up(inputs, count, dtype, 1) for count in (2, 3))
                total = self.framework.count(self, values, three, dtype) - self.framework.count(
                    self, values, two, dtype
                )
        except Exception:
            # It runs, but not on made-up rows: some multiple of what enters.
            total = 4 * sum(math.prod(map(int, each.shape[1:])) for each in _arrays(inputs))
        notes[key] = max(1, math.ceil(total / 2))
        return notes[key]


# id of a module -> (the module, weakly; what has been found out about it).
_NOTES: dict[int, tuple[weakref.ref[Any], dict[Any, Any]]] = {}


def _notes_on(network: Any) -> dict[Any, Any]:
    """What is known of this very object, for as long as it lives."""
    number = id(network)
    found = _NOTES.get(number)
    if found is None or found[0]() is not network:
        found = (weakref.ref(network, lambda _: _NOTES.pop(number, None)), {})
        _NOTES[number] = found
    return found[1]


# --- the three frameworks ---------------------------------------------------------------------------


def _kinds(value: Any, root: str) -> set[str]:
    """The names of the classes of an object that come from one package."""
    return {kind.__name__ for kind in type(value).__mro__ if kind.__module__.partition(".")[0] == root}


def _framework(word: str, network: Any) -> _Framework:
    homes = {} if isinstance(network, type) else _homes(type(network))
    plain = ("pyro", "PyroModule") not in homes
    if plain and ("torch", "Module") in homes:
        return _Torch()
    if ("equinox", "Module") in homes:
        return _Equinox()
    linen = ("flax", "Module") in homes and not homes["flax", "Module"].startswith("flax.nnx")
    if ("flax", "Module") in homes and not linen:
        return _Nnx()
    if isinstance(network, type):
        came, advice = f"the class {network.__name__}", f"{network.__name__}(...), made outside of the model"
    elif not plain:
        came, advice = "a PyroModule", "the plain torch module, whose priors are given here by prior="
    elif linen:
        came = f"{type(network).__name__}, a module of flax.linen"
        advice = "flax.nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)"
    else:
        came, advice = repr(network), "bnn.dense and bnn.linear for functions written in the model"
    raise ModelError(
        f"{word}: " + message("a torch.nn.Module, a flax.nnx.Module or an equinox.Module", came, advice)
    )


def _homes(kind: type) -> dict[tuple[str, str], str]:
    """(package, name) of all classes that a class derives from -> the module in which it stands."""
    return {(each.__module__.partition(".")[0], each.__name__): each.__module__ for each in kind.__mro__}


def _fan_in(kinds: set[str], leaf: str, shape: tuple[int, ...], of_weight: int) -> tuple[int, bool]:
    """(fan_in, whether it is the gain of a normalisation) of the parameter `leaf` of a layer of these kinds."""
    normalises = any("Norm" in kind for kind in kinds)
    if len(shape) < 2 or leaf.startswith("bias") or leaf.endswith("bias") or normalises:
        return 1, normalises and leaf in ("weight", "scale")
    if kinds & {"Embedding", "EmbeddingBag", "Embed"}:
        return 1, False
    return max(1, of_weight), False


class _Torch:
    """torch.nn.Module: `torch.func.functional_call` with all parameters and copies of all buffers."""

    library, system, kind, sees_all_rows = "torch", "pyro", "a torch.nn.Module", True

    def refuse(self, word: str, network: Any) -> None:
        torch = sys.modules["torch"]
        layers = torch.nn.modules
        for path, part in network.named_modules():
            shown = f"{type(part).__name__} {path!r}" if path else type(part).__name__
            if isinstance(part, layers.batchnorm._BatchNorm):
                if part.running_mean is None:
                    raise ModelError(
                        f"{word}: "
                        + message(
                            "rows that do not interact",
                            f"{shown} without running statistics, which normalises by those of the batch",
                            "torch.nn.LayerNorm or GroupNorm",
                        )
                    )
                if part.training:
                    raise ModelError(
                        f"{word}: "
                        + message(
                            "rows that do not interact",
                            f"{shown} in training, which normalises by the statistics of the batch",
                            "network.eval(), for the running statistics that it has, or torch.nn.LayerNorm",
                        )
                    )
            elif isinstance(part, layers.dropout._DropoutNd) and part.training and part.p > 0:
                raise ModelError(
                    f"{word}: "
                    + message(
                        "a module without randomness of its own",
                        f"{shown} in training, with p={part.p}",
                        "network.eval(), or bnn.MCDropout on bnn.dense layers",
                    )
                )

    def parameters(self, word: str, network: Any) -> list[Parameter]:
        found = []
        for name, tensor in network.named_parameters():
            path, _, leaf = name.rpartition(".")
            if type(tensor).__name__ == "UninitializedParameter":
                raise ModelError(
                    f"{word}: "
                    + message(
                        f"{name!r} with a shape",
                        "a lazy layer that has not run",
                        "calling it once on a row of x",
                    )
                )
            if not tensor.is_floating_point():
                raise ModelError(
                    f"{word}: "
                    + message(f"{name!r} in floats", f"a parameter of {tensor.dtype}", "a registered buffer")
                )
            owner = network.get_submodule(path)
            kinds, shape = _kinds(owner, "torch"), tuple(map(int, tensor.shape))
            if "_ConvTransposeNd" in kinds and len(shape) > 1:
                # The other way round than all else in torch: (in, out / groups, places).
                count = shape[0] // owner.groups * math.prod(shape[2:])
            else:
                count = math.prod(shape[1:])
            inputs, gain = _fan_in(kinds, leaf, shape, count)
            table = bool(kinds & {"Embedding", "EmbeddingBag"})
            own = None if tensor.is_meta else tensor.detach()
            found.append(Parameter(name, shape, inputs, own, gain, len(shape) < 2 or table))
        return found

    def start(self, own: Any) -> Array:
        torch = sys.modules["torch"]
        # A copy: what is fitted is changed in place.
        return own.to(dtype=torch.get_default_dtype(), device=torch.get_default_device(), copy=True)

    def number(self, own: Any) -> np.ndarray:
        return own.detach().cpu().double().numpy() if _library(own) == "torch" else np.asarray(own)

    def mode(self, network: Any) -> Any:
        return tuple(part.training for part in network.modules())

    def check_mapped(self, call: _Call, inputs: tuple[Any, ...], dtype: str) -> None:
        torch = sys.modules["torch"]
        like = torch.zeros(0, dtype=getattr(torch, dtype), device=torch.get_default_device())
        names = [each.name for each in call.parameters]
        rows = _mapped(lambda each: self.native(each, like), call.made_up(inputs, 2, dtype, 1))

        def run(values: Any) -> Any:
            return self.run(call, names, values, rows, like)

        draws = [self.native(np.stack([each, each]), like) for each in call.made_up_values(dtype)]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # What is mapped slowly is told by torch when it is.
                warnings.simplefilter("ignore")
                torch.func.vmap(run, randomness="different")(draws)
        except BNNError:
            raise
        except Exception as error:
            # Any other error is told where the module runs on the inputs themselves.
            said = str(error).partition("\n")[0]
            if "batching rule" not in said.lower():
                return
            raise UnsupportedError(
                f"{call.word}: "
                + message(
                    "operations that torch.func.vmap maps over draws",
                    said,
                    "bnn.gru or bnn.lstm in place of recurrent layers of torch, or a Flax NNX or an Equinox module",
                )
            ) from error

    def native(self, value: Array, like: Array) -> Array:
        torch = sys.modules["torch"]
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(np.array(value), device=like.device)
        return value.to(dtype=like.dtype if value.is_floating_point() else None, device=like.device)

    def run(
        self, call: _Call, names: Sequence[str], values: Sequence[Array], inputs: tuple[Any, ...], like: Array
    ) -> Any:
        torch = sys.modules["torch"]
        buffers = {
            name: self._copied(call.word, name, buffer, like) for name, buffer in call.network.named_buffers()
        }
        versions = {name: buffer._version for name, buffer in buffers.items()}
        given = {**dict(zip(names, values, strict=True)), **buffers}
        before = _random_state(like.device)
        with _plain()():
            output = torch.func.functional_call(call.network, given, inputs)
        if not torch.equal(before, _random_state(like.device)):
            raise ModelError(
                f"{call.word}: "
                + message(
                    "a module without randomness of its own",
                    "one that draws random numbers (dropout in training, perhaps)",
                    "network.eval(), or what is drawn as bnn.sample in the model",
                )
            )
        changed = [
            name
            for name, buffer in buffers.items()
            if given[name] is not buffer or buffer._version != versions[name]
        ]
        if changed:
            raise ModelError(
                f"{call.word}: "
                + message(
                    "a module that is a function, and leaves its buffers as they are",
                    f"changes of {', '.join(map(repr, changed))}",
                    "network.eval()",
                )
            )
        return output

    def _copied(self, word: str, name: str, buffer: Any, like: Array) -> Any:
        """A buffer in the type and on the device of the fit; a copy, which the module may spoil."""
        if buffer.is_meta or type(buffer).__name__ == "UninitializedBuffer":
            raise ModelError(
                f"{word}: "
                + message(
                    f"a value of the buffer {name!r}", "a shape only", "a module that has been initialised"
                )
            )
        dtype = buffer.dtype
        if buffer.is_floating_point():
            dtype = like.dtype
        elif buffer.is_complex():
            dtype = like.dtype.to_complex()
        return buffer.detach().to(dtype=dtype, device=like.device, copy=True)

    def on_numbers(
        self, call: _Call, values: Sequence[np.ndarray], inputs: tuple[Any, ...], dtype: Any
    ) -> np.ndarray:
        torch = sys.modules["torch"]
        like = torch.zeros(0, dtype=getattr(torch, str(dtype)), device=torch.get_default_device())
        names = [each.name for each in call.parameters]
        with torch.no_grad():
            tensors = [self.native(each, like) for each in values]
            output = self.run(
                call, names, tensors, _mapped(lambda each: self.native(each, like), inputs), like
            )
        return output.cpu().numpy() if isinstance(output, torch.Tensor) else output

    def count(self, call: _Call, values: Sequence[np.ndarray], inputs: tuple[Any, ...], dtype: Any) -> int:
        torch = sys.modules["torch"]

        class Counting(torch.overrides.TorchFunctionMode):
            total = 0

            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = function(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    self.total += result.numel()
                return result

        with Counting() as counting:
            self.on_numbers(call, values, inputs, dtype)
        return counting.total


@functools.cache
def _plain() -> Any:
    """A mode of torch in which attention is made of plain operations.

    Its fused operations have no forward derivative and are not mapped over draws. Layers leave theirs out wherever a
    mode may look at them, and attention that is to give its weights is not fused either.
    """
    torch = sys.modules["torch"]
    functional, unfused = torch.nn.functional, torch.ops.aten._scaled_dot_product_attention_math

    class Plain(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is functional.scaled_dot_product_attention:
                return unfused(*args, **kwargs)[0]
            if function is functional.multi_head_attention_forward and kwargs.get("need_weights") is False:
                return function(*args, **{**kwargs, "need_weights": True})[0], None
            return function(*args, **kwargs)

    return Plain


def _random_state(device: Any) -> Any:
    """Where the generator stands that layers on this device draw from."""
    torch = sys.modules["torch"]
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()


class _Jax:
    """What NNX and Equinox have in common."""

    library, system = "jax", "numpyro"
    run: Any

    def check_mapped(self, call: _Call, inputs: tuple[Any, ...], dtype: str) -> None:
        # JAX maps over whatever it traces.
        return None

    def start(self, own: Any) -> Array:
        return sys.modules["jax.numpy"].asarray(self.number(own), dtype=float)

    def number(self, own: Any) -> np.ndarray:
        array = np.asarray(own)
        # The short floating types of JAX are opaque to NumPy until they are widened.
        return array.astype(np.float32) if array.dtype.kind == "V" else array

    def native(self, value: Array, like: Array) -> Array:
        jnp = sys.modules["jax.numpy"]
        return jnp.asarray(value, dtype=like.dtype if jnp.issubdtype(value.dtype, jnp.floating) else None)

    def on_numbers(
        self, call: _Call, values: Sequence[np.ndarray], inputs: tuple[Any, ...], dtype: Any
    ) -> np.ndarray:
        jax = sys.modules["jax"]
        # Of this thread and of this block; in a session it is what holds already.
        with jax.enable_x64(np.dtype(dtype) == np.float64), jax.ensure_compile_time_eval():
            like = jax.numpy.zeros(0, dtype=dtype)
            names = [each.name for each in call.parameters]
            arrays = [self.native(each, like) for each in values]
            output = self.run(
                call, names, arrays, _mapped(lambda each: self.native(each, like), inputs), like
            )
            return np.asarray(output) if isinstance(output, jax.Array) else output

    def count(self, call: _Call, values: Sequence[np.ndarray], inputs: tuple[Any, ...], dtype: Any) -> int:
        jax = sys.modules["jax"]
        names = [each.name for each in call.parameters]

        def run(values: Sequence[Array], inputs: tuple[Any, ...]) -> Any:
            return self.run(call, names, values, inputs, values[0])

        with jax.enable_x64(np.dtype(dtype) == np.float64):
            return _operations(jax.make_jaxpr(run)(list(values), inputs).jaxpr)

    def _parameter(
        self, word: str, network: Any, keys: Sequence[Any], leaf: Any, root: str
    ) -> tuple[str, tuple[int, ...], set[str], Any, Any]:
        """(name, shape, the kinds of its layer, that layer, the module's value) of a leaf."""
        jnp = sys.modules["jax.numpy"]
        name = ".".join(map(str, keys))
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ModelError(
                f"{word}: "
                + message(
                    f"{name!r} in floats", f"a parameter of {leaf.dtype}", "a variable that is no parameter"
                )
            )
        owner = network
        with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):
            for key in keys[:-1]:
                owner = getattr(owner, key) if isinstance(key, str) and hasattr(owner, key) else owner[key]
        own = None if type(leaf).__name__ == "ShapeDtypeStruct" else leaf
        return name, tuple(map(int, leaf.shape)), _kinds(owner, root), owner, own


def _operations(jaxpr: Any) -> int:
    """The sizes of what all operations give, those inside of operations in their place."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [
            each
            for value in equation.params.values()
            for each in (value if isinstance(value, list | tuple) else (value,))
            if hasattr(each, "eqns") or hasattr(each, "jaxpr")
        ]
        if inner:
            total += sum(_operations(getattr(each, "jaxpr", each)) for each in inner)
        else:
            total += sum(math.prod(getattr(each.aval, "shape", ())) for each in equation.outvars)
    return total


def _key(key: Any) -> Any:
    """The name, the number or the key of a step of a path into a tree."""
    return next(getattr(key, what) for what in ("name", "idx", "key") if hasattr(key, what))


class _Nnx(_Jax):
    """flax.nnx.Module: split into parameters and all else, and merged into another object for each run."""

    kind, sees_all_rows = "a flax.nnx.Module", True

    def refuse(self, word: str, network: Any) -> None:
        # What is random or in training shows in what it leaves behind, see `run`.
        return None

    def _split(self, network: Any) -> Any:
        nnx = sys.modules["flax.nnx"]
        return nnx.split(network, nnx.Param, nnx.RngCount, ...)

    def parameters(self, word: str, network: Any) -> list[Parameter]:
        jax = sys.modules["jax"]
        found = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(self._split(network)[1])[0]:
            # A variable is a step of its own.
            keys = [_key(each) for each in path if type(each).__name__ != "GetAttrKey"]
            name, shape, kinds, owner, own = self._parameter(word, network, keys, leaf, "flax")
            transposed = getattr(owner, "transpose_kernel", False) is True and len(shape) > 1
            several = bool(kinds & {"LinearGeneral", "Einsum"}) and len(shape) > 2
            if "LinearGeneral" in kinds:
                count = math.prod(owner.in_features)
            elif transposed:
                count = math.prod((*shape[:-2], *shape[-1:]))
            else:
                count = math.prod(shape[:-1])
            inputs, gain = _fan_in(kinds, str(keys[-1]), shape, count)
            found.append(Parameter(name, shape, inputs, own, gain, not (transposed or several)))
        return found

    def mode(self, network: Any) -> Any:
        graph = self._split(network)[0]
        try:
            hash(graph)
        except TypeError:
            return None
        return graph

    def run(
        self, call: _Call, names: Sequence[str], values: Sequence[Array], inputs: tuple[Any, ...], like: Array
    ) -> Any:
        output, changed, counted = self._run(call, values, inputs, like)
        if counted and self._is_random(call, inputs, _type_name(like)):
            changed = [*changed, *counted]
        if changed:
            raise ModelError(
                f"{call.word}: "
                + message(
                    "a module that is a function: without randomness of its own, and with statistics that stay",
                    f"changes of {', '.join(map(repr, changed))}",
                    "network.eval(), which turns dropout off and takes the running statistics",
                )
            )
        return output

    def _run(
        self, call: _Call, values: Sequence[Array], inputs: tuple[Any, ...], like: Array, ahead: int = 0
    ) -> tuple[Any, list[str], list[str]]:
        """The output, the variables that changed, and the counts of random numbers that did.

        ahead: how many random numbers are taken to have been drawn before.
        """
        nnx, tree = sys.modules["flax.nnx"], sys.modules["jax"].tree_util
        graph, parameters, counts, rest = self._split(call.network)
        numbered = [(path, leaf + ahead) for path, leaf in tree.tree_flatten_with_path(counts)[0]]
        held = []
        for path, leaf in tree.tree_flatten_with_path(rest)[0]:
            if type(leaf).__name__ == "ShapeDtypeStruct":
                raise ModelError(
                    f"{call.word}: "
                    + message(
                        f"a value of {_path(path)!r}", "a shape only", "a module that has been initialised"
                    )
                )
            held.append((path, self.native(leaf, like) if _may_be_cast(leaf) else leaf))
        # New variables: those that `split` hands out are the module's own.
        copy = nnx.merge(
            graph,
            *(
                tree.tree_unflatten(tree.tree_structure(state), leaves)
                for state, leaves in (
                    (parameters, list(values)),
                    (counts, [leaf for _, leaf in numbered]),
                    (rest, [leaf for _, leaf in held]),
                )
            ),
        )
        for _, part in nnx.iter_graph(copy):
            # What a layer says of its parameters is the type of what it begins with, such as the state of a recurrence.
            if isinstance(part, nnx.Module) and "param_dtype" in vars(part):
                part.param_dtype = like.dtype
        output = copy(*inputs)
        *_, counts, rest = self._split(copy)
        changed = []
        for before, after in ((held, rest), (numbered, counts)):
            now = dict(tree.tree_flatten_with_path(after)[0])
            changed.append([_path(path) for path, leaf in before if now.get(path) is not leaf])
        return output, changed[0], changed[1]

    def _is_random(self, call: _Call, inputs: tuple[Any, ...], dtype: str) -> bool:
        """Whether it matters which random numbers are drawn: a module of Linen behind the bridge only counts them."""
        notes, key = call.known("random", inputs)
        if key not in notes:
            jax = sys.modules["jax"]
            with jax.enable_x64(dtype == "float64"), jax.ensure_compile_time_eval():
                like = jax.numpy.zeros(0, dtype=dtype)
                values = [self.native(each, like) for each in call.made_up_values(dtype)]
                rows = _mapped(lambda each: self.native(each, like), call.made_up(inputs, 2, dtype, 1))
                old, new = (self._run(call, values, rows, like, ahead)[0] for ahead in (0, 1))
                notes[key] = not np.array_equal(np.asarray(old), np.asarray(new))
        return notes[key]


def _path(path: Sequence[Any]) -> str:
    return ".".join(str(_key(each)) for each in path if type(each).__name__ != "GetAttrKey")


def _may_be_cast(leaf: Any) -> bool:
    """Whether it is an array of floats; random keys have a type of their own."""
    jnp = sys.modules["jax.numpy"]
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


class _Equinox(_Jax):
    """equinox.Module: a tree, whose floating leaves are the parameters, put together anew and mapped over rows."""

    kind, sees_all_rows = "an equinox.Module", False

    def refuse(self, word: str, network: Any) -> None:
        tree = sys.modules["jax"].tree_util

        def special(node: Any) -> bool:
            return bool(_kinds(node, "equinox") & {"Dropout", "StateIndex"})

        for path, node in tree.tree_flatten_with_path(network, is_leaf=special)[0]:
            kinds = _kinds(node, "equinox")
            shown = ".".join(str(_key(each)) for each in path)
            if "StateIndex" in kinds:
                raise ModelError(
                    f"{word}: "
                    + message(
                        "a module without state",
                        f"a StateIndex at {shown!r}, as batch normalisation and spectral normalisation have",
                        "equinox.nn.LayerNorm or GroupNorm",
                    )
                )
            if (
                "Dropout" in kinds
                and not node.inference
                and not (isinstance(node.p, int | float) and node.p == 0)
            ):
                raise ModelError(
                    f"{word}: "
                    + message(
                        "a module without randomness of its own",
                        f"Dropout {shown!r} in training, with p={node.p}",
                        "equinox.nn.inference_mode(network)",
                    )
                )

    def _leaves(self, network: Any) -> list[tuple[Any, Any, bool]]:
        """(path, leaf, whether it is a parameter)."""
        jnp = sys.modules["jax.numpy"]
        leaves = sys.modules["jax"].tree_util.tree_flatten_with_path(network)[0]
        return [
            (
                path,
                leaf,
                hasattr(leaf, "shape") and hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact),
            )
            for path, leaf in leaves
        ]

    def parameters(self, word: str, network: Any) -> list[Parameter]:
        found = []
        for path, leaf, is_parameter in self._leaves(network):
            if not is_parameter:
                continue
            keys = [_key(each) for each in path]
            name, shape, kinds, _, own = self._parameter(word, network, keys, leaf, "equinox")
            inputs, gain = _fan_in(kinds, str(keys[-1]), shape, math.prod(shape[1:]))
            found.append(Parameter(name, shape, inputs, own, gain, len(shape) < 2 or "Embedding" in kinds))
        return found

    def mode(self, network: Any) -> Any:
        return None

    def run(
        self, call: _Call, names: Sequence[str], values: Sequence[Array], inputs: tuple[Any, ...], like: Array
    ) -> Any:
        jax = sys.modules["jax"]
        rest = iter(values)
        leaves = [
            next(rest) if is_parameter else leaf for _, leaf, is_parameter in self._leaves(call.network)
        ]
        network = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(call.network), leaves)
        return network(*inputs) if call.coupled else jax.vmap(network)(*inputs)
