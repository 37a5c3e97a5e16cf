"""Ratios of two sides that do the same work, in one run and in alternating order.

Absolute times say something of one machine on one day; a ratio of neighbours in time says something of the code. Each
figure is the median over rounds of (ours / theirs), with its range, against a target that was set beforehand.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """What was measured, per round, and what was aimed at. Larger is better."""

    name: str
    target: float
    rounds: list[float]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def __str__(self) -> str:
        verdict = "met" if self.median >= self.target else "NOT MET"
        spread = f"{min(self.rounds):.3g} to {max(self.rounds):.3g}"
        return f"{self.name:<62} {self.median:7.3g}  ({spread})  target {self.target:g}: {verdict}"


def alternate(
    name: str,
    target: float,
    unit: str,
    ours: Callable[[int], float],
    theirs: Callable[[int], float],
    rounds: int,
) -> Ratio:
    """Measure both sides `rounds` times, each going first every other time. A side gives its rate: work per second."""
    found = []
    for index in range(rounds):
        if index % 2:
            theirs_rate = theirs(index)
            ours_rate = ours(index)
        else:
            ours_rate = ours(index)
            theirs_rate = theirs(index)
        found.append(ours_rate / theirs_rate)
    return Ratio(name, target, found, unit)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    packages = ("ppl-bnn", "jax", "numpyro", "torch", "pyro-ppl", "numpy")
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "from the checkout"
    return {"cores": os.cpu_count(), "versions": found}


def report(script: str, ratios: list[Ratio], facts: dict[str, Any], store: bool) -> dict[str, float]:
    """Print the table, keep it where asked to, and return the medians by name."""
    for ratio in ratios:
        print(ratio, flush=True)
    for name, value in facts.items():
        print(f"{name}: {value}")
    about = machine()
    print(
        f"{about['cores']} cores; "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    )
    if store:
        keep(script, ratios, facts)
    return {ratio.name: ratio.median for ratio in ratios}


def keep(script: str, ratios: list[Ratio], facts: dict[str, Any]) -> None:
    """Write what was measured to `results/`: after each case of a long run, so that nothing measured is lost.

    What the file already holds under other names stays there if it was measured with the same versions and cores.
    """
    about = machine()
    path = Path(__file__).parent / "results" / f"{script}.json"
    path.parent.mkdir(exist_ok=True)
    rows = {ratio.name: asdict(ratio) | {"median": ratio.median} for ratio in ratios}
    if path.exists() and (before := json.loads(path.read_text()))["machine"] == about:
        rows = {row["name"]: row for row in before["ratios"]} | rows
        facts = before["facts"] | facts
    kept = {"machine": about, "facts": facts, "ratios": list(rows.values())}
    path.write_text(json.dumps(kept, indent=2) + "\n")
