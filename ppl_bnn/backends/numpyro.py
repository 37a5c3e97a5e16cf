"""NumPyro on JAX, as an implementation of the protocol `System`."""

from __future__ import annotations

import contextvars
import hashlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# `import numpyro` has to precede its submodules if ArviZ is used too: `import arviz_base` leaves a lazy `numpyro`, and
# `import numpyro.distributions` alone would then load the package twice and lose its submodules.
import numpyro
import numpyro.distributions
from jax.core import Tracer
from numpyro.distributions.transforms import ExpTransform, biject_to
from numpyro.primitives import Messenger

from ppl_bnn.backends import interpretation, protocol
from ppl_bnn.backends.native import Model
from ppl_bnn.backends.protocol import Function, Given, Site, TracedSite
from ppl_bnn.backends.turns import Turn
from ppl_bnn.core.arrays import cores, power_of_two, whole
from ppl_bnn.core.processes import refuse_forked
from ppl_bnn.language.distributions import Distribution, censored_log_prob

_REAL, _POSITIVE = numpyro.distributions.constraints.real, numpyro.distributions.constraints.positive


class _ArrayNormal(interpretation.ArrayNormal, numpyro.distributions.Distribution):
    """One event of the shape of loc."""

    reparametrized_params = ["loc"]

    def __init__(self, loc: Any, validate_args: bool | None = None):
        self.loc = loc
        numpyro.distributions.Distribution.__init__(self, (), jnp.shape(loc), validate_args=validate_args)

    @property
    def support(self) -> Any:
        return numpyro.distributions.constraints.independent(_REAL, self.event_dim)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        return self.drawn(jax.random.normal(key, (*sample_shape, self.loc.size), dtype=self.loc.dtype))


class MultivariateNormal(interpretation.CholeskyFactor, _ArrayNormal):
    """Normal distribution of an array; the distribution of NumPyro supports vectors as events only."""

    arg_constraints = {"loc": _REAL, "scale_tril": numpyro.distributions.constraints.lower_cholesky}


class KroneckerNormal(interpretation.KroneckerFactor, _ArrayNormal):
    """Normal distribution of an array whose covariance is that of `KroneckerFactor`."""

    arg_constraints = {"loc": _REAL, "left_vectors": _REAL, "right_vectors": _REAL, "precisions": _POSITIVE}


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

    arg_constraints = {"scale": _POSITIVE}
    support: Any = _REAL

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


class Weighted(numpyro.distributions.Distribution):
    """A distribution whose log density is multiplied by a weight for each row; draws are those of the base."""

    arg_constraints = {}
    pytree_data_fields = ("base", "weight")

    def __init__(self, base: Any, weight: Any, *, validate_args: bool | None = None):
        self.base, self.weight = base, weight
        super().__init__(base.batch_shape, base.event_shape, validate_args=validate_args)

    @property
    def support(self) -> Any:
        return self.base.support

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        return self.base.sample(key, sample_shape)

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        return self.weight * self.base.log_prob(value)


def _mixture_of_normals(loc: Any, scale: Any, weights: Mapping[str, Any], **options: Any) -> Any:
    mixing = numpyro.distributions.Categorical(**weights, **options)
    parts = numpyro.distributions.Normal(loc, scale, **options)
    return numpyro.distributions.MixtureSameFamily(mixing, parts, **options)


# Families that NumPyro does not have, or has for vectors only, or with other arguments.
_NORMALS = (MultivariateNormal, MultivariateLogNormal, KroneckerNormal)
_OWN: dict[str, Any] = {
    **{kind.__name__: kind for kind in (*_NORMALS, EmpiricalBayes, ImproperLogUniform, Censored)},
    "NormalMixture": lambda weights, scales, **options: _mixture_of_normals(
        jnp.zeros_like(scales), scales, {"probs": weights}, **options
    ),
    "MixtureOfNormals": lambda logits, loc, scale, **options: _mixture_of_normals(
        loc, scale, {"logits": logits}, **options
    ),
    "NegativeBinomial": lambda concentration, logits, **options: numpyro.distributions.NegativeBinomialLogits(
        concentration, logits, **options
    ),
    # Rows are the batch and share one factor, so NumPyro's own distribution of vectors is enough.
    "RowNormal": numpyro.distributions.MultivariateNormal,
}


def _as_array(value: Any) -> Any:
    """Lists and NumPy arrays as arrays of the session's type; anything else unchanged."""
    return jnp.asarray(value, dtype=float) if isinstance(value, list | tuple | np.ndarray) else value


def resolve(specification: Distribution, validate: bool | None = None) -> Any:
    """The NumPyro distribution of a specification; with `validate` False, NumPyro does not check its arguments."""
    return interpretation.resolved(
        specification, _OWN, numpyro.distributions, _as_array, validate_args=validate
    )


class NumPyroInterpretation(interpretation.SystemInterpretation):
    """Every primitive of the language as a primitive of NumPyro."""

    primitives, scale, plate = numpyro, numpyro.handlers.scale, numpyro.plate
    weighted = Weighted

    def resolve(self, specification: Distribution) -> Any:
        # In a fit an extreme draw may overflow; it should give a bad density, not an exception.
        return resolve(specification, None if self.record else False)


def as_numpyro(model: Model, population: int | None = None, record: bool = True) -> Model:
    """The model as an ordinary NumPyro callable `(x, y=None)`.

    Parameters
    ----------
    model : callable
        A model in the language.
    population : int, optional
        Number of rows to which the likelihood is scaled.
    record : bool
        Whether to record f as a deterministic site, and to check the arguments of distributions.

    Returns
    -------
    callable
        A NumPyro model.

    Examples
    --------
    >>> import jax
    >>> import numpyro
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.as_numpyro(bnn.zoo.load("linear_regression"))
    >>> draws = numpyro.infer.Predictive(model, num_samples=5)(jax.random.key(0), table.x)
    >>> draws["y"].shape
    (5, 442)
    """
    return interpretation.interpreted(model, lambda: NumPyroInterpretation(population, record))


class _Assign(Messenger):
    """Latent sites and parameters take given values."""

    def __init__(self, fn: Model, given: Given):
        super().__init__(fn)
        self.given = given

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "param":
            protocol.check_unconstrained(msg["name"], msg["kwargs"].get("constraint"), _REAL)
        if msg["type"] not in ("sample", "param") or msg["name"] not in self.given.values:
            return
        if msg["type"] == "param":
            msg["value"] = self.given.values[msg["name"]]
        elif not msg["is_observed"]:
            msg["value"] = self.given.latent(msg["name"], msg["fn"])


class _AllRows(Messenger):
    """Plates with a subsample are over all rows, because the density of a subsample is only an estimate.

    A plate with as many rows as the data scales a mini-batch to a population, and is not changed.
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


def _cuda_devices() -> int:
    with suppress(RuntimeError):
        return len(jax.devices("gpu"))
    return 0


class NumPyro(protocol.System):
    """The system `ppl="numpyro"`."""

    name = "numpyro"
    maps_randomness = True
    static_shapes = True
    turn = Turn()
    transforms = jax
    biject_to = staticmethod(biject_to)
    all_rows = _AllRows
    randomness: Any = _Keys
    to_numpy: Any = staticmethod(np.asarray)
    split: Any = staticmethod(jax.random.split)
    value_and_grad: Any = staticmethod(jax.value_and_grad)
    vmap: Any = staticmethod(jax.vmap)
    native: Any = staticmethod(as_numpyro)
    # The settings of a session belong to its thread, and the turn is held only while a program is traced.
    outside: Any = staticmethod(nullcontext)

    @contextmanager
    def session(
        self, dtype: str, device: str, threads: int | None = None, compiled: bool = False
    ) -> Iterator[str]:
        refuse_forked()
        # XLA has its own threads, whose number cannot be changed once they run; `threads` is for torch,
        # and so is `compiled`.
        index = protocol.cuda_index(device, _cuda_devices, "JAX")
        chosen = jax.devices("cpu")[0] if index is None else jax.devices("gpu")[index]
        with jax.enable_x64(dtype == "float64"), jax.default_device(chosen):
            yield "cpu" if chosen.platform == "cpu" else f"cuda:{chosen.id}"

    def asarray(self, value: Any) -> Any:
        array = whole(np.asarray(value))
        return jnp.asarray(array, dtype=float if np.issubdtype(array.dtype, np.floating) else None)

    def trace(self, native: Any, x: Any, y: Any, given: Given, seed: Any) -> Mapping[str, Any]:
        assign = _Assign(native, given)
        handler = assign if seed is None else numpyro.handlers.seed(assign, seed)
        with self.turn:
            return numpyro.handlers.trace(handler).get_trace(x, y)

    def describe(self, native: Model, x: Any, y: Any) -> tuple[list[Site], list[TracedSite]]:
        found: list[tuple[list[Site], list[TracedSite]]] = []

        def shapes(x: Any, y: Any) -> None:
            traced = self.run(native, x, y, seed=jax.random.PRNGKey(0))
            found.append(protocol.described(traced, biject_to))

        jax.eval_shape(shapes, x, y)
        return found[-1]

    def seeds(self, seed: int, count: int) -> Any:
        # By JAX's default a key does not depend on how many there are. A part of them in NumPy compiles nothing.
        return np.asarray(jax.random.split(jax.random.PRNGKey(seed), power_of_two(max(count, 16))))[:count]

    def batched(self, function: Function, size: int) -> Callable[..., None]:
        compiled = self.compile(lambda w, x: jax.lax.map(lambda one: function(one, x), w, batch_size=size))

        def filled(w: Any, x: Any, into: np.ndarray) -> None:
            result = np.asarray(compiled(w, x))
            into[...] = result[tuple(slice(length) for length in into.shape)]

        return filled

    def threads(self) -> int:
        # Sharing a small product among cores is slow, so each core gets its own program. XLA itself reads NPROC.
        return max(1, int(os.environ.get("NPROC") or cores()))

    def each(self, function: Callable[..., None], calls: Iterable[tuple[Any, ...]], threads: int) -> None:
        if threads == 1:
            super().each(function, calls, threads)
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

    def compile(self, function: Function) -> Function:
        return _Compiled(self, function)

    def compile_for(self, function: Function, arguments: tuple[Any, ...], quick: bool = False) -> Function:
        lowered = jax.jit(function, keep_unused=True).lower(*arguments)
        try:
            return self.compiled(lowered, {"xla_backend_optimization_level": 0} if quick else None)
        except jax.errors.JaxRuntimeError:  # a version of XLA with another name for this option
            return self.compiled(lowered)

    def compiled(self, lowered: Any, options: Mapping[str, Any] | None = None) -> Function:
        """The compiled program of a function that JAX has lowered; equal programs are compiled once per process.

        Every fit makes new functions for JAX. Programs are therefore identified by their text, which contains all
        constants, and by the structure of their arguments and results.
        """
        trees = lowered.in_tree, jax.tree.structure(lowered.out_info)
        text = repr((trees, jax.config.jax_default_device, options, lowered.as_text()))
        key = hashlib.sha256(text.encode()).hexdigest()
        with _KEEPING:
            found = _COMPILED.pop(key, None)
        if found is None:
            found = lowered.compile(None if options is None else dict(options))
        # A program that is used is moved to the end, and the first one is dropped.
        with _KEEPING:
            _COMPILED[key] = found
            if len(_COMPILED) > KEPT_COMPILED:
                _COMPILED.pop(next(iter(_COMPILED)), None)
        return found


class _Compiled:
    """A function as a compiled program for each shape of its arguments, shared with equal programs of the process."""

    def __init__(self, system: NumPyro, function: Function):
        self._system, self._function, self._traced = system, function, jax.jit(function)
        self._found: dict[Any, Function] = {}
        self._compiling = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self._traced(*arguments)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        shapes = tuple((leaf.shape, str(leaf.dtype), leaf.weak_type) for leaf in leaves)
        key = structure, shapes, jax.config.jax_default_device
        arguments = jax.tree.unflatten(structure, leaves)
        if key not in self._found:
            # One thread traces and compiles, and the others reuse the result.
            with self._compiling:
                if key not in self._found:
                    self._found[key] = self._system.compile_for(self._function, arguments)
        return self._found[key](*arguments)


# Programs that are compiled in this process, and how many are kept.
_COMPILED: dict[str, Callable[..., Any]] = {}
_KEEPING = threading.Lock()
KEPT_COMPILED = 128
# Bytes of compiled programs on disk.
KEPT_BYTES = 4 * 2**30
# The name of such a program, as JAX gives it.
_PROGRAM_FILE = re.compile(r"-[0-9a-f]{64}-cache$")
SYSTEM = NumPyro()


def enable_compilation_cache(folder: str | None = None) -> str:
    """Keep compiled programs of JAX on disk, so that the next run of the same model starts at once.

    Several processes may share a folder. A process that reads a program while another one writes it warns, and compiles
    the program. A call removes the oldest programs of a folder that has more than 4 GiB. Opt-in, because JAX cannot
    disable it within a process.

    Parameters
    ----------
    folder : str, optional
        The folder, by default `~/.cache/ppl-bnn/jax`.

    Returns
    -------
    str
        The folder.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> bnn.enable_compilation_cache("compiled")  # once, before the first fit
    'compiled'
    """
    chosen = Path(folder) if folder else Path.home() / ".cache" / "ppl-bnn" / "jax"
    chosen.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    # Small programs, too: a fit has tens of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A limit of JAX's own would make it read one file per program whenever it adds one, and lock the folder meanwhile.
    _remove_oldest_programs(chosen, KEPT_BYTES)
    return str(chosen)


def _remove_oldest_programs(folder: Path, kept_bytes: int) -> None:
    """Remove the oldest programs of a folder until those left have at most so many bytes."""
    found = []
    for each in folder.iterdir():
        # The folder may hold other files. Another process may remove the same programs.
        with suppress(FileNotFoundError):
            if not _PROGRAM_FILE.search(each.name):
                continue
            about = each.stat()
            found.append((about.st_mtime_ns, about.st_size, each))
    excess = sum(size for _, size, _ in found) - kept_bytes
    for _, size, each in sorted(found):
        if excess <= 0:
            break
        each.unlink(missing_ok=True)
        excess -= size
