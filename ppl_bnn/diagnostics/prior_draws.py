"""Draws from the prior of a program and their predictions, in NumPy if no system is needed."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import Model
from ppl_bnn.core.arrays import row_count
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import setting, whole
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.language.distributions import EVENTS, Distribution, check_no_nested, draw_shape
from ppl_bnn.language.primitives import Handler, Interpretation, Message
from ppl_bnn.posterior.approximation import Drawn, Draws
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction import families
from ppl_bnn.prediction.prediction import Prediction

Shape = tuple[int, ...]
_UNCHANGED = contextlib.nullcontext()


@dataclass(frozen=True)
class Prior(Method):
    """Independent draws from the prior, w ~ p(w); the targets only determine the units.

    A parameter without a prior keeps the value at which a fit would start it.

    Parameters
    ----------
    draws : int
        Number of draws.
    """

    draws: int = setting(500, whole(2))

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        u = problem.program.prior_draws(problem.x, problem.y, problem.seed, self.draws)
        return Outcome(Drawn(u), run_seconds=watch(), target="the prior")


def prior_predictive(
    model: Model,
    x: Any,
    y: Any,
    *,
    draws: int = 500,
    seed: int = 0,
    ppl: str = "numpyro",
    observed: str | None = None,
    standardise: bool = False,
    feature_names: tuple[str, ...] | None = None,
    class_names: Sequence[str] | None = None,
) -> Posterior:
    """The prior of `model` as a `Posterior`, whose `predict(x)` is the prior predictive distribution.

        p(y | x) = E_{w ~ p(w)} p(y | x, w).

    Parameters
    ----------
    model : Model
        The model.
    x : array or dict of array
        Inputs (N, F), which determine the shapes of the model.
    y : array
        Targets (N,) or (N, K). They determine shapes and, with `standardise`, units; predictions are in the units of y.
    draws : int
        Number of draws.
    seed : int
        Seed of the draws.
    ppl : str
        The system that draws, "numpyro" or "pyro".
    observed : str, optional
        The observed site of a plain NumPyro or Pyro model.
    standardise : bool
        Whether the prior is meant for standardised inputs and targets.
    feature_names, class_names : sequence of str, optional
        Names of the columns of x, and of the classes.

    Returns
    -------
    Posterior
        Draws from the prior, which predict, plot and export as those of a posterior.

    Raises
    ------
    InputError, ModelError, UnsupportedError
        Invalid input, an invalid model, or a prior that cannot be drawn from; raised before anything is drawn.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> prior = bnn.prior_predictive(model, table.x, table.y, draws=50, standardise=True)
    >>> prior.predict(table.x).sample(10, seed=0).shape
    (10, 442)
    """
    classes = None if class_names is None else tuple(class_names)
    names: Any = {"observed": observed, "feature_names": feature_names, "class_names": classes}
    prior = Prior(draws=draws, ppl=ppl)
    return prior.fit(model, x, y, seed=seed, device="cpu", standardise=standardise, **names)


def _normal(rng: np.random.Generator, a: Draws, shape: Shape) -> np.ndarray:
    return a.get("loc", 0.0) + a["scale"] * rng.standard_normal(shape)


class _Draws:
    """Replaces `scipy.stats` in the table of families by plain draws, since freezing distributions is slow."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...]):
        self._options = {"size": shape, "random_state": rng}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(getattr(scipy.stats, name).rvs, **self._options)


def _of_scipy(frozen: Callable[..., Any], rng: np.random.Generator, a: Draws, shape: Shape) -> Any:
    return frozen(_Draws(rng, shape), **a)


_NUMBERS = {name: row.frozen for name, row in families.FAMILIES.items() if row.kind == "number"}
_SAMPLERS: dict[str, Callable[[np.random.Generator, Draws, Shape], Any]] = {
    **{name: functools.partial(_of_scipy, frozen) for name, frozen in _NUMBERS.items() if frozen},
    # The most frequent one, without the checks of SciPy. Two families are not distributions by themselves; they are
    # drawn from the distribution of starting values.
    **dict.fromkeys(("Normal", "EmpiricalBayes", "ImproperLogUniform"), _normal),
    "NormalMixture": lambda rng, a, shape: (
        rng.choice(a["scales"], size=shape, p=a["weights"]) * rng.standard_normal(shape)
    ),
    "Dirichlet": lambda rng, a, shape: _dirichlet(rng, a["concentration"], shape),
    "MultivariateNormal": lambda rng, a, shape: _multivariate(rng, a, shape),
    "MultivariateLogNormal": lambda rng, a, shape: np.exp(_multivariate(rng, a, shape)),
    "KroneckerNormal": lambda rng, a, shape: _kronecker(rng, a, shape),
    "LKJCholesky": lambda rng, a, shape: _lkj(rng, float(a["concentration"]), shape),
}


def drawn_in_numpy(spec: Distribution, rng: np.random.Generator, rows: int | None = None) -> np.ndarray:
    """One draw of a distribution in NumPy, of its own shape; with `rows`, the size of its plate, one for each row."""
    family = spec.family
    known, expected = family in _SAMPLERS, f"a family among {', '.join(_SAMPLERS)}"
    UnsupportedError.check(known, "a draw in NumPy", expected, family, "bnn.prior_predictive")
    check_no_nested(spec)
    arrays = {name: value for name, value in spec.arguments.items() if not isinstance(value, str)}
    given: dict[str, Any] = {name: np.asarray(value, dtype=float) for name, value in arrays.items()}
    shape = draw_shape(spec)
    if rows is not None:
        own = given[EVENTS[family]].ndim if family in EVENTS else {"LKJCholesky": 2}.get(family, 0)
        batch = shape[: len(shape) - own - spec.event_dims]
        shape = np.broadcast_shapes(batch, (rows,)) + shape[len(batch) :]
    return np.asarray(_SAMPLERS[family](rng, given, shape), dtype=float)


def _dirichlet(rng: np.random.Generator, concentration: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    parts = rng.gamma(concentration, size=shape)
    return parts / parts.sum(axis=-1, keepdims=True)


def _multivariate(rng: np.random.Generator, given: Draws, shape: Shape) -> np.ndarray:
    loc, factor = given["loc"], given["scale_tril"]
    batch = shape[: len(shape) - loc.ndim]
    return loc + (rng.standard_normal((*batch, len(factor))) @ factor.T).reshape(shape)


def _kronecker(rng: np.random.Generator, given: Draws, shape: Shape) -> np.ndarray:
    loc, precisions = given["loc"], given["precisions"]
    batch = shape[: len(shape) - loc.ndim]
    z = rng.standard_normal((*batch, *precisions.shape)) / np.sqrt(precisions)
    return loc + (given["left_vectors"] @ z @ given["right_vectors"].T).reshape(shape)


def _lkj(rng: np.random.Generator, concentration: float, shape: tuple[int, ...]) -> np.ndarray:
    """Cholesky factors by partial correlations (Lewandowski, Kurowicka and Joe 2009).

    Those of column i are 2 B - 1 with B ~ Beta(b, b), b = concentration + (D - 2 - i) / 2, times what is left of the
    row.
    """
    size = shape[-1]
    factor = np.zeros(shape)
    left = np.ones(shape[:-1])
    for column in range(size - 1):
        half = concentration + 0.5 * (size - 2 - column)
        partial = 2.0 * rng.beta(half, half, size=(*shape[:-2], size - 1 - column)) - 1.0
        factor[..., column, column] = left[..., column]
        factor[..., column + 1 :, column] = partial * left[..., column + 1 :]
        left[..., column + 1 :] *= np.sqrt(1.0 - partial**2)
    factor[..., -1, -1] = left[..., -1]
    return factor


class PriorDraw(Interpretation):
    """One draw of each random variable from its prior; the targets are left out.

    `drawn` is site -> (its distribution, its value); `f` and `likelihood` are those at the end of the model.
    """

    def __init__(self, rng: np.random.Generator):
        super().__init__()
        self.rng = rng
        self.drawn: dict[str, tuple[Distribution, np.ndarray]] = {}
        self.coupled = False
        self.heard = False
        self._rows: int | None = None

    def process(self, msg: Message) -> None:
        self.heard = True
        super().process(msg)
        arguments = msg.arguments
        if msg.kind == "sample" and arguments["obs"] is not None:
            msg.answer(arguments["obs"])
        elif msg.kind == "sample":
            spec = arguments["distribution"]
            msg.answer(drawn_in_numpy(spec, self.rng, self._rows))
            self.drawn[msg.name] = (spec, msg.value)
        elif msg.kind == "param":
            init = arguments["init"]
            random = isinstance(init, Distribution)
            msg.answer(drawn_in_numpy(init, self.rng) if random else np.asarray(init, dtype=float))
        elif msg.kind == "rows":
            self._rows, plate = arguments["n"], contextlib.ExitStack()
            plate.callback(setattr, self, "_rows", None)
            msg.answer(plate)
        elif msg.kind == "coupled":
            self.coupled = True


class RecordedMaps(Handler):
    """Records the `names` of the linear maps of a run in order, and their `work`, the multiplications of all rows."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.work = 0

    def after(self, msg: Message) -> None:
        if msg.kind in ("linear", "conv"):
            weight = msg.arguments["weight"]
            self.work += int(np.size(msg.value)) * int(np.size(weight)) // int(np.shape(weight)[-1])
            if msg.name not in self.names:
                self.names.append(msg.name)


class UnitGain(Handler):
    """Rescales a linear map so that its output has the size of its input."""

    def __init__(self, name: str):
        self.name = name

    def after(self, msg: Message) -> None:
        if msg.kind in ("linear", "conv") and msg.name == self.name:
            gain = root_mean_square(msg.value) / max(root_mean_square(msg.arguments["x"]), 1e-300)
            if 0.0 < gain < math.inf:
                msg.value = msg.value / gain


def root_mean_square(values: Any) -> float:
    """Root mean square of the values."""
    return float(np.sqrt(np.mean(np.square(values, dtype=float))))


@dataclass(frozen=True, eq=False)
class PriorDraws:
    """Draws that are finite: eta (S, N, D), the prediction of y, and the share of draws that are not."""

    eta: np.ndarray
    prediction: Prediction | None
    overflowed: float


def draws_at(model: Model, x: Any, count: int, seed: int, change: Any = _UNCHANGED) -> PriorDraws:
    """Finite draws from the prior of a model, run under the handler `change`, and their predictions at the inputs x.

    Draws that are not finite are left out and counted.
    """
    etas, form = [], None
    for rng in np.random.default_rng(seed).spawn(count):
        run = PriorDraw(rng)
        try:
            with np.errstate(all="ignore"), run, change:
                model(x, None)
                eta = np.asarray(run.predictor, dtype=float)
        except InputError:
            # A distribution raises for a scale that is zero or infinite: an earlier draw had overflowed.
            continue
        form = run.likelihood.form
        if np.isfinite(eta).all():
            etas.append(eta)
    if not etas or form is None:
        return PriorDraws(np.empty((0, row_count(x), 1)), None, 1.0)
    stacked = np.stack(etas)
    with np.errstate(all="ignore"):
        family, parameters = form.mixture_parameters(stacked)
    parameters = {name: np.asarray(value, dtype=float) for name, value in parameters.items()}
    good = np.ones(len(stacked), dtype=bool)
    for name, value in parameters.items():
        least = 0.0 if name in ("scale", "rate", "concentration", "df") else -np.inf
        usable = np.isfinite(value) & (value > least)
        good &= usable.reshape(len(value), -1).all(axis=1)
    kept = {name: value[good] for name, value in parameters.items()}
    prediction = Prediction(family, kept) if good.any() else None
    return PriorDraws(stacked[good], prediction, 1.0 - int(good.sum()) / count)
