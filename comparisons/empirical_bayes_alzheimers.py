"""Empirical Bayes with a variance for each weight: does the bound choose the network, without a validation set?

Source: D. K. Basov, "Bayesian neural networks" (in Russian), and the author's repository as of commit 19c71b5. One
hidden layer of ReLU units, widths 1 to 37, p(y = 1 | x, w) = sigmoid(f(x, w)), w_k ~ N(0, s_k^2), and
q(w) = N(mu, sigma^2) with mu = gamma sigma, sigma = softplus(rho), gamma = 0 and rho = 1 at the start. At its optimum
s_k^2 = mu_k^2 + sigma_k^2, so that

    ELBO = E_q log p(y | x, w) - 1/2 sum_k log(1 + gamma_k^2).

Corrected here. The note prints the cost as <nu, nu> / 2 with nu = log(1 + gamma^2), and the code of that day computed
this, the sum of squares. Its layers add (x @ sigma) eps with one eps for each row and unit, where independent weights
have a spread of sqrt(x^2 @ sigma^2). A shift and a scale of each input are trained along without a prior. "0.89 by
Pearson" is Spearman's in its own table; both are judged, with the copies of one optimum as one unit. And the s_k are
as many as the weights and not paid for: the ELBO is a bound on the largest likelihood that a prior of this family can
have, log p(y | s), not on an evidence.

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

With --splits N the other architectures are repeated on N - 1 random splits. The choice of a network by its ELBO over
splits is `empirical_bayes_selection.py`. --checkpoint keeps what is finished.

    PPL_BNN_DATA=... python comparisons/empirical_bayes_alzheimers.py [--tiny] [--out DIR] [--splits N] [--cache DIR]
                                                                      [--checkpoint DIR]
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
from claims import Estimate, Referee, Verdict, bootstrap, exact, mean, mean_over_splits, read_claims
from scipy import stats
from study import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Study,
    command_line,
    converged,
    kept,
    panels,
    run,
)

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors, scores
from ppl_bnn.core.errors import BNNError
from ppl_bnn.diagnostics import function_space
from ppl_bnn.diagnostics.importance import leave_one_out
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
# Fits are copies of one optimum where ELBO and complexity agree to a nat and test AUC to this.
ONE_NAT, ONE_AREA = 1.0, 0.002
# What the source ran.
SOURCE_WIDTHS, SOURCE_STEPS, SOURCE_RATE, SOURCE_DRAWS = 37, 50_000, 0.01, 5000
# A test AUC below this is a prediction without information: a half and three of its standard errors on these rows.
COLLAPSED = 0.55
NO_REFERENCE = "no reference"
# The scores of a prediction, as tables and claims name them.
SCORES = ("auc", "log_score")


@dataclass(frozen=True)
class Sizes:
    """How much is computed. The rows are the table's unless `synthetic`; the rest trades error for time."""

    synthetic: bool = False
    widths: tuple[int, ...] = (1, 2, 4, 6, 10, 17, 28, 37)
    seeds: int = 3
    splits: int = 1
    shuffles: int = 1
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
    splits=2,
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


def smaller(sizes: Sizes) -> str:
    """How the sizes differ from those of the source."""
    repeated = f"{sizes.seeds} seeds instead of 1, {sizes.splits} split{'s' if sizes.splits > 1 else ''}"
    return (
        f"{len(sizes.widths)} widths of the source's {SOURCE_WIDTHS}, {repeated}; {sizes.steps} steps at rate "
        f"{sizes.learning_rate:g}, for departures {sizes.variant_steps} at {sizes.variant_rate:g}, for other "
        f"architectures {sizes.architecture_steps}, instead of {SOURCE_STEPS} at {SOURCE_RATE:g}; {sizes.draws} draws "
        f"instead of {SOURCE_DRAWS}"
    )


def rows(synthetic: bool, split: int = 0) -> Rows:
    """The source's split of the table, or 160 made-up rows, two of whose six inputs act through their product; another
    `split` than 0 is a random one with as many rows in either part.
    """
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
    if split:
        order = np.random.default_rng(split).permutation(len(y))
        train, test = order[: len(train)], order[len(train) :]
    centre, sd = x[train].mean(0), x[train].std(0)
    return Rows((x[train] - centre) / sd, y[train], (x[test] - centre) / sd, y[test])


def validation_part(data: Rows) -> Rows:
    """Four fifths of the training rows to fit, and the fifth that is held out, in place of the test rows."""
    order = np.random.default_rng(11).permutation(len(data.y))
    held, left = order[: len(order) // 5], order[len(order) // 5 :]
    return Rows(data.x[left], data.y[left], data.x[held], data.y[held])


def images(count: int, split: int = 0) -> Rows:
    """The bundled digits, 8 x 8 pixels divided by 16: `count` random rows to train on, `held_images` to test on."""
    table = bnn.data.load("digits")
    order = np.random.default_rng(split).permutation(len(table.y))
    x = table.x.reshape(-1, 8, 8, 1) / 16.0
    train, test = order[:count], order[count : count + held_images(count)]
    return Rows(x[train], table.y[train], x[test], table.y[test])


def held_images(count: int) -> int:
    """How many images to test on beside `count` to train on."""
    return min(count, 500)


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
    split: int = 0,
    held: bool = False,
) -> Found:
    """(a), and its relatives: one variance for each tensor, another start, labels shuffled among the training rows.

    held: fit to four fifths of the training rows and score the other fifth, as a choice by validation asks for.
    """
    begun = time.perf_counter()
    data = rows(sizes.synthetic, split)
    if labels == "shuffled":
        data = Rows(data.x, np.random.default_rng(7 + seed).permutation(data.y), data.x_test, data.y_test)
    if held:
        data = validation_part(data)
    posterior = empirical_bayes(sizes, data, width, seed, per, estimator, start)
    if held:
        found = posterior_scores(posterior, data, sizes.draws)
        row: dict[str, Any] = {"split": split, "start": start, "width": width, "seed": seed}
        row |= {f"{score}_validation": found[f"{score}_test"] for score in SCORES}
        return [("validation", row | {"seconds": time.perf_counter() - begun})]
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
        "split": split,
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
    if (per, estimator, labels) == ("weight", "local", "true"):
        row |= left_out(posterior)
    main = (per, estimator, labels, start) == ("weight", "local", "true", "source")
    table = "empirical_bayes" if main else "relatives"
    return [(table, row)]


def left_out(posterior: Any) -> dict[str, float]:
    """The leave-one-out value of the training rows and the share of them whose Pareto k is too large to trust it."""
    found = leave_one_out(posterior)
    return {} if found.reason else {"elpd_loo": found.elpd, "share_above_k": found.share_above}


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
    for steps, parameters in found.kept.items():
        for seed in range(sizes.seeds):
            p = member(parameters, seed)
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
    part = validation_part(data)
    inputs, grid = data.x.shape[1], np.array(sizes.decays)

    def score(w: Any, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        return judged(np.asarray(logits(jax.tree.map(jnp.asarray, w), jnp.asarray(x, jnp.float32)))[None], y)

    count = sizes.decay_seeds * len(grid)
    starts = uniform_start(inputs, width, sizes.decay_seeds, 100 + width)
    starts = {name: np.repeat(value, len(grid), axis=0) for name, value in starts.items()}
    precisions = np.tile(grid, sizes.decay_seeds)
    fitted = decayed(part.x, part.y, starts, precisions, sizes.decay_steps)
    validation = np.array(
        [score(member(fitted, k), part.x_test, part.y_test)["log_score"] for k in range(count)]
    )
    chosen = float(grid[np.argmax(validation.reshape(sizes.decay_seeds, len(grid)).mean(0))])
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
    good = [name for name, (_, word) in fitted.items() if word.startswith("converged: ")]
    reference = fitted[good[0]][0] if good else None
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
        if name.startswith("NUTS"):
            there = function_space.convergence(posterior, data.x_test)
            row |= {"rhat_test": there.rhat, "ess_test": there.ess_bulk}
        row |= {
            "gradient_evaluations": posterior.info.gradient_evaluations,
            "seconds": posterior.info.compile_seconds + posterior.info.run_seconds,
            "note": (word or "; ".join(posterior.info.warnings))[:300],
        }
        results.append(("reference", row))
    return results


def run_architecture(sizes: Sizes, name: str, split: int = 0) -> Found:
    """The same prior in another architecture, beside the same network with a prior so wide that it says nothing."""
    if name == "two hidden layers":
        data = rows(sizes.synthetic, split)
        model: Any = partial(network, widths=sizes.deep)
        settings: dict[str, Any] = {
            "estimator": "local",
            "start": zeros(data.x.shape[1], sizes.deep),
            "init_scale": START / 2.0,
        }
    else:
        data = images(sizes.image_rows, split)
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
        posterior = bnn.fit(partial(model, prior=prior), data.x, data.y, method, seed=split)
        row: dict[str, Any] = {"architecture": name, "method": choice, "split": split}
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
        ("empirical Bayes", {"width": width, "seed": seed, "labels": "shuffled"})
        for width in sizes.shuffled_widths
        for seed in range(1, sizes.shuffles)
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
    for split in range(1, sizes.splits):
        tasks += [("architecture", {"name": name, "split": split}) for name in sizes.architectures]
    return tasks


def perform(
    sizes: Sizes, name: str, arguments: dict[str, Any], cache: str | None, checkpoint: str | Path | None
) -> Found:
    """One part, in whatever process; from the checkpoint if it is there."""
    if cache is not None:
        bnn.enable_compilation_cache(cache)
    called = ", ".join((name, *(f"{key} {value}" for key, value in arguments.items())))
    return kept(checkpoint, called, sizes, lambda: {"rows": PARTS[name](sizes, **arguments)})["rows"]


def collect(study: Study, cache: str | None, checkpoint: str | Path | None = None) -> None:
    """Run the plan, in worker processes where there are any, and fill the tables in the order of the plan."""
    sizes, tasks = study.sizes, plan(study.sizes)
    if sizes.workers:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(sizes.workers, mp_context=context) as pool:
            futures = [
                pool.submit(perform, sizes, name, arguments, cache, checkpoint) for name, arguments in tasks
            ]
            for (name, arguments), future in zip(tasks, futures, strict=True):
                future.add_done_callback(lambda _, text=f"{name} {arguments}": study.say(text))
            found = [future.result() for future in futures]
    else:
        found = [perform(sizes, name, arguments, cache, checkpoint) for name, arguments in tasks]
    for part in found:
        for table, row in part:
            study.tables.setdefault(table, []).append(row)
    for table in ("empirical_bayes", "relatives", "classic", "baselines"):
        study.tables.setdefault(table, []).sort(
            key=lambda row: (
                row.get("split", 0),
                str(row.get("method", row.get("per", ""))),
                row["width"],
                row["seed"],
            )
        )


# --- verdicts ---------------------------------------------------------------------------------------------

Row = Mapping[str, Any]


def column(found: Sequence[Row], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in found])


def by_width(found: Sequence[Row], name: str) -> dict[int, np.ndarray]:
    """Values of a column, one array for each width, in the order of widths."""
    widths = sorted({int(row["width"]) for row in found})
    return {width: column([row for row in found if row["width"] == width], name) for width in widths}


def slopes(found: Sequence[Row], name: str, least: int) -> np.ndarray:
    """Least-squares slope of a column against log2 of the width, from width `least` up, one for each seed."""
    used = [row for row in found if row["width"] >= least]
    results = []
    for seed in sorted({row["seed"] for row in used}):
        own = [row for row in used if row["seed"] == seed]
        x = np.log2(column(own, "width"))
        if np.ptp(x) > 0.0:
            results.append(float(np.polyfit(x, column(own, name), 1)[0]))
    return np.array(results)


def of_split(found: Sequence[Row], split: int = 0) -> list[Row]:
    """Rows of one split; rows that name none are of the source's."""
    return [row for row in found if row.get("split", 0) == split]


def parts(study: Study) -> tuple[list[Row], list[Row], list[Row], list[Row]]:
    """Fits of the source's split: (a) from the source's start, (a) from the other start, classic, weight decay."""
    tables = study.tables
    return (
        of_split(tables["empirical_bayes"]),
        [row for row in of_split(tables["relatives"]) if row["start"] == "prior"],
        [
            row
            for row in tables["classic"]
            if row["steps"] == study.sizes.classic_steps and row["network"] == "classic"
        ],
        [row for row in tables["baselines"] if row["method"] == "weight decay"],
    )


# The two starts of (a), as the keys of claims name them.
SOURCE, OTHER = "source", "other"


def judge_overfitting(
    referee: Referee, start: str, bayes: Sequence[Row], classic: Sequence[Row], least: int
) -> None:
    """Slopes of test AUC and test log score with the width, one for each seed."""
    for score in SCORES:
        key = f"overfitting-{score}-{start}"
        values, beside = (slopes(found, f"{score}_test", least) for found in (bayes, classic))
        if not len(values):
            referee.not_run(key, "no slope: fewer than two widths")
            continue
        text = f"of the network without regularisation {mean(beside)}" if len(beside) else ""
        referee.measured(key, mean(values), f"{text}; {settled_count(bayes)} fits converged")


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


def least_differences(ours: Sequence[Row], theirs: Sequence[Row]) -> np.ndarray:
    """For each seed that both have: the least difference in test AUC over the widths that both have."""
    areas = [{(row["seed"], row["width"]): row["auc_test"] for row in found} for found in (ours, theirs)]
    shared = sorted(set(areas[0]) & set(areas[1]))
    seeds = sorted({seed for seed, _ in shared})
    return np.array(
        [min(areas[0][at] - areas[1][at] for at in shared if at[0] == seed) for seed in seeds], float
    )


def judge_range(
    referee: Referee, key: str, ours: Sequence[Row], theirs: Sequence[Row], note: str = ""
) -> None:
    """Above a rival at every width: the least difference over widths, one for each seed.

    note: what is to be known of the rival.
    """
    values = least_differences(ours, theirs)
    if not len(values):
        referee.not_run(key, "no fits from this start")
        return
    one, two = by_width(ours, "auc_test"), by_width(theirs, "auc_test")
    text = ", ".join(
        f"{width}: {one[width].mean() - two[width].mean():+.3f}" for width in one if width in two
    )
    referee.measured(key, mean(values), f"mean difference by width {text}{note}")


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
ONE_EACH = "one fit a width, as in the source"
OPTIMA = "distinct optima"
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
        OPTIMA: (of_optima(found, "elbo"), of_optima(found, "auc_test")),
        ONE_EACH: (elbo[first], area[first]),
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


def distinct(found: Sequence[Row]) -> list[list[Row]]:
    """Fits in groups, one for each optimum: copies agree in ELBO, complexity cost and test AUC."""
    groups: list[list[Row]] = []
    for row in sorted(found, key=lambda row: -row["elbo"]):
        for group in groups:
            first = group[0]
            if (
                abs(row["elbo"] - first["elbo"]) < ONE_NAT
                and abs(row["complexity_cost"] - first["complexity_cost"]) < ONE_NAT
                and abs(row["auc_test"] - first["auc_test"]) < ONE_AREA
            ):
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def of_optima(found: Sequence[Row], name: str) -> np.ndarray:
    """A column, averaged over the copies of each optimum."""
    return np.array([column(group, name).mean() for group in distinct(found)])


def coefficient(units: np.ndarray, kind: str) -> float:
    """Pearson's or Spearman's correlation of the two columns of `units`; 0 where one of them is constant."""
    x, y = units.T if kind == "pearson" else map(stats.rankdata, units.T)
    if np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def over_optima(found: Sequence[Row], kind: str) -> Estimate:
    """The correlation of e^-loss (Pearson's; Spearman's is that of the ELBO) and test AUC over distinct optima."""
    units = np.stack([of_optima(found, name) for name in ("exp_minus_loss", "auc_test")], axis=1)
    return bootstrap(units, partial(coefficient, kind=kind))


def judge_correlation(referee: Referee, bayes: Sequence[Row], other: Sequence[Row]) -> None:
    """Pearson's correlation, as the source names it, and Spearman's, whose value it is; over distinct optima."""
    largest = max(map(len, distinct(bayes)))
    table = {row["fits"]: row for row in correlations(bayes)}
    for kind in ("pearson", "spearman"):
        told = [
            f"{case} {row[kind]:.2f} (n = {row['count']})"
            for case, row in table.items()
            if case in ("all fits", ONE_EACH, ABOVE, NEAREST) and kind in row
        ]
        if other:
            told.append(f"from the other start {over_optima(other, kind)}")
        referee.measured(
            kind,
            over_optima(bayes, kind),
            f"the {len(bayes)} fits are {len(distinct(bayes))} optima, one of them found {largest} times; of the "
            f"ELBO itself over fits: {'; '.join(told)}",
        )
    referee.undecided(
        "pearson-label",
        "its own table has 0.888 for Spearman's and 0.916 for Pearson's correlation of e^-loss, as read there; its 37 "
        "rows are not stored here, so neither was computed",
    )


def selection(fits: Sequence[Row], checked: Mapping[tuple[Any, ...], float]) -> list[dict[str, Any]]:
    """What each rule picks from the fits of one start on one split, with the scores on the test rows.

    The rules are the largest ELBO; the best log score on a validation part, by a fit of the same width and seed to the
    other training rows, of which `checked` has the score by split, start, width and seed; and the largest leave-one-out
    value. "best" and "median" are of the test scores themselves.
    """
    results = []
    for split in sorted({row.get("split", 0) for row in fits}):
        for start in ("source", "prior"):
            found = [row for row in of_split(fits, split) if row["start"] == start]
            if not found:
                continue
            keys = [(split, start, row["width"], row["seed"]) for row in found]
            rules = {"elbo": column(found, "elbo")}
            if all(key in checked for key in keys):
                rules["validation"] = np.array([checked[key] for key in keys])
            if all("elpd_loo" in row for row in found):
                rules["loo"] = column(found, "elpd_loo")
            result = {"split": split, "start": start, "fits": len(found)}
            for rule, values in rules.items():
                chosen = found[int(np.argmax(values))]
                result |= {f"{part}_{rule}": chosen[part] for part in ("width", "seed")}
                result |= {f"{score}_{rule}": chosen[f"{score}_test"] for score in SCORES}
            for score in SCORES:
                values = column(found, f"{score}_test")
                result |= {f"{score}_best": float(values.max()), f"{score}_median": float(np.median(values))}
            results.append(result)
    return results


def regrets(chosen: Sequence[Row], score: str) -> tuple[np.ndarray, np.ndarray]:
    """Test scores that the fit of the largest ELBO and the median fit lack to the best one, by split."""
    best, median, elbo = (column(chosen, f"{score}_{of}") for of in ("best", "median", "elbo"))
    return best - elbo, best - median


def judge_this_split(referee: Referee, start: str, chosen: Sequence[Row], note: str = "") -> None:
    """Regret of the ELBO's choice on the source's split alone. chosen: the rows of `selection` of one start."""
    for score in SCORES:
        key = f"this-split-{score}-{start}"
        if not chosen:
            referee.not_run(key, "no fits from this start")
            continue
        row, (own, median) = chosen[0], regrets(chosen, score)
        referee.measured(
            key,
            exact(float(own[0] - 0.5 * median[0])),
            f"of {row['fits']} fits the one with the largest ELBO (width {row['width_elbo']}) has "
            f"{row[f'{score}_elbo']:.4f}, the best {row[f'{score}_best']:.4f}, the median "
            f"{row[f'{score}_median']:.4f}{note}",
        )


def of_both_starts(found: Sequence[Row]) -> str:
    """What a verdict adds on the fit that has the largest ELBO whatever start it came from."""
    chosen = max(found, key=lambda row: row["elbo"])
    best = {score: column(found, f"{score}_test").max() for score in SCORES}
    return (
        f"; of the {len(found)} fits from both starts the one with the largest ELBO has AUC {chosen['auc_test']:.4f} "
        f"(best {best['auc']:.4f}) and log score {chosen['log_score_test']:.4f} (best {best['log_score']:.4f})"
    )


def judge_shuffled(referee: Referee, relatives: Sequence[Row], bayes: Sequence[Row]) -> None:
    """What the ELBO exceeds the share of ones by on shuffled labels: the largest over widths, for each permutation."""
    shuffled = [row for row in relatives if row["labels"] == "shuffled" and row["per"] == "weight"]
    if not shuffled:
        referee.not_run("shuffled", "no fits to shuffled labels")
        return
    excess = [
        max(row["elbo"] - row["null"] for row in shuffled if row["seed"] == seed)
        for seed in sorted({row["seed"] for row in shuffled})
    ]
    text = ", ".join(
        f"{row['elbo'] - row['null']:+.1f} nats at width {row['width']} (Monte Carlo error {row['elbo_se']:.1f})"
        for row in shuffled
        if row["seed"] == shuffled[0]["seed"]
    )
    tensors = {
        (row["width"], row["seed"]): row["elbo"]
        for row in relatives
        if row["per"] == "tensor" and row["labels"] == "true"
    }
    pairs = [
        row["elbo"] - tensors[row["width"], row["seed"]]
        for row in bayes
        if (row["width"], row["seed"]) in tensors
    ]
    if pairs:
        text += (
            f"; on the true labels the ELBO is {min(pairs):.0f} to {max(pairs):.0f} nats above that with one variance "
            "for each tensor, at as many variances as weights instead of 4, for which it does not charge"
        )
    referee.measured("shuffled", mean(excess), text)


def judge_start(referee: Referee, bayes: Sequence[Row], other: Sequence[Row]) -> None:
    """The gain in ELBO by the source's start, averaged over widths, one for each seed."""
    found = [{(row["seed"], row["width"]): row["elbo"] for row in each} for each in (bayes, other)]
    shared = sorted(set(found[0]) & set(found[1]))
    if not shared:
        referee.not_run("start", "no other start")
        return
    gains = {at: found[0][at] - found[1][at] for at in shared}
    seeds = sorted({seed for seed, _ in shared})
    one, two = by_width(bayes, "elbo"), by_width(other, "elbo")
    text = ", ".join(
        f"{width}: {one[width].mean() - two[width].mean():+.0f}" for width in one if width in two
    )
    referee.measured(
        "start",
        mean([float(np.mean([gain for at, gain in gains.items() if at[0] == seed])) for seed in seeds]),
        f"mean gain by width {text}; converged: {settled_count(bayes)} and {settled_count(other)} fits",
    )


def settled_count(found: Sequence[Row]) -> str:
    return f"{sum(bool(row['converged']) for row in found)} of {len(found)}"


# Each departure: the key of its claim.
DEPARTURES = {
    "squared cost": "squared-cost",
    "shared noise": "shared-noise",
    "trained inputs": "trained-inputs",
    "all three": "all-three",
}
# What a departure may change: its name in the table and in texts.
FIGURES = {
    "log_score_test": "test log score",
    "active_weights": "active weights",
    "elbo_of_its_q": "ELBO as derived of what it finds",
}


def by_seed(table: Sequence[Row], variant: str, name: str) -> np.ndarray:
    """The mean over widths of a column of one variant, less that of the loss as derived, one for each seed."""
    base = {(row["width"], row["seed"]): row[name] for row in table if row["variant"] == "as derived"}
    gains: dict[int, list[float]] = {}
    for row in table:
        if row["variant"] == variant and (row["width"], row["seed"]) in base:
            gains.setdefault(row["seed"], []).append(row[name] - base[row["width"], row["seed"]])
    return np.array([float(np.mean(gains[seed])) for seed in sorted(gains)])


def judge_departure(referee: Referee, variant: str, table: Sequence[Row]) -> None:
    """The change in test AUC by a departure, once the loss as derived and it have both converged."""
    key = DEPARTURES[variant]
    values = by_seed(table, variant, "auc_test")
    if not len(values):
        referee.not_run(key, "this departure was not run")
        return
    base, found = ([row for row in table if row["variant"] == name] for name in ("as derived", variant))
    text = ", ".join(f"{words} {mean(by_seed(table, variant, name))}" for name, words in FIGURES.items())
    text = f"change in {text}; converged: {settled_count(found)} fits, as derived {settled_count(base)}"
    if all(row["converged"] for row in (*base, *found)):
        referee.measured(key, mean(values), text)
    else:
        which = "departure" if all(row["converged"] for row in base) else "loss as derived"
        why = f"the fits of the {which} have not converged, so there is nothing to compare"
        referee.undecided(key, why, f"change in test AUC {mean(values)}, {text}")


def judge_source(referee: Referee, table: Sequence[Row], steps: int, rate: float) -> None:
    """The mean test AUC of all three departures at once, over widths, one for each seed; at the source's settings."""
    found = [row for row in table if row["variant"] == "all three"]
    if not found:
        referee.not_run("source-auc", "the three departures were not run together")
        return
    lost = int((column(found, "auc_test") < COLLAPSED).sum())
    text = f"of {len(found)} runs {lost} predict without information (test AUC below {COLLAPSED:g})"
    if steps < SOURCE_STEPS or rate > SOURCE_RATE:
        why = f"run with {steps} steps at rate {rate:g}, the source with {SOURCE_STEPS} at {SOURCE_RATE:g}"
        referee.not_run("source-auc", why, f"as run, {text}, which says nothing about the source")
        return
    seeds = sorted({row["seed"] for row in found})
    areas = [
        float(column([row for row in found if row["seed"] == seed], "auc_test").mean()) for seed in seeds
    ]
    referee.measured("source-auc", mean(areas), text)


def judge_formulas(referee: Referee) -> None:
    """The printed cost beside the divergence at the best prior scale; the code's noise beside independent weights."""
    gamma = 2.0
    s = math.sqrt(1.0 + gamma**2)
    divergence = math.log(s) + (1.0 + gamma**2) / (2.0 * s**2) - 0.5
    printed = 0.5 * math.log1p(gamma**2) ** 2
    referee.proved(
        "printed-cost",
        not math.isclose(divergence, printed),
        f"the divergence at the best prior scale is log(1 + gamma^2) / 2 for each weight; at gamma = {gamma:g} that is "
        f"{divergence:.3f} nats, the printed cost {printed:.3f}",
    )
    x, sigma = np.ones(2), np.ones(2)
    independent, shared = math.sqrt(x**2 @ sigma**2), float(x @ sigma)
    referee.proved(
        "printed-noise",
        not math.isclose(independent, shared),
        "a spread of x @ sigma is that of weights which share one eps; for x = (1, 1) and sigma = (1, 1) it is "
        f"{shared:.3f}, that of independent weights, sqrt(x^2 @ sigma^2), is {independent:.3f}",
    )


ARCHITECTURES = {"two hidden layers": "two-layers", "convolution": "convolution"}


def judge_architecture(
    referee: Referee, name: str, table: Sequence[Row], test_rows: float, train_rows: float
) -> None:
    """The gain in test log score over the same network without regularisation, one for each split."""
    key = ARCHITECTURES[name]
    of_this = [row for row in table if row["architecture"] == name]
    splits = sorted({row.get("split", 0) for row in of_this})
    if not splits:
        referee.not_run(key, "this architecture was not run")
        return
    pairs = [
        [
            next(row for row in of_split(of_this, split) if row["method"].startswith(how))
            for how in ("emp", "no ")
        ]
        for split in splits
    ]
    gains, accuracies = (
        [bayes[column] - plain[column] for bayes, plain in pairs]
        for column in ("log_score_test", "accuracy_test")
    )
    referee.measured(
        key,
        mean_over_splits(gains, test_rows, train_rows),
        f"in accuracy {np.mean(accuracies):+.3f}; converged: {settled_count([bayes for bayes, _ in pairs])} fits by "
        f"empirical Bayes, {settled_count([plain for _, plain in pairs])} without regularisation",
    )


def judge_reference(referee: Referee, width: int, table: Sequence[Row]) -> None:
    """How many of the hierarchical models have chains that converged, by the library's diagnosis at training rows, and
    at the test rows, where methods are held to them.
    """
    key = f"reference-{width}"
    here = [row for row in table if row["width"] == width]
    chains = [row for row in here if row["method"].startswith("NUTS")]
    if not chains:
        referee.not_run(key, "no chains at this width")
        return
    text = "; ".join(f"{row['method']}: {row['note'][:110]}" for row in chains)
    # The column holds words, too, so that its numbers are read as text.
    measured = [row for row in here if row.get("gap_to_nuts", NO_REFERENCE) != NO_REFERENCE]
    gaps = [row for row in measured if float(row["gap_to_nuts"]) > 0.0]
    if gaps:
        told = ", ".join(f"{row['method']} {float(row['gap_to_nuts']):.2f}" for row in gaps)
        text += f"; gaps in standard deviations of the reference: {told} (noise floor {gaps[0]['noise_floor']:.2f})"
    good = [row for row in chains if row["note"].startswith("converged: ")]
    if not all("rhat_test" in row for row in good):
        referee.undecided(key, "R-hat and ESS at the test rows were not stored", text)
        return
    count = sum(converged(row["rhat_test"], row["ess_test"]) for row in good)
    referee.measured(key, exact(float(count)), text)


def judge(study: Study) -> list[Verdict]:
    """All verdicts, from the tables as they are stored."""
    sizes, tables, numbers = study.sizes, study.tables, study.numbers
    referee = Referee(read_claims("empirical_bayes_alzheimers"), smaller(sizes))
    bayes, other, classic, decay = parts(study)
    least = 4 if max(sizes.widths) > 4 else min(sizes.widths)
    train_rows, test_rows = numbers["train_rows"], numbers["test_rows"]
    edge = at_edge(decay, sizes.decays)
    together = of_both_starts([*bayes, *other]) if other else ""
    for start, found in ((SOURCE, bayes), (OTHER, other)):
        judge_overfitting(referee, start, found, classic, least)
        judge_range(referee, f"above-classic-{start}", found, classic)
        judge_range(referee, f"above-decay-{start}", found, decay, edge)
        judge_this_split(referee, start, selection(found, {}), together)
    judge_correlation(referee, bayes, other)
    judge_shuffled(referee, tables["relatives"], bayes)
    judge_start(referee, bayes, other)
    judge_formulas(referee)
    departures = tables["departures"]
    for variant in DEPARTURES:
        judge_departure(referee, variant, departures)
    judge_source(referee, departures, sizes.variant_steps, sizes.variant_rate)
    architectures = tables.get("architectures", ())
    judge_architecture(referee, "two hidden layers", architectures, test_rows, train_rows)
    count = sizes.image_rows
    judge_architecture(referee, "convolution", architectures, held_images(count), count)
    referee.not_run("recurrent", "recurrent networks and transformers were not run")
    for width in (0, 1):
        judge_reference(referee, width, tables["reference"])
    return referee.verdicts()


def describe(study: Study) -> None:
    """The tables of correlations and of choices, and the numbers of the run."""
    tables, data = study.tables, rows(study.sizes.synthetic)
    bayes, other, _, _ = parts(study)
    tables["correlations"] = correlations(bayes)
    if other:
        tables["correlations_other_start"] = correlations(other)
    tables["selection"] = selection([*bayes, *other], {})
    ones = int(data.y_test.sum())
    area = float(column(bayes, "auc_test").mean())
    study.numbers |= {
        "train_rows": len(data.y),
        "test_rows": len(data.y_test),
        "features": data.x.shape[1],
        "null_log_likelihood": data.null,
        "auc_standard_error_of_the_test_rows": auc_error(area, ones, len(data.y_test) - ones),
        "converged_fits": f"{sum(row['converged'] for row in bayes)} of {len(bayes)}",
        "upper_optima": f"{int(optima(bayes).sum())} of {len(bayes)}",
    }


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
    """What each departure changes, fit by fit; hollow where the loss still fell when the steps ran out."""
    from matplotlib.lines import Line2D

    figure, axes = panels(9.2, 4.6, 2)
    names = [name for name in VARIANTS if any(row["variant"] == name for row in table)]
    base = {(row["width"], row["seed"]): row for row in table if row["variant"] == "as derived"}
    shapes = dict(zip(sorted({row["width"] for row in table}), ("o", "s", "^", "D"), strict=False))
    left, right = axes[0]
    for place, variant in enumerate(names):
        own = [row for row in table if row["variant"] == variant and (row["width"], row["seed"]) in base]
        at = place + 0.22 * np.linspace(-1.0, 1.0, len(own)) * (len(own) > 1)
        lost = 0
        for row, height in zip(own, at, strict=True):
            face = BLUE if row["converged"] else "white"
            style = {"color": BLUE, "markerfacecolor": face, "markersize": 7, "markeredgewidth": 1.4}
            right.plot(row["elbo_of_its_q"], height, shapes[row["width"]], **style)
            if row["auc_test"] < COLLAPSED:
                lost += 1
            else:
                change = row["auc_test"] - base[row["width"], row["seed"]]["auc_test"]
                left.plot(change, height, shapes[row["width"]], **style)
        if lost:
            left.text(
                0.02,
                place - 0.36,
                f"{lost} of {len(own)} predict without information (AUC below {COLLAPSED:g})",
                transform=left.get_yaxis_transform(),
                fontsize=8,
                va="center",
            )
    left.axvline(0.0, color=GREY, linewidth=1.0, zorder=0)
    left.set_xlabel(
        "change in test ROC-AUC from the fit of the same width\nand seed as derived (better to the right)"
    )
    right.set_xlabel("ELBO as derived of what it finds, nats\n(better to the right)")
    for ax in (left, right):
        ax.set_yticks(range(len(names)), names if ax is left else [""] * len(names))
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(names) - 0.5, -0.5)
        for edge in range(1, len(names)):
            ax.axhline(edge - 0.5, color="0.9", linewidth=0.8, zorder=0)
    settled_here = sum(bool(row["converged"]) for row in table)
    figure.suptitle(
        f"Departures from the loss as derived: the loss had settled in {settled_here} of {len(table)} fits",
        fontsize=11,
    )
    handles = [
        Line2D(
            [], [], linestyle="none", marker=shape, color=BLUE, markersize=7, label=f"{width} hidden units"
        )
        for width, shape in shapes.items()
    ]
    hollow = {"marker": "o", "color": BLUE, "markerfacecolor": "white", "markersize": 7}
    handles.append(
        Line2D([], [], linestyle="none", **hollow, label="hollow: the loss still fell when the steps ran out")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)


def draw(study: Study) -> None:
    tables = study.tables
    bayes, other, classic, decay = parts(study)
    tensor = [row for row in tables["relatives"] if row["per"] == "tensor" and row["labels"] == "true"]
    null = math.exp(study.numbers["null_log_likelihood"] / study.numbers["train_rows"])
    draw_loss(study.out / "loss.png", bayes, classic, tensor, null)
    error = study.numbers["auc_standard_error_of_the_test_rows"]
    draw_auc(study.out / "roc_auc.png", bayes, classic, decay, error)
    draw_correlation(study.out / "correlation.png", bayes, other)
    draw_departures(study.out / "departures.png", tables["departures"])


# --- all of it --------------------------------------------------------------------------------------------


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    cache: str | None = None,
    checkpoint: str | Path | None = None,
    splits: int | None = None,
) -> Study:
    """Run the study and write tables, figures and verdicts to `out`.

    Without `out` a full run writes to results/empirical_bayes_alzheimers beside this file, a tiny one, which is on
    made-up rows, to a temporary folder. cache: a folder for compiled programs. checkpoint: a folder in which finished
    fits are kept. splits: how many splits of the table; the first is the source's.
    """
    study = Study.begin(TINY if tiny else FULL, "empirical_bayes_alzheimers", tiny, out, splits=splits)
    collect(study, cache, checkpoint)
    describe(study)
    draw(study)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(
        __doc__, "cache", "checkpoint", "splits", "figures", tiny="small sizes and made-up rows, in seconds"
    )
    run(parser, main, "empirical_bayes_alzheimers", FULL, draw)
