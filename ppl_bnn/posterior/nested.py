"""Nested R-hat: convergence of many short chains, in groups that started at one point.

With many chains each can be short: a hundred chains of fifty draws can hold thousands of effective draws. Plain R-hat
requires each chain to be long, since it stays near sqrt(1 + 1 / ESS of one chain) for any number of chains. Nested
R-hat compares the means of whole groups, whose noise falls with the number of chains in them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError

# ArviZ returns no value for fewer.
FEWEST_DRAWS = 4


def nested_rhat(draws: np.ndarray, superchains: int) -> np.ndarray:
    """Nested R-hat of each component, by ArviZ, with rank-normalised, split chains as for plain R-hat.

    For chains m of superchain k with draws x_nmk, n = 1..N, means x_mk, superchain means x_k, and x their mean,

        B   = 1 / (K - 1) sum_k (x_k - x)^2                           between superchains
        B_k = 1 / (M - 1) sum_m (x_mk - x_k)^2                        between the chains of one; 0 for M = 1
        W_k = 1 / M sum_m 1 / (N - 1) sum_n (x_nmk - x_mk)^2          within its chains
        W   = 1 / K sum_k (B_k + W_k)
        nested R-hat = sqrt(1 + B / W)  >=  1

    The values x are those of Vehtari et al. (2021): the halves of each chain are two chains of the same superchain (so
    M doubles), and the ranks of all draws are turned into normal scores. The same is computed for the ranks of
    ``|x - median|``. The result is the larger of the two values.

    Parameters
    ----------
    draws : ndarray
        Shape (chain, draw, components).
    superchains : int
        K, the number of groups of chains, of M = chains / K consecutive chains each that started at the same point.

    Returns
    -------
    ndarray
        Shape (components,). Infinity for a component that is not finite, or on which every chain is constant at its own
        value, and for all components with fewer than 4 draws per chain. NaN for a component that is the same in all
        draws.

    Raises
    ------
    InputError
        For another shape, fewer than 2 superchains, or a number of chains that is not a multiple of them.

    Notes
    -----
    At stationarity B / W is about 1 / (M ESS of one chain). If chains have forgotten their starting points, it falls to
    0 as chains are added to superchains. So it shows whether the end of a chain depends on its start, and no more.
    Chains may fall by chance into modes that they never leave. If the chains of each superchain fall into the modes in
    the same proportions, they agree by nested R-hat and disagree by plain R-hat.

    References
    ----------
    Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman 2024, Bayesian Analysis, equations 4 to 8. Vehtari,
    Gelman, Simpson, Carpenter and Buerkner 2021.
    """
    draws = np.asarray(draws)
    if draws.ndim != 3:
        raise InputError.of("draws", "(chain, draw, components)", f"shape {draws.shape}", "draws[..., None]")
    chains = draws.shape[0]
    if isinstance(superchains, bool) or not isinstance(superchains, int | np.integer) or superchains < 2:
        raise InputError.of(
            "superchains", "a whole number of at least 2", repr(superchains), "8, of several chains each"
        )
    if chains % superchains:
        raise InputError.of(
            "superchains", f"a divisor of the {chains} chains", repr(superchains), "groups of equal size"
        )
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    found = np.full(draws.shape[-1], np.inf)
    finite = np.isfinite(draws).all(axis=(0, 1))
    low, high = draws.min(axis=1), draws.max(axis=1)
    constant = finite & (low.min(axis=0) == high.max(axis=0))
    found[constant] = np.nan
    usable = finite & ~constant & (low < high).any(axis=0)
    if draws.shape[1] >= FEWEST_DRAWS and usable.any():
        values: Any = np.moveaxis(draws[..., usable].astype(np.float64), -1, 0)
        groups = np.repeat(np.arange(superchains), chains // superchains)
        with np.errstate(all="ignore"):
            answer = np.asarray(
                array_stats.rhat_nested(
                    values, superchain_ids=groups, method="rank", chain_axis=1, draw_axis=2
                )
            )
        found[usable] = np.where(np.isnan(answer), np.inf, answer)
    return found
