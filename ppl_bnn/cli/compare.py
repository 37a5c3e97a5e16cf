"""`ppl-bnn compare`: one model by several methods, or a grid from a file."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppl_bnn.cli import complete
from ppl_bnn.cli.console import (
    NOTES,
    REPORT,
    DataOption,
    DropOption,
    ModelArgument,
    OutOption,
    SetOption,
    StatusBars,
    TargetOption,
    TaskOption,
    app,
    check_seed,
    in_seconds,
    keeping,
    listing,
    new_console,
    remember_compilations,
    tell_of_reading,
    told,
    warnings_told,
)
from ppl_bnn.cli.plan import (
    DEFAULT,
    IN_PYRO,
    REFERENCE,
    Plan,
    method_names,
    methods_of,
    plan_of,
    reference_of,
    systems_of,
    tell_of_prior,
)
from ppl_bnn.core.errors import ClusterError, InputError
from ppl_bnn.core.progress import Bars
from ppl_bnn.inference.registry import ROWS

if TYPE_CHECKING:
    from rich.console import Console

    from ppl_bnn.evaluation.comparison.comparison import Comparison
    from ppl_bnn.evaluation.grid.result import GridResult
    from ppl_bnn.inference.method import Method

MANY_ROWS = 20_000


@app.command()
@told
def compare(
    context: typer.Context,
    model: ModelArgument = None,
    data: DataOption = None,
    target: TargetOption = None,
    drop: DropOption = None,
    task: TaskOption = None,
    set_: SetOption = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"What to compare, separated by commas. Known: {', '.join(ROWS)}.",
            autocompletion=complete.methods,
        ),
    ] = ",".join(DEFAULT),
    ppl: Annotated[
        str | None,
        typer.Option(
            metavar="SYSTEM",
            help="numpyro or pyro for all methods, or svi=pyro,nuts=numpyro.",
            autocompletion=complete.systems,
            show_default=",".join(["numpyro", *(f"{name}=pyro" for name in IN_PYRO)]),
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Which of the methods the others are measured against.",
            autocompletion=complete.method,
            show_default=f"{REFERENCE}, if it is among them",
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(help="Draws of each chain, of the methods that have them.", show_default=False),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Draws of each chain before these.", show_default=False)
    ] = None,
    chains: Annotated[int | None, typer.Option(help="How many chains.", show_default=False)] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of the methods that optimise.", show_default=False)
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="After which a sampler ends with the draws it has.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:i].")] = "auto",
    seed: Annotated[
        int, typer.Option(help="For the split into training and test rows, and for every method.")
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows in seconds that all runs, and nothing else.")
    ] = False,
    out: OutOption = None,
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
        str, typer.Option(help="For a grid: local, sequential, dask://HOST:PORT or ray://HOST:PORT.")
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
        bool, typer.Option("--retry-failed", help="For a grid: compute cells anew that have failed.")
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
    names = method_names(methods)
    systems = systems_of(names, ppl)
    measure = reference_of(names, reference)
    check_seed(seed)
    sizes = {"draws": draws, "warmup": warmup, "chains": chains, "steps": steps, "budget": budget}
    chosen = methods_of(systems, quick, sizes)
    from ppl_bnn.backends.protocol import resolve_device

    resolve_device(device)
    plan = plan_of(model, data, target, drop or [], task, set_ or [], seed, quick, out)
    errors = new_console(error=True)
    _announce(errors, plan, chosen, quick)
    tell_of_prior(errors, plan)
    if "numpyro" in systems.values():
        remember_compilations()
    with keeping(plan.out):
        failed = _fit_and_show(errors, plan, chosen, measure, seed, device, quick, report)
    new_console().print(f"[dim]{in_seconds(time.monotonic() - started)} in all[/]")
    if failed:
        raise typer.Exit(1)


def _fit_and_show(
    errors: Console,
    plan: Plan,
    chosen: dict[str, Method],
    measure: str | None,
    seed: int,
    device: str,
    quick: bool,
    report: bool,
) -> bool:
    """Fit, show and save what was planned; returns whether a method failed."""
    from ppl_bnn.evaluation.comparison.folder import ComparisonNotWrittenError
    from ppl_bnn.evaluation.comparison.run import compare as run
    from ppl_bnn.reporting.terminal import show

    table, bars = plan.table, StatusBars(errors)
    for file in (NOTES, REPORT):
        (plan.out / file).unlink(missing_ok=True)
    try:
        with warnings_told(errors):
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
    except (KeyboardInterrupt, ComparisonNotWrittenError) as interrupt:
        bars.rest()
        partial = getattr(interrupt, "partial", None)
        if partial is not None and partial.posteriors:
            show(new_console(), partial, NOTES)
            if isinstance(interrupt, ComparisonNotWrittenError):
                raise
            _keep_notes(plan.out, partial)
            if report:
                _write_report(errors, partial, plan.out)
        raise
    finally:
        bars.rest()
    from rich.markup import escape

    console = new_console()
    show(console, result, NOTES)
    _keep_notes(plan.out, result)
    kept = _kept(plan.out, result)
    if report and result.posteriors:
        _write_report(errors, result, plan.out)
        kept.append(REPORT)
    if quick:
        console.print("[yellow]--quick: nothing here is expected to have converged, or to mean anything.[/]")
    # A path is not wrapped, because it could not be copied; a list of names is.
    console.print(f"[bold]Kept in {escape(str(plan.out))}/[/]", soft_wrap=True)
    console.print(", ".join(kept))
    return bool(result.failures)


def _write_report(errors: Console, result: Comparison | GridResult, folder: Path) -> None:
    from ppl_bnn.reporting.page import report as write

    with warnings_told(errors):
        write(result, folder / REPORT)


def _check_grid_options(context: typer.Context, grid: Path | None) -> None:
    """Refuse options without effect: those of a single comparison with --grid, and those of a grid without it."""
    found = [name for name in context.params if typed(context, name)]
    of_grid = ("engine", "jobs", "resume", "retry_failed", "memory")
    of_both = ("grid", "out", "report")
    wrong = [name for name in found if (name in of_grid) is (grid is None) and name not in of_both]
    if not wrong:
        return
    called = ", ".join(
        f"--{name.strip('_').replace('_', '-')}" if name != "model" else "MODEL" for name in wrong
    )
    if grid is None:
        raise InputError.of("--grid", f"a grid, which {called} is about", "none", "--grid FILE.toml")
    raise InputError.of(
        "--grid", "a file that says all that is fitted", f"{called} beside it", "keys of the file"
    )


def typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
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
    from ppl_bnn.evaluation.grid.grid import Grid, GridInterrupted
    from ppl_bnn.evaluation.grid.result import GridResult

    folder = out or Path("ppl-bnn-results") / file.stem
    with keeping(folder):
        grid = Grid.from_toml(file)
        errors = new_console(error=True)
        errors.print(f"{grid}: {len(grid.cells)} cells", markup=False, soft_wrap=True)
        for sentence in grid.left_out:
            errors.print(sentence, markup=False, style="dim", soft_wrap=True)
        with warnings_told(errors):
            try:
                result = grid.run(
                    folder, engine, jobs, resume, progress=Bars(), retry_failed=retry_failed, memory=ceiling
                )
            except (GridInterrupted, ClusterError):
                if report and len((partial := GridResult.load(folder)).cells):
                    _write_report(errors, partial, folder)
                raise
        if report:
            _write_report(errors, result, folder)
        _show_grid(new_console(), result)
        if report:
            new_console().print(REPORT, markup=False)
        if result.failures:
            raise typer.Exit(1)


# Bytes of a unit, case-sensitive: MB and mB are different, and a size without a unit is ambiguous.
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _ceiling(memory: str, engine: str) -> int:
    """The bytes of a size such as 4GB, for a grid that runs in processes of this machine."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", memory.strip(), re.ASCII)
    count = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if count < _UNITS["MiB"]:
        raise InputError.of(
            "--memory",
            f"a size of 1MiB or more with its unit, one of {', '.join(_UNITS)}",
            repr(memory),
            "--memory 4GB",
        )
    from ppl_bnn.evaluation.grid.engines import Engine

    if Engine.of(engine).kind != "local":
        raise InputError.of(
            "--memory", "processes of this machine to hold to it", f"--engine {engine}", "no --memory"
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
        listed = listing(headings, tuple(range(1, len(headings))))
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
    # Columns that are blank in all rows are left out, such as differences to the best if there is a single method.
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


# --- text -----------------------------------------------------------------------------------------------


def _announce(console: Console, plan: Plan, methods: dict[str, Method], quick: bool) -> None:
    from rich.markup import escape

    table = plan.table
    size = f", {plan.parameters} parameters" if plan.parameters else ""
    names = ", ".join(f"{called(method)} ({method.ppl})" for method in methods.values())
    classes = f", {len(table.class_names)} classes" if table.class_names else ""
    console.print(
        f"[bold]{escape(plan.name)}[/]{size}, on [bold]{escape(table.name)}[/]: {len(plan.train)} training and "
        f"{len(plan.test)} test rows, {table.x.shape[1]} features{classes}"
    )
    tell_of_reading(console, table)
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


def called(method: Method) -> str:
    member = getattr(method, "member", None)
    return method.name if member is None else f"{method.name} of {called(member)}"


def _keep_notes(folder: Path, result: Comparison) -> None:
    """Write the texts that are too long for a terminal to a file beside the others."""
    (folder / NOTES).write_text(result.markdown(), encoding="utf-8")


def _kept(folder: Path, result: Comparison) -> list[str]:
    figure = ["figure.png"] if (folder / "figure.png").is_file() else []
    return [*(f"{name}.nc" for name in result.trees), "comparison.csv", NOTES, *figure, "comparison.json"]
