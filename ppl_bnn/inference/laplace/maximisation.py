"""Hyper-parameters at the maximum of the evidence: by its gradient, by a fixed point, or alternating with the mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError, unknown_name
from ppl_bnn.core.progress import Progress, Silent
from ppl_bnn.inference.laplace.evidence import (
    INDEFINITE,
    LIMITS,
    MONOTONE,
    ROUNDING,
    Evidence,
    GaussianNoise,
    Tuned,
    indefinite,
    listed,
)


def fixed_point(
    evidence: Evidence,
    *,
    factors: np.ndarray | None = None,
    scale: float = 1.0,
    tune_noise: bool | None = None,
    tolerance: float = 1e-8,
    iterations: int = 1000,
    limits: tuple[float, float] = LIMITS,
) -> Tuned:
    """MacKay's updates, tau_g <- gamma_g / q_g and s <- (N K - gamma) / chi^2, at one mode, until convergence.

    In log coordinates the update has the sign of the gradient in every coordinate, so it points uphill. If it
    overshoots, because gamma falls as tau rises, it is halved until the log evidence rises. With concavity this always
    converges.

    Parameters
    ----------
    evidence : Evidence
        The evidence at the mode.
    factors : ndarray or None
        Initial factors, (G,).
    scale : float
        Initial noise factor s.
    tune_noise : bool or None
        Whether to tune s. By default if there is Gaussian noise.
    tolerance : float
        The largest change of a log factor by a full update at convergence.
    iterations : int
        The most updates. 1 is the single update taken during training.
    limits : (float, float)
        Limits of every factor and of s. Factors at a limit are named in `at_bounds` and in a warning: q_g = 0, a mode
        at the prior mean, sends tau_g to infinity, and weights without influence on the data (gamma_g = 0) send it to
        0.

    Returns
    -------
    Tuned
        The factors.

    Raises
    ------
    CurvatureError
        H has negative eigenvalues, or N K <= gamma, so that the noise update is undefined.
    """
    coordinates = _Coordinates(evidence, tune_noise, limits)
    check_effort("fixed_point", tolerance, iterations)
    z = coordinates.pack(factors, scale)
    state = coordinates.evaluate(z)
    history: list[float] = []
    damping, previous, evaluations = 1.0, np.zeros_like(z), 1
    step = coordinates.update(z, state)
    while np.max(np.abs(step), initial=0.0) >= tolerance and len(history) < iterations:
        damping = damping / 2.0 if step @ previous < 0.0 else min(1.0, 2.0 * damping)
        rise, fraction = state.gradient @ step, damping
        while True:
            trial = coordinates.evaluate(z + fraction * step)
            evaluations += 1
            if trial.value >= state.value + 1e-4 * fraction * rise - coordinates.rounding(state):
                break
            fraction /= 2.0
            if fraction < 2.0**-40:
                raise CurvatureError.of(
                    "fixed_point",
                    "a log evidence that rises along its gradient",
                    f"one that falls from {state.value:.10g}",
                    "a gamma that is the derivative of the log-determinant, as that of gaussians.py is",
                )
        z, state, previous = z + fraction * step, trial, step
        history.append(state.value)
        step = coordinates.update(z, state)
    remaining = float(np.max(np.abs(step), initial=0.0))
    found: tuple[str, ...] = ()
    if remaining >= tolerance:
        found = (
            f"the fixed point had not settled after {len(history)} iterations: a log factor would still change by "
            f"{remaining:.3g}; give more iterations",
        )
    return coordinates.result(z, state, tuple(history), evaluations, remaining < tolerance, found)


def maximise(
    evidence: Evidence,
    *,
    factors: np.ndarray | None = None,
    scale: float = 1.0,
    tune_noise: bool | None = None,
    tolerance: float = 1e-6,
    iterations: int = 1000,
    limits: tuple[float, float] = LIMITS,
) -> Tuned:
    """The maximum of the log evidence at one mode by L-BFGS-B in (log tau, log s) with the exact gradient.

    Arguments, result and errors are those of `fixed_point`, with two differences. `tolerance` bounds the gradient, in
    nats per unit of a log factor. N K <= gamma is refused at the maximum only: before it the gradient is still defined.

    Parameters
    ----------
    evidence : Evidence
        The evidence at the mode.
    factors, scale, tune_noise, limits
        As in `fixed_point`.
    tolerance : float
        Bound of the gradient at convergence, in nats per unit of a log factor.
    iterations : int
        The most iterations.

    Returns
    -------
    Tuned
        The factors.
    """
    from scipy.optimize import minimize

    coordinates = _Coordinates(evidence, tune_noise, limits)
    check_effort("maximise", tolerance, iterations)
    z = coordinates.pack(factors, scale)
    evaluations = 0
    history: list[float] = []

    def negative(point: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal evaluations
        evaluations += 1
        at = coordinates.evaluate(point)
        return -at.value, -at.gradient

    state = coordinates.evaluate(z)
    if z.size:
        result = minimize(
            negative,
            z,
            jac=True,
            method="L-BFGS-B",
            bounds=[(coordinates.lowest, coordinates.highest)] * z.size,
            callback=lambda intermediate_result: history.append(-float(intermediate_result.fun)),
            options={"maxiter": iterations, "maxfun": 10 * iterations, "ftol": 0.0, "gtol": 1e-3 * tolerance},
        )
        z = np.clip(result.x, coordinates.lowest, coordinates.highest)
        state = coordinates.evaluate(z)
        # Without a downward term the evidence rises to the limit ever more slowly, and L-BFGS-B stops before it.
        ahead = z + coordinates.update(z, state)
        ends = np.where((ahead <= coordinates.lowest) | (ahead >= coordinates.highest), ahead, z)
        trial = coordinates.evaluate(ends)
        evaluations += 2
        if trial.value >= state.value - coordinates.rounding(state):
            if np.any(ends != z):
                history.append(trial.value)
            z, state = ends, trial
    coordinates.check_noise(state)
    inward = np.clip(z + state.gradient, coordinates.lowest, coordinates.highest) - z
    # With the precision of the value and about this curvature, a smaller gradient cannot be detected.
    visible = 0.1 * np.sqrt(coordinates.rounding(state) * (state.gain + state.loss))
    converged = bool(np.all(np.abs(inward) <= np.maximum(tolerance, visible)))
    found: tuple[str, ...] = ()
    if not converged:
        found = (
            f"the log evidence still rose after {len(history)} iterations: its gradient is {np.abs(inward).max():.3g}; "
            "give more iterations or a larger tolerance",
        )
    return coordinates.result(z, state, tuple(history), evaluations + 1, converged, found)


def profile(
    evidence: Evidence, factors: np.ndarray, scales: np.ndarray | Sequence[float] = (1.0,)
) -> np.ndarray:
    """Log evidence over a grid of factors and noise factors.

    Parameters
    ----------
    evidence : Evidence
        The evidence at the mode.
    factors : ndarray
        (M,) for all tuned groups at once, or (M, G).
    scales : ndarray or sequence of float
        Noise factors, (S,).

    Returns
    -------
    ndarray
        The log evidence, (M, S).
    """
    factors = np.asarray(factors, float)
    if factors.ndim == 1:
        factors = np.where(evidence.tuned, factors[:, None], 1.0)
    return np.array([[evidence.log_evidence(row, float(scale)) for scale in scales] for row in factors])


def alternate(
    evidence_at: Callable[[np.ndarray, float], Evidence],
    start: np.ndarray,
    *,
    scale: float = 1.0,
    method: Literal["fixed_point", "maximise"] = "fixed_point",
    tune_noise: bool | None = None,
    tolerance: float = 1e-4,
    rounds: int = 50,
    limits: tuple[float, float] = LIMITS,
    monotone: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """MacKay's alternation of a mode and its tuned factors, until no log factor moves.

    The result's log evidence belongs to the mode found for the result's factors. In a linear model the limit is
    the maximum of the exact evidence. In a network the updates ignore the derivative of H, so the log evidence
    may fall again. Then the warning names the best round.

    Parameters
    ----------
    evidence_at : callable
        (factors (G,), scale) -> the `Evidence` at the mode for these hyper-parameters. The search for the mode may
        begin at the last one. Factors and scale are relative to one fixed prior and noise.
    start : ndarray
        Initial factors, (G,).
    scale : float
        Initial noise factor.
    method : {"fixed_point", "maximise"}
        The update of the factors at one mode.
    tune_noise : bool or None
        Whether to tune the noise factor. By default if there is Gaussian noise.
    tolerance : float
        Tolerance of the log factors.
    rounds : int
        The most rounds.
    limits : (float, float)
        Limits of every factor.
    monotone : bool
        Whether to take the first fraction of each step that raises the log evidence at the mode found for it, backwards
        if necessary, and to stop if there is none. In a network the plain alternation can diverge, trading the scales
        of two layers for each other, and the ignored derivative can reverse its direction.
    progress : Progress or None
        The progress display.

    Returns
    -------
    Tuned
        The factors.
    """
    if method not in ("fixed_point", "maximise"):
        raise unknown_name("update", method, ("fixed_point", "maximise"))
    check_effort("alternate", tolerance, rounds)
    tune = fixed_point if method == "fixed_point" else maximise
    factors = np.array(start, float)
    evidence = evidence_at(factors, scale)
    values = [evidence.log_evidence(factors, scale)]
    evaluations, change, stuck = 1, np.inf, False
    task = (progress or Silent()).task("evidence", rounds)
    try:
        while change >= tolerance and len(values) <= rounds:
            inner = tune(evidence, factors=factors, scale=scale, tune_noise=tune_noise, limits=limits)
            steps = np.log(inner.factors / factors), float(np.log(inner.scale / scale))
            change = max(float(np.max(np.abs(steps[0]))), abs(steps[1]))
            evaluations += inner.evaluations
            for fraction in MONOTONE if monotone else (1.0,):
                trial = (inner.factors, inner.scale)
                if fraction != 1.0:
                    tried = factors * np.exp(fraction * steps[0]), scale * np.exp(fraction * steps[1])
                    trial = np.clip(tried[0], *limits), float(np.clip(tried[1], *limits))
                there = evidence_at(*trial)
                value = there.log_evidence(*trial)
                evaluations += 1
                if not monotone or value >= values[-1] - 1e-9 * abs(values[-1]):
                    break
            else:
                stuck = True
                break
            (factors, scale), evidence = trial, there
            values.append(value)
            done = rounds if change < tolerance else len(values) - 1
            task.update(done, log_evidence=values[-1], change=change)
    finally:
        task.close()
    coordinates = _Coordinates(evidence, tune_noise, limits)
    z = coordinates.pack(factors, scale)
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
            f"{len(values) - 1}, as it may when the mode moves: marginal_mode maximises it outright",
        )
    state = coordinates.evaluate(z)
    settled = change < tolerance or stuck
    result = coordinates.result(z, state, tuple(values), evaluations + 1, settled, found)
    return replace(result, iterations=len(values) - 1)


@dataclass(frozen=True, eq=False)
class _State:
    """The log evidence at a point of the coordinates, and the upward and downward terms of each coordinate."""

    value: float
    gamma: np.ndarray
    gain: np.ndarray
    loss: np.ndarray

    @property
    def gradient(self) -> np.ndarray:
        return 0.5 * (self.gain - self.loss)


class _Coordinates:
    """z = (log factors of the tuned groups, log s if noise is tuned), within limits, and warnings about them."""

    def __init__(self, evidence: Evidence, tune_noise: bool | None, limits: tuple[float, float]):
        if not (0.0 < limits[0] < limits[1] < np.inf):
            raise InputError.of("evidence", "limits 0 < low < high", repr(limits), "limits=(1e-8, 1e8)")
        if tune_noise and not evidence.has_noise:
            raise UnsupportedError.of(
                "evidence",
                "Gaussian noise of known scale to tune",
                "a likelihood without it",
                "tune_noise=False, or marginal_mode for other hyper-parameters",
            )
        eigenvalues = getattr(evidence.determinant, "eigenvalues", None)
        if eigenvalues is not None and np.size(eigenvalues):
            smallest, largest = float(np.min(eigenvalues)), float(np.max(np.abs(eigenvalues)))
            if smallest < -INDEFINITE * largest:
                raise indefinite(f"an eigenvalue of {smallest:.3g} beside {largest:.3g}")
        self.evidence = evidence
        self.limits = limits
        self.lowest, self.highest = float(np.log(limits[0])), float(np.log(limits[1]))
        self._tuned = evidence.tuned
        self._noise = evidence.has_noise if tune_noise is None else tune_noise
        self._chosen = np.append(self._tuned, self._noise)
        self._names = tuple(np.append(np.array(evidence.names, object), "noise")[self._chosen])
        self._scale = 1.0

    def pack(self, factors: np.ndarray | None, scale: float) -> np.ndarray:
        count = len(self.evidence.names)
        factors = np.ones(count) if factors is None else np.asarray(factors, float)
        self.evidence._check(factors, scale)
        self._scale = scale
        start = np.append(factors, scale)[self._chosen]
        if np.any(start < self.limits[0]) or np.any(start > self.limits[1]):
            outside = [
                name
                for name, value in zip(self._names, start, strict=True)
                if not self.limits[0] <= value <= self.limits[1]
            ]
            raise InputError.of(
                "evidence", f"a start within {self.limits}", f"{listed(outside)} outside", "wider limits="
            )
        return np.clip(np.log(start), self.lowest, self.highest)

    def unpack(self, z: np.ndarray) -> tuple[np.ndarray, float]:
        every = np.append(np.ones(len(self.evidence.names)), self._scale)
        # exp(log(limit)) may miss the limit by one rounding.
        every[self._chosen] = np.clip(np.exp(z), *self.limits)
        return every[:-1], float(every[-1])

    def evaluate(self, z: np.ndarray) -> _State:
        value, gamma, gain, loss = self.evidence._balance(*self.unpack(z))
        return _State(value, gamma, gain[self._chosen], loss[self._chosen])

    def felt(self, state: _State) -> np.ndarray:
        """Which coordinates the data pull up by more than rounding."""
        return state.gain > ROUNDING * np.append(self.evidence.sizes, 1)[self._chosen]

    def rounding(self, state: _State) -> float:
        """The rounding error of the value, which is a sum of terms of about these sizes."""
        likelihood = self.evidence.likelihood
        targets = likelihood.targets if isinstance(likelihood, GaussianNoise) else 0
        return 1e-12 * (abs(state.value) + float(np.sum(self.evidence.sizes)) + targets + 1.0)

    def check_noise(self, state: _State) -> None:
        """Refuse N K <= gamma: no data are left to estimate noise from."""
        likelihood = self.evidence.likelihood
        if not self._noise or not isinstance(likelihood, GaussianNoise):
            return
        if state.gain[-1] <= INDEFINITE * likelihood.targets:
            raise CurvatureError.of(
                "evidence",
                f"fewer effective parameters than the {likelihood.targets} targets, to tune the noise",
                f"gamma = {float(state.gamma.sum()):.6g}",
                "tune_noise=False, a prior with larger precision to start from, fewer weights, or maximise",
            )

    def update(self, z: np.ndarray, state: _State) -> np.ndarray:
        """The change of z by MacKay's update, within the limits."""
        self.check_noise(state)
        gain = np.where(self.felt(state), state.gain, 0.0)
        with np.errstate(divide="ignore"):
            up, down = np.log(gain), np.log(state.loss)
        # The evidence does not depend on this factor, which stays unchanged.
        flat = np.isneginf(up) & np.isneginf(down)
        ratio = np.subtract(up, down, out=np.zeros_like(z), where=~flat)
        return np.clip(z + ratio, self.lowest, self.highest) - z

    def result(
        self,
        z: np.ndarray,
        state: _State,
        history: tuple[float, ...],
        evaluations: int,
        converged: bool,
        warnings: tuple[str, ...],
    ) -> Tuned:
        factors, scale = self.unpack(z)
        near = 1e-9
        weights = np.arange(z.size) < self._tuned.sum()
        upper = (z >= self.highest - near) & (state.gradient > 0.0)
        lower = (z <= self.lowest + near) & (state.gradient < 0.0)
        flat = (state.loss == 0.0) & ~self.felt(state) & ~upper
        low, high = self.limits
        for which, what in (
            (
                upper & weights,
                f"at the upper limit, {high:g}: the evidence asks for more, which means weights at their prior mean",
            ),
            (
                lower & weights,
                f"at the lower limit, {low:g}: the data hardly curve there, and the evidence asks for less",
            ),
            (flat & weights, "left as they were: the mode is the mean of the prior and the data say nothing"),
        ):
            if which.any():
                named = [name for name, there in zip(self._names, which, strict=True) if there]
                warnings += (f"precision factor of {listed(named)} {what}",)
        if np.any(upper & ~weights):
            warnings += (
                f"noise precision at the upper limit, {high:g} times the model's: the residuals are nearly zero",
            )
        if np.any(lower & ~weights):
            warnings += (
                f"noise precision at the lower limit, {low:g} times the model's: standardise the targets",
            )
        at_bounds = tuple(name for name, there in zip(self._names, upper | lower, strict=True) if there)
        return Tuned(
            factors,
            scale,
            state.gamma,
            state.value,
            len(history),
            evaluations,
            converged,
            at_bounds,
            warnings,
            history,
        )


def check_effort(name: str, tolerance: float, count: int) -> None:
    """Refuse a tolerance or a number of steps with which no search can work.

    Parameters
    ----------
    name : str
        The name of the search.
    tolerance : float
        The tolerance.
    count : int
        The number of steps.
    """
    if not (np.isfinite(tolerance) and tolerance > 0.0):
        raise InputError.of(name, "a positive tolerance", repr(tolerance), "the default")
    if not isinstance(count, int) or count < 1:
        raise InputError.of(name, "a positive whole number to stop after", repr(count), "the default")
