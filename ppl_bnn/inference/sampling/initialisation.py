"""Starting points of chains, and the spread of the posterior as far as a start has one.

A start may be a point per chain, members of an ensemble, a Gaussian around a mode, a guide, or earlier chains. Its
spread, if any, saves most of the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import ravel, site_seed, unravel
from ppl_bnn.core.errors import BNNError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.flat_vector import latent_names
from ppl_bnn.inference.laplace.approximation import LaplaceGaussian
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.sampling.stream import Arrays, Kept
from ppl_bnn.inference.start import Start, fitted_start, resolve_start
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.language.distributions import SPECIAL
from ppl_bnn.posterior.approximation import Approximation, Chains, Drawn
from ppl_bnn.posterior.posterior import Posterior

# Draws from the prior that a chain tries as its start.
PRIOR_ATTEMPTS = 10
# Draws for variances, and draws per coordinate for covariances.
DRAWS, DRAWS_EACH = 1000, 4
# Fewer draws of earlier chains give no estimate of the spread.
LEAST = 20
# After this many halvings a deviation counts as zero.
HALVINGS = 30


@dataclass(frozen=True)
class Beginning:
    """The starting points u (NumPy), with the gradients, seconds and warnings of their fits.

    `approximation` is what the start is or fitted, if it has a spread. `flat` are the flat vectors of the latent sites,
    one per chain, and `fixed` the values of parameters without a prior. `before` is what the strands of an earlier run
    stored, and their draws.
    """

    points: list[Arrays] = field(default_factory=list)
    approximation: Approximation | None = None
    gradients: float = 0.0
    compile_seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    flat: list[np.ndarray] = field(default_factory=list)
    fixed: Arrays = field(default_factory=dict)
    before: Sequence[Kept] = ()


def beginnings(problems: Sequence[Problem], start: Start, progress: Progress, count: int) -> list[Beginning]:
    """For each problem of one program starting points from `start`, and the approximation behind them.

    `start` is as `resolve_start` takes it. A distribution is fitted once, and each chain has its own draw (see
    `within_reach`). A point is fitted once per chain with consecutive seeds, so that chains may begin in different
    modes, and with one loop for all modes if possible. Chain c begins in member c of an ensemble, cyclically.
    """
    if isinstance(start, Posterior):
        for problem in problems:
            # Request one point to check it against the sites of this model.
            resolve_start(problem, start, progress)
        return [_fitted(problem, [Outcome(start.approximation)], count) for problem in problems]
    if not isinstance(start, Method):
        return [Beginning(resolve_start(problem, start, progress, count)) for problem in problems]
    here = _runs_here(problems[0], start)
    if here:
        start.check_support(problems[0])
    seeded = [replace(each, seed=(each.seed + index) % 2**31) for each in problems for index in range(count)]
    together = _together(seeded, start, progress) if here else None
    found = []
    for index, problem in enumerate(problems):
        mine = slice(index * count, (index + 1) * count)
        fits = _one_by_one(seeded[mine], start, progress, here) if together is None else together[mine]
        found.append(_fitted(problem, fits, count))
    return found


def _fitted(problem: Problem, found: Sequence[Outcome], count: int) -> Beginning:
    """From outcomes: one that serves all chains, or one per chain, which begins at its centre."""
    first = found[0].approximation
    alone = len(found) == 1
    return Beginning(
        _points(problem, first, count) if alone else [each.approximation.centre() for each in found],
        first if _spreads(first) else None,
        gradients=float(sum(each.gradient_evaluations or 0.0 for each in found)),
        compile_seconds=float(sum(each.compile_seconds for each in found)),
        warnings=tuple(dict.fromkeys(f"start: {text}" for each in found for text in each.warnings)),
    )


def _one_by_one(problems: Sequence[Problem], start: Method, progress: Progress, here: bool) -> list[Outcome]:
    """Outcomes of the method: one if it serves all chains (members, or a distribution), else one per chain."""
    found: list[Outcome] = []
    for problem in problems:
        if here:
            found.append(start.run(problem, progress))
        else:
            posterior = fitted_start(problem, start, progress)
            shared = ("compile_seconds", "gradient_evaluations", "warnings")
            info = {name: getattr(posterior.info, name) for name in shared}
            found.append(Outcome(posterior.approximation, **info))
        first = found[0].approximation
        if _members(first) or first.kind != "point":
            break
    return found


def _together(problems: Sequence[Problem], start: Method, progress: Progress) -> list[Outcome] | None:
    """A point per problem, by one loop; None if the method has no such loop."""
    run: Callable[..., Any] | None = getattr(start, "run_together", None)
    if run is None or not getattr(start, "finds_points", False):
        return None
    outcomes = run(problems, progress)
    for each in outcomes or ():
        if isinstance(each, BNNError):
            raise each
    return outcomes


def _runs_here(problem: Problem, start: Method) -> bool:
    """Whether a method can run in the open session, on the compiled program.

    Not in Pyro: the store has the parameters of the previous fit, and nothing is compiled. Not if `Method.fit` may
    refuse the model.
    """
    program = problem.program
    usual = "float32" if problem.device.startswith("cuda") else "float64"
    return (
        start.ppl == problem.system.name == "numpyro"
        and (usual if start.dtype == "auto" else start.dtype) == problem.dtype
        and not start.streams
        and not problem.streamed
        and not (program.has_local and not start.serves_local)
        and not any(site.family in SPECIAL for site in program.latents)
    )


def _members(approximation: Approximation) -> tuple[Approximation, ...]:
    """The members of an ensemble, or none. Chains count as one distribution."""
    return () if isinstance(approximation, Chains) else approximation.components


def _spreads(approximation: Approximation) -> bool:
    """Whether the approximation, or an ensemble's member, is a distribution with a spread."""
    members = _members(approximation)
    return any(_spreads(member) for member in members) if members else approximation.kind != "point"


def _points(problem: Problem, approximation: Approximation, count: int) -> list[Arrays]:
    """A point per chain: of K members, chain c begins in member c % K."""
    members = _members(approximation) or (approximation,)
    points: list[Arrays] = [{}] * count
    for index, member in enumerate(members[:count]):
        chains = range(index, count, len(members))
        if member.kind == "point":
            points[index :: len(members)] = [member.centre() for _ in chains]
            continue
        seed = problem.seed if index == 0 else site_seed(f"start {index}", problem.seed)
        u = within_reach(problem, member, member.draw(len(chains), np.random.default_rng(seed)))
        for number, chain in enumerate(chains):
            points[chain] = {name: value[number] for name, value in u.items()}
    return points


def within_reach(problem: Problem, approximation: Approximation, u: Arrays) -> Arrays:
    """Draws u (leading axis), each pulled towards the centre until a chain can begin there.

    A deviation is halved until the log joint is at most P / 2 + 4 sqrt(P / 2) below that of the centre. On a Gaussian
    posterior the loss is chi2_P / 2, with mean P / 2 and standard deviation sqrt(P / 2), so good draws are unchanged.
    Draws of a Laplace approximation of a network end where its own density is that of the posterior's bulk. Chains, and
    draws without a density, are unchanged.
    """
    if approximation.kind != "iid" or approximation.log_prob(u) is None:
        return u
    try:
        centre = approximation.centre()
    except UnsupportedError:
        return u
    dimension = sum(site.size for site in problem.program.latents)
    allowed = 0.5 * dimension + 4.0 * math.sqrt(0.5 * dimension)
    shapes = {name: np.shape(centre[name]) for name in u}
    middle, flat = ravel(centre, u), ravel(u, lead=1)

    def placed(share: np.ndarray) -> np.ndarray:
        return middle + share[:, None] * (flat - middle)

    def too_far(share: np.ndarray) -> np.ndarray:
        # The centre is last, so that one compiled function serves all. NaN counts as too low.
        density = problem.log_joint_draws(unravel(np.vstack([placed(share), middle]), shapes))
        return ~(density[:-1] >= density[-1] - allowed)

    share = np.ones(len(flat))
    for halving in range(HALVINGS + 1):
        far = too_far(share)
        if not far.any():
            break
        share[far] *= 0.5 if halving < HALVINGS else 0.0
    # Draws that were not pulled keep their bits.
    return unravel(np.where((share == 1.0)[:, None], flat, placed(share)), shapes)


# --- how wide the posterior is ----------------------------------------------------------------------


def spread(problem: Problem, approximation: Approximation | None, dense: bool) -> np.ndarray | None:
    """Variances (P,), or with `dense` the covariance (P, P), of the flat vector; None if there is no spread.

    Exact for Laplace and independent normals. Otherwise from draws, with a shrunk covariance (`shrunk_covariance`). For
    chains and ensembles it is the spread within a chain or member, because a sampler moves within one mode. Coordinates
    that do not vary or are not covered have variance 1, the default of samplers.
    """
    if approximation is None:
        return None
    members = _members(approximation)
    if members:
        found = [spread(problem, member, dense) for member in members]
        known = [each for each in found if each is not None]
        return np.mean(known, axis=0) if known else None
    if approximation.kind == "point":
        return None
    if isinstance(approximation, LaplaceGaussian):
        matrix = _of_laplace(approximation, dense)
    elif isinstance(approximation, MeanField):
        variances = ravel(approximation.scale, latent_names(problem)) ** 2
        matrix = np.diag(variances) if dense else variances
    else:
        deviations = _deviations(problem, approximation, dense)
        if deviations is None:
            return None
        matrix = shrunk_covariance(deviations) if dense else np.mean(deviations**2, axis=0)
    return _filled(matrix)


def _of_laplace(approximation: LaplaceGaussian, dense: bool) -> np.ndarray:
    gaussian, size = approximation.covariance, len(approximation.flat_mode)
    at = np.arange(size) if approximation.positions is None else approximation.positions
    matrix = np.zeros((size, size) if dense else size)
    matrix[np.ix_(at, at) if dense else at] = gaussian.covariance() if dense else gaussian.variances()
    return matrix


def _deviations(problem: Problem, approximation: Approximation, dense: bool) -> np.ndarray | None:
    """Draws (S, P) minus their mean, scaled so that their mean square is the unbiased variance."""
    names = latent_names(problem)
    if isinstance(approximation, Chains):
        draws = ravel(approximation.u, names, lead=2).astype(float)
    else:
        size = sum(site.size for site in problem.program.latents)
        count = max(DRAWS, DRAWS_EACH * size) if dense else DRAWS
        if isinstance(approximation, Drawn):
            count = min(count, approximation.count)
        rng = np.random.default_rng(site_seed("mass matrix", problem.seed))
        draws = ravel(approximation.draw(count, rng), names, lead=1).astype(float)[None]
    chains, count, size = draws.shape
    if count < LEAST:
        return None
    deviations = (draws - draws.mean(1, keepdims=True)) * math.sqrt(count / (count - 1))
    return deviations.reshape(chains * count, size)


def shrunk_covariance(deviations: np.ndarray) -> np.ndarray:
    """The covariance (P, P) of deviations (S, P), shrunk towards its diagonal (Ledoit and Wolf 2004).

    It is (1 - a) C + a diag(C) with a = min(1, b / d), d = |R - I|^2 and b = sum_s |z_s z_s' - R|^2 / S^2 in squared
    Frobenius norms, for the correlations R and the standardised deviations z_s.
    """
    count, size = deviations.shape
    scale = np.sqrt(np.mean(deviations**2, axis=0))
    z = deviations / np.where(scale > 0, scale, 1.0)
    correlations = z.T @ z / count
    distance = float(np.sum((correlations - np.eye(size)) ** 2))
    error = (float(np.sum(np.sum(z**2, axis=1) ** 2)) - count * float(np.sum(correlations**2))) / count**2
    amount = 1.0 if distance == 0.0 else min(1.0, max(0.0, error / distance))
    shrunk = (1.0 - amount) * correlations
    np.fill_diagonal(shrunk, np.diag(correlations))
    return shrunk * np.outer(scale, scale)


def _filled(matrix: np.ndarray) -> np.ndarray:
    """Variance 1 and no covariance for coordinates without a variance."""
    variances = np.diag(matrix) if matrix.ndim == 2 else matrix
    known = (variances > 0) & np.isfinite(variances)
    if matrix.ndim == 1:
        return np.where(known, variances, 1.0)
    return np.where(np.outer(known, known), matrix, np.eye(len(matrix)))
