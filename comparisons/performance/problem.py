"""The network that the benchmarks fit: in the language, and by hand in NumPyro and in Pyro."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors


def data(rows: int, features: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features))
    return x, np.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.2 * rng.normal(size=rows)


def in_the_language(widths: list[int], activation: str = "tanh", classes: int = 0) -> Callable[..., None]:
    """Numbers with sampled noise, or so many classes."""

    def model(x: Any, y: Any = None) -> None:
        noise = None if classes else bnn.sample("noise", dist.HalfNormal(1.0))
        sizes = [*widths, classes or 1]
        f = bnn.mlp(x, sizes, activation=activation, prior=priors.Normal(0.0, "fan_in"))
        bnn.observe(y, f, likelihoods.Categorical() if noise is None else likelihoods.Gaussian(noise))

    return model


def by_hand_in_numpyro(widths: list[int], activation: str = "tanh", classes: int = 0) -> Callable[..., None]:
    import jax
    import numpyro
    import numpyro.distributions as nd

    bend = {"tanh": jax.numpy.tanh, "relu": jax.nn.relu}[activation]

    def model(x: Any, y: Any = None) -> None:
        noise = None if classes else numpyro.sample("noise", nd.HalfNormal(1.0))
        h = x
        for layer, width in enumerate([*widths, classes or 1]):
            name = f"hidden{layer}" if layer < len(widths) else "output"
            fan_in = h.shape[-1]
            weight = numpyro.sample(
                f"{name}.weight", nd.Normal(0.0, fan_in**-0.5).expand([fan_in, width]).to_event(2)
            )
            bias = numpyro.sample(f"{name}.bias", nd.Normal(0.0, 1.0).expand([width]).to_event(1))
            h = h @ weight + bias
            if layer < len(widths):
                h = bend(h)
        with numpyro.plate("rows", x.shape[0]):
            seen = nd.Categorical(logits=h) if noise is None else nd.Normal(h[:, 0], noise)
            numpyro.sample("y", seen, obs=y)

    return model


def by_hand_in_pyro(widths: list[int], activation: str = "tanh") -> Callable[..., None]:
    import pyro
    import pyro.distributions as pd
    import torch

    def model(x: Any, y: Any = None) -> None:
        noise = pyro.sample("noise", pd.HalfNormal(1.0))
        h = x
        for layer, width in enumerate([*widths, 1]):
            name = f"hidden{layer}" if layer < len(widths) else "output"
            fan_in = h.shape[-1]
            weight = pyro.sample(
                f"{name}.weight", pd.Normal(0.0, fan_in**-0.5).expand([fan_in, width]).to_event(2)
            )
            bias = pyro.sample(f"{name}.bias", pd.Normal(0.0, 1.0).expand([width]).to_event(1))
            h = h @ weight + bias
            if layer < len(widths):
                h = getattr(torch, activation)(h)
        with pyro.plate("rows", x.shape[0]):
            pyro.sample("y", pd.Normal(h[:, 0], noise), obs=y)

    return model
