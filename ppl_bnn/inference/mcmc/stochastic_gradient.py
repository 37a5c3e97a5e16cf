"""The base class of stochastic-gradient samplers: batches, step sizes and their schedules, and one kernel.

A step of size h moves along an estimate of the gradient of the log density of the target, made from a batch of rows,
and adds noise whose variance is proportional to h. Nothing is accepted or rejected, so that draws are of another
distribution than the target, and nearer to it the smaller h is. How far apart the two are on average is measured while
sampling (the statistic "variance_excess"), and a step size that keeps this below an allowance is found in the warm-up.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ppl_bnn.core.arrays import map_data
from ppl_bnn.core.errors import InputError, message, unknown_name
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.optimisation.loops import check_whole, check_within, rows_per_step
from ppl_bnn.inference.sampling.chains import Kernel
from ppl_bnn.inference.sampling.sampler import Sampler, Target
from ppl_bnn.inference.sampling.whitening import gradients_of_a_start, whitened

SCHEDULES = ("constant", "decaying", "cyclical")
# Running means over the warm-up weigh step t by about t^(MEMORY - 1): the first steps, far from the target, are
# forgotten, and the last fifth counts twice as much as all before it.
MEMORY = 5.0
# Steps per draw where every step sees all rows. With batches the step size falls as B / N, so that a draw takes N / B
# times as many, which cost the same gradients, up to this many times.
THINNING, MOST_EPOCHS = 20, 20
# A mean share of variance too much above which there is a warning.
EXCESS_LIMIT = 0.1

Walker = dict[str, Any]
# flat -> (log density, its gradient), or an estimate of both from a batch.
Density = Callable[[Any], tuple[Any, Any]]


class Pace(NamedTuple):
    """What a rule is told of one step.

    size: h. tuned: whether the rule is to find h by itself at this step instead. weight: of this step in running means,
    0 after the warm-up. noise: 1, or 0 where a cycle explores.
    """

    size: Any
    tuned: Any
    weight: Any
    noise: Any


@dataclass(frozen=True)
class Rule:
    """One step of a method, in pure functions over JAX.

    begin: (flat, log density, gradient, typical) -> walker, a dict of arrays with the position as "flat"; typical (P,)
    is a guess of the mean square of each derivative under the target. move: (walker, density, pace, key) -> (walker, h,
    measure). found: walker -> the h that the warm-up has found. measure: the name of the statistic that `move` gives;
    it is averaged over the steps of a draw.
    """

    begin: Callable[[Any, Any, Any, Any], Walker]
    move: Callable[[Walker, Density, Pace, Any], tuple[Walker, Any, Any]]
    found: Callable[[Walker], Any]
    measure: str = "variance_excess"


@dataclass(frozen=True)
class StochasticGradient(Sampler):
    """The fields that all of these samplers have.

    batch_size: B rows per step, whose log likelihood counts N / B times; None takes all rows. Batches are permutations
    of all rows cut into pieces, begun anew with each draw, so within an epoch no row comes twice, and the noise of its
    batches cancels in part. With thinning=1 each batch is independent of the one before.

    step_size: s, the learning rate of gradient descent on -log p(u | D) / N, whatever N is: h = s / N multiplies the
    gradient of the whole log density (Welling and Teh's epsilon is 2 h). None: found in the warm-up, so that the
    expected `variance_excess` equals `allowance`.

    allowance: by what share the variances of the draws may be too large, on average over directions, for want of a
    Metropolis correction. It holds on average only: where curvatures differ much, stiff directions take most of it.

    thinning: steps per draw; None: 20, and with batches 20 N / B, which cost as many gradients, but at most 400: the
    step size that batches allow is smaller by about that factor, so that 20 steps would hardly move the chain. Each
    draw costs one evaluation of the log density over all rows besides. The warm-up too is counted in draws.

    preconditioner: "curvature": the chain moves in coordinates of equal curvature, z = S^-1 u with S S' the inverse of
    the curvature where it starts, and a start more than two standard deviations out along some direction, by the local
    curvature, is moved to two (`ppl_bnn.inference.sampling.whitening`; up to 1000 coordinates). A `step_size` is then
    one in z.
    None: as the coordinates are. "auto": "curvature" where `step_size` is None, so that a step size that is given keeps
    its meaning. One step size for all directions has to be small enough for the stiffest, and a chain needs a number of
    steps in proportion to the condition number to cross the widest: on a linear model with one of 2e5 variances were
    up to 3e5 times too large without this, for SGHMC 1e5 times, and are 2 to 3 % too large in the median with it
    (`comparisons/performance/badly_scaled.py`).

    schedule: of the step size. "constant". "decaying": s (1 + n)^(-decay) at the n-th draw from 0, warm-up included, so
    that the bias vanishes as draws go on; a step size that is found is that of the first draw after the warm-up. Draws
    count equally, which is consistent for decay < 1 (Lamberton and Pages 2002). "cyclical" (Zhang, Li, Zhang, Chen and
    Wilson 2020, "Cyclical stochastic gradient MCMC for Bayesian deep learning"): cycles of `cycle_length` times
    `thinning` steps, through each of which the size falls from s to 0 as s (1 + cos(pi r)) / 2, r from 0 to 1. The
    first `exploration` share of a cycle has no noise (it is plain descent with large steps) and no draws; after it
    there is a draw after each `thinning` steps. The statistic `cycle` says which cycle a draw is of; the first draw
    after the warm-up is the first of cycle 0. A step size that is found is the one at which draws begin in a cycle, and
    the warm-up is at that size throughout. Draws that begin at the bottom of a mode need their time to spread: with
    cycles of 10 draws on the diabetes table the epistemic variance was half of what it should be, of 100 draws 0.88.

    control_variates: estimate the gradient by its value over all rows where the present draw began, plus what a batch
    says of the difference (Dubey, Reddi, Williamson, Poczos, Smola and Xing 2016, "Variance reduction in stochastic
    gradient Langevin dynamics"). Costs two gradients per batch and one over all rows per draw.
    """

    batch_size: int | None = None
    step_size: float | None = None
    allowance: float = 0.02
    thinning: int | None = None
    schedule: str = "constant"
    decay: float = 1.0 / 3.0
    cycle_length: int = 200
    exploration: float = 0.5
    control_variates: bool = False
    preconditioner: str | None = "auto"
    fewest_warmup: ClassVar[int] = 0
    preconditioners: ClassVar[tuple[str, ...]] = ("auto", "curvature")

    def check(self) -> None:
        super().check()
        if self.batch_size is not None:
            check_whole(self.name, "batch_size", self.batch_size, 1, "128, or None for all rows")
        if self.step_size is not None:
            check_within(self.name, "step_size", self.step_size, 0, math.inf, "None, to have one found")
        check_within(self.name, "allowance", self.allowance, 0, 1, "0.02")
        if self.thinning is not None:
            check_whole(self.name, "thinning", self.thinning, 1, "20, or None")
        check_whole(self.name, "cycle_length", self.cycle_length, 2, "200")
        check_within(self.name, "decay", self.decay, 0, 1, "1 / 3")
        check_within(self.name, "exploration", self.exploration, 0, 1, "0.5")
        if self.preconditioner is not None and self.preconditioner not in self.preconditioners:
            raise unknown_name("preconditioner", self.preconditioner, self.preconditioners)
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", self.schedule, SCHEDULES)
        if not isinstance(self.control_variates, bool):
            raise InputError(
                f"{self.name} control_variates: "
                + message("True or False", repr(self.control_variates), "control_variates=False")
            )
        if self.control_variates and self.batch_size is None:
            raise InputError(
                f"{self.name} control_variates: "
                + message("mini-batches, whose noise they reduce", "batch_size=None", "batch_size=128")
            )
        if self.schedule == "cyclical" and not 0 < self._explored < self.cycle_length:
            raise InputError(
                f"{self.name} exploration: "
                + message(
                    "a share of the cycle that leaves at least one of its parts for each stage",
                    f"{self._explored} of {self.cycle_length}",
                    "cycle_length=200, exploration=0.5",
                )
            )
        if self._learns and self.warmup < 1:
            raise InputError(
                f"{self.name} warmup: "
                + message(
                    "a warm-up, in which the step size and the preconditioner are found",
                    repr(self.warmup),
                    "warmup=1000, or a step_size and no preconditioner",
                )
            )

    def steps_per_draw(self, rows: int, batch: int | None) -> int:
        """`thinning`, or where it is None as many steps as the noise of the batches asks for."""
        if self.thinning is not None:
            return self.thinning
        return THINNING if batch is None else THINNING * min(-(-rows // batch), MOST_EPOCHS)

    @property
    def _learns(self) -> bool:
        """Whether something is found in the warm-up."""
        return self.step_size is None

    @property
    def _explored(self) -> int:
        """The thinnings of a cycle that explore."""
        return round(self.exploration * self.cycle_length)

    @property
    def _draws_per_cycle(self) -> int:
        return self.cycle_length - self._explored

    @abstractmethod
    def rule(self, rows: int, batches: bool) -> Rule:
        """One step. rows: N. batches: whether gradients are of batches, and so have noise of their own."""

    # -- schedules, over arrays of JAX or numbers

    def factor(self, done: Any, position: Any) -> Any:
        """What the schedule multiplies s by. done: draws before this one. position: in the cycle, 0 to 1."""
        import jax.numpy as jnp

        if self.schedule == "decaying":
            return (1.0 + done) ** -self.decay
        if self.schedule == "cyclical":
            return 0.5 * (1.0 + jnp.cos(math.pi * position))
        return 1.0

    def _where(self, done: Any) -> tuple[Any, Any, Any]:
        """(the first thinning of a transition in its cycle, how many it takes, its cycle) after `done` transitions."""
        import jax.numpy as jnp

        one = jnp.ones((), jnp.int32)
        if self.schedule != "cyclical":
            return 0 * one, one, 0 * one
        warm = done < self.warmup
        since = jnp.where(warm, done, done - self.warmup)
        cycle, index = since // self._draws_per_cycle, since % self._draws_per_cycle
        first = jnp.where(index == 0, 0, self._explored + index)
        count = jnp.where(index == 0, self._explored + 1, one)
        if self.step_size is None:
            first, count = jnp.where(warm, self._explored, first), jnp.where(warm, one, count)
        return first, count, cycle

    # -- the kernel

    @property
    def weakness(self) -> str:
        return (
            "Its steps have no Metropolis correction: variances are too large, most where the posterior is narrowest. "
            "Chains stay near the mode that they begin in."
        )

    def gradients_of_a_start(self, size: Size) -> tuple[float, float, float]:
        fewest, usual, most = super().gradients_of_a_start(size)
        more = gradients_of_a_start(size.parameters) if self.whitens else (0.0, 0.0, 0.0)
        return fewest + more[0], usual + more[1], most + more[2]

    def gradients_of_a_draw(self, size: Size) -> tuple[float, float, float]:
        share = size.share(self.batch_size)
        least = self.steps_per_draw(size.rows, self.batch_size) * share
        most = 2.0 * least + 1.0 if self.control_variates else least
        if self.schedule == "cyclical":
            # Thinnings that explore have no draw of their own.
            most /= 1.0 - self.exploration
        return least, most, most * (1.0 + (self.schedule == "cyclical")) + 1.0

    def kernel(self, target: Target) -> Kernel:
        if self.whitens:
            return whitened(target, self._kernel)
        return self._kernel(target)

    @property
    def whitens(self) -> bool:
        """Whether the chain moves in coordinates of equal curvature."""
        if self.preconditioner == "auto":
            return self.step_size is None
        return self.preconditioner == "curvature"

    def _kernel(self, target: Target) -> Kernel:
        import jax
        import jax.numpy as jnp

        rows = target.problem.rows
        batch = rows_per_step(self.name, target.problem, self.batch_size)
        rule = self.rule(rows, batch is not None)
        evaluated = jax.value_and_grad(target.log_density)
        thinning = self.steps_per_draw(rows, batch)
        # Counted in batches: of the control variates two gradients each, and one over all rows for each thinning.
        gradients = thinning if batch is None else thinning * (2 if self.control_variates else 1)
        if batch is not None and self.control_variates:
            gradients += -(-rows // batch)
        # A number, also where a kernel is made while another is traced.
        with jax.ensure_compile_time_eval():
            begins = float(self.factor(self.warmup, self._explored / self.cycle_length))

        def begin(flat: Any, key: Any, data: Any) -> dict[str, Any]:
            key, inside = jax.random.split(key)
            probe = jax.random.normal(inside, flat.shape, flat.dtype)
            (lp, gradient), (_, curvature) = jax.jvp(lambda at: evaluated(at, data), (flat,), (probe,))
            # At a mode the gradient says nothing of its typical size; |A probe| does, A being the curvature.
            typical = jnp.maximum(gradient**2, jnp.where(jnp.isfinite(curvature), jnp.abs(curvature), 0.0))
            none = jnp.zeros((), jnp.int32)
            return {
                "walker": rule.begin(flat, lp, gradient, typical),
                "key": key,
                "done": none,
                "steps": none,
                "failed": none - 1,
                "lp": lp,
                "n_steps": none,
                "rate": jnp.zeros((), flat.dtype),
                "measure": jnp.zeros((), flat.dtype),
                "usable": jnp.isfinite(lp) & jnp.isfinite(gradient).all(),
            }

        def step(state: dict[str, Any], data: Any) -> dict[str, Any]:
            done = state["done"]
            warm = done < self.warmup
            first, count, _ = self._where(done)
            # A chain that is lost need not go on to the end of the warm-up, where that is noticed.
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
                density = self._density(target, evaluated, batch, data, walker["flat"], inside)

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

            carry = tuple(state[name] for name in ("walker", "key", "steps", "failed", "rate", "measure"))
            walker, key, taken, failed, rate, total = jax.lax.fori_loop(0, count, through, carry)
            return {
                "walker": walker,
                "key": key,
                "done": done + 1,
                "steps": taken,
                "failed": failed,
                "lp": walker["lp"] if "lp" in walker else target.log_density(walker["flat"], data),
                "n_steps": (count * gradients).astype(jnp.int32),
                "rate": rate,
                "measure": total / thinning,
                "usable": state["usable"],
            }

        def record(state: dict[str, Any]) -> dict[str, Any]:
            kept = {
                "u": state["walker"]["flat"],
                "lp": state["lp"],
                "n_steps": state["n_steps"],
                "step_size": state["rate"],
                "failed_step": state["failed"],
                rule.measure: state["measure"],
            }
            if self.schedule == "cyclical":
                kept["cycle"] = self._where(state["done"] - 1)[2]
            return kept

        return Kernel(
            begin,
            step,
            record,
            lambda state: state["usable"],
            cost=1.0 if batch is None else batch / rows,
        )

    def _density(
        self, target: Target, evaluated: Any, batch: int | None, data: Any, anchor: Any, key: Any
    ) -> Callable[[Any], Density]:
        """number of the step within a thinning -> the density that it sees. anchor: where the thinning begins."""
        if batch is None:
            return lambda index: lambda flat: evaluated(flat, data)
        rows = target.problem.rows
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

    # -- what is said of it

    @property
    def exact(self) -> bool:
        """Whether steps are accepted or rejected, so that draws are of the target and of nothing else."""
        return False

    @property
    def aim(self) -> str:
        """What is sampled: the target up to the bias of its steps."""
        if self.exact:
            return super().aim
        return "; ".join(
            part for part in (super().aim, "up to O(step size), for no step is rejected") if part
        )

    def told(self, statistics: Mapping[str, np.ndarray]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Figures "step_size" (the mean over the draws) and "variance_excess", and what follows from it."""
        figures = {"step_size": float(np.mean(statistics["step_size"]))}
        if "variance_excess" not in statistics:
            return figures, ()
        excess = figures["variance_excess"] = float(np.mean(statistics["variance_excess"]))
        if excess <= EXCESS_LIMIT:
            return figures, ()
        said = (
            f"{self.name} accepts every step: batches and step_size={figures['step_size']:.3g} make the variances "
            f"{excess:.0%} too large on average over directions; try "
            + ("a smaller step_size" if self.step_size else "a longer warm-up")
            + (", a larger batch_size or control_variates=True" if self.batch_size else "")
        )
        return figures, (said,)


def permuted_rows(key: Any, rows: int, size: int, steps: int) -> Any:
    """Row numbers (steps, size) of as many batches: random permutations of all rows, end to end, cut into `size`.

    A batch across the end of a permutation may hold a row twice; every row comes once per epoch all the same.
    """
    import jax

    keys = jax.random.split(key, -(-steps * size // rows))
    order = jax.lax.map(lambda each: jax.random.permutation(each, rows), keys).reshape(-1)
    return order[: steps * size].reshape(steps, size)
