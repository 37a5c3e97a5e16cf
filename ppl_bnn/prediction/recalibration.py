"""Recalibration: a prediction corrected by rows that the fit has not seen.

Whatever a posterior got wrong in the same way for all rows, held-out rows can tell. With F_n the predictive
distribution function of row n, P_snc its probability of class c in draw s, and (x_n, y_n) held out:

temperature (classes)
    P_snc is replaced by P_snc^(1/T) / sum_k P_snk^(1/T) (Guo, Pleiss, Sun and Weinberger 2017, ICML).
spread (numbers)
    y is replaced by m_n + c (y - m_n), m_n the mean: F_n(m_n + (y - m_n) / c), one c per output.
isotonic (one continuous number per row)
    F_n is replaced by R(F_n), R the distribution function of u_n = F_n(y_n) (Kuleshov, Fenner and Ermon 2018, ICML).

T and c make the held-out rows most likely. None of it changes what is uncertain where: a row that is too sure beside
another stays so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.arrays import row_count
from ppl_bnn.core.errors import InputError, UnsupportedError, message, unknown_name
from ppl_bnn.prediction.arguments import checked_targets
from ppl_bnn.prediction.isotonic import STRAIGHT, MappedPrediction, tails
from ppl_bnn.prediction.prediction import Prediction

KINDS = ("temperature", "spread", "isotonic")
# Temperatures and factors that are looked at: from one thousandth to a thousand.
WIDEST = 1e3
_WITH_SPREAD = ("Normal", "StudentT", "Laplace", "NormalMixture", "MultivariateNormal")


@dataclass(frozen=True, eq=False)
class Recalibrated:
    """A posterior with a correction of its predictions. Build one with `bnn.recalibrate`.

    kind: "temperature", "spread" or "isotonic". value: the temperature T; the factors c, (K,) of the outputs or (1,);
    or the knots of R, (3, M), as `MappedPrediction` has them. rows: how many chose it. keywords: what `predict` was
    given.
    """

    source: Any
    kind: str
    value: float | np.ndarray
    rows: int
    pooled: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        if self.kind == "temperature":
            what = f"temperature {float(self.value):.4g}"
        elif self.kind == "spread":
            what = f"spread times {', '.join(f'{c:.4g}' for c in np.ravel(self.value))}"
        else:
            what = "isotonic map"
        return f"Recalibrated({self.source!r}: {what}, by {self.rows} rows)"

    def predict(self, x: Any, **keywords: Any) -> Prediction:
        """The corrected prediction at inputs x, or of a `Prediction` x as it is.

        After an isotonic map it has quantiles, CRPS and draws, and neither a density nor the two kinds of uncertainty
        (`ppl_bnn.prediction.isotonic.MappedPrediction`). Pooled probabilities are those of one component.
        """
        prediction = predicted(self.source, x, {**self.keywords, **keywords})
        if self.kind == "temperature":
            return tempered(prediction, float(self.value), self.pooled)
        if self.kind == "spread":
            return spread(prediction, np.asarray(self.value))
        return mapped(prediction, np.asarray(self.value))


def recalibrate(
    source: Any, x: Any, y: Any, kind: str | None = None, *, pooled: bool = False, **keywords: Any
) -> Recalibrated:
    """Correct the predictions of `source` by held-out rows x and y.

    Parameters
    ----------
    source
        A posterior, or anything with `predict(x) -> Prediction`; or the `Prediction` of the held-out rows itself, with
        x = None, and then `predict` takes predictions.
    x, y
        Rows that the fit has not seen, and that were drawn as those will be that it is used for.
    kind
        "temperature", the default for classes: one number, by maximum likelihood. "isotonic", the default for one
        continuous number per row: the whole distribution function, of which a new row, exchangeable with those held
        out, lies below the quantile i / (n + 1) with exactly that probability, for i = 1..n. "spread": one number per
        output, by maximum likelihood; the mean stays, and so do density, draws and both kinds of uncertainty in
        proportion. For the location-scale families but Weibull.
    pooled
        Temper the mixture's probabilities instead of those of each draw (Rahaman and Thiery 2021, NeurIPS). The most
        probable class then never changes, and draws that disagree can be overruled; but of the result it is not known
        what part of it is epistemic.
    keywords
        Of `source.predict`, now and later: draws=, seed= and so on. For another `kind` of a posterior's predictives,
        recalibrate that prediction.

    Raises
    ------
    InputError: the rows of the fit itself; no maximum of the likelihood (every held-out row is right, say); a held-out
    row to which the prediction gives no probability, or which it cannot tell from one infinitely far away.
    UnsupportedError: a kind that the prediction does not have. UnknownNameError: another kind.
    """
    prediction = held_out_prediction("recalibrate", source, x, y, keywords)
    if kind is None:
        kind = "temperature" if prediction.is_classes else "isotonic"
    if kind not in KINDS:
        raise unknown_name("kind of recalibration", kind, KINDS)
    if pooled and kind != "temperature":
        raise InputError("pooled: " + message("kind='temperature' to pool draws", repr(kind), "pooled=False"))
    value: float | np.ndarray
    if kind == "temperature":
        value = _temperature(prediction, y, pooled)
    else:
        value = _factors(prediction, y) if kind == "spread" else _knots(prediction, y)
    kept = None if isinstance(source, Prediction) else source
    return Recalibrated(kept, kind, value, prediction.rows, pooled, keywords)


# --- the corrections ----------------------------------------------------------------------------------------


def tempered(prediction: Prediction, temperature: float, pooled: bool = False) -> Prediction:
    """Class probabilities to the power 1 / temperature, normalised: of each draw, or of the mixture (`pooled`)."""
    if not prediction.is_classes:
        raise _refused("temperature", "classes", prediction, "kind='spread' or 'isotonic'")
    if prediction.epistemic_within is not None and not pooled:
        raise UnsupportedError(
            message(
                "draws of the class probabilities for a temperature of each",
                "components that are averages already (epistemic_within)",
                "pooled=True, or a prediction made of draws",
            )
        )
    probabilities = prediction.mean[None] if pooled else prediction.parameters["probs"]
    with np.errstate(divide="ignore"):  # 0 stays 0
        log = np.log(probabilities) / temperature
        if prediction.family == "Bernoulli":
            other = np.log1p(-probabilities) / temperature
            probabilities = np.exp(log - np.logaddexp(log, other))
        else:
            log -= log.max(axis=-1, keepdims=True)
            probabilities = np.exp(log)
            probabilities /= probabilities.sum(axis=-1, keepdims=True)
    if not pooled:
        return replace(prediction, parameters={"probs": probabilities})
    return Prediction(prediction.family, {"probs": probabilities}, class_names=prediction.class_names)


def spread(prediction: Prediction, factors: np.ndarray) -> Prediction:
    """The prediction of m + c (y - m), m the mean of each row: factors c, (1,) or (K,)."""
    if prediction.family not in _WITH_SPREAD or isinstance(prediction, MappedPrediction):
        raise _refused(
            "spread", ", ".join(_WITH_SPREAD), prediction, "kind='isotonic', or 'temperature' for classes"
        )
    factors = factors if len(prediction.shape) == 2 else factors[0]
    centre, parameters = prediction.mean, dict(prediction.parameters)
    if prediction.family == "NormalMixture":
        centre = centre[:, None]
    parameters["loc"] = centre + factors * (parameters["loc"] - centre)
    if prediction.family == "MultivariateNormal":
        parameters["scale_tril"] = factors[:, None] * parameters["scale_tril"]
    else:
        parameters["scale"] = factors * parameters["scale"]
    within = prediction.epistemic_within
    return replace(
        prediction,
        parameters=parameters,
        epistemic_within=None if within is None else factors**2 * within,
    )


def mapped(prediction: Prediction, knots: np.ndarray) -> MappedPrediction:
    """The prediction with the distribution function R(F), R linear between `knots` (3, M)."""
    if isinstance(prediction, MappedPrediction):
        raise _refused(
            "isotonic", "a mixture that was not mapped", prediction, "recalibrating once, by all rows"
        )
    return MappedPrediction(
        prediction.family,
        prediction.parameters,
        prediction.log_weights,
        prediction.epistemic_within,
        censored=prediction.censored,
        knots=knots,
    )


# --- from held-out rows ---------------------------------------------------------------------------------------


def held_out_prediction(what: str, source: Any, x: Any, y: Any, keywords: Mapping[str, Any]) -> Prediction:
    """The prediction of held-out rows; `source` as in `recalibrate`. InputError for the rows of the fit itself."""
    if isinstance(source, Prediction):
        if x is not None:
            raise InputError(
                f"{what}: "
                + message("x=None beside a prediction", type(x).__name__, f"{what}(prediction, None, y)")
            )
        return predicted(None, source, keywords)
    if not callable(getattr(source, "predict", None)):
        raise InputError(
            f"{what}: "
            + message("a posterior or a prediction", type(source).__name__, "bnn.fit(model, x, y)")
        )
    x = checks.check_inputs(x)
    y = checks.check_targets(y, row_count(x))
    fitted = source
    while not hasattr(fitted, "info") and hasattr(fitted, "source"):
        fitted = fitted.source
    if hasattr(fitted, "info") and checks.data_hash(x, y) == fitted.info.data_hash:
        raise InputError(
            f"{what}: "
            + message("rows that the fit has not seen", "the rows that it was fitted to", "a part held out")
        )
    return predicted(source, x, keywords)


def predicted(source: Any, x: Any, keywords: Mapping[str, Any]) -> Prediction:
    """x itself where it is a prediction, else that of `source` at x."""
    if isinstance(x, Prediction):
        if keywords:
            raise InputError(
                message(
                    "no arguments of predict beside a prediction", ", ".join(keywords), "leaving them out"
                )
            )
        return x
    if source is None:
        raise InputError(
            message(
                "a prediction, as it was made from one without a posterior",
                type(x).__name__,
                "predict(posterior.predict(x))",
            )
        )
    return source.predict(x, **keywords)


def _temperature(prediction: Prediction, y: Any, pooled: bool = False) -> float:
    if prediction.is_classes:
        impossible = np.count_nonzero(prediction.log_prob(y) == -np.inf)
        if impossible:
            raise InputError(
                message(
                    "some probability for each held-out label",
                    f"none for {impossible} of {prediction.rows}",
                    "more draws, or a model that rules nothing out",
                )
            )
    return _most_likely("temperature", lambda t: float(tempered(prediction, t, pooled).log_prob(y).mean()))


def _factors(prediction: Prediction, y: Any) -> np.ndarray:
    spread(prediction, np.ones(prediction.shape[-1] if len(prediction.shape) == 2 else 1))
    y = checked_targets(prediction, y)
    if len(prediction.shape) == 1:
        each = [(prediction, y)]
    else:
        outputs, marginal = prediction.shape[1], prediction._marginals()
        each = [(marginal.take(slice(k, None, outputs)), y[:, k]) for k in range(outputs)]
    return np.array(
        [
            _most_likely(
                "factor of the spread",
                lambda c, one=one, values=values: float(spread(one, np.array([c])).log_prob(values).mean()),
            )
            for one, values in each
        ]
    )


def _knots(prediction: Prediction, y: Any) -> np.ndarray:
    """R is i / (n + 1) at the i-th smallest F_n(y_n); rows with one value share the mean of their ranks."""
    if prediction.is_classes or prediction.is_counts:
        advice = "kind='temperature'" if prediction.is_classes else "conformal intervals, which counts have"
        raise _refused("isotonic", "continuous numbers", prediction, advice)
    mapped(prediction, STRAIGHT)
    below, above = tails(prediction, prediction.observed_values(y))
    lost = np.count_nonzero((below <= 0.0) | (above <= 0.0))
    if lost:
        raise InputError(
            message(
                "held-out targets that the distribution function can tell from infinity",
                f"{lost} of {len(below)} where it is 0 or 1 to all its digits",
                "kind='spread' first: recalibrate(recalibrate(posterior, x, y, 'spread'), x, y, 'isotonic')",
            )
        )
    _, first, count = np.unique(np.log(below) - np.log(above), return_index=True, return_counts=True)
    ranks = np.cumsum(count) - 0.5 * (count - 1)
    inside = np.stack([below[first], above[first], ranks / (len(below) + 1)])
    return np.concatenate([STRAIGHT[:, :1], inside, STRAIGHT[:, 1:]], axis=1)


def _most_likely(what: str, log_score: Callable[[float], float]) -> float:
    """The argument between 1 / WIDEST and WIDEST of the highest log score: on a grid, then within its neighbours."""
    from scipy.optimize import minimize_scalar

    grid = np.linspace(-math.log(WIDEST), math.log(WIDEST), 41)
    values = np.array([log_score(math.exp(at)) for at in grid])
    best = int(np.argmax(values))
    if best in (0, len(grid) - 1) or values[best] in (values[0], values[-1]):
        raise InputError(
            message(
                f"a {what} between {1.0 / WIDEST:g} and {WIDEST:g} that makes the held-out rows most likely",
                f"a likelihood that still rises, or is level, at {math.exp(grid[best]):g}",
                "more held-out rows, of which some are right and some are wrong, or no recalibration",
            )
        )
    found: Any = minimize_scalar(
        lambda at: -log_score(math.exp(at)),
        bounds=(grid[best - 1], grid[best + 1]),
        method="bounded",
        options={"xatol": 1e-8},
    )
    return math.exp(found.x)


def _refused(kind: str, expected: str, prediction: Prediction, advice: str) -> UnsupportedError:
    return UnsupportedError(f"kind={kind!r}: " + message(expected, repr(prediction), advice))
