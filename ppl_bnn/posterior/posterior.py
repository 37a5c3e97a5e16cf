"""A posterior: a program, an approximation, and a record of the fit.

It draws, predicts and exports. All results are NumPy arrays, because a posterior outlives the session, the device and
the system that made it. Draws on demand come from a seed that is a hash of their purpose (`site_seed`), so `draws`, the
exported tree and the predictions agree, and two purposes never share a stream of random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy

from ppl_bnn.backends.native import named_inputs
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.protocol import Model
from ppl_bnn.backends.systems import system
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import map_data, row_count, rows_at, site_seed
from ppl_bnn.core.errors import InputError, UnsupportedError, unknown_name
from ppl_bnn.core.notebook.html import Folded, Listing, card, in_words
from ppl_bnn.posterior import registered
from ppl_bnn.posterior.approximation import Approximation, Chains, Draws, flat_draws, per_draw
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.prediction.prediction import JointPrediction, Prediction
from ppl_bnn.prediction.standardisation import Standardisation

if TYPE_CHECKING:
    from ppl_bnn.posterior.function_draws import FunctionDraws

IID_DRAWS = 1000
# Kinds of prediction that are made of draws of the predictor; the others approximate an average over it.
DRAWN = ("linearised", "sampled")
MEMORY = 2**28


@dataclass
class Posterior:
    """A fitted model. Build one with `bnn.fit`.

    A posterior can be pickled if its model can be imported. Compiled programs belong to a process and are left out.

    Parameters
    ----------
    model : Model
        The fitted model.
    language : bool
        Whether the model is written in the language of the library.
    observed : str
        Name of the observed site.
    inputs : array or dict of arrays
        Training inputs, in the units of the fit.
    targets : ndarray
        Training targets, in the units of the fit.
    approximation : Approximation
        The result of the method.
    info : FitInfo
        Record of the fit.
    statistics : dict of str to ndarray
        (chain, draw) arrays under ArviZ's names.
    standardisation : Standardisation, optional
        The units of a fit with ``standardise=True``. Predictions are in original units.
    feature_names, class_names : tuple of str, optional
        Names of the features and of the classes.
    labels : tuple, optional
        The labels in the data of the classes 0..K-1 in `targets`, where they were text or numbers from 1.
    programs : dict
        Compiled programs of this process, by device; made when needed.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.Laplace(), standardise=True)
    >>> posterior.kind, posterior.shape, posterior.draws["output.weight"].shape
    ('iid', (1, 1000), (1, 1000, 10, 1))
    >>> posterior.predict(table.x[:5]).interval(0.9)[0].shape
    (5,)
    """

    model: Model
    language: bool
    observed: str
    inputs: Any
    targets: np.ndarray
    approximation: Approximation
    info: FitInfo
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    standardisation: Standardisation | None = None
    feature_names: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None
    labels: tuple[Any, ...] | None = None
    programs: dict[str, Program] = field(default_factory=dict, repr=False)

    # -- properties

    @property
    def kind(self) -> str:
        """Kind of the approximation: "chains", "iid" or "point"."""
        return self.approximation.kind

    @property
    def task(self) -> str:
        """Task of the model: "regression" or "classification"."""
        return self.with_problem(lambda problem: problem.program.likelihood.task)

    @property
    def _flat_draws(self) -> dict[str, np.ndarray]:
        """`unconstrained_draws` with one leading axis, chain after chain."""
        return flat_draws(self.unconstrained_draws)

    @property
    def log_evidence(self) -> float:
        """Log evidence log p(D) as estimated by the method, in the units of the fit.

        Raises
        ------
        UnsupportedError
            If the method does not estimate it.
        """
        known = "log_evidence" in self.info.figures
        UnsupportedError.check(known, "log_evidence", "an evidence", self.info.method, "Laplace()")
        return self.info.figures["log_evidence"]

    @property
    def shape(self) -> tuple[int, int]:
        """(chains, draws) of `draws`: all stored draws, or 1000 if draws are made on demand."""
        if isinstance(self.approximation, Chains):
            return self.approximation.shape
        on_demand = 1 if self.kind == "point" else IID_DRAWS
        return 1, self.approximation.stored_count or on_demand

    @property
    def target(self) -> str:
        """Distribution of draws and weights if it is not the posterior: `info.target`, and "stacked" with weights."""
        stacked = "" if self.weights is None else "stacked"
        return "; ".join(text for text in (self.info.target, stacked) if text)

    @property
    def weights(self) -> np.ndarray | None:
        """Stacking weights (K,) of the chains or members, summing to 1. None if all are equal."""
        return self.approximation.weights

    @property
    def draw_weights(self) -> np.ndarray | None:
        """Weights of `draws`, flattened ``(chains * draws,)``, summing to 1. None if all are equal.

        Each component shares its weight equally among its draws. Draws made on demand come from the weighted mixture
        and have equal weights.
        """
        held = self.approximation.stored_count
        return None if self.weights is None or held is None else per_draw(self.weights, held)

    def __repr__(self) -> str:
        chains, draws = self.shape
        name = getattr(getattr(self.model, "func", self.model), "__name__", "model")
        stacked = "" if self.weights is None else f" of {len(self.weights)} stacked parts"
        what = f"{self.kind}, {chains} x {draws} draws{stacked}, {self.info.run_seconds:.1f} s"
        return f"Posterior({name} by {self.info.method} in {self.info.ppl}: {what})"

    def _repr_html_(self) -> str:
        """How it was fitted; its sites, settings and figures on a click."""
        info, approximation = self.info, self.approximation
        facts = {
            "data": f"{row_count(self.inputs)} rows, inputs {checks.describe_inputs(self.inputs)} each",
            "seed": info.seed,
            "computed in": f"{info.dtype} on {info.device}",
            "units of the fit": "of the data" if self.standardisation is None else "standardised",
            "target": self.target or "the posterior",
        }
        # Some approximations have shapes only once they have drawn, which may take long.
        known = isinstance(approximation, Chains) or approximation.has_centre
        u = approximation.centre() if known else {}
        rows = [(name, " x ".join(map(str, np.shape(value))) or "1") for name, value in u.items()]
        sites = Listing("", ("site", "unconstrained shape"), rows, words=2)
        settings = {name: in_words(value) for name, value in info.settings.items()}
        figures = {name: f"{value:.6g}" for name, value in info.figures.items()}
        folded = {"Sites": sites if rows else "", "Settings": settings, "Figures of the fit": figures}
        parts = [Folded(name, [part]) for name, part in folded.items()]
        return card(repr(self), facts, info.warnings, *parts)

    def __getstate__(self) -> dict[str, Any]:
        from ppl_bnn.posterior.storage import check_importable

        check_importable(self.model)
        return {**self.__dict__, "programs": {}}

    @cached_property
    def unconstrained_draws(self) -> dict[str, np.ndarray]:
        """Draws of the unconstrained coordinates u, name -> ``(chain, draw, *shape of u)``, the same at every call."""
        if isinstance(self.approximation, Chains):
            return self.approximation.u
        if self.approximation.stored_count is not None:
            u = self.approximation.stored_draws()
        else:
            u = self._fresh_draws(math.prod(self.shape))
        return {name: value.reshape(*self.shape, *value.shape[1:]) for name, value in u.items()}

    def _fresh_draws(self, count: int) -> dict[str, np.ndarray]:
        """Draws of u on demand, the same at every call."""
        rng = np.random.default_rng(site_seed("draws", self.info.seed))
        return self.approximation.draw(count, rng)

    @cached_property
    def draws(self) -> dict[str, np.ndarray]:
        """Draws of all latent sites and parameters in the program's coordinates, name -> ``(chain, draw, *shape)``.

        They do not depend on weights; see `draw_weights`. A Laplace approximation adds the weights that the program
        computes from other sites (scale times base), linearised about the mode, since their direct values would be far
        too wide. The deterministic sites of a NumPyro or Pyro model are included, at the training rows.
        """
        u = self._flat_draws
        w = self.with_problem(lambda problem: self.constrained_draws(problem, u))
        return {name: value.reshape(*self.shape, *value.shape[1:]) for name, value in w.items()}

    def constrained_draws(self, problem: Problem, u: Draws) -> dict[str, np.ndarray]:
        """The values in `draws` for draws of u with one leading axis."""
        w = problem.program.constrain_draws(u, problem.x, problem.y)
        w |= self.approximation.weight_draws(problem, u)
        return w | problem.program.deterministic_draws(u, problem.x, problem.y)

    # -- prediction

    def predict(
        self,
        x: Any,
        *,
        kind: str | None = None,
        draws: int | None = None,
        seed: int = 0,
        memory: int = MEMORY,
        device: str = "auto",
    ) -> Prediction:
        """The posterior predictive at new inputs, in the units of the data.

        Weights of chains or members apply to the mixture. With `draws` the draws are evenly spaced in cumulative weight
        and have equal weights.

        Parameters
        ----------
        x : array or dict of arrays
            Inputs.
        kind : str, optional
            One of `approximation.kinds`. The default is the first ("linearised" for Laplace, else "sampled").
            "propagated", for independent normal weights (mean-field SVI, IVON, a diagonal Laplace), takes means and
            variances through the network in one pass, without draws; see `language/moments.py`.
        draws : int, optional
            Number of draws, evenly spaced over chains. All by default.
        seed : int, default 0
            Seed of the random numbers.
        memory : int
            Bytes held in addition to inputs and result.
        device : str, default "auto"
            Device of the computation.

        Returns
        -------
        Prediction
            The posterior predictive.

        Raises
        ------
        InputError
            If `draws` is impossible, or given for a kind without draws.
        UnknownNameError
            For an unknown kind.
        """
        kind = self._kind(kind)
        possible, expected = draws is None or kind in DRAWN, f"None for kind={kind!r}, which has none"
        InputError.check(possible, "draws", expected, repr(draws), "draws=None")
        x = self.fit_inputs(x)

        def predict(problem: Problem) -> Prediction:
            names: dict[str, Any] = {"class_names": self.class_names, "labels": self.labels}
            closed = self.approximation.closed_form(problem, x, kind, memory) if draws is None else None
            if closed is not None:
                given = {name: each for name, each in names.items() if each is not None}
                return replace(closed, **given) if given else closed
            u = self.chosen_draws(draws)
            eta = self.approximation.predictor_draws(problem, u, x, kind, seed, memory)
            weights = self.draw_weights if draws is None else None
            with np.errstate(divide="ignore"):  # a part without weight has none
                log_weights = None if weights is None else np.log(weights)
            family, parameters = problem.program.likelihood.mixture_parameters(eta)
            return Prediction(family, parameters, log_weights, **names)

        return self.in_original_units(self.with_problem(predict, device))

    def in_original_units(self, prediction: Prediction) -> Prediction:
        """Convert a prediction from the units of the fit to those of the data."""
        return prediction if self.standardisation is None else self.standardisation.prediction(prediction)

    def predictor(
        self, x: Any, *, kind: str | None = None, draws: int | None = None, memory: int = MEMORY
    ) -> np.ndarray:
        """Predictor eta at inputs x, draw by draw, under the predictive that `predict` uses.

        It is in the units of the network (standardised, if the fit standardises).

        Parameters
        ----------
        x : array or dict of arrays
            Inputs.
        kind : str, optional
            A kind with draws, as in `predict`.
        draws : int, optional
            Number of draws. By default all draws are used and weights are ignored, as in `draws`.
        memory : int
            Bytes held in addition to inputs and result.

        Returns
        -------
        ndarray
            Shape (chain, draw, N, D); with `draws` (1, draws, N, D).

        Raises
        ------
        UnsupportedError
            For a kind without draws.
        """
        eta = self._predictor(self.chosen_draws(draws), self.fit_inputs(x), kind, memory)
        return eta.reshape(*(self.shape if draws is None else (1, len(eta))), *eta.shape[1:])

    def _predictor(self, u: Draws, x: Any, kind: str | None, memory: int) -> np.ndarray:
        chosen, draws_of = self.drawn_kind(kind), self.approximation.predictor_draws
        return self.with_problem(lambda problem: draws_of(problem, u, x, chosen, 0, memory))

    def joint(self, x: Any, *, draws: int | None = None, memory: int = MEMORY) -> JointPrediction:
        """Means and covariances over all rows of x together, in the units of the data.

        In closed form for a linearised Laplace approximation, else from draws of the network. A covariance of full rank
        needs at least as many draws as there are rows.

        Parameters
        ----------
        x : array or dict of arrays
            Inputs.
        draws : int, optional
            Number of draws.
        memory : int
            Bytes held in addition to inputs and result.

        Returns
        -------
        JointPrediction
            Mean and covariance.

        Raises
        ------
        UnsupportedError
            For a point, which has no spread.
        """
        if draws is None:
            inputs = self.fit_inputs(x)
            found = self.with_problem(lambda problem: self.approximation.joint(problem, inputs, memory))
            if found is not None:
                return self._joint_in_original_units(found)
        if self.kind == "point":
            raise UnsupportedError.of("joint", "a posterior with a spread", self.info.method, "Laplace()")
        weights = self.draw_weights if draws is None else None
        if self.task == "classification":
            eta = self.predictor(x, draws=draws, memory=memory)
            functions, noise = eta.reshape(math.prod(eta.shape[:2]), -1), None
        else:
            if draws is None and self.approximation.stored_count is None:
                draws = math.prod(self.shape)
            prediction = self.predict(x, kind=self.drawn_kind(None), draws=draws)
            functions = prediction.component_mean().reshape(prediction.draws, -1)
            noise = _noise_over_rows(prediction)
        # With weights these are the moments of the mixture itself, without a correction for the number of draws.
        degrees = 1 if weights is None else 0
        covariance = np.atleast_2d(np.cov(functions, rowvar=False, aweights=weights, ddof=degrees))
        mean = np.average(functions, axis=0, weights=weights)
        return JointPrediction(mean, covariance, None if noise is None else covariance + noise)

    def function_draws(self, count: int, *, seed: int = 0, kind: str | None = None) -> FunctionDraws:
        """Functions drawn from the posterior, which can be called at any inputs, as often as wanted.

        Parameters
        ----------
        count : int
            Number S of functions, at most that of stored draws, unless these have weights.
        seed : int, default 0
            The same seed gives the same functions.
        kind : str, optional
            A kind with draws, as in `predict`.

        Returns
        -------
        FunctionDraws
            A function of x that returns (S, N), or (S, N, K) for K outputs, in the units of the targets.

        Raises
        ------
        UnsupportedError
            The likelihood has no location, or the kind no draws.
        """
        from ppl_bnn.posterior.function_draws import FunctionDraws

        return FunctionDraws.of(self, count, seed, self.drawn_kind(kind))

    def log_likelihood(
        self, x: Any = None, y: Any = None, *, kind: str | None = None, u: Draws | None = None
    ) -> np.ndarray:
        """Log likelihood log p(y_i | x_i, draw) in original units, at the training rows by default.

        Each draw is evaluated by itself; weights are in `draw_weights`.

        Parameters
        ----------
        x, y : optional
            Other rows. Both or neither.
        kind : str, optional
            A kind with draws, as in `predict`.
        u : mapping of str to ndarray, optional
            Draws u with one leading axis. All draws by default.

        Returns
        -------
        ndarray
            Shape (chain, draw, N), or (S, N) with `u`.

        Raises
        ------
        InputError
            If only one of x and y is given.
        UnsupportedError
            For a kind without draws.
        """
        both = (x is None) == (y is None)
        InputError.check(both, "", "both x and y, or neither", "one of them", "log_likelihood(x, y)")
        if x is None:
            inputs, targets = self.inputs, self.original_targets
        else:
            inputs = self.fit_inputs(x)
            if self.labels is not None:
                y = checks.label_codes(np.asarray(y), self.labels)
            targets = checks.check_targets(y, row_count(inputs), column=self.targets.ndim == 2)
        prediction = self.prediction_of_draws(
            self._flat_draws if u is None else u, inputs, self.drawn_kind(kind)
        )
        # Targets in a single column are flattened.
        targets = targets.reshape(prediction.shape) if targets.shape[1:] == (1,) else targets
        values = prediction.component_log_prob(targets)
        return values.reshape(*self.shape, -1) if u is None else values

    def prediction_of_draws(self, u: Draws, x: Any, kind: str) -> Prediction:
        """The prediction of draws u of equal weight, in original units, at inputs x in the units of the fit."""

        def found(problem: Problem) -> Any:
            eta = self.approximation.predictor_draws(problem, u, x, kind, 0, MEMORY)
            return problem.program.likelihood.mixture_parameters(eta)

        return self.in_original_units(Prediction(*self.with_problem(found)))

    @property
    def original_inputs(self) -> Any:
        """The training inputs in the units of the data (up to rounding, if the fit standardises)."""
        units = self.standardisation
        return self.inputs if units is None else units.original_inputs(self.inputs)

    @property
    def original_targets(self) -> np.ndarray:
        """The training targets in the units of the data."""
        units = self.standardisation
        return self.targets if units is None else units.original_targets(self.targets)

    def log_joint(self, u: Draws | None = None) -> np.ndarray:
        """``log p(w, D) + log |dw/du|`` of draws u.

        Parameters
        ----------
        u : mapping of str to ndarray, optional
            Draws with one leading axis. All draws by default.

        Returns
        -------
        ndarray
            Shape (S,).
        """
        values = self._flat_draws if u is None else u
        return self.with_problem(lambda problem: problem.log_joint_draws(values))

    def log_prior(self, u: Draws | None = None) -> np.ndarray:
        """``log p(w) + log |dw/du|`` of draws u.

        Parameters
        ----------
        u : mapping of str to ndarray, optional
            Draws with one leading axis. All draws by default.

        Returns
        -------
        ndarray
            Shape (S,).
        """
        values = self._flat_draws if u is None else u
        return self.with_problem(lambda problem: problem.log_prior_draws(values))

    def log_q(self) -> np.ndarray | None:
        """Log density log q(u) of `unconstrained_draws`.

        Returns
        -------
        ndarray or None
            Shape (chain, draw). None for an approximation without a density.
        """
        value = self.approximation.log_prob(self._flat_draws)
        return None if value is None else value.reshape(self.shape)

    # -- export

    def distil(
        self,
        student: Model | None = None,
        x: Any = None,
        *,
        method: Any = None,
        kind: str | None = None,
        rows: int = 1000,
        seed: int = 0,
        progress: Any = None,
    ) -> Posterior:
        """Train one network, the student, to the predictive distribution of this posterior.

        It minimises the mean over inputs of KL(p(y | x) || q(y | x)), where p is `predict` of this posterior. It has
        the cost of one network, and does not split its uncertainty into epistemic and aleatoric.

        Parameters
        ----------
        student : Model, optional
            A model. By default `bnn.student_of(model)`, the same network with a wider end.
        x : optional
            Inputs for the student, of which a fifth is held out. By default the training rows are varied.
        method : MAP, optional
            The search for the weights.
        kind : str, optional
            Kind of the prediction, as in `predict`.
        rows : int, default 1000
            Number of inputs if there is no `x`. A quarter more is held out.
        seed, progress : optional
            As in `bnn.fit`.

        Returns
        -------
        Posterior
            A point. `info.figures` has the mean "divergence" at held-out inputs, in nats per row, and its standard
            error "divergence_se"; above 0.01 there is a warning. `info.settings["teacher"]` is the method of this one.

        Raises
        ------
        UnsupportedError, InputError
            For what `ppl_bnn.inference.distillation` cannot distil, and for a student of other targets.
        """
        options = {"method": method, "kind": kind, "rows": rows, "seed": seed, "progress": progress}
        return registered.call("distil")(self, student, x, **options)

    def to_datatree(self, x: Any = None, *, prior: bool = False) -> Any:
        """An ArviZ DataTree with all groups. `ppl_bnn.posterior.export` lists them.

        Parameters
        ----------
        x : optional
            New inputs, for the group of predictions.
        prior : bool, default False
            Whether to add draws from the prior.

        Returns
        -------
        xarray.DataTree
            The tree.
        """
        from ppl_bnn.posterior.export import posterior_datatree

        return posterior_datatree(self, x, prior=prior)

    def save(self, path: str | Path) -> Path:
        """Save the posterior to a folder, from which `bnn.load(path, model)` reads it.

        The folder holds a netCDF tree, safetensors and a JSON manifest.

        Parameters
        ----------
        path : str or Path
            The folder.

        Returns
        -------
        Path
            The folder.
        """
        from ppl_bnn.posterior.storage import save

        return save(self, path)

    def export_onnx(self, path: str | Path) -> Path:
        """Write one network, a mode or a student of `distil`, as an ONNX file.

        Its inputs are those of `predict`, of any number of rows. Its outputs, in the units of the data, are
        "probabilities" for classes, "mean" and "sd" for normal noise, else the parameters by their names in
        `Prediction`. They are compared with `predict` at the training inputs before the file is written.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        UnsupportedError, MissingFrameworkError
            For several draws, or what torch or onnxruntime cannot run; without the packages of the extra "onnx".
        """
        from ppl_bnn.posterior.onnx_export import export_onnx

        return export_onnx(self, path)

    # -- helpers

    def _kind(self, kind: str | None) -> str:
        if kind is None:
            return self.approximation.kinds[0]
        if kind not in self.approximation.kinds:
            raise unknown_name("kind of prediction", kind, self.approximation.kinds)
        return kind

    def drawn_kind(self, kind: str | None) -> str:
        """The kind of prediction of this name, or the default; refused if it has no draws."""
        kind = self._kind(kind)
        expected = f"{' or '.join(DRAWN)}, with draws"
        UnsupportedError.check(kind in DRAWN, "kind", expected, kind, "predict(x, kind=...)")
        return kind

    def fit_inputs(self, x: Any) -> Any:
        """Inputs in the units of the data, checked and converted to those of the fit."""
        flat = isinstance(self.inputs, np.ndarray) and self.inputs.ndim == 1
        x = checks.check_inputs(named_inputs(self.model, x), checks.describe_inputs(self.inputs), flat=flat)
        return x if self.standardisation is None else self.standardisation.inputs(x)

    def chosen_draws(self, count: int | None) -> dict[str, np.ndarray]:
        """Draws of u with one leading axis: all, or `count` of them, evenly spaced or made on demand."""
        if count is None:
            return self._flat_draws
        InputError.check(count >= 1, "draws", "a positive number", repr(count), "draws=1000")
        total, weights = math.prod(self.shape), self.draw_weights
        if self.kind == "iid" and (self.approximation.stored_count is None or count > total):
            return self._fresh_draws(count)
        if weights is not None:
            upto = np.cumsum(weights)
            index = np.searchsorted(upto, upto[-1] * (np.arange(count) + 0.5) / count, side="right")
        else:
            expected = f"at most the {total} there are"
            InputError.check(count <= total, "draws", expected, repr(count), "a longer fit")
            index = np.linspace(0, total - 1, count).round().astype(int)
        return {name: value[index] for name, value in self._flat_draws.items()}

    def _joint_in_original_units(self, joint: JointPrediction) -> JointPrediction:
        units = self.standardisation
        if units is None:
            return joint
        columns = self.with_problem(lambda problem: problem.program.likelihood.columns_with_units)
        if columns is None or units.y_mean is None or units.y_scale is None:
            return units.prediction(joint)
        return joint.rescale(units.y_mean[:columns], units.y_scale[:columns])

    def with_problem[Result](self, action: Callable[[Problem], Result], device: str | None = None) -> Result:
        """Run `action(problem)` in a session of the system that fitted this posterior, and return its result.

        `problem` is the program with its training data. The device is that of the fit by default.
        """
        chosen, info = system(self.info.ppl), self.info
        with chosen.session(info.dtype, info.device if device in (None, "auto") else device) as actual:
            streamed = bool(info.settings.get("stream"))
            rows = slice(1) if streamed else slice(None)
            x = map_data(chosen.asarray, rows_at(self.inputs, rows))
            y = chosen.asarray(np.asarray(self.targets[rows]))
            if actual not in self.programs:
                model = self.approximation.program(self.model)
                options: Any = {"language": self.language, "observed": self.observed}
                self.programs[actual] = Program.of(chosen, model, x, y, **options)
            data = (x, y, self.inputs, self.targets, info.seed, actual, info.dtype, info.data_hash)
            return action(Problem(self.programs[actual], *data, streamed))


def _noise_over_rows(prediction: Prediction) -> np.ndarray:
    """Cov(y) given the functions, (N K, N K): rows are independent, outputs of a row may be dependent."""
    if prediction.family != "MultivariateNormal":
        return np.diag(np.ravel(prediction.aleatoric))
    weights = prediction.weights.reshape(prediction.draws, -1, 1, 1)
    return np.asarray(scipy.linalg.block_diag(*np.sum(weights * prediction.law().covariance(), axis=0)))
