"""Peak memory of this process during a computation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """Measure the peak memory since the start of the block.

    Linux keeps the peak of a process and can reset it. Other systems have only the peak over the whole life of the
    process, which describes a block only if nothing before it used more memory. A nested block resets the peak of the
    outer one.

    Yields
    ------
    callable
        Function without arguments that returns the peak in MB of 10^6 bytes; NaN if unknown.
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
