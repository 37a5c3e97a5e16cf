"""Ensembles: one method fitted several times from different starts, combined into one posterior."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, site_seed, unprefixed
from ppl_bnn.core.errors import BNNError, CurvatureError, DivergenceError, InputError, UnsupportedError
from ppl_bnn.core.progress import Progress, ended_by_callback
from ppl_bnn.core.settings import flag, optional, setting, whole
from ppl_bnn.inference.checkpoint import Checkpoint, fingerprint
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.ensembles.members import Members
from ppl_bnn.inference.ensembles.of_member import OfMember
from ppl_bnn.inference.method import Outcome, Stopwatch
from ppl_bnn.inference.optimisation.loops import rows_per_step
from ppl_bnn.inference.start import Start
from ppl_bnn.posterior.approximation import Approximation, Chains
from ppl_bnn.posterior.registered import approximation_class

# Errors of one member that do not affect the others.
FAILURES = (DivergenceError, CurvatureError)


@dataclass(frozen=True)
class Ensemble(OfMember):
    """Several fits of one method, combined as one mixture.

    Each of the `size` fits of `member` has its own seed (start, draws from the prior, batches). The prediction is the
    mixture p(y | x) = 1/K sum_k p_k(y | x) of those of the fits.

    Parameters
    ----------
    member : Method
        Any method.
    size : int, default 10
        K, the number of members. The first has the seed of the fit, so an ensemble of one is the member's own fit.
    bootstrap : bool, default False
        Whether each member is fitted to N rows drawn with replacement. Members then differ even within one mode.
    together : int or None
        Maximum number of members fitted at once, for methods that support it (MAP, SWAG and samplers); None for all.
        Other methods fit one member after another, with one compiled program.
    tolerate : int, default 0
        Number of members that may fail (a loss or curvature that is not finite). They are left out and named in the
        warnings.
    checkpoint : path or None
        A folder that stores each finished member. An interrupted fit continues with the missing ones, and `size` can be
        increased later. A member with its own checkpoints stores them in subfolders, and is fitted separately.
    ppl, dtype, compile : str, str, bool
        As for `Method`; system and floating type are those of the member unless given.

    Raises
    ------
    DivergenceError, CurvatureError
        More than `tolerate` members failed.
    UnsupportedError
        Bootstrap with a model whose rows cannot be separated.

    Notes
    -----
    An ensemble of `MAP()` is a deep ensemble [1]_ with the prior as weight decay. `SWAG()` gives MultiSWAG [2]_,
    `Laplace()` a mixture of Laplace approximations [2]_ [3]_, and `MCLMC(start=MAP())` a sampling ensemble.

    An ensemble of modes does not bound the error of the posterior: all modes have the same weight whatever mass is
    around them. `bnn.stack` weights members afterwards. If the posterior has one mode, all members coincide. A deep
    ensemble is as good as its members: use a prior that regularises, or `Ensemble(MAP(validation=0.1))`, which stops
    each member early. `Ensemble(SVI(guide="delta", batch_size=100))` is a deep ensemble with mini-batches.

    The posterior is a mixture (`Members`) of points or approximations. For chains it holds all chains, grouped by
    member (`Chains.groups`), so that R-hat compares members.

    Figures: "members"; "converged", 1 if all members converged. History: "member_loss" (steps, K), NaN after the end of
    a member, and "member_<figure>" (K,) for each figure that all members have.

    References
    ----------
    .. [1] Lakshminarayanan, Pritzel and Blundell (2017).
    .. [2] Wilson and Izmailov (2020).
    .. [3] Eschenhagen, Daxberger, Hennig and Kristiadi (2021).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.Ensemble(bnn.MAP(), size=3), standardise=True)
    >>> posterior.predict(table.x).draws  # one for each member
    3
    """

    size: int = setting(10, whole())
    bootstrap: bool = setting(False, flag)
    together: int | None = setting(None, optional(whole()), advice="None, for all")
    tolerate: int = setting(0, whole(0))
    checkpoint: str | Path | None = None

    def check(self) -> None:
        member = self.member
        few, wanted = self.tolerate < self.size, f"fewer than the {self.size} members"
        InputError.check(few, f"{self.name} tolerate", wanted, self.tolerate, "tolerate=0")
        wanted = "the checkpoint of the ensemble, which makes a folder for each member"
        advice = f"Ensemble({member.name}(), checkpoint=folder)"
        without = getattr(member, "checkpoint", None) is None
        InputError.check(without, self.name, wanted, "a member with one", advice)
        if self.bootstrap:
            where = f"{self.name} bootstrap"
            # A method with several objectives holds rows out for "validation" only.
            holds_out = getattr(member, "objective", "validation") == "validation"
            good = not holds_out or getattr(member, "validation", None) is None
            wanted = "members without rows held out, as copies of a row would be on both sides"
            InputError.check(good, where, wanted, "bootstrap=True with validation=", "one of the two")
            got = "a member that streams them"
            UnsupportedError.check(not member.streams, where, "rows in memory", got, "bootstrap=False")

    @property
    def limitations(self) -> str:  # type: ignore[override]
        if getattr(self.member, "finds_points", False):
            return (
                "A handful of points: each counts alike whatever mass is around it, and where members agree there is "
                "no epistemic uncertainty."
            )
        return f"Members count alike whatever mass they stand for. Of each member: {self.member.limitations}"

    def effort(self, size: Size) -> Effort | None:
        found = self.member.effort(size)
        if found is None:
            return None
        # The chains of all members run at once, and so do all points.
        if hasattr(self.member, "chains"):
            return replace(found.times(self.size), parallel=self.size * found.parallel)
        at_once = self.size if hasattr(self.member, "run_together") else 1
        return replace(found.times(self.size), together=max(found.together, at_once))

    systems = property(attrgetter("member.systems"))  # type: ignore[assignment]
    streams = property(attrgetter("member.streams"))  # type: ignore[assignment]

    @property
    def start(self) -> Start:
        """The start of the member."""
        return getattr(self.member, "start", None)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **({"stream": True} if self.streams else {})}

    # -- the fit

    def check_support(self, problem: Problem) -> None:
        if self.bootstrap:
            # N - 1 rows, because a batch of all rows would be accepted for any model.
            fewer = max(1, problem.rows - 1)
            rows_per_step(f"{self.name} bootstrap", problem, fewer, advice="bootstrap=False")
        self.member.check_support(problem)

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        failed: dict[int, BNNError] = {}
        problems = {index: self._problem(problem, index) for index in range(self.size)}
        kept = {index: self._checkpoint(each, index) for index, each in problems.items()}
        stored = {index: checkpoint.load() for index, checkpoint in kept.items()}
        outcomes = {index: _restored(arrays) for index, arrays in stored.items() if arrays is not None}
        waiting = [index for index in problems if index not in outcomes]
        for index, found in self._fits(problems, waiting, progress):
            if isinstance(found, Outcome):
                outcomes[index] = found
                # What a callback may have ended is fitted again by the next run.
                if not ended_by_callback(progress):
                    kept[index].keep(partial(_stored, found), last=True)
                continue
            failed[index] = found
            if len(failed) > self.tolerate:
                error = type(found)(f"{self.name}: member {index + 1} of {self.size} failed: {found}")
                if isinstance(error, DivergenceError) and isinstance(found, DivergenceError):
                    error.last = found.last
                raise error from found
        return self._joined(dict(sorted(outcomes.items())), failed, watch())

    def _problem(self, problem: Problem, index: int) -> Problem:
        """The problem of member `index`: another seed and, with bootstrap, other rows."""
        seed = problem.seed if index == 0 else site_seed(f"member {index}", problem.seed) % 2**31
        if not self.bootstrap:
            return replace(problem, seed=seed)
        rows = np.random.default_rng(site_seed("bootstrap", seed)).integers(problem.rows, size=problem.rows)
        inputs = map_data(lambda a: np.asarray(a)[rows], problem.inputs)
        targets, asarray = np.asarray(problem.targets)[rows], problem.system.asarray
        data = {"inputs": inputs, "targets": targets, "x": map_data(asarray, inputs), "y": asarray(targets)}
        return replace(problem, seed=seed, **data)

    def _checkpoint(self, problem: Problem, index: int) -> Checkpoint:
        if self.checkpoint is None:
            return Checkpoint.of(None, {}, "")
        # Plain settings would represent a posterior as a start by its repr, which contains seconds.
        member = {field.name: getattr(self.member, field.name) for field in dataclasses.fields(self.member)}
        member = {"method": self.member.name, **member, "checkpoint": None}
        belongs = fingerprint(problem, self, left_out=("size", "together", "tolerate"), member=member)
        return Checkpoint.of(self.checkpoint, belongs, f"member{index}")

    def _fits(
        self, problems: Mapping[int, Problem], waiting: Sequence[int], progress: Progress
    ) -> Iterator[tuple[int, Outcome | BNNError]]:
        """Each waiting member with its outcome or its error, in the order in which they finish."""
        together: Callable[..., Any] | None = getattr(self.member, "run_together", None)
        keeps = self.checkpoint is not None and hasattr(self.member, "checkpoint")
        size = len(waiting) if self.together is None else self.together
        alone = list(waiting)
        while together is not None and not keeps and size > 1 and len(alone) > 1:
            group, found = alone[:size], None
            # If one fails, fitting each member separately shows which.
            with suppress(*FAILURES):
                found = together([problems[index] for index in group], progress)
            if found is None:
                break
            yield from zip(group, found, strict=True)
            alone = alone[size:]
        for index in alone:
            # A member with checkpoints has its own folder for them.
            own: Any = {"checkpoint": Path(str(self.checkpoint)) / f"within{index}"} if keeps else {}
            titled = _titled(progress, f", member {index + 1} of {self.size}")
            try:
                yield index, replace(self.member, **own).run(problems[index], titled)
            except FAILURES as error:
                yield index, error

    def _joined(self, found: dict[int, Outcome], failed: dict[int, BNNError], seconds: float) -> Outcome:
        outcomes = list(found.values())
        approximations = [outcome.approximation for outcome in outcomes]
        approximation: Approximation = Members(tuple(approximations))
        statistics: dict[str, np.ndarray] = {}
        warnings = [
            f"member {index + 1} of {self.size} failed and is left out: {error}"
            for index, error in failed.items()
        ]
        if all(isinstance(each, Chains) for each in approximations):
            chains: list[Any] = approximations
            lengths = [each.shape[1] for each in chains]
            draws = min(lengths)
            if max(lengths) > draws:
                warnings.append(
                    f"members have from {draws} to {max(lengths)} draws per chain: the first {draws} of each are used"
                )

            def joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
                shared = [name for name in parts[0] if all(name in part for part in parts)]
                return {name: np.concatenate([part[name][:, :draws] for part in parts]) for name in shared}

            approximation = Chains(joined([each.u for each in chains]), groups=len(chains))
            statistics = joined([outcome.statistics for outcome in outcomes])
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
            warnings=(*warnings, *_warnings(found)),
            figures=figures,
            target="; ".join(targets),
        )


def _titled(progress: Progress, suffix: str) -> Any:
    """A progress whose titles name the member."""
    return SimpleNamespace(task=lambda title, total: progress.task(title + suffix, total))


def _histories(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """The loss curves of the members side by side, and their figures."""
    losses = [np.asarray(outcome.history.get("loss", ()), dtype=np.float64) for outcome in outcomes]
    found = {
        f"member_{name}": np.array([outcome.figures[name] for outcome in outcomes])
        for name in outcomes[0].figures
        if all(name in outcome.figures for outcome in outcomes)
    }
    if not all(len(each) for each in losses):
        return found
    return {"member_loss": np.array(list(zip_longest(*losses, fillvalue=np.nan)))} | found


def _warnings(outcomes: Mapping[int, Outcome]) -> list[str]:
    """The warnings of the members without repetition, each with the members that raise it."""
    found: dict[str, list[int]] = {}
    for index, outcome in outcomes.items():
        for text in outcome.warnings:
            found.setdefault(text, []).append(index + 1)
    return [
        f"{'all members' if len(who) == len(outcomes) else 'member ' + ', '.join(map(str, who))}: {text}"
        for text, who in found.items()
    ]


# --- storage of a finished member -----------------------------------------------------------------

_PLAIN = ("warnings", "figures", "target", "compile_seconds", "run_seconds", "gradient_evaluations")


def _stored(outcome: Outcome) -> dict[str, np.ndarray]:
    words = {"class": type(outcome.approximation).__name__}
    words |= {name: getattr(outcome, name) for name in _PLAIN}
    parts = {
        "approximation": outcome.approximation.arrays(),
        "statistics": outcome.statistics,
        "history": outcome.history,
    }
    # "told" is the name of this part in files.
    return {"told": np.frombuffer(json.dumps(words).encode(), dtype=np.uint8).copy()} | {
        f"{part}/{name}": np.asarray(value) for part, each in parts.items() for name, value in each.items()
    }


def _restored(arrays: Mapping[str, np.ndarray]) -> Outcome:
    words: dict[str, Any] = json.loads(arrays["told"].tobytes().decode())
    words["warnings"] = tuple(words["warnings"])
    parts = (unprefixed(arrays, part) for part in ("approximation", "statistics", "history"))
    kept, statistics, history = parts
    approximation = approximation_class(words["class"]).from_arrays(kept)
    return Outcome(approximation, statistics, history, **{name: words[name] for name in _PLAIN})
