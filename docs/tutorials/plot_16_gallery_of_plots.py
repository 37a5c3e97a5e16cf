"""
Gallery of plots
================

Every function of ``bnn.plot`` returns Matplotlib axes and takes ``ax=``. Their look is that of the report.
"""

# %%
# A curve, fitted by three methods and compared.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

rng = np.random.default_rng(0)
x = np.concatenate([rng.uniform(-2.0, -0.7, 30), rng.uniform(0.6, 2.0, 30)])[:, None]
y = np.sin(2.0 * x[:, 0]) + 0.2 * rng.normal(size=60)
x_new = rng.uniform(-2.0, 2.0, 80)[:, None]
y_new = np.sin(2.0 * x_new[:, 0]) + 0.2 * rng.normal(size=80)
model = bnn.zoo.load("regression_mlp", width=5, sigma=2.0)
methods = {"nuts": bnn.NUTS(chains=4, warmup=300, draws=500), "laplace": bnn.Laplace(), "map": bnn.MAP()}
result = bnn.compare(model, (x, y), (x_new, y_new), methods, reference="nuts")
nuts, laplace = result.posteriors["nuts"], result.posteriors["laplace"]

# %%
# Predictions: a band for one input, partial dependence for several.
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.predictive(nuts, ax=ax)
plt.show()

# %%
# What the prior expected, before it saw a target.
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.prior_predictive(bnn.prior_predictive(model, x, y), ax=ax)
plt.show()

# %%
# Chains in function space: their traces, and the ranks of their draws, which are uniform where chains agree.
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
bnn.plot.trace(nuts, ax=axes[0])
bnn.plot.ranks(nuts, ax=axes[1])
plt.show()

# %%
# Calibration on test rows: coverage of central intervals, and the probability integral transform.
figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
bnn.plot.calibration(result, ax=axes[0])
bnn.plot.pit(result, ax=axes[1])
plt.show()

# %%
# Distances to the reference row by row, and the methods beside each other.
figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
bnn.plot.gap(result, ax=axes[0])
bnn.plot.compare(result, ax=axes[1])
plt.show()

# %%
# The loss of an optimiser.
svi = bnn.fit(model, x, y, bnn.SVI(steps=3000, learning_rate=0.02))
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.loss(svi, ax=ax)
plt.show()

# %%
# Reliability, for classes: how often a label is right that has a probability of so much.
table = bnn.data.load("breast_cancer")
train, test = table.split(seed=0)
classifier = bnn.fit(
    bnn.zoo.load("classification_mlp", classes=2),
    table.x[train],
    table.y[train],
    bnn.Laplace(),
    standardise=True,
)
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.reliability(classifier, table.x[test], table.y[test], ax=ax)
plt.show()
