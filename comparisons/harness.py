"""Twenty kills of a grid of 200 cells, and the table of one that nobody disturbed; what a grid costs, and its ceiling.

Kills. A run computes the grid on two processes and is killed at a moment drawn evenly between 0 and twice (its start-up
+ its share of the undisturbed run), so that some kills meet it before any cell has begun; the next one goes on in the
same folder. A kill is SIGKILL to all of its processes, SIGKILL to the one that hands out the work, or
SIGINT to all, which is Ctrl-C. Each process writes down which cell it begins and ends, and when. After a kill every
file of a cell is read, files of earlier processes are compared with what they were (inode, time, hash), and the cells
that were at work are counted. Where the last process has finished, both tables but for their costs, notes and arrays of
all cells are compared bit for bit. A process that has so much done that the kills to come would have nothing left to
interrupt is killed at once, so that a fast machine has as many.

Costs. Cells one at a time, in this process ("sequential") and in another ("local"), each of so many steps that it
takes two seconds on this machine, by what a step took just before. The grid's own time is what lies between two cells,
and what comes after the last: sending, writing, telling, tables. It is set against the time of the cells, without the
first, in which a process loads its frameworks. What comes before that (imports, reading tables, starting a process) is
a constant, and is said apart.

Memory. Beside ordinary cells there are some whose model allocates until it is stopped. What all processes hold by
themselves (resident, not shared) is looked at twenty times a second.

    python comparisons/harness.py [--tiny] [--kills N] [--out DIR]

It reads /proc, and so runs on Linux alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, read_claims
from study import BLUE, GREY, ORANGE, VERMILION, Study, command_line, panels

import ppl_bnn as bnn
from ppl_bnn.evaluation.grid import cell as cells
from ppl_bnn.evaluation.grid.cell import computed
from ppl_bnn.evaluation.grid.grid import Grid
from ppl_bnn.evaluation.grid.result import CELLS, COSTS, GridResult

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import harness
harness.child(json.loads(sys.argv[2]))
"""
# What is sent to whom; of four kills two are of everything, and one is each of the others.
KILLED, ORPHANED, INTERRUPTED = "SIGKILL to all", "SIGKILL to one", "SIGINT to all"
HOWS = (KILLED, ORPHANED, INTERRUPTED, KILLED)
# Seconds after a kill in which every process has to be gone, and in which a cell that has ended has to be on disk.
PATIENCE, WRITING = 60.0, 1.0
# The cell that is refused: a linear map has nothing to drop.
REFUSED = ("linear_regression", "mc-dropout")
# How the greedy model allocates: bytes, seconds between two pieces, and when it gives up waiting to be stopped.
CHUNK, PAUSE, MOST = 2**24, 0.02, 3 * 2**30
# What the process that hands out the work may hold, and what another can allocate between two looks at its memory: the
# library looks four times a second, in which the greedy model adds 13 of its pieces, 0.20 GiB; three more are for a
# look that comes late.
MAIN_ALLOWANCE, ALLOWANCE = 2**29, 16 * CHUNK
# A small share of a cell that takes many times as long as it is made to, as on a machine with other work, says nothing.
SHARE_OF_COST, MOST_TIMES = 0.02, 3.0


@dataclass(frozen=True)
class Sizes:
    """jobs: cells at once where kills are. steps: of optimisers. reserve: cells left for each kill to come.

    engines, timed: where costs are measured, and of how many cells; cell_seconds: what each is made to take, and
    probe_steps: of the two before, which say how many steps that is. ceiling: bytes that a process may hold by itself.
    neighbours: models beside the one that holds more.
    """

    kills: int = 20
    data: tuple[str, ...] = ("diabetes", "inverse_sine")
    methods: tuple[str, ...] = ("map", "laplace", "svi", "nuts", "mc-dropout")
    splits: int = 5
    seeds: int = 2
    steps: int = 50
    jobs: int = 2
    reserve: int = 4
    engines: tuple[str, ...] = ("sequential", "local")
    timed: int = 7
    cell_seconds: float = 2.0
    probe_steps: int = 200
    ceiling: int = 5 * 2**28
    neighbours: tuple[str, ...] = ("linear_regression", "regression_mlp")
    seed: int = 0


FULL = Sizes()
TINY = Sizes(
    kills=4, data=("diabetes",), methods=("laplace", "mc-dropout"), splits=2, steps=30, reserve=2,
    engines=("sequential",), timed=3, cell_seconds=0.2, probe_steps=20,
    neighbours=("linear_regression",),
)  # fmt: skip


# --- the grids -------------------------------------------------------------------------------------


def methods(sizes: Sizes) -> dict[str, Any]:
    """Cheap ones, most of them in Pyro, which compiles nothing when a process begins anew."""
    short: dict[str, Any] = {"ppl": "pyro", "draws": 12, "warmup": 15, "chains": 2, "max_tree_depth": 3}
    every = {
        "map": bnn.MAP(steps=sizes.steps, polish=False),
        "laplace": bnn.Laplace(ppl="pyro", structure="kron", steps=sizes.steps, polish=False),
        "svi": bnn.SVI(ppl="pyro", steps=sizes.steps, elbo_draws=20),
        "nuts": bnn.NUTS(**short, chain_method="sequential"),
        "mc-dropout": bnn.MCDropout(ppl="pyro", steps=sizes.steps),
    }
    return {name: every[name] for name in sizes.methods}


def killed_grid(sizes: Sizes) -> Grid:
    return Grid(
        models=["linear_regression", "regression_mlp"],
        data=list(sizes.data),
        methods=methods(sizes),
        splits=f"random:{sizes.splits}@0.9",
        seeds=sizes.seeds,
        reference="laplace",
        device="cpu",
    )


def timed_grid(sizes: Sizes) -> Grid:
    """Cells of `sizes.steps` each: no tolerance is met before."""
    method = bnn.SVI(ppl="pyro", steps=sizes.steps, elbo_draws=100)
    return Grid(
        models=["regression_mlp"],
        data=["diabetes"],
        methods={"svi": method},
        splits=f"random:{sizes.timed}@0.9",
        device="cpu",
    )


def starved_grid(sizes: Sizes) -> Grid:
    """Cells of the first split and seed of the grid that is killed, with greedy ones among them."""
    of = methods(sizes)
    return Grid(
        models={
            "linear_regression": "linear_regression",
            "greedy": greedy,
            "regression_mlp": "regression_mlp",
        },
        data=list(sizes.data),
        methods={name: of[name] for name in ("map", "laplace") if name in of},
        splits="random:1@0.9",
        reference="laplace",
        device="cpu",
    )


def greedy(x: Any, y: Any = None) -> None:
    """Linear regression that allocates wherever a system runs it; nothing is allocated to find out its sites."""
    if not isinstance(x, np.ndarray):
        held = []
        while len(held) * CHUNK < MOST:
            held.append(np.ones(CHUNK // 8))
            time.sleep(PAUSE)
        raise RuntimeError(f"nobody stopped it at {MOST / 2**30:.3g} GiB")
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(1.0))


GRIDS: dict[str, Callable[[Sizes], Grid]] = {
    "killed": killed_grid,
    "timed": timed_grid,
    "starved": starved_grid,
}


# --- what a process does ---------------------------------------------------------------------------


def child(asked: dict[str, Any]) -> None:
    """Run a grid; what is asked for says which, where, and where each process tells what it is at."""
    import pandas  # noqa: F401 - which every run needs at its end, and which is no cost of a cell

    cells.__dict__["computed"] = partial(told, asked["log"])
    grid = GRIDS[asked["grid"]](Sizes(**asked["sizes"]))
    marks, called = _Marks(), time.time()
    grid.run(asked["out"], engine=asked["engine"], jobs=asked["jobs"], memory=asked["memory"], progress=marks)
    content = {"called": called, "returned": time.time(), "marks": marks.seen}
    Path(asked["log"] + ".json").write_text(json.dumps(content))


class _Marks:
    """A progress that keeps the time and the CPU seconds of this process at each cell it is told of."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def task(self, title: str, total: int) -> _Marks:
        return self

    def update(self, done: int, **figures: float) -> None:
        self.seen.append((time.time(), time.process_time()))

    def close(self) -> None:
        pass


def told(log: str, work: bytes, parts: str, *rest: Any) -> bytes:
    """`cells.computed`, with a line in `log` before and after."""
    key = cells.key_of(json.loads(parts))
    _say(log, "begun", key)
    content = computed(work, parts, *rest)
    _say(log, "ended", key)
    return content


def _say(log: str, what: str, key: str) -> None:
    # A single write to a file that is appended to is one line, whoever else writes.
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{what} {key} {os.getpid()} {time.time():.6f}\n".encode())
    finally:
        os.close(file)


@dataclass(frozen=True)
class Event:
    """A cell that was begun or ended by a process, in seconds since 1970."""

    what: str
    key: str
    pid: int
    when: float


def events(log: Path) -> list[Event]:
    """What the processes of one run wrote down, in time order; a line that a kill cut short does not count."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().split("\n")[:-1]]
    found = [Event(what, key, int(pid), float(when)) for what, key, pid, when in lines]
    return sorted(found, key=lambda each: each.when)


# --- processes, from outside -------------------------------------------------------------------------


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Whoever starts a study in the background has told it to ignore Ctrl-C, which those inherit that it starts."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def started(
    folder: Path, grid: str, name: str, sizes: Sizes, engine: str = "local", memory: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """(a process that runs a grid, at the head of a session of its own, and its log). All of it ends with the block."""
    log, scratch = folder / f"{name}.log", folder / "scratch"
    scratch.mkdir(exist_ok=True)
    asked = {
        "grid": grid,
        "out": str(folder / grid if grid == "killed" else folder / name),
        "log": str(log),
        "sizes": asdict(sizes),
        "engine": engine,
        "jobs": sizes.jobs if grid != "timed" else 1,
        "memory": memory,
    }
    # What a killed process could not remove goes when the study ends.
    environment = os.environ | {"TMPDIR": str(scratch), "JOBLIB_TEMP_FOLDER": str(scratch)}
    arguments = [sys.executable, "-c", CHILD, str(Path(__file__).parent), json.dumps(asked)]
    with open(folder / f"{name}.err", "wb") as said:
        process = subprocess.Popen(
            arguments, env=environment, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        )
    try:
        yield process, log
    finally:
        for pid in alive(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def finished(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the end of a run, which has to be a good one."""
    if process.wait() != 0:
        raise RuntimeError(f"a run ended with {process.returncode}: {_said(log)}")


def _said(log: Path) -> str:
    return log.with_suffix(".err").read_text()[-2000:]


def alive(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                # The name of a program may have blanks and brackets in it.
                state, _, _, of = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def stop(process: subprocess.Popen[bytes], how: str) -> float:
    """Kill a run and give the seconds until none of its processes was left."""
    began = time.perf_counter()
    if how == ORPHANED:
        process.send_signal(signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGINT if how == INTERRUPTED else signal.SIGKILL)
    while time.perf_counter() - began < PATIENCE:
        # Its end is to be taken note of, or its number stays.
        process.poll()
        if not alive(process.pid):
            break
        time.sleep(0.02)
    process.poll()
    return time.perf_counter() - began


# --- kills -----------------------------------------------------------------------------------------


def moments(sizes: Sizes, startup: float, working: float) -> list[tuple[str, float]]:
    """(how, seconds after its start) for each kill. startup, working: seconds of the undisturbed run."""
    rng = random.Random(sizes.seed)
    hows = [HOWS[number % len(HOWS)] for number in range(sizes.kills)]
    rng.shuffle(hows)
    longest = 2.0 * (startup + working / max(1, sizes.kills))
    return [(how, rng.uniform(0.0, longest)) for how in hows]


def fingerprints(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Key -> inode, time in nanoseconds and hash of the file of each finished cell."""
    found = {}
    for file in (folder / CELLS).glob(f"*{cells.SUFFIX}"):
        stat = file.stat()
        found[file.stem] = (stat.st_ino, stat.st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
    return found


def unreadable(folder: Path, keys: Sequence[str]) -> list[str]:
    """The cells whose file has no header, or arrays that cannot be read."""
    store, found = cells.Store(folder / CELLS), []
    for key in keys:
        words = store.words(key)
        if words is None or (not words["failure"] and not store.arrays(key)):
            found.append(key)
    return found


def at_work(seen: Sequence[Event], kept: Mapping[str, Any], killed: float) -> dict[str, Any]:
    """How many cells were being computed at the time of a kill, how many had been computed and were not on disk, and
    for how many seconds the one that had waited longest."""
    begun = [each for each in seen if each.what == "begun" and each.when <= killed]
    ended = {(each.key, each.pid): each.when for each in seen if each.what == "ended" and each.when <= killed}
    waiting = [killed - when for (key, _), when in ended.items() if key not in kept]
    return {
        "computing": sum((each.key, each.pid) not in ended for each in begun),
        "unwritten": len(waiting),
        "unwritten_seconds": max(waiting, default=0.0),
    }


def kill(folder: Path, sizes: Sizes, number: int, how: str, moment: float, total: int) -> dict[str, Any]:
    """Start the grid, kill it, and look at what it left. number: of the kill, from 0."""
    out, most = folder / "killed", total - sizes.reserve * (sizes.kills - number)
    before = fingerprints(out)
    with started(folder, "killed", f"kill{number}", sizes) as (process, log):
        began = time.time()
        while True:
            passed, there = time.time() - began, len(list((out / CELLS).glob(f"*{cells.SUFFIX}")))
            enough = there > len(before) and there >= most
            if passed >= moment or enough:
                break
            if process.poll() is not None:
                raise RuntimeError(f"a run ended before its kill, with {process.returncode}: {_said(log)}")
            time.sleep(0.01)
        killed = time.time()
        seconds = stop(process, how)
        left = len(alive(process.pid))
    after, seen = fingerprints(out), events(log)
    begun = {each.key for each in seen if each.what == "begun"}
    row = {
        "kill": number + 1,
        "how": how,
        "moment": moment,
        "seconds": killed - began,
        "early": enough and passed < moment,
        "at_start": len(before),
        "finished": len(after),
        **at_work(seen, after, killed),
        "computed_again": len(begun & set(before)),
        "changed": sum(after.get(key) != content for key, content in before.items()),
        "unreadable": len(unreadable(out, list(after))),
        "processes_left": left,
        "seconds_to_end": seconds,
        "said": "",
        "rows_in_table": None,
    }
    if how == INTERRUPTED:
        said = _said(log)
        row["said"] = next((word for word in ("GridInterrupted", "KeyboardInterrupt") if word in said), "")
        if row["said"] == "GridInterrupted":
            import pandas as pd

            row["rows_in_table"] = len(pd.read_csv(out / "cells.csv"))
    return row


def differences(one: Any, other: Any) -> list[str]:
    """The columns of two frames that are not bit for bit alike, but for costs; "rows" where the frames differ in what
    they have rows or columns for."""
    if not one.index.equals(other.index) or list(one.columns) != list(other.columns):
        return ["rows"]
    found = []
    for name in one.columns:
        if name not in COSTS:
            a, b = one[name].to_numpy(), other[name].to_numpy()
            numbers = a.dtype.kind == b.dtype.kind == "f"
            same = np.array_equal(a, b, equal_nan=True) if numbers else list(a) == list(b)
            if not same:
                found.append(str(name))
    return found


def compared(one: GridResult, other: GridResult) -> dict[str, Any]:
    """What differs between two results of one grid: columns of cells and of the table, and cells whose arrays or notes
    do."""
    stores = [cells.Store(Path(str(each.folder)) / CELLS) for each in (one, other)]
    arrays, notes = [], []
    for key in one.cells["key"]:
        a, b = (store.arrays(key) for store in stores)
        same = a.keys() == b.keys() and all(np.array_equal(a[name], b[name], equal_nan=True) for name in a)
        if not same:
            arrays.append(key)
        if one.notes.get(key) != other.notes.get(key):
            notes.append(key)
    return {
        "cells": differences(one.cells, other.cells),
        "table": differences(one.table(), other.table()),
        "arrays": arrays,
        "notes": notes,
    }


def judge_kills(
    referee: Referee, rows: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any], sizes: Sizes
) -> None:
    """The claims about kills. numbers: of the part on kills, of which `last` is the run that nobody killed."""
    last, differing, missing = numbers["last"], numbers["differing"], numbers["missing"]

    def most(name: str) -> float:
        return max((row[name] for row in rows), default=0)

    counts = ", ".join(f"{sum(row['how'] == how for row in rows)} {how}" for how in dict.fromkeys(HOWS))
    early = sum(row["at_start"] == row["finished"] for row in rows)
    text = (
        f"{len(rows)} kills ({counts}), {early} of them before a cell was finished; {numbers['cells']} cells"
    )
    if len(rows) < sizes.kills:
        referee.not_run("same-table", f"fewer kills than the {sizes.kills} wanted", text)
    else:
        different = [f"{name} {', '.join(map(str, what))}" for name, what in differing.items() if what]
        found = "; ".join([text, *different])
        referee.measured("same-table", exact(missing + sum(map(len, differing.values()))), found)
    again, changed, broken = (
        sum(row.get(name, 0) for row in (*rows, last)) for name in ("computed_again", "changed", "unreadable")
    )
    referee.measured(
        "whole-cells",
        exact(again + changed + broken),
        f"{broken} files that cannot be read, {changed} that changed later, {again} finished cells begun again",
    )
    late = max(0.0, most("unwritten_seconds") - WRITING)
    referee.measured(
        "in-flight",
        exact(max(0, most("computing") - sizes.jobs) + math.ceil(late)),
        f"at most {most('computing')} cells at work, {sizes.jobs} processes; at most {most('unwritten')} done and not "
        f"yet on disk, the longest for {most('unwritten_seconds'):.3f} s",
    )
    tables = [row for row in rows if row.get("rows_in_table") is not None]
    lacking = sum(row["rows_in_table"] != row["finished"] for row in tables)
    referee.measured(
        "processes",
        exact(most("processes_left") + lacking),
        f"all gone within {most('seconds_to_end'):.1f} s; {len(tables)} of "
        f"{sum(row['how'] == INTERRUPTED for row in rows)} interrupts met cells at work and left a table",
    )
    referee.measured(
        "failing-cell",
        exact(numbers["unplanned_failures"]),
        f"{numbers['failed']} of {numbers['cells']} cells failed, {numbers['meant_to_fail']} were meant to: "
        f"{' | '.join(numbers['reasons']) or 'no reason'}",
    )


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    referee, numbers = Referee(read_claims("harness")), study.numbers
    judge_kills(referee, study.tables["kills"], numbers["kills"], study.sizes)
    judge_costs(referee, study.tables.get("costs", ()), numbers.get("load_at_begin", 0.0), numbers["cores"])
    if "memory" in numbers:
        judge_memory(referee, numbers["memory"], study.sizes)
    else:
        for key in ("greedy-cell", "ceiling"):
            referee.not_run(key, "the run ended before")
    return referee.verdicts()


def disturbed(study: Study, folder: Path) -> GridResult:
    """The part on kills; gives the undisturbed result."""
    sizes = study.sizes
    with started(folder / "calm", "killed", "undisturbed", sizes) as (process, log):
        began = time.time()
        finished(process, log)
    ended, seen = time.time(), events(log)
    truth = GridResult.load(folder / "calm" / "killed")
    startup, total = seen[0].when - began, truth.asked
    working = ended - seen[0].when
    every: Any = truth.cells
    times = every["seconds"]
    study.say(
        f"undisturbed: {total} cells in {working:.0f} s after {startup:.1f} s, {times.median():.2f} s the median"
    )
    refused = every[every["failure"] != ""]
    wanted = len(sizes.data) * sizes.splits * sizes.seeds * (REFUSED[1] in sizes.methods)
    where = set(zip(refused["model"], refused["method"], strict=True))
    reasons = set(refused["failure"])
    strange = sum("linear map" not in each for each in refused["failure"]) + len(where - {REFUSED})
    unplanned = abs(len(refused) - wanted) + strange
    rows: list[dict[str, Any]] = []
    for number, (how, moment) in enumerate(moments(sizes, startup, working)):
        rows.append(kill(folder / "disturbed", sizes, number, how, moment, total))
        study.say(
            f"kill {number + 1} ({how}) after {rows[-1]['seconds']:.1f} s: {rows[-1]['finished']} finished"
        )
    before = fingerprints(folder / "disturbed" / "killed")
    with started(folder / "disturbed", "killed", "last", sizes) as (process, log):
        finished(process, log)
    after, begun = fingerprints(folder / "disturbed" / "killed"), {each.key for each in events(log)}
    of_last = {
        "computed_again": len(begun & set(before)),
        "changed": sum(after.get(key) != content for key, content in before.items()),
    }
    result = GridResult.load(folder / "disturbed" / "killed")
    differing = compared(truth, result)
    study.tables["kills"] = rows
    study.numbers["kills"] = {
        "cells": total,
        "startup_seconds": startup,
        "working_seconds": working,
        "median_cell_seconds": float(times.median()),
        "idle_share": idle_share(seen),
        "differing": differing,
        "missing": result.missing,
        "failed": len(refused),
        "meant_to_fail": wanted,
        "unplanned_failures": unplanned,
        "reasons": sorted(reasons),
        "left_for_the_last": total - len(before),
        "last": of_last,
        "parts_left": len(list((folder / "disturbed" / "killed" / CELLS).glob(".*"))),
    }
    return truth


# --- costs -----------------------------------------------------------------------------------------


def between(seen: Sequence[Event]) -> list[float]:
    """Seconds between the end of a cell and the beginning of the next in the same process."""
    found, last = [], {}
    for each in seen:
        if each.what == "ended":
            last[each.pid] = each.when
        elif each.pid in last:
            found.append(each.when - last.pop(each.pid))
    return found


def idle_share(seen: Sequence[Event]) -> float:
    """Time between cells over time in cells, all processes together, each from the end of its first cell."""
    begun: dict[tuple[str, int], float] = {}
    worked: dict[int, list[float]] = {}
    for each in seen:
        if each.what == "begun":
            begun[each.key, each.pid] = each.when
        else:
            worked.setdefault(each.pid, []).append(each.when - begun[each.key, each.pid])
    later = sum(sum(seconds[1:]) for seconds in worked.values())
    return sum(between(seen)) / later if later else float("nan")


def costs_of(
    seen: Sequence[Event], marks: Mapping[str, Any], launched: float, seconds: Sequence[float]
) -> dict[str, Any]:
    """The costs of a run with one cell at a time. seconds: of the cells, in the order in which they were computed."""
    gaps, tail = between(seen), marks["returned"] - seen[-1].when
    later = list(seconds)[1:]
    # The first mark is set before any cell, the others each as one is on disk.
    _, first, *_, last = marks["marks"]
    return {
        "cells": len(seconds),
        "median_cell_seconds": float(np.median(seconds)),
        "least_cell_seconds": float(np.min(seconds)),
        "import_seconds": marks["called"] - launched,
        "begin_seconds": seen[0].when - marks["called"],
        "first_cell_seconds": float(seconds[0]),
        "between_mean": float(np.mean(gaps)),
        "between_most": float(np.max(gaps)),
        "after_seconds": tail,
        "cpu_per_cell": (last[1] - first[1]) / len(later),
        "share": (sum(gaps) + tail) / sum(later),
    }


def judge_costs(referee: Referee, rows: Sequence[Mapping[str, Any]], load: float, cores: int) -> None:
    """Each engine is below the share. Not run where others had the machine: a load at the beginning above the number of
    its cores, or cells of several times the length that they were made for.

    load: processes that computed or waited, over a minute, before the study began.
    """
    if not rows:
        referee.not_run("costs", "the run ended before")
        return
    parts = "; ".join(
        f"{row['engine']}: {100.0 * row['share']:.2f} % of {row['cells']} cells of {row['median_cell_seconds']:.1f} s "
        f"(between two {1e3 * row['between_mean']:.0f} ms, after the last {row['after_seconds']:.2f} s), apart from "
        f"{row['import_seconds'] + row['begin_seconds']:.1f} s before the first"
        for row in rows
    )
    why = []
    if load > cores:
        why.append(f"the load at the beginning was {load:.1f} on {cores} cores")
    if any(row["median_cell_seconds"] > MOST_TIMES * row["made_for_seconds"] for row in rows):
        why.append(f"cells took several times the {rows[0]['made_for_seconds']:g} s that they were made for")
    if why:
        referee.not_run("costs", "; ".join(why), parts)
    else:
        referee.measured("costs", exact(max(row["share"] for row in rows)), parts)


def timed(folder: Path, name: str, sizes: Sizes, engine: str) -> tuple[GridResult, dict[str, Any]]:
    """What a grid of timed cells found, and its costs."""
    with started(folder, "timed", name, sizes, engine=engine) as (process, log):
        launched = time.time()
        finished(process, log)
    result = GridResult.load(folder / name)
    if result.failures:
        raise RuntimeError(f"a cell failed: {set(result.cells['failure'])}")
    marks = json.loads(Path(f"{log}.json").read_text())
    return result, costs_of(events(log), marks, launched, list(result.cells["seconds"]))


def steps_for(sizes: Sizes, run_seconds: float) -> int:
    """Steps that take `sizes.cell_seconds`, where `sizes.probe_steps` took `run_seconds`."""
    return max(1, math.ceil(sizes.probe_steps * sizes.cell_seconds / run_seconds))


def costs(study: Study, folder: Path) -> None:
    sizes: Sizes = study.sizes
    probe, _ = timed(folder, "probe", replace(sizes, timed=2, steps=sizes.probe_steps), "sequential")
    # The first has loaded the frameworks.
    steps = steps_for(sizes, float(probe.cells["run_seconds"].iloc[-1]))
    rows = []
    for engine in sizes.engines:
        _, found = timed(folder, engine, replace(sizes, steps=steps), engine)
        rows.append({"engine": engine, "steps": steps, "made_for_seconds": sizes.cell_seconds, **found})
    study.tables["costs"] = rows


# --- memory ----------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """Looks at what each process of a session holds by itself, in bytes, until it is told to end."""

    def __init__(self, session: int, interval: float = 0.05):
        super().__init__(daemon=True)
        self.session, self.interval = session, interval
        self.samples: list[tuple[float, dict[int, int]]] = []
        self._enough = threading.Event()

    def run(self) -> None:
        began = time.perf_counter()
        while not self._enough.wait(self.interval):
            held = {pid: found for pid in alive(self.session) if (found := own_memory(pid)) is not None}
            self.samples.append((time.perf_counter() - began, held))

    def end(self) -> None:
        self._enough.set()
        self.join()


def own_memory(pid: int) -> int | None:
    """Bytes that a process holds by itself; None where it has ended."""
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def judge_memory(referee: Referee, numbers: Mapping[str, Any], sizes: Sizes) -> None:
    """The claims about memory. numbers: the peaks; `greedy`: why each greedy cell failed, "" if it did not; `others`:
    what became of the other cells.
    """
    failures, others = numbers["greedy"], numbers["others"]
    through = sum(not each.startswith("MemoryError") for each in failures.values())
    harmed = others["cells"] - others["finished"] + len(others["differing"])
    text = (
        f"{len(failures)} greedy cells: {' | '.join(sorted(set(failures.values())))}; {others['finished']} of "
        f"{others['cells']} others finished, columns unlike those of the run without a ceiling: "
        f"{', '.join(others['differing']) or 'none'}"
    )
    if failures and others["cells"]:
        referee.measured("greedy-cell", exact(through + harmed), text)
    else:
        referee.undecided("greedy-cell", "no cell was greedy, or none was another", text)
    each, gib = sizes.ceiling + ALLOWANCE, 2**30
    ceilings = {
        "one that computes": (numbers["peak_worker_bytes"], each),
        "the one that hands out": (numbers["peak_main_bytes"], MAIN_ALLOWANCE),
        f"all together, {sizes.jobs} that compute": (
            numbers["peak_bytes"],
            sizes.jobs * each + MAIN_ALLOWANCE,
        ),
    }
    referee.measured(
        "ceiling",
        exact(max(peak / most for peak, most in ceilings.values())),
        "; ".join(
            f"{who}: at most {peak / gib:.2f} of {most / gib:.2f} GiB"
            for who, (peak, most) in ceilings.items()
        ),
    )


def memory(study: Study, folder: Path, truth: GridResult) -> Watch:
    sizes = study.sizes
    with started(folder, "starved", "starved", sizes, memory=sizes.ceiling) as (process, log):
        watch = Watch(process.pid)
        watch.start()
        try:
            finished(process, log)
        finally:
            watch.end()
        head = process.pid
    result = GridResult.load(folder / "starved")
    every: Any = result.cells
    starved, others = every[every["model"] == "greedy"], every[every["model"] != "greedy"].set_index("key")
    there = truth.cells.set_index("key")
    known = [key for key in others.index if key in there.index]
    neighbours = {
        "cells": result.asked - len(starved),
        "finished": int((others["failure"] == "").sum()),
        "differing": ["rows"]
        if len(known) < len(others)
        else differences(others.loc[known], there.loc[known]),
    }
    failures = {f"{row.data} by {row.method}": str(row.failure) for row in starved.itertuples(index=False)}
    peaks: dict[int, int] = {}
    for _, held in watch.samples:
        for pid, size in held.items():
            peaks[pid] = max(size, peaks.get(pid, 0))
    numbers = {
        "peak_bytes": max(sum(held.values()) for _, held in watch.samples),
        "peak_main_bytes": peaks[head],
        "peak_worker_bytes": max(size for pid, size in peaks.items() if pid != head),
        "processes": len(peaks),
        "samples": len(watch.samples),
    }
    study.numbers["memory"] = numbers | {"greedy": failures, "others": neighbours}
    return watch


# --- the study -------------------------------------------------------------------------------------


def draw(study: Study, watch: Watch) -> None:
    """Finished cells after each kill; what the processes held while some were greedy."""
    figure, axes = panels(9.0, 3.2, columns=2)
    left, right = axes[0]
    rows = study.tables["kills"]
    for how, colour, mark in ((KILLED, VERMILION, "o"), (ORPHANED, ORANGE, "s"), (INTERRUPTED, BLUE, "^")):
        some = [row for row in rows if row["how"] == how]
        left.plot(
            [row["kill"] for row in some], [row["finished"] for row in some], mark, color=colour, label=how
        )
    left.axhline(study.numbers["kills"]["cells"], color=GREY, linestyle=":", label="all cells")
    left.set(xlabel="kill", ylabel="finished cells", xlim=(0, len(rows) + 1), ylim=(0, None))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False, fontsize=8)
    gib = 2**30
    for pid in sorted({pid for _, held in watch.samples for pid in held}):
        line = [(when, held[pid] / gib) for when, held in watch.samples if pid in held]
        colour = GREY if pid == watch.session else BLUE
        right.plot(*zip(*line, strict=True), color=colour, linewidth=1.0)
    total = [(when, sum(held.values()) / gib) for when, held in watch.samples]
    right.plot(*zip(*total, strict=True), color="black", linewidth=1.0, label="all processes")
    right.axhline(study.sizes.ceiling / gib, color=VERMILION, linestyle="--", label="ceiling of one")
    right.plot([], [], color=BLUE, label="each that computes")
    right.plot([], [], color=GREY, label="the one that hands out")
    # Room for the legend above the lines.
    top = 1.6 * max(value for _, value in total)
    right.set(xlabel="seconds", ylabel="own memory, GiB", ylim=(0, top))
    right.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    figure.savefig(study.out / "harness.png")


def main(tiny: bool = False, out: str | Path | None = None, kills: int | None = None) -> Study:
    if not Path("/proc/self/stat").exists():
        raise RuntimeError("this study looks at processes in /proc, which this system does not have")
    study = Study.begin(TINY if tiny else FULL, "harness", tiny, out, kills=kills)
    study.numbers |= {"load_at_begin": os.getloadavg()[0], "cores": os.cpu_count()}
    with hearing_ctrl_c(), tempfile.TemporaryDirectory(prefix="ppl-bnn-") as name:
        folder = Path(name)
        for part in ("calm", "disturbed", "timed", "starved"):
            (folder / part).mkdir()
        truth = disturbed(study, folder)
        # What is measured is kept, whatever becomes of the parts to come.
        study.write()
        costs(study, folder / "timed")
        study.write()
        watch = memory(study, folder / "starved", truth)
    study.numbers["load_at_end"] = os.getloadavg()[0]
    draw(study, watch)
    study.conclude(judge)
    return study


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, help="how many")
    main(**vars(parser.parse_args()))
