"""Predictions from a Gaussian over the predictor: eta_n ~ N(mean_n, covariance_n), row by row.

A linearised network is such a Gaussian (MacKay 1992; Immer et al. 2021). A likelihood makes it a distribution of y,

    p(y_n) = integral p(y_n | eta) N(eta; mean_n, covariance_n) d eta.

Kinds, the default first (all but "linearised" exist for class labels only):

"linearised"
    The integral itself: closed form, a quadrature with a stated error if the integrand has one dimension (one logit,
    one log noise), or quasi-Monte Carlo. With uncertain noise the quadrature is over log noise, given which f and y are
    normal: its nodes give a mixture of normals.
"probit"
    One logit: p = sigmoid(kappa(s^2) f), kappa(s^2) = (1 + pi s^2 / 8)^(-1/2) (Spiegelhalter and Lauritzen 1990; MacKay
    1992), within 0.02 of the integral. Several logits: softmax(kappa(s_c^2) f_c), with the variances alone. It
    depends on a shift that all logits share. It is too flat if logits are correlated, and too confident if the
    largest logit is much better known than the others.
"probit_covariance" (several logits)
    p_c proportional to 1 / sum_j exp(-(f_c - f_j) kappa(s_cc + s_jj - 2 s_cj)): the probit approximation for each
    difference of two logits, combined as if these were independent (Daunizeau 2017, arXiv:1703.00091; the
    third form of Lu, Ie and Sha 2021, arXiv:2006.07584), then normalised. A shift that all logits share has no effect.
"bridge"
    The Laplace bridge (MacKay 1998; Hobbhahn, Kristiadi and Hennig 2022): the Dirichlet whose own Laplace
    approximation in the softmax basis has this mean and these variances. The Gaussian is first conditioned on logits
    that sum to zero, m = f - S1 (1'f) / (1'S1), V = S - S1 1'S / (1'S1), and then

        alpha_c = (1 - 2 / C + exp(m_c) sum_j exp(-m_j) / C^2) / V_cc,      p = alpha / sum(alpha).

    Covariances are dropped. With more than two classes a vanishing covariance does not give softmax(f). One logit is
    treated as the two logits (-f/2, f/2) with variance s^2 / 4 each, whose mean is sigmoid(f) for any s.
"bridge_norm"
    "bridge" after m / sqrt(v), V / v with v = mean_c(V_cc) sqrt(2 / C), a correction of laplace-torch for large
    variances. If variances are smaller than sqrt(C / 2) it makes logits larger, without bound: do not use it there.

The approximations are one component of class probabilities. Its `epistemic_within` is H(p) - E[H], with the expected
entropy E[H] of the Dirichlet in closed form, or for the probit kinds that of the Gaussian, by the quadrature of
"linearised". If the approximate H(p) is smaller than E[H], the epistemic part is 0.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import scipy

from ppl_bnn.core.arrays import chunks
from ppl_bnn.core.errors import CurvatureError, InputError
from ppl_bnn.inference.laplace.row_covariances import DenseRows, RowCovariances, variances_of
from ppl_bnn.language import likelihoods
from ppl_bnn.prediction.families import entropy_of
from ppl_bnn.prediction.prediction import JointPrediction, Prediction

Array = np.ndarray
KINDS = ("linearised", "probit", "probit_covariance", "bridge", "bridge_norm")
# Points of the quasi-Monte Carlo rule: a power of two, at which Sobol points are balanced.
DRAWS = 1024
# Those for an expected entropy beside an approximation for many classes: its standard deviation over points is small.
FEW_DRAWS = 64
# Nodes of the rule over log noise for small standard deviations, and the most nodes of a rule.
NODES = 21
MOST_NODES = 4096
# Noise counts as known if the variance of log noise is below this.
KNOWN = 1e-14
# Elements of one block of (points, rows, classes) in expected entropies.
BLOCK = 1 << 22


def kinds_of(likelihood: Any) -> tuple[str, ...]:
    """The kinds of prediction that a likelihood has, the default first."""
    if isinstance(likelihood, likelihoods.Bernoulli):
        return ("linearised", "probit", "bridge", "bridge_norm")
    return KINDS if isinstance(likelihood, likelihoods.Categorical) else ("linearised",)


def predictive(
    likelihood: Any, mean: Any, covariance: Any, kind: str, *, draws: int = DRAWS, seed: int = 0
) -> Prediction:
    """The prediction of y from eta ~ N(mean, covariance), row by row, with mean (N, D) and covariance (N, D, D).

    The covariance may be singular. `draws` and `seed` are those of quasi-Monte Carlo. For "linearised":

    - Gaussian and HeteroscedasticGaussian with known noise: one normal N(f_k, var(f_k) + noise_k^2) per output, exact.
    - The same with noise uncertain in one direction (one output, or one noise that all outputs share): a mixture over
      log noise. The distribution function is within 1e-8 of the exact one. A standard deviation of log noise near 18,
      where the variance of y overflows, is refused.
    - Bernoulli: a mixture over the logit. Probability and expected entropy are within 1e-9 for a standard deviation of
      the logit up to 250. Beyond that, the 4096 nodes are kept and the error is below 1e-3.
    - Censored: as its base.
    - All others: a mixture over scrambled Sobol points (Owen 1998), the same for all rows; the error falls nearly as
      1 / draws.

    With several outputs the first two are exact for each output, and `log_prob` of a whole row ignores the correlation
    of the f_k (see `joint_predictive`). Raises `InputError` for values that are not finite, `CurvatureError` for an
    indefinite covariance or a bridge without variance.
    """
    if isinstance(likelihood, likelihoods.Censored):
        # The prediction is of the uncensored value itself.
        found = predictive(likelihood.base, mean, covariance, kind, draws=draws, seed=seed)
        return replace(found, censored=True)
    mean, dense = np.asarray(mean, dtype=float), not isinstance(covariance, RowCovariances)
    covariances = DenseRows(np.asarray(covariance, dtype=float)) if dense else covariance
    # The other entries of a covariance are finite if its variances are.
    finite = (
        np.isfinite(mean).all()
        and np.isfinite(covariances.dense() if dense else covariances.variances()).all()
    )
    expected, advice = "a finite mean and covariance of the predictor", "inputs nearer to the data"
    InputError.check(finite, "", expected, "NaN or infinity", advice)
    if kind == "linearised":
        return _linearised(likelihood, mean, covariances, draws, seed)
    binary, halves = isinstance(likelihood, likelihoods.Bernoulli), np.array([-0.5, 0.5])
    # One logit is the difference of two that sum to zero.
    logits = mean, covariances
    if binary:
        logits = mean * halves, DenseRows(covariances.dense() * np.outer(halves, halves))
    if kind.startswith("bridge"):
        probs, expected_entropy = _bridge(*logits, normalise=kind == "bridge_norm")
    else:
        probs = _probit(*logits, differences=binary or kind == "probit_covariance")
        expected_entropy = _expected_entropy(likelihood, mean, covariances, draws, seed)
    entropy = entropy_of(probs)
    within = np.clip(entropy - expected_entropy, 0.0, entropy)[None]
    family, probs = ("Bernoulli", probs[:, 1]) if binary else ("Categorical", probs)
    return Prediction(family, {"probs": probs[None]}, epistemic_within=within)


def _is_gaussian(likelihood: Any) -> bool:
    return isinstance(likelihood, likelihoods.Gaussian | likelihoods.HeteroscedasticGaussian)


# --- the integral itself ----------------------------------------------------------------------------------


def _linearised(
    likelihood: Any, mean: Array, covariance: RowCovariances, draws: int, seed: int
) -> Prediction:
    if isinstance(likelihood, likelihoods.Bernoulli):
        sd = np.sqrt(covariance.variances()[:, 0])
        nodes, log_weights = _logit_rule(float(sd.max()))
        probs = scipy.special.expit(mean[:, 0] + sd * nodes[:, None])
        return Prediction("Bernoulli", {"probs": probs}, log_weights=log_weights)
    if _is_gaussian(likelihood):
        prediction = _normal_over_log_noise(mean, covariance.dense())
        if prediction is not None:
            return prediction
    # mean_n + W_n z_s, (S, N, D).
    eta = covariance.colour(_normal_points(draws, covariance.dimension, seed))
    eta += mean
    if not _is_gaussian(likelihood):
        return Prediction(*likelihood.mixture_parameters(eta))
    # Draws belong to one row here: Gaussian.mixture_parameters may take the noise of a draw from its first row.
    outputs = mean.shape[1] // 2
    loc, scale = eta[..., :outputs], np.exp(eta[..., outputs:])
    return Prediction("Normal", {"loc": loc, "scale": scale})


def _normal_over_log_noise(mean: np.ndarray, covariance: np.ndarray) -> Prediction | None:
    """Closed form or quadrature for normal outputs; None if log noises move in more than one direction.

    log noise_k = l_k + a_k z with z ~ N(0, 1); then f_k given z is N(f_k + c_k z, var(f_k) - c_k^2), c_k = cov(f_k, z).
    """
    outputs = mean.shape[1] // 2
    f, log_noise = mean[:, :outputs], mean[:, outputs:]
    var_f, var_noise = variances_of(covariance)[:, :outputs], variances_of(covariance)[:, outputs:]

    def prediction(loc: np.ndarray, within: np.ndarray, scale: np.ndarray, log_weights: Any) -> Prediction:
        within = np.broadcast_to(within, loc.shape)
        if outputs == 1:
            loc, within, scale = loc[..., 0], within[..., 0], scale[..., 0]
        return Prediction("Normal", {"loc": loc, "scale": scale}, log_weights, within.copy())

    if var_noise.max() < KNOWN:
        return prediction(f[None], var_f[None], np.hypot(np.sqrt(var_f), np.exp(log_noise))[None], None)
    noise_block = covariance[:, outputs:, outputs:]
    rows, first = np.arange(len(mean)), var_noise.argmax(axis=1)
    sd = np.sqrt(var_noise[rows, first])
    inverse = np.divide(1.0, sd, out=np.zeros_like(sd), where=sd > 0.0)[:, None]
    slope_noise = noise_block[rows, :, first] * inverse
    rest = noise_block - slope_noise[:, :, None] * slope_noise[:, None, :]
    if (np.abs(rest).max(axis=(1, 2)) > 1e-9 * sd**2 + KNOWN).any():
        return None
    slope_f = covariance[rows, :outputs, outputs + first] * inverse
    within = np.maximum(var_f - slope_f**2, 0.0)
    # A density in y moves with z as f does, and is sharper in z if less spread remains given z.
    shift = 0.35 * np.abs(slope_f) / np.hypot(np.sqrt(within), np.exp(log_noise))
    nodes, log_weights = _log_noise_rule(float(sd.max()), float((sd + shift.max(axis=1)).max()))
    z = nodes[:, None, None]
    log_scale = log_noise + slope_noise * z
    _check_noise(log_scale.max() <= 300.0, float(sd.max()))
    scale = np.hypot(np.sqrt(within), np.exp(log_scale))
    return prediction(f + slope_f * z, within[None], scale, log_weights)


def _check_noise(finite: object, sd: float) -> None:
    """Raise `CurvatureError` if log noise with standard deviations up to `sd` gives y no finite variance."""
    expected = "log noise whose variance leaves the variance of y finite"
    advice = "more rows, a tighter prior on the noise, or inputs nearer to the data"
    CurvatureError.check(finite, "", expected, f"a standard deviation of log noise up to {sd:.3g}", advice)


def _log_noise_rule(sd: float, sharpness: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in units of the standard deviation of log noise, and log weights, for functions of exp(sd z).

    sharpness: the inverse width in z of the densities in y, at least sd. Gauss-Hermite if it is below 0.25; above that
    its nodes are too far apart, and the trapezoidal rule is used (Trefethen and Weideman 2014). It reaches 8 standard
    deviations beyond 2 sd, where the variance of y has its mass.
    """
    if sharpness <= 0.25:
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        return nodes, np.log(weights / weights.sum())
    return _trapezoid(min(0.25 / sharpness, 0.5), 8.0 + 2.0 * min(sd, 4.0))


def _logit_rule(sd: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in standard deviations of a logit, and log weights, for functions of sigmoid(f + sd z).

    The trapezoidal rule: with poles at distance c = pi / sd from the real axis its error is about exp(c^2 / 2 - 2 pi c
    / spacing), here exp(-23). An equally accurate Gauss-Hermite rule has thousands of nodes at sd = 20.
    """
    # Beyond 6 the error is that of exp(-x^2 / 2) and not of the poles, and needs no spacing below 0.6.
    distance = min(math.pi / sd, 6.0) if sd > 0.0 else 6.0
    return _trapezoid(min(0.6, 2.0 * math.pi * distance / (23.0 + 0.5 * distance**2)), 7.0)


def _trapezoid(spacing: float, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Equally spaced nodes on [-reach, reach] at most `spacing` apart, with the logarithms of N(0, 1) weights."""
    count = min(math.ceil(2.0 * reach / spacing) + 1, MOST_NODES)
    nodes = np.linspace(-reach, reach, count)
    log_weights = -0.5 * nodes**2
    return nodes, log_weights - math.log(np.exp(log_weights).sum())


def _expected_entropy(
    likelihood: Any, mean: Array, covariance: RowCovariances, draws: int, seed: int
) -> Array:
    """E[H(p)] (N,) over the Gaussian, by the rule of "linearised"."""
    if not isinstance(covariance, DenseRows):
        # An entropy over many classes varies little between points.
        return _linearised(likelihood, mean, covariance, min(draws, FEW_DRAWS), seed).aleatoric
    binary = isinstance(likelihood, likelihoods.Bernoulli)
    size = max(1, BLOCK // (MOST_NODES if binary else draws * mean.shape[1]))
    parts = ((mean[i:j], DenseRows(covariance.values[i:j])) for i, j in chunks(len(mean), size))
    return np.concatenate([_linearised(likelihood, *part, draws, seed).aleatoric for part in parts])


@lru_cache(maxsize=2)
def _normal_points(count: int, dimension: int, seed: int) -> np.ndarray:
    """`count` scrambled Sobol points in `dimension` dimensions as standard normals, (count, dimension), read-only.

    Independent normals beyond the dimensions for which SciPy has Sobol points.
    """
    if dimension > scipy.stats.qmc.Sobol.MAXDIM:
        return _read_only(np.random.default_rng(seed).standard_normal((count, dimension)))
    engine = scipy.stats.qmc.Sobol(dimension, scramble=True, rng=np.random.default_rng(seed))
    uniform = engine.random_base2(max(0, math.ceil(math.log2(count))))[:count]
    # A point may fall on 0 itself; half of the finest spacing (2^-30 in SciPy) keeps it finite.
    return _read_only(scipy.special.ndtri(np.clip(uniform, 2.0**-31, 1.0 - 2.0**-31)))


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


# --- approximations for classes ---------------------------------------------------------------------------


def _kappa(variance: np.ndarray) -> np.ndarray:
    return 1.0 / np.sqrt(1.0 + np.pi / 8.0 * variance)


def _probit(mean: np.ndarray, covariances: RowCovariances, differences: bool) -> np.ndarray:
    """Class probabilities (N, C) of the kinds "probit" and "probit_covariance", which are one for two logits."""
    variances = covariances.variances()
    if not differences:
        return scipy.special.softmax(_kappa(variances) * mean, axis=-1)
    covariance = covariances.dense()
    spread = np.maximum(variances[:, :, None] + variances[:, None, :] - 2.0 * covariance, 0.0)
    gaps = (mean[:, :, None] - mean[:, None, :]) * _kappa(spread)
    return scipy.special.softmax(-scipy.special.logsumexp(-gaps, axis=-1), axis=-1)


def _bridge(mean: Array, covariance: RowCovariances, normalise: bool) -> tuple[Array, Array]:
    """Mean (N, C) and expected entropy (N,) of the Dirichlet of the Laplace bridge."""
    row_sums, variances = covariance.sums(), covariance.variances()
    total = row_sums.sum(axis=-1, keepdims=True)
    trace = variances.sum(axis=-1, keepdims=True)
    # Logits that sum to a constant already have S1 = 0: there is nothing to condition on.
    share = np.divide(row_sums, total, out=np.zeros_like(row_sums), where=total > 1e-12 * trace)
    mean = mean - share * mean.sum(axis=-1, keepdims=True)
    variances = variances - share * row_sums
    lost = variances.min(axis=-1) <= 1e-12 * trace[:, 0]
    expected = "logits whose differences have a variance, for the Laplace bridge"
    got = f"none in {np.count_nonzero(lost)} of {len(lost)} rows, the first being {int(np.argmax(lost))}"
    CurvatureError.check(not lost.any(), "", expected, got, "kind='linearised' or kind='probit'")
    classes = mean.shape[1]
    if normalise:
        size = variances.mean(axis=-1, keepdims=True) * math.sqrt(2.0 / classes)
        mean, variances = mean / np.sqrt(size), variances / size
    # In logarithms, as exp(m_c - m_j) overflows for logits that are far apart.
    log_alpha = mean + scipy.special.logsumexp(-mean, axis=-1, keepdims=True) - 2.0 * math.log(classes)
    if classes > 2:
        log_alpha = np.logaddexp(math.log1p(-2.0 / classes), log_alpha)
    log_alpha = log_alpha - np.log(variances)
    probs = scipy.special.softmax(log_alpha, axis=-1)
    # E[H] of a Dirichlet: psi(alpha_0 + 1) - sum_c alpha_c / alpha_0 psi(alpha_c + 1).
    each = np.sum(probs * _digamma_of_next(log_alpha), axis=-1)
    return probs, _digamma_of_next(np.asarray(scipy.special.logsumexp(log_alpha, axis=-1))) - each


def _digamma_of_next(log_alpha: np.ndarray) -> np.ndarray:
    """psi(alpha + 1) from log alpha; beyond exp(37) the two are equal in double precision."""
    alpha = np.exp(np.minimum(log_alpha, 37.0))
    return np.where(log_alpha > 37.0, log_alpha, scipy.special.digamma(alpha + 1.0))


# --- several rows at once ---------------------------------------------------------------------------------


def joint_predictive(likelihood: Any, mean: Any, joint: np.ndarray) -> JointPrediction:
    """Mean and covariance of f, and of y for normal likelihoods, over all rows together.

    mean is (N, D), joint (N D, N D): position n D + d is column d of row n. For Gaussian likelihoods f is the first
    half of the columns and Cov(y) = Cov(f) + diag(exp(2 l + 2 var(l))) with l the mean of log noise, by the law of
    total variance; with known noise y is normal. For other likelihoods f is all columns.
    """
    if isinstance(likelihood, likelihoods.Censored):
        likelihood = likelihood.base
    mean = np.asarray(mean, dtype=float)
    if not _is_gaussian(likelihood):
        return JointPrediction(mean.reshape(-1), joint.copy(), None)
    outputs, rows = mean.shape[1] // 2, np.arange(len(mean))
    joint = joint.reshape(*mean.shape, *mean.shape)
    f = joint[:, :outputs, :, :outputs].reshape(outputs * len(rows), -1)
    noise_variances = variances_of(joint[rows, :, rows, :])[:, outputs:]
    with np.errstate(over="ignore"):
        noise = np.exp(2.0 * (mean[:, outputs:] + noise_variances)).reshape(-1)
    _check_noise(np.isfinite(noise).all(), float(np.sqrt(noise_variances.max())))
    return JointPrediction(mean[:, :outputs].reshape(-1), f, f + np.diag(noise))
