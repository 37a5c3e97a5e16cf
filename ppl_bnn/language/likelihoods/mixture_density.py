"""Mixtures of normals: multimodal noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppl_bnn.core.errors import ModelError, UnsupportedError
from ppl_bnn.language import distributions as dist
from ppl_bnn.language import ops
from ppl_bnn.language.distributions import Distribution
from ppl_bnn.language.likelihoods.arguments import check_targets


@dataclass(frozen=True)
class MixtureDensity:
    """Mixture density network, p(y) = sum_m w_m N(y; mean_m, scale_m^2) (Bishop 1994).

    All parameters are outputs of the network, so that one x may have several values of y. f is (N, 3M): M logits of the
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

    task = "regression"
    has_fisher = False

    @property
    def form(self) -> MixtureDensity:
        return self

    def check(self, f: tuple[int, ...], y: tuple[int, ...] | None) -> None:
        if f[1] % 3 or f[1] < 6:
            raise ModelError.of(
                "MixtureDensity",
                "3 M network outputs for M >= 2 components (logits, means, scales)",
                f"f of shape {f}",
                "6 outputs for two components, HeteroscedasticGaussian() for one",
            )
        check_targets("MixtureDensity", f, y, f[:1])

    def distribution(self, f: Any) -> Distribution:
        m = f.shape[-1] // 3
        return dist.distribution("MixtureOfNormals", f[:, :m], f[:, m : 2 * m], ops.softplus(f[:, 2 * m :]))

    def predictor(self, f: Any) -> Any:
        m = f.shape[-1] // 3
        return ops.concatenate([f[:, : 2 * m], ops.log(ops.softplus(f[:, 2 * m :]))])

    def fisher(self, eta: Any) -> Any:
        raise UnsupportedError.of(
            "MixtureDensity",
            "a likelihood whose Fisher information has a closed form",
            "a mixture of normals",
            "Laplace(fisher='sampled'), or curvature='empirical' or 'hessian'",
        )

    def fisher_root(self, eta: Any) -> Any:
        return self.fisher(eta)

    def score(self, eta: Any, y: Any) -> Any:
        m = eta.shape[-1] // 3
        logits, means, log_scales = eta[:, :m], eta[:, m : 2 * m], eta[:, 2 * m :]
        precision = ops.exp(-log_scales)
        z = (y[:, None] - means) * precision
        share = ops.softmax(logits - log_scales - 0.5 * z**2)
        return ops.concatenate([share - ops.softmax(logits), share * z * precision, share * (z**2 - 1.0)])

    def mixture_parameters(self, eta: Any) -> tuple[str, dict[str, Any]]:
        m = eta.shape[-1] // 3
        weights, scale = ops.softmax(eta[..., :m]), ops.exp(eta[..., 2 * m :])
        return "NormalMixture", {"weights": weights, "loc": eta[..., m : 2 * m], "scale": scale}
