"""Estimators from outside: their distributions against those of scikit-learn and SciPy, and their rows."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import (
    BaggingRegressor,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.linear_model import BayesianRidge, LinearRegression, LogisticRegression, QuantileRegressor
from sklearn.metrics import brier_score_loss, log_loss
from sklearn.model_selection import PredefinedSplit, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, MissingFrameworkError, UnknownNameError, UnsupportedError
from ppl_bnn.core.warning_filters import recorded
from ppl_bnn.evaluation.comparison.run import ComparisonInterrupted
from ppl_bnn.evaluation.grid.result import CELLS
from ppl_bnn.evaluation.outside import known, predictive
from ppl_bnn.evaluation.outside.known import ESTIMATORS
from ppl_bnn.inference.fingerprint import identity

X, X_NEW = np.split(np.random.default_rng(3).normal(size=(80, 3)), [60])
NOISE, NOISE_NEW = np.split(3.0 * np.random.default_rng(4).normal(size=80), [60])
QUICK = ("gp", "bayesian-ridge", "forest")


def wave(x: np.ndarray) -> np.ndarray:
    return 50.0 + 10.0 * np.sin(x[:, 0]) + 5.0 * x[:, 1]


Y, Y_NEW = wave(X) + NOISE, wave(X_NEW) + NOISE_NEW
LABELS, LABELS_NEW = (np.digitize(wave(x), [50.0, 55.0]) for x in (X, X_NEW))


def line(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(0.5))


def classifier(x: Any, y: Any = None, *, classes: int = 3) -> None:
    f = bnn.mlp(x, [classes], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Categorical())


def coin(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Bernoulli())


def counts(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Poisson())


def fitted(estimator: Any, y: np.ndarray = Y, model: Any = line, **options: Any) -> Any:
    outside = estimator if isinstance(estimator, bnn.Outside) else bnn.Outside(estimator)
    return outside.fit(model, X, y, **options)


# --- distributions ----------------------------------------------------------------------------------------


def test_standard_deviations_are_those_of_the_estimator() -> None:
    process = GaussianProcessRegressor(RBF(1.0) + WhiteKernel(0.1), random_state=0)
    found = fitted(process, standardise=True).predict(X_NEW)
    # The same by hand: in standard units, and back.
    mean, sd = X.mean(axis=0), X.std(axis=0)
    process.fit((X - mean) / sd, (Y - Y.mean()) / Y.std())
    loc, scale = process.predict((X_NEW - mean) / sd, return_std=True)
    oracle = stats.norm(loc * Y.std() + Y.mean(), scale * Y.std())
    np.testing.assert_allclose(found.log_prob(Y_NEW), oracle.logpdf(Y_NEW), rtol=1e-6)
    np.testing.assert_allclose(found.quantile(0.95), oracle.ppf(0.95), rtol=1e-6)
    # They are of y, and all of it counts as noise: there is one draw.
    np.testing.assert_array_equal(found.epistemic, 0.0)


def test_one_value_has_the_error_of_rows_that_were_left_out() -> None:
    found = fitted(LinearRegression(), seed=4).predict(X_NEW)
    folds = np.random.default_rng(4).permutation(len(Y)) % predictive.FOLDS
    left_out = cross_val_predict(LinearRegression(), X, Y, cv=PredefinedSplit(folds))
    oracle = stats.norm(LinearRegression().fit(X, Y).predict(X_NEW), np.sqrt(np.mean((Y - left_out) ** 2)))
    np.testing.assert_allclose(found.log_prob(Y_NEW), oracle.logpdf(Y_NEW), rtol=1e-9)


def log_score_of_left_out(make: Any, scale: float, seed: int) -> float:
    """Of a forest, by SciPy: every row by the trees that have not seen its fold."""
    folds = np.random.default_rng(seed).permutation(len(Y)) % predictive.FOLDS
    every = []
    for fold in range(predictive.FOLDS):
        inside, outside = folds != fold, folds == fold
        forest = make().fit(X[inside], Y[inside])
        values = np.stack([tree.predict(X[outside]) for tree in forest.estimators_])
        every.append(np.log(stats.norm(values, scale).pdf(Y[outside]).mean(axis=0)))
    return float(np.concatenate(every).mean())


def test_members_of_a_forest_are_draws_with_the_best_bandwidth() -> None:
    def make() -> RandomForestRegressor:
        return RandomForestRegressor(20, random_state=1)

    found = fitted(make(), seed=1).predict(X_NEW)
    forest = make().fit(X, Y)
    trees = np.stack([tree.predict(X_NEW) for tree in forest.estimators_])
    scale = float(found.parameters["scale"].flat[0])
    np.testing.assert_allclose(found.mean, forest.predict(X_NEW), rtol=1e-9)
    np.testing.assert_allclose(found.epistemic, trees.var(axis=0), rtol=1e-9)
    np.testing.assert_allclose(found.aleatoric, scale**2, rtol=1e-9)
    oracle = np.log(stats.norm(trees, scale).pdf(Y_NEW).mean(axis=0))
    np.testing.assert_allclose(found.log_prob(Y_NEW), oracle, rtol=1e-8)
    # The bandwidth is the best on rows that were left out: on either side it is worse.
    best = log_score_of_left_out(make, scale, 1)
    assert best > max(log_score_of_left_out(make, factor * scale, 1) for factor in (0.9, 1.1))
    assert best > max(log_score_of_left_out(make, factor * scale, 1) for factor in (0.2, 5.0))


def test_members_of_a_bag_see_the_columns_that_they_were_fitted_to() -> None:
    bag = BaggingRegressor(LinearRegression(), 8, max_features=2, random_state=0)
    found = fitted(bag).predict(X_NEW)
    np.testing.assert_allclose(found.mean, bag.fit(X, Y).predict(X_NEW), rtol=1e-9)


class QuantileForest(RegressorMixin, BaseEstimator):
    """As forests of quantiles are: `predict` takes the levels."""

    def fit(self, x: Any, y: Any) -> QuantileForest:
        self.forest_ = RandomForestRegressor(30, random_state=0).fit(x, y)
        return self

    def predict(self, x: Any, quantiles: Any = None) -> np.ndarray:
        values = np.stack([tree.predict(x) for tree in self.forest_.estimators_])
        return np.quantile(values, quantiles, axis=0).T


@pytest.mark.parametrize(
    ("estimator", "levels"),
    [
        (HistGradientBoostingRegressor(loss="quantile", quantile=0.5, max_iter=10), "quantile"),
        (GradientBoostingRegressor(loss="quantile", n_estimators=10, random_state=0), "alpha"),
        (QuantileRegressor(alpha=0.0, solver="highs"), "quantile"),
        (QuantileForest(), "predict"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_quantiles_are_a_mixture_of_one_draw(estimator: Any, levels: str) -> None:
    found = fitted(bnn.Outside(estimator, quantiles=4)).predict(X_NEW)
    wanted = (0.125, 0.375, 0.625, 0.875)
    if levels == "predict":
        oracle = np.asarray(estimator.fit(X, Y).predict(X_NEW, wanted)).T
    else:
        oracle = np.stack(
            [
                type(estimator)(**{**estimator.get_params(), levels: each}).fit(X, Y).predict(X_NEW)
                for each in wanted
            ]
        )
    values = found.parameters["loc"]
    assert values.shape == (1, len(X_NEW), 4)
    np.testing.assert_allclose(values[0], np.sort(oracle, axis=0).T, rtol=1e-9)
    np.testing.assert_allclose(found.mean, oracle.mean(axis=0), rtol=1e-9)
    # What is uncertain is the target, not the function.
    np.testing.assert_array_equal(found.epistemic, 0.0)
    scale = float(found.parameters["scale"].flat[0])
    np.testing.assert_allclose(found.variance, oracle.var(axis=0) + scale**2, rtol=1e-9)


def test_probabilities_are_those_of_the_estimator_in_the_order_of_the_labels() -> None:
    estimator = RandomForestClassifier(20, random_state=0)
    found = fitted(estimator, LABELS, classifier, class_names=("a", "b", "c")).predict(X_NEW)
    oracle = np.clip(estimator.fit(X, LABELS).predict_proba(X_NEW), 1e-3, None)
    np.testing.assert_allclose(np.clip(found.mean, 1e-3, None), oracle)
    assert found.class_names == ("a", "b", "c")
    # A class without a training row has its place, and probability zero.
    few = LABELS.copy()
    few[few == 1] = 2
    missing = fitted(estimator, few, classifier).predict(X_NEW)
    np.testing.assert_array_equal(missing.mean[:, 1], 0.0)
    np.testing.assert_allclose(missing.mean.sum(axis=1), 1.0)


def test_two_classes_have_the_family_of_the_model() -> None:
    labels, new = LABELS > 0, LABELS_NEW > 0
    found = fitted(LogisticRegression(), labels.astype(int), coin).predict(X_NEW)
    oracle = LogisticRegression().fit(X, labels).predict_proba(X_NEW)[:, 1]
    np.testing.assert_allclose(found.mean, oracle)
    assert found.log_prob(new.astype(int)).mean() == pytest.approx(-log_loss(new, oracle))
    assert bnn.scores.brier(found, new.astype(int)) == pytest.approx(2.0 * brier_score_loss(new, oracle))


def test_a_function_of_the_caller_takes_the_place_of_the_rules() -> None:
    def doubled(estimator: Any, x: Any) -> bnn.Prediction:
        loc, scale = estimator.predict(x, return_std=True)
        return bnn.Prediction("Normal", {"loc": loc[None], "scale": 2.0 * scale[None]})

    own = fitted(bnn.Outside(BayesianRidge(), predict=doubled), standardise=True).predict(X_NEW)
    plain = fitted(BayesianRidge(), standardise=True).predict(X_NEW)
    np.testing.assert_allclose(own.std, 2.0 * plain.std, rtol=1e-12)
    for wrong in (lambda estimator, x: estimator.predict(x), lambda estimator, x: doubled(estimator, x[:3])):
        with pytest.raises(InputError, match="Outside, predict: expected a Prediction of 20 rows; got"):
            fitted(bnn.Outside(BayesianRidge(), predict=wrong)).predict(X_NEW)


def test_a_seed_is_given_to_what_has_none() -> None:
    forest = RandomForestRegressor(5)
    first, again, other = (fitted(forest, seed=seed).predict(X_NEW).mean for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    kept = RandomForestRegressor(5, random_state=7)
    means = [fitted(kept, seed=seed).predict(X_NEW).mean for seed in (0, 1)]
    np.testing.assert_array_equal(*means)
    piped = make_pipeline(StandardScaler(), RandomForestRegressor(5))
    means = [fitted(piped, seed=seed).predict(X_NEW).mean for seed in (0, 0, 1)]
    np.testing.assert_array_equal(means[0], means[1])
    assert not np.array_equal(means[0], means[2])
    # What the caller gave is not changed.
    assert forest.random_state is None
    assert not hasattr(forest, "estimators_")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ESTIMATORS]
)
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_what_has_a_name_predicts_better_than_the_marginal(name: str, task: str) -> None:
    if ESTIMATORS[name].module != "sklearn":
        pytest.importorskip(ESTIMATORS[name].module)
    numbers = task == "regression"
    if not numbers and ESTIMATORS[name].classes is None:
        with pytest.raises(UnsupportedError, match="a target that is a number; got classes"):
            fitted(name, LABELS, classifier)
        return
    rng = np.random.default_rng(0)
    x = rng.uniform(-1.5, 1.5, size=(240, 2))
    y = wave(x) + rng.normal(size=240) if numbers else (wave(x) + rng.normal(size=240) > 50.0).astype(int)
    train, test = slice(160), slice(160, None)
    outside = bnn.Outside(name)
    posterior = outside.fit(line if numbers else coin, x[train], y[train], standardise=True)
    score = posterior.predict(x[test]).log_prob(y[test]).mean()
    share = y[train].mean()
    marginal = stats.norm(share, y[train].std()).logpdf if numbers else stats.bernoulli(share).logpmf
    assert score > marginal(y[test]).mean() + 0.1
    assert posterior.info.method == name
    assert outside.packages == (ESTIMATORS[name].package,)


# --- what is refused --------------------------------------------------------------------------------------


def test_what_is_no_estimator_is_refused() -> None:
    for given in (RandomForestRegressor, 3, print):
        with pytest.raises(
            InputError, match="Outside: expected an estimator with `fit` and `predict`, or a name"
        ):
            bnn.Outside(given)
    with pytest.raises(UnknownNameError, match="unknown estimator 'forrest': did you mean 'forest'"):
        bnn.Outside("forrest")
    with pytest.raises(InputError, match="quantiles, at least 2; got 1"):
        bnn.Outside(QuantileForest(), quantiles=1)
    with pytest.raises(InputError, match="predict, a function; got 'mean'"):
        bnn.Outside(BayesianRidge(), predict="mean")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no predict or quantiles beside a name"):
        bnn.Outside("gp", quantiles=9)


@pytest.mark.parametrize(
    "estimator",
    [
        LinearRegression(),
        # Its `alpha` is a penalty, or variance.
        GaussianProcessRegressor(),
        GradientBoostingRegressor(),
        HistGradientBoostingRegressor(quantile=0.5),
    ],
    ids=lambda each: type(each).__name__,
)
def test_quantiles_of_what_does_not_fit_them_are_refused(estimator: Any) -> None:
    with pytest.raises(
        InputError, match=f"expected an estimator of quantiles.*got {type(estimator).__name__}"
    ):
        bnn.Outside(estimator, quantiles=9)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = known.Known(lambda columns: None, None, {}, "not_installed_here", "not-installed")
    monkeypatch.setitem(ESTIMATORS, "catboost", absent)
    with pytest.raises(
        MissingFrameworkError, match=r"catboost: expected the package not-installed.*\[boosting\]"
    ):
        bnn.Outside("catboost")


@pytest.mark.parametrize(
    ("model", "y", "words"),
    [
        (counts, np.arange(60.0), "got Poisson targets"),
        (line, np.stack([Y, Y], axis=1), "got MultiOutputGaussian targets|expected"),
        (classifier, np.full(60, 7), "labels"),
    ],
    ids=["counts", "outputs", "labels"],
)
def test_targets_that_cannot_be_served_are_refused(model: Any, y: np.ndarray, words: str) -> None:
    with pytest.raises((UnsupportedError, InputError, bnn.errors.ModelError), match=words):
        fitted(BayesianRidge(), y, model)


def test_inputs_that_are_no_table_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"inputs as a table \(N, F\)"):
        bnn.Outside(BayesianRidge()).fit(line, {"x": X}, Y)


# --- rows of a comparison ---------------------------------------------------------------------------------


def compared(methods: dict[str, Any], **options: Any) -> Any:
    return bnn.compare(line, (X, Y), (X_NEW, Y_NEW), methods, standardise=True, **options)


def test_a_row_has_scores_and_no_diagnostics(tmp_path: Path) -> None:
    methods = {"laplace": bnn.Laplace(), "ridge": bnn.Outside(BayesianRidge())}
    result = compared(methods, reference="laplace", out=tmp_path / "run")
    row = result.table.loc["ridge"]
    alone = fitted(BayesianRidge(), standardise=True).predict(X_NEW)
    assert row["log_score"] == pytest.approx(alone.log_prob(Y_NEW).mean())
    assert row["crps"] == pytest.approx(bnn.scores.crps(alone, Y_NEW))
    assert row["ppl"] == "outside"
    assert row["failure"] == ""
    assert min(row[["run_seconds", "predict_seconds", "peak_memory"]]) > 0.0
    assert row[["gap_mean", "elpd_loo", "r_hat", "k_hat", "gradient_evaluations", "parameters"]].isna().all()
    assert result.notes["ridge", "elpd_loo"].startswith("An estimator from outside the library")
    assert list(result.posteriors) == ["laplace"]
    assert result.fits["ridge"].info.settings["compute_score"] == "False"
    assert result.fits["ridge"].info.versions["scikit-learn"]
    assert "from outside, so not approximations of it: ridge in" in result.summary()
    page = bnn.report(result, tmp_path / "report.html").read_text()
    assert "BayesianRidge" in page
    loaded = bnn.Comparison.load(tmp_path / "run")
    assert loaded.table.equals(result.table)
    assert loaded.fits["ridge"].info == result.fits["ridge"].info
    np.testing.assert_array_equal(loaded.predictions["ridge"].mean, result.predictions["ridge"].mean)


def test_only_estimators_from_outside_are_compared_too() -> None:
    result = compared({"ridge": bnn.Outside(BayesianRidge()), "tree": bnn.Outside(DecisionTreeRegressor())})
    assert result.table["failure"].tolist() == ["", ""]
    assert "ridge" in result.summary()
    with pytest.raises(
        InputError, match="reference: expected a method that approximates the posterior; got ridge"
    ):
        compared({"ridge": bnn.Outside(BayesianRidge())}, reference="ridge")
    with pytest.raises(
        InputError, match=r"got an estimator, BayesianRidge; try bnn.Outside\(BayesianRidge\(\)\)"
    ):
        compared({"ridge": BayesianRidge()})


def test_warnings_of_an_estimator_are_notes_of_its_row() -> None:
    class Complaining(BayesianRidge):
        def fit(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            warnings.warn("the kernel is\n  wide", UserWarning, stacklevel=2)
            return super().fit(x, y)

    result = compared({"ridge": bnn.Outside(Complaining())})
    assert result.notes["ridge", "run_seconds"] == "the kernel is wide."


def test_an_estimator_that_fails_is_a_row_with_its_reason() -> None:
    class Failing(BayesianRidge):
        def fit(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            raise ValueError("no such kernel")

    result = compared({"failing": bnn.Outside(Failing()), "ridge": bnn.Outside(BayesianRidge())})
    assert result.failures == {"failing": "ValueError: no such kernel"}
    assert list(result.predictions) == ["ridge"]


def test_an_interrupted_comparison_keeps_it(tmp_path: Path) -> None:
    class Interrupting(BayesianRidge):
        def fit(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            raise KeyboardInterrupt

    methods = {"ridge": bnn.Outside(BayesianRidge()), "stopped": bnn.Outside(Interrupting())}
    with pytest.raises(ComparisonInterrupted, match=r"finished: ridge; kept in .*comparison\.csv") as caught:
        compared(methods, out=tmp_path / "run")
    assert list(caught.value.partial.predictions) == ["ridge"]
    assert bnn.Comparison.load(tmp_path / "run").missing == ("stopped",)


def test_threads_of_scikit_learn_take_the_filters_of_warnings() -> None:
    forest = RandomForestRegressor(4, random_state=0, n_jobs=2)
    with recorded() as caught:
        forest.fit(X, Y)
        warnings.warn("recorded", UserWarning, stacklevel=1)
    assert [str(each.message) for each in caught] == ["recorded"]


# --- grids ------------------------------------------------------------------------------------------------


def test_a_grid_computes_it_once_and_knows_its_settings(tmp_path: Path) -> None:
    def grid(**methods: Any) -> bnn.Grid:
        every = {"map": bnn.MAP(steps=200), **methods}
        return bnn.Grid(["linear_regression"], ["diabetes"], every, "random:2@0.9", reference="map")

    first = grid(ridge=bnn.Outside(BayesianRidge()))
    result = first.run(tmp_path / "grid", engine="sequential")
    found: Any = result.cells.set_index("method").loc["ridge"]
    assert found["ppl"].tolist() == ["outside"] * 2
    assert found["failure"].tolist() == [""] * 2
    assert found["device"].tolist() == ["cpu"] * 2
    assert found["log_score"].notna().all()
    assert found["gap_mean"].isna().all()
    files = tmp_path / "grid" / CELLS
    written = {path.name: path.stat().st_mtime_ns for path in files.iterdir()}
    again = grid(ridge=bnn.Outside(BayesianRidge())).run(tmp_path / "grid", engine="sequential")
    assert {
        path.name: path.stat().st_mtime_ns for path in (tmp_path / "grid").rglob("*.safetensors")
    } == written
    assert len(again.cells) == 4

    def key(outside: bnn.Outside) -> str:
        return next(each.key for each in grid(ridge=outside).cells if each.method == "ridge")

    keys = [key(bnn.Outside(BayesianRidge(**more))) for more in ({}, {}, {"tol": 1e-2})]
    assert keys[0] == keys[1] == found["key"].iloc[0]
    assert keys[2] != keys[0]
    with pytest.raises(InputError, match="reference: expected a method that approximates the posterior"):
        bnn.Grid(["linear_regression"], ["diabetes"], ["bayesian-ridge", "map"], reference="bayesian-ridge")


def test_identity_of_an_estimator_is_all_of_its_parameters() -> None:
    # Its `repr` is shortened, and leaves out what is the default.
    long = [BaggingRegressor(GradientBoostingRegressor(max_depth=depth)) for depth in (3, 3, 4)]
    texts = [json.dumps(identity(each)) for each in long]
    assert texts[0] == texts[1] != texts[2]


def test_names_in_a_file_of_a_grid(tmp_path: Path) -> None:
    head = 'models = ["linear_regression"]\ndata = ["diabetes"]\n'
    file = tmp_path / "grid.toml"
    file.write_text(head + 'methods = ["map", "bayesian-ridge"]\n')
    assert bnn.Grid.from_toml(file).methods["bayesian-ridge"] == bnn.Outside("bayesian-ridge")
    file.write_text(head + '[methods.map]\n[methods.other]\nmethod = "gp"\n')
    assert bnn.Grid.from_toml(file).methods["other"] == bnn.Outside("gp")
    file.write_text(head + '[methods.gp]\nppl = "pyro"\n')
    with pytest.raises(UnknownNameError, match=r"methods\.gp: unknown key of gp, from outside 'ppl'"):
        bnn.Grid.from_toml(file)
