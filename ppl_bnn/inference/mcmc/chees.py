"""ChEES-HMC: Hamiltonian Monte Carlo with many chains that tune one trajectory length together.

One length serves all chains, so they advance in step and cost one vectorised call per leapfrog step. The trees of NUTS
differ in depth between chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.settings import OneOf, between, setting, whole
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.mcmc.superchains import ManyChains, finite, recorded, where
from ppl_bnn.inference.sampling.chains import Kernel, cast
from ppl_bnn.inference.sampling.sampler import Target

# Decay of moving averages: the average at transition t takes the newest value with weight t^-DECAY.
DECAY = 0.5
# Acceptance of a failed proposal in the harmonic mean. At 0 one chain would stop the adaptation of all. Without failed
# proposals, as in BlackJAX, divergences would never make steps smaller.
FAILED = 0.1
# Adam without momentum, because the gradient of the criterion is far noisier than it is large.
FIRST_MOMENT, SECOND_MOMENT = 0.0, 0.95
# Bits of the index of the quasi-random sequence: it repeats after 2^20 transitions.
HALTON_BITS = 20


@dataclass(frozen=True)
class ChEES(ManyChains):
    """Jittered Hamiltonian Monte Carlo with a trajectory length adapted across chains, in unconstrained coordinates.

    At transition t all chains take n_t = ceil(h_t T / epsilon) leapfrog steps of size epsilon from momenta r ~ N(0, M)
    and accept by Metropolis. h_t in (0, 1) runs through the Halton sequence of base 2, so that no period of the target
    resonates with T. The warm-up tunes, over all chains together,

        epsilon   by dual averaging, until the harmonic mean of the acceptance probabilities is `target_accept`;
        T         by Adam on log T, along the gradient of  E[ (|z' - E z'|^2 - |z - E z|^2)^2 ] / 4
                  (the change in the estimator of the expected square),

    with z = M^(1/2) u the positions at the two ends of a trajectory. M^-1 is the diagonal of the chains' variances, a
    moving average over transitions, or the identity. epsilon and T are averaged with weight t^-1/2 on the newest value.
    After the warm-up the averages stay fixed, and each chain has the target as its stationary distribution.

    Parameters
    ----------
    draws : int
        Draws kept per chain. A few are enough, since all chains contribute.
    warmup : int
        Transitions per chain for adaptation, which are not kept.
    chains : int
        As many as keep the machine busy. On a GPU hundreds cost little more than one.
    start, jitter, chain_method, temperature, checkpoint, until, budget : optional
        As in `NUTS`; `chain_method` is "auto" or "vectorised".
    superchains : int
        Number of groups, each of chains / superchains consecutive chains that begin at one point. Nested R-hat compares
        these groups, and can detect a problem only if the points are spread wider than the posterior.
    target_accept : float
        Target of the harmonic mean of the acceptance probabilities. A failed chain contributes 0.1, so a good value is
        lower than for NUTS.
    max_steps : int
        The most leapfrog steps of one transition.
    metric : {"diagonal", "identity"}
        The inverse mass matrix M^-1.
    learning_rate : float
        Learning rate of Adam, about the change of log T per transition. W transitions of warm-up reach lengths up to
        exp(W learning_rate) steps.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    InputError
        Impossible arguments.
    UnsupportedError
        Settings that are not supported.
    DivergenceError
        No chain can start.

    Notes
    -----
    Works well where one length fits all directions after scaling, and all chains reach one region in the warm-up. Works
    poorly where regions need different lengths (funnels: use `NUTS`, or `bnn.noncentred`), and with symmetric modes,
    whose distances enter T and M although chains do not cross. Chains that lag behind in the warm-up force their small
    steps on all others.

    Statistics have shape (chain, draw) and ArviZ's names where it has one: `lp`, `energy`, `acceptance_rate`,
    `step_size`, `n_steps` (gradients of the transition), `diverging`, `trajectory_length` (T) and `adaptation_refused`,
    the number of warm-up transitions without any finite proposal, the same in all draws. A proposal whose energy or
    gradient is not finite is rejected, counts as diverging and does not enter the adaptation of T.

    BlackJAX provides the transition (`mcmc.hmc`), the Halton sequence (`mcmc.dynamic_hmc`) and one step of the
    adaptation of epsilon and T (`adaptation.chees_adaptation.base`).

    References
    ----------
    Hoffman, Radul and Sountsov (2021), "An adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian Monte
    Carlo", AISTATS.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.ChEES(draws=10, warmup=20, chains=8, superchains=2)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape  # chains, draws
    (8, 10)
    """

    target_accept: float = setting(0.651, between(0, 1))
    max_steps: int = setting(1000, whole())
    metric: str = setting("diagonal", OneOf(("diagonal", "identity")))
    learning_rate: float = setting(0.05, between(0, 1))
    averaged: ClassVar[tuple[str, ...]] = (*ManyChains.averaged, "trajectory_length")

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float]:
        return 1.0, min(30.0, self.max_steps), float(self.max_steps)

    def kernel(self, target: Target) -> Kernel:
        import jax
        import jax.numpy as jnp
        import optax
        from blackjax.adaptation import chees_adaptation
        from blackjax.mcmc import dynamic_hmc, hmc

        move: Any = hmc.build_kernel()
        jitter = partial(dynamic_hmc.halton_sequence, max_bits=HALTON_BITS)
        adam = optax.adam(self.learning_rate, b1=FIRST_MOMENT, b2=SECOND_MOMENT)
        # No averaging in BlackJAX (0.0): it would continue from its averaged length, by ever smaller steps.
        start_adapting, adapt = chees_adaptation.base(
            jitter, lambda index: index + 1, adam, self.target_accept, 0.0, self.max_steps
        )

        def inverse_mass_of(variance: Any) -> Any:
            """The variances, or 1 where the chains do not differ (yet) or the metric is the identity."""
            known = jnp.isfinite(variance) & (variance > 0) & (self.metric == "diagonal")
            return jnp.where(known, variance, 1.0)

        def begin(flat: Any, key: Any, data: Any) -> dict[str, Any]:
            chains: Any = jax.vmap(lambda one: hmc.init(one, lambda u: target.log_density(u, data)))(flat)
            variance = flat.var(axis=0, ddof=1)
            inverse_mass = inverse_mass_of(variance)
            squared = jnp.sum(chains.logdensity_grad**2 * inverse_mass, axis=-1)
            usable = jnp.isfinite(squared)
            # No larger than 1 / sqrt of the curvature's trace, which is at most what the steepest direction allows.
            steepness = jnp.sum(jnp.where(usable, squared, 0.0)) / jnp.maximum(usable.sum(), 1)
            step_size = 1.0 / jnp.sqrt(jnp.maximum(steepness, 1.0))
            step_size, none = step_size.astype(flat.dtype), jnp.int32(0)
            nothing = jnp.zeros(flat.shape[0], flat.dtype)

            def typed(leaf: Any) -> Any:
                is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
                return jnp.asarray(leaf, flat.dtype if is_float else jnp.int32)

            return {
                "count": none,
                "key": key,
                "chains": chains,
                # What the warm-up learns.
                "adaptation": jax.tree.map(typed, start_adapting(none, step_size)),
                "average": jnp.log(jnp.stack([step_size, step_size])),
                "mean": flat.mean(axis=0),
                "variance": variance,
                "refused": none,
                # The record is that of the last transition.
                "energy": nothing,
                "acceptance": nothing,
                "diverging": nothing.astype(bool),
                "steps": none,
                "step_size": step_size,
                "length": step_size,
            }

        def step(state: dict[str, Any], data: Any) -> dict[str, Any]:
            before, adaptation = state["chains"], state["adaptation"]
            warming = state["count"] < self.warmup
            inverse_mass = inverse_mass_of(state["variance"])
            step_size = jnp.where(warming, adaptation.step_size, jnp.exp(state["average"][0]))
            length = jnp.where(warming, adaptation.trajectory_length, jnp.exp(state["average"][1]))
            # A step size that has fallen to zero accepts everything, and so grows again.
            ratio = jnp.where(step_size > 0, length / step_size, 1.0)
            steps = jnp.clip(jnp.ceil(jitter(state["count"]) * ratio), 1, self.max_steps).astype(jnp.int32)
            key, ours = jax.random.split(state["key"])
            keys = jax.random.split(ours, before.position.shape[0])
            density = partial(target.log_density, data=data)
            after, info = jax.vmap(
                lambda key, chain: move(key, chain, density, step_size, inverse_mass, steps)
            )(keys, before)
            sound = finite(after)
            accepted = info.is_accepted & sound
            after = where(sound, after, before)
            diverging = info.is_divergent | ~sound
            acceptance = jnp.where(diverging, 0.0, info.acceptance_rate)
            kinetic = 0.5 * jnp.sum(info.momentum**2 * inverse_mass, axis=-1)

            def learn(state: dict[str, Any]) -> dict[str, Any]:
                # For the adaptation of the length, a failed proposal has not moved.
                failed = acceptance < FAILED
                position = jnp.where(failed[:, None], before.position, info.proposal.position)
                momentum = jnp.where(failed[:, None], 0.0, info.proposal.momentum)
                rate, none = jnp.maximum(acceptance, FAILED), jnp.zeros_like(failed)
                learned = adapt(adaptation, position, momentum, before.position, rate, none, inverse_mass)
                weight = (state["count"] + 1.0) ** -DECAY
                newest = jnp.log(jnp.stack([learned.step_size, learned.trajectory_length]))
                # Moments of the mixture of the previous average and the current chains.
                shift = after.position.mean(axis=0) - state["mean"]
                spread = after.position.var(axis=0, ddof=1)
                changed = {
                    "adaptation": learned,
                    "average": state["average"] + weight * (newest - state["average"]),
                    "mean": state["mean"] + weight * shift,
                    "variance": (1.0 - weight) * (state["variance"] + weight * shift**2) + weight * spread,
                    "refused": state["refused"] + jnp.all(diverging),
                }
                return cast(state | changed, state)

            changed = {
                "count": state["count"] + 1,
                "key": key,
                "chains": after,
                "energy": jnp.where(accepted, info.energy, kinetic - before.logdensity),
                "acceptance": acceptance,
                "diverging": diverging,
                "steps": steps,
                "step_size": step_size,
                "length": length,
            }
            return cast(jax.lax.cond(warming, learn, lambda same: same, state) | changed, state)

        def record(state: dict[str, Any]) -> dict[str, Any]:
            more = {"energy": state["energy"], "trajectory_length": state["length"]}
            return recorded(state, n_steps=state["steps"], **more)

        return Kernel(begin, step, record, lambda state: finite(state["chains"]), pooled=True)

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        yield from super().noticed(statistics, figures)
        capped = float(np.mean(np.asarray(statistics["n_steps"]) >= self.max_steps))
        if capped > 0.05:
            yield (
                f"{capped:.0%} of transitions took max_steps={self.max_steps} leapfrog steps, so trajectories are "
                f"shorter than they should be: try a longer warm-up, start=MAP(), or max_steps={2 * self.max_steps}"
            )

    def _smaller_steps(self) -> str:
        return f"target_accept={1 - (1 - self.target_accept) / 2:.3g}"
