"""Two fits in two threads of one process against the same two fits one after the other.

Both sides give the same bits, which is checked. In Pyro a step is computed eagerly, by one thread at a time: two
threads cannot be faster than one, and the figure is what it costs to change between them. In NumPyro a program is
traced by one thread at a time, and compiled and computed by both. A figure of 1 means that two threads took as long as
one after the other. Three kinds of work: SVI in each system, and SVI in Pyro beside NUTS in NumPyro.

Printed besides, as facts: what a thread that is alone pays for a step in Pyro (the turn that is taken and given back,
and the look whether anybody waits), as a share of the step.
"""

from __future__ import annotations

import argparse
import threading
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
from problem import data, in_the_language
from ratios import Ratio, alternate, report

import ppl_bnn as bnn
from ppl_bnn.backends.systems import system

WIDTHS = [50]
TARGETS = {"pyro": 0.9, "numpyro": 1.0, "pyro beside numpyro": 1.0}


def main(tiny: bool = False, rounds: int = 5, store: bool = False) -> dict[str, float]:
    widths, rows, steps, draws = ([3], 20, 20, 5) if tiny else (WIDTHS, 500, 1000, 200)
    x, y = data(rows)
    model = in_the_language(widths)
    svi = {ppl: bnn.SVI(ppl=ppl, steps=steps) for ppl in ("pyro", "numpyro")}
    nuts = bnn.NUTS(ppl="numpyro", draws=draws, warmup=draws, chains=1, max_tree_depth=6)
    methods = {
        "pyro": (svi["pyro"], svi["pyro"]),
        "numpyro": (svi["numpyro"], svi["numpyro"]),
        "pyro beside numpyro": (svi["pyro"], nuts),
    }
    ratios: list[Ratio] = []
    for name, (first, second) in methods.items():

        def one(method: Any, seed: int) -> np.ndarray:
            posterior = bnn.fit(model, x, y, method, seed=seed, progress=False)
            return posterior.predict(x).mean

        calls = [lambda first=first, one=one: one(first, 0), lambda second=second, one=one: one(second, 1)]
        alone, together = [call() for call in calls], at_once(calls)
        for expected, found in zip(alone, together, strict=True):
            np.testing.assert_array_equal(expected, found)
        ratios.append(
            alternate(
                f"two threads / one after the other, {name}",
                TARGETS[name],
                "1/s",
                lambda index, calls=calls: 1.0 / seconds(lambda: at_once(calls)),
                lambda index, calls=calls: 1.0 / seconds(lambda: [call() for call in calls]),
                1 if tiny else rounds,
            )
        )
    facts: dict[str, Any] = {"widths": widths, "rows": rows, "steps": steps, **of_a_step(model, x, y, steps)}
    return report("threads", ratios, facts, store)


def of_a_step(model: Any, x: np.ndarray, y: np.ndarray, steps: int) -> dict[str, float]:
    """What taking turns costs a thread that is alone, per step of SVI in Pyro."""
    from ppl_bnn.backends.pyro_session import TURN, rest

    def turn() -> None:
        rest()
        with TURN:
            pass

    with system("pyro").session("float64", "cpu"):
        micro = 1e6 * min(timeit.repeat(turn, number=10_000, repeat=5)) / 10_000
    posterior = bnn.fit(model, x, y, bnn.SVI(ppl="pyro", steps=steps), progress=False)
    step = 1e6 * posterior.info.run_seconds / steps
    # A step runs the model for its density, and where it draws also the guide.
    return {
        "a turn, microseconds": round(micro, 2),
        "a step of SVI in Pyro, microseconds": round(step, 1),
        "three turns per step, share of the step": round(3.0 * micro / step, 5),
    }


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def work(index: int) -> None:
        found[index] = calls[index]()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--store", action=argparse.BooleanOptionalAction, default=True, help="keep the figures in results/"
    )
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store and not options.tiny)
