"""Bounds on the evidence for the guides of `guides.py`, with estimators of their gradients, for both systems.

ELBO = E_q[log p(D | w)] - KL(q || p). The first term is scaled from a batch to all rows; the second (`kl.py`) is
counted once. Handlers (`language/stochastic_layers.py`) draw the weights of linear maps once, per row, or with signs
per row, or give the mean of the last one, whose weights then have an expectation in closed form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.protocol import TracedSite
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import DivergenceError, UnsupportedError
from ppl_bnn.inference.flat_vector import first_rows, latent_names, somewhere, system_values, untransformed
from ppl_bnn.inference.variational.autoguide import Costs
from ppl_bnn.inference.variational.families.blocks import Delta, Gaussian, Normal
from ppl_bnn.inference.variational.guides import Guide, GuideApproximation, strip_prefix
from ppl_bnn.inference.variational.kl import Divergence
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import LinearUse, NetworkFunction, RecordLinear, network_output
from ppl_bnn.language.primitives import Handler
from ppl_bnn.language.stochastic_layers import (
    Flipout,
    LocalReparameterisation,
    MeanOutput,
    refuse_shared,
    shared_weights,
)
from ppl_bnn.posterior.approximation import Approximation

ESTIMATORS = ("plain", "local", "flipout", "closed_form")
OBJECTIVES = ("elbo", "iwelbo", "renyi")


@dataclass(eq=False, kw_only=True)
class Objective:
    """Minus a bound on the evidence, as a loss for `optimisation/adam.py`, and the approximation at its optimum.

    Parameters of the loss are those of the guide, and "param:<site>" for each parameter without a prior. `analytic`:
    whether terms of the divergence are in closed form where possible. `population`: the number of all rows, None
    without batches. The other fields are as for `SVI`.
    """

    problem: Problem = field(kw_only=False)
    guide: Guide = field(kw_only=False)
    estimator: str
    analytic: bool
    sticking_the_landing: bool
    objective: str
    alpha: float | None
    particles: int
    approximate: bool
    population: int | None

    def __post_init__(self) -> None:
        problem, guide, program = self.problem, self.guide, self.problem.program
        # Order of the Renyi bound; the importance-weighted bound has order 0.
        self.order = {"elbo": None, "iwelbo": 0.0, "renyi": self.alpha}[self.objective]
        self.divergence = Divergence.of(problem, guide, self.analytic)
        closed = ", ".join(self.divergence.crosses)
        if not closed and any(self.divergence.entropies):
            closed = "the entropy"
        single = guide.strata == 1 or (self.objective == "elbo" and self.estimator == "plain")
        wanted = (
            "objective='elbo' and estimator='plain' with a mixture, whose components are drawn one by one"
        )
        got = f"{self.objective!r} and {self.estimator!r}"
        UnsupportedError.check(single, "SVI", wanted, got, "another guide")
        if self.sticking_the_landing and closed:
            wanted = "divergence='monte_carlo' with sticking_the_landing, which is about the score of log q at the draw"
            raise UnsupportedError.of("SVI", wanted, f"a closed form for {closed}", "one of the two")
        if self.order is not None and closed:
            wanted = (
                f"priors with a density for objective={self.objective!r}, whose weights are p / q of one draw"
            )
            special = sorted({program.sites[name].family for name in self.divergence.crosses})
            got = f"{', '.join(special)} over {closed}"
            raise UnsupportedError.of("SVI", wanted, got, "objective='elbo'")
        seen, got = self.estimator == "plain" or program.language, f"a plain {problem.system.name} model"
        wanted = f"a model in the language, whose linear maps can be seen, for estimator={self.estimator!r}"
        UnsupportedError.check(seen, "SVI", wanted, got, "estimator='plain'")
        self.strata = guide.strata
        # Shared weights that a local estimator treats as if each row used them once.
        self.shared: tuple[str, ...] = ()
        self._handler: Handler | None = None
        self._weights: tuple[str, ...] = ()
        self._native = program.native
        if self.estimator != "plain":
            self._weights = self._last_layer() if self.estimator == "closed_form" else self._find_weights()
            self._native = problem.system.native(self._perturbed, record=False)
        if self.population is not None and not program.language:
            self._native = functools.partial(program.native, population=self.population)

    def start(
        self, u0: Mapping[str, np.ndarray], scale: Mapping[str, np.ndarray], seed: int
    ) -> dict[str, np.ndarray]:
        """Parameters with given locations and standard deviations, in unconstrained coordinates by site."""
        values = {
            f"param:{site.name}": np.asarray(u0[site.name], float) for site in self.problem.program.params
        }
        return self.guide.start(u0, scale, np.random.default_rng(site_seed("guide", seed))) | values

    def _last_layer(self) -> tuple[str, ...]:
        """The weight of the last linear map, and its bias if that is a site; `UnsupportedError` without closed form."""
        where, block_of = "estimator 'closed_form'", self.guide.block_of
        weight, bias, run = last_layer(self.problem)
        run.likelihood.jensen_gap(run.f, run.f)
        wanted, got = "rows that all count once", "weights of rows"
        UnsupportedError.check(not self.problem.program.weighted, where, wanted, got, "estimator='local'")
        layer = tuple(site for site in (weight, bias) if site is not None)
        for site in layer:
            block, what = block_of[site], "weight" if site == weight else "bias"
            normal = isinstance(block, Gaussian if site == weight else Gaussian | Delta)
            wanted = f"a normal over {site!r}, the {what} of the last layer"
            advice = "guide={'last_layer': 'fullrank', '*': 'delta'}"
            UnsupportedError.check(normal, where, wanted, type(block).__name__, advice)
            others = [name for name in block.names if name not in layer]
            apart = isinstance(block, Normal | Delta) or not others
            wanted = f"a family over {site!r} that leaves it independent of all but the last layer"
            UnsupportedError.check(apart, where, wanted, f"one with {', '.join(others)}", advice)
        return layer

    def _find_weights(self) -> tuple[str, ...]:
        """The weights and biases of linear maps with independent normals; finds those not used once per row.

        Raises `UnsupportedError` if there are none for this estimator, or for shared ones unless `approximate`.
        """
        problem, guide, program = self.problem, self.guide, self.problem.program
        x, w, uses = linear_uses(problem)
        used = {site for use in uses for site in (use.weight, use.bias) if site is not None}
        weights = tuple(name for name in guide.normal_sites if name in used & untransformed(problem))
        if not weights:
            got = "none with " + ", ".join(sorted({type(block).__name__ for block in guide.blocks}))
            advice = "guide='normal', or {'hidden*': 'normal', ...}"
            if not used:
                got = "none that can be seen: a module keeps its own, and a product written out is no bnn.linear"
                advice = "estimator='plain', or bnn.dense in its place"
            wanted = f"independent normals on unconstrained weights of linear maps, for estimator={self.estimator!r}"
            raise UnsupportedError.of("SVI", wanted, got, advice)
        shared = shared_weights(program.model, w, _twice(program, x), weights)
        refuse_shared(shared, self.estimator, self.approximate)
        if self.estimator == "local":
            self.shared = tuple(shared)
        return weights

    def _perturbed(self, x: Any, y: Any = None) -> None:
        assert self._handler is not None
        with self._handler:
            self.problem.program.model(x, y)

    def __call__(self, parameters: Any, seed: Any, weight: Any, x: Any, y: Any) -> Costs:
        """(loss, (likelihood cost, complexity cost)) over all rows, from a batch."""
        system, count = self.problem.system, self.particles
        if count == 1:
            likelihood, complexity = self._costs(parameters, system.randomness(seed), x, y)
            return likelihood + weight * complexity, (likelihood, complexity)

        def costs(key: Any) -> tuple[Any, Any]:
            return self._costs(parameters, system.randomness(key), x, y)

        likelihood, complexity = system.vmap(costs)(system.split(seed, count))
        parts = (likelihood.mean(), complexity.mean())
        if self.order is None:
            return parts[0] + weight * parts[1], parts
        order = 1.0 - self.order
        bound = (ops.logsumexp(-order * (likelihood + complexity)) - math.log(count)) / order
        return -bound, parts

    def _costs(self, parameters: Any, randomness: Any, x: Any, y: Any) -> tuple[Any, Any]:
        """-log p(D | w) and the divergence at one draw w (a weighted mean over the strata of a mixture)."""
        guide, system = self.guide, self.problem.system
        params, values = _parts(parameters)
        like = next(iter(parameters.values()))
        strata = () if guide.strata == 1 else (guide.strata,)
        u, log_q = guide.draw(params, randomness.normal((*strata, guide.noise_size), like))
        if self.sticking_the_landing:
            fixed = {name: ops.stop_gradient(value) for name, value in params.items()}
            log_q = [
                block.log_prob(guide.parameters_of(fixed, index), block.join(u))
                for index, block in enumerate(guide.blocks)
            ]
        if self.estimator == "closed_form":
            means = guide.mean(params)
            loc = {name: means[name] for name in self._weights}
            weight, *bias = self._weights
            variance = functools.partial(
                guide.output_variance, params, weight=weight, bias=bias[0] if bias else None
            )
            self._handler = MeanOutput(loc, variance)
        elif self.estimator != "plain":
            loc, scale = ({name: part[name] for name in self._weights} for part in guide.loc_scale(params))
            if self.estimator == "flipout":
                self._handler = Flipout(loc, randomness.sign)
            else:
                self._handler = LocalReparameterisation(loc, scale, randomness.normal)

        def at(u: Any, log_q: Any) -> tuple[Any, Any]:
            sites = system.run(self._native, x, y, values={**u, **values}, unconstrained=True)
            return self._likelihood_cost(sites, y), self.divergence(sites, params, log_q)

        if not strata:
            return at(u, log_q)
        # log q of a block with a single component is the same in all strata.
        by_stratum = [ops.broadcast_to(each, (guide.strata,)) for each in log_q]
        likelihood, complexity = system.vmap(at, in_axes=(0, 0))(u, by_stratum)
        share = ops.exp(guide.log_weights(params))
        return ops.sum(share * likelihood), ops.sum(share * complexity)

    def _likelihood_cost(self, sites: list[TracedSite], y: Any) -> Any:
        program, total = self.problem.program, 0.0
        scale = 1.0
        if self.population is not None and program.language:
            scale = self.population / y.shape[0]
        for site in sites:
            if site.kind == "observed":
                main = site.name == program.observed
                factor = site.scale * (scale if main or site.local else 1.0)
                log_prob = site.distribution.log_prob(y if main else site.value).sum()
                if main and isinstance(self._handler, MeanOutput):
                    log_prob = log_prob + self._handler.gap
                total = total - factor * log_prob
        return total

    def approximation(self, parameters: Mapping[str, np.ndarray]) -> Approximation:
        """The guide at fitted parameters, in NumPy."""
        params, values = _parts(parameters)
        scales = self.divergence.prior_scales(params)
        if scales or not all(isinstance(block, Normal) for block in self.guide.blocks):
            return GuideApproximation(self.guide, dict(params), values, scales)
        loc, scale = self.guide.loc_scale(params)
        return MeanField(
            {name: np.asarray({**loc, **values}[name]) for name in self.problem.program.sites},
            {name: np.asarray(value) for name, value in scale.items()},
        )


def _parts(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of the guide, and the values of parameters without a prior by site."""
    params = {name: value for name, value in parameters.items() if not name.startswith("param:")}
    return params, strip_prefix(parameters, "param:")


def evidence_bound(
    method: str, problem: Problem, q: Approximation, count: int, seed: int, advice: str
) -> tuple[dict[str, float], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The ELBO and its standard error in nats, as figures, from new draws: these, their log joint and their log q."""
    u = q.draw(count, np.random.default_rng(site_seed("elbo", seed)))
    log_joint, log_q = problem.log_joint_draws(u).astype(np.float64), q.log_prob(u)
    assert log_q is not None
    values = log_joint - log_q
    if not np.all(np.isfinite(values)):
        got = f"{int((~np.isfinite(values)).sum())} of {count} draws without a finite log joint"
        raise DivergenceError.of(method, "a finite ELBO", got, advice)
    error = float(values.std(ddof=1) / math.sqrt(count))
    return {"elbo": float(values.mean()), "elbo_se": error}, u, log_joint, log_q


def linear_uses(problem: Problem) -> tuple[Any, dict[str, Any], list[LinearUse]]:
    """One row of data (all if rows interact), values of all sites, and the uses of the linear maps."""
    row, w, record, _ = _recorded(problem)
    return row, w, record.uses


def _recorded(problem: Problem) -> tuple[Any, dict[str, Any], RecordLinear, NetworkFunction]:
    """One row of data (all if rows interact), values of all sites, and a run of the network with its linear maps."""
    row, y = first_rows(problem)
    # Maps are identified by the array objects that they receive, whatever the values.
    w = problem.program.constrain(system_values(problem, somewhere(problem)), row, y)
    with RecordLinear(values=w) as record:
        run = network_output(problem.program.model, w, row)
    return row, w, record, run


def _twice(program: Program, row: Any) -> Any:
    """Two rows, which show what is used once per row, if rows can be separated."""
    if program.coupled or program.has_local:
        return row
    return map_data(lambda a: ops.concatenate([a, a], 0), row)


def last_layer(problem: Problem) -> tuple[str, str | None, NetworkFunction]:
    """The sites of the weight and the bias of the linear map whose output is f, once per row, and a run of the network.

    Raises `UnsupportedError` if f is the output of no such map.
    """
    row, w, record, run = _recorded(problem)
    use = record.uses[-1] if record.uses and record.outputs[-1] is run.f else None
    latent = untransformed(problem).intersection(latent_names(problem))
    if use is None or use.kind != "linear" or use.weight is None or use.weight not in latent:
        wanted = "bnn.dense, or a linear map of a sampled weight, whose output is f itself"
        got = "a network that ends with something else"
        raise UnsupportedError.of("the last layer", wanted, got, "another estimator")
    layer = [site for site in (use.weight, use.bias) if site in latent]
    program = problem.program
    refuse_shared(shared_weights(program.model, w, _twice(program, row), layer), "closed_form")
    return use.weight, use.bias if use.bias in latent else None, run
