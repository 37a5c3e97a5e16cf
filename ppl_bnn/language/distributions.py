"""Distribution specifications, resolved by the system that runs a model.

`dist.HalfNormal(1.0)` is a name with arguments and a shape. The running system turns it into its own distribution of
the same name. Arguments that are plain numbers are checked at once, so that a negative scale raises an error where it
is written.

The event of the multivariate families has the shape of `loc`; vec(x) ravels it in C order.

- MultivariateNormal(loc, scale_tril): vec(x) ~ N(vec(loc), L L'), L = scale_tril (P, P) lower triangular.
- MultivariateLogNormal(loc, scale_tril): log x has that distribution.
- KroneckerNormal(loc, left_vectors, right_vectors, precisions): as matrices (I, O), with Q_l (I, I) and Q_r (O, O)
  orthogonal and z standard normal, x = loc + Q_l (z / sqrt(precisions)) Q_r'. Its covariance, (Q_l (x) Q_r)
  diag(1 / precisions) (Q_l (x) Q_r)', is never built.
- LKJCholesky(dimension, concentration): Cholesky factors (D, D) of correlation matrices R with density proportional to
  det(R)^(concentration - 1).

Families of likelihoods, one event per row:

- NegativeBinomial(concentration, logits): mean concentration * exp(logits), variance mean + mean^2 / concentration.
- RowNormal(loc, scale_tril): rows of loc (N, K), each N(loc_n, L L') with one L = scale_tril (K, K) for all.
- MixtureOfNormals(logits, loc, scale): sum_m softmax(logits)_m N(loc_m, scale_m^2) over the last axis.
- Censored(base): rows (value, event) of a Normal, Laplace or Weibull distribution, with the log density of
  `censored_log_prob`; draws are observed, with event 1. Weibull(scale, concentration) has the survival function
  exp(-(t / scale)^concentration).

An argument that is a distribution itself is a hyper-prior; priors that take a scale draw it first
(`priors.Hierarchical`).

The meaning of two families depends on the method. A method that does not support them refuses them
(`Method.serves_priors`).

- EmpiricalBayes(scale, per): w ~ N(0, s^2) with s found by the method, one per weight, per output unit or per tensor.
  A system treats it as Normal(0, scale), from which starts are drawn; that density is not used otherwise.
- ImproperLogUniform(scale): p(w) proportional to 1 / |w|, which has no integral. Starts are drawn from N(0, scale^2).

Examples
--------
>>> from ppl_bnn import dist
>>> scale = dist.HalfNormal(1.0)  # for bnn.sample, or as the scale of a prior
>>> scale.family, scale.arguments
('HalfNormal', {'scale': 1.0})
>>> weights = dist.Normal(0.0, 0.5).expand((10, 3)).to_event()  # one event of 30 independent numbers
>>> weights.shape, weights.event_dims
((10, 3), 2)
>>> dist.Normal(0.0, -1.0)
Traceback (most recent call last):
    ...
ppl_bnn.core.errors.InputError: Normal: expected a positive scale; got -1.0; try scale=1.0
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError, check_known, unknown_name
from ppl_bnn.core.settings import whole
from ppl_bnn.language import ops

# Families with the same arguments -> these in order, with a default where the field has one; `...` means required.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "Normal LogNormal Laplace Cauchy Logistic": {"loc": 0.0, "scale": 1.0},
    "HalfNormal HalfCauchy ImproperLogUniform": {"scale": 1.0},
    "StudentT": {"df": ..., "loc": 0.0, "scale": 1.0},
    "Gamma InverseGamma": {"concentration": ..., "rate": 1.0},
    "Exponential": {"rate": 1.0},
    "Weibull": {"scale": 1.0, "concentration": 1.0},
    "Beta": {"concentration1": ..., "concentration0": ...},
    "Uniform": {"low": 0.0, "high": 1.0},
    "Dirichlet": {"concentration": ...},
    "Bernoulli Categorical": {"logits": ...},
    "Poisson": {"rate": ...},
    "NegativeBinomial": {"concentration": ..., "logits": ...},
    "NormalMixture": {"weights": ..., "scales": ...},
    "MixtureOfNormals": {"logits": ..., "loc": ..., "scale": ...},
    "MultivariateNormal MultivariateLogNormal RowNormal": {"loc": ..., "scale_tril": ...},
    "KroneckerNormal": {"loc": ..., "left_vectors": ..., "right_vectors": ..., "precisions": ...},
    "Censored": {"base": ...},
    "LKJCholesky": {"dimension": ..., "concentration": 1.0},
    "EmpiricalBayes": {"scale": 1.0, "per": "weight"},
}
FAMILIES = {family: arguments for families, arguments in _ARGUMENTS.items() for family in families.split()}
__all__ = ["Distribution", "distribution", *FAMILIES]
POSITIVE = frozenset(
    ("scale", "rate", "concentration", "concentration1", "concentration0", "df", "scales", "weights", "precisions")
)  # fmt: skip
# Families by the bijection from the real line to their support: none, or exp.
ON_REALS = frozenset((
    "Normal", "StudentT", "Laplace", "Cauchy", "Logistic", "NormalMixture", "EmpiricalBayes", "ImproperLogUniform",
    "MultivariateNormal", "KroneckerNormal",
))  # fmt: skip
ON_POSITIVES = frozenset((
    "HalfNormal", "LogNormal", "HalfCauchy", "Gamma", "InverseGamma", "Exponential", "Weibull",
    "MultivariateLogNormal",
))  # fmt: skip
# Families that only some methods support: the name that a user writes, and the alternatives.
SPECIAL = {
    "EmpiricalBayes": (
        "priors.EmpiricalBayes",
        "SVI, or priors.Hierarchical, whose scale is a random variable, or priors.Normal with Laplace(tune='tensor')",
    ),
    "ImproperLogUniform": (
        "priors.LogUniform",
        "SVI, or priors.Horseshoe, a proper prior that drives weights to zero",
    ),
}
# Families whose draws are not single numbers, and the argument that has the shape of a draw.
EVENTS = {"Dirichlet": "concentration"} | dict.fromkeys(
    ("MultivariateNormal", "MultivariateLogNormal", "KroneckerNormal"), "loc"
)
# Which weights may share a scale: none, those of an output unit, those of an input unit, all.
GROUPS = ("weight", "unit", "input", "tensor")


@dataclass(frozen=True)
class Distribution:
    """A family, its arguments and its shape.

    Parameters
    ----------
    family : str
        Name of the family, as in both systems.
    arguments : mapping of str to float or array
        Name -> number or array of the running system.
    shape : tuple of int, optional
        Batch shape to expand to, or None for that of the arguments.
    event_dims : int
        How many trailing axes form one event (their log densities are summed).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> normal = bnn.dist.Normal(0.0, 2.0).expand((3,)).to_event()
    >>> isinstance(normal, bnn.dist.Distribution), normal.arguments
    (True, {'loc': 0.0, 'scale': 2.0})
    """

    family: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    event_dims: int = 0

    def expand(self, shape: tuple[int, ...]) -> Distribution:
        """The same distribution, independent over `shape`.

        Parameters
        ----------
        shape : tuple of int
            The batch shape.

        Returns
        -------
        Distribution
            The expanded distribution.
        """
        return replace(self, shape=tuple(map(int, shape)))

    def to_event(self, dims: int | None = None) -> Distribution:
        """The last axes as one event, whose log densities are summed.

        Parameters
        ----------
        dims : int, optional
            Number of axes, by default all of the expanded shape.

        Returns
        -------
        Distribution
            The distribution of whole events.
        """
        return replace(self, event_dims=len(self.shape or ()) if dims is None else dims)


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, Distribution):
        return draw_shape(value)
    return np.shape(value) if isinstance(value, list | tuple) else tuple(getattr(value, "shape", ()))


def draw_shape(specification: Distribution) -> tuple[int, ...]:
    """The shape of one draw, outside any plate."""
    family, arguments, shape = specification.family, specification.arguments, specification.shape
    if family in EVENTS:
        return (shape or ()) + _shape(arguments[EVENTS[family]])
    match family:
        case "LKJCholesky":
            return (shape or ()) + (arguments["dimension"],) * 2
        case "RowNormal":
            return _shape(arguments["loc"])
        case "Censored":
            return (*draw_shape(arguments["base"]), 2)
        case "NormalMixture":
            return shape or ()
    if shape is not None:
        return shape
    shape = np.broadcast_shapes(*map(_shape, arguments.values()))
    return shape[:-1] if family in ("Categorical", "MixtureOfNormals") else shape


def in_words(name: str, arguments: Mapping[str, Any]) -> str:
    """A call such as "Normal(0, 0.5)": numbers and words as they were given, "..." for arrays."""
    return f"{name}({', '.join(map(_value_in_words, arguments.values()))})"


def _value_in_words(value: Any) -> str:
    if type(value) in (list, tuple):
        return f"({', '.join(map(_value_in_words, value))})"
    if type(value) in (int, float):
        return f"{value:.4g}"
    if is_dataclass(value) and not isinstance(value, type):
        return in_words(type(value).__name__, fields_of(value))
    return str(value) if isinstance(value, str | bool) or value is None else "..."


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass and their values; none for anything else."""
    return {each.name: getattr(value, each.name) for each in fields(value)} if is_dataclass(value) else {}


def check_no_nested(specification: Distribution) -> None:
    """Refuse arguments that are distributions themselves: only priors that take a scale draw these first."""
    for name, value in specification.arguments.items():
        if isinstance(value, Distribution):
            expected, got = f"a number or an array as {name}", f"the distribution {value.family}"
            drawn = f"bnn.sample('{name}', dist.{value.family}(...))"
            advice = f"{drawn}, drawing it first, or priors.Hierarchical"
            raise ModelError.of(specification.family, expected, got, advice)


def _check_numbers(family: str, name: str, value: Any) -> None:
    """Check numbers of Python and NumPy. An array of a system may be traced and have no value yet."""
    if isinstance(value, np.ndarray):
        # Report the first invalid number, if any.
        wrong = ~np.isfinite(value)
        if name in POSITIVE:
            wrong |= ~(value > 0)
        value = value[wrong].ravel()[:1].tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        InputError.check(math.isfinite(number), family, f"a finite {name}", repr(number), "a number")
        if name in POSITIVE and number <= 0:
            raise InputError.of(family, f"a positive {name}", repr(number), f"{name}={abs(number) or 1.0}")


def distribution(family: str, *args: Any, **kwargs: Any) -> Distribution:
    """The checked specification of `family`, one of `FAMILIES`, with positional or named arguments.

    Parameters
    ----------
    family : str
        Name of the family.
    *args, **kwargs
        Its arguments.

    Returns
    -------
    Distribution
        The specification.

    Raises
    ------
    UnknownNameError
        An unknown family or argument.
    InputError
        An argument that is missing, given twice or invalid.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.dist.distribution("Normal", 0.0, scale=2.0) == bnn.dist.Normal(0.0, 2.0)
    True
    """
    check_known("distribution", [family], FAMILIES)
    known = FAMILIES[family]
    if len(args) > len(known):
        raise InputError.of(family, f"at most {len(known)} arguments", str(len(args)), ", ".join(known))
    check_known(f"argument of {family}", kwargs, known)
    given = dict(zip(known, args, strict=False))
    for name in given:
        if name in kwargs:
            raise InputError(f"{family}: argument {name!r} was given twice")
    arguments = known | given | kwargs
    for name, value in arguments.items():
        InputError.check(value is not ..., family, f"an argument {name!r}", "none", f"{family}({name}=...)")
        _check_numbers(family, name, value)
    _check_family(family, arguments)
    return Distribution(family, arguments)


def group_shape(per: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one scale per group of weights, which broadcasts against a tensor of `shape` (..., I, O).

    "weight": `shape`. "unit": (O,), one for all weights into an output unit (or channel). "input": (I, 1), one for all
    weights out of an input unit, and (1,) for a bias, the weights out of the constant 1. "tensor": ().
    """
    check_known("per of a scale", [per], GROUPS)
    groups = {"weight": shape, "unit": shape[-1:], "input": (*shape[-2:-1], 1), "tensor": ()}
    return groups[per] if shape else ()


# --- checks of single families ------------------------------------------------------------------------

# Families with accurate tails and derivatives of tails in every system.
CENSORED = ("Normal", "Laplace", "Weibull")


def _check_family(family: str, arguments: Mapping[str, Any]) -> None:
    """Check what a family requires of its arguments together; shapes are known of traced arrays too."""
    check = InputError.check
    match family, arguments:
        case "Uniform", {"low": int() | float() as low, "high": int() | float() as high}:
            check(low < high, family, "low < high", f"{low!r} and {high!r}", "Uniform(0.0, 1.0)")
        case "EmpiricalBayes", {"per": per}:
            check_known(f"per of {family}", [per], ("weight", "unit", "tensor"))
        case "LKJCholesky", {"dimension": size}:
            check(not whole(2)(size), family, "a dimension, a whole number from 2", repr(size), "2")
        case "NormalMixture", {"weights": weights, "scales": scales}:
            got, advice = f"{len(weights)} and {len(scales)}", "weights=(0.5, 0.5)"
            check(len(weights) == len(scales), family, "as many weights as scales", got, advice)
            if isinstance(weights, list | tuple | np.ndarray):
                good = abs(math.fsum(weights) - 1.0) <= 1e-9
                check(good, family, "positive weights with sum 1", tuple(weights), advice)
        case "Censored", {"base": base}:
            got = base.family if isinstance(base, Distribution) else type(base).__name__
            expected = f"a distribution among {', '.join(CENSORED)}"
            check(got in CENSORED, family, expected, got, "dist.Normal(f, 1.0)")
        case "KroneckerNormal" | "MultivariateNormal" | "MultivariateLogNormal", {"loc": loc, **factors}:
            size, expected = math.prod(_shape(loc)), "a loc with at least one axis"
            check(_shape(loc), family, expected, "a number", "Normal for a single number")
            *sides, given = map(_shape, factors.values())
            if family == "KroneckerNormal":
                fits = len(given) == 2 and math.prod(given) == size and sides == [(n, n) for n in given]
                expected = f"precisions (I, O) with I * O = {size}"
                expected += ", left_vectors (I, I) and right_vectors (O, O)"
                got = f"{given}, {sides[0]} and {sides[1]}"
                check(fits, family, expected, got, "eigenvectors of both factors")
                return
            expected = f"scale_tril of shape {(size, size)} for loc of shape {_shape(loc)}"
            good, advice = given == (size, size), "the Cholesky factor of the covariance"
            check(good, family, expected, f"shape {given}", advice)
            check_factor(family, factors["scale_tril"])


def check_factor(of: str, factor: Any) -> None:
    """Refuse a NumPy matrix that is not a Cholesky factor; other arrays may have no value yet."""
    if isinstance(factor, np.ndarray):
        good = not np.any(np.triu(factor, 1)) and np.all(np.diag(factor) > 0)
        expected = "scale_tril lower triangular, with a positive diagonal"
        InputError.check(good, of, expected, "another matrix", "np.linalg.cholesky(covariance)")


# --- censored rows ----------------------------------------------------------------------------------------


def censored_log_prob(family: str, arguments: Mapping[str, Any], y: Any) -> Any:
    """Log density (...) of censored values y (..., 2), each a value v and its event, in NumPy, torch and JAX.

    It is log p(v) where the event is 1 (observed), log P(Y > v) where it is 0 (right-censored), and log P(Y < v) where
    it is -1. Value and gradient are accurate far in the tails.
    """
    value, event = y[..., 0], y[..., 1]
    z, log_slope = standard_coordinate(family, arguments, value)
    density, above, below = _TAILS[family]
    zero, observed = ops.zeros_like(z), event > 0.0

    def part(function: Any, rows: Any) -> Any:
        # In other rows the function is evaluated at zero, so that no gradient is zero times infinity.
        return ops.where(rows, function(ops.where(rows, z, zero)), zero)

    seen = part(density, observed) + ops.where(observed, log_slope + zero, zero)
    return seen + part(above, event == 0.0) + part(below, event < 0.0)


def standard_coordinate(family: str, arguments: Mapping[str, Any], value: Any) -> tuple[Any, Any]:
    """(z, log dz/dv): the increasing function z of v that has a fixed distribution.

    z = (v - loc) / scale; for a Weibull distribution z = concentration log(v / scale), which has the density exp(z -
    exp(z)).
    """
    if family == "Weibull":
        log_value, shape = ops.log(value), arguments["concentration"]
        return shape * (log_value - ops.log(arguments["scale"])), ops.log(shape) - log_value
    scale = arguments["scale"]
    return (value - arguments["loc"]) / scale, -ops.log(scale)


def special(x: Any) -> Any:
    """The special functions of the library of x. The derivative of digamma has nine digits in torch."""
    xp = ops.namespace(x)
    if xp.__name__ == "torch":
        return xp.special
    import scipy.special

    return scipy.special if xp is np else sys.modules["jax"].scipy.special


def log_ndtr(x: Any) -> Any:
    """log P(Z < x) of a standard normal Z, accurate for x far below zero, and twice differentiable anywhere."""
    xp = ops.namespace(x)
    if xp.__name__ != "torch":
        # JAX uses an asymptotic series below -20; with three terms its error is 4e-9.
        return special(x).log_ndtr(x) if xp is np else special(x).log_ndtr(x, 6)
    # torch's own has no second derivative above 37.
    far, t = x < -1.0, math.sqrt(0.5) * x
    below = xp.where(far, t, -xp.ones_like(t))
    lower = xp.log(0.5 * xp.special.erfcx(-below)) - below**2
    return xp.where(far, lower, xp.log1p(-0.5 * xp.special.erfc(xp.where(far, xp.zeros_like(t), t))))


def one_minus_exp(x: Any) -> Any:
    """1 - exp(-x) for x >= 0, accurate for small x."""
    t = ops.tanh(0.5 * x)
    return 2.0 * t / (1.0 + t)


def _laplace_log_above(z: Any) -> Any:
    positive = z > 0.0
    left = ops.where(positive, ops.zeros_like(z), z)
    return ops.where(positive, -z - math.log(2.0), ops.log1p(-0.5 * ops.exp(left)))


def _weibull_log_below(z: Any) -> Any:
    """log(1 - exp(-exp(z)))."""
    none = ops.zeros_like(z)
    small, large = z < -30.0, z > -0.5
    middle = ops.log(one_minus_exp(ops.exp(ops.where(small | large, none, z))))
    # Beyond 50 exp(-u) is zero, and u may be infinite.
    outlived = ops.exp(-ops.exp(ops.where(large & (z < 50.0), z, none)))
    right = ops.where(z < 50.0, ops.log1p(-outlived), none)
    left = z - 0.5 * ops.exp(ops.where(small, z, none))
    return ops.where(small, left, ops.where(large, right, middle))


# Family -> log density of z, log P(Z > z) and log P(Z < z).
_TAILS: dict[str, tuple[Any, Any, Any]] = {
    "Normal": (lambda z: -0.5 * (z * z + math.log(2.0 * math.pi)), lambda z: log_ndtr(-z), log_ndtr),
    "Laplace": (lambda z: -ops.abs(z) - math.log(2.0), _laplace_log_above, lambda z: _laplace_log_above(-z)),
    "Weibull": (lambda z: z - ops.exp(z), lambda z: -ops.exp(z), _weibull_log_below),
}


def __getattr__(family: str) -> Any:
    """`dist.Normal`, `dist.HalfNormal`, ...: one constructor per family."""
    if family not in FAMILIES:
        raise AttributeError(str(unknown_name("distribution", family, FAMILIES)))

    def constructor(*args: Any, **kwargs: Any) -> Distribution:
        return distribution(family, *args, **kwargs)

    constructor.__name__ = constructor.__qualname__ = family
    arguments = ", ".join(FAMILIES[family])
    constructor.__doc__ = f"{family}({arguments}), resolved in the system that runs the model."
    return constructor


def __dir__() -> list[str]:
    return __all__
