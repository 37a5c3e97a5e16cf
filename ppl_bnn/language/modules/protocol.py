"""The protocol of a framework, a module prepared for a run, and checks that run the module."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ppl_bnn.core.arrays import Array
from ppl_bnn.core.errors import BNNError, ModelError, UnsupportedError
from ppl_bnn.language import ops

Arrays = Sequence[Array]
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a module.

    `name` is its dotted name, `shape` its shape in the module, `fan_in` the number of inputs for priors with
    `scale="fan_in"`. `own` is the module's value, in its framework, or None if there is only a shape. `gain` says
    whether it multiplies normalised values, `inputs_first` whether its axes are (..., inputs, outputs).
    """

    name: str
    shape: tuple[int, ...]
    fan_in: int
    own: Any
    gain: bool
    inputs_first: bool


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def arrays_in(value: Any) -> list[Array]:
    """The arrays of an argument: itself, or those of a dict or of a list."""
    found: list[Array] = []
    mapped(found.append, value)
    return found


def mapped(function: Callable[[Array], Any], value: Any) -> Any:
    """The argument with `function` applied to its arrays."""
    if isinstance(value, Mapping):
        return {name: mapped(function, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, each) for each in value)
    return function(value) if is_array(value) else value


def library_of(array: Array) -> str:
    """ "torch", "jax" or "numpy"."""
    return ops.namespace(array).__name__.partition(".")[0]


def check_system(word: str, framework: Framework, network: Any, arrays: Any) -> None:
    """Refuse a module of one system on arrays of the other, before anything is drawn or compiled."""
    ppl, torch = f"ppl={framework.system!r}", framework.library == "torch"
    expected = f"{ppl}, the system of {framework.kind}"
    other = "a Flax NNX or an Equinox module" if torch else "a torch.nn.Module"
    for library in map(library_of, arrays_in(arrays)):
        got = f"{type(network).__name__} in a model that runs on arrays of {library}"
        good = library in ("numpy", framework.library)
        UnsupportedError.check(good, word, expected, got, f"{ppl}, or {other}")


def is_float(array: Array) -> bool:
    """Whether it is an array of floats; random keys have a type of their own."""
    return "float" in str(getattr(array, "dtype", ""))


def type_name(array: Array) -> str:
    """The NumPy name of the number type of an array of any library."""
    return str(array.dtype).rpartition(".")[2]


class Framework(Protocol):
    """The operations that a framework provides, with defaults. Values are in the order of the parameters."""

    library: str
    system: str
    kind: str
    # Whether a module gets all rows at once, so that rows could interact in it.
    sees_all_rows: bool = True

    def refuse(self, word: str, network: Any) -> None:
        """Refuse what is found without running the module: random parts, and parts in which rows interact."""

    def parameters(self, word: str, network: Any) -> list[Parameter]: ...

    def further_names(self, network: Any) -> dict[str, str]:
        """For a parameter that appears in several places of the module: each further name -> its listed name."""
        return {}

    def constants(self, network: Any) -> dict[str, Array]:
        """Arrays of the module that are not parameters, by dotted name. Random states are left out."""
        ...

    def start(self, own: Any) -> Array:
        """A copy of the module's own value, in the floating type of the session."""

    def number(self, own: Any) -> np.ndarray:
        """The module's own value in NumPy."""
        ...

    def mode(self, network: Any) -> Any:
        """A value that changes when the behaviour of the module may have changed."""

    def in_evaluation(self, network: Any) -> contextlib.AbstractContextManager[Any]:
        """A context that gives the module in evaluation mode, or a copy that shares its arrays."""
        ...

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """A context outside of all transformations in which a module may be running: values are concrete."""
        return contextlib.nullcontext()

    def check_mapped(self, call: Call, inputs: Inputs, dtype: str) -> None:
        """Refuse a module that cannot be mapped over draws of the parameters, as predictions are."""

    def run(self, call: Call, values: Arrays, inputs: Inputs, like: Array) -> Any:
        """The output; floats that are not parameters get the type and the device of `like`."""

    def native(self, value: Array, like: Array) -> Array:
        """An array of NumPy or of the framework as one of the framework, floats in the type of `like`."""

    def on_numbers(self, call: Call, values: Arrays, inputs: Inputs, dtype: Any) -> np.ndarray:
        """The output for NumPy arrays, in NumPy."""
        with self.concrete(dtype) as like:
            values, inputs = mapped(lambda each: self.native(each, like), (list(values), inputs))
            output = self.run(call, values, inputs, like)
        if not is_array(output):
            return output
        return np.asarray(output.cpu() if self.library == "torch" else output)

    def concrete(self, dtype: Any) -> contextlib.AbstractContextManager[Array]:
        """A context in which operations have values and no derivatives; it gives an empty array of this type."""
        ...

    def count(self, call: Call, values: Arrays, inputs: Inputs, dtype: Any) -> int:
        """The total size of the outputs of all operations of a run."""
        ...


@dataclass(frozen=True)
class Call:
    """A module with its parameters in a run of a model. Rows interact if `coupled`.

    `values` of the parameters, in order, are those of the sites, values computed by priors, or the module's own values.
    """

    name: str
    framework: Framework
    network: Any
    parameters: Sequence[Parameter]
    coupled: bool
    # What cached facts belong to: the module, or that of which it is a copy.
    original: Any
    values: Arrays = ()

    @property
    def word(self) -> str:
        """The layer in errors."""
        return f"module({self.name!r})"

    @property
    def held(self) -> list[bool]:
        """For each parameter, whether it is held at the module's own value."""
        pairs = zip(self.parameters, self.values, strict=True)
        return [parameter.own is not None and value is parameter.own for parameter, value in pairs]

    def __call__(self, sampled: Arrays, inputs: Inputs, rows: int) -> Array:
        """The output; `sampled` are the values that are sites."""
        framework, values = self.framework, self.values
        check_system(self.word, framework, self.network, sampled)
        given = [*sampled, *arrays_in(inputs)]
        native = [each for each in given if library_of(each) == framework.library]
        if not native:
            numbers = [framework.number(each) for each in values]
            fallback = [] if any(map(is_float, given)) else [numbers[0].dtype]
            dtype = np.result_type(*(each.dtype for each in given if is_float(each)), *fallback)
            with self.judged(inputs):
                output = framework.on_numbers(self, numbers, inputs, dtype)
            return self._checked(output, np.empty(0, dtype), rows)
        # If all parameters are held and the inputs are integers, the session determines the type.
        like = next(filter(is_float, native), None)
        like = framework.start(values[0]) if like is None else like
        self.known("fits", inputs, lambda: self._look(inputs, type_name(like)))
        values = [framework.native(each, like) for each in values]
        inputs = mapped(lambda each: framework.native(each, like), inputs)
        with self.judged(inputs):
            output = framework.run(self, values, inputs, like)
        return self._checked(output, like, rows)

    def check(self, good: object, expected: str, got: str, advice: str) -> None:
        """Raise ModelError unless `good` is true."""
        ModelError.check(good, self.word, expected, got, advice)

    @contextlib.contextmanager
    def judged(self, inputs: Inputs) -> Iterator[None]:
        """Convert errors inside the module to errors of the model."""
        try:
            yield
        except BNNError:
            raise
        except Exception as error:
            if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
                raise
            shapes = ", ".join(str(tuple(each.shape)) for each in arrays_in(inputs))
            got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            advice = "it by itself on a few rows; of its tensors, only parameters, buffers and variables follow the "
            advice += "floating type and the device of a fit"
            expected = f"a module that runs on inputs of shape {shapes}"
            raise ModelError.of(self.word, expected, got, advice) from error

    def _checked(self, output: Any, like: Array, rows: int) -> Array:
        got, advice = type(output).__name__, "a module that gives its f alone"
        self.check(is_array(output), "one array from the module", got, advice)
        shape, expected = tuple(map(int, output.shape)), f"an output with {rows} rows, as many as x"
        self.check(shape[:1] == (rows,), expected, f"shape {shape}", "the rows as its first axis")
        wanted, found = type_name(like), type_name(output)
        expected = f"a module that computes in the floating type of its parameters, {wanted}"
        advice = "leaving dtype= and conversions out of its layers"
        self.check(found == wanted or not is_float(output), expected, f"an output in {found}", advice)
        return output

    # -- cached facts about a module

    def artificial(self, inputs: Inputs, rows: int, dtype: Any, seed: int) -> Inputs:
        """Artificial rows with the shapes and types of the inputs: normal numbers, or integers 0 and 1."""
        rng = np.random.default_rng(seed)

        def array(each: Array) -> np.ndarray:
            shape = (rows, *map(int, each.shape[1:]))
            if is_float(each):
                return rng.normal(size=shape).astype(dtype)
            return rng.integers(0, 2, size=shape).astype(type_name(each))

        return mapped(array, inputs)

    def artificial_values(self, dtype: Any) -> list[np.ndarray]:
        """The module's own values plus noise: a last layer initialised at zero would hide the layers before it."""
        rng = np.random.default_rng(0)
        found = []
        for each in self.parameters:
            own = 0.0 if each.own is None else self.framework.number(each.own)
            found.append((own + 0.5 * rng.normal(size=each.shape) / math.sqrt(each.fan_in)).astype(dtype))
        return found

    def known(self, what: str, inputs: Inputs, find: Callable[[], Any]) -> Any:
        """One fact about the module for these inputs: found outside of all transformations, and kept."""
        shapes = tuple((tuple(map(int, each.shape[1:])), str(each.dtype)) for each in arrays_in(inputs))
        notes, key = _notes_on(self.original), (what, self.framework.mode(self.network), shapes, self.coupled)
        if key not in notes:
            with self.framework.aside():
                notes[key] = find()
        return notes[key]

    def _look(self, inputs: Inputs, dtype: str) -> None:
        """Refuse a module that cannot be mapped over draws or whose rows interact."""
        self.framework.check_mapped(self, inputs, dtype)
        meet = not self.coupled and self.framework.sees_all_rows and self._rows_meet(inputs, dtype)
        got = f"{type(self.network).__name__}, in which the output of a row depends on other rows"
        advice = "batch_first=True in layers of torch, network.eval(), or coupled=True for a graph"
        self.check(not meet, "rows that do not interact", got, advice)

    def _rows_meet(self, inputs: Inputs, dtype: str) -> bool:
        """Whether the output of the middle one of three artificial rows changes when the two others do.

        False also if the module does not run on such rows.
        """
        before, after = (self.artificial(inputs, 3, dtype, seed) for seed in (1, 2))
        for old, new in zip(arrays_in(before), arrays_in(after), strict=True):
            new[1] = old[1]
        values = self.artificial_values(dtype)
        try:
            old, new = (self.framework.on_numbers(self, values, rows, dtype) for rows in (before, after))
        except BNNError:
            raise
        except Exception:
            return False
        shapes = {each.shape if isinstance(each, np.ndarray) else () for each in (old, new)}
        if len(shapes) > 1 or shapes.pop()[:1] != (3,):
            return False
        finite = np.isfinite(old) & np.isfinite(new)
        with np.errstate(invalid="ignore"):
            moved = np.max(np.abs(old[1] - new[1]), where=finite[1], initial=0.0)
        # Far above rounding errors, and far below the effect of an interaction between rows.
        return bool(moved > 1e-4 * np.max(np.abs(old), where=finite, initial=0.0))

    def numbers_per_row(self, inputs: Inputs, rows: int, dtype: Any) -> int:
        """Numbers that a run stores for a row, counted as for linear maps, where only inputs count.

        This is the difference between runs on three and on two artificial rows, which cancels what does not depend on
        rows.
        """
        dtype = dtype if "float" in dtype else "float32"
        total = self.known("numbers per row", inputs, lambda: self._counted(inputs, rows, dtype))
        return max(1, math.ceil(total / 2))

    def _counted(self, inputs: Inputs, rows: int, dtype: Any) -> float:
        values, count = self.artificial_values(dtype), self.framework.count
        try:
            if self.coupled:
                whole = mapped(lambda each: np.ones(tuple(map(int, each.shape)), type_name(each)), inputs)
                return count(self, values, whole, dtype) / rows
            two, three = (self.artificial(inputs, rows, dtype, 1) for rows in (2, 3))
            return count(self, values, three, dtype) - count(self, values, two, dtype)
        except Exception:
            # The module runs, but not on artificial rows: estimate a multiple of the size of the inputs.
            return 4 * sum(math.prod(map(int, each.shape[1:])) for each in arrays_in(inputs))


# id of a module -> cached facts about it.
_NOTES: dict[int, dict[Any, Any]] = {}


def _notes_on(network: Any) -> dict[Any, Any]:
    """The cached facts about this object, kept while it exists."""
    number = id(network)
    if number not in _NOTES:
        _NOTES[number] = {}
        weakref.finalize(network, _NOTES.pop, number)
    return _NOTES[number]


def kinds_of(value: Any, root: str) -> set[str]:
    """The names of the classes of an object that come from one package."""
    return {kind.__name__ for kind in type(value).__mro__ if kind.__module__.partition(".")[0] == root}


def fan_in_of(kinds: set[str], leaf: str, shape: tuple[int, ...], of_weight: int) -> tuple[int, bool]:
    """(fan_in, whether it is the gain of a normalisation) of the parameter `leaf` of a layer of these classes."""
    normalises = any("Norm" in kind for kind in kinds)
    if len(shape) < 2 or leaf.startswith("bias") or leaf.endswith("bias") or normalises:
        return 1, normalises and leaf in ("weight", "scale")
    table = bool(kinds & {"Embedding", "EmbeddingBag", "Embed"})
    return 1 if table else max(1, of_weight), False
