"""The base class of samplers with many short chains: superchains, and warnings about joint adaptation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.settings import setting, whole
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.sampling.sampler import Sampler, diverged

# Share of warm-up transitions without a usable proposal above which the adaptation counts as frozen.
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
        these groups (`posterior.convergence`). It can detect a problem only if the points are spread wider than the
        posterior, as prior draws are.
    start, jitter, temperature, checkpoint, until, budget
        See `Sampler`.
    chain_method : {"auto", "vectorised"}
        Both run all chains as one vectorised function.
    """

    draws: int = 200
    warmup: int = 300
    chains: int = 64
    superchains: int = setting(8, whole(2))
    averaged: ClassVar[tuple[str, ...]] = ("acceptance_rate", "step_size")
    limitations: ClassVar[str] = (
        "Its chains are many and short: regions that none reached in the warm-up are missing. It needs an accelerator."
    )

    def check(self) -> None:
        super().check()
        wanted, advice = f"a divisor of chains={self.chains}", "chains=64, superchains=8"
        divides = self.chains % self.superchains == 0
        InputError.check(divides, f"{self.name} superchains", wanted, self.superchains, advice)
        wanted, got = "'auto' or 'vectorised', since the chains adapt together", repr(self.chain_method)
        together = self.chain_method in ("auto", "vectorised")
        UnsupportedError.check(together, f"{self.name} chain_method", wanted, got, "'auto'")

    def effort(self, size: Size) -> Effort | None:
        found = super().effort(size)
        # One vectorised function over all chains.
        return None if found is None else replace(found, parallel=1, together=self.chains)

    @property
    def starting_points(self) -> int:
        """One starting point per superchain."""
        return self.superchains

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        refused = int(np.max(statistics["adaptation_refused"]))
        if refused > FROZEN * self.warmup:
            yield (
                f"the adaptation was frozen: in {refused} of {self.warmup} warm-up transitions nothing was finite, so "
                "the step size is not tuned: try start=MAP(), narrower priors, or standardised inputs and targets"
            )
        yield from diverged(statistics, self._smaller_steps())

    @abstractmethod
    def _smaller_steps(self) -> str:
        """The setting that makes steps smaller, for a warning."""


def finite(chains: Any) -> Any:
    """Which of BlackJAX's states of chains have a finite log density and gradient."""
    import jax.numpy as jnp

    return jnp.isfinite(chains.logdensity) & jnp.all(jnp.isfinite(chains.logdensity_grad), axis=-1)


def recorded(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What is recorded of the state of all chains, with `more`; a number that chains share is repeated for each."""
    import jax.numpy as jnp

    chains = state["chains"]
    statistics = {
        "lp": chains.logdensity,
        "acceptance_rate": state["acceptance"],
        "diverging": state["diverging"],
        "step_size": state["step_size"],
        "adaptation_refused": state["refused"],
        **more,
    }
    each = {name: jnp.broadcast_to(value, chains.logdensity.shape) for name, value in statistics.items()}
    return {"u": chains.position, **each}


def where(rows: Any, new: Any, old: Any) -> Any:
    """The rows of `new` where `rows` (N,) is true, else those of `old`; both are trees of arrays (N, ...)."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)
