"""Results as small HTML for a notebook: no script, no request, the notebook's own colours, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ppl_bnn.core.names import clean_lines

# A notebook sets the colours of text and paper, light or dark. Grey and this orange can be read on both.
_ALARM = "color:#d55e00;font-weight:bold"
_RULE = "border-bottom:1px solid rgba(128,128,128,0.5)"
_CARD = "font-size:13px;line-height:1.45;max-width:75em;overflow-x:auto;white-space:pre-wrap"
_TABLE = "border-collapse:collapse;margin:0.4em 0;font-size:13px"
_CELL = "padding:0.1em 0.7em 0.1em 0"


@dataclass(frozen=True)
class Listing:
    """A table: the heading above it, its columns, and rows of text with the name of each first.

    `alarms` are (row, column) numbers of cells that tell a problem. The first `words` columns are aligned to the left,
    the others are numbers.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    alarms: frozenset[tuple[int, int]] = frozenset()
    words: int = 1


@dataclass(frozen=True)
class Folded:
    """Parts that are shown on a click."""

    summary: str
    parts: Sequence[Any]


def card(heading: str, *parts: Any) -> str:
    """A result as HTML.

    Parameters
    ----------
    heading : str
        The first line.
    *parts
        What follows: a text is a paragraph, a mapping is a list of names with their values, a `Listing` is a table,
        `Folded` parts are shown on a click, and other iterables of texts are bullets. Empty parts are left out.

    Returns
    -------
    str
        One `<div>`.

    Examples
    --------
    >>> from ppl_bnn.core.notebook.html import card
    >>> "a &lt; b" in card("a < b")
    True
    """
    shown = "".join(map(_part, filter(None, parts)))
    return f'<div style="{_CARD}"><div><strong>{_text(heading)}</strong></div>{shown}</div>'


def in_words(value: Any) -> str:
    """A plain value, or a container of plain values, as text."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {in_words(each)}" for key, each in value.items()) or "none"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(in_words(each) for each in value) or "none"
    return str(value)


def _text(value: object) -> str:
    return escape(clean_lines(value))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return f'<div style="margin:0.4em 0">{_text(part)}</div>'
    if isinstance(part, Mapping):
        return _table(Listing("", (), list(part.items()), words=2))
    if isinstance(part, Listing):
        heading = f'<div style="margin-top:0.6em"><strong>{_text(part.heading)}</strong></div>'
        return (heading if part.heading else "") + _table(part)
    if isinstance(part, Folded):
        inside = "".join(map(_part, filter(None, part.parts)))
        return f"<details><summary>{_text(part.summary)}</summary>{inside}</details>" if inside else ""
    bullets = "".join(f"<li>{_text(line)}</li>" for line in part)
    return f'<ul style="margin:0.3em 0;padding-left:1.4em">{bullets}</ul>'


def _table(listing: Listing) -> str:
    def line(kind: str, cells: Sequence[object], row: int = -1) -> str:
        found = ""
        for column, value in enumerate(cells):
            number = column >= listing.words
            style = f"{_CELL};text-align:{'right' if number else 'left'};vertical-align:top"
            style += ";white-space:nowrap" if number and kind == "td" else ""
            style += f";{_ALARM}" if (row, column) in listing.alarms else ""
            style += f";{_RULE}" if kind == "th" else ""
            found += f'<{kind} style="{style}">{_text(value)}</{kind}>'
        return f"<tr>{found}</tr>"

    head = f"<thead>{line('th', listing.columns)}</thead>" if listing.columns else ""
    body = "".join(line("td", cells, row) for row, cells in enumerate(listing.rows))
    return f'<table style="{_TABLE}">{head}<tbody>{body}</tbody></table>'
