"""Models written in NumPyro or Pyro: how they are called, and the likelihood of their observations.

A plain model is called as `model(x, y)`. Several inputs, a dict or a tuple, are passed to the parameters of those
names, or to the first parameters in order. The predictor of a plain model contains the parameters of the observed
distribution, row by row.

Tracing a plain model once finds the distribution that it observes. Its parameters (`NativeLikelihood`) are enough to
predict and to score; methods that need the network output f or its linear maps refuse it by name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.language import ops
from ppl_bnn.prediction import scipy_families as families

Array = Any
Model = Callable[..., Any]

# --- calls of a model -----------------------------------------------------------------------------


def is_torch_module(model: Any) -> bool:
    """Whether a model is an instance of a class of `torch.nn`."""
    return any(kind.__module__.startswith("torch.nn") for kind in type(model).__mro__)


def positional(model: Model) -> list[inspect.Parameter]:
    """The positional parameters of a model that `functools.partial` has not bound; those of `forward` for a module."""
    try:
        signature = inspect.signature(getattr(model, "forward", model) if is_torch_module(model) else model)
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in signature.parameters.values() if parameter.kind in kinds]


def input_names(model: Model) -> list[str]:
    """The parameters before the targets: those before a first default of None, else all required ones but the last."""
    found = positional(model)
    for index, parameter in enumerate(found):
        if parameter.default is None:
            return [each.name for each in found[:index]]
    return [each.name for each in found if each.default is inspect.Parameter.empty][:-1]


def named_inputs(model: Model, x: Any) -> Any:
    """A tuple of inputs as a dict with the names of the parameters that receive them; anything else unchanged.

    A model with a single parameter before its targets gets the whole tuple: the names are then "0", "1", and so on.

    Raises
    ------
    InputError
        The model has neither one parameter nor as many as there are inputs.
    """
    if not isinstance(x, tuple):
        return x
    names = input_names(model)
    if len(names) == len(x):
        return dict(zip(names, x, strict=True))
    if len(names) == 1:
        return {str(index): value for index, value in enumerate(x)}
    raise InputError.of(
        "x",
        f"{len(names)} inputs, for the parameters {', '.join(names)}",
        f"a tuple of {len(x)}",
        "one array per parameter before the targets",
    )


def called(model: Model) -> Model:
    """The model as a function of (x, y), where x may be a dict of the model's own parameters."""
    names = [parameter.name for parameter in positional(model)]

    @functools.wraps(getattr(model, "func", model), updated=())
    def native(x: Any, y: Any = None, **keywords: Any) -> Any:
        if not isinstance(x, Mapping):
            return model(x, y, **keywords)
        if list(x) == [str(index) for index in range(len(x))]:
            return model(tuple(x.values()), y, **keywords)
        free = [name for name in names if name not in x]
        if len(x) > 1 and set(x) <= set(names) and free:
            return model(**x, **{free[0]: y}, **keywords)
        return model(x, y, **keywords)

    # Other code reads the parameters of a model (such as `population`) from its signature.
    native.__signature__ = _signature(model)  # pyright: ignore[reportAttributeAccessIssue]
    return native


def _signature(model: Model) -> inspect.Signature:
    try:
        return inspect.signature(getattr(model, "forward", model) if is_torch_module(model) else model)
    except (TypeError, ValueError):
        return inspect.Signature()


# --- sites that no method supports ----------------------------------------------------------------


def refuse_discrete(name: str, family: str) -> UnsupportedError:
    """The error for a latent site with a discrete support, which would require enumeration."""
    return UnsupportedError.of(
        f"site {name!r}",
        "continuous latent variables: enumeration of discrete ones is not supported",
        f"a latent {family}",
        "summing it out in the model, as with MixtureSameFamily",
    )


def refuse_subsample(name: str, size: int, rows: int) -> UnsupportedError:
    """The error for a plate of Pyro that draws a subsample: its size cannot be changed from outside."""
    return UnsupportedError.of(
        f"plate {name!r}",
        "a plate over all rows in Pyro",
        f"subsample_size={rows} of {size}",
        (
            f"pyro.plate({name!r}, {size}), and mini-batches by SVI(batch_size={rows}) with a parameter "
            "population=None of the model"
        ),
    )


# --- observations of a model ----------------------------------------------------------------------


def check_observation(name: str, distribution: Any, targets: tuple[int, ...]) -> None:
    """Refuse an observed distribution whose shape would be broadcast against the targets.

    A distribution with fewer axes, such as a single one for all rows, is used for every row.

    Raises
    ------
    ModelError
        The shapes do not fit.
    """
    shape = tuple(distribution.batch_shape) + tuple(distribution.event_shape)
    try:
        together = np.broadcast_shapes(shape, targets)
    except ValueError:
        together = ()
    if together != targets:
        column = shape == (*targets, 1) or (len(shape) == 2 and shape[1] == 1 and len(targets) == 1)
        raise ModelError.of(
            f"site {name!r}",
            f"an observed distribution of the shape of y, {targets}",
            f"shape {shape}" + (f", which broadcasts to {together}" if together else ""),
            ".squeeze(-1) of its parameters" if column else "one distribution per row of y",
        )


@dataclass(frozen=True)
class NativeLikelihood:
    """The likelihood of a plain NumPyro or Pyro model: eta are the parameters of its observed distribution.

    Parameters
    ----------
    family : str
        Family of the prediction.
    parameters : tuple of str
        Names of its parameters.
    task : str
        "regression" or "classification".
    shapes : tuple of tuple of int
        Shape of each parameter for a single row.
    classes : int, optional
        Number of classes.
    """

    family: str
    parameters: tuple[str, ...]
    task: str
    shapes: tuple[tuple[int, ...], ...] = ()
    classes: int | None = None

    @property
    def standardises(self) -> bool:
        """Whether the targets have units; counts, proportions and positive numbers are not standardised."""
        return self.family in ("Normal", "StudentT", "Laplace", "NormalMixture", "MultivariateNormal")

    @property
    def form(self) -> NativeLikelihood:
        return self

    def mixture_parameters(self, eta: np.ndarray) -> tuple[str, dict[str, np.ndarray]]:
        if self.family == "Categorical":
            logits = eta - eta.max(-1, keepdims=True)
            probabilities = np.exp(logits)
            return "Categorical", {"probs": probabilities / probabilities.sum(-1, keepdims=True)}
        if self.family == "Bernoulli":
            return "Bernoulli", {"probs": np.exp(-np.logaddexp(0.0, -eta[..., 0]))}
        found, start = {}, 0
        for name, shape in zip(self.parameters, self.shapes, strict=True):
            width = math.prod(shape)
            found[name] = eta[..., start : start + width].reshape(*eta.shape[:-1], *shape)
            start += width
        for name in {"probs", "weights"} & found.keys():
            # Rounding in single precision.
            found[name] = np.clip(found[name], 0.0, 1.0)
        return self.family, found

    def fisher(self, eta: Any) -> Any:
        raise UnsupportedError.of(
            "",
            "a model in the language, whose likelihood has a Fisher information",
            "a plain NumPyro or Pyro model",
            "writing it with bnn.observe, or Laplace(curvature='hessian')",
        )


# A class of a system -> the parameters of the family of the prediction -> their names in the system.
_SAME = {
    "Normal": {"loc": "loc", "scale": "scale"},
    "StudentT": {"df": "df", "loc": "loc", "scale": "scale"},
    "Laplace": {"loc": "loc", "scale": "scale"},
    "AsymmetricLaplace": {"asymmetry": "asymmetry", "loc": "loc", "scale": "scale"},
    "SoftLaplace": {"loc": "loc", "scale": "scale"},
    "Cauchy": {"loc": "loc", "scale": "scale"},
    "Logistic": {"loc": "loc", "scale": "scale"},
    "Gumbel": {"loc": "loc", "scale": "scale"},
    "Uniform": {"low": "low", "high": "high"},
    "Beta": {"concentration1": "concentration1", "concentration0": "concentration0"},
    "Exponential": {"rate": "rate"},
    "Gamma": {"concentration": "concentration", "rate": "rate"},
    "InverseGamma": {"concentration": "concentration", "rate": "rate"},
    "Chi2": {"df": "df"},
    "LogNormal": {"loc": "loc", "scale": "scale"},
    "LogUniform": {"low": "low", "high": "high"},
    "HalfNormal": {"scale": "scale"},
    "HalfCauchy": {"scale": "scale"},
    "Pareto": {"alpha": "alpha", "scale": "scale"},
    "Weibull": {"concentration": "concentration", "scale": "scale"},
    "Poisson": {"rate": "rate"},
    "Binomial": {"total_count": "total_count", "probs": "probs"},
    "BetaBinomial": {
        "total_count": "total_count",
        "concentration1": "concentration1",
        "concentration0": "concentration0",
    },
    "Geometric": {"probs": "probs"},
    "DiscreteUniform": {"low": "low", "high": "high"},
    "Bernoulli": {"logits": "logits"},
    "Categorical": {"logits": "logits"},
    "MultivariateNormal": {"scale_tril": "scale_tril", "loc": "loc"},
    "Dirichlet": {"concentration": "concentration"},
    "Multinomial": {"total_count": "total_count", "probs": "probs"},
}
# In this library the rate of a negative binomial distribution is its mean.
_NAMED = {
    "BetaProportion": ("Beta", _SAME["Beta"]),
    "NegativeBinomial": ("NegativeBinomial", {"concentration": "total_count", "rate": "mean"}),
    "GammaPoisson": ("NegativeBinomial", {"concentration": "concentration", "rate": "mean"}),
}
_OURS = ("NormalMixture", "NegativeBinomial")
# The missing bound of a normal distribution that is truncated at one end only; single precision can represent it.
FAR = 1e30
_VECTORS = ("MultivariateNormal", *families.VECTORS)


def unwrap(distribution: Any) -> Any:
    """The distribution inside wrappers that only expand, mask or regroup it."""
    while type(distribution).__name__ in ("Independent", "ExpandedDistribution", "MaskedDistribution"):
        distribution = distribution.base_dist
    return distribution


def _recognised(distribution: Any) -> tuple[str, dict[str, Callable[[], Any]]] | None:
    """(family, its parameters) of a distribution of a system; None if it has no counterpart here.

    Parameters are functions without arguments: a system may compute them on access, which is possible only where the
    distribution was made.
    """
    base = unwrap(distribution)
    kind = type(base).__name__
    if kind == "MixtureSameFamily":
        mixing = getattr(base, "mixing_distribution", None) or base.mixture_distribution
        found = _recognised(base.component_distribution)
        if found is None or found[0] in _VECTORS or base.event_shape:
            return None
        return _mixture(found, lambda: mixing.probs)
    if kind == "MixtureOfNormals":
        parts = {"loc": lambda: base.loc, "scale": lambda: base.scale}
        return _mixture(("Normal", parts), lambda: ops.softmax(base.logits))
    if kind.startswith("ZeroInflated"):
        found = _recognised(base.base_dist)
        if found is None or found[0] not in families.FAMILIES or not families.counts(found[0]):
            return None
        known = getattr(base, "gate", None) is not None
        gate = (lambda: base.gate) if known else (lambda: ops.sigmoid(base.gate_logits))
        return families.ZEROS + found[0], {"gate": gate, **found[1]}
    if kind.endswith("TruncatedDistribution"):
        if type(base.base_dist).__name__ != "Normal":
            return None
        return "TruncatedNormal", {
            "low": lambda: getattr(base, "low", -FAR),
            "high": lambda: getattr(base, "high", FAR),
            "loc": lambda: base.base_dist.loc,
            "scale": lambda: base.base_dist.scale,
        }
    for each in type(base).__mro__:
        name = each.__name__
        for suffix in ("Logits", "Probs"):
            name = name.removesuffix(suffix)
        family, names = _NAMED.get(name) or (name, _SAME.get(name))
        if names is not None:
            return family, {own: functools.partial(getattr, base, theirs) for own, theirs in names.items()}
    return None


def _mixture(
    found: tuple[str, dict[str, Callable[[], Any]]], weights: Callable[[], Any]
) -> tuple[str, dict[str, Callable[[], Any]]]:
    """The family and parameters of a mixture of a recognised family."""
    family = "NormalMixture" if found[0] == "Normal" else families.MIXTURE + found[0]
    return family, {"weights": weights, **found[1]}


def _last_axis(distribution: Any) -> int:
    """The number of classes, or of components of a mixture, from the arguments of the distribution."""
    base = unwrap(distribution)
    parts = getattr(base, "component_distribution", None)
    if parts is not None:
        return int(parts.batch_shape[-1])
    made_of = next(vars(base)[name] for name in ("_param", "probs", "logits", "loc") if name in vars(base))
    return int(np.shape(made_of)[-1])


def _found(distribution: Any) -> tuple[str, dict[str, Callable[[], Any]]]:
    """`_recognised`, or an error for a distribution that predictions do not support."""
    found = _recognised(distribution)
    if found is None or not (found[0] in (*_SAME, *_OURS) or families.known(found[0])):
        known = sorted({*_SAME, *_NAMED, "OrderedLogistic", "MixtureSameFamily", "TruncatedNormal"})
        raise UnsupportedError.of(
            "",
            f"an observed distribution among {', '.join(known)}, or a zero-inflated one of these",
            type(unwrap(distribution)).__name__,
            "one of these",
        )
    return found


def _is_mixture(family: str) -> bool:
    return family == "NormalMixture" or family.startswith(families.MIXTURE)


def _row_shape(family: str, name: str, distribution: Any, row: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter for one row of targets of shape `row`."""
    if _is_mixture(family):
        return (_last_axis(distribution),)
    return (*row, *row) if name == "scale_tril" else row


def native_likelihood(distribution: Any, targets: tuple[int, ...]) -> NativeLikelihood:
    """The likelihood that corresponds to the observed distribution of a plain model.

    Parameters
    ----------
    distribution
        The system's own distribution.
    targets : tuple of int
        Shape of y.

    Returns
    -------
    NativeLikelihood
        The likelihood.

    Raises
    ------
    UnsupportedError
        A distribution that predictions do not support, or not with targets of that shape.
    """
    family, parameters = _found(distribution)
    row = tuple(targets[1:])
    classes = {"Bernoulli": 2}.get(family)
    if family == "Categorical":
        classes = _last_axis(distribution)
    single = row == () or (row == (1,) and classes is not None)
    if (
        len(row) > 1
        or (not single and (classes is not None or _is_mixture(family)))
        or (single and family in _VECTORS)
    ):
        raise UnsupportedError.of(
            "",
            "one vector per row" if family in _VECTORS else "one observation per row, shape (N,)",
            f"{family} with an observed site of shape {targets}",
            "bnn.observe",
        )
    names = {"TruncatedNormal": families.names("TruncatedNormal")}.get(family) or tuple(parameters)
    if classes is not None:
        return NativeLikelihood(family, names, "classification", classes=classes)
    shapes = tuple(_row_shape(family, name, distribution, row) for name in names)
    return NativeLikelihood(family, names, "regression", shapes)


def native_eta(
    zero: Array, likelihood: NativeLikelihood, distribution: Any, targets: tuple[int, ...]
) -> Array:
    """eta (N, D) from an observed distribution of a plain model.

    Parameters
    ----------
    zero : array
        An array of the system, for its type.
    likelihood : NativeLikelihood
        The likelihood.
    distribution
        The system's own distribution.
    targets : tuple of int
        Shape of y.

    Returns
    -------
    array
        Predictors, (N, D).
    """
    family, found = _found(distribution)
    parameters = {name: value() for name, value in found.items()}
    rows, row = targets[0], tuple(targets[1:])
    if family == "Categorical":
        logits = parameters["logits"]
        return ops.broadcast_to(logits, (*targets, logits.shape[-1])).reshape(rows, -1)
    if family == "Bernoulli":
        logits = ops.asarray(parameters["logits"], like=zero)
        return ops.broadcast_to(logits, targets).reshape(rows, 1)
    columns = []
    for name in likelihood.parameters:
        value = ops.asarray(parameters[name], like=zero)
        if family == "Multinomial" and name == "total_count":
            value = value[..., None]
        shape = _row_shape(family, name, distribution, row)
        columns.append(ops.broadcast_to(value, (rows, *shape)).reshape(rows, -1))
    return ops.concatenate(columns, axis=-1)
