"""Which functions of ArviZ are defined for which kind of posterior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Functions of ArviZ by what they need. Those of leave-one-out and power-scaling reweight draws: they need a tail.
_SUMMARIES = ("summary", "hdi", "eti", "mode", "std", "var", "mad", "iqr", "kde", "histogram", "thin")
_AVERAGES, _FITS = ("mean", "median", "metrics"), ("bayesian_r2", "residual_r2")
_LOO = ("loo", "loo_i", "compare", "loo_expectations", "loo_metrics", "loo_pit", "loo_r2", "loo_score")
_SCALING = ("psense", "psense_summary")
_APPROXIMATE_LOO = ("loo_approximate_posterior",)
_CHAINS = ("ess", "rhat", "mcse", "diagnose")
_LOO_PLOTS = ("plot_compare", "plot_khat", "plot_loo_pit", "plot_psense_dist")
_CHAIN_PLOTS = (
    *("plot_autocorr", "plot_convergence_dist", "plot_energy", "plot_ess", "plot_ess_evolution", "plot_mcse"),
    *("plot_parallel", "plot_rank", "plot_rank_dist", "plot_trace", "plot_trace_dist"),
)
# Which functions of arviz_stats and arviz_plots are defined for which kind of posterior; tests call every one of them.
# Draws of an approximation are independent: R-hat and ESS would describe the random number generator.
_OF_DRAWS = (*_SUMMARIES, *_AVERAGES, *_FITS, *_LOO, *_SCALING)
_PLOTS_OF_DRAWS = (
    *("plot_dist", "plot_forest", "plot_pair", "plot_prior_posterior", "plot_ridge"),
    *("plot_ppc_dist", "plot_ppc_interval", "plot_ppc_pit", "plot_ppc_tstat", *_LOO_PLOTS),
)
ARVIZ_STATISTICS: dict[str, tuple[str, ...]] = {
    "chains": (*_CHAINS, "bfmi", *_OF_DRAWS),
    "iid": (*_OF_DRAWS, *_APPROXIMATE_LOO),
    "point": _AVERAGES,
}
ARVIZ_PLOTS: dict[str, tuple[str, ...]]
ARVIZ_PLOTS = {"chains": (*_CHAIN_PLOTS, *_PLOTS_OF_DRAWS), "iid": _PLOTS_OF_DRAWS, "point": ()}


def arviz_defined(tree: Any, of: Mapping[str, tuple[str, ...]] = ARVIZ_STATISTICS) -> tuple[str, ...]:
    """The names of the functions of ArviZ that are defined for a tree of `posterior_datatree`.

    `of` is ARVIZ_STATISTICS (arviz_stats) or ARVIZ_PLOTS (arviz_plots). Functions are left out if the tree has too few
    draws or chains for them, no density of the approximation, or no energies of a sampler.
    """
    statistics = tree["sample_stats"]
    chains, draws = (tree["posterior"].sizes[name] for name in ("chain", "draw"))
    lacks = {
        (*_LOO, *_APPROXIMATE_LOO, *_SCALING, *_LOO_PLOTS): "log_likelihood" not in tree.children,
        _APPROXIMATE_LOO: "log_q" not in statistics,
        ("bfmi", "plot_energy"): "energy" not in statistics,
        _CHAINS: draws < 4,  # too few for R-hat and ESS
        ("rhat",): chains < 2,
    }
    missing = {name for names, lacking in lacks.items() if lacking for name in names}
    return tuple(name for name in of[str(tree.attrs["posterior_kind"])] if name not in missing)
