"""A fixed set of draws: an approximation that cannot make new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.posterior.approximation import Approximation


@dataclass
class Drawn(Approximation):
    """Independent draws that were made once. `draw` returns the first of them, always the same; a posterior uses all.

    Parameters
    ----------
    u : dict of str to ndarray
        name -> ``(S, *unconstrained shape)``.
    log_q : ndarray, optional
        Log density of the draws, (S,).
    """

    u: dict[str, np.ndarray]
    log_q: np.ndarray | None = None
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    @property
    def count(self) -> int:
        """Number of draws, S."""
        return len(next(iter(self.u.values())))

    @property
    def stored_count(self) -> int:
        """Number of draws, S: a posterior uses all of them."""
        return self.count

    def stored_draws(self) -> dict[str, np.ndarray]:
        return dict(self.u)

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        if count > self.count:
            raise InputError.of(
                "draws", f"at most the {self.count} that were kept", str(count), f"draws={self.count}"
            )
        return {name: value[:count] for name, value in self.u.items()}

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """log q of the first draws, as `draw` returns them; None for any other values, whose density is not known.

        Parameters
        ----------
        u : mapping of str to ndarray
            Draws with one leading axis.

        Returns
        -------
        ndarray or None
            Shape (S,).
        """
        if self.log_q is None:
            return None
        count = len(next(iter(u.values())))
        known = count <= self.count and all(
            np.array_equal(value, self.u[name][:count]) for name, value in u.items()
        )
        return self.log_q[:count] if known else None

    def centre(self) -> dict[str, np.ndarray]:
        """The mean of the draws."""
        return {name: value.mean(0) for name, value in self.u.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        kept = {f"u:{name}": value for name, value in self.u.items()}
        return kept if self.log_q is None else {**kept, "log_q": self.log_q}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Drawn:
        u = {key[2:]: value for key, value in arrays.items() if key.startswith("u:")}
        return cls(u, arrays.get("log_q"))
