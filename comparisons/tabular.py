"""Small tables: Bayesian neural networks beside the estimators that people would use instead, at matched cost.

Ten tables, six of numbers and four of classes, twenty splits each. Ours is one network for all methods, a hidden layer
of 50 ReLU with the zoo's priors: the Kronecker Laplace approximation, a deep ensemble of five, an ensemble of five
Laplace approximations, and mean-field SVI. From outside (`bnn.Outside`): a Gaussian process, Bayesian ridge regression
(of numbers), a random forest, gradient boosting (LightGBM where it is installed, else scikit-learn's) and an ensemble
of five multilayer perceptrons. All are fitted on standardised inputs and targets, with the same settings on all tables.

The log score is compared, in nats per row and original units. Where a claim is about the best of several, the best is
chosen on the other splits, by the mean log score, for both sides alike.

Matched by cost: the cost of a method on a table is the time of a fit and of the predictions of the test rows, in
seconds, of its second fit in one process, so that compilation is left out for all. It is measured on one split, by
itself. A pair is matched where ours costs at most `MATCHED` times what theirs costs, or at most `SOON` seconds; of
ours, the best is chosen among the methods that are matched with the dearest from outside. Pairs that are not matched
stay undecided.

What had been seen before the claims were written: log scores on one random split of yacht, concrete, iris and
breast_cancer, fitted to see what fits cost. After it SVI got batches, which cost less, and a last-layer Laplace
approximation gave way to the ensemble of Laplace approximations. The rule that ends the training of scikit-learn's
perceptrons was chosen by the test scores of one split of diabetes, yacht and concrete, which favours theirs.

    python comparisons/tabular.py [--tiny] [--tables NAME ...] [--splits N] [--checkpoint DIR] [--shared]

With --shared the machine has other work, and costs are not measured; a later run over the same checkpoint without it
computes the costs alone.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, mean_over_splits, read_claims, share
from study import BLACK, Study, command_line, kept, panels, run
from uci_regression import (
    best_elsewhere,
    by_split,
    cell_rows,
    chosen,
    draw_strip,
    early,
    failures,
    load,
    mean_field,
    plain,
    rows_of,
    run_grid,
    splits_of,
)

import ppl_bnn as bnn
from ppl_bnn.datasets.tables import Table

TABLES = (
    "yacht", "energy", "concrete", "airfoil", "diabetes", "mackey_glass",
    "iris", "wine", "breast_cancer", "diabetes_levels",
)  # fmt: skip
KRON, ENSEMBLE, MIXTURE = "Laplace, Kronecker", "deep ensemble", "ensemble of Laplace"
MEAN_FIELD = "SVI, mean-field"
GP, RIDGE, FOREST, BOOSTING, THEIR_ENSEMBLE = (
    "Gaussian process", "Bayesian ridge", "random forest", "gradient boosting", "ensemble of MLPs",
)  # fmt: skip
OURS = (KRON, ENSEMBLE, MIXTURE, MEAN_FIELD)
THEIRS = (GP, RIDGE, FOREST, BOOSTING, THEIR_ENSEMBLE)
# How many times as dear ours may be, and the seconds up to which that does not matter.
MATCHED, SOON = 3.0, 5.0
# Pairs of one method each, by the beginning of the keys of their claims.
PAIRS = {"ensemble": (ENSEMBLE, THEIR_ENSEMBLE), "laplace": (KRON, GP)}
COLUMNS = (
    "splits", "failures", "log_score", "log_score_se", "rmse", "rmse_se", "crps", "coverage_90", "width_90",
    "accuracy", "brier", "ece",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is computed: the first so many rows of these tables, splits, and the network and its training.

    large_splits and small are those of `uci_regression.splits_of`: no table here is large.
    """

    tables: tuple[str, ...] = TABLES
    splits: int = 20
    large_splits: int = 20
    small: int = 10_000
    rows: int | None = None
    width: int = 50
    steps: int = 20_000
    svi_steps: int = 10_000
    batch: int = 100
    members: int = 5
    svi_rate: float = 0.01


FULL = Sizes()
TINY = Sizes(("diabetes",), 2, 2, 10_000, 60, 3, 100, 100, 20, 2)


def methods(sizes: Sizes, classes: bool) -> dict[str, Any]:
    """The methods and the estimators from outside, by their labels."""
    point = early(sizes)
    noise: dict[str, Any] = {} if classes else {"noise": "evidence"}
    laplace = bnn.Laplace(start=point, optimise=False, structure="kron", **noise)
    boosting = "lightgbm" if importlib.util.find_spec("lightgbm") else "boosting"
    found = {
        KRON: laplace,
        ENSEMBLE: bnn.Ensemble(point, size=sizes.members),
        MIXTURE: bnn.Ensemble(laplace, size=sizes.members),
        MEAN_FIELD: mean_field(sizes, sizes.batch),
        GP: bnn.Outside("gp"),
        RIDGE: bnn.Outside("bayesian-ridge"),
        FOREST: bnn.Outside("forest"),
        BOOSTING: bnn.Outside(boosting),
        THEIR_ENSEMBLE: bnn.Outside("mlp-ensemble"),
    }
    if classes:
        del found[RIDGE]
    return found


def grid_of(sizes: Sizes, name: str, table: Table) -> bnn.Grid:
    """The grid of one table."""
    classes = table.task == "classification"
    model = bnn.zoo.load(
        "classification_mlp" if classes else "regression_mlp", width=sizes.width, activation="relu"
    )
    label = f"{sizes.width} ReLU"
    return bnn.Grid({label: model}, {name: table}, methods(sizes, classes), splits_of(sizes, table))


def costs(grid: bnn.Grid, name: str, table: Table) -> list[dict[str, Any]]:
    """Seconds of the first and of the second fit of each method to the first split, prediction included."""
    from ppl_bnn.datasets import splits
    from ppl_bnn.evaluation.comparison.run import bind_classes

    split = splits.splits_of(table, splits.check(grid.splits))[0]
    (model,) = grid.models.values()
    if table.task == "classification":
        model = bind_classes(model, table.y, table.class_names)
    rows = []
    for label, method in grid.methods.items():
        seconds = []
        for seed in (0, 1):
            started = time.perf_counter()
            fit = method.fit(model, table.x[split.train], table.y[split.train], seed=seed, standardise=True)
            fit.predict(table.x[split.test])
            seconds.append(time.perf_counter() - started)
        rows.append({"data": name, "method": label, "first_seconds": seconds[0], "seconds": seconds[1]})
    return rows


def score_rows(result: Any, name: str) -> list[dict[str, Any]]:
    """A row for each method: means over splits, with the errors that allow for shared training rows."""
    rows = result.table().reset_index().to_dict("records")
    return [
        plain(
            {"data": name, "method": row["method"]}
            | {column: row[column] for column in COLUMNS if column in row}
        )
        for row in rows
    ]


# --- verdicts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Ours minus theirs on each split of a table, and which methods these are; `why` there is no pair, or ""."""

    differences: tuple[float, ...] = ()
    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    why: str = ""

    @property
    def words(self) -> str:
        """Which methods, and on how many splits."""
        both = [
            ", ".join(f"{name} ({count})" for name, count in Counter(names).most_common())
            for names in (self.ours, self.theirs)
        ]
        return f"ours: {both[0]}; theirs: {both[1]}"


def pair_of(
    scores: Mapping[str, Mapping[int, float]],
    cost: Mapping[str, float],
    ours: Sequence[str],
    theirs: Sequence[str],
) -> Pair:
    """The best of ours beside the best of theirs, each chosen on the other splits, of those matched by cost."""
    others = {name: scores[name] for name in theirs if name in scores}
    if not others:
        return Pair(why="no estimator from outside predicted on all splits")
    if not cost:
        return Pair(why="costs were not measured")
    dearest = max(cost[name] for name in others)
    limit = max(MATCHED * dearest, SOON)
    own = {name: scores[name] for name in ours if name in scores and cost[name] <= limit}
    if not own:
        spent = min(cost[name] for name in ours)
        return Pair(why=f"not matched: ours costs {spent:.2g} s, theirs {dearest:.2g} s")
    splits = sorted(next(iter(others.values())))
    if len(splits) < 2:
        return Pair(why="one split")
    best = [(best_elsewhere(own, k), best_elsewhere(others, k)) for k in splits]
    found = tuple(own[a][k] - others[b][k] for k, (a, b) in zip(splits, best, strict=True))
    if not np.isfinite(found).all():
        return Pair(why="a method gave no probability to an outcome that occurred")
    return Pair(found, tuple(a for a, _ in best), tuple(b for _, b in best))


def pairs_of(study: Study, data: str) -> dict[str, Pair]:
    """The pairs of a table by the beginning of the keys of their claims."""
    scores = by_split(study.tables["cells"], data, "log_score")
    measured = {row["method"]: row["seconds"] for row in study.tables.get("costs", ()) if row["data"] == data}
    sides = {"best": (OURS, THEIRS)} | {key: ((ours,), (theirs,)) for key, (ours, theirs) in PAIRS.items()}
    return {key: pair_of(scores, measured, *side) for key, side in sides.items()}


def judge_intervals(referee: Referee, cells: Sequence[Mapping[str, Any]], data: str, pair: Pair) -> None:
    """Coverage of the 90 % intervals of the best of ours, as it was chosen for its log score."""
    key = f"intervals-{data}"
    if pair.why:
        referee.undecided(key, pair.why)
        return
    coverage = by_split(cells, data, "coverage_90")
    splits = sorted(next(iter(coverage.values())))
    values = [coverage[name][k] - 0.9 for k, name in zip(splits, pair.ours, strict=True)]
    referee.measured(key, mean_over_splits(values, *rows_of(cells, data)), pair.words)


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    cells = study.tables["cells"]
    present = list(dict.fromkeys(cell["data"] for cell in cells))
    referee = Referee(read_claims("tabular"), f"{study.sizes.splits} splits of {len(present)} tables")
    ahead = []
    for data in TABLES:
        numbers = f"intervals-{data}" in referee.claims
        if data not in present:
            for key in ("best", *PAIRS, *(["intervals"] if numbers else [])):
                referee.not_run(f"{key}-{data}", "not in this run")
            continue
        pairs = pairs_of(study, data)
        for key, pair in pairs.items():
            if pair.why:
                referee.undecided(f"{key}-{data}", pair.why)
            else:
                found = mean_over_splits(pair.differences, *rows_of(cells, data))
                referee.measured(f"{key}-{data}", found, pair.words)
        if not pairs["best"].why:
            ahead.append(float(np.mean(pairs["best"].differences)) > 0.0)
        if numbers:
            judge_intervals(referee, cells, data, pairs["best"])
    if ahead:
        referee.measured("wins", share(sum(ahead), len(ahead)))
    else:
        referee.undecided("wins", "no table has a pair")
    return referee.verdicts()


# --- figures and all of it ----------------------------------------------------------------------------

TITLES = {
    "best": "best of ours\nminus best from outside",
    "ensemble": f"{ENSEMBLE}\nminus {THEIR_ENSEMBLE}",
    "laplace": f"{KRON}\nminus {GP}",
}


def draw(study: Study) -> None:
    """Differences in log score on each split, a row for each table; to the right ours is better."""
    tables = list(dict.fromkeys(cell["data"] for cell in study.tables["cells"]))
    figure, axes = panels(3.4 * len(TITLES), 1.4 + 0.42 * len(tables), columns=len(TITLES))
    for place, data in enumerate(tables):
        for panel, (_, pair) in zip(axes[0], pairs_of(study, data).items(), strict=True):
            if pair.why:
                short = pair.why.partition(":")[0]
                panel.text(0.0, place, f" {short}", va="center", fontsize=7.5, color="0.4")
                continue
            values = list(pair.differences)
            draw_strip(panel, place, [{}] * len(values), values, [False] * len(values))
    for panel, title in zip(axes[0], TITLES.values(), strict=True):
        panel.axvline(0.0, color=BLACK, linewidth=0.8, zorder=1)
        panel.set_xscale("symlog", linthresh=0.1)
        panel.set_ylim(len(tables) - 0.5, -0.5)
        panel.set_yticks(range(len(tables)), tables if panel is axes[0, 0] else [""] * len(tables))
        panel.tick_params(axis="y", length=0)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("log score, nats per row", fontsize=9)
        panel.set_xticks([-1.0, -0.1, 0.0, 0.1, 1.0], ["-1", "-0.1", "0", "0.1", "1"])
    figure.savefig(study.out / "differences.png")


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    tables: Sequence[str] | None = None,
    splits: int | None = None,
    checkpoint: str | Path | None = None,
    jobs: int = 1,
    shared: bool = False,
) -> Study:
    """Run the study and write tables, the figure and verdicts to `out`; see `Study.begin` for where that is.

    tables, splits: others than those of `Sizes`. checkpoint: a folder with a grid for each table, in which an
    interrupted run goes on. jobs: cells at once. shared: others compute on this machine, so that costs, seconds and
    memory are left out.
    """
    sizes = TINY if tiny else FULL
    sizes = replace(sizes, tables=chosen(tables, sizes.tables) or sizes.tables)
    study = Study.begin(sizes, "tabular", tiny, out, splits=splits, large_splits=splits)
    sizes = study.sizes
    rows: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    spent: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(checkpoint or stack.enter_context(tempfile.TemporaryDirectory(prefix="tabular_")))
        for name in sizes.tables:
            table = load(name, sizes.rows)
            grid = grid_of(sizes, name, table)
            result = run_grid(study, table, grid, folder / name, jobs, "sequential" if tiny else "local")
            own = cell_rows(result, shared)
            cells += own
            rows += score_rows(result, name)
            of_one = replace(sizes, tables=(name,))
            if not shared:

                def measured(grid: bnn.Grid = grid, name: str = name, table: Table = table) -> dict[str, Any]:
                    return {"costs": costs(grid, name, table)}

                spent += kept(checkpoint, f"costs-{name}", of_one, measured)["costs"]
            study.numbers[name] = {
                "rows": len(table.y),
                "inputs": table.x.shape[1],
                "methods": {label: repr(method) for label, method in grid.methods.items()},
                "failures": failures(own),
            }
    study.tables = {"scores": rows, "cells": cells} | ({"costs": spent} if spent else {})
    study.conclude(judge)
    draw(Study.read(study.out, sizes))
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "splits", "shared", "figures")
    parser.add_argument("--tables", nargs="+", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    run(parser, main, "tabular", FULL, draw)
