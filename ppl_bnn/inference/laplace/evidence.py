"""Hyper-parameters at the maximum of the evidence of a Laplace approximation: precisions of prior and Gaussian noise.

At a mode u of the log joint, with H the curvature of the data and Lambda = diag(tau_g(i) prior_i) that of the
prior, the Laplace approximation of the evidence (MacKay 1992; Bishop, PRML 5.7) is

    log p(D | tau, s) = log p(D | u, s) + log p(u | tau) + P/2 log 2 pi - 1/2 log det A,    A = s H + Lambda.

tau_g > 0 multiplies the prior's precision in group g, and s > 0 the precision of Gaussian noise; 1 leaves the model
unchanged. With q_g = sum_{i in g} prior_i (u_i - loc_i)^2, P_g weights in group g, and its effective number of
parameters gamma_g = sum_{i in g} (1 - tau_g prior_i (A^-1)_ii),

    d / d log tau_g = (gamma_g - tau_g q_g) / 2,    d / d log s = (N K - sum_g gamma_g - s chi^2) / 2,

where chi^2 = sum of (precision x squared residual) over the N K targets. MacKay's updates set these to zero one
by one: tau_g <- gamma_g / q_g, s <- (N K - gamma) / chi^2.

While u and H stay fixed and H is positive semidefinite, the function is concave in (log tau, log s), because log det A
is a log-sum-exp of linear functions. So the fixed point and direct maximisation agree. They differ only if u is found
again for new factors (`alternate`, `marginal_mode`): the fixed point ignores how the change of u changes H, which is
zero in a linear model only (Immer et al. 2021). Everything is NumPy in float64.

References
----------
- MacKay (1992), "A practical Bayesian framework for backpropagation networks".
- Bishop (2006), Pattern Recognition and Machine Learning, 3.5 and 5.7.
- Immer et al. (2021), "Scalable marginal likelihood estimation for model selection in deep learning".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy

from ppl_bnn.core.errors import CurvatureError
from ppl_bnn.core.progress import Progress, Silent

GROUPINGS = ("global", "layer", "tensor", "weight")
# How negative a gamma per weight, or an eigenvalue relative to the largest, must be to count as more than rounding.
INDEFINITE = 1e-8
LOG_TWO_PI = float(np.log(2.0 * np.pi))
# Limits of every factor and of s.
LIMITS = (1e-8, 1e8)
LOG_LIMITS = (float(np.log(LIMITS[0])), float(np.log(LIMITS[1])))
# 1 - tau prior (A^-1)_ii is a difference of numbers near one: a value below this, per weight, is rounding.
ROUNDING = 1e-12
# Fractions of a step of the alternation, tried in turn.
MONOTONE = (1.0, 0.5, 0.25, 0.125, -0.5, -0.25, -0.125)


def groups_of(sites: Sequence[tuple[str, int]], per: str = "global") -> tuple[np.ndarray, tuple[str, ...]]:
    """The group of each entry of the flat vector, (P,), whose weights share a factor, and the names of the groups.

    `sites` are (name, number of entries). "global" is one group, "tensor" one per site, "layer" one per name up to the
    last dot, "weight" one per entry (automatic relevance determination).
    """
    if per == "weight":
        entries = tuple(
            f"{name}[{entry}]" if size > 1 else name for name, size in sites for entry in range(int(size))
        )
        return np.arange(len(entries)), entries
    labels: dict[str, Callable[[str], str]] = {
        "global": lambda name: "all",
        "layer": lambda name: name.rpartition(".")[0] or name,
        "tensor": lambda name: name,
    }
    of_site = [labels[per](name) for name, _ in sites]
    names = tuple(dict.fromkeys(of_site))
    return np.repeat([names.index(label) for label in of_site], [size for _, size in sites]), names


@dataclass(frozen=True)
class GaussianNoise:
    """The terms of the evidence for Gaussian noise whose precision is scaled by s, over `targets` = N K targets.

    log p(D | u, s) = -s misfit / 2 + (targets log s + log_precision - targets log 2 pi) / 2, with misfit = chi^2 and
    log_precision the sum of the log precisions, at s = 1.
    """

    targets: int
    misfit: float
    log_precision: float

    @classmethod
    def of(cls, residuals: np.ndarray, precision: float | np.ndarray) -> GaussianNoise:
        """From residuals (N,) or (N, K) at the mode and the noise's precision: one number, (K,), or one for each."""
        each = np.broadcast_to(precision, residuals.shape)
        return cls(residuals.size, float(np.sum(each * residuals**2)), float(np.sum(np.log(each))))

    def log_likelihood(self, scale: float) -> float:
        """log p(D | u, s)."""
        constant = self.log_precision + self.targets * (np.log(scale) - LOG_TWO_PI)
        return float(0.5 * (constant - scale * self.misfit))


class Tuned(NamedTuple):
    """Tuned factors (G,) on the prior's precision and `scale` on the noise's, relative to the model as written.

    `gamma` (G,) are effective numbers of parameters; `at_bounds` names the factors that stopped at a limit ("noise" for
    the scale); `history` is the log evidence of each iteration (round, from `alternate`), the last for these factors.
    """

    factors: np.ndarray
    scale: float
    gamma: np.ndarray
    log_evidence: float
    converged: bool
    at_bounds: tuple[str, ...]
    warnings: tuple[str, ...]
    history: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class EvidenceState:
    """The log evidence at a point, gamma (G,), and the upward and downward terms of each log coordinate.

    gamma says how many parameters of each group the data determine. The coordinates `z` are the log factors of the
    tuned groups and, last, log s if there is noise to tune. The gradient is half the difference of the terms; MacKay's
    update multiplies by their ratio.
    """

    evidence: Evidence
    z: np.ndarray
    value: float
    gamma: np.ndarray
    gain: np.ndarray
    loss: np.ndarray

    @property
    def gradient(self) -> np.ndarray:
        """The derivatives in the log coordinates."""
        return 0.5 * (self.gain - self.loss)

    @property
    def has_influence(self) -> np.ndarray:
        """Which coordinates have an upward term above rounding."""
        return self.gain > ROUNDING * np.append(self.evidence.sizes, 1)[self.evidence.chosen]

    @property
    def rounding(self) -> float:
        """The rounding error of the value, a sum of terms of about these sizes."""
        terms = float(np.sum(self.evidence.sizes)) + self.evidence.noise.targets
        return 1e-12 * (abs(self.value) + terms + 1.0)

    def check_noise(self) -> None:
        """Refuse N K <= gamma: no data are left to estimate noise from."""
        targets = self.evidence.noise.targets
        if targets and self.gain[-1] <= INDEFINITE * targets:
            expected = f"fewer effective parameters than the {targets} targets, to tune the noise"
            advice = "noise='mode', a prior with larger precision, fewer weights, or search='maximise'"
            got = f"gamma = {float(self.gamma.sum()):.6g}"
            raise CurvatureError.of("evidence", expected, got, advice)

    def update(self) -> np.ndarray:
        """The change of z by MacKay's update, within the limits."""
        self.check_noise()
        gain = np.where(self.has_influence, self.gain, 0.0)
        with np.errstate(divide="ignore"):
            up, down = np.log(gain), np.log(self.loss)
        # The evidence does not depend on this factor, which stays unchanged.
        flat = np.isneginf(up) & np.isneginf(down)
        ratio = np.subtract(up, down, out=np.zeros_like(self.z), where=~flat)
        return np.clip(self.z + ratio, *LOG_LIMITS) - self.z

    def result(self, history: list[float], found: tuple[str, ...]) -> Tuned:
        """The result, which has converged if no warning is `found`."""
        converged, evidence = not found, self.evidence
        weights = np.arange(self.z.size) < evidence.tuned.sum()
        low, high = LOG_LIMITS
        upper = (self.z >= high - 1e-9) & (self.gradient > 0.0)
        lower = (self.z <= low + 1e-9) & (self.gradient < 0.0)
        flat = (self.loss == 0.0) & ~self.has_influence & ~upper
        names = np.append(np.array(evidence.names, object), "noise")[evidence.chosen]
        end = "the mode is the mean of the prior, and the data are not informative"
        bottom, top = f"at the lower limit, {LIMITS[0]:g}", f"at the upper limit, {LIMITS[1]:g}"
        for which, text in (
            (upper, f"{top}: the evidence still rises, which means weights at their prior mean"),
            (lower, f"{bottom}: the evidence still rises, as the data have nearly no curvature there"),
            (flat, f"left as they were: {end}"),
        ):
            if np.any(which & weights):
                found += (f"precision factor of {listed(list(names[which & weights]))} {text}",)
        for which, text in (
            (upper, f"{top} times the model's: the residuals are nearly zero"),
            (lower, f"{bottom} times the model's: standardise the targets"),
        ):
            if np.any(which & ~weights):
                found += (f"noise precision {text}",)
        factors, scale = evidence.hyperparameters(self.z)
        bounds = tuple(names[upper | lower])
        return Tuned(factors, scale, self.gamma, self.value, converged, bounds, found, tuple(history))


@dataclass(eq=False)
class Evidence:
    """The Laplace approximation of the log evidence at one mode, as a function of factors (G,) and noise factor s.

    Tuned groups have the prior N(loc_i, 1 / (tau_g prior_i)); `held` groups keep the factor 1, and `log_prior_held` is
    their log density at the mode. `determinant` maps (factors, scale) to log det A and gamma (G,). `groups`, `prior`
    (precisions), `mode` and `location` are over the flat vector, (P,). `likelihood` is log p(D | u) without noise to
    tune.
    """

    determinant: Callable[[np.ndarray, float], tuple[float, np.ndarray]]
    groups: np.ndarray
    prior: np.ndarray
    mode: np.ndarray
    likelihood: GaussianNoise | float
    names: Sequence[str]
    location: np.ndarray | float = 0.0
    held: Sequence[str] = ()
    log_prior_held: float = 0.0

    def __post_init__(self) -> None:
        known, groups = self.likelihood, len(self.names)
        # The groups that are not held, (G,) of bool.
        self.tuned = ~np.isin(np.asarray(self.names), list(self.held))
        # A known likelihood has no targets, so that s has no effect on it.
        self.noise = known if isinstance(known, GaussianNoise) else GaussianNoise(0, 0.0, 2.0 * float(known))
        # Which of the factors and s are tuned, (G + 1,) of bool.
        self.chosen = np.append(self.tuned, self.noise.targets > 0)
        # P_g and q_g, (G,); q_g is zero for held groups.
        self.sizes = np.bincount(self.groups, minlength=groups)
        tuned = self.tuned[self.groups]
        each = np.where(tuned, self.prior * (self.mode - self.location) ** 2, 0.0)
        self.quadratics = np.bincount(self.groups, weights=each, minlength=groups)
        self.log_prior_precision = float(np.sum(np.log(self.prior[tuned])))

    def begin(self, start: np.ndarray | None) -> EvidenceState:
        """The state at a start within the limits, factors and, last, s (G + 1,), ones by default.

        Raises `CurvatureError` if H has negative eigenvalues, where they are known.
        """
        eigenvalues = getattr(self.determinant, "eigenvalues", None)
        if eigenvalues is not None:
            smallest, largest = np.min(eigenvalues, initial=0.0), np.max(np.abs(eigenvalues), initial=0.0)
            _check_definite(smallest, largest, f"an eigenvalue of {smallest:.3g} beside {largest:.3g}")
        every = np.ones(len(self.chosen)) if start is None else start
        return self.at_log(np.clip(np.log(every[self.chosen]), *LOG_LIMITS))

    def hyperparameters(self, z: np.ndarray) -> tuple[np.ndarray, float]:
        """Factors and s at z = (log factors of the tuned groups, log s if there is noise)."""
        every = np.ones(len(self.chosen))
        # exp(log(limit)) may miss the limit by one rounding.
        every[self.chosen] = np.clip(np.exp(z), *LIMITS)
        return every[:-1], float(every[-1])

    def at_log(self, z: np.ndarray) -> EvidenceState:
        """`at` the hyper-parameters of z."""
        return replace(self.at(*self.hyperparameters(z)), z=z)

    def at(self, factors: np.ndarray, scale: float = 1.0) -> EvidenceState:
        """The log evidence log p(D | tau, s), all constants included, and what its gradient is made of."""
        where = f"factors from {factors.min():.3g} to {factors.max():.3g}, scale {scale:.3g}"
        try:
            log_determinant, gamma = self.determinant(factors, scale)
        except CurvatureError as error:
            raise CurvatureError(f"evidence at {where}: {error}") from error
        finite, got = np.isfinite(log_determinant + gamma.sum()), f"{log_determinant} at {where}"
        CurvatureError.check(finite, "evidence", "a finite log-determinant", got, "a tighter prior")
        worst = int(np.argmin(gamma / self.sizes))
        got = f"gamma = {gamma[worst]:.3g} in group {self.names[worst]!r} at {where}"
        _check_definite(gamma[worst], self.sizes[worst], got)
        tuned, noise, downward = self.tuned, self.noise, factors * self.quadratics
        prior = -downward + self.sizes * np.log(factors)
        value = (
            noise.log_likelihood(scale)
            + 0.5 * (float(np.sum(prior[tuned])) + self.log_prior_precision)
            + self.log_prior_held
            + 0.5 * float(np.sum(self.sizes[~tuned])) * LOG_TWO_PI
            - 0.5 * float(log_determinant)
        )
        gain = np.append(gamma, noise.targets - float(np.sum(gamma)))
        loss = np.append(downward, scale * noise.misfit)
        z = np.log(np.append(factors, scale)[self.chosen])
        return EvidenceState(self, z, value, gamma, gain[self.chosen], loss[self.chosen])


# --- maximisation ---------------------------------------------------------------------------------


def fixed_point(
    evidence: Evidence, start: np.ndarray | None = None, tolerance: float = 1e-8, iterations: int = 1000
) -> Tuned:
    """MacKay's updates, tau_g <- gamma_g / q_g and s <- (N K - gamma) / chi^2, at one mode, until convergence.

    In log coordinates the update has the sign of the gradient in every coordinate. If it overshoots, it is halved until
    the log evidence rises, so with concavity it converges: no full update changes a log factor by `tolerance`. A mode
    at the prior mean (q_g = 0) sends tau_g to infinity, weights without influence (gamma_g = 0) send it to 0; both are
    named in `at_bounds` and in a warning. `CurvatureError` is raised if H has negative eigenvalues, or N K <= gamma.
    """
    point, history = evidence.begin(start), list[float]()
    step = point.update()
    damping, previous = 1.0, np.zeros_like(step)
    while np.max(np.abs(step), initial=0.0) >= tolerance and len(history) < iterations:
        damping = damping / 2.0 if step @ previous < 0.0 else min(1.0, 2.0 * damping)
        rise, fraction = point.gradient @ step, damping
        while True:
            trial = evidence.at_log(point.z + fraction * step)
            if trial.value >= point.value + 1e-4 * fraction * rise - point.rounding:
                break
            fraction /= 2.0
            expected = "a log evidence that rises along its gradient"
            got, advice = f"one that falls from {point.value:.10g}", "another structure=, or tune='none'"
            CurvatureError.check(fraction >= 2.0**-40, "fixed_point", expected, got, advice)
        point, previous = trial, step
        history.append(point.value)
        step = point.update()
    remaining = float(np.max(np.abs(step), initial=0.0))
    text = (
        f"the fixed point had not settled after {len(history)} iterations: a log factor would still change by "
        f"{remaining:.3g}; give more iterations"
    )
    return point.result(history, () if remaining < tolerance else (text,))


def maximise(
    evidence: Evidence, start: np.ndarray | None = None, tolerance: float = 1e-6, iterations: int = 1000
) -> Tuned:
    """The maximum of the log evidence at one mode by L-BFGS-B in (log tau, log s) with the exact gradient.

    As `fixed_point`, but `tolerance` bounds the gradient, in nats per unit of a log factor, and N K <= gamma is refused
    at the maximum only.
    """
    point, history = evidence.begin(start), list[float]()

    def negative(z: np.ndarray) -> tuple[float, np.ndarray]:
        at = evidence.at_log(z)
        return -at.value, -at.gradient

    low, high = LOG_LIMITS
    if point.z.size:
        result = scipy.optimize.minimize(
            negative,
            point.z,
            jac=True,
            method="L-BFGS-B",
            bounds=[(low, high)] * point.z.size,
            callback=lambda intermediate_result: history.append(-float(intermediate_result.fun)),
            options={"maxiter": iterations, "maxfun": 10 * iterations, "ftol": 0.0, "gtol": 1e-3 * tolerance},
        )
        point = evidence.at_log(np.clip(result.x, low, high))
        # Without a downward term the evidence rises to the limit ever more slowly, and L-BFGS-B stops before it.
        ahead = point.z + point.update()
        end = evidence.at_log(np.where((ahead <= low) | (ahead >= high), ahead, point.z))
        if end.value >= point.value - point.rounding:
            if np.any(end.z != point.z):
                history.append(end.value)
            point = end
    point.check_noise()
    inward = np.clip(point.z + point.gradient, low, high) - point.z
    # With the precision of the value and about this curvature, a smaller gradient cannot be detected.
    visible = 0.1 * np.sqrt(point.rounding * (point.gain + point.loss))
    converged = bool(np.all(np.abs(inward) <= np.maximum(tolerance, visible)))
    text = (
        f"the log evidence still rose after {len(history)} iterations: its gradient is "
        f"{np.abs(inward).max(initial=0.0):.3g}; give more iterations or a larger tolerance"
    )
    return point.result(history, () if converged else (text,))


SEARCHES = {"fixed_point": fixed_point, "maximise": maximise}


def alternate(
    evidence_at: Callable[[np.ndarray, float], EvidenceState],
    start: np.ndarray,
    tune: Callable[..., Tuned] = fixed_point,
    *,
    tolerance: float = 1e-4,
    rounds: int = 50,
    monotone: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """MacKay's alternation of a mode and its tuned factors, until no log factor moves by `tolerance`.

    `evidence_at` maps (factors (G,), scale) to the evidence for these at their mode; `tune` is the update of factors at
    one mode. In a linear model the limit is the maximum of the exact evidence. In a network the updates ignore the
    derivative of H, so the log evidence may fall again (the warning names the best round) or the alternation diverge.
    `monotone` takes the first fraction of each step that raises the log evidence, and stops if no fraction does.
    """
    # Factors and, last, the scale.
    at, state = np.append(start, 1.0), evidence_at(start, 1.0)
    values, change, stuck, ended = [state.value], np.inf, False, False
    with closing((progress or Silent()).task("evidence", rounds)) as task:
        while change >= tolerance and len(values) <= rounds and not ended:
            inner = tune(state.evidence, at)
            end = np.append(inner.factors, inner.scale)
            step = np.log(end / at)
            change = float(np.max(np.abs(step)))
            for fraction in MONOTONE if monotone else (1.0,):
                trial = end if fraction == 1.0 else np.clip(at * np.exp(fraction * step), *LIMITS)
                there = evidence_at(trial[:-1], float(trial[-1]))
                if not monotone or there.value >= values[-1] - 1e-9 * abs(values[-1]):
                    break
            else:
                stuck = True
                break
            at, state = trial, there
            values.append(state.value)
            done = rounds if change < tolerance else len(values) - 1
            ended = bool(task.update(done, log_evidence=values[-1], change=change))
    found: tuple[str, ...] = ()
    if stuck and change > 0.1:
        found += (
            f"the alternation stopped in round {len(values)}, where no part of a step raised the log evidence; a log "
            f"factor would have changed by {change:.3g}",
        )
    elif change >= tolerance and not stuck:
        found += (
            f"the factors had not settled after {len(values) - 1} rounds: the last changed a log factor by "
            f"{change:.3g}; give more rounds",
        )
    best = int(np.argmax(values))
    if values[best] > values[-1] + 0.01:
        found += (
            f"the log evidence fell to {values[-1]:.6g} from {values[best]:.6g} in round {best} of "
            f"{len(values) - 1}, as it may when the mode moves: marginal= maximises it outright",
        )
    result = state.evidence.begin(at).result(values, found)
    return result._replace(converged=change < tolerance or stuck)


def _check_definite(value: float, scale: float, got: str) -> None:
    """Raise `CurvatureError` if a value of this scale is negative, as that of a curvature that is indefinite."""
    expected = "a data curvature without negative eigenvalues"
    advice = 'curvature="ggn", or a mode that is better converged'
    CurvatureError.check(value >= -INDEFINITE * scale, "evidence", expected, got, advice)


def listed(names: Sequence[str]) -> str:
    """At most three names, and the number of the others."""
    shown = ", ".join(repr(str(name)) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
