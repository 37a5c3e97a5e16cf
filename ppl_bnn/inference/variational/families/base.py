"""The interface of a family: a distribution over a block of sites, written once over `ops`."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.protocol import Site
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.language import ops
from ppl_bnn.language.transforms import GaussianPrior

Array = Any
Parameters = Mapping[str, Array]
LOG_2PI = math.log(2.0 * math.pi)
# A dense factor of this many coordinates takes 72 MB in float64, and an optimiser keeps four of them.
DENSE_LIMIT = 3000


def inverse_softplus(scale: Any) -> np.ndarray:
    """The inverse of softplus.

    Parameters
    ----------
    scale : float or array
        Positive numbers.

    Returns
    -------
    ndarray
        rho with softplus(rho) = scale.
    """
    scale = np.asarray(scale, dtype=float)
    return scale + np.log(-np.expm1(-scale))


def log_normal(z: Array, log_determinant: Array) -> Array:
    """Log density of u = loc + S z for a standard normal z.

    Parameters
    ----------
    z : array
        Shape (..., P).
    log_determinant : array
        log |det S|.

    Returns
    -------
    array
        Shape (...).
    """
    return -0.5 * ops.sum(z * z, -1) - log_determinant - 0.5 * z.shape[-1] * LOG_2PI


@dataclass(frozen=True)
class Block(ABC):
    """One family bound to sites: a distribution over their flat vector (P,), whose parameters are stored outside.

    `params` is a dict name -> array of NumPy, torch or JAX, unconstrained, as created by `start`. Leading axes (...)
    are any number of draws.

    Attributes
    ----------
    sites : tuple of Site
        The sites, in the order of the program.
    """

    sites: tuple[Site, ...]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the sites, in the order of the program."""
        return tuple(site.name for site in self.sites)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the sites in unconstrained coordinates."""
        return tuple(site.unconstrained_shape for site in self.sites)

    @functools.cached_property
    def size(self) -> int:
        """P, the number of coordinates."""
        return sum(site.size for site in self.sites)

    @property
    def strata(self) -> int:
        """K, the number of stratified draws in one sample; larger than one only for a mixture."""
        return 1

    @property
    def has_centre(self) -> bool:
        """Whether `centre` is the mean of the whole block."""
        return True

    @property
    def noise_size(self) -> int:
        """E, the number of standard normals per draw (and per stratum)."""
        return self.size

    @abstractmethod
    def start(self, loc: np.ndarray, scale: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Parameters at which q has a given mean and, exactly or approximately, given standard deviations.

        Parameters
        ----------
        loc : ndarray
            The mean, shape (P,).
        scale : float or ndarray
            The standard deviations: a number or shape (P,).
        rng : numpy.random.Generator
            For families that must break a symmetry.

        Returns
        -------
        dict of str to ndarray
            The parameters.
        """

    @abstractmethod
    def draw(self, params: Parameters, eps: Array) -> tuple[Array, Array]:
        """Draw from the block, as a differentiable function of its parameters.

        Parameters
        ----------
        params : dict of str to array
            Parameters.
        eps : array
            Standard normals, shape (..., E); with K > 1 strata (..., K, E).

        Returns
        -------
        u : array
            Draws, shape (..., P); with strata (..., K, P), the k-th from component k.
        log_q : array
            log q(u), shape (...); with strata (..., K), of the whole mixture.
        """

    @abstractmethod
    def log_prob(self, params: Parameters, u: Array) -> Array:
        """The log density.

        Parameters
        ----------
        params : dict of str to array
            Parameters.
        u : array
            Shape (..., P).

        Returns
        -------
        array
            log q(u), shape (...).
        """

    def log_weights(self, params: Parameters) -> Array:
        """Log probabilities of the strata.

        Parameters
        ----------
        params : dict of str to array
            Parameters.

        Returns
        -------
        array
            Shape (K,): E_q[h] = sum_k exp(log_weights_k) E[h(u_k)].
        """
        return ops.zeros_like(next(iter(params.values())).reshape(-1)[:1])

    def mean(self, params: Parameters) -> Array | None:
        """Exact marginal means.

        Parameters
        ----------
        params : dict of str to array
            Parameters.

        Returns
        -------
        array or None
            Shape (P,); None if they are not known.
        """
        return None

    def variance(self, params: Parameters) -> Array | None:
        """Exact marginal variances.

        Parameters
        ----------
        params : dict of str to array
            Parameters.

        Returns
        -------
        array or None
            Shape (P,); None if they are not known.
        """
        return None

    def entropy(self, params: Parameters) -> Array | None:
        """The entropy -E_q[log q(u)] in closed form.

        Parameters
        ----------
        params : dict of str to array
            Parameters.

        Returns
        -------
        array or None
            In nats; None if there is no closed form.
        """
        return None

    def sample(self, params: Parameters, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw from the block in NumPy.

        Parameters
        ----------
        params : dict of str to array
            Parameters.
        count : int
            Number of draws.
        rng : numpy.random.Generator
            Random generator.

        Returns
        -------
        ndarray
            Shape (count, P).
        """
        return self.draw(params, rng.standard_normal((count, self.noise_size)))[0]

    def centre(self, params: Parameters) -> np.ndarray:
        """One representative point in NumPy: the image of zero noise.

        Parameters
        ----------
        params : dict of str to array
            Parameters.

        Returns
        -------
        ndarray
            Shape (P,).
        """
        return self.draw(params, np.zeros(self.noise_size))[0]

    def as_prior(self, params: Parameters) -> GaussianPrior:
        """This block as a Gaussian.

        Parameters
        ----------
        params : dict of str to ndarray
            Parameters in NumPy.

        Returns
        -------
        GaussianPrior
            The Gaussian.

        Raises
        ------
        UnsupportedError
            A block that is not Gaussian, or has no spread.
        """
        raise UnsupportedError.of(
            "with_prior",
            "a guide that is Gaussian",
            f"{type(self).__name__} over {', '.join(self.names)}",
            "guide='normal', 'lowrank', 'fullrank' or 'matrixnormal'",
        )

    def split(self, flat: Array) -> dict[str, Array]:
        """Split a flat vector by site.

        Parameters
        ----------
        flat : array
            Shape (..., P).

        Returns
        -------
        dict of str to array
            By site, shape (..., *unconstrained shape).
        """
        found, start, lead = {}, 0, tuple(flat.shape[:-1])
        for site in self.sites:
            found[site.name] = flat[..., start : start + site.size].reshape(lead + site.unconstrained_shape)
            start += site.size
        return found

    def join(self, u: Mapping[str, Array]) -> Array:
        """The inverse of `split`.

        Parameters
        ----------
        u : mapping of str to array
            By site, shape (..., *unconstrained shape). Other sites are ignored.

        Returns
        -------
        array
            Shape (..., P).
        """
        parts = []
        for site in self.sites:
            value = u[site.name]
            lead = tuple(value.shape[: len(value.shape) - len(site.unconstrained_shape)])
            parts.append(value.reshape((*lead, site.size)))
        return parts[0] if len(parts) == 1 else ops.concatenate(parts, -1)


@dataclass(frozen=True)
class Family(ABC):
    """The specification of a family: its options, without sites. Fields are plain numbers, strings or tuples.

    Attributes
    ----------
    name : str
        The name as a string specification and in files. A family of another file adds itself to `FAMILIES`.
    """

    name: ClassVar[str]

    @abstractmethod
    def bind(self, sites: Sequence[Site]) -> list[Block]:
        """Create the blocks that together cover some sites.

        Parameters
        ----------
        sites : sequence of Site
            The sites, in the order of the program.

        Returns
        -------
        list of Block
            The blocks.

        Raises
        ------
        InputError
            The family does not support these sites.
        """

    def described(self) -> dict[str, Any]:
        """Plain values from which `family_of` creates the family again."""
        return {"family": self.name} | {
            entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)
        }


def whole_sites(family: str, what: str, value: object, least: int) -> None:
    """Raise `InputError` unless an option is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError.of(
            f"{family} {what}", f"a whole number of at least {least}", repr(value), f"{what}={max(least, 3)}"
        )


def too_large(family: str, what: str, size: int) -> InputError:
    """The error for a block with more coordinates than a dense factor allows."""
    return InputError.of(
        f"{family}",
        f"at most {DENSE_LIMIT} {what}, because the factor is dense",
        f"{size}",
        "'lowrank', 'normal', or {'output': 'fullrank', '*': 'normal'} with only some layers in one block",
    )
