"""Stochastic gradient Langevin dynamics: plain, preconditioned, and with a Metropolis correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.settings import OneOf, setting
from ppl_bnn.inference.mcmc.stochastic_gradient import Density, Pace, StepRule, StochasticGradient, Walker
from ppl_bnn.inference.sampling.sampler import tempered

# Added to the root mean square of the gradient per row.
DAMPING = 1e-5
# The acceptance at which the corrected chain moves fastest in many dimensions (Roberts and Rosenthal 1998).
BEST_ACCEPTANCE = 0.574


@dataclass(frozen=True)
class SGLD(StochasticGradient):
    """Stochastic gradient Langevin dynamics: plain, preconditioned, or with a Metropolis correction.

    With g an estimate of the gradient of the log density of u from a batch (or the gradient itself), xi ~ N(0, I) and
    h = step_size / N,

        u <- u + h G g + (2 h G)^(1/2) xi,        G = 1.

    Steps are not accepted or rejected, so the draws have a bias. On a Gaussian with precision A, and gradient noise of
    covariance V that commutes with it, their covariance is A^-1 (1 - h A / 2)^-1 (1 + h V / 2). Variances are too large
    by shares of h A / 2 for the step and h V / 2 for the batches, which dominates, as V is about A N / B. On any
    target, at stationarity,

        E[-(u - m)' grad log p] / P = 1 + variance_excess,        variance_excess = h / 2 E[g' G g] / P,

    for any m; under the target it is 1. So `variance_excess`, measured at each step, is the mean over directions of
    the share by which variances are too large. The default finds the step size at which it equals `allowance`. The bias
    of other functions is of the same order, O(h).

    Parameters
    ----------
    draws, warmup, chains : int
        Draws per chain that are kept and not kept, and the number of chains.
    start, jitter, chain_method, temperature, checkpoint, until, budget : optional
        As in `NUTS`.
    batch_size : int or None
        Rows per step, B, with the likelihood weighted by N / B. None takes all rows. Batches are pieces of permutations
        of all rows, new for each draw.
    step_size : float or None
        The learning rate s of gradient descent on -log p(u | D) / N. None finds it in the warm-up.
    allowance : float
        The share by which variances may be too large on average, when `step_size` is None.
    thinning : int or None
        Steps per draw. None: 20, and with batches 20 N / B, at most 400.
    schedule : {"constant", "decaying", "cyclical"}
        Schedule of the step size. "decaying": s (1 + n)^(-decay) at the n-th draw. "cyclical": in cycles of
        `cycle_length` times `thinning` steps it falls from s to 0 as a cosine.
    decay : float
        Exponent of the decaying schedule.
    cycle_length : int
        Length of a cycle of the cyclical schedule, in units of `thinning` steps.
    exploration : float
        Share of a cycle, at its beginning, without noise and without draws.
    control_variates : bool
        Whether to estimate the gradient by its value over all rows where the present draw began, plus a batch estimate
        of the difference.
    preconditioner : {"auto", "curvature", "rmsprop", None}
        "curvature": chains move in coordinates of equal curvature at the start, up to 1000 coordinates, in which
        `step_size` then is. None: the coordinates are unchanged. "auto": "curvature" if `step_size` is None.

        "rmsprop" (Li, Chen, Carlson and Carin 2016): G = 1 / (1e-5 + v^(1/2)), elementwise, with v a running mean of
        (g / N)^2, prior included. v is learned in the warm-up (mostly over its last fifth) and then stays fixed, so
        that the paper's Gamma, the divergence of G, is zero.
    correction : {None, "metropolis"}
        "metropolis": the Metropolis-adjusted Langevin algorithm (Roberts and Tweedie 1996), whose draws are exact. It
        needs all rows at each step and a constant step size, by default tuned to an acceptance of 0.574.
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
    Statistics have shape (chain, draw): `lp`, `n_steps` (gradients of batches), `step_size` (at the last step before
    the draw), `variance_excess` or, corrected, `acceptance_rate` (means over the steps of the draw), `cycle`
    (cyclical), and `failed_step` (the first step after which parameters were not finite; -1 in all results, since
    chains that fail raise an error). `info.figures` has the means "variance_excess" and "step_size".

    References
    ----------
    - Welling and Teh (2011), "Bayesian learning via stochastic gradient Langevin dynamics".
    - Li, Chen, Carlson and Carin (2016), "Preconditioned stochastic gradient Langevin dynamics for deep neural
      networks".
    - Roberts and Tweedie (1996), "Exponential convergence of Langevin distributions and their discrete approximations".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.SGLD(draws=20, warmup=20, chains=2, batch_size=50, step_size=0.01, start=bnn.MAP())
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape  # chains, draws
    (2, 20)
    """

    preconditioner: str | None = setting("auto", OneOf(("auto", "curvature", "rmsprop", None)))
    correction: str | None = setting(None, OneOf((None, "metropolis")))

    @property
    def limitations(self) -> str:  # type: ignore[override]
        if self.correction == "metropolis":
            return "Nothing, as chains grow long; it walks where others run, and stays near the mode that it begins in."
        return super().limitations

    def check(self) -> None:
        super().check()
        for name, wanted in (("batch_size", None), ("schedule", "constant")) if self.correction else ():
            got, where = getattr(self, name), "SGLD correction='metropolis'"
            why = f"{name}={wanted!r}, for a step is accepted by the density over all rows at one step size"
            UnsupportedError.check(got == wanted, where, why, f"{name}={got!r}", "correction=None")

    @property
    def aim(self) -> str:
        # With a correction draws are exact.
        return tempered(self.temperature) if self.correction else super().aim

    def rule(self, rows: int, batches: bool) -> StepRule:
        import jax
        import jax.numpy as jnp

        def preconditioned(now: Any, walker: Walker | None = None, weight: Any = None) -> tuple[Walker, Any]:
            """The part of a walker with v, after a step with squares `now` of the gradient per row; G, elementwise.

            Without a walker `now` is the initial v.
            """
            if self.preconditioner != "rmsprop":
                return {}, 1.0
            squares = now if walker is None else walker["squares"] + weight * (now - walker["squares"])
            return {"squares": squares}, 1.0 / (DAMPING + jnp.sqrt(squares))

        def begin(flat: Any, lp: Any, gradient: Any, typical: Any) -> Walker:
            kept, mass = preconditioned(typical / rows**2)
            if self.correction is None:
                return {"flat": flat, "steepness": 0.5 * jnp.mean(mass * typical), **kept}
            size = jnp.log(0.1 / jnp.mean(mass * typical))
            walker = {"flat": flat, "lp": lp, "gradient": gradient, "log_size": size, "mean_log_size": size}
            return {**walker, **kept}

        def move(walker: Walker, density: Density, pace: Pace, key: Any) -> tuple[Walker, Any, Any]:
            flat = walker["flat"]
            _, gradient = density(flat)
            kept, mass = preconditioned((gradient / rows) ** 2, walker, pace.weight)
            now = 0.5 * jnp.mean(mass * gradient**2)
            steepness, size = self.step_of(walker, pace, now)
            noise = pace.noise * jax.random.normal(key, flat.shape, flat.dtype)
            flat = flat + size * mass * gradient + jnp.sqrt(2.0 * size * mass) * noise
            return {"flat": flat, "steepness": steepness, **kept}, size, size * now

        def corrected(walker: Walker, density: Density, pace: Pace, key: Any) -> tuple[Walker, Any, Any]:
            flat, lp, gradient = walker["flat"], walker["lp"], walker["gradient"]
            kept, mass = preconditioned((gradient / rows) ** 2, walker, pace.weight)
            size = jnp.where(pace.tuned, jnp.exp(walker["log_size"]), pace.size)
            drawn, decided = jax.random.split(key)
            noise = jax.random.normal(drawn, flat.shape, flat.dtype)
            proposed = flat + size * mass * gradient + jnp.sqrt(2.0 * size * mass) * noise
            lp_there, gradient_there = density(proposed)
            back = flat - proposed - size * mass * gradient_there
            log_ratio = lp_there - lp + 0.5 * jnp.sum(noise**2) - jnp.sum(back**2 / mass) / (4.0 * size)
            # A proposal without a finite density, or without a gradient for the reverse step, is never accepted.
            probability = jnp.where(jnp.isfinite(log_ratio), jnp.exp(jnp.minimum(log_ratio, 0.0)), 0.0)
            taken = jax.random.bernoulli(decided, probability)
            log_size = walker["log_size"] + pace.weight * (probability - BEST_ACCEPTANCE)
            mean = walker["mean_log_size"] + pace.weight * (log_size - walker["mean_log_size"])
            there = {"flat": proposed, "lp": lp_there, "gradient": gradient_there}
            moved = {name: jnp.where(taken, value, walker[name]) for name, value in there.items()}
            return {**moved, "log_size": log_size, "mean_log_size": mean, **kept}, size, probability

        if self.correction is None:
            return StepRule(begin, move, lambda walker: self.allowance / walker["steepness"])
        return StepRule(begin, corrected, lambda walker: jnp.exp(walker["mean_log_size"]), "acceptance_rate")
