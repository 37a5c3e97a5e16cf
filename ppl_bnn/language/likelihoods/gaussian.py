"""Gaussian noise with one standard deviation for all rows, or with one that the network predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution
from ppl_bnn.language.likelihoods.base import Likelihood, Shape, location_scale, of_one_output, parts


class _NormalNoise(Likelihood):
    """eta = (mean, log noise), for known, sampled and predicted noise."""

    def fisher(self, eta: Any) -> Any:
        precision = ops.exp(-2.0 * parts(eta, 2)[1])
        return ops.diagonal_matrix(ops.concatenate([precision, 2.0 * ops.ones_like(precision)]))

    def fisher_root(self, eta: Any) -> Any:
        precision = ops.exp(-parts(eta, 2)[1])
        return ops.diagonal_matrix(ops.concatenate([precision, math.sqrt(2.0) * ops.ones_like(precision)]))

    def score(self, eta: Any, y: Any) -> Any:
        loc, log_noise = parts(eta, 2)
        precision = ops.exp(-log_noise)
        residual = (y.reshape(tuple(precision.shape)) - loc) * precision
        return ops.concatenate([residual * precision, residual**2 - 1.0])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        loc, log_noise = parts(eta, 2)
        return "Normal", of_one_output(loc=loc, scale=ops.exp(log_noise))


@dataclass(frozen=True)
class Gaussian(_NormalNoise):
    """Gaussian noise, y = f + noise * N(0, 1), independently over rows and outputs.

    y is (N,) for K = 1 output, else (N, K). eta = (f, log noise), D = 2K, with Fisher information diag(1 / noise^2, 2).

    Parameters
    ----------
    noise : float or array
        Standard deviation: a positive number (known), or a sampled value, a scalar or one per output (K,).

    Raises
    ------
    InputError
        A number that is not positive.
    """

    noise: Any = 1.0
    positive = always_in_eta = ("noise",)
    per_output = True
    advice_for_rows = "HeteroscedasticGaussian() for noise that differs between rows"

    def distribution(self, f: Any) -> Distribution:
        return location_scale("Normal", f, scale=self.noise)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        loc, log_noise = parts(eta, 2)
        # All rows of a draw share the noise, so its exponential is computed once and not once per row.
        noise = ops.broadcast_to(ops.exp(log_noise[..., :1, :]), log_noise.shape)
        return "Normal", of_one_output(loc=loc, scale=noise)


@dataclass(frozen=True)
class HeteroscedasticGaussian(_NormalNoise):
    """Gaussian noise predicted by the network, y ~ N(f_1, s^2) with s = softplus(f_2).

    f is (N, 2K): first the K means, then the K noise outputs. eta = (mean, log s), with Fisher information diag(1 /
    s^2, 2); the Gauss-Newton matrix does not depend on the coordinates of eta.
    """

    outputs = (
        lambda k: k % 2 == 0,
        "an even number of network outputs (means, then noise)",
        "2 outputs for one target",
    )

    def target_shape(self, f: Shape) -> Shape:
        return f[:1] if f[1] == 2 else (f[0], f[1] // 2)

    def distribution(self, f: Any) -> Distribution:
        loc, scale = parts(f, 2)
        return location_scale("Normal", loc, scale=ops.softplus(scale))

    def predictor(self, f: Any) -> Any:
        loc, scale = parts(f, 2)
        return ops.concatenate([loc, ops.log(ops.softplus(scale))])
