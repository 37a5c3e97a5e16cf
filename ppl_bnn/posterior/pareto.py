"""Pareto-smoothed importance weights, and their reliability: k-hat.

A generalised Pareto distribution is fitted to the largest weights, which are replaced by its quantiles. Its shape k-hat
determines how many moments the weights have (Vehtari, Simpson, Gelman, Yao and Gabry 2024, Journal of Machine Learning
Research 25).
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np

from ppl_bnn.core.warning_filters import ignored

# Up to this k-hat a weighted average is reliable at the usual numbers of draws.
K_LIMIT = 0.7
# Largest difference of log weights, in nats, that is a rounding error: a tail fit to these has no meaning.
EQUAL = 1e-3
# If so few draws carry all the weight, the weights of the others underflow, and the fit describes the underflow.
FEWEST_EFFECTIVE = 4.0
# ArviZ fits the largest fifth of the draws. With fewer draws than this the tail has fewer than five.
FEWEST_DRAWS = 25


def smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed normalised log weights (S,) from log importance ratios (S,), and k-hat, by ArviZ.

    The weights are not smoothed where k-hat is not finite. k-hat is -inf if all ratios are equal up to rounding, and
    infinite if it cannot be estimated: a ratio is zero or not finite, a few draws carry all the weight, or the tail has
    too few distinct values.
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
    log_weights, k = plain, math.inf
    with ignored(), suppress(ValueError):
        # psislw is made for leaving rows out: it takes log likelihoods and flips their sign.
        log_weights, k = array_stats.psislw(-log_ratios)
    if not np.isfinite(k):
        return plain, math.inf
    return log_weights - np.logaddexp.reduce(log_weights), float(k)
