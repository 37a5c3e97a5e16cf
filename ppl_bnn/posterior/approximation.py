"""Approximations, the results of methods: distributions over the unconstrained coordinates of a program.

A posterior does not depend on whether its approximation is a set of chains, a guide or a Gaussian about a mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.backends.protocol import Model
from ppl_bnn.core.errors import InputError, UnsupportedError, message
from ppl_bnn.prediction.prediction import JointPrediction, Prediction

# What stands before the names of a sampler's state among those of the sites.
STATE = "state:"


class Approximation(ABC):
    """What a method hands over: a distribution over unconstrained coordinates `u`, in NumPy.

    kind: "chains" (dependent draws, convergence to be judged), "iid" (independent draws on demand) or "point".
    kinds: the predictives it can give, the default first; every approximation has "sampled".

    A mixture of parts of equal weight, such as several chains or the members of an ensemble, names them in
    `components`; stacking gives them other `weights`.
    """

    kind: ClassVar[Literal["chains", "iid", "point"]]
    kinds: ClassVar[tuple[str, ...]] = ("sampled",)
    # Of the components, (K,), summing to 1; None: equal.
    weights: np.ndarray | None = None

    @property
    def components(self) -> tuple[Approximation, ...]:
        """The parts that this is a mixture of, in order; empty where it is none."""
        return ()

    def weighted(self, weights: np.ndarray | None) -> Approximation:
        """The same with other weights (K,) of its components; None: equal ones."""
        raise UnsupportedError(
            "weights: "
            + message(
                "several chains, or an ensemble with members",
                f"{type(self).__name__}, which has no parts",
                "NUTS(chains=4) or an ensemble",
            )
        )

    @property
    def draws_held(self) -> int | None:
        """How many draws there are where there can be no others (`held`); None: as many as wanted."""
        return None

    def held(self) -> dict[str, np.ndarray]:
        """All `draws_held` draws of u, in their order, each array with one leading axis.

        Where there are components each has as many, one after the other.
        """
        raise UnsupportedError(
            f"{type(self).__name__}: " + message("draws that are held", "draws on demand", "draw(count, rng)")
        )

    @abstractmethod
    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`count` draws of u, each array with one leading axis."""

    @abstractmethod
    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """log q(u) of draws with one leading axis, shape (S,); None where q has no density."""

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """All that is needed to build it again with `from_arrays`."""

    @classmethod
    @abstractmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Approximation:
        """The inverse of `arrays`."""

    def centre(self) -> dict[str, np.ndarray]:
        """One representative point: the mode or the mean of u, or where there is none, one draw or one part."""
        raise UnsupportedError(f"{type(self).__name__} has no centre")

    @property
    def has_centre(self) -> bool:
        """Whether `centre()` is the mode or the mean of the whole, not one draw or one part of it."""
        return False

    def predictor_draws(
        self, problem: Problem, u: Mapping[str, np.ndarray], x: Any, kind: str, seed: int, memory: int
    ) -> np.ndarray:
        """eta (S, N, D) at inputs x for draws u: the network itself, unless the approximation linearises it."""
        w = problem.program.constrain_draws(u, problem.x, problem.y)
        return problem.program.predictor_draws(w, x, seed=seed, memory=memory)

    def computes_weights(self, problem: Problem) -> bool:
        """Whether draws of this have weights of their own (`weight_draws`) where the program computes them."""
        return False

    def weight_draws(self, problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """These weights at draws u with one leading axis, name -> (S, *shape)."""
        return {}

    def closed_form(self, problem: Problem, x: Any, kind: str, memory: int) -> Prediction | None:
        """The prediction without draws, where there is one for this kind."""
        return None

    def joint(self, problem: Problem, x: Any, memory: int) -> JointPrediction | None:
        """Mean and covariance over all rows, in the units of the fit, where they need no draws."""
        return None

    def program(self, model: Model) -> Model:
        """The model that this approximates: the one it was fitted to, with the hyper-parameters that the fit tuned.

        Tuned hyper-parameters (precisions, noise, scales of priors) are carried as a program, so that the log joint,
        k-hat, draws from the prior and a loaded posterior all refer to the same model. The user's model is unchanged.
        """
        return model

    def as_prior(self) -> Any:
        """This as the prior of more data (`ppl_bnn.language.transforms.GaussianPrior`).

        Raises
        ------
        UnsupportedError: an approximation that is not Gaussian.
        """
        raise UnsupportedError(
            "with_prior: "
            + message("a posterior that is Gaussian", type(self).__name__, "Laplace() or SVI(guide='normal')")
        )


@dataclass
class Chains(Approximation):
    """Draws of one or more Markov chains: name -> (chain, draw, *unconstrained shape).

    groups: the chains come in so many groups of equal size, one after the other: the members of an ensemble, or
    superchains that started at one point. The components, which may be weighted, are then the groups, else the chains.
    state: where the sampler stands at the last draw, name -> array, so that it can go on from there.
    """

    u: dict[str, np.ndarray]
    weights: np.ndarray | None = None
    groups: int | None = None
    state: dict[str, np.ndarray] = field(default_factory=dict)
    kind: ClassVar[Literal["chains", "iid", "point"]] = "chains"

    def __post_init__(self) -> None:
        if self.groups is not None and (self.groups < 1 or self.shape[0] % self.groups):
            raise InputError(
                "groups: "
                + message(
                    f"a divisor of the {self.shape[0]} chains", repr(self.groups), "groups of equal size"
                )
            )
        if self.weights is not None:
            self.weights = checked_weights(self.weights, self.groups or self.shape[0])

    @property
    def components(self) -> tuple[Chains, ...]:
        """One part per group of chains, or per chain where there are no groups."""
        chains = self.shape[0]
        size = chains // (self.groups or chains)
        return tuple(
            Chains({name: value[start : start + size] for name, value in self.u.items()})
            for start in range(0, chains, size)
        )

    def weighted(self, weights: np.ndarray | None) -> Chains:
        return replace(self, weights=weights)

    @property
    def draws_held(self) -> int:
        chains, draws = self.shape
        return chains * draws

    def held(self) -> dict[str, np.ndarray]:
        return flat_draws(self.u)

    @property
    def shape(self) -> tuple[int, int]:
        first = next(iter(self.u.values()))
        return first.shape[0], first.shape[1]

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        total = self.draws_held
        if self.weights is None:
            picked = rng.choice(total, size=count, replace=count > total)
        else:
            picked = rng.choice(total, size=count, p=per_draw(self.weights, total))
        return {name: value[picked] for name, value in self.held().items()}

    def log_prob(self, u: Mapping[str, np.ndarray]) -> None:
        return None

    def centre(self) -> dict[str, np.ndarray]:
        """The last draw of the first chain: a mean of weights over symmetric modes would be no network at all.

        With weights, of the first chain of the heaviest component.
        """
        chains = self.shape[0]
        heaviest = 0 if self.weights is None else int(np.argmax(self.weights)) * chains // len(self.weights)
        return {name: value[heaviest, -1] for name, value in self.u.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        return self.u | {f"{STATE}{name}": value for name, value in self.state.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Chains:
        return cls(
            {name: value for name, value in arrays.items() if not name.startswith(STATE)},
            state={
                name.removeprefix(STATE): value for name, value in arrays.items() if name.startswith(STATE)
            },
        )


@dataclass
class Point(Approximation):
    """A single point u: what MAP finds. It has no density and no spread."""

    u: dict[str, np.ndarray]
    kind: ClassVar[Literal["chains", "iid", "point"]] = "point"

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {name: np.repeat(value[None], count, axis=0) for name, value in self.u.items()}

    def log_prob(self, u: Mapping[str, np.ndarray]) -> None:
        return None

    def centre(self) -> dict[str, np.ndarray]:
        return dict(self.u)

    @property
    def has_centre(self) -> bool:
        return True

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(self.u)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Point:
        return cls(dict(arrays))


def flat_draws(draws: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in draws.items()}


def checked_weights(weights: Any, count: int) -> np.ndarray:
    """Weights (count,) of components as an array of its own: not negative, summing to 1."""
    array = np.array(weights, dtype=np.float64)
    good = array.shape == (count,) and np.isfinite(array).all() and (array >= 0.0).all()
    if not good or abs(float(array.sum()) - 1.0) > 1e-8:
        raise InputError(
            "weights: "
            + message(
                f"{count} weights of at least 0 that sum to 1",
                f"shape {array.shape}, sum {float(array.sum()):.6g}",
                "one per chain or member, divided by their sum",
            )
        )
    return array


def per_draw(weights: np.ndarray, draws: int) -> np.ndarray:
    """Weights (K,) of components shared equally among their draws (draws,), one component after the other."""
    each = draws // len(weights)
    shared = np.repeat(weights / each, each)
    return shared / shared.sum()
