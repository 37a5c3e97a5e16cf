"""Hyper-parameters from the evidence of a Laplace approximation: precisions of the prior and of Gaussian noise.

At a mode u of the log joint, with H the curvature of the data and Lambda = diag(tau_g(i) prior_i) that of the
prior, the Laplace approximation of the evidence (MacKay 1992; Bishop, PRML 5.7) is

    log p(D | tau, s) = log p(D | u, s) + log p(u | tau) + P/2 log 2 pi - 1/2 log det A,    A = s H + Lambda.

tau_g > 0 multiplies the prior's precision in group g and s > 0 the precision of Gaussian noise, both relative to
the model as it is written (1 leaves it alone). With q_g = sum_{i in g} prior_i (u_i - loc_i)^2, P_g weights in
group g, and gamma_g = sum_{i in g} (1 - tau_g prior_i (A^-1)_ii), its effective number of parameters,

    d / d log tau_g = (gamma_g - tau_g q_g) / 2,    d / d log s = (N K - sum_g gamma_g - s chi^2) / 2,

where chi^2 = sum of (precision x squared residual) over the N K targets. MacKay's updates set these to zero one
by one: tau_g <- gamma_g / q_g, s <- (N K - gamma) / chi^2.

While u and H stay as they are and H is positive semidefinite, the function is concave in (log tau, log s): det A
is a sum of products of principal minors of H, none negative, with powers of s and tau, so log det A is a
log-sum-exp of linear functions. So there is one maximum, and the fixed point and direct maximisation agree about
it. Only when u is found again for new factors (`alternate`, `marginal_mode`) do they part: the fixed point leaves
out what the change of u does to H, which is nothing in a linear model and something in a network. Immer et al.
(2021) take such updates during training.

Everything is NumPy in float64. Sources: MacKay, "A practical Bayesian framework for backpropagation networks"
(1992); Bishop, Pattern Recognition and Machine Learning (2006), 3.5 and 5.7; Immer et al., "Scalable marginal
likelihood estimation for model selection in deep learning" (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError, message, unknown_name
from ppl_bnn.core.progress import Progress, Silent

LIMITS = (1e-8, 1e8)
GROUPINGS = ("global", "layer", "tensor", "weight")
# 1 - tau prior (A^-1)_ii is a difference of numbers near one: what is smaller than this, per weight, is rounding.
ROUNDING = 1e-12
# How negative a gamma per weight, or an eigenvalue relative to the largest, must be to count as more than rounding.
INDEFINITE = 1e-8
# Parts of a step of the alternation that are tried in turn.
MONOTONE = (1.0, 0.5, 0.25, 0.125, -0.5, -0.25, -0.125)
LOG_TWO_PI = float(np.log(2.0 * np.pi))


class LogDeterminant(Protocol):
    """log det(scale H + diag(factors[groups] prior)) and what tuning needs of its derivative.

    Called with factors (G,) and scale it returns the value and gamma (G,), the effective number of parameters of each
    group; the sum of gamma is tr(scale H A^-1). It may have `eigenvalues`, those of H relative to the prior, or None.
    """

    def __call__(self, factors: np.ndarray, scale: float = 1.0) -> tuple[float, np.ndarray]: ...


def groups_of(
    sites: Sequence[tuple[str, int]], per: Literal["global", "layer", "tensor", "weight"] = "global"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which weights share one factor: the group of each entry of the flat vector, (P,) of int, and the groups' names.

    sites: (name, number of entries) in the order of the flat vector. per: "global" puts all into one group,
    "tensor" each site into its own, "layer" sites whose names agree up to the last dot (`hidden0.weight` and
    `hidden0.bias`), "weight" each entry (automatic relevance determination).
    """
    if per not in GROUPINGS:
        raise unknown_name("grouping", per, GROUPINGS)
    if not sites:
        raise InputError("groups_of: " + message("at least one site", "none", "the latent sites of a model"))
    seen: set[str] = set()
    for name, size in sites:
        if name in seen:
            raise InputError(
                "groups_of: " + message("each site once", f"{name!r} twice", "the sites of one program")
            )
        if not isinstance(size, int | np.integer) or size < 1:
            raise InputError(
                f"groups_of: site {name!r}: "
                + message("a positive number of entries", repr(size), "np.asarray(value).size")
            )
        seen.add(name)
    if per == "weight":
        entries = tuple(
            f"{name}[{entry}]" if size > 1 else name for name, size in sites for entry in range(int(size))
        )
        return np.arange(len(entries)), entries
    labels = {
        "global": lambda name: "all",
        "layer": lambda name: name.rpartition(".")[0] or name,
        "tensor": lambda name: name,
    }
    of_site = [labels[per](name) for name, _ in sites]
    names = tuple(dict.fromkeys(of_site))
    index = {name: position for position, name in enumerate(names)}
    groups = np.repeat([index[label] for label in of_site], [size for _, size in sites])
    return groups, names


@dataclass(frozen=True)
class GaussianNoise:
    """What the evidence needs of Gaussian noise whose precision is scaled by s.

    log p(D | u, s) = -s misfit / 2 + (targets log s + log_precision - targets log 2 pi) / 2, with targets = N K,
    misfit = chi^2 = sum of precision x squared residual, and log_precision = sum of the log precisions, each over
    the targets at s = 1.
    """

    targets: int
    misfit: float
    log_precision: float

    def __post_init__(self) -> None:
        if self.targets < 1:
            raise InputError("noise: " + message("at least one target", str(self.targets), "the data"))
        if not (np.isfinite(self.misfit) and self.misfit >= 0.0):
            raise InputError(
                "noise: "
                + message("a finite sum of squares", repr(self.misfit), "residuals at a converged mode")
            )
        if not np.isfinite(self.log_precision):
            raise InputError(
                "noise: "
                + message("finite log precisions", repr(self.log_precision), "a positive noise scale")
            )

    @classmethod
    def of(cls, residuals: np.ndarray, precision: float | np.ndarray) -> GaussianNoise:
        """From residuals (N,) or (N, K) at the mode and the noise's precision: one number, (K,), or one for each."""
        residuals, precision = np.asarray(residuals, float), np.asarray(precision, float)
        if precision.ndim and precision.shape not in (residuals.shape, residuals.shape[1:]):
            raise InputError(
                "noise: "
                + message(
                    f"a precision of shape (), {residuals.shape[1:]} or {residuals.shape}",
                    f"{precision.shape}",
                    "one precision per output",
                )
            )
        if not np.all(precision > 0.0):
            raise InputError(
                "noise: " + message("positive precisions", f"{precision.min():g}", "1 / noise ** 2")
            )
        each = np.broadcast_to(precision, residuals.shape)
        return cls(residuals.size, float(np.sum(each * residuals**2)), float(np.sum(np.log(each))))

    def log_likelihood(self, scale: float) -> float:
        """log p(D | u, s)."""
        constant = self.log_precision + self.targets * (np.log(scale) - LOG_TWO_PI)
        return float(0.5 * (constant - scale * self.misfit))


@dataclass(frozen=True, eq=False)
class Evidence:
    """The Laplace approximation of the log evidence at one mode, as a function of factors (G,) and noise factor s.

    determinant: see `LogDeterminant`. sizes (G,), quadratics (G,): P_g and q_g. log_prior_precision: sum of log
    prior_i over the tuned groups. likelihood: `GaussianNoise`, or log p(D | u) where there is no noise to tune.
    held: names of groups whose factor stays 1, such as a sampled noise scale with a prior that is not Gaussian;
    log_prior_held is their log density at the mode, all constants included. Tuned groups have the Gaussian prior
    N(loc_i, 1 / (tau_g prior_i)).
    """

    determinant: LogDeterminant
    sizes: np.ndarray
    quadratics: np.ndarray
    log_prior_precision: float
    likelihood: GaussianNoise | float
    names: tuple[str, ...]
    held: tuple[str, ...] = ()
    log_prior_held: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.names)
        for name in self.held:
            if name not in self.names:
                raise unknown_name("group", name, self.names)
        for what, array in (("sizes", self.sizes), ("quadratics", self.quadratics)):
            if np.shape(array) != (count,):
                raise InputError(
                    "evidence: "
                    + message(f"{what} of shape ({count},)", str(np.shape(array)), "one number per group")
                )
        if not np.all(np.asarray(self.sizes) > 0):
            empty = self.names[int(np.argmin(self.sizes))]
            raise InputError(
                "evidence: "
                + message("a weight in every group", f"none in {empty!r}", "the groups of groups_of")
            )
        finite = [self.log_prior_precision, self.log_prior_held, *np.asarray(self.quadratics, float)]
        if not isinstance(self.likelihood, GaussianNoise):
            finite.append(float(self.likelihood))
        if not np.all(np.isfinite(finite)) or np.any(np.asarray(self.quadratics) < 0.0):
            raise InputError(
                "evidence: "
                + message(
                    "finite log densities and quadratic forms of at least 0",
                    f"{finite}"[:200],
                    "a converged mode and a Gaussian prior with positive precision",
                )
            )

    @classmethod
    def of(
        cls,
        determinant: LogDeterminant,
        *,
        groups: np.ndarray,
        prior: np.ndarray,
        mode: np.ndarray,
        location: np.ndarray | float = 0.0,
        likelihood: GaussianNoise | float,
        names: Sequence[str],
        held: Sequence[str] = (),
        log_prior_held: float = 0.0,
    ) -> Evidence:
        """From arrays over the flat vector, (P,) each: groups, precisions of the prior, the mode, the prior's mean."""
        groups, prior, mode = np.asarray(groups), np.asarray(prior, float), np.asarray(mode, float)
        location = np.asarray(location, float)
        if not (groups.shape == prior.shape == mode.shape and mode.ndim == 1) or location.shape not in (
            (),
            mode.shape,
        ):
            raise InputError(
                "evidence: "
                + message(
                    "groups, prior, mode and location over one flat vector",
                    f"shapes {groups.shape}, {prior.shape}, {mode.shape}, {location.shape}",
                    "the ravelled latent sites",
                )
            )
        count = len(names)
        if groups.min(initial=0) < 0 or groups.max(initial=0) >= count:
            raise InputError(
                "evidence: "
                + message(
                    f"groups from 0 to {count - 1}", f"{groups.min()} to {groups.max()}", "groups_of(sites)"
                )
            )
        tuned = ~np.isin(np.asarray(names), list(held))[groups]
        if not np.all(prior[tuned] > 0.0):
            raise InputError(
                "evidence: "
                + message(
                    "a positive prior precision for every tuned weight",
                    f"{prior[tuned].min():g}",
                    "held= for groups whose prior is not Gaussian",
                )
            )
        return cls(
            determinant,
            np.bincount(groups, minlength=count),
            np.bincount(
                groups, weights=np.where(tuned, prior * (mode - location) ** 2, 0.0), minlength=count
            ),
            float(np.sum(np.log(prior[tuned]))),
            likelihood,
            tuple(names),
            tuple(held),
            float(log_prior_held),
        )

    @property
    def tuned(self) -> np.ndarray:
        """(G,) of bool: the groups that are not held."""
        return np.array([name not in self.held for name in self.names])

    @property
    def has_noise(self) -> bool:
        """Whether there is Gaussian noise whose precision s scales."""
        return isinstance(self.likelihood, GaussianNoise)

    def log_likelihood(self, scale: float = 1.0) -> float:
        """log p(D | u, s): how well the mode fits."""
        self._check(np.ones(len(self.names)), scale)
        if isinstance(self.likelihood, GaussianNoise):
            return self.likelihood.log_likelihood(scale)
        return float(self.likelihood)

    def log_occam(self, factors: np.ndarray, scale: float = 1.0) -> float:
        """The log of MacKay's Occam factor, log evidence minus log likelihood at the mode: what flexibility costs."""
        return self.log_evidence(factors, scale) - self.log_likelihood(scale)

    def log_evidence(self, factors: np.ndarray, scale: float = 1.0) -> float:
        """log p(D | tau, s), every constant included."""
        return self._balance(np.asarray(factors, float), scale)[0]

    def value_and_gradient(self, factors: np.ndarray, scale: float = 1.0) -> tuple[float, np.ndarray, float]:
        """log p(D | tau, s), its gradient in log tau (G,), zero for held groups, and in log s, zero without noise."""
        value, _, gain, loss = self._balance(np.asarray(factors, float), scale)
        gradient = 0.5 * (gain - loss)
        return value, gradient[:-1], float(gradient[-1])

    def effective_parameters(self, factors: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """gamma (G,): how many parameters of each group the data determine."""
        return self._balance(np.asarray(factors, float), scale)[1]

    def _check(self, factors: np.ndarray, scale: float) -> None:
        if factors.shape != (len(self.names),) or not np.all(np.isfinite(factors) & (factors > 0.0)):
            raise InputError(
                "evidence: "
                + message(
                    f"{len(self.names)} positive finite factors, one per group",
                    f"{factors!r}"[:200],
                    "np.ones(len(evidence.names))",
                )
            )
        moved = [name for name, factor in zip(self.names, factors, strict=True) if factor != 1.0]
        moved = [name for name in moved if name in self.held]
        if moved:
            raise InputError(
                "evidence: " + message("a factor of 1 for held groups", f"another for {moved}", "1.0 there")
            )
        if not (np.isfinite(scale) and scale > 0.0):
            raise InputError(
                "evidence: " + message("a positive finite noise factor", repr(scale), "scale=1.0")
            )
        if scale != 1.0 and not self.has_noise:
            raise UnsupportedError(
                "evidence: "
                + message(
                    "a noise factor for Gaussian noise only",
                    f"scale={scale:g} with a likelihood that has no known noise",
                    "scale=1.0, or marginal_mode for other hyper-parameters",
                )
            )

    def _balance(self, factors: np.ndarray, scale: float) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        """Value, gamma (G,), and what pulls each log coordinate up and down, (G + 1,) each, the noise last.

        Half their difference is the gradient, and their ratio is the factor by which MacKay's update changes the
        coordinate.
        """
        self._check(factors, scale)
        where = f"factors from {factors.min():.3g} to {factors.max():.3g}, scale {scale:.3g}"
        try:
            log_determinant, gamma = self.determinant(factors, scale)
        except CurvatureError as error:
            raise CurvatureError(f"evidence at {where}: {error}") from error
        gamma = np.asarray(gamma, float)
        if not (np.isfinite(log_determinant) and np.all(np.isfinite(gamma))):
            raise CurvatureError(
                "evidence: "
                + message("a finite log-determinant", f"{log_determinant} at {where}", "narrower limits=")
            )
        worst = int(np.argmin(gamma / self.sizes))
        if gamma[worst] < -INDEFINITE * self.sizes[worst]:
            raise _indefinite(f"gamma = {gamma[worst]:.3g} in group {self.names[worst]!r} at {where}")
        tuned = self.tuned
        prior = -factors * self.quadratics + self.sizes * np.log(factors)
        value = (
            self.log_likelihood(scale)
            + 0.5 * (float(np.sum(prior[tuned])) + self.log_prior_precision)
            + self.log_prior_held
            + 0.5 * float(np.sum(self.sizes[~tuned])) * LOG_TWO_PI
            - 0.5 * float(log_determinant)
        )
        gain = np.append(np.where(tuned, gamma, 0.0), 0.0)
        loss = np.append(np.where(tuned, factors * self.quadratics, 0.0), 0.0)
        if isinstance(self.likelihood, GaussianNoise):
            gain[-1] = self.likelihood.targets - float(np.sum(gamma))
            loss[-1] = scale * self.likelihood.misfit
        return value, gamma, gain, loss


@dataclass(frozen=True, eq=False)
class Tuned:
    """Tuned factors, relative to the model as written, and how they came about.

    factors (G,), scale: of the prior's precision and of the noise's. gamma (G,): effective numbers of parameters.
    at_bounds: what stopped at a limit, by name ("noise" for the scale). iterations: accepted steps (rounds, from
    `alternate`). evaluations: of the log-determinant. history: log evidence of each iteration, the last one for
    the factors returned.
    """

    factors: np.ndarray
    scale: float
    gamma: np.ndarray
    log_evidence: float
    iterations: int
    evaluations: int
    converged: bool
    at_bounds: tuple[str, ...]
    warnings: tuple[str, ...]
    history: tuple[float, ...]


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
    """MacKay's updates, tau_g <- gamma_g / q_g and s <- (N K - gamma) / chi^2, at one mode, until they settle.

    In log coordinates the update has the sign of the gradient in every coordinate, so it points uphill; where it
    overshoots, because gamma falls as tau rises, it is halved until the log evidence rises. With concavity that
    always arrives.

    tune_noise: by default where there is Gaussian noise. tolerance: largest change of a log factor by a full
    update. limits: of every factor and of s; what runs into them is named in `at_bounds` and in a warning: q_g =
    0, a mode at the prior mean, sends tau_g to infinity, and weights without influence on the data (gamma_g = 0)
    send it to 0. iterations=1 is the single update taken during training.

    Raises CurvatureError where H has negative eigenvalues, and where N K <= gamma, so that the noise update is
    undefined.
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
                raise CurvatureError(
                    "fixed_point: "
                    + message(
                        "a log evidence that rises along its gradient",
                        f"one that falls from {state.value:.10g}",
                        "a gamma that is the derivative of the log-determinant, as that of covariance.py is",
                    )
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

    Arguments, result and errors are those of `fixed_point`, except that tolerance bounds the gradient, in nats
    per unit of a log factor, and that N K <= gamma is refused at the maximum only: on the way there the gradient
    still says what to do.
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
        # Where nothing pulls back, the evidence rises to the limit ever more slowly, and L-BFGS-B stops on the way.
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
    # A value of so many digits does not show a gradient smaller than this, given about the curvature that there is.
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
    """Log evidence over a grid, (M, S): factors (M,) for all tuned groups at once or (M, G), by noise factors (S,)."""
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
    """A mode, its tuned factors, the mode for these, and so on: MacKay's alternation, until no log factor moves.

    evidence_at(factors (G,), scale) finds the mode for these hyper-parameters (from the last one, if it likes)
    and returns the `Evidence` there; factors and scale remain relative to one fixed prior and noise. tolerance:
    of the log factors. monotone: take of each step the first part that raises the log evidence at the mode found for
    it, backwards if need be, and stop where none does: in a network the plain alternation can run away, trading the
    scales of two layers for each other, and what it leaves out can turn its direction round.

    The result's log evidence belongs to the mode found for the result's factors. In a linear model the limit is
    the maximum of the exact evidence. In a network the updates leave out the derivative of H, so the log evidence
    may fall again: then the warning names the best round.
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
    """The log evidence at a point of the coordinates, and what pulls each of them up and down."""

    value: float
    gamma: np.ndarray
    gain: np.ndarray
    loss: np.ndarray

    @property
    def gradient(self) -> np.ndarray:
        return 0.5 * (self.gain - self.loss)


class _Coordinates:
    """z = (log factors of the tuned groups, log s where noise is tuned), within limits, and what to say about them."""

    def __init__(self, evidence: Evidence, tune_noise: bool | None, limits: tuple[float, float]):
        if not (0.0 < limits[0] < limits[1] < np.inf):
            raise InputError(
                "evidence: " + message("limits 0 < low < high", repr(limits), "limits=(1e-8, 1e8)")
            )
        if tune_noise and not evidence.has_noise:
            raise UnsupportedError(
                "evidence: "
                + message(
                    "Gaussian noise of known scale to tune",
                    "a likelihood without it",
                    "tune_noise=False, or marginal_mode for other hyper-parameters",
                )
            )
        eigenvalues = getattr(evidence.determinant, "eigenvalues", None)
        if eigenvalues is not None and np.size(eigenvalues):
            smallest, largest = float(np.min(eigenvalues)), float(np.max(np.abs(eigenvalues)))
            if smallest < -INDEFINITE * largest:
                raise _indefinite(f"an eigenvalue of {smallest:.3g} beside {largest:.3g}")
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
            raise InputError(
                "evidence: "
                + message(f"a start within {self.limits}", f"{listed(outside)} outside", "wider limits=")
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
        """Differences of the value that mean nothing: it is a sum of terms of about these sizes."""
        likelihood = self.evidence.likelihood
        targets = likelihood.targets if isinstance(likelihood, GaussianNoise) else 0
        return 1e-12 * (abs(state.value) + float(np.sum(self.evidence.sizes)) + targets + 1.0)

    def check_noise(self, state: _State) -> None:
        """Refuse N K <= gamma: nothing is left of the data to estimate noise from."""
        likelihood = self.evidence.likelihood
        if not self._noise or not isinstance(likelihood, GaussianNoise):
            return
        if state.gain[-1] <= INDEFINITE * likelihood.targets:
            raise CurvatureError(
                "evidence: "
                + message(
                    f"fewer effective parameters than the {likelihood.targets} targets, to tune the noise",
                    f"gamma = {float(state.gamma.sum()):.6g}",
                    "tune_noise=False, a prior with larger precision to start from, fewer weights, or maximise",
                )
            )

    def update(self, z: np.ndarray, state: _State) -> np.ndarray:
        """The change of z that MacKay's update asks for, within the limits."""
        self.check_noise(state)
        gain = np.where(self.felt(state), state.gain, 0.0)
        with np.errstate(divide="ignore"):
            up, down = np.log(gain), np.log(state.loss)
        # Neither up nor down: the evidence does not depend on this factor, which stays where it is.
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
    """Refuse a tolerance or a number of steps with which no search can work."""
    if not (np.isfinite(tolerance) and tolerance > 0.0):
        raise InputError(f"{name}: " + message("a positive tolerance", repr(tolerance), "the default"))
    if not isinstance(count, int) or count < 1:
        raise InputError(
            f"{name}: " + message("a positive whole number to stop after", repr(count), "the default")
        )


def _indefinite(came: str) -> CurvatureError:
    return CurvatureError(
        "evidence: "
        + message(
            "a data curvature without negative eigenvalues",
            came,
            'curvature="ggn", or a mode that is better converged',
        )
    )


def listed(names: Sequence[str]) -> str:
    """At most three names, and how many more there are."""
    shown = ", ".join(repr(str(name)) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
