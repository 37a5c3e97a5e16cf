"""Fits from several starts as one approximation: the best one, with the others for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ppl_bnn.backends.protocol import Model
from ppl_bnn.inference.variational.guides import GuideApproximation
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.posterior.approximation import Approximation, Drawn

# The approximations of a fit, by their names in files.
MEMBERS: dict[str, type[Approximation]] = {
    kind.__name__: kind for kind in (MeanField, GuideApproximation, Drawn)
}


@dataclass
class Restarts(Approximation):
    """Fits from several starts. The first is the best and is the approximation; the others are for comparison.

    Attributes
    ----------
    members : tuple of Approximation
        The fits, the best first.
    """

    members: tuple[Approximation, ...]

    @property
    def kind(self) -> Literal["chains", "iid", "point"]:  # type: ignore[override]
        return self.members[0].kind

    @property
    def stored_count(self) -> int | None:
        return self.members[0].stored_count

    def stored_draws(self) -> dict[str, np.ndarray]:
        return self.members[0].stored_draws()

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.members[0].draw(count, rng)

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray | None:
        return self.members[0].log_prob(u)

    def centre(self) -> dict[str, np.ndarray]:
        return self.members[0].centre()

    @property
    def has_centre(self) -> bool:
        return self.members[0].has_centre

    def program(self, model: Model) -> Model:
        return self.members[0].program(model)

    def as_prior(self) -> Any:
        return self.members[0].as_prior()

    def arrays(self) -> dict[str, np.ndarray]:
        found = {"class": np.frombuffer(type(self.members[0]).__name__.encode(), dtype=np.uint8).copy()}
        for index, member in enumerate(self.members):
            found |= {f"{index}/{key}": value for key, value in member.arrays().items()}
        return found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Restarts:
        kind = MEMBERS[bytes(arrays["class"]).decode()]
        parts: dict[int, dict[str, np.ndarray]] = {}
        for key, value in arrays.items():
            index, found, name = key.partition("/")
            if found:
                parts.setdefault(int(index), {})[name] = value
        return cls(tuple(kind.from_arrays(parts[index]) for index in sorted(parts)))
