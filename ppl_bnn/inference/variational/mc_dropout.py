"""Monte-Carlo dropout: dropout in training and in prediction, interpreted as a posterior over weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.core.errors import UnsupportedError, unknown_name
from ppl_bnn.core.progress import Progress
from ppl_bnn.core.settings import between, optional, setting, whole
from ppl_bnn.inference.flat_vector import by_site, flat_sites, minus_log_joint, untransformed
from ppl_bnn.inference.method import Outcome
from ppl_bnn.inference.optimisation.loops import State, adam
from ppl_bnn.inference.optimisation.mode import starting_point
from ppl_bnn.inference.start import Start
from ppl_bnn.inference.variational import iterated
from ppl_bnn.inference.variational.objectives import linear_uses
from ppl_bnn.language.handlers import LinearUse, used_elsewhere
from ppl_bnn.language.stochastic_layers import DroppedInputs
from ppl_bnn.posterior.approximation import Point


@dataclass
class Dropped(Point):
    """The distribution of weights under dropout: each input unit is dropped with the probability r of its tensor.

    Row i of a weight (..., I, O), a channel for a convolution, is M_i / (1 - r) with probability 1 - r, otherwise 0. So
    E_q w = M and Var_q w = r / (1 - r) M^2. There is no density.

    Attributes
    ----------
    u : dict of str to ndarray
        M by site, for all sites.
    rates : dict of str to float
        r by weight site.
    """

    u: dict[str, np.ndarray]
    rates: dict[str, float]
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        # Alphabetical, because a file returns the sites in any order and the draws must not depend on it.
        drawn = {}
        for name, value in sorted(self.u.items()):
            if name in self.rates:
                rate, shape = self.rates[name], (count, *(1,) * (value.ndim - 2), value.shape[-2], 1)
                drawn[name] = (value * ((rng.random(shape) >= rate) / (1.0 - rate))).astype(value.dtype)
            else:
                drawn[name] = np.repeat(np.asarray(value)[None], count, axis=0)
        return {name: drawn[name] for name in self.u}


def _names(value: Any) -> str | None:
    names = not isinstance(value, str) and len(value) and all(isinstance(name, str) for name in value)
    return None if names else "names of layers"


@dataclass(frozen=True)
class MCDropout(iterated.IteratedMethod):
    """Dropout as approximate inference [1]_.

    q(w) is M with input units dropped: w_i = z_i M_i / (1 - r), z_i ~ Bernoulli(1 - r) for each row i of a weight. M,
    and everything that is not dropped (biases, noise, parameters without a prior), are

        argmax_M  sum_n E_z log p(y_n | x_n, w(M, z)) + log p(M) + log |dw/du|,

    in unconstrained coordinates. Each row of data has its own mask in training, which has the same expectation as one
    mask for all rows and less noise. A draw of the posterior is one mask for all rows.

    Parameters
    ----------
    rate : float, default 0.1
        Probability r that a unit is dropped.
    layers : tuple of str or None
        Names of the linear maps and convolutions whose inputs are dropped. None for all but the first, whose inputs are
        features.
    steps : int, default 10000
        Number of Adam steps.
    learning_rate : float, default 0.01
        It is held for the first half of the steps and falls linearly to a tenth over the second, whose iterates are
        averaged.
    batch_size : int or None
        Rows per step, with the likelihood scaled by N / batch_size; None for all rows.
    start : method, posterior, dict or None
        A method, a posterior or a dict of constrained values; None for the prior.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    DivergenceError
        The loss became infinite or NaN.
    UnknownNameError
        No such layer.
    UnsupportedError
        A layer whose weight is not a site of its own, has another use, or is constrained; a plain model of a system;
        mini-batches of a model whose rows cannot be separated.

    Notes
    -----
    The paper has E_q log p(w) instead of log p(M). Under the prior N(0, s^2) that is this objective with the standard
    deviation s (1 - r)^(1/2); log p(M) is defined for every prior. Neither is a bound on the evidence, because q has no
    density. The rate is not learned, and the data do not change the spread that it sets [2]_.

    History: "loss", one estimate of minus the objective per step. Figures: "converged", 1 if the loss was on a plateau
    when the learning rate began to fall, otherwise 0.

    References
    ----------
    .. [1] Gal and Ghahramani (2016).
    .. [2] Osband (2016).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("regression_mlp", width=5)
    >>> method = bnn.MCDropout(rate=0.2, steps=200)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.predict(table.x[:5], draws=50).std.shape
    (5,)
    """

    rate: float = setting(0.1, between(0, 1))
    layers: tuple[str, ...] | None = setting(None, optional(_names), advice="('output',)")
    steps: int = setting(10_000, whole())
    learning_rate: float = setting(0.01, between())
    batch_size: int | None = iterated.batch_setting()
    start: Start = None
    serves_local: ClassVar[bool] = False
    averaged: ClassVar[tuple[str, ...]] = ("u",)
    remedy: ClassVar[str] = "a smaller rate"
    limitations: ClassVar[str] = (
        "Its spread is set by the dropout rate, which is not fitted: it does not shrink as rows are added, and away "
        "from the data it depends on the network alone."
    )

    def check_support(self, problem: Problem) -> None:
        self.scale(problem)

    def plan(self, problem: Problem, progress: Progress) -> iterated.Plan:
        program, system, scale = problem.program, problem.system, self.scale(problem)
        dropped = self._dropped(problem)
        u0 = flat_sites(problem, starting_point(problem, self.start, progress))
        rates, weights = (dict.fromkeys(each, float(self.rate)) for each in (dropped, dropped.values()))

        def rule(state: State, now: State, x: Any, y: Any, randomness: Any) -> tuple[State, Any]:
            loss = minus_log_joint(_with_dropout(program, rates, randomness), scale)
            value, gradient = system.value_and_grad(loss)(state["u"], x, y)
            direction, moments = adam(state, gradient, now["step"])
            return {"u": state["u"] - now["rate"] * direction, **moments}, value

        def finish(state: Mapping[str, np.ndarray]) -> Outcome:
            return Outcome(Dropped(by_site(problem, state["u"]), weights))

        zeros = np.zeros_like(u0)
        return iterated.Plan(rule, {"u": u0, "first": zeros, "second": zeros}, finish)

    def _dropped(self, problem: Problem) -> dict[str, str]:
        """For each map whose inputs are dropped, the site of its weight."""
        if not problem.program.language:
            got, advice = f"a plain {problem.system.name} model", "bnn.linear or bnn.dense, with bnn.observe"
            wanted = "a model in the language, whose linear maps are seen"
            raise UnsupportedError.of(self.name, wanted, got, advice)
        row, w, uses = linear_uses(problem)
        names = list(dict.fromkeys(use.name for use in uses))
        for name in self.layers or ():
            if name not in names:
                raise unknown_name("layer", name, names)
        chosen = names[1:] if self.layers is None else self.layers
        if not chosen:
            advice = f"layers=({names[0]!r},)" if names else "a model with bnn.linear or bnn.dense"
            wanted = "a linear map after the first, to drop what enters it"
            raise UnsupportedError.of(self.name, wanted, f"the maps {names}", advice)
        return {name: self._weight(problem, name, row, w, uses) for name in chosen}

    def _weight(
        self, problem: Problem, name: str, row: Any, w: Mapping[str, Any], uses: list[LinearUse]
    ) -> str:
        """The site of the weight of a map, if dropping the map's inputs amounts to dropping rows of that site."""
        site = next(use.weight for use in uses if use.name == name)
        got = None
        if site is None:
            got = "one that is computed, or a constant"
        elif sum(use.name == name or use.weight == site for use in uses) > 1:
            got = f"{site!r}, used more than once"
        elif used_elsewhere(problem.program.model, w, row, [site]):
            got = f"{site!r}, with another use outside of linear maps"
        elif site not in untransformed(problem):
            got = f"{site!r}, which has a constraint and cannot be zero"
        if got is not None:
            others = [other for other in dict.fromkeys(use.name for use in uses) if other != name]
            advice = f"layers= among {others}" if others else "bnn.dense with a prior over the weights"
            wanted = "a weight that is a site by itself, used in this one place"
            raise UnsupportedError.of(f"MCDropout, layer {name!r}", wanted, got, advice)
        return site  # pyright: ignore[reportReturnType]


def _with_dropout(program: Program, rates: Mapping[str, float], randomness: Any) -> Program:
    """The program with inputs dropped at random, by separate masks for each row of data."""

    def model(x: Any, y: Any = None) -> None:
        with DroppedInputs(rates, randomness.keep):
            program.model(x, y)

    native = program.system.native(model, record=False)
    return dataclasses.replace(program, model=model, native=native, _compiled={})
