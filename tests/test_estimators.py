"""The estimators keep scikit-learn's own rules, and give what the library gives."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import (
    check_estimators_partial_fit_n_features,
    check_n_features_in_after_fitting,
    parametrize_with_checks,
)

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.estimators import BNNClassifier, BNNRegressor
from tests.problems import Conjugate

# A linear model by a mode in Pyro: nothing is compiled, so that each of some fifty fits takes milliseconds. It is not
# polished: tables of weighted rows have fewer rows than columns in these checks, so the density with sampled noise has
# no largest value, and rounding decides where L-BFGS ends.
CHEAP: dict[str, Any] = {
    "method": bnn.MAP(ppl="pyro", steps=60, polish=False),
    "model_arguments": {"depth": 0},
}


@pytest.mark.slow
@parametrize_with_checks([BNNRegressor(**CHEAP), BNNClassifier(**CHEAP)])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    return x, 3.0 + x @ np.array([2.0, -1.0]) + 0.1 * rng.normal(size=60)


def test_a_regressor_gives_what_the_library_gives(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    method = bnn.Laplace(ppl="pyro")
    estimator = BNNRegressor("linear_regression", method, random_state=3).fit(x, y)
    posterior = bnn.fit(bnn.zoo.load("linear_regression"), x, y, method, seed=3, standardise=True)
    prediction = posterior.predict(x)
    mean, std = estimator.predict(x, return_std=True)
    np.testing.assert_array_equal(mean, prediction.mean)
    np.testing.assert_array_equal(std, prediction.std)
    np.testing.assert_array_equal(estimator.predict_interval(x, 0.8), prediction.interval(0.8))
    assert estimator.sample(x, 5).shape == (5, 60)
    assert estimator.score(x, y) > 0.99
    again = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_array_equal(again.predict(x), mean)


def test_a_classifier_speaks_of_its_labels(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    labels = np.where(y > 3.0, "high", "low")
    estimator = BNNClassifier(**CHEAP).fit(x, labels)
    assert list(estimator.classes_) == ["high", "low"]
    probabilities = estimator.predict_proba(x)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    np.testing.assert_array_equal(estimator.predict(x), estimator.classes_[probabilities.argmax(axis=1)])
    assert estimator.score(x, labels) > 0.9
    assert set(estimator.sample(x, 3).ravel()) <= {"high", "low"}
    # A fit that fails leaves the posterior and its labels.
    with pytest.raises(UnknownNameError, match="nutz"):
        estimator.set_params(method="nutz").fit(x, np.where(y > 3.0, "new", "other"))
    assert set(estimator.predict(x)) == {"high", "low"}


@pytest.mark.slow
def test_pipelines_cross_validation_and_a_search_over_methods(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    regressor = BNNRegressor(**CHEAP)
    assert cross_val_score(make_pipeline(StandardScaler(), regressor), x, y, cv=3).min() > 0.9
    search = GridSearchCV(regressor, {"method": [CHEAP["method"], bnn.Laplace(ppl="pyro")]}, cv=2)
    assert search.fit(x, y).best_score_ > 0.9


def test_bad_input_is_refused_by_name(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    with pytest.raises(UnknownNameError, match="nutz"):
        BNNRegressor(method="nutz").fit(x, y)
    with pytest.raises(InputError, match="the class MAP"):
        BNNRegressor(method=bnn.MAP).fit(x, y)
    with pytest.raises(InputError, match="BNNClassifier"):
        BNNRegressor("classification_mlp", model_arguments={"classes": 2}).fit(x, y)
    with pytest.raises(InputError, match="at least two classes"):
        BNNClassifier().fit(x, np.zeros(60))


def test_fields_of_the_method_and_sizes_of_the_model_are_parameters(
    rows: tuple[np.ndarray, np.ndarray],
) -> None:
    x, y = rows
    estimator = BNNRegressor(method=bnn.MAP(ppl="pyro", steps=60))
    deep = estimator.get_params()
    assert deep["method__steps"] == 60
    assert (
        deep["model__width"] == inspect.signature(bnn.zoo.load("regression_mlp")).parameters["width"].default
    )
    assert set(estimator.get_params(deep=False)) == {
        "model", "method", "model_arguments", "standardise", "random_state", "device",
    }  # fmt: skip
    estimator.set_params(method__steps=7, model__width=3, model__depth=0)
    assert (vars(estimator.method)["steps"], estimator.model_arguments) == (7, {"width": 3, "depth": 0})
    assert estimator.get_params()["model__width"] == 3
    copy: Any = clone(estimator)
    assert copy.get_params() == estimator.get_params()
    assert copy is not estimator
    # A name becomes the method of that name; what is not named stays.
    named = BNNRegressor(method="map").set_params(method__steps=9)
    assert named.method == replace(BNNRegressor(method="map")._chosen_method(), steps=9)
    for wrong, said in (
        ("method__stesp", "did you mean 'steps'"),
        ("model__widht", "did you mean 'width'"),
        ("metod__steps", "Invalid parameter 'metod'"),
        ("standardize", "Invalid parameter 'standardize'"),
    ):
        with pytest.raises(ValueError, match=said):
            BNNRegressor(method="map").set_params(**{wrong: 3})
    search = GridSearchCV(
        BNNRegressor(method=bnn.MAP(ppl="pyro", steps=60), model_arguments={"depth": 0}),
        {"method__steps": [20, 80], "model__width": [2]},
        cv=2,
    ).fit(x, y)
    assert [each["method__steps"] for each in search.cv_results_["params"]] == [20, 80]
    best: Any = search.best_estimator_
    assert best.method.steps == search.best_params_["method__steps"]
    assert best.model_arguments == {"depth": 0, "width": 2}
    assert search.best_score_ > 0.99


def test_without_a_random_state_each_fit_has_another_seed(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    # Two seeds of 2^31 are the same once in 10^9 runs.
    seeds = {BNNRegressor(**CHEAP, random_state=None).fit(x, y).posterior_.info.seed for _ in range(2)}
    assert len(seeds) == 2
    same = [
        BNNRegressor(**CHEAP, random_state=np.random.RandomState(4)).fit(x, y).posterior_.info.seed
        for _ in range(2)
    ]
    assert same[0] == same[1] == np.random.RandomState(4).randint(2**31 - 1)
    assert BNNRegressor(**CHEAP, random_state=5).fit(x, y).posterior_.info.seed == 5


def test_names_of_columns_reach_the_posterior(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    table = pd.DataFrame(x, columns=["dose", "age"])
    estimator = BNNRegressor(**CHEAP).fit(table, y)
    assert list(vars(estimator)["feature_names_in_"]) == ["dose", "age"]
    assert estimator.posterior_.feature_names == ("dose", "age")
    assert BNNRegressor(**CHEAP).fit(x, y).posterior_.feature_names is None


def test_a_pipeline_of_columns_of_words_in_pandas(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    table = pd.DataFrame({"dose": x[:, 0], "arm": np.where(x[:, 1] > 0.0, "new", "old")})
    columns = make_column_transformer(
        (OneHotEncoder(drop="first", sparse_output=False), ["arm"]), (StandardScaler(), ["dose"])
    )
    pipeline = make_pipeline(columns, BNNRegressor(**CHEAP)).set_output(transform="pandas")
    found = pipeline.fit(table, pd.Series(y)).predict(table)
    assert pipeline[-1].posterior_.feature_names == ("onehotencoder__arm_old", "standardscaler__dose")
    # The same model of the same columns by hand.
    by_hand = np.column_stack([table["arm"] == "old", (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()])
    np.testing.assert_allclose(found, BNNRegressor(**CHEAP).fit(by_hand, y).predict(by_hand), rtol=1e-6)


# --- rows that arrive in parts --------------------------------------------------------------------------------

IN_PARTS: dict[str, Any] = {"method": bnn.Laplace(ppl="pyro"), "standardise": False}


def test_a_regressor_fitted_in_parts_has_the_posterior_of_all_rows_in_closed_form() -> None:
    exact = Conjugate.make()
    estimator = BNNRegressor(exact.model, **IN_PARTS)
    for part in np.array_split(np.arange(len(exact.y)), 3):
        estimator.partial_fit(exact.x[part], exact.y[part])
    found: Any = estimator.posterior_.approximation
    covariance = np.linalg.inv(exact.precision_of("posterior"))
    np.testing.assert_allclose(found.covariance.covariance(), covariance, rtol=1e-6, atol=1e-12)
    centre = found.centre()
    np.testing.assert_allclose(centre["output.weight"][:, 0], exact.mean[:-1], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(centre["output.bias"], exact.mean[-1:], rtol=1e-6, atol=1e-8)
    # `fit` does not start from the earlier posterior.
    found = estimator.fit(exact.x, exact.y).posterior_.approximation
    np.testing.assert_allclose(found.covariance.covariance(), covariance, rtol=1e-6, atol=1e-12)


def test_a_classifier_in_parts_knows_labels_that_have_not_occurred(
    rows: tuple[np.ndarray, np.ndarray],
) -> None:
    x, y = rows
    labels = np.array(["low", "middle", "high"])[np.digitize(y, [2.0, 4.0])]
    few = labels != "high"
    others = ~few | (np.arange(len(x)) % 5 == 0)
    settings: dict[str, Any] = IN_PARTS | {"model_arguments": {"depth": 0}}
    estimator = BNNClassifier(**settings)
    estimator.partial_fit(x[few], labels[few], classes=["low", "middle", "high"])
    before = estimator.predict_proba(x[~few])[:, 0].mean()
    assert list(estimator.classes_) == ["high", "low", "middle"]
    estimator.partial_fit(x[others], labels[others], classes=["middle", "high", "low"])
    assert estimator.predict_proba(x[~few])[:, 0].mean() > before + 0.2
    # About as good as a fit to all rows at once.
    together = BNNClassifier(**settings).fit(x, labels)
    assert estimator.score(x, labels) > together.score(x, labels) - 0.1
    with pytest.raises(InputError, match=r"labels among \['high', 'low', 'middle'\]; got classes \['none'\]"):
        estimator.partial_fit(x[:2], ["none", "none"])
    with pytest.raises(InputError, match="the single class 0"):
        estimator.partial_fit(x[~few], labels[~few])
    with pytest.raises(InputError, match="got classes"):
        estimator.partial_fit(x[:2], labels[:2], classes=["low", "middle", "high", "none"])
    with pytest.raises(InputError, match=r"labels \['low'.* beside classes \['low', 'none'\]"):
        BNNClassifier(**settings).partial_fit(x[few], labels[few], classes=["low", "none"])


def test_what_cannot_be_fitted_in_parts_is_refused(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    assert not hasattr(BNNRegressor(**CHEAP), "partial_fit")
    with pytest.raises(AttributeError, match="partial_fit"):
        BNNClassifier(**CHEAP).partial_fit(x, y > 3.0)
    point = BNNRegressor(**CHEAP, standardise=False).partial_fit(x, y)
    with pytest.raises(UnsupportedError, match="Gaussian"):
        point.partial_fit(x, y)
    standard = BNNRegressor("linear_regression", bnn.Laplace(ppl="pyro")).fit(x, y)
    with pytest.raises(UnsupportedError, match="standardise=True"):
        standard.set_params(standardise=False).partial_fit(x, y)


@pytest.mark.parametrize(
    "check", [check_estimators_partial_fit_n_features, check_n_features_in_after_fitting]
)
@pytest.mark.parametrize("kind", [BNNRegressor, BNNClassifier])
def test_scikit_learns_checks_of_fits_in_parts(kind: Any, check: Any) -> None:
    check(kind.__name__, kind(**IN_PARTS, model_arguments={"depth": 0}))


# --- weights of rows -------------------------------------------------------------------------------

COUNTS = np.arange(60) % 3


@pytest.mark.parametrize("standardise", [True, False])
def test_a_row_of_weight_two_counts_as_two(rows: tuple[np.ndarray, np.ndarray], standardise: bool) -> None:
    x, y = rows
    more = np.repeat(np.arange(60), COUNTS)
    made = BNNRegressor("linear_regression", bnn.Laplace(ppl="pyro"), standardise=standardise)
    first = clone(made).fit(x, y, sample_weight=COUNTS)
    second = clone(made).fit(x[more], y[more])
    for one, other in zip(first.predict(x, return_std=True), second.predict(x, return_std=True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    again = pickle.loads(pickle.dumps(first))
    np.testing.assert_array_equal(again.predict(x), first.predict(x))
    assert len(first.predict_interval(x[:3])[0]) == 3


def test_classes_of_weighted_rows(rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    labels, more = np.where(y > 3.0, "high", "low"), np.repeat(np.arange(60), COUNTS)
    made = BNNClassifier("logistic_regression", bnn.Laplace(ppl="pyro"))
    first, second = clone(made).fit(x, labels, COUNTS), clone(made).fit(x[more], labels[more])
    np.testing.assert_allclose(first.predict_proba(x), second.predict_proba(x), rtol=1e-5)


def test_parts_with_weights(rows: tuple[np.ndarray, np.ndarray]) -> None:
    """Rows of weight zero in the second part change nothing."""
    x, y = rows
    made = BNNRegressor("linear_regression", bnn.Laplace(ppl="pyro"), standardise=False)
    weight = np.array([1.0] + [0.0] * 19)
    parts = clone(made).partial_fit(x[:40], y[:40]).partial_fit(x[40:], y[40:], sample_weight=weight)
    whole = clone(made).partial_fit(x[:40], y[:40]).partial_fit(x[40:41], y[40:41])
    np.testing.assert_allclose(parts.predict(x), whole.predict(x), rtol=1e-5)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        ([1.0, 2.0], r"sample_weight as numbers of shape \(60,\)"),
        (["a"] * 60, "sample_weight as numbers"),
        (-np.ones(60), "finite numbers from 0"),
    ],
)
def test_weights_that_are_none(rows: tuple[np.ndarray, np.ndarray], weight: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        BNNRegressor("linear_regression", "map").fit(*rows, sample_weight=weight)


def test_a_model_of_a_system_has_no_weights(rows: tuple[np.ndarray, np.ndarray]) -> None:
    import numpyro

    def model(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", numpyro.distributions.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", numpyro.distributions.Normal(x @ w, 1.0), obs=y)

    with pytest.raises(UnsupportedError, match="in the language, to weight rows"):
        BNNRegressor(model, "map").fit(*rows, sample_weight=np.ones(60))
