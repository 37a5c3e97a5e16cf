r"""Names from outside: of columns, classes, methods, models and data sets.

`clean` is applied once, where a name enters. The result has no control character, no escape code of a terminal and
nothing that UTF-8 cannot encode. Matplotlib (`for_figure`: `$` begins mathematics, a leading `_` hides a label),
spreadsheets (`for_spreadsheet`: `=1+1` is a formula) and file systems (`for_file`) need more. In the replacement of a
regular expression a name has to be the result of a function, because `\1` is a group in a text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

REPLACED = "\ufffd"
# Characters that change the direction of text, or have no width: names that look the same could differ by them.
_UNSEEN = frozenset(
    "\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
)
LONGEST_FILE = 100
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def clean(name: object) -> str:
    r"""The name (anything that `str` accepts) without what cannot be seen or encoded.

    White space becomes single blanks. Control characters, lone surrogates and characters that change the direction of
    text become U+FFFD. A clean name is unchanged.

    Examples
    --------
    >>> from ppl_bnn.core.names import clean
    >>> clean("income\n(USD) ")
    'income (USD)'
    >>> clean("\x1b[31mred")
    '\ufffd[31mred'
    """
    text = " ".join(str(name).split())
    return "".join(REPLACED if _is_unseen(letter) else letter for letter in text)


def clean_all(names: Iterable[object] | None) -> tuple[str, ...] | None:
    """`clean` applied to each name; None stays None."""
    return None if names is None else tuple(clean(name) for name in names)


def clean_lines(text: object) -> str:
    """`clean` line by line, with blanks kept, for messages that quote names from outside."""
    letters = (REPLACED if each not in "\n\t" and _is_unseen(each) else each for each in str(text))
    return "".join(letters)


def _is_unseen(letter: str) -> bool:
    return letter in _UNSEEN or unicodedata.category(letter) in ("Cc", "Cs")


def for_figure(text: object) -> str:
    """Text that Matplotlib draws literally: no mathematics between two dollar signs, no hidden label."""
    shown = clean_lines(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def from_figure(label: str) -> str:
    """The text from which `for_figure` made this label."""
    shown = label.replace(r"\$", "$")
    return shown[1:] if shown.startswith(" _") else shown


def for_spreadsheet(frame: Any) -> Any:
    """A copy of a DataFrame for a CSV file that a spreadsheet opens: text that would be a formula begins with "'".

    Cells, columns and the index are guarded. Numbers do not change, nor text that is a number, such as "-1".
    """
    guarded = frame.copy()
    for at, kind in enumerate(frame.dtypes):
        if kind.kind not in "biufmM":
            guarded.isetitem(at, frame.iloc[:, at].map(_guarded))
    return guarded.rename(index=_guarded, columns=_guarded)


def _guarded(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|-|[-+]?inf", value, re.I)
    return value if number else f"'{value}"


def for_file(name: object) -> str:
    """A name as part of a file name: characters that are special to a system or a shell become "_"."""
    kept = re.sub(r"[^\w.+=@ ()-]|\s", "_", clean(name)).lstrip(".-")
    return kept.encode()[:LONGEST_FILE].decode(errors="ignore") or "_"
