"""The members of an ensemble as one approximation: a mixture of their approximations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar, Literal, Self

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.posterior.approximation import (
    Approximation,
    Draws,
    arrays_of_members,
    checked_weights,
    members_in,
)
from ppl_bnn.prediction.prediction import JointPrediction, Prediction


@dataclass
class Members(Approximation):
    """A mixture of approximations, q(u) = sum_k w_k q_k(u).

    Attributes
    ----------
    members : tuple of Approximation
        The K approximations q_k.
    weights : ndarray or None
        w, shape (K,); None for equal weights.

    Notes
    -----
    Members that are points are a fixed set of K draws (`stored_draws`). Otherwise each member gets its share of
    `draw(count)`, in the order of the members. Predictions are mixtures of the members' default predictions.

    The density is None if a member has none (points), or if members have tuned hyper-parameters and so different
    posteriors. Members with fixed coordinates (last-layer Laplace) are on different subspaces, and a draw has the
    density of its own subspace.
    """

    members: tuple[Approximation, ...]
    weights: np.ndarray | None = None
    kind: ClassVar[Literal["chains", "iid", "point"]] = "iid"

    def __post_init__(self) -> None:
        if self.weights is not None:
            self.weights = checked_weights(self.weights, len(self.members))

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.members[0].kinds

    @property
    def components(self) -> tuple[Approximation, ...]:
        return self.members

    @property
    def shares(self) -> np.ndarray:
        """The weights, (K,); equal if none are given."""
        count = len(self.members)
        return np.full(count, 1.0 / count) if self.weights is None else self.weights

    def weighted(self, weights: np.ndarray | None) -> Members:
        """The same members with other weights (K,), or None for equal weights."""
        return replace(self, weights=weights)

    # -- draws

    @property
    def stored_count(self) -> int | None:
        """K if all members are points, because there are no other draws; otherwise None."""
        return len(self.members) if all(member.kind == "point" for member in self.members) else None

    def stored_draws(self) -> dict[str, np.ndarray]:
        """The points, one per member."""
        points = [member.centre() for member in self.members]
        return {name: np.stack([np.asarray(point[name]) for point in points]) for name in points[0]}

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draws from the mixture, member after member."""
        counts = np.bincount(self._allotted(count), minlength=len(self.members))
        drawn = [
            member.draw(int(share), rng) for member, share in zip(self.members, counts, strict=True) if share
        ]
        return {name: np.concatenate([part[name] for part in drawn]) for name in drawn[0]}

    def _allotted(self, count: int) -> np.ndarray:
        """The member of each of `count` draws, in order."""
        edges = np.cumsum(self.shares)
        places = (np.arange(count) + 0.5) / count * edges[-1]
        return np.minimum(np.searchsorted(edges, places, side="right"), len(edges) - 1)

    def log_prob(self, u: Draws) -> np.ndarray | None:
        if any(member.kind == "point" for member in self.members) or self._tuned:
            return None
        found = self._log_densities(u)
        return None if found is None else np.logaddexp.reduce(found, axis=0)

    def _log_densities(self, u: Draws) -> np.ndarray | None:
        """log w_k q_k(u), (K, S), -inf off the subspace of member k; None if a member has no density."""
        rows, count = [], len(next(iter(u.values())))
        with np.errstate(divide="ignore"):
            log_weights = np.log(self.shares)
        for member, log_weight in zip(self.members, log_weights, strict=True):
            density = np.zeros(count) if member.kind == "point" else member.log_prob(u)
            if density is None:
                return None
            elsewhere = np.zeros(count, dtype=bool)
            for name, value in member.draw(2, np.random.default_rng(0)).items():
                fixed = value[0] == value[1]
                differs = (np.asarray(u[name]) != value[0]) & fixed
                elsewhere |= differs.reshape(count, -1).any(1)
            rows.append(np.where(elsewhere, -np.inf, np.asarray(density, dtype=np.float64)) + log_weight)
        return np.stack(rows)

    def centre(self) -> dict[str, np.ndarray]:
        """The centre of the member with the largest weight: a mean over modes is not a useful network."""
        return self.members[int(np.argmax(self.shares))].centre()

    @property
    def has_centre(self) -> bool:  # type: ignore[override]
        return len(self.members) == 1 and self.members[0].has_centre

    # -- predictions

    @property
    def _tuned(self) -> bool:
        """Whether a member belongs to another program than the fitted model."""

        def untouched(x: Any, y: Any = None) -> None: ...

        return any(member.program(untouched) is not untouched for member in self.members)

    def _problem(self, index: int, problem: Problem) -> Problem:
        """The problem with the program of a member."""
        program = problem.program
        model = self.members[index].program(program.model)
        if model is program.model:
            return problem

        def build() -> Program:
            how = {"language": program.language, "observed": program.observed}
            return Program.of(problem.system, model, problem.x, problem.y, **how)

        return replace(problem, program=program.cached(("member", id(self), index), build))

    def predictor_draws(
        self, problem: Problem, u: Draws, x: Any, kind: str, seed: int, memory: int
    ) -> np.ndarray:
        """The predictor eta (S, N, D) of draws, with each member's own linearisation or tuned program."""
        if kind == "sampled" and not self._tuned and not self.computes_weights(problem):
            return super().predictor_draws(problem, u, x, kind, seed, memory)

        def predicted(member: Approximation, problem: Problem, part: Draws) -> dict[str, np.ndarray]:
            return {"eta": member.predictor_draws(problem, part, x, kind, seed, memory)}

        return self._by_owner(problem, u, predicted)["eta"]

    def computes_weights(self, problem: Problem) -> bool:
        return any(member.computes_weights(problem) for member in self.members)

    def weight_draws(self, problem: Problem, u: Draws) -> dict[str, np.ndarray]:
        if not self.computes_weights(problem):
            return {}
        return self._by_owner(problem, u, lambda member, own, part: member.weight_draws(own, part))

    def _by_owner(self, problem: Problem, u: Draws, function: Callable[..., Any]) -> dict[str, np.ndarray]:
        """function(member, its problem, draws) for the draws most probable under each member, in the order of the
        draws.
        """
        densities = self._log_densities(u)
        if densities is None:
            wanted = "members with a density, which identifies their draws"
            raise UnsupportedError.of("", wanted, type(self.members[0]).__name__, "kind='sampled'")
        owners = densities.argmax(0)
        chosen = {index: np.flatnonzero(owners == index) for index in np.unique(owners).tolist()}
        found = []
        for index, at in chosen.items():
            part = {name: np.asarray(value)[at] for name, value in u.items()}
            found.append(function(self.members[index], self._problem(index, problem), part))
        back = np.argsort(np.concatenate(list(chosen.values())))
        return {name: np.concatenate([each[name] for each in found])[back] for name in found[0]}

    def closed_form(self, problem: Problem, x: Any, kind: str, memory: int) -> Prediction | None:
        """The mixture of the members' closed forms; None if a member has none."""
        parts = self._each(problem, lambda member, own: member.closed_form(own, x, kind, memory))
        return None if parts is None else mixture(parts, self.shares)

    def joint(self, problem: Problem, x: Any, memory: int) -> JointPrediction | None:
        """Mean and covariance of the mixture, by the law of total covariance; None if a member has none."""
        parts = self._each(problem, lambda member, own: member.joint(own, x, memory))
        if parts is None:
            return None
        means = np.stack([part.mean for part in parts])
        mean = np.tensordot(self.shares, means, axes=1)
        between = np.einsum("k,ki,kj->ij", self.shares, means - mean, means - mean)

        def total(each: Sequence[Any]) -> Any:
            if any(covariance is None for covariance in each):
                return None
            return between + np.tensordot(self.shares, np.stack(each), axes=1)

        function = total([part.function_covariance for part in parts])
        return JointPrediction(mean, function, total([part.covariance for part in parts]))

    def _each(self, problem: Problem, function: Callable[[Approximation, Problem], Any]) -> list[Any] | None:
        """The result for each member and its problem, in order; None as soon as one is None."""
        each = (function(member, self._problem(index, problem)) for index, member in enumerate(self.members))
        parts = list(takewhile(lambda part: part is not None, each))
        return parts if len(parts) == len(self.members) else None

    # -- storage

    def arrays(self) -> dict[str, np.ndarray]:
        return arrays_of_members(self.members)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        return cls(members_in(arrays))


def mixture(parts: Sequence[Prediction], shares: np.ndarray) -> Prediction:
    """The mixture of predictions of the same rows with weights w_k; a component v_s of part k gets w_k v_s."""
    first = parts[0]
    rowwise = any(part.log_weights is not None and part.log_weights.ndim == 2 for part in parts)
    log_weights = []
    with np.errstate(divide="ignore"):
        for part, log_share in zip(parts, np.log(shares), strict=True):
            own = part.log_weights
            if own is None:
                own = np.full(part.draws, -math.log(part.draws))
            if rowwise and own.ndim == 1:
                own = np.repeat(own[:, None], part.rows, axis=1)
            log_weights.append(own + log_share)
    within = [part.epistemic_within for part in parts]
    shape = (first.rows,) if first.is_classes else first.shape
    # Without its own variance a component adds to the uncertainty about the function only by its difference from
    # others.
    zeros = [
        np.zeros((part.draws, *shape)) if each is None else each
        for part, each in zip(parts, within, strict=True)
    ]
    names = first.parameters
    return replace(
        first,
        parameters={name: np.concatenate([part.parameters[name] for part in parts]) for name in names},
        log_weights=np.concatenate(log_weights),
        epistemic_within=None if all(each is None for each in within) else np.concatenate(zeros),
    )
