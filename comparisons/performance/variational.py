"""Mean-field variational inference on a wide network: an epoch here, in bayesian-torch, and of maximum likelihood.

784-400-400-10 with ReLU, batches of 500, classes, float32 on both sides; on the CPU a tenth of MNIST's rows (the
pixels are random numbers: what they are does not change the work). Compiled functions are warm; what compiling took is
printed.

- An epoch through the language in NumPyro, with the divergence from the prior in closed form as there, against
  bayesian-torch 0.5 (LinearReparameterization in every layer, its KL once per batch, Adam).
- What a random draw of the weights costs: an epoch of maximum likelihood, the same network and Adam written by hand in
  JAX, over one of reparameterisation. Aimed at: no more than 3 times as long.
- What a draw for each row costs: reparameterisation over local reparameterisation, no more than 2.2 times as long.

Small networks against hand-written Pyro are in pyro_against_pyro.py.
"""

from __future__ import annotations

import argparse
import time
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
from ratios import alternate, report

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.backends.program import Problem, Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.progress import Silent
from ppl_bnn.inference.variational.svi import SVI, _Fit

SIGMA = 0.1
RATE = 1e-3


def data(rows: int, features: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((rows, features)), rng.integers(0, classes, rows)


def in_the_language(widths: list[int]) -> Any:
    def model(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, widths, activation="relu", prior=priors.Normal(0.0, SIGMA))
        bnn.observe(y, f, likelihoods.Categorical())

    return model


class Ours:
    """Epochs of one estimator, in a session that stays open."""

    def __init__(self, problem: Problem, estimator: str, batch: int):
        method = SVI(
            guide="diagonal",
            estimator=estimator,
            divergence="analytic",
            batch_size=batch,
            learning_rate=RATE,
            dtype="float32",
            elbo_draws=2,
        )
        self.steps, self.rows, self.batch = problem.rows // batch, problem.rows, batch
        self.fit = _Fit(method, problem, batch, Silent())
        self.fit.descent.begin(self.fit._beginning(0, None), 0)
        self.rng = np.random.default_rng(0)
        self.epoch()

    def epoch(self) -> float:
        """Seconds of one epoch."""
        indices = self.rng.permutation(self.rows)[: self.steps * self.batch].reshape(self.steps, -1)
        inputs = np.full(self.steps, RATE), np.zeros(self.steps), np.ones(self.steps), indices
        start = time.perf_counter()
        trail = self.fit.descent.advance(*inputs)
        seconds = time.perf_counter() - start
        assert np.all(np.isfinite(trail))
        return seconds


class ByHandInJax:
    """Maximum likelihood of the same network: Adam on the mean cross entropy, an epoch as one compiled loop."""

    def __init__(self, x: np.ndarray, y: np.ndarray, widths: list[int], batch: int):
        import jax
        import jax.numpy as jnp
        import optax

        rng = np.random.default_rng(0)
        self.x, self.y = jnp.asarray(x, dtype=jnp.float32), jnp.asarray(y)
        self.steps, self.rows, self.batch = len(x) // batch, len(x), batch
        weights, fan_in = [], x.shape[1]
        for width in widths:
            weights.append(
                (
                    jnp.asarray(rng.normal(size=(fan_in, width)) / fan_in**0.5, dtype=jnp.float32),
                    jnp.zeros(width, dtype=jnp.float32),
                )
            )
            fan_in = width
        optimiser = optax.adam(RATE)

        def loss(weights: Any, x: Any, y: Any) -> Any:
            for weight, bias in weights[:-1]:
                x = jax.nn.relu(x @ weight + bias)
            logits = x @ weights[-1][0] + weights[-1][1]
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

        def epoch(state: Any, indices: Any, x: Any, y: Any) -> Any:
            def step(state: Any, index: Any) -> Any:
                weights, inner = state
                value, gradient = jax.value_and_grad(loss)(weights, x[index], y[index])
                update, inner = optimiser.update(gradient, inner)
                return (optax.apply_updates(weights, update), inner), value

            return jax.lax.scan(step, state, indices)

        self._epoch = jax.jit(epoch)
        self._state = (weights, optimiser.init(weights))
        self.rng = np.random.default_rng(0)
        self.epoch()

    def epoch(self) -> float:
        indices = self.rng.permutation(self.rows)[: self.steps * self.batch].reshape(self.steps, -1)
        start = time.perf_counter()
        self._state, losses = self._epoch(self._state, indices, self.x, self.y)
        losses.block_until_ready()
        return time.perf_counter() - start


class InBayesianTorch:
    """The same guide, prior and batches in bayesian-torch."""

    def __init__(self, x: np.ndarray, y: np.ndarray, widths: list[int], batch: int):
        import torch
        from bayesian_torch.layers import LinearReparameterization

        self.x, self.y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
        self.steps, self.rows, self.batch = len(x) // batch, len(x), batch
        sizes = [x.shape[1], *widths]
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            LinearReparameterization(
                inner, outer, prior_variance=SIGMA, posterior_rho_init=float(np.log(np.expm1(0.1)))
            )
            for inner, outer in pairwise(sizes)
        )
        self.optimiser = torch.optim.Adam(self.layers.parameters(), lr=RATE)
        self.rng = np.random.default_rng(0)
        self.epoch()

    def epoch(self) -> float:
        import torch

        indices = self.rng.permutation(self.rows)[: self.steps * self.batch].reshape(self.steps, -1)
        start = time.perf_counter()
        for index in torch.as_tensor(indices):
            x, divergence = self.x[index], 0.0
            for number, layer in enumerate(self.layers):
                x, part = layer(x)
                divergence = divergence + part
                if number + 1 < len(self.layers):
                    x = torch.relu(x)
            loss = torch.nn.functional.cross_entropy(x, self.y[index]) + divergence / self.batch
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
        return time.perf_counter() - start


def main(tiny: bool = False, rounds: int = 7, store: bool = False) -> dict[str, float]:
    rows, batch, features, widths = (40, 20, 5, [4, 4, 3]) if tiny else (6000, 500, 784, [400, 400, 10])
    x, y = data(rows, features, widths[-1])
    chosen = system("numpyro")
    with chosen.session("float32", "cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peer's imports
        arrays = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, in_the_language(widths), *arrays, language=True)
        problem = Problem(program, *arrays, x, y, 0, "cpu", "float32")
        plain, local = Ours(problem, "plain", batch), Ours(problem, "local", batch)
        by_hand, peer = ByHandInJax(x, y, widths, batch), InBayesianTorch(x, y, widths, batch)
        name = f"{features}-" + "-".join(map(str, widths))
        ratios = [
            alternate(
                f"{name}: an epoch, bayesian-torch / here",
                1.0,
                "epochs/s",
                lambda _: 1.0 / plain.epoch(),
                lambda _: 1.0 / peer.epoch(),
                rounds,
            ),
            alternate(
                f"{name}: maximum likelihood / reparameterisation",
                1.0 / 3.0,
                "epochs/s",
                lambda _: 1.0 / plain.epoch(),
                lambda _: 1.0 / by_hand.epoch(),
                rounds,
            ),
            alternate(
                f"{name}: reparameterisation / local",
                1.0 / 2.2,
                "epochs/s",
                lambda _: 1.0 / local.epoch(),
                lambda _: 1.0 / plain.epoch(),
                rounds,
            ),
        ]
    facts = {
        "rows, batch": [rows, batch],
        "compiling, seconds": round(plain.fit.descent.compile_seconds, 2),
        "steps per epoch": plain.steps,
    }
    return report("variational", ratios, facts, store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store)
