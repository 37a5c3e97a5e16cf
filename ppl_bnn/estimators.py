"""The library as scikit-learn knows it: `BNNRegressor` and `BNNClassifier`, for pipelines and searches.

A model and a method are parameters of an estimator, so that a grid may run over both:

    GridSearchCV(BNNRegressor(), {"method": ["map", "laplace", bnn.SVI(steps=500)]}, scoring="r2")
    GridSearchCV(BNNRegressor(method="svi"), {"method__steps": [500, 2000], "model__width": [10, 50]})

`method__steps` is a field of the method and `model__width` a keyword argument of the model.

Inputs are tables, targets one number (or label) per row, or several numbers where the model has several outputs.
Casting and ravelling are scikit-learn's, with its warnings, and come first; then the library refuses what it always
refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ppl_bnn import zoo
from ppl_bnn.backends.protocol import Model
from ppl_bnn.backends.systems import written_in
from ppl_bnn.core.errors import InputError, UnknownNameError, message, unknown_name
from ppl_bnn.evaluation.comparison.run import bind_classes
from ppl_bnn.inference import registry
from ppl_bnn.inference.method import Method
from ppl_bnn.posterior.posterior import Posterior
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.zoo.support import declared


class _Estimator(BaseEstimator):
    """What both have in common; the parameters are told there."""

    _default: ClassVar[str]
    _task: ClassVar[str]
    posterior_: Posterior

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
        """The parameters; with `deep` also the fields of the method, as `method__steps`, and the keyword arguments of
        the model that have a value, as `model__width`."""
        found: dict[str, Any] = dict(super().get_params(deep=False))
        if not deep:
            return found
        # What names no model or no method is refused by `fit`, as scikit-learn asks for.
        with suppress(InputError, UnknownNameError):
            method = self._chosen_method()
            found |= {
                f"method__{each.name}": getattr(method, each.name) for each in fields(method) if each.init
            }
        with suppress(InputError, UnknownNameError):
            found |= {f"model__{name}": value for name, value in self._sizes().items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Set parameters, and fields of the method and keyword arguments of the model by the names of `get_params`.

        Raises
        ------
        UnknownNameError (a ValueError): no such parameter, field or argument.
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
            known = [each.name for each in fields(method) if each.init]
            for name in nested["method"]:
                if name not in known:
                    raise unknown_name(f"field of {type(method).__name__}", name, known)
            self.method = replace(method, **nested["method"])
        if nested["model"]:
            arguments = {**(self.model_arguments or {}), **nested["model"]}
            known = self._arguments()
            for name in nested["model"]:
                if name not in known:
                    raise unknown_name("argument of the model", name, known)
            self.model_arguments = arguments
        return self

    def _arguments(self) -> dict[str, Any]:
        """The keyword-only arguments of the model and their defaults."""
        if self.model is None or isinstance(self.model, str):
            model = zoo.load(self.model or self._default)
        else:
            model = self.model
        if not callable(model):
            return {}
        parameters = inspect.signature(model).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}

    def _sizes(self) -> dict[str, Any]:
        """The keyword arguments of the model that have a value: what was given, else their defaults."""
        # Anything else is refused by `fit`.
        given = self.model_arguments if isinstance(self.model_arguments, Mapping) else {}
        values = {name: given.get(name, default) for name, default in self._arguments().items()}
        return {name: value for name, value in values.items() if value is not inspect.Parameter.empty}

    def predict_distribution(self, X: Any) -> Prediction:
        """All that is predicted at X (N, F): the `Prediction`, a mixture over draws."""
        check_is_fitted(self)
        return self.posterior_.predict(validate_data(self, X, reset=False, dtype=self._dtype()))

    def _dtype(self) -> Any:
        # What is not standardised may be symbols, which are whole numbers.
        return np.float64 if self.standardise else "numeric"

    def _fit(self, X: np.ndarray, y: np.ndarray, class_names: tuple[str, ...] | None = None) -> None:
        model, method = self._chosen_model(), self._chosen_method()
        if class_names is not None:
            model = bind_classes(model, y, class_names)
        if written_in(model, X, y, method.ppl) == "language":
            self._check_task(zoo.sketch(model, X[:1]).task)
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        names = getattr(self, "feature_names_in_", None)
        posterior = method.fit(
            model,
            X,
            y,
            seed=int(seed),
            device=self.device,
            standardise=self.standardise,
            feature_names=None if names is None else tuple(map(str, names)),
            class_names=class_names,
        )
        self._check_task(posterior.task)
        self.posterior_ = posterior

    def _check_task(self, task: str) -> None:
        if task != self._task:
            other = "BNNRegressor" if self._task == "classification" else "BNNClassifier"
            raise InputError(
                f"{type(self).__name__}: " + message(f"a model for {self._task}", f"one for {task}", other)
            )

    def _chosen_model(self) -> Model:
        arguments = dict(self.model_arguments or {})
        if self.model is None or isinstance(self.model, str):
            return zoo.load(self.model or self._default, **arguments)
        if not callable(self.model):
            raise InputError(
                "model: "
                + message(
                    "a function (x, y=None), the name of a model of the zoo, or None",
                    type(self.model).__name__,
                    f"model={self._default!r}",
                )
            )
        return zoo.bind(self.model, getattr(self.model, "__name__", "model"), **arguments)

    def _chosen_method(self) -> Method:
        if isinstance(self.method, str):
            return registry.row(self.method).build(declared().served(self.method)[0])
        if isinstance(self.method, Method):
            return self.method
        came = f"the class {self.method.__name__}" if isinstance(self.method, type) else repr(self.method)
        raise InputError(
            "method: " + message("a method or the name of one", came, "method='svi' or method=bnn.SVI()")
        )


class BNNRegressor(RegressorMixin, _Estimator):
    """Regression by a Bayesian network as a scikit-learn estimator.

    Parameters
    ----------
    model
        A function (x, y=None), the name of a model of the zoo, or None for "regression_mlp".
    method
        An instance, `bnn.Laplace(structure="kron")`, or a name as `ppl-bnn models` lists them: "map", "svi",
        "laplace", "nuts", ...
    model_arguments
        Keyword arguments of the model, such as {"width": 20}: a parameter to search over, too.
    standardise
        Whether to fit on standardised inputs and targets. Predictions are in original units all the same.
    random_state
        A whole number, the seed; or, as scikit-learn has them, a `RandomState` or None for another seed at each fit.
    device
        "auto", "cpu" or "cuda[:i]".

    Attributes
    ----------
    posterior_
        The `Posterior`, with everything that it can do: `bnn.diagnose(estimator.posterior_)`.
    n_features_in_, feature_names_in_
        The number of columns, and their names if X was a table with names.
    """

    _default: ClassVar[str] = "regression_mlp"
    _task: ClassVar[str] = "regression"

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (N, F) and y (N,), or (N, K) for a model of several outputs."""
        X, y = validate_data(
            self, X, y, dtype=self._dtype(), multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        self._fit(X, y)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean at X, (N,) or (N, K); with `return_std` also the standard deviation of y, noise included."""
        prediction = self.predict_distribution(X)
        return (prediction.mean, prediction.std) if return_std else prediction.mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper), the central interval of probability `level` for y, each of the shape of `predict`."""
        return self.predict_distribution(X).interval(level)

    def sample(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at X, (n_samples, N) or (n_samples, N, K): each is what one network would produce."""
        return self.predict_distribution(X).sample(n_samples, _generator(random_state))


class BNNClassifier(ClassifierMixin, _Estimator):
    """Classification by a Bayesian network as a scikit-learn estimator.

    Parameters are those of `BNNRegressor`; model None is "classification_mlp". A model with a keyword-only parameter
    `classes` is given their number.

    Attributes
    ----------
    classes_
        The labels, sorted; columns of probabilities are in this order.
    posterior_, n_features_in_, feature_names_in_
        As in `BNNRegressor`; labels of the posterior are positions in `classes_`.
    """

    _default: ClassVar[str] = "classification_mlp"
    _task: ClassVar[str] = "classification"

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (N, F) and labels y (N,), of at least two kinds: numbers or words."""
        X, y = validate_data(self, X, y, dtype=self._dtype(), ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(
                "y: " + message("at least two classes", f"the one class {self.classes_[0]!r}", "data of both")
            )
        self._fit(X, labels, tuple(map(str, self.classes_)))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label at X, (N,)."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of `classes_` at X, (N, C), averaged over draws."""
        prediction = self.predict_distribution(X)
        if prediction.classes != len(self.classes_):
            raise InputError(
                message(
                    f"a model of {len(self.classes_)} classes, as many as labels were seen",
                    f"one of {prediction.classes}",
                    "a keyword-only parameter `classes` of the model",
                )
            )
        return prediction.probabilities

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`."""
        with np.errstate(divide="ignore"):  # a class may have no probability
            return np.log(self.predict_proba(X))

    def sample(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of the label at X, (n_samples, N)."""
        check_is_fitted(self)
        return self.classes_[self.predict_distribution(X).sample(n_samples, _generator(random_state))]


def _generator(random_state: Any) -> np.random.Generator:
    """A generator from what scikit-learn takes for one."""
    if isinstance(random_state, int | np.integer | np.random.Generator):
        return np.random.default_rng(random_state)
    return np.random.default_rng(check_random_state(random_state).randint(2**31 - 1))
