"""The variational inference of the systems: AutoNormal and Trace_ELBO, and hand-written guides.

A guide is a callable of a system with the latent sites of the model. It is converted to a loss over unconstrained
parameters for `adam.py`, and after the fit to an approximation in NumPy.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import Model, Site
from ppl_bnn.core.arrays import iterate_seeds, map_data, site_seed
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.inference.variational.families.base import inverse_softplus
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.language import ops
from ppl_bnn.posterior.approximation import Approximation, Drawn

# Draws of a hand-written guide that a posterior stores, because it cannot create more later.
KEPT = 4000

Arrays = dict[str, np.ndarray]
# A loss and its two parts.
Costs = tuple[Any, tuple[Any, Any]]


class SystemGuide(ABC):
    """A guide of a system, its objective and its approximation."""

    _problem: Problem
    # The parameters at which a hand-written guide starts.
    _initial: Arrays
    # As of an `Objective`.
    strata: ClassVar[int] = 1
    shared: ClassVar[tuple[str, ...]] = ()

    def start(self, u0: Mapping[str, np.ndarray], scale: Mapping[str, np.ndarray], seed: int) -> Arrays:
        """Parameters with given locations and standard deviations, in unconstrained coordinates by site.

        A hand-written guide determines its own start.
        """
        return dict(self._initial)

    @abstractmethod
    def __call__(self, parameters: Any, seed: Any, weight: Any, x: Any, y: Any) -> Costs:
        """Minus the ELBO, and NaN for its two parts, which the system does not report."""

    @abstractmethod
    def approximation(self, parameters: Mapping[str, np.ndarray]) -> Approximation:
        """The approximation at fitted parameters, in NumPy."""


class _Normal(SystemGuide):
    """AutoNormal: a location and a scale for each latent site."""

    # The names of the parameters for the location and the scale of a site.
    named: ClassVar[tuple[str, str]]

    def _names(self, site: Site) -> list[str]:
        return [name.format(site.name) for name in self.named]

    def start(self, u0: Mapping[str, np.ndarray], scale: Mapping[str, np.ndarray], seed: int) -> Arrays:
        program = self._problem.program
        found = {site.name: np.asarray(u0[site.name], float) for site in program.params}
        for site in program.latents:
            name, of_scale = self._names(site)
            found |= {name: np.asarray(u0[site.name], float), of_scale: inverse_softplus(scale[site.name])}
        return found

    def approximation(self, parameters: Mapping[str, np.ndarray]) -> Approximation:
        loc, scale = {}, {}
        for site in self._problem.program.sites.values():
            if site.is_param:
                loc[site.name] = parameters[site.name].copy()
                continue
            name, of_scale = self._names(site)
            loc[site.name] = parameters[name].reshape(site.unconstrained_shape)
            scale[site.name] = ops.softplus(parameters[of_scale]).reshape(site.unconstrained_shape)
        return MeanField(loc, scale)


def _first(problem: Problem, batch: int | None) -> tuple[Any, Any]:
    return problem.x if batch is None else map_data(lambda a: a[:batch], problem.x), problem.y[:batch]


def _check_sites(problem: Problem, found: set[str]) -> None:
    missing = [site.name for site in problem.program.latents if site.name not in found]
    wanted = "a guide that samples every latent site of the model"
    advice = "sampling them in the guide under the same names"
    InputError.check(not missing, "SVI guide", wanted, f"none of {', '.join(missing)}", advice)


def _coordinates(problem: Problem, w: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """u and log |dw/du| of the constrained values of all sites."""
    program = problem.program
    traced = problem.system.run(program.native, problem.x, problem.y, values=w)
    u = {site.name: program.unconstrain_site(site) for site in traced if site.name in w}
    again = program.run(u, problem.x, problem.y)
    volume = sum(site.log_det for site in again if site.kind == "latent")
    return {name: u[name] for name in program.sites}, volume


# --- NumPyro --------------------------------------------------------------------------------------


def _minus_elbo(key: Any, params: Any, model: Any, guide: Any, data: tuple[Any, Any]) -> Any:
    """Minus the ELBO at one draw of the guide, as by `Trace_ELBO`, whose derivative has no score function.

    `Trace_ELBO` adds the terms of sites in the order of a set, which is another one in each process; with it, the last
    bits of the loss and the compiled program would be.
    """
    import jax
    from numpyro.handlers import replay, seed
    from numpyro.infer.util import log_density

    of_model, of_guide = jax.random.split(key)
    log_q, drawn = log_density(seed(guide, of_guide), data, {}, params)
    log_joint, _ = log_density(replay(seed(model, of_model), drawn), data, {}, params)
    return log_q - log_joint


class _NumPyroNormal(_Normal):
    named = ("{}_auto_loc", "{}_auto_scale")

    def __init__(self, problem: Problem, model: Model, guide: Any, particles: int, batch: int | None):
        self._problem, self._model, self._particles = problem, model, particles

    def __call__(self, parameters: Any, seed: Any, weight: Any, x: Any, y: Any) -> Costs:
        import jax
        import jax.numpy as jnp
        from numpyro.distributions import TransformedDistribution
        from numpyro.handlers import substitute
        from numpyro.infer.autoguide import AutoNormal

        program, model, turn = self._problem.program, self._model, self._problem.system.turn
        names = [site.name for site in program.latents]
        scales = [self._names(site)[1] for site in program.latents]
        params = dict(parameters) | {name: ops.softplus(parameters[name]) for name in scales}
        for_eps, for_model = jax.random.split(seed)
        like, size = next(iter(parameters.values())), sum(site.size for site in program.latents)

        def particle(eps: Any) -> Any:
            """The loss at the draws loc + scale * eps of AutoNormal, with all eps from one call.

            One generator per site would take more time to compile and run than the rest of a step.
            """
            noise = program.unravel(eps, names)

            def drawn(msg: Any) -> Any:
                name = msg["name"]
                if msg["type"] != "sample" or name not in noise:
                    return None
                value = params[f"{name}_auto_loc"] + params[f"{name}_auto_scale"] * noise[name]
                if isinstance(msg["fn"], TransformedDistribution):
                    msg["intermediates"] = []
                    for transform in msg["fn"].transforms:
                        before = value
                        value, inner = transform.call_with_intermediates(before)
                        msg["intermediates"].append([before, inner])
                return value

            with turn:
                noisy = substitute(AutoNormal(model), substitute_fn=drawn)
                return _minus_elbo(for_model, params, model, noisy, (x, y))

        eps = jax.random.normal(for_eps, (self._particles, size), dtype=like.dtype)
        value = jnp.mean(jax.vmap(particle)(eps)) if self._particles > 1 else particle(eps[0])
        return value, (jnp.nan, jnp.nan)


class _NumPyroWritten(SystemGuide):
    def __init__(self, problem: Problem, model: Model, guide: Any, particles: int, batch: int | None):
        import jax
        import numpyro
        import optax
        from numpyro.infer import SVI, Trace_ELBO

        self._problem, self._model, self._guide, self._particles = problem, model, guide, particles
        key, data = jax.random.PRNGKey(problem.seed), _first(problem, batch)
        seeded = numpyro.handlers.seed(guide, key)
        self._engine = SVI(model, guide, optax.identity(), Trace_ELBO())
        with problem.system.turn:
            _check_sites(problem, set(numpyro.handlers.trace(seeded).get_trace(*data)))
            state = self._engine.init(key, *data)
        # The values that the engine stores unconstrained.
        stored = self._engine.optim.get_params(state.optim_state)
        self._initial = {name: np.asarray(value) for name, value in stored.items()}
        self._constrain: Any = self._engine.constrain_fn

    def __call__(self, parameters: Any, seed: Any, weight: Any, x: Any, y: Any) -> Costs:
        import jax

        with self._problem.system.turn:
            params = self._constrain(parameters)

            def particle(key: Any) -> Any:
                return _minus_elbo(key, params, self._model, self._guide, (x, y))

            one = self._particles == 1
            value = (
                particle(seed) if one else jax.vmap(particle)(jax.random.split(seed, self._particles)).mean()
            )
        return value, (math.nan, math.nan)

    def approximation(self, parameters: Mapping[str, np.ndarray]) -> Approximation:
        import jax
        import numpyro

        problem = self._problem
        program, system = problem.program, problem.system
        with system.turn:
            params = self._constrain({name: system.asarray(value) for name, value in parameters.items()})

        def draw(key: Any) -> tuple[dict[str, Any], Any]:
            guide = numpyro.handlers.seed(numpyro.handlers.substitute(self._guide, params), key)
            with system.turn:
                trace = numpyro.handlers.trace(guide).get_trace(problem.x, problem.y)
            sites = {name: site for name, site in trace.items() if site["type"] == "sample"}
            drawn = (site for site in sites.values() if not site["is_observed"])
            log_q = sum(site["fn"].log_prob(site["value"]).sum() for site in drawn)
            w = {site.name: sites[site.name]["value"] for site in program.latents}
            u, volume = _coordinates(problem, w | {site.name: params[site.name] for site in program.params})
            return u, log_q + volume

        u, log_q = jax.jit(jax.lax.map, static_argnums=0)(draw, system.seeds(problem.seed, KEPT))
        return Drawn({name: np.asarray(u[name]) for name in program.sites}, np.asarray(log_q, np.float64))


# --- Pyro -----------------------------------------------------------------------------------------


class _PyroLoss(SystemGuide):
    """The Trace_ELBO of a guide whose parameters are in Pyro's store."""

    def __init__(self, problem: Problem, model: Model, guide: Any, particles: int, batch: int | None):
        import pyro
        import torch
        from pyro.infer import Trace_ELBO

        self._problem, self._model, self._guide = problem, model, guide
        self._elbo = Trace_ELBO(num_particles=particles)
        self._nothing = torch.tensor(math.nan)
        data = _first(problem, batch)
        with torch.no_grad():
            guide(*data)
            model(*data)
        for site in problem.program.params:
            # Parameters start at the values of the model; `start` replaces these.
            pyro.get_param_store()[site.name] = pyro.get_param_store()[site.name].detach()
        with pyro.poutine.trace(param_only=True) as capture, torch.no_grad():
            self._elbo.loss(model, guide, *data)
        self.leaves: dict[str, Any] = {
            name: site["value"].unconstrained()  # pyright: ignore[reportOptionalMemberAccess, reportTypedDictNotRequiredAccess]
            for name, site in dict(capture.trace.nodes).items()
        }

    def __call__(self, parameters: Any, seed: Any, weight: Any, x: Any, y: Any) -> Costs:
        from ppl_bnn.backends.pyro_session import rest

        rest()
        traces = list(self._elbo._get_traces(self._model, self._guide, (x, y), {}))
        value = sum(_surrogate(*pair) for pair in traces) / len(traces)
        return value, (self._nothing, self._nothing)


def _surrogate(model: Any, guide: Any) -> Any:
    """Minus the ELBO at the draws of two traces, whose derivative estimates that of the ELBO, as in `Trace_ELBO`.

    `Trace_ELBO.differentiable_loss` has the same value and derivative, but reads the value of the loss, so that it
    cannot be recorded. The derivative has the score function of sites that are not reparameterised.
    """
    from pyro.distributions.util import is_identically_zero
    from pyro.infer.trace_elbo import _compute_log_r

    value = guide.log_prob_sum() - model.log_prob_sum()
    surrogate, log_r = -model.log_prob_sum(), None
    for site in guide.nodes.values():
        if site["type"] != "sample":
            continue
        _, score, entropy = site["score_parts"]
        if not is_identically_zero(entropy):
            surrogate = surrogate + entropy.sum()
        if not is_identically_zero(score):
            log_r = _compute_log_r(model, guide) if log_r is None else log_r
            surrogate = surrogate - (log_r.sum_to(site["cond_indep_stack"]) * score).sum()
    return value.detach() + (surrogate - surrogate.detach())


class _PyroNormal(_PyroLoss, _Normal):
    named = ("AutoNormal.locs.{}", "AutoNormal.scales.{}")

    def __init__(self, problem: Problem, model: Model, guide: Any, particles: int, batch: int | None):
        from pyro.infer.autoguide import AutoNormal

        from ppl_bnn.backends.pyro_session import typed

        names = [site.name for site in problem.program.latents]
        _check_names(names)
        model = typed(model)
        super().__init__(problem, model, AutoNormal(model), particles, batch)


class _PyroWritten(_PyroLoss):
    def __init__(self, problem: Problem, model: Model, guide: Any, particles: int, batch: int | None):
        import pyro
        import torch

        from ppl_bnn.backends.pyro_session import typed

        model, guide = typed(model), typed(guide)
        with torch.no_grad():
            trace = pyro.poutine.trace(guide).get_trace(*_first(problem, batch))
        _check_sites(problem, set(trace.nodes))
        super().__init__(problem, model, guide, particles, batch)
        self._initial = {name: problem.system.to_numpy(leaf).copy() for name, leaf in self.leaves.items()}

    def approximation(self, parameters: Mapping[str, np.ndarray]) -> Approximation:
        import torch

        program, system = self._problem.program, self._problem.system
        with torch.no_grad():
            for name, value in parameters.items():
                leaf = self.leaves[name]
                leaf.copy_(torch.as_tensor(np.asarray(value)).reshape(leaf.shape))
            seeds = system.seeds(site_seed("guide", self._problem.seed), KEPT)
            try:
                u, log_q = self._at_once(seeds)
            except RuntimeError:
                # A guide whose control flow depends on its draws, or that writes in place, cannot be mapped.
                drawn = [self._draw(seed) for seed in iterate_seeds(seeds)]
                u = {name: torch.stack([each[0][name] for each in drawn]) for name in program.sites}
                log_q = torch.stack([each[1] for each in drawn])
        kept = {name: system.to_numpy(u[name]).copy() for name in program.sites}
        return Drawn(kept, system.to_numpy(log_q).astype(np.float64))

    def _at_once(self, seeds: Any) -> tuple[dict[str, Any], Any]:
        """`_draw` mapped over the seeds, as many at a time as fit in memory with the model's activations."""
        import torch

        at_once = self._problem.program.draws_at_once(len(seeds))
        mapped: Any = torch.func.vmap(self._draw, randomness="different", chunk_size=at_once)
        # torch warns of operations that it maps one by one; the user cannot change this.
        with _out_of_place(), ignored("There is a performance drop"):
            return mapped(seeds)

    def _draw(self, seed: Any) -> tuple[dict[str, Any], Any]:
        """One draw of the guide in unconstrained coordinates, and its log q.

        `seed` is not read: the generator continues from its state, with and without a map.
        """
        import pyro

        problem, program = self._problem, self._problem.program
        trace: Any = pyro.poutine.trace(self._guide).get_trace(problem.x, problem.y)
        w = {site.name: trace.nodes[site.name]["value"] for site in program.latents}
        w |= {site.name: pyro.get_param_store()[site.name] for site in program.params}
        u, volume = _coordinates(problem, w)
        return u, trace.log_prob_sum() + volume


def _out_of_place() -> Any:
    """A handler that replaces in-place samplers, which torch.func.vmap refuses, by functional ones."""
    from pyro.poutine.messenger import Messenger

    class Drawing(Messenger):
        def _pyro_sample(self, msg: Any) -> None:
            if msg["done"] or msg["is_observed"] or msg["value"] is not None:
                return
            value = _functional_draw(msg["fn"])
            if value is not None:
                msg["value"], msg["done"] = value, True

    return Drawing()


def _functional_draw(distribution: Any) -> Any:
    """An out-of-place draw of a normal or a transformed normal; None for other distributions, which sample as usual."""
    import torch
    from torch import distributions

    if isinstance(distribution, distributions.Independent):
        return _functional_draw(distribution.base_dist)
    if isinstance(distribution, distributions.TransformedDistribution):
        value = _functional_draw(distribution.base_dist)
        for transform in distribution.transforms if value is not None else ():
            value = transform(value)
        return value
    if not isinstance(distribution, distributions.Normal | distributions.MultivariateNormal):
        return None
    loc = distribution.loc
    eps = torch.randn(distribution.batch_shape + distribution.event_shape, dtype=loc.dtype, device=loc.device)
    if isinstance(distribution, distributions.Normal):
        return loc + distribution.scale * eps
    return loc + (distribution.scale_tril @ eps[..., None])[..., 0]


def _check_names(names: list[str]) -> None:
    """Refuse a site name that continues another one after a dot."""
    wanted = "site names of which none continues another after a dot, as Pyro's AutoNormal keeps them as attributes"
    advice = "another name, guide='diagonal', or ppl='numpyro'"
    for name, other in itertools.permutations(names, 2):
        good, got = not other.startswith(f"{name}."), f"{name!r} and {other!r}"
        UnsupportedError.check(good, "SVI", wanted, got, advice)


# (system, whether the guide is written by hand) -> the class: AutoNormal or that guide, under the Trace_ELBO of the
# system. It is called with a problem, the native model, the guide, draws per step, and rows per step.
SYSTEM_GUIDES: dict[tuple[str, bool], Any] = {
    ("numpyro", False): _NumPyroNormal,
    ("numpyro", True): _NumPyroWritten,
    ("pyro", False): _PyroNormal,
    ("pyro", True): _PyroWritten,
}
