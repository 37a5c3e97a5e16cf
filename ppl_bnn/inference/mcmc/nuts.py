"""The No-U-Turn Sampler, run by NumPyro's or Pyro's kernel. Code shared with HMC is in `hamiltonian.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.settings import setting, whole
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.mcmc.hamiltonian import Hamiltonian
from ppl_bnn.inference.sampling.stream import Arrays


@dataclass(frozen=True)
class NUTS(Hamiltonian):
    """The No-U-Turn Sampler, in unconstrained coordinates.

    The algorithm is that of Hoffman and Gelman with multinomial sampling from the trajectory (Betancourt). A trajectory
    of leapfrog steps is doubled until it turns back on itself, and the draw is taken from it in proportion to
    exp(-U(u) - r' M^-1 r / 2). The step size and the mass matrix are adapted in the warm-up.

    Parameters
    ----------
    draws : int
        Transitions per chain that are kept.
    warmup : int
        Transitions per chain for adaptation, which are not kept.
    chains : int
        Number of independent chains.
    start : method, posterior, dict or None
        Where chains begin. None: a prior draw per chain. A dict has constrained values; other sites are drawn from the
        prior. A start that has a spread (Laplace, SVI, an ensemble of these, earlier chains) also gives the mass matrix
        with which the warm-up begins: its covariance, exact or from draws, times the temperature.
    jitter : float
        Standard deviation, in unconstrained coordinates, of the noise added to a chain that would start where an
        earlier one does.
    chain_method : str
        In NumPyro "threads" (over the cores), "vectorised", "sequential", "devices" (over those of JAX) or "auto":
        threads on a CPU, vectorised on CUDA. All but "vectorised" give the same bits on equal devices. In Pyro
        "processes" (over the cores), "sequential" or "auto": processes on a CPU, except in a daemonic process (such as
        the workers of Dask), which may not start other processes.
    temperature : float
        T of the target p(w | D)^(1/T), in both systems.
    checkpoint : str, path or None
        Folder for draws while chains run. An interrupted run resumes from it bit for bit. NumPyro only, as are `until`,
        `budget` and `bnn.extend`.
    until : str or None
        Continue until a rule holds in function space, such as "rhat<1.01, ess>400" (also ess_bulk, ess_tail, mcse). It
        is checked after every `draws` draws.
    budget : float or None
        Seconds after which chains stop, compilation and start included. `until` and `budget` change only the length:
        the draws are the first of a longer run.
    target_accept : float
        The mean acceptance probability to which the step size is tuned. Values nearer 1 mean smaller steps and fewer
        divergences.
    mass_matrix : {"diagonal", "dense", "block"}
        Structure of the mass matrix. "block" has a dense block per layer (the part of a site name before its last dot).
        Single coordinates, such as the noise, and latent variables of rows are on a diagonal.
    adapt_mass_matrix : bool
        Whether the warm-up estimates the mass matrix. If False, it stays at what `start` gives, or at the identity.
    step_size : float or None
        Where the tuning of the step size begins. None begins at 1.
    max_tree_depth : int
        A trajectory has at most 2**max_tree_depth - 1 leapfrog steps.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    InputError
        Impossible arguments.
    UnsupportedError
        Settings that are not supported; `Point` parameters without a value.
    DivergenceError
        No finite log density at the starting points, or at a draw.
    BudgetError
        The budget was spent before the first draw.

    Notes
    -----
    Statistics have shape (chain, draw) and ArviZ's names: `lp` (the log density of the target at u, Jacobian included),
    `energy` (NumPyro only), `acceptance_rate`, `mean_accept_prob` (its running mean), `step_size`, `n_steps` (leapfrog
    steps), `tree_depth`, `reached_max_tree_depth` and `diverging`. d completed doublings make 2**d - 1 steps, so
    `tree_depth` is the number of binary digits of `n_steps`. A last doubling that was broken off counts as one.

    If the mass matrix of the start is about right, as on a nearly normal posterior, a warm-up of tens of transitions is
    enough (`comparisons/performance/sampling.py`).

    Chains that all begin around one mode agree, however many modes there are. To let R-hat detect several modes, begin
    in several: MAP(), fitted once per chain, or an ensemble.

    References
    ----------
    - Hoffman and Gelman (2014), "The No-U-Turn Sampler: adaptively setting path lengths in Hamiltonian Monte Carlo".
    - Betancourt (2017), "A conceptual introduction to Hamiltonian Monte Carlo".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.NUTS(draws=20, warmup=20, chains=2)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape  # chains, draws
    (2, 20)
    """

    max_tree_depth: int = setting(10, whole(1, 20, ", since 20 is a million steps per draw"))
    algorithm: ClassVar[str] = "NUTS"
    limitations: ClassVar[str] = (
        "Nothing, as chains grow long; within a budget chains may stay in modes of their own: see bnn.diagnose."
    )

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float]:
        most = 2.0**self.max_tree_depth - 1.0
        # Networks of 80 to 600 weights took up to three times as many gradients per draw as they have weights.
        return 1.0, min(float(max(15, min(size.parameters, 500))), most), most

    def trajectory(self) -> dict[str, Any]:
        return {"max_tree_depth": self.max_tree_depth}

    def statistics(self, kept: Arrays) -> Arrays:
        found = super().statistics(kept)
        # The exponent of frexp is the number of binary digits, exactly; a rounded logarithm need not be.
        depth = np.frexp(found["n_steps"].astype(float))[1].astype(int)
        return {**found, "tree_depth": depth, "reached_max_tree_depth": depth >= self.max_tree_depth}

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        yield from super().noticed(statistics, figures)
        deep = float(statistics["reached_max_tree_depth"].mean())
        other = "" if self.mass_matrix == "dense" else "mass_matrix='dense', "
        if deep > 0.05:
            yield (
                f"{deep:.0%} of transitions reached max_tree_depth={self.max_tree_depth}, so draws are more correlated "
                f"than they need be: try a longer warm-up, {other}or max_tree_depth={self.max_tree_depth + 2}"
            )
