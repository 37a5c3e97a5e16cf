"""Likelihoods of counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.likelihoods.base import Likelihood, for_one_output

# Nodes of the trapezium rule in log t for the information about a concentration: the integrand
# falls off as exp(x) to the left and as exp(-exp(x)) to the right, so that the rule converges exponentially.
_LOG_NODES = np.arange(-37.0, 4.0 + 1e-9, 0.25)


class _Counts(Likelihood):
    """Counts, one per row; f is the log rate. They have no units to standardise."""

    outputs = (lambda k: k == 1, "one network output, the log rate", "f[:, :1], one count per row")
    standardises = False

    def check_values(self, y: np.ndarray) -> None:
        wrong = y[(y < 0) | (np.floor(y) != y)]
        if len(wrong):
            expected = f"counts 0, 1, 2, ... for likelihoods.{self.family}"
            raise InputError.of("y", expected, f"{wrong[0]:g}", "whole numbers from 0")


@dataclass(frozen=True)
class Poisson(_Counts):
    """Poisson counts, y ~ Poisson(exp(f)), with variance equal to the mean.

    f has the shape (N, 1), y the shape (N,). An exposure multiplies the rate: add its logarithm to f. eta = f, the log
    rate, with Fisher information exp(f). Counts are not standardised.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Poisson())
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('Poisson()', 'regression')
    """

    def distribution(self, f: Any) -> dist.Distribution:
        return dist.distribution("Poisson", ops.exp(f[:, 0]))

    def jensen_gap(self, mean: Any, variance: Any) -> Any:
        return ops.sum(ops.exp(mean) - ops.exp(mean + 0.5 * variance))

    def fisher_root(self, eta: Any) -> Any:
        return ops.exp(0.5 * eta)[:, :, None]

    def score(self, eta: Any, y: Any) -> Any:
        return y[:, None] - ops.exp(eta)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return "Poisson", {"rate": ops.exp(eta[..., 0])}


@dataclass(frozen=True)
class NegativeBinomial(_Counts):
    """Overdispersed counts with mean m = exp(f) and variance m + m^2 / concentration.

    f has the shape (N, 1), y the shape (N,). An exposure multiplies the mean: add its logarithm to f. As the
    concentration grows y becomes Poisson(m). Counts are not standardised.

    eta = f, and (f, log r) where the concentration r is sampled. The Fisher information is diagonal,

        F(f, f) = m r / (m + r),
        F(log r, log r) = r^2 (E[psi'(r) - psi'(y + r)] - m / (r (r + m)))
            = r^2 integral e^(-r t) {t / u (1 - (1 + m u / r)^(-r)) - (1 - e^(-m t))} dt,   u = 1 - e^(-t),

    the integral over t > 0 by a trapezium rule in log t with error below 1e-10 of the information. It is less accurate
    for r^2 > 1e5 m, where the data have almost no information about r.

    Parameters
    ----------
    concentration : float or array
        The concentration r: a positive number (known) or a sampled scalar.

    Raises
    ------
    InputError
        A number that is not positive.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.NegativeBinomial(2.0))
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('NegativeBinomial(2)', 'regression')
    """

    concentration: Any = 1.0
    positive = ("concentration",)

    def distribution(self, f: Any) -> dist.Distribution:
        concentration = for_one_output(self.concentration)
        return dist.distribution("NegativeBinomial", concentration, f[:, 0] - ops.log(concentration))

    def _parts(self, eta: Any) -> tuple[Any, Any]:
        """(f, log r), each (..., 1)."""
        f = eta[..., :1]
        return f, eta[..., 1:] if self.in_eta else math.log(self.concentration) * ops.ones_like(f)

    def fisher_root(self, eta: Any) -> Any:
        f, log_r = self._parts(eta)
        # m r / (m + r), by its logarithm.
        of_f = ops.exp(0.5 * (f - ops.softplus(f - log_r)))
        if not self.in_eta:
            return of_f[:, :, None]
        r, m = ops.exp(log_r), ops.exp(f)
        x = ops.asarray(_LOG_NODES, like=eta)[None, :]
        rt = ops.exp(x)
        t = rt / r
        u = dist.one_minus_exp(t)
        several = dist.one_minus_exp(r * ops.log1p(m * u / r)) * t / u
        values = ops.exp(x - rt) * (several - dist.one_minus_exp(m * t))
        information = r * (_LOG_NODES[1] - _LOG_NODES[0]) * values.sum(-1)[:, None]
        return ops.diagonal_matrix(ops.concatenate([of_f, ops.sqrt(ops.relu(information))]))

    def score(self, eta: Any, y: Any) -> Any:
        f, log_r = self._parts(eta)
        count, r, m = y[:, None], ops.exp(log_r), ops.exp(f)
        # r / (m + r)
        share = ops.sigmoid(log_r - f)
        columns = [(count - m) * share]
        if self.in_eta:
            digamma = dist.special(r).digamma
            counts = digamma(count + r) - digamma(r) + ops.log(share)
            columns.append(r * counts + (m - count) * share)
        return ops.concatenate(columns)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        f, log_r = self._parts(eta)
        return "NegativeBinomial", {"concentration": ops.exp(log_r[..., 0]), "rate": ops.exp(f[..., 0])}
