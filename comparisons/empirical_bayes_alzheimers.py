"""Empirical Bayes with a variance for each weight: does the bound choose the network, without a validation set?

Source: D. K. Basov, "Bayesian neural networks" (in Russian), and the author's repository as of commit 19c71b5. One
hidden layer of ReLU units, widths 1 to 37, p(y = 1 | x, w) = sigmoid(f(x, w)), w_k ~ N(0, s_k^2), and
q(w) = N(mu, sigma^2) with mu = gamma sigma, sigma = softplus(rho), gamma = 0 and rho = 1 at the start. At its optimum
s_k^2 = mu_k^2 + sigma_k^2, so that

    ELBO = E_q log p(y | x, w) - 1/2 sum_k log(1 + gamma_k^2).

Corrected here. The note prints the cost as <nu, nu> / 2 with nu = log(1 + gamma^2), and the code of that day computed
this, the sum of squares. Its layers add (x @ sigma) eps with one eps for each row and unit, where independent weights
have a spread of sqrt(x^2 @ sigma^2). A shift and a scale of each input are trained along without a prior. "0.89 by
Pearson" is Spearman's in its own table, and is judged as that. And the s_k are as many as the weights and not paid
for: the ELBO is a bound on the largest likelihood that a prior of this family can have, log p(y | s), not on an
evidence.

(a) is the model as derived, fitted by `bnn.SVI` with `priors.EmpiricalBayes`: on it the claims are judged. (b)
switches on each departure alone, in a loop of this file's own, since such a loss is not the ELBO of a model. (c) has
the network without regularisation, weight decay tuned on a validation part, and a mode under a unit prior. (d) has
Laplace with precisions tuned by the evidence, and NUTS on the nearest hierarchical model: its draws are the reference
for every method at that width.

Other than in the source: widths are a subset of its 1 to 37; steps are 7000, 10000 in (b) and 6000 in other
architectures instead of 50000, and a fit says whether its loss had reached a plateau; Adam's rate is 0.1, 0.05 in (b)
and 0.03 in other architectures instead of 0.01, held for half of the steps and then lowered, with the mean of the
later iterates; predictions are of 500 draws, 250 in other architectures, instead of 5000. Rows are the source's split,
standardised on the training part.

    PPL_BNN_DATA=... python comparisons/empirical_bayes_alzheimers.py [--tiny] [--out DIR] [--cache DIR]
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from study import (
    BLACK,
    BLUE,
    CORRECTED,
    GREEN,
    GREY,
    NOT_REPRODUCED,
    NOT_RUN,
    ORANGE,
    PINK,
    REPRODUCED,
    SKY,
    VERMILION,
    Study,
    Verdict,
    command_line,
    paired,
    panels,
)

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors, scores
from ppl_bnn.core.errors import BNNError
from ppl_bnn.inference.optimisation.loops import falling, plateau

SITES = ("hidden0.weight", "hidden0.bias", "output.weight", "output.bias")
# softplus(1): the standard deviation of q at the source's start.
START = math.log1p(math.e)
# One departure each, and all three: what the source ran.
VARIANTS: dict[str, dict[str, Any]] = {
    "as derived": {},
    "squared cost": {"cost": "squared"},
    "shared noise": {"noise": "shared"},
    "trained inputs": {"inputs": True},
    "all three": {"cost": "squared", "noise": "shared", "inputs": True},
}
# A weight counts as active where |mu| exceeds 2 sigma.
ACTIVE = 2.0
STRETCH = 500
# Fits within so many nats of the largest ELBO are what is left to choose from: 3 % of e^-loss on the table's 1719 rows.
NEAR = 50.0
# Of the source's own table: the mean test AUC of its Bayesian networks, and Spearman's correlation with their ELBO.
SOURCE_AUC = 0.910
SOURCE_SPEARMAN = 0.888
NO_REFERENCE = "no reference"


@dataclass(frozen=True)
class Sizes:
    """How much is computed. The rows are the table's unless `synthetic`; the rest trades error for time."""

    synthetic: bool = False
    widths: tuple[int, ...] = (1, 2, 4, 6, 10, 17, 28, 37)
    seeds: int = 3
    steps: int = 7000
    learning_rate: float = 0.1
    draws: int = 500
    tensor_widths: tuple[int, ...] = (2, 6, 17, 37)
    shuffled_widths: tuple[int, ...] = (6, 28)
    plain_widths: tuple[int, ...] = (6,)
    start_widths: tuple[int, ...] = (1, 2, 4, 6, 10, 17, 28, 37)
    variants: tuple[str, ...] = tuple(VARIANTS)
    variant_widths: tuple[int, ...] = (4, 17)
    variant_steps: int = 10_000
    variant_rate: float = 0.05
    classic_steps: int = 10_000
    checkpoints: tuple[int, ...] = (500, 2000, 10_000)
    decays: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0)
    decay_seeds: int = 2
    decay_steps: int = 3000
    mode_widths: tuple[int, ...] = (1, 2, 4, 6, 17, 37)
    laplace_widths: tuple[int, ...] = (1, 2, 4, 6)
    mode_steps: int = 4000
    reference_widths: tuple[int, ...] = (0, 1)
    reference_seeds: int = 2
    scales: tuple[str, ...] = ("weight", "tensor")
    reference_methods: tuple[str, ...] = (
        "empirical Bayes per tensor",
        "MAP, N(0, 1)",
        "Laplace, tuned",
        "SVI, N(0, 1)",
    )
    nuts_draws: int = 500
    chains: int = 4
    tree_depth: int = 9
    deep: tuple[int, ...] = (10, 10)
    channels: int = 8
    image_rows: int = 1000
    architectures: tuple[str, ...] = ("two hidden layers", "convolution")
    architecture_steps: int = 6000
    workers: int = 3


FULL = Sizes()
TINY = Sizes(
    synthetic=True,
    widths=(3,),
    seeds=2,
    steps=60,
    draws=20,
    tensor_widths=(),
    shuffled_widths=(),
    plain_widths=(),
    start_widths=(),
    variants=("as derived", "all three"),
    variant_widths=(3,),
    variant_steps=60,
    classic_steps=40,
    checkpoints=(20, 40),
    decays=(0.3, 3.0),
    decay_seeds=1,
    decay_steps=40,
    mode_widths=(),
    laplace_widths=(),
    mode_steps=40,
    reference_widths=(0,),
    reference_seeds=1,
    scales=("tensor",),
    reference_methods=("MAP, N(0, 1)",),
    nuts_draws=20,
    chains=2,
    tree_depth=3,
    channels=2,
    image_rows=60,
    architectures=(),
    architecture_steps=20,
    workers=0,
)


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Standardised inputs (N, F) and labels (N,) in 0 and 1, to train on and to test on."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def null(self) -> float:
        """The largest log-likelihood of the labels without inputs, in nats: that of their share."""
        share = float(self.y.mean())
        return len(self.y) * (share * math.log(share) + (1.0 - share) * math.log1p(-share))


def rows(synthetic: bool) -> Rows:
    """The source's split of the table; or 160 made-up rows, two of whose six inputs act through their product."""
    if synthetic:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(160, 6))
        logit = 1.5 * x[:, 0] - x[:, 1] + 1.5 * x[:, 2] * x[:, 3]
        y = (rng.random(160) < 1.0 / (1.0 + np.exp(-logit))).astype(np.int64)
        train, test = np.arange(100), np.arange(100, 160)
    else:
        table = bnn.data.load("alzheimers")
        x, y = table.x, table.y
        train, test = table.published_split(0)
    mean, sd = x[train].mean(0), x[train].std(0)
    return Rows((x[train] - mean) / sd, y[train], (x[test] - mean) / sd, y[test])


def images(count: int) -> Rows:
    """The bundled digits, 8 x 8 pixels divided by 16: `count` rows to train on, 500 (or as many) to test on."""
    table = bnn.data.load("digits")
    order = np.random.default_rng(0).permutation(len(table.y))
    x = table.x.reshape(-1, 8, 8, 1) / 16.0
    train, test = order[:count], order[count : count + min(count, 500)]
    return Rows(x[train], table.y[train], x[test], table.y[test])


def auc(score: np.ndarray, y: np.ndarray) -> float:
    """Area under the ROC curve: the share of pairs of a one and a zero in which the one scores higher, ties half."""
    rank = stats.rankdata(score)
    ones = int(y.sum())
    return float((rank[y == 1].sum() - ones * (ones + 1) / 2.0) / (ones * (len(y) - ones)))


def auc_error(area: float, ones: int, zeros: int) -> float:
    """Its standard error on so many rows (Hanley and McNeil 1982)."""
    one, two = area / (2.0 - area), 2.0 * area**2 / (1.0 + area)
    spread = area * (1.0 - area) + (ones - 1) * (one - area**2) + (zeros - 1) * (two - area**2)
    return math.sqrt(spread / (ones * zeros))


# --- models ---------------------------------------------------------------------------------------


def network(x: Any, y: Any = None, *, widths: Sequence[int] = (10,), prior: Any = None) -> None:
    """y ~ Bernoulli(sigmoid(f(x, w))), f: hidden layers of ReLU units of these widths."""
    f = bnn.mlp(x, [*widths, 1], activation="relu", prior=prior)
    bnn.observe(y, f, likelihoods.Bernoulli())


def convolution(x: Any, y: Any = None, *, channels: int = 8, prior: Any = None) -> None:
    """Ten classes of images: 3 x 3 filters at every second place, ReLU, a dense layer."""
    h = ops.activation("relu")(bnn.conv2d("filters", x, channels, kernel=3, stride=2, prior=prior))
    f = bnn.dense("output", h.reshape(h.shape[0], -1), 10, prior)
    bnn.observe(y, f, likelihoods.Categorical())


def shapes(inputs: int, width: int) -> dict[str, tuple[int, ...]]:
    """Sites of a network of one hidden layer, in the order of the program."""
    return dict(zip(SITES, ((inputs, width), (width,), (width, 1), (1,)), strict=True))


# --- the loop for losses that are no ELBO of a model --------------------------------------------------------


def complexity(gamma: Mapping[str, Any], cost: str) -> Any:
    """1/2 sum log(1 + gamma^2), the derived cost; "squared": 1/2 sum log(1 + gamma^2)^2, the printed one."""
    import jax.numpy as jnp

    power = {"derived": 1, "squared": 2}[cost]
    return 0.5 * sum(jnp.sum(jnp.log1p(value**2) ** power) for value in gamma.values())


def noisy_layer(x: Any, layer: str, gamma: Any, rho: Any, key: Any, noise: str) -> Any:
    """What leaves a layer, (N, O), drawn for each row: mean m = x @ mu + mu_b and a spread times eps (N, O).

    "independent": sqrt(x^2 @ sigma^2 + sigma_b^2), the law of independent weights. "shared": x @ sigma + sigma_b, as
    if the weights into a unit had one eps between them.
    """
    import jax
    import jax.numpy as jnp

    names = f"{layer}.weight", f"{layer}.bias"
    weight, bias = (jax.nn.softplus(rho[name]) for name in names)
    mean = x @ (gamma[names[0]] * weight) + gamma[names[1]] * bias
    if noise == "shared":
        spread = x @ weight + bias
    else:
        # The root has no derivative at zero, which is what a unit that is off in a row would ask for.
        spread = jnp.sqrt(x**2 @ weight**2 + bias**2 + 1e-12)
    return mean + spread * jax.random.normal(key, mean.shape, mean.dtype)


def noisy_logits(p: Any, x: Any, key: Any, noise: str) -> Any:
    """f (N,) with noise drawn for each row, layer after layer."""
    import jax

    first, second = jax.random.split(key)
    x = moved_inputs(p, x)
    h = jax.nn.relu(noisy_layer(x, "hidden0", p["gamma"], p["rho"], first, noise))
    return noisy_layer(h, "output", p["gamma"], p["rho"], second, noise)[:, 0]


def moved_inputs(p: Any, x: Any) -> Any:
    """(1 + scale) x + shift where these are trained along."""
    return x * (1.0 + p["scale"]) + p["shift"] if "scale" in p else x


def drawn_logits(p: Any, x: Any, key: Any) -> Any:
    """f (N,) of one network whose weights are a draw from q."""
    import jax

    keys = jax.random.split(key, len(SITES))
    w = {}
    for each, name in zip(keys, SITES, strict=True):
        gamma = p["gamma"][name]
        w[name] = (gamma + jax.random.normal(each, gamma.shape, gamma.dtype)) * jax.nn.softplus(
            p["rho"][name]
        )
    return logits(w, moved_inputs(p, x))


def logits(w: Mapping[str, Any], x: Any) -> Any:
    """f (N,) of one network."""
    import jax

    h = jax.nn.relu(x @ w["hidden0.weight"] + w["hidden0.bias"])
    return (h @ w["output.weight"] + w["output.bias"])[:, 0]


def bernoulli_cost(f: Any, y: Any) -> Any:
    """-log p(y | f) over all rows, in nats."""
    import jax
    import jax.numpy as jnp

    return jnp.sum(jax.nn.softplus(f) - y * f)


@dataclass(frozen=True)
class Descended:
    """Mean parameters over the second half of the steps, losses (S, steps), and parameters at checkpoints."""

    average: Any
    losses: np.ndarray
    kept: dict[int, Any]


def descend(
    loss: Callable[[Any, Any, Any], Any],
    start: Any,
    extra: np.ndarray,
    *,
    steps: int,
    rate: float,
    seed: int,
    constant: bool = False,
    checkpoints: Sequence[int] = (),
) -> Descended:
    """Adam on loss(parameters, key, extra) for S fits at once, all leaves of `start` and `extra` with a leading S.

    The rate is held for half of the steps and lowered over the other half as in `bnn.SVI`, or `constant`.
    """
    import jax
    import jax.numpy as jnp

    held = steps if constant else steps - steps // 2
    rates = np.full(steps, rate) if constant else falling(rate, np.arange(steps), held, steps)
    averaged = np.arange(steps) >= steps - steps // 2

    def step(carry: Any, given: Any, key: Any, own: Any) -> Any:
        p, m, v, total = carry
        index, lr, counts = given
        value, g = jax.value_and_grad(loss)(p, jax.random.fold_in(key, index), own)
        m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
        v = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
        t = index + 1.0
        one, two = 1.0 - 0.9**t, 1.0 - 0.999**t
        p = jax.tree.map(lambda q, a, b: q - lr * (a / one) / (jnp.sqrt(b / two) + 1e-8), p, m, v)
        return (p, m, v, jax.tree.map(lambda a, b: a + counts * b, total, p)), value

    def stretch(carry: Any, key: Any, own: Any, indices: Any, lrs: Any, counts: Any) -> Any:
        return jax.lax.scan(lambda c, g: step(c, g, key, own), carry, (indices, lrs, counts))

    advance = jax.jit(jax.vmap(stretch, in_axes=(0, 0, 0, None, None, None)))
    leaves = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), start)
    zeros = jax.tree.map(jnp.zeros_like, leaves)
    carry, own = (leaves, zeros, zeros, zeros), jnp.asarray(extra, jnp.float32)
    keys = jax.random.split(jax.random.key(seed), len(extra))
    found, kept, done = [], {}, 0
    while done < steps:
        count = min(STRETCH, *(c - done for c in (steps, *checkpoints) if c > done))
        part = slice(done, done + count)
        carry, values = advance(
            carry,
            keys,
            own,
            jnp.arange(done, done + count, dtype=jnp.int32),
            jnp.asarray(rates[part], jnp.float32),
            jnp.asarray(averaged[part], jnp.float32),
        )
        found.append(np.asarray(values, float))
        done += count
        if done in checkpoints:
            kept[done] = jax.tree.map(np.asarray, carry[0])
    number = float(averaged.sum())
    average = jax.tree.map(lambda a: np.asarray(a) / np.float32(number), carry[3])
    return Descended(average, np.concatenate(found, axis=1), kept)


def member(p: Any, index: int) -> Any:
    """The parameters of one of the fits."""
    import jax

    return jax.tree.map(lambda a: a[index], p)


def settled(losses: np.ndarray, steps: int) -> bool:
    """`bnn.SVI`'s own test: no fall of the loss over the last two windows of the steps at the full rate."""
    return plateau(losses[: steps - steps // 2], steps // 10)


# --- figures of one fit -----------------------------------------------------------------------------------


def judged(f: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """AUC of the mean probability and log score of the mixture, from logits of draws (S, N)."""
    f = np.asarray(f, float)
    log_p = -np.logaddexp(0.0, np.where(y == 1, -f, f))
    probability = np.exp(-np.logaddexp(0.0, -f)).mean(0)
    return {
        "auc": auc(probability, y),
        "log_score": float((np.logaddexp.reduce(log_p, axis=0) - math.log(len(f))).mean()),
    }


def both(train: Mapping[str, float], test: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_train": train[name] for name in train} | {f"{name}_test": test[name] for name in test}


def posterior_scores(posterior: Any, data: Rows, draws: int | None = None) -> dict[str, float]:
    """AUC and log score on both parts, of what a posterior predicts."""
    found = []
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        prediction = posterior.predict(x) if draws is None else posterior.predict(x, draws=draws)
        found.append({"auc": auc(prediction.mean, y), "log_score": float(scores.log_score(prediction, y))})
    return both(*found)


def active_weights(loc: Mapping[str, np.ndarray], scale: Mapping[str, np.ndarray]) -> int:
    return int(sum((np.abs(loc[name]) > ACTIVE * scale[name]).sum() for name in scale))


# --- what is run: each part returns rows of tables ----------------------------------------------------------

Found = list[tuple[str, dict[str, Any]]]


def hidden(width: int) -> tuple[int, ...]:
    return (width,) if width else ()


def zeros(inputs: int, widths: Sequence[int]) -> dict[str, np.ndarray]:
    """The start of the source: all means at zero."""
    found, before = {}, inputs
    for index, width in enumerate((*widths, 1)):
        name = "output" if index == len(widths) else f"hidden{index}"
        found |= {f"{name}.weight": np.zeros((before, width)), f"{name}.bias": np.zeros(width)}
        before = width
    return found


def empirical_bayes(
    sizes: Sizes,
    data: Rows,
    width: int,
    seed: int,
    per: str = "weight",
    estimator: str = "local",
    start: str = "source",
) -> Any:
    """The posterior of (a): independent normals, the cost in closed form.

    start: the "source"'s, all means at zero and wide; or "prior", narrow about a draw with variance 1 / fan-in.
    """
    return bnn.fit(
        partial(network, widths=hidden(width), prior=priors.EmpiricalBayes(per=per)),
        data.x,
        data.y,
        bnn.SVI(
            guide="normal",
            divergence="analytic",
            estimator=estimator,
            steps=sizes.steps,
            learning_rate=sizes.learning_rate,
            start=zeros(data.x.shape[1], hidden(width)) if start == "source" else None,
            init_scale=START if start == "source" else 0.1,
            dtype="float32",
        ),
        seed=seed,
    )


def run_empirical_bayes(
    sizes: Sizes,
    width: int,
    seed: int,
    per: str = "weight",
    estimator: str = "local",
    labels: str = "true",
    start: str = "source",
) -> Found:
    """(a), and its relatives: one variance for each tensor, another start, labels shuffled among the training rows."""
    begun = time.perf_counter()
    data = rows(sizes.synthetic)
    if labels == "shuffled":
        data = Rows(data.x, np.random.default_rng(7).permutation(data.y), data.x_test, data.y_test)
    posterior = empirical_bayes(sizes, data, width, seed, per, estimator, start)
    figures = posterior.info.figures
    q = posterior.approximation
    draws = q.draw(400, np.random.default_rng(0))
    loc = {name: value.mean(0) for name, value in draws.items()}
    scale = {name: value.std(0) for name, value in draws.items()}
    row = {
        "width": width,
        "seed": seed,
        "per": per,
        "estimator": estimator,
        "labels": labels,
        "start": start,
        "elbo": figures["elbo"],
        "elbo_se": figures["elbo_se"],
        "likelihood_cost": figures["likelihood_cost"],
        "complexity_cost": figures["complexity_cost"],
        "exp_minus_loss": math.exp(figures["elbo"] / len(data.y)),
        **posterior_scores(posterior, data, sizes.draws),
        "active_weights": active_weights(loc, scale),
        "weights": sum(value.size for value in loc.values()),
        "null": data.null,
        "steps": sizes.steps,
        "converged": bool(figures["converged"]),
        "gradient_evaluations": posterior.info.gradient_evaluations,
        "seconds": time.perf_counter() - begun,
    }
    main = (per, estimator, labels, start) == ("weight", "local", "true", "source")
    table = "empirical_bayes" if main else "relatives"
    return [(table, row)]


def run_variant(sizes: Sizes, variant: str, width: int) -> Found:
    """(b): a departure switched on alone, all seeds at once."""
    import jax
    import jax.numpy as jnp

    begun = time.perf_counter()
    data, choice = rows(sizes.synthetic), VARIANTS[variant]
    noise, cost = choice.get("noise", "independent"), choice.get("cost", "derived")
    x, y = (jnp.asarray(each, jnp.float32) for each in (data.x, data.y))
    parts = shapes(x.shape[1], width)
    start: dict[str, Any] = {
        "gamma": {name: np.zeros((sizes.seeds, *shape)) for name, shape in parts.items()},
        "rho": {name: np.ones((sizes.seeds, *shape)) for name, shape in parts.items()},
    }
    if choice.get("inputs"):
        start |= {name: np.zeros((sizes.seeds, x.shape[1])) for name in ("shift", "scale")}

    def loss(p: Any, key: Any, _: Any) -> Any:
        return bernoulli_cost(noisy_logits(p, x, key, noise), y) + complexity(p["gamma"], cost)

    steps = sizes.variant_steps
    found = descend(loss, start, np.zeros(sizes.seeds), steps=steps, rate=sizes.variant_rate, seed=width)
    results: Found = []
    seconds = (time.perf_counter() - begun) / sizes.seeds
    drawn = jax.jit(lambda p, x, keys: jax.lax.map(lambda k: drawn_logits(p, x, k), keys))
    noisy = jax.jit(lambda p, x, keys: jax.lax.map(lambda k: noisy_logits(p, x, k, noise), keys))
    keys = jax.random.split(jax.random.key(1), sizes.draws)
    x_test = jnp.asarray(data.x_test, jnp.float32)
    for seed in range(sizes.seeds):
        p = jax.tree.map(jnp.asarray, member(found.average, seed))
        f = np.asarray(drawn(p, x, keys), float)
        # What is predicted with is the layer that was trained.
        predict = noisy if noise == "shared" else drawn
        derived = float(complexity(p["gamma"], "derived"))
        log_likelihood = float((data.y * f - np.logaddexp(0.0, f)).sum(1).mean())
        gamma = {name: np.asarray(value) for name, value in p["gamma"].items()}
        row = {
            "variant": variant,
            "width": width,
            "seed": seed,
            "objective": -float(found.losses[seed, -steps // 10 :].mean()),
            "elbo_of_its_q": log_likelihood - derived,
            "derived_cost": derived,
            "active_weights": int(sum((np.abs(value) > ACTIVE).sum() for value in gamma.values())),
            "weights": sum(value.size for value in gamma.values()),
            **both(
                judged(np.asarray(predict(p, x, keys)), data.y),
                judged(np.asarray(predict(p, x_test, keys)), data.y_test),
            ),
            "steps": steps,
            "converged": settled(found.losses[seed], steps),
            "gradient_evaluations": steps,
            "seconds": seconds,
        }
        results.append(("departures", row))
    return results


def uniform_start(inputs: int, width: int, count: int, seed: int) -> dict[str, np.ndarray]:
    """`count` starts with all weights and biases uniform within 1 / sqrt(fan-in), as torch starts a linear layer."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(inputs, width).items():
        limit = (inputs if name.startswith("hidden0") else width) ** -0.5
        found[name] = rng.uniform(-limit, limit, (count, *shape))
    return found


def run_classic(sizes: Sizes, width: int, inputs: bool = False) -> Found:
    """(c): the network without regularisation, Adam at 0.01, also on the way; `inputs`: shift and scale trained."""
    import jax
    import jax.numpy as jnp

    begun = time.perf_counter()
    data = rows(sizes.synthetic)
    x, y = (jnp.asarray(each, jnp.float32) for each in (data.x, data.y))
    start: dict[str, Any] = {"w": uniform_start(x.shape[1], width, sizes.seeds, width)}
    if inputs:
        start |= {name: np.zeros((sizes.seeds, x.shape[1])) for name in ("shift", "scale")}

    def loss(p: Any, key: Any, _: Any) -> Any:
        return bernoulli_cost(logits(p["w"], moved_inputs(p, x)), y) / len(data.y)

    found = descend(
        loss,
        start,
        np.zeros(sizes.seeds),
        steps=sizes.classic_steps,
        rate=0.01,
        seed=width,
        constant=True,
        checkpoints=sizes.checkpoints,
    )
    seconds = (time.perf_counter() - begun) / sizes.seeds
    results: Found = []
    for steps, kept in found.kept.items():
        for seed in range(sizes.seeds):
            p = member(kept, seed)
            f, f_test = (
                np.asarray(logits(jax.tree.map(jnp.asarray, p["w"]), moved_inputs(p, each)))[None]
                for each in (data.x.astype(np.float32), data.x_test.astype(np.float32))
            )
            row = {"network": "trained inputs" if inputs else "classic", "width": width, "seed": seed}
            row |= {"steps": steps, **both(judged(f, data.y), judged(f_test, data.y_test))}
            row |= {"exp_minus_loss": math.exp(row["log_score_train"]), "gradient_evaluations": steps}
            results.append(("classic", row | {"seconds": seconds * steps / sizes.classic_steps}))
    return results


def decayed(
    x: np.ndarray, y: np.ndarray, starts: Mapping[str, np.ndarray], precisions: np.ndarray, steps: int
) -> Any:
    """Modes under N(0, 1 / precision) on all weights and biases, one for each start and precision (S,)."""
    import jax.numpy as jnp

    given, labels = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

    def loss(w: Any, key: Any, precision: Any) -> Any:
        square = sum(jnp.sum(value**2) for value in w.values())
        return (bernoulli_cost(logits(w, given), labels) + 0.5 * precision * square) / len(y)

    # The mean of the last iterates: full-batch descent has no noise, but a ReLU's loss has kinks.
    return descend(loss, dict(starts), precisions, steps=steps, rate=0.01, seed=0).average


def run_decay(sizes: Sizes, width: int) -> Found:
    """(c): the precision that does best on a fifth of the training rows, then the fit to all of them."""
    import jax
    import jax.numpy as jnp

    begun = time.perf_counter()
    data = rows(sizes.synthetic)
    order = np.random.default_rng(11).permutation(len(data.y))
    held, kept = order[: len(order) // 5], order[len(order) // 5 :]
    inputs, grid = data.x.shape[1], np.array(sizes.decays)

    def score(w: Any, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        return judged(np.asarray(logits(jax.tree.map(jnp.asarray, w), jnp.asarray(x, jnp.float32)))[None], y)

    count = sizes.decay_seeds * len(grid)
    starts = uniform_start(inputs, width, sizes.decay_seeds, 100 + width)
    starts = {name: np.repeat(value, len(grid), axis=0) for name, value in starts.items()}
    precisions = np.tile(grid, sizes.decay_seeds)
    fitted = decayed(data.x[kept], data.y[kept], starts, precisions, sizes.decay_steps)
    validation = np.array(
        [score(member(fitted, k), data.x[held], data.y[held])["log_score"] for k in range(count)]
    )
    mean = validation.reshape(sizes.decay_seeds, len(grid)).mean(0)
    chosen = float(grid[np.argmax(mean)])
    starts = uniform_start(inputs, width, sizes.seeds, 200 + width)
    fitted = decayed(data.x, data.y, starts, np.full(sizes.seeds, chosen), sizes.decay_steps)
    spent = (count + sizes.seeds) * sizes.decay_steps
    seconds = time.perf_counter() - begun
    results: Found = []
    for seed in range(sizes.seeds):
        w = member(fitted, seed)
        row = {"method": "weight decay", "width": width, "seed": seed, "precision": chosen}
        row |= both(score(w, data.x, data.y), score(w, data.x_test, data.y_test))
        row |= {"gradient_evaluations": spent / sizes.seeds, "seconds": seconds / sizes.seeds}
        results.append(("baselines", row | {"note": f"of {', '.join(f'{each:g}' for each in grid)}"}))
    return results


def laplace(sizes: Sizes) -> Any:
    """Laplace with a precision for each tensor, by the evidence, the mode found again for each."""
    return bnn.Laplace(tune="tensor", during_training=True, steps=sizes.mode_steps)


def run_modes(sizes: Sizes, width: int) -> Found:
    """(c) the mode under N(0, 1), and (d) Laplace with the evidence."""
    data = rows(sizes.synthetic)
    model = partial(network, widths=(width,), prior=priors.Normal(0.0, 1.0))
    results: Found = []
    methods: dict[str, Any] = {"MAP, N(0, 1)": bnn.MAP(steps=sizes.mode_steps)}
    if width in sizes.laplace_widths:
        methods["Laplace"] = laplace(sizes)
    for name, method in methods.items():
        begun = time.perf_counter()
        row: dict[str, Any] = {"method": name, "width": width, "seed": 0}
        try:
            posterior = bnn.fit(model, data.x, data.y, method)
        except BNNError as error:
            results.append(("baselines", row | {"note": f"{type(error).__name__}: {error}"[:200]}))
            continue
        row |= posterior_scores(posterior, data)
        if name == "Laplace":
            row |= {key: posterior.info.figures[key] for key in ("log_evidence", "effective_parameters")}
        row |= {
            "gradient_evaluations": posterior.info.gradient_evaluations,
            "seconds": time.perf_counter() - begun,
            "note": "; ".join(posterior.info.warnings)[:200],
        }
        results.append(("baselines", row))
    return results


def run_reference(sizes: Sizes, width: int) -> Found:
    """(d): NUTS on hierarchical models at a small width, and how far from it every method predicts.

    Width 0 is the network without a hidden layer: the same priors, and a posterior that chains can explore.
    """
    data = rows(sizes.synthetic)
    hierarchical = {
        f"hierarchical, a scale per {per}": partial(
            network, widths=hidden(width), prior=priors.Hierarchical(scale=dist.HalfNormal(1.0), per=per)
        )
        for per in sizes.scales
    }
    results: Found = []
    fitted: dict[str, tuple[Any, str]] = {}
    for name, model in hierarchical.items():
        posterior = bnn.fit(
            model,
            data.x,
            data.y,
            bnn.NUTS(
                draws=sizes.nuts_draws,
                warmup=sizes.nuts_draws,
                chains=sizes.chains,
                max_tree_depth=sizes.tree_depth,
            ),
        )
        diagnosis = bnn.diagnose(posterior)
        fitted[f"NUTS, {name}"] = posterior, f"{diagnosis.verdict}: {'; '.join(diagnosis.reasons)}"
    # "converged per mode only" is no reference.
    converged = [name for name, (_, word) in fitted.items() if word.startswith("converged: ")]
    reference = fitted[converged[0]][0] if converged else None
    unit = partial(network, widths=hidden(width), prior=priors.Normal(0.0, 1.0))
    bayes = max(
        (empirical_bayes(sizes, data, width, seed) for seed in range(sizes.reference_seeds)),
        key=lambda each: each.info.figures["elbo"],
    )
    fitted["empirical Bayes per weight, SVI (best of seeds)"] = bayes, ""
    if "empirical Bayes per tensor" in sizes.reference_methods:
        fitted["empirical Bayes per tensor, SVI"] = empirical_bayes(sizes, data, width, 0, "tensor"), ""
    others: dict[str, Any] = {
        "MAP, N(0, 1)": bnn.MAP(steps=sizes.mode_steps),
        "Laplace, tuned": laplace(sizes),
        "SVI, N(0, 1)": bnn.SVI(
            guide="normal",
            divergence="analytic",
            estimator="local",
            steps=sizes.steps // 2,
            learning_rate=0.03,
            dtype="float32",
        ),
    }
    for name in (name for name in others if name in sizes.reference_methods):
        try:
            fitted[name] = bnn.fit(unit, data.x, data.y, others[name]), ""
        except BNNError as error:
            results.append(
                (
                    "reference",
                    {"method": name, "note": f"{type(error).__name__}: {error}"[:200]} | {"width": width},
                )
            )
    star = None if reference is None else reference.predict(data.x_test)
    floor = None
    if reference is not None and star is not None:
        chains, draws = reference.shape
        floor = scores.noise_floor(star, np.repeat(np.arange(chains), draws))
    for name, (posterior, word) in fitted.items():
        row: dict[str, Any] = {"method": name, "width": width, **posterior_scores(posterior, data)}
        if reference is None or star is None or floor is None:
            row["gap_to_nuts"] = NO_REFERENCE
        elif posterior is reference:
            row |= {"gap_to_nuts": 0.0, "noise_floor": floor["mean_gap"]}
        else:
            gap = scores.fidelity(posterior.predict(data.x_test), star)
            row |= {"gap_to_nuts": gap["mean_gap"], "noise_floor": floor["mean_gap"]}
            row |= {"sd_ratio": gap["sd_ratio"], "total_variation": gap["total_variation"]}
            row["noise_floor_total_variation"] = floor["total_variation"]
        row |= {
            "gradient_evaluations": posterior.info.gradient_evaluations,
            "seconds": posterior.info.compile_seconds + posterior.info.run_seconds,
            "note": (word or "; ".join(posterior.info.warnings))[:300],
        }
        results.append(("reference", row))
    return results


def run_architecture(sizes: Sizes, name: str) -> Found:
    """The same prior in another architecture, beside the same network with a prior so wide that it says nothing."""
    if name == "two hidden layers":
        data = rows(sizes.synthetic)
        model: Any = partial(network, widths=sizes.deep)
        settings: dict[str, Any] = {
            "estimator": "local",
            "start": zeros(data.x.shape[1], sizes.deep),
            "init_scale": START / 2.0,
        }
    else:
        data = images(sizes.image_rows)
        model = partial(convolution, channels=sizes.channels)
        # A filter is used at many places of a row: local reparameterisation would not be the ELBO.
        settings = {"estimator": "flipout", "init_scale": 0.05}
    steps = sizes.architecture_steps
    bayes = bnn.SVI(
        guide="normal", divergence="analytic", steps=steps, learning_rate=0.03, dtype="float32", **settings
    )
    choices: dict[str, tuple[Any, Any]] = {
        "empirical Bayes per weight": (priors.EmpiricalBayes(per="weight"), bayes),
        "no regularisation": (priors.Normal(0.0, 100.0), bnn.MAP(steps=steps, start=None)),
    }
    results: Found = []
    for choice, (prior, method) in choices.items():
        begun = time.perf_counter()
        posterior = bnn.fit(partial(model, prior=prior), data.x, data.y, method)
        row: dict[str, Any] = {"architecture": name, "method": choice}
        for part, x, y in (("train", data.x, data.y), ("test", data.x_test, data.y_test)):
            draws = sizes.draws // 2 if choice.startswith("empirical") else None
            prediction = posterior.predict(x, draws=draws)
            row[f"accuracy_{part}"] = float(scores.accuracy(prediction, y))
            if name == "two hidden layers":
                # From logits: where a network without regularisation is certain, a probability rounds to 0.
                f = posterior.predictor(x, draws=draws)
                row |= {f"{key}_{part}": value for key, value in judged(f.reshape(-1, len(y)), y).items()}
            else:
                row[f"log_score_{part}"] = float(scores.log_score(prediction, y))
        row |= {
            "elbo": posterior.info.figures.get("elbo", ""),
            "converged": bool(posterior.info.figures["converged"]),
            "gradient_evaluations": posterior.info.gradient_evaluations,
            "seconds": time.perf_counter() - begun,
            "note": "; ".join(posterior.info.warnings)[:200],
        }
        results.append(("architectures", row))
    return results


PARTS: dict[str, Callable[..., Found]] = {
    "empirical Bayes": run_empirical_bayes,
    "variant": run_variant,
    "classic": run_classic,
    "decay": run_decay,
    "modes": run_modes,
    "reference": run_reference,
    "architecture": run_architecture,
}


def plan(sizes: Sizes) -> list[tuple[str, dict[str, Any]]]:
    """What is to be run, the longest first."""
    tasks: list[tuple[str, dict[str, Any]]] = [
        ("reference", {"width": width}) for width in sorted(sizes.reference_widths, reverse=True)
    ]
    wide_first = sorted(sizes.widths, reverse=True)
    tasks += [
        ("empirical Bayes", {"width": width, "seed": seed})
        for width in wide_first
        for seed in range(sizes.seeds)
    ]
    tasks += [
        ("variant", {"variant": name, "width": width})
        for width in sizes.variant_widths
        for name in sizes.variants
    ]
    tasks += [("classic", {"width": width}) for width in wide_first]
    tasks += [("classic", {"width": width, "inputs": True}) for width in sizes.variant_widths]
    tasks += [("decay", {"width": width}) for width in wide_first]
    tasks += [
        ("empirical Bayes", {"width": width, "seed": 0, "per": "tensor"}) for width in sizes.tensor_widths
    ]
    tasks += [
        ("empirical Bayes", {"width": width, "seed": 0, "per": per, "labels": "shuffled"})
        for width in sizes.shuffled_widths
        for per in ("weight", "tensor")
    ]
    tasks += [
        ("empirical Bayes", {"width": width, "seed": 0, "estimator": "plain"}) for width in sizes.plain_widths
    ]
    tasks += [
        ("empirical Bayes", {"width": width, "seed": seed, "start": "prior"})
        for width in sizes.start_widths
        for seed in range(sizes.seeds)
    ]
    tasks += [("modes", {"width": width}) for width in sorted(sizes.mode_widths, reverse=True)]
    tasks += [("architecture", {"name": name}) for name in sizes.architectures]
    return tasks


def perform(sizes: Sizes, name: str, arguments: dict[str, Any], cache: str | None) -> Found:
    """One part, in whatever process."""
    if cache is not None:
        bnn.enable_compilation_cache(cache)
    return PARTS[name](sizes, **arguments)


def collect(study: Study, cache: str | None) -> None:
    """Run the plan, in worker processes where there are any, and fill the tables in the order of the plan."""
    sizes, tasks = study.sizes, plan(study.sizes)
    if sizes.workers:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(sizes.workers, mp_context=context) as pool:
            futures = [pool.submit(perform, sizes, name, arguments, cache) for name, arguments in tasks]
            for (name, arguments), future in zip(tasks, futures, strict=True):
                future.add_done_callback(lambda _, text=f"{name} {arguments}": study.say(text))
            found = [future.result() for future in futures]
    else:
        found = [perform(sizes, name, arguments, cache) for name, arguments in tasks]
    for part in found:
        for table, row in part:
            study.tables.setdefault(table, []).append(row)
    for table in ("empirical_bayes", "relatives", "classic", "baselines"):
        study.tables.setdefault(table, []).sort(
            key=lambda row: (str(row.get("method", row.get("per", ""))), row["width"], row["seed"])
        )


# --- verdicts ---------------------------------------------------------------------------------------------

Row = Mapping[str, Any]


def column(found: Sequence[Row], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in found])


def by_width(found: Sequence[Row], name: str) -> dict[int, np.ndarray]:
    """Values of a column, one array for each width, in the order of widths."""
    widths = sorted({int(row["width"]) for row in found})
    return {width: column([row for row in found if row["width"] == width], name) for width in widths}


def slope(found: Sequence[Row], name: str, least: int) -> tuple[float, float]:
    """Least-squares slope of a column against log2 of the width, from width `least` up, and its standard error."""
    used = [row for row in found if row["width"] >= least]
    x, y = np.log2(column(used, "width")), column(used, name)
    if len(used) < 3 or np.ptp(x) == 0.0:
        return 0.0, math.inf
    fit: Any = stats.linregress(x, y)
    return float(fit.slope), float(fit.stderr)


def judge_overfitting(claim: str, bayes: Sequence[Row], classic: Sequence[Row], least: int) -> Verdict:
    """Reproduced unless test AUC or test log score falls with the width by more than two standard errors."""
    found = {
        (who, name): slope(data, name, least)
        for who, data in (("Bayes", bayes), ("classic", classic))
        for name in ("auc_test", "log_score_test")
    }
    known = all(math.isfinite(error) for _, error in found.values())
    falls = {key: value < -2.0 * error for key, (value, error) in found.items()}
    text = "; ".join(
        f"{who} {name} {value:+.4f} +- {error:.4f} per doubling" + (" (falls)" if falls[who, name] else "")
        for (who, name), (value, error) in found.items()
    )
    if not known:
        return Verdict(claim, NOT_RUN, f"too few fits for a slope: {text}")
    bad = falls["Bayes", "auc_test"] or falls["Bayes", "log_score_test"]
    return Verdict(claim, NOT_REPRODUCED if bad else REPRODUCED, text)


def at_edge(found: Sequence[Row], tried: Sequence[float]) -> str:
    """What a verdict adds where the precision that was chosen is the first or the last of those that were tried."""
    ends = {min(tried), max(tried)}
    at = {row["width"]: row["precision"] for row in found if row["precision"] in ends}
    if not at:
        return ""
    return (
        "; the precision chosen is at the edge of what was tried, so that a better one may lie beyond, at width "
        + ", ".join(f"{width} ({precision:g})" for width, precision in sorted(at.items()))
    )


def judge_range(claim: str, ours: Sequence[Row], theirs: Sequence[Row], note: str = "") -> Verdict:
    """Reproduced where the mean test AUC is the higher one at every width; which widths are clear is told.

    note: what is to be known of the rival.
    """
    one, two = by_width(ours, "auc_test"), by_width(theirs, "auc_test")
    shared = [width for width in one if width in two]
    differences = {width: float(one[width].mean() - two[width].mean()) for width in shared}

    def error(width: int) -> float:
        parts = [values[width] for values in (one, two)]
        if min(map(len, parts)) < 2:
            return math.inf
        return math.sqrt(sum(part.var(ddof=1) / len(part) for part in parts))

    clear = [width for width in shared if differences[width] > 2.0 * error(width)]
    lost = [width for width in shared if differences[width] <= 0.0]
    text = (
        f"mean test AUC {np.mean([one[w].mean() for w in shared]):.3f} against "
        f"{np.mean([two[w].mean() for w in shared]):.3f}; higher at {len(shared) - len(lost)} of {len(shared)} widths, "
        f"by two standard errors over seeds at {len(clear)}"
        + (f"; not higher at {', '.join(map(str, lost))}" if lost else "")
        + note
    )
    return Verdict(claim, NOT_REPRODUCED if lost else REPRODUCED, text)


def correlation(x: np.ndarray, y: np.ndarray, kind: str) -> tuple[float, float, float] | None:
    """A correlation and its 95 % interval by Fisher's transformation; None where it is not defined."""
    if len(x) < 4 or np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return None
    result: Any = (stats.pearsonr if kind == "pearson" else stats.spearmanr)(x, y)
    r = float(result[0])
    if abs(r) == 1.0:
        return r, r, r
    z, error = math.atanh(r), 1.96 / math.sqrt(len(x) - 3)
    return r, math.tanh(z - error), math.tanh(z + error)


def optima(found: Sequence[Row]) -> np.ndarray:
    """Which fits are in the upper of two groups of ELBO: the split with the least variance within groups."""
    elbo = column(found, "elbo")
    order = np.argsort(elbo)
    sums = [
        elbo[order[:k]].var() * k + elbo[order[k:]].var() * (len(order) - k) for k in range(1, len(order))
    ]
    upper = np.zeros(len(order), dtype=bool)
    upper[order[int(np.argmin(sums)) + 1 :]] = True
    return upper


ABOVE = "all but the smallest width"
NEAREST = f"within {NEAR:g} nats of the largest ELBO"


def correlations(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Train ELBO against test AUC, over all fits and over parts of them."""
    elbo, area, width = (column(found, name) for name in ("elbo", "auc_test", "width"))
    upper, near = optima(found), elbo >= elbo.max() - NEAR
    widths = np.unique(width)
    means = np.array([[elbo[width == w].mean(), area[width == w].mean()] for w in widths])

    def centred(values: np.ndarray) -> np.ndarray:
        return values - np.array([values[width == w].mean() for w in width])

    first = np.array([row["seed"] == 0 for row in found])
    above = width > widths[0]
    cases = {
        "all fits": (elbo, area),
        "one fit a width, as in the source": (elbo[first], area[first]),
        "means over seeds of each width": (means[:, 0], means[:, 1]),
        ABOVE: (elbo[above], area[above]),
        "within widths (seeds apart)": (centred(elbo), centred(area)),
        "within the upper group of optima": (elbo[upper], area[upper]),
        "within the lower group of optima": (elbo[~upper], area[~upper]),
        NEAREST: (elbo[near], area[near]),
    }
    results = []
    for case, (x, y) in cases.items():
        row: dict[str, Any] = {"fits": case, "count": len(x)}
        for kind in ("pearson", "spearman"):
            found_one = correlation(x, y, kind)
            if found_one is not None:
                row |= dict(zip((kind, f"{kind}_low", f"{kind}_high"), found_one, strict=True))
        results.append(row)
    total = ((area - area.mean()) ** 2).sum()
    groups = sum(
        part.sum() * (area[part].mean() - area.mean()) ** 2 for part in (upper, ~upper) if part.any()
    )
    if total > 0.0:
        case = "share of the variance of AUC that is between the two groups"
        results.append({"fits": case, "count": len(elbo), "share": float(groups / total)})
    return results


def judge_correlation(found: Sequence[Row], table: Sequence[Row]) -> Verdict:
    """Reproduced where the 95 % interval of Spearman's correlation over all fits is above 0 and holds the source's
    0.888, which is Spearman's. Pearson's is told, and so are both over parts of the fits.
    """
    claim = "train ELBO and test ROC-AUC correlate by 0.89 (Spearman's, in the source's table)"
    named = {row["fits"]: row for row in table}
    whole = named["all fits"]
    if "spearman" not in whole:
        return Verdict(claim, NOT_RUN, f"{len(found)} fits are too few")
    text = "; ".join(
        f"{case} (n={row['count']}): Spearman {row['spearman']:.2f} [{row['spearman_low']:.2f}, "
        f"{row['spearman_high']:.2f}], Pearson {row['pearson']:.2f} [{row['pearson_low']:.2f}, "
        f"{row['pearson_high']:.2f}]"
        for case, row in named.items()
        if "spearman" in row
    )
    good = whole["spearman_low"] > 0.0 and whole["spearman_low"] <= SOURCE_SPEARMAN <= whole["spearman_high"]
    return Verdict(claim, REPRODUCED if good else NOT_REPRODUCED, text)


def judge_selection(found: Sequence[Row], table: Sequence[Row], relatives: Sequence[Row]) -> Verdict:
    """No validation needed: reproduced where the ELBO ranks fits by their test AUC, whatever start they came from (the
    smallest width, which cannot fit, left out), and where it credits a network with nothing on shuffled labels.
    """
    claim = "the ELBO alone selects, so that no validation part is needed"
    ranks = next(row for row in table if row["fits"] == ABOVE)
    near = next(row for row in table if row["fits"] == NEAREST)
    shuffled = [row for row in relatives if row["labels"] == "shuffled" and row["per"] == "weight"]
    if not shuffled or "spearman" not in ranks:
        return Verdict(claim, NOT_RUN, f"{ranks['count']} fits, {len(shuffled)} with shuffled labels")
    elbo, area = column(found, "elbo"), column(found, "auc_test")
    picked = max(found, key=lambda row: row["elbo"])
    left = area[elbo >= elbo.max() - NEAR]
    unpaid = [row["elbo"] - row["null"] > 2.0 * row["elbo_se"] for row in shuffled]
    tensors = {
        (row["width"], row["seed"]): row["elbo"]
        for row in relatives
        if row["per"] == "tensor" and row["labels"] == "true"
    }
    pairs = [
        row["elbo"] - tensors[row["width"], row["seed"]]
        for row in found
        if (row["width"], row["seed"]) in tensors
    ]
    text = (
        f"of {len(found)} fits the largest ELBO (width {picked['width']}, {picked['elbo']:.0f} nats) has test AUC "
        f"{picked['auc_test']:.3f}, the best of all is {area.max():.3f}, their mean {area.mean():.3f}. Over "
        f"{ABOVE} Spearman's correlation is {ranks['spearman']:.2f} [{ranks['spearman_low']:.2f}, "
        f"{ranks['spearman_high']:.2f}]; the {near['count']} {NEAREST} have AUC {left.min():.3f} to {left.max():.3f}. "
        "On shuffled labels the bound is "
        + ", ".join(
            f"{row['elbo'] - row['null']:+.1f} +- {row['elbo_se']:.1f} nats at width {row['width']}"
            for row in shuffled
        )
        + " from what the share of ones alone explains, which no evidence of a network would pass"
        + (
            f"; with a variance for each weight it is {min(pairs):.0f} to {max(pairs):.0f} nats above that with one "
            "for each tensor, at M instead of 4 fitted numbers that it does not charge"
            if pairs
            else ""
        )
    )
    good = ranks["spearman_low"] > 0.0 and not any(unpaid)
    return Verdict(claim, REPRODUCED if good else NOT_REPRODUCED, text)


def judge_start(found: Sequence[Row], relatives: Sequence[Row]) -> Verdict:
    """Reproduced where the source's start has the larger mean ELBO at every width at which another one was tried."""
    claim = "the source's start (means at zero, sd 1.3) finds the better optimum (ours)"
    other = [row for row in relatives if row["start"] == "prior"]
    if not other:
        return Verdict(claim, NOT_RUN, "no other start")
    parts, good = [], []
    for width in sorted({row["width"] for row in other}):
        one, two = ([row for row in rows if row["width"] == width] for rows in (found, other))
        good.append(column(one, "elbo").mean() >= column(two, "elbo").mean())
        told = [
            f"{column(rows, 'elbo').mean():.1f} (at most {column(rows, 'elbo').max():.1f}) and "
            f"{column(rows, 'auc_test').mean():.3f}"
            for rows in (one, two)
        ]
        parts.append(f"width {width}: {told[0]}, against {told[1]}")
    text = "mean ELBO and test AUC, against a start at draws of variance 1 / fan-in: " + "; ".join(parts)
    return Verdict(claim, REPRODUCED if all(good) else NOT_REPRODUCED, text)


def settled_count(found: Sequence[Row]) -> str:
    return f"{sum(bool(row['converged']) for row in found)} of {len(found)}"


def judge_departure(variant: str, table: Sequence[Row]) -> Verdict:
    """What a departure does, beside the loss as derived in the same loop, over the same widths and seeds: corrected
    where it moves one of four figures by more than two standard errors of paired differences.
    """
    claim = f"departure of the source's code: {variant}"
    base = {(row["width"], row["seed"]): row for row in table if row["variant"] == "as derived"}
    pairs = [(row, base[row["width"], row["seed"]]) for row in table if row["variant"] == variant]
    if len(pairs) < 2:
        return Verdict(claim, NOT_RUN, f"{len(pairs)} paired fits have no standard error")
    texts, moved = [], []
    for name, words in (
        ("auc_test", "test AUC"),
        ("log_score_test", "test log score"),
        ("active_weights", "active weights"),
        ("elbo_of_its_q", "ELBO as derived of what it finds"),
    ):
        ours, theirs = (np.array([pair[k][name] for pair in pairs], float) for k in (0, 1))
        mean, error = paired(ours - theirs)
        texts.append(
            f"{words} {ours.mean():.4g} against {theirs.mean():.4g} (paired {mean:+.3g} +- {error:.2g})"
        )
        if abs(mean) > 2.0 * error:
            moved.append(words)
    own = np.mean([row["objective"] - row["elbo_of_its_q"] for row, _ in pairs])
    return Verdict(
        claim,
        CORRECTED if moved else NOT_REPRODUCED,
        f"{', '.join(texts)}; its own objective is {own:+.1f} nats from that ELBO. Beyond two errors: "
        f"{', '.join(moved) or 'nothing'}. Converged after {pairs[0][0]['steps']} steps: "
        f"{settled_count([row for row, _ in pairs])}, as derived {settled_count([row for _, row in pairs])}; of fits "
        "that had not, this is the state on the way",
    )


def judge_source(table: Sequence[Row], ones: int, zeros: int) -> Verdict:
    """What the source ran, all three departures at once: reproduced where no run collapsed and the mean test AUC is
    the source's to two standard errors, of the runs and of the test rows.

    ones, zeros: test rows of either label. Collapsed: an AUC that is not above a half by two of its standard errors.
    """
    claim = f"all three departures, which is what the source ran, have its mean test AUC of {SOURCE_AUC:.3f}"
    found = [row for row in table if row["variant"] == "all three"]
    if len(found) < 2:
        return Verdict(claim, NOT_RUN, f"{len(found)} fits have no standard error")
    areas = column(found, "auc_test")
    mean, error = paired(areas)
    error = math.hypot(error, auc_error(mean, ones, zeros))
    lost = int((areas < 0.5 + 2.0 * auc_error(0.5, ones, zeros)).sum())
    good = lost == 0 and abs(mean - SOURCE_AUC) <= 2.0 * error
    rest = [row for row in table if row["variant"] == "as derived"]
    return Verdict(
        claim,
        REPRODUCED if good else NOT_REPRODUCED,
        f"mean test AUC {mean:.3f} +- {error:.3f} over {len(found)} runs at widths "
        f"{', '.join(str(width) for width in sorted({row['width'] for row in found}))}, of which {lost} collapsed to "
        f"a prediction without information (AUC from {areas.min():.3f} to {areas.max():.3f}); converged "
        f"{settled_count(found)}, and of the fits as derived beside them {settled_count(rest)}; the source's is over "
        "widths 1 to 37, with 50000 steps at rate 0.01",
    )


def judge_architectures(table: Sequence[Row]) -> Verdict:
    """Reproduced where empirical Bayes has the better test log score in each architecture that was run."""
    claim = "the approach carries over to other architectures (recurrent networks and transformers: not run)"
    parts, good = [], []
    for name in dict.fromkeys(row["architecture"] for row in table):
        bayes, plain = (row for row in table if row["architecture"] == name)
        good.append(bayes["log_score_test"] > plain["log_score_test"])
        parts.append(
            f"{name}: test log score {bayes['log_score_test']:.3f} against {plain['log_score_test']:.3f} without "
            f"regularisation, accuracy {bayes['accuracy_test']:.3f} against {plain['accuracy_test']:.3f}"
            + ("" if bayes["converged"] else " (not converged)")
        )
    if not good:
        return Verdict(claim, NOT_RUN, "no other architecture")
    return Verdict(claim, REPRODUCED if all(good) else NOT_REPRODUCED, "; ".join(parts))


def judge_reference(table: Sequence[Row]) -> Verdict:
    claim = "NUTS on the nearest hierarchical model is a reference at each width tried (ours)"
    chains = [row for row in table if row["method"].startswith("NUTS")]
    text = "; ".join(f"width {row['width']}, {row['method']}: {row['note'][:120]}" for row in chains)
    gaps = [row for row in table if isinstance(row.get("gap_to_nuts"), float) and row["gap_to_nuts"] > 0.0]
    if not gaps:
        return Verdict(claim, NOT_REPRODUCED, f"{text}: {NO_REFERENCE}")
    told = ", ".join(f"width {row['width']}, {row['method']} {row['gap_to_nuts']:.2f}" for row in gaps)
    every = {row["width"] for row in gaps} == {row["width"] for row in chains}
    return Verdict(
        claim,
        REPRODUCED if every else NOT_REPRODUCED,
        f"{text}; gaps in its standard deviations: {told} (noise floor {gaps[0]['noise_floor']:.2f})",
    )


def judge_all(study: Study) -> None:
    tables, sizes = study.tables, study.sizes
    bayes = tables["empirical_bayes"]
    last = [row for row in tables["classic"] if row["steps"] == sizes.classic_steps]
    classic = [row for row in last if row["network"] == "classic"]
    decay = [row for row in tables["baselines"] if row["method"] == "weight decay"]
    tables["correlations"] = correlations(bayes)
    data = rows(sizes.synthetic)
    ones = int(data.y_test.sum())
    areas = column(bayes, "auc_test")
    study.numbers |= {
        "train_rows": len(data.y),
        "test_rows": len(data.y_test),
        "features": data.x.shape[1],
        "null_log_likelihood": data.null,
        "auc_standard_error_of_the_test_rows": auc_error(float(areas.mean()), ones, len(data.y_test) - ones),
        "converged_fits": f"{sum(row['converged'] for row in bayes)} of {len(bayes)}",
        "upper_optima": f"{int(optima(bayes).sum())} of {len(bayes)}",
    }
    least = 4 if max(sizes.widths) > 4 else min(sizes.widths)
    claim = f"no over-fitting as the width grows (slopes from width {least} up)"
    study.judge(judge_overfitting(claim, bayes, classic, least))
    other = [row for row in tables["relatives"] if row["start"] == "prior"]
    if other:
        study.judge(judge_overfitting(f"{claim}, from the other start (ours)", other, classic, least))
    study.judge(
        judge_range("test ROC-AUC above the classic network on the whole range of widths", bayes, classic)
    )
    claim = "and above weight decay tuned on a validation part (ours)"
    study.judge(judge_range(claim, bayes, decay, at_edge(decay, sizes.decays)))
    study.judge(judge_correlation(bayes, tables["correlations"]))
    # A bound that selects has to select among optima, whatever start they were reached from.
    every = [*bayes, *other]
    tables["correlations_of_both_starts"] = correlations(every)
    study.judge(judge_selection(every, tables["correlations_of_both_starts"], tables["relatives"]))
    study.judge(judge_start(bayes, tables["relatives"]))
    study.judge(judge_architectures(tables.get("architectures", [])))
    for variant in sizes.variants[1:]:
        study.judge(judge_departure(variant, tables["departures"]))
    study.judge(judge_source(tables["departures"], ones, len(data.y_test) - ones))
    study.judge(
        Verdict(
            "'0.89 by Pearson'",
            CORRECTED,
            f"in the source's own table 0.89 is Spearman's correlation ({SOURCE_SPEARMAN}); Pearson's, of e^-loss, is "
            "0.916 (read there, not computed here). Both are in the table of correlations here, with intervals",
        )
    )
    study.judge(judge_reference(tables["reference"]))


# --- figures ----------------------------------------------------------------------------------------------


def _lines(
    axes: Any, found: Sequence[Row], name: str, colour: str, style: str, marker: str, label: str
) -> None:
    """A line through the means over seeds and a point for each seed, against the width."""
    values = by_width(found, name)
    axes.plot(
        list(values),
        [each.mean() for each in values.values()],
        style,
        color=colour,
        linewidth=1.8,
        label=label,
    )
    axes.plot(column(found, "width"), column(found, name), marker, color=colour, markersize=4, alpha=0.6)


def _widths(axes: Any, widths: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("hidden units (log scale)")


def draw_loss(
    path: Path, bayes: Sequence[Row], classic: Sequence[Row], tensor: Sequence[Row], null: float
) -> None:
    figure, axes = panels(6.8, 4.6)
    (ax,) = axes[0]
    _lines(ax, classic, "exp_minus_loss", BLACK, "--", "o", "classic, likelihood alone")
    _lines(ax, bayes, "exp_minus_loss", BLUE, "-", "s", "a variance for each weight, ELBO")
    if tensor:
        _lines(ax, tensor, "exp_minus_loss", ORANGE, "-.", "^", "a variance for each tensor, ELBO")
    ax.axhline(null, color=GREY, linestyle="dotted", label="share of ones alone")
    _widths(ax, sorted({row["width"] for row in bayes}))
    ax.set_ylabel("$e^{-loss}$ per training row")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


def draw_auc(
    path: Path, bayes: Sequence[Row], classic: Sequence[Row], decay: Sequence[Row], error: float
) -> None:
    figure, axes = panels(11.0, 4.8, 2)
    for ax, part in zip(axes[0], ("train", "test"), strict=True):
        _lines(ax, classic, f"auc_{part}", BLACK, "--", "o", "classic")
        _lines(ax, decay, f"auc_{part}", GREEN, "-.", "^", "weight decay, tuned on a validation part")
        _lines(ax, bayes, f"auc_{part}", BLUE, "-", "s", "a variance for each weight")
        _widths(ax, sorted({row["width"] for row in bayes}))
        ax.set_title(
            f"{part} rows" + (f" (standard error of an area: {error:.3f})" if part == "test" else ""),
            fontsize=11,
        )
        ax.set_ylabel("ROC-AUC")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    low = min(ax.get_ylim()[0] for ax in axes[0])
    for ax in axes[0]:
        ax.set_ylim(low, 1.005)
    figure.savefig(path)


def draw_correlation(path: Path, bayes: Sequence[Row], other: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    figure, axes = panels(11.0, 4.8, 2)
    markers = ("o", "s", "^", "D", "v", "P", "X", "*")
    colours = (BLACK, BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, GREY)
    best = max(row["elbo"] for row in (*bayes, *other))
    near = column([row for row in (*bayes, *other) if row["elbo"] >= best - NEAR], "auc_test")
    handles = []
    for index, width in enumerate(sorted({row["width"] for row in bayes})):
        marker, colour = markers[index % len(markers)], colours[index % len(colours)]
        for rows, face in ((bayes, colour), (other, "none")):
            used = [row for row in rows if row["width"] == width]
            close = [row for row in used if row["elbo"] >= best - NEAR]
            for ax, seen in zip(axes[0], (used, close), strict=True):
                ax.plot(
                    column(seen, "elbo"),
                    column(seen, "auc_test"),
                    marker,
                    color=colour,
                    markerfacecolor=face,
                    markersize=7,
                    alpha=0.85,
                )
        handles.append(Line2D([], [], linestyle="", marker=marker, color=colour, label=f"width {width}"))
    for face, label in ((BLACK, "the source's start"), ("none", "start at draws")):
        handles.append(
            Line2D([], [], linestyle="", marker="o", color=BLACK, markerfacecolor=face, label=label)
        )
    margin = max(0.15 * float(np.ptp(near)), 1e-3)
    axes[0, 0].set_title("all fits", fontsize=11)
    axes[0, 1].set_title(f"those {NEAREST}", fontsize=11)
    axes[0, 1].set(
        xlim=(best - 1.05 * NEAR, best + 0.05 * NEAR), ylim=(near.min() - margin, near.max() + margin)
    )
    for ax in axes[0]:
        ax.set(xlabel="train ELBO, nats", ylabel="test ROC-AUC")
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path)


def draw_departures(path: Path, table: Sequence[Row]) -> None:
    figure, axes = panels(11.0, 4.2, 3)
    widths = sorted({row["width"] for row in table})
    styles = [("o", BLUE), ("s", VERMILION), ("^", GREEN)]
    names = list(VARIANTS)
    for ax, name, title in zip(
        axes[0],
        ("auc_test", "elbo_of_its_q", "active_weights"),
        ("test ROC-AUC", "ELBO as derived of what it finds, nats", "active weights, $|\\mu| > 2\\sigma$"),
        strict=True,
    ):
        for index, width in enumerate(widths):
            marker, colour = styles[index % len(styles)]
            for place, variant in enumerate(names):
                used = [row for row in table if row["variant"] == variant and row["width"] == width]
                places = np.full(len(used), place + 0.22 * (index - 0.5 * (len(widths) - 1)))
                label = f"{width} hidden units" if place == 0 and ax is axes[0, 0] else None
                ax.plot(
                    column(used, name), places, marker, color=colour, markersize=5, alpha=0.8, label=label
                )
        ax.set_xlabel(title)
        ax.set_yticks(range(len(names)), names if ax is axes[0, 0] else [""] * len(names))
        ax.set_ylim(len(names) - 0.5, -0.5)
        for edge in range(1, len(names)):
            ax.axhline(edge - 0.5, color=GREY, linewidth=0.4)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)


def draw(study: Study) -> None:
    tables = study.tables
    bayes = tables["empirical_bayes"]
    last = [row for row in tables["classic"] if row["steps"] == study.sizes.classic_steps]
    classic = [row for row in last if row["network"] == "classic"]
    decay = [row for row in tables["baselines"] if row["method"] == "weight decay"]
    tensor = [row for row in tables["relatives"] if row["per"] == "tensor" and row["labels"] == "true"]
    null = math.exp(study.numbers["null_log_likelihood"] / study.numbers["train_rows"])
    draw_loss(study.out / "loss.png", bayes, classic, tensor, null)
    error = study.numbers["auc_standard_error_of_the_test_rows"]
    draw_auc(study.out / "roc_auc.png", bayes, classic, decay, error)
    other = [row for row in tables["relatives"] if row["start"] == "prior"]
    draw_correlation(study.out / "correlation.png", bayes, other)
    draw_departures(study.out / "departures.png", tables["departures"])


# --- all of it --------------------------------------------------------------------------------------------


def main(tiny: bool = False, out: str | Path | None = None, cache: str | None = None) -> Study:
    """Run the study and write tables, figures and verdicts to `out`.

    Without `out` a full run writes to results/empirical_bayes_alzheimers beside this file, a tiny one, which is on
    made-up rows, to a temporary folder. cache: a folder for compiled programs.
    """
    study = Study.begin(TINY if tiny else FULL, "empirical_bayes_alzheimers", tiny, out)
    collect(study, cache)
    judge_all(study)
    draw(study)
    study.write()
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "cache", tiny="small sizes and made-up rows, in seconds")
    main(**vars(parser.parse_args()))
