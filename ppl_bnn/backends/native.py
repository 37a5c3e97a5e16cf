"""Models written in NumPyro or Pyro: how they are called, and the likelihood of their observations.

A plain model is called as `model(x, y)`. Several inputs, a dict or a tuple, are passed to the parameters of those
names, or to the first parameters in order. The model is traced once. Its predictor contains the parameters of the
observed distribution, row by row (`NativeLikelihood`), which are enough to predict and to score. Methods that need the
network output f or its linear maps refuse a plain model by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.arrays import Array, unravel
from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.language import ops
from ppl_bnn.language.likelihoods import Likelihood
from ppl_bnn.prediction import families
from ppl_bnn.prediction.families import FAMILIES_WITH_UNITS

Model = Callable[..., Any]

# --- calls of a model -----------------------------------------------------------------------------


def is_torch_module(model: Any) -> bool:
    """Whether a model is an instance of a class of `torch.nn`."""
    return any(kind.__module__ == "torch.nn.modules.module" for kind in type(model).__mro__)


def _signature(model: Model) -> inspect.Signature:
    """The signature of a model (of `forward` for a module), without parameters if it has none."""
    try:
        return inspect.signature(getattr(model, "forward", model) if is_torch_module(model) else model)
    except (TypeError, ValueError):
        return inspect.Signature()


def _positional(model: Model) -> list[inspect.Parameter]:
    """The positional parameters of a model that `functools.partial` has not bound."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in _signature(model).parameters.values() if parameter.kind in kinds]


def _input_names(model: Model) -> list[str]:
    """The parameters before the targets: those before a first default of None, else all required ones but the last."""
    found = _positional(model)
    for index, parameter in enumerate(found):
        if parameter.default is None:
            return [each.name for each in found[:index]]
    return [each.name for each in found if each.default is inspect.Parameter.empty][:-1]


def named_inputs(model: Model, x: Any) -> Any:
    """A tuple of inputs as a dict with the names of the parameters that receive them; anything else unchanged.

    A model with a single parameter before its targets gets the whole tuple, with the names "0", "1", and so on.
    """
    if not isinstance(x, tuple):
        return x
    names = _input_names(model)
    if len(names) == len(x):
        return dict(zip(names, x, strict=True))
    if len(names) == 1:
        return {str(index): value for index, value in enumerate(x)}
    expected = f"{len(names)} inputs, for the parameters {', '.join(names)}"
    raise InputError.of("x", expected, f"a tuple of {len(x)}", "one array per parameter before the targets")


def called(model: Model) -> Model:
    """The model as a function of (x, y), where x may be a dict of the model's own parameters."""
    names = [parameter.name for parameter in _positional(model)]

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


# --- observations of a model ----------------------------------------------------------------------


def check_observation(name: str, distribution: Any, targets: tuple[int, ...]) -> None:
    """Refuse an observed distribution whose shape would be broadcast against the targets, except over rows."""
    shape = tuple(distribution.batch_shape) + tuple(distribution.event_shape)
    try:
        together = np.broadcast_shapes(shape, targets)
    except ValueError:
        together = ()
    if together != targets:
        column = shape == (*targets, 1) or (len(shape) == 2 and shape[1] == 1 and len(targets) == 1)
        expected = f"an observed distribution of the shape of y, {targets}"
        got = f"shape {shape}" + (f", which broadcasts to {together}" if together else "")
        advice = ".squeeze(-1) of its parameters" if column else "one distribution per row of y"
        raise ModelError.of(f"site {name!r}", expected, got, advice)


@dataclass(frozen=True)
class NativeLikelihood(Likelihood):
    """The likelihood of a plain NumPyro or Pyro model: eta are the parameters of its observed distribution.

    `family` is that of the prediction, `parameters` their names, `shapes` the shape of each for a single row.
    """

    # The defaults only take the place of the attributes of the base class.
    family: str = ""
    parameters: tuple[str, ...] = ()
    task: str = "regression"
    shapes: tuple[tuple[int, ...], ...] = ()
    classes: int | None = None

    def __post_init__(self) -> None:
        vars(self).update(standardises=self.family in FAMILIES_WITH_UNITS, has_kink=self.family == "Laplace")

    def mixture_parameters(self, eta: np.ndarray) -> tuple[str, dict[str, np.ndarray]]:
        if self.family == "Categorical":
            return "Categorical", {"probs": ops.softmax(eta)}
        if self.family == "Bernoulli":
            return "Bernoulli", {"probs": np.exp(-np.logaddexp(0.0, -eta[..., 0]))}
        found = unravel(eta, dict(zip(self.parameters, self.shapes, strict=True)))
        for name in {"probs", "weights"} & found.keys():
            # Rounding in single precision.
            found[name] = np.clip(found[name], 0.0, 1.0)
        return self.family, found

    def fisher_root(self, eta: Any) -> Any:
        expected = "a model in the language, whose likelihood has a Fisher information"
        advice = "writing it with bnn.observe, or Laplace(curvature='hessian')"
        raise UnsupportedError.of("", expected, "a plain NumPyro or Pyro model", advice)


# A class of a system -> the parameters of the family of the same name, which have the same names in the system.
_SAME = {
    **{name: families.names(name) for name in families.FAMILIES},
    "Bernoulli": ("logits",),
    "Categorical": ("logits",),
    "MultivariateNormal": ("scale_tril", "loc"),
}
# Families that are recognised in other ways.
del _SAME["NegativeBinomial"], _SAME["TruncatedNormal"]
# A class of a system -> another family, and the names in the system of its parameters. In this library the rate of a
# negative binomial distribution is its mean.
_NAMED = {
    "BetaProportion": ("Beta", {name: name for name in _SAME["Beta"]}),
    "NegativeBinomial": ("NegativeBinomial", {"concentration": "total_count", "rate": "mean"}),
    "GammaPoisson": ("NegativeBinomial", {"concentration": "concentration", "rate": "mean"}),
}
# The missing bound of a normal distribution that is truncated at one end only; single precision can represent it.
FAR = 1e30
_VECTORS = families.VECTORS
# (family, its parameters as functions without arguments): a system may compute a parameter on access.
_Recognised = tuple[str, dict[str, Callable[[], Any]]]


def unwrap(distribution: Any) -> Any:
    """The distribution inside wrappers that only expand, mask or regroup it."""
    while type(distribution).__name__ in ("Independent", "ExpandedDistribution", "MaskedDistribution"):
        distribution = distribution.base_dist
    return distribution


def _recognised(distribution: Any) -> _Recognised | None:
    """The family of a distribution of a system; None if it has no counterpart here."""
    base = unwrap(distribution)
    kind = type(base).__name__
    if kind == "MixtureSameFamily":
        mixing = getattr(base, "mixing_distribution", None) or base.mixture_distribution
        found = _recognised(base.component_distribution)
        if found is None or found[0] in _VECTORS or base.event_shape:
            return None
        family = "NormalMixture" if found[0] == "Normal" else families.MIXTURE + found[0]
        return family, {"weights": lambda: mixing.probs, **found[1]}
    if kind == "MixtureOfNormals":
        weights = {"weights": lambda: ops.softmax(base.logits)}
        return "NormalMixture", weights | _read(base, loc="loc", scale="scale")
    if kind.startswith("ZeroInflated"):
        found = _recognised(base.base_dist)
        if found is None or not families.known(families.ZEROS + found[0]):
            return None
        known = getattr(base, "gate", None) is not None
        gate = (lambda: base.gate) if known else (lambda: ops.sigmoid(base.gate_logits))
        return families.ZEROS + found[0], {"gate": gate, **found[1]}
    if kind.endswith("TruncatedDistribution"):
        if type(base.base_dist).__name__ != "Normal":
            return None
        bounds = {"low": lambda: getattr(base, "low", -FAR), "high": lambda: getattr(base, "high", FAR)}
        return "TruncatedNormal", bounds | _read(base.base_dist, loc="loc", scale="scale")
    for each in type(base).__mro__:
        name = each.__name__.removesuffix("Logits").removesuffix("Probs")
        if name in _NAMED or name in _SAME:
            family, names = _NAMED.get(name) or (name, {same: same for same in _SAME[name]})
            return family, _read(base, **names)
    return None


def _read(distribution: Any, **names: str) -> dict[str, Callable[[], Any]]:
    """Parameters by our names, as functions that read the attributes of these names of the system."""
    return {own: functools.partial(getattr, distribution, theirs) for own, theirs in names.items()}


def _last_axis(distribution: Any) -> int:
    """The number of classes, or of components of a mixture, from the arguments of the distribution."""
    base = unwrap(distribution)
    components = getattr(base, "component_distribution", None)
    if components is not None:
        return int(components.batch_shape[-1])
    made_of = next(vars(base)[name] for name in ("_param", "probs", "logits", "loc") if name in vars(base))
    return int(np.shape(made_of)[-1])


def _family(distribution: Any) -> _Recognised:
    """`_recognised`, or an error for a distribution that predictions do not support."""
    found = _recognised(distribution)
    if found and (found[0] in (*_SAME, "NormalMixture", "NegativeBinomial") or families.known(found[0])):
        return found
    known = sorted({*_SAME, *_NAMED, "OrderedLogistic", "MixtureSameFamily", "TruncatedNormal"})
    expected = f"an observed distribution among {', '.join(known)}, or a zero-inflated one of these"
    raise UnsupportedError.of("", expected, type(unwrap(distribution)).__name__, "one of these")


def _row_shape(family: str, name: str, distribution: Any, row: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter for one row of targets of shape `row`."""
    if families.is_mixture(family):
        return (_last_axis(distribution),)
    if family == "Categorical":
        return (*row, _last_axis(distribution))
    return (*row, *row) if name == "scale_tril" else row


def native_likelihood(distribution: Any, targets: tuple[int, ...]) -> NativeLikelihood:
    """The likelihood that corresponds to the system's distribution of targets of that shape, or `UnsupportedError`."""
    family, parameters = _family(distribution)
    row = tuple(targets[1:])
    classes = {"Bernoulli": 2}.get(family)
    if family == "Categorical":
        classes = _last_axis(distribution)
    single = row == () or (row == (1,) and classes is not None)
    one_number = classes is not None or families.is_mixture(family)
    if len(row) > 1 or (not single and one_number) or (single and family in _VECTORS):
        expected = "one vector per row" if family in _VECTORS else "one observation per row, shape (N,)"
        got = f"{family} with an observed site of shape {targets}"
        raise UnsupportedError.of("", expected, got, "bnn.observe")
    names = families.names(family) if family == "TruncatedNormal" else tuple(parameters)
    if classes is not None:
        return NativeLikelihood(family, names, "classification", classes=classes)
    shapes = tuple(_row_shape(family, name, distribution, row) for name in names)
    return NativeLikelihood(family, names, "regression", shapes)


def native_eta(
    zero: Array, likelihood: NativeLikelihood, distribution: Any, targets: tuple[int, ...]
) -> Array:
    """eta (N, D) from the system's distribution of targets of that shape; `zero` is an array, for its type."""
    family, found = _family(distribution)
    parameters = {name: value() for name, value in found.items()}
    rows, row = targets[0], tuple(targets[1:])
    columns = []
    for name in likelihood.parameters:
        value = ops.asarray(parameters[name], like=zero)
        if family == "Multinomial" and name == "total_count":
            value = value[..., None]
        shape = _row_shape(family, name, distribution, row)
        columns.append(ops.broadcast_to(value, (rows, *shape)).reshape(rows, -1))
    return ops.concatenate(columns, axis=-1)
