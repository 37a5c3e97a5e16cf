"""Ensembles: one method fitted several times from different starts, as one posterior."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem
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
from ppl_bnn.inference.ensembles.members import Members
from ppl_bnn.inference.method import Method, Outcome, Start, Stopwatch
from ppl_bnn.inference.optimisation.loops import check_whole, rows_per_step
from ppl_bnn.posterior.approximation import Approximation, Chains
from ppl_bnn.posterior.registered import approximation_class

# What a member may come to that leaves the others as good as they were.
FAILURES = (DivergenceError, CurvatureError)


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
