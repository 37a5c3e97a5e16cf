"""Hamiltonian Monte Carlo with trajectories of fixed length, by NumPyro's or Pyro's kernel (see `hamiltonian.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.settings import between, optional, setting, whole
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.mcmc.hamiltonian import Hamiltonian

# A quarter of a period of a normal posterior whose mass matrix is its precision.
QUARTER = math.pi / 2


@dataclass(frozen=True)
class HMC(Hamiltonian):
    """Hamiltonian Monte Carlo with trajectories of fixed length, in unconstrained coordinates.

    The end of a trajectory of n leapfrog steps is accepted with probability min(1, exp(H(start) - H(end))), where
    H = U(u) + r' M^-1 r / 2. Otherwise the chain stays where it is.

    Parameters
    ----------
    draws, warmup, chains : int
        Transitions per chain that are kept and not kept, and the number of chains, as in `NUTS`.
    start, jitter, chain_method, temperature, checkpoint, until, budget : optional
        As in `NUTS`, with the same limits in Pyro.
    target_accept, mass_matrix, adapt_mass_matrix, step_size : optional
        Adaptation in the warm-up, as in `NUTS`.
    trajectory_length : float or None
        Length s n, the step size s times the number of steps n, in units of the posterior's standard deviations if the
        mass matrix is right. n follows from the step size. If neither this nor `num_steps` is given, it is pi/2.
    num_steps : int or None
        Number of steps n. The trajectory length then follows from the step size. Give this or `trajectory_length`, not
        both.
    max_steps : int
        Upper bound on n, which NumPyro's own HMC does not have. Where the step size is far too small, trajectories are
        shorter than requested. More than 5 % of such draws give a warning.
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
    On a normal posterior with the right mass matrix every coordinate oscillates with period 2 pi. A quarter of a period
    forgets the start; a whole period, the default of both systems, returns to it. Any fixed length is near a multiple
    of the period of some direction, so chains may mix in one function and not in another. Use HMC if a good length is
    known, or for vectorised chains, which wait for their longest trajectory; otherwise `NUTS`.

    In NumPyro n = ceil(length / s), and the steps are shortened to match the length. In Pyro n = floor(length / s).

    Statistics are those of `NUTS` without its trees: `lp`, `energy` (NumPyro only), `acceptance_rate`,
    `mean_accept_prob`, `step_size`, `n_steps` and `diverging` (the energy grew by more than 1000).

    References
    ----------
    - Duane, Kennedy, Pendleton and Roweth (1987), "Hybrid Monte Carlo".
    - Neal (2011), "MCMC using Hamiltonian dynamics".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.HMC(draws=20, warmup=20, chains=2, num_steps=8)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape  # chains, draws
    (2, 20)
    """

    trajectory_length: float | None = setting(None, optional(between()), advice="1.57")
    num_steps: int | None = setting(None, optional(whole()), advice="20")
    max_steps: int = setting(1023, whole())
    algorithm: ClassVar[str] = "HMC"
    limitations: ClassVar[str] = (
        "Nothing, as chains grow long; one length of trajectory suits some directions and hardly moves others, and "
        "chains may stay in modes of their own."
    )

    def check(self) -> None:
        super().check()
        one = self.trajectory_length is None or self.num_steps is None
        got = f"trajectory_length={self.trajectory_length!r} and num_steps={self.num_steps!r}"
        wanted = "a length or a number of steps, for the step size to adapt"
        InputError.check(one, self.name, wanted, got, "one of them")

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float]:
        usual, most = min(self.num_steps or 32, self.max_steps), max(self.num_steps or 1, self.max_steps)
        return 1.0, float(usual), float(most)

    @property
    def _length(self) -> float:
        return QUARTER if self.trajectory_length is None else float(self.trajectory_length)

    def trajectory(self) -> dict[str, Any]:
        if self.num_steps is not None and self.ppl == "numpyro":
            return {"trajectory_length": None, "num_steps": int(self.num_steps)}
        # Pyro's kernel knows a length only: see `next_length`.
        return {"trajectory_length": self._length}

    def next_length(self, length: Any, step_size: Any, least: Callable[..., Any], margin: float) -> Any:
        if self.num_steps is not None:
            # Pyro's kernel keeps its length while the step size changes.
            return (self.num_steps + margin) * step_size
        return least(length, (self.max_steps + margin) * step_size)

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        yield from super().noticed(statistics, figures)
        steps, sizes = statistics["n_steps"], statistics["step_size"]
        cut = float(((steps >= self.max_steps) & (steps * sizes < 0.99 * self._length)).mean())
        if self.num_steps is None and cut > 0.05:
            yield (
                f"{cut:.0%} of trajectories were cut short by max_steps={self.max_steps}, so draws are more correlated "
                f"than trajectory_length={self._length:.3g} promises: try a longer warm-up, or "
                f"max_steps={4 * self.max_steps}"
            )
