"""Functions drawn from a posterior: in NumPy as predictions are, and in torch with gradients in the inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.systems import system
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.language import ops
from ppl_bnn.language.handlers import COMPUTED, network_output
from ppl_bnn.language.likelihoods.base import Likelihood
from ppl_bnn.posterior.approximation import Draws

if TYPE_CHECKING:
    from ppl_bnn.posterior.posterior import Posterior

# Families of predictions whose first parameter is where the target is without noise.
WITH_LOCATION = ("Normal", "StudentT", "Laplace", "MultivariateNormal")
MEMORY = 2**28


@dataclass(frozen=True)
class FunctionDraws:
    """Functions drawn from a posterior; made by `Posterior.function_draws`.

    Calling it with inputs x of N rows gives the location of the target under each function: (S, N), or (S, N, K) for K
    outputs, in the units of the targets and without noise. A tensor of torch, (..., N, F), gives a tensor (S, ..., N)
    or (S, ..., N, K) with gradients in x, whichever system has fitted the posterior.

    Parameters
    ----------
    posterior : Posterior
        The posterior.
    u : dict of str to ndarray
        Draws of the unconstrained coordinates, with one leading axis of length S.
    kind : str
        "sampled" or "linearised".

    Notes
    -----
    A linearised function is f(x, w) + J(x, w) (w' - w) for the mode w and a draw w', as in the predictions of a Laplace
    approximation. The same function is used at all inputs, so that values at several rows are joint, as Thompson
    sampling needs.

    Examples
    --------
    >>> import torch
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.Laplace(), standardise=True)
    >>> f = posterior.function_draws(3)
    >>> x = torch.tensor(table.x[:5], requires_grad=True)
    >>> f(x).sum().backward()
    >>> x.grad.shape
    torch.Size([5, 10])
    """

    posterior: Posterior
    u: Draws
    kind: str

    @classmethod
    def of(cls, posterior: Posterior, count: int, seed: int, kind: str) -> Self:
        """Draw `count` functions."""
        InputError.check(count >= 1, "function_draws count", "a positive number", repr(count), "count=10")
        rng = np.random.default_rng(site_seed("function draws", seed))
        if posterior.approximation.stored_count is None:
            found = cls(posterior, posterior.approximation.draw(count, rng), kind)
        else:
            total, weights = math.prod(posterior.shape), posterior.draw_weights
            good, got = weights is not None or count <= total, repr(count)
            InputError.check(
                good, "function_draws count", f"at most the {total} there are", got, "a longer fit"
            )
            shares = None if weights is None else weights / weights.sum()
            index = rng.choice(total, size=count, replace=weights is not None, p=shares)
            draws = posterior.unconstrained_draws.items()
            found = cls(posterior, {name: u.reshape(total, *u.shape[2:])[index] for name, u in draws}, kind)
        likelihood = found._likelihood
        # The parameters of one row tell the family.
        eta = found._predictor(map_data(lambda x: x[:1], posterior.inputs))
        family, _ = likelihood.mixture_parameters(eta)
        got = f"{type(likelihood).__name__}, predicted as {family}"
        wanted, advice = f"a likelihood predicted as {', '.join(WITH_LOCATION)}", "posterior.predictor(x)"
        UnsupportedError.check(family in WITH_LOCATION, "function_draws", wanted, got, advice)
        return found

    def __len__(self) -> int:
        return len(next(iter(self.u.values())))

    def __call__(self, x: Any) -> Any:
        if ops.namespace(x).__name__ == "torch":
            return self._in_torch(x)
        return self._location(self._predictor(self.posterior.fit_inputs(x)))

    @cached_property
    def _likelihood(self) -> Likelihood:
        return self.posterior.with_problem(lambda problem: problem.program.likelihood)

    def _predictor(self, x: Any) -> np.ndarray:
        return self.posterior._predictor(self.u, x, self.kind, MEMORY)

    def _location(self, eta: Any) -> Any:
        """The location in the units of the targets, for eta (S, N, D)."""
        location = self._likelihood.mixture_parameters(eta)[1]["loc"]
        units = self.posterior.standardisation
        if units is None or units.y_mean is None or units.y_scale is None:
            return location
        return location * ops.asarray(units.y_scale, like=location) + ops.asarray(units.y_mean, like=location)

    # -- torch

    def _in_torch(self, x: Any) -> Any:
        posterior, inputs = self.posterior, self.posterior.inputs
        good, got = posterior.language and isinstance(inputs, np.ndarray), "another"
        expected = "a model in the language whose inputs are one array"
        UnsupportedError.check(good, "function_draws of tensors", expected, got, "arrays of NumPy")
        shape = tuple(inputs.shape[1:])
        lead = x.ndim - len(shape)
        good = lead > 0 and tuple(x.shape[lead:]) == shape
        InputError.check(
            good, "x", f"a tensor (..., {', '.join(map(str, shape))})", tuple(x.shape), "other columns"
        )
        rows = x.reshape(-1, *shape)
        units = posterior.standardisation
        if units is not None:
            rows = (rows - ops.asarray(units.x_mean, like=x)) / ops.asarray(units.x_scale, like=x)
        location = self._location(self._predictor_in_torch(rows))
        return location.reshape(len(self), *x.shape[:lead], *location.shape[2:])

    def _predictor_in_torch(self, x: Any) -> Any:
        """eta (S, N, D) at inputs in the units of the fit."""
        model, chosen = self.posterior.approximation.program(self.posterior.model), system("pyro")

        def eta(w: Mapping[str, Any]) -> Any:
            return network_output(model, w, x).predictor

        base, moves = (map_data(lambda a: ops.asarray(a, like=x), part) for part in self._values)
        if not base:
            return chosen.vmap(eta)(moves)

        def linearised(move: Mapping[str, Any]) -> Any:
            value, tangent = chosen.jvp(eta, base, move)
            return value + tangent

        return chosen.vmap(linearised)(moves)

    @cached_property
    def _values(self) -> tuple[Draws, Draws]:
        """Values w of all sites at which to linearise, and tangents; or nothing, and draws of w."""
        local = self.posterior.with_problem(lambda problem: problem.program.has_local)
        expected, got = "a model without per-row latent variables", "bnn.rows in the model"
        UnsupportedError.check(not local, "function_draws of tensors", expected, got, "arrays of NumPy")
        found = self.posterior.with_problem(self._linearised if self.kind == "linearised" else self._sampled)
        # Arrays of JAX cannot be written to, of which torch warns.
        return map_data(np.array, found[0]), map_data(np.array, found[1])

    def _sampled(self, problem: Problem) -> tuple[Draws, Draws]:
        w = problem.program.constrain_draws(self.u, problem.x, problem.y)
        computed = self.posterior.approximation.weight_draws(problem, self.u)
        return {}, w | {COMPUTED + name: value for name, value in computed.items()}

    def _linearised(self, problem: Problem) -> tuple[Draws, Draws]:
        """w of the mode, and the derivative of w along each draw minus the mode."""
        approximation, program, chosen = self.posterior.approximation, problem.program, problem.system
        expected, got = "one Gaussian", type(approximation).__name__
        good = len(approximation.components) < 2
        UnsupportedError.check(good, "function_draws of tensors", expected, got, "kind='sampled'")
        mode = approximation.centre()
        around = map_data(chosen.asarray, mode)

        def tangent(change: Mapping[str, Any], x: Any, y: Any) -> Any:
            return chosen.jvp(lambda u: program.constrain(u, x, y), around, change)[1]

        deviations = {name: chosen.asarray(self.u[name] - value) for name, value in mode.items()}
        moves = chosen.vmap(tangent, in_axes=(0, None, None))(deviations, problem.x, problem.y)
        base = program.constrain_draws(
            {name: value[None] for name, value in mode.items()}, problem.x, problem.y
        )
        # torch asks for one order of the sites.
        ordered = {name: chosen.to_numpy(moves[name]) for name in base}
        return {name: value[0] for name, value in base.items()}, ordered
