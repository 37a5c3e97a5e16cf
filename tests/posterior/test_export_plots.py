"""The calls of ArviZ's documentation work on the tree of a posterior, as they stand there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import arviz_plots as azp
import arviz_stats as azs
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods
from ppl_bnn.posterior.export import posterior_datatree

matplotlib.use("Agg")


def regression(x: Any, y: Any = None) -> None:
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [3, 1]), likelihoods.Gaussian(noise))


@pytest.fixture(scope="module")
def posterior() -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    y = np.sin(x[:, 0]) + 0.3 * rng.normal(size=40)
    method = bnn.NUTS(chains=4, warmup=150, draws=100, max_tree_depth=5)
    return method.fit(regression, x, y, feature_names=("age", "dose"))


@pytest.fixture(scope="module")
def tree(posterior: Any) -> Any:
    return posterior.to_datatree(prior=True)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def drawn() -> bool:
    return any(axes.lines or axes.collections or axes.patches for axes in plt.gcf().axes)


# Without arguments, as in the gallery of ArviZ; then by the names of variables and coordinates.
PLOTS: dict[str, Callable[[Any], Any]] = {
    "plot_dist": lambda tree: azp.plot_dist(tree),
    "plot_dist ecdf": lambda tree: azp.plot_dist(tree, kind="ecdf", var_names=["noise"]),
    "plot_forest": lambda tree: azp.plot_forest(tree),
    "plot_forest names": lambda tree: azp.plot_forest(tree, var_names=["~bias"], filter_vars="regex"),
    "plot_trace": lambda tree: azp.plot_trace(tree, var_names=["noise", "output.bias"]),
    "plot_trace coords": lambda tree: azp.plot_trace(
        tree, var_names=["hidden0.weight"], coords={"hidden0_in": "age"}
    ),
    "plot_trace_dist": lambda tree: azp.plot_trace_dist(tree, var_names=["noise", "output.weight"]),
    "plot_rank": lambda tree: azp.plot_rank(tree, var_names=["noise", "output.bias"]),
    "plot_rank_dist": lambda tree: azp.plot_rank_dist(tree, var_names=["noise"]),
    "plot_ess": lambda tree: azp.plot_ess(tree, var_names=["noise"]),
    "plot_autocorr": lambda tree: azp.plot_autocorr(tree, var_names=["noise"]),
    "plot_energy": lambda tree: azp.plot_energy(tree),
    "plot_pair": lambda tree: azp.plot_pair(
        tree, var_names=["noise", "output.bias"], visuals={"divergence": True}
    ),
    "plot_ppc_dist": lambda tree: azp.plot_ppc_dist(tree),
    "plot_ppc_dist prior": lambda tree: azp.plot_ppc_dist(tree, group="prior_predictive"),
    "plot_ppc_pit": lambda tree: azp.plot_ppc_pit(tree),
    "plot_ppc_tstat": lambda tree: azp.plot_ppc_tstat(tree, t_stat="median"),
    "plot_ppc_interval": lambda tree: azp.plot_ppc_interval(tree),
    "plot_loo_pit": lambda tree: azp.plot_loo_pit(tree),
    "plot_khat": lambda tree: azp.plot_khat(azs.loo(tree, pointwise=True)),
    "plot_prior_posterior": lambda tree: azp.plot_prior_posterior(tree, var_names=["noise"]),
    "combine_plots": lambda tree: azp.combine_plots(
        tree, [(azp.plot_trace, {}), (azp.plot_rank, {})], var_names=["noise"]
    ),
}


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_a_plot_of_the_documentation_works(name: str, tree: Any) -> None:
    PLOTS[name](tree)
    assert drawn()


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_the_statistics_of_the_documentation_work(posterior: Any, tree: Any) -> None:
    summary = azs.summary(tree)
    weights = sum(np.prod(value.shape[2:], dtype=int) for value in posterior.draws.values())
    assert len(summary) == weights
    assert "hidden0.weight[age, 0]" in summary.index
    assert summary.loc["noise", "mean"] == pytest.approx(posterior.draws["noise"].mean(), rel=0.1)
    loo = azs.loo(tree)
    # PSIS-LOO is below the log score of the rows that were fitted.
    assert loo.elpd < posterior.predict(posterior.original_inputs).log_prob(posterior.original_targets).sum()
    assert loo.n_data_points == 40
    table = azs.compare({"all": tree, "half": posterior_datatree(posterior, draws=200)})
    assert set(table.index) == {"all", "half"}
    azp.plot_compare(table)
    assert drawn()
