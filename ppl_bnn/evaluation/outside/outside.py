"""Estimators from outside the library as rows of a comparison: scikit-learn's, and those with its interface."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system, written_in
from ppl_bnn.core import checks
from ppl_bnn.core.arrays import map_data, row_count, rows_at
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.warning_filters import recorded
from ppl_bnn.evaluation.outside import known, predictive
from ppl_bnn.inference.method import Stopwatch, versions
from ppl_bnn.posterior.fit_info import FitInfo
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.standardisation import Standardisation

# Rows with which a model is traced for its likelihood.
_FEW = 10


@dataclass(frozen=True)
class Outside:
    """An estimator from outside the library, for `compare` and grids.

    Its row has scores, intervals and times as those of methods do. It is no approximation of the posterior, so
    diagnostics, leave-one-out and gaps to a reference are blank. Of the model, only the kind of target counts.

    Parameters
    ----------
    estimator : object or str
        An estimator with scikit-learn's interface. It is copied, and each `random_state` of None becomes the seed of
        the fit. Or a name: "gp", "bayesian-ridge", "boosting", "forest" or "mlp-ensemble", all of scikit-learn;
        "lightgbm" or "catboost" where they are installed.
    predict : callable, optional
        A function (fitted estimator, x) that returns a `Prediction`, in place of the rules in Notes.
    quantiles : int, optional
        For quantile regression: number M of levels (m - 1/2) / M. `predict` takes them as `quantiles=`, or returns M
        columns (the loss `MultiQuantile` of CatBoost), or there is one fit for each level, which is the parameter
        `quantile`, or `alpha` with `loss="quantile"`.

    Raises
    ------
    InputError, UnknownNameError, MissingFrameworkError
        An argument that is not valid; a name of a package that is not installed.

    Notes
    -----
    The predictive distribution at an input x is

    - for classes, what `predict_proba` returns;
    - for numbers, N(mean, std^2) where `predict` has `return_std`;
    - otherwise the values v_m(x) of the M members of a forest or a bagging ensemble, the M quantiles in increasing
      order, or the one value of any other estimator, smoothed:

          p(y | x) = (1/M) sum_m N(y; v_m(x), h^2).

      The bandwidth h maximises the log score of the training rows, each predicted by a fit that has not seen it (five
      folds). For M = 1 it is the root mean square of their errors. The spread of members counts as epistemic
      uncertainty, that of quantiles as aleatoric.

    Counts, times, censored values and several outputs are refused: their log scores are not comparable with those of
    a density of one real number.

    References
    ----------
    Meinshausen 2006 (quantile forests); Chernozhukov, Fernandez-Val and Galichon 2010 (quantiles in increasing order).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> from sklearn.linear_model import BayesianRidge
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> train, test = ((table.x[rows], table.y[rows]) for rows in table.split(seed=0))
    >>> methods = {"laplace": bnn.Laplace(), "ridge": bnn.Outside(BayesianRidge())}
    >>> result = bnn.compare(model, train, test, methods, standardise=True)
    >>> result.table["ppl"].tolist()
    ['numpyro', 'outside']
    """

    estimator: Any
    predict: Callable[[Any, Any], Prediction] | None = None
    quantiles: int | None = None
    # In place of a system that runs it.
    ppl: ClassVar[str] = "outside"

    def __post_init__(self) -> None:
        if isinstance(self.estimator, str):
            known.estimator(self.estimator)
        elif isinstance(self.estimator, type) or not callable(getattr(self.estimator, "fit", None)):
            expected, advice = (
                "an estimator with `fit` and `predict`, or a name",
                "GaussianProcessRegressor()",
            )
            raise InputError.of("Outside", expected, repr(self.estimator), advice)
        good = self.predict is None or callable(self.predict)
        InputError.check(good, "Outside", "predict, a function", repr(self.predict), "predict=None")
        good = self.quantiles is None or (type(self.quantiles) is int and self.quantiles > 1)
        InputError.check(good, "Outside", "quantiles, at least 2", repr(self.quantiles), "quantiles=9")
        named = isinstance(self.estimator, str)
        if named and not (self.predict is None and self.quantiles is None):
            expected, advice = "no predict or quantiles beside a name", "the estimator itself"
            raise InputError.of("Outside", expected, f"one with {self.estimator!r}", advice)
        if self.quantiles is not None:
            predictive.quantiles_by(self.estimator)

    @property
    def name(self) -> str:
        """Name of the estimator, or of its class."""
        return self.estimator if isinstance(self.estimator, str) else type(self.estimator).__name__

    @property
    def packages(self) -> tuple[str, ...]:
        """The distributions whose versions its results depend on."""
        if isinstance(self.estimator, str):
            return (known.estimator(self.estimator).package,)
        module = type(self.estimator).__module__.partition(".")[0]
        return tuple(sorted(set(importlib.metadata.packages_distributions().get(module, ()))))

    def fit(
        self,
        model: Callable[..., Any],
        x: Any,
        y: Any,
        *,
        seed: int = 0,
        observed: str | None = None,
        standardise: bool = False,
        class_names: tuple[str, ...] | None = None,
        feature_names: tuple[str, ...] | None = None,
        device: str = "cpu",
        progress: Any = None,
    ) -> FittedOutside:
        """Fit a copy of the estimator.

        Parameters
        ----------
        model : callable
            The model that it is compared with, for the kind of target.
        x, y : array_like
            Training rows, shapes (N, F) and (N,).
        seed : int
            For the estimator, and for the folds.
        observed : str, optional
            As for the `fit` of a method.
        standardise : bool
            Whether to fit on standardised inputs and targets.
        class_names : tuple of str, optional
            Names of the classes.
        feature_names, device, progress : optional
            Not used: those of the `fit` of a method, in whose place this is called.

        Returns
        -------
        FittedOutside
            What predicts.

        Raises
        ------
        UnsupportedError
            Inputs that are no table, or targets that are not one number or class per row.
        """
        x = checks.check_inputs(x)
        y = checks.check_targets(y, row_count(x))
        family, classes = _kind(self.name, model, x, y, observed)
        watch = Stopwatch()
        standardisation = Standardisation.of(x, y, not classes) if standardise else None
        rows: Any = x
        targets = y.astype(int) if classes else y.astype(float)
        if standardisation is not None:
            rows, targets = standardisation.inputs(x), standardisation.targets(targets)
        chosen = self._built("classification" if classes else "regression", x.shape[1])
        with recorded() as caught:
            predict = chosen._fitted(rows, targets, seed, family, classes)
        seconds = watch()
        texts = (" ".join(str(each.message).split()) for each in caught)
        settings = getattr(chosen.estimator, "get_params", dict)()
        info = FitInfo(
            method=self.name,
            ppl=self.ppl,
            seed=seed,
            dtype="float64",
            device="cpu",
            compile_seconds=0.0,
            run_seconds=seconds,
            gradient_evaluations=None,
            settings={name: repr(value) for name, value in settings.items()},
            versions=versions(*self.packages),
            data_hash=checks.data_hash(x, y),
            warnings=tuple(dict.fromkeys(texts)),
        )
        return FittedOutside(predict, info, standardisation, class_names)

    def _built(self, task: str, columns: int) -> Outside:
        """This, with the estimator that its name stands for."""
        if not isinstance(self.estimator, str):
            return self
        estimator, settings = known.estimator(self.estimator).build(self.estimator, task, columns)
        return Outside(estimator, **settings)

    def _fitted(
        self, x: np.ndarray, y: np.ndarray, seed: int, family: str, classes: int
    ) -> predictive.Predict:
        given = self.predict
        if given is not None:
            fitted = predictive.fitted_copy(self.estimator, x, y, seed)
            return lambda rows: given(fitted, rows)
        if classes:
            return predictive.of_classes(self.estimator, x, y, seed, family, classes)
        return predictive.of_numbers(self.estimator, x, y, seed, self.quantiles)


@dataclass(frozen=True)
class FittedOutside:
    """A fitted estimator from outside, which predicts in original units, and the record of its fit."""

    predictive: predictive.Predict
    info: FitInfo
    standardisation: Standardisation | None = None
    class_names: tuple[str, ...] | None = None

    def predict(self, x: Any, *, seed: int = 0, device: str = "cpu") -> Prediction:
        """The prediction at inputs in original units; it has no draws to seed, and no device."""
        rows = x if self.standardisation is None else self.standardisation.inputs(x)
        found = self.predictive(rows)
        good = isinstance(found, Prediction) and found.rows == len(rows)
        expected, advice = f"a Prediction of {len(rows)} rows", "bnn.Prediction(family, parameters)"
        InputError.check(good, "Outside, predict", expected, repr(found), advice)
        if self.standardisation is not None:
            found = self.standardisation.prediction(found)
        return found if self.class_names is None else replace(found, class_names=self.class_names)


def _kind(name: str, model: Any, x: Any, y: np.ndarray, observed: str | None) -> tuple[str, int]:
    """The family of labels and their number (0 for numbers); what cannot be served is refused."""
    advice = "comparing without it"
    table = not isinstance(x, Mapping) and x.ndim == 2
    UnsupportedError.check(table, name, "inputs as a table (N, F)", "others", advice)
    few = slice(_FEW)
    written = written_in(model, rows_at(x, few), y[few], "numpyro")
    chosen: Any = system("numpyro" if written == "language" else written)
    with chosen.session("float64", "cpu"):
        arrays = map_data(chosen.asarray, rows_at(x, few)), chosen.asarray(y[few].astype(float))
        program = Program.of(chosen, model, *arrays, language=written == "language", observed=observed)
        likelihood = program.likelihood
        classes = program.classes(y) if likelihood.task == "classification" else 0
    if classes:
        checks.check_labels(y, classes)
    good = y.ndim == 1 and (classes or (likelihood.standardises and likelihood.columns_with_units is None))
    expected = "one class, or one real number, per row"
    UnsupportedError.check(bool(good), name, expected, f"{likelihood.family} targets", advice)
    return "Bernoulli" if likelihood.family == "Bernoulli" else "Categorical", classes
