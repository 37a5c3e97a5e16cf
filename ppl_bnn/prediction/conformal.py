"""Split-conformal prediction: intervals and sets of a guaranteed coverage, on top of any posterior.

A score s(x, y) says how strange y is under the prediction at x. With s_1..s_n of n rows that the fit has not seen,

    q = the k-th smallest of them, k = ceil((n + 1) level),        C(x) = {y : s(x, y) <= q}.

If these rows and a new one are exchangeable (independent draws of one distribution, say), then, whatever the model, the
method and the true distribution are (Vovk, Gammerman and Shafer 2005; Lei et al. 2018, JASA 113, 1094-1111),

    level <= k / (n + 1) <= P(y in C(x)),      with equality on the right where scores have no ties.

That is a probability over the held-out rows and the new one together. With the held-out rows at hand the coverage is
a number drawn from Beta(k, n + 1 - k), and it is that of all rows, not of each kind of row: where the model is wrong a
part of them may be covered less and another more. A row that drifts away from those held out is covered by no theorem.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from ppl_bnn.core.errors import InputError, UnsupportedError, message, unknown_name
from ppl_bnn.prediction.arguments import checked_y
from ppl_bnn.prediction.prediction import Prediction
from ppl_bnn.prediction.recalibration import held_out_prediction, predicted

NUMBERS = ("absolute", "normalised", "quantile")
CLASSES = ("lac", "aps")


@dataclass(frozen=True, eq=False)
class Conformal:
    """A posterior with intervals or sets of guaranteed coverage. Build one with `bnn.conformal`.

    level, score: as given. threshold: q, a number, or one per output (K,); infinite where there were too few rows.
    rows: n, how many were held out. randomise: the seed of "aps", as given. keywords: what `predict` was given.
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
        """(lower, upper) at inputs x, or of a `Prediction` x, each (N,) or (N, K), units of y; its ends belong to it.

        Each output has the coverage by itself. For "quantile" the ends may cross where the prediction was much too
        wide; both are then the point in their middle, which can only add to the coverage.

        Raises UnsupportedError for classes.
        """
        if self.score in CLASSES:
            raise UnsupportedError("interval: " + message("numbers", f"classes ({self.score})", "sets(x)"))
        prediction = predicted(self.source, x, self.keywords)
        prediction._need_numbers("an interval")
        lower, upper, unit = _ends(prediction, self.score, self.level)
        lower, upper = lower - self.threshold * unit, upper + self.threshold * unit
        crossed = lower > upper
        middle = np.where(crossed, 0.5 * (np.where(crossed, lower, 0.0) + np.where(crossed, upper, 0.0)), 0.0)
        return np.where(crossed, middle, lower), np.where(crossed, middle, upper)

    def sets(self, x: Any) -> np.ndarray:
        """Which classes are in the set of each row, at inputs x or of a `Prediction` x: (N, C) of booleans.

        A set may be empty: no class is as usual there as `level` of the labels that were held out. With `randomise` a
        row's set depends on its place among the rows, too.

        Raises UnsupportedError for numbers.
        """
        if self.score not in CLASSES:
            raise UnsupportedError("sets: " + message("classes", f"numbers ({self.score})", "interval(x)"))
        prediction = predicted(self.source, x, self.keywords)
        return (
            _strangeness(prediction, self.score, _uniform(self.randomise, 1, prediction.rows))
            <= self.threshold
        )


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
    source
        A posterior, or anything with `predict(x) -> Prediction` (a `Recalibrated` by other rows, say); or the
        `Prediction` of the held-out rows itself, with x = None, and then `interval` and `sets` take predictions.
    x, y
        Rows that the fit has not seen, exchangeable with those to come. At least level / (1 - level) of them.
    score
        Numbers, m the mean, d the standard deviation, [a, b] the central interval of probability `level`:
        "absolute", |y - m|: intervals of one width. "normalised", |y - m| / d, the default: m -+ q d (Lei et al. 2018).
        "quantile", max(a - y, y - b): [a - q, b + q] (Romano, Patterson and Candes 2019, NeurIPS).
        Classes: "lac", 1 - P_y, the default: the smallest sets on average (Sadinle, Lei and Wasserman 2019, JASA 114).
        "aps", the probability of all classes down to y in the order of theirs: larger sets where the prediction is
        unsure (Romano, Sesia and Candes 2020, NeurIPS).
    randomise
        For "aps", a seed: of P_y, the last of these probabilities, a random part is taken, as the source does. Without
        it every least probable class has the score 1, such ties make the coverage larger than promised, and the sets
        with it.
    keywords
        Of `source.predict`, now and later: draws=, kind=, seed=.

    Where n < level / (1 - level) no finite interval has the guarantee: it is then all numbers, or all classes, and a
    UserWarning says so.

    Raises
    ------
    InputError: the rows of the fit itself, a level outside (0, 1). UnknownNameError: another score. UnsupportedError: a
    score that the prediction does not have, rows that were censored.
    """
    if not 0.0 < float(level) < 1.0:
        raise InputError("level: " + message("a number strictly between 0 and 1", repr(level), "level=0.9"))
    prediction = held_out_prediction("conformal", source, x, y, keywords)
    known = CLASSES if prediction.is_classes else NUMBERS
    score = score or ("lac" if prediction.is_classes else "normalised")
    if score not in known:
        raise unknown_name("score", score, known)
    if randomise is not None and score != "aps":
        raise InputError("randomise: " + message("score='aps' to randomise", repr(score), "randomise=None"))
    if prediction.is_classes:
        labels = checked_y(prediction, y)
        each = _strangeness(prediction, score, _uniform(randomise, 0, prediction.rows))
        values = each[np.arange(prediction.rows), labels]
    else:
        lower, upper, unit = _ends(prediction, score, level)
        y = prediction.observed_values(y)
        values = np.maximum(lower - y, y - upper) / unit
    # As written: 0.07 is not quite 7 / 100 in binary, and 100 * 0.07 rounds to more than 7.
    k = math.ceil(Fraction(str(float(level))) * (prediction.rows + 1))
    if k > prediction.rows:
        enough = math.ceil(Fraction(str(float(level))) / (1 - Fraction(str(float(level)))))
        warnings.warn(
            f"conformal: a level of {level:g} needs {enough} held-out rows, and there are {prediction.rows}: "
            f"{'every class is in each set' if prediction.is_classes else 'all intervals are infinite'}",
            UserWarning,
            stacklevel=2,
        )
        threshold = np.full(values.shape[1:], np.inf)
    else:
        threshold = np.sort(values, axis=0)[k - 1]
    return Conformal(
        None if isinstance(source, Prediction) else source,
        float(level),
        score,
        threshold if np.ndim(threshold) else float(threshold),
        prediction.rows,
        randomise,
        keywords,
    )


def _ends(prediction: Prediction, score: str, level: float) -> tuple[np.ndarray, np.ndarray, Any]:
    """What is widened: lower and upper end, and the unit that q is in."""
    if score == "quantile":
        return (*prediction.interval(level), 1.0)
    mean = prediction.mean
    if score == "absolute":
        return mean, mean, 1.0
    if not np.isfinite(prediction.std).all():
        raise UnsupportedError(
            message(
                "a finite standard deviation for score='normalised'",
                f"{np.count_nonzero(~np.isfinite(prediction.std))} values without",
                "score='quantile'",
            )
        )
    return mean, mean, prediction.std


def _uniform(seed: int | None, part: int, rows: int) -> np.ndarray | None:
    """Random numbers of held-out rows (part 0) and of later ones (part 1), which are independent of each other."""
    return None if seed is None else np.random.default_rng([seed, part]).random(rows)


def _strangeness(prediction: Prediction, score: str, uniform: np.ndarray | None) -> np.ndarray:
    """The score of each class of each row, (N, C)."""
    probabilities = prediction.probabilities
    if score == "lac":
        return 1.0 - probabilities
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ordered = np.take_along_axis(probabilities, order, axis=1)
    upto = np.cumsum(ordered, axis=1)
    upto[:, -1] = 1.0  # so that ties are ties
    if uniform is not None:
        upto -= uniform[:, None] * ordered
    values = np.empty_like(upto)
    np.put_along_axis(values, order, upto, axis=1)
    return values
