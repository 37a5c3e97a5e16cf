"""The Laplace approximation: a Gaussian at the mode, with the curvature of the log joint as its precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import CurvatureError, DivergenceError, InputError, UnsupportedError, unknown_name
from ppl_bnn.core.progress import Progress, Silent
from ppl_bnn.core.settings import OneOf, between, optional, setting, whole
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.curvature.curvature import CURVATURES, DENSE
from ppl_bnn.inference.curvature.gaussians import STRUCTURES
from ppl_bnn.inference.curvature.lanczos import MOST_PRODUCTS, STEPS
from ppl_bnn.inference.laplace.evidence import GROUPINGS, SEARCHES
from ppl_bnn.inference.laplace.fit import LaplaceFit
from ppl_bnn.inference.laplace.linearised import KINDS
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation.mode import REFINING, effort_of_mode, refuse_restarts_from_a_start
from ppl_bnn.inference.optimisation.several_modes import failed_restarts
from ppl_bnn.inference.start import Start, refuse_without_centre

WEIGHTS = ("all", "last_layer", "largest_variance", "largest_magnitude")


def _site_names(value: Any) -> str | None:
    named = not isinstance(value, str) and isinstance(value, Iterable)
    return None if named and all(isinstance(name, str) for name in value) else "names of sites, as a tuple"


@dataclass(frozen=True)
class Laplace(Method):
    """Laplace approximation: a Gaussian at the mode, whose precision is the curvature of data and prior.

    The posterior is approximated by N(u_MAP, A^-1) with A = H + Lambda, in unconstrained coordinates u. H is the
    curvature of the data at the mode and Lambda that of -(log prior + log |dw/du|). Prediction is linearised by
    default, eta(u) = eta(u_MAP) + J (u - u_MAP). The mode is found by the method itself, with the parameters of `MAP`.

    Parameters
    ----------
    structure : {"full", "kron", "diag", "lowrank"}
        Structure of H. "kron" is K-FAC. "lowrank" keeps the `rank` largest eigenpairs of D^-1/2 H D^-1/2, with D the
        precisions of the prior, and a separate block for the noise. Large networks are not held as a matrix or as a
        Jacobian: products with vectors take 2 `rank` vectors of the size of the weights and `memory`.
    curvature : {"ggn", "empirical", "hessian"}
        "ggn" is Gauss-Newton, with the Fisher information of p(y | eta). "empirical" uses gradients at the observed
        targets. "hessian" is exact and may be indefinite.
    weights : str or sequence of str
        "all"; "last_layer"; names of layers or sites; "largest_variance" or "largest_magnitude", with `subnetwork`. The
        other weights stay at the mode.
    subnetwork : int or None
        The number of weights with weights="largest_variance" or "largest_magnitude".
    fisher : {"exact", "sampled"}
        The Fisher information of "ggn": exact, or estimated from `samples` targets drawn for each row.
    samples : int
        Targets per row with fisher="sampled".
    sharing : {"expand", "reduce"}
        For linear maps with several places in a row (Eschenhagen et al. 2023). structure="kron" only.
    rank : int or None
        Number of eigenpairs with structure="lowrank".
    probes : int
        Random vectors that estimate what `rank` leaves out of the log evidence, where the matrix is too large for exact
        values. Standard errors fall with the square root of their number.
    noise : {"gaussian", "mode", "evidence"}
        The noise of a Gaussian likelihood. "gaussian": sampled noise is part of the Gaussian. "mode": it stays at the
        joint mode. "evidence": its precision is tuned, and a prior on it has no effect.
    tune : {"none", "global", "layer", "tensor", "weight"}
        Whether to tune factors on the precisions of Normal priors: one factor, or one for each layer, tensor or weight.
    objective : {"evidence", "validation"}
        What factors are tuned by: the evidence, or the log score of held-out rows. Held-out rows are excluded from mode
        and curvature, and the factors change the spread only.
    validation : float
        The share of rows held out with objective="validation".
    search : {"fixed_point", "maximise"}
        MacKay's fixed point, or direct maximisation of the evidence.
    during_training : bool
        Whether to find the mode again for the new factors, until both agree.
    marginal : sequence of str
        Sites (scales of priors, noise) that are set to the maximum of evidence times hyper-prior, by an outer search.
    prior_approximation : {None, "mean", "kron"}
        For a Kronecker structure and a prior that is not one precision for each weight matrix. None refuses it. "kron"
        takes the nearest precision with Kronecker eigenvectors (see `kronecker.py`), "mean" the average precision.
    engine : {"curvature", "guide"}
        "curvature" is this implementation, in both systems. "guide" is the system's AutoLaplaceApproximation, with the
        exact Hessian; its draws go through the network.
    repair : {None, "clip"}
        "clip" sets negative eigenvalues of the prior's Hessian (Student-t, mixtures), and of an exact Hessian, to zero,
        with a warning. This widens the approximation.
    predictive : str or None
        Kind of prediction: "sampled", or a kind of `linearised.py`. None takes the default. With structure "diag",
        `predict` also has "propagated", the moments of the linearised network layer by layer: equal to "linearised"
        with one hidden layer; deeper, correlations within a layer are lost.
    steps, learning_rate, tolerance, polish : optional
        Training of the mode, as in `MAP`.
    start : method, posterior, dict, network or None
        Where the training of the mode starts. A network trained elsewhere (a `torch.nn.Module`, Flax parameters; for
        `bnn.module` the network itself, Equinox too) is a start. What it lacks, such as the noise, is optimised.
    optimise : bool
        False takes `start` as the mode: a posterior at its centre. Chains, particles, ensembles and mixtures have none.
    memory : int
        Bytes that intermediate results may take.
    restarts : int
        Number of starts from prior draws. The result with the largest log evidence plus log prior of the held sites is
        kept. history["restart_log_evidence"] and history["restart_log_joint"] have the values of all starts, -inf for
        those that failed.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    InputError, UnknownNameError
        Impossible arguments, or an unknown name of an option.
    UnsupportedError
        Combinations of options that are not defined.
    CurvatureError
        The precision is not positive definite.
    DivergenceError
        The training of the mode failed.

    Notes
    -----
    A Gauss-Newton posterior is the posterior of the linearised network. Its draws fit badly through the network itself
    (Immer et al. 2021). `info.figures` has "log_evidence", log p(D | what is held at a value), in the units of the fit;
    "effective_parameters", gamma = tr(H A^-1); if tuned, "prior_factor/..." and "noise"; "newton_gain", for a start
    that is taken as the mode, the error of the log evidence in nats; "computed_weights_remainder", how far weights that
    the program computes (scale times base) are from their linearisation, which draws and sampled predictions use.

    With structure="lowrank" the Gaussian keeps the prior along all directions beyond the rank. The log evidence and the
    effective parameters have them too, by stochastic Lanczos quadrature in large networks (`lanczos.py`): figures are
    "log_evidence_error", a standard error, "log_evidence_beyond_rank" and "parameters_beyond_rank", the parts that the
    Gaussian lacks, "trace_beyond_rank" with its error, of D^-1/2 H D^-1/2, and "curvature_products", products with
    vectors. There are none for curvature="hessian" or a prior that is no positive diagonal, and with several factors to
    tune: the evidence is then that of the Gaussian.

    References
    ----------
    - MacKay (1992), "A practical Bayesian framework for backpropagation networks".
    - Daxberger et al. (2021), "Laplace redux - effortless Bayesian deep learning".
    - Immer et al. (2021), "Improving predictions of Bayesian neural nets via local linearization".
    - Ubaru, Chen and Saad (2017), "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature".
    - Eschenhagen et al. (2023), "Kronecker-factored approximate curvature for modern neural network architectures".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.Laplace(structure="kron", noise="mode"), standardise=True)
    >>> posterior.predict(table.x[:5]).epistemic.shape, bool(posterior.log_evidence < 0.0)
    ((5,), True)
    """

    structure: str = setting("full", OneOf(tuple(STRUCTURES)))
    curvature: str = setting("ggn", OneOf(CURVATURES))
    weights: str | Sequence[str] = "all"
    subnetwork: int | None = setting(None, optional(whole(1)), advice="100")
    fisher: str = setting("exact", OneOf(("exact", "sampled")))
    samples: int = setting(1, whole(1))
    sharing: str = setting("expand", OneOf(("expand", "reduce")))
    rank: int | None = setting(None, optional(whole(1)), advice="100")
    probes: int = setting(8, whole(2))
    noise: str = setting("gaussian", OneOf(("gaussian", "mode", "evidence")))
    tune: str = setting("none", OneOf(("none", *GROUPINGS)))
    objective: str = setting("evidence", OneOf(("evidence", "validation")))
    validation: float = setting(0.2, between(0.0, 1.0))
    search: str = setting("fixed_point", OneOf(tuple(SEARCHES)))
    during_training: bool = False
    marginal: Sequence[str] = setting((), _site_names, advice="('scale',)")
    prior_approximation: str | None = setting(None, OneOf((None, "mean", "kron")))
    engine: str = setting("curvature", OneOf(("curvature", "guide")))
    repair: str | None = setting(None, OneOf((None, "clip")))
    predictive: str | None = setting(None, OneOf((None, *KINDS, "sampled")))
    steps: int = setting(20_000, whole(1))
    learning_rate: float = setting(0.02, between())
    tolerance: float = setting(1e-4, between())
    polish: bool = True
    start: Start = None
    optimise: bool = True
    memory: int = 2**28
    restarts: int = setting(1, whole(1), advice="5")
    serves_local: ClassVar[bool] = False

    # -- before anything is computed

    def check(self) -> None:
        if isinstance(self.weights, str) and self.weights not in WEIGHTS:
            raise unknown_name("weights of Laplace", self.weights, WEIGHTS)
        refuse_restarts_from_a_start(self.name, self.restarts, self.start)
        for name, choice, chosen in (
            ("subnetwork", "weights='largest_variance' or 'largest_magnitude'", self._largest),
            ("rank", "structure='lowrank'", self.structure == "lowrank"),
        ):
            given, where = getattr(self, name) is not None, f"Laplace {name}"
            expected = f"a whole number with {choice}"
            InputError.check(given or not chosen, where, expected, "None", f"{name}=100")
            InputError.check(chosen or not given, where, choice, "another choice", f"leaving {name} out")
        if not self.optimise:
            expected, advice = "start= with optimise=False", "start=a MAP posterior or a dict of arrays"
            InputError.check(self.start is not None, "Laplace", expected, "None", advice)
            refuse_without_centre(self.start)
        self._check_combinations()

    @property
    def _largest(self) -> bool:
        return str(self.weights).startswith("largest")

    @property
    def tunes(self) -> bool:
        """Whether there are hyper-parameters to tune."""
        return self.tune != "none" or self.noise == "evidence"

    def _check_combinations(self) -> None:
        """Refuse combinations that are not defined, with an alternative."""

        def refuse(when: bool, names: str, expected: str, advice: str) -> None:
            if when:
                got = ", ".join(f"{name}={getattr(self, name)!r}" for name in names.split())
                raise UnsupportedError.of("Laplace", expected, got, advice)

        kron, validation = self.structure == "kron", self.objective == "validation"
        noise = self.noise == "evidence"
        expected = "a curvature that is a sum of products of gradients"
        refuse(kron and self.curvature == "hessian", "structure curvature", expected, "curvature='ggn'")
        expected = "whole layers with structure='kron'"
        refuse(kron and self._largest, "structure weights", expected, "names of layers, or structure='diag'")
        expected = "one precision for each tensor with structure='kron'"
        refuse(kron and self.tune == "weight", "structure tune", expected, "tune='tensor'")
        # The empirical Fisher matrix is proportional to the squared noise precision. (That of laplace-torch is for
        # regression twice the empirical Fisher matrix, and multiplied by the noise precision itself.)
        expected, advice = "a curvature in proportion to the noise precision", "marginal= with the noise"
        refuse(self.curvature != "ggn" and noise, "curvature noise", expected, advice)
        expected, advice = "one search for hyper-parameters", "marginal= alone, with all scales in it"
        refuse(self.tunes and bool(self.marginal), "tune noise marginal", expected, advice)
        expected, advice = "objective='validation' for prior precisions", "tune='global' and noise='mode'"
        refuse(validation and (self.tune == "none" or noise), "tune noise", expected, advice)
        expected = "few factors with objective='validation'"
        refuse(validation and self.tune == "weight", "tune", expected, "tune='global' or 'layer'")
        expected = "something to tune with during_training=True"
        refuse(self.during_training and not self.tunes, "tune noise", expected, "tune='global'")
        expected = "training with during_training=True"
        refuse(self.during_training and not self.optimise, "optimise", expected, "optimise=True")
        names = "structure weights tune noise marginal predictive"
        weights = self.weights if isinstance(self.weights, str) else "some"
        given = (self.structure, weights, self.tune, self.noise, bool(self.marginal), self.predictive)
        defaults = [("full", "all", "none", "gaussian", False, kind) for kind in (None, "sampled")]
        expected = "the defaults with engine='guide', which has a full Hessian and nothing else"
        refuse(self.engine == "guide" and given not in defaults, names, expected, "engine='curvature'")

    def check_support(self, problem: Problem) -> None:
        LaplaceFit(self, problem, Silent()).check()

    # -- cost and limitations

    @property
    def limitations(self) -> str:  # type: ignore[override]
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
            kept += " The exact Hessian of a network is often no precision, and draws go through the network."
        return found + kept

    def effort(self, size: Size) -> Effort:
        mode = effort_of_mode(self.steps, self.polish) if self.optimise else Effort.exactly(0.0)
        # Passes over the rows for the curvature, and for the log evidence.
        passes = Effort(0.0, size.outputs + 2.0, 50.0 + 2.0 * size.parameters * (self.curvature == "hessian"))
        if self.structure == "lowrank" and size.parameters > DENSE:
            usual, fixed, each = 5.0 * (self.rank or 0) + 15.0 * self.probes, *MOST_PRODUCTS
            most = fixed + each * (self.rank or 0) + STEPS * self.probes
            passes = Effort(0.0, passes.usual + usual, passes.most + most)
        if self.tunes or self.marginal:
            # Each evaluation of other hyper-parameters may move the mode, by L-BFGS.
            often = 50.0 if self.during_training or self.objective == "validation" else 1.0
            passes = Effort(0.0, passes.usual + 20.0 * often, passes.most + REFINING * 3.0 * often)
        terms = size.rows * size.outputs
        side = min(size.parameters, terms) if self.engine == "curvature" else size.parameters
        numbers, operations = float((self.rank or 0) * size.parameters), 0.0
        if self.structure == "full" and self.weights == "all":
            numbers = 3.0 * side**2 + float(side == terms) * side * size.parameters
            operations = 2.0 * terms * size.parameters * side + side**3 / 3.0
        passes = replace(passes, numbers=numbers, operations=operations)
        return passes.after(mode).times(self.restarts).after(effort_of_start(self.start, size))

    # -- the fit

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        if self.restarts == 1:
            return LaplaceFit(self, problem, progress).outcome()
        return _best_of(self, problem, progress)


# --- several starts ------------------------------------------------------------------------------


def _best_of(method: Laplace, problem: Problem, progress: Progress) -> Outcome:
    """Run several starts and keep the best, with the values of all starts (-inf for failures) and the total cost."""
    best, score, failed = None, -np.inf, []
    evidence, joint = (np.full(method.restarts, -np.inf) for _ in range(2))
    spent = dict.fromkeys(("compile_seconds", "run_seconds", "gradient_evaluations"), 0.0)
    for restart in range(method.restarts):
        fit, watch = LaplaceFit(method, problem, progress, restart), Stopwatch()
        try:
            outcome = fit.outcome()
        except (CurvatureError, DivergenceError) as error:
            failed.append(error)
            spent["run_seconds"] += watch()
            spent["gradient_evaluations"] += fit.refinement.evaluations + fit.passes
            continue
        evidence[restart], joint[restart] = fit.figures["log_evidence"], outcome.figures["log_joint"]
        spent = {name: total + (getattr(outcome, name) or 0.0) for name, total in spent.items()}
        if best is None or fit.score > score:
            best, score = outcome, fit.score
    if best is None:
        raise failed[0]
    history = {**best.history, "restart_log_evidence": evidence, "restart_log_joint": joint}
    warnings = best.warnings + failed_restarts(failed, method.restarts)
    return replace(best, history=history, warnings=warnings, **spent)
