"""A comparison in a terminal: its table in two halves, blanks and doubts, and conclusions.

`ppl_bnn.evaluation.comparison.table.COLUMNS` describes each column; here they get short headings and few digits.
If a terminal is too narrow, the columns marked `spare` are left out from the last to the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ppl_bnn.evaluation.comparison.comparison import Comparison

# Largest number of clauses of the notes shown about one method; a file has the rest.
CLAUSES = 3


@dataclass(frozen=True)
class Column:
    """A column as it is shown.

    Parameters
    ----------
    heading : str
        Its heading.
    source : str
        Its name in the table.
    digits : int
        Digits after the point; a negative number means significant digits.
    error : str
        Name of the column of its standard error.
    spare : bool
        Whether it may be left out on a narrow terminal.
    """

    heading: str
    source: str
    digits: int = 2
    error: str = ""
    spare: bool = False


_LOO = (
    Column("LOO ELPD\n↑", "elpd_loo", 1, "elpd_loo_se"),
    Column("LOO\nmax k", "pareto_k_loo", 2, spare=True),
    Column("LOO\nrank", "loo_rank", 0, spare=True),
    Column("stack\nweight", "loo_weight", 2, spare=True),
)
PREDICTION = {
    "regression": (
        Column("log score\n↑", "log_score", 3, "log_score_se"),
        Column("RMSE\n↓", "rmse", -3),
        Column("CRPS\n↓", "crps", -3, spare=True),
        Column("90 %\ncover", "coverage_90", 2),
        Column("90 %\nwidth", "width_90", -3, spare=True),
        *_LOO,
    ),
    "classification": (
        Column("log score\n↑", "log_score", 3, "log_score_se"),
        Column("accuracy\n↑", "accuracy", 3),
        Column("Brier\n↓", "brier", 3),
        Column("ECE\n↓", "ece", 3, spare=True),
        *_LOO,
    ),
}
FIDELITY = (
    Column("mean off\nby (sd)", "gap_mean", 2),
    Column("sd\nratio", "gap_sd_ratio", 2),
    Column("con-\nverged", "converged"),
    Column("R-hat\nmax", "r_hat", 3),
    Column("ESS\nmin", "ess_min", 0),
    Column("k-hat", "k_hat", 2),
    Column("compile\n(s)", "compile_seconds", 1, spare=True),
    Column("run\n(s)", "run_seconds", 1),
    Column("predict\n(s)", "predict_seconds", 1, spare=True),
    Column("gradients", "gradient_evaluations", 0, spare=True),
    Column("memory\n(MB)", "peak_memory", 0, spare=True),
)
_LEGENDS = {
    "regression": "cover, width: of the central 90 % intervals.",
    "classification": "ECE: calibration error of the most probable class.",
}


def show(console: Console, comparison: Comparison, elsewhere: str = "comparison.notes") -> None:
    """Print a comparison.

    Parameters
    ----------
    console : Console
        Where to print.
    comparison : Comparison
        The comparison.
    elsewhere : str
        Where all of its notes can be found.
    """
    from rich.text import Text

    task, rows = comparison.task, comparison.data["test_rows"]
    reference = comparison.reference if comparison.reference in comparison.predictions else None
    unit = f" {comparison.data['target_name']} in its own units;" if task == "regression" else ""
    console.print()
    _print_grid(console, comparison, f"How well it predicts {rows} test rows", list(PREDICTION[task]))
    _aside(
        console,
        f"↑ larger is better, ↓ smaller; ± standard error;{unit} log score and ELPD in nats. "
        f"{_LEGENDS[task]} LOO: leave-one-out over training rows, rank 0 is best. -: not defined, or see below.",
    )
    aim = f"How far it is from {reference}" if reference else "Convergence"
    fidelity = [column for column in FIDELITY if reference or not column.source.startswith("gap")]
    _print_grid(console, comparison, f"{aim}, and what it cost", fidelity, named=False)
    measured = (
        f"sd: epistemic standard deviation of {reference}; ratio: the method's over that; noise floor: two halves "
        f"of {reference} against each other. "
        if reference
        else ""
    )
    _aside(
        console,
        f"{measured}R-hat and ESS in function space, for chains only. k-hat: the approximation as importance "
        "proposal, good below 0.7.",
    )
    for name, why in comparison.failures.items():
        console.print(Text.assemble((f"{name} failed: ", "bold red"), (why, "red")))
    shown = {column.source for column in (*PREDICTION[task], *fidelity)}
    lines, cut = notes_by_method(comparison.notes, shown)
    for name, text in lines.items():
        console.print(Text.assemble((f"{name}: ", "bold"), text))
    if cut:
        _aside(console, f"More about {', '.join(cut)} in {elsewhere}.")
    elif lines or comparison.failures:
        console.print()
    console.print(Text(comparison.summary()))
    console.print()


def notes_by_method(
    notes: Mapping[tuple[str, str], str], shown: set[str]
) -> tuple[dict[str, str], list[str]]:
    """Method -> the notes about its shown columns, each clause once; and the methods of which some were left out."""
    found: dict[str, list[list[str]]] = {}
    for (name, column), note in notes.items():
        if column in shown:
            sentences = found.setdefault(name, [])
            said = {clause for sentence in sentences for clause in sentence}
            new = [clause for clause in note.rstrip(".").split("; ") if clause not in said]
            if new:
                sentences.append(new)
    lines, cut = {}, []
    for name, sentences in found.items():
        left, kept = CLAUSES, []
        for clauses in sentences:
            if left > 0:
                text = "; ".join(clauses[:left])
                kept.append(text[0].upper() + text[1:] + ".")
            left -= len(clauses)
        lines[name] = " ".join(kept)
        if left < 0:
            cut.append(name)
    return lines, cut


def _aside(console: Console, text: str) -> None:
    from rich.text import Text

    console.print(Text(text, style="dim"))
    console.print()


def _print_grid(
    console: Console, comparison: Comparison, title: str, columns: list[Column], named: bool = True
) -> None:
    from rich.text import Text

    kept = list(columns)
    grid = _grid(comparison, kept, named)
    unbounded = console.options.update(width=10_000)
    while console.measure(grid, options=unbounded).maximum > console.width and any(c.spare for c in kept):
        kept.remove([column for column in kept if column.spare][-1])
        grid = _grid(comparison, kept, named)
    left_out = len(columns) - len(kept)
    if left_out:
        title += f" ({left_out} columns left out for want of room)"
    console.print(Text(title, style="bold"))
    console.print(grid)


def _grid(comparison: Comparison, columns: list[Column], named: bool) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("\nmethod", no_wrap=True, min_width=11)
    if named:
        grid.add_column("\nsystem", no_wrap=True)
    for column in columns:
        grid.add_column(
            column.heading if "\n" in column.heading else f"\n{column.heading}", justify="right", no_wrap=True
        )
    for name, row in comparison.table.to_dict(orient="index").items():
        cells = [cell(row, column) for column in columns]
        system = [str(row["ppl"] or "-")] if named else []
        grid.add_row(escape(str(name)), *system, *cells, style="red" if row["failure"] else None)
    if columns[0].source == "gap_mean":
        floors = comparison.table[["gap_mean_floor", "gap_sd_floor"]].dropna()
        if len(floors):
            grid.add_row("noise floor", *(number(float(value), 2) for value in floors.iloc[0]), style="dim")
    return grid


def cell(row: Mapping[Any, Any], column: Column) -> str:
    """One cell of the table as text: "-" for a blank."""
    value = row[column.source]
    if isinstance(value, str):
        return {"yes": "yes", "": "-"}.get(value, f"[bold red]{value}[/]")
    if math.isnan(value):
        return "-"
    error = row[column.error] if column.error else math.nan
    text = number(value, column.digits)
    return text if math.isnan(error) else f"{text} ± {number(error, column.digits)}"


def number(value: float, digits: int) -> str:
    """A number as text.

    Parameters
    ----------
    value : float
        The number.
    digits : int
        Digits after the point, or significant digits if negative.

    Returns
    -------
    str
    """
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if digits < 0:
        digits = max(0, -digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}" if digits == 0 else f"{value:.{digits}f}"
    return text.replace(",", " ")
