"""NUTS through the language against the same network written by hand in NumPyro: gradient evaluations per second.

Both sides: one chain, float64, the same warm-up and draws, compilation left out (ours is reported apart; theirs is a
first run of the same shapes). A gradient evaluation is a leapfrog step.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from problem import by_hand_in_numpyro, data, in_the_language
from ratios import alternate, report

import ppl_bnn as bnn


def main(tiny: bool = False, rounds: int = 5, store: bool = False) -> dict[str, float]:
    import jax
    from numpyro.infer import MCMC, NUTS

    rows, widths, steps = (20, [3], 20) if tiny else (500, [20], 400)
    x, y = data(rows)
    model = in_the_language(widths)

    def ours(index: int) -> float:
        method = bnn.NUTS(chains=1, warmup=steps, draws=steps, chain_method="sequential")
        posterior = bnn.fit(model, x, y, method, seed=index)
        assert posterior.info.gradient_evaluations is not None
        return posterior.info.gradient_evaluations / posterior.info.run_seconds

    sampler: Any = None

    def theirs(index: int) -> float:
        nonlocal sampler
        with jax.enable_x64(True):
            arguments = (np.asarray(x), np.asarray(y))
            if sampler is None:
                sampler = MCMC(
                    NUTS(by_hand_in_numpyro(widths)), num_warmup=steps, num_samples=steps, progress_bar=False
                )
                run(sampler, arguments, 1000)
            start = time.perf_counter()
            gradients = run(sampler, arguments, index)
            return gradients / (time.perf_counter() - start)

    def run(sampler: Any, arguments: tuple[Any, Any], seed: int) -> int:
        key = jax.random.PRNGKey(seed)
        sampler.warmup(key, *arguments, collect_warmup=True, extra_fields=("num_steps",))
        gradients = int(np.sum(sampler.get_extra_fields()["num_steps"]))
        sampler.run(sampler.post_warmup_state.rng_key, *arguments, extra_fields=("num_steps",))
        return gradients + int(np.sum(sampler.get_extra_fields()["num_steps"]))

    ratio = alternate(
        "NUTS, language / by hand in NumPyro, gradients per second", 0.98, "gradients/s", ours, theirs, rounds
    )
    return report(
        "nuts_against_numpyro", [ratio], {"rows": rows, "widths": widths, "transitions": 2 * steps}, store
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store)
