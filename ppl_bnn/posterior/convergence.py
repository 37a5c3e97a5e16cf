"""How well draws of several chains mix: R-hat, effective sample sizes and Monte-Carlo errors of components, by ArviZ.

What is judged of a network is written here once (`quantities`): `diagnostics.function_space` judges a posterior by it,
and samplers that go on until they have converged ask while they run.
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
# The quantities that are no random variables of the model.
PREDICTOR, LOG_LIKELIHOOD = "f", "log_likelihood"


@dataclass(frozen=True)
class Mixing:
    """Worst and median figures over the components of one quantity.

    rhat: rank-normalised split R-hat. ess_bulk, ess_tail: effective sample sizes (tail: the smaller one of the
    5 % and 95 % quantiles). mcse: Monte-Carlo standard error of the mean, in standard deviations of the
    component. components: how many vary; constant: how many do not (a known noise, say) and are left out.
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
    """Figures of components, (chain, draw, components).

    superchains: the number of points that chains started from, where several started at each: R-hat is then the nested
    one (`ppl_bnn.posterior.nested`), of chains too short for any other.

    A component that is not finite, or on which each chain stands still at a place of its own, has R-hat
    infinity and ESS 0. With fewer than 4 draws per chain nothing can be said: R-hat is infinity and ESS 0 too.
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
        # Where ArviZ has no answer, such as for a tail in which nothing varies, nothing is claimed.
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
    """eta (chain, draw, M, D) as components (chain, draw, C); a column that is the same in all rows is taken once."""
    columns = []
    for column in np.moveaxis(eta, -1, 0):
        same = np.array_equal(column, np.broadcast_to(column[..., :1], column.shape), equal_nan=True)
        columns.append(column[..., :1] if same else column)
    return np.concatenate(columns, axis=-1)


def probe_indices(rows: int, seed: int, most: int = PROBES) -> np.ndarray:
    """Up to `most` of the training rows, chosen evenly without replacement; the same at every call."""
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
    """What draws of a network are judged by: quantities that no symmetry of its weights moves, each with an axis S.

    "f": the predictor eta (S, M, D) at the inputs `probe`; "log_likelihood": sum_i log p(y_i | x_i, draw) over the rows
    x, y, (S,); and each scalar random variable of the model by its name, (S,).

    w: constrained values of S draws. predictor: inputs -> eta (S, rows, D) of these draws. probe, x, y: NumPy, in the
    units of the fit; where `probe` is `x` itself, it is predicted once.
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
            # A variable that is called as one of the others stands beside it.
            found[f"{name} (site)" if name in (PREDICTOR, LOG_LIKELIHOOD) else name] = w[name]
    return found


def components(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `quantities` gave, arranged as (chain, draw, ...), as components (chain, draw, C) that `mixing` takes."""
    return {
        name: distinct(value) if name == PREDICTOR else value[..., None] for name, value in values.items()
    }
