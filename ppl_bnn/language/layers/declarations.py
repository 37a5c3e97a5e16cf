"""The declaration of the weights of a layer, and checks of its arguments and inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ppl_bnn.core.errors import ModelError
from ppl_bnn.core.settings import is_number
from ppl_bnn.language import ops
from ppl_bnn.language.primitives import linear
from ppl_bnn.language.prior_scales import Prior
from ppl_bnn.language.priors import Normal

# Whether there is such a parameter, or a prior of its own.
Bias = bool | Prior
Activation = str | Callable[[Any], Any]
# 1 within a factor of about two, and positive: a gain of the other sign would only reverse a unit.
GAIN = Normal(1.0, 0.25)
OFFSET = Normal(0.0, 1.0)
THRESHOLD = Normal(0.0, 0.25)


@dataclass(frozen=True)
class Layer:
    """One call of a layer: its function and name for errors, and the priors that the user gave.

    `kind` is the name of the function; `name` begins the names of the sites of the layer. `prior` is that of the
    weights, and `bias` says whether there is a bias, or is a prior of its own.
    """

    kind: str
    name: str = ""
    prior: Prior | None = None
    bias: Bias = True

    @property
    def word(self) -> str:
        """The layer in error messages."""
        return f"{self.kind}({self.name!r})" if self.name else self.kind

    def error(self, expected: str, got: str, advice: str) -> ModelError:
        return ModelError.of(self.word, expected, got, advice)

    # -- weights

    def site(self, part: str) -> str:
        """The name of a part."""
        return f"{self.name}.{part}" if part else self.name

    def weights(self, part: str, shape: tuple[int, ...], bias: Bias | None = None) -> tuple[Any, Any]:
        """`part.weight` (..., inputs, outputs) and `part.bias` (outputs,), or None; fan_in is the number of inputs."""
        bias = self.bias if bias is None else bias
        self._check_priors(self.prior, bias)
        prior = Normal(0.0, "fan_in") if self.prior is None else self.prior
        weight = prior(f"{self.site(part)}.weight", shape, math.prod(shape[:-1]))
        if bias is False:
            return weight, None
        return weight, (prior if bias is True else bias)(f"{self.site(part)}.bias", shape[-1:], 1)

    def linear(self, part: str, x: Any, width: int) -> Any:
        """The linear map `part` of x (..., inputs) with weights of its own."""
        return linear(self.site(part), x, *self.weights(part, (int(x.shape[-1]), width)))

    def table(self, length: int, width: int) -> Any:
        """`weight` (length, width), N(0, 1) by default; one row enters at a time, so fan_in is 1."""
        self._check_priors(self.prior)
        return (OFFSET if self.prior is None else self.prior)(self.site("weight"), (length, width), 1)

    def parameter(self, part: str, channels: int, given: Bias | None, default: Prior) -> Any:
        """A parameter for each channel, or None. Each channel is a separate unit, so fan_in is 1."""
        self._check_priors(given)
        if given is False:
            return None
        prior = default if given is None or given is True else given
        return prior(self.site(part), (int(channels),), 1)

    def scaled(self, x: Any, gain: Bias, bias: Bias) -> Any:
        """x * gain + bias, channel by channel."""
        factor = self.parameter("gain", x.shape[-1], gain, GAIN)
        offset = self.parameter("bias", x.shape[-1], bias, OFFSET)
        x = x if factor is None else x * factor
        return x if offset is None else x + offset

    def _check_priors(self, *given: Any) -> None:
        for each in given:
            if each is not None and not isinstance(each, bool) and not callable(each):
                raise self.error("a prior", repr(each), "bnn.priors.Normal(0.0, 'fan_in')")

    # -- checks

    def whole(self, what: str, value: Any, advice: int) -> int:
        """A positive integer."""
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise self.error(f"a positive whole number as {what}", repr(value), f"{what}={advice}")
        return operator.index(value)

    def sizes(self, what: str, sizes: Any, advice: str) -> list[int]:
        """A list of at least one size."""
        if not isinstance(sizes, Iterable) or not (sizes := list(sizes)):
            raise self.error(f"a list of at least one {what}", repr(sizes), advice)
        return sizes

    def check_epsilon(self, epsilon: Any) -> None:
        if not is_number(epsilon) or not 0 < epsilon < math.inf:
            raise self.error("a small positive epsilon", repr(epsilon), "epsilon=1e-6")

    def sequence(self, x: Any) -> tuple[int, int, int]:
        """(N, T, C) of a sequence; raises ModelError for any other shape."""
        shape = tuple(int(size) for size in x.shape)
        if len(shape) != 3 or shape[1] < 1:
            raise self.error("sequences of shape (N, time, channels)", f"shape {shape}", "x[..., None]")
        return shape[0], shape[1], shape[2]

    def mask(self, mask: Any, x: Any) -> Any:
        """Booleans (N, T): which positions of x (N, T, C) are present; None if all are.

        A row without any position is refused where the values are available.
        """
        if mask is None:
            return None
        shape, wanted = tuple(getattr(mask, "shape", ())), tuple(x.shape[:2])
        if shape != wanted:
            expected = f"a mask of shape {wanted}, one value for each position"
            raise self.error(expected, f"shape {shape}", "mask=tokens != 0")
        seen = ops.concrete(mask)
        if seen is not None and not (present := (seen != 0).any(-1)).all():
            got = f"none in row {int((~present).argmax())}"
            raise self.error("a position in every row", got, "leaving empty rows out")
        return ops.in_floats(mask, like=x) != 0
