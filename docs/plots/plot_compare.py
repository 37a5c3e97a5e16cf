"""
Differences in score
====================

``bnn.plot.compare`` draws the differences of methods to the best one, paired over test rows, with two standard errors.
"""

# %%
import matplotlib.pyplot as plt

import ppl_bnn as bnn

table = bnn.data.load("diabetes")
train, test = table.split(seed=0)
x, y, x_new, y_new = table.x[train], table.y[train], table.x[test], table.y[test]
result = bnn.compare(
    bnn.zoo.load("linear_regression"),
    (x, y),
    (x_new, y_new),
    {
        "nuts": bnn.NUTS(warmup=300, draws=500),
        "laplace": bnn.Laplace(),
        "svi": bnn.SVI(steps=10_000),
        "map": bnn.MAP(),
    },
    reference="nuts",
    standardise=True,
)
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.compare(result, ax=ax)
plt.show()
