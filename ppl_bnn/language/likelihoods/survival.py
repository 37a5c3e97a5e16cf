"""Likelihoods of survival times and of censored values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.errors import ModelError, UnsupportedError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.likelihoods.base import Likelihood, Shape, diagonal_blocks, for_one_output
from ppl_bnn.language.likelihoods.noise import Gaussian, HeteroscedasticGaussian, Laplace


def _ratio(u: Any) -> Any:
    """u / (1 - exp(-u)) for u >= 0, which is 1 at 0."""
    tiny = u < 1e-9
    safe = ops.where(tiny, ops.ones_like(u), u)
    return ops.where(tiny, 1.0 + 0.5 * u, safe / dist.one_minus_exp(safe))


@dataclass(frozen=True)
class Weibull(Likelihood):
    """Survival times T > 0 with P(T > t) = exp(-(t / exp(f))^k).

    An accelerated failure time model, with proportional hazards too. f of shape (N, 1) is the log scale: 37 % of the
    times are longer than exp(f). The hazard k t^(k - 1) exp(-k f) increases with time where k > 1 and decreases where k
    < 1. y has the shape (N,) and is positive; use `Censored(Weibull(k))` where some values are bounds only.

    eta = f, and (f, log k) where the shape is sampled. exp(k (log T - f)) has an exponential distribution, and with
    Euler's constant g = 0.5772...

        F(f, f) = k^2,     F(f, log k) = -k (1 - g),     F(log k, log k) = (1 - g)^2 + pi^2 / 6.

    Times have a natural zero and are not standardised. Use a unit in which they are about 1, or add the logarithm of a
    typical time to f.

    Parameters
    ----------
    shape : float or array
        The shape k: a positive number (known; 1 is the exponential distribution) or a sampled scalar.

    Raises
    ------
    InputError
        A number that is not positive.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Weibull(1.5))
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('Weibull(1.5)', 'regression')
    """

    shape: Any = 1.0
    positive = ("shape",)
    outputs = (lambda k: k == 1, "one network output, the log scale", "f[:, :1], one time per row")
    standardises = False

    def check_values(self, y: np.ndarray) -> None:
        checks.check_times(y)

    def distribution(self, f: Any) -> dist.Distribution:
        return dist.distribution("Weibull", ops.exp(f[:, 0]), for_one_output(self.shape))

    def fisher_root(self, eta: Any) -> Any:
        _, k = self.split(eta)
        if not self.in_eta:
            return k[:, :, None]
        none, one = ops.zeros_like(k), ops.ones_like(k)
        return diagonal_blocks([[k, none], [-(1.0 - np.euler_gamma) * one, math.pi / math.sqrt(6.0) * one]])

    def score(self, eta: Any, y: Any) -> Any:
        f, k = self.split(eta)
        z = k * (ops.log(y[:, None]) - f)
        excess = ops.exp(z) - 1.0
        return ops.concatenate([k * excess, 1.0 - z * excess]) if self.in_eta else k * excess

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        f, k = self.split(eta)
        return "Weibull", {"concentration": k[..., 0], "scale": ops.exp(f[..., 0])}


_BASES = (Weibull, Gaussian, HeteroscedasticGaussian, Laplace)


@dataclass(frozen=True)
class Censored(Likelihood):
    """Values that are known only up to a bound in some rows, such as survival times or readings beyond a limit.

        log p(y_n | f_n) = log p(v_n)         where d_n = 1, observed: v_n is the value itself,
                           log P(V_n > v_n)   where d_n = 0, right-censored: the value is larger,
                           log P(V_n < v_n)   where d_n = -1, left-censored: the value is smaller,

    for targets y_n = (v_n, d_n) of shape (N, 2) and the distribution of V_n given by `base`. Censoring is assumed to
    carry no information about V_n beyond the bound. `Censored(Gaussian(noise))` of log times is the log-normal
    accelerated failure time model; its densities are per unit of log time.

    A prediction is of V itself, without censoring; its `log_prob` takes targets (N, 2). eta is that of `base`.

    Parameters
    ----------
    base : Likelihood
        `Weibull`, `Gaussian`, `HeteroscedasticGaussian` or `Laplace`, of one number per row.

    Raises
    ------
    UnsupportedError
        Another likelihood; or, for `Laplace`, curvature other than "empirical".

    Notes
    -----
    The Fisher information of y depends on where observed rows would have been censored, which is not known.
    The information of V (`fisher`, `fisher_root`) is an upper bound, and a posterior computed from it is too narrow.
    Curvature uses `information_root(eta, y)`. With s the scale, z = (v - f) / s and g(z) the log density of z, or log
    P(Z > z), or log P(Z < z), it is the root of

        -g''(z) (1 / s, z) (1 / s, z)' + 1{d = 1} (0, 1) (0, 1)'

    in (f, log s); for Weibull times s = 1 / k and z = k (log v - f). These are minus the second derivatives of the log
    likelihood in (f / s, 1 / s), in which it is concave as g is (Olsen 1978; Burridge 1981), transformed to (f, log s)
    without the term in the gradient. The matrix is never indefinite, is exact in f, and has the Fisher information of y
    as its mean. The density of `Laplace` has a kink, so that g'' does not exist.

    References
    ----------
    Olsen (1978), Note on the uniqueness of the maximum likelihood estimator for the tobit model.

    Burridge (1981), A note on maximum likelihood estimation for regression models using grouped data.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> def model(x, y=None):
    ...     bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Censored(bnn.likelihoods.Weibull(1.5)))
    >>> sketch = bnn.zoo.sketch(model, 4)
    >>> sketch.likelihood, sketch.task
    ('Censored(Weibull(1.5))', 'regression')
    """

    base: Any
    # The first column of y has units, the other is the event.
    columns_with_units = 1

    def __post_init__(self) -> None:
        names = ", ".join(each.__name__ for each in _BASES)
        expected = f"a likelihood whose tails both systems differentiate: {names}"
        got = getattr(self.base, "__name__", type(self.base).__name__)
        advice = "Censored(Gaussian(noise)) of log times, or Censored(Weibull(shape))"
        if isinstance(self.base, type) and self.base in _BASES:
            expected, got, advice = "an instance of a likelihood", f"the class {got}", f"{got}()"
        UnsupportedError.check(isinstance(self.base, _BASES), "likelihoods.Censored", expected, got, advice)
        kink = self.base.has_kink
        vars(self).update(standardises=self.base.standardises, has_kink=kink, has_fisher=not kink)

    @property
    def form(self) -> Censored:
        return Censored(self.base.form)

    def check(self, f: Shape, y: Shape | None) -> None:
        wanted = 2 if isinstance(self.base, HeteroscedasticGaussian) else 1
        expected = f"f of shape (N, {wanted}), one number per row of {self.base.family}"
        ModelError.check(f[1] == wanted, self.family, expected, f"f of shape {f}", f"f[:, :{wanted}]")
        self.base.check(f, None)
        expected = f"y of shape {(f[0], 2)}, values and events (1, 0 or -1)"
        advice = "np.column_stack([y, np.ones(len(y))]) where every row was observed"
        ModelError.check(y in (None, (f[0], 2)), self.family, expected, f"y of shape {y}", advice)

    def check_values(self, y: np.ndarray) -> None:
        checks.check_censored(y, positive=isinstance(self.base, Weibull))

    def distribution(self, f: Any) -> dist.Distribution:
        return dist.distribution("Censored", self.base.distribution(f))

    def predictor(self, f: Any) -> Any:
        return self.base.predictor(f)

    def fisher_root(self, eta: Any) -> Any:
        self._check_smooth()
        return self.base.fisher_root(eta)

    def information_root(self, eta: Any, y: Any) -> Any:
        """R (N, D, 2) with R R' the information of each row as it was observed, for targets y (N, 2)."""
        self._check_smooth()
        z, direction, unit = self._coordinates(eta, y)
        _, weight = self._derivatives(z, y[:, 1:])
        seen = ops.where(y[:, 1:] > 0.0, unit, ops.zeros_like(unit))
        return ops.stack([ops.sqrt(ops.relu(weight)) * direction, seen])

    def score(self, eta: Any, y: Any) -> Any:
        """The gradient of log p(y | eta) in eta, (N, D), for targets y (N, 2)."""
        z, direction, unit = self._coordinates(eta, y)
        slope, _ = self._derivatives(z, y[:, 1:])
        return slope * direction + ops.where(y[:, 1:] > 0.0, unit, ops.zeros_like(unit))

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        # Gaussian takes the noise from the first row, but here draws of eta may differ between rows.
        base = HeteroscedasticGaussian() if isinstance(self.base, Gaussian) else self.base
        family, parameters = base.mixture_parameters(eta)
        return f"Censored{family}", parameters

    def _check_smooth(self) -> None:
        expected = "a base whose log density has a second derivative"
        got = "Laplace, which has a kink instead"
        advice = "Laplace(curvature='empirical'), or Censored(Gaussian(noise))"
        UnsupportedError.check(not self.has_kink, self.family, expected, got, advice)

    def _coordinates(self, eta: Any, y: Any) -> tuple[Any, Any, Any]:
        """z (N, 1), its gradient in eta (N, D), and the gradient in eta of the logarithm of dz/dv (N, D)."""
        v = y[:, :1]
        if isinstance(self.base, Weibull):
            f, k = self.base.split(eta)
            z = k * (ops.log(v) - f)
            if not self.base.in_eta:
                return z, -k, ops.zeros_like(k)
            return z, ops.concatenate([-k, z]), ops.concatenate([ops.zeros_like(z), ops.ones_like(z)])
        precision = ops.exp(-eta[:, 1:])
        z = (v - eta[:, :1]) * precision
        none = ops.zeros_like(z)
        return z, -ops.concatenate([precision, z]), ops.concatenate([none, none - 1.0])

    def _derivatives(self, z: Any, event: Any) -> tuple[Any, Any]:
        """First and minus second derivative in z of log density, log P(Z > z) or log P(Z < z); None with a kink."""
        observed, left = event > 0.0, event < 0.0
        one = ops.ones_like(z)
        if isinstance(self.base, Weibull):
            u = ops.exp(z)
            ratio = _ratio(u)
            below = ratio * ops.exp(-u)
            slope = ops.where(left, below, ops.where(observed, 1.0 - u, -u))
            return slope, ops.where(left, below * (ratio - 1.0), u)
        # Both other families are symmetric: P(Z < z) = P(Z > -z).
        side = ops.where(left, -one, one)
        if isinstance(self.base, Laplace):
            half = 0.5 * ops.exp(-ops.relu(-side * z))
            hazard, curvature = ops.where(side * z > 0.0, one, half / (1.0 - half)), None
        else:
            hazard, excess = _normal_hazard(side * z)
            curvature = ops.where(observed, one, hazard * excess)
        return ops.where(observed, -self.base.slope(z), -side * hazard), curvature


def _normal_hazard(x: Any) -> tuple[Any, Any]:
    """h = p(x) / P(Z > x) of a standard normal Z, and h - x, which is positive and decreases as 1 / x."""
    far = x > 50.0
    inverse = 1.0 / ops.where(far, x, 50.0 * ops.ones_like(x))
    square = inverse**2
    series = inverse * (1.0 + square * (-2.0 + square * (10.0 - 74.0 * square)))
    near = ops.where(far, ops.zeros_like(x), x)
    hazard = ops.exp(-0.5 * (near**2 + math.log(2.0 * math.pi)) - dist.log_ndtr(-near))
    return ops.where(far, x + series, hazard), ops.where(far, series, hazard - near)
