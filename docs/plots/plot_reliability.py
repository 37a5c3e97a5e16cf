"""
Reliability
===========

``bnn.plot.reliability`` draws how often an event occurred against its predicted probability.
"""

# %%
import matplotlib.pyplot as plt

import ppl_bnn as bnn

table = bnn.data.load("breast_cancer")
train, test = table.split(seed=0)
x, y, x_new, y_new = table.x[train], table.y[train], table.x[test], table.y[test]
model = bnn.zoo.load("classification_mlp", classes=2)
posterior = bnn.fit(model, x, y, bnn.Laplace(), standardise=True)
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
bnn.plot.reliability(posterior, x_new, y_new, ax=ax)
plt.show()
