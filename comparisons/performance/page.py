"""Writes README.md of this folder from the results that the benchmarks have stored."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
HEAD = """# Performance

Every figure is a ratio of the two sides that its row names, on the same work, in one run, in alternating order. Larger
is better. The range is that of the rounds. A target is set before the measurement. This page
is written by `page.py` from `results/`, which each benchmark writes with `--store`.

`certified_answer.py` has claims, in `../claims/certified_answer.toml`: seconds and gradients until all functions have
converged, by which share of 24 problems. It is declared and has not been run whole, so nothing of it is stored yet.
"""


def docstring_of(script: str) -> str:
    """The docstring of a benchmark."""
    return ast.get_docstring(ast.parse((FOLDER / f"{script}.py").read_text())) or ""


def section(script: str, kept: dict[str, Any]) -> list[str]:
    """The table of one benchmark."""
    first, _, rest = docstring_of(script).partition("\n")
    lines = [f"## `{script}.py`", "", first, *rest.rstrip().splitlines(), ""]
    lines += ["| work / peer | ratio | range | rounds | target | |", "|---|---|---|---|---|---|"]
    for row in kept["ratios"]:
        low, high = min(row["rounds"]), max(row["rounds"])
        verdict = "met" if row["median"] >= row["target"] else "not met"
        cells = [row["name"], f"{row['median']:.3g}", f"{low:.3g} to {high:.3g}", str(len(row["rounds"]))]
        lines.append(f"| {' | '.join([*cells, f'{row["target"]:.3g}', verdict])} |")
    machine = kept["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return [*lines, "", f"{machine['cores']} cores; {versions}.", ""]


def page() -> str:
    """The text of the page."""
    lines = [HEAD]
    for path in sorted((FOLDER / "results").glob("*.json")):
        kept = json.loads(path.read_text())
        if kept.get("ratios"):
            lines += section(path.stem, kept)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written to {PAGE}")
