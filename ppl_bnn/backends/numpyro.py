"""NumPyro on JAX, as an implementation of the protocol `System`."""

from __future__ import annotations

import contextvars
import functools
import hashlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# `import numpyro` has to precede its submodules if ArviZ is used too: `import arviz_base` leaves a lazy `numpyro`, and
# `import numpyro.distributions` alone would then load the package twice and lose its submodules.
import numpyro
import numpyro.distributions
from numpyro.distributions.transforms import ExpTransform, biject_to
from numpyro.primitives import Messenger

from ppl_bnn.backends.native import called
from ppl_bnn.backends.protocol import (
    Model,
    Site,
    TracedSite,
    constrained_parameter,
    described,
    resolve_device,
)
from ppl_bnn.backends.turns import Turn
from ppl_bnn.core.arrays import cores, row_count
from ppl_bnn.core.errors import DeviceError
from ppl_bnn.core.processes import refuse_forked
from ppl_bnn.language.distributions import Distribution, censored_log_prob, check_no_nested
from ppl_bnn.language.primitives import Interpretation, Message


class _ArrayNormal(numpyro.distributions.Distribution):
    """loc + A eps over an array, eps standard normal; a subclass defines A. One event of the shape of loc."""

    loc: Any
    reparametrized_params = ["loc"]

    def __init__(self, loc: Any, validate_args: bool | None = None):
        self.loc = loc
        super().__init__((), jnp.shape(loc), validate_args=validate_args)

    @property
    def support(self) -> Any:
        return numpyro.distributions.constraints.independent(
            numpyro.distributions.constraints.real, self.event_dim
        )

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        eps = jax.random.normal(key, (*sample_shape, self.loc.size), dtype=self.loc.dtype)
        return self.loc + self.spread(eps).reshape((*sample_shape, *self.event_shape))

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        deviation = value - self.loc
        batch = jnp.shape(deviation)[: jnp.ndim(deviation) - self.event_dim]
        eps = self.gather(deviation.reshape((*batch, self.loc.size)))
        constant = self.log_volume() + 0.5 * self.loc.size * math.log(2.0 * math.pi)
        return -0.5 * jnp.sum(eps**2, axis=-1) - constant

    def spread(self, eps: Any) -> Any:
        """A eps, (..., P) to (..., P)."""
        raise NotImplementedError

    def gather(self, deviation: Any) -> Any:
        """A^-1 deviation, (..., P) to (..., P)."""
        raise NotImplementedError

    def log_volume(self) -> Any:
        """log |det A|."""
        raise NotImplementedError


class MultivariateNormal(_ArrayNormal):
    """Normal distribution of an array; the distribution of NumPyro supports vectors as events only.

    Parameters
    ----------
    loc : array
        Mean.
    scale_tril : array
        Cholesky factor of the covariance of the ravelled array.
    """

    arg_constraints = {
        "loc": numpyro.distributions.constraints.real,
        "scale_tril": numpyro.distributions.constraints.lower_cholesky,
    }

    def __init__(self, loc: Any, scale_tril: Any, *, validate_args: bool | None = None):
        self.scale_tril = scale_tril
        super().__init__(loc, validate_args)

    def spread(self, eps: Any) -> Any:
        return eps @ self.scale_tril.T

    def gather(self, deviation: Any) -> Any:
        flat = deviation.reshape(-1, self.loc.size).T
        return jax.scipy.linalg.solve_triangular(self.scale_tril, flat, lower=True).T.reshape(deviation.shape)

    def log_volume(self) -> Any:
        return jnp.sum(jnp.log(jnp.diagonal(self.scale_tril)))


class KroneckerNormal(_ArrayNormal):
    """Normal distribution with A = (Q_l (x) Q_r) diag(precisions^-1/2), which is never built.

    Parameters
    ----------
    loc : array
        Mean.
    left_vectors, right_vectors : array
        Q_l (I, I) and Q_r (O, O), orthogonal.
    precisions : array
        Precisions, (I, O).
    """

    arg_constraints = {
        "loc": numpyro.distributions.constraints.real,
        "left_vectors": numpyro.distributions.constraints.real,
        "right_vectors": numpyro.distributions.constraints.real,
        "precisions": numpyro.distributions.constraints.positive,
    }

    def __init__(
        self,
        loc: Any,
        left_vectors: Any,
        right_vectors: Any,
        precisions: Any,
        *,
        validate_args: bool | None = None,
    ):
        self.left_vectors, self.right_vectors, self.precisions = left_vectors, right_vectors, precisions
        super().__init__(loc, validate_args)

    def _as_matrices(self, flat: Any) -> Any:
        return flat.reshape((*flat.shape[:-1], *self.precisions.shape))

    def spread(self, eps: Any) -> Any:
        scaled = self._as_matrices(eps) / jnp.sqrt(self.precisions)
        return (self.left_vectors @ scaled @ self.right_vectors.T).reshape(eps.shape)

    def gather(self, deviation: Any) -> Any:
        turned = self.left_vectors.T @ self._as_matrices(deviation) @ self.right_vectors
        return (jnp.sqrt(self.precisions) * turned).reshape(deviation.shape)

    def log_volume(self) -> Any:
        return -0.5 * jnp.sum(jnp.log(self.precisions))


class MultivariateLogNormal(numpyro.distributions.TransformedDistribution):
    """exp of a `MultivariateNormal`, elementwise."""

    arg_constraints = MultivariateNormal.arg_constraints

    def __init__(self, loc: Any, scale_tril: Any, *, validate_args: bool | None = None):
        base = MultivariateNormal(loc, scale_tril, validate_args=validate_args)
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__(base, ExpTransform(), validate_args=validate_args)


class EmpiricalBayes(numpyro.distributions.Normal):
    """Normal(0, scale), from which starts are drawn; `per` defines which weights share the scale of a method."""

    pytree_aux_fields = ("per",)

    def __init__(self, scale: Any = 1.0, per: str = "weight", *, validate_args: bool | None = None):
        self.per = per
        super().__init__(0.0, scale, validate_args=validate_args)


class ImproperLogUniform(numpyro.distributions.Distribution):
    """log p(w) = -log |w|, without a normalising constant. Starts are drawn from Normal(0, scale)."""

    arg_constraints = {"scale": numpyro.distributions.constraints.positive}
    support: Any = numpyro.distributions.constraints.real

    def __init__(self, scale: Any = 1.0, *, validate_args: bool | None = None):
        self.scale = scale
        super().__init__(jnp.shape(scale), validate_args=validate_args)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        return self.scale * jax.random.normal(key, (*sample_shape, *self.batch_shape), dtype=float)

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        return -jnp.log(jnp.abs(value))


class Censored(numpyro.distributions.Distribution):
    """Rows (value, event) of a base distribution, with log density `censored_log_prob`; draws have event 1."""

    arg_constraints = {}
    pytree_data_fields = ("base", "arguments")
    pytree_aux_fields = ("family",)
    support: Any = numpyro.distributions.constraints.real_vector

    def __init__(
        self, base: Any, family: str, arguments: Mapping[str, Any], *, validate_args: bool | None = None
    ):
        self.base, self.family, self.arguments = base, family, dict(arguments)
        super().__init__(base.batch_shape, (2,), validate_args=validate_args)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        value = self.base.sample(key, sample_shape)
        return jnp.stack([value, jnp.ones_like(value)], axis=-1)

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        return censored_log_prob(self.family, self.arguments, value)


# Families that NumPyro does not have, or has for vectors only.
_OWN = {
    family.__name__: family
    for family in (
        MultivariateNormal,
        MultivariateLogNormal,
        KroneckerNormal,
        EmpiricalBayes,
        ImproperLogUniform,
    )
}


def _as_array(value: Any) -> Any:
    """Lists and NumPy arrays as arrays of the session's type; plain numbers unchanged."""
    return jnp.asarray(value, dtype=float) if isinstance(value, list | tuple | np.ndarray) else value


def resolve(specification: Distribution, validate: bool | None = None) -> Any:
    """The NumPyro distribution of a specification.

    Parameters
    ----------
    specification : Distribution
        The specification.
    validate : bool, optional
        False disables NumPyro's checks of its arguments.

    Returns
    -------
    numpyro.distributions.Distribution
        The distribution.

    Raises
    ------
    ModelError
        An argument is a distribution itself.
    """
    if specification.family == "NormalMixture":
        weights = jnp.asarray(specification.arguments["weights"], dtype=float)
        scales = jnp.asarray(specification.arguments["scales"], dtype=float)
        result = numpyro.distributions.MixtureSameFamily(
            numpyro.distributions.Categorical(probs=weights, validate_args=validate),
            numpyro.distributions.Normal(jnp.zeros_like(scales), scales, validate_args=validate),
            validate_args=validate,
        )
    elif specification.family == "MixtureOfNormals":
        logits, loc, scale = map(_as_array, specification.arguments.values())
        result = numpyro.distributions.MixtureSameFamily(
            numpyro.distributions.Categorical(logits=logits, validate_args=validate),
            numpyro.distributions.Normal(loc, scale, validate_args=validate),
            validate_args=validate,
        )
    elif specification.family == "NegativeBinomial":
        concentration, logits = map(_as_array, specification.arguments.values())
        result = numpyro.distributions.NegativeBinomialLogits(concentration, logits, validate_args=validate)
    elif specification.family == "RowNormal":
        # Rows are the batch and share one factor, so NumPyro's own distribution of vectors is enough.
        loc, scale_tril = map(_as_array, specification.arguments.values())
        result = numpyro.distributions.MultivariateNormal(loc, scale_tril=scale_tril, validate_args=validate)
    elif specification.family == "Censored":
        base = specification.arguments["base"]
        arguments = {name: _as_array(value) for name, value in base.arguments.items()}
        result = Censored(resolve(base, validate), base.family, arguments, validate_args=validate)
    elif specification.family in ("Bernoulli", "Categorical"):
        result = getattr(numpyro.distributions, specification.family)(
            logits=specification.arguments["logits"], validate_args=validate
        )
    else:
        check_no_nested(specification)
        arguments = {name: _as_array(value) for name, value in specification.arguments.items()}
        family = _OWN.get(specification.family) or getattr(numpyro.distributions, specification.family)
        result = family(**arguments, validate_args=validate)
    if specification.shape is not None:
        result = result.expand(specification.shape)
    return result.to_event(specification.event_dims) if specification.event_dims else result


class NumPyroInterpretation(Interpretation):
    """Every primitive of the language as a primitive of NumPyro.

    Parameters
    ----------
    population : int or None
        Number of rows to which the likelihood is scaled.
    record : bool
        Whether to record f, and to check the arguments of distributions.
    """

    def __init__(self, population: int | None, record: bool):
        super().__init__()
        self.population = population
        self.record = record
        # In a fit an extreme draw may overflow; it should give a bad density, not an exception.
        self.validate = None if record else False

    def process(self, msg: Message) -> None:
        super().process(msg)
        arguments = msg.arguments
        if msg.kind == "sample":
            msg.answer(
                numpyro.sample(
                    msg.name, resolve(arguments["distribution"], self.validate), obs=arguments["obs"]
                )
            )
        elif msg.kind == "deterministic":
            msg.answer(numpyro.deterministic(msg.name, arguments["value"]))
        elif msg.kind == "param":
            init = arguments["init"]
            if isinstance(init, Distribution):
                init = resolve(init, self.validate).sample
            msg.answer(numpyro.param(msg.name, init))
        elif msg.kind == "rows":
            msg.answer(self._plate("rows", arguments["n"]))
        elif msg.kind == "observe":
            f = arguments["f"]
            if self.record:
                numpyro.deterministic("f", f)
            with self._plate("observations", f.shape[0]):
                msg.answer(
                    numpyro.sample(
                        "y",
                        resolve(arguments["likelihood"].distribution(f), self.validate),
                        obs=arguments["y"],
                    )
                )

    @contextmanager
    def _plate(self, name: str, rows: int) -> Iterator[None]:
        with ExitStack() as stack:
            if self.population is not None and self.population != rows:
                # A plate with subsample_size refuses to run under HMC; the scale handler does not.
                stack.enter_context(numpyro.handlers.scale(scale=self.population / rows))
            stack.enter_context(numpyro.plate(name, rows))
            yield


def as_numpyro(model: Model, population: int | None = None, record: bool = True) -> Model:
    """The model as an ordinary NumPyro callable `(x, y=None)`.

    Parameters
    ----------
    model : callable
        A model in the language.
    population : int, optional
        Number of rows to which the likelihood is scaled.
    record : bool
        Whether to record f as a deterministic site.

    Returns
    -------
    callable
        A NumPyro model.
    """

    @functools.wraps(getattr(model, "func", model))
    def native(x: Any, y: Any = None, **keywords: Any) -> None:
        with NumPyroInterpretation(population, record):
            model(x, y, **keywords)

    return native


class _Assign(Messenger):
    """Latent sites and parameters take given values; unconstrained ones are transformed, and their log det is kept."""

    def __init__(self, fn: Model, values: Mapping[str, Any], unconstrained: bool):
        super().__init__(fn)
        self.values = values
        self.unconstrained = unconstrained
        self.log_dets: dict[str, Any] = {}

    def process_message(self, msg: Any) -> None:
        constraint = msg["kwargs"].get("constraint") if msg["type"] == "param" else None
        if constraint not in (None, numpyro.distributions.constraints.real):
            raise constrained_parameter(msg["name"])
        if msg["type"] not in ("sample", "param") or msg["name"] not in self.values:
            return
        if msg["type"] == "sample" and msg["is_observed"]:
            return
        value = self.values[msg["name"]]
        if self.unconstrained and msg["type"] == "sample":
            transform = biject_to(msg["fn"].support)
            u = value
            value = transform(u)
            log_det = transform.log_abs_det_jacobian(u, value)
            self.log_dets[msg["name"]] = jnp.sum(log_det)
        msg["value"] = value


class _AllRows(Messenger):
    """Plates with a subsample of the rows are over all rows, because the density of a subsample is only an estimate.

    A plate with as many rows as the data is not changed: it scales a mini-batch to a population.
    """

    def __init__(self, rows: int):
        super().__init__()
        self.rows = rows

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate":
            size, subsample = msg["args"]
            if subsample not in (None, size, self.rows):
                msg["args"] = (size, size)
                msg["value"] = jnp.arange(size)


class _Keys:
    """`Randomness` from a key, split at each call."""

    def __init__(self, key: Any):
        self.key = key

    def _next(self) -> Any:
        self.key, key = jax.random.split(self.key)
        return key

    def normal(self, shape: tuple[int, ...], like: Any) -> Any:
        return jax.random.normal(self._next(), shape, dtype=like.dtype)

    def sign(self, shape: tuple[int, ...], like: Any) -> Any:
        return jax.random.rademacher(self._next(), shape, dtype=like.dtype)

    def keep(self, shape: tuple[int, ...], like: Any, probability: float) -> Any:
        return jax.random.bernoulli(self._next(), probability, shape).astype(like.dtype)


class NumPyro:
    """The system `ppl="numpyro"`."""

    name = "numpyro"
    maps_randomness = True
    turn = Turn()

    @contextmanager
    def session(self, dtype: str, device: str, threads: int | None = None) -> Iterator[str]:
        refuse_forked()
        # XLA has its own threads, whose number cannot be changed once they run; `threads` is for torch.
        chosen = self._device(device)
        with jax.enable_x64(dtype == "float64"), jax.default_device(chosen):
            yield "cpu" if chosen.platform == "cpu" else f"cuda:{chosen.id}"

    def outside(self) -> AbstractContextManager[None]:
        # The settings of a session belong to its thread, and the turn is held only while a program is traced.
        return nullcontext()

    def _device(self, device: str) -> Any:
        kind, index = resolve_device(device)
        available: list[Any] = []
        if kind != "cpu":
            try:
                available = jax.devices("gpu")
            except RuntimeError:
                available = []
        if kind == "cpu" or (kind == "auto" and not available):
            return jax.devices("cpu")[0]
        if (index or 0) >= len(available):
            raise DeviceError.of(
                "",
                f"a CUDA device for device={device!r} in JAX",
                f"{len(available)} of them",
                "device='cpu' or the 'cuda' extra",
            )
        return available[index or 0]

    def asarray(self, value: Any) -> Any:
        array = np.asarray(value)
        return jnp.asarray(array, dtype=float if np.issubdtype(array.dtype, np.floating) else None)

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def native(self, model: Model, population: int | None = None, record: bool = True) -> Model:
        return as_numpyro(model, population, record)

    def plain(self, model: Model) -> Model:
        inner = called(model)

        @functools.wraps(inner)
        def native(x: Any, y: Any = None, **keywords: Any) -> Any:
            with _AllRows(row_count(x)):
                return inner(x, y, **keywords)

        return native

    def run(
        self,
        native: Model,
        x: Any,
        y: Any,
        values: Mapping[str, Any] | None = None,
        unconstrained: bool = False,
        seed: Any = None,
    ) -> list[TracedSite]:
        assign = _Assign(native, values or {}, unconstrained)
        handler = assign if seed is None else numpyro.handlers.seed(assign, seed)
        with self.turn:
            trace = numpyro.handlers.trace(handler).get_trace(x, y)
        result = []
        for name, site in trace.items():
            if site["type"] == "sample":
                kind = "observed" if site["is_observed"] else "latent"
                if name == "y" and y is None:
                    kind = "observed"
                local = any(frame.name == "rows" for frame in site["cond_indep_stack"])
                scale = 1.0 if site["scale"] is None else site["scale"]
                result.append(
                    TracedSite(
                        name, kind, site["fn"], site["value"], assign.log_dets.get(name, 0.0), scale, local
                    )
                )
            elif site["type"] in ("param", "deterministic"):
                result.append(TracedSite(name, site["type"], None, site["value"]))
        return result

    def describe(self, native: Model, x: Any, y: Any) -> tuple[list[Site], list[TracedSite]]:
        found: list[tuple[list[Site], list[TracedSite]]] = []

        def shapes(x: Any, y: Any) -> None:
            traced = self.run(native, x, y, seed=jax.random.PRNGKey(0))
            found.append(described(traced, lambda d, shape: biject_to(d.support).inverse_shape(shape)))

        jax.eval_shape(shapes, x, y)
        return found[-1]

    def seeds(self, seed: int, count: int) -> Any:
        return jax.random.split(jax.random.PRNGKey(seed), count)

    def split(self, seed: Any, count: int) -> Any:
        return jax.random.split(seed, count)

    def randomness(self, seed: Any) -> _Keys:
        return _Keys(seed)

    def unconstrain(self, distribution: Any, value: Any) -> Any:
        return biject_to(distribution.support).inv(value)

    def value_and_grad(self, function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        return jax.value_and_grad(function)

    def hessian(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.hessian(function)

    def jacobian(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jacrev(function)

    def jvp(self, function: Callable[..., Any], at: Any, direction: Any) -> tuple[Any, Any]:
        return jax.jvp(function, (at,), (direction,))

    def vjp(self, function: Callable[..., Any], at: Any) -> tuple[Any, Callable[..., Any], Any]:
        value, pullback, extra = jax.vjp(function, at, has_aux=True)
        return value, lambda cotangent: pullback(cotangent)[0], extra

    def vmap(self, function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        return jax.vmap(function, in_axes=in_axes)

    def batched(self, function: Callable[..., Any], size: int) -> Callable[..., None]:
        compiled = jax.jit(lambda w, x: jax.lax.map(lambda one: function(one, x), w, batch_size=size))

        traced: set[Any] = set()
        tracing = threading.Lock()

        def filled(w: Any, x: Any, into: np.ndarray) -> None:
            shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves((w, x)))
            key = shapes, jax.config.jax_default_device
            # One thread traces and compiles, and the others reuse the result.
            with nullcontext() if key in traced else tracing:
                result = np.asarray(compiled(w, x))
                traced.add(key)
            into[...] = result[tuple(slice(length) for length in into.shape)]

        return filled

    def threads(self) -> int:
        # XLA computes one program after another, and sharing a small product among cores is slow; a program per core
        # avoids that. XLA itself reads NPROC.
        return max(1, int(os.environ.get("NPROC") or cores()))

    def each(self, function: Callable[..., None], calls: Iterable[tuple[Any, ...]], threads: int) -> None:
        if threads == 1:
            for call in calls:
                function(*call)
            return
        dtype = "float64" if jax.config.jax_enable_x64 else "float32"

        def computed(call: tuple[Any, ...]) -> None:
            # The settings of a session belong to a thread; several threads are used on CPUs only.
            with self.session(dtype, "cpu"):
                function(*call)

        # Few calls are prepared ahead, because their arguments take memory and an interrupt waits for them.
        waiting: deque[Future[None]] = deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="predict") as pool:
            for call in calls:
                waiting.append(pool.submit(contextvars.copy_context().run, computed, call))
                if len(waiting) > threads:
                    waiting.popleft().result()
            while waiting:
                waiting.popleft().result()

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function)

    def compile_for(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], quick: bool = False
    ) -> Callable[..., Any]:
        # Every fit binds its model again, which is a new function to JAX. Programs are therefore identified by their
        # text, which contains all constants, and by the structure of their arguments and results.
        lowered = jax.jit(function, keep_unused=True).lower(*arguments)
        trees = jax.tree.structure(arguments), jax.tree.structure(lowered.out_info)
        said = repr((trees, jax.config.jax_default_device, quick, lowered.as_text()))
        key = hashlib.sha256(said.encode()).hexdigest()
        with _KEEPING:
            found = _COMPILED.pop(key, None)
        if found is None:
            try:
                found = lowered.compile({"xla_backend_optimization_level": 0} if quick else None)
            except jax.errors.JaxRuntimeError:  # a version of XLA with another name for this option
                found = lowered.compile()
        # A program that is used is moved to the end, and the first one is dropped.
        with _KEEPING:
            _COMPILED[key] = found
            if len(_COMPILED) > KEPT_COMPILED:
                _COMPILED.pop(next(iter(_COMPILED)), None)
        return found


# Programs that `compile_for` has compiled in this process, and how many are kept.
_COMPILED: dict[str, Callable[..., Any]] = {}
_KEEPING = threading.Lock()
KEPT_COMPILED = 32
SYSTEM = NumPyro()


def enable_compilation_cache(folder: str | None = None) -> str:
    """Keep compiled programs of JAX on disk, so that the next run of the same model starts at once.

    Opt-in, because JAX cannot disable it within a process.

    Parameters
    ----------
    folder : str, optional
        The folder, by default `~/.cache/ppl-bnn/jax`.

    Returns
    -------
    str
        The folder.
    """
    from pathlib import Path

    chosen = Path(folder) if folder else Path.home() / ".cache" / "ppl-bnn" / "jax"
    chosen.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return str(chosen)
