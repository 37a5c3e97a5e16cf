"""Noise with heavier tails than a normal distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution
from ppl_bnn.language.likelihoods import base
from ppl_bnn.language.likelihoods.base import Likelihood, parts


class _HeavyTails(Likelihood):
    """Location-scale noise; its family has one name in the systems and in predictions, that of the likelihood."""

    always_in_eta = ("scale",)
    per_output = True

    def distribution(self, f: Any) -> Distribution:
        return base.location_scale(self.family, f, **{name: getattr(self, name) for name in self.positive})

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        names = ("loc", *self.positive)
        return self.family, base.of_one_output(**dict(zip(names, self.parameters(eta), strict=True)))


@dataclass(frozen=True)
class StudentT(_HeavyTails):
    """Student-t noise, y = f + scale * t_df, independently over rows and outputs.

    Outliers have little influence. y is (N,) for K = 1 output, else (N, K). The standard deviation is scale sqrt(df /
    (df - 2)), for df > 2.

    eta = (f, log scale), and (f, log scale, log df) where df is sampled. With n = df and s = scale, for each output,

        F(f, f) = (n + 1) / ((n + 3) s^2),     F(log s, log s) = 2 n / (n + 3),
        F(log s, log n) = -2 n / ((n + 1) (n + 3)),
        F(log n, log n) = n^2 / 4 [psi'(n / 2) - psi'((n + 1) / 2)] - n (n + 5) / (2 (n + 1) (n + 3)),

    and zero elsewhere (Lange, Little and Taylor 1989), psi' being the trigamma function. The Hessian of -log p is
    negative in f where |y - f| > s sqrt(n).

    Parameters
    ----------
    df : float or array
        Degrees of freedom: a positive number (known), or a sampled value, a scalar or one per output (K,).
    scale : float or array
        Scale, as the noise of `Gaussian`.

    Raises
    ------
    InputError
        A number that is not positive.

    References
    ----------
    Lange, Little and Taylor (1989), Robust statistical modeling using the t distribution.
    """

    df: Any = 4.0
    scale: Any = 1.0
    positive = ("scale", "df")

    def fisher_root(self, eta: Any) -> Any:
        _, scale, df = self.parameters(eta)
        of_f = ops.sqrt((df + 1.0) / (df + 3.0)) / scale
        of_scale = ops.sqrt(2.0 * df / (df + 3.0))
        if "df" not in self.in_eta:
            return ops.diagonal_matrix(ops.concatenate([of_f, of_scale]))
        none = ops.zeros_like(df)
        both = -2.0 * df / ((df + 1.0) * (df + 3.0))
        halves = ops.trigamma(0.5 * df) - ops.trigamma(0.5 * (df + 1.0))
        of_df = 0.25 * df**2 * halves - 0.5 * df * (df + 5.0) / ((df + 1.0) * (df + 3.0))
        # For large df the two terms cancel, and rounding may leave a negative difference.
        rest = ops.sqrt(ops.relu(of_df - (both / of_scale) ** 2))
        rows = [[of_f, none, none], [none, of_scale, none], [none, both / of_scale, rest]]
        return base.diagonal_blocks(rows)

    def score(self, eta: Any, y: Any) -> Any:
        f, scale, df = self.parameters(eta)
        z = (y.reshape(tuple(f.shape)) - f) / scale
        share = z**2 / (df + z**2)
        columns = [(df + 1.0) * z / ((df + z**2) * scale), (df + 1.0) * share - 1.0]
        if "df" in self.in_eta:
            halves = ops.digamma(0.5 * (df + 1.0)) - ops.digamma(0.5 * df)
            columns.append(0.5 * (df * halves - 1.0 - df * ops.log1p(z**2 / df) + (df + 1.0) * share))
        return ops.concatenate(columns)


@dataclass(frozen=True)
class Laplace(_HeavyTails):
    """Laplace noise, y = f + Laplace(scale), independently over rows and outputs.

    The density is exp(-|y - f| / scale) / (2 scale) and the standard deviation sqrt(2) scale. Maximum likelihood fits
    the median, not the mean. eta = (f, log scale), with Fisher information diag(1 / scale^2, 1).

    Parameters
    ----------
    scale : float or array
        Scale, as the noise of `Gaussian`.

    Raises
    ------
    InputError
        A number that is not positive.

    Notes
    -----
    log p has a kink where y = f and is linear elsewhere. Its Hessian in f is therefore zero, and with
    curvature="hessian" only the prior contributes.
    """

    scale: Any = 1.0
    positive = ("scale",)

    @property
    def has_kink(self) -> bool:
        return True

    def fisher_root(self, eta: Any) -> Any:
        precision = ops.exp(-parts(eta, 2)[1])
        return ops.diagonal_matrix(ops.concatenate([precision, ops.ones_like(precision)]))

    def score(self, eta: Any, y: Any) -> Any:
        loc, log_scale = parts(eta, 2)
        precision = ops.exp(-log_scale)
        residual = (y.reshape(tuple(precision.shape)) - loc) * precision
        sign = ops.where(residual < 0.0, -ops.ones_like(precision), ops.ones_like(precision))
        return ops.concatenate([sign * precision, ops.abs(residual) - 1.0])
