"""The base class of samplers: starting points, target, length and results of chains."""

from __future__ import annotations

import dataclasses
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.core.arrays import ravel, site_seed
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError, unknown_name
from ppl_bnn.core.progress import Progress, resolve
from ppl_bnn.core.settings import OneOf, between, is_number, setting, whole
from ppl_bnn.inference import registry
from ppl_bnn.inference.checkpoint import Checkpoint, fingerprint
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.sampling.chains import (
    CHAIN_METHODS,
    PRIOR_ATTEMPTS,
    Kernel,
    Progressed,
    Run,
    Sampled,
    layout,
    run_chains,
    strand_names,
)
from ppl_bnn.inference.sampling.initialisation import Beginning, beginning, beginnings
from ppl_bnn.inference.sampling.stopping import Rule, check_until, watched
from ppl_bnn.inference.sampling.stream import Arrays, Stream
from ppl_bnn.inference.start import Start, missing_sites
from ppl_bnn.posterior.approximation import Approximation, Chains
from ppl_bnn.posterior.posterior import Posterior

# Settings that change the length or the place of chains, but no bit of a draw.
OF_LENGTH = ("draws", "until", "budget")


def latent_names(program: Program) -> list[str]:
    """The names of the sampled sites."""
    return [site.name for site in program.latents]


def not_negative(value: Any) -> str | None:
    """A finite number of at least 0."""
    return None if is_number(value) and 0 <= value < math.inf else "a number >= 0"


def a_start(value: Any) -> str | None:
    """A valid start; whether it fits the model is checked later."""
    if isinstance(value, str | int | float | Sequence | np.ndarray):
        return "None, a method, a posterior, a dict of arrays or a network of torch, Flax or Equinox"
    return None


def a_folder(value: Any) -> str | None:
    """A path, or None."""
    return None if value is None or isinstance(value, str | os.PathLike) else "a folder"


@dataclass(frozen=True)
class Target:
    """The target of a kernel: the posterior to the power 1 / T, over the flat vector (P,) of the sites `names`.

    `approximation` is what `start` is or fitted, if it has a spread. A kernel stores what it takes from it in its
    state.
    """

    problem: Problem
    names: list[str]
    dimension: int
    temperature: float = 1.0
    approximation: Approximation | None = None

    def log_density(self, flat: Any, data: Any, scale: float = 1.0) -> Any:
        """log p(w(u), D) / T + log |dw/du| at u = flat (P,), a scalar.

        `data` is (x, y, values of parameters without a prior); `scale` is N / B if x and y are B of N rows.
        """
        x, y, constants = data
        program = self.problem.program
        u = {**program.unravel(flat, self.names), **constants}
        return tempered_log_joint(program, self.temperature, u, x, y, scale)


@dataclass(frozen=True)
class Started:
    """Flat starting points, one per chain, values of parameters without a prior, and their origin."""

    flat: list[np.ndarray]
    fixed: dict[str, np.ndarray]
    beginning: Beginning


@dataclass(frozen=True)
class Sampler(Method):
    """Base class of samplers: chains in unconstrained coordinates.

    Parameters
    ----------
    draws : int
        Transitions per chain that are kept.
    warmup : int
        Transitions per chain that are not kept.
    chains : int
        Number of independent chains.
    start : method, posterior, dict or None
        Where chains begin. None: a prior draw per chain. A dict has constrained values; other sites are drawn from the
        prior.
    jitter : float
        Standard deviation, in unconstrained coordinates, of the noise added to a chain that would start where an
        earlier one does. Chains that start at one point agree at first whether or not they have converged.
    chain_method : {"auto", "threads", "vectorised", "sequential", "devices"}
        "auto" is "threads" (over the cores) on a CPU and "vectorised" on CUDA. "devices" runs over the devices of JAX.
        All but "vectorised" give the same bits on equal devices.
    temperature : float
        T of the target p(w | D)^(1/T), in the coordinates of the program. 1 is the posterior; below 1 it is "cold".
        `info.target` names a target that is not the posterior.
    checkpoint : str, path or None
        Folder for draws while chains run. An interrupted run resumes from it bit for bit. With more `draws`, a finished
        run continues without a warm-up.
    until : str or None
        Continue until a rule holds in function space, such as "rhat<1.01, ess>400" (also ess_bulk, ess_tail, mcse). It
        is checked after every `draws` draws.
    budget : float or None
        Seconds after which chains stop, compilation and start included. `until` and `budget` change only the length:
        the draws are the first of a longer run. `info.figures` reports "rule_held" and "stopped_by_budget".

    Raises
    ------
    InputError
        Impossible arguments.
    UnsupportedError
        Settings that are not supported; parameters without a prior and without a value.
    DivergenceError
        No finite log density at the starting points, or at a draw.
    BudgetError
        The budget was spent before the first draw.

    Notes
    -----
    Parameters without a prior (`priors.Point`) are not sampled. Their values come from `start` and stay fixed. All
    chains have one target, so if the start has values per chain, those of the first chain are used.
    """

    draws: int = setting(1000, whole())
    warmup: int = 1000
    chains: int = setting(4, whole())
    start: Start = setting(None, a_start, advice="MAP()")  # noqa: RUF009
    jitter: float = setting(0.01, not_negative)
    chain_method: str = "auto"
    temperature: float = setting(1.0, between())
    checkpoint: str | Path | None = setting(None, a_folder, advice="'runs/one'")  # noqa: RUF009
    until: str | None = None
    budget: float | None = None
    systems: ClassVar[tuple[str, ...]] = ("numpyro",)
    fewest_warmup: ClassVar[int] = 1
    finds_centre: ClassVar[bool] = False

    def check(self) -> None:
        wanted = whole(self.fewest_warmup)(self.warmup)
        if wanted is not None:
            raise InputError.of(f"{self.name} warmup", wanted, repr(self.warmup), "warmup=1000")
        self.check_chain_method()
        check_until(self.name, self.until, self.budget)

    def check_chain_method(self) -> None:
        """Refuse an unknown `chain_method`."""
        if OneOf(CHAIN_METHODS)(self.chain_method) is not None:
            raise unknown_name("chain_method", self.chain_method, CHAIN_METHODS)

    # -- what a sampler defines

    @abstractmethod
    def kernel(self, target: Target) -> Kernel:
        """The Markov kernel for a target, in JAX."""

    @property
    def starting_points(self) -> int:
        """Number of starting points, smaller than `chains` if several chains share one (nested R-hat)."""
        return self.chains

    def statistics(self, kept: Arrays) -> Arrays:
        """The (chain, draw) statistics, from the recorded arrays."""
        return {name: value for name, value in kept.items() if name != "u"}

    def summarise(self, statistics: Mapping[str, np.ndarray]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Figures and warnings from the statistics."""
        return {}, ()

    @property
    def aim(self) -> str:
        """The sampled distribution, if it is not the posterior."""
        return tempered(self.temperature)

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float] | None:
        """The fewest, usual and most gradients over all rows per transition; None if unknown."""
        return None

    def gradients_of_a_start(self, size: Size) -> tuple[float, float, float]:
        """The fewest, usual and most gradients before the first transition, for the first step size."""
        return 0.0, 0.0, 100.0

    def effort(self, size: Size) -> Effort | None:
        each = self.gradients_per_draw(size)
        if each is None:
            return None
        transitions = self.chains * (self.warmup + self.draws)
        fewest, usual, largest = (self.chains * start for start in self.gradients_of_a_start(size))
        # A rule may need any number of draws.
        most = math.inf if self.until is not None else each[2] * transitions + largest
        found = Effort(
            each[0] * transitions + fewest, each[1] * transitions + usual, most, parallel=self.chains
        )
        points = self.starting_points if getattr(self.start, "finds_points", False) else 1
        return found.after(effort_of_start(self.start, size, points))

    # -- running

    def check_support(self, problem: Problem) -> None:
        self.refuse_free_parameters(problem)

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        return self.sample(problem, progress)

    def target(self, problem: Problem) -> Target:
        """The target of the chains of a problem, without an approximation."""
        latents = problem.program.latents
        size = sum(site.size for site in latents)
        return Target(problem, latent_names(problem.program), size, float(self.temperature))

    def _plan(self, kernel: Kernel, chains: int, **settings: Any) -> Run:
        # Kernels that use no approximation are the same for all fits of a program.
        left_out = ("start", "jitter", "checkpoint", "chains", "chain_method", *OF_LENGTH)
        known = {name: value for name, value in self.settings().items() if name not in left_out}
        return Run(
            **{"same": repr((self.name, known)), **settings},
            chains=chains,
            warmup=self.warmup,
            draws=self.draws,
            chain_method=self.chain_method,
            title=self.name,
            from_prior=self.start is None,
        )

    def sample(
        self,
        problem: Problem,
        progress: Progress,
        before: Sequence[Progressed] | None = None,
        fixed: Mapping[str, np.ndarray] | None = None,
    ) -> Outcome:
        """Run chains, or continue those of `before`, whose parameters without a prior have the values `fixed`."""
        watch = Stopwatch()
        target = self.target(problem)
        kernel = self.kernel(target)
        streams, kept_fixed = self._streams(problem, kernel)
        started: Started | None = None
        if fixed is None and streams and all(stream.begun for stream in streams):
            fixed = kept_fixed.load()
            if fixed is not None:
                fixed.pop("written")
        if fixed is None:
            started = self.started(problem, progress)
            fixed = started.fixed
            target = dataclasses.replace(target, approximation=started.beginning.approximation)
            kernel = self.kernel(target)
            kept_fixed.keep(lambda: {**fixed, "written": np.array(1)}, last=True)
        constants = {name: problem.system.asarray(value) for name, value in fixed.items()}
        plan = self._plan(
            kernel,
            self.chains,
            rule=None if self.until is None else self._rule(problem, self.until, fixed),
            budget=None if self.budget is None else max(self.budget - watch(), 1e-3),
            streams=streams,
            before=before,
            **({} if target.approximation is None else {"same": None}),
        )
        sampled = run_chains(
            problem,
            kernel,
            plan,
            (problem.x, problem.y, constants),
            lambda: (started or self.started(problem, progress)).flat,
            lambda chain, first: self.candidates(problem, chain, first),
            progress,
        )
        begin = started.beginning if started else None
        return self.outcome(problem, sampled, fixed, watch, kernel.cost, begin)

    def run_together(
        self, problems: Sequence[Problem], progress: Progress
    ) -> list[Outcome | DivergenceError] | None:
        """Run several fits on the same rows, each with its own seed, with all their chains at once.

        Results are those of separate fits. A failed run is represented by its error, and the others are kept. None if
        the settings or the start require separate runs.
        """
        first, count = problems[0], len(problems)
        alone = self.ppl != "numpyro" or self.checkpoint is not None or self.budget is not None
        shared = all(each.x is first.x and each.y is first.y for each in problems)
        if alone or first.program.params or not shared:
            return None
        watch = Stopwatch()
        kernel = self.kernel(self.target(first))
        if kernel.pooled:
            return None
        begun = beginnings(problems, self.start, progress, self.starting_points)
        started = [self._placed(problem, each) for problem, each in zip(problems, begun, strict=True)]
        if any(each.beginning.approximation is not None for each in started):
            return None
        every = [flat for each in started for flat in each.flat]
        sampled = run_chains(
            first,
            kernel,
            self._plan(kernel, self.chains * count, seeds=[problem.seed for problem in problems]),
            (first.x, first.y, {}),
            lambda: every,
            lambda chain, point: self.candidates(problems[chain // self.chains], chain % self.chains, point),
            progress,
        )
        seconds = watch()
        outcomes: list[Outcome | DivergenceError] = []
        size = self.chains * count // len(sampled.strands)
        for index, (problem, each) in enumerate(zip(problems, started, strict=True)):
            mine = slice(index * self.chains, (index + 1) * self.chains)
            # The state of a strand with chains of several runs belongs to none of them.
            whole_strands = self.chains % size == 0
            strands = sampled.strands[mine.start // size : mine.stop // size] if whole_strands else []
            part = Sampled(
                {name: value[mine] for name, value in sampled.kept.items()},
                strands,
                sum(strand.steps for strand in strands) if strands else sampled.steps // count,
                sampled.compile_seconds / count,
            )
            try:
                outcome = self.outcome(problem, part, {}, watch, kernel.cost, each.beginning)
            except DivergenceError as error:
                outcomes.append(error)
                continue
            outcome.run_seconds = seconds / count - outcome.compile_seconds
            outcomes.append(outcome)
        return outcomes

    def _streams(self, problem: Problem, kernel: Kernel) -> tuple[list[Stream], Checkpoint]:
        if self.checkpoint is None:
            return [], Checkpoint.of(None, {}, "start")
        names = strand_names(kernel, layout(kernel, self.chain_method, problem.device), self.chains)
        # Threads and sequential chains give the same bits; vectorised chains do not.
        belongs = fingerprint(problem, self, (*OF_LENGTH, "chain_method")) | {"strands": names}
        streams = [Stream.of(self.checkpoint, belongs, name) for name in names]
        return streams, Checkpoint.of(self.checkpoint, belongs, "start")

    # -- starting

    def refuse_free_parameters(self, problem: Problem) -> None:
        """Raise `UnsupportedError` if a parameter has neither a prior nor a value."""
        program = problem.program
        left_out = list(program.sites) if self.start is None else missing_sites(problem, self.start)
        missing = [site.name for site in program.params if site.name in left_out]
        if missing:
            raise UnsupportedError.of(
                "",
                f"a prior over everything, since {self.name} has no optimiser, or values in start=",
                f"parameters without a prior and without a value: {missing}",
                "start=MAP(), or start={'" + missing[0] + "': array}",
            )

    def started(self, problem: Problem, progress: Progress) -> Started:
        """Flat starting points (P,), one per chain, and the values of parameters, common to all."""
        return self._placed(problem, beginning(problem, self.start, progress, self.starting_points))

    def _placed(self, problem: Problem, begin: Beginning) -> Started:
        fixed = {site.name: np.asarray(begin.points[0][site.name]) for site in problem.program.params}
        names = latent_names(problem.program)
        rng = np.random.default_rng(site_seed(f"{self.name.lower()} jitter", problem.seed))
        flat = [ravel(point, names).astype(float) for point in begin.points]
        spread = []
        for index, point in enumerate(flat):
            repeated = any(np.array_equal(point, earlier) for earlier in flat[:index])
            spread.append(point + self.jitter * rng.standard_normal(point.shape) if repeated else point)
        each = self.chains // self.starting_points
        return Started([point for point in spread for _ in range(each)], fixed, begin)

    def candidates(self, problem: Problem, chain: int, first: np.ndarray) -> Iterator[np.ndarray]:
        """The start of a chain and, if it is a prior draw, further draws in case it is unusable."""
        yield first
        if self.start is not None:
            return
        program, point = problem.program, chain // (self.chains // self.starting_points)
        for attempt in range(1, PRIOR_ATTEMPTS):
            seed = site_seed(f"{self.name.lower()} start {point} {attempt}", problem.seed) % 2**31
            yield ravel(program.prior_draws(problem.x, problem.y, seed, 1), latent_names(program))

    # -- results

    @property
    def _groups(self) -> int | None:
        return None if self.starting_points == self.chains else self.starting_points

    def _rule(
        self, problem: Problem, until: str, fixed: Mapping[str, np.ndarray]
    ) -> Callable[[Arrays], tuple[bool, dict[str, float]]]:
        """The stopping rule as a function of the draws so far."""
        look = watched(problem, Rule.of(until), self._groups)
        return lambda kept: look(self._sites(problem, kept["u"], fixed))

    def _sites(
        self, problem: Problem, flat: np.ndarray, fixed: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """(chain, draw, P) by site, (chain, draw, ...), with the fixed parameters."""
        u = problem.program.unravel(flat, latent_names(problem.program))
        for name, value in fixed.items():
            u[name] = np.broadcast_to(value, (*flat.shape[:2], *np.shape(value))).copy()
        return {name: u[name] for name in problem.program.sites}

    def outcome(
        self,
        problem: Problem,
        sampled: Sampled,
        fixed: Mapping[str, np.ndarray],
        watch: Stopwatch,
        cost: float = 1.0,
        begin: Beginning | None = None,
    ) -> Outcome:
        """The outcome of sampled chains: posterior, statistics, figures and warnings."""
        begin = begin or Beginning([])
        statistics = self.statistics(sampled.kept)
        figures, found = self.summarise(statistics)
        flat, looks = sampled.kept["u"], sampled.looks
        draws = flat.shape[1]
        warnings = [*begin.warnings, *sampled.warnings, *found]
        if draws > 1:
            still = np.flatnonzero((flat == flat[:, :1]).all(axis=(1, 2)))
            warnings += [f"chain {chain} never moved: all its {draws} draws are the same" for chain in still]
        if self.until is not None:
            figures["rule_held"] = float(sampled.stopped == "rule")
        if self.budget is not None:
            figures["stopped_by_budget"] = float(sampled.stopped == "budget")
        if sampled.stopped == "budget":
            unmet = f"until {self.until!r} held" if self.until is not None else f"all {self.draws} were drawn"
            spent = f"the budget of {self.budget:g} s was spent after {draws} draws per chain, before {unmet}"
            warnings.append(spent)
        state = {
            f"strand{index}:leaf{number}": leaf
            for index, strand in enumerate(sampled.strands)
            if strand.done == self.warmup + draws
            for number, leaf in enumerate(strand.leaves)
        }
        compile_seconds = sampled.compile_seconds + begin.compile_seconds
        return Outcome(
            Chains(self._sites(problem, flat, fixed), groups=self._groups, state=state),
            statistics=statistics,
            history={
                f"look_{name}": np.array([look[name] for look in looks])
                for name in (looks[0] if looks else ())
            },
            compile_seconds=compile_seconds,
            run_seconds=watch() - compile_seconds,
            gradient_evaluations=sampled.steps * cost + begin.gradients,
            warnings=tuple(warnings),
            figures=figures,
            target=self.aim,
        )


def tempered_log_joint(
    program: Program, temperature: float, u: Mapping[str, Any], x: Any, y: Any, scale: float = 1.0
) -> Any:
    """log p(w(u), D) / T + log |dw/du|, a scalar; `scale` is N / B for B of N rows.

    The power applies to the density of w only: a tempered volume would make the target depend on the coordinates.
    """
    if temperature == 1.0:
        return program.log_joint(u, x, y, scale)
    joint = program.log_joint(u, x, y, scale, jacobian=False)
    return joint / temperature + (program.log_joint(u, x, y, scale) - joint)


def tempered(temperature: float) -> str:
    """The name of the target at a temperature, empty for the posterior."""
    return "" if temperature == 1.0 else f"tempered: the posterior to the power 1/T with T={temperature:g}"


def extend(posterior: Posterior, draws: int, *, progress: bool | Progress | None = None) -> Posterior:
    """Add draws to every chain, from where the chains stopped and without a warm-up.

    The result has the bits of a run of that length. Saved and loaded posteriors can be extended too. Seconds and
    gradient evaluations are those of both runs.

    Parameters
    ----------
    posterior : Posterior
        A posterior of chains.
    draws : int
        Additional draws per chain.
    progress : bool, Progress or None
        Whether, or how, to show progress.

    Returns
    -------
    Posterior
        The extended posterior.

    Raises
    ------
    UnsupportedError
        The posterior is not one of chains, or its sampler cannot continue (Pyro's; stacked chains).
    """
    wanted = whole()(draws)
    if wanted is not None:
        raise InputError.of("extend draws", wanted, repr(draws), "draws=500")
    approximation = posterior.approximation
    method = _method_of(posterior)
    if not isinstance(approximation, Chains) or not approximation.state:
        got = f"{posterior.info.method} in {posterior.info.ppl}, which kept no state"
        advice = "NUTS() in NumPyro, or checkpoint= and a longer fit"
        raise UnsupportedError.of("extend", "chains with a stored state", got, advice)
    if posterior.weights is not None:
        advice = "extending them first, bnn.stack after"
        raise UnsupportedError.of("extend", "chains of equal weight", "stacked chains", advice)
    longer = dataclasses.replace(method, draws=posterior.shape[1] + draws)

    def continued(problem: Problem) -> Outcome:
        names = latent_names(problem.program)
        chains, before = posterior.shape
        u = ravel(approximation.u, names, lead=2)
        kept = {"u": u} | posterior.statistics
        size = chains // len({key.partition(":")[0] for key in approximation.state})

        def strand(index: int) -> Progressed:
            mine = [key for key in approximation.state if key.startswith(f"strand{index}:")]
            leaves = [approximation.state[f"strand{index}:leaf{number}"] for number in range(len(mine))]
            part = {name: value[index * size : (index + 1) * size] for name, value in kept.items()}
            return Progressed(leaves, longer.warmup + before, 0, part)

        strands = [strand(index) for index in range(chains // size)]
        fixed = {site.name: approximation.u[site.name][0, 0] for site in problem.program.params}
        return longer.sample(problem, resolve(progress), strands, fixed)

    outcome = posterior.with_problem(continued)
    info = posterior.info
    return dataclasses.replace(
        posterior,
        approximation=outcome.approximation,
        statistics=outcome.statistics,
        info=dataclasses.replace(
            info,
            compile_seconds=info.compile_seconds + outcome.compile_seconds,
            run_seconds=info.run_seconds + outcome.run_seconds,
            gradient_evaluations=(info.gradient_evaluations or 0.0) + (outcome.gradient_evaluations or 0.0),
            settings={**info.settings, "draws": longer.draws},
            warnings=outcome.warnings,
            figures=outcome.figures,
        ),
    )


def _method_of(posterior: Posterior) -> Sampler:
    """The sampler of a posterior, from its settings, without its start."""
    name = posterior.info.method
    found = registry.method_class(name) if name in registry.MODULES else None
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise UnsupportedError.of("extend", "a posterior of one sampler", posterior.info.method, "NUTS()")
    settings = posterior.info.settings
    left_out = ("start", "checkpoint", "until", "budget")
    known = {f.name: settings[f.name] for f in dataclasses.fields(found) if f.name in settings}
    return found(**{name: value for name, value in known.items() if name not in left_out})
