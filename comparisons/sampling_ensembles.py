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
from pathlib import Path
from typing import Any

import numpy as np
from study import (
    BLACK,
    BLUE,
    CORRECTED,
    GREEN,
    GREY,
    NOT_REPRODUCED,
    NOT_RUN,
    ORANGE,
    PINK,
    REPRODUCED,
    SKY,
    VERMILION,
    Study,
    Verdict,
    command_line,
    judge_better,
    kept,
    no_worse,
    paired,
    panels,
    told,
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
# No worse: by a tenth of a nat per row in the mean, or by a twentieth of the root mean square error.
NATS, SHARE = 0.1, 0.05


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
    parts = train_test_split(table.x[:rows], table.y[:rows], test_size=0.2, random_state=index)
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


def mean_and_error(values: Sequence[float] | np.ndarray) -> str:
    mean, error = paired(values)
    return f"{mean:.4f}" if math.isinf(error) else f"{mean:.4f} +- {error:.4f}"


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


def judge_published(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where the first split's scores are within two of the published standard deviations, or better."""
    rmse, nll = (float(column(rows, SAMPLED, name)[0]) for name in ("rmse", "nll"))
    (wanted_rmse, sd_rmse), (wanted_nll, sd_nll) = PUBLISHED["rmse"], PUBLISHED["nll"]
    good = rmse <= wanted_rmse + 2.0 * sd_rmse and nll <= wanted_nll + 2.0 * sd_nll
    return Verdict(
        "the published scores of the sampling ensemble",
        REPRODUCED if good else NOT_REPRODUCED,
        f"split 0: RMSE {rmse:.4f} (published {wanted_rmse:.4f}, sd over seeds {sd_rmse:.4f}; rerun {RERUN['rmse']}), "
        f"NLL of the moment-matched normal {nll:.3f} (published {wanted_nll:.3f}, {sd_nll:.3f}; rerun {RERUN['nll']}); "
        f"over {len(column(rows, SAMPLED, 'rmse'))} splits RMSE {mean_and_error(column(rows, SAMPLED, 'rmse'))}, NLL "
        f"{mean_and_error(column(rows, SAMPLED, 'nll'))} (the test scores of split 0 helped to choose the settings)",
    )


def judge_tuned(
    rows: Sequence[Mapping[str, Any]], tuning: Sequence[Mapping[str, Any]] = (), tried: int = 2
) -> Verdict:
    """That the sampling ensemble is better than a deep ensemble: against the tuned one, in log score, over all splits.

    tuning: what that one chose from. tried: how many splits chose the settings of the sampling ensemble.
    """
    differences = column(rows, SAMPLED, "log_score") - column(rows, TUNED, "log_score")
    rmse = paired(column(rows, TUNED, "rmse") - column(rows, SAMPLED, "rmse"))
    rest = beyond(rows, tried)
    others = column(rest, SAMPLED, "log_score") - column(rest, TUNED, "log_score")
    return judge_better(
        "sampling around the modes is better than the modes alone, against a deep ensemble that is tuned",
        *paired(differences),
        f"log score of the mixture {mean_and_error(column(rows, SAMPLED, 'log_score'))} against "
        f"{mean_and_error(column(rows, TUNED, 'log_score'))}, paired difference {mean_and_error(differences)}"
        + (
            f", on the {len(others)} splits that chose no settings {mean_and_error(others)}"
            if len(others)
            else ""
        )
        + f"; RMSE {told(*rmse, 'lower', 'higher', 4)}{chosen(tuning)}",
    )


def judge_deep_ensemble(
    rows: Sequence[Mapping[str, Any]], tuning: Sequence[Mapping[str, Any]] = ()
) -> Verdict:
    """Corrected where a tuned deep ensemble is better, in both scores, than the published one's seeds allow, reproduced
    where it is what they allow in both, and neither where it is worse in one of them.
    """
    (wanted, sd), (nll, nll_sd) = PUBLISHED["deep_ensemble_rmse"], PUBLISHED["deep_ensemble_nll"]
    found, score = float(column(rows, TUNED, "rmse")[0]), float(column(rows, TUNED, "nll")[0])
    off = ((found - wanted) / sd, (score - nll) / nll_sd)
    same = max(abs(each) for each in off) <= 2.0
    return Verdict(
        f"a deep ensemble has RMSE {wanted:.3f} here",
        CORRECTED if max(off) < -2.0 else REPRODUCED if same else NOT_REPRODUCED,
        "that one has the settings of the warm start and was not tuned; with learning rate and prior scale chosen on a "
        f"validation part and early stopping RMSE {found:.3f} and NLL {score:.3f} (there {nll:.3f}) on the same split"
        f"{chosen(tuning)}",
    )


def judge_mixing(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """That members do not mix: the median over outputs of R-hat is far from 1."""
    medians = column(rows, SAMPLED, "rhat_median")
    return Verdict(
        f"the members do not mix (median R-hat of outputs {RERUN['rhat_median']})",
        REPRODUCED if medians.min() > 1.1 else NOT_REPRODUCED,
        f"median R-hat over the outputs at test inputs, by split: {_listed(medians)}; of the "
        f"variance of f {np.mean(column(rows, SAMPLED, 'between_members')):.0%} lies between members: an average "
        "of explorations around modes, not one posterior",
    )


def judge_stacking(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Stacked against equal weights of the same members, which were fitted without the rows that chose the weights."""
    differences = column(rows, HELD_STACKED, "log_score") - column(rows, HELD_EQUAL, "log_score")
    whole = column(rows, HELD_STACKED, "log_score") - column(rows, SAMPLED, "log_score")
    return judge_better(
        "stacking the members is better than equal weights",
        *paired(differences),
        f"log score {mean_and_error(column(rows, HELD_STACKED, 'log_score'))} against "
        f"{mean_and_error(column(rows, HELD_EQUAL, 'log_score'))} of the same members, paired difference "
        f"{mean_and_error(differences)}; less equal weights of members that had all training rows "
        f"{mean_and_error(whole)}",
    )


def judge_stacking_loo(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """The weights by leaving rows out, and whether they may be relied on."""
    stacked = {row["split"] for row in rows if row["method"] == STACKED}
    same = [row for row in rows if row["split"] in stacked]
    differences = column(same, STACKED, "log_score") - column(same, SAMPLED, "log_score")
    k = column(same, STACKED, "pareto_k")
    without = len(column(rows, SAMPLED, "log_score")) - len(stacked)
    missing = (
        f"; on {without} of the splits a member has draws that no row can be left out by" if without else ""
    )
    return judge_better(
        "stacking by leaving rows out, which costs no fit, is better than equal weights",
        *paired(differences),
        f"paired difference {mean_and_error(differences)}; the largest Pareto k by split is "
        f"{_listed(k)}: above 0.7 its weights are not to be relied on{missing}",
    )


def judge_order(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Reproduced where one of two methods is the better one by the one score and the worse one by the other, both by
    more than two standard errors of paired differences over the splits that the two share.
    """
    names = list(dict.fromkeys(row["method"] for row in rows if row["method"] != NUTS))

    def ahead(one: str, two: str, score: str, sign: float) -> tuple[int, float, float]:
        of_one, of_two = (
            {row["split"]: row[score] for row in rows if row["method"] == name} for name in (one, two)
        )
        shared = sorted(of_one.keys() & of_two.keys())
        if not shared:
            return 0, 0.0, math.inf
        return len(shared), *paired([sign * (of_one[split] - of_two[split]) for split in shared])

    clear, unclear = [], []
    for at, one in enumerate(names):
        for two in names[at + 1 :]:
            count, *normal = ahead(one, two, "nll", -1.0)
            _, *mixture = ahead(one, two, "log_score", 1.0)
            if normal[0] * mixture[0] >= 0.0:
                continue
            text = (
                f"{one} less {two} ({count} splits) {normal[0]:+.3f} +- {normal[1]:.3f} by the normal and "
                f"{mixture[0]:+.3f} +- {mixture[1]:.3f} by the mixture"
            )
            both = all(abs(mean) > 2.0 * error for mean, error in (normal, mixture))
            (clear if both else unclear).append(text)
    return Verdict(
        "the two scores need not order methods alike",
        REPRODUCED if clear else NOT_REPRODUCED,
        "log density of the moment-matched normal and log score of the mixture, on shared splits: ordered otherwise by "
        f"more than two errors in both: {'; '.join(clear) or 'no two methods'}; otherwise in the mean alone: "
        f"{'; '.join(unclear) or 'no two methods'}",
    )


def judge_coverage(rows: Sequence[Mapping[str, Any]], tried: int = 2) -> Verdict:
    """That intervals hold more than they promise (60, 88, 95 and 97 % at 50, 80, 90 and 95 %): at 50 and 80 %, over all
    splits. tried: how many of them chose the settings.
    """
    names = {level: f"coverage_{level:.0%}".removesuffix("%") for level in LEVELS}
    found = {level: column(rows, SAMPLED, name) for level, name in names.items()}
    over = all(mean - level > 2.0 * error for level in (0.5, 0.8) for mean, error in [paired(found[level])])
    text = ", ".join(f"{level:.0%}: {mean_and_error(values)}" for level, values in found.items())
    others = {level: column(beyond(rows, tried), SAMPLED, names[level]) for level in (0.5, 0.8)}
    rest = ", ".join(
        f"{level:.0%}: {mean_and_error(values)}" for level, values in others.items() if len(values)
    )
    return Verdict(
        "central intervals hold more than they promise",
        REPRODUCED if over else NOT_REPRODUCED,
        f"{text} (rerun: {', '.join(f'{each:.0%}' for each in RERUN['coverage'])})"
        + (f"; on the splits that chose no settings {rest}" if rest else ""),
    )


def judge_nuts(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> Verdict:
    """Whether there is a reference."""
    good = found["verdict"] == "converged"
    reasons = "; ".join(found["reasons"][:2])
    seconds, gradients = (float(column(rows, NUTS, name).sum()) for name in ("seconds", "gradients"))
    spent = f"{gradients:.3g} gradients" + ("" if math.isnan(seconds) else f", {seconds:.0f} s")
    return Verdict(
        "NUTS is a reference for this network (ours)",
        REPRODUCED if good else NOT_REPRODUCED,
        f"{found['verdict']} after {spent} and {found['shape'][0]} x {found['shape'][1]} draws ({reasons}): "
        + ("it is one" if good else "no reference"),
    )


def judge_bde(rows: Sequence[Mapping[str, Any]], version: str) -> Verdict:
    """No worse by NATS, by paired differences, in at most half the time, side by side in this run."""
    claim = "as good a log score as the package of the source, in half its time (ours)"
    if not version:
        return Verdict(claim, NOT_RUN, "no interpreter with bde was named (--bde)")
    theirs = column(rows, BDE, "log_score")
    mine = beside_bde(rows)
    differences = paired(column(mine, SAMPLED, "log_score") - theirs)
    times = column(mine, SAMPLED, "seconds") / column(mine, BDE, "seconds")
    fast = float(np.median(times)) <= 0.5
    return Verdict(
        claim,
        no_worse(*differences, NATS) if fast else NOT_REPRODUCED,
        f"bde {version} on {len(theirs)} splits: log score {mean_and_error(theirs)}, ours "
        f"{told(*differences, digits=4)} (no worse: by {NATS:g} nats, two errors allowed for); our time over theirs "
        f"{np.median(times):.2f} ({times.min():.2f} to {times.max():.2f}); median R-hat of its members "
        f"{np.mean(column(mine, BDE, 'rhat_median')):.2f}, of ours "
        f"{np.mean(column(mine, SAMPLED, 'rhat_median')):.2f}",
    )


def judge_bde_as_normal(rows: Sequence[Mapping[str, Any]], version: str) -> Verdict:
    """The second score of the source, which asks of a mixture what a normal would give."""
    claim = "as good by the score of the source, of the moment-matched normal (ours)"
    return judged_beside_bde(rows, version, claim, "nll", lambda theirs: NATS, f"{NATS:g} nats")


def judge_bde_rmse(rows: Sequence[Mapping[str, Any]], version: str) -> Verdict:
    """The first score of the source: the root mean square error of the mean."""
    claim = "as good by the RMSE, the first score of the source (ours)"
    return judged_beside_bde(
        rows, version, claim, "rmse", lambda theirs: SHARE * float(theirs.mean()), f"{SHARE:.0%}"
    )


def judged_beside_bde(
    rows: Sequence[Mapping[str, Any]],
    version: str,
    claim: str,
    score: str,
    margin: Callable[[np.ndarray], float],
    said: str,
) -> Verdict:
    """No worse by a score of which less is better; said: the margin in words."""
    if not version:
        return Verdict(claim, NOT_RUN, "no interpreter with bde was named (--bde)")
    mine = beside_bde(rows)
    theirs = column(mine, BDE, score)
    differences = paired(theirs - column(mine, SAMPLED, score))
    verdict = no_worse(*differences, margin(theirs))
    return Verdict(
        claim,
        verdict,
        f"bde {version} on {len(theirs)} splits: {score.upper()} {mean_and_error(theirs)}, ours "
        f"{told(*differences, 'lower', 'higher', 4)} (no worse: by {said}, two errors allowed for)"
        + (": cannot be told from so few splits" if verdict == NOT_RUN else ""),
    )


def beside_bde(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the splits on which the source's package ran too."""
    splits = {row["split"] for row in rows if row["method"] == BDE}
    return [row for row in rows if row["split"] in splits]


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
    beside = [part for name, part in found.items() if name.startswith("bde-")]
    version = beside[0].numbers["version"] if beside else ""
    for verdict in (
        judge_published(rows),
        judge_mixing(rows),
        judge_tuned(rows, tables["tuning"], sizes.tried),
        judge_deep_ensemble(rows, tables["tuning"]),
        judge_stacking(rows),
        judge_stacking_loo(rows),
        judge_order(rows),
        judge_coverage(rows, sizes.tried),
        judge_nuts(rows, found["nuts-0"].numbers),
        judge_bde(rows, version),
        judge_bde_as_normal(rows, version),
        judge_bde_rmse(rows, version),
    ):
        study.judge(verdict)
    draw_scores(study.out / "scores.png", rows)
    draw_coverage(study.out / "coverage.png", rows)
    f = found["sampled-0"].f
    assert f is not None
    draw_members(study.out / "members.png", f, rhat_of_rows(f), split(0, sizes.rows).test_y)
    draw_weights(study.out / "weights.png", tables["weights"])
    study.write()
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "shared")
    parser.add_argument("--bde", help="an interpreter that has the package bde, to run beside")
    main(**vars(parser.parse_args()))
