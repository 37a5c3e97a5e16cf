"""Chains of any kernel in JAX: compiled once, run over the cores in chunks, kept on disk, and resumed bit for bit.

A sampler defines a `Kernel`; everything else is common to all samplers. Chunks (clock), rounds (budgets, rules) and
pieces on disk do not change a bit of a draw. On a CPU chains are threads, because XLA releases the interpreter lock and
`pmap` over cores needs a flag set before JAX first runs. On a GPU they are vectorised. Pyro holds the lock, so its
chains (`mcmc/hamiltonian.py`) are processes.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import cores, site_seed
from ppl_bnn.core.errors import BudgetError, DivergenceError, InputError
from ppl_bnn.core.progress import Progress, Silent, WatchedTask, ended_early
from ppl_bnn.inference.method import Stopwatch
from ppl_bnn.inference.sampling.initialisation import PRIOR_ATTEMPTS, Beginning
from ppl_bnn.inference.sampling.stopping import Rule, Watch
from ppl_bnn.inference.sampling.stream import Arrays, Stream
from ppl_bnn.posterior.convergence import by_arviz

CHAIN_METHODS = ("auto", "threads", "vectorised", "sequential", "devices")
# The most transitions per compiled call, and the bytes that they may record. Slow transitions make shorter calls, so
# that progress is shown and interrupts are handled a few times a second.
CHUNK, CHUNK_MEMORY = 50, 2**26
SECONDS_PER_CALL = 0.25
# Seconds per round. The budget is checked after each round, when all chains have the same length.
SECONDS_PER_ROUND = 1.0
SECONDS_PER_ESS, FEWEST_FOR_ESS = 2.0, 20
# Settings that change the length or the place of chains, but no bit of a draw.
OF_LENGTH = ("draws", "until", "budget")


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

    def layout(self, chain_method: str, device: str) -> str:
        """The method that "auto" selects: vectorised for pooled chains or on CUDA, else threads over the cores."""
        if self.pooled or (chain_method == "auto" and device.startswith("cuda")):
            return "vectorised"
        return "threads" if chain_method == "auto" else chain_method


@dataclass
class Sampled:
    """All chains of one fit: `kept`, name -> (chain, draw, ...), with the flat `u`.

    `gradients` are all gradient evaluations over all rows since the `begin`ning, starts and warm-up included. `stopped`
    is "draws" (all were made), "rule" (it held) or "budget" (spent first). `looks` are the figures at each check of the
    rule. `strands` can continue from their states.
    """

    problem: Problem
    begin: Beginning
    kept: Arrays
    gradients: float
    strands: Sequence[Strand] = ()
    compile_seconds: float = 0.0
    stopped: str = "draws"
    looks: list[dict[str, float]] = field(default_factory=list)
    warnings: tuple[str, ...] = ()


def no_finite_start(chain: int, log_joint: float, from_prior: bool) -> DivergenceError:
    """The error for a chain without a finite log density at its starting points."""
    where = f"in {PRIOR_ATTEMPTS} draws from the prior" if from_prior else "at the start given"
    wanted = f"a point with a finite log joint and gradient for chain {chain} to start from"
    got = f"none {where} (the last log joint: {log_joint})"
    advice = "start=MAP(), narrower priors, or standardised inputs and targets"
    return DivergenceError.of("", wanted, got, advice)


class Meter:
    """The progress of all chains, reported to a task from the main thread only."""

    def __init__(
        self, progress: Progress, title: str, chains: int, total: int, draws: Callable[..., Any] = dict
    ):
        self._task = progress.task(title, chains * total)
        self._chains = chains
        # Whether a callback may ask for the end, and whether it has.
        self.watched, self.ended = isinstance(self._task, WatchedTask), False
        if isinstance(self._task, WatchedTask):
            self._task.draws = draws
        # Name -> a number for each chain; NaN before its first report.
        self._values: dict[str, np.ndarray] = {}

    def tell(self, chains: Any, **figures: Any) -> None:
        """Report figures of some chains: "done" (transitions) and "divergences", which are added up over chains, and
        others, which are averaged.
        """
        for name, value in figures.items():
            self._values.setdefault(name, np.full(self._chains, np.nan))[chains] = value
        told = np.isfinite(self._values.get("done", np.nan))
        if told.any():
            shown: dict[str, Any] = {name: float(value[told].mean()) for name, value in self._values.items()}
            for name in {"done", "divergences"} & set(shown):
                shown[name] = int(self._values[name][told].sum())
            self.ended = bool(self._task.update(shown.pop("done"), **shown)) or self.ended

    def close(self) -> None:
        self._task.close()


@dataclass
class Strand:
    """A unit that advances by itself (one chain, or all if vectorised), with its draws.

    `at` is (state, transitions, gradient evaluations), warm-up included. It is replaced as one tuple, after its draws
    are stored, so that an interrupt finds a consistent state. Draws beyond `at` do not count.
    """

    chains: list[int]
    warmup: int
    data: Any
    stream: Stream | None
    at: tuple[Any, int, int] = (None, 0, 0)
    pieces: list[Arrays] = field(default_factory=list)
    saved: int = 0
    count: int = 1

    @property
    def done(self) -> int:
        return self.at[1]

    @property
    def drawn(self) -> int:
        return max(0, self.done - self.warmup)

    def stored(self) -> Arrays:
        """`at` in NumPy, as it is stored: "leaf0", "leaf1", ... in the order of the tree, and "done_steps"."""
        import jax

        state, *done_steps = self.at
        leaves = {f"leaf{index}": np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(state))}
        return leaves | {"done_steps": np.array(done_steps)}

    def restore(self, stored: Arrays, kept: Arrays, compiled: _Compiled) -> None:
        """Continue from what `stored` returned, with the draws `kept`."""
        import jax

        likes, tree = jax.tree.flatten(compiled.state_shape)
        done, steps = (int(value) for value in stored["done_steps"])
        leaves = [stored[f"leaf{number}"] for number in range(len(stored) - 1)]
        same = [np.shape(leaf) for leaf in leaves] == [like.shape for like in likes]
        InputError.check(same, "checkpoint", "the state of this sampler", "another one", "another folder")
        arrays = [jax.numpy.asarray(leaf, like.dtype) for leaf, like in zip(leaves, likes, strict=True)]
        self.at = (jax.tree.unflatten(tree, arrays), done, steps)
        self.saved = self.drawn
        if kept:
            # Derived statistics are computed again.
            self.pieces = [{name: kept[name] for name in compiled.recorded}]

    def save(self) -> None:
        """Write the draws since the last call, and the state."""
        if self.stream is not None and self.at[0] is not None:
            self.stream.write(self.saved, self.kept(self.saved, self.drawn), self.stored())
            self.saved = self.drawn

    def kept(self, first: int, last: int) -> Arrays:
        """Name -> (chains, draws, ...) for draws `first` to `last`."""
        parts, start = [], 0
        for piece in list(self.pieces):
            count = next(iter(piece.values())).shape[1]
            low, high = max(first - start, 0), min(last - start, count)
            if low < high:
                parts.append({name: value[:, low:high] for name, value in piece.items()})
            start += count
        return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]} if parts else {}


class _Compiled(NamedTuple):
    """Compiled functions of a kernel for one number of chains, kept with the program and reused by later fits.

    begin: compiled when it is first asked for, because a resumed run begins no chain.
    """

    begin: Callable[[], Callable[..., Any]]
    advance: Callable[..., Any]
    state_shape: Any
    recorded: list[str]


@dataclass
class Engine:
    """One run of chains.

    method: the `Sampler`, whose rule is evaluated after every `draws`. begun: the problem and its beginning; several,
    which differ in their seeds only, if the chains of several fits run together, each with the keys it would have
    alone. watch: the seconds of the fit so far, which its budget limits. streams: one per strand, or none.
    """

    method: Any
    kernel: Kernel
    begun: Sequence[tuple[Problem, Beginning]]
    progress: Progress
    watch: Stopwatch
    streams: Sequence[Stream] = ()

    def __post_init__(self) -> None:
        method = self.method
        self.problem, begin = self.begun[0]
        fixed = {name: self.problem.system.asarray(value) for name, value in begin.fixed.items()}
        self.data = (self.problem.x, self.problem.y, fixed)
        # For each chain the flat points to try in turn; none if no chain begins.
        self.starts = [
            method.candidates(problem, chain, point)
            for problem, begin in self.begun
            for chain, point in enumerate(begin.flat)
        ]
        self.how = self.kernel.layout(method.chain_method, self.problem.device)
        self.together = self.how == "vectorised"
        self.chains = method.chains * len(self.begun)
        self.size = self.chains if self.together else 1
        streams = self.streams or [None] * (self.chains // self.size)
        self.strands = [
            Strand(list(range(index * self.size, (index + 1) * self.size)), method.warmup, self.data, stream)
            for index, stream in enumerate(streams)
        ]
        self.dimension = sum(site.size for site in self.problem.program.latents)
        recorded = 8 * self.dimension * self.size
        self.chunk = int(np.clip(CHUNK_MEMORY // max(recorded, 1), 1, CHUNK))
        self.compile_seconds = 0.0
        self.looked = time.monotonic()
        until = method.until
        self.look = None if until is None else Watch(self.problem, Rule.of(until), method.groups)

    def _key(self, strand: Strand) -> Any:
        """The key of a strand: that of its chain, those of all chains, or one key for pooled chains."""
        import jax

        title, each = self.method.name.lower(), self.method.chains
        roots = [jax.random.PRNGKey(site_seed(title, problem.seed)) for problem, _ in self.begun]
        if self.kernel.pooled:
            return roots[0]
        # The key of a chain does not depend on the number of chains.
        keys = [jax.random.fold_in(roots[chain // each], chain % each) for chain in strand.chains]
        return jax.numpy.stack(keys) if self.together else keys[0]

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
                now = kernel.record(state)
                return state, {name: kept[name].at[index].set(value) for name, value in now.items()}

            shapes = jax.eval_shape(kernel.record, state)
            kept = {name: jnp.zeros((size, *value.shape), value.dtype) for name, value in shapes.items()}
            return jax.lax.fori_loop(0, count, once, (state, kept))

        if self.together and not kernel.pooled:
            begin, advance = jax.vmap(begin, in_axes=(0, 0, None)), jax.vmap(advance, in_axes=(0, None, None))
        shape = (self.size, self.dimension) if self.together else (self.dimension,)
        flat = self.problem.system.asarray(np.zeros(shape))
        key = self._key(self.strands[0])
        compiling = Stopwatch()
        first = jax.jit(begin, keep_unused=True).trace(flat, key, self.data)
        system: Any = self.problem.system
        compiled = functools.cache(lambda: system.compiled(first.lower()))
        state_shape, _, _ = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), first.out_info)
        with ThreadPoolExecutor(1) as pool:
            # In parallel, because one compilation leaves cores idle. A resumed run begins no chain.
            early = pool.submit(self._in_session, compiled) if self.starts else None
            options = self._options()
            # Of several devices each gets its part of the chains, which JAX compiles at the first call.
            alone = self.how != "devices"
            staged = jax.jit(advance, keep_unused=True, compiler_options=None if alone else options)
            traced = staged.trace(state_shape, np.int32(0), self.data)
            advance = system.compiled(traced.lower(), options) if alone else staged
            if early is not None:
                early.result()
        self.compile_seconds += compiling()
        return _Compiled(compiled, advance, state_shape, list(traced.out_info[1]))

    def _options(self) -> dict[str, Any] | None:
        """Compiler options of a transition. Bits may depend on them, so all layouts of chains use the same.

        With at least as many chains as cores, the small matrix products of one chain are not shared among cores.
        """
        crowded = self.method.chains >= cores() and not self.problem.device.startswith("cuda")
        return {"xla_cpu_multi_thread_eigen": False} if crowded else None

    def _in_session(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the session. JAX's settings are per thread, so every thread enters the session."""
        with self.problem.system.session(self.problem.dtype, self.problem.device):
            return work()

    def _compile(self) -> None:
        if self.begun[0][1].approximation is not None:
            self.compiled = self._functions()
            return
        # Kernels that use no approximation are the same for all fits of a program.
        left_out = ("start", "jitter", "checkpoint", "chains", "chain_method", *OF_LENGTH)
        known = {name: value for name, value in self.method.settings().items() if name not in left_out}
        same = repr((self.method.name, known))
        key = ("chains", same, self.how, self.size, self.chunk, str(self._options()))
        self.compiled = self.problem.program.cached(key, self._functions)

    # -- beginning

    def _begin(self) -> None:
        waiting = [strand for strand in self.strands if strand.at[0] is None]
        if not waiting:
            return
        compiling = Stopwatch()
        asarray, begin = self.problem.system.asarray, self.compiled.begin()
        self.compile_seconds += compiling()
        for strand in waiting:
            tries = [self.starts[chain] for chain in strand.chains]
            points, tried = [next(each) for each in tries], 0
            while True:
                tried += 1
                flat = asarray(np.stack(points) if self.together else points[0])
                state, usable, density = begin(flat, self._key(strand), self.data)
                bad = np.flatnonzero(~np.atleast_1d(np.asarray(usable)))
                if not len(bad):
                    break
                for index in bad:
                    following = next(tries[index], None)
                    if following is None:
                        log_joint = float(np.atleast_1d(density)[index])
                        raise no_finite_start(strand.chains[index], log_joint, tried > 1)
                    points[index] = following
            spent = 0 if self.kernel.spent is None else round(float(self.kernel.spent(state)))
            strand.at = (state, 0, tried * len(strand.chains) + spent)

    # -- advancing

    def run(self) -> list[Sampled]:
        """Run all chains to their end, until the rule holds, or until the budget is spent: the chains of each fit.

        Raises `DivergenceError` for a draw without a finite log density and `BudgetError` if the budget is spent before
        the first draw.
        """
        warmup, more = self.method.warmup, self.method.draws
        self._compile()
        earlier = self.begun[0][1].before or [stream.resume() for stream in self.streams]
        for strand, found in zip(self.strands, earlier, strict=False):
            if found is not None:
                strand.restore(*found, self.compiled)
        self._begin()
        if self.how == "devices":
            self._over_devices()
        self.meter = Meter(self.progress, self.method.name, self.chains, warmup + more, self._draws_so_far)
        stopped, looks, goal = "draws", [], warmup + more
        try:
            while self._advance_all(goal):
                if self.look is None:
                    break
                u = self._kept(goal - warmup)["u"]
                holds, figures = self.look(self.method.sites(self.problem, u, self.begun[0][1].fixed))
                looks.append({"draws": float(goal - warmup), **figures})
                self.meter.tell(slice(None), **figures)
                if holds:
                    stopped = "rule"
                    break
                goal += more
            else:
                stopped = "callback" if self.meter.ended else "budget"
        finally:
            for strand in self.strands:
                strand.save()
            self.meter.close()
        draws = min(goal - warmup, *(strand.drawn for strand in self.strands))
        if draws < 1:
            done = min(strand.done for strand in self.strands)
            if stopped == "callback":
                raise ended_early(self.method.name, f"{done} of {warmup} transitions of the warm-up")
            wanted = "seconds enough for the warm-up and a draw"
            got = f"{self.method.budget:g} s, spent after {done} of {warmup} transitions of the warm-up"
            advice = "a longer budget (with checkpoint= nothing is lost), or a shorter warmup"
            raise BudgetError.of("budget", wanted, got, advice)
        kept, fits, found = self._kept(draws), len(self.begun), []
        # The state of a strand with chains of several fits belongs to none of them.
        shared = self.together and fits > 1
        for index, (problem, begin) in enumerate(self.begun):
            mine = slice(index * self.method.chains, (index + 1) * self.method.chains)
            part = {name: value[mine] for name, value in kept.items()}
            strands = self.strands if shared else self.strands[mine]
            gradients = sum(strand.at[2] for strand in strands) // (fits if shared else 1) * self.kernel.cost
            states, seconds = () if shared else strands, self.compile_seconds / fits
            found.append(Sampled(problem, begin, part, gradients, states, seconds, stopped, looks))
        return found

    def _advance_all(self, goal: int) -> bool:
        """Advance all strands to `goal` transitions; False if the budget is spent or a callback ends the fit first."""
        at = min(strand.done for strand in self.strands)
        budget = self.method.budget
        size = 1
        while at < goal:
            if self.meter.ended or (budget is not None and self.watch() >= budget):
                return False
            # A rule has a budget, too. With a callback, too, all chains get to their first draws soon.
            at = goal if budget is None and not self.meter.watched else min(goal, at + size)
            clock = time.perf_counter()
            self._to(at)
            seconds = max(time.perf_counter() - clock, 1e-6)
            size = max(1, min(2 * size, int(size * SECONDS_PER_ROUND / seconds)))
        # An end at the last transition is the end anyway.
        return True

    def _to(self, goal: int) -> None:
        """Advance each strand to `goal` transitions."""
        behind = [strand for strand in self.strands if strand.done < goal]
        if self.how in ("sequential", "vectorised") or len(behind) < 2:
            for strand in behind:
                self._advance(strand, goal, self._report, lambda: False)
            return

        def work(strand: Strand, tell: Callable[..., None], stopped: Callable[[], bool]) -> None:
            self._in_session(lambda: self._advance(strand, goal, tell, stopped))

        in_threads(behind, work, self._report)

    def _advance(
        self, strand: Strand, goal: int, tell: Callable[..., None], stopped: Callable[..., bool]
    ) -> None:
        warmup = self.method.warmup
        while strand.done < goal and not stopped():
            state, done, steps = strand.at
            count = min(strand.count, self.chunk, (min(warmup, goal) if done < warmup else goal) - done)
            clock = time.perf_counter()
            state, chunk = self.compiled.advance(state, np.int32(count), strand.data)
            values = {name: self._by_chain(np.asarray(value))[:, :count] for name, value in chunk.items()}
            seconds = max(time.perf_counter() - clock, 1e-6)
            strand.count = max(1, min(self.chunk, 2 * count, int(count * SECONDS_PER_CALL / seconds)))
            if done >= warmup:
                self._refuse_not_finite(strand, values)
                strand.pieces.append(values)
            strand.at = (state, done + count, steps + int(values["n_steps"].sum()))
            if strand.stream is not None and strand.stream.due:
                strand.save()
            tell(strand, values)

    def _by_chain(self, recorded: np.ndarray) -> np.ndarray:
        """Reshape to (chains, transitions, ...) for any layout."""
        if not self.together:
            return recorded[None]
        return np.swapaxes(recorded, 0, 1) if self.kernel.pooled else recorded

    def _refuse_not_finite(self, strand: Strand, values: Arrays) -> None:
        lp = values["lp"]
        wrong = np.argwhere(~np.isfinite(lp))
        if len(wrong):
            chain, at = (int(value) for value in wrong[0])
            failed = int(values["failed_step"][chain, at]) if "failed_step" in values else -1
            since = f", where parameters are not finite since step {failed}" if failed >= 0 else ""
            got = f"{lp[chain, at]} at draw {strand.drawn + at} of chain {strand.chains[chain]}{since}"
            advice = "a smaller step size, start=MAP(), or standardised inputs and targets"
            raise DivergenceError.of(self.method.name, "a finite log density at every draw", got, advice)

    def _over_devices(self) -> None:
        """Move the state and the data of each strand to a device, in turn."""
        import jax

        platform = next(iter(jax.tree.leaves(self.data)[0].devices())).platform
        devices = jax.local_devices(backend=platform)
        for index, strand in enumerate(self.strands):
            state, done, steps = strand.at
            device = devices[index % len(devices)]
            strand.at = (jax.device_put(state, device), done, steps)
            strand.data = jax.device_put(self.data, device)

    # -- progress

    def _report(self, strand: Strand, values: Arrays) -> None:
        figures = {}
        if "acceptance_rate" in values:
            figures["accept_prob"] = values["acceptance_rate"].mean(1)
        if "diverging" in values:
            figures["divergences"] = sum(piece["diverging"].sum(1) for piece in list(strand.pieces))
        if "step_size" in values:
            figures["step_size"] = values["step_size"][:, -1]
        self.meter.tell(strand.chains, done=strand.done, **figures)
        if not isinstance(self.progress, Silent) and time.monotonic() - self.looked > SECONDS_PER_ESS:
            self._effective_size()
            self.looked = time.monotonic()

    def _effective_size(self) -> None:
        """Show the ESS of the log density so far, the cheapest function of a draw."""
        shortest = min(strand.drawn for strand in self.strands)
        if shortest < FEWEST_FOR_ESS:
            return
        # Of the log density only: other statistics would copy all draws of a wide network every time.
        each = [np.concatenate([piece["lp"] for piece in strand.pieces], 1) for strand in self.strands]
        lp = np.concatenate([values[:, :shortest] for values in each])
        size = by_arviz("ess", lp.astype(np.float64), np.nan, method="bulk")
        if np.isfinite(size):
            self.meter.tell(slice(None), ess_of_lp=size)

    # -- draws that are kept

    def _draws_so_far(self) -> Arrays:
        """The draws so far of all chains by site, (chains, draws, ...), for a callback."""
        count = min(strand.drawn for strand in self.strands)
        # Several fits have one task.
        if count < 1 or len(self.begun) > 1:
            return {}
        (problem, begin), u = self.begun[0], self._kept(count)["u"]
        flat = u.reshape(-1, self.dimension)
        # A power of two of them, as another number would be compiled again.
        padded = np.resize(flat, (2 ** math.ceil(math.log2(len(flat))), self.dimension))
        sites = self.method.sites(problem, padded[None], begin.fixed)
        w = problem.program.constrain_draws(
            {name: value[0] for name, value in sites.items()}, problem.x, problem.y
        )
        return {name: value[: len(flat)].reshape(*u.shape[:2], *value.shape[1:]) for name, value in w.items()}

    def _kept(self, draws: int) -> Arrays:
        parts = [strand.kept(0, draws) for strand in self.strands]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts[0] else {}


def cast(new: Any, old: Any) -> Any:
    """A tree of arrays with the types of another, so that a loop or condition can carry it."""
    import jax

    return jax.tree.map(lambda a, b: jax.numpy.asarray(a).astype(b.dtype), new, old)


def in_threads(strands: Sequence[Any], work: Callable[..., None], report: Callable[..., None]) -> None:
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
