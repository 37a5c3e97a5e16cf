"""
Gap to a reference
==================

``bnn.plot.gap`` draws how far approximations are from a reference, in the mean or in the spread.
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

# %%
# Of a comparison: distances, beside the noise between two halves of the reference.
figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
bnn.plot.gap(result, of="mean", ax=axes[0])
bnn.plot.gap(result, of="spread", ax=axes[1])
plt.show()

# %%
# Of two posteriors: row by row.
nuts, svi = result.posteriors["nuts"], result.posteriors["svi"]
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
bnn.plot.gap(svi, x_new, reference=nuts, of="mean", ax=axes[0])
bnn.plot.gap(svi, x_new, reference=nuts, of="spread", ax=axes[1])
plt.show()
