"""Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum and friction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ppl_bnn.inference.mcmc.stochastic_gradient import Density, Pace, Rule, StochasticGradient, Walker
from ppl_bnn.inference.optimisation.loops import check_within


@dataclass(frozen=True)
class SGHMC(StochasticGradient):
    """Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014, equation 15 and algorithm 2), gradient
    descent with momentum 1 - a and noise to match: with g an estimate of the gradient of the log density at u from a
    batch (or the gradient itself), xi ~ N(0, I), h = step_size / N and a = friction,

        u <- u + v,        v <- (1 - a) v + h g(u) + (2 a h)^(1/2) xi,

    g being taken at the new u. The estimate of the noise of g, which the source subtracts from 2 a h, is zero here.
    What is kept from step to step is the momentum h^(-1/2) v, whose scale no schedule changes.

    Nothing is rejected, so the draws are not of the target: on a Gaussian with precision A, and gradient noise of
    covariance V that commutes with it, their covariance is A^-1 (1 + h V / (2 a)) (1 - h A / (4 - 2 a))^-1. Variances
    are too large by shares of about h A / (4 - 2 a) for the step and h V / (2 a) for the batches. The chain moves as
    far in a step as that of SGLD with h / a: batches cost the same there, the step much less. On any target, at rest,

        E[-(u - m)' grad log p] / P = 1 + variance_excess,        variance_excess = (2 - a) E[v' v] / (2 h P) - 1,

    whatever m is, where 1 is the value under the target itself; so `variance_excess` is a mean over directions of the
    share of variance that is too much, exact in these terms. That of a single draw is mostly chance, and only the mean
    over many means something. The default finds the step size at which it is the allowance, from the mean square of g
    and, with batches, that of its change from step to step, half of which is taken for V.

    friction: a, 1 minus the momentum; smaller lets the chain go further at the same step, until it oscillates.

    Fields in common: see `StochasticGradient` on batch_size, step_size, allowance, thinning, schedule (decay,
    cycle_length, exploration), control_variates and preconditioner, and `Sampler` on the rest. There is no Metropolis
    correction: that is what `HMC` is.

    Statistics, (chain, draw): `lp`, `n_steps` (gradients of batches), `step_size` (at the last step before the draw),
    `variance_excess` (the mean over the steps of the draw), `cycle` (cyclical), `failed_step` (the first step after
    which parameters were not finite; -1, for such chains end in an error). figures: the means "variance_excess" and
    "step_size".

    Raises
    ------
    InputError, UnsupportedError: impossible arguments; mini-batches of a model whose rows cannot be taken apart.
    DivergenceError: parameters that are not finite, as come of too large a step.
    """

    friction: float = 0.1

    def check(self) -> None:
        check_within(self.name, "friction", self.friction, 0, 1, "0.1")
        super().check()

    def rule(self, rows: int, batches: bool) -> Rule:
        import jax
        import jax.numpy as jnp

        friction = self.friction

        def begin(flat: Any, lp: Any, gradient: Any, typical: Any) -> Walker:
            walker = {
                "flat": flat,
                "momentum": jnp.zeros_like(flat),
                "size": jnp.zeros_like(lp),
                "steepness": jnp.mean(typical) / (4.0 - 2.0 * friction),
            }
            return {**walker, "gradient": gradient} if batches else walker

        def move(walker: Walker, density: Density, pace: Pace, key: Any) -> tuple[Walker, Any, Any]:
            momentum = walker["momentum"]
            flat = walker["flat"] + jnp.sqrt(walker["size"]) * momentum
            _, gradient = density(flat)
            now = jnp.mean(gradient**2) / (4.0 - 2.0 * friction)
            if batches:
                now = now + jnp.mean((gradient - walker["gradient"]) ** 2) / (4.0 * friction)
            steepness = walker["steepness"] + pace.weight * (now - walker["steepness"])
            # Where the gradient has just become steeper than its mean, the mean comes too late.
            size = jnp.where(pace.tuned, self.allowance / jnp.maximum(steepness, now), pace.size)
            noise = pace.noise * jax.random.normal(key, flat.shape, flat.dtype)
            momentum = (
                (1.0 - friction) * momentum + jnp.sqrt(size) * gradient + math.sqrt(2.0 * friction) * noise
            )
            excess = (1.0 - 0.5 * friction) * jnp.mean(momentum**2) - 1.0
            walker = {"flat": flat, "momentum": momentum, "size": size, "steepness": steepness}
            return {**walker, "gradient": gradient} if batches else walker, size, excess

        return Rule(begin, move, lambda walker: self.allowance / walker["steepness"])
