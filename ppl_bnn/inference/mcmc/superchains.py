"""The base class of samplers with many short chains: superchains, and warnings about chains that adapt together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.optimisation.loops import check_whole
from ppl_bnn.inference.sampling.sampler import Sampler

# The share of warm-up transitions without a usable proposal above which the adaptation counts as frozen.
FROZEN = 0.5


@dataclass(frozen=True)
class ManyChains(Sampler):
    """Many chains that advance and adapt together, compiled as one function over all of them.

    Parameters
    ----------
    draws : int
        Draws kept per chain. A few are enough, since all chains contribute.
    warmup : int
        Transitions per chain for adaptation, which are not kept.
    chains : int
        As many as keep the machine busy. On a GPU hundreds cost little more than one.
    superchains : int
        Number of groups, each of chains / superchains consecutive chains that begin at one point. Nested R-hat compares
        these groups (`ppl_bnn.posterior.nested`). It can detect a problem only if the points are spread wider than the
        posterior, as prior draws are.
    start, jitter, temperature, checkpoint, until, budget
        See `Sampler`.
    chain_method : {"auto", "vectorised"}
        Both run all chains as one vectorised function.
    """

    draws: int = 200
    warmup: int = 300
    chains: int = 64
    superchains: int = 8

    def check(self) -> None:
        super().check()
        check_whole(self.name, "superchains", self.superchains, 2, "8")
        if self.chains % self.superchains:
            raise InputError.of(
                f"{self.name} superchains",
                f"a divisor of chains={self.chains}, so that each has as many chains",
                repr(self.superchains),
                "chains=64, superchains=8",
            )
        if self.chain_method not in ("auto", "vectorised"):
            raise UnsupportedError.of(
                f"{self.name} chain_method",
                "'auto' or 'vectorised', since the chains adapt together",
                repr(self.chain_method),
                "chain_method='auto'",
            )

    @property
    def limitations(self) -> str:
        return "Many short chains: what none of them reached in its warm-up is missing, and they want an accelerator."

    def effort(self, size: Size) -> Effort | None:
        found = super().effort(size)
        # One vectorised function over all chains.
        return None if found is None else replace(found, parallel=1, together=self.chains)

    @property
    def starting_points(self) -> int:
        """One starting point per superchain."""
        return self.superchains

    def summarise(self, statistics: Mapping[str, np.ndarray]) -> tuple[dict[str, float], tuple[str, ...]]:
        found: list[str] = []
        diverging = np.asarray(statistics["diverging"])
        refused = int(np.max(statistics["adaptation_refused"]))
        if refused > FROZEN * self.warmup:
            found.append(
                f"the adaptation was frozen: in {refused} of {self.warmup} warm-up transitions nothing finite got "
                f"back to learn from, so the step size is none that was tuned: try start=MAP(), narrower priors, or "
                f"standardised inputs and targets"
            )
        if diverging.any():
            found.append(
                f"{int(diverging.sum())} of {diverging.size} transitions diverged, so regions of high curvature may "
                f"be missed: try {self._smaller_steps()} or a prior with lighter tails"
            )
        figures = {
            "acceptance_rate": float(np.mean(statistics["acceptance_rate"])),
            "step_size": float(np.mean(statistics["step_size"])),
        }
        return figures, tuple(found)

    @abstractmethod
    def _smaller_steps(self) -> str:
        """The setting that makes steps smaller, for a warning."""
