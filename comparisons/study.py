"""What the studies share: claims with verdicts, tables, figures of one look, and a reference that is one.

A study is a file beside this one with `main(tiny=False, out=None)`. It makes a `Study`, fills its tables, judges each
claim of its source from numbers, and writes everything to one folder.
"""

from __future__ import annotations

import csv
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

REPRODUCED, NOT_REPRODUCED, CORRECTED, NOT_RUN = "reproduced", "not reproduced", "corrected", "not run"
# Okabe and Ito's colours; lines differ in style, too.
BLACK, BLUE, ORANGE, VERMILION, GREEN, GREY = "#000000", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#777777"
PINK, SKY = "#CC79A7", "#56B4E9"


@dataclass(frozen=True)
class Verdict:
    """A claim, what became of it, and the numbers that say so."""

    claim: str
    verdict: str
    numbers: str

    def __str__(self) -> str:
        return f"{self.verdict.upper()}: {self.claim}: {self.numbers}"


@dataclass
class Study:
    """What a run writes: tables (rows of one name), numbers, verdicts; figures go to `out` as they are drawn.

    sizes: a dataclass of plain numbers that says how much is computed.
    """

    sizes: Any
    out: Path
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    @classmethod
    def begin(cls, sizes: Any, name: str, tiny: bool, out: str | Path | None) -> Study:
        """A study that writes to `out`; by default to results/<name> beside this file, tiny to a temporary folder."""
        if out is None:
            out = tempfile.mkdtemp(prefix=f"{name}_") if tiny else Path(__file__).parent / "results" / name
        found = cls(sizes, Path(out))
        found.out.mkdir(parents=True, exist_ok=True)
        return found

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begun:5.0f} s] {text}", flush=True)

    def judge(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.say(str(verdict))

    def write(self) -> None:
        """Tables as CSV, verdicts as lines, and everything but the tables as JSON."""
        self.out.mkdir(parents=True, exist_ok=True)
        for name, rows in self.tables.items():
            write_table(self.out / f"{name}.csv", rows)
        (self.out / "verdicts.txt").write_text("".join(f"{each}\n" for each in self.verdicts))
        content = {
            "sizes": asdict(self.sizes),
            "numbers": self.numbers,
            "verdicts": [asdict(each) for each in self.verdicts],
        }
        (self.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows with any columns, in the order in which columns first come."""
    with path.open("w", newline="") as file:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else value


def paired(differences: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and standard error of paired differences; the error of a single one is not known (infinite)."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return float(values.mean()), math.inf
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def judge_better(claim: str, mean: float, error: float, text: str) -> Verdict:
    """Reproduced where a paired difference is above zero by two standard errors."""
    return Verdict(claim, REPRODUCED if mean > 2.0 * error else NOT_REPRODUCED, text)


def new_figure(width: float, height: float) -> Any:
    """A figure which no global of Matplotlib knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A new figure and its axes (rows, columns)."""
    figure = new_figure(width, height)
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.ravel():
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes
