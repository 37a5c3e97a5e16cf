"""The result of isotonic recalibration: a prediction whose distribution function is mapped.

    G_n(y) = R(F_n(y)),    R an increasing, piecewise linear map of [0, 1] onto itself, one for all rows.

Quantiles, intervals, PIT and coverage are exact. Means, CRPS and draws are computed from G at nodes of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.prediction.arguments import checked_y
from ppl_bnn.prediction.prediction import Prediction

# Nodes of a row, and the probability beyond the outermost node on either side.
NODES = 513
BEYOND = 1e-10
CONTINUOUS = ("Normal", "StudentT", "Laplace", "Weibull", "NormalMixture")
# The identity map.
STRAIGHT = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])


def tails(prediction: Prediction, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """F(y) and 1 - F(y), each with full relative precision (for Weibull the second is the difference)."""
    below = prediction.cdf(y)
    if prediction.family == "Weibull":
        return below, 1.0 - below
    return below, _mirrored(prediction).cdf(-np.asarray(y, dtype=np.float64))


def _mirrored(prediction: Prediction) -> Prediction:
    """The prediction of -y, for the symmetric families."""
    parameters = {**prediction.parameters, "loc": -prediction.parameters["loc"]}
    return replace(prediction, parameters=parameters)


@dataclass(frozen=True, eq=False)
class MappedPrediction(Prediction):
    """A mixture whose distribution function F is mapped to R(F), for one continuous number per row.

    Parameters
    ----------
    family, parameters, log_weights, epistemic_within, class_names, censored, labels
        The mixture, as in `Prediction`.
    knots : ndarray
        Shape (3, M): F, 1 - F and R(F) at the points between which R is linear, from (0, 1, 0) to (1, 0, 1). Both tails
        are stored, since targets can be at 1 - F = 1e-30 where a prediction is much too certain.

    Raises
    ------
    UnsupportedError
        For another kind of prediction.
    InputError
        For invalid knots.

    Notes
    -----
    mean, variance, absolute_deviation, mean_difference and sample take G to be linear between 513 nodes, up to 1e-10 of
    probability on either side: their error is about 1e-4 of the standard deviation.

    log_prob is refused because the slope of R between two knots depends on two held-out rows only. component_mean,
    epistemic and aleatoric are refused because a mapped mixture has no components.
    """

    knots: np.ndarray = field(default_factory=lambda: STRAIGHT)

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.family in CONTINUOUS and len(self.shape) == 1
        expected = f"one continuous number per row ({', '.join(CONTINUOUS)}) to map its distribution"
        advice = "each output by itself" if len(self.shape) == 2 else "a temperature for classes"
        UnsupportedError.check(good, "", expected, super().__repr__(), advice)
        knots = np.array(self.knots, dtype=np.float64)
        good = knots.ndim == 2 and len(knots) == 3 and knots.shape[1] >= 2 and np.isfinite(knots).all()
        if good:
            below, above, after = np.diff(knots, axis=1)
            good = (below >= 0.0).all() and (above <= 0.0).all() and (after > 0.0).all()
            good &= (knots[:, [0, -1]] == STRAIGHT).all()
            good &= np.allclose(knots[0] + knots[1], 1.0, atol=1e-12)
        expected = "F, 1 - F and R(F) at points from (0, 1, 0) to (1, 0, 1), (3, M)"
        InputError.check(good, "knots", expected, f"shape {knots.shape}", "recalibrate")
        knots.flags.writeable = False
        object.__setattr__(self, "knots", knots)

    def __repr__(self) -> str:
        return f"Mapped{super().__repr__()}"

    @cached_property
    def before(self) -> Prediction:
        """The mixture without the map, with distribution function F."""
        parts = (self.family, self.parameters, self.log_weights, self.epistemic_within)
        return Prediction(*parts, censored=self.censored)

    # --- exact ---

    def cdf(self, y: Any) -> np.ndarray:
        """Mapped distribution function G_n(y_n) = R(F_n(y_n)), for y as in `Prediction.cdf`."""
        below, above = tails(self.before, y)
        f, rest, r = self.knots
        upper = 1.0 - np.interp(above, rest[::-1], 1.0 - r[::-1])
        return np.where(below <= 0.5, np.interp(below, f, r), upper)

    def quantile(self, q: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """The y with G_n(y) = q, as `Prediction.quantile`: the quantile of the mixture at R^-1(q)."""
        levels = np.asarray(q, dtype=np.float64)
        if levels.ndim > 1 or not ((levels > 0.0) & (levels < 1.0)).all():
            return self.before.quantile(q)  # raises the error
        f, rest, r = self.knots
        each = np.atleast_1d(levels)
        below, above = np.interp(each, r, f), np.interp(1.0 - each, 1.0 - r[::-1], rest[::-1])
        result = np.empty((len(each), self.rows))
        direct = (below <= 0.5) | (self.family == "Weibull")
        if direct.any():
            result[direct] = self.before.quantile(below[direct])
        if not direct.all():
            result[~direct] = -_mirrored(self.before).quantile(above[~direct])
        return result.reshape(levels.shape + self.shape)

    # --- computed from the nodes ---

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Nodes (513, N), dense around the median, and G there, with the probability beyond the ends at the ends."""
        low, lower, median, upper, high = self.quantile([BEYOND, 0.25, 0.5, 0.75, 1.0 - BEYOND])
        width = upper - lower
        start, end = np.arcsinh((low - median) / width), np.arcsinh((high - median) / width)
        nodes = median + width * np.sinh(np.linspace(start, end, NODES))
        levels = self.cdf(nodes)
        levels[0], levels[-1] = 0.0, 1.0
        return nodes, levels

    def _moment(self, power: int, about: np.ndarray) -> np.ndarray:
        """E (Y - about)^power of a piecewise uniform density, for powers 1 and 2."""
        nodes, levels = self._table
        low, high = nodes[:-1] - about, nodes[1:] - about
        pieces = 0.5 * (low + high) if power == 1 else (low * low + low * high + high * high) / 3.0
        return np.sum(np.diff(levels, axis=0) * pieces, axis=0)

    @cached_property
    def mean(self) -> np.ndarray:
        """E[y], (N,)."""
        self.before.component_mean()  # raises if there is no mean: the slope of R is bounded
        median = self.quantile(0.5)
        return median + self._moment(1, median)

    @cached_property
    def variance(self) -> np.ndarray:
        """Var(y), (N,), in squared units of y; infinite where that of the mixture is."""
        return np.where(np.isfinite(self.before.variance), self._moment(2, self.mean), np.inf)

    @cached_property
    def mean_difference(self) -> np.ndarray:
        """E|Y - Y'| = 2 integral G (1 - G) dt of two independent draws, (N,), units of y."""
        self.before.component_mean()
        nodes, levels = self._table
        low, high = levels[:-1], levels[1:]
        pieces = 0.5 * (low + high) - (low * low + low * high + high * high) / 3.0
        return 2.0 * np.sum(np.diff(nodes, axis=0) * pieces, axis=0)

    def absolute_deviation(self, y: Any) -> np.ndarray:
        """E|Y_n - y_n| = integral |t - y_n| dG_n(t), for y as in `cdf`."""
        y = checked_y(self, y, leading=True)
        nodes, levels = self._table
        low, high, share = nodes[:-1], nodes[1:], np.diff(levels, axis=0)
        result = np.empty((y.size // self.rows, self.rows))
        for index, at in enumerate(y.reshape(-1, self.rows)):
            # Uniform between two nodes that are on one side of y, or on either side of it.
            beside = np.abs(0.5 * (low + high) - at)
            around = ((at - low) ** 2 + (high - at) ** 2) / (2.0 * (high - low))
            result[index] = np.sum(share * np.where((low < at) & (at < high), around, beside), axis=0)
        return result.reshape(y.shape)

    def sample(self, n: int, seed: int | np.random.Generator) -> np.ndarray:
        """Draws (n, N) of the mixture, each moved to the point where G has the value that F had.

        With weights (S,) a draw is still the output of one network for all rows, moved row by row.
        """
        levels = self.before.cdf(self.before.sample(n, seed))
        nodes, at_nodes = self._table
        rows = zip(levels.T, at_nodes.T, nodes.T, strict=True)
        return np.stack([np.interp(*row) for row in rows], axis=1)

    # --- undefined for a mapped mixture ---

    def log_prob(self, y: Any) -> NoReturn:
        """Not supported (see the class)."""
        expected, got = "a prediction with a density for log_prob", "an isotonic map, whose slopes are noise"
        raise UnsupportedError.of("", expected, got, "crps, or kind='spread'")

    component_log_prob = log_prob

    def component_mean(self) -> NoReturn:
        """Not supported (see the class)."""
        wanted = "a mixture of components for component_mean, mean_function_variance, epistemic and aleatoric"
        raise UnsupportedError.of("", wanted, "one whose distribution function was mapped", "`before`")

    mean_function_variance = epistemic = aleatoric = property(component_mean)  # type: ignore[assignment]

    def marginals(self) -> Prediction:
        return self
