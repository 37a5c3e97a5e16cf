"""Samplers through the language against NUTS written by hand in NumPyro: what an effective draw of the functions costs.

Both sides: the same network (one hidden layer of 50 tanh units, sampled noise), the same table standardised, four
chains, float64, on the cores of this machine, each run in a process of its own: imports are left out, compilation is
counted. By hand is `MCMC(NUTS(model), chain_method="parallel")` over as many host devices as chains, without a bar.

An effective draw is one by the minimum, over the network's outputs at 50 rows, the log likelihood and the noise, of
ArviZ's bulk ESS over all chains, computed by the same lines for both sides. Per round, each side with the seed of the
round, in alternating order:

- the best sampler here over the one by hand, in effective draws per second, each with the settings that `samplers`
  gives it (MCLMC makes twice as many draws; the facts have its figures). Only a sampler counts whose predictive
  agrees with that by hand (mean gap below twice the noise floor of the reference, or a tenth of a standard deviation;
  standard deviations within a tenth), because MCLMC is not exact;
- our NUTS over the one by hand, in gradients per second of a whole run, and in effective draws per gradient, which
  should be equal within its error over rounds;
- NUTS from the best of several warm starts over the one by hand, in effective draws per second; the fit of the start
  counts. One of them has shorter trees, too, and the facts say what these give without a warm start.

    python comparisons/performance/sampling.py [--only diabetes] [--rounds 3] [--store] [--tiny] [--checkpoint DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from problem import by_hand_in_numpyro, in_the_language
from ratios import Ratio, report

import ppl_bnn as bnn
from ppl_bnn import scores
from ppl_bnn.posterior.convergence import mixing
from ppl_bnn.prediction.prediction import Prediction

BY_HAND, NUTS, WARM, MCLMC = "NUTS by hand", "NUTS", "NUTS, warm start", "MCLMC"
SHORTER = "trees of 63"
PROBES = 50


@dataclass(frozen=True)
class Sizes:
    """One run of every side. draws, warmup: per chain."""

    width: int = 50
    chains: int = 4
    warmup: int = 500
    draws: int = 500
    rows: int | None = None


FULL = Sizes()
TINY = Sizes(width=2, chains=2, warmup=60, draws=60, rows=20)


def samplers(sizes: Sizes) -> dict[str, Callable[[], Any]]:
    """The methods of this side by name, made when they are asked for.

    About every second draw of MCLMC is effective, and three of four of NUTS: it makes twice as many, for as many
    effective ones or more.
    """
    common: dict[str, Any] = {"chains": sizes.chains, "draws": sizes.draws}
    twice: dict[str, Any] = {"chains": sizes.chains, "draws": 2 * sizes.draws}
    short, mode = max(50, sizes.warmup // 10), bnn.MAP(steps=300, polish=False)
    # The variances of a guide are the mass matrix from beginning to end: all that is tuned is the step size.
    kept: dict[str, Any] = {"start": bnn.SVI(steps=1000, learning_rate=0.02), "adapt_mass_matrix": False}
    return {
        NUTS: lambda: bnn.NUTS(warmup=sizes.warmup, **common),
        WARM: lambda: bnn.NUTS(warmup=short, **kept, **common),
        f"{WARM}, longer": lambda: bnn.NUTS(warmup=2 * short, **kept, **common),
        f"{WARM} at a mode": lambda: bnn.NUTS(warmup=short, start=mode, **common),
        f"{WARM} at a mode, {SHORTER}": lambda: bnn.NUTS(
            warmup=short, start=mode, max_tree_depth=6, **common
        ),
        f"{NUTS}, {SHORTER}": lambda: bnn.NUTS(warmup=sizes.warmup, max_tree_depth=6, **common),
        MCLMC: lambda: bnn.MCLMC(warmup=3 * short, **twice),
        f"{MCLMC}, longer warm-up": lambda: bnn.MCLMC(warmup=sizes.warmup, start=mode, **twice),
        f"{MCLMC}, adjusted": lambda: bnn.MCLMC(adjusted=True, warmup=sizes.warmup, start=mode, **common),
    }


def table(case: str, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """x and y, each column standardised over all rows that are used."""
    loaded = bnn.data.load(case)
    x, y = loaded.x[: sizes.rows], loaded.y[: sizes.rows]
    spread = x.std(0)
    return (x - x.mean(0)) / np.where(spread > 0, spread, 1.0), (y - y.mean()) / y.std()


# --- one run of one side --------------------------------------------------------------------------


def run_by_hand(case: str, sizes: Sizes, seed: int, apart: bool) -> dict[str, Any]:
    """MCMC(NUTS(model)) as a user of NumPyro has it; the gradients of the warm-up are counted along."""
    import jax
    import numpyro
    from numpyro.infer import MCMC

    if apart:
        numpyro.set_host_device_count(sizes.chains)
    x, y = table(case, sizes)
    with jax.enable_x64(True):
        start = time.perf_counter()
        mcmc = MCMC(
            counted(by_hand_in_numpyro([sizes.width])),
            num_warmup=sizes.warmup,
            num_samples=sizes.draws,
            num_chains=sizes.chains,
            chain_method="parallel" if apart else "sequential",
            progress_bar=False,
        )
        mcmc.run(jax.random.PRNGKey(seed), x, y, extra_fields=("gradients",))
        draws = {name: np.asarray(value) for name, value in mcmc.get_samples(group_by_chain=True).items()}
        gradients = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["gradients"])[:, -1].sum()
        seconds = time.perf_counter() - start
    return {"draws": draws, "seconds": seconds, "gradients": float(gradients)}


def counted(model: Any) -> Any:
    """NUTS that counts its leapfrog steps from the first transition on, which the fields of NumPyro begin after."""
    from collections import namedtuple

    from numpyro.infer import NUTS as Kernel
    from numpyro.infer.mcmc import MCMCKernel

    # The key is what `MCMC` gives a run that goes on; chains go on with the key of the inner state.
    State = namedtuple("State", ["inner", "gradients", "rng_key"])

    class Counted(MCMCKernel):
        sample_field = "inner.z"
        default_fields = ("inner.z",)

        def __init__(self) -> None:
            self.kernel = Kernel(model)

        def init(
            self, rng_key: Any, num_warmup: int, init_params: Any, model_args: Any, model_kwargs: Any
        ) -> Any:
            inner = self.kernel.init(rng_key, num_warmup, init_params, model_args, model_kwargs)
            return State(inner, inner.num_steps, inner.rng_key)

        def sample(self, state: Any, model_args: Any, model_kwargs: Any) -> Any:
            inner = self.kernel.sample(state.inner, model_args, model_kwargs)
            return State(inner, state.gradients + inner.num_steps, state.rng_key)

        def postprocess_fn(self, args: Any, kwargs: Any) -> Any:
            return self.kernel.postprocess_fn(args, kwargs)

    return Counted()


def run_here(name: str, case: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    """One fit, from the call to the draws."""
    x, y = table(case, sizes)
    model, method = in_the_language([sizes.width]), samplers(sizes)[name]()
    start = time.perf_counter()
    posterior = bnn.fit(model, x, y, method, seed=seed)
    draws = posterior.draws
    seconds = time.perf_counter() - start
    assert posterior.info.gradient_evaluations is not None
    return {
        "draws": draws,
        "seconds": seconds,
        "gradients": posterior.info.gradient_evaluations,
        "compile_seconds": posterior.info.compile_seconds,
    }


def functions(draws: Mapping[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """f (chain, draw, PROBES), log likelihood and noise (chain, draw, 1), of draws of the weights."""
    noise = draws["noise"]
    chosen = np.sort(np.random.default_rng(0).choice(len(x), min(PROBES, len(x)), replace=False))
    f = np.empty((*noise.shape, len(chosen)))
    likelihood = np.empty((*noise.shape, 1))
    for chain, draw in np.ndindex(noise.shape):
        one = {name: value[chain, draw] for name, value in draws.items()}
        hidden = np.tanh(x @ one["hidden0.weight"] + one["hidden0.bias"])
        out = hidden @ one["output.weight"][:, 0] + one["output.bias"][0]
        f[chain, draw] = out[chosen]
        likelihood[chain, draw] = np.sum(-0.5 * ((y - out) / one["noise"]) ** 2 - np.log(one["noise"]))
    return {"f": f, "log likelihood": likelihood, "noise": noise[..., None]}


@dataclass(frozen=True)
class Measured:
    """One run: seconds, gradients, the least bulk ESS and the largest R-hat, and f with its noise for comparison."""

    seconds: float
    gradients: float
    ess: float
    rhat: float
    f: np.ndarray
    noise: np.ndarray

    @property
    def per_second(self) -> float:
        return self.ess / self.seconds

    @property
    def per_gradient(self) -> float:
        return self.ess / self.gradients

    @property
    def prediction(self) -> Prediction:
        flat = self.f.reshape(-1, self.f.shape[-1])
        noise = np.broadcast_to(self.noise.reshape(-1, 1), flat.shape)
        return Prediction("Normal", {"loc": flat, "scale": noise})


def kept(checkpoint: str, name: str, case: str, sizes: Sizes, seed: int, apart: bool) -> Measured:
    """`measure`, from the folder where it is there; a run takes minutes, and all of them an hour."""
    if not checkpoint:
        return measure(name, case, sizes, seed, apart)
    words = "_".join(re.findall(r"\w+", f"{case} {seed} {name} {sizes}"))
    path = Path(checkpoint) / f"{words}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = asdict(measure(name, case, sizes, seed, apart))
        part = path.with_suffix(".part.npz")
        np.savez(part, **found)
        part.replace(path)
    with np.load(path) as stored:
        return Measured(**{key: value if value.ndim else float(value) for key, value in stored.items()})


def measure(name: str, case: str, sizes: Sizes, seed: int, apart: bool = True) -> Measured:
    """One run of one side, in a process of its own where `apart`."""
    if not apart:
        found = (
            run_by_hand(case, sizes, seed, False) if name == BY_HAND else run_here(name, case, sizes, seed)
        )
    else:
        found = in_a_process(name, case, sizes, seed)
    x, y = table(case, sizes)
    values = functions(found["draws"], x, y)
    mixed = [mixing(value) for value in values.values()]
    return Measured(
        found["seconds"],
        found["gradients"],
        min(each.ess_bulk for each in mixed),
        max(each.rhat for each in mixed),
        values["f"],
        values["noise"],
    )


_CHILD = """
import json, sys
import numpy as np
import jax, numpyro, arviz_base
import ppl_bnn as bnn
import sampling

name, case, seed, path, sizes = json.loads(sys.argv[1])
sizes = sampling.Sizes(**sizes)
if name == sampling.BY_HAND:
    found = sampling.run_by_hand(case, sizes, seed, True)
else:
    found = sampling.run_here(name, case, sizes, seed)
draws = {"draws:" + key: value for key, value in found["draws"].items()}
np.savez(path, seconds=found["seconds"], gradients=found["gradients"], **draws)
"""


def in_a_process(name: str, case: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    """A run in a fresh interpreter."""
    with tempfile.TemporaryDirectory(prefix="ppl-bnn-") as folder:
        path = Path(folder) / "run.npz"
        subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                _CHILD,
                json.dumps([name, case, seed, str(path), asdict(sizes)]),
            ],
            cwd=Path(__file__).parent,
            check=True,
        )
        with np.load(path) as stored:
            draws = {key.removeprefix("draws:"): stored[key] for key in stored if key.startswith("draws:")}
            return {
                "draws": draws,
                "seconds": float(stored["seconds"]),
                "gradients": float(stored["gradients"]),
            }


# --- the comparison -------------------------------------------------------------------------------


def agrees(candidate: list[Measured], reference: list[Measured]) -> tuple[bool, str]:
    """Whether the predictive of all rounds is that of the reference, and the figures that say so."""
    ours, theirs = pooled(candidate), pooled(reference)
    groups = np.concatenate(
        [
            np.repeat(np.arange(run.f.shape[0]) + index * run.f.shape[0], run.f.shape[1])
            for index, run in enumerate(reference)
        ]
    )
    floor = scores.noise_floor(theirs, groups)["mean_gap"]
    found = scores.fidelity(ours, theirs)
    good = found["mean_gap"] < max(2.0 * floor, 0.1) and abs(math.log(found["sd_ratio"] or 1e-9)) < 0.1
    said = f"mean gap {found['mean_gap']:.3f} (floor {floor:.3f}), sd ratio {found['sd_ratio']:.3f}"
    return good, said


def pooled(runs: list[Measured]) -> Prediction:
    parts = [run.prediction.parameters for run in runs]
    return Prediction("Normal", {key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


def compare(
    case: str, sizes: Sizes, rounds: int, apart: bool, sides: str = "", checkpoint: str = ""
) -> tuple[list[Ratio], dict[str, Any]]:
    """All ratios of one table. sides: the samplers to run beside our NUTS, split by ;; none: all of them."""
    chosen = [name for name in samplers(sizes) if not sides or name in (NUTS, *sides.split(";"))]
    names = [BY_HAND, *chosen]
    runs: dict[str, list[Measured]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names if index % 2 == 0 else reversed(names):
            run = kept(checkpoint, name, case, sizes, index, apart)
            runs[name].append(run)
            print(
                f"{case}, round {index}, {name:<22} {run.seconds:7.1f} s, {run.gradients:9.3g} gradients, "
                f"ESS {run.ess:6.0f}, R-hat {run.rhat:.3f}",
                flush=True,
            )
    theirs = runs[BY_HAND]

    def ratio(name: str, read: Callable[[Measured], float]) -> list[float]:
        return [read(ours) / read(their) for ours, their in zip(runs[name], theirs, strict=True)]

    facts: dict[str, Any] = {}
    candidates: dict[str, list[float]] = {}
    for name in names[1:]:
        good, said = agrees(runs[name], theirs)
        per_second = ratio(name, lambda run: run.per_second)
        facts[f"{case}: {name}"] = (
            f"{statistics.median(per_second):.2f} times the effective draws per second; {said}: "
            f"{'agrees' if good else 'does not agree, does not count'}; "
            f"least ESS {[round(run.ess) for run in runs[name]]}"
        )
        if good:
            candidates[name] = per_second
    # Where none agrees there is no best: the figure is that of NUTS, and the facts say why.
    best = max(candidates, key=lambda name: statistics.median(candidates[name]), default=NUTS)
    warm = [name for name in candidates if name.startswith(WARM)]
    warmest = max(warm, key=lambda name: statistics.median(candidates[name]), default=None)
    per_gradient = ratio(NUTS, lambda run: run.per_gradient)
    logs = np.log(per_gradient)
    error = logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    equal = abs(logs.mean()) <= 2.0 * error
    facts |= {
        f"{case}: best sampler": best,
        f"{case}: best warm start": warmest,
        f"{case}: ESS per gradient, log ratio": f"{logs.mean():.3f} +- {error:.3f} (s.e. over {len(logs)} rounds): "
        f"{'equal' if equal else 'NOT EQUAL'} within 2 s.e.",
        f"{case}: least ESS by hand": [round(run.ess) for run in theirs],
        f"{case}: largest R-hat by hand": [round(run.rhat, 3) for run in theirs],
    }
    ratios = [
        Ratio(
            f"{case}: best sampler / by hand, ESS/s",
            5.0,
            candidates.get(best, ratio(best, lambda run: run.per_second)),
            "ESS/s",
        ),
        Ratio(
            f"{case}: NUTS / by hand, gradients/s",
            0.98,
            ratio(NUTS, lambda run: run.gradients / run.seconds),
            "1/s",
        ),
        # A ratio of equals is 1; what it may fall short by is its own error.
        Ratio(
            f"{case}: NUTS / by hand, ESS per gradient", math.exp(-2.0 * error), per_gradient, "ESS/gradient"
        ),
    ]
    if warmest is not None:
        name = f"{case}: warm-started NUTS / by hand, ESS/s"
        ratios.append(Ratio(name, 2.0, candidates[warmest], "ESS/s"))
    return ratios, facts


def main(
    tiny: bool = False,
    rounds: int = 3,
    store: bool = False,
    only: str = "",
    sides: str = "",
    checkpoint: str = "",
) -> dict[str, float]:
    sizes, sides = (TINY, f"{MCLMC};{WARM}") if tiny else (FULL, sides)
    ratios: list[Ratio] = []
    facts: dict[str, Any] = {"chains, warm-up, draws": [sizes.chains, sizes.warmup, sizes.draws]}
    for case in ("diabetes",) if tiny else ("diabetes", "airfoil"):
        if only and case not in only.split(";"):
            continue
        found, said = compare(case, sizes, rounds, not tiny, sides, checkpoint)
        ratios += found
        facts |= said
        # What was measured is told, and kept, table by table.
        report("sampling", found, said, store)
    return report("sampling", ratios, facts, store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="tables to run, split by ;")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    parser.add_argument("--sides", default="", help="samplers beside NUTS, split by ;, such as MCLMC")
    parser.add_argument(
        "--checkpoint", default="", help="folder where finished runs are kept, and taken from"
    )
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store, options.only, options.sides, options.checkpoint)
