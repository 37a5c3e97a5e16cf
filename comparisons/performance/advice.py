"""What `bnn.advise` said before each fit, and what the fit then took.

The network of the other benchmarks on 400 rows, each method at its defaults but where those take minutes. For each:
the seconds that were told (shortest, usual, longest), those that it took, and two numbers which the module has as
constants and which this script is the source of: what a step took in gradients, beside the bounds `advice.STEP`, and
what compiling took in times that the gradient alone took to compile, beside `advice.COMPILING`.

    python comparisons/performance/advice.py [--tiny] [--store]
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from problem import data, in_the_language
from ratios import report

import ppl_bnn as bnn
from ppl_bnn.evaluation.advice import COMPILING, STEP
from ppl_bnn.inference.cost import Size
from ppl_bnn.inference.sampling.chains import cores


def methods(tiny: bool) -> dict[str, Any]:
    few: dict[str, Any] = {"draws": 20, "warmup": 20, "chains": 2} if tiny else {"draws": 300, "warmup": 300}
    steps = 200 if tiny else 3000
    found: dict[str, Any] = {}
    for ppl in ("numpyro",) if tiny else ("numpyro", "pyro"):
        found |= {
            f"MAP, {ppl}": bnn.MAP(ppl=ppl, steps=steps),
            f"SVI, {ppl}": bnn.SVI(ppl=ppl, steps=steps),
            f"Laplace, {ppl}": bnn.Laplace(ppl=ppl, steps=steps),
            f"IVON, {ppl}": bnn.IVON(ppl=ppl, steps=steps),
            f"SWAG, {ppl}": bnn.SWAG(ppl=ppl, steps=steps),
        }
    return found | {
        "NUTS, numpyro": bnn.NUTS(**few),
        "MCLMC, numpyro": bnn.MCLMC(**(few | ({"thinning": 3} if tiny else {}))),
        "SGLD, numpyro": bnn.SGLD(batch_size=10 if tiny else 40, **few),
        "Ensemble of MAP, numpyro": bnn.Ensemble(bnn.MAP(steps=steps), 3 if tiny else 10),
    }


def main(tiny: bool = False, store: bool = False) -> dict[str, Any]:
    model, (x, y) = in_the_language([3 if tiny else 50]), data(30 if tiny else 400)
    chosen = methods(tiny)
    advice = bnn.advise(model, x, y, methods=chosen, seconds=600.0)
    facts: dict[str, Any] = {
        name: float(f"{value:.3g}") for name, value in advice.facts.items() if name != "memory"
    }
    steps: dict[str, list[float]] = {name: [] for name in STEP}
    compiled: dict[str, list[float]] = {name: [] for name in STEP}
    inside = 0
    for name, method in chosen.items():
        told = advice.table.loc[name]
        info = bnn.fit(model, x, y, method).info
        effort = method.effort(Size(len(x), int(advice.facts["parameters"]), 1))
        assert effort is not None
        assert info.gradient_evaluations is not None
        shared = min(effort.parallel, cores())
        among = "_together" if effort.together > 1 else ""
        gradient = advice.facts[f"gradient_seconds_{method.ppl}{among}"]
        step = info.run_seconds * shared / (info.gradient_evaluations * gradient)
        compiling = info.compile_seconds / max(advice.facts[f"compile_seconds_{method.ppl}"], 1e-9)
        steps[method.ppl].append(step)
        compiled[method.ppl].append(compiling)
        took = info.run_seconds + info.compile_seconds
        inside += bool(told["seconds_low"] <= took <= told["seconds_high"])
        facts[name] = (
            f"told {told['seconds_low']:.2g} to {told['seconds_high']:.2g} s, usually {told['seconds']:.2g}; took "
            f"{took:.2g} s: {took / told['seconds']:.2f} of the usual; a step {step:.2f} gradients, compiling "
            f"{compiling:.1f} times; {info.gradient_evaluations:.3g} gradients, told {told['gradients']:.3g}"
        )
        print(f"{name:<26} {facts[name]}", flush=True)
    facts["within what was told"] = f"{inside} of {len(chosen)}"
    for ppl, found in steps.items():
        # A tiny run has NumPyro alone.
        if not found:
            continue
        middle = math.exp(sum(map(math.log, found)) / len(found))
        facts[f"a step in {ppl}, in gradients"] = (
            f"{min(found):.2f} to {max(found):.2f}, geometric mean {middle:.2f} (told: {STEP[ppl]})"
        )
        facts[f"compiling in {ppl}, in gradients' compilations"] = (
            f"{min(compiled[ppl]):.1f} to {max(compiled[ppl]):.1f} (told: {COMPILING[ppl]})"
        )
    report("advice", [], facts, store)
    return facts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the figures in results/")
    options = parser.parse_args()
    main(options.tiny, options.store)
