"""What one network keeps of a posterior: each model of the zoo by its posterior, its mode and a distilled student.

Each model is fitted to its default data by MAP and by a teacher: NUTS where it has at most 250 weights, else an
ensemble of five modes that stop early, or SVI where neither serves it. The student of the teacher, by `distil` at its
defaults, is scored beside both on rows that were held out, over three random splits.

- What it keeps: the log score of the student minus that of the mode, minus 0.95 of what the teacher has over the mode.
  It is not negative where the student keeps at least 95 % of the gain, and is defined where there is no gain.
- Coverage of intervals of 90 %, the student's minus the teacher's, for numbers and counts.
- Cost: one pass of one network by construction. Measured are seconds of `predict` at the test rows over those of the
  mode, the least of five of each in alternating order.

A model that distillation refuses, or that has no mode to compare with, is a row of `refused.csv`, with the words of the
refusal. Four networks of images are left out unless --only names them: their modes take a quarter of an hour each. Of
these one split of the transformer was run. Its student lost 0.042 nats per row of an ensemble's score, with a
divergence of 0.14 that it warned of.

    python comparisons/distillation.py [--tiny] [--only NAME ...] [--out DIR] [--checkpoint DIR]
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from claims import Estimate, Referee, Verdict, exact, mean, read_claims
from study import BLUE, GREY, Study, command_line, kept, panels, run

import ppl_bnn as bnn
from ppl_bnn import scores
from ppl_bnn.core.errors import BNNError
from ppl_bnn.zoo import sketch

# At a size that can be fitted in minutes; the others are at their defaults.
SMALLER: dict[str, dict[str, Any]] = {"lenet": {"channels": (3, 6), "widths": (20,), "kernel": 3}}
LEFT_OUT = ("lenet", "lstm_classifier", "resnet", "transformer_classifier")
SHARE = 0.95


@dataclass(frozen=True)
class Sizes:
    """How much is computed; rows: of the training part at most, test_rows of the other."""

    splits: int = 3
    rows: int = 200
    test_rows: int = 500
    most_weights: int = 250
    chains: int = 4
    warmup: int = 200
    draws: int = 200
    max_tree_depth: int = 7
    members: int = 5
    steps: int = 1000
    distilled: int = 1000
    repeats: int = 5


FULL = Sizes()
TINY = Sizes(1, 40, 20, 20, 2, 20, 20, 4, 2, 100, 40, 2)
FEW = ("linear_regression", "logistic_regression", "graph_convolution")


def teachers(weights: int, sizes: Sizes) -> dict[str, Any]:
    """Methods in the order in which they are asked whether they serve a model of so many weights."""
    found: dict[str, Any] = {}
    if weights <= sizes.most_weights:
        found["nuts"] = bnn.NUTS(
            chains=sizes.chains, warmup=sizes.warmup, draws=sizes.draws, max_tree_depth=sizes.max_tree_depth
        )
    early = bnn.MAP(validation=0.1, steps=sizes.steps)
    found["ensemble"] = bnn.Ensemble(early, size=sizes.members)
    found["ensemble of modes"] = bnn.Ensemble(bnn.MAP(steps=sizes.steps), size=sizes.members)
    return found | {"svi": bnn.SVI(steps=2 * sizes.steps)}


def compared(name: str, split: int, sizes: Sizes) -> dict[str, Any]:
    """One model on one split: a row of the table, or the error that refused it."""
    entry = bnn.zoo.models()[name]
    table = bnn.data.load(entry.data or "")
    train, test = table.split(seed=split)
    train, test = train[: sizes.rows], test[: sizes.test_rows]
    arguments = dict(SMALLER.get(name, {}))
    if "classes" in entry.arguments:
        arguments["classes"] = len(np.unique(table.y))
    model = bnn.zoo.load(name, **arguments)
    x, y, x_new, y_new = table.x[train], table.y[train], table.x[test], table.y[test]
    weights = sketch(model, x.shape[1]).parameters
    named = teachers(weights, sizes).items()
    teacher, method = next(each for each in named if each[1].refusal(model, x, y, standardise=True) is None)
    row: dict[str, Any] = {"model": name, "split": split, "weights": weights, "teacher": teacher}
    try:
        posterior = bnn.fit(model, x, y, method, seed=split, standardise=True)
        student = posterior.distil(rows=sizes.distilled, seed=split)
        mode = bnn.fit(model, x, y, bnn.MAP(), seed=split, standardise=True)
    except BNNError as error:
        return {"refused": row | {"error": type(error).__name__, "words": str(error)}}
    fits = {"mode": mode, "teacher": posterior, "student": student}
    for which, fit in fits.items():
        prediction = fit.predict(x_new)
        row[f"{which}_log_score"] = float(np.mean(prediction.log_prob(y_new)))
        if not prediction.is_classes:
            row[f"{which}_coverage"] = float(scores.coverage(prediction, y_new, 0.9))
    figures = student.info.figures
    row |= {name: figures[name] for name in ("divergence", "divergence_se", "converged")}
    seconds = {"mode": [], "student": []}
    for _ in range(sizes.repeats):
        for which, spent in seconds.items():
            begun = time.perf_counter()
            fits[which].predict(x_new)
            spent.append(time.perf_counter() - begun)
    row["time_ratio"] = min(seconds["student"]) / min(seconds["mode"])
    row["passes"] = 1
    return {"row": row}


# --- verdicts ---------------------------------------------------------------------------------------


def by_model(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model: means over its splits, and the interval of what is kept."""
    found = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]

        def each(column: str, own: list[dict[str, Any]] = own) -> np.ndarray:
            return np.array([row[column] for row in own], float)

        gain = each("teacher_log_score") - each("mode_log_score")
        excess = each("student_log_score") - each("mode_log_score") - SHARE * gain
        estimate = mean(excess)
        row = {"model": name, "teacher": own[0]["teacher"], "splits": len(own), "gain": gain.mean()}
        row |= {"lost": (each("teacher_log_score") - each("student_log_score")).mean()}
        row |= {"excess": estimate.value, "excess_low": estimate.low, "excess_high": estimate.high}
        if "student_coverage" in own[0]:
            row["coverage_difference"] = (each("student_coverage") - each("teacher_coverage")).mean()
        row |= {"divergence": each("divergence").mean(), "time_ratio": each("time_ratio").mean()}
        found.append(row)
    return found


def judge(study: Study) -> list[Verdict]:
    """The verdicts on the claims, from the stored tables."""
    referee = Referee(read_claims("distillation"))
    rows = by_model(study.tables.get("scores", []))
    covered = [row for row in rows if "coverage_difference" in row]
    if not rows:
        for key in referee.claims:
            referee.not_run(key, "no model was distilled")
        return referee.verdicts()
    excess = np.array([row["excess"] for row in rows])
    low, high = referee.claims["kept"].low, referee.claims["coverage"].high
    missed = [row["model"] for row in rows if row["excess"] < low]
    referee.measured("kept", mean(excess))
    referee.measured("kept-everywhere", _count(missed), _names(missed, len(rows)))
    if covered:
        differences = np.abs([row["coverage_difference"] for row in covered])
        missed = [row["model"] for row in covered if abs(row["coverage_difference"]) > high]
        referee.measured("coverage", mean(differences))
        referee.measured("coverage-everywhere", _count(missed), _names(missed, len(covered)))
    else:
        referee.not_run("coverage", "no model of numbers was distilled")
        referee.not_run("coverage-everywhere", "no model of numbers was distilled")
    referee.measured("cost", mean([row["time_ratio"] for row in rows]))
    return referee.verdicts()


def _count(missed: Sequence[str]) -> Estimate:
    return exact(float(len(missed)))


def _names(missed: Sequence[str], total: int) -> str:
    return f"of {total} models: {', '.join(missed) or 'none'}"


def draw(study: Study) -> None:
    """What the teacher has over the mode, and the student, model by model."""
    rows = by_model(study.tables.get("scores", []))
    if not rows:
        return
    figure, axes = panels(7.0, 0.3 * len(rows) + 1.2)
    places = np.arange(len(rows))[::-1]
    gain = np.array([row["gain"] for row in rows])
    axes[0, 0].axvline(0.0, color=GREY, linewidth=0.8)
    axes[0, 0].plot(gain, places, "o", color=GREY, label="teacher")
    axes[0, 0].plot(gain - [row["lost"] for row in rows], places, "x", color=BLUE, label="student")
    axes[0, 0].set_yticks(places, [row["model"] for row in rows])
    # Where the mode has no noise left, its score falls short by millions of nats.
    axes[0, 0].set_xscale("symlog", linthresh=0.01)
    axes[0, 0].set_xlim(min(-0.1, 2.0 * gain.min()), max(10.0, 3.0 * gain.max()))
    ticks = [each for each in (-0.1, -0.01, 0.0, 0.01, 1.0, 1e3, 1e6, 1e9) if each <= 3.0 * gain.max()]
    axes[0, 0].set_xticks(ticks, [f"{each:,.9g}" for each in ticks])
    axes[0, 0].set_xlabel("log score minus that of the mode, nats per test row, mean over splits")
    axes[0, 0].legend(frameon=False)
    figure.savefig(study.out / "gains.png", dpi=150)


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    splits: int | None = None,
    only: Sequence[str] | None = None,
) -> Study:
    """Run the study and write tables, figure and verdicts to `out`; see `Study.begin` for where that is."""
    study = Study.begin(TINY if tiny else FULL, "distillation", tiny, out, splits=splits)
    sizes = study.sizes
    names = only or (FEW if tiny else [name for name in bnn.zoo.models() if name not in LEFT_OUT])
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for name in names:
        for split in range(sizes.splits):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                part = kept(
                    checkpoint,
                    f"{name}-{split}",
                    sizes,
                    lambda name=name, split=split: compared(name, split, sizes),
                )
            if "refused" in part:
                refused.append(part["refused"])
                study.say(f"{name}: {part['refused']['words']}")
                break
            rows.append(part["row"])
            row = part["row"]
            study.say(
                f"{name}, split {split}: mode {row['mode_log_score']:.4f}, teacher {row['teacher_log_score']:.4f}, "
                f"student {row['student_log_score']:.4f}"
            )
    left_out = [{"model": name} for name in bnn.zoo.models() if name not in names]
    study.tables = {"scores": rows, "models": by_model(rows), "refused": refused, "left_out": left_out}
    draw(study)
    study.conclude(judge)
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "splits", "figures")
    parser.add_argument("--only", nargs="+", help="models of the zoo")
    run(parser, main, "distillation", FULL, draw)
