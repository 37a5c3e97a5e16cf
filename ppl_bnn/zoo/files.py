"""A model file: its card, read without running it, and its function `model`, loaded from any path."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core.errors import BNNError, InputError, ModelError, check_known
from ppl_bnn.core.notebook.html import Folded, card

Model = Callable[..., Any]


@dataclass(frozen=True)
class Card:
    """Description of a model, read without running its file.

    Parameters
    ----------
    name : str
        Name of the model.
    summary : str
        The first line of its docstring.
    docstring : str
        The whole docstring.
    data : str or None
        Name of its default data set.
    path : Path
        The file.
    arguments : dict of str
        Keyword-only parameters of the model with their defaults, as written.
    example : optional
        Inputs of one or a few rows for `sketch`, lists of numbers or a dict of lists, if a row of numbers is not a
        valid input. It is the constant EXAMPLE of the file.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> card = bnn.zoo.models()["linear_regression"]
    >>> card.data, card.arguments
    ('diabetes', {'scale': '1.0', 'noise_scale': '1.0'})
    """

    name: str
    summary: str
    docstring: str
    data: str | None
    path: Path
    arguments: dict[str, str | None] = field(default_factory=dict)
    example: Any = None

    def _repr_html_(self) -> str:
        facts = {"default data": self.data or "none", "file": str(self.path)}
        arguments = {name: str(value) for name, value in self.arguments.items()}
        return card(self.name, self.docstring, facts, Folded("Arguments", [arguments]))


def shipped(module: Path, installed: str, checkout: str) -> Path:
    """A folder that the wheel has inside the package of a `module`, and a checkout has beside the package."""
    package = module.resolve().parents[1]
    inside = package / installed
    return inside if inside.is_dir() else package.parent / checkout


def from_file(path: str | os.PathLike[str], **keywords: Any) -> Model:
    """Load the function `model` of a Python file, with keyword-only parameters set.

    The module cannot be imported by name, so worker processes receive the function itself.

    Parameters
    ----------
    path : str or PathLike
        The file.
    **keywords
        Values of keyword-only parameters of the model.

    Returns
    -------
    Model
        The model.

    Raises
    ------
    InputError
        There is no such Python file.
    ModelError
        The file cannot be run, or defines no function `model`.
    UnknownNameError
        An argument that the model does not have.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> model = bnn.zoo.from_file(bnn.zoo.MODELS_FOLDER / "regression_mlp.py", width=5)
    >>> bnn.zoo.sketch(model, 10).parameters
    62
    """
    file = _python_file(path)
    # A name that cannot be imported, so that cloudpickle sends the function by value.
    module = types.ModuleType(f"_ppl_bnn_file_{file.stem}")
    module.__file__ = str(file)
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except BNNError:
        raise
    except Exception as problem:
        advice = "running it with Python on its own"
        if isinstance(problem, ModuleNotFoundError):
            advice = f"installing {problem.name!r}, or PYTHONPATH={file.parent} if it lies beside the file"
        got = f"{type(problem).__name__}: {problem}"
        raise ModelError.of("", f"a Python file that runs, {path}", got, advice) from problem
    found: Any = getattr(module, "model", None)
    functions = ", ".join(name for name, value in vars(module).items() if inspect.isfunction(value))
    got = f"functions {functions}" if functions else "no function at all"
    expected = f"a function `model(x, y=None)` in {path}"
    ModelError.check(callable(found), "", expected, got, "naming it `model`")
    return bind(found, file.name, **keywords)


def bind(model: Model, name: str, **keywords: Any) -> Model:
    """Set keyword-only parameters of `model`; it is returned unchanged if there are none to set.

    Parameters
    ----------
    model : Model
        The model.
    name : str
        Name of the model in error messages.
    **keywords
        Values of keyword-only parameters.

    Returns
    -------
    Model
        The model with these values.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> model = bnn.zoo.bind(bnn.zoo.load("regression_mlp"), "regression_mlp", width=5)
    >>> bnn.zoo.sketch(model, 10).parameters
    62
    """
    if not keywords:
        return model
    check_known(f"argument of model {name!r}", keywords, keyword_only(model))
    return functools.partial(model, **keywords)


def keyword_only(model: Model) -> dict[str, Any]:
    """The keyword-only parameters of a model and their defaults."""
    parameters = inspect.signature(model).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def read_card(path: str | os.PathLike[str]) -> Card:
    """The card of a model file: its docstring, `DATA`, `EXAMPLE` and the keyword-only parameters of its `model`.

    Parameters
    ----------
    path : str or PathLike
        The file.

    Returns
    -------
    Card
        The card.

    Raises
    ------
    InputError
        There is no such Python file.
    ModelError
        The file is not a model, or EXAMPLE is not a literal.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.zoo.read_card(bnn.zoo.MODELS_FOLDER / "linear_regression.py").summary
    'Bayesian linear regression: a network without a hidden layer.'
    """
    file = _python_file(path)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as problem:
        got = f"{problem.msg} in line {problem.lineno}"
        raise ModelError.of("", f"a Python file, {path}", got, "correcting it") from problem
    arguments: dict[str, str | None] = {}
    constants: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "model":
            for parameter, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
                arguments[parameter.arg] = None if default is None else ast.unparse(default)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            constants |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    data = constants.get("DATA")
    data = str(data.value) if isinstance(data, ast.Constant) else None
    example = _literal_example(path, constants["EXAMPLE"]) if "EXAMPLE" in constants else None
    docstring = ast.get_docstring(tree) or ""
    summary = re.split(r"(?<=\.)\s", docstring.partition("\n\n")[0].replace("\n", " "))[0]
    return Card(file.stem, summary, docstring, data, file, arguments, example)


def _literal_example(path: str | os.PathLike[str], node: ast.expr) -> Any:
    """The value of EXAMPLE, which is read and not run."""
    problem = None
    try:
        value = ast.literal_eval(node)
        found = as_arrays(value)
        parts = list(found.values()) if isinstance(found, dict) else [found]
        if parts and all(getattr(part, "ndim", 0) and part.dtype.kind in "biuf" for part in parts):
            return value
    except (ValueError, TypeError) as error:
        problem = error
    expected = "lists of numbers, with rows of one length, or a dict of such lists"
    advice = "one row, written out, as in {'tokens': [[0, 1, 2]], 'length': [3]}"
    raise ModelError.of(f"EXAMPLE of {path}", expected, ast.unparse(node)[:80], advice) from problem


def as_arrays(inputs: Any) -> Any:
    """Lists of numbers, or a dict of them, as arrays. Integers stay integers and arrays stay unchanged."""
    if isinstance(inputs, Mapping):
        return {name: as_arrays(each) for name, each in inputs.items()}
    return np.asarray(inputs) if isinstance(inputs, list | tuple) else inputs


def _python_file(path: str | os.PathLike[str]) -> Path:
    file = Path(path).expanduser().resolve()
    found, expected = file.is_file(), "a Python file with a function `model(x, y=None)`"
    got = str(path) if found else f"{path}, which is no file"
    InputError.check(found and file.suffix == ".py", "", expected, got, "its full path")
    return file
