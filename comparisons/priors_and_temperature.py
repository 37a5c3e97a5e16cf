"""Priors over weights, and whether a colder posterior than the one they give predicts better.

Sources, both recalled and not read again for this study, so that no number of theirs stands here: V. Fortuin, A.
Garriga-Alonso, S. W. Ober, F. Wenzel, G. Raetsch, R. E. Turner, M. van der Wilk and L. Aitchison (2022), Bayesian
neural network priors revisited (ICLR); F. Wenzel, K. Roth, B. S. Veeling and others (2020), How good is the Bayes
posterior in deep neural networks really? (ICML). The networks are

    y_n ~ Categorical(softmax f(x_n, w)),    w ~ p(w),

f fully connected, or convolutional, with ReLU, and what is sampled is the whole posterior to the power 1 / T,

    p_T(w | D) proportional to [p(w) prod_n p(y_n | x_n, w)]^(1/T):    T = 1 is the posterior, below 1 it is "cold".

Priors (`PRIORS`): the isotropic Gaussian N(0, 1); the Gaussian of variance 2 / fan_in; Laplace and Student-t (3 degrees
of freedom) of that same variance, so that only their tails differ from it; the regularised horseshoe; a scale for each
tensor with a half-normal prior; and, in the convolutional network, kernels of that variance whose weights are alike at
neighbouring places, Cov(w_a, w_b) = 2 / fan_in exp(-|a - b|). The power is one of the density in the coordinates of the
program: for the horseshoe and for scales that are learnt, of scales and of the standard normal variables that they
multiply, together. The same prior, written otherwise, has the same posterior and other cold ones.

The cold-posterior effect of a prior in one split of the data is the test log score at the T below 1 that the OTHER
splits have as their best, less that at T = 1: choosing the best T where it is judged would find an effect in noise. All
differences are paired over splits. The splits are of one table, so that they share rows.

Every cell (network, prior, T, split) is sampled by chains of microcanonical Langevin dynamics, and says whether these
converged in function space; at T = 1 of one prior they are held to NUTS. Beside it: what the weights of trained
networks look like, which is where the sources take their priors from.

Cut for a run of about an hour of one processor: 8 x 8 digits, 200 rows and at most 2000 weights in place
of MNIST, CIFAR-10 and residual networks; three temperatures from 0.1 to 1, as chains at colder ones hardly move; three
splits; and priors whose scales are learnt at T = 1 alone, because their colder posteriors depend on how the program is
written.

    python comparisons/priors_and_temperature.py [--tiny] [--out DIR] [--checkpoint DIR] [--splits N]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, mean, mean_over_splits, read_claims
from study import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RHAT,
    SKY,
    VERMILION,
    Study,
    command_line,
    converged,
    kept,
    paired,
    panels,
)

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors, scores
from ppl_bnn.diagnostics.function_space import convergence

DENSE, CONVOLUTION = "fully connected", "convolutional"
ISOTROPIC, FAN_IN, LAPLACE, STUDENT = "isotropic Gaussian", "fan-in Gaussian", "Laplace", "Student-t"
HORSESHOE, HIERARCHICAL, CORRELATED = "horseshoe", "hierarchical scales", "correlated kernels"
ROOT2 = math.sqrt(2.0)
# With ReLU a variance of 2 / fan_in keeps pre-activations as large from layer to layer. A Student-t with 3 degrees of
# freedom has three times the variance of its squared scale.
PRIORS: dict[str, Any] = {
    ISOTROPIC: priors.Normal(0.0, 1.0),
    FAN_IN: priors.Normal(0.0, "fan_in", sigma=ROOT2),
    LAPLACE: priors.Laplace(0.0, "fan_in", sigma=ROOT2),
    STUDENT: priors.StudentT(3.0, 0.0, "fan_in", sigma=math.sqrt(2.0 / 3.0)),
    HORSESHOE: priors.RegularisedHorseshoe("fan_in", slab_scale=2.0),
    HIERARCHICAL: priors.Hierarchical(dist.HalfNormal(ROOT2), per="tensor", factor="fan_in"),
    CORRELATED: priors.CorrelatedConvolution(1.0, "exponential", "fan_in", ROOT2),
}
# Whose scales are learnt.
LEARNT = (HORSESHOE, HIERARCHICAL)
# A gradient costs half as much as in float64, and energy errors are far above the rounding of the log density.
DTYPE = "float32"
# Components of f at the test rows that are judged, at most.
FUNCTIONS = 200
# What stands for no prior where networks are only trained.
WEAK = 10.0
# As the claims are named in claims/priors_and_temperature.toml.
KEYS = {
    DENSE: "dense",
    CONVOLUTION: "convolution",
    ISOTROPIC: "isotropic",
    FAN_IN: "fan-in",
    LAPLACE: "laplace",
    STUDENT: "student",
    HORSESHOE: "horseshoe",
    HIERARCHICAL: "hierarchical",
    CORRELATED: "correlated",
}
DENSE_LAYERS, CONVOLUTIONS = ("hidden0", "hidden1", "output"), ("conv0", "conv1")
# Nats per row: a cold-posterior effect below it is none that could shrink.
WORTH = 0.01


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    temperatures: of priors without scales that are learnt; these have T = 1. rows, test_rows: of each split. width:
    units of both hidden layers. channels: of both convolutions. trained_rows: rows that the networks are trained on
    whose weights are looked at. nuts_draws: of each of its two chains, after as many to adapt.
    """

    splits: int = 3
    rows: int = 200
    test_rows: int = 1000
    width: int = 20
    channels: tuple[int, int] = (4, 8)
    temperatures: tuple[float, ...] = (0.1, 0.3, 1.0)
    dense_priors: tuple[str, ...] = (ISOTROPIC, FAN_IN, LAPLACE, STUDENT, HORSESHOE, HIERARCHICAL)
    convolution_priors: tuple[str, ...] = (ISOTROPIC, FAN_IN, CORRELATED)
    chains: int = 2
    warmup: int = 500
    draws: int = 800
    trained_rows: int = 1500
    trained_steps: int = 3000
    nuts_draws: int = 1500


FULL = Sizes()
TINY = Sizes(
    splits=2,
    rows=30,
    test_rows=30,
    width=2,
    channels=(2, 2),
    temperatures=(0.3, 1.0),
    # One beside the first, with scales that are learnt: at T = 1 alone.
    dense_priors=(FAN_IN, HIERARCHICAL),
    convolution_priors=(FAN_IN,),
    warmup=30,
    draws=20,
    trained_rows=60,
    trained_steps=100,
    nuts_draws=20,
)


# --- networks and data ----------------------------------------------------------------------------


def fully_connected(
    x: Any, y: Any = None, *, width: int = 20, classes: int = 10, prior: Any = PRIORS[FAN_IN]
) -> None:
    """y ~ Categorical(softmax f(x)), f of two hidden layers of `width` ReLU, every weight and bias from `prior`."""
    f = bnn.mlp(x, [width, width, classes], activation="relu", prior=prior)
    bnn.observe(y, f, likelihoods.Categorical())


def convolutional(
    x: Any,
    y: Any = None,
    *,
    channels: tuple[int, int] = (4, 8),
    classes: int = 10,
    prior: Any = PRIORS[FAN_IN],
) -> None:
    """Two convolutions of 3 x 3 with stride 2 and ReLU, and a layer on what they leave; x holds 8 x 8 pixels."""
    h = x.reshape(x.shape[0], 8, 8, 1)
    for layer, count in enumerate(channels):
        h = ops.relu(bnn.conv2d(f"conv{layer}", h, count, 3, stride=2, prior=prior))
    f = bnn.dense("output", h.reshape(h.shape[0], -1), classes, prior)
    bnn.observe(y, f, likelihoods.Categorical())


def network(sizes: Sizes, kind: str, prior: Any, classes: int) -> Callable[..., None]:
    if kind == DENSE:
        return partial(fully_connected, width=sizes.width, classes=classes, prior=prior)
    return partial(convolutional, channels=sizes.channels, classes=classes, prior=prior)


@dataclass(frozen=True)
class Split:
    """Training and test rows; pixels in standard deviations of all pixels of the training rows, about their mean."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int


def split(index: int, rows: int, test_rows: int) -> Split:
    """Rows of the digits in a random order of their own: the first `rows` to train on, then those to be tested on."""
    table = bnn.data.load("digits")
    order = np.random.default_rng(index).permutation(len(table.y))
    train, test = order[:rows], order[rows : rows + test_rows]
    centre, spread = table.x[train].mean(), table.x[train].std()
    return Split(
        (table.x[train] - centre) / spread,
        table.y[train],
        (table.x[test] - centre) / spread,
        table.y[test],
        int(table.y.max()) + 1,
    )


# --- one cell -------------------------------------------------------------------------------------


# What one part of the run found: "tables", rows by the name of their table; of chains also "probabilities", means over
# draws, (test rows, classes).
Part = dict[str, Any]


def provenance(posterior: Any, seed: int) -> dict[str, Any]:
    """Columns that say how a row came about."""
    return {
        "method": posterior.info.method,
        "seed": seed,
        "versions": "; ".join(f"{name} {version}" for name, version in posterior.info.versions.items()),
        "date": time.strftime("%Y-%m-%d"),
    }


def part_cell(sizes: Sizes, kind: str, prior: str, temperature: float, index: int) -> Part:
    """Chains at one temperature: what they predict of the test rows, and whether they converged."""
    data = split(index, sizes.rows, sizes.test_rows)
    method = bnn.MCLMC(
        chains=sizes.chains, warmup=sizes.warmup, draws=sizes.draws, temperature=temperature, dtype=DTYPE
    )
    model = network(sizes, kind, PRIORS[prior], data.classes)
    # Of this process, which alone computes: others may have the machine, too.
    begun = time.process_time()
    posterior = bnn.fit(model, data.x, data.y, method, seed=index)
    seconds = time.process_time() - begun
    prediction = posterior.predict(data.test_x)
    diagnosis = bnn.diagnose(posterior)
    figures = diagnosis.figures
    row = {
        "network": kind,
        "prior": prior,
        "temperature": temperature,
        "split": index,
        **scores.scores_of(prediction, data.test_y),
        "train_log_score": float(np.mean(scores.log_score(posterior.predict(data.x), data.y))),
        "verdict": diagnosis.verdict,
        **{name: figures[name] for name in ("rhat", "ess_bulk", "ess_tail", "rhat_within", "between_share")},
        **at_test_rows(posterior, data.test_x),
        **{name: figures[name] for name in ("energy_variance", "bias_allowance", "divergence_share")},
        "weights": sum(site.size for site in _sites(posterior)),
        "gradients": float(posterior.info.gradient_evaluations or math.nan),
        "processor_seconds": seconds,
        **provenance(posterior, index),
    }
    return {"tables": {"cells": [row]}, "probabilities": prediction.probabilities}


def at_test_rows(posterior: Any, x: np.ndarray) -> dict[str, float]:
    """Convergence of f at the first test rows, at most `FUNCTIONS` components of it."""
    rows = x[: max(1, FUNCTIONS // posterior.predictor(x[:1], draws=1).shape[-1])]
    found = convergence(posterior, rows).quantities["f"]
    return {"test_rhat": found.rhat, "test_ess_bulk": found.ess_bulk}


def _sites(posterior: Any) -> list[np.ndarray]:
    return [value[0, 0] for value in posterior.unconstrained_draws.values()]


def part_nuts(sizes: Sizes, cell: np.ndarray) -> Part:
    """NUTS where the fan-in Gaussian and T = 1 are in the first split, and how far what was found there is from it.

    cell: mean probabilities of that cell. The total variation between chains of NUTS says what is noise.
    """
    data = split(0, sizes.rows, sizes.test_rows)
    method = bnn.NUTS(chains=2, warmup=sizes.nuts_draws, draws=sizes.nuts_draws, max_tree_depth=8)
    model = network(sizes, DENSE, PRIORS[FAN_IN], data.classes)
    posterior = bnn.fit(model, data.x, data.y, method, seed=0)
    prediction = posterior.predict(data.test_x)
    diagnosis = bnn.diagnose(posterior)
    first = np.arange(prediction.draws) < posterior.shape[1]
    chains = [prediction.take_draws(each).probabilities for each in (first, ~first)]
    row = {
        "network": DENSE,
        "prior": FAN_IN,
        "temperature": 1.0,
        "split": 0,
        **scores.scores_of(prediction, data.test_y),
        "verdict": diagnosis.verdict,
        **{name: diagnosis.figures[name] for name in ("rhat", "ess_bulk", "ess_tail")},
        **at_test_rows(posterior, data.test_x),
        "draws": posterior.shape[1],
        "gradients": float(posterior.info.gradient_evaluations or math.nan),
        "total_variation": total_variation(cell, prediction.probabilities),
        "total_variation_of_its_chains": total_variation(*chains),
        **provenance(posterior, 0),
    }
    return {"tables": {"nuts": [row]}}


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    """Mean over rows of sum_c |p_c - q_c| / 2."""
    return float(np.mean(0.5 * np.abs(p - q).sum(axis=1)))


# --- the weights of trained networks --------------------------------------------------------------


def part_trained(sizes: Sizes, kind: str, index: int) -> Part:
    """The weights of a network that was only trained, layer by layer: their tails, and kernels place by place.

    Trained by Adam on all rows at a time under N(0, WEAK^2), stopped where held-out rows are predicted best, begun at
    normal weights: what is found besides tails of a normal, or correlation, came by training.
    """
    data = split(index, sizes.trained_rows, 0)
    model = network(sizes, kind, priors.Normal(0.0, WEAK), data.classes)
    method = bnn.MAP(steps=sizes.trained_steps, learning_rate=0.01, polish=False, validation=0.15)
    posterior = bnn.fit(model, data.x, data.y, method, seed=index)
    said = {"network": kind, "split": index}
    tails: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    for name, value in posterior.draws.items():
        weight = value[0, 0]
        if not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        tails.append(
            said
            | {"layer": layer, "weights": weight.size}
            | tails_of(weight.reshape(-1))
            | {"held_out_log_score": posterior.info.figures["validation_score"]}
            | provenance(posterior, index)
        )
        if weight.ndim == 4:
            kernels += [
                said
                | {"layer": layer, "distance": distance, "correlation": each}
                | provenance(posterior, index)
                for distance, each in correlation_by_distance(weight).items()
            ]
    return {"tables": {"tails": tails, "kernels": kernels}}


def tails_of(weights: np.ndarray) -> dict[str, float]:
    """Excess kurtosis (0 for a normal) and the degrees of freedom of the Student-t about 0 that is most likely."""
    from scipy import stats

    freedom, _, scale = stats.t.fit(weights, floc=0.0)
    return {
        "excess_kurtosis": float(stats.kurtosis(weights, bias=False)),
        # Beyond a hundred a Student-t is a normal, and the likelihood is flat.
        "degrees_of_freedom": float(min(freedom, 100.0)),
        "student_scale": float(scale),
        "standard_deviation": float(weights.std()),
    }


def correlation_by_distance(kernel: np.ndarray) -> dict[float, float]:
    """Correlation of the weights (kh, kw, C, O) at two places, by their distance in pixels.

    r(d) = mean over pairs (a, b) of places at distance d and channels of w_a w_b / mean of w^2 at a and at b,
    about zero, as a prior has them.
    """
    height, width = kernel.shape[:2]
    places = [(i, j) for i in range(height) for j in range(width)]
    products: dict[float, list[float]] = {}
    sizes: dict[float, list[float]] = {}
    for at, one in enumerate(places):
        for other in places[at + 1 :]:
            distance = round(math.hypot(one[0] - other[0], one[1] - other[1]), 6)
            products.setdefault(distance, []).append(float(np.mean(kernel[one] * kernel[other])))
            sizes.setdefault(distance, []).append(
                0.5 * float(np.mean(kernel[one] ** 2) + np.mean(kernel[other] ** 2))
            )
    return {
        distance: float(np.mean(products[distance]) / np.mean(sizes[distance]))
        for distance in sorted(products)
    }


# --- curves and effects ---------------------------------------------------------------------------


def curve(
    rows: Sequence[Mapping[str, Any]], kind: str, prior: str, score: str = "log_score"
) -> tuple[np.ndarray, np.ndarray]:
    """Temperatures (T,), from the coldest to 1, and a score (T, splits); empty where the prior was not run."""
    chosen = [row for row in rows if row["network"] == kind and row["prior"] == prior]
    temperatures = sorted({row["temperature"] for row in chosen})
    splits = sorted({row["split"] for row in chosen})
    found = {(row["temperature"], row["split"]): row[score] for row in chosen}
    return np.array(temperatures), np.array([[found[t, s] for s in splits] for t in temperatures], float)


def cold_effect(values: np.ndarray) -> np.ndarray:
    """(splits,): the score at the temperature below 1 that is best in the other splits, less that at T = 1.

    values: (temperatures, splits), T = 1 last.
    """
    effects = []
    for index in range(values.shape[1]):
        others = np.delete(values[:-1], index, axis=1).mean(axis=1)
        effects.append(values[int(np.argmax(others)), index] - values[-1, index])
    return np.array(effects)


def was_run(rows: Sequence[Mapping[str, Any]], kind: str, *names: str) -> bool:
    return all(any(row["network"] == kind and row["prior"] == name for row in rows) for name in names)


def told_curve(temperatures: np.ndarray, values: np.ndarray) -> str:
    return ", ".join(
        f"{np.mean(each):.4f} at T = {temperature:g}"
        for temperature, each in zip(temperatures, values, strict=True)
    )


def behind(rows: Sequence[Mapping[str, Any]], kind: str, *names: str, cold: bool = True) -> list[Any]:
    """The cells of some priors, at every temperature or at T = 1 alone."""
    return [
        row
        for row in rows
        if row["network"] == kind and row["prior"] in names and (cold or row["temperature"] == 1.0)
    ]


# --- verdicts -------------------------------------------------------------------------------------


def smaller(sizes: Sizes, trained: bool = False) -> str:
    """What every verdict has to say, on chains or on networks that were only trained."""
    rows = f"{sizes.rows} training and {sizes.test_rows} test rows"
    if trained:
        rows = f"{sizes.trained_rows} training rows"
    return (
        f"far smaller than the sources (MNIST, CIFAR-10, residual networks): {rows} of 8 x 8 digits, "
        f"{sizes.splits} {'networks' if trained else 'splits, networks'} of at most 2000 weights"
    )


def good(row: Mapping[str, Any]) -> bool:
    """Whether the chains of a cell may stand for the distribution that they sample."""
    return converged(row["rhat"], row["ess_bulk"])


def good_at_test_rows(row: Mapping[str, Any]) -> bool:
    """The same at the test rows, where claims about scores are made; False if that was not stored."""
    return converged(row.get("test_rhat", math.inf), row.get("test_ess_bulk", 0.0))


def convergence_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments of the referee for the cells behind a claim: each must have converged at training and test rows."""
    bad = [row for row in cells if not (good(row) and good_at_test_rows(row))]
    if not bad:
        return {}
    return {
        "converged": False,
        "why_not": f"{len(bad)} of the {len(cells)} runs of chains behind it have not; the largest R-hat is "
        f"{np.max([row['rhat'] for row in cells]):.3f}, the smallest bulk ESS "
        f"{np.min([row['ess_bulk'] for row in cells]):.0f}"
        + ("" if all("test_rhat" in row for row in cells) else "; at the test rows they were not stored"),
    }


@dataclass(frozen=True)
class Case:
    """The cells before the referee, and the rows of their splits."""

    referee: Referee
    cells: Sequence[Mapping[str, Any]]
    train_rows: int
    test_rows: int

    def ran(self, key: str, kind: str, *names: str) -> bool:
        """Whether these priors were run; the referee is told if not."""
        found = was_run(self.cells, kind, *names)
        if not found:
            self.referee.not_run(key, "this prior is not among the sizes of this run")
        return found

    def judge(self, key: str, values: np.ndarray, cells: Sequence[Mapping[str, Any]], numbers: str) -> None:
        """values: one for each split; cells: those that the values are computed from."""
        estimate = mean_over_splits(values, self.test_rows, self.train_rows)
        self.referee.measured(key, estimate, numbers, **convergence_of(cells))


def judge_cold(case: Case, kind: str, prior: str) -> None:
    """Wenzel et al.: a cold posterior predicts better than the posterior."""
    key = f"cold-{KEYS[kind]}-{KEYS[prior]}"
    if case.ran(key, kind, prior):
        temperatures, values = curve(case.cells, kind, prior)
        text = f"log score {told_curve(temperatures, values)}"
        case.judge(key, cold_effect(values), behind(case.cells, kind, prior), text)


def judge_better_prior(case: Case, kind: str, prior: str) -> None:
    """At T = 1, a prior against the fan-in Gaussian, in log score."""
    key = f"helps-{KEYS[prior]}"
    if not case.ran(key, kind, prior, FAN_IN):
        return
    ours, theirs = (curve(case.cells, kind, name)[1][-1] for name in (prior, FAN_IN))
    accuracy = [curve(case.cells, kind, name, "accuracy")[1][-1].mean() for name in (prior, FAN_IN)]
    case.judge(
        key,
        ours - theirs,
        behind(case.cells, kind, prior, FAN_IN, cold=False),
        f"log score {ours.mean():.4f} against {theirs.mean():.4f} of the {FAN_IN}; accuracy {accuracy[0]:.3f} against "
        f"{accuracy[1]:.3f}",
    )


def judge_shrinks(case: Case, prior: str) -> None:
    """Fortuin et al.: the cold-posterior effect of a fully connected network is smaller under heavy tails."""
    key = f"shrinks-{KEYS[prior]}"
    if not case.ran(key, DENSE, prior, FAN_IN):
        return
    of_normal, of_tails = (cold_effect(curve(case.cells, DENSE, name)[1]) for name in (FAN_IN, prior))
    cells = behind(case.cells, DENSE, prior, FAN_IN)
    text = (
        f"effect in log score {of_normal.mean():.4f} under the {FAN_IN}, {of_tails.mean():.4f} under {prior}"
    )
    if of_normal.mean() < WORTH:
        nothing = f"under the {FAN_IN} the effect is below {WORTH:g} nats per row: there is nothing to shrink"
        why = convergence_of(cells).get("why_not")
        case.referee.undecided(key, nothing, f"{text}; not converged ({why})" if why else text)
    else:
        case.judge(key, of_normal - of_tails, cells, text)


def judge_stays(case: Case) -> None:
    """Fortuin et al.: with correlated kernels the cold-posterior effect is still there."""
    if not case.ran("stays", CONVOLUTION, CORRELATED):
        return
    temperatures, values = curve(case.cells, CONVOLUTION, CORRELATED)
    text = f"log score {told_curve(temperatures, values)}"
    if was_run(case.cells, CONVOLUTION, FAN_IN):
        of_normal = cold_effect(curve(case.cells, CONVOLUTION, FAN_IN)[1])
        text += f"; the effect under the {FAN_IN} is {of_normal.mean():.4f}"
    case.judge("stays", cold_effect(values), behind(case.cells, CONVOLUTION, CORRELATED), text)


def judge_tails(referee: Referee, rows: Sequence[Mapping[str, Any]], layer: str, sizes: Sizes) -> None:
    """Fortuin et al.: weights of trained fully connected networks have heavy tails; a value for each network."""
    chosen = [row for row in rows if row["network"] == DENSE and row["layer"] == layer]
    freedom = np.median([row["degrees_of_freedom"] for row in chosen])
    referee.measured(
        f"tails-{layer}",
        mean([row["excess_kurtosis"] for row in chosen]),
        f"degrees of freedom of the most likely Student-t {freedom:.1f} (median; 100 stands for a normal)",
        sizes=smaller(sizes, trained=True),
    )


def judge_kernels(referee: Referee, rows: Sequence[Mapping[str, Any]], layer: str, sizes: Sizes) -> None:
    """Fortuin et al.: neighbouring weights of a trained kernel are correlated; a value for each network."""
    chosen = [row for row in rows if row["layer"] == layer]
    far = sorted({row["distance"] for row in chosen if row["distance"] > 1.0})
    told = ", ".join(
        f"{np.mean([row['correlation'] for row in chosen if row['distance'] == each]):.2f} at {each:.2f}"
        for each in far
    )
    near = [row["correlation"] for row in chosen if row["distance"] == 1.0]
    text = f"at larger distances, in pixels: {told}"
    referee.measured(f"kernels-{layer}", mean(near), text, sizes=smaller(sizes, trained=True))


def judge_convergence(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """That the chains of every cell in the table converged in function space."""
    bad = [row for row in rows if not good(row)]
    by_temperature = ", ".join(
        f"T = {each:g}: {sum(row['temperature'] == each for row in bad)}"
        for each in sorted({row["temperature"] for row in rows})
    )
    by_prior = ", ".join(
        f"{kind}, {prior}: {number}"
        for kind, prior in dict.fromkeys((row["network"], row["prior"]) for row in rows)
        if (number := sum(row["network"] == kind and row["prior"] == prior for row in bad))
    )
    rhat = np.array([row["rhat"] for row in rows])
    referee.measured(
        "convergence",
        exact(1.0 - len(bad) / len(rows)),
        f"{len(rows) - len(bad)} converged, {len(bad)} not; R-hat has the median {np.median(rhat):.3f}, nine in ten "
        f"are below {np.quantile(rhat, 0.9):.3f}, the largest is {rhat.max():.3f}"
        + (f"; not converged by temperature: {by_temperature}; by prior: {by_prior}" if bad else ""),
    )


def judge_sampler(
    referee: Referee, row: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], sizes: Sizes
) -> None:
    """The chains with a bias against NUTS: within what two chains of NUTS differ by, where both have converged."""
    held = [each for each in behind(cells, DENSE, FAN_IN, cold=False) if each["split"] == row["split"]]
    referee.measured(
        "sampler",
        exact(row["total_variation"] / row["total_variation_of_its_chains"]),
        f"total variation {row['total_variation']:.4f}, between two chains of NUTS of {sizes.nuts_draws} draws "
        f"{row['total_variation_of_its_chains']:.4f}; log score of NUTS {row['log_score']:.4f}, R-hat "
        f"{row['rhat']:.3f}, bulk ESS {row['ess_bulk']:.0f}, {row['gradients']:.3g} gradients",
        **convergence_of([row, *held]),
    )


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    sizes, tables = study.sizes, study.tables
    referee = Referee(read_claims("priors_and_temperature"), smaller(sizes))
    case = Case(referee, tables["cells"], sizes.rows, sizes.test_rows)
    for kind in (DENSE, CONVOLUTION):
        for prior in (ISOTROPIC, FAN_IN):
            judge_cold(case, kind, prior)
    for prior in (LAPLACE, STUDENT):
        judge_better_prior(case, DENSE, prior)
        judge_shrinks(case, prior)
    judge_better_prior(case, CONVOLUTION, CORRELATED)
    judge_stays(case)
    for layer in DENSE_LAYERS:
        judge_tails(referee, tables["tails"], layer, sizes)
    for layer in CONVOLUTIONS:
        judge_kernels(referee, tables["kernels"], layer, sizes)
    for prior in LEARNT:
        judge_better_prior(case, DENSE, prior)
    judge_convergence(referee, tables["cells"])
    judge_sampler(referee, tables["nuts"][0], tables["cells"], sizes)
    referee.not_run("sizes", "chains that converge on such networks are beyond this machine")
    return referee.verdicts()


# --- figures --------------------------------------------------------------------------------------

COLOURS = {
    ISOTROPIC: (GREY, "s"),
    FAN_IN: (BLACK, "o"),
    LAPLACE: (BLUE, "^"),
    STUDENT: (SKY, "v"),
    HORSESHOE: (VERMILION, "D"),
    HIERARCHICAL: (ORANGE, "P"),
    CORRELATED: (GREEN, "X"),
}


def _in_order(rows: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    return [name for name in COLOURS if was_run(rows, kind, name)]


def draw_curves(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Log score against T, and its difference to T = 1 in the same split; bars are two standard errors over splits."""
    figure, axes = panels(12.0, 8.4, columns=2, rows=2)
    for column, kind in enumerate((DENSE, CONVOLUTION)):
        names = _in_order(rows, kind)
        for at, name in enumerate(names):
            temperatures, values = curve(rows, kind, name)
            # Beside each other, so that bars can be told apart.
            shifted = temperatures * 1.03 ** (at - 0.5 * (len(names) - 1))
            colour, marker = COLOURS[name]
            for row, shown in enumerate((values, values - values[-1])):
                found = [paired(each) for each in shown]
                axes[row, column].errorbar(
                    shifted,
                    [mean for mean, _ in found],
                    [2.0 * error if math.isfinite(error) else 0.0 for _, error in found],
                    fmt=f"{marker}-",
                    color=colour,
                    capsize=3,
                    markersize=5,
                    linewidth=1.2,
                    label=name,
                )
        ticks = sorted({row["temperature"] for row in rows})
        for row, label in enumerate(("test log score, nats per row", "the same, less that at T = 1")):
            panel = axes[row, column]
            panel.set(xscale="log", xlabel="temperature T" if row else "", ylabel="" if column else label)
            panel.set_xticks(ticks, [f"{each:g}" for each in ticks])
            panel.set_xticks([], minor=True)
        axes[1, column].axhline(0.0, color=BLACK, linewidth=0.8)
        axes[0, column].set_title(f"{kind} network", fontsize=11)
        axes[0, column].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_posteriors(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """At T = 1: scores prior by prior, less those of the fan-in Gaussian in the same split."""
    figure, axes = panels(12.0, 5.6, columns=2, rows=2)
    for row, kind in enumerate((DENSE, CONVOLUTION)):
        names = [name for name in _in_order(rows, kind) if name != FAN_IN]
        for column, (score, label) in enumerate((("log_score", "log score"), ("accuracy", "accuracy"))):
            panel = axes[row, column]
            base = curve(rows, kind, FAN_IN, score)[1][-1]
            for place, name in enumerate(names):
                colour, marker = COLOURS[name]
                values = curve(rows, kind, name, score)[1][-1] - base
                mean, error = paired(values)
                panel.plot(
                    values, np.full(len(values), place), marker, color=colour, alpha=0.45, markersize=5
                )
                reach = 2.0 * error if math.isfinite(error) else 0.0
                panel.errorbar(mean, place, xerr=reach, fmt=marker, color=colour, capsize=4, markersize=8)
            panel.axvline(0.0, color=BLACK, linewidth=0.8)
            panel.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
            panel.set(ylim=(max(len(names), 1) - 0.5, -0.5), title=f"{kind} network" if column == 0 else "")
            panel.set(xlabel=f"test {label} at T = 1, less that of the {FAN_IN}")
    figure.savefig(path)


def draw_weights(
    path: Path, tails: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]
) -> None:
    """Excess kurtosis by layer, and correlation in kernels by distance, of trained networks, one mark per network."""
    figure, (both,) = panels(11.0, 4.2, columns=2)
    left, right = both
    layers = list(dict.fromkeys((row["network"], row["layer"]) for row in tails))
    for place, (kind, layer) in enumerate(layers):
        values = [row["excess_kurtosis"] for row in tails if row["network"] == kind and row["layer"] == layer]
        colour = BLUE if kind == DENSE else GREEN
        left.plot(np.full(len(values), place), values, "o", color=colour, alpha=0.6)
        left.plot([place - 0.25, place + 0.25], [np.mean(values)] * 2, color=colour, linewidth=2.0)
    for kind, colour in ((DENSE, BLUE), (CONVOLUTION, GREEN)):
        left.plot([], [], "o", color=colour, label=f"{kind} network")
    left.axhline(0.0, color=BLACK, linestyle="dashed", linewidth=1.0, label="a normal")
    left.set_xticks(range(len(layers)), [layer for _, layer in layers])
    left.set(ylabel="excess kurtosis of trained weights")
    left.legend(frameon=False, fontsize=9)
    for layer, colour, marker in zip(
        dict.fromkeys(row["layer"] for row in kernels), (PINK, ORANGE), ("o", "s"), strict=False
    ):
        chosen = [row for row in kernels if row["layer"] == layer]
        distances = sorted({row["distance"] for row in chosen})
        found = [
            paired([row["correlation"] for row in chosen if row["distance"] == each]) for each in distances
        ]
        right.errorbar(
            distances,
            [mean for mean, _ in found],
            [2.0 * error if math.isfinite(error) else 0.0 for _, error in found],
            fmt=f"{marker}-",
            color=colour,
            capsize=3,
            label=f"{layer}, trained",
        )
    grid = np.linspace(0.9, 3.0, 100)
    right.plot(grid, np.exp(-grid), color=BLACK, linestyle="dashed", label="the prior: $e^{-d}$")
    right.axhline(0.0, color=BLACK, linewidth=0.8)
    right.set(xlabel="distance d of two places of a kernel, pixels", ylabel="correlation of their weights")
    right.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_convergence(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """R-hat in function space of every cell."""
    figure, axes = panels(12.0, 4.4, columns=2)
    for column, kind in enumerate((DENSE, CONVOLUTION)):
        panel, names = axes[0, column], _in_order(rows, kind)
        for at, name in enumerate(names):
            temperatures, values = curve(rows, kind, name, "rhat")
            shifted = temperatures * 1.05 ** (at - 0.5 * (len(names) - 1))
            colour, marker = COLOURS[name]
            panel.plot(
                np.repeat(shifted, values.shape[1]),
                np.maximum(values.reshape(-1) - 1.0, 1e-4),
                marker,
                color=colour,
                alpha=0.7,
                markersize=5,
                label=name,
            )
        panel.axhline(RHAT - 1.0, color=BLACK, linestyle="dashed", linewidth=1.0, label="the limit")
        ticks = sorted({row["temperature"] for row in rows})
        panel.set(xscale="log", yscale="log", xlabel="temperature T", title=f"{kind} network")
        panel.set_xticks(ticks, [f"{each:g}" for each in ticks])
        panel.set_xticks([], minor=True)
        panel.legend(frameon=False, fontsize=8)
    axes[0, 0].set_ylabel("largest R-hat in function space, less 1")
    figure.savefig(path)


# --- all of it ------------------------------------------------------------------------------------


@dataclass
class Run:
    """The parts of one run, in tables."""

    study: Study
    checkpoint: str | Path | None
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def take(self, name: str, compute: Callable[[], Part]) -> Part:
        part = kept(self.checkpoint, name.replace(" ", "_"), self.study.sizes, compute)
        for table, rows in part["tables"].items():
            self.tables.setdefault(table, []).extend(rows)
        for row in part["tables"].get("cells", ()):
            self.study.say(
                f"{name}: log score {row['log_score']:.4f}, accuracy {row['accuracy']:.3f}, {row['verdict']}, R-hat "
                f"{row['rhat']:.3f}, ESS {row['ess_bulk']:.0f}, {row['gradients']:.3g} gradients, "
                f"{row['processor_seconds']:.1f} s"
            )
        return part


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    splits: int | None = None,
) -> Study:
    """Run the study and write tables, figures and verdicts; the arguments are those of the command line.

    What is kept in `checkpoint` is each cell (network, prior, T, split), each trained network, and NUTS.

    Raises
    ------
    ValueError: fewer than two splits.
    """
    sizes = TINY if tiny else FULL
    if (sizes.splits if splits is None else splits) < 2:
        raise ValueError("an effect wants two splits at least, as the best T of one is the other's")
    study = Study.begin(sizes, "priors_and_temperature", tiny, out, splits=splits)
    sizes = study.sizes
    run = Run(study, checkpoint)
    study.tables = run.tables
    cells = [(DENSE, prior) for prior in sizes.dense_priors]
    cells += [(CONVOLUTION, prior) for prior in sizes.convolution_priors]
    reference: np.ndarray | None = None
    for index in range(sizes.splits):
        for kind, prior in cells:
            for temperature in (1.0,) if prior in LEARNT else sorted(sizes.temperatures, reverse=True):
                part = run.take(
                    f"{kind}, {prior}, T {temperature:g}, split {index}",
                    partial(part_cell, sizes, kind, prior, temperature, index),
                )
                if (kind, prior, temperature, index) == (DENSE, FAN_IN, 1.0, 0):
                    reference = part["probabilities"]
        for kind in (DENSE, CONVOLUTION):
            run.take(f"trained {kind}, split {index}", partial(part_trained, sizes, kind, index))
        if index == 0:
            assert reference is not None
            run.take("nuts", partial(part_nuts, sizes, reference))
    draw_curves(study.out / "cold_posteriors.png", run.tables["cells"])
    draw_posteriors(study.out / "posteriors.png", run.tables["cells"])
    draw_weights(study.out / "weights.png", run.tables["tails"], run.tables["kernels"])
    draw_convergence(study.out / "convergence.png", run.tables["cells"])
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    options = vars(command_line(__doc__, "checkpoint", "splits", "cache").parse_args())
    # Splits share their programs: compiled once, they are read from disk by all others.
    bnn.enable_compilation_cache(options.pop("cache"))
    main(**options)
