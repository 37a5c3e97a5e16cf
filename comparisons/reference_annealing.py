"""Bidirectional annealed importance sampling: bounds of a log evidence on both sides, from data with a known truth.

Weights w* are drawn from the prior and targets from p(y | x, w*), so w* is one exact draw from p(w | y). Particles go
forwards from prior draws through p_t(w) proportional to p(w) p(D | w)^t, with Hamiltonian moves at each t, and
backwards from w* through the same moves in reverse order. With log weights

    W = sum_k (t_k - t_(k-1)) log p(D | w_k),

E[exp(W)] = p(D) forwards, and E[exp(-W)] = 1 / p(D) backwards over the draw of w* and D. By Jensen's inequality the
logarithms of the two averages bound log p(D) from below and from above in expectation, and by Markov's inequality each
bound is wrong by more than b nats with probability at most exp(-b). This needs no chain that converges. Both averages
have heavy tails with few temperatures, which moves the bounds apart; with more of them they meet.

References
----------
Grosse, Ghahramani and Adams (2015), Sandwiching the marginal likelihood using bidirectional Monte Carlo.
Grosse, Ancha and Roy (2016), Measuring the reliability of MCMC inference with bidirectional Monte Carlo, NeurIPS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.inference.mcmc.smc import systematic
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.posterior.approximation import Chains

# The acceptance rate that step sizes are tuned to, the rate of this tuning, and the jitter of a step.
ACCEPTANCE, GAIN, JITTER = 0.8, 0.1, 0.2
# The pilot run: its temperatures t = s^POWER, and its particles.
PILOT, POWER, SWARM = 300, 5.0, 256
LEAPFROG = 5
THREADS = 2


@dataclass(frozen=True)
class Annealing(Method):
    """Particles that went forwards, resampled to `chains` chains of `draws` draws; their log weights are in `history`.

    Parameters
    ----------
    truth : mapping of str to ndarray
        The exact draw from the posterior: site -> value.
    temperatures, particles, backwards : int
        Number of temperatures, and of particles in each direction.
    chains, draws : int
        Shape of the draws, no more than there are particles.
    """

    truth: Mapping[str, np.ndarray] = field(default_factory=dict)
    temperatures: int = 1000
    particles: int = 1000
    backwards: int = 512
    chains: int = 8
    draws: int = 250

    def check(self) -> None:
        needed = self.chains * self.draws
        got, advice = f"particles={self.particles}", f"particles={needed}"
        InputError.check(self.particles >= needed, "Annealing", f"at least {needed} particles", got, advice)
        expected, advice = "values of all sites from which the targets were drawn", "data from the prior"
        InputError.check(self.truth, "Annealing", expected, "none", advice)

    def run(self, problem: Any, progress: Any) -> Outcome:
        import jax
        import jax.numpy as jnp
        from jax.flatten_util import ravel_pytree

        watch, program = Stopwatch(), problem.program
        drawn = program.prior_draws(problem.x, problem.y, problem.seed, self.particles + SWARM)
        exact = program.unconstrain(self.truth, problem.x, problem.y)
        asarray = program.system.asarray
        first, unravel = ravel_pytree({name: asarray(value) for name, value in exact.items()})
        starts = jax.vmap(lambda u: ravel_pytree(u)[0])({n: asarray(drawn[n]) for n in exact})

        def densities(v: Any) -> tuple[Any, Any]:
            u = unravel(v)
            likelihood = program.log_likelihood(u, problem.x, problem.y).sum()
            return program.log_prior(u, problem.x, problem.y), likelihood

        path = _Path(densities)
        keys = iter(jax.random.split(jax.random.PRNGKey(problem.seed), 4))
        rough = np.linspace(0.0, 1.0, PILOT + 1) ** POWER
        # The swarm has starts of its own: weights of particles that had tuned their moves would be biased.
        swarm, starts = starts[:SWARM], starts[SWARM:]
        found = path.tuned(rough, swarm, next(keys))
        t = equally_hard(rough, np.asarray(found["spread"]), self.temperatures)
        tuned = path.tuned(t, swarm, next(keys))

        def swept(start: Any, key: Any, forwards: bool) -> tuple[Any, Any]:
            """End points and log weights; each thread sweeps its share of the particles."""
            work = jax.jit(jax.vmap(partial(path.sweep, t, tuned, forwards=forwards)))
            shares = zip(
                np.array_split(start, THREADS),
                np.array_split(jax.random.split(key, len(start)), THREADS),
                strict=True,
            )

            def share(each: tuple[Any, Any]) -> Any:
                with program.system.session(problem.dtype, problem.device):
                    return jax.block_until_ready(work(*map(jnp.asarray, each)))

            with ThreadPoolExecutor(THREADS) as pool:
                ends, weights = zip(*pool.map(share, shares), strict=True)
            return np.concatenate(ends), np.concatenate(weights)

        ends, forwards = swept(np.asarray(starts), next(keys), True)
        _, backwards = swept(np.repeat(np.asarray(first)[None], self.backwards, axis=0), next(keys), False)
        rng = np.random.default_rng(problem.seed)
        weights = np.exp(forwards - forwards.max())
        at = rng.permutation(systematic(weights / weights.sum(), rng.uniform()))
        chosen = jnp.asarray(ends[at[: self.chains * self.draws]])
        u = {
            name: np.asarray(value).reshape(self.chains, self.draws, *value.shape[1:])
            for name, value in jax.vmap(unravel)(chosen).items()
        }
        moves = self.temperatures * (self.particles + self.backwards + SWARM) + PILOT * SWARM
        return Outcome(
            Chains(u),
            history={"temperature": t, "forwards": forwards, "backwards": backwards},
            run_seconds=watch(),
            gradient_evaluations=float(moves * (LEAPFROG + 1)),
        )


class _Path:
    """Moves between the prior and the posterior, in flat coordinates v."""

    def __init__(self, densities: Callable[[Any], tuple[Any, Any]]):
        self.densities = densities

    def energy(self, v: Any, t: Any) -> tuple[Any, Any]:
        """The value and the gradient of -log p_t(v), and log p(D | w(v)) beside the value."""
        import jax

        def both(v: Any) -> tuple[Any, Any]:
            prior, likelihood = self.densities(v)
            return -(prior + t * likelihood), likelihood

        return jax.value_and_grad(both, has_aux=True)(v)

    def move(self, v: Any, t: Any, step: Any, scale: Any, key: Any) -> tuple[Any, Any, Any]:
        """One Hamiltonian trajectory that leaves p_t as it is: (v, log p(D | w(v)), acceptance probability)."""
        import jax
        import jax.numpy as jnp

        momentum_key, step_key, choice_key = jax.random.split(key, 3)
        step = step * jax.random.uniform(step_key, minval=1.0 - JITTER, maxval=1.0 + JITTER)
        p = jax.random.normal(momentum_key, v.shape, v.dtype)
        (before, likelihood), slope = self.energy(v, t)

        def leap(_: Any, carry: Any) -> Any:
            q, p, slope, *_ = carry
            p = p - 0.5 * step * scale * slope
            q = q + step * scale * p
            (value, likelihood), slope = self.energy(q, t)
            return q, p - 0.5 * step * scale * slope, slope, value, likelihood

        end, p_end, _, after, there = jax.lax.fori_loop(0, LEAPFROG, leap, (v, p, slope, before, likelihood))
        rise = before + 0.5 * p @ p - after - 0.5 * p_end @ p_end
        rate = jnp.where(jnp.isfinite(rise), jnp.exp(jnp.minimum(rise, 0.0)), 0.0)
        taken = jax.random.uniform(choice_key) < rate
        return jnp.where(taken, end, v), jnp.where(taken, there, likelihood), rate

    def tuned(self, t: np.ndarray, starts: Any, key: Any) -> dict[str, Any]:
        """Step sizes and scales for each temperature, from a swarm that passes through all of them.

        Also "spread", the standard deviation of log p(D | w) in the swarm. What follows is fixed before the particles
        that count begin, so that their weights are unbiased.
        """
        import jax
        import jax.numpy as jnp

        def at(carry: Any, given: Any) -> Any:
            v, log_step = carry
            t, key = given
            scale = jnp.maximum(v.std(axis=0), 1e-6)
            move = partial(self.move, t=t, step=jnp.exp(log_step), scale=scale)
            v, likelihood, rates = jax.vmap(lambda v, key: move(v, key=key))(v, jax.random.split(key, len(v)))
            log_step = log_step + GAIN * (rates.mean() - ACCEPTANCE)
            usable = jnp.where(jnp.isfinite(likelihood), likelihood, jnp.nan)
            return (v, log_step), {"step": jnp.exp(log_step), "scale": scale, "spread": jnp.nanstd(usable)}

        log_step = jnp.log(jnp.asarray(0.5, starts.dtype))
        sequence = jnp.asarray(t[1:], starts.dtype), jax.random.split(key, len(t) - 1)
        return jax.jit(lambda begin: jax.lax.scan(at, begin, sequence)[1])((starts, log_step))

    def sweep(
        self, t: np.ndarray, tuned: Mapping[str, Any], v: Any, key: Any, forwards: bool
    ) -> tuple[Any, Any]:
        """The end point and the log weight of one particle."""
        import jax
        import jax.numpy as jnp

        rises = jnp.asarray(np.diff(t), v.dtype)
        each = (
            jnp.asarray(t[1:], v.dtype),
            rises,
            tuned["step"],
            tuned["scale"],
            jax.random.split(key, len(t) - 1),
        )

        def at(carry: Any, given: Any) -> Any:
            v, weight = carry
            t, rise, step, scale, key = given
            if forwards:
                weight = weight + rise * self.densities(v)[1]
            v, likelihood, _ = self.move(v, t, step, scale, key)
            return (v, weight if forwards else weight + rise * likelihood), None

        (v, weight), _ = jax.lax.scan(at, (v, jnp.zeros((), v.dtype)), each, reverse=not forwards)
        return v, weight


def equally_hard(t: np.ndarray, spread: np.ndarray, count: int) -> np.ndarray:
    """`count` + 1 inverse temperatures from 0 to 1 between which log weights have about equal standard deviations.

    `spread` is the standard deviation of log p(D | w) at t[1:]. A tenth of the temperatures is equally spaced in the
    given ones, so that none is far from the next.
    """
    length = np.concatenate([[0.0], np.cumsum(np.diff(t) * np.maximum(spread, 1e-12))])
    share = 0.9 * length / length[-1] + 0.1 * np.linspace(0.0, 1.0, len(t))
    found = np.interp(np.linspace(0.0, 1.0, count + 1), share, t)
    found[0], found[-1] = 0.0, 1.0
    return found
