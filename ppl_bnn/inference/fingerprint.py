"""Fingerprints of settings in plain values: equal in every process, and different if the fits could differ.

A `repr` contains memory addresses and omits the middle of an array. Here an array is represented by the hash of its
numbers, a network by its weights, and a function by its source, defaults, closure and bound arguments.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from ppl_bnn.inference.pretrained import is_nnx
from ppl_bnn.posterior.posterior import Posterior

# A folder is the location of a fit and does not affect its result.
_PLACES = ("checkpoint",)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = tuple(str(Path(path).resolve()) for path in _FOLDERS)


def identity(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Plain values that differ if two settings differ; functions of installed packages count by name.

    `outer` are the ids of the objects that hold the value.
    """
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if id(value) in outer:
        return "itself"
    inside = (*outer, id(value))

    def each(part: Any) -> Any:
        return identity(part, inside)

    if isinstance(value, Posterior):
        return each(value.approximation.arrays())
    if isinstance(value, Mapping):
        return {str(key): each(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [each(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((each(part) for part in value), key=json.dumps)
    array = _array(value)
    if array is not None:
        return f"{array.dtype} {array.shape} {hashlib.sha256(np.ascontiguousarray(array)).hexdigest()}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, type):
        return {"class": _named(value), **_code(value)}
    if isinstance(value, functools.partial):
        return {"partial": each(value.func), "args": each(value.args), "keywords": each(value.keywords)}
    if inspect.ismethod(value):
        return {"method": value.__name__, "of": each(value.__self__)}
    # `functools.wraps` hides the function and its signature.
    function = inspect.unwrap(value) if callable(value) else value
    if isinstance(function, types.FunctionType):
        held = [_content(cell) for cell in function.__closure__ or ()]
        parts = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__, "held": held}
        found = {name: each(part) for name, part in parts.items() if part}
        return {"function": _named(function), **_code(function), **found}
    if callable(getattr(value, "state_dict", None)):
        # A torch module: its `repr` lists its layers and contains no memory address.
        state = each(cast(Any, value).state_dict())
        return {"class": _named(type(value)), "layers": repr(value), "state": state}
    if is_nnx(value):
        graph, state = sys.modules["flax.nnx"].split(value)
        leaves = sys.modules["jax"].tree_util.tree_leaves(state)
        return {"class": _named(type(value)), "layers": _ADDRESS.sub("", repr(graph)), "state": each(leaves)}
    if callable(params := getattr(value, "get_params", None)):
        # An estimator of scikit-learn: its `repr` is shortened.
        return {"class": _named(type(value)), **_code(type(value)), "params": each(params(deep=False))}
    if dataclasses.is_dataclass(value):
        if not cast(Any, type(value)).__dataclass_params__.frozen:
            return {"class": _named(type(value))}
        names = [field.name for field in dataclasses.fields(value) if field.name not in _PLACES]
        fields = {name: each(getattr(value, name)) for name in names}
        return {"class": _named(type(value)), **fields}
    if callable(value):
        if hasattr(value, "__qualname__"):
            return {"function": _named(value)}
        return {"class": _named(type(value)), **_code(type(value)), "state": each(_state(value))}
    text = repr(value)
    return _named(type(value)) if _ADDRESS.search(text) else text


def source(function: Any) -> str:
    """The source file of a function or class, without comments; for `__main__`, the parts that it reaches."""
    if function.__module__ != "__main__":
        with suppress(OSError, TypeError, SyntaxError):
            return ast.unparse(ast.parse(Path(str(inspect.getsourcefile(function))).read_bytes()))
    return _reached(function)


def _reached(function: Any) -> str:
    """The source of a function or class and of the parts of its module that it reaches, without comments."""
    found: dict[str, str] = {}
    _reach(function.__qualname__, function, found)
    return "\n".join(f"{name} = {text}" for name, text in found.items())


def _code(value: Any) -> dict[str, str]:
    """A hash of the reached source, for code outside installed packages: changes of other functions do not count."""
    module = value.__module__ or ""
    with suppress(OSError, TypeError):
        file = str(Path(str(inspect.getsourcefile(value))).resolve())
        if module != "__main__" and file.startswith(_LIBRARIES):
            return {}
    if module in sys.builtin_module_names or module.split(".")[0] == __name__.split(".")[0]:
        return {}
    found = {"source": hashlib.sha256(_reached(value).encode()).hexdigest()}
    if "<" in value.__qualname__ and isinstance(value, types.FunctionType):
        # Distinguishes two functions created in one place, or two lambdas on one line.
        found["code"] = hashlib.sha256(repr(_instructions(value.__code__)).encode()).hexdigest()
    return found


def _named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _array(value: Any) -> np.ndarray | None:
    """The value as a NumPy array if it is an array of any system; None for other values and for arrays of objects."""
    if isinstance(value, type) or not hasattr(value, "__array__"):
        return None
    if callable(getattr(value, "detach", None)):
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
    except TypeError:
        # JAX random keys.
        return None
    return None if array.dtype == object else array


def _content(cell: types.CellType) -> Any:
    # A name whose value is assigned later has no content yet.
    with suppress(ValueError):
        return cell.cell_contents


def _state(value: Any) -> dict[str, Any]:
    """The attributes of an object; an attribute that is not a plain value is replaced by its class."""
    plain = (bool, int, float, str, list, tuple, Mapping, np.ndarray, types.FunctionType, functools.partial)

    def kept(part: Any) -> bool:
        return isinstance(part, plain) or part is None or callable(part) or hasattr(part, "__array__")

    attributes = sorted(getattr(value, "__dict__", {}).items())
    return {name: part if kept(part) else type(part).__name__ for name, part in attributes}


def _reach(name: str, value: Any, found: dict[str, str]) -> None:
    """Add a function or a class to `found`, and all names of its module that it uses."""
    if name in found:
        return
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        if value is not None and not isinstance(value, types.ModuleType):
            found[name] = json.dumps(identity(value), sort_keys=True)
        return
    found[name] = _text(value)
    functions = [value] if inspect.isfunction(value) else filter(inspect.isfunction, vars(value).values())
    for function in functions:
        for other in _names(function.__code__):
            reached = function.__globals__.get(other)
            if getattr(reached, "__module__", value.__module__) == value.__module__ or not (
                inspect.isroutine(reached) or inspect.isclass(reached)
            ):
                _reach(other, reached, found)


def _text(value: Any) -> str:
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(value))))
    except (OSError, TypeError, SyntaxError):
        # Code from an interactive session has no source file.
        return repr(_instructions(value.__code__)) if inspect.isfunction(value) else value.__qualname__


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _instructions(code: types.CodeType) -> list[Any]:
    def constant(each: Any) -> Any:
        if isinstance(each, types.CodeType):
            return _instructions(each)
        return sorted(map(repr, each)) if isinstance(each, frozenset) else each

    inner = [constant(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, inner]
