"""Progress bars in a notebook: one output that is updated in place. They need neither ipywidgets nor a script."""

from __future__ import annotations

import importlib
import sys
import time
import uuid
from html import escape
from typing import Any

# Seconds between two updates of a bar: each is a message to the browser.
SECONDS = 0.2
_STYLE = "font-family:monospace;white-space:pre-wrap"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported for the answer."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookTask:
    """One progress bar in the output of a cell, a task as in `core.progress`."""

    def __init__(self, title: str, total: int):
        # By name, as IPython is no dependency; every kernel has it.
        self._display: Any = importlib.import_module("IPython.display").display
        self._title, self._total, self._done, self._figures = title, total, 0, ""
        self._id, self._began = uuid.uuid4().hex, time.monotonic()
        self._shown = self._began
        self._show(update=False)

    def update(self, done: int, **figures: float) -> None:
        self._done = done
        self._figures = "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
        if time.monotonic() - self._shown > SECONDS:
            self._show()

    def close(self) -> None:
        self._show("" if self._done >= self._total else "  stopped")

    def _show(self, end: str = "", *, update: bool = True) -> None:
        self._shown = time.monotonic()
        minutes, seconds = divmod(int(self._shown - self._began), 60)
        share = self._done / self._total if self._total else 1.0
        text = f"{share:4.0%}  {minutes}:{seconds:02d}  {self._figures}".rstrip() + end
        bar = f'<progress max="1" value="{share:.4f}" style="width:16em"></progress>'
        html = f'<div style="{_STYLE}">{escape(f"{self._title:<26}")} {bar} {escape(text)}</div>'
        shown = {"text/plain": f"{self._title}: {text}", "text/html": html}
        self._display(shown, raw=True, display_id=self._id, update=update)
