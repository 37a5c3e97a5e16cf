"""A model bound to one system and to the shapes of its data.

`Program` has the densities in unconstrained coordinates, the predictor, and conversions between dicts and flat vectors.
`Problem` is a program with its training data, inside a session: the input of every method.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ppl_bnn.backends.many_draws import DENSITY_MEMORY, MEMORY, Draws, chunked_draws, seeded_draws
from ppl_bnn.backends.native import Model, check_observation, native_eta, native_likelihood, unwrap
from ppl_bnn.backends.protocol import Site, System, TracedSite
from ppl_bnn.core import arrays
from ppl_bnn.core.arrays import (
    Array,
    chunks,
    describe_shapes,
    iterate_seeds,
    map_data,
    padded,
    row_count,
    rows_at,
)
from ppl_bnn.core.errors import InputError, ModelError, unknown_name
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import RecordMessages, network_output
from ppl_bnn.language.modules.protocol import arrays_in
from ppl_bnn.language.primitives import Handler, Message

# Number of coordinates up to which an optimised compilation costs more than the draws from the prior.
QUICK_PARAMETERS = 100_000
# Rows of a streamed fit that are on the device at a time.
STREAMED_ROWS = 4096
# Rows on which held modules run at a time, and bytes that their outputs may take.
FEATURE_ROWS, FEATURE_BYTES = 256, 2**30


@dataclass
class Program:
    """A model bound to one system: its densities in unconstrained coordinates and its predictor.

    `Program.of` builds it inside a session. Methods take and return arrays of the system, except those marked NumPy.
    `native` is the model as a callable of the system, `language` whether it is written in the language. `sites` has the
    latent sites and parameters in order, `deterministic` the other sites of a plain model. `outputs` is None for a
    plain model; `coupled` means that rows interact, `weighted` that their log likelihoods have weights. `features` are
    the held modules whose outputs depend on the inputs alone.
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
    weighted: bool = False
    features: tuple[str, ...] = ()
    target_shape: tuple[int, ...] = ()
    deterministic: tuple[str, ...] = ()
    _compiled: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, chosen: System, model: Model, x: Any, y: Any, *, language: bool, observed: str | None = None
    ) -> Program:
        """Trace `model` once on data of the system and check that it is a model.

        `ModelError`: no observed site, several of them without a name given, or no random variable.
        `UnknownNameError`: there is no observed site of the given name.
        """
        native = _native(chosen, model, language)
        record = RecordMessages("observe", "coupled", "held")
        traced = _native(chosen, record.around(model), language) if language else native
        described, others = chosen.describe(traced, x, y)
        observations = [site for site in others if site.kind == "observed"]
        # In both systems a plain factor of the density is an observed site, too.
        names = [site.name for site in observations if type(site.distribution).__name__ != "Unit"]
        if observed is None:
            if len(names) != 1:
                advice = "observed='name of the site', or passing y to it"
                raise ModelError.of("", "exactly one observed site", f"{len(names)}: {names}", advice)
            observed = names[0]
        elif observed not in names:
            raise unknown_name("observed site", observed, names)
        if not described:
            expected = "at least one random variable or parameter"
            raise ModelError.of("", expected, "none", "a prior over the weights")
        targets = (row_count(x),) if y is None else tuple(y.shape)
        facts: dict[str, Any] = {"coupled": any(msg.kind == "coupled" for msg in record.messages)}
        if language:
            (end,) = (msg.arguments for msg in record.messages if msg.kind == "observe")
            likelihood, facts["outputs"] = end["likelihood"].form, int(end["f"].shape[-1])
            facts["weighted"], facts["features"] = end["weight"] is not None, _features(record)
            if facts["weighted"]:
                local = any(site.local for site in described)
                expected, advice = "weights of rows without latent variables of their own", "no weight"
                ModelError.check(not local, "observe", expected, "bnn.rows in the model", advice)
        else:
            observation = next(site for site in observations if site.name == observed)
            check_observation(observed, observation.distribution, targets)
            likelihood = native_likelihood(observation.distribution, targets)
            facts["deterministic"] = tuple(site.name for site in others if site.kind == "deterministic")
        facts |= {"likelihood": likelihood, "rows": row_count(x), "target_shape": targets}
        sites = {site.name: site for site in described}
        return cls(chosen, model, native, language, observed, sites, **facts)

    def rebound(self, x: Any, y: Any) -> Program:
        """The same program in the present session, for data of the same columns and any number of rows."""
        if row_count(x) != self.rows:
            options = {"language": self.language, "observed": self.observed}
            return Program.of(self.system, self.model, x, y, **options)
        native = _native(self.system, self.model, self.language)
        return replace(self, native=native, target_shape=tuple(y.shape), _compiled={})

    def classes(self, y: np.ndarray) -> int:
        """The number of classes; for a plain model without this information it follows from the labels."""
        known = self.likelihood.classes or {"Bernoulli": 2}.get(self.likelihood.family) or self.outputs
        return known or int(np.max(y)) + 1

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
        return ops.concatenate([u[name].reshape(-1) for name in (names or self.sites)])

    def unravel(self, flat: Array, names: Sequence[str] | None = None) -> dict[str, Array]:
        """The inverse of `ravel`; leading axes of `flat` are kept."""
        return arrays.unravel(
            flat, {name: self.sites[name].unconstrained_shape for name in names or self.sites}
        )

    # -- densities, in the system

    def run(self, u: Mapping[str, Array], x: Any, y: Any) -> list[TracedSite]:
        """All sites of a run at unconstrained values, in order."""
        return self.system.run(self.native, x, y, values=u, unconstrained=True)

    def weights(self, u: Draws, x: Any, y: Any) -> np.ndarray:
        """NumPy: the weights of the rows at unconstrained values, (N,); ones without weights."""
        if not self.weighted:
            return np.ones(row_count(x))
        w = self.constrain(map_data(self.system.asarray, u), x, y)
        return np.asarray(self.system.to_numpy(network_output(self.model, w, x).weight), np.float64)

    def checked_weights(self, x: Any, y: Any) -> np.ndarray:
        """NumPy: the weights of the rows, (N,), finite numbers from 0 that are not all zero; the sites are at zero."""
        zeros = {name: np.zeros(site.unconstrained_shape) for name, site in self.sites.items()}
        weight, advice = self.weights(zeros, x, y), "the number of times that each row counts"
        where, wrong = "weight", weight[~((weight >= 0.0) & (weight < np.inf))]
        got = ", ".join(f"{value:g}" for value in wrong[:1])
        InputError.check(not len(wrong), where, "finite numbers from 0", got, advice)
        InputError.check(weight.any(), where, "a positive number for some row", "zero for all", advice)
        return weight

    def log_prior(self, u: Mapping[str, Array], x: Any, y: Any, jacobian: bool = True) -> Array:
        """log p(w(u)) + log |dw/du|, a scalar; without the second term where `jacobian` is False."""
        return log_prior_of(self.run(u, x, y), jacobian)

    def log_likelihood(self, u: Mapping[str, Array], x: Any, y: Any) -> Array:
        """log p(y_i | x_i, w(u)) for each row, shape (N,)."""
        distribution = self._observation(self.run(u, x, y))
        each = distribution.log_prob(y)
        if not self.language and each.ndim == 0:
            # A plain model may declare all rows as one event; each row still has its own density.
            each = unwrap(distribution).log_prob(y)
        return each if each.ndim < 2 else each.reshape(each.shape[0], -1).sum(-1)

    def log_joint(
        self, u: Mapping[str, Array], x: Any, y: Any, scale: float = 1.0, jacobian: bool = True
    ) -> Array:
        """log p(w(u)) + log |dw/du| + scale * sum_i log p(y_i | x_i, w(u)), a scalar.

        scale: N/B where x and y are B rows out of N; it multiplies every term that belongs to rows, including latent
        variables inside `rows`. Without `jacobian`, the density is in the coordinates of the program.
        """
        sites = self.run(u, x, y)
        total = log_prior_of(sites, jacobian, scale)
        for site in sites:
            if site.kind == "observed":
                factor = site.scale * (scale if site.local or site.name == self.observed else 1.0)
                value = y if site.name == self.observed else site.value
                total = total + factor * site.distribution.log_prob(value).sum()
        return total

    def _observation(self, sites: list[TracedSite]) -> Any:
        return next(site.distribution for site in sites if site.name == self.observed)

    def constrain(self, u: Mapping[str, Array], x: Any, y: Any) -> dict[str, Array]:
        """The values w(u) of all latent sites and parameters."""
        return {site.name: site.value for site in self.run(u, x, y) if site.kind in ("latent", "param")}

    def predictor(self, w: Mapping[str, Array], x: Any, seed: Any = None) -> Array:
        """eta (N, D) of one set of values `w`; per-row latent variables are drawn from `seed`."""
        if self.language and not self.has_local:
            return network_output(self.model, w, x).predictor
        if self.language:
            record = RecordMessages("observe")
            shared = {name: value for name, value in w.items() if not self.sites[name].local}
            self.system.run(self.system.native(record.around(self.model)), x, None, values=shared, seed=seed)
            (end,) = (msg.arguments for msg in record.messages)
            return end["likelihood"].predictor(end["f"])
        # The observation gets a value of its shape, so that none is drawn: only its distribution is needed.
        rows = (row_count(x), *self.target_shape[1:])
        unseen = self.system.asarray(np.zeros(rows))
        sites = self.system.run(self.native, x, None, values={**w, self.observed: unseen}, seed=seed)
        distribution = self._observation(sites)
        check_observation(self.observed, distribution, rows)
        return native_eta(self.system.asarray(np.zeros(())), self.likelihood, distribution, rows)

    # -- many draws at once, NumPy in and out

    def constrain_draws(self, u: Draws, x: Any, y: Any) -> dict[str, np.ndarray]:
        """NumPy: constrain draws with one leading axis; x and y are arrays of the system."""
        function = self.cached("constrain", lambda: self.mapped(self.constrain))
        w = function(map_data(self.system.asarray, u), x, y)
        # JAX returns a dict in alphabetical order; other code needs the sites in the order of the program.
        return {name: self.system.to_numpy(w[name]) for name in self.sites if name in w}

    def deterministic_draws(self, u: Draws, x: Any, y: Any) -> dict[str, np.ndarray]:
        """NumPy: the deterministic sites of a plain model, for draws of u with one leading axis."""
        if not self.deterministic:
            return {}

        def sites(u: Mapping[str, Array], x: Any, y: Any) -> dict[str, Array]:
            traced, like = {site.name: site.value for site in self.run(u, x, y)}, next(iter(u.values()))
            # A value may be a plain number.
            return {name: ops.asarray(traced[name], like=like) for name in self.deterministic}

        function = self.cached("deterministic", lambda: self.mapped(sites))
        found = function(map_data(self.system.asarray, u), x, y)
        return {name: self.system.to_numpy(found[name]) for name in self.deterministic}

    def draws_at_once(self, most: int, memory: int = DENSITY_MEMORY) -> int:
        """How many draws, at most `most`, fit in memory where a density stores draws x rows x units."""
        units = sum(site.shape[-1] if len(site.shape) > 1 else 1 for site in self.sites.values())
        return int(np.clip(memory // (16 * units * self.rows), 1, most))

    def log_joint_draws(self, u: Draws, x: Any, y: Any) -> np.ndarray:
        """NumPy: log joint of draws with one leading axis, shape (S,)."""
        return self._density_draws(self.cached("log_joint", lambda: self.mapped(self.log_joint)), u, x, y)

    def log_prior_draws(self, u: Draws, x: Any, y: Any) -> np.ndarray:
        """NumPy: log prior of draws with one leading axis, shape (S,)."""
        return self._density_draws(self.cached("log_prior", lambda: self.mapped(self.log_prior)), u, x, y)

    def _density_draws(self, function: Callable[..., Any], u: Draws, x: Any, y: Any) -> np.ndarray:
        """A density for many draws, with as many at a time as memory allows."""
        count = len(next(iter(u.values())))
        size = self.draws_at_once(count)
        parts = []
        for start, stop in chunks(count, size):
            values = {name: self.system.asarray(padded(v[start:stop], size)) for name, v in u.items()}
            parts.append(self.system.to_numpy(function(values, x, y))[: stop - start])
        return np.concatenate(parts)

    def predictor_draws(self, w: Draws, x: Any, seed: int = 0, memory: int = MEMORY) -> np.ndarray:
        """NumPy: eta (S, N, D) of constrained draws with one leading axis; x is NumPy, too.

        `seed` is that of per-row latent variables, `memory` bounds the bytes besides the inputs and the result.
        """
        if self.has_local:
            # A per-row variable belongs to the training rows; at new rows there is another one.
            w = {name: value for name, value in w.items() if not self.sites[name].local}
        if self.has_local or not self.language:
            return seeded_draws(self, w, x, seed, memory)
        one = {name: value[0] for name, value in w.items()}
        return chunked_draws(self, "predictor", lambda w, x, _: self.predictor(w, x), w, x, None, one, memory)

    def linearised_draws(
        self, around: Draws, deviations: Draws, x: Any, data: tuple[Any, Any], memory: int = MEMORY
    ) -> np.ndarray:
        """NumPy: the linearised predictor eta(u) + J (u' - u), (S, N, D), for u `around` and u' - u `deviations`.

        J, the Jacobian of the predictor at u, is never built: its product is one forward derivative. `data` is one row
        of x and y, for the transforms, which need its shape only.
        """
        names = [name for name in self.sites if name in deviations]

        def linearised(change: Mapping[str, Array], x: Any, around: Mapping[str, Array]) -> Array:
            def eta(part: Mapping[str, Array]) -> Array:
                return self.predictor(self.constrain({**around, **part}, *data), x)

            at, along = ({name: values[name] for name in names} for values in (around, change))
            value, tangent = self.system.jvp(eta, at, along)
            return value + tangent

        at = map_data(self.system.asarray, around)
        one = map_data(self.system.to_numpy, self.constrain(at, *data))
        return chunked_draws(self, ("linearised", *names), linearised, deviations, x, at, one, memory)

    def mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """function(u, x, y) compiled for many u with one leading axis."""
        return self.system.compile(self.system.vmap(function, in_axes=(0, None, None)))

    def cached[T](self, key: Hashable, build: Callable[[], T]) -> T:
        """The result of the first `build` for this key: compiled functions and facts about this program."""
        if key not in self._compiled:
            self._compiled[key] = build()
        return self._compiled[key]

    # -- draws from the prior, NumPy

    def prior_draws(self, x: Any, y: Any, seed: int, count: int) -> dict[str, np.ndarray]:
        """NumPy: `count` draws from the prior in unconstrained coordinates (parameters: from their start).

        Each has its own seed. One draw is compiled and called `count` times: a function for all draws would be compiled
        again for every count.
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
        return self._coordinates(self.system.run(self.native, x, y, seed=seed))

    def _coordinates(self, sites: list[TracedSite]) -> dict[str, Array]:
        """The latent sites and parameters among `sites` in unconstrained coordinates."""
        return {site.name: self.unconstrain_site(site) for site in sites if site.name in self.sites}

    def unconstrain_site(self, site: TracedSite) -> Array:
        """The value of a site in unconstrained coordinates."""
        return site.value if site.kind == "param" else self.system.unconstrain(site.distribution, site.value)

    def unconstrain(self, w: Draws, x: Any, y: Any) -> dict[str, np.ndarray]:
        """NumPy: one set of constrained values (all sites) in unconstrained coordinates."""
        seed = next(iterate_seeds(self.system.seeds(0, 1)))
        sites = self.system.run(self.native, x, y, values=map_data(self.system.asarray, w), seed=seed)
        return map_data(self.system.to_numpy, self._coordinates(sites))


@dataclass
class Problem:
    """A program with its training data, inside a session: the input of a method.

    `x` and `y` are arrays of the system, `inputs` and `targets` the same in NumPy (standardised if the fit
    standardises). If `streamed`, x and y are the first rows only, for their shapes.
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

    def _rows(self, start: int, stop: int) -> Any:
        """These rows of the inputs, as arrays of the system."""
        return map_data(self.system.asarray, rows_at(self.inputs, slice(start, stop)))

    def with_features(self) -> Problem:
        """This problem with the outputs of held modules as further inputs, unless they take too much memory."""
        program, names = self.program, self.program.features
        if self.streamed or program.coupled or program.has_local or not names:
            return self
        zeros = {name: np.zeros(site.unconstrained_shape) for name, site in program.sites.items()}
        w = program.constrain(map_data(self.system.asarray, zeros), self._rows(0, 1), self.y[:1])
        record, found = RecordMessages("held"), {name: [] for name in names}
        for start, stop in chunks(self.rows, FEATURE_ROWS):
            network_output(record.around(program.model), w, self._rows(start, stop))
            for msg in record.messages:
                found.get(msg.name, []).append(self.system.to_numpy(msg.value))
            size = sum(part.nbytes for parts in found.values() for part in parts) * self.rows / stop
            if size > FEATURE_BYTES:
                return self
        outputs = {name: np.concatenate(parts) for name, parts in found.items()}
        model = WithFeatures(program.model, names, not isinstance(self.inputs, Mapping))
        inputs = model.inputs(self.inputs, outputs)
        x = map_data(self.system.asarray, inputs)
        program = Program.of(self.system, model, x, self.y, language=True, observed=program.observed)
        return replace(self, program=program, x=x, inputs=inputs)

    def log_joint_draws(self, u: Draws) -> np.ndarray:
        """NumPy: log joint over all rows of draws with one leading axis, shape (S,)."""
        program = self.program
        if not self.streamed:
            return program.log_joint_draws(u, self.x, self.y)
        log_prior = program.log_prior_draws(u, self.x, self.y).astype(np.float64)
        total = log_prior.copy()
        for start, stop in chunks(self.rows, STREAMED_ROWS):
            y = self.system.asarray(np.asarray(self.targets[start:stop]))
            total += program.log_joint_draws(u, self._rows(start, stop), y).astype(np.float64) - log_prior
        return total

    def log_prior_draws(self, u: Draws) -> np.ndarray:
        """NumPy: log prior of draws with one leading axis, shape (S,)."""
        return self.program.log_prior_draws(u, self.x, self.y)


class _Known(Handler):
    """The outputs of held modules are known."""

    sees_maps = False

    def __init__(self, outputs: Mapping[str, Any]):
        self.outputs = outputs

    def process(self, msg: Message) -> None:
        if msg.kind == "held" and msg.name in self.outputs:
            msg.answer(self.outputs[msg.name])


@dataclass(frozen=True)
class WithFeatures:
    """A model whose inputs have the outputs of its held modules, which then do not run.

    Of a `model` with inputs `x`, an array or a dict (`single` or not), and held modules `names`.
    """

    model: Callable[..., Any]
    names: tuple[str, ...]
    single: bool

    def inputs(self, x: Any, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of this model: those of the other one, and the outputs of its modules."""
        own = {"x": x} if self.single else dict(x)
        return own | {f"output of {name!r}": outputs[name] for name in self.names}

    def __call__(self, x: Mapping[str, Any], y: Any = None) -> None:
        own = dict(x)
        outputs = {name: own.pop(f"output of {name!r}") for name in self.names}
        with _Known(outputs):
            self.model(own["x"] if self.single else own, y)


def _features(record: RecordMessages) -> tuple[str, ...]:
    """The held modules of a run whose inputs are inputs of the model, and that have run once."""
    entries = {id(part) for part in arrays_in(record.inputs)}
    held = [msg for msg in record.messages if msg.kind == "held"]
    names = [msg.name for msg in held]
    own = [msg for msg in held if all(id(part) in entries for part in arrays_in(msg.arguments["x"]))]
    return tuple(msg.name for msg in own if names.count(msg.name) == 1)


def _native(chosen: System, model: Model, language: bool) -> Model:
    # f is not recorded, because it comes from the network function and a record costs a site per run.
    return chosen.native(model, record=False) if language else chosen.plain(model)


def log_prior_of(sites: list[TracedSite], jacobian: bool, row_scale: float = 1.0) -> Array:
    """log p(w) + log |dw/du| of a run, a scalar; without the second term where `jacobian` is False."""
    total: Any = 0.0
    for site in sites:
        if site.kind == "latent":
            volume = site.log_det if jacobian else 0.0
            factor = site.scale * (row_scale if site.local else 1.0)
            total = total + factor * (site.distribution.log_prob(site.value).sum() + volume)
    return total


def threads_for(operations: float) -> int | None:
    """Number of threads for a run of a model: 1 if its floating-point operations are too few, else None (unchanged).

    torch shares even small operations among threads and waits for the last, which is slow if other processes are busy.
    """
    return 1 if operations < 50_000_000 else None
