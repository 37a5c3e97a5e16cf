"""What a prediction is: per row, a weighted mixture over draws of one distribution, in NumPy.

With draws s = 1..S of everything unknown, normalised weights w_s and rows n = 1..N,

    p(y_n) = sum_s w_s p(y_n | theta_sn),

where theta_sn are the parameters of a Normal, StudentT, Laplace, Weibull, NormalMixture, MultivariateNormal, Bernoulli,
Categorical, Poisson or NegativeBinomial distribution. Every number that leaves here belongs to that mixture:
densities are averaged before the logarithm, quantiles invert the mixture's own distribution function, and nothing is
moment-matched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from ppl_bnn.core import checks
from ppl_bnn.core.errors import InputError, UnsupportedError, message, unknown_name
from ppl_bnn.language.distributions import CENSORED, censored_log_prob
from ppl_bnn.prediction import scipy_families as families

# Elements of one (draws, rows) block: small enough to stay in a cache, large enough to hide NumPy's overhead.
BLOCK = 1 << 18
_LOG_2PI = math.log(2.0 * math.pi)


# --- the families: what differs between one distribution and another --------------------------------------


@dataclass(frozen=True)
class _LocationScale:
    """A family y = loc + scale * z, given by the functions of z (and of its shape parameters).

    mean: E z, where z is positive and there is no loc; None where it is 0.
    """

    shapes: tuple[str, ...]
    log_density: Callable[..., np.ndarray]
    distribution: Callable[..., np.ndarray]
    inverse: Callable[..., np.ndarray]
    # E|Z - z|
    absolute_deviation: Callable[..., np.ndarray]
    variance: Callable[..., Any]
    mean: Callable[..., Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.shapes, "loc", "scale") if self.mean is None else (*self.shapes, "scale")


def _normal_distribution(z):
    from scipy.special import ndtr

    return ndtr(z)


def _normal_inverse(q):
    from scipy.special import ndtri

    return ndtri(q)


def _normal_absolute_deviation(z):
    return z * (2.0 * _normal_distribution(z) - 1.0) + 2.0 * np.exp(-0.5 * (z * z + _LOG_2PI))


def _student_log_density(z, df):
    from scipy.special import gammaln

    constant = gammaln(0.5 * (df + 1.0)) - gammaln(0.5 * df) - 0.5 * np.log(df * np.pi)
    return constant - 0.5 * (df + 1.0) * np.log1p(z * z / df)


def _student_distribution(z, df):
    from scipy.special import stdtr

    return stdtr(df, z)


def _student_inverse(q, df):
    from scipy.special import stdtrit

    return stdtrit(df, q)


def _student_absolute_deviation(z, df):
    density = np.exp(_student_log_density(z, df))
    return z * (2.0 * _student_distribution(z, df) - 1.0) + 2.0 * density * (df + z * z) / (df - 1.0)


def _student_variance(df):
    finite = df > 2.0
    return np.where(finite, df / np.where(finite, df - 2.0, 1.0), np.inf)


def _laplace_distribution(z):
    half = 0.5 * np.exp(-np.abs(z))
    return np.where(z < 0.0, half, 1.0 - half)


def _laplace_inverse(q):
    return np.where(q < 0.5, np.log(2.0 * q), -np.log(2.0 * (1.0 - q)))


def _weibull_log_density(z, k):
    positive = z > 0.0
    log_z = np.log(np.where(positive, z, 1.0))
    with np.errstate(over="ignore"):
        return np.where(positive, np.log(k) + (k - 1.0) * log_z - np.exp(k * log_z), -np.inf)


def _weibull_exponent(z, k):
    """z^k, 0 for z below 0."""
    with np.errstate(over="ignore", under="ignore"):
        return np.maximum(z, 0.0) ** k


def _weibull_mean(k):
    from scipy.special import gamma

    return gamma(1.0 + 1.0 / k)


def _weibull_variance(k):
    from scipy.special import gammaln

    second = gammaln(1.0 + 2.0 / k)
    with np.errstate(over="ignore"):
        return np.exp(second) * -np.expm1(2.0 * gammaln(1.0 + 1.0 / k) - second)


def _weibull_absolute_deviation(z, k):
    from scipy.special import gammainc

    mean, u = _weibull_mean(k), _weibull_exponent(z, k)
    # E[Z; Z <= z] = E[Z] times an incomplete gamma function.
    inside = np.maximum(z, 0.0) * (1.0 - 2.0 * np.exp(-u)) + mean * (1.0 - 2.0 * gammainc(1.0 + 1.0 / k, u))
    return np.where(z < 0.0, mean - z, inside)


_LOCATION_SCALE = {
    "Normal": _LocationScale(
        (),
        lambda z: -0.5 * (z * z + _LOG_2PI),
        _normal_distribution,
        _normal_inverse,
        _normal_absolute_deviation,
        lambda: 1.0,
    ),
    "StudentT": _LocationScale(
        ("df",),
        _student_log_density,
        _student_distribution,
        _student_inverse,
        _student_absolute_deviation,
        _student_variance,
    ),
    "Laplace": _LocationScale(
        (),
        lambda z: -np.abs(z) - math.log(2.0),
        _laplace_distribution,
        _laplace_inverse,
        lambda z: np.abs(z) + np.exp(-np.abs(z)),
        lambda: 2.0,
    ),
    "Weibull": _LocationScale(
        ("concentration",),
        _weibull_log_density,
        lambda z, k: -np.expm1(-_weibull_exponent(z, k)),
        lambda q, k: (-np.log1p(-q)) ** (1.0 / k),
        _weibull_absolute_deviation,
        _weibull_variance,
        _weibull_mean,
    ),
}
_PARAMETERS = {
    **{name: family.names for name, family in _LOCATION_SCALE.items()},
    "Bernoulli": ("probs",),
    "Categorical": ("probs",),
    "Poisson": ("rate",),
    "NegativeBinomial": ("concentration", "rate"),
    "NormalMixture": ("weights", "loc", "scale"),
    "MultivariateNormal": ("scale_tril", "loc"),
}
_CLASSES = ("Bernoulli", "Categorical")
_COUNTS = ("Poisson", "NegativeBinomial")
# Families whose units can be changed; those of positive numbers have a zero.
_WITH_UNITS = ("Normal", "StudentT", "Laplace", "NormalMixture", "MultivariateNormal")
# What a likelihood of censored rows calls a family.
_OF_CENSORED = {f"Censored{family}": family for family in CENSORED}


# --- the prediction ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prediction:
    """A weighted mixture over S draws (axis 0) of one distribution for each of N rows (axis 1).

    Parameters
    ----------
    family, parameters
        "Normal" (loc, scale), "StudentT" (df, loc, scale), "Laplace" (loc, scale), "Weibull" (concentration, scale),
        "Bernoulli" (probs), "Poisson"
        (rate) or "NegativeBinomial" (concentration, rate), whose rate is the mean, each parameter of shape (S, N);
        "Categorical" (probs) of shape (S, N, C). A location-scale family may have K outputs, shape (S, N, K): they are
        independent given the draw. Those of "MultivariateNormal", loc (S, N, K) and scale_tril (S, N, K, K), have
        the covariance L L'. "NormalMixture" (weights, loc, scale), each (S, N, M), is sum_m w_m N(loc_m, scale_m^2).
    log_weights
        Logarithms of normalised weights, shape (S,) or, for weights that differ between rows, (S, N). None: equal.
    epistemic_within
        The part of a component's own uncertainty that stands for not knowing the function. Numbers (location-scale
        families): of the shape of `loc`, a part of the component's variance; a linearised Gaussian predictive
        N(f, v_f + sigma^2) is one component with epistemic_within = v_f. Classes: of shape (S, N), a part of
        the component's entropy, the mutual information of label and function within it, in nats; a component whose
        probabilities are the mean of a distribution over p has epistemic_within = H(E[p]) - E[H(p)].
    class_names
        Names of the classes, for people; two for Bernoulli.
    labels
        What targets are called where they are not 0..C-1, in the order of the classes: ("no", "yes"), or (1, 2, 3).
        Targets are then given, and drawn, as these.
    censored
        Whether what is seen of a row may be a bound only (Normal, Laplace, Weibull, one number per row). The prediction
        is of the value itself; `log_prob` then takes targets (N, 2), values and events: 1 (observed), 0 (the value is
        larger), -1 (it is smaller). The families "CensoredNormal", "CensoredLaplace" and "CensoredWeibull" are these.

    Units and the two kinds of uncertainty
    --------------------------------------
    For numbers (all but Bernoulli and Categorical), by the law of total variance and in squared units of y,

        epistemic = Var_w(E[y|s]) + E_w[epistemic_within],
        aleatoric = E_w[Var(y|s) - epistemic_within],      variance = epistemic + aleatoric = std^2.

    For classes (Bernoulli, Categorical) the split is one of ENTROPIES, in nats, not of variances:

        entropy = H(E_w[p]),   aleatoric = E_w[H(p) - epistemic_within],   epistemic = entropy - aleatoric,

    the last being the mutual information of the label and the function (Houlsby et al. 2011; Depeweg et al. 2018).
    There `mean` is the probability of class one (Bernoulli) or of each class (Categorical), and `variance` is that of
    the label's indicator, mean (1 - mean).

    Raises InputError for shapes that do not agree (nothing is broadcast), values that are not finite, scales that are
    not positive, probabilities that are none, weights that do not sum to one.
    """

    family: str
    parameters: Mapping[str, np.ndarray]
    log_weights: np.ndarray | None = None
    epistemic_within: np.ndarray | None = None
    class_names: Sequence[str] | None = None
    censored: bool = False
    labels: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.family in _OF_CENSORED:
            object.__setattr__(self, "family", _OF_CENSORED[self.family])
            object.__setattr__(self, "censored", True)
        if self.family not in _PARAMETERS and not families.known(self.family):
            raise unknown_name("family", self.family, (*_PARAMETERS, *families.FAMILIES, *families.VECTORS))
        names = _names(self.family)
        if set(self.parameters) != set(names):
            raise InputError(
                message(
                    f"the parameters {', '.join(names)} for {self.family}",
                    ", ".join(map(str, self.parameters)) or "none",
                    "passing exactly these by name",
                )
            )
        parameters = {name: _frozen_array(name, self.parameters[name]) for name in names}
        _check_parameters(self.family, parameters)
        object.__setattr__(self, "parameters", parameters)
        if self.censored and (self.family not in CENSORED or len(self.shape) != 1):
            raise InputError(
                message(
                    f"one number per row of a family among {', '.join(CENSORED)} where rows may be censored",
                    f"{self.family} of shape {self.shape}",
                    "censored=False",
                )
            )
        if self.log_weights is not None:
            object.__setattr__(self, "log_weights", self._checked_log_weights(self.log_weights))
        if self.epistemic_within is not None:
            object.__setattr__(self, "epistemic_within", self._checked_within(self.epistemic_within))
        if self.class_names is not None:
            object.__setattr__(self, "class_names", self._checked_class_names(self.class_names))
        if self.labels is not None:
            object.__setattr__(self, "labels", tuple(self.labels))
            self._checked_class_names([str(label) for label in self.labels])

    def _checked_log_weights(self, given: Any) -> np.ndarray:
        log_weights = _frozen_array("log_weights", given, finite=False)
        if log_weights.shape not in ((self.draws,), (self.draws, self.rows)):
            raise InputError(
                message(
                    f"log_weights of shape ({self.draws},) or ({self.draws}, {self.rows})",
                    f"shape {log_weights.shape}",
                    "one weight per draw, or one per draw and row",
                )
            )
        if np.isnan(log_weights).any() or (log_weights == np.inf).any():
            raise InputError(
                message("log_weights below infinity", "NaN or +inf", "-inf for a draw without weight")
            )
        total = _log_sum_exp(log_weights)
        if not np.all(np.abs(total) < 1e-5):
            raise InputError(
                message(
                    "normalised log_weights, the logarithm of their sum being 0",
                    f"{float(np.ravel(total)[np.argmax(np.abs(np.ravel(total)))]):.6g}",
                    "subtracting scipy.special.logsumexp(log_weights, axis=0)",
                )
            )
        return log_weights

    def _checked_within(self, given: Any) -> np.ndarray:
        if not self.is_classes and self.family not in _LOCATION_SCALE:
            raise UnsupportedError(
                message(
                    "epistemic_within with a location-scale family or with classes",
                    self.family,
                    "several draws instead: their spread is the epistemic part",
                )
            )
        within = _frozen_array("epistemic_within", given)
        if self.is_classes:
            shape, whole = (self.draws, self.rows), "entropy"
            highest = _entropy(self._component_probabilities())
            advice = "the mutual information of label and function, H(E[p]) - E[H(p)], in nats"
        else:
            shape, whole = self._event_array.shape, "variance"
            highest = self._component_variance()
            advice = "the part of scale**2 that comes from not knowing f, in squared units of y"
        if within.shape != shape:
            raise InputError(
                message(
                    f"epistemic_within of the shape of {'(draws, rows)' if self.is_classes else 'loc'}, {shape}",
                    f"{within.shape}",
                    "np.broadcast_to, if one value is meant for all",
                )
            )
        # A whole that was computed as the sum of the two parts may lose the last digits of the sum.
        if (within < 0.0).any() or (within > highest * (1.0 + 1e-6)).any():
            raise InputError(
                message(
                    f"epistemic_within between 0 and the component's {whole}",
                    f"values from {within.min():.6g} to {within.max():.6g}",
                    advice,
                )
            )
        return within

    def _checked_class_names(self, given: Sequence[str]) -> tuple[str, ...]:
        self._need_classes("class_names")
        names = tuple(str(name) for name in given)
        if len(names) != self.classes:
            raise InputError(message(f"{self.classes} class_names", f"{len(names)}", "one name per class"))
        return names

    # --- shapes ---

    @property
    def _event_array(self) -> np.ndarray:
        """The parameter whose shape is that of the mean of each component."""
        return self.parameters[_names(self.family)[-1]]

    @property
    def draws(self) -> int:
        """S, the number of components."""
        return self._event_array.shape[0]

    @property
    def rows(self) -> int:
        """N, the number of rows."""
        return self._event_array.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the y that is predicted: (N,), or (N, K) for K outputs."""
        one = self.is_classes or self.family == "NormalMixture" or self.family.startswith(families.MIXTURE)
        return (self.rows,) if one else self._event_array.shape[1:]

    @property
    def is_classes(self) -> bool:
        """Whether y is a class label (Bernoulli, Categorical)."""
        return self.family in _CLASSES

    @property
    def is_counts(self) -> bool:
        """Whether y is a count 0, 1, 2, ... (Poisson, NegativeBinomial, Binomial and others of `families`)."""
        return self.family in _COUNTS or (self._by_scipy and families.counts(self.family))

    @property
    def _by_scipy(self) -> bool:
        return self.family not in _PARAMETERS

    def _law(self, rows: slice | None = None) -> families.Law:
        """The distribution of each component, for a family of `families`; of some rows only."""
        parameters = self.parameters
        if rows is not None:
            parameters = {name: value[:, rows] for name, value in parameters.items()}
        return families.law(self.family, parameters)

    @property
    def classes(self) -> int:
        """C, the number of classes; two for Bernoulli."""
        self._need_classes("classes")
        return 2 if self.family == "Bernoulli" else self._event_array.shape[2]

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        censored = ", censored" if self.censored else ""
        return f"Prediction({self.family}, draws={self.draws}, shape={self.shape}{censored})"

    def _need_classes(self, what: str) -> None:
        if not self.is_classes:
            raise UnsupportedError(
                message(
                    f"Bernoulli or Categorical for {what}",
                    self.family,
                    "mean, std, quantile or cdf, which are defined for numbers",
                )
            )

    def _need_numbers(self, what: str) -> None:
        if self.is_classes:
            raise UnsupportedError(
                message(
                    f"a prediction of numbers for {what}: class labels have no order",
                    self.family,
                    "probabilities, entropy or log_prob",
                )
            )

    # --- weights ---

    @cached_property
    def weights(self) -> np.ndarray:
        """Normalised weights, (S,) or (S, N)."""
        if self.log_weights is None:
            return np.full(self.draws, 1.0 / self.draws)
        return np.exp(self.log_weights)

    def _average(self, values: np.ndarray, rows: slice | None = None) -> np.ndarray:
        """sum_s w_s values_s over axis 0; `rows` says which rows `values` (S, n, ...) holds when not all."""
        weights = self.weights
        if weights.ndim == 1:
            if not np.isfinite(values).all():
                # A draw of no weight contributes nothing, whatever its value: 0 * inf would be NaN.
                keep = weights > 0.0
                weights, values = weights[keep], values[keep]
            return np.tensordot(weights, values, axes=1)
        weights = weights if rows is None else weights[:, rows]
        weights = weights.reshape(weights.shape + (1,) * (values.ndim - 2))
        return np.sum(np.where(weights > 0.0, weights * np.where(weights > 0.0, values, 0.0), 0.0), axis=0)

    # --- moments ---

    def component_mean(self) -> np.ndarray:
        """E[y | s] of each component, (S, N) or (S, N, K)."""
        if self.family == "StudentT" and (self.parameters["df"] <= 1.0).any():
            raise UnsupportedError(
                message(
                    "StudentT with more than 1 degree of freedom, without which there is no mean",
                    f"df = {self.parameters['df'].min():.6g}",
                    "quantile(0.5), or a prior that keeps df above 2",
                )
            )
        if self._by_scipy:
            mean = self._law().mean()
            if not np.isfinite(mean).all():
                raise UnsupportedError(
                    message(f"a distribution with a mean, unlike {self.family}", "none", "quantile(0.5)")
                )
            return mean
        if self.family == "NormalMixture":
            return np.sum(self.parameters["weights"] * self.parameters["loc"], axis=-1)
        family = _LOCATION_SCALE.get(self.family)
        if family is not None and family.mean is not None:
            return self.parameters["scale"] * family.mean(*(self.parameters[name] for name in family.shapes))
        return self._event_array if family is None else self.parameters["loc"]

    def _component_variance(self) -> np.ndarray:
        if self.family in _LOCATION_SCALE:
            family = _LOCATION_SCALE[self.family]
            shapes = [self.parameters[name] for name in family.shapes]
            return self.parameters["scale"] ** 2 * family.variance(*shapes)
        if self.family == "NormalMixture":
            weights, loc, scale = (self.parameters[name] for name in ("weights", "loc", "scale"))
            deviation = loc - self.component_mean()[..., None]
            return np.sum(weights * (scale**2 + deviation**2), axis=-1)
        if self.family == "MultivariateNormal":
            return np.sum(self.parameters["scale_tril"] ** 2, axis=-1)
        if self._by_scipy:
            return self._law().variance()
        means = self._event_array
        if self.family == "NegativeBinomial":
            return means * (1.0 + means / self.parameters["concentration"])
        return means if self.family == "Poisson" else means * (1.0 - means)

    @cached_property
    def mean(self) -> np.ndarray:
        """E[y], (N,) or (N, K); P(y = 1) for Bernoulli; class probabilities (N, C) for Categorical."""
        return self._average(self.component_mean())

    @cached_property
    def mean_function_variance(self) -> np.ndarray:
        """Var_w(E[y|s]) + E_w[epistemic_within], the shape of `mean`: how unsure the mean function is.

        For numbers this is `epistemic`; for classes it is the variance over draws of the class probabilities. A
        mutual information within components says nothing about a variance: UnsupportedError.
        """
        if self.is_classes and self.epistemic_within is not None:
            raise UnsupportedError(
                message(
                    "draws of the class probabilities for their variance",
                    "components that are averages already (epistemic_within)",
                    "epistemic, in nats, or a prediction made of draws",
                )
            )
        spread = self._average((self.component_mean() - self.mean) ** 2)
        return spread if self.epistemic_within is None else spread + self._average(self.epistemic_within)

    @cached_property
    def epistemic(self) -> np.ndarray:
        """Numbers: variance of the mean function. Classes: mutual information of label and function, nats, (N,)."""
        if self.is_classes:
            # Rounding can leave -1e-17 where all draws agree; the mutual information is not negative.
            return np.maximum(self.entropy - self.aleatoric, 0.0)
        return self.mean_function_variance

    @cached_property
    def aleatoric(self) -> np.ndarray:
        """Numbers: expected variance of y given the function. Classes: expected entropy, nats, (N,)."""
        if self.is_classes:
            entropy = _entropy(self._component_probabilities())
            if self.epistemic_within is not None:
                entropy = np.maximum(entropy - self.epistemic_within, 0.0)
            return self._average(entropy)
        variance = self._component_variance()
        if self.epistemic_within is not None:
            variance = np.maximum(variance - self.epistemic_within, 0.0)
        return self._average(variance)

    @cached_property
    def variance(self) -> np.ndarray:
        """Var(y) of the mixture, the shape of `mean`, in squared units of y (classes: of the indicators)."""
        if self.is_classes:
            return self.mean * (1.0 - self.mean)
        return self.epistemic + self.aleatoric

    @cached_property
    def std(self) -> np.ndarray:
        """The root of `variance`, in units of y."""
        return np.sqrt(self.variance)

    @cached_property
    def covariance(self) -> np.ndarray:
        """Cov(y_n) between the outputs of each row, (N, K, K), in squared units of y: its diagonal is `variance`."""
        if len(self.shape) != 2:
            raise UnsupportedError(
                message("a prediction of several outputs for their covariance", repr(self), "variance")
            )
        means = self.component_mean()
        deviation = means - self.mean
        between = self._average(deviation[..., :, None] * deviation[..., None, :])
        if self.family == "MultivariateNormal":
            factor = self.parameters["scale_tril"]
            return between + self._average(factor @ np.swapaxes(factor, -1, -2))
        if self.family in families.VECTORS:
            law: Any = self._law()
            return between + self._average(law.covariance())
        return between + self._average(self._component_variance())[..., None] * np.eye(self.shape[1])

    # --- classes ---

    def _component_probabilities(self) -> np.ndarray:
        probs = self.parameters["probs"]
        return probs if self.family == "Categorical" else np.stack([1.0 - probs, probs], axis=-1)

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Class probabilities of the mixture, (N, C); two columns, for 0 and 1, for Bernoulli."""
        self._need_classes("probabilities")
        return np.stack([1.0 - self.mean, self.mean], axis=-1) if self.family == "Bernoulli" else self.mean

    @cached_property
    def entropy(self) -> np.ndarray:
        """-sum_c P_c log P_c of the mixture's class probabilities, nats, (N,): aleatoric + epistemic."""
        self._need_classes("entropy")
        return _entropy(self.probabilities)

    # --- densities ---

    def component_log_prob(self, y: Any) -> np.ndarray:
        """log p(y_n | theta_sn) of each component, (S, N); K outputs are summed. y as in `log_prob`."""
        return self._component_log_prob(self._checked_targets(y), slice(None))

    def log_prob(self, y: Any) -> np.ndarray:
        """log sum_s w_s p(y_n | theta_sn), (N,): the joint density of a row's K outputs.

        y has the shape `shape`: numbers, counts, or labels 0..C-1. Units: log density per unit of y. Where rows may be
        `censored` y is (N, 2), values and events, and a row that is has the log probability that it has, without units.
        Raises InputError for another shape, for values that are not finite, and for labels or counts that are none.
        """
        y = self._checked_targets(y)
        result = np.empty(self.rows)
        for rows in self._row_blocks():
            values = self._component_log_prob(y[rows], rows)
            if self.log_weights is None:
                values -= math.log(self.draws)
            else:
                weights = self.log_weights if self.log_weights.ndim == 2 else self.log_weights[:, None]
                values += weights[:, rows] if weights.shape[1] > 1 else weights
            result[rows] = _log_sum_exp(values)
        return result

    def _component_log_prob(self, y: np.ndarray, rows: slice) -> np.ndarray:
        parameters = {name: value[:, rows] for name, value in self.parameters.items()}
        if self.censored:
            with np.errstate(over="ignore", under="ignore"):
                return censored_log_prob(self.family, parameters, y)
        if self.family in _LOCATION_SCALE:
            family = _LOCATION_SCALE[self.family]
            shapes = [parameters[name] for name in family.shapes]
            values = family.log_density(_standard(parameters, y), *shapes) - np.log(parameters["scale"])
            return values.sum(axis=-1) if values.ndim == 3 else values
        if self._by_scipy:
            values = self._law(rows).log_density(y)
            return values.sum(axis=-1) if values.ndim == 3 else values
        if self.is_counts:
            values = _count_log_mass(self.family, parameters, y)
            return values.sum(axis=-1) if values.ndim == 3 else values
        if self.family == "MultivariateNormal":
            factor = parameters["scale_tril"]
            z = np.linalg.solve(factor, (y - parameters["loc"])[..., None])[..., 0]
            log_diagonal = np.log(np.diagonal(factor, axis1=-2, axis2=-1))
            return -0.5 * np.sum(z * z + _LOG_2PI, axis=-1) - log_diagonal.sum(axis=-1)
        if self.family == "NormalMixture":
            scale = parameters["scale"]
            z = (y[:, None] - parameters["loc"]) / scale
            with np.errstate(divide="ignore"):  # a part may have no weight
                each = np.log(parameters["weights"]) - np.log(scale) - 0.5 * (z * z + _LOG_2PI)
            return _log_sum_exp(np.moveaxis(each, -1, 0))
        probs = parameters["probs"]
        if self.family == "Bernoulli":
            chosen = np.where(y == 1, probs, 1.0 - probs)
        else:
            chosen = probs[:, np.arange(len(y)), y]
        with np.errstate(divide="ignore"):  # a component may well give a label no probability
            return np.log(chosen)

    def _checked_y(self, given: Any, leading: bool = False) -> np.ndarray:
        y = np.asarray(given)
        if self.labels is not None:
            y = checks.label_codes(y, self.labels)
        if y.dtype.kind not in "biuf":
            raise InputError(
                message("y as an array of numbers", f"{y.dtype}", "encoding it as numbers or labels")
            )
        if y.shape != self.shape and not (leading and y.shape[1:] == self.shape):
            raise InputError(
                message(
                    f"y of shape {self.shape}, one {'label' if self.is_classes else 'value'} per row"
                    + (" and output" if len(self.shape) == 2 else ""),
                    f"shape {y.shape}",
                    "y.ravel()"
                    if y.size == math.prod(self.shape)
                    else "the y of the rows that were predicted",
                )
            )
        if not np.isfinite(y).all():
            raise InputError(message("finite y", "NaN or infinity", "removing or imputing these rows"))
        if leading or not (self.is_counts or self.is_classes):
            return y.astype(np.float64, copy=False)
        highest = math.inf if self.is_counts else self.classes - 1
        least = families.least(self.family) if self.is_counts else 0.0
        if (y != np.floor(y)).any() or (y < least).any() or (y > highest).any():
            counts = "counts 0, 1, 2, ..." if least == 0.0 else "whole numbers"
            kind = counts if self.is_counts else f"labels 0..{highest}"
            raise InputError(
                message(
                    f"y of {kind}", f"values from {y.min()} to {y.max()}", "encoding y so that it holds these"
                )
            )
        return y.astype(np.float64 if self.is_counts else np.int64, copy=False)

    def _checked_targets(self, given: Any) -> np.ndarray:
        """y as `log_prob` takes it: values and events (N, 2) where rows may be censored."""
        if not self.censored:
            return self._checked_y(given)
        y = np.asarray(given)
        if y.shape != (self.rows, 2):
            raise InputError(
                message(
                    f"y of shape {(self.rows, 2)}, values and events (1, 0 or -1)",
                    f"shape {y.shape}",
                    "np.column_stack([y, np.ones(len(y))]) where every row was observed",
                )
            )
        self._checked_y(y[:, 0])
        y = y.astype(np.float64, copy=False)
        checks.check_censored(y, positive=self.family == "Weibull")
        return y

    def observed_values(self, y: Any) -> np.ndarray:
        """The values (N,) of targets (N, 2) of which none is censored, where the prediction is `censored`; else y.

        Raises UnsupportedError where some are: what is known of these rows is a bound, and to leave them out would be
        to keep the short times.
        """
        if not self.censored or np.ndim(y) != 2:
            return self._checked_y(y)
        y = self._checked_targets(y)
        bounds = int(np.count_nonzero(y[:, 1] != 1.0))
        if bounds:
            raise UnsupportedError(
                message(
                    "targets that were all observed, for a score of values",
                    f"{bounds} of {len(y)} rows censored",
                    "log_score or concordance_index, which take them",
                )
            )
        return y[:, 0]

    def _row_blocks(self, per_row: int | None = None) -> Iterator[slice]:
        """Slices of rows whose (draws, rows, ...) blocks stay small."""
        size = per_row or self._event_array[:, :1].size
        step = max(1, BLOCK // max(size, 1))
        for start in range(0, self.rows, step):
            yield slice(start, min(start + step, self.rows))

    # --- distribution function and its inverse ---

    def cdf(self, y: Any) -> np.ndarray:
        """F_n(y_n) = sum_s w_s F(y_n | theta_sn), per output, of the shape of y.

        y has the shape `shape`, or one more axis in front for several values per row, as `quantile` gives them.
        Raises UnsupportedError for classes.
        """
        self._need_numbers("cdf")
        y = self._checked_y(y, leading=True)
        marginal = self._marginals()
        values = y.reshape(-1, marginal.rows)
        result = np.empty_like(values)
        for rows in marginal._row_blocks():
            for index in range(len(values)):
                result[index, rows] = marginal._mixture_cdf(values[index, rows], rows)
        return result.reshape(y.shape)

    def _mixture_cdf(self, y: np.ndarray, rows: slice) -> np.ndarray:
        parameters = {name: value[:, rows] for name, value in self.parameters.items()}
        if self._by_scipy:
            values = self._law(rows).distribution(np.floor(y) if self.is_counts else y)
        elif self.is_counts:
            count = np.floor(y)
            below = _count_distribution(self.family, parameters, np.maximum(count, 0.0))
            values = np.where(count < 0, 0.0, below)
        else:
            family = _LOCATION_SCALE[self.family]
            shapes = [parameters[name] for name in family.shapes]
            values = family.distribution(_standard(parameters, y), *shapes)
        return self._average(values, rows)

    def _marginals(self) -> Prediction:
        """The same mixture as one of simple families on N rows, or on N K where there are K outputs: what a marginal
        quantity is computed on. The parts of a NormalMixture are components then, with weights of each row.
        """
        if self.family == "NormalMixture":
            weights = self.weights.reshape(self.draws, -1)[..., None] * self.parameters["weights"]
            arrays = (self.parameters["loc"], self.parameters["scale"], weights)
            loc, scale, weights = (np.moveaxis(array, -1, 1).reshape(-1, self.rows) for array in arrays)
            with np.errstate(divide="ignore"):  # a part may have no weight
                log_weights = np.log(weights)
            return Prediction("Normal", {"loc": loc, "scale": scale}, log_weights - _log_sum_exp(log_weights))
        if self.family == "MultivariateNormal":
            scale = np.sqrt(self._component_variance())
            simple = Prediction("Normal", {"loc": self.parameters["loc"], "scale": scale}, self.log_weights)
            return simple._marginals()
        if len(self.shape) == 1:
            return self
        outputs = self.shape[1]
        log_weights = self.log_weights
        if log_weights is not None and log_weights.ndim == 2:
            log_weights = np.repeat(log_weights, outputs, axis=1)
        family, parameters = self.family, dict(self.parameters)
        if family in families.VECTORS:
            family, parameters = families.marginal(family, parameters)
        return Prediction(
            family, {name: value.reshape(self.draws, -1) for name, value in parameters.items()}, log_weights
        )

    def quantile(self, q: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """The y with F_n(y) = q, per output: shape (N,) or (N, K), with len(q) in front when q is a sequence.

        The mixture's own distribution function is inverted, by bracketing: a quantile of a mixture lies between
        the least and the greatest of its components' quantiles. For counts the smallest integer y with
        F_n(y) >= q. Raises InputError for q outside (0, 1), UnsupportedError for classes.
        """
        self._need_numbers("quantile")
        levels = np.asarray(q, dtype=np.float64)
        if levels.ndim > 1 or levels.size == 0 or not ((levels > 0.0) & (levels < 1.0)).all():
            raise InputError(
                message(
                    "q strictly between 0 and 1, a number or a sequence",
                    f"{q!r}",
                    "for example q=[0.05, 0.95]",
                )
            )
        marginal = self._marginals()
        invert = marginal._integer_quantile if self.is_counts else marginal._continuous_quantile
        result = np.empty((levels.size, marginal.rows))
        for rows in marginal._row_blocks():
            for index, level in enumerate(levels.ravel()):
                result[index, rows] = invert(float(level), rows)
        return result.reshape(levels.shape + self.shape)

    def _component_quantile_range(self, level: float, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """The least and the greatest of the components' quantiles, which enclose the mixture's."""
        if self._by_scipy:
            values = self._law(rows).inverse(level)
            if values.ndim == 3:
                values = np.moveaxis(values, -1, 0).reshape(-1, values.shape[1])
            return values.min(axis=0), values.max(axis=0)
        family = _LOCATION_SCALE[self.family]
        parameters = {name: value[:, rows] for name, value in self.parameters.items()}
        standard = family.inverse(np.float64(level), *(parameters[name] for name in family.shapes))
        values = parameters.get("loc", 0.0) + parameters["scale"] * standard
        return values.min(axis=0), values.max(axis=0)

    def _continuous_quantile(self, level: float, rows: slice) -> np.ndarray:
        low, high = self._component_quantile_range(level, rows)
        target = _normal_inverse(level)

        # On the probit scale a mixture of bells is close to a straight line, so interpolation is fast.
        def excess(y: np.ndarray) -> np.ndarray:
            probability = np.clip(self._mixture_cdf(y, rows), 1e-300, 1.0 - 1e-16)
            return _normal_inverse(probability) - target

        return _bracketed_root(excess, low, high)

    def _integer_quantile(self, level: float, rows: slice) -> np.ndarray:
        if self._by_scipy:
            low, high = self._component_quantile_range(level, rows)
            return self._least_integer(low - 1.0, high, level, rows)
        rate = self.parameters["rate"][:, rows].max(axis=0)
        low = np.full(rate.shape, -1.0)
        spread = np.sqrt(self._component_variance()[:, rows].max(axis=0))
        high = np.ceil(rate + 10.0 * spread + 10.0)
        while (short := self._mixture_cdf(high, rows) < level).any():
            low, high = np.where(short, high, low), np.where(short, 2.0 * high, high)
        return self._least_integer(low, high, level, rows)

    def _least_integer(self, low: np.ndarray, high: np.ndarray, level: float, rows: slice) -> np.ndarray:
        """The least whole number in (low, high] with F(y) >= level, which `high` has and `low` has not."""
        while (high - low > 1.0).any():
            middle = np.floor(0.5 * (low + high))
            enough = self._mixture_cdf(middle, rows) >= level
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return high

    def interval(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper), the central interval of probability `level`: quantiles (1 -+ level) / 2, shape `shape`."""
        if not 0.0 < float(level) < 1.0:
            raise InputError(
                message("a level strictly between 0 and 1", f"{level!r}", "for example level=0.9")
            )
        lower, upper = self.quantile([0.5 * (1.0 - level), 0.5 * (1.0 + level)])
        return lower, upper

    def absolute_deviation(self, y: Any) -> np.ndarray:
        """E|Y_n - y_n| under the mixture, per output, of the shape of y; in units of y.

        y as in `cdf`. Closed forms, for StudentT with df > 1 (Jordan, Krueger and Lerch 2019, Journal of
        Statistical Software 90(12), appendix A). Raises UnsupportedError for classes.
        """
        self._need_numbers("absolute_deviation")
        self.component_mean()
        y = self._checked_y(y, leading=True)
        marginal = self._marginals()
        values = y.reshape(-1, marginal.rows)
        result = np.empty_like(values)
        for rows in marginal._row_blocks():
            for index in range(len(values)):
                deviation = marginal._component_absolute_deviation(values[index, rows], rows)
                result[index, rows] = marginal._average(deviation, rows)
        return result.reshape(y.shape)

    def _component_absolute_deviation(self, y: np.ndarray, rows: slice) -> np.ndarray:
        parameters = {name: value[:, rows] for name, value in self.parameters.items()}
        if self._by_scipy:
            raise UnsupportedError(
                message(
                    "a family with a closed form of E|Y - y|: Normal, StudentT, Laplace, Weibull, Poisson or "
                    "NegativeBinomial",
                    self.family,
                    "log_prob, or draws of y: prediction.sample(n, seed)",
                )
            )
        if self.is_counts:
            rate, count = parameters["rate"], np.floor(np.maximum(y, 0.0))
            mass = np.exp(_count_log_mass(self.family, parameters, count))
            if self.family == "NegativeBinomial":
                # E[Y; Y <= c] = m (F(c) - P(Y = c) (r + c) / r), where it is m (F(c) - P(Y = c)) for Poisson.
                mass = mass * (1.0 + count / parameters["concentration"])
            below = _count_distribution(self.family, parameters, count)
            inside = (y - rate) * (2.0 * below - 1.0) + 2.0 * rate * mass
            return np.where(y < 0.0, rate - y, inside)
        family = _LOCATION_SCALE[self.family]
        shapes = [parameters[name] for name in family.shapes]
        return parameters["scale"] * family.absolute_deviation(_standard(parameters, y), *shapes)

    # --- draws of y ---

    def sample(self, n: int, seed: int | np.random.Generator) -> np.ndarray:
        """n draws of y from the mixture, (n, N) or (n, N, K).

        With weights (S,) one component is chosen per sample for all rows, so that a sample is what one network
        would produce; with weights (S, N) each row chooses its own. Labels are integers.
        """
        if n < 1:
            raise InputError(message("n of at least 1", f"{n}", "the number of samples wanted"))
        if self.labels is not None:
            return np.asarray(self.labels)[replace(self, labels=None).sample(n, seed)]
        rng = np.random.default_rng(seed)
        if self.weights.ndim == 1:
            chosen = rng.choice(self.draws, size=n, p=self.weights / self.weights.sum())
            parameters = {name: value[chosen] for name, value in self.parameters.items()}
        else:
            upto = np.cumsum(self.weights, axis=0)
            position = rng.random((n, self.rows)) * upto[-1]
            chosen = np.stack(
                [np.searchsorted(upto[:, row], position[:, row], side="right") for row in range(self.rows)],
                axis=1,
            )
            columns = np.arange(self.rows)
            parameters = {name: value[chosen, columns] for name, value in self.parameters.items()}
        if self._by_scipy:
            return families.law(self.family, parameters).draw(rng)
        if self.family == "Weibull":
            return parameters["scale"] * rng.weibull(parameters["concentration"])
        if self.family in _LOCATION_SCALE:
            loc, scale = parameters["loc"], parameters["scale"]
            if self.family == "Normal":
                return rng.normal(loc, scale)
            if self.family == "Laplace":
                return rng.laplace(loc, scale)
            return loc + scale * rng.standard_t(parameters["df"])
        if self.family == "Poisson":
            return rng.poisson(parameters["rate"])
        if self.family == "NegativeBinomial":
            concentration = parameters["concentration"]
            return rng.negative_binomial(concentration, concentration / (concentration + parameters["rate"]))
        if self.family == "MultivariateNormal":
            z = rng.standard_normal(parameters["loc"].shape)
            return parameters["loc"] + np.einsum("...ij,...j->...i", parameters["scale_tril"], z)
        if self.family == "NormalMixture":
            part = _chosen(parameters["weights"], rng)[..., None]
            loc, scale = (
                np.take_along_axis(parameters[name], part, axis=-1)[..., 0] for name in ("loc", "scale")
            )
            return rng.normal(loc, scale)
        if self.family == "Bernoulli":
            return (rng.random(parameters["probs"].shape) < parameters["probs"]).astype(np.int64)
        return _chosen(parameters["probs"], rng)

    # --- predictions made from this one ---

    def rescale(self, location: Any, scale: Any) -> Prediction:
        """The prediction of y * scale + location: back from standardised to original units.

        location and scale (positive) are numbers, or of shape (K,) for K outputs; where rows may be censored also (2,),
        those of the columns of the targets, of which events keep theirs. Not for counts, classes and Weibull times.
        """
        if self.family not in _WITH_UNITS:
            raise UnsupportedError(
                message(
                    f"a location-scale family to rescale ({', '.join(_WITH_UNITS)})",
                    self.family,
                    "leaving counts and labels in their own units when fitting",
                )
            )
        location = np.asarray(location, dtype=np.float64)
        scale = np.asarray(scale, dtype=np.float64)
        if self.censored and location.shape == scale.shape == (2,):
            if location[1] != 0.0 or scale[1] != 1.0:
                raise InputError(
                    message(
                        "events in their own units, location 0 and scale 1",
                        f"{location[1]:.6g} and {scale[1]:.6g}",
                        "the location and scale of the values alone",
                    )
                )
            location, scale = location[0], scale[0]
        for name, value in (("location", location), ("scale", scale)):
            if value.shape not in ((), self.shape[1:]):
                raise InputError(
                    message(
                        f"{name} as a number" + (f" or of shape {self.shape[1:]}" if self.shape[1:] else ""),
                        f"shape {value.shape}",
                        "one value per output",
                    )
                )
        if not (np.isfinite(location).all() and np.isfinite(scale).all() and (scale > 0.0).all()):
            raise InputError(
                message(
                    "finite location and positive scale",
                    f"{location}, {scale}",
                    "the mean and sd of the targets",
                )
            )
        parameters = dict(self.parameters)
        parameters["loc"] = parameters["loc"] * scale + location
        if self.family == "MultivariateNormal":
            each = np.broadcast_to(scale, self.shape[1:])
            parameters["scale_tril"] = parameters["scale_tril"] * each[:, None]
        else:
            parameters["scale"] = parameters["scale"] * scale
        within = None if self.epistemic_within is None else self.epistemic_within * scale**2
        return replace(self, parameters=parameters, epistemic_within=within)

    def take(self, rows: Any) -> Prediction:
        """The prediction for some of the rows: `rows` is a slice, or an array of indices or of booleans."""
        weights = self.log_weights
        return replace(
            self,
            parameters={name: value[:, rows] for name, value in self.parameters.items()},
            log_weights=weights[:, rows] if weights is not None and weights.ndim == 2 else weights,
            epistemic_within=None if self.epistemic_within is None else self.epistemic_within[:, rows],
        )

    def take_draws(self, draws: Any) -> Prediction:
        """The mixture of some of the draws, their weights normalised again: `draws` as `rows` in `take`."""
        weights = self.log_weights
        if weights is not None:
            total = _log_sum_exp(weights[draws])
            if not np.isfinite(total).all():
                raise InputError(
                    message("draws with some weight in every row", "weights that sum to zero", "other draws")
                )
            weights = weights[draws] - total
        return replace(
            self,
            parameters={name: value[draws] for name, value in self.parameters.items()},
            log_weights=weights,
            epistemic_within=None if self.epistemic_within is None else self.epistemic_within[draws],
        )

    def thin(self, count: int) -> Prediction:
        """At most `count` draws of equal weight, evenly spaced in cumulative weight; itself if it has no more.

        An approximation, for figures and for storage: with equal weights every (S / count)-th draw. Weights that
        differ between rows have no common order: UnsupportedError.
        """
        if count < 1:
            raise InputError(message("count of at least 1", f"{count}", "the number of draws to keep"))
        if count >= self.draws:
            return self
        if self.weights.ndim == 2:
            raise UnsupportedError(
                message(
                    "weights of shape (S,) to thin", "weights per row", "take_draws with draws of your choice"
                )
            )
        upto = np.cumsum(self.weights)
        chosen = np.searchsorted(upto, (np.arange(count) + 0.5) / count * upto[-1], side="right")
        return replace(self.take_draws(chosen), log_weights=None)


# --- several rows at once ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class JointPrediction:
    """Mean and covariance across rows and outputs; position n K + k is output k of row n.

    mean: (N K,), of f, and of y where `covariance` is given. function_covariance: (N K, N K), Cov(f).
    covariance: (N K, N K), Cov(y), for normal likelihoods; None otherwise. Given the noise y is jointly normal.
    """

    mean: np.ndarray
    function_covariance: np.ndarray
    covariance: np.ndarray | None

    def rescale(self, location: Any, scale: Any) -> JointPrediction:
        """The same in other units, location + scale * y, each a number or one per output (K,)."""
        factors = np.resize(np.asarray(scale, dtype=float), self.mean.shape)
        shifts = np.resize(np.asarray(location, dtype=float), self.mean.shape)
        both = factors[:, None] * factors
        return JointPrediction(
            shifts + factors * self.mean,
            both * self.function_covariance,
            None if self.covariance is None else both * self.covariance,
        )


# --- pieces -----------------------------------------------------------------------------------------------


def _frozen_array(name: str, given: Any, finite: bool = True) -> np.ndarray:
    """A float64 view that cannot be written through: a prediction does not change after its checks."""
    array = np.asarray(given)
    if array.dtype.kind not in "biuf":
        raise InputError(
            message(f"{name} as an array of numbers", f"{array.dtype}", "a NumPy array of floats")
        )
    array = array.astype(np.float64, copy=False).view()
    if finite and not np.isfinite(array).all():
        raise InputError(
            message(
                f"finite {name}",
                f"{np.count_nonzero(~np.isfinite(array))} values of NaN or infinity",
                "looking at the draws: a chain or an optimisation has left the finite numbers",
            )
        )
    array.flags.writeable = False
    return array


_LAYOUTS = {
    "Categorical": ((3,), "(draws, rows, classes)"),
    "NormalMixture": ((3,), "(draws, rows, parts)"),
    "MultivariateNormal": ((3,), "(draws, rows, outputs), scale_tril with one more axis of outputs"),
    **dict.fromkeys((*_LOCATION_SCALE, *_COUNTS), ((2, 3), "(draws, rows) or (draws, rows, outputs)")),
}


def _names(family: str) -> tuple[str, ...]:
    """The parameters of a family; the last one has the shape of the mean."""
    return _PARAMETERS.get(family) or families.names(family)


def _layout(family: str) -> tuple[tuple[int, ...], str]:
    if family in families.VECTORS or family.startswith(families.MIXTURE):
        return (3,), "(draws, rows, parts)"
    if family not in _PARAMETERS:
        return (2, 3), "(draws, rows) or (draws, rows, outputs)"
    return _LAYOUTS.get(family, ((2,), "(draws, rows)"))


def _check_parameters(family: str, parameters: Mapping[str, np.ndarray]) -> None:
    shapes = {name: value.shape for name, value in parameters.items()}
    dimensions, layout = _layout(family)
    first = shapes[_names(family)[-1]]
    wanted = {name: first + first[-1:] if name == "scale_tril" else first for name in shapes}
    if len(first) not in dimensions or shapes != wanted:
        raise InputError(
            message(
                f"parameters of {family} that all have one shape {layout}",
                ", ".join(f"{name} {shape}" for name, shape in shapes.items()),
                "adding the axis of the draws in front, or np.broadcast_to",
            )
        )
    if 0 in first:
        raise InputError(message("at least one draw and one row", f"shape {first}", "rows to predict"))
    for name in ("df", "scale", "concentration"):
        if name in parameters and not (parameters[name] > 0.0).all():
            _refuse_values(
                f"positive {name}", parameters[name], "the standard deviation's exponential or softplus"
            )
    if families.known(family) and (fault := families.faulty(family, parameters)) is not None:
        name, expected = fault
        _refuse_values(expected, parameters[name], "values that the family has")
    if family == "MultivariateNormal":
        factor = parameters["scale_tril"]
        diagonal = np.diagonal(factor, axis1=-2, axis2=-1)
        if not (diagonal > 0.0).all() or np.triu(factor, 1).any():
            _refuse_values(
                "scale_tril lower triangular, its diagonal positive", diagonal, "np.linalg.cholesky"
            )
    for name in ("probs", "weights", "gate"):
        if name not in parameters:
            continue
        shares = parameters[name]
        if (shares < 0.0).any() or (shares > 1.0).any():
            _refuse_values(f"{name} between 0 and 1", shares, "a sigmoid or a softmax of the output")
        each = family == "Bernoulli" or (families.base(family) in families.FAMILIES and name != "weights")
        total = shares.sum(axis=-1)
        if not each and (np.abs(total - 1.0) > 1e-5).any():
            kinds = "classes" if family == "Categorical" else "parts"
            _refuse_values(f"{name} that sum to 1 over the {kinds}", total, "a softmax over the last axis")


def _standard(parameters: Mapping[str, np.ndarray], y: np.ndarray) -> np.ndarray:
    """z of a location-scale family."""
    return (y - parameters.get("loc", 0.0)) / parameters["scale"]


def _refuse_values(expected: str, values: np.ndarray, advice: str) -> NoReturn:
    raise InputError(message(expected, f"values from {values.min():.6g} to {values.max():.6g}", advice))


def _count_log_mass(family: str, parameters: Mapping[str, np.ndarray], count: np.ndarray) -> np.ndarray:
    """log P(Y = count)."""
    from scipy.special import betaln, gammaln, xlog1py, xlogy

    rate = parameters["rate"]
    if family == "Poisson":
        return xlogy(count, rate) - rate - gammaln(count + 1.0)
    r = parameters["concentration"]
    # Gamma(y + r) / (Gamma(r) y!) = 1 / (y B(y, r)) keeps its digits where r is large.
    some = np.where(count > 0.0, count, 1.0)
    ways = np.where(count > 0.0, -np.log(some) - betaln(some, r), 0.0)
    return ways + xlogy(count, rate / (rate + r)) - xlog1py(r, rate / r)


def _count_distribution(family: str, parameters: Mapping[str, np.ndarray], count: np.ndarray) -> np.ndarray:
    """P(Y <= count) for whole numbers from 0."""
    from scipy.special import betainc, pdtr

    if family == "Poisson":
        return pdtr(count, parameters["rate"])
    r = parameters["concentration"]
    return betainc(r, count + 1.0, r / (r + parameters["rate"]))


def _chosen(shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Which of the last axis, with these probabilities."""
    upto = np.cumsum(shares, axis=-1)
    position = rng.random((*upto.shape[:-1], 1)) * upto[..., -1:]
    return np.sum(position >= upto, axis=-1).astype(np.int64)


def _log_sum_exp(values: np.ndarray) -> np.ndarray:
    """log sum exp over axis 0, -inf where every term is."""
    highest = values.max(axis=0)
    shift = np.where(np.isfinite(highest), highest, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(values - shift).sum(axis=0)) + shift


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    from scipy.special import entr

    return entr(probabilities).sum(axis=-1)


def _bracketed_root(
    function: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """The root of an increasing function in each [low, high], all at once.

    Bisection, with inverse quadratic interpolation wherever the last three points make it safe (Chandrupatla 1997,
    Advances in Engineering Software 28, 145-149). The bracket holds throughout, so a kink or a plateau costs
    time, never correctness.
    """
    a, b = low.copy(), high.copy()
    fa, fb = function(a), function(b)
    # Rounding can put an end of the bracket on the wrong side by one unit; that end is then the root.
    low_is_root, high_is_root = fa >= 0.0, fb <= 0.0
    c, fc = a, fa
    t = np.full(a.shape, 0.5)
    finished = np.zeros(a.shape, dtype=bool)
    best = np.where(np.abs(fa) < np.abs(fb), a, b)
    for _ in range(200):
        x = a + t * (b - a)
        fx = function(x)
        same = np.sign(fx) == np.sign(fa)
        c, fc = np.where(same, a, b), np.where(same, fa, fb)
        b, fb = np.where(same, b, a), np.where(same, fb, fa)
        a, fa = x, fx
        nearer = np.abs(fa) < np.abs(fb)
        # A row that has finished keeps its answer while the others of its block go on.
        best = np.where(finished, best, np.where(nearer, a, b))
        width = np.abs(b - a)
        tolerance = 4.0 * np.finfo(np.float64).eps * np.abs(best)
        finished |= (width <= 2.0 * tolerance) | (np.minimum(np.abs(fa), np.abs(fb)) <= 1e-13)
        if (finished | low_is_root | high_is_root).all():
            break
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            least = np.minimum(tolerance / width, 0.5)
            xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
            safe = (phi * phi < xi) & ((1.0 - phi) ** 2 < 1.0 - xi)
            quadratic = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
            t = np.where(safe & np.isfinite(quadratic), quadratic, 0.5)
            t = np.clip(
                t, np.where(np.isfinite(least), least, 0.0), 1.0 - np.where(np.isfinite(least), least, 0.0)
            )
    return np.where(low_is_root, low, np.where(high_is_root, high, best))
