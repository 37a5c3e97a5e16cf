"""Importance weights as a check: of an approximation against the posterior, and of draws against leaving a row
out.

Both fit a generalised Pareto distribution to the largest weights; its shape k-hat says how far the weights can
be trusted (Vehtari, Simpson, Gelman, Yao and Gabry 2024, Journal of Machine Learning Research 25): below 0.7
they can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.arrays import chunks, row_count, site_seed
from ppl_bnn.core.errors import InputError, UnsupportedError, message
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.posterior.export import log_likelihood_tree, no_leave_one_out
from ppl_bnn.posterior.pareto import K_LIMIT, smoothed

DRAWS = 1000
# Fewer draws, but no fewer than so many, where rows x coordinates x draws would take more multiplications than WORK.
LEAST_DRAWS = 100
WORK = 2e12
# Bytes that draws may take at a time.
MEMORY = 2**28
# Fresh draws for a corrected leave-one-out value: with 1000 it is often further from the truth than the plain one.
CORRECTED_DRAWS = 10_000
# Draws x rows of log likelihoods that are held for it, at most.
CORRECTED_VALUES = 4e7
# Draws at which a linearised predictor is compared with the network's own.
LINEAR_DRAWS = 20


@dataclass(frozen=True)
class ParetoK:
    """How an approximation q serves as an importance proposal for the posterior (see `pareto_k`).

    k: the Pareto shape of the weights p(w, D) / q(w); -inf where all weights are equal. log_evidence: log mean
    of the weights, in the units of the fit, trusted only where `reliable`; log_evidence_se: its standard error
    by the delta method. elbo, elbo_se: mean of the log weights over the same draws, and its standard error. gap,
    gap_se: log_evidence - elbo >= 0 of these draws, with what their errors have in common taken out.
    relative_ess: (sum w)^2 / (S sum w^2), in (0, 1].

    E[elbo] <= E[log_evidence] <= log p(D), both by Jensen's inequality (Burda, Grosse and Salakhutdinov 2016).
    """

    k: float
    log_evidence: float
    log_evidence_se: float
    relative_ess: float
    draws: int
    elbo: float = math.nan
    elbo_se: float = math.nan
    gap: float = math.nan
    gap_se: float = math.nan

    @property
    def reliable(self) -> bool:
        """Whether k-hat is at most 0.7. Where it is not, q may still predict well: compare it with a reference."""
        return self.k <= K_LIMIT


def pareto_k(posterior: Any, draws: int | None = None) -> ParetoK:
    """Pareto k-hat of the importance weights w_s = p(u_s, D) / q(u_s), u_s ~ q, of a variational or Laplace
    posterior.

    draws: default 1000, or as many as can be had for 2e12 multiplications over all rows, but at least 100.

    Both densities are in unconstrained coordinates. log mean_s w_s estimates the log evidence log p(D), for the
    targets in the units that the model works in (standardised, where the fit standardises). Over hundreds of
    weights k-hat nearly always exceeds 0.7, however well q predicts: alone it never shows an approximation to
    be inadequate.

    Raises
    ------
    UnsupportedError: the posterior has no density q (chains, a point). InputError: fewer than 25 draws.
    """
    whole = isinstance(draws, int | np.integer) and not isinstance(draws, bool)
    if draws is not None and (not whole or draws < 25):
        raise InputError("draws: " + message("a whole number of at least 25", repr(draws), f"draws={DRAWS}"))
    rng = np.random.default_rng(site_seed("pareto_k", posterior.info.seed))
    one: dict[str, np.ndarray] = {}
    density = False
    if posterior.kind == "iid":
        one = posterior.approximation.draw(1, np.random.default_rng(0))
        density = posterior.approximation.log_prob(one) is not None
    if not density:
        raise UnsupportedError(
            "pareto_k: "
            + message(
                "an approximation with a density, such as SVI or Laplace",
                f"{posterior.info.method}, of kind {posterior.kind!r}",
                "bnn.diagnose, which chooses what is defined",
            )
        )
    size = sum(value.size for value in one.values())
    if draws is None:
        affordable = int(WORK / (size * row_count(posterior.inputs)))
        draws = max(LEAST_DRAWS, min(DRAWS, affordable))
    kept = kept_draws(posterior.approximation)
    draws = int(draws) if kept is None else min(int(draws), kept)
    # Draws that are kept in one order can be had all at once only.
    at_a_time = max(1, MEMORY // (8 * size)) if kept is None else draws
    ratios = []
    for start, stop in chunks(draws, at_a_time):
        u = posterior.approximation.draw(stop - start, rng)
        log_q = np.asarray(posterior.approximation.log_prob(u), dtype=np.float64)
        ratios.append(posterior.log_joint(u).astype(np.float64) - log_q)
    return pareto_k_of(np.concatenate(ratios))


def kept_draws(approximation: Any) -> int | None:
    """How many draws an approximation has, if it can make no new ones (a hand-written guide), else None."""
    first = next(iter(getattr(approximation, "members", None) or [approximation]))
    return getattr(first, "count", None)


def pareto_k_of(log_ratios: np.ndarray) -> ParetoK:
    """The same from log importance ratios (S,)."""
    log_ratios = np.asarray(log_ratios, dtype=np.float64).ravel()
    count = len(log_ratios)
    if not np.isfinite(log_ratios).all():
        # A draw on which the joint density is 0 or undefined: no finite moment of the weights can be claimed.
        return ParetoK(math.inf, math.nan, math.inf, 0.0, count)
    top = float(log_ratios.max())
    weights = np.exp(log_ratios - top)
    mean = float(weights.mean())
    effective = float(weights.sum() ** 2 / np.sum(weights**2))
    elbo = float(log_ratios.mean())
    # The delta method: how much each draw moves log mean w, and how much of that it moves mean log w by, too.
    influence = weights / mean
    root = math.sqrt(count)
    return ParetoK(
        k=smoothed(log_ratios)[1],
        log_evidence=top + math.log(mean),
        log_evidence_se=float(influence.std(ddof=1) / root),
        relative_ess=effective / count,
        draws=count,
        elbo=elbo,
        elbo_se=float(log_ratios.std(ddof=1) / root),
        # Equal weights leave a difference of rounding, of either sign.
        gap=max(0.0, (top - elbo) + math.log(mean)),
        gap_se=float((influence - log_ratios).std(ddof=1) / root),
    )


@dataclass(frozen=True)
class LeaveOneOut:
    """PSIS-LOO of a posterior (see `leave_one_out`); NaN with a `reason` where it is not defined.

    elpd: sum over rows of log p(y_i | the other rows), original units; se: its standard error; p_loo: effective
    number of parameters; worst_k, share_above: the largest Pareto k over rows (infinite where a row
    has none, since its tail could not be fitted), and the share of rows above 0.7.
    corrected_elpd, corrected_se: for an approximation, with the weights p/q; NaN with a `corrected_reason`
    where it is not to be trusted. corrected_k: (N,), the Pareto k of each row for the corrected value, also where that
    value is withheld because of them; None where they were not computed. elpd_data: what ArviZ's `compare` takes.
    """

    elpd: float
    se: float
    p_loo: float
    worst_k: float
    share_above: float
    reason: str = ""
    corrected_elpd: float = math.nan
    corrected_se: float = math.nan
    corrected_reason: str = ""
    elpd_data: Any = None
    corrected_k: np.ndarray | None = None

    @property
    def corrected_worst_k(self) -> float:
        """The largest of `corrected_k`; NaN where there is none."""
        return math.nan if self.corrected_k is None else float(self.corrected_k.max())

    @property
    def corrected_share_above(self) -> float:
        """The share of rows whose `corrected_k` is above 0.7; NaN where there is none."""
        return math.nan if self.corrected_k is None else float(np.mean(~(self.corrected_k <= K_LIMIT)))


def leave_one_out(source: Any, tree: Any = None) -> LeaveOneOut:
    """Expected log predictive density under leave-one-out cross-validation, by Pareto-smoothed importance
    sampling.

    Parameters
    ----------
    source: a posterior, or its tree.
    tree: the tree of the posterior `source`, where there is one already.

    Notes
    -----
    The figures are those of `arviz_stats.loo(tree, pointwise=True)`, so that they can be had again from a saved
    tree. It takes draws of an approximation as if they were draws from the posterior.

    The corrected figures (`arviz_stats.loo_approximate_posterior`; Magnusson, Andersen, Jonasson and Vehtari 2019)
    weight 10 000 fresh draws by p/q, so they need the posterior itself: from a tree alone there are none. They are
    published only where k-hat of p/q and the Pareto k of every row are at most 0.7, as
    `comparisons/corrected_leave_one_out.py` finds them nearer the exact value there and not elsewhere. p/q belongs to
    the network itself; for a linearised predictive it is used where the predictor is linear in the weights, so that
    the two agree.

    A single point has no spread to leave a row out of, and weights that stacking chose have seen every row.
    """
    posterior = None if hasattr(source, "children") else source
    tree = source if posterior is None else tree
    kind = str(tree.attrs["posterior_kind"]) if posterior is None else posterior.kind
    if kind == "point":
        return _undefined(no_leave_one_out(kind, np.empty((1, 1, 0))))
    if tree is None:
        tree = log_likelihood_tree(posterior)
    if "weights" in tree.attrs:
        return _undefined("draws of stacked parts do not count alike, and the weights have seen every row")
    if "log_likelihood" not in tree.children:
        return _undefined(str(tree.attrs["no_leave_one_out"]))
    if not np.isfinite(tree["log_likelihood"]["y"].values).all():
        return _undefined("the log likelihood is not finite for some draw and row")
    import arviz_stats

    stats: Any = arviz_stats

    # ArviZ warns where k exceeds its limit; that is what worst_k and share_above say in figures.
    with ignored():
        try:
            found = stats.loo(tree, pointwise=True)
        except (ValueError, IndexError) as error:
            return _undefined(f"importance weights could not be smoothed: {error}")
    k = np.asarray(found.pareto_k.values)
    corrected = _Corrected(reason="draws of chains are from the posterior itself")
    if kind != "chains":
        corrected = (
            _Corrected(reason="a tree holds too few draws: it is made of fresh ones of the posterior")
            if posterior is None
            else _corrected(posterior)
        )
    return LeaveOneOut(
        elpd=float(found.elpd),
        se=float(found.se),
        p_loo=float(found.p),
        worst_k=float(np.where(np.isnan(k), math.inf, k).max()),
        share_above=float(np.mean(~(k <= K_LIMIT))),
        corrected_elpd=corrected.elpd,
        corrected_se=corrected.se,
        corrected_reason=corrected.reason,
        elpd_data=found,
        corrected_k=corrected.k,
    )


def _undefined(reason: str) -> LeaveOneOut:
    return LeaveOneOut(*[math.nan] * 5, reason=reason, corrected_reason=reason)


@dataclass(frozen=True)
class _Corrected:
    """The corrected part of `LeaveOneOut`."""

    elpd: float = math.nan
    se: float = math.nan
    reason: str = ""
    k: np.ndarray | None = None


def _corrected(posterior: Any) -> _Corrected:
    """Leave-one-out with the weights p/q, or why not; what costs little is asked first."""
    try:
        overall = pareto_k(posterior).k
    except UnsupportedError:
        return _Corrected(reason="the approximation has no density")
    if not overall <= K_LIMIT:
        return _Corrected(reason=f"k-hat of p/q is {overall:.2f}, above {K_LIMIT}")
    approximation, rows = posterior.approximation, row_count(posterior.inputs)
    size = sum(value.size for value in approximation.draw(1, np.random.default_rng(0)).values())
    if kept_draws(approximation) is not None:
        return _Corrected(reason=f"it takes {CORRECTED_DRAWS} draws, and there are no more than were kept")
    if CORRECTED_DRAWS * rows > CORRECTED_VALUES or 8 * CORRECTED_DRAWS * size > MEMORY:
        return _Corrected(
            reason=f"it takes {CORRECTED_DRAWS} draws, too many for {rows} rows and {size} coordinates"
        )
    if held_coordinates(posterior):
        return _Corrected(reason="some weights are held at a value: p/q belongs to the others alone")
    u = approximation.draw(
        CORRECTED_DRAWS, np.random.default_rng(site_seed("corrected_leave_one_out", posterior.info.seed))
    )
    kind = approximation.kinds[0]
    if kind == "linearised" and not _linear(posterior, u):
        return _Corrected(
            reason="the predictive is linearised, the predictor is not linear in the weights, and p/q belongs to the "
            "network itself"
        )
    log_p = posterior.log_joint(u).astype(np.float64)
    log_q = np.asarray(approximation.log_prob(u), dtype=np.float64)
    log_likelihood = _log_likelihood(posterior, u, rows)
    if not (np.isfinite(log_p - log_q).all() and np.isfinite(log_likelihood).all()):
        return _Corrected(reason="p/q or the log likelihood is not finite for some draw")
    elpd, k = _leave_out(log_likelihood, log_p - log_q)
    return _published(elpd, k, smoothed(log_p - log_q)[1])


def _published(elpd: np.ndarray, k: np.ndarray, overall: float) -> _Corrected:
    """The value of rows elpd (N,), unless k-hat of p/q or the Pareto k of some row (N,) forbids it."""
    if not overall <= K_LIMIT:
        return _Corrected(reason=f"k-hat of p/q is {overall:.2f}, above {K_LIMIT}", k=k)
    above = ~(k <= K_LIMIT)
    if above.any():
        return _Corrected(
            reason=f"with the weights p/q Pareto k is above {K_LIMIT} in {above.mean():.1%} of the rows, "
            f"{k.max():.2f} at most",
            k=k,
        )
    return _Corrected(float(elpd.sum()), float(math.sqrt(len(elpd)) * elpd.std(ddof=1)), k=k)


def _log_likelihood(posterior: Any, u: dict[str, np.ndarray], rows: int) -> np.ndarray:
    """log p(y_i | x_i, draw) under the network itself, (S, N), some draws at a time."""
    count = len(next(iter(u.values())))
    found = np.empty((count, rows))
    for start, stop in chunks(count, int(np.clip(MEMORY // (64 * rows), 1, count))):
        part = {name: value[start:stop] for name, value in u.items()}
        found[start:stop] = posterior.log_likelihood(kind="sampled", u=part)
    return found


def _leave_out(log_likelihood: np.ndarray, log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log p(y_i | the other rows), (N,), and Pareto k, (N,), from log likelihoods (S, N) and log p/q (S,)."""
    found = [(values, *smoothed(log_ratios - values)) for values in log_likelihood.T]
    elpd = np.array([np.logaddexp.reduce(weights + values) for values, weights, _ in found])
    return elpd, np.array([k for *_, k in found])


def held_coordinates(posterior: Any) -> int:
    """How many coordinates of latent sites are the same in every draw, although they have a prior."""
    draws = posterior.approximation.draw(3, np.random.default_rng(0))
    sites = posterior._with(lambda problem: problem.program.sites)
    return sum(
        int(np.count_nonzero(np.ptp(value, axis=0) == 0.0))
        for name, value in draws.items()
        if not sites[name].is_param
    )


def _linear(posterior: Any, u: dict[str, np.ndarray]) -> bool:
    """Whether the linearised predictor is the network's own, up to rounding, at the training rows for a few draws."""
    few = {name: value[:LINEAR_DRAWS] for name, value in u.items()}

    def both(problem: Any) -> list[np.ndarray]:
        return [
            np.asarray(
                posterior.approximation.predictor_draws(problem, few, posterior.inputs, kind, 0, MEMORY)
            ).astype(np.float64)
            for kind in ("linearised", "sampled")
        ]

    linearised, sampled = posterior._with(both)
    rounding = float(np.sqrt(np.finfo(np.dtype(posterior.info.dtype)).eps))
    return bool(np.abs(linearised - sampled).max() <= rounding * max(1.0, np.abs(sampled).max()))
