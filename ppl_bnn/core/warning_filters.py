"""Filters that ignore or record warnings in one thread only.

`warnings.catch_warnings` restores the filter list of the whole process, so two threads restore each other's lists. Here
one entry, whose pattern checks the current context, is added and removed.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any


@dataclass(frozen=True, eq=False)
class _Rule:
    """The warnings that one block ignores, or (kept) the list in which it records warnings."""

    category: type[Warning] = Warning
    pattern: re.Pattern[str] | None = None
    kept: list[warnings.WarningMessage] | None = None


# Rules of the blocks of this context, the outermost first; rules for all threads.
_RULES: contextvars.ContextVar[tuple[_Rule, ...]] = contextvars.ContextVar("rules", default=())
_EVERYWHERE: list[_Rule] = []
_LOCK = threading.RLock()


def _ignoring() -> list[_Rule]:
    """The rules of this context that ignore warnings. A rule that records warnings ends the rules outside it."""
    rules = _RULES.get()
    last = max((index for index, rule in enumerate(rules) if rule.kept is not None), default=-1)
    return [*_EVERYWHERE, *rules[last + 1 :]]


def _recording() -> list[warnings.WarningMessage] | None:
    return next((rule.kept for rule in reversed(_RULES.get()) if rule.kept is not None), None)


def _matches(rule: _Rule, text: str) -> bool:
    return rule.pattern is not None and rule.pattern.match(text) is not None


class _Entry:
    """An entry of the filter list, kept while some block needs it. It is its own pattern, of which `match` is used."""

    def __init__(self, category: type[Warning], ignores: bool):
        self.category, self.ignores = category, ignores
        self.item: Any = ("ignore" if ignores else "always", self, category, None, 0)
        self.blocks = 0
        self.lists: list[Any] = []

    def match(self, text: str) -> bool:
        if not self.ignores:
            return _recording() is not None
        return any(rule.category is self.category and _matches(rule, text) for rule in _ignoring())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with _LOCK:
            self.blocks += 1
            # Another thread may have restored a copy of the list from before this entry.
            filters: Any = warnings.filters
            if not any(each is self.item for each in filters):
                filters.insert(0, self.item)
            if not any(each is filters for each in self.lists):
                self.lists.append(filters)
        try:
            yield
        finally:
            with _LOCK:
                self.blocks -= 1
                if not self.blocks:
                    now: Any = warnings.filters
                    for filters in (*self.lists, now):
                        filters[:] = [each for each in filters if each is not self.item]
                    self.lists.clear()


@cache
def _entry(category: type[Warning], ignores: bool) -> _Entry:
    return _Entry(category, ignores)


@contextlib.contextmanager
def ignored(message: str = "", category: type[Warning] = Warning, everywhere: bool = False) -> Iterator[None]:
    """Ignore warnings in this context, or in all threads; `message` is a regular expression for their beginning."""
    rule = _Rule(category, re.compile(message, re.IGNORECASE))
    with _entry(category, True).entered():
        if everywhere:
            _EVERYWHERE.append(rule)
            undo = partial(_EVERYWHERE.remove, rule)
        else:
            undo = partial(_RULES.reset, _RULES.set((*_RULES.get(), rule)))
        try:
            yield
        finally:
            undo()


@contextlib.contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """Record all warnings of this context, including repeated ones, in a list. They are not shown."""
    kept: list[warnings.WarningMessage] = []
    with _shown_here(), _entry(Warning, False).entered():
        # A change of the filters resets the registry of warnings that were shown already.
        with _LOCK:
            warnings.simplefilter("ignore", _Never)
            filters: Any = warnings.filters
            filters[:] = [each for each in filters if each[2] is not _Never]
        token = _RULES.set((*_RULES.get(), _Rule(kept=kept)))
        try:
            yield kept
        finally:
            _RULES.reset(token)


class _Never(Warning):
    """A warning that is never raised."""


_SHOWN: dict[str, Any] = {"blocks": 0, "before": None}


@contextlib.contextmanager
def _shown_here() -> Iterator[None]:
    """Replace `warnings.showwarning` by `_show` while some context records warnings."""
    with _LOCK:
        if warnings.showwarning is not _show:
            _SHOWN["before"] = warnings.showwarning
            warnings.showwarning = _show
        _SHOWN["blocks"] += 1
    try:
        yield
    finally:
        with _LOCK:
            _SHOWN["blocks"] -= 1
            if not _SHOWN["blocks"] and warnings.showwarning is _show:
                warnings.showwarning = _SHOWN["before"]


def _show(
    text: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    kept = _recording()
    if kept is None:
        _SHOWN["before"](text, category, filename, lineno, file, line)
    elif not any(issubclass(category, rule.category) and _matches(rule, str(text)) for rule in _ignoring()):
        kept.append(warnings.WarningMessage(text, category, filename, lineno, file, line))
