"""The base class of likelihoods, and formulas that several of them share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np

from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops

Shape = tuple[int, ...]


class Likelihood:
    """The distribution of y given the network output f; a frozen dataclass for each kind of target.

    Attributes
    ----------
    family : str
        Name of the likelihood; for a model of a system, the family of its observed distribution.
    task : {"regression", "classification"}
        Kind of the targets.
    columns_with_units : int or None
        Number of the first columns of y that have units; the others are marks, such as events.
    classes : int or None
        Number of classes, if known.
    outputs : tuple
        (whether so many network outputs fit, what is expected, advice).
    positive : tuple of str
        Names of the parameters that are positive numbers, or sampled values: one, or one per output.
    always_in_eta : tuple of str
        Those of them whose logarithm is part of eta even where they are known.
    arrays : tuple of str
        Names of the parameters that are arrays, which are part of eta.
    per_output : bool
        Whether y has a column for each network output; otherwise y is (N,).
    standardises : bool
        Whether the targets have units that a fit may change. Counts, for instance, have none.
    has_fisher : bool
        Whether the Fisher information has a closed form.
    has_kink : bool
        Whether the log density has a kink in eta.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> likelihood = bnn.likelihoods.Gaussian(0.5)
    >>> isinstance(likelihood, bnn.likelihoods.Likelihood), likelihood.task, likelihood.standardises
    (True, 'regression', True)
    """

    family: str
    task: str = "regression"
    columns_with_units: ClassVar[int | None] = None
    classes: int | None = None
    outputs: ClassVar[tuple[Callable[[int], bool], str, str]] = (lambda k: k >= 1, "network outputs", "")
    positive: ClassVar[tuple[str, ...]] = ()
    always_in_eta: ClassVar[tuple[str, ...]] = ()
    arrays: ClassVar[tuple[str, ...]] = ()
    # What to try where a parameter has a value per row.
    advice_for_rows: ClassVar[str] = "a number as {}"
    per_output: ClassVar[bool] = False
    standardises: bool = True
    has_fisher: bool = True
    has_kink: bool = False

    def __post_init__(self) -> None:
        for name in self.positive:
            value = getattr(self, name)
            # Sampled values are arrays, and a form has no value.
            if isinstance(value, int | float) and not 0 < value < math.inf:
                where = f"likelihoods.{self.family}"
                raise InputError.of(where, f"a positive {name}", repr(value), f"{name}=1.0")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "family" not in vars(cls):
            cls.family = cls.__name__

    @property
    def form(self) -> Self:
        """The likelihood without the values of one run."""
        dropped = dict.fromkeys([*self.in_eta, *self.arrays])
        return dataclasses.replace(self, **dropped)  # pyright: ignore[reportArgumentType]

    @property
    def in_eta(self) -> list[str]:
        """Names of the parameters whose logarithms are part of eta: all that are not known."""
        known = [name for name in self.positive if is_known(getattr(self, name))]
        return [name for name in self.positive if name in self.always_in_eta or name not in known]

    def check(self, f: Shape, y: Shape | None) -> None:
        """Refuse shapes of f and y that do not fit."""
        fits, expected, advice = self.outputs
        ModelError.check(fits(f[1]), self.family, expected, f"f of shape {f}", advice)
        for name in self.positive:
            shape = tuple(getattr(getattr(self, name), "shape", ()))
            expected, got = f"one {name}, or one per output, {f[1:]}", f"{name} of shape {shape}"
            good, advice = shape in ((), f[1:]), self.advice_for_rows.format(name)
            ModelError.check(good, self.family, expected, got, advice)
        wanted = self.target_shape(f)
        expected = f"y of shape {wanted} for f of shape {f}"
        advice = "y[:, 0]" if y == (*wanted, 1) else f"targets of shape {wanted}"
        ModelError.check(y in (None, wanted), self.family, expected, f"y of shape {y}", advice)

    def target_shape(self, f: Shape) -> Shape:
        """The shape of y for f of this shape."""
        return f if self.per_output and f[1] > 1 else f[:1]

    def check_values(self, y: np.ndarray) -> None:
        """Refuse targets that have no probability."""

    def distribution(self, f: Any) -> dist.Distribution:
        """The distribution of y."""
        raise NotImplementedError

    def predictor(self, f: Any) -> Any:
        """eta (N, D), all parameters of the distribution of a row: f, and K columns for each sampled parameter."""
        logs = (ops.log(getattr(self, name)) for name in self.in_eta)
        columns = [ops.broadcast_to(ops.asarray(log, like=f), tuple(f.shape)) for log in logs]
        return ops.concatenate([f, *columns]) if columns else f

    def split(self, eta: Any) -> list[Any]:
        """f and the parameters of `positive`, each (..., K)."""
        f, *logs = parts(eta, 1 + len(self.in_eta))
        values = dict(zip(self.in_eta, map(ops.exp, logs), strict=True))
        known = (name for name in self.positive if name not in values)
        values |= {name: getattr(self, name) * ops.ones_like(f) for name in known}
        return [f, *(values[name] for name in self.positive)]

    def fisher(self, eta: Any) -> Any:
        """The Fisher information in eta, (N, D, D)."""
        root = self.fisher_root(eta)
        return ops.einsum("nic,njc->nij", root, root)

    def fisher_root(self, eta: Any) -> Any:
        """R (N, D, C) with R R' the Fisher information."""
        raise NotImplementedError

    def fisher_parts(self, eta: Any) -> tuple[Any, Any, float]:
        """d (N, D), V (N, D, C) and a sign: the Fisher information is diag(d) + sign V V'.

        It is for many outputs, where no matrix (D, D) of a row should be held.
        """
        return 0.0 * eta, self.fisher_root(eta), 1.0

    def score(self, eta: Any, y: Any) -> Any:
        """The gradient of log p(y | eta) in eta, (N, D)."""
        raise NotImplementedError

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        """Family and parameters of a `Prediction`, in NumPy, for eta (..., N, D)."""
        raise NotImplementedError

    def jensen_gap(self, mean: Any, variance: Any) -> Any:
        """E[log p(y | f)] - log p(y | mean), summed over rows, for normal f with this mean and variance, both (N, K).

        If log p(y | f) is y f less a convex function of f, this does not depend on y, and is minus the gap of Jensen's
        inequality. Without a closed form it is a quadrature, a lower bound, or an UnsupportedError.
        """
        wanted = (
            "a likelihood whose expectation has a closed form: Gaussian, Poisson, Bernoulli or Categorical"
        )
        raise UnsupportedError.of("closed form", wanted, self.family, "estimator='local' or 'plain'")


@runtime_checkable
class HasObservedInformation(Protocol):
    """A likelihood whose information depends on how each row was observed."""

    def information_root(self, eta: Any, y: Any) -> Any:
        """R (N, D, C) with R R' the information of each row as it was observed."""
        ...


def is_known(value: Any) -> bool:
    """Whether a value is a plain number. A draw of a sampled scalar is an `np.float64`: a `float`, but not known."""
    return isinstance(value, int | float) and not isinstance(value, np.generic)


def for_one_output(value: Any) -> Any:
    """The value of the only output, without its axis."""
    return value if isinstance(value, int | float) or len(value.shape) == 0 else value[..., 0]


def location_scale(family: str, f: Any, **values: Any) -> dist.Distribution:
    """A location-scale distribution around f, for one output or several; `values` are its other parameters."""
    if f.shape[-1] > 1:
        return dist.distribution(family, loc=f, **values).to_event(1)
    single = {name: for_one_output(value) for name, value in {"loc": f, **values}.items()}
    return dist.distribution(family, **single)


def parts(eta: Any, count: int) -> list[Any]:
    """The blocks of eta, (..., D / count) each."""
    size = eta.shape[-1] // count
    return [eta[..., k * size : (k + 1) * size] for k in range(count)]


def of_one_output(**parameters: Any) -> dict[str, Any]:
    """Parameters (..., K) of a prediction, without the last axis where K = 1."""
    if next(iter(parameters.values())).shape[-1] == 1:
        return {name: value[..., 0] for name, value in parameters.items()}
    return parameters


def diagonal_blocks(blocks: list[list[Any]]) -> Any:
    """The matrices (N, B K, B K) made of B x B diagonal blocks, each given as (N, K)."""
    rows = [ops.concatenate([ops.diagonal_matrix(block) for block in row]) for row in blocks]
    return ops.concatenate(rows, -2)
