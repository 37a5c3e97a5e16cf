"""Converged? Adequate? Why, and what to try: one answer from whatever is defined for the kind of posterior."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.diagnostics.function_space import convergence, probe_rows
from ppl_bnn.diagnostics.importance import K_LIMIT, pareto_k
from ppl_bnn.errors import UnsupportedError, message
from ppl_bnn.scores import fidelity, noise_floor

CONVERGED = "converged"
NOT_CONVERGED = "not converged"
ADEQUATE = "adequate as far as seen"
INADEQUATE = "inadequate"
UNDECIDED = "undecided"
VERDICTS = (CONVERGED, NOT_CONVERGED, ADEQUATE, INADEQUATE, UNDECIDED)

DIVERGENCE_LIMIT = 0.01
TREE_DEPTH_LIMIT = 0.05
BFMI_LIMIT = 0.3
MEAN_GAP_LIMIT = 0.5
SD_RATIO_LIMIT = 1.5
REFERENCE_ROWS = 200


@dataclass(frozen=True)
class Diagnosis:
    """What the figures of a posterior say (see `diagnose`).

    verdict: one of `VERDICTS`. reasons: what was found, in sentences. advice: what to try. figures: the numbers
    behind them.
    """

    verdict: str
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    figures: dict[str, float] = field(default_factory=dict)
    subject: str = ""

    def __str__(self) -> str:
        lines = [f"{self.subject}: {self.verdict}" if self.subject else self.verdict]
        lines += [f"  - {reason}" for reason in self.reasons]
        if self.advice:
            lines += ["  try:", *(f"  - {advice}" for advice in self.advice)]
        return "\n".join(lines)


@dataclass
class _Findings:
    compared: bool
    reasons: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def diagnose(posterior: Any, *, reference: Any = None) -> Diagnosis:
    """Judge a posterior by what is defined for its kind.

    - Chains: R-hat and ESS in function space (`diagnostics.function_space.convergence`), divergences, saturated
    trees and E-BFMI
      where the sampler recorded them. "converged", "not converged", or "undecided" where R-hat and ESS are good
      but more than 1 % of the transitions diverged or an E-BFMI is below 0.3.
    - Approximations: whether the optimisation settled, the ELBO, and Pareto k-hat of p(w, D)/q(w). k-hat alone
    never gives
      "inadequate": above 0.7 the verdict is "undecided", and only a reference can decide.
    - A point: whether the optimisation settled; it has no spread to judge.

    reference: a posterior of chains of the same model, on the same data. If it has converged, the approximation
    is compared with it at up to 200 training rows: "inadequate" where the predictive mean is off by more than
    0.5 epistemic standard deviations of the reference, or the standard deviations differ by more than a factor
    of 1.5, unless that is within the noise floor, the same figures between two halves of the reference.

    Raises
    ------
    UnsupportedError: a reference that is not of chains. InputError: a reference for other data.
    """
    found = _Findings(compared=reference is not None)
    verdict = {"chains": _chains, "iid": _approximation, "point": _point}[posterior.kind](posterior, found)
    found.reasons.extend(posterior.info.warnings)
    if reference is not None:
        compared = _against(posterior, reference, found)
        # What has not converged is to be mended first; chains that have converged need no "as far as seen".
        if verdict != NOT_CONVERGED and (compared == INADEQUATE or posterior.kind != "chains"):
            verdict = compared or verdict
    subject = f"{posterior.info.method} in {posterior.info.ppl}"
    advice = tuple(dict.fromkeys(found.advice))
    return Diagnosis(verdict, tuple(dict.fromkeys(found.reasons)), advice, found.figures, subject)


def _chains(posterior: Any, found: _Findings) -> str:
    judged = convergence(posterior)
    found.figures |= judged.figures | {"chains": judged.chains, "draws": judged.draws}
    if judged.converged:
        found.reasons.append(
            f"in function space the worst R-hat is {judged.rhat:.3f}, the smallest bulk ESS {judged.ess_bulk:.0f} and "
            f"tail ESS {judged.ess_tail:.0f}, over {judged.chains} chains of {judged.draws} draws"
        )
    else:
        found.reasons.extend(judged.reasons)
        if judged.chains < 2:
            found.advice.append("chains=4")
        found.advice.append("more draws and a longer warm-up")
        if not judged.rhat < 1.1:
            found.advice.append("start=MAP(), so that no chain begins far out in the prior")
            found.advice.append(
                "a smaller network or a tighter prior: the chains may sit in modes that predict differently"
            )
    doubtful = _sampler(posterior, found)
    if not judged.converged:
        return NOT_CONVERGED
    return UNDECIDED if doubtful else CONVERGED


def _said(posterior: Any, word: str) -> bool:
    """Whether the method itself has warned of it, in words that are among the reasons anyway."""
    return any(word in warning for warning in posterior.info.warnings)


def _sampler(posterior: Any, found: _Findings) -> bool:
    """What the sampler recorded; whether it casts doubt on draws that look converged."""
    statistics = posterior.statistics
    doubtful = False
    if "diverging" in statistics:
        diverging = np.asarray(statistics["diverging"])
        count, share = int(np.count_nonzero(diverging)), float(np.mean(diverging))
        found.figures |= {"divergences": count, "divergence_share": share}
        if count:
            if not _said(posterior, "diverged"):
                found.reasons.append(
                    f"{count} of {diverging.size} transitions diverged ({share:.1%}): "
                    "parts of the posterior may be missed"
                )
            found.advice.append("target_accept=0.95")
            doubtful = share > DIVERGENCE_LIMIT
    if "reached_max_tree_depth" in statistics:
        share = float(np.mean(statistics["reached_max_tree_depth"]))
        found.figures["tree_depth_saturation"] = share
        if share > TREE_DEPTH_LIMIT:
            found.reasons.append(
                f"{share:.0%} of the trajectories were cut off at the greatest tree depth: slow, not wrong"
            )
            found.advice.append("a greater max_tree_depth, or standardise=True and a longer warm-up")
    if "energy" in statistics and np.asarray(statistics["energy"]).shape[1] > 2:
        from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

        energy = np.asarray(statistics["energy"], dtype=np.float64)
        with np.errstate(all="ignore"):
            fractions: Any = array_stats.bfmi(energy, chain_axis=0, draw_axis=1)
        lowest = float(np.min(fractions))
        found.figures["bfmi"] = lowest
        if not lowest >= BFMI_LIMIT:
            found.reasons.append(
                f"the lowest E-BFMI is {lowest:.2f}, below {BFMI_LIMIT}: the momentum does not reach all energies"
            )
            found.advice.append(
                "a prior without heavy tails, or scales of the prior that are not sampled with the weights"
            )
            doubtful = True
    return doubtful


def _optimisation(posterior: Any, found: _Findings) -> bool:
    """Whether the optimisation settled, as far as the method says."""
    figures = posterior.info.figures
    found.figures |= {name: float(value) for name, value in figures.items()}
    if "gradient_norm" in figures:
        found.reasons.append(f"the norm of the gradient at the mode is {figures['gradient_norm']:.3g}")
    if "elbo" in figures:
        error = figures.get("elbo_se", math.nan)
        known = f" (standard error {error:.2g})" if math.isfinite(error) else ""
        found.reasons.append(f"the ELBO is {figures['elbo']:.2f}{known}, a lower bound on the log evidence")
    if not figures.get("converged", 1.0):
        if not _said(posterior, "still falling"):
            found.reasons.append("the optimisation used all its steps without reaching a plateau")
        found.advice.append("more steps, or a larger learning rate that decays")
        return False
    return True


def _approximation(posterior: Any, found: _Findings) -> str:
    settled = _optimisation(posterior, found)
    try:
        pareto = pareto_k(posterior)
    except UnsupportedError:
        found.reasons.append("the approximation has no density, so k-hat is not defined")
        _ask_for_reference(found)
        return UNDECIDED if settled else NOT_CONVERGED
    found.figures |= {
        "pareto_k": pareto.k,
        "importance_log_evidence": pareto.log_evidence,
        "importance_relative_ess": pareto.relative_ess,
    }
    if pareto.reliable:
        found.reasons.append(
            f"Pareto k-hat of p(w, D)/q(w) is {pareto.k:.2f}, at most {K_LIMIT}: importance weights find no gap"
        )
    else:
        size = sum(value[0, 0].size for value in posterior.unconstrained_draws.values())
        found.reasons.append(
            f"Pareto k-hat of p(w, D)/q(w) is {pareto.k:.2f}, above {K_LIMIT}: q is no proposal for importance "
            f"sampling over {size} coordinates, which alone does not say that its predictions are poor"
        )
        _ask_for_reference(found)
        found.advice.append("scores on held-out rows, coverage above all")
    if not settled:
        return NOT_CONVERGED
    return ADEQUATE if pareto.reliable else UNDECIDED


def _ask_for_reference(found: _Findings) -> None:
    if not found.compared:
        found.advice.append("a reference: diagnose(posterior, reference=a converged NUTS posterior)")


def _point(posterior: Any, found: _Findings) -> str:
    settled = _optimisation(posterior, found)
    found.reasons.append(
        "a point has no spread: its predictions carry the noise only, no epistemic uncertainty"
    )
    found.advice.append("Laplace(), which puts a Gaussian around the same mode")
    return CONVERGED if settled else NOT_CONVERGED


def _against(posterior: Any, reference: Any, found: _Findings) -> str | None:
    """The gap to a reference; None where the reference cannot decide."""
    if reference.kind != "chains":
        raise UnsupportedError(
            "diagnose: "
            + message(
                "a reference of chains, whose convergence can be judged",
                f"{reference.info.method}, of kind {reference.kind!r}",
                "a NUTS posterior of the same model and data",
            )
        )
    judged = convergence(reference)
    found.figures |= {f"reference_{name}": value for name, value in judged.figures.items()}
    if not judged.converged:
        found.reasons.append(
            f"the would-be reference has not converged (R-hat {judged.rhat:.3f}, bulk ESS {judged.ess_bulk:.0f}): "
            "it decides nothing"
        )
        found.advice.append("a longer reference run")
        return None
    x = probe_rows(posterior, REFERENCE_ROWS)
    theirs = reference.predict(x)
    gap = fidelity(posterior.predict(x), theirs)
    floor = noise_floor(theirs, np.repeat(np.arange(judged.chains), judged.draws))
    found.figures |= gap | {f"{name}_floor": value for name, value in floor.items()}
    mean_limit = max(MEAN_GAP_LIMIT, floor["mean_gap"])
    ratio = abs(math.log(gap["sd_ratio"])) if gap["sd_ratio"] > 0 else math.inf
    ratio_limit = max(math.log(SD_RATIO_LIMIT), abs(math.log(floor["sd_ratio"])))
    found.reasons.append(
        f"against the reference the predictive mean is off by {gap['mean_gap']:.2f} of its epistemic standard "
        f"deviations (noise floor {floor['mean_gap']:.2f}), and the standard deviation is {gap['sd_ratio']:.2f} "
        f"times its own (noise floor {floor['sd_ratio']:.2f})"
    )
    if gap["mean_gap"] <= mean_limit and ratio <= ratio_limit:
        return ADEQUATE
    found.advice.append("the reference itself, or a richer approximation")
    return INADEQUATE
