"""The zoo: finds the models, wherever the package lies.

One file is one model. In a checkout they lie in the repository's folder `models`; the wheel carries them as
`ppl_bnn/_zoo`. This module has that folder for its `__path__`, so a file is imported as `ppl_bnn.zoo.<name>` and
only so: no top-level name is taken from a user, any working folder will do, and a worker process that is sent a
model of the zoo imports it under the same name.

Cards are read from the syntax tree of a file: listing the zoo runs none of it.
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
# What a model may infer, and of how many sites, before it is refused: beyond this no method ends.
MOST_NUMBERS, MOST_SITES = 10**8, 10**5


class TooLargeError(InputError):
    """A model of more numbers than can be inferred."""


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed, checkout = package / "_zoo", package.parent / "models"
    return installed if installed.is_dir() else checkout


# Each file of the folder is a module `ppl_bnn.zoo.<name>`, so that other processes find a model by its name.
MODELS_FOLDER = _folder()
__path__ = [*__path__, str(MODELS_FOLDER)]


@dataclass(frozen=True)
class Card:
    """What is known of a model without running its file.

    summary: the first line of its docstring. data: the name of its default data set, or None. arguments: its
    keyword-only parameters with their defaults as written. example: inputs of a row or a few, where the file has such
    a constant EXAMPLE, as lists of numbers or a dict of them; for `sketch`, where no row of numbers would do.
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
    """The model of that name, with its keyword-only parameters bound: `load("regression_mlp", width=50)`.

    Raises `UnknownNameError` for a model or an argument that does not exist, with the nearest that does.
    """
    if name not in names():
        raise unknown_name("model", name, names())
    return bind(importlib.import_module(f"{__name__}.{name}").model, name, **keywords)


def from_file(path: str | os.PathLike[str], **keywords: Any) -> Model:
    """The function `model` of a Python file, with keyword-only parameters bound.

    The module is not registered under any name, so worker processes are sent the function itself.

    Raises
    ------
    InputError: there is no such Python file.
    ModelError: the file cannot be run, or defines no function `model`.
    UnknownNameError: an argument that the model does not have.
    """
    file = _python_file(path)
    # A name that no one can import: cloudpickle then sends the function by value.
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
        came = f"{type(problem).__name__}: {problem}"
        raise ModelError(message(f"a Python file that runs, {path}", came, advice)) from problem
    found = getattr(module, "model", None)
    if not callable(found):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        came = f"functions {', '.join(functions)}" if functions else "no function at all"
        raise ModelError(message(f"a function `model(x, y=None)` in {path}", came, "naming it `model`"))
    return bind(found, file.name, **keywords)


def bind(model: Model, name: str, **keywords: Any) -> Model:
    """`model` with keyword-only parameters bound; it is unchanged if there are none to bind."""
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

    Raises
    ------
    InputError: there is no such Python file. ModelError: it is none, or EXAMPLE is not written out.
    """
    file = _python_file(path)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as problem:
        raise ModelError(
            message(f"a Python file, {path}", f"{problem.msg} in line {problem.lineno}", "correcting it")
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
    raise ModelError(
        f"EXAMPLE of {path}: "
        + message(
            "lists of numbers, with rows of one length, or a dict of such lists",
            ast.unparse(node)[:80],
            "one row, written out, as in {'tokens': [[0, 1, 2]], 'length': [3]}",
        )
    ) from problem


def _arrays(inputs: Any) -> Any:
    """Lists of numbers, or a dict of them, as arrays: whole numbers stay whole. What is an array stays what it is."""
    import numpy as np

    if isinstance(inputs, Mapping):
        return {name: _arrays(each) for name, each in inputs.items()}
    return np.asarray(inputs) if isinstance(inputs, list | tuple) else inputs


@dataclass(frozen=True)
class SiteSketch:
    """A site as one run met it: what it is drawn from in words, and its shape.

    In the words a number stands as it was given, and "..." for what is computed from other sites. local: whether
    each row has one of its own, of this shape.
    """

    name: str
    prior: str
    shape: tuple[int, ...]
    local: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sketch:
    """What one run of a model tells.

    parameters: how many numbers it infers, with those of one row where rows have their own. task: "regression" or
    "classification". sites: those numbers, site by site. likelihood: what the targets are drawn from, in words.
    """

    parameters: int
    task: str
    sites: tuple[SiteSketch, ...] = field(default=(), compare=False)
    likelihood: str = field(default="", compare=False)

    @property
    def per_row(self) -> int:
        """How many of `parameters` each row has of its own."""
        return sum(site.size for site in self.sites if site.local)

    @property
    def shared(self) -> int:
        """How many of `parameters` all rows share."""
        return self.parameters - self.per_row


def sketch(model: Model, inputs: Any) -> Sketch:
    """Run `model` once, every site one, without a framework: its size, its task and its sites.

    inputs: how many features a table has, for one row of ones; a model of symbols, which refuses numbers that measure,
    has them as whole numbers. Or an example of anything else: an array, or a dict of arrays with a common first axis,
    or lists for them (`Card.example`). One row is enough, also of a model whose rows interact: it is a graph of one
    node. Variables of the rows are counted for one row.
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
    """Every site takes the value one in its shape, and is written down; one too large is refused instead."""

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
            came = (
                f"{size:,} with site {name!r}" if size > MOST_NUMBERS else f"more than {MOST_SITES:,} sites"
            ).replace(",", " ")
            raise TooLargeError(
                "model: " + message("at most 100 million numbers to infer", came, "a smaller model")
            )


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(_word(value) for value in arguments.values())})"


def _word(value: Any) -> str:
    """A number or a word as it was given; an array has been computed, from ones."""
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
        came = str(path) if file.is_file() else f"{path}, which is no file"
        raise InputError(message("a Python file with a function `model(x, y=None)`", came, "its full path"))
    return file
