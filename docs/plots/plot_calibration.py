"""
Calibration
===========

``bnn.plot.calibration`` draws the coverage of central intervals at every level, minus that level. Below zero intervals
are too narrow.
"""

# %%
import matplotlib.pyplot as plt

import ppl_bnn as bnn

table = bnn.data.load("diabetes")
train, test = table.split(seed=0)
x, y, x_new, y_new = table.x[train], table.y[train], table.x[test], table.y[test]
model = bnn.zoo.load("regression_mlp", width=10)
posteriors = {
    "Laplace": bnn.fit(model, x, y, bnn.Laplace(), standardise=True),
    "MAP": bnn.fit(model, x, y, bnn.MAP(), standardise=True),
}
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
bnn.plot.calibration(posteriors, x_new, y_new, ax=ax)
plt.show()
