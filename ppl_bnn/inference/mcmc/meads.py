"""MEADS: generalised Hamiltonian Monte Carlo with many chains, tuned by eigenvalues of their cross-chain moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.core.settings import between, flag, setting, whole
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.mcmc.superchains import ManyChains, finite, recorded, where
from ppl_bnn.inference.sampling.chains import Kernel, cast
from ppl_bnn.inference.sampling.sampler import Target
from ppl_bnn.inference.sampling.whitening import whitened

# Decay of moving averages: the average at step t takes the newest value with weight t^-DECAY.
DECAY = 0.5
# Below this the adapted step size is too large for the target, see `summarise`.
FEW_ACCEPTED = 0.5
# In the warm-up, a step with a lower mean acceptance shrinks the next steps by this factor. Other steps restore them,
# by a tenth of it on the log scale, up to the size that the gradients allow.
BRAKE, RELEASE = 0.5, 0.1


@dataclass(frozen=True)
class MEADS(ManyChains):
    """Generalised Hamiltonian Monte Carlo with maximum-eigenvalue adaptation, in unconstrained coordinates.

    Each step partly refreshes the momentum, r <- sqrt(1 - alpha) r + sqrt(alpha) xi with xi ~ N(0, M), takes one
    leapfrog step of size epsilon, and accepts by a slice variable that also persists and drifts by alpha / 2 (Neal
    2020), so that rejections, which reverse the momentum, come in clusters. The warm-up repeatedly divides the chains
    into folds. A fold takes its parameters from the fold before it:

        M^-1    = diag of sigma^2, the variances between the fold's chains
        epsilon = min(1, step_size_multiplier / sqrt(lambda(sigma g)))            g: gradients of the log density
        gamma   = max(1 / sqrt(lambda((u - mean) / sigma)), damping_slowdown / (t epsilon))
        alpha   = 1 - exp(-2 epsilon gamma)                                       t: steps so far

    where lambda estimates the largest eigenvalue of the second moment of its rows by the ratio of the sum of squared
    eigenvalues to their sum. log epsilon, log sigma and log alpha are averaged over folds and steps, with weight t^-1/2
    on the newest value. After the warm-up they stay fixed, and each chain has the target as its stationary
    distribution.

    Parameters
    ----------
    draws, warmup, chains : int
        As in `ChEES`.
    start, jitter, chain_method, temperature, checkpoint, until, budget : optional
        As in `ChEES`.
    superchains : int
        As in `ChEES`.
    thinning : int
        Leapfrog steps, and so gradients, per draw and per transition of the warm-up.
    folds : int
        Number of folds, at least 2, with at least 4 chains each.
    step_size_multiplier : float
        Smaller values give more acceptance. The paper's 0.5 is twice as good on Gaussians, but networks need less.
    damping_slowdown : float
        The constant in gamma, see above.
    preconditioning : bool
        Whether chains move in coordinates of equal curvature, see Notes.
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
    Two things are not in the paper.

    - Step size. Gradients at modes are 0, so epsilon would be 1 for chains that start there, every step would be
      rejected, and the adaptation would never recover. So epsilon is halved after each step of the warm-up in which
      less than half of the proposals are accepted, and restored where more are.
    - Preconditioning. The step size is far too small where chains start far out, and where a combination of coordinates
      is stiff (collinear inputs), for which scaling by sigma does not help. With `preconditioning` chains move in
      coordinates of equal curvature, z = S^-1 u with S S' the inverse of their mean curvature at the start, up to 1000
      coordinates. A start more than two standard deviations out along a direction, by the local curvature, is moved to
      two. The chains of one superchain keep their common start. `comparisons/performance/badly_scaled.py` measures it.

    Works well where the chains' covariance describes the target everywhere, with hundreds of chains on a GPU. Works
    poorly where the curvature differs between regions, since there is one epsilon: check `acceptance_rate`.

    Statistics have shape (chain, draw) and ArviZ's names where it has one: `lp`, `acceptance_rate` (mean over the steps
    of a draw), `step_size`, `n_steps` (gradients of the transition), `diverging` (any of its steps), `damping` (alpha)
    and `adaptation_refused`, the number of warm-up transitions in which no fold had finite parameters, the same in all
    draws. There is no `energy`: momenta persist, so E-BFMI would be small whatever the target. A proposal whose energy
    or gradient is not finite is rejected. Parameters that are not finite leave the previous ones in place.

    BlackJAX provides the step (`mcmc.ghmc`) and the parameters of one fold (`adaptation.meads_adaptation.base`).

    References
    ----------
    - Hoffman and Sountsov (2022), "Tuning-free generalized Hamiltonian Monte Carlo", AISTATS.
    - Neal (2020), "Non-reversibly updating a uniform [0,1] value for Metropolis accept/reject decisions".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.MEADS(draws=10, warmup=20, chains=16, superchains=2, thinning=1)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape  # chains, draws
    (16, 10)
    """

    thinning: int = setting(10, whole())
    folds: int = setting(4, whole(2))
    step_size_multiplier: float = setting(0.25, between())
    damping_slowdown: float = setting(1.0, between())
    preconditioning: bool = setting(True, flag)
    averaged: ClassVar[tuple[str, ...]] = (*ManyChains.averaged, "damping")

    def check(self) -> None:
        super().check()
        each, rest = divmod(self.chains, self.folds)
        wanted = "a divisor of chains, with at least 4 chains in each fold"
        got = f"folds={self.folds} of chains={self.chains}"
        InputError.check(rest == 0 and each >= 4, f"{self.name} folds", wanted, got, "chains=64, folds=4")

    @property
    def whitens(self) -> bool:
        return self.preconditioning

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float]:
        return float(self.thinning), float(self.thinning), float(self.thinning)

    def kernel(self, target: Target) -> Kernel:
        return whitened(target, self._kernel, self.whitens)

    def _kernel(self, log_density: Callable[..., Any]) -> Kernel:
        import jax
        import jax.numpy as jnp
        from blackjax.adaptation import meads_adaptation
        from blackjax.mcmc import ghmc

        move: Any = ghmc.build_kernel()
        _, parameters_of = meads_adaptation.base(1, self.step_size_multiplier, self.damping_slowdown)
        folds, thinning = self.folds, self.thinning

        def of_fold(position: Any, gradient: Any, steps: Any) -> dict[str, Any]:
            """The parameters from the chains (chains, P) of one fold."""
            former = meads_adaptation.MEADSAdaptationState(
                steps, jnp.zeros(1), jnp.zeros((1, position.shape[1])), jnp.zeros(1), jnp.zeros(1)
            )
            new: Any = parameters_of(former, position, gradient, 0)
            return {"step_size": new.step_size[0], "scale": new.position_sigma[0], "damping": new.alpha[0]}

        def begin(flat: Any, key: Any, data: Any) -> dict[str, Any]:
            chains, size = flat.shape
            key, momentum_key, order_key = jax.random.split(key, 3)
            moving: Any = jax.vmap(
                lambda position, key: ghmc.init(position, lambda u: log_density(u, data), key)
            )(flat, jax.random.split(momentum_key, chains))
            order = jax.random.permutation(order_key, chains)
            # For folds without usable parameters. If all chains start at one point, they are learned once chains have
            # moved apart.
            gradient = jnp.where(jnp.isfinite(moving.logdensity_grad), moving.logdensity_grad, 0.0)
            steepness = jnp.maximum(jnp.mean(jnp.sum(gradient**2, axis=-1)), 1.0)
            former = {
                "step_size": jnp.full((folds,), self.step_size_multiplier) / jnp.sqrt(steepness),
                "scale": jnp.ones((folds, size)),
                "damping": jnp.full((folds,), 0.5),
            }
            former = jax.tree.map(lambda value: value.astype(flat.dtype), former)
            nothing = jnp.zeros(chains, flat.dtype)
            return {
                "count": jnp.int32(0),
                "key": key,
                "chains": moving._replace(slice=moving.slice.astype(flat.dtype)),
                # What the warm-up learns.
                "folds": former,
                "average": jax.tree.map(lambda value: jnp.log(value).mean(axis=0), former),
                "order": order.astype(jnp.int32),
                "brake": jnp.ones((), flat.dtype),
                "refused": jnp.int32(0),
                # The record is that of the last transition.
                "acceptance": nothing,
                "diverging": nothing.astype(bool),
                "step_size": nothing,
                "damping": nothing,
            }

        def learn(carry: dict[str, Any], steps: Any, key: Any) -> dict[str, Any]:
            moving, order = carry["chains"], carry["order"]

            def dealt(values: Any) -> Any:
                """Reshape (chains, ...) to (folds, chains of a fold, ...)."""
                return values[order].reshape(folds, -1, *values.shape[1:])

            new = jax.vmap(of_fold, (0, 0, None))(
                dealt(moving.position), dealt(moving.logdensity_grad), steps
            )
            good = {name: jnp.isfinite(value) & (value > 0) for name, value in new.items()}
            fine = good["step_size"] & good["damping"] & jnp.all(good["scale"], axis=-1)
            now = where(fine, new, carry["folds"])
            weight = (steps + 1.0) ** -DECAY
            seen = now | {"step_size": now["step_size"] * carry["brake"]}
            average = jax.tree.map(
                lambda old, new: old + weight * (jnp.log(new).mean(axis=0) - old), carry["average"], seen
            )
            # Shuffle after as many steps as there are folds, so that no fold drifts away by itself.
            order = jnp.where((steps + 1) % folds == 0, jax.random.permutation(key, order), order)
            learned = carry["learned"] | jnp.any(fine)
            return carry | {"folds": now, "average": average, "order": order, "learned": learned}

        def step(state: dict[str, Any], data: Any) -> dict[str, Any]:
            chains = state["chains"].logdensity.shape[0]
            warming = state["count"] < self.warmup
            density = partial(log_density, data=data)

            def once(inner: Any, carry: dict[str, Any]) -> dict[str, Any]:
                key, ours, dealing = jax.random.split(carry["key"], 3)
                before, brake = carry["chains"], carry["brake"]
                numbers = jnp.arange(chains, dtype=jnp.int32) // (chains // folds)
                fold = jnp.zeros(chains, jnp.int32).at[carry["order"]].set(numbers)
                steps = state["count"] * thinning + inner
                carry = jax.lax.cond(warming, learn, lambda same, *_: same, carry, steps, dealing)
                # The parameters of each chain: those of the fold before its own, or the averages after the warm-up.
                used = {
                    name: jnp.where(warming, value[(fold - 1) % folds], jnp.exp(carry["average"][name]))
                    for name, value in carry["folds"].items()
                }
                used["step_size"] = used["step_size"] * jnp.where(warming, brake, 1.0)
                scale, damping = used["scale"], used["damping"]
                # Momenta are stored in units of the metric, r sigma ~ N(0, 1), since the metric changes between steps.
                standing = before._replace(momentum=before.momentum / scale)
                after, info = jax.vmap(
                    lambda key, chain, step_size, scale, damping: move(
                        key, chain, density, step_size, scale, damping, damping / 2
                    )
                )(jax.random.split(ours, chains), standing, used["step_size"], scale, damping)
                sound = finite(after)
                drifted = (before.slice + 1.0 + damping / 2) % 2 - 1.0
                after = where(sound, after, before._replace(momentum=-info.momentum, slice=drifted))
                # After a rejection the slice keeps its drifted value. BlackJAX adds 0 times exp of the loss to it,
                # which is NaN if that overflows, unless the compiler folds the product away.
                sliced = jnp.where(jnp.isfinite(after.slice), after.slice, drifted)
                after = after._replace(momentum=after.momentum * scale, slice=sliced)
                rate = jnp.where(sound, info.acceptance_rate, 0.0)
                faster = jnp.minimum(1.0, brake * BRAKE**-RELEASE)
                brake = jnp.where(jnp.mean(rate) < FEW_ACCEPTED, brake * BRAKE, faster)
                changed = {
                    "key": key,
                    "chains": after,
                    "brake": brake,
                    "acceptance": carry["acceptance"] + rate / thinning,
                    "diverging": carry["diverging"] | info.is_divergent | ~sound,
                    "step_size": used["step_size"],
                    "damping": damping,
                }
                return carry | changed

            nothing = jnp.zeros_like(state["acceptance"])
            begun = {"acceptance": nothing, "diverging": nothing.astype(bool), "learned": jnp.array(False)}
            carry = jax.lax.fori_loop(0, thinning, once, state | begun)
            refused = state["refused"] + (warming & ~carry.pop("learned"))
            return cast(carry | {"count": state["count"] + 1, "refused": refused}, state)

        def record(state: dict[str, Any]) -> dict[str, Any]:
            return recorded(state, n_steps=jnp.int32(thinning), damping=state["damping"])

        return Kernel(begin, step, record, lambda state: finite(state["chains"]), pooled=True)

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        yield from super().noticed(statistics, figures)
        if figures["acceptance_rate"] < FEW_ACCEPTED:
            yield (
                f"{figures['acceptance_rate']:.0%} of the steps were accepted, and every rejection turns a chain "
                f"round: try {self._smaller_steps()}"
            )

    def _smaller_steps(self) -> str:
        return f"step_size_multiplier={self.step_size_multiplier / 2:g}"
