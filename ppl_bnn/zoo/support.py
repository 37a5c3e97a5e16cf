"""Which method fits which model of the zoo in which system: `models/methods.toml`, read and checked.

A cell is a model, a method with certain settings (a row of `ppl_bnn.inference.registry`, such as "laplace-kron") and a
system. The file lists the cells that are impossible, with the error and the reason, and those that depend on the data.
All other cells count as working. `comparisons/zoo_matrix.py` fits every cell and stores the outcomes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppl_bnn import zoo
from ppl_bnn.backends.protocol import SYSTEMS
from ppl_bnn.core import errors
from ppl_bnn.core.errors import BNNError, InputError, check_known
from ppl_bnn.core.plain_values import read_toml
from ppl_bnn.inference import registry
from ppl_bnn.inference.registry import ROWS, MethodRow

if TYPE_CHECKING:
    from ppl_bnn.inference.method import Method

FILE = "methods.toml"
# Errors by which a cell may be refused; any other error comes from a computation.
REFUSALS = ("UnsupportedError", "InputError", "ModelError")
_TABLES = ("impossible", "depends")
_KEYS = ("models", "methods", "not_methods", "systems", "error", "says", "reason")
_SENTENCE = re.compile(r"[A-Z].*\.")


@dataclass(frozen=True)
class SupportRule:
    """A set of cells, the class and words of the error that they end in, and the reason in words.

    `general` rules name no model: they are about methods and systems alone.
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
        """Whether an error of that class and message is that of this rule."""
        return error == self.error.__name__ and self.says in text


@dataclass(frozen=True)
class Declarations:
    """The whole table: its axes, and the rules about impossible cells and about cells that depend on the data."""

    models: tuple[str, ...]
    methods: Mapping[str, MethodRow]
    impossible: tuple[SupportRule, ...]
    depends: tuple[SupportRule, ...]

    def cells(self) -> Iterator[tuple[str, str, str]]:
        """Every (model, method, system)."""
        return ((m, row, system) for m in self.models for row in self.methods for system in SYSTEMS)

    def why_not(self, model: str, method: str, system: str) -> SupportRule | None:
        """The rule by which a cell is impossible; None if it is not."""
        return next((rule for rule in self.impossible if rule.covers(model, method, system)), None)

    def doubt(self, model: str, method: str, system: str) -> SupportRule | None:
        """The rule by which a cell that is not impossible may fail; None if the cell works."""
        if self.why_not(model, method, system) is not None:
            return None
        return next((rule for rule in self.depends if rule.covers(model, method, system)), None)

    def served(self, method: str) -> tuple[str, ...]:
        """The systems in which a method exists."""
        if method in self.methods:
            rules = [rule for rule in self.impossible if rule.general and method in rule.methods]
            return tuple(system for system in SYSTEMS if not any(system in rule.systems for rule in rules))
        row = registry.row(method)
        if row.name in self.methods:
            return self.served(row.name)
        # "ensemble-swag": both the ensemble and its member have to exist.
        members = self.served(str(row.member))
        return tuple(each for each in self.served(row.name.removesuffix(f"-{row.member}")) if each in members)

    def missing(self, model: str) -> dict[SupportRule, list[str]]:
        """Reason -> the methods that cannot fit a model because of it.

        A method that is missing in one of its systems only is followed by that system: "nuts in pyro".
        """
        return self._by_reason(model, self.why_not)

    def doubtful(self, model: str) -> dict[SupportRule, list[str]]:
        """Reason -> the methods that may fail because of it, in the form of `missing`."""
        return self._by_reason(model, self.doubt)

    def _by_reason(self, model: str, rule_of: Callable[..., Any]) -> dict[SupportRule, list[str]]:
        found: dict[SupportRule, list[str]] = {}
        for method in self.methods:
            rules = {system: rule_of(model, method, system) for system in self.served(method)}
            for rule in filter(None, dict.fromkeys(rules.values())):
                systems = [system for system in rules if rules[system] is rule]
                everywhere = len(systems) == len(rules)
                found.setdefault(rule, []).append(method if everywhere else f"{method} in {systems[0]}")
        return {rule: self.shortened(names) for rule, names in found.items()}

    def summary(self, model: str) -> str:
        """The methods that fit a model, in few words: "all", "all but mc-dropout", "only svi"."""
        missing = {
            method: [system for system in self.served(method) if self.why_not(model, method, system)]
            for method in self.methods
        }
        none = [method for method, systems in missing.items() if len(systems) == len(self.served(method))]
        parts = [f"{name} in {system}" for name in missing if name not in none for system in missing[name]]
        fitting = ", ".join(self.shortened(name for name in self.methods if name not in none))
        lacking = ", ".join(self.shortened(none))
        words = f"all but {lacking}" if none else "all"
        if none and len(fitting) < len(lacking):
            words = f"only {fitting}" if fitting else "none"
        return words + (f" (not {', '.join(parts)})" if parts else "")

    def shortened(self, names: Iterable[str]) -> list[str]:
        """The names, with those of all rows of one class as one: "laplace*" for laplace, laplace-kron and so on."""
        left, found = list(names), []
        classes = {name: row.class_name for name, row in self.methods.items()}
        while left:
            name = left[0]
            variants = [other for other in classes if name in classes and classes[other] == classes[name]]
            prefix = min(variants, key=len, default="")
            whole = len(variants) > 1 and all(each.startswith(prefix) and each in left for each in variants)
            found.append(f"{prefix}*" if whole else name)
            left = [each for each in left if each not in (variants if whole else [name])]
        return found


@functools.cache
def declared() -> Declarations:
    """The declarations of the zoo's own file."""
    return read(zoo.MODELS_FOLDER / FILE, tuple(zoo.models()))


def named(method: str) -> Method:
    """A method by the name of its row at its default settings, in the first system in which it exists."""
    return registry.row(method).build(declared().served(method)[0])


def read(path: Path, models: tuple[str, ...], rows: Mapping[str, MethodRow] = ROWS) -> Declarations:
    """Read the declarations of a file about these models and methods (rows of the registry, by name).

    InputError is raised for invalid TOML, a value that is missing or of the wrong type, a reason that is not a
    sentence, and a rule without effect; UnknownNameError for a key, model, method, system or error that does not exist.
    """
    content = read_toml(path)
    check_known(f"table of {path.name}", content, _TABLES)
    axes = {"models": models, "methods": tuple(rows), "not_methods": tuple(rows), "systems": SYSTEMS}

    def rules(kind: str) -> tuple[SupportRule, ...]:
        entries = enumerate(content.get(kind, []))
        named = {f"{kind}[{index}] of {path.name}": given for index, given in entries}
        return tuple(_rule(where, given, axes, kind == "impossible") for where, given in named.items())

    declarations = Declarations(models, rows, *map(rules, _TABLES))
    cells = list(declarations.cells())
    deciding = {rule_of(*cell) for cell in cells for rule_of in (declarations.why_not, declarations.doubt)}
    for rule in (*declarations.impossible, *declarations.depends):
        got = f"one whose cells all fall to rules before it: {rule.reason!r}"
        advice = "leaving it out, or moving it up"
        InputError.check(rule in deciding, path.name, "rules that decide a cell", got, advice)
    return declarations


def _rule(
    where: str, given: Mapping[str, Any], axes: Mapping[str, tuple[str, ...]], refused: bool
) -> SupportRule:
    check_known(f"key of {where}", given, _KEYS)
    check, both = InputError.check, "methods" in given and "not_methods" in given
    check(not both, where, "methods or not_methods", "both", "one of them")
    chosen = {}
    for key, known in axes.items():
        names = given.get(key, [] if key == "not_methods" else list(known))
        good = isinstance(names, list) and len(set(names)) == len(names) and (names or key not in given)
        check(good, f"{where}, {key}", "a list of names", repr(names), f"{key} = ['...']")
        check_known(f"name in {key} of {where}", names, known)
        chosen[key] = frozenset(names)
    words = {}
    for key in ("error", "says", "reason"):
        value: Any = given.get(key)
        good = isinstance(value, str) and value.strip()
        check(good, f"{where}, {key}", "words", repr(value), f"{key} = '...'")
        # Line breaks in a text have no meaning.
        words[key] = " ".join(value.split())
    error, reason = words["error"], words["reason"]
    known = REFUSALS if refused else tuple(name for name in vars(errors) if name.endswith("Error"))
    check_known(f"error of {where}", [error], known)
    good = _SENTENCE.fullmatch(reason) and len(reason.split()) > 4
    check(good, f"{where}, reason", "a sentence", repr(reason), "a capital and a full stop")
    cells = chosen["models"], chosen["methods"] - chosen["not_methods"], chosen["systems"]
    return SupportRule(*cells, getattr(errors, error), words["says"], reason, "models" not in given)
