"""From the arguments of the command line to methods, systems, models, data and folders.

Arguments that can be checked without reading data are checked first, and data before a framework is imported.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppl_bnn import zoo
from ppl_bnn.backends.protocol import SYSTEMS
from ppl_bnn.core.errors import BNNError, InputError, check_known, unknown_name
from ppl_bnn.core.files import writable
from ppl_bnn.core.names import clean, for_file
from ppl_bnn.datasets import tables
from ppl_bnn.datasets.columns import header_of
from ppl_bnn.evaluation.outside.known import ESTIMATORS
from ppl_bnn.inference.registry import ROWS, method_class, row

if TYPE_CHECKING:
    from ppl_bnn.evaluation.outside.outside import Outside
    from ppl_bnn.inference.method import Method

DEFAULT = ("nuts", "svi", "laplace", "map")
# Methods that run in Pyro by default, so that the main command shows both systems; the others run in NumPyro.
IN_PYRO = ("svi", "laplace")
REFERENCE = "nuts"
_DEFAULT_MODEL = {"regression": "regression_mlp", "classification": "classification_mlp"}
# Sizes that run every line of every method within seconds; the results are meaningless. Each method takes those of
# the fields that it has, and some methods need further ones.
QUICK: dict[str, Any] = {"draws": 25, "warmup": 25, "chains": 2, "steps": 100}
_QUICK_BESIDES: dict[str, dict[str, Any]] = {
    "NUTS": {"max_tree_depth": 4},
    "HMC": {"num_steps": 4},
    "ChEES": {"chains": 8, "superchains": 4, "max_steps": 16},
    "LAPS": {"chains": 8, "superchains": 4, "steps": 3},
    # Its tuning starts at draws from the prior and has to converge: with a warm-up of 50 one chain in five had not.
    "MCLMC": {"warmup": 200},
    "MEADS": {"chains": 8, "superchains": 4, "folds": 2},
    "SMC": {"particles": 50, "runs": 2, "moves": 2, "max_leapfrog": 8},
    "Pathfinder": {"draws": 200, "max_iterations": 30},
    "SWAG": {"collections": 10, "burn_in": 2, "rank": 5},
    "Ensemble": {"size": 3},
}
QUICK_ROWS = {"train": 100, "test": 50}
# Sizes of the command without arguments: enough for its network and table, in half the time.
SHORT: dict[str, dict[str, Any]] = {"NUTS": {"draws": 500, "warmup": 500}, "SVI": {"steps": 5000}}
PRESETS: dict[str, Any] = {"quick": (QUICK, _QUICK_BESIDES), "short": ({}, SHORT), "full": ({}, {})}
# The largest integer that an argument may be: a list of as many layers is built before the model can be checked.
MOST_WHOLE = 10**6


@dataclass(frozen=True)
class Plan:
    """What will be run: the model, the table, and its `train` and `test` rows.

    `out` is the folder of the results, `parameters` the number of parameters, or `unread` why it is not known. `quick`:
    whether its rows are few, and sizes tiny.
    """

    name: str
    model: Callable[..., Any]
    table: tables.Table
    train: Any
    test: Any
    out: Path
    parameters: int | None
    unread: str
    quick: bool


def method_names(methods: str) -> list[str]:
    """The names of methods, and of estimators from outside, separated by commas."""
    words = [word.strip() for word in methods.split(",")]
    names = [word if word in ESTIMATORS else row(word).name for word in words if word]
    if not names or len(set(names)) < len(names):
        raise InputError.of("--methods", "each method once", repr(methods), f"--methods {','.join(DEFAULT)}")
    return names


def systems_of(names: list[str], ppl: str | None) -> dict[str, str]:
    """Method -> system. `ppl`: one system for all, `svi=pyro,nuts=numpyro`, or both; the later entry counts.

    Estimators from outside have none.
    """
    names = [name for name in names if name not in ESTIMATORS]
    systems = {name: "pyro" if name in IN_PYRO else "numpyro" for name in names}
    for word in [] if ppl is None else ppl.split(","):
        method, equals, system = (part.strip() for part in word.rpartition("="))
        system = system.lower()
        check_known("system", [system], SYSTEMS)
        if not equals:
            systems = dict.fromkeys(names, system)
            continue
        method = row(method).name
        advice = f"--methods {','.join([*names, method])}"
        InputError.check(method in systems, "--ppl", f"methods among {', '.join(names)}", method, advice)
        systems[method] = system
    for name, system in systems.items():
        # A method runs in the systems of its innermost part.
        served = _parts(name)[-1].systems
        expected = f"{name} in {' or '.join(served)}, where alone it runs"
        InputError.check(system in served, "--ppl", expected, system, f"--ppl {ppl},{name}={served[0]}")
    return systems


def reference_of(names: list[str], wanted: str | None) -> str | None:
    """The method that the others are measured against, or None."""
    names = [name for name in names if name not in ESTIMATORS]
    if wanted is None:
        return REFERENCE if REFERENCE in names else None
    name = wanted if wanted in ESTIMATORS else row(wanted).name
    expected, advice = f"one of the methods {', '.join(names)}", f"--methods {','.join([*names, name])}"
    InputError.check(name in names, "--reference", expected, name, advice)
    return name


def _parts(name: str) -> list[type[Method]]:
    """The class of a method, and those of its parts."""
    chosen = row(name)
    return [method_class(chosen.class_name), *(_parts(chosen.member) if chosen.member is not None else [])]


def _fields(method: type[Method]) -> set[str]:
    return {field.name for field in dataclasses.fields(method)}


def method_of(name: str, system: str, preset: str, sizes: Mapping[str, Any]) -> Method:
    """The method of that name with the sizes of a preset; `sizes` sets the fields that it has."""
    chosen = row(name)
    has = _fields(method_class(chosen.class_name))
    of_all, of_classes = PRESETS[preset]
    wanted = {**of_all, **of_classes.get(chosen.class_name, {}), **sizes}
    settings = {key: value for key, value in wanted.items() if key in has}
    if chosen.member is not None:
        settings["member"] = method_of(chosen.member, system, preset, sizes)
    return chosen.build(system, **settings)


def methods_of(
    names: list[str], systems: Mapping[str, str], preset: str, sizes: Mapping[str, Any]
) -> dict[str, Method | Outside]:
    """All methods and estimators from outside; a size that no method has is refused."""
    from ppl_bnn.evaluation.outside.outside import Outside

    given = {key: value for key, value in sizes.items() if value is not None}
    for size in given:
        if not any(size in _sizes_of(name) for name in systems):
            having = ", ".join(name for name in ROWS if size in _sizes_of(name))
            expected, advice = f"a method that has {size} ({having})", f"no --{size}, or another of --methods"
            raise InputError.of(f"--{size}", expected, ", ".join(names), advice)
    return {
        name: method_of(name, systems[name], preset, given) if name in systems else Outside(name)
        for name in names
    }


def _sizes_of(name: str) -> set[str]:
    """The fields of a method and of its parts."""
    return set().union(*map(_fields, _parts(name)))


def plan_of(
    model: str | None,
    data: str | None,
    target: str | None,
    drop: list[str],
    task: str | None,
    settings: list[str],
    seed: int,
    quick: bool,
    out: Path | None,
    keeps: bool = True,
) -> Plan:
    """Make the plan, checking first what needs no data; `keeps`: whether anything will be written to the folder."""
    check_known("task", [] if task is None else [task], tables.TASKS)
    card, is_file = (None, False) if model is None else card_of(model, "compare")
    source = data or (card.data if card is not None else "diabetes")
    if source is None:
        expected = f"data for {model}, which has no DATA of its own"
        raise InputError.of("--data", expected, "none", "--data NAME or --data FILE.csv --target COLUMN")
    is_csv = source.lower().endswith(".csv") or "/" in source
    _check_source(source, is_csv, target, drop, task)
    arguments = settings_of(settings)
    strict = bool(arguments) and not is_file

    # Files are read and run only from here on; first the model, which decides how a column of integers is read.
    known_task = task if is_csv else tables.datasets()[source].task
    if model is None and known_task is not None:
        model = _DEFAULT_MODEL[known_task]
    function, sketch = None, None
    if model is not None:
        if keeps:
            _check_folder(_folder(out, model, source, quick))
        function = load_model(model, is_file, arguments)
        features = 1 if is_csv else tables.datasets()[source].features
        sketch, _ = sketch_of(function, features, strict)
        if not is_csv:
            _check_task(model, sketch, source, known_task)
    wanted = known_task or (sketch.task if sketch is not None else None)
    table = tables.read_csv(source, str(target), drop=drop, task=wanted) if is_csv else tables.load(source)
    if function is None or model is None:
        model = _DEFAULT_MODEL[table.task]
        function = load_model(model, False, arguments)
    name = Path(model).stem if is_file else model
    from ppl_bnn.evaluation.comparison.run import bind_classes

    if table.task == "classification":
        function = bind_classes(function, table.y, table.class_names)
    sketch, unread = sketch_of(function, table.x.shape[1], strict)
    _check_task(name, sketch, table.name, table.task)
    train, test = table.split(seed)
    if quick:
        train, test = train[: QUICK_ROWS["train"]], test[: QUICK_ROWS["test"]]
    folder = _folder(out, model, source, quick)
    if keeps:
        _check_folder(folder)
    size = None if sketch is None else sketch.shared
    return Plan(name, function, table, train, test, folder, size, unread, quick)


def card_of(model: str, command: str) -> tuple[zoo.Card, bool]:
    """The card of a model of the zoo or of a file, and whether it is a file."""
    if model.endswith(".py") or "/" in model:
        return zoo.read_card(model), True
    known = zoo.models()
    if model in known:
        return known[model], False
    if model in tables.datasets():
        advice = f"ppl-bnn {command}{' MODEL' if command == 'show' else ''} --data {model}"
        raise InputError.of("MODEL", "a model or a file.py", f"the data set {model!r}", advice)
    raise unknown_name("model", model, known)


def load_model(model: str, is_file: bool, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """A model of the zoo, or of a file, with its arguments; InputError for a number from which no model can be made."""
    card = zoo.read_card(model) if is_file else zoo.models().get(model)
    for name, value in arguments.items():
        default = "" if card is None else card.arguments.get(name) or ""
        whole = re.fullmatch(r"-?\d+", default) is not None
        if whole and isinstance(value, int) and abs(value) > MOST_WHOLE:
            expected = f"a whole number up to {MOST_WHOLE}"
            raise InputError.of(f"--set {name}", expected, str(value), f"--set {name}={default}")
    return zoo.from_file(model, **arguments) if is_file else zoo.load(model, **arguments)


def sketch_of(model: Callable[..., Any], inputs: Any, strict: bool = False) -> tuple[zoo.Sketch | None, str]:
    """Size and task of a model; or None and the error in one line, for example for a plain model of a system.

    A user's file is run here and may raise anything; `compare` then continues, and a fit reports the error. With
    `strict`, for a model of the zoo, the error is that of an argument and is raised. A model that is too large is
    refused.
    """
    try:
        return zoo.sketch(model, inputs), ""
    except zoo.TooLargeError:
        raise
    except Exception as error:
        if strict and isinstance(error, BNNError):
            raise type(error)(f"--set: {error}") from error
        first = clean((str(error).strip().splitlines() or [""])[0])
        found = f"{type(error).__name__}: {first}" if first else type(error).__name__
        if strict:
            given = getattr(model, "keywords", {})
            words = ", ".join(f"{name}={value!r}" for name, value in given.items() if name != "classes")
            got = f"{words}, with which it ends in {found}"
            advice = "`ppl-bnn show MODEL`, which lists its arguments"
            raise InputError.of("--set", "values that the model takes", got, advice) from error
        return None, found


def _check_task(name: str, sketch: zoo.Sketch | None, table: str, task: str | None) -> None:
    if task is not None and sketch is not None and sketch.task != task:
        expected, got = f"a model for {task}, as {table} is meant for", f"{name}, a model for {sketch.task}"
        raise InputError.of("MODEL", expected, got, _DEFAULT_MODEL[task])


def _check_source(source: str, is_csv: bool, target: str | None, drop: list[str], task: str | None) -> None:
    if not is_csv:
        if source not in tables.datasets():
            error = unknown_name("data set", source, tables.datasets())
            raise type(error)(f"{error}; a file is given as FILE.csv")
        for option, value in (("--target", target), ("--drop", drop), ("--task", task)):
            got, advice = f"data set {source!r}", f"--data FILE.csv, or no {option}"
            InputError.check(not value, option, "a CSV file to go with it", got, advice)
        return
    got, advice = f"{source}, which does not exist", "its full path, or a name from `ppl-bnn data`"
    InputError.check(Path(source).is_file(), "--data", "a CSV file", got, advice)
    if target is None:
        columns = header_of(Path(source))
        shown = ", ".join(columns[:30]) + (", ..." if len(columns) > 30 else "")
        expected = f"the column of {source} to predict"
        raise InputError.of("--target", expected, "none", f"--target COLUMN, one of: {shown}")


def _folder(out: Path | None, model: str, source: str, quick: bool) -> Path:
    name = for_file(f"{Path(model).stem}-{tables.name_of(source)}") + ("-quick" if quick else "")
    return out or Path("ppl-bnn-results") / name


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, without leaving files behind."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        writable(folder, "--out")
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def settings_of(settings: list[str]) -> dict[str, Any]:
    """NAME=VALUE, each name once; a value that is not a Python literal is a string."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not (equals and name.isidentifier()):
            raise InputError.of("--set", "NAME=VALUE", repr(setting), "--set width=20")
        if name in found:
            raise InputError.of("--set", "each name once", f"{name} twice", f"one --set {name}=VALUE")
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            found[name] = value
    return found
