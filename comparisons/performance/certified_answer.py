"""The certified answer, on tables that nobody tuned to: seconds and gradients until all functions have converged.

A run is solved when R-hat < 1.01 and ESS > 400 hold in function space: for f at up to 50 training and 50 test rows, for
the log likelihood of either part, and for the noise, by the library's own diagnosis for every arm alike. Every run has
a limit of ten minutes, compilation and diagnosis counted, in a process of its own.

The list is fixed: 24 problems over fifteen tables, half of them of classes, half with ten hidden units and half with
fifty, half tanh and half ReLU. Each is fitted with three seeds by NUTS(), MCLMC() and LAPS() at their defaults with
`until=`, by NUTS as written by hand in NumPyro, by BlackJAX's own tuned MCLMC, and by `bde`, where an interpreter has
it. A table that is not on this machine is left out by name.

The figure shows the share of the runs that each arm has solved against seconds and against gradients. The rule does not
see the bias of unadjusted MCLMC, so the column "gap" has the root mean square distance of the means of f at test rows
from those of NUTS with other seeds, in standard deviations, and "sd_ratio" the mean ratio of standard deviations.

    python comparisons/performance/certified_answer.py [--tiny] [--out DIR] [--checkpoint DIR] [--seeds N]
        [--only PROBLEM ...] [--arms ARM ...] [--limit SECONDS] [--bde PYTHON]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from certified_arms import (
    ARMS,
    BDE,
    BLACKJAX,
    BY_HAND,
    LAPS,
    MCLMC,
    NUTS,
    OURS,
    Sizes,
    Task,
    certified,
    in_a_process,
    missing,
)
from claims import Referee, Verdict, bootstrap, exact, read_claims
from problem import data
from study import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, Study, command_line, kept, panels, run

import ppl_bnn as bnn
from ppl_bnn.core.errors import BNNError

FULL = Sizes()
TINY = Sizes("rhat<1.5, ess>10", 600.0, 2, 40, 40, (8, 2, 60, 10), 30, 1)
STYLES = {
    NUTS: (BLUE, "-"),
    MCLMC: (GREEN, "-"),
    LAPS: (VERMILION, "-"),
    BY_HAND: (BLACK, "--"),
    BLACKJAX: (ORANGE, "--"),
    BDE: (GREY, ":"),
}


@dataclass(frozen=True)
class Problem:
    """A table, and a network of one hidden layer for it."""

    table: str
    width: int
    activation: str

    @property
    def name(self) -> str:
        return f"{self.table}-{self.width}-{self.activation}"


PROBLEMS = tuple(
    Problem(*each)
    for each in (
        ("diabetes", 10, "tanh"),
        ("diabetes", 50, "relu"),
        ("concrete", 10, "relu"),
        ("concrete", 50, "tanh"),
        ("energy", 10, "tanh"),
        ("yacht", 50, "relu"),
        ("airfoil", 50, "tanh"),
        ("power-plant", 10, "relu"),
        ("protein", 50, "relu"),
        ("waves", 10, "tanh"),
        ("waves", 50, "tanh"),
        ("gap", 10, "relu"),
        ("breast_cancer", 10, "tanh"),
        ("breast_cancer", 50, "relu"),
        ("iris", 10, "relu"),
        ("iris", 50, "tanh"),
        ("wine", 10, "tanh"),
        ("wine", 50, "relu"),
        ("digits", 10, "relu"),
        ("digits", 50, "tanh"),
        ("diabetes_levels", 10, "tanh"),
        ("diabetes_levels", 50, "relu"),
        ("rings", 10, "relu"),
        ("rings", 50, "tanh"),
    )
)
TINY_PROBLEMS = (Problem("gap", 2, "tanh"), Problem("rings", 2, "relu"))


def gap(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A sine over two intervals with nothing between; the test rows are random ones, too."""
    x = rng.uniform(0.5, 2.0, (120, 1)) * rng.choice([-1.0, 1.0], (120, 1))
    return x, np.sin(3.0 * x[:, 0]) + 0.1 * rng.normal(size=120)


def rings(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two classes on circles of radius 1 and 2, with noise of 0.3."""
    y = np.arange(300) % 2
    angle = rng.uniform(0.0, 2.0 * np.pi, 300)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return circle * (1.0 + y[:, None]) + 0.3 * rng.normal(size=(300, 2)), y


SIMULATED: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "waves": lambda: data(500),
    "gap": lambda: gap(np.random.default_rng(1)),
    "rings": lambda: rings(np.random.default_rng(2)),
}


def task_of(problem: Problem, rows: int) -> Task:
    """The task of a problem: the library's split with seed 0, at most `rows` training rows, a quarter as many others.

    Raises
    ------
    BNNError: the table is not here and cannot be downloaded.
    """
    if problem.table in SIMULATED:
        x, y = SIMULATED[problem.table]()
        order = np.random.default_rng(0).permutation(len(y))
        test, train = order[: len(y) // 5], order[len(y) // 5 :]
        classes = len(np.unique(y)) if y.dtype.kind == "i" else 0
    else:
        table = bnn.data.load(problem.table)
        x, y = table.x, table.y
        train, test = table.split(seed=0)
        classes = len(np.unique(y)) if table.task == "classification" else 0
    train, test = train[:rows], test[: max(rows // 4, 1)]
    center, spread = x[train].mean(0), x[train].std(0)
    x = (x - center) / np.where(spread > 0.0, spread, 1.0)
    y = y.astype(int) if classes else (y - y[train].mean()) / y[train].std()
    return Task(x[train], y[train], x[test], y[test], problem.width, problem.activation, classes)


# --- what is made of the runs -----------------------------------------------------------------------


def with_gaps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table: in place of the functions of a run, how far these are from those of NUTS.

    The others are the solved runs of NUTS on the same problem, here and by hand, but for the run itself.
    """
    found = []
    for row in rows:
        others = [
            each
            for each in rows
            if each["problem"] == row["problem"]
            and each["arm"] in (NUTS, BY_HAND)
            and each["solved"]
            and (each["arm"], each["seed"]) != (row["arm"], row["seed"])
        ]
        shown = {name: value for name, value in row.items() if name not in ("mean", "sd")}
        if others and "mean" in row:
            mean, sd = (np.mean([each[name] for each in others], axis=0) for name in ("mean", "sd"))
            shown["gap"] = float(np.sqrt(np.mean(((np.array(row["mean"]) - mean) / sd) ** 2)))
            shown["sd_ratio"] = float(np.mean(np.array(row["sd"]) / sd))
        found.append(shown)
    return found


def solved(rows: Sequence[dict[str, Any]], arm: str) -> dict[str, float]:
    """The problems that most seeds of an arm have solved, with the median of these seconds."""
    found = {}
    for problem in dict.fromkeys(row["problem"] for row in rows):
        own = [row for row in rows if row["problem"] == problem and row["arm"] == arm]
        seconds = [row["seconds"] for row in own if row["solved"]]
        if 2 * len(seconds) > len(own):
            found[problem] = float(np.median(seconds))
    return found


def best_of_ours(rows: Sequence[dict[str, Any]], limit: float) -> str:
    """The arm of ours that solves most runs, of equals the one with the least sum of seconds."""

    def place(arm: str) -> tuple[int, float]:
        own = [row for row in rows if row["arm"] == arm]
        done = [row["seconds"] for row in own if row["solved"]]
        return len(done), -(sum(done) + limit * (len(own) - len(done)))

    return max((arm for arm in OURS if any(row["arm"] == arm for row in rows)), key=place)


def judge(study: Study) -> list[Verdict]:
    """The verdicts on the claims, from the stored tables."""
    referee = Referee(read_claims("certified_answer"))
    rows = study.tables.get("runs", [])
    arms = {row["arm"] for row in rows}
    if BY_HAND not in arms or not arms & set(OURS) or study.sizes.limit != FULL.limit:
        for key in referee.claims:
            referee.not_run(key, "both sides were not run with the limit of ten minutes")
        return referee.verdicts()
    # The claims are about the whole list, and most of three seeds.
    runs = {(row["problem"], row["arm"], row["seed"]) for row in rows}
    wanted = {
        (each.name, arm, seed) for each in PROBLEMS for arm in (*OURS, BY_HAND) for seed in range(FULL.seeds)
    }
    if absent := len(wanted - runs):
        for key in referee.claims:
            referee.not_run(key, f"{absent} of the {len(wanted)} runs are absent")
        return referee.verdicts()
    best = best_of_ours(rows, study.sizes.limit)
    ours, theirs = solved(rows, best), solved(rows, BY_HAND)
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    hard = [name for name in problems if name not in theirs]
    lost = [name for name in theirs if name not in ours]
    ratios = {name: ours[name] / theirs[name] for name in theirs if name in ours}
    numbers = f"{best} solves {len(ours)} of {len(problems)}, NUTS by hand {len(theirs)}"
    if hard:
        referee.measured("solves", exact(sum(name in ours for name in hard) / len(hard)), numbers)
    else:
        referee.undecided("solves", "NUTS by hand solves every problem", numbers)
    referee.measured("loses-none", exact(float(len(lost))), f"{numbers}; lost: {', '.join(lost) or 'none'}")
    if ratios:
        values = np.array(list(ratios.values()))
        slowest = max(ratios, key=lambda name: ratios[name])
        referee.measured("third", bootstrap(values, lambda each: float(np.median(each))), numbers)
        referee.measured("never-slower", exact(float(values.max())), f"{numbers}; the slowest is {slowest}")
    else:
        for key in ("third", "never-slower"):
            referee.undecided(key, "there is no problem that both solve", numbers)
    return referee.verdicts()


def curve(rows: Sequence[dict[str, Any]], arm: str, column: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Where an arm has solved one run more, and the share of its runs solved from there on; None for no figures."""
    own = [row for row in rows if row["arm"] == arm]
    values = np.sort([row[column] for row in own if row["solved"] and column in row])
    if not own or (len(values) == 0 and any(row["solved"] for row in own)):
        return None
    return values, np.arange(1, len(values) + 1) / len(own)


def draw(study: Study) -> None:
    """The share of runs solved, against seconds and against gradients."""
    rows = study.tables.get("runs", [])
    figure, axes = panels(9.0, 4.4, columns=2)
    words = {"seconds": "seconds of the run", "gradients": "gradients of all chains"}
    for panel, (column, label) in zip(axes[0], words.items(), strict=True):
        curves = {arm: found for arm in STYLES if (found := curve(rows, arm, column)) is not None}
        ends = np.concatenate([at for at, _ in curves.values()] or [[]])
        ends = ends if len(ends) else np.ones(1)
        first, last = 0.7 * ends.min(), max(ends.max(), study.sizes.limit if column == "seconds" else 0.0)
        for arm, (at, share) in curves.items():
            # From nothing to the limit, also where nothing is solved.
            x, y = np.concatenate([[first], at, [last]]), np.concatenate([[0.0], share, share[-1:]])
            color, line = STYLES[arm]
            label_of = f"{arm}: {len(at)} of {sum(row['arm'] == arm for row in rows)}"
            y = y if len(at) else np.zeros(2)
            panel.step(x, y, where="post", color=color, linestyle=line, label=label_of)
        panel.set(xscale="log", ylim=(-0.02, 1.02), xlabel=label, ylabel="share of runs solved")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(study.out / "profile.png", dpi=150)


# --- all of it --------------------------------------------------------------------------------------


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    seeds: int | None = None,
    only: Sequence[str] | None = None,
    arms: Sequence[str] | None = None,
    limit: float | None = None,
    bde: str | None = None,
) -> Study:
    """Run the study and write tables, figure and verdicts to `out`; see `Study.begin` for where that is.

    only, arms: names of problems and of arms. Each finished run is a file of the folder `checkpoint`, from which an
    interrupted study goes on.
    """
    study = Study.begin(TINY if tiny else FULL, "certified_answer", tiny, out, seeds=seeds)
    if limit is not None:
        study.sizes = replace(study.sizes, limit=limit)
    sizes = study.sizes
    listed = TINY_PROBLEMS if tiny else PROBLEMS
    known = {"only": [each.name for each in listed], "arms": list(ARMS)}
    for option, names in (("only", only), ("arms", arms)):
        if unknown := [name for name in names or () if name not in known[option]]:
            raise ValueError(
                f"{option}: expected some of {', '.join(known[option])}; got {', '.join(unknown)}"
            )
    skipped: list[dict[str, Any]] = []
    chosen = []
    for arm in arms or ARMS:
        if why := missing(arm, bde or ""):
            skipped.append({"what": arm, "why": why})
        else:
            chosen.append(arm)
    rows: list[dict[str, Any]] = []
    for problem in (each for each in listed if not only or each.name in only):
        try:
            task = task_of(problem, sizes.rows)
        except BNNError as error:
            skipped.append({"what": problem.name, "why": str(error).splitlines()[0]})
            continue
        for seed in range(sizes.seeds):
            # Each arm goes first every so often, so that none has the machine always cold.
            for arm in chosen[seed % len(chosen) :] + chosen[: seed % len(chosen)]:
                row = {"problem": problem.name, "arm": arm, "seed": seed}
                row |= kept(
                    checkpoint,
                    f"{problem.name}-{arm.replace(' ', '_')}-{seed}",
                    sizes,
                    lambda arm=arm, task=task, seed=seed: one_run(arm, task, sizes, seed, tiny, bde or ""),
                )
                rows.append(row)
                figures = [
                    f"{name} {row[name]:.4g}"
                    for name in ("seconds", "gradients", "rhat", "ess")
                    if name in row
                ]
                study.say(
                    f"{problem.name}, {arm}, seed {seed}: {', '.join(figures)} {row['why'] or 'solved'}"
                )
    for each in skipped:
        study.say(f"left out: {each['what']}: {each['why']}")
    study.tables = {"runs": with_gaps(rows), "left_out": skipped}
    draw(study)
    study.conclude(judge)
    return study


def one_run(arm: str, task: Task, sizes: Sizes, seed: int, here: bool, python: str) -> dict[str, Any]:
    """One run, in this process where `here`."""
    if not here:
        return in_a_process(arm, task, sizes, seed, python)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peers, written as their users write them
        return certified(arm, task, sizes, seed, lambda _: None, python)


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "seeds", "figures")
    parser.add_argument("--only", nargs="+", help="problems, such as iris-10-relu")
    parser.add_argument("--arms", nargs="+", help=", ".join(ARMS))
    parser.add_argument("--limit", type=float, help="seconds; the claims are about 600")
    parser.add_argument("--bde", help="an interpreter that has the package bde")
    run(parser, main, "certified_answer", FULL, draw)
