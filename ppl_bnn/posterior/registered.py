"""The classes of approximations by the names that files have for them.

A file names a class out of this table and nothing else is imported for it. The room of the methods fills the table
(`ppl_bnn.inference.registry`), since most approximations are theirs.
"""

from __future__ import annotations

import importlib
from typing import Any

from ppl_bnn.core.errors import unknown_name

# Name -> "module:class".
APPROXIMATIONS: dict[str, str] = {}


def approximation_class(name: str) -> Any:
    """The class of an approximation by its name in a file.

    Raises
    ------
    UnknownNameError
        A name that the table does not have.
    """
    if name not in APPROXIMATIONS:
        raise unknown_name("approximation", name, APPROXIMATIONS)
    module, _, attribute = APPROXIMATIONS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
