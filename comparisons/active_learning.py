"""Which labels are worth asking for: rows chosen by mutual information beside rows chosen at random.

Source: D. J. C. MacKay (1992), "Information-based objective functions for active data selection", Neural Computation 4;
N. Houlsby, F. Huszar, Z. Ghahramani and M. Lengyel (2011), "Bayesian active learning for classification and preference
learning". A pool holds rows whose labels are not known. The next label is asked for where it is expected to tell most
about the weights,

    I(y; w | x, D) = H(E_w p(y | x, w)) - E_w H(p(y | x, w))                              for classes ("BALD"),
    I(y; w | x, D) = 1/2 ln(1 + Var f(x) / noise^2), which grows with the variance of f,   for numbers,

and these are `Prediction.epistemic`: the mutual information in nats, or the variance of f. Beside it stand choice at
random, with the same first labels and the same test rows, and for classes choice by the whole entropy, which cannot
tell a row that nobody knows yet from one that nobody can know.

Three tasks: two classes in a plane, where a fifth of the pool has labels of a coin; scikit-learn's digits, several
labels at a time (the source asks for one); and the diabetes table, a regression with much noise, which is known. The
posterior is Laplace's, linearised; each mode is looked for from the one before.

Beside these, small pools in the plane tell whether the criterion fails or Laplace does: the posterior is that of NUTS
at every choice, and so are the scores of all choices, once its chains agree at the rows where it is used. The same
pools and test rows have choices by Laplace and at random.

Two choices were made by hand after a first run, whose verdicts on digits and diabetes said nothing of choosing. With
weights of digits of scale 1 / sqrt(fan-in) the mode of few labels is the network of zeros, to which all rows are worth
the same: the scale is three times as large, by the log score of random labels of one seed among 1, 2, 3 and 5. And
where noise is inferred the mode of fewer labels than weights has none: what is known is about what 100 random labels
tell.

    python comparisons/active_learning.py [--tiny] [--out DIR] [--checkpoint DIR] [--task NAME] [--cache DIR]

Within an hour of one core, and two minutes more for each small pool; with --cache, what has been compiled for one pool
serves the others. With --checkpoint each finished run is kept, and an interrupted study goes on. `--task small` runs
the small pools alone and leaves the other tables of the folder as they are.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, mean, mean_over_splits, read_claims
from study import (
    BLACK,
    BLUE,
    GREY,
    VERMILION,
    Study,
    command_line,
    converged,
    kept,
    mark_unconverged,
    panels,
    run,
    stamp,
    unconverged_handle,
    write_table,
    write_verdicts,
)

import ppl_bnn as bnn
from ppl_bnn.diagnostics.function_space import convergence

INFORMATION, ENTROPY, RANDOM = "information", "entropy", "random"
COIN = 1.2
# Rows of the diabetes table: for the test, and in the pool.
DIABETES_TEST, DIABETES_POOL = 142, 300
# Of the diabetes table, in units of the spread of its targets.
NOISE = 0.7


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    labels: how many are known at the end of each task. batch: digits asked for at a time. steps: of the search for the
    first mode, before its polish; again: of that for each later one, which begins at the one before.
    """

    seeds: int = 10
    plane_labels: int = 60
    digits_labels: int = 120
    diabetes_labels: int = 100
    pool: int = 400
    test_rows: int = 500
    batch: int = 10
    steps: int = 1500
    again: int = 300


FULL = Sizes()
TINY = Sizes(
    seeds=1,
    plane_labels=7,
    digits_labels=30,
    diabetes_labels=13,
    pool=40,
    test_rows=30,
    batch=10,
    steps=60,
    again=40,
)


@dataclass(frozen=True)
class Small:
    """How much is computed on small pools. first_seed: seeds are counted from here, as no other task has them.

    every: labels between two scores. draws: of each chain of NUTS, after as many of warm-up, and twice as many where
    the chains do not agree, at most `doublings` times. steps, again: see `Sizes`.
    """

    seeds: int = 14
    first_seed: int = 100
    pool: int = 80
    test_rows: int = 300
    labels: int = 26
    every: int = 4
    steps: int = 1500
    again: int = 300
    chains: int = 4
    draws: int = 500
    doublings: int = 2

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            pool=self.pool,
            test_rows=self.test_rows,
            plane_labels=self.labels,
            steps=self.steps,
            again=self.again,
        )


SMALL = Small()
TINY_SMALL = Small(
    seeds=1,
    first_seed=500,
    pool=20,
    test_rows=15,
    labels=8,
    every=2,
    steps=60,
    again=40,
    chains=2,
    draws=20,
    doublings=0,
)


@dataclass(frozen=True)
class Data:
    """What one seed gives: a pool (N, F) with labels that are asked for, test rows, and the rows known at first."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    first: np.ndarray


@dataclass(frozen=True)
class Task:
    """A task: its data by seed, its model, how labels are chosen, how many are known at the end, and per round."""

    name: str
    title: str
    data: Callable[[Sizes, int], Data]
    model: Callable[..., Any]
    strategies: tuple[str, ...]
    labels: int
    batch: int

    @property
    def classes(self) -> bool:
        return ENTROPY in self.strategies


# --- tasks --------------------------------------------------------------------------------------------


def boundary(x: np.ndarray) -> np.ndarray:
    """Where the classes of the plane meet."""
    return 0.8 * np.sin(2.0 * x)


def in_plane(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs uniform on [-2, 2]^2; class 1 above a wave, but right of COIN by the toss of a coin."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2.0, 2.0, size=(rows, 2))
    coin = rng.integers(0, 2, rows)
    return x, np.where(x[:, 0] > COIN, coin, (x[:, 1] > boundary(x[:, 0])).astype(int))


def known_first(y: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Row numbers of the first labels, at random, drawn again until two values are among them."""
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.choice(len(y), count, replace=False)
        if len(np.unique(y[chosen])) > 1:
            return chosen


def plane(sizes: Sizes, seed: int) -> Data:
    x, y = in_plane(sizes.pool, 1000 + seed)
    x_test, y_test = in_plane(sizes.test_rows, 2000 + seed)
    return Data(x, y, x_test, y_test, known_first(y, 6, seed))


def digits(sizes: Sizes, seed: int) -> Data:
    table = bnn.data.load("digits")
    order = np.random.default_rng(seed).permutation(len(table.y))
    pool, test = order[: sizes.pool], order[sizes.pool :][: sizes.test_rows]
    x, y = table.x / 8.0 - 1.0, table.y
    return Data(x[pool], y[pool], x[test], y[test], known_first(y[pool], 20, seed))


def diabetes(sizes: Sizes, seed: int) -> Data:
    """In units of the pool: its inputs are known, and one spread of the targets serves all choices alike."""
    table = bnn.data.load("diabetes")
    order = np.random.default_rng(seed).permutation(len(table.y))
    held = min(sizes.test_rows, DIABETES_TEST)
    test, pool = order[:held], order[held:][: sizes.pool]
    x = (table.x - table.x[pool].mean(axis=0)) / table.x[pool].std(axis=0)
    y = (table.y - table.y[pool].mean()) / table.y[pool].std()
    return Data(x[pool], y[pool], x[test], y[test], known_first(y[pool], 10, seed))


def known_noise(x: Any, y: Any = None) -> None:
    """The zoo's `regression_mlp` of five units, told how much noise there is."""
    f = bnn.mlp(x, [5, 1], "tanh", bnn.priors.Normal(0.0, "fan_in"))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))


def tasks(sizes: Sizes) -> dict[str, Task]:
    load = bnn.zoo.load
    both = (INFORMATION, ENTROPY, RANDOM)
    found = (
        Task(
            "plane",
            "two classes in a plane",
            plane,
            load("evidence_framework", width=10, precision=0.1),
            both,
            sizes.plane_labels,
            1,
        ),
        Task(
            "digits",
            "digits",
            digits,
            load("classification_mlp", classes=10, width=10, sigma=3.0),
            both,
            sizes.digits_labels,
            sizes.batch,
        ),
        Task("diabetes", "diabetes", diabetes, known_noise, (INFORMATION, RANDOM), sizes.diabetes_labels, 3),
    )
    return {task.name: task for task in found}


# --- asking -------------------------------------------------------------------------------------------


def worth(strategy: str, prediction: Any, rng: np.random.Generator) -> np.ndarray:
    """What the label of each row is held to be worth, (N,): the larger, the sooner it is asked for."""
    if strategy == INFORMATION:
        return prediction.epistemic
    return prediction.entropy if strategy == ENTROPY else rng.uniform(size=len(prediction))


def posterior_of(
    model: Any, x: np.ndarray, y: np.ndarray, steps: int, seed: int, mode: Any
) -> tuple[Any, Any]:
    """Laplace's posterior and its mode, which is looked for from the mode of the round before."""
    with warnings.catch_warnings():
        # Pixels at the rim are blank in every image that is known at first.
        warnings.filterwarnings("ignore", message=".*have no variance")
        search = bnn.MAP(ppl="pyro", steps=steps, restarts=1 if mode is not None else 4, start=mode)
        mode = bnn.fit(model, x, y, search, seed=seed, device="cpu")
        laplace = bnn.Laplace(ppl="pyro", start=mode, optimise=False)
        return bnn.fit(model, x, y, laplace, seed=seed, device="cpu"), mode


def rounds(
    task: Task, strategy: str, seed: int, sizes: Sizes
) -> tuple[list[dict[str, Any]], np.ndarray, Any]:
    """One run: a row of scores for each number of labels; the rows known at the end, in order; the last posterior."""
    data = task.data(sizes, seed)
    rng = np.random.default_rng(5000 + seed)
    known, mode, table = list(data.first), None, []
    while True:
        steps = sizes.steps if mode is None else sizes.again
        posterior, mode = posterior_of(task.model, data.x[known], data.y[known], steps, seed, mode)
        prediction = posterior.predict(data.x_test)
        row = {"task": task.name, "strategy": strategy, "seed": seed, "labels": len(known)}
        row["log_score"] = float(prediction.log_prob(data.y_test).mean())
        if task.classes:
            row["accuracy"] = float((prediction.probabilities.argmax(axis=1) == data.y_test).mean())
        else:
            row["rmse"] = float(np.sqrt(np.mean((prediction.mean - data.y_test) ** 2)))
        table.append(row)
        if len(known) >= task.labels:
            return table, np.array(known), posterior
        unknown = np.setdiff1d(np.arange(len(data.y)), known)
        values = worth(strategy, posterior.predict(data.x[unknown]), rng)
        wanted = min(task.batch, task.labels - len(known))
        known += unknown[np.argsort(-values, kind="stable")[:wanted]].tolist()


# --- small pools: the exact posterior beside Laplace's ------------------------------------------------

NUTS, LAPLACE = "NUTS", "Laplace"
# How labels are chosen on small pools, and the posterior whose information it is.
CHOICES = {"information under NUTS": NUTS, "information under Laplace": LAPLACE, "random": ""}
BY_NUTS, BY_LAPLACE, AT_RANDOM = CHOICES


def by_nuts(
    model: Any, x: np.ndarray, y: np.ndarray, rows: np.ndarray, small: Small, seed: int
) -> tuple[Any, dict[str, Any]]:
    """The posterior by NUTS, and the worst R-hat and bulk ESS of f at `rows`, where it is used."""
    draws = small.draws
    while True:
        method = bnn.NUTS(
            ppl="numpyro", chains=small.chains, warmup=draws, draws=draws, chain_method="sequential"
        )
        posterior = bnn.fit(model, x, y, method, seed=seed, device="cpu")
        f = convergence(posterior, rows).quantities["f"]
        if converged(f.rhat, f.ess_bulk) or draws >= small.draws * 2**small.doublings:
            return posterior, {"draws": draws, "rhat": f.rhat, "ess_bulk": f.ess_bulk}
        draws *= 2


def small_run(choice: str, seed: int, small: Small) -> dict[str, Any]:
    """What one choice comes to on one pool: scores by either posterior, every fit by NUTS, the share of coins, and
    which rows were asked for, in order.
    """
    sizes = small.sizes
    task = tasks(sizes)["plane"]
    data = task.data(sizes, seed)
    rng = np.random.default_rng(5000 + seed)
    known, mode = list(data.first), None
    begun = len(known)
    scores: list[dict[str, Any]] = []
    fits: list[dict[str, Any]] = []
    while True:
        x, y = data.x[known], data.y[known]
        unknown = np.setdiff1d(np.arange(len(data.y)), known)
        scored = len(known) > begun and (len(known) - begun) % small.every == 0
        more = len(known) < small.labels
        named = {"seed": seed, "choice": choice, "labels": len(known)}
        posteriors: dict[str, Any] = {}
        if scored or (more and choice == BY_NUTS):
            used = [data.x_test] * scored + [data.x[unknown]] * (more and choice == BY_NUTS)
            posteriors[NUTS], figures = by_nuts(task.model, x, y, np.concatenate(used), small, seed)
            fits.append(named | figures)
        if scored or (more and choice == BY_LAPLACE):
            steps = small.steps if mode is None else small.again
            posteriors[LAPLACE], mode = posterior_of(task.model, x, y, steps, seed, mode)
        if scored:
            for name, posterior in posteriors.items():
                prediction = posterior.predict(data.x_test)
                row = named | {"posterior": name}
                row["log_score"] = float(prediction.log_prob(data.y_test).mean())
                row["accuracy"] = float((prediction.probabilities.argmax(axis=1) == data.y_test).mean())
                scores.append(row)
        if not more:
            break
        if choice == AT_RANDOM:
            known.append(int(rng.choice(unknown)))
        else:
            values = worth(INFORMATION, posteriors[CHOICES[choice]].predict(data.x[unknown]), rng)
            known.append(int(unknown[np.argmax(values)]))
    coin = data.x[:, 0] > COIN
    at_first = np.isin(np.arange(len(coin)), data.first)
    shares = {"share": float(coin[known[begun:]].mean()), "share_of_pool": float(coin[~at_first].mean())}
    coins = [{"seed": seed, "choice": choice} | shares]
    return {"scores": scores, "fits": fits, "coins": coins, "asked": [int(row) for row in known[begun:]]}


# --- what came of it ----------------------------------------------------------------------------------


def curves(rows: Sequence[Mapping[str, Any]], strategy: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of labels (L,) and values (seed, L)."""
    chosen = [row for row in rows if row["strategy"] == strategy]
    labels = np.unique([row["labels"] for row in chosen])
    seeds = np.unique([row["seed"] for row in chosen])
    at = {(row["seed"], row["labels"]): row[column] for row in chosen}
    return labels, np.array([[at[seed, count] for count in labels] for seed in seeds])


def labels_for(labels: np.ndarray, curve: np.ndarray, level: float) -> float:
    """How many labels it takes until a curve (L,) has reached a level, between counts by a straight line; else inf."""
    reached = np.flatnonzero(curve >= level)
    if not len(reached):
        return float("inf")
    first = reached[0]
    if first == 0:
        return float(labels[0])
    share = (level - curve[first - 1]) / (curve[first] - curve[first - 1])
    return float(labels[first - 1] + share * (labels[first] - labels[first - 1]))


def saved(labels: np.ndarray, ours: np.ndarray, random: np.ndarray) -> tuple[float, float]:
    """Labels that a choice (seed, L) needs fewer than choice at random for the score at which that ends.

    Of the mean curves, with the standard error of the jackknife over seeds; minus infinity where it is never reached,
    with an infinite error, as has a single seed, or a choice that reaches it only with some one of its seeds.
    """

    def of(kept: np.ndarray) -> float:
        return float(labels[-1]) - labels_for(labels, ours[kept].mean(axis=0), random[kept].mean(axis=0)[-1])

    count = len(ours)
    whole = of(np.arange(count))
    if count < 2 or not np.isfinite(whole):
        return whole, float("inf")
    parts = np.array([of(np.delete(np.arange(count), seed)) for seed in range(count)])
    if not np.all(np.isfinite(parts)):
        return whole, float("inf")
    return whole, float(np.sqrt((count - 1) / count * np.sum((parts - parts.mean()) ** 2)))


def judge_choice(
    referee: Referee, task: Task, sizes: Sizes, rows: Sequence[Mapping[str, Any]], strategy: str
) -> None:
    """Whether a choice predicts better than choice at random, on average over all numbers of labels."""
    labels, random = curves(rows, RANDOM, "log_score")
    _, ours = curves(rows, strategy, "log_score")
    # The first score is that of the labels known at first, which all choices share.
    gains = (ours - random)[:, 1:].mean(axis=1)
    fewer, fewer_error = saved(labels, ours, random)
    error = f"jackknife {fewer_error:.0f}" if np.isfinite(fewer_error) else "with an error that is not known"
    enough = (
        f"it needs {labels[-1] - fewer:.0f} labels for the score of choice at random at {labels[-1]}, "
        f"{fewer:.0f} fewer ({error})"
        if np.isfinite(fewer)
        else f"it does not reach the score of choice at random at {labels[-1]}"
    )
    at_end = mean((ours - random)[:, -1])
    text = f"from {labels[1]} to {labels[-1]} labels; at the end {at_end}; {enough}"
    # The pool of a table and its test rows are drawn at random for each seed; the plane is simulated for each seed.
    pooled = {"digits": (sizes.test_rows, sizes.pool), "diabetes": (DIABETES_TEST, DIABETES_POOL)}
    estimate = mean_over_splits(gains, *pooled[task.name]) if task.name in pooled else mean(gains)
    referee.measured(f"{task.name}-{strategy}", estimate, text)


def judge_coins(referee: Referee, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whether information asks for fewer labels of a coin than entropy does."""
    shares = {name: np.array([row["share"] for row in rows if row["strategy"] == name]) for name in STYLES}
    each = ", ".join(f"{share.mean():.1%} by {name}" for name, share in shares.items())
    referee.measured("coins", mean(shares[ENTROPY] - shares[INFORMATION]), each)


def small_gains(
    rows: Sequence[Mapping[str, Any]], first: tuple[str, str], second: tuple[str, str]
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of labels (L,), and log score of the first (choice, posterior) minus that of the second, (seed, L)."""
    at = {(row["choice"], row["posterior"], row["seed"], row["labels"]): row["log_score"] for row in rows}
    labels = sorted({row["labels"] for row in rows})
    seeds = sorted({row["seed"] for row in rows})
    gains = [[at[*first, seed, count] - at[*second, seed, count] for count in labels] for seed in seeds]
    return np.array(labels), np.array(gains)


def unconverged(fits: Sequence[Mapping[str, Any]], choices: Sequence[str]) -> list[Mapping[str, Any]]:
    """The fits by NUTS after labels chosen in these ways whose chains do not agree where they are used."""
    own = [fit for fit in fits if fit["choice"] in choices]
    return [fit for fit in own if not converged(fit.get("rhat", np.inf), fit.get("ess_bulk", 0.0))]


# The two sides of the claims on small pools: how labels are chosen, and the posterior that is scored.
SIDES = {
    "small-nuts": ((BY_NUTS, NUTS), (AT_RANDOM, NUTS)),
    "small-laplace": ((BY_LAPLACE, LAPLACE), (AT_RANDOM, LAPLACE)),
    "small-laplace-by-nuts": ((BY_LAPLACE, NUTS), (AT_RANDOM, NUTS)),
    "small-choices": ((BY_NUTS, NUTS), (BY_LAPLACE, NUTS)),
    "small-predictions": ((AT_RANDOM, NUTS), (AT_RANDOM, LAPLACE)),
}


def judge_small(referee: Referee, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Whether the criterion fails on small pools, or Laplace."""
    if not tables.get("small_scores"):
        for key in (*SIDES, "small-coins"):
            referee.not_run(key, "small pools are not in this run")
        return
    rows, fits = tables["small_scores"], tables["small_fits"]
    pools = {row["seed"] for row in rows}
    sizes = f"{len(pools)} pools of a plane, up to {max(row['labels'] for row in rows)} labels, one at a time"

    def state(choices: Sequence[str]) -> dict[str, Any]:
        bad, count = unconverged(fits, choices), sum(fit["choice"] in choices for fit in fits)
        worst = f"{len(bad)} of {count} fits by NUTS" if bad else ""
        return {"converged": not bad, "why_not": worst, "sizes": sizes}

    for key, (first, second) in SIDES.items():
        labels, gains = small_gains(rows, first, second)
        exact = NUTS in (first[1], second[1])
        text = f"from {labels[0]} to {labels[-1]} labels; at the end {mean(gains[:, -1])}"
        more = state((first[0], second[0])) if exact else {"sizes": sizes}
        referee.measured(key, mean(gains.mean(axis=1)), text, **more)
    coins = [row for row in tables["small_coins"] if row["choice"] == BY_NUTS]
    fewer = [row["share_of_pool"] - row["share"] for row in coins]
    shares = {
        choice: np.mean([row["share"] for row in tables["small_coins"] if row["choice"] == choice])
        for choice in CHOICES
    }
    each = ", ".join(f"{share:.1%} by {choice}" for choice, share in shares.items())
    of_pool = np.mean([row["share_of_pool"] for row in coins])
    referee.measured("small-coins", mean(fewer), f"{of_pool:.1%} of the pool; {each}", **state((BY_NUTS,)))


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    sizes, rows = study.sizes, study.tables["curves"]
    note = "the source: toy problems, one label at a time; the posterior is Laplace's, linearised"
    referee = Referee(read_claims("active_learning"), f"{sizes.seeds} seeds; {note}")
    for name, task in tasks(sizes).items():
        own = [row for row in rows if row["task"] == name]
        for strategy in task.strategies[:-1]:
            if own:
                judge_choice(referee, task, sizes, own, strategy)
            else:
                referee.not_run(f"{name}-{strategy}", "another task was run alone")
    if study.tables.get("coins"):
        judge_coins(referee, study.tables["coins"])
    else:
        means = ", ".join(f"{share:.1%} by {name}" for name, share in study.numbers.get("coins", {}).items())
        referee.undecided(
            "coins", "the shares of single seeds were not stored, so there is no interval", means
        )
    judge_small(referee, study.tables)
    return referee.verdicts()


# --- figures ------------------------------------------------------------------------------------------

STYLES = {INFORMATION: (BLUE, "-"), ENTROPY: (VERMILION, "--"), RANDOM: (GREY, ":")}
# The comparisons that are drawn of small pools: key of the claim, colour, line and words.
SMALL_STYLES = {
    "small-nuts": (BLACK, "-", "NUTS chooses, NUTS predicts"),
    "small-laplace-by-nuts": (BLUE, "--", "Laplace chooses, NUTS predicts"),
    "small-laplace": (VERMILION, "-.", "Laplace chooses, Laplace predicts"),
}


def draw_curves(path: Path, done: Mapping[str, Task], rows: Sequence[Mapping[str, Any]]) -> None:
    figure, axes = panels(4.6 * len(done), 4.6, len(done))
    for panel, task in zip(axes[0], done.values(), strict=True):
        own = [row for row in rows if row["task"] == task.name]
        for strategy in task.strategies:
            labels, values = curves(own, strategy, "log_score")
            colour, line = STYLES[strategy]
            middle = values.mean(axis=0)
            panel.plot(labels, middle, line, color=colour, linewidth=2.0, label=strategy)
            if len(values) > 1:
                error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
                panel.fill_between(
                    labels, middle - error, middle + error, color=colour, alpha=0.2, linewidth=0
                )
        panel.set(xlabel="labels known", title=task.title)
    axes[0, 0].set_ylabel("test log score, nats per row (band: 1 s.e.)")
    handles = {}
    for panel in axes[0]:
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def draw_small(path: Path, rows: Sequence[Mapping[str, Any]], fits: Sequence[Mapping[str, Any]]) -> None:
    """What choosing gains over random labels on small pools, by who chooses and who predicts."""
    figure, axes = panels(8.6, 4.4)
    panel = axes[0, 0]
    marked = False
    for place, (key, (colour, line, words)) in enumerate(SMALL_STYLES.items()):
        labels, gains = small_gains(rows, *SIDES[key])
        found = [mean(column) for column in gains.T]
        at = labels + 0.22 * (place - 1)
        middle = np.array([each.value for each in found])
        panel.plot(at, middle, line, color=colour, linewidth=1.8, marker="o", markersize=5, label=words)
        for where, each in zip(at, found, strict=True):
            if np.isfinite(each.low):
                panel.plot([where, where], [each.low, each.high], color=colour, linewidth=1.2)
        sides = [side for side in SIDES[key] if side[1] == NUTS]
        bad = {fit["labels"] for fit in unconverged(fits, [choice for choice, _ in sides])}
        crossed = np.isin(labels, list(bad))
        if crossed.any():
            mark_unconverged(panel, at[crossed], middle[crossed])
            marked = True
    panel.axhline(0.0, color=GREY, linewidth=1.0, zorder=0)
    panel.set(
        xlabel="labels known",
        xticks=sorted({row["labels"] for row in rows}),
        ylabel="test log score less that of random labels,\nnats per row",
    )
    pools = len({row["seed"] for row in rows})
    panel.set_title(
        f"Above zero, labels chosen by information are better than random ones\n(means over {pools} pools, bars: 95 %)",
        fontsize=11,
    )
    handles, _ = panel.get_legend_handles_labels()
    figure.legend(
        handles=[*handles, *([unconverged_handle()] if marked else [])],
        loc="outside lower center",
        ncols=1 if marked else 3,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path)


def draw(study: Study) -> None:
    """The figures, from the tables."""
    rows = study.tables.get("curves", [])
    names = {row["task"] for row in rows}
    done = {name: task for name, task in tasks(study.sizes).items() if name in names}
    if done:
        draw_curves(study.out / "curves.png", done, rows)
    if study.tables.get("small_scores"):
        draw_small(study.out / "small_pools.png", study.tables["small_scores"], study.tables["small_fits"])


# --- all of it ----------------------------------------------------------------------------------------


def run_of(task: Task, strategy: str, seed: int, sizes: Sizes) -> dict[str, Any]:
    """What is kept of one run: its curve, and what share of the labels that it asked for a coin decided."""
    table, known, _ = rounds(task, strategy, seed, sizes)
    data = task.data(sizes, seed)
    asked = data.x[known[len(data.first) :], 0]
    return {"curve": table, "coins": float((asked > COIN).mean()) if task.name == "plane" else None}


def run_small_pools(
    small: Small, checkpoint: str | Path | None, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """The tables of small pools."""
    tables: dict[str, list[dict[str, Any]]] = {"scores": [], "fits": [], "coins": []}
    for number in range(small.seeds):
        seed = small.first_seed + number
        for choice in CHOICES:
            part = kept(
                checkpoint,
                f"small-{choice.replace(' ', '-')}-{seed}",
                small,
                lambda choice=choice, seed=seed: small_run(choice, seed, small),
            )
            for name, rows in tables.items():
                rows += part[name]
        say(f"small pools: {number + 1} of {small.seeds}")
    return {f"small_{name}": rows for name, rows in tables.items()}


def joined(folder: Path, tables: Mapping[str, list[dict[str, Any]]], words: Mapping[str, Any]) -> Study:
    """The stored results with the tables of small pools beside those of an earlier run, which stay as they are.

    The sizes and the stamp of small pools go among the numbers; those of the earlier run are left.
    """
    for name, rows in tables.items():
        write_table(folder / f"{name}.csv", rows)
    content = json.loads((folder / "results.json").read_text())
    content["numbers"]["small pools"] = dict(words)
    found = Study.read(folder, FULL)
    found.verdicts = judge(found)
    content.pop("verdicts", None)
    write_verdicts(folder, content, found.verdicts)
    return Study.read(folder, FULL)


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    task: str | None = None,
    cache: str | None = None,
) -> Study:
    """Run the study and write tables, figures and verdicts to `out`; see `Study.begin` for where that is.

    checkpoint: a folder in which finished runs are kept. task: the one to run alone; "small" adds small pools to the
    results that are in `out`. cache: a folder for compiled programs.
    """
    sizes, small = (TINY, TINY_SMALL) if tiny else (FULL, SMALL)
    study = Study.begin(sizes, "active_learning", tiny, out)
    if cache is not None:
        bnn.enable_compilation_cache(cache)
    done = {name: each for name, each in tasks(sizes).items() if task in (None, name)}
    if not done and task != "small":
        raise SystemExit(f"no task {task!r}: there are {', '.join(tasks(sizes))}, small")
    rows: list[dict[str, Any]] = []
    coins: list[dict[str, Any]] = []
    for name, each in done.items():
        for seed in range(sizes.seeds):
            for strategy in each.strategies:
                one = kept(
                    checkpoint,
                    f"{name}-{strategy}-{seed}",
                    sizes,
                    lambda each=each, strategy=strategy, seed=seed: run_of(each, strategy, seed, sizes),
                )
                rows += one["curve"]
                if one["coins"] is not None:
                    coins.append({"strategy": strategy, "seed": seed, "share": one["coins"]})
            study.say(f"{name}: seed {seed + 1} of {sizes.seeds}")
    if task in (None, "small"):
        pools = run_small_pools(small, checkpoint, study.say)
        seconds = round(time.perf_counter() - study.begun)
        words = {"sizes": asdict(small), "stamp": stamp() | {"seconds": seconds}}
        if task == "small":
            study = joined(study.out, pools, words)
            draw(study)
            return study
        study.tables |= pools
        study.numbers["small pools"] = words
    study.tables["curves"] = rows
    study.tables |= {"coins": coins} if coins else {}
    draw(study)
    study.conclude(judge)
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "cache", "figures")
    parser.add_argument("--task", help="plane, digits, diabetes or small alone")
    run(parser, main, "active_learning", FULL, draw)
