"""Gaussian noise with one standard deviation for all rows, or with one that the network predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ppl_bnn.core.errors import InputError, ModelError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution
from ppl_bnn.language.likelihoods.arguments import check_targets
from ppl_bnn.language.likelihoods.formulas import normal_parameters


@dataclass(frozen=True)
class Gaussian:
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
    task = "regression"

    def __post_init__(self) -> None:
        if isinstance(self.noise, int | float) and not 0 < self.noise < math.inf:
            raise InputError.of("likelihoods.Gaussian", "a positive noise", repr(self.noise), "noise=1.0")

    @property
    def form(self) -> Gaussian:
        return Gaussian(None)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        shape = tuple(getattr(self.noise, "shape", ()))
        if shape not in ((), f[1:]):
            raise ModelError.of(
                "Gaussian",
                f"one noise, or one per output, {f[1:]}",
                f"noise of shape {shape}",
                "HeteroscedasticGaussian() for noise that differs between rows",
            )
        check_targets("Gaussian", f, y, f[:1] if f[1] == 1 else f)

    def distribution(self, f: Any) -> Distribution:
        if f.shape[-1] == 1:
            noise = self.noise
            if not isinstance(noise, int | float) and len(noise.shape) == 1:
                noise = noise[0]
            return dist.distribution("Normal", f[:, 0], noise)
        return dist.distribution("Normal", f, self.noise).to_event(1)

    def predictor(self, f: Any) -> Any:
        log_noise = ops.broadcast_to(ops.asarray(ops.log(self.noise), like=f), tuple(f.shape))
        return ops.concatenate([f, log_noise])

    def fisher(self, eta: Any) -> Any:
        outputs = eta.shape[-1] // 2
        precision = ops.exp(-2.0 * eta[:, outputs:])
        return ops.diagonal_matrix(ops.concatenate([precision, 2.0 * ops.ones_like(precision)]))

    def fisher_root(self, eta: Any) -> Any:
        outputs = eta.shape[-1] // 2
        precision = ops.exp(-eta[:, outputs:])
        return ops.diagonal_matrix(ops.concatenate([precision, math.sqrt(2.0) * ops.ones_like(precision)]))

    def score(self, eta: Any, y: Any) -> Any:
        outputs = eta.shape[-1] // 2
        precision = ops.exp(-eta[:, outputs:])
        residual = (y.reshape(tuple(precision.shape)) - eta[:, :outputs]) * precision
        return ops.concatenate([residual * precision, residual**2 - 1.0])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        outputs = eta.shape[-1] // 2
        # All rows of a draw share the noise, so its exponential is computed once and not once per row.
        noise = ops.exp(eta[..., :1, outputs:])
        return normal_parameters(eta, ops.broadcast_to(noise, eta[..., outputs:].shape))


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """Gaussian noise predicted by the network, y ~ N(f_1, s^2) with s = softplus(f_2).

    f is (N, 2K): first the K means, then the K noise outputs. eta = (mean, log s), with Fisher information diag(1 /
    s^2, 2); the Gauss-Newton matrix does not depend on the coordinates of eta.
    """

    task = "regression"

    @property
    def form(self) -> HeteroscedasticGaussian:
        return self

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        if f[1] % 2:
            raise ModelError.of(
                "HeteroscedasticGaussian",
                "an even number of network outputs (means, then noise)",
                f"f of shape {f}",
                "2 outputs for one target",
            )
        check_targets("HeteroscedasticGaussian", f, y, f[:1] if f[1] == 2 else (f[0], f[1] // 2))

    def distribution(self, f: Any) -> Distribution:
        outputs = f.shape[-1] // 2
        loc, scale = f[:, :outputs], ops.softplus(f[:, outputs:])
        if outputs == 1:
            return dist.distribution("Normal", loc[:, 0], scale[:, 0])
        return dist.distribution("Normal", loc, scale).to_event(1)

    def predictor(self, f: Any) -> Any:
        outputs = f.shape[-1] // 2
        return ops.concatenate([f[:, :outputs], ops.log(ops.softplus(f[:, outputs:]))])

    def fisher(self, eta: Any) -> Any:
        return Gaussian(None).fisher(eta)

    def fisher_root(self, eta: Any) -> Any:
        return Gaussian(None).fisher_root(eta)

    def score(self, eta: Any, y: Any) -> Any:
        return Gaussian(None).score(eta, y)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return normal_parameters(eta, ops.exp(eta[..., eta.shape[-1] // 2 :]))
