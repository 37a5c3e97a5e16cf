"""
Variational inference beyond mean-field
=======================================

A mean-field guide treats weights as independent. How much does a richer guide gain, and what does it cost?
"""

# %%
# The guide is one argument: a name, or a dict by layer. The evidence lower bound compares guides of one model: the
# larger it is, the nearer is the guide to the posterior, in the sense of the Kullback-Leibler divergence.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

rng = np.random.default_rng(1)
x = np.concatenate([rng.uniform(-2.0, -0.7, 20), rng.uniform(0.6, 2.0, 20)])[:, None]
y = np.sin(2.0 * x[:, 0]) + 0.1 * rng.normal(size=40)
model = bnn.zoo.load("regression_mlp", width=8, sigma=2.0, noise_scale=0.3)

guides = {
    "normal": "normal",
    "last layer jointly": {"output": "fullrank", "*": "normal"},
    "full rank": "fullrank",
}
posteriors = {
    name: bnn.fit(model, x, y, bnn.SVI(guide=guide, steps=8000, learning_rate=0.02, elbo_draws=200))
    for name, guide in guides.items()
}
for name, posterior in posteriors.items():
    print(f"{name:20} ELBO {posterior.info.figures['elbo']:7.1f}, {posterior.info.run_seconds:.1f} s")

# %%
# The bands show what the guide leaves out: in the gap, independent weights cannot spread.
figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), sharey=True, layout="constrained")
for ax, (name, posterior) in zip(axes, posteriors.items(), strict=True):
    bnn.plot.predictive(posterior, ax=ax)
    ax.set(title=name, ylim=(-3, 3))
    if ax is not axes[0]:
        ax.get_legend().remove()
plt.show()

# %%
# Whether the bound has settled is visible in its history, and ``diagnose`` says it in words.
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
bnn.plot.loss(posteriors["full rank"], ax=ax)
plt.show()
print(bnn.diagnose(posteriors["full rank"]))
