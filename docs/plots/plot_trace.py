"""
Traces
======

``bnn.plot.trace`` draws chains over their draws in function space, where exchanged hidden units make no difference.
"""

# %%
import matplotlib.pyplot as plt

import ppl_bnn as bnn

table = bnn.data.load("diabetes")
model = bnn.zoo.load("linear_regression")

# %%
# By default the function whose chains agree least. These chains agree.
posterior = bnn.fit(model, table.x, table.y, bnn.NUTS(warmup=300, draws=500), standardise=True)
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
bnn.plot.trace(posterior, ax=ax)
plt.show()

# %%
# A fit that was too short says so.
short = bnn.fit(model, table.x, table.y, bnn.NUTS(warmup=20, draws=100), standardise=True)
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
bnn.plot.trace(short, ax=ax)
plt.show()
