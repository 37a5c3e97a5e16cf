"""The tree that ArviZ reads: every group is what it says, and every statistic and plot that is claimed works."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pytest
import scipy.stats

import ppl_bnn as bnn
import ppl_bnn.posterior.export
from ppl_bnn.core.errors import InputError
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.posterior.approximation import Chains, Drawn, Point
from ppl_bnn.posterior.export import posterior_datatree
from tests.arviz_functions import ARVIZ_PLOTS, ARVIZ_STATISTICS, arviz_defined

matplotlib.use("Agg")

ROWS, CHAINS, DRAWS = 25, 4, 100


@dataclass(frozen=True)
class Planted(Method):
    """Draws around one draw of the prior, in the form of each kind of posterior."""

    form: str = "chains"
    spread: float = 0.05

    def run(self, problem: Any, progress: Any) -> Outcome:
        centre = {
            k: v[0] for k, v in problem.program.prior_draws(problem.x, problem.y, problem.seed, 1).items()
        }
        history = {"loss": np.linspace(3.0, 1.0, 7)}
        if self.form == "point":
            return Outcome(Point(centre), history=history)
        scale = {name: np.full(np.shape(value), self.spread) for name, value in centre.items()}
        normal = MeanField(centre, scale)
        if self.form == "iid":
            return Outcome(normal, history=history, figures={"elbo": -3.0})
        rng = np.random.default_rng(problem.seed)
        u = normal.draw(CHAINS * DRAWS, rng)
        shape = (CHAINS, DRAWS)
        statistics = {
            "diverging": rng.random(shape) < 0.02,
            "energy": rng.normal(size=shape),
            "tree_depth": rng.integers(1, 5, size=shape),
            "acceptance_rate": rng.uniform(0.5, 1.0, size=shape),
        }
        chains = Chains({name: value.reshape(*shape, *value.shape[1:]) for name, value in u.items()})
        return Outcome(chains, statistics=statistics, gradient_evaluations=12.0)


def regression(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    f = bnn.mlp(x, [4, 1], activation="tanh", prior=bnn.priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(noise))


def classification(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [4, 3], activation="tanh"), bnn.likelihoods.Categorical())


def two_outputs(x: Any, y: Any = None) -> None:
    bnn.observe(y, bnn.mlp(x, [2]), bnn.likelihoods.Gaussian(0.5))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(2.0, 3.0, size=(ROWS, 2))
    return x, 10.0 + 4.0 * np.sin(x[:, 0]) + rng.normal(size=ROWS)


def fitted(form: str, ppl: str = "pyro", **options: Any) -> Any:
    x, y = data()
    return Planted(form=form, ppl=ppl).fit(regression, x, y, standardise=True, **options)


@pytest.fixture(scope="module")
def trees() -> dict[str, Any]:
    x, _ = data()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppl_bnn.posterior.export, "PRIOR_DRAWS", 50)
        return {form: fitted(form).to_datatree(x[:3], prior=form != "point") for form in ARVIZ_STATISTICS}


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["chains", "iid", "point"])
def test_every_group_has_the_content_that_its_name_says(form: str, ppl: str) -> None:
    x, y = data()
    posterior = fitted(form, ppl, feature_names=("age", "mass"))
    tree = posterior.to_datatree(x[:3])
    chains, draws = posterior.shape
    assert dict(tree.posterior.sizes) == {
        "chain": chains,
        "draw": draws,
        "hidden0_in": 2,
        "hidden0_out": 4,
        "output_in": 4,
        "output_out": 1,
    }
    assert tree.posterior["hidden0.weight"].dims == ("chain", "draw", "hidden0_in", "hidden0_out")
    assert tree.posterior["hidden0.bias"].dims == ("chain", "draw", "hidden0_out")
    assert list(tree.posterior.hidden0_in.values) == ["age", "mass"]
    assert list(tree.constant_data.feature.values) == ["age", "mass"]
    for name, value in posterior.draws.items():
        np.testing.assert_array_equal(tree.posterior[name].values, value)
    np.testing.assert_allclose(tree.observed_data.y.values, y, rtol=1e-12)
    np.testing.assert_allclose(tree.constant_data.x.values, x, rtol=1e-12)
    np.testing.assert_array_equal(tree.predictions_constant_data.x.values, x[:3])
    if form == "point":
        # No row can be left out of a point: ArviZ says that there is no log likelihood.
        assert "log_likelihood" not in tree.children
        assert "no posterior spread" in tree.attrs["no_leave_one_out"]
    else:
        np.testing.assert_array_equal(tree.log_likelihood.y.values, posterior.log_likelihood())
        assert tree.attrs["no_leave_one_out"] == ""
    assert tree.posterior_predictive.y.shape == (chains, draws, ROWS)
    assert tree.predictions.y.shape == (chains, draws, 3)
    np.testing.assert_array_equal(tree.fit_history.loss.values, posterior.info.history["loss"]) if (
        form != "chains"
    ) else None
    assert ("log_q" in tree.sample_stats) == (form == "iid")
    assert "prior" not in tree


@pytest.mark.parametrize("form", ["chains", "iid", "point"])
def test_log_joint_is_log_prior_and_log_likelihood_and_jacobian(form: str, ppl: str) -> None:
    posterior = fitted(form, ppl)
    tree = posterior.to_datatree()
    units = -ROWS * np.log(posterior.standardisation.y_scale).sum()
    prior = sum(tree.log_prior[name] for name in tree.log_prior.data_vars)
    likelihood = posterior.log_likelihood().sum(-1) - units
    # The only constrained site is the noise, exp(u): log |dw/du| = log w.
    expected = prior + likelihood + np.log(tree.posterior.noise)
    np.testing.assert_allclose(tree.sample_stats.lp.values, expected.values, rtol=1e-10)
    noise = tree.posterior.noise.values
    np.testing.assert_allclose(tree.log_prior.noise.values, scipy.stats.halfnorm.logpdf(noise), rtol=1e-12)
    weight = tree.posterior["hidden0.weight"].values
    expected = scipy.stats.norm.logpdf(weight, scale=np.sqrt(0.5)).sum((-2, -1))
    np.testing.assert_allclose(tree.log_prior["hidden0.weight"].values, expected, rtol=1e-12)


def test_log_q_is_the_density_of_the_approximation() -> None:
    posterior = fitted("iid")
    log_q = posterior.to_datatree().sample_stats.log_q.values
    approximation, u = posterior.approximation, posterior.unconstrained_draws
    expected = sum(
        scipy.stats.norm.logpdf(u[name], approximation.loc[name], 0.05).reshape(1, 1000, -1).sum(-1)
        for name in u
    )
    np.testing.assert_allclose(log_q, expected, rtol=1e-10)


def test_posterior_predictive_draws_follow_the_predictive_in_original_units() -> None:
    posterior = fitted("iid")
    x, _ = data()
    tree = posterior.to_datatree(x)
    prediction = posterior.predict(x)
    for group in ("posterior_predictive", "predictions"):
        y = tree[group].y.values[0]
        error = np.abs(y.mean(0) - prediction.mean) / (prediction.std / np.sqrt(len(y)))
        assert error.max() < 4.5  # of 25 rows; the chance of more is 2e-4
        levels = np.stack([prediction.cdf(row) for row in y])
        # Row by row the y are independent draws from the mixture; 28 tests, seldom one below 1e-5.
        assert all(scipy.stats.kstest(row, "uniform").pvalue > 1e-5 for row in levels.T)


def test_each_draw_of_y_belongs_to_its_draw_of_the_weights() -> None:
    """With hardly any noise, y is the network's own output: draw by draw, not in some other order."""

    def quiet(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(1e-6))

    x, y = data()
    posterior = Planted(form="chains", spread=1.0, ppl="pyro").fit(quiet, x, y)
    tree = posterior.to_datatree(x[:4])
    eta = posterior.predictor(x)[..., 0]
    np.testing.assert_allclose(tree.posterior_predictive.y.values, eta, atol=1e-4)
    np.testing.assert_allclose(tree.predictions.y.values, eta[..., :4], atol=1e-4)


def test_prior_draws_follow_the_prior() -> None:
    tree = fitted("point").to_datatree(prior=True)
    assert tree.prior.sizes["draw"] == tree.prior_predictive.sizes["draw"] == 500
    assert tree.prior["output.weight"].dims == ("chain", "draw", "output_in", "output_out")
    assert scipy.stats.kstest(tree.prior.noise.values.ravel(), "halfnorm").pvalue > 1e-4
    weights = tree.prior["hidden0.weight"].values.ravel()
    assert scipy.stats.kstest(weights, scipy.stats.norm(0, np.sqrt(0.5)).cdf).pvalue > 1e-4
    # Standardised targets have mean 0 under the prior, so original ones the mean of the data.
    y = tree.prior_predictive.y.values
    scale = data()[1].std()
    assert abs(np.median(y) - data()[1].mean()) < 0.1 * scale


def test_classes_are_integers_and_name_the_last_outputs(ppl: str) -> None:
    x, _ = data()
    y = np.arange(ROWS) % 3
    posterior = Planted(form="iid", ppl=ppl).fit(classification, x, y, class_names=("red", "green", "blue"))
    tree = posterior.to_datatree(x[:2])
    assert list(tree.posterior.output_out.values) == ["red", "green", "blue"]
    assert json.loads(tree.attrs["class_names"]) == ["red", "green", "blue"]
    np.testing.assert_array_equal(tree.observed_data.y.values, y)
    for group in ("observed_data", "posterior_predictive", "predictions"):
        assert tree[group].y.dtype.kind == "i"
    shares = (tree.posterior_predictive.y.values[0, :, :, None] == np.arange(3)).mean(0)
    np.testing.assert_allclose(shares, posterior.predict(x).mean, atol=0.08)


def test_several_outputs_and_dicts_of_inputs() -> None:
    x, y = data()
    tree = Planted(ppl="pyro").fit(two_outputs, x, np.stack([y, -y], 1), standardise=True).to_datatree(x[:2])
    assert tree.observed_data.y.dims == ("obs", "output")
    assert tree.posterior_predictive.y.dims == ("chain", "draw", "obs", "output")
    assert tree.log_likelihood.y.dims == ("chain", "draw", "obs")

    def named(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x["y"], [1]), bnn.likelihoods.Gaussian(1.0))

    inputs = {"y": x, "group": np.arange(ROWS)}
    tree = Planted(ppl="pyro").fit(named, inputs, y, standardise=True).to_datatree(inputs)
    np.testing.assert_allclose(tree.constant_data["y"].values, x, rtol=1e-12)
    np.testing.assert_array_equal(tree.constant_data.group.values, np.arange(ROWS))
    np.testing.assert_allclose(tree.observed_data["y"].values, y, rtol=1e-12)


def test_attributes_say_how_it_came_about_and_survive_netcdf(tmp_path: Any) -> None:
    import xarray

    posterior = fitted("chains")
    tree = posterior.to_datatree(data()[0][:2])
    tree.to_netcdf(tmp_path / "tree.nc", engine="h5netcdf")
    with xarray.open_datatree(tmp_path / "tree.nc", engine="h5netcdf") as back:
        for attributes in (back.attrs, back.posterior.attrs):
            assert attributes["method"] == "Planted"
            assert attributes["system"] == attributes["inference_library"] == "pyro"
            assert attributes["seed"] == 0
            assert attributes["dtype"] == "float64"
            assert attributes["device"] == "cpu"
            assert attributes["gradient_evaluations"] == 12.0
            assert attributes["draws_are_iid"] == 0
            assert attributes["posterior_kind"] == "chains"
            assert attributes["predictive"] == "sampled"
            assert attributes["data_hash"] == posterior.info.data_hash
            assert json.loads(attributes["versions"]) == posterior.info.versions
            assert json.loads(attributes["settings"])["form"] == "chains"
        assert back.sample_stats.diverging.dtype == bool
        for group in tree.children:
            for name in tree[group].data_vars:
                np.testing.assert_array_equal(back[group][name].values, tree[group][name].values)
    assert fitted("iid").to_datatree().attrs["draws_are_iid"] == 1


def test_fewer_draws_are_evenly_spaced_within_each_chain() -> None:
    posterior = fitted("chains")
    tree, full = posterior_datatree(posterior, draws=28), posterior.to_datatree()
    index = [0, 16, 33, 50, 66, 82, 99]
    for group in ("posterior", "sample_stats", "log_prior", "log_likelihood"):
        for name in tree[group].data_vars:
            expected = full[group][name].values[:, index]
            np.testing.assert_allclose(tree[group][name].values, expected, rtol=1e-12)
    for wrong in (3, 401, True, 2.5):
        with pytest.raises(InputError, match="draws"):
            posterior_datatree(posterior, draws=wrong)


def test_densities_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = fitted("iid")
    whole = posterior.to_datatree()
    monkeypatch.setattr(ppl_bnn.posterior.export, "MEMORY", 2**20)
    parts = posterior.to_datatree()
    np.testing.assert_allclose(parts.sample_stats.lp.values, whole.sample_stats.lp.values, rtol=1e-12)
    np.testing.assert_allclose(parts.log_prior.noise.values, whole.log_prior.noise.values, rtol=1e-12)


def test_inputs_unlike_the_training_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="training"):
        fitted("point").to_datatree(np.zeros((3, 5)))


@pytest.mark.parametrize(("draws", "defined"), [(24, False), (25, True)])
def test_rows_are_left_out_of_trees_that_have_a_tail_of_draws(draws: int, defined: bool) -> None:
    import arviz_stats as stats

    posterior = fitted("iid")
    posterior.approximation = Drawn({name: u[0, :draws] for name, u in posterior.unconstrained_draws.items()})
    del posterior.unconstrained_draws
    tree = posterior.to_datatree()
    assert ("log_likelihood" in tree.children) is defined
    assert (tree.attrs["no_leave_one_out"] == "") is defined
    assert ("loo" in arviz_defined(tree)) is ("compare" in arviz_defined(tree)) is defined
    if defined:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert np.isfinite(stats.loo(tree).elpd)
    else:
        assert "24 draws have no tail" in tree.attrs["no_leave_one_out"]
        with pytest.raises(TypeError, match="log likelihood not found"):
            stats.loo(tree)


# --- ArviZ's statistics and plots -------------------------------------------------------------------


def statistics_of_arviz() -> dict[str, Callable[[Any], Any]]:
    import arviz_stats as stats

    few = {"var_names": ["noise", "output.bias"]}
    calls: dict[str, Callable[[Any], Any]] = {
        name: lambda tree, function=getattr(stats, name): function(tree, **few)
        for name in (
            "ess",
            "rhat",
            "mcse",
            "hdi",
            "eti",
            "mean",
            "median",
            "mode",
            "std",
            "var",
            "mad",
            "iqr",
        )
        + ("kde", "histogram", "psense")
    }
    return calls | {
        "summary": lambda tree: stats.summary(
            tree, kind="stats" if tree.attrs["draws_are_iid"] else "all", round_to="none", **few
        ),
        "bfmi": stats.bfmi,
        "diagnose": lambda tree: stats.diagnose(tree, show_diagnostics=False),
        "loo": lambda tree: stats.loo(tree, pointwise=True).elpd,
        "loo_approximate_posterior": lambda tree: (
            stats.loo_approximate_posterior(
                tree, log_p=tree.sample_stats.lp, log_q=tree.sample_stats.log_q, pointwise=True
            ).elpd
        ),
        "loo_i": lambda tree: stats.loo_i(0, tree).elpd,
        "compare": lambda tree: _compared(tree)["elpd"],
        "loo_expectations": lambda tree: stats.loo_expectations(tree, var_name="y")[0],
        "loo_metrics": lambda tree: tuple(stats.loo_metrics(tree, var_name="y", round_to="none")),
        "loo_pit": lambda tree: stats.loo_pit(tree, var_names="y"),
        "loo_r2": lambda tree: stats.loo_r2(tree, var_name="y", n_simulations=100, round_to="none"),
        "loo_score": lambda tree: tuple(stats.loo_score(tree, var_name="y", round_to="none"))[:2],
        "metrics": lambda tree: tuple(stats.metrics(tree, var_name="y", round_to="none")),
        "residual_r2": lambda tree: stats.residual_r2(
            tree, pred_mean="y", obs_name="y", group="posterior_predictive", round_to="none"
        ),
        "bayesian_r2": lambda tree: stats.bayesian_r2(_with_mean(tree), "mu", "noise", round_to="none"),
        "psense_summary": lambda tree: stats.psense_summary(tree, round_to=8, **few).iloc[:, :2],
        "thin": lambda tree: stats.thin(tree, factor=2, **few),
    }


def _with_mean(tree: Any) -> Any:
    """bayesian_r2 wants the mean of y as a variable of the posterior."""
    tree = tree.copy()
    tree["posterior"] = tree["posterior"].to_dataset().assign(mu=tree.posterior_predictive.y)
    return tree


def _compared(tree: Any) -> Any:
    import arviz_stats as stats

    other = tree.copy()
    other["log_likelihood"] = tree["log_likelihood"].to_dataset() - 0.3
    return stats.compare({"one": tree, "other": other}, round_to="none")


STATISTICS = [(kind, name) for kind, names in ARVIZ_STATISTICS.items() for name in names]
PLOTS = [(kind, name) for kind, names in ARVIZ_PLOTS.items() for name in names]


def finite(value: Any) -> Iterator[bool]:
    if hasattr(value, "data_vars"):
        datasets = [group.dataset for group in value.subtree] if hasattr(value, "subtree") else [value]
        for dataset in datasets:
            for array in dataset.data_vars.values():
                yield bool(np.isfinite(array.values.astype(float)).all())
    else:
        yield bool(np.isfinite(np.asarray(value, dtype=float)).all())


def test_what_is_claimed_for_a_kind_is_defined_for_its_tree(trees: dict[str, Any]) -> None:
    for kind, tree in trees.items():
        assert arviz_defined(tree) == ARVIZ_STATISTICS[kind]
        assert arviz_defined(tree, ARVIZ_PLOTS) == ARVIZ_PLOTS[kind]


@pytest.mark.parametrize(("kind", "name"), STATISTICS)
def test_claimed_statistics_work(kind: str, name: str, trees: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # Draws that were planted around a draw of the prior are no posterior: Pareto k is rightly large.
        warnings.filterwarnings("ignore", message="Estimated shape parameter")
        result = statistics_of_arviz()[name](trees[kind])
    if name == "diagnose":
        return
    checked = list(finite(result))
    assert checked
    assert all(checked)


@pytest.fixture
def plots() -> Iterator[Any]:
    import arviz_plots
    import matplotlib.pyplot as plt

    yield arviz_plots
    plt.close("all")


@pytest.mark.parametrize(("kind", "name"), PLOTS)
def test_claimed_plots_work(kind: str, name: str, trees: dict[str, Any], plots: Any) -> None:
    import arviz_stats as stats
    import matplotlib.pyplot as plt

    tree, options = trees[kind], {"backend": "matplotlib"}
    function = getattr(plots, name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Estimated shape parameter")
        if name == "plot_compare":
            function(_compared(tree), **options)
        elif name == "plot_khat":
            function(stats.loo(tree, pointwise=True), **options)
        elif name == "plot_energy" or name.startswith(("plot_ppc", "plot_loo")):
            function(tree, **options)
        else:
            function(tree, var_names=["noise", "output.bias"], **options)
    figure = plt.gcf()
    assert any(axes.lines or axes.collections or axes.patches or axes.images for axes in figure.axes)
