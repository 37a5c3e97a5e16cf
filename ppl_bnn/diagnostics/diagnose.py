"""Verdict on a fitted posterior: converged, adequate or not, why, and what to try."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.diagnostics.calibration import MISCALIBRATED, Calibration
from ppl_bnn.diagnostics.function_space import RESTART_LIMIT, Convergence, agreement, convergence, probe_rows
from ppl_bnn.diagnostics.importance import K_LIMIT, ParetoK, held_coordinates, pareto_k
from ppl_bnn.diagnostics.remedies import (
    fitted_settings,
    longer_optimisation,
    more_chains,
    more_modes,
    more_of_a_sampler,
    not_still,
    other_starts,
    smaller_steps,
)
from ppl_bnn.diagnostics.sbc import simulation_based_calibration
from ppl_bnn.inference.method import Method
from ppl_bnn.prediction.scores import fidelity, noise_floor

CONVERGED = "converged"
PER_MODE = "converged per mode only"
NOT_CONVERGED = "not converged"
ADEQUATE = "adequate as far as seen"
INADEQUATE = "inadequate"
UNDECIDED = "undecided"
VERDICTS = (CONVERGED, PER_MODE, NOT_CONVERGED, ADEQUATE, INADEQUATE, UNDECIDED)

DIVERGENCE_LIMIT = 0.01
TREE_DEPTH_LIMIT = 0.05
BFMI_LIMIT = 0.3
MEAN_GAP_LIMIT = 0.5
SD_RATIO_LIMIT = 1.5
REFERENCE_ROWS = 200
# The loss curve is read in windows of a tenth; with fewer losses than this it is not read.
WINDOWS, FEWEST_LOSSES, LEAST_FALL = 10, 40, 0.1


@dataclass(frozen=True)
class Diagnosis:
    """Verdict on a posterior, made by `diagnose`.

    Parameters
    ----------
    verdict : str
        One of `VERDICTS`.
    reasons : tuple of str
        The findings, one sentence each.
    advice : tuple of str
        What to try.
    figures : dict of str to float
        The numbers behind the findings.
    subject : str
        What was diagnosed.
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


def diagnose(
    posterior: Any,
    *,
    reference: Any = None,
    calibration: Calibration | Method | None = None,
    simulations: int = 100,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> Diagnosis:
    """Judge a posterior by the diagnostics that are defined for its kind.

    - Chains: R-hat and ESS in function space (`diagnostics.function_space.convergence`), and divergences, saturated
      trees and E-BFMI if the sampler recorded them. The verdict is "converged"; "converged per mode only" if each chain
      converged by itself and they disagree: they are in parts of the posterior that they do not leave, whose
      probabilities are unknown; "not converged"; or "undecided" if R-hat and ESS are good but more than 1 % of the
      transitions diverged, an E-BFMI is below 0.3, or the run was ended by its budget. If the chains target another
      distribution than the posterior (a tempered target, a sampler with a bias), the reasons say so: the chains
      converged to that.
    - Approximations: whether the optimisation settled, by the method's own test and by the loss over its last two
      tenths; the ELBO with its standard error; Pareto k-hat of p(w, D)/q(w); the importance-weighted evidence
      log mean p/q with its standard error (not reliable if k-hat exceeds 0.7) and its gap to the ELBO; and, if the
      approximation was fitted from several starts, whether these agree in function space
      (`diagnostics.function_space.agreement`). k-hat alone never gives "inadequate": above 0.7 the verdict is
      "undecided", as it is if restarts differ, and only a reference can decide. The reasons also name a tempered
      target, an objective other than the ELBO, weights held at a value, and the method's own warnings (an approximate
      estimator, an improper prior). If q has no density (particles, dropout masks), the figures based on p/q are not
      defined, and the reasons say so.
    - A point: whether the optimisation settled; it has no spread to judge.

    Parameters
    ----------
    posterior : Posterior
        The posterior to judge.
    reference : Posterior, optional
        A posterior of chains of the same model on the same data. If it has converged ("per mode only" is not enough;
        stacked chains and chains of another target do not qualify), the approximation is compared with it at up to 200
        training rows. It is "inadequate" if its predictive mean is off by more than 0.5 epistemic standard deviations
        of the reference, or if the standard deviations differ by more than a factor of 1.5, unless that is within the
        noise floor, the same figures between two halves of the reference.
    calibration : Calibration or Method, optional
        A `Calibration` from `bnn.simulation_based_calibration`, or the method to calibrate: it is then fitted
        `simulations` times to data drawn from the posterior's own model at its training inputs (in the units of the
        fit). Calibration is a property of the method on this model, averaged over all data that the prior allows.
        Miscalibration turns "adequate" and "converged" into "undecided", never into "inadequate".
    simulations : int
        Number of simulations, if `calibration` is a method.
    seed : int
        Seed of the simulations.
    progress : bool or Progress, optional
        Progress of the simulations.

    Returns
    -------
    Diagnosis

    Raises
    ------
    UnsupportedError
        A reference that is not a posterior of chains, or a calibration of a model that cannot be simulated.
    InputError
        A reference for other data, or a calibration of another type.
    """
    if not isinstance(calibration, Calibration | Method | None):
        raise InputError.of(
            "calibration",
            "a Calibration, or a method to calibrate",
            repr(calibration),
            "bnn.simulation_based_calibration(model, x, method)",
        )
    found = _Findings(compared=reference is not None)
    verdict = {"chains": _chains, "iid": _approximation, "point": _point}[posterior.kind](posterior, found)
    found.reasons.extend(posterior.info.warnings)
    if reference is not None:
        compared = _against(posterior, reference, found)
        # Advice on convergence comes first; chains that have converged need no "as far as seen".
        if verdict not in (NOT_CONVERGED, PER_MODE) and (
            compared == INADEQUATE or posterior.kind != "chains"
        ):
            verdict = compared or verdict
    if calibration is not None:
        if isinstance(calibration, Method):
            calibration = simulation_based_calibration(
                posterior.model,
                posterior.inputs,
                calibration,
                simulations=simulations,
                seed=seed,
                progress=progress,
                observed=None if posterior.language else posterior.observed,
            )
        verdict = _calibrated(calibration, verdict, found)
    subject = f"{posterior.info.method} in {posterior.info.ppl}"
    advice = tuple(dict.fromkeys(found.advice))
    return Diagnosis(verdict, tuple(dict.fromkeys(found.reasons)), advice, found.figures, subject)


def _chains(posterior: Any, found: _Findings) -> str:
    judged = convergence(posterior)
    found.figures |= {name: float(value) for name, value in posterior.info.figures.items()}
    found.figures |= judged.figures | {"chains": judged.chains, "draws": judged.draws}
    if judged.converged:
        nested = "" if judged.superchains is None else f", nested over {judged.superchains} groups of chains,"
        found.reasons.append(
            f"in function space the worst R-hat{nested} is {judged.rhat:.3f}, the smallest bulk ESS "
            f"{judged.ess_bulk:.0f} and tail ESS {judged.ess_tail:.0f}, over {judged.chains} chains of {judged.draws} "
            "draws"
        )
    else:
        found.reasons.extend(judged.reasons)
        _advise(posterior, judged, found)
    _aim(posterior, found)
    doubtful = _sampler(posterior, found)
    cut_short = _cut_short(posterior, found)
    if judged.per_mode:
        return PER_MODE
    if not judged.converged:
        return NOT_CONVERGED
    return UNDECIDED if doubtful or cut_short else CONVERGED


def _advise(posterior: Any, judged: Convergence, found: _Findings) -> None:
    """What to try with chains that have not converged."""
    settings = fitted_settings(posterior)
    if judged.per_mode:
        found.advice += more_modes(settings)
        return
    if judged.chains < 2:
        found.advice += more_chains(settings)
    if judged.still:
        found.advice.append(not_still(settings, smaller_steps(settings, posterior.statistics)))
    found.advice += more_of_a_sampler(settings)
    if not judged.rhat < 1.1:
        found.advice += other_starts(settings)
        found.advice.append(
            "a smaller network or a tighter prior: the chains may sit in modes that predict differently"
        )


def _aim(posterior: Any, found: _Findings) -> None:
    """The target of chains, if it is not the posterior."""
    if posterior.info.target:
        found.reasons.append(
            f"the target of the chains is not the posterior: {posterior.info.target}; that is what they are judged by"
        )
    weights = posterior.weights
    if weights is not None:
        found.reasons.append(
            f"{len(weights)} parts are stacked, with weights from {weights.min():.3f} to {weights.max():.3f}: what is "
            "said here is about the chains, each counted alike; their mixture is chosen for its predictions"
        )


def _cut_short(posterior: Any, found: _Findings) -> bool:
    """Whether the run ended before its stopping criterion was met."""
    figures = posterior.info.figures
    unmet = figures.get("rule_held") == 0.0
    spent = figures.get("stopped_by_budget") == 1.0
    if not unmet and not spent:
        return False
    if not _said(posterior, "budget"):
        wanted = posterior.info.settings.get("until")
        rule = f", before until={wanted!r} held" if wanted else ""
        found.reasons.append(
            f"the run was ended by its budget{rule}" if spent else f"until={wanted!r} did not hold"
        )
    # Particles are not chains and cannot be continued.
    more = "" if "moves" in fitted_settings(posterior) else ", or bnn.extend(posterior, draws=...)"
    found.advice.append(f"a larger budget{more}")
    return True


def _said(posterior: Any, word: str) -> bool:
    """Whether the method itself has warned of this already, in words that are among the reasons."""
    return any(word in warning for warning in posterior.info.warnings)


def _sampler(posterior: Any, found: _Findings) -> bool:
    """The sampler's own figures, and whether they cast doubt on draws that look converged."""
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
            found.advice.append(smaller_steps(fitted_settings(posterior), statistics))
            doubtful = share > DIVERGENCE_LIMIT
    if "reached_max_tree_depth" in statistics:
        share = float(np.mean(statistics["reached_max_tree_depth"]))
        found.figures["tree_depth_saturation"] = share
        if share > TREE_DEPTH_LIMIT:
            found.reasons.append(
                f"{share:.0%} of the trajectories were cut off at the greatest tree depth: slow, not wrong"
            )
            depth = "a greater max_tree_depth, or " if "max_tree_depth" in fitted_settings(posterior) else ""
            found.advice.append(f"{depth}standardise=True and a longer warm-up")
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
    """Whether the optimisation settled, as far as the method reports it."""
    figures = posterior.info.figures
    found.figures |= {name: float(value) for name, value in figures.items()}
    if "gradient_norm" in figures:
        found.reasons.append(f"the norm of the gradient at the mode is {figures['gradient_norm']:.3g}")
    if "rise_along_gradient" in figures:
        found.reasons.append(
            "the log joint has kinks, where its gradient does not vanish at a mode; along the gradient it rises by "
            f"{figures['rise_along_gradient']:.3g} nats"
        )
    settled = bool(figures["converged"]) if "converged" in figures else None
    settled = _loss_curve(posterior, settled, found)
    if not settled:
        if not _said(posterior, "still falling"):
            found.reasons.append("the optimisation used all its steps without reaching a plateau")
        found.advice += longer_optimisation(fitted_settings(posterior))
    return settled


def _loss_curve(posterior: Any, settled: bool | None, found: _Findings) -> bool:
    """Whether the optimisation settled, by the method's own test or else by the end of the loss curve.

    By the loss curve it settled if the mean over the last tenth of the losses is below that of the tenth before by at
    most max(2 standard errors of the difference, 0.1 nats).
    """
    losses = np.asarray(posterior.info.history.get("loss", ()), dtype=np.float64)
    # A loss without noise, such as that of a mode, is judged by its gradient.
    if losses.ndim != 1 or len(losses) < FEWEST_LOSSES or "gradient_norm" in posterior.info.figures:
        return settled is not False
    window = len(losses) // WINDOWS
    before, last = losses[-2 * window : -window], losses[-window:]
    if not (np.isfinite(before).all() and np.isfinite(last).all()):
        return settled is not False
    fall = float(before.mean() - last.mean())
    error = math.sqrt(float(before.var(ddof=1) + last.var(ddof=1)) / window)
    found.figures |= {"loss_fall": fall, "loss_fall_se": error}
    judged = ""
    if settled is not None:
        judged = f"the method's own test found {'a' if settled else 'no'} plateau; "
    found.reasons.append(
        f"{judged}from the last tenth but one of the {len(losses)} losses to the last, their mean "
        f"{'fell' if fall >= 0.0 else 'rose'} by {abs(fall):.3g} "
        f"nats (standard error {error:.2g})"
    )
    return fall <= max(2.0 * error, LEAST_FALL) if settled is None else settled


def _approximation(posterior: Any, found: _Findings) -> str:
    settled = _optimisation(posterior, found)
    tempered = _target(posterior, found)
    agreed = _agreement(posterior, settled, found)
    try:
        pareto = pareto_k(posterior)
    except UnsupportedError:
        found.reasons.append(
            "the approximation has no density, so that what is made of p(w, D)/q(w) is not defined: k-hat, the ELBO, "
            "the importance-weighted evidence"
        )
        if "elbo" in posterior.info.figures and not tempered:
            found.reasons.append(f"the method itself gives an ELBO of {posterior.info.figures['elbo']:.2f}")
        _ask_for_reference(found)
        return UNDECIDED if settled else NOT_CONVERGED
    held = held_coordinates(posterior)
    _bounds(posterior, pareto, tempered, held, found)
    found.figures |= {
        "pareto_k": pareto.k,
        "importance_log_evidence": pareto.log_evidence,
        "importance_log_evidence_se": pareto.log_evidence_se,
        "importance_relative_ess": pareto.relative_ess,
    }
    about = "Pareto k-hat of p(w, D)/q(w)" + (" (p not tempered)" if tempered else "")
    if pareto.reliable:
        found.reasons.append(f"{about} is {pareto.k:.2f}, at most {K_LIMIT}: importance weights find no gap")
    else:
        size = sum(value.size for value in posterior.approximation.draw(1, np.random.default_rng(0)).values())
        found.reasons.append(
            f"{about} is {pareto.k:.2f}, above {K_LIMIT}: q is no proposal for importance "
            f"sampling over {size} coordinates, which alone does not say that its predictions are poor"
        )
        _ask_for_reference(found)
        found.advice.append("scores on held-out rows, coverage above all")
    if not settled:
        return NOT_CONVERGED
    return ADEQUATE if pareto.reliable and agreed and not held else UNDECIDED


def _target(posterior: Any, found: _Findings) -> bool:
    """What was fitted if it was not the posterior by its ELBO, and whether the target was tempered."""
    settings = fitted_settings(posterior)
    weight = settings.get("kl_weight", 1.0)
    tempered = isinstance(weight, int | float) and not isinstance(weight, bool) and weight != 1.0
    temperature = settings.get("temperature", 1.0)
    if isinstance(temperature, int | float) and temperature != 1.0:
        tempered = True
        found.figures["temperature"] = float(temperature)
        found.reasons.append(
            f"temperature={temperature:g}: the fit aimed at another target, proportional to p(w, D)^"
            f"{1.0 / temperature:.3g}; what is said of p/q, the ELBO and the evidence is about the posterior, not "
            "about that target"
        )
    elif tempered:
        found.figures["kl_weight"] = float(weight)
        found.reasons.append(
            f"kl_weight={weight:g}: the fit aimed at another target, proportional to p(w) p(D | w)^{1.0 / weight:.3g}; "
            "what is said of p/q, the ELBO and the evidence is about the posterior, not about that target"
        )
    objective = settings.get("objective")
    # A Laplace approximation also has an objective, that of its hyper-parameters.
    if posterior.info.method != "Laplace" and objective not in (None, "elbo"):
        found.reasons.append(
            f"the fit maximised the objective {objective!r}; the ELBO given is of what it found"
        )
    return tempered


def _bounds(posterior: Any, pareto: ParetoK, tempered: bool, held: int, found: _Findings) -> None:
    """The ELBO and the importance-weighted evidence, and what they bound."""
    figures = posterior.info.figures
    elbo, error = pareto.elbo, pareto.elbo_se
    # The method's own estimate uses more draws; it is taken if it is one of the posterior itself.
    if "elbo" in figures and not tempered:
        elbo, error = figures["elbo"], figures.get("elbo_se", math.nan)
    if math.isfinite(elbo):
        found.figures |= {"elbo": float(elbo)}
        known = ""
        if math.isfinite(error):
            found.figures["elbo_se"] = float(error)
            known = f" (standard error {error:.2g})"
        bounded = "a lower bound on the log evidence"
        if _said(posterior, "improper"):
            bounded = "up to a constant, as a prior is improper"
        if held:
            bounded = f"a lower bound on log p(D, what is held): {held} coordinates are held at a value in every draw"
        found.reasons.append(f"the ELBO is {elbo:.2f}{known}, {bounded}")
    if not math.isfinite(pareto.log_evidence):
        found.reasons.append("p/q is not finite for some draw of q: there is no importance-weighted evidence")
        return
    found.figures |= {"evidence_gap": pareto.gap, "evidence_gap_se": pareto.gap_se}
    trust = (
        "" if pareto.reliable else f"; not to be trusted, nor its standard error, as k-hat exceeds {K_LIMIT}"
    )
    found.reasons.append(
        f"the importance-weighted evidence, log mean p/q over {pareto.draws} draws, is {pareto.log_evidence:.2f} "
        f"(standard error {pareto.log_evidence_se:.2g}), {pareto.gap:.2g} nats above the ELBO of the same draws and in "
        f"expectation still a lower bound{trust}"
    )


def _agreement(posterior: Any, settled: bool, found: _Findings) -> bool:
    """Whether restarts, if there were several, gave the same predictive distribution."""
    if posterior.approximation.components:
        _members(posterior, found)
        return True
    if len(getattr(posterior.approximation, "members", None) or ()) < 2:
        return True
    judged = agreement(posterior)
    found.figures |= {"restarts": judged.count, "restart_rhat": judged.rhat}
    bounds = ""
    if judged.elbo is not None and np.isfinite(judged.elbo).any():
        finite = judged.elbo[np.isfinite(judged.elbo)]
        found.figures |= {
            "restart_elbo_best": float(finite.max()),
            "restart_elbo_spread": float(np.ptp(finite)),
        }
        bounds = f"; their ELBOs go from {finite.min():.2f} to {finite.max():.2f}"
        if len(finite) < len(judged.elbo):
            bounds += f", and {len(judged.elbo) - len(finite)} have none"
    if judged.agree:
        found.reasons.append(
            f"restarts agree: over {judged.count} of them R-hat in function space is {judged.rhat:.3f}, below "
            f"{RESTART_LIMIT}{bounds}"
        )
        return True
    why = (
        "there are other modes, which predict otherwise and which one fit does not show"
        if settled
        else "there are other modes, or they would agree after more steps"
    )
    found.reasons.append(
        f"restarts differ: over {judged.count} of them R-hat of {judged.worst} is {judged.rhat:.3f}, not below "
        f"{RESTART_LIMIT}{bounds}: {why}"
    )
    mixture = (
        "a mixture of the restarts, guide='mixture', or " if "guide" in fitted_settings(posterior) else ""
    )
    found.advice.append(f"{mixture}NUTS: a single mode is not the posterior")
    return False


def _members(posterior: Any, found: _Findings) -> None:
    """The components of a mixture and how far they differ, which is intended and does not enter the verdict."""
    parts, weights = posterior.approximation.components, posterior.weights
    how = (
        "of equal weight"
        if weights is None
        else f"with stacked weights from {weights.min():.3f} to {weights.max():.3f}"
    )
    differ = ""
    # Points do not vary: between them R-hat is infinite whatever they predict.
    spread = all(part.kind != "point" for part in parts)
    if spread and len(getattr(posterior.approximation, "members", None) or ()) > 1:
        judged = agreement(posterior)
        found.figures |= {"members": judged.count, "member_rhat": judged.rhat}
        differ = (
            f"; they agree in function space (R-hat {judged.rhat:.3f})"
            if judged.agree
            else f"; they differ in function space (R-hat of {judged.worst} is {judged.rhat:.3f}), as other modes do"
        )
    found.reasons.append(f"a mixture of {len(parts)} members {how}{differ}")


def _calibrated(calibration: Calibration, verdict: str, found: _Findings) -> str:
    """The findings of a calibration, and the verdict after it."""
    found.figures |= {"simulations": calibration.simulations, "simulations_failed": len(calibration.failures)}
    found.reasons.extend(
        f"simulation-based calibration of {calibration.subject}: {reason}" for reason in calibration.reasons
    )
    if calibration.tests:
        found.figures["calibration_least_p"] = min(test.least for test in calibration.tests.values())
    if calibration.verdict == MISCALIBRATED:
        found.advice.append(
            "a richer approximation: this one misses the truth of data that its own model makes"
        )
        return UNDECIDED if verdict in (ADEQUATE, CONVERGED) else verdict
    return verdict


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
    """The gap to a reference; None if the reference cannot decide."""
    if reference.kind != "chains":
        raise UnsupportedError.of(
            "diagnose",
            "a reference of chains, whose convergence can be judged",
            f"{reference.info.method}, of kind {reference.kind!r}",
            "a NUTS posterior of the same model and data",
        )
    judged = convergence(reference)
    found.figures |= {f"reference_{name}": value for name, value in judged.figures.items()}
    if not judged.converged:
        how = "has converged per mode only" if judged.per_mode else "has not converged"
        found.reasons.append(
            f"the would-be reference {how} (R-hat {judged.rhat:.3f}, bulk ESS {judged.ess_bulk:.0f}): "
            "it decides nothing"
        )
        found.advice.append("chains that move between modes" if judged.per_mode else "a longer reference run")
        return None
    if reference.target:
        found.reasons.append(
            f"the would-be reference is not of the posterior ({reference.target}): it decides nothing"
        )
        found.advice.append("a reference of the posterior itself, by an exact sampler")
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
