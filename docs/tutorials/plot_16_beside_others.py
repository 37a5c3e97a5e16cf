"""
Beside what you would use instead
=================================

A Gaussian process, a forest and an ensemble of scikit-learn in the same table as a Bayesian neural network.
"""

# %%
# ``Outside`` takes any estimator with scikit-learn's interface; a few have a name. Its row has scores, intervals and
# times. It is no approximation of the posterior, so gaps and diagnostics stay blank.
import matplotlib.pyplot as plt
import numpy as np
from sklearn.ensemble import RandomForestRegressor

import ppl_bnn as bnn

rng = np.random.default_rng(0)


def rows(count):
    x = np.sort(rng.uniform(-2.0, 2.0, count))[:, None]
    return x, np.sin(2.0 * x[:, 0]) + 0.2 * rng.normal(size=count)


train, test = rows(60), rows(200)
result = bnn.compare(
    bnn.zoo.load("regression_mlp", width=10, sigma=2.0),
    train,
    test,
    {
        "laplace": bnn.Laplace(),
        "gp": bnn.Outside("gp"),
        "forest": bnn.Outside(RandomForestRegressor(50, min_samples_leaf=3)),
        "ensemble": bnn.Outside("mlp-ensemble"),
    },
    standardise=True,
)
result.table[["ppl", "log_score", "rmse", "coverage_90", "width_90"]].round(3)

# %%
# Where an estimator says how sure it is, that is its distribution. A forest does not: its trees are smoothed by the
# bandwidth that predicts rows best which the trees have not seen. The bands hold 90 % of new targets, by each method.
figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), sharex=True, sharey=True, layout="constrained")
x_test, y_test = test
for ax, (name, prediction) in zip(axes, result.predictions.items(), strict=True):
    low, high = prediction.interval(0.9)
    ax.plot(train[0][:, 0], train[1], ".", color="grey")
    ax.plot(x_test[:, 0], prediction.mean)
    ax.fill_between(x_test[:, 0], low, high, alpha=0.3)
    ax.set(title=f"{name}: {np.mean((low <= y_test) & (y_test <= high)):.0%} inside", xlabel="x")
plt.show()

# %%
# Differences are paired over the test rows:
print(result.summary())

# %%
# On the command line, and in a grid, by name:
#
# .. code-block:: bash
#
#    ppl-bnn compare regression_mlp --data diabetes --methods laplace,gp,forest,mlp-ensemble
