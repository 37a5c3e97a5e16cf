"""UCI regression on the standard splits: one network by nine methods, beside what is published.

Source of the protocol: J. M. Hernandez-Lobato and R. P. Adams (2015), "Probabilistic backpropagation for scalable
learning of Bayesian neural networks"; Y. Gal and Z. Ghahramani (2016), "Dropout as a Bayesian approximation"; B.
Lakshminarayanan, A. Pritzel and C. Blundell (2017), "Simple and scalable predictive uncertainty estimation using deep
ensembles". One hidden layer of 50 ReLU (100 on protein), inputs and target standardised on the training rows, scores in
original units, and their mean and standard error over the 20 standard splits (5 of protein). The errors are
sd / sqrt(J) over J splits, as the published tables have them; those that allow for shared training rows (Nadeau and
Bengio 2003) stand in a column of their own.

One model for all methods, the zoo's `regression_mlp`, in units of the standardised target:

    W1_jk ~ N(0, 1 / F)    W2_k ~ N(0, 1 / H)    b ~ N(0, 1)    s ~ HalfNormal(1)    y_n ~ N(f(x_n), s^2).

The noise s is inferred. At the joint mode of weights and noise the noise collapses: networks of this size pass
through nearly all rows of a small table, and then a smaller s is always the more probable one, whatever becomes of
other rows. So (decided after the first runs on yacht had shown it) wherever a network is trained it stops early, on a
tenth of its training rows, and that point is what Laplace expands about, with the noise set by the evidence, and where
chains and SWAG begin. Nothing else is tuned on a validation part: the published MC dropout chose its rate and its
noise so. Published numbers are marked "read" (from the logs of the authors' repository) or "recalled" (not verified).
NUTS is the reference on tables of at most 2000 rows, on those splits on which it converged in function space;
elsewhere there is no reference.

The column gradient_evaluations is no price of a method alone: Laplace and SWAG leave out the training of the point that
they start from, which MAP's own row has; chains count that of their start, and an ensemble that of all its members.

Sizes. The default is what two cores can do: the first splits of yacht, energy, concrete and power-plant, the last by
the cheaper methods alone, and no protein. `--full` is all of it, for a larger machine. A grid per table does the work
(`bnn.Grid`), cell by cell, in the folder of --checkpoint: a run that was interrupted goes on there, and one with more
splits computes what is new.

    python comparisons/uci_regression.py [--tiny] [--full] [--tables NAME ...] [--splits N] [--checkpoint DIR]
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, mean_over_splits, read_claims
from study import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    Study,
    command_line,
    converged,
    mark_unconverged,
    panels,
    read_table,
    run,
    unconverged_handle,
)

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, unknown_name
from ppl_bnn.datasets.tables import Table
from ppl_bnn.evaluation.grid.result import COSTS, GridResult

# Hidden units by table.
WIDTHS = {"yacht": 50, "energy": 50, "concrete": 50, "power-plant": 50, "protein": 100}
MAP, KRON, LAST = "MAP, stopped early", "Laplace, Kronecker", "Laplace, last layer"
MEAN_FIELD, FULL_RANK = "SVI, mean-field", "SVI, full rank"
ENSEMBLE, SWAG, SAMPLED, NUTS = "deep ensemble", "SWAG", "sampling ensemble", "NUTS"
CHEAP = (MAP, KRON, LAST, MEAN_FIELD, ENSEMBLE)
# The chains of an ensemble have a bias of their own, far above the rounding of the log density.
DTYPE = "float32"
# The share of the training rows on which training is stopped early.
HELD = 0.1
OURS, READ, RECALLED, NO_REFERENCE = "ours", "read", "recalled", "no reference"
DROPOUT, PBP, THEIR_ENSEMBLE = "MC dropout", "PBP", "deep ensembles"
# (RMSE, its standard error, log likelihood, its standard error), from the logs of the authors' repository, commit
# 6eb4497628d1 of yaringal/DropoutUncertaintyExps; `published/uci_mc_dropout.csv` has them split by split.
READ_DROPOUT = {
    "yacht": (0.666, 0.049, -1.250, 0.015),
    "energy": (0.539, 0.014, -1.212, 0.005),
    "concrete": (4.826, 0.161, -2.937, 0.025),
    "power-plant": (4.014, 0.037, -2.808, 0.009),
    "protein": (4.274, 0.021, -2.871, 0.001),
}
# Log likelihoods.
RECALLED_LOG_SCORES = {
    PBP: {"yacht": -1.634, "energy": -2.042, "concrete": -3.161, "power-plant": -2.837},
    THEIR_ENSEMBLE: {"yacht": -1.18, "energy": -1.38, "concrete": -3.06, "power-plant": -2.79},
}
GAPS = ("gap_mean", "gap_sd_ratio", "gap_mean_floor", "gap_sd_floor")
# What a row of the table of scores takes from that of a grid.
COLUMNS = (
    "splits", "failures", "log_score", "log_score_se", "rmse", "rmse_se", "log_score_to_best", "log_score_to_best_se",
    "crps", "coverage_90", "width_90", "r_hat", "ess_min", "k_hat", "gradient_evaluations", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    tables: which. splits: the first so many of a table of at most `small` rows, large_splits: of a larger one, which
    has the methods `on_large` (None: all but NUTS) and mini-batches of `batch` rows in SVI. width: in place of those of
    the protocol. members: of the deep ensemble. chains: of the sampling ensemble, each of `draws` draws that are
    `thinning` steps apart, after `warmup` stretches of as many.
    nuts_draws: of each chain of NUTS; nuts_longer: of which tables more, namely where chains nearly agree after so
    many, so that more of them may make a reference.
    """

    tables: tuple[str, ...] = ("yacht", "energy", "concrete", "power-plant")
    splits: int = 3
    large_splits: int = 3
    small: int = 2000
    on_large: tuple[str, ...] | None = CHEAP
    width: int | None = None
    rows: int | None = None
    steps: int = 20_000
    svi_steps: int = 20_000
    svi_rate: float = 0.01
    full_rank_rate: float = 0.003
    batch: int = 500
    members: int = 5
    collections: int = 100
    chains: int = 8
    warmup: int = 2000
    draws: int = 200
    thinning: int = 20
    nuts_chains: int = 4
    nuts_draws: int = 300
    nuts_longer: tuple[tuple[str, int], ...] = (("concrete", 1000),)
    nuts_depth: int = 9


STORED = Sizes()
FULL = replace(
    STORED, tables=tuple(WIDTHS), splits=20, large_splits=20, on_large=None, nuts_draws=1000, nuts_depth=10
)
TINY = Sizes(
    tables=("diabetes",),
    splits=2,
    width=3,
    rows=50,
    steps=200,
    svi_steps=200,
    members=2,
    collections=20,
    chains=2,
    warmup=20,
    draws=20,
    thinning=5,
    nuts_chains=2,
    nuts_draws=20,
    nuts_depth=5,
)


# --- what is fitted, and how --------------------------------------------------------------------------


def network(width: int) -> Any:
    """The model of all methods: one hidden layer of ReLU, weights N(0, 1 / fan-in), noise that is inferred."""
    return bnn.zoo.load("regression_mlp", width=width, activation="relu")


def early(sizes: Sizes, dtype: str = "auto") -> Any:
    """A network trained until rows held out are predicted best: on the way to a mode."""
    return bnn.MAP(steps=sizes.steps, validation=HELD, polish=False, dtype=dtype)


def laplace(sizes: Sizes, **settings: Any) -> Any:
    """The Gaussian about such a point, with the noise that has the largest evidence."""
    return bnn.Laplace(start=early(sizes), optimise=False, noise="evidence", **settings)


def sampling_ensemble(sizes: Sizes) -> Any:
    """Chains of microcanonical Langevin dynamics, each from a network of its own, whose draws count alike."""
    member = bnn.MCLMC(
        start=early(sizes, DTYPE),
        chains=1,
        warmup=sizes.warmup,
        draws=sizes.draws,
        thinning=sizes.thinning,
        dtype=DTYPE,
    )
    # A chain whose tuning collapses is left out, and a note of the cell says so.
    return bnn.Ensemble(member, size=sizes.chains, tolerate=sizes.chains // 4)


def reference(sizes: Sizes) -> Any:
    """NUTS; its chains begin at networks of their own, so that R-hat can tell of modes."""
    return bnn.NUTS(
        chains=sizes.nuts_chains,
        warmup=sizes.nuts_draws,
        draws=sizes.nuts_draws,
        max_tree_depth=sizes.nuts_depth,
        start=early(sizes),
    )


def mean_field(sizes: Sizes, batch: int | None = None) -> Any:
    return bnn.SVI(
        guide="diagonal",
        estimator="local",
        divergence="analytic",
        steps=sizes.svi_steps,
        learning_rate=sizes.svi_rate,
        batch_size=batch,
    )


def with_longer(sizes: Sizes, name: str) -> Sizes:
    """The sizes of one table: with more draws of NUTS where `nuts_longer` says so."""
    return replace(sizes, nuts_draws=max(sizes.nuts_draws, dict(sizes.nuts_longer).get(name, 0)))


def methods(sizes: Sizes, rows: int) -> dict[str, Any]:
    """The methods of a table of so many rows, by their labels."""
    large = rows > sizes.small
    batch = sizes.batch if large else None
    found = {
        MAP: early(sizes),
        KRON: laplace(sizes, structure="kron"),
        LAST: laplace(sizes, weights="last_layer"),
        MEAN_FIELD: mean_field(sizes, batch),
        FULL_RANK: bnn.SVI(
            guide="fullrank", steps=sizes.svi_steps, learning_rate=sizes.full_rank_rate, batch_size=batch
        ),
        ENSEMBLE: bnn.Ensemble(early(sizes), size=sizes.members),
        SWAG: bnn.SWAG(start=early(sizes), collections=sizes.collections),
        SAMPLED: sampling_ensemble(sizes),
        NUTS: reference(sizes),
    }
    if large:
        kept = tuple(name for name in found if name != NUTS) if sizes.on_large is None else sizes.on_large
        found = {name: found[name] for name in kept}
    return found


def load(name: str, rows: int | None = None) -> Table:
    """The table, or as many of its first rows: then without published splits, which are of all."""
    table = bnn.data.load(name)
    return table if rows is None else replace(table, x=table.x[:rows], y=table.y[:rows], splits=None)


def splits_of(sizes: Sizes, table: Table) -> str:
    """The first splits that the literature uses, as many as are asked for or there are; else random ones."""
    count = sizes.splits if len(table.y) <= sizes.small else sizes.large_splits
    if table.splits is None:
        return f"random:{count}@0.9"
    return f"published:{min(count, len(table.splits.train))}"


def run_grid(
    study: Study, table: Table, grid: Any, folder: Path, jobs: int | None, engine: str = "local"
) -> GridResult:
    """Compute what the folder does not have, and say how much that was."""
    count = len(grid.cells)
    study.say(f"{table.name}: {count} cells in {folder}")
    result = grid.run(folder, engine=engine, jobs=None if engine == "sequential" else jobs)
    study.say(f"{table.name}: {len(result.cells)} of {count} cells, {result.failures} failed")
    return result


# --- tables -------------------------------------------------------------------------------------------


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Blanks in place of numbers that there are none of."""
    return {
        name: "" if isinstance(value, float | np.floating) and math.isnan(value) else value
        for name, value in row.items()
    }


def cell_rows(result: GridResult, shared: bool) -> list[dict[str, Any]]:
    """A row for each cell; gaps where NUTS has converged alone, as anything else is no reference.

    shared: without what tells of the machine, which had other work.
    """
    left_out = {"model", "key", "reference", "begun", "process", *(COSTS if shared else ())}
    frame: Any = result.cells.drop(columns=[name for name in result.cells.columns if name in left_out])
    rows = [plain(row) for row in frame.to_dict("records")]
    good = converged_splits(rows)
    for row in rows:
        if (row["data"], row["split"]) not in good:
            row |= dict.fromkeys(GAPS, "")
    return rows


def failures(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which cells gave no posterior, and why."""
    return [f"{cell['split']}, {cell['method']}: {cell['failure']}" for cell in cells if cell["failure"]]


def converged_splits(cells: Sequence[Mapping[str, Any]], method: str = NUTS) -> set[tuple[str, str]]:
    """(data, split) of the cells whose chains have converged in function space."""
    return {
        (cell["data"], cell["split"])
        for cell in cells
        if cell["method"] == method and cell.get("converged") == "yes" and not cell.get("failure")
    }


def gap_of(cells: Sequence[Mapping[str, Any]], data: str, method: str) -> dict[str, Any]:
    """Distance to NUTS, the mean over the splits on which that has converged, and how many these are of how many."""
    good = converged_splits(cells)
    asked = [cell for cell in cells if cell["data"] == data and cell["method"] == NUTS]
    own = [
        cell
        for cell in cells
        if cell["method"] == method and cell["data"] == data and (data, cell["split"]) in good
    ]
    if not good & {(data, cell["split"]) for cell in asked}:
        return {"reference": NO_REFERENCE}
    row: dict[str, Any] = {"reference": f"NUTS on {len(own)} of {len(asked)} splits"}
    if method == NUTS:
        return row
    for name in GAPS:
        values = [cell[name] for cell in own if cell[name] != ""]
        row[name] = float(np.mean(values)) if values else ""
    return row


def score_rows(
    result: GridResult, cells: Sequence[Mapping[str, Any]], data: str, shared: bool
) -> list[dict[str, Any]]:
    """A row for each method: means over splits with errors sd / sqrt(J), and the corrected ones beside them."""
    frames: list[Any] = [result.table(corrected=way).reset_index() for way in (False, True)]
    table, corrected = (frame.to_dict("records") for frame in frames)
    rows = []
    for row, other in zip(table, corrected, strict=True):
        name = row["method"]
        found = {"data": data, "method": name, "status": OURS}
        found |= {column: row[column] for column in COLUMNS if column in row}
        for score in ("log_score", "rmse"):
            found[f"{score}_se_corrected"] = other.get(f"{score}_se", "")
        if shared:
            found.pop("seconds", None)
        own = [cell for cell in cells if cell["method"] == name and cell["data"] == data]
        found["converged"] = ", ".join(
            f"{word}: {count}"
            for word in ("yes", "no", "per mode", "in doubt")
            if (count := sum(cell["converged"] == word for cell in own))
        )
        rows.append(plain(found | gap_of(cells, data, name)))
    return rows


def published_dropout() -> list[dict[str, Any]]:
    """Test log likelihood and RMSE of the published MC dropout, a row for each table and standard split."""
    return read_table(Path(__file__).parent / "published" / "uci_mc_dropout.csv")


def published_rows(tables: Sequence[str]) -> list[dict[str, Any]]:
    """What others have published on these tables."""
    rows: list[dict[str, Any]] = []
    for data in tables:
        if data in READ_DROPOUT:
            rmse, rmse_se, log_score, log_score_se = READ_DROPOUT[data]
            count = 5 if data == "protein" else 20
            row = {"data": data, "method": DROPOUT, "status": READ, "splits": count, "log_score": log_score}
            rows.append(row | {"log_score_se": log_score_se, "rmse": rmse, "rmse_se": rmse_se})
        rows += [
            {"data": data, "method": name, "status": RECALLED, "log_score": values[data]}
            for name, values in RECALLED_LOG_SCORES.items()
            if data in values
        ]
    return rows


# --- verdicts -----------------------------------------------------------------------------------------


# What the column gradient_evaluations holds; a method's own start is counted by chains alone.
GRADIENTS = "of Laplace and SWAG without the training of their start, of chains with it"


def by_split(cells: Sequence[Mapping[str, Any]], data: str, column: str) -> dict[str, dict[int, float]]:
    """method -> split -> score, of the methods that came through on every split of a table."""
    own = [cell for cell in cells if cell["data"] == data]
    found: dict[str, dict[int, float]] = {}
    for cell in own:
        if column in cell:
            found.setdefault(cell["method"], {})[split_number(cell["split"])] = cell[column]
    count = len({cell["split"] for cell in own})
    return {method: scores for method, scores in found.items() if len(scores) == count}


def split_number(name: str) -> int:
    """The k of "published[k]"."""
    return int(name.rpartition("[")[2].rstrip("]"))


def best_elsewhere(scores: Mapping[str, Mapping[int, float]], split: int) -> str:
    """The method with the best mean log score over the other splits, so that a split does not choose for itself."""

    def elsewhere(method: str) -> float:
        return float(np.mean([value for k, value in scores[method].items() if k != split]))

    return max(scores, key=elsewhere)


def rows_of(cells: Sequence[Mapping[str, Any]], data: str) -> tuple[float, float]:
    """Numbers of test and training rows of a split."""
    own = [cell for cell in cells if cell["data"] == data]
    return own[0]["test_rows"], own[0]["train_rows"]


def judge_dropout(referee: Referee, cells: Sequence[Mapping[str, Any]], data: str) -> None:
    """The best method here beside MC dropout, split by split."""
    keys = [f"{data}-dropout-{score}" for score in ("log_score", "rmse")]
    scores, errors = (by_split(cells, data, score) for score in ("log_score", "rmse"))
    splits = sorted(next(iter(scores.values()), {}))
    if len(splits) < 2:
        for key in keys:
            referee.not_run(key, "not in this run; --full runs all tables and splits")
        return
    published = {row["split"]: row for row in published_dropout() if row["data"] == data}
    chosen = {split: best_elsewhere(scores, split) for split in splits}
    gains = [scores[chosen[k]][k] - published[k]["log_likelihood"] for k in splits]
    shares = [1.0 - errors[chosen[k]][k] / published[k]["rmse"] for k in splits]
    names = ", ".join(chosen[split] for split in splits)
    text = f"chosen on the other splits: {names}; MC dropout was tuned on a validation part"
    for key, values in zip(keys, (gains, shares), strict=True):
        referee.measured(key, mean_over_splits(values, *rows_of(cells, data)), text)


def judge_recalled(
    referee: Referee, cells: Sequence[Mapping[str, Any]], method: str, published: str, name: str
) -> None:
    """A method beside a published mean that is recalled: its splits are not known, so nothing is paired."""
    for data, wanted in RECALLED_LOG_SCORES[published].items():
        own = by_split(cells, data, "log_score").get(method, {})
        if len(own) < 2:
            referee.not_run(f"{data}-{name}", "not in this run; --full runs all tables and splits")
            continue
        values = np.array(list(own.values())) - wanted
        text = f"published {wanted:.3f}, its own error not known"
        referee.measured(f"{data}-{name}", mean_over_splits(values, *rows_of(cells, data)), text)


def judge_reference(referee: Referee, cells: Sequence[Mapping[str, Any]], data: str) -> None:
    """Whether NUTS converged in function space on every split of a table."""
    own = [cell for cell in cells if cell["data"] == data and cell["method"] == NUTS]
    if not own:
        referee.not_run(f"{data}-reference", "NUTS is not in this run")
        return
    good = sum((data, cell["split"]) in converged_splits(own) for cell in own)
    rhats = [cell["r_hat"] for cell in own if cell.get("r_hat")]
    worst = f"; R-hat of f at most {max(rhats):.3f}" if rhats else ""
    referee.measured(f"{data}-reference", exact(good / len(own)), f"{good} of {len(own)} splits{worst}")


def judge_narrow(referee: Referee, cells: Sequence[Mapping[str, Any]]) -> None:
    """The standard deviation of f by mean-field SVI beside that by NUTS, where NUTS converged."""
    good = converged_splits(cells)
    logs = [
        math.log(cell["gap_sd_ratio"])
        for cell in cells
        if cell["method"] == MEAN_FIELD and (cell["data"], cell["split"]) in good and cell.get("gap_sd_ratio")
    ]
    (data,) = {cell["data"] for cell in cells if (cell["data"], cell["split"]) in good} or {""}
    if not logs:
        referee.undecided("narrow", f"{NO_REFERENCE}: NUTS converged on no split")
        return
    ratio = math.exp(float(np.mean(logs)))
    text = (
        f"{data}: geometric mean of the ratio {ratio:.3f} over the {len(logs)} splits on which NUTS converged"
    )
    referee.measured(
        "narrow",
        mean_over_splits(logs, *rows_of(cells, data)),
        text,
        converged=False,
        why_not="convergence is known at training rows only, and the claim is about test rows",
    )


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    cells = study.tables["cells"]
    referee = Referee(
        read_claims("uci_regression"),
        f"{study.sizes.splits} of 20 splits; the source: 20, and settings chosen on a validation part",
    )
    for data in READ_DROPOUT:
        judge_dropout(referee, cells, data)
    judge_recalled(referee, cells, ENSEMBLE, THEIR_ENSEMBLE, "ensemble")
    judge_recalled(referee, cells, MEAN_FIELD, PBP, "mean-field")
    for data in ("yacht", "energy", "concrete"):
        judge_reference(referee, cells, data)
    judge_narrow(referee, cells)
    return referee.verdicts()


# --- figures ------------------------------------------------------------------------------------------

# The methods from above: modes, Gaussians, ensembles, chains.
ORDER = (MAP, KRON, LAST, SWAG, MEAN_FIELD, FULL_RANK, ENSEMBLE, SAMPLED, NUTS)


def disagrees(cell: Mapping[str, Any]) -> bool:
    """Whether a cell is of chains that have not converged in function space, by the smallest ESS of bulk and tail."""
    rhat = cell.get("r_hat", "")
    return rhat != "" and not converged(rhat, cell.get("ess_min") or 0.0)


def draw_strip(
    panel: Any,
    place: float,
    cells: Sequence[Mapping[str, Any]],
    values: Sequence[float],
    faint: Sequence[bool],
) -> None:
    """A line of points at the height `place`, one for each cell, a bar at their mean, and crosses on chains that have
    not converged. faint: which points are drawn in grey.
    """
    at = place + 0.16 * np.linspace(-1.0, 1.0, len(cells)) * (len(cells) > 1)
    for shade, colour in ((True, GREY), (False, BLUE)):
        own = [index for index, each in enumerate(faint) if each == shade]
        panel.plot(
            [values[index] for index in own],
            at[own],
            "o",
            color=colour,
            markersize=7,
            alpha=0.85,
            linewidth=0,
        )
    panel.plot([np.mean(values)] * 2, [place - 0.33, place + 0.33], color=BLACK, linewidth=1.6, zorder=3)
    crossed = [index for index, cell in enumerate(cells) if disagrees(cell)]
    if crossed:
        mark_unconverged(panel, [values[index] for index in crossed], at[crossed], size=5.5)


def method_rows(axes: Any, names: Sequence[str]) -> None:
    """Rows of methods from above, named at the left panel alone, and faint lines between them."""
    for column, panel in enumerate(axes):
        panel.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
        panel.tick_params(axis="y", length=0)
        panel.set_ylim(len(names) - 0.5, -0.5)
        for edge in range(1, len(names)):
            panel.axhline(edge - 0.5, color="0.9", linewidth=0.8, zorder=0)


def draw_scores(
    path: Path, rows: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]], tables: Sequence[str]
) -> None:
    """Log score and RMSE of each split by method, a column for each table; the band and the lines are published."""
    names = [name for name in ORDER if any(cell["method"] == name for cell in cells)]
    figure, axes = panels(2.2 + 2.0 * len(tables), 7.2, columns=len(tables), rows=2)
    published: dict[str, Any] = {}
    for column, data in enumerate(tables):
        of_table = {row["method"]: row for row in rows if row["data"] == data}
        for line, (score, label) in enumerate(
            (
                ("log_score", "log score, nats per row\n(better to the right)"),
                ("rmse", "RMSE\n(better to the left)"),
            )
        ):
            panel = axes[line, column]
            for place, name in enumerate(names):
                own = [
                    cell
                    for cell in cells
                    if cell["data"] == data and cell["method"] == name and cell.get(score, "") != ""
                ]
                if own:
                    draw_strip(panel, place, own, [cell[score] for cell in own], [False] * len(own))
                else:
                    panel.text(
                        0.5, place, "not run", transform=panel.get_yaxis_transform(), color=GREY, ha="center",
                        va="center", fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
                    )  # fmt: skip
            published |= _draw_published(panel, of_table, score)
            panel.set_xlabel(label, fontsize=9)
            panel.tick_params(axis="x", labelsize=8)
            panel.locator_params(axis="x", nbins=4)
            if line == 0:
                panel.set_title(data, fontsize=11)
    for line in axes:
        method_rows(line, names)
    figure.legend(
        handles=[*points_of_splits(), *published.values()],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path)


def points_of_splits(split: str = "one split") -> list[Any]:
    """What points, bars and crosses are, for a legend."""
    from matplotlib.lines import Line2D

    point = Line2D([], [], linestyle="none", marker="o", color=BLUE, markersize=7, label=split)
    bar = Line2D([], [], linestyle="none", marker="|", color=BLACK, markersize=11, label="mean over splits")
    return [point, bar, unconverged_handle()]


def _draw_published(panel: Any, own: Mapping[str, Mapping[str, Any]], score: str) -> dict[str, Any]:
    """The published means on one panel, by the text of a legend."""
    found: dict[str, Any] = {}
    if DROPOUT in own:
        mean, error = own[DROPOUT][score], own[DROPOUT][f"{score}_se"]
        text = f"{DROPOUT}, all splits, published, +- 2 s.e."
        found[text] = panel.axvspan(
            mean - 2 * error, mean + 2 * error, color=ORANGE, alpha=0.4, linewidth=0, zorder=0, label=text
        )
    for name, line in ((PBP, "dotted"), (THEIR_ENSEMBLE, "dashed")):
        if own.get(name, {}).get(score, "") != "":
            text = f"{name}, published ({RECALLED}, not verified)"
            found[text] = panel.axvline(
                own[name][score], color=GREY, linestyle=line, linewidth=1.2, zorder=1, label=text
            )
    return found


def draw(study: Study) -> None:
    """The figure, from the tables."""
    cells = study.tables["cells"]
    found = list(dict.fromkeys(cell["data"] for cell in cells))
    draw_scores(study.out / "scores.png", study.tables["scores"], cells, found)


# --- all of it ----------------------------------------------------------------------------------------


def chosen(tables: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...] | None:
    """The tables that were named; raises UnknownNameError for one that is none of the study's."""
    for name in tables or ():
        if name not in known:
            raise unknown_name("table", name, known)
    return tuple(tables) if tables else None


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    full: bool = False,
    tables: Sequence[str] | None = None,
    splits: int | None = None,
    checkpoint: str | Path | None = None,
    jobs: int = 1,
    shared: bool = False,
    device: str = "auto",
) -> Study:
    """Run the study and write tables, figures and verdicts to `out`; see `Study.begin` for where that is.

    full: all tables and splits; by default what two cores can do. tables, splits: others than these. checkpoint: a
    folder with a grid for each table, in which an interrupted run goes on. jobs: cells at once. shared: others compute
    on this machine meanwhile, so that seconds and memory are left out. device: "auto", "cpu" or "cuda[:i]".
    """
    if splits is not None and splits < 2:
        raise InputError.of("splits", "two at least, for a standard error", repr(splits), "splits=3")
    sizes = TINY if tiny else FULL if full else STORED
    asked = chosen(tables, sizes.tables if tiny else tuple(WIDTHS)) or sizes.tables
    sizes = replace(sizes, tables=asked)
    if splits is not None:
        sizes = replace(sizes, splits=splits, large_splits=splits)
    study = Study.begin(sizes, "uci_regression", tiny, out)
    rows: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(checkpoint or stack.enter_context(tempfile.TemporaryDirectory(prefix="uci_")))
        for name in sizes.tables:
            table = load(name, sizes.rows)
            used = methods(with_longer(sizes, name), len(table.y))
            width = WIDTHS[name] if sizes.width is None else sizes.width
            grid = bnn.Grid(
                models={f"{width} ReLU": network(width)},
                data={name: table},
                methods=used,
                splits=splits_of(sizes, table),
                reference=NUTS if NUTS in used else None,
                device=device,
            )
            engine = "sequential" if tiny else "local"
            result = run_grid(study, table, grid, folder / name, jobs, engine)
            own = cell_rows(result, shared)
            cells += own
            rows += score_rows(result, own, name, shared)
            study.numbers[name] = {
                "rows": len(table.y),
                "inputs": table.x.shape[1],
                "width": width,
                "methods": {label: repr(method) for label, method in used.items()},
                "failures": failures(own),
            }
    study.numbers["gradient_evaluations"] = GRADIENTS
    study.numbers["seconds are of a machine with other work, and left out"] = shared
    everything = (*sizes.tables, *(name for name in WIDTHS if name not in sizes.tables and not tiny))
    study.tables = {"scores": [*rows, *published_rows(everything)], "cells": cells}
    draw(study)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "splits", "shared", "figures")
    parser.add_argument("--full", action="store_true", help="all tables and splits, for a larger machine")
    parser.add_argument("--tables", nargs="+", help=f"of {', '.join(WIDTHS)}")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:i]")
    run(parser, main, "uci_regression", STORED, draw)
