"""Which method fits which model of the zoo in which system: `models/methods.toml`, read and checked.

A cell is a model, a method with certain settings (a row of `ppl_bnn.inference.registry`, such as "laplace-kron") and a
system. Every cell works except those that the file lists: impossible ones, with the error by which the library refuses
them and a reason in words, and those that depend on the data. A new model, or a new method, therefore counts as working
everywhere until a failure is found. `comparisons/zoo_matrix.py` fits every cell and stores the outcomes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppl_bnn import zoo
from ppl_bnn.backends.protocol import SYSTEMS
from ppl_bnn.core import errors
from ppl_bnn.core.errors import BNNError, InputError, unknown_name
from ppl_bnn.core.plain_values import read_toml
from ppl_bnn.inference import registry
from ppl_bnn.inference.registry import ROWS, MethodRow

FILE = "methods.toml"
# Errors by which a cell may be refused; any other error comes from a computation.
REFUSALS = ("UnsupportedError", "InputError", "ModelError")
_TABLES = ("impossible", "depends")
_OF_A_RULE = ("models", "methods", "not_methods", "systems", "error", "says", "reason")
_SENTENCE = re.compile(r"[A-Z].*\.")


@dataclass(frozen=True)
class Rule:
    """A set of cells, the error that they end in and its reason.

    Parameters
    ----------
    models, methods, systems : frozenset of str
        The cells.
    error : type
        The class of the error.
    says : str
        Words of the error's message.
    reason : str
        The reason, in words.
    general : bool
        Whether the rule names no model, so that it is about methods and systems alone.
    """

    models: frozenset[str]
    methods: frozenset[str]
    systems: frozenset[str]
    error: type[BNNError]
    says: str
    reason: str
    general: bool

    def covers(self, model: str, method: str, system: str) -> bool:
        """Whether the rule is about this cell."""
        return model in self.models and method in self.methods and system in self.systems

    def explains(self, error: str, text: str) -> bool:
        """Whether an error of that class and message is the one of this rule."""
        return error == self.error.__name__ and self.says in text


@dataclass(frozen=True)
class Declarations:
    """The whole table: its axes, and the cells that do not simply work.

    Parameters
    ----------
    models : tuple of str
        Names of the models.
    methods : mapping of str to MethodRow
        Rows of the registry, by name.
    impossible, depends : tuple of Rule
        Rules about impossible cells, and about cells that depend on the data.
    """

    models: tuple[str, ...]
    methods: Mapping[str, MethodRow]
    impossible: tuple[Rule, ...]
    depends: tuple[Rule, ...]

    def cells(self) -> Iterator[tuple[str, str, str]]:
        """Every (model, method, system)."""
        return ((m, row, system) for m in self.models for row in self.methods for system in SYSTEMS)

    def why_not(self, model: str, method: str, system: str) -> Rule | None:
        """The rule by which a cell is impossible.

        Parameters
        ----------
        model, method, system : str
            The cell.

        Returns
        -------
        Rule or None
            None if the cell is not impossible.
        """
        return _first(self.impossible, model, method, system)

    def doubt(self, model: str, method: str, system: str) -> Rule | None:
        """The rule by which a cell that is not impossible may fail.

        Parameters
        ----------
        model, method, system : str
            The cell.

        Returns
        -------
        Rule or None
            None if the cell works.
        """
        if self.why_not(model, method, system) is not None:
            return None
        return _first(self.depends, model, method, system)

    def served(self, method: str) -> tuple[str, ...]:
        """The systems in which a method exists."""
        if method not in self.methods:
            of = registry.row(method)
            if of.name in self.methods:
                return self.served(of.name)
            # "ensemble-swag": both the ensemble and its member have to exist.
            parts = [self.served(part) for part in (of.name.removesuffix(f"-{of.member}"), str(of.member))]
            return tuple(system for system in SYSTEMS if all(system in part for part in parts))
        return tuple(
            system
            for system in SYSTEMS
            if not any(
                rule.general and method in rule.methods and system in rule.systems for rule in self.impossible
            )
        )

    def missing(self, model: str) -> dict[Rule, list[str]]:
        """Reason -> the existing methods that cannot fit a model because of it.

        A method that is missing in one of its systems only is followed by that system: "nuts in pyro".
        """
        return self._told(model, self.why_not)

    def doubtful(self, model: str) -> dict[Rule, list[str]]:
        """Reason -> the methods that may fail because of it, in the form of `missing`."""
        return self._told(model, self.doubt)

    def _told(self, model: str, ask: Any) -> dict[Rule, list[str]]:
        found: dict[Rule, list[str]] = {}
        for method in self.methods:
            served = self.served(method)
            rules = {system: ask(model, method, system) for system in served}
            for rule in dict.fromkeys(rules.values()):
                if rule is None:
                    continue
                where = [system for system in served if rules[system] is rule]
                everywhere = len(where) == len(served)
                found.setdefault(rule, []).append(method if everywhere else f"{method} in {where[0]}")
        return {rule: self.shortened(names) for rule, names in found.items()}

    def summary(self, model: str) -> str:
        """The methods that fit a model, in few words: "all", "all but mc-dropout", "only svi"."""
        without, parts = [], []
        for method in self.methods:
            served = self.served(method)
            missing = [system for system in served if self.why_not(model, method, system) is not None]
            if len(missing) == len(served):
                without.append(method)
            else:
                parts += [f"{method} in {system}" for system in missing]
        fitting = ", ".join(self.shortened([name for name in self.methods if name not in without]))
        lacking = ", ".join(self.shortened(without))
        words = "all" if not without else f"all but {lacking}"
        if without and len(fitting) < len(lacking):
            words = f"only {fitting}" if fitting else "none"
        return words + (f" (not {', '.join(parts)})" if parts else "")

    def shortened(self, names: Iterable[str]) -> list[str]:
        """The names, with those of all rows of one class as one: "laplace*" for laplace, laplace-kron and so on."""
        left = list(names)
        found: list[str] = []
        while left:
            name = left.pop(0)
            row = self.methods.get(name)
            kin = [] if row is None else self._kin(row)
            prefix = min(kin, key=len, default="")
            variants = len(kin) > 1 and all(each.startswith(prefix) for each in kin)
            if variants and all(each == name or each in left for each in kin):
                left = [each for each in left if each not in kin]
                name = f"{prefix}*"
            found.append(name)
        return found

    def _kin(self, row: MethodRow) -> list[str]:
        """The rows of the same class."""
        return [name for name, other in self.methods.items() if other.class_name == row.class_name]


def _first(rules: tuple[Rule, ...], model: str, method: str, system: str) -> Rule | None:
    return next((rule for rule in rules if rule.covers(model, method, system)), None)


@functools.cache
def declared() -> Declarations:
    """The declarations of the zoo's own file."""
    return read(zoo.MODELS_FOLDER / FILE, tuple(zoo.models()))


def read(path: Path, models: tuple[str, ...], rows: Mapping[str, MethodRow] = ROWS) -> Declarations:
    """Read the declarations of a file about these models and methods.

    Parameters
    ----------
    path : Path
        The file.
    models : tuple of str
        Names of the models.
    rows : mapping of str to MethodRow
        Rows of the registry, by name.

    Returns
    -------
    Declarations

    Raises
    ------
    InputError
        Invalid TOML; a value that is missing or of the wrong type; a reason that is not a sentence; a rule without
        effect.
    UnknownNameError
        A key, model, method, system or error that does not exist.
    """
    content = read_toml(path)
    _known(f"table of {path.name}", content, _TABLES)
    found = {
        kind: tuple(
            _rule(f"{kind}[{index}] of {path.name}", given, models, tuple(rows), kind == "impossible")
            for index, given in enumerate(content.get(kind, []))
        )
        for kind in ("impossible", "depends")
    }
    declarations = Declarations(models, rows, found["impossible"], found["depends"])
    deciding = {
        rule
        for cell in declarations.cells()
        for rule in (declarations.why_not(*cell), declarations.doubt(*cell))
        if rule is not None
    }
    for rule in (*found["impossible"], *found["depends"]):
        if rule not in deciding:
            raise InputError.of(
                f"{path.name}",
                "rules that decide a cell",
                f"one whose cells all fall to rules before it: {rule.reason!r}",
                "leaving it out, or moving it up",
            )
    return declarations


def _rule(
    where: str, given: Mapping[str, Any], models: tuple[str, ...], rows: tuple[str, ...], refused: bool
) -> Rule:
    _known(f"key of {where}", given, _OF_A_RULE)
    if "methods" in given and "not_methods" in given:
        raise InputError.of(where, "methods or not_methods", "both", "one of them")
    chosen = {}
    for key, every in (("models", models), ("methods", rows), ("not_methods", rows), ("systems", SYSTEMS)):
        names = given.get(key, [] if key == "not_methods" else list(every))
        if not isinstance(names, list) or len(set(names)) < len(names) or (key in given and not names):
            raise InputError.of(f"{where}, {key}", "a list of names", repr(names), f"{key} = ['...']")
        _known(f"name in {key} of {where}", names, every)
        chosen[key] = frozenset(names)
    error = _text(where, given, "error")
    known = REFUSALS if refused else tuple(name for name in vars(errors) if name.endswith("Error"))
    _known(f"error of {where}", [error], known)
    reason = _text(where, given, "reason")
    if not _SENTENCE.fullmatch(reason) or len(reason.split()) < 5:
        raise InputError.of(f"{where}, reason", "a sentence", repr(reason), "a capital and a full stop")
    return Rule(
        chosen["models"],
        chosen["methods"] - chosen["not_methods"],
        chosen["systems"],
        getattr(errors, error),
        _text(where, given, "says"),
        reason,
        "models" not in given,
    )


def _known(kind: str, names: Iterable[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)


def _text(where: str, given: Mapping[str, Any], key: str) -> str:
    """A value that has to be text; line breaks in it have no meaning."""
    value = given.get(key)
    if not isinstance(value, str) or not value.strip():
        raise InputError.of(f"{where}, {key}", "words", repr(value), f"{key} = '...'")
    return " ".join(value.split())
