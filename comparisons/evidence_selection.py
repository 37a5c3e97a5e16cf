"""Does the evidence pick the architecture and the prior that predict best? A grid of both, and the test scores.

Source: E. Daxberger, A. Kristiadi, A. Immer, R. Eschenhagen, M. Bauer and P. Hennig, "Laplace Redux - Effortless
Bayesian Deep Learning", NeurIPS 2021, as a review of it in Chinese retells it: architectures and hyper-parameters are
hard to choose, and the evidence of a Laplace approximation chooses both from the training data alone (after A. Immer,
M. Bauer, V. Fortuin, G. Raetsch and M. E. Khan, "Scalable marginal likelihood estimation for model selection in deep
learning", 2021). With the prior N(0, gamma^2 I) on D weights and H the Gauss-Newton curvature of -log p(D | w) at w*,

    log Z ~ log p(D | w*) - |w*|^2 / (2 gamma^2) - D log gamma - 1/2 log det(H + gamma^-2 I).

In print the term -D log gamma is lost; what it would then choose is in the table. A weight decay lambda on the MEAN
loss of N rows is gamma^-2 = lambda N; read as gamma^-2 = lambda it is another prior, and both are on the grid.

Grid: hidden layers of tanh and gamma. Digits (scikit-learn's, few rows), whose evidence is that of Kronecker factors,
and diabetes, with known noise and the full curvature. The mode is found for each pair (Adam and L-BFGS), the evidence
is that of one mode, and the score is the mean log probability of the test rows, twice: under the linearised prediction
of the posterior, and under the mode alone, as which a chosen network is mostly used. Of a hidden layer of M tanh units
there are M! 2^M copies of each mode: evidence over architectures is looked at with and without sum ln(M!) + M ln 2. The
reference is the test score, and NUTS (digits, no hidden layer, one seed), where it has converged; log Z itself is held
to tempered Monte Carlo in `evidence_framework.py`.

Cut for a run of minutes on one processor: hundreds of rows, at most 50 hidden units and two seeds, over which an error
of a mean is a rough guess.

    python comparisons/evidence_selection.py [--tiny] [--out DIR] [--checkpoint DIR] [--seeds N]
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
    VERMILION,
    Study,
    Verdict,
    command_line,
    judge_better,
    kept,
    load_images,
    paired,
    panels,
    stamp,
)
from threadpoolctl import threadpool_limits

import ppl_bnn as bnn
from ppl_bnn import data, likelihoods, priors, scores

WEIGHT_DECAY = 5e-4
DIGITS, DIABETES = "digits", "diabetes"
# About what a linear fit leaves, in standard deviations of y. Sampled, it has no mode where a network can interpolate.
NOISE = 0.7
STRUCTURES = {DIGITS: "kron", DIABETES: "full"}
# Columns of test scores, and what predicts.
PREDICTED = {"log_score": "the posterior", "log_score_mode": "the mode"}
NUTS = "NUTS"
# Nats per row: what is said to be no difference between architectures.
ALIKE = 0.01
COLOURS = (BLACK, BLUE, ORANGE, GREEN, VERMILION, PINK)
MARKERS = "osD^vP"


@dataclass(frozen=True)
class Sizes:
    """How much is computed. rows: for training, of digits and of diabetes; test: the most rows that are scored.

    hidden: widths of the hidden layers, () is no hidden layer. gammas: besides the two that a weight decay may mean.
    nuts: chains, warm-up and draws of the reference, or None.
    """

    seeds: int = 2
    tasks: tuple[str, ...] = (DIGITS, DIABETES)
    rows: tuple[int, ...] = (300, 221)
    test: int = 1000
    hidden: tuple[tuple[tuple[int, ...], ...], ...] = (
        ((), (5,), (20,), (50,), (20, 20)),
        ((), (2,), (5,), (20,), (10, 10)),
    )
    gammas: tuple[float, ...] = (0.1, 0.2, 0.4, 1.0)
    steps: int = 800
    polish: bool = True
    nuts: tuple[int, int, int] | None = (4, 100, 400)
    ppl: str = "pyro"


FULL = Sizes()
TINY = Sizes(
    seeds=1,
    rows=(40, 40),
    test=40,
    hidden=(((), (3,)), ((), (2,))),
    gammas=(0.3,),
    steps=100,
    polish=False,
    nuts=None,
)


def smaller(sizes: Sizes) -> str:
    """What every verdict has to say."""
    return (
        f"smaller than the source: {' and '.join(map(str, sizes.rows))} training rows, at most "
        f"{max(max(sum(each) for each in task) for task in sizes.hidden)} hidden units, {sizes.seeds} seeds"
    )


# --- models and data --------------------------------------------------------------------------------


def classes(x: Any, y: Any = None, *, hidden: tuple[int, ...], gamma: float) -> None:
    """Ten logits; images (N, H, W) pixel by pixel; every weight and bias N(0, gamma^2)."""
    f = bnn.mlp(x.reshape((x.shape[0], -1)), [*hidden, 10], "tanh", priors.Normal(0.0, gamma))
    bnn.observe(y, f, likelihoods.Categorical())


def numbers(x: Any, y: Any = None, *, hidden: tuple[int, ...], gamma: float) -> None:
    """y ~ N(f, NOISE^2); every weight and bias N(0, gamma^2)."""
    f = bnn.mlp(x, [*hidden, 1], "tanh", priors.Normal(0.0, gamma))
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


MODELS: dict[str, Callable[..., None]] = {DIGITS: classes, DIABETES: numbers}


@dataclass(frozen=True)
class Split:
    """Training and test rows in units of the training rows."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def split_of(task: str, rows: int, test: int, seed: int) -> Split:
    """Rows drawn by `seed`; numbers are standardised on the training rows."""
    if task == DIGITS:
        images = load_images("digits", rows, test, 1, seed)
        return Split(images.train, images.labels, images.test, images.test_labels)
    table = data.load(task)
    order = np.random.default_rng(seed).permutation(len(table.y))
    first, second = order[:rows], order[rows : rows + test]
    centre, spread = table.x[first].mean(axis=0), table.x[first].std(axis=0)
    middle, size = table.y[first].mean(), table.y[first].std()
    return Split(
        (table.x[first] - centre) / spread,
        (table.y[first] - middle) / size,
        (table.x[second] - centre) / spread,
        (table.y[second] - middle) / size,
    )


def meanings(rows: int) -> tuple[float, float]:
    """gamma of the weight decay on the mean loss, (lambda N)^(-1/2), and what it is without N."""
    return (WEIGHT_DECAY * rows) ** -0.5, WEIGHT_DECAY**-0.5


def gammas_of(sizes: Sizes, rows: int) -> list[float]:
    return sorted({*sizes.gammas, *meanings(rows)})


def log_copies(hidden: Sequence[int]) -> float:
    """sum over hidden layers of ln(M!) + M ln 2: units of tanh can be permuted and turned in sign."""
    return float(sum(math.lgamma(units + 1) + units * math.log(2.0) for units in hidden))


def printed(log_evidence: float, weights: int, gamma: float) -> float:
    """The evidence without its term -D log gamma."""
    return log_evidence + weights * math.log(gamma)


def name_of(hidden: Sequence[int]) -> str:
    return "-".join(map(str, hidden)) or "linear"


# --- the grid ---------------------------------------------------------------------------------------


# L-BFGS over a few hundred numbers: shared among threads it was measured at three times the processor time.
@threadpool_limits.wrap(limits=1)
def run_pair(
    task: str, split: Split, hidden: tuple[int, ...], gamma: float, seed: int, sizes: Sizes
) -> dict[str, Any]:
    """One architecture with one prior: evidence and scores."""
    model = partial(MODELS[task], hidden=hidden, gamma=gamma)
    # Of this process, which alone computes: others may have the machine, too.
    begun = time.process_time()
    mode = bnn.fit(
        model, split.x, split.y, bnn.MAP(steps=sizes.steps, polish=sizes.polish, ppl=sizes.ppl), seed=seed
    )
    fitted = bnn.fit(
        model,
        split.x,
        split.y,
        bnn.Laplace(structure=STRUCTURES[task], start=mode, optimise=False, ppl=sizes.ppl),
        seed=seed,
    )
    seconds = time.process_time() - begun
    weights = sum(value[0, 0].size for value in mode.draws.values())
    own = scores.scores_of(fitted.predict(split.test_x), split.test_y)
    point = scores.scores_of(mode.predict(split.test_x), split.test_y)
    trained = scores.scores_of(mode.predict(split.x), split.y)
    second = "accuracy" if task == DIGITS else "rmse"
    return {
        "architecture": name_of(hidden),
        "weights": weights,
        "gamma": gamma,
        "log_evidence": fitted.log_evidence,
        "log_copies": log_copies(hidden),
        "printed": printed(fitted.log_evidence, weights, gamma),
        "effective": fitted.info.figures["effective_parameters"],
        "log_score": own["log_score"],
        "log_score_mode": point["log_score"],
        "log_score_training": trained["log_score"],
        second: own[second],
        "gradient_norm": mode.info.figures["gradient_norm"],
        "processor_seconds": seconds,
    }


def run_architecture(task: str, hidden: tuple[int, ...], seed: int, sizes: Sizes) -> dict[str, Any]:
    """One architecture with every prior of the grid."""
    rows = sizes.rows[sizes.tasks.index(task)]
    split = split_of(task, rows, sizes.test, seed)
    return {"rows": [run_pair(task, split, hidden, gamma, seed, sizes) for gamma in gammas_of(sizes, rows)]}


@threadpool_limits.wrap(limits=1)
def run_reference(gamma: float, sizes: Sizes) -> dict[str, Any]:
    """NUTS on the digits of seed 0 without a hidden layer, whose posterior is log-concave, and what stands for it."""
    assert sizes.nuts is not None
    split = split_of(DIGITS, sizes.rows[sizes.tasks.index(DIGITS)], sizes.test, 0)
    model = partial(MODELS[DIGITS], hidden=(), gamma=gamma)

    def fitted(method: Any) -> Any:
        return bnn.fit(model, split.x, split.y, method, seed=0)

    mode = fitted(bnn.MAP(steps=sizes.steps, polish=sizes.polish, ppl=sizes.ppl))
    found = {"mode": mode}
    for structure in ("full", "kron"):
        found[f"Laplace, {structure}"] = fitted(
            bnn.Laplace(structure=structure, start=mode, optimise=False, ppl=sizes.ppl)
        )
    chains, warmup, draws = sizes.nuts
    found[NUTS] = fitted(
        bnn.NUTS(
            chains=chains,
            warmup=warmup,
            draws=draws,
            start=found["Laplace, full"],
            mass_matrix="dense",
            adapt_mass_matrix=False,
            max_tree_depth=7,
        )
    )
    diagnosis = bnn.diagnose(found[NUTS])
    rows = [
        {"method": name, "gamma": gamma} | scores.scores_of(each.predict(split.test_x), split.test_y)
        for name, each in found.items()
    ]
    rows[-1] |= {"verdict": diagnosis.verdict} | {key: diagnosis.figures[key] for key in ("rhat", "ess_bulk")}
    return {"rows": rows}


@dataclass(frozen=True)
class Grid:
    """The rows of one task as arrays over (seed, architecture, gamma). right: the gamma that the weight decay is."""

    task: str
    architectures: tuple[str, ...]
    gammas: tuple[float, ...]
    right: float
    columns: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, task: str, rows: Sequence[Mapping[str, Any]], right: float) -> Grid:
        own = [row for row in rows if row["task"] == task]
        architectures = tuple(dict.fromkeys(row["architecture"] for row in own))
        gammas = tuple(sorted({row["gamma"] for row in own}))
        seeds = sorted({row["seed"] for row in own})
        columns = {}
        for name in (
            "log_evidence",
            "log_copies",
            "printed",
            "log_score",
            "log_score_mode",
            "log_score_training",
            "effective",
            "weights",
        ):
            values = np.full((len(seeds), len(architectures), len(gammas)), np.nan)
            for row in own:
                at = (
                    seeds.index(row["seed"]),
                    architectures.index(row["architecture"]),
                    gammas.index(row["gamma"]),
                )
                values[at] = row[name]
            columns[name] = values
        return cls(task, architectures, gammas, right, columns)

    @property
    def evidence(self) -> np.ndarray:
        return self.columns["log_evidence"]

    def by(self, values: np.ndarray, score: str = "log_score") -> np.ndarray:
        """Test scores (seeds, architectures) with the gamma at which `values` (seeds, architectures, gammas) peak."""
        return _at(self.columns[score], values.argmax(axis=2))

    def architecture_by(
        self, added: np.ndarray | float = 0.0, score: str = "log_score"
    ) -> tuple[np.ndarray, np.ndarray]:
        """(architecture, test score), (seeds,) each: the evidence, with `added` to it, chooses both."""
        best = (self.evidence + added).max(axis=2)
        chosen = best.argmax(axis=1)
        return chosen, np.take_along_axis(self.by(self.evidence, score), chosen[:, None], axis=1)[:, 0]

    def correlations(self, score: str = "log_score") -> np.ndarray:
        """Spearman's between evidence and test score over the grid, one for each seed."""
        from scipy.stats import spearmanr

        pairs = zip(self.evidence, self.columns[score], strict=True)
        found: list[Any] = [spearmanr(a.ravel(), b.ravel()) for a, b in pairs]
        return np.array([float(each.statistic) for each in found])


def _at(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """values (..., G) at index (...)."""
    return np.take_along_axis(values, index[..., None], axis=-1)[..., 0]


def text(found: tuple[float, float]) -> str:
    mean, error = found
    return f"{mean:+.3f} (standard error {error:.3f})"


# --- verdicts ---------------------------------------------------------------------------------------


def judge_prior(grid: Grid, score: str = "log_score") -> Verdict:
    """Reproduced where the chosen gamma beats the middle of the grid by two errors and has half of what the best has.

    The middle is the median: beside gammas that predict nothing any choice would beat the mean.
    """
    values = grid.columns[score]
    chosen, middle, best = grid.by(grid.evidence, score), np.median(values, axis=2), values.max(axis=2)
    right = values[..., list(grid.gammas).index(grid.right)]
    gain, whole = (each - middle for each in (chosen, best))
    found = paired(gain.mean(axis=1))
    good = found[0] > 2.0 * found[1] and gain.mean() >= 0.5 * whole.mean()
    same = float((grid.evidence.argmax(axis=2) == values.argmax(axis=2)).mean())
    return Verdict(
        f"{grid.task}: the evidence selects the prior, as {PREDICTED[score]} predicts",
        REPRODUCED if good else NOT_REPRODUCED,
        f"test log score of the gamma that it chooses minus the median of the grid {text(found)}, that of the "
        f"best on the test rows {text(paired(whole.mean(axis=1)))} (the same gamma in {same:.0%}); minus that of a "
        f"weight decay of {WEIGHT_DECAY:g} {text(paired((chosen - right).mean(axis=1)))}; chosen: "
        f"{counted([f'{grid.gammas[index]:.3g}' for index in grid.evidence.argmax(axis=2).ravel()])}",
    )


def counted(names: Sequence[str]) -> str:
    """Each name and how often it comes."""
    return ", ".join(f"{name} ({count})" for name, count in sorted(Counter(names).items()))


def judge_architecture(grid: Grid, score: str = "log_score") -> Verdict:
    """Reproduced likewise, each architecture with the gamma that the evidence gave it."""
    predicted = grid.by(grid.evidence, score)
    chosen, own = grid.architecture_by(score=score)
    middle = np.median(predicted, axis=1)
    gain, whole = own - middle, predicted.max(axis=1) - middle
    found = paired(gain)
    good = found[0] > 2.0 * found[1] and gain.mean() >= 0.5 * whole.mean()
    copies, with_copies = grid.architecture_by(grid.columns["log_copies"], score)
    alike = ", they predict alike and there is little to select" if whole.mean() < ALIKE else ""
    listing = ", ".join(
        f"{name} {evidence:.1f} and {value:.3f}"
        for name, evidence, value in zip(
            grid.architectures, grid.evidence.max(axis=2).mean(axis=0), predicted.mean(axis=0), strict=True
        )
    )
    return Verdict(
        f"{grid.task}: the evidence selects the architecture, as {PREDICTED[score]} predicts",
        REPRODUCED if good else NOT_REPRODUCED,
        f"chosen: {counted([grid.architectures[index] for index in chosen])}; its test log score minus the median of "
        f"the architectures {text(found)}, of the best on the test rows {text(paired(whole))}{alike}; log "
        f"evidence and score: {listing}; with the copies of a mode counted: "
        f"{counted([grid.architectures[index] for index in copies])}, score {text(paired(with_copies - own))} higher",
    )


def judge_posterior(grid: Grid) -> Verdict:
    """Reproduced where the posterior predicts better than its mode, by two errors, at the prior that was chosen."""
    chosen = grid.evidence.argmax(axis=2)
    gaps = _at(grid.columns["log_score"] - grid.columns["log_score_mode"], chosen)
    listing = ", ".join(
        f"{name} {mean:+.3f} ({effective:.0f} of {weights:.0f} weights determined)"
        for name, mean, effective, weights in zip(
            grid.architectures,
            gaps.mean(axis=0),
            _at(grid.columns["effective"], chosen).mean(axis=0),
            grid.columns["weights"].mean(axis=(0, 2)),
            strict=True,
        )
    )
    return judge_better(
        f"{grid.task}: the posterior, linearised, predicts better than its mode (ours)",
        *paired(gaps.mean(axis=1)),
        f"at the gamma that the evidence chooses, test log score of the posterior minus that of its mode "
        f"{text(paired(gaps.mean(axis=1)))}: {listing}",
    )


def judge_reference(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where the log score of the Laplace approximation is within ALIKE of that of NUTS."""
    claim = "digits, no hidden layer: the Laplace approximation predicts as the posterior does (NUTS; ours)"
    if not rows:
        return Verdict(claim, NOT_RUN, "no reference at this size")
    by_name = {row["method"]: row for row in rows}
    nuts, full = by_name[NUTS], by_name["Laplace, full"]
    listing = ", ".join(f"{row['method']} {row['log_score']:.3f} and {row['ece']:.3f}" for row in rows)
    said = (
        f"log score and calibration error of one seed at gamma = {nuts['gamma']:.3g}: {listing}; NUTS is "
        f"{nuts['verdict']} (R-hat {nuts['rhat']:.3f}, bulk ESS {nuts['ess_bulk']:.0f})"
    )
    if nuts["verdict"] != "converged":
        return Verdict(claim, NOT_RUN, f"no reference: {said}")
    good = abs(full["log_score"] - nuts["log_score"]) <= ALIKE
    return Verdict(claim, REPRODUCED if good else NOT_REPRODUCED, said)


def judge_correlation(grid: Grid) -> Verdict:
    """Reproduced where the rank correlation is above one half in every seed, whichever predicts."""
    found = {name: grid.correlations(name) for name in PREDICTED}
    size = grid.evidence[0].size
    listing = "; ".join(
        f"{PREDICTED[name]} {', '.join(f'{value:.2f}' for value in values)}" for name, values in found.items()
    )
    return Verdict(
        f"{grid.task}: evidence and test score go together",
        REPRODUCED if all(bool((values > 0.5).all()) for values in found.values()) else NOT_REPRODUCED,
        f"Spearman's correlation over the {size} pairs of the grid, by seed: {listing}",
    )


def judge_printed(grid: Grid) -> Verdict:
    """Corrected where the printed formula takes the largest gamma everywhere and the right one does not."""
    last = len(grid.gammas) - 1
    wrong, right = (values.argmax(axis=2) for values in (grid.columns["printed"], grid.evidence))
    lost = paired((grid.by(grid.evidence) - grid.by(grid.columns["printed"])).mean(axis=1))
    good = bool((wrong == last).all() and (right < last).all())
    return Verdict(
        f"{grid.task}: log Z as printed, without -D log gamma, tunes gamma",
        CORRECTED if good else NOT_REPRODUCED,
        f"as printed it takes the largest gamma of the grid, {grid.gammas[-1]:.3g}, in {(wrong == last).mean():.0%} of "
        f"the cases, and would take any larger one; with the term in {(right == last).mean():.0%}, and the test log "
        f"score is higher by {text(lost)}",
    )


def judge_mean_loss(grid: Grid) -> Verdict:
    """Corrected where the prior that a weight decay on the mean loss is predicts better than gamma^-2 = lambda."""
    gammas = list(grid.gammas)
    right, wrong = grid.right, gammas[-1]
    places = gammas.index(right), gammas.index(wrong)
    gaps = [
        paired((grid.columns[name][..., places[0]] - grid.columns[name][..., places[1]]).mean(axis=1))
        for name in ("log_score", "log_score_mode")
    ]
    return Verdict(
        f"{grid.task}: weight decay is gamma^-2 (on a mean loss it is gamma^-2 / N)",
        CORRECTED if gaps[0][0] > 2.0 * gaps[0][1] else NOT_REPRODUCED,
        f"a weight decay of {WEIGHT_DECAY:g} is gamma = {right:.3g}, not {wrong:.3g}: test log score higher by "
        f"{text(gaps[0])}, that of the mode by {text(gaps[1])}",
    )


def judge_training(grid: Grid) -> Verdict:
    """Reproduced where the fit alone would take a prior that predicts worse, by two errors, whichever predicts."""
    fit = grid.columns["log_score_training"]
    gains = {
        name: paired((grid.by(grid.evidence, name) - grid.by(fit, name)).mean(axis=1)) for name in PREDICTED
    }
    listing = ", ".join(f"{PREDICTED[name]} {text(gain)}" for name, gain in gains.items())
    return Verdict(
        f"{grid.task}: the fit to the training rows cannot choose, the evidence weighs it against complexity",
        REPRODUCED if all(mean > 2.0 * error for mean, error in gains.values()) else NOT_REPRODUCED,
        f"test log score of the evidence's gamma minus that of the best fit's: {listing}",
    )


def judge(grids: Sequence[Grid], reference: Sequence[Mapping[str, Any]], note: str) -> list[Verdict]:
    verdicts = []
    for grid in grids:
        verdicts += [each(grid, score) for each in (judge_prior, judge_architecture) for score in PREDICTED]
        verdicts += [
            each(grid)
            for each in (judge_posterior, judge_correlation, judge_training, judge_printed, judge_mean_loss)
        ]
    verdicts.append(judge_reference(reference))
    return [dataclasses.replace(each, numbers=f"{each.numbers} [{note}]") for each in verdicts]


# --- the figure -------------------------------------------------------------------------------------


def draw(path: Path, grids: Sequence[Grid]) -> None:
    """Evidence and both test scores against gamma, means over seeds."""
    figure, axes = panels(10.4, 2.9 * len(grids), 3, len(grids))
    for (left, *others), grid in zip(axes, grids, strict=True):
        for index, architecture in enumerate(grid.architectures):
            style = {"color": COLOURS[index], "marker": MARKERS[index], "markersize": 5, "linewidth": 1.4}
            evidence = grid.evidence[:, index].mean(axis=0)
            left.plot(grid.gammas, evidence, **style)
            best = int(evidence.argmax())
            for axis, name in zip(others, PREDICTED, strict=True):
                values = grid.columns[name][:, index].mean(axis=0)
                axis.plot(grid.gammas, values, label=architecture, **style)
                chosen = {"color": COLOURS[index], "markersize": 12, "markerfacecolor": "none"}
                axis.plot(grid.gammas[best], values[best], "o", **chosen)
        lost = grid.columns["printed"][:, 1].mean(axis=0)
        left.plot(grid.gammas, lost, ":", color=GREY, label=f"{grid.architectures[1]}, as printed")
        top, bottom = grid.evidence.mean(axis=0).max(), np.median(grid.evidence)
        left.set_ylim(bottom - 1.5 * (top - bottom), top + 0.6 * (top - bottom))
        # Where the prior is far too narrow or too wide scores are so low that the rest would not be seen.
        for axis, name in zip(others, PREDICTED, strict=True):
            axis.set_ylim(np.quantile(grid.columns[name].mean(axis=0), 0.1), None)
            axis.set(ylabel="test log score, nats per row", title=f"{grid.task}: {PREDICTED[name]} predicts")
        for axis in (left, *others):
            axis.set(xscale="log", xlabel="prior standard deviation $\\gamma$")
        left.set(ylabel="log evidence, nats", title=f"{grid.task}: evidence")
        left.legend(frameon=False, fontsize=8, loc="upper left")
        others[-1].legend(
            frameon=False, fontsize=9, title="hidden units", bbox_to_anchor=(1.0, 1.0), loc="upper left"
        )
    figure.suptitle("Circles: the prior that the evidence chooses", fontsize=11)
    figure.savefig(path)


# --- the run ----------------------------------------------------------------------------------------


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    seeds: int | None = None,
) -> Study:
    """Run the study and write tables, the figure and verdicts; the arguments are those of the command line.

    What is kept in `checkpoint` is each architecture of each seed.
    """
    study = Study.begin(TINY if tiny else FULL, "evidence_selection", tiny, out, seeds=seeds)
    sizes = study.sizes
    rows: list[dict[str, Any]] = []
    for seed in range(sizes.seeds):
        for task, architectures in zip(sizes.tasks, sizes.hidden, strict=True):
            for hidden in architectures:
                name = f"{task}-{name_of(hidden)}-{seed}"
                part = kept(checkpoint, name, sizes, partial(run_architecture, task, hidden, seed, sizes))
                rows += [{"task": task, "seed": seed} | row for row in part["rows"]]
                study.say(
                    f"{task}, seed {seed}, {name_of(hidden)}: {sum(r['processor_seconds'] for r in part['rows']):.0f} s"
                )
    grids = [
        Grid.of(task, rows, meanings(count)[0]) for task, count in zip(sizes.tasks, sizes.rows, strict=True)
    ]
    reference: list[dict[str, Any]] = []
    if sizes.nuts is not None:
        of_one = [
            row for row in rows if (row["task"], row["seed"], row["architecture"]) == (DIGITS, 0, "linear")
        ]
        chosen = max(of_one, key=lambda row: row["log_evidence"])["gamma"]
        reference = kept(checkpoint, "reference", sizes, partial(run_reference, chosen, sizes))["rows"]
        study.tables["reference"] = reference
    note = smaller(sizes)
    study.tables["grid"] = rows
    study.numbers = {"note": note, "weight decay": WEIGHT_DECAY} | stamp()
    for verdict in judge(grids, reference, note):
        study.judge(verdict)
    draw(study.out / "grid.png", grids)
    study.write()
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    main(
        **vars(
            command_line(__doc__, "checkpoint", "seeds", tiny="few rows and priors, in seconds").parse_args()
        )
    )
