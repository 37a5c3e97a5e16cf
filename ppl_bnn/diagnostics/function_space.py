"""Convergence of chains, and agreement of restarts, in function space.

Hidden units can be exchanged and signs flipped without changing the function. Chains in different copies of one mode
agree on every prediction, while R-hat of their weights is large. So the diagnostics are computed from the outputs at
probe inputs, the log likelihood and the scale parameters. R-hat does not apply to the independent draws of one
approximation; only restarts are compared by it, each as a chain.

Variation within chains and between chains are separate findings: "converged per mode only" calls for stacking, more
chains or `SMC`, not for more draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, row_count, site_seed
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.posterior.approximation import flat_draws
from ppl_bnn.posterior.convergence import (
    FEWEST_DRAWS,
    FUNCTIONS,
    LOG_LIKELIHOOD,
    PREDICTOR,
    PROBES,
    WORST,
    Mixing,
    by_arviz,
    components,
    distinct,
    evenly_spaced,
    mixing,
    probe_indices,
    quantities,
)
from ppl_bnn.posterior.posterior import MEMORY

# The limit does not grow with the number of components: chains exceed it by too few effective draws, not by chance.
# Default numbers of transitions reach a bulk ESS of 400; a larger limit would pass shorter chains.
RHAT_LIMIT = 1.01
# R-hat of the halves of one chain of ESS 200 sometimes exceeds 1.01 by chance; it seldom exceeds this.
WITHIN_LIMIT = 1.05
# The worst ESS over outputs and chains: for 500 independent draws it is 100 to 350, as tails of one chain hold few.
WITHIN_ESS = 50
# Between two restarts R-hat is about 1 + d^2 / 6 where their means differ by d standard deviations: here d = 0.55.
RESTART_LIMIT = 1.05
RESTART_DRAWS = 1000
ESS_PER_CHAIN = 100
# With many chains, single chains are examined in evenly chosen components of f only, at most this many in all.
MOST_ALONE = 500
# The beginning of the names of the outputs at other rows than those of the training.
ELSEWHERE = "f at the "
_FIGURES = (*WORST, "rhat_within", "ess_within", "between_share", "between_share_max")


@dataclass(frozen=True)
class _Parted:
    """Figures of single chains and of the variation between them (see `Convergence`)."""

    rhat_within: float = math.nan
    ess_within: float = math.nan
    between_share: float = math.nan
    between_share_max: float = math.nan
    rhat_between: float = math.nan
    between: str = PREDICTOR


@dataclass(frozen=True, kw_only=True)
class Convergence(_Parted):
    """Convergence of chains in function space, made by `convergence`.

    - `rhat`, `ess_bulk`, `ess_tail`, `mcse`: the worst over all `quantities` (weights excluded).
    - `superchains`: number of starting points, if several chains share one (R-hat is then nested).
    - `still`: the chains that never move.
    - `rhat_within`, `ess_within`: the worst of a single chain (with more than ten chains, in some components of f
      only).
    - `between_share`, `between_share_max`: share of the variance of f between chains, median and largest over
      components; about 1 / ESS of a chain if they agree. `rhat_between`: the largest plain R-hat, of the quantity
      `between`.
    - `per_mode`: whether each chain converged by itself and they disagree. `reasons`: what fails, in sentences.
    - `at`: region -> figures of f at its rows, which do not enter those above; `at_training`: whether the chains have
      converged at the training rows, and `failing`: the regions at which they have not.
    """

    converged: bool
    at_training: bool
    rhat: float
    ess_bulk: float
    ess_tail: float
    mcse: float
    chains: int
    draws: int
    quantities: dict[str, Mixing] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    still: tuple[int, ...] = ()
    superchains: int | None = None
    per_mode: bool = False
    at: dict[str, Mixing] = field(default_factory=dict)
    failing: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, float]:
        """The worst figures by name, for tables; those at the rows of regions are "rhat_at_<name>", "ess_at_<name>"."""
        figures = {name: float(getattr(self, name)) for name in _FIGURES}
        if self.at:
            figures["converged_at_training"] = float(self.at_training)
        for name, there in self.at.items():
            figures |= {f"rhat_at_{name}": there.rhat, f"ess_at_{name}": there.ess}
        return figures


def convergence(
    posterior: Any, probe: Any = None, *, regions: Mapping[str, Any] | None = None
) -> Convergence:
    """R-hat, ESS and MCSE of chains in function space, at `probe` inputs (M, F) or up to 50 training rows.

    The quantities are "f", the predictor eta at the probe inputs (each row and output a component); "log_likelihood",
    sum_i log p(y_i | x_i, draw) over training rows; and each scalar random variable. Components that do not vary are
    left out. Raises UnsupportedError without chains.

    `regions`, made by `rows_at`, are further rows where f must have converged. At most 200 components of f are judged
    at the probe inputs and 200 in all regions together, evenly spaced over rows and outputs: the same for all
    posteriors.

    Converged (Vehtari et al. 2021, Bayesian Analysis 16): at least 2 chains, all moving, and for every component R-hat
    < 1.01 and bulk and tail ESS > 100 per chain. If several chains started at one point or belong to one member of an
    ensemble, R-hat is nested (Margossian et al. 2024) and the ESS is required per group.

    Of 200 functions in 4 chains of independent draws, one or more exceeds a limit by chance in 0 of 210 replications at
    1000 draws per chain. Of independent functions, the worst case, it is 0 of 200 at 500 draws, 1 at 350 and 60 at 250;
    of outputs of a network 3 at 250; always by R-hat alone. So at least 350 effective draws per chain keep the rate
    below 5 %.

    Converged per mode: not converged, but each chain by itself has R-hat below 1.05 between its halves and ESS above
    50, and over chains R-hat of f, or of another quantity, is at least 1.05: means half a standard deviation apart. For
    groups of chains too short for that: nested R-hat below 1.01 and plain R-hat at least sqrt(1 + 4 / e), with e the
    mean ESS of single chains, twice the excess of chains that agree. (Nested R-hat misses modes that every group visits
    alike.)
    """
    chained, expected = posterior.kind == "chains", "a posterior of chains, whose draws depend on each other"
    got = f"{posterior.info.method}, of kind {posterior.kind!r}"
    advice = "bnn.diagnose, or diagnostics.importance.pareto_k for an approximation"
    UnsupportedError.check(chained, "convergence", expected, got, advice)
    chains, draws = posterior.shape
    values, there = _judged(posterior, probe, regions or {})
    groups = getattr(posterior.approximation, "groups", None)
    superchains = groups if groups is not None and 1 < groups < chains else None
    mixed = {name: mixing(value, superchains) for name, value in values.items()}
    judged = {name: figures for name, figures in mixed.items() if figures.components}
    at = {name: mixing(value, superchains) for name, value in there.items()}
    # Chains that give the same in every draw; a single draw says nothing.
    same = (values["f"] == values["f"][:, :1]).all(axis=(1, 2)) if draws > 1 else np.zeros(chains)
    still = tuple(map(int, np.flatnonzero(same)))
    singly = {name: (values[name], figures) for name, figures in judged.items()}
    for name, value in there.items():
        if at[name].components and np.isfinite(value).all():
            singly[f"{ELSEWHERE}{name} rows"] = value, at[name]
    parted, short_limit, words = _parted(singly, superchains)
    reasons = _reasons(chains, draws, judged, superchains)
    outputs, which = "the network's outputs are the same in", ", ".join(map(str, still))
    if "f" not in judged:
        reasons.insert(0, f"{outputs} every draw: the chains did not move")
    elif len(still) == 1:
        reasons.insert(0, f"chain {which} never moves: {outputs} all its draws")
    elif still:
        reasons.insert(0, f"chains {which} never move: {outputs} all draws of each")
    at_training = not reasons
    failing = []
    for name, figures in at.items():
        if figures.components and _reasons(chains, draws, {name: figures}, superchains):
            failing.append(name)
            limits = f"the limits are {RHAT_LIMIT} and {ESS_PER_CHAIN * (superchains or chains)}"
            where = f"converged at the training rows, not at the {name} rows"
            where = where if at_training else f"not converged at the {name} rows either"
            reasons.append(f"{where}: {figures.words} ({limits})")
    moving = not still and draws >= FEWEST_DRAWS
    alone = parted.rhat_within < WITHIN_LIMIT and parted.ess_within > WITHIN_ESS
    per_mode = bool(reasons) and moving and alone and parted.rhat_between >= RESTART_LIMIT
    if superchains is not None and moving and not per_mode:
        every = [*judged.values(), *(figures for figures in at.values() if figures.components)]
        forgotten = bool(judged) and all(figures.rhat < RHAT_LIMIT for figures in every)
        per_mode = forgotten and parted.rhat_between >= short_limit
        if per_mode:
            start = "which says that where chains are does not depend on where they started"
            single = f"R-hat of {parted.between} over the single chains is {parted.rhat_between:.3f}"
            agree = f"chains of their length that agree stay below {short_limit:.3f}"
            reasons.append(f"nested R-hat is good, {start}; but {single}, and {agree}")
    if per_mode:
        within = f"the worst R-hat is {parted.rhat_within:.3f} and the smallest ESS {parted.ess_within:.0f}"
        modes = "they sit in modes of their own, whose shares are not known"
        reasons.append(f"within each chain {within}; {words}: {modes}")
    each = {name: [getattr(figures, name) for figures in judged.values()] for name in WORST}
    worst = {name: (max if WORST[name] else min)(found, default=np.nan) for name, found in each.items()}
    figures = {**worst, **vars(parted), "quantities": mixed}
    shape: dict[str, Any] = {"chains": chains, "draws": draws, "superchains": superchains, "still": still}
    verdict: Any = {"converged": not reasons, "at_training": at_training, "per_mode": per_mode}
    verdict |= {"reasons": tuple(reasons), "at": at, "failing": tuple(failing)}
    return Convergence(**shape, **figures, **verdict)


def rows_at(posterior: Any, x: Any) -> dict[str, Any]:
    """Region -> its rows, in the units of the fit, for x as in `bnn.diagnose`. Rows without a name are "given"."""
    named = isinstance(x, Mapping)
    if named and isinstance(posterior.inputs, Mapping):
        # Such rows are mappings themselves.
        named = all(isinstance(rows, Mapping | tuple) for rows in x.values())
    given = x if named else {"given": x}
    words = (isinstance(name, str) and name.isprintable() and name.strip() for name in given)
    good = 0 < len(given) <= FUNCTIONS and all(words) and "training" not in given
    expected = f"1 to {FUNCTIONS} regions with names in words, other than 'training'"
    InputError.check(good, "x", expected, list(given), "{'test': x_test, 'gap': x_gap}")
    found = {}
    for name, rows in given.items():
        try:
            found[name] = posterior.fit_inputs(rows)
        except InputError as error:
            raise InputError(f"{name} rows: {error}" if named else str(error)) from error
    return found


def _judged(
    posterior: Any, probe: Any, regions: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The `quantities` of chains as components (chain, draw, C), without random variables that do not vary.

    Then those of f at the rows of each region.
    """
    kind = posterior.drawn_kind(None)
    u, w = flat_draws(posterior.unconstrained_draws), flat_draws(posterior.draws)
    share = FUNCTIONS // max(len(regions), 1)

    def evaluated(problem: Problem) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        draws_of = posterior.approximation.predictor_draws
        predictor = partial(draws_of, problem, u, kind=kind, seed=0, memory=MEMORY)
        eta = predictor(posterior.inputs)
        if probe is None:
            f = eta[:, _chosen_rows(posterior)]
        else:
            f = predictor(posterior.fit_inputs(probe))
        there = {}
        for name, rows in regions.items():
            chosen = evenly_spaced(row_count(rows), share)
            if problem.program.coupled:
                there[name] = predictor(rows)[:, chosen]
            else:
                there[name] = predictor(map_data(lambda array, at=chosen: np.asarray(array)[at], rows))
        return quantities(problem, w, f, eta, posterior.targets), there

    def chained(values: np.ndarray) -> np.ndarray:
        return values.reshape(*posterior.shape, *values.shape[1:])

    found, there = posterior.with_problem(evaluated)
    kept = [name for name in found if name in (PREDICTOR, LOG_LIKELIHOOD) or np.ptp(found[name]) != 0]
    own = components({name: chained(found[name]) for name in kept})
    own[PREDICTOR] = _frozen(own[PREDICTOR], FUNCTIONS)
    return own, {name: _frozen(distinct(chained(eta)), share) for name, eta in there.items()}


def _frozen(values: np.ndarray, most: int) -> np.ndarray:
    """Up to `most` of the components (chain, draw, C), evenly spaced."""
    return values[..., evenly_spaced(values.shape[-1], most)]


def _parted(
    judged: dict[str, tuple[np.ndarray, Mixing]], superchains: int | None
) -> tuple[_Parted, float, str]:
    """Figures within and between chains. `judged`: quantity -> (chain, draw, components) that vary, and their figures.

    With them come the limit of `rhat_between` for short chains, and words that name the quantity and the share between
    chains.
    """
    if PREDICTOR not in judged:
        return _Parted(), math.nan, ""
    values = {name: value for name, (value, _) in judged.items()}
    f, found = values[PREDICTOR], []
    for name, value in values.items():
        step = math.ceil(len(f) * value.shape[-1] / MOST_ALONE)
        every = (_within(chain[:, ::step]) for chain in value)
        found += [(name, alone) for alone in every if alone is not None]
    if not found or not np.isfinite(f).all():
        return _Parted(), math.nan, ""
    limits = dict.fromkeys(values, RESTART_LIMIT)
    if superchains is not None:
        for name in values:
            effective = float(np.mean([alone.ess for which, alone in found if which == name] or [0.0]))
            limits[name] = math.sqrt(1.0 + 4.0 / effective) if effective > 0.0 else math.nan
    rhat = {name: (mixing(value) if superchains else each).rhat for name, (value, each) in judged.items()}
    # f comes first: another quantity counts only if f agrees.
    apart = [name for name in values if rhat[name] >= limits[name]]
    between = PREDICTOR
    if apart and PREDICTOR not in apart:
        between = max(apart, key=lambda name: rhat[name])
    share, share_max = _shares(f)
    words = f"{share:.0%} of the variance of f (median over its components; {share_max:.0%} at most)"
    if between != PREDICTOR:
        of_it = f"{_shares(values[between])[0]:.0%} of the variance of {between}"
        words = f"{of_it}, while R-hat of f is {rhat[PREDICTOR]:.3f}"
        words += "" if between.startswith(ELSEWHERE) else ", so that what they predict hardly differs"
    within, least = max(alone.rhat for _, alone in found), min(alone.worst_ess for _, alone in found)
    parted = _Parted(within, least, share, share_max, rhat[between], between)
    return parted, limits[between], f"between chains lies {words}"


def _shares(values: np.ndarray) -> tuple[float, float]:
    """Share of the variance of components (chain, draw, C) that lies between chains: the median and the largest."""
    varying = values[..., values.max(axis=(0, 1)) > values.min(axis=(0, 1))]
    shares = varying.mean(axis=1).var(axis=0) / varying.var(axis=(0, 1))
    return float(np.median(shares)), float(shares.max())


class _Alone(NamedTuple):
    """One chain by itself: worst R-hat of its halves, median bulk ESS, worst ESS."""

    rhat: float
    ess: float
    worst_ess: float


def _within(chain: np.ndarray) -> _Alone | None:
    """Figures of one chain (draw, components); None if nothing varies.

    R-hat is that of its halves, without ranks: ArviZ ranks several chains only.
    """
    finite = np.isfinite(chain).all(axis=0)
    varies = ~finite | (chain.max(axis=0) > chain.min(axis=0))
    if not varies.any():
        return None
    half = len(chain) // 2
    if not finite.all() or half < 2:
        return _Alone(math.inf, 0.0, 0.0)
    values = chain[None, :, varies].astype(np.float64)
    halves = np.concatenate([values[:, :half], values[:, -half:]])
    rhat = by_arviz("rhat", halves, np.inf, method="identity")
    bulk = by_arviz("ess", values, 0.0, method="bulk")
    tail = by_arviz("ess", values, 0.0, method="tail", prob=(0.05, 0.95))
    return _Alone(float(rhat.max()), float(np.median(bulk)), float(min(bulk.min(), tail.min())))


def probe_rows(posterior: Any, max_rows: int) -> Any:
    """Training rows in original units, chosen evenly without replacement; the same at every call."""
    chosen = _chosen_rows(posterior, max_rows)
    return map_data(lambda array: np.asarray(array)[chosen], posterior.original_inputs)


def _chosen_rows(posterior: Any, max_rows: int = PROBES) -> np.ndarray:
    return probe_indices(row_count(posterior.inputs), posterior.info.seed, max_rows)


@dataclass(frozen=True)
class Agreement:
    """Differences in function space between `count` fits from several starts, made by `agreement`.

    `quantities` has R-hat and further figures between them; `elbo`, (count,), is None if the fit does not report it.
    """

    count: int
    quantities: dict[str, Mixing]
    elbo: np.ndarray | None = None

    @property
    def worst(self) -> str:
        """The quantity in which they differ most."""
        return max(self.quantities, key=lambda name: self.quantities[name].rhat)

    @property
    def rhat(self) -> float:
        """The largest R-hat between restarts; NaN if nothing varies."""
        return self.quantities[self.worst].rhat if self.quantities else float("nan")

    @property
    def agree(self) -> bool:
        """Whether R-hat is below 1.05 in every quantity: means at most about half a standard deviation apart."""
        return not self.quantities or self.rhat < RESTART_LIMIT


def agreement(posterior: Any) -> Agreement:
    """Compare the members of an approximation fitted from several starts, each as a chain of independent draws.

    The quantities are those of `convergence`; weights are not compared, since symmetric copies of one mode agree. R-hat
    above 1 means that restarts ended in distributions of other location or width. UnsupportedError for under two
    `members`.
    """
    members = list(getattr(posterior.approximation, "members", None) or ())
    expected = "an approximation with at least two members, one per restart"
    got = f"{posterior.info.method} with {len(members)}"
    UnsupportedError.check(len(members) > 1, "agreement", expected, got, "SVI(restarts=5)")
    chosen = _chosen_rows(posterior)
    x = map_data(lambda array: np.asarray(array)[chosen], posterior.inputs)
    y = np.asarray(posterior.targets)[chosen]
    kind = posterior.drawn_kind(None)

    def evaluated(problem: Problem) -> dict[str, np.ndarray]:
        parts = []
        for index, member in enumerate(members):
            rng = np.random.default_rng(site_seed(f"restart {index}", posterior.info.seed))
            u = member.draw(min(RESTART_DRAWS, getattr(member, "count", RESTART_DRAWS)), rng)
            w = problem.program.constrain_draws(u, problem.x, problem.y)
            eta = member.predictor_draws(problem, u, x, kind, 0, MEMORY)
            parts.append(quantities(problem, w, eta, eta, y))
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

    found = {name: mixing(value) for name, value in components(posterior.with_problem(evaluated)).items()}
    elbo = posterior.info.history.get("restart_elbo")
    elbo = None if elbo is None else np.asarray(elbo, dtype=np.float64)
    varying = {name: figures for name, figures in found.items() if figures.components}
    return Agreement(len(members), varying, elbo)


def _reasons(chains: int, draws: int, judged: dict[str, Mixing], superchains: int | None) -> list[str]:
    one = "one chain alone cannot show that it found the whole posterior: R-hat needs at least 2, better 4"
    reasons = [one] if chains < 2 else []
    if draws < FEWEST_DRAWS:
        return [*reasons, f"{draws} draws per chain are too few for R-hat and ESS"]
    which, unit = ("R-hat", "chain") if superchains is None else ("nested R-hat", "superchain")
    wanted = ESS_PER_CHAIN * (superchains or chains)
    for name, figures in judged.items():
        rhat = f"{which} of {name} is {figures.rhat:.3f}, not below {RHAT_LIMIT}: the {unit}s disagree"
        if figures.rhat == np.inf:
            rhat = f"{which} of {name} is infinite: a component is not finite, or stands still within chains"
        if not figures.rhat < RHAT_LIMIT:
            reasons.append(rhat)
        for end, value in (("bulk", figures.ess_bulk), ("tail", figures.ess_tail)):
            if not value > wanted:
                needed = f"not above {wanted} ({ESS_PER_CHAIN} per {unit})"
                reasons.append(f"{end} ESS of {name} is {value:.0f}, {needed}")
    return reasons
