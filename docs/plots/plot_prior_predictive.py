"""
Prior predictive
================

``bnn.plot.prior_predictive`` draws what a prior expects, before any fit, beside the observed targets.
"""

# %%
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

rng = np.random.default_rng(0)
x = np.concatenate([rng.uniform(-2.0, -0.7, 30), rng.uniform(0.6, 2.0, 30)])[:, None]
y = np.sin(2.0 * x[:, 0]) + 0.2 * rng.normal(size=60)

# %%
# Mean functions of some draws in the 90 % band of observations, for three scales of the weights.
figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
for ax, sigma in zip(axes, (0.5, 2.0, 10.0), strict=True):
    model = bnn.zoo.load("regression_mlp", width=20, sigma=sigma)
    bnn.plot.prior_predictive(bnn.prior_predictive(model, x, y), ax=ax)
    ax.set_title(f"sigma = {sigma:g}")
plt.show()

# %%
# With several inputs: central intervals of each row.
table = bnn.data.load("diabetes")
prior = bnn.prior_predictive(bnn.zoo.load("regression_mlp"), table.x, table.y, standardise=True)
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.prior_predictive(prior, target_name="progression", ax=ax)
plt.show()
