"""Which design choice of a Laplace approximation is best: all of them beside each other, on two small tasks.

Source: E. Daxberger, A. Kristiadi, A. Immer, R. Eschenhagen, M. Bauer and P. Hennig, "Laplace Redux - Effortless
Bayesian Deep Learning", NeurIPS 2021, its first experiment, as a review of it in Chinese retells it. With L = -log
p(D | w) - log p(w), the prior N(0, gamma^2 I), D weights and the mode w*,

    p(w | D) ~ N(w*, Sigma),   Sigma^-1 = gamma^-2 I + H,   H = -sum_n Hessian of log p(y_n | f(x_n, w*)),
    log Z ~ log p(D | w*) - |w*|^2 / (2 gamma^2) - D log gamma - 1/2 log det(H + gamma^-2 I).

In print two signs of the first line are wrong and the term -D log gamma of the second is lost: what that does is shown.

The choices: weights {all, last layer, sub-network of the largest marginal variances} x structure {full, Kronecker,
diagonal, low rank} x curvature {GGN, empirical Fisher, Hessian} x hyper-parameters {as written, evidence after
training, evidence during training, validation} x predictive {sampled, linearised, probit, probit with covariances,
Laplace bridge, normalised bridge}. Each combination is a row of the table: what it scored, or the error by which it is
refused. All choices start from one MAP for each task and split. Each split has its own training rows, test rows
and network; differences to MAP are paired over splits. There are ten splits: an earlier run of the first five kept the
means of their scores alone, which were seen and decided nothing. The standard errors in the table take splits as
independent, which random splits of one table are not; the figures and the verdicts do not.

Regression: diabetes (or --regression NAME), half of the rows for training; one hidden layer of tanh units, weights
N(0, 1 / fan-in), the noise held at that of least squares on the training rows. Classification: breast cancer, trained
on half of the rows with the prior that a weight decay of 5e-4 on the mean loss is, gamma^-2 = 5e-4 N. Two moons: a
picture of the confidence away from the data. Reference: NUTS on the first split with the hyper-parameters as written,
if `bnn.diagnose` finds that it converged. What becomes of tuning during training where the noise is learnt, too, is a
computation of its own.

The choices of one split share its compiled functions, so the seconds of a choice do not tell what it takes alone; they
are wall time under whatever else the machine did: an order of magnitude and no claim.

    python comparisons/laplace_design_choices.py [--tiny] [--out DIR] [--seeds N] [--workers N] [--regression NAME]
        [--checkpoint DIR]
"""

from __future__ import annotations

import math
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from claims import ROUNDING, Estimate, Referee, Verdict, exact, mean_over_splits, read_claims
from study import BLACK, BLUE, GREY, VERMILION, Study, command_line, converged, kept, new_figure, run

import ppl_bnn as bnn
from ppl_bnn import data, dist, likelihoods, priors, scores
from ppl_bnn.core.errors import BNNError
from ppl_bnn.core.progress import Silent

WEIGHTS = ("all", "last_layer", "largest_variance")
STRUCTURES = ("full", "kron", "diag", "lowrank")
CURVATURES = ("ggn", "empirical", "hessian")
WRITTEN, AFTER, DURING, VALIDATION = "as written", "evidence after", "evidence during", "validation"
HYPER = (WRITTEN, AFTER, DURING, VALIDATION)
KINDS = ("sampled", "linearised", "probit", "probit_covariance", "bridge", "bridge_norm")
REGRESSION, CLASSIFICATION = "regression", "classification"
TASKS = (REGRESSION, CLASSIFICATION)
TABLE = "breast_cancer"
AXES = ("weights", "structure", "curvature", "hyper", "predictive")
SCORES = {
    REGRESSION: ("log_score", "rmse", "crps", "coverage_90"),
    CLASSIFICATION: ("log_score", "accuracy", "brier", "ece", "confidence"),
}
COLUMNS = (
    "task",
    *AXES,
    "splits",
    "log_score",
    "vs_map",
    "vs_map_se",
    "rmse",
    "crps",
    "coverage_90",
    "accuracy",
    "brier",
    "ece",
    "confidence",
    "log_evidence",
    "gap_mean",
    "gap_sd_ratio",
    "rhat",
    "ess_bulk",
    "train_rows",
    "test_rows",
    "seconds",
    "reason",
)
# What is judged split by split.
BY_SPLIT = ("task", *AXES, "split", "log_score", "accuracy", "ece", "confidence", "coverage_90")
# On the mean loss of a row, as networks are often trained.
WEIGHT_DECAY = 5e-4
# The paper's default for networks already trained.
DEFAULT = ("last_layer", "kron", "ggn", AFTER, "linearised")
# Nats per row: where the best of all choices gains less than this over MAP, there is nothing to decide.
WORTH = 0.01


@dataclass(frozen=True)
class Sizes:
    """How much is computed. train, test, features: the most of each, None: all.

    trained: weights and structures for which the hyper-parameters that train are run.
    """

    width: int = 20
    splits: int = 10
    train: int | None = None
    test: int | None = None
    features: int | None = None
    rank: int = 10
    draws: int = 300
    steps: int = 20_000
    nuts: tuple[int, int, int] | None = (4, 700, 700)
    grid: int = 61
    trained: tuple[tuple[str, str], ...] = tuple(product(WEIGHTS, STRUCTURES))
    ppl: str = "numpyro"
    regression: str = "diabetes"


FULL = Sizes()
TINY = Sizes(
    width=1,
    splits=1,
    train=24,
    test=12,
    features=2,
    rank=1,
    draws=20,
    steps=300,
    nuts=None,
    grid=8,
    ppl="pyro",
    trained=(("last_layer", "kron"),),
)


# --- models and data ------------------------------------------------------------------------------------


def regression(x: Any, y: Any = None, *, width: int, noise: float | None) -> None:
    """tanh units with weights N(0, 1 / fan-in) and known noise, or (None) s ~ HalfNormal(1), in standard units."""
    s = bnn.sample("noise", dist.HalfNormal(1.0)) if noise is None else noise
    f = bnn.mlp(x, [width, 1], "tanh", priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, likelihoods.Gaussian(s))


def noise_of_least_squares(x: np.ndarray, y: np.ndarray) -> float:
    """The residual standard deviation of a linear fit with intercept, in standard deviations of y."""
    design = np.column_stack([np.ones(len(x)), x])
    solution, *_ = np.linalg.lstsq(design, y)
    free = max(1, len(y) - design.shape[1])
    return float(np.sqrt(np.sum((y - design @ solution) ** 2) / free) / y.std())


def classification(x: Any, y: Any = None, *, width: int, classes: int, gamma: float) -> None:
    """tanh units and a logit for each class; every weight and bias N(0, gamma^2)."""
    f = bnn.mlp(x, [width, classes], "tanh", priors.Normal(0.0, gamma))
    bnn.observe(y, f, likelihoods.Categorical())


def gamma_of(rows: int) -> float:
    """The prior standard deviation that a weight decay on the mean loss of so many rows is."""
    return (WEIGHT_DECAY * rows) ** -0.5


@dataclass(frozen=True)
class Split:
    """One task with its training and test rows."""

    task: str
    name: str
    index: int
    model: Callable[..., None]
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    weights: int


def load_split(task: str, index: int, sizes: Sizes) -> Split:
    """The index-th split of a task's table: a published one where there are such, else half of the rows held out."""
    name = TABLE
    if task == REGRESSION:
        name = sizes.regression
    table = data.load(name)
    rows = table.published_split(index) if table.splits is not None else table.split(index, 0.5)
    train, test = rows[0][: sizes.train], rows[1][: sizes.test]
    x = table.x[:, : sizes.features]
    inputs, outputs = x.shape[1], 1 if task == REGRESSION else len(table.class_names or ())
    if task == REGRESSION:
        noise = noise_of_least_squares(x[train], table.y[train])
        model = partial(regression, width=sizes.width, noise=noise)
    else:
        model = partial(classification, width=sizes.width, classes=outputs, gamma=gamma_of(len(train)))
    count = (inputs + 1) * sizes.width + (sizes.width + 1) * outputs
    return Split(task, name, index, model, (x[train], table.y[train]), (x[test], table.y[test]), count)


def moons(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two half circles that reach into each other, with noise of standard deviation 0.2."""
    rng = np.random.default_rng(seed)
    label = np.arange(rows) % 2
    angle = np.pi * rng.uniform(size=rows)
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    x[label == 1] = np.array([1.0, 0.5]) - x[label == 1]
    return x + 0.2 * rng.normal(size=x.shape), label


# --- the choices ----------------------------------------------------------------------------------------


def method(
    weights: str, structure: str, curvature: str, hyper: str, start: Any, subnetwork: int, sizes: Sizes
) -> Any:
    """The Laplace approximation of one choice; raises the library's error if it is refused."""
    trains = hyper in (DURING, VALIDATION)
    return bnn.Laplace(
        weights=weights,
        subnetwork=subnetwork if weights == "largest_variance" else None,
        structure=structure,
        rank=sizes.rank if structure == "lowrank" else None,
        curvature=curvature,
        tune="none" if hyper == WRITTEN else "global",
        objective="validation" if hyper == VALIDATION else "evidence",
        during_training=hyper == DURING,
        start=start,
        optimise=trains,
        # From a mode on L-BFGS is enough; Adam would first walk away from it.
        steps=1 if trains else sizes.steps,
        ppl=sizes.ppl,
    )


def refit(start: Any, chosen: Any) -> Any:
    """The posterior of a method on the model and the rows of another posterior, with its compiled functions.

    `bnn.fit` would compile the same functions anew for each of a hundred choices; what is computed is the same.
    """
    outcome = start.with_problem(lambda problem: chosen.run(problem, Silent()))
    info = replace(
        start.info,
        method=chosen.name,
        settings=chosen.settings(),
        figures=outcome.figures,
        warnings=outcome.warnings,
        history=outcome.history,
    )
    return replace(start, approximation=outcome.approximation, info=info)


def choices(sizes: Sizes) -> Iterator[tuple[str, str, str, str]]:
    """Every combination but for the predictives, which share a fit."""
    for weights, structure, curvature, hyper in product(WEIGHTS, STRUCTURES, CURVATURES, HYPER):
        if hyper in (WRITTEN, AFTER) or (weights, structure) in sizes.trained:
            yield weights, structure, curvature, hyper


def scores_of(prediction: Any, y: np.ndarray) -> dict[str, float]:
    """The scores of `ppl_bnn.scores`, and for classes the mean probability of the most probable one."""
    found = scores.scores_of(prediction, y)
    if prediction.is_classes:
        found["confidence"] = float(prediction.probabilities.max(axis=1).mean())
    return found


def run_split(task: str, index: int, sizes: Sizes, checkpoint: str | None = None) -> list[dict[str, Any]]:
    """All choices on one split: a row for each, with scores or with the reason why there are none.

    checkpoint: a folder where each choice is kept as it is finished; what is there is not computed again.
    """
    split = load_split(task, index, sizes)
    (x, y), (x_test, y_test) = split.train, split.test

    def fit(chosen: Any) -> Any:
        return bnn.fit(split.model, x, y, chosen, seed=index, standardise=True)

    # A run that goes on fits these again only where a choice that needs them is missing.
    timed_start = cache(lambda: timed(lambda: fit(bnn.MAP(steps=sizes.steps, ppl=sizes.ppl))))
    nuts = cache(lambda: run_nuts(fit, x_test, y_test, sizes))

    def point() -> dict[str, Any]:
        start, seconds = timed_start()
        found = {"weights": "MAP", "seconds": seconds, "reason": "; ".join(start.info.warnings)}
        return {"rows": [found | scores_of(start.predict(x_test), y_test)]}

    def one(weights: str, structure: str, curvature: str, hyper: str) -> dict[str, Any]:
        named = {"weights": weights, "structure": structure, "curvature": curvature, "hyper": hyper}
        start, _ = timed_start()
        try:
            chosen = method(weights, structure, curvature, hyper, start, max(1, split.weights // 4), sizes)
            fitted, seconds = timed(lambda: refit(start, chosen))
        except BNNError as error:
            reason = f"{type(error).__name__}: {error}"
            return {"rows": [named | {"predictive": kind, "reason": reason} for kind in KINDS]}
        named |= {
            "seconds": seconds,
            "log_evidence": fitted.log_evidence,
            "factor": fitted.info.figures.get("prior_factor/all"),
        }
        reference = nuts()[1] if hyper == WRITTEN and index == 0 else None
        return {
            "rows": [
                named
                | {"predictive": kind}
                | predict_with(fitted, kind, x_test, y_test, sizes.draws, reference)
                for kind in KINDS
            ]
        }

    parts: dict[str, Callable[[], dict[str, Any]]] = {"map": point}
    if index == 0:
        parts["nuts"] = lambda: {"rows": [nuts()[0]]}
    parts |= {"-".join(choice): partial(one, *choice) for choice in choices(sizes)}
    base = {"task": task, "split": index, "train_rows": len(y), "test_rows": len(y_test)}
    return [
        base | row
        for name, compute in parts.items()
        for row in kept(checkpoint, f"{task}-{index}-{name}".replace(" ", "_"), sizes, compute)["rows"]
    ]


def timed(compute: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its seconds."""
    begun = time.perf_counter()
    found = compute()
    return found, time.perf_counter() - begun


def predict_with(
    fitted: Any, kind: str, x: np.ndarray, y: np.ndarray, draws: int, reference: Any
) -> dict[str, Any]:
    """Scores of one predictive and its gap to the reference, or the reason why there are none."""
    try:
        prediction = fitted.predict(x, kind=kind, draws=draws if kind == "sampled" else None)
        found: dict[str, Any] = scores_of(prediction, y)
    except BNNError as error:
        return {"reason": f"{type(error).__name__}: {error}"}
    if not math.isfinite(found["log_score"]):
        return {"reason": "a test label was given the probability 0: the log score is minus infinity"}
    # Kinds that give one vector of probabilities say nothing of its spread.
    if reference is not None and kind in ("sampled", "linearised"):
        gaps = scores.fidelity(prediction, reference)
        found |= {"gap_mean": gaps["mean_gap"], "gap_sd_ratio": gaps["sd_ratio"]}
    return found


def run_nuts(
    fit: Callable[[Any], Any], x: np.ndarray, y: np.ndarray, sizes: Sizes
) -> tuple[dict[str, Any], Any]:
    """The row of NUTS, with its noise floor as its gap, and its prediction if it has converged, else None."""
    if sizes.nuts is None:
        return {"weights": "NUTS", "reason": "no reference: NUTS is not run at this size"}, None
    chains, warmup, draws = sizes.nuts
    begun = time.perf_counter()
    posterior = fit(bnn.NUTS(chains=chains, warmup=warmup, draws=draws, max_tree_depth=8))
    prediction = posterior.predict(x)
    row = {"weights": "NUTS", "seconds": time.perf_counter() - begun} | scores_of(prediction, y)
    diagnosis = bnn.diagnose(posterior)
    row |= {name: diagnosis.figures[name] for name in ("rhat", "ess_bulk")}
    if diagnosis.verdict != "converged":
        return row | {"reason": f"no reference: {diagnosis.verdict}: {diagnosis.reasons[0]}"}, None
    floor = scores.noise_floor(prediction, np.repeat(np.arange(chains), draws))
    return row | {"gap_mean": floor["mean_gap"], "gap_sd_ratio": floor["sd_ratio"]}, prediction


# --- the table ------------------------------------------------------------------------------------------


@dataclass
class Found:
    """The rows of all splits by choice, and what is computed from them. A choice is (weights, ..., predictive)."""

    rows: list[dict[str, Any]]
    by_choice: dict[tuple[str, ...], list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_choice = {}
        for row in self.rows:
            key = (row["task"], *(str(row.get(axis, "")) for axis in AXES))
            self.by_choice.setdefault(key, []).append(row)

    @property
    def splits(self) -> int:
        return 1 + max(row["split"] for row in self.rows)

    def values(self, task: str, choice: Sequence[str], score: str = "log_score") -> np.ndarray | None:
        """One value for each split, (splits,), where the choice worked in all of them; else None."""
        rows = sorted(self.by_choice.get((task, *choice), []), key=lambda row: row["split"])
        values = [row.get(score) for row in rows]
        if len(values) < self.splits or any(value is None for value in values):
            return None
        return np.array(values, dtype=float)

    def point(self, task: str, score: str = "log_score") -> np.ndarray:
        """The values of MAP, (splits,)."""
        found = self.values(task, MAP_CHOICE, score)
        assert found is not None
        return found

    def working(self, task: str) -> list[tuple[str, ...]]:
        """The choices of Laplace that worked in every split."""
        every = (choice for found_in, *choice in self.by_choice if found_in == task and choice[1])
        return [tuple(choice) for choice in every if self.values(task, choice) is not None]

    def table(self) -> list[dict[str, Any]]:
        """A row for each choice: means over the splits in which it worked, and its paired difference to MAP."""
        rows = []
        for (task, *choice), found in self.by_choice.items():
            worked = [row for row in found if row.get("log_score") is not None]
            row: dict[str, Any] = {
                "task": task,
                **dict(zip(AXES, choice, strict=True)),
                "splits": len(worked),
                **{name: found[0].get(name) for name in ("train_rows", "test_rows")},
            }
            if worked:
                for name in (
                    *SCORES[task],
                    "log_evidence",
                    "gap_mean",
                    "gap_sd_ratio",
                    "rhat",
                    "ess_bulk",
                    "seconds",
                ):
                    values = [each[name] for each in worked if each.get(name) is not None]
                    row[name] = float(np.mean(values)) if values else None
                point = self.point(task)
                differences = [each["log_score"] - point[each["split"]] for each in worked]
                if choice[1]:
                    row["vs_map"], row["vs_map_se"] = paired(differences)
            reasons = [each["reason"] for each in found if each.get("reason")]
            row["reason"] = reasons[0] if reasons else ""
            rows.append(row)
        return rows


MAP_CHOICE = ("MAP", "", "", "", "")


def paired(differences: Sequence[float] | np.ndarray) -> tuple[float, float | None]:
    """Mean of paired differences and its standard error, None for a single one."""
    values = np.asarray(differences, float)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return float(values.mean()), error


# --- verdicts -------------------------------------------------------------------------------------------


def contrast(
    found: Found, task: str, axis: str, first: str, second: str, **fixed: Sequence[str]
) -> np.ndarray | None:
    """Log score of `first` minus that of `second` on one axis, all else equal: (choices, splits), or None.

    fixed: axis -> the values that are looked at. Only pairs of which both worked in every split count.
    """
    place = AXES.index(axis)
    differences = []
    for choice in found.working(task):
        if choice[place] != first:
            continue
        if any(choice[AXES.index(name)] not in values for name, values in fixed.items()):
            continue
        other = found.values(task, (*choice[:place], second, *choice[place + 1 :]))
        own = found.values(task, choice)
        if other is not None and own is not None:
            differences.append(own - other)
    return np.array(differences) if differences else None


def ranked(found: Found, task: str, working: Sequence[Sequence[str]]) -> list[tuple[float, tuple[str, ...]]]:
    """Mean log score and choice, best first."""
    scored = []
    for choice in working:
        values = found.values(task, choice)
        if values is not None:
            scored.append((float(values.mean()), tuple(choice)))
    return sorted(scored, reverse=True)


def best_elsewhere(values: np.ndarray) -> np.ndarray:
    """values (choices, splits) -> (splits,): in each split, the choice that is best in the mean of the OTHER splits.

    The best on the very rows on which it is judged is flattered; a single split leaves no other way.
    """
    count = values.shape[1]
    if count == 1:
        return values.max(axis=0)
    others = (values.sum(axis=1, keepdims=True) - values) / (count - 1)
    return values[others.argmax(axis=0), np.arange(count)]


def from_summary(value: float, error: float | None, n: int, test_rows: float, train_rows: float) -> Estimate:
    """`mean_over_splits` of n values, of which the mean and the standard error are known: it depends on no more."""
    pattern = np.arange(n) - (n - 1) / 2.0
    spread = 0.0 if error is None or n < 2 else error * math.sqrt(n) / pattern.std(ddof=1)
    return mean_over_splits(value + spread * pattern, test_rows, train_rows)


def smaller(sizes: Sizes) -> str:
    """What every verdict has to say."""
    return (
        f"far smaller than the source (image classifiers): a hidden layer of {sizes.width} tanh units, two tables of "
        f"hundreds of rows, {sizes.splits} splits of each"
    )


@dataclass(frozen=True)
class Case:
    """The choices before the referee.

    table: a row for each choice; means: the same as if they were of one split; splits: the scores of single splits,
    None where they were not stored.
    """

    referee: Referee
    table: Sequence[Mapping[str, Any]]
    means: Found
    splits: Found | None

    @classmethod
    def of(cls, referee: Referee, study: Study) -> Case:
        table = study.tables["choices"]
        point = {row["task"]: row["log_score"] for row in table if row["weights"] == "MAP"}
        # In a stored table differences to MAP have more digits than log scores.
        whole = [
            row | {"split": 0, "log_score": point[row["task"]] + row.get("vs_map", 0.0)}
            for row in table
            if row["splits"] == study.sizes.splits
        ]
        rows = study.tables.get("splits")
        return cls(referee, table, Found(whole), Found(rows) if rows else None)

    def rows_of(self, task: str) -> tuple[float, float]:
        """Test and training rows of a split. Where a table does not say, it is of halves."""
        row = next(row for row in self.table if row["task"] == task)
        return row.get("test_rows", 1), row.get("train_rows", 1)

    def judge(self, key: str, task: str, of: Callable[[Found], np.ndarray | None], numbers: str) -> None:
        """of: the quantity split by split, (splits,), or None where what it is computed from failed in some split."""
        mean = of(self.means)
        values = None if self.splits is None else of(self.splits)
        if mean is None:
            self.referee.undecided(key, "it did not work in every split", numbers)
        elif values is None:
            why = "the scores of single splits were not stored, so there is no interval"
            self.referee.undecided(key, why, f"the mean is {float(mean.mean()):+.3f}; {numbers}")
        else:
            self.referee.measured(key, mean_over_splits(values, *self.rows_of(task)), numbers)


def judge_contrast(
    case: Case, claim: str, task: str, axis: str, first: str, second: str, **fixed: Sequence[str]
) -> None:
    """One value of an axis against another, in the mean over choices that have all else equal."""
    differences = contrast(case.means, task, axis, first, second, **fixed)
    numbers = "no pair of choices"
    if differences is not None:
        numbers = (
            f"{len(differences)} pairs of choices, ahead in {np.sum(differences > 0.0)} of them; the median pair "
            f"{np.median(differences):+.3f}"
        )

    def mean_over_pairs(found: Found) -> np.ndarray | None:
        values = contrast(found, task, axis, first, second, **fixed)
        return None if values is None else values.mean(axis=0)

    case.judge(f"{task}-{claim}", task, mean_over_pairs, numbers)


def judge_default(case: Case, task: str) -> None:
    """The default against MAP, and what it has of the gain of the best choice."""
    own = [f"{task}-{claim}" for claim in ("default-better", "default-half")]
    working = case.means.working(task)
    if DEFAULT not in working:
        for key in own:
            case.referee.undecided(key, "it did not work in every split")
        return
    order = ranked(case.means, task, working)
    best, name = order[0]
    most = best - float(case.means.point(task)[0])
    place = 1 + [choice for _, choice in order].index(DEFAULT)
    numbers = (
        f"the default is at rank {place} of {len(order)} choices; the best on the test rows themselves, "
        f"{', '.join(name)}, gains {most:+.4f} over MAP"
    )
    if most < WORTH:
        nothing = f"no choice gains {WORTH:g} nats per row over MAP: there is nothing to decide"
        for key in own:
            case.referee.undecided(key, nothing, numbers)
        return
    row = case.means.by_choice[task, *DEFAULT][0]
    gain = from_summary(row["vs_map"], row.get("vs_map_se"), row["splits"], *case.rows_of(task))
    case.referee.measured(f"{task}-default-better", gain, numbers)

    def over_half(found: Found) -> np.ndarray:
        gains = {
            choice: values - found.point(task)
            for choice in found.working(task)
            if (values := found.values(task, choice)) is not None
        }
        return gains[DEFAULT] - best_elsewhere(np.array(list(gains.values()))) / 2.0

    case.judge(f"{task}-default-half", task, over_half, numbers)


def structures(found: Found, task: str) -> dict[tuple[str, str], np.ndarray]:
    """Log score (splits,) by structure and curvature, all weights, linearised: mean of tuning after and during."""
    pairs = {}
    for structure, curvature in product(STRUCTURES, CURVATURES):
        values = [
            found.values(task, ("all", structure, curvature, hyper, "linearised"))
            for hyper in (AFTER, DURING)
        ]
        worked = [each for each in values if each is not None]
        if len(worked) == len(values):
            pairs[structure, curvature] = np.mean(worked, axis=0)
    return pairs


def judge_structures(case: Case, task: str) -> None:
    """The paper's choice, Kronecker GGN, against the best of the other structures and curvatures."""

    def ahead(found: Found) -> np.ndarray | None:
        pairs = structures(found, task)
        own = pairs.pop(("kron", "ggn"), None)
        return own - best_elsewhere(np.array(list(pairs.values()))) if own is not None and pairs else None

    pairs = structures(case.means, task)
    order = sorted(pairs, key=lambda pair: -pairs[pair][0])
    listing = ", ".join(f"{' '.join(pair)} {pairs[pair][0]:.3f}" for pair in order)
    case.judge(f"{task}-structure", task, ahead, f"log score: {listing}")


def told(case: Case, task: str, others: Sequence[Sequence[str]], of: Callable[[Sequence[str]], str]) -> str:
    """What choices besides the default say, for the reader alone."""
    worked = set(case.means.working(task))
    return "; ".join(f"{' '.join(choice[:4])} {of(choice)}" for choice in others if tuple(choice) in worked)


def judge_confidence(case: Case) -> None:
    """Whether MAP is surer than it is right, and whether the default of Laplace has the lower calibration error."""
    task = CLASSIFICATION

    def surplus(found: Found) -> np.ndarray:
        return found.point(task, "confidence") - found.point(task, "accuracy")

    def improved(found: Found) -> np.ndarray | None:
        ece = found.values(task, DEFAULT, "ece")
        return None if ece is None else found.point(task, "ece") - ece

    def of(choice: Sequence[str]) -> str:
        (row,) = case.means.by_choice[task, *choice]
        return f"{row['confidence'] - row['accuracy']:+.3f} (ECE {row['ece']:.3f})"

    shown = (
        DEFAULT,
        ("all", "full", "ggn", AFTER, "linearised"),
        ("all", "kron", "ggn", DURING, "linearised"),
    )
    accuracy, ece = (case.means.point(task, name)[0] for name in ("accuracy", "ece"))
    case.judge("classification-overconfident", task, surplus, f"accuracy {accuracy:.3f}")
    numbers = f"ECE of MAP {ece:.3f}; confidence - accuracy: {told(case, task, shown, of)}"
    case.judge("classification-calibrated", task, improved, numbers)


def judge_coverage(case: Case) -> None:
    """Whether the intervals of MAP cover too little, and those of the default of Laplace come nearer to 90 %."""
    task = REGRESSION

    def covered(found: Found) -> np.ndarray:
        return found.point(task, "coverage_90")

    def nearer(found: Found) -> np.ndarray | None:
        values = found.values(task, DEFAULT, "coverage_90")
        return None if values is None else np.abs(covered(found) - 0.9) - np.abs(values - 0.9)

    def of(choice: Sequence[str]) -> str:
        return f"{case.means.by_choice[task, *choice][0]['coverage_90']:.3f}"

    shown = (
        DEFAULT,
        ("all", "full", "ggn", WRITTEN, "linearised"),
        ("all", "full", "ggn", DURING, "linearised"),
    )
    numbers = f"MAP {covered(case.means)[0]:.3f}; {told(case, task, shown, of)}"
    case.judge("regression-coverage-low", task, covered, numbers)
    case.judge("regression-coverage-nearer", task, nearer, numbers)


def distance(row: Mapping[str, Any]) -> float:
    """From NUTS: the gap of the mean in its standard deviations and the log of the ratio of the two, as one length."""
    return math.hypot(row["gap_mean"], math.log(row["gap_sd_ratio"]))


def judge_reference(referee: Referee, task: str, table: Sequence[Mapping[str, Any]]) -> None:
    """How much nearer to NUTS another choice is, in mean and spread together, in units of the noise of NUTS.

    The mean alone is no distance: all choices that linearise at one mode have the same.
    """
    key = f"{task}-nuts"
    own = [row for row in table if row["task"] == task]
    (nuts,) = (row for row in own if row["weights"] == "NUTS")
    if nuts.get("log_score") is None:
        referee.not_run(key, nuts.get("reason", "no reference"))
        return
    if nuts.get("gap_mean") is None:
        referee.undecided(key, nuts.get("reason", "no reference"))
        return

    def name(row: Mapping[str, Any]) -> str:
        return " ".join(row[axis] for axis in ("weights", "structure", "curvature", "predictive"))

    def gap(row: Mapping[str, Any]) -> str:
        return f"{distance(row):.3f} (mean {row['gap_mean']:.3f}, sd ratio {row['gap_sd_ratio']:.2f})"

    order = sorted(
        (row for row in own if row.get("hyper") == WRITTEN and row.get("gap_sd_ratio")), key=distance
    )
    place = [name(row) for row in order].index("all full ggn linearised")
    here, first = order[place], order[0]
    known = nuts.get("rhat") is not None
    referee.measured(
        key,
        exact((distance(here) - distance(first)) / distance(nuts)),
        "distance: the length of (gap of the mean in standard deviations of NUTS, log ratio of standard deviations); "
        f"linearised GGN {gap(here)}, rank {place + 1} of {len(order)}; the nearest, {name(first)}, {gap(first)}; "
        f"between chains of NUTS {distance(nuts):.3f}; log score of NUTS {nuts['log_score']:.3f}",
        converged=known and converged(nuts["rhat"], nuts["ess_bulk"]),
        why_not=f"NUTS has R-hat {nuts['rhat']:.3f}, bulk ESS {nuts['ess_bulk']:.0f}"
        if known
        else "R-hat and effective sample size of NUTS were not stored",
    )


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    sizes, tables = study.sizes, study.tables
    # Claims are declared of the usual table.
    claims = {
        key: replace(each, text=each.text.replace("diabetes", sizes.regression))
        for key, each in read_claims("laplace_design_choices").items()
    }
    referee = Referee(claims, smaller(sizes))
    case = Case.of(referee, study)
    for task in TASKS:
        judge_contrast(case, "linearised", task, "predictive", "linearised", "sampled", curvature=("ggn",))
        judge_default(case, task)
        alike = {"predictive": ("linearised",), "curvature": ("ggn", "empirical")}
        judge_contrast(case, "during", task, "hyper", DURING, AFTER, **alike)
        judge_structures(case, task)
        judge_reference(referee, task, case.table)
    judge_confidence(case)
    judge_coverage(case)
    judge_learnt_noise(referee, tables.get("learnt_noise", ()))
    judge_moons(referee, tables.get("moons", ()))
    judge_lost_term(referee, tables.get("lost_term", ()))
    return referee.verdicts()


# --- the lost term --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LostTerm:
    """log Z over gamma at one mode, with the term -D log gamma and without, and where each is largest."""

    gamma: np.ndarray
    right: np.ndarray
    printed: np.ndarray
    best_right: float
    best_printed: float
    library: float
    negative: int
    weights: int

    def row(self) -> dict[str, float]:
        """All but the curves; largest: the largest gamma that was allowed."""
        names = ("best_right", "best_printed", "library", "negative", "weights")
        return {name: getattr(self, name) for name in names} | {"largest": float(self.gamma[-1])}


def lost_term(sizes: Sizes) -> LostTerm:
    """The first classification split, all weights, GGN: the formulas above in NumPy, and the library's own optimum.

    Without the term d log Z / d log gamma = |w*|^2 / gamma^2 + sum_i gamma^-2 / (lambda_i + gamma^-2) > 0 for every
    gamma, lambda_i >= 0 being the eigenvalues of H: the "best" gamma is the largest that is allowed.
    """
    from scipy.optimize import minimize_scalar

    split = load_split(CLASSIFICATION, 0, sizes)
    written = gamma_of(len(split.train[1]))
    start = bnn.fit(split.model, *split.train, bnn.MAP(steps=sizes.steps, ppl=sizes.ppl), standardise=True)
    fits = {
        tune: refit(start, bnn.Laplace(start=start, optimise=False, tune=tune, ppl=sizes.ppl))
        for tune in ("none", "global")
    }
    approximation = fits["none"].approximation
    size, square = len(approximation.flat_mode), float(np.sum(approximation.flat_mode**2))
    data_part = approximation.covariance.precision() - np.eye(size) / written**2
    eigenvalues = np.maximum(np.linalg.eigvalsh(data_part), 0.0)

    def printed(log_gamma: float) -> float:
        precision = math.exp(-2.0 * log_gamma)
        return -0.5 * precision * square - 0.5 * float(np.sum(np.log(eigenvalues + precision)))

    def right(log_gamma: float) -> float:
        return printed(log_gamma) - size * log_gamma

    # What gamma does not change; with it the right curve is the library's at the prior as written.
    constant = fits["none"].log_evidence - right(math.log(written))
    bounds = math.log(1e-2), math.log(1e4)
    grid = np.linspace(*bounds, sizes.grid)

    def highest(of: Callable[[float], float]) -> float:
        found: Any = minimize_scalar(lambda at: -of(at), bounds=bounds, method="bounded")
        return math.exp(found.x)

    # Both signs as in print: Sigma = -(H - gamma^-2 I)^-1.
    negative = int(np.sum(eigenvalues > written**-2))
    return LostTerm(
        np.exp(grid),
        constant + np.array([right(at) for at in grid]),
        constant + np.array([printed(at) for at in grid]),
        highest(right),
        highest(printed),
        written / math.sqrt(fits["global"].info.figures["prior_factor/all"]),
        negative,
        size,
    )


def judge_lost_term(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """The derivative of the printed formula has one sign (see `lost_term`); numbers, if any, must show it."""
    proof = "as printed, without -D log gamma, it rises with every gamma, so that it tunes nothing"
    signs = (
        "as printed, Sigma = -(H - gamma^-2 I)^-1 has a negative variance wherever the data determine a direction "
        "better than the prior does"
    )
    wrong = True
    for row in rows:
        agrees = abs(math.log(row["best_right"] / row["library"])) < 1e-2
        wrong = agrees and row["best_printed"] > 0.99 * row["largest"]
        proof += (
            f"; with the term the best gamma is {row['best_right']:.4g} (the library: {row['library']:.4g}), as "
            f"printed {row['best_printed']:.4g}, where {row['largest']:.4g} is the largest allowed"
        )
        signs += f": {row['negative']} of {row['weights']} here"
    referee.proved("lost-term", wrong, proof)
    referee.proved("signs", True, signs)


# --- learnt noise ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learnt:
    """Regression with learnt noise, one split: by choice, noise in standard units and scores, with MAP first."""

    rows: dict[str, dict[str, float]]


def run_learnt_noise(sizes: Sizes) -> Learnt:
    """Evidence after and during training, over all weights and over the last layer, of prior and noise together."""
    split = load_split(REGRESSION, 0, sizes)
    model = partial(regression, width=sizes.width, noise=None)
    start = bnn.fit(model, *split.train, bnn.MAP(steps=sizes.steps, ppl=sizes.ppl), standardise=True)
    rows = {"MAP": {"noise": float(np.ravel(start.draws["noise"])[0])} | _test_scores(start, split)}
    for weights, during in product(("all", "last_layer"), (False, True)):
        chosen = bnn.Laplace(
            weights=weights,
            structure="kron",
            tune="global",
            noise="evidence",
            during_training=during,
            start=start,
            optimise=during,
            steps=1 if during else sizes.steps,
            ppl=sizes.ppl,
        )
        fitted = refit(start, chosen)
        name = f"{weights}, {DURING if during else AFTER}"
        rows[name] = {"noise": fitted.info.figures["noise"]} | _test_scores(fitted, split)
    return Learnt(rows)


def _test_scores(fitted: Any, split: Split) -> dict[str, float]:
    return scores_of(fitted.predict(split.test[0]), split.test[1])


def judge_learnt_noise(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """The last layer and the noise tuned during training, against tuned after it."""
    if not rows:
        referee.undecided("learnt-noise", "the scores of these fits were not stored")
        return
    scored = {row["choice"]: row["log_score"] for row in rows}
    referee.measured(
        "learnt-noise",
        exact(scored[f"last_layer, {DURING}"] - scored[f"last_layer, {AFTER}"]),
        "; ".join(
            f"{row['choice']}: noise {row['noise']:.3g}, log score {row['log_score']:.4g}, RMSE {row['rmse']:.3g}"
            for row in rows
        )
        + " (the evidence of the last layer alone charges nothing for the other weights)",
    )


# --- two moons ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moons:
    """Probability of class 1 on a grid by choice, and the mean confidence at the grid's edge."""

    axis: np.ndarray
    x: np.ndarray
    y: np.ndarray
    maps: dict[str, np.ndarray]
    edge: dict[str, float]


def run_moons(sizes: Sizes) -> Moons:
    x, y = moons(20 if sizes.train else 80, 0)
    axis = np.linspace(-6.0, 6.0, sizes.grid)
    grid = np.stack(np.meshgrid(axis + 0.5, axis + 0.25), axis=-1).reshape(-1, 2)
    model = partial(classification, width=sizes.width, classes=2, gamma=gamma_of(len(y)))

    def fit(chosen: Any) -> Any:
        return bnn.fit(model, x, y, chosen, standardise=True)

    start = fit(bnn.MAP(steps=sizes.steps, ppl=sizes.ppl))
    shown = {"MAP": start.predict(grid)}
    for name, weights, structure, hyper, kind in (
        ("all, full, as written: sampled", "all", "full", WRITTEN, "sampled"),
        ("all, full, as written: linearised", "all", "full", WRITTEN, "linearised"),
        ("last layer, Kronecker, after: linearised", "last_layer", "kron", AFTER, "linearised"),
        ("all, Kronecker, during: linearised", "all", "kron", DURING, "linearised"),
    ):
        fitted = refit(start, method(weights, structure, "ggn", hyper, start, 1, sizes))
        shown[name] = fitted.predict(grid, kind=kind, draws=sizes.draws if kind == "sampled" else None)
    if sizes.nuts is not None:
        chains, warmup, draws = sizes.nuts
        nuts = fit(bnn.NUTS(chains=chains, warmup=warmup, draws=draws, max_tree_depth=8))
        shown[f"NUTS ({bnn.diagnose(nuts).verdict})"] = nuts.predict(grid)
    outside = np.abs(grid - np.array([0.5, 0.25])).max(axis=1) > 5.0
    return Moons(
        axis,
        x,
        y,
        {name: each.probabilities[:, 1].reshape(len(axis), -1) for name, each in shown.items()},
        {name: float(each.probabilities[outside].max(axis=1).mean()) for name, each in shown.items()},
    )


def judge_moons(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """MAP against the surest of the linearised Laplace approximations."""
    if not rows:
        referee.undecided("moons", "the confidence of these fits was not stored")
        return
    edge = {row["choice"]: row["confidence"] for row in rows}
    laplace = max(value for name, value in edge.items() if "linearised" in name)
    listing = "; ".join(f"{name} {value:.3f}" for name, value in edge.items())
    referee.measured("moons", exact(edge["MAP"] - laplace), f"mean confidence there: {listing}")


# --- figures --------------------------------------------------------------------------------------------


# What is changed about the default, one choice at a time, and what the values are called.
WORDS = {
    "weights": {"all": "all weights", "last_layer": "last layer", "largest_variance": "sub-network"},
    "structure": {"full": "full", "kron": "Kronecker", "diag": "diagonal", "lowrank": "low rank"},
    "curvature": {"ggn": "Gauss-Newton", "empirical": "empirical Fisher", "hessian": "Hessian"},
    "hyper": {
        WRITTEN: "as written",
        AFTER: "evidence, after training",
        DURING: "evidence, during training",
        VALIDATION: "validation",
    },
    "predictive": {
        "linearised": "linearised",
        "sampled": "sampled",
        "probit": "probit",
        "probit_covariance": "probit, covariances",
        "bridge": "Laplace bridge",
        "bridge_norm": "normalised bridge",
    },
}
TITLES = {"hyper": "prior scale", "predictive": "prediction"}
# Beyond so many nats per row a mark is an arrow at the edge, with its value.
SHOWN = 0.45


def gain_over_map(
    rows: Mapping[tuple[str, ...], Mapping[str, Any]], choice: Sequence[str], splits: int
) -> Estimate | None:
    """The test log score of a choice less that of MAP, from the row of the table; None if it failed in some split."""
    row = rows.get(tuple(choice))
    if row is None or row["splits"] < splits or row.get("vs_map") is None:
        return None
    return from_summary(
        row["vs_map"], row.get("vs_map_se"), splits, row.get("test_rows") or 1, row.get("train_rows") or 1
    )


def draw_gain(panel: Any, place: float, found: Estimate | None, colour: str, why_not: str = "") -> None:
    """One estimate with its interval, an arrow with its value where that is beyond the axis, or why it has no value."""
    low, high = panel.get_xlim()
    if found is None:
        panel.text(0.97 * high, place, why_not, ha="right", va="center", fontsize=8, color=GREY)
        return
    if not low < found.value < high:
        at, side, shift = (low, "<", 8) if found.value < low else (high, ">", -8)
        panel.plot(at, place, side, color=colour, markersize=7, clip_on=False)
        where = {"ha": "left" if shift > 0 else "right", "va": "center", "fontsize": 8, "color": colour}
        panel.annotate(f"{found.value:.2g}", (at, place), (shift, 0), textcoords="offset points", **where)
        return
    if math.isfinite(found.low):
        panel.plot([max(found.low, low), min(found.high, high)], [place, place], color=colour, linewidth=1.4)
    panel.plot(found.value, place, "o", color=colour, markersize=6)


def why_none(rows: Mapping[tuple[str, ...], Mapping[str, Any]], choice: Sequence[str], splits: int) -> str:
    """Why there is no gain of a choice."""
    row = rows.get(tuple(choice))
    if row is None:
        return "not run"
    if row["splits"] == 0:
        return "refused by the library"
    return f"failed in {splits - row['splits']} of {splits} splits"


def gains_panel(panel: Any) -> None:
    """The axis of gains over MAP, and the line of MAP."""
    panel.set_xlim(-SHOWN, SHOWN)
    panel.axvline(0.0, color=GREY, linewidth=1.0, zorder=0)
    panel.tick_params(axis="y", length=0)
    panel.set_xlabel("test log score less that of MAP,\nnats per row (better to the right)", fontsize=9)


def by_choice(table: Sequence[Mapping[str, Any]], task: str) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """The rows of one task by choice."""
    own = [row for row in table if row["task"] == task and row.get("structure")]
    return {tuple(str(row[axis]) for axis in AXES): row for row in own}


def draw_choices(path: Path, table: Sequence[Mapping[str, Any]], task: str, name: str, splits: int) -> None:
    """The default with one choice changed at a time, and the same with all weights in place of the last layer."""
    rows = by_choice(table, task)
    lines: list[tuple[str, str, str]] = []
    for axis in AXES[1:]:
        for value, words in WORDS[axis].items():
            if axis != "predictive" or task == CLASSIFICATION or value in ("linearised", "sampled"):
                lines.append((axis, value, words))
    figure = new_figure(9.2, 1.9 + 0.31 * len(lines))
    axes = figure.subplots(1, 2, sharey=True)
    for panel, weights in zip(axes, ("last_layer", "all"), strict=True):
        base = (weights, *DEFAULT[1:])
        gains_panel(panel)
        for place, (axis, value, _) in enumerate(lines):
            where = AXES.index(axis)
            choice = (*base[:where], value, *base[where + 1 :])
            colour = BLACK if choice == base else BLUE
            found = gain_over_map(rows, choice, splits)
            draw_gain(panel, place, found, colour, why_none(rows, choice, splits))
        default = " (the default)" if weights == DEFAULT[0] else ""
        panel.set_title(f"{WORDS['weights'][weights]}{default}", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        for edge in range(1, len(lines)):
            if lines[edge][0] != lines[edge - 1][0]:
                panel.axhline(edge - 0.5, color="0.8", linewidth=0.8)
    labels = [
        f"{TITLES.get(axis, axis)}: {words}" if place == 0 or lines[place - 1][0] != axis else words
        for place, (axis, _, words) in enumerate(lines)
    ]
    axes[0].set_yticks(range(len(lines)), labels)
    axes[0].set_ylim(len(lines) - 0.5, -0.5)
    figure.suptitle(
        f"{name}: Laplace with one choice changed at a time (black: nothing changed)\n"
        f"means over {splits} splits, bars: 95 %, with the correction for overlapping splits",
        fontsize=11,
    )
    figure.savefig(path)


def draw_predictives(path: Path, table: Sequence[Mapping[str, Any]], name: str, splits: int) -> None:
    """The six predictions of classes by the Kronecker GGN, with its prior as written and tuned by the evidence."""
    rows = by_choice(table, CLASSIFICATION)
    figure = new_figure(9.2, 4.6)
    axes = figure.subplots(1, 2, sharey=True)
    hypers = {WRITTEN: BLACK, AFTER: BLUE}
    exact_zero = False
    for panel, weights in zip(axes, ("last_layer", "all"), strict=True):
        gains_panel(panel)
        for place, kind in enumerate(WORDS["predictive"]):
            for index, (hyper, colour) in enumerate(hypers.items()):
                choice = (weights, "kron", "ggn", hyper, kind)
                found = gain_over_map(rows, choice, splits)
                if kind == "bridge" and found is not None and abs(found.value) < ROUNDING:
                    exact_zero = True
                at = place + 0.24 * (index - 0.5)
                draw_gain(panel, at, found, colour, why_none(rows, choice, splits))
        panel.set_title(f"{WORDS['weights'][weights]}, Kronecker Gauss-Newton", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        for edge in range(1, len(WORDS["predictive"])):
            panel.axhline(edge - 0.5, color="0.9", linewidth=0.8, zorder=0)
    place = list(WORDS["predictive"]).index("bridge")
    if exact_zero:
        axes[0].annotate(
            "exactly 0: of two classes with\nequal variances the bridge\ngives MAP's probabilities",
            (0.0, place),
            (-0.97 * SHOWN, place),
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": GREY, "shrinkB": 5},
        )
    axes[0].set_yticks(range(len(WORDS["predictive"])), list(WORDS["predictive"].values()))
    axes[0].set_ylim(len(WORDS["predictive"]) - 0.5, -0.5)
    handles = [
        axes[0].plot([], [], "o-", color=colour, markersize=6, label=f"prior scale: {WORDS['hyper'][hyper]}")[
            0
        ]
        for hyper, colour in hypers.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(
        f"{name}: six predictions of the same Gaussians\n"
        f"means over {splits} splits, bars: 95 %, with the correction for overlapping splits",
        fontsize=11,
    )
    figure.savefig(path)


def draw(study: Study) -> None:
    """The figures of the choices, from the table; of the others no curve is stored."""
    table, splits = study.tables["choices"], study.sizes.splits
    names = {REGRESSION: study.sizes.regression, CLASSIFICATION: TABLE}
    for task, name in names.items():
        draw_choices(study.out / f"{task}.png", table, task, name.replace("_", " "), splits)
    draw_predictives(study.out / "predictives.png", table, TABLE.replace("_", " "), splits)


def draw_lost_term(path: Path, lost: LostTerm) -> None:
    figure = new_figure(9.0, 4.2)
    axes = figure.subplots()
    axes.plot(lost.gamma, lost.right, color=BLUE, label=r"with $-D\,\log\gamma$")
    axes.plot(lost.gamma, lost.printed, "--", color=VERMILION, label="without it, as printed")
    axes.axvline(lost.library, color="0.4", linestyle=":", label="the library's optimum")
    axes.set(xscale="log", xlabel=r"prior standard deviation $\gamma$", ylabel="log evidence, nats")
    # The printed curve climbs above the best of the right one by so much; as much is shown below it.
    top, best = float(lost.printed.max()), float(lost.right.max())
    axes.set_ylim(best - (top - best), top + 0.05 * (top - best))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("Without the lost term the evidence only rises", fontsize=12)
    figure.savefig(path)


def draw_moons(path: Path, found: Moons) -> None:
    figure = new_figure(12.0, 7.6)
    panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    shown = None
    extent = (found.axis[0] + 0.5, found.axis[-1] + 0.5, found.axis[0] + 0.25, found.axis[-1] + 0.25)
    for axes, (name, probability) in zip(panels, found.maps.items(), strict=False):
        shown = axes.imshow(
            np.maximum(probability, 1.0 - probability),
            origin="lower",
            extent=extent,
            cmap="cividis",
            vmin=0.5,
            vmax=1.0,
            interpolation="bilinear",
        )
        axes.contour(
            found.axis + 0.5, found.axis + 0.25, probability, levels=[0.5], colors="white", linewidths=1.2
        )
        for label, marker, colour in ((0, "o", "#E69F00"), (1, "^", "#56B4E9")):
            part = found.x[found.y == label]
            axes.plot(
                part[:, 0],
                part[:, 1],
                marker,
                color=colour,
                markersize=4,
                markeredgecolor="black",
                markeredgewidth=0.4,
            )
        axes.set_title(f"{name}\nconfidence at the edge {found.edge[name]:.2f}", fontsize=10)
    for axes in panels[len(found.maps) :]:
        axes.set_axis_off()
    figure.colorbar(shown, ax=list(panels), label="probability of the more probable class", shrink=0.7)
    figure.suptitle("Two moons: confidence away from the data (white: the boundary)", fontsize=12)
    figure.savefig(path)


# --- the run --------------------------------------------------------------------------------------------


def run_all(
    sizes: Sizes, workers: int, checkpoint: str | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The rows of all tasks and splits, over so many processes."""
    jobs = [(task, index) for index in range(sizes.splits) for task in TASKS]
    rows: list[dict[str, Any]] = []
    if workers == 1:
        for task, index in jobs:
            rows += run_split(task, index, sizes, checkpoint)
            say(f"{task}, split {index + 1} of {sizes.splits}")
        return rows
    # Spawned, because forked processes inherit the locks of JAX's threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {
            pool.submit(run_split, task, index, sizes, checkpoint): (task, index) for task, index in jobs
        }
        for done, each in enumerate(as_completed(running), 1):
            rows += each.result()
            task, index = running[each]
            say(f"{task}, split {index + 1} of {sizes.splits}: {done} of {len(jobs)} done")
    return sorted(rows, key=lambda row: (TASKS.index(row["task"]), row["split"]))


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """The best ten of each task, the default, MAP and NUTS, and how many choices were refused and why."""
    for task in TASKS:
        own = [row for row in rows if row["task"] == task]
        laplace = [row for row in own if row["structure"] and row.get("vs_map") is not None]
        best = sorted(laplace, key=lambda row: (-row["splits"], -row["log_score"]))[:10]
        default = [row for row in laplace if tuple(row[axis] for axis in AXES) == DEFAULT and row not in best]
        names = SCORES[task]
        print(f"\n{task:<62}{'splits':>7}{'vs MAP':>9}{'se':>8}" + "".join(f"{name:>12}" for name in names))
        for row in [*(row for row in own if not row["structure"]), *best, *default]:
            label = ", ".join(str(row[axis]) for axis in AXES if row[axis])
            numbers = "".join(f"{row[name]:12.4f}" for name in names if row["splits"])
            pair = "".join(
                f"{row[name]:{width}.3f}" if row.get(name) is not None else " " * width
                for name, width in (("vs_map", 9), ("vs_map_se", 8))
            )
            print(f"{label:<62}{row['splits']:>7}{pair}{numbers}")
        refused: dict[str, int] = {}
        for row in own:
            if row["structure"] and row["splits"] == 0:
                kind = re.split("; (?:came|got) ", row["reason"])[0]
                refused[kind] = refused.get(kind, 0) + 1
        for reason, count in sorted(refused.items(), key=lambda pair: -pair[1]):
            print(f"  {count:4d} without a number: {reason}")


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    seeds: int | None = None,
    workers: int = 1,
    regression_table: str = "diabetes",
    checkpoint: str | Path | None = None,
) -> dict[str, Any]:
    """Run the study, write table, verdicts and figures to `out`, and return them.

    tiny: a few rows and one hidden unit, in a temporary folder unless `out` is given. seeds: how many splits.
    checkpoint: a folder where finished choices are kept, so that an interrupted run goes on.
    """
    study = Study.begin(
        replace(TINY if tiny else FULL, regression=regression_table),
        "laplace_design_choices",
        tiny,
        out,
        splits=seeds,
    )
    sizes, folder, say = study.sizes, study.out, study.say
    place = None if checkpoint is None else str(checkpoint)
    lost = lost_term(sizes)
    say("the lost term")
    learnt = run_learnt_noise(sizes)
    say("learnt noise")
    pictured = run_moons(sizes)
    say("two moons")
    found = Found(run_all(sizes, workers, place, say))
    table = found.table()
    study.tables |= {
        "choices": [{name: row.get(name) for name in COLUMNS} for row in table],
        "splits": [
            {name: row.get(name) for name in BY_SPLIT}
            for row in found.rows
            if row.get("log_score") is not None
        ],
        "lost_term": [lost.row()],
        "learnt_noise": [{"choice": name} | row for name, row in learnt.rows.items()],
        "moons": [{"choice": name, "confidence": value} for name, value in pictured.edge.items()],
    }
    draw(study)
    draw_lost_term(folder / "lost_term.png", lost)
    draw_moons(folder / "moons.png", pictured)
    print_table(table)
    study.conclude(judge)
    say(f"written to {folder}")
    return {"table": table, "verdicts": study.verdicts, "folder": folder, "lost_term": lost, "found": found}


if __name__ == "__main__":
    parser = command_line(
        __doc__, "seeds", "checkpoint", "figures", tiny="a few rows and one hidden unit: seconds"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that share the splits")
    parser.add_argument(
        "--regression",
        default="diabetes",
        dest="regression_table",
        help="the regression table, such as yacht or energy",
    )
    run(parser, main, "laplace_design_choices", FULL, draw)
