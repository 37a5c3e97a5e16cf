"""Hyper-parameters at the maximum of the evidence: by its gradient, by a fixed point, or alternating with the mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import numpy as np
import scipy

from ppl_bnn.core.errors import CurvatureError
from ppl_bnn.core.progress import Progress, Silent
from ppl_bnn.inference.laplace.evidence import INDEFINITE, Evidence, listed

# Limits of every factor and of s.
LIMITS = (1e-8, 1e8)
# 1 - tau prior (A^-1)_ii is a difference of numbers near one: a value below this, per weight, is rounding.
ROUNDING = 1e-12
# Fractions of a step of the alternation, tried in turn.
MONOTONE = (1.0, 0.5, 0.25, 0.125, -0.5, -0.25, -0.125)


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


def fixed_point(
    evidence: Evidence,
    factors: np.ndarray | None = None,
    scale: float = 1.0,
    tolerance: float = 1e-8,
    iterations: int = 1000,
) -> Tuned:
    """MacKay's updates, tau_g <- gamma_g / q_g and s <- (N K - gamma) / chi^2, at one mode, until convergence.

    In log coordinates the update has the sign of the gradient in every coordinate. If it overshoots, it is halved until
    the log evidence rises, so with concavity it converges: no full update changes a log factor by `tolerance`. A mode
    at the prior mean (q_g = 0) sends tau_g to infinity, weights without influence (gamma_g = 0) send it to 0; both are
    named in `at_bounds` and in a warning. `CurvatureError` is raised if H has negative eigenvalues, or N K <= gamma.
    """
    point, history = _Point.of(evidence, factors, scale), list[float]()
    step = point.update()
    damping, previous = 1.0, np.zeros_like(step)
    while np.max(np.abs(step), initial=0.0) >= tolerance and len(history) < iterations:
        damping = damping / 2.0 if step @ previous < 0.0 else min(1.0, 2.0 * damping)
        rise, fraction = point.state.gradient @ step, damping
        while True:
            trial = _Point(evidence, point.z + fraction * step)
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
    evidence: Evidence,
    factors: np.ndarray | None = None,
    scale: float = 1.0,
    tolerance: float = 1e-6,
    iterations: int = 1000,
) -> Tuned:
    """The maximum of the log evidence at one mode by L-BFGS-B in (log tau, log s) with the exact gradient.

    As `fixed_point`, but `tolerance` bounds the gradient, in nats per unit of a log factor, and N K <= gamma is refused
    at the maximum only.
    """
    point, history = _Point.of(evidence, factors, scale), list[float]()

    def negative(z: np.ndarray) -> tuple[float, np.ndarray]:
        at = evidence.at(*_factors(evidence, z))
        return -at.value, -at.gradient

    low, high = _bounds()
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
        point = _Point(evidence, np.clip(result.x, low, high))
        # Without a downward term the evidence rises to the limit ever more slowly, and L-BFGS-B stops before it.
        ahead = point.z + point.update()
        end = _Point(evidence, np.where((ahead <= low) | (ahead >= high), ahead, point.z))
        if end.value >= point.value - point.rounding:
            if np.any(end.z != point.z):
                history.append(end.value)
            point = end
    point.check_noise()
    state = point.state
    inward = np.clip(point.z + state.gradient, low, high) - point.z
    # With the precision of the value and about this curvature, a smaller gradient cannot be detected.
    visible = 0.1 * np.sqrt(point.rounding * (state.gain + state.loss))
    converged = bool(np.all(np.abs(inward) <= np.maximum(tolerance, visible)))
    text = (
        f"the log evidence still rose after {len(history)} iterations: its gradient is "
        f"{np.abs(inward).max(initial=0.0):.3g}; give more iterations or a larger tolerance"
    )
    return point.result(history, () if converged else (text,))


def alternate(
    evidence_at: Callable[[np.ndarray, float], Evidence],
    start: np.ndarray,
    tune: Callable[..., Tuned] = fixed_point,
    *,
    tolerance: float = 1e-4,
    rounds: int = 50,
    monotone: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """MacKay's alternation of a mode and its tuned factors, until no log factor moves by `tolerance`.

    `evidence_at` maps (factors (G,), scale) to the `Evidence` at the mode for these; `tune` is the update of factors at
    one mode. In a linear model the limit is the maximum of the exact evidence. In a network the updates ignore the
    derivative of H, so the log evidence may fall again (the warning names the best round) or the alternation diverge.
    `monotone` takes the first fraction of each step that raises the log evidence, and stops if there is none.
    """

    def evaluated(at: np.ndarray) -> tuple[Evidence, float]:
        evidence = evidence_at(at[:-1], float(at[-1]))
        return evidence, evidence.log_evidence(at[:-1], float(at[-1]))

    # Factors and, last, the scale.
    at = np.append(start, 1.0)
    evidence, value = evaluated(at)
    values = [value]
    change, stuck = np.inf, False
    with closing((progress or Silent()).task("evidence", rounds)) as task:
        while change >= tolerance and len(values) <= rounds:
            inner = tune(evidence, factors=at[:-1], scale=float(at[-1]))
            end = np.append(inner.factors, inner.scale)
            step = np.log(end / at)
            change = float(np.max(np.abs(step)))
            for fraction in MONOTONE if monotone else (1.0,):
                trial = end if fraction == 1.0 else np.clip(at * np.exp(fraction * step), *LIMITS)
                there, value = evaluated(trial)
                if not monotone or value >= values[-1] - 1e-9 * abs(values[-1]):
                    break
            else:
                stuck = True
                break
            at, evidence = trial, there
            values.append(value)
            done = rounds if change < tolerance else len(values) - 1
            task.update(done, log_evidence=values[-1], change=change)
    found: tuple[str, ...] = ()
    if stuck and change > 0.1:
        found += (
            f"the alternation stopped in round {len(values)}, where no part of a step raised the log evidence; a log "
            f"factor would have changed by {change:.3g}",
        )
    elif change >= tolerance and not stuck:
        found += (
            f"the factors had not settled after {rounds} rounds: the last changed a log factor by {change:.3g}; "
            "give more rounds",
        )
    best = int(np.argmax(values))
    if values[best] > values[-1] + 0.01:
        found += (
            f"the log evidence fell to {values[-1]:.6g} from {values[best]:.6g} in round {best} of "
            f"{len(values) - 1}, as it may when the mode moves: marginal= maximises it outright",
        )
    result = _Point.of(evidence, at[:-1], float(at[-1])).result(values, found)
    return result._replace(converged=change < tolerance or stuck)


def _bounds() -> tuple[float, float]:
    """The limits of every coordinate."""
    return float(np.log(LIMITS[0])), float(np.log(LIMITS[1]))


def _factors(evidence: Evidence, z: np.ndarray) -> tuple[np.ndarray, float]:
    """Factors and scale at z = (log factors of the tuned groups, log s if there is noise)."""
    every = np.ones(len(evidence.chosen))
    # exp(log(limit)) may miss the limit by one rounding.
    every[evidence.chosen] = np.clip(np.exp(z), *LIMITS)
    return every[:-1], float(every[-1])


class _Point:
    """A point z within limits, the evidence there, and warnings about it."""

    def __init__(self, evidence: Evidence, z: np.ndarray):
        self.evidence, self.z = evidence, z
        self.state = evidence.at(*_factors(evidence, z))
        self.value = self.state.value

    @classmethod
    def of(cls, evidence: Evidence, factors: np.ndarray | None, scale: float) -> _Point:
        evidence.check_definite()
        every = np.append(np.ones(len(evidence.names)) if factors is None else factors, scale)
        return cls(evidence, np.clip(np.log(every[evidence.chosen]), *_bounds()))

    @property
    def has_influence(self) -> np.ndarray:
        """Which coordinates have an upward term above rounding."""
        return self.state.gain > ROUNDING * np.append(self.evidence.sizes, 1)[self.evidence.chosen]

    @property
    def rounding(self) -> float:
        """The rounding error of the value, a sum of terms of about these sizes."""
        terms = float(np.sum(self.evidence.sizes)) + self.evidence.noise.targets
        return 1e-12 * (abs(self.value) + terms + 1.0)

    def check_noise(self) -> None:
        """Refuse N K <= gamma: no data are left to estimate noise from."""
        targets = self.evidence.noise.targets
        if targets and self.state.gain[-1] <= INDEFINITE * targets:
            expected = f"fewer effective parameters than the {targets} targets, to tune the noise"
            advice = "noise='mode', a prior with larger precision, fewer weights, or search='maximise'"
            got = f"gamma = {float(self.state.gamma.sum()):.6g}"
            raise CurvatureError.of("evidence", expected, got, advice)

    def update(self) -> np.ndarray:
        """The change of z by MacKay's update, within the limits."""
        self.check_noise()
        gain = np.where(self.has_influence, self.state.gain, 0.0)
        with np.errstate(divide="ignore"):
            up, down = np.log(gain), np.log(self.state.loss)
        # The evidence does not depend on this factor, which stays unchanged.
        flat = np.isneginf(up) & np.isneginf(down)
        ratio = np.subtract(up, down, out=np.zeros_like(self.z), where=~flat)
        return np.clip(self.z + ratio, *_bounds()) - self.z

    def result(self, history: list[float], found: tuple[str, ...]) -> Tuned:
        """The result, which has converged if no warning is `found`."""
        converged, evidence, state = not found, self.evidence, self.state
        weights = np.arange(self.z.size) < evidence.tuned.sum()
        low, high = _bounds()
        upper = (self.z >= high - 1e-9) & (state.gradient > 0.0)
        lower = (self.z <= low + 1e-9) & (state.gradient < 0.0)
        flat = (state.loss == 0.0) & ~self.has_influence & ~upper
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
        factors, scale = _factors(evidence, self.z)
        bounds = tuple(names[upper | lower])
        return Tuned(factors, scale, state.gamma, self.value, converged, bounds, found, tuple(history))
