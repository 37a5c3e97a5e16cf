"""Importance weights as a check: of an approximation against the posterior, and of draws against leaving a row
out.

Both fit a generalised Pareto distribution to the largest weights; its shape k-hat says how far the weights can
be trusted (Vehtari, Simpson, Gelman, Yao and Gabry 2024, Journal of Machine Learning Research 25): below 0.7
they can.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.errors import InputError, UnsupportedError, message
from ppl_bnn.export import log_likelihood_tree
from ppl_bnn.pareto import K_LIMIT, smoothed
from ppl_bnn.ppl.protocol import chunks, row_count, site_seed

DRAWS = 1000
# Fewer draws, but no fewer than so many, where rows x coordinates x draws would take more multiplications than WORK.
LEAST_DRAWS = 100
WORK = 2e12
# Bytes that draws may take at a time.
MEMORY = 2**28


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
    where that is not defined. elpd_data: what ArviZ's `compare` takes.
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


def leave_one_out(source: Any) -> LeaveOneOut:
    """Expected log predictive density under leave-one-out cross-validation, by Pareto-smoothed importance
    sampling.

    source: a posterior, or its tree. The figures are those of `arviz_stats.loo(tree, pointwise=True)`, so that
    they can be had again from a saved tree. Draws of an approximation are taken at their word there, as if they
    were from the posterior; the corrected figures (`arviz_stats.loo_approximate_posterior`; Magnusson,
    Andersen, Jonasson and Vehtari 2019) weight them by p/q, and stay blank where k-hat of p/q exceeds 0.7, or
    where the predictive is linearised: p/q belongs to the network itself. A single point has no spread to leave
    a row out of, and weights that stacking chose have seen every row.
    """
    tree = source if hasattr(source, "children") else None
    kind = source.kind if tree is None else str(tree.attrs["posterior_kind"])
    if kind == "point":
        reason = "a single point has no posterior spread, without which no row can be left out by weights"
        return LeaveOneOut(*[math.nan] * 5, reason=reason, corrected_reason=reason)
    if tree is None:
        tree = log_likelihood_tree(source)
    if "weights" in tree.attrs:
        reason = "draws of stacked parts do not count alike, and the weights have seen every row"
        return LeaveOneOut(*[math.nan] * 5, reason=reason, corrected_reason=reason)
    if not np.isfinite(tree["log_likelihood"]["y"].values).all():
        reason = "the log likelihood is not finite for some draw and row"
        return LeaveOneOut(*[math.nan] * 5, reason=reason, corrected_reason=reason)
    import arviz_stats

    stats: Any = arviz_stats

    with warnings.catch_warnings():
        # ArviZ warns where k exceeds its limit; that is what worst_k and share_above say in figures.
        warnings.simplefilter("ignore")
        try:
            found = stats.loo(tree, pointwise=True)
        except (ValueError, IndexError) as error:
            # A handful of draws has no tail at all, which ArviZ notices by its index.
            reason = f"importance weights could not be smoothed: {error}"
            return LeaveOneOut(*[math.nan] * 5, reason=reason, corrected_reason=reason)
    k = np.asarray(found.pareto_k.values)
    corrected, corrected_se, corrected_reason = math.nan, math.nan, ""
    statistics = tree["sample_stats"]
    if kind == "chains":
        corrected_reason = "draws of chains are from the posterior itself"
    elif "log_q" not in statistics:
        corrected_reason = "the approximation has no density"
    elif str(tree.attrs["predictive"]) != "sampled":
        corrected_reason = (
            f"the predictive is {tree.attrs['predictive']}, and p/q belongs to the network itself"
        )
    else:
        log_p, log_q = statistics["lp"].values.ravel(), statistics["log_q"].values.ravel()
        k_hat = pareto_k_of(log_p - log_q).k
        if not k_hat <= K_LIMIT:
            corrected_reason = f"k-hat of p/q is {k_hat:.2f}, above {K_LIMIT}"
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                weighted = stats.loo_approximate_posterior(tree, log_p=log_p, log_q=log_q, pointwise=True)
            corrected, corrected_se = float(weighted.elpd), float(weighted.se)
            if math.isnan(corrected):
                corrected_reason = "the weights p/q could not be smoothed for some row"
    return LeaveOneOut(
        elpd=float(found.elpd),
        se=float(found.se),
        p_loo=float(found.p),
        worst_k=float(np.where(np.isnan(k), math.inf, k).max()),
        share_above=float(np.mean(~(k <= K_LIMIT))),
        corrected_elpd=corrected,
        corrected_se=corrected_se,
        corrected_reason=corrected_reason,
        elpd_data=found,
    )
