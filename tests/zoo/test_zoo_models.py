"""The models of the zoo, each against its own card: the density written out again in NumPy and SciPy.

That both systems agree about them is tested where all zoo files are; here stands what they should agree on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import pdist, squareform
from scipy.special import expit, log_expit, log_softmax, logit, logsumexp

import ppl_bnn as bnn
from ppl_bnn import data, zoo
from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import UnsupportedError
from ppl_bnn.evaluation.comparison.run import bind_classes
from ppl_bnn.language.handlers import network_function
from ppl_bnn.language.transforms import with_prior_scales
from tests.layer_oracles import set_parameters

ROWS, FEATURES, UNITS, CLASSES = 6, 5, 3, 3
X = np.random.default_rng(4).normal(size=(ROWS, FEATURES))
TARGETS, LABELS, BINARY = (
    np.random.default_rng(401).normal(size=ROWS),
    np.array([0, 1, 2, 2, 1, 0]),
    np.array([0.0, 1, 1, 0, 1, 0]),
)
Values = Mapping[str, np.ndarray]

# Numbers at 10 features and 3 classes, by the formulas of the cards; `latent_inputs` counts those of one row.
COUNTS = {
    "ard_mlp": (10 + 2) * 10 + 10 + 2,
    "autoregressive": (10 + 2) * 5 + 10 + 2,
    "bayes_by_backprop": (10 + 1) * 20 + (20 + 1) * 20 + 20 + 1,
    "count_mlp": (10 + 2) * 10 + 2,
    "empirical_bayes": (10 + 2) * 20 + 1,
    "evidence_framework": (10 + 2) * 8 + 1,
    "graph_convolution": (10 + 3 + 1) * 8 + 3,
    "horseshoe_mlp": (10 + 3) * 20 + 4,
    "last_layer": (10 + 2) * 50 + 2,
    "latent_inputs": (10 + 1 + 2) * 10 + 2 + 1,
    # An image of 2 x 5: poolings make 1 x 3 and 1 x 2 of it.
    "lenet": (25 + 1) * 6 + (25 * 6 + 1) * 16 + (2 * 16 + 1) * 120 + (120 + 1) * 84 + (84 + 1) * 3,
    "logistic_regression": 10 + 1,
    # The same image: two steps of five pixels.
    "lstm_classifier": 4 * 10 * (5 + 10 + 1) + (10 + 1) * 3,
    "mixture_density": (10 + 9 + 1) * 10 + 9,
    "multitask_hierarchical": (10 + 2 + 2) * 8 + 2 + 4,
    "neal_hierarchical": (10 + 3 + 1) * 10 + 3 + 3,
    "one_layer_digits": (10 + 1) * 10 + (10 + 1) * (3 - 1) + 2,
    "ordinal_mlp": (10 + 2) * 10 + 3,
    # The stem, a block of 3 channels, one of 6 with its shortcut, and the last layer.
    "resnet": (27 + 9) + (2 * 81 + 18) + (162 + 324 + 18 + 36) + (6 + 1) * 3,
    "spike_and_slab": (10 + 2) * 10 + 2,
    "survival_mlp": (10 + 2) * 10 + 2,
    "student_t_mlp": (10 + 2) * 10 + 3,
    # Three patches of 2 x 2, the last one half empty.
    "transformer_classifier": 4 * 6 + 3 * 6 + 6 * (12 * 6 + 13) + 3 * 6 + (6 + 1) * 3,
    "wide_network": (10 + 2) * 200 + 1,
}
# Of the cards again: on the default data of each.
DEFAULTS = {
    "ard_mlp": 132,
    "autoregressive": 60,
    "bayes_by_backprop": 661,
    "count_mlp": 52,
    "empirical_bayes": 641,
    "evidence_framework": 257,
    "graph_convolution": 67,
    "horseshoe_mlp": 264,
    "last_layer": 602,
    "latent_inputs": 132 + 1,
    "lenet": 21_386,
    "logistic_regression": 31,
    "lstm_classifier": 870,
    "mixture_density": 119,
    "multitask_hierarchical": 118,
    "neal_hierarchical": 176,
    "one_layer_digits": 751,
    "ordinal_mlp": 124,
    "resnet": 826,
    "spike_and_slab": 122,
    "survival_mlp": 72,
    "student_t_mlp": 123,
    "transformer_classifier": 718,
    "wide_network": 2401,
}


def small(name: str, **keywords: Any) -> Any:
    arguments = zoo.models()[name].arguments
    sizes = {"width": UNITS, "classes": CLASSES, "widths": (7, 6), "channels": (2, 4), "kernel": 3}
    return zoo.load(name, **{key: value for key, value in sizes.items() if key in arguments} | keywords)


def density(model: Any, x: np.ndarray, y: np.ndarray, seed: int = 0) -> tuple[dict[str, np.ndarray], float]:
    """Values of all sites of the program at a random point, and the log joint in these coordinates."""
    chosen = system("pyro")
    with chosen.session("float64", "cpu", threads=1):
        xs, ys = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, model, xs, ys, language=True)
        u = program.unravel(chosen.asarray(np.random.default_rng(seed).normal(size=program.parameter_count)))
        value = program.log_joint(u, xs, ys, jacobian=False)
        w = {name: chosen.to_numpy(each) for name, each in program.constrain(u, xs, ys).items()}
        return w, float(value)


# --- the cards ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_sizes_are_those_of_the_card(name: str) -> None:
    card = zoo.models()[name]
    known = data.datasets()[card.data or ""]
    classes = {"classes": 3} if "classes" in card.arguments else {}
    sketch = zoo.sketch(zoo.load(name, **classes), 10)
    assert (sketch.parameters, sketch.task) == (COUNTS[name], known.task)
    default = zoo.sketch(zoo.load(name), known.features)
    assert default.parameters == DEFAULTS[name]
    assert default.per_row == (1 if name == "latent_inputs" else 0)
    assert f"{default.shared}" in card.docstring.replace(" ", "")


# --- densities, written out again -----------------------------------------------------------------


def normal(value: np.ndarray, scale: Any = 1.0, loc: Any = 0.0) -> float:
    return float(stats.norm(loc, scale).logpdf(value).sum())


def regression(f: np.ndarray, y: np.ndarray, noise: Any) -> float:
    return normal(y, noise, f)


def one_logit(a: np.ndarray, y: np.ndarray) -> float:
    return float((y * log_expit(a) + (1.0 - y) * log_expit(-a)).sum())


def logits(f: np.ndarray, y: np.ndarray) -> float:
    return float(log_softmax(f, axis=1)[np.arange(len(y)), y].sum())


def half_normal(value: np.ndarray, scale: float = 1.0) -> float:
    return float(stats.halfnorm(0.0, scale).logpdf(value).sum())


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def layers(w: Values, x: np.ndarray, activation: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The network of the sites hidden0, hidden1, ..., output."""
    depth = sum(name.startswith("hidden") and name.endswith(".weight") for name in w)
    for layer in range(depth):
        x = activation(x @ w[f"hidden{layer}.weight"] + w[f"hidden{layer}.bias"])
    return x @ w["output.weight"] + w["output.bias"]


def logistic_regression(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    prior = normal(w["output.weight"], 1.0) + normal(w["output.bias"], 1.0)
    return prior + one_logit(layers(w, x, np.tanh)[:, 0], y)


def evidence_framework(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    prior = sum(normal(value, math.sqrt(1.0 / 4.0)) for value in w.values())
    return prior + one_logit(layers(w, x, np.tanh)[:, 0], y)


def bayes_by_backprop(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    prior = 0.0
    for value in w.values():
        wide = math.log(0.25) + stats.norm(0.0, 1.5).logpdf(value)
        prior += logsumexp([wide, math.log(0.75) + stats.norm(0.0, 0.1).logpdf(value)], axis=0).sum()
    return prior + regression(layers(w, x, relu)[:, 0], y, 0.7)


def empirical_bayes(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    return sum(normal(value, SCALES[name]) for name, value in w.items()) + one_logit(
        layers(w, x, relu)[:, 0], y
    )


SCALES = {
    "hidden0.weight": np.random.default_rng(402).uniform(0.1, 2.0, size=(FEATURES, UNITS)),
    "hidden0.bias": np.random.default_rng(403).uniform(0.1, 2.0, size=UNITS),
    "output.weight": np.random.default_rng(404).uniform(0.1, 2.0, size=(UNITS, 1)),
    "output.bias": np.array(0.5),
}


def spike_and_slab(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    total = half_normal(w["noise"])
    for name, value in w.items():
        if name != "noise":
            root = math.sqrt(value.shape[0] if name.endswith("weight") else 1)
            slab = math.log(0.25) + stats.norm(0.0, 1.5 / root).logpdf(value)
            spike = math.log(0.75) + stats.norm(0.0, 0.015 / root).logpdf(value)
            total += logsumexp([slab, spike], axis=0).sum()
    return total + regression(layers(w, x, np.tanh)[:, 0], y, w["noise"])


def relaxed(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    """The gate by its own law: logit(z) = (logit(1/4) + a standard logistic variable) / (1/2)."""
    total, weights = half_normal(w["noise"]), {}
    for name, base in w.items():
        if name.endswith(".base"):
            site = name.removesuffix(".base")
            logit = w[f"{site}.logit"]
            total += normal(base) + stats.logistic(2.0 * math.log(1 / 3), 2.0).logpdf(logit).sum()
            root = math.sqrt(base.shape[0] if site.endswith("weight") else 1)
            weights[site] = 1.5 / root * base / (1.0 + np.exp(-logit))
    return total + regression(layers(weights, x, np.tanh)[:, 0], y, w["noise"])


def horseshoe_mlp(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    site, root = "hidden0.weight", math.sqrt(FEATURES)
    tau, local, slab = w[f"{site}.global"], w[f"{site}.local"], w[f"{site}.slab"]
    total = stats.halfcauchy(0.0, 0.3 / root).logpdf(tau) + stats.halfcauchy.logpdf(local).sum()
    total += stats.invgamma(2.0, scale=2.0 / FEATURES).logpdf(slab) + normal(w[f"{site}.base"])
    total += half_normal(w["noise"]) + normal(w["hidden0.bias"]) + normal(w["output.bias"])
    total += normal(w["output.weight"], 1.0 / math.sqrt(UNITS))
    scale = tau * np.sqrt(slab * local**2 / (slab + tau**2 * local**2))
    weights = {**w, site: scale * w[f"{site}.base"]}
    return float(total) + regression(layers(weights, x, np.tanh)[:, 0], y, w["noise"])


def ard_mlp(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    site = "hidden0.weight"
    total = stats.halfcauchy.logpdf(w[f"{site}.scale"]).sum() + normal(w[f"{site}.base"])
    total += half_normal(w["noise"]) + normal(w["hidden0.bias"]) + normal(w["output.bias"])
    total += normal(w["output.weight"], 1.0 / math.sqrt(UNITS))
    scaled = w[f"{site}.scale"].reshape(FEATURES, 1) * w[f"{site}.base"] / math.sqrt(FEATURES)
    return float(total) + regression(layers({**w, site: scaled}, x, np.tanh)[:, 0], y, w["noise"])


def neal_hierarchical(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    total, weights = normal(w["output.bias"]), {"output.bias": w["output.bias"]}
    for site, fan_in in (("hidden0.weight", FEATURES), ("hidden0.bias", 1), ("output.weight", UNITS)):
        precision, base = w[f"{site}.precision"], w[f"{site}.base"]
        total += float(stats.gamma(2.0, scale=1.0 / 2.0).logpdf(precision)) + normal(base)
        weights[site] = base / np.sqrt(fan_in * precision)
    return total + logits(layers(weights, x, np.tanh), y)


def multitask_hierarchical(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    total = half_normal(w["noise"]) + normal(w["shared.weight"], 1.0 / math.sqrt(FEATURES))
    total += normal(w["shared.bias"])
    heads = {}
    for site, fan_in in (("heads.weight", UNITS), ("heads.bias", 1)):
        mean, spread, base = (w[f"{site}.{part}"] for part in ("mean", "spread", "base"))
        total += normal(mean) + half_normal(spread) + normal(base)
        heads[site] = (mean + spread * base) / math.sqrt(fan_in)
    group = np.searchsorted(CUTS, x[:, 2], side="left")
    hidden = np.tanh(x @ w["shared.weight"] + w["shared.bias"])
    f = [h @ heads["heads.weight"][:, g] + heads["heads.bias"][g] for h, g in zip(hidden, group, strict=True)]
    return total + regression(np.array(f), y, w["noise"])


# A value on a cut is below it.
CUTS = np.array([np.sort(X[:, 2])[1], np.sort(X[:, 2])[3] + 0.01])


def last_layer(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    prior = normal(w["output.weight"], 1.0 / math.sqrt(UNITS)) + normal(w["output.bias"])
    return half_normal(w["noise"]) + prior + regression(layers(w, x, np.tanh)[:, 0], y, w["noise"])


def wide_network(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    total = normal(w["hidden0.bias"], 0.5) + normal(w["output.bias"], 0.5)
    total += normal(w["hidden0.weight"], 1.4 / math.sqrt(FEATURES))
    total += normal(w["output.weight"], 1.4 / math.sqrt(UNITS))
    return total + regression(layers(w, x, relu)[:, 0], y, 0.7)


def one_layer_digits(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    for layer, inputs in (("hidden0", FEATURES), ("output", UNITS)):
        variance, q = w[f"{layer}.variance"], (0.05 / inputs**2) ** 2
        total += stats.invgamma(0.25, scale=0.25 * q).logpdf(variance)
        total += normal(w[f"{layer}.weight"], np.sqrt(variance))
        total += normal(w[f"{layer}.bias"], np.sqrt(variance))
    free = layers({name: value for name, value in w.items() if "variance" not in name}, x, np.tanh)
    return float(total) + logits(np.column_stack([np.zeros(len(x)), free]), y)


def of_posteriordb(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    """nn_rbm1bJ10.stan of posteriordb at commit 0c9534e, line by line; its y counts classes from 1."""
    ones, total = np.ones((ROWS, 1)), 0.0
    alpha = np.vstack([w["hidden0.bias"], w["hidden0.weight"]])
    beta = np.vstack([w["output.bias"], w["output.weight"]])
    hidden = np.tanh(np.hstack([ones, x]) @ alpha)
    v = np.hstack([ones, np.hstack([ones, hidden]) @ beta])
    for matrix, inputs, sigma2 in (
        (alpha, FEATURES, w["hidden0.variance"]),
        (beta, UNITS, w["output.variance"]),
    ):
        nu, s2 = (0.05 / inputs**2) ** 2, 0.5
        total += stats.invgamma(nu / 2.0, scale=nu * s2 / 2.0).logpdf(sigma2)
        total += normal(matrix, np.sqrt(sigma2))
    return float(total) + logits(v, y)


def latent_inputs(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    assert w["z"].shape == (ROWS, 2)
    total = half_normal(w["noise"], 0.5) + normal(w["z"])
    total += normal(w["hidden0.weight"], 1.0 / math.sqrt(FEATURES + 2)) + normal(w["hidden0.bias"])
    total += normal(w["output.weight"], 1.0 / math.sqrt(UNITS)) + normal(w["output.bias"])
    f = layers(w, np.column_stack([x, w["z"]]), np.tanh)[:, 0]
    return total + regression(f, y, w["noise"])


def layered_prior(w: Values) -> float:
    """N(0, 1 / fan-in) for the weights, N(0, 1) for the biases of the sites that are layers."""
    total = sum(normal(value) for name, value in w.items() if name.endswith(".bias"))
    weights = [value for name, value in w.items() if name.endswith(".weight")]
    return total + sum(normal(value, 1.0 / math.sqrt(math.prod(value.shape[:-1]))) for value in weights)


def student_t_mlp(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    total = layered_prior(w) + half_normal(w["scale"]) + stats.gamma(2.0, scale=10.0).logpdf(w["excess"])
    noise = stats.t(2.0 + w["excess"], layers(w, x, np.tanh)[:, 0], w["scale"])
    return float(total + noise.logpdf(y).sum())


def given_freedom(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    assert "excess" not in w
    noise = stats.t(4.0, layers(w, x, np.tanh)[:, 0], w["scale"])
    return float(layered_prior(w) + half_normal(w["scale"]) + noise.logpdf(y).sum())


def log_rate(w: Values, x: np.ndarray) -> tuple[float, np.ndarray]:
    """The prior of the network of `count_mlp` and `survival_mlp`, whose last bias has a scale of 3, and exp(f)."""
    wide = normal(w["output.bias"], 3.0) - normal(w["output.bias"])
    return layered_prior(w) + wide, np.exp(layers(w, x, np.tanh)[:, 0])


def count_mlp(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    prior, mean = log_rate(w, x)
    r = w["concentration"]
    prior += float(stats.lognorm(1.0, scale=math.e).logpdf(r))
    return prior + float(stats.nbinom(r, r / (r + mean)).logpmf(y).sum())


def poisson_counts(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    prior, mean = log_rate(w, x)
    return prior + float(stats.poisson(mean).logpmf(y).sum())


def ordinal_mlp(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    p = w["cuts.probabilities"]
    total = layered_prior(w) + float(stats.dirichlet(np.full(CLASSES, 2.0)).logpdf(p))
    f = np.tanh(x @ w["hidden0.weight"] + w["hidden0.bias"]) @ w["output.weight"]
    below = expit(logit(np.cumsum(p)[:-1]) - f)
    classes = np.diff(np.column_stack([np.zeros(ROWS), below, np.ones(ROWS)]), axis=1)
    return total + float(np.log(classes[np.arange(ROWS), y]).sum())


def mixture_density(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    logit_weights, means, scales = np.split(layers(w, x, np.tanh), 3, axis=1)
    parts = stats.norm(means, np.logaddexp(0.0, scales)).logpdf(y[:, None])
    return layered_prior(w) + float(logsumexp(log_softmax(logit_weights, axis=1) + parts, axis=1).sum())


def autoregressive(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    f = x @ w["lags.weight"] + layers(w, x, np.tanh)
    return half_normal(w["noise"]) + layered_prior(w) + regression(f[:, 0], y, w["noise"])


def survival_mlp(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    prior, scale = log_rate(w, x)
    times = stats.weibull_min(w["shape"], scale=scale)
    parts = {1: times.logpdf(y[:, 0]), 0: times.logsf(y[:, 0]), -1: times.logcdf(y[:, 0])}
    total = prior + float(stats.lognorm(0.5).logpdf(w["shape"]))
    return total + sum(parts[int(event)][row] for row, event in enumerate(y[:, 1]))


# One of the rows has two neighbours then, and one has none.
RADIUS = 1.3


def adjacency(x: np.ndarray) -> np.ndarray:
    """Neighbours by SciPy's distances: a root mean square below RADIUS."""
    near = squareform(pdist(x)) / math.sqrt(x.shape[1]) < RADIUS
    return near.astype(int) - np.eye(len(x), dtype=int)


def on_a_graph(w: Values, x: np.ndarray, graph: np.ndarray) -> np.ndarray:
    """f of a graph convolution over another, by the normalised adjacency as a matrix."""
    loops = graph + np.eye(len(graph))
    root = np.diag(loops.sum(1) ** -0.5)
    spread = root @ loops @ root
    h = np.tanh(spread @ x @ w["hidden0.weight"] + w["hidden0.bias"])
    return spread @ h @ w["output.weight"] + w["output.bias"]


def graph_convolution(w: Values, x: np.ndarray, y: np.ndarray) -> float:
    return layered_prior(w) + logits(on_a_graph(w, x, adjacency(x)), y)


COUNTED = np.array([0.0, 3, 1, 7, 0, 2])
TIMES = np.column_stack([[0.5, 2.0, 1.1, 0.3, 4.0, 0.9], [1, 0, 1, -1, 0, 1]])

DENSITIES: dict[str, tuple[Any, np.ndarray, Callable[[Values, np.ndarray, np.ndarray], float]]] = {
    "logistic_regression": (small("logistic_regression"), BINARY, logistic_regression),
    "evidence_framework": (small("evidence_framework", precision=4.0), BINARY, evidence_framework),
    "bayes_by_backprop": (small("bayes_by_backprop", share=0.25), TARGETS, bayes_by_backprop),
    "empirical_bayes": (with_prior_scales(small("empirical_bayes"), SCALES), BINARY, empirical_bayes),
    "spike_and_slab": (small("spike_and_slab"), TARGETS, spike_and_slab),
    "spike_and_slab, relaxed": (small("spike_and_slab", relaxed=True), TARGETS, relaxed),
    "horseshoe_mlp": (small("horseshoe_mlp"), TARGETS, horseshoe_mlp),
    "ard_mlp": (small("ard_mlp"), TARGETS, ard_mlp),
    "neal_hierarchical": (small("neal_hierarchical"), LABELS, neal_hierarchical),
    "multitask_hierarchical": (
        small("multitask_hierarchical", column=2, cuts=tuple(CUTS)),
        TARGETS,
        multitask_hierarchical,
    ),
    "last_layer": (small("last_layer"), TARGETS, last_layer),
    "wide_network": (small("wide_network"), TARGETS, wide_network),
    "one_layer_digits": (small("one_layer_digits"), LABELS, one_layer_digits),
    "one_layer_digits, exchanged": (small("one_layer_digits", exchanged=True), LABELS, of_posteriordb),
    "latent_inputs": (small("latent_inputs", latents=2), TARGETS, latent_inputs),
    "student_t_mlp": (small("student_t_mlp"), TARGETS, student_t_mlp),
    "student_t_mlp, df given": (small("student_t_mlp", df=4.0), TARGETS, given_freedom),
    "count_mlp": (small("count_mlp"), COUNTED, count_mlp),
    "count_mlp, Poisson": (small("count_mlp", overdispersed=False), COUNTED, poisson_counts),
    "ordinal_mlp": (small("ordinal_mlp", concentration=2.0), LABELS, ordinal_mlp),
    "mixture_density": (small("mixture_density", components=2), TARGETS, mixture_density),
    "survival_mlp": (small("survival_mlp"), TIMES, survival_mlp),
    "autoregressive": (small("autoregressive"), TARGETS, autoregressive),
    "graph_convolution": (small("graph_convolution", radius=RADIUS), LABELS, graph_convolution),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_the_density_is_the_one_on_the_card(name: str) -> None:
    """To 1e-9: sums of some hundred terms of float64, as for every prior and likelihood by itself."""
    model, y, by_hand = DENSITIES[name]
    for seed in range(2):
        w, value = density(model, X, y, seed)
        np.testing.assert_allclose(value, by_hand(w, X, y), rtol=1e-9)


SMALL_IMAGES = np.random.default_rng(405).normal(size=(ROWS, 4 * 6))


def resnet(at: Mapping[str, Any], x: Any) -> Any:
    """f by torch.nn.functional, with the zeros of a stride of 2 on the right and below, where TensorFlow has them."""
    import torch
    from torch.nn import functional

    def convolved(name: str, h: Any, stride: int = 1) -> Any:
        kernel = at[f"{name}.weight"].permute(3, 2, 0, 1)
        if kernel.shape[-1] == 3:
            h = functional.pad(h, (1, 1, 1, 1) if stride == 1 else (0, 1, 0, 1))
        return functional.conv2d(h, kernel, stride=stride)

    def of_channels(name: str) -> Any:
        return at[name][None, :, None, None]

    def normalised(name: str, h: Any) -> Any:
        h = h / torch.sqrt((h**2).mean((2, 3), keepdim=True) + 1e-6)
        return h * of_channels(f"{name}.gain") + of_channels(f"{name}.bias")

    h = normalised("stem.norm", convolved("stem", x.reshape(ROWS, 1, 4, 6)))
    h = torch.maximum(h, of_channels("stem.norm.threshold"))
    for stage in range(2):
        name, stride = f"stage{stage}.block0", stage + 1
        branch = normalised(f"{name}.norm0", convolved(f"{name}.conv0", h, stride))
        branch = torch.maximum(branch, of_channels(f"{name}.norm0.threshold"))
        branch = normalised(f"{name}.norm1", convolved(f"{name}.conv1", branch))
        around = h if stage == 0 else convolved(f"{name}.shortcut", h, stride)
        h = torch.maximum(branch + around, of_channels(f"{name}.threshold"))
    return functional.linear(h.mean((2, 3)), at["output.weight"].T, at["output.bias"])


def lstm_classifier(at: Mapping[str, Any], x: Any) -> Any:
    """f by torch.nn.LSTM, rows of six pixels one after the other."""
    import torch
    from torch.nn import functional

    module = torch.nn.LSTM(6, UNITS, batch_first=True, dtype=torch.float64)
    given = {
        "weight_ih_l0": at["lstm.input.weight"].T,
        "bias_ih_l0": at["lstm.input.bias"],
        "weight_hh_l0": at["lstm.state.weight"].T,
        # torch has a second bias, which is added to the first.
        "bias_hh_l0": torch.zeros(4 * UNITS),
    }
    set_parameters(module, {name: value.numpy() for name, value in given.items()})
    states, _ = module(x.reshape(ROWS, 4, 6))
    return functional.linear(states[:, -1], at["output.weight"].T, at["output.bias"])


def transformer_classifier(at: Mapping[str, Any], x: Any) -> Any:
    """f by torch.nn.functional: patches by `unfold`, two heads, the normalisation in front."""
    from torch.nn import functional

    def mapped(name: str, h: Any) -> Any:
        return functional.linear(h, at[f"{name}.weight"].T, at[f"{name}.bias"])

    def normalised(name: str, h: Any) -> Any:
        return functional.layer_norm(h, h.shape[-1:], at[f"{name}.gain"], at[f"{name}.bias"])

    patches = functional.unfold(x.reshape(ROWS, 1, 4, 6), 2, stride=2).transpose(1, 2)
    h = mapped("embedding", patches) + at["positions.weight"]
    for name in ("block0", "block1"):
        read = normalised(f"{name}.norm0", h)
        heads = [
            mapped(f"{name}.attention.{part}", read).unflatten(-1, (2, 2)).transpose(1, 2)
            for part in ("query", "key", "value")
        ]
        seen = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
        h = h + mapped(f"{name}.attention.output", seen)
        inner = functional.gelu(mapped(f"{name}.hidden", normalised(f"{name}.norm1", h)))
        h = h + mapped(f"{name}.output", inner)
    return mapped("output", normalised("norm", h).mean(1))


PICTURES: dict[str, tuple[Any, Callable[[Mapping[str, Any], Any], Any]]] = {
    "resnet": (small("resnet"), resnet),
    "lstm_classifier": (small("lstm_classifier"), lstm_classifier),
    "transformer_classifier": (small("transformer_classifier", width=4, blocks=2), transformer_classifier),
}


def picture_prior(name: str, value: np.ndarray) -> float:
    """What the cards say of gains, thresholds, positions and all else."""
    if name.endswith(".gain"):
        return normal(value, 0.25, 1.0)
    if name.endswith(".threshold"):
        return normal(value, 0.25)
    if name.endswith(".bias") or name == "positions.weight":
        return normal(value)
    return normal(value, 1.0 / math.sqrt(math.prod(value.shape[:-1])))


@pytest.mark.parametrize("name", PICTURES)
def test_a_model_of_images_is_that_of_torch(name: str) -> None:
    import torch

    model, by_torch = PICTURES[name]
    w, value = density(model, SMALL_IMAGES, LABELS)
    with torch.no_grad():
        f = by_torch(
            {site: torch.as_tensor(each) for site, each in w.items()}, torch.as_tensor(SMALL_IMAGES)
        ).numpy()
    np.testing.assert_allclose(network_function(model)(w, SMALL_IMAGES), f, rtol=1e-9, atol=1e-12)
    prior = sum(picture_prior(site, each) for site, each in w.items())
    np.testing.assert_allclose(value, prior + logits(f, LABELS), rtol=1e-9)


def test_every_model_of_this_file_has_its_density_written_out() -> None:
    assert {name.partition(",")[0] for name in DENSITIES} | {"lenet", *PICTURES} == set(COUNTS)


def test_the_images_go_through_the_convolutions_of_torch(rng) -> None:
    """conv, mean over 2 x 2 and dense layers of torch.nn.functional, with the channels where torch has them."""
    import torch
    from torch.nn import functional

    model, x = small("lenet"), rng.normal(size=(ROWS, 64))
    w, value = density(model, x, LABELS)
    at = {name: torch.as_tensor(each) for name, each in w.items()}
    h = torch.as_tensor(x).reshape(ROWS, 1, 8, 8)
    for layer in ("conv0", "conv1"):
        kernel = at[f"{layer}.weight"].permute(3, 2, 0, 1)
        h = torch.tanh(functional.conv2d(h, kernel, at[f"{layer}.bias"], padding=1))
        h = functional.avg_pool2d(h, 2)
    h = h.permute(0, 2, 3, 1).reshape(ROWS, -1)
    for layer in ("hidden0", "hidden1", "output"):
        h = functional.linear(h, at[f"{layer}.weight"].T, at[f"{layer}.bias"])
        h = h if layer == "output" else torch.tanh(h)
    total = -functional.cross_entropy(h, torch.as_tensor(LABELS), reduction="sum").item()
    for name, each in w.items():
        fan_in = math.prod(each.shape[:-1]) if name.endswith("weight") else 1
        total += normal(each, 1.0 / math.sqrt(fan_in))
    np.testing.assert_allclose(value, total, rtol=1e-9)
    np.testing.assert_allclose(network_function(model)(w, x), h.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        network_function(model)(w, x.reshape(ROWS, 8, 8, 1)), h.numpy(), rtol=1e-9, atol=1e-12
    )


# --- what a card claims ---------------------------------------------------------------------------


NEW_DATA = (
    *("student_t_mlp", "count_mlp", "ordinal_mlp", "mixture_density", "autoregressive"),
    *("resnet", "lstm_classifier", "transformer_classifier", "graph_convolution"),
)


@pytest.mark.filterwarnings("ignore:zero variance in the training rows")
@pytest.mark.parametrize("name", NEW_DATA)
def test_a_model_is_fitted_to_its_default_data(name: str) -> None:
    table = data.load(zoo.models()[name].data or "")
    train, test = table.split(0)
    train, test = train[:60], test[:20]
    model = bind_classes(zoo.load(name), table.y, table.class_names)
    method = bnn.MAP(ppl="pyro", steps=5, polish=False)
    found = bnn.fit(model, table.x[train], table.y[train], method, standardise=True)
    scores = found.predict(table.x[test]).log_prob(table.y[test])
    assert scores.shape == (20,)
    assert np.isfinite(scores).all()


def test_a_graph_is_of_the_rows_that_are_given() -> None:
    model = small("graph_convolution", radius=RADIUS)
    w, _ = density(model, X, LABELS)
    f, graph = network_function(model), adjacency(X)
    degrees = graph.sum(1)
    assert degrees.max() > 1
    assert degrees.min() == 0
    # The graph may come with the data, and needs no distances then.
    given = {"features": X, "adjacency": graph}
    np.testing.assert_allclose(f(w, given), f(w, X), rtol=1e-12, atol=1e-12)
    # The graph of some rows is that part of the graph of all.
    np.testing.assert_allclose(f(w, X[1:]), on_a_graph(w, X[1:], graph[1:, 1:]), rtol=1e-9, atol=1e-12)
    # Without neighbours a row is that of a plain network; with them it depends on who else is there.
    plain = layers(w, X, np.tanh)
    alone = int(degrees.argmin())
    np.testing.assert_allclose(f(w, X)[alone], plain[alone], rtol=1e-9, atol=1e-12)
    assert np.abs(f(w, X) - plain)[degrees > 0].max() > 1e-3


def test_weights_in_front_of_a_normalisation_have_no_size() -> None:
    model = PICTURES["resnet"][0]
    w, _ = density(model, SMALL_IMAGES, LABELS)
    f = network_function(model)(w, SMALL_IMAGES)
    for site in ("stem.weight", "stage1.block0.conv1.weight"):
        larger = {**w, site: 10.0 * w[site]}
        # What is added to the mean square, 1e-6 beside numbers about 1.
        np.testing.assert_allclose(network_function(model)(larger, SMALL_IMAGES), f, rtol=0, atol=1e-4)


def test_a_bias_of_the_keys_changes_nothing() -> None:
    model = PICTURES["transformer_classifier"][0]
    w, _ = density(model, SMALL_IMAGES, LABELS)
    bias = w["block0.attention.key.bias"] + np.array([1.0, -2.0, 3.0, 0.5])
    moved = {**w, "block0.attention.key.bias": bias}
    f = network_function(model)
    np.testing.assert_allclose(f(moved, SMALL_IMAGES), f(w, SMALL_IMAGES), rtol=0, atol=1e-12)
    turned = {**w, "block0.attention.query.bias": bias}
    assert np.abs(f(turned, SMALL_IMAGES) - f(w, SMALL_IMAGES)).max() > 1e-3


def test_the_scales_of_empirical_bayes_mean_something_to_svi_only() -> None:
    model = small("empirical_bayes")
    for method in (bnn.MAP(), bnn.Laplace(), bnn.NUTS()):
        with pytest.raises(UnsupportedError, match=r"priors\.EmpiricalBayes"):
            bnn.fit(model, X, BINARY, method)


def test_the_mode_of_logistic_regression_is_the_fit_of_scikit_learn() -> None:
    """With the penalty |w|^2 / 2 of a standard normal prior, C = 1, on the intercept too."""
    from sklearn.linear_model import LogisticRegression

    design = np.column_stack([X, np.ones(ROWS)])
    found = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-12, max_iter=1000).fit(design, BINARY)
    chosen = system("pyro")
    with chosen.session("float64", "cpu", threads=1):
        xs, ys = chosen.asarray(X), chosen.asarray(BINARY)
        program = Program.of(chosen, zoo.load("logistic_regression"), xs, ys, language=True)
        _, gradient = chosen.value_and_grad(lambda u: program.log_joint(program.unravel(u), xs, ys))(
            chosen.asarray(found.coef_[0])
        )
        # L-BFGS of SciPy ends at gradients of about the square root of rounding.
        np.testing.assert_allclose(chosen.to_numpy(gradient), 0.0, atol=1e-6)


def test_a_head_serves_the_rows_of_its_group_and_no_other() -> None:
    model = small("multitask_hierarchical", column=2, cuts=tuple(CUTS))
    w, _ = density(model, X, TARGETS)
    before = network_function(model)(w, X)
    moved = {**w, "heads.bias.base": w["heads.bias.base"] + np.array([0.0, 1.0, 0.0])}
    change = (network_function(model)(moved, X) - before)[:, 0]
    second = (X[:, 2] > CUTS[0]) & (X[:, 2] <= CUTS[1])
    assert 0 < second.sum() < ROWS
    np.testing.assert_allclose(change, second * w["heads.bias.spread"], rtol=1e-12, atol=1e-15)


def test_latent_inputs_belong_to_rows(ppl: str) -> None:
    chosen = system(ppl)
    with chosen.session("float64", "cpu"):
        xs, ys = chosen.asarray(X), chosen.asarray(TARGETS)
        program = Program.of(chosen, small("latent_inputs"), xs, ys, language=True)
    assert [site.name for site in program.sites.values() if site.local] == ["z"]
    assert program.sites["z"].shape == (ROWS, 1)


# --- the limit of wide networks -------------------------------------------------------------------


def arc_cosine(x: np.ndarray, sigma: float, offset: float) -> np.ndarray:
    """The covariance of f on the card, (N, N): Cho and Saul's kernel of order 1 over the first layer's covariance."""
    first = offset**2 + sigma**2 * x @ x.T / x.shape[1]
    size = np.sqrt(np.diag(first))
    cosine = np.clip(first / np.outer(size, size), -1.0, 1.0)
    angle = np.arccos(cosine)
    hidden = np.outer(size, size) * (np.sqrt(1.0 - cosine**2) + (np.pi - angle) * cosine) / (2.0 * np.pi)
    return offset**2 + sigma**2 * hidden


def sine(x: np.ndarray, sigma: float, offset: float) -> np.ndarray:
    """With units sin(a): E sin(a) sin(b) = exp(-(A_aa + A_bb) / 2) sinh(A_ab)."""
    first = offset**2 + sigma**2 * x @ x.T / x.shape[1]
    half = 0.5 * np.diag(first)
    return offset**2 + sigma**2 * np.exp(-half[:, None] - half[None, :]) * np.sinh(first)


def prior_outputs(model: Any, x: np.ndarray, draws: int) -> np.ndarray:
    """f (draws, N) of networks drawn from the prior, by NumPyro itself."""
    import jax
    import numpyro

    native = bnn.as_numpyro(model)
    with system("numpyro").session("float64", "cpu"):

        def one(key: Any, x: Any) -> Any:
            return numpyro.handlers.trace(numpyro.handlers.seed(native, key)).get_trace(x)["f"]["value"]

        keys = jax.random.split(jax.random.PRNGKey(0), draws)
        return np.asarray(jax.jit(jax.vmap(one, in_axes=(0, None)))(keys, x))[..., 0]


@pytest.mark.parametrize(("activation", "kernel"), [("relu", arc_cosine), ("sin", sine)])
def test_the_prior_of_a_wide_network_has_the_covariance_of_its_limit(
    activation: str, kernel: Callable[..., np.ndarray]
) -> None:
    """Exact for one hidden layer at every width.

    The largest deviation of the nine entries in standard errors, over 200 seeds: 3.2 (relu) and 3.8 (sin), never 5.
    """
    x = np.array([[0.3, -1.0], [1.5, 0.4], [-0.7, -0.2]])
    f = prior_outputs(zoo.load("wide_network", width=20, activation=activation), x, 5_000)
    products = f[:, :, None] * f[:, None, :]
    error = products.std(0) / math.sqrt(len(f))
    assert np.all(np.abs(products.mean(0) - kernel(x, 1.4, 0.5)) < 5.0 * error)


@pytest.mark.slow
def test_a_wide_network_predicts_as_its_gaussian_process(optimised: None) -> None:
    """NUTS on 200 units against Gaussian-process regression in closed form.

    The mean and the standard deviation of f may differ by four Monte-Carlo standard errors and by what is left of
    1 / H at 200 units. Over three seeds the means were within 0.02 of the prior's standard deviation and within 2.1
    standard errors, so that a hundredth of it is allowed; the posterior's own is 0.1 to 0.28 of it.
    """
    from arviz_stats.base import array_stats

    noise = 0.3
    train = np.linspace(-1.5, 1.5, 8)[:, None]
    test = np.linspace(-3.0, 3.0, 7)[:, None]
    y = np.sin(2.0 * train[:, 0])
    covariance = arc_cosine(np.concatenate([train, test]), 1.4, 0.5)
    inner, cross, outer = covariance[:8, :8], covariance[8:, :8], covariance[8:, 8:]
    gain = np.linalg.solve(inner + noise**2 * np.eye(8), cross.T).T
    mean, spread = gain @ y, np.sqrt(np.diag(outer - gain @ cross.T))
    model = zoo.load("wide_network", width=200, noise=noise)
    posterior = bnn.fit(model, train, y, bnn.NUTS(chains=2, warmup=300, draws=500), seed=0)
    values = {name: value.reshape(-1, *value.shape[2:]) for name, value in posterior.draws.items()}
    f = np.stack(
        [
            network_function(model)({name: each[draw] for name, each in values.items()}, test)[:, 0]
            for draw in range(1000)
        ]
    )
    for column in range(len(test)):
        draws = f[:, column].reshape(2, 500)
        size = array_stats.ess(draws, method="mean")
        error = 4.0 * f[:, column].std() / math.sqrt(size)
        allowance = 0.01 * math.sqrt(outer[column, column])
        assert abs(f[:, column].mean() - mean[column]) < error + allowance
        assert abs(f[:, column].std() - spread[column]) < error + allowance


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_estimators_on_linear_maps_serve_variables_of_the_rows(estimator: str) -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 2)), np.random.default_rng(1).normal(size=6)
    method = bnn.SVI(ppl="pyro", estimator=estimator, steps=3, elbo_draws=2)
    found = bnn.fit(bnn.zoo.load("latent_inputs", width=3), x, y, method)
    assert np.isfinite(found.info.figures["elbo"])
