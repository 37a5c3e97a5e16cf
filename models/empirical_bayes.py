"""Two classes by a relu network whose prior has a scale for each weight, set by the fit itself.

    w_k ~ N(0, s_k^2), with s_k at its optimum under the approximation q
    h_n = relu(x_n W1 + b1)          P(y_n = 1 | x_n) = 1 / (1 + exp(-(h_n W2 + b2)))         H = width hidden units

For q(w_k) = N(mu_k, sigma_k^2) that optimum is s_k^2 = mu_k^2 + sigma_k^2, and the divergence
1/2 sum_k log(1 + mu_k^2 / sigma_k^2): a weight without a mean costs nothing.

Sizes: (F + 2) H + 1 numbers (641 on its default data), and as many scales, which are not counted.
Default data: breast_cancer (569 rows, 30 features, 2 classes), standardised. The study of it is on `alzheimers`.
Source: D. Basov, Bayesian neural networks (in Russian, a public note with its repository); scales for whole tensors,
`per="tensor"`, in A. Wu et al., Deterministic variational inference for robust Bayesian neural networks (2019).

What is hard about its posterior: it has none until a variational fit has found the scales, so `SVI` and ensembles of it
serve it, and all other methods refuse it by name (`transforms.with_prior_scales` is the model at the scales found, for
them). The bound is one on log p(y | s) with as many free scales as weights, which nothing charges for: it is no
evidence to choose a width by. The optima are far apart: some starts find a fit that uses the features and some leave
most weights idle, so several are needed (`SVI(restarts=)`), and the bound tells them apart.
"""

from __future__ import annotations

from typing import Any

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

DATA = "breast_cancer"


def model(x: Any, y: Any = None, *, width: int = 20, per: str = "weight") -> None:
    """One hidden layer of `width` relu units and one logit; `per`: "weight", "unit" or "tensor" shares a scale.

    x: (N, F). y: (N,), labels 0 and 1.
    """
    a = bnn.mlp(x, [width, 1], "relu", priors.EmpiricalBayes(per))
    bnn.observe(y, a, likelihoods.Bernoulli())
