"""The interface of inference methods, and the steps that every fit takes before and after the method runs.

A method is a frozen dataclass of hyper-parameters. Users call `fit`, which is final. A subclass implements `run`.
"""

from __future__ import annotations

import contextvars
import dataclasses
import importlib.metadata
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self, final

import numpy as np

from ppl_bnn.backends.native import named_inputs
from ppl_bnn.backends.program import Problem, Program, threads_for
from ppl_bnn.backends.protocol import SYSTEMS, Model, resolve_device
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.backends.turns import told_outside
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import map_data, row_count
from ppl_bnn.core.errors import BNNError, InputError, UnsupportedError, unknown_name
from ppl_bnn.core.names import clean_all
from ppl_bnn.core.progress import Progress, resolve
from ppl_bnn.core.settings import check_settings
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.pretrained import is_network, weights_of
from ppl_bnn.language.distributions import SPECIAL
from ppl_bnn.posterior.approximation import Approximation
from ppl_bnn.posterior.posterior import FitInfo, Posterior
from ppl_bnn.prediction.standardisation import Standardisation


@dataclass
class Outcome:
    """What `Method.run` returns: the approximation and how it was computed (see `FitInfo`).

    Attributes
    ----------
    approximation : Approximation
        The approximation of the posterior.
    statistics : dict of str to ndarray
        Sampler statistics for the posterior.
    history : dict of str to ndarray
        Curves over the fit, such as losses.
    compile_seconds : float
        Wall time of compilation.
    run_seconds : float
        Wall time without compilation.
    gradient_evaluations : float or None
        Gradients of the log joint over all rows (a mini-batch counts as its share); None if unknown.
    warnings : tuple of str
        Warnings for the user.
    figures : dict of str to float
        Scalar results of the fit, such as "converged".
    target : str
        What was fitted, if it is not the posterior of the model; otherwise empty.
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


# A Method, a Posterior, a dict of arrays (constrained values), a trained network (see `pretrained`), or None.
Start = Any


@dataclass(frozen=True)
class Method(ABC):
    """A method of inference: its hyper-parameters, and `fit`.

    Parameters
    ----------
    ppl : {"numpyro", "pyro"}
        The probabilistic programming system that runs the fit. Keyword only.
    dtype : {"auto", "float64", "float32"}
        The floating type. "auto" is float64 on the CPU and float32 on CUDA. Keyword only.

    Attributes
    ----------
    systems : tuple of str
        The systems that the method supports.
    serves_local : bool
        Whether the method supports models with latent variables per row.
    finds_centre : bool
        Whether the approximation has a mode or a mean that another method can start from.
    serves_priors : frozenset of str
        The families of `distributions.SPECIAL` that the method supports.

    Notes
    -----
    An unknown keyword raises `UnknownNameError`. A subclass implements `run`, and may override `check`,
    `check_support`, `limitations`, `effort` and `streams`.
    """

    ppl: str = field(default="numpyro", kw_only=True)
    dtype: str = field(default="auto", kw_only=True)
    systems: ClassVar[tuple[str, ...]] = SYSTEMS
    serves_local: ClassVar[bool] = True
    # Whether the approximation has a mode or a mean that another method can take as the mode.
    finds_centre: ClassVar[bool] = True
    # The families of `distributions.SPECIAL` that the method supports.
    serves_priors: ClassVar[frozenset[str]] = frozenset()

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
            raise UnsupportedError.of(
                self.name, f"ppl in {self.systems}", repr(self.ppl), f"ppl={self.systems[0]!r}"
            )
        if self.dtype not in ("auto", "float64", "float32"):
            raise unknown_name("dtype", self.dtype, ("auto", "float64", "float32"))
        check_settings(self, self.name)
        self.check()

    def check(self) -> None:  # noqa: B027 - most methods have something to check, none must
        """Check the hyper-parameters; subclasses raise a named error for impossible values."""

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self).__name__

    @property
    def limitations(self) -> str:
        """Known weaknesses of the method in a sentence or two; empty if none are recorded."""
        return ""

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
        """Refuse what the method does not support, before anything is computed.

        `fit` calls this before `run`, inside the session. A subclass raises `UnsupportedError` or `InputError`.

        Parameters
        ----------
        problem : Problem
            The program and its data.
        """

    @abstractmethod
    def run(self, problem: Problem, progress: Progress) -> Outcome:
        """Fit a problem inside a session of its system; called by `fit`.

        A subclass refuses what it does not support in `check_support`. It reports the seconds of compilation separately
        from the seconds of running.

        Parameters
        ----------
        problem : Problem
            The program and its data.
        progress : Progress
            Receives reports of progress.

        Returns
        -------
        Outcome
            The approximation, and how it was computed.
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
        observed: str | None = None,
        standardise: bool = False,
        feature_names: tuple[str, ...] | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> Posterior:
        """Fit a model to data and return the posterior.

        Parameters
        ----------
        model : callable
            The model, a function `(x, y=None)`. A model written in NumPyro or Pyro runs in its own system, whatever
            `ppl` is.
        x : array or dict of arrays
            Inputs, shape (N, F). A model written in NumPyro or Pyro may have inputs of shape (N,), or a tuple of
            inputs, one for each of its parameters.
        y : array
            Targets, shape (N,) or (N, K); for a model written in NumPyro or Pyro also (N, 1). Class labels are 0..K-1.
            Labels that are text or 1..K are mapped to 0..K-1 in order, and predictions keep the original labels.
        seed : int, default 0
            From 0 to 2**31 - 1. The same seed on the same machine gives the same bits.
        device : str, default "auto"
            "auto", "cpu", "cuda" or "cuda:i".
        progress : bool, Progress or None
            True shows progress bars.
        observed : str or None
            The observed site of a plain NumPyro or Pyro model.
        standardise : bool, default False
            Whether to fit on standardised inputs and targets. Predictions stay in original units.
        feature_names : tuple of str or None
            Names of the columns of `x`.
        class_names : tuple of str or None
            Names of the classes.

        Returns
        -------
        Posterior
            The fitted model.

        Raises
        ------
        InputError
            The data, the seed or another argument is not valid. Raised before anything is compiled.
        ModelError
            The model is not valid. Raised before anything is compiled.
        UnsupportedError
            The method does not support the model. Raised before anything is compiled.
        DeviceError
            The device is not available. Raised before anything is compiled.
        """
        if not callable(model):
            raise InputError.of(
                "model", "a function (x, y=None)", type(model).__name__, "the model itself, not its name"
            )
        x = checks.check_inputs(named_inputs(model, x), flat=True)
        y, text = checks.text_labels(y)
        y = checks.check_targets(y, row_count(x), column=True)
        refusal = _refused_in_the_language(x, y)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
            raise InputError.of("seed", "a whole number from 0 to 2**31 - 1", repr(seed), "seed=0")
        resolve_device(device)
        try:
            spoken = written_in(model, x, y, self.ppl)
        except BNNError as error:
            raise (refusal or error) from error.__cause__
        if spoken == "language" and refusal is not None:
            raise refusal
        method = self
        if spoken not in ("language", self.ppl):
            if spoken not in self.systems:
                raise UnsupportedError.of(
                    self.name, f"a model for {self.systems}", f"a {spoken} model", "bnn.observe"
                )
            method = dataclasses.replace(self, ppl=spoken)
        try:
            return method._fit(
                model,
                x,
                y,
                int(seed),
                device,
                resolve(progress),
                observed,
                standardise,
                spoken == "language",
                clean_all(feature_names),
                clean_all(class_names),
                text,
            )
        except (TypeError, RuntimeError) as error:
            foreign = checks.foreign_function(error) if spoken == "language" else None
            if foreign is None:
                raise
            raise foreign from error

    @final
    def refusal(self, model: Model, x: Any, y: Any, **options: Any) -> BNNError | None:
        """The error that `fit` would raise before it begins, without fitting.

        Parameters
        ----------
        model, x, y
            As for `fit`. The model is traced, as in every fit.
        **options
            Keyword arguments of `fit`.

        Returns
        -------
        BNNError or None
            The error; None if the fit would begin.

        Notes
        -----
        This runs `fit` up to its first random draw or its first report of progress, so its answer is always that of
        `fit`. A method must therefore refuse before its first report of progress.
        """
        method = dataclasses.replace(self, checkpoint=None) if hasattr(self, "checkpoint") else self
        token = _ONLY_ASKED.set(True)
        try:
            with ignored():
                method.fit(model, x, y, **{**options, "progress": _BeginsAtOnce()})
        except _Begun:
            return None
        except BNNError as error:
            return error
        finally:
            _ONLY_ASKED.reset(token)
        return None

    def _fit(
        self,
        model: Model,
        x: Any,
        y: np.ndarray,
        seed: int,
        device: str,
        progress: Progress,
        observed: str | None,
        standardise: bool,
        language: bool,
        feature_names: tuple[str, ...] | None,
        class_names: tuple[str, ...] | None,
        named: tuple[Any, ...] | None,
    ) -> Posterior:
        digest = checks.data_hash(x, y)
        chosen: Any = system(self.ppl)
        if _ONLY_ASKED.get():
            chosen = _Unseeded(chosen)
        with chosen.session("float64", "cpu", threads=1):
            sketch = Program.of(
                chosen,
                model,
                map_data(chosen.asarray, x),
                chosen.asarray(y.astype(float)),
                language=language,
                observed=observed,
            )
        if sketch.has_local and not self.serves_local:
            raise UnsupportedError.of(
                self.name, "a model without per-row latent variables", "bnn.rows in the model", "NUTS"
            )
        self._check_priors(sketch)
        regression = sketch.likelihood.task == "regression"
        if regression and named is not None:
            raise InputError.of(
                "y", "numbers, for a regression", f"text, such as {named[0]!r}", "a model of classes"
            )
        if not regression:
            y, named = _coded(sketch, y, named)
            if named is not None and class_names is None:
                class_names = tuple(map(str, named))
        y = y.astype(np.float64) if regression else labels(sketch, y)
        if hasattr(sketch.likelihood, "check_values"):
            sketch.likelihood.check_values(y)
        standardisation = None
        if standardise:
            with_units = regression and getattr(sketch.likelihood, "standardises", True)
            columns = getattr(sketch.likelihood, "columns_with_units", None)
            standardisation = Standardisation.of(x, y, with_units, columns)
            x, y = standardisation.inputs(x), standardisation.targets(y)
        else:
            checks.warn_constant_columns(x)
        dtype = self._dtype(chosen, device)
        with chosen.session(dtype, device, threads_for(sketch.rows, sketch.parameter_count)) as where:
            given = (map_data(lambda a: a[:1], x), y[:1]) if self.streams else (x, y)
            data, targets = map_data(chosen.asarray, given[0]), chosen.asarray(given[1])
            program = Program.of(chosen, model, data, targets, language=language, observed=observed)
            problem = Problem(program, data, targets, x, y, seed, where, dtype, digest, self.streams)
            self.check_support(problem)
            outcome = self.run(problem, told_outside(progress, chosen.outside))
        info = FitInfo(
            method=self.name,
            ppl=self.ppl,
            seed=seed,
            dtype=dtype,
            device=where,
            compile_seconds=outcome.compile_seconds,
            run_seconds=outcome.run_seconds,
            gradient_evaluations=outcome.gradient_evaluations,
            history=outcome.history,
            settings=self.settings(),
            versions=versions(),
            data_hash=digest,
            warnings=outcome.warnings,
            figures=outcome.figures,
            target=outcome.target,
        )
        return Posterior(
            model=model,
            language=language,
            observed=program.observed,
            inputs=x,
            targets=y,
            approximation=outcome.approximation,
            info=info,
            statistics=outcome.statistics,
            standardisation=standardisation,
            feature_names=feature_names,
            class_names=class_names,
            labels=named,
            # A tuned posterior uses another program than the one that was fitted, and builds it on demand.
            _programs={where: program} if outcome.approximation.program(model) is model else {},
        )

    def _check_priors(self, program: Program) -> None:
        """Refuse special priors that the method does not support; a plain model of a system has none of them."""
        for site in program.latents if program.language else ():
            if site.family in SPECIAL and site.family not in self.serves_priors:
                prior, advice = SPECIAL[site.family]
                raise UnsupportedError.of(
                    f"{self.name}, site {site.name!r}",
                    "a prior that this method knows the meaning of",
                    prior,
                    advice,
                )

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


def _coded(
    program: Program, y: np.ndarray, named: tuple[Any, ...] | None
) -> tuple[np.ndarray, tuple[Any, ...] | None]:
    """Class labels as 0..K-1, and the original labels if they were different."""
    classes = program.classes(y)
    if named is None:
        y, named = checks.labels_from_one(y, classes)
    elif len(named) > 1 and len(named) != classes:
        raise InputError.of(
            "y",
            f"{classes} different labels, as many as the model has classes",
            f"{len(named)}: {', '.join(map(repr, named[:10]))}",
            "a model with as many classes",
        )
    if named is not None:
        checks.warn_of_labels(named)
    return y, named


def _refused_in_the_language(x: Any, y: np.ndarray) -> InputError | None:
    """The error that a model in the language raises for inputs and targets that a plain model may have, or None."""
    try:
        checks.check_inputs(x)
        checks.check_targets(y, row_count(x))
    except InputError as error:
        return error
    return None


def labels(program: Program, y: np.ndarray) -> np.ndarray:
    """Check class labels.

    Parameters
    ----------
    program : Program
        The program of the model.
    y : ndarray
        Labels 0..K-1, shape (N,) or (N, 1).

    Returns
    -------
    ndarray
        The labels in the shape of `y`. A Bernoulli target is a float in both systems.
    """
    bernoulli = getattr(program.likelihood, "family", type(program.likelihood).__name__) == "Bernoulli"
    single = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    checked = checks.check_labels(single, program.classes(single)).reshape(y.shape)
    return checked.astype(np.float64) if bernoulli else checked


# --- refusal: a fit that stops before its first computation ---------------------------------------

_ONLY_ASKED = contextvars.ContextVar("only asked", default=False)


class _Begun(BaseException):
    """Raised at the first computation of a fit. Not an `Exception`, so that error handlers do not catch it."""


def _begin(*_: Any, **__: Any) -> NoReturn:
    raise _Begun


class _BeginsAtOnce:
    """A progress object that stops the fit at its first task."""

    task = staticmethod(_begin)


class _Unseeded:
    """A system that stops the fit at its first random draw (such as a starting point from the prior).

    Everything else is passed through, because some methods look at the curvature of a prior, or at the linear maps of
    one row, to decide what to refuse.
    """

    seeds = staticmethod(_begin)

    def __init__(self, of: Any):
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def plain(value: Any) -> Any:
    """A value that JSON can hold; any other value by its `repr`.

    Parameters
    ----------
    value : object
        A plain value, a list or tuple of them, or a method (its name and settings).

    Returns
    -------
    object
        The plain value.
    """
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Method):
        return {"method": value.name, **value.settings()}
    return repr(value)


def versions() -> dict[str, str]:
    """Versions of this library and of the packages whose arithmetic a posterior depends on.

    Returns
    -------
    dict of str to str
        Package name to version, or to "not installed".
    """
    found = {}
    for package in ("ppl-bnn", "numpy", "jax", "numpyro", "torch", "pyro-ppl", "arviz"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def resolve_start(
    problem: Problem, start: Start, progress: Progress, count: int = 1
) -> list[dict[str, np.ndarray]]:
    """Starting points for a problem.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    start : Method, Posterior, mapping, network or None
        - None: draws from the prior.
        - A method: it is fitted first, once per starting point, each with its own seed.
        - A posterior: draws from it, or its point if it is one.
        - A dict of constrained values, site to array. It may name some sites only (the values of `Point` weights, for
          example); the other sites are drawn from the prior.
        - A trained network (a torch module, Flax parameters): a dict of weights, as `pretrained.weights_of` finds them.
    progress : Progress
        Receives the progress of a method that is fitted first.
    count : int, default 1
        Number of starting points.

    Returns
    -------
    list of dict
        `count` dicts, site to array (NumPy) in unconstrained coordinates.

    Raises
    ------
    InputError
        A start of another type, a wrong shape, or a posterior of another model.
    UnknownNameError
        A site that the program does not have.
    """
    if isinstance(start, Method):
        fitted = (fitted_start(problem, start, progress, index) for index in range(count))
        return [_matching(problem, posterior.approximation.centre()) for posterior in fitted]
    if isinstance(start, Posterior):
        if start.kind == "point":
            return [_matching(problem, start.approximation.centre())] * count
        u = start.approximation.draw(count, np.random.default_rng(problem.seed))
        return [
            _matching(problem, {name: value[index] for name, value in u.items()}) for index in range(count)
        ]

    def from_prior() -> list[dict[str, np.ndarray]]:
        prior = problem.program.prior_draws(problem.x, problem.y, problem.seed, count)
        return [{name: value[index] for name, value in prior.items()} for index in range(count)]

    if start is None:
        return from_prior()
    if is_network(start, problem):
        start = weights_of(start, problem)
    if not isinstance(start, Mapping):
        raise InputError.of(
            "start",
            "a method, a posterior, a dict of arrays or a network of torch, Flax or Equinox",
            type(start).__name__,
            "start=MAP()",
        )
    sites = problem.program.sites
    for name, value in start.items():
        if name not in sites:
            raise unknown_name("site", name, sites)
        if np.shape(value) != sites[name].shape:
            raise InputError.of(
                f"start[{name!r}]",
                f"shape {sites[name].shape}",
                f"shape {np.shape(value)}",
                "the shape of the site",
            )
    if set(start) == set(sites):
        w = {name: np.asarray(value, float) for name, value in start.items()}
        return [problem.program.unconstrain(w, problem.x, problem.y)] * count
    filled = []
    for point in from_prior():
        w = problem.program.constrain_draws(
            {name: value[None] for name, value in point.items()}, problem.x, problem.y
        )
        w = {name: value[0] for name, value in w.items()} | {
            name: np.asarray(value, float) for name, value in start.items()
        }
        filled.append(problem.program.unconstrain(w, problem.x, problem.y))
    return filled


def fitted_start(problem: Problem, start: Method, progress: Progress, index: int = 0) -> Posterior:
    """Fit the method `start` to the data of a problem.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    start : Method
        The method.
    progress : Progress
        Receives its progress.
    index : int, default 0
        Added to the seed of the problem.

    Returns
    -------
    Posterior
        The fit.
    """
    return start.fit(
        problem.program.model,
        problem.inputs,
        problem.targets,
        seed=(problem.seed + index) % 2**31,
        device=problem.device,
        progress=progress,
        observed=None if problem.program.language else problem.program.observed,
    )


def central_start(problem: Problem, start: Posterior) -> dict[str, np.ndarray]:
    """The centre of a posterior, for methods that need one point and cannot use a draw.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    start : Posterior
        A posterior of the same model.

    Returns
    -------
    dict of str to ndarray
        The centre in unconstrained coordinates.

    Raises
    ------
    UnsupportedError
        A posterior without a centre.
    InputError
        A posterior of another model.
    """
    refuse_without_centre(start)
    return _matching(problem, start.approximation.centre())


def refuse_without_centre(start: Any) -> None:
    """Refuse a posterior or a method whose approximation has no mode or mean to use as the mode.

    Parameters
    ----------
    start : object
        A start; only a posterior or a method without a centre is refused.

    Raises
    ------
    UnsupportedError
        The start has no centre.
    """
    if isinstance(start, Posterior):
        good, got = start.approximation.has_centre, start.info.method
    else:
        good, got = getattr(start, "finds_centre", True), getattr(start, "name", "")
    if not good:
        raise UnsupportedError.of(
            "start",
            "a start with a centre, to be taken as the mode",
            f"{got}, whose draws, members or components have none in common",
            "start=MAP(), or optimise=True, which begins at a draw and finds the mode",
        )


def missing_sites(problem: Problem, start: Start) -> list[str]:
    """The sites that a start does not name: a network has no noise, and a dict may leave sites out.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    start : Start
        As for `resolve_start`.

    Returns
    -------
    list of str
        Names of sites; empty for a start that is neither a network nor a dict.
    """
    if is_network(start, problem):
        start = weights_of(start, problem)
    elif not isinstance(start, Mapping):
        return []
    return [name for name in problem.program.sites if name not in start]


def _matching(problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Check that `u` has the sites and shapes of the program."""
    wanted = {name: site.unconstrained_shape for name, site in problem.program.sites.items()}
    got = {name: np.shape(value) for name, value in u.items()}
    if wanted != got:
        raise InputError.of("start", f"sites {wanted}", f"sites {got}", "a posterior of the same model")
    return dict(u)


class Stopwatch:
    """Seconds since the object was created; call it to read them."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start
