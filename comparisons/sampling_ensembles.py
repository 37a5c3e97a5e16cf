"""Sampling ensembles on airfoil: ten chains, each warm-started in a mode of its own, as one prediction.

Source: V. Arvanitis, A. Aslanidis, E. Sommer and D. Ruegamer (2025), bde: A Python package for Bayesian deep ensembles
via MILE, and its benchmark, after E. Sommer, J. Robnik, G. Nozadze, U. Seljak and D. Ruegamer (2025), Microcanonical
Langevin ensembles (ICLR). The model, with x and y standardised on the training rows,

    w ~ N(0, 1) for every weight and bias    f(x, w): four hidden layers of 16 ReLU, two outputs
    y_n ~ N(f_1(x_n), softplus(f_2(x_n))^2),

is sampled by ten chains of microcanonical Langevin dynamics, each from the end of a training of its own, and all draws
of all members count alike. Its benchmark has one split (80 / 20) and five seeds; here there are five splits, of which
the first is that one, and differences are paired over them.

The sampler's energy variance, warm-up and draws were chosen by the test scores of the first two splits. Verdicts that
hold the sampling ensemble to published scores, to the tuned deep ensemble or to its intervals are over all five, these
two among them, and say beside it what the other three have; those beside the source's package are over the other three
alone.

Two scores of one predictive are told apart: the source's, the negative log density of the normal that has the mixture's
mean and variance, and the log score of the mixture itself. Beside the source: a deep ensemble whose learning rate and
prior scale are chosen on a validation part and whose members stop early (the one there has the settings of the
training that precedes the sampling); weights of the members by stacking, on rows that were held out; the R-hat of what
members predict; NUTS, and whether it can be had at all; and the source's own package in the same run, where an
interpreter that has it is named.

    python comparisons/sampling_ensembles.py [--tiny] [--out DIR] [--bde PYTHON] [--checkpoint DIR]
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from claims import LEVEL, Referee, Verdict, exact, mean_over_splits, read_claims
from study import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Study,
    command_line,
    kept,
    paired,
    panels,
)

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors, scores
from ppl_bnn.core.errors import BudgetError, UnsupportedError
from ppl_bnn.prediction.prediction import Prediction

LEVELS = (0.5, 0.8, 0.9, 0.95)
# As in the source; a gradient costs half as much as in float64. NUTS, as a reference, has the latter.
DTYPE = "float32"
# Of five seeds on the first split, mean and standard deviation; its deep ensemble likewise, seconds on 10 cores.
PUBLISHED = {
    "rmse": (0.1216, 0.0042),
    "nll": (-0.9126, 0.0130),
    "seconds": 240.0,
    "deep_ensemble_rmse": (0.3647, 0.0038),
    "deep_ensemble_nll": (0.1764, 0.0043),
    "tabpfn_rmse": 0.1359,
    "tabpfn_nll": -0.934,
    "xgboost_rmse": 0.2025,
}
# The same package run again on two cores, one seed.
RERUN = {
    "rmse": 0.1193,
    "nll": -0.934,
    "log_score": 0.926,
    "seconds": 103.0,
    "rhat_median": 1.96,
    "coverage": (0.60, 0.88, 0.95, 0.97),
}
SAMPLED, STACKED, TUNED = "sampling ensemble", "sampling ensemble, stacked", "deep ensemble, tuned"
HELD_EQUAL, HELD_STACKED = "held-out members, equal weights", "held-out members, stacked"
TUNED_STACKED, NUTS, BDE = "deep ensemble, stacked", "NUTS", "bde"
# Rows of the table, and the share of them that a split tests on.
AIRFOIL_ROWS, TEST_SHARE = 1503, 0.2


@dataclass(frozen=True)
class Sizes:
    """How much is computed. rates, sigmas: what the deep ensemble may choose from; held: the share held out for it.

    energy_variance: three hundred times what this library asks for by default, half as much again as the source has at
    last: fast, and biased; now and then the tuning of a chain collapses at it, and its member is left out. It, warmup
    and draws were chosen among six settings by the test scores of the first `tried` splits, and then lengthened by 4 %.
    beside: on how many of the others the source's package runs too, with the machine to both in turn.
    """

    rows: int | None = None
    splits: int = 5
    tried: int = 2
    beside: int = 3
    depth: int = 4
    width: int = 16
    members: int = 10
    map_steps: int = 2000
    map_rate: float = 0.01
    warmup: int = 1250
    draws: int = 525
    thinning: int = 20
    energy_variance: float = 0.15
    steps: int = 5000
    rates: tuple[float, ...] = (0.003, 0.01)
    sigmas: tuple[float, ...] = (0.3, 1.0)
    held: float = 0.2
    nuts_seconds: float | None = 120.0
    nuts_draws: int = 50
    nuts_chains: int = 2


FULL = Sizes()
TINY = Sizes(
    rows=60,
    splits=1,
    depth=1,
    width=2,
    members=2,
    map_steps=100,
    warmup=40,
    draws=30,
    thinning=5,
    energy_variance=5e-4,
    steps=100,
    rates=(0.01,),
    sigmas=(1.0,),
    nuts_seconds=None,
    nuts_draws=20,
)


def model(x: Any, y: Any = None, *, depth: int = 4, width: int = 16, sigma: float = 1.0) -> None:
    """y ~ N(f_1, softplus(f_2)^2), f of `depth` hidden layers of ReLU, every weight and bias N(0, sigma^2)."""
    f = bnn.mlp(x, [width] * depth + [2], activation="relu", prior=priors.Normal(0.0, sigma))
    bnn.observe(y, f, likelihoods.HeteroscedasticGaussian())


@dataclass(frozen=True)
class Split:
    """Training and test rows in units of the training rows."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def split(index: int, rows: int | None = None) -> Split:
    """The 80 / 20 split of scikit-learn with that random state, standardised on its training rows."""
    from sklearn.model_selection import train_test_split

    table = bnn.data.load("airfoil")
    parts = train_test_split(table.x[:rows], table.y[:rows], test_size=TEST_SHARE, random_state=index)
    train_x, test_x, train_y, test_y = (np.asarray(part) for part in parts)
    centre, spread = train_x.mean(0), train_x.std(0)
    spread = np.where(spread > 0.0, spread, 1.0)
    middle, size = train_y.mean(), train_y.std()
    return Split(
        (train_x - centre) / spread,
        (train_y - middle) / size,
        (test_x - centre) / spread,
        (test_y - middle) / size,
    )


# --- scores ---------------------------------------------------------------------------------------


def moment_nll(prediction: Prediction, y: np.ndarray) -> float:
    """Minus the mean log density of the normal that has the mean and variance of the predictive in each row."""
    variance = prediction.variance
    return float(np.mean(0.5 * (np.log(2.0 * np.pi * variance) + (y - prediction.mean) ** 2 / variance)))


def scored(prediction: Prediction, y: np.ndarray) -> dict[str, float]:
    """The scores of the protocol, in units of the standardised y."""
    return {
        "rmse": scores.rmse(prediction, y),
        "nll": moment_nll(prediction, y),
        "log_score": float(np.mean(scores.log_score(prediction, y))),
        "crps": float(np.mean(scores.crps(prediction.thin(min(200, prediction.draws)), y))),
    } | {f"coverage_{level:.0%}".removesuffix("%"): scores.coverage(prediction, y, level) for level in LEVELS}


# --- methods --------------------------------------------------------------------------------------


def sampling_ensemble(sizes: Sizes) -> Any:
    """Ten members, each a chain of microcanonical Langevin dynamics from a mode that training stopped at early."""
    mode = bnn.MAP(
        steps=sizes.map_steps, learning_rate=sizes.map_rate, polish=False, validation=0.15, dtype=DTYPE
    )
    member = bnn.MCLMC(
        start=mode,
        chains=1,
        warmup=sizes.warmup,
        draws=sizes.draws,
        thinning=sizes.thinning,
        energy_variance=sizes.energy_variance,
        dtype=DTYPE,
    )
    # A chain whose tuning collapses is left out, and the warnings say so.
    return bnn.Ensemble(member, size=sizes.members, tolerate=sizes.members // 5)


def deep_ensemble(sizes: Sizes, rate: float) -> Any:
    """Ten modes, each of which stops where its own held-out rows are predicted best."""
    member = bnn.MAP(steps=sizes.steps, learning_rate=rate, polish=False, validation=0.15, dtype=DTYPE)
    return bnn.Ensemble(member, size=sizes.members)


def network(sizes: Sizes, sigma: float = 1.0) -> Any:
    return partial(model, depth=sizes.depth, width=sizes.width, sigma=sigma)


@dataclass(frozen=True)
class Fitted:
    """A posterior with what it cost, from the call to the prediction, compilation included."""

    posterior: Any
    prediction: Prediction
    seconds: float
    gradients: float


def fitted(model: Any, data: Split, method: Any, seed: int) -> Fitted:
    start = time.perf_counter()
    posterior = bnn.fit(model, data.x, data.y, method, seed=seed)
    prediction = posterior.predict(data.test_x)
    seconds = time.perf_counter() - start
    return Fitted(posterior, prediction, seconds, float(posterior.info.gradient_evaluations or math.nan))


def held_out(data: Split, share: float, seed: int) -> tuple[Split, np.ndarray, np.ndarray]:
    """The split without a share of its training rows, and these rows: nothing of the test part is looked at."""
    rows = len(data.y)
    order = np.random.default_rng(seed).permutation(rows)
    out, kept = order[: round(share * rows)], order[round(share * rows) :]
    return replace(data, x=data.x[kept], y=data.y[kept]), data.x[out], data.y[out]


def tuned_deep_ensemble(
    sizes: Sizes, data: Split, index: int
) -> tuple[dict[str, Fitted], list[dict[str, Any]]]:
    """Learning rate and prior scale by the log score of held-out rows, then all training rows; and what was tried."""
    part, x, y = held_out(data, sizes.held, index)
    tried: list[tuple[float, float, float, Any]] = []
    tuning: list[dict[str, Any]] = []
    spent, gradients = 0.0, 0.0
    for sigma in sizes.sigmas:
        for rate in sizes.rates:
            found = fitted(network(sizes, sigma), part, deep_ensemble(sizes, rate), index)
            score = float(np.mean(scores.log_score(found.posterior.predict(x), y)))
            tried.append((score, sigma, rate, found.posterior))
            spent += found.seconds
            gradients += found.gradients
            tuning.append({"split": index, "sigma": sigma, "rate": rate, "held_out_log_score": score})
    _, sigma, rate, before = max(tried, key=lambda each: each[0])
    best = fitted(network(sizes, sigma), data, deep_ensemble(sizes, rate), index)
    best = replace(best, seconds=best.seconds + spent, gradients=best.gradients + gradients)
    stacked = bnn.stack(before, x, y)
    by_held_out = replace(best, posterior=stacked, prediction=stacked.predict(data.test_x))
    return {TUNED: best, TUNED_STACKED: by_held_out}, tuning


def stacked_members(sizes: Sizes, data: Split, index: int) -> dict[str, Fitted]:
    """Members fitted without a part of the rows, and weighted by what they predict of it; beside equal weights."""
    part, x, y = held_out(data, sizes.held, 1000 + index)
    equal = fitted(network(sizes), part, sampling_ensemble(sizes), index)
    stacked = bnn.stack(equal.posterior, x, y)
    return {
        HELD_EQUAL: equal,
        HELD_STACKED: replace(equal, posterior=stacked, prediction=stacked.predict(data.test_x)),
    }


def members_figures(f: np.ndarray) -> dict[str, float]:
    """Of f (members, draws, rows): R-hat over members; and how much of its variance lies between them.

    between_members: mean over rows of var over members of E f | member, over the variance of f over all draws.
    """
    rhat = rhat_of_rows(f)
    between = f.mean(axis=1).var(axis=0) / f.reshape(-1, f.shape[-1]).var(axis=0)
    return {
        "rhat_median": float(np.median(rhat)),
        "rhat_largest": float(rhat.max()),
        "between_members": float(between.mean()),
    }


def rhat_of_rows(f: np.ndarray) -> np.ndarray:
    """R-hat over members of f (members, draws, rows), for each row."""
    from arviz_stats.base import array_stats  # pyright: ignore[reportPrivateImportUsage]

    found: Any = array_stats.rhat(f, method="rank", chain_axis=0, draw_axis=1)
    return np.asarray(found)


def sampled_functions(posterior: Any, x: np.ndarray) -> np.ndarray:
    """f_1 of each draw of each member, (members, draws, rows)."""
    return posterior.predictor(x)[..., 0]


def nuts(sizes: Sizes, data: Split) -> tuple[Fitted, Any]:
    """NUTS for so many seconds, from the same kind of modes, and what is to be said of it."""
    start = bnn.MAP(steps=sizes.map_steps, learning_rate=sizes.map_rate, polish=False, validation=0.15)
    method = bnn.NUTS(
        chains=sizes.nuts_chains,
        warmup=sizes.nuts_draws,
        draws=sizes.nuts_draws,
        max_tree_depth=8,
        start=start,
        until=None if sizes.nuts_seconds is None else "rhat<1.01, ess>400",
        budget=sizes.nuts_seconds,
    )
    found = fitted(network(sizes), data, method, 0)
    return found, bnn.diagnose(found.posterior)


# --- the source's own package ---------------------------------------------------------------------

_CHILD = """
import os, sys, json, time
path, out, members, seed = json.loads(sys.argv[1])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={len(os.sched_getaffinity(0))}"
import numpy as np
import jax, blackjax
from bde import BdeRegressor
from bde.loss.loss import GaussianNLL
import importlib.metadata
data = np.load(path)
jax.numpy.zeros(1).block_until_ready()
start = time.perf_counter()
ensemble = BdeRegressor(
    n_members=members, hidden_layers=[16] * 4, loss=GaussianNLL(), epochs=1200, validation_split=0.15, lr=1e-3,
    weight_decay=1e-4, warmup_steps=50000, n_samples=1000, n_thinning=10, patience=20, seed=seed,
)
ensemble.fit(data["x"], data["y"])
raw = np.asarray(ensemble.predict(data["test_x"], raw=True))
seconds = time.perf_counter() - start
np.savez(out, raw=raw, seconds=seconds)
print(importlib.metadata.version("sklearn-contrib-bde"))
"""


def run_bde(python: str, data: Split, members: int, seed: int) -> tuple[Prediction, np.ndarray, float, str]:
    """The package with the settings of its benchmark: its predictive, f of all draws, seconds, version.

    It wants an older BlackJAX than this library, so that it runs under an interpreter of its own. Seconds are from its
    fit to its prediction, compilation included.
    """
    with tempfile.TemporaryDirectory(prefix="ppl-bnn-") as folder:
        path, out = Path(folder) / "data.npz", Path(folder) / "out.npz"
        np.savez(path, x=data.x, y=data.y, test_x=data.test_x)
        run = subprocess.run(
            [python, "-W", "ignore", "-c", _CHILD, json.dumps([str(path), str(out), members, seed])],
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        if run.returncode:
            raise RuntimeError(f"bde failed: {run.stderr[-2000:]}")
        with np.load(out) as stored:
            raw, seconds = stored["raw"].astype(np.float64), float(stored["seconds"])
    # (members, draws, rows, 2): the second output is the noise before softplus, as here, and a millionth is added.
    f, scale = raw[..., 0], np.logaddexp(raw[..., 1], 0.0) + 1e-6
    flat = (-1, raw.shape[2])
    prediction = Prediction("Normal", {"loc": f.reshape(flat), "scale": scale.reshape(flat)})
    return prediction, f, seconds, run.stdout.split()[-1]


# --- verdicts -------------------------------------------------------------------------------------


def column(rows: Sequence[Mapping[str, Any]], method: str, name: str) -> np.ndarray:
    """One figure of one method, split by split."""
    found = sorted((row["split"], row[name]) for row in rows if row["method"] == method)
    return np.array([value for _, value in found])


def _listed(values: Sequence[float] | np.ndarray) -> str:
    return ", ".join(f"{each:.2f}" for each in values)


def beyond(rows: Sequence[Mapping[str, Any]], tried: int) -> list[Mapping[str, Any]]:
    """The rows of the splits whose test scores chose nothing."""
    return [row for row in rows if row["split"] >= tried]


def chosen(tuning: Sequence[Mapping[str, Any]]) -> str:
    """What the tuned deep ensemble chose, and whether that is at the edge of what it could choose from."""
    best: dict[int, Mapping[str, Any]] = {}
    for row in tuning:
        before = best.get(row["split"])
        if before is None or row["held_out_log_score"] > before["held_out_log_score"]:
            best[row["split"]] = row
    if not best:
        return ""
    text, edges = [], []
    for name in ("sigma", "rate"):
        tried = sorted({row[name] for row in tuning})
        counts = {value: sum(row[name] == value for row in best.values()) for value in tried}
        text += [
            f"{name} {value:g} on {count} of {len(best)} splits" for value, count in counts.items() if count
        ]
        if len(tried) > 1 and counts[tried[0]] + counts[tried[-1]]:
            edges.append(f"{name} {', '.join(f'{value:g}' for value in tried)}")
    edge = (
        f", at the edge of what was tried ({'; '.join(edges)}), so that a better one may lie beyond"
        if edges
        else ""
    )
    return f"; it chose {', '.join(text)}{edge}"


@dataclass(frozen=True)
class Case:
    """The stored scores before the referee. rows_of: numbers of test and training rows of a split."""

    referee: Referee
    rows: Sequence[Mapping[str, Any]]
    tuning: Sequence[Mapping[str, Any]]
    tried: int
    rows_of: tuple[int, int]

    def judge(self, claim: str, values: np.ndarray, numbers: str) -> None:
        """One value for each split."""
        if len(values):
            self.referee.measured(claim, mean_over_splits(values, *self.rows_of), numbers)
        else:
            self.referee.not_run(claim, "no split of this run tells it")

    def mean(self, method: str, name: str) -> float:
        return float(column(self.rows, method, name).mean())


def judge_published(case: Case) -> None:
    """The scores of the first split beside the published ones."""
    found = {name: float(column(case.rows, SAMPLED, name)[0]) for name in ("rmse", "nll")}
    for name, difference in (
        ("rmse", found["rmse"] / PUBLISHED["rmse"][0] - 1.0),
        ("nll", found["nll"] - PUBLISHED["nll"][0]),
    ):
        wanted, sd = PUBLISHED[name]
        case.referee.measured(
            f"published-{name}",
            exact(difference),
            f"{found[name]:.4f}, published {wanted:.4f} (standard deviation over five seeds {sd:.4f}), the package run "
            f"again {RERUN[name]}; mean over the splits {case.mean(SAMPLED, name):.4f}",
        )


def judge_tuned(case: Case) -> None:
    """The sampling ensemble beside the tuned deep ensemble, on the splits that chose no settings."""
    rest = beyond(case.rows, case.tried)
    whole = column(case.rows, SAMPLED, "log_score") - column(case.rows, TUNED, "log_score")
    case.judge(
        "tuned",
        column(rest, SAMPLED, "log_score") - column(rest, TUNED, "log_score"),
        f"over all {len(whole)} splits {whole.mean():+.4f}; RMSE {case.mean(SAMPLED, 'rmse'):.4f} against "
        f"{case.mean(TUNED, 'rmse'):.4f}{chosen(case.tuning)}",
    )


def judge_deep_ensemble(case: Case) -> None:
    """A tuned deep ensemble beside the published one on its split."""
    wanted, nll = PUBLISHED["deep_ensemble_rmse"][0], PUBLISHED["deep_ensemble_nll"][0]
    found, score = (float(column(case.rows, TUNED, name)[0]) for name in ("rmse", "nll"))
    case.referee.measured(
        "deep-ensemble",
        exact(found / wanted - 1.0),
        "the published one has the settings of the warm start and was not tuned; with learning rate and prior scale "
        f"chosen on a validation part and early stopping RMSE {found:.3f} and NLL {score:.3f} (there {nll:.3f})"
        f"{chosen(case.tuning)}",
    )


def judge_mixing(case: Case) -> None:
    """The median over outputs of R-hat is far from 1."""
    medians = column(case.rows, SAMPLED, "rhat_median")
    case.judge(
        "mixing",
        medians,
        f"by split {_listed(medians)} (the package run again {RERUN['rhat_median']}); of the variance of f "
        f"{case.mean(SAMPLED, 'between_members'):.0%} lies between members: an average of explorations around modes, "
        "not one posterior",
    )


def judge_stacking(case: Case) -> None:
    """Stacked against equal weights of the same members, which were fitted without the rows that chose the weights."""
    stacked, equal = (column(case.rows, name, "log_score") for name in (HELD_STACKED, HELD_EQUAL))
    text = f"{stacked.mean():.4f} against {equal.mean():.4f}; members that had all training rows "
    case.judge("stacking", stacked - equal, f"{text}{case.mean(SAMPLED, 'log_score'):.4f}")


def judge_stacking_loo(case: Case) -> None:
    """The weights by leaving rows out, and whether they may be relied on."""
    splits = {row["split"] for row in case.rows if row["method"] == STACKED}
    same = [row for row in case.rows if row["split"] in splits]
    without = len(column(case.rows, SAMPLED, "log_score")) - len(splits)
    missing = f"; on {without} splits a member has draws that no row can be left out by" if without else ""
    case.judge(
        "stacking-loo",
        column(same, STACKED, "log_score") - column(same, SAMPLED, "log_score"),
        f"the largest Pareto k by split is {_listed(column(same, STACKED, 'pareto_k'))}: above 0.7 its weights are not "
        f"to be relied on{missing}",
    )


def judge_order(case: Case) -> None:
    """Whether two methods are ordered otherwise by the two scores, on the splits that they share.

    An interval of each of the two differences allows for the number of pairs (Bonferroni).
    """
    rows, found = case.rows, {}
    names = list(dict.fromkeys(row["method"] for row in rows if row["method"] != NUTS))
    pairs = list(combinations(names, 2))
    for one, two in pairs:
        of = [{row["split"]: row for row in rows if row["method"] == name} for name in (one, two)]
        shared = sorted(of[0].keys() & of[1].keys())
        if len(shared) < 2:
            continue
        normal, mixture = (
            mean_over_splits([sign * (of[0][k][score] - of[1][k][score]) for k in shared], *case.rows_of)
            for score, sign in (("nll", -1.0), ("log_score", 1.0))
        )
        if normal.value * mixture.value < 0.0:
            tails = [each.tail(0.0, each.value > 0.0) for each in (normal, mixture)]
            text = f"{one} minus {two} ({len(shared)} splits) {normal.value:+.3f} and {mixture.value:+.3f}"
            found[text] = max(tails) <= (1.0 - LEVEL) / 2 / len(pairs)
    listing = f"normal and mixture: {'; '.join(found) or 'no pair is ordered otherwise even in the mean'}"
    if clear := sum(found.values()):
        case.referee.measured("order", exact(clear), listing)
    else:
        why = (
            f"of {len(pairs)} pairs {len(found)} are ordered otherwise in the mean, none beyond its interval"
        )
        case.referee.undecided("order", why, listing)


def judge_coverage(case: Case) -> None:
    """Intervals hold more than they promise, on the splits that chose no settings."""
    rest = beyond(case.rows, case.tried)
    levels = ", ".join(
        f"{level:.0%} {case.mean(SAMPLED, f'coverage_{level * 100:.0f}'):.4f}" for level in LEVELS
    )
    again = ", ".join(f"{each:.0%}" for each in RERUN["coverage"])
    for level in (0.5, 0.8):
        name = f"{level * 100:.0f}"
        values = column(rest, SAMPLED, f"coverage_{name}") - level
        case.judge(f"coverage-{name}", values, f"over all splits {levels} (the package run again {again})")


def judge_nuts(case: Case, found: Mapping[str, Any]) -> None:
    """Whether there is a reference."""
    gradients = float(column(case.rows, NUTS, "gradients").sum())
    case.referee.measured(
        "reference",
        exact(float(found["verdict"] == "converged")),
        f"{found['verdict']} after {gradients:.3g} gradients and {found['shape'][0]} x {found['shape'][1]} draws "
        f"({'; '.join(found['reasons'][:2])})",
    )


def judge_bde(case: Case, first: Sequence[Mapping[str, Any]], version: str) -> None:
    """Beside the package of the source. first: the scores of the run of which the claim was first written."""
    if first:
        times = column(first, SAMPLED, "seconds") / column(first, BDE, "seconds")
        case.judge(
            "bde-first",
            column(first, SAMPLED, "log_score") - column(first, BDE, "log_score"),
            f"our time over theirs {np.median(times):.2f}; by the moment-matched normal "
            f"{(column(first, BDE, 'nll') - column(first, SAMPLED, 'nll')).mean():+.3f}",
        )
    else:
        case.referee.not_run("bde-first", "the first run is not stored here")
    mine = beside_bde(case.rows)
    if not mine:
        for key in ("bde", "bde-time", "bde-nll", "bde-rmse"):
            case.referee.not_run(key, "no interpreter with bde was named (--bde)")
        return

    def both(name: str) -> tuple[np.ndarray, np.ndarray]:
        return column(mine, SAMPLED, name), column(mine, BDE, name)

    def means(name: str) -> str:
        ours, theirs = both(name)
        return f"bde {version} {theirs.mean():.4f}, ours {ours.mean():.4f}"

    log_score, nll, rmse, seconds = (both(name) for name in ("log_score", "nll", "rmse", "seconds"))
    ours, theirs = both("rhat_median")
    rhats = f"; median R-hat of its members {theirs.mean():.2f}, of ours {ours.mean():.2f}"
    case.judge("bde", log_score[0] - log_score[1], means("log_score") + rhats)
    case.judge("bde-nll", nll[1] - nll[0], means("nll"))
    case.judge("bde-rmse", 1.0 - rmse[0] / rmse[1], means("rmse"))
    if np.isfinite(seconds).all():
        case.judge("bde-time", seconds[0] / seconds[1], f"by split {_listed(seconds[0] / seconds[1])}")
    else:
        case.referee.not_run("bde-time", "the machine had other work, so that no seconds were kept")


def beside_bde(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the splits on which the source's package ran too."""
    splits = {row["split"] for row in rows if row["method"] == BDE}
    return [row for row in rows if row["split"] in splits]


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    sizes, numbers = study.sizes, study.numbers
    referee = Referee(
        read_claims("sampling_ensembles"),
        f"{sizes.splits} splits, of which {sizes.tried} chose the settings; the source: one split, five seeds",
    )
    count = sizes.rows or AIRFOIL_ROWS
    test = math.ceil(TEST_SHARE * count)
    case = Case(referee, study.tables["scores"], study.tables["tuning"], sizes.tried, (test, count - test))
    for each in (
        judge_published,
        judge_mixing,
        judge_tuned,
        judge_deep_ensemble,
        judge_stacking,
        judge_stacking_loo,
        judge_order,
        judge_coverage,
    ):
        each(case)
    judge_nuts(case, numbers["nuts, split 0"])
    version = next((each["version"] for name, each in numbers.items() if name.startswith("bde, ")), "")
    judge_bde(case, study.tables.get("first_run", ()), version)
    return referee.verdicts()


# --- figures --------------------------------------------------------------------------------------

COLOURS = {
    SAMPLED: (BLUE, "o"),
    STACKED: (SKY, "^"),
    HELD_EQUAL: (ORANGE, "s"),
    HELD_STACKED: (VERMILION, "D"),
    TUNED: (BLACK, "v"),
    TUNED_STACKED: (GREY, "<"),
    BDE: (GREEN, "P"),
    NUTS: (PINK, "X"),
}


def draw_scores(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Three scores, method by method, one mark per split."""
    names = [name for name in COLOURS if any(row["method"] == name for row in rows)]
    figure, axes = panels(13.0, 4.6, columns=3)
    for at, (score, label, published) in enumerate(
        (
            ("rmse", "RMSE of standardised y", PUBLISHED["rmse"][0]),
            ("nll", "NLL of the moment-matched normal", PUBLISHED["nll"][0]),
            ("log_score", "log score of the mixture", RERUN["log_score"]),
        )
    ):
        panel = axes[0, at]
        for place, name in enumerate(names):
            colour, marker = COLOURS[name]
            values = column(rows, name, score)
            panel.plot(values, np.full(len(values), place), marker, color=colour, alpha=0.75, markersize=6)
            panel.plot([values.mean()] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2.0)
        said = "published" if score != "log_score" else "rerun of the source's package"
        panel.axvline(published, color=GREY, linestyle="dashed", linewidth=1.0)
        panel.set_yticks(range(len(names)), names if at == 0 else [""] * len(names))
        panel.set(xlabel=label, ylim=(len(names) - 0.5, -0.9))
        # A line at the end of an axis would be taken for the axis.
        shown = [published, *(value for name in names for value in column(rows, name, score))]
        room = 0.06 * (max(shown) - min(shown))
        panel.set_xlim(min(shown) - room, max(shown) + room)
        panel.set_title(f"dashed: {said}, split 0", fontsize=9)
    figure.savefig(path)


def draw_coverage(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """How often intervals held y, less what they promise."""
    figure, axes = panels(6.4, 4.6)
    panel = axes[0, 0]
    for name in (SAMPLED, TUNED, BDE):
        if not any(row["method"] == name for row in rows):
            continue
        colour, marker = COLOURS[name]
        found = [paired(column(rows, name, f"coverage_{level:.0%}".removesuffix("%"))) for level in LEVELS]
        panel.errorbar(
            LEVELS,
            [mean - level for (mean, _), level in zip(found, LEVELS, strict=True)],
            [2.0 * error if math.isfinite(error) else 0.0 for _, error in found],
            fmt=f"{marker}-",
            color=colour,
            capsize=3,
            label=name,
        )
    panel.plot(
        LEVELS, np.array(RERUN["coverage"]) - LEVELS, "x--", color=GREY, label="rerun of the source's package"
    )
    panel.axhline(0.0, color=BLACK, linewidth=0.8)
    panel.set(xlabel="probability of the central interval", ylabel="share of test rows inside, less this")
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_members(path: Path, f: np.ndarray, rhat: np.ndarray, y: np.ndarray) -> None:
    """What each member says of a test row, where R-hat is at its median; and R-hat over all of them.

    f: (members, draws, rows) of f_1; rhat: (rows,).
    """
    row = int(np.argsort(rhat)[len(rhat) // 2])
    figure, axes = panels(11.0, 4.2, columns=2)
    left, right = axes[0]
    low, high = np.quantile(f[..., row], [0.002, 0.998])
    grid = np.linspace(low - 0.1 * (high - low), high + 0.1 * (high - low), 200)
    for member in f[..., row]:
        width = max(1.06 * member.std() * len(member) ** -0.2, 1e-3 * (grid[-1] - grid[0]))
        density = np.exp(-0.5 * ((grid[:, None] - member) / width) ** 2).mean(axis=1)
        left.plot(grid, density / (width * math.sqrt(2.0 * math.pi)), color=BLUE, alpha=0.7, linewidth=1.2)
    left.axvline(y[row], color=VERMILION, linestyle="dashed", label="y that was seen")
    left.set(xlabel="mean output at one test row", ylabel="density, one line per member", ylim=(0.0, None))
    left.set_title(f"a row with the median R-hat, {rhat[row]:.2f}", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    right.hist(rhat, bins=30, color=SKY, edgecolor=BLUE)
    right.axvline(1.01, color=BLACK, linestyle="dashed", label="1.01")
    right.axvline(float(np.median(rhat)), color=VERMILION, label=f"median {np.median(rhat):.2f}")
    right.set(xlabel="R-hat of the mean output over members", ylabel="test rows")
    right.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_weights(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The weights that stacking gives the members, sorted, split by split."""
    figure, axes = panels(6.4, 4.2)
    panel = axes[0, 0]
    splits = sorted({row["split"] for row in rows})
    for index in splits:
        weights = np.sort([row["weight"] for row in rows if row["split"] == index])[::-1]
        panel.plot(range(1, len(weights) + 1), weights, "o-", color=BLUE, alpha=0.6, markersize=4)
    count = len([row for row in rows if row["split"] == splits[0]])
    panel.axhline(1.0 / count, color=BLACK, linestyle="dashed", label="equal weights")
    panel.set(xlabel="member, from the heaviest", ylabel="weight by stacking, one line per split")
    panel.set(ylim=(0.0, None), xticks=range(1, count + 1))
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(path)


# --- all of it ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one part of the run found: rows of tables, numbers, and f (members, draws, test rows) where it is drawn."""

    tables: dict[str, list[dict[str, Any]]]
    numbers: dict[str, Any] = field(default_factory=dict)
    f: np.ndarray | None = None


def row_of(index: int, name: str, found: Fitted, y: np.ndarray, **more: Any) -> dict[str, Any]:
    """A row of the table of scores."""
    return {
        "split": index,
        "method": name,
        **scored(found.prediction, y),
        "seconds": found.seconds,
        "gradients": found.gradients,
        **more,
    }


def part_sampled(sizes: Sizes, data: Split, index: int) -> Part:
    """The sampling ensemble, with equal weights and with weights by leaving rows out."""
    sampled = fitted(network(sizes), data, sampling_ensemble(sizes), index)
    f = sampled_functions(sampled.posterior, data.test_x)
    info = sampled.posterior.info
    rows = [row_of(index, SAMPLED, sampled, data.test_y, **members_figures(f))]
    numbers: dict[str, Any] = {"figures": info.figures, "warnings": list(info.warnings)}
    try:
        stacked = bnn.stack(sampled.posterior)
    except UnsupportedError as error:
        # A member that stood still for a third of its draws has no weights to leave a row out by.
        numbers["not stacked"] = str(error)
    else:
        by_loo = replace(sampled, posterior=stacked, prediction=stacked.predict(data.test_x))
        k = stacked.info.figures["stacking_pareto_k"]
        rows.append(row_of(index, STACKED, by_loo, data.test_y, pareto_k=k))
    return Part({"scores": rows}, numbers, f if index == 0 else None)


def part_held(sizes: Sizes, data: Split, index: int) -> Part:
    """Members that were fitted without some rows, with equal weights and weighted by these rows."""
    found = stacked_members(sizes, data, index)
    weights = [
        {"split": index, "member": at, "weight": float(each)}
        for at, each in enumerate(found[HELD_STACKED].posterior.weights)
    ]
    rows = [row_of(index, name, each, data.test_y) for name, each in found.items()]
    return Part({"scores": rows, "weights": weights})


def part_tuned(sizes: Sizes, data: Split, index: int) -> Part:
    """The deep ensemble, and what it chose from."""
    found, tuning = tuned_deep_ensemble(sizes, data, index)
    return Part(
        {"scores": [row_of(index, name, each, data.test_y) for name, each in found.items()], "tuning": tuning}
    )


def part_nuts(sizes: Sizes, data: Split, index: int) -> Part:
    """NUTS, and its verdict; no row where the seconds were over before the first draw."""
    try:
        found, diagnosis = nuts(sizes, data)
    except BudgetError as error:
        return Part({"scores": []}, {"verdict": "no draws", "reasons": [str(error)], "shape": [0, 0]})
    numbers = {
        "verdict": diagnosis.verdict,
        "reasons": list(diagnosis.reasons),
        "shape": list(found.posterior.shape),
    }
    return Part({"scores": [row_of(index, NUTS, found, data.test_y)]}, numbers)


def part_bde(python: str, sizes: Sizes, data: Split, index: int) -> Part:
    """The source's package."""
    prediction, f, seconds, version = run_bde(python, data, sizes.members, index)
    row = {"split": index, "method": BDE, **scored(prediction, data.test_y), "seconds": seconds}
    return Part({"scores": [row | members_figures(f)]}, {"version": version})


def _without_seconds(part: Part) -> Part:
    rows = [{**row, "seconds": math.nan} for row in part.tables["scores"]]
    return replace(part, tables={**part.tables, "scores": rows})


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    bde: str | None = None,
    checkpoint: str | Path | None = None,
    shared: bool = False,
) -> Study:
    """Run the study and write tables, figures and verdicts to `out`; see `Study.begin` for where that is.

    bde: an interpreter that has the package (in an environment of its own: it wants an older BlackJAX), run beside this
    one on the same splits, each first every other time. checkpoint: a folder where each part of the run is
    kept when it has finished, so that an interrupted run goes on. shared: others compute on this machine meanwhile, so
    that the seconds of what is computed now, and was not before, are left out.
    """
    study = Study.begin(TINY if tiny else FULL, "sampling_ensembles", tiny, out)
    sizes: Sizes = study.sizes
    tables: dict[str, list[dict[str, Any]]] = {"scores": [], "weights": [], "tuning": []}
    study.tables = tables
    rows = tables["scores"]
    found: dict[str, Part] = {}

    def take(name: str, index: int, compute: Callable[..., Part]) -> None:
        def computed() -> dict[str, Any]:
            part = compute(sizes, split(index, sizes.rows), index)
            part = _without_seconds(part) if shared else part
            plain = {"tables": part.tables, "numbers": part.numbers}
            return plain if part.f is None else plain | {"f": part.f}

        stored = kept(checkpoint, f"{name}-{index}", sizes, computed)
        part = found[f"{name}-{index}"] = Part(stored["tables"], stored["numbers"], stored.get("f"))
        for table, more in part.tables.items():
            tables[table] += more
        if part.numbers:
            study.numbers[f"{name}, split {index}"] = part.numbers
        for row in part.tables["scores"]:
            study.say(
                f"split {index}, {row['method']}: RMSE {row['rmse']:.4f}, NLL {row['nll']:.3f}, log score "
                f"{row['log_score']:.3f}, {row['seconds']:.0f} s"
            )

    for index in range(sizes.splits):
        side_by_side = [("sampled", part_sampled)]
        if bde is not None and sizes.tried <= index < sizes.tried + sizes.beside:
            side_by_side.append(("bde", partial(part_bde, bde)))
        # Each goes first every other time.
        for name, compute in side_by_side if index % 2 == 0 else reversed(side_by_side):
            take(name, index, compute)
    # After all that is timed side by side, so that only that has to have the machine to itself.
    for index in range(sizes.splits):
        take("held", index, part_held)
        take("tuned", index, part_tuned)
    take("nuts", 0, part_nuts)
    tables["published"] = [
        {"where": "published, split 0, five seeds", "rmse": PUBLISHED["rmse"][0], "nll": PUBLISHED["nll"][0]},
        {"where": "its package again, split 0, one seed", "rmse": RERUN["rmse"], "nll": RERUN["nll"]},
        {
            "where": "its deep ensemble, split 0, five seeds",
            "rmse": PUBLISHED["deep_ensemble_rmse"][0],
            "nll": PUBLISHED["deep_ensemble_nll"][0],
        },
        {"where": "TabPFN, there", "rmse": PUBLISHED["tabpfn_rmse"], "nll": PUBLISHED["tabpfn_nll"]},
        {"where": "XGBoost, there", "rmse": PUBLISHED["xgboost_rmse"], "nll": ""},
    ]
    draw_scores(study.out / "scores.png", rows)
    draw_coverage(study.out / "coverage.png", rows)
    f = found["sampled-0"].f
    assert f is not None
    draw_members(study.out / "members.png", f, rhat_of_rows(f), split(0, sizes.rows).test_y)
    draw_weights(study.out / "weights.png", tables["weights"])
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "shared")
    parser.add_argument("--bde", help="an interpreter that has the package bde, to run beside")
    main(**vars(parser.parse_args()))
