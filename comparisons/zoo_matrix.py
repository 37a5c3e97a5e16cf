"""Does every method fit every model of the zoo in both systems? The full product, a cell at a time.

A cell is a model, a row of methods (a class at settings of its own, such as "laplace-kron") and a system. It works if
the method fits the model, small, to a few rows, and the posterior gives each of them a finite log density. It is
refused if the library says by name that it cannot be (UnsupportedError, InputError, ModelError), and has failed if it
ends in anything else. What each cell should come to is declared in models/methods.toml; one that comes to something
else is a contradiction. That numbers are right is the business of the tests of methods and of models.

Inputs are standard normal; targets are drawn from the model itself, weights and all (the first draw of its prior in
which targets are of moderate size and each class occurs often enough to be held out in part).

A finished cell is a line of cells.jsonl at once: what it came to, with seconds, date and the key of the versions, which
stand in a line of their own. A run computes what is missing, what costs nothing first, and can be killed at any
time. Seconds are wall time, compilation included, under whatever else the machine did: an order of magnitude.

    python comparisons/zoo_matrix.py [--models A,B] [--methods A,B] [--systems A,B] [--workers N] [--again] [--out DIR]
        [--tiny]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, read_claims
from study import Study

import ppl_bnn as bnn
from ppl_bnn import zoo
from ppl_bnn.backends.protocol import SYSTEMS
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import unknown_name
from ppl_bnn.evaluation.grid import engines
from ppl_bnn.evaluation.grid.engines import Engine, Lost
from ppl_bnn.inference.method import versions
from ppl_bnn.zoo.support import REFUSALS, Declarations, declared

RESULTS = Path(__file__).parent / "results" / "zoo_matrix"
WORKS, REFUSED, FAILED = "works", "refused", "failed"
Cell = tuple[str, str, str]
# Sizes by the names of the arguments of models: what a model does not have is left out.
SMALL: dict[str, Any] = {"width": 4, "classes": 3, "widths": (4, 3), "channels": (2, 3), "kernel": 3}
# Chains in Pyro are processes, each of which imports Pyro anew.
IN_PYRO = {"nuts": {"chains": 1}}
# Of a class, so that whatever part of the rows is held out, the rest has it too; and of a target.
FEWEST, LARGEST = 4, 1e3
# Seconds of a cell of which nothing is known.
GUESSED = {"pyro": 5.0, "numpyro": 15.0}
LONGEST_TEXT = 300


@dataclass(frozen=True)
class Sizes:
    """rows, features: of the data. limit: seconds after which a cell has failed."""

    rows: int = 24
    features: int = 6
    limit: float = 900.0


FULL = Sizes()


class _TookTooLong(BaseException):
    """No `Exception`, which a method might take for a failure of its own."""


# --- a cell ---------------------------------------------------------------------------------------------


@functools.cache
def problem(name: str, rows: int = Sizes.rows, features: int = Sizes.features) -> tuple[Any, np.ndarray, Any]:
    """The model of that name at a small size, with inputs (N, F) and targets drawn from it."""
    arguments = zoo.models()[name].arguments
    model = zoo.load(name, **{key: value for key, value in SMALL.items() if key in arguments})
    x = np.random.default_rng(0).normal(size=(rows, features))
    of_classes = zoo.sketch(model, features).task == "classification"
    for seed in range(1000):
        y = drawn_targets(model, x, seed)
        if _moderate(y, of_classes):
            return model, x, y.astype(np.int64) if of_classes else y
    raise RuntimeError(f"{name}: no draw of the prior has targets to fit")


def drawn_targets(model: Any, x: np.ndarray, seed: int) -> np.ndarray:
    """y at one draw of all that the model draws, by Pyro, which compiles nothing."""
    chosen = system("pyro")
    with chosen.session("float64", "cpu", threads=1):
        native = chosen.native(model, record=False)
        sites = chosen.run(native, chosen.asarray(x), None, seed=chosen.seeds(seed, 1)[0])
        return np.array(chosen.to_numpy(next(site.value for site in sites if site.name == "y")), dtype=float)


def _moderate(y: np.ndarray, of_classes: bool) -> bool:
    if of_classes:
        _, counts = np.unique(y, return_counts=True)
        return len(counts) > 1 and int(counts.min()) >= FEWEST
    return bool(np.isfinite(y).all() and np.abs(y).max() < LARGEST and np.ptp(y) > 0)


def fitted(cell: Cell, sizes: Sizes) -> None:
    """Fit and predict. Raises whatever comes of it."""
    name, row, ppl = cell
    model, x, y = problem(name, sizes.rows, sizes.features)
    more = IN_PYRO.get(row, {}) if ppl == "pyro" else {}
    method = declared().methods[row].build(ppl, quick=True, **more)
    posterior = bnn.fit(model, x, y, method, seed=0, device="cpu", progress=False)
    if not np.isfinite(posterior.predict(x).log_prob(y)).all():
        raise ArithmeticError("the log density of a row under the prediction is not finite")


def computed(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    """What a cell comes to, as it is stored."""
    begun = time.perf_counter()
    error: BaseException | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _limited(sizes.limit):
                fitted(cell, sizes)
        except (_TookTooLong, Exception) as raised:
            error = raised
    return record_of(cell, time.perf_counter() - begun, error)


def record_of(cell: Cell, seconds: float | None, error: BaseException | None) -> dict[str, Any]:
    """What is stored of a cell that took so long, None where nobody knows, and ended in this error, or in none."""
    record: dict[str, Any] = dict(zip(("model", "method", "system"), cell, strict=True))
    record["outcome"] = WORKS
    if error is not None:
        kind = "TimeoutError" if isinstance(error, _TookTooLong) else type(error).__name__
        text = (str(error).strip().splitlines() or [""])[0]
        record |= {"outcome": REFUSED if kind in REFUSALS else FAILED, "error": kind}
        record["message"] = text[:LONGEST_TEXT]
    now = datetime.now(UTC).date().isoformat()
    return record | {
        "seconds": None if seconds is None else round(seconds, 2),
        "date": now,
        "versions": versions(),
    }


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TookTooLong` in here after so long; a clock that somebody else has set goes on afterwards."""

    def ring(*_: Any) -> None:
        raise _TookTooLong(f"more than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def expected(declarations: Declarations, cell: Cell) -> str:
    """What is declared of a cell, in a word."""
    if declarations.why_not(*cell) is not None:
        return REFUSED
    return WORKS if declarations.doubt(*cell) is None else "depends"


def contradiction(declarations: Declarations, record: dict[str, Any]) -> str | None:
    """In what a stored cell is not as declared; None where it is."""
    cell: Any = tuple(record[key] for key in ("model", "method", "system"))
    error, text = record.get("error", ""), record.get("message", "")
    why_not, doubt = declarations.why_not(*cell), declarations.doubt(*cell)
    came = record["outcome"] + (f" by {error}: {text}" if error else "")
    place = ", ".join(cell)
    if why_not is not None:
        if record["outcome"] == REFUSED and why_not.explains(error, text):
            return None
        return f"{place}: declared impossible by {why_not.error.__name__} ({why_not.says!r}), got {came}"
    if record["outcome"] == WORKS or (doubt is not None and doubt.explains(error, text)):
        return None
    return f"{place}: declared {expected(declarations, cell)}, got {came}"


# --- what is kept -----------------------------------------------------------------------------------------


class Store:
    """The finished cells of a file, one JSON object a line; of two lines about one cell the later one counts.

    A line is written by one call, at the end of the file. What a killed process left of a line is passed over.
    """

    def __init__(self, path: Path):
        self.path = path
        self.environments: dict[str, dict[str, str]] = {}
        self.cells: dict[Cell, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        if "versions" in record:
            self.environments[record["environment"]] = record["versions"]
        else:
            self.cells[record["model"], record["method"], record["system"]] = record

    def add(self, record: dict[str, Any]) -> None:
        """Keep what `computed` gives."""
        record = dict(record)
        found = record.pop("versions")
        key = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]
        lines = [] if key in self.environments else [{"environment": key, "versions": found}]
        lines.append(record | {"environment": key})
        for line in lines:
            self._take(line)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def tidy(self, declarations: Declarations) -> None:
        """Write the file anew, in the order of the table and without cells and versions that are no longer there."""
        self.cells = {cell: self.cells[cell] for cell in declarations.cells() if cell in self.cells}
        used = {record["environment"] for record in self.cells.values()}
        self.environments = {key: found for key, found in self.environments.items() if key in used}
        lines = [
            *({"environment": key, "versions": found} for key, found in self.environments.items()),
            *self.cells.values(),
        ]
        temporary = self.path.with_suffix(".part")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        temporary.replace(self.path)


# --- the run ----------------------------------------------------------------------------------------------


def chosen(kind: str, wanted: Sequence[str] | None, known: Sequence[str]) -> set[str]:
    for name in wanted or ():
        if name not in known:
            raise unknown_name(kind, name, known)
    return set(known if wanted is None else wanted)


def seconds_of(declarations: Declarations, store: Store) -> dict[Cell, float]:
    """How long each cell may take, by cells of the same row and system that are there."""
    known: dict[tuple[str, str], list[float]] = {}
    for (_, row, ppl), record in store.cells.items():
        if record["outcome"] != REFUSED and record["seconds"] is not None:
            known.setdefault((row, ppl), []).append(record["seconds"])
    return {
        cell: 1.0
        if declarations.why_not(*cell) is not None
        else float(np.mean(known.get(cell[1:], [GUESSED[cell[2]]])))
        for cell in declarations.cells()
    }


def outcomes(cells: Sequence[Cell], sizes: Sizes, workers: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Each cell with what it came to, as they are finished."""
    # By the name under which other processes find it, which is not that of a script being run.
    from zoo_matrix import computed

    engine = Engine("sequential" if workers == 1 else "local")
    tasks = [(cell, sizes) for cell in cells]
    for done, (number, found) in enumerate(
        engines.outcomes(engine, computed, tasks, jobs=workers, device="cpu")
    ):
        if isinstance(found, Lost):
            found = record_of(cells[number], None, RuntimeError(f"the process ended: {found.reason}"))
        yield cells[number], found
        if workers == 1 and done % 20 == 19 and "jax" in sys.modules:
            # What was compiled for one cell serves no other; other processes are replaced when they have grown.
            sys.modules["jax"].clear_caches()


def table(declarations: Declarations, store: Store) -> list[dict[str, str]]:
    """A row for each model and system: what each method came to, "-" where that is not computed."""
    rows = []
    for name in declarations.models:
        for ppl in SYSTEMS:
            row = {"model": name, "system": ppl}
            for method in declarations.methods:
                record = store.cells.get((name, method, ppl))
                row[method] = "-" if record is None else record.get("error", record["outcome"])
            rows.append(row)
    return rows


def judge(study: Study) -> list[Verdict]:
    """The verdict from the stored cells."""
    declarations, store = declared(), Store(study.out / "cells.jsonl")
    wrong = [text for record in store.cells.values() if (text := contradiction(declarations, record))]
    total, count = len(list(declarations.cells())), len(store.cells)
    outcomes_of = Counter(record["outcome"] for record in store.cells.values())
    listing = ", ".join(f"{number} {outcome}" for outcome, number in outcomes_of.most_common())
    numbers = f"{count} of {total} cells computed ({listing}); {len(wrong)} against what is declared"
    referee = Referee(read_claims("zoo_matrix"))
    if count < total and not wrong:
        referee.not_run("declared", "cells are missing", numbers)
    else:
        referee.measured("declared", exact(1.0 - len(wrong) / count), "; ".join([numbers, *wrong]))
    return referee.verdicts()


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    models: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    systems: Sequence[str] | None = None,
    workers: int = 1,
    again: bool = False,
) -> Study:
    """Compute the cells that are missing, those of the given names, and write the table.

    tiny: one model, two methods that fit it and two that do not, in Pyro. again: cells that are there, too.
    """
    if tiny:
        models = models or ["linear_regression"]
        methods = methods or ["map", "svi", "mc-dropout", "mclmc"]
        systems = systems or ["pyro"]
    sizes, declarations = FULL, declared()
    wanted = (
        chosen("model", models, declarations.models),
        chosen("method", methods, tuple(declarations.methods)),
        chosen("system", systems, SYSTEMS),
    )
    study = Study.begin(sizes, "zoo_matrix", tiny, out)
    store = Store(study.out / "cells.jsonl")
    store.tidy(declarations)
    guess = seconds_of(declarations, store)
    cells = [
        cell
        for cell in declarations.cells()
        if all(name in names for name, names in zip(cell, wanted, strict=True))
        and (again or cell not in store.cells)
    ]
    cells.sort(key=guess.__getitem__)
    study.say(f"{len(cells)} cells to compute, {len(store.cells)} are there")
    left = set(cells)
    try:
        for done, (cell, record) in enumerate(outcomes(cells, sizes, workers), 1):
            store.add(record)
            left.remove(cell)
            guess = seconds_of(declarations, store)
            minutes = math.ceil(sum(guess[each] for each in left) / workers / 60)
            wrong = contradiction(declarations, record)
            took = "" if record["seconds"] is None else f" in {record['seconds']:.1f} s"
            study.say(
                f"{done} of {len(cells)}, {minutes} min left: {', '.join(cell)}: {record['outcome']}{took}"
                + (f" CONTRADICTION: {wrong}" if wrong else "")
            )
    finally:
        store.tidy(declarations)
        study.tables["matrix"] = table(declarations, store)
        study.numbers |= {"cells": len(store.cells), "of": len(list(declarations.cells()))}
        study.conclude(judge)
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option in ("--models", "--methods", "--systems"):
        parser.add_argument(option, type=lambda text: text.split(","), help="names, separated by commas")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cells")
    parser.add_argument("--again", action="store_true", help="compute cells anew that are there")
    parser.add_argument("--out", type=Path, help="the folder of the table")
    parser.add_argument("--tiny", action="store_true", help="four cells, in seconds")
    given = parser.parse_args()
    main(given.tiny, given.out, given.models, given.methods, given.systems, given.workers, given.again)
