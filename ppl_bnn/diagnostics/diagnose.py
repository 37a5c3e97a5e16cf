"""Verdict on a fitted posterior: converged, adequate or not, why, and what to try."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.notebook.html import Folded, card
from ppl_bnn.core.progress import Progress
from ppl_bnn.diagnostics import function_space, remedies
from ppl_bnn.diagnostics.calibration import MISCALIBRATED, Calibration
from ppl_bnn.diagnostics.importance import K_LIMIT, ParetoK, coordinates, held_coordinates, pareto_k
from ppl_bnn.diagnostics.power_scaling import LIMIT, power_scaling
from ppl_bnn.diagnostics.sbc import simulation_based_calibration
from ppl_bnn.inference.method import Method
from ppl_bnn.posterior.convergence import by_arviz
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

    def _repr_html_(self) -> str:
        heading = f"{self.subject}: {self.verdict}" if self.subject else self.verdict
        figures = {name: f"{value:.6g}" for name, value in self.figures.items()}
        advice = ("What to try:", self.advice) if self.advice else ()
        return card(heading, self.reasons, *advice, Folded("Figures", [figures]))


def diagnose(
    posterior: Any,
    *,
    x: Any = None,
    reference: Any = None,
    calibration: Calibration | Method | None = None,
    sensitivity: bool = False,
    simulations: int = 100,
    seed: int = 0,
    progress: bool | Progress | None = None,
) -> Diagnosis:
    """Judge a posterior by the diagnostics that are defined for its kind.

    - Chains: R-hat and ESS in function space, and divergences, saturated trees and E-BFMI if they were recorded.
      Verdicts: "converged"; "converged per mode only" if each chain converged by itself and they disagree; "not
      converged"; "undecided" if R-hat and ESS are good but more than 1 % of transitions diverged, an E-BFMI is below
      0.3, or the budget ended the run. A tempered target or a biased sampler is named in the reasons. What has
      converged at the training rows need not have converged elsewhere: `x` takes the rows about which claims are made.
    - Approximations: whether the optimisation settled; the ELBO; Pareto k-hat of p(w, D)/q(w); the importance-weighted
      evidence log mean p/q (not reliable if k-hat exceeds 0.7); and whether restarts agree in function space. k-hat
      above 0.7 or restarts that differ give "undecided", never "inadequate": only a reference can decide. Figures based
      on p/q do not exist for particles and dropout masks, which have no density q.
    - A point: whether the optimisation settled; it has no spread to judge.

    Parameters
    ----------
    posterior : Posterior
        The posterior to judge.
    x : array_like or mapping of str to array_like, optional
        Rows where chains must have converged, too, in original units: inputs, or a name for each of several sets of
        inputs, as in ``{"test": x_test, "gap": x_gap}``. Up to 200 outputs at evenly spaced rows are judged, in all
        sets together; below an ESS of about 350 per chain R-hat of some may exceed its limit by chance. The figures
        have "rhat_at_<name>" and "ess_at_<name>". Approximations and points draw independently: for them it changes
        nothing.
    reference : Posterior, optional
        Converged chains of the same model on the same data, neither stacked nor of another target. The approximation is
        compared with it at up to 200 training rows. It is "inadequate" if its predictive mean is off by more than 0.5
        epistemic standard deviations, or if the standard deviations differ by more than a factor of 1.5, unless that is
        within the noise floor (the same figures between two halves of the reference).
    calibration : Calibration or Method, optional
        A result of `bnn.simulation_based_calibration`, or a method that is fitted to `simulations` data sets drawn from
        the posterior's model. Calibration is an average over all data that the prior allows, so miscalibration turns
        "adequate" and "converged" into "undecided", never into "inadequate".
    sensitivity : bool, default False
        Whether to measure by power-scaling [1]_ how strongly f depends on the prior and on the likelihood, at up to 200
        outputs at training rows. The figures are the largest "prior_sensitivity", the smallest
        "likelihood_sensitivity", and the shares of outputs that depend (above 0.05) on the prior: with the likelihood,
        which points to a conflict ("prior_conflict_share"), or without it ("prior_dominance_share"). The verdict does
        not depend on them: a strong prior may be what is meant.
    simulations : int
        Number of simulations, if `calibration` is a method.
    seed : int
        Seed of the simulations.
    progress : bool or Progress, optional
        Progress of the simulations.

    Returns
    -------
    Diagnosis
        The verdict with its reasons, advice and figures; `print` shows it.

    Raises
    ------
    UnsupportedError
        A reference that is not a posterior of chains, a calibration of a model that cannot be simulated, or the
        sensitivity of a point, of weighted chains or of another target than the posterior.
    InputError
        A reference for other data, a calibration of another type, or `x` unlike the training inputs.

    References
    ----------
    .. [1] Kallioinen, Paananen, Buerkner and Vehtari 2024, Statistics and Computing 34, 57.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.Laplace(), standardise=True)
    >>> diagnosis = bnn.diagnose(posterior, x=table.x[:5])
    >>> diagnosis.verdict, bool(diagnosis.figures["pareto_k"] < 0.7)
    ('adequate as far as seen', True)
    """
    expected, advice = "a Calibration, or a method", "bnn.simulation_based_calibration(model, x, method)"
    known = isinstance(calibration, Calibration | Method | None)
    InputError.check(known, "calibration", f"{expected} to calibrate", repr(calibration), advice)
    judge = _Judge(posterior, x, compared=reference is not None)
    verdict = {"chains": judge.chains, "iid": judge.approximation, "point": judge.point}[posterior.kind]()
    judge.reasons.extend(posterior.info.warnings)
    if reference is not None:
        compared = judge.against(reference)
        # Advice on convergence comes first; chains that have converged need no "as far as seen".
        decides = compared == INADEQUATE or posterior.kind != "chains"
        if compared and decides and verdict not in (NOT_CONVERGED, PER_MODE):
            verdict = compared
    if isinstance(calibration, Method):
        observed = None if posterior.language else posterior.observed
        options: Any = {"simulations": simulations, "seed": seed, "progress": progress, "observed": observed}
        data = (posterior.model, posterior.inputs)
        calibration = simulation_based_calibration(*data, calibration, **options)
    if calibration is not None:
        verdict = judge.calibrated(calibration, verdict)
    if sensitivity:
        judge.sensitivity()
    reasons, advice = (tuple(dict.fromkeys(lines)) for lines in (judge.reasons, judge.advice))
    subject = f"{posterior.info.method} in {posterior.info.ppl}"
    return Diagnosis(verdict, reasons, advice, judge.figures, subject)


class _Judge:
    """The findings on a posterior: reasons, advice and figures. The methods that judge a kind return a verdict."""

    def __init__(self, posterior: Any, x: Any, compared: bool):
        self.posterior, self.compared = posterior, compared
        self.regions = {} if x is None else function_space.rows_at(posterior, x)
        self.info, self.settings = posterior.info, remedies.fitted_settings(posterior)
        self.reasons: list[str] = []
        self.advice: list[str] = []
        self.figures: dict[str, float] = {name: float(value) for name, value in self.info.figures.items()}

    def say(self, text: str) -> None:
        self.reasons.append(text)

    def warned(self, word: str) -> bool:
        """Whether the method itself has warned of this already, in words that are among the reasons."""
        return any(word in warning for warning in self.info.warnings)

    def sensitivity(self) -> None:
        """How strongly f depends on the prior and on the likelihood."""
        found = power_scaling(self.posterior)
        self.figures |= found.figures
        self.reasons += found.findings
        if found.figures["prior_sensitivity"] > LIMIT:
            self.advice.append(
                "bnn.check_prior(model, x), and another prior by bnn.with_prior, if this one is not meant"
            )

    # --- chains -------------------------------------------------------------------------------------------

    def chains(self) -> str:
        judged = function_space.convergence(self.posterior, regions=self.regions)
        self.figures |= judged.figures | {"chains": judged.chains, "draws": judged.draws}
        if judged.converged:
            groups = f", nested over {judged.superchains} groups of chains,"
            worst = f"R-hat{'' if judged.superchains is None else groups} is {judged.rhat:.3f}"
            ess = f"the smallest bulk ESS {judged.ess_bulk:.0f} and tail ESS {judged.ess_tail:.0f}"
            over = f"over {judged.chains} chains of {judged.draws} draws"
            self.say(f"in function space the worst {worst}, {ess}, {over}")
        else:
            self.reasons.extend(judged.reasons)
            self.advise_chains(judged)
        for name, there in judged.at.items():
            if name not in judged.failing:
                self.say(f"at the {name} rows: {there.words}")
        if self.info.target:
            target = f"the target of the chains is not the posterior: {self.info.target}"
            self.say(f"{target}; that is what they are judged by")
        if (weights := self.posterior.weights) is not None:
            ends = f"from {weights.min():.3f} to {weights.max():.3f}"
            stacked = f"{len(weights)} parts are stacked, with weights {ends}"
            about = "what is said here is about the chains, each counted alike"
            self.say(f"{stacked}: {about}; their mixture is chosen for its predictions")
        diverged = self.divergences()
        self.trees()
        doubtful = any([diverged, self.energies(), self.cut_short()])
        if not judged.converged:
            return PER_MODE if judged.per_mode else NOT_CONVERGED
        return UNDECIDED if doubtful else CONVERGED

    def advise_chains(self, judged: function_space.Convergence) -> None:
        """What to try with chains that have not converged."""
        settings = self.settings
        if judged.per_mode:
            self.advice += remedies.more_modes(settings)
            return
        if judged.chains < 2:
            self.advice += remedies.more_chains(settings)
        if judged.still:
            smaller = remedies.smaller_steps(settings, self.posterior.statistics)
            self.advice.append(remedies.not_still(settings, smaller))
        self.advice += remedies.more_of_a_sampler(settings)
        if not all(rhat < 1.1 for rhat in (judged.rhat, *(judged.at[name].rhat for name in judged.failing))):
            modes = "the chains may sit in modes that predict differently"
            self.advice += remedies.other_starts(settings)
            self.advice.append(f"a smaller network or a tighter prior: {modes}")

    def divergences(self) -> bool:
        """Whether too many transitions diverged."""
        statistics = self.posterior.statistics
        if "diverging" not in statistics:
            return False
        diverging = np.asarray(statistics["diverging"])
        count, share = int(np.count_nonzero(diverging)), float(np.mean(diverging))
        self.figures |= {"divergences": count, "divergence_share": share}
        if count and not self.warned("diverged"):
            parts = f"{count} of {diverging.size} transitions diverged ({share:.1%})"
            self.say(f"{parts}: parts of the posterior may be missed")
        if count:
            self.advice.append(remedies.smaller_steps(self.settings, statistics))
        return share > DIVERGENCE_LIMIT

    def trees(self) -> None:
        """Trees of NUTS that were cut off, which casts no doubt on the draws."""
        if "reached_max_tree_depth" not in self.posterior.statistics:
            return
        share = float(np.mean(self.posterior.statistics["reached_max_tree_depth"]))
        self.figures["tree_depth_saturation"] = share
        if share > TREE_DEPTH_LIMIT:
            cut = f"{share:.0%} of the trajectories were cut off at the greatest tree depth"
            self.say(f"{cut}: slow, not wrong")
            depth = "a greater max_tree_depth, or " if "max_tree_depth" in self.settings else ""
            self.advice.append(f"{depth}standardise=True and a longer warm-up")

    def energies(self) -> bool:
        """Whether E-BFMI is too low."""
        energy = np.asarray(self.posterior.statistics.get("energy", [[]]), dtype=np.float64)
        if energy.shape[1] <= 2:
            return False
        lowest = self.figures["bfmi"] = float(np.min(by_arviz("bfmi", energy, np.nan)))
        if lowest >= BFMI_LIMIT:
            return False
        low = f"the lowest E-BFMI is {lowest:.2f}, below {BFMI_LIMIT}"
        self.say(f"{low}: the momentum does not reach all energies")
        scales = "scales of the prior that are not sampled with the weights"
        self.advice.append(f"a prior without heavy tails, or {scales}")
        return True

    def cut_short(self) -> bool:
        """Whether the run ended before its stopping criterion was met."""
        figures = self.info.figures
        spent = figures.get("stopped_by_budget") == 1.0
        if figures.get("rule_held") != 0.0 and not spent:
            return False
        if not self.warned("budget"):
            wanted = self.info.settings.get("until")
            rule = f", before until={wanted!r} held" if wanted else ""
            self.say(f"the run was ended by its budget{rule}" if spent else f"until={wanted!r} did not hold")
        # Particles are not chains and cannot be continued.
        more = "" if "moves" in self.settings else ", or bnn.extend(posterior, draws=...)"
        self.advice.append(f"a larger budget{more}")
        return True

    # --- optimisation ---------------------------------------------------------------------------------------

    def optimisation(self) -> bool:
        """Whether the optimisation settled, as far as the method reports it."""
        figures = self.info.figures
        if "gradient_norm" in figures:
            self.say(f"the norm of the gradient at the mode is {figures['gradient_norm']:.3g}")
        if "rise_along_gradient" in figures:
            rise = f"along the gradient it rises by {figures['rise_along_gradient']:.3g} nats"
            self.say(f"the log joint has kinks, where its gradient does not vanish at a mode; {rise}")
        settled = self.loss_curve(bool(figures["converged"]) if "converged" in figures else None)
        if not settled:
            if not self.warned("still falling"):
                self.say("the optimisation used all its steps without reaching a plateau")
            self.advice += remedies.longer_optimisation(self.settings)
        return settled

    def loss_curve(self, settled: bool | None) -> bool:
        """Whether the optimisation settled, by the method's own test or else by the end of the loss curve.

        The mean of the last tenth may be below that of the tenth before by max(2 standard errors, 0.1 nats).
        """
        losses = np.asarray(self.info.history.get("loss", ()), dtype=np.float64)
        window = len(losses) // WINDOWS
        # A loss without noise, such as that of a mode, is judged by its gradient.
        read = losses.ndim == 1 and len(losses) >= FEWEST_LOSSES and "gradient_norm" not in self.info.figures
        if not read or not np.isfinite(losses[-2 * window :]).all():
            return settled is not False
        before, last = losses[-2 * window : -window], losses[-window:]
        fall = float(before.mean() - last.mean())
        error = math.sqrt(float(before.var(ddof=1) + last.var(ddof=1)) / window)
        own = f"the method's own test found {'a' if settled else 'no'} plateau; "
        self.figures |= {"loss_fall": fall, "loss_fall_se": error}
        windows = f"from the last tenth but one of the {len(losses)} losses to the last"
        moved = f"{'fell' if fall >= 0.0 else 'rose'} by {abs(fall):.3g} nats (standard error {error:.2g})"
        self.say(f"{'' if settled is None else own}{windows}, their mean {moved}")
        return fall <= max(2.0 * error, LEAST_FALL) if settled is None else settled

    def point(self) -> str:
        figures = self.info.figures
        if "divergence" in figures:
            # A student is judged by what it loses, wherever its optimisation has ended.
            loss = f"{figures['divergence']:.3g} +- {figures['divergence_se']:.2g} nats per row"
            self.say(f"a student loses {loss} to its teacher, at inputs that it has not seen")
            self.say(
                "its predictions carry the uncertainty of its teacher, not split into epistemic and aleatoric"
            )
            return CONVERGED if figures["converged"] else NOT_CONVERGED
        settled = self.optimisation()
        self.say("a point has no spread: its predictions carry the noise only, no epistemic uncertainty")
        self.advice.append("Laplace(), which puts a Gaussian around the same mode")
        return CONVERGED if settled else NOT_CONVERGED

    # --- approximations ---------------------------------------------------------------------------------------

    def approximation(self) -> str:
        settled = self.optimisation()
        tempered = self.target()
        agreed = self.restarts(settled)
        try:
            pareto = pareto_k(self.posterior)
        except UnsupportedError:
            undefined = "k-hat, the ELBO, the importance-weighted evidence"
            density = "the approximation has no density, so that what is made of p(w, D)/q(w) is not defined"
            self.say(f"{density}: {undefined}")
            if "elbo" in self.info.figures and not tempered:
                self.say(f"the method itself gives an ELBO of {self.info.figures['elbo']:.2f}")
            self.ask_for_reference()
            return UNDECIDED if settled else NOT_CONVERGED
        fixed = held_coordinates(self.posterior)
        self.bounds(pareto, tempered, fixed)
        names = ("log_evidence", "log_evidence_se", "relative_ess")
        self.figures["pareto_k"] = pareto.k
        self.figures |= {f"importance_{name}": getattr(pareto, name) for name in names}
        about = f"Pareto k-hat of p(w, D)/q(w){' (p not tempered)' if tempered else ''} is {pareto.k:.2f}"
        if pareto.reliable:
            self.say(f"{about}, at most {K_LIMIT}: importance weights find no gap")
        else:
            over = f"importance sampling over {coordinates(self.posterior.approximation)} coordinates"
            alone = "which alone does not say that its predictions are poor"
            self.say(f"{about}, above {K_LIMIT}: q is no proposal for {over}, {alone}")
            self.ask_for_reference()
            self.advice.append("scores on held-out rows, coverage above all")
        if not settled:
            return NOT_CONVERGED
        return ADEQUATE if pareto.reliable and agreed and not fixed else UNDECIDED

    def target(self) -> bool:
        """What was fitted if it was not the posterior by its ELBO, and whether the target was tempered."""
        tempered = False
        for name, target in (("temperature", "p(w, D)"), ("kl_weight", "p(w) p(D | w)")):
            value = remedies.number(self.settings, name)
            if value is not None and value != 1.0 and not tempered:
                tempered = True
                self.figures[name] = value
                aim = f"the fit aimed at another target, proportional to {target}^{1.0 / value:.3g}"
                about = "what is said of p/q, the ELBO and the evidence is about the posterior"
                self.say(f"{name}={value:g}: {aim}; {about}, not about that target")
        objective = self.settings.get("objective")
        # A Laplace approximation also has an objective, that of its hyper-parameters.
        if self.info.method != "Laplace" and objective not in (None, "elbo"):
            self.say(f"the fit maximised the objective {objective!r}; the ELBO given is of what it found")
        return tempered

    def bounds(self, pareto: ParetoK, tempered: bool, fixed: int) -> None:
        """The ELBO and the importance-weighted evidence, and what they bound. fixed: coordinates that do not vary."""
        figures = self.info.figures
        elbo, error = pareto.elbo, pareto.elbo_se
        # The method's own estimate uses more draws; it is taken if it is one of the posterior itself.
        if "elbo" in figures and not tempered:
            elbo, error = figures["elbo"], figures.get("elbo_se", math.nan)
        if math.isfinite(elbo):
            bounded = "a lower bound on the log evidence"
            if self.warned("improper"):
                bounded = "up to a constant, as a prior is improper"
            if fixed:
                held = f"{fixed} coordinates are held at a value in every draw"
                bounded = f"a lower bound on log p(D, what is held): {held}"
            known = f" (standard error {error:.2g})" if math.isfinite(error) else ""
            self.figures["elbo"] = float(elbo)
            self.say(f"the ELBO is {elbo:.2f}{known}, {bounded}")
            if known:
                self.figures["elbo_se"] = float(error)
        if not math.isfinite(pareto.log_evidence):
            self.say("p/q is not finite for some draw of q: there is no importance-weighted evidence")
            return
        trust = f"; not to be trusted, nor its standard error, as k-hat exceeds {K_LIMIT}"
        self.figures |= {"evidence_gap": pareto.gap, "evidence_gap_se": pareto.gap_se}
        value = f"{pareto.log_evidence:.2f} (standard error {pareto.log_evidence_se:.2g})"
        mean = f"log mean p/q over {pareto.draws} draws, is {value}"
        above = (
            f"{pareto.gap:.2g} nats above the ELBO of the same draws and in expectation still a lower bound"
        )
        self.say(f"the importance-weighted evidence, {mean}, {above}{'' if pareto.reliable else trust}")

    def restarts(self, settled: bool) -> bool:
        """Whether restarts, if there were several, gave the same predictive distribution."""
        several = len(getattr(self.posterior.approximation, "members", None) or ()) > 1
        if parts := self.posterior.approximation.components:
            # Points do not vary: between them R-hat is infinite whatever they predict.
            spread = several and all(part.kind != "point" for part in parts)
            self.members(len(parts), function_space.agreement(self.posterior) if spread else None)
            return True
        if not several:
            return True
        judged = function_space.agreement(self.posterior)
        self.figures |= {"restarts": judged.count, "restart_rhat": judged.rhat}
        bounds = ""
        if judged.elbo is not None and np.isfinite(judged.elbo).any():
            finite = judged.elbo[np.isfinite(judged.elbo)]
            best, least = float(finite.max()), float(finite.min())
            self.figures |= {"restart_elbo_best": best, "restart_elbo_spread": float(np.ptp(finite))}
            bounds = f"; their ELBOs go from {least:.2f} to {best:.2f}"
            if len(finite) < len(judged.elbo):
                bounds += f", and {len(judged.elbo) - len(finite)} have none"
        if judged.agree:
            rhat = f"over {judged.count} of them R-hat in function space is {judged.rhat:.3f}"
            self.say(f"restarts agree: {rhat}, below {function_space.RESTART_LIMIT}{bounds}")
            return True
        why = "or they would agree after more steps"
        if settled:
            why = "which predict otherwise and which one fit does not show"
        rhat = f"over {judged.count} of them R-hat of {judged.worst} is {judged.rhat:.3f}"
        limit = f"not below {function_space.RESTART_LIMIT}{bounds}"
        self.say(f"restarts differ: {rhat}, {limit}: there are other modes, {why}")
        mixture = "a mixture of the restarts, guide='mixture', or " if "guide" in self.settings else ""
        self.advice.append(f"{mixture}NUTS: a single mode is not the posterior")
        return False

    def members(self, count: int, judged: function_space.Agreement | None) -> None:
        """The components of a mixture and how far they differ, which is intended and does not enter the verdict."""
        how, differ = "of equal weight", ""
        if (weights := self.posterior.weights) is not None:
            how = f"with stacked weights from {weights.min():.3f} to {weights.max():.3f}"
        if judged is not None:
            self.figures |= {"members": judged.count, "member_rhat": judged.rhat}
            rhat = f"R-hat of {judged.worst} is {judged.rhat:.3f}"
            differ = f"; they differ in function space ({rhat}), as other modes do"
            if judged.agree:
                differ = f"; they agree in function space (R-hat {judged.rhat:.3f})"
        self.say(f"a mixture of {count} members {how}{differ}")

    def ask_for_reference(self) -> None:
        if not self.compared:
            self.advice.append("a reference: diagnose(posterior, reference=a converged NUTS posterior)")

    # --- against others -----------------------------------------------------------------------------------------

    def calibrated(self, calibration: Calibration, verdict: str) -> str:
        """The findings of a calibration, and the verdict after it."""
        self.figures["simulations"] = calibration.simulations
        self.figures["simulations_failed"] = len(calibration.failures)
        for reason in calibration.reasons:
            self.say(f"simulation-based calibration of {calibration.subject}: {reason}")
        if calibration.tests:
            self.figures["calibration_least_p"] = min(test.least for test in calibration.tests.values())
        if calibration.verdict != MISCALIBRATED:
            return verdict
        missed = "this one misses the truth of data that its own model makes"
        self.advice.append(f"a richer approximation: {missed}")
        return UNDECIDED if verdict in (ADEQUATE, CONVERGED) else verdict

    def against(self, reference: Any) -> str | None:
        """The gap to a reference; None if the reference cannot decide."""
        expected = "a reference of chains, whose convergence can be judged"
        chains, got = reference.kind == "chains", f"{reference.info.method}, of kind {reference.kind!r}"
        advice = "a NUTS posterior of the same model and data"
        UnsupportedError.check(chains, "diagnose", expected, got, advice)
        judged = function_space.convergence(reference)
        self.figures |= {f"reference_{name}": value for name, value in judged.figures.items()}
        if not judged.converged:
            how = "has converged per mode only" if judged.per_mode else "has not converged"
            figures = f"(R-hat {judged.rhat:.3f}, bulk ESS {judged.ess_bulk:.0f})"
            self.say(f"the would-be reference {how} {figures}: it decides nothing")
            better = "chains that move between modes" if judged.per_mode else "a longer reference run"
            self.advice.append(better)
            return None
        if reference.target:
            which = f"the would-be reference is not of the posterior ({reference.target})"
            self.say(f"{which}: it decides nothing")
            self.advice.append("a reference of the posterior itself, by an exact sampler")
            return None
        x = function_space.probe_rows(self.posterior, REFERENCE_ROWS)
        theirs = reference.predict(x)
        gap = fidelity(self.posterior.predict(x), theirs)
        floor = noise_floor(theirs, np.repeat(np.arange(judged.chains), judged.draws))
        self.figures |= gap | {f"{name}_floor": value for name, value in floor.items()}
        mean_floor, sd_floor = (f"(noise floor {floor[name]:.2f})" for name in ("mean_gap", "sd_ratio"))
        mean = f"off by {gap['mean_gap']:.2f} of its epistemic standard deviations {mean_floor}"
        sd = f"the standard deviation is {gap['sd_ratio']:.2f} times its own {sd_floor}"
        self.say(f"against the reference the predictive mean is {mean}, and {sd}")
        ratio = abs(math.log(gap["sd_ratio"])) if gap["sd_ratio"] > 0 else math.inf
        ratio_limit = max(math.log(SD_RATIO_LIMIT), abs(math.log(floor["sd_ratio"])))
        if gap["mean_gap"] <= max(MEAN_GAP_LIMIT, floor["mean_gap"]) and ratio <= ratio_limit:
            return ADEQUATE
        self.advice.append("the reference itself, or a richer approximation")
        return INADEQUATE
