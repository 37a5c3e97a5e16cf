"""The interface of a family of distributions over a block of sites, written over `ops`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ppl_bnn.backends.protocol import Site
from ppl_bnn.core.arrays import unravel
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.settings import check_settings
from ppl_bnn.language import ops
from ppl_bnn.language.transforms import GaussianPrior

Array = Any
Parameters = Mapping[str, Array]
LOG_2PI = math.log(2.0 * math.pi)


def inverse_softplus(scale: Any) -> np.ndarray:
    """rho with softplus(rho) = scale, for positive numbers."""
    scale = np.asarray(scale, dtype=float)
    return scale + np.log(-np.expm1(-scale))


def log_normal(z: Array, log_determinant: Array) -> Array:
    """The log density (...) of u = loc + S z for a standard normal z (..., P), with log |det S|."""
    return -0.5 * ops.sum(z * z, -1) - log_determinant - 0.5 * z.shape[-1] * LOG_2PI


@dataclass(frozen=True)
class Family(ABC):
    """A family of distributions: its options, and, once bound to sites, a distribution over their flat vector (P,).

    Options are plain numbers, strings or tuples. A block is a family that `bind` has bound to sites; the methods below
    `described` are those of a block, whose parameters are stored outside: `params` is a dict name -> unconstrained
    array of NumPy, torch or JAX, as created by `start`. Leading axes (...) are any number of draws.

    `name` is the name of the family as a string specification and in files. A family of another file adds itself to
    `FAMILIES`.

    Attributes
    ----------
    sites : tuple of Site
        The sites of a block, in the order of the program; empty for a specification.
    """

    name: ClassVar[str]
    # Not a field, for it is no option: `over` sets it on a block.
    sites: ClassVar[tuple[Site, ...]] = ()
    # Whether `centre` is the mean of the whole block.
    has_centre: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self, type(self).__name__)

    def bind(self, sites: Sequence[Site]) -> list[Family]:
        """The blocks that together cover some sites; `InputError` if the family does not support them."""
        block = self.over(sites)
        block.check_size()
        return [block]

    def check_size(self) -> None:  # noqa: B027 - only families with large arrays have limits
        """Raise `InputError` if this block has more coordinates than the family supports."""

    def over(self, sites: Sequence[Site]) -> Self:
        """This family as one block over some sites."""
        block = copy.copy(self)
        object.__setattr__(block, "sites", tuple(sites))
        return block

    def described(self) -> dict[str, Any]:
        """Plain values from which `family_of` creates the family again."""
        return {"family": self.name} | dataclasses.asdict(self)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the sites, in the order of the program."""
        return tuple(site.name for site in self.sites)

    @functools.cached_property
    def size(self) -> int:
        """P, the number of coordinates."""
        return sum(site.size for site in self.sites)

    @property
    def strata(self) -> int:
        """K, the number of stratified draws in one sample; above one only for a mixture."""
        return 1

    @property
    def noise_size(self) -> int:
        """E, the number of standard normals per draw (and per stratum)."""
        return self.size

    @abstractmethod
    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Parameters at which q has the mean loc (P,) and, exactly or approximately, the standard deviations `scale`.

        `scale` is a number or (P,). `rng` is for families that must break a symmetry.
        """

    @abstractmethod
    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        """Draws u (..., P) and log q(u) (...) from standard normals eps (..., E), differentiable in the parameters.

        With K > 1 strata eps is (..., K, E), u (..., K, P) with the k-th draw from component k, and log q (..., K) that
        of the whole mixture.
        """

    @abstractmethod
    def log_prob(self, params: Parameters, u: Array) -> Array:
        """log q(u) (...) at u (..., P)."""

    def log_weights(self, params: Parameters) -> Array:
        """Log probabilities (K,) of the strata: E_q[h] = sum_k exp(log_weights_k) E[h(u_k)]."""
        return ops.zeros_like(next(iter(params.values())).reshape(-1)[:1])

    def mean(self, params: Parameters) -> Array | None:
        """Exact marginal means (P,); None if they are not known."""
        return None

    def variance(self, params: Parameters) -> Array | None:
        """Exact marginal variances (P,); None if they are not known."""
        return None

    def entropy(self, params: Parameters) -> Array | None:
        """The entropy -E_q[log q(u)] in nats; None if there is no closed form."""
        return None

    def sample(self, params: Parameters, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draws (count, P) in NumPy."""
        return self.draw(params, rng.standard_normal((count, self.noise_size)))[0]

    def centre(self, params: Parameters) -> np.ndarray:
        """One representative point (P,) in NumPy: the image of zero noise."""
        return self.draw(params, np.zeros(self.noise_size))[0]

    def as_prior(self, params: Parameters) -> GaussianPrior:
        """The block as a Gaussian, from parameters in NumPy; `UnsupportedError` if it is not Gaussian."""
        got = f"{type(self).__name__} over {', '.join(self.names)}"
        advice = "guide='normal', 'lowrank', 'fullrank' or 'matrixnormal'"
        raise UnsupportedError.of("with_prior", "a guide that is Gaussian", got, advice)

    def split(self, flat: Array) -> dict[str, Array]:
        """Split a flat vector (..., P) by site: (..., *unconstrained shape)."""
        return unravel(flat, {site.name: site.unconstrained_shape for site in self.sites})

    def join(self, u: Mapping[str, Array]) -> Array:
        """The inverse of `split`; other sites are ignored."""
        parts = []
        for site in self.sites:
            value = u[site.name]
            lead = tuple(value.shape[: len(value.shape) - len(site.unconstrained_shape)])
            parts.append(value.reshape((*lead, site.size)))
        return parts[0] if len(parts) == 1 else ops.concatenate(parts, -1)
