"""Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum and friction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ppl_bnn.core.settings import between, setting
from ppl_bnn.inference.mcmc.stochastic_gradient import Density, Pace, StepRule, StochasticGradient, Walker


@dataclass(frozen=True)
class SGHMC(StochasticGradient):
    """Stochastic gradient Hamiltonian Monte Carlo: gradient descent with momentum 1 - a and matching noise.

    With g an estimate of the gradient of the log density at u from a batch (or the gradient itself), xi ~ N(0, I),
    h = step_size / N and a = friction (Chen, Fox and Guestrin 2014, equation 15 and algorithm 2),

        u <- u + v,        v <- (1 - a) v + h g(u) + (2 a h)^(1/2) xi,

    with g at the new u. The estimate of the noise of g, which the paper subtracts from 2 a h, is zero here. The state
    holds the momentum h^(-1/2) v, whose scale does not depend on the schedule.

    Steps are not accepted or rejected, so the draws have a bias. On a Gaussian with precision A, and gradient noise of
    covariance V that commutes with it, their covariance is A^-1 (1 + h V / (2 a)) (1 - h A / (4 - 2 a))^-1. Variances
    are too large by shares of about h A / (4 - 2 a) for the step and h V / (2 a) for the batches. The chain moves as
    far in a step as that of SGLD with h / a, with the same bias from batches and a much smaller one from the step. On
    any target, at stationarity,

        E[-(u - m)' grad log p] / P = 1 + variance_excess,        variance_excess = (2 - a) E[v' v] / (2 h P) - 1,

    for any m; under the target it is 1. So `variance_excess`, averaged over many draws, is the mean over directions
    of the share by which variances are too large. The default finds the step size at which it equals `allowance`, from
    the mean square of g and, with batches, half of that of its change from step to step, for V.

    Parameters
    ----------
    draws, warmup, chains : int
        Draws per chain that are kept and not kept, and the number of chains.
    start, jitter, chain_method, temperature, checkpoint, until, budget : optional
        As in `NUTS`.
    batch_size : int or None
        Rows per step, B. None takes all rows.
    step_size : float or None
        The learning rate s of gradient descent on -log p(u | D) / N. None finds it in the warm-up.
    allowance : float
        The share by which variances may be too large on average, when `step_size` is None.
    thinning : int or None
        Steps per draw. None: 20, and with batches up to 400.
    schedule : {"constant", "decaying", "cyclical"}
        Schedule of the step size, with `decay`, `cycle_length` and `exploration`, as in `SGLD`.
    decay : float
        Exponent of the decaying schedule.
    cycle_length : int
        Length of a cycle of the cyclical schedule, in units of `thinning` steps.
    exploration : float
        Share of a cycle without noise and without draws.
    control_variates : bool
        Whether to reduce the variance of the gradient estimates, as in `SGLD`.
    preconditioner : {"auto", "curvature", None}
        Whether the chain moves in coordinates of equal curvature, as in `SGLD`.
    friction : float
        The friction a, 1 minus the momentum. A smaller value lets the chain move further at the same step size, until
        it oscillates.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    InputError
        Impossible arguments.
    UnsupportedError
        Settings that are not supported; mini-batches of a model whose rows cannot be separated.
    DivergenceError
        Parameters that are not finite, usually because the step size is too large.

    Notes
    -----
    There is no Metropolis correction. With one, use `HMC`.

    Statistics have shape (chain, draw): `lp`, `n_steps` (gradients of batches), `step_size` (at the last step before
    the draw), `variance_excess` (the mean over the steps of the draw), `cycle` (cyclical), and `failed_step` (the first
    step after which parameters were not finite; -1 in all results, since chains that fail raise an error).
    `info.figures` has the means "variance_excess" and "step_size".

    References
    ----------
    Chen, Fox and Guestrin (2014), "Stochastic gradient Hamiltonian Monte Carlo".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.SGHMC(draws=20, warmup=20, chains=2, batch_size=50, step_size=0.01, start=bnn.MAP())
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape  # chains, draws
    (2, 20)
    """

    friction: float = setting(0.1, between(0, 1))

    def rule(self, rows: int, batches: bool) -> StepRule:
        import jax
        import jax.numpy as jnp

        friction = self.friction

        def begin(flat: Any, lp: Any, gradient: Any, typical: Any) -> Walker:
            steepness = jnp.mean(typical) / (4.0 - 2.0 * friction)
            still, size = jnp.zeros_like(flat), jnp.zeros_like(lp)
            walker = {"flat": flat, "momentum": still, "size": size, "steepness": steepness}
            return walker | ({"gradient": gradient} if batches else {})

        def move(walker: Walker, density: Density, pace: Pace, key: Any) -> tuple[Walker, Any, Any]:
            momentum = walker["momentum"]
            flat = walker["flat"] + jnp.sqrt(walker["size"]) * momentum
            _, gradient = density(flat)
            now = jnp.mean(gradient**2) / (4.0 - 2.0 * friction)
            if batches:
                now = now + jnp.mean((gradient - walker["gradient"]) ** 2) / (4.0 * friction)
            steepness, size = self.step_of(walker, pace, now)
            noise = pace.noise * jax.random.normal(key, flat.shape, flat.dtype)
            pulled = (1.0 - friction) * momentum + jnp.sqrt(size) * gradient
            momentum = pulled + math.sqrt(2.0 * friction) * noise
            excess = (1.0 - 0.5 * friction) * jnp.mean(momentum**2) - 1.0
            walker = {"flat": flat, "momentum": momentum, "size": size, "steepness": steepness}
            return walker | ({"gradient": gradient} if batches else {}), size, excess

        return StepRule(begin, move, lambda walker: self.allowance / walker["steepness"])
