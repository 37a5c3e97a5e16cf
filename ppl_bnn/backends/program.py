"""A model bound to one system and to the shapes of its data.

`Program` has the densities in unconstrained coordinates, the predictor, and conversions between dicts and flat vectors.
Every method works on a `Program`. `Problem` is a program with its training data, inside a session.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.backends.native import check_observation, native_eta, native_likelihood, unwrap
from ppl_bnn.backends.protocol import Model, Site, System, TracedSite
from ppl_bnn.core.arrays import (
    Array,
    chunks,
    describe_shapes,
    iterate_seeds,
    map_data,
    on_cpu,
    padded,
    padded_seeds,
    row_count,
    unravel,
)
from ppl_bnn.core.errors import ModelError, unknown_name
from ppl_bnn.language.handlers import network_output, recorded_linear

# Bytes and rows of a chunk of predictions on a CPU, where the budget allows more.
CACHE, CACHE_ROWS = 2**24, 2000
# The same where every core has a chunk of its own, and its least size as a multiple of the weights of a draw, since
# weights are read again for every chunk of rows.
OWN_CACHE, OWN_CACHE_ROWS, OWN_CACHE_WEIGHTS = 2**21, 500, 4
# Bytes that the activations of a density over many draws may take.
DENSITY_MEMORY = 2**28
# Number of coordinates up to which an optimised compilation costs more than the draws from the prior.
QUICK_PARAMETERS = 100_000
# Rows of a streamed fit that are on the device at a time.
STREAMED_ROWS = 4096


@dataclass
class Program:
    """A model bound to one system: its densities in unconstrained coordinates and its predictor.

    Build it with `Program.of` inside a session of the system. Methods take and return arrays of the system, except
    those documented with NumPy.

    Parameters
    ----------
    system : System
        The system.
    model : callable
        The user's model.
    native : callable
        The model as a callable of the system.
    language : bool
        Whether the model is written in the language.
    observed : str
        Name of the observed site.
    sites : dict of str to Site
        Latent sites and parameters, in the order of the program.
    likelihood
        The likelihood, without the values of one run.
    rows : int
        Number of rows.
    outputs : int, optional
        Number of network outputs; None for a plain model.
    coupled : bool
        Whether the rows interact.
    target_shape : tuple of int
        Shape of y.
    deterministic : tuple of str
        Names of the deterministic sites of a plain model.
    """

    system: System
    model: Model
    native: Model
    language: bool
    observed: str
    sites: dict[str, Site]
    likelihood: Any
    rows: int
    outputs: int | None = None
    coupled: bool = False
    target_shape: tuple[int, ...] = ()
    deterministic: tuple[str, ...] = ()
    _compiled: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, chosen: System, model: Model, x: Any, y: Any, *, language: bool, observed: str | None = None
    ) -> Program:
        """Trace `model` once on data of the system and check that it is a model.

        Raises
        ------
        ModelError
            No observed site, several of them without a name given, or no random variable.
        UnknownNameError
            There is no observed site of the given name.
        """
        # f is not recorded, because it comes from the network function and a record costs a site per run.
        native = chosen.native(model, record=False) if language else chosen.plain(model)
        described, others = chosen.describe(native, x, y)
        observations = [site for site in others if site.kind == "observed"]
        # To a system a plain factor of the density is an observed site too, although it observes nothing.
        names = [site.name for site in observations if type(site.distribution).__name__ != "Unit"]
        if observed is None:
            if len(names) != 1:
                raise ModelError.of(
                    "",
                    "exactly one observed site",
                    f"{len(names)}: {names}",
                    "observed='name of the site', or passing y to it",
                )
            observed = names[0]
        elif observed not in names:
            raise unknown_name("observed site", observed, names)
        if not described:
            raise ModelError.of(
                "", "at least one random variable or parameter", "none", "a prior over the weights"
            )
        sites = {site.name: site for site in described}
        outputs, coupled, deterministic = None, False, ()
        targets = (row_count(x),) if y is None else tuple(y.shape)
        if language:
            likelihood, outputs, coupled = cls._end_of_model(chosen, model, x)
        else:
            observation = next(site for site in observations if site.name == observed)
            check_observation(observed, observation.distribution, targets)
            likelihood = native_likelihood(observation.distribution, targets)
            deterministic = tuple(site.name for site in others if site.kind == "deterministic")
        return cls(
            chosen,
            model,
            native,
            language,
            observed,
            sites,
            likelihood,
            row_count(x),
            outputs,
            coupled,
            targets,
            deterministic,
        )

    @staticmethod
    def _end_of_model(chosen: System, model: Model, x: Any) -> tuple[Any, int, bool]:
        """The likelihood's form, the number of network outputs, and whether the rows of the model interact."""
        from ppl_bnn.language.primitives import Handler, Message

        class Catch(Handler):
            likelihood: Any = None
            outputs = 0
            coupled = False

            def process(self, msg: Message) -> None:
                if msg.kind == "observe":
                    self.likelihood = msg.arguments["likelihood"]
                    self.outputs = int(msg.arguments["f"].shape[-1])
                elif msg.kind == "coupled":
                    self.coupled = True

        catch = Catch()

        def caught(x: Any, y: Any = None) -> None:
            with catch:
                model(x, None)

        chosen.describe(chosen.native(caught), x, None)
        return catch.likelihood.form, catch.outputs, catch.coupled

    def classes(self, y: np.ndarray) -> int:
        """The number of classes; for a plain model without this information it follows from the labels."""
        known = getattr(self.likelihood, "classes", None)
        if known is not None:
            return known
        if getattr(self.likelihood, "family", type(self.likelihood).__name__) == "Bernoulli":
            return 2
        return int(np.max(y)) + 1 if self.outputs is None else self.outputs

    # -- sites

    @property
    def latents(self) -> list[Site]:
        """The latent sites."""
        return [site for site in self.sites.values() if not site.is_param]

    @property
    def params(self) -> list[Site]:
        """The parameters without a prior."""
        return [site for site in self.sites.values() if site.is_param]

    @property
    def has_local(self) -> bool:
        """Whether a site belongs to rows."""
        return any(site.local for site in self.sites.values())

    @property
    def parameter_count(self) -> int:
        """Number of unconstrained coordinates, including parameters without a prior."""
        return sum(site.size for site in self.sites.values())

    def ravel(self, u: Mapping[str, Array], names: Sequence[str] | None = None) -> Array:
        """Flat vector of the unconstrained values, sites in the order of the program."""
        from ppl_bnn.language import ops

        return ops.concatenate([u[name].reshape(-1) for name in (names or self.sites)])

    def unravel(self, flat: Array, names: Sequence[str] | None = None) -> dict[str, Array]:
        """The inverse of `ravel`; leading axes of `flat` are kept."""
        return unravel(flat, {name: self.sites[name].unconstrained_shape for name in names or self.sites})

    # -- densities, in the system

    def _run(self, u: Mapping[str, Array], x: Any, y: Any) -> list[TracedSite]:
        return self.system.run(self.native, x, y, values=u, unconstrained=True)

    def log_prior(self, u: Mapping[str, Array], x: Any, y: Any, jacobian: bool = True) -> Array:
        """log p(w(u)) + log |dw/du|, a scalar; without the second term where `jacobian` is False."""
        return _log_prior(self._run(u, x, y), jacobian)

    def log_likelihood(self, u: Mapping[str, Array], x: Any, y: Any) -> Array:
        """log p(y_i | x_i, w(u)) for each row, shape (N,)."""
        distribution = self._observation(self._run(u, x, y)).distribution
        each = distribution.log_prob(y)
        if not self.language and each.ndim == 0:
            # A plain model may declare all rows as one event; each row still has its own density.
            each = unwrap(distribution).log_prob(y)
        return each if each.ndim < 2 else each.reshape(each.shape[0], -1).sum(-1)

    def log_joint(
        self, u: Mapping[str, Array], x: Any, y: Any, scale: float = 1.0, jacobian: bool = True
    ) -> Array:
        """log p(w(u)) + log |dw/du| + scale * sum_i log p(y_i | x_i, w(u)), a scalar.

        Parameters
        ----------
        u : mapping of str to array
            Unconstrained values.
        x, y
            Data.
        scale : float
            N/B where x and y are B rows out of N; it multiplies every term that belongs to rows, including latent
            variables inside `rows`.
        jacobian : bool
            With False, the density in the coordinates of the program.

        Returns
        -------
        array
            The log joint density.
        """
        sites = self._run(u, x, y)
        total = _log_prior(sites, jacobian, scale)
        for site in sites:
            if site.kind == "observed":
                factor = site.scale * (scale if site.local or site.name == self.observed else 1.0)
                value = y if site.name == self.observed else site.value
                total = total + factor * site.distribution.log_prob(value).sum()
        return total

    def _observation(self, sites: list[TracedSite]) -> TracedSite:
        return next(site for site in sites if site.name == self.observed)

    def constrain(self, u: Mapping[str, Array], x: Any, y: Any) -> dict[str, Array]:
        """The values w(u) of all latent sites and parameters."""
        return {site.name: site.value for site in self._run(u, x, y) if site.kind in ("latent", "param")}

    def predictor(self, w: Mapping[str, Array], x: Any, seed: Any = None) -> Array:
        """eta (N, D) of one set of values `w`; per-row latent variables are drawn from `seed`."""
        if self.language and not self.has_local:
            return network_output(self.model, w, x).predictor
        if self.language:
            return self._predictor_with_rows(w, x, seed)
        # The observation gets a value of its shape, so that none is drawn: only its distribution is needed.
        rows = (row_count(x), *self.target_shape[1:])
        unseen = self.system.asarray(np.zeros(rows))
        sites = self.system.run(self.native, x, None, values={**w, self.observed: unseen}, seed=seed)
        distribution = next(site for site in sites if site.name == self.observed).distribution
        check_observation(self.observed, distribution, rows)
        return native_eta(self.system.asarray(np.zeros(())), self.likelihood, distribution, rows)

    def _predictor_with_rows(self, w: Mapping[str, Array], x: Any, seed: Any) -> Array:
        from ppl_bnn.language.primitives import Handler, Message

        class Catch(Handler):
            eta: Any = None

            def process(self, msg: Message) -> None:
                if msg.kind == "observe":
                    self.eta = msg.arguments["likelihood"].predictor(msg.arguments["f"])

        catch = Catch()

        def caught(x: Any, y: Any = None) -> None:
            with catch:
                self.model(x, None)

        shared = {name: value for name, value in w.items() if not self.sites[name].local}
        self.system.run(self.system.native(caught), x, None, values=shared, seed=seed)
        return catch.eta

    # -- many draws at once, NumPy in and out

    def constrain_draws(self, u: Mapping[str, np.ndarray], x: Any, y: Any) -> dict[str, np.ndarray]:
        """NumPy: constrain draws with one leading axis; x and y are arrays of the system."""
        function = self.cached("constrain", lambda: self.mapped(self.constrain))
        values = {name: self.system.asarray(value) for name, value in u.items()}
        w = function(values, x, y)
        # JAX returns a dict in alphabetical order; other code needs the sites in the order of the program.
        return {name: self.system.to_numpy(w[name]) for name in self.sites if name in w}

    def deterministic_draws(self, u: Mapping[str, np.ndarray], x: Any, y: Any) -> dict[str, np.ndarray]:
        """NumPy: the deterministic sites of a plain model, for draws of u with one leading axis."""
        if not self.deterministic:
            return {}

        from ppl_bnn.language import ops

        def sites(u: Mapping[str, Array], x: Any, y: Any) -> dict[str, Array]:
            traced = {site.name: site.value for site in self._run(u, x, y)}
            # A value may be a plain number.
            return {
                name: ops.asarray(traced[name], like=next(iter(u.values()))) for name in self.deterministic
            }

        function = self.cached("deterministic", lambda: self.mapped(sites))
        found = function({name: self.system.asarray(value) for name, value in u.items()}, x, y)
        return {name: self.system.to_numpy(found[name]) for name in self.deterministic}

    def log_joint_draws(self, u: Mapping[str, np.ndarray], x: Any, y: Any) -> np.ndarray:
        """NumPy: log joint of draws with one leading axis, shape (S,)."""
        return self._density_draws(self.cached("log_joint", lambda: self.mapped(self.log_joint)), u, x, y)

    def log_prior_draws(self, u: Mapping[str, np.ndarray], x: Any, y: Any) -> np.ndarray:
        """NumPy: log prior of draws with one leading axis, shape (S,)."""
        return self._density_draws(self.cached("log_prior", lambda: self.mapped(self.log_prior)), u, x, y)

    def _density_draws(
        self, function: Callable[..., Any], u: Mapping[str, np.ndarray], x: Any, y: Any
    ) -> np.ndarray:
        """A density for many draws, with as many at a time as memory allows: it stores draws x rows x units."""
        count = len(next(iter(u.values())))
        units = sum(value.shape[-1] if value.ndim > 1 else 1 for value in u.values())
        size = int(np.clip(DENSITY_MEMORY // (16 * units * self.rows), 1, count))
        parts = []
        for start, stop in chunks(count, size):
            values = {name: self.system.asarray(padded(value[start:stop], size)) for name, value in u.items()}
            parts.append(self.system.to_numpy(function(values, x, y))[: stop - start])
        return np.concatenate(parts)

    def predictor_draws(
        self, w: Mapping[str, np.ndarray], x: Any, seed: int = 0, memory: int = 2**28
    ) -> np.ndarray:
        """NumPy: eta (S, N, D) of draws with one leading axis, vectorised over draws and in chunks of rows.

        One compiled function is used for all chunks (the last is padded).

        Parameters
        ----------
        w : mapping of str to ndarray
            Constrained draws.
        x
            Inputs, NumPy too.
        seed : int
            Seed of per-row latent variables.
        memory : int
            Bound on the memory besides the inputs and the result, in bytes.

        Returns
        -------
        ndarray
            Predictors, (S, N, D).
        """
        if self.has_local:
            # A per-row variable belongs to the training rows; at new rows there is another one.
            w = {name: value for name, value in w.items() if not self.sites[name].local}
        if self.has_local or not self.language:
            return self._seeded_predictor_draws(w, x, seed, memory)
        one = {name: value[0] for name, value in w.items()}
        return self._chunked_draws("predictor", lambda w, x, _: self.predictor(w, x), w, x, None, one, memory)

    def linearised_draws(
        self,
        around: Mapping[str, np.ndarray],
        deviations: Mapping[str, np.ndarray],
        x: Any,
        data: tuple[Any, Any],
        memory: int = 2**28,
    ) -> np.ndarray:
        """NumPy: the linearised predictor eta(u) + J (u' - u), (S, N, D).

        J is the Jacobian of the predictor at u in unconstrained coordinates. A product with it is one forward
        derivative, so J is never built.

        Parameters
        ----------
        around : mapping of str to ndarray
            u.
        deviations : mapping of str to ndarray
            u' - u, with one leading axis.
        x
            Inputs.
        data : tuple
            One row of x and y, for the transforms, which need its shape only.
        memory : int
            As in `predictor_draws`.

        Returns
        -------
        ndarray
            Predictors, (S, N, D).
        """
        names = [name for name in self.sites if name in deviations]

        def linearised(change: Mapping[str, Array], x: Any, around: Mapping[str, Array]) -> Array:
            def eta(part: Mapping[str, Array]) -> Array:
                return self.predictor(self.constrain({**around, **part}, *data), x)

            value, tangent = self.system.jvp(
                eta, {name: around[name] for name in names}, {name: change[name] for name in names}
            )
            return value + tangent

        at = {name: self.system.asarray(value) for name, value in around.items()}
        one = {name: self.system.to_numpy(value) for name, value in self.constrain(at, *data).items()}
        return self._chunked_draws(("linearised", *names), linearised, deviations, x, at, one, memory)

    def _chunked_draws(
        self,
        key: Any,
        function: Callable[..., Array],
        w: Mapping[str, np.ndarray],
        x: Any,
        shared: Any,
        one: Mapping[str, np.ndarray],
        memory: int,
    ) -> np.ndarray:
        """eta (S, N, D) of function(w, x, shared) over draws w; `one`: a single set of constrained values."""
        count, rows = len(next(iter(w.values()))), row_count(x)
        per_row, held = self._bytes_per_row(one, x)
        weights = sum(8 * math.prod(value.shape[1:]) for value in w.values())
        work, row_chunk, threads = memory, rows, 1
        if on_cpu(self.system.asarray(np.zeros(1))):
            # Activations that fit in the cache are not written to memory; larger batches were up to six times slower.
            work, row_chunk, threads = CACHE, CACHE_ROWS, self.system.threads()
            if threads > 1:
                work, row_chunk = int(np.clip(OWN_CACHE_WEIGHTS * weights, OWN_CACHE, CACHE)), OWN_CACHE_ROWS
            work = min(memory // threads, work)
        row_chunk = rows if self.coupled else max(1, min(rows, row_chunk, work // per_row))
        batch = max(1, min(count, work // (per_row * row_chunk)))
        # The values of a call are stored up to four times: in the batches, joined, and passed on.
        draw_chunk = memory // (4 * (weights + threads * held * row_chunk))
        # If all rows are one chunk, threads share the draws instead, provided that there is enough work.
        if row_chunk == rows and count * rows * per_row >= threads * OWN_CACHE:
            draw_chunk = min(draw_chunk, -(-count // threads))
        draw_chunk = int(np.clip(draw_chunk, batch, count))

        def columns(w: Mapping[str, Array], given: tuple[Any, Any]) -> Array:
            # Each column of eta is contiguous, because predictions are read column by column.
            return function(w, *given).T

        batched = self.cached((key, batch), lambda: self.system.batched(columns, batch))
        result = np.empty(
            (count, held // 8, rows), dtype=self.system.to_numpy(self.system.asarray(np.zeros(1))).dtype
        )

        def draws(piece: tuple[int, int]) -> dict[str, Array]:
            return {name: self.system.asarray(padded(v[slice(*piece)], draw_chunk)) for name, v in w.items()}

        def fill(values: dict[str, Array], of_draws: tuple[int, int], of_rows: tuple[int, int]) -> None:
            part = map_data(lambda a: self.system.asarray(padded(a[slice(*of_rows)], row_chunk)), x)
            batched(values, (part, shared), result[slice(*of_draws), :, slice(*of_rows)])

        pieces = (
            (values, of_draws, of_rows)
            for of_draws in chunks(count, draw_chunk)
            for values in [draws(of_draws)]
            for of_rows in chunks(rows, row_chunk)
        )
        self.system.each(fill, pieces, threads)
        return result.transpose(0, 2, 1)

    def _seeded_predictor_draws(
        self, w: Mapping[str, np.ndarray], x: Any, seed: int, memory: int
    ) -> np.ndarray:
        """`predictor_draws` for programs that draw random numbers: per-row variables, and plain models of a system."""
        count, rows = len(next(iter(w.values()))), row_count(x)
        # The memory of a row is unknown for such a model: a wide layer is assumed.
        per_row = 8 * 256
        work = min(memory, CACHE) if on_cpu(self.system.asarray(np.zeros(1))) else memory
        row_chunk = rows if self.has_local or self.coupled else max(1, min(rows, CACHE_ROWS, work // per_row))
        batch = max(1, min(count, work // (per_row * row_chunk)))

        def one_by_one(w: Mapping[str, Array], x: Any, seeds: Any) -> Array:
            from ppl_bnn.language import ops

            each = [
                self.predictor({name: value[index] for name, value in w.items()}, x, seed)
                for index, seed in enumerate(iterate_seeds(seeds))
            ]
            return ops.stack(each, 0)

        def build() -> Callable[..., Any]:
            if self.has_local and not self.system.maps_randomness:
                return self.system.compile(one_by_one)
            return self.system.compile(self.system.vmap(self.predictor, in_axes=(0, None, 0)))

        function = self.cached("seeded predictor", build)
        seeds = self.system.seeds(seed, count)
        result: np.ndarray | None = None
        for start, stop in chunks(count, batch):
            values = {name: self.system.asarray(padded(v[start:stop], batch)) for name, v in w.items()}
            for first, last in chunks(rows, row_chunk):
                part = map_data(lambda a, i=first, j=last: self.system.asarray(padded(a[i:j], row_chunk)), x)
                eta = function(values, part, padded_seeds(seeds, start, stop, batch))
                eta = self.system.to_numpy(eta)[: stop - start, : last - first]
                if result is None:
                    result = np.empty((count, rows, eta.shape[-1]), dtype=eta.dtype)
                result[start:stop, first:last] = eta
        assert result is not None
        return result

    def _bytes_per_row(self, one: Mapping[str, np.ndarray], x: Any) -> tuple[int, int]:
        """Bytes of one row of one draw during the computation (inputs and outputs of all linear maps), and after it."""
        # Where rows interact, a single row is not a valid input of the model.
        first = map_data(lambda a: np.asarray(a if self.coupled else a[:1]), x)
        output, inputs = recorded_linear(self.model, one, first)
        held = sum(int(np.prod(np.shape(part)[1:])) for parts in inputs.values() for part in parts)
        kept = int(np.shape(output.predictor)[-1])
        return 8 * 2 * (held + kept), 8 * kept

    def mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.system.compile(self.system.vmap(function, in_axes=(0, None, None)))

    def cached[T](self, key: Hashable, build: Callable[[], T]) -> T:
        """What `build` returned the first time for this key: compiled functions and facts about this program."""
        if key not in self._compiled:
            self._compiled[key] = build()
        return self._compiled[key]

    # -- draws from the prior, NumPy

    def prior_draws(self, x: Any, y: Any, seed: int, count: int) -> dict[str, np.ndarray]:
        """NumPy: `count` draws from the prior in unconstrained coordinates (parameters: from their start).

        Notes
        -----
        One draw is compiled, where the system compiles, and then called `count` times: a function for all draws at once
        would be compiled again for every count, and takes longer to compile. A draw is a function of its seed.
        """
        keys = list(iterate_seeds(self.system.seeds(seed, count)))

        def build() -> Callable[..., Any]:
            quick = self.parameter_count <= QUICK_PARAMETERS
            return self.system.compile_for(self._prior_draw, (keys[0], x, y), quick=quick)

        draw = self.cached(("prior", describe_shapes(x), describe_shapes(y)), build)
        # All draws are started before the first is converted, because a system may compute asynchronously.
        drawn = [draw(key, x, y) for key in keys]
        return {name: np.stack([self.system.to_numpy(one[name]) for one in drawn]) for name in self.sites}

    def _prior_draw(self, seed: Any, x: Any, y: Any) -> dict[str, Array]:
        """u of one run of the model; a compiler removes the network, whose output is not used."""
        return {
            site.name: self.unconstrain_site(site)
            for site in self.system.run(self.native, x, y, seed=seed)
            if site.name in self.sites and site.kind in ("latent", "param")
        }

    def unconstrain_site(self, site: TracedSite) -> Array:
        """The value of a site in unconstrained coordinates."""
        if site.kind == "param":
            return site.value
        return self.system.unconstrain(site.distribution, site.value)

    def unconstrain(self, w: Mapping[str, np.ndarray], x: Any, y: Any) -> dict[str, np.ndarray]:
        """NumPy: one set of constrained values (all sites) in unconstrained coordinates."""
        values = {name: self.system.asarray(value) for name, value in w.items()}
        sites = self.system.run(
            self.native, x, y, values=values, seed=next(iterate_seeds(self.system.seeds(0, 1)))
        )
        return {
            site.name: self.system.to_numpy(self.unconstrain_site(site))
            for site in sites
            if site.kind in ("latent", "param")
        }


@dataclass
class Problem:
    """A program with its training data, inside a session: the input of a method.

    Parameters
    ----------
    program : Program
        The program.
    x, y
        The data as arrays of the system.
    inputs, targets
        The same in NumPy (standardised where the fit standardises).
    seed : int
        Seed of the fit.
    device : str
        Device.
    dtype : str
        Floating type.
    data_hash : str
        Hash of the data.
    streamed : bool
        If True, x and y are the first rows only, for their shapes, and all rows are in `inputs` and `targets`.
    """

    program: Program
    x: Any
    y: Any
    inputs: Any
    targets: np.ndarray
    seed: int
    device: str
    dtype: str
    data_hash: str = ""
    streamed: bool = False

    @property
    def system(self) -> System:
        """The system of the program."""
        return self.program.system

    @property
    def rows(self) -> int:
        """Number of training rows."""
        return row_count(self.inputs) if self.streamed else self.program.rows

    def log_joint_draws(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        """NumPy: log joint over all rows of draws with one leading axis, shape (S,)."""
        program = self.program
        if not self.streamed:
            return program.log_joint_draws(u, self.x, self.y)
        log_prior = program.log_prior_draws(u, self.x, self.y).astype(np.float64)
        total = log_prior.copy()
        for start, stop in chunks(self.rows, STREAMED_ROWS):
            x = map_data(lambda a, i=start, j=stop: self.system.asarray(np.asarray(a[i:j])), self.inputs)
            y = self.system.asarray(np.asarray(self.targets[start:stop]))
            total += program.log_joint_draws(u, x, y).astype(np.float64) - log_prior
        return total

    def log_prior_draws(self, u: Mapping[str, np.ndarray]) -> np.ndarray:
        """NumPy: log prior of draws with one leading axis, shape (S,)."""
        return self.program.log_prior_draws(u, self.x, self.y)


def _log_prior(sites: list[TracedSite], jacobian: bool, row_scale: float = 1.0) -> Array:
    total: Any = 0.0
    for site in sites:
        if site.kind == "latent":
            volume = site.log_det if jacobian else 0.0
            factor = site.scale * (row_scale if site.local else 1.0)
            total = total + factor * (site.distribution.log_prob(site.value).sum() + volume)
    return total


def threads_for(rows: int, parameter_count: int) -> int | None:
    """Number of threads for an operation: 1 if it is too small to share, else None (unchanged).

    Notes
    -----
    torch shares even small operations among threads and waits for the last. With another busy process on the same
    cores, a pass through a small network took 25 ms with two threads and 1.6 ms with one.
    """
    return 1 if 2 * rows * parameter_count < 50_000_000 else None
