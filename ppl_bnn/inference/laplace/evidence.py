"""Hyper-parameters from the evidence of a Laplace approximation: precisions of the prior and of Gaussian noise.

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
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ppl_bnn.core.errors import CurvatureError

GROUPINGS = ("global", "layer", "tensor", "weight")
# How negative a gamma per weight, or an eigenvalue relative to the largest, must be to count as more than rounding.
INDEFINITE = 1e-8
LOG_TWO_PI = float(np.log(2.0 * np.pi))


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


class EvidenceState(NamedTuple):
    """The log evidence at some factors, gamma (G,), and the upward and downward terms of each log coordinate.

    gamma says how many parameters of each group the data determine. The coordinates are the log factors of the tuned
    groups and, last, log s if there is noise to tune. The gradient is half the difference of the terms; MacKay's update
    multiplies by their ratio.
    """

    value: float
    gamma: np.ndarray
    gain: np.ndarray
    loss: np.ndarray

    @property
    def gradient(self) -> np.ndarray:
        """The derivatives in the log coordinates."""
        return 0.5 * (self.gain - self.loss)


@dataclass(frozen=True, eq=False)
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

    @cached_property
    def tuned(self) -> np.ndarray:
        """The groups that are not held, (G,) of bool."""
        return ~np.isin(np.asarray(self.names), list(self.held))

    @cached_property
    def noise(self) -> GaussianNoise:
        """The terms of the likelihood. A known likelihood has no targets, so that s has no effect on it."""
        known = self.likelihood
        return known if isinstance(known, GaussianNoise) else GaussianNoise(0, 0.0, 2.0 * float(known))

    @cached_property
    def chosen(self) -> np.ndarray:
        """Which of the factors and s are tuned, (G + 1,) of bool."""
        return np.append(self.tuned, self.noise.targets > 0)

    @cached_property
    def sizes(self) -> np.ndarray:
        """P_g, (G,)."""
        return np.bincount(self.groups, minlength=len(self.names))

    @cached_property
    def quadratics(self) -> np.ndarray:
        """q_g, (G,), zero for held groups."""
        each = np.where(self.tuned[self.groups], self.prior * (self.mode - self.location) ** 2, 0.0)
        return np.bincount(self.groups, weights=each, minlength=len(self.names))

    @cached_property
    def log_prior_precision(self) -> float:
        """The sum of log prior_i over the tuned groups."""
        return float(np.sum(np.log(self.prior[self.tuned[self.groups]])))

    def check_definite(self) -> None:
        """Raise `CurvatureError` if H has negative eigenvalues, where they are known."""
        eigenvalues = getattr(self.determinant, "eigenvalues", None)
        if eigenvalues is not None:
            smallest, largest = np.min(eigenvalues, initial=0.0), np.max(np.abs(eigenvalues), initial=0.0)
            _check_definite(smallest, largest, f"an eigenvalue of {smallest:.3g} beside {largest:.3g}")

    def log_evidence(self, factors: np.ndarray, scale: float = 1.0) -> float:
        """The log evidence log p(D | tau, s), all constants included."""
        return self.at(factors, scale).value

    def at(self, factors: np.ndarray, scale: float = 1.0) -> EvidenceState:
        """The log evidence and what its gradient is made of."""
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
        return EvidenceState(value, gamma, gain[self.chosen], loss[self.chosen])


def _check_definite(value: float, scale: float, got: str) -> None:
    """Raise `CurvatureError` if a value of this scale is negative, as that of a curvature that is indefinite."""
    expected = "a data curvature without negative eigenvalues"
    advice = 'curvature="ggn", or a mode that is better converged'
    CurvatureError.check(value >= -INDEFINITE * scale, "evidence", expected, got, advice)


def listed(names: Sequence[str]) -> str:
    """At most three names, and the number of the others."""
    shown = ", ".join(repr(str(name)) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
