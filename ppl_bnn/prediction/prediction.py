"""Predictive distributions: per row, a weighted mixture over draws of one distribution, in NumPy.

With draws s = 1..S of all unknowns, normalised weights w_s and rows n = 1..N,

    p(y_n) = sum_s w_s p(y_n | theta_sn),

where theta_sn are the parameters of a Normal, StudentT, Laplace, Weibull, NormalMixture, MultivariateNormal, Bernoulli,
Categorical, Poisson or NegativeBinomial distribution. All results refer to that mixture: densities are averaged before
the logarithm, quantiles invert the mixture's own distribution function, and no moments are matched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import starmap
from typing import Any

import numpy as np

from ppl_bnn.core.arrays import chunks
from ppl_bnn.core.errors import InputError, UnsupportedError, unknown_name
from ppl_bnn.core.notebook.html import Listing, card
from ppl_bnn.language.distributions import CENSORED, censored_log_prob
from ppl_bnn.prediction import arguments, families
from ppl_bnn.prediction.families import FAMILIES_WITH_UNITS, entropy_of

# Elements of one (draws, rows) block: it fits in a cache, and hides NumPy's overhead per call.
BLOCK = 1 << 18
# Rows and columns that a notebook shows.
SHOWN_ROWS, SHOWN_COLUMNS = 5, 10


# --- the prediction ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prediction:
    """A weighted mixture over S draws (axis 0) of one distribution for each of N rows (axis 1).

    Parameters
    ----------
    family : str
        The distribution of the components. The families "CensoredNormal", "CensoredLaplace" and "CensoredWeibull" are
        Normal, Laplace and Weibull with ``censored=True``.
    parameters : mapping of str to ndarray
        The parameters of the family, each of shape (S, N) unless another shape is given here:

        - "Normal" (loc, scale), "StudentT" (df, loc, scale), "Laplace" (loc, scale);
        - "Weibull" (concentration, scale);
        - "Bernoulli" (probs), "Poisson" (rate);
        - "NegativeBinomial" (concentration, rate), whose rate is the mean;
        - "Categorical" (probs) of shape (S, N, C);
        - "MultivariateNormal", loc (S, N, K) and scale_tril (S, N, K, K), with the covariance L L';
        - "NormalMixture" (weights, loc, scale), each (S, N, M): sum_m w_m N(loc_m, scale_m^2).

        A location-scale family may have K outputs, shape (S, N, K). They are independent given the draw.
    log_weights : ndarray, optional
        Logarithms of normalised weights, of shape (S,) or, for weights that differ between rows, (S, N). By default all
        weights are equal.
    epistemic_within : ndarray, optional
        The epistemic part of a component's own uncertainty. Numbers (location-scale families): of the shape of `loc`, a
        part of the component's variance, such as v_f for a linearised Gaussian predictive N(f, v_f + sigma^2). Classes:
        of shape (S, N), a part of the component's entropy in nats, the mutual information of label and function within
        it, such as H(E[p]) - E[H(p)] for a component with the mean of a distribution over p.
    class_names : sequence of str, optional
        Names of the classes, for display. Two for Bernoulli.
    censored : bool, default False
        Whether the observation of a row may be only a bound (Normal, Laplace, Weibull, one number per row). The
        prediction is of the value itself. `log_prob` then takes targets (N, 2), values and events: 1 (observed), 0 (the
        value is larger), -1 (it is smaller).
    labels : sequence, optional
        The labels of the classes, in order, where they are not 0..C-1: ("no", "yes"), or (1, 2, 3). Targets and draws
        are then these labels.

    Raises
    ------
    InputError
        If shapes do not agree (nothing is broadcast), values are not finite, scales are not positive, probabilities are
        invalid, or weights do not sum to one.

    Notes
    -----
    For numbers (all families but Bernoulli and Categorical) the law of total variance gives, in squared units of y,

        epistemic = Var_w(E[y|s]) + E_w[epistemic_within],
        aleatoric = E_w[Var(y|s) - epistemic_within],      variance = epistemic + aleatoric = std^2.

    For classes (Bernoulli, Categorical) ENTROPIES are split, in nats, not variances:

        entropy = H(E_w[p]),   aleatoric = E_w[H(p) - epistemic_within],   epistemic = entropy - aleatoric.

    The last is the mutual information of label and function. For classes `mean` is the probability of class one
    (Bernoulli) or of each class (Categorical), and `variance` is that of the label's indicator, mean (1 - mean).

    References
    ----------
    Houlsby et al. 2011; Depeweg et al. 2018 (mutual information of label and function).

    Examples
    --------
    >>> import numpy as np
    >>> import ppl_bnn as bnn
    >>> prediction = bnn.Prediction("Normal", {"loc": np.array([[0.0], [2.0]]), "scale": np.ones((2, 1))})
    >>> prediction.mean, prediction.epistemic, prediction.aleatoric
    (array([1.]), array([1.]), array([1.]))
    >>> prediction.quantile([0.05, 0.5]).shape
    (2, 1)
    """

    family: str
    parameters: Mapping[str, np.ndarray]
    log_weights: np.ndarray | None = None
    epistemic_within: np.ndarray | None = None
    class_names: Sequence[str] | None = None
    censored: bool = False
    labels: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        keep = partial(object.__setattr__, self)
        if self.family in families.CENSORED_FAMILIES:
            keep("censored", True)
            keep("family", families.CENSORED_FAMILIES[self.family])
        if not families.known(self.family):
            raise unknown_name("family", self.family, ("NormalMixture", *families.FAMILIES))
        names = families.names(self.family)
        expected, got = f"the parameters {', '.join(names)}", ", ".join(map(str, self.parameters)) or "none"
        good = set(self.parameters) == set(names)
        InputError.check(good, self.family, expected, got, "exactly these by name")
        keep("parameters", {name: arguments.frozen_array(name, self.parameters[name]) for name in names})
        families.check_parameters(self.family, self.parameters)
        possible = not self.censored or (self.family in CENSORED and len(self.shape) == 1)
        expected = f"one number per row of {', '.join(CENSORED)} where rows may be censored"
        got = f"{self.family} of shape {self.shape}"
        InputError.check(possible, "", expected, got, "censored=False")
        if self.log_weights is not None:
            keep("log_weights", arguments.checked_log_weights(self.log_weights, self.draws, self.rows))
        if self.epistemic_within is not None:
            keep("epistemic_within", arguments.checked_within(self, self.epistemic_within))
        for name in ("class_names", "labels"):
            given = getattr(self, name)
            if given is not None:
                keep(name, tuple(map(str, given)) if name == "class_names" else tuple(given))
                right, expected = len(given) == self.classes, f"{self.classes} {name}"
                InputError.check(right, "", expected, f"{len(given)}", "one name per class")

    def law(self, rows: slice | np.ndarray = slice(None)) -> Any:
        """The distribution of each component at these rows, a `ppl_bnn.prediction.families.Law`."""
        return families.law(self.family, {name: value[:, rows] for name, value in self.parameters.items()})

    @property
    def _event_array(self) -> np.ndarray:
        """The parameter that has the shape of the mean of each component."""
        return self.parameters[families.names(self.family)[-1]]

    @property
    def draws(self) -> int:
        """Number of components, S."""
        return self._event_array.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows, N."""
        return self._event_array.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the predicted y: (N,), or (N, K) for K outputs."""
        one = self.is_classes or families.is_mixture(self.family)
        return (self.rows,) if one else self._event_array.shape[1:]

    @property
    def is_classes(self) -> bool:
        """Whether y is a class label (Bernoulli, Categorical)."""
        return families.FAMILIES[families.base(self.family)].kind == "class"

    @property
    def is_counts(self) -> bool:
        """Whether y is a count 0, 1, 2, ... (Poisson, NegativeBinomial, Binomial and others of `families`)."""
        return families.counts(self.family)

    @property
    def classes(self) -> int:
        """Number of classes, C; two for Bernoulli."""
        arguments.check_classes(self, "classes")
        return 2 if self.family == "Bernoulli" else self._event_array.shape[2]

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        censored = ", censored" if self.censored else ""
        return f"Prediction({self.family}, draws={self.draws}, shape={self.shape}{censored})"

    def _repr_html_(self) -> str:
        """The first rows: median and central 90 % interval, or class probabilities."""
        few = self.take(np.arange(min(self.rows, SHOWN_ROWS)))
        if self.is_classes:
            names = self.class_names or self.labels or range(self.classes)
            columns = [f"P({name})" for name in names]
            texts = [[f"{value:.3f}" for value in row] for row in few.probabilities]
        else:
            several = len(self.shape) == 2
            columns = [f"y[{output}]" for output in range(self.shape[1])] if several else ["y"]
            ends = np.moveaxis(few.quantile([0.5, 0.05, 0.95]).reshape(3, few.rows, -1), 0, -1)
            texts = [[f"{m:.4g} ({low:.4g} to {high:.4g})" for m, low, high in row] for row in ends]
        more = f", the first {few.rows} of {self.rows} rows" if few.rows < self.rows else ""
        what = "Class probabilities" if self.is_classes else "Medians and central 90 % intervals"
        rows = [[str(row), *cells[:SHOWN_COLUMNS]] for row, cells in enumerate(texts)]
        return card(repr(self), Listing(what + more, ["row", *columns[:SHOWN_COLUMNS]], rows))

    @cached_property
    def weights(self) -> np.ndarray:
        """Normalised weights, (S,) or (S, N)."""
        if self.log_weights is None:
            return np.full(self.draws, 1.0 / self.draws)
        return np.exp(self.log_weights)

    def _average(self, values: np.ndarray, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """sum_s w_s values_s over axis 0; `rows` are the rows that `values` (S, n, ...) has."""
        weights = self.weights
        if weights.ndim == 1:
            if not np.isfinite(values).all():
                # A draw of no weight contributes nothing, whatever its value: 0 * inf would be NaN.
                keep = weights > 0.0
                weights, values = weights[keep], values[keep]
            return np.tensordot(weights, values, axes=1)
        weights = weights[:, rows]
        weights = weights.reshape(weights.shape + (1,) * (values.ndim - 2))
        return np.sum(np.where(weights > 0.0, weights * np.where(weights > 0.0, values, 0.0), 0.0), axis=0)

    def component_mean(self) -> np.ndarray:
        """E[y | s] of each component, (S, N) or (S, N, K).

        Raises
        ------
        UnsupportedError
            If the distribution has no mean, such as StudentT with at most 1 degree of freedom.
        """
        mean = self.law().mean()
        if not np.isfinite(mean).all():
            degrees = self.family == "StudentT"
            got = f"df = {self.parameters['df'].min():.6g}" if degrees else "none"
            advice = "quantile(0.5)" + (", or a prior that keeps df above 2" if degrees else "")
            raise UnsupportedError.of("", f"a {self.family} distribution with a mean", got, advice)
        return mean

    @cached_property
    def mean(self) -> np.ndarray:
        """E[y], (N,) or (N, K); P(y = 1) for Bernoulli; class probabilities (N, C) for Categorical."""
        return self._average(self.component_mean())

    @cached_property
    def mean_function_variance(self) -> np.ndarray:
        """Variance of the mean function, Var_w(E[y|s]) + E_w[epistemic_within], of the shape of `mean`.

        For numbers this is `epistemic`. For classes it is the variance over draws of the class probabilities.

        Raises
        ------
        UnsupportedError
            For classes with `epistemic_within`: a mutual information within components does not determine a variance.
        """
        if self.is_classes and self.epistemic_within is not None:
            got = "averages of them (epistemic_within)"
            raise UnsupportedError.of("", "draws of the class probabilities for a variance", got, "epistemic")
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
        total = self.law().uncertainty()
        if self.epistemic_within is not None:
            total = np.maximum(total - self.epistemic_within, 0.0)
        return self._average(total)

    @cached_property
    def variance(self) -> np.ndarray:
        """Var(y) of the mixture, the shape of `mean`, in squared units of y (classes: of the indicators)."""
        if self.is_classes:
            return self.mean * (1.0 - self.mean)
        return self.epistemic + self.aleatoric

    @cached_property
    def std(self) -> np.ndarray:
        """Square root of `variance`, in units of y."""
        return np.sqrt(self.variance)

    @cached_property
    def covariance(self) -> np.ndarray:
        """Cov(y_n) between the outputs of each row, (N, K, K), in squared units of y. Its diagonal is `variance`."""
        if len(self.shape) != 2:
            raise UnsupportedError.of("", "several outputs for a covariance", repr(self), "variance")
        deviation, law = self.component_mean() - self.mean, self.law()
        between = self._average(deviation[..., :, None] * deviation[..., None, :])
        if self.family in families.VECTORS:
            return between + self._average(law.covariance())
        return between + self._average(law.variance())[..., None] * np.eye(self.shape[1])

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Class probabilities of the mixture, (N, C); two columns, for 0 and 1, for Bernoulli."""
        arguments.check_classes(self, "probabilities")
        return np.stack([1.0 - self.mean, self.mean], axis=-1) if self.family == "Bernoulli" else self.mean

    @cached_property
    def entropy(self) -> np.ndarray:
        """-sum_c P_c log P_c of the mixture's class probabilities, nats, (N,): aleatoric + epistemic."""
        arguments.check_classes(self, "entropy")
        return entropy_of(self.probabilities)

    def component_log_prob(self, y: Any) -> np.ndarray:
        """Log density of each component, log p(y_n | theta_sn), summed over K outputs, (S, N); y as in `log_prob`."""
        return self._component_log_prob(arguments.checked_targets(self, y), slice(None))

    def _component_log_prob(self, y: np.ndarray, rows: slice) -> np.ndarray:
        law = self.law(rows)
        if self.censored:
            with np.errstate(over="ignore", under="ignore"):
                return censored_log_prob(self.family, law.parameters, y)
        values = law.log_density(y)
        return values.sum(axis=-1) if values.ndim == 3 else values

    def log_prob(self, y: Any) -> np.ndarray:
        """Log density of the mixture, log sum_s w_s p(y_n | theta_sn), jointly over a row's K outputs.

        Parameters
        ----------
        y : array_like
            Numbers, counts, or labels 0..C-1, of the shape `shape`. Where rows may be `censored`, (N, 2), values and
            events.

        Returns
        -------
        ndarray
            Shape (N,), log density per unit of y. A censored row has a log probability instead, which has no units.

        Raises
        ------
        InputError
            If y has another shape, is not finite, or holds invalid labels or counts.
        """
        y = arguments.checked_targets(self, y)
        equal = np.full(self.draws, -math.log(self.draws))
        weights = equal if self.log_weights is None else self.log_weights
        result = np.empty(self.rows)
        for rows in self._row_blocks():
            values = self._component_log_prob(y[rows], rows)
            values += weights[:, rows] if weights.ndim == 2 else weights[:, None]
            result[rows] = np.logaddexp.reduce(values)
        return result

    def observed_values(self, y: Any) -> np.ndarray:
        """The values of targets as `log_prob` takes them. Raises an error if any row is censored.

        Leaving censored rows out would favour short times.
        """
        if not self.censored or np.ndim(y) != 2:
            return arguments.checked_y(self, y)
        y = arguments.checked_targets(self, y)
        bounds, advice = int(np.count_nonzero(y[:, 1] != 1.0)), "log_score or concordance_index"
        got = f"{bounds} of {len(y)} rows censored"
        UnsupportedError.check(not bounds, "", "values that were all observed", got, advice)
        return y[:, 0]

    def _row_blocks(self) -> Iterator[slice]:
        """Slices of rows whose (draws, rows, ...) blocks stay small."""
        return starmap(slice, chunks(self.rows, max(1, BLOCK // self._event_array[:, :1].size)))

    def cdf(self, y: Any) -> np.ndarray:
        """Distribution function F_n(y_n) = sum_s w_s F(y_n | theta_sn), per output.

        Parameters
        ----------
        y : array_like
            Values of the shape `shape`, or with one more axis in front for several values per row, as `quantile`
            returns them.

        Returns
        -------
        ndarray
            Probabilities, of the shape of y.

        Raises
        ------
        UnsupportedError
            For classes.
        """
        arguments.check_numbers(self, "cdf")
        return self._marginal_average(y, "distribution")

    def _marginal_average(self, y: Any, function: str) -> np.ndarray:
        """sum_s w_s of a function of the law of each component at y_n, for y as in `cdf`."""
        y = arguments.checked_y(self, y, leading=True)
        marginal = self.marginals()
        values = y.reshape(-1, marginal.rows)
        result = np.empty_like(values)
        for rows in marginal._row_blocks():
            of_components = getattr(marginal.law(rows), function)
            for index, each in enumerate(values):
                result[index, rows] = marginal._average(of_components(each[rows]), rows)
        return result.reshape(y.shape)

    def marginals(self) -> Prediction:
        """The same mixture of univariate components on N rows, or on N K rows for K outputs.

        The parts of a NormalMixture become components with weights per row.
        """
        family, parameters, log_weights = self.family, self.parameters, self.log_weights
        if family == "NormalMixture":
            weights = self.weights.reshape(self.draws, -1)[..., None] * parameters["weights"]
            arrays = (parameters["loc"], parameters["scale"], weights)
            loc, scale, weights = (np.moveaxis(array, -1, 1).reshape(-1, self.rows) for array in arrays)
            with np.errstate(divide="ignore"):  # a part may have no weight
                log_weights = np.log(weights)
            log_weights -= np.logaddexp.reduce(log_weights)
            return Prediction("Normal", {"loc": loc, "scale": scale}, log_weights)
        if len(self.shape) == 1:
            return self
        if family in families.VECTORS:
            family, parameters = self.law().marginal()
        if log_weights is not None and log_weights.ndim == 2:
            log_weights = np.repeat(log_weights, self.shape[1], axis=1)
        flat = {name: value.reshape(self.draws, -1) for name, value in parameters.items()}
        return Prediction(family, flat, log_weights)

    def quantile(self, q: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """The y with F_n(y) = q, per output; for counts the smallest integer y with F_n(y) >= q.

        The mixture's own distribution function is inverted, between the smallest and the largest quantile of the
        components.

        Parameters
        ----------
        q : float or sequence of float
            Levels within (0, 1).

        Returns
        -------
        ndarray
            Shape (N,) or (N, K), with len(q) in front if q is a sequence. Units of y.

        Raises
        ------
        InputError
            If q is outside (0, 1).
        UnsupportedError
            For classes.
        """
        arguments.check_numbers(self, "quantile")
        levels = arguments.checked_levels("q", q, "for example q=[0.05, 0.95]")
        marginal = self.marginals()
        invert = families.integer_quantile if self.is_counts else families.continuous_quantile
        result = np.empty((levels.size, marginal.rows))
        for block in marginal._row_blocks():
            law = marginal.law(block)
            cdf = partial(marginal._cdf_of_rows, law, np.arange(block.start, block.stop))
            for index, level in enumerate(levels.ravel()):
                result[index, block] = invert(cdf, float(level), *law.quantile_range(float(level)))
        return result.reshape(levels.shape + self.shape)

    def _cdf_of_rows(
        self, law: families.Law, block: np.ndarray, y: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """F(y) at some rows of a block of rows with this law."""
        law = law if len(rows) == len(block) else self.law(block[rows])
        return self._average(law.distribution(y), block[rows])

    def interval(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Central interval of probability `level`: the quantiles (1 -+ level) / 2.

        Parameters
        ----------
        level : float
            Probability of the interval.

        Returns
        -------
        lower, upper : ndarray
            Each of the shape `shape`.
        """
        arguments.checked_levels("a level", level, "for example level=0.9")
        lower, upper = self.quantile([0.5 * (1.0 - level), 0.5 * (1.0 + level)])
        return lower, upper

    def absolute_deviation(self, y: Any) -> np.ndarray:
        """E|Y_n - y_n| under the mixture, per output, in closed form. StudentT needs df > 1.

        Parameters
        ----------
        y : array_like
            Values as in `cdf`.

        Returns
        -------
        ndarray
            Of the shape of y, in units of y.

        Raises
        ------
        UnsupportedError
            For classes.

        References
        ----------
        Jordan, Krueger and Lerch 2019, Journal of Statistical Software 90(12), appendix A.
        """
        arguments.check_numbers(self, "absolute_deviation")
        self.component_mean()
        return self._marginal_average(y, "absolute_deviation")

    def sample(self, n: int, seed: int | np.random.Generator) -> np.ndarray:
        """Draw y from the mixture.

        With weights (S,) one component is chosen per sample for all rows, so that a sample is the output of one
        network. With weights (S, N) each row chooses its own component.

        Parameters
        ----------
        n : int
            Number of samples.
        seed : int or numpy.random.Generator
            Seed or generator of the random numbers.

        Returns
        -------
        ndarray
            Shape (n, N) or (n, N, K). Labels are integers.
        """
        InputError.check(n >= 1, "", "n of at least 1", f"{n}", "the number of samples wanted")
        if self.labels is not None:
            return np.asarray(self.labels)[replace(self, labels=None).sample(n, seed)]
        rng = np.random.default_rng(seed)
        if self.weights.ndim == 1:
            chosen: Any = rng.choice(self.draws, size=n, p=self.weights / self.weights.sum())
        else:
            upto, rows = np.cumsum(self.weights, axis=0), np.arange(self.rows)
            position = rng.random((n, self.rows)) * upto[-1]
            found = [np.searchsorted(upto[:, row], position[:, row], side="right") for row in rows]
            chosen = (np.stack(found, axis=1), rows)
        return families.law(self.family, {name: a[chosen] for name, a in self.parameters.items()}).draw(rng)

    def rescale(self, location: Any, scale: Any) -> Prediction:
        """The prediction of y * scale + location: from standardised to original units.

        Parameters
        ----------
        location, scale : float or array_like
            Numbers, or of shape (K,) for K outputs; scale is positive. Where rows may be censored also of shape (2,),
            for the columns of the targets; the event column has location 0 and scale 1.

        Returns
        -------
        Prediction
            The prediction in the new units.

        Raises
        ------
        UnsupportedError
            For counts, classes and Weibull times.
        """
        good, advice = self.family in FAMILIES_WITH_UNITS, "counts and labels in their own units"
        expected = f"a location-scale family to rescale ({', '.join(FAMILIES_WITH_UNITS)})"
        UnsupportedError.check(good, "", expected, self.family, advice)
        location, scale = arguments.checked_units(self, location, scale)
        return self.scaled(self.parameters["loc"] * scale + location, scale)

    def scaled(self, loc: np.ndarray, factors: np.ndarray) -> Prediction:
        """The prediction with another `loc`, and scales multiplied by factors () or (K,).

        The variance within components changes by the squares of the factors.
        """
        parameters = dict(self.parameters) | {"loc": loc}
        if self.family == "MultivariateNormal":
            each = np.broadcast_to(factors, self.shape[1:])
            parameters["scale_tril"] = parameters["scale_tril"] * each[:, None]
        else:
            parameters["scale"] = parameters["scale"] * factors
        within = None if self.epistemic_within is None else self.epistemic_within * factors**2
        return replace(self, parameters=parameters, epistemic_within=within)

    def take(self, rows: Any) -> Prediction:
        """The same mixture on some of the rows.

        Parameters
        ----------
        rows : slice or array of int or bool
            The rows, (N,) or their indices.

        Returns
        -------
        Prediction
            The mixture on these rows.
        """
        weights = self.log_weights
        weights = weights[:, rows] if weights is not None and weights.ndim == 2 else weights
        return self._indexed((slice(None), rows), weights)

    def _indexed(self, index: Any, log_weights: np.ndarray | None) -> Prediction:
        parameters = {name: value[index] for name, value in self.parameters.items()}
        within = None if self.epistemic_within is None else self.epistemic_within[index]
        return replace(self, parameters=parameters, log_weights=log_weights, epistemic_within=within)

    def take_draws(self, draws: Any) -> Prediction:
        """The mixture of some of the draws, with weights normalised again.

        Parameters
        ----------
        draws : slice or array of int or bool
            The draws, (S,) or their indices.

        Returns
        -------
        Prediction
            The mixture of these draws.
        """
        weights = self.log_weights
        if weights is not None:
            total = np.logaddexp.reduce(weights[draws])
            some = np.isfinite(total).all()
            InputError.check(some, "", "draws with some weight in every row", "a sum of 0", "other draws")
            weights = weights[draws] - total
        return self._indexed(draws, weights)

    def thin(self, count: int) -> Prediction:
        """At most `count` draws of equal weight, evenly spaced in cumulative weight.

        An approximation, for figures and for storage. With equal weights it keeps every (S / count)-th draw.

        Parameters
        ----------
        count : int
            Largest number of draws.

        Returns
        -------
        Prediction
            The thinned mixture, or the prediction itself if it has no more draws.

        Raises
        ------
        UnsupportedError
            If weights differ between rows, which have no common order.
        """
        InputError.check(count >= 1, "", "count of at least 1", f"{count}", "the number of draws to keep")
        if count >= self.draws:
            return self
        if self.weights.ndim == 2:
            raise UnsupportedError.of("", "weights of shape (S,) to thin", "weights per row", "take_draws")
        upto = np.cumsum(self.weights)
        chosen = np.searchsorted(upto, (np.arange(count) + 0.5) / count * upto[-1], side="right")
        return replace(self.take_draws(chosen), log_weights=None)


# --- several rows at once ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class JointPrediction:
    """Mean and covariance across rows and outputs; position n K + k is output k of row n.

    Given the noise, y is jointly normal.

    Parameters
    ----------
    mean : ndarray
        Shape (N K,): mean of f, and of y if `covariance` is given.
    function_covariance : ndarray
        Cov(f), shape (N K, N K).
    covariance : ndarray, optional
        Cov(y), shape (N K, N K), for normal likelihoods; None otherwise.
    """

    mean: np.ndarray
    function_covariance: np.ndarray
    covariance: np.ndarray | None

    def rescale(self, location: Any, scale: Any) -> JointPrediction:
        """The joint prediction of location + scale * y, for numbers or one value per output (K,)."""
        factors = np.resize(np.asarray(scale, dtype=float), self.mean.shape)
        shifts = np.resize(np.asarray(location, dtype=float), self.mean.shape)
        both = factors[:, None] * factors
        covariance = None if self.covariance is None else both * self.covariance
        return JointPrediction(shifts + factors * self.mean, both * self.function_covariance, covariance)
