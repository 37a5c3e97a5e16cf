"""Ensembles: one method fitted several times from different starts, and what comes of it as one posterior."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.core.arrays import map_data, site_seed
from ppl_bnn.core.errors import (
    BNNError,
    CurvatureError,
    DivergenceError,
    InputError,
    UnsupportedError,
    message,
)
from ppl_bnn.core.progress import Progress, Task
from ppl_bnn.inference.checkpoint import Checkpoint, fingerprint
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.method import Method, Outcome, Start, Stopwatch
from ppl_bnn.inference.optimisation.loops import check_whole, rows_per_step
from ppl_bnn.posterior.posterior import Approximation, Chains, checked_weights
from ppl_bnn.posterior.registered import approximation_class
from ppl_bnn.prediction.prediction import JointPrediction, Prediction

# What a member may come to that leaves the others as good as they were.
FAILURES = (DivergenceError, CurvatureError)


# --- what comes of it -----------------------------------------------------------------------------


@dataclass
class Members(Approximation):
    """A mixture of approximations, q(u) = sum_k w_k q_k(u), with equal weights unless `weights` (K,) says otherwise.

    Members that are points are a fixed set of K draws (`held`); any other are drawn from on demand, of `draw(count)`
    each its share, in the order of the members, to the nearest whole number. Predictions are mixtures of what each
    member predicts by default: closed forms side by side, and linearised draws about the mode of their own member.

    The density is None where a member has none (points), and where members carry tuned hyper-parameters: then each
    approximates the posterior of a model of its own. Members that hold some coordinates at values of their own (a
    Laplace approximation of the last layer) lie on different subspaces, and a draw has the density of the one it is on.
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
        """The weights, (K,), where nothing is said all equal."""
        count = len(self.members)
        return np.full(count, 1.0 / count) if self.weights is None else self.weights

    def weighted(self, weights: np.ndarray | None) -> Members:
        """The same members with other weights; None: equal ones."""
        return replace(self, weights=weights)

    # -- draws

    @property
    def draws_held(self) -> int | None:
        """K where all members are points: there are no draws but these."""
        return len(self.members) if all(member.kind == "point" for member in self.members) else None

    def held(self) -> dict[str, np.ndarray]:
        """The points, member by member."""
        points = [member.centre() for member in self.members]
        return {name: np.stack([np.asarray(point[name]) for point in points]) for name in points[0]}

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`count` draws, member after member; as many as there are members gives one of each."""
        owners = self._allotted(count)
        drawn = [
            member.draw(int(np.count_nonzero(owners == index)), rng)
            for index, member in enumerate(self.members)
            if np.any(owners == index)
        ]
        return {name: np.concatenate([part[name] for part in drawn]) for name in drawn[0]}

    def _allotted(self, count: int) -> np.ndarray:
        """The member that each of `count` draws is from, in order."""
        edges = np.cumsum(self.shares)
        places = (np.arange(count) + 0.5) / count * edges[-1]
        return np.minimum(np.searchsorted(edges, places, side="right"), len(edges) - 1)

    def log_prob(self, u: Mapping[str, np.ndarray]) -> np.ndarray | None:
        if any(member.kind == "point" for member in self.members) or self._tuned:
            return None
        found = self._log_densities(u)
        if found is None:
            return None
        top = found.max(0)
        finite = np.where(np.isfinite(top), top, 0.0)
        with np.errstate(divide="ignore"):
            return finite + np.log(np.exp(found - finite).sum(0))

    def _log_densities(self, u: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """log w_k q_k(u), (K, S), -inf where u is not on the subspace of member k; None where one has no density."""
        rows = []
        with np.errstate(divide="ignore"):
            log_weights = np.log(self.shares)
        for member, log_weight in zip(self.members, log_weights, strict=True):
            count = len(next(iter(u.values())))
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
        """That of the member with most weight, the first of several: a mean over modes would be no network at all."""
        return self.members[int(np.argmax(self.shares))].centre()

    @property
    def has_centre(self) -> bool:
        return len(self.members) == 1 and self.members[0].has_centre

    # -- predictions

    @property
    def _tuned(self) -> bool:
        """Whether a member is about another program than the model that was fitted."""

        def untouched(x: Any, y: Any = None) -> None: ...

        return any(member.program(untouched) is not untouched for member in self.members)

    def _problem(self, index: int, problem: Problem) -> Problem:
        """The problem with the program that a member is about."""
        program = problem.program
        model = self.members[index].program(program.model)
        if model is program.model:
            return problem

        def build() -> Program:
            return Program.of(
                problem.system,
                model,
                problem.x,
                problem.y,
                language=program.language,
                observed=program.observed,
            )

        return replace(problem, program=program._cached(("member", id(self), index), build))

    def predictor_draws(
        self, problem: Problem, u: Mapping[str, np.ndarray], x: Any, kind: str, seed: int, memory: int
    ) -> np.ndarray:
        """eta (S, N, D): of each draw as the member that it is from has it.

        Where this makes a difference (draws that are linearised, tuned programs) draws are told apart: `_by_owner`.
        """
        if kind == "sampled" and not self._tuned and not self.computes_weights(problem):
            return super().predictor_draws(problem, u, x, kind, seed, memory)

        def predicted(index: int, problem: Problem, part: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"eta": self.members[index].predictor_draws(problem, part, x, kind, seed, memory)}

        return self._by_owner(problem, u, predicted)["eta"]

    def computes_weights(self, problem: Problem) -> bool:
        return any(member.computes_weights(problem) for member in self.members)

    def weight_draws(self, problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not self.computes_weights(problem):
            return {}
        return self._by_owner(
            problem, u, lambda index, problem, part: self.members[index].weight_draws(problem, part)
        )

    def _by_owner(
        self,
        problem: Problem,
        u: Mapping[str, np.ndarray],
        function: Callable[[int, Problem, Mapping[str, np.ndarray]], dict[str, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        """function(member, its problem, draws) for the draws u of each member, in the order of the draws.

        A draw is taken to be from the member under which it is most probable.
        """
        densities = self._log_densities(u)
        if densities is None:
            raise UnsupportedError(
                message(
                    "members with a density, by which their draws are told apart",
                    type(self.members[0]).__name__,
                    "kind='sampled'",
                )
            )
        owners = densities.argmax(0)
        result: dict[str, np.ndarray] = {}
        for index in range(len(self.members)):
            chosen = np.flatnonzero(owners == index)
            if not len(chosen):
                continue
            part = {name: np.asarray(value)[chosen] for name, value in u.items()}
            for name, value in function(index, self._problem(index, problem), part).items():
                if name not in result:
                    result[name] = np.empty((len(owners), *value.shape[1:]), dtype=value.dtype)
                result[name][chosen] = value
        return result

    def closed_form(self, problem: Problem, x: Any, kind: str, memory: int) -> Prediction | None:
        """The mixture of the members' closed forms, where all have one."""
        parts = []
        for index, member in enumerate(self.members):
            part = member.closed_form(self._problem(index, problem), x, kind, memory)
            if part is None:
                return None
            parts.append(part)
        return mixture(parts, self.shares)

    def joint(self, problem: Problem, x: Any, memory: int) -> JointPrediction | None:
        """Mean and covariance of the mixture, by the law of total covariance."""
        parts = []
        for index, member in enumerate(self.members):
            part = member.joint(self._problem(index, problem), x, memory)
            if part is None:
                return None
            parts.append(part)
        mean = np.tensordot(self.shares, np.stack([part.mean for part in parts]), axes=1)
        deviations = np.stack([part.mean for part in parts]) - mean
        between = np.einsum("k,ki,kj->ij", self.shares, deviations, deviations)

        def total(covariances: list[Any]) -> np.ndarray:
            return between + np.tensordot(self.shares, np.stack(covariances), axes=1)

        whole = [part.covariance for part in parts]
        return JointPrediction(
            mean,
            total([part.function_covariance for part in parts]),
            None if any(each is None for each in whole) else total(whole),
        )

    # -- storage

    def arrays(self) -> dict[str, np.ndarray]:
        names = json.dumps([type(member).__name__ for member in self.members])
        found = {"classes": np.frombuffer(names.encode(), dtype=np.uint8).copy()}
        for index, member in enumerate(self.members):
            found |= {f"{index}/{key}": value for key, value in member.arrays().items()}
        return found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Members:
        names = json.loads(np.asarray(arrays["classes"], dtype=np.uint8).tobytes().decode())
        parts: list[dict[str, np.ndarray]] = [{} for _ in names]
        for key, value in arrays.items():
            index, within, name = key.partition("/")
            if within:
                parts[int(index)][name] = value
        return cls(
            tuple(
                approximation_class(name).from_arrays(part) for name, part in zip(names, parts, strict=True)
            )
        )


def mixture(parts: Sequence[Prediction], shares: np.ndarray) -> Prediction:
    """The mixture of predictions of the same rows, part k with the share w_k: its components side by side.

    A component of weight v_s within part k has the weight w_k v_s.
    """
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
    within = None
    if any(part.epistemic_within is not None for part in parts):
        # Of a component without one all that it does not know about the function is how it differs from the others.
        within = np.concatenate([_within(part) for part in parts])
    return replace(
        first,
        parameters={
            name: np.concatenate([part.parameters[name] for part in parts]) for name in first.parameters
        },
        log_weights=np.concatenate(log_weights),
        epistemic_within=within,
    )


def _within(part: Prediction) -> np.ndarray:
    if part.epistemic_within is not None:
        return part.epistemic_within
    return np.zeros((part.draws, part.rows) if part.is_classes else (part.draws, *part.shape))


# --- the method -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ensemble(Method):
    """`size` fits of one method, `member`, each with a seed of its own (start, prior draws, batches), as one mixture

        p(y | x) = 1/K sum_k p_k(y | x)

    of the predictions p_k that a single fit would give. Of `MAP()` this is a deep ensemble (Lakshminarayanan, Pritzel
    and Blundell 2017) in which the prior takes the place of weight decay; of `SWAG()` it is MultiSWAG, of `Laplace()` a
    mixture of Laplace approximations (Wilson and Izmailov 2020; Eschenhagen, Daxberger, Hennig and Kristiadi 2021), and
    of a sampler that starts from a mode, as in `Ensemble(MCLMC(start=MAP()), 10)`, a sampling ensemble. An ensemble of
    modes is no approximation of the posterior with a bound on anything: each member has found one mode by optimisation,
    and modes count alike whatever mass is around them; members can be weighted afterwards (`bnn.stack`). On a posterior
    with one mode all members coincide.

    member: any method; `ppl` and `dtype` are the member's unless they are given. size: K. The first member has the seed
    of the fit, so that an ensemble of one is the member's own fit.

    A deep ensemble is as good as its members: give the model a prior that regularises, or let each member stop early on
    rows held out by its own seed, `Ensemble(MAP(validation=0.1))`, or both. Mini-batches are for members that have
    them: `Ensemble(SVI(guide="delta", batch_size=100))` is a deep ensemble too.

    bootstrap: each member is fitted to as many rows as there are, drawn with replacement: members then differ also
    where they would find the same mode, and what each is fitted to is another data set.

    together: at most so many members are fitted at once by a method that can do that (MAP and SWAG: one loop,
    vectorised over members; samplers: the chains of all members in one run); None: all of them. Other methods fit one
    member after another, on the program that was compiled for the first. tolerate: so many members may fail (a loss or
    a curvature that is not finite); they are left out and named among the warnings. The first failure beyond that is
    the failure of the fit.

    checkpoint: a folder that keeps each member when it is finished; the same fit, interrupted, goes on with those that
    are missing. Members that are fitted together are finished together. A member that keeps checkpoints itself does so
    in folders within this one, and is fitted by itself. More members may be asked for later: those that are there are
    not fitted again.

    The posterior: a mixture (`Members`), of points or of approximations; of chains, all chains, those of a member
    together (`Chains.groups`), so that R-hat compares members. figures: "members", "converged" (1 where all have).
    history: "member_loss" (steps, K), NaN after the end of a member, and "member_<figure>" (K,) for each figure that
    all members have.

    Raises
    ------
    DivergenceError, CurvatureError: more than `tolerate` members failed. UnsupportedError: rows drawn with replacement
    from a model whose rows cannot be taken apart.
    """

    member: Method
    size: int = 10
    bootstrap: bool = False
    together: int | None = None
    tolerate: int = 0
    checkpoint: str | Path | None = None
    ppl: str = dataclasses.field(default="", kw_only=True)
    dtype: str = dataclasses.field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.member, Method):
            instead = (
                f"{self.member.__name__}()" if isinstance(self.member, type) else "MAP(), SWAG() or another"
            )
            raise InputError("member: " + message("a method", repr(self.member), f"member={instead}"))
        given = {name: getattr(self, name) for name in ("ppl", "dtype") if getattr(self, name)}
        if any(getattr(self.member, name) != value for name, value in given.items()):
            object.__setattr__(self, "member", replace(self.member, **given))
        for name in ("ppl", "dtype"):
            object.__setattr__(self, name, getattr(self.member, name))
        super().__post_init__()

    finds_centre: ClassVar[bool] = False

    def check(self) -> None:
        check_whole(self.name, "size", self.size, 1, "10")
        check_whole(self.name, "tolerate", self.tolerate, 0, "0")
        if self.tolerate >= self.size:
            raise InputError(
                f"{self.name} tolerate: "
                + message(f"fewer than the {self.size} members", repr(self.tolerate), "tolerate=0")
            )
        if self.together is not None:
            check_whole(self.name, "together", self.together, 1, "None, for all")
        if not isinstance(self.bootstrap, bool):
            raise InputError(
                f"{self.name} bootstrap: " + message("True or False", repr(self.bootstrap), "bootstrap=False")
            )
        if getattr(self.member, "checkpoint", None) is not None:
            raise InputError(
                f"{self.name}: "
                + message(
                    "the checkpoint of the ensemble, which makes a folder for each member",
                    "a member with one",
                    f"Ensemble({self.member.name}(), checkpoint=folder)",
                )
            )
        holds_out = getattr(self.member, "validation", None) is not None
        # A method with several objectives holds rows out for one of them only.
        if self.bootstrap and holds_out and getattr(self.member, "objective", "validation") == "validation":
            raise InputError(
                f"{self.name} bootstrap: "
                + message(
                    "members without rows held out, as copies of a row would be on both sides",
                    "bootstrap=True with validation=",
                    "one of the two",
                )
            )
        if self.bootstrap and self.member.streams:
            raise UnsupportedError(
                f"{self.name} bootstrap: "
                + message("rows in memory", "a member that streams them", "bootstrap=False")
            )

    @property
    def weakness(self) -> str:
        if getattr(self.member, "finds_points", False):
            return (
                "A handful of points: each counts alike whatever mass is around it, and where members agree there is "
                "no epistemic uncertainty."
            )
        return f"Members count alike whatever mass they stand for. Of each member: {self.member.weakness}"

    def effort(self, size: Size) -> Effort | None:
        found = self.member.effort(size)
        if found is None:
            return None
        # The chains of all members run at once, and so do all points.
        if hasattr(self.member, "chains"):
            return replace(found.times(self.size), parallel=self.size * found.parallel)
        at_once = self.size if hasattr(self.member, "run_together") else 1
        return replace(found.times(self.size), together=max(found.together, at_once))

    # -- what the member decides

    @property
    def systems(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.member.systems

    @property
    def serves_local(self) -> bool:  # type: ignore[override]
        return self.member.serves_local

    @property
    def serves_priors(self) -> frozenset[str]:  # type: ignore[override]
        return self.member.serves_priors

    @property
    def streams(self) -> bool:
        return self.member.streams

    @property
    def start(self) -> Start:
        """Where members start is said by the member."""
        return getattr(self.member, "start", None)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **({"stream": True} if self.streams else {})}

    # -- the fit

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        if self.bootstrap:
            # Whether rows can be taken apart is asked of one row fewer than there are.
            fewer = max(1, problem.rows - 1)
            rows_per_step(f"{self.name} bootstrap", problem, fewer, advice="bootstrap=False")
        outcomes: dict[int, Outcome] = {}
        failed: dict[int, BNNError] = {}
        problems = {index: self._problem(problem, index) for index in range(self.size)}
        kept = {index: self._checkpoint(each, index) for index, each in problems.items()}
        for index, checkpoint in kept.items():
            arrays = checkpoint.load()
            if arrays is not None:
                outcomes[index] = _restored(arrays)
        waiting = [index for index in problems if index not in outcomes]
        for index, found in self._fits(problems, waiting, progress):
            if isinstance(found, Outcome):
                outcomes[index] = found
                kept[index].keep(partial(_stored, found), last=True)
                continue
            failed[index] = found
            if len(failed) > self.tolerate:
                error = type(found)(f"{self.name}: member {index + 1} of {self.size} failed: {found}")
                if isinstance(error, DivergenceError) and isinstance(found, DivergenceError):
                    error.last = found.last
                raise error from found
        return self._joined(
            [outcomes[index] for index in sorted(outcomes)], sorted(outcomes), failed, watch()
        )

    def _problem(self, problem: Problem, index: int) -> Problem:
        """What member `index` is fitted to: another seed and, where rows are drawn again, other rows."""
        seed = problem.seed if index == 0 else site_seed(f"member {index}", problem.seed) % 2**31
        if not self.bootstrap:
            return replace(problem, seed=seed)
        rows = np.random.default_rng(site_seed("bootstrap", seed)).integers(problem.rows, size=problem.rows)
        inputs = map_data(lambda a: np.asarray(a)[rows], problem.inputs)
        targets = np.asarray(problem.targets)[rows]
        asarray = problem.system.asarray
        return replace(
            problem,
            seed=seed,
            inputs=inputs,
            targets=targets,
            x=map_data(asarray, inputs),
            y=asarray(targets),
        )

    def _checkpoint(self, problem: Problem, index: int) -> Checkpoint:
        if self.checkpoint is None:
            return Checkpoint.of(None, {}, "")
        # Plain settings would tell a posterior as a start by its repr, which holds seconds.
        member = {field.name: getattr(self.member, field.name) for field in dataclasses.fields(self.member)}
        belongs = fingerprint(
            problem,
            self,
            left_out=("size", "together", "tolerate"),
            member={"method": self.member.name, **member, "checkpoint": None},
        )
        return Checkpoint.of(self.checkpoint, belongs, f"member{index}")

    def _fits(
        self, problems: Mapping[int, Problem], waiting: Sequence[int], progress: Progress
    ) -> Iterator[tuple[int, Outcome | BNNError]]:
        """Each waiting member with its outcome or its failure, as they come."""
        together: Callable[..., Any] | None = getattr(self.member, "run_together", None)
        keeps = self.checkpoint is not None and hasattr(self.member, "checkpoint")
        size = len(waiting) if self.together is None else self.together
        alone = list(waiting)
        while together is not None and not keeps and size > 1 and len(alone) > 1:
            group = alone[:size]
            try:
                found = together([problems[index] for index in group], progress)
            except FAILURES:
                # Whose failure it is shows when each is fitted by itself.
                found = None
            if found is None:
                break
            yield from zip(group, found, strict=True)
            alone = alone[size:]
        for index in alone:
            told = _Titled(progress, f", member {index + 1} of {self.size}")
            try:
                yield index, self._member(index).run(problems[index], told)
            except FAILURES as error:
                yield index, error

    def _member(self, index: int) -> Method:
        """The member, with a folder of its own where it keeps checkpoints."""
        if self.checkpoint is None or not hasattr(self.member, "checkpoint"):
            return self.member
        folder: dict[str, Any] = {"checkpoint": Path(self.checkpoint) / f"within{index}"}
        return replace(self.member, **folder)

    def _joined(
        self,
        outcomes: list[Outcome],
        numbers: list[int],
        failed: Mapping[int, BNNError],
        seconds: float,
    ) -> Outcome:
        approximations = [outcome.approximation for outcome in outcomes]
        statistics: dict[str, np.ndarray] = {}
        cut: list[str] = []
        approximation: Approximation
        if all(isinstance(each, Chains) for each in approximations):
            chains: list[Any] = approximations
            lengths = [each.shape[1] for each in chains]
            draws = min(lengths)
            if max(lengths) > draws:
                cut.append(
                    f"members have from {draws} to {max(lengths)} draws per chain: the first {draws} of each are used"
                )
            joined = {
                name: np.concatenate([each.u[name][:, :draws] for each in chains]) for name in chains[0].u
            }
            approximation = Chains(joined, groups=len(chains))
            shared = set.intersection(*(set(outcome.statistics) for outcome in outcomes))
            statistics = {
                name: np.concatenate([outcome.statistics[name][:, :draws] for outcome in outcomes])
                for name in outcomes[0].statistics
                if name in shared
            }
        else:
            approximation = Members(tuple(approximations))
        compiled = sum(outcome.compile_seconds for outcome in outcomes)
        gradients = [outcome.gradient_evaluations for outcome in outcomes]
        figures = {"members": float(len(outcomes))}
        if all("converged" in outcome.figures for outcome in outcomes):
            figures["converged"] = min(outcome.figures["converged"] for outcome in outcomes)
        targets = dict.fromkeys(outcome.target for outcome in outcomes if outcome.target)
        if self.bootstrap:
            targets["each member fitted to rows drawn with replacement"] = None
        return Outcome(
            approximation=approximation,
            statistics=statistics,
            history=_histories(outcomes),
            compile_seconds=compiled,
            run_seconds=max(seconds - compiled, 0.0),
            gradient_evaluations=None if None in gradients else float(sum(g for g in gradients if g)),
            warnings=(
                *(
                    f"member {index + 1} of {self.size} failed and is left out: {error}"
                    for index, error in failed.items()
                ),
                *cut,
                *_warnings(outcomes, numbers),
            ),
            figures=figures,
            target="; ".join(targets),
        )


class _Titled:
    """A progress whose titles say which member it is about."""

    def __init__(self, progress: Progress, suffix: str):
        self._progress, self._suffix = progress, suffix

    def task(self, title: str, total: int) -> Task:
        return self._progress.task(title + self._suffix, total)


def _histories(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """The loss curves side by side, and what the members' figures came to."""
    found: dict[str, np.ndarray] = {}
    losses = [np.asarray(outcome.history.get("loss", ()), dtype=np.float64) for outcome in outcomes]
    if all(len(each) for each in losses):
        found["member_loss"] = np.full((max(map(len, losses)), len(losses)), np.nan)
        for index, each in enumerate(losses):
            found["member_loss"][: len(each), index] = each
    for name in outcomes[0].figures:
        if all(name in outcome.figures for outcome in outcomes):
            found[f"member_{name}"] = np.array([outcome.figures[name] for outcome in outcomes])
    return found


def _warnings(outcomes: Sequence[Outcome], numbers: Sequence[int]) -> list[str]:
    """What members warn of, once, with the members that do."""
    said: dict[str, list[int]] = {}
    for number, outcome in zip(numbers, outcomes, strict=True):
        for text in outcome.warnings:
            said.setdefault(text, []).append(number + 1)
    return [
        f"{'all members' if len(who) == len(outcomes) else 'member ' + ', '.join(map(str, who))}: {text}"
        for text, who in said.items()
    ]


# --- a finished member, kept ----------------------------------------------------------------------

_NUMBERS = ("compile_seconds", "run_seconds", "gradient_evaluations")


def _stored(outcome: Outcome) -> dict[str, np.ndarray]:
    told = {
        "class": type(outcome.approximation).__name__,
        "warnings": list(outcome.warnings),
        "figures": outcome.figures,
        "target": outcome.target,
        **{name: getattr(outcome, name) for name in _NUMBERS},
    }
    found = {"told": np.frombuffer(json.dumps(told).encode(), dtype=np.uint8).copy()}
    for part, arrays in (
        ("approximation", outcome.approximation.arrays()),
        ("statistics", outcome.statistics),
        ("history", outcome.history),
    ):
        found |= {f"{part}/{name}": np.asarray(value) for name, value in arrays.items()}
    return found


def _restored(arrays: Mapping[str, np.ndarray]) -> Outcome:
    told = json.loads(arrays["told"].tobytes().decode())

    def part(name: str) -> dict[str, np.ndarray]:
        return {
            key.partition("/")[2]: np.array(value)
            for key, value in arrays.items()
            if key.startswith(f"{name}/")
        }

    return Outcome(
        approximation=approximation_class(told["class"]).from_arrays(part("approximation")),
        statistics=part("statistics"),
        history=part("history"),
        warnings=tuple(told["warnings"]),
        figures=told["figures"],
        target=told["target"],
        **{name: told[name] for name in _NUMBERS},
    )
