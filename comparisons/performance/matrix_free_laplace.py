"""Low-rank Laplace without a Jacobian: what it holds, and how many products it takes.

The network is `bnn.resnet` with 64, 128, 256 and 512 channels, two blocks each, and 100 classes: 11 262 884 weights,
the size of ResNet-18, with a first convolution of stride 2 on images of 32 x 32 pixels with 3 channels. `--width` gives
a narrower one: 24 has 1 599 964 weights. Each row of the table names the weights, the rows and the rank it was measured
with. Images and labels are simulated, and the weights are a draw from the prior: what is held does not depend on
training, and no training is part of it. Floating type float32.

`Laplace(structure="lowrank")` never holds a Jacobian. The figure is 8 GB over the peak of the resident memory of the
whole process, Python and JAX included, over fit, log evidence and linearised predictions: from draws for all rows, and
in closed form for one.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import numpy as np
from ratios import Ratio, report

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

WIDTH, CLASSES = 64, 100
BOUND = 8e9


def network(channels: tuple[int, ...], classes: int) -> Any:
    """The residual network, and its first convolution, as a model."""
    prior = priors.Normal(0.0, "fan_in")

    def model(x: Any, y: Any = None) -> None:
        h = bnn.conv2d("first", x, channels[0], 7, 2, "same", prior=prior, bias=False)
        f = bnn.resnet(h, channels, classes, 2, activation="relu", prior=prior)
        bnn.observe(y, f, likelihoods.Categorical())

    return model


def peak() -> float:
    """The largest resident memory of this process so far, bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(
    tiny: bool = False,
    store: bool = False,
    rows: int = 512,
    rank: int = 20,
    probes: int = 8,
    draws: int = 4,
    closed: bool = True,
    ppl: str = "numpyro",
    width: int = WIDTH,
) -> dict[str, float]:
    """width: channels of the first stage, of which those that follow have 2, 4 and 8 times as many."""
    channels, classes = ((4, 8), 5) if tiny else ((width, 2 * width, 4 * width, 8 * width), CLASSES)
    rows, rank = (12, 3) if tiny else (rows, rank)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 32, 32, 3)).astype(np.float32)
    y = np.arange(rows) % classes if rows >= classes else rng.permutation(classes)[:rows]
    y[0] = classes - 1
    model = network(channels, classes)
    ours: dict[str, Any] = {"ppl": ppl, "dtype": "float32"}
    start = bnn.fit(model, x[:2], y[:2], bnn.MAP(steps=1, polish=False, **ours), progress=False).draws
    start = {name: value[0, 0] for name, value in start.items()}
    began = time.perf_counter()
    method = bnn.Laplace(
        structure="lowrank", rank=rank, probes=probes, start=start, optimise=False, memory=2**29, **ours
    )
    posterior = bnn.fit(model, x, y, method, progress=False)
    fitted, figures = time.perf_counter(), posterior.info.figures
    weights = sum(value.size for value in start.values())
    title = f"{weights} weights, {rows} rows, rank {rank}, {probes} probes, {ppl}"
    facts: dict[str, Any] = {
        f"{title}: products": int(figures["curvature_products"]),
        f"{title}: fit, seconds": round(fitted - began, 1),
        f"{title}: peak memory of the fit, GB": round(peak() / 1e9, 2),
        f"{title}: log evidence beyond the rank": f"{figures['log_evidence_beyond_rank']:.6g}",
        f"{title}: its standard error": f"{figures['log_evidence_error']:.3g}",
        f"{title}: effective parameters, and those beyond the rank": (
            f"{figures['effective_parameters']:.4g} and {figures['parameters_beyond_rank']:.4g}"
        ),
    }
    for name, value in facts.items():
        print(f"{name}: {value}", flush=True)
    posterior.predict(x, draws=draws)
    facts[f"{title}: {draws} draws, linearised at all rows, seconds"] = round(time.perf_counter() - fitted, 1)
    if closed:
        began = time.perf_counter()
        posterior.predict(x[:1], kind="probit", memory=2**29)
        facts[f"{title}: closed form at one row, seconds"] = round(time.perf_counter() - began, 1)
    ratios = [Ratio(f"{title}: 8 GB / peak memory", 1.0, [BOUND / peak()], "bytes")]
    return report("matrix_free_laplace", ratios, facts, store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--width", type=int, default=WIDTH, help="channels of the first stage")
    parser.add_argument("--no-closed-form", action="store_true", help="predict from draws alone")
    parser.add_argument("--ppl", default="numpyro")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(
        options.tiny,
        options.store,
        options.rows,
        options.rank,
        options.probes,
        closed=not options.no_closed_form,
        ppl=options.ppl,
        width=options.width,
    )
