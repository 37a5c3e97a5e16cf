"""Likelihoods: from the network's output f to the distribution of y.

Keeping f and the likelihood apart is what makes Gauss-Newton curvature, linearised prediction and the split into
aleatoric and epistemic uncertainty possible. Each likelihood gives

- `distribution(f)`: the distribution of y, for the systems;
- `predictor(f)`: eta (N, D), all parameters of the distribution of a row. It includes the log noise, (f, log noise)
  for a Gaussian, so that known, sampled and predicted noise are one case: a Laplace approximation covers the noise
  with the same Jacobians, and nothing in it is specific to a Gaussian;
- `fisher(eta)`: (N, D, D), the Fisher information of p(y | eta) in eta, never indefinite;
- `fisher_root(eta)`: (N, D, C), R with R R' the Fisher information;
- `score(eta, y)`: (N, D), the gradient of log p(y | eta) in eta, with mean 0 and covariance the Fisher information;
- `mixture_parameters(eta)`: family and parameters for `Prediction`, in NumPy, for eta of shape (..., N, D);
- `form`: the same likelihood without the values of one run, which is all that all but the first two need.

Some have more: `check_values(y)` refuses targets (NumPy) that have no probability; `standardises = False` says that
targets have no units to change, as counts; `columns_with_units`, how many of the first columns of y have, where the
others are marks; `has_fisher = False`, that the Fisher information has no closed form; `information_root(eta, y)` takes
the place of `fisher_root` where what a row tells depends on what was seen of it.
"""

from __future__ import annotations

from ppl_bnn.language.likelihoods.categorical import Bernoulli, Categorical, Ordinal
from ppl_bnn.language.likelihoods.counts import NegativeBinomial, Poisson
from ppl_bnn.language.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from ppl_bnn.language.likelihoods.heavy_tails import Laplace, StudentT
from ppl_bnn.language.likelihoods.mixture_density import MixtureDensity
from ppl_bnn.language.likelihoods.multi_output import MultiOutputGaussian
from ppl_bnn.language.likelihoods.survival import Censored, Weibull

__all__ = [
    "Bernoulli",
    "Categorical",
    "Censored",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Laplace",
    "MixtureDensity",
    "MultiOutputGaussian",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "StudentT",
    "Weibull",
]
