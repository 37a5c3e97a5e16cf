"""Pathfinder: Gaussians along the path of a quasi-Newton optimiser, and mixtures over several paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import ravel, site_seed, unravel
from ppl_bnn.core.errors import DivergenceError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import between, flag, setting, whole
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.curvature.gaussians import LowRankCovariance
from ppl_bnn.inference.flat_vector import by_site
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation.loops import refuse_free_parameters
from ppl_bnn.inference.optimisation.mode import starting_point
from ppl_bnn.inference.sampling.sampler import tempered, tempered_log_joint
from ppl_bnn.inference.start import Start, resolve_start
from ppl_bnn.inference.variational.iterated import separated
from ppl_bnn.language.transforms import GaussianPrior
from ppl_bnn.posterior.approximation import Approximation, Drawn, checked_weights
from ppl_bnn.posterior.pareto import K_LIMIT, smoothed

# Fewer draws have no tail for a Pareto fit.
FEWEST_DRAWS = 25
# The optimiser stops below this relative decrease of the loss, or this norm of its gradient.
FALL = {"float64": 1e-10, "float32": 1e-6}
GRADIENT = 1e-8
LINE_SEARCH = 100


@dataclass
class PathMixture(Approximation):
    """A mixture of Gaussians over the flat vector, with covariances of diagonal plus low-rank structure.

    The density is q(u) = sum_k pi_k N(u; m_k, S_k), with

        S_k = D_k (I + Q_k (L_k L_k' - I) Q_k') D_k,   D_k = diag(scale_k), Q_k' Q_k = I, L_k lower triangular.

    Attributes
    ----------
    location : dict of str to ndarray
        m_k by site, shape (K, *unconstrained shape), sites in the order of the program.
    scale : ndarray
        Shape (K, P).
    basis : ndarray
        Q, shape (K, P, R).
    factor : ndarray
        L, shape (K, R, R).
    weights : ndarray or None
        pi, shape (K,); None for equal weights.

    Notes
    -----
    A draw is m + D (z + Q (L - I) Q' z) with z standard normal. Neither draws nor densities form a matrix (P, P).
    """

    location: dict[str, np.ndarray]
    scale: np.ndarray
    basis: np.ndarray
    factor: np.ndarray
    weights: np.ndarray | None = None
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    def __post_init__(self) -> None:
        if self.weights is not None:
            self.weights = checked_weights(self.weights, self.size)

    @property
    def size(self) -> int:
        """K, the number of components."""
        return len(self.scale)

    @property
    def components(self) -> tuple[PathMixture, ...]:
        """The Gaussian of each path."""
        if self.size == 1:
            return ()
        location = (
            {name: value[k : k + 1] for name, value in self.location.items()} for k in range(self.size)
        )
        parts = (np.split(part, self.size) for part in (self.scale, self.basis, self.factor))
        return tuple(map(PathMixture, location, *parts))

    def weighted(self, weights: np.ndarray | None) -> PathMixture:
        return replace(self, weights=weights)

    @property
    def means(self) -> np.ndarray:
        """m, the means, shape (K, P)."""
        return ravel(self.location, lead=1)

    def covariance(self, component: int = 0) -> np.ndarray:
        """The dense covariance S_k.

        Parameters
        ----------
        component : int, default 0
            k.

        Returns
        -------
        ndarray
            Shape (P, P).
        """
        return self._gaussian(component).covariance()

    def _gaussian(self, component: int) -> LowRankCovariance:
        return LowRankCovariance(self.scale[component], self.basis[component], self.factor[component])

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        which = np.zeros(count, dtype=int)
        if self.size > 1:
            which = rng.choice(self.size, size=count, p=self.weights)
        return self._drawn(which, rng)

    def draw_each(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw from each component, in order.

        Parameters
        ----------
        count : int
            Draws per component.
        rng : numpy.random.Generator
            Random generator.

        Returns
        -------
        dict of str to ndarray
            Unconstrained coordinates by site, shape (K count, ...).
        """
        return self._drawn(np.repeat(np.arange(self.size), count), rng)

    def _drawn(self, which: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draws of the components `which` (S,)."""
        flat = rng.standard_normal((len(which), self.scale.shape[1]))
        for component, mean in enumerate(self.means):
            chosen = which == component
            flat[chosen] = mean + self._gaussian(component).colour(flat[chosen])
        return unravel(flat, {name: value.shape[1:] for name, value in self.location.items()})

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        flat = ravel(u, self.location, lead=1)
        found = [self._gaussian(k).log_prob(flat - mean) for k, mean in enumerate(self.means)]
        weights = np.full(self.size, 1.0 / self.size) if self.weights is None else self.weights
        with np.errstate(divide="ignore"):  # a path without weight has none
            log_weights = np.log(weights)
        return np.logaddexp.reduce(np.stack(found, 1) + log_weights, axis=1)

    def centre(self) -> dict[str, np.ndarray]:
        """The mean of the path with the largest weight; a mean over several may not be in any mode.

        Returns
        -------
        dict of str to ndarray
            Unconstrained coordinates by site.
        """
        heaviest = 0 if self.weights is None else int(np.argmax(self.weights))
        return {name: value[heaviest] for name, value in self.location.items()}

    @property
    def has_centre(self) -> bool:  # type: ignore[override]
        return self.size == 1

    def as_prior(self) -> GaussianPrior:
        """The Gaussian of a single path.

        Returns
        -------
        GaussianPrior
            The Gaussian.

        Raises
        ------
        UnsupportedError
            Several paths, whose mixture is not Gaussian.
        """
        if self.size > 1:
            got = f"a mixture of {self.size}"
            raise UnsupportedError.of("with_prior", "a Gaussian", got, "Pathfinder() with one path")
        centre = self.centre()
        return GaussianPrior(centre, joint=((tuple(centre), self._gaussian(0).precision()),))


@dataclass(frozen=True)
class Pathfinder(Method):
    """A Gaussian from the path of an optimiser, or several of them [1]_.

    L-BFGS climbs the log joint in unconstrained coordinates from a point in the tail of the posterior. At each iterate
    u_l with gradient g_l, the inverse Hessian estimated from the last steps, S_l = diag(alpha_l) plus a rank of at most
    2 `history`, gives the Gaussian N(u_l + S_l g_l, S_l). The approximation is the one with the highest ELBO, estimated
    by `elbo_draws` draws each. It exists whether or not the path ends in a mode.

    Parameters
    ----------
    paths : int, default 1
        Number of optimisations. With one path the posterior is its Gaussian, with a density, unlimited draws, and k-hat
        and evidence by importance sampling (`bnn.diagnose`). With several (multi-path Pathfinder), the posterior is
        `draws` draws, resampled with replacement from `draws` of each path in proportion to Pareto-smoothed weights
        p(u, D) / q(u).
    max_iterations : int, default 200
        Maximum iterations of L-BFGS.
    history : int, default 10
        Number of last steps that define S_l.
    elbo_draws : int, default 50
        Draws for the ELBO of each Gaussian.
    draws : int, default 1000
        Draws per path, and draws after resampling.
    importance : bool, default True
        With several paths, whether to resample. False returns the mixture of the Gaussians, with equal weights and a
        density.
    start : method, posterior, dict or None
        Start of the paths: None (draws from the prior, weight tensors shrunk to a size at which networks train), a
        method (fitted once per path), a posterior, or a dict of constrained values. No path leads away from a mode.
    jitter : float, default 0.1
        Standard deviation of the normal noise on given starts that coincide.
    temperature : float, default 1
        T of the target p(w | D)^(1/T), in the coordinates of the program. The importance weights then estimate
        "log_normaliser" instead of the evidence.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    DivergenceError
        No path is left, or the log joint is NaN among the draws.
    UnsupportedError
        A parameter without a prior.

    Notes
    -----
    On a Gaussian posterior the mean is as exact as the optimum. The covariance is not exact, because line searches end
    early: entries may be off by half of the variances. In hundreds of dimensions most directions are never visited, and
    their spread is that of `alpha`.

    With several paths, q in the weights is the mixture of all Gaussians, not (as in the paper) the Gaussian of the
    draw. Paths that end in one mode then count once, and a narrow path gets no large weights (the balance heuristic
    [2]_). A path without a finite point or a step is dropped, and named in a warning.

    Figures: "pareto_k", k-hat of the weights p / q over all draws of q; "elbo" of q and its standard error "elbo_se",
    over the same new draws; "paths", the number left; "converged", 0 if a path was cut off by `max_iterations` at its
    best iterate. With k-hat of at most 0.7 also "log_evidence", log of the mean weight, and "log_evidence_se"; above
    that there is a warning. History: "elbo" along the best path, from its first iterate, and "path_elbo", the best
    first.

    BlackJAX provides the optimiser with its history, the factors of S_l and the draws from them. It does not report how
    often line searches evaluate the gradient. BlackJAX's own Pathfinder (1.7) is not used: it adds S grad(-log p) with
    the wrong sign and omits the last iterate.

    References
    ----------
    .. [1] Zhang, Carpenter, Gelman and Vehtari (2022).
    .. [2] Veach and Guibas (1995).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.Pathfinder(), standardise=True)
    >>> posterior.predict(table.x[:5], draws=50).std.shape
    (5,)
    """

    paths: int = setting(1, whole())
    max_iterations: int = setting(200, whole())
    history: int = setting(10, whole())
    elbo_draws: int = setting(50, whole(2))
    draws: int = setting(1000, whole(FEWEST_DRAWS))
    importance: bool = setting(True, flag, advice="False, for the mixture of paths")
    start: Start = None
    jitter: float = setting(0.1, between())
    temperature: float = setting(1.0, between())
    systems: ClassVar[tuple[str, ...]] = ("numpyro",)
    limitations: ClassVar[str] = (
        "It is a Gaussian of low rank found on the way to a mode, weighted by importance: in hundreds of "
        "dimensions few draws carry all weight (k-hat says so)."
    )

    def effort(self, size: Size) -> Effort:
        # A density costs about a third of a gradient, and a line search evaluates once or twice.
        looks = 1.5 + self.elbo_draws / 3.0
        found = Effort(
            self.paths * 2.0,
            self.paths * self.max_iterations * looks,
            self.paths * (20.0 * self.max_iterations + self.max_iterations * looks) + self.draws,
        )
        return found.after(effort_of_start(self.start, size, self.paths))

    def check_support(self, problem: Problem) -> None:
        refuse_free_parameters(self.name, problem)

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        if self.start is None:
            points = [starting_point(problem, None, progress, restart=path) for path in range(self.paths)]
        else:
            points = resolve_start(problem, self.start, progress, count=self.paths)
        starts = separated(problem, points, self.jitter, "pathfinder jitter")
        climbed, compile_seconds = self._climb(problem, starts, progress)
        found = sorted((path for path in climbed if not path.reason), key=lambda path: -path.best)
        if not found:
            got = f"none of {self.paths}; the first: {climbed[0].reason}"
            advice = "another start, narrower priors, or standardise=True"
            raise DivergenceError.of(self.name, "a path with a Gaussian of finite ELBO", got, advice)
        dropped = (
            f"{self.name}: path {index + 1} of {self.paths} was dropped: {path.reason}"
            for index, path in enumerate(climbed)
            if path.reason
        )
        means, *parts = map(np.stack, zip(*(path.gaussian for path in found), strict=True))
        mixture = PathMixture(by_site(problem, means), *parts)
        rng = np.random.default_rng(site_seed("pathfinder", problem.seed))
        u = mixture.draw_each(self.draws, rng)
        log_ratios = self._log_target(problem, u) - mixture.log_prob(u)
        undefined = int(np.count_nonzero(np.isnan(log_ratios) | (log_ratios == np.inf)))
        if undefined:
            got = f"{undefined} of {len(log_ratios)} draws where it is NaN or infinite"
            advice = "a model that is defined everywhere, narrower priors, or standardise=True"
            raise DivergenceError.of(self.name, "a log joint at every draw", got, advice)
        log_weights, k = smoothed(log_ratios)
        weights, root = np.exp(log_ratios - log_ratios.max()), math.sqrt(len(log_ratios))
        figures = {
            "elbo": float(log_ratios.mean()),
            "elbo_se": float(log_ratios.std(ddof=1)) / root,
            "pareto_k": k,
            "paths": float(len(found)),
            "converged": float(all(path.finished for path in found)),
        }
        if k <= K_LIMIT:
            name = "log_evidence" if self.temperature == 1.0 else "log_normaliser"
            figures[name] = float(log_ratios.max() + math.log(weights.mean()))
            figures[f"{name}_se"] = float(weights.std(ddof=1) / weights.mean()) / root
        approximation: Approximation = mixture
        if self.paths > 1 and self.importance:
            resampled = np.exp(log_weights)
            picked = rng.choice(len(log_ratios), size=self.draws, p=resampled / resampled.sum())
            figures["distinct_draws"] = float(len(np.unique(picked)))
            approximation = Drawn({name: value[picked] for name, value in u.items()})
        return Outcome(
            approximation,
            history={"elbo": found[0].elbo, "path_elbo": np.array([path.best for path in found])},
            compile_seconds=compile_seconds,
            run_seconds=watch() - compile_seconds,
            warnings=(*dropped, *self._warnings(figures)),
            figures=figures,
            target=tempered(self.temperature),
        )

    def _log_target(self, problem: Problem, u: Mapping[str, np.ndarray]) -> np.ndarray:
        """The unnormalised log density of the target for draws u with one leading axis, (S,)."""
        if self.temperature == 1.0:
            return problem.log_joint_draws(u).astype(np.float64)
        program = problem.program

        def density(u: Mapping[str, Any], x: Any, y: Any) -> Any:
            return tempered_log_joint(program, self.temperature, u, x, y)

        mapped = program.cached(("tempered", self.temperature), lambda: program.mapped(density))
        return program._density_draws(mapped, u, problem.x, problem.y).astype(np.float64)

    def _warnings(self, figures: Mapping[str, float]) -> tuple[str, ...]:
        found = []
        if not figures["converged"]:
            found.append(
                f"{self.name}: a path was cut off after {self.max_iterations} iterations, the last of them its best; "
                f"try max_iterations={2 * self.max_iterations}"
            )
        if not figures["pareto_k"] <= K_LIMIT:
            what = "so that it is no proposal for importance sampling and gives no evidence"
            if "distinct_draws" in figures:
                what = (
                    f"so that its resampled draws, {figures['distinct_draws']:.0f} distinct ones of {self.draws}, rest "
                    "on a few large weights; importance=False keeps the mixture as it is"
                )
            found.append(
                f"{self.name}: Pareto k-hat of p(w, D)/q(w) is {figures['pareto_k']:.2f}, above {K_LIMIT}, {what}"
            )
        return tuple(found)

    def _climb(self, problem: Problem, starts: np.ndarray, progress: Progress) -> tuple[list[_Path], float]:
        """All paths, from `starts` (paths, P), by one compiled function in turn, and the seconds of compilation."""
        import jax

        data = (problem.x, problem.y)
        root = jax.random.PRNGKey(site_seed("pathfinder", problem.seed))
        points = [problem.system.asarray(start) for start in starts]
        compiling = Stopwatch()
        compiled = problem.system.compile_for(_path(self, problem), (points[0], root, data))
        seconds = compiling()
        found: list[_Path] = []
        with closing(progress.task(self.name, self.paths)) as task:
            for index, point in enumerate(points):
                arrived = compiled(point, jax.random.fold_in(root, index), data)
                found.append(_Path.of(*jax.tree.map(np.asarray, arrived)))
                if task.update(index + 1, elbo=max(path.best for path in found)):
                    break
        return found, seconds


class _Path(NamedTuple):
    """The result of one optimisation.

    elbo: at the iterates after the start, -inf if not finite. best: the highest, -inf if the path is of no use.
    finished: whether the optimiser stopped by itself, or continued past the best iterate. gaussian: (m (P,), scale
    (P,), basis (P, R), factor (R, R)) at the best iterate. reason: why there is no Gaussian, or empty.
    """

    elbo: np.ndarray
    best: float
    finished: bool
    gaussian: tuple[np.ndarray, ...]
    reason: str

    @classmethod
    def of(cls, value: Any, steps: Any, counted: Any, each: np.ndarray, index: Any, at: Any) -> _Path:
        """Create from the result of `_path`, in NumPy."""
        elbo = each[1 : int(steps) + 1].astype(np.float64)
        best, gaussian = float(elbo.max(initial=-math.inf)), ()
        if not np.isfinite(value):
            reason = f"the log joint at its start is {-float(value)}"
        elif not counted:
            reason = "no step from its start has a curvature: it is a mode, or has no gradient"
        elif not np.isfinite(best):
            reason = f"the ELBO is not finite at any of its {steps} iterates"
        else:
            gaussian = _gaussian(*(part.astype(np.float64) for part in at))
            reason = "" if gaussian else "its covariance is not positive"
        finished = bool(steps < len(each) - 1 or index < steps)
        return cls(elbo, best if gaussian else -math.inf, finished, gaussian, reason)


def _gaussian(u: Any, slope: Any, alpha: Any, beta: Any, gamma: Any) -> tuple[np.ndarray, ...]:
    """(m, scale, basis, factor) of N(u + S g, S), S = diag(alpha) + B G B', with the slope g; () if S is not positive
    definite.
    """
    try:
        covariance = LowRankCovariance.of(np.sqrt(alpha), beta.T, gamma)
    except np.linalg.LinAlgError:
        return ()
    mean = u + alpha * slope + beta @ (gamma @ (beta.T @ slope))
    return mean, covariance.scale, covariance.basis, covariance.factor


def _path(method: Pathfinder, problem: Problem) -> Callable[..., tuple[Any, ...]]:
    """(start (P,), key, data) -> the result of one path, in JAX.

    That is: minus the log joint at the start; the number of iterates after the start; whether any is part of an inverse
    Hessian; the ELBO of each iterate, start included, (max_iterations + 1,); the index of the best; and at the best the
    position, slope (uphill) and alpha (P,), beta (P, 2 J) and gamma (2 J, 2 J), J = `history`.
    """
    import jax
    import jax.numpy as jnp
    from blackjax.optimizers.lbfgs import bfgs_sample, lbfgs_inverse_hessian_factors, minimize_lbfgs

    program, memory = problem.program, method.history
    at_once = program.draws_at_once(method.elbo_draws)

    def run(start: Any, key: Any, data: Any) -> tuple[Any, ...]:
        def log_joint(flat: Any) -> Any:
            return tempered_log_joint(program, method.temperature, program.unravel(flat), *data)

        last, path = minimize_lbfgs(
            lambda flat: -log_joint(flat),
            start,
            maxiter=method.max_iterations,
            maxcor=memory,
            gtol=GRADIENT,
            ftol=FALL[problem.dtype],
            maxls=LINE_SEARCH,
        )
        # Steps that would make the inverse Hessian indefinite are excluded from it.
        counted = path.update_mask[1:].astype(bool)
        before = ((memory, 0), (0, 0))
        moved = jnp.pad(jnp.where(counted, jnp.diff(path.x, axis=0), 0.0), before)
        turned = jnp.pad(jnp.where(counted, jnp.diff(path.g, axis=0), 0.0), before)
        steps = last.state.iter_num

        def factors(index: Any) -> tuple[Any, Any]:
            window = index + jnp.arange(memory)
            return lbfgs_inverse_hessian_factors(moved[window].T, turned[window].T, path.alpha[index])

        def bound(index: Any) -> Any:
            draws, log_q = bfgs_sample(
                jax.random.fold_in(key, index),
                method.elbo_draws,
                path.x[index],
                # The history is that of a descent, hence the minus sign.
                -path.g[index],
                path.alpha[index],
                *factors(index),
            )
            log_p = jax.lax.map(log_joint, draws, batch_size=at_once)
            elbo = jnp.mean(log_p - log_q)
            return jnp.where(jnp.isfinite(elbo), elbo, -jnp.inf)

        def counted_bound(index: Any) -> Any:
            taken = (index > 0) & (index <= steps)
            return jax.lax.cond(taken, bound, lambda _: jnp.full((), -jnp.inf, path.f.dtype), index)

        elbo = jax.lax.map(counted_bound, jnp.arange(method.max_iterations + 1))
        best = jnp.argmax(elbo)
        at = (path.x[best], -path.g[best], path.alpha[best], *factors(best))
        return path.f[0], steps, counted.any(), elbo, best, at

    return run
