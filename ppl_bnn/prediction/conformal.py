"""Conformal prediction: intervals and sets of guaranteed coverage, for any posterior.

**Split.** A score s(x, y) measures how unusual y is under the prediction at x. With s_1..s_n of n held-out rows,

    q = the k-th smallest of them, k = ceil((n + 1) level),        C(x) = {y : s(x, y) <= q}.

If these rows and a new one are exchangeable, then, for any model, method and true distribution (Vovk, Gammerman and
Shafer 2005; Lei et al. 2018, JASA 113, 1094-1111),

    level <= k / (n + 1) <= P(y in C(x)),      with equality on the right if scores have no ties.

The probability is over the held-out rows and the new one. Given the held-out rows the coverage is a draw from
Beta(k, n + 1 - k). It is an average over all rows, not a coverage of each kind of row.

**Cross.** All n rows are used for the fit and for the scores. They are divided at random into K folds, and each is
predicted by a fit without its fold: s_i = s_{-f(i)}(x_i, y_i), f(i) the fold of row i. Then

    "plus":    C(x) = {y : #{i : s_i < s_{-f(i)}(x, y)} < k},
    "minmax":  C(x) = {y : min_f s_{-f}(x, y) <= q},

for numbers, the smallest interval that contains this set. "plus" is the jackknife+ for K = n and CV+ for K < n (Barber,
Candes, Ramdas and Tibshirani 2021, Annals of Statistics 49, 486-507; for other scores than the absolute error Gupta,
Kuchibhotla and Ramdas 2022, Pattern Recognition 127; for classes Romano, Sesia and Candes 2020).

With folds of m = n / K rows each and a = 1 - level the coverage is at least

    "plus":    1 - 2 a - min(2 (1 - 1/K) / (m + 1), (1 - 1/m) / (K + 1)),
    "minmax":  k / (n + m).

Usually it is near `level`. The bound for "minmax" is ours: add m - 1 rows, so that the new row has a fold of its own
size, and let m_j = min_f s_{-f, -f(j)}(x_j, y_j), f over the other folds. The new row j is not covered only if k of the
n + m rows have a smaller m_i than m_j, which holds for at most n + m - k of the exchangeable rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.arrays import map_data, row_count
from ppl_bnn.core.errors import InputError, UnsupportedError, check_known
from ppl_bnn.prediction.arguments import check_numbers, checked_labels, checked_levels
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.recalibration import held_out_prediction, predicted

NUMBERS = ("absolute", "normalised", "quantile")
CLASSES = ("lac", "aps", "raps")
RANDOMISED = ("aps", "raps")
RULES = ("plus", "minmax")
# Penalties of "raps" that are tried, those of the paper.
PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
# Every so many held-out rows one chooses the penalty.
CHOOSING = 5
# Numbers that are sorted at once.
BLOCK = 10_000_000


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
        The seed of "aps" and "raps".
    penalty : (float, int), optional
        Penalty and rank of "raps".
    keywords : mapping
        Arguments of `predict`.
    """

    source: Any
    level: float
    score: str
    threshold: float | np.ndarray
    rows: int
    randomise: int | None = None
    penalty: tuple[float, int] | None = None
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
        _check_interval(self.score)
        prediction = predicted(self.source, x, self.keywords)
        check_numbers(prediction, "an interval")
        lower, upper, unit = _ends(prediction, self.score, self.level)
        return _uncrossed(lower - self.threshold * unit, upper + self.threshold * unit)

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
        _check_sets(self.score)
        prediction = predicted(self.source, x, self.keywords)
        uniform = _uniform(self.randomise, 1, prediction.rows)
        return _scores_of_classes(prediction, self.score, uniform, self.penalty) <= self.threshold


def conformal(
    source: Any,
    x: Any,
    y: Any,
    level: float = 0.9,
    score: str | None = None,
    *,
    randomise: int | None = None,
    penalty: tuple[float, int] | None = None,
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
          prediction is uncertain (Romano, Sesia and Candes 2020);
        - "raps", "aps" plus a penalty for each class before y beyond the first few: smaller sets where there are many
          classes (Angelopoulos, Bates, Malik and Jordan 2021).
    randomise : int, optional
        For "aps" and "raps", a seed: a random part of P_y, the last of these probabilities, is counted, as in the
        papers. Without it every least probable class has the score 1 in "aps", and these ties make the sets larger than
        necessary.
    penalty : (float, int), optional
        For "raps", b and r: the score has b max(0, rank - r) more, the rank of the most probable class being 1. By
        default every fifth held-out row chooses them, and the others give the threshold: r is the rank which a share
        `level` of these rows does not exceed, and b, of 0.001, 0.01, 0.1, 0.2 and 0.5, gives them the smallest sets.
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

    See Also
    --------
    cross_conformal : Needs no held-out rows, but several fits.

    References
    ----------
    Lei et al. 2018, JASA 113, 1094-1111. Romano, Patterson and Candes 2019, NeurIPS. Sadinle, Lei and Wasserman 2019,
    JASA 114. Romano, Sesia and Candes 2020, NeurIPS. Angelopoulos, Bates, Malik and Jordan 2021, ICLR.

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
    score = _checked_score(prediction, score, randomise, penalty)
    if score == "raps" and penalty is None:
        labels, chosen = checked_labels(prediction, y), np.arange(prediction.rows) % CHOOSING == 0
        penalty = _chosen_penalty(prediction.take(chosen), labels[chosen], level, randomise)
        prediction, y = prediction.take(~chosen), np.asarray(y)[~chosen]
    values = _values(prediction, y, score, level, _uniform(randomise, 0, prediction.rows), penalty)
    rank, rows = _rank(level, prediction.rows), prediction.rows
    if rank > rows:
        what = "every class is in each set" if prediction.is_classes else "all intervals are infinite"
        exact = Fraction(str(level))
        needed = f"a level of {level:g} needs {math.ceil(exact / (1 - exact))} held-out rows"
        warnings.warn(f"conformal: {needed}, and there are {rows}: {what}", UserWarning, stacklevel=2)
    kept, threshold = None if isinstance(source, Prediction) else source, _threshold(values, rank)
    return Conformal(kept, level, score, threshold, rows, randomise, penalty, keywords)


# --- by several fits ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CrossConformal:
    """Fits to all rows but a fold, with intervals or sets of guaranteed coverage. Build one with `cross_conformal`.

    Parameters
    ----------
    posteriors : tuple
        The K fits. Fit f has not seen the rows of fold f.
    folds : ndarray of int
        The fold of each row, (n,).
    values : ndarray
        The score of each row by the fit that has not seen it, (n,) or (n, outputs).
    level : float
        Coverage that was asked for.
    score : str
        Name of the score.
    rule : {"plus", "minmax"}
        How the fits are combined.
    randomise : int, optional
        The seed of "aps" and "raps".
    penalty : (float, int), optional
        Penalty and rank of "raps".
    """

    posteriors: tuple[Any, ...]
    folds: np.ndarray
    values: np.ndarray
    level: float
    score: str
    rule: str
    randomise: int | None = None
    penalty: tuple[float, int] | None = None

    def __repr__(self) -> str:
        what = f"{self.level:.4g} by {self.score} and {self.rule!r}"
        return f"CrossConformal({len(self.posteriors)} fits to {len(self.folds)} rows: {what})"

    @property
    def least_coverage(self) -> float:
        """The coverage that is proved for folds of equal size; the usual one is larger.

        Where sizes differ by one row, it is an approximation: the bound for folds of the larger size.
        """
        rows, folds = len(self.folds), len(self.posteriors)
        of_fold, rank = math.ceil(rows / folds), _rank(self.level, rows)
        if rank > rows:
            return 1.0
        if self.rule == "minmax":
            return rank / (rows + of_fold)
        lost = min(2.0 * (1.0 - 1.0 / folds) / (of_fold + 1), (1.0 - 1.0 / of_fold) / (folds + 1))
        return max(0.0, 2.0 * self.level - 1.0 - lost)

    def interval(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """Prediction intervals, ends included. Each output has the coverage by itself.

        Parameters
        ----------
        x
            Inputs.

        Returns
        -------
        lower, upper : ndarray
            Each (N,) or (N, outputs), units of y. Crossed ends are both set to their mid-point.

        Raises
        ------
        UnsupportedError
            For classes.
        """
        _check_interval(self.score)
        each = [_ends(posterior.predict(x), self.score, self.level) for posterior in self.posteriors]
        rank, rows = _rank(self.level, len(self.folds)), len(self.folds)
        if rank > rows:
            shape = np.shape(each[0][0])
            return np.full(shape, -np.inf), np.full(shape, np.inf)
        if self.rule == "minmax":
            q = _threshold(self.values, rank)
            lower = np.min([low - q * unit for low, _, unit in each], axis=0)
            upper = np.max([high + q * unit for _, high, unit in each], axis=0)
            return _uncrossed(lower, upper)
        lows, highs, units = (np.stack(parts) for parts in zip(*each, strict=True))
        lower, upper = np.empty_like(lows[0]), np.empty_like(lows[0])
        # Fits times training rows times new rows would not fit into memory.
        step = max(1, BLOCK // max(1, self.values.size))
        for first in range(0, len(lower), step):
            block = slice(first, first + step)
            unit = units[self.folds, block] if units.ndim > 1 else 1.0
            width = self.values[:, None] * unit
            low, high = lows[self.folds, block] - width, highs[self.folds, block] + width
            lower[block] = np.partition(low, rows - rank, axis=0)[rows - rank]
            upper[block] = np.partition(high, rank - 1, axis=0)[rank - 1]
        return _uncrossed(lower, upper)

    def sets(self, x: Any) -> np.ndarray:
        """Prediction sets: which classes are in the set of each row. A set may be empty.

        Parameters
        ----------
        x
            Inputs. With `randomise` the set of a row depends on its position among the rows.

        Returns
        -------
        ndarray of bool
            Shape (N, C).

        Raises
        ------
        UnsupportedError
            For numbers.
        """
        _check_sets(self.score)
        predictions = [posterior.predict(x) for posterior in self.posteriors]
        uniform, rank = _uniform(self.randomise, 1, predictions[0].rows), _rank(self.level, len(self.folds))
        each = [_scores_of_classes(found, self.score, uniform, self.penalty) for found in predictions]
        if self.rule == "minmax":
            return np.min(each, axis=0) <= _threshold(self.values, rank)
        smaller = [
            np.searchsorted(np.sort(self.values[self.folds == fold]), scores)
            for fold, scores in enumerate(each)
        ]
        return np.sum(smaller, axis=0) < rank


def cross_conformal(
    model: Any,
    x: Any,
    y: Any,
    method: Any,
    level: float = 0.9,
    score: str | None = None,
    *,
    folds: int = 10,
    rule: str = "plus",
    randomise: int | None = None,
    penalty: tuple[float, int] | None = None,
    seed: int = 0,
    **keywords: Any,
) -> CrossConformal:
    """Prediction intervals or sets of guaranteed coverage by cross-validation, without held-out rows.

    Parameters
    ----------
    model : callable
        A model, as for `fit`.
    x, y : array_like
        All rows, exchangeable with new ones.
    method : Method
        The method of the fits. With a checkpoint each fit has a subfolder of it, and an interrupted call continues.
    level : float, default 0.9
        Coverage, within (0, 1). `CrossConformal.least_coverage` is the part of it that is proved.
    score : str, optional
        As for `conformal`.
    folds : int, default 10
        K, the number of folds and of fits. As many as rows for the jackknife+.
    rule : {"plus", "minmax"}, default "plus"
        "plus" for CV+ and the jackknife+. "minmax" is wider, and for as many folds as rows its coverage is at least
        `level`.
    randomise : int, optional
        As for `conformal`.
    penalty : (float, int), optional
        As for `conformal`, but "raps" needs it: there are no rows that could choose it.
    seed : int, default 0
        Seed of the folds and of each fit.
    **keywords
        Other arguments of `fit`: standardise=, device=, progress=, observed=.

    Returns
    -------
    CrossConformal
        The fits with intervals or sets.

    Raises
    ------
    InputError
        For a level outside (0, 1), fewer than 2 folds or more than rows, or a class with rows in one fold only.
    UnknownNameError
        For an unknown score or rule.
    UnsupportedError
        For a score that the prediction does not support, or for censored rows.

    See Also
    --------
    conformal : Needs held-out rows, and one fit.

    References
    ----------
    Barber, Candes, Ramdas and Tibshirani 2021, Annals of Statistics 49, 486-507. Romano, Sesia and Candes 2020,
    NeurIPS.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> x, y = table.x[:100], table.y[:100]
    >>> found = bnn.cross_conformal(model, x, y, bnn.MAP(), level=0.9, folds=4, standardise=True)
    >>> low, high = found.interval(table.x[100:])
    >>> low.shape, bool((low < high).all())
    ((342,), True)
    """
    level, x = float(checked_levels("level", level, "level=0.9")), checks.check_inputs(x)
    rows, (codes, labels) = row_count(x), checks.text_labels(y)
    checked = checks.check_targets(codes, rows)
    # The fits see text as it is, so that their predictions have its labels.
    y = checked if labels is None else np.asarray(y)
    good = isinstance(folds, int | np.integer) and not isinstance(folds, bool) and 2 <= folds <= rows
    InputError.check(good, "folds", f"a whole number from 2 to {rows}, the rows", repr(folds), "folds=5")
    check_known("rule", [rule], RULES)
    fits = callable(getattr(method, "fit", None)) and not isinstance(method, type)
    InputError.check(fits, "method", "a method", repr(method), "bnn.Laplace()")
    if score is not None:
        check_known("score", [score], (*NUMBERS, *CLASSES))
    _check_settings(score, randomise, penalty)
    expected, advice = "the penalty of 'raps', which no rows could choose here", "penalty=(0.01, 3)"
    InputError.check(score != "raps" or penalty is not None, "penalty", expected, "None", advice)
    of_row, uniform = np.empty(rows, dtype=int), _uniform(randomise, 0, rows)
    of_row[np.random.default_rng(seed).permutation(rows)] = np.arange(rows) % folds
    if labels is not None:
        _check_folds(checked, of_row, labels)
    posteriors, parts, chosen = [], [], ""
    for fold in range(folds):
        held = of_row == fold
        seen, unseen = (map_data(lambda a, rows=rows: np.asarray(a)[rows], x) for rows in (~held, held))
        posterior = _of_fold(method, fold).fit(model, seen, y[~held], seed=seed, **keywords)
        prediction = posterior.predict(unseen)
        if fold == 0:
            chosen = _checked_score(prediction, score, randomise, penalty)
            if prediction.is_classes:
                _check_folds(checked, of_row, labels)
        known = None if uniform is None else uniform[held]
        parts.append(_values(prediction, y[held], chosen, level, known, penalty))
        posteriors.append(posterior)
    values = np.empty((rows, *parts[0].shape[1:]))
    for fold, part in enumerate(parts):
        values[of_row == fold] = part
    return CrossConformal(tuple(posteriors), of_row, values, level, chosen, rule, randomise, penalty)


def _of_fold(method: Any, fold: int) -> Any:
    """The method with a checkpoint of its own for a fold."""
    checkpoint = getattr(method, "checkpoint", None)
    return method if checkpoint is None else replace(method, checkpoint=Path(checkpoint) / f"fold{fold}")


def _check_folds(codes: np.ndarray, of_row: np.ndarray, labels: tuple[str, ...] | None) -> None:
    """Check that each class has rows in at least two folds, so that all fits have all classes."""
    for code in np.unique(codes):
        name = f"{code:g}" if labels is None else repr(labels[code])
        expected, got = "rows of each class in at least two folds", f"those of class {name} in one"
        advice = "more folds, another seed, or merging classes"
        InputError.check(len(np.unique(of_row[codes == code])) > 1, "y", expected, got, advice)


# --- scores -------------------------------------------------------------------------------------------------


def _checked_score(
    prediction: Prediction, score: str | None, randomise: int | None, penalty: tuple[float, int] | None
) -> str:
    """The name of the score, checked with its settings."""
    known = CLASSES if prediction.is_classes else NUMBERS
    score = score or ("lac" if prediction.is_classes else "normalised")
    check_known("score", [score], known)
    _check_settings(score, randomise, penalty)
    return score


def _check_settings(score: str | None, randomise: int | None, penalty: tuple[float, int] | None) -> None:
    """Check that the score takes the settings."""
    possible, expected = randomise is None or score in RANDOMISED, "score='aps' or 'raps' to randomise"
    InputError.check(possible, "randomise", expected, repr(score), "randomise=None")
    possible = penalty is None or score == "raps"
    InputError.check(possible, "penalty", "score='raps'", repr(score), "penalty=None")
    if penalty is not None:
        numbers = np.shape(penalty) == (2,) and np.asarray(penalty).dtype.kind in "iuf"
        good = numbers and 0.0 <= penalty[0] < math.inf and penalty[1] >= 0 and penalty[1] == int(penalty[1])
        expected = "two numbers, of at least 0: a finite penalty and a whole rank"
        InputError.check(good, "penalty", expected, repr(penalty), "penalty=(0.01, 3)")


def _check_interval(score: str) -> None:
    if score in CLASSES:
        raise UnsupportedError.of("interval", "numbers", f"classes ({score})", "sets(x)")


def _check_sets(score: str) -> None:
    if score not in CLASSES:
        raise UnsupportedError.of("sets", "classes", f"numbers ({score})", "interval(x)")


def _rank(level: float, rows: int) -> int:
    """k = ceil((n + 1) level), which may be n + 1."""
    # The decimal as written: 0.07 is not exactly 7 / 100 in binary, and 100 * 0.07 rounds to more than 7.
    return math.ceil(Fraction(str(level)) * (rows + 1))


def _threshold(values: np.ndarray, rank: int) -> float | np.ndarray:
    """The smallest score of a rank, for each output; infinite beyond the last."""
    found = np.sort(values, axis=0)[rank - 1] if rank <= len(values) else np.full(values.shape[1:], np.inf)
    return found if np.ndim(found) else float(found)


def _uncrossed(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of intervals, both at the mid-point where they have crossed."""
    crossed = lower > upper
    # Only ends that have crossed are averaged: the others may be infinite.
    middle = 0.5 * (np.where(crossed, lower, 0.0) + np.where(crossed, upper, 0.0))
    return np.where(crossed, middle, lower), np.where(crossed, middle, upper)


def _values(
    prediction: Prediction,
    y: Any,
    score: str,
    level: float,
    uniform: np.ndarray | None,
    penalty: tuple[float, int] | None,
) -> np.ndarray:
    """The scores of the rows with their targets, (n,) or (n, outputs)."""
    if prediction.is_classes:
        labels = checked_labels(prediction, y)
        return _scores_of_classes(prediction, score, uniform, penalty)[np.arange(prediction.rows), labels]
    lower, upper, unit = _ends(prediction, score, level)
    y = prediction.observed_values(y)
    return np.maximum(lower - y, y - upper) / unit


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


def _chosen_penalty(
    prediction: Prediction, labels: np.ndarray, level: float, randomise: int | None
) -> tuple[float, int]:
    """The penalty and the rank of "raps" that give these rows the smallest sets."""
    rank, rows = _rank(level, prediction.rows), prediction.rows
    expected = f"enough held-out rows to choose a penalty at a level of {level:g}"
    got = f"{rows} of them, every {CHOOSING}th"
    InputError.check(rank <= rows, "penalty", expected, got, "more rows, or penalty=(0.01, 3)")
    uniform, each = _uniform(randomise, 2, rows), np.arange(rows)
    order = np.argsort(-prediction.probabilities, axis=1, kind="stable")
    highest = int(np.sort(1 + np.argmax(order == labels[:, None], axis=1))[rank - 1])

    def size(penalty: float) -> float:
        scores = _scores_of_classes(prediction, "raps", uniform, (penalty, highest))
        return float(np.mean(scores <= _threshold(scores[each, labels], rank)))

    return min(PENALTIES, key=size), highest


def _scores_of_classes(
    prediction: Prediction, score: str, uniform: np.ndarray | None, penalty: tuple[float, int] | None
) -> np.ndarray:
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
    if penalty is not None:
        upto += penalty[0] * np.maximum(0.0, np.arange(1.0, 1.0 + ordered.shape[1]) - penalty[1])
    values = np.empty_like(upto)
    np.put_along_axis(values, order, upto, axis=1)
    return values
