"""Microcanonical Langevin Monte Carlo: unadjusted, with a reported bias, or adjusted and exact.

A particle of unit speed moves over U(x) = -log p(x | D) in P dimensions: x' = v, v' = -(1 - v v') grad U / (P - 1). Its
direction v decorrelates over a path of length L. The long-run distribution of x is the posterior at any rate of
decorrelation. The energy error of the integrator is the only source of bias of unadjusted draws, and the step size is
tuned to keep it at a given size.

BlackJAX provides how a gradient turns the direction (`esh_dynamics_momentum_update_one_step`), new directions
(`generate_unit_vector`) and the coefficients of the integrator (`mclachlan_coefficients`). The tuning is part of the
kernel's state, so that a run can be watched, interrupted and resumed to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError
from ppl_bnn.core.settings import between, flag, optional, setting, whole
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.sampling.chains import Kernel
from ppl_bnn.inference.sampling.initialisation import spread
from ppl_bnn.inference.sampling.sampler import Sampler, Target

GRADIENTS_PER_STEP = 2
# Energy error above which a step counts as divergent, as in NUTS.
LARGEST_ERROR = 1000.0
# Values in the tuning, in units of the target: MOST of any step, LOST of a step without a usable end. One lost step in
# ten is tolerated, because no step size cures a region without a density. A lower MOST would hide bursts at the edge
# of stability.
MOST, LOST = 1000.0, 10.0
# Stochastic approximation of log step size, by min(MEMORY / (t + MEMORY) (ratio - 1), BOUND) / order at step t, for a
# ratio that grows with the power `order` of the step size: high for energy errors, low for rejected proposals.
MEMORY, BOUND, ORDER, ORDER_ADJUSTED = 3.0, 3.0, 7.0, 2.0
# Factor on the final step size. Networks are sampled at the edge of stability: a few per cent beyond it, the energy
# error is a hundred times the target.
MARGIN = 0.95
# After new variances, the approximation continues as if it had made this many steps.
RESUMED = 20
# Parts of the warm-up after which variances and width are replaced by those of the last part.
EDGES = (0.1, 0.25, 0.45, 0.7)
# Weight of the previous variances, in integrator steps.
PRIOR_WEIGHT = 10.0
# Mean length of an adjusted trajectory, in units of W. On a Gaussian in four dimensions 1.5 gave 1.5 times as many
# effective draws per gradient as 1, and more than 2.
TRAJECTORY = 1.5
# Integrator steps of a warm-up transition, and the most of one draw.
WARMUP_STEPS, MOST_STEPS = 10, 1024
# Shares of the target energy variance below which the step size is about three and ten times too small.
SMALL, COLLAPSED = 1e-3, 1e-6
# LARGE: multiple of the target energy variance that gives a warning. FROZEN: steps per path of length L above which a
# chain does not move.
LARGE, FROZEN = 4.0, 1e5
# Acceptance below which a chain has failed, and share of truncated trajectories above which there is a warning.
REFUSED, CUT = 0.05, 0.05


@dataclass(frozen=True)
class MCLMC(Sampler):
    """Microcanonical Langevin Monte Carlo, in unconstrained coordinates, with a Metropolis test if `adjusted`.

    Unadjusted (the default), a step of size e of the minimal-norm integrator (McLachlan 1995) costs two gradients, and
    the direction is partly refreshed after each step. e is tuned until the energy errors dE of a step have

        E[dE^2] / P = energy_variance.

    The draws have a bias that no number of draws removes, and that falls with `energy_variance` (see `bias_allowance`).

    Adjusted, each draw is the end of a trajectory of random length in a new direction. It is accepted with probability
    min(1, exp(-dE)). The draws are exact, and e is tuned until the mean acceptance is `target_accept`. For wide
    networks this costs about twice as many gradients.

    Parameters
    ----------
    draws, warmup, chains : int
        Transitions per chain that are kept and not kept, and the number of chains.
    start, jitter, chain_method, temperature, checkpoint, until, budget : optional
        As in `NUTS`. If `start` is or fits an approximation with a spread, its variances are the first v.
    adjusted : bool
        Whether to use a Metropolis test.
    energy_variance : float
        Target of the energy variance per dimension, which controls the bias. Unadjusted only.
    target_accept : float
        Target of the mean acceptance. Adjusted only.
    thinning : int or None
        Integrator steps per draw, and per transition of the warm-up. None: a path of length W between draws (about half
        are then effective), and 10 steps per transition of the warm-up. Unadjusted only.
    preconditioning : bool
        Whether to sample in the coordinates x / sqrt(v), with v = sqrt(Var x / Var grad log p) estimated in the
        warm-up, in which positions and gradients are equally wide. The width of the posterior in these coordinates is
        W = sqrt(sum Var x / v).
    decoherence : float
        L / W.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    InputError
        Impossible arguments.
    UnsupportedError
        Settings that are not supported; a model with a single coordinate.
    DivergenceError
        No chain can start, or the tuning has collapsed.

    Notes
    -----
    The warm-up tunes e at all transitions, and replaces v and W at 10, 25, 45 and 70 % of its length. An adjusted
    trajectory has 1.5 W / e steps on average, at most 1024. After a step with values that are not finite, or with an
    energy error above 1000, the particle stays and leaves in another direction (adjusted: the trajectory is rejected),
    and the warm-up reduces e. A chain whose tuning has collapsed raises an error.

    Use it for networks of hundreds of weights and more, from MAP or an approximation; from prior draws the warm-up may
    be too short (`comparisons/performance/sampling.py`). For a few weights NUTS is exact and costs as little. The
    stiffest direction is the most biased one: use a lower `energy_variance`, or adjusted=True, where tails matter.

    Statistics have shape (chain, draw) and ArviZ's names where it has one: `lp`, `n_steps` (gradients), `step_size`,
    `decoherence_length` (L; adjusted: the mean length of a trajectory), `diverging` (a step without a usable end),
    `energy_error` (root mean square over the steps of the draw; adjusted: that of the trajectory), and
    `energy_variance` (its square over P) or `acceptance_rate`. `info.figures` has L and step_size (means over chains),
    and either the energy_variance with its bias_allowance, or acceptance_rate.

    References
    ----------
    - Robnik, De Luca, Silverstein and Seljak (2023), "Microcanonical Hamiltonian Monte Carlo".
    - Robnik and Seljak (2024), "Fluctuation without dissipation: microcanonical Langevin Monte Carlo".
    - Robnik, Cohn-Gordon and Seljak (2025), "Metropolis adjusted microcanonical Hamiltonian Monte Carlo".
    - McLachlan (1995), "On the numerical integration of ordinary differential equations by symmetric composition
      methods".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.MCLMC(draws=20, warmup=50, chains=2, start=bnn.MAP())
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape  # chains, draws
    (2, 20)
    """

    adjusted: bool = setting(False, flag)
    energy_variance: float = setting(5e-4, between(0, 1))
    target_accept: float = setting(0.9, between(0, 1))
    thinning: int | None = setting(None, optional(whole()), advice="20")
    preconditioning: bool = setting(True, flag)
    decoherence: float = setting(2.0, between())
    warmup: int = setting(1000, whole(10))

    def check(self) -> None:
        super().check()
        if self.thinning is not None and self.adjusted:
            wanted = "None, since a draw of adjusted=True is one trajectory"
            raise InputError.of(f"{self.name} thinning", wanted, repr(self.thinning), "None")

    @property
    def limitations(self) -> str:  # type: ignore[override]
        stays = "Chains stay in the mode that they begin in."
        if self.adjusted:
            return f"Nothing, as chains grow long. {stays}"
        return f"A bias that no number of draws removes; the fit says how large it may be (bias_allowance). {stays}"

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float]:
        if self.thinning is not None:
            each = 2.0 * self.thinning
            return each, each, each
        return 2.0, 60.0, 2.0 * MOST_STEPS

    def kernel(self, target: Target) -> Kernel:
        import jax
        import jax.numpy as jnp
        from blackjax.mcmc.integrators import IntegratorState
        from blackjax.util import generate_unit_vector

        wanted = "at least two coordinates, in which a direction can turn"
        UnsupportedError.check(target.dimension > 1, self.name, wanted, "one", "NUTS()")
        approximation = target.approximation if self.preconditioning else None
        variances_of_start = spread(target.problem, approximation, dense=False)
        edges = np.unique([max(1, round(edge * self.warmup)) for edge in EDGES])

        def begin(flat: Any, key: Any, data: Any) -> _State:
            number = partial(jnp.asarray, dtype=flat.dtype)
            key, used = jax.random.split(key)
            density, slope = jax.value_and_grad(lambda u: target.log_density(u, data))(flat)
            root = math.sqrt(target.dimension)
            log_step, nothing, none = number(math.log(0.25 * root)), jnp.zeros_like(flat), jnp.int32(0)
            variances = jnp.ones_like(flat) if variances_of_start is None else number(variances_of_start)
            return _State(
                here=IntegratorState(flat, generate_unit_vector(used, flat), density, slope),
                key=key,
                count=none,
                tuner=_Tuner(log_step, log_step, none),
                variances=variances,
                width=number(root),
                steps=jnp.int32(self.thinning or WARMUP_STEPS),
                window=_Window(number(0.0), nothing, nothing, nothing, nothing),
                taken=none,
                squared_error=number(0.0),
                energy_error=number(0.0),
                acceptance=number(1.0),
                diverging=jnp.bool_(False),
            )

        def step(state: _State, data: Any) -> _State:
            tuning = state.count < self.warmup
            move = _integrator(lambda u: target.log_density(u, data), state.variances)
            moved = (trajectory if self.adjusted else walk)(state, tuning, move)
            return jax.lax.cond(tuning, tuned, lambda same: same, moved._replace(count=state.count + 1))

        def record(state: _State) -> dict[str, Any]:
            kept = {
                "u": state.here.position,
                "lp": state.here.logdensity,
                "diverging": state.diverging,
                "n_steps": GRADIENTS_PER_STEP * state.taken,
                "energy_error": state.energy_error,
                "step_size": jnp.exp(state.tuner.mean),
                "decoherence_length": length(state),
            }
            if self.adjusted:
                return kept | {"acceptance_rate": state.acceptance}
            return kept | {"energy_variance": state.squared_error / target.dimension}

        def length(state: _State) -> Any:
            """L of a chain with partial refreshments; else the mean length of a trajectory."""
            return state.width * (TRAJECTORY if self.adjusted else self.decoherence)

        def walk(state: _State, tuning: Any, move: Move) -> _State:
            """Integrator steps with partial refreshments; after a step without a usable end the particle turns."""
            wanted = target.dimension * self.energy_variance
            # One number for all vectorised chains if it is known beforehand, so that none waits for another.
            steps = state.steps if self.thinning is None else self.thinning

            def once(_: Any, carry: Any) -> Any:
                here, key, tuner, window, total, lost = carry
                key, turning = jax.random.split(key)
                step_size = jnp.exp(jnp.where(tuning, tuner.log_step, tuner.mean))
                there, kinetic = move(here, step_size)
                error = kinetic - there.logdensity + here.logdensity
                arrived = _usable(there) & (jnp.abs(error) < LARGEST_ERROR)
                here = jax.tree.map(lambda new, old: jnp.where(arrived, new, old), there, here)
                kept = jnp.where(arrived, jnp.exp(-step_size / length(state)), 0.0)
                here = here._replace(momentum=_refreshed(here.momentum, kept, turning))
                squared = jnp.where(arrived, error**2, 0.0)

                def ratio() -> Any:
                    return jnp.where(arrived, jnp.minimum(squared / wanted, MOST), LOST)

                tuner, window = _learned(tuning, tuner, window, ratio, ORDER, here)
                return here, key, tuner, window, total + squared, lost + ~arrived

            begun = (state.here, state.key, state.tuner, state.window)
            carry = (*begun, jnp.zeros_like(state.width), jnp.int32(0))
            here, key, tuner, window, total, lost = jax.lax.fori_loop(0, steps, once, carry)
            # Over the steps with a usable end: the others have no energy error.
            squared = total / jnp.maximum(state.steps - lost, 1)
            state = state._replace(here=here, key=key, tuner=tuner, window=window, taken=state.steps)
            return state._replace(squared_error=squared, energy_error=jnp.sqrt(squared), diverging=lost > 0)

        def trajectory(state: _State, tuning: Any, move: Move) -> _State:
            """A trajectory of random length in a new direction, accepted or rejected by its energy error."""
            key, long, turning, judging = jax.random.split(state.key, 4)
            step_size = jnp.exp(jnp.where(tuning, state.tuner.log_step, state.tuner.mean))
            # 1 .. 2 l / e - 1, l / e on average, for any position: random lengths avoid resonance with the target.
            most = jnp.clip(2.0 * length(state) / step_size - 1.0, 1.0, 1.0 * MOST_STEPS)
            steps = jnp.ceil(most * (1.0 - jax.random.uniform(long, dtype=most.dtype))).astype(jnp.int32)
            start = state.here._replace(momentum=generate_unit_vector(turning, state.here.position))

            def once(_: Any, carry: Any) -> Any:
                here, kinetic = carry
                here, change = move(here, step_size)
                return here, kinetic + change

            end, kinetic = jax.lax.fori_loop(0, steps, once, (start, jnp.zeros_like(state.width)))
            error = kinetic - end.logdensity + start.logdensity
            arrived = _usable(end) & (error < LARGEST_ERROR)
            acceptance = jnp.where(arrived, jnp.exp(-jnp.maximum(error, 0.0)), 0.0)
            accepted = jax.random.uniform(judging, dtype=most.dtype) < acceptance
            here = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), end, start)

            def ratio() -> Any:
                return (1.0 - acceptance) / (1.0 - self.target_accept)

            tuner, window = _learned(tuning, state.tuner, state.window, ratio, ORDER_ADJUSTED, here)
            error = jnp.where(arrived, error, LARGEST_ERROR)
            state = state._replace(here=here, key=key, tuner=tuner, window=window, taken=steps)
            return state._replace(energy_error=error, acceptance=acceptance, diverging=~arrived)

        def tuned(state: _State) -> _State:
            """After a transition of the warm-up: new variances and L at an edge, the steps per draw at the end."""
            at_edge = jnp.any(state.count == edges)
            state = jax.lax.cond(at_edge, with_variances, lambda same: same, state)
            return jax.lax.cond(state.count == self.warmup, with_steps, lambda same: same, state)

        def with_steps(state: _State) -> _State:
            if self.adjusted:
                return state
            state = state._replace(tuner=state.tuner._replace(mean=state.tuner.mean + math.log(MARGIN)))
            if self.thinning is not None:
                return state
            steps = jnp.clip(jnp.round(state.width / jnp.exp(state.tuner.mean)), 1, MOST_STEPS)
            return state._replace(steps=steps.astype(jnp.int32))

        def with_variances(state: _State) -> _State:
            """Set the preconditioner and L from the window that ends here, and begin a new window."""
            window, variances = state.window, state.variances
            if self.preconditioning:
                found = jnp.sqrt(window.squares / window.slope_squares)
                found = jnp.where(jnp.isfinite(found) & (found > 0.0), found, variances)
                share = window.count / (window.count + PRIOR_WEIGHT)
                variances = jnp.exp(share * jnp.log(found) + (1.0 - share) * jnp.log(variances))
            width = jnp.sum(window.squares / jnp.maximum(window.count - 1.0, 1.0) / variances)
            if self.preconditioning:
                # Var x Var grad log p >= 1, so a smaller sum means that the window is too short.
                width = jnp.maximum(width, target.dimension)
            width = jnp.sqrt(width)
            width = jnp.where(jnp.isfinite(width) & (width > 0.0), width, state.width)
            window = jax.tree.map(jnp.zeros_like, window)
            tuner = state.tuner._replace(count=jnp.int32(RESUMED))
            return state._replace(variances=variances, width=width, window=window, tuner=tuner)

        return Kernel(begin, step, record, lambda state: _usable(state.here))

    def summarise(self, statistics: Mapping[str, np.ndarray]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Figures and warnings; `DivergenceError` if the tuning of a chain has collapsed."""
        step_size, length = statistics["step_size"][:, -1], statistics["decoherence_length"][:, -1]
        diverging = statistics["diverging"]
        figures = {"L": float(length.mean()), "step_size": float(step_size.mean())}
        warnings: list[str] = []
        tuned = np.isfinite(length) & (length > 0) & (length < FROZEN * step_size) & np.isfinite(step_size)
        self._check_chains(tuned, "a step size of {:.3g} and L = {:.3g}", step_size, length)
        if diverging.any():
            warnings.append(
                f"{int(diverging.sum())} of {diverging.size} draws had a step that diverged ({diverging.mean():.1%}), "
                "from which the chain turned back: regions may be missed that it cannot enter"
            )
        if self.adjusted:
            acceptance = statistics["acceptance_rate"].mean(axis=1)
            figures["acceptance_rate"] = float(acceptance.mean())
            self._check_chains(acceptance >= REFUSED, "a mean acceptance of {:.3g}", acceptance)
            cut = float((statistics["n_steps"] // GRADIENTS_PER_STEP >= MOST_STEPS).mean())
            if cut > CUT:
                warnings.append(
                    f"{cut:.0%} of the trajectories were cut off at {MOST_STEPS} steps: the step size is far too small "
                    "for their length: try a longer warm-up"
                )
            return figures, tuple(warnings)
        variance, wanted = statistics["energy_variance"], self.energy_variance
        mean, typical = float(variance.mean(axis=1).mean()), np.median(variance, axis=1)
        figures |= {"energy_variance": mean, "bias_allowance": bias_allowance(mean)}
        got = "an energy variance of {:.3g} at a step size of {:.3g}"
        self._check_chains(typical > COLLAPSED * wanted, got, typical, step_size)
        warnings += [
            f"chain {chain}: the energy variance is {typical[chain]:.3g}, far below the target of {wanted:.3g}: the "
            "step size is several times too small, and the chain slow: try a longer warm-up"
            for chain in np.flatnonzero(typical < SMALL * wanted)
        ]
        if mean > LARGE * wanted:
            warnings.append(
                f"the energy variance is {mean:.3g}, above the target of {wanted:.3g}, and the "
                "bias allowance is that of the larger value: try a longer warm-up, or a smaller energy_variance"
            )
        return figures, tuple(warnings)

    def _check_chains(self, good: np.ndarray, got: str, *values: np.ndarray) -> None:
        """Raise `DivergenceError` for the first chain that is not good; `got` describes its values."""
        for chain in np.flatnonzero(~good):
            wanted = f"steps whose energy variance is {self.energy_variance:.3g}"
            if self.adjusted:
                wanted = f"trajectories accepted with probability {self.target_accept:g}"
            where = f"{self.name}, chain {chain}, whose tuning has collapsed"
            advice = "start=MAP(), a longer warm-up, narrower priors or standardised data"
            raise DivergenceError.of(where, wanted, got.format(*(value[chain] for value in values)), advice)


def bias_allowance(energy_variance: float) -> float:
    """Bound on the mean relative error of variances at an energy variance E per dimension: (E / 4)^(1/3).

    On a Gaussian the principal directions move as independent oscillators. If a leapfrog step changes the energy of one
    by a variance E_i, its stationary variance is off by b_i with E_i = 4 b_i^3 / (1 + b_i)^2. By convexity the mean of
    b_i is at most about (E / 4)^(1/3): 5 % at E = 5e-4, 2.3 % at 5e-5. This bounds the mean, not the stiffest
    direction. The integrator used here is better. See Robnik and Seljak (2024), "Controlling the asymptotic
    bias of the unadjusted Hamiltonian and Langevin Monte Carlo".
    """
    return (energy_variance / 4.0) ** (1.0 / 3.0)


class _Tuner(NamedTuple):
    """The logarithm of the step size, its weighted average, and the number of adaptations."""

    log_step: Any
    mean: Any
    count: Any


class _Window(NamedTuple):
    """Welford means and sums of squared deviations (P,) of positions and gradients since the last edge."""

    count: Any
    mean: Any
    squares: Any
    slope_mean: Any
    slope_squares: Any


class _State(NamedTuple):
    """All that the next transition depends on, and statistics of the last one.

    here: BlackJAX's integrator state. variances: v. width: W. steps: integrator steps per draw. taken and
    squared_error: integrator steps of the last transition and their mean squared energy error.
    """

    here: Any
    key: Any
    count: Any
    tuner: _Tuner
    variances: Any
    width: Any
    steps: Any
    window: _Window
    taken: Any
    squared_error: Any
    energy_error: Any
    acceptance: Any
    diverging: Any


# (state of the integrator, step size) -> (state, change of the kinetic energy).
Move = Callable[[Any, Any], tuple[Any, Any]]


def _integrator(log_density: Callable[[Any], Any], variances: Any) -> Move:
    """A step of the minimal-norm integrator.

    Both gradients are computed at one place in a loop: compiling a gradient takes most of the compile time.
    """
    import jax
    import jax.numpy as jnp
    from blackjax.mcmc import integrators

    turned: Any = integrators.esh_dynamics_momentum_update_one_step(variances)
    density = jax.value_and_grad(log_density)
    outer, half, inner, *_ = integrators.mclachlan_coefficients

    def move(here: Any, step_size: Any) -> tuple[Any, Any]:
        def once(index: Any, carry: Any) -> Any:
            here, kinetic = carry
            share = jnp.where(index == 0, outer, inner)
            momentum, velocity, kinetic = turned(
                here.momentum, here.logdensity_grad, step_size, share, kinetic
            )
            position = here.position + half * step_size * velocity
            return integrators.IntegratorState(position, momentum, *density(position)), kinetic

        begin = (here, jnp.zeros_like(here.logdensity))
        here, kinetic = jax.lax.fori_loop(0, GRADIENTS_PER_STEP, once, begin)
        momentum, _, kinetic = turned(here.momentum, here.logdensity_grad, step_size, outer, kinetic)
        return here._replace(momentum=momentum), kinetic

    return move


def _refreshed(momentum: Any, kept: Any, key: Any) -> Any:
    """kept v + sqrt((1 - kept^2) / P) z, normalised, z standard normal: v at kept = 1, uniform at kept = 0."""
    import jax
    import jax.numpy as jnp

    # Noise in single precision is as isotropic, and costs half.
    z = jax.random.normal(key, momentum.shape, jnp.float32).astype(momentum.dtype)
    mixed = kept * momentum + jnp.sqrt((1.0 - kept**2) / len(momentum)) * z
    return mixed / jnp.linalg.norm(mixed)


def _usable(here: Any) -> Any:
    """Whether a chain can continue from this state."""
    import jax.numpy as jnp

    return jnp.all(jnp.stack([jnp.isfinite(part).all() for part in here]))


def _learned(
    tuning: Any, tuner: _Tuner, window: _Window, ratio: Callable[[], Any], order: float, here: Any
) -> tuple[_Tuner, _Window]:
    """The tuner and the window after one more step of the warm-up; after the warm-up they stay as they are.

    The tuner takes a step of stochastic approximation (Robbins and Monro 1951) towards E[ratio] = 1, in units of the
    target. The window gets one more position and gradient (Welford 1962).
    """
    import jax
    import jax.numpy as jnp

    def learn() -> tuple[_Tuner, _Window]:
        steps = tuner.count + 1
        t = steps.astype(tuner.log_step.dtype)
        change = jnp.minimum(MEMORY / (t + MEMORY) * (ratio() - 1.0), BOUND) / order
        log_step = tuner.log_step - change
        mean_log_step = tuner.mean + 2.0 / (t + 1.0) * (log_step - tuner.mean)
        count = window.count + 1.0
        off, slope_off = here.position - window.mean, here.logdensity_grad - window.slope_mean
        mean, slope_mean = window.mean + off / count, window.slope_mean + slope_off / count
        squares = window.squares + off * (here.position - mean)
        slope_squares = window.slope_squares + slope_off * (here.logdensity_grad - slope_mean)
        now = _Window(count, mean, squares, slope_mean, slope_squares)
        return _Tuner(log_step, mean_log_step, steps), now

    return jax.lax.cond(tuning, learn, lambda: (tuner, window))
