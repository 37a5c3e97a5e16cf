"""Export of a posterior to an ArviZ DataTree, under the names that ArviZ reads.

All groups are made in the same way for every system and method. All values are numbers, strings or arrays of them, so
that a tree can be written to netCDF and read back unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks, padded, site_seed
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.settings import whole
from ppl_bnn.posterior.approximation import Draws, flat_draws
from ppl_bnn.posterior.pareto import FEWEST_DRAWS
from ppl_bnn.prediction.prediction import Prediction

PRIOR_DRAWS = 500
MEMORY = 2**28
# Up to this number of draws ArviZ takes a fifth of them as the tail, above it three times their square root.
SMALL = 225


def no_leave_one_out(kind: str, log_likelihood: np.ndarray) -> str:
    """Why importance weights cannot leave rows out, from log likelihoods (chain, draw, N); "" if they can."""
    if kind == "point":
        return "a single point has no posterior spread, without which no row can be left out by weights"
    values = log_likelihood.reshape(-1, log_likelihood.shape[-1])
    count = len(values)
    if count < FEWEST_DRAWS:
        needed = f"at least {FEWEST_DRAWS} are needed"
        return f"{count} draws have no tail to smooth importance weights by; {needed}"
    # The tail that ArviZ fits: the draws that give a row the lowest density.
    tail = int(3.0 * math.sqrt(count)) if count > SMALL else count // 5
    lowest = np.partition(values, tail - 1, axis=0)[:tail]
    if (lowest.max(axis=0) == lowest.min(axis=0)).any():
        return f"the largest importance weights of some row are all the same in {count} draws"
    return ""


def _mostly_points(u: Draws) -> str:
    """Why rows cannot be left out if most coordinates are the same in all draws (S, ...); "" if most are not."""
    moving = np.concatenate([(value != value[:1]).any(axis=0).reshape(-1) for value in u.values()])
    if np.mean(moving) >= 0.5:
        return ""
    share = f"{np.count_nonzero(~moving)} of {len(moving)} weights are points"
    return f"{share}, fitted to every row, and no weights of the draws can leave a row out of them"


def posterior_datatree(
    posterior: Any, x: Any = None, *, prior: bool = False, draws: int | None = None
) -> Any:
    """An ArviZ DataTree of a posterior.

    Groups, with S = chain x draw and N training rows; y in original units throughout:

    - `posterior`: draws of all sites in the program's coordinates ``(chain, draw, *shape)``, and for a Laplace
      approximation the weights that the program computes from other sites, linearised about the mode;
    - `sample_stats`: statistics recorded by the sampler; `lp`, the log joint in unconstrained coordinates,
      ``log p(w, D) + log |dw/du|``; for an approximation with a density, `log_q`; for stacked chains or members
      `log_weight`, the logarithm of the weight of each draw, which the functions of ArviZ do not use. The attribute
      `draws_are_weighted` says that it exists, `weights` holds the weights of the parts;
    - `log_prior`: log p(site) of each site at the constrained draws, without Jacobian, as power-scaling needs it;
    - `log_likelihood`: `y`, log p(y_i | x_i, draw), under the predictive that `predict` uses by default; absent where
      no row can be left out (a point, fewer than 25 draws, a few distinct values). The attribute `no_leave_one_out` has
      the reason, and that of a posterior most of whose weights are points, whose rows cannot be left out either.
      `Posterior.log_likelihood` still gives the values;
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
    Weights `hidden0.weight` have the dimensions (hidden0_in, hidden0_out), rows `obs`, several outputs
    `output`, other sites `<site>_dim_0`, ... Features and classes are coordinates of the first and the last layer. A
    "/" in the name of a site is written "." (netCDF reserves it). The attributes of the root and of `posterior` record
    the fit. lp and log_prior are in the units of the model, standardised if the fit standardises.
    """
    chains, length = posterior.shape
    index = np.arange(length)
    if draws is not None:
        wanted = whole(chains, chains * length, ", at least one per chain")(draws)
        InputError.check(not wanted, "draws", str(wanted), repr(draws), "draws=None")
        index = np.linspace(0, length - 1, int(draws) // chains).round().astype(int)
    u = {name: value[:, index] for name, value in posterior.unconstrained_draws.items()}
    shape = (chains, len(index))
    new = None if x is None else posterior.fit_inputs(x)
    flat = flat_draws(u)
    # The draws behind the default prediction, also if that is made without draws.
    kind = posterior.approximation.kinds[0]

    def evaluated(problem: Problem) -> tuple[Draws, Draws, Mapping[str, Any]]:
        """Constrained draws, log priors, and the sites."""
        w = posterior.constrained_draws(problem, flat)
        return w, site_log_priors(problem, flat), problem.program.sites

    w, log_prior, sites = posterior.with_problem(evaluated)
    training = posterior.prediction_of_draws(flat, posterior.inputs, kind)
    y = np.asarray(posterior.original_targets)
    y = y.astype(np.int64).reshape(-1) if training.is_classes else y
    rng = np.random.default_rng(site_seed("export", posterior.info.seed))
    dims, coords = _names(posterior, {name: value.shape[1:] for name, value in w.items()}, sites)
    rows = ["obs", "output"][: len(training.shape)]

    def of_y(values: np.ndarray, count: tuple[int, int] = shape) -> Any:
        """A group of y, with values (S, N, ...)."""
        return _dataset({"y": values.reshape(*count, *values.shape[1:])}, {"y": rows[: values.ndim - 1]})

    # For a censored row y is a bound, and `event` gives its kind.
    observed = {"y": y[:, 0], "event": y[:, 1]} if training.censored else {"y": y}
    groups: dict[str, Any] = {
        "posterior": _dataset(_chained(w, shape), dims, coords),
        "sample_stats": _dataset(_sample_stats(posterior, u, index, shape)),
        "log_prior": _dataset(_chained(log_prior, shape)),
        "posterior_predictive": of_y(_one_per_draw(training, rng)),
        "observed_data": _dataset(observed, dict.fromkeys(observed, rows), sampled=False),
        "constant_data": _input_group(posterior.original_inputs, coords),
    }
    log_likelihood = training.component_log_prob(y)
    undefined = no_leave_one_out(posterior.kind, log_likelihood.reshape(*shape, -1))
    if not undefined:
        groups["log_likelihood"] = of_y(log_likelihood)
        undefined = _mostly_points(flat)
    if new is not None:
        groups["predictions"] = of_y(_one_per_draw(posterior.prediction_of_draws(flat, new, kind), rng))
        groups["predictions_constant_data"] = _input_group(x, coords)
    if prior:
        prior_w, predicted = posterior.with_problem(_prior_draws)
        y_of_prior = _one_per_draw(posterior.in_original_units(predicted), rng)
        groups["prior"] = _dataset(_chained(prior_w, (1, len(y_of_prior))), dims, coords)
        groups["prior_predictive"] = of_y(y_of_prior, (1, len(y_of_prior)))
    if posterior.info.history:
        groups["fit_history"] = _history_group(posterior.info.history)
    return _tree(groups, _attributes(posterior) | {"no_leave_one_out": undefined})


def _dataset(variables: Draws, dims: Any = None, coords: Any = None, sampled: bool = True) -> Any:
    """A dataset whose arrays start with (chain, draw), unless not `sampled`.

    Each group names its own dimensions: the log prior of a site carries the site's name but not its shape.
    """
    from arviz_base import dict_to_dataset

    used: dict[Any, Any] = {name: dims[name] for name in variables if dims is not None and name in dims}
    wanted = {name for names in used.values() for name in names}
    kept = {name: value for name, value in (coords or {}).items() if name in wanted}
    options: Any = {"sample_dims": ["chain", "draw"] if sampled else [], "dims": used, "coords": kept}
    return dict_to_dataset(dict(variables), check_conventions=False, **options)


def _tree(groups: Mapping[str, Any], attributes: Mapping[str, Any]) -> Any:
    from xarray import Dataset, DataTree

    groups["posterior"].attrs.update(attributes)
    return DataTree.from_dict({"/": Dataset(attrs=dict(attributes)), **groups})


def _history_group(history: Draws) -> Any:
    """Loss curves; those of one length have a common dimension."""
    arrays = {_safe(name): np.asarray(value) for name, value in history.items()}
    curves = {name: value for name, value in arrays.items() if value.ndim}
    common = len({len(value) for value in curves.values()}) == 1
    dims = {name: _named("step" if common else f"{name}_step", name, a.ndim) for name, a in curves.items()}
    return _dataset(arrays, dims, sampled=False)


def _named(first: str, name: str, axes: int) -> list[str]:
    """Names of the dimensions of an array, of which the first has a name of its own."""
    return [first, *(f"{name}_dim_{axis}" for axis in range(1, axes))]


def _safe(name: str) -> str:
    return name.replace("/", ".")


def _chained(draws: Draws, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return {_safe(name): value.reshape(*shape, *value.shape[1:]) for name, value in draws.items()}


def _one_per_draw(prediction: Prediction, rng: np.random.Generator) -> np.ndarray:
    """One y from each component, (S, N) or (S, N, K), with each draw and row as a separate row."""
    parts = {name: a.reshape(1, -1, *a.shape[2:]) for name, a in prediction.parameters.items()}
    y = Prediction(prediction.family, parts).sample(1, rng)[0]
    return y.reshape(prediction.draws, *prediction.shape)


def site_log_priors(problem: Problem, u: Draws) -> dict[str, np.ndarray]:
    """log p(site) of each site at draws u with one leading axis, without Jacobian, (S,)."""
    program, system = problem.program, problem.system

    def densities(values: Any, x: Any, y: Any) -> dict[str, Any]:
        latent = (site for site in program.run(values, x, y) if site.kind == "latent")
        return {site.name: site.distribution.log_prob(site.value).sum() * site.scale for site in latent}

    function, parts = program.mapped(densities), []
    # Some draws at a time: densities need draws x rows x units values.
    count = len(next(iter(u.values())))
    units = sum(value.shape[-1] if value.ndim > 1 else 1 for value in u.values())
    size = int(np.clip(MEMORY // (16 * units * problem.rows), 1, count))
    for start, stop in chunks(count if program.latents else 0, size):
        # The last chunk is padded, so that all chunks use one compiled function.
        part = {name: system.asarray(padded(value[start:stop], size)) for name, value in u.items()}
        found = function(part, problem.x, problem.y)
        parts.append({name: system.to_numpy(value)[: stop - start] for name, value in found.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _sample_stats(
    posterior: Any, u: Draws, index: np.ndarray, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    statistics = {_safe(name): np.asarray(value)[:, index] for name, value in posterior.statistics.items()}
    if "lp" not in statistics:
        statistics["lp"] = posterior.log_joint(flat_draws(u)).reshape(shape)
    log_q = posterior.approximation.log_prob(flat_draws(u))
    if log_q is not None:
        statistics["log_q"] = np.asarray(log_q).reshape(shape)
    weights = posterior.draw_weights
    if weights is not None:
        kept = weights.reshape(posterior.shape)[:, index]
        some, got = kept.sum() > 0.0, f"{kept.size} without"
        InputError.check(some, "draws", "draws with some weight among those kept", got, "draws=None")
        with np.errstate(divide="ignore"):  # a part without weight has none
            statistics["log_weight"] = np.log(kept / kept.sum())
    return statistics


def _prior_draws(problem: Problem) -> tuple[dict[str, np.ndarray], Prediction]:
    """Draws from the prior, and their prediction at the training rows, in the units of the fit."""
    program = problem.program
    u = program.prior_draws(problem.x, problem.y, site_seed("prior", problem.seed), PRIOR_DRAWS)
    w = program.constrain_draws(u, problem.x, problem.y)
    eta = program.predictor_draws(w, problem.inputs, memory=MEMORY)
    w |= program.deterministic_draws(u, problem.x, problem.y)
    return w, Prediction(*program.likelihood.mixture_parameters(eta))


def _input_group(x: Any, coords: Mapping[str, Any]) -> Any:
    """Inputs: `x` (obs, feature), or one variable per entry of a dict."""
    given = x if isinstance(x, Mapping) else {"x": x}
    arrays = {_safe(str(name)): np.asarray(value) for name, value in given.items()}
    dims = {name: _named("obs", name, value.ndim) for name, value in arrays.items()}
    if dims.get("x") == ["obs", "x_dim_1"]:
        dims["x"] = ["obs", "feature"]
    return _dataset(arrays, dims, coords, sampled=False)


def _names(
    posterior: Any, shapes: Mapping[str, tuple[int, ...]], sites: Mapping[str, Any]
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Dimensions of the sites, and coordinates from the names of features and classes."""
    dims: dict[str, list[str]] = {}
    coords: dict[str, Any] = {}
    matrices = [name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2]
    for name in matrices:
        layer = name.removesuffix(".weight")
        bias, (before, after) = f"{layer}.bias", (f"{_safe(layer)}_in", f"{_safe(layer)}_out")
        dims[_safe(name)] = [before, after]
        inputs, outputs = ((size,) for size in shapes[name])
        if shapes.get(bias) in (inputs, outputs):
            dims[_safe(bias)] = [after]
        if shapes.get(bias) == inputs != outputs:
            # In modules of torch and Equinox the axis of the outputs comes first.
            dims[_safe(name)].reverse()
    for name, shape in shapes.items():
        if name in sites and sites[name].local and shape and shape[0] == len(posterior.targets):
            dims[_safe(name)] = _named("obs", _safe(name), len(shape))
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
    library = "pyro-ppl" if info.ppl == "pyro" else info.ppl
    evaluations = info.gradient_evaluations
    attributes: dict[str, Any] = {
        "model": getattr(model, "__name__", type(model).__name__),
        "method": info.method,
        "system": info.ppl,
        "inference_library": info.ppl,
        "inference_library_version": info.versions.get(library, "unknown"),
        "seed": int(info.seed),
        **{name: getattr(info, name) for name in ("dtype", "device", "data_hash")},
        "compile_seconds": float(info.compile_seconds),
        "run_seconds": float(info.run_seconds),
        "wall_seconds": float(info.compile_seconds + info.run_seconds),
        "gradient_evaluations": math.nan if evaluations is None else float(evaluations),
        **{name: _json(getattr(info, name)) for name in ("versions", "settings", "warnings", "figures")},
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

    def other(item: Any) -> Any:
        return item.item() if isinstance(item, np.generic) else str(item)

    names = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
    return json.dumps(json.loads(json.dumps(value, default=other), parse_constant=names.__getitem__))
