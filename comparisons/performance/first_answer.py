"""From `python script.py` to a prediction: the time of a whole process, against the same thing written by hand.

A process imports what it needs, fits ten tanh units to a table of 353 rows and 10 columns, and predicts 80 rows. Each
process is a new one, without a compilation cache. The peer does as many steps as the fit took here, which its first
round finds.

MAP is against AutoDelta, SVI against AutoNormal, and Laplace against AutoLaplaceApproximation, all with Trace_ELBO,
Adam and `Predictive`. AutoLaplaceApproximation needs a positive definite Hessian where Adam ends; a case in which it
has none fails by hand and has no ratio.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ratios import alternate, keep, report

FOLDER = Path(__file__).parent
DATA = "from problem import by_hand_in_numpyro, by_hand_in_pyro, data, in_the_language\n"
OURS = """
import ppl_bnn as bnn
{data}
x, y = data({rows}, 10)
posterior = bnn.fit(in_the_language({widths}), x, y, bnn.{method})
assert posterior.predict(x[:80]).mean.shape == (min(80, len(x)),)
print("steps", len(posterior.info.history["loss"]))
"""
NUMPYRO = """
import jax
import numpyro
from numpyro.infer import SVI, Predictive, Trace_ELBO, autoguide
{data}
numpyro.enable_x64()
x, y = data({rows}, 10)
model = by_hand_in_numpyro({widths})
guide = autoguide.{guide}(model)
result = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO()).run(
    jax.random.PRNGKey(0), {steps}, x, y, progress_bar=False
)
draws = guide.sample_posterior(jax.random.PRNGKey(1), result.params, sample_shape=({draws},))
assert Predictive(model, draws)(jax.random.PRNGKey(2), x[:80])["y"].shape[0] == {draws}
"""
PYRO = """
import pyro
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO, autoguide
{data}
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
pyro.enable_validation(False)
x, y = (torch.tensor(array) for array in data({rows}, 10))
model = by_hand_in_pyro({widths})
guide = autoguide.{guide}(model)
inference = SVI(model, guide, pyro.optim.Adam({{"lr": 0.01}}), Trace_ELBO())
for _ in range({steps}):
    inference.step(x, y)
{after}
assert Predictive(model, guide=guide, num_samples={draws})(x[:80])["y"].shape[0] == {draws}
"""
# (name, method here, system, guide by hand, draws of its prediction)
CASES = [
    ("MAP in NumPyro", "MAP(steps={most})", "numpyro", "AutoDelta", 1),
    ("SVI in NumPyro", "SVI(steps={svi})", "numpyro", "AutoNormal", 1000),
    (
        "Laplace in NumPyro",
        "Laplace(start=bnn.MAP(steps={most}))",
        "numpyro",
        "AutoLaplaceApproximation",
        1000,
    ),
    ("MAP in Pyro", "MAP(steps={most}, ppl='pyro')", "pyro", "AutoDelta", 1),
    ("SVI in Pyro", "SVI(steps={svi}, ppl='pyro')", "pyro", "AutoNormal", 100),
    (
        "Laplace in Pyro",
        "Laplace(start=bnn.MAP(steps={most}, ppl='pyro'), ppl='pyro')",
        "pyro",
        "AutoLaplaceApproximation",
        100,
    ),
]


def run(program: str) -> tuple[float, str]:
    """Seconds of a new process, and what it printed."""
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return time.perf_counter() - start, done.stdout


def main(tiny: bool = False, rounds: int = 3, store: bool = False, only: str = "") -> dict[str, float]:
    """only: the case of this name."""
    rows, widths = (20, [3]) if tiny else (353, [10])
    most, svi = (100, 100) if tiny else (20_000, 10_000)
    shared = {"data": DATA, "rows": rows, "widths": widths}
    facts: dict[str, Any] = {"rows": rows, "widths": widths}
    ratios = []
    for name, method, ppl, guide, draws in CASES[:1] if tiny else CASES:
        if only not in ("", name):
            continue
        program = OURS.format(method=method.format(most=most, svi=svi), **shared)
        steps: list[int] = []

        def ours(_: int, program: str = program, steps: list[int] = steps) -> float:
            seconds, printed = run(program)
            steps.append(int(printed.split()[-1]))
            return 1.0 / seconds

        def theirs(
            _: int, ppl: str = ppl, guide: str = guide, draws: int = draws, steps: list[int] = steps
        ) -> float:
            after = "guide = guide.laplace_approximation(x, y)" if "Laplace" in guide else ""
            given = {"guide": guide, "steps": steps[0], "draws": draws, "after": after, **shared}
            return 1.0 / run((NUMPYRO if ppl == "numpyro" else PYRO).format(**given))[0]

        target = 1.0 / 1.3
        try:
            ratios.append(alternate(f"{name} / by hand", target, "answers/s", ours, theirs, rounds))
            print(ratios[-1], flush=True)
        except RuntimeError as error:
            # The Hessian of the guide by hand may not be positive definite where its optimiser ends.
            facts[f"{name}: no ratio"] = str(error).strip().splitlines()[-1]
            print(f"{name}: {facts[f'{name}: no ratio']}", flush=True)
        if store:
            keep("first_answer", ratios, facts)
    return report("first_answer", ratios, facts, store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    parser.add_argument("--only", default="", choices=[case[0] for case in CASES])
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store, options.only)
