"""The declaration of the weights of a layer, and checks of its arguments and inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ppl_bnn.core.errors import ModelError
from ppl_bnn.core.settings import between, whole
from ppl_bnn.language import ops
from ppl_bnn.language.primitives import linear
from ppl_bnn.language.prior_parts import Prior
from ppl_bnn.language.priors import Normal

Shape = tuple[int, ...]
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

    def check(self, good: object, expected: str, got: object, advice: str) -> None:
        """Raise ModelError unless `good` is true."""
        ModelError.check(good, self.word, expected, got, advice)

    # -- weights

    def site(self, *parts: str) -> str:
        """The name of a part."""
        return ".".join(filter(None, (self.name, *parts)))

    def draw(self, site: str, given: Bias | None, default: Prior, shape: Shape, fan_in: int = 1) -> Any:
        """A tensor from the prior that the user gave, or from the default; None where the user wants none.

        Each channel, and each row of a table, is a separate unit, so their fan_in is 1.
        """
        if given is False:
            return None
        prior = default if given is None or given is True else given
        self.check(callable(prior), "a prior", repr(prior), "bnn.priors.Normal(0.0, 'fan_in')")
        return prior(site, shape, fan_in)

    def weights(self, part: str, shape: Shape, bias: Bias | None = None) -> tuple[Any, Any]:
        """`part.weight` (..., inputs, outputs) and `part.bias` (outputs,), or None; fan_in is the number of inputs."""
        prior = Normal(0.0, "fan_in") if self.prior is None else self.prior
        weight = self.draw(self.site(part, "weight"), prior, prior, shape, math.prod(shape[:-1]))
        bias = self.bias if bias is None else bias
        return weight, self.draw(self.site(part, "bias"), bias, prior, shape[-1:])

    def linear(self, part: str, x: Any, width: int) -> Any:
        """The linear map `part` of x (..., inputs) with weights of its own."""
        return linear(self.site(part), x, *self.weights(part, (int(x.shape[-1]), width)))

    def table(self, length: int, width: int) -> Any:
        """`weight` (length, width), N(0, 1) by default."""
        return self.draw(self.site("weight"), self.prior, OFFSET, (length, width))

    def scaled(self, x: Any, gain: Bias, bias: Bias) -> Any:
        """x * gain + bias, channel by channel."""
        channels = (int(x.shape[-1]),)
        factor = self.draw(self.site("gain"), gain, GAIN, channels)
        offset = self.draw(self.site("bias"), bias, OFFSET, channels)
        x = x if factor is None else x * factor
        return x if offset is None else x + offset

    # -- checks

    def whole(self, what: str, value: Any, advice: int) -> int:
        """A positive integer."""
        self.check(not whole(1)(value), f"a positive whole number as {what}", repr(value), f"{what}={advice}")
        return operator.index(value)

    def sizes(self, what: str, sizes: Any, advice: str) -> list[int]:
        """A list of at least one size."""
        found = list(sizes) if isinstance(sizes, Iterable) else []
        self.check(found, f"a list of at least one {what}", repr(sizes), advice)
        return found

    def check_epsilon(self, epsilon: Any) -> None:
        self.check(not between()(epsilon), "a small positive epsilon", repr(epsilon), "epsilon=1e-6")

    def sequence(self, x: Any) -> tuple[int, int, int]:
        """(N, T, C) of a sequence; raises ModelError for any other shape."""
        shape = tuple(x.shape)
        good, expected = len(shape) == 3 and shape[1] > 0, "sequences of shape (N, time, channels)"
        self.check(good, expected, f"shape {shape}", "x[..., None]")
        return shape[0], shape[1], shape[2]

    def mask(self, mask: Any, x: Any) -> Any:
        """Booleans (N, T): which positions of x (N, T, C) are present; None if all are.

        A row without any position is refused where the values are available.
        """
        if mask is None:
            return None
        shape, wanted = tuple(getattr(mask, "shape", ())), tuple(x.shape[:2])
        expected = f"a mask of shape {wanted}, one value for each position"
        self.check(shape == wanted, expected, f"shape {shape}", "mask=tokens != 0")
        if (seen := ops.concrete(mask)) is not None:
            empty = (seen == 0).all(-1)
            got = f"none in row {int(empty.argmax())}"
            self.check(not empty.any(), "a position in every row", got, "leaving empty rows out")
        return ops.in_floats(mask, like=x) != 0
