"""Stein variational gradient descent: particles that climb the log joint and repel each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import OneOf, between, optional, setting, whole
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.curvature.conditioning import BAD, conditioning
from ppl_bnn.inference.flat_vector import by_site
from ppl_bnn.inference.method import Outcome
from ppl_bnn.inference.optimisation.loops import State, adam
from ppl_bnn.inference.optimisation.mode import trainable
from ppl_bnn.inference.start import Start, resolve_start
from ppl_bnn.inference.variational import iterated
from ppl_bnn.language import ops
from ppl_bnn.posterior.approximation import Point

# Default number of particles: EACH per coordinate, between FEW and MANY, for at most SMALL coordinates; otherwise FEW.
# In more dimensions, ten times as many would show no more of the variance.
FEW, MANY, EACH, SMALL = 20, 100, 50, 10


@dataclass
class Particles(Point):
    """n equally weighted points: a fixed sample without a density.

    Attributes
    ----------
    u : dict of str to ndarray
        By site, shape (n, *unconstrained shape).

    Notes
    -----
    There are no other draws, and a posterior of particles holds each once. `draw(count)` gives each particle equally
    often, in random order, and the remainder of count / n at random without repetition.
    """

    u: dict[str, np.ndarray]
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    @property
    def size(self) -> int:
        """n, the number of particles."""
        return len(next(iter(self.u.values())))

    stored_count = property(attrgetter("size"))  # type: ignore[override]

    def stored_draws(self) -> dict[str, np.ndarray]:
        return dict(self.u)

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        times, rest = divmod(count, self.size)
        every = np.tile(np.arange(self.size), times)
        picked = rng.permutation(np.concatenate([every, rng.choice(self.size, rest, replace=False)]))
        return {name: value[picked] for name, value in self.u.items()}

    def centre(self) -> dict[str, np.ndarray]:
        """The first particle, because a mean of weights over symmetric modes is not a useful network.

        Returns
        -------
        dict of str to ndarray
            Unconstrained coordinates by site.
        """
        return {name: value[0] for name, value in self.u.items()}

    @property
    def has_centre(self) -> bool:  # type: ignore[override]
        return self.size == 1


@dataclass(frozen=True)
class SVGD(iterated.IteratedMethod):
    """Stein variational gradient descent: particles that move together towards the posterior [1]_.

    The n particles u_1..u_n, in unconstrained coordinates, are moved along

        phi_i = 1/n sum_j [ k(u_j, u_i) grad log p(u_j, D) + grad_{u_j} k(u_j, u_i) ],  k(u, v) = exp(-|u - v|^2 / h).

    Among the directions of unit norm in the kernel's space, phi lowers KL(particles || posterior) fastest. The first
    term climbs the log joint, which includes log |dw/du|; the second separates the particles. A single particle finds
    the mode.

    **The variances of the particles are too small, for any practical number of particles** (see Notes).

    Parameters
    ----------
    particles : int or None
        Number n of particles. None for 50 per coordinate, up to 100, if there are at most 10 coordinates, and 20
        otherwise.
    steps : int, default 5000
        Number of steps.
    learning_rate : float, default 0.02
        It is held for the first half of the steps and falls linearly to a hundredth of it over the second.
    optimiser : {"adam", "adagrad"}
        The optimiser.
    bandwidth : float or None
        Bandwidth h. None for the median of |u_i - u_j|^2 over pairs divided by log(n + 1), computed at each step.
    batch_size : int or None
        Rows per step, with the likelihood scaled by N / batch_size; None for all rows.
    start : method, posterior, dict or None
        None for draws from the prior (weight tensors shrunk to a size at which networks train), a posterior for draws
        from it, a dict of constrained values, or a method, which is fitted once per particle with its own seed.
    jitter : float, default 0.1
        Standard deviation of the noise that separates starting points that coincide.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    DivergenceError
        The loss became infinite or NaN.
    UnsupportedError
        A parameter without a prior, or mini-batches of a model whose rows cannot be separated.

    Notes
    -----
    On a standard normal in P dimensions, n particles converge to these variances per coordinate instead of 1 (median
    bandwidth, `comparisons/performance/badly_scaled.py --only particles`; see [2]_)::

        n          P = 1     2      4      8      20
        20         0.86   0.76   0.45   0.32   0.14
        50         0.94   0.88   0.69   0.35   0.18
        100        0.96   0.92   0.79   0.52   0.18
        200        0.98   0.95   0.83   0.58   0.23

    In P >= n - 1 dimensions they settle at the corners of a regular simplex, with the variance log(n + 1) (n - 1) / (n
    P), and a warning says so. The result is then closer to an ensemble of modes than to a posterior. No correction is
    applied, because it would push particles in several modes apart.

    The draws of the posterior are the particles, shape (1, n). History: "loss", the mean of -log p(u_i, D) over the
    particles per step. Figures: the last "bandwidth"; "converged", 1 if the loss was on a plateau when the learning
    rate began to fall and, for up to 300 coordinates, the curvature at a particle, scaled per coordinate, has a
    condition number of at most 1e4, because the kernel has one bandwidth for all directions.

    References
    ----------
    .. [1] Liu and Wang (2016).
    .. [2] Ba, Erdogdu, Ghassemi, Sun, Suzuki, Wu and Zhang (2022). Understanding the variance collapse of SVGD in high
       dimensions.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.SVGD(particles=5, steps=100), standardise=True)
    >>> posterior.shape  # one chain of particles
    (1, 5)
    """

    particles: int | None = setting(None, optional(whole()), advice="20")
    steps: int = setting(5_000, whole())
    learning_rate: float = setting(0.02, between())
    optimiser: str = setting("adam", OneOf(("adam", "adagrad")))
    bandwidth: float | None = setting(None, optional(between()), advice="None, for the median")
    batch_size: int | None = iterated.batch_setting()
    start: Start = None
    jitter: float = setting(0.1, between())
    finds_centre: ClassVar[bool] = False
    last: ClassVar[float] = 0.01  # The iterates are not averaged, so the last steps must be small.
    remedy: ClassVar[str] = "start=MAP()"
    limitations: ClassVar[str] = (
        "In many dimensions particles repel each other too little: variances are too small, the more so the fewer "
        "particles there are. By default they show 0.94 of the variance of a standard normal in one dimension, "
        "0.79 in four, 0.14 in twenty."
    )

    def count(self, size: int) -> int:
        """The number of particles for `size` coordinates."""
        if self.particles is not None:
            return self.particles
        return FEW if size > SMALL else int(np.clip(EACH * size, FEW, MANY))

    def effort(self, size: Size) -> Effort:
        count = self.count(size.parameters)
        found = Effort.exactly(
            self.steps * count * size.share(self.batch_size),
            together=count,
            operations=4.0 * self.steps * count**2 * size.parameters,
        )
        return found.after(effort_of_start(self.start, size, count))

    def plan(self, problem: Problem, progress: Progress) -> iterated.Plan:
        evaluated = self.gradients(problem)

        def rule(state: State, now: State, x: Any, y: Any, _: Any) -> tuple[State, Any]:
            values, gradients = evaluated(state["particles"], x, y)
            direction = stein_direction(state["particles"], -gradients, self.bandwidth)
            if self.optimiser == "adam":
                step, moments = adam(state, direction, now["step"])
            else:
                moments = {"first": state["first"], "second": state["second"] + direction**2}
                step = direction / (ops.sqrt(moments["second"]) + 1e-8)
            return {"particles": state["particles"] + now["rate"] * step, **moments}, values.mean()

        count = self.count(problem.program.parameter_count)
        points = resolve_start(problem, self.start, progress, count=count)
        if self.start is None:
            # A scalar, such as a noise, is no weight.
            points = [
                {name: trainable(value) if np.ndim(value) else value for name, value in point.items()}
                for point in points
            ]
        particles = iterated.separated(problem, points, self.jitter, "svgd jitter")
        zeros = np.zeros_like(particles)
        start = {"particles": particles, "first": zeros, "second": zeros}
        return iterated.Plan(rule, start, functools.partial(self._finish, problem))

    def _finish(self, problem: Problem, state: Mapping[str, np.ndarray]) -> Outcome:
        particles = state["particles"]
        figures = {"bandwidth": float(self.bandwidth or median_bandwidth(particles))}
        warnings = self._collapse(*particles.shape)
        scaling = conditioning(problem, particles[0])
        if scaling is not None and scaling.number > BAD:
            figures["converged"] = 0.0
            slow = f"{self.name} has not converged: its kernel has one bandwidth for all directions. "
            warnings = (slow + scaling.explanation(), *warnings)
        return Outcome(Particles(by_site(problem, particles)), figures=figures, warnings=warnings)

    def _collapse(self, count: int, size: int) -> tuple[str, ...]:
        """A warning if there are no more particles than dimensions."""
        if count > size or count == 1:
            return ()
        shown = math.log(count + 1) * (count - 1) / (count * size)
        return (
            f"SVGD with {count} particles in {size} dimensions: the variances of so few particles are too small (of a "
            f"standard normal they would show {shown:.2g} of 1), so read the spread as that of an ensemble; try more "
            "particles, SVI() or NUTS()",
        )


# --- the direction, over ops ----------------------------------------------------------------------


def stein_direction(particles: Any, gradients: Any, bandwidth: float | None = None) -> Any:
    """The direction phi = [K g + 2/h (diag(K 1) u - K u)] / n (n, P) of SVGD, K_ij = k(u_i, u_j).

    For particles u (n, P), gradients g (n, P) of the log density, and the bandwidth h, by default `median_bandwidth`.
    """
    count = particles.shape[0]
    if count == 1:
        return gradients
    about, squared = _pairs(particles)
    h = _median_bandwidth(squared) if bandwidth is None else bandwidth
    kernel = ops.exp(-squared / h)
    repulsion = kernel.sum(1)[:, None] * about - kernel @ about
    return (kernel @ gradients + (2.0 / h) * repulsion) / count


def median_bandwidth(particles: Any) -> Any:
    """The median of |u_i - u_j|^2 over pairs i < j of (n, P), divided by log(n + 1); 1 for a single particle."""
    return 1.0 if particles.shape[0] == 1 else _median_bandwidth(_pairs(particles)[1])


def _pairs(particles: Any) -> tuple[Any, Any]:
    """The particles about their mean, and |u_i - u_j|^2 (n, n)."""
    # Only differences matter; subtracting the mean preserves their precision.
    about = particles - particles.mean(0)
    products = about @ about.T
    norms = ops.einsum("ii->i", products)
    return about, norms[:, None] + norms[None, :] - 2.0 * products


def _median_bandwidth(squared: Any) -> Any:
    count = squared.shape[0]
    pairs = squared[np.triu_indices(count, 1)]
    return ops.namespace(squared).quantile(pairs, 0.5) / math.log(count + 1)
