"""Importance weights smoothed by a Pareto distribution, and how far they can be trusted: k-hat.

A generalised Pareto distribution is fitted to the largest weights and takes their place; its shape k-hat says how many
moments the weights have (Vehtari, Simpson, Gelman, Yao and Gabry 2024, Journal of Machine Learning Research 25).
"""

from __future__ import annotations

import math

import numpy as np

from ppl_bnn.core.warning_filters import ignored

# Up to this k-hat an average over the weights can be trusted at the usual numbers of draws.
K_LIMIT = 0.7
# Nats by which log weights of rounding errors differ at most: a tail that is fitted to these would mean nothing.
EQUAL = 1e-3
# Where so few draws carry all the weight, the others vanish beside them, and what is fitted is how numbers underflow.
FEWEST_EFFECTIVE = 4.0
# Below this no tail of five draws is left for a Pareto distribution, of which ArviZ takes a fifth.
FEWEST_DRAWS = 25


def smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed log weights (S,), normalised, and k-hat, by ArviZ, from log importance ratios (S,).

    k-hat is -inf where all ratios are equal up to rounding, and infinite where nothing can be claimed: a ratio that is
    zero or not finite, a handful of draws that carry all the weight, a tail of too few distinct values. The weights are
    then the plain ones.
    """
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    log_ratios = np.asarray(log_ratios, dtype=np.float64)
    plain = log_ratios - np.logaddexp.reduce(log_ratios)
    if not np.isfinite(log_ratios).all():
        return plain, math.inf
    if np.ptp(log_ratios) <= EQUAL:
        return plain, -math.inf
    if FEWEST_EFFECTIVE * np.sum(np.exp(2.0 * plain)) > 1.0:
        return plain, math.inf
    with ignored():
        try:
            # Made for leaving rows out, whose log weights are minus log likelihoods: ArviZ turns the sign.
            log_weights, k = array_stats.psislw(-log_ratios)
        except ValueError:
            return plain, math.inf
    if not np.isfinite(k):
        return plain, math.inf
    return log_weights - np.logaddexp.reduce(log_weights), float(k)
