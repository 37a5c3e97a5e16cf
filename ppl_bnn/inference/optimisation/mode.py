"""Finding a mode: shared by MAP, Laplace and warm starts.

The learning rate of Adam halves on each plateau of the loss. In float64 on the CPU, L-BFGS follows: a Laplace
approximation needs a zero gradient, and Adam alone stops at a distance set by its step size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import DivergenceError, InputError
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.cost import Effort
from ppl_bnn.inference.flat_vector import Values, by_site, flat_sites
from ppl_bnn.inference.method import Stopwatch
from ppl_bnn.inference.optimisation.adam import descent
from ppl_bnn.inference.optimisation.loops import STRETCH
from ppl_bnn.inference.start import Start, central_start, resolve_start
from ppl_bnn.posterior.posterior import Posterior

PATIENCE = 2
SHRINK = 2.0**-8
# Early stopping ends after this many steps without a better score of the held-out rows.
WAIT = 1000
# Maximum iterations of L-BFGS.
REFINING = 500
# Families of priors whose log density has a kink.
KINKED = ("Laplace", "AsymmetricLaplace")
# Nats by which the log joint may rise along its gradient from a mode at a kink.
RISE = 0.1


@dataclass(frozen=True)
class Mode:
    """A mode of the log joint at `u` (unconstrained, NumPy, by site), and how it was found.

    `losses` are minus the log joint at each step of Adam; `evaluations` counts gradients; `failures` are warnings about
    other starts. `converged`: the loss reached a plateau at the smallest learning rate (with early stopping: the last
    `WAIT` steps gave no better score). With early stopping, `held_score` is the mean of log p(y | x, w) over the
    held-out rows at `best_step`. `rise`, if the log joint has kinks, is its rise along its gradient in nats, which need
    not vanish there. `gain` of a Newton step in nats, if computed, replaces the gradient norm as the criterion.
    """

    u: dict[str, np.ndarray]
    log_joint: float
    gradient_norm: float
    losses: np.ndarray
    converged: bool
    evaluations: int
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    failures: tuple[str, ...] = ()
    held_score: float | None = None
    best_step: int | None = None
    rise: float | None = None
    gain: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The evidence that this is a mode: the norm of the gradient, or `rise` if the optimum is at kinks."""
        if self.rise is not None:
            return {"rise_along_gradient": self.rise}
        return {"gradient_norm": self.gradient_norm}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user."""
        scale, rise = 1e-2 * max(1.0, abs(self.log_joint)) ** 0.5, self.rise
        more = "the loss was still falling when the steps ran out: give more steps or a larger learning rate"
        if self.held_score is not None:
            more = "the score of the held-out rows might still have risen when the steps ran out: give more steps"
        found = list(self.failures) + [more] * (not self.converged)
        if self.held_score is not None:
            return tuple(found)
        if rise is not None and rise > RISE:
            found.append(f"not a mode: along its gradient the log joint rises by {rise:.3g} nats")
        elif rise is None and self.gain is None and self.gradient_norm > scale:
            found.append(f"not a mode: the gradient of the log joint has norm {self.gradient_norm:.3g}")
        return tuple(found)


@dataclass(frozen=True)
class Search:
    """How a mode is sought: the settings of `find_mode` and `find_modes`.

    Without `jacobian` the density omits log |dw/du|. A stretch of steps that lowers the mean loss by less than
    `tolerance` nats is part of a plateau. L-BFGS follows Adam if `polish` says so, in float64.
    """

    progress: Progress
    start: Start = None
    steps: int = 20_000
    learning_rate: float = 0.02
    tolerance: float = 1e-4
    polish: bool = True
    jacobian: bool = True
    title: str = "MAP"

    def begin(self, problem: Problem, restart: int = 0) -> dict[str, np.ndarray]:
        """The `starting_point`."""
        return starting_point(problem, self.start, self.progress, restart)

    def diverged(self, mean: float, done: int) -> DivergenceError:
        """The error for a mean loss that is not finite."""
        advice = f"learning_rate={self.learning_rate / 10:g}, or standardise=True"
        return DivergenceError.of(self.title, "a finite loss", f"{mean} after {done} steps", advice)


def find_mode(problem: Problem, *, held: Collection[str] = (), restart: int = 0, **settings: Any) -> Mode:
    """Maximise the log joint over u, including parameters without a prior; `settings` are those of a `Search`.

    The sites `held` stay at the start; `restart` is the index of the start among several (see `starting_point`).
    `DivergenceError` is raised if the loss is not finite.
    """
    search = Search(**settings)
    jacobian, steps = search.jacobian, search.steps
    program = problem.program
    u0 = search.begin(problem, restart)
    fixed = {name: problem.system.asarray(u0[name]) for name in held}

    def loss(u: Mapping[str, Any], key: Any, weight: Any, x: Any, y: Any) -> tuple[Any, tuple[()]]:
        return -program.log_joint({**u, **fixed}, x, y, jacobian=jacobian), ()

    # Held values are part of the compiled steps, so these cannot be reused for another start.
    adam = descent(problem, loss, u0, key=None if held else ("adam", jacobian), fused=False)
    plateau = Plateau(search.learning_rate, search.tolerance)
    done, ended = 0, False
    losses: list[np.ndarray] = []
    watch = Stopwatch()
    with closing(search.progress.task(f"{search.title} ({problem.system.name})", steps)) as task:
        while done < steps and not plateau.reached and not ended:
            rates = np.full(STRETCH, plateau.rate)
            values = adam.advance(rates, np.zeros(STRETCH), np.ones(STRETCH))[:, 0]
            losses.append(values)
            done += len(values)
            mean = float(values.mean())
            if not np.isfinite(mean):
                raise search.diverged(mean, done)
            plateau.see(mean)
            now = steps if plateau.reached else done
            ended = bool(task.update(now, loss=mean, learning_rate=plateau.rate))
        found = {"converged": plateau.reached, "compile_seconds": adam.compile_seconds}
        trail, polish = np.concatenate(losses), search.polish and not ended
        mode = Refinement(problem, jacobian).found(adam.latest(), trail, polish, held, **found)
    return replace(mode, run_seconds=watch() - adam.compile_seconds)


def effort_of_mode(steps: int, polish: bool = True) -> Effort:
    """The cost of `find_mode`: the learning rate halves eight times, and L-BFGS follows Adam."""
    whole = math.ceil(steps / STRETCH) * STRETCH
    shortest = min(whole, STRETCH * (1 + PATIENCE * (1 + round(-math.log2(SHRINK)))))
    # L-BFGS evaluates its function once or twice per iteration, and usually ends after about a hundred.
    return Effort(shortest, min(whole, 5000) + 100 * polish, whole + 3 * REFINING * polish)


class Plateau:
    """The learning rate, which halves when stretches of steps no longer lower the mean loss by `tolerance` nats.

    `reached`: the loss is on a plateau at the smallest rate.
    """

    def __init__(self, rate: float, tolerance: float):
        self.rate, self.reached = rate, False
        self._smallest, self._tolerance = rate * SHRINK, tolerance
        self._best, self._stale = np.inf, 0

    def see(self, mean: float) -> None:
        """Record the mean loss of a stretch and adapt the rate."""
        if mean < self._best - self._tolerance:
            self._best, self._stale = mean, 0
            return
        self._stale += 1
        if self._stale >= PATIENCE:
            self.reached = self.rate <= self._smallest
            self.rate, self._stale = self.rate / 2.0, 0


def starting_point(
    problem: Problem, start: Start, progress: Progress, restart: int = 0
) -> dict[str, np.ndarray]:
    """The point at which an optimisation begins, in unconstrained coordinates by site.

    It is the centre of a posterior (a draw if it has none), another start as by `resolve_start`, or a draw from the
    prior, one for each `restart`. From the prior, scalars start at the median of 15 draws, and weight tensors at a
    `trainable` draw.
    """
    if isinstance(start, Posterior) and start.approximation.has_centre:
        return central_start(problem, start)
    if start is not None:
        return resolve_start(problem, start, progress)[0]
    seed = problem.seed if restart == 0 else site_seed(f"restart {restart}", problem.seed) % 2**31
    sites = problem.program.sites
    # One draw gives weight tensors their start; each runs the whole network where the system does not compile it.
    several = any(site.is_param or not site.unconstrained_shape for site in sites.values())
    draws = problem.program.prior_draws(problem.x, problem.y, seed, 15 if several else 1)

    def begin(name: str, value: np.ndarray) -> Any:
        if value.ndim == 1:
            return np.median(value)
        if sites[name].is_param and np.array_equal(value, np.broadcast_to(value[0], value.shape)):
            # The model gives this start; only random draws may be too wide.
            return value[0]
        return trainable(value[0])

    return {name: np.asarray(begin(name, value)) for name, value in draws.items()}


def trainable(value: np.ndarray) -> np.ndarray:
    """A draw of a weight tensor, shrunk if its root mean square exceeds fan_in^(-1/2); larger ones saturate units."""
    fan_in = int(np.prod(value.shape[:-1])) if value.ndim > 1 else 1
    size = float(np.sqrt(np.mean(value**2)))
    return value * min(1.0, fan_in**-0.5 / size) if size > 0 else value


@dataclass(frozen=True)
class Changes:
    """A change of hyper-parameters that a mode can follow without a new program. The log joint becomes

        scale * log likelihood + log prior - 1/2 sum_i penalty_i (u_i - location_i)^2,

    with `penalty` and `location` over the flat vector of all sites, (P,). A prior precision times tau is the penalty
    (tau - 1) times that precision, a noise precision times s the scale s.
    """

    penalty: np.ndarray
    location: np.ndarray
    scale: float = 1.0


class Refinement:
    """Modes close to a known one, by L-BFGS over the sites that are not held; compiled once for all `Changes`.

    Without `jacobian`, log |dw/du| is not part of the density.
    """

    def __init__(self, problem: Problem, jacobian: bool = True):
        program, system = problem.program, problem.system

        def loss(flat: Any, penalty: Any, location: Any, scale: Any, x: Any, y: Any) -> Any:
            log_joint = program.log_joint(program.unravel(flat), x, y, scale, jacobian)
            return 0.5 * (penalty * (flat - location) ** 2).sum() - log_joint

        def build() -> Callable[..., Any]:
            return system.compile(system.value_and_grad(loss))

        self._problem, self._function = problem, program.cached(("refinement", jacobian), build)
        self.evaluations = 0

    def value_and_grad(self, flat: np.ndarray, changes: Changes | None = None) -> tuple[float, np.ndarray]:
        """Minus the log joint at the flat vector of all sites, and its gradient."""
        problem, system = self._problem, self._problem.system
        if changes is None:
            changes = Changes(np.zeros_like(flat), np.zeros_like(flat))
        arguments = (flat, changes.penalty, changes.location, np.asarray(changes.scale))
        value, gradient = self._function(*map(system.asarray, arguments), problem.x, problem.y)
        self.evaluations += 1
        return float(value), system.to_numpy(gradient).astype(np.float64)

    def standing(self, u: Values, held: Collection[str] = ()) -> tuple[float, float, float | None]:
        """(log joint, norm of its gradient, rise along the gradient in nats if there are kinks, otherwise None).

        The rise is over coordinates of sites that are not `held`.
        """
        flat = flat_sites(self._problem, u)
        value, gradient = self.value_and_grad(flat)
        norm = float(np.linalg.norm(gradient))
        if not kinks(self._problem):
            return -value, norm, None
        return -value, norm, self._rise_along_gradient(flat, value, gradient * self._free(held))

    def _free(self, held: Collection[str]) -> np.ndarray:
        """Which coordinates of the flat vector belong to sites that are not `held`."""
        sites = self._problem.program.sites.values()
        return np.concatenate([np.full(site.size, site.name not in held) for site in sites])

    def _rise_along_gradient(self, flat: np.ndarray, value: float, gradient: np.ndarray) -> float:
        """The largest gain of the log joint, in nats, on steps of length 1, 1/2, ... 2^-20 along its gradient.

        It is zero at a mode on a kink, however large the gradient on one side is.
        """
        norm = float(np.linalg.norm(gradient))
        if not 0.0 < norm < math.inf:
            return 0.0
        lengths = 2.0 ** -np.arange(21.0)
        values = [self.value_and_grad(flat - length * gradient / norm)[0] for length in lengths]
        return max(0.0, value - float(np.nanmin(values)))

    def found(
        self, u: Values, losses: np.ndarray, polish: bool, held: Collection[str] = (), **more: Any
    ) -> Mode:
        """The `Mode` at the end `u` of Adam with these `losses`, after L-BFGS if wanted; `more` are further fields."""
        if polish and self._problem.dtype == "float64":
            u = self.mode(u, held=held)
        log_joint, norm, rise = self.standing(u, held)
        count = len(losses) + self.evaluations
        return Mode(dict(u), log_joint, norm, losses, evaluations=count, rise=rise, **more)

    def mode(
        self, u: Values, *, held: Collection[str] = (), changes: Changes | None = None, steps: int = REFINING
    ) -> dict[str, np.ndarray]:
        """The mode reached from u in at most `steps` iterations; the sites `held` stay."""
        from scipy.optimize import minimize

        begin, free = flat_sites(self._problem, u), self._free(held)
        if not free.any():
            return dict(u)

        def negative(part: np.ndarray) -> tuple[float, np.ndarray]:
            flat = begin.copy()
            flat[free] = part
            value, gradient = self.value_and_grad(flat, changes)
            return value, gradient[free]

        options = {"maxiter": steps, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9}
        result = minimize(negative, begin[free], jac=True, method="L-BFGS-B", options=options)
        flat = begin.copy()
        if np.all(np.isfinite(result.x)) and result.fun <= self.value_and_grad(begin, changes)[0]:
            flat[free] = result.x
        return by_site(self._problem, flat)


def kinks(problem: Problem) -> str:
    """The part of the model that gives the log joint kinks, where the gradient of a mode does not vanish, or "".

    The log density of a Laplace distribution has a kink at its location: in a likelihood at residuals of zero (a median
    regression passes through as many rows as it has weights), in a prior at weights of zero.
    """
    if problem.program.likelihood.has_kink:
        return "the Laplace likelihood"
    sites = [site.name for site in problem.program.latents if site.family in KINKED]
    return f"the Laplace prior of {', '.join(sites)}" if sites else ""


def refuse_restarts_from_a_start(name: str, restarts: int, start: Start) -> None:
    """Refuse several starts at one given point."""
    wanted, got = "starts drawn from the prior", f"start= with restarts={restarts}"
    InputError.check(restarts == 1 or start is None, f"{name} restarts", wanted, got, "start=None")
