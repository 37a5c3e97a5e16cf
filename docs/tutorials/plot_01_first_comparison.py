"""
A first comparison
==================

One model, three methods, one table: what each method loses against the exact posterior, and what it costs.
"""

# %%
# The data are a noisy curve with a gap in the middle. The truth has a bump there, which no training row shows: a good
# posterior has to say that it does not know.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors

rng = np.random.default_rng(0)


def truth(x):
    return np.sin(2.0 * x) + 0.7 * np.exp(-6.0 * x**2)


x = np.concatenate([rng.uniform(-2.0, -0.7, 20), rng.uniform(0.6, 2.0, 20)])[:, None]
y = truth(x[:, 0]) + 0.2 * rng.normal(size=len(x))
x_test = rng.uniform(-2.0, 2.0, 40)[:, None]
y_test = truth(x_test[:, 0]) + 0.2 * rng.normal(size=len(x_test))


# %%
# The model is a plain function. It samples a noise level, applies a network whose weights have priors, and observes
# the targets.
def model(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(0.3))
    f = bnn.mlp(x, [10, 1], activation="tanh", prior=priors.Normal(0.0, "fan_in", 1.5))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


# %%
# ``compare`` fits it by each method and measures all of them against NUTS.
result = bnn.compare(
    model,
    (x, y),
    (x_test, y_test),
    {
        "nuts": bnn.NUTS(chains=4, warmup=200, draws=400),
        "svi": bnn.SVI(steps=10_000, learning_rate=0.02),
        "map": bnn.MAP(),
    },
    reference="nuts",
)
result.table[["log_score", "rmse", "gap_mean", "gap_sd_ratio", "run_seconds", "gradient_evaluations"]].round(
    2
)

# %%
# ``log_score`` is the mean log density of the test targets; larger is better. ``gap_mean`` is the distance of the mean
# function from that of NUTS, in its standard deviations; ``gap_sd_ratio`` compares the spreads. In a sentence or two:
print(result.summary())

# %%
# The bands show where the methods differ: in the gap, and beyond the data. The truth is dotted.
grid = np.linspace(-2.5, 2.5, 200)
figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), sharex=True, sharey=True, layout="constrained")
for ax, (name, posterior) in zip(axes.flat, result.posteriors.items(), strict=True):
    bnn.plot.predictive(posterior, ax=ax)
    ax.plot(grid, truth(grid), color="grey", linestyle=":")
    ax.set(title=name, ylim=(-3, 3))
    if ax is not axes[0]:
        ax.get_legend().remove()
plt.show()

# %%
# The same differences as numbers: the distance of each method's mean function from that of NUTS, and the ratio of its
# spread, beside the noise between two halves of the reference.
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
bnn.plot.gap(result, of="mean", ax=axes[0])
bnn.plot.gap(result, of="spread", ax=axes[1])
plt.show()
