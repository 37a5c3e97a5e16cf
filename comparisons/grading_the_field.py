"""The methods of the library, and others, graded against the certified reference posteriors.

A reference has thousands of nearly independent draws of a network's outputs at a frozen grid: training rows, test rows,
a gap between the training rows, and inputs far away. So what an approximation loses is measured, and where: the error
of its mean in posterior standard deviations, the ratio of its spread to the posterior's, the distance of its
predictive, and how many independent exact draws it is worth.

Methods run at their defaults in NumPyro, with one seed: all but Laplace by a guide, SGLD with Metropolis steps, and
stacking. From outside, written in plain torch or scikit-learn: a deep ensemble, MC dropout, a Gaussian process,
mean-field Bayes by Backprop in plain Pyro, and laplace-torch's last-layer Laplace. These are for regression and
classification by one hidden layer, so their means are over a few references only.

References are certified where chains converge everywhere on their grid. What is found of chains here says nothing of
posteriors on which they do not.

Questions: which method is near in the mean, and which in the spread, and where; whether mean-field's spread is too wide
amid data and too narrow away from them; which cheap diagnostics (k-hat, evidence gap, Laplace's evidence, R-hat at
training rows) know of the error; how often chains that have converged at the training rows have not in the gap.

Tables: `grades` (reference, method, region: all columns of a grade), `fits` (reference, method: seconds, gradients,
diagnostics, the commit at which it ran), `league` (method: means over references with Student's t).

    python comparisons/grading_the_field.py [--tiny] [--out DIR] [--checkpoint DIR] [--only METHOD ...]
        [--references NAME ...]

--references runs these alone, all methods or those of --only, and takes over all other rows of the tables in --out.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, bootstrap, mean, read_claims, share
from grading_outside import OUTSIDE
from study import BLUE, GREY, ORANGE, VERMILION, Study, command_line, kept, panels, stamp

import ppl_bnn as bnn
from ppl_bnn.core.errors import BNNError, InputError, unknown_name
from ppl_bnn.inference.registry import ROWS
from ppl_bnn.references.reference import REGIONS

# The exact samplers of the library, whose fits show what the references cannot resolve.
CHAINS = ("nuts", "hmc", "chees", "meads", "mclmc", "mclmc-adjusted", "smc")
OURS = tuple(name for name in ROWS if name not in ("laplace-guide", "sgld-metropolis", "stacked"))
# Values beyond are drawn at the edge.
LEAST = 0.01
SHOWN = {"mean_error": (0.01, 20.0), "sd_ratio": (0.1, 10.0)}
# A mean that is off by more, in posterior standard deviations, is a miss.
MISS = 0.25


@dataclass(frozen=True)
class Sizes:
    """How much is computed: methods, at their defaults unless `quick`, and references; () is all of them."""

    methods: tuple[str, ...] = (*OURS, *OUTSIDE)
    references: tuple[str, ...] = ()
    quick: bool = False
    seed: int = 0


FULL = Sizes()
TINY = Sizes(
    ("map", "laplace", "svi", "nuts", "deep ensemble in torch"),
    ("linear_regression-surface", "regression_mlp-curve"),
    True,
)


def graded(name: str, method: str, sizes: Sizes) -> dict[str, Any]:
    """One method on one reference: `grades` by region, and its `fit`; a refusal is the fit's `failure`."""
    reference = bnn.references.load(name)
    fit: dict[str, Any] = {"reference": name, "method": method, "failure": "", "commit": stamp()["commit"]}
    begun = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if method in OUTSIDE:
                found = OUTSIDE[method](reference, sizes.seed, sizes.quick)
                fit |= {"gradients": found.pop("gradients"), "seconds": time.perf_counter() - begun}
                grade = reference.grade(**found)
            else:
                posterior = bnn.fit(
                    reference.model(),
                    *reference.train,
                    ROWS[method].build("numpyro", sizes.quick),
                    seed=sizes.seed,
                )
                fit |= diagnosed(reference, posterior)
                grade = reference.grade(posterior)
    except BNNError as error:
        return {"fit": fit | {"failure": f"{type(error).__name__}: {error}"}, "grades": []}
    rows = [
        {"reference": name, "method": method, "region": region, **each}
        for region, each in grade.figures.items()
    ]
    return {"fit": fit, "grades": rows}


def diagnosed(reference: Any, posterior: Any) -> dict[str, Any]:
    """What a user would see of a fit: its cost, k-hat, and convergence at the training rows and in the gap."""
    info = posterior.info
    found = bnn.diagnose(posterior, x={"gap": reference.x["gap"]}).figures
    named = {
        "k_hat": "pareto_k",
        "rhat": "rhat",
        "ess": "ess_bulk",
        "rhat_gap": "rhat_at_gap",
        "ess_gap": "ess_at_gap",
        "evidence_gap": "evidence_gap",
        "log_evidence": "log_evidence",
        "importance_log_evidence": "importance_log_evidence",
    }
    figures = {name: float(found.get(key, math.nan)) for name, key in named.items()}
    # What Laplace's evidence and that of its importance weights disagree by.
    figures["evidence_error"] = abs(figures.pop("log_evidence") - figures.pop("importance_log_evidence"))
    figures["converged_at_training"] = float(found.get("converged_at_training", math.nan))
    figures["converged_at_gap"] = float(found.get("converged_at_gap", math.nan))
    gradients = info.gradient_evaluations
    cost = {
        "seconds": info.compile_seconds + info.run_seconds,
        "gradients": math.nan if gradients is None else gradients,
    }
    return {"kind": posterior.kind, **cost, **figures}


# --- what the tables say ------------------------------------------------------------------------------


def of_method(study: Study, method: str, region: str, column: str) -> dict[str, float]:
    """Reference -> a figure of a method in a region, where it is known."""
    rows = (row for row in study.tables["grades"] if (row["method"], row["region"]) == (method, region))
    found = {row["reference"]: float(row.get(column, math.nan)) for row in rows}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def logs(study: Study, method: str, region: str, column: str) -> dict[str, float]:
    """Logarithms of a ratio; a point, whose ratio is 0, has none."""
    return {
        name: math.log(value)
        for name, value in of_method(study, method, region, column).items()
        if value > 0.0
    }


def league(study: Study) -> list[dict[str, Any]]:
    """For each method and region, means over references of logarithms, with Student's t, as ratios."""
    rows = []
    for method in study.sizes.methods:
        for region in REGIONS:
            row: dict[str, Any] = {"method": method, "region": region}
            for column in ("mean_error", "sd_ratio", "worth_mean", "worth_sd", "distance"):
                values = list(logs(study, method, region, column).values())
                row["references"] = max(row.get("references", 0), len(values))
                if len(values) > 1:
                    found = mean(values)
                    row |= {column: math.exp(found.value), f"{column}_low": math.exp(found.low)}
                    row[f"{column}_high"] = math.exp(found.high)
            rows.append(row)
    return rows


def median_gradients(study: Study, method: str) -> float:
    """The median over references of the gradients of a fit; NaN where a method does not count any."""
    known = [
        float(each["gradients"])
        for each in study.tables["fits"]
        if each["method"] == method and each.get("gradients") not in (None, "")
    ]
    known = [value for value in known if math.isfinite(value)]
    return float(np.median(known)) if known else math.nan


def matched(study: Study, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The league among methods of like cost: those whose median gradients have the same power of ten.

    Rank 1 in a class and region has the smallest error of the mean. Methods without a count have a class of their own.
    """
    found = []
    for row in rows:
        if "mean_error" in row:
            gradients = median_gradients(study, row["method"])
            power = math.floor(math.log10(gradients)) if gradients >= 1.0 else -1
            words = "not counted" if power < 0 else f"1e{power} to 1e{power + 1}"
            found.append({"cost": words, "power": power, "gradients": gradients, **row})
    found.sort(key=lambda row: (row["power"], REGIONS.index(row["region"]), row["mean_error"]))
    ranks: dict[tuple[str, str], int] = {}
    for row in found:
        key = row["cost"], row["region"]
        row["rank"] = ranks[key] = ranks.get(key, 0) + 1
        del row["power"]
    return found


def paired_logs(study: Study, one: tuple[str, str], other: tuple[str, str], column: str) -> list[float]:
    """Differences of logarithms over the references that have both; `one` and `other` are (method, region)."""
    a, b = (logs(study, *each, column) for each in (one, other))
    return [a[name] - b[name] for name in a if name in b]


def curve_area(score: np.ndarray, miss: np.ndarray) -> float:
    """The area under the ROC curve of a score, ties at one half; NaN with one kind only. A k-hat may be infinite.

    Computed from ranks (Mann and Whitney 1947). scikit-learn's function checks its arguments, and a bootstrap calls it
    thousands of times.
    """
    from scipy.stats import rankdata

    hit = miss > 0
    hits = np.count_nonzero(hit)
    others = len(hit) - hits
    if not hits or not others:
        return math.nan
    return float((rankdata(score)[hit].sum() - 0.5 * hits * (hits + 1)) / (hits * others))


def scores(study: Study, column: str, methods: Sequence[str]) -> np.ndarray:
    """(references, methods, 2): a diagnostic, and whether the mean is a miss at the test rows; NaN where unknown."""
    fits = {(row["reference"], row["method"]): row for row in study.tables["fits"]}
    names = sorted({name for name, _ in fits})
    found = np.full((len(names), len(methods), 2), math.nan)
    for place, method in enumerate(methods):
        errors = of_method(study, method, "test", "mean_error")
        for row, name in enumerate(names):
            value = fits.get((name, method), {}).get(column)
            known = value is not None and value != "" and not math.isnan(float(value))
            if known and name in errors:
                found[row, place] = float(value), errors[name] > MISS
    return found


def area_of(units: np.ndarray) -> float:
    """The area for resampled references; one half where all are hits or none is."""
    flat = units.reshape(-1, 2)
    flat = flat[np.isfinite(flat[:, 1])]
    area = curve_area(flat[:, 0], flat[:, 1])
    return 0.5 if math.isnan(area) else area


def diagnostics(methods: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Claim, column of the fits, and the methods that it is about."""
    chains = [method for method in methods if method in CHAINS]
    others = [method for method in methods if method not in CHAINS]
    laplace = [method for method in others if method.startswith("laplace")]
    return [
        ("k-hat", "k_hat", others),
        ("evidence-gap", "evidence_gap", others),
        ("laplace-evidence", "evidence_error", laplace),
        ("rhat-training", "rhat", chains),
    ]


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    references = sorted({row["reference"] for row in study.tables["fits"]})
    referee = Referee(read_claims("grading_the_field"), f"{len(references)} references, one seed")
    measured = {
        "amid-too-wide": list(logs(study, "svi", "train", "sd_ratio").values()),
        "away-narrower": paired_logs(study, ("svi", "gap"), ("svi", "train"), "sd_ratio"),
        "laplace-mean": paired_logs(study, ("svi", "test"), ("laplace", "test"), "mean_error"),
        "ensemble-far": list(logs(study, "ensemble", "far", "sd_ratio").values()),
    }
    ours, theirs = (logs(study, method, "gap", "sd_ratio") for method in ("svi", "laplace"))
    measured["laplace-spread"] = [abs(ours[name]) - abs(theirs[name]) for name in ours if name in theirs]
    for key, values in measured.items():
        if len(values) < 2:
            referee.undecided(key, f"{len(values)} references have it")
        else:
            referee.measured(key, mean(values), f"as a factor {math.exp(np.mean(values)):.2f}")
    for key, column, methods in diagnostics(study.sizes.methods):
        units = scores(study, column, methods)
        flags = units[..., 1][np.isfinite(units[..., 1])]
        if len(units) < 5 or len(set(flags)) < 2:
            referee.undecided(key, f"{int(flags.sum())} misses in {len(flags)} fits that have it")
        else:
            referee.measured(
                key, bootstrap(units, area_of), f"{int(flags.sum())} misses in {len(flags)} fits"
            )
    chains = [row for row in study.tables["fits"] if row.get("converged_at_training") == 1.0]
    if not chains:
        referee.undecided("training-rows", "no chains converged at the training rows")
    else:
        # Samplers share the posterior of a reference: the reference is the unit.
        lost = [row for row in chains if row.get("converged_at_gap") == 0.0]
        units, bad = ({row["reference"] for row in rows} for rows in (chains, lost))
        text = f"{len(lost)} of {len(chains)} fits"
        referee.measured("training-rows", share(len(bad), len(units)), text)
    return referee.verdicts()


# --- figures ------------------------------------------------------------------------------------------


def draw(study: Study) -> None:
    """The league, costs, mean-field's spread, and what diagnostics know."""
    rows = league(study)
    _draw_league(study, rows)
    _draw_cost(study, rows)
    _draw_spread(study)
    _draw_diagnostics(study)


def _draw_league(study: Study, rows: list[dict[str, Any]]) -> None:
    """Error of the mean, and the ratio of spreads, with intervals over references: a panel for each region.

    A value beyond the panel is a triangle at its edge.
    """
    methods = [
        method
        for method in study.sizes.methods
        if any(row["method"] == method and row["references"] for row in rows)
    ]
    figure, axes = panels(13.0, 1.2 + 0.26 * len(methods), len(REGIONS), 2)
    for column, region in enumerate(REGIONS):
        for line, name in enumerate(("mean_error", "sd_ratio")):
            panel = axes[line, column]
            panel.set_xscale("log")
            panel.axvline(1.0, color=GREY, linewidth=0.8, linestyle="--")
            for place, method in enumerate(methods):
                row = next(each for each in rows if (each["method"], each["region"]) == (method, region))
                if name in row:
                    value, low, high = np.clip(
                        [row[f"{name}{end}"] for end in ("", "_low", "_high")], *SHOWN[name]
                    )
                    panel.hlines(place, low, high, color=BLUE, linewidth=1.4, alpha=0.6)
                    panel.plot(value, place, "o" if value == row[name] else "<", color=BLUE, markersize=4)
            panel.set_xlim(*SHOWN[name])
            panel.set_yticks(range(len(methods)), methods if column == 0 else [""] * len(methods))
            panel.invert_yaxis()
            panel.set_title(
                f"{region}: {'error of the mean (sd)' if line == 0 else 'sd ratio'}", fontsize="small"
            )
    figure.savefig(study.out / "league.png")


def _draw_spread(study: Study) -> None:
    """The ratio of spreads of mean-field SVI, of Laplace and of an ensemble, by region, against two sizes."""
    chosen = [method for method in ("svi", "laplace", "ensemble") if method in study.sizes.methods]
    entries = bnn.references.entries()
    sizes = {
        "weights per row": lambda name: entries[name].weights / entries[name].rows,
        "weights": lambda name: entries[name].weights,
    }
    figure, axes = panels(4.2 * len(chosen), 6.4, len(chosen), len(sizes))
    for line, (label, size) in enumerate(sizes.items()):
        for column, method in enumerate(chosen):
            panel = axes[line, column]
            for region, colour in zip(REGIONS, (BLUE, GREY, ORANGE, VERMILION), strict=True):
                found = of_method(study, method, region, "sd_ratio")
                values = np.clip(list(found.values()), *SHOWN["sd_ratio"])
                panel.plot(list(map(size, found)), values, "o", color=colour, markersize=4, label=region)
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_ylim(*SHOWN["sd_ratio"])
            panel.axhline(1.0, color=GREY, linewidth=0.8, linestyle="--")
            panel.set_title(method if line == 0 else "")
            panel.set_xlabel(label)
        axes[line, 0].set_ylabel("sd / reference sd")
    axes[0, -1].legend(fontsize="small")
    figure.savefig(study.out / "spread.png")


def _draw_diagnostics(study: Study) -> None:
    """Each diagnostic against the error of the mean at the test rows."""
    each = diagnostics(study.sizes.methods)
    names = {
        "k_hat": "k-hat",
        "evidence_gap": "evidence gap (nats)",
        "evidence_error": "error of the evidence (nats)",
    }
    figure, axes = panels(4.2 * len(each), 4.0, len(each))
    for panel, (_, column, methods) in zip(axes[0], each, strict=True):
        fits = {(row["reference"], row["method"]): row.get(column) for row in study.tables["fits"]}
        points = []
        for method in methods:
            for name, error in of_method(study, method, "test", "mean_error").items():
                value = fits.get((name, method))
                if value not in (None, "") and math.isfinite(float(value)):
                    least = LEAST if column.startswith("evidence") else -math.inf
                    points.append((max(float(value), least), error))
        if points:
            panel.plot(*zip(*points, strict=True), "o", color=BLUE, markersize=3, alpha=0.6)
            panel.set_yscale("log")
            if column.startswith("evidence"):
                panel.set_xscale("log")
        panel.axhline(MISS, color=GREY, linewidth=0.8, linestyle="--")
        panel.set_xlabel(names.get(column, "R-hat at the training rows"))
    axes[0, 0].set_ylabel("error of the mean, test rows (sd)")
    figure.savefig(study.out / "diagnostics.png")


def _draw_cost(study: Study, rows: list[dict[str, Any]]) -> None:
    """The error of the mean at the test rows and in the gap against the median gradients of a fit.

    Seconds are of whatever else the machine did.
    """
    figure, axes = panels(11.0, 4.6, 2)
    for panel, region in zip(axes[0], ("test", "gap"), strict=True):
        for index, row in enumerate(rows):
            gradients = median_gradients(study, row["method"])
            if row["region"] == region and "mean_error" in row and math.isfinite(gradients):
                colour = (
                    ORANGE if row["method"] in OUTSIDE else VERMILION if row["method"] in CHAINS else BLUE
                )
                place = gradients, row["mean_error"]
                panel.plot(*place, "o", color=colour, markersize=4)
                # Neighbours have their names on two sides.
                at = (3, 2) if index % 8 < 4 else (3, -7)
                panel.annotate(row["method"], place, fontsize=6, xytext=at, textcoords="offset points")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("gradients over all rows, median over references")
        panel.set_title(region)
    axes[0, 0].set_ylabel("error of the mean (sd)")
    figure.savefig(study.out / "cost.png")


def take_over(study: Study, without: Collection[tuple[str, str]]) -> None:
    """Take the stored rows of all but some references and methods; rows without a commit get that of their run."""
    file = study.out / "results.json"
    InputError.check(
        file.is_file(), "--references", "a run of others in --out", f"no {file}", "all references"
    )
    commit = json.loads(file.read_text())["stamp"]["commit"]
    stored = Study.read(study.out, study.sizes).tables
    for table in ("fits", "grades"):
        rows = (row for row in stored[table] if (row["reference"], row["method"]) not in without)
        study.tables[table] = list(rows)
    study.tables["fits"] = [{"commit": commit} | row for row in study.tables["fits"]]


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    only: Sequence[str] = (),
    references: Sequence[str] = (),
) -> Study:
    """Grade every method on every certified reference; parts are kept in the checkpoint.

    only: these methods. references: these references, beside what is stored of other references and methods.
    """
    study = Study.begin(TINY if tiny else FULL, "grading_the_field", tiny, out)
    sizes = study.sizes
    entries = bnn.references.entries()
    certified = [each.name for each in entries.values() if each.grade == "certified"]
    if unknown := set(references) - set(certified):
        raise unknown_name("reference", min(unknown), certified)
    asked = list(product(references or sizes.references or certified, only or sizes.methods))
    if references:
        take_over(study, asked)
    fits, grades = study.tables.setdefault("fits", []), study.tables.setdefault("grades", [])
    for name, method in asked:
        part = f"{name}-{method.replace(' ', '_').replace(',', '')}"
        # A part does not depend on what else is graded.
        alone = replace(sizes, methods=(method,), references=(name,))
        found = kept(
            checkpoint, part, alone, lambda each=alone: graded(*each.references, *each.methods, each)
        )
        fits.append(found["fit"])
        grades.extend(found["grades"])
        study.say(f"{name}, {method}: {found['fit']['failure'] or found['grades'][-1]['mean_error']}")
    places = {name: place for place, name in enumerate((*entries, *only, *sizes.methods))}
    for rows in (fits, grades):
        rows.sort(key=lambda row: (places[row["reference"]], places[row["method"]]))
    study.tables["league"] = league(study)
    study.tables["matched"] = matched(study, study.tables["league"])
    draw(study)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint")
    parser.add_argument("--only", nargs="*", default=(), metavar="METHOD", help="these methods")
    parser.add_argument(
        "--references", nargs="*", default=(), metavar="NAME", help="these certified references"
    )
    main(**vars(parser.parse_args()))
