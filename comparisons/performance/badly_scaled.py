"""Methods at their defaults on posteriors in closed form: badly scaled in twenty dimensions, easy in four.

"collinear": 200 rows of twenty features that share one factor, noise 0.5, independent N(0, 1) priors: a Gaussian
posterior whose precision has condition number 2e5 (the factor is scaled to give it), with correlations close to -1.
"four": 40 rows of three correlated features and a bias, condition number 21.

For each method: the ratio of its variance to the exact one along the eigenvectors of the posterior's covariance
(smallest, median, largest) and per coordinate ("marginal"), the largest error of the mean in exact standard deviations,
what `bnn.diagnose` says, the method's own figure "converged", its gradients of all rows, and its warnings. A fit with
a density q is judged by 100,000 draws, which leave ratios standard errors of 0.5 %, and by KL(q || posterior) in nats.
Names that end in "-plain" are the samplers without coordinates of equal curvature.

Two kinds of fit fall short however long they run, and the limit is computed, too. "mixtures": the mixture of K
independent normals nearest to "four" by KL(q || p), beside what `SVI(guide="mixture")` reaches. "particles": the
variance that n particles of SVGD show on a standard normal in P dimensions, where they come to rest.
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
from ratios import machine
from scipy.optimize import minimize
from scipy.stats import norm, qmc

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import BNNError

STORED = Path(__file__).parent / "results" / "badly_scaled.json"
PARTS = ("fits", "mixtures", "particles")
CONDITION = 2e5
NOISE = 0.5
# Draws of a fit that has a density.
DRAWS = 100_000


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

    def log_density(self, flat: np.ndarray) -> np.ndarray:
        """Of the posterior, at weights and biases (n, P): (n,)."""
        away = flat - self.mean
        constant = np.linalg.slogdet(self.precision)[1] - len(self.mean) * np.log(2.0 * np.pi)
        return 0.5 * (constant - np.einsum("ni,ij,nj->n", away, self.precision, away))

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
    "laplace": lambda: bnn.Laplace(),
    "nuts": lambda: bnn.NUTS(),
    "mclmc": lambda: bnn.MCLMC(),
    "mclmc-adjusted": lambda: bnn.MCLMC(adjusted=True),
    "chees": lambda: bnn.ChEES(),
    "meads": lambda: bnn.MEADS(),
    "meads-plain": lambda: bnn.MEADS(preconditioning=False),
    "smc": lambda: bnn.SMC(),
    "sgld": lambda: bnn.SGLD(),
    "sgld-10": lambda: bnn.SGLD(batch_size=10),
    "sgld-metropolis": lambda: bnn.SGLD(correction="metropolis"),
    "sgld-plain": lambda: bnn.SGLD(preconditioner=None),
    "sghmc": lambda: bnn.SGHMC(),
    "sghmc-10": lambda: bnn.SGHMC(batch_size=10),
    "sghmc-plain": lambda: bnn.SGHMC(preconditioner=None),
    "ivon": lambda: bnn.IVON(),
    "svgd": lambda: bnn.SVGD(),
    "swag": lambda: bnn.SWAG(),
    "svi": lambda: bnn.SVI(),
    "svi-fullrank": lambda: bnn.SVI(guide="fullrank"),
    "svi-mixture": lambda: bnn.SVI(guide="mixture"),
    "svi-mixture-10": lambda: bnn.SVI(guide=bnn.guides.Mixture(components=10)),
    "svi-iaf": lambda: bnn.SVI(guide="iaf"),
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
    held = posterior.approximation
    exact_draws = posterior.kind == "iid" and held.stored_count is None
    # The sites are unconstrained: what an approximation draws are weights.
    drawn = held.draw(DRAWS, np.random.default_rng(seed)) if exact_draws else posterior.draws
    weight, bias = np.asarray(drawn["output.weight"]), np.asarray(drawn["output.bias"])
    flat = np.concatenate([weight.reshape(bias.size, -1), bias.reshape(-1, 1)], -1)
    divergence = None
    if exact_draws and (log_q := held.log_prob(drawn)) is not None:
        divergence = float((log_q - problem.log_density(flat)).mean())
    along = (flat - problem.mean) @ vectors
    ratio = along.var(0) / values
    marginal = flat.var(0) / np.diag(np.linalg.inv(problem.precision))
    judged = bnn.diagnose(posterior)
    return {
        "variance": [float(f) for f in (ratio.min(), np.median(ratio), ratio.max())],
        "marginal": [float(f) for f in (marginal.min(), np.median(marginal), marginal.max())],
        "mean": float(np.abs(along.mean(0) / np.sqrt(values)).max()),
        "divergence": divergence,
        "verdict": judged.verdict,
        "converged": posterior.info.figures.get("converged"),
        "figures": {name: float(value) for name, value in judged.figures.items()},
        "warnings": list(posterior.info.warnings),
        "gradients": posterior.info.gradient_evaluations,
        "seconds": seconds,
    }


# --- limits ---------------------------------------------------------------------------------------------


class Mixtures:
    """KL(q || N(mean, precision^-1)) over mixtures q of K independent normals, by fixed quasi-random draws.

    The vector of a mixture: K P locations, K P logarithms of standard deviations, K logits.
    """

    def __init__(self, exact: Linear, components: int, draws: int = 1024, seed: int = 0):
        self.exact, self.components, self.size = exact, components, len(exact.mean)
        noise = norm.ppf(qmc.Sobol(self.size, rng=np.random.default_rng(seed)).random(draws))
        self.noise = noise - noise.mean(0)

    def parts(self, vector: Any) -> tuple[Any, Any, Any]:
        """(locations, log scales, logits)."""
        cut = self.components * self.size
        shape = (self.components, self.size)
        return vector[:cut].reshape(shape), vector[cut : 2 * cut].reshape(shape), vector[2 * cut :]

    def divergence(self, vector: Any) -> Any:
        import jax
        import jax.numpy as jnp

        loc, log_scale, logits = self.parts(vector)
        log_weights, scale = jax.nn.log_softmax(logits), jnp.exp(log_scale)
        u = loc[:, None] + scale[:, None] * self.noise
        z = (u[:, :, None] - loc) / scale
        log_q = jax.nn.logsumexp(log_weights - 0.5 * (z**2).sum(-1) - log_scale.sum(-1), axis=-1)
        away = u - self.exact.mean
        log_p = -0.5 * jnp.einsum("kni,ij,knj->kn", away, self.exact.precision, away)
        log_p = log_p + 0.5 * np.linalg.slogdet(self.exact.precision)[1]
        return jnp.sum(jnp.exp(log_weights) * (log_q - log_p).mean(1))

    def shown(self, vector: np.ndarray) -> dict[str, list[float]]:
        """Shares of the exact variances: smallest, median and largest, along eigenvectors and per coordinate."""
        loc, log_scale, logits = self.parts(vector)
        weights = np.exp(logits - logits.max())
        weights = weights / weights.sum()
        about = loc - weights @ loc
        covariance = np.diag(weights @ np.exp(2.0 * log_scale)) + (weights[:, None] * about).T @ about
        truth = np.linalg.inv(self.exact.precision)
        values, vectors = np.linalg.eigh(truth)
        along = np.diag(vectors.T @ covariance @ vectors) / values
        marginal = np.diag(covariance) / np.diag(truth)
        return {
            name: [float(f) for f in (ratio.min(), np.median(ratio), ratio.max())]
            for name, ratio in (("variance", along), ("marginal", marginal))
        }

    def best(self, starts: int) -> list[np.ndarray]:
        """Local optima from so many random starts, by L-BFGS, the best first."""
        import jax

        with jax.enable_x64(True):
            both = jax.jit(jax.value_and_grad(self.divergence))
            sd = np.sqrt(np.diag(np.linalg.inv(self.exact.precision)))
            found = []
            for start in range(starts):
                rng = np.random.default_rng(start)
                spread = (0.3, 1.0)[start % 2] * rng.normal(size=(self.components, self.size))
                begun = [
                    (self.exact.mean + sd * spread).ravel(),
                    np.log(np.tile((0.3, 0.8)[start // 2 % 2] * sd, self.components)),
                    np.zeros(self.components),
                ]
                arrived = minimize(
                    lambda v: tuple(np.asarray(part, dtype=float) for part in both(v)),
                    np.concatenate(begun),
                    jac=True,
                    method="L-BFGS-B",
                    options={"maxiter": 3000, "maxfun": 4000, "maxcor": 30, "ftol": 1e-13, "gtol": 1e-8},
                )
                found.append((float(arrived.fun), arrived.x))
        return [vector for _, vector in sorted(found, key=lambda each: each[0])]

    def judged(self, vector: np.ndarray) -> dict[str, Any]:
        """The divergence by other draws than those that it was optimised on, and what the mixture shows."""
        import jax

        with jax.enable_x64(True):
            other = Mixtures(self.exact, self.components, draws=16384, seed=99)
            return {"divergence": float(jax.jit(other.divergence)(vector)), **self.shown(vector)}


def mixtures(components: list[int], starts: int, seeds: int) -> list[dict[str, Any]]:
    """The nearest mixtures to "four", and those that SVI fits at its other defaults."""
    exact, rows = four(), []
    for count in components:
        family = Mixtures(exact, count)
        optima = family.best(1 if count == 1 else starts)
        rows.append({"components": count, "of": "the family", **family.judged(optima[0])})
        rows[-1]["worst_of_starts"] = family.judged(optima[-1])["divergence"]
        tried = range(seeds if count > 1 else 0)
        for seed in tried:
            method = bnn.SVI(guide=bnn.guides.Mixture(components=count))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                posterior = bnn.fit(Linear.model, exact.x, exact.y, method, seed=seed, standardise=False)
            held: Any = posterior.approximation
            params = {name.split(":")[1]: np.asarray(value) for name, value in held.parameters.items()}
            log_scale = np.log(np.logaddexp(0.0, params["rho"]))
            vector = np.concatenate([params["loc"].ravel(), log_scale.ravel(), params["logits"]])
            rows.append({"components": count, "of": "SVI", "seed": seed, **family.judged(vector)})
        for row in rows[-1 - len(tried) :]:
            least, _, most = row["marginal"]
            print(
                f"mixture of {count:<3}{row['of']:<11}{row.get('seed', ''):>3}  KL {row['divergence']:.4f} nats, "
                f"variances of coordinates {least:.3f} to {most:.3f}",
                flush=True,
            )
    return rows


def particles(counts: list[int], sizes: list[int]) -> list[dict[str, Any]]:
    """The mean variance per coordinate that particles of SVGD show of a standard normal."""

    def flat(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [1], prior=priors.Normal(0.0, 1.0), bias=False)
        bnn.observe(y, f, likelihoods.Gaussian(1e6))

    rows = []
    for count in counts:
        for size in sizes:
            method = bnn.SVGD(particles=count)
            x = np.random.default_rng(0).normal(size=(5, size))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                posterior = bnn.fit(flat, x, np.zeros(5), method, standardise=False)
            shown = float(np.asarray(posterior.draws["output.weight"]).reshape(count, size).var(0).mean())
            rows.append({"particles": count, "dimensions": size, "variance": shown})
            print(f"{count} particles in {size} dimensions show a variance of {shown:.3f}", flush=True)
    return rows


# --- all of it ------------------------------------------------------------------------------------------


def fits(names: list[str], problems: list[str], seeds: int, shared: bool, keep: Any) -> list[dict[str, Any]]:
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
                seconds = found["seconds"]
                if shared:
                    del found["seconds"]
                rows.append({"problem": problem, "method": name, "seed": seed, **found})
                keep(rows)
                head = f"{problem:<10}{name:<17}{seed:>4}"
                if "error" in found:
                    print(f"{head} {found['error']}", flush=True)
                    continue
                line = "".join(f"{value:>10.3g}" for value in found["variance"])
                margin = "".join(f"{value:>8.2g}" for value in found["marginal"])
                rhat = found["figures"].get("rhat", float("nan"))
                ess = found["figures"].get("ess_tail", float("nan"))
                away = found["divergence"]
                judged = f"rhat={rhat:.3f} tail={ess:.0f}" if away is None else f"KL {away:.4f} nats"
                print(
                    f"{head}{line}{margin}{found['mean']:>9.3g}  {found['verdict']}, converged={found['converged']}, "
                    f"{judged}, {found['gradients']:.3g} gradients, {seconds:.1f} s",
                    flush=True,
                )
                for text in found["warnings"]:
                    print(f"    {text[:150]}")
    return rows


# What tells the rows of a part from each other.
KEYS = {
    "fits": ("problem", "method", "seed"),
    "mixtures": ("components", "of", "seed"),
    "particles": ("particles", "dimensions"),
}


def kept(part: str, rows: list[dict[str, Any]]) -> None:
    """Write rows to `results/`. Others that the file holds stay if the versions and cores are the same."""
    about = machine()
    whole: dict[str, Any] = {"machine": about} | {name: [] for name in PARTS}
    if STORED.exists() and (before := json.loads(STORED.read_text()))["machine"] == about:
        whole = before
    merged = {tuple(row.get(key) for key in KEYS[part]): row for row in [*whole[part], *rows]}
    whole[part] = list(merged.values())
    STORED.write_text(json.dumps(whole, indent=1) + "\n")


def main(
    names: list[str],
    problems: list[str],
    seeds: int,
    parts: list[str],
    shared: bool = False,
    store: bool = False,
    tiny: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Rows per part. tiny: small enough for a test."""

    def keep(part: str, rows: list[dict[str, Any]]) -> None:
        if store:
            kept(part, rows)

    found: dict[str, list[dict[str, Any]]] = {}
    if "fits" in parts:
        found["fits"] = fits(names, problems, seeds, shared, lambda rows: keep("fits", rows))
    if "mixtures" in parts:
        found["mixtures"] = mixtures(*(([1, 2], 2, 1) if tiny else ([1, 2, 3, 5, 10], 12, 5)))
        keep("mixtures", found["mixtures"])
    if "particles" in parts:
        found["particles"] = particles(*(([3], [4]) if tiny else ([20, 50, 100, 200], [1, 2, 4, 8, 20])))
        keep("particles", found["particles"])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    parser.add_argument("--shared", action="store_true", help="others compute here: seconds are left out")
    options = parser.parse_args()
    main(options.methods, options.problems, options.seeds, options.only, options.shared, options.store)
