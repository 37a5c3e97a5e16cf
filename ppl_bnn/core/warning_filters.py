"""Warnings that are ignored or kept, in one thread.

`warnings.catch_warnings` replaces the list of filters of the whole process and puts it back later: two threads that do
so put back each other's. Here an entry is added whose pattern knows the context that it matches in, and that entry
alone is taken out.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class _Rule:
    """What one block ignores, or (kept) the list that it keeps warnings in."""

    category: type[Warning] = Warning
    pattern: re.Pattern[str] | None = None
    kept: list[warnings.WarningMessage] | None = None


# The blocks that this context is in, the outermost first; those that hold in all threads.
_RULES: contextvars.ContextVar[tuple[_Rule, ...]] = contextvars.ContextVar("rules", default=())
_EVERYWHERE: list[_Rule] = []
_LOCK = threading.RLock()


def _ignoring() -> list[_Rule]:
    """The rules of this context by which warnings are ignored: a list that keeps them puts an end to those before."""
    found = list(_EVERYWHERE)
    for rule in _RULES.get():
        if rule.kept is not None:
            found = list(_EVERYWHERE)
        else:
            found.append(rule)
    return found


def _keeping() -> list[warnings.WarningMessage] | None:
    return next((rule.kept for rule in reversed(_RULES.get()) if rule.kept is not None), None)


@dataclass(eq=False)
class _Pattern:
    """In the place of the regular expression of a filter: what is asked of it is `match`."""

    category: type[Warning]
    ignores: bool

    def match(self, text: str) -> bool:
        if not self.ignores:
            return _keeping() is not None
        return any(rule.category is self.category and _says(rule, text) for rule in _ignoring())


def _says(rule: _Rule, text: str) -> bool:
    return rule.pattern is not None and rule.pattern.match(text) is not None


@dataclass(eq=False)
class _Entry:
    """An entry among the filters, for as long as some block needs it."""

    item: tuple[Any, ...]
    blocks: int = 0
    lists: list[Any] = field(default_factory=list)

    def enter(self) -> None:
        self.blocks += 1
        # Another thread may have put a copy of the list in its place, from before this entry.
        filters: Any = warnings.filters
        if not any(each is self.item for each in filters):
            filters.insert(0, self.item)
        if not any(each is filters for each in self.lists):
            self.lists.append(filters)

    def leave(self) -> None:
        self.blocks -= 1
        if self.blocks:
            return
        current: Any = warnings.filters
        for filters in (*self.lists, current):
            for index in [index for index, each in enumerate(filters) if each is self.item][::-1]:
                del filters[index]
        self.lists.clear()


_ENTRIES: dict[tuple[bool, type[Warning]], _Entry] = {}


@contextlib.contextmanager
def _entered(category: type[Warning], ignores: bool) -> Iterator[None]:
    with _LOCK:
        action = "ignore" if ignores else "always"
        pattern = _Pattern(category, ignores)
        entry = _ENTRIES.setdefault((ignores, category), _Entry((action, pattern, category, None, 0)))
        entry.enter()
    try:
        yield
    finally:
        with _LOCK:
            entry.leave()


@contextlib.contextmanager
def ignored(message: str = "", category: type[Warning] = Warning, everywhere: bool = False) -> Iterator[None]:
    """Ignore such warnings in this context, or (everywhere) in all threads.

    message: a regular expression that the text of a warning begins with.
    """
    rule = _Rule(category, re.compile(message, re.IGNORECASE))
    with _entered(category, ignores=True):
        if everywhere:
            _EVERYWHERE.append(rule)
        else:
            token = _RULES.set((*_RULES.get(), rule))
        try:
            yield
        finally:
            if everywhere:
                _EVERYWHERE.remove(rule)
            else:
                _RULES.reset(token)


@contextlib.contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """All warnings of this context in a list, each time; they are not shown."""
    kept: list[warnings.WarningMessage] = []
    with _shown_here(), _entered(Warning, ignores=False):
        # The number of changes is what the memory of warnings that were shown once goes by.
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
    """Nobody warns of this."""


_SHOWN: dict[str, Any] = {"blocks": 0, "before": None}


@contextlib.contextmanager
def _shown_here() -> Iterator[None]:
    """`_show` in the place of `warnings.showwarning` for as long as some context keeps warnings."""
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
    kept = _keeping()
    if kept is None:
        _SHOWN["before"](text, category, filename, lineno, file, line)
    elif not any(issubclass(category, rule.category) and _says(rule, str(text)) for rule in _ignoring()):
        kept.append(warnings.WarningMessage(text, category, filename, lineno, file, line))
