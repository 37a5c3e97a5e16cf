"""What the studies share: claims with verdicts, tables, figures of one look, and a reference that is one.

A study is a file beside this one with `main(tiny=False, out=None)`. It makes a `Study`, fills its tables, judges each
claim of its source from numbers, and writes everything to one folder.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from claims import Verdict

from ppl_bnn import data
from ppl_bnn.core.figures import new_figure
from ppl_bnn.core.files import write_whole
from ppl_bnn.inference.method import versions

# The library's own limits of convergence: rank-normalised R-hat below, bulk effective sample size above.
RHAT, ESS = 1.01, 400.0
# Okabe and Ito's colours; lines differ in style, too.
BLACK, BLUE, ORANGE, VERMILION, GREEN, GREY = "#000000", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#777777"
PINK, SKY = "#CC79A7", "#56B4E9"


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
    def begin(cls, sizes: Any, name: str, tiny: bool, out: str | Path | None, **asked: int | None) -> Study:
        """A study that writes to `out`; by default to results/<name> beside this file, tiny to a temporary folder.

        asked: numbers in place of those of `sizes`, where they are not None.
        """
        if out is None:
            out = tempfile.mkdtemp(prefix=f"{name}_") if tiny else Path(__file__).parent / "results" / name
        given = {key: value for key, value in asked.items() if value is not None}
        found = cls(replace(sizes, **given), Path(out))
        found.out.mkdir(parents=True, exist_ok=True)
        return found

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begun:5.0f} s] {text}", flush=True)

    def judge(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.say(str(verdict))

    def conclude(self, judge: Callable[[Study], list[Verdict]]) -> None:
        """Write the tables, judge what stands in the files, and write the verdicts.

        A verdict is a function of the stored results, so that anyone can compute it again (`verdicts.py`).
        """
        self.verdicts = []
        self.write()
        for verdict in judge(self.read(self.out, self.sizes)):
            self.judge(verdict)
        self.write()

    def write(self) -> None:
        """Tables as CSV, verdicts as lines, and everything but the tables as JSON, with the provenance of the run."""
        self.out.mkdir(parents=True, exist_ok=True)
        for name, rows in self.tables.items():
            write_table(self.out / f"{name}.csv", rows)
        content = {
            "sizes": asdict(self.sizes),
            "numbers": self.numbers,
            "stamp": stamp() | {"seconds": round(time.perf_counter() - self.begun)},
        }
        write_verdicts(self.out, content, self.verdicts)

    @classmethod
    def read(cls, folder: str | Path, sizes: Any) -> Study:
        """The stored results of a study.

        Parameters
        ----------
        folder : path
            Where they are.
        sizes : dataclass
            Sizes of any run; those that are stored take their place.

        Returns
        -------
        Study
            Its tables as they stand in the files: numbers of six digits. A cell that is empty is not in its row. A
            column is of numbers, or of True and False, if all its cells are, else of text.
        """
        folder = Path(folder)
        content = json.loads((folder / "results.json").read_text())
        known = {each.name for each in fields(sizes)}
        stored = {key: _tuples(value) for key, value in content["sizes"].items() if key in known}
        found = cls(replace(sizes, **stored), folder, numbers=content.get("numbers", {}))
        found.tables = {path.stem: read_table(path) for path in sorted(folder.glob("*.csv"))}
        return found


def write_verdicts(folder: Path, content: dict[str, Any], verdicts: Sequence[Verdict]) -> None:
    """`results.json` with the verdicts in it, and `verdicts.txt` with one line for each."""
    lines = "".join(f"{each}\n" for each in verdicts)
    write_whole(folder / "verdicts.txt", lambda part: part.write_text(lines))
    text = json.dumps(content | {"verdicts": [asdict(each) for each in verdicts]}, indent=1) + "\n"
    write_whole(folder / "results.json", lambda part: part.write_text(text))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a table that `write_table` wrote; see `Study.read`."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds: dict[str, Callable[[str], Any]] = {}
    for column in rows[0] if rows else ():
        cells = {row[column] for row in rows if row[column]}
        kinds[column] = next((kind for kind in (_truth, int, float) if _all_are(kind, cells)), str)
    return [{column: kinds[column](cell) for column, cell in row.items() if cell} for row in rows]


def _truth(cell: str) -> bool:
    return {"True": True, "False": False}[cell]


def _all_are(kind: Callable[[str], Any], cells: set[str]) -> bool:
    try:
        for cell in cells:
            kind(cell)
    except (KeyError, ValueError):
        return False
    return bool(cells)


def converged(rhat: float, ess: float) -> bool:
    """Whether draws may stand for the exact posterior: the library's own limits, at the rows where a claim is made."""
    return rhat < RHAT and ess > ESS


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


def panels(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A new figure and its axes (rows, columns)."""
    figure = new_figure(width, height)
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.ravel():
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


# --- the mark of what has not converged -------------------------------------------------------------

# What the mark says, in a legend or beside a figure; see RHAT and ESS.
NOT_CONVERGED = "not converged"


def mark_unconverged(axes: Any, x: Any, y: Any, size: float = 9.0) -> Any:
    """A cross of two lines, with a white rim, over each point (x, y) whose chains have not converged (`converged`).

    A figure of a study takes this cross for nothing else. It goes over a point that is drawn as any other, so that
    colour and shape still tell the method.
    """
    from matplotlib import patheffects

    (found,) = axes.plot(
        x,
        y,
        linestyle="none",
        marker="x",
        color=BLACK,
        markersize=size,
        markeredgewidth=1.3,
        zorder=6,
        clip_on=False,
        label="_unconverged",
    )
    found.set_path_effects([patheffects.withStroke(linewidth=1.8, foreground="white")])
    return found


def unconverged_handle(
    text: str = f"{NOT_CONVERGED} (R-hat < {RHAT} and bulk ESS > {ESS:.0f} not met)",
) -> Any:
    """The entry of a legend for that mark."""
    from matplotlib.lines import Line2D

    return Line2D(
        [], [], linestyle="none", marker="x", color=BLACK, markersize=8, markeredgewidth=1.3, label=text
    )


# --- the command line -------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "checkpoint": {"help": "folder where finished parts are kept, so that an interrupted run goes on"},
    "seeds": {"type": int, "help": "how many"},
    "splits": {"type": int, "help": "how many splits of the data, two at least"},
    "figures": {
        "action": "store_true",
        "help": "draw the figures of the stored tables again, and run nothing",
    },
    "cache": {"help": "folder for compiled programs"},
    "shared": {"action": "store_true", "help": "keep no seconds: the machine has other work"},
}


def command_line(
    doc: str | None, *options: str, tiny: str = "small sizes, in seconds"
) -> argparse.ArgumentParser:
    """The parser of a study: --tiny, --out and those of OPTIONS that are named. A study adds what it alone has.

    doc: its docstring, whose first line is shown; tiny: what --tiny is of it.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help=tiny)
    parser.add_argument("--out", help="folder for tables, figures and verdicts")
    for name in options:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    return parser


def run(
    parser: argparse.ArgumentParser,
    main: Callable[..., Any],
    name: str,
    sizes: Any,
    draw: Callable[[Study], None],
) -> None:
    """Run a study as its command line says; with --figures only draw what its stored tables hold.

    draw: draws the figures of `study.tables` to `study.out`. sizes: of any run, as in `Study.read`.
    """
    options = vars(parser.parse_args())
    if options.pop("figures"):
        draw(Study.read(options["out"] or Path(__file__).parent / "results" / name, sizes))
    else:
        main(**options)


# --- parts of a run that are kept -------------------------------------------------------------------

# Of the sizes of a run what is no part's business: a run goes on with more of them.
REPETITIONS = ("seeds", "splits")


def kept(
    folder: str | Path | None, name: str, sizes: Any, compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What `compute` gives, plain values and, at its top, arrays, from <folder>/<name>.json (arrays from <name>.npz)
    where it is there and put there where it is not.

    Numbers come back as they were; the file is whole or absent, so a killed run loses the part that it was in, no more.

    Raises
    ------
    ValueError: what is there is of another size, however many seeds or splits either has.
    """
    if folder is None:
        return compute()
    folder = Path(folder)
    path, arrays = folder / f"{name}.json", folder / f"{name}.npz"
    of = _without_repetitions(json.loads(json.dumps(asdict(sizes))))
    if path.exists():
        content = json.loads(path.read_text())
        if _without_repetitions(content["sizes"]) != of:
            raise ValueError(f"{path} is of another size: name another folder")
        return content["part"] | (_arrays_of(arrays) if content.get("arrays") else {})
    part = compute()
    folder.mkdir(parents=True, exist_ok=True)
    held = {key: value for key, value in part.items() if isinstance(value, np.ndarray)}
    if held:
        # First of the two, so that where the part is there, so are they.
        np.savez(arrays, **held)  # pyright: ignore[reportArgumentType]
    plain = {key: value for key, value in part.items() if key not in held}
    words = json.dumps({"sizes": of, "arrays": list(held), "part": plain})
    write_whole(path, lambda part: part.write_text(words))
    return part


def _without_repetitions(sizes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sizes.items() if key not in REPETITIONS}


def _arrays_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {key: stored[key] for key in stored.files}


def stamp() -> dict[str, Any]:
    """The day, the number of cores, the versions that numbers depend on, and the commit of the study."""
    return {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "commit": commit_of(Path(__file__).parent),
    }


def commit_of(folder: Path) -> str:
    """The commit of the checkout that `folder` is in, marked where its Python files differ from it; "" without one."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)

    try:
        found = git("rev-parse", "--short=12", "HEAD")
    except OSError:
        return ""
    if found.returncode:
        return ""
    changed = git("diff", "--quiet", "HEAD", "--", ":(top,glob)**/*.py").returncode
    return found.stdout.strip() + (" with changes" if changed else "")


# --- images -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Grey images of digits, (N, H, W), in units of the root mean square of the training pixels; labels 0..9 (N,).

    elsewhere (M, H, W): images of something else, which `what` names. Black is 0, as is what a convolution pads with.
    """

    train: np.ndarray
    labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    elsewhere: np.ndarray
    what: str

    @property
    def pixels(self) -> int:
        return self.train.shape[1] * self.train.shape[2]


def load_images(
    table: str, rows: int, test_rows: int, elsewhere_rows: int, seed: int, disjoint: bool = False
) -> Images:
    """Rows drawn by `seed` from each part. table: "mnist", whose elsewhere is KMNIST; or "digits", scikit-learn's of
    8 x 8 pixels, which are always there and whose elsewhere are digits with their pixels in another order.

    disjoint: the rows of one seed are of no other seed. ValueError where a part has too few rows for so many seeds.
    """
    rng = np.random.default_rng(seed)

    def some(count: int, of: int) -> np.ndarray:
        if not disjoint:
            return rng.choice(of, count, replace=False)
        if (seed + 1) * count > of:
            raise ValueError(
                f"{table}: seed {seed} needs rows up to {(seed + 1) * count}, and there are {of}"
            )
        return np.random.default_rng(0).permutation(of)[seed * count : (seed + 1) * count]

    if table == "mnist":
        x, y = _pixels("mnist", "train")
        first = some(rows, len(y))
        train, labels = x[first], y[first]
        x, y = _pixels("mnist", "test")
        second = some(test_rows, len(y))
        test, test_labels = x[second], y[second]
        x, _ = _pixels("kmnist", "")
        elsewhere, what = x[some(elsewhere_rows, len(x))], "KMNIST"
    else:
        x, y = _pixels("digits", "")
        order = some(rows + test_rows, len(y))
        first, second = order[:rows], order[rows:]
        train, labels, test, test_labels = x[first], y[first], x[second], y[second]
        moved = x[some(elsewhere_rows, len(x))].reshape(elsewhere_rows, -1)
        elsewhere = moved[:, rng.permutation(moved.shape[1])].reshape(-1, *x.shape[1:])
        what = "digits, pixels shuffled"
    train, test, elsewhere = (part.astype(float) for part in (train, test, elsewhere))
    unit = math.sqrt(float(np.mean(train**2)))
    return Images(train / unit, labels, test / unit, test_labels, elsewhere / unit, what)


@functools.lru_cache(maxsize=4)
def _pixels(table: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W), float32 because MNIST in float64 is half a gigabyte, and labels."""
    found = data.load(table, part=part) if part else data.load(table)
    side = math.isqrt(found.x.shape[1])
    return found.x.reshape(-1, side, side).astype(np.float32), found.y
