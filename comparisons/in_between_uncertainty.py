"""In-between uncertainty: what methods claim to know in a gap between their training rows.

Source: A. Y. K. Foong, Y. Li, J. M. Hernandez-Lobato and R. E. Turner (2019), "In-between uncertainty in Bayesian
neural networks". For each input of a table the rows are sorted by it, the middle third is tested on and the two outer
thirds are trained on: one split per input, and mean and standard error over inputs. Rows of equal value keep the order
of the table. Where an input takes few values the thirds share some, so that there is no gap in it: the column `tied` is
the share of test rows whose value of that input is among the training rows', and every claim is also looked at on the
splits where it is small.

The model is that of `uci_regression.py`: one hidden layer of 50 ReLU, weights N(0, 1 / fan-in), noise that is inferred,
on standardised inputs and targets; training stops early there, for the reason given there. Laplace has the full
Gauss-Newton matrix at such a point, and the noise of the largest evidence; its draws are put through the network
("sampled"), or through the linearised network, of which it is the posterior. MCMC is an ensemble of chains of
microcanonical Langevin dynamics, and NUTS, which is a reference on those splits where it converged in function space;
on concrete, where after few draws its chains nearly agree, it has more of them. The column gradient_evaluations leaves
out, for Laplace, the training of that point; chains count that of their start.

What the source says (recalled, not verified): mean-field variational inference is over-confident in the gap, sampled
Laplace under-fits, linearised Laplace and MCMC do well. Beside the tables, a curve under a wider prior and with known
noise: rows at both ends of an interval, and the standard deviation of f in the middle of it, over that of NUTS.

    python comparisons/in_between_uncertainty.py [--tiny] [--out DIR] [--tables NAME ...] [--checkpoint DIR] [--jobs N]
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, mean_over_splits, read_claims
from study import BLACK, BLUE, GREY, RHAT, SKY, VERMILION, Study, command_line, converged, kept, panels, run
from uci_regression import (
    MAP,
    MEAN_FIELD,
    NO_REFERENCE,
    NUTS,
    SAMPLED,
    cell_rows,
    chosen,
    converged_splits,
    draw_strip,
    early,
    failures,
    judge_reference,
    laplace,
    load,
    mean_field,
    method_rows,
    network,
    points_of_splits,
    reference,
    rows_of,
    run_grid,
    sampling_ensemble,
    score_rows,
    with_longer,
)
from uci_regression import Sizes as UCISizes

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.datasets.tables import Splits, Table
from ppl_bnn.diagnostics.function_space import convergence

LINEARISED, THROUGH = "Laplace, linearised", "Laplace, sampled"
TABLES = ("yacht", "energy", "concrete")
# The share of tied test rows up to which a split is said to have a gap.
MOST_TIED = 0.2
LEVEL = 0.9
# Rows of the curve lie in these two intervals, and so does none between.
LEFT, RIGHT = (-1.0, -0.7), (0.5, 1.0)
NOISE = 0.1
# Under standard deviations of 1 functions are so smooth that the curve would be taken for noise.
SIGMA = 4.0


@dataclass(frozen=True)
class Sizes(UCISizes):
    """Those of `uci_regression.py`, of which the splits have no meaning here. inputs: the first so many of each table.
    curve_rows: of the curve; curve_draws: of each chain of NUTS on it; curve: at how many inputs it is drawn.
    """

    tables: tuple[str, ...] = TABLES
    inputs: int | None = None
    nuts_draws: int = 250
    nuts_depth: int = 9
    curve_rows: int = 60
    curve_draws: int = 1000
    curve: int = 121


FULL = Sizes()
TINY = Sizes(
    tables=("diabetes",),
    inputs=2,
    rows=45,
    width=3,
    steps=200,
    svi_steps=200,
    chains=2,
    warmup=100,
    draws=20,
    thinning=5,
    nuts_chains=2,
    nuts_draws=20,
    nuts_depth=5,
    curve_rows=20,
    curve_draws=20,
    curve=31,
)


# --- splits and methods -------------------------------------------------------------------------------


def gaps(x: np.ndarray) -> tuple[Splits, np.ndarray]:
    """The splits of x (N, D), one per input: the middle third of the rows, sorted by it, is the test part.

    Rows [N / 3, 2 N / 3) in sorted order, both ends rounded down; equal values keep their order. And `tied` (D,): the
    share of the test rows whose value of that input a training row has, too.
    """
    rows = len(x)
    first, last = rows // 3, 2 * rows // 3
    order = np.argsort(x, axis=0, kind="stable").T
    test, train = order[:, first:last], np.concatenate([order[:, :first], order[:, last:]], axis=1)
    tied = [np.isin(x[test[d], d], x[train[d], d]).mean() for d in range(x.shape[1])]
    return Splits(train, test), np.array(tied)


def methods(sizes: Sizes) -> dict[str, Any]:
    return {
        MAP: early(sizes),
        MEAN_FIELD: mean_field(sizes),
        THROUGH: laplace(sizes, predictive="sampled"),
        LINEARISED: laplace(sizes),
        SAMPLED: sampling_ensemble(sizes),
        NUTS: reference(sizes),
    }


# --- the curve ----------------------------------------------------------------------------------------


def curve_data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """x (N, 1), half of it in either interval, and y = cos(4 x + 0.8) + e, e ~ N(0, NOISE^2)."""
    rng = np.random.default_rng(0)
    half = rows // 2
    x = np.concatenate([rng.uniform(*LEFT, size=half), rng.uniform(*RIGHT, size=rows - half)])
    return x[:, None], np.cos(4.0 * x + 0.8) + NOISE * rng.normal(size=rows)


def known_noise(x: Any, y: Any = None, *, width: int = 50) -> None:
    """One hidden layer of ReLU, weights N(0, SIGMA^2 / fan-in), biases N(0, SIGMA^2), and the noise of the curve."""
    f = bnn.mlp(x, [width, 1], "relu", priors.Normal(0.0, "fan_in", SIGMA))
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


def curve_of(sizes: Sizes, label: str, method: Any, device: str) -> dict[str, Any]:
    """Mean and standard deviation of f along the curve by one method, and whether its chains converged."""
    x, y = curve_data(sizes.curve_rows)
    grid = np.linspace(LEFT[0] - 0.3, RIGHT[1] + 0.3, sizes.curve)
    model = partial(known_noise, width=50 if sizes.width is None else sizes.width)
    if isinstance(method, bnn.Laplace):
        method = replace(method, noise="gaussian")
    if label == NUTS:
        method = replace(method, warmup=sizes.curve_draws, draws=sizes.curve_draws)
    posterior = bnn.fit(model, x, y, method, seed=0, device=device)
    prediction = posterior.predict(grid[:, None], device=device)
    found: dict[str, Any] = {
        "x": grid,
        "mean": prediction.mean,
        "sd": np.sqrt(prediction.mean_function_variance),
        "verdict": "",
    }
    if label == NUTS:
        found["verdict"] = bnn.diagnose(posterior).verdict
        in_gap = convergence(posterior, grid[(grid > LEFT[1]) & (grid < RIGHT[0])][:, None]).quantities["f"]
        found |= {"gap_rhat": in_gap.rhat, "gap_ess_bulk": in_gap.ess_bulk}
    return found


def curve_rows(curves: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The standard deviation of f in the middle of the gap and amid the rows, by method, and over that of NUTS.

    The middle: a fifth of the gap about its centre. Amid the rows: both intervals. Means over inputs. Without the
    second where NUTS did not converge.
    """
    centre, width = 0.5 * (LEFT[1] + RIGHT[0]), RIGHT[0] - LEFT[1]
    rows: list[dict[str, Any]] = []
    good = curves[NUTS]["verdict"] == "converged"

    def sds(name: str) -> tuple[float, float]:
        x, sd = curves[name]["x"], curves[name]["sd"]
        amid = ((x >= LEFT[0]) & (x <= LEFT[1])) | ((x >= RIGHT[0]) & (x <= RIGHT[1]))
        return float(sd[np.abs(x - centre) <= 0.1 * width].mean()), float(sd[amid].mean())

    of_gap, of_rows = sds(NUTS)
    for name in curves:
        in_gap, amid = sds(name)
        row: dict[str, Any] = {"method": name, "sd_in_gap": in_gap, "sd_amid_rows": amid}
        row["reference"] = curves[NUTS]["verdict"] if good else f"{NO_REFERENCE}: {curves[NUTS]['verdict']}"
        if good:
            row |= {"in_gap_to_nuts": in_gap / of_gap, "amid_rows_to_nuts": amid / of_rows}
        row |= {key: curves[name][key] for key in ("gap_rhat", "gap_ess_bulk") if key in curves[name]}
        rows.append(row)
    return rows


# --- verdicts -----------------------------------------------------------------------------------------


def column(cells: Sequence[Mapping[str, Any]], method: str, name: str) -> dict[tuple[str, str], float]:
    """One figure of one method, by (table, split); failed cells and blanks are left out."""
    return {
        (cell["data"], cell["split"]): cell[name]
        for cell in cells
        if cell["method"] == method and not cell.get("failure") and cell.get(name, "") != ""
    }


def differences(
    cells: Sequence[Mapping[str, Any]], name: str, first: str, second: str, logarithm: bool = False
) -> np.ndarray:
    """first - second of a figure (of its logarithm), split by split, where both have it."""
    one, other = column(cells, first, name), column(cells, second, name)
    change = np.log if logarithm else np.asarray
    both = [key for key in one if key in other]
    return change(np.array([one[key] for key in both])) - change(np.array([other[key] for key in both]))


def with_gap(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cells of splits whose thirds share few values."""
    return [cell for cell in cells if cell["tied"] <= MOST_TIED]


def part_of(cells: Sequence[Mapping[str, Any]], table: str) -> list[Mapping[str, Any]]:
    """The cells of one table."""
    return [cell for cell in cells if cell["data"] == table]


def over_confident(cells: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """By how much intervals of mean-field SVI hold too few rows, split by split."""
    return LEVEL - np.array(list(column(cells, MEAN_FIELD, "coverage_90").values()))


def under_fits(cells: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The RMSE of the same Gaussian through the network over that through the linearised one, as a logarithm."""
    return differences(cells, "rmse", THROUGH, LINEARISED, logarithm=True)


def does_well(cells: Sequence[Mapping[str, Any]], method: str) -> np.ndarray:
    """The log score of a method minus that of mean-field SVI."""
    return differences(cells, "log_score", method, MEAN_FIELD)


QUANTITIES: dict[str, Callable[[Sequence[Mapping[str, Any]]], np.ndarray]] = {
    "over-confident": over_confident,
    "under-fits": under_fits,
    "linearised": partial(does_well, method=LINEARISED),
    "mcmc": partial(does_well, method=SAMPLED),
}


def judge_table(referee: Referee, cells: Sequence[Mapping[str, Any]], table: str) -> None:
    """The claims of the source on one table."""
    own = part_of(cells, table)
    for name, quantity in QUANTITIES.items():
        values = quantity(own)
        if len(values) < 2:
            referee.not_run(f"{table}-{name}", "not in this run")
            continue
        with_gaps = quantity(with_gap(own))
        where = f", {with_gaps.mean():+.3f} on the {len(with_gaps)} that have a gap" if len(with_gaps) else ""
        text = f"above zero on {np.count_nonzero(values > 0)} of {len(values)} splits{where}"
        more: dict[str, Any] = {}
        if name == "mcmc":
            rhats = list(column(own, SAMPLED, "r_hat").values())
            more = {
                "converged": bool(rhats) and max(rhats) < RHAT,
                "why_not": f"R-hat of what the members of the {SAMPLED} predict: median {np.median(rhats):.2f}"
                if rhats
                else "no R-hat is stored",
            }
        referee.measured(f"{table}-{name}", mean_over_splits(values, *rows_of(own, table)), text, **more)


# A spread below so much of that of NUTS is lost.
KEEPS = 0.8


def judge_curve(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """Where mean-field SVI has less than KEEPS of the spread of NUTS."""
    own = {row["method"]: row for row in rows}
    for key, column_name, place in (
        ("curve-gap", "in_gap_to_nuts", "sd_in_gap"),
        ("curve-rows", "amid_rows_to_nuts", "sd_amid_rows"),
    ):
        ratio = own[MEAN_FIELD].get(column_name)
        if ratio is None:
            each = ", ".join(f"{name} {row[place]:.3f}" for name, row in own.items())
            referee.undecided(key, f"{own[MEAN_FIELD]['reference']}; standard deviations: {each}")
            continue
        each = ", ".join(
            f"{name} {row[column_name]:.2f}"
            for name, row in own.items()
            if name not in (NUTS, MAP, MEAN_FIELD)
        )
        nuts = own[NUTS]
        more: dict[str, Any] = {"converged": own[NUTS]["reference"] == "converged", "why_not": ""}
        if key == "curve-gap":
            rhat, ess = nuts.get("gap_rhat", math.inf), nuts.get("gap_ess_bulk", 0.0)
            known = "gap_rhat" in nuts
            figures = f"R-hat in the gap {rhat:.3f}, bulk ESS {ess:.0f}"
            more["why_not"] = figures if known else "R-hat in the gap was not stored"
            more["converged"] = more["converged"] and converged(rhat, ess)
        referee.measured(key, exact(ratio), f"others: {each}", **more)


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    cells = study.tables["cells"]
    sizes = "three tables of the source's; our network and prior are those of uci_regression.py"
    referee = Referee(read_claims("in_between_uncertainty"), sizes)
    for table in TABLES:
        judge_table(referee, cells, table)
        judge_reference(referee, cells, table)
    judge_curve(referee, study.tables["curve"])
    return referee.verdicts()


# --- figures ------------------------------------------------------------------------------------------

COLOURS = {MAP: GREY, MEAN_FIELD: VERMILION, THROUGH: SKY, LINEARISED: BLUE, SAMPLED: BLACK, NUTS: BLACK}
# The methods of the figure of splits, from above; the log score is less that of the first.
SHOWN = (MEAN_FIELD, THROUGH, LINEARISED, SAMPLED, NUTS)


def draw_splits(path: Path, cells: Sequence[Mapping[str, Any]], tables: Sequence[str]) -> None:
    """Log score less that of mean-field SVI, and coverage, of each split by method; grey where the split has no gap."""
    figure, axes = panels(3.2 + 2.3 * len(tables), 6.6, columns=len(tables), rows=2)
    for at, data in enumerate(tables):
        own = part_of(cells, data)
        base = column(own, MEAN_FIELD, "log_score")
        for line, name in enumerate(("coverage_90", "log_score")):
            panel = axes[line, at]
            for place, label in enumerate(SHOWN[line:]):
                found = [cell for cell in own if cell["method"] == label and not cell.get("failure")]
                found = [cell for cell in found if name in cell and (cell["data"], cell["split"]) in base]
                found.sort(key=lambda cell: cell["tied"] > MOST_TIED)
                values = [cell[name] - line * base[cell["data"], cell["split"]] for cell in found]
                if found:
                    draw_strip(panel, place, found, values, [cell["tied"] > MOST_TIED for cell in found])
            panel.axvline((LEVEL, 0.0)[line], color=VERMILION, linewidth=1.2, zorder=1)
            panel.tick_params(axis="x", labelsize=8)
            if line == 0:
                gaps_here = len({cell["split"] for cell in with_gap(own)})
                inputs = len({cell["split"] for cell in own})
                panel.set_title(f"{data}: {gaps_here} of {inputs} splits\nhave a gap", fontsize=11)
                panel.set_xlabel("coverage of 90 % intervals\n(over-confident left of the line)", fontsize=9)
                panel.set_xlim(0.0, 1.03)
            else:
                # One method far below all others would leave no room for these.
                panel.set_xscale("symlog", linthresh=1.0, linscale=0.7)
                low, high = panel.get_xlim()
                wide = max(-low, high) > 1.0
                steps = [10.0**power for power in range(4)] if wide else [0.2, 0.4, 0.6, 0.8]
                ticks = [0.0, *(sign * step for step in steps for sign in (-1.0, 1.0))]
                ticks = sorted(tick for tick in ticks if low <= tick <= high)
                panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
                panel.set_xticks([], minor=True)
                panel.set_xlabel(
                    "log score less that of mean-field\nSVI, nats per row (logarithmic\nbeyond 1; better to the right)",
                    fontsize=9,
                )
    for line, each in enumerate(axes):
        method_rows(each, SHOWN[line:])
    from matplotlib.lines import Line2D

    grey = Line2D([], [], linestyle="none", marker="o", color=GREY, markersize=7, label="split without a gap")
    point, bar, cross = points_of_splits("split with a gap")
    figure.legend(
        handles=[point, grey, bar, cross], loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    figure.savefig(path)


def draw_curves(path: Path, curves: Mapping[str, Mapping[str, Any]], rows: int) -> None:
    """f along the curve, mean and two standard deviations, a panel for each method."""
    x, y = curve_data(rows)
    figure, axes = panels(11.0, 6.4, columns=3, rows=2)
    for panel, (name, found) in zip(axes.ravel(), curves.items(), strict=True):
        grid, mean, sd = found["x"], found["mean"], found["sd"]
        colour = COLOURS[name]
        panel.fill_between(grid, mean - 2.0 * sd, mean + 2.0 * sd, color=colour, alpha=0.25, linewidth=0)
        panel.plot(grid, mean, color=colour)
        panel.plot(grid, np.cos(4.0 * grid + 0.8), color=GREY, linestyle="dotted", label="truth")
        panel.plot(x[:, 0], y, ".", color=BLACK, markersize=3)
        panel.set(title=name, ylim=(-3.2, 3.2), xlabel="x")
    axes[0, 0].legend(frameon=False, fontsize=8)
    for panel in axes[:, 0]:
        panel.set_ylabel("f, with 2 standard deviations")
    figure.savefig(path)


def draw(study: Study) -> None:
    """The figure of the splits, from the table; of the curves no more is stored than `curve.csv`."""
    cells = study.tables["cells"]
    draw_splits(study.out / "splits.png", cells, list(dict.fromkeys(cell["data"] for cell in cells)))


# --- all of it ----------------------------------------------------------------------------------------


def computed(
    study: Study, name: str, folder: Path, jobs: int, shared: bool, device: str, tiny: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the tables of scores and of cells, of one table."""
    sizes: Sizes = study.sizes
    table: Table = load(name, sizes.rows)
    split, tied = gaps(table.x[:, : sizes.inputs])
    table = replace(table, splits=split)
    grid = bnn.Grid(
        models={"network": network(50 if sizes.width is None else sizes.width)},
        data={name: table},
        methods=methods(with_longer(sizes, name)),
        splits="published",
        reference=NUTS,
        device=device,
    )
    result = run_grid(study, table, grid, folder, jobs, "sequential" if tiny else "local")
    of_split = {f"published[{d}]": (table.feature_names[d], float(tied[d])) for d in range(len(tied))}
    cells = [
        {
            "data": cell["data"],
            "input": of_split[cell["split"]][0],
            "tied": of_split[cell["split"]][1],
            **{key: value for key, value in cell.items() if key != "data"},
        }
        for cell in cell_rows(result, shared)
    ]
    study.numbers[name] = {"rows": len(table.y), "inputs": len(tied), "failures": failures(cells)}
    return score_rows(result, cells, name, shared), cells


def settings(sizes: Sizes) -> dict[str, str]:
    """What each method is, and once more for a table where it differs."""
    found = {label: repr(method) for label, method in methods(sizes).items()}
    for name in sizes.tables:
        for label, method in methods(with_longer(sizes, name)).items():
            if repr(method) != found[label]:
                found[f"{label}, on {name}"] = repr(method)
    return found


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    tables: Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
    jobs: int = 1,
    shared: bool = False,
    device: str = "auto",
) -> Study:
    """Run the study and write tables, figures and verdicts to `out`; see `Study.begin` for where that is.

    tables: others than yacht, energy and concrete. checkpoint: a folder with a grid for each table and the curves, in
    which an interrupted run goes on. jobs: cells at once. shared: others compute on this machine meanwhile, so that
    seconds and memory are left out. device: "auto", "cpu" or "cuda[:i]".
    """
    sizes = TINY if tiny else FULL
    sizes = replace(sizes, tables=chosen(tables, sizes.tables) or sizes.tables)
    study = Study.begin(sizes, "in_between_uncertainty", tiny, out)
    rows: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    curves: dict[str, dict[str, Any]] = {}
    used = methods(sizes)
    with ExitStack() as stack:
        folder = Path(checkpoint or stack.enter_context(tempfile.TemporaryDirectory(prefix="gap_")))
        of_curves = replace(sizes, tables=())
        for label, method in used.items():
            curves[label] = kept(
                folder / "curves",
                label.replace(", ", "-").replace(" ", "-"),
                of_curves,
                lambda label=label, method=method: curve_of(sizes, label, method, device),
            )
        study.say("curves drawn")
        for name in sizes.tables:
            more, own = computed(study, name, folder / name, jobs, shared, device, tiny)
            rows += more
            cells += own
    study.numbers["methods"] = settings(sizes)
    study.numbers["seconds are of a machine with other work, and left out"] = shared
    study.numbers["not run at this size"] = [name for name in TABLES if name not in sizes.tables and not tiny]
    study.tables = {"scores": rows, "cells": cells, "curve": curve_rows(curves)}
    draw(study)
    draw_curves(study.out / "curves.png", curves, sizes.curve_rows)
    study.conclude(judge)
    study.say(f"written to {study.out}; NUTS converged on {len(converged_splits(cells))} splits")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "shared", "figures")
    parser.add_argument("--tables", nargs="+", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:i]")
    run(parser, main, "in_between_uncertainty", FULL, draw)
