"""Distance of a prediction from a reference prediction of the same rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bnn.core.errors import InputError

if TYPE_CHECKING:
    from ppl_bnn.prediction.prediction import Prediction


def fidelity(prediction: Prediction, reference: Prediction) -> dict[str, float]:
    """Distance of a prediction from a reference prediction of the same rows.

    Below, m is the mean of the mean function, v its variance over draws (`mean_function_variance`), and a star marks
    the reference. A row is a row and output. For classes the squares and variances of a row are summed over its
    classes.

    Parameters
    ----------
    prediction : Prediction
        The prediction to judge.
    reference : Prediction
        The reference prediction.

    Returns
    -------
    dict of str to float
        - `mean_gap`: ``sqrt(sum_n a_n (m_n - m*_n)^2 / v*_n)``, error of the mean in EPISTEMIC standard deviations of
          the reference.
        - `sd_ratio`, `sd_log_ratio_spread`: exp of the mean, and the standard deviation, with weights a_n, of
          ``log sqrt(v_n / v*_n)``: 1 and 0 where the epistemic standard deviations agree. A point estimate has no
          spread: 0 and infinity.
        - `wasserstein` (numbers): mean over rows of the 1-Wasserstein distance of the two predictive distributions of
          y, the integral of ``|F - F*|``, in PREDICTIVE standard deviations of the reference.
        - `agreement`, `total_variation` (classes): share of rows with the same most probable class; mean over rows of
          ``sum_c |P_c - P*_c| / 2``.

    Raises
    ------
    InputError
        If family of outcome, shape or classes differ, or the reference has no spread.

    Notes
    -----
    The weights a_n are equal for numbers. For classes they are in proportion to ``v*_n``, since ratios to the nearly
    zero variance of certain rows would dominate otherwise.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> reference = bnn.Prediction("Normal", {"loc": np.array([[0.0], [2.0]]), "scale": np.ones((2, 1))})
    >>> wide = bnn.Prediction("Normal", {"loc": np.array([[0.0], [4.0]]), "scale": np.ones((2, 1))})
    >>> found = bnn.scores.fidelity(wide, reference)
    >>> round(found["mean_gap"], 4), round(found["sd_ratio"], 4)
    (1.0, 2.0)
    """
    _check_comparable(prediction, reference)
    both = (prediction, reference)
    moments = (moment for each in both for moment in (each.mean, each.mean_function_variance))
    figures = mean_function_gap(*moments, classes=reference.is_classes)
    if reference.is_classes:
        ours, theirs = prediction.probabilities, reference.probabilities
        figures["agreement"] = float(np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1)))
        figures["total_variation"] = float(np.mean(0.5 * np.abs(ours - theirs).sum(axis=1)))
    else:
        figures["wasserstein"] = float(np.mean(wasserstein(prediction, reference) / reference.std))
    return figures


def mean_function_gap(
    mean: np.ndarray,
    variance: np.ndarray,
    reference_mean: np.ndarray,
    reference_variance: np.ndarray,
    classes: bool,
) -> dict[str, float]:
    """mean_gap, sd_ratio and sd_log_ratio_spread of `fidelity`, from means and variances of two mean functions.

    Parameters
    ----------
    mean, variance, reference_mean, reference_variance : ndarray
        All of one shape, (N,) or (N, K).
    classes : bool
        Whether the outcome is a label. The arrays (N, C) then hold the C classes of a row.

    Returns
    -------
    dict of str to float
        The three entries.

    Raises
    ------
    InputError
        If the reference has no spread.
    """
    difference = (mean - reference_mean) ** 2
    if classes and difference.ndim == 2:
        parts = (difference, variance, reference_variance)
        difference, variance, reference_variance = (part.sum(axis=-1) for part in parts)
    spread = reference_variance > 0.0
    good, got = spread.any() if classes else spread.all(), f"none in {np.count_nonzero(~spread)} rows"
    InputError.check(good, "reference", "epistemic spread in every row", got, "several draws")
    if classes:
        weights = reference_variance / reference_variance.sum()
        mean_gap = math.sqrt(difference.sum() / reference_variance.sum())
    else:
        weights = np.full(spread.shape, 1.0 / spread.size)
        mean_gap = math.sqrt(np.mean(difference / reference_variance))
    # Without spread in the reference a row has weight 0 here; it still counts in mean_gap.
    weights, variance, reference_variance = weights[spread], variance[spread], reference_variance[spread]
    sd_ratio, ratio_spread = 0.0, math.inf
    if (variance > 0.0).all():
        log_ratio = 0.5 * (np.log(variance) - np.log(reference_variance))
        centre = float(np.sum(weights * log_ratio))
        sd_ratio, ratio_spread = math.exp(centre), math.sqrt(np.sum(weights * (log_ratio - centre) ** 2))
    return {"mean_gap": mean_gap, "sd_ratio": sd_ratio, "sd_log_ratio_spread": ratio_spread}


def noise_floor(reference: Prediction, groups: Any = None) -> dict[str, float]:
    """`fidelity` between two halves of the reference's draws: the smallest distance that can be resolved.

    Parameters
    ----------
    reference : Prediction
        The reference prediction.
    groups : optional
        Chain number of each draw, (S,). Whole chains go to either half, so that autocorrelation cannot make the halves
        more alike than two runs. By default, or with one chain, the first and the second half of the draws.

    Returns
    -------
    dict of str to float
        As from `fidelity`. The floor of mean_gap is about sqrt(2) above that of two full runs.

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> draws = np.array([[0.0], [2.0], [1.0], [3.0]])
    >>> reference = bnn.Prediction("Normal", {"loc": draws, "scale": np.ones((4, 1))})
    >>> round(bnn.scores.noise_floor(reference)["mean_gap"], 4)
    1.0
    """
    return fidelity(*halves(reference, groups))


def halves(reference: Prediction, groups: Any = None) -> tuple[Prediction, Prediction]:
    """The two halves of the draws that `noise_floor` compares, as mixtures.

    Parameters
    ----------
    reference : Prediction
        A prediction of at least 4 draws.
    groups : optional
        As in `noise_floor`.

    Returns
    -------
    first, second : Prediction
        The mixtures of each half.

    Raises
    ------
    InputError
        For fewer than 4 draws, or `groups` of another shape.
    """
    if reference.draws < 4:
        raise InputError.of("", "a reference of at least 4 draws", f"{reference.draws}", "more draws")
    first = np.arange(reference.draws) < reference.draws // 2
    if groups is not None:
        groups = np.asarray(groups)
        good, got = groups.shape == (reference.draws,), f"shape {groups.shape}"
        InputError.check(good, "groups", "one chain number per draw", got, "groups=None")
        names = np.unique(groups)
        if len(names) > 1:
            first = np.isin(groups, names[: len(names) // 2])
    return reference.take_draws(first), reference.take_draws(~first)


def wasserstein(prediction: Prediction, reference: Prediction) -> np.ndarray:
    """1-Wasserstein distance of two predictive distributions, per row and output.

    ``W_1 = integral |F(t) - G(t)| dt``, by the trapezium rule on 257 nodes between the outermost 1e-6 quantiles of the
    two, dense around the reference's median. For counts it is a sum over the integers.

    Parameters
    ----------
    prediction, reference : Prediction
        Two predictions of the same rows.

    Returns
    -------
    ndarray
        Units of y, (N,) or (N, K).

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> reference = bnn.Prediction("Normal", {"loc": np.array([[0.0], [2.0]]), "scale": np.ones((2, 1))})
    >>> shifted = reference.rescale(0.5, 1.0)
    >>> bnn.scores.wasserstein(shifted, reference).round(3)
    array([0.5])
    """
    from ppl_bnn.prediction.arguments import check_numbers
    from ppl_bnn.prediction.crps import row_cdf

    _check_comparable(prediction, reference)
    check_numbers(prediction, "wasserstein")
    ours, theirs = prediction.marginals(), reference.marginals()
    ends = [each.quantile([1e-6, 1.0 - 1e-6]) for each in (ours, theirs)]
    low, high = np.min(ends, axis=(0, 1)), np.max(ends, axis=(0, 1))
    if reference.is_counts:
        result = np.empty(ours.rows)
        for row in range(ours.rows):
            nodes = np.arange(low[row], high[row] + 1.0)
            result[row] = np.sum(np.abs(row_cdf(ours, row, nodes) - row_cdf(theirs, row, nodes)))
    else:
        lower, median, upper = theirs.quantile([0.25, 0.5, 0.75])
        width = upper - lower
        u = np.linspace(np.arcsinh((low - median) / width), np.arcsinh((high - median) / width), 257)
        nodes = median + width * np.sinh(u)
        result = np.trapezoid(np.abs(ours.cdf(nodes) - theirs.cdf(nodes)), nodes, axis=0)
    return result.reshape(reference.shape)


def target_of(prediction: Prediction) -> tuple[Any, ...]:
    """Shape and kind of the outcome of a row."""
    kind = (prediction.family, prediction.classes) if prediction.is_classes else prediction.is_counts
    return prediction.shape[1:], kind


def _check_comparable(prediction: Prediction, reference: Prediction) -> None:
    same = (prediction.rows, target_of(prediction)) == (reference.rows, target_of(reference))
    expected = f"a prediction comparable to the reference {reference!r}"
    InputError.check(same, "", expected, f"{prediction!r}", "the same rows and the same target for both")
