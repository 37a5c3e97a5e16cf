"""`ppl-bnn compare`: one model by several methods, or a grid from a file."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppl_bnn.backends.protocol import resolve_device
from ppl_bnn.cli import complete, console, options, plan
from ppl_bnn.cli.options import option
from ppl_bnn.core.errors import ClusterError, InputError
from ppl_bnn.core.progress import Bars
from ppl_bnn.evaluation.outside.known import ESTIMATORS
from ppl_bnn.inference.registry import ROWS
from ppl_bnn.reporting.terminal import print_table, show, show_latest_row

if TYPE_CHECKING:
    from rich.console import Console

    from ppl_bnn.evaluation.comparison.comparison import Comparison
    from ppl_bnn.evaluation.grid.result import GridResult
    from ppl_bnn.evaluation.outside.outside import Outside
    from ppl_bnn.inference.method import Method

MANY_ROWS = 20_000
# Options that a grid has and a comparison has not, and those that both have.
OF_GRID, OF_BOTH = ("engine", "jobs", "resume", "retry_failed", "memory"), ("grid", "out", "report")
HELP = {
    "methods": f"What to compare, separated by commas. Known: {', '.join(ROWS)}; from outside the library "
    f"{', '.join(ESTIMATORS)}.",
    "ppl": "numpyro or pyro for all methods, or svi=pyro,nuts=numpyro.",
    "reference": "Which of the methods the others are measured against.",
    "draws": "Draws of each chain, of the methods that have them.",
    "budget": "After which a sampler ends with the draws it has.",
    "seed": "For the split into training and test rows, and for every method.",
    "quick": "Tiny sizes: shows in seconds that all runs, and nothing else.",
    "report": "Write report.html, too: a page to read and to show; also of a grid.",
    "grid": "Many models, data sets, splits, methods and seeds, as the file says; of the other options only those "
    "below, --out and --report count.",
    "engine": "For a grid: local, sequential, dask://HOST:PORT or ray://HOST:PORT.",
    "jobs": "For a grid: how many cells at once.",
    "resume": "For a grid: go on with what is there, or compute it again.",
    "retry": "For a grid: compute failed cells again.",
    "memory": "For a grid: what a process of this machine may hold, such as 4GB or 500MB; a cell that needs more "
    "has failed.",
}
SYSTEMS = ",".join(["numpyro", *(f"{name}=pyro" for name in plan.IN_PYRO)])
REFERENCE = f"{plan.REFERENCE}, if it is among them"
SHARE = "a fair part of the machine's"


def compare(
    context: typer.Context,
    model: options.Model = None,
    data: options.Data = None,
    target: options.Target = None,
    drop: options.Drop = None,
    task: options.Task = None,
    set_: options.Set = None,
    methods: Annotated[str, option(HELP["methods"], "LIST", True, complete.methods)] = ",".join(plan.DEFAULT),
    ppl: Annotated[str | None, option(HELP["ppl"], "SYSTEM", SYSTEMS, complete.systems)] = None,
    reference: Annotated[str | None, option(HELP["reference"], "METHOD", REFERENCE, complete.method)] = None,
    draws: Annotated[int | None, option(HELP["draws"])] = None,
    warmup: Annotated[int | None, option("Draws of each chain before these.")] = None,
    chains: Annotated[int | None, option("How many chains.")] = None,
    steps: Annotated[int | None, option("Steps of the methods that optimise.")] = None,
    budget: Annotated[float | None, option(HELP["budget"], "SECONDS")] = None,
    device: options.Device = "auto",
    seed: Annotated[int, option(HELP["seed"], default=True)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help=HELP["quick"])] = False,
    out: Annotated[Path | None, option("Where results are kept.", "DIR", options.OUT)] = None,
    report: Annotated[bool, typer.Option("--report", help=HELP["report"])] = False,
    grid: Annotated[Path | None, option(HELP["grid"], "FILE.toml")] = None,
    engine: Annotated[str, option(HELP["engine"], default=True)] = "local",
    jobs: Annotated[int | None, option(HELP["jobs"], default="what there is room for")] = None,
    resume: Annotated[bool, typer.Option("--resume/--anew", help=HELP["resume"])] = True,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help=HELP["retry"])] = False,
    memory: Annotated[str | None, option(HELP["memory"], "SIZE", SHARE)] = None,
) -> None:
    """Fit one model by several methods, and show the results and the cost of each.

    Without arguments: regression_mlp on the diabetes table by NUTS (four chains of 500 draws after 500), SVI (5000
    steps), Laplace and MAP, in about half a minute.
    """
    started = time.monotonic()
    _check_grid_options(context, grid)
    if grid is not None:
        settings = {"engine": engine, "jobs": jobs, "resume": resume, "retry_failed": retry_failed}
        settings["memory"] = _bytes_of(memory, engine)
        _run_grid(grid, out or Path("ppl-bnn-results") / grid.stem, report, settings)
        return
    names = plan.method_names(methods)
    systems = plan.systems_of(names, ppl)
    measure = plan.reference_of(names, reference)
    console.check_seed(seed)
    sizes = {"draws": draws, "warmup": warmup, "chains": chains, "steps": steps, "budget": budget}
    given = model or data or tuple(names) != plan.DEFAULT
    preset = "quick" if quick else "full" if given else "short"
    chosen = plan.methods_of(names, systems, preset, sizes)
    resolve_device(device)
    planned = plan.plan_of(model, data, target, drop or [], task, set_ or [], seed, quick, out)
    errors = console.new_console(error=True)
    _announce(errors, planned, chosen)
    console.show_prior_problems(errors, planned)
    if "numpyro" in systems.values():
        console.remember_compilations()
    with console.keeping(planned.out):
        settings = {"reference": measure, "seed": seed, "device": device}
        failed = _fit_and_show(errors, planned, chosen, settings, report)
    from ppl_bnn.evaluation.comparison.summary import duration

    console.new_console().print(f"[dim]{duration(time.monotonic() - started)} in all[/]")
    if failed:
        raise typer.Exit(1)


def _fit_and_show(
    errors: Console,
    planned: plan.Plan,
    chosen: dict[str, Method | Outside],
    settings: dict[str, Any],
    report: bool,
) -> bool:
    """Fit, show and save what was planned; returns whether a method failed."""
    from ppl_bnn.evaluation.comparison.folder import ComparisonNotWrittenError
    from ppl_bnn.evaluation.comparison.run import compare as run

    table, bars, screen = planned.table, console.StatusBars(errors), console.new_console()
    card, kept = table.card(), ("name", "description", "provenance", "licence")
    names = {name: getattr(table, name) for name in ("feature_names", "class_names", "target_name")}
    card = {"model": planned.name} | {name: card[name] for name in kept if name in card}
    for file in (console.NOTES, console.REPORT):
        (planned.out / file).unlink(missing_ok=True)

    def write_notes(result: Comparison) -> None:
        # Texts that are too long for a terminal.
        (planned.out / console.NOTES).write_text(result.markdown(), encoding="utf-8")
        if report and result.predictions:
            console.write_report(errors, result, planned.out / console.REPORT)

    def show_row(partial: Comparison) -> None:
        bars.rest()
        show_latest_row(errors, partial)

    train, test = ((table.x[rows], table.y[rows]) for rows in (planned.train, planned.test))
    settings = {**settings, **names, "card": card, "progress": bars, "standardise": True, "out": planned.out}
    settings["finished"] = show_row
    try:
        with console.warnings_shown(errors):
            result = run(planned.model, train, test, chosen, **settings)
    except (KeyboardInterrupt, ComparisonNotWrittenError) as interrupt:
        bars.rest()
        partial = getattr(interrupt, "partial", None)
        if partial is not None and partial.predictions:
            show(screen, partial, console.NOTES)
            if not isinstance(interrupt, ComparisonNotWrittenError):
                write_notes(partial)
        raise
    finally:
        bars.rest()
    show(screen, result, console.NOTES)
    write_notes(result)
    if planned.quick:
        text = "--quick: nothing here is expected to have converged, or to mean anything."
        screen.print(text, style="yellow")
    # A path is not wrapped, because it could not be copied; a list of names is.
    console.say(screen, f"Kept in {planned.out}/", "bold")
    figure = ["figure.png"] if (planned.out / "figure.png").is_file() else []
    page = [console.REPORT] if report and result.predictions else []
    trees = [f"{name}.nc" for name in result.trees]
    screen.print(", ".join([*trees, "comparison.csv", console.NOTES, *figure, "comparison.json", *page]))
    return bool(result.failures)


def _check_grid_options(context: typer.Context, grid: Path | None) -> None:
    """Refuse options without effect: those of a single comparison with --grid, and those of a grid without it."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in OF_BOTH}
    given = [name for name, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"]
    wrong = [name for name in given if (name in OF_GRID) is (grid is None)]
    words = [name.strip("_").replace("_", "-") for name in wrong]
    called = ", ".join("MODEL" if word == "model" else f"--{word}" for word in words)
    if wrong and grid is None:
        raise InputError.of("--grid", f"a grid, which {called} is about", "none", "--grid FILE.toml")
    if wrong:
        expected = "a file that says all that is fitted"
        raise InputError.of("--grid", expected, f"{called} beside it", "keys of the file")


def _run_grid(file: Path, folder: Path, report: bool, settings: dict[str, Any]) -> None:
    from ppl_bnn.evaluation.grid.grid import Grid, GridInterrupted
    from ppl_bnn.evaluation.grid.result import GridResult

    with console.keeping(folder):
        grid = Grid.from_toml(file)
        errors = console.new_console(error=True)
        console.say(errors, f"{grid}: {len(grid.cells)} cells")
        for sentence in grid.left_out:
            console.say(errors, sentence, "dim")
        with console.warnings_shown(errors):
            try:
                result = grid.run(folder, progress=Bars(), **settings)
            except (GridInterrupted, ClusterError):
                if report and len((partial := GridResult.load(folder)).cells):
                    console.write_report(errors, partial, folder / console.REPORT)
                raise
        _show_grid(console.new_console(), result)
        if report:
            console.write_report(errors, result, folder / console.REPORT)
            console.new_console().print(console.REPORT, markup=False)
        if result.failures:
            raise typer.Exit(1)


# Bytes of a unit, case-sensitive: MB and mB are different, and a size without a unit is ambiguous.
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes_of(memory: str | None, engine: str) -> int | None:
    """The bytes of a size such as 4GB, for a grid that runs in processes of this machine."""
    if memory is None:
        return None
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", memory.strip(), re.ASCII)
    count = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    expected = f"a size of 1MiB or more with its unit, one of {', '.join(_UNITS)}"
    InputError.check(count >= _UNITS["MiB"], "--memory", expected, repr(memory), "--memory 4GB")
    from ppl_bnn.evaluation.grid.engines import Engine

    expected = "processes of this machine to hold to it"
    if Engine.of(engine).kind != "local":
        raise InputError.of("--memory", expected, f"--engine {engine}", "no --memory")
    return count


def _show_grid(screen: Console, result: GridResult) -> None:
    """A block for each model and data set: scores, paired differences to the best method, the gap, the cost."""
    from ppl_bnn.evaluation.comparison.columns import of_grid
    from ppl_bnn.evaluation.grid.cell import Cell
    from ppl_bnn.evaluation.grid.result import LABELS

    table: Any = result.table()
    for (model, data), block in table.groupby(level=["model", "data"], sort=False):
        methods = block.droplevel(["model", "data"])
        screen.print()
        print_table(screen, methods, f"{model} on {data}", of_grid(methods))
    screen.print(
        "Means over splits; ±: standard error over splits, corrected for the training rows that splits share. Minus "
        "the best: the difference in log score, paired over splits. Mean off by: the gap of the mean function to the "
        "reference's, in its standard deviations. Every column: table.csv; every cell: cells.csv.",
        style="dim",
    )
    failed: Any = result.cells[result.cells["failure"] != ""]
    for _, row in failed.iterrows():
        console.say(screen, f"{Cell(*row[[*LABELS, 'key']])}: {row['failure']}")
    if len(failed):
        advice = "A cell that has failed counts as finished: --retry-failed computes it again."
        if failed["failure"].str.contains("memory", case=False).any():
            more = "give a process more with --memory, or run fewer at once with --jobs"
            advice += f" For want of memory {more}."
        console.say(screen, advice)
    if result.missing:
        screen.print(f"{result.missing} of {result.asked} cells have not been computed.", markup=False)
    console.say(screen, f"Kept in {result.folder}/", "bold")


def _announce(screen: Console, planned: plan.Plan, methods: dict[str, Method | Outside]) -> None:
    from rich.text import Text

    table, rows = planned.table, len(planned.train)
    size = f", {planned.parameters} parameters" if planned.parameters else ""
    classes = f", {len(table.class_names)} classes" if table.class_names else ""
    about = f"{rows} training and {len(planned.test)} test rows, {table.x.shape[1]} features{classes}"
    bold = [(name, "bold") for name in (planned.name, table.name)]
    screen.print(Text.assemble(bold[0], f"{size}, on ", bold[1], f": {about}"))
    console.show_reading(screen, table)
    screen.print(f"by {', '.join(f'{called(method)} ({method.ppl})' for method in methods.values())}")
    if planned.unread:
        text = f"its size is not known: outside of a system it ends in {planned.unread}"
        screen.print(text, style="dim", markup=False)
    if planned.quick:
        screen.print("--quick: tiny sizes and few rows; nothing is expected to converge", style="yellow")
    if rows > MANY_ROWS and "nuts" in methods:
        text = f"NUTS goes through all {rows} rows for every gradient: this may take hours."
        screen.print(f"{text} --methods svi,map is quicker.", style="yellow")


def called(method: Method | Outside) -> str:
    member = getattr(method, "member", None)
    return method.name if member is None else f"{method.name} of {called(member)}"
