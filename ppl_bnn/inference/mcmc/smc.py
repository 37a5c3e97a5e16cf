"""Tempered sequential Monte Carlo: particles that move from the prior to the posterior, with an evidence estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ppl_bnn.backends.many_draws import CACHE, DENSITY_MEMORY
from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import BudgetError, DivergenceError, UnsupportedError
from ppl_bnn.core.progress import Progress, Task, ended_early
from ppl_bnn.core.settings import between, optional, setting, whole
from ppl_bnn.inference.checkpoint import Checkpoint, fingerprint
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.method import Method, Outcome, Stopwatch
from ppl_bnn.inference.optimisation.loops import refuse_free_parameters
from ppl_bnn.inference.sampling.sampler import a_folder, tempered
from ppl_bnn.inference.sampling.stopping import FIGURES, Rule, Watch, check_until, ending
from ppl_bnn.posterior.approximation import Chains

FIRST_STEP_SIZE = 0.5
# Gain of the step-size adaptation, per transition, in nats.
GAIN = 1.5
# The most transitions per temperature that search for a step size with at least half of the target acceptance.
SEARCHES = 40
# Regularisation of the particles' variances, as in Stan's warm-up: this many observations of this variance.
PRIOR_COUNT, PRIOR_VARIANCE = 5.0, 1e-3
# Standard deviation between runs, in nats, above which their mean is a poor estimate of the evidence.
SPREAD_LIMIT = 1.0
# What is recorded at each temperature.
RECORD = ("inverse_temperature", "acceptance", "step_size", "ess", "log_normaliser")
WIDER = "wider noise, narrower priors, or standardised inputs and targets"


@dataclass(frozen=True)
class SMC(Method):
    """Adaptive tempered sequential Monte Carlo, from the prior to the posterior, with an estimate of the evidence.

    N particles, draws from the prior in unconstrained coordinates u, pass through the densities

        p_l(u) proportional to p(w(u)) |dw/du| p(D | w(u))^l,    0 = l_0 < l_1 < ... < 1.

    The next l' is the largest for which the weights v = p(D | w)^(l' - l) have the effective number (sum v)^2 / sum v^2
    of at least `target_ess` of the particles. Particles are resampled by these weights (systematically) and moved by
    `moves` transitions of Hamiltonian Monte Carlo that leave p_l' invariant. The product over temperatures of the mean
    weights estimates p(D).

    Use it for the evidence, and for posteriors with several modes: particles need not cross between modes, because they
    spread over the basins before these separate. The cost in gradients is about the product of particles, temperatures,
    moves and steps.

    Parameters
    ----------
    particles : int
        N.
    runs : int
        Independent repetitions.
    moves : int
        Transitions of Hamiltonian Monte Carlo at each temperature.
    target_ess : float
        Relative effective number of the weights that sets the next temperature.
    target_accept : float
        Target of the acceptance, averaged over all particles.
    max_leapfrog : int
        The most leapfrog steps of one transition.
    temperature : float
        T of the target p(w | D)^(1/T), in the coordinates of the program. The path then leads to
        (p(w) p(D | w))^(1/T) |dw/du|, and the estimate of its weights is not an evidence.
    checkpoint : str, path or None
        Folder that stores each run after each temperature. An interrupted fit resumes from it bit for bit, and more
        `runs` reuse the earlier ones.
    until : str or None
        After the first `runs`, make one run more at a time until this rule holds, such as "ess>5000" or
        "log_evidence_se<0.1" (also ess_bulk, ess_tail, mcse; of a tempered target "log_normaliser_se"). "rhat" is
        refused: it compares runs, and does not fall with more of them.
    budget : float or None
        Seconds, compilation included, after which the fit stops. An interrupted run is left out; a checkpoint keeps it.
        `until` and `budget` change the number of runs only.
    ppl, dtype, compile : str, str, bool
        As for `Method`.

    Raises
    ------
    DivergenceError
        No draw from the prior has a likelihood; a density is NaN or infinite; particles cannot be moved.
    UnsupportedError
        A parameter without a prior; R-hat in a rule.
    BudgetError
        The budget was spent before the end of the first run.

    Notes
    -----
    The mass matrix is the diagonal of the weighted variances. In its coordinates a trajectory has a length uniform on
    (0, pi), drawn per transition and common to all particles. The step size is adapted towards `target_accept` after
    each transition; transitions below half of it do not count as moves. Because of the adaptation the estimate of p(D)
    has a bias of order 1/N (Beskos, Jasra, Kantas and Thiery 2016), which no standard error over runs shows.

    The posterior is one of chains: a run is a chain, and its particles at l = 1 are the draws, in random order. R-hat
    compares runs, and detects modes with different weights. Effective sample sizes within a run are too large, because
    particles with common ancestors count as independent, more so with fewer `moves`.

    `info.figures`:

    - "log_evidence", the log of the mean over runs of the estimates of p(D), and with two runs or more its
      "log_evidence_se" (of a tempered target "log_normaliser" and "log_normaliser_se");
    - "temperatures", the most in a run, and "acceptance", the lowest at any temperature;
    - "ancestors", the fewest prior draws from which the particles of a run descend;
    - "final_correlation", the largest correlation over runs and coordinates of particles before and after the last
      moves, which several modes keep near 1;
    - with a rule or a budget "rule_held" and "stopped_by_budget".

    Statistics: "lp". History, one entry per temperature: "run", "inverse_temperature" (l), "acceptance", "step_size",
    "ess" (relative) and "log_normaliser" (so far); also "look_runs" and the figures at each evaluation of the rule.

    BlackJAX provides the transition. Its own tempered SMC moves particles before it weights them and ends on weights.

    References
    ----------
    - Del Moral, Doucet and Jasra (2006), "Sequential Monte Carlo samplers".
    - Beskos, Jasra, Kantas and Thiery (2016), "On the convergence of adaptive sequential Monte Carlo methods".

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> method = bnn.SMC(particles=50, runs=2, moves=1)
    >>> posterior = bnn.fit(model, table.x, table.y, method, standardise=True)
    >>> posterior.shape, bool(posterior.log_evidence < 0.0)
    ((2, 50), True)
    """

    particles: int = setting(1000, whole(4))
    runs: int = setting(4, whole())
    moves: int = setting(5, whole())
    target_ess: float = setting(0.5, between(0, 1))
    target_accept: float = setting(0.8, between(0, 1))
    max_leapfrog: int = setting(32, whole())
    temperature: float = setting(1.0, between())
    checkpoint: str | Path | None = setting(None, a_folder, advice="'runs/one'")
    until: str | None = None
    budget: float | None = setting(None, optional(between()), advice="600 (seconds)")
    systems: ClassVar[tuple[str, ...]] = ("numpyro",)
    # Particles start from the prior.
    start: ClassVar[None] = None
    finds_centre: ClassVar[bool] = False
    limitations: ClassVar[str] = (
        "Nothing, as particles grow many; in many dimensions it needs many temperatures and moves, and too few of "
        "either leave too little spread."
    )

    def check(self) -> None:
        rule = self._rule()
        if rule is not None and any(name == "rhat" for name, _, _ in rule.terms):
            got = "rhat, which compares runs and stays where they disagree however many there are"
            other = f"until='{self._estimate}_se<0.1' or until='ess>5000'"
            advice = f"more particles against disagreement, and {other}"
            wanted = "a figure that more runs make better"
            raise UnsupportedError.of(f"{self.name} until", wanted, got, advice)

    def _rule(self) -> Rule | None:
        return check_until(self.name, self.until, self.budget, (*FIGURES, f"{self._estimate}_se"))

    @property
    def _estimate(self) -> str:
        """The name of the quantity that the product of the mean weights estimates."""
        return "log_evidence" if self.temperature == 1.0 else "log_normaliser"

    def effort(self, size: Size) -> Effort:
        swarm = float(self.runs * self.particles)
        most = swarm * 1000.0 * (1 + (self.moves + SEARCHES) * self.max_leapfrog)
        # About twenty temperatures, with `moves` transitions of a dozen steps at each.
        usual = swarm * 20.0 * (1.0 + self.moves * min(12.0, self.max_leapfrog))
        most = math.inf if self.until is not None else most
        return Effort(swarm * (1.0 + self.moves), usual, most, together=self.particles)

    def check_support(self, problem: Problem) -> None:
        refuse_free_parameters(self.name, problem)

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        settings = {} if self.checkpoint is None else fingerprint(problem, self, ("runs", "until", "budget"))

        def checkpoint_of(index: int) -> Checkpoint:
            return Checkpoint.of(self.checkpoint, settings, f"run{index}")

        # Refuse a checkpoint of another fit before anything is compiled.
        checkpoint_of(0).load()
        rule = self._rule()
        look = None if rule is None else Watch(problem, rule)
        ended: list[_Particles] = []
        looks: list[dict[str, float]] = []
        stopped = "runs"
        # A dry run ends at its first task, so nothing is compiled before.
        with closing(progress.task(self.name, 100 * self.runs)) as task:
            compiling = Stopwatch()
            swarm = _Swarm(self, problem)
            compile_seconds = compiling()
            while len(ended) < self.runs or look is not None:
                path, asked = self._pass(swarm, len(ended), checkpoint_of(len(ended)), task, watch)
                if path.inverse_temperature < 1.0:
                    stopped = "callback" if asked else "budget"
                    break
                ended.append(path)
                if asked:
                    stopped = "callback"
                    break
                if look is None or len(ended) < self.runs:
                    continue
                error = f"{self._estimate}_se"
                # A single run has no standard error.
                others = {error: self._figures(ended).get(error, math.nan)}
                holds, figures = look(_unravelled(problem, ended), **others)
                looks.append({"runs": float(len(ended)), **figures})
                if holds:
                    stopped = "rule"
                    break
        if not ended:
            if stopped == "callback":
                raise ended_early(self.name, "a part of the first", "a run")
            got = f"{self.budget:g} s, spent before its end"
            advice = "a longer budget (with checkpoint= nothing is lost), or fewer particles"
            raise BudgetError.of("budget", "seconds enough for one run", got, advice)
        u = _unravelled(problem, ended)
        figures, looked, spent = ending(
            self, stopped, looks, f"{len(ended)} runs", f"all {self.runs} were made"
        )
        records = np.concatenate([path.told for path in ended])
        return Outcome(
            Chains({name: np.ascontiguousarray(u[name]) for name in problem.program.sites}),
            statistics={"lp": np.stack([path.prior + path.change for path in ended])},
            history={"run": np.repeat(np.arange(len(ended)), [len(path.told) for path in ended])}
            | dict(zip(RECORD, records.T.copy(), strict=True))
            | looked,
            compile_seconds=compile_seconds,
            run_seconds=watch() - compile_seconds,
            gradient_evaluations=float(sum(path.gradients for path in ended)),
            warnings=(*self._warnings(ended), *spent),
            figures=self._figures(ended) | figures,
            target=tempered(self.temperature),
        )

    def _figures(self, ended: Sequence[_Particles]) -> dict[str, float]:
        each = np.array([path.log_normaliser for path in ended])
        name, runs = self._estimate, len(ended)
        figures = {name: float(np.logaddexp.reduce(each) - math.log(runs))}
        if runs > 1:
            figures[f"{name}_se"] = float(each.std(ddof=1) / math.sqrt(runs))
        acceptance = RECORD.index("acceptance")
        return figures | {
            "temperatures": float(max(len(path.told) for path in ended)),
            "acceptance": float(min(path.told[:, acceptance].min() for path in ended)),
            "ancestors": float(min(len(np.unique(path.ancestors)) for path in ended)),
            "final_correlation": float(max(path.correlation for path in ended)),
        }

    def _warnings(self, ended: Sequence[_Particles]) -> Iterator[str]:
        unsupported = max(path.unsupported for path in ended)
        if unsupported:
            yield (
                f"{self.name}: the likelihood is zero at {unsupported:.1%} of the draws from the prior of a run, which "
                "carry no weight: try more particles, or a prior within its support"
            )
        spread = np.std([path.log_normaliser for path in ended], ddof=1) if len(ended) > 1 else 0.0
        if spread > SPREAD_LIMIT:
            yield (
                f"{self.name}: the runs differ in log p(D) by a standard deviation of {spread:.2g} nats, so that they "
                "do not agree on the evidence, nor on the weights of modes: try "
                f"particles={4 * self.particles} or moves={2 * self.moves}"
            )

    # -- one run

    def _pass(
        self, swarm: _Swarm, index: int, checkpoint: Checkpoint, task: Task, watch: Stopwatch
    ) -> tuple[_Particles, bool]:
        """Advance the particles of a run to the end, or until the budget is spent or a callback ends it.

        What is done is always stored. Returns the particles, and whether a callback asked for the end.
        """
        asked = False
        seed, before = site_seed(f"smc run {index}", swarm.seed), checkpoint.load()
        path = self._beginning(swarm, seed) if before is None else _Particles.from_arrays(before)
        try:
            while (
                path.inverse_temperature < 1.0
                and not asked
                and (self.budget is None or watch() < self.budget)
            ):
                path = self._next(swarm, path, seed)
                checkpoint.keep(path.arrays)
                latest = dict(zip(RECORD, path.told[-1], strict=True))
                shown = {name: latest[name] for name in ("inverse_temperature", "acceptance", "ess")}
                asked = bool(
                    task.update(100 * index + int(100 * path.inverse_temperature), run=index + 1, **shown)
                )
        finally:
            checkpoint.keep(path.arrays, last=True)
        asked = bool(task.update(100 * index + int(100 * path.inverse_temperature))) or asked
        return path, asked

    def _beginning(self, swarm: _Swarm, seed: int) -> _Particles:
        particles = np.asarray(swarm.drawn((swarm.keys(seed),)), np.float64)
        prior, change = swarm.measure(particles)
        _check_defined(np.isfinite(prior) & (np.isfinite(change) | (change == -np.inf)), "from the prior")
        count = len(prior)
        supported = int(np.count_nonzero(np.isfinite(change)))
        wanted, got = "a likelihood with support at some draw from the prior", f"zero at all {count} of them"
        DivergenceError.check(supported, self.name, wanted, f"a likelihood of {got}", WIDER)
        return _Particles(particles, prior, change, np.arange(count), unsupported=1.0 - supported / count)

    def _next(self, swarm: _Swarm, path: _Particles, seed: int) -> _Particles:
        """Advance by one temperature. All randomness follows from the run's seed and the number of the temperature."""
        stage, count = len(path.told), len(path.prior)
        rng = np.random.default_rng([seed, stage])
        rise = increment(path.change, self.target_ess, 1.0 - path.inverse_temperature)
        at = path.inverse_temperature + rise
        got = f"log likelihoods of the particles from {path.change.min():.3g} to {path.change.max():.3g}"
        rises = at > path.inverse_temperature
        DivergenceError.check(rises, self.name, "a likelihood that can be tempered", got, WIDER)
        if rise == 1.0 - path.inverse_temperature:
            at = 1.0
        log_weights = rise * path.change
        total = float(np.logaddexp.reduce(log_weights))
        weights = np.exp(log_weights - total)
        variances = weights @ (path.particles - weights @ path.particles) ** 2
        variances = (count * variances + PRIOR_COUNT * PRIOR_VARIANCE) / (count + PRIOR_COUNT)
        chosen = systematic(weights, rng.uniform())
        before = path.particles[chosen]
        state, step_size = swarm.begin(before, at), path.step_size
        rates: list[float] = []
        done, gradients = 0, count
        while len(rates) < self.moves:
            steps = int(np.clip(math.ceil(rng.uniform(0.0, math.pi) / step_size), 1, self.max_leapfrog))
            keys = swarm.keys(seed, stage, done)
            state, accepted = swarm.moved((keys, *state), at, step_size, variances, np.int32(steps))
            rate = float(accepted.mean())
            gradients += steps * count
            searches = done - len(rates)
            if rate >= 0.5 * self.target_accept or searches >= SEARCHES:
                rates.append(rate)
            done += 1
            step_size *= math.exp(GAIN * (rate - self.target_accept))
        got = f"an acceptance of {max(rates):.2g} with steps of {step_size:.2g} standard deviations"
        advice = "a model whose log joint has a finite gradient, or standardised inputs and targets"
        wanted = f"particles that move at the inverse temperature {at:.3g}"
        DivergenceError.check(max(rates) >= 0.1 * self.target_accept, self.name, wanted, got, advice)
        particles = np.asarray(state[0], dtype=np.float64)
        prior, change = swarm.measure(particles)
        _check_defined(np.isfinite(prior) & np.isfinite(change), f"at the inverse temperature {at:.3g}")
        log_normaliser = path.log_normaliser + total - math.log(count)
        ess = 1.0 / (float(np.sum(weights**2)) * count)
        # Resampling leaves copies side by side, which would look autocorrelated as draws of a chain.
        order = rng.permutation(count) if at == 1.0 else np.arange(count)
        return path._replace(
            particles=particles[order],
            prior=prior[order],
            change=change[order],
            ancestors=path.ancestors[chosen][order],
            inverse_temperature=at,
            log_normaliser=log_normaliser,
            step_size=step_size,
            gradients=path.gradients + gradients,
            correlation=_largest_correlation(before, particles),
            told=np.vstack([path.told, [at, np.mean(rates), step_size, ess, log_normaliser]]),
        )


class _Particles(NamedTuple):
    """The state of a run; a checkpoint has its fields by name.

    particles (N, P), with prior = log p(w) + log |dw/du| and change, its rate of change with the inverse temperature.
    ancestors (N,): their prior draws. gradients: of single particles. unsupported: share of prior draws without a
    likelihood. correlation: of the last moves. told: the record, (temperatures, len(RECORD)).
    """

    particles: np.ndarray
    prior: np.ndarray
    change: np.ndarray
    ancestors: np.ndarray
    inverse_temperature: float = 0.0
    log_normaliser: float = 0.0
    step_size: float = FIRST_STEP_SIZE
    gradients: int = 0
    unsupported: float = 0.0
    correlation: float = 1.0
    told: np.ndarray = np.empty((0, len(RECORD)))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in self._asdict().items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> _Particles:
        values: dict[str, Any] = {name: each if each.ndim else each.item() for name, each in arrays.items()}
        return cls(**values)


class _Swarm:
    """Compiled functions of all particles: `drawn` from the prior by keys, and `moved` by a transition.

    A state between moves is (positions, log densities, gradients). `moved` takes ((keys, *state), inverse temperature,
    step size, variances, leapfrog steps) and returns a state and the acceptance of each particle.
    """

    def __init__(self, method: SMC, problem: Problem):
        import jax
        from blackjax.mcmc import hmc

        program, asarray, self.seed = problem.program, problem.system.asarray, problem.seed
        count = self._count = method.particles
        at_once = program.draws_at_once(count, CACHE if problem.device == "cpu" else DENSITY_MEMORY)
        data = (problem.x, problem.y)
        kernel = hmc.build_kernel()

        def drawn(key: Any, data: Any) -> Any:
            sites = {site.name: site for site in problem.system.run(program.native, *data, seed=key)}
            return program.ravel({name: program.unconstrain_site(sites[name]) for name in program.sites})

        def measured(flat: Any, data: Any) -> tuple[Any, Any]:
            u = program.unravel(flat)
            prior, joint = program.log_prior(u, *data), program.log_joint(u, *data)
            if method.temperature == 1.0:
                return prior, joint - prior
            # Only the density of w is tempered, not the volume of the coordinates.
            density = program.log_prior(u, *data, jacobian=False)
            return prior, program.log_joint(u, *data, jacobian=False) / method.temperature - density

        def log_density(flat: Any, at: Any, data: Any) -> Any:
            prior, change = measured(flat, data)
            return prior + at * change

        def begun(flat: Any, at: Any, data: Any) -> Any:
            return tuple(hmc.init(flat, lambda f: log_density(f, at, data)))

        def moved(key: Any, *given: Any) -> tuple[Any, Any]:
            *state, at, step, variances, steps, data = given
            density = partial(log_density, at=at, data=data)
            after, info = kernel(key, hmc.HMCState(*state), density, step, variances, steps)
            return tuple(after), info.acceptance_rate

        def compiled(one: Callable[..., Any], each: tuple[Any, ...], *shared: Any) -> Callable[..., Any]:
            """`one`, a function of arrays of a particle, then of shared values and the data, for all particles."""

            def every(each: Any, *shared: Any) -> Any:
                if at_once >= count:
                    return jax.vmap(lambda *own: one(*own, *shared))(*each)
                return jax.lax.map(lambda own: one(*own, *shared), each, batch_size=at_once)

            function = problem.system.compile_for(every, (each, *shared, data))
            return lambda each, *shared: function(each, *map(asarray, shared), data)

        self._asarray, number = asarray, asarray(0.5)
        particles = asarray(np.zeros((count, program.parameter_count)))
        self.drawn = compiled(drawn, (self.keys(0),))
        self._measured = compiled(measured, (particles,))
        self._begun = compiled(begun, (particles,), number)
        state = (particles, particles[:, 0], particles)
        self.moved = compiled(moved, (self.keys(0), *state), number, number, particles[0], np.int32(1))

    def keys(self, seed: int, *numbers: int) -> Any:
        """A key per particle."""
        import jax

        return jax.random.split(reduce(jax.random.fold_in, numbers, jax.random.PRNGKey(seed)), self._count)

    def measure(self, particles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`prior` and `change` of particles, see `_Particles`."""
        prior, change = self._measured((self._asarray(particles),))
        return np.asarray(prior, np.float64), np.asarray(change, np.float64)

    def begin(self, particles: np.ndarray, at: float) -> Any:
        """The state of particles at an inverse temperature."""
        return self._begun((self._asarray(particles),), at)


def _unravelled(problem: Problem, ended: Sequence[_Particles]) -> dict[str, np.ndarray]:
    """The particles of runs by site, (run, particle, ...)."""
    return problem.program.unravel(np.stack([path.particles for path in ended]))


# --- between temperatures, in NumPy ---------------------------------------------------------------


def increment(change: np.ndarray, target_ess: float, most: float) -> float:
    """The largest rise of the inverse temperature, up to `most`, with a relative effective size of `target_ess`.

    The weights of particles (N,) are exp(rise * change). The effective size is relative to the particles with support:
    those with `change` -inf have no weight at any rise.
    """
    finite = change[np.isfinite(change)]
    finite = finite - finite.max()

    def relative(rise: float) -> float:
        weights = np.exp(rise * finite)
        return float(weights.sum() ** 2 / np.sum(weights**2)) / len(finite)

    if relative(most) >= target_ess:
        return most
    low, high = 0.0, most
    # To a relative precision of 1e-6: the first rises are many orders of magnitude below 1.
    while high - low > 1e-6 * high:
        middle = 0.5 * (low + high)
        if relative(middle) >= target_ess:
            low = middle
        else:
            high = middle
        if high < np.finfo(float).tiny:
            break
    return low


def systematic(weights: np.ndarray, uniform: float) -> np.ndarray:
    """Systematic resampling of normalised weights w (N,) with one uniform random number.

    Indices (N,) in which i appears N w_i times, rounded up or down, and N w_i times in expectation.
    """
    count = len(weights)
    upto = np.cumsum(weights)
    found = np.searchsorted(upto, upto[-1] * (np.arange(count) + uniform) / count, side="right")
    # The last point may be rounded up to the total, which is beyond the last index.
    return np.minimum(found, np.flatnonzero(weights)[-1])


def _largest_correlation(before: np.ndarray, after: np.ndarray) -> float:
    """The largest correlation over coordinates between particles (N, P) before and after moves."""
    before, after = before - before.mean(0), after - after.mean(0)
    scale = np.sqrt(np.sum(before**2, axis=0) * np.sum(after**2, axis=0))
    if not np.all(scale > 0.0):
        # A coordinate without variation: copies of one particle.
        return 1.0
    return float(np.max(np.sum(before * after, axis=0) / scale))


def _check_defined(defined: np.ndarray, where: str) -> None:
    got = f"{np.count_nonzero(~defined)} of {len(defined)} {where} at which it is NaN or infinite"
    advice = "a model that is defined everywhere, narrower priors, or standardised inputs and targets"
    DivergenceError.check(defined.all(), "SMC", "a log joint at every particle", got, advice)
