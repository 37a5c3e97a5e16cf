"""Plain values as JSON and TOML: reading of untrusted texts, and checks of the kinds of their values."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.files import bounded, regular

MOST_TOML = 2**18
DEEPEST = 50
# Dots in one line of TOML: the time for keys of many parts grows with the square of their number.
MOST_DOTS = 1000
# A string up to its end, or to the end of the text, so that one pass suffices for any text.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+\\?(?:"|\Z)|[\[\]{}]', re.DOTALL)


def encoded(value: Any) -> Any:
    """Plain JSON values. A float that is not finite, which JSON cannot express, becomes {"float": "nan"}."""
    if isinstance(value, Mapping):
        return {str(name): encoded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    expected = "plain values in the settings of a fit"
    raise UnsupportedError.of("save", expected, repr(value), "numbers, strings and lists")


def decoded(value: Any) -> Any:
    """The inverse of `encoded`."""
    if isinstance(value, dict):
        if set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {name: decoded(entry) for name, entry in value.items()}
    return [decoded(entry) for entry in value] if isinstance(value, list) else value


def parse_json(content: bytes) -> Any:
    """The value of an untrusted JSON text. Whatever is wrong with it is a ValueError."""
    depth = 0
    for mark in _BRACKETS.finditer(content):
        first = mark[0][:1]
        depth += (first in b"[{") - (first in b"]}")
        if depth > DEEPEST:
            raise ValueError(f"values nested more than {DEEPEST} deep")
    return json.loads(content.decode("utf-8"), parse_constant=_no_constant)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name}, which is no JSON")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of an untrusted TOML file; InputError for anything else, or a file too large or too deeply nested."""
    file = Path(path)
    try:
        # A link is allowed here: the user named the file.
        content = bounded(regular(file.resolve()), MOST_TOML)
    except OSError as error:
        raise InputError.of("", "a TOML file", f"{path} ({error.strerror})", "its full path") from error
    except ValueError as error:
        raise InputError.of("", "a TOML file", f"{path}, {error}", "another file") from error
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
        if any(line.count(".") > MOST_DOTS for line in text.split("\n")):
            raise ValueError(f"a line with more than {MOST_DOTS} dots")
        found = tomllib.loads(text)
        _check_depth(found)
    # RecursionError: the parser is recursive. AttributeError, KeyError, TypeError: bugs of the parser.
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        why = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError.of("", f"a TOML file, {path}", why, "correcting it") from error
    return found


def _check_depth(value: Any, left: int = DEEPEST) -> None:
    if not left:
        raise ValueError(f"values nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        value = list(value.values())
    for entry in value if isinstance(value, list) else ():
        _check_depth(entry, left - 1)


def check_kind(value: Any, schema: Any, where: str = "") -> None:
    """Check that a value is of the declared kind; a ValueError names the entry (`where`) that is not.

    A kind is a type (`float` allows whole numbers too, no number type allows a bool, `object` allows all values); None;
    a tuple of alternatives; a text for itself; ``[kind]`` for a list; ``{str: kind}`` for a table with any names; or a
    dict of names and kinds for a table with only these entries, of which a name that ends in "?" may be missing.
    """
    place = where or "the whole"

    def check(good: bool) -> None:
        if not good:
            raise ValueError(f"{place} is {shown(value)}, not {_described(schema)}")

    match schema:
        case tuple():
            for each in schema:
                with contextlib.suppress(ValueError):
                    return check_kind(value, each, where)
            check(False)
        case list():
            check(isinstance(value, list))
            for index, entry in enumerate(value):
                check_kind(entry, schema[0], f"{where}[{index}]")
        case dict():
            check(isinstance(value, dict))
            if set(schema) == {str}:
                schema = dict.fromkeys(value, schema[str])
            known = {name.removesuffix("?"): kind for name, kind in schema.items()}
            for name, entry in value.items():
                if name not in known:
                    raise ValueError(f"{place} has the unknown entry {shown(name)}")
                check_kind(entry, known[name], f"{where}.{name}" if where else name)
            for name in schema:
                if name not in value and not name.endswith("?"):
                    raise ValueError(f"{place} has no entry {name!r}")
        case None | str():
            check(value == schema)
        case _:
            good = isinstance(value, (int, float) if schema is float else schema)
            check(good and not (isinstance(value, bool) and schema in (int, float)))
    return None


_WORDS: dict[Any, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table", list: "a list",
}  # fmt: skip


def _described(kind: Any) -> str:
    if isinstance(kind, tuple):
        return " or ".join(map(_described, kind))
    if kind is None or isinstance(kind, str):
        return "nothing" if kind is None else repr(kind)
    kind = type(kind) if isinstance(kind, list | dict) else kind
    return _WORDS.get(kind, str(kind))


def shown(value: Any) -> str:
    """A value as shown in an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
