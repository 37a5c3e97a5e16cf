"""Components of a mixture: densities, deviations, quantiles, draws. Arguments `rows` are slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.language.distributions import censored_log_prob
from ppl_bnn.prediction import scipy_families as families
from ppl_bnn.prediction.families import (
    LOCATION_SCALE,
    LOG_2PI,
    PARAMETERS,
    bracketed_root,
    count_distribution,
    count_log_mass,
    draw_categories,
    log_sum_exp,
    normal_inverse,
    standardised,
)

if TYPE_CHECKING:
    from ppl_bnn.prediction.prediction import Prediction


def component_log_prob(prediction: Prediction, y: np.ndarray, rows: slice) -> np.ndarray:
    """log p(y | theta) of each component.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    y : ndarray
        Targets of these rows.
    rows : slice
        The rows.

    Returns
    -------
    ndarray
        Log densities.
    """
    parameters = {name: value[:, rows] for name, value in prediction.parameters.items()}
    if prediction.censored:
        with np.errstate(over="ignore", under="ignore"):
            return censored_log_prob(prediction.family, parameters, y)
    if prediction.family in LOCATION_SCALE:
        family = LOCATION_SCALE[prediction.family]
        shapes = [parameters[name] for name in family.shapes]
        values = family.log_density(standardised(parameters, y), *shapes) - np.log(parameters["scale"])
        return values.sum(axis=-1) if values.ndim == 3 else values
    if prediction._by_scipy:
        values = prediction._law(rows).log_density(y)
        return values.sum(axis=-1) if values.ndim == 3 else values
    if prediction.is_counts:
        values = count_log_mass(prediction.family, parameters, y)
        return values.sum(axis=-1) if values.ndim == 3 else values
    if prediction.family == "MultivariateNormal":
        factor = parameters["scale_tril"]
        z = np.linalg.solve(factor, (y - parameters["loc"])[..., None])[..., 0]
        log_diagonal = np.log(np.diagonal(factor, axis1=-2, axis2=-1))
        return -0.5 * np.sum(z * z + LOG_2PI, axis=-1) - log_diagonal.sum(axis=-1)
    if prediction.family == "NormalMixture":
        scale = parameters["scale"]
        z = (y[:, None] - parameters["loc"]) / scale
        with np.errstate(divide="ignore"):  # a part may have no weight
            each = np.log(parameters["weights"]) - np.log(scale) - 0.5 * (z * z + LOG_2PI)
        return log_sum_exp(np.moveaxis(each, -1, 0))
    probs = parameters["probs"]
    if prediction.family == "Bernoulli":
        chosen = np.where(y == 1, probs, 1.0 - probs)
    else:
        chosen = probs[:, np.arange(len(y)), y]
    with np.errstate(divide="ignore"):  # a component may give a label probability zero
        return np.log(chosen)


def component_absolute_deviation(prediction: Prediction, y: np.ndarray, rows: slice) -> np.ndarray:
    """E|Y - y| of each component.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    y : ndarray
        Values at these rows.
    rows : slice
        The rows.

    Returns
    -------
    ndarray
        Units of y.

    Raises
    ------
    UnsupportedError
        If there is no closed form.
    """
    parameters = {name: value[:, rows] for name, value in prediction.parameters.items()}
    if prediction._by_scipy:
        raise UnsupportedError.of(
            "",
            (
                "a family with a closed form of E|Y - y|: Normal, StudentT, Laplace, Weibull, Poisson or "
                "NegativeBinomial"
            ),
            prediction.family,
            "log_prob, or draws of y: prediction.sample(n, seed)",
        )
    if prediction.is_counts:
        rate, count = parameters["rate"], np.floor(np.maximum(y, 0.0))
        mass = np.exp(count_log_mass(prediction.family, parameters, count))
        if prediction.family == "NegativeBinomial":
            # E[Y; Y <= c] = m (F(c) - P(Y = c) (r + c) / r), where it is m (F(c) - P(Y = c)) for Poisson.
            mass = mass * (1.0 + count / parameters["concentration"])
        below = count_distribution(prediction.family, parameters, count)
        inside = (y - rate) * (2.0 * below - 1.0) + 2.0 * rate * mass
        return np.where(y < 0.0, rate - y, inside)
    family = LOCATION_SCALE[prediction.family]
    shapes = [parameters[name] for name in family.shapes]
    return parameters["scale"] * family.absolute_deviation(standardised(parameters, y), *shapes)


def component_quantile_range(
    prediction: Prediction, level: float, rows: slice
) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest of the components' quantiles, which enclose the mixture's quantile.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    level : float
        Level of the quantile.
    rows : slice
        The rows.

    Returns
    -------
    least, greatest : ndarray
        One value per row.
    """
    if prediction._by_scipy:
        values = prediction._law(rows).inverse(level)
        if values.ndim == 3:
            values = np.moveaxis(values, -1, 0).reshape(-1, values.shape[1])
        return values.min(axis=0), values.max(axis=0)
    family = LOCATION_SCALE[prediction.family]
    parameters = {name: value[:, rows] for name, value in prediction.parameters.items()}
    standard = family.inverse(np.float64(level), *(parameters[name] for name in family.shapes))
    values = parameters.get("loc", 0.0) + parameters["scale"] * standard
    return values.min(axis=0), values.max(axis=0)


def continuous_quantile(prediction: Prediction, level: float, rows: slice) -> np.ndarray:
    """Quantile of a mixture of continuous components.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    level : float
        Level of the quantile.
    rows : slice
        The rows.

    Returns
    -------
    ndarray
        One value per row.
    """
    low, high = component_quantile_range(prediction, level, rows)
    target = normal_inverse(level)

    # On the probit scale the distribution function is close to a straight line, so interpolation is fast.
    def excess(y: np.ndarray) -> np.ndarray:
        probability = np.clip(prediction._mixture_cdf(y, rows), 1e-300, 1.0 - 1e-16)
        return normal_inverse(probability) - target

    return bracketed_root(excess, low, high)


def integer_quantile(prediction: Prediction, level: float, rows: slice) -> np.ndarray:
    """Quantile of a mixture of counts: the least whole number with F(y) >= level.

    Parameters
    ----------
    prediction : Prediction
        The prediction.
    level : float
        Level of the quantile.
    rows : slice
        The rows.

    Returns
    -------
    ndarray
        One value per row.
    """
    if prediction._by_scipy:
        low, high = component_quantile_range(prediction, level, rows)
        return _least_integer(prediction, low - 1.0, high, level, rows)
    rate = prediction.parameters["rate"][:, rows].max(axis=0)
    low = np.full(rate.shape, -1.0)
    spread = np.sqrt(prediction._component_variance()[:, rows].max(axis=0))
    high = np.ceil(rate + 10.0 * spread + 10.0)
    while (short := prediction._mixture_cdf(high, rows) < level).any():
        low, high = np.where(short, high, low), np.where(short, 2.0 * high, high)
    return _least_integer(prediction, low, high, level, rows)


def _least_integer(
    prediction: Prediction, low: np.ndarray, high: np.ndarray, level: float, rows: slice
) -> np.ndarray:
    """The least whole number in (low, high] with F(y) >= level. It holds at `high` and not at `low`."""
    while (high - low > 1.0).any():
        middle = np.floor(0.5 * (low + high))
        enough = prediction._mixture_cdf(middle, rows) >= level
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


def drawn(family: str, parameters: Mapping[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """One draw of y for each entry of the parameters.

    Parameters
    ----------
    family : str
        The family.
    parameters : mapping of str to ndarray
        Its parameters by name.
    rng : numpy.random.Generator
        Generator of the random numbers.

    Returns
    -------
    ndarray
        The draws.
    """
    if family not in PARAMETERS:
        return families.law(family, parameters).draw(rng)
    if family == "Weibull":
        return parameters["scale"] * rng.weibull(parameters["concentration"])
    if family in LOCATION_SCALE:
        loc, scale = parameters["loc"], parameters["scale"]
        if family == "Normal":
            return rng.normal(loc, scale)
        if family == "Laplace":
            return rng.laplace(loc, scale)
        return loc + scale * rng.standard_t(parameters["df"])
    if family == "Poisson":
        return rng.poisson(parameters["rate"])
    if family == "NegativeBinomial":
        concentration = parameters["concentration"]
        return rng.negative_binomial(concentration, concentration / (concentration + parameters["rate"]))
    if family == "MultivariateNormal":
        z = rng.standard_normal(parameters["loc"].shape)
        return parameters["loc"] + np.einsum("...ij,...j->...i", parameters["scale_tril"], z)
    if family == "NormalMixture":
        part = draw_categories(parameters["weights"], rng)[..., None]
        loc, scale = (
            np.take_along_axis(parameters[name], part, axis=-1)[..., 0] for name in ("loc", "scale")
        )
        return rng.normal(loc, scale)
    if family == "Bernoulli":
        return (rng.random(parameters["probs"].shape) < parameters["probs"]).astype(np.int64)
    return draw_categories(parameters["probs"], rng)
