"""Registry of the classes of approximations by their names in files.

A file names a class of this table, and nothing else is imported for it. `ppl_bnn.inference.registry` fills the table,
since most approximations belong to methods.
"""

from __future__ import annotations

import importlib
from typing import Any

from ppl_bnn.core.errors import unknown_name

# Name -> "module:class".
APPROXIMATIONS: dict[str, str] = {}


def approximation_class(name: str) -> Any:
    """The class of an approximation by its name in a file."""
    if name not in APPROXIMATIONS:
        raise unknown_name("approximation", name, APPROXIMATIONS)
    module, _, attribute = APPROXIMATIONS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
