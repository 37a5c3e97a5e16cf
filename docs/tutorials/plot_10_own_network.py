"""
A network of your own, last layer Bayesian
==========================================

A ``torch.nn.Module`` or a Flax module is a layer of a model. Train it as you are used to, and make its last layer
Bayesian.
"""

# %%
# An ordinary network of torch, trained by an ordinary loop.
import numpy as np
import torch

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

table = bnn.data.load("wine")
train, test = table.split(seed=0)
mean, spread = table.x[train].mean(0), table.x[train].std(0)
x, x_new = (table.x[train] - mean) / spread, (table.x[test] - mean) / spread
y, y_new = table.y[train], table.y[test]

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(13, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).double()
optimiser = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=1e-3)
inputs, labels = torch.as_tensor(x), torch.as_tensor(y).long()
for _ in range(300):
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(network(inputs), labels).backward()
    optimiser.step()


# %%
# The module becomes part of a model: its parameters are sites under their own names, with priors by pattern. ``Point``
# keeps a parameter a point estimate, from the module's value.
def model(x, y=None):
    f = bnn.module("net", x, network, {"2.*": priors.Normal(0.0, 1.0), "*": None})
    bnn.observe(y, f, likelihoods.Categorical())


# %%
# Laplace at the trained weights, without another step of training, and NUTS over the last layer.
laplace = bnn.fit(model, x, y, bnn.Laplace(ppl="pyro", start=network, optimise=False))
nuts = bnn.fit(model, x, y, bnn.NUTS(ppl="pyro", chains=1, warmup=60, draws=60, start=laplace))
for name, posterior in (("Laplace", laplace), ("NUTS", nuts)):
    prediction = posterior.predict(x_new)
    right = np.mean(prediction.probabilities.argmax(1) == y_new)
    print(f"{name:8} accuracy {right:.2f}, log score {prediction.log_prob(y_new).mean():.3f}")

# %%
# The trained network itself, for comparison:
with torch.no_grad():
    probabilities = torch.softmax(network(torch.as_tensor(x_new)), dim=1).numpy()
print(f"network  log score {np.log(probabilities[np.arange(len(y_new)), y_new.astype(int)]).mean():.3f}")

# %%
# Far from the data a network is as sure as near them. A posterior over its last layer is less so.
far = 5.0 * x_new
with torch.no_grad():
    sure = torch.softmax(network(torch.as_tensor(far)), dim=1).max(1).values.mean().item()
less_sure = laplace.predict(far).probabilities.max(1).mean()
print(f"mean largest probability, far away: network {sure:.2f}, Laplace {less_sure:.2f}")
