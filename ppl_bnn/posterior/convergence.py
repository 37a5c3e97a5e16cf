"""Convergence of several chains: R-hat, effective sample sizes and Monte-Carlo errors of components, by ArviZ.

`quantities` defines the quantities by which a network is judged. `diagnostics.function_space` applies them to a
posterior, and samplers that run until convergence apply them during the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.prediction.prediction import Prediction

# ArviZ returns no value for fewer.
FEWEST_DRAWS = 4
PROBES = 50
# Functions that are judged at most. Of thousands, one or the other exceeds the limit of R-hat by chance.
FUNCTIONS = 200
# The value of each figure for a component that cannot be judged.
WORST = {"rhat": np.inf, "ess_bulk": 0.0, "ess_tail": 0.0, "mcse": np.inf}
# The quantities that are not random variables of the model.
PREDICTOR, LOG_LIKELIHOOD = "f", "log_likelihood"


@dataclass(frozen=True)
class Mixing:
    """Worst values over the components of one quantity.

    `rhat` is the rank-normalised split R-hat. `ess_bulk` and `ess_tail` are effective sample sizes (tail: the smaller
    one of the 5 % and 95 % quantiles). `mcse` is the Monte-Carlo standard error of the mean, in standard deviations of
    the component. `components` counts those that vary; `constant` those that do not (such as a known noise) and are
    left out.
    """

    rhat: float
    ess_bulk: float
    ess_tail: float
    mcse: float
    components: int
    constant: int

    @property
    def ess(self) -> float:
        """The smaller one of `ess_bulk` and `ess_tail`."""
        return min(self.ess_bulk, self.ess_tail)

    @property
    def words(self) -> str:
        """R-hat and the smaller ESS in words."""
        return f"R-hat {self.rhat:.3f}, ESS {self.ess:.0f}" if self.components else "nothing varies"


def mixing(draws: np.ndarray, superchains: int | None = None) -> Mixing:
    """Convergence of the components of draws (chain, draw, components).

    With `superchains`, the number of points from which several chains each started, R-hat is the nested one
    (`nested_rhat`), for chains that are too short for plain R-hat. A component that is not finite, or on which each
    chain is constant at its own value, has R-hat infinity and ESS 0; so do all with fewer than 4 draws per chain.
    """
    finite = np.isfinite(draws).all(axis=(0, 1))
    varies = ~finite | (draws.max(axis=(0, 1)) > draws.min(axis=(0, 1)))
    count = int(np.count_nonzero(varies))
    constant = len(varies) - count
    if not count:
        return Mixing(*[np.nan] * 4, components=0, constant=constant)
    found = {name: np.full(count, worst) for name, worst in WORST.items()}
    usable = finite & (draws.max(axis=1) > draws.min(axis=1)).any(axis=0)
    if draws.shape[1] >= FEWEST_DRAWS and usable.any():
        values, at = draws[..., usable].astype(np.float64), usable[varies]
        if superchains is None:
            # ArviZ's rank-normalised R-hat of a single chain is NaN, and infinity here.
            found["rhat"][at] = by_arviz("rhat", values, np.inf, method="rank")
        else:
            found["rhat"][at] = nested_rhat(values, superchains)
        found["ess_bulk"][at] = by_arviz("ess", values, 0.0, method="bulk")
        found["ess_tail"][at] = by_arviz("ess", values, 0.0, method="tail", prob=(0.05, 0.95))
        found["mcse"][at] = by_arviz("mcse", values, np.inf, method="mean") / values.std(axis=(0, 1))
    worst = {name: float(values.max() if WORST[name] else values.min()) for name, values in found.items()}
    return Mixing(**worst, components=count, constant=constant)


def by_arviz(name: str, draws: np.ndarray, undefined: float, **options: Any) -> np.ndarray:
    """A diagnostic of ArviZ of each component of draws (chain, draw, ...), with `undefined` in place of NaN.

    ArviZ returns NaN for example for a tail that does not vary.
    """
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    with np.errstate(all="ignore"):
        found = np.asarray(getattr(array_stats, name)(draws, chain_axis=0, draw_axis=1, **options))
    return np.where(np.isnan(found), undefined, found)


def nested_rhat(draws: np.ndarray, superchains: int) -> np.ndarray:
    """Nested R-hat of each component, by ArviZ, with rank-normalised, split chains as for plain R-hat.

    For chains m of superchain k with draws x_nmk, n = 1..N, means x_mk, superchain means x_k, and x their mean,

        B   = 1 / (K - 1) sum_k (x_k - x)^2                           between superchains
        B_k = 1 / (M - 1) sum_m (x_mk - x_k)^2                        between the chains of one; 0 for M = 1
        W_k = 1 / M sum_m 1 / (N - 1) sum_n (x_nmk - x_mk)^2          within its chains
        W   = 1 / K sum_k (B_k + W_k)
        nested R-hat = sqrt(1 + B / W)  >=  1

    The values x are those of Vehtari et al. (2021): the halves of each chain are two chains of the same superchain (so
    M doubles), and the ranks of all draws are turned into normal scores. The result is the larger of this value and the
    one for the ranks of ``|x - median|``.

    Parameters
    ----------
    draws : ndarray
        Shape (chain, draw, components), at least 4 draws, of components that are finite and vary within some chain.
    superchains : int
        K, at least 2: the number of groups of M = chains / K consecutive chains that started at the same point.

    Returns
    -------
    ndarray
        Shape (components,).

    Notes
    -----
    At stationarity B / W is about 1 / (M ESS of one chain). Nested R-hat shows whether the end of a chain
    depends on its start. It does not detect modes that chains never leave if each superchain visits them in the same
    proportions.

    References
    ----------
    Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman 2024, Bayesian Analysis, equations 4 to 8. Vehtari,
    Gelman, Simpson, Carpenter and Buerkner 2021.
    """
    groups = np.repeat(np.arange(superchains), len(draws) // superchains)
    return by_arviz("rhat_nested", draws, np.inf, method="rank", superchain_ids=groups)


def distinct(eta: np.ndarray) -> np.ndarray:
    """eta (chain, draw, M, D) as components (chain, draw, C); a column that is the same in all rows is taken once."""
    columns = []
    for column in np.moveaxis(eta, -1, 0):
        same = np.array_equal(column, np.broadcast_to(column[..., :1], column.shape), equal_nan=True)
        columns.append(column[..., :1] if same else column)
    return np.concatenate(columns, axis=-1)


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Up to `most` indices of `count` values, evenly spaced from the first to the last."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def probe_indices(rows: int, seed: int, most: int = PROBES) -> np.ndarray:
    """Up to `most` indices of training rows, chosen uniformly without replacement; the same at every call."""
    rng = np.random.default_rng(site_seed("probe", seed))
    return np.sort(rng.choice(rows, size=min(rows, most), replace=False))


def quantities(
    problem: Problem, w: Mapping[str, np.ndarray], f: np.ndarray, eta: np.ndarray, y: np.ndarray
) -> dict[str, np.ndarray]:
    """Quantities by which draws of a network are judged, invariant under the symmetries of its weights.

    Arrays with the S draws as first axis: "f", the predictor (S, M, D) at the probe inputs; "log_likelihood",
    sum_i log p(y_i | x_i, draw) over the rows of y, (S,), where the predictor is `eta`, (S, rows, D); and each scalar
    random variable of the model, by its name, (S,). `w` are constrained values of the draws, and the targets are in the
    units of the fit.
    """
    prediction = Prediction(*problem.program.likelihood.mixture_parameters(eta))
    targets = y.reshape(prediction.shape) if y.shape[1:] == (1,) else y
    found = {PREDICTOR: f, LOG_LIKELIHOOD: prediction.component_log_prob(targets).sum(axis=-1)}
    for name, site in problem.program.sites.items():
        if site.shape == () and not site.is_param:
            # A variable with the name of one of the quantities above is renamed.
            found[f"{name} (site)" if name in (PREDICTOR, LOG_LIKELIHOOD) else name] = w[name]
    return found


def components(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`quantities` (chain, draw, ...) as components (chain, draw, C) for `mixing`."""
    found = {name: value[..., None] for name, value in values.items()}
    return found | {PREDICTOR: distinct(values[PREDICTOR])}
