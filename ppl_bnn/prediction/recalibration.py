"""Recalibration: corrections of a prediction by held-out rows.

With F_n the predictive distribution function of row n, P_snc its probability of class c in draw s, and (x_n, y_n)
held out:

temperature (classes)
    P_snc is replaced by P_snc^(1/T) / sum_k P_snk^(1/T) (Guo, Pleiss, Sun and Weinberger 2017, ICML).
spread (numbers)
    y is replaced by m_n + c (y - m_n), m_n the mean: F_n(m_n + (y - m_n) / c), one c per output.
isotonic (one continuous number per row)
    F_n is replaced by R(F_n), R the distribution function of u_n = F_n(y_n) (Kuleshov, Fenner and Ermon 2018, ICML).

T and c maximise the likelihood of the held-out rows. The corrections are common to all rows, so a row that is too
certain relative to another remains so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import scipy

from ppl_bnn.core import checks
from ppl_bnn.core.arrays import row_count
from ppl_bnn.core.errors import InputError, UnsupportedError, check_known
from ppl_bnn.prediction.arguments import checked_targets
from ppl_bnn.prediction.families import FAMILIES_WITH_UNITS
from ppl_bnn.prediction.isotonic import STRAIGHT, MappedPrediction, tails
from ppl_bnn.prediction.prediction import Prediction

KINDS = ("temperature", "spread", "isotonic")
# Range of the search for temperatures and factors: from one thousandth to a thousand.
WIDEST = 1e3


@dataclass(frozen=True, eq=False)
class Recalibrated:
    """A posterior with a correction of its predictions. Build one with `bnn.recalibrate`.

    Parameters
    ----------
    source
        The posterior, or None if it was built from a prediction.
    kind : {"temperature", "spread", "isotonic"}
        The correction.
    value : float or ndarray
        The temperature T; the factors c, (K,) or (1,); or the knots of R, (3, M), as in `MappedPrediction`.
    rows : int
        Number of held-out rows.
    pooled : bool, default False
        Whether the mixture's probabilities are tempered.
    keywords : mapping
        Arguments of `predict`.
    """

    source: Any
    kind: str
    value: float | np.ndarray
    rows: int
    pooled: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        what = "isotonic map"
        if self.kind != "isotonic":
            value = ", ".join(f"{each:.4g}" for each in np.ravel(self.value))
            what = f"{'temperature' if self.kind == 'temperature' else 'spread times'} {value}"
        return f"Recalibrated({self.source!r}: {what}, by {self.rows} rows)"

    def predict(self, x: Any, **keywords: Any) -> Prediction:
        """The corrected prediction.

        An isotonic correction gives a `ppl_bnn.prediction.isotonic.MappedPrediction`, which has quantiles, CRPS and
        draws, but neither a density nor a split of the uncertainty.

        Parameters
        ----------
        x
            Inputs, or a `Prediction` to correct.
        **keywords
            Arguments of `source.predict`, which override the stored ones.

        Returns
        -------
        Prediction
            The corrected prediction.
        """
        prediction = predicted(self.source, x, {**self.keywords, **keywords})
        value = np.asarray(self.value)
        if self.kind == "temperature":
            return tempered(prediction, float(value), self.pooled)
        return (spread if self.kind == "spread" else mapped)(prediction, value)


def recalibrate(
    source: Any, x: Any, y: Any, kind: str | None = None, *, pooled: bool = False, **keywords: Any
) -> Recalibrated:
    """Correct the predictions of `source` by held-out rows x and y.

    Parameters
    ----------
    source : Posterior or Prediction
        A posterior, or anything with ``predict(x) -> Prediction``. Or the `Prediction` of the held-out rows itself,
        with x = None; `predict` then takes predictions.
    x, y : array_like
        Held-out rows, from the same distribution as the rows to be predicted later.
    kind : {"temperature", "isotonic", "spread"}, optional
        "temperature", the default for classes: one number, by maximum likelihood.

        "isotonic", the default for one continuous number per row: the whole distribution function. A new row,
        exchangeable with those held out, is below the quantile i / (n + 1) with exactly that probability, i = 1..n.

        "spread": one number per output, by maximum likelihood. Mean, density, draws and the proportion of both kinds of
        uncertainty are kept. For the location-scale families except Weibull.
    pooled : bool, default False
        Temper the mixture's probabilities instead of those of each draw. The most probable class then never changes,
        and the result has one component, so its epistemic part is not known.
    **keywords
        Arguments of `source.predict`, now and later: draws=, seed= and so on.

    Returns
    -------
    Recalibrated
        The posterior with the correction.

    Raises
    ------
    InputError
        For the rows of the fit itself; if the likelihood has no maximum (for example if every held-out row is right);
        or for a held-out row to which the prediction gives no probability.
    UnsupportedError
        For a kind that the prediction does not support.
    UnknownNameError
        For an unknown kind.

    References
    ----------
    Rahaman and Thiery 2021, NeurIPS (pooled).

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("diabetes"), bnn.zoo.load("linear_regression")
    >>> posterior = bnn.fit(model, table.x[:300], table.y[:300], bnn.MAP(), standardise=True)
    >>> corrected = bnn.recalibrate(posterior, table.x[300:400], table.y[300:400], "spread")
    >>> corrected.kind, corrected.predict(table.x[400:]).std.shape
    ('spread', (42,))
    """
    prediction = held_out_prediction("recalibrate", source, x, y, keywords)
    kind = kind or ("temperature" if prediction.is_classes else "isotonic")
    check_known("kind of recalibration", [kind], KINDS)
    possible = kind == "temperature" or not pooled
    InputError.check(possible, "pooled", "kind='temperature' to pool draws", repr(kind), "pooled=False")
    estimate = {"temperature": partial(_temperature, pooled), "spread": _factors, "isotonic": _knots}[kind]
    kept = None if isinstance(source, Prediction) else source
    return Recalibrated(kept, kind, estimate(prediction, y), prediction.rows, pooled, keywords)


# --- the corrections ----------------------------------------------------------------------------------------


def tempered(prediction: Prediction, temperature: float, pooled: bool = False) -> Prediction:
    """Class probabilities to the power 1 / temperature, normalised; those of the mixture if `pooled`, else of draws."""
    if not prediction.is_classes:
        raise _unsupported("temperature", "classes", prediction, "kind='spread' or 'isotonic'")
    good, got = pooled or prediction.epistemic_within is None, "averages of them (epistemic_within)"
    expected = "draws of the class probabilities for a temperature"
    UnsupportedError.check(good, "", expected, got, "pooled=True")
    probabilities = prediction.mean[None] if pooled else prediction.parameters["probs"]
    with np.errstate(divide="ignore"):  # 0 stays 0
        log = np.log(probabilities) / temperature
        if prediction.family == "Bernoulli":
            other = np.log1p(-probabilities) / temperature
            probabilities = np.exp(log - np.logaddexp(log, other))
        else:
            probabilities = scipy.special.softmax(log, axis=-1)
    if not pooled:
        return replace(prediction, parameters={"probs": probabilities})
    return Prediction(prediction.family, {"probs": probabilities}, class_names=prediction.class_names)


def spread(prediction: Prediction, factors: np.ndarray) -> Prediction:
    """The prediction of m + c (y - m), m the mean of each row, c of shape (1,) or (K,)."""
    if prediction.family not in FAMILIES_WITH_UNITS or isinstance(prediction, MappedPrediction):
        known = ", ".join(FAMILIES_WITH_UNITS)
        raise _unsupported("spread", known, prediction, "'isotonic' or 'temperature'")
    factors = factors if len(prediction.shape) == 2 else factors[0]
    centre = prediction.mean[:, None] if prediction.family == "NormalMixture" else prediction.mean
    return prediction.scaled(centre + factors * (prediction.parameters["loc"] - centre), factors)


def mapped(prediction: Prediction, knots: np.ndarray) -> MappedPrediction:
    """The prediction with the distribution function R(F), R linear between the knots (3, M)."""
    if isinstance(prediction, MappedPrediction):
        raise _unsupported("isotonic", "a mixture that was not mapped", prediction, "recalibrating once")
    parts = (prediction.family, prediction.parameters, prediction.log_weights, prediction.epistemic_within)
    return MappedPrediction(*parts, censored=prediction.censored, knots=knots)


# --- estimation from held-out rows ----------------------------------------------------------------------------


def held_out_prediction(what: str, source: Any, x: Any, y: Any, keywords: Mapping[str, Any]) -> Prediction:
    """The prediction of the held-out rows given to `recalibrate` or `conformal` (`what`)."""
    if isinstance(source, Prediction):
        InputError.check(x is None, what, "x=None beside a prediction", type(x).__name__, "x=None")
        return predicted(None, source, keywords)
    if not callable(getattr(source, "predict", None)):
        raise InputError.of(what, "a posterior or a prediction", type(source).__name__, "bnn.fit(...)")
    x = checks.check_inputs(x)
    y = checks.check_targets(y, row_count(x))
    fitted = source
    while not hasattr(fitted, "info") and hasattr(fitted, "source"):
        fitted = fitted.source
    if hasattr(fitted, "info") and checks.data_hash(x, y) == fitted.info.data_hash:
        raise InputError.of(what, "rows that the fit has not seen", "those of the fit", "held-out rows")
    return predicted(source, x, keywords)


def predicted(source: Any, x: Any, keywords: Mapping[str, Any]) -> Prediction:
    """x itself if it is a prediction, else the prediction of `source`, a posterior or None, at x."""
    if isinstance(x, Prediction):
        if keywords:
            raise InputError.of("", "no arguments beside a prediction", ", ".join(keywords), "omitting them")
        return x
    if source is None:
        expected = "a prediction, as it was made from one without a posterior"
        raise InputError.of("", expected, type(x).__name__, "predict(posterior.predict(x))")
    return source.predict(x, **keywords)


def _temperature(pooled: bool, prediction: Prediction, y: Any) -> float:
    if prediction.is_classes:
        impossible = np.count_nonzero(prediction.log_prob(y) == -np.inf)
        got = f"none for {impossible} of {prediction.rows}"
        InputError.check(not impossible, "", "some probability for each held-out label", got, "more draws")
    return _most_likely("temperature", lambda t: float(tempered(prediction, t, pooled).log_prob(y).mean()))


def _factors(prediction: Prediction, y: Any) -> np.ndarray:
    """One factor per output, (1,) or (K,)."""
    outputs = prediction.shape[1] if len(prediction.shape) == 2 else 1
    spread(prediction, np.ones(outputs))  # raises if it is not defined
    values, parts = checked_targets(prediction, y), [(prediction, slice(None))]
    if len(prediction.shape) == 2:
        marginal = prediction.marginals()
        parts = [(marginal.take(slice(k, None, outputs)), (slice(None), k)) for k in range(outputs)]

    def log_score(part: Prediction, of_output: Any, factor: float) -> float:
        return float(spread(part, np.array([factor])).log_prob(values[of_output]).mean())

    return np.array([_most_likely("factor of the spread", partial(log_score, *each)) for each in parts])


def _knots(prediction: Prediction, y: Any) -> np.ndarray:
    """Knots of R: i / (n + 1) at the i-th smallest F_n(y_n). Rows with equal values share the mean of their ranks."""
    if prediction.is_classes or prediction.is_counts:
        advice = "kind='temperature'" if prediction.is_classes else "conformal intervals, which counts have"
        raise _unsupported("isotonic", "continuous numbers", prediction, advice)
    mapped(prediction, STRAIGHT)  # raises if it is not defined
    below, above = tails(prediction, prediction.observed_values(y))
    lost = np.count_nonzero((below <= 0.0) | (above <= 0.0))
    expected = "held-out targets that the distribution function can tell from infinity"
    got = f"{lost} of {len(below)} where it is exactly 0 or 1"
    InputError.check(not lost, "", expected, got, "kind='spread' first")
    _, first, count = np.unique(np.log(below) - np.log(above), return_index=True, return_counts=True)
    ranks = np.cumsum(count) - 0.5 * (count - 1)
    inside = np.stack([below[first], above[first], ranks / (len(below) + 1)])
    return np.concatenate([STRAIGHT[:, :1], inside, STRAIGHT[:, 1:]], axis=1)


def _most_likely(what: str, log_score: Callable[[float], float]) -> float:
    """The argument between 1 / WIDEST and WIDEST of the highest log score: on a grid, then between its neighbours."""
    grid = np.linspace(-math.log(WIDEST), math.log(WIDEST), 41)
    values = np.array([log_score(math.exp(at)) for at in grid])
    best = int(np.argmax(values))
    if best in (0, len(grid) - 1) or values[best] in (values[0], values[-1]):
        expected = f"a {what} between {1.0 / WIDEST:g} and {WIDEST:g} that makes the rows most likely"
        got = f"a likelihood that still rises, or is level, at {math.exp(grid[best]):g}"
        raise InputError.of("", expected, got, "more held-out rows, some right and some wrong")
    bounds, options = (grid[best - 1], grid[best + 1]), {"xatol": 1e-8}
    found: Any = scipy.optimize.minimize_scalar(
        lambda at: -log_score(math.exp(at)), bounds=bounds, method="bounded", options=options
    )
    return math.exp(found.x)


def _unsupported(kind: str, expected: str, prediction: Prediction, advice: str) -> UnsupportedError:
    return UnsupportedError.of(f"kind={kind!r}", expected, repr(prediction), advice)
