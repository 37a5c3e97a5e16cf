"""
Ensembles and stacking
======================

A deep ensemble averages the predictions of networks from several starts. Stacking weights them by what they predict.
"""

# %%
# Any method can be a member.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

table = bnn.data.load("diabetes")
train, test = table.split(seed=0)
x, y, x_new, y_new = table.x[train], table.y[train], table.x[test], table.y[test]
model = bnn.zoo.load("regression_mlp", width=10)

methods = {
    "one mode": bnn.MAP(),
    "deep ensemble": bnn.Ensemble(bnn.MAP(), size=4),
    "ensemble of Laplace": bnn.Ensemble(bnn.Laplace(structure="kron"), size=4),
    "stacked": bnn.Stacked(bnn.Ensemble(bnn.MAP(), size=4), by="validation"),
}
posteriors = {name: bnn.fit(model, x, y, method, standardise=True) for name, method in methods.items()}
for name, posterior in posteriors.items():
    prediction = posterior.predict(x_new)
    low, high = prediction.interval(0.9)
    covered = np.mean((low <= y_new) & (y_new <= high))
    print(
        f"{name:20} log score {prediction.log_prob(y_new).mean():.3f}, coverage of 90 % intervals {covered:.2f}"
    )

# %%
# What the members say, and what they disagree about: the epistemic part of the variance.
figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
for name in ("deep ensemble", "ensemble of Laplace"):
    prediction = posteriors[name].predict(x_new)
    ax.plot(np.sort(np.sqrt(prediction.epistemic)), label=name)
ax.set(xlabel="test rows, sorted", ylabel="epistemic sd")
ax.legend()
plt.show()

# %%
# Coverage of all central intervals, not of those of 90 % only:
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.calibration(posteriors, x_new, y_new, ax=ax)
plt.show()

# %%
# The weights that stacking gave to the members:
print(np.round(posteriors["stacked"].weights, 3))
