"""
Bayesian optimisation with BoTorch
==================================

A Bayesian neural network takes the place of a Gaussian process: the functions that it draws choose where to measure
next.
"""

# %%
# A function with a jump is to be maximised, and measurements are dear: there are nine.
import matplotlib.pyplot as plt
import numpy as np
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.optim import optimize_acqf

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.botorch import BNNModel


def measure(x):
    return np.sin(6.0 * x) + 1.0 * (x > 0.62) - x


x = np.array([0.02, 0.12, 0.25, 0.37, 0.5, 0.58, 0.66, 0.8, 0.97])[:, None]
y = measure(x[:, 0])


# %%
# Any method fits the network, in either system; with few rows NUTS is cheap enough. ``BNNModel`` is a model of
# BoTorch: its posterior is joint over points, and has gradients.
def network(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(0.05))
    f = bnn.mlp(x, [20, 1], activation="tanh", prior=priors.Normal(0.0, "fan_in", 3.0))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


posterior = bnn.fit(network, x, y, bnn.NUTS(chains=2, warmup=300, draws=300), standardise=True)
surrogate = BNNModel(posterior, draws=100)
grid = torch.linspace(0.0, 1.0, 200, dtype=torch.float64)[:, None]
prediction = surrogate.posterior(grid)
print(prediction.mean.shape, prediction.rsample(torch.Size([5])).shape)

# %%
# BoTorch maximises an acquisition function by gradients: here the expected improvement of the next two points together.
improvement = qLogExpectedImprovement(surrogate, best_f=y.max())
bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
chosen, _ = optimize_acqf(improvement, bounds, q=2, num_restarts=4, raw_samples=64, options={"seed": 0})
print(chosen[:, 0].numpy().round(3))

# %%
# The functions themselves serve Thompson sampling: each proposes its own maximum.
values = posterior.function_draws(12)(grid.numpy())
tops = values.argmax(axis=1)
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
ax.plot(grid, values.T, color="C0", alpha=0.5, linewidth=1)
ax.plot(grid[tops], values[np.arange(12), tops], "^", color="C0", label="maxima of the functions")
ax.plot(grid, measure(grid.numpy()), color="grey", linestyle=":", label="what is measured")
ax.plot(x, y, "o", color="black", label="measured")
for number, point in enumerate(chosen):
    ax.axvline(float(point), color="C3", linestyle="--", label="" if number else "chosen next")
ax.set(xlabel="x", ylabel="y")
ax.legend(fontsize="small")
plt.show()

# %%
# Where the next points are measured, the network is fitted again: there is no ``condition_on_observations``.
