"""Registry of the classes of approximations by their names in files, and of what a posterior calls in rooms below.

A file names a class of this table, and nothing else is imported for it. `ppl_bnn.inference.registry` fills both tables,
since most approximations belong to methods, and a fit to a posterior is a fit.
"""

from __future__ import annotations

import importlib
from typing import Any

from ppl_bnn.core.errors import unknown_name

# Name -> "module:class".
APPROXIMATIONS: dict[str, str] = {}
CALLS: dict[str, str] = {}


def approximation_class(name: str) -> Any:
    """The class of an approximation by its name in a file."""
    if name not in APPROXIMATIONS:
        raise unknown_name("approximation", name, APPROXIMATIONS)
    return _imported(APPROXIMATIONS[name])


def call(name: str) -> Any:
    """The function that does the work of a method of `Posterior`."""
    return _imported(CALLS[name])


def _imported(address: str) -> Any:
    module, _, attribute = address.partition(":")
    return getattr(importlib.import_module(module), attribute)
