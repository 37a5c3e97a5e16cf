"""The density of a network's features among those of the training rows: an uncertainty about the input.

With features z = h(x), the inputs of the last layer, and one normal distribution for the training rows of each class,

    log q(z) = log sum_c (N_c / N) N(z; m_c, S_c),

m_c and S_c the mean and the covariance in class c (Gaussian discriminant analysis). Rows unlike those of the fit have a
low density if the network keeps distances.

Mukhoti, Kirsch, van Amersfoort, Torr and Gal 2023, CVPR (DDU); Lee, Lee, Lee and Shin 2018, NeurIPS, with one
covariance for all classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import logsumexp

from ppl_bnn.backends.program import Problem
from ppl_bnn.core.arrays import chunks, map_data, row_count, rows_at
from ppl_bnn.core.errors import InputError, UnsupportedError
from ppl_bnn.core.settings import between, check_value, optional
from ppl_bnn.language.handlers import RecordLinear, network_output
from ppl_bnn.posterior.posterior import Posterior

# Rows of one pass through the network.
ROWS = 1000
# Largest ratio of the eigenvalues of a covariance: its inverse has about five correct figures then.
CONDITION = 1e10
WHERE = "feature_density"


@dataclass(frozen=True)
class FeatureDensity:
    """Normal distributions of features, made by `bnn.feature_density`.

    Parameters
    ----------
    posterior : Posterior
        The posterior whose network computes the features.
    weights : ndarray
        Share of each class among the training rows, (C,).
    means : ndarray
        Means of the features, (C, I).
    factors : ndarray
        Lower Cholesky factors of the covariances, (C, I, I), with the jitter.
    jitter : float
        The number added to the diagonals of the covariances.
    """

    posterior: Posterior = field(repr=False)
    weights: np.ndarray = field(repr=False)
    means: np.ndarray = field(repr=False)
    factors: np.ndarray = field(repr=False)
    jitter: float

    def log_density(self, x: Any) -> np.ndarray:
        """The log density of the features of rows.

        Parameters
        ----------
        x : array or dict of arrays
            Inputs, in the units of the data.

        Returns
        -------
        ndarray
            log q(h(x)) in nats, (N,). Its negative is an uncertainty for `bnn.scores.out_of_distribution`.
        """
        z, size = _features(self.posterior, self.posterior.fit_inputs(x)), self.means.shape[1]
        found = np.empty((len(self.weights), len(z)))
        for index, (mean, factor) in enumerate(zip(self.means, self.factors, strict=True)):
            standard = solve_triangular(factor, (z - mean).T, lower=True)
            found[index] = -0.5 * np.sum(standard**2, axis=0) - np.log(factor.diagonal()).sum()
        return logsumexp(found.T, axis=1, b=self.weights) - 0.5 * size * np.log(2.0 * np.pi)


def feature_density(posterior: Posterior, *, jitter: float | None = None) -> FeatureDensity:
    """Fit normal distributions to the features of the training rows, one for each class (DDU).

    The features are the inputs of the last linear map, at the centre of the approximation: the weights that MAP or
    Laplace found, or the means of a variational posterior. For a model of numbers there is one distribution.

    Parameters
    ----------
    posterior : Posterior
        A posterior at one network.
    jitter : float, optional
        Number added to the diagonal of each covariance, in units of the features squared. By default 0 where all
        covariances have eigenvalues whose ratio is at most 1e10, else the smallest number with which they have.

    Returns
    -------
    FeatureDensity
        Its `log_density(x)` is the density at other rows.

    Raises
    ------
    UnsupportedError
        The posterior has no single network, or no linear map at its end; its rows interact or have latent variables.
    InputError
        A class with a single row, or whose features are all the same.

    References
    ----------
    Mukhoti et al. (2023), Deep deterministic uncertainty: a new simple baseline.

    Examples
    --------
    >>> import ppl_bnn as bnn
    >>> table, model = bnn.data.load("iris"), bnn.zoo.load("classification_mlp", width=4, classes=3)
    >>> posterior = bnn.fit(model, table.x, table.y, bnn.MAP(steps=500), standardise=True, progress=False)
    >>> density = bnn.feature_density(posterior)
    >>> near, far = density.log_density(table.x[:5]), density.log_density(table.x[:5] + 10.0)
    >>> bool(near.min() > far.max())
    True
    """
    check_value(jitter, optional(between()), f"jitter of {WHERE}", "jitter=1e-3")
    approximation, targets = posterior.approximation, np.asarray(posterior.targets)
    single, expected = approximation.has_centre, "a posterior at one network"
    UnsupportedError.check(single, WHERE, expected, posterior.info.method, "bnn.MAP() or bnn.Laplace()")
    z = _features(posterior, posterior.inputs)
    classes = targets.reshape(-1) if posterior.task == "classification" else np.zeros(len(z))
    one, got = len(classes) == len(z), f"targets of shape {targets.shape}"
    UnsupportedError.check(one, WHERE, "one class for each row", got, "one output")
    labels, codes, counts = np.unique(classes, return_inverse=True, return_counts=True)
    few, got = counts.min() > 1, f"one row of class {labels[counts.argmin()]:g}"
    InputError.check(few, WHERE, "two rows of each class", got, "more rows, or classes put together")
    means = np.stack([z[codes == code].mean(0) for code in range(len(labels))])
    spreads = np.stack([np.atleast_2d(np.cov(z[codes == code], rowvar=False)) for code in range(len(labels))])
    eigenvalues = np.linalg.eigvalsh(spreads)
    least, most = eigenvalues[:, 0], eigenvalues[:, -1]
    # A mean is rounded, so that equal features have a spread of this order.
    rounding = 100.0 * np.finfo(float).eps * np.abs(z).max()
    varying, got = most.min() > rounding**2, f"the same in all rows of class {labels[most.argmin()]:g}"
    InputError.check(varying, WHERE, "features that vary in each class", got, "a network with more units")
    if jitter is None:
        jitter = max(0.0, float(((most - CONDITION * least) / (CONDITION - 1.0)).max()))
    factors = np.linalg.cholesky(spreads + jitter * np.eye(z.shape[1]))
    return FeatureDensity(posterior, counts / len(z), means, factors, jitter)


def _features(posterior: Posterior, x: Any) -> np.ndarray:
    """The inputs (N, I) of the last linear map at rows in the units of the fit, in float64."""

    def found(problem: Problem) -> np.ndarray:
        program, system = problem.program, problem.system
        good = program.language and not program.coupled and not program.has_local
        expected, advice = "a model of the language whose rows do not interact", "bnn.dense or bnn.mlp"
        UnsupportedError.check(good, WHERE, expected, "another one", advice)
        u = map_data(system.asarray, dict(posterior.approximation.centre()))
        w, parts = program.constrain(u, problem.x, problem.y), []
        for start, stop in chunks(row_count(x), ROWS):
            with RecordLinear(values=w) as record:
                run = network_output(
                    program.model, w, map_data(system.asarray, rows_at(x, slice(start, stop)))
                )
            last = bool(record.uses) and run.f is record.outputs[-1]
            z = record.inputs[record.uses[-1].name][-1] if last else None
            good = z is not None and len(z.shape) == 2
            UnsupportedError.check(
                good, WHERE, "a network with a dense layer at its end", "another one", advice
            )
            parts.append(np.asarray(system.to_numpy(z), dtype=np.float64))
        z = np.concatenate(parts)
        finite, got = np.isfinite(z).all(), "features that are not finite"
        InputError.check(finite, WHERE, "finite features", got, "inputs nearer to those of the fit")
        return z

    return posterior.with_problem(found)
