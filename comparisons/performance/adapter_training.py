"""Bayesian LoRA adapters: the time of a whole fit, against plain LoRA as written by hand with `peft` and torch.

The network and the passages are those of `../adapters.py`: a BERT of 1.4 million weights, adapters of its queries and
values and a head, 120 passages in each step. By hand it is the cross entropy and Adam, in evaluation mode; here
mean-field SVI and IVON take as many steps, and what a fit does before and after them counts. The share of a fit in
which its step is recorded is printed; it falls with the number of steps.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
import adapters
from ratios import alternate, report

import ppl_bnn as bnn

# No more than 1.2 times as long.
TARGET = 1.0 / 1.2


def by_hand(network: Any, x: np.ndarray, y: np.ndarray, steps: int) -> float:
    """Seconds of plain LoRA."""
    import torch

    started = time.perf_counter()
    own = adapters.layer_of(network).eval()
    inputs, targets = torch.as_tensor(x), torch.as_tensor(y)
    optimiser = torch.optim.Adam([each for each in own.parameters() if each.requires_grad], lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(own(inputs), targets)
        loss.backward()
        optimiser.step()
    return time.perf_counter() - started


def main(tiny: bool = False, rounds: int = 3, store: bool = False) -> dict[str, float]:
    sizes = adapters.TINY if tiny else adapters.FULL
    steps = 5 if tiny else 500
    # What the body has learnt does not change the work.
    body = adapters.body(replace(sizes, body_steps=1))
    x, y = adapters.passages(adapters.PILOT, sizes.train, sizes)
    common: dict[str, Any] = {"ppl": "pyro", "dtype": "float32", "steps": steps, "elbo_draws": 2}
    ratios: list[Any] = []
    facts: dict[str, Any] = {}
    for name, method in {"mean field": bnn.SVI(**common), "IVON": bnn.IVON(**common)}.items():

        def fitted(index: int, name: str = name, method: Any = method) -> float:
            model = adapters.model_of(adapters.layer_of(adapters.adapted(body, sizes, index)))
            started = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of fits that end after so many steps
                posterior = bnn.fit(model, x, y, method, seed=index)
            seconds = time.perf_counter() - started
            facts[f"share of the fit that records its step, {name}"] = round(
                posterior.info.compile_seconds / seconds, 3
            )
            return steps / seconds

        ratios.append(
            alternate(
                f"steps of {name} / of LoRA by hand, {steps} steps",
                TARGET,
                "steps/s",
                fitted,
                lambda index: steps / by_hand(adapters.adapted(body, sizes, index), x, y, steps),
                1 if tiny else rounds,
            )
        )
    return report("adapter_training", ratios, facts, store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", action="store_true")
    main(**vars(parser.parse_args()))
