"""The protocol of a probabilistic programming system, implemented by `numpyro.py` and `pyro.py`.

A session is the only place where a global changes: floating type, device, threads, Pyro's parameter store and
validation, random states. A fit therefore leaves every global unchanged, also when it raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from ppl_bnn.backends.native import Model, called, unwrap
from ppl_bnn.backends.turns import Turn
from ppl_bnn.core.arrays import Array, row_count
from ppl_bnn.core.errors import DeviceError, InputError, UnsupportedError

Known = Mapping[str, Array] | None
Function = Callable[..., Any]
SYSTEMS = ("numpyro", "pyro")


@dataclass(frozen=True)
class TracedSite:
    """One site of one run; `kind` is "latent", "param", "observed" or "deterministic".

    `distribution` is the system's own, or None. `log_det` is log |dw/du| if the value came from unconstrained
    coordinates, else 0. `scale` multiplies the log density. A `local` site belongs to rows, and is drawn again at new
    rows.
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
    """A latent site or parameter: its shapes in the program and in unconstrained coordinates.

    `is_param` means without a prior, `local` that it belongs to rows; `family` is the class name of its distribution.
    """

    name: str
    shape: tuple[int, ...]
    unconstrained_shape: tuple[int, ...]
    is_param: bool = False
    local: bool = False
    family: str = ""

    @property
    def size(self) -> int:
        """Number of unconstrained coordinates."""
        return math.prod(self.unconstrained_shape)


class Randomness(Protocol):
    """A source of random arrays with the type and device of `like`; every call returns new numbers."""

    def normal(self, shape: tuple[int, ...], like: Array) -> Array:
        """Standard normals."""

    def sign(self, shape: tuple[int, ...], like: Array) -> Array:
        """-1 or 1, with equal probability."""

    def keep(self, shape: tuple[int, ...], like: Array, probability: float) -> Array:
        """1 with probability `probability`, else 0."""


@dataclass
class Given:
    """The values that latent sites and parameters take in a run; `biject_to` is that of the system.

    Those of latent sites are transformed if they are `unconstrained`; `log_dets` has log |dw/du| of each afterwards.
    """

    values: Mapping[str, Array]
    unconstrained: bool
    biject_to: Any
    log_dets: dict[str, Array] = field(default_factory=dict)

    def latent(self, name: str, distribution: Any) -> Array:
        """The value of a latent site."""
        value = self.values[name]
        if self.unconstrained:
            transform, u = self.biject_to(distribution.support), value
            value = transform(u)
            self.log_dets[name] = transform.log_abs_det_jacobian(u, value).sum()
        return value


class System(Protocol):
    """A probabilistic programming system with its array library: a base class with all that two systems share.

    `maps_randomness`: whether `vmap` supports sampling, each element with its own seed. `static_shapes`: whether a
    function is compiled again for arguments of other shapes. `turn` is held by the one thread that traces a program
    or computes eagerly, because a system has one stack of handlers for all threads. `run` and sessions acquire it;
    other code that uses the handlers of a system has to acquire it too. `transforms` is the module with the
    derivatives, which have the same names and arguments in jax and torch.func. `all_rows(N)` is the handler that
    makes plates be over all N rows.
    """

    name: str
    maps_randomness: bool
    static_shapes: bool
    turn: Turn
    transforms: Any
    biject_to: Any
    all_rows: Any

    def session(
        self, dtype: str, device: str, threads: int | None = None, compiled: bool = False
    ) -> AbstractContextManager[str]:
        """A context in which everything runs in this floating type on this device; every global is restored.

        Its value is the device. `threads` are those of one operation, where they can be set (torch). `compiled`:
        records of torch are compiled.
        """
        ...

    def outside(self) -> AbstractContextManager[None]:
        """A context in which other threads may have their turn: for a user's function, or a long wait."""
        ...

    def recorded(self) -> tuple[float, tuple[str, ...]]:
        """Seconds that the present session has spent on records of functions, and notes about them for the user."""
        return 0.0, ()

    def asarray(self, value: Any, /) -> Array: ...

    def to_numpy(self, array: Array, /) -> np.ndarray: ...

    def native(self, model: Model, population: int | None = None, record: bool = True) -> Model:
        """The model as an ordinary callable of the system, with its likelihood scaled to `population` rows."""
        ...

    def plain(self, model: Model) -> Model:
        """A model written in the system itself as a function of (x, y), in the floating type of the session.

        Plates are over all rows. The user's object is not changed.
        """
        inner = called(self.in_session(model))

        @functools.wraps(inner)
        def native(x: Any, y: Any = None, **keywords: Any) -> Any:
            with self.all_rows(row_count(x)):
                return inner(x, y, **keywords)

        return native

    def in_session(self, model: Model) -> Model:
        """A model written in the system itself, in the floating type of the session."""
        return model

    def run(
        self, native: Any, x: Any, y: Any, values: Known = None, unconstrained: bool = False, seed: Any = None
    ) -> list[TracedSite]:
        """Run a native model with the given values (constrained, or unconstrained) and list its sites in order."""
        given = Given(values or {}, unconstrained, self.biject_to)
        return traced_sites(self.trace(native, x, y, given, seed), given.log_dets, drawn=y is None)

    def trace(self, native: Any, x: Any, y: Any, given: Given, seed: Any) -> Mapping[str, Any]:
        """The system's own record of one run of a native model, site by site."""
        ...

    def describe(self, native: Model, x: Any, y: Any) -> tuple[list[Site], list[TracedSite]]:
        """Shapes of all latent sites and parameters, and the other sites, without computation where possible."""
        ...

    @contextmanager
    def counted(self) -> Iterator[Callable[[], int]]:
        """Count the floating-point operations of matrix products inside; gives a function that returns their number.

        It is 0 in a system that does not need it.
        """
        yield lambda: 0

    def seeds(self, seed: int, count: int) -> Any:
        """`count` independent sources of randomness, as an array to map over."""

    def split(self, seed: Any, count: int, /) -> Any:
        """Split one of `seeds` into `count` seeds to map `randomness` over, also while a function is traced."""

    def randomness(self, seed: Any, /) -> Randomness:
        """Random arrays from one of `seeds`, or from the current state of the system (None, where it has a state)."""
        ...

    def unconstrain(self, distribution: Any, value: Array) -> Array:
        """Unconstrained coordinates u of a value in the support of the system's own distribution."""
        return self.biject_to(distribution.support).inv(value)

    def value_and_grad(self, function: Function, /) -> Callable[..., tuple[Any, Any]]:
        """The value, and the gradient in the first argument."""
        ...

    def hessian(self, function: Function, /) -> Function:
        return self.transforms.hessian(function)

    def jvp(self, function: Function, at: Any, direction: Any) -> tuple[Any, Any]:
        return self.transforms.jvp(function, (at,), (direction,))

    def vjp(self, function: Function, at: Any) -> tuple[Any, Function, Any]:
        """(value, pullback, extra) of a function of one argument that returns (value, extra).

        pullback(cotangent) is the cotangent times the Jacobian, in the structure of `at`; it can be mapped over.
        """
        value, pullback, extra = self.transforms.vjp(function, at, has_aux=True)
        return value, lambda cotangent: pullback(cotangent)[0], extra

    def vmap(self, function: Function, /, in_axes: Any = 0) -> Function: ...

    def batched(self, function: Function, size: int) -> Callable[..., None]:
        """Map `function` over the leading axis of w, `size` elements at a time, as a function (w, x, into).

        Results are written to the NumPy array `into`, which may be shorter than the results (padding).
        """
        ...

    def threads(self) -> int:
        """The number of programs that are best computed at once on a CPU; 1 means one program that uses all cores."""
        return 1

    def each(self, function: Callable[..., None], calls: Iterable[tuple[Any, ...]], threads: int) -> None:
        """Call function(*call) for every call, on `threads` threads; at most one more call is prepared ahead."""
        for call in calls:
            function(*call)

    def compile(self, function: Function, /) -> Function:
        """The function of arrays for many calls: compiled by JAX, recorded by torch. It has no effects of its own."""
        ...

    def compile_for(self, function: Function, arguments: tuple[Any, ...], quick: bool = False) -> Function:
        """Compile the function for arguments like these, for a few calls; equal programs are compiled once per process.

        `quick` prefers a short compilation to a fast program; rounding may differ.
        """
        return self.compile(function)


def check_unconstrained(name: Any, constraint: Any, real: Any) -> None:
    """Refuse a parameter with a constraint: parameters are optimised without transformation."""
    if constraint not in (None, real):
        wanted, advice = "a parameter without a constraint", "transforming a free parameter in the model"
        raise UnsupportedError.of(f"param {name!r}", wanted, "a constrained one", advice)


def traced_sites(trace: Mapping[str, Any], log_dets: Mapping[str, Array], drawn: bool) -> list[TracedSite]:
    """The sites of a trace of either system, in order; `drawn`: whether the run had no targets."""
    result = []
    for name, site in trace.items():
        kind = site["type"]
        if kind == "sample" and not site["infer"].get("_deterministic"):
            # A plate of Pyro that draws a subsample is a site, too.
            if type(site["fn"]).__name__ == "_Subsample":
                continue
            kind = "observed" if site["is_observed"] or (name == "y" and drawn) else "latent"
            local = any(frame.name == "rows" for frame in site["cond_indep_stack"])
            scale = 1.0 if site["scale"] is None else site["scale"]
            log_det = log_dets.get(name, 0.0)
            result.append(TracedSite(name, kind, site["fn"], site["value"], log_det, scale, local))
        elif kind in ("param", "deterministic", "sample"):
            result.append(
                TracedSite(name, "param" if kind == "param" else "deterministic", None, site["value"])
            )
    return result


def described(traced: Sequence[TracedSite], biject_to: Any) -> tuple[list[Site], list[TracedSite]]:
    """The result of `System.describe`, from the sites of one run; `biject_to` is that of the system."""
    sites = []
    for site in traced:
        shape = tuple(np.shape(site.value))
        if site.kind == "param":
            sites.append(Site(site.name, shape, shape, is_param=True))
        elif site.kind == "latent":
            family = type(unwrap(site.distribution)).__name__
            if getattr(site.distribution.support, "is_discrete", False):
                expected = "continuous latent variables: enumeration of discrete ones is not supported"
                advice = "summing it out in the model, as with MixtureSameFamily"
                raise UnsupportedError.of(f"site {site.name!r}", expected, f"a latent {family}", advice)
            inner = tuple(biject_to(site.distribution.support).inverse_shape(shape))
            sites.append(Site(site.name, shape, inner, local=site.local, family=family))
    return sites, [site for site in traced if site.kind in ("observed", "deterministic")]


def resolve_device(device: str) -> tuple[str, int | None]:
    """("auto" | "cpu" | "cuda", index) of a device string, or `InputError`."""
    kind, _, index = str(device).partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not index.isdigit()) or (index and kind != "cuda"):
        raise InputError.of("device", "'auto', 'cpu' or 'cuda[:i]'", repr(device), "device='auto'")
    return kind, int(index) if index else None


def cuda_index(device: str, count: Callable[[], int], library: str) -> int | None:
    """The index of the CUDA device for a device string, out of `count()` devices; None for the CPU."""
    kind, index = resolve_device(device)
    available = 0 if kind == "cpu" else count()
    if kind == "cpu" or (kind == "auto" and not available):
        return None
    if (index or 0) >= available:
        expected = f"a CUDA device for device={device!r} in {library}"
        raise DeviceError.of("", expected, f"{available} of them", "device='cpu' or the 'cuda' extra")
    return index or 0
