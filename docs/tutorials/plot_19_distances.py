"""
Uncertainty by distance, in one network
=======================================

An ordinary network is certain far away from its data. SNGP and DDU keep one network, and let its uncertainty grow with
the distance from the training rows.
"""

# %%
# Two classes, and a network of residual blocks. Their weights have a spectral norm of at most 0.9, so that no block
# maps two inputs onto one: the features keep distances.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

rng = np.random.default_rng(0)
angle, y = rng.uniform(0.0, np.pi, 200), np.arange(200) % 2
moons = np.stack([np.cos(angle), np.sin(angle)], axis=1)
x = np.where(y[:, None] == 1, [1.0, 0.4] - moons, moons) + 0.1 * rng.normal(size=(200, 2))


def body(x, prior):
    h = bnn.dense("input", x, 16, priors.Point())
    for name in ("first", "second", "third"):
        h = bnn.residual(h, lambda h, name=name: bnn.ops.relu(bnn.dense(name, h, 16, prior)))
    return h


bounded = priors.SpectralNorm(priors.Point(), 0.9)


# %%
# **SNGP.** The last layer is a Gaussian process: a dense layer on random Fourier features, in closed form by Laplace.
def sngp(x, y=None):
    features = bnn.random_features(body(x, bounded), 256, length_scale=2.0)
    f = bnn.dense("output", features, 1, priors.Normal(0.0, 3.0), bias=False)
    bnn.observe(y, f, likelihoods.Bernoulli())


by_process = bnn.fit(sngp, x, y, bnn.Laplace(steps=1000), seed=0)


# %%
# **DDU.** The last layer is an ordinary one. Normal distributions of the features, one for each class, say how far a
# row is from those of the fit.
def network(x, y=None):
    bnn.observe(y, bnn.dense("output", body(x, bounded), 1, priors.Point()), likelihoods.Bernoulli())


mode = bnn.fit(network, x, y, bnn.MAP(steps=1000), seed=0)
density = bnn.feature_density(mode, jitter=1e-3)

# %%
# Three uncertainties: without either, and with each.
grid = np.stack(np.meshgrid(np.linspace(-4, 5, 80), np.linspace(-4, 4, 80)), axis=-1)
rows = grid.reshape(-1, 2)
maps = {
    "MAP: entropy": mode.predict(rows).entropy,
    "SNGP: entropy": by_process.predict(rows, kind="probit").entropy,
    "DDU: minus log density": np.minimum(-density.log_density(rows), 60.0),
}
figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), sharey=True, layout="constrained")
for ax, (name, values) in zip(axes, maps.items(), strict=True):
    image = ax.contourf(grid[..., 0], grid[..., 1], values.reshape(80, 80), levels=20)
    ax.scatter(*x.T, c=y, cmap="coolwarm", s=8, edgecolors="white", linewidths=0.3)
    ax.set(title=name)
    figure.colorbar(image, ax=ax)
plt.show()

# %%
# How well does each tell rows from elsewhere? One half is the probability of a coin.
far = rng.uniform(-4.0, 5.0, (400, 2))
far = far[np.linalg.norm(far[:, None] - x, axis=2).min(1) > 1.0]
for name, inside, outside in (
    ("MAP", mode.predict(x), mode.predict(far)),
    ("SNGP", by_process.predict(x, kind="probit"), by_process.predict(far, kind="probit")),
    ("DDU", -density.log_density(x), -density.log_density(far)),
):
    found = bnn.scores.out_of_distribution(inside, outside)
    print(f"{name:5} area under the ROC curve {found['auroc']:.3f}")

# %%
# A network that exists is a body too: ``bnn.module("body", x, network, {"*": None})`` holds a trained network of torch,
# Flax or Equinox, and the two last layers above go on it. A network of torch with
# ``torch.nn.utils.parametrizations.spectral_norm`` needs ``mode="eval"``.
