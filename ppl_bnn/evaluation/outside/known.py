"""The estimators from outside that have a name on the command line and in grids."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.errors import MissingFrameworkError, UnsupportedError, check_known

# Levels of quantile regression, members of an ensemble, and its epochs.
LEVELS, MEMBERS, EPOCHS = 9, 5, 2000


@dataclass(frozen=True)
class Known:
    """An estimator that has a name.

    `numbers` and `classes` build it for a number of columns; `classes` is None for an estimator of numbers only.
    `settings` are further arguments of `Outside` for numbers. It is imported from `module` and installed as `package`.
    """

    numbers: Callable[[int], Any]
    classes: Callable[[int], Any] | None
    settings: dict[str, Any]
    module: str = "sklearn"
    package: str = "scikit-learn"

    def build(self, name: str, task: str, columns: int) -> tuple[Any, dict[str, Any]]:
        """The estimator for a task, and further arguments of `Outside`."""
        numbers = task == "regression"
        builder = self.numbers if numbers else self.classes
        if builder is None:
            raise UnsupportedError.of(name, "a target that is a number", "classes", "compare without it")
        return builder(columns), self.settings if numbers else {}


def estimator(name: str) -> Known:
    """The estimator of that name.

    Raises UnknownNameError for another name, MissingFrameworkError for one whose package is not installed.
    """
    check_known("estimator", [name], ESTIMATORS)
    found = ESTIMATORS[name]
    try:
        importlib.import_module(found.module)
    except ImportError as error:
        advice = "pip install 'ppl-bnn[boosting]'"
        raise MissingFrameworkError.of(name, f"the package {found.package}", str(error), advice) from error
    return found


def _gaussian_process(columns: int, classes: bool = False) -> Any:
    from sklearn import gaussian_process
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    # A length scale for each column; the bounds keep a column without effect from stopping the optimiser.
    scales: Any = np.ones(columns)
    kernel: Any = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(scales, (1e-2, 1e4))
    if classes:
        return gaussian_process.GaussianProcessClassifier(kernel)
    kernel += WhiteKernel(0.1, (1e-6, 1e1))
    return gaussian_process.GaussianProcessRegressor(kernel, normalize_y=True)


def _ridge(columns: int) -> Any:
    from sklearn.linear_model import BayesianRidge

    return BayesianRidge()


def _boosting(columns: int, classes: bool = False) -> Any:
    from sklearn import ensemble

    if classes:
        return ensemble.HistGradientBoostingClassifier()
    return ensemble.HistGradientBoostingRegressor(loss="quantile", quantile=0.5)


def _forest(columns: int, classes: bool = False) -> Any:
    from sklearn import ensemble

    # Single rows as leaves give many classes a probability of zero, and a log score of minus infinity.
    return (
        ensemble.RandomForestClassifier(min_samples_leaf=5) if classes else ensemble.RandomForestRegressor()
    )


def _mlp_ensemble(columns: int, classes: bool = False) -> Any:
    from sklearn import ensemble, neural_network

    if classes:
        # Early stopping would look at accuracy, which says little about probabilities.
        member = neural_network.MLPClassifier(max_iter=EPOCHS)
        return ensemble.BaggingClassifier(member, MEMBERS, bootstrap=False)
    # Members differ by their initial weights, and by the tenth of the rows that ends their training.
    stopping: Any = {"early_stopping": True, "n_iter_no_change": 50, "learning_rate_init": 0.01}
    member = neural_network.MLPRegressor(max_iter=EPOCHS, **stopping)
    return ensemble.BaggingRegressor(member, MEMBERS, bootstrap=False)


def _lightgbm(columns: int, classes: bool = False) -> Any:
    lightgbm = importlib.import_module("lightgbm")
    if classes:
        return lightgbm.LGBMClassifier(verbose=-1)
    return lightgbm.LGBMRegressor(objective="quantile", alpha=0.5, verbose=-1)


def _catboost(columns: int, classes: bool = False) -> Any:
    from ppl_bnn.evaluation.outside import predictive

    catboost: Any = importlib.import_module("catboost")
    quiet = {"verbose": 0, "allow_writing_files": False}
    if classes:
        return catboost.CatBoostClassifier(**quiet)
    # Its Gaussian loss needs a validation set: without one its variances are far too small.
    levels = ", ".join(f"{level:.6g}" for level in predictive.levels(LEVELS))
    return catboost.CatBoostRegressor(loss_function=f"MultiQuantile:alpha={levels}", **quiet)


def _of_classes(builder: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda columns: builder(columns, classes=True)


def _both(builder: Callable[..., Any], *place: str, **settings: Any) -> Known:
    return Known(builder, _of_classes(builder), settings, *place)


ESTIMATORS: dict[str, Known] = {
    "gp": _both(_gaussian_process),
    "bayesian-ridge": Known(_ridge, None, {}),
    "boosting": _both(_boosting, quantiles=LEVELS),
    "forest": _both(_forest),
    "mlp-ensemble": _both(_mlp_ensemble),
    "lightgbm": _both(_lightgbm, "lightgbm", "lightgbm", quantiles=LEVELS),
    "catboost": _both(_catboost, "catboost", "catboost", quantiles=LEVELS),
}
