"""Hamiltonian Monte Carlo: the base class of NUTS and HMC, on NumPyro's and Pyro's kernels.

A chain moves in the unconstrained coordinates u with the potential U(u) = -log p(w(u), D) - log |dw/du| and a momentum
r ~ N(0, M), drawn for each transition. Leapfrog steps of size s,

    r <- r - s/2 grad U(u),  u <- u + s M^-1 r,  r <- r - s/2 grad U(u),

nearly conserve U(u) + r' M^-1 r / 2; its error determines acceptance. The warm-up tunes the step size (dual averaging,
Nesterov 2009) and M^-1, an estimate of the covariance of u, in windows of growing length as in Stan.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.protocol import SYSTEMS
from ppl_bnn.backends.systems import system
from ppl_bnn.core import processes
from ppl_bnn.core.arrays import cores, map_data, ravel, site_seed
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.core.progress import Progress, ended_early
from ppl_bnn.core.settings import OneOf, between, flag, optional, setting
from ppl_bnn.inference.flat_vector import latent_names
from ppl_bnn.inference.method import Outcome, Stopwatch
from ppl_bnn.inference.sampling.chains import CHAIN_METHODS, Kernel, Meter, Sampled, cast, no_finite_start
from ppl_bnn.inference.sampling.initialisation import Beginning, spread
from ppl_bnn.inference.sampling.sampler import Sampler, Target, diverged, tempered_log_joint
from ppl_bnn.posterior.approximation import Approximation

MARGIN = 1e-3
PYRO_CHAIN_METHODS = ("auto", "processes", "sequential")


@dataclass(frozen=True)
class Hamiltonian(Sampler):
    """Base class of `NUTS` and `HMC`. See `NUTS` for details, and `Sampler` for the other parameters.

    Parameters
    ----------
    target_accept : float
        The mean acceptance probability to which the step size is tuned.
    mass_matrix : {"diagonal", "dense", "block"}
        Structure of the mass matrix.
    adapt_mass_matrix : bool
        Whether the warm-up estimates the mass matrix.
    step_size : float or None
        Where the tuning of the step size begins.
    """

    target_accept: float = setting(0.8, between(0, 1))
    mass_matrix: str = setting("diagonal", OneOf(("diagonal", "dense", "block")))
    adapt_mass_matrix: bool = setting(True, flag)
    step_size: float | None = setting(None, optional(between()), advice="None, for 1")
    systems: ClassVar[tuple[str, ...]] = SYSTEMS
    # The kernel's name in both systems.
    algorithm: ClassVar[str] = ""

    def check(self) -> None:
        others = [each for each in (*CHAIN_METHODS, *PYRO_CHAIN_METHODS) if each not in self.chain_methods]
        if self.chain_method in others:
            wanted = f"one of {self.chain_methods} for ppl={self.ppl!r}"
            raise UnsupportedError.of(f"{self.name} chain_method", wanted, repr(self.chain_method), "'auto'")
        super().check()
        for name in ("checkpoint", "until", "budget") if self.ppl == "pyro" else ():
            got, wanted = getattr(self, name), "None in Pyro, whose chains run from beginning to end"
            UnsupportedError.check(got is None, f"{self.name} {name}", wanted, repr(got), "ppl='numpyro'")

    @property
    def chain_methods(self) -> tuple[str, ...]:
        return PYRO_CHAIN_METHODS if self.ppl == "pyro" else CHAIN_METHODS

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the kernels of both systems that set the adaptation and the length of a trajectory."""
        return {
            "step_size": 1.0 if self.step_size is None else float(self.step_size),
            "adapt_mass_matrix": self.adapt_mass_matrix,
            "target_accept_prob": self.target_accept,
            **self.trajectory(),
        }

    # -- differences between NUTS and HMC

    @abstractmethod
    def trajectory(self) -> dict[str, Any]:
        """Arguments of the kernel of the system that set the length of a trajectory."""

    def next_length(self, length: Any, step_size: Any, least: Callable[..., Any], margin: float) -> Any:
        """The length of the next trajectory from the requested one; `least` is the system's minimum function.

        `margin`, a fraction of a step, keeps rounding from changing the number of steps: negative for NumPyro, which
        rounds up, positive for Pyro, which rounds down.
        """
        return length

    # -- the mass matrix

    def blocks(self, problem: Problem, approximation: Approximation | None) -> list[MassBlock]:
        """The blocks of the mass matrix, with the inverse that a start gives.

        At temperature T it is T times the covariance, exact for a Gaussian in coordinates without a volume term.
        """
        blocks = mass_blocks(problem.program, self.mass_matrix)
        dense = any(block.dense for block in blocks)
        matrix = spread(problem, approximation, dense)
        if matrix is None:
            return blocks
        matrix = matrix * self.temperature
        # The smallest value that keeps a factor of a covariance above zero in the floating type of the fit.
        ridge = 1.0 + math.sqrt(np.finfo(problem.dtype).eps)
        found = []
        for block in blocks:
            at = block.positions
            part = matrix[np.ix_(at, at)] if block.dense else (np.diag(matrix) if dense else matrix)[at]
            if block.dense:
                part = part + np.diag((ridge - 1.0) * np.diag(part))
            found.append(dataclasses.replace(block, inverse=part))
        return found

    # -- NumPyro

    def kernel(self, target: Target) -> Kernel:
        import jax.numpy as jnp
        from numpyro.infer.hmc import hmc

        asarray, blocks = target.problem.system.asarray, self.blocks(target.problem, target.approximation)
        known: Any = None if blocks[0].inverse is None else [asarray(block.inverse) for block in blocks]
        dense_mass: Any = self.mass_matrix == "dense"
        if self.mass_matrix == "block":
            # NumPyro identifies the blocks of a mass matrix by the names in a dict.
            named = {f"{index:04d}": block for index, block in enumerate(blocks)}
            dense_mass = [(key,) for key, block in named.items() if block.dense]
            order = np.concatenate([block.positions for block in blocks])
            place = None if np.array_equal(order, np.arange(len(order))) else np.argsort(order)

            def split(flat: Any, /) -> Any:
                return {key: flat[block.positions] for key, block in named.items()}

            def join(z: Any, /) -> Any:
                flat = jnp.concatenate([z[key] for key in named])
                return flat if place is None else flat[place]

            known = None if known is None else {(key,): part for key, part in zip(named, known, strict=True)}
        else:
            # One flat vector saves a small operation per site in the tree of a trajectory.
            split = join = jnp.asarray
            known = None if known is None else known[0]

        def potential(*data: Any) -> Callable[[Any], Any]:
            return lambda z: -target.log_density(join(z), data)

        start_kernel, next_kernel = hmc(potential_fn_gen=potential, algo=self.algorithm)
        options = {"dense_mass": dense_mass, **self.options}
        length = options.get("trajectory_length")

        def begin(flat: Any, key: Any, data: Any) -> Any:
            # A copy: NumPyro completes the dict.
            mass = dict(known) if isinstance(known, dict) else known
            return start_kernel(
                split(flat), self.warmup, inverse_mass_matrix=mass, model_args=data, rng_key=key, **options
            )

        def step(state: Any, data: Any) -> Any:
            if length is not None:
                size = state.adapt_state.step_size
                following = self.next_length(jnp.asarray(length, size.dtype), size, jnp.minimum, -MARGIN)
                state = state._replace(trajectory_length=following)
            return cast(next_kernel(state, model_args=data), state)

        def record(state: Any) -> dict[str, Any]:
            return {
                "u": join(state.z),
                "lp": -state.potential_energy,
                "energy": state.energy,
                "acceptance_rate": state.accept_prob,
                "mean_accept_prob": state.mean_accept_prob,
                "step_size": state.adapt_state.step_size,
                "n_steps": state.num_steps,
                "diverging": state.diverging,
            }

        def usable(state: Any) -> Any:
            return jnp.isfinite(state.potential_energy) & jnp.all(jnp.isfinite(join(state.z_grad)))

        return Kernel(begin, step, record, usable)

    # -- descriptions, figures and warnings

    def noticed(self, statistics: Mapping[str, np.ndarray], figures: Mapping[str, float]) -> Iterator[str]:
        return diverged(statistics, f"target_accept={1 - (1 - self.target_accept) / 4:.3g}")

    # -- Pyro

    def run(self, problem: Problem, progress: Progress, begin: Beginning | None = None) -> Outcome:
        if self.ppl == "numpyro":
            return super().run(problem, progress, begin)
        watch = Stopwatch()
        (started,) = self.started([problem], progress)
        # This is sent to other processes; a posterior in `start` would carry its model along.
        method = dataclasses.replace(self, start=None if self.start is None else {})
        job = _PyroJob(method, started.flat, started.fixed, self.blocks(problem, started.approximation))
        alone = problem.device.startswith("cuda") or not processes.allowed()
        apart = self.chain_method == "processes" or (self.chain_method == "auto" and not alone)
        results: list[dict[str, Any]] | None = None
        warnings: tuple[str, ...] = ()
        with closing(Meter(progress, self.name, self.chains, self.warmup + self.draws)) as meter:
            if apart and self.chains > 1:
                try:
                    results = _in_processes(job, problem, meter)
                except _NoProcesses as why:
                    warnings = (
                        f"chains ran one after another, since they cannot go to other processes: {why}",
                    )
            if results is None:
                reports = [partial(_report, meter, chain) for chain in range(self.chains)]
                results = [_pyro_chain(job, problem, chain, tell) for chain, tell in enumerate(reports)]
        gradients = float(sum(result.pop("gradients") for result in results))
        # Of a chain in another process, whose session this is not.
        noted = dict.fromkeys(text for result in results for text in result.pop("notes"))
        warnings += tuple(text for text in noted if text not in problem.system.recorded()[1])
        draws = min(len(result["lp"]) for result in results)
        if not draws:
            raise ended_early(self.name, "the first draws of some chains only")
        kept = {name: np.stack([result[name][:draws] for result in results]) for name in results[0]}
        return self.outcome(Sampled(problem, started, kept, gradients, warnings=warnings), watch())


# --- the mass matrix ------------------------------------------------------------------------------


@dataclass(frozen=True)
class MassBlock:
    """Sites that share a part of the mass matrix, their positions in the flat vector, and whether it is dense.

    inverse: (k,) or, if dense, (k, k); None if the start has no spread.
    """

    sites: tuple[str, ...]
    positions: np.ndarray
    dense: bool
    inverse: np.ndarray | None = None


def mass_blocks(program: Program, structure: str) -> list[MassBlock]:
    """The blocks of a "diagonal", "dense" or "block" mass matrix.

    One block over everything, or a dense block per layer and a diagonal block for the rest: layers of one coordinate
    (a noise) and latent variables of rows, which grow with the data.
    """
    names = [site.name for site in program.latents]
    positions = _positions(program, names)

    def block(names: Sequence[str], dense: bool) -> MassBlock:
        return MassBlock(tuple(names), ravel(positions, names), dense)

    if structure != "block":
        return [block(names, structure == "dense")]
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name), []).append(name)
    dense, rest = [], []
    for members in layers.values():
        sites = [program.sites[name] for name in members]
        if sum(site.size for site in sites) == 1 or any(site.local for site in sites):
            rest += members
        else:
            dense.append(block(members, True))
    return [*dense, block(rest, False)] if rest else dense


def layer_of(name: str) -> str:
    """The layer of a site: its name before "weight" or "bias", else before the last dot, else the whole name.

    "hidden0.weight" and "hidden0.weight.scale" both belong to "hidden0".
    """
    parts = name.split(".")
    ends = [parts.index(part) for part in ("weight", "bias") if part in parts]
    return ".".join(parts[: min(ends, default=len(parts) - 1)]) or name


def _positions(program: Program, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The positions of sites in the flat vector of these sites."""
    return program.unravel(np.arange(program.parameter_count), names)


# --- Pyro -----------------------------------------------------------------------------------------


class _NoProcesses(Exception):
    """Chains cannot go to other processes, for the reason given."""


@dataclass(frozen=True)
class _PyroJob:
    """What Pyro's chains need besides the program and its data."""

    method: Hamiltonian
    starts: list[np.ndarray]
    fixed: dict[str, np.ndarray]
    blocks: list[MassBlock]


def _report(meter: Meter, chains: Any, done: Any, acceptance: Any, divergences: Any, step: Any) -> bool:
    """Report figures of some chains; whether a callback has asked for the end."""
    meter.tell(chains, done=done, accept_prob=acceptance, divergences=divergences, step_size=step)
    return meter.ended


def _pyro_chain(job: _PyroJob, problem: Problem, chain: int, report: Callable[..., bool]) -> dict[str, Any]:
    """One chain of Pyro's kernel inside a session: name -> (draws, ...), and the number of gradients.

    It ends early, perhaps without a draw, if `report` returns true.
    """
    import pyro.infer
    import torch
    from pyro.ops.integrator import potential_grad

    method, program = job.method, problem.program
    system, names = program.system, latent_names(problem)
    constants = {name: system.asarray(value) for name, value in job.fixed.items()}
    # One array per block of the mass matrix saves an operation for each site in every step.
    keys = [f"block{index}" for index in range(len(job.blocks))]
    order = np.concatenate([block.positions for block in job.blocks])
    place = None if len(keys) == 1 else torch.as_tensor(np.argsort(order))
    gradients = 0

    def negative(flat: Any) -> Any:
        u = {**program.unravel(flat, names), **constants}
        return -tempered_log_joint(program, method.temperature, u, problem.x, problem.y)

    value_and_grad = system.compile(system.value_and_grad(negative))

    class Potential(torch.autograd.Function):
        """The potential, with the gradient that comes with its value."""

        @staticmethod
        def forward(context: Any, flat: Any) -> Any:
            value, gradient = value_and_grad(flat.detach())
            context.save_for_backward(gradient)
            return value

        @staticmethod
        def backward(context: Any, upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return upstream * context.saved_tensors[0]

    def join(z: Mapping[str, Any]) -> Any:
        return z[keys[0]] if place is None else torch.cat([z[key] for key in keys])[place]

    def potential(z: Mapping[str, Any]) -> Any:
        nonlocal gradients
        gradients += any(value.requires_grad for value in z.values())
        return Potential.apply(join(z))

    point: dict[str, Any] = {}
    value: Any = None
    for candidate in method.candidates(problem, chain, job.starts[chain]):
        parts = (system.asarray(candidate[block.positions]) for block in job.blocks)
        point = dict(zip(keys, parts, strict=True))
        slopes, value = potential_grad(potential, point)
        if torch.isfinite(value) and all(torch.isfinite(slope).all() for slope in slopes.values()):
            break
    else:
        raise no_finite_start(chain, -float(value), method.start is None)

    system.seeds(site_seed(f"{method.name.lower()} {chain}", problem.seed), 1)
    full_mass = [(key,) for key, block in zip(keys, job.blocks, strict=True) if block.dense]
    make: Any = getattr(pyro.infer, method.algorithm)
    kernel = make(potential_fn=potential, full_mass=full_mass, **method.options)
    kernel.initial_params = point
    kernel.setup(method.warmup)
    if job.blocks[0].inverse is not None:
        _set_inverse_mass(kernel, dict(zip(keys, job.blocks, strict=True)))
    length = kernel.trajectory_length
    kept: list[dict[str, Any]] = []
    for done in range(method.warmup + method.draws):
        sampling = done >= method.warmup
        before, mean, step_size = gradients, kernel._mean_accept_prob, kernel.step_size
        kernel.trajectory_length = method.next_length(length, step_size, min, MARGIN)
        point = kernel.sample(point)
        # Pyro keeps only the running mean of the acceptance probability, and restarts it after the warm-up.
        count = done - method.warmup + 1 if sampling else done + 1
        acceptance = mean + count * (kernel._mean_accept_prob - mean)
        if sampling:
            u = system.to_numpy(join(point)).copy()
            draw = {"u": u, "lp": -float(kernel._potential_energy_last), "step_size": step_size}
            draw |= {"acceptance_rate": acceptance, "mean_accept_prob": kernel._mean_accept_prob}
            kept.append(draw | {"n_steps": gradients - before})
        if report(done + 1, acceptance, len(kernel._divergences), kernel.step_size):
            break
    result = {name: np.array([draw[name] for draw in kept]) for name in (*kept, {"lp": ()})[0]}
    diverging = np.isin(np.arange(len(kept)), kernel._divergences)
    return {**result, "diverging": diverging, "gradients": gradients, "notes": system.recorded()[1]}


def _set_inverse_mass(kernel: Any, blocks: Mapping[str, MassBlock]) -> None:
    """Set the start's inverse mass matrix in a kernel that is set up, and search for its step size again."""
    import torch

    found = {}
    for key, present in kernel.mass_matrix_adapter.inverse_mass_matrix.items():
        (name,) = key
        found[key] = torch.as_tensor(blocks[name].inverse, dtype=present.dtype, device=present.device)
    kernel.mass_matrix_adapter.inverse_mass_matrix = found
    # The step size that `setup` found belongs to the previous mass matrix.
    kernel._adapter.reset_step_size_adaptation(kernel.initial_params)


def _in_processes(job: _PyroJob, problem: Problem, meter: Meter) -> list[dict[str, Any]]:
    """Run one process per chain, up to one per core; `_NoProcesses` if the model cannot be pickled.

    Processes are spawned, never forked: the threads of JAX and torch do not survive a fork.
    """
    if not processes.allowed():
        raise _NoProcesses("this one is daemonic, as the workers of Dask are, and may start no others")
    program, count = problem.program, job.method.chains
    nothing: Any = None
    bare = dataclasses.replace(problem, program=nothing, x=nothing, y=nothing)
    try:
        blob = processes.written(
            (job, program.model, program.language, program.observed, bare), program.model
        )
    except Exception as error:
        raise _NoProcesses(f"{type(error).__name__}: {error}") from None
    with tempfile.TemporaryDirectory(prefix="ppl-bnn-") as folder:
        # One row of figures per chain, which its process writes through a memory map; NaN before the first. In the last
        # column is 1 once a callback has asked for the end.
        path = Path(folder) / "progress.npy"
        np.save(path, np.full((count, 5), np.nan))

        def show() -> None:
            board = np.lib.format.open_memmap(path, mode="r+")
            asked = _report(meter, slice(None), *np.array(board[:, :4]).T)
            # Processes begin at different times, which a callback does not see.
            if asked and np.all(board[:, 0] > job.method.warmup):
                board[:, 4] = 1.0

        calls = [(blob, chain, str(path)) for chain in range(count)]
        running = processes.unordered(_pyro_worker, calls, min(count, cores()), show)
        with problem.system.outside(), closing(running) as found:
            results = dict(found)
        show()
    return [results[chain] for chain in range(count)]


def _pyro_worker(blob: bytes, chain: int, path: str) -> dict[str, Any]:
    """Run one chain in its own process, where the program is rebuilt from the model and NumPy arrays."""
    import torch

    # One thread each, because the chains share the cores already.
    torch.set_num_threads(1)
    try:
        job, model, language, observed, bare = processes.read(blob)
    except Exception as error:
        raise _NoProcesses(f"{type(error).__name__}: {error}") from None
    board = np.lib.format.open_memmap(path, mode="r+")

    def report(*figures: float) -> bool:
        board[chain, :4] = figures
        return bool(board[chain, 4] == 1.0)

    chosen = system("pyro")
    with chosen.session(bare.dtype, bare.device, compiled=job.method.compile):
        x, y = map_data(chosen.asarray, bare.inputs), chosen.asarray(bare.targets)
        program = Program.of(chosen, model, x, y, language=language, observed=observed)
        return _pyro_chain(job, dataclasses.replace(bare, program=program, x=x, y=y), chain, report)
