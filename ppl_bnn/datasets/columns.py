"""Columns of a CSV file: interpretation of their cells, and detection of numbers and dates in unsupported formats.

pandas splits a file into cells without guessing their types. A column holds numbers or words. Any other column raises
an error with its name, an example and advice.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, check_known
from ppl_bnn.core.names import clean, clean_lines

TASKS = ("regression", "classification")
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "<na>"})
MOST_CATEGORIES = 50
# Up to this many different whole numbers could be classes or numbers: the result states how they were read.
FEW_VALUES = 10
# Largest number of characters of a header line that are read.
MOST_HEADER = 1_000_000
# Largest numbers of column names, and of values of a column, that are listed one by one.
MOST_NAMES, MOST_VALUES = 8, 6

_DIGITS = r"\d+(?:[.,]\d+)?"
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?\s*(?:[ap]m)?(?:\s*(?:z|utc|gmt|[-+]\d{2}:?\d{2}))?"
_DATE = (
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})|(?:19|20)\d{2}-(?:0[1-9]|1[0-2])"
    rf"|\d{{1,2}}[-. ]*{_MONTH}[-., ]*(?:\d{{4}}|\d{{2}})|{_MONTH}[-., ]*(?:\d{{1,2}}[a-z]{{0,2}}[-., ]+)?\d{{4}}"
)
_WHEN = rf"(?:{_DATE})(?:[t ]\s*{_CLOCK})?|{_CLOCK}"
_COMPACT_DATE = re.compile(r"(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])")
_IN_PLACE_OF_DATES = "days since the first, or year and month as columns"
_MARKED = r"[-+−]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+−]?\d{1,3}(?:[ \u00a0\u202f'’]\d{3})+(?:[.,]\d+)?"
_DECIMAL_COMMA = r"[-+−]?(?:\d{1,3}(?:\.\d{3})+|\d*),\d+"
_CURRENCY = r"(?:[$€£¥₹]|usd|eur|gbp)"
_AMOUNT = rf"[-+−]?\s*{_CURRENCY}\s*[-+−]?{_DIGITS}|[-+−]?{_DIGITS}\s*{_CURRENCY}"
_THOUSANDS = "numbers with marks between thousands"
# Pattern of a cell that Python cannot read as a number, in any case; its description, and advice.
_LOOKS = (
    (rf"[-+−]?\s*{_DIGITS}\s*[%‰]", "percentages", "the numbers without the sign, such as {number}"),
    (_WHEN, "dates or times", f"a number in their place, such as {_IN_PLACE_OF_DATES}"),
    (_MARKED, _THOUSANDS, "the numbers without these marks, such as {number}"),
    (_DECIMAL_COMMA, "numbers with a decimal comma", "a decimal point, such as {number}"),
    (_AMOUNT, "amounts with a currency", "the numbers alone, such as {number}"),
    (rf"[−–]\s*{_DIGITS}|\({_DIGITS}\)", "negative numbers without a minus sign", "{number}"),
    (r"[-+]?0x[0-9a-f]+", "hexadecimal numbers", "decimal numbers"),
)
_UNIT = re.compile(r"[-+−]?(\d+(?:[.,]\d+)?)\s*([^\W\d]{1,4}|°[cfk]?)", re.IGNORECASE)


def read_cells(path: Path) -> dict[str, list[str]]:
    """Column -> its cells as stripped text, below the single header line. Names of columns are cleaned."""
    import pandas as pd

    try:
        frame = pd.read_csv(path, header=None, dtype=object, na_filter=False, encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError.of("", "a CSV file", f"{path}, which does not exist", "its full path") from None
    except pd.errors.EmptyDataError:
        got = f"{path}, which is empty"
        raise InputError.of("", "a CSV file with a header line", got, "another") from None
    except (pd.errors.ParserError, UnicodeDecodeError, OSError) as problem:
        if isinstance(problem, pd.errors.ParserError):
            _check_separator(header_of(path))
        got, advice = f"{path}: {str(problem).strip()}", "one row of cells per line"
        raise InputError.of("", "a comma-separated file in UTF-8", got, advice) from problem
    # pandas pads a short line with empty cells, which are then refused as missing.
    cells = [[str(cell).strip() for cell in frame[column]] for column in frame]
    header = [clean(column[0]) for column in cells]
    _check_separator([cells[0][0]] if len(cells) == 1 else header)
    check_different(header, str(path))
    InputError.check(len(frame) > 1, "", f"rows below the header of {path}", "no rows", "a file with data")
    return {name: column[1:] for name, column in zip(header, cells, strict=True)}


def _check_separator(header: Sequence[str]) -> None:
    single = len(header) == 1 and re.search(r"[;\t|]", header[0])
    got, advice = f"the header {clean(' '.join(header))!r}", "commas, and points in numbers (CSV UTF-8)"
    InputError.check(not single, "", "cells separated by commas", got, advice)


def header_of(path: Path) -> list[str]:
    """Names of the columns of a CSV file. Only its first line is read."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        return [clean(name) for name in next(csv.reader([file.readline(MOST_HEADER)]), [])]


def check_different(names: Sequence[str], where: str) -> None:
    """Check that the names of the columns of `where` are different."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    got = f"{twice} more than once"
    InputError.check(not twice, "", f"different column names in {where}", got, "renaming them")


def parse(name: str, cells: list[str]) -> np.ndarray:
    """Values of a column: all numbers (float64) or all words (object, cleaned).

    An error is raised if a value is missing or infinite, numbers and words are mixed, or a cell looks like a number or
    a date that was not read.
    """
    leave_out = f"drop=[{name!r}] if it is a feature"

    def check(wrong: Sequence[int], expected: str, what: str, advice: str) -> None:
        if wrong:
            first = f"the first in row {wrong[0] + 1} below the header ({cells[wrong[0]]!r})"
            expected = f"{expected} in column {name!r}"
            raise InputError.of("", expected, f"{len(wrong)} {what}, {first}", advice)

    InputError.check(name, "", "a name for every column", "a column without one", "drop=[''] or a name")
    missing = [row for row, cell in enumerate(cells) if cell.lower() in MISSING]
    check(missing, "no missing value", "missing", f"filling in or leaving out those rows, or {leave_out}")
    numbers = [_number(cell) for cell in cells]
    words = [row for row, number in enumerate(numbers) if number is None]
    alike = {row: found for row in words if (found := looks_like(cells[row])) is not None}
    # 1,234 can be read as two numbers: another cell of the column may decide which.
    kinds = sorted(alike.values(), key=lambda found: found[0] == _THOUSANDS)
    for what, advice in kinds[:1]:
        check(list(alike), "numbers or categories", f"that look like {what}", f"{advice}; or {leave_out}")
    if len(words) == len(cells):
        unit = _one_unit(cells)
        what, advice = f"with the unit {unit!r} behind a number", f"the numbers without it, or {leave_out}"
        check(words if unit else (), "numbers or categories", what, advice)
        return np.array([clean(cell) for cell in cells], dtype=object)
    advice = "correcting them, or a word in every row if the column is categorical"
    check(words, "only numbers or only words", "that are no numbers", advice)
    dates = all(_COMPACT_DATE.fullmatch(cell) for cell in cells)
    what, advice = "cells that look like dates written as YYYYMMDD", f"{_IN_PLACE_OF_DATES}; or {leave_out}"
    check(range(len(cells)) if dates else (), "numbers", what, advice)
    values = np.array(numbers, dtype=np.float64)
    infinite = np.flatnonzero(~np.isfinite(values)).tolist()
    check(infinite, "finite values", "infinite", "leaving out those rows")
    return values


def looks_like(cell: str) -> tuple[str, str] | None:
    """Description of a cell that is not a number, and advice for its format; None for a word."""
    for pattern, what, advice in _LOOKS:
        if re.fullmatch(pattern, cell, re.IGNORECASE):
            return what, advice.format(number=_plain_number(cell, what))
    return None


def _plain_number(cell: str, what: str) -> str:
    """The number in a cell, in the form that Python reads."""
    text = re.sub(r"[^\d.,]", "", cell)
    if what == _THOUSANDS and re.search(r",\d{3}(?:,|\.|$)", text):
        text = text.replace(",", "")
    elif "," in text:
        text = text.replace(".", "").replace(",", ".")
    return ("-" if re.match(r"[^\d]*[-−–(]", cell) else "") + text


def _one_unit(cells: list[str]) -> str:
    """The unit that follows the number in all cells, such as kg; "" where they are categories, such as 2wd and 4wd."""
    found = [_UNIT.fullmatch(cell) for cell in cells]
    if not all(found):
        return ""
    units = {each[2].lower() for each in found if each}
    values = {each[1] for each in found if each}
    measured = len(values) > FEW_VALUES or any(re.search(r"[.,]", value) for value in values)
    return units.pop() if len(units) == 1 and measured else ""


def _number(cell: str) -> float | None:
    # Python reads "12_34" as 1234; in a data file it is an identifier.
    cell = "" if "_" in cell else cell
    with contextlib.suppress(ValueError):
        return float(cell)
    return None


def parse_target(
    name: str, values: np.ndarray, task: str | None
) -> tuple[np.ndarray, tuple[str, ...] | None, str]:
    """The targets, the meaning of their labels (None for numbers), and how they were read, in words.

    Two different whole numbers are classes unless `task` states otherwise; more than two are numbers.
    """
    different, where = np.unique(values), f"target {name!r}"
    numeric = values.dtype == np.float64
    broken = values[values != np.round(values)] if numeric else values[:0]
    classes = different.size == 2 and not len(broken) if task is None else task == "classification"
    if numeric and not classes:
        words = "numbers"
        if different.size <= FEW_VALUES and not len(broken):
            listed = _some([f"{value:.0f}" for value in different])
            only = f"{different.size} whole ones occur" if different.size > 1 else "one value occurs"
            words += f", though only {only} ({listed})"
            words += "; task='classification' reads them as classes" if different.size > 1 else ""
        return values, None, words
    if len(broken):
        raise InputError.of("", f"integer labels in {where}", f"{broken[0]}", 'task="regression"')
    if not numeric and task == "regression":
        raise InputError.of("", f"numbers in {where}", repr(values[0]), 'task="classification"')
    if not numeric and task is None and different.size > MOST_CATEGORIES:
        got = f"{different.size} different words in {len(values)} rows, such as {values[0]!r}"
        expected = f"numbers or at most {MOST_CATEGORIES} classes in {where}"
        raise InputError.of("", expected, got, "another target")
    names = tuple(str(int(value)) if numeric else str(value) for value in different)
    got = f"only {names[0]!r}"
    InputError.check(len(names) > 1, "", f"two classes or more in {where}", got, "more rows")
    words = f"{len(names)} classes ({_some(names)})"
    words += "; task='regression' reads them as numbers" if numeric else ""
    return np.searchsorted(different, values).astype(np.int64), names, words


def _some(values: Sequence[str]) -> str:
    shown = [value if len(value) <= 24 else f"{value[:23]}…" for value in values[:MOST_VALUES]]
    return ", ".join(shown) + (", ..." if len(values) > MOST_VALUES else "")


def in_one_line(target: str, words: str, features: Mapping[str, tuple[str, ...]], dropped: int = 0) -> str:
    """How the columns were read: the target, described by `words`, then numerical, then categorical features.

    `features` is column -> its categories, empty for a column of numbers.
    """
    numbers = [name for name, values in features.items() if not values]
    categories = {name: values for name, values in features.items() if values}
    parts = [f"target {target} as {words}"]
    if numbers:
        more = f" and {len(numbers) - MOST_NAMES} more" if len(numbers) > MOST_NAMES else ""
        parts.append(f"{', '.join(numbers[:MOST_NAMES])}{more} as numbers")
    for name in list(categories)[:MOST_NAMES]:
        parts.append(f"{name} as {len(categories[name])} categories ({_some(categories[name])})")
    if rest := list(categories)[MOST_NAMES:]:
        others = " and others" if len(rest) > MOST_NAMES else ""
        parts.append(f"{', '.join(rest[:MOST_NAMES])}{others} as categories")
    if dropped:
        parts.append(f"{dropped} left out")
    return clean_lines("; ".join(parts))


def read_columns(
    path: str | os.PathLike[str], target: str, drop: Sequence[str], task: str | None
) -> dict[str, Any]:
    """The parts of a `Table` from a CSV file; see `tables.read_csv`."""
    check_known("task", [] if task is None else [task], TASKS)
    cells = read_cells(Path(path))
    target = clean(target)
    dropped = dict.fromkeys(clean(name) for name in ([drop] if isinstance(drop, str) else drop))
    check_known(f"column of {path}", [target, *dropped], cells)
    kept, got = target not in dropped, f"{target!r} in drop"
    InputError.check(kept, "", "a target that is kept", got, "another target or drop")

    features: dict[str, np.ndarray] = {}
    found: dict[str, tuple[str, ...]] = {}
    for name in [name for name in cells if name != target and name not in dropped]:
        values = parse(name, cells[name])
        found[name] = () if values.dtype == np.float64 else tuple(sorted(set(values)))
        if not found[name]:
            features[name] = values
        expected = f"numbers or at most {MOST_CATEGORIES} different words in column {name!r}"
        got = f"{len(found[name])} different words in {len(values)} rows, as in an identifier"
        InputError.check(len(found[name]) <= MOST_CATEGORIES, "", expected, got, f"drop=[{name!r}]")
        for category in found[name]:
            indicator = f"{name}={category}"
            free = indicator not in features and indicator not in cells
            InputError.check(free, "", "different column names", f"{indicator!r} twice", "another name")
            features[indicator] = (values == category).astype(np.float64)
    InputError.check(features, "", "at least one feature column", f"none beside {target!r}", "a wider table")
    y, class_names, words = parse_target(target, parse(target, cells[target]), task)
    return {
        "x": np.column_stack(list(features.values())),
        "y": y,
        "feature_names": list(features),
        "target_name": target,
        "class_names": class_names,
        "reading": in_one_line(target, words, found, len(dropped)),
    }
