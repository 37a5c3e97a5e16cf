"""The base class of stochastic-gradient samplers: batches, step sizes, schedules, and one kernel.

A step of size h moves along an estimate of the gradient of the log density from a batch of rows, and adds noise of a
variance proportional to h. Without accepting or rejecting, draws have a bias that falls with h. It is measured while
sampling (the statistic "variance_excess"), and the warm-up finds a step size that keeps it below an allowance.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.settings import OneOf, between, flag, optional, setting, whole
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.optimisation.loops import rows_per_step
from ppl_bnn.inference.sampling.chains import Kernel
from ppl_bnn.inference.sampling.sampler import Sampler, Target
from ppl_bnn.inference.sampling.whitening import whitened

# Running means weight warm-up step t by about t^(MEMORY - 1), so that the last fifth counts twice as much as all steps
# before it and the first steps, far from the target, are forgotten.
MEMORY = 5.0
# Steps per draw with all rows. With batches the step size falls as B / N, so a draw takes N / B times as many steps,
# for the same gradients, up to this factor.
THINNING, MOST_EPOCHS = 20, 20
# A mean variance excess above which there is a warning.
EXCESS_LIMIT = 0.1

Walker = dict[str, Any]
# flat -> (log density, its gradient), or an estimate of both from a batch.
Density = Callable[[Any], tuple[Any, Any]]


class Pace(NamedTuple):
    """The settings of one step.

    size: h. tuned: whether the rule finds h itself. weight: of this step in running means, 0 after the warm-up. noise:
    1, or 0 in the exploration stage of a cycle.
    """

    size: Any
    tuned: Any
    weight: Any
    noise: Any


@dataclass(frozen=True)
class StepRule:
    """One step of a method, as pure functions over JAX.

    begin: (flat, log density, gradient, typical) -> walker, a dict of arrays with the position as "flat"; `typical`
    (P,) is a guess of the mean square of each derivative. move: (walker, density, pace, key) -> (walker, h, measure).
    found: walker -> h of the warm-up. measure: the name of the statistic from `move`, averaged over the steps of a
    draw.
    """

    begin: Callable[[Any, Any, Any, Any], Walker]
    move: Callable[[Walker, Density, Pace, Any], tuple[Walker, Any, Any]]
    found: Callable[[Walker], Any]
    measure: str = "variance_excess"


@dataclass(frozen=True)
class StochasticGradient(Sampler):
    """Base class of the stochastic-gradient samplers, with their common parameters. See `Sampler` for the others.

    Parameters
    ----------
    batch_size : int or None
        B rows per step, with the likelihood weighted by N / B; None for all rows. Batches are pieces of permutations
        of all rows, new for each draw, so that the noise within an epoch cancels in part. With thinning=1 batches are
        independent.
    step_size : float or None
        s, the learning rate of gradient descent on -log p(u | D) / N: h = s / N multiplies the gradient of the log
        density (Welling and Teh's epsilon is 2 h). None: the warm-up finds the one at which the expected
        `variance_excess` equals `allowance`.
    allowance : float
        The share by which variances may be too large, on average over directions. Where curvatures differ much, stiff
        directions have most of it.
    thinning : int or None
        Steps per draw. None: 20, and with batches 20 N / B (the same gradients), at most 400, because batches need
        smaller steps. Each draw also costs one log density over all rows. The warm-up is counted in draws too.
    schedule : {"constant", "decaying", "cyclical"}
        Schedule of the step size, see Notes.
    decay : float
        Exponent of the decaying schedule.
    cycle_length : int
        Length of a cycle, in units of `thinning` steps.
    exploration : float
        Share of a cycle without noise (plain descent with large steps) and without draws.
    control_variates : bool
        Whether to estimate the gradient by its value over all rows where the present draw began, plus a batch estimate
        of the difference (Dubey et al. 2016). This costs two gradients per batch and one over all rows per draw.
    preconditioner : {"auto", "curvature", None}
        "curvature": chains move in coordinates of equal curvature, z = S^-1 u with S S' the inverse curvature at the
        start, up to 1000 coordinates. A start more than two standard deviations out along a direction, by the local
        curvature, is moved to two. `step_size` is in units of z. None: the coordinates are unchanged. "auto":
        "curvature" if `step_size` is None.

    Notes
    -----
    Preconditioning. The step size is limited by the stiffest direction, and the number of steps to cross the widest one
    is proportional to the condition number (measured by `comparisons/performance/badly_scaled.py`).

    Schedules.

    - "decaying": s (1 + n)^(-decay) at the n-th draw from 0, warm-up included, so that the bias vanishes with more
      draws. A step size found in the warm-up is that of the first draw after it. Draws have equal weight, which is
      consistent for decay < 1 (Lamberton and Pages 2002).
    - "cyclical" (Zhang et al. 2020): cycles of `cycle_length` times `thinning` steps. In each the step size falls from
      s to 0 as s (1 + cos(pi r)) / 2, r from 0 to 1. The first `exploration` share has no noise and no draws. After it
      there is a draw after each `thinning` steps. The statistic `cycle` is the cycle of a draw, from 0 after the
      warm-up. A step size found in the warm-up, which uses it throughout, is the one at which draws begin in a cycle.
      Draws begin at the bottom of a mode and need time to spread: short cycles underestimate variances.

    References
    ----------
    - Welling and Teh (2011), "Bayesian learning via stochastic gradient Langevin dynamics".
    - Dubey, Reddi, Williamson, Poczos, Smola and Xing (2016), "Variance reduction in stochastic gradient Langevin
      dynamics".
    - Zhang, Li, Zhang, Chen and Wilson (2020), "Cyclical stochastic gradient MCMC for Bayesian deep learning".
    - Lamberton and Pages (2002), "Recursive computation of the invariant distribution of a diffusion".
    """

    batch_size: int | None = setting(None, optional(whole()), advice="128")
    step_size: float | None = setting(None, optional(between()))
    allowance: float = setting(0.02, between(0, 1))
    thinning: int | None = setting(None, optional(whole()), advice="20")
    schedule: str = setting("constant", OneOf(("constant", "decaying", "cyclical")))
    decay: float = setting(1.0 / 3.0, between(0, 1))
    cycle_length: int = setting(200, whole(2))
    exploration: float = setting(0.5, between(0, 1))
    control_variates: bool = setting(False, flag)
    preconditioner: str | None = setting("auto", OneOf(("auto", "curvature", None)))
    warmup: int = setting(1000, whole(0))
    averaged: ClassVar[tuple[str, ...]] = ("step_size", "variance_excess")
    limitations: ClassVar[str] = (
        "Its steps have no Metropolis correction: variances are too large, most where the posterior is narrowest. "
        "Chains stay near the mode that they begin in."
    )

    def check(self) -> None:
        super().check()
        good = not self.control_variates or self.batch_size is not None
        wanted = "mini-batches, whose noise they reduce"
        InputError.check(good, f"{self.name} control_variates", wanted, "none", "batch_size=128")
        good = self.schedule != "cyclical" or 0 < self._explored < self.cycle_length
        wanted = "a share of the cycle that leaves at least one of its parts for each stage"
        got, advice = f"{self._explored} of {self.cycle_length}", "cycle_length=200, exploration=0.5"
        InputError.check(good, f"{self.name} exploration", wanted, got, advice)
        # Whether something is found in the warm-up.
        learns = self.step_size is None or self.preconditioner == "rmsprop"
        wanted = "a warm-up, in which the step size and the preconditioner are found"
        advice = "warmup=1000, or a step_size and no preconditioner"
        InputError.check(not learns or self.warmup, f"{self.name} warmup", wanted, self.warmup, advice)

    def steps_per_draw(self, rows: int, batch: int | None) -> int:
        """`thinning`, or if it is None the number of steps that the noise of the batches requires."""
        if self.thinning is not None:
            return self.thinning
        return THINNING if batch is None else THINNING * min(-(-rows // batch), MOST_EPOCHS)

    @property
    def _explored(self) -> int:
        """The number of thinnings of a cycle that explore."""
        return round(self.exploration * self.cycle_length)

    @abstractmethod
    def rule(self, rows: int, batches: bool) -> StepRule:
        """The step of the method for N rows; `batches`: whether gradients are batch estimates with their own noise."""

    def step_of(self, walker: Walker, pace: Pace, now: Any) -> tuple[Any, Any]:
        """The running mean of the steepness (excess of variances per h) after its value `now`, and h of this step."""
        import jax.numpy as jnp

        steepness = walker["steepness"] + pace.weight * (now - walker["steepness"])
        # The running mean lags behind a gradient that has just become steeper.
        size = jnp.where(pace.tuned, self.allowance / jnp.maximum(steepness, now), pace.size)
        return steepness, size

    # -- schedules, over arrays of JAX or numbers

    def factor(self, done: Any, position: Any) -> Any:
        """The schedule's factor on s after `done` draws, at a position from 0 to 1 in the cycle."""
        import jax.numpy as jnp

        if self.schedule == "decaying":
            return (1.0 + done) ** -self.decay
        if self.schedule == "cyclical":
            return 0.5 * (1.0 + jnp.cos(math.pi * position))
        return 1.0

    def _where(self, done: Any) -> tuple[Any, Any, Any]:
        """The transition after `done`: its first thinning in its cycle, its number of thinnings, and its cycle."""
        import jax.numpy as jnp

        one = jnp.ones((), jnp.int32)
        if self.schedule != "cyclical":
            return 0 * one, one, 0 * one
        warm = done < self.warmup
        since = jnp.where(warm, done, done - self.warmup)
        draws = self.cycle_length - self._explored
        cycle, index = since // draws, since % draws
        first = jnp.where(index == 0, 0, self._explored + index)
        count = jnp.where(index == 0, self._explored + 1, one)
        if self.step_size is None:
            first, count = jnp.where(warm, self._explored, first), jnp.where(warm, one, count)
        return first, count, cycle

    # -- the kernel

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float]:
        share = size.share(self.batch_size)
        least = self.steps_per_draw(size.rows, self.batch_size) * share
        most = 2.0 * least + 1.0 if self.control_variates else least
        if self.schedule == "cyclical":
            # Thinnings that explore have no draw.
            most /= 1.0 - self.exploration
        return least, most, most * (1.0 + (self.schedule == "cyclical")) + 1.0

    def kernel(self, target: Target) -> Kernel:
        return whitened(target, partial(self._kernel, target.problem), self.whitens)

    @property
    def whitens(self) -> bool:
        wanted = self.preconditioner
        return wanted == "curvature" or (wanted == "auto" and self.step_size is None)

    def _kernel(self, problem: Problem, log_density: Callable[..., Any]) -> Kernel:
        import jax
        import jax.numpy as jnp

        rows = problem.rows
        batch = rows_per_step(self.name, problem, self.batch_size)
        rule = self.rule(rows, batch is not None)
        evaluated = jax.value_and_grad(log_density)
        thinning = self.steps_per_draw(rows, batch)
        # In batches: with control variates two gradients each, and one over all rows per thinning.
        gradients = thinning
        if batch is not None and self.control_variates:
            gradients = 2 * thinning + -(-rows // batch)
        # A concrete number, even if a kernel is made while another is traced.
        with jax.ensure_compile_time_eval():
            begins = float(self.factor(self.warmup, self._explored / self.cycle_length))

        def begin(flat: Any, key: Any, data: Any) -> dict[str, Any]:
            key, inside = jax.random.split(key)
            probe = jax.random.normal(inside, flat.shape, flat.dtype)
            (lp, gradient), (_, curvature) = jax.jvp(lambda at: evaluated(at, data), (flat,), (probe,))
            # At a mode the gradient does not show its typical size; |A probe| does, A being the curvature.
            typical = jnp.maximum(gradient**2, jnp.where(jnp.isfinite(curvature), jnp.abs(curvature), 0.0))
            none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), flat.dtype)
            counts = {"done": none, "steps": none, "failed": none - 1, "n_steps": none}
            told = {"lp": lp, "rate": zero, "measure": zero}
            usable = jnp.isfinite(lp) & jnp.isfinite(gradient).all()
            walker = rule.begin(flat, lp, gradient, typical)
            return {"walker": walker, "key": key, "usable": usable, **counts, **told}

        def step(state: dict[str, Any], data: Any) -> dict[str, Any]:
            done = state["done"]
            warm = done < self.warmup
            first, count, _ = self._where(done)
            # A failed chain need not continue to the end of the warm-up, where the failure is detected.
            count = jnp.where(state["failed"] < 0, count, 0)

            def pace(walker: Walker, taken: Any, part: Any, index: Any) -> Pace:
                position = (part + index / thinning) / self.cycle_length
                factor = self.factor(done, position)
                if self.step_size is None:
                    size, tuned = rule.found(walker) * factor / begins, warm
                else:
                    size, tuned = self.step_size / rows * factor, jnp.asarray(False)
                weight = jnp.where(warm, MEMORY / (taken + MEMORY + 1.0), 0.0)
                explores = jnp.asarray(self.schedule == "cyclical") & (part < self._explored)
                return Pace(size, tuned, weight, jnp.where(explores, 0.0, 1.0))

            def through(part: Any, carry: Any) -> Any:
                walker, key, taken, failed, rate, _ = carry
                key, inside = jax.random.split(key)
                density = self._density(rows, evaluated, batch, data, walker["flat"], inside)

                def once(index: Any, carry: Any) -> Any:
                    walker, key, taken, failed, _, total = carry
                    key, inside = jax.random.split(key)
                    walker, size, measure = rule.move(
                        walker, density(index), pace(walker, taken, first + part, index), inside
                    )
                    lost = ~jnp.isfinite(walker["flat"]).all()
                    failed = jnp.where((failed < 0) & lost, taken, failed)
                    latest = jnp.asarray(size * rows, rate.dtype)
                    return walker, key, taken + 1, failed, latest, total + measure

                start = (walker, key, taken, failed, rate, jnp.zeros_like(rate))
                return jax.lax.fori_loop(0, thinning, once, start)

            names = ("walker", "key", "steps", "failed", "rate", "measure")
            carry = jax.lax.fori_loop(0, count, through, tuple(state[name] for name in names))
            moved = dict(zip(names, carry, strict=True))
            walker, measure = moved["walker"], moved["measure"] / thinning
            lp = walker["lp"] if "lp" in walker else log_density(walker["flat"], data)
            gradients_taken = (count * gradients).astype(jnp.int32)
            return (
                state | moved | {"done": done + 1, "lp": lp, "n_steps": gradients_taken, "measure": measure}
            )

        def record(state: dict[str, Any]) -> dict[str, Any]:
            kept = {"u": state["walker"]["flat"], "lp": state["lp"], "n_steps": state["n_steps"]}
            kept |= {"step_size": state["rate"], "failed_step": state["failed"]}
            kept[rule.measure] = state["measure"]
            if self.schedule == "cyclical":
                kept["cycle"] = self._where(state["done"] - 1)[2]
            return kept

        return Kernel(
            begin, step, record, lambda state: state["usable"], cost=1.0 if batch is None else batch / rows
        )

    def _density(
        self, rows: int, evaluated: Any, batch: int | None, data: Any, anchor: Any, key: Any
    ) -> Callable[[Any], Density]:
        """Step number within a thinning -> its density; `anchor` is where the thinning begins."""
        if batch is None:
            return lambda index: lambda flat: evaluated(flat, data)
        order = permuted_rows(key, rows, batch, self.steps_per_draw(rows, batch))
        at_anchor = evaluated(anchor, data) if self.control_variates else None

        def density(index: Any) -> Density:
            x, y, constants = data
            chosen = order[index]
            part = (map_data(lambda a: a[chosen], x), y[chosen], constants)

            def estimated(flat: Any) -> tuple[Any, Any]:
                value, gradient = evaluated(flat, part, rows / batch)
                if at_anchor is None:
                    return value, gradient
                other, slope = evaluated(anchor, part, rows / batch)
                return value - other + at_anchor[0], gradient - slope + at_anchor[1]

            return estimated

        return density

    # -- descriptions, figures and warnings

    @property
    def aim(self) -> str:
        """The sampled distribution: the target up to the bias of the steps."""
        return "; ".join(filter(None, (super().aim, "up to O(step size), for no step is rejected")))

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        excess = figures.get("variance_excess", 0.0)
        advice = "a smaller step_size" if self.step_size else "a longer warm-up"
        advice += ", a larger batch_size or control_variates=True" if self.batch_size else ""
        if excess > EXCESS_LIMIT:
            yield (
                f"{self.name} accepts every step: batches and step_size={figures['step_size']:.3g} make the variances "
                f"{excess:.0%} too large on average over directions; try {advice}"
            )


def permuted_rows(key: Any, rows: int, size: int, steps: int) -> Any:
    """Row numbers (steps, size) of random batches: permutations of all rows, concatenated and cut into pieces.

    Every row occurs once per epoch. A batch across the end of a permutation may hold a row twice.
    """
    import jax

    keys = jax.random.split(key, -(-steps * size // rows))
    order = jax.lax.map(lambda each: jax.random.permutation(each, rows), keys).reshape(-1)
    return order[: steps * size].reshape(steps, size)
