"""Does the bound choose the network? Fits of empirical Bayes on twenty splits of the Alzheimer's table.

`empirical_bayes_alzheimers.py` names the source and has the model, on the source's split. Here the fits of the model as
derived are repeated on the source's split and on random ones with as many rows in either part, from both starts and
with one seed for each of eight widths. Among the eight fits of one start on one split three rules choose:

- the largest ELBO;
- validation: the best log score on a fifth of the training rows, by fits of the same widths to the other rows;
- leave-one-out: the largest leave-one-out value of the training rows, by Pareto-smoothed importance sampling.

The regret of a choice is the largest test score among the eight minus that of the fit that was chosen. Splits of one
table overlap, so intervals have the correction of Nadeau and Bengio, and the claims are about this table. Nothing is
judged on fewer than all splits. Choices are judged as they were made, whether or not a fit had reached a plateau; the
verdicts tell how many had.

What had been seen before the claims were written: the fits of the source's split that the other study stores.

    PPL_BNN_DATA=... python comparisons/empirical_bayes_selection.py [--tiny] [--out DIR] [--splits N]
                                                                     [--checkpoint DIR] [--figures]
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import empirical_bayes_alzheimers as one_split
import numpy as np
from claims import Referee, Verdict, mean_over_splits, read_claims
from empirical_bayes_alzheimers import (
    SCORES,
    SOURCE_DRAWS,
    SOURCE_RATE,
    SOURCE_STEPS,
    SOURCE_WIDTHS,
    Row,
    column,
    regrets,
    selection,
    settled_count,
)
from study import BLUE, GREY, ORANGE, Study, command_line, kept, panels, run

# As many splits as the claims ask for.
SPLITS = 20
# The starts: as tables name them, as keys of claims do, and in words.
STARTS = {
    "source": ("source", "the source's start"),
    "prior": ("other", "a start at draws of variance 1 / fan-in"),
}
RULES = {"validation": "validation", "loo": "leave-one-out"}


@dataclass(frozen=True)
class Sizes:
    """How much is computed; see `empirical_bayes_alzheimers.Sizes`."""

    synthetic: bool = False
    widths: tuple[int, ...] = one_split.FULL.widths
    seeds: int = 1
    splits: int = SPLITS
    steps: int = one_split.FULL.steps
    learning_rate: float = one_split.FULL.learning_rate
    draws: int = one_split.FULL.draws
    workers: int = 2

    @property
    def of_fits(self) -> one_split.Sizes:
        """The sizes of one fit."""
        return replace(
            one_split.FULL,
            synthetic=self.synthetic,
            steps=self.steps,
            learning_rate=self.learning_rate,
            draws=self.draws,
        )


FULL = Sizes()
TINY = Sizes(synthetic=True, widths=(1, 3), splits=2, steps=60, draws=20, workers=0)


def part(sizes: Sizes, split: int) -> dict[str, Any]:
    """All fits of one split: to the training rows, and to four fifths of them."""
    tables: dict[str, list[dict[str, Any]]] = {"fits": [], "validation": []}
    for start, width, seed, held in product(STARTS, sizes.widths, range(sizes.seeds), (False, True)):
        ((_, row),) = one_split.run_empirical_bayes(
            sizes.of_fits, width, seed, start=start, split=split, held=held
        )
        tables["validation" if held else "fits"].append(row)
    return tables


def perform(sizes: Sizes, split: int, checkpoint: str | Path | None) -> dict[str, Any]:
    """One split, in whatever process; from the checkpoint if it is there."""
    return kept(checkpoint, f"split {split}", sizes, lambda: part(sizes, split))


def choices(tables: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """What each rule chooses, from each start on each split."""
    checked = {
        (row["split"], row["start"], row["width"], row["seed"]): row["log_score_validation"]
        for row in tables["validation"]
    }
    return selection(tables["fits"], checked)


# --- verdicts -------------------------------------------------------------------------------------


def gains(chosen: Sequence[Row], rule: str, score: str) -> np.ndarray:
    """Test scores of the fits of the largest ELBO minus those of the fits that `rule` chooses."""
    return column(chosen, f"{score}_elbo") - column(chosen, f"{score}_{rule}")


def judge_start(
    referee: Referee, key: str, chosen: Sequence[Row], test_rows: float, train_rows: float, note: str = ""
) -> None:
    """Regret of the ELBO's choice from one start, and the two other rules beside it. chosen: of `choices`."""
    needed = f"{len(chosen)} of {SPLITS} splits are run"
    for score in SCORES:
        if len(chosen) < SPLITS:
            referee.not_run(f"selection-{score}-{key}", needed)
            continue
        own, median = regrets(chosen, score)
        text = f"mean regret {own.mean():.4f}, of the median fit {median.mean():.4f}{note}"
        referee.measured(
            f"selection-{score}-{key}", mean_over_splits(own - 0.5 * median, test_rows, train_rows), text
        )
    for rule in RULES:
        if len(chosen) < SPLITS:
            referee.not_run(f"{rule}-{key}", needed)
        elif not all(f"log_score_{rule}" in row for row in chosen):
            referee.undecided(f"{rule}-{key}", f"a fit of some split has no value by {RULES[rule]}")
        else:
            text = f"in AUC {gains(chosen, rule, 'auc').mean():+.4f}{note}"
            estimate = mean_over_splits(gains(chosen, rule, "log_score"), test_rows, train_rows)
            referee.measured(f"{rule}-{key}", estimate, text)


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    sizes, numbers, fits = study.sizes, study.numbers, study.tables["fits"]
    smaller = (
        f"{len(sizes.widths)} widths of the source's {SOURCE_WIDTHS}; {sizes.steps} steps at rate "
        f"{sizes.learning_rate:g} instead of {SOURCE_STEPS} at {SOURCE_RATE:g}; {sizes.draws} draws instead of "
        f"{SOURCE_DRAWS}"
    )
    referee = Referee(read_claims("empirical_bayes_selection"), smaller)
    found = choices(study.tables)
    for start, (key, _) in STARTS.items():
        settled = settled_count([row for row in fits if row["start"] == start])
        chosen = [row for row in found if row["start"] == start]
        note = f"; {settled} fits had reached a plateau"
        judge_start(referee, key, chosen, numbers["test_rows"], numbers["train_rows"], note)
    return referee.verdicts()


# --- figure and run -------------------------------------------------------------------------------


def draw(study: Study) -> None:
    """What the choice of the ELBO has over four others in test log score, a point for each split."""
    found, numbers = choices(study.tables), study.numbers
    others = {"best": "best fit", **RULES, "median": "median fit"}
    figure, axes = panels(10.0, 4.2, columns=len(STARTS))
    for axis, (start, (_, words)) in zip(axes[0], STARTS.items(), strict=True):
        chosen = [row for row in found if row["start"] == start]
        axis.axvline(0.0, color=GREY, linewidth=1.0)
        for place, other in enumerate(others):
            if not chosen or not all(f"log_score_{other}" in row for row in chosen):
                where = {
                    "transform": axis.get_yaxis_transform(),
                    "ha": "center",
                    "va": "center",
                    "backgroundcolor": "white",
                }
                axis.text(0.5, place, "some fits have no value", color=GREY, fontsize=8, **where)
                continue
            values = gains(chosen, other, "log_score")
            spread = np.linspace(-0.2, 0.2, len(values))
            axis.plot(
                values,
                place + spread,
                "o",
                color=BLUE,
                markersize=4,
                alpha=0.6,
                label="a split" if not place else None,
            )
            estimate = mean_over_splits(values, numbers["test_rows"], numbers["train_rows"])
            if np.isfinite(estimate.low):
                axis.plot([estimate.low, estimate.high], [place, place], color=ORANGE, linewidth=2.5)
            axis.plot(
                values.mean(), place, "D", color=ORANGE, label="mean, 95 % interval" if not place else None
            )
        axis.set_title(f"from {words}", fontsize=10)
        axis.set_ylim(len(others) - 0.5, -0.5)
        axis.set_yticks(range(len(others)))
        axis.set_yticklabels(
            [f"over the {name}" if "fit" in name else f"over {name}" for name in others.values()]
        )
        axis.locator_params(axis="x", nbins=6)
        axis.set_xlabel("gain in test log score, nats per row")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle("The fit with the largest ELBO against four others", fontsize=11)
    figure.savefig(study.out / "choices.png")


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    splits: int | None = None,
) -> Study:
    """Run the study and write tables, figure and verdicts to `out`; the arguments are those of the command line.

    What is kept in `checkpoint` is each split.
    """
    study = Study.begin(TINY if tiny else FULL, "empirical_bayes_selection", tiny, out, splits=splits)
    sizes = study.sizes
    found = []
    if sizes.workers:
        with ProcessPoolExecutor(sizes.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(perform, sizes, split, checkpoint) for split in range(sizes.splits)]
            for split, future in enumerate(futures):
                found.append(future.result())
                study.say(f"{split + 1} of {sizes.splits} splits")
    else:
        found = [perform(sizes, split, checkpoint) for split in range(sizes.splits)]
    study.tables = {name: [row for each in found for row in each[name]] for name in ("fits", "validation")}
    data = one_split.rows(sizes.synthetic)
    study.numbers = {"train_rows": len(data.y), "test_rows": len(data.y_test)}
    study.tables["choices"] = choices(study.tables)
    draw(study)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(
        __doc__, "checkpoint", "splits", "figures", tiny="small sizes and made-up rows, in seconds"
    )
    run(parser, main, "empirical_bayes_selection", FULL, draw)
