"""Is the corrected leave-one-out value of an approximation nearer the exact one, where it is published?

PSIS-LOO takes the draws of an approximation q as if they were draws from the posterior. Weights p/q correct that
(Magnusson, Andersen, Jonasson and Vehtari 2019, Bayesian leave-one-out cross-validation for large data), and add errors
of their own where q is narrower than the posterior. `diagnostics.importance.leave_one_out` publishes the corrected
value only where k-hat of p/q and the Pareto k of every row, of 10 000 draws, are at most 0.7.

The exact value comes from refits in closed form:

    y ~ N(X w, s^2 I)    w ~ N(0, I)    s = 0.5 known, or s ~ HalfNormal(1), integrated over a grid of log s

Settings: mean-field SVI with s known, where the inputs have equal correlations of 0, 0.3, 0.5 and 0.8, and a
linearised Laplace approximation with s unknown. For each the study prints, over the seeds, how many values were
published, their mean distance to the exact value, and that of the uncorrected ones beside them. The same is printed for
the value of the posterior's own 1000 draws, asked for k-hat of p/q only.

    python comparisons/corrected_leave_one_out.py [--tiny] [--out DIR] [--seeds N]
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, mean, read_claims
from study import Study, command_line, paired

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.diagnostics.importance import leave_one_out, pareto_k_of

NOISE = 0.5
CORRELATIONS = (0.0, 0.3, 0.5, 0.8)


@dataclass(frozen=True)
class Sizes:
    """How much is computed."""

    seeds: int = 50
    rows: int = 40
    features: int = 3
    steps: int = 3000


FULL = Sizes()
TINY = Sizes(seeds=2, rows=15, features=2, steps=300)


def known(x: Any, y: Any = None) -> None:
    """Linear regression with a known noise."""
    f = bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0), bias=False)
    bnn.observe(y, f, likelihoods.Gaussian(NOISE))


def unknown(x: Any, y: Any = None) -> None:
    """Linear regression whose noise is inferred."""
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    f = bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0), bias=False)
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def data(seed: int, sizes: Sizes, correlation: float) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of unit variance with equal correlations, and targets from weights of the prior."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(sizes.rows, 1))
    own = rng.normal(size=(sizes.rows, sizes.features))
    x = math.sqrt(correlation) * shared + math.sqrt(1.0 - correlation) * own
    return x, x @ rng.normal(size=sizes.features) + NOISE * rng.normal(size=sizes.rows)


def _normal(value: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> float:
    factor = np.linalg.cholesky(covariance)
    z = np.linalg.solve(factor, value - mean)
    return float(-0.5 * z @ z - np.log(np.diag(factor)).sum() - 0.5 * len(z) * math.log(2.0 * math.pi))


def exact(x: np.ndarray, y: np.ndarray, noises: np.ndarray, log_prior: np.ndarray) -> float:
    """sum_i log p(y_i | the others), the noise on a grid with log weights: log p(y) / p(y without row i), by refits."""

    def evidence(rows: np.ndarray) -> float:
        gram = x[rows] @ x[rows].T
        zero, identity = np.zeros(len(gram)), np.eye(len(gram))
        each = [_normal(y[rows], zero, gram + noise**2 * identity) for noise in noises]
        return float(np.logaddexp.reduce(np.asarray(each) + log_prior))

    every = np.arange(len(y))
    whole = evidence(every)
    return sum(whole - evidence(every[every != row]) for row in range(len(y)))


def at_known_noise(x: np.ndarray, y: np.ndarray) -> float:
    return exact(x, y, np.array([NOISE]), np.zeros(1))


def over_the_noise(x: np.ndarray, y: np.ndarray) -> float:
    """The trapezoidal rule in log s from 0.05 to 5, outside of which its posterior has no mass to speak of."""
    grid = np.linspace(math.log(0.05), math.log(5.0), 80)
    noises = np.exp(grid)
    return exact(x, y, noises, -0.5 * noises**2 + grid)


def by_k_hat_alone(posterior: Any) -> float:
    """ArviZ's corrected value of the draws that the posterior shows; NaN where k-hat of p/q exceeds 0.7."""
    import arviz_stats

    log_p, log_q = posterior.log_joint(), np.ravel(posterior.log_q())
    if not pareto_k_of(log_p - log_q).reliable:
        return math.nan
    tree: Any = posterior.to_datatree()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = arviz_stats.loo_approximate_posterior(tree, log_p=log_p, log_q=log_q, pointwise=True)
    return float(found.elpd)


def measured(name: str, seed: int, truth: float, posterior: Any) -> dict[str, Any]:
    """One row of the table `values`."""
    found = leave_one_out(posterior)
    return {
        "setting": name,
        "seed": seed,
        "exact": truth,
        "uncorrected": found.elpd,
        "published": found.corrected_elpd,
        "corrected_k": found.corrected_worst_k,
        "rows_above": found.corrected_share_above,
        "by_k_hat_alone": by_k_hat_alone(posterior),
        "reason": found.corrected_reason,
    }


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean distances to the exact value where something is published, and the gain with its standard error."""

    def distance(column: str, among: list[dict[str, Any]]) -> np.ndarray:
        return np.abs([row[column] - row["exact"] for row in among])

    published = [row for row in rows if math.isfinite(row["published"])]
    alone = [row for row in rows if math.isfinite(row["by_k_hat_alone"])]
    found: dict[str, Any] = {"setting": name, "seeds": len(rows), "published": len(published)}
    if published:
        gain, error = paired(distance("uncorrected", published) - distance("published", published))
        found |= {
            "distance_published": float(distance("published", published).mean()),
            "distance_uncorrected": float(distance("uncorrected", published).mean()),
            "gain": gain,
            "gain_se": error,
        }
    if alone:
        found |= {
            "by_k_hat_alone": len(alone),
            "distance_by_k_hat_alone": float(distance("by_k_hat_alone", alone).mean()),
            "distance_uncorrected_there": float(distance("uncorrected", alone).mean()),
        }
    return found


def judge(study: Study) -> list[Verdict]:
    """The verdict from the stored values, one gain for each seed."""
    gains: dict[int, list[float]] = {}
    for row in study.tables["values"]:
        if math.isfinite(row.get("published", math.nan)):
            gain = abs(row["uncorrected"] - row["exact"]) - abs(row["published"] - row["exact"])
            gains.setdefault(row["seed"], []).append(gain)
    whole = next(row for row in study.tables["settings"] if row["setting"] == "all")
    referee = Referee(read_claims("corrected_leave_one_out"), f"{study.sizes.seeds} seeds")
    if not gains:
        referee.undecided("nearer", "nothing was published")
        return referee.verdicts()
    referee.measured(
        "nearer",
        mean([float(np.mean(each)) for each in gains.values()]),
        f"{whole['published']} of {whole['seeds']} values published; mean distance {whole['distance_published']:.3f} "
        f"nats, uncorrected {whole['distance_uncorrected']:.3f}",
    )
    return referee.verdicts()


def main(tiny: bool = False, out: str | Path | None = None, seeds: int | None = None) -> Study:
    """Fit all settings on all seeds and write the tables `values` and `settings`."""
    study = Study.begin(TINY if tiny else FULL, "corrected_leave_one_out", tiny, out, seeds=seeds)
    sizes, values = study.sizes, []
    settings: list[tuple[str, float, Any, Any, Any]] = [
        (f"mean-field SVI, correlation {rho}", rho, known, bnn.SVI(steps=sizes.steps), at_known_noise)
        for rho in CORRELATIONS
    ]
    settings.append(("Laplace, noise unknown", 0.3, unknown, bnn.Laplace(), over_the_noise))
    for name, rho, model, method, truth in settings:
        for seed in range(sizes.seeds):
            x, y = data(seed, sizes, rho)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                posterior = bnn.fit(model, x, y, method, seed=seed)
            values.append(measured(name, seed, truth(x, y), posterior))
        study.tables.setdefault("settings", []).append(
            summary(name, [row for row in values if row["setting"] == name])
        )
        study.say(", ".join(f"{key} {value}" for key, value in study.tables["settings"][-1].items()))
    study.tables["values"] = values
    study.tables["settings"].append(summary("all", values))
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    main(**vars(command_line(__doc__, "seeds").parse_args()))
