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

Cut for a run of minutes on one processor: hundreds of rows, at most 50 hidden units and two seeds, over which an
interval is so wide that most claims stay undecided.

    python comparisons/evidence_selection.py [--tiny] [--out DIR] [--checkpoint DIR] [--seeds N]
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, mean_over_splits, read_claims
from study import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    VERMILION,
    Study,
    command_line,
    converged,
    kept,
    load_images,
    panels,
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
SHORT = {"log_score": "posterior", "log_score_mode": "mode"}
# Rows of the tables: the test rows are those that are left, at most `Sizes.test`.
TABLE_ROWS = {DIGITS: 1797, DIABETES: 442}
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
        # A stored table has six digits.
        right = min(gammas, key=lambda gamma: abs(gamma - right))
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


# --- verdicts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One task before the referee: its grid, and the rows of its splits."""

    referee: Referee
    grid: Grid
    train_rows: int
    test_rows: int

    def judge(self, claim: str, values: np.ndarray, numbers: str) -> None:
        """One value for each seed."""
        estimate = mean_over_splits(values, self.test_rows, self.train_rows)
        self.referee.measured(f"{self.grid.task}-{claim}", estimate, numbers)


def judge_prior(case: Case, score: str = "log_score") -> None:
    """The chosen gamma has half of what the best gamma gains over the middle of the grid.

    The middle is the median: beside gammas that predict nothing any choice would beat the mean.
    """
    grid = case.grid
    values = grid.columns[score]
    chosen, middle, best = grid.by(grid.evidence, score), np.median(values, axis=2), values.max(axis=2)
    right = values[..., list(grid.gammas).index(grid.right)]
    same = float((grid.evidence.argmax(axis=2) == values.argmax(axis=2)).mean())
    case.judge(
        f"prior-{SHORT[score]}",
        (chosen - (middle + best) / 2.0).mean(axis=1),
        f"the gamma that it chooses minus the median {(chosen - middle).mean():+.3f}, the best on the test rows "
        f"{(best - middle).mean():+.3f} (the same gamma in {same:.0%}); minus a weight decay of {WEIGHT_DECAY:g} "
        f"{(chosen - right).mean():+.3f}; chosen: "
        f"{counted([f'{grid.gammas[index]:.3g}' for index in grid.evidence.argmax(axis=2).ravel()])}",
    )


def counted(names: Sequence[str]) -> str:
    """Each name with its number of occurrences."""
    return ", ".join(f"{name} ({count})" for name, count in sorted(Counter(names).items()))


def judge_architecture(case: Case, score: str = "log_score") -> None:
    """Likewise, each architecture with the gamma that the evidence gave it."""
    grid = case.grid
    predicted = grid.by(grid.evidence, score)
    chosen, own = grid.architecture_by(score=score)
    middle, best = np.median(predicted, axis=1), predicted.max(axis=1)
    copies, with_copies = grid.architecture_by(grid.columns["log_copies"], score)
    listing = ", ".join(
        f"{name} {evidence:.1f} and {value:.3f}"
        for name, evidence, value in zip(
            grid.architectures, grid.evidence.max(axis=2).mean(axis=0), predicted.mean(axis=0), strict=True
        )
    )
    numbers = (
        f"chosen: {counted([grid.architectures[index] for index in chosen])}; its test log score minus the median "
        f"{(own - middle).mean():+.3f}, the best on the test rows {(best - middle).mean():+.3f}; log evidence and "
        f"score: {listing}; with the copies of a mode counted: "
        f"{counted([grid.architectures[index] for index in copies])}, score {(with_copies - own).mean():+.3f} higher"
    )
    claim = f"architecture-{SHORT[score]}"
    if (best - middle).mean() < ALIKE:
        nothing = (
            f"the architectures predict alike, within {ALIKE:g} nats per row: there is nothing to select"
        )
        case.referee.undecided(f"{grid.task}-{claim}", nothing, numbers)
    else:
        case.judge(claim, own - (middle + best) / 2.0, numbers)


def judge_posterior(case: Case) -> None:
    """The posterior predicts better than its mode at the prior that was chosen."""
    grid = case.grid
    chosen = grid.evidence.argmax(axis=2)
    gaps = _at(grid.columns["log_score"] - grid.columns["log_score_mode"], chosen)
    listing = ", ".join(
        f"{name} {gap:+.3f} ({effective:.0f} of {weights:.0f} weights determined)"
        for name, gap, effective, weights in zip(
            grid.architectures,
            gaps.mean(axis=0),
            _at(grid.columns["effective"], chosen).mean(axis=0),
            grid.columns["weights"].mean(axis=(0, 2)),
            strict=True,
        )
    )
    case.judge("posterior", gaps.mean(axis=1), listing)


def judge_reference(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """The log score of the Laplace approximation is within ALIKE of that of NUTS."""
    claim = "digits-reference"
    if not rows:
        referee.not_run(claim, "no reference at this size")
        return
    by_name = {row["method"]: row for row in rows}
    nuts, full = by_name[NUTS], by_name["Laplace, full"]
    listing = ", ".join(f"{row['method']} {row['log_score']:.3f} and {row['ece']:.3f}" for row in rows)
    referee.measured(
        claim,
        exact(full["log_score"] - nuts["log_score"]),
        f"log score and calibration error of one seed at gamma = {nuts['gamma']:.3g}: {listing}",
        converged=converged(nuts["rhat"], nuts["ess_bulk"]),
        why_not=f"NUTS has R-hat {nuts['rhat']:.3f}, bulk ESS {nuts['ess_bulk']:.0f}",
    )


def judge_correlation(case: Case, score: str = "log_score") -> None:
    """The rank correlation of evidence and test score is above one half."""
    found = case.grid.correlations(score)
    case.judge(
        f"correlation-{SHORT[score]}",
        found,
        f"over the {case.grid.evidence[0].size} pairs of the grid, by seed: "
        f"{', '.join(f'{value:.2f}' for value in found)}",
    )


def judge_printed(case: Case) -> None:
    """Wrong where the printed formula takes the largest gamma everywhere and the right one does not."""
    grid = case.grid
    last = len(grid.gammas) - 1
    wrong, right = (values.argmax(axis=2) for values in (grid.columns["printed"], grid.evidence))
    lost = grid.by(grid.evidence) - grid.by(grid.columns["printed"])
    case.referee.proved(
        f"{grid.task}-printed",
        bool((wrong == last).all() and (right < last).all()),
        f"as printed it takes the largest gamma of the grid, {grid.gammas[-1]:.3g}, in {(wrong == last).mean():.0%} of "
        f"the cases, and would take any larger one; with the term in {(right == last).mean():.0%}, and the test log "
        f"score is higher by {lost.mean():.3f}",
    )


def judge_mean_loss(case: Case) -> None:
    """A weight decay on the mean loss of N rows is gamma^-2 / N; the figures say what the slip costs."""
    grid, rows = case.grid, case.train_rows
    right, wrong = meanings(rows)
    places = [list(grid.gammas).index(gamma) for gamma in (grid.right, grid.gammas[-1])]
    gaps = [
        (grid.columns[name][..., places[0]] - grid.columns[name][..., places[1]]).mean() for name in PREDICTED
    ]
    case.referee.proved(
        f"{grid.task}-mean-loss",
        not math.isclose(right, wrong),
        f"a weight decay of {WEIGHT_DECAY:g} on the mean loss of {rows} rows is gamma = {right:.3g}, not {wrong:.3g}: "
        f"test log score {gaps[0]:+.3f}, that of the mode {gaps[1]:+.3f}",
    )


def judge_training(case: Case, score: str = "log_score") -> None:
    """The fit alone would take a prior that predicts worse."""
    grid = case.grid
    gain = grid.by(grid.evidence, score) - grid.by(grid.columns["log_score_training"], score)
    case.judge(f"training-{SHORT[score]}", gain.mean(axis=1), "")


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    sizes = study.sizes
    referee = Referee(read_claims("evidence_selection"), smaller(sizes))
    for task, rows in zip(sizes.tasks, sizes.rows, strict=True):
        test_rows = min(sizes.test, TABLE_ROWS[task] - rows)
        case = Case(referee, Grid.of(task, study.tables["grid"], meanings(rows)[0]), rows, test_rows)
        for score in PREDICTED:
            for each in (judge_prior, judge_architecture, judge_correlation, judge_training):
                each(case, score)
        for each in (judge_posterior, judge_printed, judge_mean_loss):
            each(case)
    judge_reference(referee, study.tables.get("reference", ()))
    return referee.verdicts()


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
    study.tables["grid"] = rows
    study.numbers = {"weight decay": WEIGHT_DECAY}
    draw(study.out / "grid.png", grids)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    main(
        **vars(
            command_line(__doc__, "checkpoint", "seeds", tiny="few rows and priors, in seconds").parse_args()
        )
    )
