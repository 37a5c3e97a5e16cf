"""
Priors and prior predictive checks
==================================

What does a model expect before it has seen a target? Draw it, and check it against the data, before any fit.
"""

# %%
# Mean functions drawn from the prior of one network, in the band of observations, with three scales of its weights.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

rng = np.random.default_rng(0)
x = rng.uniform(-2.0, 2.0, 60)[:, None]
y = np.sin(2.0 * x[:, 0]) + 0.1 * rng.normal(size=60)
figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
for ax, sigma in zip(axes, (0.5, 2.0, 10.0), strict=True):
    model = bnn.zoo.load("regression_mlp", width=20, sigma=sigma)
    bnn.plot.prior_predictive(bnn.prior_predictive(model, x, y), ax=ax)
    ax.set_title(f"sigma = {sigma:g}")
plt.show()

# %%
# ``check_prior`` compares what the prior expects with the data, and names what does not fit. Prior scales are meant for
# targets of size about 1. On the raw targets of a table, which are around 150:
table = bnn.data.load("diabetes")
model = bnn.zoo.load("regression_mlp")
print(bnn.check_prior(model, table.x, table.y))

# %%
# With standardised inputs and targets nothing is wrong.
print(bnn.check_prior(model, table.x, table.y, standardise=True))

# %%
# The first prior of the pictures above cannot bend enough, and the last one bends everywhere. The evidence compares
# them after a fit. Here by a Laplace approximation, whose prior precision can also be tuned, see the tutorial on
# Laplace.
for sigma in (0.5, 2.0, 10.0):
    posterior = bnn.fit(bnn.zoo.load("regression_mlp", width=20, sigma=sigma), x, y, bnn.Laplace())
    print(f"sigma = {sigma:4g}: log evidence {posterior.log_evidence:7.1f} nats")
