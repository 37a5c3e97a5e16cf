"""The protocol of a probabilistic programming system.

`System` is the protocol that `ppl_bnn.backends.numpyro` and `ppl_bnn.backends.pyro` implement with the same names in
the same order.

A session is the only place where a global changes: floating type, device, threads, Pyro's parameter store and
validation, random states. So a fit leaves every global as it found it, also where it raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ppl_bnn.backends.native import (
    refuse_discrete,
    unwrap,
)
from ppl_bnn.backends.turns import Turn
from ppl_bnn.core.arrays import Array
from ppl_bnn.core.errors import (
    InputError,
    UnsupportedError,
    message,
)

Model = Callable[..., Any]
SYSTEMS = ("numpyro", "pyro")


@dataclass(frozen=True)
class TracedSite:
    """One site of one run.

    kind: "latent", "param", "observed" or "deterministic". distribution: the system's own, or None.
    log_det: log |dw/du| where the value came from unconstrained coordinates, else 0. scale: factor on its log density.
    local: whether the site belongs to rows (it is then drawn afresh at new rows).
    """

    name: str
    kind: Literal["latent", "param", "observed", "deterministic"]
    distribution: Any
    value: Array
    log_det: Array = 0.0
    scale: float = 1.0
    local: bool = False


@dataclass(frozen=True)
class Site:
    """A latent site or parameter: its shapes in the program and in unconstrained coordinates."""

    name: str
    shape: tuple[int, ...]
    unconstrained_shape: tuple[int, ...]
    is_param: bool = False
    local: bool = False
    family: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.unconstrained_shape)


class Randomness(Protocol):
    """A source of random arrays of the type and on the device of `like`, each call another."""

    def normal(self, shape: tuple[int, ...], like: Array) -> Array:
        """Standard normals."""
        ...

    def sign(self, shape: tuple[int, ...], like: Array) -> Array:
        """-1 or 1, equally likely."""
        ...

    def keep(self, shape: tuple[int, ...], like: Array, probability: float) -> Array:
        """1 with that probability, else 0."""
        ...


class System(Protocol):
    """A probabilistic programming system with its array library.

    maps_randomness: whether `vmap` goes through sampling, each element with its own seed.
    turn: held by the one thread that traces a program or computes eagerly, since a system has one stack of handlers for
    all threads. `run` and sessions take it; it is for those who use the handlers of a system themselves.
    """

    name: str
    maps_randomness: bool
    turn: Turn

    def session(self, dtype: str, device: str, threads: int | None = None) -> AbstractContextManager[str]:
        """Everything inside runs in this floating type on this device; every global is restored. Gives the device.

        threads: how many the system may use within one operation, where it can be told (torch); None: as they are.
        """
        ...

    def outside(self) -> AbstractContextManager[None]:
        """Inside, the session of this thread lets others have their turn: around a user's function, or a long wait."""
        ...

    def asarray(self, value: Any) -> Array: ...

    def to_numpy(self, array: Array) -> np.ndarray: ...

    def native(self, model: Model, population: int | None = None, record: bool = True) -> Model:
        """The model as an ordinary callable of the system; its likelihood scaled to `population` rows."""
        ...

    def plain(self, model: Model) -> Model:
        """A model written in the system itself as a function of (x, y), in the floating type of the session.

        Its inputs go to its own parameters, and its plates are over all rows. The user's object is not changed.
        """
        ...

    def run(
        self,
        native: Model,
        x: Any,
        y: Any,
        values: Mapping[str, Array] | None = None,
        unconstrained: bool = False,
        seed: Any = None,
    ) -> list[TracedSite]:
        """Run a native model with the given values (constrained, or unconstrained) and list its sites in order."""
        ...

    def describe(self, native: Model, x: Any, y: Any) -> tuple[list[Site], list[TracedSite]]:
        """Shapes of all latent sites and parameters, and the other sites, without computing where possible."""
        ...

    def seeds(self, seed: int, count: int) -> Any:
        """`count` independent sources of randomness, as an array to map over."""
        ...

    def split(self, seed: Any, count: int) -> Any:
        """As many seeds out of one of `seeds` to map `randomness` over, also while a function is traced."""
        ...

    def randomness(self, seed: Any) -> Randomness:
        """Random arrays from one of `seeds`, or from wherever the system stands (None, where it stands anywhere)."""
        ...

    def unconstrain(self, distribution: Any, value: Array) -> Array:
        """u of a value in the support of the system's own distribution."""
        ...

    def value_and_grad(self, function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        """(value, gradient in the first argument)."""
        ...

    def hessian(self, function: Callable[..., Any]) -> Callable[..., Any]: ...

    def jacobian(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Reverse-mode Jacobian in the first argument."""
        ...

    def jvp(self, function: Callable[..., Any], at: Any, direction: Any) -> tuple[Any, Any]: ...

    def vjp(self, function: Callable[..., Any], at: Any) -> tuple[Any, Callable[..., Any], Any]:
        """(value, pullback, extra) of a function of one argument that gives (value, extra).

        pullback(cotangent) is the cotangent times the Jacobian, in the structure of `at`; it can be mapped over.
        """
        ...

    def vmap(self, function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]: ...

    def batched(self, function: Callable[..., Any], size: int) -> Callable[..., None]:
        """(w, x, into): function over the leading axis of w, `size` elements at a time, written to the NumPy array.

        So no more than `size` results are held besides `into`, which may be shorter than what comes (padding).
        """
        ...

    def threads(self) -> int:
        """How many programs are computed at once to advantage on a CPU; 1: one that has all cores to itself."""
        ...

    def each(self, function: Callable[..., None], calls: Iterable[tuple[Any, ...]], threads: int) -> None:
        """function(*call) for every call, on so many threads; one more call than that waits, and no further."""
        ...

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]: ...

    def compile_for(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], quick: bool = False
    ) -> Callable[..., Any]:
        """The function for arguments like these, for a few calls: a process compiles what computes the same once.

        quick: rather soon than fast, and rounded as it comes.
        """
        ...


def constrained_parameter(name: str) -> UnsupportedError:
    """What to say of a parameter with a constraint: parameters are optimised as they are."""
    return UnsupportedError(
        f"param {name!r}: "
        + message(
            "a parameter without a constraint",
            "a constrained one",
            "transforming a free parameter in the model",
        )
    )


def described(
    traced: Sequence[TracedSite], inverse_shape: Callable[[Any, tuple[int, ...]], Sequence[int]]
) -> tuple[list[Site], list[TracedSite]]:
    """What `System.describe` gives, from the sites of one run.

    inverse_shape: (the system's own distribution, shape of a value) -> its shape in unconstrained coordinates.
    """
    sites = []
    for site in traced:
        shape = tuple(np.shape(site.value))
        if site.kind == "param":
            sites.append(Site(site.name, shape, shape, is_param=True))
        elif site.kind == "latent":
            if getattr(site.distribution.support, "is_discrete", False):
                raise refuse_discrete(site.name, type(unwrap(site.distribution)).__name__)
            inner = tuple(inverse_shape(site.distribution, shape))
            family = type(unwrap(site.distribution)).__name__
            sites.append(Site(site.name, shape, inner, local=site.local, family=family))
    return sites, [site for site in traced if site.kind in ("observed", "deterministic")]


def resolve_device(device: str) -> tuple[str, int | None]:
    """("auto" | "cpu" | "cuda", index) of a device string.

    Raises
    ------
    InputError: neither "auto", "cpu" nor "cuda[:i]".
    """
    kind, _, index = str(device).partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not index.isdigit()) or (index and kind != "cuda"):
        raise InputError("device: " + message("'auto', 'cpu' or 'cuda[:i]'", repr(device), "device='auto'"))
    return kind, int(index) if index else None
