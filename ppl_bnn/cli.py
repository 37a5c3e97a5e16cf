"""The command line: `ppl-bnn compare`, `report`, `advise`, `bench`; to look around `models`, `show`, `prior`, `data`.

Names, numbers and folders are checked before data are read, and data before a framework is imported, so that a typing
error costs a fraction of a second. Exit codes: 0 all methods finished; 1 a method failed (its row says why); 2 bad
input; 130 interrupted.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppl_bnn import _CONTENTS, __version__
from ppl_bnn.errors import BNNError, InputError, message, unknown_name
from ppl_bnn.progress import Bars, Task

if TYPE_CHECKING:
    from rich.console import Console

    from ppl_bnn.comparison import Comparison
    from ppl_bnn.data import Table
    from ppl_bnn.grid_result import GridResult
    from ppl_bnn.inference.method import Method
    from ppl_bnn.predictive import Prediction
    from ppl_bnn.zoo import Card, Sketch

# Every method of the library by its class in lower case: a new one is there without a line here.
METHODS = {
    name.lower(): name
    for name, module in _CONTENTS.items()
    if module.startswith("ppl_bnn.inference.") and name[0].isupper() and name != "Method"
}
DEFAULT = ("nuts", "svi", "laplace", "map")
# What runs in Pyro unless told otherwise, so that the main job shows both systems; the others run in NumPyro.
IN_PYRO = ("svi", "laplace")
# What a method that is made of another one is made of.
MEMBERS = {"ensemble": "map", "stacked": "nuts"}
REFERENCE = "nuts"
_DEFAULT_MODEL = {"regression": "regression_mlp", "classification": "classification_mlp"}
# Enough to run every line of every method within seconds, and far from enough to believe the result: of these sizes
# what a method has, and what some methods need besides.
QUICK: dict[str, Any] = {"draws": 25, "warmup": 25, "chains": 2, "steps": 100}
_QUICK_BESIDES: dict[str, dict[str, Any]] = {
    "nuts": {"max_tree_depth": 4},
    "hmc": {"num_steps": 4},
    "chees": {"chains": 8, "superchains": 4, "max_steps": 16},
    # Its tuning has to come down from draws of the prior: with a warm-up of 50 one chain in five had not.
    "mclmc": {"warmup": 200},
    "meads": {"chains": 8, "superchains": 4, "folds": 2},
    "smc": {"particles": 50, "runs": 2, "moves": 2, "max_leapfrog": 8},
    "pathfinder": {"draws": 200, "max_iterations": 30},
    "swag": {"collections": 10, "burn_in": 2, "rank": 5},
    "ensemble": {"size": 3},
}
QUICK_ROWS = {"train": 100, "test": 50}
MANY_ROWS = 20_000
NOTES, REPORT = "comparison.md", "report.html"
PRIOR = "prior.png"
WIDTH = 100

app = typer.Typer(
    name="ppl-bnn",
    help="Bayesian neural networks: one model, several methods of inference, one comparison.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """The entry point of `ppl-bnn` and of `python -m ppl_bnn`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a sign shows a question mark instead of a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="ppl-bnn")


def _console(error: bool = False) -> Console:
    """Standard output, or the error stream; 100 columns where it is no terminal and COLUMNS does not say otherwise."""
    from rich.console import Console

    console = Console(stderr=error, highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(stderr=error, highlight=False, width=WIDTH)


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """Errors raised on purpose become one red line and exit code 2; Ctrl-C ends with 130."""

    @functools.wraps(command)
    def told(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BNNError as error:
            _complain(_in_options(str(error)))
            raise typer.Exit(2) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            _complain(f"{type(error).__name__}: {error}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt as error:
            _complain(str(error) or "interrupted")
            raise typer.Exit(130) from None

    return told


@contextlib.contextmanager
def _keeping(folder: Path) -> Iterator[None]:
    """Have Ctrl-C that does not say itself what was kept name the folder in which it lies, if anything does."""
    try:
        yield
    except KeyboardInterrupt as error:
        if str(error) or not (folder.is_dir() and any(entry.name[0] != "." for entry in folder.iterdir())):
            raise
        raise KeyboardInterrupt(f"interrupted; what was finished until then lies in {folder}") from None


def _in_options(text: str) -> str:
    """Advice of the library, which speaks Python, in the words of the command line."""
    text = re.sub(r"""\b(task|device)=["'](\w+)["']""", r"--\1 \2", text)
    return re.sub(r"""\bdrop=\[(["'].*?["'])\]""", r"--drop \1", text)


def _complain(text: str) -> None:
    from rich.text import Text

    _console(error=True).print(Text.assemble(("error: ", "bold red"), (text, "red")), soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ppl-bnn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


# --- compare ----------------------------------------------------------------------------------------------


_Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A model of the zoo (see `ppl-bnn models`) or a file.py.", show_default=False
    ),
]
_Data = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.csv",
        help="A data set (see `ppl-bnn data`) or a CSV file.",
        show_default="the model's",
    ),
]
_Target = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The column of the CSV file to predict.", show_default=False),
]
_Drop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN", help="A column of the CSV file to leave out; repeatable.", show_default=False
    ),
]
_Task = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        help="regression or classification, where a CSV file leaves it open.",
        show_default=False,
    ),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="An argument of the model, such as width=20; repeatable.",
        show_default=False,
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where results are kept.", show_default="./ppl-bnn-results/MODEL-DATA"),
]


@app.command()
@_told
def compare(
    context: typer.Context,
    model: _Model = None,
    data: _Data = None,
    target: _Target = None,
    drop: _Drop = None,
    task: _Task = None,
    set_: _Set = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"What to compare, separated by commas, each at its defaults. Known: {', '.join(METHODS)}.",
        ),
    ] = ",".join(DEFAULT),
    ppl: Annotated[
        str | None,
        typer.Option(
            metavar="SYSTEM",
            help="numpyro or pyro for all methods, or svi=pyro,nuts=numpyro.",
            show_default=",".join(["numpyro", *(f"{name}=pyro" for name in IN_PYRO)]),
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Which of the methods the others are measured against.",
            show_default=f"{REFERENCE}, if it is among them",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:i].")] = "auto",
    seed: Annotated[
        int, typer.Option(help="For the split into training and test rows, and for every method.")
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows in seconds that all runs, and nothing else.")
    ] = False,
    out: _Out = None,
    report: Annotated[
        bool,
        typer.Option("--report", help="Write report.html, too: a page to read and to show; also of a grid."),
    ] = False,
    grid: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Many models, data sets, splits, methods and seeds, as the file says; of the other options only those "
            "below, --out and --report count.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="For a grid: local, sequential, dask://HOST:PORT or ray://HOST:PORT."),
    ] = "local",
    jobs: Annotated[
        int | None,
        typer.Option(help="For a grid: how many cells at once.", show_default="what there is room for"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--anew", help="For a grid: go on with what is there, or compute it anew."),
    ] = True,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="For a grid: compute cells anew that have failed."),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="For a grid: what a process of this machine may hold, such as 4GB or 500MB; a cell that needs more "
            "has failed.",
            show_default="a fair part of the machine's",
        ),
    ] = None,
) -> None:
    """Fit one model by several methods and show what each gives and costs.

    Without arguments: regression_mlp on the diabetes table by NUTS, SVI, Laplace and MAP, in under three minutes.
    """
    started = time.monotonic()
    _check_grid_options(context, grid)
    if grid is not None:
        _run_grid(grid, out, engine, jobs, resume, retry_failed, memory, report)
        return
    names = _names(methods)
    systems = _systems(names, ppl)
    measure = _reference(names, reference)
    _check_seed(seed)
    from ppl_bnn.ppl.protocol import resolve_device

    resolve_device(device)
    plan = _plan(model, data, target, drop or [], task, set_ or [], seed, quick, out)
    chosen = {name: _method(name, system, quick) for name, system in systems.items()}
    errors = _console(error=True)
    _announce(errors, plan, chosen, quick)
    _tell_of_prior(errors, plan)
    if "numpyro" in systems.values():
        _remember_compilations()
    with _keeping(plan.out):
        failed = _fit_and_show(errors, plan, chosen, measure, seed, device, quick, report)
    _console().print(f"[dim]{_seconds(time.monotonic() - started)} in all[/]")
    if failed:
        raise typer.Exit(1)


def _fit_and_show(
    errors: Console,
    plan: _Plan,
    chosen: dict[str, Method],
    measure: str | None,
    seed: int,
    device: str,
    quick: bool,
    report: bool,
) -> bool:
    """Fit, show and keep what was planned; whether a method failed."""
    from ppl_bnn.comparison import compare as run
    from ppl_bnn.reporting.terminal import show

    table, bars = plan.table, _Bars(errors)
    for file in (NOTES, REPORT):
        (plan.out / file).unlink(missing_ok=True)
    try:
        with _warnings_told(errors):
            result = run(
                plan.model,
                (table.x[plan.train], table.y[plan.train]),
                (table.x[plan.test], table.y[plan.test]),
                chosen,
                reference=measure,
                seed=seed,
                device=device,
                progress=bars,
                standardise=True,
                out=plan.out,
                feature_names=table.feature_names,
                class_names=table.class_names,
                target_name=table.target_name,
                card={"model": plan.name}
                | {
                    name: value
                    for name, value in table.card().items()
                    if name in ("name", "description", "provenance", "licence")
                },
            )
    except KeyboardInterrupt as interrupt:
        bars.rest()
        partial = getattr(interrupt, "partial", None)
        if partial is not None and partial.posteriors:
            show(_console(), partial, NOTES)
            _keep_notes(plan.out, partial)
        raise
    finally:
        bars.rest()
    from rich.markup import escape

    console = _console()
    show(console, result, NOTES)
    _keep_notes(plan.out, result)
    kept = _kept(result)
    if report and result.posteriors:
        from ppl_bnn.reporting.page import report as write

        with _warnings_told(errors):
            write(result, plan.out / REPORT)
        kept.append(REPORT)
    if quick:
        console.print("[yellow]--quick: nothing here is expected to have converged, or to mean anything.[/]")
    # A path that is broken into lines cannot be copied; a list of names can.
    console.print(f"[bold]Kept in {escape(str(plan.out))}/[/]", soft_wrap=True)
    console.print(", ".join(kept))
    return bool(result.failures)


def _check_grid_options(context: typer.Context, grid: Path | None) -> None:
    """Refuse what would not count: options of a single comparison beside --grid, those of a grid without it."""
    typed = [name for name in context.params if _typed(context, name)]
    of_grid = ("engine", "jobs", "resume", "retry_failed", "memory")
    of_both = ("grid", "out", "report")
    wrong = [name for name in typed if (name in of_grid) is (grid is None) and name not in of_both]
    if not wrong:
        return
    called = ", ".join(
        f"--{name.strip('_').replace('_', '-')}" if name != "model" else "MODEL" for name in wrong
    )
    if grid is None:
        raise InputError("--grid: " + message(f"a grid, which {called} is about", "none", "--grid FILE.toml"))
    raise InputError(
        "--grid: " + message("a file that says all that is fitted", f"{called} beside it", "keys of the file")
    )


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _run_grid(
    file: Path,
    out: Path | None,
    engine: str,
    jobs: int | None,
    resume: bool,
    retry_failed: bool,
    memory: str | None,
    report: bool,
) -> None:
    ceiling = None if memory is None else _ceiling(memory, engine)
    from ppl_bnn.grid import Grid

    folder = out or Path("ppl-bnn-results") / file.stem
    with _keeping(folder):
        grid = Grid.from_toml(file)
        errors = _console(error=True)
        errors.print(f"{grid}: {len(grid.cells)} cells", markup=False, soft_wrap=True)
        for sentence in grid.left_out:
            errors.print(sentence, markup=False, style="dim", soft_wrap=True)
        with _warnings_told(errors):
            result = grid.run(
                folder, engine, jobs, resume, progress=Bars(), retry_failed=retry_failed, memory=ceiling
            )
            if report:
                from ppl_bnn.reporting.page import report as write

                write(result, folder / REPORT)
        _show_grid(_console(), result)
        if report:
            _console().print(REPORT, markup=False)
        if result.failures:
            raise typer.Exit(1)


# Bytes of a unit, as it is written: MB and mB are two things, and a size without a unit is a guess.
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _ceiling(memory: str, engine: str) -> int:
    """The bytes of a size such as 4GB, for a grid whose processes are of this machine."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", memory.strip(), re.ASCII)
    count = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if count < _UNITS["MiB"]:
        raise InputError(
            "--memory: "
            + message(
                f"a size of 1MiB or more with its unit, one of {', '.join(_UNITS)}",
                repr(memory),
                "--memory 4GB",
            )
        )
    from ppl_bnn.engines import Engine

    if Engine.of(engine).kind != "local":
        raise InputError(
            "--memory: "
            + message("processes of this machine to hold to it", f"--engine {engine}", "no --memory")
        )
    return count


_GRID_HEADINGS = {
    "log_score": "log score",
    "gap_mean": "gap (sd)",
    "run_seconds": "run (s)",
    "failures": "failed",
}


def _show_grid(console: Console, result: GridResult) -> None:
    """A block for each model and data set: scores, paired differences to the best method, the gap, the cost."""
    table: Any = result.table()
    for (model, data), block in table.groupby(level=["model", "data"], sort=False):
        console.print(f"\n{model} on {data}", markup=False, style="bold")
        scores = [name for name in ("log_score", "rmse", "accuracy", "crps", "ece") if name in block]
        costs = [name for name in ("gap_mean", "run_seconds", "failures") if name in block]
        shown = [_GRID_HEADINGS.get(name, name) for name in (*scores, *costs)]
        headings = (
            "method",
            "splits",
            *shown[: len(scores)][:1],
            "behind best",
            *shown[min(1, len(scores)) :],
        )
        listed = _list(headings, tuple(range(1, len(headings))))
        for column in listed.columns:
            column.no_wrap = True
        for (_, _, method), row in block.iterrows():
            listed.add_row(
                method,
                f"{row['splits']:.0f}",
                *(_with_error(row, name) for name in scores[:1]),
                _with_error(row, f"{scores[0]}_to_best") if scores else "-",
                *(_plain(row[name], 3) for name in scores[1:]),
                *(_plain(row[name], 0 if name == "failures" else 2) for name in costs),
            )
        console.print(listed)
    console.print(
        "Means over splits; ±: standard error over splits, corrected for the training rows that splits share. Behind "
        "best: the difference in log score, paired over splits. Gap: of the mean function from the reference's, in its "
        "standard deviations. Every column: table.csv; every cell: cells.csv.",
        style="dim",
    )
    failures = _failures(result)
    for key, reason in failures.items():
        console.print(f"{key}: {reason}", markup=False, soft_wrap=True)
    if failures:
        advice = "A cell that has failed counts as finished: --retry-failed computes it anew."
        if any("memory" in reason.lower() for reason in failures.values()):
            advice += (
                " For want of memory give a process more with --memory, or run fewer at once with --jobs."
            )
        console.print(advice, markup=False, soft_wrap=True)
    if result.missing:
        console.print(f"{result.missing} of {result.asked} cells have not been computed.", markup=False)
    console.print(f"Kept in {result.folder}/", markup=False, style="bold", soft_wrap=True)


def _plain(value: float, digits: int) -> str:
    from ppl_bnn.reporting.terminal import number

    return "-" if math.isnan(value) else number(value, digits)


def _with_error(row: Any, column: str) -> str:
    # A table has no column that would be blank in all its rows, as differences to the best of a single method are.
    value, error = row.get(column, math.nan), row.get(f"{column}_se", math.nan)
    return _plain(value, 3) + ("" if math.isnan(error) else f" ± {_plain(error, 3)}")


def _failures(result: GridResult) -> dict[str, str]:
    failed: Any = result.cells[result.cells["failure"] != ""]
    return {
        f"{row['model']} on {row['data']}, {row['split']}, by {row['method']}, seed {row['seed']}": row[
            "failure"
        ]
        for _, row in failed.iterrows()
    }


@dataclass(frozen=True)
class _Plan:
    """What will be run: everything that the words of the command line stand for.

    unread: why the number of parameters is not known, where it is not.
    """

    name: str
    model: Callable[..., Any]
    table: Table
    train: Any
    test: Any
    out: Path
    parameters: int | None
    unread: str = ""


def _name(word: str) -> str:
    """The name of a method as it is listed; Pathfinder, mc_dropout and MC-Dropout are meant well."""
    name = re.sub(r"[\s_-]", "", word).lower()
    if name not in METHODS:
        raise unknown_name("method", word.strip(), METHODS)
    return name


def _names(methods: str) -> list[str]:
    names = [_name(word) for word in methods.split(",") if word.strip()]
    if not names or len(set(names)) < len(names):
        raise InputError(
            "--methods: " + message("each method once", repr(methods), f"--methods {','.join(DEFAULT)}")
        )
    return names


def _systems(names: list[str], ppl: str | None) -> dict[str, str]:
    """Method -> system. `ppl`: one system for all, `svi=pyro,nuts=numpyro`, or both; the later word counts."""
    from ppl_bnn.ppl.protocol import SYSTEMS

    systems = {name: "pyro" if name in IN_PYRO else "numpyro" for name in names}
    if ppl is None:
        return systems
    for word in ppl.split(","):
        method, equals, system = (part.strip() for part in word.rpartition("="))
        system = system.lower()
        if system not in SYSTEMS:
            raise unknown_name("system", system, SYSTEMS)
        if not equals:
            systems = dict.fromkeys(names, system)
            continue
        method = _name(method)
        if method not in systems:
            raise InputError(
                "--ppl: "
                + message(
                    f"methods among {', '.join(names)}", method, f"--methods {','.join([*names, method])}"
                )
            )
        systems[method] = system
    for name, system in systems.items():
        served = _class(MEMBERS.get(name, name)).systems
        if system not in served:
            advice = f"--ppl {ppl},{name}={served[0]}"
            raise InputError(
                "--ppl: " + message(f"{name} in {' or '.join(served)}, where alone it runs", system, advice)
            )
    return systems


def _reference(names: list[str], wanted: str | None) -> str | None:
    """The method that the others are measured against; None for none."""
    if wanted is None:
        return REFERENCE if REFERENCE in names else None
    name = _name(wanted)
    if name not in names:
        raise InputError(
            "--reference: "
            + message(f"one of the methods {', '.join(names)}", name, f"--methods {','.join([*names, name])}")
        )
    return name


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise InputError("--seed: " + message("a whole number from 0 to 2**31 - 1", str(seed), "--seed 0"))


def _class(name: str) -> type[Method]:
    import ppl_bnn

    return getattr(ppl_bnn, METHODS[name])


def _method(name: str, system: str, quick: bool) -> Method:
    """The method of that name at its defaults, or at tiny sizes."""
    cls = _class(name)
    settings: dict[str, Any] = {}
    if quick:
        has = {field.name for field in dataclasses.fields(cls)}
        settings = {key: value for key, value in QUICK.items() if key in has} | _QUICK_BESIDES.get(name, {})
    if name in MEMBERS:
        settings["member"] = _method(MEMBERS[name], system, quick)
    return cls(ppl=system, **settings)


def _plan(
    model: str | None,
    data: str | None,
    target: str | None,
    drop: list[str],
    task: str | None,
    settings: list[str],
    seed: int,
    quick: bool,
    out: Path | None,
    keeps: bool = True,
) -> _Plan:
    """Everything that the words stand for; what can be refused without reading data is refused first.

    keeps: whether anything will be written to the folder.
    """
    from ppl_bnn import data as tables
    from ppl_bnn import zoo

    if task is not None and task not in tables.TASKS:
        raise unknown_name("task", task, tables.TASKS)
    card, is_file = (None, False) if model is None else _card(model, "compare")
    source = data or (card.data if card is not None else "diabetes")
    if source is None:
        raise InputError(
            "--data: "
            + message(
                f"data for {model}, which has no DATA of its own",
                "none",
                "--data NAME or --data FILE.csv --target COLUMN",
            )
        )
    is_csv = source.lower().endswith(".csv") or "/" in source
    _check_source(source, is_csv, target, drop, task)
    arguments = dict(_setting(setting) for setting in settings)

    # Only now are files read and run; first the model, which says how a column of whole numbers is to be read.
    known_task = task if is_csv else tables.datasets()[source].task
    if model is None and known_task is not None:
        model = _DEFAULT_MODEL[known_task]
    function, sketch = None, None
    if model is not None:
        if keeps:
            _check_folder(_folder(out, model, source, quick))
        function = zoo.from_file(model, **arguments) if is_file else zoo.load(model, **arguments)
        features = 1 if is_csv else tables.datasets()[source].features
        sketch, _ = _sketch(function, features)
        if not is_csv:
            _check_task(model, sketch, source, known_task)
    wanted = known_task or (sketch.task if sketch is not None else None)
    table = tables.read_csv(source, str(target), drop=drop, task=wanted) if is_csv else tables.load(source)
    if function is None or model is None:
        model = _DEFAULT_MODEL[table.task]
        function = zoo.load(model, **arguments)
    name = Path(model).stem if is_file else model
    from ppl_bnn.comparison import bind_classes

    if table.task == "classification":
        function = bind_classes(function, table.y, table.class_names)
    sketch, unread = _sketch(function, table.x.shape[1])
    _check_task(name, sketch, table.name, table.task)
    train, test = table.split(seed)
    if quick:
        train, test = train[: QUICK_ROWS["train"]], test[: QUICK_ROWS["test"]]
    folder = _folder(out, model, source, quick)
    if keeps:
        _check_folder(folder)
    size = None if sketch is None else sketch.shared
    return _Plan(name, function, table, train, test, folder, size, unread)


def _card(model: str, command: str) -> tuple[Card, bool]:
    """The card of a model of the zoo or of a file, and whether it is a file."""
    from ppl_bnn import data as tables
    from ppl_bnn import zoo

    if model.endswith(".py") or "/" in model:
        return zoo.read_card(model), True
    known = zoo.models()
    if model in known:
        return known[model], False
    if model in tables.datasets():
        advice = f"ppl-bnn {command}{' MODEL' if command == 'show' else ''} --data {model}"
        raise InputError("MODEL: " + message("a model or a file.py", f"the data set {model!r}", advice))
    raise unknown_name("model", model, known)


def _sketch(model: Callable[..., Any], inputs: Any) -> tuple[Sketch | None, str]:
    """Size and task of a model; or None, as for one of either system's own, and in a line what failed.

    A file of anybody's is run here, so any exception may come. `compare` goes on without: a fit says what is wrong.
    """
    from ppl_bnn import zoo

    try:
        return zoo.sketch(model, inputs), ""
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {first}" if first else type(error).__name__


def _check_task(name: str, sketch: Sketch | None, table: str, task: str | None) -> None:
    if task is not None and sketch is not None and sketch.task != task:
        came = f"{name}, a model for {sketch.task}"
        raise InputError(
            "MODEL: " + message(f"a model for {task}, as {table} is meant for", came, _DEFAULT_MODEL[task])
        )


def _check_source(source: str, is_csv: bool, target: str | None, drop: list[str], task: str | None) -> None:
    from ppl_bnn import data as tables

    if not is_csv:
        known = tables.datasets()
        if source not in known:
            error = unknown_name("data set", source, known)
            raise type(error)(f"{error}; a file is given as FILE.csv")
        for option, value in (("--target", target), ("--drop", drop), ("--task", task)):
            if value:
                raise InputError(
                    f"{option}: "
                    + message(
                        "a CSV file to go with it", f"data set {source!r}", f"--data FILE.csv, or no {option}"
                    )
                )
        return
    if not Path(source).is_file():
        raise InputError(
            "--data: "
            + message(
                "a CSV file",
                f"{source}, which does not exist",
                "its full path, or a name from `ppl-bnn data`",
            )
        )
    if target is None:
        with open(source, encoding="utf-8-sig", errors="replace") as file:
            columns = [name.strip() for name in file.readline().split(",")]
        shown = ", ".join(columns[:30]) + (", ..." if len(columns) > 30 else "")
        raise InputError(
            "--target: "
            + message(f"the column of {source} to predict", "none", f"--target COLUMN, one of: {shown}")
        )


def _folder(out: Path | None, model: str, source: str, quick: bool) -> Path:
    name = f"{Path(model).stem}-{Path(source).stem}" + ("-quick" if quick else "")
    return out or Path("ppl-bnn-results") / name


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, and leave no trace of having tried."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            "--out: "
            + message(
                "a folder that can be written",
                f"{folder} ({error.strerror or error})",
                "another folder with --out DIR",
            )
        ) from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _setting(setting: str) -> tuple[str, Any]:
    name, equals, value = setting.partition("=")
    if not (equals and name.strip().isidentifier()):
        raise InputError("--set: " + message("NAME=VALUE", repr(setting), "--set width=20"))
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (SyntaxError, ValueError):
        return name.strip(), value.strip()


def _remember_compilations() -> None:
    """Keep JAX's compiled programs on disk; where there is no JAX or no room, do without."""
    with contextlib.suppress(ImportError, OSError):
        from ppl_bnn.ppl.numpyro import enable_compilation_cache

        enable_compilation_cache()


@contextlib.contextmanager
def _warnings_told(console: Console) -> Iterator[None]:
    """Warnings meant for a person, each once and in one line; what libraries mutter among themselves is left out."""
    said: set[str] = set()

    def show(text: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        words = " ".join(str(text).split())
        if issubclass(category, UserWarning) and words not in said:
            said.add(words)
            console.print(f"warning: {words}", style="yellow", markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


# --- what is said ---------------------------------------------------------------------------------------


def _tell_of_prior(console: Console, plan: _Plan) -> None:
    """A line for each thing about the prior that no one can have meant; what else is wrong, the fit will say."""
    if plan.parameters is None:
        # A model of a system's own would have to be compiled for this.
        return
    from ppl_bnn.before_data import check_prior

    x, y = plan.table.x[plan.train], plan.table.y[plan.train]
    with contextlib.suppress(BNNError):
        for line in check_prior(plan.model, x, y, standardise=True).warnings:
            console.print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)


def _announce(console: Console, plan: _Plan, methods: dict[str, Method], quick: bool) -> None:
    from rich.markup import escape

    table = plan.table
    size = f", {plan.parameters} parameters" if plan.parameters else ""
    names = ", ".join(f"{_called(method)} ({method.ppl})" for method in methods.values())
    classes = f", {len(table.class_names)} classes" if table.class_names else ""
    console.print(
        f"[bold]{escape(plan.name)}[/]{size}, on [bold]{escape(table.name)}[/]: {len(plan.train)} training and "
        f"{len(plan.test)} test rows, {table.x.shape[1]} features{classes}"
    )
    console.print(f"by {names}")
    if plan.unread:
        console.print(f"[dim]its size is not known: outside of a system it ends in {escape(plan.unread)}[/]")
    if quick:
        console.print("[yellow]--quick: tiny sizes and few rows; nothing is expected to converge[/]")
    if len(plan.train) > MANY_ROWS and "nuts" in methods:
        console.print(
            f"[yellow]NUTS goes through all {len(plan.train)} rows for every gradient: this may take hours. "
            "--methods svi,map is quicker.[/]"
        )


def _called(method: Method) -> str:
    member = getattr(method, "member", None)
    return method.name if member is None else f"{method.name} of {_called(member)}"


class _Bars(Bars):
    """Bars, and between two of them a word that predictions and diagnoses are being computed."""

    def __init__(self, console: Console):
        self._console = console
        self._status: Any = None

    def task(self, title: str, total: int) -> Task:
        self.rest()
        bar = super().task(title, total)

        def close() -> None:
            bar.close()
            self.rest()
            if self._console.is_terminal:
                self._status = self._console.status(f"{title}: prediction, diagnosis, scores")
                self._status.start()

        return _Closing(bar.update, close)

    def rest(self) -> None:
        """Clear the word."""
        if self._status is not None:
            self._status.stop()
            self._status = None


@dataclass
class _Closing:
    """A task with another `close`."""

    update: Callable[..., None]
    close: Callable[[], None]


def _keep_notes(folder: Path, result: Comparison) -> None:
    """All that is too long for a terminal, beside the other files."""
    (folder / NOTES).write_text(result.markdown(), encoding="utf-8")


def _kept(result: Comparison) -> list[str]:
    return [f"{name}.nc" for name in result.trees] + [
        "comparison.csv",
        NOTES,
        "figure.png",
        "comparison.json",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


# --- report -----------------------------------------------------------------------------------------------


@app.command()
@_told
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="What `ppl-bnn compare` kept, with or without --grid.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page.", show_default=f"DIR/{REPORT}")
    ] = None,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its heading.", show_default="the model and the data")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Of a grid: which of its methods the others are measured against.",
            show_default="that of the grid",
        ),
    ] = None,
) -> None:
    """Write the page of a comparison or of a grid that was kept, also while it is being computed.

    Nothing is fitted again. The page is one file that needs no other.
    """
    result = _read(folder, reference)
    from ppl_bnn.reporting.page import report as write

    errors = _console(error=True)
    with _warnings_told(errors):
        page = write(result, out or folder / REPORT, title=title)
    if missing := getattr(result, "missing", 0):
        errors.print(f"{missing} cells have not been computed.", markup=False)
    _console().print(str(page), markup=False, soft_wrap=True)


def _read(folder: Path, reference: str | None) -> Comparison | GridResult:
    """What lies in a folder: the result of a grid, or a comparison."""
    from ppl_bnn import comparison, grid_result

    if grid_result.read_manifest(folder) is not None:
        return grid_result.GridResult.load(folder, reference)
    if comparison.read_manifest(folder) is None:
        if not folder.exists():
            came = f"{folder}, which does not exist"
        elif (folder / "comparison.csv").is_file():
            came = f"{folder}, whose comparison was kept before its predictions were"
        else:
            came = f"{folder}, without {grid_result.MANIFEST} and {comparison.MANIFEST}"
        raise InputError(
            "DIR: "
            + message("the folder of a comparison or of a grid", came, "the --out of `ppl-bnn compare`")
        )
    if reference is not None:
        raise InputError(
            "--reference: "
            + message(
                "a grid to go with it", f"{folder}, a comparison, whose gaps are measured", "no --reference"
            )
        )
    return comparison.Comparison.load(folder)


# --- advise -----------------------------------------------------------------------------------------------


@app.command()
@_told
def advise(
    model: _Model = None,
    data: _Data = None,
    target: _Target = None,
    drop: _Drop = None,
    task: _Task = None,
    set_: _Set = None,
    seconds: Annotated[float, typer.Option(help="How long a fit may take.")] = 300.0,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Rows of models/methods.toml, separated by commas, such as nuts,laplace-kron.",
            show_default="all",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:i].")] = "auto",
) -> None:
    """Say which methods end in time on this machine, before any of them is fitted, and what each gets wrong."""
    names = None if methods is None else [word.strip() for word in methods.split(",") if word.strip()]
    plan = _plan(model, data, target, drop or [], task, set_ or [], 0, False, None, keeps=False)
    from ppl_bnn.advice import advise as ask

    console = _console()
    found = ask(
        plan.model,
        plan.table.x[plan.train],
        plan.table.y[plan.train],
        seconds=seconds,
        methods=names,
        device=device,
        standardise=True,
    )
    console.print(f"{plan.name} on {plan.table.name}", markup=False, style="bold")
    console.print(found.text(console.width), markup=False, soft_wrap=True)


# --- bench ------------------------------------------------------------------------------------------------


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@_told
def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A study or benchmark.", show_default=False)
    ] = None,
) -> None:
    """Run a study of the project by its name; without one, list them.

    What follows the name is the study's own: --tiny shows in seconds or a few minutes that all of it runs, --help its
    other options. Tables, figures and verdicts go to ./ppl-bnn-results/NAME unless --out says otherwise.
    """
    from ppl_bnn import studies

    if name is None:
        listed = _list(("study", "what it is"))
        for each, file in studies.studies().items():
            listed.add_row(each, _text(studies.summary(file)))
        _console().print(listed)
        return
    arguments = list(context.args)
    told = any(each in ("--help", "-h", "--out") or each.startswith("--out=") for each in arguments)
    if "/" not in name and not told and name in studies.studies():
        arguments += ["--out", str(Path("ppl-bnn-results") / name)]
    written = re.search(r"(?:^|\0)--out[=\0]([^\0]+)", "\0".join(arguments))
    with _keeping(Path(written[1])) if written else contextlib.nullcontext():
        status = studies.run(name, arguments)
    if status:
        raise typer.Exit(status)


# --- models, data -----------------------------------------------------------------------------------------


@app.command()
@_told
def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show the whole card of this model.", show_default=False),
    ] = None,
) -> None:
    """List the models of the zoo with what fits them, or show one as `ppl-bnn show` does."""
    from rich.text import Text

    from ppl_bnn import data as tables
    from ppl_bnn import zoo
    from ppl_bnn.support import declared

    if name is not None:
        _show(name, None, [])
        return
    cards, support = zoo.models(), declared()
    console = _console()
    grid = _list(("model", "what it is, and which methods fit it", "task, data", "size"), right=(3,))
    unread: dict[str, str] = {}
    for card in cards.values():
        features = tables.datasets()[card.data].features if card.data else 1
        sketch, why = _sketch(zoo.load(card.name), features)
        if why:
            unread[card.name] = why
        task, size = ("?", "?") if sketch is None else (sketch.task, _digits(sketch.shared))
        if sketch is not None and sketch.per_row:
            size += f"\n+{_digits(sketch.per_row)} a row"
        what = Text.assemble(card.summary, "\n", (f"Methods: {support.summary(card.name)}.", "dim"))
        grid.add_row(card.name, what, f"{task}\n{card.data or '-'}", size)
    console.print(grid)
    for name, why in unread.items():
        console.print(Text(f"{name} was not read: outside of a system it ends in {why}", style="yellow"))
    single = support.shortened(row for row in support.methods if len(support.served(row)) == 1)
    console.print(
        "Size: the number of parameters on the default data. Methods: those declared to fit it, in both systems but "
        f"for {', '.join(single)}, which one of them has; a star stands for all variants. Each model is a file that "
        "can be copied and changed: `ppl-bnn show NAME` shows its card, its sites, its path and why a method does not "
        "fit, `ppl-bnn prior NAME` what it expects before it has seen a target, and `ppl-bnn compare NAME` fits it.",
        markup=False,
    )


@app.command()
@_told
def show(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model of the zoo (see `ppl-bnn models`) or a file.py.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A data set (see `ppl-bnn data`), for the number of inputs.",
            show_default="the model's",
        ),
    ] = None,
    set_: _Set = None,
) -> None:
    """Show a model: its card, its sites with priors and shapes, how many numbers it infers, what cannot fit it."""
    _show(model, data, set_ or [])


def _show(model: str, data: str | None, settings: list[str]) -> None:
    from rich.text import Text

    from ppl_bnn import data as tables
    from ppl_bnn import zoo

    card, is_file = _card(model, "show")
    known = tables.datasets()
    if data is not None and data not in known:
        raise unknown_name("data set", data, known)
    arguments = dict(_setting(setting) for setting in settings)
    function = zoo.from_file(model, **arguments) if is_file else zoo.load(model, **arguments)
    console = _console()
    console.print(Text(card.name, style="bold"))
    console.print(Text(card.docstring), soft_wrap=True)
    shown = card.arguments | {name: repr(value) for name, value in arguments.items()}
    listed = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none"
    console.print(Text(f"\nArguments (--set NAME=VALUE): {listed}\nFile: {card.path}\n"), soft_wrap=True)
    source = data or card.data
    if source is None and card.example is None:
        console.print("Its sites depend on the number of inputs: --data NAME shows them.", markup=False)
        return
    if data is None and card.example is not None:
        inputs, title = card.example, "On the example in its file:"
    else:
        assert source is not None
        inputs = known[source].features
        title = f"On {source}, with {inputs} inputs:"
    sketch, unread = _sketch(function, inputs)
    if sketch is None:
        console.print(Text(f"Its sites are not listed: outside of a system it ends in {unread}"))
        return
    _show_sites(console, sketch, title)
    if not is_file:
        _show_methods(console, card.name)


def _show_sites(console: Console, sketch: Sketch, title: str) -> None:
    from rich.text import Text

    grid = _list(("site", "prior", "shape", "numbers"), right=(3,))
    for site in sketch.sites:
        shape = " x ".join(map(str, site.shape)) or "-"
        each = "each row: " if site.local else ""
        grid.add_row(site.name, Text(site.prior), each + shape, _digits(site.size))
    grid.add_section()
    grid.add_row("in all", "", "", _digits(sketch.shared), style="bold")
    if sketch.per_row:
        grid.add_row("and for each row", "", "", _digits(sketch.per_row), style="bold")
    console.print(Text(title, style="bold"))
    console.print(grid)
    computed = any("..." in words for words in (sketch.likelihood, *(site.prior for site in sketch.sites)))
    legend = "\n...: computed from other sites" if computed else ""
    console.print(Text(f"y, given x and these: {sketch.likelihood}{legend}"))


def _show_methods(console: Console, name: str) -> None:
    """What fits a model of the zoo, and why the rest does not."""
    from rich.text import Text

    from ppl_bnn.support import declared

    support = declared()
    missing, doubtful = support.missing(name), support.doubtful(name)
    console.print(Text(f"\nMethods that fit it: {support.summary(name)}.", style="bold"))
    for heading, rules in (("does not fit", missing), ("may fail", doubtful)):
        if not rules:
            continue
        grid = _list((heading, "why"))
        grid.columns[0].no_wrap, grid.columns[0].max_width = False, 30
        for rule, names in rules.items():
            grid.add_row(", ".join(names), Text(rule.reason))
        console.print(grid)


@app.command()
@_told
def prior(
    model: _Model = None,
    data: _Data = None,
    target: _Target = None,
    drop: _Drop = None,
    task: _Task = None,
    set_: _Set = None,
    draws: Annotated[int, typer.Option(help="How many draws from the prior.")] = 500,
    seed: Annotated[int, typer.Option(help="For the draws.")] = 0,
    out: _Out = None,
) -> None:
    """Draw from the prior of a model and picture what it expects before it has seen a target.

    Curves for one input, maps of classes for two, else intervals row by row; in the units that `compare` fits in.
    """
    from rich.text import Text

    _check_seed(seed)
    if draws < 2:
        raise InputError("--draws: " + message("a whole number of at least 2", str(draws), "--draws 500"))
    plan = _plan(model, data, target, drop or [], task, set_ or [], seed, False, out)
    table = plan.table
    from ppl_bnn.before_data import prior_predictive
    from ppl_bnn.reporting.figures import prior_figure

    # Pyro draws at once what JAX would compile first; a model of NumPyro's own runs there all the same.
    drawn = prior_predictive(
        plan.model,
        table.x,
        table.y,
        draws=draws,
        seed=seed,
        ppl="pyro",
        standardise=True,
        feature_names=tuple(table.feature_names),
        class_names=table.class_names,
    )
    figure = prior_figure(
        drawn.predict,
        table.x,
        table.y,
        title=f"{plan.name} on {table.name}, before it has seen a target: {draws} draws from the prior",
        target_name=table.target_name,
        feature_names=table.feature_names,
    )
    plan.out.mkdir(parents=True, exist_ok=True)
    file = plan.out / PRIOR
    figure.savefig(file, dpi=100)
    console = _console()
    console.print(Text(_expected(drawn.predict(table.x), table)))
    _tell_of_prior(console, plan)
    console.print(Text(f"Kept: {file}", style="bold"), soft_wrap=True)


def _expected(prediction: Prediction, table: Table) -> str:
    """The prior predictive of the rows of `table` in a sentence, beside what was observed."""
    import numpy as np

    if prediction.is_classes:
        each = prediction.take_draws(
            np.linspace(0, prediction.draws - 1, min(100, prediction.draws)).astype(int)
        )
        sure = [each.take_draws([draw]).probabilities.max(axis=1).mean() for draw in range(each.draws)]
        return (
            f"Before it has seen a target, a draw gives its most probable class of a row a probability of "
            f"{np.mean(sure):.2f} on average, and half of the draws between {np.quantile(sure, 0.25):.2f} and "
            f"{np.quantile(sure, 0.75):.2f} (1 for {prediction.classes} classes would be certainty, "
            f"{1 / prediction.classes:.2f} ignorance)."
        )
    y = table.y
    if prediction.censored:
        # A bound is not what was observed of a row.
        seen = np.flatnonzero(y[:, 1] == 1)
        prediction, y = prediction.take(seen), y[seen, 0]
    lower, upper = prediction.interval(0.9)
    inside = np.mean((lower <= y) & (y <= upper))
    return (
        f"Before it has seen a target, the model expects {table.target_name} between {np.mean(lower):.3g} and "
        f"{np.mean(upper):.3g} with probability 0.9, on average over {len(y)} rows; observed were "
        f"{y.min():.3g} to {y.max():.3g}, of which {inside:.0%} lie in the interval of their row."
    )


@app.command()
@_told
def data() -> None:
    """List the data sets."""
    from rich.text import Text

    from ppl_bnn import data as tables

    console = _console()
    grid = _list(("data set", "task", "rows", "features", "where from", "bytes to fetch"), right=(2, 3, 5))
    licences: dict[str, list[str]] = {}
    for card in tables.datasets().values():
        size = _digits(card.bytes) if card.bytes else "-"
        grid.add_row(card.name, card.task, _digits(card.rows), str(card.features), card.where, size)
        licences.setdefault(card.licence, []).append(card.name)
    console.print(grid)
    console.print("[bold]Licences[/]")
    for licence, names in licences.items():
        console.print(Text(f"- {', '.join(names)}: {licence}"))
    console.print("\nOr any CSV file: ppl-bnn compare --data FILE.csv --target COLUMN", markup=False)


def _digits(number: int) -> str:
    """Thousands apart."""
    return f"{number:,}".replace(",", " ")


def _text(words: str) -> Any:
    """Words in which brackets are brackets."""
    from rich.text import Text

    return Text(words)


def _list(headings: tuple[str, ...], right: tuple[int, ...] = ()) -> Any:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if index in right else "left", no_wrap=index == 0)
    return grid
