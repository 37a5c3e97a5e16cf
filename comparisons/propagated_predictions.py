"""What does a prediction lose whose moments are propagated through the network in one pass, and where is there none?

`predict(kind="propagated")` takes means and variances through the network layer by layer. Every model of the zoo is
fitted by mean-field SVI and by a diagonal Laplace approximation to some splits of its own data; where the library
refuses the propagated prediction, the table `refused` has its words. For the others, on the test rows:

- the share of the gain in log score over MAP that it keeps. The reference is the prediction of the same approximation
  that propagation approximates: many draws through the network for SVI, and the linearised network for Laplace, whose
  Gaussian is the posterior of that network. The sampled prediction of Laplace is beside it.
- the coverage of 90 % intervals, less that of the reference, where targets are numbers;
- the time of the moments over that of one plain pass, both over the same many rows, the least of several, in both
  systems. Fits are in Pyro, which compiles nothing; claims about time are about NumPyro, the default system.

    python comparisons/propagated_predictions.py [--tiny] [--out DIR] [--checkpoint DIR] [--splits N]
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Estimate, Referee, Verdict, exact, mean_over_splits, read_claims
from study import Study, command_line, kept

import ppl_bnn as bnn
from ppl_bnn import zoo
from ppl_bnn.core.errors import BNNError, UnsupportedError
from ppl_bnn.posterior.posterior import MEMORY

LEVEL = 0.9
SVI, LAPLACE = "SVI", "Laplace, diagonal"
# The prediction that propagation approximates.
REFERENCES = {SVI: "sampled", LAPLACE: "linearised"}


@dataclass(frozen=True)
class Sizes:
    """models: all where empty. train, test: at most so many rows. steps: of SVI, mode_steps: at most, of the mode.
    draws: of the sampled prediction. timed: rows of a pass whose time is taken, repeats: how often.
    """

    models: tuple[str, ...] = ()
    splits: int = 3
    train: int = 250
    test: int = 250
    steps: int = 1500
    mode_steps: int = 3000
    draws: int = 4000
    timed: int = 10_000
    repeats: int = 15


FULL = Sizes()
TINY = Sizes(("linear_regression", "graph_convolution"), 2, 40, 30, 50, 50, 50, 60, 2)


def methods(sizes: Sizes) -> dict[str, Any]:
    return {
        SVI: bnn.SVI(steps=sizes.steps, ppl="pyro"),
        LAPLACE: bnn.Laplace(structure="diag", repair="clip", steps=sizes.mode_steps, ppl="pyro"),
    }


def rows_of(name: str, sizes: Sizes, split: int) -> tuple[Any, ...]:
    """x and y of the training rows and of the test rows; all rows are both where rows interact."""
    table = bnn.data.load(zoo.models()[name].data or "")
    x, y = np.asarray(table.x), np.asarray(table.y)
    order = np.random.default_rng(split).permutation(len(x))
    count = min(sizes.train, int(0.8 * len(x)))
    train, test = order[:count], order[count : count + sizes.test]
    return x[train], y[train], x[test], y[test]


def refusal(name: str, label: str, method: Any, sizes: Sizes) -> dict[str, Any] | None:
    """The stage that refuses the propagated prediction of a model, and its words; None if it works."""
    x, y, new, _ = rows_of(name, sizes, 0)
    method = replace(method, steps=5)
    found = {"model": name, "method": label}
    try:
        posterior = bnn.fit(zoo.load(name), x, y, method, seed=0, standardise=True)
    except BNNError as error:
        return found | {"by": "the fit", "words": str(error).splitlines()[0]}
    try:
        posterior.predict(new[:2], kind="propagated")
    except BNNError as error:
        return found | {"by": "the prediction", "words": str(error).splitlines()[0]}
    return None


def seconds(posterior: Any, ppl: str, inputs: Any, repeats: int) -> tuple[float, float]:
    """The least seconds of one plain pass at the centre in a system, and of the moments of the same rows."""
    approximation = posterior.approximation

    def both(problem: Any) -> tuple[float, float]:
        centre = {name: np.asarray(value)[None] for name, value in approximation.centre().items()}
        w = problem.program.constrain_draws(centre, problem.x, problem.y)
        passes: tuple[Callable[[], Any], ...] = (
            lambda: problem.program.predictor_draws(w, inputs),
            lambda: approximation.propagated_moments(problem, inputs, MEMORY),
        )
        least = [np.inf, np.inf]
        for _ in range(repeats + 1):
            for at, one in enumerate(passes):
                begun = time.perf_counter()
                one()
                least[at] = min(least[at], time.perf_counter() - begun)
        return least[0], least[1]

    # The same approximation, computed by that system.
    return replace(posterior, info=replace(posterior.info, ppl=ppl), programs={}).with_problem(both)


def coverage(prediction: Any, y: np.ndarray) -> float | None:
    """Coverage of the central intervals; None for classes, and where some rows are censored."""
    try:
        return float(bnn.scores.coverage(prediction, y, LEVEL))
    except BNNError:
        return None


def cell(name: str, label: str, method: Any, sizes: Sizes, split: int, point: Any) -> dict[str, Any]:
    """One row of the table `cells`; `point` is the mode, None for a model without one."""
    x, y, new, targets = rows_of(name, sizes, split)
    if label == LAPLACE:
        method = replace(method, start=point, optimise=False)
    posterior = bnn.fit(zoo.load(name), x, y, method, seed=split, standardise=True)
    found: dict[str, Any] = {"model": name, "method": label, "split": split}
    found |= {"train_rows": len(y), "test_rows": len(targets)}
    kinds = {"propagated": None, "sampled": sizes.draws} | ({} if label == SVI else {"linearised": None})
    for kind, draws in kinds.items():
        prediction = posterior.predict(new, kind=kind, draws=draws)
        found[kind] = float(np.mean(prediction.log_prob(targets)))
        held = coverage(prediction, targets)
        found |= {} if held is None else {f"coverage_{kind}": held}
    if point is not None:
        found["map"] = float(np.mean(point.predict(new).log_prob(targets)))
    if split == 0:
        inputs = posterior.fit_inputs(new)
        many = inputs[np.resize(np.arange(len(inputs)), sizes.timed)]
        for ppl in ("numpyro", "pyro"):
            plain, moments = seconds(posterior, ppl, many, sizes.repeats)
            found |= {f"plain_s_{ppl}": plain, f"moments_s_{ppl}": moments}
    return found


def mode(name: str, sizes: Sizes, split: int) -> Any:
    """The mode from which Laplace starts and over which a gain is a gain; None for a model without one."""
    x, y, _, _ = rows_of(name, sizes, split)
    method = bnn.MAP(steps=sizes.mode_steps, ppl="pyro")
    try:
        return bnn.fit(zoo.load(name), x, y, method, seed=split, standardise=True)
    except UnsupportedError:
        return None


def part(name: str, sizes: Sizes) -> dict[str, Any]:
    """The rows of the tables `cells` and `refused` of a model."""
    refused, cells = [], []
    left = methods(sizes)
    for label, method in methods(sizes).items():
        why = refusal(name, label, method, sizes)
        if why is not None:
            refused.append(why)
            del left[label]
    for split in range(sizes.splits if left else 0):
        point = mode(name, sizes, split)
        cells += [cell(name, label, method, sizes, split, point) for label, method in left.items()]
    return {"refused": refused, "cells": cells}


# --- summaries and verdicts ---------------------------------------------------------------------------


def estimate_of(rows: Sequence[Mapping[str, Any]], one: str, other: str) -> Estimate:
    """The mean of a difference over the splits of a model, with its interval."""
    values = [row[one] - row[other] for row in rows]
    return mean_over_splits(values, rows[0]["test_rows"], rows[0]["train_rows"])


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the table `models`, from the cells of a model and a method."""
    first = rows[0]
    reference = REFERENCES[first["method"]]
    found: dict[str, Any] = {key: first[key] for key in ("model", "method")}
    away = estimate_of(rows, "propagated", reference)
    found |= {"difference": away.value, "difference_low": away.low, "difference_high": away.high}
    if "map" in first:
        gain = estimate_of(rows, reference, "map")
        found |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
        found["has_gain"] = gain.low > 0.0
        found["share"] = 1.0 + away.value / gain.value
    if f"coverage_{reference}" in first:
        found["coverage"] = float(np.mean([row[f"coverage_{reference}"] for row in rows]))
        found["coverage_difference"] = estimate_of(rows, "coverage_propagated", f"coverage_{reference}").value
    for ppl in ("numpyro", "pyro"):
        found[f"time_ratio_{ppl}"] = first[f"moments_s_{ppl}"] / first[f"plain_s_{ppl}"]
    return found


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored table of models."""
    referee = Referee(
        read_claims("propagated_predictions"),
        f"{study.sizes.splits} splits of at most {study.sizes.train} rows",
    )

    def worst(
        key: str, label: str, column: str, largest: bool, size: Callable[[float], float], only: str = ""
    ) -> None:
        rows = [row for row in study.tables["models"] if row["method"] == label and column in row]
        rows = [row for row in rows if not only or row[only]]
        if not rows:
            referee.undecided(key, "no model has it")
            return
        at = (max if largest else min)(rows, key=lambda row: size(row[column]))
        referee.measured(key, exact(size(at[column])), f"{at['model']}, of {len(rows)} models")

    for word, label in (("svi", SVI), ("laplace", LAPLACE)):
        worst(f"{word}-gain", label, "share", False, float, "has_gain")
        worst(f"{word}-coverage", label, "coverage_difference", True, abs)
        worst(f"{word}-time", label, "time_ratio_numpyro", True, float)
    worst("svi-loss", SVI, "difference", True, lambda value: -value)
    return referee.verdicts()


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    splits: int | None = None,
) -> Study:
    """Fit every model by both methods and write the tables `cells`, `models` and `refused`."""
    study = Study.begin(TINY if tiny else FULL, "propagated_predictions", tiny, out, splits=splits)
    sizes, tables = study.sizes, study.tables
    tables |= {"cells": [], "models": [], "refused": []}
    for name in sizes.models or zoo.names():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = kept(checkpoint, f"{name}_{sizes.splits}", sizes, partial(part, name, sizes))
        tables["refused"] += found["refused"]
        tables["cells"] += found["cells"]
        for label in REFERENCES:
            rows = [row for row in found["cells"] if row["method"] == label]
            tables["models"] += [summary(rows)] if rows else []
        study.say(f"{name}: {found['refused'] or tables['models'][-1]}")
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    main(**vars(command_line(__doc__, "checkpoint", "splits").parse_args()))
