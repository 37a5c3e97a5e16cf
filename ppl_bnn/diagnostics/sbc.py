"""Simulation-based calibration: a method is fitted to data simulated from known parameters.

If (theta, y) ~ p(theta) p(y | theta), then theta ~ p(theta | y). So for every function g the rank of g(theta) among
g(theta_1), ..., g(theta_L) of an exact posterior is uniform on 0..L. How ranks deviate shows the kind of error.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.protocol import Model
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.core import checks, errors, processes
from ppl_bnn.core.arrays import chunks, map_data, row_count, site_seed
from ppl_bnn.core.errors import DeviceError, InputError, ModelError, UnknownNameError, UnsupportedError
from ppl_bnn.core.progress import Progress, Silent, resolve
from ppl_bnn.core.settings import check_value, whole
from ppl_bnn.diagnostics.calibration import Calibration, CalibrationInterrupted, listed
from ppl_bnn.inference.checkpoint import Checkpoint
from ppl_bnn.inference.fingerprint import identity
from ppl_bnn.inference.method import Method, labels
from ppl_bnn.posterior.convergence import LOG_LIKELIHOOD, PREDICTOR, quantities
from ppl_bnn.posterior.posterior import MEMORY, Posterior

PROBES = 3
_NAME = "simulation_based_calibration"
Arrays = dict[str, np.ndarray]
# (w, eta, y) -> (S,) or (S, K)
Function = Callable[[Arrays, np.ndarray, np.ndarray], Any]
# Figures kept of each fit, besides its ranks.
Figures = Callable[[Posterior], Mapping[str, float]]
# These errors mean that the method cannot fit this model at all: every other data set would raise the same.
_HOPELESS = (UnsupportedError, ModelError, UnknownNameError, errors.MissingFrameworkError, DeviceError)

# Figures of a fit that its record takes from the outcome of the method.
_TIMES = ("compile_seconds", "run_seconds", "gradient_evaluations")
_OUTCOME = (*_TIMES, "history", "warnings", "figures", "target")


# --- the simulations --------------------------------------------------------------------------------------


def simulation_based_calibration(
    model: Model,
    x: Any,
    method: Method,
    *,
    simulations: int = 100,
    draws: int = 99,
    functions: Mapping[str, Function] | None = None,
    probe: Any = None,
    figures: Figures | None = None,
    seed: int = 0,
    progress: bool | Progress | None = None,
    jobs: int = 1,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    observed: str | None = None,
) -> Calibration:
    """Test whether `method` is calibrated on `model` at inputs `x`, averaged over the prior and over data.

    Each simulation draws all unknowns from the prior and y from the likelihood at x, fits `method` to (x, y), takes
    `draws` draws of the posterior (thinned evenly if it is one of chains) and ranks the truth among them for each
    function. `uniformity` describes the tests, `Calibration` the result.

    Parameters
    ----------
    model : Model
        The model. There is no `standardise`: units made from simulated targets would change the prior in each
        simulation.
    x : array or dict of array
        Inputs at which targets are simulated, in the units of the model.
    method : Method
        The method. Draws of a chain are correlated, and their ranks then not uniform even if the chain is exact: make
        the chain several times longer than `draws`.
    simulations : int
        Number of simulations; each costs one fit.
    draws : int
        Number of posterior draws that each truth is ranked among; choose one for which draws + 1 has many divisors.
    functions : mapping of str to callable, optional
        Name -> function(w, eta, y) in NumPy, returning (S,) or (S, K) over S draws at once: w constrained values of all
        sites (S, *shape), eta (S, N, D) the default predictor at x or (S, M, D) at `probe`, y (N,) or (N, K) the
        simulated targets. Default: outputs f at `probe` or at 3 rows of x; the log likelihood of y, which alone detects
        a posterior that ignores the data (Modrák et al. 2023); and each scalar random variable.
    probe : optional
        Inputs (M, F) of the network outputs.
    figures : callable, optional
        Function of each posterior that returns name -> number, kept in `Calibration.figures`. A figure "converged" is
        counted by `not_converged`.
    seed : int
        Seed of the simulations and fits.
    progress : bool or Progress, optional
        Whether and where to report progress.
    jobs : int
        Number of processes (not threads, since a fit changes global settings of its framework). Results are identical
        to the bit. Model and functions are sent to the processes by cloudpickle.
    checkpoint : str or Path, optional
        Folder of finished simulations, which the next call continues, also with more simulations. Simulations of
        another model, method or seed are refused.
    device : str
        Device of the fits.
    observed : str, optional
        The observed site of a plain NumPyro or Pyro model.

    Returns
    -------
    Calibration
        Fits that fail are listed in `failures`. Errors of the model or method as a whole are raised at once.

    Raises
    ------
    InputError
        Invalid arguments, or a checkpoint of other simulations.
    UnsupportedError
        A method that gives a point; a model with parameters without a prior, with a factor, or with other observations.
    CalibrationInterrupted
        Ctrl-C. Its `partial` holds what had finished.

    References
    ----------
    Modrák et al. (2023), Bayesian Analysis.
    Talts, Betancourt, Simpson, Vehtari and Gelman (2018), Validating Bayesian inference algorithms with
    simulation-based calibration.
    Yao, Vehtari, Simpson and Gelman (2018), ICML.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> model, x = bnn.zoo.load("linear_regression"), np.linspace(-1.0, 1.0, 10)[:, None]
    >>> method = bnn.Laplace()
    >>> calibration = bnn.simulation_based_calibration(model, x, method, simulations=2, draws=9)
    >>> calibration.ranks.shape[0], len(calibration.names)
    (2, 5)
    """
    check = InputError.check
    check_value(simulations, whole(), "simulations", "simulations=100")
    check_value(draws, whole(), "draws", "draws=99")
    check_value(jobs, whole(), "jobs", "jobs=1")
    check_value(seed, whole(0, 2**31 - 1), "seed", "seed=0")
    check(isinstance(method, Method), "method", "a method", repr(method), "bnn.SVI() or bnn.Laplace()")
    check(callable(model), "model", "a function (x, y=None)", type(model).__name__, "the model itself")
    good, wanted = functions is None, "a dict of name -> function(w, eta, y)"
    good = good or (functions and all(map(callable, functions.values())))
    check(good, "functions", wanted, repr(functions), "functions=None")
    good = figures is None or callable(figures)
    check(good, "figures", "a function of a posterior", repr(figures), "None")
    own, wanted = getattr(method, "checkpoint", None), "a method without a checkpoint of its own"
    check(own is None, "method", wanted, f"checkpoint={own!r}", f"{_NAME}(..., checkpoint=folder)")
    x = checks.check_inputs(x)
    if probe is not None:
        try:
            probe = checks.check_inputs(probe, checks.describe_inputs(x))
        except InputError as error:
            raise InputError(f"probe: {error}") from None
    settings = (functions, probe, figures, int(seed), device, observed, checkpoint)
    simulator, asked = _Simulator(model, x, method, int(draws), *settings), int(simulations)
    records = simulator.finished(asked)
    task = resolve(progress).task(f"Calibration of {method.name}", asked)

    def tell() -> None:
        failed = sum(bool(each.failure) for each in records.values())
        doubtful = sum(not each.failure and not each.converged for each in records.values())
        task.update(len(records), failed=float(failed), not_converged=float(doubtful))

    try:
        if records:
            tell()
        with closing(_records(simulator, asked, records, int(jobs))) as found:
            for index, record in found:
                records[index] = record
                tell()
    except KeyboardInterrupt as error:
        # With a folder this includes simulations that processes had finished but not yet returned.
        records |= simulator.finished(asked)
        text = f"interrupted after {len(records)} of {asked} simulations; `partial` has them"
        raise CalibrationInterrupted(text, _gathered(simulator, records, asked)) from error
    finally:
        task.close()
    return _gathered(simulator, records, asked)


@dataclass(frozen=True, eq=False)
class _Record:
    """One simulation: truths (F,), ranks (F,) and which functions varied; or why there are none."""

    names: tuple[str, ...] = ()
    truths: np.ndarray = field(default_factory=lambda: np.empty(0))
    ranks: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    varied: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=bool))
    converged: bool = True
    failure: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def arrays(self) -> Arrays:
        """The record as arrays; text is stored as the bytes of JSON."""
        words = {name: getattr(self, name) for name in ("names", "converged", "failure", "figures")}
        text = np.frombuffer(json.dumps(words).encode(), dtype=np.uint8)
        return {"truths": self.truths, "ranks": self.ranks, "varied": self.varied, "words": text}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> _Record:
        """The inverse of `arrays`."""
        words = json.loads(arrays["words"].tobytes())
        # Folders of older versions have no figures.
        numbers = {name: arrays[name] for name in ("truths", "ranks", "varied")}
        return cls(**{"figures": {}} | numbers | words | {"names": tuple(words["names"])})


def _records(
    simulator: _Simulator, simulations: int, finished: Mapping[int, _Record], jobs: int
) -> Generator[tuple[int, _Record]]:
    waiting = [index for index in range(simulations) if index not in finished]
    if jobs == 1 or len(waiting) < 2 or not processes.allowed():
        for index in waiting:
            yield index, simulator(index)
        return
    # Ctrl-C loses what a process has not returned, unless there is a folder.
    written = processes.written(simulator, simulator.model)
    parts = chunks(len(waiting), max(1, len(waiting) // (4 * jobs)))
    calls = [(written, waiting[start:stop]) for start, stop in parts]
    with closing(processes.unordered(_several, calls, min(jobs, len(calls)))) as found:
        for _, records in found:
            yield from records


def _several(written: bytes, indices: Iterable[int]) -> list[tuple[int, _Record]]:
    return [(index, _at_work(written)(index)) for index in indices]


# The simulator of a process, kept so that its compiled functions serve all parts.
_at_work = functools.lru_cache(maxsize=1)(processes.read)


@dataclass(eq=False)
class _Simulator:
    """Makes single simulations; the result depends only on the number of the simulation and the seed."""

    model: Model
    x: Any
    method: Method
    draws: int
    functions: Mapping[str, Function] | None
    probe: Any
    figures: Figures | None
    seed: int
    device: str
    observed: str | None
    folder: str | Path | None = None
    _program: Program | None = None
    _first: Posterior | None = None

    def __post_init__(self) -> None:
        written = written_in(self.model, self.x, None, self.method.ppl)
        self._language = written == "language"
        self.ppl = self.method.ppl if self._language else written

    # -- checkpoints

    def finished(self, simulations: int) -> dict[int, _Record]:
        """The simulations that the folder holds."""
        if self.folder is None:
            return {}
        kept = {index: self._checkpoint(index).load() for index in range(simulations)}
        return {index: _Record.from_arrays(arrays) for index, arrays in kept.items() if arrays is not None}

    def _checkpoint(self, index: int) -> Checkpoint:
        return Checkpoint.of(self.folder, self._belongs, f"simulation-{index:06d}")

    @functools.cached_property
    def _belongs(self) -> dict[str, Any]:
        """What the simulations of a folder have in common."""
        return {
            "method": self.method.name,
            "settings": {name: identity(getattr(self.method, name)) for name in self.method.settings()},
            "draws": self.draws,
            "functions": None if self.functions is None else identity(dict(self.functions)),
            "probe": None if self.probe is None else checks.data_hash(self.probe, np.empty(0)),
            "seed": self.seed,
            # The first simulated targets identify inputs, prior and likelihood: another model draws other targets.
            "model and inputs": checks.data_hash(self.x, self._drawn(0)[1]),
        } | ({} if self.figures is None else {"figures": identity(self.figures)})

    # -- one simulation

    def __call__(self, index: int) -> _Record:
        record = self._simulated(index)
        if self.folder is not None:
            self._checkpoint(index).keep(record.arrays, last=True)
        return record

    def _simulated(self, index: int) -> _Record:
        truth, y = self._drawn(index)
        if not np.isfinite(y).all():
            return _Record(failure="the targets drawn from the prior predictive are not finite")
        try:
            posterior = self._fitted(y, site_seed(f"calibration fit {index}", self.seed) % 2**31)
        except _HOPELESS:
            raise
        except Exception as error:
            return _Record(failure=f"{type(error).__name__}: {error}")
        differ, got = posterior.kind != "point", f"{self.method.name}, a point"
        UnsupportedError.check(differ, _NAME, "a method with draws that differ", got, "bnn.Laplace()")
        record = self._ranked(*self._evaluated(posterior, truth, index), index)
        found = {} if self.figures is None else self.figures(posterior)
        figures = {name: float(value) for name, value in found.items()}
        converged = figures.get("converged", posterior.info.figures.get("converged", 1.0))
        return replace(record, converged=bool(converged), figures=figures)

    def _fitted(self, y: np.ndarray, seed: int) -> Posterior:
        """Fit the method to (x, y); later fits reuse the program of the first and its compiled functions."""
        first = self._first
        if first is None or not first.programs:
            observed = None if self._language else self.observed
            options: Any = {"seed": seed, "device": self.device, "observed": observed}
            posterior = self.method.fit(self.model, self.x, y, **options)
            # Torch compiles nothing. JAX's functions are compiled for one shape and type, which the next y has too.
            if posterior.info.ppl == "numpyro":
                self._first = posterior
            return posterior
        method = self.method if self.method.ppl == self.ppl else replace(self.method, ppl=self.ppl)
        program = next(iter(first.programs.values()))
        y = labels(program, y) if first.task == "classification" else y.astype(np.float64)
        data_hash = checks.data_hash(first.inputs, y)
        again = replace(first, targets=y, info=replace(first.info, seed=seed, data_hash=data_hash))
        outcome = again.with_problem(lambda problem: method.run(problem, Silent()))
        untuned = outcome.approximation.program(self.model) is self.model
        again.info = replace(again.info, **{name: getattr(outcome, name) for name in _OUTCOME})
        programs = first.programs if untuned else {}
        parts = {"approximation": outcome.approximation, "statistics": outcome.statistics}
        return replace(again, **parts, programs=programs)

    def _drawn(self, index: int) -> tuple[Arrays, np.ndarray]:
        """One draw of all unknowns (constrained) and of y."""
        chosen = system(self.ppl)
        with chosen.session("float64", "cpu", threads=1):
            x = map_data(chosen.asarray, self.x)
            native, observed = self.model, self.observed
            if self._language:
                native, observed = chosen.native(self.model, record=False), "y"
            elif observed is None:
                zeros = chosen.asarray(np.zeros(row_count(self.x)))
                observed = self.observed = Program.of(chosen, native, x, zeros, language=False).observed
            key = chosen.seeds(site_seed(f"calibration prior {index}", self.seed) % 2**31, 1)[0]
            sites = {site.name: site for site in chosen.run(native, x, None, seed=key)}
            y, drawn = sites.pop(observed, None), "a model that draws y where it is None"
            check_drawn(list(sites.values()))
            if y is None:
                raise ModelError.of(_NAME, drawn, "none", "bnn.observe(y, ...)")
            latent = {name: site.value for name, site in sites.items() if site.kind == "latent"}
            truth = {name: np.array(chosen.to_numpy(value)) for name, value in latent.items()}
            return truth, np.array(chosen.to_numpy(y.value))

    def _evaluated(self, posterior: Posterior, truth: Arrays, index: int) -> tuple[Arrays, Arrays]:
        """Each function at the draws, (draws,), and at the truth, (1,)."""
        approximation, kind = posterior.approximation, posterior.drawn_kind(None)
        u = posterior.chosen_draws(self.draws)

        def of_draws(problem: Problem) -> Arrays:
            at = partial(approximation.predictor_draws, problem, u, kind=kind, seed=0, memory=MEMORY)
            return self._functions(problem, problem.program.constrain_draws(u, problem.x, problem.y), at)

        def of_truth(problem: Problem) -> Arrays:
            w = {name: value[None] for name, value in truth.items()}
            one = {name: w[name] for name in problem.program.sites}
            # Another seed than that of the draws: latent variables of rows are drawn independently for both.
            at = partial(problem.program.predictor_draws, one, seed=index + 1, memory=MEMORY)
            return self._functions(problem, w, at)

        def compiled_once(action: Callable[[Problem], Any]) -> Any:
            """Like `Posterior.with_problem`, but over one program for all simulations, compiled once."""
            chosen, info = system(posterior.info.ppl), posterior.info
            with chosen.session("float64", "cpu", threads=1):
                x, y = map_data(chosen.asarray, posterior.inputs), chosen.asarray(posterior.targets)
                if self._program is None:
                    options: Any = {"language": self._language, "observed": posterior.observed}
                    self._program = Program.of(chosen, self.model, x, y, **options)
                data = (x, y, posterior.inputs, posterior.targets, info.seed, "cpu", "float64")
                return action(Problem(self._program, *data))

        on_cpu, tuned = posterior.info.device == "cpu", approximation.program(self.model) is not self.model
        drawn = (compiled_once if on_cpu and not tuned else posterior.with_problem)(of_draws)
        return drawn, compiled_once(of_truth)

    def _functions(self, problem: Problem, w: Arrays, predictor: Callable[[Any], np.ndarray]) -> Arrays:
        """Name -> (S,); each component of a function gets its own name."""
        eta, found = predictor(problem.inputs if self.probe is None else self.probe), {}
        if self.functions is None:
            at_rows = eta if self.probe is None else predictor(problem.inputs)
            return self._usual(problem.program, quantities(problem, w, eta, at_rows, problem.targets))
        for name, function in self.functions.items():
            value = np.asarray(function(w, eta, problem.targets))
            good, count = value.ndim in (1, 2) and len(value) == len(eta), len(eta)
            wanted = f"a function that gives ({count},) or ({count}, K) for {count} draws"
            got, advice = f"shape {value.shape}", "one value per draw"
            InputError.check(good, f"functions[{name!r}]", wanted, got, advice)
            found |= {name: value} if value.ndim == 1 else {f"{name}[{k}]": v for k, v in enumerate(value.T)}
        return found

    def _usual(self, program: Program, judged: Arrays) -> Arrays:
        """The quantities of `convergence.quantities`, with f as the network's outputs at single rows."""
        f = judged.pop(PREDICTOR)
        columns = f.shape[-1] if program.outputs is None else min(program.outputs, f.shape[-1])
        every, where = f.shape[1], "row" if self.probe is None else "probe"
        rows = np.unique(np.linspace(0, every - 1, PROBES if self.probe is None else every).round())
        names = ["f"] if columns == 1 else [f"f[{column}]" for column in range(columns)]
        each = itertools.product(rows.astype(int), enumerate(names))
        found = {f"{name} of {where} {row}": f[:, row, column] for row, (column, name) in each}
        return found | {"log likelihood": judged.pop(LOG_LIKELIHOOD)} | judged

    def _ranked(self, drawn: Arrays, true: Arrays, index: int) -> _Record:
        rng = np.random.default_rng(site_seed(f"calibration ties {index}", self.seed))
        truths = np.array([float(true[name][0]) for name in drawn])
        values = np.stack([np.asarray(value, dtype=np.float64) for value in drawn.values()], axis=1)
        undefined = tuple(itertools.compress(drawn, np.isnan([truths, *values]).any(axis=0)))
        if undefined:
            return _Record(failure=f"{listed(undefined)} is not a number for the truth or for a draw")
        below, ties = (values < truths).sum(axis=0), (values == truths).sum(axis=0)
        ranks = below + rng.integers(0, ties + 1)
        return _Record(tuple(drawn), truths, ranks, ties < len(values))


def check_drawn(sites: list[Any]) -> None:
    """Check that the sites of a model are all drawn from a prior, but for y."""
    got = {"param": "a parameter without a prior", "observed": "a factor, or other observations"}
    wanted = "a model that draws all its unknowns from a prior, and y given them"
    for kind, text in got.items():
        names = ", ".join([site.name for site in sites if site.kind == kind][:3])
        UnsupportedError.check(not names, _NAME, wanted, f"{text}: {names}", "a proper prior over each")


def _gathered(simulator: _Simulator, records: Mapping[int, _Record], wanted: int) -> Calibration:
    records = dict(sorted(records.items()))
    failures = {index: record.failure for index, record in records.items() if record.failure}
    numbers = [index for index in records if index not in failures]
    finished = [records[index] for index in numbers]
    names: tuple[str, ...] = finished[0].names if finished else ()

    def stacked(field: str, dtype: type) -> np.ndarray:
        values = [getattr(record, field) for record in finished]
        return np.array(values, dtype=dtype).reshape(len(finished), len(names))

    varied = stacked("varied", bool).any(axis=0)
    kept = dict.fromkeys(name for record in finished for name in record.figures)
    of_fits = {name: [record.figures.get(name, np.nan) for record in finished] for name in kept}
    return Calibration(
        subject=f"{simulator.method.name} in {simulator.ppl}",
        names=tuple(itertools.compress(names, varied)),
        numbers=np.array(numbers, dtype=np.int64),
        ranks=stacked("ranks", np.int64)[:, varied],
        truths=stacked("truths", np.float64)[:, varied],
        draws=simulator.draws,
        asked=wanted,
        failures=failures,
        constant=tuple(itertools.compress(names, ~varied)),
        not_converged=sum(not record.converged for record in finished),
        figures={name: np.array(values, float) for name, values in of_fits.items()},
    )
