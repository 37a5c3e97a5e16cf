"""What the tests of the studies share: a compiler that does not take its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

# XLA leaves out most of its own passes, and LLVM the expensive ones.
HASTY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def hasty_compiler() -> Iterator[None]:
    """The library's programs are compiled with few optimisations.

    A tiny run has dozens of programs, and compiling them is most of its time. So compiled, a fit takes two thirds of
    the time, and finds the same up to rounding. The library keeps programs by their text and by these options: no other
    test gets one of them.
    """
    from ppl_bnn.backends.numpyro import NumPyro

    compiled = NumPyro.compiled

    def hasty(self: NumPyro, lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
        return compiled(self, lowered, {**(options or {}), **HASTY})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumPyro, "compiled", hasty)
        yield
