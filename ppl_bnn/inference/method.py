"""The interface of inference methods, and the steps that every fit takes before and after the method runs.

A method is a frozen dataclass of hyper-parameters. Users call `fit`, which is final. A subclass implements `run`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self, final

import numpy as np

from ppl_bnn.backends.native import named_inputs
from ppl_bnn.backends.program import STREAMED_ROWS, Problem, Program, threads_for
from ppl_bnn.backends.protocol import SYSTEMS, Model, resolve_device
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.backends.turns import progress_outside
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import map_data, row_count, rows_at
from ppl_bnn.core.errors import BNNError, InputError, UnsupportedError, unknown_name
from ppl_bnn.core.names import clean_all
from ppl_bnn.core.progress import Progress, Silent, Step, ended_by_callback, resolve
from ppl_bnn.core.settings import OneOf, check_settings, flag, setting
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.start import check_start
from ppl_bnn.language.distributions import SPECIAL
from ppl_bnn.posterior.approximation import Approximation
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction.standardisation import Standardisation

DTYPES = ("auto", "float64", "float32")


@dataclass
class Outcome:
    """What `Method.run` returns: the approximation, and how it was computed (see `FitInfo`).

    Attributes
    ----------
    approximation : Approximation
        The approximation of the posterior.
    statistics, history : dict of str to ndarray
        Sampler statistics; curves over the fit, such as losses.
    compile_seconds, run_seconds : float
        Wall time of compilation, and of the rest.
    gradient_evaluations : float or None
        Gradients of the log joint over all rows (a mini-batch counts as its share); None if unknown.
    warnings : tuple of str
        Warnings for the user.
    figures : dict of str to float
        Scalar results, such as "converged".
    target : str
        What was fitted, if it is not the posterior of the model.
    """

    approximation: Approximation
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    history: dict[str, np.ndarray] = field(default_factory=dict)
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    gradient_evaluations: float | None = None
    warnings: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    target: str = ""


@dataclass(frozen=True)
class Method(ABC):
    """A method of inference: its hyper-parameters, and `fit`.

    Parameters
    ----------
    ppl : {"numpyro", "pyro"}
        The probabilistic programming system that runs the fit. Keyword only.
    dtype : {"auto", "float64", "float32"}
        The floating type. "auto" is float64 on the CPU and float32 on CUDA. Keyword only.
    compile : bool, default False
        Whether torch's compiler compiles the steps of a fit in Pyro, which takes up to half a minute and needs a C++
        compiler; a step then takes a third of its time or less. JAX compiles every fit. Keyword only.

    Attributes
    ----------
    systems : tuple of str
        The systems that the method supports.
    serves_local : bool
        Whether the method supports latent variables per row.
    finds_centre : bool
        Whether the approximation has a mode or a mean that another method can start from.
    serves_priors : frozenset of str
        The families of `distributions.SPECIAL` that the method supports.
    limitations : str
        Known weaknesses of the method in a sentence or two; empty if none are recorded. A property where they depend on
        settings.

    Notes
    -----
    An unknown keyword raises `UnknownNameError`. A subclass implements `run`, and may override `check`,
    `check_support`, `limitations`, `effort` and `streams`.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> method = bnn.MAP(ppl="pyro", dtype="float64")
    >>> isinstance(method, bnn.Method), method.systems
    (True, ('numpyro', 'pyro'))
    """

    ppl: str = field(default="numpyro", kw_only=True)
    dtype: str = setting("auto", OneOf(DTYPES), kw_only=True)
    compile: bool = setting(False, flag, kw_only=True)
    systems: ClassVar[tuple[str, ...]] = SYSTEMS
    serves_local: ClassVar[bool] = True
    finds_centre: ClassVar[bool] = True
    serves_priors: ClassVar[frozenset[str]] = frozenset()
    limitations: ClassVar[str] = ""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        # Checked before the dataclass does: its TypeError does not suggest the name that was meant.
        known = [f.name for f in dataclasses.fields(cls)]
        for name in keywords:
            if name not in known:
                raise unknown_name(f"argument of {cls.__name__}", name, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.ppl not in SYSTEMS:
            raise unknown_name("system", self.ppl, SYSTEMS)
        if self.ppl not in self.systems:
            wanted, advice = f"ppl in {self.systems}", f"ppl={self.systems[0]!r}"
            raise UnsupportedError.of(self.name, wanted, repr(self.ppl), advice)
        check_settings(self, self.name)
        wanted, got = "compile=True with ppl='pyro' (JAX compiles every fit)", f"ppl={self.ppl!r}"
        UnsupportedError.check(
            not self.compile or self.ppl == "pyro", self.name, wanted, got, "compile=False"
        )
        self.check()

    def check(self) -> None:  # noqa: B027 - most methods have something to check, none must
        """Check the hyper-parameters; subclasses raise a named error for impossible values."""

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self).__name__

    def effort(self, size: Size) -> Effort | None:
        """Estimate the cost of a fit at these settings.

        Parameters
        ----------
        size : Size
            The size of the problem.

        Returns
        -------
        Effort or None
            The estimate; None if there is none.
        """
        return None

    @property
    def streams(self) -> bool:
        """Whether the rows stay in host memory and the method fetches the rows that it needs."""
        return False

    def check_support(self, problem: Problem) -> None:  # noqa: B027 - a method may support every problem
        """Refuse what the method does not support (`UnsupportedError`, `InputError`), before anything is computed.

        `fit` and `refusal` call this before `run`, inside the session.
        """

    @abstractmethod
    def run(self, problem: Problem, progress: Progress) -> Outcome:
        """Fit a problem inside a session of its system; called by `fit`, after `check_support`.

        Parameters
        ----------
        problem : Problem
            The program and its data.
        progress : Progress
            Receives reports of progress.

        Returns
        -------
        Outcome
            The approximation, and how it was computed. Seconds of compilation are separate from those of running.
        """

    @final
    def fit(
        self,
        model: Model,
        x: Any,
        y: Any,
        *,
        seed: int = 0,
        device: str = "auto",
        progress: bool | Progress | None = None,
        callback: Callable[[Step], bool | None] | None = None,
        observed: str | None = None,
        standardise: bool = False,
        feature_names: tuple[str, ...] | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> Posterior:
        """Fit a model to data and return the posterior.

        Parameters
        ----------
        model : callable
            The model, a function `(x, y=None)`. One written in NumPyro or Pyro runs in its own system.
        x : array or dict of arrays
            Inputs, shape (N, F). A NumPyro or Pyro model may have inputs of shape (N,), or a tuple of inputs, one for
            each of its parameters.
        y : array
            Targets, shape (N,) or (N, K); for a NumPyro or Pyro model also (N, 1). Class labels are 0..K-1. Labels that
            are text or 1..K are mapped to these in order, and predictions keep the original labels.
        seed : int, default 0
            From 0 to 2**31 - 1. The same seed on the same machine gives the same bits.
        device : str, default "auto"
            "auto", "cpu", "cuda" or "cuda:i".
        progress : bool, Progress or None
            True shows progress bars.
        callback : callable or None
            Called with a `Step` whenever the fit reports its progress. Returning True ends the part of the fit that
            reports, which keeps what it has and is recorded in `info.warnings`. A sampler can end after its first
            draws, SMC after its first run, and SWAG after two collections; `BudgetError` is raised before.
        observed : str or None
            The observed site of a NumPyro or Pyro model.
        standardise : bool, default False
            Whether to fit on standardised inputs and targets. Predictions stay in original units.
        feature_names, class_names : tuple of str or None
            Names of the columns of `x`, and of the classes.

        Returns
        -------
        Posterior
            The fitted model.

        Raises
        ------
        InputError
            The data, the seed or another argument is not valid.
        ModelError
            The model is not valid.
        UnsupportedError
            The method does not support the model.
        DeviceError
            The device is not available. All of these are raised before anything is compiled.
        """
        # Before anything is computed: a wrong name would lose the fit.
        feature_names, class_names = clean_all(feature_names), clean_all(class_names)
        shown = resolve(progress, callback)
        prepared = self.prepared(model, x, y, seed, device, observed, standardise)
        with prepared as (method, problem, standardisation, original):
            if isinstance(progress, _DryRun):
                # The fit stops at its first random draw. All else works, as methods look at curvatures to refuse.
                dry: Any = copy.copy(problem.system)
                dry.seeds = shown.task
                problem.program.system = dry
                check_start(problem, getattr(method, "start", None))
            watch = Stopwatch()
            with_features = problem.with_features()
            # The clock of a method starts in `run`: what it reports is left as it is, unless features were computed.
            before = 0.0 if with_features is problem else watch()
            outcome = method.run(with_features, progress_outside(shown, problem.system.outside))
            seconds, notes = problem.system.recorded()
        spent = {
            "compile_seconds": outcome.compile_seconds + seconds,
            "run_seconds": before + max(0.0, outcome.run_seconds - seconds),
        }
        # A posterior that was fitted on the way may have said the same.
        warnings = tuple(dict.fromkeys((*ended_by_callback(shown), *outcome.warnings, *notes)))
        outcome = dataclasses.replace(outcome, warnings=warnings, **spent)
        if original is not None and class_names is None:
            class_names = tuple(map(str, original))
        program = problem.program
        found = {f.name: getattr(outcome, f.name) for f in dataclasses.fields(outcome)}
        approximation, statistics = found.pop("approximation"), found.pop("statistics")
        found |= {name: getattr(problem, name) for name in ("seed", "dtype", "device", "data_hash")}
        info = FitInfo(
            method=method.name, ppl=method.ppl, settings=method.settings(), versions=versions(), **found
        )
        return Posterior(
            model=model,
            language=program.language,
            observed=program.observed,
            inputs=problem.inputs,
            targets=problem.targets,
            approximation=approximation,
            info=info,
            statistics=statistics,
            standardisation=standardisation,
            feature_names=feature_names,
            class_names=class_names,
            labels=original,
            # A tuned posterior uses another program than the fit did, and builds it on demand.
            programs={problem.device: program} if approximation.program(model) is model else {},
        )

    @final
    def refusal(self, model: Model, x: Any, y: Any, **options: Any) -> BNNError | None:
        """The error that `fit` would raise before it begins, without fitting.

        Parameters
        ----------
        model, x, y : callable, array, array
            As for `fit`. The model is traced, as in every fit.
        **options
            Keyword arguments of `fit`.

        Returns
        -------
        BNNError or None
            The error; None if the fit would begin.
        """
        method = dataclasses.replace(self, checkpoint=None) if hasattr(self, "checkpoint") else self
        try:
            with ignored(), suppress(_Begun):
                method.fit(model, x, y, **{**options, "progress": _DryRun()})
        except BNNError as error:
            return error
        return None

    @contextmanager
    def prepared(
        self, model: Model, x: Any, y: Any, seed: int, device: str, observed: str | None, standardise: bool
    ) -> Iterator[tuple[Method, Problem, Standardisation | None, tuple[Any, ...] | None]]:
        """All checks of a fit; gives the method, its problem inside a session, standardisation and original labels."""
        if not callable(model):
            got, advice = type(model).__name__, "the model itself, not its name"
            raise InputError.of("model", "a function (x, y=None)", got, advice)
        # Standardised rows are new arrays in memory.
        mapped = self.streams and not standardise
        x = checks.check_inputs(named_inputs(model, x), flat=True, mapped=mapped)
        y, text = checks.text_labels(y)
        y = checks.check_targets(y, row_count(x), column=True)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
            raise InputError.of("seed", "a whole number from 0 to 2**31 - 1", repr(seed), "seed=0")
        resolve_device(device)
        few = slice(STREAMED_ROWS if self.streams else None)
        method, language = self._in_the_system_of(model, rows_at(x, few), y[few])
        digest = checks.data_hash(x, y)
        chosen: Any = system(method.ppl)
        try:
            with chosen.session("float64", "cpu", threads=1):
                data = map_data(chosen.asarray, rows_at(x, few))
                targets = chosen.asarray(y[few].astype(float))
                with chosen.counted() as count:
                    sketch = Program.of(chosen, model, data, targets, language=language, observed=observed)
                weight, threads = None, threads_for(count() / sketch.rows * len(y))
                if sketch.weighted:
                    expected, advice = "rows in memory, whose weights are checked", "stream=False"
                    UnsupportedError.check(not method.streams, "weight", expected, "streamed rows", advice)
                    weight = sketch.checked_weights(data, targets)
            method._check_sites(sketch)
            y, original = _checked_targets(sketch, y, text)
            standardisation = None
            if standardise:
                likelihood, regression = sketch.likelihood, sketch.likelihood.task == "regression"
                with_units = regression and likelihood.standardises
                entry = x.get("weight", ()) if isinstance(x, Mapping) else ()
                named, advice = weight is None or np.array_equal(entry, weight), "weight=x['weight']"
                expected = "x as a dict whose entry 'weight' has the weights of rows"
                InputError.check(named, "standardise", expected, "another input", advice)
                standardisation = Standardisation.of(x, y, with_units, likelihood.columns_with_units, weight)
                x, y = standardisation.inputs(x), standardisation.targets(y)
            else:
                checks.warn_constant_columns(x)
            dtype = method._dtype(chosen, device)
            with chosen.session(dtype, device, threads, self.compile) as where:
                rows = slice(1 if method.streams else None)
                data, targets = map_data(chosen.asarray, rows_at(x, rows)), chosen.asarray(y[rows])
                program = sketch.rebound(data, targets)
                problem = Problem(
                    program, data, targets, x, y, int(seed), where, dtype, digest, streamed=method.streams
                )
                method.check_support(problem)
                yield method, problem, standardisation, original
        except (TypeError, RuntimeError) as error:
            if language and (foreign := checks.foreign_function(error)):
                raise foreign from error
            raise

    def _in_the_system_of(self, model: Model, x: Any, y: np.ndarray) -> tuple[Method, bool]:
        """This method in the system that a model is written in, and whether it is written in the language."""
        # A plain model may have inputs and targets that one in the language may not.
        strict = None
        try:
            checks.check_inputs(x)
            checks.check_targets(y, row_count(x))
        except InputError as error:
            strict = error
        try:
            written = written_in(model, x, y, self.ppl)
        except BNNError as error:
            raise (strict or error) from error.__cause__
        if written == "language":
            if strict is not None:
                raise strict
            return self, True
        if written not in self.systems:
            wanted = f"a model for {self.systems}"
            raise UnsupportedError.of(self.name, wanted, f"a {written} model", "bnn.observe")
        return self if written == self.ppl else dataclasses.replace(self, ppl=written), False

    def _check_sites(self, program: Program) -> None:
        """Refuse latent variables per row and special priors where the method does not support them."""
        if program.has_local and not self.serves_local:
            wanted = "a model without per-row latent variables"
            raise UnsupportedError.of(self.name, wanted, "bnn.rows in the model", "NUTS")
        # A plain model of a system has no special priors.
        for site in program.latents if program.language else ():
            if site.family in SPECIAL and site.family not in self.serves_priors:
                wanted = "a prior that this method knows the meaning of"
                raise UnsupportedError.of(f"{self.name}, site {site.name!r}", wanted, *SPECIAL[site.family])

    def _dtype(self, chosen: Any, device: str) -> str:
        if self.dtype != "auto":
            return self.dtype
        with chosen.session("float64", device) as where:
            return "float32" if where.startswith("cuda") else "float64"

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters as plain values, for manifests and attributes.

        Returns
        -------
        dict
            Name of the field to a value that JSON can hold (see `plain`).
        """
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


def _checked_targets(
    program: Program, y: np.ndarray, text: tuple[Any, ...] | None
) -> tuple[np.ndarray, tuple[Any, ...] | None]:
    """Targets as the likelihood takes them, with classes 0..K-1, and the original labels if they were different."""
    if program.likelihood.task == "regression":
        if text is not None:
            got = f"text, such as {text[0]!r}"
            raise InputError.of("y", "numbers, for a regression", got, "a model of classes")
        y = y.astype(np.float64)
    else:
        classes = program.classes(y)
        if text is None:
            y, text = checks.labels_from_one(y, classes)
        elif len(text) > 1 and len(text) != classes:
            wanted = f"{classes} different labels, as many as the model has classes"
            got = f"{len(text)}: {', '.join(map(repr, text[:10]))}"
            raise InputError.of("y", wanted, got, "a model with as many classes")
        if text is not None:
            checks.warn_of_labels(text)
        y = labels(program, y)
    program.likelihood.check_values(y)
    return y, text


def labels(program: Program, y: np.ndarray) -> np.ndarray:
    """Checked class labels 0..K-1, (N,) or (N, 1); a Bernoulli target is a float in both systems."""
    bernoulli = program.likelihood.family == "Bernoulli"
    single = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    checked = checks.check_labels(single, program.classes(single)).reshape(y.shape)
    return checked.astype(np.float64) if bernoulli else checked


class _Begun(BaseException):
    """Raised at the first computation of a fit. Not an `Exception`, so that error handlers do not catch it."""


class _DryRun(Silent):
    """The progress of a fit that stops before its first computation. Fits within the fit get it, too, and stop."""

    def task(self, title: object, total: int) -> NoReturn:
        raise _Begun


def plain(value: Any) -> Any:
    """A value that JSON can hold: the name and settings of a method, the `repr` of any other object."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Method):
        return {"method": value.name, **value.settings()}
    return repr(value)


def versions(*more: str) -> dict[str, str]:
    """Versions of this library, of the packages whose arithmetic a posterior depends on, and of `more` packages.

    A package that is not installed has "not installed".
    """
    packages = ("ppl-bnn", "numpy", "jax", "numpyro", "torch", "pyro-ppl", "arviz", *more)
    found: dict[str, str] = dict.fromkeys(packages, "not installed")
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


class Stopwatch:
    """Seconds since the object was created; call it to read them."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start
