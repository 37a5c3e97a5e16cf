"""The expected cost of a fit. Every method estimates its own, and `bnn.advise` collects the estimates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Size:
    """The size of a problem: N `rows`, P unconstrained coordinates (`parameters`), K `outputs` of the network."""

    rows: int
    parameters: int
    outputs: int

    def share(self, batch_size: int | None) -> float:
        """The cost of a gradient from a batch, in gradients over all rows; None is a batch of all rows."""
        return 1.0 if batch_size is None else min(1.0, batch_size / self.rows)


@dataclass(frozen=True)
class Effort:
    """The cost of a fit, without compilation.

    Attributes
    ----------
    fewest, usual, most : float
        Gradients of the log joint over all rows: bounds, and a guess (measured on networks of some hundred weights).
        All are equal if the settings determine the number.
    parallel : int
        Number of cores that can share the gradients.
    together : int
        Gradients computed in one call, which for small networks costs far less than one by one.
    numbers : float
        Numbers held in memory at once, besides a few copies of the parameters.
    operations : float
        Additions and multiplications of linear algebra, besides the gradients.
    """

    fewest: float
    usual: float
    most: float
    parallel: int = 1
    together: int = 1
    numbers: float = 0.0
    operations: float = 0.0

    @classmethod
    def exactly(cls, gradients: float, **more: Any) -> Effort:
        """An effort whose number of gradients is known; `more` are the other attributes."""
        return cls(gradients, gradients, gradients, **more)

    def times(self, count: float) -> Effort:
        """The effort of several fits, one after another. One fit holds memory at a time, so `numbers` does not grow."""
        return replace(self, **{name: getattr(self, name) * count for name in _COUNTED})

    def after(self, first: Effort | None) -> Effort:
        """The effort of this fit after a shorter one, if any; `parallel` and `together` are those of this fit."""
        if first is None:
            return self
        together = {name: getattr(first, name) + getattr(self, name) for name in _COUNTED}
        return replace(self, numbers=max(first.numbers, self.numbers), **together)


# What adds up over fits.
_COUNTED = ("fewest", "usual", "most", "operations")


def effort_of_start(start: Any, size: Size, count: int = 1) -> Effort | None:
    """The effort of `count` starting points: None without an estimate, or if the start is not itself a method."""
    ask = getattr(start, "effort", None)
    found = ask(size) if ask is not None else None
    return None if found is None else found.times(count)
