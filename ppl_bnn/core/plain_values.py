"""Plain values as JSON and TOML: texts that may be hostile, and the kinds that their values have to be of."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError, message
from ppl_bnn.core.files import bounded, regular

MOST_TOML = 2**18
DEEPEST = 50
# Dots in one line of TOML: keys of many parts take time that grows with the square of their number.
MOST_DOTS = 1000
# A string to its end, or to the end of the text, so that no text takes more than one pass.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+\\?(?:"|\Z)|[\[\]{}]', re.DOTALL)


def encoded(value: Any) -> Any:
    """Plain JSON values; a float that is not finite, for which JSON has no word, as {"float": "nan"}."""
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
    raise UnsupportedError(
        "save: " + message("plain values in the settings of a fit", repr(value), "numbers, strings and lists")
    )


def decoded(value: Any) -> Any:
    """The inverse of `encoded`."""
    if isinstance(value, dict):
        if set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {name: decoded(entry) for name, entry in value.items()}
    return [decoded(entry) for entry in value] if isinstance(value, list) else value


def parse_json(content: bytes) -> Any:
    """The value of a JSON text that may be hostile.

    Raises
    ------
    ValueError: no UTF-8, no JSON, or nested too deeply. Nothing else.
    """
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
    """The content of a TOML file that may be hostile.

    Raises
    ------
    InputError: no such file, no regular one, no TOML, or larger or deeper than a person would write.
    """
    file = Path(path)
    try:
        # A link is fine here: the file was named by the user.
        content = bounded(regular(file.resolve()), MOST_TOML)
    except OSError as error:
        raise InputError(message("a TOML file", f"{path} ({error.strerror})", "its full path")) from error
    except ValueError as error:
        raise InputError(message("a TOML file", f"{path}, {error}", "another file")) from error
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
        if any(line.count(".") > MOST_DOTS for line in text.split("\n")):
            raise ValueError(f"a line with more than {MOST_DOTS} dots")
        found = tomllib.loads(text)
        _check_depth(found)
    # RecursionError: the parser calls itself for each level. AttributeError, KeyError, TypeError: its own slips.
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        why = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(message(f"a TOML file, {path}", why, "correcting it")) from error
    return found


def _check_depth(value: Any) -> None:
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if depth > DEEPEST:
            raise ValueError(f"values nested more than {DEEPEST} deep")
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        waiting += [(entry, depth + 1) for entry in inner]


def check_kind(value: Any, schema: Any, where: str = "") -> None:
    """Whether a value is of the declared kind.

    schema: a type (`float` takes whole numbers too, no number type takes a bool, `object` takes all); None; a tuple of
    alternatives; a text for itself; `[kind]` for a list; `{str: kind}` for a table with any names; and a dict of names
    and kinds for a table with these entries only, of which a name that ends in "?" may be missing.

    Raises
    ------
    ValueError: another kind; the entry is named.
    """
    place = where or "the whole"
    if isinstance(schema, tuple):
        for each in schema:
            try:
                return check_kind(value, each, where)
            except ValueError:
                pass
        names = " or ".join(map(_named, schema))
        raise ValueError(f"{place} is {shown(value)}, not {names}")
    if isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f"{place} is {shown(value)}, not a list")
        for index, entry in enumerate(value):
            check_kind(entry, schema[0], f"{where}[{index}]")
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{place} is {shown(value)}, not a table")
        if set(schema) == {str}:
            for name, entry in value.items():
                check_kind(entry, schema[str], f"{where}.{name}" if where else name)
            return None
        known = {name.removesuffix("?"): kind for name, kind in schema.items()}
        for name in value:
            if name not in known:
                raise ValueError(f"{place} has the unknown entry {shown(name)}")
        for name, kind in schema.items():
            plain = name.removesuffix("?")
            if plain in value:
                check_kind(value[plain], kind, f"{where}.{plain}" if where else plain)
            elif plain == name:
                raise ValueError(f"{place} has no entry {name!r}")
    elif schema is None or isinstance(schema, str):
        if value != schema:
            raise ValueError(f"{place} is {shown(value)}, not {_named(schema)}")
    else:
        wanted = (int, float) if schema is float else schema
        if not isinstance(value, wanted) or (isinstance(value, bool) and schema in (int, float)):
            raise ValueError(f"{place} is {shown(value)}, not {_named(schema)}")
    return None


def _named(kind: Any) -> str:
    if kind is None or isinstance(kind, str):
        return "nothing" if kind is None else repr(kind)
    words: dict[Any, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    words |= {dict: "a table", list: "a list"}
    if isinstance(kind, list | dict):
        kind = type(kind)
    return words.get(kind, str(kind))


def shown(value: Any) -> str:
    """A value as an error message shows it: not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
