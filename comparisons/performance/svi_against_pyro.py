"""SVI through the language against the same network written by hand in Pyro.

Pyro: steps per second of the same guide, ELBO and number of steps. NumPyro: the time of a whole fit of 10 000 steps
on a 20-20 network, compilation included, against those steps in hand-written Pyro. Both in float64 and one thread.
"""

from __future__ import annotations

import argparse
import time

from problem import by_hand_in_pyro, data, in_the_language
from ratios import alternate, report

import ppl_bnn as bnn


def main(tiny: bool = False, rounds: int = 5, store: bool = False) -> dict[str, float]:
    rows, widths = (20, [3, 3]) if tiny else (200, [20, 20])
    short, long = (20, 40) if tiny else (1000, 10_000)
    x, y = data(rows)
    model = in_the_language(widths)

    def by_hand(steps: int, seed: int) -> float:
        """Seconds of `steps` steps, the first of which sets the guide up and is not counted."""
        import pyro
        import torch
        from pyro.infer import SVI, Trace_ELBO
        from pyro.infer.autoguide import AutoNormal

        threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        validation = torch.distributions.Distribution._validate_args
        try:
            with (
                pyro.get_param_store().scope(),
                torch.random.fork_rng(devices=[]),
                pyro.validation_enabled(False),
            ):
                torch.manual_seed(seed)
                written = by_hand_in_pyro(widths)
                inference = SVI(written, AutoNormal(written), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
                arguments = (torch.tensor(x), torch.tensor(y))
                inference.step(*arguments)
                start = time.perf_counter()
                for _ in range(steps):
                    inference.step(*arguments)
                return time.perf_counter() - start
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            assert torch.distributions.Distribution._validate_args == validation

    def through_pyro(index: int) -> float:
        posterior = bnn.fit(model, x, y, bnn.SVI(ppl="pyro", steps=short, elbo_draws=2), seed=index)
        return short / posterior.info.run_seconds

    def through_numpyro(index: int) -> float:
        start = time.perf_counter()
        bnn.fit(model, x, y, bnn.SVI(steps=long, elbo_draws=2), seed=index)
        return long / (time.perf_counter() - start)

    # Each side once, uncounted: imports and first calls belong to neither.
    through_pyro(0)
    by_hand(10, 0)
    bnn.fit(model, x, y, bnn.SVI(steps=20, elbo_draws=2))
    ratios = [
        alternate(
            "Pyro SVI, language / by hand in Pyro, steps per second",
            0.95,
            "steps/s",
            through_pyro,
            lambda index: short / by_hand(short, index),
            rounds,
        ),
        alternate(
            f"NumPyro SVI with compilation / by hand in Pyro, {long} steps",
            10.0,
            "steps/s",
            through_numpyro,
            lambda index: long / by_hand(long, index),
            1 if tiny else max(2, rounds // 2),
        ),
    ]
    return report("svi_against_pyro", ratios, {"rows": rows, "widths": widths, "steps": [short, long]}, store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store)
