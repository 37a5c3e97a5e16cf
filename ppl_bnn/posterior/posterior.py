"""A posterior: a program, an approximation, and how the fit was made.

It draws, predicts and exports, and does not depend on the methods: it holds an `Approximation`, and whether that is a
set of chains, a guide or a Gaussian around a mode makes no difference here.

Everything that it returns is a NumPy array, because a posterior outlives the session, the device and the system that
made it. Draws of an approximation are made on demand, from a seed that is a hash of their purpose (`site_seed`): so
`draws`, the exported tree and the predictions agree, and two purposes never share a stream of random numbers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.backends.native import named_inputs
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.protocol import Model
from ppl_bnn.backends.systems import system
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import map_data, row_count, site_seed
from ppl_bnn.core.errors import InputError, UnsupportedError, message, unknown_name
from ppl_bnn.posterior.approximation import Approximation, Chains, flat_draws, per_draw
from ppl_bnn.prediction.prediction import JointPrediction, Prediction
from ppl_bnn.prediction.standardisation import Standardisation

IID_DRAWS = 1000
# Kinds of prediction that are made of draws of the predictor; the others approximate an average over it.
DRAWN = ("linearised", "sampled")
MEMORY = 2**28


@dataclass(frozen=True)
class FitInfo:
    """How a posterior came about.

    history: name -> (steps,) arrays such as losses. gradient_evaluations: of the log joint over all rows (a mini-batch
    counts as its share), or None where a system does not say. seconds are wall time, compilation apart. target: what
    was fitted, where it is not the posterior of the model (a tempered one, an approximate objective); `bnn.diagnose`
    computes p / q and k-hat for the posterior itself all the same.
    """

    method: str
    ppl: str
    seed: int
    dtype: str
    device: str
    compile_seconds: float
    run_seconds: float
    gradient_evaluations: float | None
    history: dict[str, np.ndarray] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    data_hash: str = ""
    warnings: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    target: str = ""


@dataclass
class Posterior:
    """A fitted model. Build one with `bnn.fit`.

    statistics: name -> (chain, draw) arrays under ArviZ's names. standardisation: the units of a fit with
    `standardise=True`; predictions are then in original units, whatever units the network works in. labels: what the
    classes 0..K-1 in `targets` were called in the data, where they were text or numbers from 1.

    It can be pickled where its model can be imported. What is compiled belongs to a process and is left out.
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
    _programs: dict[str, Program] = field(default_factory=dict, repr=False)

    # -- what it is

    @property
    def kind(self) -> str:
        """ "chains", "iid" or "point"."""
        return self.approximation.kind

    @property
    def task(self) -> str:
        """ "regression" or "classification"."""
        return self._with(lambda problem: problem.program.likelihood.task)

    @property
    def log_evidence(self) -> float:
        """log p(D) as the method estimates it, in the units of the fit.

        Raises
        ------
        UnsupportedError: a method that gives none.
        """
        if "log_evidence" not in self.info.figures:
            raise UnsupportedError(
                "log_evidence: " + message("a method with an evidence", self.info.method, "Laplace()")
            )
        return self.info.figures["log_evidence"]

    @property
    def shape(self) -> tuple[int, int]:
        """(chains, draws) of `draws`: as many as there are, or 1000 where they can be had on demand."""
        if isinstance(self.approximation, Chains):
            return self.approximation.shape
        held = self.approximation.draws_held
        if held is not None:
            return 1, held
        return (1, 1) if self.kind == "point" else (1, IID_DRAWS)

    @property
    def target(self) -> str:
        """What draws and weights are of, where it is not the posterior: `info.target`, and that they are stacked."""
        stacked = "" if self.weights is None else "stacked"
        return "; ".join(text for text in (self.info.target, stacked) if text)

    @property
    def weights(self) -> np.ndarray | None:
        """Weights (K,) of the chains or members, as stacking chose them, summing to 1; None: all equal."""
        return self.approximation.weights

    @property
    def draw_weights(self) -> np.ndarray | None:
        """Weights of `draws`, flattened (chains * draws,), summing to 1; None: all equal.

        Each component shares its weight equally among its draws. Where draws are made on demand they come from the
        weighted mixture already, and are equal.
        """
        held = self.approximation.draws_held
        return None if self.weights is None or held is None else per_draw(self.weights, held)

    def __repr__(self) -> str:
        chains, draws = self.shape
        name = getattr(self.model, "__name__", None) or getattr(
            getattr(self.model, "func", None), "__name__", "model"
        )
        stacked = "" if self.weights is None else f" of {len(self.weights)} stacked parts"
        return (
            f"Posterior({name} by {self.info.method} in {self.info.ppl}: {self.kind}, {chains} x {draws} draws"
            f"{stacked}, {self.info.run_seconds:.1f} s)"
        )

    def __getstate__(self) -> dict[str, Any]:
        check_importable(self.model)
        return {**self.__dict__, "_programs": {}}

    @cached_property
    def unconstrained_draws(self) -> dict[str, np.ndarray]:
        """Draws of u, name -> (chain, draw, *unconstrained shape). The same at every call."""
        if isinstance(self.approximation, Chains):
            return self.approximation.u
        chains, draws = self.shape
        if self.approximation.draws_held is not None:
            u = self.approximation.held()
        else:
            rng = np.random.default_rng(site_seed("draws", self.info.seed))
            u = self.approximation.draw(chains * draws, rng)
        return {name: value.reshape(chains, draws, *value.shape[1:]) for name, value in u.items()}

    @cached_property
    def draws(self) -> dict[str, np.ndarray]:
        """Draws of all latent sites and parameters as the program reads them, name -> (chain, draw, *shape).

        Weights do not change them: `draw_weights` says what each counts. A Laplace approximation adds the weights that
        the program computes from other sites (scale times base), linearised about the mode: multiplied out from the
        draws of these sites they would be far too wide. The deterministic
        sites of a model written in NumPyro or Pyro are among them, at the training rows.
        """
        chains, draws = self.shape
        u = flat_draws(self.unconstrained_draws)
        w = self._with(
            lambda problem: {
                **problem.program.constrain_draws(u, problem.x, problem.y),
                **self.approximation.weight_draws(problem, u),
                **problem.program.deterministic_draws(u, problem.x, problem.y),
            }
        )
        return {name: value.reshape(chains, draws, *value.shape[1:]) for name, value in w.items()}

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

        kind: one of `approximation.kinds`; the default is the first ("linearised" for Laplace, else "sampled").
        draws: how many to use (evenly spaced over chains; default all). memory: bytes held besides inputs and result.
        Where chains or members are weighted so is the mixture; with `draws` they are evenly spaced in cumulative weight
        and count the same.
        """
        kind = self._kind(kind)
        if draws is not None and kind not in DRAWN:
            raise InputError(
                "draws: "
                + message(f"no number of draws for kind={kind!r}, which has none", repr(draws), "draws=None")
            )
        x = self._inputs(x)

        def predict(problem: Problem) -> Prediction:
            closed = None
            if draws is None or kind not in DRAWN:
                closed = self.approximation.closed_form(problem, x, kind, memory)
            if closed is not None:
                named = self.class_names is not None or self.labels is not None
                return replace(closed, class_names=self.class_names, labels=self.labels) if named else closed
            u = self._chosen_draws(draws)
            eta = self.approximation.predictor_draws(problem, u, x, kind, seed, memory)
            family, parameters = problem.program.likelihood.mixture_parameters(eta)
            log_weights = None if draws is not None else self._log_draw_weights()
            return Prediction(
                family, parameters, log_weights, class_names=self.class_names, labels=self.labels
            )

        prediction = self._with(predict, device)
        return prediction if self.standardisation is None else self.standardisation.prediction(prediction)

    def predictor(
        self, x: Any, *, kind: str | None = None, draws: int | None = None, memory: int = MEMORY
    ) -> np.ndarray:
        """eta (chain, draw, N, D) at inputs x, draw by draw, under the predictive that `predict` uses.

        In the units of the network (standardised, where the fit standardises). With `draws`, (1, draws, N, D); without,
        weights are left out of it, as in `draws`.
        """
        kind, x = self._drawn_kind(kind), self._inputs(x)
        u = self._chosen_draws(draws)
        eta = self._with(lambda problem: self.approximation.predictor_draws(problem, u, x, kind, 0, memory))
        return eta.reshape(*(self.shape if draws is None else (1, len(eta))), *eta.shape[1:])

    def joint(self, x: Any, *, draws: int | None = None, memory: int = MEMORY) -> JointPrediction:
        """Means and covariances over all rows of x together, in the units of the data: what single rows do not tell.

        In closed form for a linearised Laplace approximation, else from draws of the network: at least as many draws as
        there are rows are needed for a covariance of full rank.
        """
        if draws is None:
            inputs = self._inputs(x)
            found = self._with(lambda problem: self.approximation.joint(problem, inputs, memory))
            if found is not None:
                return self._joint_in_original_units(found)
        if self.kind == "point":
            raise UnsupportedError(
                "joint: " + message("a posterior with a spread", f"{self.info.method}, a point", "Laplace()")
            )
        weights = self.draw_weights if draws is None else None
        if self.task == "classification":
            eta = self.predictor(x, draws=draws, memory=memory)
            functions, noise = eta.reshape(eta.shape[0] * eta.shape[1], -1), None
        else:
            if draws is None and self.approximation.draws_held is None:
                draws = self.shape[0] * self.shape[1]
            prediction = self.predict(x, kind=self._drawn_kind(None), draws=draws)
            functions = prediction.component_mean().reshape(prediction.draws, -1)
            noise = _noise_over_rows(prediction)
        # With weights the moments of the mixture itself: there is no count of draws to correct for.
        degrees = 1 if weights is None else 0
        covariance = np.atleast_2d(np.cov(functions, rowvar=False, aweights=weights, ddof=degrees))
        mean = np.average(functions, axis=0, weights=weights)
        return JointPrediction(mean, covariance, None if noise is None else covariance + noise)

    def log_likelihood(
        self,
        x: Any = None,
        y: Any = None,
        *,
        kind: str | None = None,
        u: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """log p(y_i | x_i, draw) in original units, (chain, draw, N); at the training rows by default.

        Of each draw by itself: weights are in `draw_weights`. Of draws u with one leading axis, (S, N).
        """
        if (x is None) != (y is None):
            raise InputError(message("both x and y, or neither", "one of them", "log_likelihood(x, y)"))
        units = self.standardisation
        if x is None:
            inputs = self.inputs
            targets = self.targets if units is None else units.original_targets(self.targets)
        else:
            inputs = self._inputs(x)
            if self.labels is not None:
                y = checks.label_codes(np.asarray(y), self.labels)
            targets = checks.check_targets(y, row_count(inputs), column=self.targets.ndim == 2)
        flat = flat_draws(self.unconstrained_draws) if u is None else u
        kind = self._drawn_kind(kind)
        eta = self._with(
            lambda problem: self.approximation.predictor_draws(problem, flat, inputs, kind, 0, MEMORY)
        )
        family, parameters = self._with(lambda problem: problem.program.likelihood.mixture_parameters(eta))
        prediction = Prediction(family, parameters)
        if targets.ndim == 2 and targets.shape[1] == 1:
            # A class per row is a class per row, in a column or not.
            targets = targets.reshape(prediction.shape)
        values = (prediction if units is None else units.prediction(prediction)).component_log_prob(targets)
        return values.reshape(*self.shape, -1) if u is None else values

    def log_joint(self, u: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """log p(w, D) + log |dw/du| of draws u with one leading axis (default: all draws), shape (S,)."""
        values = flat_draws(self.unconstrained_draws) if u is None else u
        return self._with(lambda problem: problem.log_joint_draws(values))

    def log_prior(self, u: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """log p(w) + log |dw/du| of draws u with one leading axis (default: all draws), shape (S,)."""
        values = flat_draws(self.unconstrained_draws) if u is None else u
        return self._with(lambda problem: problem.log_prior_draws(values))

    def log_q(self) -> np.ndarray | None:
        """log q(u) of `unconstrained_draws`, (chain, draw), for an approximation with a density."""
        value = self.approximation.log_prob(flat_draws(self.unconstrained_draws))
        return None if value is None else value.reshape(self.shape)

    # -- export

    def to_datatree(self, x: Any = None, *, prior: bool = False) -> Any:
        """An ArviZ DataTree with all groups; predictions at `x` and the prior on request.

        `ppl_bnn.posterior.export` lists the groups.
        """
        from ppl_bnn.posterior.export import posterior_datatree

        return posterior_datatree(self, x, prior=prior)

    def save(self, path: str | Path) -> Path:
        """Write netCDF tree, safetensors and a JSON manifest to the folder `path`, for `bnn.load(path, model)`."""
        from ppl_bnn.posterior.storage import save

        return save(self, path)

    # -- inside

    def _kind(self, kind: str | None) -> str:
        if kind is None:
            return self.approximation.kinds[0]
        if kind not in self.approximation.kinds:
            raise unknown_name("kind of prediction", kind, self.approximation.kinds)
        return kind

    def _drawn_kind(self, kind: str | None) -> str:
        kind = self._kind(kind)
        if kind not in DRAWN:
            raise UnsupportedError(
                message(f"a kind with draws, {' or '.join(DRAWN)}", kind, "predict(x, kind=...)")
            )
        return kind

    def _inputs(self, x: Any) -> Any:
        flat = isinstance(self.inputs, np.ndarray) and self.inputs.ndim == 1
        x = checks.check_inputs(named_inputs(self.model, x), checks.describe_inputs(self.inputs), flat=flat)
        return x if self.standardisation is None else self.standardisation.inputs(x)

    def _chosen_draws(self, count: int | None) -> dict[str, np.ndarray]:
        if count is None:
            return flat_draws(self.unconstrained_draws)
        if count < 1:
            raise InputError("draws: " + message("a positive number", repr(count), "draws=1000"))
        total = self.shape[0] * self.shape[1]
        if self.kind == "iid" and (self.approximation.draws_held is None or count > total):
            return self.approximation.draw(count, np.random.default_rng(site_seed("draws", self.info.seed)))
        weights = self.draw_weights
        if weights is not None:
            upto = np.cumsum(weights)
            index = np.searchsorted(upto, upto[-1] * (np.arange(count) + 0.5) / count, side="right")
        elif count > total:
            raise InputError(
                "draws: " + message(f"at most the {total} there are", repr(count), "fewer, or a longer fit")
            )
        else:
            index = np.linspace(0, total - 1, count).round().astype(int)
        return {name: value[index] for name, value in flat_draws(self.unconstrained_draws).items()}

    def _joint_in_original_units(self, joint: JointPrediction) -> JointPrediction:
        units = self.standardisation
        if units is None:
            return joint
        columns = self._with(lambda problem: getattr(problem.program.likelihood, "columns_with_units", None))
        if columns is None or units.y_mean is None or units.y_scale is None:
            return units.prediction(joint)
        return joint.rescale(units.y_mean[:columns], units.y_scale[:columns])

    def _log_draw_weights(self) -> np.ndarray | None:
        weights = self.draw_weights
        if weights is None:
            return None
        with np.errstate(divide="ignore"):  # a part without weight has none
            return np.log(weights)

    def _with(self, action: Any, device: str | None = None) -> Any:
        """Run `action(problem)` in a session of the system that fitted this posterior."""
        chosen = system(self.info.ppl)
        where = device or self.info.device
        if where == "auto":
            where = self.info.device
        with chosen.session(self.info.dtype, where) as actual:
            inputs, targets = self.inputs, self.targets
            streamed = bool(self.info.settings.get("stream"))
            if streamed:
                inputs, targets = map_data(lambda a: np.asarray(a[:1]), inputs), np.asarray(targets[:1])
            x, y = map_data(chosen.asarray, inputs), chosen.asarray(targets)
            if actual not in self._programs:
                model = self.approximation.program(self.model)
                self._programs[actual] = Program.of(
                    chosen, model, x, y, language=self.language, observed=self.observed
                )
            program = self._programs[actual]
            return action(
                Problem(
                    program,
                    x,
                    y,
                    self.inputs,
                    self.targets,
                    self.info.seed,
                    actual,
                    self.info.dtype,
                    self.info.data_hash,
                    streamed,
                )
            )


def check_importable(model: Model) -> None:
    """Refuse to pickle a function that another process could not import; cloudpickle sends such functions by value.

    Raises
    ------
    UnsupportedError: a lambda, a function inside a function, or one that was loaded by its location.
    """
    function = getattr(model, "func", model)
    name, home = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if name is None or not inspect.isfunction(function):
        return
    found: Any = sys.modules.get(home or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is function or _in_cloudpickle():
        return
    raise UnsupportedError(
        "pickle: "
        + message(
            "a posterior whose model can be imported, a function at the top of a module",
            f"{home}.{name}",
            "moving the model to a module, or posterior.save(folder) and bnn.load(folder, model)",
        )
    )


def _in_cloudpickle() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("cloudpickle"):
            return True
        frame = frame.f_back
    return False


def _noise_over_rows(prediction: Prediction) -> np.ndarray:
    """Cov(y) where the functions are known, (N K, N K): rows are independent, outputs of a row need not be."""
    if prediction.family != "MultivariateNormal":
        return np.diag(np.ravel(prediction.aleatoric))
    factor = prediction.parameters["scale_tril"]
    weights = prediction.weights.reshape(len(factor), -1, 1, 1)
    blocks = np.sum(weights * (factor @ np.swapaxes(factor, -1, -2)), axis=0)
    from scipy.linalg import block_diag

    return np.asarray(block_diag(*blocks))
