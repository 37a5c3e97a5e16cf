"""SWAG (stochastic weight averaging, Gaussian): a Gaussian from the first two moments of the iterates of SGD."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, ravel, site_seed, unravel
from ppl_bnn.core.errors import DivergenceError, InputError
from ppl_bnn.core.progress import Progress, ended_early
from ppl_bnn.core.settings import OneOf, between, optional, setting, whole
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.curvature.conditioning import conditioning
from ppl_bnn.inference.curvature.gaussians import LowRankCovariance
from ppl_bnn.inference.flat_vector import by_site, flat_sites, minus_log_joint
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation import loops
from ppl_bnn.inference.optimisation.mode import Mode, effort_of_mode, starting_point
from ppl_bnn.inference.optimisation.several_modes import find_modes, stacked_rows
from ppl_bnn.inference.start import Start
from ppl_bnn.posterior.approximation import Approximation

SCHEDULES = ("constant", "cyclical")
# The rate at the end of a cycle, as a fraction of the full rate.
CYCLE_END = 0.01
# Number of rows from whose gradients the noise of a batch is estimated.
NOISE_ROWS = 256
# Smallest ratio of the median variance of the iterates to that from the curvature. Below it the iterates have not
# spread: they were collected before SGD was stationary, or a stiff direction limited the rate.
NARROW = 0.1
# Maximum number of steps that are compiled together.
LONGEST = 1000
# What a path and an `Outcome` both have.
SPENT = ("gradient_evaluations", "compile_seconds", "run_seconds")


@dataclass
class SWAGGaussian(Approximation):
    """The Gaussian of SWAG, N(mean, 1/2 diag(variance) + 1/(2 (K - 1)) D D').

    D are the last K `deviations` of iterates from their running mean, (K, *shape) by site. Coordinates of variance zero
    did not move: they have no spread, and the density is over the others.
    """

    mean: dict[str, np.ndarray]
    variance: dict[str, np.ndarray]
    deviations: dict[str, np.ndarray]
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"
    has_centre: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        """K, the number of deviations."""
        return len(next(iter(self.deviations.values())))

    @property
    def _factor(self) -> np.ndarray:
        """The factor F (K, P) of the low-rank part F'F of the covariance."""
        return ravel(self.deviations, self.mean, 1) / math.sqrt(2.0 * (self.rank - 1))

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        mean, scale = ravel(self.mean), np.sqrt(0.5 * ravel(self.variance, self.mean))
        flat = mean + scale * rng.standard_normal((count, len(mean)))
        flat += rng.standard_normal((count, self.rank)) @ self._factor
        return unravel(flat, {name: value.shape for name, value in self.mean.items()})

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        variance = ravel(self.variance, self.mean)
        moves = variance > 0.0
        scale = np.sqrt(0.5 * variance[moves])
        deviation = (ravel(u, self.mean, 1) - ravel(self.mean))[:, moves]
        return LowRankCovariance.of(scale, self._factor[:, moves]).log_prob(deviation)

    def centre(self) -> dict[str, np.ndarray]:
        return dict(self.mean)

    def covariance(self) -> np.ndarray:
        """The covariance of the flat vector, (P, P)."""
        return 0.5 * np.diag(ravel(self.variance, self.mean)) + self._factor.T @ self._factor


@dataclass(frozen=True)
class SWAG(Method):
    """Stochastic gradient descent from a mode, and a Gaussian with the moments of its iterates [1]_.

    With l(u) = -log p(w(u), D) - log |dw/du| and g the gradient of l from a batch of B rows, its likelihood scaled by N
    / B,

        u <- u - rate / N g(u).

    Of the iterates u_1..u_T that are collected, one every `every` steps,

        mean = 1/T sum_i u_i        v = 1/T sum_i u_i^2 - mean^2
        D = the last K of u_i - mean_i,  mean_i = 1/i sum_{j <= i} u_j
        q = N(mean, 1/2 diag(v) + 1/(2 (K - 1)) D D').

    The variances of q are those of the iterates, its covariances half of theirs.

    **q describes the noise of SGD, not the posterior.** Its width is set by the learning rate (see Notes).

    Parameters
    ----------
    collections : int, default 100
        T, the number of collected iterates.
    rank : int, default 20
        K, at least 2.
    every : int or None
        Steps between two collections; None for one pass over the rows.
    burn_in : int, default 20
        Steps before the first collection, in units of `every`.
    batch_size : int or None
        B; None for a tenth of the rows, at most 128.
    learning_rate : float or None
        For the loss per row, as in the paper. None for the rate of the stationary Gaussian closest to the posterior.
    schedule : {"constant", "cyclical"}
        "cyclical": within each `every` steps the rate falls linearly to a hundredth, and iterates are collected at the
        end of the cycle [4]_. The spread is then that between the ends of the cycles.
    start : method, posterior, dict or None
        Where SGD begins: a method (`MAP()`), a posterior or a dict of constrained values. None for a mode found by Adam
        from a draw of the prior.
    steps : int, default 20000
        Maximum number of Adam steps, if `start` is None.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    DivergenceError
        The loss became infinite or NaN.
    UnsupportedError
        A parameter without a prior, or a model whose rows cannot be separated.

    Notes
    -----
    Iterates at a constant rate reach a stationary distribution around the mode. Its covariance S satisfies A S + S A =
    rate C / B to first order in the rate, where A is the Hessian of l / N and C the covariance of the gradients of
    single rows. If the model is true, C is close to A, and S is close to rate / (2 B) in every direction: too narrow
    where the data say little, too wide where they say much.

    A rate of None is that of the stationary Gaussian closest to the posterior, 2 P B / (N trace C) ([2]_, theorem 1,
    with C at the start), at most 1 / (largest eigenvalue of C + trace C / B), beyond which steps overshoot. With more
    weights than rows, the iterates spread less than the posterior at any rate at which they stay near the mode.

    Batches are drawn independently at each step, with replacement: shuffled passes over the rows cancel most of the
    noise at the end of a pass. MultiSWAG [3]_ is `Ensemble(SWAG(), size=10)`.

    History: "loss", the mean of l over the steps up to each collection, burn-in included.

    Figures: "learning_rate"; "collections"; "log_joint" at the mean of the iterates; "converged", 1 if both conditions
    hold:

    - the losses of the first and the second half of the collections agree within 3 standard errors, or 0.1 nats;
    - for up to 300 coordinates and a curvature that is positive at the mean, the variances of the iterates are in the
      median at least a tenth of those from the curvature.

    References
    ----------
    .. [1] Maddox, Izmailov, Garipov, Vetrov and Wilson (2019). A simple baseline for Bayesian uncertainty in deep
       learning.
    .. [2] Mandt, Hoffman and Blei (2017).
    .. [3] Wilson and Izmailov (2020).
    .. [4] Izmailov et al. (2018).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.SWAG(collections=10, rank=5, every=5), standardise=True)
    >>> posterior.predict(table.x[:5], draws=50).std.shape
    (5,)
    """

    collections: int = setting(100, whole(2))
    rank: int = setting(20, whole(2))
    every: int | None = setting(None, optional(whole()), advice="None, for one pass over the rows")
    burn_in: int = setting(20, whole(0))
    batch_size: int | None = setting(None, optional(whole()), advice="None, for a tenth of the rows")
    learning_rate: float | None = setting(None, optional(between()), advice="None, for one by theory")
    schedule: str = setting("constant", OneOf(SCHEDULES))
    start: Start = None
    steps: int = setting(20_000, whole())
    serves_local: ClassVar[bool] = False
    limitations: ClassVar[str] = (
        "Its Gaussian is that of the noise of batches at one mode, and its width is that of the learning rate: too "
        "narrow where the data say little, too wide where they say much."
    )

    def check(self) -> None:
        if self.rank > self.collections:
            wanted = f"at most as many deviations as the {self.collections} collections"
            raise InputError.of(f"{self.name} rank", wanted, repr(self.rank), f"rank={self.collections}")

    def effort(self, size: Size) -> Effort:
        batch, every = self._lengths(size.rows)
        steps = (self.burn_in + self.collections) * every * size.share(batch)
        begin = effort_of_mode(self.steps) if self.start is None else effort_of_start(self.start, size)
        return Effort(steps, steps + 1, steps + 1, numbers=self.rank * size.parameters).after(begin)

    def check_support(self, problem: Problem) -> None:
        loops.refuse_free_parameters(self.name, problem)
        size, _ = self._lengths(problem.rows)
        # N rows drawn with replacement are not all rows, so rows must be separable for any batch size.
        if size != problem.rows or size > 1:
            loops.rows_per_step(self.name, problem, size - (size == problem.rows), advice="NUTS or SVI")

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        (outcome,) = self.run_together([problem], progress)
        if isinstance(outcome, DivergenceError):
            raise outcome
        return outcome

    def run_together(
        self, problems: Sequence[Problem], progress: Progress
    ) -> list[Outcome | DivergenceError]:
        """Fit several problems of one program in one vectorised loop; a problem that failed has its error."""
        paths = self._paths(problems, progress)
        watch = Stopwatch()
        for path in paths:
            if path.error is None:
                try:
                    path.rate = self._rate(path)
                except DivergenceError as error:
                    path.error = error
        good = [path for path in paths if path.error is None]
        if good:
            compile_seconds = self._walk(good, progress)
            seconds = max(watch() - compile_seconds, 0.0)
            for path in good:
                path.compile_seconds += compile_seconds / len(good)
                path.run_seconds += seconds / len(good)
        return [path.error or self._outcome(path) for path in paths]

    def _lengths(self, rows: int) -> tuple[int, int]:
        """Rows of a batch, and steps between two collections."""
        batch = min(128, max(1, rows // 10)) if self.batch_size is None else self.batch_size
        return batch, math.ceil(rows / batch) if self.every is None else self.every

    def _paths(self, problems: Sequence[Problem], progress: Progress) -> list[_Trajectory]:
        """Where SGD begins for each problem, or its error."""
        if self.start is None:
            modes = find_modes(problems, steps=self.steps, progress=progress, title=f"{self.name}, start")
            return [_Trajectory.of(problem, mode) for problem, mode in zip(problems, modes, strict=True)]
        paths = [_Trajectory(problem, np.empty(0)) for problem in problems]
        for path in paths:
            try:
                path.flat = flat_sites(path.problem, starting_point(path.problem, self.start, progress))
            except DivergenceError as error:
                path.error = error
        return paths

    def _rate(self, path: _Trajectory) -> float:
        """The given rate, or that of the stationary Gaussian closest to the posterior."""
        if self.learning_rate is not None:
            return float(self.learning_rate)
        rows, (size, _) = path.problem.rows, self._lengths(path.problem.rows)
        noise, largest = gradient_noise(path.problem, path.flat)
        if not (math.isfinite(noise) and noise > 0.0):
            wanted = "gradients that differ from row to row, from which the learning rate follows"
            got = f"a variance of {noise:g} at the start"
            raise DivergenceError.of(self.name, wanted, got, "learning_rate=0.01")
        closest = 2.0 * len(path.flat) * size / (rows * noise)
        return min(closest, 1.0 / (largest + noise / size))

    def _walk(self, paths: Sequence[_Trajectory], progress: Progress) -> float:
        """Descend from where the paths begin and collect their moments; returns the seconds of compilation."""
        first, count = paths[0].problem, len(paths)
        size, every = self._lengths(first.rows)
        shape = np.ones(every)
        if self.schedule == "cyclical":
            shape = 1.0 - (1.0 - CYCLE_END) * (np.arange(every) + 1.0) / every
        length = math.ceil(every / math.ceil(every / LONGEST))
        loop = _descent_of_each(paths, size, length)
        rates = np.array([path.rate for path in paths])
        seeds = [site_seed("batches with replacement", path.problem.seed) for path in paths]
        generators = [np.random.default_rng(seed) for seed in seeds]
        total = self.burn_in + self.collections
        for path in paths:
            path.moments, path.losses = _Moments(len(path.flat), self.rank), np.full(total, np.nan)
        with closing(progress.task(f"{self.name} x {count} ({first.system.name})", total * every)) as task:
            for stretch in range(total):
                values = []
                for part in np.split(shape, range(length, every, length)):
                    rows = [each.integers(first.rows, size=(len(part), size)) for each in generators]
                    given = {"rate": part[:, None] * rates / first.rows, "rows": np.stack(rows, 1)}
                    values.append(loop.advance(given))
                losses = np.concatenate(values).mean(0)
                flats = np.array(first.system.to_numpy(loop.state), dtype=np.float64)
                for path, loss, flat in zip(paths, losses, flats, strict=True):
                    if path.error is not None:
                        continue
                    path.losses[stretch] = loss
                    if not (np.isfinite(loss) and np.isfinite(flat).all()):
                        path.error = self._diverged(path, stretch, every)
                    elif stretch >= self.burn_in:
                        path.moments.take(flat)
                running = [path.error is None for path in paths]
                if not any(running):
                    break
                if task.update((stretch + 1) * every, loss=float(losses[running].mean())):
                    total = stretch + 1
                    break
        if total < self.burn_in + 2:
            raise ended_early(self.name, f"{total * every} steps", f"{(self.burn_in + 2) * every} steps")
        for path in paths:
            path.losses = path.losses[:total]
            path.gradient_evaluations += total * every * size / first.rows + (self.learning_rate is None)
        return loop.compile_seconds

    def _diverged(self, path: _Trajectory, stretch: int, every: int) -> DivergenceError:
        before = "the first ones" if not stretch else f"after a mean of {path.losses[stretch - 1]:.6g}"
        got = f"others within steps {stretch * every} to {(stretch + 1) * every} ({before})"
        advice = f"learning_rate={path.rate / 10:.2g}, a larger batch_size, or standardise=True"
        return DivergenceError.of(self.name, "finite losses and weights", got, advice)

    def _outcome(self, path: _Trajectory) -> Outcome:
        problem, moments = path.problem, path.moments
        variance = moments.squares / moments.count
        parts = (moments.mean, variance, np.stack(list(moments.deviations)))
        approximation = SWAGGaussian(*(by_site(problem, part) for part in parts))
        u = {name: value[None] for name, value in approximation.mean.items()}
        log_joint = float(problem.log_joint_draws(u)[0])
        # Whether the mean losses of the two halves of the collections agree.
        losses = path.losses[self.burn_in :]
        half = len(losses) // 2
        settled = half >= 2 and loops.level(losses[:half], losses[half:], 3.0)
        warnings = [*path.warnings]
        if not settled:
            warnings.append(
                f"{self.name}: the loss still drifts from the first half of the collections to the second, so the "
                f"moments are those of a path: try burn_in={max(2 * self.burn_in, 20)} or a larger learning rate"
            )
        scaling = conditioning(problem, moments.mean)
        share = 1.0 if scaling is None else float(np.median(variance / scaling.variances))
        if scaling is not None and share < NARROW:
            settled = False
            warnings.append(
                f"{self.name} has not converged: the iterates spread over {share:.2g} of the variances that the "
                "curvature at their mean says (median), for the rate at which the stiffest direction is stable does "
                f"not move the others; the condition number is {scaling.number:.2g}. Try Laplace(), NUTS(), "
                "or inputs that are not collinear"
            )
        still = int(np.count_nonzero(variance == 0.0))
        if still == len(variance):
            advice = "a larger learning rate, or a smaller batch_size"
            raise DivergenceError.of(self.name, "iterates that move", "none", advice)
        if still:
            warnings.append(
                f"{self.name}: {still} of {len(variance)} coordinates did not move, as no row has a gradient there: "
                "they have no spread, and the density is over the others"
            )
        figures = {"learning_rate": path.rate, "collections": float(moments.count)}
        figures |= {"converged": float(settled), "log_joint": log_joint}
        return Outcome(
            approximation,
            history={"loss": path.losses},
            warnings=tuple(warnings),
            figures=figures,
            target="the noise of SGD, not the posterior",
            **{name: getattr(path, name) for name in SPENT},
        )


# --- pieces ---------------------------------------------------------------------------------------


@dataclass
class _Trajectory:
    """The fit of one problem: the flat vector at which SGD begins, what was found and spent, and its error, if any."""

    problem: Problem
    flat: np.ndarray
    gradient_evaluations: float = 0.0
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    error: DivergenceError | None = None
    rate: float = math.nan
    moments: Any = None
    losses: Any = None

    @classmethod
    def of(cls, problem: Problem, mode: Mode | DivergenceError) -> _Trajectory:
        if isinstance(mode, DivergenceError):
            return cls(problem, np.empty(0), error=mode)
        warnings = tuple(f"start: {text}" for text in mode.warnings)
        spent = (mode.evaluations, mode.compile_seconds, mode.run_seconds)
        return cls(problem, flat_sites(problem, mode.u), *spent, warnings)


class _Moments:
    """Mean, variance and last deviations of a sequence of flat vectors, by Welford's algorithm (no cancellation)."""

    def __init__(self, size: int, rank: int):
        self.count, self.mean, self.squares = 0, np.zeros(size), np.zeros(size)
        self.deviations: deque[np.ndarray] = deque(maxlen=rank)

    def take(self, flat: np.ndarray) -> None:
        self.count += 1
        before = flat - self.mean
        self.mean = self.mean + before / self.count
        after = flat - self.mean
        self.squares = self.squares + before * after
        self.deviations.append(after)


def gradient_noise(problem: Problem, flat: np.ndarray) -> tuple[float, float]:
    """(trace, largest eigenvalue) of C, the covariance between rows of the gradient of -log p(y_i | x_i, w(u)).

    From at most 256 rows; NaN for a single row.
    """
    program, system = problem.program, problem.system
    rng = np.random.default_rng(site_seed("gradient noise", problem.seed))
    chosen = np.sort(rng.choice(problem.rows, min(problem.rows, NOISE_ROWS), replace=False))
    if len(chosen) < 2:
        return math.nan, math.nan

    def loss(flat: Any, x: Any, y: Any) -> Any:
        return -program.log_likelihood(program.unravel(flat), x, y).sum()

    def build() -> Callable[..., Any]:
        return system.compile(system.vmap(system.value_and_grad(loss), in_axes=(None, 0, 0)))

    x = map_data(lambda a: system.asarray(np.asarray(a)[chosen][:, None]), problem.inputs)
    y = system.asarray(np.asarray(problem.targets)[chosen][:, None])
    _, gradients = program.cached("gradients of rows", build)(system.asarray(flat), x, y)
    deviations = np.asarray(system.to_numpy(gradients), dtype=np.float64)
    deviations = deviations - deviations.mean(0)
    # The nonzero eigenvalues of C are those of the smaller matrix of inner products between rows.
    products = deviations @ deviations.T / (len(chosen) - 1)
    if not np.isfinite(products).all():
        return math.nan, math.nan
    return float(np.trace(products)), float(np.linalg.eigvalsh(products)[-1])


def _descent_of_each(paths: Sequence[_Trajectory], size: int, length: int) -> Any:
    """The loop of gradient descent on several paths at once, on batches of `size` rows."""
    first = paths[0].problem
    scale = first.rows / size
    x, y, axis = stacked_rows([path.problem for path in paths])
    value_and_grad = first.system.value_and_grad(minus_log_joint(first.program, scale))

    def step(flat: Any, given: Mapping[str, Any], key: Any, x: Any, y: Any) -> tuple[Any, Any]:
        value, gradient = value_and_grad(flat, *loops.chosen_rows(given, x, y))
        return flat - given["rate"] * gradient, value

    begin, key = first.system.asarray(np.stack([path.flat for path in paths])), ("swag", scale, length)
    return loops.loop_of(first, step, begin, (x, y), length=length, axes=(axis, axis), key=key)
