"""Methods at their defaults on posteriors in closed form: badly scaled in twenty dimensions, easy in four.

"collinear": 200 rows of twenty features that share one factor, noise 0.5, independent N(0, 1) priors: a Gaussian
posterior whose precision has condition number 2e5 (the factor is scaled to give it), with correlations close to -1.
"four": 40 rows of three correlated features and a bias, condition number about 50.

For each method: the ratio of its variance to the exact one along the eigenvectors of the posterior's covariance
(smallest, median, largest), the largest error of the mean in exact standard deviations, what `bnn.diagnose` says, the
method's own figure "converged", and its warnings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.errors import BNNError

CONDITION = 2e5
NOISE = 0.5


@dataclasses.dataclass(frozen=True)
class Linear:
    """y = x w + b + noise N(0, 1) with w, b ~ N(0, 1): a posterior in closed form."""

    x: np.ndarray
    y: np.ndarray

    @property
    def design(self) -> np.ndarray:
        return np.column_stack([self.x, np.ones(len(self.x))])

    @property
    def precision(self) -> np.ndarray:
        return np.eye(self.design.shape[1]) + self.design.T @ self.design / NOISE**2

    @property
    def mean(self) -> np.ndarray:
        return np.linalg.solve(self.precision, self.design.T @ self.y / NOISE**2)

    @staticmethod
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0)), likelihoods.Gaussian(NOISE))


def collinear(rows: int = 200, features: int = 20, condition: float = CONDITION, seed: int = 1) -> Linear:
    """Features that are one factor and a hundredth of it in noise of their own, scaled to the condition number."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 1)) + 0.01 * rng.normal(size=(rows, features))
    x -= x.mean(0)
    largest = np.linalg.eigvalsh(x.T @ x)[-1]
    smallest = np.linalg.eigvalsh(x.T @ x)[0]
    # (1 + s^2 largest / noise^2) / (1 + s^2 smallest / noise^2) = condition
    square = (condition - 1.0) * NOISE**2 / (largest - condition * smallest)
    assert square > 0.0
    x = x * np.sqrt(square)
    weights = rng.normal(size=features)
    return Linear(x, x @ weights + 0.4 + NOISE * rng.normal(size=rows))


def four(seed: int = 1) -> Linear:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 3)) @ np.triu(np.full((3, 3), 0.6)) + 0.2
    return Linear(x, x @ np.array([1.0, -0.5, 0.3]) + 0.4 + NOISE * rng.normal(size=40))


PROBLEMS = {"collinear": collinear, "four": four}

METHODS: dict[str, Any] = {
    "nuts": lambda: bnn.NUTS(),
    "mclmc": lambda: bnn.MCLMC(),
    "mclmc-adjusted": lambda: bnn.MCLMC(adjusted=True),
    "chees": lambda: bnn.ChEES(),
    "meads": lambda: bnn.MEADS(),
    "smc": lambda: bnn.SMC(),
    "sgld": lambda: bnn.SGLD(),
    "sgld-10": lambda: bnn.SGLD(batch_size=10),
    "sgld-metropolis": lambda: bnn.SGLD(correction="metropolis"),
    "sghmc": lambda: bnn.SGHMC(),
    "sghmc-10": lambda: bnn.SGHMC(batch_size=10),
    "ivon": lambda: bnn.IVON(),
    "svgd": lambda: bnn.SVGD(),
    "swag": lambda: bnn.SWAG(),
    "svi": lambda: bnn.SVI(),
    "svi-fullrank": lambda: bnn.SVI(guide="fullrank"),
    "svi-mixture": lambda: bnn.SVI(guide="mixture"),
    "svi-spline": lambda: bnn.SVI(guide="spline"),
}


def measured(problem: Linear, method: Any, seed: int) -> dict[str, Any]:
    """What came of a fit, beside the closed form."""
    values, vectors = np.linalg.eigh(np.linalg.inv(problem.precision))
    began = time.perf_counter()
    try:
        posterior = bnn.fit(Linear.model, problem.x, problem.y, method, seed=seed, standardise=False)
    except BNNError as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - began}
    seconds = time.perf_counter() - began
    drawn = posterior.draws
    weight, bias = np.asarray(drawn["output.weight"]), np.asarray(drawn["output.bias"])
    flat = np.concatenate([weight.reshape(*weight.shape[:2], -1), bias], -1).reshape(-1, len(values))
    along = (flat - problem.mean) @ vectors
    ratio = along.var(0) / values
    marginal = flat.var(0) / np.diag(np.linalg.inv(problem.precision))
    judged = bnn.diagnose(posterior)
    return {
        "variance": [float(f) for f in (ratio.min(), np.median(ratio), ratio.max())],
        "marginal": [float(f) for f in (marginal.min(), np.median(marginal), marginal.max())],
        "mean": float(np.abs(along.mean(0) / np.sqrt(values)).max()),
        "verdict": judged.verdict,
        "converged": posterior.info.figures.get("converged"),
        "figures": {name: float(value) for name, value in judged.figures.items()},
        "warnings": list(posterior.info.warnings),
        "gradients": posterior.info.gradient_evaluations,
        "seconds": seconds,
    }


def main(names: list[str], problems: list[str], seeds: int, store: bool) -> list[dict[str, Any]]:
    rows = []
    print(
        f"{'problem':<10}{'method':<17}{'seed':>4} {'variance along eigenvectors':>29} {'marginal':>22} {'mean':>8}"
    )
    for problem in problems:
        exact = PROBLEMS[problem]()
        for name in names:
            for seed in range(seeds):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = measured(exact, METHODS[name](), seed)
                rows.append({"problem": problem, "method": name, "seed": seed, **found})
                head = f"{problem:<10}{name:<17}{seed:>4}"
                if "error" in found:
                    print(f"{head} {found['error']}", flush=True)
                    continue
                line = "".join(f"{value:>10.3g}" for value in found["variance"])
                margin = "".join(f"{value:>8.2g}" for value in found["marginal"])
                rhat = found["figures"].get("rhat", float("nan"))
                ess = found["figures"].get("ess_tail", float("nan"))
                print(
                    f"{head}{line}{margin}{found['mean']:>9.3g}  {found['verdict']}, converged={found['converged']}, "
                    f"rhat={rhat:.3f} tail={ess:.0f} {found['seconds']:.1f} s",
                    flush=True,
                )
                for text in found["warnings"]:
                    print(f"    {text[:150]}")
    if store:
        path = Path(__file__).parent / "results" / "badly_scaled.json"
        path.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.methods, options.problems, options.seeds, options.store)
