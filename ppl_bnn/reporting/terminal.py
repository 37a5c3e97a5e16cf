"""A comparison in a terminal: its table in two halves, blanks and doubts, and conclusions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from ppl_bnn.evaluation.comparison.comparison import Comparison

# Largest number of clauses of the notes shown about one method; a file has the rest.
CLAUSES = 3


@dataclass(frozen=True)
class Column:
    """A column as shown; negative `digits` are significant ones; `spare` ones are left out where space is short.

    Of numbers below `least` only that is shown.
    """

    heading: str
    source: str
    digits: int = 2
    error: str = ""
    spare: bool = False
    least: float = -math.inf

    @property
    def in_one_line(self) -> str:
        """The heading without the hyphens that a narrow terminal needs."""
        return self.heading.replace("-\n", "").replace("\n", " ")


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
    """Print a comparison; elsewhere: where all of its notes can be found."""
    from rich.text import Text

    task, reference = comparison.task, comparison.reference
    (title, prediction), (far, fidelity) = tables(comparison).items()
    unit = f" {comparison.data['target_name']} in its own units;" if task == "regression" else ""
    console.print()
    _print_grid(console, comparison, title, prediction, ppl=True)
    _aside(
        console,
        f"↑ larger is better, ↓ smaller; ± standard error;{unit} log score and ELPD in nats. "
        f"{_LEGENDS[task]} LOO: leave-one-out over training rows, rank 0 is best. -: not defined, or see below.",
    )
    _print_grid(console, comparison, far, fidelity)
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


def tables(comparison: Comparison) -> dict[str, Sequence[Column]]:
    """Title -> columns of two tables: how well each method predicts, then its distance to the reference and cost."""
    rows = comparison.data.get("test_rows", len(comparison.test_targets))
    fidelity, far = FIDELITY, f"How far it is from {comparison.reference}"
    if comparison.reference not in comparison.predictions:
        fidelity, far = [column for column in FIDELITY if not column.source.startswith("gap")], "Convergence"
    return {
        f"How well it predicts {rows} test rows": PREDICTION[comparison.task],
        f"{far}, and what it cost": fidelity,
    }


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


def _print_grid(
    console: Console, comparison: Comparison, title: str, columns: Sequence[Column], ppl: bool = False
) -> None:
    """Print a table, without its last spare columns if the terminal is too narrow; ppl: with the system."""
    kept = list(columns)
    unbounded = console.options.update(width=10_000)
    while console.measure(grid := _grid(comparison, kept, ppl), options=unbounded).maximum > console.width:
        spare = [column for column in kept if column.spare]
        if not spare:
            break
        kept.remove(spare[-1])
    if left_out := len(columns) - len(kept):
        title += f" ({left_out} columns do not fit)"
    console.print(title, style="bold", markup=False)
    console.print(grid)


def _grid(comparison: Comparison, columns: Sequence[Column], ppl: bool) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("\nmethod", no_wrap=True, min_width=11)
    if ppl:
        grid.add_column("\nsystem", no_wrap=True)
    for column in columns:
        heading = column.heading if "\n" in column.heading else f"\n{column.heading}"
        grid.add_column(heading, justify="right", no_wrap=True)
    for name, row in comparison.table.to_dict(orient="index").items():
        cells = [*([str(row["ppl"] or "-")] if ppl else []), *(cell(row, column) for column in columns)]
        grid.add_row(escape(str(name)), *cells, style="red" if row["failure"] else None)
    if columns[0].source == "gap_mean" and (floors := noise_floors(comparison.table, comparison.reference)):
        grid.add_row("noise floor", *(number(value, 2) for value in floors.values()), style="dim")
    return grid


def noise_floors(table: pd.DataFrame, reference: str | None) -> dict[str, float]:
    """Column of a gap -> its noise floor, which the reference or another row has; empty without a reference."""
    sources = {"gap_mean": "gap_mean_floor", "gap_sd_ratio": "gap_sd_floor"}
    floors: Any = table.reindex(columns=list(sources.values())).dropna()
    if reference not in table.index or not len(floors):
        return {}
    row = floors.loc[reference] if reference in floors.index else floors.iloc[0]
    return {column: float(row[source]) for column, source in sources.items()}


def cell(row: Mapping[Any, Any], column: Column) -> str:
    """One cell of the table as text: "-" for a blank, or for a column that the table does not have."""
    value = row.get(column.source, math.nan)
    if isinstance(value, str):
        return {"yes": "yes", "": "-"}.get(value, f"[bold red]{value}[/]")
    return "-" if math.isnan(value) else in_digits(row, column)


def in_digits(row: Mapping[Any, Any], column: Column) -> str:
    """A number of the table with its standard error, as text."""
    if row[column.source] < column.least:
        return f"< {column.least:g}"
    error = float(row.get(column.error, math.nan))
    text = number(row[column.source], column.digits)
    return text if math.isnan(error) else f"{text} ± {number(error, column.digits)}"


def number(value: float, digits: int) -> str:
    """A number as text; digits: after the point, or significant digits if negative."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if digits < 0:
        digits = max(0, -digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}" if digits == 0 else f"{value:.{digits}f}"
    return text.replace(",", " ")
