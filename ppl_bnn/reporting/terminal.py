"""Tables of methods in a terminal; a comparison with two of them, blanks and doubts, and conclusions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from ppl_bnn.evaluation.comparison.columns import (
    FIDELITY,
    PREDICTION,
    Column,
    cell,
    is_alarm,
    noise_floors,
    number,
    tables,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from ppl_bnn.evaluation.comparison.comparison import Comparison

# Largest number of clauses of the notes shown about one method; a file has the rest.
CLAUSES = 3


_LEGENDS = {
    "regression": "cover, width: of the central 90 % intervals.",
    "classification": "ECE: calibration error of the most probable class.",
}


def show(console: Console, comparison: Comparison, elsewhere: str = "comparison.notes") -> None:
    """Print a comparison; elsewhere: where all of its notes can be found."""
    from rich.text import Text

    task, reference = comparison.task, comparison.reference
    (title, prediction), (far, fidelity) = tables(comparison).items()
    unit = f" {comparison.data['target_name']} in its own units;" if task == "regression" else ""
    console.print()
    print_table(console, comparison.table, title, [Column("system", "ppl"), *prediction])
    _aside(
        console,
        f"↑ larger is better, ↓ smaller; ± standard error;{unit} log score and ELPD in nats. "
        f"{_LEGENDS[task]} LOO: leave-one-out over training rows, rank 0 is best. -: not defined, or see below.",
    )
    print_table(console, comparison.table, far, fidelity, reference)
    explained = (
        "R-hat and ESS in function space, for chains only. k-hat: the approximation as importance proposal, "
    )
    if reference in comparison.predictions:
        explained = (
            f"sd: epistemic standard deviation of {reference}; ratio: the method's over that; noise floor: two halves "
            f"of {reference} against each other. {explained}"
        )
    _aside(console, f"{explained}good below 0.7.")
    for name, why in comparison.failures.items():
        console.print(Text.assemble((f"{name} failed: ", "bold red"), (why, "red")))
    sources = {column.source for column in (*prediction, *fidelity)}
    lines, cut = notes_by_method(comparison.notes, sources)
    for name, text in lines.items():
        console.print(Text.assemble((f"{name}: ", "bold"), text))
    if cut:
        _aside(console, f"More about {', '.join(cut)} in {elsewhere}.")
    elif lines or comparison.failures:
        console.print()
    console.print(Text(comparison.summary()))
    console.print()


# Columns of the rows that appear while a comparison runs, and the width of one with a standard error and without.
_RUNNING = ("ppl", "log_score", "rmse", "accuracy", "converged", "gap_mean", "run_seconds")
_WIDTH_WITH_ERROR, _WIDTH = 15, 8


def show_latest_row(console: Console, comparison: Comparison) -> None:
    """Print the last row of a comparison that is still running; the first one comes with the headings."""
    known = {column.source: column for column in (Column("system", "ppl"), *PREDICTION, *FIDELITY)}
    columns = [known[source] for source in _RUNNING if source in comparison.table]
    grid = _grid(comparison.table.tail(1), columns, None)
    # Each row is a table of its own: equal widths align them.
    names = (*comparison.table.index, *comparison.missing)
    widths = [max(len(str(name)) for name in names)]
    widths += [_WIDTH_WITH_ERROR if column.error in comparison.table else _WIDTH for column in columns]
    for column, width in zip(grid.columns, widths, strict=True):
        column.min_width = max(width, column.min_width or 0)
    grid.show_header = len(comparison.table) == 1
    # A row that is wider than the terminal goes on in its next line, with all of its digits.
    console.print(grid, width=10_000, crop=False)


def notes_by_method(
    notes: Mapping[tuple[str, str], str], shown: set[str]
) -> tuple[dict[str, str], list[str]]:
    """Method -> the notes about its shown columns, each clause once; and the methods of which some were left out."""
    # Method -> clause -> the column whose note has it first.
    found: dict[str, dict[str, str]] = {}
    for (name, column), note in notes.items():
        for clause in note.rstrip(".").split("; ") if column in shown else ():
            found.setdefault(name, {}).setdefault(clause, column)
    lines = {}
    for name, clauses in found.items():
        sentences = groupby(islice(clauses, CLAUSES), key=clauses.__getitem__)
        texts = ("; ".join(each) for _, each in sentences)
        lines[name] = " ".join(f"{text[:1].upper()}{text[1:]}." for text in texts)
    return lines, [name for name, clauses in found.items() if len(clauses) > CLAUSES]


def _aside(console: Console, text: str) -> None:
    console.print(text, style="dim", markup=False)
    console.print()


def print_table(
    console: Console, table: pd.DataFrame, title: str, columns: Sequence[Column], reference: str | None = None
) -> None:
    """Print a table of methods, without its last spare columns if the terminal is too narrow.

    Gaps to a `reference` have a row with their noise floors.
    """
    kept, unbounded = list(columns), console.options.update(width=10_000)
    while console.measure(grid := _grid(table, kept, reference), options=unbounded).maximum > console.width:
        spare = [column for column in kept if column.spare]
        if not spare:
            break
        kept.remove(spare[-1])
    if left_out := len(columns) - len(kept):
        title += f" ({left_out} columns do not fit)"
    console.print(title, style="bold", markup=False)
    console.print(grid)


def _grid(table: pd.DataFrame, columns: Sequence[Column], reference: str | None) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("method", no_wrap=True, min_width=11)
    for column in columns:
        grid.add_column(column.heading, justify="left" if column.source == "ppl" else "right", no_wrap=True)
    for name, row in table.to_dict(orient="index").items():
        texts = ((cell(row, column), is_alarm(row, column)) for column in columns)
        cells = (f"[bold red]{text}[/]" if alarm else text for text, alarm in texts)
        grid.add_row(escape(str(name)), *cells, style="red" if row.get("failure") else None)
    if columns[0].source == "gap_mean" and (floors := noise_floors(table, reference)):
        grid.add_row("noise floor", *(number(value, 2) for value in floors.values()), style="dim")
    return grid
