"""
Add a method, a model, a reference
==================================

A method is one class, a model is one file, a reference is one entry and one command.
"""

# %%
# A method is a frozen dataclass with its settings. ``run`` receives a problem: a model bound to its data, inside a
# session of one system. It returns an approximation. This one resamples draws from the prior in proportion to their
# likelihood, which is exact for a few weights and useless for many.
from dataclasses import dataclass

import numpy as np

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.settings import setting, whole
from ppl_bnn.inference.cost import Effort
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.posterior.approximation import Drawn


@dataclass(frozen=True)
class Resampling(Method):
    """Draws from the prior, drawn again in proportion to their likelihood."""

    proposals: int = setting(20_000, whole())
    draws: int = setting(1000, whole())
    limitations = "A few draws carry all the weight beyond a handful of weights."

    def effort(self, size):
        return Effort.exactly(0.0)

    def run(self, problem, progress):
        u = problem.program.prior_draws(problem.x, problem.y, problem.seed, self.proposals)
        log_likelihood = problem.log_joint_draws(u) - problem.log_prior_draws(u)
        weights = np.exp(log_likelihood - log_likelihood.max())
        weights /= weights.sum()
        chosen = np.random.default_rng(problem.seed).choice(self.proposals, self.draws, p=weights)
        figures = {"effective_proposals": float(1.0 / np.sum(weights**2))}
        return Outcome(Drawn({name: value[chosen] for name, value in u.items()}), figures=figures)


# %%
# It is a method like any other: ``fit``, ``compare``, ``diagnose`` and the grids take it.
def line(x, y=None):
    f = bnn.dense("line", x, 1, prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(0.5))


rng = np.random.default_rng(0)
x = rng.normal(size=(30, 1))
y = 0.8 * x[:, 0] + 0.5 * rng.normal(size=30)
posterior = bnn.fit(line, x, y, Resampling())
print(posterior.info.figures)

# %%
# This model has a posterior in closed form, which the draws have to meet.
design = np.column_stack([x, np.ones(30)])
covariance = np.linalg.inv(design.T @ design / 0.25 + np.eye(2))
mean = covariance @ design.T @ y / 0.25
draws = posterior.draws
print(
    "mean ", mean.round(3), "drawn", draws["line.weight"].mean().round(3), draws["line.bias"].mean().round(3)
)

# %%
# To make it part of the library, give it a line in ``ppl_bnn/inference/registry.py`` and a row in
# ``tests/problems.py``; the conformance tests then try it on every model. A model of the zoo is a file in ``models/``
# whose docstring is its card. A reference posterior is a table in ``comparisons/references/entries.toml``:
#
# .. code-block:: toml
#
#    [regression_mlp-curve]
#    model = "regression_mlp"
#    data = "curve_with_a_gap"
#    rows = 40
#
# and one command, ``python comparisons/references.py make regression_mlp-curve``, which runs the samplers and checks
# the certificate. The guide for contributors has the details.
