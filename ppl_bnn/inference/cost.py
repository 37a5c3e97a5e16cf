"""The expected cost of a fit: every method estimates its own, and `bnn.advise` collects the estimates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Size:
    """How large a problem is: rows N, unconstrained coordinates P, outputs K of the network for a row."""

    rows: int
    parameters: int
    outputs: int

    def share(self, batch_size: int | None) -> float:
        """What a gradient from a batch costs, in gradients over all rows."""
        return 1.0 if batch_size is None else min(1.0, batch_size / self.rows)


@dataclass(frozen=True)
class Effort:
    """What a fit takes besides compiling.

    fewest, usual, most: evaluations of the gradient of the log joint over all rows, counted as
    `info.gradient_evaluations` counts them. Fewest and most are bounds, usual is a guess, from what networks of some
    hundred weights took where that was looked at; where the settings say the number, all three are that number.
    parallel: how many cores can share them. together: how many are computed in one call, which for small networks costs
    far less than one by one. numbers: how many numbers are held at once, besides some copies of the parameters.
    operations: additions and multiplications of linear algebra, besides the gradients.
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
        return cls(gradients, gradients, gradients, **more)

    def times(self, count: float) -> Effort:
        """As many fits, one after another: numbers are held by one at a time."""
        return replace(
            self,
            fewest=self.fewest * count,
            usual=self.usual * count,
            most=self.most * count,
            operations=self.operations * count,
        )

    def after(self, first: Effort | None) -> Effort:
        """This, after something else; how gradients are shared is taken from this, which is the longer of the two."""
        if first is None:
            return self
        return replace(
            self,
            fewest=first.fewest + self.fewest,
            usual=first.usual + self.usual,
            most=first.most + self.most,
            numbers=max(first.numbers, self.numbers),
            operations=first.operations + self.operations,
        )


def effort_of_start(start: Any, size: Size, count: int = 1) -> Effort | None:
    """What `count` starting points take: fits, where `start` is a method, and nothing otherwise."""
    ask = getattr(start, "effort", None)
    found = ask(size) if ask is not None else None
    return None if found is None else found.times(count)
