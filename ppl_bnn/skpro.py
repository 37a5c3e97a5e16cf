"""A probabilistic regressor of skpro. It needs the extra `skpro`.

skpro has one interface for regressors that predict distributions, with pipelines, tuning, metrics and benchmarks around
it. Here the distribution is the whole predictive mixture of a posterior.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ppl_bnn import estimators
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.inference.optimisation.map import MAP
from ppl_bnn.prediction.crps import crps
from ppl_bnn.prediction.prediction import Prediction

__all__ = ["BNNProbaRegressor", "PredictiveDistribution"]

try:
    # It has an upper bound on pandas, so that it is not among what the checks of types install.
    from skpro.distributions.base import BaseDistribution  # pyright: ignore[reportMissingImports]
    from skpro.regression.base import BaseProbaRegressor  # pyright: ignore[reportMissingImports]
    from skpro.utils.sklearn import prep_skl_df  # pyright: ignore[reportMissingImports]
except ImportError as error:
    got, advice = f"{type(error).__name__}: {error}", "pip install 'ppl-bnn[skpro]'"
    raise UnsupportedError.of("BNNProbaRegressor", "the package skpro", got, advice) from error

_EXACT = ["mean", "var", "energy", "cdf", "ppf"]


class PredictiveDistribution(BaseDistribution):
    """A prediction as a distribution of skpro: one number for each row, independent given the weights.

    Its functions are exact up to rounding. A sample of several rows is the output of one network.

    Parameters
    ----------
    prediction : Prediction
        The prediction of one number or count for each row.
    index : pandas.Index, optional
        Names of the rows.
    columns : pandas.Index, optional
        Name of the target. Without both, a prediction of a single row is a scalar distribution.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> from ppl_bnn.skpro import PredictiveDistribution
    >>> draws = {"loc": np.array([[0.0, 1.0], [2.0, 3.0]]), "scale": np.ones((2, 2))}
    >>> PredictiveDistribution(bnn.Prediction("Normal", draws), columns=["y"]).mean()["y"].tolist()
    [1.0, 2.0]
    """

    _tags = {
        "capabilities:exact": [*_EXACT, "pdf", "log_pdf"],
        "capabilities:approx": ["pdfnorm"],
        "distr:measuretype": "continuous",
        "distr:paramtype": "nonparametric",
    }

    def __init__(self, prediction: Prediction, index: Any = None, columns: Any = None) -> None:
        self.prediction = prediction
        single = not prediction.is_classes and len(prediction.shape) == 1
        got, advice = repr(prediction), "BNNRegressor(...).predict_distribution(X)"
        UnsupportedError.check(single, "PredictiveDistribution", "one number for each row", got, advice)
        if index is not None or columns is not None or prediction.rows > 1:
            index = pd.RangeIndex(prediction.rows) if index is None else index
            columns = pd.RangeIndex(1) if columns is None else columns
        super().__init__(index=index, columns=columns)
        if prediction.is_counts:
            exact = [*_EXACT, "pmf", "log_pmf"]
            tags = {"capabilities:exact": exact, "capabilities:approx": [], "distr:measuretype": "discrete"}
            self.set_tags(**tags)

    def _shaped(self, values: np.ndarray) -> Any:
        return values.reshape(self.shape) if self.ndim else float(values.reshape(()))

    def _iloc(self, rowidx: Any = None, colidx: Any = None) -> PredictiveDistribution:
        if rowidx is not None and colidx is not None and np.ndim(rowidx) == np.ndim(colidx) == 0:
            return PredictiveDistribution(self.prediction.take([rowidx]))
        rows = np.arange(self.prediction.rows)[slice(None) if rowidx is None else np.atleast_1d(rowidx)]
        columns = self.columns if colidx is None else self.columns[np.atleast_1d(colidx)]
        return PredictiveDistribution(self.prediction.take(rows), self.index[rows], columns)

    def _iat(self, rowidx: Any = None, colidx: Any = None) -> PredictiveDistribution:
        return self._iloc(rowidx, colidx)

    def _mean(self) -> Any:
        return self._shaped(self.prediction.mean)

    def _var(self) -> Any:
        return self._shaped(self.prediction.variance)

    def _log_prob(self, x: Any, counts: bool) -> Any:
        """The log density, or the log probability of counts; the logarithm of 0 for the other one."""
        own = self.prediction.is_counts == counts
        return self._shaped(self.prediction.log_prob(np.ravel(x)) if own else np.full(np.size(x), -np.inf))

    def _log_pdf(self, x: Any) -> Any:
        return self._log_prob(x, counts=False)

    def _pdf(self, x: Any) -> Any:
        return np.exp(self._log_pdf(x))

    def _log_pmf(self, x: Any) -> Any:
        return self._log_prob(x, counts=True)

    def _pmf(self, x: Any) -> Any:
        return np.exp(self._log_pmf(x))

    def _cdf(self, x: Any) -> Any:
        return self._shaped(self.prediction.cdf(np.ravel(x)))

    def _ppf(self, p: Any) -> Any:
        p = np.ravel(p)
        found = np.empty(p.shape)
        for level in np.unique(p):
            rows = np.flatnonzero(p == level)
            found[rows] = self.prediction.take(rows).quantile(level)
        return self._shaped(found)

    def _energy_x(self, x: Any) -> Any:
        return self._shaped(self.prediction.absolute_deviation(np.ravel(x)))

    def _energy_self(self) -> Any:
        # CRPS(y) = E|Y - y| - E|Y - Y'| / 2 for every y.
        y = self.prediction.quantile(0.5)
        score = np.asarray(crps(self.prediction, y, pointwise=True))
        return self._shaped(2.0 * (self.prediction.absolute_deviation(y) - score))

    def _sample(self, n_samples: int | None = None) -> Any:
        # The generator of all samples in skpro, which `np.random.seed` sets.
        seed = int(np.random.randint(2**31))  # noqa: NPY002
        drawn = self.prediction.sample(n_samples or 1, seed)
        if self.ndim == 0:
            return float(drawn[0, 0]) if n_samples is None else pd.DataFrame(drawn)
        tables = [pd.DataFrame(each[:, None], self.index, self.columns) for each in drawn]
        return tables[0] if n_samples is None else pd.concat(tables, keys=range(n_samples))

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Mixtures of normals, a scalar distribution and one of counts, for skpro's tests."""
        loc = np.array([[0.0, 1.0, 5.0], [2.0, 3.0, 4.0]])
        several = Prediction("Normal", {"loc": loc, "scale": np.ones((2, 3))})
        one = Prediction(
            "StudentT", {"df": np.full((2, 1), 5.0), "loc": loc[:, :1], "scale": np.ones((2, 1))}
        )
        counts = Prediction("Poisson", {"rate": np.exp(loc)})
        names = {"index": pd.Index([2, 5, 9]), "columns": pd.Index(["y"])}
        return [{"prediction": several, **names}, {"prediction": one}, {"prediction": counts, **names}]


class BNNProbaRegressor(BaseProbaRegressor):
    """Regression by a Bayesian neural network, as a regressor of skpro.

    Its distributions are `PredictiveDistribution`: the mixture over draws, with the noise.

    Parameters
    ----------
    model : callable or str, optional
        A function (x, y=None), the name of a model of the zoo, or None for "regression_mlp".
    method : Method or str
        As for `BNNRegressor`.
    model_arguments : mapping, optional
        Keyword arguments of the model.
    standardise : bool
        Whether to fit on standardised inputs and targets. Predictions are in original units in any case.
    random_state : int, RandomState or None
        The seed.
    device : str
        "auto", "cpu" or "cuda[:i]".

    Attributes
    ----------
    estimator_ : BNNRegressor
        The fitted estimator of scikit-learn; `estimator_.posterior_` is the posterior.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> from ppl_bnn.skpro import BNNProbaRegressor
    >>> table = bnn.data.load("diabetes")
    >>> regressor = BNNProbaRegressor("linear_regression", "laplace").fit(table.x, table.y[:, None])
    >>> regressor.predict_proba(table.x[:5]).ppf(0.9).shape
    (5, 1)
    """

    _tags = {
        "capability:multioutput": False,
        "capability:missing": False,
        "capability:update": False,
        "X_inner_mtype": "pd_DataFrame_Table",
        "y_inner_mtype": "pd_DataFrame_Table",
    }

    def __init__(
        self,
        model: Any = None,
        method: Any = "svi",
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
        super().__init__()

    def _fit(self, X: Any, y: Any) -> BNNProbaRegressor:
        self.estimator_ = estimators.BNNRegressor(**self.get_params(deep=False))
        self.estimator_.fit(prep_skl_df(X), y.iloc[:, 0].to_numpy())
        self._columns = y.columns
        return self

    def _predict_proba(self, X: Any) -> PredictiveDistribution:
        found = self.estimator_.predict_distribution(prep_skl_df(X))
        return PredictiveDistribution(found, X.index, self._columns)

    def _predict(self, X: Any) -> Any:
        return self._predict_proba(X).mean()

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Small fits, for skpro's tests."""
        network = {"model_arguments": {"width": 3}, "method": MAP(steps=50, polish=False)}
        return [{"model": "linear_regression", "method": "laplace"}, network]
