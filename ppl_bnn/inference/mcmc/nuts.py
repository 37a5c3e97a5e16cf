"""The No-U-Turn Sampler: NumPyro's kernel, or Pyro's; what it shares with HMC stands in `hamiltonian.py`.

NUTS doubles a trajectory of leapfrog steps until it turns back on itself, and takes a draw from it in proportion to
exp(-U(u) - r' M^-1 r / 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError, message
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.mcmc.hamiltonian import Hamiltonian
from ppl_bnn.inference.optimisation.loops import check_whole
from ppl_bnn.inference.sampling.stream import Arrays


@dataclass(frozen=True)
class NUTS(Hamiltonian):
    """The No-U-Turn Sampler (Hoffman and Gelman 2014; multinomial, Betancourt 2017), in unconstrained coordinates.

    draws, warmup: transitions per chain, kept and not. chains: independent chains. target_accept: the mean acceptance
    that the step size is tuned to; nearer 1 means smaller steps and fewer divergences. max_tree_depth: a trajectory has
    at most 2**max_tree_depth - 1 leapfrog steps.

    mass_matrix: "diagonal"; "dense"; or "block", a dense block per layer (what stands before the last dot of the names
    of sites), with single coordinates such as the noise, and latent variables of rows, on a diagonal.
    adapt_mass_matrix: whether the warm-up estimates it; else it stays what `start` knows of it, or the identity.
    step_size: where the tuning of the step size begins; None: at 1.

    start: where chains begin, jitter: see `Sampler`. A start that has a spread (Laplace, SVI, an ensemble of such,
    earlier chains) also gives the mass matrix that the warm-up begins with: its covariance, exact or from draws, times
    the temperature. Where that is about right, as on a posterior near a normal one, a warm-up of tens of transitions
    will do. A Laplace approximation of a network is right at the mode only. With 10 hidden units its variances, kept
    (adapt_mass_matrix=False) through a warm-up of 50, gave as many effective draws per gradient as a diagonal estimated
    in 200 or 1000, its dense covariance half as many; warm-ups of 50, 200 and 1000 cost 24, 82 to 100 and 412 thousand
    gradients. Without a start a warm-up of 200 did as well as with one. With 50 hidden units the variances of SVI (1000
    steps), kept likewise, were the better start: 148 thousand gradients for 900 effective draws, 374 for 1280 with the
    diagonal of a Laplace approximation, 539 for 1410 without a start and a warm-up of 500 (diabetes, one seed). In
    effective draws per second, the fit of the start and all compilation counted, over hand-written NUTS with a warm-up
    of 500 (`comparisons/performance/sampling.py`, three seeds): 2.0 from a mode, MAP(steps=300), and a warm-up of 50;
    with the variances of SVI kept 1.0 after 50 transitions, of which one seed had 8 effective draws, and 1.7 after 100.
    R-hat tells chains that disagree from chains that agree, and chains that all begin around one mode agree however
    many modes there are. Where it is to tell of that, begin in several: MAP(), fitted once per chain, or an ensemble.

    chain_method: in NumPyro "threads", "vectorised", "sequential" or "devices", see `Sampler`; in Pyro "processes"
    (over the cores; what "auto" means on a CPU, but in a daemonic process, as the workers of Dask are, which may start
    no others) or "sequential". checkpoint, until, budget and `bnn.extend` are NumPyro's.

    temperature: T of the target p(w | D)^(1/T), in both systems.

    Statistics, (chain, draw), in ArviZ's names: `lp` (the log density of the target at u, Jacobian included), `energy`
    (NumPyro only), `acceptance_rate`, `mean_accept_prob` (its running mean), `step_size`, `n_steps` (leapfrog steps),
    `tree_depth`, `reached_max_tree_depth`, `diverging`. d completed doublings make 2**d - 1 steps, so tree_depth is the
    number of binary digits of n_steps; a last doubling that was broken off counts as one.

    Raises
    ------
    InputError, UnsupportedError: impossible arguments; `Point` parameters without a value.
    DivergenceError: no finite log density to start from, or at a draw. BudgetError: spent before the first draw.
    """

    max_tree_depth: int = 10
    algorithm: ClassVar[str] = "NUTS"

    def check(self) -> None:
        super().check()
        check_whole(self.name, "max_tree_depth", self.max_tree_depth, 1, "10")
        if self.max_tree_depth > 20:
            raise InputError(
                "max_tree_depth: "
                + message(
                    "at most 20 (a million steps per draw)", repr(self.max_tree_depth), "max_tree_depth=12"
                )
            )

    @property
    def weakness(self) -> str:
        return "Nothing, as chains grow long; within a budget chains may stay in modes of their own: see bnn.diagnose."

    def gradients_of_a_draw(self, size: Size) -> tuple[float, float, float]:
        most = 2.0**self.max_tree_depth - 1.0
        # Networks of 80 to 600 weights took between once and three times as many as they have weights, or fewer.
        return 1.0, min(float(max(15, min(size.parameters, 500))), most), most

    def trajectory(self) -> dict[str, Any]:
        return {"max_tree_depth": self.max_tree_depth}

    def pyro_trajectory(self) -> dict[str, Any]:
        return {"max_tree_depth": self.max_tree_depth}

    def statistics(self, kept: Arrays) -> Arrays:
        found = super().statistics(kept)
        # The exponent of frexp is the number of binary digits, exactly; a rounded logarithm need not be.
        depth = np.frexp(found["n_steps"].astype(float))[1].astype(int)
        return {**found, "tree_depth": depth, "reached_max_tree_depth": depth >= self.max_tree_depth}

    def told_of_lengths(self, statistics: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        deep = float(statistics["reached_max_tree_depth"].mean())
        if deep <= 0.05:
            return ()
        other = "" if self.mass_matrix == "dense" else "mass_matrix='dense', "
        return (
            f"{deep:.0%} of transitions reached max_tree_depth={self.max_tree_depth}, so draws are more correlated "
            f"than they need be: try a longer warm-up, {other}or max_tree_depth={self.max_tree_depth + 2}",
        )
