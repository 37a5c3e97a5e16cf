"""Approximations, the results of methods: distributions over the unconstrained coordinates of a program.

A posterior handles all kinds alike: a set of chains, a guide, or a Gaussian about a mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import Model
from ppl_bnn.core.arrays import arrays_of, fields_in, unprefixed
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.posterior.registered import approximation_class
from ppl_bnn.prediction.prediction import JointPrediction, Prediction

Draws = Mapping[str, np.ndarray]


class Approximation(ABC):
    """The result of a method: a distribution over unconstrained coordinates `u`, in NumPy.

    A mixture of parts of equal weight, such as several chains or the members of an ensemble, lists them in
    `components`; stacking gives them other `weights`. Draws u are a dict of arrays with one leading axis S.

    Attributes
    ----------
    kind : {"chains", "iid", "point"}
        "chains" (dependent draws, whose convergence must be checked), "iid" (independent draws on demand) or "point".
    kinds : tuple of str
        The supported kinds of predictives, the default first. Every approximation has "sampled".
    weights : ndarray, optional
        Weights of the components, (K,). None if equal.
    has_centre : bool
        Whether `centre()` is the mode or the mean of the whole, not one draw or one part of it.
    """

    kind: ClassVar[Literal["chains", "iid", "point"]]
    kinds: ClassVar[tuple[str, ...]] = ("sampled",)
    # Weights of the components, (K,), summing to 1; None if equal.
    weights: np.ndarray | None = None
    has_centre: ClassVar[bool] = False

    @property
    def components(self) -> tuple[Approximation, ...]:
        """The parts of a mixture, in order; empty for an approximation that is not a mixture."""
        return ()

    def weighted(self, weights: np.ndarray | None) -> Approximation:
        """The same mixture with other weights (K,) of its components, or equal ones for None.

        Raises UnsupportedError for an approximation without components.
        """
        got = f"{type(self).__name__}, which has no parts"
        raise UnsupportedError.of("weights", "several chains or members", got, "NUTS(chains=4)")

    @property
    def stored_count(self) -> int | None:
        """Number of stored draws if no others can be made (`stored_draws`). None if draws are made on demand."""
        return None

    def stored_draws(self) -> dict[str, np.ndarray]:
        """All `stored_count` draws of u, in their order: equally many of each component, one after the other.

        Raises UnsupportedError if draws are made on demand.
        """
        raise UnsupportedError.of(type(self).__name__, "stored draws", "draws on demand", "draw(count, rng)")

    @abstractmethod
    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`count` draws of u."""

    def log_prob(self, u: Draws) -> np.ndarray | None:
        """log q(u) of draws, (S,). None if q has no density, the default."""
        return None

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays needed by `from_arrays`: those of the fields, but for what a posterior stores itself."""
        return arrays_of(self, ("weights", "groups"))

    @classmethod
    def from_arrays(cls, arrays: Draws) -> Self:
        """The inverse of `arrays`."""
        return cls(**fields_in(arrays))

    def centre(self) -> dict[str, np.ndarray]:
        """A representative point: the mode or the mean of u, else one draw or one part.

        Raises UnsupportedError if there is no such point.
        """
        raise UnsupportedError(f"{type(self).__name__} has no centre")

    def predictor_draws(
        self, problem: Problem, u: Draws, x: Any, kind: str, seed: int, memory: int
    ) -> np.ndarray:
        """Predictor eta (S, N, D) at inputs x for draws u: the output of the network, linearised for some kinds.

        `memory` is the number of bytes held in addition to inputs and result.
        """
        w = problem.program.constrain_draws(u, problem.x, problem.y)
        return problem.program.predictor_draws(w, x, seed=seed, memory=memory)

    def computes_weights(self, problem: Problem) -> bool:
        """Whether weights that the program computes from other sites have their own draws here (`weight_draws`)."""
        return False

    def weight_draws(self, problem: Problem, u: Draws) -> dict[str, np.ndarray]:
        """Draws ``(S, *shape)`` of the weights that the program computes from other sites."""
        return {}

    def closed_form(self, problem: Problem, x: Any, kind: str, memory: int) -> Prediction | None:
        """The prediction in closed form, in the units of the fit; None if there is none for this kind."""
        return None

    def joint(self, problem: Problem, x: Any, memory: int) -> JointPrediction | None:
        """Mean and covariance over all rows, in the units of the fit; None if they need draws."""
        return None

    def program(self, model: Model) -> Model:
        """The approximated model: the user's model, with the hyper-parameters that the fit tuned.

        Log joint, k-hat, draws from the prior and a loaded posterior then all refer to the same model.
        """
        return model

    def as_prior(self) -> Any:
        """This approximation as a `ppl_bnn.language.transforms.GaussianPrior`, the prior for more data.

        Raises UnsupportedError if it is not Gaussian.
        """
        raise UnsupportedError.of("with_prior", "a Gaussian posterior", type(self).__name__, "Laplace()")


@dataclass
class Chains(Approximation):
    """Draws of one or more Markov chains.

    Parameters
    ----------
    u : dict of str to ndarray
        name -> ``(chain, draw, *unconstrained shape)``.
    weights : ndarray, optional
        Weights of the components. None if equal.
    groups : int, optional
        Number of groups of consecutive chains, of equal size: the members of an ensemble, or superchains that started
        at one point. The components are then the groups, else the chains.
    state : dict of str to ndarray
        State of the sampler at the last draw, so that it can continue from there.
    """

    u: dict[str, np.ndarray]
    weights: np.ndarray | None = None
    groups: int | None = None
    state: dict[str, np.ndarray] = field(default_factory=dict)
    kind: ClassVar[Literal["chains", "iid", "point"]] = "chains"

    def __post_init__(self) -> None:
        chains, groups = self.shape[0], self.groups
        good = groups is None or (groups >= 1 and chains % groups == 0)
        InputError.check(good, "groups", f"a divisor of the {chains} chains", repr(groups), "equal groups")
        if self.weights is not None:
            self.weights = checked_weights(self.weights, groups or chains)

    @property
    def components(self) -> tuple[Chains, ...]:
        """One part per group of chains, or per chain if there are no groups."""
        chains = self.shape[0]
        size = chains // (self.groups or chains)
        parts = (slice(start, start + size) for start in range(0, chains, size))
        return tuple(Chains({name: value[part] for name, value in self.u.items()}) for part in parts)

    def weighted(self, weights: np.ndarray | None) -> Chains:
        return replace(self, weights=weights)

    @property
    def stored_count(self) -> int:
        chains, draws = self.shape
        return chains * draws

    def stored_draws(self) -> dict[str, np.ndarray]:
        return flat_draws(self.u)

    @property
    def shape(self) -> tuple[int, int]:
        """(chains, draws)."""
        first = next(iter(self.u.values()))
        return first.shape[0], first.shape[1]

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        total, weights = self.stored_count, self.weights
        shares = None if weights is None else per_draw(weights, total)
        picked = rng.choice(total, size=count, replace=count > total or weights is not None, p=shares)
        return {name: value[picked] for name, value in self.stored_draws().items()}

    def centre(self) -> dict[str, np.ndarray]:
        """The last draw of the first chain; with weights, of the first chain of the component with the largest weight.

        A mean of weights over symmetric modes would not be a network that fits the data.
        """
        chains = self.shape[0]
        heaviest = 0 if self.weights is None else int(np.argmax(self.weights)) * chains // len(self.weights)
        return {name: value[heaviest, -1] for name, value in self.u.items()}


@dataclass
class Point(Approximation):
    """A single point u, such as the result of MAP. It has no density and no spread."""

    u: dict[str, np.ndarray]
    kind: ClassVar[Literal["chains", "iid", "point"]] = "point"
    has_centre: ClassVar[bool] = True

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {name: np.repeat(value[None], count, axis=0) for name, value in self.u.items()}

    def centre(self) -> dict[str, np.ndarray]:
        return dict(self.u)


@dataclass
class Drawn(Approximation):
    """Independent draws u ``(S, *unconstrained shape)`` that were made once, with log densities `log_q` (S,) or None.

    `draw` returns the first of them, always the same; a posterior uses all.
    """

    u: dict[str, np.ndarray]
    log_q: np.ndarray | None = None
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    @property
    def count(self) -> int:
        """Number of draws, S: a posterior uses all of them."""
        return len(next(iter(self.u.values())))

    @property
    def stored_count(self) -> int:
        return self.count

    def stored_draws(self) -> dict[str, np.ndarray]:
        return dict(self.u)

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        enough, expected = count <= self.count, f"at most the {self.count} that were kept"
        InputError.check(enough, "draws", expected, count, "fewer")
        return {name: value[:count] for name, value in self.u.items()}

    def log_prob(self, u: Draws) -> np.ndarray | None:
        """log q of the first draws, as `draw` returns them; None for any other values, whose density is not known."""
        if self.log_q is None:
            return None
        count = len(next(iter(u.values())))
        # Where there are more values than draws, the shapes differ.
        known = all(np.array_equal(value, self.u[name][:count]) for name, value in u.items())
        return self.log_q[:count] if known else None

    def centre(self) -> dict[str, np.ndarray]:
        """The mean of the draws."""
        return {name: value.mean(0) for name, value in self.u.items()}


def arrays_of_members(members: Iterable[Approximation]) -> dict[str, np.ndarray]:
    """The arrays of several approximations, and the names of their classes."""
    found: dict[str, np.ndarray] = {}
    for index, member in enumerate(members):
        found[f"{index}/class"] = np.frombuffer(type(member).__name__.encode(), dtype=np.uint8)
        found |= {f"{index}/of/{key}": value for key, value in member.arrays().items()}
    return found


def members_in(arrays: Draws) -> tuple[Approximation, ...]:
    """The inverse of `arrays_of_members`."""
    count = len({key.partition("/")[0] for key in arrays})
    parts = (unprefixed(arrays, str(index)) for index in range(count))
    return tuple(
        approximation_class(part["class"].tobytes().decode()).from_arrays(unprefixed(part, "of"))
        for part in parts
    )


def flat_draws(draws: Draws) -> dict[str, np.ndarray]:
    """Draws (chain, draw, ...) with one leading axis, chain after chain."""
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in draws.items()}


def checked_weights(weights: Any, count: int) -> np.ndarray:
    """A copy of the weights (count,) of components: at least 0, summing to 1."""
    array = np.array(weights, dtype=np.float64)
    total = float(array.sum())
    # A sum that is near 1 is finite, and so is each weight.
    good = array.shape == (count,) and (array >= 0.0).all() and abs(total - 1.0) <= 1e-8
    got = f"shape {array.shape}, sum {total:.6g}"
    InputError.check(good, "weights", f"{count} weights of at least 0 that sum to 1", got, "one per part")
    return array


def per_draw(weights: np.ndarray, draws: int) -> np.ndarray:
    """Weights per draw: each of the K components, one after the other, shares its weight equally among its draws."""
    each = draws // len(weights)
    shared = np.repeat(weights / each, each)
    return shared / shared.sum()
