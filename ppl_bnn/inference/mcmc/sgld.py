"""Stochastic gradient Langevin dynamics: plain, preconditioned, and with a Metropolis correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ppl_bnn.core.errors import UnsupportedError, message, unknown_name
from ppl_bnn.inference.mcmc.stochastic_gradient import Density, Pace, Rule, StochasticGradient, Walker

CORRECTIONS = ("metropolis",)
# Added to the root mean square of the gradient per row.
DAMPING = 1e-5
# The acceptance at which the corrected chain moves fastest in many dimensions (Roberts and Rosenthal 1998).
BEST_ACCEPTANCE = 0.574


@dataclass(frozen=True)
class SGLD(StochasticGradient):
    """Stochastic gradient Langevin dynamics (Welling and Teh 2011): with g an estimate of the gradient of the log
    density of u from a batch (or the gradient itself), xi ~ N(0, I) and h = step_size / N,

        u <- u + h G g + (2 h G)^(1/2) xi,        G = 1.

    Nothing is rejected, so the draws are not of the target: on a Gaussian with precision A, and gradient noise of
    covariance V, their covariance S solves (1 - h A) S (1 - h A) + 2 h + h^2 V = S, that is S = A^-1 (1 - h A / 2)^-1
    (1 + h V / 2) where A and V commute. So variances are too large by shares of h A / 2 for the step and h V / 2 for
    the batches, and V is about N / B times A: with batches the second is what one pays for. On any target, at rest,

        E[-(u - m)' grad log p] / P = 1 + variance_excess,        variance_excess = h / 2 E[g' G g] / P,

    whatever m is, where 1 is the value under the target itself; so `variance_excess` is a mean over directions of the
    share of variance that is too much, exact in these terms, and is measured at each step. The default finds the step
    size at which it is the allowance. On models with other than Gaussian posteriors the bias of other functions is of
    the same order, O(h).

    preconditioner: "auto", "curvature" or None (see `StochasticGradient`), or "rmsprop" (Li, Chen, Carlson and Carin
    2016, "Preconditioned stochastic gradient Langevin dynamics for deep neural networks"): G = 1 / (1e-5 + v^(1/2)),
    elementwise, with v a running mean of (g / N)^2. Here v is learned in the warm-up (over its last fifth, mostly) and
    then stays, so that the term Gamma of the source, the divergence of G, is zero and not neglected. Here g has the
    prior in it.

    correction: None, or "metropolis": the step is a proposal that is accepted or not by the log density over all rows,
    the Metropolis-adjusted Langevin algorithm (Roberts and Tweedie 1996). Its draws are exact, of the target. All rows
    are needed at each step, and the step size is constant; where it is not given it is found at an acceptance of 0.574.

    Fields in common: see `StochasticGradient` on batch_size, step_size, allowance, thinning, schedule (decay,
    cycle_length, exploration), control_variates and preconditioner, and `Sampler` on the rest.

    Statistics, (chain, draw): `lp`, `n_steps` (gradients of batches), `step_size` (at the last step before the draw),
    `variance_excess` or, corrected, `acceptance_rate` (means over the steps of the draw), `cycle` (cyclical),
    `failed_step` (the first step after which parameters were not finite; -1, for such chains end in an error).
    figures: the means "variance_excess" and "step_size".

    Raises
    ------
    InputError, UnsupportedError: impossible arguments; mini-batches of a model whose rows cannot be taken apart.
    DivergenceError: parameters that are not finite, as come of too large a step.
    """

    correction: str | None = None
    preconditioners: ClassVar[tuple[str, ...]] = ("auto", "curvature", "rmsprop")

    @property
    def weakness(self) -> str:
        if self.correction == "metropolis":
            return "Nothing, as chains grow long; it walks where others run, and stays near the mode that it begins in."
        return super().weakness

    def check(self) -> None:
        if self.correction is not None and self.correction not in CORRECTIONS:
            raise unknown_name("correction", self.correction, CORRECTIONS)
        super().check()
        if self.correction is not None:
            for name, given, wanted in (
                ("batch_size", self.batch_size, None),
                ("schedule", self.schedule, "constant"),
            ):
                if given != wanted:
                    raise UnsupportedError(
                        "SGLD correction='metropolis': "
                        + message(
                            f"{name}={wanted!r}, for a step is accepted by the density over all rows at one step size",
                            f"{name}={given!r}",
                            "correction=None",
                        )
                    )

    @property
    def _learns(self) -> bool:
        return super()._learns or self.preconditioner == "rmsprop"

    @property
    def exact(self) -> bool:
        return self.correction is not None

    def rule(self, rows: int, batches: bool) -> Rule:
        return self._metropolis(rows) if self.correction else self._langevin(rows)

    # -- the preconditioner

    def _squares(self, typical: Any, rows: int) -> Walker:
        """What a walker starts with: v."""
        return {} if self.preconditioner != "rmsprop" else {"squares": typical / rows**2}

    def _learned(self, walker: Walker, gradient: Any, weight: Any, rows: int) -> Walker:
        """v after this step."""
        if self.preconditioner != "rmsprop":
            return {}
        squares = walker["squares"]
        return {"squares": squares + weight * ((gradient / rows) ** 2 - squares)}

    def _inverse_mass(self, kept: Walker) -> Any:
        """G, elementwise."""
        import jax.numpy as jnp

        return 1.0 if self.preconditioner != "rmsprop" else 1.0 / (DAMPING + jnp.sqrt(kept["squares"]))

    # -- without a correction

    def _langevin(self, rows: int) -> Rule:
        import jax
        import jax.numpy as jnp

        def begin(flat: Any, lp: Any, gradient: Any, typical: Any) -> Walker:
            kept = self._squares(typical, rows)
            return {"flat": flat, "steepness": 0.5 * jnp.mean(self._inverse_mass(kept) * typical), **kept}

        def move(walker: Walker, density: Density, pace: Pace, key: Any) -> tuple[Walker, Any, Any]:
            flat = walker["flat"]
            _, gradient = density(flat)
            kept = self._learned(walker, gradient, pace.weight, rows)
            mass = self._inverse_mass(kept)
            now = 0.5 * jnp.mean(mass * gradient**2)
            steepness = walker["steepness"] + pace.weight * (now - walker["steepness"])
            # Where the gradient has just become steeper than its mean, the mean comes too late.
            size = jnp.where(pace.tuned, self.allowance / jnp.maximum(steepness, now), pace.size)
            noise = pace.noise * jax.random.normal(key, flat.shape, flat.dtype)
            flat = flat + size * mass * gradient + jnp.sqrt(2.0 * size * mass) * noise
            return {"flat": flat, "steepness": steepness, **kept}, size, size * now

        return Rule(begin, move, lambda walker: self.allowance / walker["steepness"])

    # -- with one

    def _metropolis(self, rows: int) -> Rule:
        import jax
        import jax.numpy as jnp

        def begin(flat: Any, lp: Any, gradient: Any, typical: Any) -> Walker:
            kept = self._squares(typical, rows)
            size = jnp.log(0.1 / jnp.mean(self._inverse_mass(kept) * typical))
            walker = {"flat": flat, "lp": lp, "gradient": gradient, "log_size": size, "mean_log_size": size}
            return {**walker, **kept}

        def move(walker: Walker, density: Density, pace: Pace, key: Any) -> tuple[Walker, Any, Any]:
            flat, lp, gradient = walker["flat"], walker["lp"], walker["gradient"]
            kept = self._learned(walker, gradient, pace.weight, rows)
            mass = self._inverse_mass(kept)
            size = jnp.where(pace.tuned, jnp.exp(walker["log_size"]), pace.size)
            drawn, decided = jax.random.split(key)
            noise = jax.random.normal(drawn, flat.shape, flat.dtype)
            proposed = flat + size * mass * gradient + jnp.sqrt(2.0 * size * mass) * noise
            lp_there, gradient_there = density(proposed)
            back = flat - proposed - size * mass * gradient_there
            log_ratio = lp_there - lp + 0.5 * jnp.sum(noise**2) - jnp.sum(back**2 / mass) / (4.0 * size)
            # A proposal without a density, or without a gradient to come back by, is never accepted.
            probability = jnp.where(jnp.isfinite(log_ratio), jnp.exp(jnp.minimum(log_ratio, 0.0)), 0.0)
            taken = jax.random.bernoulli(decided, probability)
            log_size = walker["log_size"] + pace.weight * (probability - BEST_ACCEPTANCE)
            mean = walker["mean_log_size"] + pace.weight * (log_size - walker["mean_log_size"])
            walker = {
                "flat": jnp.where(taken, proposed, flat),
                "lp": jnp.where(taken, lp_there, lp),
                "gradient": jnp.where(taken, gradient_there, gradient),
                "log_size": log_size,
                "mean_log_size": mean,
                **kept,
            }
            return walker, size, probability

        return Rule(begin, move, lambda walker: jnp.exp(walker["mean_log_size"]), "acceptance_rate")
