"""The No-U-Turn Sampler: NumPyro's, compiled once and run by one thread per chain; or Pyro's, one process per chain.

Hamiltonian Monte Carlo moves in the unconstrained coordinates u with the potential U(u) = -log p(w(u), D) - log |dw/du|
and momentum r ~ N(0, M); NUTS doubles a trajectory of leapfrog steps until it turns back on itself and takes a draw
from it in proportion to exp(-U(u) - r' M^-1 r / 2). Step size and mass matrix M are adapted in the warm-up, as in Stan.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.errors import DivergenceError, InputError, UnsupportedError, message, unknown_name
from ppl_bnn.inference.method import Method, Outcome, Start, Stopwatch, missing_sites, resolve_start
from ppl_bnn.posterior import Chains
from ppl_bnn.ppl.protocol import Problem, Program, map_data, site_seed, system
from ppl_bnn.progress import Progress

CHAIN_METHODS = {
    "numpyro": ("auto", "threads", "vectorised", "sequential"),
    "pyro": ("auto", "processes", "sequential"),
}
# The most transitions of one call into compiled code. Chains call for fewer where transitions are slow, so that
# progress is told, and an interrupt heard, a few times a second; how transitions are cut into calls changes no bit.
CHUNK = 50
SECONDS_PER_CALL = 0.25
PRIOR_ATTEMPTS = 10


@dataclass(frozen=True)
class NUTS(Method):
    """The No-U-Turn Sampler (Hoffman and Gelman 2014; multinomial, Betancourt 2017), in unconstrained coordinates.

    draws, warmup: transitions per chain, kept and not. chains: independent chains. target_accept: the mean acceptance
    that the step size is tuned to; nearer 1 means smaller steps and fewer divergences. max_tree_depth: a trajectory has
    at most 2**max_tree_depth - 1 leapfrog steps. dense_mass: adapt a full mass matrix instead of a diagonal one.

    start: where chains begin: None (each at a prior draw of its own), a method (fitted once per chain), a posterior, or
    a dict of constrained values (sites that it does not name are drawn from the prior). jitter: standard deviation, in
    unconstrained coordinates, of the normal noise added to a chain that would start where an earlier chain does: chains
    that start at one spot agree at first whether or not they have converged.

    Parameters without a prior (`priors.Point`) are not sampled: NUTS has no optimiser, so their values come from
    `start` and stay; where a method gives each chain its own, those of the first serve all: the chains have one target.

    chain_method: "auto", or in NumPyro "threads" (one per chain, over the cores, on one compiled function; what "auto"
    means on CPU), "vectorised" (what it means on CUDA) or "sequential"; in Pyro "processes" (over the cores; what it
    means on CPU) or "sequential". The first and the last give the same bits.

    Statistics, (chain, draw), in ArviZ's names: `lp` (the log joint of u, Jacobian included), `energy` (NumPyro only),
    `acceptance_rate`, `mean_accept_prob` (its running mean), `step_size`, `n_steps` (leapfrog steps), `tree_depth`,
    `reached_max_tree_depth`, `diverging`. d completed doublings make 2**d - 1 steps, so tree_depth is the number of
    binary digits of n_steps; a last doubling that was broken off counts as one.

    Raises
    ------
    InputError, UnsupportedError: impossible arguments; `Point` parameters without a value.
    DivergenceError: no finite log joint to start from.
    """

    draws: int = 1000
    warmup: int = 1000
    chains: int = 4
    target_accept: float = 0.8
    max_tree_depth: int = 10
    dense_mass: bool = False
    start: Start = None
    jitter: float = 0.01
    chain_method: str = "auto"

    def check(self) -> None:
        for name, least in (("draws", 1), ("warmup", 1), ("chains", 1), ("max_tree_depth", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise InputError(
                    f"{name}: " + message("a whole number >= 1", repr(value), f"{name}={_DEFAULTS[name]}")
                )
        if self.max_tree_depth > 20:
            raise InputError(
                "max_tree_depth: "
                + message(
                    "at most 20 (a million steps per draw)", repr(self.max_tree_depth), "max_tree_depth=12"
                )
            )
        if not _is_number(self.target_accept) or not 0 < self.target_accept < 1:
            raise InputError(
                "target_accept: "
                + message("a number between 0 and 1", repr(self.target_accept), "target_accept=0.9")
            )
        if not _is_number(self.jitter) or not 0 <= self.jitter < np.inf:
            raise InputError("jitter: " + message("a number >= 0", repr(self.jitter), "jitter=0.01"))
        if not isinstance(self.dense_mass, bool):
            raise InputError(
                "dense_mass: " + message("True or False", repr(self.dense_mass), "dense_mass=True")
            )
        if self.chain_method not in CHAIN_METHODS[self.ppl]:
            other = {name for methods in CHAIN_METHODS.values() for name in methods}
            if self.chain_method in other:
                raise UnsupportedError(
                    "chain_method: "
                    + message(
                        f"one of {CHAIN_METHODS[self.ppl]} for ppl={self.ppl!r}",
                        repr(self.chain_method),
                        "chain_method='auto'",
                    )
                )
            raise unknown_name("chain_method", self.chain_method, CHAIN_METHODS[self.ppl])
        if isinstance(self.start, str | int | float | Sequence | np.ndarray):
            raise InputError(
                "start: "
                + message(
                    "None, a method, a posterior, a dict of arrays or a network of torch or Flax",
                    type(self.start).__name__,
                    "start=MAP()",
                )
            )

    def run(self, problem: Problem, progress: Progress) -> Outcome:
        watch = Stopwatch()
        self._refuse_free_parameters(problem)
        starts, fixed = self._starts(problem, progress)
        meter = _Meter(progress, self)
        try:
            if self.ppl == "numpyro":
                result = _run_numpyro(self, problem, starts, fixed, meter)
            else:
                result = _run_pyro(self, problem, starts, fixed, meter)
        finally:
            meter.close()
        statistics = self._statistics(result.kept)
        u = problem.program.unravel(result.kept["u"], _names(problem.program))
        shape = (self.chains, self.draws)
        for name, value in fixed.items():
            u[name] = np.broadcast_to(value, (*shape, *np.shape(value))).copy()
        return Outcome(
            Chains({name: u[name] for name in problem.program.sites}),
            statistics=statistics,
            compile_seconds=result.compile_seconds,
            run_seconds=watch() - result.compile_seconds,
            gradient_evaluations=float(result.gradients),
            warnings=(*result.warnings, *self._warnings(statistics)),
        )

    def _refuse_free_parameters(self, problem: Problem) -> None:
        program = problem.program
        left_out = list(program.sites) if self.start is None else missing_sites(problem, self.start)
        missing = [site.name for site in program.params if site.name in left_out]
        if missing:
            raise UnsupportedError(
                message(
                    "a prior over everything, since NUTS has no optimiser, or values in start=",
                    f"parameters without a prior and without a value: {missing}",
                    "start=MAP(), or start={'" + missing[0] + "': array}",
                )
            )

    def _starts(self, problem: Problem, progress: Progress) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Flat starting points of the latent sites, one per chain, and the values of parameters, common to all."""
        points = resolve_start(problem, self.start, progress, count=self.chains)
        fixed = {site.name: np.asarray(points[0][site.name]) for site in problem.program.params}
        names = _names(problem.program)
        rng = np.random.default_rng(site_seed("nuts jitter", problem.seed))
        flat = [np.concatenate([np.ravel(point[name]) for name in names]).astype(float) for point in points]
        spread = []
        for index, point in enumerate(flat):
            repeated = any(np.array_equal(point, earlier) for earlier in flat[:index])
            spread.append(point + self.jitter * rng.standard_normal(point.shape) if repeated else point)
        return spread, fixed

    def _statistics(self, kept: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        statistics = {name: value for name, value in kept.items() if name != "u"}
        # The exponent of frexp is the number of binary digits, exactly; a rounded logarithm need not be.
        depth = np.frexp(statistics["n_steps"].astype(float))[1].astype(int)
        statistics["tree_depth"] = depth
        statistics["reached_max_tree_depth"] = depth >= self.max_tree_depth
        return statistics

    def _warnings(self, statistics: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        found = []
        total = self.chains * self.draws
        diverged = int(statistics["diverging"].sum())
        if diverged:
            found.append(
                f"{diverged} of {total} transitions diverged, so regions of high curvature may be missed: "
                f"try target_accept={1 - (1 - self.target_accept) / 4:.3g} or a prior with lighter tails"
            )
        deep = float(statistics["reached_max_tree_depth"].mean())
        if deep > 0.05:
            found.append(
                f"{deep:.0%} of transitions reached max_tree_depth={self.max_tree_depth}, so draws are more "
                f"correlated than they need be: try a longer warm-up, dense_mass=True, "
                f"or max_tree_depth={self.max_tree_depth + 2}"
            )
        return tuple(found)


_DEFAULTS = {"draws": 1000, "warmup": 1000, "chains": 4, "max_tree_depth": 10}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _names(program: Program) -> list[str]:
    return [site.name for site in program.latents]


def _cores() -> int:
    # Of this process, which a container or a scheduler may have bound to fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Result:
    """kept: name -> (chain, draw, ...), with the flat `u`."""

    kept: dict[str, np.ndarray]
    gradients: int
    compile_seconds: float = 0.0
    warnings: tuple[str, ...] = ()


class _Meter:
    """What all chains together have done, told to a task from the main thread only."""

    def __init__(self, progress: Progress, method: NUTS):
        self._task = progress.task("NUTS", method.chains * (method.warmup + method.draws))
        self._rows = np.zeros((method.chains, 4))

    def tell(self, chain: int, done: float, acceptance: float, divergences: float, step_size: float) -> None:
        """done: transitions of this chain so far; acceptance: of the latest ones; divergences: after the warm-up."""
        self._rows[chain] = done, acceptance, divergences, step_size
        self._show()

    def tell_all(self, rows: np.ndarray) -> None:
        if not np.array_equal(rows, self._rows):
            self._rows[:] = rows
            self._show()

    def _show(self) -> None:
        running = self._rows[self._rows[:, 0] > 0]
        if len(running):
            self._task.update(
                int(running[:, 0].sum()),
                accept_prob=float(running[:, 1].mean()),
                divergences=int(running[:, 2].sum()),
                step_size=float(running[:, 3].mean()),
            )

    def close(self) -> None:
        self._task.close()


def _no_finite_start(chain: int, log_joint: float, from_prior: bool) -> DivergenceError:
    where = f"in {PRIOR_ATTEMPTS} draws from the prior" if from_prior else "at the start given"
    return DivergenceError(
        message(
            f"a point with a finite log joint and gradient for chain {chain} to start from",
            f"none {where} (the last log joint: {log_joint})",
            "start=MAP(), narrower priors, or standardised inputs and targets",
        )
    )


def _start_candidates(
    from_prior: bool, program: Program, x: Any, y: Any, seed: int, chain: int, first: np.ndarray
) -> Any:
    """The starting point of a chain and, where it came from the prior, other prior draws in case it is of no use."""
    yield first
    if from_prior:
        for attempt in range(1, PRIOR_ATTEMPTS):
            drawn = program.prior_draws(x, y, site_seed(f"nuts start {chain} {attempt}", seed) % 2**31, 1)
            yield np.concatenate([np.ravel(drawn[name]) for name in _names(program)])


# --- NumPyro --------------------------------------------------------------------------------------


def _run_numpyro(
    method: NUTS,
    problem: Problem,
    starts: list[np.ndarray],
    fixed: Mapping[str, np.ndarray],
    meter: _Meter,
) -> _Result:
    import jax
    import jax.numpy as jnp
    from numpyro.infer.hmc import hmc

    program, chosen = problem.program, problem.system
    names = _names(program)
    data = (problem.x, problem.y, {name: chosen.asarray(value) for name, value in fixed.items()})
    chain_method = method.chain_method
    if chain_method == "auto":
        chain_method = "vectorised" if problem.device.startswith("cuda") else "threads"
    vectorised = chain_method == "vectorised"

    def potential(x: Any, y: Any, constants: Any) -> Callable[[Any], Any]:
        # A flat vector spares the tree of a trajectory one small operation per site.
        return lambda flat: -program.log_joint({**program.unravel(flat, names), **constants}, x, y)

    start_kernel, next_kernel = hmc(potential_fn_gen=potential, algo="NUTS")

    def begin(flat: Any, key: Any, data: Any) -> tuple[Any, Any]:
        state = start_kernel(
            flat,
            method.warmup,
            dense_mass=method.dense_mass,
            target_accept_prob=method.target_accept,
            max_tree_depth=method.max_tree_depth,
            model_args=data,
            rng_key=key,
        )
        return state, jnp.isfinite(state.potential_energy) & jnp.all(jnp.isfinite(state.z_grad))

    def advance(state: Any, count: Any, data: Any) -> tuple[Any, Any]:
        def record(state: Any) -> dict[str, Any]:
            return {
                "u": state.z,
                "lp": -state.potential_energy,
                "energy": state.energy,
                "acceptance_rate": state.accept_prob,
                "mean_accept_prob": state.mean_accept_prob,
                "step_size": state.adapt_state.step_size,
                "n_steps": state.num_steps,
                "diverging": state.diverging,
            }

        def once(index: Any, carry: Any) -> Any:
            state, kept = carry
            state = next_kernel(state, model_args=data)
            return state, {name: kept[name].at[index].set(value) for name, value in record(state).items()}

        kept = {name: jnp.zeros((CHUNK, *value.shape), value.dtype) for name, value in record(state).items()}
        return jax.lax.fori_loop(0, count, once, (state, kept))

    if vectorised:
        begin = jax.vmap(begin, in_axes=(0, 0, None))
        advance = jax.vmap(advance, in_axes=(0, None, None))

    # A key of its own for each chain whatever their number.
    root = jax.random.PRNGKey(site_seed("nuts", problem.seed))
    keys = [jax.random.fold_in(root, chain) for chain in range(method.chains)]

    compiling = Stopwatch()
    points = [chosen.asarray(start) for start in starts]
    example = (jnp.stack(points), jnp.stack(keys)) if vectorised else (points[0], keys[0])
    begin_lowered = jax.jit(begin).lower(*example, data)
    begin_compiled = begin_lowered.compile()
    state_shape, _ = begin_lowered.out_info
    advance_lowered = jax.jit(advance).lower(state_shape, np.int32(0), data)
    advance_compiled = advance_lowered.compile()
    compile_seconds = compiling()

    tries = 0
    states: Any = []
    if vectorised:
        flat = list(points)
        for chain in range(method.chains):
            candidates = _start_candidates(
                method.start is None, program, problem.x, problem.y, problem.seed, chain, starts[chain]
            )
            for candidate in candidates:
                flat[chain] = chosen.asarray(candidate)
                tries += 1
                states, usable = begin_compiled(jnp.stack(flat), jnp.stack(keys), data)
                if bool(usable[chain]):
                    break
            else:
                raise _no_finite_start(chain, -float(states.potential_energy[chain]), method.start is None)
    else:
        for chain in range(method.chains):
            candidates = _start_candidates(
                method.start is None, program, problem.x, problem.y, problem.seed, chain, starts[chain]
            )
            state: Any = None
            for candidate in candidates:
                tries += 1
                state, usable = begin_compiled(chosen.asarray(candidate), keys[chain], data)
                if bool(usable):
                    states.append(state)
                    break
            else:
                raise _no_finite_start(chain, -float(state.potential_energy), method.start is None)

    total = method.warmup + method.draws
    leading = (method.chains,) if vectorised else ()
    kept: dict[str, np.ndarray] = {}
    _, shapes = advance_lowered.out_info
    for name, shape in shapes.items():
        inner = shape.shape[len(leading) + 1 :]
        kept[name] = np.empty((method.chains, method.draws, *inner), shape.dtype)
    steps = np.zeros(method.chains, dtype=np.int64)

    def sample(where: Any, state: Any, tell: Callable[..., None], stopped: Callable[[], bool]) -> None:
        """Run the chain `where` (all of them, vectorised) from `state` to its end, into its rows of `kept`."""
        done, count, divergences = 0, 1, np.zeros(leading, dtype=int)
        while done < total and not stopped():
            boundary = method.warmup if done < method.warmup else total
            count = min(count, CHUNK, boundary - done)
            clock = time.perf_counter()
            state, chunk = advance_compiled(state, np.int32(count), data)
            chunk_steps = np.asarray(chunk["n_steps"])[..., :count]
            seconds = time.perf_counter() - clock
            steps[where] += chunk_steps.sum(-1)
            if done >= method.warmup:
                first = done - method.warmup
                for name, values in chunk.items():
                    axis = len(leading)
                    part = np.asarray(values)
                    kept[name][where, first : first + count] = part[:, :count] if axis else part[:count]
                divergences = divergences + np.asarray(chunk["diverging"])[..., :count].sum(-1)
            done += count
            tell(
                where,
                done,
                np.asarray(chunk["acceptance_rate"])[..., :count].mean(-1),
                divergences,
                np.asarray(chunk["step_size"])[..., count - 1],
            )
            count = max(1, min(CHUNK, 2 * count, int(count * SECONDS_PER_CALL / max(seconds, 1e-6))))

    if vectorised:

        def tell_all(where: Any, done: int, acceptance: Any, divergences: Any, step_size: Any) -> None:
            meter.tell_all(np.stack([np.full(method.chains, done), acceptance, divergences, step_size], 1))

        sample(slice(None), states, tell_all, lambda: False)
    elif chain_method == "sequential" or method.chains == 1:
        for chain, state in enumerate(states):
            sample(chain, state, meter.tell, lambda: False)
    else:

        def work(chain: int, tell: Callable[..., None], stopped: Callable[[], bool]) -> None:
            # JAX's settings belong to a thread, so that every thread enters the session for itself.
            with chosen.session(problem.dtype, problem.device):
                sample(chain, states[chain], tell, stopped)

        _in_threads(method.chains, work, meter)
    return _Result(kept, int(steps.sum()) + tries, compile_seconds)


def _in_threads(
    count: int, work: Callable[[int, Callable[..., None], Callable[[], bool]], None], meter: _Meter
) -> None:
    """Run `work(chain, tell, stopped)` for each chain over the cores; what they tell is passed on by this thread.

    An error of one chain, or an interrupt of this thread, stops the others at their next call and is raised.
    """
    reports: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    stop = threading.Event()

    def tell(*report: Any) -> None:
        reports.put(report)

    with ThreadPoolExecutor(min(count, _cores()), thread_name_prefix="nuts") as pool:
        futures = [pool.submit(work, chain, tell, stop.is_set) for chain in range(count)]
        try:
            waiting: set[Future[None]] = set(futures)
            while waiting or not reports.empty():
                try:
                    meter.tell(*reports.get(timeout=0.05))
                except queue.Empty:
                    for future in [future for future in waiting if future.done()]:
                        waiting.remove(future)
                        future.result()
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise


# --- Pyro -----------------------------------------------------------------------------------------


class _CannotRebuildModel(Exception):
    """A worker process could not unpickle the model."""


def _run_pyro(
    method: NUTS,
    problem: Problem,
    starts: list[np.ndarray],
    fixed: Mapping[str, np.ndarray],
    meter: _Meter,
) -> _Result:
    chain_method = method.chain_method
    if chain_method == "auto":
        chain_method = "sequential" if problem.device.startswith("cuda") else "processes"
    warnings: tuple[str, ...] = ()
    results: list[dict[str, Any]] | None = None
    if chain_method == "processes" and method.chains > 1:
        results, reason = _in_processes(method, problem, starts, fixed, meter)
        if results is None:
            warnings = (
                f"chains ran one after another, since the model cannot go to other processes: {reason}",
            )
    if results is None:
        results = [
            _pyro_chain(
                method,
                problem.program,
                problem.x,
                problem.y,
                problem.seed,
                chain,
                starts[chain],
                method.start is None,
                fixed,
                partial(meter.tell, chain),
                lambda: False,
            )
            for chain in range(method.chains)
        ]
    gradients = sum(result.pop("gradients") for result in results)
    kept = {name: np.stack([result[name] for result in results]) for name in results[0]}
    return _Result(kept, gradients, warnings=warnings)


def _pyro_chain(
    method: NUTS,
    program: Program,
    x: Any,
    y: Any,
    seed: int,
    chain: int,
    start: np.ndarray,
    from_prior: bool,
    fixed: Mapping[str, np.ndarray],
    tell: Callable[[float, float, float, float], None],
    stopped: Callable[[], bool],
) -> dict[str, Any]:
    """One chain of Pyro's NUTS inside a session: name -> (draws, ...), and the number of gradients."""
    import torch
    from pyro.infer import NUTS as PyroNUTS
    from pyro.ops.integrator import potential_grad

    names = _names(program)
    constants = {name: program.system.asarray(value) for name, value in fixed.items()}
    gradients = 0

    def potential(u: Mapping[str, Any]) -> Any:
        nonlocal gradients
        gradients += any(value.requires_grad for value in u.values())
        return -program.log_joint({**u, **constants}, x, y)

    point: dict[str, Any] = {}
    value: Any = None
    for candidate in _start_candidates(from_prior, program, x, y, seed, chain, start):
        point = program.unravel(program.system.asarray(candidate), names)
        point = {name: value.clone() for name, value in point.items()}
        slopes, value = potential_grad(potential, point)
        if torch.isfinite(value) and all(torch.isfinite(slope).all() for slope in slopes.values()):
            break
    else:
        raise _no_finite_start(chain, -float(value), from_prior)

    torch.manual_seed(site_seed(f"nuts {chain}", seed))
    kernel: Any = PyroNUTS(
        potential_fn=potential,
        target_accept_prob=method.target_accept,
        max_tree_depth=method.max_tree_depth,
        full_mass=method.dense_mass,
    )
    kernel.initial_params = point
    kernel.setup(method.warmup)
    kept: dict[str, list[Any]] = {
        name: [] for name in ("u", "lp", "acceptance_rate", "mean_accept_prob", "step_size", "n_steps")
    }
    for done in range(method.warmup + method.draws):
        if stopped():
            break
        sampling = done >= method.warmup
        before, mean, step_size = gradients, kernel._mean_accept_prob, kernel.step_size
        point = kernel.sample(point)
        # Pyro keeps the running mean of the acceptance probability only; it starts anew after the warm-up.
        count = done - method.warmup + 1 if sampling else done + 1
        acceptance = mean + count * (kernel._mean_accept_prob - mean)
        if sampling:
            kept["u"].append(program.system.to_numpy(program.ravel(point, names)).copy())
            kept["lp"].append(-float(kernel._potential_energy_last))
            kept["acceptance_rate"].append(acceptance)
            kept["mean_accept_prob"].append(kernel._mean_accept_prob)
            kept["step_size"].append(step_size)
            kept["n_steps"].append(gradients - before)
        tell(done + 1, acceptance, len(kernel._divergences), kernel.step_size)
    result: dict[str, Any] = {name: np.array(values) for name, values in kept.items()}
    result["diverging"] = np.isin(np.arange(method.draws), kernel._divergences)
    result["gradients"] = gradients
    return result


def _in_processes(
    method: NUTS,
    problem: Problem,
    starts: list[np.ndarray],
    fixed: Mapping[str, np.ndarray],
    meter: _Meter,
) -> tuple[list[dict[str, Any]] | None, str]:
    """One process per chain, as many at once as there are cores; (None, why) where the model cannot be sent to them.

    The processes are started afresh, never forked from this one: the threads of JAX and torch do not survive a fork.
    """
    from joblib.externals.loky import ProcessPoolExecutor

    program = problem.program
    try:
        blob = _pickled(
            {
                "method": _without_start(method),
                "model": program.model,
                "language": program.language,
                "observed": program.observed,
                "x": problem.inputs,
                "y": problem.targets,
                "dtype": problem.dtype,
                "device": problem.device,
                "seed": problem.seed,
                "starts": starts,
                "fixed": dict(fixed),
                "from_prior": method.start is None,
            },
            program.model,
        )
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    with tempfile.TemporaryDirectory(prefix="ppl-bnn-") as folder:
        # One row of figures per chain and, last, a row whose first number tells the chains to stop.
        path = Path(folder) / "progress"
        board = np.lib.format.open_memmap(path, mode="w+", dtype=np.float64, shape=(method.chains + 1, 4))
        pool = ProcessPoolExecutor(min(method.chains, _cores()))
        finished = False
        try:
            futures = [pool.submit(_pyro_worker, blob, chain, str(path)) for chain in range(method.chains)]
            waiting = list(futures)
            while waiting:
                time.sleep(0.05)
                meter.tell_all(np.array(board[:-1]))
                for future in [future for future in waiting if future.done()]:
                    waiting.remove(future)
                    future.result()
            meter.tell_all(np.array(board[:-1]))
            results = [future.result() for future in futures]
            finished = True
        except _CannotRebuildModel as error:
            return None, str(error)
        finally:
            board[-1, 0] = 1.0
            pool.shutdown(wait=True, kill_workers=not finished)
            del board
    return results, ""


def _without_start(method: NUTS) -> NUTS:
    """The same method without what it started from: a posterior there would drag its own model along."""
    return dataclasses.replace(method, start=None)


def _pickled(payload: Any, model: Any) -> bytes:
    """Pickle with the module of the model by value: a model file loaded by its location has no name to import it by."""
    cloudpickle = _cloudpickle()
    function = model
    while isinstance(function, partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    ours = module is not None and module.__name__.split(".")[0] == __name__.split(".")[0]
    if module is None or ours or module.__name__ == "__main__":
        return cloudpickle.dumps(payload)
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return cloudpickle.dumps(payload)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(payload)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        # joblib before 1.6 carries its own.
        cloudpickle = importlib.import_module("joblib.externals.cloudpickle")
    return cloudpickle


def _pyro_worker(blob: bytes, chain: int, path: str) -> dict[str, Any]:
    """One chain in a process of its own: the program is built again here, from the model and NumPy arrays."""
    import signal

    import torch

    # Ctrl-C reaches every process of a terminal; here the parent hears it and says so on the board.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One thread each: the chains share the cores already.
    torch.set_num_threads(1)
    try:
        work = _cloudpickle().loads(blob)
    except Exception as error:
        raise _CannotRebuildModel(f"{type(error).__name__}: {error}") from None
    board = np.lib.format.open_memmap(path, mode="r+")

    def tell(*figures: float) -> None:
        board[chain] = figures

    chosen = system("pyro")
    with chosen.session(work["dtype"], work["device"]):
        x, y = map_data(chosen.asarray, work["x"]), chosen.asarray(work["y"])
        program = Program.of(
            chosen, work["model"], x, y, language=work["language"], observed=work["observed"]
        )
        return _pyro_chain(
            work["method"],
            program,
            x,
            y,
            work["seed"],
            chain,
            work["starts"][chain],
            work["from_prior"],
            work["fixed"],
            tell,
            lambda: bool(board[-1, 0]),
        )
