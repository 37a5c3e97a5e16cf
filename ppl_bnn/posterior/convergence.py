"""Convergence of several chains: R-hat, effective sample sizes and Monte-Carlo errors of components, by ArviZ.

`quantities` defines the quantities by which a network is judged. `diagnostics.function_space` applies them to a
posterior, and samplers that run until convergence apply them during the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.posterior.nested import nested_rhat
from ppl_bnn.prediction.prediction import Prediction

FEWEST_DRAWS = 4
PROBES = 50
# The quantities that are not random variables of the model.
PREDICTOR, LOG_LIKELIHOOD = "f", "log_likelihood"


@dataclass(frozen=True)
class Mixing:
    """Worst and median figures over the components of one quantity.

    Attributes
    ----------
    rhat, rhat_median : float
        Rank-normalised split R-hat.
    ess_bulk, ess_bulk_median, ess_tail, ess_tail_median : float
        Effective sample sizes (tail: the smaller one of the 5 % and 95 % quantiles).
    mcse, mcse_median : float
        Monte-Carlo standard error of the mean, in standard deviations of the component.
    components : int
        Number of components that vary.
    constant : int
        Number of components that do not vary (for example a known noise) and are left out.
    """

    rhat: float
    rhat_median: float
    ess_bulk: float
    ess_bulk_median: float
    ess_tail: float
    ess_tail_median: float
    mcse: float
    mcse_median: float
    components: int
    constant: int


def mixing(draws: np.ndarray, superchains: int | None = None) -> Mixing:
    """Convergence figures of components.

    Parameters
    ----------
    draws : ndarray
        Shape (chain, draw, components).
    superchains : int, optional
        Number of points from which chains started, if several started at each. R-hat is then the nested one
        (`ppl_bnn.posterior.nested`), for chains that are too short for plain R-hat.

    Returns
    -------
    Mixing
        The figures. A component that is not finite, or on which each chain is constant at its own value, has R-hat
        infinity and ESS 0. With fewer than 4 draws per chain R-hat is infinity and ESS 0 too.
    """
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    finite = np.isfinite(draws).all(axis=(0, 1))
    varies = ~finite | (draws.max(axis=(0, 1)) > draws.min(axis=(0, 1)))
    constant = int(np.count_nonzero(~varies))
    count = int(np.count_nonzero(varies))
    if not count:
        return Mixing(*[np.nan] * 8, components=0, constant=constant)
    rhat, bulk, tail, mcse = np.full(count, np.inf), np.zeros(count), np.zeros(count), np.full(count, np.inf)
    still = (draws.max(axis=1) == draws.min(axis=1)).all(axis=0)
    usable = (finite & ~still)[varies]
    if draws.shape[1] >= FEWEST_DRAWS and usable.any():
        values = draws[..., varies][..., usable].astype(np.float64)
        axes: dict[str, Any] = {"chain_axis": 0, "draw_axis": 1}
        with np.errstate(all="ignore"):
            if superchains is None:
                # ArviZ's rank-normalised R-hat of a single chain is NaN, and infinity below.
                rhat[usable] = array_stats.rhat(values, method="rank", **axes)
            else:
                rhat[usable] = nested_rhat(values, superchains)
            bulk[usable] = array_stats.ess(values, method="bulk", **axes)
            tail[usable] = array_stats.ess(values, method="tail", prob=(0.05, 0.95), **axes)
            mcse[usable] = array_stats.mcse(values, method="mean", **axes) / values.std(axis=(0, 1))
        # ArviZ returns NaN for example for a tail that does not vary: R-hat and MCSE are then infinite, ESS 0.
        rhat, mcse = np.where(np.isnan(rhat), np.inf, rhat), np.where(np.isnan(mcse), np.inf, mcse)
        bulk, tail = np.nan_to_num(bulk, nan=0.0), np.nan_to_num(tail, nan=0.0)
    return Mixing(
        rhat=float(rhat.max()),
        rhat_median=float(np.median(rhat)),
        ess_bulk=float(bulk.min()),
        ess_bulk_median=float(np.median(bulk)),
        ess_tail=float(tail.min()),
        ess_tail_median=float(np.median(tail)),
        mcse=float(mcse.max()),
        mcse_median=float(np.median(mcse)),
        components=count,
        constant=constant,
    )


def distinct(eta: np.ndarray) -> np.ndarray:
    """eta (chain, draw, M, D) as components (chain, draw, C). A column that is the same in all rows is taken once.

    Parameters
    ----------
    eta : ndarray
        Shape (chain, draw, M, D).

    Returns
    -------
    ndarray
        Shape (chain, draw, C).
    """
    columns = []
    for column in np.moveaxis(eta, -1, 0):
        same = np.array_equal(column, np.broadcast_to(column[..., :1], column.shape), equal_nan=True)
        columns.append(column[..., :1] if same else column)
    return np.concatenate(columns, axis=-1)


def probe_indices(rows: int, seed: int, most: int = PROBES) -> np.ndarray:
    """Indices of training rows, chosen uniformly without replacement; the same at every call.

    Parameters
    ----------
    rows : int
        Number of training rows.
    seed : int
        Seed of the choice.
    most : int
        Largest number of indices.

    Returns
    -------
    ndarray
        Up to `most` indices.
    """
    rng = np.random.default_rng(site_seed("probe", seed))
    return np.sort(rng.choice(rows, size=min(rows, most), replace=False))


def quantities(
    problem: Problem,
    w: Mapping[str, np.ndarray],
    predictor: Callable[[Any], np.ndarray],
    probe: Any,
    x: Any,
    y: np.ndarray,
) -> dict[str, np.ndarray]:
    """Quantities by which draws of a network are judged, invariant under the symmetries of its weights.

    Parameters
    ----------
    problem : Problem
        The program and its data.
    w : mapping of str to ndarray
        Constrained values of S draws.
    predictor : callable
        inputs -> eta (S, rows, D) of these draws.
    probe
        Inputs, NumPy, in the units of the fit. If it is `x` itself, it is predicted once.
    x, y
        Rows of the log likelihood, NumPy, in the units of the fit.

    Returns
    -------
    dict of str to ndarray
        Arrays with the S draws as the first axis:

        - "f": the predictor eta (S, M, D) at the inputs `probe`;
        - "log_likelihood": sum_i log p(y_i | x_i, draw) over the rows x, y, (S,);
        - each scalar random variable of the model, by its name, (S,).
    """
    f = predictor(probe)
    eta = f if probe is x else predictor(x)
    family, parameters = problem.program.likelihood.mixture_parameters(eta)
    prediction = Prediction(family, parameters)
    density = prediction.component_log_prob(y.reshape(prediction.shape) if y.shape[1:] == (1,) else y).sum(
        axis=-1
    )
    found = {PREDICTOR: f, LOG_LIKELIHOOD: density}
    for name, site in problem.program.sites.items():
        if site.shape == () and not site.is_param:
            # A variable with the name of one of the quantities above gets a name of its own.
            found[f"{name} (site)" if name in (PREDICTOR, LOG_LIKELIHOOD) else name] = w[name]
    return found


def components(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`quantities` arranged as (chain, draw, ...), as components (chain, draw, C) for `mixing`.

    Parameters
    ----------
    values : mapping of str to ndarray
        The quantities, (chain, draw, ...).

    Returns
    -------
    dict of str to ndarray
        The components, (chain, draw, C).
    """
    return {
        name: distinct(value) if name == PREDICTOR else value[..., None] for name, value in values.items()
    }
