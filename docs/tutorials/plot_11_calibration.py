"""
Calibration, conformal intervals, recalibration
===============================================

Do 90 % intervals hold 90 % of new targets? Three answers: measure it, correct it, or get intervals that hold by
construction.
"""

# %%
# A model that is wrong on purpose: Gaussian noise of one size, on data whose noise grows.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

rng = np.random.default_rng(0)


def rows(count):
    x = rng.uniform(-2.0, 2.0, count)[:, None]
    return x, np.sin(2.0 * x[:, 0]) + 0.15 * np.exp(0.8 * x[:, 0]) * rng.standard_t(3, size=count)


(x, y), (x_held, y_held), (x_new, y_new) = rows(150), rows(150), rows(500)
posterior = bnn.fit(bnn.zoo.load("regression_mlp", width=10, sigma=2.0), x, y, bnn.Laplace())

# %%
# The probability integral transform of calibrated predictions is uniform.
prediction = posterior.predict(x_new)
print(bnn.scores.coverages(prediction, y_new))

# %%
# Held-out rows recalibrate the predictive distribution.
corrected = bnn.recalibrate(posterior, x_held, y_held)
print(bnn.scores.coverages(corrected.predict(x_new), y_new))

# %%
# The distribution of the transform minus the uniform one: calibrated predictions stay in the grey band.
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
bnn.plot.pit({"as fitted": prediction, "recalibrated": corrected.predict(x_new)}, y=y_new, ax=ax)
plt.show()

# %%
# Conformal intervals cover with the promised frequency whatever the model is, as long as rows are exchangeable. They
# cover on average over rows: where the noise is small they are too wide.
low, high = bnn.conformal(posterior, x_held, y_held, level=0.9).interval(x_new)
inside = (low <= y_new) & (y_new <= high)
print(f"conformal: coverage {inside.mean():.3f}, mean width {np.mean(high - low):.2f}")
left = x_new[:, 0] < 0
print(f"left half {inside[left].mean():.2f}, right half {inside[~left].mean():.2f}")

# %%
# Without held-out rows: five fits, each to all but a fifth of the 300 rows, where the fit above has seen 150. The
# coverage that is proved is below the level; usually it is near the level.
model = bnn.zoo.load("regression_mlp", width=10, sigma=2.0)
x_all, y_all = np.concatenate([x, x_held]), np.concatenate([y, y_held])
found = bnn.cross_conformal(model, x_all, y_all, bnn.Laplace(), level=0.9, folds=5)
low, high = found.interval(x_new)
print(
    f"cross-conformal: coverage {np.mean((low <= y_new) & (y_new <= high)):.3f}, mean width {np.mean(high - low):.2f}"
)
print(f"proved: {found.least_coverage:.2f}")
