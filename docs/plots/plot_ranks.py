"""
Ranks
=====

``bnn.plot.ranks`` draws the distribution of the ranks of each chain among the draws of all. It is uniform where chains
agree.
"""

# %%
import matplotlib.pyplot as plt

import ppl_bnn as bnn

table = bnn.data.load("diabetes")
model = bnn.zoo.load("linear_regression")

# %%
# Two fits of one model: one with enough draws, one without.
posteriors = {
    "enough": bnn.fit(model, table.x, table.y, bnn.NUTS(warmup=300, draws=500), seed=1, standardise=True),
    "too few": bnn.fit(model, table.x, table.y, bnn.NUTS(warmup=20, draws=100), standardise=True),
}
figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for ax, (name, posterior) in zip(axes, posteriors.items(), strict=True):
    bnn.plot.ranks(posterior, ax=ax)
    ax.set_title(name)
plt.show()
