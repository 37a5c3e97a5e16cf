"""Methods from outside the library, for the study that grades the field: each fits the rows of a reference in code that
shares nothing with ours, and gives what `Reference.grade` takes, and the number of "gradients" over all rows.

They are for networks of one hidden layer of tanh units with a Gaussian of unknown noise, or with classes: other models
are refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from ppl_bnn.core.errors import UnsupportedError

NETWORKS = ("regression_mlp", "classification_mlp")


def network_of(reference: Any) -> tuple[int, bool]:
    """(hidden units, whether the outputs are logits of classes); UnsupportedError for another model."""
    name, arguments = reference.card["model"]["name"], reference.card["model"]["arguments"]
    known = name in NETWORKS and arguments.get("depth", 1) == 1
    UnsupportedError.check(
        known, "outside method", "a network of one hidden layer", name, ", ".join(NETWORKS)
    )
    return int(arguments.get("width", 10)), name == "classification_mlp"


def _torch_network(reference: Any, seed: int, dropout: float = 0.0) -> Any:
    import torch

    width, _ = network_of(reference)
    torch.manual_seed(seed)
    inputs = reference.train[0].shape[1]
    layers = [torch.nn.Linear(inputs, width), torch.nn.Tanh()]
    layers += [torch.nn.Dropout(dropout)] if dropout else []
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, reference.outputs)).double()


def _trained(reference: Any, network: Any, steps: int, decay: float) -> Any:
    """Adam on the mean loss of all rows: the Gaussian negative log likelihood with a learnt noise, or cross-entropy."""
    import torch

    _, classes = network_of(reference)
    x, y = (torch.as_tensor(part) for part in reference.train)
    log_noise = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([*network.parameters(), log_noise], lr=0.01, weight_decay=decay)
    for _ in range(steps):
        optimiser.zero_grad()
        f = network(x)
        if classes:
            loss = torch.nn.functional.cross_entropy(f, y.long())
        else:
            loss = (0.5 * ((y - f[:, 0]) / log_noise.exp()) ** 2 + log_noise).mean()
        loss.backward()
        optimiser.step()
    return network


def _draws(reference: Any, networks: list[Any]) -> dict[str, np.ndarray]:
    """The outputs of several networks at the regions, (S, rows, K)."""
    import torch

    with torch.no_grad():
        return {
            region: np.stack([network(torch.as_tensor(x)).numpy() for network in networks])
            for region, x in reference.x.items()
        }


def deep_ensemble(reference: Any, seed: int, quick: bool) -> dict[str, Any]:
    """Ten networks in plain torch from their own initialisations, by Adam with a weight decay of 1e-4."""
    steps, count = (200, 3) if quick else (3000, 10)
    networks = [
        _trained(reference, _torch_network(reference, seed * 100 + index), steps, 1e-4)
        for index in range(count)
    ]
    return {"draws": _draws(reference, networks), "gradients": float(steps * count)}


def mc_dropout(reference: Any, seed: int, quick: bool) -> dict[str, Any]:
    """Dropout of a tenth of the hidden units in plain torch, in training and in each of 500 passes."""
    steps = 200 if quick else 3000
    network = _trained(reference, _torch_network(reference, seed, 0.1), steps, 1e-4)
    return {"draws": _draws(reference, [network] * (50 if quick else 500)), "gradients": float(steps)}


def gaussian_process(reference: Any, seed: int, quick: bool) -> dict[str, Any]:
    """scikit-learn's Gaussian process: a squared-exponential kernel of one length for each input, and white noise."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    _, classes = network_of(reference)
    UnsupportedError.check(not classes, "gaussian process", "numbers", "classes", "another reference")
    x, y = reference.train
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel()
    model = GaussianProcessRegressor(kernel, n_restarts_optimizer=0 if quick else 5, random_state=seed).fit(
        x, y
    )
    noise = float(model.kernel_.k2.noise_level)
    mean, sd = {}, {}
    for region, inputs in reference.x.items():
        centre, spread = model.predict(inputs, return_std=True)
        # Of f: scikit-learn's spread includes the white noise.
        mean[region], sd[region] = centre, np.sqrt(np.maximum(spread**2 - noise, 0.0))
    return {"mean": mean, "sd": sd, "gradients": float("nan")}


def plain_pyro(reference: Any, seed: int, quick: bool) -> dict[str, Any]:
    """Mean-field SVI in plain Pyro: torch's network with N(0, 1 / fan-in) priors by random modules, and AutoNormal."""
    import pyro
    import pyro.distributions as dist
    import torch
    from pyro.infer import SVI, Predictive, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample

    width, classes = network_of(reference)
    x, y = (torch.as_tensor(part) for part in reference.train)

    class Network(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = self._linear(x.shape[1], width)
            self.output = self._linear(width, reference.outputs)

        def _linear(self, inputs: int, outputs: int) -> Any:
            layer = PyroModule[torch.nn.Linear](inputs, outputs).double()
            zero = torch.zeros((), dtype=torch.float64)
            layer.weight = PyroSample(dist.Normal(zero, inputs**-0.5).expand([outputs, inputs]).to_event(2))
            layer.bias = PyroSample(dist.Normal(zero, 1.0 + zero).expand([outputs]).to_event(1))
            return layer

        def forward(self, x: Any, y: Any = None) -> Any:
            f = self.output(torch.tanh(self.hidden(x)))
            if classes:
                law = dist.Categorical(logits=f)
            else:
                noise = pyro.sample("noise", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
                law = dist.Normal(f[:, 0], noise)
            with pyro.plate("rows", len(x)):
                pyro.sample("y", law, obs=y)
            return f

    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    network = Network()
    guide = AutoNormal(network)
    svi = SVI(network, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    steps = 200 if quick else 10_000
    for _ in range(steps):
        svi.step(x, y)
    predictive = Predictive(
        network, guide=guide, num_samples=100 if quick else 1000, return_sites=("_RETURN",)
    )
    grid = torch.as_tensor(np.concatenate(list(reference.x.values())))
    with torch.no_grad():
        f = predictive(grid)["_RETURN"].numpy().reshape(-1, len(grid), reference.outputs)
    draws = {region: f[:, rows] for region, rows in reference.slices.items()}
    return {"draws": draws, "gradients": float(steps)}


def laplace_torch(reference: Any, seed: int, quick: bool) -> dict[str, Any]:
    """laplace-torch's last-layer Kronecker Laplace around a network of plain torch, its prior by the evidence."""
    import torch
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    _, classes = network_of(reference)
    steps = 200 if quick else 3000
    network = _trained(reference, _torch_network(reference, seed), steps, 1e-4)
    x, y = (torch.as_tensor(part) for part in reference.train)
    y = y.long() if classes else y[:, None]
    kind = "classification" if classes else "regression"
    found = Laplace(network, kind, subset_of_weights="last_layer", hessian_structure="kron")
    found.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    with warnings.catch_warnings():
        # For classes it warns whatever it is given; the evidence, by which the prior is chosen, has no link.
        warnings.simplefilter("ignore", UserWarning)
        found.optimize_prior_precision(method="marglik")
    mean, sd, draws = {}, {}, {}
    rng = np.random.default_rng(seed)
    for region, inputs in reference.x.items():
        centre, covariance = found._glm_predictive_distribution(torch.as_tensor(inputs))
        centre, covariance = centre.detach().numpy(), covariance.detach().numpy()
        mean[region] = centre
        sd[region] = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
        if classes:
            f = np.stack(
                [rng.multivariate_normal(m, c, 1000) for m, c in zip(centre, covariance, strict=True)], axis=1
            )
            p = np.exp(f - f.max(axis=-1, keepdims=True))
            draws[region] = (p / p.sum(axis=-1, keepdims=True)).mean(axis=0)
    found = {"probabilities": draws} if classes else {"mean": mean, "sd": sd}
    return found | {"gradients": float(steps)}


OUTSIDE: dict[str, Callable[[Any, int, bool], dict[str, Any]]] = {
    "deep ensemble in torch": deep_ensemble,
    "MC dropout in torch": mc_dropout,
    "Gaussian process": gaussian_process,
    "mean field in plain Pyro": plain_pyro,
    "laplace-torch, last layer": laplace_torch,
}
