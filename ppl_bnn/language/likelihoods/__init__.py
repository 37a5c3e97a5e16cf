"""Likelihoods: from the network output f to the distribution of y.

Each likelihood has

- `distribution(f)`: the distribution of y, for the systems;
- `predictor(f)`: eta (N, D), all parameters of the distribution of a row. It includes the log noise, (f, log noise)
  for a Gaussian, so that a Laplace approximation covers known, sampled and predicted noise with the same Jacobians;
- `fisher(eta)`: (N, D, D), the Fisher information of p(y | eta) in eta, never indefinite;
- `fisher_root(eta)`: (N, D, C), R with R R' the Fisher information;
- `score(eta, y)`: (N, D), the gradient of log p(y | eta) in eta, with mean 0 and covariance the Fisher information;
- `mixture_parameters(eta)`: family and parameters for `Prediction`, in NumPy, for eta of shape (..., N, D);
- `form`: the same likelihood without the values of one run; all of the above but the first two need only this.

`Likelihood` has defaults of everything else: `check_values(y)` refuses targets (NumPy) that have no probability;
`standardises`, `columns_with_units`, `has_fisher` and `has_kink` describe the targets and the density.
`information_root(eta, y)` (`HasObservedInformation`) replaces `fisher_root` where the information of a row depends on
how it was observed. Gauss-Newton curvature, linearised prediction and the decomposition of uncertainty rely on the
separation of f and likelihood.
"""

from __future__ import annotations

from ppl_bnn.language.likelihoods.base import HasObservedInformation as HasObservedInformation
from ppl_bnn.language.likelihoods.base import Likelihood as Likelihood
from ppl_bnn.language.likelihoods.categorical import Bernoulli as Bernoulli
from ppl_bnn.language.likelihoods.categorical import Categorical as Categorical
from ppl_bnn.language.likelihoods.categorical import Ordinal as Ordinal
from ppl_bnn.language.likelihoods.counts import NegativeBinomial as NegativeBinomial
from ppl_bnn.language.likelihoods.counts import Poisson as Poisson
from ppl_bnn.language.likelihoods.multi_output import MultiOutputGaussian as MultiOutputGaussian
from ppl_bnn.language.likelihoods.noise import Gaussian as Gaussian
from ppl_bnn.language.likelihoods.noise import HeteroscedasticGaussian as HeteroscedasticGaussian
from ppl_bnn.language.likelihoods.noise import Laplace as Laplace
from ppl_bnn.language.likelihoods.noise import MixtureDensity as MixtureDensity
from ppl_bnn.language.likelihoods.noise import StudentT as StudentT
from ppl_bnn.language.likelihoods.survival import Censored as Censored
from ppl_bnn.language.likelihoods.survival import Weibull as Weibull
