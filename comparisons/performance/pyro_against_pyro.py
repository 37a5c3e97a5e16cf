"""Fits in Pyro through the language against the same network written by hand in Pyro, and NumPyro's against them.

The model is that of the main job: ten tanh units on a table of 353 rows and 10 columns, 122 weights. All in float64 and
one thread.

- SVI, MAP, IVON: the time of a whole fit, recording counted, against as many steps of AutoNormal (AutoDelta for MAP),
  Trace_ELBO and Adam of Pyro. IVON and SVI take one gradient per step, like them.
- `compile=True`: seconds per step once the step is compiled.
- NUTS and HMC: gradients per second of one chain, recording counted; a gradient evaluation is a leapfrog step.
- NumPyro: the time of a whole fit by SVI, compilation counted.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from problem import by_hand_in_pyro, data, in_the_language
from ratios import alternate, keep, report

import ppl_bnn as bnn


@contextlib.contextmanager
def pyro_by_hand(seed: int) -> Iterator[None]:
    """Pyro as a user has it, in float64, one thread, and without validation; everything is restored."""
    import pyro
    import torch

    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        with (
            pyro.get_param_store().scope(),
            torch.random.fork_rng(devices=[]),
            pyro.validation_enabled(False),
        ):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def main(tiny: bool = False, rounds: int = 3, store: bool = False) -> dict[str, float]:
    rows, widths = (20, [3]) if tiny else (353, [10])
    steps, short, transitions = (120, 60, 4) if tiny else (10_000, 1000, 50)
    x, y = data(rows, 10)
    model = in_the_language(widths)

    def by_hand(guide: str, count: int, seed: int) -> float:
        """Steps per second; the first one sets the guide up and is not counted."""
        import pyro
        import torch
        from pyro.infer import SVI, Trace_ELBO, autoguide

        with pyro_by_hand(seed):
            written = by_hand_in_pyro(widths)
            guided = getattr(autoguide, guide)(written)
            inference = SVI(written, guided, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
            arguments = (torch.tensor(x), torch.tensor(y))
            inference.step(*arguments)
            start = time.perf_counter()
            for _ in range(count):
                inference.step(*arguments)
            return count / (time.perf_counter() - start)

    def whole(method: Any, seed: int) -> float:
        """Steps per second of a fit from beginning to end."""
        start = time.perf_counter()
        posterior = bnn.fit(model, x, y, method, seed=seed)
        return len(posterior.info.history["loss"]) / (time.perf_counter() - start)

    def compiled(seed: int) -> float:
        """Steps per second of a fit, once they are compiled."""
        method = bnn.SVI(ppl="pyro", steps=steps, elbo_draws=2, compile=True)
        return steps / bnn.fit(model, x, y, method, seed=seed).info.run_seconds

    def chain_by_hand(algorithm: str, seed: int, **options: Any) -> float:
        """Gradients per second of one chain of Pyro's kernel."""
        import pyro.infer
        import torch

        with pyro_by_hand(seed):
            kernel = getattr(pyro.infer, algorithm)(by_hand_in_pyro(widths), **options)
            kernel.setup(transitions, torch.tensor(x), torch.tensor(y))
            inner, gradients = kernel.potential_fn, 0

            def counted(z: Any) -> Any:
                nonlocal gradients
                gradients += any(value.requires_grad for value in z.values())
                return inner(z)

            kernel.potential_fn = counted
            point, start = kernel.initial_params, time.perf_counter()
            for _ in range(2 * transitions):
                point = kernel.sample(point)
            return gradients / (time.perf_counter() - start)

    def chain(method: Any, seed: int) -> float:
        start = time.perf_counter()
        posterior = bnn.fit(model, x, y, method, seed=seed)
        assert posterior.info.gradient_evaluations is not None
        return posterior.info.gradient_evaluations / (time.perf_counter() - start)

    one = {"ppl": "pyro", "chains": 1, "warmup": transitions, "draws": transitions}
    length = {"step_size": 0.01, "num_steps": 5 if tiny else 50}
    mode = bnn.MAP(ppl="pyro", steps=steps) if tiny else bnn.MAP(ppl="pyro")
    svi = bnn.SVI(ppl="pyro", steps=steps, elbo_draws=2)
    cases = [
        (
            f"Pyro SVI, {steps} steps / by hand in Pyro",
            4.0,
            lambda seed: whole(svi, seed),
            lambda seed: by_hand("AutoNormal", short, seed),
        ),
        (
            "Pyro MAP / AutoDelta by hand in Pyro",
            4.0,
            lambda seed: whole(mode, seed),
            lambda seed: by_hand("AutoDelta", short, seed),
        ),
        (
            f"Pyro IVON, {steps} steps / AutoNormal by hand in Pyro",
            4.0,
            lambda seed: whole(bnn.IVON(ppl="pyro", steps=steps), seed),
            lambda seed: by_hand("AutoNormal", short, seed),
        ),
        (
            "Pyro SVI, compile=True, a compiled step / by hand in Pyro",
            15.0,
            compiled,
            lambda seed: by_hand("AutoNormal", short, seed),
        ),
        (
            "Pyro NUTS / by hand in Pyro, gradients",
            3.0,
            lambda seed: chain(bnn.NUTS(**one), seed),
            lambda seed: chain_by_hand("NUTS", seed),
        ),
        (
            "Pyro HMC / by hand in Pyro, gradients",
            3.0,
            lambda seed: chain(bnn.HMC(**one, **length), seed),
            lambda seed: chain_by_hand("HMC", seed, **length),
        ),
        (
            f"NumPyro SVI, {steps} steps / by hand in Pyro",
            10.0,
            lambda seed: whole(bnn.SVI(steps=steps, elbo_draws=2), seed),
            lambda seed: by_hand("AutoNormal", short, seed),
        ),
    ]
    # Each side once, uncounted: imports and first calls belong to neither.
    bnn.fit(model, x, y, bnn.SVI(ppl="pyro", steps=60, elbo_draws=2))
    bnn.fit(model, x, y, bnn.SVI(steps=20, elbo_draws=2))
    by_hand("AutoNormal", 10, 0)
    unit = "steps/s or gradients/s"
    facts = {"rows": rows, "widths": widths, "steps": [steps, short], "transitions": 2 * transitions}
    ratios = []
    for name, target, ours, theirs in cases:
        ratios.append(alternate(name, target, unit, ours, theirs, rounds))
        print(ratios[-1], flush=True)
        if store:
            keep("pyro_against_pyro", ratios, facts)
    return report("pyro_against_pyro", ratios, facts, store)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.tiny, options.rounds, options.store)
