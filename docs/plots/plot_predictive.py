"""
Predictions
===========

``bnn.plot.predictive`` draws the predictive distribution over one input: a band, a partial dependence, or a map.
"""

# %%
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

rng = np.random.default_rng(0)
x = np.concatenate([rng.uniform(-2.0, -0.7, 30), rng.uniform(0.6, 2.0, 30)])[:, None]
y = np.sin(2.0 * x[:, 0]) + 0.2 * rng.normal(size=60)
model = bnn.zoo.load("regression_mlp", width=5, sigma=2.0)
posterior = bnn.fit(model, x, y, bnn.Laplace())

# %%
# With one input: the mean, a band of the mean function (inner) and one of observations (outer), and the data.
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.predictive(posterior, ax=ax)
plt.show()

# %%
# With several inputs: the mean function over one of them, averaged over the rows for the others.
table = bnn.data.load("diabetes")
several = bnn.fit(bnn.zoo.load("regression_mlp"), table.x, table.y, bnn.Laplace(), standardise=True)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for ax, name in zip(axes, ("bmi", "age"), strict=True):
    bnn.plot.predictive(several, feature=list(table.feature_names).index(name), ax=ax)
    ax.set(title=name, xlabel=name)
plt.show()

# %%
# With two inputs and classes: a map of probabilities.
iris = bnn.data.load("iris")
classifier = bnn.fit(
    bnn.zoo.load("classification_mlp", classes=3), iris.x[:, 2:], iris.y, bnn.Laplace(), standardise=True
)
figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
bnn.plot.predictive(classifier, iris.x[:, 2:], iris.y, ax=ax)
plt.show()
