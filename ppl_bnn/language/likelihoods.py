"""Likelihoods: from the network's output f to the distribution of y.

Keeping f and the likelihood apart is what makes Gauss-Newton curvature, linearised prediction and the split into
aleatoric and epistemic uncertainty possible. Each likelihood gives

- `distribution(f)`: the distribution of y, for the systems;
- `predictor(f)`: eta (N, D), all that it needs to know about a row;
- `fisher(eta)`: (N, D, D), the Fisher information of p(y | eta) in eta, never indefinite;
- `fisher_root(eta)`: (N, D, C), R with R R' the Fisher information;
- `score(eta, y)`: (N, D), the gradient of log p(y | eta) in eta, with mean 0 and covariance the Fisher information;
- `mixture_parameters(eta)`: family and parameters for `Prediction`, in NumPy, for eta of shape (..., N, D);
- `form`: the same likelihood without the values of one run, which is all that all but the first two need.

Some have more: `check_values(y)` refuses targets (NumPy) that have no probability; `standardises = False` says that
targets have no units to change, as counts; `columns_with_units`, how many of the first columns of y have, where the
others are marks; `has_fisher = False`, that the Fisher information has no closed form; `information_root(eta, y)` takes
the place of `fisher_root` where what a row tells depends on what was seen of it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn import checks
from ppl_bnn.errors import InputError, ModelError, UnsupportedError, message
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


# --- heavy tails ------------------------------------------------------------------------------------------


def _check_positive(likelihood: str, name: str, value: Any) -> None:
    """Refuse plain numbers that are not positive; a sampled value is an array, and a form has none."""
    if isinstance(value, int | float) and not 0 < value < math.inf:
        raise InputError(
            f"likelihoods.{likelihood}: " + message(f"a positive {name}", repr(value), f"{name}=1.0")
        )


def _is_known(value: Any) -> bool:
    """A plain number. A draw of a sampled one may come as a number of NumPy, and is not known."""
    return isinstance(value, int | float) and not isinstance(value, np.generic)


def _check_one_or_each(likelihood: str, name: str, value: Any, f: tuple[int, ...]) -> None:
    shape = tuple(getattr(value, "shape", ()))
    if shape not in ((), f[1:]):
        raise ModelError(
            f"{likelihood}: "
            + message(
                f"one {name}, or one per output, {f[1:]}", f"{name} of shape {shape}", f"a number as {name}"
            )
        )


def _log_columns(value: Any, f: Any) -> Any:
    """log of one number, or of one per output, as columns (N, K)."""
    return ops.broadcast_to(ops.asarray(ops.log(value), like=f), tuple(f.shape))


def _for_one_output(value: Any) -> Any:
    """What belongs to the only output, without its axis."""
    return value if isinstance(value, int | float) or len(value.shape) == 0 else value[0]


def _location_scale(family: str, f: Any, shapes: tuple[Any, ...], scale: Any) -> Distribution:
    if f.shape[-1] == 1:
        shapes = tuple(map(_for_one_output, shapes))
        return dist.distribution(family, *shapes, f[:, 0], _for_one_output(scale))
    return dist.distribution(family, *shapes, f, scale).to_event(1)


def _special(name: str, x: Any) -> Any:
    """digamma, or trigamma, in the system of x."""
    xp = ops.namespace(x)
    if xp.__name__ == "torch":
        return xp.digamma(x) if name == "digamma" else xp.polygamma(1, x)
    if xp.__name__ == "jax.numpy":
        special = sys.modules["jax"].scipy.special
    else:
        import scipy.special as special
    return special.digamma(x) if name == "digamma" else special.polygamma(1, x)


def _one_minus_exp(x: Any) -> Any:
    """1 - exp(-x) for x >= 0, exact for small x."""
    t = ops.tanh(0.5 * x)
    return 2.0 * t / (1.0 + t)


def _not_negative(x: Any) -> Any:
    """What is not negative but for rounding."""
    return ops.relu(x)


def _diagonal_blocks(blocks: list[list[Any]]) -> Any:
    """The matrices (N, B K, B K) made of B x B diagonal blocks, each given as (N, K)."""
    rows = [ops.concatenate([ops.diagonal_matrix(block) for block in row]) for row in blocks]
    return ops.concatenate(rows, -2)


@dataclass(frozen=True)
class StudentT:
    """y = f + scale * t_df, independently over rows and outputs: rows far from all others count for little.

    df: degrees of freedom, a positive number (known), or a sampled value: a scalar, or one per output (K,). scale: as
    the noise of `Gaussian`; the standard deviation is scale sqrt(df / (df - 2)), for df > 2. y is (N,) for K = 1, else
    (N, K).

    eta = (f, log scale), and (f, log scale, log df) where df is sampled. With n = df and s = scale, for each output,

        F(f, f) = (n + 1) / ((n + 3) s^2),     F(log s, log s) = 2 n / (n + 3),
        F(log s, log n) = -2 n / ((n + 1) (n + 3)),
        F(log n, log n) = n^2 / 4 [psi'(n / 2) - psi'((n + 1) / 2)] - n (n + 5) / (2 (n + 1) (n + 3)),

    and zero elsewhere (Lange, Little and Taylor 1989), psi' being the trigamma function. The Hessian of -log p is
    negative in f where |y - f| > s sqrt(n).
    """

    df: Any = 4.0
    scale: Any = 1.0
    task = "regression"

    def __post_init__(self) -> None:
        _check_positive("StudentT", "df", self.df)
        _check_positive("StudentT", "scale", self.scale)

    @property
    def form(self) -> StudentT:
        return StudentT(self.df if _is_known(self.df) else None, None)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        _check_one_or_each("StudentT", "df", self.df, f)
        _check_one_or_each("StudentT", "scale", self.scale, f)
        _check_targets("StudentT", f, y, f[:1] if f[1] == 1 else f)

    def distribution(self, f: Any) -> Distribution:
        return _location_scale("StudentT", f, (self.df,), self.scale)

    def predictor(self, f: Any) -> Any:
        columns = [f, _log_columns(self.scale, f)]
        if not _is_known(self.df):
            columns.append(_log_columns(self.df, f))
        return ops.concatenate(columns)

    def _parts(self, eta: Any) -> tuple[Any, Any, Any]:
        """(f, scale, df), each (..., K)."""
        if _is_known(self.df):
            outputs = eta.shape[-1] // 2
            f, log_scale = eta[..., :outputs], eta[..., outputs:]
            return f, ops.exp(log_scale), self.df * ops.ones_like(f)
        outputs = eta.shape[-1] // 3
        f, log_scale, log_df = (eta[..., k * outputs : (k + 1) * outputs] for k in range(3))
        return f, ops.exp(log_scale), ops.exp(log_df)

    def fisher(self, eta: Any) -> Any:
        root = self.fisher_root(eta)
        return ops.einsum("nic,njc->nij", root, root)

    def fisher_root(self, eta: Any) -> Any:
        _, scale, df = self._parts(eta)
        of_f = ops.sqrt((df + 1.0) / (df + 3.0)) / scale
        of_scale = ops.sqrt(2.0 * df / (df + 3.0))
        if _is_known(self.df):
            return ops.diagonal_matrix(ops.concatenate([of_f, of_scale]))
        none = ops.zeros_like(df)
        both = -2.0 * df / ((df + 1.0) * (df + 3.0))
        halves = _special("trigamma", 0.5 * df) - _special("trigamma", 0.5 * (df + 1.0))
        of_df = 0.25 * df**2 * halves - 0.5 * df * (df + 5.0) / ((df + 1.0) * (df + 3.0))
        # Where df is large the two terms agree in all their digits.
        rest = ops.sqrt(_not_negative(of_df - (both / of_scale) ** 2))
        return _diagonal_blocks([[of_f, none, none], [none, of_scale, none], [none, both / of_scale, rest]])

    def score(self, eta: Any, y: Any) -> Any:
        f, scale, df = self._parts(eta)
        z = (y.reshape(tuple(f.shape)) - f) / scale
        share = z**2 / (df + z**2)
        columns = [(df + 1.0) * z / ((df + z**2) * scale), (df + 1.0) * share - 1.0]
        if not _is_known(self.df):
            halves = _special("digamma", 0.5 * (df + 1.0)) - _special("digamma", 0.5 * df)
            columns.append(0.5 * (df * halves - 1.0 - df * ops.log1p(z**2 / df) + (df + 1.0) * share))
        return ops.concatenate(columns)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        parts = self._parts(eta)
        if parts[0].shape[-1] == 1:
            parts = tuple(part[..., 0] for part in parts)
        return "StudentT", dict(zip(("loc", "scale", "df"), parts, strict=True))


@dataclass(frozen=True)
class Laplace:
    """y = f + Laplace(scale), density exp(-|y - f| / scale) / (2 scale), independently over rows and outputs.

    A mode fits the median where a Gaussian fits the mean. scale: as the noise of `Gaussian`; the standard deviation is
    sqrt(2) scale. eta = (f, log scale), with Fisher information diag(1 / scale^2, 1). log p has a kink where y = f
    and is straight elsewhere, so that its Hessian says nothing about f, and curvature="hessian" sees the prior alone.
    """

    scale: Any = 1.0
    task = "regression"

    def __post_init__(self) -> None:
        _check_positive("Laplace", "scale", self.scale)

    @property
    def form(self) -> Laplace:
        return Laplace(None)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        _check_one_or_each("Laplace", "scale", self.scale, f)
        _check_targets("Laplace", f, y, f[:1] if f[1] == 1 else f)

    def distribution(self, f: Any) -> Distribution:
        return _location_scale("Laplace", f, (), self.scale)

    def predictor(self, f: Any) -> Any:
        return ops.concatenate([f, _log_columns(self.scale, f)])

    def fisher(self, eta: Any) -> Any:
        root = self.fisher_root(eta)
        return root**2

    def fisher_root(self, eta: Any) -> Any:
        precision = ops.exp(-eta[:, eta.shape[-1] // 2 :])
        return ops.diagonal_matrix(ops.concatenate([precision, ops.ones_like(precision)]))

    def score(self, eta: Any, y: Any) -> Any:
        outputs = eta.shape[-1] // 2
        precision = ops.exp(-eta[:, outputs:])
        residual = (y.reshape(tuple(precision.shape)) - eta[:, :outputs]) * precision
        sign = ops.where(residual < 0.0, -ops.ones_like(precision), ops.ones_like(precision))
        return ops.concatenate([sign * precision, ops.abs(residual) - 1.0])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        _, parameters = _normal_parameters(eta, ops.exp(eta[..., eta.shape[-1] // 2 :]))
        return "Laplace", parameters


# --- counts -----------------------------------------------------------------------------------------------


def _check_counts(likelihood: str, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
    if f[1] != 1:
        raise ModelError(
            f"{likelihood}: "
            + message("one network output, the log rate", f"f of shape {f}", "f[:, :1], one count per row")
        )
    _check_targets(likelihood, f, y, f[:1])


def _check_count_values(likelihood: str, y: np.ndarray) -> None:
    wrong = y[(y < 0) | (np.floor(y) != y)]
    if len(wrong):
        raise InputError(
            "y: "
            + message(
                f"counts 0, 1, 2, ... for likelihoods.{likelihood}", f"{wrong[0]:g}", "whole numbers from 0"
            )
        )


@dataclass(frozen=True)
class Poisson:
    """y ~ Poisson(exp(f)): counts, with variance equal to the mean. f of shape (N, 1), y of shape (N,).

    An exposure multiplies the rate: add its logarithm to f. eta = f, the log rate, with Fisher information exp(f).
    Counts have no other units: they stay as they are where a fit standardises.
    """

    task = "regression"
    standardises = False

    @property
    def form(self) -> Poisson:
        return self

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        _check_counts("Poisson", f, y)

    def check_values(self, y: np.ndarray) -> None:
        _check_count_values("Poisson", y)

    def distribution(self, f: Any) -> Distribution:
        return dist.distribution("Poisson", ops.exp(f[:, 0]))

    def predictor(self, f: Any) -> Any:
        return f

    def fisher(self, eta: Any) -> Any:
        return ops.exp(eta)[:, :, None]

    def fisher_root(self, eta: Any) -> Any:
        return ops.exp(0.5 * eta)[:, :, None]

    def score(self, eta: Any, y: Any) -> Any:
        return y[:, None] - ops.exp(eta)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return "Poisson", {"rate": ops.exp(eta[..., 0])}


# Nodes of the trapezium rule in log t, at which the information about a concentration is integrated: the integrand
# falls off as exp(x) to the left and as exp(-exp(x)) to the right, so that the rule converges exponentially.
_LOG_NODES = np.arange(-37.0, 4.0 + 1e-9, 0.25)


@dataclass(frozen=True)
class NegativeBinomial:
    """Counts with mean m = exp(f) and variance m + m^2 / concentration, more than a Poisson distribution has.

    concentration: a positive number (known) or a sampled scalar, r below; as it grows y becomes Poisson(m). f of shape
    (N, 1), y of shape (N,). An exposure multiplies the mean: add its logarithm to f.

    eta = f, and (f, log r) where the concentration is sampled. The Fisher information is diagonal,

        F(f, f) = m r / (m + r),
        F(log r, log r) = r^2 (E[psi'(r) - psi'(y + r)] - m / (r (r + m)))
            = r^2 integral e^(-r t) {t / u (1 - (1 + m u / r)^(-r)) - (1 - e^(-m t))} dt,   u = 1 - e^(-t),

    the integral (t from 0 on) by a trapezium rule in log t with error below 1e-10 of the information; where r^2 is more
    than 1e5 times m it loses digits, and there next to nothing is known about r. Counts stay as they are where a fit
    standardises.
    """

    concentration: Any = 1.0
    task = "regression"
    standardises = False

    def __post_init__(self) -> None:
        _check_positive("NegativeBinomial", "concentration", self.concentration)

    @property
    def _known(self) -> bool:
        return _is_known(self.concentration)

    @property
    def form(self) -> NegativeBinomial:
        return self if self._known else NegativeBinomial(None)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        _check_counts("NegativeBinomial", f, y)
        _check_one_or_each("NegativeBinomial", "concentration", self.concentration, f)

    def check_values(self, y: np.ndarray) -> None:
        _check_count_values("NegativeBinomial", y)

    def distribution(self, f: Any) -> Distribution:
        concentration = _for_one_output(self.concentration)
        return dist.distribution("NegativeBinomial", concentration, f[:, 0] - ops.log(concentration))

    def predictor(self, f: Any) -> Any:
        return f if self._known else ops.concatenate([f, _log_columns(self.concentration, f)])

    def _parts(self, eta: Any) -> tuple[Any, Any]:
        """(f, log r), each (..., 1)."""
        f = eta[..., :1]
        return f, math.log(self.concentration) * ops.ones_like(f) if self._known else eta[..., 1:]

    def fisher(self, eta: Any) -> Any:
        root = self.fisher_root(eta)
        return root**2

    def fisher_root(self, eta: Any) -> Any:
        f, log_r = self._parts(eta)
        # m r / (m + r), by its logarithm.
        of_f = ops.exp(0.5 * (f - ops.softplus(f - log_r)))
        if self._known:
            return of_f[:, :, None]
        r, m = ops.exp(log_r), ops.exp(f)
        x = ops.asarray(_LOG_NODES, like=eta)[None, :]
        rt = ops.exp(x)
        t = rt / r
        u = _one_minus_exp(t)
        several = _one_minus_exp(r * ops.log1p(m * u / r)) * t / u
        values = ops.exp(x - rt) * (several - _one_minus_exp(m * t))
        information = r * (_LOG_NODES[1] - _LOG_NODES[0]) * values.sum(-1)[:, None]
        return ops.diagonal_matrix(ops.concatenate([of_f, ops.sqrt(_not_negative(information))]))

    def score(self, eta: Any, y: Any) -> Any:
        f, log_r = self._parts(eta)
        count, r, m = y[:, None], ops.exp(log_r), ops.exp(f)
        # r / (m + r)
        share = ops.sigmoid(log_r - f)
        columns = [(count - m) * share]
        if not self._known:
            counts = _special("digamma", count + r) - _special("digamma", r) + ops.log(share)
            columns.append(r * counts + (m - count) * share)
        return ops.concatenate(columns)

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        f, log_r = self._parts(eta)
        return "NegativeBinomial", {"concentration": ops.exp(log_r[..., 0]), "rate": ops.exp(f[..., 0])}


# --- ordered classes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ordinal:
    """Ordered classes by cumulative logits: P(y <= k) = sigmoid(c_k - f), k = 0..C-2 (McCullagh 1980).

    cut_points: c, C - 1 increasing numbers (known), or sampled ones, as `priors.CutPoints` gives them. f of shape
    (N, 1), y (N,) with labels 0..C-1 in their order. Nothing else should
    shift f by a constant: cut points do.

    eta = (f, c_0, log(c_1 - c_0), ..., log(c_(C-2) - c_(C-3))), D = C, in which every point is in order. With p_k the
    probabilities, the Fisher information is sum_k p_k (grad log p_k) (grad log p_k)', that of a multinomial
    distribution, through the thresholds. A prediction is of classes, `Categorical`.
    """

    cut_points: Any
    classes: int | None = None
    task = "classification"

    def __post_init__(self) -> None:
        given = self.cut_points
        if given is None:
            return
        if isinstance(given, list | tuple):
            given = np.asarray(given, dtype=float)
            object.__setattr__(self, "cut_points", given)
        shape = tuple(getattr(given, "shape", ()))
        if len(shape) != 1 or shape[0] < 1:
            raise InputError(
                "likelihoods.Ordinal: "
                + message("cut points of shape (C - 1,)", f"shape {shape}", "priors.CutPoints()('cuts', C)")
            )
        if isinstance(given, np.ndarray) and not (np.isfinite(given).all() and (np.diff(given) > 0).all()):
            raise InputError(
                "likelihoods.Ordinal: "
                + message("finite cut points that increase", str(given.tolist()), "sorting them")
            )
        if self.classes not in (None, shape[0] + 1):
            raise InputError(
                "likelihoods.Ordinal: "
                + message(
                    f"{shape[0] + 1} classes for {shape[0]} cut points", repr(self.classes), "leaving it out"
                )
            )
        object.__setattr__(self, "classes", shape[0] + 1)

    @property
    def form(self) -> Ordinal:
        return Ordinal(None, self.classes)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        if f[1] != 1:
            raise ModelError(
                "Ordinal: "
                + message(
                    "one network output",
                    f"f of shape {f}",
                    "likelihoods.Categorical() for classes without order",
                )
            )
        _check_targets("Ordinal", f, y, f[:1])

    def distribution(self, f: Any) -> Distribution:
        return dist.distribution("Categorical", self._log_probabilities(self.predictor(f)))

    def predictor(self, f: Any) -> Any:
        cuts = ops.asarray(self.cut_points, like=f)
        ordered = ops.concatenate([cuts[:1], ops.log(cuts[1:] - cuts[:-1])])
        return ops.concatenate([f, ops.broadcast_to(ordered, (int(f.shape[0]), int(cuts.shape[0])))])

    @staticmethod
    def _parts(eta: Any) -> tuple[Any, Any]:
        """(c - f, the gaps between cut points), (..., C - 1) and (..., C - 2)."""
        gaps = ops.exp(eta[..., 2:])
        return ops.cumsum(ops.concatenate([eta[..., 1:2] - eta[..., :1], gaps])), gaps

    def _log_probabilities(self, eta: Any) -> Any:
        """(..., C). sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)), which does not cancel."""
        above, gaps = self._parts(eta)
        lower, upper = above[..., :-1], above[..., 1:]
        middle = ops.log(_one_minus_exp(gaps)) - ops.softplus(-upper) - ops.softplus(lower)
        return ops.concatenate([-ops.softplus(-above[..., :1]), middle, -ops.softplus(above[..., -1:])])

    def _scores(self, eta: Any) -> Any:
        """(N, D, C): the gradients of log p_k in eta, for each class."""
        above, gaps = self._parts(eta)
        gap = _one_minus_exp(gaps)
        at, beyond = ops.softplus(-above), ops.softplus(above)
        # d log p_k / d c_k for k = 0..C-2, and d log p_(k+1) / d c_k.
        up = ops.concatenate([ops.exp(-beyond[:, :1]), ops.exp(beyond[:, :-1] - beyond[:, 1:]) / gap])
        down = ops.concatenate([ops.exp(at[:, 1:] - at[:, :-1]) / gap, ops.exp(-at[:, -1:])])
        none = ops.zeros_like(above)[:, :, None]
        cuts = ops.concatenate([ops.diagonal_matrix(up), none]) - ops.concatenate(
            [none, ops.diagonal_matrix(down)]
        )
        # A gap moves all cut points above it.
        later = ops.asarray(np.triu(np.ones((above.shape[-1],) * 2)), like=eta)
        unit = ops.concatenate([ops.ones_like(above[:, :1]), gaps])
        cuts = unit[:, :, None] * ops.einsum("jk,nkc->njc", later, cuts)
        p, end = ops.sigmoid(above), ops.ones_like(above)[:, :1]
        f = ops.concatenate([p, end]) + ops.concatenate([0.0 * end, p]) - 1.0
        return ops.concatenate([f[:, None, :], cuts], -2)

    def fisher(self, eta: Any) -> Any:
        root = self.fisher_root(eta)
        return ops.einsum("nic,njc->nij", root, root)

    def fisher_root(self, eta: Any) -> Any:
        return self._scores(eta) * ops.exp(0.5 * self._log_probabilities(eta))[:, None, :]

    def score(self, eta: Any, y: Any) -> Any:
        seen = y[:, None] == ops.asarray(list(range(eta.shape[-1])), like=y)
        return ops.einsum("ndc,nc->nd", self._scores(eta), seen * ops.ones_like(eta))

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        return "Categorical", {"probs": ops.exp(self._log_probabilities(eta))}


# --- times, and values of which only a bound is known -----------------------------------------------------


def _ratio(u: Any) -> Any:
    """u / (1 - exp(-u)) for u >= 0, which is 1 at 0."""
    tiny = u < 1e-9
    safe = ops.where(tiny, ops.ones_like(u), u)
    return ops.where(tiny, 1.0 + 0.5 * u, safe / _one_minus_exp(safe))


@dataclass(frozen=True)
class Weibull:
    """Times T > 0 with P(T > t) = exp(-(t / exp(f))^k): accelerated failure times, with proportional hazards too.

    f of shape (N, 1) is the log scale: of those with a scale exp(f), 37 % outlive it. shape: k, a positive number
    (known; 1 is the exponential distribution) or a sampled scalar. The hazard k t^(k - 1) exp(-k f) rises with time
    where k > 1 and falls where k < 1. y of shape (N,), positive; `Censored(Weibull(k))` where some are bounds only.

    eta = f, and (f, log k) where the shape is sampled. exp(k (log T - f)) has an exponential distribution, and with
    Euler's constant g = 0.5772...

        F(f, f) = k^2,     F(f, log k) = -k (1 - g),     F(log k, log k) = (1 - g)^2 + pi^2 / 6.

    Times have a zero: they stay as they are where a fit standardises. Give them in a unit in which they are about 1, or
    add the logarithm of a typical time to f.
    """

    shape: Any = 1.0
    task = "regression"
    standardises = False

    def __post_init__(self) -> None:
        _check_positive("Weibull", "shape", self.shape)

    @property
    def _known(self) -> bool:
        return _is_known(self.shape)

    @property
    def form(self) -> Weibull:
        return self if self._known else Weibull(None)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        if f[1] != 1:
            raise ModelError(
                "Weibull: "
                + message(
                    "one network output, the log scale", f"f of shape {f}", "f[:, :1], one time per row"
                )
            )
        _check_one_or_each("Weibull", "shape", self.shape, f)
        _check_targets("Weibull", f, y, f[:1])

    def check_values(self, y: np.ndarray) -> None:
        checks.check_times(y)

    def distribution(self, f: Any) -> Distribution:
        return dist.distribution("Weibull", ops.exp(f[:, 0]), _for_one_output(self.shape))

    def predictor(self, f: Any) -> Any:
        return f if self._known else ops.concatenate([f, _log_columns(self.shape, f)])

    def _parts(self, eta: Any) -> tuple[Any, Any]:
        """(f, k), each (..., 1)."""
        f = eta[..., :1]
        return f, self.shape * ops.ones_like(f) if self._known else ops.exp(eta[..., 1:])

    def fisher(self, eta: Any) -> Any:
        root = self.fisher_root(eta)
        return ops.einsum("nic,njc->nij", root, root)

    def fisher_root(self, eta: Any) -> Any:
        _, k = self._parts(eta)
        if self._known:
            return k[:, :, None]
        none, one = ops.zeros_like(k), ops.ones_like(k)
        return _diagonal_blocks([[k, none], [-(1.0 - np.euler_gamma) * one, math.pi / math.sqrt(6.0) * one]])

    def score(self, eta: Any, y: Any) -> Any:
        f, k = self._parts(eta)
        z = k * (ops.log(y[:, None]) - f)
        excess = ops.exp(z) - 1.0
        return k * excess if self._known else ops.concatenate([k * excess, 1.0 - z * excess])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        f, k = self._parts(eta)
        return "Weibull", {"concentration": k[..., 0], "scale": ops.exp(f[..., 0])}


@dataclass(frozen=True)
class Censored:
    """Values of which of some rows only a bound is known: times of those who are alive, readings beyond a limit.

        log p(y_n | f_n) = log p(v_n)         where d_n = 1, observed: v_n is the value itself,
                           log P(V_n > v_n)   where d_n = 0, right-censored: the value is larger,
                           log P(V_n < v_n)   where d_n = -1, left-censored: the value is smaller,

    for targets y_n = (v_n, d_n) of shape (N, 2) and the distribution of V_n that `base` gives: `Weibull`, `Gaussian`,
    `HeteroscedasticGaussian` or `Laplace`, of one number per row. Rows are taken to be censored for reasons that say
    nothing about V_n beyond the bound. `Censored(Gaussian(noise))` of log times is the log-normal accelerated failure
    time model; its densities are per unit of log time.

    A prediction is of V itself, which nothing censors; its `log_prob` takes targets (N, 2). eta is that of `base`.

    What a row tells. The Fisher information of y depends on where each row would have been censored, and of those that
    were observed that is not known. The information of V, `fisher` and `fisher_root`, is an upper bound: a posterior
    made of it is too narrow by what censoring hides. What curvature takes is `information_root(eta, y)`. With s the
    scale, z = (v - f) / s and g(z) the log density of z, or log P(Z > z), or log P(Z < z), it is the root of

        -g''(z) (1 / s, z) (1 / s, z)' + 1{d = 1} (0, 1) (0, 1)'

    in (f, log s); for Weibull times s = 1 / k and z = k (log v - f). These are minus the second derivatives of the log
    likelihood in (f / s, 1 / s), in which it is concave as g is (Olsen 1978; Burridge 1981), carried over to (f, log s)
    without the term in the gradient: never indefinite, exact in f, and with the Fisher information of y as their mean,
    whatever censors the rows. `Laplace` has a kink where it should have g'': curvature="empirical" alone serves it.
    """

    base: Any
    task = "regression"
    # Of the columns of y, the first has units and the other is a mark.
    columns_with_units = 1

    def __post_init__(self) -> None:
        if isinstance(self.base, Gaussian | HeteroscedasticGaussian | Laplace | Weibull):
            return
        came = self.base.__name__ if isinstance(self.base, type) else type(self.base).__name__
        if isinstance(self.base, type) and self.base in (Gaussian, HeteroscedasticGaussian, Laplace, Weibull):
            expected, came, advice = "an instance of a likelihood", f"the class {came}", f"{came}()"
        else:
            expected = "a likelihood whose tails both systems differentiate: Weibull, Gaussian, "
            expected += "HeteroscedasticGaussian, Laplace"
            advice = "Censored(Gaussian(noise)) of log times, or Censored(Weibull(shape))"
        raise UnsupportedError("likelihoods.Censored: " + message(expected, came, advice))

    @property
    def form(self) -> Censored:
        return Censored(self.base.form)

    @property
    def standardises(self) -> bool:
        """Whether values have units that can be changed: times of a Weibull distribution have a zero."""
        return getattr(self.base, "standardises", True)

    @property
    def has_fisher(self) -> bool:
        return not isinstance(self.base, Laplace)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        wanted = 2 if isinstance(self.base, HeteroscedasticGaussian) else 1
        if f[1] != wanted:
            raise ModelError(
                "Censored: "
                + message(
                    f"f of shape (N, {wanted}), one number per row of {type(self.base).__name__}",
                    f"f of shape {f}",
                    f"f[:, :{wanted}]",
                )
            )
        self.base.check(f, None)
        if y is not None and y != (f[0], 2):
            advice = "np.column_stack([y, np.ones(len(y))]) where every row was observed"
            raise ModelError(
                "Censored: "
                + message(
                    f"y of shape {(f[0], 2)}, values and events (1, 0 or -1)", f"y of shape {y}", advice
                )
            )

    def check_values(self, y: np.ndarray) -> None:
        checks.check_censored(y, positive=isinstance(self.base, Weibull))

    def distribution(self, f: Any) -> Distribution:
        return dist.distribution("Censored", self.base.distribution(f))

    def predictor(self, f: Any) -> Any:
        return self.base.predictor(f)

    def fisher(self, eta: Any) -> Any:
        self._check_smooth()
        return self.base.fisher(eta)

    def fisher_root(self, eta: Any) -> Any:
        self._check_smooth()
        return self.base.fisher_root(eta)

    def information_root(self, eta: Any, y: Any) -> Any:
        """R (N, D, 2) with R R' the information of what was seen of each row, y (N, 2)."""
        self._check_smooth()
        z, direction, unit = self._coordinates(eta, y)
        _, weight = self._derivatives(z, y[:, 1:])
        seen = ops.where(y[:, 1:] > 0.0, unit, ops.zeros_like(unit))
        return ops.stack([ops.sqrt(_not_negative(weight)) * direction, seen])

    def score(self, eta: Any, y: Any) -> Any:
        """The gradient of log p(y | eta) in eta, (N, D), of targets y (N, 2)."""
        z, direction, unit = self._coordinates(eta, y)
        slope, _ = self._derivatives(z, y[:, 1:])
        return slope * direction + ops.where(y[:, 1:] > 0.0, unit, ops.zeros_like(unit))

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        # Draws of eta may differ between rows in all that Gaussian takes from its first row.
        base = HeteroscedasticGaussian() if isinstance(self.base, Gaussian) else self.base
        family, parameters = base.mixture_parameters(eta)
        return f"Censored{family}", parameters

    def _check_smooth(self) -> None:
        if not self.has_fisher:
            raise UnsupportedError(
                "Censored: "
                + message(
                    "a base whose log density has a second derivative",
                    "Laplace, which has a kink instead",
                    "Laplace(curvature='empirical'), or Censored(Gaussian(noise))",
                )
            )

    def _coordinates(self, eta: Any, y: Any) -> tuple[Any, Any, Any]:
        """z (N, 1), its gradient in eta (N, D), and the gradient in eta of the logarithm of dz/dv (N, D)."""
        v = y[:, :1]
        if isinstance(self.base, Weibull):
            f, k = self.base._parts(eta)
            z = k * (ops.log(v) - f)
            if self.base._known:
                return z, -k, ops.zeros_like(k)
            return z, ops.concatenate([-k, z]), ops.concatenate([ops.zeros_like(z), ops.ones_like(z)])
        precision = ops.exp(-eta[:, 1:])
        z = (v - eta[:, :1]) * precision
        none = ops.zeros_like(z)
        return z, -ops.concatenate([precision, z]), ops.concatenate([none, none - 1.0])

    def _derivatives(self, z: Any, event: Any) -> tuple[Any, Any]:
        """First and minus second derivative in z of its log density, log P(Z > z) or log P(Z < z); None with a kink."""
        observed, left = event > 0.0, event < 0.0
        one = ops.ones_like(z)
        if isinstance(self.base, Weibull):
            u = ops.exp(z)
            ratio = _ratio(u)
            below = ratio * ops.exp(-u)
            slope = ops.where(left, below, ops.where(observed, 1.0 - u, -u))
            return slope, ops.where(left, below * (ratio - 1.0), u)
        # Both other families are symmetric: what is below z is above -z.
        side = ops.where(left, -one, one)
        if isinstance(self.base, Laplace):
            sign = ops.where(z < 0.0, -one, one)
            half = 0.5 * ops.exp(-_not_negative(-side * z))
            hazard = ops.where(side * z > 0.0, one, half / (1.0 - half))
            return ops.where(observed, -sign, -side * hazard), None
        hazard, excess = _normal_hazard(side * z)
        return ops.where(observed, -z, -side * hazard), ops.where(observed, one, hazard * excess)


def _normal_hazard(x: Any) -> tuple[Any, Any]:
    """h = p(x) / P(Z > x) of a standard normal Z, and h - x, which is positive and falls off as 1 / x."""
    far = x > 50.0
    inverse = 1.0 / ops.where(far, x, 50.0 * ops.ones_like(x))
    square = inverse**2
    series = inverse * (1.0 + square * (-2.0 + square * (10.0 - 74.0 * square)))
    near = ops.where(far, ops.zeros_like(x), x)
    hazard = ops.exp(-0.5 * (near**2 + math.log(2.0 * math.pi)) - dist.log_ndtr(-near))
    return ops.where(far, x + series, hazard), ops.where(far, series, hazard - near)


# --- several outputs at once ------------------------------------------------------------------------------


def _triangle(outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of a lower triangle: first the diagonal, then what is below it, row by row."""
    rows, columns = np.tril_indices(outputs, -1)
    diagonal = np.arange(outputs)
    return np.concatenate([diagonal, rows]), np.concatenate([diagonal, columns])


@dataclass(frozen=True)
class MultiOutputGaussian:
    """y_n ~ N(f_n, L L') with one covariance of the noise for all rows: outputs are correlated given the weights.

    scale_tril: L (K, K), lower triangular with a positive diagonal: known, or sampled, as `priors.CovarianceFactor`
    gives it. f and y are (N, K), K of at least 2.

    eta = (f, log of the diagonal of L, the rest of L row by row), D = K + K (K + 1) / 2. The Fisher information is
    (L L')^-1 in f, and between directions A and B of L, with M = L^-1 A and M~ = L^-1 B (lower triangular),

        2 sum_i M_ii M~_ii + sum_(i > j) M_ij M~_ij.

    A prediction is `MultivariateNormal`: the joint density of a row knows the covariance; intervals, quantiles and
    CRPS are those of each output.
    """

    scale_tril: Any
    task = "regression"

    def __post_init__(self) -> None:
        if isinstance(self.scale_tril, list | tuple):
            object.__setattr__(self, "scale_tril", np.asarray(self.scale_tril, dtype=float))
        dist.check_factor("likelihoods.MultiOutputGaussian", self.scale_tril)

    @property
    def form(self) -> MultiOutputGaussian:
        return MultiOutputGaussian(None)

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        shape = tuple(getattr(self.scale_tril, "shape", ()))
        if f[1] < 2 or shape != (f[1], f[1]):
            raise ModelError(
                "MultiOutputGaussian: "
                + message(
                    f"K >= 2 outputs and scale_tril (K, K), here {(f[1], f[1])}",
                    f"f of shape {f} and scale_tril of shape {shape}",
                    "likelihoods.Gaussian for one output or for independent ones",
                )
            )
        _check_targets("MultiOutputGaussian", f, y, f)

    def distribution(self, f: Any) -> Distribution:
        return dist.distribution("RowNormal", f, ops.asarray(self.scale_tril, like=f))

    def predictor(self, f: Any) -> Any:
        outputs = int(f.shape[-1])
        rows, columns = _triangle(outputs)
        entries = ops.asarray(self.scale_tril, like=f).reshape(-1)[rows * outputs + columns]
        entries = ops.concatenate([ops.log(entries[:outputs]), entries[outputs:]])
        return ops.concatenate([f, ops.broadcast_to(entries, (int(f.shape[0]), int(entries.shape[0])))])

    @staticmethod
    def _parts(eta: Any) -> tuple[Any, Any]:
        """(f, L), (..., K) and (..., K, K)."""
        # D = K (K + 3) / 2
        outputs = (math.isqrt(9 + 8 * int(eta.shape[-1])) - 3) // 2
        rows, columns = _triangle(outputs)
        placed = np.zeros((len(rows), outputs * outputs))
        placed[np.arange(len(rows)), rows * outputs + columns] = 1.0
        entries = eta[..., outputs:]
        entries = ops.concatenate([ops.exp(entries[..., :outputs]), entries[..., outputs:]])
        flat = ops.matmul(entries, ops.asarray(placed, like=eta))
        return eta[..., :outputs], flat.reshape((*tuple(eta.shape[:-1]), outputs, outputs))

    def fisher(self, eta: Any) -> Any:
        root = self.fisher_root(eta)
        return ops.einsum("nic,njc->nij", root, root)

    def fisher_root(self, eta: Any) -> Any:
        f, factor = self._parts(eta)
        outputs, count = int(f.shape[-1]), int(f.shape[0])
        rows, columns = _triangle(outputs)
        inverse = ops.namespace(eta).linalg.inv(factor)
        flat = inverse.reshape(count, outputs * outputs)
        # M = L^-1 e_a e_b' for the entry (a, b) of L: M_ij is (L^-1)_ia where j = b.
        which = rows[None, :] * outputs + rows[:, None]
        weight = (columns[:, None] == columns[None, :]) * np.where(rows == columns, math.sqrt(2.0), 1.0)
        of_factor = flat[:, which] * ops.asarray(weight, like=eta)
        diagonal = ops.exp(eta[:, outputs : 2 * outputs])
        # Coordinates on the diagonal are logarithms.
        unit = ops.concatenate([diagonal, ops.ones_like(eta[:, 2 * outputs :])])
        of_factor = unit[:, :, None] * of_factor
        of_f = ops.einsum("nij->nji", inverse)
        none = ops.asarray(np.zeros((outputs, len(rows))), like=eta)
        right = ops.broadcast_to(none, (count, outputs, len(rows)))
        left = ops.broadcast_to(none.T, (count, len(rows), outputs))
        return ops.concatenate([ops.concatenate([of_f, right]), ops.concatenate([left, of_factor])], -2)

    def score(self, eta: Any, y: Any) -> Any:
        f, factor = self._parts(eta)
        outputs = int(f.shape[-1])
        rows, columns = _triangle(outputs)
        inverse = ops.namespace(eta).linalg.inv(factor)
        z = ops.einsum("nij,nj->ni", inverse, y - f)
        of_f = ops.einsum("nji,nj->ni", inverse, z)
        entries = of_f[:, rows] * z[:, columns]
        diagonal = ops.exp(eta[:, outputs : 2 * outputs])
        return ops.concatenate([of_f, diagonal * entries[:, :outputs] - 1.0, entries[:, outputs:]])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        loc, factor = self._parts(eta)
        return "MultivariateNormal", {"loc": loc, "scale_tril": factor}


# --- several ways at once ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixtureDensity:
    """p(y) = sum_m w_m N(y; mean_m, scale_m^2), all of them outputs of the network (Bishop 1994): one x, several y.

    f is (N, 3M): M logits of the weights w = softmax(.), M means, M scale outputs, scale = softplus(.). y is (N,).
    eta = (logits, means, log scales), D = 3M. Components may change places, so that modes come in M! copies.

    The Fisher information has no closed form. `Laplace(fisher="sampled")` estimates it from targets drawn at each row,
    without bias; `Laplace(curvature="empirical")` and "hessian" do without it.
    """

    task = "regression"
    has_fisher = False

    @property
    def form(self) -> MixtureDensity:
        return self

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        if f[1] % 3 or f[1] < 6:
            raise ModelError(
                "MixtureDensity: "
                + message(
                    "3 M network outputs for M >= 2 components (logits, means, scales)",
                    f"f of shape {f}",
                    "6 outputs for two components, HeteroscedasticGaussian() for one",
                )
            )
        _check_targets("MixtureDensity", f, y, f[:1])

    def distribution(self, f: Any) -> Distribution:
        m = f.shape[-1] // 3
        return dist.distribution("MixtureOfNormals", f[:, :m], f[:, m : 2 * m], ops.softplus(f[:, 2 * m :]))

    def predictor(self, f: Any) -> Any:
        m = f.shape[-1] // 3
        return ops.concatenate([f[:, : 2 * m], ops.log(ops.softplus(f[:, 2 * m :]))])

    def fisher(self, eta: Any) -> Any:
        raise UnsupportedError(
            "MixtureDensity: "
            + message(
                "a likelihood whose Fisher information has a closed form",
                "a mixture of normals",
                "Laplace(fisher='sampled'), or curvature='empirical' or 'hessian'",
            )
        )

    def fisher_root(self, eta: Any) -> Any:
        return self.fisher(eta)

    def score(self, eta: Any, y: Any) -> Any:
        m = eta.shape[-1] // 3
        logits, means, log_scales = eta[:, :m], eta[:, m : 2 * m], eta[:, 2 * m :]
        precision = ops.exp(-log_scales)
        z = (y[:, None] - means) * precision
        share = ops.softmax(logits - log_scales - 0.5 * z**2)
        return ops.concatenate([share - ops.softmax(logits), share * z * precision, share * (z**2 - 1.0)])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        m = eta.shape[-1] // 3
        weights, scale = ops.softmax(eta[..., :m]), ops.exp(eta[..., 2 * m :])
        return "NormalMixture", {"weights": weights, "loc": eta[..., m : 2 * m], "scale": scale}
