"""Mixtures of normals: multimodal noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution
from ppl_bnn.language.likelihoods.base import Likelihood, parts


@dataclass(frozen=True)
class MixtureDensity(Likelihood):
    """Mixture density network, p(y) = sum_m w_m N(y; mean_m, scale_m^2) (Bishop 1994).

    All parameters are outputs of the network, so that y may be multimodal given x. f is (N, 3M): M logits of the
    weights w = softmax(.), M means, M scale outputs, scale = softplus(.). y is (N,). eta = (logits, means, log scales),
    D = 3M. Components are exchangeable, so modes come in M! copies.

    Notes
    -----
    The Fisher information has no closed form. `Laplace(fisher="sampled")` estimates it from targets drawn at each row,
    without bias; `Laplace(curvature="empirical")` and "hessian" do not need it.

    References
    ----------
    Bishop (1994), Mixture density networks.
    """

    outputs = (
        lambda k: k % 3 == 0 and k >= 6,
        "3 M network outputs for M >= 2 components (logits, means, scales)",
        "6 outputs for two components, HeteroscedasticGaussian() for one",
    )

    @property
    def has_fisher(self) -> bool:
        return False

    def distribution(self, f: Any) -> Distribution:
        logits, means, scales = parts(f, 3)
        return dist.distribution("MixtureOfNormals", logits, means, ops.softplus(scales))

    def predictor(self, f: Any) -> Any:
        logits, means, scales = parts(f, 3)
        return ops.concatenate([logits, means, ops.log(ops.softplus(scales))])

    def fisher_root(self, eta: Any) -> Any:
        expected = "a likelihood whose Fisher information has a closed form"
        advice = "Laplace(fisher='sampled'), or curvature='empirical' or 'hessian'"
        raise UnsupportedError.of(self.family, expected, "a mixture of normals", advice)

    def score(self, eta: Any, y: Any) -> Any:
        logits, means, log_scales = parts(eta, 3)
        precision = ops.exp(-log_scales)
        z = (y[:, None] - means) * precision
        share = ops.softmax(logits - log_scales - 0.5 * z**2)
        return ops.concatenate([share - ops.softmax(logits), share * z * precision, share * (z**2 - 1.0)])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        logits, means, log_scales = parts(eta, 3)
        weights, scale = ops.softmax(logits), ops.exp(log_scales)
        return "NormalMixture", {"weights": weights, "loc": means, "scale": scale}
