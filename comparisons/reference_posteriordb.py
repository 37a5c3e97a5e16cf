"""Try to make a reference for the posterior "mnist_100-nn_rbm1bJ10" of posteriordb, which has none there.

    python comparisons/reference_posteriordb.py [--tiny] [--work DIR] [--out FILE]

Source: posteriordb (https://github.com/stan-dev/posteriordb), model nn_rbm1bJ10 after Lampinen and Vehtari (2001),
"Bayesian approach for neural networks: review and case studies". With M = 784 pixels, J = 10 hidden units, K = 10
classes and nu = 1/2,

    s_a ~ InvGamma(nu / 2, nu r_a / 2), r_a = (0.05 / M^(1/nu))^2     a_mj ~ N(0, s_a)     a_1j ~ N(0, 1)
    s_b ~ InvGamma(nu / 2, nu r_b / 2), r_b = (0.05 / J^(1/nu))^2     b_jk ~ N(0, s_b)     b_1k ~ N(0, 1)
    v_n = (1, tanh(x_n a + a_1) b + b_1)     P(y_n = k) = exp(v_nk) / sum_l exp(v_nl)

The data are the first 100 training rows of MNIST, pixels 0..255. `network` is this model in the language of the
library, with weights in units of their scale, a = sqrt(s_a) base.

NUTS runs on fewer coordinates, without an approximation. With x = z V', V orthonormal columns (a singular value
decomposition), the likelihood has x a = z (V' a), and V' a ~ N(0, s_a I) as a is. The rest of a, orthogonal to V, keeps
its prior given s_a and is drawn from there. So 100 columns stand for 784.

Draws are kept in the work folder as they come, so an interrupted run goes on where it stopped.

What is hard about it: the priors of both variances have heavy tails, and their medians are so near zero that the
network is constant there. The chains found two regions. In the first the network is constant, the log likelihood is
near 100 log(1 / 10), and the variances move as under their priors. In the second, weights are orders of magnitude
larger and every row is fitted; steps are at least twenty times smaller, and every tree is saturated. Three of eight
chains were in the second region after their warm-up. A fourth reached it later, with the step size of the first region,
and diverged. No chain returned. The share of the posterior in the first region is unknown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from reference_certificate import BULK, RHAT, mixing
from reference_problems import FOLDER
from scipy.special import gammaln, log_softmax, softmax
from study import kept, stamp

import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, ops, priors
from ppl_bnn.core.files import write_whole

NAME = "mnist_100-nn_rbm1bJ10"
# Degrees of freedom of both variances, and what their scale is before it is divided by the number of inputs^(1 / NU).
NU, SCALE = 0.5, 0.05
# What a certificate of a reference asks for.
WANTED = f"R-hat < {RHAT:g}, bulk ESS > {BULK:g}, no divergence and no saturated tree"


@dataclass(frozen=True)
class Sizes:
    """How much is computed. The defaults are a budget of a quarter of an hour, not what a certificate takes."""

    rows: int = 100
    width: int = 10
    chains: int = 8
    warmup: int = 500
    draws: int = 500
    max_tree_depth: int = 8


TINY = Sizes(rows=20, width=2, chains=2, warmup=20, draws=20, max_tree_depth=3)


def rate(inputs: int) -> float:
    """The rate of the inverse gamma prior of a variance of weights."""
    return 0.5 * NU * (SCALE / inputs ** (1.0 / NU)) ** 2


def network(x: Any, y: Any = None, *, pixels: int, width: int = 10, classes: int = 10) -> None:
    """The model. x: (N, columns); the prior is that of `pixels` columns. y: (N,), labels from 0."""

    def weights(name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        inputs = pixels if name == "hidden0.weight" else fan_in
        variance = bnn.sample(f"{name}.variance", dist.InverseGamma(0.5 * NU, rate(inputs)))
        base = bnn.sample(f"{name}.base", dist.Normal(0.0, 1.0).expand(shape).to_event())
        return bnn.deterministic(name, ops.sqrt(variance) * base)

    f = bnn.mlp(x, [width, classes - 1], "tanh", weights, bias=priors.Normal())
    bnn.observe(y, ops.concatenate([ops.ones_like(f[:, :1]), f]), likelihoods.Categorical())


def stan_log_joint(w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    """The log density of the Stan program in NumPy, with all constants.

    w: "sigma2_alpha", "sigma2_beta" (), "alpha" (M, J), "beta" (J, K - 1), "alpha1" (J,), "beta1" (K - 1,), the names
    of the program. x: (N, M). y: (N,), labels from 0.
    """

    def normal(value: np.ndarray, variance: float) -> float:
        return float(np.sum(-0.5 * value**2 / variance - 0.5 * np.log(2.0 * np.pi * variance)))

    total = normal(w["alpha1"], 1.0) + normal(w["beta1"], 1.0)
    for name in ("alpha", "beta"):
        variance, r = float(w[f"sigma2_{name}"]), rate(len(w[name]))
        shape = 0.5 * NU
        total += shape * np.log(r) - gammaln(shape) - (shape + 1.0) * np.log(variance) - r / variance
        total += normal(w[name], variance)
    f = np.tanh(x @ w["alpha"] + w["alpha1"]) @ w["beta"] + w["beta1"]
    v = np.concatenate([np.ones((len(x), 1)), f], axis=1)
    return float(total + log_softmax(v, axis=1)[np.arange(len(y)), y].sum())


def in_stan(w: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
    """A draw of `network` under the names of Stan, and log |d (draw in Stan) / d (draw of `network`)|."""
    found, jacobian = {"alpha1": w["hidden0.bias"], "beta1": w["output.bias"]}, 0.0
    for name, site in (("alpha", "hidden0.weight"), ("beta", "output.weight")):
        variance, base = w[f"{site}.variance"], w[f"{site}.base"]
        found |= {f"sigma2_{name}": variance, name: np.sqrt(variance) * base}
        jacobian += 0.5 * base.size * float(np.log(variance))
    return found, jacobian


def reduced(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """z (N, N) and V (M, N) with x = z V' and orthonormal columns of V."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return u * s, vt.T


def rows_of(sizes: Sizes, tiny: bool) -> tuple[np.ndarray, np.ndarray]:
    """The training rows: of MNIST in grey values 0..255, or tiny of the digits that need no download."""
    table = bnn.data.load("digits") if tiny else bnn.data.load("mnist", part="train")
    x = table.x[: sizes.rows]
    return (x if tiny else np.round(255.0 * x)), table.y[: sizes.rows]


def largest_cost(model: Any, z: np.ndarray, y: np.ndarray, sizes: Sizes) -> float:
    """Seconds that all transitions take on one core if every tree is full, from the time of gradients."""

    def timed(given: Any) -> float:
        import jax

        u = {
            name: given.program.system.asarray(value[0])
            for name, value in given.program.prior_draws(given.x, given.y, 0, 1).items()
        }

        def steps(u: Any) -> Any:
            slope = jax.grad(lambda u: given.program.log_joint(u, given.x, given.y))
            return jax.lax.fori_loop(
                0, 100, lambda _, u: jax.tree.map(lambda a, b: a + 1e-9 * b, u, slope(u)), u
            )

        run = jax.jit(steps).lower(u).compile()
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            jax.block_until_ready(run(u))
            seconds.append((time.perf_counter() - begun) / 100)
        # Whatever else the machine does only adds to it.
        return min(seconds)

    start = bnn.fit(model, z, y, bnn.MAP(steps=1), seed=0)
    transitions = sizes.chains * (sizes.warmup + sizes.draws)
    return start.with_problem(timed) * transitions * 2.0**sizes.max_tree_depth


def outcome(posterior: Any, z: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """What a certificate would be judged by."""
    p = softmax(posterior.predictor(z), axis=-1)
    likelihood = np.log(p[:, :, np.arange(len(y)), y]).sum(axis=-1)
    watched = {
        "class probabilities at the training rows": p.reshape(*p.shape[:2], -1),
        "log likelihood": likelihood[..., None],
        "log prior": (posterior.statistics["lp"] - likelihood)[..., None],
        "log variances": np.log(
            np.stack([posterior.draws[f"{site}.weight.variance"] for site in ("hidden0", "output")], axis=-1)
        ),
    }
    figures = {
        name: dict(zip(("rhat", "bulk", "tail"), mixing(value), strict=True))
        for name, value in watched.items()
    }
    divergences = int(posterior.statistics["diverging"].sum())
    saturated = int(posterior.statistics["reached_max_tree_depth"].sum())
    converged = all(each["rhat"] < RHAT and each["bulk"] > BULK for each in figures.values())
    info = posterior.info
    return {
        "convergence": figures,
        "divergences": divergences,
        "saturated trees": saturated,
        "transitions": int(posterior.statistics["diverging"].size),
        "mean log likelihood of each chain": np.round(likelihood.mean(axis=1), 2).tolist(),
        "seconds": round(info.compile_seconds + info.run_seconds, 1),
        "gradients": float(info.gradient_evaluations or 0),
        "holds": bool(converged and not divergences and not saturated),
    }


def sentence(found: dict[str, Any], sizes: Sizes) -> str:
    """What was tried, and what of a certificate holds."""
    worst = max(found["convergence"].values(), key=lambda each: each["rhat"])["rhat"]
    least = min(each["bulk"] for each in found["convergence"].values())
    tried = (
        f"Tried: NUTS, {sizes.chains} chains from prior draws, {sizes.warmup} + {sizes.draws} transitions each, trees "
        f"of depth {sizes.max_tree_depth} at most. Found: R-hat up to {worst:.3g}, bulk ESS down to {least:.3g}, "
        f"{found['divergences']} divergences, {found['saturated trees']} saturated trees of {found['transitions']}."
    )
    each = found["mean log likelihood of each chain"]
    regions = f"The mean log likelihoods of the chains lie between {min(each):.4g} and {max(each):.4g}."
    verdict = "This holds" if found["holds"] else "This does not hold, so there is no reference"
    return f"{tried} {regions} A certificate needs {WANTED}. {verdict}."


def main(tiny: bool = False, work: Path | None = None, out: Path | None = None) -> dict[str, Any]:
    """Run, or go on with, the attempt; returns what is stored."""
    sizes = TINY if tiny else Sizes()
    work = work or Path(tempfile.mkdtemp() if tiny else tempfile.gettempdir()) / "reference_posteriordb"
    x, y = rows_of(sizes, tiny)
    z, _ = reduced(x)
    model = partial(network, pixels=x.shape[1], width=sizes.width)
    estimate = largest_cost(model, z, y, sizes)
    print(f"at most {estimate:.0f} s of one core", flush=True)
    method = bnn.NUTS(
        checkpoint=work / "nuts",
        **{key: value for key, value in asdict(sizes).items() if key not in ("rows", "width")},
    )
    found = outcome(bnn.fit(model, z, y, method, seed=0), z, y)
    # A run that goes on with finished chains takes no time; what is stored is that of the one which finished them.
    found |= kept(work, "cost", sizes, lambda: {"seconds": found["seconds"]})
    content = {
        "posterior": f"a small stand-in for {NAME}" if tiny else NAME,
        "sentence": sentence(found, sizes),
        **found,
        "sizes": asdict(sizes),
        "seconds of one core, estimated at most": round(estimate),
        "provenance": stamp(),
    }
    out = out or (work if tiny else FOLDER) / "posteriordb.json"
    write_whole(out, lambda part: part.write_text(json.dumps(content, indent=1) + "\n"))
    print(content["sentence"], flush=True)
    return content


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--tiny", action="store_true", help="seconds: 20 rows of small digits, two hidden units"
    )
    parser.add_argument("--work", type=Path, help="folder for draws as they come")
    parser.add_argument("--out", type=Path, help="file of the outcome")
    main(**vars(parser.parse_args()))
