"""Where chains begin, and what is known of the posterior's spread before the first draw.

A sampler may start from anything that says where the posterior is: a point for each chain, members of an ensemble, a
Gaussian around a mode, a guide, yesterday's chains. What has a spread also says how wide the posterior is in each
direction, which a sampler otherwise spends most of its warm-up on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import BNNError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.laplace.approximation import LaplaceGaussian
from ppl_bnn.inference.method import Method, Outcome, Start, resolve_start
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.language.distributions import SPECIAL
from ppl_bnn.posterior.approximation import Approximation, Chains
from ppl_bnn.posterior.fixed_draws import Drawn
from ppl_bnn.posterior.posterior import Posterior

# Draws that variances are taken from, and for each coordinate, where covariances are.
DRAWS, DRAWS_EACH = 1000, 4
# Fewer draws of earlier chains say nothing about a spread.
LEAST = 20
# A deviation halved so often is none.
HALVINGS = 30


@dataclass(frozen=True)
class Beginning:
    """Where each chain begins, and what is known besides.

    points: u of each chain (NumPy). approximation: what the start is or fitted, where it has a spread. gradients,
    compile_seconds: what its fits cost. warnings: what they had to say.
    """

    points: list[dict[str, np.ndarray]]
    approximation: Approximation | None = None
    gradients: float = 0.0
    compile_seconds: float = 0.0
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        found: Sequence[Outcome],
        points: list[dict[str, np.ndarray]] | None = None,
        approximation: Approximation | None = None,
    ) -> Beginning:
        """From what a method came to; without `points` each chain begins at the centre of an outcome of its own."""
        return cls(
            [each.approximation.centre() for each in found] if points is None else points,
            approximation,
            gradients=float(sum(each.gradient_evaluations or 0.0 for each in found)),
            compile_seconds=float(sum(each.compile_seconds for each in found)),
            warnings=tuple(dict.fromkeys(f"start: {text}" for each in found for text in each.warnings)),
        )


def beginning(problem: Problem, start: Start, progress: Progress, count: int) -> Beginning:
    """`count` starting points from `start`, as `resolve_start` takes it, and the approximation behind them.

    A method is fitted once, with the seed of the fit; where it finds a point, it is fitted once per chain with seeds
    that follow, so that chains may begin in different modes. Of an ensemble, chain c begins in member c, from the first
    again where there are more chains. Of a distribution each chain has a draw of its own (see `within_reach`).

    Raises
    ------
    InputError: a start of another model.
    """
    if isinstance(start, Method):
        return _fitted(problem, start, progress, count)
    if isinstance(start, Posterior):
        # One point is asked for because it is held to the sites of this model.
        resolve_start(problem, start, progress)
        approximation = start.approximation
        return Beginning(
            _points(problem, approximation, count), approximation if _spreads(approximation) else None
        )
    return Beginning(resolve_start(problem, start, progress, count))


def beginnings(problems: Sequence[Problem], start: Start, progress: Progress, count: int) -> list[Beginning]:
    """`beginning` of each of several problems of one program; modes for all of them in one loop, where that can be."""
    if isinstance(start, Method):
        found = _together([each for problem in problems for each in _seeded(problem, count)], start, progress)
        if found is not None:
            return [Beginning.of(found[at : at + count]) for at in range(0, len(found), count)]
    return [beginning(problem, start, progress, count) for problem in problems]


def _fitted(problem: Problem, start: Method, progress: Progress, count: int) -> Beginning:
    found = _outcomes(problem, start, progress, count)
    first = found[0].approximation
    points = _points(problem, first, count) if _at_once(first) else None
    return Beginning.of(found, points, first if _spreads(first) else None)


def _outcomes(problem: Problem, start: Method, progress: Progress, count: int) -> list[Outcome]:
    """What the method comes to: one outcome where that serves all chains, else one per chain."""
    problems = _seeded(problem, count)
    together = _together(problems, start, progress)
    if together is not None:
        return together
    here = _runs_here(problem, start)
    found: list[Outcome] = []
    for each in problems:
        found.append(start.run(each, progress) if here else _fit_elsewhere(each, start, progress))
        if _at_once(found[0].approximation):
            break
    return found


def _seeded(problem: Problem, count: int) -> list[Problem]:
    """The problem for each chain, with seeds that follow."""
    return [replace(problem, seed=(problem.seed + index) % 2**31) for index in range(count)]


def _together(problems: Sequence[Problem], start: Method, progress: Progress) -> list[Outcome] | None:
    """A point for each problem, by one loop; None where the method has no such loop, or cannot run here."""
    run: Callable[..., Any] | None = getattr(start, "run_together", None)
    if run is None or not getattr(start, "finds_points", False) or not _runs_here(problems[0], start):
        return None
    outcomes = run(problems, progress)
    for each in outcomes or ():
        if isinstance(each, BNNError):
            raise each
    return None if outcomes is None else list(outcomes)


def _runs_here(problem: Problem, start: Method) -> bool:
    """Whether a method may run in the session that is open, on the program that is bound and compiled already.

    Not in Pyro, where one fit would find the parameters of the one before in the store, and has nothing compiled; nor
    where `Method.fit` might refuse the model, which it does by name.
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


def _fit_elsewhere(problem: Problem, start: Method, progress: Progress) -> Outcome:
    posterior = start.fit(
        problem.program.model,
        problem.inputs,
        problem.targets,
        seed=problem.seed,
        device=problem.device,
        progress=progress,
        observed=None if problem.program.language else problem.program.observed,
    )
    info = posterior.info
    return Outcome(
        posterior.approximation,
        compile_seconds=info.compile_seconds,
        gradient_evaluations=info.gradient_evaluations,
        warnings=info.warnings,
    )


def _at_once(approximation: Approximation) -> bool:
    """Whether one fit has something for every chain: members, or a distribution to draw from."""
    return bool(_members(approximation)) or approximation.kind != "point"


def _members(approximation: Approximation) -> tuple[Approximation, ...]:
    """The members of an ensemble; none where it is no ensemble. Chains are one distribution here."""
    return () if isinstance(approximation, Chains) else approximation.components


def _spreads(approximation: Approximation) -> bool:
    """Whether it says how wide the posterior is: a distribution, or an ensemble of such."""
    members = _members(approximation)
    return any(_spreads(member) for member in members) if members else approximation.kind != "point"


def _points(problem: Problem, approximation: Approximation, count: int) -> list[dict[str, np.ndarray]]:
    members = _members(approximation)
    if members:
        shares = [range(index, count, len(members)) for index in range(min(len(members), count))]
        drawn = [
            _draws(problem, member, len(share), index)
            for index, (member, share) in enumerate(zip(members, shares, strict=False))
        ]
        return [drawn[chain % len(members)][chain // len(members)] for chain in range(count)]
    return _draws(problem, approximation, count, 0)


def _draws(
    problem: Problem, approximation: Approximation, count: int, index: int
) -> list[dict[str, np.ndarray]]:
    if approximation.kind == "point":
        return [approximation.centre()] * count
    seed = problem.seed if index == 0 else site_seed(f"start {index}", problem.seed)
    u = within_reach(problem, approximation, approximation.draw(count, np.random.default_rng(seed)))
    return [{name: value[chain] for name, value in u.items()} for chain in range(count)]


def within_reach(
    problem: Problem, approximation: Approximation, u: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Draws u (leading axis), each pulled towards the centre until a chain can begin there.

    If the posterior were the Gaussian that an approximation takes it for, the log joint of a draw would lie below that
    of the centre by half a chi-squared variable of P degrees of freedom: P / 2, with standard deviation sqrt(P / 2). A
    deviation is halved until what is lost is at most P / 2 + 4 sqrt(P / 2). Draws of a good approximation are
    left as they are; those of a Gaussian around a mode of a network, which is right about the network's linearisation
    only, end where the network's own density is that of the posterior's bulk. So chains begin as far apart as they can.

    Chains, and draws without a density, are left as they are: they are where they were found.
    """
    drawn = dict(u)
    if approximation.kind != "iid" or approximation.log_prob(drawn) is None:
        return drawn
    try:
        centre = approximation.centre()
    except UnsupportedError:
        return drawn
    dimension = sum(site.size for site in problem.program.latents)
    allowed = 0.5 * dimension + 4.0 * math.sqrt(0.5 * dimension)
    deviations = {name: value - centre[name] for name, value in drawn.items()}

    def placed(share: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: centre[name] + share.reshape(-1, *[1] * np.ndim(centre[name])) * value
            for name, value in deviations.items()
        }

    def too_far(share: np.ndarray) -> np.ndarray:
        # The centre stands last, so that one compiled function serves all. What is not a number is too low.
        u = {name: np.concatenate([value, centre[name][None]]) for name, value in placed(share).items()}
        density = problem.log_joint_draws(u)
        return ~(density[:-1] >= density[-1] - allowed)

    share = np.ones(len(next(iter(drawn.values()))))
    for _ in range(HALVINGS):
        far = too_far(share)
        if not far.any():
            break
        share[far] *= 0.5
    else:
        share[too_far(share)] = 0.0
    kept = share == 1.0
    # What was not pulled keeps its bits.
    return {
        name: np.where(kept.reshape(-1, *[1] * np.ndim(centre[name])), drawn[name], value)
        for name, value in placed(share).items()
    }


# --- how wide the posterior is ----------------------------------------------------------------------


def spread(
    problem: Problem, approximation: Approximation | None, names: Sequence[str], dense: bool
) -> np.ndarray | None:
    """Variances (P,) of the flat vector of `names` under an approximation, or its covariance (P, P) where `dense`.

    Exact for a Laplace approximation and for independent normals, else from draws: `DRAWS` of them, or `DRAWS_EACH` per
    coordinate for a covariance, which is then shrunk (`shrunk_covariance`). Of chains it is the spread within a chain,
    of an ensemble the mean over its members: a sampler moves within one mode. A coordinate that does not vary, or of
    which the approximation says nothing, has variance 1, with which samplers begin where nothing is known. None: there
    is no spread at all.
    """
    if approximation is None:
        return None
    members = _members(approximation)
    if members:
        found = [spread(problem, member, names, dense) for member in members]
        known = [each for each in found if each is not None]
        return np.mean(known, axis=0) if known else None
    if approximation.kind == "point":
        return None
    if isinstance(approximation, LaplaceGaussian):
        matrix = _of_laplace(approximation, dense)
    elif isinstance(approximation, MeanField):
        variances = np.concatenate([np.ravel(approximation.scale[name]) for name in names]) ** 2
        matrix = np.diag(variances) if dense else variances
    else:
        deviations = _deviations(problem, approximation, names, dense)
        if deviations is None:
            return None
        matrix = shrunk_covariance(deviations) if dense else np.mean(deviations**2, axis=0)
    return _filled(matrix)


def _of_laplace(approximation: LaplaceGaussian, dense: bool) -> np.ndarray:
    gaussian, size = approximation.covariance, len(approximation.flat_mode)
    at = np.arange(size) if approximation.positions is None else approximation.positions
    if dense:
        matrix = np.zeros((size, size))
        matrix[np.ix_(at, at)] = gaussian.covariance()
        return matrix
    variances = np.zeros(size)
    variances[at] = gaussian.variances()
    return variances


def _deviations(
    problem: Problem, approximation: Approximation, names: Sequence[str], dense: bool
) -> np.ndarray | None:
    """Draws (S, P) less their mean, scaled so that their mean square is the unbiased variance."""

    def flat(u: Mapping[str, np.ndarray], lead: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([np.asarray(u[name], float).reshape(*lead, -1) for name in names], axis=-1)

    if isinstance(approximation, Chains):
        draws = flat(approximation.u, approximation.shape)
    else:
        size = sum(problem.program.sites[name].size for name in names)
        count = max(DRAWS, DRAWS_EACH * size) if dense else DRAWS
        if isinstance(approximation, Drawn):
            count = min(count, approximation.count)
        rng = np.random.default_rng(site_seed("mass matrix", problem.seed))
        draws = flat(approximation.draw(count, rng), (count,))[None]
    chains, count, size = draws.shape
    if count < LEAST:
        return None
    deviations = (draws - draws.mean(1, keepdims=True)) * math.sqrt(count / (count - 1))
    return deviations.reshape(chains * count, size)


def shrunk_covariance(deviations: np.ndarray) -> np.ndarray:
    """The covariance (P, P) of deviations (S, P), shrunk towards its own diagonal.

    (1 - a) C + a diag(C), with the a of Ledoit and Wolf (2004, "A well-conditioned estimator for large-dimensional
    covariance matrices") for the correlations, whose target is the identity: a = min(1, b / d), d = |R - I|^2 the
    distance to the target and b = (sum_s |z_s z_s' - R|^2) / S^2 the error of R, in squared Frobenius norms, z_s the
    deviations in units of their standard deviations.
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
    """With variance 1, and no covariance, where there is no variance."""
    variances = np.diag(matrix) if matrix.ndim == 2 else matrix
    unknown = ~((variances > 0) & np.isfinite(variances))
    filled = matrix.copy()
    if matrix.ndim == 2:
        filled[unknown] = 0.0
        filled[:, unknown] = 0.0
        filled[unknown, unknown] = 1.0
    else:
        filled[unknown] = 1.0
    return filled
