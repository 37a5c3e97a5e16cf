"""NUTS through the language against the same network written by hand in NumPyro: gradient evaluations per second.

Both sides: one chain, float64, the same warm-up and number of draws, NumPyro's own kernel inside one compiled loop.
Compilation and set-up are left out on both: theirs is compiled ahead, and ours is timed from the first report of the
sampler to the last. A gradient evaluation is a leapfrog step.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from problem import by_hand_in_numpyro, data, in_the_language
from ratios import alternate, report

import ppl_bnn as bnn


class Clock:
    """A progress that notes when it was told something."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def task(self, title: str, total: int) -> Clock:
        return self

    def update(self, done: int, **figures: float) -> None:
        self.times.append(time.perf_counter())

    def close(self) -> None:
        pass


def main(tiny: bool = False, rounds: int = 5, store: bool = False) -> dict[str, float]:
    rows, widths, steps = (20, [3], 20) if tiny else (500, [20], 500)
    x, y = data(rows)
    model = in_the_language(widths)

    def ours(index: int) -> float:
        method = bnn.NUTS(chains=1, warmup=steps, draws=steps, chain_method="sequential")
        clock = Clock()
        posterior = bnn.fit(model, x, y, method, seed=index, progress=clock)
        assert posterior.info.gradient_evaluations is not None
        return posterior.info.gradient_evaluations / (clock.times[-1] - clock.times[0])

    loop, begin = hand_written_loop(widths, x, y, 2 * steps, steps)

    def theirs(index: int) -> float:
        state = begin(index)
        start = time.perf_counter()
        gradients = loop(state)
        return gradients / (time.perf_counter() - start)

    ratio = alternate(
        "NUTS, language / by hand in NumPyro, gradients per second", 0.98, "gradients/s", ours, theirs, rounds
    )
    return report(
        "nuts_against_numpyro", [ratio], {"rows": rows, "widths": widths, "transitions": 2 * steps}, store
    )


def hand_written_loop(widths: list[int], x: np.ndarray, y: np.ndarray, transitions: int, warmup: int) -> Any:
    """(loop, begin): the kernel's transitions in one compiled loop, and the state to begin them from."""
    import jax
    import jax.numpy as jnp
    from numpyro.infer import NUTS

    kernel = NUTS(by_hand_in_numpyro(widths))

    def run(state: Any, x: Any, y: Any) -> Any:
        def once(index: Any, carry: Any) -> Any:
            state, gradients, kept = carry
            state = kernel.sample(state, (x, y), {})
            kept = jax.tree.map(lambda all, one: all.at[index].set(one), kept, state.z)
            return state, gradients + state.num_steps, kept

        kept = jax.tree.map(lambda one: jnp.zeros((transitions, *one.shape), one.dtype), state.z)
        return jax.lax.fori_loop(0, transitions, once, (state, jnp.zeros((), int), kept))

    with jax.enable_x64(True):
        data = jnp.asarray(x), jnp.asarray(y)
        first = kernel.init(jax.random.PRNGKey(0), warmup, model_args=data)
        compiled = jax.jit(run).lower(first, *data).compile()

    def begin(seed: int) -> Any:
        with jax.enable_x64(True):
            return kernel.init(jax.random.PRNGKey(seed), warmup, model_args=data)

    def loop(state: Any) -> int:
        with jax.enable_x64(True):
            return int(compiled(state, *data)[1])

    return loop, begin


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store)
