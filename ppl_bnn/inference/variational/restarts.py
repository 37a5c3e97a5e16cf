"""Fits from several starts as one approximation: the best one, with the others for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ppl_bnn.posterior.approximation import Approximation, arrays_of_members, members_in


def _of_the_best(name: str) -> Any:
    """An attribute of the first member."""
    return property(lambda restarts: getattr(restarts.members[0], name))


@dataclass
class Restarts(Approximation):
    """Fits from several starts. The first is the best and is the approximation; the others are for comparison.

    Attributes
    ----------
    members : tuple of Approximation
        The fits, the best first.
    """

    members: tuple[Approximation, ...]

    kind = _of_the_best("kind")
    stored_count = _of_the_best("stored_count")  # type: ignore[override]
    stored_draws = _of_the_best("stored_draws")
    draw = _of_the_best("draw")
    log_prob = _of_the_best("log_prob")
    centre = _of_the_best("centre")
    has_centre = _of_the_best("has_centre")  # type: ignore[override]
    program = _of_the_best("program")
    as_prior = _of_the_best("as_prior")

    def arrays(self) -> dict[str, np.ndarray]:
        return arrays_of_members(self.members)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        return cls(members_in(arrays))
