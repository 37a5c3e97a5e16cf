"""`posterior.predict` with 1000 draws against Pyro's sequential `Predictive` on the same draws and rows.

Both sides give 1000 predictive distributions per row: ours as parameters of the mixture, Pyro's as f of each draw.
The first call of ours, which compiles in NumPyro, is not counted and is printed as a fact. The network is the one of
the UCI benchmarks, 50 ReLU units; with tanh units most of the time of both sides in torch is torch's own tanh.

What torch itself does is measured beside: the two products, the additions and the activation over the same arrays,
each result a new array, with nothing around them, in the best of several sizes of block.

Peak memory is measured in processes of their own: by how much the high-water mark of resident memory rises during the
prediction, less the result; once with what compiling takes, and once more in the same process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from problem import by_hand_in_pyro, data, in_the_language
from ratios import Ratio, alternate, report

import ppl_bnn as bnn

WIDTHS = [50]
TARGETS = {
    ("numpyro", 10_000, "relu"): 5.0,
    ("numpyro", 100, "relu"): 20.0,
    ("pyro", 10_000, "relu"): 3.0,
    ("pyro", 100, "relu"): 3.0,
    ("numpyro", 10_000, "tanh"): 5.0,
    ("pyro", 10_000, "tanh"): 3.0,
}


def main(tiny: bool = False, rounds: int = 3, store: bool = False) -> dict[str, float]:
    widths, steps = ([3], 20) if tiny else (WIDTHS, 200)
    x, y = data(50)
    ratios: list[Ratio] = []
    facts: dict[str, Any] = {"widths": widths, "draws": 1000}
    for (ppl, rows, activation), target in TARGETS.items():
        rows = 10 if tiny else rows
        model = in_the_language(widths, activation)
        new, _ = data(rows)
        posterior = bnn.fit(model, x, y, bnn.SVI(ppl=ppl, steps=steps, elbo_draws=2))
        start = time.perf_counter()
        posterior.predict(new)
        facts[f"first call, {ppl}, {rows} rows, {activation}, seconds"] = round(
            time.perf_counter() - start, 2
        )
        draws = {name: value[0, : 20 if tiny else None] for name, value in posterior.draws.items()}
        check(posterior, draws, new, widths, activation)
        ratios.append(
            alternate(
                f"predict in {ppl} / Pyro's Predictive, {rows} rows, {activation}",
                target,
                "1/s",
                lambda index, posterior=posterior, new=new: 1.0 / seconds(lambda: posterior.predict(new)),
                lambda index, draws=draws, new=new, activation=activation: (
                    1.0 / seconds(lambda: predictive(draws, new, widths, activation))
                ),
                1 if tiny else rounds,
            )
        )
        if ppl == "pyro" and rows > 100:
            name = f"torch by itself / Pyro's Predictive, {rows} rows, {activation}"
            facts[name] = round(floor(draws, new, widths, activation, rounds), 2)
    if not tiny:
        for ppl in ("numpyro", "pyro"):
            for budget in (2**26, 2**29):
                facts[f"peak of predict, {ppl}, budget {budget >> 20} MiB, 10000 rows"] = peak(ppl, budget)
    return report("predict_against_predictive", ratios, facts, store)


def seconds(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def predictive(draws: dict[str, np.ndarray], x: np.ndarray, widths: list[int], activation: str) -> np.ndarray:
    """Means of y, draw by draw, from Pyro's Predictive: float64, as ours."""
    import pyro
    import torch
    from pyro.infer import Predictive

    written = by_hand_in_pyro(widths, activation)

    def model(x: Any) -> Any:
        with pyro.poutine.trace() as capture:
            written(x)
        return pyro.deterministic("mean", capture.trace.nodes["y"]["fn"].mean)

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            samples = {name: torch.tensor(value) for name, value in draws.items()}
            result = Predictive(model, samples, return_sites=["mean"])(torch.tensor(x))
    finally:
        torch.set_default_dtype(dtype)
    return result["mean"].numpy().reshape(-1, len(x))


def floor(
    draws: dict[str, np.ndarray], x: np.ndarray, widths: list[int], activation: str, rounds: int
) -> float:
    """How many times Pyro's Predictive goes into what torch takes for its operations alone; the median over rounds."""
    import torch

    weights = {name: torch.tensor(value) for name, value in draws.items()}
    layers = [*(f"hidden{index}" for index in range(len(widths))), "output"]
    inputs = torch.tensor(x)
    result = torch.zeros((len(weights["output.bias"]), len(x)), dtype=torch.float64)

    def run(rows: int, batch: int) -> None:
        with torch.no_grad():
            for row in range(0, len(x), rows):
                for draw in range(0, len(result), batch):
                    h = inputs[row : row + rows]
                    for layer in layers:
                        h = torch.matmul(h, weights[f"{layer}.weight"][draw : draw + batch])
                        h = h + weights[f"{layer}.bias"][draw : draw + batch, None]
                        if layer != "output":
                            h = getattr(torch, activation)(h)
                    result[draw : draw + batch, row : row + rows] = h[..., 0]

    found = []
    for _ in range(rounds):
        theirs = seconds(lambda: predictive(draws, x, widths, activation))
        blocks = [(10_000, 1), (2000, 1), (2000, 8), (500, 4)]
        found.append(theirs / min(seconds(partial(run, *block)) for block in blocks))
    expected = predictive({name: value[:3] for name, value in draws.items()}, x, widths, activation)
    assert np.allclose(result.numpy()[:3], expected, rtol=1e-9, atol=1e-9)
    return float(np.median(found))


def check(
    posterior: Any, draws: dict[str, np.ndarray], x: np.ndarray, widths: list[int], activation: str
) -> None:
    """Both sides compute the same numbers."""
    few = {name: value[:3] for name, value in draws.items()}
    ours = posterior.predict(x).parameters["loc"][:3]
    assert np.allclose(ours, predictive(few, x, widths, activation), rtol=1e-9, atol=1e-9)


_PEAK = """
import re
from pathlib import Path
import ppl_bnn as bnn
from problem import data, in_the_language
posterior = bnn.fit(in_the_language({widths}), *data(50), bnn.SVI(ppl="{ppl}", steps=20, elbo_draws=2))
x, _ = data(10_000)
posterior.predict(x[:10], memory={budget})

def resident(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

for _ in range(2):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    eta = posterior.predictor(x, memory={budget})
    print(resident("VmHWM") - before - eta.nbytes / 2**20)
    del eta
"""


def peak(ppl: str, budget: int) -> str:
    """MiB that the predictor of 10 000 rows takes besides its result, in a process of its own."""
    script = _PEAK.format(widths=WIDTHS, ppl=ppl, budget=budget)
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    first, second = (float(number) for number in run.stdout.split()[-2:])
    return f"{first:.0f} MiB besides the result, compiling; {second:.0f} MiB the second time"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store)
