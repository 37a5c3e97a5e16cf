"""Export of a posterior to an ArviZ DataTree, under the names that ArviZ reads.

All groups are made in the same way for every system and method. All values are numbers, strings or arrays of them, so
that a tree can be written to netCDF and read back unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import map_data, row_count, site_seed
from ppl_bnn.core.errors import InputError
from ppl_bnn.posterior.pareto import FEWEST_DRAWS
from ppl_bnn.prediction.prediction import Prediction

PRIOR_DRAWS = 500
MEMORY = 2**28
# Up to this number of draws ArviZ takes a fifth of them as the tail, above it three times their square root.
SMALL = 225

# Which functions of arviz_stats and arviz_plots are defined for which kind of posterior; tests call every one of them.
# Draws of an approximation are independent: R-hat and ESS would describe the random number generator.
ARVIZ_STATISTICS: dict[str, tuple[str, ...]] = {
    "chains": (
        "summary",
        "ess",
        "rhat",
        "mcse",
        "bfmi",
        "diagnose",
        "hdi",
        "eti",
        "mean",
        "median",
        "mode",
        "std",
        "var",
        "mad",
        "iqr",
        "kde",
        "histogram",
        "loo",
        "loo_i",
        "compare",
        "loo_expectations",
        "loo_metrics",
        "loo_pit",
        "loo_r2",
        "loo_score",
        "bayesian_r2",
        "residual_r2",
        "metrics",
        "psense",
        "psense_summary",
        "thin",
    ),
    "iid": (
        "summary",
        "hdi",
        "eti",
        "mean",
        "median",
        "mode",
        "std",
        "var",
        "mad",
        "iqr",
        "kde",
        "histogram",
        "loo",
        "loo_approximate_posterior",
        "loo_i",
        "compare",
        "loo_expectations",
        "loo_metrics",
        "loo_pit",
        "loo_r2",
        "loo_score",
        "bayesian_r2",
        "residual_r2",
        "metrics",
        "psense",
        "psense_summary",
        "thin",
    ),
    "point": ("mean", "median", "metrics"),
}
ARVIZ_PLOTS: dict[str, tuple[str, ...]] = {
    "chains": (
        "plot_autocorr",
        "plot_compare",
        "plot_convergence_dist",
        "plot_dist",
        "plot_energy",
        "plot_ess",
        "plot_ess_evolution",
        "plot_forest",
        "plot_khat",
        "plot_loo_pit",
        "plot_mcse",
        "plot_pair",
        "plot_parallel",
        "plot_ppc_dist",
        "plot_ppc_interval",
        "plot_ppc_pit",
        "plot_ppc_tstat",
        "plot_prior_posterior",
        "plot_psense_dist",
        "plot_rank",
        "plot_rank_dist",
        "plot_ridge",
        "plot_trace",
        "plot_trace_dist",
    ),
    "iid": (
        "plot_compare",
        "plot_dist",
        "plot_forest",
        "plot_khat",
        "plot_loo_pit",
        "plot_pair",
        "plot_ppc_dist",
        "plot_ppc_interval",
        "plot_ppc_pit",
        "plot_ppc_tstat",
        "plot_prior_posterior",
        "plot_psense_dist",
        "plot_ridge",
    ),
    "point": (),
}
# Functions that leave a row out or reweight draws in another way: they need a tail of draws.
_BY_WEIGHTS = frozenset(
    (
        "loo",
        "loo_approximate_posterior",
        "loo_i",
        "compare",
        "loo_expectations",
        "loo_metrics",
        "loo_pit",
        "loo_r2",
        "loo_score",
        "psense",
        "psense_summary",
        "plot_compare",
        "plot_khat",
        "plot_loo_pit",
        "plot_psense_dist",
    )
)
# Fewer than four draws of a chain have no R-hat and no ESS.
_OF_CHAINS = frozenset(("ess", "rhat", "mcse", "diagnose"))


def arviz_defined(tree: Any, of: Mapping[str, tuple[str, ...]] = ARVIZ_STATISTICS) -> tuple[str, ...]:
    """The functions of ArviZ that are defined for a tree, by name.

    Parameters
    ----------
    tree
        A tree of `posterior_datatree`.
    of : mapping of str to tuple of str
        ARVIZ_STATISTICS, the functions of arviz_stats, or ARVIZ_PLOTS, those of arviz_plots.

    Returns
    -------
    tuple of str
        The functions for the tree's kind, without those for which the tree lacks something: enough draws to leave a row
        out, enough draws or chains for R-hat and ESS, a density of the approximation, the energies of a sampler.
    """
    statistics = tree["sample_stats"]
    chains, draws = (tree["posterior"].sizes[name] for name in ("chain", "draw"))
    missing: set[str] = set()
    if "log_likelihood" not in tree.children:
        missing |= _BY_WEIGHTS
    if "log_q" not in statistics:
        missing.add("loo_approximate_posterior")
    if "energy" not in statistics:
        missing |= {"bfmi", "plot_energy"}
    if draws < 4:
        missing |= _OF_CHAINS
    if chains < 2:
        missing.add("rhat")
    return tuple(name for name in of[str(tree.attrs["posterior_kind"])] if name not in missing)


def no_leave_one_out(kind: str, log_likelihood: np.ndarray) -> str:
    """Reason why rows cannot be left out by importance weights.

    Parameters
    ----------
    kind : str
        Kind of the posterior.
    log_likelihood : ndarray
        Log likelihoods (chain, draw, N).

    Returns
    -------
    str
        The reason; "" if rows can be left out.
    """
    if kind == "point":
        return "a single point has no posterior spread, without which no row can be left out by weights"
    values = log_likelihood.reshape(-1, log_likelihood.shape[-1])
    count = len(values)
    if count < FEWEST_DRAWS:
        return (
            f"{count} draws have no tail that importance weights could be smoothed by; at least {FEWEST_DRAWS} are "
            "needed"
        )
    # The tail that ArviZ fits: the draws that give a row the lowest density.
    tail = int(3.0 * math.sqrt(count)) if count > SMALL else count // 5
    lowest = np.partition(values, tail - 1, axis=0)[:tail]
    if (lowest.max(axis=0) == lowest.min(axis=0)).any():
        return f"the largest importance weights of some row are all the same in {count} draws"
    return ""


def posterior_datatree(
    posterior: Any, x: Any = None, *, prior: bool = False, draws: int | None = None
) -> Any:
    """An ArviZ DataTree of a posterior.

    Groups, with S = chain x draw and N training rows; y in original units throughout:

    - `posterior`: draws of all sites in the program's coordinates ``(chain, draw, *shape)``, and for a Laplace
      approximation the weights that the program computes from other sites, linearised about the mode;
    - `sample_stats`: statistics recorded by the sampler; `lp`, the log joint in unconstrained coordinates,
      ``log p(w, D) + log |dw/du|``; for an approximation with a density, `log_q`; for stacked chains or members
      `log_weight`, the logarithm of the weight of each draw (weights sum to 1). The functions of ArviZ do not use it:
      the attribute `draws_are_weighted` says that it exists, `weights` gives those of the parts;
    - `log_prior`: log p(site) of each site at the constrained draws, without Jacobian, as power-scaling needs it;
    - `log_likelihood`: `y`, log p(y_i | x_i, draw), under the predictive that `predict` uses by default; absent where
      no row can be left out (a point, fewer than 25 draws, a few distinct values), so that `arviz_stats.loo` and
      `compare` report that there is none. The attribute `no_leave_one_out` gives the reason, and
      `Posterior.log_likelihood` still gives the values. `arviz_defined` lists what is defined for a tree;
    - `posterior_predictive`: one y per draw, under the same predictive;
    - `observed_data`, `constant_data`: y and the inputs of the training rows. Where rows may be censored y is the value
      or the bound, and `event` says which (1 observed, 0 right-censored, -1 left-censored). Draws of y are never
      censored, so they can be checked against observed_data only at rows with event 1;
    - `predictions`, `predictions_constant_data`: one y per draw at new inputs `x`, and those inputs;
    - `prior`, `prior_predictive` with ``prior=True``: up to 500 draws;
    - `fit_history`: loss curves.

    Parameters
    ----------
    posterior : Posterior
        The posterior.
    x : optional
        New inputs.
    prior : bool, default False
        Whether to add draws from the prior.
    draws : int, optional
        Number of the posterior's draws to use, evenly spaced within each chain. All by default.

    Returns
    -------
    xarray.DataTree
        The tree.

    Raises
    ------
    InputError
        For impossible `draws`, or `x` unlike the training inputs.

    Notes
    -----
    Weights `hidden0.weight` have the dimensions (hidden0_in, hidden0_out), rows `obs`, several outputs `output`, other
    sites `<site>_dim_0`, ... The inputs of the first layer have the names of the features as coordinates, the outputs
    of the last layer those of the classes. A "/" in the name of a site is written "." (netCDF reserves it). The
    attributes of the root and of `posterior` record the fit.

    lp and log_prior are in the units of the model, standardised if the fit standardises.
    """
    index = _draw_index(posterior, draws)
    u = {name: value[:, index] for name, value in posterior.unconstrained_draws.items()}
    shape = (posterior.shape[0], len(index))
    new = None if x is None else posterior._inputs(x)
    w, log_prior, fitted, at_new, sites = posterior._with(
        lambda problem: _evaluated(posterior, problem, u, new)
    )
    training = _in_original_units(posterior, fitted)
    y = original_targets(posterior)
    # For a censored row y is a bound, and `event` gives its kind.
    observed = {"y": y[:, 0], "event": y[:, 1]} if training.censored else {"y": y}
    rng = np.random.default_rng(site_seed("export", posterior.info.seed))
    dims, coords = _names(posterior, {name: value.shape[1:] for name, value in w.items()}, sites)
    rows = ["obs", "output"][: len(training.shape)]
    constant, constant_dims = _input_group(original_inputs(posterior))
    groups: dict[str, Any] = {
        "posterior": _dataset(_chained(w, shape), dims, coords),
        "sample_stats": _dataset(_sample_stats(posterior, u, index, shape)),
        "log_prior": _dataset(_chained(log_prior, shape)),
        "posterior_predictive": _dataset(
            {"y": _one_per_draw(training, rng).reshape(*shape, *training.shape)}, {"y": rows}
        ),
        "observed_data": _dataset(observed, dict.fromkeys(observed, rows), sampled=False),
        "constant_data": _dataset(constant, constant_dims, coords, sampled=False),
    }
    log_likelihood = training.component_log_prob(y).reshape(*shape, -1)
    undefined = no_leave_one_out(posterior.kind, log_likelihood)
    if not undefined:
        groups["log_likelihood"] = _dataset({"y": log_likelihood}, {"y": ["obs"]})
    if at_new is not None:
        predicted = _one_per_draw(at_new, rng).reshape(*shape, *at_new.shape)
        constant, constant_dims = _input_group(map_data(np.asarray, x))
        groups["predictions"] = _dataset({"y": predicted}, {"y": rows})
        groups["predictions_constant_data"] = _dataset(constant, constant_dims, coords, sampled=False)
    if prior:
        prior_w, prior_y = posterior._with(lambda problem: _prior_draws(posterior, problem, rng))
        count = (1, len(prior_y))
        groups["prior"] = _dataset(_chained(prior_w, count), dims, coords)
        groups["prior_predictive"] = _dataset({"y": prior_y.reshape(*count, *training.shape)}, {"y": rows})
    history, steps = _history(posterior)
    if history:
        groups["fit_history"] = _dataset(history, steps, sampled=False)
    return _tree(groups, _attributes(posterior) | {"no_leave_one_out": undefined})


def log_likelihood_tree(posterior: Any) -> Any:
    """The groups that PSIS-LOO reads: `posterior`, `sample_stats` and `log_likelihood`, with the tree's attributes.

    Parameters
    ----------
    posterior : Posterior
        The posterior.

    Returns
    -------
    xarray.DataTree
        The tree. Without `log_likelihood` if no row can be left out.
    """
    log_likelihood = posterior.log_likelihood()
    undefined = no_leave_one_out(posterior.kind, log_likelihood)
    index = np.arange(posterior.shape[1])
    statistics = _sample_stats(posterior, posterior.unconstrained_draws, index, posterior.shape)
    groups = {
        "posterior": _dataset({_safe(name): value for name, value in posterior.draws.items()}),
        "sample_stats": _dataset(statistics),
    }
    if not undefined:
        groups["log_likelihood"] = _dataset({"y": log_likelihood}, {"y": ["obs"]})
    return _tree(groups, _attributes(posterior) | {"no_leave_one_out": undefined})


def original_inputs(posterior: Any) -> Any:
    """The training inputs in original units (up to rounding, if the fit standardises).

    Parameters
    ----------
    posterior : Posterior
        The posterior.

    Returns
    -------
    ndarray or dict of str to ndarray
        The inputs.
    """
    units, inputs = posterior.standardisation, posterior.inputs
    if units is None:
        return inputs
    if isinstance(inputs, Mapping):
        return {
            name: value * units.x_scale[name] + units.x_mean[name] if name in units.x_mean else value
            for name, value in inputs.items()
        }
    return inputs * units.x_scale + units.x_mean


def original_targets(posterior: Any) -> np.ndarray:
    """The training targets in original units.

    Parameters
    ----------
    posterior : Posterior
        The posterior.

    Returns
    -------
    ndarray
        The targets; class labels as integers (N,).
    """
    units, targets = posterior.standardisation, np.asarray(posterior.targets)
    if units is not None:
        targets = units.original_targets(targets)
    return targets.astype(np.int64).reshape(-1) if posterior.task == "classification" else targets


def _in_chunks(
    posterior: Any, function: Callable[[dict[str, np.ndarray]], Any], u: Mapping[str, np.ndarray]
) -> Any:
    """Evaluate a function of draws in chunks of bounded memory.

    A density over all training rows for many draws holds draws x rows x units values.
    """
    count = len(next(iter(u.values())))
    units = sum(value.shape[-1] if value.ndim > 1 else 1 for value in u.values())
    size = int(np.clip(MEMORY // (16 * units * row_count(posterior.inputs)), 1, count))
    parts = []
    for start in range(0, count, size):
        # The last chunk is padded, so that all chunks use one compiled function.
        index = np.minimum(np.arange(start, start + size), count - 1)
        part = function({name: value[index] for name, value in u.items()})
        kept = min(size, count - start)
        parts.append(
            {k: v[:kept] for k, v in part.items()} if isinstance(part, Mapping) else np.asarray(part)[:kept]
        )
    if isinstance(parts[0], Mapping):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)


def _dataset(
    variables: Mapping[str, np.ndarray],
    dims: Mapping[str, list[str]] | None = None,
    coords: Mapping[str, Any] | None = None,
    sampled: bool = True,
) -> Any:
    """A dataset whose arrays start with (chain, draw), unless not `sampled`.

    Each group names its own dimensions: the log prior of a site carries the site's name but not its shape.
    """
    from arviz_base import dict_to_dataset

    used: dict[Any, Any] = {name: dims[name] for name in variables if dims is not None and name in dims}
    wanted = {name for names in used.values() for name in names}
    return dict_to_dataset(
        dict(variables),
        sample_dims=["chain", "draw"] if sampled else [],
        dims=used,
        coords={name: value for name, value in (coords or {}).items() if name in wanted},
        check_conventions=False,
    )


def _tree(groups: Mapping[str, Any], attributes: Mapping[str, Any]) -> Any:
    from xarray import Dataset, DataTree

    groups["posterior"].attrs.update(attributes)
    return DataTree.from_dict({"/": Dataset(attrs=dict(attributes)), **groups})


def _history(posterior: Any) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    history = {_safe(name): np.asarray(value) for name, value in posterior.info.history.items()}
    curves = {name: value for name, value in history.items() if value.ndim}
    common = len({len(value) for value in curves.values()}) == 1
    steps = {
        name: ["step" if common else f"{name}_step", *(f"{name}_dim_{axis}" for axis in range(1, value.ndim))]
        for name, value in curves.items()
    }
    return history, steps


def _draw_index(posterior: Any, draws: int | None) -> np.ndarray:
    chains, length = posterior.shape
    if draws is None:
        return np.arange(length)
    if (
        isinstance(draws, bool)
        or not isinstance(draws, int | np.integer)
        or not chains <= draws <= chains * length
    ):
        raise InputError.of(
            "draws",
            f"a whole number from {chains} (one per chain) to {chains * length}",
            repr(draws),
            "draws=None",
        )
    return np.linspace(0, length - 1, int(draws) // chains).round().astype(int)


def _flat(u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in u.items()}


def _safe(name: str) -> str:
    return name.replace("/", ".")


def _chained(draws: Mapping[str, np.ndarray], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return {_safe(name): value.reshape(*shape, *value.shape[1:]) for name, value in draws.items()}


def _evaluated(
    posterior: Any, problem: Problem, u: Mapping[str, np.ndarray], new: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Prediction, Prediction | None, dict[str, Any]]:
    """Constrained draws, log priors, predictions at the training rows and at new ones, and the sites.

    At the training rows in the units of the fit, at new ones in original units.
    """
    flat, program = _flat(u), problem.program
    w = program.constrain_draws(flat, problem.x, problem.y)
    w |= posterior.approximation.weight_draws(problem, flat)
    w |= program.deterministic_draws(flat, problem.x, problem.y)
    training = _prediction(posterior, problem, flat, problem.inputs)
    at_new = (
        None if new is None else _in_original_units(posterior, _prediction(posterior, problem, flat, new))
    )
    return w, _site_log_priors(posterior, problem, flat), training, at_new, program.sites


def _prediction(posterior: Any, problem: Problem, u: Mapping[str, np.ndarray], inputs: Any) -> Prediction:
    """The default predictive, draw by draw, in the units of the fit."""
    kind = posterior.approximation.kinds[0]
    eta = posterior.approximation.predictor_draws(problem, u, inputs, kind, 0, MEMORY)
    return Prediction(*problem.program.likelihood.mixture_parameters(eta))


def _in_original_units(posterior: Any, prediction: Prediction) -> Prediction:
    return (
        prediction if posterior.standardisation is None else posterior.standardisation.prediction(prediction)
    )


def _one_per_draw(prediction: Prediction, rng: np.random.Generator) -> np.ndarray:
    """One y from each component, (S, N) or (S, N, K): each draw and row becomes a row of its own."""
    parameters = {
        name: value.reshape(1, -1, *value.shape[2:]) for name, value in prediction.parameters.items()
    }
    y = Prediction(prediction.family, parameters).sample(1, rng)[0]
    return y.reshape(prediction.draws, *prediction.shape)


def _site_log_priors(posterior: Any, problem: Problem, u: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    program, system = problem.program, problem.system

    def densities(values: Any, x: Any, y: Any) -> dict[str, Any]:
        return {
            site.name: site.distribution.log_prob(site.value).sum() * site.scale
            for site in system.run(program.native, x, y, values=values, unconstrained=True)
            if site.kind == "latent"
        }

    function = system.compile(system.vmap(densities, in_axes=(0, None, None)))

    def evaluate(part: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = {name: system.asarray(value) for name, value in part.items()}
        return {
            name: system.to_numpy(value) for name, value in function(values, problem.x, problem.y).items()
        }

    return _in_chunks(posterior, evaluate, u) if program.latents else {}


def _sample_stats(
    posterior: Any, u: Mapping[str, np.ndarray], index: np.ndarray, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    statistics = {_safe(name): np.asarray(value)[:, index] for name, value in posterior.statistics.items()}
    if "lp" not in statistics:
        statistics["lp"] = posterior.log_joint(_flat(u)).reshape(shape)
    log_q = posterior.approximation.log_prob(_flat(u))
    if log_q is not None:
        statistics["log_q"] = np.asarray(log_q).reshape(shape)
    weights = posterior.draw_weights
    if weights is not None:
        kept = weights.reshape(posterior.shape)[:, index]
        if not kept.sum() > 0.0:
            raise InputError.of(
                "draws", "draws with some weight among those kept", f"{kept.size} without", "draws=None"
            )
        with np.errstate(divide="ignore"):  # a part without weight has none
            statistics["log_weight"] = np.log(kept / kept.sum())
    return statistics


def _prior_draws(
    posterior: Any, problem: Problem, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Draws from the prior, and one y at the training rows for each."""
    program = problem.program
    u = program.prior_draws(problem.x, problem.y, site_seed("prior", problem.seed), PRIOR_DRAWS)
    w = program.constrain_draws(u, problem.x, problem.y)
    eta = program.predictor_draws(w, problem.inputs, memory=MEMORY)
    prediction = Prediction(*program.likelihood.mixture_parameters(eta))
    w |= program.deterministic_draws(u, problem.x, problem.y)
    return w, _one_per_draw(_in_original_units(posterior, prediction), rng)


def _input_group(x: Any) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Variables and dimensions of inputs: `x` (obs, feature), or one variable per entry of a dict."""
    arrays = dict(x) if isinstance(x, Mapping) else {"x": x}
    variables, dims = {}, {}
    for name, value in arrays.items():
        safe = _safe(str(name))
        variables[safe] = np.asarray(value)
        later = [f"{safe}_dim_{axis}" for axis in range(1, variables[safe].ndim)]
        dims[safe] = ["obs", *(["feature"] if later == ["x_dim_1"] else later)]
    return variables, dims


def _names(
    posterior: Any, shapes: Mapping[str, tuple[int, ...]], sites: Mapping[str, Any]
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Dimensions of the sites, and coordinates from the names of features and classes."""
    dims: dict[str, list[str]] = {}
    coords: dict[str, Any] = {}
    matrices = [name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2]
    for name in matrices:
        layer = _safe(name.removesuffix(".weight"))
        dims[_safe(name)] = [f"{layer}_in", f"{layer}_out"]
        bias = name.removesuffix(".weight") + ".bias"
        if shapes.get(bias) == shapes[name][:1] != shapes[name][1:]:
            # In modules of torch and Equinox the axis of the outputs comes first.
            dims[_safe(name)].reverse()
            dims[_safe(bias)] = [f"{layer}_out"]
        elif shapes.get(bias) == shapes[name][1:]:
            dims[_safe(bias)] = [f"{layer}_out"]
    for name, shape in shapes.items():
        if name in sites and sites[name].local and shape and shape[0] == len(posterior.targets):
            dims[_safe(name)] = ["obs", *(f"{_safe(name)}_dim_{axis}" for axis in range(1, len(shape)))]
    features, classes = posterior.feature_names, posterior.class_names
    if features is not None and not isinstance(posterior.inputs, Mapping):
        names = np.asarray([str(name) for name in features])
        if posterior.inputs.ndim == 2 and posterior.inputs.shape[1] == len(names):
            coords["feature"] = names
        if matrices and shapes[matrices[0]][0] == len(names):
            coords[dims[_safe(matrices[0])][0]] = names
    if classes is not None and matrices and shapes[matrices[-1]][1] == len(classes):
        coords[dims[_safe(matrices[-1])][1]] = np.asarray([str(name) for name in classes])
    return dims, coords


def _attributes(posterior: Any) -> dict[str, Any]:
    """Record of the fit, in types that netCDF supports."""
    info = posterior.info
    model = getattr(posterior.model, "func", posterior.model)
    attributes: dict[str, Any] = {
        "model": getattr(model, "__name__", type(model).__name__),
        "method": info.method,
        "system": info.ppl,
        "inference_library": info.ppl,
        "inference_library_version": info.versions.get(
            {"pyro": "pyro-ppl"}.get(info.ppl, info.ppl), "unknown"
        ),
        "seed": int(info.seed),
        "dtype": info.dtype,
        "device": info.device,
        "compile_seconds": float(info.compile_seconds),
        "run_seconds": float(info.run_seconds),
        "wall_seconds": float(info.compile_seconds + info.run_seconds),
        "gradient_evaluations": math.nan
        if info.gradient_evaluations is None
        else float(info.gradient_evaluations),
        "versions": _json(info.versions),
        "settings": _json(info.settings),
        "warnings": _json(list(info.warnings)),
        "figures": _json(info.figures),
        "data_hash": info.data_hash,
        "posterior_kind": posterior.kind,
        "draws_are_iid": int(posterior.kind == "iid"),
        "draws_are_weighted": int(posterior.draw_weights is not None),
        "target": posterior.target,
        "predictive": posterior.approximation.kinds[0],
        "observed": posterior.observed,
        "standardised": int(posterior.standardisation is not None),
    }
    if posterior.weights is not None:
        attributes["weights"] = _json(posterior.weights.tolist())
    if posterior.class_names is not None:
        attributes["class_names"] = _json([str(name) for name in posterior.class_names])
    return attributes


def _json(value: Any) -> str:
    """JSON that any reader accepts: numbers that are not finite, and values of unknown types, become strings."""

    def plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {str(name): plain(entry) for name, entry in item.items()}
        if isinstance(item, list | tuple):
            return [plain(entry) for entry in item]
        if isinstance(item, np.generic):
            item = item.item()
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)
        return item if isinstance(item, bool | int | float | str) or item is None else str(item)

    return json.dumps(plain(value))
