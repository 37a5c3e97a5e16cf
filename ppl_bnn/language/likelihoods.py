"""Likelihoods: from the network's output f to the distribution of y.

Keeping f and the likelihood apart is what makes Gauss-Newton curvature, linearised prediction and the split into
aleatoric and epistemic uncertainty possible. Each likelihood gives

- `distribution(f)`: the distribution of y, for the systems;
- `predictor(f)`: eta (N, D), all that it needs to know about a row;
- `fisher(eta)`: (N, D, D), the Fisher information of p(y | eta) in eta, never indefinite;
- `fisher_root(eta)`: (N, D, C), R with R R' the Fisher information;
- `score(eta, y)`: (N, D), the gradient of log p(y | eta) in eta, with mean 0 and covariance the Fisher information;
- `mixture_parameters(eta)`: family and parameters for `Prediction`, in NumPy, for eta of shape (..., N, D);
- `form`: the same likelihood without the values of one run, which is all that the last two need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ppl_bnn.errors import InputError, ModelError, message
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution


def _check_targets(
    likelihood: str, f: tuple[int, ...], y: tuple[int, ...] | None, wanted: tuple[int, ...]
) -> None:
    if y is None or y == wanted:
        return
    advice = "y[:, 0]" if len(y) == 2 and y[1] == 1 and len(wanted) == 1 else f"targets of shape {wanted}"
    raise ModelError(
        f"{likelihood}: " + message(f"y of shape {wanted} for f of shape {f}", f"y of shape {y}", advice)
    )


@dataclass(frozen=True)
class Gaussian:
    """y = f + noise * N(0, 1), independently over rows and outputs.

    noise: a positive number (known), or a sampled value: a scalar, or one per output (K,).
    eta = (f, log noise), D = 2K, with Fisher information diag(1 / noise^2, 2). y is (N,) for K = 1, else (N, K).
    """

    noise: Any = 1.0
    task = "regression"

    def __post_init__(self) -> None:
        if isinstance(self.noise, int | float) and not 0 < self.noise < math.inf:
            raise InputError(
                "likelihoods.Gaussian: " + message("a positive noise", repr(self.noise), "noise=1.0")
            )

    @property
    def form(self) -> Gaussian:
        return Gaussian(None)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        shape = tuple(getattr(self.noise, "shape", ()))
        if shape not in ((), f[1:]):
            raise ModelError(
                "Gaussian: "
                + message(
                    f"one noise, or one per output, {f[1:]}",
                    f"noise of shape {shape}",
                    "HeteroscedasticGaussian() for noise that differs between rows",
                )
            )
        _check_targets("Gaussian", f, y, f[:1] if f[1] == 1 else f)

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
        # One noise for all rows of a draw: its exponential is taken once and not once per row.
        noise = ops.exp(eta[..., :1, outputs:])
        return _normal_parameters(eta, ops.broadcast_to(noise, eta[..., outputs:].shape))


def _normal_parameters(eta: Any, scale: Any) -> tuple[str, dict[str, Any]]:
    outputs = eta.shape[-1] // 2
    loc = eta[..., :outputs]
    if outputs == 1:
        loc, scale = loc[..., 0], scale[..., 0]
    return "Normal", {"loc": loc, "scale": scale}


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """y ~ N(f_1, s^2) with the noise itself an output of the network: s = softplus(f_2).

    f is (N, 2K): first the K means, then the K noise outputs. eta = (mean, log s), with Fisher information
    diag(1 / s^2, 2); the Gauss-Newton matrix does not depend on which coordinates eta is in.
    """

    task = "regression"

    @property
    def form(self) -> HeteroscedasticGaussian:
        return self

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        if f[1] % 2:
            raise ModelError(
                "HeteroscedasticGaussian: "
                + message(
                    "an even number of network outputs (means, then noise)",
                    f"f of shape {f}",
                    "2 outputs for one target",
                )
            )
        _check_targets("HeteroscedasticGaussian", f, y, f[:1] if f[1] == 2 else (f[0], f[1] // 2))

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
        return _normal_parameters(eta, ops.exp(eta[..., eta.shape[-1] // 2 :]))


@dataclass(frozen=True)
class Bernoulli:
    """P(y = 1) = sigmoid(f), f of shape (N, 1), y of shape (N,) with values 0 and 1. eta = f, Fisher p (1 - p)."""

    task = "classification"

    @property
    def form(self) -> Bernoulli:
        return self

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        if f[1] != 1:
            raise ModelError(
                "Bernoulli: "
                + message(
                    "one network output", f"f of shape {f}", "likelihoods.Categorical() for several classes"
                )
            )
        _check_targets("Bernoulli", f, y, f[:1])

    def distribution(self, f: Any) -> Distribution:
        return dist.distribution("Bernoulli", f[:, 0])

    def predictor(self, f: Any) -> Any:
        return f

    def fisher(self, eta: Any) -> Any:
        p = ops.sigmoid(eta)
        return ops.diagonal_matrix(p * (1.0 - p))

    def fisher_root(self, eta: Any) -> Any:
        # sigmoid(-eta) keeps its digits where 1 - p has none left.
        return ops.diagonal_matrix(ops.sqrt(ops.sigmoid(eta) * ops.sigmoid(-eta)))

    def score(self, eta: Any, y: Any) -> Any:
        return y[:, None] - ops.sigmoid(eta)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return "Bernoulli", {"probs": ops.sigmoid(eta[..., 0])}


@dataclass(frozen=True)
class Categorical:
    """P(y = k) = softmax(f)_k, f of shape (N, C), y (N,) with labels 0..C-1. eta = f, Fisher diag(p) - p p'."""

    task = "classification"

    @property
    def form(self) -> Categorical:
        return self

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        if f[1] < 2:
            raise ModelError(
                "Categorical: "
                + message("at least two network outputs", f"f of shape {f}", "likelihoods.Bernoulli()")
            )
        _check_targets("Categorical", f, y, f[:1])

    def distribution(self, f: Any) -> Distribution:
        return dist.distribution("Categorical", f)

    def predictor(self, f: Any) -> Any:
        return f

    def fisher(self, eta: Any) -> Any:
        p = ops.softmax(eta)
        return ops.diagonal_matrix(p) - p[..., :, None] * p[..., None, :]

    def fisher_root(self, eta: Any) -> Any:
        # Column c is sqrt(p_c) (e_c - p): the scores of all classes, each weighted with its probability.
        p = ops.softmax(eta)
        root = ops.sqrt(p)
        return ops.diagonal_matrix(root) - p[..., :, None] * root[..., None, :]

    def score(self, eta: Any, y: Any) -> Any:
        observed = y[:, None] == ops.asarray(list(range(eta.shape[-1])), like=y)
        return observed * ops.ones_like(eta) - ops.softmax(eta)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return "Categorical", {"probs": ops.softmax(eta)}
