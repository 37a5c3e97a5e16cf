"""
Grade your own method
=====================

A reference is a certified posterior of a network's outputs. Bring draws from any tool, and read how far they are from
the truth, where, and how many exact draws they are worth.
"""

# %%
# A reference has the training rows and a frozen grid of inputs in named regions.
import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

import ppl_bnn as bnn

reference = bnn.references.load("regression_mlp-curve")
print(reference)
print({region: x.shape for region, x in reference.x.items()})

# %%
# A posterior of the library is graded as it is.
x, y = reference.train
svi = bnn.fit(reference.model(), x, y, bnn.SVI(steps=20_000, learning_rate=0.01))
grade = reference.grade(svi)
print(grade)

# %%
# The table has every figure by region, each beside its floor: what half of the reference has against its other half.
grade.table.round(2)

# %%
grade.figure()
plt.show()

# %%
# Draws from elsewhere are arrays: draws by rows by outputs, for each region. Here a Gaussian process of scikit-learn.
kernel = ConstantKernel() * RBF() + WhiteKernel()
process = GaussianProcessRegressor(kernel, n_restarts_optimizer=3, random_state=0).fit(x, y)
moments = {region: process.predict(grid, return_std=True) for region, grid in reference.x.items()}
noise = process.kernel_.k2.noise_level
outside = reference.grade(
    mean={region: m[:, None] for region, (m, _) in moments.items()},
    sd={region: np.sqrt(np.maximum(s**2 - noise, 1e-12))[:, None] for region, (_, s) in moments.items()},
)
print(outside)
