"""Families of predictive distributions in closed form: densities, distribution functions, quantiles, moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ppl_bnn.core.errors import InputError
from ppl_bnn.language.distributions import CENSORED
from ppl_bnn.prediction import scipy_families as families

LOG_2PI = math.log(2.0 * math.pi)


@dataclass(frozen=True)
class LocationScale:
    """A family y = loc + scale * z, defined by functions of z (and of its shape parameters).

    Parameters
    ----------
    shapes : tuple of str
        Names of the shape parameters.
    log_density : callable
        Log density of z.
    distribution : callable
        Distribution function of z.
    inverse : callable
        Quantile function of z.
    absolute_deviation : callable
        E|Z - z|.
    variance : callable
        Variance of z.
    mean : callable, optional
        E z, for families of positive z without a loc. None where it is 0.
    """

    shapes: tuple[str, ...]
    log_density: Callable[..., np.ndarray]
    distribution: Callable[..., np.ndarray]
    inverse: Callable[..., np.ndarray]
    # E|Z - z|
    absolute_deviation: Callable[..., np.ndarray]
    variance: Callable[..., Any]
    mean: Callable[..., Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, shape parameters first."""
        return (*self.shapes, "loc", "scale") if self.mean is None else (*self.shapes, "scale")


def _normal_distribution(z):
    from scipy.special import ndtr

    return ndtr(z)


def normal_inverse(q):
    """Quantile function of the standard normal distribution."""
    from scipy.special import ndtri

    return ndtri(q)


def _normal_absolute_deviation(z):
    return z * (2.0 * _normal_distribution(z) - 1.0) + 2.0 * np.exp(-0.5 * (z * z + LOG_2PI))


def _student_log_density(z, df):
    from scipy.special import gammaln

    constant = gammaln(0.5 * (df + 1.0)) - gammaln(0.5 * df) - 0.5 * np.log(df * np.pi)
    return constant - 0.5 * (df + 1.0) * np.log1p(z * z / df)


def _student_distribution(z, df):
    from scipy.special import stdtr

    return stdtr(df, z)


def _student_inverse(q, df):
    from scipy.special import stdtrit

    return stdtrit(df, q)


def _student_absolute_deviation(z, df):
    density = np.exp(_student_log_density(z, df))
    return z * (2.0 * _student_distribution(z, df) - 1.0) + 2.0 * density * (df + z * z) / (df - 1.0)


def _student_variance(df):
    finite = df > 2.0
    return np.where(finite, df / np.where(finite, df - 2.0, 1.0), np.inf)


def _laplace_distribution(z):
    half = 0.5 * np.exp(-np.abs(z))
    return np.where(z < 0.0, half, 1.0 - half)


def _laplace_inverse(q):
    return np.where(q < 0.5, np.log(2.0 * q), -np.log(2.0 * (1.0 - q)))


def _weibull_log_density(z, k):
    positive = z > 0.0
    log_z = np.log(np.where(positive, z, 1.0))
    with np.errstate(over="ignore"):
        return np.where(positive, np.log(k) + (k - 1.0) * log_z - np.exp(k * log_z), -np.inf)


def _weibull_exponent(z, k):
    """z^k, 0 for z below 0."""
    with np.errstate(over="ignore", under="ignore"):
        return np.maximum(z, 0.0) ** k


def _weibull_mean(k):
    from scipy.special import gamma

    return gamma(1.0 + 1.0 / k)


def _weibull_variance(k):
    from scipy.special import gammaln

    second = gammaln(1.0 + 2.0 / k)
    with np.errstate(over="ignore"):
        return np.exp(second) * -np.expm1(2.0 * gammaln(1.0 + 1.0 / k) - second)


def _weibull_absolute_deviation(z, k):
    from scipy.special import gammainc

    mean, u = _weibull_mean(k), _weibull_exponent(z, k)
    # E[Z; Z <= z] = E[Z] times an incomplete gamma function.
    inside = np.maximum(z, 0.0) * (1.0 - 2.0 * np.exp(-u)) + mean * (1.0 - 2.0 * gammainc(1.0 + 1.0 / k, u))
    return np.where(z < 0.0, mean - z, inside)


LOCATION_SCALE = {
    "Normal": LocationScale(
        (),
        lambda z: -0.5 * (z * z + LOG_2PI),
        _normal_distribution,
        normal_inverse,
        _normal_absolute_deviation,
        lambda: 1.0,
    ),
    "StudentT": LocationScale(
        ("df",),
        _student_log_density,
        _student_distribution,
        _student_inverse,
        _student_absolute_deviation,
        _student_variance,
    ),
    "Laplace": LocationScale(
        (),
        lambda z: -np.abs(z) - math.log(2.0),
        _laplace_distribution,
        _laplace_inverse,
        lambda z: np.abs(z) + np.exp(-np.abs(z)),
        lambda: 2.0,
    ),
    "Weibull": LocationScale(
        ("concentration",),
        _weibull_log_density,
        lambda z, k: -np.expm1(-_weibull_exponent(z, k)),
        lambda q, k: (-np.log1p(-q)) ** (1.0 / k),
        _weibull_absolute_deviation,
        _weibull_variance,
        _weibull_mean,
    ),
}
PARAMETERS = {
    **{name: family.names for name, family in LOCATION_SCALE.items()},
    "Bernoulli": ("probs",),
    "Categorical": ("probs",),
    "Poisson": ("rate",),
    "NegativeBinomial": ("concentration", "rate"),
    "NormalMixture": ("weights", "loc", "scale"),
    "MultivariateNormal": ("scale_tril", "loc"),
}
CLASS_FAMILIES = ("Bernoulli", "Categorical")
COUNT_FAMILIES = ("Poisson", "NegativeBinomial")
# Families whose units can be changed; those of positive numbers have a zero.
FAMILIES_WITH_UNITS = ("Normal", "StudentT", "Laplace", "NormalMixture", "MultivariateNormal")
# Names of the families in likelihoods of censored rows.
CENSORED_FAMILIES = {f"Censored{family}": family for family in CENSORED}


def frozen_array(name: str, given: Any, finite: bool = True) -> np.ndarray:
    """A read-only float64 view, so that a prediction does not change after its checks.

    Parameters
    ----------
    name : str
        Name of the array, for error messages.
    given
        An array of numbers.
    finite : bool, default True
        Whether all values must be finite.

    Returns
    -------
    ndarray
        The view.

    Raises
    ------
    InputError
        If the values are not numbers, or are not finite where they must be.
    """
    array = np.asarray(given)
    if array.dtype.kind not in "biuf":
        raise InputError.of("", f"{name} as an array of numbers", f"{array.dtype}", "a NumPy array of floats")
    array = array.astype(np.float64, copy=False).view()
    if finite and not np.isfinite(array).all():
        raise InputError.of(
            "",
            f"finite {name}",
            f"{np.count_nonzero(~np.isfinite(array))} values of NaN or infinity",
            "looking at the draws: a chain or an optimisation has left the finite numbers",
        )
    array.flags.writeable = False
    return array


_LAYOUTS = {
    "Categorical": ((3,), "(draws, rows, classes)"),
    "NormalMixture": ((3,), "(draws, rows, parts)"),
    "MultivariateNormal": ((3,), "(draws, rows, outputs), scale_tril with one more axis of outputs"),
    **dict.fromkeys((*LOCATION_SCALE, *COUNT_FAMILIES), ((2, 3), "(draws, rows) or (draws, rows, outputs)")),
}


def parameter_names(family: str) -> tuple[str, ...]:
    """Names of the parameters of a family. The last one has the shape of the mean."""
    return PARAMETERS.get(family) or families.names(family)


def _layout(family: str) -> tuple[tuple[int, ...], str]:
    if family in families.VECTORS or family.startswith(families.MIXTURE):
        return (3,), "(draws, rows, parts)"
    if family not in PARAMETERS:
        return (2, 3), "(draws, rows) or (draws, rows, outputs)"
    return _LAYOUTS.get(family, ((2,), "(draws, rows)"))


def check_parameters(family: str, parameters: Mapping[str, np.ndarray]) -> None:
    """Check shapes and values of the parameters of a family.

    Parameters
    ----------
    family : str
        The family.
    parameters : mapping of str to ndarray
        Its parameters by name.

    Raises
    ------
    InputError
        If the shapes do not agree, there is no draw or no row, or a value is outside its range.
    """
    shapes = {name: value.shape for name, value in parameters.items()}
    dimensions, layout = _layout(family)
    first = shapes[parameter_names(family)[-1]]
    wanted = {name: first + first[-1:] if name == "scale_tril" else first for name in shapes}
    if len(first) not in dimensions or shapes != wanted:
        raise InputError.of(
            "",
            f"parameters of {family} that all have one shape {layout}",
            ", ".join(f"{name} {shape}" for name, shape in shapes.items()),
            "adding the axis of the draws in front, or np.broadcast_to",
        )
    if 0 in first:
        raise InputError.of("", "at least one draw and one row", f"shape {first}", "rows to predict")
    for name in ("df", "scale", "concentration"):
        if name in parameters and not (parameters[name] > 0.0).all():
            refuse_values(
                f"positive {name}", parameters[name], "the standard deviation's exponential or softplus"
            )
    if families.known(family) and (fault := families.faulty(family, parameters)) is not None:
        name, expected = fault
        refuse_values(expected, parameters[name], "values that the family has")
    if family == "MultivariateNormal":
        factor = parameters["scale_tril"]
        diagonal = np.diagonal(factor, axis1=-2, axis2=-1)
        if not (diagonal > 0.0).all() or np.triu(factor, 1).any():
            refuse_values(
                "scale_tril lower triangular, its diagonal positive", diagonal, "np.linalg.cholesky"
            )
    for name in ("probs", "weights", "gate"):
        if name not in parameters:
            continue
        shares = parameters[name]
        if (shares < 0.0).any() or (shares > 1.0).any():
            refuse_values(f"{name} between 0 and 1", shares, "a sigmoid or a softmax of the output")
        each = family == "Bernoulli" or (families.base(family) in families.FAMILIES and name != "weights")
        total = shares.sum(axis=-1)
        if not each and (np.abs(total - 1.0) > 1e-5).any():
            kinds = "classes" if family == "Categorical" else "parts"
            refuse_values(f"{name} that sum to 1 over the {kinds}", total, "a softmax over the last axis")


def standardised(parameters: Mapping[str, np.ndarray], y: np.ndarray) -> np.ndarray:
    """The standardised variable z of a location-scale family, (y - loc) / scale."""
    return (y - parameters.get("loc", 0.0)) / parameters["scale"]


def refuse_values(expected: str, values: np.ndarray, advice: str) -> NoReturn:
    """Raise an error that states the range of the values.

    Parameters
    ----------
    expected : str
        Description of valid values.
    values : ndarray
        The values.
    advice : str
        What to try.

    Raises
    ------
    InputError
        Always.
    """
    raise InputError.of("", expected, f"values from {values.min():.6g} to {values.max():.6g}", advice)


def count_log_mass(family: str, parameters: Mapping[str, np.ndarray], count: np.ndarray) -> np.ndarray:
    """log P(Y = count), for Poisson and NegativeBinomial.

    Parameters
    ----------
    family : str
        The family.
    parameters : mapping of str to ndarray
        Its parameters by name.
    count : ndarray
        Whole numbers from 0.

    Returns
    -------
    ndarray
        Log probabilities.
    """
    from scipy.special import betaln, gammaln, xlog1py, xlogy

    rate = parameters["rate"]
    if family == "Poisson":
        return xlogy(count, rate) - rate - gammaln(count + 1.0)
    r = parameters["concentration"]
    # Gamma(y + r) / (Gamma(r) y!) = 1 / (y B(y, r)) keeps its digits where r is large.
    some = np.where(count > 0.0, count, 1.0)
    ways = np.where(count > 0.0, -np.log(some) - betaln(some, r), 0.0)
    return ways + xlogy(count, rate / (rate + r)) - xlog1py(r, rate / r)


def count_distribution(family: str, parameters: Mapping[str, np.ndarray], count: np.ndarray) -> np.ndarray:
    """P(Y <= count), for Poisson and NegativeBinomial.

    Parameters
    ----------
    family : str
        The family.
    parameters : mapping of str to ndarray
        Its parameters by name.
    count : ndarray
        Whole numbers from 0.

    Returns
    -------
    ndarray
        Probabilities.
    """
    from scipy.special import betainc, pdtr

    if family == "Poisson":
        return pdtr(count, parameters["rate"])
    r = parameters["concentration"]
    return betainc(r, count + 1.0, r / (r + parameters["rate"]))


def draw_categories(shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw an index of the last axis.

    Parameters
    ----------
    shares : ndarray
        Probabilities along the last axis.
    rng : numpy.random.Generator
        Generator of the random numbers.

    Returns
    -------
    ndarray
        Indices, int64, without the last axis.
    """
    upto = np.cumsum(shares, axis=-1)
    position = rng.random((*upto.shape[:-1], 1)) * upto[..., -1:]
    return np.sum(position >= upto, axis=-1).astype(np.int64)


def log_sum_exp(values: np.ndarray) -> np.ndarray:
    """log sum exp over axis 0; -inf where every term is -inf."""
    highest = values.max(axis=0)
    shift = np.where(np.isfinite(highest), highest, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(values - shift).sum(axis=0)) + shift


def entropy_of(probabilities: np.ndarray) -> np.ndarray:
    """Entropy over the last axis, nats."""
    from scipy.special import entr

    return entr(probabilities).sum(axis=-1)


def bracketed_root(
    function: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """The root of an increasing function in each interval [low, high], vectorised.

    Bisection, with inverse quadratic interpolation where the last three points make it safe. The bracket is kept
    throughout, so a kink or a plateau costs time but not correctness.

    Parameters
    ----------
    function : callable
        An increasing function of an array, elementwise.
    low, high : ndarray
        Ends of the brackets.

    Returns
    -------
    ndarray
        The roots.

    References
    ----------
    Chandrupatla 1997, Advances in Engineering Software 28, 145-149.
    """
    a, b = low.copy(), high.copy()
    fa, fb = function(a), function(b)
    # Rounding can put an end of the bracket on the wrong side by one unit; that end is then the root.
    low_is_root, high_is_root = fa >= 0.0, fb <= 0.0
    c, fc = a, fa
    t = np.full(a.shape, 0.5)
    finished = np.zeros(a.shape, dtype=bool)
    best = np.where(np.abs(fa) < np.abs(fb), a, b)
    for _ in range(200):
        x = a + t * (b - a)
        fx = function(x)
        same = np.sign(fx) == np.sign(fa)
        c, fc = np.where(same, a, b), np.where(same, fa, fb)
        b, fb = np.where(same, b, a), np.where(same, fb, fa)
        a, fa = x, fx
        nearer = np.abs(fa) < np.abs(fb)
        # A row that has finished keeps its result while the other rows of its block continue.
        best = np.where(finished, best, np.where(nearer, a, b))
        width = np.abs(b - a)
        tolerance = 4.0 * np.finfo(np.float64).eps * np.abs(best)
        finished |= (width <= 2.0 * tolerance) | (np.minimum(np.abs(fa), np.abs(fb)) <= 1e-13)
        if (finished | low_is_root | high_is_root).all():
            break
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            least = np.minimum(tolerance / width, 0.5)
            xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
            safe = (phi * phi < xi) & ((1.0 - phi) ** 2 < 1.0 - xi)
            quadratic = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
            t = np.where(safe & np.isfinite(quadratic), quadratic, 0.5)
            t = np.clip(
                t, np.where(np.isfinite(least), least, 0.0), 1.0 - np.where(np.isfinite(least), least, 0.0)
            )
    return np.where(low_is_root, low, np.where(high_is_root, high, best))
