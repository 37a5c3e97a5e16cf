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
    name: bnn.fit(model, x, y, bnn.SVI(guide=guide, steps=4000, learning_rate=0.01, elbo_draws=200))
    for name, guide in guides.items()
}
for name, posterior in posteriors.items():
    print(f"{name:20} ELBO {posterior.info.figures['elbo']:7.1f}, {posterior.info.run_seconds:.1f} s")

# %%
# The bands show what the guide leaves out: in the gap, independent weights cannot spread.
grid = np.linspace(-3.0, 3.0, 200)[:, None]
figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
for ax, (name, posterior) in zip(axes, posteriors.items(), strict=True):
    low, high = posterior.predict(grid).interval(0.9)
    ax.fill_between(grid[:, 0], low, high, alpha=0.3, linewidth=0)
    ax.plot(x[:, 0], y, ".", color="black", markersize=4)
    ax.set(title=name, xlabel="x", ylim=(-3, 3))
axes[0].set_ylabel("y, 90 % interval")
plt.show()

# %%
# Whether the bound has settled is visible in its history, and ``diagnose`` says it in words.
print(bnn.diagnose(posteriors["full rank"]))
