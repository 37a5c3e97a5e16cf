"""Hyper-parameters from the evidence of a Laplace approximation: precisions of the prior and of Gaussian noise.

At a mode u of the log joint, with H the curvature of the data and Lambda = diag(tau_g(i) prior_i) that of the
prior, the Laplace approximation of the evidence (MacKay 1992; Bishop, PRML 5.7) is

    log p(D | tau, s) = log p(D | u, s) + log p(u | tau) + P/2 log 2 pi - 1/2 log det A,    A = s H + Lambda.

tau_g > 0 multiplies the prior's precision in group g, and s > 0 the precision of Gaussian noise. Both are relative to
the model as written (1 leaves it unchanged). With q_g = sum_{i in g} prior_i (u_i - loc_i)^2, P_g weights in
group g, and gamma_g = sum_{i in g} (1 - tau_g prior_i (A^-1)_ii), its effective number of parameters,

    d / d log tau_g = (gamma_g - tau_g q_g) / 2,    d / d log s = (N K - sum_g gamma_g - s chi^2) / 2,

where chi^2 = sum of (precision x squared residual) over the N K targets. MacKay's updates set these to zero one
by one: tau_g <- gamma_g / q_g, s <- (N K - gamma) / chi^2.

While u and H stay fixed and H is positive semidefinite, the function is concave in (log tau, log s): det A is a sum of
products of principal minors of H, none negative, with powers of s and tau, so log det A is a log-sum-exp of linear
functions. So there is one maximum, and the fixed point and direct maximisation agree. They differ only if u is found
again for new factors (`alternate`, `marginal_mode`): the fixed point ignores how the change of u changes H. That effect
is zero in a linear model but not in a network. Immer et al. (2021) take such updates during training.

Everything is NumPy in float64.

References
----------
- MacKay (1992), "A practical Bayesian framework for backpropagation networks".
- Bishop (2006), Pattern Recognition and Machine Learning, 3.5 and 5.7.
- Immer et al. (2021), "Scalable marginal likelihood estimation for model selection in deep learning".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ppl_bnn.core.errors import CurvatureError, InputError, UnsupportedError, unknown_name

LIMITS = (1e-8, 1e8)
GROUPINGS = ("global", "layer", "tensor", "weight")
# 1 - tau prior (A^-1)_ii is a difference of numbers near one: a value below this, per weight, is rounding.
ROUNDING = 1e-12
# How negative a gamma per weight, or an eigenvalue relative to the largest, must be to count as more than rounding.
INDEFINITE = 1e-8
# Fractions of a step of the alternation, tried in turn.
MONOTONE = (1.0, 0.5, 0.25, 0.125, -0.5, -0.25, -0.125)
LOG_TWO_PI = float(np.log(2.0 * np.pi))


class LogDeterminant(Protocol):
    """The function log det(scale H + diag(factors[groups] prior)), with the derivatives that tuning needs.

    Called with factors (G,) and scale it returns the value and gamma (G,), the effective number of parameters of each
    group. The sum of gamma is tr(scale H A^-1). It may have `eigenvalues`, those of H relative to the prior, or None.
    """

    def __call__(self, factors: np.ndarray, scale: float = 1.0) -> tuple[float, np.ndarray]: ...


def groups_of(
    sites: Sequence[tuple[str, int]], per: Literal["global", "layer", "tensor", "weight"] = "global"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which weights share one factor.

    Parameters
    ----------
    sites : sequence of (str, int)
        (name, number of entries) in the order of the flat vector.
    per : {"global", "layer", "tensor", "weight"}
        "global" puts all weights into one group, "tensor" each site into its own, "layer" sites whose names agree up to
        the last dot (`hidden0.weight` and `hidden0.bias`), "weight" each entry (automatic relevance determination).

    Returns
    -------
    groups : ndarray of int
        The group of each entry of the flat vector, (P,).
    names : tuple of str
        The names of the groups.
    """
    if per not in GROUPINGS:
        raise unknown_name("grouping", per, GROUPINGS)
    if not sites:
        raise InputError.of("groups_of", "at least one site", "none", "the latent sites of a model")
    seen: set[str] = set()
    for name, size in sites:
        if name in seen:
            raise InputError.of("groups_of", "each site once", f"{name!r} twice", "the sites of one program")
        if not isinstance(size, int | np.integer) or size < 1:
            raise InputError.of(
                f"groups_of: site {name!r}",
                "a positive number of entries",
                repr(size),
                "np.asarray(value).size",
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
    """The terms of the evidence for Gaussian noise whose precision is scaled by s.

    log p(D | u, s) = -s misfit / 2 + (targets log s + log_precision - targets log 2 pi) / 2.

    Parameters
    ----------
    targets : int
        N K.
    misfit : float
        chi^2, the sum over the targets of precision x squared residual at s = 1.
    log_precision : float
        The sum over the targets of the log precisions at s = 1.
    """

    targets: int
    misfit: float
    log_precision: float

    def __post_init__(self) -> None:
        if self.targets < 1:
            raise InputError.of("noise", "at least one target", str(self.targets), "the data")
        if not (np.isfinite(self.misfit) and self.misfit >= 0.0):
            raise InputError.of(
                "noise", "a finite sum of squares", repr(self.misfit), "residuals at a converged mode"
            )
        if not np.isfinite(self.log_precision):
            raise InputError.of(
                "noise", "finite log precisions", repr(self.log_precision), "a positive noise scale"
            )

    @classmethod
    def of(cls, residuals: np.ndarray, precision: float | np.ndarray) -> GaussianNoise:
        """From residuals (N,) or (N, K) at the mode and the noise's precision: one number, (K,), or one for each."""
        residuals, precision = np.asarray(residuals, float), np.asarray(precision, float)
        if precision.ndim and precision.shape not in (residuals.shape, residuals.shape[1:]):
            raise InputError.of(
                "noise",
                f"a precision of shape (), {residuals.shape[1:]} or {residuals.shape}",
                f"{precision.shape}",
                "one precision per output",
            )
        if not np.all(precision > 0.0):
            raise InputError.of("noise", "positive precisions", f"{precision.min():g}", "1 / noise ** 2")
        each = np.broadcast_to(precision, residuals.shape)
        return cls(residuals.size, float(np.sum(each * residuals**2)), float(np.sum(np.log(each))))

    def log_likelihood(self, scale: float) -> float:
        """Return log p(D | u, s)."""
        constant = self.log_precision + self.targets * (np.log(scale) - LOG_TWO_PI)
        return float(0.5 * (constant - scale * self.misfit))


@dataclass(frozen=True, eq=False)
class Evidence:
    """The Laplace approximation of the log evidence at one mode, as a function of factors (G,) and noise factor s.

    Tuned groups have the Gaussian prior N(loc_i, 1 / (tau_g prior_i)).

    Parameters
    ----------
    determinant : LogDeterminant
        The log-determinant of A.
    sizes : ndarray
        P_g, (G,).
    quadratics : ndarray
        q_g, (G,).
    log_prior_precision : float
        The sum of log prior_i over the tuned groups.
    likelihood : GaussianNoise or float
        log p(D | u) if there is no noise to tune.
    names : tuple of str
        Names of the groups.
    held : tuple of str
        Names of groups whose factor stays 1, such as a sampled noise scale with a prior that is not Gaussian.
    log_prior_held : float
        The log density of the held groups at the mode, all constants included.
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
                raise InputError.of(
                    "evidence", f"{what} of shape ({count},)", str(np.shape(array)), "one number per group"
                )
        if not np.all(np.asarray(self.sizes) > 0):
            empty = self.names[int(np.argmin(self.sizes))]
            raise InputError.of(
                "evidence", "a weight in every group", f"none in {empty!r}", "the groups of groups_of"
            )
        finite = [self.log_prior_precision, self.log_prior_held, *np.asarray(self.quadratics, float)]
        if not isinstance(self.likelihood, GaussianNoise):
            finite.append(float(self.likelihood))
        if not np.all(np.isfinite(finite)) or np.any(np.asarray(self.quadratics) < 0.0):
            raise InputError.of(
                "evidence",
                "finite log densities and quadratic forms of at least 0",
                f"{finite}"[:200],
                "a converged mode and a Gaussian prior with positive precision",
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
            raise InputError.of(
                "evidence",
                "groups, prior, mode and location over one flat vector",
                f"shapes {groups.shape}, {prior.shape}, {mode.shape}, {location.shape}",
                "the ravelled latent sites",
            )
        count = len(names)
        if groups.min(initial=0) < 0 or groups.max(initial=0) >= count:
            raise InputError.of(
                "evidence",
                f"groups from 0 to {count - 1}",
                f"{groups.min()} to {groups.max()}",
                "groups_of(sites)",
            )
        tuned = ~np.isin(np.asarray(names), list(held))[groups]
        if not np.all(prior[tuned] > 0.0):
            raise InputError.of(
                "evidence",
                "a positive prior precision for every tuned weight",
                f"{prior[tuned].min():g}",
                "held= for groups whose prior is not Gaussian",
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
        """The groups that are not held, (G,) of bool."""
        return np.array([name not in self.held for name in self.names])

    @property
    def has_noise(self) -> bool:
        """Whether there is Gaussian noise whose precision s scales."""
        return isinstance(self.likelihood, GaussianNoise)

    def log_likelihood(self, scale: float = 1.0) -> float:
        """The log likelihood log p(D | u, s) of the mode."""
        self._check(np.ones(len(self.names)), scale)
        if isinstance(self.likelihood, GaussianNoise):
            return self.likelihood.log_likelihood(scale)
        return float(self.likelihood)

    def log_occam(self, factors: np.ndarray, scale: float = 1.0) -> float:
        """The log of MacKay's Occam factor: log evidence minus log likelihood at the mode."""
        return self.log_evidence(factors, scale) - self.log_likelihood(scale)

    def log_evidence(self, factors: np.ndarray, scale: float = 1.0) -> float:
        """The log evidence log p(D | tau, s), all constants included."""
        return self._balance(np.asarray(factors, float), scale)[0]

    def value_and_gradient(self, factors: np.ndarray, scale: float = 1.0) -> tuple[float, np.ndarray, float]:
        """The log evidence and its gradient.

        Returns
        -------
        value : float
            log p(D | tau, s).
        gradient : ndarray
            The derivatives in log tau, (G,), zero for held groups.
        noise_gradient : float
            The derivative in log s, zero without noise.
        """
        value, _, gain, loss = self._balance(np.asarray(factors, float), scale)
        gradient = 0.5 * (gain - loss)
        return value, gradient[:-1], float(gradient[-1])

    def effective_parameters(self, factors: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """gamma (G,): how many parameters of each group the data determine."""
        return self._balance(np.asarray(factors, float), scale)[1]

    def _check(self, factors: np.ndarray, scale: float) -> None:
        if factors.shape != (len(self.names),) or not np.all(np.isfinite(factors) & (factors > 0.0)):
            raise InputError.of(
                "evidence",
                f"{len(self.names)} positive finite factors, one per group",
                f"{factors!r}"[:200],
                "np.ones(len(evidence.names))",
            )
        moved = [name for name, factor in zip(self.names, factors, strict=True) if factor != 1.0]
        moved = [name for name in moved if name in self.held]
        if moved:
            raise InputError.of(
                "evidence", "a factor of 1 for held groups", f"another for {moved}", "1.0 there"
            )
        if not (np.isfinite(scale) and scale > 0.0):
            raise InputError.of("evidence", "a positive finite noise factor", repr(scale), "scale=1.0")
        if scale != 1.0 and not self.has_noise:
            raise UnsupportedError.of(
                "evidence",
                "a noise factor for Gaussian noise only",
                f"scale={scale:g} with a likelihood that has no known noise",
                "scale=1.0, or marginal_mode for other hyper-parameters",
            )

    def _balance(self, factors: np.ndarray, scale: float) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        """Value, gamma (G,), and the upward and downward terms of each log coordinate, (G + 1,) each, the noise last.

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
            raise CurvatureError.of(
                "evidence", "a finite log-determinant", f"{log_determinant} at {where}", "narrower limits="
            )
        worst = int(np.argmin(gamma / self.sizes))
        if gamma[worst] < -INDEFINITE * self.sizes[worst]:
            raise indefinite(f"gamma = {gamma[worst]:.3g} in group {self.names[worst]!r} at {where}")
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
    """Tuned factors, relative to the model as written, and details of the search.

    Parameters
    ----------
    factors : ndarray
        Factors on the prior's precision, (G,).
    scale : float
        Factor on the noise's precision.
    gamma : ndarray
        Effective numbers of parameters, (G,).
    log_evidence : float
        The log evidence at these factors.
    iterations : int
        Accepted steps (rounds, from `alternate`).
    evaluations : int
        Evaluations of the log-determinant.
    converged : bool
        Whether the search converged.
    at_bounds : tuple of str
        Names of the factors that stopped at a limit ("noise" for the scale).
    warnings : tuple of str
        Warnings.
    history : tuple of float
        Log evidence of each iteration, the last one for the returned factors.
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


def indefinite(got: str) -> CurvatureError:
    """The `CurvatureError` of a curvature with negative eigenvalues."""
    return CurvatureError.of(
        "evidence",
        "a data curvature without negative eigenvalues",
        got,
        'curvature="ggn", or a mode that is better converged',
    )


def listed(names: Sequence[str]) -> str:
    """At most three names, and the number of the others."""
    shown = ", ".join(repr(str(name)) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
