"""A grid written as a TOML file. Only the keys `models`, `data` and `methods` are required.

    models = ["regression_mlp", "mine.py"]  # names of the zoo, files beside this one
    data = ["yacht", "concrete"]            # names of data sets
    methods = ["nuts", "svi", "gp"]         # names of the registry, and of estimators from outside
    splits = ["random:5@0.9"]               # see ppl_bnn.datasets.splits
    seeds = 2                               # how many, or which: [0, 1]
    reference = "nuts"
    standardise = true
    device = "auto"

Each axis may also be a table of tables, whose names are the labels.
An entry without a name uses its label as the name:

    [models.wide]
    model = "regression_mlp"
    arguments = { width = 50 }

    [data.yacht]
    splits = "published:5"     # for this data set alone
    [data.mine]
    file = "mine.csv"          # or data = "bikesharing" with options = { instant = true }
    target = "y"
    drop = ["id"]
    task = "regression"

    [methods.nuts]
    settings = { draws = 2000 }
    [methods.nuts-pyro]
    method = "nuts"
    ppl = "pyro"
    [methods.tempered]
    method = "ensemble"
    member = "map"             # another method of the file, or a row; start likewise

Paths are relative to the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppl_bnn import zoo
from ppl_bnn.backends.protocol import SYSTEMS
from ppl_bnn.core.errors import BNNError, InputError, check_known
from ppl_bnn.core.plain_values import read_toml
from ppl_bnn.datasets import tables
from ppl_bnn.evaluation.outside.known import ESTIMATORS
from ppl_bnn.evaluation.outside.outside import Outside
from ppl_bnn.inference import registry
from ppl_bnn.inference.method import Method
from ppl_bnn.zoo.support import declared

if TYPE_CHECKING:
    from ppl_bnn.evaluation.grid.grid import Grid

_KEYS = ("models", "data", "methods", "splits", "seeds", "reference", "standardise", "device")
# Axis -> the keys of its entries; the first is the name, which an entry without one takes from its label.
_OF = {
    "models": ("model", "arguments"),
    "data": ("data", "options", "file", "target", "drop", "task", "splits"),
    "methods": ("method", "ppl", "settings", "member", "start"),
}


def read(path: str | os.PathLike[str], kind: type[Grid]) -> Grid:
    """The grid of a TOML file, an instance of the class `kind`. Each error names the file and the key.

    Raises InputError (no such file, invalid TOML, a missing value or one of the wrong type), UnknownNameError (a key or
    a name), ModelError (a model's file that cannot be run).
    """
    file = Path(path)
    return _Reader(file.name, file.parent, read_toml(file)).grid(kind)


@dataclass
class _Reader:
    name: str
    folder: Path
    content: Mapping[str, Any]
    _building: list[str] = field(default_factory=list)

    def grid(self, kind: type[Grid]) -> Grid:
        with self._at():
            check_known("key", self.content, _KEYS)
        entries = {axis: self._axis(axis) for axis in _OF}
        models = {label: self._model(label, entry) for label, entry in entries["models"].items()}
        data = {label: self._data(label, entry) for label, entry in entries["data"].items()}
        methods = {label: self._method(label, entries["methods"]) for label in entries["methods"]}
        rest = {key: self.content[key] for key in _KEYS[3:] if key in self.content}
        own = {label: entry["splits"] for label, entry in entries["data"].items() if "splits" in entry}
        if own:
            rest["splits"] = dict.fromkeys(data, rest.get("splits", kind.splits)) | own
        with self._at():
            return kind(models, data, methods, **rest)

    def _axis(self, key: str) -> dict[str, dict[str, Any]]:
        """Label -> entry of an axis; a name stands for an entry without further settings."""
        word, given = _OF[key][0], self.content.get(key, ())
        if isinstance(given, Mapping):
            pairs = [(name, {word: each} if isinstance(each, str) else each) for name, each in given.items()]
        else:
            names = given if isinstance(given, list | tuple) else [None]
            pairs = [(_label(key, name) if isinstance(name, str) else "", {word: name}) for name in names]
        found: dict[str, dict[str, Any]] = {}
        with self._at(key):
            InputError.check(key in self.content, "", f"the {key} of the grid", "none", f"{key} = [...]")
            for name, entry in pairs:
                good = isinstance(entry, dict) and isinstance(entry.get(word, ""), str) and name
                expected, advice = f"a list of names, or tables [{key}.LABEL]", f"[{key}.{name or 'LABEL'}]"
                InputError.check(good, "", expected, repr(entry), advice)
                InputError.check(
                    name not in found, "", "labels that differ", f"{name!r} twice", f"[{key}.LABEL]"
                )
                found[name] = entry
        return found

    def _model(self, label: str, entry: Mapping[str, Any]) -> Any:
        with self._at(f"models.{label}"):
            check_known("key", entry, _OF["models"])
            name, arguments = entry.get("model", label), _table(entry, "arguments")
            if name.endswith(".py"):
                return zoo.from_file(self._file(name), **arguments)
            return zoo.load(name, **arguments)

    def _data(self, label: str, entry: Mapping[str, Any]) -> Any:
        with self._at(f"data.{label}"):
            check_known("key", entry, _OF["data"])
            of_file = [key for key in ("target", "drop", "task") if key in entry]
            if "file" in entry:
                if "data" in entry or "options" in entry:
                    raise InputError.of("", "file or data", "both", "one of them")
                target, drop, task = entry.get("target"), entry.get("drop", ()), entry.get("task")
                if not isinstance(target, str):
                    raise InputError.of("", "target, the column to predict", repr(target), "target = 'y'")
                return tables.read_csv(self._file(entry["file"]), target, drop=drop, task=task)
            InputError.check(not of_file, "", f"a file for {', '.join(of_file)}", "none", "file = 'mine.csv'")
            name, options = entry.get("data", label), _table(entry, "options")
            check_known("data set", [name], tables.datasets())
            return tables.load(name, **options) if options else name

    def _method(self, label: str, given: Mapping[str, Mapping[str, Any]]) -> Method | Outside:
        """The method of that label, or of that row if the file has no such label."""
        entry, where = given.get(label, {}), f"methods.{label}"
        with self._at(where):
            check_known("key", entry, _OF["methods"])
            nested = " of ".join([*self._building, label])
            if label in self._building:
                raise InputError.of("", "methods made of others", nested, "fewer of them")
            name = str(entry.get("method", label))
            if name in ESTIMATORS:
                check_known(f"key of {name}, from outside", entry, ("method",))
                return Outside(name)
            row = registry.row(name)
            ppl = entry.get("ppl", declared().served(row.name)[0])
            for key in ("ppl", "member", "start"):
                value = entry.get(key, "")
                InputError.check(isinstance(value, str), "", f"{key}, a name", repr(value), f"{key} = 'map'")
            check_known("system", [ppl], SYSTEMS)
            settings = dict(_table(entry, "settings"))
        self._building.append(label)
        for key in ("member", "start"):
            if key in entry:
                other = entry[key]
                # A row is made for the system of the method that it is part of.
                settings[key] = self._method(other, {other: {"ppl": ppl}, **given})
        self._building.pop()
        with self._at(where):
            return row.build(ppl, **settings)

    def _file(self, name: Any) -> Path:
        """The path of a file that the grid names; a folder, a pipe or a device is refused."""
        InputError.check(isinstance(name, str), "", "file, a path", repr(name), "file = 'mine.csv'")
        path = self.folder / name
        # A missing file is reported when it is read.
        if path.exists() and not path.is_file():
            raise InputError.of("", "a regular file", f"{path}, something else", "the path of a file")
        return path

    @contextmanager
    def _at(self, *where: str) -> Iterator[None]:
        """A block whose errors are prefixed with the file and the key."""
        place = ", ".join((self.name, *where))
        try:
            yield
        except BNNError as error:
            raise type(error)(f"{place}: {error}") from error
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
            # A value of a type that a method does not expect.
            raise InputError(f"{place}: {error}") from error


def _table(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found, advice = entry.get(key, {}), f"{key} = {{ name = value }}"
    InputError.check(isinstance(found, Mapping), "", f"{key}, a table", repr(found), advice)
    return found


def _label(axis: str, name: str) -> str:
    return Path(name).stem if axis == "models" and name.endswith(".py") else name
