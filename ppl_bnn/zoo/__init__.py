"""The zoo: finds the models in a checkout or in the installed package.

One file is one model. In a checkout they are in the repository's folder `models`; the wheel carries them as
`ppl_bnn/_zoo`. This module has that folder as its `__path__`, so a file is imported as `ppl_bnn.zoo.<name>` and only by
that name: no top-level name is taken, any working folder will do, and a worker process that receives a model of the zoo
imports it under the same name.

Cards are read from the syntax tree of a file: listing the zoo does not run any model.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppl_bnn.core.errors import BNNError, InputError, ModelError, message, unknown_name
from ppl_bnn.language.distributions import Distribution, draw_shape
from ppl_bnn.language.primitives import Interpretation, Message

Model = Callable[..., Any]
# Largest number of parameters and of sites of a model; for larger models no method ends.
MOST_NUMBERS, MOST_SITES = 10**8, 10**5


class TooLargeError(InputError):
    """A model with more parameters than can be inferred."""


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed, checkout = package / "_zoo", package.parent / "models"
    return installed if installed.is_dir() else checkout


# Each file of the folder is a module `ppl_bnn.zoo.<name>`, so that other processes find a model by its name.
MODELS_FOLDER = _folder()
__path__ = [*__path__, str(MODELS_FOLDER)]


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
        Inputs of one or a few rows, if the file has a constant EXAMPLE, as lists of numbers or a dict of lists. It is
        for `sketch`, if a row of numbers is not a valid input.
    """

    name: str
    summary: str
    docstring: str
    data: str | None
    path: Path
    arguments: dict[str, str | None] = field(default_factory=dict)
    example: Any = None


def names() -> list[str]:
    """The names of all models of the zoo. No file is read."""
    return sorted(file.stem for file in MODELS_FOLDER.glob("[a-z]*.py"))


def models() -> dict[str, Card]:
    """The cards of all models of the zoo, by name."""
    return {name: read_card(MODELS_FOLDER / f"{name}.py") for name in names()}


def load(name: str, **keywords: Any) -> Model:
    """Load a model of the zoo, with its keyword-only parameters set: `load("regression_mlp", width=50)`.

    Parameters
    ----------
    name : str
        Name of the model.
    **keywords
        Values of keyword-only parameters of the model.

    Returns
    -------
    Model

    Raises
    ------
    UnknownNameError
        A model or an argument that does not exist; the message names the nearest one that does.
    """
    if name not in names():
        raise unknown_name("model", name, names())
    return bind(importlib.import_module(f"{__name__}.{name}").model, name, **keywords)


def from_file(path: str | os.PathLike[str], **keywords: Any) -> Model:
    """Load the function `model` of a Python file, with keyword-only parameters set.

    The module is not registered under any name, so worker processes receive the function itself.

    Parameters
    ----------
    path : str or PathLike
        The file.
    **keywords
        Values of keyword-only parameters of the model.

    Returns
    -------
    Model

    Raises
    ------
    InputError
        There is no such Python file.
    ModelError
        The file cannot be run, or defines no function `model`.
    UnknownNameError
        An argument that the model does not have.
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
    found = getattr(module, "model", None)
    if not callable(found):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        got = f"functions {', '.join(functions)}" if functions else "no function at all"
        raise ModelError.of("", f"a function `model(x, y=None)` in {path}", got, "naming it `model`")
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
    """
    if not keywords:
        return model
    parameters = inspect.signature(model).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for keyword in keywords:
        if keyword not in known:
            raise unknown_name(f"argument of model {name!r}", keyword, known)
    return functools.partial(model, **keywords)


def read_card(path: str | os.PathLike[str]) -> Card:
    """The card of a model file: its docstring, `DATA`, `EXAMPLE` and the keyword-only parameters of its `model`.

    Parameters
    ----------
    path : str or PathLike
        The file.

    Returns
    -------
    Card

    Raises
    ------
    InputError
        There is no such Python file.
    ModelError
        The file is not a model, or EXAMPLE is not a literal.
    """
    file = _python_file(path)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as problem:
        raise ModelError.of(
            "", f"a Python file, {path}", f"{problem.msg} in line {problem.lineno}", "correcting it"
        ) from problem
    data, example = None, None
    arguments: dict[str, str | None] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "model":
            for parameter, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
                arguments[parameter.arg] = None if default is None else ast.unparse(default)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            if "DATA" in names and isinstance(node.value, ast.Constant):
                data = str(node.value.value)
            elif "EXAMPLE" in names:
                example = _written_out(path, node.value)
    docstring = ast.get_docstring(tree) or ""
    summary = re.split(r"(?<=\.)\s", docstring.partition("\n\n")[0].replace("\n", " "))[0]
    return Card(file.stem, summary, docstring, data, file, arguments, example)


def _written_out(path: str | os.PathLike[str], node: ast.expr) -> Any:
    """The value of EXAMPLE, which is read and not run."""
    try:
        value = ast.literal_eval(node)
        found = _arrays(value)
        parts = list(found.values()) if isinstance(found, dict) else [found]
        if parts and all(getattr(part, "ndim", 0) and part.dtype.kind in "biuf" for part in parts):
            return value
        problem = None
    except (ValueError, TypeError) as error:
        problem = error
    raise ModelError.of(
        f"EXAMPLE of {path}",
        "lists of numbers, with rows of one length, or a dict of such lists",
        ast.unparse(node)[:80],
        "one row, written out, as in {'tokens': [[0, 1, 2]], 'length': [3]}",
    ) from problem


def _arrays(inputs: Any) -> Any:
    """Lists of numbers, or a dict of them, as arrays. Integers stay integers and arrays stay unchanged."""
    import numpy as np

    if isinstance(inputs, Mapping):
        return {name: _arrays(each) for name, each in inputs.items()}
    return np.asarray(inputs) if isinstance(inputs, list | tuple) else inputs


@dataclass(frozen=True)
class SiteSketch:
    """A site as one run of a model encountered it.

    Parameters
    ----------
    name : str
        Name of the site.
    prior : str
        The distribution in words: numbers as they were given, and "..." for values computed from other sites.
    shape : tuple of int
        Shape of the site.
    local : bool
        Whether each row has its own value, of this shape.
    """

    name: str
    prior: str
    shape: tuple[int, ...]
    local: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sketch:
    """Size, task and sites of a model, from one run. Made by `sketch`.

    Parameters
    ----------
    parameters : int
        Number of unknowns that the model infers, including those of one row if rows have their own.
    task : str
        "regression" or "classification".
    sites : tuple of SiteSketch
        The sites of these unknowns.
    likelihood : str
        Distribution of the targets, in words.
    """

    parameters: int
    task: str
    sites: tuple[SiteSketch, ...] = field(default=(), compare=False)
    likelihood: str = field(default="", compare=False)

    @property
    def per_row(self) -> int:
        """Number of `parameters` that each row has of its own."""
        return sum(site.size for site in self.sites if site.local)

    @property
    def shared(self) -> int:
        """Number of `parameters` that all rows share."""
        return self.parameters - self.per_row


def sketch(model: Model, inputs: Any) -> Sketch:
    """Run `model` once with every site set to one, without a framework, to find its size, its task and its sites.

    Parameters
    ----------
    model : Model
        The model.
    inputs
        The number of features of a table, for one row of ones; a model of symbols, which refuses real-valued inputs,
        gets them as integers. Or an example of other inputs: an array, or a dict of arrays with a common first axis, or
        lists for them (`Card.example`). One row is enough, also for a model whose rows interact: it is a graph of one
        node. Variables of the rows are counted for one row.

    Returns
    -------
    Sketch
    """
    import numpy as np

    if not isinstance(inputs, int | np.integer):
        return _sketch_at(model, _arrays(inputs))
    ones = np.ones((1, inputs))
    try:
        return _sketch_at(model, ones)
    except ModelError:
        with contextlib.suppress(ModelError):
            return _sketch_at(model, ones.astype(np.int64))
        raise


def _sketch_at(model: Model, x: Any) -> Sketch:
    with _Sketching() as run:
        model(x, None)
    assert isinstance(run, _Sketching)
    return Sketch(sum(site.size for site in run.sites), run.task, tuple(run.sites), run.likelihood)


class _Sketching(Interpretation):
    """Sets every site to one in its shape and records it; a site that is too large is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[SiteSketch] = []
        self.task = ""
        self.likelihood = ""
        self.in_rows = False

    @contextlib.contextmanager
    def rows(self) -> Iterator[None]:
        self.in_rows = True
        try:
            yield
        finally:
            self.in_rows = False

    def process(self, msg: Message) -> None:
        import numpy as np

        super().process(msg)
        if msg.kind in ("sample", "param"):
            given = msg.arguments["distribution" if msg.kind == "sample" else "init"]
            shape = draw_shape(given) if isinstance(given, Distribution) else np.shape(given)
            self._check_size(msg.name, shape)
            if msg.arguments.get("obs") is None:
                prior = _call(given.family, given.arguments) if msg.kind == "sample" else "none: a parameter"
                self.sites.append(SiteSketch(msg.name, prior, tuple(map(int, shape)), self.in_rows))
            msg.answer(np.ones(shape))
        elif msg.kind == "rows":
            msg.answer(self.rows())
        elif msg.kind == "observe":
            likelihood = msg.arguments["likelihood"]
            self.task = likelihood.task
            fields = dataclasses.fields(likelihood) if dataclasses.is_dataclass(likelihood) else ()
            self.likelihood = _call(
                type(likelihood).__name__, {each.name: getattr(likelihood, each.name) for each in fields}
            )
            msg.answer(None)

    def _check_size(self, name: str, shape: tuple[int, ...]) -> None:
        size = sum(site.size for site in self.sites) + math.prod(map(int, shape))
        if size > MOST_NUMBERS or len(self.sites) >= MOST_SITES:
            got = (
                f"{size:,} with site {name!r}" if size > MOST_NUMBERS else f"more than {MOST_SITES:,} sites"
            ).replace(",", " ")
            raise TooLargeError(
                "model: " + message("at most 100 million numbers to infer", got, "a smaller model")
            )


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(_word(value) for value in arguments.values())})"


def _word(value: Any) -> str:
    """A number or a word as it was given; an array was computed from ones."""
    if type(value) in (list, tuple):
        return f"({', '.join(map(_word, value))})"
    if type(value) in (int, float):
        return f"{value:.4g}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return _call(type(value).__name__, fields)
    return str(value) if isinstance(value, str | bool) or value is None else "..."


def _python_file(path: str | os.PathLike[str]) -> Path:
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        got = str(path) if file.is_file() else f"{path}, which is no file"
        raise InputError.of("", "a Python file with a function `model(x, y=None)`", got, "its full path")
    return file
