"""A regressor of skpro: skpro's own checks, and its distributions against those of SciPy and of skpro."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.estimators import BNNRegressor

pytest.importorskip("skpro", reason="the extra skpro is not installed: it needs pandas below 3.1")

from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler
from skpro.distributions import Mixture, Normal
from skpro.metrics import CRPS, LogLoss, PinballLoss
from skpro.model_selection import GridSearchCV
from skpro.utils import check_estimator

from ppl_bnn.skpro import BNNProbaRegressor, PredictiveDistribution

INDEX, COLUMNS = pd.Index([3, 1, 7]), pd.Index(["y"])
LOC = np.array([[0.0, 1.0, 5.0], [2.0, -3.0, 4.0]])
SCALE = np.array([[1.0, 0.5, 2.0], [0.2, 1.0, 1.0]])


def distribution() -> Any:
    return PredictiveDistribution(bnn.Prediction("Normal", {"loc": LOC, "scale": SCALE}), INDEX, COLUMNS)


def table(rows: int = 60) -> tuple[pd.DataFrame, pd.DataFrame]:
    rng = np.random.default_rng(0)
    x = pd.DataFrame(rng.normal(size=(rows, 2)), index=np.arange(rows) + 10, columns=["a", "b"])
    return x, pd.DataFrame({"target": 3.0 * x["a"] + 0.5 * rng.normal(size=rows)})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", [PredictiveDistribution, BNNProbaRegressor])
def test_it_passes_the_checks_of_skpro(which: Any) -> None:
    found = check_estimator(which, raise_exceptions=False, verbose=False)
    assert len(found) > 50
    assert {name: outcome for name, outcome in found.items() if outcome != "PASSED"} == {}


def test_functions_are_those_of_the_mixture() -> None:
    ours = distribution()
    parts = [
        (f"{k}", Normal(LOC[k][:, None], SCALE[k][:, None], index=INDEX, columns=COLUMNS)) for k in range(2)
    ]
    theirs = Mixture(parts)
    x = pd.DataFrame([[0.3], [-1.0], [4.5]], index=INDEX, columns=COLUMNS)
    for name in ("mean", "var"):
        np.testing.assert_allclose(getattr(ours, name)(), getattr(theirs, name)())
    for name in ("pdf", "cdf"):
        np.testing.assert_allclose(getattr(ours, name)(x), getattr(theirs, name)(x))
    np.testing.assert_allclose(ours.log_pdf(x), np.log(theirs.pdf(x)))
    np.testing.assert_allclose(ours.cdf(ours.ppf(0.3)), 0.3)
    different = pd.DataFrame([[0.1], [0.5], [0.9]], index=INDEX, columns=COLUMNS)
    np.testing.assert_allclose(theirs.cdf(ours.ppf(different)), different)
    assert np.all(ours.pmf(x) == 0.0)


def test_energies_are_those_of_draws() -> None:
    ours, count = distribution(), 40_000
    x = pd.DataFrame([[0.3], [-1.0], [4.5]], index=INDEX, columns=COLUMNS)
    rng = np.random.default_rng(1)
    first, second = (ours.prediction.sample(count, rng) for _ in range(2))
    for found, draws in (
        (ours.energy(), np.abs(first - second)),
        (ours.energy(x), np.abs(first - x["y"].to_numpy())),
    ):
        error = draws.std(0) / np.sqrt(count)
        assert np.all(np.abs(found.to_numpy()[:, 0] - draws.mean(0)) < 4.5 * error)


def test_counts_have_a_probability_mass() -> None:
    rate = np.array([[1.0, 4.0, 9.0]])
    ours = PredictiveDistribution(bnn.Prediction("Poisson", {"rate": rate}), INDEX, COLUMNS)
    x = pd.DataFrame([[0], [3], [12]], index=INDEX, columns=COLUMNS)
    np.testing.assert_allclose(ours.pmf(x)["y"], stats.poisson(rate[0]).pmf(x["y"]))
    np.testing.assert_allclose(ours.ppf(0.8)["y"], stats.poisson(rate[0]).ppf(0.8))
    assert np.all(ours.pdf(x) == 0.0)


def test_rows_are_chosen_by_name_and_by_place() -> None:
    ours = distribution()
    np.testing.assert_array_equal(ours.loc[[7, 3]].mean()["y"], ours.mean()["y"].loc[[7, 3]])
    np.testing.assert_array_equal(ours.iloc[[2, 0]].mean()["y"], ours.mean()["y"].iloc[[2, 0]])
    single = ours.at[1, "y"]
    assert (single.shape, single.mean(), single.cdf(1.0)) == (
        (),
        ours.mean()["y"].loc[1],
        ours.cdf(1.0)["y"].loc[1],
    )


def test_samples_follow_the_generator_of_numpy() -> None:
    ours = distribution()
    np.random.seed(5)  # noqa: NPY002
    first = ours.sample(4)
    np.random.seed(5)  # noqa: NPY002
    pd.testing.assert_frame_equal(ours.sample(4), first)
    assert first.shape == (12, 1)
    assert list(first.index[:4]) == [(0, 3), (0, 1), (0, 7), (1, 3)]


def test_a_regressor_has_the_predictions_of_the_estimator() -> None:
    x, y = table()
    options: Any = {"model": "linear_regression", "method": bnn.Laplace(), "random_state": 3}
    ours, theirs = BNNProbaRegressor(**options).fit(x, y), BNNRegressor(**options).fit(x, y["target"])
    found, expected = ours.predict_proba(x[:9]), theirs.predict_distribution(x[:9])
    assert list(found.index) == list(x.index[:9])
    assert list(found.columns) == ["target"]
    np.testing.assert_array_equal(found.mean()["target"], expected.mean)
    np.testing.assert_array_equal(ours.predict(x[:9])["target"], expected.mean)
    np.testing.assert_array_equal(ours.predict_var(x[:9])["target"], expected.variance)
    interval = ours.predict_interval(x[:9], 0.8).to_numpy()
    np.testing.assert_allclose(interval, np.stack(expected.interval(0.8), axis=1))


def test_scores_of_skpro_are_those_of_the_library() -> None:
    x, y = table()
    regressor = BNNProbaRegressor("linear_regression", "laplace").fit(x, y)
    found = regressor.predict_proba(x)
    prediction = found.prediction
    assert LogLoss()(y, found) == pytest.approx(-bnn.scores.log_score(prediction, y["target"].to_numpy()))
    assert CRPS()(y, found) == pytest.approx(bnn.scores.crps(prediction, y["target"].to_numpy()))
    quantiles = regressor.predict_quantiles(x, [0.1, 0.9])
    assert PinballLoss()(y, quantiles) > 0.0


def test_it_works_in_a_pipeline_and_in_a_search() -> None:
    x, y = table(30)
    pipeline = StandardScaler() * BNNProbaRegressor("linear_regression", "map")
    assert pipeline.fit(x, y).predict_proba(x).shape == (30, 1)
    methods = {"method": ["map", "laplace"]}
    search = GridSearchCV(BNNProbaRegressor("linear_regression"), KFold(2), methods, scoring=CRPS())
    assert search.fit(x, y).best_params_["method"] in ("map", "laplace")


def test_predictions_of_classes_and_of_several_numbers_are_refused() -> None:
    for parameters, family in (
        ({"probs": np.full((1, 2), 0.5)}, "Bernoulli"),
        ({"loc": np.zeros((1, 2, 3)), "scale": np.ones((1, 2, 3))}, "Normal"),
    ):
        with pytest.raises(UnsupportedError, match="one number for each row"):
            PredictiveDistribution(bnn.Prediction(family, parameters))


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skpro.distributions.base", None)
    monkeypatch.delitem(sys.modules, "ppl_bnn.skpro")
    with pytest.raises(UnsupportedError, match=r"pip install 'ppl-bnn\[skpro\]'"):
        import ppl_bnn.skpro  # noqa: F401
