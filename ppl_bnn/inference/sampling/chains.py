"""Chains of any kernel in JAX: compiled once, run over the cores in chunks, kept on disk, and resumed bit for bit.

A sampler defines a `Kernel`; everything else is common to all samplers. Chunks (clock), rounds (budgets, rules) and
pieces on disk do not change a bit of a draw. On a CPU chains are threads, because XLA releases the interpreter lock and
`pmap` over cores needs a flag set before JAX first runs. On a GPU they are vectorised. Pyro holds the lock, so its
chains (`mcmc/hamiltonian.py`) are processes.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import cores, site_seed
from ppl_bnn.core.errors import BudgetError, DivergenceError, InputError
from ppl_bnn.core.progress import Progress, Silent
from ppl_bnn.inference.method import Stopwatch
from ppl_bnn.inference.sampling.stream import Arrays, Stream

CHAIN_METHODS = ("auto", "threads", "vectorised", "sequential", "devices")
# The most transitions per compiled call, and the bytes that they may record. Slow transitions make shorter calls, so
# that progress is shown and interrupts are handled a few times a second.
CHUNK, CHUNK_MEMORY = 50, 2**26
SECONDS_PER_CALL = 0.25
# Seconds per round. The budget is checked after each round, when all chains have the same length.
SECONDS_PER_ROUND = 1.0
SECONDS_PER_ESS, FEWEST_FOR_ESS = 2.0, 20
PRIOR_ATTEMPTS = 10


@dataclass(frozen=True)
class Kernel:
    """A Markov chain as pure functions over JAX; `data` is (x, y, values of parameters without a prior).

    begin: (flat (P,), raw key, data) -> state, any tree of arrays. step: (state, data) -> state, one draw; the kernel
    counts transitions to know the warm-up. record: state -> "u" (P,), "lp" (log density of the target), "n_steps"
    (gradient evaluations) and statistics in ArviZ's names. usable: whether a chain can continue from a state of
    `begin`. pooled: whether the functions take all chains at once, flat (C, P) with one key; all results but the state
    then have a leading axis C. cost: gradients over all rows per `n_steps`, B / N for a mini-batch. spent: state of
    `begin` -> its cost in `n_steps`, besides one evaluation per chain.
    """

    begin: Callable[[Any, Any, Any], Any]
    step: Callable[[Any, Any], Any]
    record: Callable[[Any], dict[str, Any]]
    usable: Callable[[Any], Any]
    pooled: bool = False
    cost: float = 1.0
    spent: Callable[[Any], Any] | None = None


@dataclass
class Progressed:
    """A strand: state, transitions (warm-up included), gradients in `Kernel.cost`, kept (chains, draws, ...)."""

    leaves: list[np.ndarray]
    done: int
    steps: int
    kept: Arrays


@dataclass
class Sampled:
    """All chains: `kept`, name -> (chain, draw, ...), with the flat `u`.

    `steps` are all gradient evaluations in units of `Kernel.cost`, starts and warm-up included. `stopped` is "draws"
    (all were made), "rule" (it held) or "budget" (spent first). `looks` are the figures at each check of the rule.
    """

    kept: Arrays
    strands: list[Progressed]
    steps: int
    compile_seconds: float = 0.0
    stopped: str = "draws"
    looks: list[dict[str, float]] = field(default_factory=list)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """How long chains run, and how.

    chains, warmup, draws, chain_method: see `Sampler`; with a `rule`, `draws` are those between two checks. rule: draws
    so far -> (whether it holds, figures). budget: seconds. from_prior: whether chains start at prior draws. streams:
    one per strand, or none. before: the strands of an earlier run. same: key under which the program caches compiled
    functions. seeds: seeds of fits whose chains run together, each with the keys it would have alone; empty for one
    fit.
    """

    chains: int
    warmup: int
    draws: int
    chain_method: str
    title: str
    rule: Callable[[Arrays], tuple[bool, dict[str, float]]] | None = None
    budget: float | None = None
    from_prior: bool = False
    streams: Sequence[Stream] = ()
    before: Sequence[Progressed] | None = None
    same: Any = None
    seeds: Sequence[int] = ()


def layout(kernel: Kernel, chain_method: str, device: str) -> str:
    """The method that "auto" selects: vectorised for pooled chains or on CUDA, else threads over the cores."""
    if kernel.pooled:
        return "vectorised"
    if chain_method == "auto":
        return "vectorised" if device.startswith("cuda") else "threads"
    return chain_method


def strand_names(kernel: Kernel, how: str, chains: int) -> list[str]:
    """A name for each strand."""
    together = kernel.pooled or how == "vectorised"
    return ["chains"] if together else [f"chain-{index}" for index in range(chains)]


@functools.cache
def compiler_options(crowded: bool) -> dict[str, Any] | None:
    """XLA options for a CPU; None if this version lacks them.

    They ask for full vector width and, if `crowded` (at least as many chains as cores), for no sharing of small matrix
    products among cores. Measured by `comparisons/performance/sampling.py`.
    """
    import jax

    options: dict[str, Any] = {"xla_cpu_prefer_vector_width": 512}
    if crowded:
        options["xla_cpu_multi_thread_eigen"] = False
    try:
        jax.jit(lambda x: x + 1.0, compiler_options=options).lower(np.float32(0.0)).compile()
    except jax.errors.JaxRuntimeError:
        return None
    return options


def no_finite_start(chain: int, log_joint: float, from_prior: bool) -> DivergenceError:
    """The error for a chain without a finite log density at its starting points."""
    where = f"in {PRIOR_ATTEMPTS} draws from the prior" if from_prior else "at the start given"
    wanted = f"a point with a finite log joint and gradient for chain {chain} to start from"
    got = f"none {where} (the last log joint: {log_joint})"
    advice = "start=MAP(), narrower priors, or standardised inputs and targets"
    return DivergenceError.of("", wanted, got, advice)


class Meter:
    """The progress of all chains, reported to a task from the main thread only."""

    def __init__(self, progress: Progress, title: str, chains: int, total: int):
        self._task = progress.task(title, chains * total)
        self._rows: list[dict[str, float]] = [{} for _ in range(chains)]
        self._latest: dict[str, float] = {}

    def tell(self, chain: int, done: float, figures: Mapping[str, float]) -> None:
        """Report the transitions of a chain, with "accept_prob", "divergences" and "step_size" if known."""
        self._rows[chain] = {"done": done, **figures}
        self._show()

    def add(self, figures: Mapping[str, float]) -> None:
        """Add figures of all chains together to the display."""
        self._latest |= figures
        self._show()

    def _show(self) -> None:
        running = [row for row in self._rows if row]
        if not running:
            return
        values = {name: [row[name] for row in running if name in row] for name in running[-1]}
        done = int(sum(values.pop("done")))
        shown = {
            name: int(sum(each)) if name == "divergences" else float(np.mean(each))
            for name, each in values.items()
        }
        self._task.update(done, **shown, **self._latest)

    def close(self) -> None:
        self._task.close()


class _Strand:
    """A unit that advances by itself (one chain, or all if vectorised), with its draws.

    `at` is (state, transitions, gradient evaluations). It is replaced as one tuple, after its draws are stored, so that
    an interrupt finds a consistent state. Draws beyond `at` do not count.
    """

    def __init__(self, chains: Sequence[int], warmup: int, stream: Stream | None):
        self.chains = list(chains)
        self.warmup = warmup
        self.stream = stream
        self.at: tuple[Any, int, int] = (None, 0, 0)
        self.divergences = np.zeros(len(self.chains), dtype=int)
        self.pieces: list[Arrays] = []
        self.saved = 0
        self.count = 1
        self.data: Any = None

    @property
    def done(self) -> int:
        return self.at[1]

    @property
    def drawn(self) -> int:
        return max(0, self.done - self.warmup)

    def kept(self, first: int, last: int, only: str | None = None) -> Arrays:
        """Name -> (chains, draws, ...) for draws `first` to `last`, of all names or one."""
        parts, start = [], 0
        for piece in list(self.pieces):
            count = next(iter(piece.values())).shape[1]
            low, high = max(first - start, 0), min(last - start, count)
            if low < high:
                names = piece if only is None else [only]
                parts.append({name: piece[name][:, low:high] for name in names})
            start += count
        return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]} if parts else {}


def run_chains(
    problem: Problem,
    kernel: Kernel,
    run: Run,
    data: Any,
    starts: Callable[[], Sequence[np.ndarray]],
    candidates: Callable[[int, np.ndarray], Iterator[np.ndarray]],
    progress: Progress,
) -> Sampled:
    """Run all chains from the flat points `starts`, which are computed only if a chain has to begin.

    `candidates` maps a chain and its start to the points to try in turn. Raises `DivergenceError` for a draw without a
    finite log density and `BudgetError` if the budget is spent before the first draw.
    """
    return _Chains(problem, kernel, run, data, progress).run(starts, candidates)


@dataclass
class _Compiled:
    """Compiled functions of a kernel for one number of chains, kept with the program and reused by later fits."""

    begin: _Later
    advance: Callable[..., Any]
    state_shape: Any
    recorded: list[str]


class _Later:
    """A traced function, compiled at its first use: a resumed run begins no chain."""

    def __init__(self, traced: Any):
        self._traced, self._compiled = traced, None

    def compiled(self) -> Callable[..., Any]:
        self._compiled = self._compiled or self._traced.lower().compile()
        return self._compiled


class _Chains:
    def __init__(self, problem: Problem, kernel: Kernel, run: Run, data: Any, progress: Progress):
        self.problem, self.kernel, self.plan, self.data, self.progress = problem, kernel, run, data, progress
        self.how = layout(kernel, run.chain_method, problem.device)
        self.together = kernel.pooled or self.how == "vectorised"
        self.size = run.chains if self.together else 1
        groups = [range(run.chains)] if self.together else [[chain] for chain in range(run.chains)]
        streams = list(run.streams) or [None] * len(groups)
        self.strands = [
            _Strand(group, run.warmup, stream) for group, stream in zip(groups, streams, strict=True)
        ]
        self.dimension = sum(site.size for site in problem.program.latents)
        recorded = 8 * self.dimension * self.size
        self.chunk = int(np.clip(CHUNK_MEMORY // max(recorded, 1), 1, CHUNK))
        self.keys = self._keys()
        self.compile_seconds = 0.0
        self.looked = time.monotonic()
        self.deadline = None if run.budget is None else time.monotonic() + run.budget

    def _keys(self) -> Any:
        import jax
        import jax.numpy as jnp

        seeds = list(self.plan.seeds) or [self.problem.seed]
        roots = [jax.random.PRNGKey(site_seed(self.plan.title.lower(), seed)) for seed in seeds]
        if self.kernel.pooled:
            return roots[0]
        each = self.plan.chains // len(seeds)
        # The key of a chain does not depend on the number of chains.
        return jnp.stack([jax.random.fold_in(root, chain) for root in roots for chain in range(each)])

    def _key(self, strand: _Strand) -> Any:
        """The key of a strand: that of its chain, those of all chains, or one key for pooled chains."""
        return self.keys if self.together else self.keys[strand.chains[0]]

    # -- functions, compiled

    def _functions(self) -> _Compiled:
        import jax
        import jax.numpy as jnp

        kernel, size = self.kernel, self.chunk

        def begin(flat: Any, key: Any, data: Any) -> tuple[Any, Any, Any]:
            state = kernel.begin(flat, key, data)
            return state, kernel.usable(state), kernel.record(state)["lp"]

        def advance(state: Any, count: Any, data: Any) -> tuple[Any, Any]:
            def once(index: Any, carry: Any) -> Any:
                state, kept = carry
                state = kernel.step(state, data)
                return state, {
                    name: kept[name].at[index].set(value) for name, value in kernel.record(state).items()
                }

            shapes = jax.eval_shape(kernel.record, state)
            kept = {name: jnp.zeros((size, *value.shape), value.dtype) for name, value in shapes.items()}
            return jax.lax.fori_loop(0, count, once, (state, kept))

        if self.together and not kernel.pooled:
            begin, advance = jax.vmap(begin, in_axes=(0, 0, None)), jax.vmap(advance, in_axes=(0, None, None))
        shape = (self.size, self.dimension) if self.together else (self.dimension,)
        flat = self.problem.system.asarray(np.zeros(shape))
        key = self._key(self.strands[0])
        compiling = Stopwatch()
        traced = jax.jit(begin).trace(flat, key, self.data)
        begun = _Later(traced)
        state_shape, _, _ = jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), traced.out_info
        )
        with ThreadPoolExecutor(1) as pool:
            # In parallel, because one compilation leaves cores idle. A resumed run begins no chain.
            early = pool.submit(self._in_session, begun.compiled) if self._begins else None
            advance = jax.jit(advance, compiler_options=self._options())
            traced = advance.trace(state_shape, np.int32(0), self.data)
            if self.how != "devices":
                advance = traced.lower().compile()
            if early is not None:
                early.result()
        found = _Compiled(begun, advance, state_shape, list(traced.out_info[1]))
        self.compile_seconds += compiling()
        return found

    def _options(self) -> dict[str, Any] | None:
        """Compiler options of a transition. Bits may depend on them, so all layouts of chains use the same."""
        on_cpu = not self.problem.device.startswith("cuda")
        chains = self.plan.chains // max(len(self.plan.seeds), 1)
        return compiler_options(chains >= cores()) if on_cpu else None

    @property
    def _begins(self) -> bool:
        """Whether some chain begins rather than resumes."""
        return self.plan.before is None and not all(
            strand.stream is not None and strand.stream.begun for strand in self.strands
        )

    def _in_session(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the session. JAX's settings are per thread, so every thread enters the session."""
        with self.problem.system.session(self.problem.dtype, self.problem.device):
            return work()

    def _compile(self) -> None:
        if self.plan.same is None:
            self.compiled = self._functions()
        else:
            key = ("chains", self.plan.same, self.how, self.size, self.chunk, str(self._options()))
            self.compiled = self.problem.program.cached(key, self._functions)

    # -- beginning

    def _restore(self) -> None:
        """Restore strands from memory or disk."""
        import jax

        shapes, tree = jax.tree.flatten(self.compiled.state_shape)
        for index, strand in enumerate(self.strands):
            found = None if self.plan.before is None else self.plan.before[index]
            loaded = None if strand.stream is None else strand.stream.load()
            if loaded is not None:
                state, kept = loaded
                done, steps = (int(value) for value in state.pop("done_steps"))
                leaves = [state[f"leaf{number}"] for number in range(len(state))]
                found = Progressed(leaves, done, steps, kept)
                strand.saved = max(0, done - self.plan.warmup)
            if found is None:
                continue
            if [np.shape(leaf) for leaf in found.leaves] != [shape.shape for shape in shapes]:
                wanted = "the state of this sampler"
                raise InputError.of("checkpoint", wanted, "another one", "another folder")
            leaves = [
                jax.numpy.asarray(leaf, shape.dtype) for leaf, shape in zip(found.leaves, shapes, strict=True)
            ]
            strand.at = (jax.tree.unflatten(tree, leaves), found.done, found.steps)
            if found.kept:
                # Derived statistics are computed again.
                strand.pieces = [{name: found.kept[name] for name in self.compiled.recorded}]
                if "diverging" in found.kept:
                    strand.divergences = found.kept["diverging"].sum(1).astype(int)

    def _begin(
        self,
        starts: Callable[[], Sequence[np.ndarray]],
        candidates: Callable[[int, np.ndarray], Iterator[np.ndarray]],
    ) -> None:
        waiting = [strand for strand in self.strands if strand.at[0] is None]
        if not waiting:
            return
        import jax.numpy as jnp

        compiling = Stopwatch()
        asarray, begin = self.problem.system.asarray, self.compiled.begin.compiled()
        self.compile_seconds += compiling()
        points = [np.asarray(point) for point in starts()]
        for strand in waiting:
            tries = [candidates(chain, points[chain]) for chain in strand.chains]
            current = [next(each) for each in tries]
            steps = 0
            while True:
                steps += len(strand.chains)
                flat = [asarray(point) for point in current]
                flat = jnp.stack(flat) if self.together else flat[0]
                state, usable, density = begin(flat, self._key(strand), self.data)
                bad = np.flatnonzero(~np.atleast_1d(np.asarray(usable)))
                if not len(bad):
                    break
                for index in bad:
                    following = next(tries[index], None)
                    if following is None:
                        chain, log_joint = strand.chains[index], float(np.atleast_1d(density)[index])
                        raise no_finite_start(chain, log_joint, self.plan.from_prior)
                    current[index] = following
            spent = 0 if self.kernel.spent is None else round(float(self.kernel.spent(state)))
            strand.at = (state, 0, steps + spent)

    # -- advancing

    def run(
        self,
        starts: Callable[[], Sequence[np.ndarray]],
        candidates: Callable[[int, np.ndarray], Iterator[np.ndarray]],
    ) -> Sampled:
        plan = self.plan
        self._compile()
        self._restore()
        self._begin(starts, candidates)
        rounds = plan.rule is not None or plan.budget is not None
        self.meter = Meter(self.progress, plan.title, plan.chains, plan.warmup + plan.draws)
        stopped, looks, goal = "draws", [], plan.warmup + plan.draws
        try:
            while True:
                if self._advance_all(goal, rounds):
                    stopped = "budget"
                    break
                if plan.rule is None:
                    break
                holds, figures = plan.rule(self._kept(goal - plan.warmup))
                looks.append({"draws": float(goal - plan.warmup), **figures})
                self.meter.add(figures)
                if holds:
                    stopped = "rule"
                    break
                goal += plan.draws
        finally:
            for strand in self.strands:
                self._save(strand)
            self.meter.close()
        draws = min(goal - plan.warmup, *(strand.drawn for strand in self.strands))
        if draws < 1:
            done = min(strand.done for strand in self.strands)
            wanted = "seconds enough for the warm-up and a draw"
            got = f"{plan.budget:g} s, spent after {done} of {plan.warmup} transitions of the warm-up"
            advice = "a longer budget (with checkpoint= nothing is lost), or a shorter warmup"
            raise BudgetError.of("budget", wanted, got, advice)
        return Sampled(
            self._kept(draws),
            [self._progressed(strand) for strand in self.strands],
            sum(strand.at[2] for strand in self.strands),
            self.compile_seconds,
            stopped,
            looks,
        )

    def _advance_all(self, goal: int, rounds: bool) -> bool:
        """Advance all strands to `goal` transitions; True if the budget is spent first."""
        at = min(strand.done for strand in self.strands)
        size = 1
        while at < goal:
            if self.deadline is not None and time.monotonic() >= self.deadline:
                return True
            at = min(goal, at + size) if rounds else goal
            clock = time.perf_counter()
            self._to(at)
            seconds = max(time.perf_counter() - clock, 1e-6)
            size = max(1, min(2 * size, int(size * SECONDS_PER_ROUND / seconds)))
        return False

    def _to(self, goal: int) -> None:
        """Advance each strand to `goal` transitions."""
        behind = [strand for strand in self.strands if strand.done < goal]
        if self.how in ("sequential", "vectorised") or len(behind) < 2:
            for strand in behind:
                self._advance(strand, goal, self._report, lambda: False)
            return

        def work(strand: _Strand, tell: Callable[..., None], stopped: Callable[[], bool]) -> None:
            self._in_session(lambda: self._advance(strand, goal, tell, stopped))

        in_threads(behind, work, self._report)

    def _advance(
        self, strand: _Strand, goal: int, tell: Callable[..., None], stopped: Callable[[], bool]
    ) -> None:
        data, warmup = self._data(strand), self.plan.warmup
        while strand.done < goal and not stopped():
            state, done, steps = strand.at
            count = min(strand.count, self.chunk, (min(warmup, goal) if done < warmup else goal) - done)
            clock = time.perf_counter()
            state, chunk = self.compiled.advance(state, np.int32(count), data)
            values = {name: self._by_chain(np.asarray(value))[:, :count] for name, value in chunk.items()}
            seconds = max(time.perf_counter() - clock, 1e-6)
            strand.count = max(1, min(self.chunk, 2 * count, int(count * SECONDS_PER_CALL / seconds)))
            if done >= warmup:
                self._refuse_not_finite(strand, values)
                strand.pieces.append(values)
                if "diverging" in values:
                    strand.divergences = strand.divergences + values["diverging"].sum(1)
            strand.at = (state, done + count, steps + int(values["n_steps"].sum()))
            if strand.stream is not None and strand.stream.due:
                self._save(strand)
            tell(strand, values)

    def _by_chain(self, recorded: np.ndarray) -> np.ndarray:
        """Reshape to (chains, transitions, ...) for any layout."""
        if not self.together:
            return recorded[None]
        return np.swapaxes(recorded, 0, 1) if self.kernel.pooled else recorded

    def _refuse_not_finite(self, strand: _Strand, values: Arrays) -> None:
        lp = values["lp"]
        wrong = np.argwhere(~np.isfinite(lp))
        if len(wrong):
            chain, at = (int(value) for value in wrong[0])
            failed = int(values["failed_step"][chain, at]) if "failed_step" in values else -1
            since = f", where parameters are not finite since step {failed}" if failed >= 0 else ""
            got = f"{lp[chain, at]} at draw {strand.drawn + at} of chain {strand.chains[chain]}{since}"
            advice = "a smaller step size, start=MAP(), or standardised inputs and targets"
            raise DivergenceError.of(self.plan.title, "a finite log density at every draw", got, advice)

    def _data(self, strand: _Strand) -> Any:
        if self.how != "devices":
            return self.data
        import jax

        if strand.data is None:
            platform = next(iter(jax.tree.leaves(self.data)[0].devices())).platform
            devices = jax.local_devices(backend=platform)
            device = devices[strand.chains[0] % len(devices)]
            strand.data = jax.device_put(self.data, device)
            state, done, steps = strand.at
            strand.at = (jax.device_put(state, device), done, steps)
        return strand.data

    # -- progress

    def _report(self, strand: _Strand, values: Arrays) -> None:
        for index, chain in enumerate(strand.chains):
            figures: dict[str, float] = {}
            if "acceptance_rate" in values:
                figures["accept_prob"] = float(values["acceptance_rate"][index].mean())
            if "diverging" in values:
                figures["divergences"] = float(strand.divergences[index])
            if "step_size" in values:
                figures["step_size"] = float(values["step_size"][index, -1])
            self.meter.tell(chain, strand.done, figures)
        if not isinstance(self.progress, Silent) and time.monotonic() - self.looked > SECONDS_PER_ESS:
            self._effective_size()
            self.looked = time.monotonic()

    def _effective_size(self) -> None:
        """Show the ESS of the log density so far, the cheapest function of a draw."""
        shortest = min(strand.drawn for strand in self.strands)
        if shortest < FEWEST_FOR_ESS:
            return
        from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

        # Of the log density only: other statistics would copy all draws of a wide network every time.
        lp = np.concatenate([strand.kept(0, shortest, "lp")["lp"] for strand in self.strands])
        with np.errstate(all="ignore"):
            size: Any = array_stats.ess(lp.astype(np.float64), method="bulk", chain_axis=0, draw_axis=1)
        if np.isfinite(size):
            self.meter.add({"ess_of_lp": float(size)})

    # -- draws that are kept

    def _kept(self, draws: int) -> Arrays:
        parts = [strand.kept(0, draws) for strand in self.strands]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts[0] else {}

    def _progressed(self, strand: _Strand) -> Progressed:
        import jax

        state, done, steps = strand.at
        return Progressed([np.asarray(leaf) for leaf in jax.tree.leaves(state)], done, steps, {})

    def _save(self, strand: _Strand) -> None:
        if strand.stream is None or not strand.stream.keeps or strand.at[0] is None:
            return
        at = self._progressed(strand)
        drawn = max(0, at.done - strand.warmup)
        state = {f"leaf{index}": leaf for index, leaf in enumerate(at.leaves)}
        state["done_steps"] = np.array([at.done, at.steps])
        strand.stream.write(strand.saved, strand.kept(strand.saved, drawn), state)
        strand.saved = drawn


def in_threads(
    strands: Sequence[Any],
    work: Callable[[Any, Callable[..., None], Callable[[], bool]], None],
    report: Callable[..., None],
) -> None:
    """Run `work(strand, tell, stopped)` for each strand over the cores, and `report` in the calling thread.

    An error in one thread, or an interrupt of the caller, stops the others at their next call and is raised.
    """
    reports: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    stop = threading.Event()

    def tell(*given: Any) -> None:
        reports.put(given)

    with ThreadPoolExecutor(min(len(strands), cores()), thread_name_prefix="chain") as pool:
        futures = [pool.submit(work, strand, tell, stop.is_set) for strand in strands]
        try:
            waiting: set[Future[None]] = set(futures)
            while waiting or not reports.empty():
                try:
                    report(*reports.get(timeout=0.05))
                except queue.Empty:
                    for future in [future for future in waiting if future.done()]:
                        waiting.remove(future)
                        future.result()
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise
