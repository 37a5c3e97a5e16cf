"""Models with the structure of those in the documentation of Pyro, in our own words and at small sizes.

Each function of `CASES` gives a model, its inputs and its targets, made from a seed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyro
import pyro.distributions
import torch
from pyro.nn import module as modules

# Pyro declares no types that a checker could follow.
dist: Any = pyro.distributions
PyroModule: Any = modules.PyroModule
PyroSample: Any = modules.PyroSample
nn: Any = torch.nn

Case = tuple[Any, Any, np.ndarray]


class LinearRegression(PyroModule):
    """A linear layer whose weight and bias are PyroSample, made in the default type of torch."""

    def __init__(self, features: int):
        super().__init__()
        self.linear = PyroModule[nn.Linear](features, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, features]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, x: Any, y: Any = None) -> Any:
        noise = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, noise), obs=y)
        return mean


def bayesian_regression(rng: np.random.Generator) -> Case:
    x = rng.normal(size=(25, 3))
    return LinearRegression(3), x, x @ [0.7, -1.0, 0.3] + 2.0 + 0.5 * rng.normal(size=25)


class Deep(PyroModule):
    """Layers in a loop, each with priors that are functions of the module's own buffers."""

    def __init__(self, sizes: tuple[int, ...]):
        super().__init__()
        self.register_buffer("spread", torch.tensor(1.0))
        layers = []
        for before, after in pairwise(sizes):
            layer = PyroModule[nn.Linear](before, after)
            layer.weight = PyroSample(
                dist.Normal(0.0, torch.tensor(before**-0.5)).expand([after, before]).to_event(2)
            )
            layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([after]).to_event(1))
            layers.append(layer)
        self.layers = PyroModule[nn.ModuleList](layers)
        self.noise = PyroSample(lambda self: dist.HalfNormal(self.spread))

    def forward(self, x: Any, y: Any = None) -> Any:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        mean = pyro.deterministic("mean", self.layers[-1](x).squeeze(-1), event_dim=0)
        noise = self.noise
        with pyro.plate("data", mean.shape[0]):
            pyro.sample("obs", dist.Normal(mean, noise), obs=y)
        return mean


def deep_network(rng: np.random.Generator) -> Case:
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    return Deep((1, 3, 3, 1)), x, np.sin(3.0 * x[:, 0]) + 0.1 * rng.normal(size=20)


def schools_model(group: Any, sigma: Any, y: Any = None) -> None:
    """Effects of groups around a common mean, not centred; two inputs, of which one is an index."""
    mean = pyro.sample("mu", dist.Normal(0.0, 5.0))
    spread = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
    with pyro.plate("groups", 4):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
    theta = pyro.deterministic("theta", mean + spread * eta, event_dim=0)
    with pyro.plate("data", len(group)):
        pyro.sample("obs", dist.Normal(theta[group], sigma), obs=y)


def hierarchical(rng: np.random.Generator) -> Case:
    group = np.repeat(np.arange(4), 3)
    sigma = rng.uniform(0.5, 1.5, size=12)
    return schools_model, (group, sigma), rng.normal(size=4)[group] + sigma * rng.normal(size=12)


class Likelihood:
    """A likelihood for classes, as an object beside the network."""

    def __call__(self, logits: Any, y: Any = None) -> None:
        with pyro.plate("data", logits.shape[0]):
            pyro.sample("likelihood.data", dist.Categorical(logits=logits), obs=y)


class Wrapped(PyroModule):
    """A network of torch whose parameters are made into random variables one after the other, and a likelihood."""

    def __init__(self, network: Any, likelihood: Likelihood):
        super().__init__()
        modules.to_pyro_module_(network)
        self.network, self.likelihood = network, likelihood
        for module in network.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                prior = dist.Normal(torch.zeros_like(parameter), torch.ones_like(parameter))
                setattr(module, name, PyroSample(prior.to_event(parameter.dim())))

    def forward(self, x: Any, y: Any = None) -> None:
        self.likelihood(self.network(x), y)


def tyxe_like(rng: np.random.Generator) -> Case:
    x = rng.normal(size=(30, 2))
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))
    return Wrapped(network, Likelihood()), x, np.digitize(x[:, 0] + 0.3 * rng.normal(size=30), [-0.5, 0.5])


CASES = (bayesian_regression, deep_network, hierarchical, tyxe_like)


def gaussian_mixture(x: Any, y: Any = None) -> None:
    """Assignments of rows to parts, which Pyro enumerates."""
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
    with pyro.plate("components", 2):
        levels = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(x)):
        part = pyro.sample("assignment", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("obs", dist.Normal(levels[part], 1.0), obs=y)


def dirichlet_process(x: Any, y: Any = None) -> None:
    """Sticks broken from beta distributions, and assignments that are enumerated."""
    with pyro.plate("sticks", 3):
        beta = pyro.sample("beta", dist.Beta(1.0, 1.0))
    with pyro.plate("parts", 4):
        levels = pyro.sample("mu", dist.Normal(0.0, 5.0))
    left = torch.cumprod(1.0 - beta, -1)
    weights = torch.cat([beta, torch.ones_like(beta[:1])]) * torch.cat([torch.ones_like(beta[:1]), left])
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(levels[z], 1.0), obs=y)


def subsampled(x: Any, y: Any = None) -> None:
    """A plate that draws a subsample, whose size Pyro lets nobody change."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("rows_of_x", len(x), subsample_size=5) as index:
        pyro.sample("obs", dist.Normal(w * x[index, 0], 1.0), obs=None if y is None else y[index])


# Model -> words of the error that refuses it by name.
REFUSED = {
    gaussian_mixture: ("'assignment'", "enumeration", "Categorical"),
    dirichlet_process: ("'z'", "enumeration", "MixtureSameFamily"),
    subsampled: ("'rows_of_x'", "subsample_size=5"),
}
