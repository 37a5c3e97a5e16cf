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
from ppl_bnn.core.progress import Progress, Step, ended_by_callback, resolve
from ppl_bnn.core.settings import OneOf, between, is_number, optional, setting, whole
from ppl_bnn.inference import registry
from ppl_bnn.inference.checkpoint import Checkpoint, fingerprint
from ppl_bnn.inference.cost import Effort, Size, effort_of_start
from ppl_bnn.inference.flat_vector import flat_latents, latent_names
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.sampling.chains import CHAIN_METHODS, OF_LENGTH, Engine, Kernel, Sampled
from ppl_bnn.inference.sampling.initialisation import PRIOR_ATTEMPTS, Beginning, beginnings
from ppl_bnn.inference.sampling.stopping import check_until, ending
from ppl_bnn.inference.sampling.stream import Arrays, Stream
from ppl_bnn.inference.sampling.whitening import LARGEST, ROUNDS, round_cost
from ppl_bnn.inference.start import Start, missing_sites
from ppl_bnn.posterior.approximation import Approximation, Chains
from ppl_bnn.posterior.posterior import Posterior


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
    """The target of a kernel: the posterior to the power 1 / T, over the flat vector (P,) of the latent sites.

    `approximation` is what `start` is or fitted, if it has a spread. A kernel stores what it takes from it in its
    state.
    """

    problem: Problem
    temperature: float = 1.0
    approximation: Approximation | None = None

    @property
    def dimension(self) -> int:
        """P."""
        return sum(site.size for site in self.problem.program.latents)

    def log_density(self, flat: Any, data: Any, scale: float = 1.0) -> Any:
        """log p(w(u), D) / T + log |dw/du| at u = flat (P,), a scalar.

        `data` is (x, y, values of parameters without a prior); `scale` is N / B if x and y are B of N rows.
        """
        x, y, constants = data
        program = self.problem.program
        u = {**program.unravel(flat, latent_names(self.problem)), **constants}
        return tempered_log_joint(program, self.temperature, u, x, y, scale)


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
    warmup: int = setting(1000, whole())
    chains: int = setting(4, whole())
    start: Start = setting(None, a_start, advice="MAP()")
    jitter: float = setting(0.01, not_negative)
    chain_method: str = "auto"
    temperature: float = setting(1.0, between())
    checkpoint: str | Path | None = setting(None, a_folder, advice="'runs/one'")
    until: str | None = None
    budget: float | None = setting(None, optional(between()), advice="600 (seconds)")
    systems: ClassVar[tuple[str, ...]] = ("numpyro",)
    # Statistics whose means are figures.
    averaged: ClassVar[tuple[str, ...]] = ()
    finds_centre: ClassVar[bool] = False

    def check(self) -> None:
        if OneOf(self.chain_methods)(self.chain_method) is not None:
            raise unknown_name("chain_method", self.chain_method, self.chain_methods)
        check_until(self.name, self.until, self.budget)

    @property
    def chain_methods(self) -> tuple[str, ...]:
        """The values of `chain_method` in the system of the fit."""
        return CHAIN_METHODS

    # -- what a sampler defines

    @abstractmethod
    def kernel(self, target: Target) -> Kernel:
        """The Markov kernel for a target, in JAX."""

    @property
    def starting_points(self) -> int:
        """Number of starting points, smaller than `chains` if several chains share one (nested R-hat)."""
        return self.chains

    @property
    def whitens(self) -> bool:
        """Whether chains move in coordinates of equal curvature (see `whitening`)."""
        return False

    def statistics(self, kept: Arrays) -> Arrays:
        """The (chain, draw) statistics, from the recorded arrays."""
        return {name: value for name, value in kept.items() if name != "u"}

    def summarise(self, statistics: Mapping[str, np.ndarray]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Figures and warnings from the statistics."""
        figures = {name: float(np.mean(statistics[name])) for name in self.averaged if name in statistics}
        return figures, tuple(self.noticed(statistics, figures))

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        """Warnings about the statistics and figures."""
        yield from ()

    @property
    def aim(self) -> str:
        """The sampled distribution, if it is not the posterior."""
        return tempered(self.temperature)

    def gradients_per_draw(self, size: Size) -> tuple[float, float, float] | None:
        """The fewest, usual and most gradients over all rows per transition; None if unknown."""
        return None

    def gradients_of_a_start(self, size: Size) -> tuple[float, float, float]:
        """The fewest, usual and most gradients before the first transition: for the first step size, and of rounds in
        which the start is moved in.
        """
        each = float(round_cost(size.parameters)) if self.whitens and size.parameters <= LARGEST else 0.0
        return each, 3.0 * each, 100.0 + ROUNDS * each

    def effort(self, size: Size) -> Effort | None:
        each = self.gradients_per_draw(size)
        if each is None:
            return None
        transitions, starts = self.warmup + self.draws, self.gradients_of_a_start(size)
        fewest, usual, most = (
            self.chains * (one * transitions + start) for one, start in zip(each, starts, strict=True)
        )
        # A rule may need any number of draws.
        found = Effort(fewest, usual, most if self.until is None else math.inf, parallel=self.chains)
        points = self.starting_points if getattr(self.start, "finds_points", False) else 1
        return found.after(effort_of_start(self.start, size, points))

    # -- running

    def run(self, problem: Problem, progress: Progress, begin: Beginning | None = None) -> Outcome:
        """Run chains, or continue those of an earlier run, from `begin`."""
        watch = Stopwatch()
        target = Target(problem, float(self.temperature))
        kernel = self.kernel(target)
        streams, values = self._streams(problem, kernel)
        resumes = begin is None and streams and all(stream.begun for stream in streams)
        kept = values.load() if resumes else None
        if kept is not None:
            begin = Beginning(fixed={name: value for name, value in kept.items() if name != "written"})
        if begin is None:
            (begin,) = self.started([problem], progress)
            kernel = self.kernel(dataclasses.replace(target, approximation=begin.approximation))
            written = {**begin.fixed, "written": np.array(1)}
            values.keep(lambda: written, last=True)
        (sampled,) = Engine(self, kernel, [(problem, begin)], progress, watch, streams).run()
        return self.outcome(sampled, watch())

    def run_together(
        self, problems: Sequence[Problem], progress: Progress
    ) -> list[Outcome | DivergenceError] | None:
        """Run several fits on the same rows, each with its own seed, with all their chains at once.

        Results are those of separate fits. A failed run is represented by its error, and the others are kept. None if
        the settings or the start require separate runs.
        """
        first = problems[0]
        alone = self.ppl != "numpyro" or self.checkpoint is not None or self.budget is not None
        shared = all(each.x is first.x and each.y is first.y for each in problems)
        if alone or first.program.params or not shared:
            return None
        watch = Stopwatch()
        kernel = self.kernel(Target(first, float(self.temperature)))
        if kernel.pooled:
            return None
        found = self.started(problems, progress)
        if any(begin.approximation is not None for begin in found):
            return None
        parts = Engine(self, kernel, list(zip(problems, found, strict=True)), progress, watch).run()
        seconds = watch() / len(problems)
        outcomes: list[Outcome | DivergenceError] = []
        for sampled in parts:
            try:
                outcomes.append(self.outcome(sampled, seconds))
            except DivergenceError as error:
                outcomes.append(error)
        return outcomes

    def _streams(self, problem: Problem, kernel: Kernel) -> tuple[list[Stream], Checkpoint]:
        if self.checkpoint is None:
            return [], Checkpoint.of(None, {}, "start")
        vectorised = kernel.layout(self.chain_method, problem.device) == "vectorised"
        names = ["chains"] if vectorised else [f"chain-{index}" for index in range(self.chains)]
        # Threads and sequential chains give the same bits; vectorised chains do not.
        belongs = fingerprint(problem, self, (*OF_LENGTH, "chain_method")) | {"strands": names}
        streams = [Stream.of(self.checkpoint, belongs, name) for name in names]
        return streams, Checkpoint.of(self.checkpoint, belongs, "start")

    # -- starting

    def check_support(self, problem: Problem) -> None:
        """Raise `UnsupportedError` if a parameter has neither a prior nor a value."""
        program = problem.program
        left_out = list(program.sites) if self.start is None else missing_sites(problem, self.start)
        missing = [site.name for site in program.params if site.name in left_out]
        if missing:
            wanted = f"a prior over everything, since {self.name} has no optimiser, or values in start="
            got = f"parameters without a prior and without a value: {missing}"
            raise UnsupportedError.of("", wanted, got, f"start=MAP(), or start={{'{missing[0]}': array}}")

    def started(self, problems: Sequence[Problem], progress: Progress) -> list[Beginning]:
        """For each problem the beginning of its chains, with the flat starting point of each."""
        found = beginnings(problems, self.start, progress, self.starting_points)
        return [self._placed(problem, begin) for problem, begin in zip(problems, found, strict=True)]

    def _placed(self, problem: Problem, begin: Beginning) -> Beginning:
        """Points that occur again are moved apart, and the chains of a superchain get the same point."""
        fixed = {site.name: np.asarray(begin.points[0][site.name]) for site in problem.program.params}
        rng = np.random.default_rng(site_seed(f"{self.name.lower()} jitter", problem.seed))
        points = [flat_latents(problem, point) for point in begin.points]
        flat: list[np.ndarray] = []
        for index, point in enumerate(points):
            if any(np.array_equal(point, earlier) for earlier in points[:index]):
                point = point + self.jitter * rng.standard_normal(point.shape)
            flat += [point] * (self.chains // self.starting_points)
        return dataclasses.replace(begin, flat=flat, fixed=fixed)

    def candidates(self, problem: Problem, chain: int, first: np.ndarray) -> Iterator[np.ndarray]:
        """The start of a chain and, if it is a prior draw, further draws in case it is unusable."""
        yield first
        if self.start is not None:
            return
        program, point = problem.program, chain // (self.chains // self.starting_points)
        for attempt in range(1, PRIOR_ATTEMPTS):
            seed = site_seed(f"{self.name.lower()} start {point} {attempt}", problem.seed) % 2**31
            yield flat_latents(problem, program.prior_draws(problem.x, problem.y, seed, 1))

    # -- results

    @property
    def groups(self) -> int | None:
        """Number of groups of chains that share a starting point, if they do."""
        return None if self.starting_points == self.chains else self.starting_points

    def sites(self, problem: Problem, flat: np.ndarray, fixed: Arrays) -> Arrays:
        """(chain, draw, P) by site, (chain, draw, ...), with the fixed parameters."""
        u = problem.program.unravel(flat, latent_names(problem))
        for name, value in fixed.items():
            u[name] = np.broadcast_to(value, (*flat.shape[:2], *np.shape(value))).copy()
        return {name: u[name] for name in problem.program.sites}

    def outcome(self, sampled: Sampled, seconds: float) -> Outcome:
        """The outcome of chains that were sampled in so many seconds: posterior, statistics, figures and warnings."""
        begin = sampled.begin
        statistics = self.statistics(sampled.kept)
        figures, found = self.summarise(statistics)
        flat = sampled.kept["u"]
        draws = flat.shape[1]
        warnings = [*begin.warnings, *sampled.warnings, *found]
        if draws > 1:
            still = np.flatnonzero((flat == flat[:, :1]).all(axis=(1, 2)))
            warnings += [f"chain {chain} never moved: all its {draws} draws are the same" for chain in still]
        after, wanted = f"{draws} draws per chain", f"all {self.draws} were drawn"
        ended, history, spent = ending(self, sampled.stopped, sampled.looks, after, wanted)
        state = {
            f"strand{index}:{name}": leaf
            for index, strand in enumerate(sampled.strands)
            if strand.done == self.warmup + draws
            for name, leaf in strand.stored().items()
            if name != "done_steps"
        }
        compile_seconds = sampled.compile_seconds + begin.compile_seconds
        return Outcome(
            Chains(self.sites(sampled.problem, flat, begin.fixed), groups=self.groups, state=state),
            statistics=statistics,
            history=history,
            compile_seconds=compile_seconds,
            run_seconds=seconds - compile_seconds,
            gradient_evaluations=sampled.gradients + begin.gradients,
            warnings=(*warnings, *spent),
            figures=figures | ended,
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


def diverged(statistics: Mapping[str, np.ndarray], smaller_steps: str) -> Iterator[str]:
    """The warning about transitions that diverged, if any; `smaller_steps` is the setting to try."""
    diverging = np.asarray(statistics["diverging"])
    if diverging.any():
        found = f"{int(diverging.sum())} of {diverging.size} transitions diverged"
        advice = f"try {smaller_steps} or a prior with lighter tails"
        yield f"{found}, so regions of high curvature may be missed: {advice}"


def tempered(temperature: float) -> str:
    """The name of the target at a temperature, empty for the posterior."""
    return "" if temperature == 1.0 else f"tempered: the posterior to the power 1/T with T={temperature:g}"


def extend(
    posterior: Posterior,
    draws: int,
    *,
    progress: bool | Progress | None = None,
    callback: Callable[[Step], bool | None] | None = None,
) -> Posterior:
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
    callback : callable or None
        As for `Method.fit`; returning True ends the extension.

    Returns
    -------
    Posterior
        The extended posterior.

    Raises
    ------
    UnsupportedError
        The posterior is not one of chains, or its sampler cannot continue (Pyro's; stacked chains).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.NUTS(draws=10, warmup=20, chains=2)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> bnn.extend(posterior, 5).shape  # chains, draws
    (2, 15)
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
    equal, advice = posterior.weights is None, "extending them first, bnn.stack after"
    UnsupportedError.check(equal, "extend", "chains of equal weight", "stacked chains", advice)
    shown = resolve(progress, callback)
    longer = dataclasses.replace(method, draws=posterior.shape[1] + draws)

    def continued(problem: Problem) -> Outcome:
        chains, before = posterior.shape
        u = ravel(approximation.u, latent_names(problem), lead=2)
        kept = {"u": u} | posterior.statistics
        states: dict[str, Arrays] = {}
        for key, leaf in approximation.state.items():
            strand, _, name = key.partition(":")
            done_steps = np.array([longer.warmup + before, 0])
            states.setdefault(strand, {"done_steps": done_steps})[name] = leaf
        size, strands = chains // len(states), []
        for index in range(len(states)):
            part = {name: value[index * size : (index + 1) * size] for name, value in kept.items()}
            strands.append((states[f"strand{index}"], part))
        fixed = {site.name: approximation.u[site.name][0, 0] for site in problem.program.params}
        return longer.run(problem, shown, Beginning(fixed=fixed, before=strands))

    outcome = posterior.with_problem(continued)
    info = posterior.info
    both = {
        name: (getattr(info, name) or 0.0) + (getattr(outcome, name) or 0.0)
        for name in ("compile_seconds", "run_seconds", "gradient_evaluations")
    }
    settings = {**info.settings, "draws": longer.draws}
    info = dataclasses.replace(
        info,
        **both,
        settings=settings,
        warnings=(*ended_by_callback(shown), *outcome.warnings),
        figures=outcome.figures,
    )
    return dataclasses.replace(
        posterior, approximation=outcome.approximation, statistics=outcome.statistics, info=info
    )


def _method_of(posterior: Posterior) -> Sampler:
    """The sampler of a posterior, from its settings, without its start."""
    name = posterior.info.method
    found = registry.method_class(name) if name in registry.MODULES else None
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise UnsupportedError.of("extend", "a posterior of one sampler", posterior.info.method, "NUTS()")
    settings = posterior.info.settings
    names = settings.keys() - {"start", "checkpoint", "until", "budget"}
    return found(**{f.name: settings[f.name] for f in dataclasses.fields(found) if f.name in names})
