"""
Loss
====

``bnn.plot.loss`` draws the loss over the steps of an optimiser, in nats: means over short stretches with their range.
"""

# %%
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

rng = np.random.default_rng(0)
x = np.concatenate([rng.uniform(-2.0, -0.7, 30), rng.uniform(0.6, 2.0, 30)])[:, None]
y = np.sin(2.0 * x[:, 0]) + 0.2 * rng.normal(size=60)
model = bnn.zoo.load("regression_mlp", width=5, sigma=2.0)
posterior = bnn.fit(model, x, y, bnn.SVI(steps=8000, learning_rate=0.02))
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.loss(posterior, ax=ax)
plt.show()
