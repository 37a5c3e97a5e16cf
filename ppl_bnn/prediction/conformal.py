"""Split-conformal prediction: intervals and sets of guaranteed coverage, for any posterior.

A score s(x, y) measures how unusual y is under the prediction at x. With s_1..s_n of n held-out rows,

    q = the k-th smallest of them, k = ceil((n + 1) level),        C(x) = {y : s(x, y) <= q}.

If these rows and a new one are exchangeable, then, for any model, method and true distribution (Vovk, Gammerman and
Shafer 2005; Lei et al. 2018, JASA 113, 1094-1111),

    level <= k / (n + 1) <= P(y in C(x)),      with equality on the right if scores have no ties.

The probability is over the held-out rows and the new one. Given the held-out rows the coverage is a draw from
Beta(k, n + 1 - k). It is an average over all rows, not a coverage of each kind of row.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError, check_known
from ppl_bnn.prediction.arguments import check_numbers, checked_labels, checked_levels
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.recalibration import held_out_prediction, predicted

NUMBERS = ("absolute", "normalised", "quantile")
CLASSES = ("lac", "aps")


@dataclass(frozen=True, eq=False)
class Conformal:
    """A posterior with intervals or sets of guaranteed coverage. Build one with `bnn.conformal`.

    Parameters
    ----------
    source
        The posterior, or None if it was built from a prediction.
    level : float
        Coverage.
    score : str
        Name of the score.
    threshold : float or ndarray
        q, or one per output (K,). Infinite if there were too few rows.
    rows : int
        Number of held-out rows, n.
    randomise : int, optional
        The seed of "aps".
    keywords : mapping
        Arguments of `predict`.
    """

    source: Any
    level: float
    score: str
    threshold: float | np.ndarray
    rows: int
    randomise: int | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Conformal({self.source!r}: {self.level:.4g} by {self.score}, from {self.rows} rows)"

    def interval(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """Prediction intervals, ends included. Each output has the coverage by itself.

        Parameters
        ----------
        x
            Inputs, or a `Prediction`.

        Returns
        -------
        lower, upper : ndarray
            Each (N,) or (N, K), units of y. Crossed ends of a "quantile" interval are both set to their mid-point.

        Raises
        ------
        UnsupportedError
            For classes.
        """
        if self.score in CLASSES:
            raise UnsupportedError.of("interval", "numbers", f"classes ({self.score})", "sets(x)")
        prediction = predicted(self.source, x, self.keywords)
        check_numbers(prediction, "an interval")
        lower, upper, unit = _ends(prediction, self.score, self.level)
        lower, upper = lower - self.threshold * unit, upper + self.threshold * unit
        crossed = lower > upper
        # Only ends that have crossed are averaged: the others may be infinite.
        middle = 0.5 * (np.where(crossed, lower, 0.0) + np.where(crossed, upper, 0.0))
        return np.where(crossed, middle, lower), np.where(crossed, middle, upper)

    def sets(self, x: Any) -> np.ndarray:
        """Prediction sets: which classes are in the set of each row. A set may be empty.

        Parameters
        ----------
        x
            Inputs, or a `Prediction`. With `randomise` the set of a row depends on its position among the rows.

        Returns
        -------
        ndarray of bool
            Shape (N, C).

        Raises
        ------
        UnsupportedError
            For numbers.
        """
        if self.score not in CLASSES:
            raise UnsupportedError.of("sets", "classes", f"numbers ({self.score})", "interval(x)")
        prediction = predicted(self.source, x, self.keywords)
        uniform = _uniform(self.randomise, 1, prediction.rows)
        return _scores_of_classes(prediction, self.score, uniform) <= self.threshold


def conformal(
    source: Any,
    x: Any,
    y: Any,
    level: float = 0.9,
    score: str | None = None,
    *,
    randomise: int | None = None,
    **keywords: Any,
) -> Conformal:
    """Prediction intervals or sets that contain a new y with a probability of at least `level`.

    Parameters
    ----------
    source : Posterior or Prediction
        A posterior, or anything with ``predict(x) -> Prediction``. Or the `Prediction` of the held-out rows itself,
        with x = None; `interval` and `sets` then take predictions.
    x, y : array_like
        Held-out rows, exchangeable with new ones. At least level / (1 - level) of them.
    level : float, default 0.9
        Coverage, within (0, 1).
    score : str, optional
        Numbers, m the mean, d the standard deviation, [a, b] the central interval of probability `level`:

        - "absolute", ``|y - m|``: intervals of one width;
        - "normalised", ``|y - m| / d``, the default: m -+ q d (Lei et al. 2018);
        - "quantile", max(a - y, y - b): [a - q, b + q] (Romano, Patterson and Candes 2019).

        Classes:

        - "lac", 1 - P_y, the default: the smallest sets on average (Sadinle, Lei and Wasserman 2019);
        - "aps", the sum of the probabilities of all classes down to y in decreasing order: larger sets where the
          prediction is uncertain (Romano, Sesia and Candes 2020).
    randomise : int, optional
        For "aps", a seed: a random part of P_y, the last of these probabilities, is counted, as in the paper. Without
        it every least probable class has the score 1, and these ties make the sets larger than necessary.
    **keywords
        Arguments of `source.predict`, now and later: draws=, kind=, seed=.

    Returns
    -------
    Conformal
        The posterior with intervals or sets.

    Raises
    ------
    InputError
        For the rows of the fit itself, or a level outside (0, 1).
    UnknownNameError
        For an unknown score.
    UnsupportedError
        For a score that the prediction does not support, or for censored rows.

    Warns
    -----
    UserWarning
        If n < level / (1 - level): only the interval of all numbers, or the set of all classes, has the guarantee.

    References
    ----------
    Lei et al. 2018, JASA 113, 1094-1111. Romano, Patterson and Candes 2019, NeurIPS. Sadinle, Lei and Wasserman 2019,
    JASA 114. Romano, Sesia and Candes 2020, NeurIPS.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x[:300], table.y[:300], bnn.MAP(), standardise=True)
    >>> intervals = bnn.conformal(posterior, table.x[300:400], table.y[300:400], level=0.9)
    >>> low, high = intervals.interval(table.x[400:])
    >>> low.shape, bool((low < high).all())
    ((42,), True)
    """
    level = float(checked_levels("level", level, "level=0.9"))
    prediction = held_out_prediction("conformal", source, x, y, keywords)
    known = CLASSES if prediction.is_classes else NUMBERS
    score = score or ("lac" if prediction.is_classes else "normalised")
    check_known("score", [score], known)
    possible = randomise is None or score == "aps"
    InputError.check(possible, "randomise", "score='aps' to randomise", repr(score), "randomise=None")
    if prediction.is_classes:
        labels = checked_labels(prediction, y)
        each = _scores_of_classes(prediction, score, _uniform(randomise, 0, prediction.rows))
        values = each[np.arange(prediction.rows), labels]
    else:
        lower, upper, unit = _ends(prediction, score, level)
        y = prediction.observed_values(y)
        values = np.maximum(lower - y, y - upper) / unit
    # The decimal as written: 0.07 is not exactly 7 / 100 in binary, and 100 * 0.07 rounds to more than 7.
    exact = Fraction(str(level))
    k, rows = math.ceil(exact * (prediction.rows + 1)), prediction.rows
    if k > rows:
        what = "every class is in each set" if prediction.is_classes else "all intervals are infinite"
        needed = f"a level of {level:g} needs {math.ceil(exact / (1 - exact))} held-out rows"
        warnings.warn(f"conformal: {needed}, and there are {rows}: {what}", UserWarning, stacklevel=2)
        values = np.full((k, *values.shape[1:]), np.inf)
    threshold = np.sort(values, axis=0)[k - 1]
    kept = None if isinstance(source, Prediction) else source
    threshold = threshold if np.ndim(threshold) else float(threshold)
    return Conformal(kept, level, score, threshold, rows, randomise, keywords)


def _ends(prediction: Prediction, score: str, level: float) -> tuple[np.ndarray, np.ndarray, Any]:
    """Lower and upper end of the interval before widening, and the unit of q."""
    if score == "quantile":
        return (*prediction.interval(level), 1.0)
    mean = prediction.mean
    if score == "absolute":
        return mean, mean, 1.0
    finite, expected = np.isfinite(prediction.std).all(), "a finite standard deviation for score='normalised'"
    UnsupportedError.check(finite, "", expected, "infinite ones", "score='quantile'")
    return mean, mean, prediction.std


def _uniform(seed: int | None, part: int, rows: int) -> np.ndarray | None:
    """Random numbers of held-out rows (part 0) and of later rows (part 1), which are independent of each other."""
    return None if seed is None else np.random.default_rng([seed, part]).random(rows)


def _scores_of_classes(prediction: Prediction, score: str, uniform: np.ndarray | None) -> np.ndarray:
    """The score of each class of each row, (N, C)."""
    probabilities = prediction.probabilities
    if score == "lac":
        return 1.0 - probabilities
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ordered = np.take_along_axis(probabilities, order, axis=1)
    upto = np.cumsum(ordered, axis=1)
    upto[:, -1] = 1.0  # exactly 1, so that ties compare equal
    if uniform is not None:
        upto -= uniform[:, None] * ordered
    values = np.empty_like(upto)
    np.put_along_axis(values, order, upto, axis=1)
    return values
