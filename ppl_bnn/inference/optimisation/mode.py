"""Reaching a mode: shared by MAP, Laplace and warm starts.

Adam with a learning rate that halves on each plateau of the loss, until it has shrunk by a given factor; then, in
float64 on the CPU, L-BFGS from there, because a Laplace approximation needs the gradient to be zero and Adam alone
stops where its step size says, not where the gradient does. The polish also makes the modes of the two systems agree
to many digits, so that a difference between them is meaningful.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import DivergenceError, InputError, message
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.cost import Effort
from ppl_bnn.inference.method import Start, Stopwatch, central_start, resolve_start
from ppl_bnn.posterior.posterior import Posterior

CHUNK = 100
PATIENCE = 2
SHRINK = 2.0**-8
# Steps without a better score of the held-out rows after which early stopping stops.
WAIT = 1000
# Iterations of L-BFGS at most.
REFINING = 500
# Families of priors whose log density has a kink.
KINKED = ("Laplace", "AsymmetricLaplace")
# Nats that the log joint may rise along its gradient from a mode that lies on kinks.
RISE = 0.1


@dataclass(frozen=True)
class Mode:
    """A point u (NumPy), how flat it is there, and how it was reached.

    losses: minus the log joint per step of Adam. gradient_norm: Euclidean norm of the gradient of the log joint.
    converged: whether the loss reached a plateau at the smallest learning rate before the steps ran out. failures: what
    there is to say of other starts. held_score: of a point that early stopping chose, which is no mode, the mean of log
    p(y | x, w) over the rows held out, in nats, and best_step the step that it was reached at; converged then says that
    no better one came in the steps that were waited for. rise: where the log joint has kinks, by how many nats it
    rises along its gradient, which need not vanish there; None elsewhere.
    gain: what a Newton step would gain, in nats, where that was computed; it then takes the place of the norm.
    """

    u: dict[str, np.ndarray]
    log_joint: float
    gradient_norm: float
    losses: np.ndarray
    converged: bool
    evaluations: int
    compile_seconds: float
    run_seconds: float
    failures: tuple[str, ...] = ()
    held_score: float | None = None
    best_step: int | None = None
    rise: float | None = None
    gain: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """What tells whether this is a mode: the norm of the gradient, or `rise` where the optimum lies on kinks."""
        if self.rise is not None:
            return {"rise_along_gradient": self.rise}
        return {"gradient_norm": self.gradient_norm}

    @property
    def warnings(self) -> tuple[str, ...]:
        found = list(self.failures)
        if self.held_score is not None:
            if not self.converged:
                found.append(
                    "the score of the held-out rows might still have risen when the steps ran out: give more steps"
                )
            return tuple(found)
        if not self.converged:
            found.append(
                "the loss was still falling when the steps ran out: give more steps or a larger learning rate"
            )
        scale = 1e-2 * max(1.0, abs(self.log_joint)) ** 0.5
        if self.rise is not None:
            if self.rise > RISE:
                found.append(f"not a mode: along its gradient the log joint rises by {self.rise:.3g} nats")
        elif self.gain is None and self.gradient_norm > scale:
            found.append(f"not a mode: the gradient of the log joint has norm {self.gradient_norm:.3g}")
        return tuple(found)


def find_mode(
    problem: Problem,
    *,
    start: Start = None,
    steps: int = 20_000,
    learning_rate: float = 0.02,
    tolerance: float = 1e-4,
    polish: bool = True,
    jacobian: bool = True,
    held: Collection[str] = (),
    progress: Progress,
    title: str = "MAP",
    restart: int = 0,
) -> Mode:
    """Maximise the log joint over u (parameters without a prior included).

    tolerance: a chunk of steps that lowers the mean loss by less than `tolerance` nats is part of a plateau.
    jacobian: whether log |dw/du| is part of the density (the mode in unconstrained coordinates) or not.
    held: sites that stay at the start. restart: which of several starts of its own this is.
    """
    program = problem.program
    u0 = starting_point(problem, start, progress, restart)
    fixed = {name: problem.system.asarray(u0[name]) for name in held}

    def loss(u: Mapping[str, Any], x: Any, y: Any) -> Any:
        return -program.log_joint({**u, **fixed}, x, y, jacobian=jacobian)

    # Held values are part of the compiled steps, which then serve no other start.
    key = None if held else ("adam", jacobian)
    adam = _ADAM[problem.system.name](problem, loss, u0, key)
    plateau = Plateau(learning_rate, tolerance)
    done = 0
    losses: list[np.ndarray] = []
    watch = Stopwatch()
    task = progress.task(f"{title} ({problem.system.name})", steps)
    try:
        while done < steps and not plateau.reached:
            values = adam.advance(plateau.rate)
            losses.append(values)
            done += len(values)
            mean = float(values.mean())
            if not np.isfinite(mean):
                raise diverged(title, mean, done, learning_rate)
            plateau.see(mean)
            task.update(steps if plateau.reached else done, loss=mean, learning_rate=plateau.rate)
        u = adam.values()
        refinement = Refinement(problem, jacobian)
        if polish and problem.dtype == "float64":
            u = refinement.mode(u, held=held)
    finally:
        task.close()
    value, norm, rise = refinement.standing(u, held)
    return Mode(
        u=u,
        log_joint=value,
        gradient_norm=norm,
        losses=np.concatenate(losses),
        converged=plateau.reached,
        evaluations=done + refinement.evaluations,
        compile_seconds=adam.compile_seconds,
        run_seconds=watch(),
        rise=rise,
    )


def effort_of_mode(steps: int, polish: bool = True) -> Effort:
    """What `find_mode` takes: the learning rate halves eight times, and L-BFGS comes after Adam."""
    whole = math.ceil(steps / CHUNK) * CHUNK
    shortest = min(whole, CHUNK * (1 + PATIENCE * (1 + round(-math.log2(SHRINK)))))
    # L-BFGS looks at its function once or twice in an iteration, and ends by itself after a hundred or so.
    return Effort(shortest, min(whole, 5000) + 100 * polish, whole + 3 * REFINING * polish)


class Plateau:
    """The learning rate: it halves where chunks of steps no longer lower the mean loss; `reached` at its smallest."""

    def __init__(self, rate: float, tolerance: float):
        self.rate, self.reached = rate, False
        self._smallest, self._tolerance = rate * SHRINK, tolerance
        self._best, self._stale = np.inf, 0

    def see(self, mean: float) -> None:
        """Take note of the mean loss of a chunk."""
        if mean < self._best - self._tolerance:
            self._best, self._stale = mean, 0
            return
        self._stale += 1
        if self._stale >= PATIENCE:
            self.reached = self.rate <= self._smallest
            self.rate, self._stale = self.rate / 2.0, 0


def diverged(title: str, mean: float, done: int, learning_rate: float) -> DivergenceError:
    return DivergenceError(
        f"{title}: "
        + message(
            "a finite loss",
            f"{mean} after {done} steps",
            f"learning_rate={learning_rate / 10:g}, or standardise=True",
        )
    )


def starting_point(
    problem: Problem, start: Start, progress: Progress, restart: int = 0
) -> dict[str, np.ndarray]:
    """Where an optimisation begins: `start`, or a draw from the prior brought to a size at which networks train.

    Of a posterior it is the centre, and a draw of one that has none.

    Scalars begin at their prior median of 15 draws. A weight tensor begins at a draw, shrunk where its root mean
    square exceeds fan_in^(-1/2), because a draw from a wide prior saturates every unit. Each `restart` has draws of its
    own.
    """
    if isinstance(start, Posterior) and start.approximation.has_centre:
        return central_start(problem, start)
    if start is not None:
        return resolve_start(problem, start, progress)[0]
    seed = problem.seed if restart == 0 else site_seed(f"restart {restart}", problem.seed) % 2**31
    draws = problem.program.prior_draws(problem.x, problem.y, seed, 15)
    u = {}
    for name, value in draws.items():
        if value.ndim == 1:
            u[name] = np.median(value)
            continue
        first = value[0]
        if problem.program.sites[name].is_param and np.array_equal(
            value, np.broadcast_to(first, value.shape)
        ):
            # The model gives the start itself; only what is drawn may be too wide.
            u[name] = first
            continue
        fan_in = int(np.prod(first.shape[:-1])) if first.ndim > 1 else 1
        size = float(np.sqrt(np.mean(first**2)))
        u[name] = first * min(1.0, fan_in**-0.5 / size) if size > 0 else first
    return {name: np.asarray(value) for name, value in u.items()}


@dataclass(frozen=True)
class Changes:
    """A change of hyper-parameters that a mode can follow without a new program, over the flat (P,) of all sites.

    The log joint is scale * log likelihood + log prior - 1/2 sum_i penalty_i (u_i - location_i)^2. A prior precision
    that is multiplied by tau is the penalty (tau - 1) times it, a noise precision multiplied by s is the scale s.
    """

    penalty: np.ndarray
    location: np.ndarray
    scale: float = 1.0


class Refinement:
    """Modes close to a known one, by L-BFGS over the sites that are not held, compiled once for all `Changes`."""

    def __init__(self, problem: Problem, jacobian: bool = True):
        program, system = problem.program, problem.system

        def loss(flat: Any, penalty: Any, location: Any, scale: Any, x: Any, y: Any) -> Any:
            log_joint = program.log_joint(program.unravel(flat), x, y, scale, jacobian)
            return 0.5 * (penalty * (flat - location) ** 2).sum() - log_joint

        function = system.value_and_grad(loss)
        if system.name == "numpyro":
            function = program._cached(("refinement", jacobian), lambda: system.compile(function))
        self._problem, self._function = problem, function
        self.evaluations = 0

    def value_and_grad(self, flat: np.ndarray, changes: Changes | None = None) -> tuple[float, np.ndarray]:
        """Minus the log joint under `changes` at a flat vector of all sites, and its gradient."""
        problem, system = self._problem, self._problem.system
        if changes is None:
            changes = Changes(np.zeros_like(flat), np.zeros_like(flat))
        arguments = (flat, changes.penalty, changes.location, np.asarray(changes.scale))
        value, gradient = self._function(*map(system.asarray, arguments), problem.x, problem.y)
        self.evaluations += 1
        return float(value), system.to_numpy(gradient).astype(np.float64)

    def standing(
        self, u: Mapping[str, np.ndarray], held: Collection[str] = ()
    ) -> tuple[float, float, float | None]:
        """(log joint, norm of its gradient, rise along it in nats where there are kinks, else None) at u (NumPy)."""
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
        """The most that the log joint gains on steps of length 1, 1/2, 1/4, ... 2^-20 along its gradient, in nats.

        At a mode on a kink it gains nothing, however large the gradient of one side of the kink.
        """
        norm = float(np.linalg.norm(gradient))
        if not 0.0 < norm < math.inf:
            return 0.0
        lengths = 2.0 ** -np.arange(21.0)
        values = [self.value_and_grad(flat - length * gradient / norm)[0] for length in lengths]
        return max(0.0, value - float(np.nanmin(values)))

    def mode(
        self,
        u: Mapping[str, np.ndarray],
        *,
        held: Collection[str] = (),
        changes: Changes | None = None,
        steps: int = REFINING,
    ) -> dict[str, np.ndarray]:
        """The mode reached from u (NumPy) with the sites `held` kept where they are."""
        from scipy.optimize import minimize

        begin, free = flat_sites(self._problem, u), self._free(held)
        if not free.any():
            return dict(u)

        def negative(part: np.ndarray) -> tuple[float, np.ndarray]:
            flat = begin.copy()
            flat[free] = part
            value, gradient = self.value_and_grad(flat, changes)
            return value, gradient[free]

        result = minimize(
            negative,
            begin[free],
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": steps, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9},
        )
        flat = begin.copy()
        if np.all(np.isfinite(result.x)) and result.fun <= self.value_and_grad(begin, changes)[0]:
            flat[free] = result.x
        return {name: np.asarray(value) for name, value in self._problem.program.unravel(flat).items()}


def kinks(problem: Problem) -> str:
    """What gives the log joint kinks, where modes lie and its gradient does not vanish; "" where nothing is known to.

    log p of a Laplace (double-exponential) distribution has one where its value is at its location: in a likelihood
    at residuals of zero, of which the optimum has some (a median regression passes through as many rows as it has
    weights), in a prior at weights of zero.
    """
    likelihood = getattr(problem.program.likelihood, "base", problem.program.likelihood)
    if getattr(likelihood, "family", type(likelihood).__name__) == "Laplace":
        return "the Laplace likelihood"
    sites = [site.name for site in problem.program.latents if site.family in KINKED]
    return f"the Laplace prior of {', '.join(sites)}" if sites else ""


def flat_sites(problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
    """The flat vector of all sites, parameters without a prior included, NumPy float64."""
    return np.concatenate(
        [np.asarray(u[name], dtype=np.float64).reshape(-1) for name in problem.program.sites]
    )


class _AdamNumPyro:
    """A chunk of steps as one compiled scan; the learning rate is an argument, so it is compiled once.

    key: under which the compiled steps are kept for other starts, or None.
    """

    def __init__(self, problem: Problem, loss: Callable[..., Any], u0: Mapping[str, np.ndarray], key: Any):
        import jax
        import optax

        transformation = optax.scale_by_adam()

        def step(state: Any, inputs: Any) -> Any:
            u, inner, rate, x, y = state
            value, gradient = jax.value_and_grad(loss)(u, x, y)
            updates, inner = transformation.update(gradient, inner)
            u = jax.tree.map(lambda a, b: a - rate * b, u, updates)
            return (u, inner, rate, x, y), value

        def chunk(u: Any, inner: Any, rate: Any, x: Any, y: Any) -> Any:
            (u, inner, *_), values = jax.lax.scan(step, (u, inner, rate, x, y), None, length=CHUNK)
            return u, inner, values

        self._problem = problem
        self._u = {name: problem.system.asarray(value) for name, value in u0.items()}
        self._inner = transformation.init(self._u)
        watch = Stopwatch()
        rate = problem.system.asarray(np.asarray(0.0))

        def build() -> Any:
            return jax.jit(chunk).lower(self._u, self._inner, rate, problem.x, problem.y).compile()

        self._chunk = build() if key is None else problem.program._cached(key, build)
        self.compile_seconds = watch()

    def advance(self, rate: float) -> np.ndarray:
        rate_array = self._problem.system.asarray(np.asarray(rate))
        self._u, self._inner, values = self._chunk(
            self._u, self._inner, rate_array, self._problem.x, self._problem.y
        )
        return np.asarray(values)

    def values(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in self._u.items()}


class _AdamPyro:
    compile_seconds = 0.0

    def __init__(self, problem: Problem, loss: Callable[..., Any], u0: Mapping[str, np.ndarray], key: Any):
        import torch

        self._problem = problem
        self._loss = loss
        self._u = {name: problem.system.asarray(value).requires_grad_() for name, value in u0.items()}
        self._optimiser = torch.optim.Adam(list(self._u.values()))

    def advance(self, rate: float) -> np.ndarray:
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        values = []
        for _ in range(CHUNK):
            self._optimiser.zero_grad()
            value = self._loss(self._u, self._problem.x, self._problem.y)
            value.backward()
            self._optimiser.step()
            values.append(value.detach())
        return np.array([float(value) for value in values])

    def values(self) -> dict[str, np.ndarray]:
        return {name: self._problem.system.to_numpy(value).copy() for name, value in self._u.items()}


_ADAM: dict[str, Any] = {"numpyro": _AdamNumPyro, "pyro": _AdamPyro}


def check_optimiser(name: str, steps: int, learning_rate: float, tolerance: float) -> None:
    """Raise `InputError` for settings with which no optimiser can work."""
    if not isinstance(steps, int) or steps < 1:
        raise InputError(
            f"{name}: " + message("a positive whole number of steps", repr(steps), "steps=20_000")
        )
    if not learning_rate > 0:
        raise InputError(
            f"{name}: " + message("a positive learning rate", repr(learning_rate), "learning_rate=0.02")
        )
    if not tolerance > 0:
        raise InputError(f"{name}: " + message("a positive tolerance", repr(tolerance), "tolerance=1e-4"))


def check_restarts(name: str, restarts: int, start: Start) -> None:
    """Raise `InputError` for a number of starts that is none, or for several starts at one given place."""
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 1:
        raise InputError(
            f"{name}: restarts: " + message("a positive whole number", repr(restarts), "restarts=5")
        )
    if restarts > 1 and start is not None:
        raise InputError(
            f"{name}: restarts: "
            + message("starts drawn from the prior", f"start= with restarts={restarts}", "start=None")
        )
