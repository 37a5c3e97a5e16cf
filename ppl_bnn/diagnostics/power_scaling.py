"""Power-scaling: how strongly the function depends on the prior, and on the data.

The posterior with the prior to the power a is p_a(w | D) ~ p(w)^a p(D | w), and likewise for the likelihood. With
draws of p, Pareto-smoothed weights p(w)^(a - 1) give p_a without another fit. The sensitivity of an output f of the
network is the rate at which its distribution moves, measured by the cumulative Jensen-Shannon distance CJS,

    (CJS(p_1, p_a) / log2 a - CJS(p_1, p_b) / log2 b) / 2,      a = 1.01, b = 0.99.

ArviZ computes it. The prior is that of all sites together, in the program's coordinates, where powers need no Jacobian.
Single weights would say little: units can be exchanged, and many weights give one function.

Kallioinen, Paananen, Buerkner and Vehtari 2024, Statistics and Computing 34, 57.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.diagnostics.function_space import probe_rows
from ppl_bnn.posterior.approximation import flat_draws
from ppl_bnn.posterior.convergence import FUNCTIONS, PROBES, evenly_spaced
from ppl_bnn.posterior.export import site_log_priors

# That of the paper and of ArviZ.
LIMIT = 0.05


@dataclass(frozen=True)
class Sensitivity:
    """Sensitivities of the outputs at the probe rows, made by `power_scaling`.

    Parameters
    ----------
    prior, likelihood : ndarray
        One number per output, (C,).
    """

    prior: np.ndarray
    likelihood: np.ndarray

    @property
    def figures(self) -> dict[str, float]:
        """The largest sensitivity to the prior, the smallest to the likelihood, and shares of outputs."""
        strong, weak = self.prior > LIMIT, self.likelihood <= LIMIT
        return {
            "prior_sensitivity": float(self.prior.max()),
            "likelihood_sensitivity": float(self.likelihood.min()),
            "prior_conflict_share": float(np.mean(strong & ~weak)),
            "prior_dominance_share": float(np.mean(strong & weak)),
        }

    @property
    def findings(self) -> list[str]:
        """What the figures say, one sentence each."""
        figures, count = self.figures, len(self.prior)
        largest = (
            f"the largest sensitivity of f to the power of the prior is {figures['prior_sensitivity']:.3f}"
        )
        smallest = f"the smallest to that of the likelihood {figures['likelihood_sensitivity']:.3f}"
        found = [f"{largest}, {smallest}, over {count} outputs at training rows"]
        for name, words in (
            ("prior_conflict_share", "both prior and likelihood, which may be in conflict"),
            (
                "prior_dominance_share",
                "the prior and not to the likelihood: the prior is strong, or the data say little",
            ),
        ):
            if figures[name]:
                found.append(f"{figures[name]:.0%} of these outputs are sensitive (above {LIMIT}) to {words}")
        return found


def power_scaling(posterior: Any) -> Sensitivity:
    """Sensitivity of f at up to 200 outputs at training rows to the powers of prior and likelihood.

    Raises UnsupportedError for a point, for weighted chains, and for chains of another target than the posterior.
    """
    from arviz_stats.psense import psense

    got = f"{posterior.info.method}, of kind {posterior.kind!r}"
    expected, advice = (
        "draws of the posterior, all counted alike",
        "a sampler, or an approximation with draws",
    )
    known = posterior.kind != "point" and posterior.weights is None and not posterior.info.target
    UnsupportedError.check(known, "sensitivity", expected, posterior.info.target or got, advice)
    f = posterior.predictor(probe_rows(posterior, PROBES))
    f = f.reshape(*f.shape[:2], -1)
    f = f[..., evenly_spaced(f.shape[-1], FUNCTIONS)]
    # An output that does not vary has no distribution to move.
    f = f[..., np.ptp(f, axis=(0, 1)) > 0.0]
    varies, advice = f.shape[-1] > 0, "a sampler that moves"
    UnsupportedError.check(varies, "sensitivity", "outputs that vary over the draws", "constant ones", advice)
    u = flat_draws(posterior.unconstrained_draws)
    priors = posterior.with_problem(lambda problem: site_log_priors(problem, u))
    log_prior = np.sum(list(priors.values()), axis=0).reshape(posterior.shape)
    tree = _tree(f, log_prior, posterior.log_likelihood().sum(axis=-1))
    prior, likelihood = (np.asarray(psense(tree, group=group)["f"]) for group in ("prior", "likelihood"))
    return Sensitivity(prior, likelihood)


def _tree(f: np.ndarray, log_prior: np.ndarray, log_likelihood: np.ndarray) -> Any:
    """What ArviZ reads: the outputs as a variable, and both log densities of each draw."""
    from xarray import Dataset, DataTree

    chains = ("chain", "draw")
    groups = {
        "posterior": {"f": ((*chains, "output"), f)},
        "log_prior": {"all": (chains, log_prior)},
        "log_likelihood": {"all": (chains, log_likelihood)},
    }
    return DataTree.from_dict({name: Dataset(variables) for name, variables in groups.items()})
