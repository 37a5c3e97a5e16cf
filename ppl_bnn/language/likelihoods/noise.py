"""Likelihoods of real numbers: normal, Student-t and Laplace noise, and mixtures of normals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.likelihoods import base
from ppl_bnn.language.likelihoods.base import Likelihood, Shape, location_scale, of_one_output, parts


class _Noise(Likelihood):
    """Noise with a location and a scale, which are eta = (location, log scale); z is the residual in scales."""

    # The Fisher information about the log scale.
    of_scale: ClassVar[float]

    def slope(self, z: Any) -> Any:
        """Minus the derivative of the log density of z."""
        raise NotImplementedError

    def fisher_root(self, eta: Any) -> Any:
        precision = ops.exp(-parts(eta, 2)[1])
        of_scale = math.sqrt(self.of_scale) * ops.ones_like(precision)
        return ops.diagonal_matrix(ops.concatenate([precision, of_scale]))

    def score(self, eta: Any, y: Any) -> Any:
        loc, log_scale = parts(eta, 2)
        precision = ops.exp(-log_scale)
        z = (y.reshape(tuple(precision.shape)) - loc) * precision
        slope = self.slope(z)
        return ops.concatenate([slope * precision, slope * z - 1.0])


class _NormalNoise(_Noise):
    """Normal noise: known, sampled or predicted."""

    of_scale = 2.0

    def slope(self, z: Any) -> Any:
        return z

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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(bnn.sample("noise", bnn.dist.HalfNormal(1.0))))
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('Gaussian(...)', 'regression')
    """

    noise: Any = 1.0
    positive = always_in_eta = ("noise",)
    per_output = True
    advice_for_rows = "HeteroscedasticGaussian() for noise that differs between rows"

    def distribution(self, f: Any) -> dist.Distribution:
        return location_scale("Normal", f, scale=self.noise)

    def jensen_gap(self, mean: Any, variance: Any) -> Any:
        return -0.5 * ops.sum(variance / ops.asarray(self.noise, like=mean) ** 2)

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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [2]), bnn.likelihoods.HeteroscedasticGaussian())
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('HeteroscedasticGaussian()', 'regression')
    """

    outputs = (
        lambda k: k % 2 == 0,
        "an even number of network outputs (means, then noise)",
        "2 outputs for one target",
    )

    def target_shape(self, f: Shape) -> Shape:
        return f[:1] if f[1] == 2 else (f[0], f[1] // 2)

    def distribution(self, f: Any) -> dist.Distribution:
        loc, scale = parts(f, 2)
        return location_scale("Normal", loc, scale=ops.softplus(scale))

    def predictor(self, f: Any) -> Any:
        loc, scale = parts(f, 2)
        return ops.concatenate([loc, ops.log(ops.softplus(scale))])


class _HeavyTails(Likelihood):
    """Location-scale noise; its family has one name in the systems and in predictions, that of the likelihood."""

    always_in_eta = ("scale",)
    per_output = True

    def distribution(self, f: Any) -> dist.Distribution:
        return location_scale(self.family, f, **{name: getattr(self, name) for name in self.positive})

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        names = ("loc", *self.positive)
        return self.family, of_one_output(**dict(zip(names, self.split(eta), strict=True)))


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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.StudentT(df=4.0, scale=0.5))
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('StudentT(4, 0.5)', 'regression')
    """

    df: Any = 4.0
    scale: Any = 1.0
    positive = ("scale", "df")

    def fisher_root(self, eta: Any) -> Any:
        _, scale, df = self.split(eta)
        of_f = ops.sqrt((df + 1.0) / (df + 3.0)) / scale
        of_scale = ops.sqrt(2.0 * df / (df + 3.0))
        if "df" not in self.in_eta:
            return ops.diagonal_matrix(ops.concatenate([of_f, of_scale]))
        none = ops.zeros_like(df)
        both = -2.0 * df / ((df + 1.0) * (df + 3.0))
        polygamma = dist.special(df).polygamma
        halves = polygamma(1, 0.5 * df) - polygamma(1, 0.5 * (df + 1.0))
        of_df = 0.25 * df**2 * halves - 0.5 * df * (df + 5.0) / ((df + 1.0) * (df + 3.0))
        # For large df the two terms cancel, and rounding may leave a negative difference.
        rest = ops.sqrt(ops.relu(of_df - (both / of_scale) ** 2))
        rows = [[of_f, none, none], [none, of_scale, none], [none, both / of_scale, rest]]
        return base.diagonal_blocks(rows)

    def score(self, eta: Any, y: Any) -> Any:
        f, scale, df = self.split(eta)
        z = (y.reshape(tuple(f.shape)) - f) / scale
        share = z**2 / (df + z**2)
        columns = [(df + 1.0) * z / ((df + z**2) * scale), (df + 1.0) * share - 1.0]
        if "df" in self.in_eta:
            digamma = dist.special(df).digamma
            halves = digamma(0.5 * (df + 1.0)) - digamma(0.5 * df)
            columns.append(0.5 * (df * halves - 1.0 - df * ops.log1p(z**2 / df) + (df + 1.0) * share))
        return ops.concatenate(columns)


@dataclass(frozen=True)
class Laplace(_HeavyTails, _Noise):
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

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Laplace(0.5))
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('Laplace(0.5)', 'regression')
    """

    scale: Any = 1.0
    positive = ("scale",)
    has_kink = True
    of_scale = 1.0

    def slope(self, z: Any) -> Any:
        return ops.where(z < 0.0, -ops.ones_like(z), ops.ones_like(z))


@dataclass(frozen=True)
class MixtureDensity(Likelihood):
    """Mixture density network, p(y) = sum_m w_m N(y; mean_m, scale_m^2) (Bishop 1994).

    All parameters are outputs of the network, so that y may be multimodal given x. f is (N, 3M): M logits of the
    weights w = softmax(.), M means, M scale outputs, scale = softplus(.). y is (N,). eta = (logits, means, log scales),
    D = 3M. Components are exchangeable, so modes come in M! copies.

    Notes
    -----
    The Fisher information has no closed form. `Laplace(fisher="sampled")` estimates it from targets drawn at each row,
    without bias; `Laplace(curvature="empirical")` and "hessian" do not need it.

    References
    ----------
    Bishop (1994), Mixture density networks.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [6]), bnn.likelihoods.MixtureDensity())
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('MixtureDensity()', 'regression')
    """

    outputs = (
        lambda k: k % 3 == 0 and k >= 6,
        "3 M network outputs for M >= 2 components (logits, means, scales)",
        "6 outputs for two components, HeteroscedasticGaussian() for one",
    )
    has_fisher = False

    def distribution(self, f: Any) -> dist.Distribution:
        logits, means, scales = parts(f, 3)
        return dist.distribution("MixtureOfNormals", logits, means, ops.softplus(scales))

    def predictor(self, f: Any) -> Any:
        logits, means, scales = parts(f, 3)
        return ops.concatenate([logits, means, ops.log(ops.softplus(scales))])

    def fisher_root(self, eta: Any) -> Any:
        expected = "a likelihood whose Fisher information has a closed form"
        advice = "Laplace(fisher='sampled'), or curvature='empirical' or 'hessian'"
        raise UnsupportedError.of(self.family, expected, "a mixture of normals", advice)

    def score(self, eta: Any, y: Any) -> Any:
        logits, means, log_scales = parts(eta, 3)
        precision = ops.exp(-log_scales)
        z = (y[:, None] - means) * precision
        share = ops.softmax(logits - log_scales - 0.5 * z**2)
        return ops.concatenate([share - ops.softmax(logits), share * z * precision, share * (z**2 - 1.0)])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        logits, means, log_scales = parts(eta, 3)
        weights, scale = ops.softmax(logits), ops.exp(log_scales)
        return "NormalMixture", {"weights": weights, "loc": means, "scale": scale}
