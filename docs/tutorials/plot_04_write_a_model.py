"""
Write a model
=============

From a linear regression to a network with its own noise, in the language that both systems share.
"""

# %%
# ``sample`` names an unknown with its prior, ``linear`` and ``dense`` apply weights, and ``observe`` ends the model.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors

rng = np.random.default_rng(0)
x = rng.uniform(-2.0, 2.0, 120)[:, None]
y = np.sin(2.0 * x[:, 0]) + 0.05 * np.exp(x[:, 0]) * rng.normal(size=120)


def line(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    f = bnn.dense("line", x, 1, prior=priors.Normal(0.0, 1.0))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


# %%
# Hidden layers with different priors: a learned scale for the input weights, heavy tails for the output.
def network(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    h = ops.tanh(bnn.dense("hidden", x, 15, prior=priors.Hierarchical()))
    f = bnn.dense("output", h, 1, prior=priors.StudentT(4.0, 0.0, "fan_in"))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


# %%
# The noise grows with x. Two outputs, the second of which is the noise:
def own_noise(x, y=None):
    f = bnn.mlp(x, [15, 2], activation="tanh", prior=priors.Normal(0.0, "fan_in", 2.0))
    bnn.observe(y, f, likelihoods.HeteroscedasticGaussian())


# %%
# The sites of a model, as the language sees them:
for site in bnn.zoo.sketch(network, 1).sites:
    print(f"{site.name:24} {site.prior:22} {site.shape}")

# %%
# Two of them by the same method, scored on fresh rows.
x_new = rng.uniform(-2.0, 2.0, 120)[:, None]
y_new = np.sin(2.0 * x_new[:, 0]) + 0.05 * np.exp(x_new[:, 0]) * rng.normal(size=120)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
for ax, model in zip(axes, (network, own_noise), strict=True):
    posterior = bnn.fit(model, x, y, bnn.Laplace())
    score = posterior.predict(x_new).log_prob(y_new).mean()
    bnn.plot.predictive(posterior, ax=ax)
    ax.set_title(f"{model.__name__}: log score {score:.2f}")
    if ax is not axes[0]:
        ax.get_legend().remove()
plt.show()
