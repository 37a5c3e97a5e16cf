"""One task after another: yesterday's posterior as today's prior, so that a network does not forget.

Source: E. Daxberger, A. Kristiadi, A. Immer, R. Eschenhagen, M. Bauer and P. Hennig, "Laplace Redux - Effortless
Bayesian Deep Learning", NeurIPS 2021, its fourth experiment, as a review of it in Chinese retells it (networks forget,
and Laplace approximations are an easy baseline of continual learning), after H. Ritter, A. Botev and D. Barber (2018),
"Online structured Laplace approximations for overcoming catastrophic forgetting". By Bayes' rule

    p(w | D_1, ..., D_t) is proportional to p(D_t | w) p(w | D_1, ..., D_t-1),    p(w | D_1, ..., D_t-1) ~ N(w*, A^-1),

so that task t is a fit to D_t alone of the same program with another prior (`bnn.with_prior`), whose curvature is
then A + (curvature of D_t): nothing of the earlier data is kept. With exact posteriors it would be joint training. The
Gaussian is diagonal (elastic weight consolidation has such a penalty), or Kronecker-factored within each layer; a sum
of Kronecker products is none, and the nearest precision with Kronecker eigenvectors takes its place. Mean-field VI in
place of Laplace is variational continual learning (Nguyen, Li, Bui and Turner 2018), without its coresets.

Tasks: MNIST, 14 x 14 pixels (means over 2 x 2), the same images with their pixels in another order for each task; one
head of ten outputs, which is never told the task. A hidden layer of ReLU, N(0, gamma^2) with the gamma that a
weight decay of 5e-4 on the mean loss of a task is, gamma^-2 = 5e-4 N. Adam on mini-batches, iterates averaged.
Beside them: fine-tuning (each task from the weights of the last, with the first prior) and joint training (all tasks so
far, from scratch). There is no reference by MCMC: joint training is what a sequence of exact posteriors comes to.

    python comparisons/continual_learning.py [--tiny] [--out DIR] [--checkpoint DIR] [--seeds N]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, mean_over_splits, read_claims
from study import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    VERMILION,
    Study,
    command_line,
    kept,
    load_images,
    paired,
    panels,
)

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors, scores

WEIGHT_DECAY = 5e-4
FINE_TUNING, JOINT = "fine-tuning", "joint training"
KRON, DIAGONAL, VI = "Laplace, Kronecker", "Laplace, diagonal", "VI, mean field"
METHODS = (FINE_TUNING, DIAGONAL, KRON, VI, JOINT)
STRUCTURES = {KRON: "kron", DIAGONAL: "diag"}
BASELINES = STRUCTURES | {VI: "vi"}
COLOURS = {FINE_TUNING: BLACK, DIAGONAL: ORANGE, KRON: BLUE, VI: VERMILION, JOINT: GREEN}
MARKERS = {FINE_TUNING: "o", DIAGONAL: "D", KRON: "s", VI: "^", JOINT: "v"}
SCORES = ("accuracy", "log_score", "ece")


@dataclass(frozen=True)
class Sizes:
    """How much is computed. rows, test: images of each task; pool: pixels that are averaged, along each axis."""

    table: str = "mnist"
    seeds: int = 3
    tasks: int = 5
    rows: int = 2000
    test: int = 1000
    pool: int = 2
    width: int = 100
    epochs: int = 20
    batch: int = 100
    rate: float = 3e-3
    vi_scale: float = 0.05
    vi_epochs: int = 40
    draws: int = 50
    ppl: str = "pyro"


FULL = Sizes()
TINY = Sizes(
    table="digits",
    seeds=1,
    tasks=2,
    rows=60,
    test=40,
    pool=1,
    width=5,
    epochs=20,
    batch=20,
    rate=0.02,
    vi_epochs=5,
    draws=5,
)


def smaller(sizes: Sizes) -> str:
    """What every verdict has to say."""
    side = 28 // sizes.pool if sizes.table == "mnist" else 8
    return (
        f"smaller than the source: {sizes.tasks} tasks, {sizes.rows} of 60000 rows each, {side} x {side} pixels, one "
        f"hidden layer of {sizes.width}, {sizes.seeds} seeds"
    )


def model(x: Any, y: Any = None, *, width: int, gamma: float) -> None:
    """Ten logits of a hidden layer of ReLU; images (N, H, W) pixel by pixel; weights and biases N(0, gamma^2)."""
    pixels = x.reshape((x.shape[0], -1))
    f = bnn.mlp(pixels, [width, 10], "relu", priors.Normal(0.0, gamma))
    bnn.observe(y, f, likelihoods.Categorical())


# --- tasks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Images (N, H, W) and labels (N,), for training and for testing."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def pooled(images: np.ndarray, size: int) -> np.ndarray:
    """Means over windows of size x size pixels, which the sides of the images are multiples of."""
    rows, height, width = images.shape
    return images.reshape(rows, height // size, size, width // size, size).mean(axis=(2, 4))


def permuted(images: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The pixels of each image (N, H, W) in another order, the same for all."""
    return images.reshape(len(images), -1)[:, order].reshape(images.shape)


def tasks_of(sizes: Sizes, seed: int) -> list[Task]:
    """The same images for each task; those of the first as they are, those of each other in an order of its own."""
    images = load_images(sizes.table, sizes.rows, sizes.test, 1, seed)
    train, test = (pooled(part, sizes.pool) for part in (images.train, images.test))
    rng = np.random.default_rng([seed, 1])
    pixels = train.shape[1] * train.shape[2]
    orders = [np.arange(pixels), *(rng.permutation(pixels) for _ in range(sizes.tasks - 1))]
    return [
        Task(permuted(train, order), images.labels, permuted(test, order), images.test_labels)
        for order in orders
    ]


# --- learning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learner:
    """One way of going from task to task, for the rows of one seed."""

    method: str
    sizes: Sizes
    seed: int

    @property
    def model(self) -> Callable[..., None]:
        return partial(model, width=self.sizes.width, gamma=(WEIGHT_DECAY * self.sizes.rows) ** -0.5)

    def learnt(self, tasks: Sequence[Task]) -> Iterator[Callable[[np.ndarray], Any]]:
        """After each task, in their order, what the learner predicts: images -> Prediction."""
        belief: Any = None
        weights: dict[str, np.ndarray] | None = None
        for number, task in enumerate(tasks):
            # What is known of the earlier tasks is the prior of this one; fine-tuning knows where it stands, no more.
            program = self.model if belief is None else bnn.with_prior(self.model, belief)
            if self.method == JOINT:
                seen = tasks[: number + 1]
                x, y = (
                    np.concatenate(parts) for parts in zip(*((each.x, each.y) for each in seen), strict=True)
                )
                yield self._fit(program, x, y, self.descent(len(x))).predict
                continue
            if self.method == VI and belief is not None:
                belief = self._fit(program, task.x, task.y, self.variational(belief, "start"))
            else:
                found = self._fit(program, task.x, task.y, self.descent(len(task.x), weights))
                weights = {name: np.asarray(value[0, 0], float) for name, value in found.draws.items()}
                if self.method == FINE_TUNING:
                    yield found.predict
                    continue
                after = self.laplace(weights) if self.method in STRUCTURES else self.variational(found, None)
                belief = self._fit(program, task.x, task.y, after)
            yield partial(belief.predict, draws=self.sizes.draws) if self.method == VI else belief.predict

    def _fit(self, program: Callable[..., None], x: np.ndarray, y: np.ndarray, method: Any) -> Any:
        return bnn.fit(program, x, y, method, seed=self.seed)

    def descent(self, rows: int, start: Mapping[str, np.ndarray] | None = None) -> Any:
        """The mode by mini-batches, or near it: the mean of the iterates of the second half."""
        sizes = self.sizes
        return bnn.SVI(
            guide="delta",
            steps=sizes.epochs * math.ceil(rows / sizes.batch),
            batch_size=sizes.batch,
            learning_rate=sizes.rate,
            start=start,
            elbo_draws=2,
            ppl=sizes.ppl,
        )

    def laplace(self, weights: Mapping[str, np.ndarray]) -> Any:
        """The prior as it is, for it is yesterday's posterior: nothing is tuned."""
        structure = STRUCTURES[self.method]
        return bnn.Laplace(
            structure=structure,
            prior_approximation="kron" if structure == "kron" else None,
            start=weights,
            optimise=False,
            ppl=self.sizes.ppl,
        )

    def variational(self, start: Any, scale: str | None) -> Any:
        """From the mode of the first task on, and from yesterday's posterior on, its spread included."""
        sizes = self.sizes
        return bnn.SVI(
            guide="normal",
            estimator="local",
            divergence="analytic",
            start=start,
            init_scale=sizes.vi_scale if scale is None else scale,
            steps=sizes.vi_epochs * math.ceil(sizes.rows / sizes.batch),
            batch_size=sizes.batch,
            learning_rate=sizes.rate,
            elbo_draws=20,
            ppl=sizes.ppl,
        )


def run_learner(learner: Learner) -> dict[str, Any]:
    """Scores on each task that was seen, after each task; tasks are counted from 1."""
    tasks = tasks_of(learner.sizes, learner.seed)
    rows = []
    # Of this process, which alone computes: others may have the machine, too.
    begun = time.process_time()
    for after, predict in enumerate(learner.learnt(tasks), 1):
        for number, task in enumerate(tasks[:after], 1):
            found = scores.scores_of(predict(task.test_x), task.test_y)
            rows.append({"after": after, "task": number} | {score: found[score] for score in SCORES})
    return {"rows": rows, "processor_seconds": time.process_time() - begun}


# --- what was found ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Rows of scores: method, seed, after (how many tasks), task, and the scores on that task."""

    rows: Sequence[Mapping[str, Any]]

    @property
    def tasks(self) -> int:
        return max(row["after"] for row in self.rows)

    def methods(self) -> list[str]:
        return [name for name in METHODS if any(row["method"] == name for row in self.rows)]

    def values(self, method: str, after: int, task: int | None = None, score: str = "accuracy") -> np.ndarray:
        """One value for each seed, in their order: on one task, or (None) the mean over all tasks that were seen."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            if (row["method"], row["after"]) == (method, after) and task in (None, row["task"]):
                found.setdefault(row["seed"], []).append(row[score])
        return np.array([np.mean(found[seed]) for seed in sorted(found)])

    def forgotten(self, method: str) -> np.ndarray:
        """Mean over all tasks but the last of accuracy right after the task minus that at the end; by seed."""
        last = self.tasks
        lost = [
            self.values(method, number, number) - self.values(method, last, number)
            for number in range(1, last)
        ]
        return np.mean(lost, axis=0)

    def table(self, note: str) -> list[dict[str, Any]]:
        """A row for each method and number of tasks learnt: means over seeds with standard errors."""
        table = []
        for method in self.methods():
            for after in range(1, self.tasks + 1):
                row: dict[str, Any] = {"method": method, "after": after}
                for score in SCORES:
                    row[score], row[f"{score}_se"] = paired(self.values(method, after, score=score))
                row["first_task"], row["first_task_se"] = paired(self.values(method, after, 1))
                if after == self.tasks:
                    row["forgotten"], row["forgotten_se"] = paired(self.forgotten(method))
                row["seeds"] = len(self.values(method, after))
                table.append(row | {"note": note})
        return table


# --- verdicts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The scores of a run before the referee."""

    referee: Referee
    found: Found
    sizes: Sizes

    def judge(self, claim: str, values: np.ndarray, numbers: str = "") -> None:
        """One value for each seed."""
        estimate = mean_over_splits(values, self.sizes.test, self.sizes.rows)
        self.referee.measured(claim, estimate, numbers)


def judge_forgetting(case: Case) -> None:
    """Fine-tuning loses accuracy on earlier tasks."""
    found = case.found
    first, last = (found.values(FINE_TUNING, after, 1).mean() for after in (1, found.tasks))
    text = f"on the first task {first:.3f} after it, {last:.3f} after {found.tasks} tasks"
    case.judge("forgetting", found.forgotten(FINE_TUNING), text)


def judge_baseline(case: Case, method: str) -> None:
    """The mean accuracy over all tasks at the end is above that of fine-tuning."""
    found, claim = case.found, f"baseline-{BASELINES[method]}"
    if method not in found.methods():
        case.referee.not_run(claim, "not run at this size")
        return
    own, other = (found.values(each, found.tasks) for each in (method, FINE_TUNING))
    text = (
        f"{own.mean():.3f} over {found.tasks} tasks, fine-tuning {other.mean():.3f}; it forgets "
        f"{found.forgotten(method).mean():.3f}"
    )
    case.judge(claim, own - other, text)


def judge_joint(case: Case) -> None:
    """Half and more of the accuracy that fine-tuning lacks of joint training is made up."""
    found, last = case.found, case.found.tasks
    own, fine, joint = (found.values(method, last) for method in (KRON, FINE_TUNING, JOINT))
    logs = [found.values(method, last, score="log_score").mean() for method in (KRON, JOINT)]
    text = (
        f"accuracy {own.mean():.3f}, joint training {joint.mean():.3f}, fine-tuning {fine.mean():.3f}; log score "
        f"{logs[0]:.3f}, joint training {logs[1]:.3f} nats"
    )
    if (joint > fine).all():
        case.judge("joint", (own - fine) / (joint - fine), text)
    else:
        case.referee.undecided("joint", "joint training is no better than fine-tuning in some seed", text)


def judge_joint_calibration(case: Case) -> None:
    """The calibration error at the end beside that of joint training."""
    found = case.found
    errors = {method: found.values(method, found.tasks, score="ece") for method in found.methods()}
    text = ", ".join(f"{method} {error.mean():.3f}" for method, error in errors.items())
    case.judge("joint-calibration", errors[KRON] - errors[JOINT], text)


def judge_structure(case: Case) -> None:
    """Kronecker factors end above a diagonal."""
    found, last = case.found, case.found.tasks
    text = "; ".join(
        f"{method} forgets {found.forgotten(method).mean():.3f}, on the task learnt last "
        f"{found.values(method, last, last).mean():.3f}"
        for method in (KRON, DIAGONAL)
    )
    case.judge("structure", found.values(KRON, last) - found.values(DIAGONAL, last), text)


def judge_published(case: Case) -> None:
    """The published number is of larger tasks and of more of them."""
    own = case.found.values(VI, case.found.tasks).mean()
    text = f"VI, mean field, over {case.found.tasks} tasks of {case.sizes.rows} rows: {own:.3f}"
    case.referee.not_run("published", "tasks here are fewer and smaller", text)


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    referee = Referee(read_claims("continual_learning"), smaller(study.sizes))
    case = Case(referee, Found(study.tables["scores"]), study.sizes)
    for method in BASELINES:
        judge_baseline(case, method)
    for each in (judge_forgetting, judge_joint, judge_joint_calibration, judge_structure, judge_published):
        each(case)
    return referee.verdicts()


# --- the figure -------------------------------------------------------------------------------------


def draw(path: Path, found: Found) -> None:
    """Accuracy over all tasks so far, on the first task, and the log score, as tasks come."""
    figure, axes = panels(13.5, 4.6, 3)
    numbers = range(1, found.tasks + 1)
    for axis, task, score, label in (
        (axes[0][0], None, "accuracy", "accuracy, mean over the tasks so far"),
        (axes[0][1], 1, "accuracy", "accuracy on the first task"),
        (axes[0][2], None, "log_score", "log score, mean over the tasks so far, nats"),
    ):
        for method in found.methods():
            each = [paired(found.values(method, after, task, score)) for after in numbers]
            mean, error = zip(*each, strict=True)
            axis.errorbar(
                numbers,
                mean,
                np.where(np.isfinite(error), error, 0.0),
                color=COLOURS[method],
                marker=MARKERS[method],
                markersize=6,
                linewidth=1.6,
                label=method,
            )
        axis.set(xlabel="tasks learnt", ylabel=label)
        axis.set_xticks(numbers)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(
        "Digits with their pixels in another order for each task (bars: standard error over seeds)"
    )
    figure.savefig(path)


# --- the run ----------------------------------------------------------------------------------------


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    seeds: int | None = None,
) -> Study:
    """Run the study and write tables, the figure and verdicts; the arguments are those of the command line.

    What is kept in `checkpoint` is each method of each seed.
    """
    study = Study.begin(TINY if tiny else FULL, "continual_learning", tiny, out, seeds=seeds)
    sizes = study.sizes
    rows, seconds = [], []
    for seed in range(sizes.seeds):
        for method in METHODS:
            slug = method.lower().replace(",", "").replace(" ", "_").replace("-", "_")
            part = kept(
                checkpoint,
                f"{slug}-{seed}",
                sizes,
                lambda m=method, s=seed: run_learner(Learner(m, sizes, s)),
            )
            rows += [{"method": method, "seed": seed} | row for row in part["rows"]]
            seconds.append({"method": method, "seed": seed, "processor_seconds": part["processor_seconds"]})
            study.say(f"seed {seed}, {method}: {part['processor_seconds']:.0f} s")
    found, note = Found(rows), smaller(sizes)
    study.tables = {"summary": found.table(note), "scores": rows, "seconds": seconds}
    study.numbers = {"weight decay": WEIGHT_DECAY}
    draw(study.out / "tasks.png", found)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    main(
        **vars(
            command_line(__doc__, "checkpoint", "seeds", tiny="a few small images, in seconds").parse_args()
        )
    )
