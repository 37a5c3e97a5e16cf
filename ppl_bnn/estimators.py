"""Scikit-learn estimators `BNNRegressor` and `BNNClassifier`, for pipelines and searches.

The model and the method are parameters of an estimator, so that a grid search may run over both:

    GridSearchCV(BNNRegressor(), {"method": ["map", "laplace", bnn.SVI(steps=500)]}, scoring="r2")
    GridSearchCV(BNNRegressor(method="svi"), {"method__steps": [500, 2000], "model__width": [10, 50]})

`method__steps` is a field of the method and `model__width` a keyword argument of the model.

Inputs are tables. Targets are one number (or label) per row, or several numbers if the model has several outputs.
scikit-learn casts and ravels them, with its warnings, before the checks of the library.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ppl_bnn import zoo
from ppl_bnn.backends.protocol import Model
from ppl_bnn.backends.systems import written_in
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError, check_known
from ppl_bnn.evaluation.comparison.run import bind_classes
from ppl_bnn.inference.method import Method
from ppl_bnn.language.primitives import Handler, Message
from ppl_bnn.language.transforms import with_prior
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.zoo.files import keyword_only
from ppl_bnn.zoo.support import named

__all__ = ["BNNClassifier", "BNNRegressor"]


def _in_units_of_the_data(estimator: _Estimator) -> bool:
    expected, advice = "standardise=False", "scaling all data alike before the first call"
    InputError.check(not estimator.standardise, "partial_fit", expected, "standardise=True", advice)
    return True


class _RowWeights(Handler):
    """The weight of each row (N,) in the observation."""

    sees_maps = False

    def __init__(self, weight: Any):
        self.weight = weight

    def process(self, msg: Message) -> None:
        if msg.kind == "observe":
            given = msg.arguments["weight"]
            msg.arguments["weight"] = self.weight if given is None else self.weight * given


def _with_row_weights(model: Model, x: Mapping[str, Any], y: Any = None) -> Any:
    """`model` on the inputs x["x"], whose rows count x["weight"] times."""
    with _RowWeights(x["weight"]):
        return model(x["x"], y)


class _Estimator(BaseEstimator):
    """Common base of both estimators; they document the parameters."""

    _default: ClassVar[str]
    _task: ClassVar[str]
    posterior_: Posterior
    classes_: np.ndarray

    def __init__(
        self,
        model: Any = None,
        method: Any = "svi",
        *,
        model_arguments: Mapping[str, Any] | None = None,
        standardise: bool = True,
        random_state: Any = 0,
        device: str = "auto",
    ) -> None:
        self.model = model
        self.method = method
        self.model_arguments = model_arguments
        self.standardise = standardise
        self.random_state = random_state
        self.device = device

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters of this estimator.

        Parameters
        ----------
        deep : bool
            Whether to include fields of the method, as `method__steps`, and keyword arguments of the model that have a
            value, as `model__width`.

        Returns
        -------
        dict
            Name -> value.
        """
        found: dict[str, Any] = dict(super().get_params(deep=False))
        if deep:
            # Invalid models and methods raise in `fit`, as scikit-learn requires.
            for prefix, nested in (("method", self._method_fields), ("model", self._sizes)):
                with suppress(InputError, UnknownNameError):
                    found |= {f"{prefix}__{name}": value for name, value in nested().items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Set parameters, fields of the method and keyword arguments of the model, by the names of `get_params`.

        Parameters
        ----------
        **params
            Name -> value.

        Returns
        -------
        Self

        Raises
        ------
        UnknownNameError
            A parameter, field or argument that does not exist. It is a ValueError.
        """
        nested: dict[str, dict[str, Any]] = {"method": {}, "model": {}}
        plain = {}
        for name, value in params.items():
            outer, mark, inner = name.partition("__")
            if mark and outer in nested:
                nested[outer][inner] = value
            else:
                plain[name] = value
        if plain:
            super().set_params(**plain)
        if nested["method"]:
            method = self._chosen_method()
            check_known(f"field of {type(method).__name__}", nested["method"], self._method_fields())
            self.method = replace(method, **nested["method"])
        if nested["model"]:
            check_known("argument of the model", nested["model"], self._arguments())
            self.model_arguments = {**(self.model_arguments or {}), **nested["model"]}
        return self

    def _method_fields(self) -> dict[str, Any]:
        """The fields of the method and their values."""
        method = self._chosen_method()
        return {each.name: getattr(method, each.name) for each in fields(method) if each.init}

    def _arguments(self) -> dict[str, Any]:
        """The keyword-only arguments of the model and their defaults."""
        return keyword_only(self._unbound()[0])

    def _sizes(self) -> dict[str, Any]:
        """The keyword arguments of the model that have a value: the given one, else the default."""
        # Anything else is refused by `fit`.
        given = self.model_arguments if isinstance(self.model_arguments, Mapping) else {}
        values = {name: given.get(name, default) for name, default in self._arguments().items()}
        return {name: value for name, value in values.items() if value is not inspect.Parameter.empty}

    def predict_distribution(self, X: Any) -> Prediction:
        """The predictive distribution at X.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).

        Returns
        -------
        Prediction
            A mixture over draws.
        """
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=self._dtype())
        weighted = isinstance(self.posterior_.inputs, Mapping)
        return self.posterior_.predict({"x": x, "weight": np.ones(len(x))} if weighted else x)

    def sample(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y, numbers or labels, at X. Each draw comes from one network.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).
        n_samples : int
            Number of draws.
        random_state : int, RandomState or None
            Seed of the draws.

        Returns
        -------
        np.ndarray
            (n_samples, N) or (n_samples, N, K).
        """
        seed = random_state if isinstance(random_state, np.random.Generator) else _seed(random_state)
        drawn = self.predict_distribution(X).sample(n_samples, seed)
        return self.classes_[drawn] if hasattr(self, "classes_") else drawn

    def _dtype(self) -> Any:
        # Inputs that are not standardised may be integer symbols.
        return np.float64 if self.standardise else "numeric"

    def _fit(
        self, X: np.ndarray, y: np.ndarray, weight: Any, more: bool, classes: np.ndarray | None = None
    ) -> None:
        """Fit the model to rows with a weight, or None; its prior is the present posterior where `more` is true."""
        class_names = None if classes is None else tuple(map(str, classes))
        model, method = zoo.bind(*self._unbound(), **(self.model_arguments or {})), self._chosen_method()
        if class_names is not None:
            model = bind_classes(model, y, class_names)
        language = written_in(model, X, y, method.ppl) == "language"
        if language:
            self._check_task(zoo.sketch(model, X[:1]).task)
        if more:
            model = with_prior(model, self.posterior_)
        x: Any = X
        if weight is not None:
            expected, got = "a model in the language, to weight rows", "a model of a system"
            UnsupportedError.check(language, "sample_weight", expected, got, "bnn.observe")
            weight = np.asarray(weight)
            good, expected = weight.shape == (len(X),), f"sample_weight as numbers of shape {(len(X),)}"
            got = f"{weight.dtype} of shape {weight.shape}"
            InputError.check(good and weight.dtype.kind in "biuf", "fit", expected, got, "one number per row")
            model, x = partial(_with_row_weights, model), {"x": X, "weight": weight.astype(float)}
        names = getattr(self, "feature_names_in_", None)
        feature_names = None if names is None else tuple(map(str, names))
        options: dict[str, Any] = {"class_names": class_names, "feature_names": feature_names}
        options |= {"device": self.device, "standardise": self.standardise}
        posterior = method.fit(model, x, y, seed=_seed(self.random_state), **options)
        self._check_task(posterior.task)
        self.posterior_ = posterior

    def _check_task(self, task: str) -> None:
        if task != self._task:
            other = "BNNRegressor" if self._task == "classification" else "BNNClassifier"
            raise InputError.of(type(self).__name__, f"a model for {self._task}", f"one for {task}", other)

    def _unbound(self) -> tuple[Model, str]:
        """The model without its arguments, and its name in error messages."""
        if self.model is None or isinstance(self.model, str):
            name = self.model or self._default
            return zoo.load(name), name
        expected = "a function (x, y=None), the name of a model of the zoo, or None"
        got, advice = type(self.model).__name__, f"model={self._default!r}"
        InputError.check(callable(self.model), "model", expected, got, advice)
        return self.model, getattr(self.model, "__name__", "model")

    def _chosen_method(self) -> Method:
        if isinstance(self.method, str):
            return named(self.method)
        if isinstance(self.method, Method):
            return self.method
        got = f"the class {self.method.__name__}" if isinstance(self.method, type) else repr(self.method)
        raise InputError.of("method", "a method or the name of one", got, "method='svi' or method=bnn.SVI()")


class BNNRegressor(RegressorMixin, _Estimator):
    """Regression by a Bayesian neural network, as a scikit-learn estimator.

    Parameters
    ----------
    model : callable or str, optional
        A function (x, y=None), the name of a model of the zoo, or None for "regression_mlp".
    method : Method or str
        An instance, such as `bnn.Laplace(structure="kron")`, or a name as `ppl-bnn models` lists them: "map", "svi",
        "laplace", "nuts", ...
    model_arguments : mapping, optional
        Keyword arguments of the model, such as {"width": 20}; also a parameter to search over.
    standardise : bool
        Whether to fit on standardised inputs and targets. Predictions are in original units in any case.
    random_state : int, RandomState or None
        The seed, a `RandomState`, or None for another seed at each fit.
    device : str
        "auto", "cpu" or "cuda[:i]".

    Attributes
    ----------
    posterior_ : Posterior
        The fitted posterior, with all its functions: `bnn.diagnose(estimator.posterior_)`.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : np.ndarray
        Names of the columns, if X was a table with names.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> from ppl_bnn.estimators import BNNRegressor
    >>> table = bnn.data.load("diabetes")
    >>> regressor = BNNRegressor("linear_regression", "map").fit(table.x, table.y)
    >>> mean, std = regressor.predict(table.x, return_std=True)
    >>> mean.shape, std.shape
    ((442,), (442,))
    """

    _default: ClassVar[str] = "regression_mlp"
    _task: ClassVar[str] = "regression"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).
        y : array_like
            Targets (N,), or (N, K) for a model of several outputs.
        sample_weight : array_like, optional
            How many times each row counts, (N,), not negative; 1 by default. A weight multiplies the log likelihood of
            its row. The model has to be written in the language.

        Returns
        -------
        Self
            The estimator, fitted.
        """
        return self._fit_rows(X, y, sample_weight, more=False)

    @available_if(_in_units_of_the_data)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model to further rows, with the present posterior as the prior (see `ppl_bnn.with_prior`).

        The first call is a fit. After several calls the posterior is that of all rows, exactly where each one is
        Gaussian, else up to the error of its approximation. The method has to give a Gaussian, as Laplace and
        mean-field SVI do, and `standardise` has to be False, because rows to come do not change the units.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).
        y : array_like
            Targets (N,), or (N, K) for a model of several outputs.
        sample_weight : array_like, optional
            How many times each row counts, (N,), not negative; 1 by default. A weight multiplies the log likelihood of
            its row. The model has to be written in the language.

        Returns
        -------
        Self
            The estimator, fitted to these rows, too.

        Raises
        ------
        UnsupportedError
            The present posterior is not Gaussian or is in standard units.

        Examples
        --------
        >>> from ppl_bnn.estimators import BNNRegressor
        >>> x, y = [[0.0], [1.0], [2.0], [3.0]], [0.1, 0.9, 2.1, 2.9]
        >>> regressor = BNNRegressor("linear_regression", "laplace", standardise=False)
        >>> regressor.partial_fit(x[:2], y[:2]).partial_fit(x[2:], y[2:]).predict([[1.5]]).shape
        (1,)
        """
        return self._fit_rows(X, y, sample_weight, more=hasattr(self, "posterior_"))

    def _fit_rows(self, X: Any, y: Any, weight: Any, more: bool) -> Self:
        options: dict[str, Any] = {"multi_output": True, "y_numeric": True, "reset": not more}
        X, y = validate_data(self, X, y, dtype=self._dtype(), ensure_min_samples=1 if more else 2, **options)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        self._fit(X, y, weight, more)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predictive mean at X.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).
        return_std : bool
            Whether to return the standard deviation of y as well, noise included.

        Returns
        -------
        np.ndarray or tuple of np.ndarray
            The mean, (N,) or (N, K); with `return_std` (mean, standard deviation).
        """
        prediction = self.predict_distribution(X)
        return (prediction.mean, prediction.std) if return_std else prediction.mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Central predictive interval for y.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).
        level : float
            Probability of the interval.

        Returns
        -------
        lower, upper : np.ndarray
            Each of the shape of `predict`.
        """
        return self.predict_distribution(X).interval(level)


class BNNClassifier(ClassifierMixin, _Estimator):
    """Classification by a Bayesian neural network, as a scikit-learn estimator.

    Parameters
    ----------
    model : callable or str, optional
        A function (x, y=None), the name of a model of the zoo, or None for "classification_mlp". A keyword-only
        parameter `classes` of the model is set to the number of classes.
    method : Method or str
        An instance, such as `bnn.Laplace(structure="kron")`, or a name as `ppl-bnn models` lists them.
    model_arguments : mapping, optional
        Keyword arguments of the model, such as {"width": 20}; also a parameter to search over.
    standardise : bool
        Whether to fit on standardised inputs.
    random_state : int, RandomState or None
        The seed, a `RandomState`, or None for another seed at each fit.
    device : str
        "auto", "cpu" or "cuda[:i]".

    Attributes
    ----------
    classes_ : np.ndarray
        The labels, sorted; columns of probabilities are in this order.
    posterior_ : Posterior
        The fitted posterior; its labels are positions in `classes_`.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : np.ndarray
        Names of the columns, if X was a table with names.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> from ppl_bnn.estimators import BNNClassifier
    >>> table = bnn.data.load("iris")
    >>> classifier = BNNClassifier("classification_mlp", "map").fit(table.x, table.y)
    >>> classifier.predict_proba(table.x).shape
    (150, 3)
    """

    _default: ClassVar[str] = "classification_mlp"
    _task: ClassVar[str] = "classification"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).
        y : array_like
            Labels (N,), numbers or words, of at least two classes.
        sample_weight : array_like, optional
            How many times each row counts, (N,), not negative; 1 by default. A weight multiplies the log likelihood of
            its row. The model has to be written in the language.

        Returns
        -------
        Self
            The estimator, fitted.
        """
        return self._fit_rows(X, y, None, sample_weight, more=False)

    @available_if(_in_units_of_the_data)
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model to further rows, with the present posterior as the prior (see `ppl_bnn.with_prior`).

        The first call is a fit. After several calls the posterior is that of all rows up to the error of the Gaussian
        approximations between them. The method has to give a Gaussian, as Laplace and mean-field SVI do, and
        `standardise` has to be False, because rows to come do not change the units.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).
        y : array_like
            Labels (N,), all of them in `classes_`, at least two of these in each call.
        classes : array_like, optional
            All labels that will ever occur; by default those of the first call. A later call may repeat them.
        sample_weight : array_like, optional
            How many times each row counts, (N,), not negative; 1 by default. A weight multiplies the log likelihood of
            its row. The model has to be written in the language.

        Returns
        -------
        Self
            The estimator, fitted to these rows, too.

        Raises
        ------
        InputError
            A label or a set of classes that the first call did not have. It is a ValueError.
        UnsupportedError
            The present posterior is not Gaussian or is in standard units.

        Examples
        --------
        >>> from ppl_bnn.estimators import BNNClassifier
        >>> classifier = BNNClassifier("logistic_regression", "laplace", standardise=False)
        >>> classifier = classifier.partial_fit([[0.0], [1.0]], ["no", "yes"], classes=["no", "yes"])
        >>> classifier.partial_fit([[0.2], [2.0]], ["no", "yes"]).predict_proba([[1.5]]).shape
        (1, 2)
        """
        return self._fit_rows(X, y, classes, sample_weight, more=hasattr(self, "posterior_"))

    def _fit_rows(self, X: Any, y: Any, classes: Any, weight: Any, more: bool) -> Self:
        options: dict[str, Any] = {"reset": not more, "ensure_min_samples": 1 if more else 2}
        X, y = validate_data(self, X, y, dtype=self._dtype(), **options)
        check_classification_targets(y)
        found = np.unique(y if classes is None else classes)
        known = self.classes_ if more else found
        seen, got = np.unique(y), f"classes {found.tolist()}"
        check, advice = InputError.check, "classes= with all labels in the first call of partial_fit"
        check(np.isin(found, known).all(), "y", f"labels among {known.tolist()}", got, advice)
        got = f"labels {seen.tolist()} beside classes {known.tolist()}"
        check(np.isin(seen, known).all(), "y", "labels among `classes`", got, advice)
        check(len(known) > 1, "y", "at least two classes", f"the one class {known[0]!r}", "more data")
        self._fit(X, np.searchsorted(known, y), weight, more, known)
        # After the fit: one that fails leaves the labels of the posterior that is kept.
        self.classes_ = known
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label at X.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).

        Returns
        -------
        np.ndarray
            Labels, (N,).
        """
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities at X, averaged over draws.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).

        Returns
        -------
        np.ndarray
            Probabilities of `classes_`, (N, C).
        """
        prediction, seen = self.predict_distribution(X), len(self.classes_)
        expected = f"a model of {seen} classes, as many as labels were seen"
        got, advice = f"one of {prediction.classes}", "a parameter `classes` of the model"
        InputError.check(prediction.classes == seen, "", expected, got, advice)
        return prediction.probabilities

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`.

        Parameters
        ----------
        X : array_like
            Inputs (N, F).

        Returns
        -------
        np.ndarray
            (N, C).
        """
        with np.errstate(divide="ignore"):  # a class may have probability zero
            return np.log(self.predict_proba(X))


def _seed(random_state: Any) -> int:
    """A seed from any value that scikit-learn accepts as `random_state`."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return check_random_state(random_state).randint(2**31 - 1)
