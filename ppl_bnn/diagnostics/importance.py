"""Importance weights as a check of approximations, and for leave-one-out cross-validation.

Both fit a generalised Pareto distribution to the largest weights. Weights can be trusted if its shape k-hat is below
0.7 (Vehtari, Simpson, Gelman, Yao and Gabry 2024, Journal of Machine Learning Research 25).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.arrays import chunks, row_count, site_seed
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.settings import check_value, optional, whole
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.posterior.export import no_leave_one_out, posterior_datatree
from ppl_bnn.posterior.pareto import K_LIMIT, smoothed

DRAWS = 1000
# If rows x coordinates x draws would take more multiplications than WORK, there are fewer draws, but at least these.
LEAST_DRAWS = 100
WORK = 2e12
# Bytes that draws may take at a time.
MEMORY = 2**28
# New draws for a corrected leave-one-out value: with 1000 it is often further from the truth than the plain one.
CORRECTED_DRAWS = 10_000
# Largest number of log likelihoods, draws x rows, that are held for it.
CORRECTED_VALUES = 4e7
# Draws at which a linearised predictor is compared with the network's own.
LINEAR_DRAWS = 20


@dataclass(frozen=True)
class ParetoK:
    """Quality of an approximation q as an importance proposal, from S `draws`, made by `pareto_k`.

    `k` is the Pareto shape of w = p(w, D) / q(w), -inf if all are equal; `log_evidence` is log mean w, in the units of
    the fit; `relative_ess` is (sum w)^2 / (S sum w^2); `elbo` is mean log w; `gap` is log_evidence - elbo >= 0, with
    the noise that they share removed. E[elbo] <= E[log_evidence] <= log p(D) (Jensen; Burda et al. 2016).
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
        """Whether k-hat is at most 0.7. If not, q may still predict well: compare it with a reference."""
        return self.k <= K_LIMIT


def pareto_k(posterior: Any, draws: int | None = None) -> ParetoK:
    """Pareto k-hat of the weights w_s = p(u_s, D) / q(u_s), u_s ~ q, of a variational or Laplace posterior.

    Densities are in unconstrained coordinates and the units of the fit. With hundreds of weights in a network k-hat
    nearly always exceeds 0.7, however well q predicts. `draws` is 1000 by default, or as many as take 2e12
    multiplications over all rows, at least 100. Raises UnsupportedError without a density q, InputError for fewer than
    25 draws.
    """
    check_value(draws, optional(whole(25)), "draws", f"draws={DRAWS}")
    q = posterior.approximation
    rng = np.random.default_rng(site_seed("pareto_k", posterior.info.seed))
    known = posterior.kind == "iid" and q.log_prob(q.draw(1, np.random.default_rng(0))) is not None
    expected = "an approximation with a density, such as SVI or Laplace"
    got = f"{posterior.info.method}, of kind {posterior.kind!r}"
    UnsupportedError.check(known, "pareto_k", expected, got, "bnn.diagnose, which chooses what is defined")
    size = coordinates(q)
    if draws is None:
        draws = max(LEAST_DRAWS, min(DRAWS, int(WORK / (size * row_count(posterior.inputs)))))
    kept = kept_draws(q)
    draws = int(draws) if kept is None else min(int(draws), kept)
    # Draws that are stored in a fixed order can only be taken all at once.
    at_a_time = max(1, MEMORY // (8 * size)) if kept is None else draws
    parts = (q.draw(stop - start, rng) for start, stop in chunks(draws, at_a_time))
    return pareto_k_of(np.concatenate([_log_ratios(posterior, u) for u in parts]))


def _log_ratios(posterior: Any, u: dict[str, np.ndarray]) -> np.ndarray:
    """log p(u_s, D) - log q(u_s) in float64, (S,)."""
    log_q = np.asarray(posterior.approximation.log_prob(u), dtype=np.float64)
    return posterior.log_joint(u).astype(np.float64) - log_q


def kept_draws(approximation: Any) -> int | None:
    """Number of draws of an approximation that can make no new ones (a hand-written guide), else None."""
    first = next(iter(getattr(approximation, "members", None) or [approximation]))
    return getattr(first, "count", None)


def pareto_k_of(log_ratios: np.ndarray) -> ParetoK:
    """Pareto k-hat from given log importance ratios log p(u_s, D) - log q(u_s), (S,)."""
    log_ratios = np.asarray(log_ratios, dtype=np.float64).ravel()
    count = len(log_ratios)
    if not np.isfinite(log_ratios).all():
        # The joint density is 0 or undefined at some draw: the weights cannot be claimed to have finite moments.
        return ParetoK(math.inf, math.nan, math.inf, 0.0, count)
    top, elbo = float(log_ratios.max()), float(log_ratios.mean())
    weights = np.exp(log_ratios - top)
    mean = float(weights.mean())
    effective = float(weights.sum() ** 2 / np.sum(weights**2))
    # The delta method: the influence of each draw on log mean w, and the part that it shares with mean log w.
    influence = weights / mean
    parts = (influence, log_ratios, influence - log_ratios)
    evidence_se, elbo_se, gap_se = (float(part.std(ddof=1) / math.sqrt(count)) for part in parts)
    k, log_evidence = smoothed(log_ratios)[1], top + math.log(mean)
    # With equal weights the difference is rounding error of either sign.
    gap = max(0.0, (top - elbo) + math.log(mean))
    return ParetoK(k, log_evidence, evidence_se, effective / count, count, elbo, elbo_se, gap, gap_se)


@dataclass(frozen=True)
class LeaveOneOut:
    """PSIS-LOO of a posterior, made by `leave_one_out`; NaN with a `reason` if it is not defined.

    `elpd` is sum_i log p(y_i | the other rows) in original units, `p_loo` the effective number of parameters. `worst_k`
    and `share_above` (0.7) describe the Pareto k of rows, infinite if a tail could not be fitted. `corrected_*` is the
    value with weights p/q, or the reason why there is none. `elpd_data` is for ArviZ's `compare`.
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
        """The largest of `corrected_k`; NaN if there is none."""
        return math.nan if self.corrected_k is None else float(self.corrected_k.max())

    @property
    def corrected_share_above(self) -> float:
        """The share of rows whose `corrected_k` is above 0.7; NaN if there is none."""
        return math.nan if self.corrected_k is None else float(np.mean(~(self.corrected_k <= K_LIMIT)))


def leave_one_out(source: Any, tree: Any = None) -> LeaveOneOut:
    """Expected log predictive density under leave-one-out cross-validation, by PSIS, of a posterior or its tree.

    The figures are those of `arviz_stats.loo(tree, pointwise=True)`; draws of an approximation count as posterior
    draws. They are not defined for a single point, for a posterior most of whose weights are points, nor for weights
    chosen by stacking: these have used every row.

    The corrected figures (`arviz_stats.loo_approximate_posterior`; Magnusson et al. 2019) weight 10 000 new draws by
    p/q and need the posterior itself. They are reported only if k-hat of p/q and the Pareto k of every row are at most
    0.7: nearer the exact value only there (comparisons/corrected_leave_one_out.py). p/q belongs to the network itself,
    so a linearised predictive has them only if its predictor is linear in the weights.
    """
    posterior = None if hasattr(source, "children") else source
    tree = source if posterior is None else tree
    kind = str(tree.attrs["posterior_kind"]) if posterior is None else posterior.kind
    if kind == "point":
        return _undefined(no_leave_one_out(kind, np.empty((1, 1, 0))))
    tree = posterior_datatree(posterior) if tree is None else tree
    if "weights" in tree.attrs:
        return _undefined("draws of stacked parts do not count alike, and the weights have seen every row")
    if why := str(tree.attrs.get("no_leave_one_out", "")):
        return _undefined(why)
    if not np.isfinite(tree["log_likelihood"]["y"].values).all():
        return _undefined("the log likelihood is not finite for some draw and row")
    import arviz_stats

    # ArviZ warns if k exceeds its limit; worst_k and share_above report that in numbers.
    with ignored():
        try:
            found: Any = arviz_stats.loo(tree, pointwise=True)  # pyright: ignore[reportPrivateImportUsage]
        except (ValueError, IndexError) as error:
            return _undefined(f"importance weights could not be smoothed: {error}")
    k = np.asarray(found.pareto_k.values)
    if kind == "chains":
        corrected: dict[str, Any] = {"corrected_reason": "draws of chains are from the posterior itself"}
    elif posterior is None:
        why = "a tree holds too few draws: it is made of fresh ones of the posterior"
        corrected = {"corrected_reason": why}
    else:
        corrected = _corrected(posterior)
    worst, share = float(np.where(np.isnan(k), math.inf, k).max()), float(np.mean(~(k <= K_LIMIT)))
    figures = (float(found.elpd), float(found.se), float(found.p), worst, share)
    return LeaveOneOut(*figures, elpd_data=found, **corrected)


def _undefined(reason: str) -> LeaveOneOut:
    return LeaveOneOut(*[math.nan] * 5, reason=reason, corrected_reason=reason)


def _corrected(posterior: Any) -> dict[str, Any]:
    """The fields of `LeaveOneOut` with the weights p/q, or why there are none."""
    u = _corrected_draws(posterior)
    if isinstance(u, str):
        return {"corrected_reason": u}
    log_ratios = _log_ratios(posterior, u)
    log_likelihood = _log_likelihood(posterior, u, row_count(posterior.inputs))
    if not (np.isfinite(log_ratios).all() and np.isfinite(log_likelihood).all()):
        return {"corrected_reason": "p/q or the log likelihood is not finite for some draw"}
    return _published(*_leave_out(log_likelihood, log_ratios), smoothed(log_ratios)[1])


def _corrected_draws(posterior: Any) -> dict[str, np.ndarray] | str:
    """Draws for the corrected value, or why there is none; cheap conditions are checked first."""
    try:
        overall = pareto_k(posterior).k
    except UnsupportedError:
        return "the approximation has no density"
    if not overall <= K_LIMIT:
        return f"k-hat of p/q is {overall:.2f}, above {K_LIMIT}"
    q, rows = posterior.approximation, row_count(posterior.inputs)
    size = coordinates(q)
    takes = f"it takes {CORRECTED_DRAWS} draws"
    if kept_draws(q) is not None:
        return f"{takes}, and there are no more than were kept"
    if CORRECTED_DRAWS * rows > CORRECTED_VALUES or 8 * CORRECTED_DRAWS * size > MEMORY:
        return f"{takes}, too many for {rows} rows and {size} coordinates"
    if held_coordinates(posterior):
        return "some weights are held at a value: p/q belongs to the others alone"
    seed = site_seed("corrected_leave_one_out", posterior.info.seed)
    u = q.draw(CORRECTED_DRAWS, np.random.default_rng(seed))
    if q.kinds[0] == "linearised" and not _linear(posterior, u):
        linear = "the predictive is linearised, the predictor is not linear in the weights"
        return f"{linear}, and p/q belongs to the network itself"
    return u


def _published(elpd: np.ndarray, k: np.ndarray, overall: float) -> dict[str, Any]:
    """The value from rows elpd (N,), unless k-hat of p/q or the Pareto k of some row (N,) forbids it."""
    above = ~(k <= K_LIMIT)
    if not overall <= K_LIMIT:
        found: dict[str, Any] = {"corrected_reason": f"k-hat of p/q is {overall:.2f}, above {K_LIMIT}"}
    elif above.any():
        share = f"in {above.mean():.1%} of the rows, {k.max():.2f} at most"
        found = {"corrected_reason": f"with the weights p/q Pareto k is above {K_LIMIT} {share}"}
    else:
        se = float(math.sqrt(len(elpd)) * elpd.std(ddof=1))
        found = {"corrected_elpd": float(elpd.sum()), "corrected_se": se}
    return {**found, "corrected_k": k}


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


def coordinates(approximation: Any) -> int:
    """Number of coordinates of one draw."""
    return sum(value.size for value in approximation.draw(1, np.random.default_rng(0)).values())


def held_coordinates(posterior: Any) -> int:
    """Number of coordinates of latent sites that are the same in every draw, although they have a prior."""
    draws = posterior.approximation.draw(3, np.random.default_rng(0))
    sites = posterior.with_problem(lambda problem: problem.program.sites)
    latent = (value for name, value in draws.items() if not sites[name].is_param)
    return sum(int(np.count_nonzero(np.ptp(value, axis=0) == 0.0)) for value in latent)


def _linear(posterior: Any, u: dict[str, np.ndarray]) -> bool:
    """Whether the linearised predictor equals the network's own up to rounding, for a few draws at training rows."""
    few = {name: value[:LINEAR_DRAWS] for name, value in u.items()}

    def both(problem: Any) -> list[np.ndarray]:
        q, x = posterior.approximation, posterior.inputs
        drawn = (q.predictor_draws(problem, few, x, kind, 0, MEMORY) for kind in ("linearised", "sampled"))
        return [np.asarray(each).astype(np.float64) for each in drawn]

    linearised, sampled = posterior.with_problem(both)
    rounding = float(np.sqrt(np.finfo(np.dtype(posterior.info.dtype)).eps))
    return bool(np.abs(linearised - sampled).max() <= rounding * max(1.0, np.abs(sampled).max()))
