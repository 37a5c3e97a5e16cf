"""Filters that ignore or record warnings in one thread only.

`warnings.catch_warnings` restores the filter list of the whole process, so two threads restore each other's lists. Here
each block has one entry, whose pattern checks the current context. The entry is added and removed.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any


class _Rule:
    """The entry of one block in the filter list. It is its own pattern, of which `match` is used.

    Its action is "ignore", or "always", which records the warnings in `kept`. The entry of an inner block comes before
    that of an outer one.
    """

    def __init__(self, action: str, category: type[Warning], message: str = "", everywhere: bool = False):
        self.item: Any = (action, self, category, None, 0)
        # A string, because scikit-learn copies the patterns of the filters to its threads.
        self.pattern = message
        self._beginning = re.compile(message, re.IGNORECASE)
        self.everywhere = everywhere
        self.kept: list[warnings.WarningMessage] = []
        self.lists: list[Any] = []

    def match(self, text: str) -> bool:
        return (self.everywhere or self in _RULES.get()) and self._beginning.match(text) is not None

    def put(self) -> None:
        """Add the entry to the list, unless it is there: another thread may have restored a copy from before it."""
        filters: Any = warnings.filters
        if not any(each is self.item for each in filters):
            filters.insert(0, self.item)
        if not any(each is filters for each in self.lists):
            self.lists.append(filters)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with _LOCK:
            _ENTERED.append(self)
            for rule in _ENTERED:
                rule.put()
        # A generator may end in another context, so a rule for all threads is in none.
        token = None if self.everywhere else _RULES.set((*_RULES.get(), self))
        try:
            yield
        finally:
            if token is not None:
                _RULES.reset(token)
            with _LOCK:
                _ENTERED.remove(self)
                now: Any = warnings.filters
                for filters in (*self.lists, now):
                    filters[:] = [each for each in filters if each is not self.item]


# Rules of the blocks of this context, and of all blocks; the outermost are first.
_RULES: contextvars.ContextVar[tuple[_Rule, ...]] = contextvars.ContextVar("rules", default=())
_ENTERED: list[_Rule] = []
_LOCK = threading.RLock()


@contextlib.contextmanager
def ignored(message: str = "", category: type[Warning] = Warning, everywhere: bool = False) -> Iterator[None]:
    """Ignore warnings in this context, or in all threads; `message` is a regular expression for their beginning."""
    with _Rule("ignore", category, message, everywhere).entered():
        yield


@contextlib.contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """Record all warnings of this context, including repeated ones, in a list. They are not shown."""
    rule = _Rule("always", Warning)
    # `warnings.showwarning` is `_show` while some context records warnings.
    with _LOCK:
        if warnings.showwarning is not _show:
            _SHOWN["before"] = warnings.showwarning
            warnings.showwarning = _show
        _SHOWN["blocks"] += 1
    try:
        with rule.entered():
            # A change of the filters resets the registry of warnings that were shown already.
            with _LOCK:
                warnings.simplefilter("ignore", _Never)
                filters: Any = warnings.filters
                filters[:] = [each for each in filters if each[2] is not _Never]
            yield rule.kept
    finally:
        with _LOCK:
            _SHOWN["blocks"] -= 1
            if not _SHOWN["blocks"] and warnings.showwarning is _show:
                warnings.showwarning = _SHOWN["before"]


class _Never(Warning):
    """A warning that is never raised."""


_SHOWN: dict[str, Any] = {"blocks": 0, "before": None}


def _show(
    text: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    kept = next((rule.kept for rule in reversed(_RULES.get()) if rule.item[0] == "always"), None)
    if kept is None:
        _SHOWN["before"](text, category, filename, lineno, file, line)
        return
    # The entry of the list comes before those of outer blocks, also before those for all threads.
    everywhere = (rule for rule in list(_ENTERED) if rule.everywhere and issubclass(category, rule.item[2]))
    if not any(rule.match(str(text)) for rule in everywhere):
        kept.append(warnings.WarningMessage(text, category, filename, lineno, file, line))
