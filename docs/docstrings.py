"""Docstrings as reStructuredText: they are written as plain text in the layout of numpydoc.

Single signs such as `|w|` and `*` mean themselves there, and an indented block is a formula, which is shown as it is.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

# Sections whose indented blocks are formulas; elsewhere indented lines describe a name.
PROSE = ("", "Notes")
CODE = re.compile(r"(``[^`]*``|`[^`]*`)")


def plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Change the lines of a docstring in place, as `autodoc-process-docstring` asks; numpydoc comes after it."""
    section, made, inside = "", [], False
    for index, line in enumerate(lines):
        underlined = index + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[index + 1].strip())
        if underlined:
            section = line.strip()
        indented = line.startswith("    ") and section in PROSE
        if indented and not inside and not (made and made[-1].strip()):
            # A block of formulas begins after a blank line.
            made += [".. code-block:: text", ""]
            inside = True
        elif line.strip() and not indented:
            inside = False
        example = line.lstrip().startswith((">>>", "...")) or section == "Examples"
        made.append(line if inside or example or underlined else escaped(line))
    lines[:] = made


def escaped(line: str) -> str:
    """A line in which no sign outside of code is markup."""
    parts = CODE.split(line)
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    # A list item and the names *args, **kwargs of a signature stay as they are.
    start = re.match(r"\s*(?:\* |\*{1,2}\w+(?=\s*(?::|$)))?", text)
    head = start[0] if start else ""
    rest = re.sub(r"(?<!\\)([|*])", r"\\\1", text[len(head) :])
    return head + re.sub(r"(\w)_(?=\W|$)", r"\1\\_", rest)


def signature(
    app: Any, what: str, name: str, obj: Any, options: Any, given: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """The arguments of a dataclass with their defaults, for `autodoc-process-signature`."""
    if what != "class" or not dataclasses.is_dataclass(obj):
        return None
    shown = []
    for field in dataclasses.fields(obj):
        if not field.init:
            continue
        if field.default is not dataclasses.MISSING:
            shown.append(f"{field.name}={field.default!r}")
        elif field.default_factory is not dataclasses.MISSING:
            shown.append(f"{field.name}={field.default_factory()!r}")
        else:
            shown.append(field.name)
    return f"({', '.join(shown)})", returned
