"""LAPS: many chains of microcanonical dynamics that begin without a Metropolis test and end with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.settings import between, optional, setting, whole
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.mcmc.superchains import ManyChains, finite, recorded, where
from ppl_bnn.inference.sampling.chains import Kernel, cast
from ppl_bnn.inference.sampling.sampler import Target

# Above this many coordinates BlackJAX takes an integrator of higher order, and a higher target of the acceptance.
WIDE = 200
TARGETS = {False: 0.7, True: 0.9}
# BlackJAX's defaults. ALPHA: L over sqrt(P) times the root of the mean variance. C: of the energy error, see `LAPS`.
ALPHA, C = 1.9, 0.1
# The length over which the direction decorrelates within an adjusted trajectory, in units of the trajectory.
PARTIAL = 1.25
# Share of the unadjusted steps over which fluctuations are judged.
WINDOW = 0.2
# Below this the step size is too large for the target, see `noticed`.
FEW_ACCEPTED = 0.5


@dataclass(frozen=True)
class LAPS(ManyChains):
    """The late-adjusted parallel sampler: hundreds or thousands of short chains, in unconstrained coordinates.

    All chains move by microcanonical dynamics (see `MCLMC`), and expectations over the chains set what they share.

    - Unadjusted steps bring the chains to the posterior, one gradient each. After each step the length over which
      directions decorrelate becomes L = 1.9 sqrt(P mean_i Var u_i), and the step size is changed towards the variance
      of energy errors per dimension of 0.1 b^(3/8), where b = mean_i (1 - E[-u_i d_i log p])^2 measures how far the
      chains are from equipartition: steps are long at first and short near the posterior.
    - Adjusted transitions remove the bias. In coordinates scaled by the variances between chains, a trajectory of
      `steps` integrator steps begins in a new direction, and its end is accepted with probability min(1, exp(-dE)). The
      step size is found by bisection towards `target_accept`, within the warm-up. Draws are of this kind only, at a
      fixed step size, so that each chain has the posterior as its stationary distribution.

    The change comes when the mean squares E[u_i^2] over chains have relative fluctuations below `fluctuation` over the
    last steps, and at `unadjusted` of the warm-up at the latest.

    Parameters
    ----------
    draws, warmup : int
        As in `ChEES`. A transition of the warm-up makes `steps` unadjusted steps, or is an adjusted one.
    chains : int
        Hundreds on a CPU, thousands on an accelerator: expectations over few chains are too noisy for the adaptation.
    start, jitter, chain_method, temperature, checkpoint, until, budget : optional
        As in `ChEES`.
    superchains : int
        As in `ChEES`.
    steps : int
        Integrator steps of a transition.
    target_accept : float or None
        Target of the mean acceptance. None: 0.7, and 0.9 above 200 coordinates, where a step takes five gradients in
        place of two.
    unadjusted : float
        The largest share of the warm-up that is unadjusted.
    fluctuation : float
        Limit of the largest relative variance over time of E[u_i^2]. A smaller value makes the change later.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    InputError
        Impossible arguments.
    UnsupportedError
        Settings that are not supported; a model with a single coordinate.
    DivergenceError
        No chain can start.

    Notes
    -----
    Works well where all chains reach one region within the warm-up, and one step size fits it. Works poorly with
    stiff combinations of coordinates, for which scaling by variances does not help (use `MEADS`, which has coordinates
    of equal curvature), and with few chains (use `NUTS`). A chain that the change finds where the curvature is high may
    reject all its trajectories; a warning names it. Chains are too short for plain R-hat: `posterior.convergence`
    and rules have the nested one, over superchains, which detects a problem only if their starts are spread wider than
    the posterior, as prior draws are.

    A checkpoint keeps all chains together, so that an interrupted run resumes bit for bit with as many chains.

    Statistics have shape (chain, draw) and ArviZ's names where it has one: `lp`, `acceptance_rate`, `step_size` (in
    scaled coordinates), `n_steps` (gradients of the transition), `diverging` (a proposal with values that are not
    finite or an energy error above 1000, which is rejected), `burn_in` (unadjusted transitions) and
    `adaptation_refused` (transitions of the warm-up in which no chain had a finite proposal), the last two the same in
    all draws. `info.figures` has the means of the first two and of `burn_in`.

    BlackJAX provides both transitions and both adaptations (`adaptation.laps_burn_in`, `adaptation.laps`,
    `mcmc.adjusted_mclmc`). Its own loop runs to the end in one call; here each transition is a step that can be
    watched, stored and stopped. It judges fluctuations of E[u_i], which are not defined where that is zero.

    References
    ----------
    - Robnik and Seljak (2026), "LAPS: late-adjusted parallel sampler", arXiv 2601.16696.
    - Robnik, Cohn-Gordon and Seljak (2025), "Metropolis adjusted microcanonical Hamiltonian Monte Carlo".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.LAPS(draws=10, warmup=20, chains=16, superchains=2, steps=3)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape  # chains, draws
    (16, 10)
    """

    draws: int = 50
    warmup: int = setting(120, whole(4))
    chains: int = 256
    superchains: int = setting(32, whole(2))
    steps: int = setting(15, whole())
    target_accept: float | None = setting(None, optional(between(0, 1)), advice="0.8")
    unadjusted: float = setting(0.75, between(0, 1))
    fluctuation: float = setting(0.01, between())
    averaged: ClassVar[tuple[str, ...]] = (*ManyChains.averaged, "burn_in")

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float]:
        each = float(self.steps * gradients_per_step(size.parameters))
        return float(self.steps), each, each

    def kernel(self, target: Target) -> Kernel:
        import jax
        import jax.numpy as jnp
        from blackjax.adaptation import laps, laps_burn_in
        from blackjax.mcmc import adjusted_mclmc, integrators
        from blackjax.mcmc.hmc import HMCState

        size = target.dimension
        wanted = "at least two coordinates, in which a direction can turn"
        UnsupportedError.check(size > 1, self.name, wanted, "one", "NUTS()")
        wide = size > WIDE
        coefficients = integrators.omelyan_coefficients if wide else integrators.mclachlan_coefficients
        move: Any = adjusted_mclmc.build_kernel(integrators.generate_isokinetic_integrator(coefficients))
        cost = self.steps * gradients_per_step(size)
        accept = TARGETS[wide] if self.target_accept is None else self.target_accept
        latest = max(1, round(self.unadjusted * self.warmup))
        window = max(2, round(WINDOW * latest * self.steps))
        burn_in = laps_burn_in.Adaptation(
            size, True, alpha=ALPHA, bias_type=3, save_num=window, C=C, r_end=self.fluctuation
        )
        unset = laps.AdaptationState(self.steps, 1.0, None, 0)
        bisection = laps.Adaptation(unset, self.warmup, self.steps, accept)

        def begin(flat: Any, key: Any, data: Any) -> dict[str, Any]:
            density, slope = jax.vmap(jax.value_and_grad(lambda u: target.log_density(u, data)))(flat)
            # Along the gradient where the chains are too far out, by equipartition, and against it where too near.
            product = jnp.where(jnp.isfinite(slope), -flat * slope, 0.0)
            length = jnp.linalg.norm(slope, axis=-1, keepdims=True)
            direction = jnp.where(length > 0.0, slope / length, size**-0.5)
            none, nothing = jnp.int32(0), jnp.zeros(flat.shape[0], flat.dtype)

            def typed(leaf: Any) -> Any:
                is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
                return jnp.asarray(leaf, flat.dtype if is_float else jnp.int32)

            return {
                "count": none,
                "key": key,
                "chains": HMCState(flat, density, slope),
                "momentum": direction * jnp.where(product.mean(axis=0) < 1.0, -1.0, 1.0),
                # What the warm-up learns: of unadjusted steps, and of adjusted transitions.
                "unadjusted": jax.tree.map(typed, burn_in.initial_state),
                "still": jnp.bool_(False),
                "bounds": jnp.array([-jnp.inf, jnp.inf], flat.dtype),
                "found": jnp.bool_(False),
                "step_size": jnp.ones((), flat.dtype),
                "inverse_mass": jnp.ones(size, flat.dtype),
                "burn_in": none,
                "refused": none,
                # Statistics of the last transition.
                "acceptance": nothing,
                "diverging": nothing.astype(bool),
                "steps": none,
            }

        def mean(values: Any) -> Any:
            return jnp.mean(values, axis=0)

        def early(state: dict[str, Any], data: Any) -> dict[str, Any]:
            """A transition of unadjusted steps, with an adaptation after each."""
            one: Any = laps_burn_in.build_kernel(partial(target.log_density, data=data), size)

            def once(_: Any, carry: Any) -> Any:
                chains, momentum, learned, key, still, lost, fine = carry
                key, ours = jax.random.split(key)
                before = integrators.IntegratorState(
                    chains.position, momentum, chains.logdensity, chains.logdensity_grad
                )
                keys = jax.random.split(ours, momentum.shape[0])
                after, info = jax.vmap(one, (0, 0, None))(keys, before, learned)
                sound = finite(after) & (info["nans"] == 0)
                after = where(sound, after, before)
                change = jnp.where(sound, info["energy_change"], 0.0)
                square = jnp.square(after.position)
                seen = {
                    "equipartition_diagonal": mean(-after.position * after.logdensity_grad),
                    # What no choice here reads, and what costs a hundred times the rest.
                    "equipartition_fullrank": jnp.zeros((1, size), momentum.dtype),
                    "x": mean(after.position),
                    "xsq": mean(square),
                    "E": mean(change),
                    "Esq": mean(jnp.square(change)),
                    "rejection_rate_nans": mean(1.0 * ~sound),
                    "observables_for_bias": mean(square),
                    "observables": 0.0,
                    "entropy": -mean(after.logdensity),
                }
                new, monitored = burn_in.update(learned, seen)
                still = (monitored["r_max"] <= self.fluctuation) & (new.step_count >= window)
                chains = HMCState(after.position, after.logdensity, after.logdensity_grad)
                new = (chains, after.momentum, new, key, still, lost | ~sound, fine | jnp.any(sound))
                return cast(new, carry)

            none = jnp.zeros_like(state["diverging"])
            begun = (state["chains"], state["momentum"], state["unadjusted"], state["key"], state["still"])
            carry = jax.lax.fori_loop(0, self.steps, once, (*begun, none, jnp.bool_(False)))
            chains, momentum, learned, key, still, lost, fine = carry
            variance = learned.inverse_mass_matrix
            scale = jnp.where(jnp.isfinite(variance) & (variance > 0.0), variance, 1.0)
            changed = {
                "key": key,
                "chains": chains,
                "momentum": momentum,
                "unadjusted": learned,
                "still": still,
                # Where the adjusted transitions begin: the step size in the scaled coordinates.
                "inverse_mass": scale,
                "step_size": learned.step_size / jnp.sqrt(mean(scale)),
                "burn_in": state["burn_in"] + 1,
                "refused": state["refused"] + ~fine,
                "acceptance": jnp.ones_like(state["acceptance"]),
                "diverging": lost,
                "steps": jnp.int32(self.steps),
            }
            return cast(state | changed, state)

        def late(state: dict[str, Any], data: Any) -> dict[str, Any]:
            """An adjusted transition, with an adaptation of the step size in the warm-up."""
            before, step_size = state["chains"], state["step_size"]
            warming = state["count"] < self.warmup
            key, ours = jax.random.split(state["key"])
            keys = jax.random.split(ours, before.position.shape[0])
            density = partial(target.log_density, data=data)
            after, info = jax.vmap(
                lambda key, chain: move(
                    key, chain, density, step_size, (self.steps,), state["inverse_mass"], PARTIAL
                )
            )(keys, before)
            sound = finite(after)
            after = where(sound, after, before)
            lost = info.is_divergent | ~sound
            rate = jnp.where(lost, 0.0, info.acceptance_rate)
            bounds = (state["bounds"], state["found"])
            (edges, found), learned = bisection.epsadap_update(bounds, step_size, mean(rate))
            changed = {
                "key": key,
                "chains": after,
                "bounds": jnp.where(warming, edges, state["bounds"]),
                "found": jnp.where(warming, found, state["found"]),
                "step_size": jnp.where(warming, learned, step_size),
                "refused": state["refused"] + (warming & jnp.all(lost)),
                "acceptance": rate,
                "diverging": lost,
                "steps": jnp.int32(cost),
            }
            return cast(state | changed, state)

        def step(state: dict[str, Any], data: Any) -> dict[str, Any]:
            goes_on = ~state["still"] & (state["burn_in"] < latest) & (state["count"] < self.warmup)
            moved = jax.lax.cond(goes_on, early, late, state, data)
            return moved | {"count": state["count"] + 1}

        def record(state: dict[str, Any]) -> dict[str, Any]:
            return recorded(state, n_steps=state["steps"], burn_in=state["burn_in"])

        return Kernel(begin, step, record, lambda state: finite(state["chains"]), pooled=True)

    def check(self) -> None:
        super().check()
        left = self.warmup - max(1, round(self.unadjusted * self.warmup))
        wanted, got = (
            "a share that leaves adjusted transitions to the warm-up",
            f"{self.unadjusted} of {self.warmup}",
        )
        InputError.check(left > 0, f"{self.name} unadjusted", wanted, got, "unadjusted=0.75, warmup=120")

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        yield from super().noticed(statistics, figures)
        if figures["acceptance_rate"] < FEW_ACCEPTED:
            yield (
                f"{figures['acceptance_rate']:.0%} of the trajectories were accepted, so draws are more correlated "
                f"than they need be: try warmup={2 * self.warmup}, more chains, or start=MAP()"
            )

    def _smaller_steps(self) -> str:
        # The larger default: the advice makes steps smaller in any number of coordinates.
        target = TARGETS[True] if self.target_accept is None else self.target_accept
        return f"target_accept={1 - (1 - target) / 2:.3g}"


def gradients_per_step(size: int) -> int:
    """Gradients of one step of the integrator of adjusted transitions in so many coordinates."""
    return 5 if size > WIDE else 2
