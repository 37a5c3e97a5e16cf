"""The most memory that this process held while something was computed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """How to ask for the most memory held since the block began, in MB of 10^6 bytes; NaN where nobody says.

    Linux keeps the peak of a process and forgets it when told to; elsewhere there is only that of the whole life of a
    process, which says something of a block where nothing before it took more. A block within a block makes the outer
    one forget what came before the inner.
    """
    before = _high_water()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        before = 0.0
    yield lambda: found if (found := _high_water()) > before else math.nan


def _high_water() -> float:
    with suppress(OSError, TypeError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 / 1e6  # type: ignore[index]
    with suppress(ImportError):
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return math.nan
