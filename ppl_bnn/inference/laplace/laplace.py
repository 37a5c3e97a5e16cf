"""The Laplace approximation: a Gaussian at the mode, with the curvature of the log joint as its precision.

N(u_MAP, A^-1) with A = H + Lambda, H the curvature of the data (Gauss-Newton, empirical Fisher or Hessian) and Lambda
that of -(log prior + log |dw/du|), in unconstrained coordinates (MacKay 1992; Daxberger et al. 2021). Noise is at its
joint mode, tuned by the evidence, or part of the Gaussian: the predictor is (f, log noise), with its Fisher block.
Prediction is linearised by default (Immer et al. 2021): eta(u) = eta(u_MAP) + J (u - u_MAP), because a Gauss-Newton
posterior is the posterior of that linear model and its draws, put through the network itself, fit badly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import (
    CurvatureError,
    DivergenceError,
    InputError,
    UnsupportedError,
    message,
    unknown_name,
)
from ppl_bnn.core.progress import Progress
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.curvature.curvature import CURVATURES, data_curvature, refuse_large_blocks
from ppl_bnn.inference.curvature.gaussians import Rotated
from ppl_bnn.inference.curvature.jacobian import linear_maps, refuse_interacting_rows
from ppl_bnn.inference.curvature.kronecker import (
    KroneckerBlock,
    KroneckerCurvature,
    TensorPrior,
    diagonal_of,
    is_diagonal,
    is_one_precision,
    prior_share,
    refuse_dependent,
    refuse_uneven,
)
from ppl_bnn.inference.curvature.prior import check_bounded, check_smooth, prior_curvature, site_curvatures
from ppl_bnn.inference.curvature.structures import DiagonalCurvature, FullCurvature
from ppl_bnn.inference.flat_vector import flat_latents, latent_names, latent_places, site_slices, somewhere
from ppl_bnn.inference.laplace.approximation import LaplaceGaussian, predictor_columns
from ppl_bnn.inference.laplace.autolaplace import guide_gaussian, refuse_point_estimates
from ppl_bnn.inference.laplace.computed_weights import JUDGED, bent, computed_names
from ppl_bnn.inference.laplace.evidence import GROUPINGS, Evidence, Tuned, alternate, fixed_point, maximise
from ppl_bnn.inference.laplace.hyperparameters import (
    Tuning,
    gaussian_noise,
    log_likelihood,
    log_prior,
    noise_sites,
)
from ppl_bnn.inference.laplace.linearised import KINDS, kinds_of
from ppl_bnn.inference.laplace.search import by_validation, marginal_mode
from ppl_bnn.inference.method import (
    Method,
    Outcome,
    Start,
    Stopwatch,
    central_start,
    fitted_start,
    missing_sites,
    refuse_without_centre,
)
from ppl_bnn.inference.optimisation.mode import (
    REFINING,
    RISE,
    Mode,
    Refinement,
    check_optimiser,
    check_restarts,
    effort_of_mode,
    failed_restarts,
    find_mode,
    flat_sites,
    kinks,
    starting_point,
)
from ppl_bnn.posterior.posterior import Posterior

WEIGHTS = ("all", "last_layer", "largest_variance", "largest_magnitude")
NOISES = ("gaussian", "mode", "evidence")
TUNINGS = ("none", *GROUPINGS)
# How far computed weights may be from their linearisation, in its own standard deviations.
BENT = 0.1
# Nats that a Newton step may gain from a point that is taken as the mode: so much is the log evidence off.
NO_MODE = 0.1
# Nats of log evidence that the alternation may lose from its best round: it leaves out what a new mode does to H.
RUNAWAY = 1.0


@dataclass(frozen=True)
class Laplace(Method):
    """A Gaussian at the mode; its precision is the curvature of the data plus the prior's own.

    structure: "full", "kron" (K-FAC), "diag" or "lowrank" with `rank` eigenpairs, beside which the noise has a block.
    curvature: "ggn" (Gauss-Newton, with the Fisher information of p(y | eta), "exact" or, fisher="sampled", from
    `samples` targets drawn for each row), "empirical" (gradients at the observed targets), "hessian" (exact, it may
    be indefinite). sharing: "expand" or "reduce", for linear maps with several places in a row (Eschenhagen et al.
    2023); kron only.

    weights: "all"; "last_layer"; names of layers or sites; "largest_variance" or "largest_magnitude", with
    `subnetwork` the number of weights. The others stay at the mode. noise: of a Gaussian likelihood: "gaussian"
    (sampled noise is part of the Gaussian), "mode" (it stays at the joint mode) or "evidence" (its precision is
    tuned; a prior on it then has no say). tune: "none", or factors on the precisions of Normal priors: one
    ("global"), one for each "layer" or "tensor", or for each "weight". objective: "evidence", or "validation" with
    `validation` the share of the rows held out (of mode and curvature; factors change the spread alone). search:
    MacKay's "fixed_point", or "maximise". during_training: find the mode again for the new factors, until both agree.
    marginal: sites (scales of priors, noise) at the maximum of evidence times hyper-prior, found by an outer search.
    prior_approximation: for a Kronecker structure and a prior that is not one precision for each weight matrix (one
    that differs within it, or yesterday's Kronecker factors): None refuses it, "kron" takes the nearest precision with
    Kronecker eigenvectors (see `kronecker.py`), "mean" the average of the prior's precisions; both are reported.
    repair: None, or "clip": negative eigenvalues of the prior's Hessian (Student-t, mixtures), and those of an exact
    Hessian, are set to zero, which widens the approximation there; reported as a warning.

    engine: "curvature" (this one, in both systems) or "guide" (the system's AutoLaplaceApproximation, with the exact
    Hessian; its failures become named errors, and its draws go through the network). start: where the training of the
    mode starts; optimise=False takes it as the mode: a posterior at its centre, and one without a centre (chains,
    particles, ensembles, mixtures) is refused. A network trained elsewhere (a `torch.nn.Module`, Flax
    parameters; for `bnn.module` the network itself, Equinox too) is a start; what it does not have, such as the noise,
    is optimised. restarts: so many starts from draws of the prior, of which the one with the largest log evidence plus
    log prior of what is held is kept; history["restart_log_evidence"] and ["restart_log_joint"] have what each came to, -inf where it failed. The
    other fields are those of `MAP`: the mode is part of the method, so prior, noise and loss agree by construction.

    figures: "log_evidence", log p(D | what is held at a value), in the units of the fit; "effective_parameters",
    gamma = tr(H A^-1), where tuned also "prior_factor/..." and "noise"; "newton_gain", of a start that is taken as the
    mode, the nats by which the log evidence is off; "computed_weights_remainder", how far weights that the program
    computes (scale times base) are from their linearisation, which draws and sampled predictions use.
    warnings: a mode that is none, tuning that
    did not settle.
    """

    structure: str = "full"
    curvature: str = "ggn"
    weights: str | Sequence[str] = "all"
    subnetwork: int | None = None
    fisher: str = "exact"
    samples: int = 1
    sharing: str = "expand"
    rank: int | None = None
    noise: str = "gaussian"
    tune: str = "none"
    objective: str = "evidence"
    validation: float = 0.2
    search: str = "fixed_point"
    during_training: bool = False
    marginal: Sequence[str] = ()
    prior_approximation: str | None = None
    engine: str = "curvature"
    repair: str | None = None
    predictive: str | None = None
    steps: int = 20_000
    learning_rate: float = 0.02
    tolerance: float = 1e-4
    polish: bool = True
    start: Start = None
    optimise: bool = True
    memory: int = 2**28
    restarts: int = 1
    serves_local: ClassVar[bool] = False

    # -- before anything is computed

    def check(self) -> None:
        for name, value, known in (
            ("structure", self.structure, ("full", "kron", "diag", "lowrank")),
            ("curvature", self.curvature, CURVATURES),
            ("fisher", self.fisher, ("exact", "sampled")),
            ("sharing", self.sharing, ("expand", "reduce")),
            ("noise", self.noise, NOISES),
            ("tune", self.tune, TUNINGS),
            ("objective", self.objective, ("evidence", "validation")),
            ("search", self.search, ("fixed_point", "maximise")),
            ("engine", self.engine, ("curvature", "guide")),
            ("prior_approximation", self.prior_approximation, (None, "mean", "kron")),
            ("repair", self.repair, (None, "clip")),
            ("predictive", self.predictive, (None, *KINDS, "sampled")),
        ):
            if value not in known:
                raise unknown_name(f"{name} of Laplace", str(value), tuple(map(str, known)))
        if isinstance(self.weights, str) and self.weights not in WEIGHTS:
            raise unknown_name("weights of Laplace", self.weights, WEIGHTS)
        check_optimiser(self.name, self.steps, self.learning_rate, self.tolerance)
        check_restarts(self.name, self.restarts, self.start)
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        for name, value, needed in (
            ("subnetwork", self.subnetwork, str(self.weights).startswith("largest")),
            ("rank", self.rank, self.structure == "lowrank"),
        ):
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if needed and not whole:
                raise InputError(
                    f"Laplace: {name}: " + message("a positive whole number", repr(value), f"{name}=100")
                )
            if not needed and value is not None:
                raise InputError(
                    f"Laplace: {name}: "
                    + message(
                        "weights='largest_variance' or 'largest_magnitude'"
                        if name == "subnetwork"
                        else "structure='lowrank'",
                        "another choice",
                        f"leaving {name} out",
                    )
                )
        if not isinstance(self.samples, int) or self.samples < 1:
            raise InputError(
                "Laplace: samples: " + message("a positive whole number", repr(self.samples), "samples=1")
            )
        if not 0.0 < self.validation < 1.0:
            raise InputError(
                "Laplace: validation: "
                + message("a share between 0 and 1", repr(self.validation), "validation=0.2")
            )
        if not self.optimise and self.start is None:
            raise InputError(
                "Laplace: "
                + message("start= with optimise=False", "None", "start=a MAP posterior or a dict of arrays")
            )
        if not self.optimise:
            refuse_without_centre(self.start)

    def _check_combinations(self) -> None:
        """Each pair that is not defined, with a way out."""
        tuned = self.tune != "none" or self.noise == "evidence"
        sub = str(self.weights).startswith("largest")
        for impossible, expected, came, advice in (
            (
                self.structure == "kron" and self.curvature == "hessian",
                "a curvature that is a sum of products of gradients",
                "curvature='hessian' with structure='kron'",
                "curvature='ggn', or structure='full', 'diag' or 'lowrank'",
            ),
            (
                self.structure == "kron" and sub,
                "whole layers with structure='kron'",
                f"weights={self.weights!r}",
                "names of layers, or structure='full' or 'diag'",
            ),
            (
                self.structure == "kron" and self.tune == "weight",
                "one precision for each tensor with structure='kron'",
                "tune='weight'",
                "tune='tensor', or structure='diag'",
            ),
            (
                self.curvature != "ggn" and self.noise == "evidence",
                "a curvature in proportion to the noise precision",
                f"curvature={self.curvature!r} with noise='evidence'",
                "curvature='ggn', or marginal= with the noise",
            ),
            (
                tuned and bool(self.marginal),
                "one search for hyper-parameters",
                f"tune={self.tune!r}, noise={self.noise!r} and marginal={list(self.marginal)}",
                "marginal= alone, with all scales in it",
            ),
            (
                self.objective == "validation" and (self.tune == "none" or self.noise == "evidence"),
                "objective='validation' for prior precisions",
                f"tune={self.tune!r}, noise={self.noise!r}",
                "tune='global' and noise='mode' or 'gaussian'",
            ),
            (
                self.objective == "validation" and self.tune == "weight",
                "few factors with objective='validation'",
                "tune='weight'",
                "tune='global' or 'layer'",
            ),
            (
                self.during_training and not tuned,
                "something to tune with during_training=True",
                "tune='none' and noise other than 'evidence'",
                "tune='global'",
            ),
            (
                self.during_training and not self.optimise,
                "training with during_training=True",
                "optimise=False",
                "optimise=True",
            ),
            (
                self.engine == "guide"
                and (
                    tuned
                    or bool(self.marginal)
                    or self.weights != "all"
                    or self.structure != "full"
                    or self.noise != "gaussian"
                    or self.predictive not in (None, "sampled")
                ),
                "the defaults with engine='guide', which has a full Hessian and nothing else",
                "another structure, weights, noise, tuning or predictive",
                "engine='curvature'",
            ),
        ):
            if impossible:
                raise UnsupportedError("Laplace: " + message(expected, came, advice))

    # -- what it takes and what it gets wrong

    @property
    def weakness(self) -> str:
        found = "It is a Gaussian about one mode: no skewness, no other modes."
        kept = {
            "full": "",
            "lowrank": " Directions beyond its rank have the spread of the prior.",
            "kron": " Correlations between layers are lost.",
            "diag": " All correlations between weights are lost, which the spread of f feels most.",
        }[self.structure]
        if self.weights != "all":
            kept += " Weights that are left out have no spread, so that f has too little away from the data."
        if self.engine == "guide":
            kept += (
                " The exact Hessian of a network is often no precision, and prediction is by sampled weights."
            )
        return found + kept

    def effort(self, size: Size) -> Effort:
        mode = effort_of_mode(self.steps, self.polish) if self.optimise else Effort.exactly(0.0)
        # Passes over the rows for the curvature, and for the log evidence.
        passes = Effort(0.0, size.outputs + 2.0, 50.0 + 2.0 * size.parameters * (self.curvature == "hessian"))
        if self.tune != "none" or self.noise == "evidence" or self.marginal:
            # Each look at other hyper-parameters may move the mode, by L-BFGS.
            often = 50.0 if self.during_training or self.objective == "validation" else 1.0
            passes = Effort(0.0, passes.usual + 20.0 * often, passes.most + REFINING * 3.0 * often)
        whole = self.structure == "full" and self.weights == "all"
        side = (
            min(size.parameters, size.rows * size.outputs) if self.engine == "curvature" else size.parameters
        )
        passes = replace(
            passes,
            numbers=3.0 * side**2 + float(side == size.rows * size.outputs) * side * size.parameters
            if whole
            else float((self.rank or 0) * size.parameters),
            operations=2.0 * size.rows * size.outputs * size.parameters * side + side**3 / 3.0
            if whole
            else 0.0,
        )
        return passes.after(mode).times(self.restarts).after(effort_of_start(self.start, size))

    # -- the fit

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        if self.restarts == 1:
            return _Fit(self, problem, progress).outcome()
        return _best_of(self, problem, progress)


# --- several starts ------------------------------------------------------------------------------


def _best_of(method: Laplace, problem: Problem, progress: Progress) -> Outcome:
    """The best of several starts, what each came to (-inf where it failed), and what all of them cost."""
    best: tuple[float, Outcome] | None = None
    evidence, joint = (np.full(method.restarts, -np.inf) for _ in range(2))
    seconds, evaluations, failed = np.zeros(2), 0.0, []
    for restart in range(method.restarts):
        fit, watch = _Fit(method, problem, progress, restart), Stopwatch()
        try:
            outcome = fit.outcome()
        except (CurvatureError, DivergenceError) as error:
            failed.append(error)
            seconds[1] += watch()
            evaluations += fit.refinement.evaluations + fit.passes
            continue
        evidence[restart], joint[restart] = fit.figures["log_evidence"], outcome.figures["log_joint"]
        seconds += outcome.compile_seconds, outcome.run_seconds
        evaluations += outcome.gradient_evaluations or 0.0
        if best is None or fit.standing > best[0]:
            best = fit.standing, outcome
    if best is None:
        raise failed[0]
    outcome = best[1]
    return replace(
        outcome,
        history={**outcome.history, "restart_log_evidence": evidence, "restart_log_joint": joint},
        compile_seconds=float(seconds[0]),
        run_seconds=float(seconds[1]),
        gradient_evaluations=evaluations,
        warnings=outcome.warnings + failed_restarts(failed, method.restarts),
    )


# --- one fit --------------------------------------------------------------------------------------


class _RanAwayError(Exception):
    """The alternation has lost more evidence than its approximation explains."""


class _Fit:
    """What one fit knows as it goes along: the mode, what the Gaussian is over, what was tuned."""

    def __init__(self, method: Laplace, problem: Problem, progress: Progress, restart: int = 0):
        self.method, self.problem, self.progress, self.restart = method, problem, progress, restart
        self.refinement = Refinement(problem)
        self.warnings: tuple[str, ...] = ()
        self.figures: dict[str, float] = {}
        self.passes = 0.0
        # What several starts are compared by: the log evidence plus the log prior of what is held.
        self.standing = -np.inf

    def outcome(self) -> Outcome:
        return self.by_guide() if self.method.engine == "guide" else self.by_curvature()

    def by_guide(self) -> Outcome:
        refuse_point_estimates(self.problem)
        self._refuse_kinks()
        mode = self._mode()
        watch = Stopwatch()
        gaussian = guide_gaussian(self.problem, mode.u)
        approximation = LaplaceGaussian(self._latents(mode.u), gaussian, predictives=("sampled",))
        self.passes = 1.0
        return self._outcome(mode, mode.u, approximation, watch)

    def _refuse_kinks(self) -> None:
        """An exact Hessian knows nothing of a likelihood whose log density is made of straight lines."""
        found = kinks(self.problem)
        if found:
            raise UnsupportedError(
                "Laplace: "
                + message(
                    "a log joint with a Hessian at its mode",
                    f"{found}, whose log density is straight on both sides of a kink",
                    "curvature='ggn', which has the Fisher information of the likelihood, or NUTS or SVI",
                )
            )

    def by_curvature(self) -> Outcome:
        method, problem = self.method, self.problem
        check_smooth(problem)
        if method.curvature == "hessian":
            self._refuse_kinks()
        if method.curvature != "hessian":
            refuse_interacting_rows(problem)
        if not problem.program.language and method.curvature != "hessian":
            problem.program.likelihood.fisher(None)
        exact = method.curvature == "ggn" and method.fisher == "exact"
        if exact and not getattr(problem.program.likelihood, "has_fisher", True):
            problem.program.likelihood.fisher(None)
        self._check_names()
        self._kinds()
        if problem.program.language:
            anywhere = somewhere(problem)
            check_bounded(problem, anywhere, method.marginal)
            self._check_settings(anywhere)
        if method.marginal:
            mode = self._marginal_mode()
        else:
            mode = self._mode()
        watch = Stopwatch()
        u = mode.u
        positions = self._positions(u)
        factors: dict[str, np.ndarray] = {}
        noise: float | None = None
        if method.tune != "none" or method.noise == "evidence":
            u, covariance, factors, noise = self._tuned(u, positions)
        else:
            covariance = self._gaussian(u, positions)
            if not method.optimise and not method.marginal:
                mode = self._judged(mode, covariance, positions)
        everything = len(positions) == self._size
        approximation = LaplaceGaussian(
            mode=self._latents(u),
            covariance=covariance,
            held={site.name: np.asarray(u[site.name]) for site in problem.program.params},
            positions=None if everything else positions,
            factors=factors,
            noise=noise,
            predictives=self._kinds(),
        )
        return self._outcome(mode, u, approximation, watch, positions)

    def _outcome(
        self,
        mode: Mode,
        u: Mapping[str, np.ndarray],
        approximation: LaplaceGaussian,
        watch: Stopwatch,
        positions: np.ndarray | None = None,
    ) -> Outcome:
        covariance = approximation.covariance
        self._judge_weights(approximation)
        if "log_evidence" not in self.figures:
            prior = log_prior(self.problem, u, np.arange(self._size) if positions is None else positions)
            volume = 0.5 * (covariance.size * np.log(2.0 * np.pi) + covariance.log_determinant)
            self.figures["log_evidence"] = float(log_likelihood(self.problem, u) + prior + volume)
        if self.method.restarts > 1:
            self.standing = self.figures["log_evidence"] + self._log_prior_held(u, positions)
        return Outcome(
            approximation=approximation,
            history={"loss": mode.losses},
            compile_seconds=mode.compile_seconds,
            run_seconds=mode.run_seconds + watch(),
            gradient_evaluations=mode.evaluations + self.refinement.evaluations + self.passes,
            warnings=mode.warnings + self.warnings,
            figures={
                "log_joint": mode.log_joint,
                **mode.figures,
                "converged": float(mode.converged),
                **self.figures,
            },
        )

    def _judge_weights(self, approximation: LaplaceGaussian) -> None:
        """Say where weights that the program computes are far from their linearisation."""
        names = computed_names(self.problem)
        if not names:
            return
        draws = approximation.draw(JUDGED, np.random.default_rng(site_seed("computed", self.problem.seed)))
        remainder, width = bent(self.problem, approximation.centre(), draws)
        self.figures["computed_weights_remainder"] = remainder
        if not remainder <= BENT:
            self._say(
                f"weights that are computed from other sites ({', '.join(names)}) are linearised about the mode, in "
                "sampled predictions and in draws; multiplied out from draws of these sites they would be up to "
                f"{width:.2g} times as wide. The log evidence takes the log joint as quadratic in these sites, which "
                "it is not, and may be off by several nats: compare it with SMC()"
            )

    def _log_prior_held(self, u: Mapping[str, np.ndarray], positions: np.ndarray | None) -> float:
        """Log prior density of what the Gaussian is not over; of a noise that the evidence chose there is none."""
        if positions is None:
            return 0.0
        outside = np.ones(self._size, dtype=bool)
        outside[positions] = False
        if self.method.noise == "evidence":
            for name in noise_sites(self.problem, u):
                outside[site_slices(self.problem)[name]] = False
        return log_prior(self.problem, u, np.flatnonzero(outside))

    # -- the mode

    def _mode(self) -> Mode:
        method, problem = self.method, self.problem
        if method.optimise:
            return self._found(method.start)
        start = method.start
        if isinstance(start, Method):
            start = fitted_start(problem, start, self.progress)
        taken = isinstance(start, Posterior)
        u = central_start(problem, start) if taken else starting_point(problem, start, self.progress)
        missing = missing_sites(problem, start)
        if missing:
            held = [name for name in problem.program.sites if name not in missing]
            u = self.refinement.mode(u, held=held)
        value, norm, rise = self.refinement.standing(u)
        return Mode(u, value, norm, np.zeros(0), rise is None or rise <= RISE, 0, 0.0, 0.0, rise=rise)

    def _judged(self, mode: Mode, covariance: Any, positions: np.ndarray) -> Mode:
        """A point that was taken as the mode, with what a Newton step g' A^-1 g / 2 would gain in nats.

        Where the log joint is quadratic that is what its maximum lies higher, and so the error of the log evidence.
        """
        if mode.rise is not None:
            return mode
        _, gradient = self.refinement.value_and_grad(flat_sites(self.problem, mode.u))
        gain = self._gain(gradient[latent_places(self.problem)][positions], covariance)
        self.figures["newton_gain"] = gain
        failures = mode.failures
        if gain > NO_MODE:
            failures += (
                f"not a mode: a Newton step from the start that was taken as the mode would gain {gain:.3g} nats, by "
                "which the log evidence is off; optimise=True finds the mode",
            )
        return replace(mode, converged=gain <= NO_MODE, failures=failures, gain=gain)

    @staticmethod
    def _gain(gradient: np.ndarray, covariance: Any) -> float:
        """What a Newton step gains, g' A^-1 g / 2."""
        return 0.5 * float(np.sum(covariance.whiten(gradient[None]) ** 2))

    def _found(self, start: Start, held: Sequence[str] = ()) -> Mode:
        method = self.method
        return find_mode(
            self.problem,
            start=start,
            steps=method.steps,
            learning_rate=method.learning_rate,
            tolerance=method.tolerance,
            polish=method.polish,
            held=held,
            progress=self.progress,
            title=method.name,
            restart=self.restart,
        )

    def _check_settings(self, u: Mapping[str, np.ndarray]) -> None:
        """Refuse what model and settings make impossible, before the mode is trained; u may be any point."""
        method, problem = self.method, self.problem
        positions = self._positions(u, any_largest=True)
        slices = site_slices(problem)
        noise = [
            position
            for name in noise_sites(problem, u)
            for position in range(*slices[name].indices(self._size))
        ]
        weights = int(np.count_nonzero(~np.isin(positions, noise)))
        if method.rank is not None and method.rank > weights:
            raise InputError(
                "Laplace: rank: "
                + message(f"at most the {weights} weights there are", repr(method.rank), "structure='full'")
            )
        if method.noise == "evidence":
            gaussian_noise(problem, u)
        tuned = None
        if method.tune != "none" or method.noise == "evidence":
            tuning = Tuning.of(
                problem, u, positions, method.tune, method.noise == "evidence", lambda at: None
            )
            tuned = tuning.prior(u)
        if method.objective == "validation":
            self._held_out()
        if method.structure == "kron":
            refuse_large_blocks(problem, u, positions)
            # A mode that is given is judged by the prior there, and as soon: there is nothing to train.
            if method.prior_approximation is None and method.optimise:
                prior = self._tensor_priors(u, positions) if tuned is None else tuned
                self._check_kronecker_prior(u, positions, prior)

    def _check_kronecker_prior(
        self, u: Mapping[str, np.ndarray], positions: np.ndarray, prior: np.ndarray | dict[str, TensorPrior]
    ) -> None:
        """Refuse the prior of a weight that is no one precision at a point where no two elements are alike."""
        problem, slices = self.problem, site_slices(self.problem)
        if isinstance(prior, np.ndarray):
            refuse_dependent(prior)
        for linear in linear_maps(problem, u).values():
            at, family = slices[linear.weight], problem.program.sites[linear.weight].family
            if at.start not in positions:
                continue
            if isinstance(prior, np.ndarray):
                start = int(np.searchsorted(positions, at.start))
                part: TensorPrior = prior[start : start + at.stop - at.start]
            else:
                part = prior[linear.weight]
            changing = is_diagonal(part) and family != "Normal"
            words = f"a {family} prior, whose curvature changes with the value of a weight"
            refuse_uneven(linear.weight, part, words if changing else "")

    def _held_out(self) -> int:
        """How many rows validation holds out."""
        share, rows = self.method.validation, self.problem.rows
        count = round(share * rows)
        if not 0 < count < rows:
            raise InputError(
                "Laplace: validation: "
                + message("a share that leaves rows on both sides", f"{count} of {rows}", "more rows")
            )
        return count

    def _marginal_mode(self) -> Mode:
        """Sites of `marginal` at the maximum of evidence times hyper-prior, all else at its mode given them."""
        problem, held = self.problem, tuple(self.method.marginal)
        slices = site_slices(problem)
        where = np.concatenate([np.arange(slices[name].start, slices[name].stop) for name in held])
        names = [f"{name}[{i}]" for name in held for i in range(slices[name].stop - slices[name].start)]
        mode = self._found(self.method.start, held)
        best, highest = dict(mode.u), -np.inf

        def at(phi: np.ndarray) -> dict[str, np.ndarray]:
            flat = flat_latents(problem, best)
            flat[where] = phi
            moved = dict(best)
            for name in held:
                moved[name] = flat[slices[name]].reshape(np.shape(best[name]))
            return self.refinement.mode(moved, held=held)

        def objective(phi: np.ndarray) -> float:
            # From the best so far: far out hidden units merge, and a mode that came from there would be a saddle.
            nonlocal best, highest
            u = at(phi)
            try:
                covariance = self._gaussian(u, self._positions(u))
            except CurvatureError:
                if not np.isfinite(highest):
                    raise
                return -np.inf
            value, _ = self.refinement.value_and_grad(flat_sites(problem, u))
            evidence = -value + 0.5 * (covariance.size * np.log(2.0 * np.pi) + covariance.log_determinant)
            if evidence > highest:
                best, highest = u, evidence
            return evidence

        outer = marginal_mode(
            objective, flat_latents(problem, mode.u)[where], names=names, progress=self.progress
        )
        self.warnings += outer.warnings
        u = at(outer.phi)
        value, gradient = self.refinement.value_and_grad(flat_sites(problem, u))
        free = np.concatenate(
            [np.full(site.size, site.name not in held) for site in problem.program.sites.values()]
        )
        return replace(
            mode,
            u=u,
            log_joint=-value,
            gradient_norm=float(np.linalg.norm(gradient[free])),
            converged=mode.converged and outer.converged,
        )

    # -- what the Gaussian is over

    @property
    def _size(self) -> int:
        return max(at.stop for at in site_slices(self.problem).values())

    def _latents(self, u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        sites = self.problem.program.sites
        return {
            name: np.asarray(u[name], dtype=float).reshape(sites[name].unconstrained_shape)
            for name in latent_names(self.problem)
        }

    def _kinds(self) -> tuple[str, ...]:
        """The kinds of prediction that there are, the default first."""
        program, wanted = self.problem.program, self.method.predictive
        kinds = ("sampled",)
        if program.language:
            kinds = (
                *kinds_of(program.likelihood, predictor_columns(self.problem)),
                "sampled",
            )
        if wanted is None:
            return kinds
        if wanted not in kinds:
            raise UnsupportedError(
                "Laplace: predictive: "
                + message(
                    f"{', '.join(map(repr, kinds))} for {type(program.likelihood).__name__}"
                    + ("" if program.language else " in a plain model"),
                    repr(wanted),
                    f"predictive={kinds[0]!r}",
                )
            )
        return (wanted, *(kind for kind in kinds if kind != wanted))

    def _check_names(self) -> None:
        names = latent_names(self.problem)
        for name in self.method.marginal:
            if name not in names:
                raise unknown_name("site of marginal", name, names)
        if not isinstance(self.method.weights, str):
            layers = [name.rpartition(".")[0] for name in names if "." in name]
            for name in self.method.weights:
                if name not in names and name not in layers:
                    raise unknown_name("layer or site of weights", name, [*dict.fromkeys(layers), *names])

    def _positions(self, u: Mapping[str, np.ndarray], any_largest: bool = False) -> np.ndarray:
        """(Q,) positions of the flat vector, increasing; any_largest: as many as asked for, whichever they are."""
        method, problem, slices = self.method, self.problem, site_slices(self.problem)
        noise = noise_sites(problem, u)
        aside = {*method.marginal, *(noise if method.noise != "gaussian" else ())}
        chosen = np.zeros(self._size, dtype=bool)
        for name in self._chosen_sites(u, noise):
            chosen[slices[name]] = True
        for name in aside:
            chosen[slices[name]] = False
        if str(method.weights).startswith("largest"):
            kept = np.zeros_like(chosen)
            for name in noise:
                kept[slices[name]] = chosen[slices[name]]
            candidates = np.flatnonzero(chosen & ~kept)
            kept[self._largest(u, candidates, any_largest)] = True
            chosen = kept
        if not chosen.any():
            raise UnsupportedError(
                "Laplace: " + message("at least one weight to be uncertain about", "none", "weights='all'")
            )
        return np.flatnonzero(chosen)

    def _chosen_sites(self, u: Mapping[str, np.ndarray], noise: Sequence[str]) -> list[str]:
        weights, names = self.method.weights, latent_names(self.problem)
        if isinstance(weights, str) and weights != "last_layer":
            return names
        if isinstance(weights, str):
            maps = list(linear_maps(self.problem, u).values())
            if not maps:
                raise UnsupportedError(
                    "Laplace(weights='last_layer'): "
                    + message("a linear map whose weight is a site", "none", "names of sites")
                )
            weights = [site for site in (maps[-1].weight, maps[-1].bias) if site is not None]
        named = [name for name in names if name in weights or name.rpartition(".")[0] in weights]
        return [*named, *(name for name in noise if name not in named)]

    def _largest(self, u: Mapping[str, np.ndarray], candidates: np.ndarray, whichever: bool) -> np.ndarray:
        """The positions with the largest marginal variance under a diagonal approximation, or magnitude."""
        count = self.method.subnetwork
        assert count is not None
        if count > len(candidates):
            raise InputError(
                "Laplace: subnetwork: "
                + message(f"at most the {len(candidates)} weights there are", repr(count), "weights='all'")
            )
        if whichever:
            return candidates[:count]
        if self.method.weights == "largest_magnitude":
            size = np.abs(flat_latents(self.problem, u)[candidates])
        else:
            curvature = self._data_curvature(u, candidates, "diag")
            size = curvature.gaussian(self._prior(u, candidates, dense=False)).variances()
        # Ties go to the first, so that the choice is the same at every fit.
        return candidates[np.sort(np.argsort(-size, kind="stable")[:count])]

    # -- the Gaussian

    def _data_curvature(
        self, u: Mapping[str, np.ndarray], positions: np.ndarray, structure: str | None = None
    ) -> Any:
        method = self.method
        structure = structure or method.structure
        curvature, passes = data_curvature(
            self.problem,
            u,
            curvature=method.curvature,
            fisher=method.fisher,
            samples=method.samples,
            structure=structure,
            rank=method.rank if structure == "lowrank" else None,
            apart=noise_sites(self.problem, u) if structure == "lowrank" else (),
            sharing=method.sharing,
            positions=None if len(positions) == self._size else positions,
            seed=self.problem.seed,
            memory=method.memory,
        )
        self.passes += passes
        if isinstance(curvature, KroneckerCurvature) and method.prior_approximation == "kron":
            curvature = replace(curvature, nearest=True)
        return curvature

    def _prior(self, u: Mapping[str, np.ndarray], positions: np.ndarray, dense: bool = True) -> np.ndarray:
        """The prior's curvature over the positions, (Q,) or, where sites depend on each other, (Q, Q)."""
        prior = prior_curvature(self.problem, u)
        if prior.ndim == 1:
            return prior[positions]
        prior = prior[np.ix_(positions, positions)]
        off = prior - np.diag(np.diag(prior))
        # A scale that is held at a value makes no dependence among what it scales.
        if not dense or np.abs(off).max(initial=0.0) <= 1e-10 * np.abs(prior).max():
            return np.diag(prior).copy()
        return prior

    def _tensor_priors(
        self, u: Mapping[str, np.ndarray], positions: np.ndarray
    ) -> np.ndarray | dict[str, TensorPrior]:
        """The prior's curvature tensor by tensor, or (Q,) where it is a diagonal; positions of whole sites."""
        inside = {name: at for name, at in site_slices(self.problem).items() if at.start in positions}
        known = site_curvatures(self.problem, u)
        if known is not None and not all(is_diagonal(known[name]) for name in inside):
            return {name: known[name] for name in inside}
        prior = self._prior(u, positions)
        if prior.ndim == 1 or self.method.prior_approximation is None:
            return prior
        parts: dict[str, TensorPrior] = {}
        left_out, start = prior.copy(), 0
        for name, at in inside.items():
            here = slice(start, start + at.stop - at.start)
            parts[name], left_out[here, here], start = prior[here, here], 0.0, here.stop
        if np.abs(left_out).max(initial=0.0) > 1e-10 * np.abs(prior).max():
            self._say("what the prior says of several tensors together was left out of a Kronecker structure")
        return parts

    def _gaussian(self, u: Mapping[str, np.ndarray], positions: np.ndarray) -> Any:
        curvature = self._data_curvature(u, positions)
        if isinstance(curvature, KroneckerCurvature):
            prior = self._for_kronecker(curvature, self._tensor_priors(u, positions))
        else:
            prior = self._prior(u, positions, dense=self.method.structure != "diag")
        gaussian = self._repaired(curvature, prior)
        self.figures["effective_parameters"] = _effective_parameters(gaussian, prior)
        return gaussian

    def _for_kronecker(self, curvature: KroneckerCurvature, prior: Any) -> Any:
        """The prior as `prior_approximation` wants it, in writing: with "mean" one precision for each weight matrix."""
        weights = [block for block in curvature.blocks if isinstance(block, KroneckerBlock)]
        if self.method.prior_approximation == "mean":
            prior, averaged = (dict(prior) if isinstance(prior, Mapping) else prior.copy()), prior
            widest, dependent = 0.0, False
            for block in weights:
                part = averaged[block.name] if isinstance(averaged, Mapping) else averaged[block.positions]
                dependent |= not is_diagonal(part)
                part = diagonal_of(part)
                widest = max(widest, float(np.ptp(part) / max(abs(part.mean()), 1e-300)))
                where = block.name if isinstance(averaged, Mapping) else block.positions
                prior[where] = np.full(part.size, part.mean())
            if widest > 1e-9 or dependent:
                self._say(
                    f"prior precisions were averaged over each weight matrix; within one they differ by up to "
                    f"{widest:.3g} times their mean"
                    + (", and what ties weights to each other was left out" if dependent else "")
                )
        elif self.method.prior_approximation == "kron":
            parts = {
                block.name: prior[block.name] if isinstance(prior, Mapping) else prior[block.positions]
                for block in weights
            }
            uneven = [name for name, part in parts.items() if not is_one_precision(part)]
            if uneven:
                self._say(
                    "data and prior together were replaced by the nearest precision with Kronecker eigenvectors in "
                    + ", ".join(uneven)
                )
        return prior

    def _repaired(self, curvature: Any, prior: Any) -> Any:
        try:
            return curvature.gaussian(prior)
        except CurvatureError:
            if self.method.repair is None:
                raise
        if isinstance(prior, Mapping):
            each = {name: _without_upward(part) for name, part in prior.items()}
            prior, clipped = (
                {name: part for name, (part, _) in each.items()},
                sum(n for _, n in each.values()),
            )
        else:
            prior, clipped = _without_upward(prior)
        sentences = []
        if clipped:
            sentences.append(
                f"the prior curves upwards at the mode: {clipped} negative eigenvalues of its Hessian were set to 0"
            )
        if self.method.curvature == "hessian":
            curvature, negative = _without_negative(curvature)
            if negative:
                sentences.append(
                    f"the Hessian of the data is indefinite: {negative} negative eigenvalues were set to 0"
                )
        gaussian = curvature.gaussian(prior)
        self.warnings += tuple(sentences)
        return gaussian

    def _say(self, sentence: str) -> None:
        """A warning, once, however often what it is about is computed."""
        if sentence not in self.warnings:
            self.warnings += (sentence,)

    # -- hyper-parameters

    def _tuned(
        self, u: dict[str, np.ndarray], positions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], Any, dict[str, np.ndarray], float | None]:
        """The mode, the Gaussian, factors by site and the noise, after tuning."""
        method, problem = self.method, self.problem
        with_noise = method.noise == "evidence"
        noise = gaussian_noise(problem, u) if with_noise else None
        held = () if noise is None or noise.site is None else (noise.site,)
        latest: tuple[dict[str, np.ndarray], Any] | None = None

        def curvature_at(at: Any) -> Any:
            # The same mode is asked about several times: for the evidence, and for the Gaussian in the end.
            nonlocal latest
            if latest is None or latest[0] is not at:
                latest = at, self._data_curvature(at, positions)
            return latest[1]

        tuning = Tuning.of(problem, u, positions, method.tune, with_noise, curvature_at)
        search: Any = method.search
        scale = 1.0
        prior: Any = None
        evidence: Evidence | None = None
        if method.objective == "validation":
            factors = self._validated(tuning, positions)
        else:
            if method.during_training:
                found, u = self._alternated(tuning, u, held)
            else:
                prior = self._tuned_prior(tuning, u)
                evidence = tuning.evidence(u, prior)
                maximiser = {"fixed_point": fixed_point, "maximise": maximise}[search]
                found = maximiser(evidence, tune_noise=with_noise)
            factors, scale = found.factors, found.scale
            self.warnings += found.warnings
        if method.objective == "validation" and method.during_training:
            u = self.refinement.mode(u, held=held, changes=tuning.changes(factors, scale))
        if evidence is None:
            prior = self._tuned_prior(tuning, u)
            evidence = tuning.evidence(u, prior)
        self.figures["log_evidence"] = evidence.log_evidence(factors, scale)
        self.figures["effective_parameters"] = float(evidence.effective_parameters(factors, scale).sum())
        curvature = curvature_at(u)
        covariance = (curvature if scale == 1.0 else curvature.scaled(scale)).gaussian(
            factors[tuning.groups] * prior
        )
        self._check_mode(u, covariance, tuning, factors, scale)
        if len(factors) <= 50:
            for name, factor in zip(tuning.names, factors, strict=True):
                if name not in tuning.held:
                    self.figures[f"prior_factor/{name}"] = float(factor)
        known: float | None = None
        if noise is not None:
            value = noise.value / np.sqrt(scale)
            self.figures["noise"] = float(np.mean(value))
            if noise.site is None:
                known = float(value)
            else:
                u = self._with_value(u, noise.site, value)
        self.figures["log_joint"] = self._log_joint(u, positions, covariance)
        return u, covariance, tuning.site_factors(factors), known

    def _alternated(
        self, tuning: Tuning, start: dict[str, np.ndarray], held: Sequence[str]
    ) -> tuple[Tuned, dict[str, np.ndarray]]:
        """MacKay's alternation of modes and factors; where it runs away, only as far as the evidence rises."""
        best, highest, patience = start, -np.inf, RUNAWAY

        def evidence_at(factors: np.ndarray, scale: float) -> Evidence:
            # From the best mode so far, or a step that was too long would leave its mark on the next.
            nonlocal best, highest
            u = self.refinement.mode(best, held=held, changes=tuning.changes(factors, scale))
            evidence = tuning.evidence(u, self._tuned_prior(tuning, u))
            value = evidence.log_evidence(factors, scale)
            if value < highest - patience:
                raise _RanAwayError
            if value > highest:
                best, highest = u, value
            return evidence

        def search(monotone: bool) -> Tuned:
            method: Any = self.method.search
            return alternate(
                evidence_at,
                tuning.ones,
                method=method,
                tune_noise=tuning.noise,
                monotone=monotone,
                progress=self.progress,
            )

        try:
            found = search(monotone=False)
        except _RanAwayError:
            self.warnings += (
                "alternating modes and hyper-parameters lost evidence, as it may in a network: steps were taken only "
                "as far as they raise it",
            )
            best, highest, patience = start, -np.inf, np.inf
            found = search(monotone=True)
        u = self.refinement.mode(best, held=held, changes=tuning.changes(found.factors, found.scale))
        return found, u

    def _log_joint(self, u: Mapping[str, np.ndarray], positions: np.ndarray, covariance: Any) -> float:
        """The log joint at u under the tuned hyper-parameters: the evidence without the volume, and what is held."""
        outside = np.setdiff1d(np.arange(self._size), positions)
        volume = 0.5 * (covariance.size * np.log(2.0 * np.pi) + covariance.log_determinant)
        return float(self.figures["log_evidence"] - volume + log_prior(self.problem, u, outside))

    def _check_mode(
        self, u: Mapping[str, np.ndarray], covariance: Any, tuning: Tuning, factors: Any, scale: float
    ) -> None:
        """Report a mode that the tuned hyper-parameters have left behind: a Newton step gains g' A^-1 g / 2 nats."""
        size = flat_sites(self.problem, u)
        _, gradient = self.refinement.value_and_grad(size, tuning.changes(factors, scale))
        if kinks(self.problem):
            return
        latent = gradient[tuning.places]
        self.figures["gradient_norm"] = float(np.linalg.norm(latent))
        gain = self._gain(latent, covariance)
        if gain > 1.0:
            self.warnings += (
                f"the mode is not that of the tuned hyper-parameters: a Newton step would gain {gain:.3g} nats; "
                "during_training=True finds the mode again",
            )

    def _tuned_prior(self, tuning: Tuning, u: Mapping[str, np.ndarray]) -> np.ndarray:
        prior = tuning.prior(u)
        if self.method.structure == "kron":
            return self._for_kronecker(tuning.curvature_at(u), prior)
        return prior

    def _with_value(self, u: dict[str, np.ndarray], site: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """u with one site at a constrained value."""
        problem = self.problem
        w = problem.program.constrain_draws(
            {n: np.asarray(v)[None] for n, v in u.items()}, problem.x, problem.y
        )
        w = {name: each[0] for name, each in w.items()} | {site: value}
        return problem.program.unconstrain(w, problem.x, problem.y)

    def _validated(self, tuning: Tuning, positions: np.ndarray) -> np.ndarray:
        """Factors (G,) by the log score of rows that neither mode nor curvature has seen."""
        method, problem = self.method, self.problem
        rng = np.random.default_rng(site_seed("validation", problem.seed))
        order = rng.permutation(problem.rows)
        count = self._held_out()
        out, rows = np.sort(order[:count]), np.sort(order[count:])
        part = _rows_of(problem, rows)
        # Whatever mode was given has seen the rows that are held out: it is where training starts, and no more.
        alone = replace(method, tune="none", objective="evidence", optimise=True, restarts=1)
        fit = _Fit(alone, part, self.progress, self.restart)
        u = fit._mode().u
        curvature = fit._data_curvature(u, positions)
        prior = fit._prior(u, positions)
        if isinstance(curvature, KroneckerCurvature):
            prior = fit._for_kronecker(curvature, prior)
        inputs = map_data(lambda a: np.asarray(a)[out], problem.inputs)
        targets = np.asarray(problem.targets)[out]
        tuned = np.array([name not in tuning.held for name in tuning.names])
        kind = self._kinds()[0]

        def score(free: np.ndarray) -> float:
            factors = tuning.ones
            factors[tuned] = free
            covariance = curvature.gaussian(factors[tuning.groups] * prior)
            held = {site.name: np.asarray(u[site.name]) for site in part.program.params}
            where = None if len(positions) == self._size else positions
            approximation = LaplaceGaussian(fit._latents(u), covariance, held, where)
            prediction = approximation.closed_form(part, inputs, kind, method.memory)
            assert prediction is not None
            return float(np.mean(prediction.log_prob(targets)))

        names = [name for name, free in zip(tuning.names, tuned, strict=True) if free]
        found = by_validation(
            score,
            np.ones(len(names)),
            per="global" if len(names) == 1 else "group",
            names=names,
            progress=self.progress,
        )
        self.warnings += found.warnings
        self.passes += fit.passes + fit.refinement.evaluations
        factors = tuning.ones
        factors[tuned] = found.factors
        return factors


def _rows_of(problem: Problem, rows: np.ndarray) -> Problem:
    """The same problem with some of its rows."""
    program, system = problem.program, problem.system
    inputs = map_data(lambda a: np.asarray(a)[rows], problem.inputs)
    targets = np.asarray(problem.targets)[rows]
    x, y = map_data(system.asarray, inputs), system.asarray(targets)
    part = Program.of(
        system,
        program.model,
        x,
        y,
        language=program.language,
        observed=None if program.language else program.observed,
    )
    return replace(problem, program=part, x=x, y=y, inputs=inputs, targets=targets)


def _effective_parameters(gaussian: Any, prior: np.ndarray | Mapping[str, TensorPrior]) -> float:
    """gamma = tr(H A^-1) = Q - tr(Lambda A^-1)."""
    if isinstance(prior, Mapping):
        return gaussian.size - prior_share(gaussian, prior)
    if prior.ndim == 1:
        return float(gaussian.size - prior @ gaussian.variances())
    return float(gaussian.size - np.sum(prior * gaussian.covariance()))


def _without_upward(prior: Any) -> tuple[Any, int]:
    """The nearest curvature of a prior without negative eigenvalues, and how many there were."""
    if isinstance(prior, Rotated):
        return prior, 0
    if prior.ndim == 1:
        return np.maximum(prior, 0.0), int((prior < 0).sum())
    values, vectors = np.linalg.eigh(prior)
    return (vectors * np.maximum(values, 0.0)) @ vectors.T, int((values < 0).sum())


def _without_negative(curvature: Any) -> tuple[Any, int]:
    """The nearest curvature of the same structure without negative eigenvalues, and how many there were."""
    if isinstance(curvature, DiagonalCurvature):
        values = curvature.diagonal()
        return DiagonalCurvature(np.maximum(values, 0.0)), int((values < 0.0).sum())
    values, vectors = np.linalg.eigh(curvature.matrix())
    return FullCurvature((vectors * np.maximum(values, 0.0)) @ vectors.T), int((values < 0.0).sum())
