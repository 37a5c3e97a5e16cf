"""Normalising flows as families of guides: standard normals through invertible networks, density in the same pass.

With eps ~ N(0, I) over P coordinates, z = T(eps) by a few layers and u = loc + scale A z at the end, the scale
elementwise and A = I or lower triangular with ones on its diagonal,

    log q(u) = log N(eps; 0, I) - log |det dT/deps| - sum_j log scale_j.

Every layer is made so that its Jacobian is triangular: the determinant costs nothing beside the draw. Two ways to do
so: `InverseAutoregressive` (coordinates in an order, each moved as those before it say) and `NeuralSpline` (one half of
the coordinates moved as the other half says). All mathematics is written over `ppl_bnn.language.ops`, so the same lines
run on NumPy, torch and JAX. A flow has no mean, variance or entropy in closed form. Its weights grow with P^2: it is
for a few hundred coordinates, a last layer for instance, not for all the weights of a wide network.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.protocol import Site
from ppl_bnn.core.errors import InputError, UnsupportedError, message
from ppl_bnn.inference.variational.families.base import Array, Block, Family, Parameters
from ppl_bnn.inference.variational.families.blocks import FAMILIES, FullRankBlock, NormalBlock
from ppl_bnn.language import ops

# 160 MB in float64, and an optimiser keeps four of them.
WEIGHT_LIMIT = 20_000_000
# Coordinates up to which an inverse autoregressive flow is inverted, one after the other.
SEQUENTIAL_LIMIT = 1000
# Units in a hidden layer where few coordinates would ask for fewer.
LEAST_HIDDEN = 32
# Size at the start of what the networks put out: nearly a normal, and not zero, or nothing before it would learn.
START = 0.01
# Logit of the gate at the start, so that a layer begins by handing on most of what comes (Kingma et al. 2016).
GATE = 2.0
# Share of the interval that the narrowest bin of a spline has, and the least of its slopes.
NARROWEST = 1e-3
# What the networks of a spline put out is multiplied by this. Adam moves every weight by as much as the learning rate:
# while the location is still on its way splines that were as quick would be bent to make up for it, and stay bent.
QUIET = 0.1
# Bins that leave room for shares above the narrowest.
MOST_BINS = 100


# --- rational-quadratic splines ----------------------------------------------------------------------


def rational_quadratic(
    x: Array, widths: Array, heights: Array, slopes: Array, bound: float
) -> tuple[Array, Array]:
    """(y, log dy/dx) of a monotone rational-quadratic spline on [-bound, bound], and y = x outside of it.

    Between knots (x_k, y_k) and (x_k+1, y_k+1), with w and h the sides of that box, s = h / w, d_k the slope at a knot
    and t = (x - x_k) / w,

        y     = y_k + h (s t^2 + d_k t (1 - t)) / (s + (d_k + d_k+1 - 2 s) t (1 - t))
        dy/dx = s^2 (d_k+1 t^2 + 2 s t (1 - t) + d_k (1 - t)^2) / (s + (d_k + d_k+1 - 2 s) t (1 - t))^2,

    which is increasing, continuous with its slope, and inverted by a quadratic equation (Gregory and Delbourgo 1982;
    Durkan, Bekasov, Murray and Papamakarios 2019, section 3.1).

    x (...); widths, heights (..., K): shares of the interval, positive and of sum one; slopes (..., K + 1): positive;
    ones at both ends join the tails smoothly. The leading axes are the same.
    """
    inside, safe = _within(x, bound)
    across, up = _knots(widths, bound), _knots(heights, bound)
    box = _Box.at(safe, across, across, up, slopes)
    t = (safe - box.left) / box.width
    y, log_slope = box.value(t), box.log_slope(t)
    return ops.where(inside, y, x), ops.where(inside, log_slope, ops.zeros_like(log_slope))


def rational_quadratic_inverse(
    y: Array, widths: Array, heights: Array, slopes: Array, bound: float
) -> tuple[Array, Array]:
    """(x, log dy/dx at x): the inverse of `rational_quadratic`, exact, with the same arguments.

    With r = y - y_k, t is the root in [0, 1] of a t^2 + b t + c = 0 for a = h (s - d_k) + r (d_k + d_k+1 - 2 s),
    b = h d_k - r (d_k + d_k+1 - 2 s), c = -s r, in the form that does not cancel.
    """
    inside, safe = _within(y, bound)
    across, up = _knots(widths, bound), _knots(heights, bound)
    box = _Box.at(safe, up, across, up, slopes)
    t = box.solve(safe)
    x, log_slope = box.left + t * box.width, box.log_slope(t)
    return ops.where(inside, x, y), ops.where(inside, log_slope, ops.zeros_like(log_slope))


def _within(x: Array, bound: float) -> tuple[Array, Array]:
    """Where x lies in the interval, and x with zero elsewhere: what is not taken must not make a gradient NaN."""
    inside = (x > -bound) & (x < bound)
    return inside, ops.where(inside, x, ops.zeros_like(x))


def _knots(shares: Array, bound: float) -> Array:
    """Shares (..., K) of [-bound, bound] to its knots (..., K + 1), the two ends to the bit."""
    left = ops.zeros_like(shares[..., :1]) - bound
    return ops.concatenate([left, left + 2.0 * bound * ops.cumsum(shares[..., :-1]), -left])


@dataclass(frozen=True)
class _Box:
    """The piece of a spline that each number falls into, all of one shape."""

    left: Array
    width: Array
    bottom: Array
    height: Array
    slope: Array
    next_slope: Array

    @classmethod
    def at(cls, where: Array, along: Array, across: Array, up: Array, slopes: Array) -> _Box:
        """The box of each number of `where` (...), by the knots `along` (..., K + 1) of its own axis."""
        index = ops.sum(where[..., None] >= along[..., 1:-1], -1)[..., None]
        left, right, bottom, top, slope, next_slope = (
            ops.take_along(values, index)[..., 0]
            for values in (
                across[..., :-1],
                across[..., 1:],
                up[..., :-1],
                up[..., 1:],
                slopes[..., :-1],
                slopes[..., 1:],
            )
        )
        return cls(left, right - left, bottom, top - bottom, slope, next_slope)

    @property
    def mean_slope(self) -> Array:
        return self.height / self.width

    @property
    def bend(self) -> Array:
        return self.slope + self.next_slope - 2.0 * self.mean_slope

    def value(self, t: Array) -> Array:
        both = t * (1.0 - t)
        above = self.mean_slope * t * t + self.slope * both
        return self.bottom + self.height * above / (self.mean_slope + self.bend * both)

    def log_slope(self, t: Array) -> Array:
        both = t * (1.0 - t)
        ends = self.next_slope * t * t + self.slope * (1.0 - t) * (1.0 - t)
        above = ends + 2.0 * self.mean_slope * both
        return 2.0 * ops.log(self.mean_slope / (self.mean_slope + self.bend * both)) + ops.log(above)

    def solve(self, y: Array) -> Array:
        rise = y - self.bottom
        a = self.height * (self.mean_slope - self.slope) + rise * self.bend
        b = self.height * self.slope - rise * self.bend
        c = -self.mean_slope * rise
        return -2.0 * c / (b + ops.sqrt(b * b - 4.0 * a * c))


# --- what all flows share ---------------------------------------------------------------------------


@dataclass(frozen=True)
class FlowBlock(Block):
    """u = loc + softplus(rho) A T(eps). params: those of `end`, which are loc, rho and A, and the weights of the
    layers, "<layer>.<name>"."""

    layers: int
    hidden: int

    @property
    def has_centre(self) -> bool:
        return False

    @property
    @abstractmethod
    def weight_count(self) -> int:
        """How many weights the layers have, entries under a mask included."""

    @abstractmethod
    def start_layer(self, layer: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Weights at which a layer is a constant times the identity, but for terms of the order of START."""

    @abstractmethod
    def forward_layer(self, params: Parameters, layer: int, x: Array) -> tuple[Array, Array]:
        """(y, log |det dy/dx|) of one layer, (..., P) to (..., P) and (...)."""

    @abstractmethod
    def inverse_layer(self, params: Parameters, layer: int, y: Array) -> tuple[Array, Array]:
        """(x, log |det dy/dx| at x): the inverse of `forward_layer`."""

    @property
    def gain(self) -> float:
        """The constant that a layer multiplies by at the start."""
        return 1.0

    @property
    def end(self) -> NormalBlock | FullRankBlock:
        """What follows the layers: a normal by itself, where they do nothing."""
        return NormalBlock(self.sites)

    def _ending(self, params: Parameters) -> NormalBlock | FullRankBlock:
        """`end`, or what a flow that was stored without A ended in."""
        return self.end if "lower" in params else NormalBlock(self.sites)

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        params = self.end.start(loc, np.asarray(scale) / self.gain**self.layers, rng)
        for layer in range(self.layers):
            params |= {f"{layer}.{name}": value for name, value in self.start_layer(layer, rng).items()}
        return params

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        z, total = eps, ops.zeros_like(eps[..., 0])
        for layer in range(self.layers):
            z, log_det = self.forward_layer(params, layer, z)
            total = total + log_det
        u, at_z = self._ending(params).draw(params, z)
        # The end takes z for a standard normal, which eps is.
        return u, at_z + 0.5 * (ops.sum(z * z, -1) - ops.sum(eps * eps, -1)) - total

    def log_prob(self, params: Parameters, u: Array) -> Array:
        end = self._ending(params)
        z, at_u = end.standardised(params, u), end.log_prob(params, u)
        eps, total = z, ops.zeros_like(z[..., 0])
        for layer in reversed(range(self.layers)):
            eps, log_det = self.inverse_layer(params, layer, eps)
            total = total + log_det
        return at_u + 0.5 * (ops.sum(z * z, -1) - ops.sum(eps * eps, -1)) - total


def _checked(family: str, block: FlowBlock) -> list[Block]:
    """The block, if its weights are not too many."""
    if block.weight_count > WEIGHT_LIMIT:
        raise InputError(
            f"{family}: "
            + message(
                f"at most {WEIGHT_LIMIT} weights in the networks of a flow, which grow with the square of its size",
                f"{block.weight_count} weights over {block.size} coordinates ({', '.join(block.names)})",
                f"the flow on the last layer alone, guide={{'output': {family!r}, '*': 'normal'}}, or a smaller hidden",
            )
        )
    return [block]


def _check_whole(family: str, what: str, value: Any, least: int, most: int | None = None) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(
            f"{family} {what}: " + message(f"a whole number {span}", repr(value), f"{what}={max(least, 4)}")
        )


def _check_network(family: str, layers: object, hidden: object) -> None:
    _check_whole(family, "layers", layers, 1)
    if hidden is not None:
        _check_whole(family, "hidden", hidden, 1)


# --- inverse autoregressive ------------------------------------------------------------------------


@dataclass(frozen=True)
class InverseAutoregressiveBlock(FlowBlock):
    """An inverse autoregressive flow over P coordinates.

    Weights of a layer: in.weight (P, H), in.bias (H,), out.weight (H, 2 P), out.bias (2 P,), the first P of 2 P columns
    m and the others the gate, and direct (P, P) for m. Entries under a mask take no part and stay as they are.
    """

    @property
    def weight_count(self) -> int:
        size, hidden = self.size, self.hidden
        return self.layers * (size * hidden + hidden + 2 * size * (hidden + 1) + size**2)

    @property
    def gain(self) -> float:
        return 1.0 / (1.0 + math.exp(-GATE))

    @functools.cached_property
    def _degrees(self) -> np.ndarray:
        """Of each hidden unit, how many coordinates it may see; ascending, evenly from 1 to P - 1."""
        return np.round(np.linspace(1, max(1, self.size - 1), self.hidden)).astype(int)

    @functools.cached_property
    def _masks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which entries of in.weight, out.weight and direct take part."""
        place = np.arange(1, self.size + 1)
        into = place[:, None] <= self._degrees
        out = self._degrees[:, None] < place
        direct = place[:, None] < place
        return into, np.tile(out, 2), direct

    def start_layer(self, layer: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        into, out, direct = self._masks
        size, hidden = self.size, self.hidden
        return {
            "in.weight": rng.standard_normal((size, hidden)) * into / np.sqrt(self._degrees),
            # Without biases every m would be an odd function of eps, and no curved posterior would be seen at first.
            "in.bias": rng.standard_normal(hidden),
            "out.weight": START * rng.standard_normal((hidden, 2 * size)) * out / math.sqrt(hidden),
            "out.bias": np.concatenate([np.zeros(size), np.full(size, GATE)]),
            "direct": START * rng.standard_normal((size, size)) * direct / math.sqrt(size),
        }

    def _ordered(self, layer: int, x: Array) -> Array:
        """The coordinates in the order of a layer: each sees them the other way round from the one before."""
        return ops.flip(x) if layer else x

    def forward_layer(self, params: Parameters, layer: int, x: Array) -> tuple[Array, Array]:
        x = self._ordered(layer, x)
        into, out, direct = (
            params[f"{layer}.{name}"] * ops.asarray(mask, like=params[f"{layer}.{name}"])
            for name, mask in zip(("in.weight", "out.weight", "direct"), self._masks, strict=True)
        )
        h = ops.tanh(x @ into + params[f"{layer}.in.bias"])
        raw = h @ out + params[f"{layer}.out.bias"]
        m, gate = raw[..., : self.size] + x @ direct, raw[..., self.size :]
        return ops.sigmoid(gate) * x + ops.sigmoid(-gate) * m, -ops.sum(ops.softplus(-gate), -1)

    def inverse_layer(self, params: Parameters, layer: int, y: Array) -> tuple[Array, Array]:
        into, into_bias = params[f"{layer}.in.weight"], params[f"{layer}.in.bias"]
        out = params[f"{layer}.out.weight"].reshape(self.hidden, 2, self.size)
        out_bias = params[f"{layer}.out.bias"].reshape(2, self.size)
        direct = params[f"{layer}.direct"]
        # Units in ascending degree: those that see the coordinates found so far are the first ones.
        ready = np.searchsorted(self._degrees, np.arange(self.size + 1), side="right").tolist()
        x, h, total = y[..., :0], y[..., :0], ops.zeros_like(y[..., 0])
        for place in range(self.size):
            raw = h @ out[: ready[place], :, place] + out_bias[:, place]
            m, gate = raw[..., 0] + x @ direct[:place, place], raw[..., 1]
            found = (y[..., place] - ops.sigmoid(-gate) * m) / ops.sigmoid(gate)
            total = total - ops.softplus(-gate)
            x = ops.concatenate([x, found[..., None]])
            new = slice(ready[place], ready[place + 1])
            h = ops.concatenate([h, ops.tanh(x @ into[: place + 1, new] + into_bias[new])])
        return self._ordered(layer, x), total

    def log_prob(self, params: Parameters, u: Array) -> Array:
        """log q(u) (...) by inversion: the work of one draw, done in P steps per layer that follow one another.

        Raises
        ------
        UnsupportedError: more than SEQUENTIAL_LIMIT coordinates.
        """
        if self.size > SEQUENTIAL_LIMIT:
            raise UnsupportedError(
                "log q of an inverse autoregressive flow: "
                + message(
                    f"at most {SEQUENTIAL_LIMIT} coordinates, since it is inverted one coordinate after the other",
                    f"{self.size} coordinates ({', '.join(self.names)})",
                    "guide='spline', whose inverse costs what a draw costs, or the flow on the last layer alone",
                )
            )
        return super().log_prob(params, u)


@dataclass(frozen=True)
class InverseAutoregressive(Family):
    """Inverse autoregressive flow: `layers` masked networks, the order of coordinates reversed between them.

    In a layer the j-th coordinate is moved by what those before it say, behind a gate that keeps it stable,

        y_j = sigmoid(s_j) x_j + (1 - sigmoid(s_j)) m_j,    (m_j, s_j) a function of x_1, ..., x_j-1,

    so the Jacobian is triangular and log |det dy/dx| = sum_j log sigmoid(s_j). (m, s) come from one network with a
    hidden layer of tanh units, masked so that each output sees what it may (MADE), and masked linear terms in m
    beside it, so that any covariance can be reached; s is bounded, so the inverse
    of a point far out is finite.

    layers: how many. hidden: units in each hidden layer; None: P, and at least 32.

    Cost: about 4 P^2 weights per layer with hidden=None; a draw and its log q in one pass. log q of other points takes
    P steps per layer that follow one another, and is refused above 1000 coordinates.

    Raises
    ------
    InputError: impossible options; more than 20 million weights.

    Source: Kingma, Salimans, Jozefowicz, Chen, Sutskever and Welling (2016), Improving variational inference with
    inverse autoregressive flow; Germain, Gregor, Murray and Larochelle (2015), MADE.
    """

    layers: int = 2
    hidden: int | None = None
    name: ClassVar[str] = "iaf"

    def __post_init__(self) -> None:
        _check_network("InverseAutoregressive", self.layers, self.hidden)

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        size = sum(site.size for site in sites)
        hidden = max(LEAST_HIDDEN, size) if self.hidden is None else self.hidden
        return _checked(self.name, InverseAutoregressiveBlock(tuple(sites), self.layers, hidden))


# --- neural spline ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NeuralSplineBlock(FlowBlock):
    """A flow of coupling layers with rational-quadratic splines over P coordinates.

    Weights of a layer that moves M coordinates as P - M others say: in.weight (P - M, H), in.bias (H,), out.weight
    (H, M (3 K - 1)), out.bias (M (3 K - 1),). A single coordinate has no others: its layers have out.bias alone.
    """

    bins: int
    bound: float

    @property
    def end(self) -> FullRankBlock:
        return FullRankBlock(self.sites)

    def _sizes(self, layer: int) -> tuple[int, int]:
        """How many coordinates say how many others move: the first half the second half, in odd layers the reverse."""
        half = self.size // 2
        return (self.size - half, half) if layer % 2 and half else (half, self.size - half)

    @property
    def weight_count(self) -> int:
        total = 0
        for layer in range(self.layers):
            given, moved = self._sizes(layer)
            raw = moved * (3 * self.bins - 1)
            total += raw + (given > 0) * self.hidden * (given + 1 + raw)
        return total + self.size**2

    def start_layer(self, layer: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        given, moved = self._sizes(layer)
        raw = moved * (3 * self.bins - 1)
        bias = {"out.bias": START * rng.standard_normal(raw)}
        if not given:
            return bias
        return bias | {
            "in.weight": rng.standard_normal((given, self.hidden)) / math.sqrt(given),
            "in.bias": rng.standard_normal(self.hidden),
            "out.weight": START * rng.standard_normal((self.hidden, raw)) / math.sqrt(self.hidden),
        }

    def _spline(
        self, params: Parameters, layer: int, given: Array, moved: int
    ) -> tuple[Array, Array, Array, float]:
        """Widths, heights, slopes (..., M, .) and the bound of the splines that `given` (..., P - M) asks for."""
        raw, lead = params[f"{layer}.out.bias"], tuple(given.shape[:-1])
        if given.shape[-1]:
            h = ops.tanh(given @ params[f"{layer}.in.weight"] + params[f"{layer}.in.bias"])
            raw = h @ params[f"{layer}.out.weight"] + raw
        # Flows that were stored without a matrix were fitted without this.
        raw, bins = raw * (QUIET if "lower" in params else 1.0), self.bins
        raw = ops.broadcast_to(raw, (*lead, moved * (3 * bins - 1))).reshape((*lead, moved, 3 * bins - 1))
        room = 1.0 - NARROWEST * bins
        widths = NARROWEST + room * ops.softmax(raw[..., :bins])
        heights = NARROWEST + room * ops.softmax(raw[..., bins : 2 * bins])
        # Shifted so that zero stands for a slope of one: a network that says nothing leaves things as they are.
        slopes = NARROWEST + ops.softplus(raw[..., 2 * bins :] + math.log(math.expm1(1.0 - NARROWEST)))
        end = ops.ones_like(widths[..., :1])
        return widths, heights, ops.concatenate([end, slopes, end]), self.bound

    def _coupled(
        self, params: Parameters, layer: int, x: Array, function: Callable[..., tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        """`function` on the half that moves, with the splines that the other half asks for."""
        half = self.size // 2
        first, second = x[..., :half], x[..., half:]
        swapped = bool(layer % 2 and half)
        given, moving = (second, first) if swapped else (first, second)
        moved, log_slope = function(moving, *self._spline(params, layer, given, moving.shape[-1]))
        parts = [moved, given] if swapped else [given, moved]
        return ops.concatenate(parts), ops.sum(log_slope, -1)

    def forward_layer(self, params: Parameters, layer: int, x: Array) -> tuple[Array, Array]:
        return self._coupled(params, layer, x, rational_quadratic)

    def inverse_layer(self, params: Parameters, layer: int, y: Array) -> tuple[Array, Array]:
        return self._coupled(params, layer, y, rational_quadratic_inverse)


@dataclass(frozen=True)
class NeuralSpline(Family):
    """Neural spline flow: coupling layers whose elementwise maps are monotone rational-quadratic splines.

    In a layer one half of the coordinates stays, and a network with a hidden layer of tanh units reads from it a spline
    for each coordinate of the other half: widths and heights of `bins` boxes by softmax, slopes at the knots between
    them by softplus. Outside [-bound, bound], in units of the base normal, the map is the identity. The halves, in the
    order of the flat vector, take turns. A single coordinate is moved by splines that nothing else enters. A lower
    triangular matrix follows, so that a normal with any covariance is reached as fast as by a full-rank guide, and the
    splines have to say only how the posterior differs from one. What the networks put out is multiplied by 0.1, so that
    the splines take shape after the location and the matrix have. On a normal in four dimensions, over 20 seeds at the
    defaults of SVI, means are off by at most 0.05 standard deviations and variances are 0.88 to 1.03 of the truth: 0.02
    nats away, where "fullrank" is 0.002 (`comparisons/performance/badly_scaled.py`). Without these two the mean was up
    to half a standard deviation off.

    layers: how many; every coordinate moves once in two of them. bins: K. bound: of the interval; beyond
    `bound` standard deviations, before the matrix, the tails of q are those of a normal. hidden: units in each hidden
    layer; None: half of the coordinates, at least 32.

    Cost: about 3 K P^2 / 4 weights per layer with hidden=None, and P^2 of the matrix; a draw with log q, and log q of
    any other point, in one pass each. Each draw holds 3 K numbers per coordinate.

    Raises
    ------
    InputError: impossible options; more than 20 million weights.

    Source: Durkan, Bekasov, Murray and Papamakarios (2019), Neural spline flows.
    """

    layers: int = 4
    bins: int = 8
    bound: float = 4.0
    hidden: int | None = None
    name: ClassVar[str] = "spline"

    def __post_init__(self) -> None:
        _check_network("NeuralSpline", self.layers, self.hidden)
        _check_whole("NeuralSpline", "bins", self.bins, 2, MOST_BINS)
        number = isinstance(self.bound, int | float | np.number) and not isinstance(self.bound, bool)
        if not number or not (self.bound > 0 and math.isfinite(self.bound)):
            raise InputError(
                "NeuralSpline bound: " + message("a positive number", repr(self.bound), "bound=4.0")
            )

    def bind(self, sites: Sequence[Site]) -> list[Block]:
        size = sum(site.size for site in sites)
        hidden = max(LEAST_HIDDEN, size // 2) if self.hidden is None else self.hidden
        block = NeuralSplineBlock(tuple(sites), self.layers, hidden, self.bins, float(self.bound))
        return _checked(self.name, block)


FAMILIES.update({InverseAutoregressive.name: InverseAutoregressive, NeuralSpline.name: NeuralSpline})
