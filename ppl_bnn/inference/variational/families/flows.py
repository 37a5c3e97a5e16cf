"""Normalising flows as families of guides: standard normals through invertible networks, with the density in one pass.

With eps ~ N(0, I) over P coordinates, z = T(eps) by a few layers and u = loc + scale A z, with an elementwise scale and
A = I or lower triangular with a unit diagonal,

    log q(u) = log N(eps; 0, I) - log |det dT/deps| - sum_j log scale_j.

Every layer has a triangular Jacobian. In `InverseAutoregressive` each coordinate is moved depending on those before it,
in `NeuralSpline` one half depending on the other. The code is written over `ppl_bnn.language.ops`. A flow has no mean,
variance or entropy in closed form, and its number of weights grows with P^2: it is for a few hundred coordinates.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.settings import between, optional, setting, whole
from ppl_bnn.inference.variational.families.base import Array, Family, Parameters
from ppl_bnn.inference.variational.families.blocks import FAMILIES, Affine, FullRank, Normal
from ppl_bnn.language import ops

# 160 MB in float64, and an optimiser keeps four of them.
WEIGHT_LIMIT = 20_000_000
# Maximum number of coordinates for inverting an inverse autoregressive flow, which takes them one after another.
SEQUENTIAL_LIMIT = 1000
# Minimum default number of hidden units.
LEAST_HIDDEN = 32
# Initial size of the network outputs: nearly a normal, but not zero, because earlier layers would get no gradient.
START = 0.01
# Initial logit of the gate, so that a layer at first passes on most of its input (Kingma et al. 2016).
GATE = 2.0
# Smallest share of the interval for a bin of a spline, and its smallest slope.
NARROWEST = 1e-3
# Factor on the outputs of the spline networks. Adam moves every weight by about the learning rate, so without this the
# splines would bend to compensate for a location that has not converged yet, and stay bent.
QUIET = 0.1
# With more bins, NARROWEST would leave too little of the interval.
MOST_BINS = 100


# --- rational-quadratic splines ----------------------------------------------------------------------


def rational_quadratic(
    given: Array, widths: Array, heights: Array, slopes: Array, bound: float, inverse: bool = False
) -> tuple[Array, Array]:
    """(y, log dy/dx) of a monotone rational-quadratic spline on [-bound, bound], with y = x outside of it.

    In the box from (x_k, y_k) with sides w and h, s = h / w, slopes d at the knots and t = (x - x_k) / w,

        y     = y_k + h (s t^2 + d_k t (1 - t)) / (s + (d_k + d_k+1 - 2 s) t (1 - t))
        dy/dx = s^2 (d_k+1 t^2 + 2 s t (1 - t) + d_k (1 - t)^2) / (s + (d_k + d_k+1 - 2 s) t (1 - t))^2

    (Gregory and Delbourgo 1982; Durkan, Bekasov, Murray and Papamakarios 2019, section 3.1). `widths` and `heights`
    (..., K) are positive and sum to one; `slopes` (..., K + 1) are positive, ones at the ends join the tails smoothly.

    With `inverse`, (x, log dy/dx at x) at given y, exactly. With r = y - y_k, t is the root in [0, 1] of
    a t^2 + b t + c = 0, a = h (s - d_k) + r (d_k + d_k+1 - 2 s), b = h d_k - r (d_k + d_k+1 - 2 s), c = -s r, in the
    form that does not cancel.
    """
    inside = (given > -bound) & (given < bound)
    # Zero elsewhere, so that unused branches do not make a gradient NaN.
    safe = ops.where(inside, given, ops.zeros_like(given))
    across, up = _knots(widths, bound), _knots(heights, bound)
    box = ops.sum(safe[..., None] >= (up if inverse else across)[..., 1:-1], -1)[..., None]

    def ends(values: Array) -> list[Array]:
        """The values at the two ends of the box of each number."""
        return [ops.take_along(each, box)[..., 0] for each in (values[..., :-1], values[..., 1:])]

    (left, right), (bottom, top), (slope, next_slope) = map(ends, (across, up, slopes))
    width, height = right - left, top - bottom
    mean_slope = height / width
    bend = slope + next_slope - 2.0 * mean_slope
    if inverse:
        rise = safe - bottom
        a = height * (mean_slope - slope) + rise * bend
        b = height * slope - rise * bend
        c = -mean_slope * rise
        t = -2.0 * c / (b + ops.sqrt(b * b - 4.0 * a * c))
    else:
        t = (safe - left) / width
    both = t * (1.0 - t)
    below = mean_slope + bend * both
    if inverse:
        found = left + t * width
    else:
        found = bottom + height * (mean_slope * t * t + slope * both) / below
    above = next_slope * t * t + slope * (1.0 - t) * (1.0 - t) + 2.0 * mean_slope * both
    log_slope = 2.0 * ops.log(mean_slope / below) + ops.log(above)
    return ops.where(inside, found, given), ops.where(inside, log_slope, ops.zeros_like(log_slope))


def _knots(shares: Array, bound: float) -> Array:
    """Convert shares (..., K) of [-bound, bound] to knots (..., K + 1) with exact ends."""
    left = ops.zeros_like(shares[..., :1]) - bound
    return ops.concatenate([left, left + 2.0 * bound * ops.cumsum(shares[..., :-1]), -left])


# --- base class of flows ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Flow(Family):
    """A flow, u = loc + softplus(rho) A T(eps), of `layers` layers with networks of `units` hidden units.

    `params`: those of `final` (loc, rho and A), and the weights of the layers, "<layer>.<name>".
    """

    layers: int
    has_centre: ClassVar[bool] = False
    # The factor of a layer at the start.
    gain: ClassVar[float] = 1.0
    # The final affine map as a normal: the distribution of the flow if all layers are the identity.
    final: ClassVar[Affine] = Normal()

    def check_size(self) -> None:
        wanted = f"at most {WEIGHT_LIMIT} weights in the networks of a flow, which grow with the square of its size"
        got = f"{self.weight_count} weights over {self.size} coordinates ({', '.join(self.names)})"
        advice = f"the flow on the last layer alone, guide={{'output': {self.name!r}, '*': 'normal'}}"
        good = self.weight_count <= WEIGHT_LIMIT
        InputError.check(good, self.name, wanted, got, f"{advice}, or a smaller hidden")

    @property
    @abstractmethod
    def units(self) -> int:
        """H, the units of each hidden layer."""

    @property
    @abstractmethod
    def weight_count(self) -> int:
        """The number of weights of the layers, masked entries included."""

    @abstractmethod
    def start_layer(self, layer: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Weights at which a layer is a constant times the identity, up to terms of the order of START."""

    @abstractmethod
    def forward_layer(self, params: Parameters, layer: int, x: Array) -> tuple[Array, Array]:
        """One layer: y (..., P) and log |det dy/dx| (...) at x (..., P)."""

    @abstractmethod
    def inverse_layer(self, params: Parameters, layer: int, y: Array) -> tuple[Array, Array]:
        """The inverse of `forward_layer`: x (..., P) and log |det dy/dx| at x (...)."""

    @functools.cached_property
    def _end(self) -> Affine:
        """The final map as a block."""
        return self.final.over(self.sites)

    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        params = self._end.start(loc, np.asarray(scale) / self.gain**self.layers, rng)
        for layer in range(self.layers):
            params |= {f"{layer}.{name}": value for name, value in self.start_layer(layer, rng).items()}
        return params

    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        z, total = eps, ops.zeros_like(eps[..., 0])
        for layer in range(self.layers):
            z, log_det = self.forward_layer(params, layer, z)
            total = total + log_det
        u, at_z = self._end.draw(params, z)
        # The end treats z as a standard normal, but the standard normal is eps.
        return u, at_z + 0.5 * (ops.sum(z * z, -1) - ops.sum(eps * eps, -1)) - total

    def log_prob(self, params: Parameters, u: Array) -> Array:
        end = self._end
        z, at_u = end.noise(params, end.scale(params), u - params["loc"]), end.log_prob(params, u)
        eps, total = z, ops.zeros_like(z[..., 0])
        for layer in reversed(range(self.layers)):
            eps, log_det = self.inverse_layer(params, layer, eps)
            total = total + log_det
        return at_u + 0.5 * (ops.sum(z * z, -1) - ops.sum(eps * eps, -1)) - total


# --- inverse autoregressive ------------------------------------------------------------------------


@dataclass(frozen=True)
class InverseAutoregressive(Flow):
    """Inverse autoregressive flow: masked networks, with the order of the coordinates reversed between them [1]_.

    In a layer the j-th coordinate is moved depending on those before it, with a gate for stability,

        y_j = sigmoid(s_j) x_j + (1 - sigmoid(s_j)) m_j,    (m_j, s_j) a function of x_1, ..., x_j-1,

    so log |det dy/dx| = sum_j log sigmoid(s_j). (m, s) come from one network with a hidden layer of tanh units, masked
    so that each output depends only on earlier coordinates (MADE [2]_). Masked linear terms are added to m, so that any
    covariance can be reached. s is bounded, so that the inverse of a distant point is finite.

    Parameters
    ----------
    layers : int, default 2
        Number of layers.
    hidden : int or None
        Units in each hidden layer; None for P, and at least 32.

    Raises
    ------
    InputError
        Impossible options, or more than 20 million weights.

    Notes
    -----
    About 4 P^2 weights per layer with hidden=None. A draw and its log q take one pass. log q of other points takes P
    sequential steps per layer, and is refused above 1000 coordinates.

    Weights of a layer: in.weight (P, H), in.bias (H,), out.weight (H, 2 P), out.bias (2 P,), P columns for m and P for
    the gate, and direct (P, P) for m. Masked entries are not used and do not change.

    References
    ----------
    .. [1] Kingma, Salimans, Jozefowicz, Chen, Sutskever and Welling (2016). Improving variational inference with
       inverse autoregressive flow.
    .. [2] Germain, Gregor, Murray and Larochelle (2015). MADE.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(guide=bnn.guides.InverseAutoregressive(layers=3)).guide
    InverseAutoregressive(layers=3, hidden=None)
    """

    layers: int = setting(2, whole())
    hidden: int | None = setting(None, optional(whole()))
    name: ClassVar[str] = "iaf"
    gain: ClassVar[float] = 1.0 / (1.0 + math.exp(-GATE))

    @property
    def units(self) -> int:
        return max(LEAST_HIDDEN, self.size) if self.hidden is None else self.hidden

    @property
    def weight_count(self) -> int:
        size, hidden = self.size, self.units
        return self.layers * (size * hidden + hidden + 2 * size * (hidden + 1) + size**2)

    @functools.cached_property
    def _degrees(self) -> np.ndarray:
        """The number of coordinates that each hidden unit may depend on; ascending, evenly from 1 to P - 1."""
        return np.round(np.linspace(1, max(1, self.size - 1), self.units)).astype(int)

    @functools.cached_property
    def _masks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The unmasked entries of in.weight, out.weight and direct."""
        place, degrees = np.arange(1, self.size + 1), self._degrees
        return place[:, None] <= degrees, np.tile(degrees[:, None] < place, 2), place[:, None] < place

    def start_layer(self, layer: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        into, out, direct = self._masks
        size, hidden = self.size, self.units
        return {
            "in.weight": rng.standard_normal((size, hidden)) * into / np.sqrt(self._degrees),
            # Without biases every m would be an odd function of eps, which cannot show a curved posterior at first.
            "in.bias": rng.standard_normal(hidden),
            "out.weight": START * rng.standard_normal((hidden, 2 * size)) * out / math.sqrt(hidden),
            "out.bias": np.concatenate([np.zeros(size), np.full(size, GATE)]),
            "direct": START * rng.standard_normal((size, size)) * direct / math.sqrt(size),
        }

    def _ordered(self, layer: int, x: Array) -> Array:
        """The coordinates in the order of a layer, the reverse of that of the layer before."""
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
        out = params[f"{layer}.out.weight"].reshape(self.units, 2, self.size)
        out_bias = params[f"{layer}.out.bias"].reshape(2, self.size)
        direct = params[f"{layer}.direct"]
        # Units are in ascending degree, so those that depend on the known coordinates come first.
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
        """log q(u) (...) at u (..., P), in P sequential steps per layer; refused above SEQUENTIAL_LIMIT coordinates."""
        if self.size > SEQUENTIAL_LIMIT:
            raise UnsupportedError.of(
                "log q of an inverse autoregressive flow",
                f"at most {SEQUENTIAL_LIMIT} coordinates, since it is inverted one coordinate after the other",
                f"{self.size} coordinates ({', '.join(self.names)})",
                "guide='spline', whose inverse costs what a draw costs, or the flow on the last layer alone",
            )
        return super().log_prob(params, u)


# --- neural spline ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NeuralSpline(Flow):
    """Neural spline flow: coupling layers whose elementwise maps are monotone rational-quadratic splines [1]_.

    In a layer one half of the coordinates is fixed. From it a network with a hidden layer of tanh units computes a
    spline for each coordinate of the other half: widths and heights of `bins` boxes by softmax, slopes by softplus.
    Outside [-bound, bound], in units of the base normal, the map is the identity. The halves, in the order of the flat
    vector, alternate. A single coordinate is moved by splines without inputs.

    Parameters
    ----------
    layers : int, default 4
        Number of layers; every coordinate moves once in two of them.
    bins : int, default 8
        K.
    bound : float, default 4.0
        End of the interval. Beyond `bound` standard deviations, before the matrix, the tails of q are those of a
        normal.
    hidden : int or None
        Units in each hidden layer; None for half of the coordinates, at least 32.

    Raises
    ------
    InputError
        Impossible options, or more than 20 million weights.

    Notes
    -----
    A lower-triangular matrix follows the layers, so that the splines represent only the posterior's difference from a
    normal. The outputs of the networks are multiplied by 0.1, so that the splines take shape after the location and the
    matrix (`comparisons/performance/badly_scaled.py` measures the accuracy on a normal).

    About 3 K P^2 / 4 weights per layer with hidden=None, and P^2 for the matrix. A draw with log q, and log q of any
    other point, take one pass each. Each draw holds 3 K numbers per coordinate.

    Weights of a layer that moves M of P coordinates: in.weight (P - M, H), in.bias (H,), out.weight (H, M (3 K - 1)),
    out.bias (M (3 K - 1),). With a single coordinate there is only out.bias.

    References
    ----------
    .. [1] Durkan, Bekasov, Murray and Papamakarios (2019). Neural spline flows.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.SVI(guide=bnn.guides.NeuralSpline(bins=6)).guide
    NeuralSpline(layers=4, bins=6, bound=4.0, hidden=None)
    """

    layers: int = setting(4, whole())
    bins: int = setting(8, whole(2, MOST_BINS))
    bound: float = setting(4.0, between())
    hidden: int | None = setting(None, optional(whole()))
    name: ClassVar[str] = "spline"
    final: ClassVar[Affine] = FullRank()

    @property
    def units(self) -> int:
        return max(LEAST_HIDDEN, self.size // 2) if self.hidden is None else self.hidden

    def _sizes(self, layer: int) -> tuple[int, int]:
        """The numbers of fixed and of moved coordinates: the first half moves the second, in odd layers the reverse."""
        half = self.size // 2
        return (self.size - half, half) if layer % 2 and half else (half, self.size - half)

    @property
    def weight_count(self) -> int:
        total = self.size**2
        for layer in range(self.layers):
            given, moved = self._sizes(layer)
            raw = moved * (3 * self.bins - 1)
            total += raw + (given > 0) * self.units * (given + 1 + raw)
        return total

    def start_layer(self, layer: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        given, moved = self._sizes(layer)
        raw = moved * (3 * self.bins - 1)
        bias = {"out.bias": START * rng.standard_normal(raw)}
        if not given:
            return bias
        return bias | {
            "in.weight": rng.standard_normal((given, self.units)) / math.sqrt(given),
            "in.bias": rng.standard_normal(self.units),
            "out.weight": START * rng.standard_normal((self.units, raw)) / math.sqrt(self.units),
        }

    def _splines(self, params: Parameters, layer: int, given: Array, moved: int) -> tuple[Array, ...]:
        """Widths, heights and slopes (..., M, .) of the splines, computed from `given` (..., P - M)."""
        raw, lead = params[f"{layer}.out.bias"], tuple(given.shape[:-1])
        if given.shape[-1]:
            h = ops.tanh(given @ params[f"{layer}.in.weight"] + params[f"{layer}.in.bias"])
            raw = h @ params[f"{layer}.out.weight"] + raw
        bins = self.bins
        raw = ops.broadcast_to(QUIET * raw, (*lead, moved * (3 * bins - 1))).reshape(
            (*lead, moved, 3 * bins - 1)
        )
        room = 1.0 - NARROWEST * bins
        widths = NARROWEST + room * ops.softmax(raw[..., :bins])
        heights = NARROWEST + room * ops.softmax(raw[..., bins : 2 * bins])
        # Shifted so that an output of zero gives a slope of one, that is, the identity.
        slopes = NARROWEST + ops.softplus(raw[..., 2 * bins :] + math.log(math.expm1(1.0 - NARROWEST)))
        end = ops.ones_like(widths[..., :1])
        return widths, heights, ops.concatenate([end, slopes, end])

    def _coupled(self, params: Parameters, layer: int, x: Array, inverse: bool) -> tuple[Array, Array]:
        """Move one half by the splines that are computed from the other, which stays."""
        half = self.size // 2
        first, second = x[..., :half], x[..., half:]
        swapped = bool(layer % 2 and half)
        given, moving = (second, first) if swapped else (first, second)
        splines = self._splines(params, layer, given, moving.shape[-1])
        moved, log_slope = rational_quadratic(moving, *splines, bound=self.bound, inverse=inverse)
        parts = [moved, given] if swapped else [given, moved]
        return ops.concatenate(parts), ops.sum(log_slope, -1)

    def forward_layer(self, params: Parameters, layer: int, x: Array) -> tuple[Array, Array]:
        return self._coupled(params, layer, x, inverse=False)

    def inverse_layer(self, params: Parameters, layer: int, y: Array) -> tuple[Array, Array]:
        return self._coupled(params, layer, y, inverse=True)


FAMILIES.update({InverseAutoregressive.name: InverseAutoregressive, NeuralSpline.name: NeuralSpline})
