"""
What the diagnostics mean
=========================

Three fits by NUTS: one that has converged, one whose chains stay in different modes, and one that was too short.
"""

# %%
# Weights of a network are not identified, so ``diagnose`` judges functions: the network's outputs at rows, the log
# likelihood, and scales. Here is a linear regression, on which chains agree.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

table = bnn.data.load("diabetes")
train, test = table.split(seed=0)
x, y = table.x[train], table.y[train]
linear = bnn.zoo.load("linear_regression")
converged = bnn.fit(linear, x, y, bnn.NUTS(chains=4, warmup=300, draws=500), standardise=True)
print(bnn.diagnose(converged, x=table.x[test]))

# %%
# Below the limits that the library uses everywhere: R-hat under 1.01, an effective sample size above 400, for every
# function that is judged. ``x=`` judges the test rows, too.
#
# The next data have the shape of a hat, and the network one hidden unit: it can follow the left slope or the right one.
# Each chain finds one of them and stays.
hat = bnn.references.load("regression_mlp-hat")
x_hat, y_hat = hat.train
modes = bnn.fit(hat.model(), x_hat, y_hat, bnn.NUTS(chains=4, warmup=500, draws=1000), seed=1)
print(bnn.diagnose(modes))

# %%
# Look at the chains, one by one. The mean function of each chain:
grid = np.linspace(x_hat.min(), x_hat.max(), 200)[:, None]
f = modes.predictor(grid)[..., 0].reshape(4, -1, len(grid)).mean(axis=1)
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.plot(x_hat[:, 0], y_hat, ".", color="grey", label="data")
for chain, curve in enumerate(f):
    ax.plot(grid[:, 0], curve, label=f"chain {chain}")
ax.set(xlabel="x", ylabel="mean of f")
ax.legend(fontsize="small")
plt.show()

# %%
# The same in a trace: the chains never meet.
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
bnn.plot.trace(modes, ax=ax)
plt.show()

# %%
# Averages over such chains weight the modes by how many chains went where, not by their probability. ``SMC`` weights
# modes by their evidence, and ``Stacked`` by what they predict.
#
# The third fit is that of the first model again, but too short. The verdict says what to try.
short = bnn.fit(linear, x, y, bnn.NUTS(chains=4, warmup=20, draws=50), standardise=True)
print(bnn.diagnose(short))
